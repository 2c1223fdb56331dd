"""Layers of equal shape, stacked: what the optimizer keeps, inverts and applies as one batch."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from kfac._checks import experimental_gpu
from kfac._curvature.inverse import Inverse, diagonals, per_block
from kfac._curvature.unitwise import ChannelInverse
from kfac._factors import Block, Factors, Kronecker, Unitwise
from kfac._layers import Layer, Layers
from kfac._varying import alone

Lying = Callable[[Layer, jax.Array], jax.Array]

OWN_FACTORS = "gradient_"  # how names of groups begin that have the gradient's own factors


@dataclasses.dataclass(frozen=True)
class Group:
    """Layers whose blocks have the same shape; each copy of a stacked layer is a block of its own.

    Attributes:
      name: key of the group in the state.
      kronecker: whether the blocks are Kronecker products.
      layers: the members, by name.
    """

    name: str
    kronecker: bool
    layers: tuple[Layer, ...]

    @property
    def members(self) -> str:
        """The names of the members, in order; of long lists the beginning, and a number that tells it from others."""
        names = ", ".join(layer.name for layer in self.layers)
        if len(names) <= 150:
            return names
        return f"{names[:120]}... ({len(self.layers)} layers, {hashlib.sha256(names.encode()).hexdigest()[:8]})"

    @property
    def captured(self) -> bool:
        """Whether their statistics are captured in the loss; else they are the gradient's own factors."""
        return self.layers[0].kind != "gradient"

    @property
    def d_out(self) -> int:
        return self.layers[0].block_shapes["G"][0] if self.kronecker else self.layers[0].d_out

    @property
    def d_in(self) -> int:
        return self.layers[0].block_shapes["A"][0] if self.kronecker else self.layers[0].d_in

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the factors of one block, as they are kept: of a Kronecker block `[d, d]`, or `[d]` if diagonal."""
        return self.layers[0].block_shapes if self.kronecker else self.layers[0].factor_shapes

    @property
    def counts(self) -> tuple[int, ...]:
        """Blocks of each layer."""
        return tuple(layer.copies * layer.pieces if self.kronecker else 1 for layer in self.layers)

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

    @property
    def long_side(self) -> str | None:
        """The diagonal factor that is longer than the other, if one is: what is as long can be dealt by rows."""
        (a, g), diagonal = self.shapes.values(), self.layers[0].diagonal
        if "A" in diagonal and a[0] > g[0]:
            return "A"
        # Pieces stand in the order of those of `G`: of a kernel that is cut along `A`, too, a device's are apart.
        return "G" if "G" in diagonal and g[0] > a[0] and all(layer.cut[0] == 1 for layer in self.layers) else None

    def in_pieces(self, number: int) -> Group:
        """With kernels cut along the long side, into so many pieces each: as matrices of a group by rows lie."""
        if number == 1:
            return self
        cut = [(number, x.cut[1]) if self.long_side == "A" else (x.cut[0], number) for x in self.layers]
        layers = (dataclasses.replace(x, cut=c) for x, c in zip(self.layers, cut, strict=True))
        return dataclasses.replace(self, layers=tuple(layers))

    def kind(self, inverse: Inverse) -> Inverse:
        """What inverts these blocks: `inverse`, or for small ones the closed form."""
        return inverse if self.kronecker else ChannelInverse(inverse.precision, inverse.relative)

    def zeros(self, size: int, dtype: Any, *, moments: bool = False) -> Block:
        """Statistics of `size` blocks before any have arrived; with `moments`, those too where a member has such."""
        parts = {name: jnp.zeros((size, *shape), dtype) for name, shape in self.shapes.items()}
        if not self.kronecker:
            return Unitwise(**parts)
        known = jnp.zeros((size, self.d_out, self.d_in), dtype) if moments and self.correctable else None
        return Kronecker(**parts, moments=known)

    def stack_factors(self, factors: Factors, *, moments: bool = False) -> Block:
        """The statistics of the members as stacks `[k, ...]`; with `moments`, zeros for members that have none."""
        blocks = []
        for layer, count in zip(self.layers, self.counts, strict=True):
            block = factors[layer.name]
            stacked = self.kronecker and layer.stacked
            block = block if stacked else jax.tree.map(lambda x: x[None], block)
            block = of_pieces(layer, block) if layer.pieces > 1 else block
            if moments and isinstance(block, Kronecker) and self.correctable and block.moments is None:
                block = dataclasses.replace(block, moments=jnp.zeros((count, self.d_out, self.d_in), block.A.dtype))
            blocks.append(block)
        return jax.tree.map(lambda *stacks: jnp.concatenate(stacks), *blocks)

    def own_factors(self, gradients: jax.Array) -> Block:
        """The gradient's own factors, from averaged gradients `[k, d_in, d_out]`: `V^T V` and `V V^T`, unscaled."""
        if not self.kronecker:
            return Unitwise(jnp.square(gradients.mT)[..., None])

        def side(name, whole, diagonal):
            spec = diagonal if len(self.shapes[name]) == 1 else whole
            return jnp.einsum(spec, gradients, gradients, precision=lax.Precision.HIGHEST)

        return Kronecker(side("A", "kia,kja->kij", "kia,kia->ki"), side("G", "kai,kaj->kij", "kai,kai->ki"))

    def scaled(self, factors: Block) -> Block:
        """The gradient's own factors from `E[V^T V]` and `E[V V^T]`; captured ones as they are.

        Both have the trace `t` of `E[vec V vec V^T]`, so that with each divided by its root the product has it.
        """
        return self._times(factors, lambda trace: lax.rsqrt(jnp.where(trace > 0, trace, 1)))

    def unscaled(self, factors: Block) -> Block:
        """The inverse of `scaled`."""
        return self._times(factors, lambda trace: trace)

    def _times(self, factors: Block, number: Callable[[jax.Array], jax.Array]) -> Block:
        if self.captured or not isinstance(factors, Kronecker):
            return factors
        scale = number(jnp.sum(diagonals(factors.A), axis=-1))
        return jax.tree.map(lambda x: x * per_block(scale, x), factors)

    @property
    def by_leaf(self) -> list[Group]:
        """As groups of the kernels and of the biases, where all members agree on which columns are whose."""
        widths = {tuple(layout.size("in") for layout in layer.layouts) for layer in self.layers}
        if len(widths) > 1 or any(layer.pieces > 1 for layer in self.layers):
            return [self]

        def only(layer, k, width):
            own = {name: getattr(layer, name)[k : k + 1] for name in ("params", "shapes", "layouts")}
            return dataclasses.replace(layer, d_in=width, **own)

        return [
            dataclasses.replace(self, layers=tuple(only(layer, k, width) for layer in self.layers))
            for k, width in enumerate(widths.pop())
        ]

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
        stack = jnp.concatenate(matrices)
        if not (experimental_gpu() and alone()):  # XLA does not know how to split what is laid out over devices
            return stack
        # Gradients of convolutions have outputs first on a GPU, and XLA would copy momentum and parameters to that.
        laid_out = functools.partial(with_layout_constraint, layouts=Layout(major_to_minor=(0, 1, 2)))
        return lax.platform_dependent(stack, cuda=laid_out, default=lambda stack: stack)

    @property
    def starts(self) -> tuple[int, ...]:
        """Where the blocks of each layer begin."""
        return tuple(itertools.accumulate(self.counts[:-1], initial=0))

    def split_matrices(self, matrices: jax.Array, starts: Mapping[int, jax.Array]) -> dict[str, jax.Array]:
        """The inverse of `stack_matrices`: leaves by path. The values of `starts` are those of its keys.

        Where XLA does not know these numbers, leaves of one shape share one compiled kernel.
        """
        leaves: dict[str, jax.Array] = {}
        for layer, count, start in zip(self.layers, self.counts, self.starts, strict=True):
            own = lax.dynamic_slice_in_dim(matrices, starts[start], count)
            rows = layer.from_pieces(own.mT).mT if layer.pieces > 1 else own
            leaves.update(zip(layer.params, layer.from_rows(rows), strict=True))
        return leaves

    def split(self, stack: jax.Array) -> Iterator[tuple[Layer, jax.Array]]:
        """Each member with its part of a stack `[k, ...]`."""
        return zip(self.layers, jnp.split(stack, self.starts[1:]), strict=True)


