"""Groups of layers with similar block shapes, whose blocks the optimizer stores and preconditions as one stack.

Each group compiles its own kernels and launches them in every step, which for small blocks costs more than the
arithmetic. Therefore small blocks of different shapes share a group, and zeros pad them to a common shape::

         A  d_in             gradient  d_out
        +-------+---+       +-------+---+
        |       | 0 |       |       | 0 |
        +-------+---+  d_in +-------+---+
        | 0     | 0 |       | 0     | 0 |
        +-------+---+       +-------+---+

Only this module knows the padding: blocks get it when they are stacked, and lose it when the stack is split. Zeros
contribute nothing to norms, inner products and power iterations. For a refresh, `Group.filled` puts a number on the
diagonal of the padding, which leaves traces per row, damping and condition numbers as they are without padding. The
refreshed matrices never mix the padding with the rest of a block, so the padding of a step is exactly zero.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from kfac._checks import check_by_layer, check_shapes
from kfac._curvature import kronecker
from kfac._curvature.cost_model import applied
from kfac._curvature.preconditioner import BlockPreconditioner
from kfac._curvature.unitwise import ChannelPreconditioner
from kfac._factors import Block, Factors, Kronecker, Unitwise, diagonals, per_block
from kfac._layers import FactorShapes, Layer, Layers
from kfac._linalg import add_diagonal
from kfac._mesh import PyTree
from kfac._packing import Shape, join_stacks, pad_end

LayOut = Callable[[Layer, Array], Array]


@dataclasses.dataclass(frozen=True)
class Group:
    """Layers whose blocks have the same shape, or are padded to the same shape.

    In a group of Kronecker blocks, a stacked layer has a block for each copy. A kernel that is cut into pieces has a
    block for each piece. In the other groups, all channels of a unit-wise or diagonal layer form one block.

    Attributes:
      layers: the members, sorted by name.
    """

    layers: tuple[Layer, ...]

    @functools.cached_property
    def name(self) -> str:
        """The key of the group in the state, which follows from the shape of its blocks."""
        source = "" if self.captured else "gradient_"
        kind = "kronecker" if self.kronecker else "unitwise"
        form = "".join(f"_diagonal_{factor}" for factor in self.layers[0].diagonal)
        return f"{source}{kind}_{self.d_out}x{self.d_in}{form}"

    @property
    def kronecker(self) -> bool:
        """Whether these are Kronecker blocks.

        Otherwise each row of a block's matrix is a leaf, `unitwise_damping_scale` scales the damping, and
        `ChannelPreconditioner` inverts the blocks.
        """
        return self.layers[0].kronecker

    @property
    def members(self) -> str:
        """The members' names in order, with their shapes if these differ.

        A list above 150 characters is shortened, and a hash keeps it unique.
        """
        labels = []
        for layer in self.layers:
            shape = f" {layer.d_out}x{layer.d_in}" if self.padded else ""
            labels.append(f"{layer.name}{shape}")
        names = ", ".join(labels)
        if len(names) <= 150:
            return names
        code = hashlib.sha256(names.encode()).hexdigest()[:8]
        return f"{names[:120]}... ({len(self.layers)} layers, {code})"

    @property
    def captured(self) -> bool:
        """Whether the loss's backward pass captures the statistics. Otherwise they are gradient factors."""
        return self.layers[0].captured

    @property
    def d_in(self) -> int:
        return self.shapes["A"][0] if self.kronecker else self.shapes["F"][1]

    @property
    def d_out(self) -> int:
        return self.shapes["G"][0] if self.kronecker else self.shapes["F"][0]

    @functools.cached_property
    def shapes(self) -> FactorShapes:
        """The shapes of one block's statistics by name, with padding; see `Layer.block_shapes`."""
        shapes = [layer.block_shapes for layer in self.layers]
        return {name: _largest(shape[name] for shape in shapes) for name in shapes[0]}

    @functools.cached_property
    def padded(self) -> bool:
        """Whether at least one member's blocks are padded."""
        return any(layer.block_shapes != self.shapes for layer in self.layers)

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of blocks per layer."""
        if not self.kronecker:
            return (1,) * len(self.layers)
        return tuple(layer.copies * layer.pieces for layer in self.layers)

    @property
    def size(self) -> int:
        """The number of blocks, called `k` below."""
        return sum(self.counts)

    @property
    def work(self) -> int:
        """The work to refresh a block: `n^3` for a factor `[n, n]`, `n` for a diagonal factor and for `n` channels."""
        work = 0
        for size, *others in self.shapes.values():
            work += size**3 if others and self.kronecker else size
        return work

    @property
    def multipliers(self) -> np.ndarray:
        """The factors on the blocks' steps, `[k]`."""
        return np.repeat([layer.multiplier for layer in self.layers], self.counts)

    @property
    def supports_ekfac(self) -> bool:
        """Whether EKFAC corrects the eigenvalues of at least one member."""
        return any(layer.supports_ekfac for layer in self.layers)

    @property
    def corrected(self) -> np.ndarray:
        """Which blocks have eigenvalues that EKFAC corrects, a mask `[k]`."""
        return np.repeat([layer.supports_ekfac for layer in self.layers], self.counts)

    def preconditioner_of(self, choice: BlockPreconditioner) -> BlockPreconditioner:
        """Return the user's `choice` for Kronecker blocks, or `ChannelPreconditioner` for unit-wise blocks."""
        if self.kronecker:
            return choice
        return ChannelPreconditioner(choice.precision, choice.scale_damping)

    def moments(self, preconditioner: BlockPreconditioner) -> Shape | None:
        """Return the shape of one block's moments. None if `preconditioner` takes none or no member has any."""
        if self.supports_ekfac and preconditioner.uses_example_moments:
            return self.d_out, self.d_in
        return None

    def zeros(
        self,
        size: int,
        dtype: DTypeLike,
        moments: Shape | None = None,
    ) -> Block:
        """Return zero statistics for `size` blocks. `moments` is the shape of one block's moments, None without any."""
        shapes = self.shapes
        if moments is not None:
            shapes = shapes | {"moments": moments}
        zeros = {
            name: jnp.zeros((size, *shape), dtype) for name, shape in shapes.items()
        }
        return Kronecker(**zeros) if self.kronecker else Unitwise(**zeros)

    def stack(self, layer: Layer, block: Any) -> Any:
        """Return a layer's statistics, which have their padding already, as a stack of its blocks."""
        if self.kronecker:
            return kronecker.stack(layer, block)
        return jax.tree.map(lambda x: x[None], block)

    def unstack(self, layer: Layer, blocks: Any) -> Any:
        """Undo `stack`, and remove padding from statistics."""
        if self.padded:
            blocks = self.without_padding(layer, blocks)
        if self.kronecker:
            return kronecker.unstack(layer, blocks)
        return jax.tree.map(lambda x: x[0], blocks)

    def with_padding(self, block: Block) -> Block:
        """Pad a layer's statistics with zeros to `shapes`."""
        if not self.padded:
            return block
        arrays = {}
        for name, shape in self.shapes.items():
            x = getattr(block, name)
            lengths = x.shape[x.ndim - len(shape) :]
            arrays[name] = pad_end(x, *np.subtract(shape, lengths).tolist())
        return type(block)(**arrays)

    def without_padding(self, layer: Layer, blocks: Block) -> Block:
        """Remove the padding from a layer's statistics `[k, ...]`."""
        arrays = {}
        for name, shape in layer.block_shapes.items():
            arrays[name] = getattr(blocks, name)[:, *map(slice, shape)]
        return type(blocks)(**arrays)

    def sizes(self) -> dict[str, Array]:
        """Return the number of rows without padding of each block's statistics, `[k]` by name."""
        sizes = {}
        for name in self.shapes:
            rows = [layer.block_shapes[name][0] for layer in self.layers]
            sizes[name] = jnp.asarray(np.repeat(rows, self.counts))
        return sizes

    def filled(
        self, averages: Block, sizes: Mapping[str, Array], scale: float
    ) -> Block:
        """Put `scale` times the mean of a block's diagonal on the diagonal of its padding.

        Args:
          averages: the blocks' statistics, `[k, ...]`.
          sizes: the numbers of rows without padding, see `sizes`, for the same blocks.
          scale: see `BlockPreconditioner.padding`.
        """
        arrays = {}
        for name, size in sizes.items():
            x = getattr(averages, name)
            # A unit-wise block has a row for each channel, with a small matrix.
            diagonal = (
                diagonals(x) if self.kronecker else jnp.trace(x, axis1=2, axis2=3)
            )
            mean = jnp.sum(diagonal, axis=1) / size
            beyond = jnp.arange(x.shape[1]) >= size[:, None]
            amount = jnp.where(beyond, scale * mean[:, None], 0).astype(x.dtype)
            if self.kronecker:
                arrays[name] = add_diagonal(x, amount)
            else:
                p = x.shape[-1]
                arrays[name] = x + per_block(amount / p, x) * jnp.eye(p, dtype=x.dtype)
        return type(averages)(**arrays)

    def stack_factors(
        self,
        factors: Factors,
        moments: Shape | None = None,
    ) -> Block:
        """Stack the members' statistics to `[k, ...]`. Members without moments get zeros with the shape `moments`."""
        blocks = []
        for layer, count in zip(self.layers, self.counts, strict=True):
            block = self.stack(layer, factors[layer.name])
            if moments is not None and block.moments is None:
                zeros = jnp.zeros((count, *moments), block.A.dtype)
                block = dataclasses.replace(block, moments=zeros)
            blocks.append(block)
        return jax.tree.map(join_stacks, *blocks)

    def of_gradients(self, gradients: Array) -> Block:
        """Form gradient factors, which are not scaled, from averaged gradients `[k, d_in, d_out]`."""
        if not self.kronecker:
            return Unitwise(jnp.square(gradients.mT)[..., None])

        def second_moment(whole, diagonal, shape):
            spec = diagonal if len(shape) == 1 else whole
            return jnp.einsum(spec, gradients, gradients, precision="highest")

        # V^T V and V V^T for a kernel's gradient V, which lies here as V^T.
        a = second_moment("kia,kja->kij", "kia,kia->ki", self.shapes["A"])
        g = second_moment("kai,kaj->kij", "kai,kai->ki", self.shapes["G"])
        return Kronecker(a, g)

    def scaled(self, factors: Block, back: bool = False) -> Block:
        """Convert averaged results of `of_gradients` to block statistics, or with `back` the reverse.

        Afterwards the Kronecker product of `E[V^T V]` and `E[V V^T]` has the trace of `E[vec V vec V^T]`. Both factors
        also have this trace `t`, so each is divided by `sqrt(t)`. Captured and unit-wise statistics stay unchanged.
        """
        if self.captured or not isinstance(factors, Kronecker):
            return factors
        trace = jnp.sum(diagonals(factors.A), axis=-1)
        scale = trace if back else lax.rsqrt(jnp.where(trace > 0, trace, 1))
        return jax.tree.map(lambda x: x * per_block(scale, x), factors)

    def stack_matrices(
        self,
        leaves: Mapping[str, Array],
        dtype: DTypeLike,
        lay_out: LayOut | None = None,
    ) -> Array:
        """Stack the members' leaves (gradients or parameters) to `[k, d_in, d_out]`, zeros for missing members.

        The output axis comes last, as in the memory layout of most kernels. Transposing a stack would take time, and on
        CPUs every operation that transposes takes long to compile.

        Args:
          leaves: the leaves by path.
          dtype: the dtype of the stack.
          lay_out: lays out a layer's matrices `[copies, d_out, d_in]` over a mesh before they are cut into pieces.
        """
        matrices = []
        for layer, count in zip(self.layers, self.counts, strict=True):
            if layer.params[0] not in leaves:
                # `optax.masked` hides the layer. Its blocks keep their slots, so that a mask changes no shape.
                matrices.append(jnp.zeros((count, self.d_in, self.d_out), dtype))
                continue
            rows = layer.to_rows([leaves[path].astype(dtype) for path in layer.params])
            if layer.pieces > 1:
                matrix = rows.mT
                if lay_out is not None:
                    matrix = lay_out(layer, matrix)
                rows = layer.to_pieces(matrix).mT
            _, d_in, d_out = rows.shape
            matrices.append(pad_end(rows, self.d_in - d_in, self.d_out - d_out))
        return join_stacks(*matrices)

    @property
    def starts(self) -> tuple[int, ...]:
        """The index of each layer's first block."""
        return tuple(itertools.accumulate(self.counts[:-1], initial=0))

    def split_matrices(
        self,
        matrices: Array,
        starts: Mapping[int, Array],
    ) -> dict[str, Array]:
        """Split a stack into leaves by path: the inverse of `stack_matrices`.

        Args:
          matrices: `[k, d_in, d_out]`.
          starts: the entries of `Group.starts`, each mapped to the same number as an array. If these arrays are not
            constants for XLA, leaves of the same shape share one compiled kernel.
        """
        leaves: dict[str, Array] = {}
        members = zip(self.layers, self.counts, self.starts, strict=True)
        for layer, count, start in members:
            rows = lax.dynamic_slice_in_dim(matrices, starts[start], count)
            if layer.pieces > 1:
                rows = layer.from_pieces(rows.mT).mT
            rows = rows[..., : layer.d_out]
            leaves.update(zip(layer.params, layer.from_rows(rows), strict=True))
        return leaves

    def split(self, stacks: PyTree) -> Iterator[tuple[Layer, PyTree]]:
        """Yield each member with its part of `stacks`, a tree with leaves `[k, ...]`."""
        leaves, treedef = jax.tree.flatten(stacks)
        # Not by slices: a slice of the whole stack would be the state's own array, which a later step may donate.
        parts = [jnp.split(leaf, self.starts[1:]) for leaf in leaves]
        for k, layer in enumerate(self.layers):
            yield layer, jax.tree.unflatten(treedef, [part[k] for part in parts])


