"""Layers: their parameters, their curvature blocks, and the conversion between parameters and matrices."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from kfac._leaves import Layout
from kfac._packing import Shape, pad_end, pieces_along

FactorShapes = dict[str, Shape]
# Pairs of a regular expression and `"skip"`, `"reduce"`, `"gradient"` or a multiplier, see `find_layers`.
Rules = tuple[tuple[str, str | float], ...]
KRONECKER_KINDS = ("dense", "conv", "embedding")
# Factors with more rows than the default bound become diagonal blocks, and vocabularies become diagonal.
MAX_DIM = 8192
VOCABULARY = 30_000
# Attributes of `Layers` in version 0.4, with the present ones.
FORMER = {
    "blocks": "layers",
    "gradient_factors": "rules",
    "kfac_reduce": "rules",
    "skip": "rules",
    "with_blocks": "preconditioned",
}
UNREACHED = "no gradient reaches it"


class UnsupportedLayerError(ValueError):
    """Raised by `find_layers(strict=True)` if an operation reads a parameter without exact per-example rows.

    The message names the parameter, the operation, the reason and the way out::

        layers = kfac.find_layers(loss_fn, params, batch, strict=True)
    """


def _not_compared(default: Any) -> Any:
    """Return a field of a dataclass that comparison and hash ignore."""
    return dataclasses.field(default=default, compare=False)


@dataclasses.dataclass(frozen=True)
class Layer:
    """The parameters of one curvature block and the dimensions of its factors.

    Attributes:
      name: the parameter path of the layer, joined by `/`.
      kind: the kind of the layer:

        - `"dense"`, `"conv"` or `"embedding"`: Kronecker factors `A`, `[d_in, d_in]`, and `G`, `[d_out, d_out]`.
        - `"unitwise"`: a `d_in` x `d_in` block for each of `d_out` channels (normalisation scale and shift).
        - `"diagonal"`: one number for each of `d_out` elements.
        - `"gradient-factors"`: gradient factors, which the optimizer forms. They are Kronecker factors, or one number
          for each of `d_out` elements if `d_in` is 1.
        - `"skipped"`: no curvature.
      params: paths of the parameter leaves: kernel and bias, or scale and shift.
      shapes: shapes of these leaves.
      layouts: how each leaf becomes `[copies, rows, d_out]`.
      d_out: dimension of `G`, or number of channels.
      d_in: dimension of `A`, including the homogeneous 1 of a bias, or number of parameters per channel.
      copies: number of independent copies stacked in the same leaves (`lax.scan` over layers, batched kernels).
      stacked: whether the factors have a leading axis of length `copies`.
      diagonal: the names (`"A"`, `"G"`) of the factors that are kept as diagonals, `[d_in]` and `[d_out]`.
      num_blocks: the numbers of pieces `(a, g)` into which the input and the output side are cut. `A` is kept as `a`
        diagonal blocks of neighbouring rows, `G` as `g`. The kernel becomes `a * g` pieces. Each piece has its own
        Kronecker block, made from one block in `A` and one in `G`.
      weight_sharing: `"expand"` or `"reduce"`: whether positions are summed after or before products are formed.
      has_example_gradients: whether the layer can form per-example gradients: a single use and known examples.
      note: a remark, such as the reason why the parameters have no Kronecker block, or why a factor is diagonal or cut.
      positions: how many positions per example share the weight, at the traced shapes. None if unknown.
      uses: number of operations or loop iterations that read the parameters. If they read different parts, this is the
        maximum over the parts. Positions add up over uses.
      order: position of the layer's first use in the program, relative to the other layers. A backward pass reaches the
        layers in reverse order.
      overlap: a factor on the squared length of a step. For a convolution, it is the number of windows that hold an
        input position away from the edges: 9 for 3 x 3, or 2.25 with stride 2. If several convolutions read the kernel,
        it is their maximum. For a vector that is copied to `p` positions of each example, it is `1 / p`. Other layers
        have 1.
      multiplier: a factor on the layer's steps, from the `rules` of `find_layers`.

    For example, three stacked kernels with 10,000 inputs and `num_blocks=(2, 1)` have these shapes of `A`: `(5000,
    5000)` in `block_shapes`, `(2, 5000, 5000)` in `side_shapes` and `(3, 2, 5000, 5000)` in `factor_shapes`.
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
    num_blocks: tuple[int, int] = (1, 1)
    weight_sharing: str = "expand"
    has_example_gradients: bool = False
    note: str = _not_compared("")
    positions: int | None = None
    uses: int = _not_compared(1)
    order: int = _not_compared(0)
    overlap: float = 1.0
    multiplier: float = 1.0

    @property
    def kronecker(self) -> bool:
        """Whether the layer's block is a Kronecker product."""
        gradient = self.kind == "gradient-factors" and self.d_in > 1
        return gradient or self.kind in KRONECKER_KINDS

    @property
    def captured(self) -> bool:
        """Whether a `Factors` holds statistics for this layer, captured in the loss."""
        return self.kind not in ("gradient-factors", "skipped")

    @property
    def has_bias(self) -> bool:
        """Whether the last column of the layer's matrix is a bias."""
        return self.kind in KRONECKER_KINDS and len(self.params) == 2

    @property
    def num_params(self) -> int:
        """Number of elements in all leaves."""
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def factor_shapes(self) -> FactorShapes:
        """Shapes of the layer's statistics, as in a `Factors`. Empty for a skipped layer."""
        if self.kind == "skipped":
            return {}
        if not self.kronecker:
            return self.block_shapes
        lead = (self.copies,) if self.stacked else ()
        return {name: (*lead, *shape) for name, shape in self.side_shapes.items()}

    @property
    def supports_ekfac(self) -> bool:
        """Whether `EKFAC` corrects this layer's eigenvalues.

        This needs two whole factors and per-example gradients (`has_example_gradients`).
        """
        if self.kind not in KRONECKER_KINDS or self.diagonal:
            return False
        return self.pieces == 1 and self.has_example_gradients

    @property
    def pieces(self) -> int:
        """Number of pieces into which each copy of the kernel is cut."""
        return self.num_blocks[0] * self.num_blocks[1]

    @property
    def refresh_cost(self) -> int:
        """Work to refresh one copy's blocks, `d^3` for each `[d, d]` factor of each piece. Diagonals count as 0."""
        shapes = self.block_shapes.values()
        return self.pieces * sum(shape[0] ** 3 for shape in shapes if len(shape) == 2)

    @property
    def block_shapes(self) -> FactorShapes:
        """Shapes of one block's statistics, `[d, d]` for a factor, `[d]` if it is diagonal, or `[d_out, p, p]`."""
        if not self.kronecker:
            return {"F": (self.d_out, self.d_in, self.d_in)}
        a, g = self.num_blocks
        sizes = {"A": math.ceil(self.d_in / a), "G": math.ceil(self.d_out / g)}
        shapes: FactorShapes = {}
        for name, size in sizes.items():
            shapes[name] = (size,) if name in self.diagonal else (size, size)
        return shapes

    @property
    def side_shapes(self) -> FactorShapes:
        """Factor shapes of one copy, `[d, d]`, `[blocks, d, d]` if the factor is cut, or `[d]` if it is diagonal."""
        shapes = self.block_shapes
        for name, shape in shapes.items():
            count = pieces_along(name, self.num_blocks)
            if count > 1:
                shapes[name] = (count, *shape)
        for name in self.diagonal:
            shapes[name] = (self.d_in if name == "A" else self.d_out,)
        return shapes

    def to_pieces(self, matrix: Array) -> Array:
        """Cut matrices `[copies, d_out, d_in]` into pieces `[copies * pieces, rows, columns]`, padded with zeros."""
        a, g = self.num_blocks
        rows = math.ceil(self.d_out / g)
        columns = math.ceil(self.d_in / a)
        matrix = pad_end(matrix, g * rows - self.d_out, a * columns - self.d_in)
        pieces = matrix.reshape(-1, g, rows, a, columns).swapaxes(2, 3)
        return pieces.reshape(-1, rows, columns)

    def from_pieces(self, pieces: Array) -> Array:
        """Undo `to_pieces`, and keep the column of a bias."""
        a, g = self.num_blocks
        _, rows, columns = pieces.shape
        matrix = pieces.reshape(-1, g, a, rows, columns).swapaxes(2, 3)
        matrix = matrix.reshape(-1, g * rows, a * columns)
        return matrix[:, : self.d_out, : self.d_in]

    def to_matrix(self, leaves: Sequence[Array]) -> Array:
        """Join the layer's leaves (parameters or gradients) to one array.

        Returns:
          For a Kronecker layer `[copies, d_out, d_in]`, with the bias as the last column. For a unit-wise or diagonal
          layer `[1, d_out, d_in]`, with a column for each leaf.
        """
        return self.to_rows(leaves).mT

    def from_matrix(self, matrix: Array) -> list[Array]:
        """Undo `to_matrix`."""
        return self.from_rows(matrix.mT)

    def to_rows(self, leaves: Sequence[Array]) -> Array:
        """Join the layer's leaves to `[copies, d_in, d_out]`, the memory order of most kernels."""
        pairs = zip(self.layouts, leaves, strict=True)
        rows = [layout.to_rows(leaf) for layout, leaf in pairs]
        return jnp.concatenate(rows, axis=-2) if len(rows) > 1 else rows[0]

    def from_rows(self, rows: Array) -> list[Array]:
        """Undo `to_rows`."""
        leaves = []
        start = 0
        for layout, shape in zip(self.layouts, self.shapes, strict=True):
            end = start + layout.size("in")
            leaves.append(layout.from_rows(rows[:, start:end], shape))
            start = end
        return leaves

    def describe(self) -> str:
        """Return a short description for error messages."""
        shapes = self.factor_shapes.items()
        factors = ", ".join(f"{name} {list(shape)}" for name, shape in shapes)
        details = [", ".join(self.params), factors or "no factors"]
        if self.note:
            details.append(self.note)
        return f"{self.kind} layer {self.name!r} ({'; '.join(details)})"