def group_layers(layers: Layers) -> tuple[Group, ...]:
    """Groups the layers that have statistics by the shape of their blocks, in the order of their first uses."""
    members: dict[str, list[Layer]] = {}
    for layer in layers.with_blocks:
        form = "".join(f"_diagonal_{factor}" for factor in layer.diagonal)
        a, g = (shape[0] for shape in layer.block_shapes.values())
        sizes = f"{g}x{a}" if layer.kronecker else f"{layer.d_out}x{layer.d_in}"
        name = f"{'kronecker' if layer.kronecker else 'unitwise'}_{sizes}{form}"
        members.setdefault(f"{OWN_FACTORS}{name}" if layer.kind == "gradient" else name, []).append(layer)
    # By name, so that a state has its blocks in one order whatever that of the program.
    groups = [
        Group(name, layers[0].kronecker, tuple(sorted(layers, key=lambda layer: layer.name)))
        for name, layers in members.items()
    ]
    return tuple(sorted(groups, key=lambda group: min(layer.order for layer in group.layers)))


def of_pieces(layer: Layer, block: Any) -> Block:
    """The statistics `[copies, ...]` of a kernel that is cut, as those of its pieces `[copies pieces, ...]`.

    In the order of `Layer.to_pieces`: pieces in the same columns have the block of `A`, in the same rows that of `G`.
    """
    a, g = (x if count > 1 else x[:, None] for x, count in zip((block.A, block.G), layer.cut, strict=True))
    a, g = jnp.repeat(a[:, None], layer.cut[1], axis=1), jnp.repeat(g[:, :, None], layer.cut[0], axis=2)
    return Kronecker(*(x.reshape(-1, *x.shape[3:]) for x in (a, g)))


