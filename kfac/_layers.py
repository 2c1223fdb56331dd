"""What a layer is: its parameters, its curvature block, and how its parameters become a matrix."""

from __future__ import annotations

import abc
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, overload

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

KRONECKER_KINDS = ("dense", "conv", "embedding")
UNITWISE_KINDS = ("unitwise", "diagonal")
MAX_DIM = 8192  # rows of a factor by default, and of a block of a larger one
VOCABULARY = 30_000  # rows of a factor above the bound that is kept as its diagonal: tables of words have as many
UNREACHED = "no gradient reaches it"  # the note of a skipped layer that is, as far as the loss goes, a constant


class UnsupportedLayerError(ValueError):
    """A matrix product, convolution or opaque construct reads a parameter in a way that cannot be treated exactly.

    The message names the parameter, the operation, the reason and the way out.
    """


class Layout(NamedTuple):
    """How a leaf becomes matrices: its atoms in memory order, each with a role, `"stack"`, `"out"` or `"in"`."""

    roles: tuple[str, ...]
    sizes: tuple[int, ...]

    def size(self, role: str) -> int:
        return math.prod(s for r, s in zip(self.roles, self.sizes, strict=True) if r == role)

    def _order(self) -> list[int]:
        return [k for role in ("stack", "in", "out") for k, r in enumerate(self.roles) if r == role]

    def to_rows(self, leaf):
        """`leaf` as `[copies, d_in, d_out]` (`d_in` is 1 for a leaf without input axes)."""
        rows = leaf.reshape(self.sizes).transpose(self._order())
        return rows.reshape(self.size("stack"), self.size("in"), self.size("out"))

    def from_rows(self, rows, shape: Sequence[int]):
        """The inverse of `to_rows`, for a leaf of shape `shape`."""
        order = self._order()
        inverse = [order.index(k) for k in range(len(order))]
        return rows.reshape([self.sizes[k] for k in order]).transpose(inverse).reshape(shape)


class BlockKind(abc.ABC):
    """A kind of block: what layers, groups and the optimizer ask of it.

    A new one is a file like `_curvature/unitwise.py`, and an entry in `BLOCKS`. Its statistics are a
    `kfac._factors.Statistics`; a stack holds those of `k` blocks of one shape, along its leading axis.

    Attributes:
      name: the names of its groups begin so.
      statistics: the type of its statistics.
      owned: whether blocks are dealt out to the devices that own them. Else every device has all of them, they are
        damped by `unitwise_damping`, and the state of an inverse names the inverse in an attribute `inverse`.
      kernel: whether a block is a kernel, or a piece of one. Else each row of its matrix is a leaf.
      captured: whether statistics come from the loss. Else the optimizer forms them of gradients.
    """

    name: ClassVar[str]
    statistics: ClassVar[Any]
    owned: ClassVar[bool] = False
    kernel: ClassVar[bool] = False
    captured: ClassVar[bool] = True

    @abc.abstractmethod
    def shapes(self, layer: Layer) -> dict[str, tuple[int, ...]]:
        """Shapes of the statistics of one block."""

    @abc.abstractmethod
    def of_gradients(self, shapes: dict[str, tuple[int, ...]], gradients: jax.Array) -> Any:
        """The gradient's own statistics, of averaged gradients `[k, d_in, d_out]`, for factors with `shapes`."""

    def inverse(self, inverse: Any) -> Any:
        """The `Inverse` of such blocks, where `inverse` is the user's choice."""
        return inverse

    def layer_shapes(self, layer: Layer) -> dict[str, tuple[int, ...]]:
        """Shapes of the statistics of a layer, as they are captured."""
        return self.shapes(layer)

    def sizes(self, layer: Layer) -> tuple[int, int]:
        """`d_in` and `d_out` of the matrix of one block."""
        return layer.d_in, layer.d_out

    def count(self, layer: Layer) -> int:
        """How many blocks a layer has."""
        return 1

    def cells(self, layer: Layer) -> tuple[str, str]:
        """What the table of layers says of the factors `A` and `G`."""
        return "", f"{layer.d_out} x {layer.d_in}x{layer.d_in}"

    def stack(self, layer: Layer, block: Any) -> Any:
        """The statistics of a layer as a stack of its blocks."""
        return jax.tree.map(lambda x: x[None], block)

    def unstack(self, layer: Layer, stack: Any) -> Any:
        """The inverse of `stack`."""
        return jax.tree.map(lambda x: x[0], stack)

    def scaled(self, factors: Any, back: bool = False) -> Any:
        """The statistics of a stack from running averages of what `of_gradients` returns; or `back` to these."""
        return factors

    def to_send(self, layer: Layer, packed: Any, fill: Callable[[Any], Any]) -> Any:
        """What a layer puts into the message of its group: its packed vectors, each filled up by `fill`."""
        return packed

    def sent(self, shapes: dict[str, tuple[int, ...]], stack: Any) -> Any:
        """The statistics that a stack of these is where it arrives, still to be `unpacked`."""
        return stack


