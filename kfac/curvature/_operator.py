"""The damped block-diagonal curvature as a linear operator: products, inverses, roots, samples and determinants."""

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
    """The curvature block of a layer, `k` matrices in the form `Q diag(values) Q^T`.

    The block multiplies arrays `[k, d_out, d_in]`. Each copy in a stacked layer and each piece of a split kernel has
    its own matrix; `k` counts these matrices. A unit-wise layer has a matrix per channel, so its arrays are
    `[channels, 1, p]`. Example: `block @ layer.to_pieces(layer.to_matrix(leaves))`.

    Attributes:
      basis: the eigenvectors `Q = Q_A (x) Q_G`, an `Eigen` per side. A side whose eigenvectors are the identity has an
        array `[k, d]` instead.
      values: the eigenvalues, `[k, d_out, d_in]`.
    """

    basis: Kronecker
    values: jax.Array

    def __matmul__(self, matrices: jax.Array) -> jax.Array:
        """Compute `Q diag(values) Q^T v` for an array `v` with the same number of entries as `values`."""
        wide = matrices.reshape(self.values.shape).astype(
            jnp.result_type(matrices, self.values)
        )
        turned = self.values * rotate(wide, self.basis, "float32", back=False)
        return rotate(turned, self.basis, "float32", back=True).reshape(matrices.shape)

    def map(self, fn: Callable[[jax.Array], jax.Array]) -> Block:
        """Apply `fn` to the eigenvalues; the eigenvectors stay the same."""
        return dataclasses.replace(self, values=fn(self.values))

    def diagonal(self) -> jax.Array:
        """Return the diagonal entries, `[k, d_out, d_in]`."""
        squares = jax.tree.map(jnp.square, self.basis)
        return rotate(self.values, squares, "float32", back=True)

    def to_dense(self) -> jax.Array:
        """Return dense matrices `[k, p, p]`, `p = d_in d_out`, in the `kron(A, G)` order of `kfac.curvature.exact`."""
        k, d_out, d_in = self.values.shape
        units = (
            jnp.eye(d_out * d_in, dtype=self.values.dtype)
            .reshape(-1, 1, d_in, d_out)
            .swapaxes(-1, -2)
        )
        columns = jax.vmap(self.__matmul__)(
            jnp.broadcast_to(units, (d_out * d_in, k, d_out, d_in))
        )
        return (
            columns.swapaxes(-1, -2)
            .reshape(d_out * d_in, k, d_out * d_in)
            .transpose(1, 2, 0)
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Operator(Linear):
    """A symmetric block-diagonal matrix over the parameters, with a block per layer.

    `kfac.curvature.operator` returns it. An `Operator` is a pytree: it passes through `jax.jit`, its arrays can be
    placed on devices, and `jax.vmap(op.matvec)` multiplies stacked trees. Trees have the parameters' structure.

    Skipped parameters have no block. An operator from a `Factors` also has no blocks for parameters with gradient
    factors. Products and samples are zero for parameters without a block. Trace, determinant and eigenvalues leave
    them out.

    Attributes:
      blocks: the block of each layer, by layer name.
      layers: the layers that `find_layers` returned.
    """

    blocks: dict[str, Block]
    layers: Layers = dataclasses.field(metadata={"static": True})

    def matvec(self, tree: Any) -> Any:
        """Multiply the matrix by a tree like the parameters; the result keeps the dtype of each leaf."""
        leaves = match_leaves(self.layers, tree, "tree")
        new: dict[str, jax.Array] = {}
        for layer in self._layers():
            if layer.params[0] in leaves:
                matrix = layer.to_matrix([leaves[path] for path in layer.params])
                new |= _leaves(layer, self.blocks[layer.name] @ layer.to_pieces(matrix))
        return map_by_path(
            lambda path, leaf: new.get(path, jnp.zeros_like(leaf)).astype(leaf.dtype),
            tree,
        )

    def map(self, fn: Callable[[jax.Array], jax.Array]) -> Operator:
        """Apply `fn` to the eigenvalues, elementwise; the eigenvectors stay the same."""
        return dataclasses.replace(
            self, blocks={name: block.map(fn) for name, block in self.blocks.items()}
        )

    def __mul__(self, scale: jax.typing.ArrayLike) -> Operator:
        """Multiply the matrix by a number."""
        return self.map(functools.partial(jnp.multiply, scalar(scale)))

    __rmul__ = __mul__

    def __add__(self, other: Any) -> Any:
        """Add another matrix, or a number times the identity, such as a prior's precision."""
        if isinstance(other, Linear):
            return super().__add__(other)
        return self.map(functools.partial(jnp.add, scalar(other)))

    __radd__ = __add__

    def inv(self) -> Operator:
        """Return the inverse. Zero eigenvalues become infinite; damping prevents this."""
        return self.map(lambda values: 1 / values)

    def sqrt(self) -> Operator:
        """Return the symmetric square root."""
        return self.map(jnp.sqrt)

    def inv_sqrt(self) -> Operator:
        """Return the inverse of the symmetric square root."""
        return self.map(lambda values: 1 / jnp.sqrt(values))

    def trace(self) -> jax.Array:
        """Return the sum of the eigenvalues, a scalar."""
        return jnp.sum(self._values())

    def logdet(self) -> jax.Array:
        """Return the log-determinant, a scalar."""
        return jnp.sum(jnp.log(self._values()))

    def eigvalsh(self) -> jax.Array:
        """Return all eigenvalues in ascending order, `[size]`."""
        return jnp.sort(self._values())

    @property
    def size(self) -> int:
        """The matrix dimension, which is the number of parameters with a block."""
        return sum(layer.num_params for layer in self._layers())

    def diagonal(self) -> Any:
        """Return the diagonal, a tree like the parameters."""
        return self._tree(
            {layer.name: self.blocks[layer.name].diagonal() for layer in self._layers()}
        )

    def sample(self, key: jax.Array) -> Any:
        """Draw a tree from the normal distribution with mean zero and this matrix as its covariance.

        Args:
          key: a PRNG key. `jax.vmap(op.sample)(jax.random.split(key, 8))` draws eight.
        """
        noise = {}
        for layer, layer_key in zip(
            self._layers(),
            jax.random.split(key, max(1, len(self.blocks))),
            strict=False,
        ):
            block = self.blocks[layer.name].map(jnp.sqrt)
            normal = jax.random.normal(
                layer_key, block.values.shape, block.values.dtype
            )
            noise[layer.name] = rotate(
                block.values * normal, block.basis, "float32", back=True
            )
        return self._tree(noise)

    def block(self, name: str) -> Block:
        """Return the block of the layer `name`.

        Raises:
          ValueError: the operator has no block with this name.
        """
        if name not in self.blocks:
            raise ValueError(
                f"no layer {name!r} in the operator; there are {', '.join(self.blocks)}"
            )
        return self.blocks[name]

    @property
    def near(self) -> Operator | None:
        """The operator itself as the preconditioner for sums, or None if a layer has no block."""
        return self if len(self.blocks) == len(self.layers) else None

    def like(self) -> Any:
        """Return the parameters' shapes, a tree of `jax.ShapeDtypeStruct`, with the common dtype of all blocks."""
        dtype = jnp.result_type(*(block.values for block in self.blocks.values()))
        shapes = {
            path: shape
            for layer in self.layers
            for path, shape in zip(layer.params, layer.shapes, strict=True)
        }
        leaves = [
            jax.ShapeDtypeStruct(shapes[path], dtype) for path in self.layers.paths
        ]
        return jax.tree.unflatten(self.layers.structure, leaves)

    def _layers(self) -> list[Layer]:
        return [layer for layer in self.layers if layer.name in self.blocks]

    def _values(self) -> jax.Array:
        # The last pieces of a split kernel are padded with zeros, whose eigenvalues are the smallest. In descending
        # order they come last, and `from_pieces` drops them. A diagonal factor's eigenvalues are in the order of its
        # rows, so its padding comes last already.
        def falling(layer):
            turned = [
                axis
                for axis, side in ((1, "G"), (2, "A"))
                if side not in layer.diagonal
            ]
            return jnp.flip(self.blocks[layer.name].values, turned)

        return jnp.concatenate(
            [layer.from_pieces(falling(layer)).ravel() for layer in self._layers()]
        )

    def _tree(self, matrices: dict[str, jax.Array]) -> Any:
        """Assemble a tree like the parameters from the matrices of the layers; zeros where a layer has no matrix."""
        leaves: dict[str, jax.Array] = {}
        for layer in self._layers():
            leaves |= _leaves(layer, matrices[layer.name])
        return map_by_path(
            lambda path, x: leaves.get(path, jnp.zeros(x.shape, x.dtype)), self.like()
        )


def _leaves(layer: Layer, matrix: jax.Array) -> dict[str, jax.Array]:
    matrix = (
        layer.from_pieces(matrix)
        if layer.pieces > 1
        else matrix.reshape(-1, layer.d_out, layer.d_in)
    )
    return dict(zip(layer.params, layer.from_matrix(matrix), strict=True))


def operator(
    layers: Layers,
    source: Any,
    *,
    damping: float | jax.Array | None = None,
    inverse: Inverse | None = None,
    basis: dict[str, Kronecker] | None = None,
) -> Operator:
    """Return the damped curvature of an optimizer state or of a `Factors` as a linear operator.

    The argument `inverse` sets the block of a Kronecker layer with damping `l`:

    - `kfac.Eigh()`: `A (x) G + l I`;
    - `kfac.Cholesky()`: `(A + pi sqrt(l) I) (x) (G + sqrt(l)/pi I)` (Martens & Grosse 2015, section 6.3);
    - `kfac.Ekfac()`: the eigenvectors of `A (x) G`. The eigenvalues are the second moments of per-example gradients
      plus `l` (George et al. 2018). A layer without moments has the block of `Eigh()`.

    Unit-wise and diagonal blocks are `F + l I`. This function decomposes the factors, which takes several times as long
    as a `Cholesky` refresh.

    Args:
      layers: the layers that `find_layers` returned.
      source: a `Factors` from `value_and_grad` or `estimate`, or an optimizer state. A state supplies its running
        averages and, with `Ekfac`, its corrected eigenvalues. Directly after a refresh,
        `kfac.curvature.operator(layers, opt_state).inv() @ grads` equals the output of `scale_by_kfac` for all
        parameters with a block. If the state is spread over several devices, pass the result of
        `kfac.state.gather_state`.
      damping: the damping `l`, not negative. If the inverse is `relative`, the unit is each block's mean eigenvalue.
        The default is 0 for a `Factors`. For a state, the default is the damping of the last step, times
        `unitwise_damping` for unit-wise and diagonal blocks.
      inverse: an inverse from the list above, or another `kfac.Inverse` with a `spectrum` method. The default is the
        state's inverse. For a `Factors`, the default is `Ekfac()` with `basis`, otherwise `Eigh()`. With a state, the
        operator takes the option `relative` from the state's inverse.
      basis: the eigenvectors in which the moments of a `Factors` were taken.

    Returns:
      An `Operator`.

    Raises:
      ValueError: an argument is out of range, does not match `layers`, or has no effect, or the inverse has no
        `spectrum`, such as `kfac.Soap()`.
    """
    check_layers(layers)
    if damping is not None:
        check_range("damping", damping, "[0, inf)")
    if inverse is not None:
        check_inverse(inverse)
    given = jnp.asarray(0.0 if damping is None else damping)
    dampings = (
        given,
        given,
    )  # for the blocks that have an owner device, and for the shared blocks
    if isinstance(source, Factors):
        inverse, stacks = _from_factors(layers, source, inverse, basis)
    else:
        if basis is not None:
            raise ValueError(
                "basis is for factors: the state of an optimizer has its own"
            )
        state = find_state(source, "source")
        inverse, stacks = _from_state(layers, state, inverse)
        if damping is None:
            last = state.metrics.damping
            dampings = last, last * state.unitwise_damping
    blocks: dict[str, Block] = {}
    for group, statistics, inverse_state in stacks:
        amount = damping_of_blocks(
            group.inverse_of(inverse), statistics, dampings[not group.owned]
        )
        spectra = one_by_one(
            functools.partial(_spectrum, group.inverse_of(inverse)),
            inverse_state,
            statistics,
            amount,
        )
        for layer, part in group.split(spectra):
            # A unit-wise layer is a single stack entry, whose own leading axis holds the channels.
            blocks[layer.name] = (
                jax.tree.map(lambda x: x[0], part) if part.values.ndim > 3 else part
            )
    return Operator(
        {layer.name: blocks[layer.name] for layer in layers if layer.name in blocks},
        layers,
    )


def _spectrum(inverse: Inverse, *block: Any) -> Block:
    stack_of_one = Block(*inverse.spectrum(*jax.tree.map(lambda x: x[None], block)))
    return jax.tree.map(lambda x: x[0], stack_of_one)


# The inverse, and for each group its stacked statistics and its stacked inverse state (None without moments).
Source = tuple[Inverse, list[tuple[Group, Any, Any]]]


def _from_factors(
    layers: Layers, factors: Any, inverse: Inverse | None, basis: Any
) -> Source:
    check_factors(factors, layers)
    factors = Factors({name: block.combined() for name, block in factors.items()})
    if basis is None:
        if inverse is None and any(
            block.moments is not None for block in factors.values()
        ):
            raise ValueError(
                "factors have moments: pass the basis= of these, or inverse=kfac.Eigh() to leave them out"
            )
        inverse = inverse or Eigh()
        if inverse.takes_moments:
            raise ValueError(
                f"inverse={inverse!r} of factors needs the basis= that their moments were taken in"
            )
        groups = [group for group in group_layers(layers) if group.captured]
        return inverse, [
            (group, group.stack_factors(factors), None) for group in groups
        ]
    inverse = inverse or Ekfac()
    if not inverse.takes_moments:
        raise ValueError(
            f"inverse={inverse!r} has no use for basis=, which belongs to kfac.Ekfac()"
        )
    check_basis(basis, layers)
    blocks: list[tuple[Group, Any, Any]] = []
    for layer in layers.with_factors:
        group = Group(layer.name, (layer,))
        stack: Any = group.stack_factors(factors)
        inverse_state: Any = None
        if layer.correctable:
            inverse.check(layer, factors[layer.name])
            vectors, moments = (
                group.block.stack(layer, basis[layer.name]),
                stack.moments,
            )
            a, g = (
                Eigen(q, jnp.zeros(q.shape[:2], q.dtype))
                for q in (vectors.A, vectors.G)
            )
            inverse_state = Kronecker(
                a, g, Moments(moments, jnp.ones_like(moments[:, 0, 0]))
            )
        blocks.append((group, stack, inverse_state))
    return inverse, blocks


def _from_state(layers: Layers, state: KfacState, inverse: Inverse | None) -> Source:
    of_state = state.settings.inverse if state.owned else inverse or Eigh()
    # The state's damping is in the units of the state's inverse, so the new inverse takes over `relative`.
    inverse = (
        dataclasses.replace(inverse, relative=of_state.relative)
        if inverse
        else of_state
    )
    if inverse.takes_moments and inverse != of_state:
        raise ValueError(
            f"inverse={inverse!r}, but the state is that of an optimizer with inverse={of_state!r}"
        )
    pairs = blocks_of(state, layers, "source")
    return inverse, [
        (
            g,
            block.factors,
            block.inverse if g.inverse_of(inverse).takes_moments else None,
        )
        for g, block in pairs
    ]


def averaged_factors(opt_state: Any, layers: Layers) -> Factors:
    """Return an optimizer's bias-corrected running averages, from which the inverses are computed.

    Args:
      opt_state: a tree that holds a single K-FAC state. If the state is spread over several devices, pass the result
        of `kfac.state.gather_state`.
      layers: the layers that `find_layers` returned.

    Returns:
      A `Factors`, which holds zeros before the first statistics. It has no blocks for layers with gradient factors, and
      no moments, even with `inverse=kfac.Ekfac()`; `kfac.curvature.operator(layers, opt_state)` includes both.

    Raises:
      ValueError: `opt_state` holds no K-FAC state or several, the state does not match `layers`, or it is spread
        over several devices.
    """
    check_layers(layers)
    blocks: dict[str, Any] = {}
    for group, block in blocks_of(
        find_state(opt_state, "opt_state"), layers, "opt_state"
    ):
        blocks |= {
            layer.name: group.block.unstack(layer, stack)
            for layer, stack in group.split(block.factors)
        }
    return Factors({layer.name: blocks[layer.name] for layer in layers.with_factors})
