"""The damped block-diagonal curvature as a linear operator: products, inverses, roots, samples and determinants."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike
from optax import Params

from kfac._capture.value_and_grad import check_basis
from kfac._checks import check_layers, check_range
from kfac._curvature.blocks import (
    Group,
    check_factors,
    check_moments,
)
from kfac._curvature.eigh import Eigen, Eigh, rotate
from kfac._curvature.ekfac import EKFAC, EKFACState
from kfac._curvature.preconditioner import (
    BlockPreconditioner,
    check_preconditioner,
    damping_of_blocks,
)
from kfac._factors import Basis, Factors, static
from kfac._layers import Layer, Layers
from kfac._leaves import map_by_path
from kfac._optimizer.state import (
    BlockState,
    KfacState,
    blocks_of,
    find_state,
    match_leaves,
)
from kfac.curvature._matrix import Linear


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OperatorBlock:
    """The curvature block of a layer, `k` matrices in the form `Q diag(values) Q^T`.

    The block multiplies arrays `[k, d_out, d_in]`. Each copy in a stacked layer and each piece of a split kernel has
    its own matrix; `k` counts these matrices. A unit-wise layer has a matrix per channel, so its arrays are
    `[channels, 1, p]`. Example: `block @ layer.to_pieces(layer.to_matrix(leaves))`.

    Attributes:
      basis: the eigenvectors `Q = Q_A (x) Q_G`, `[k, d_in, d_in]` and `[k, d_out, d_out]`.
      values: the eigenvalues, `[k, d_out, d_in]`.
    """

    basis: Basis
    values: Array

    def __matmul__(self, matrices: Array) -> Array:
        """Compute `Q diag(values) Q^T v` for an array `v` with the same number of entries as `values`."""
        dtype = jnp.result_type(matrices, self.values)
        wide = matrices.reshape(self.values.shape).astype(dtype)
        turned = self.turn_back(wide, back=False)
        return self.turn_back(self.values * turned).reshape(matrices.shape)

    def turn_back(self, matrices: Array, back: bool = True) -> Array:
        """Compute `Q v` for `[k, d_out, d_in]`, or `Q^T v` without `back`."""
        q_a, q_g = self.basis
        return rotate(matrices, rows=q_g, columns=q_a, precision="float32", back=back)

    def map(self, fn: Callable[[Array], Array]) -> OperatorBlock:
        """Apply `fn` to the eigenvalues; the eigenvectors stay the same."""
        return dataclasses.replace(self, values=fn(self.values))

    def sample(self, key: Array) -> Array:
        """Draw `[k, d_out, d_in]` from the normal distribution with this covariance."""
        root = jnp.sqrt(self.values)
        return self.turn_back(root * jax.random.normal(key, root.shape, root.dtype))

    def diagonal(self) -> Array:
        """Return the diagonal entries, `[k, d_out, d_in]`."""
        squares = jax.tree.map(jnp.square, self.basis)
        return OperatorBlock(squares, self.values).turn_back(self.values)

    def to_dense(self) -> Array:
        """Return dense matrices `[k, p, p]`, `p = d_in d_out`; entry `(i_out, i_in)` has index `i_in d_out + i_out`."""
        k, d_out, d_in = self.values.shape
        p = d_out * d_in
        units = jnp.eye(p, dtype=self.values.dtype).reshape(p, 1, d_in, d_out).mT
        columns = jax.vmap(self.__matmul__)(
            jnp.broadcast_to(units, (p, k, d_out, d_in))
        )
        return columns.mT.reshape(p, k, p).transpose(1, 2, 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class BlockOperator(Linear):
    """A symmetric block-diagonal matrix over the parameters, with a block per layer.

    `kfac.curvature.block_operator` returns it. A `BlockOperator` is a pytree: it passes through `jax.jit`, its arrays
    can be placed on devices, and `jax.vmap(op.matvec)` multiplies stacked trees. Trees have the parameters' structure.

    Skipped parameters have no block. An operator from a `Factors` also has no blocks for parameters with gradient
    factors. Products and samples are zero for parameters without a block. Trace, determinant and eigenvalues leave
    them out.

    Attributes:
      blocks: the block of each layer, by layer name.
      layers: the layers that `find_layers` returned.
    """

    blocks: dict[str, OperatorBlock]
    layers: Layers = static()

    def matvec(self, tree: Params) -> Params:
        """Multiply the matrix by a tree like the parameters; the result keeps the dtype of each leaf."""
        leaves = match_leaves(self.layers, tree, "tree")
        products: dict[str, Array] = {}
        for layer, block in self._by_layer():
            if layer.params[0] in leaves:
                matrix = layer.to_matrix([leaves[path] for path in layer.params])
                products |= _leaves(layer, block @ layer.to_pieces(matrix))
        return _fill(tree, products)

    def map(self, fn: Callable[[Array], Array]) -> BlockOperator:
        """Apply `fn` to the eigenvalues, elementwise; the eigenvectors stay the same."""
        blocks = {name: block.map(fn) for name, block in self.blocks.items()}
        return dataclasses.replace(self, blocks=blocks)

    def __mul__(self, scale: ArrayLike) -> BlockOperator:
        """Multiply the matrix by a number."""
        check_scalar(scale)
        return self.map(lambda values: jnp.multiply(scale, values))

    __rmul__ = __mul__

    def __neg__(self) -> BlockOperator:
        """Return the negated matrix."""
        return self * -1.0

    def __add__(self, shift: ArrayLike) -> BlockOperator:
        """Add a number times the identity, such as a prior's precision."""
        check_scalar(shift)
        return self.map(lambda values: jnp.add(shift, values))

    __radd__ = __add__

    def __sub__(self, shift: ArrayLike) -> BlockOperator:
        """Subtract a number times the identity."""
        return self + -1.0 * shift

    def __rsub__(self, shift: ArrayLike) -> BlockOperator:
        """Subtract the matrix from a number times the identity."""
        return -self + shift

    def inv(self) -> BlockOperator:
        """Return the inverse. Zero eigenvalues become infinite; damping prevents this."""
        return self.map(lambda values: 1 / values)

    def sqrt(self) -> BlockOperator:
        """Return the symmetric square root."""
        return self.map(jnp.sqrt)

    def inv_sqrt(self) -> BlockOperator:
        """Return the inverse of the symmetric square root."""
        return self.map(lambda values: 1 / jnp.sqrt(values))

    def trace(self) -> Array:
        """Return the sum of the eigenvalues, a scalar."""
        return jnp.sum(self._values())

    def logdet(self) -> Array:
        """Return the log-determinant, a scalar."""
        return jnp.sum(jnp.log(self._values()))

    def eigvalsh(self) -> Array:
        """Return all eigenvalues in ascending order, `[size]`."""
        return jnp.sort(self._values())

    @property
    def size(self) -> int:
        """The matrix dimension, which is the number of parameters with a block."""
        return sum(layer.num_params for layer, _ in self._by_layer())

    def diagonal(self) -> Params:
        """Return the diagonal, a tree like the parameters."""
        return self._tree(OperatorBlock.diagonal)

    def sample(self, key: Array) -> Params:
        """Draw a tree from the normal distribution with mean zero and this matrix as its covariance.

        Args:
          key: a PRNG key. `jax.vmap(op.sample)(jax.random.split(key, 8))` draws eight.
        """
        keys = iter(jax.random.split(key, max(1, len(self.blocks))))
        return self._tree(lambda block: block.sample(next(keys)))

    def block(self, name: str) -> OperatorBlock:
        """Return the block of the layer `name`.

        Raises:
          ValueError: the operator has no block with this name.
        """
        if name not in self.blocks:
            raise ValueError(
                f"no layer {name!r} in the operator; there are {', '.join(self.blocks)}"
            )
        return self.blocks[name]

    def shapes(self) -> Params:
        """Return the parameters' shapes, a tree of `jax.ShapeDtypeStruct`, with the common dtype of all blocks."""
        dtype = jnp.result_type(*(block.values for block in self.blocks.values()))
        shapes: dict[str, tuple[int, ...]] = {}
        for layer in self.layers:
            shapes |= zip(layer.params, layer.shapes, strict=True)
        leaves = [
            jax.ShapeDtypeStruct(shapes[path], dtype) for path in self.layers.paths
        ]
        return jax.tree.unflatten(self.layers.structure, leaves)

    def _by_layer(self) -> Iterator[tuple[Layer, OperatorBlock]]:
        """Yield the layers that have a block, in their order, each with its block."""
        for layer in self.layers:
            if layer.name in self.blocks:
                yield layer, self.blocks[layer.name]

    def _values(self) -> Array:
        """Return all eigenvalues, `[size]`.

        The last pieces of a split kernel are padded with zeros, whose eigenvalues are the smallest. In descending order
        they come last, and `from_pieces` drops them. A diagonal factor's eigenvalues are in the order of its rows, so
        its padding comes last already.
        """
        values = []
        for layer, block in self._by_layer():
            sides = (1, "G"), (2, "A")
            ascending = [axis for axis, side in sides if side not in layer.diagonal]
            values.append(layer.from_pieces(jnp.flip(block.values, ascending)).ravel())
        return jnp.concatenate(values)

    def _tree(self, matrix_of: Callable[[OperatorBlock], Array]) -> Params:
        """Return a tree like the parameters from a matrix for each block; zeros where a layer has no block."""
        leaves: dict[str, Array] = {}
        for layer, block in self._by_layer():
            leaves |= _leaves(layer, matrix_of(block))
        return _fill(self.shapes(), leaves)