BLOCKS: dict[str, BlockKind] = {}  # by the kind of a layer: `_curvature/blocks.py` has the entries


@dataclasses.dataclass(frozen=True)
class Layer:
    """One block of the curvature: the parameters it covers and the dimensions of its factors.

    Attributes:
      name: the parameter path of the layer, joined by `/`.
      kind: `"dense"`, `"conv"` or `"embedding"` (Kronecker: `A` is `[d_in, d_in]`, `G` is `[d_out, d_out]`),
        `"unitwise"` (a block of `d_in` x `d_in` for each of `d_out` channels: normalisation scale and shift),
        `"diagonal"` (one number for each of `d_out` elements), `"gradient"` (the gradient's own factors, which the
        optimizer forms: Kronecker, or with `d_in` 1 one number for each of `d_out` elements) or `"skipped"` (no
        curvature).
      params: paths of the parameter leaves: kernel and bias, or scale and shift.
      shapes: shapes of these leaves.
      layouts: how each leaf becomes `[copies, rows, d_out]`.
      d_out: dimension of `G`, or number of channels.
      d_in: dimension of `A`, the homogeneous 1 of a bias included, or parameters per channel.
      copies: independent copies stacked in the same leaves (`lax.scan` over layers, batched kernels).
      stacked: whether the factors carry a leading axis of length `copies`.
      diagonal: which of `"A"` and `"G"` are kept as their diagonals, `[d_in]` and `[d_out]`.
      cut: in how many diagonal blocks of neighbouring rows `A` and `G` are kept. The kernel is then cut into as many
        pieces, each with a Kronecker block of its own: of one block of `A` and one of `G`.
      weight_sharing: `"expand"` or `"reduce"`: whether positions are summed after or before products are formed.
      told_apart: whether the gradient of each example can be formed: there is one use, whose examples are known.
      note: why the parameters have no Kronecker block, or a factor of it is diagonal.
      positions: positions per example that share the weight, at the shapes the layer was found with.
      uses: how many operations, or iterations of a loop, read the parameters (or each part of them); their positions
        add up.
      order: of its first use in the program, among those of all layers; a backward pass comes to the layer in reverse.
      overlap: how many windows of a convolution hold an input position, away from the edges: 9 for 3 x 3, 2.25 for 3 x
        3 with stride 2. The most, where several operations read the kernel; 1 for all other layers.

    Shapes of a factor `A` of three stacked kernels with 10,000 inputs, and `cut=(2, 1)`: `block_shapes` has
    `(5000, 5000)`, `side_shapes` `(2, 5000, 5000)`, `factor_shapes` `(3, 2, 5000, 5000)`.
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
        """Whether its block is a Kronecker product."""
        return self.kind in KRONECKER_KINDS or (self.kind == "gradient" and self.d_in > 1)

    @property
    def block(self) -> Any:
        """Its `BlockKind`; None of a skipped layer."""
        return BLOCKS.get("diagonal" if self.kind == "gradient" and self.d_in == 1 else self.kind)

    @property
    def captured(self) -> bool:
        """Whether its statistics come from the loss, in a `Factors`."""
        return self.block is not None and self.block.captured and self.kind != "gradient"

    @property
    def has_bias(self) -> bool:
        """Whether a bias makes up the last column of the matrix."""
        return self.kind in KRONECKER_KINDS and len(self.params) == 2

    @property
    def num_params(self) -> int:
        """Number of elements of all leaves."""
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def factor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the statistics of this layer, in a `Factors` and in running averages."""
        return self.block.layer_shapes(self) if self.block else {}

    @property
    def correctable(self) -> bool:
        """Whether `Ekfac` corrects eigenvalues of this layer: it has two whole factors, one use, and known examples."""
        return self.kind in KRONECKER_KINDS and not self.diagonal and self.pieces == 1 and self.told_apart

    @property
    def pieces(self) -> int:
        """Into how many pieces each copy of the kernel is cut."""
        return self.cut[0] * self.cut[1]

    @property
    def inversion(self) -> int:
        """The work of an inversion of one copy, `d^3` for each whole factor."""
        shapes = self.block.shapes(self).values() if self.block else ()
        return self.pieces * sum(shape[0] ** 3 for shape in shapes if len(shape) == 2)

    @property
    def block_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the factors of one Kronecker block, `[d, d]`, or `[d]` for a diagonal one."""
        sizes = {"A": -(-self.d_in // self.cut[0]), "G": -(-self.d_out // self.cut[1])}
        return {name: (size,) if name in self.diagonal else (size, size) for name, size in sizes.items()}

    @property
    def side_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the factors of one copy, `[d, d]`; of one that is cut `[blocks, d, d]`, of a diagonal one `[d]`."""
        sides = zip(self.block_shapes.items(), self.cut, (self.d_in, self.d_out), strict=True)
        return {
            name: (size,) if name in self.diagonal else (count, *shape) if count > 1 else shape
            for (name, shape), count, size in sides
        }

    def to_pieces(self, matrix: jax.Array) -> jax.Array:
        """Cuts matrices `[copies, d_out, d_in]` into pieces `[copies pieces, rows, columns]`, filled up with zeros."""
        (a, g), (columns, rows) = self.cut, (shape[0] for shape in self.block_shapes.values())
        # Without the last column where the bias is for another optimizer.
        filled = jnp.pad(matrix, ((0, 0), (0, g * rows - self.d_out), (0, a * columns - matrix.shape[2])))
        return filled.reshape(-1, g, rows, a, columns).swapaxes(2, 3).reshape(-1, rows, columns)

    def from_pieces(self, pieces: jax.Array) -> jax.Array:
        """The inverse of `to_pieces`."""
        (a, g), (rows, columns) = self.cut, pieces.shape[1:]
        whole = pieces.reshape(-1, g, a, rows, columns).swapaxes(2, 3).reshape(-1, g * rows, a * columns)
        return whole[:, : self.d_out, : self.d_in]

    def to_matrix(self, leaves: Sequence[jax.Array]) -> jax.Array:
        """The layer's leaves (parameters, gradients) as one array.

        Returns:
          `[copies, d_out, d_in]` for a Kronecker layer, the bias as its last column; `[1, d_out, d_in]` for a unit-wise
          or diagonal one, a column for each leaf.
        """
        return self.to_rows(leaves).mT

    def from_matrix(self, matrix: jax.Array) -> list[jax.Array]:
        """The inverse of `to_matrix`."""
        return self.from_rows(matrix.mT)

    def to_rows(self, leaves: Sequence[jax.Array]) -> jax.Array:
        """The layer's leaves with outputs last, as most kernels lie in memory: `[copies, d_in, d_out]`."""
        rows = [layout.to_rows(leaf) for layout, leaf in zip(self.layouts, leaves, strict=True)]
        return jnp.concatenate(rows, axis=-2) if len(rows) > 1 else rows[0]

    def from_rows(self, rows: jax.Array) -> list[jax.Array]:
        """The inverse of `to_rows`."""
        ends = itertools.accumulate(layout.size("in") for layout in self.layouts)
        parts = [rows[:, end - layout.size("in") : end] for layout, end in zip(self.layouts, ends, strict=True)]
        return [a.from_rows(part, shape) for a, part, shape in zip(self.layouts, parts, self.shapes, strict=True)]

    def describe(self) -> str:
        """The layer in a few words, for error messages."""
        factors = ", ".join(f"{name} {list(shape)}" for name, shape in self.factor_shapes.items())
        details = [", ".join(self.params), factors or "no factors", *([self.note] if self.note else [])]
        return f"{self.kind} layer {self.name!r} ({'; '.join(details)})"


