"""The normal form for a layer's input and output gradient: `[copies, n, s, d]`.

`copies` independent kernels share an array, `n` examples have `s` positions each, and a row has `d` features. A
convolution's input (`convolution.py`) and a lookup's one-hot rows also have this form, but are not written out. If
single examples are not needed, all rows may count as the positions of a single example.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from kfac._packing import Shape, in_blocks, pad_end


def accumulator(dtype: DTypeLike) -> jnp.dtype:
    """Return the dtype in which products of `dtype` operands are summed: float32 or wider."""
    # JAX defines no promotion for floats of eight bits or fewer.
    narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits <= 8
    return jnp.promote_types(jnp.float32 if narrow else dtype, jnp.float32)


class Arrangement(NamedTuple):
    """A rearrangement of an array to `[copies, n, s, d]`, with features in the kernel's memory order.

    Attributes:
      split: the shape to which the array is reshaped first. The other attributes are axes in this shape.
      copies: the axes that become `copies`.
      examples: the axes that become `n`.
      rows: the axes that become `s`.
      features: the axes that become `d`.
      flips: the axes to reverse.
    """

    split: Shape
    copies: Shape
    examples: Shape
    rows: Shape
    features: Shape
    flips: Shape = ()

    def __call__(self, x: Array) -> Array:
        x = x.reshape(self.split)
        if self.flips:
            x = jnp.flip(x, self.flips)
        parts = (self.copies, self.examples, self.rows, self.features)
        x = x.transpose(sum(parts, ()))
        return x.reshape([math.prod(self.split[k] for k in part) for part in parts])


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows on one side of a layer, from which statistics are computed, stored as an array.

    Attributes:
      array: `[copies, n, s, d]`, in the layer's compute dtype.
      homogeneous: the last entry of every row, for the bias: 1, or 0 for an operation that uses the kernel without the
        bias. None for a layer without a bias.
    """

    array: Array
    homogeneous: float | None = None

    @property
    def count(self) -> int:
        """The number of rows per copy."""
        return self.array.shape[1] * self.array.shape[2]

    def gram(self) -> Array:
        """Return the sum of the outer products of all rows, `[copies, d, d]`."""
        rows = self.array.reshape(len(self.array), -1, self.array.shape[-1])
        moment = jnp.einsum(
            "cri,crj->cij", rows, rows, preferred_element_type=accumulator(rows.dtype)
        )
        total = jnp.sum(self.array, axis=(1, 2), dtype=moment.dtype)
        return bordered(moment, total, self.homogeneous, self.count)

    def blocks(self, count: int) -> Array:
        """Return `count` diagonal blocks of `gram`, cut as in `diagonal_blocks`, `[copies, count, rows, rows]`."""
        copies, n, s, _ = self.array.shape
        rows = append(self.array, self.homogeneous, 1).reshape(copies, n * s, -1)
        blocks = in_blocks(rows, count)
        pieces = Rows(blocks.reshape(copies * count, n, s, -1))
        return pieces.gram().reshape(copies, count, *2 * blocks.shape[-1:])

    def diagonal(self) -> Array:
        """Return the diagonal of `gram`, `[copies, d]`."""
        squares = jnp.square(self.array.astype(accumulator(self.array.dtype)))
        return append(jnp.sum(squares, axis=(1, 2)), self.homogeneous, self.count)

    def sums(self) -> Array:
        """Sum the rows over the positions of each example, `[copies, n, d]`."""
        total = jnp.sum(self.array, axis=2, dtype=accumulator(self.array.dtype))
        return append(total, self.homogeneous, self.array.shape[2])

    def by_example(self) -> Array:
        """Return the examples as an array `[n, ...]`, whose slices `part` accepts."""
        return jnp.moveaxis(self.array, 0, 1)

    def part(self, part: Array) -> Array:
        """Return the rows for a slice of `by_example()`, `[examples, copies, s, d]`."""
        return append(part, self.homogeneous, 1)