@jax.tree_util.register_static  # allows it as an argument of a jitted function
@dataclasses.dataclass(frozen=True, repr=False)
class Layers(Sequence[Layer]):
    """How each parameter leaf will be preconditioned: an immutable, hashable sequence of `Layer`.

    `print(layers)` shows every parameter leaf in exactly one row of a table. A leaf without a Kronecker block has the
    reason in its row. `layers[key]` accepts a position or a name::

        print(kfac.find_layers(loss_fn, params, batch)["hidden"].kind)

    Layers are static arguments of jitted functions, so comparison and hash cover all attributes that statistics or an
    optimizer depend on. Layers found with different numbers of examples are different.

    Attributes:
      layers: the layers, in the order of their first parameter leaf.
      paths: the path of every parameter leaf, in the order of `jax.tree.leaves(params)`.
      rules: the `rules=` of `find_layers`, as pairs of a pattern and a value.
      max_factor_dim: the `max_factor_dim=` bound of `find_layers`.
      structure: the parameters' tree structure.
      num_examples: the number of examples in the traced batch. None if unknown; `kfac.kfac` then does not know the cost
        of statistics.
      batch_argnums: the arguments of the loss that hold the examples.
      dtype: the dtype in which statistics are summed: float64 if any parameter is float64, otherwise float32.
      param_specs: path and `PartitionSpec` of each parameter, if any parameter was split over a mesh.
    """

    layers: tuple[Layer, ...]
    paths: tuple[str, ...]
    rules: Rules = ()
    max_factor_dim: int | None = None
    structure: Any = dataclasses.field(default=None, compare=False)
    num_examples: int | None = None
    batch_argnums: tuple[int | str, ...] = ()
    # Names of the arrays in these arguments that all examples share, as in `Batch.shared`.
    _shared_arrays: tuple[str, ...] = ()
    # The reason if the examples are unknown, otherwise empty.
    _unknown_batch_reason: str = _not_compared("")
    # The error message of `value_and_grad` if the number of examples is unclear, otherwise empty.
    _unclear: str = _not_compared("")
    # The FLOPs per example of products with frozen kernels, forward and back, which the gradient needs as well.
    _frozen_flops: float = _not_compared(0.0)
    dtype: str = "float32"
    param_specs: tuple[tuple[str, PartitionSpec], ...] = _not_compared(())

    if not TYPE_CHECKING:  # so that mypy still finds misspelt attributes

        def __getattr__(self, name):
            if name in FORMER:
                raise AttributeError(f"Layers.{name} is now Layers.{FORMER[name]}")
            raise AttributeError(f"'Layers' object has no attribute {name!r}")

    @overload
    def __getitem__(self, index: int | str) -> Layer: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Layer, ...]: ...
    def __getitem__(self, index: int | str | slice) -> Layer | tuple[Layer, ...]:
        if isinstance(index, str):
            by_name = {layer.name: layer for layer in self.layers}
            if index not in by_name:
                raise KeyError(f"no layer {index!r}; the layers are {list(by_name)}")
            return by_name[index]
        return self.layers[index]

    def __contains__(self, item: object) -> bool:
        return any(item in (layer, layer.name) for layer in self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def with_factors(self) -> tuple[Layer, ...]:
        """The layers in a `Factors`, which are all except skipped layers and layers with gradient factors."""
        return tuple(layer for layer in self.layers if layer.captured)

    @property
    def with_gradient_factors(self) -> tuple[Layer, ...]:
        """The layers with gradient factors, which the optimizer forms from averaged gradients."""
        return tuple(layer for layer in self.preconditioned if not layer.captured)

    @property
    def preconditioned(self) -> tuple[Layer, ...]:
        """The layers that are preconditioned, which are all except skipped layers."""
        return tuple(layer for layer in self.layers if layer.kind != "skipped")

    @functools.cached_property
    def skipped_paths(self) -> frozenset[str]:
        """Paths of the skipped layers' leaves."""
        skipped = [layer.params for layer in self.layers if layer.kind == "skipped"]
        return frozenset().union(*skipped)

    def __repr__(self) -> str:
        return _table(self)


def _table(layers: Layers) -> str:
    size = jnp.dtype(layers.dtype).itemsize
    rows = ["layer kind parameters A G positions copies factors note".split()]
    total = 0
    for layer in layers:
        elements = sum(math.prod(shape) for shape in layer.factor_shapes.values())
        total += elements
        rows.append(_cells(layer, format_bytes(size * elements)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    params = sum(layer.num_params for layer in layers)
    summary = (
        f"{len(layers.paths)} parameter leaves ({params:,} parameters) in {len(layers)} blocks; "
        f"factors: {total:,} elements, {format_bytes(size * total)} in {layers.dtype}, "
        # SOAP keeps a basis for each factor; momentum and moments are as large as the parameters. Groups add padding.
        f"the whole state at least {format_bytes(2 * size * (total + params))}"
    )
    if layers.num_examples is not None:
        summary += f"; found with {layers.num_examples} example(s)"
    if layers.batch_argnums:
        arguments = [f"argument {key!r}" for key in layers.batch_argnums]
        summary += f" in {' and '.join(arguments)}"
    lines.append(summary)
    if layers._shared_arrays:
        lines.append(f"shared by all examples: {', '.join(layers._shared_arrays)}")
    if layers._unknown_batch_reason:
        lines.append(
            f"the examples are not known: {layers._unknown_batch_reason}. Vectors have the gradient's own "
            "diagonal; value_and_grad needs num_examples=, or an output marked with kfac.mark_output"
        )
    return "\n".join(lines)


def _cells(layer: Layer, memory: str) -> list[str]:
    """Return a layer's row of the table."""
    leaves = []
    remarks = []
    for path, shape in zip(layer.params, layer.shapes, strict=True):
        leaves.append(f"{path.removeprefix(f'{layer.name}/')} {list(shape)}")
    a, g = _sides(layer)
    if layer.uses > 1:
        remarks.append(f"{layer.uses} uses")
    if layer.weight_sharing == "reduce":
        remarks.append("reduce")
    positions = "" if layer.positions is None else str(layer.positions)
    if remarks:
        positions = f"{positions} ({', '.join(remarks)})".strip()
    notes = [layer.note] if layer.note else []
    if layer.multiplier != 1:
        notes.append(f"steps times {layer.multiplier:g}")
    return [
        layer.name,
        layer.kind,
        ", ".join(leaves),
        a,
        g,
        positions,
        str(layer.copies),
        memory,
        "; ".join(notes),
    ]


def _sides(layer: Layer) -> tuple[str, str]:
    """Return the cells for `A` and `G`."""
    if layer.kind == "skipped":
        return "", ""
    if not layer.kronecker:
        return "", f"{layer.d_out} x {layer.d_in}x{layer.d_in}"

    def cell(side, size, cut):
        remarks = []
        if side in layer.diagonal:
            remarks.append("diagonal")
        if cut > 1:
            remarks.append(f"{cut} blocks")
        return f"{size} ({', '.join(remarks)})" if remarks else f"{size}"

    blocks_a, blocks_g = layer.num_blocks
    return cell("A", layer.d_in, blocks_a), cell("G", layer.d_out, blocks_g)


def format_bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