def check_scalar(value: ArrayLike) -> None:
    """Raise a `TypeError` if a value is not a number."""
    if isinstance(value, Linear) or jnp.ndim(value):
        raise TypeError(
            f"an operator is multiplied by and added to numbers only, but got {type(value).__name__}: "
            "combine products instead, a @ v + b @ v"
        )


def _leaves(layer: Layer, matrix: Array) -> dict[str, Array]:
    """Split a layer's matrix, possibly in pieces, into the layer's leaves."""
    if layer.pieces > 1:
        matrix = layer.from_pieces(matrix)
    else:
        matrix = matrix.reshape(-1, layer.d_out, layer.d_in)
    return dict(zip(layer.params, layer.from_matrix(matrix), strict=True))


def _fill(tree: Params, leaves: Mapping[str, Array]) -> Params:
    """Return `leaves` as a tree with the structure and the dtypes of `tree`, zeros for missing leaves."""
    return map_by_path(
        lambda path, x: leaves.get(path, jnp.zeros_like(x)).astype(x.dtype), tree
    )


def block_operator(
    layers: Layers,
    source: Any,
    *,
    damping: float | Array | None = None,
    preconditioner: BlockPreconditioner | None = None,
    basis: dict[str, Basis] | None = None,
) -> BlockOperator:
    """Return the damped curvature of an optimizer state or of a `Factors` as a linear operator.

    The argument `preconditioner` sets the block of a Kronecker layer with damping `l`:

    - `kfac.Eigh()`: `A (x) G + l I`;
    - `kfac.Cholesky()`: `(A + pi sqrt(l) I) (x) (G + sqrt(l)/pi I)` (Martens & Grosse 2015, section 6.3);
    - `kfac.EKFAC()`: the eigenvectors of `A (x) G`. The eigenvalues are the second moments of per-example gradients
      plus `l` (George et al. 2018). A layer without moments has the block of `Eigh()`.

    Unit-wise and diagonal blocks are `F + l I`. This function decomposes the factors, which takes several times as long
    as a `Cholesky` refresh.

    Args:
      layers: the layers that `find_layers` returned.
      source: a `Factors` from `value_and_grad` or `estimate_factors`, or an optimizer state. A state supplies its
        running averages and, with `EKFAC`, its corrected eigenvalues. Directly after a refresh,
        `kfac.curvature.block_operator(layers, opt_state).inv() @ grads` equals the output of `scale_by_kfac` for all
        parameters with a block. If the state is spread over several devices, pass the result of
        `kfac.state.gather_state`.
      damping: the damping `l`, not negative. With `scale_damping=True`, the unit is each block's mean eigenvalue.
        The default is 0 for a `Factors`. For a state, the default is the damping of its next step, times
        `unitwise_damping_scale` for unit-wise and diagonal blocks.
      preconditioner: one from the list above, or another `kfac.BlockPreconditioner` with a `spectrum` method.
        The default is the state's own. For a `Factors`, the default is `EKFAC()` with `basis`, otherwise `Eigh()`.
        With a state, the operator takes the option `scale_damping` from the state's preconditioner.
      basis: the eigenvectors in which the moments of a `Factors` were taken.

    Returns:
      A `BlockOperator`.

    Raises:
      ValueError: an argument is out of range, does not match `layers`, or has no effect, or the preconditioner has
        no `spectrum`, such as `kfac.SOAP()`.
    """
    check_layers(layers)
    if damping is not None:
        check_range("damping", damping, "[0, inf)")
    if preconditioner is not None:
        check_preconditioner(preconditioner)
    damping_of_factors = jnp.asarray(0.0 if damping is None else damping)
    unitwise_damping = damping_of_factors
    if isinstance(source, Factors):
        preconditioner, stacks = _from_factors(layers, source, preconditioner, basis)
    else:
        if basis is not None:
            raise ValueError(
                "basis is for factors: the state of an optimizer has its own"
            )
        state = find_state(source, "source")
        preconditioner = _preconditioner_for(state, preconditioner)
        stacks = []
        for group, group_blocks in blocks_of(state, layers, "source"):
            stacks += _without_padding(group, group_blocks)
        if damping is None:
            damping_of_factors = state.observe_damping
            unitwise_damping = damping_of_factors * state.unitwise_damping_scale
    blocks: dict[str, OperatorBlock] = {}
    for stack in stacks:
        damping_of_group = (
            damping_of_factors if stack.group.kronecker else unitwise_damping
        )
        blocks |= _decompose(stack, preconditioner, damping_of_group)
    return BlockOperator(blocks, layers)