def as_floats(
    x: Array,
    dtype: DTypeLike,
) -> Array:
    """Cast integers to `dtype`, and floats of eight bits or fewer to bfloat16, so that they can be multiplied."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x.astype(dtype)
    if jnp.finfo(x.dtype).bits > 8:
        return x
    return x.astype(jnp.bfloat16)


@dataclasses.dataclass(frozen=True)
class Lookup:
    """The geometry of a gather from a table, whose inputs are one-hot rows.

    The sum of the rows' outer products is diagonal, with the count of each index as its entries.

    Attributes:
      rows: the table's number of rows.
      column: the component in an index vector that selects the row.
      drop: whether indices out of range are dropped. Otherwise they are clamped.
    """

    rows: int
    column: int
    drop: bool

    def counts(self, indices: Array, dtype: DTypeLike) -> Array:
        """Count how often each row is looked up, `[rows]`.

        Args:
          indices: the indices of `lax.gather`, `[..., components]`. Negative indices are out of range.
          dtype: the dtype of the counts.
        """
        row = indices[..., self.column].reshape(-1)
        if not self.drop:
            row = jnp.clip(row, 0, self.rows - 1)
        # A sum over segments drops indices out of range, negative indices included.
        ones = jnp.ones_like(row, dtype)
        return jax.ops.segment_sum(ones, row, num_segments=self.rows)


@dataclasses.dataclass(frozen=True)
class RaggedRows:
    """Rows of several copies, one copy after another. The number of rows per copy is known only at run time.

    Attributes:
      array: `[rows, d]`.
      sizes: the number of rows per copy, `[copies]`. Rows after the sum of all sizes belong to no copy.
    """

    array: Array
    sizes: Array

    def gram(self) -> Array:
        numbers = lax.RaggedDotDimensionNumbers(
            dot_dimension_numbers=(((0,), (0,)), ((), ())),
            lhs_ragged_dimensions=[0],
            rhs_group_dimensions=[],
        )
        dtype = accumulator(self.array.dtype)
        return lax.ragged_dot_general(
            self.array, self.array, self.sizes, numbers, preferred_element_type=dtype
        )

    def blocks(self, count: int) -> Array:
        return diagonal_blocks(self.gram(), count)

    def diagonal(self) -> Array:
        squares = jnp.square(self.array.astype(accumulator(self.array.dtype)))
        ends = jnp.cumsum(self.sizes)
        copy = jnp.searchsorted(ends, jnp.arange(len(squares)), side="right")
        return jax.ops.segment_sum(squares, copy, num_segments=len(self.sizes))


def diagonal_blocks(
    moment: Array,
    count: int,
) -> Array:
    """Cut `count` diagonal blocks `[..., count, rows, rows]` out of `[..., d, d]`, the last padded with zeros."""
    *lead, d, _ = moment.shape
    rows = -(-d // count)
    missing = count * rows - d
    moment = pad_end(moment, missing, missing)
    split = moment.reshape(*lead, count, rows, count, rows)
    block = np.arange(count)
    return jnp.moveaxis(split[..., block, :, block, :], 0, -3)


def append(
    rows: Array,
    homogeneous: float | None,
    count: int,
) -> Array:
    """Append the homogeneous entry, multiplied by `count`, as the last feature. None leaves the rows unchanged."""
    if homogeneous is None:
        return rows
    widths = [(0, 0)] * (rows.ndim - 1) + [(0, 1)]
    return jnp.pad(rows, widths, constant_values=homogeneous * count)


def bordered(
    moment: Array,
    total: Array,
    homogeneous: float | None,
    count: int,
) -> Array:
    """Append the row and column of a homogeneous entry to a sum of outer products.

    Args:
      moment: `[copies, d, d]`.
      total: the sum of the rows, `[copies, d]`.
      homogeneous: 1, or 0 for an operation that uses the kernel without its bias. None leaves `moment` unchanged.
      count: the number of summed rows.
    """
    if homogeneous is None:
        return moment
    column = append(homogeneous * total, homogeneous, count)[:, :, None]
    return jnp.block([[moment, column[:, :-1]], [column.mT]])
