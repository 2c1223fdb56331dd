"""Layers of equal shape, stacked: what the optimizer keeps, inverts and applies as one batch."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kfac._checks import check_by_layer
from kfac._curvature.inverse import Inverse
from kfac._curvature.kronecker import KroneckerKind
from kfac._curvature.unitwise import UnitwiseKind
from kfac._factors import Block, Factors
from kfac._layers import BLOCKS, KRONECKER_KINDS, UNITWISE_KINDS, BlockKind, Layer, Layers, leaf_alone

Lying = Callable[[Layer, jax.Array], jax.Array]

# The kinds of blocks: a new one is a class of its own, and an entry here.
BLOCKS |= dict.fromkeys((*KRONECKER_KINDS, "gradient"), KroneckerKind())
BLOCKS |= dict.fromkeys(UNITWISE_KINDS, UnitwiseKind())


@dataclasses.dataclass(frozen=True)
class Group:
    """Layers whose blocks have the same shape; each copy of a stacked layer is a block of its own.

    Attributes:
      name: key of the group in the state.
      layers: the members, by name.
    """

    name: str
    layers: tuple[Layer, ...]

    @property
    def block(self) -> BlockKind:
        """What kind of blocks they are."""
        return self.layers[0].block

    @property
    def owned(self) -> bool:
        """Whether each block has an owner among the devices; else all have all of them."""
        return self.block.owned

    @property
    def members(self) -> str:
        """The names of the members, in order. A long list is cut, with a number behind that tells it from others."""
        names = ", ".join(layer.name for layer in self.layers)
        if len(names) <= 150:
            return names
        return f"{names[:120]}... ({len(self.layers)} layers, {hashlib.sha256(names.encode()).hexdigest()[:8]})"

    @property
    def captured(self) -> bool:
        """Whether their statistics are captured in the loss; else they are the gradient's own factors."""
        return self.layers[0].captured

    @property
    def d_in(self) -> int:
        return self.block.sizes(self.layers[0])[0]

    @property
    def d_out(self) -> int:
        return self.block.sizes(self.layers[0])[1]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the statistics of one block, as they are kept: of a Kronecker factor `[d, d]`, or its diagonal."""
        return self.block.shapes(self.layers[0])

    @property
    def counts(self) -> tuple[int, ...]:
        """Blocks of each layer."""
        return tuple(map(self.block.count, self.layers))

    @property
    def size(self) -> int:
        """Number of blocks, `k` below."""
        return sum(self.counts)

    @property
    def correctable(self) -> bool:
        """Whether EKFAC corrects the eigenvalues of one of the members."""
        return any(layer.correctable for layer in self.layers)

    @property
    def corrected(self) -> np.ndarray:
        """`[k]`: of which blocks."""
        return np.repeat([layer.correctable for layer in self.layers], self.counts)

    def inverse_of(self, choice: Inverse) -> Inverse:
        """What inverts these blocks: the user's `choice`, or for small ones the closed form."""
        return self.block.inverse(choice)

    def moments(self, inverse: Inverse) -> tuple[int, ...] | None:
        """The shape of one block's moments; None where `inverse` takes none, or no member has such."""
        return (self.d_out, self.d_in) if self.correctable and self.inverse_of(inverse).takes_moments else None

    def zeros(self, size: int, dtype: Any, moments: tuple[int, ...] | None = None) -> Block:
        """Returns statistics of `size` blocks before any have arrived, with `moments` of that shape."""
        shapes = self.shapes | ({} if moments is None else {"moments": moments})
        return self.block.statistics(**{name: jnp.zeros((size, *shape), dtype) for name, shape in shapes.items()})

    def stack_factors(self, factors: Factors, moments: tuple[int, ...] | None = None) -> Block:
        """The statistics of the members as stacks `[k, ...]`; zeros of the shape `moments` for members without such."""
        blocks = []
        for layer, count in zip(self.layers, self.counts, strict=True):
            block = self.block.stack(layer, factors[layer.name])
            if moments is not None and block.moments is None:
                block = dataclasses.replace(block, moments=jnp.zeros((count, *moments), block.A.dtype))
            blocks.append(block)
        return jax.tree.map(lambda *stacks: jnp.concatenate(stacks), *blocks)

    def scaled(self, factors: Block, back: bool = False) -> Block:
        """Blocks from running averages of what `of_gradients` returns, or `back`; captured ones as they are."""
        return factors if self.captured else self.block.scaled(factors, back)

    @property
    def by_leaf(self) -> list[Group]:
        """Splits the group into one of kernels and one of biases, if all members agree on which rows are whose."""
        widths = {tuple(layout.size("in") for layout in layer.layouts) for layer in self.layers}
        if len(widths) > 1 or any(layer.pieces > 1 for layer in self.layers):
            return [self]

        by_leaf = [[leaf_alone(x, k, width) for x in self.layers] for k, width in enumerate(widths.pop())]
        return [dataclasses.replace(self, layers=tuple(layers)) for layers in by_leaf]

    def stack_matrices(self, leaves: Mapping[str, jax.Array], dtype: Any, lying: Lying | None = None) -> jax.Array:
        """Gradients of the members as `[k, d_in, d_out]`; zeros for a member that `leaves` does not hold.

        Outputs are last, as they are in memory in most kernels: to transpose a stack takes time, and on CPUs each
        operation that does takes long to compile. `lying` says how the matrices of a layer that is cut lie before.
        """
        matrices = []
        for layer, count in zip(self.layers, self.counts, strict=True):
            if layer.params[0] in leaves:
                rows = layer.to_rows([leaves[path].astype(dtype) for path in layer.params])
                if layer.pieces > 1:
                    matrix = rows.mT if lying is None else lying(layer, rows.mT)
                    rows = layer.to_pieces(matrix).mT
                matrices.append(rows)
            else:
                matrices.append(jnp.zeros((count, self.d_in, self.d_out), dtype))
        return jnp.concatenate(matrices)

    @property
    def starts(self) -> tuple[int, ...]:
        """Where the blocks of each layer begin."""
        return tuple(itertools.accumulate(self.counts[:-1], initial=0))

    def split_matrices(self, matrices: jax.Array, starts: Mapping[int, jax.Array]) -> dict[str, jax.Array]:
        """Cuts a stack into leaves by path: the inverse of `stack_matrices`. Values of `starts` are its keys as arrays.

        Where XLA does not know these numbers, leaves of one shape share one compiled kernel.
        """
        leaves: dict[str, jax.Array] = {}
        for layer, count, start in zip(self.layers, self.counts, self.starts, strict=True):
            part = lax.dynamic_slice_in_dim(matrices, starts[start], count)
            rows = layer.from_pieces(part.mT).mT if layer.pieces > 1 else part
            leaves.update(zip(layer.params, layer.from_rows(rows), strict=True))
        return leaves

    def split(self, stacks: Any) -> Iterator[tuple[Layer, Any]]:
        """Each member with its part of a tree of stacks `[k, ...]`."""
        leaves, treedef = jax.tree.flatten(stacks)
        for layer, *parts in zip(self.layers, *(jnp.split(leaf, self.starts[1:]) for leaf in leaves), strict=True):
            yield layer, jax.tree.unflatten(treedef, parts)