class Stack(NamedTuple):
    """A group, its statistics and its preconditioner's state, None without moments. See `BlockState`."""

    group: Group
    factors: Any
    preconditioner: Any = None


def _without_padding(group: Group, blocks: BlockState) -> list[Stack]:
    """Return a group and its blocks. A group with padding becomes a group for each layer, without padding."""
    if not group.padded:
        return [Stack(group, blocks.factors, blocks.preconditioner)]
    stacks = []
    for layer, part in group.split(blocks.factors):
        stacks.append(Stack(Group((layer,)), group.without_padding(layer, part)))
    return stacks


def _decompose(
    stack: Stack,
    preconditioner: BlockPreconditioner,
    damping: Array,
) -> dict[str, OperatorBlock]:
    """Return the damped block of each layer in a group."""
    group = stack.group
    preconditioner = group.preconditioner_of(preconditioner)
    preconditioner_state = (
        stack.preconditioner if preconditioner.uses_example_moments else None
    )

    def spectrum(members):
        stacks_of_one = jax.tree.map(lambda x: x[None], members)
        return jax.tree.map(
            lambda x: x[0], OperatorBlock(*preconditioner.spectrum(*stacks_of_one))
        )

    amounts = damping_of_blocks(preconditioner, stack.factors, damping)
    # One block after another, see `in_portions` in `_curvature/refresh.py`.
    spectra = lax.map(spectrum, (preconditioner_state, stack.factors, amounts))
    blocks = {}
    for layer, part in group.split(spectra):
        # A unit-wise layer is a single stack entry, whose own leading axis holds the channels.
        if not group.kronecker:
            part = group.unstack(layer, part)
        blocks[layer.name] = part
    return blocks


