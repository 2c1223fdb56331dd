"""Layers: their parameters, their curvature blocks, and the conversion between parameters and matrices."""

from __future__ import annotations

import abc
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, TypeAlias, overload

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

# Nested containers with any leaves, such as parameters or the arguments of a loss.
PyTree: TypeAlias = Any

KRONECKER_KINDS = ("dense", "conv", "embedding")
UNITWISE_KINDS = ("unitwise", "diagonal")
MAX_DIM = (
    8192  # the default bound on a factor's rows; larger factors become diagonal blocks
)
VOCABULARY = 30_000  # factors above the bound that have at least this many rows (vocabularies) become diagonal
UNREACHED = "no gradient reaches it"  # the note of a skipped layer that does not affect the loss


class UnsupportedLayerError(ValueError):
    """Raised by `find_layers(strict=True)` if an operation reads a parameter without exact per-example rows.

    The message names the parameter, the operation, the reason and the way out.
    """


class Layout(NamedTuple):
    """How a leaf becomes a stack of matrices. An atom is an axis of the leaf or a strided part of an axis.

    Attributes:
      roles: the role of each atom in memory order: `"stack"`, `"out"` or `"in"`.
      sizes: the length of each atom.
    """

    roles: tuple[str, ...]
    sizes: tuple[int, ...]

    def size(self, role: str) -> int:
        return math.prod(
            s for r, s in zip(self.roles, self.sizes, strict=True) if r == role
        )

    def _order(self) -> list[int]:
        return [
            k
            for role in ("stack", "in", "out")
            for k, r in enumerate(self.roles)
            if r == role
        ]

    def to_rows(self, leaf):
        """Return `leaf` as `[copies, d_in, d_out]`. For a leaf without input axes, `d_in` is 1."""
        rows = leaf.reshape(self.sizes).transpose(self._order())
        return rows.reshape(self.size("stack"), self.size("in"), self.size("out"))

    def from_rows(self, rows, shape: Sequence[int]):
        """Undo `to_rows` for a leaf of shape `shape`."""
        order = self._order()
        inverse = [order.index(k) for k in range(len(order))]
        return (
            rows.reshape([self.sizes[k] for k in order])
            .transpose(inverse)
            .reshape(shape)
        )