def of_layer(layer: Layer, block: Block) -> Block:
    """The inverse of `of_pieces`."""
    if not isinstance(block, Kronecker) or layer.pieces == 1:
        return block
    a, g = (x.reshape(layer.copies, *layer.cut[::-1], *x.shape[1:]) for x in (block.A, block.G))
    sides = zip((a[:, 0], g[:, :, 0]), layer.cut, strict=True)
    return Kronecker(*(x if count > 1 else x[:, 0] for x, count in sides))


def check_factors(factors: Any, layers: Layers, inverse: Inverse | None = None) -> None:
    """Raises where `factors` are not those of `layers`, or not what `inverse` needs."""
    if not isinstance(factors, Factors):
        raise ValueError(
            f"factors must be what kfac.value_and_grad returns, but is {type(factors).__name__}: write "
            "loss, grads, factors = kfac.value_and_grad(loss_fn, layers)(params, batch)"
        )
    expected = {layer.name: layer for layer in layers.with_factors}
    for name in expected:
        if name not in factors:
            raise ValueError(f"factors lack layer {name!r}; they are those of {', '.join(factors)}")
    for name, block in factors.items():
        if name not in expected:
            raise ValueError(f"factors have layer {name!r}, which is not among the layers of this optimizer")
        layer = expected[name]
        for factor, shape in layer.factor_shapes.items():
            found = tuple(getattr(block, factor).shape) if hasattr(block, factor) else None
            if found != shape:
                raise ValueError(f"factors of layer {name!r}: {factor} must have shape {shape}, but has {found}")
        if inverse is not None:
            inverse.check(layer, block)