def _from_factors(
    layers: Layers,
    factors: Factors,
    preconditioner: BlockPreconditioner | None,
    basis: Mapping[str, Basis] | None,
) -> tuple[BlockPreconditioner, list[Stack]]:
    """Return the preconditioner and the statistics of each layer."""
    check_factors(factors, layers)
    factors = Factors({name: block.combined() for name, block in factors.items()})
    stacks = []
    if basis is None:
        has_moments = any(block.moments is not None for block in factors.values())
        if preconditioner is None and has_moments:
            raise ValueError(
                "factors have moments: pass the basis= of these, or preconditioner=kfac.Eigh() to leave them out"
            )
        preconditioner = preconditioner or Eigh()
        if preconditioner.uses_example_moments:
            raise ValueError(
                f"preconditioner={preconditioner!r} of factors needs the basis= that their moments were taken in"
            )
    else:
        preconditioner = preconditioner or EKFAC()
        if not preconditioner.uses_example_moments:
            raise ValueError(
                f"preconditioner={preconditioner!r} has no use for basis=, which belongs to kfac.EKFAC()"
            )
        check_basis(basis, layers)
        check_moments(factors, layers, preconditioner)
    for layer in layers.with_factors:
        group = Group((layer,))
        statistics = group.stack_factors(factors)
        preconditioner_state = None
        if basis is not None and layer.supports_ekfac:
            a, g = group.stack(layer, basis[layer.name])
            # `EKFAC.spectrum` computes the factors' eigenvalues along these vectors.
            preconditioner_state = EKFACState(
                A=Eigen(a, jnp.zeros(a.shape[:2])),
                G=Eigen(g, jnp.zeros(g.shape[:2])),
                moments=statistics.moments,
                weight=jnp.ones_like(statistics.moments[:, 0, 0]),
            )
        stacks.append(Stack(group, statistics, preconditioner_state))
    return preconditioner, stacks