def leaf_alone(layer: Layer, k: int, d_in: int) -> Layer:
    """The layer without its leaves but the `k`-th, whose matrix has `d_in` columns."""
    fields = {name: getattr(layer, name)[k : k + 1] for name in ("params", "shapes", "layouts")}
    return dataclasses.replace(layer, d_in=d_in, **fields)


@jax.tree_util.register_static  # so that it may be an argument of a jitted function
@dataclasses.dataclass(frozen=True, repr=False)
class Layers(Sequence[Layer]):
    """How each parameter leaf will be preconditioned: an immutable, hashable sequence of `Layer`.

    Printing it shows every parameter leaf in exactly one row, with the reason beside each that has no Kronecker block.
    A layer can be looked up by position or by name.

    Attributes:
      blocks: the layers, in the order of their first parameter leaf.
      paths: the path of every parameter leaf, in the order of `jax.tree.leaves(params)`.
      skip: the patterns given to `find_layers`.
      max_dim: the bound given to `find_layers`.
      reduce: the patterns of kernels in the setting "reduce" given to `find_layers`.
      gradient: the patterns of leaves with the gradient's own factors given to `find_layers`.
      structure: that of the tree of parameters.
      num_examples: of the batch that the layers were found with; None where it was not clear. `inverse_every="auto"`
        counts with it, and is 1 without. Not compared: layers are the same for all batches.
      batch_argnums: the arguments of the loss that hold the examples.
      shared: leaves of these that all examples share.
      hidden: why the examples are not known, if they are not.
      unclear: the error of statistics whose number of examples is not clear; empty if it is.
      dtype: in which statistics are summed, of the widest parameter.
      splits: path and `PartitionSpec` of each parameter, if some were split over a mesh. Not compared.
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
    splits: tuple[tuple[str, PartitionSpec], ...] = dataclasses.field(default=(), compare=False)

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
        """The layers whose statistics are in a `Factors`: all but those skipped and of the gradient's own factors."""
        return tuple(layer for layer in self.blocks if layer.captured)

    @property
    def with_gradient_factors(self) -> tuple[Layer, ...]:
        """The layers whose factors are formed from their averaged gradient."""
        return tuple(layer for layer in self.with_blocks if not layer.captured)

    @property
    def with_blocks(self) -> tuple[Layer, ...]:
        """The layers that are preconditioned, which are all but those skipped."""
        return tuple(layer for layer in self.blocks if layer.block)

    @functools.cached_property
    def skipped_paths(self) -> frozenset[str]:
        """Paths of the leaves that are not preconditioned."""
        return frozenset(path for layer in self.blocks if not layer.block for path in layer.params)

    def __repr__(self) -> str:
        return _table(self)