# How many FLOPs per step padding may add to save a group. On a CPU, a group of small blocks takes 0.3 ms per step and a
# second to compile.
WORTH_A_GROUP = 8e6
# Padding may make the blocks of a group this many times as large.
MOST_PADDING = 2.0
# Blocks with more rows are not padded. Over a mesh, each device unpacks the statistics of padded blocks.
LARGEST_PADDED = 1024
# The FLOPs that a step takes as long for as for an element of a unit-wise block.
FLOPS_PER_ELEMENT = 64


def group_layers(
    layers: Layers,
    preconditioner: BlockPreconditioner,
) -> tuple[Group, ...]:
    """Group the preconditioned layers by block shape. Groups are ordered by their first use in the program.

    If the preconditioner takes padding, similar shapes share a group.
    """
    by_shape: dict[str, list[Layer]] = {}
    for layer in layers.preconditioned:
        by_shape.setdefault(Group((layer,)).name, []).append(layer)
    groups: list[Group] = []
    equal = [Group(tuple(members)) for members in by_shape.values()]
    # The largest first, so that small blocks join large ones.
    equal.sort(key=lambda group: (-_flops(group, preconditioner), group.name))
    for group in equal:
        best = None
        least = WORTH_A_GROUP
        for number, other in enumerate(groups):
            if not _may_join(other, group, preconditioner):
                continue
            both = Group((*other.layers, *group.layers))
            apart = _flops(other, preconditioner) + _flops(group, preconditioner)
            added = _flops(both, preconditioner) - apart
            larger = _elements(both) / (_elements(other) + _elements(group))
            if added <= least and larger <= MOST_PADDING:
                best = number
                least = added
        if best is None:
            groups.append(group)
        else:
            groups[best] = Group((*groups[best].layers, *group.layers))
    by_name: dict[str, list[Layer]] = {}
    for group in groups:
        # Padding may have made two groups equal.
        by_name.setdefault(group.name, []).extend(group.layers)
    groups = []
    for members in by_name.values():
        # Sort the members by name, so that the block order in a state does not depend on the program.
        members.sort(key=lambda layer: layer.name)
        groups.append(Group(tuple(members)))
    groups.sort(key=lambda group: min(layer.order for layer in group.layers))
    return tuple(groups)