class BlockKind(abc.ABC):
    """A kind of block, as layers, groups and the optimizer use it.

    To add a kind, write a file like `_curvature/unitwise.py` and an entry in `BLOCKS`. The statistics of a kind are a
    `kfac._factors.Statistics`. A stack holds the statistics of `k` blocks of equal shape along its leading axis.

    Attributes:
      name: the kind's name, as it appears in the names of its groups.
      statistics: the type of its statistics.
      owned: whether each block has an owner among the devices. Otherwise every device has all blocks,
        `unitwise_damping` scales their damping, and the state of an inverse has an attribute `inverse`, the `Inverse`
        that made it.
      kernel: whether a block is a kernel or a piece of a kernel. Otherwise each row of its matrix is a leaf.
      captured: whether the statistics come from the loss. Otherwise the optimizer forms them from gradients.
    """

    name: ClassVar[str]
    statistics: ClassVar[Any]
    owned: ClassVar[bool] = False
    kernel: ClassVar[bool] = False
    captured: ClassVar[bool] = True

    @abc.abstractmethod
    def shapes(self, layer: Layer) -> dict[str, tuple[int, ...]]:
        """Return the shapes of one block's statistics."""

    @abc.abstractmethod
    def of_gradients(
        self, shapes: dict[str, tuple[int, ...]], gradients: jax.Array
    ) -> Any:
        """Form gradient factors from averaged gradients.

        Args:
          shapes: the shapes of one block's statistics.
          gradients: the averaged gradients `[k, d_in, d_out]`.
        """

    def inverse(self, inverse: Any) -> Any:
        """Return the `Inverse` of these blocks, given the user's `inverse`."""
        return inverse

    def layer_shapes(self, layer: Layer) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a layer's captured statistics."""
        return self.shapes(layer)

    def sizes(self, layer: Layer) -> tuple[int, int]:
        """Return `d_in` and `d_out` of one block's matrix."""
        return layer.d_in, layer.d_out

    def count(self, layer: Layer) -> int:
        """Return the number of a layer's blocks."""
        return 1

    def cells(self, layer: Layer) -> tuple[str, str]:
        """Return the cells for `A` and `G` in the table of layers."""
        return "", f"{layer.d_out} x {layer.d_in}x{layer.d_in}"

    def stack(self, layer: Layer, block: Any) -> Any:
        """Return the statistics of a layer as a stack of its blocks."""
        return jax.tree.map(lambda x: x[None], block)

    def unstack(self, layer: Layer, stack: Any) -> Any:
        """Undo `stack`."""
        return jax.tree.map(lambda x: x[0], stack)

    def scaled(self, factors: Any, back: bool = False) -> Any:
        """Scale gradient factors.

        Args:
          factors: running averages of the results of `of_gradients`, as a stack.
          back: whether to undo the scaling.
        """
        return factors

    def to_send(self, layer: Layer, packed: Any, fill: Callable[[Any], Any]) -> Any:
        """Return a layer's part of its group's message.

        Args:
          layer: the layer.
          packed: its packed statistics.
          fill: pads a vector with zeros.
        """
        return packed

    def sent(self, shapes: dict[str, tuple[int, ...]], stack: Any) -> Any:
        """Return the received stack as statistics, which are still to be `unpacked`.

        Args:
          shapes: the shapes of one block's statistics.
          stack: the stacked results of `to_send`.
        """
        return stack


BLOCKS: dict[
    str, BlockKind
] = {}  # keyed by `Layer.kind`; `_curvature/blocks.py` adds the entries


