"""The damped curvature as a symmetric matrix: products, inverses, roots, samples, determinants."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from kfac._capture.value_and_grad import check_basis
from kfac._checks import check_layers, check_range
from kfac._curvature.blocks import Group, check_factors, group_layers
from kfac._curvature.eigh import Eigh, rotate
from kfac._curvature.ekfac import Ekfac, Moments
from kfac._curvature.inverse import Inverse, check_inverse, damping_of_blocks
from kfac._curvature.refresh import one_by_one
from kfac._factors import Eigen, Factors, Kronecker
from kfac._layers import Layer, Layers, map_by_path
from kfac._optimizer.state import KfacState, blocks_of, find_state, match_leaves
from kfac.curvature._matrix import Linear, scalar


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Block:
    """The matrix of one layer, `Q diag(values) Q^T`, over the layer's parameters as matrices `[k, d_out, d_in]`.

    `k` counts copies of a stacked layer, or pieces of a kernel that is cut, which have a matrix each. A unit-wise layer
    is a stack of its channels, `[channels, 1, p]`. Products take and return such arrays; `block @
    layer.to_pieces(layer.to_matrix(leaves))` is one.

    Attributes:
      basis: the eigenvectors `Q = Q_A (x) Q_G`, with an array `[k, d]` for a side whose eigenvectors are the identity.
      values: the eigenvalues, `[k, d_out, d_in]`.
    """

    basis: Kronecker
    values: jax.Array

    def __matmul__(self, matrices: jax.Array) -> jax.Array:
        """`Q diag(values) Q^T v`, of matrices with as many entries as `values`."""
        wide = matrices.reshape(self.values.shape).astype(jnp.result_type(matrices, self.values))
        turned = self.values * rotate(wide, self.basis, "float32", back=False)
        return rotate(turned, self.basis, "float32", back=True).reshape(matrices.shape)

    def map(self, fn: Callable[[jax.Array], jax.Array]) -> Block:
        """The function `fn` of the matrix: the same eigenvectors, other eigenvalues."""
        return dataclasses.replace(self, values=fn(self.values))

    def diagonal(self) -> jax.Array:
        """`[k, d_out, d_in]`."""
        squares = jax.tree.map(jnp.square, self.basis)
        return rotate(self.values, squares, "float32", back=True)

    def to_dense(self) -> jax.Array:
        """`[k, p, p]` with `p = d_in d_out`, in the order of `kron(A, G)`, that of `kfac.curvature.exact`."""
        k, d_out, d_in = self.values.shape
        units = jnp.eye(d_out * d_in, dtype=self.values.dtype).reshape(-1, 1, d_in, d_out).swapaxes(-1, -2)
        columns = jax.vmap(self.__matmul__)(jnp.broadcast_to(units, (d_out * d_in, k, d_out, d_in)))
        return columns.swapaxes(-1, -2).reshape(d_out * d_in, k, d_out * d_in).transpose(1, 2, 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Operator(Linear):
    """A symmetric matrix over the parameters, block diagonal by layer: what `kfac.curvature.operator` returns.

    A pytree: it goes through `jax.jit`, `jax.vmap(op.matvec)` works on stacked trees, and its arrays can be placed on
    devices. Trees have the structure of the parameters. Skipped parameters are not in the matrix: what it returns for
    them is zero, and no determinant or trace counts them.

    Attributes:
      blocks: the matrix of each layer, by name.
      layers: what `find_layers` returned.
    """

    blocks: dict[str, Block]
    layers: Layers = dataclasses.field(metadata={"static": True})

    def matvec(self, tree: Any) -> Any:
        """The product with a tree of arrays like the parameters; each result has the dtype of its leaf."""
        leaves = match_leaves(self.layers, tree, "tree")
        new: dict[str, jax.Array] = {}
        for layer in self._layers():
            if layer.params[0] in leaves:
                matrix = layer.to_matrix([leaves[path] for path in layer.params])
                new |= _leaves(layer, self.blocks[layer.name] @ layer.to_pieces(matrix))
        return map_by_path(lambda path, leaf: new.get(path, jnp.zeros_like(leaf)).astype(leaf.dtype), tree)

    def map(self, fn: Callable[[jax.Array], jax.Array]) -> Operator:
        """The function `fn` of the matrix: the same eigenvectors, and eigenvalues `fn(values)`, elementwise."""
        return dataclasses.replace(self, blocks={name: block.map(fn) for name, block in self.blocks.items()})

    def __mul__(self, scale: jax.typing.ArrayLike) -> Operator:
        """The matrix times a number."""
        return self.map(functools.partial(jnp.multiply, scalar(scale)))

    __rmul__ = __mul__

    def __add__(self, other: Any) -> Any:
        """The matrix plus a number times the identity, such as the precision of a prior; or plus another matrix."""
        if isinstance(other, Linear):
            return super().__add__(other)
        return self.map(functools.partial(jnp.add, scalar(other)))

    __radd__ = __add__

    def inv(self) -> Operator:
        """The inverse. Where an eigenvalue is zero, which damping prevents, it is infinite."""
        return self.map(lambda values: 1 / values)

    def sqrt(self) -> Operator:
        """The symmetric square root."""
        return self.map(jnp.sqrt)

    def inv_sqrt(self) -> Operator:
        """The inverse of the symmetric square root."""
        return self.map(lambda values: 1 / jnp.sqrt(values))

    def trace(self) -> jax.Array:
        """The sum of the eigenvalues, a scalar."""
        return jnp.sum(self._values())

    def logdet(self) -> jax.Array:
        """The logarithm of the determinant, a scalar."""
        return jnp.sum(jnp.log(self._values()))

    def eigvalsh(self) -> jax.Array:
        """All eigenvalues, in growing order, `[size]`."""
        return jnp.sort(self._values())

    @property
    def size(self) -> int:
        """How many parameters the matrix is over."""
        return sum(layer.num_params for layer in self._layers())

    def diagonal(self) -> Any:
        """The diagonal, as a tree of parameters."""
        return self._tree({layer.name: self.blocks[layer.name].diagonal() for layer in self._layers()})

    def sample(self, key: jax.Array) -> Any:
        """A draw from the normal distribution with mean zero and this matrix for its covariance, as a tree.

        Args:
          key: a PRNG key. `jax.vmap(op.sample)(jax.random.split(key, 8))` draws eight.
        """
        noise = {}
        for layer, layer_key in zip(self._layers(), jax.random.split(key, max(1, len(self.blocks))), strict=False):
            block = self.blocks[layer.name].map(jnp.sqrt)
            normal = jax.random.normal(layer_key, block.values.shape, block.values.dtype)
            noise[layer.name] = rotate(block.values * normal, block.basis, "float32", back=True)
        return self._tree(noise)

    def block(self, name: str) -> Block:
        """The matrix of one layer.

        Raises:
          ValueError: there is no such layer, or it is skipped.
        """
        if name not in self.blocks:
            raise ValueError(f"no layer {name!r} in the operator; there are {', '.join(self.blocks)}")
        return self.blocks[name]

    @property
    def near(self) -> Operator | None:
        """The matrix itself, where it is over all parameters."""
        return self if len(self.blocks) == len(self.layers) else None

    def like(self) -> Any:
        """A tree of the shapes and dtypes of the parameters."""
        dtype = jnp.result_type(*(block.values for block in self.blocks.values()))
        shapes = {path: shape for layer in self.layers for path, shape in zip(layer.params, layer.shapes, strict=True)}
        leaves = [jax.ShapeDtypeStruct(shapes[path], dtype) for path in self.layers.paths]
        return jax.tree.unflatten(self.layers.structure, leaves)

    def _layers(self) -> list[Layer]:
        return [layer for layer in self.layers if layer.name in self.blocks]

    def _values(self) -> jax.Array:
        # The smallest eigenvalues of the last pieces are those of the zeros that fill these up: they are cut off. Those
        # of a diagonal stand in the order of its rows, with these zeros behind.
        def falling(layer):
            turned = [axis for axis, side in ((1, "G"), (2, "A")) if side not in layer.diagonal]
            return jnp.flip(self.blocks[layer.name].values, turned)

        return jnp.concatenate([layer.from_pieces(falling(layer)).ravel() for layer in self._layers()])

    def _tree(self, matrices: dict[str, jax.Array]) -> Any:
        """The tree of parameters with the matrices of its layers."""
        leaves: dict[str, jax.Array] = {}
        for layer in self._layers():
            leaves |= _leaves(layer, matrices[layer.name])
        return map_by_path(lambda path, x: leaves.get(path, jnp.zeros(x.shape, x.dtype)), self.like())


def _leaves(layer: Layer, matrix: jax.Array) -> dict[str, jax.Array]:
    matrix = layer.from_pieces(matrix) if layer.pieces > 1 else matrix.reshape(-1, layer.d_out, layer.d_in)
    return dict(zip(layer.params, layer.from_matrix(matrix), strict=True))


def operator(
    layers: Layers,
    source: Any,
    *,
    damping: float | jax.Array | None = None,
    inverse: Inverse | None = None,
    basis: dict[str, Kronecker] | None = None,
) -> Operator:
    """The damped curvature as a linear operator: what an optimizer preconditions with, or statistics of one's own.

    With damping `l` the matrix of a Kronecker layer is, as its inverse has it,

    - `kfac.Eigh()`: `A (x) G + l I`;
    - `kfac.Cholesky()`: `(A + pi sqrt(l) I) (x) (G + sqrt(l)/pi I)` (Martens & Grosse 2015, section 6.3);
    - `kfac.Ekfac()`: the eigenvectors of `A (x) G`, with second moments of per-example gradients plus `l` for
      eigenvalues (George et al. 2018), where the layer has such.

    Unit-wise and diagonal blocks are `F + l I`. The decompositions are made here, and take several times as long as the
    inverses of a step.

    Args:
      layers: what `find_layers` returned.
      source: a `Factors`, from `value_and_grad` or `estimate`; or the state of an optimizer, whose running averages are
        taken, with the corrected eigenvalues of `Ekfac`. `kfac.curvature.operator(layers, opt_state).inv() @ grads` is
        what `scale_by_kfac` makes of `grads` after a refresh. A state of several devices goes through
        `kfac.state.gather_state`.
      damping: not negative; of an inverse that is `relative`, in units of the mean eigenvalue. By default 0 with
        factors, and that of its last step with a state.
      inverse: one of the three above; by default that of the state. With factors `Eigh()`, or `Ekfac()` with `basis`.
      basis: with factors that have moments, the eigenvectors these were taken in.

    Returns:
      An `Operator`.

    Raises:
      ValueError: an argument is out of range, is not one for these layers, or has no effect.
    """
    check_layers(layers)
    if damping is not None:
        check_range("damping", damping, "[0, inf)")
    if inverse is not None:
        check_inverse(inverse)
    given = jnp.asarray(0.0 if damping is None else damping)
    dampings = given, given  # of blocks with owners, and of the others
    if isinstance(source, Factors):
        inverse, stacks = _from_factors(layers, source, inverse, basis)
    else:
        if basis is not None:
            raise ValueError("basis is for factors: the state of an optimizer has its own")
        state = find_state(source, "source")
        inverse, stacks = _from_state(layers, state, inverse)
        if damping is None:
            last = state.metrics.damping
            dampings = last, last * state.unitwise_damping
    blocks: dict[str, Block] = {}
    for group, statistics, inverse_state in stacks:
        amount = damping_of_blocks(group.inverse_of(inverse), statistics, dampings[not group.owned])
        spectra = one_by_one(functools.partial(_spectrum, group.inverse_of(inverse)), inverse_state, statistics, amount)
        for layer, part in group.split(spectra):  # the channels of a unit-wise layer are a stack of their own
            blocks[layer.name] = jax.tree.map(lambda x: x[0], part) if part.values.ndim > 3 else part
    return Operator({layer.name: blocks[layer.name] for layer in layers if layer.name in blocks}, layers)


def _spectrum(inverse: Inverse, *block: Any) -> Block:
    stack_of_one = Block(*inverse.spectrum(*jax.tree.map(lambda x: x[None], block)))
    return jax.tree.map(lambda x: x[0], stack_of_one)


# How blocks are inverted; and each group with stacks of its statistics, and of its inverse where that has moments.
Source = tuple[Inverse, list[tuple[Group, Any, Any]]]


def _from_factors(layers: Layers, factors: Any, inverse: Inverse | None, basis: Any) -> Source:
    check_factors(factors, layers)
    factors = Factors({name: block.combined() for name, block in factors.items()})
    if basis is None:
        if inverse is None and any(block.moments is not None for block in factors.values()):
            raise ValueError("factors have moments: pass the basis= of these, or inverse=kfac.Eigh() to leave them out")
        inverse = inverse or Eigh()
        if inverse.takes_moments:
            raise ValueError(f"inverse={inverse!r} of factors needs the basis= that their moments were taken in")
        groups = [group for group in group_layers(layers) if group.captured]
        return inverse, [(group, group.stack_factors(factors), None) for group in groups]
    inverse = inverse or Ekfac()
    if not inverse.takes_moments:
        raise ValueError(f"inverse={inverse!r} has no use for basis=, which belongs to kfac.Ekfac()")
    check_basis(basis, layers)
    blocks: list[tuple[Group, Any, Any]] = []
    for layer in layers.with_factors:
        group = Group(layer.name, (layer,))
        stack: Any = group.stack_factors(factors)
        inverse_state: Any = None
        if layer.correctable:
            inverse.check(layer, factors[layer.name])
            vectors, moments = group.block.stack(layer, basis[layer.name]), stack.moments
            a, g = (Eigen(q, jnp.zeros(q.shape[:2], q.dtype)) for q in (vectors.A, vectors.G))
            inverse_state = Kronecker(a, g, Moments(moments, jnp.ones_like(moments[:, 0, 0])))
        blocks.append((group, stack, inverse_state))
    return inverse, blocks


def _from_state(layers: Layers, state: KfacState, inverse: Inverse | None) -> Source:
    of_state = state.settings.inverse if state.owned else inverse or Eigh()
    # The damping of the state is in the units that its inverse has.
    inverse = dataclasses.replace(inverse, relative=of_state.relative) if inverse else of_state
    if inverse.takes_moments and inverse != of_state:
        raise ValueError(f"inverse={inverse!r}, but the state is that of an optimizer with inverse={of_state!r}")
    pairs = blocks_of(state, layers, "source")
    return inverse, [
        (g, block.factors, block.inverse if g.inverse_of(inverse).takes_moments else None) for g, block in pairs
    ]


def averaged_factors(opt_state: Any, layers: Layers) -> Factors:
    """The running averages of an optimizer, by layer: bias-corrected, as its inverses are made of.

    Args:
      opt_state: holds the one state of an optimizer on one device; that of several goes through `gather_state`.
      layers: what `find_layers` returned.

    Returns:
      A `Factors`, with zeros before the first statistics. With `inverse=kfac.Ekfac()` without its moments, which
      `kfac.curvature.operator(layers, opt_state)` has.

    Raises:
      ValueError: there is no K-FAC state, or more than one, or it is not one for these layers.
    """
    check_layers(layers)
    blocks: dict[str, Any] = {}
    for group, block in blocks_of(find_state(opt_state, "opt_state"), layers, "opt_state"):
        blocks |= {layer.name: group.block.unstack(layer, stack) for layer, stack in group.split(block.factors)}
    return Factors({layer.name: blocks[layer.name] for layer in layers.with_factors})