def _flops(group: Group, preconditioner: BlockPreconditioner) -> float:
    """Return the FLOPs for a group in each step."""
    if group.kronecker:
        return preconditioner.products * group.size * applied(group.shapes)
    return FLOPS_PER_ELEMENT * group.size * group.d_in * group.d_out


def _elements(group: Group) -> int:
    """Return the number of elements of a group's statistics and gradients."""
    shapes = [*group.shapes.values(), (group.d_in, group.d_out)]
    return group.size * sum(math.prod(shape) for shape in shapes)


def _may_join(a: Group, b: Group, preconditioner: BlockPreconditioner) -> bool:
    """Return whether two groups with blocks of different shapes may become one."""
    if a.kronecker and preconditioner.padding is None:
        return False
    kinds = set()
    for layer in (*a.layers, *b.layers):
        # A channel's matrix is inverted in closed form, which depends on its size.
        channel = None if layer.kronecker else layer.d_in
        kinds.add((layer.captured, layer.diagonal, channel))
        # The pieces of a cut kernel have padding of their own, which counts as part of their blocks.
        if layer.pieces > 1:
            return False
        for rows, *others in layer.block_shapes.values():
            if layer.kronecker and others and rows > LARGEST_PADDED:
                return False
    return len(kinds) == 1


def _largest(shapes: Iterable[Shape]) -> Shape:
    """Return the elementwise maximum of shapes."""
    return tuple(map(max, zip(*shapes, strict=True)))