@dataclasses.dataclass(frozen=True)
class Layer:
    """The parameters of one curvature block and the dimensions of its factors.

    Attributes:
      name: the parameter path of the layer, joined by `/`.
      kind: the kind of the layer:

        - `"dense"`, `"conv"` or `"embedding"`: Kronecker factors `A`, `[d_in, d_in]`, and `G`, `[d_out, d_out]`.
        - `"unitwise"`: a `d_in` x `d_in` block for each of `d_out` channels (normalisation scale and shift).
        - `"diagonal"`: one number for each of `d_out` elements.
        - `"gradient"`: gradient factors, which the optimizer forms. They are Kronecker factors, or one number for each
          of `d_out` elements if `d_in` is 1.
        - `"skipped"`: no curvature.
      params: paths of the parameter leaves: kernel and bias, or scale and shift.
      shapes: shapes of these leaves.
      layouts: how each leaf becomes `[copies, rows, d_out]`.
      d_out: dimension of `G`, or number of channels.
      d_in: dimension of `A`, including the homogeneous 1 of a bias, or number of parameters per channel.
      copies: number of independent copies stacked in the same leaves (`lax.scan` over layers, batched kernels).
      stacked: whether the factors have a leading axis of length `copies`.
      diagonal: the names (`"A"`, `"G"`) of the factors that are kept as diagonals, `[d_in]` and `[d_out]`.
      cut: the numbers of pieces `(a, g)` into which the input and the output side are cut. `A` is kept as `a` diagonal
        blocks of neighbouring rows, `G` as `g`. The kernel becomes `a * g` pieces. Each piece has its own Kronecker
        block, made of one block of `A` and one block of `G`.
      weight_sharing: `"expand"` or `"reduce"`: whether positions are summed after or before products are formed.
      told_apart: whether the layer can form per-example gradients. This needs a single use of the kernel and rows whose
        examples are known.
      note: a remark, such as the reason why the parameters have no Kronecker block, or why a factor is diagonal or cut.
      positions: how many positions per example share the weight, at the traced shapes. None if unknown.
      uses: number of operations or loop iterations that read the parameters. If they read different parts, this is the
        maximum over the parts. Positions add up over uses.
      order: position of the layer's first use in the program, relative to the other layers. A backward pass reaches the
        layers in reverse order.
      overlap: how many windows of a convolution hold an input position away from the edges: 9 for 3 x 3, or 2.25 with
        stride 2. If several convolutions read the kernel, this is the maximum. Other layers have 1.

    For example, three stacked kernels with 10,000 inputs and `cut=(2, 1)` have these shapes of `A`: `(5000, 5000)` in
    `block_shapes`, `(2, 5000, 5000)` in `side_shapes` and `(3, 2, 5000, 5000)` in `factor_shapes`.
    """

    name: str
    kind: str
    params: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    layouts: tuple[Layout, ...] = ()
    d_out: int = 0
    d_in: int = 0
    copies: int = 1
    stacked: bool = False
    diagonal: tuple[str, ...] = ()
    cut: tuple[int, int] = (1, 1)
    weight_sharing: str = "expand"
    told_apart: bool = dataclasses.field(default=False, compare=False)
    note: str = dataclasses.field(default="", compare=False)
    positions: int | None = dataclasses.field(default=None, compare=False)
    uses: int = dataclasses.field(default=1, compare=False)
    order: int = dataclasses.field(default=0, compare=False)
    overlap: float = 1.0

    @property
    def kronecker(self) -> bool:
        """Whether the layer's block is a Kronecker product."""
        return self.kind in KRONECKER_KINDS or (
            self.kind == "gradient" and self.d_in > 1
        )

    @property
    def block(self) -> Any:
        """The layer's `BlockKind`. None for a skipped layer."""
        return BLOCKS.get(
            "diagonal" if self.kind == "gradient" and self.d_in == 1 else self.kind
        )

    @property
    def captured(self) -> bool:
        """Whether a `Factors` holds statistics for this layer, captured in the loss."""
        return (
            self.block is not None and self.block.captured and self.kind != "gradient"
        )

    @property
    def has_bias(self) -> bool:
        """Whether the last column of the layer's matrix is a bias."""
        return self.kind in KRONECKER_KINDS and len(self.params) == 2

    @property
    def num_params(self) -> int:
        """Number of elements in all leaves."""
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def factor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the layer's statistics, as in a `Factors`. Empty for a skipped layer."""
        return self.block.layer_shapes(self) if self.block else {}

    @property
    def correctable(self) -> bool:
        """Whether `Ekfac` corrects this layer's eigenvalues.

        This needs two whole factors and per-example gradients (`told_apart`).
        """
        return (
            self.kind in KRONECKER_KINDS
            and not self.diagonal
            and self.pieces == 1
            and self.told_apart
        )

    @property
    def pieces(self) -> int:
        """Number of pieces into which each copy of the kernel is cut."""
        return self.cut[0] * self.cut[1]

    @property
    def inversion(self) -> int:
        """Work to invert one copy's blocks, `d^3` for each `[d, d]` factor of each piece. Diagonals count as 0."""
        shapes = self.block.shapes(self).values() if self.block else ()
        return self.pieces * sum(shape[0] ** 3 for shape in shapes if len(shape) == 2)

    @property
    def block_shapes(self) -> dict[str, tuple[int, ...]]:
        """Factor shapes of one Kronecker block, `[d, d]`, or `[d]` if the factor is diagonal."""
        sizes = {"A": -(-self.d_in // self.cut[0]), "G": -(-self.d_out // self.cut[1])}
        return {
            name: (size,) if name in self.diagonal else (size, size)
            for name, size in sizes.items()
        }

    @property
    def side_shapes(self) -> dict[str, tuple[int, ...]]:
        """Factor shapes of one copy, `[d, d]`, `[blocks, d, d]` if the factor is cut, or `[d]` if it is diagonal."""
        sides = zip(
            self.block_shapes.items(), self.cut, (self.d_in, self.d_out), strict=True
        )
        return {
            name: (size,)
            if name in self.diagonal
            else (count, *shape)
            if count > 1
            else shape
            for (name, shape), count, size in sides
        }

    def to_pieces(self, matrix: jax.Array) -> jax.Array:
        """Cut matrices `[copies, d_out, d_in]` into pieces `[copies * pieces, rows, columns]`, padded with zeros."""
        (a, g), (columns, rows) = (
            self.cut,
            (shape[0] for shape in self.block_shapes.values()),
        )
        # The matrix lacks its last column if the bias belongs to another optimizer.
        filled = jnp.pad(
            matrix,
            ((0, 0), (0, g * rows - self.d_out), (0, a * columns - matrix.shape[2])),
        )
        return (
            filled.reshape(-1, g, rows, a, columns)
            .swapaxes(2, 3)
            .reshape(-1, rows, columns)
        )

    def from_pieces(self, pieces: jax.Array) -> jax.Array:
        """Undo `to_pieces`."""
        (a, g), (rows, columns) = self.cut, pieces.shape[1:]
        whole = (
            pieces.reshape(-1, g, a, rows, columns)
            .swapaxes(2, 3)
            .reshape(-1, g * rows, a * columns)
        )
        return whole[:, : self.d_out, : self.d_in]

    def to_matrix(self, leaves: Sequence[jax.Array]) -> jax.Array:
        """Join the layer's leaves (parameters or gradients) to one array.

        Returns:
          For a Kronecker layer `[copies, d_out, d_in]`, with the bias as the last column. For a unit-wise or diagonal
          layer `[1, d_out, d_in]`, with a column for each leaf.
        """
        return self.to_rows(leaves).mT

    def from_matrix(self, matrix: jax.Array) -> list[jax.Array]:
        """Undo `to_matrix`."""
        return self.from_rows(matrix.mT)

    def to_rows(self, leaves: Sequence[jax.Array]) -> jax.Array:
        """Join the layer's leaves to `[copies, d_in, d_out]`, the memory order of most kernels."""
        rows = [
            layout.to_rows(leaf)
            for layout, leaf in zip(self.layouts, leaves, strict=True)
        ]
        return jnp.concatenate(rows, axis=-2) if len(rows) > 1 else rows[0]

    def from_rows(self, rows: jax.Array) -> list[jax.Array]:
        """Undo `to_rows`."""
        ends = itertools.accumulate(layout.size("in") for layout in self.layouts)
        parts = [
            rows[:, end - layout.size("in") : end]
            for layout, end in zip(self.layouts, ends, strict=True)
        ]
        return [
            a.from_rows(part, shape)
            for a, part, shape in zip(self.layouts, parts, self.shapes, strict=True)
        ]

    def describe(self) -> str:
        """Return a short description for error messages."""
        factors = ", ".join(
            f"{name} {list(shape)}" for name, shape in self.factor_shapes.items()
        )
        details = [
            ", ".join(self.params),
            factors or "no factors",
            *([self.note] if self.note else []),
        ]
        return f"{self.kind} layer {self.name!r} ({'; '.join(details)})"


def leaf_alone(layer: Layer, k: int, d_in: int) -> Layer:
    """Return the layer with its `k`-th leaf only. The leaf's matrix has `d_in` columns."""
    fields = {
        name: getattr(layer, name)[k : k + 1]
        for name in ("params", "shapes", "layouts")
    }
    return dataclasses.replace(layer, d_in=d_in, **fields)


@jax.tree_util.register_static  # allows it as an argument of a jitted function
@dataclasses.dataclass(frozen=True, repr=False)
class Layers(Sequence[Layer]):
    """How each parameter leaf will be preconditioned: an immutable, hashable sequence of `Layer`.

    `print(layers)` shows every parameter leaf in exactly one row of a table. A leaf without a Kronecker block has the
    reason in its row. `layers[key]` accepts a position or a name.

    Comparison and hash ignore the attributes from `structure` on, so layers found with different batches are equal.

    Attributes:
      blocks: the layers, in the order of their first parameter leaf.
      paths: the path of every parameter leaf, in the order of `jax.tree.leaves(params)`.
      skip: the `skip=` patterns of `find_layers`.
      max_dim: the `max_dim=` bound of `find_layers`.
      reduce: the `reduce=` patterns of `find_layers`.
      gradient: the `gradient=` patterns of `find_layers`.
      structure: the parameters' tree structure.
      num_examples: the number of examples in the traced batch. None if unknown; `inverse_every="auto"` is then 1.
      batch_argnums: the arguments of the loss that hold the examples.
      shared: paths of the leaves in these arguments that all examples share.
      hidden: the reason if the examples are unknown, otherwise empty.
      unclear: the error message of `value_and_grad` if the number of examples is unclear, otherwise empty.
      dtype: the dtype in which statistics are summed: float64 if any parameter is float64, otherwise float32.
      splits: path and `PartitionSpec` of each parameter, if any parameter was split over a mesh.
    """

    blocks: tuple[Layer, ...]
    paths: tuple[str, ...]
    skip: tuple[str, ...] = ()
    max_dim: int | None = None
    reduce: tuple[str, ...] = ()
    gradient: tuple[str, ...] = ()
    structure: Any = dataclasses.field(default=None, compare=False)
    num_examples: int | None = dataclasses.field(default=None, compare=False)
    batch_argnums: tuple[int | str, ...] = dataclasses.field(default=(), compare=False)
    shared: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    hidden: str = dataclasses.field(default="", compare=False)
    unclear: str = dataclasses.field(default="", compare=False)
    dtype: str = dataclasses.field(default="float32", compare=False)
    splits: tuple[tuple[str, PartitionSpec], ...] = dataclasses.field(
        default=(), compare=False
    )

    @overload
    def __getitem__(self, index: int | str) -> Layer: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Layer, ...]: ...
    def __getitem__(self, index: int | str | slice) -> Layer | tuple[Layer, ...]:
        if isinstance(index, str):
            names = [layer.name for layer in self.blocks]
            if index not in names:
                raise KeyError(f"no layer {index!r}; the layers are {names}")
            return self.blocks[names.index(index)]
        return self.blocks[index]

    def __contains__(self, item: object) -> bool:
        return any(item in (layer, layer.name) for layer in self.blocks)

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def with_factors(self) -> tuple[Layer, ...]:
        """The layers in a `Factors`, which are all except skipped layers and layers with gradient factors."""
        return tuple(layer for layer in self.blocks if layer.captured)

    @property
    def with_gradient_factors(self) -> tuple[Layer, ...]:
        """The layers with gradient factors, which the optimizer forms from averaged gradients."""
        return tuple(layer for layer in self.with_blocks if not layer.captured)

    @property
    def with_blocks(self) -> tuple[Layer, ...]:
        """The layers that are preconditioned, which are all except skipped layers."""
        return tuple(layer for layer in self.blocks if layer.block)

    @functools.cached_property
    def skipped_paths(self) -> frozenset[str]:
        """Paths of the skipped layers' leaves."""
        return frozenset(
            path for layer in self.blocks if not layer.block for path in layer.params
        )

    def __repr__(self) -> str:
        return _table(self)


def _table(layers: Layers) -> str:
    header = (
        "layer",
        "kind",
        "parameters",
        "A",
        "G",
        "positions",
        "copies",
        "factors",
        "note",
    )
    rows = [header]
    total, size = 0, jnp.dtype(layers.dtype).itemsize
    for layer in layers:
        prefix = f"{layer.name}/"
        named = zip(layer.params, layer.shapes, strict=True)
        leaves = ", ".join(
            f"{path.removeprefix(prefix)} {list(shape)}" for path, shape in named
        )
        elements = sum(math.prod(shape) for shape in layer.factor_shapes.values())
        total += elements
        a, g = layer.block.cells(layer) if layer.block else ("", "")
        positions = "" if layer.positions is None else str(layer.positions)
        remarks = [f"{layer.uses} uses"] * (layer.uses > 1) + ["reduce"] * (
            layer.weight_sharing == "reduce"
        )
        if remarks:
            positions = f"{positions} ({', '.join(remarks)})".strip()
        memory = format_bytes(size * elements)
        rows.append(
            (
                layer.name,
                layer.kind,
                leaves,
                a,
                g,
                positions,
                str(layer.copies),
                memory,
                layer.note,
            )
        )
    widths = [max(len(row[k]) for row in rows) for k in range(len(header))]
    lines = [
        "  ".join(
            cell.ljust(width) for cell, width in zip(row, widths, strict=True)
        ).rstrip()
        for row in rows
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    params = sum(layer.num_params for layer in layers)
    where = " and ".join(f"argument {key!r}" for key in layers.batch_argnums)
    examples = (
        ""
        if layers.num_examples is None
        else f"; found with {layers.num_examples} example(s)"
    )
    examples += f" in {where}" if where else ""
    lines.append(
        f"{len(layers.paths)} parameter leaves ({params:,} parameters) in {len(layers)} blocks; "
        f"factors: {total:,} elements, {format_bytes(size * total)} in {layers.dtype}{examples}"
    )
    if layers.shared:
        lines.append(f"shared by all examples: {', '.join(layers.shared)}")
    if layers.hidden:
        lines.append(
            f"the examples are not known: {layers.hidden}. Vectors have the gradient's own diagonal; value_and_grad "
            "needs num_examples=, or an output marked with kfac.output"
        )
    return "\n".join(lines)


def format_bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def leaf_paths(tree: Any) -> list[str]:
    """Return the leaves' paths as `a/b/c`, in order.

    A flax nnx `Variable` with a single array adds nothing to the path. A tree that is a bare array has the path
    `params`.
    """
    paths = []
    for path, node in jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_variable)[
        0
    ]:
        inside = [inner for inner, _ in jax.tree_util.tree_flatten_with_path(node)[0]]
        for inner in [()] if _is_variable(node) and len(inside) == 1 else inside:
            paths.append(
                jax.tree_util.keystr((*path, *inner), simple=True, separator="/")
                or "params"
            )
    return paths


def _is_variable(node: Any) -> bool:
    bases = (
        base for base in type(node).__mro__ if base.__module__.startswith("flax.nnx")
    )
    return any(base.__name__ in ("Variable", "VariableState") for base in bases)


def leaves_by_path(tree: Any) -> dict[str, Any]:
    """Return the leaves of a parameter or gradient tree by path."""
    return dict(zip(leaf_paths(tree), jax.tree.leaves(tree), strict=True))


def map_by_path(fn: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Map `fn(path, leaf, *other_leaves)` over the leaves of `tree` and `rest`."""
    return jax.tree.map(
        fn, jax.tree.unflatten(jax.tree.structure(tree), leaf_paths(tree)), tree, *rest
    )


def find_splits(params: Any) -> tuple[tuple[str, PartitionSpec], ...]:
    """Return the path and spec of each parameter if any parameter is split over a mesh, otherwise an empty tuple.

    Tracers count as unsplit, so the result is empty under `jit`.
    """
    arrays = {
        path: x
        for path, x in leaves_by_path(params).items()
        if not isinstance(x, jax.core.Tracer)
    }
    shardings = {path: getattr(x, "sharding", None) for path, x in arrays.items()}
    named = {
        path: s.spec for path, s in shardings.items() if isinstance(s, NamedSharding)
    }
    return tuple(sorted(named.items())) if any(map(any, named.values())) else ()
