"""The normal form of what a layer reads, and of the gradient of what it writes: `[copies, n, s, d]`.

`copies` independent kernels share an array, `n` examples have `s` positions each, and a row has `d` features. A
convolution's input has this form too, without being written out (`convolution.py`), and so have the one-hot rows of a
lookup. Where nothing asks for single examples, all rows may count as the positions of one.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kfac._packing import in_blocks


def accumulator(dtype: Any) -> Any:
    """The dtype in which products of `dtype` operands are summed: float32 at least."""
    # Floats of eight bits or fewer have no promotion of their own.
    narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits <= 8
    return jnp.dtype(jnp.float32) if narrow else jnp.promote_types(dtype, jnp.float32)


class Arrangement(NamedTuple):
    """How an array becomes `[copies, n, s, d]`, features in the memory order of the kernel.

    Axes are positions in `split`, the shape that separates them: what makes the copies, the examples, their positions
    and the features, and what is to be read backwards.
    """

    split: tuple[int, ...]
    copies: tuple[int, ...]
    examples: tuple[int, ...]
    rows: tuple[int, ...]
    features: tuple[int, ...]
    flips: tuple[int, ...] = ()

    def __call__(self, x: jax.Array) -> jax.Array:
        def size(positions):
            return math.prod(self.split[k] for k in positions)

        x = jnp.flip(x.reshape(self.split), self.flips) if self.flips else x.reshape(self.split)
        x = x.transpose(self.copies + self.examples + self.rows + self.features)
        return x.reshape(size(self.copies), size(self.examples), size(self.rows), size(self.features))


class Geometry(Protocol):
    """What a read does with its data: how the data becomes rows. A kind of layer of its own has one of its own."""

    def form(self, x: jax.Array, arrange: Arrangement, homogeneous: float | None, images: bool, dtype: Any) -> Any:
        """The rows of one read, a `Form`; of a lookup only its `diagonal` and `every`.

        Args:
          x: the data, as the operation takes it.
          arrange: brings the rows to the normal form.
          homogeneous: the last entry of every row; None without one.
          images: whether the images of a convolution are the examples.
          dtype: of the sums.
        """


class Form(Protocol):
    """What the statistics of one side of a layer are taken from. A homogeneous entry counts as a last feature."""

    def gram(self) -> jax.Array:
        """Sum of outer products of all rows, `[copies, d, d]`."""

    def blocks(self, count: int) -> jax.Array:
        """Its `count` diagonal blocks, as `diagonal_blocks` cuts them, `[copies, count, rows, rows]`."""

    def diagonal(self) -> jax.Array:
        """Its diagonal, `[copies, d]`."""

    def sums(self) -> jax.Array:
        """Sums over the positions of each example, `[copies, n, d]`."""

    def by_example(self) -> jax.Array:
        """`[n, ...]`: what `part` makes rows of, for some of the examples."""

    def part(self, part: jax.Array) -> jax.Array:
        """Rows of some of these, `[examples, copies, s, d]`."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows as an array.

    Attributes:
      array: `[copies, n, s, d]`, in the compute dtype of the layer.
      homogeneous: the last entry of every row, which belongs to a bias: 1, or 0 in a use of the kernel without it. None
        for a layer without a bias.
    """

    array: jax.Array
    homogeneous: float | None = None

    @property
    def count(self) -> int:
        """Number of rows of each copy."""
        return self.array.shape[1] * self.array.shape[2]

    def gram(self) -> jax.Array:
        rows = self.array.reshape(len(self.array), -1, self.array.shape[-1])
        moment = jnp.einsum("cri,crj->cij", rows, rows, preferred_element_type=accumulator(rows.dtype))
        total = jnp.sum(self.array, axis=(1, 2), dtype=moment.dtype)
        return bordered(moment, total, self.homogeneous, self.count)

    def blocks(self, count: int) -> jax.Array:
        copies, n, s, _ = self.array.shape
        rows = append(self.array, self.homogeneous, 1).reshape(copies, n * s, -1)
        blocks = in_blocks(rows, count)
        pieces = Rows(blocks.reshape(copies * count, n, s, -1))
        return pieces.gram().reshape(copies, count, *2 * blocks.shape[-1:])

    def diagonal(self) -> jax.Array:
        squares = jnp.sum(jnp.square(self.array.astype(accumulator(self.array.dtype))), axis=(1, 2))
        return append(squares, self.homogeneous, self.count)

    def sums(self) -> jax.Array:
        total = jnp.sum(self.array, axis=2, dtype=accumulator(self.array.dtype))
        return append(total, self.homogeneous, self.array.shape[2])

    def by_example(self) -> jax.Array:
        return jnp.moveaxis(self.array, 0, 1)

    def part(self, part: jax.Array) -> jax.Array:
        return append(part, self.homogeneous, 1)


def as_floats(x: jax.Array, dtype: Any) -> jax.Array:
    """Counts, one-hot codes of integers, and floats of eight bits, as numbers that can be multiplied."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x.astype(dtype)
    return x if jnp.finfo(x.dtype).bits > 8 else x.astype(jnp.bfloat16)