def _preconditioner_for(
    state: KfacState, preconditioner: BlockPreconditioner | None
) -> BlockPreconditioner:
    """Return the preconditioner for an optimizer state, by default the state's own."""
    of_state = state.settings.preconditioner
    if preconditioner is None:
        return of_state
    # The state's damping is in the units of its preconditioner, so the new one takes over `scale_damping`.
    preconditioner = dataclasses.replace(
        preconditioner, scale_damping=of_state.scale_damping
    )
    if preconditioner.uses_example_moments and preconditioner != of_state:
        raise ValueError(
            f"preconditioner={preconditioner!r}, but the state is that of an optimizer with preconditioner={of_state!r}"
        )
    return preconditioner


def factors_from_state(opt_state: Any, layers: Layers) -> Factors:
    """Return an optimizer's bias-corrected running averages, from which the preconditioners are computed.

    Args:
      opt_state: a tree that holds a single K-FAC state. If the state is spread over several devices, pass the result
        of `kfac.state.gather_state`.
      layers: the layers that `find_layers` returned.

    Returns:
      A `Factors`, which holds zeros before the first statistics. It has no blocks for layers with gradient factors, and
      no moments, even with `preconditioner=kfac.EKFAC()`; `kfac.curvature.block_operator(layers, opt_state)` includes
      both.

    Raises:
      ValueError: `opt_state` holds no K-FAC state or several, the state does not match `layers`, or it is spread
        over several devices.
    """
    check_layers(layers)
    blocks = {}
    state = find_state(opt_state, "opt_state")
    for group, block in blocks_of(state, layers, "opt_state"):
        for layer, stack in group.split(block.factors):
            blocks[layer.name] = group.unstack(layer, stack)
    return Factors({layer.name: blocks[layer.name] for layer in layers.with_factors})