def _table(layers: Layers) -> str:
    header = ("layer", "kind", "parameters", "A", "G", "positions", "copies", "factors", "note")
    rows = [header]
    total, size = 0, jnp.dtype(layers.dtype).itemsize
    for layer in layers:
        prefix = f"{layer.name}/"
        named = zip(layer.params, layer.shapes, strict=True)
        leaves = ", ".join(f"{path.removeprefix(prefix)} {list(shape)}" for path, shape in named)
        elements = sum(math.prod(shape) for shape in layer.factor_shapes.values())
        total += elements
        a, g = layer.block.cells(layer) if layer.block else ("", "")
        positions = "" if layer.positions is None else str(layer.positions)
        remarks = [f"{layer.uses} uses"] * (layer.uses > 1) + ["reduce"] * (layer.weight_sharing == "reduce")
        if remarks:
            positions = f"{positions} ({', '.join(remarks)})".strip()
        memory = format_bytes(size * elements)
        rows.append((layer.name, layer.kind, leaves, a, g, positions, str(layer.copies), memory, layer.note))
    widths = [max(len(row[k]) for row in rows) for k in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    params = sum(layer.num_params for layer in layers)
    where = " and ".join(f"argument {key!r}" for key in layers.batch_argnums)
    examples = "" if layers.num_examples is None else f"; found with {layers.num_examples} example(s)"
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
    """Returns the paths of the leaves as `a/b/c`, in order, without names of what flax nnx wraps around arrays."""
    paths = []
    for path, node in jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_variable)[0]:
        inside = [inner for inner, _ in jax.tree_util.tree_flatten_with_path(node)[0]]
        for inner in [()] if _is_variable(node) and len(inside) == 1 else inside:
            paths.append(jax.tree_util.keystr((*path, *inner), simple=True, separator="/") or "params")
    return paths


def _is_variable(node: Any) -> bool:
    bases = (base for base in type(node).__mro__ if base.__module__.startswith("flax.nnx"))
    return any(base.__name__ in ("Variable", "VariableState") for base in bases)


def leaves_by_path(tree: Any) -> dict[str, Any]:
    """The leaves of a tree of parameters or gradients by their paths."""
    return dict(zip(leaf_paths(tree), jax.tree.leaves(tree), strict=True))


def map_by_path(fn: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """`fn(path, leaf, *leaves of the others)` for each leaf of `tree`."""
    return jax.tree.map(fn, jax.tree.unflatten(jax.tree.structure(tree), leaf_paths(tree)), tree, *rest)


def find_splits(params: Any) -> tuple[tuple[str, PartitionSpec], ...]:
    """Return paths and specs of parameters if some are split over a mesh; nothing under `jit`, which hides that."""
    arrays = {path: x for path, x in leaves_by_path(params).items() if not isinstance(x, jax.core.Tracer)}
    shardings = {path: getattr(x, "sharding", None) for path, x in arrays.items()}
    named = {path: s.spec for path, s in shardings.items() if isinstance(s, NamedSharding)}
    return tuple(sorted(named.items())) if any(map(any, named.values())) else ()