def group_layers(layers: Layers) -> tuple[Group, ...]:
    """Groups the layers that have statistics by the shape of their blocks, in the order of their first uses."""
    members: dict[str, list[Layer]] = {}
    for layer in layers.with_blocks:
        d_in, d_out = layer.block.sizes(layer)
        form = "".join(f"_diagonal_{factor}" for factor in layer.diagonal)
        name = f"{'' if layer.captured else 'gradient_'}{layer.block.name}_{d_out}x{d_in}{form}"
        members.setdefault(name, []).append(layer)
    # By name, so that a state has its blocks in one order whatever that of the program.
    groups = [Group(name, tuple(sorted(alike, key=lambda layer: layer.name))) for name, alike in members.items()]
    return tuple(sorted(groups, key=lambda group: min(layer.order for layer in group.layers)))


def check_factors(factors: Any, layers: Layers, inverse: Inverse | None = None) -> None:
    """Raises where `factors` are not those of `layers`, or not what `inverse` needs."""
    if not isinstance(factors, Factors):
        how = "factors = kfac.statistics(loss_fn, layers)(params, batch)"
        kind = type(factors).__name__
        raise ValueError(f"factors must be what kfac.statistics returns, but is {kind}: write {how}")
    check_by_layer("factors", factors, layers.with_factors, "they must be of the layers of this optimizer")
    own = {
        path: shape
        for layer in layers.with_gradient_factors
        for path, shape in zip(layer.params, layer.shapes, strict=True)
    }
    shapes = {path: tuple(x.shape) for path, x in factors.gradients.items()}
    if inverse is not None and own != shapes:
        path = next(path for path in [*own, *shapes] if own.get(path) != shapes.get(path))
        raise ValueError(
            f"factors.gradients must hold the gradient of {path!r} with the shape {own.get(path)}, but has "
            f"{shapes.get(path)}: take factors from kfac.statistics with the layers of this optimizer"
        )
    for layer in layers.with_factors:
        if inverse is not None:
            inverse.check(layer, factors[layer.name])