@dataclasses.dataclass(frozen=True)
class Dense:
    """A matrix product."""

    def form(self, x, arrange, homogeneous, images, dtype) -> Rows:
        return Rows(arrange(as_floats(x, dtype)), homogeneous)


@dataclasses.dataclass(frozen=True)
class Lookup:
    """The rows of a table that a gather takes, as one-hot inputs.

    Attributes:
      rows: how many rows the table has.
      column: which component of an index vector says the row.
      drop: whether indices out of range are dropped; otherwise they are clamped.
    """

    rows: int
    column: int
    drop: bool

    def form(self, x, arrange, homogeneous, images, dtype) -> OneHot:
        return OneHot(x, self, arrange, dtype)


@dataclasses.dataclass(frozen=True)
class OneHot:
    """One-hot rows, kept as their counts: the diagonal of `gram`, whose other entries are zero.

    Attributes:
      indices: as `lax.gather` takes them, `[..., components]`; a negative one is out of range.
      lookup: what is looked up in.
      arrange: brings the counts to the memory order of the table.
      dtype: of the counts.
    """

    indices: jax.Array
    lookup: Lookup
    arrange: Arrangement
    dtype: Any

    def diagonal(self) -> jax.Array:
        flat = self.indices[..., self.lookup.column].reshape(-1)
        inside = jnp.clip(flat, 0, self.lookup.rows - 1)
        weight = (flat == inside).astype(self.dtype) if self.lookup.drop else jnp.ones_like(flat, self.dtype)
        counts = jax.ops.segment_sum(weight, inside, num_segments=self.lookup.rows)
        return self.arrange(counts)[:, 0, 0]


@dataclasses.dataclass(frozen=True)
class Groups:
    """Rows of several copies, one copy after the other. How many each has is data.

    Attributes:
      array: `[rows, d]`.
      sizes: `[copies]`, how many rows are those of each copy; the rows behind them are of none.
    """

    array: jax.Array
    sizes: jax.Array

    def gram(self) -> jax.Array:
        numbers = lax.RaggedDotDimensionNumbers(
            dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
        )
        dtype = accumulator(self.array.dtype)
        return lax.ragged_dot_general(self.array, self.array, self.sizes, numbers, preferred_element_type=dtype)

    def blocks(self, count: int) -> jax.Array:
        return diagonal_blocks(self.gram(), count)

    def diagonal(self) -> jax.Array:
        squares = jnp.square(self.array.astype(accumulator(self.array.dtype)))
        copy = jnp.searchsorted(jnp.cumsum(self.sizes), jnp.arange(len(squares)), side="right")
        return jax.ops.segment_sum(squares, copy, num_segments=len(self.sizes))


def diagonal_blocks(moment: jax.Array, count: int) -> jax.Array:
    """Cuts `count` diagonal blocks `[..., count, rows, rows]` out of `[..., d, d]`, the last filled up with zeros."""
    (*lead, d), rows, block = moment.shape[:-1], -(-moment.shape[-1] // count), np.arange(count)
    moment = jnp.pad(moment, [(0, 0)] * len(lead) + [(0, count * rows - d)] * 2)
    return jnp.moveaxis(moment.reshape(*lead, count, rows, count, rows)[..., block, :, block, :], 0, -3)


def append(rows: jax.Array, homogeneous: float | None, count: int) -> jax.Array:
    """`rows` with `count` times the homogeneous entry behind the last feature."""
    if homogeneous is None:
        return rows
    widths = [(0, 0)] * (rows.ndim - 1) + [(0, 1)]
    return jnp.pad(rows, widths, constant_values=homogeneous * count)


def bordered(moment: jax.Array, total: jax.Array, homogeneous: float | None, count: int) -> jax.Array:
    """Appends the row and column of a homogeneous entry to a sum of outer products.

    Args:
      moment: `[copies, d, d]`.
      total: `[copies, d]`, the sum of the rows.
      homogeneous: 1, or 0 for a use of the kernel without its bias; None for no such entry.
      count: how many rows were summed.
    """
    if not homogeneous:
        return moment if homogeneous is None else jnp.pad(moment, ((0, 0), (0, 1), (0, 1)))
    corner = jnp.full((moment.shape[0], 1, 1), count, moment.dtype)
    top = jnp.concatenate([moment, total[:, :, None]], axis=2)
    bottom = jnp.concatenate([total[:, None, :], corner], axis=2)
    return jnp.concatenate([top, bottom], axis=1)