def check_factors(
    factors: object,
    layers: Layers,
    preconditioner: BlockPreconditioner | None = None,
) -> None:
    """Check that `factors` belong to `layers`, and contain all that `preconditioner` needs.

    Raises:
      ValueError: `factors` is not a `Factors`; its layers or shapes differ from the layers with factors; or, with a
        `preconditioner`, gradients or moments are missing, have another shape, or are not used by the `preconditioner`.
    """
    if not isinstance(factors, Factors):
        raise ValueError(
            f"factors must be what kfac.statistics returns, but is {type(factors).__name__}: write "
            "factors = kfac.statistics(loss_fn, layers)(params, batch)"
        )
    how = "they must be of the layers of this optimizer"
    check_by_layer("factors", factors, layers.with_factors, how)
    if preconditioner is None:
        return
    expected: dict[str, Shape] = {}
    for layer in layers.with_gradient_factors:
        expected.update(zip(layer.params, layer.shapes, strict=True))
    shapes = {path: x.shape for path, x in factors.gradients.items()}
    for path in [*expected, *shapes]:
        if expected.get(path) != shapes.get(path):
            raise ValueError(
                f"factors.gradients must hold the gradient of {path!r} with the shape {expected.get(path)}, but has "
                f"{shapes.get(path)}: take factors from kfac.statistics with the layers of this optimizer"
            )
    check_moments(factors, layers, preconditioner)


def check_moments(
    factors: Factors,
    layers: Layers,
    preconditioner: BlockPreconditioner,
) -> None:
    """Raise a `ValueError` if moments are missing, have another shape, or are not used by the `preconditioner`."""
    for layer in layers.with_factors:
        block: Any = factors[layer.name]
        what = f"factors of layer {layer.name!r}"
        if not (preconditioner.uses_example_moments and layer.supports_ekfac):
            if block.moments is not None:
                raise ValueError(
                    f"{what} have moments, for which preconditioner={preconditioner!r} has no use: choose "
                    "preconditioner=kfac.EKFAC(), or take factors without basis="
                )
        elif block.moments is None:
            raise ValueError(
                f"{what} have no moments, which preconditioner={preconditioner!r} needs: "
                "value_and_grad(...)(params, batch, basis=kfac.curvature.eigenbasis(opt_state, layers))"
            )
        else:
            copies = block.A.shape[:-2]
            check_shapes(what, block, {"moments": (*copies, layer.d_out, layer.d_in)})
