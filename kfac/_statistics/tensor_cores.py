"""Sums of outer products by a kernel for GPUs: operands in half precision, sums in float32, each product once.

XLA multiplies both halves of a symmetric product, and has no convolution from half precision into float32. Here a
program of the kernel sums one tile of one matrix over a part of the rows, and of a symmetric matrix only tiles of the
upper half, which it writes to both. Written in Pallas, which compiles it by way of Triton. It has never run on a GPU,
so it is used with `KFAC_EXPERIMENTAL_GPU=1` only.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from kfac._checks import experimental_gpu
from kfac._varying import alone

TILE = 128  # rows and columns of a tile
ROWS = 64  # rows of an operand that are loaded at a time
PROGRAMS = 264  # so many are to be there at least, two for each of the processors of an H100


class Term(NamedTuple):
    """`sum_q x[q] x[q + offset]^T` over the pixels `q` in the box from `start` to `stop`, which excludes it."""

    offset: tuple[int, int]
    start: tuple[int, int]
    stop: tuple[int, int]

    @property
    def pixels(self) -> int:
        return math.prod(b - a for a, b in zip(self.start, self.stop, strict=True))


def usable(x: jax.Array) -> bool:
    """Whether the kernel can take `x`, whatever is done about devices later.

    XLA does not know how to split a kernel over devices, and would bring all of its operands to each.
    """
    return experimental_gpu() and alone() and x.dtype in (jnp.bfloat16, jnp.float16) and x.shape[-1] >= 32


def gram(rows: jax.Array, *, interpret: bool = False) -> jax.Array:
    """`X^T X` of `[runs, n, d]`, in float32."""
    term = Term((0, 0), (0, 0), (1, rows.shape[1]))
    return correlations(rows[:, None], [term], symmetric=True, interpret=interpret)[0]


def correlations(x: jax.Array, terms: Sequence[Term], *, symmetric=False, interpret=False) -> jax.Array:
    """The sums of `terms` over images of `[n, height, width, channels]`: `[terms, channels, channels]`, float32.

    Args:
      x: the images.
      terms: what is summed.
      symmetric: whether all of the sums are symmetric.
      interpret: run the kernel step by step, on any device.
    """
    n, height, width, c = x.shape
    tile = max(16, min(TILE, pl.next_power_of_2(c)))
    tiles = -(-c // tile)
    pixels = max(term.pixels for term in terms)
    share = math.ceil(PROGRAMS / (len(terms) * (tiles * (tiles + 1) // 2 if symmetric else tiles**2)))
    parts = max(1, min(share, n * pixels // (16 * ROWS)))
    table = np.array([(*t.offset, *t.start, *t.stop) for t in terms], np.int32)
    work = sum(2 * n * t.pixels for t in terms) * (c * (c + tile) // 2 if symmetric else c * c)
    dtype = {"bfloat16": "bf16", "float16": "f16"}.get(str(x.dtype), "f32")
    # The shape, and under `shard_map` that it differs between devices as `x` does.
    out = jax.eval_shape(lambda x: jnp.broadcast_to(jnp.sum(x, dtype=jnp.float32), (parts, len(terms), c, c)), x)
    sums = pl.pallas_call(
        functools.partial(_kernel, size=(n, height, width, c), tile=tile, parts=parts, symmetric=symmetric),
        out_shape=out,
        grid=(tiles * tiles, len(terms), parts),
        compiler_params=triton.CompilerParams(num_warps=8 if tile == TILE else 4, num_stages=3),
        name=f"every_1_sums_flops_{work}_{dtype}",  # read by those who count what a program does
        interpret=interpret,
    )(x.reshape(-1, c), jnp.asarray(table))
    return jnp.sum(sums, axis=0)


def _kernel(x_ref, table_ref, out_ref, *, size, tile, parts, symmetric):
    """One tile of one term, over one part of its pixels."""
    n, height, width, c = size
    tiles = -(-c // tile)
    at, term, part = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    i, j = at // tiles, at % tiles
    down, across, top, left, bottom, right = (table_ref[term, k] for k in range(6))
    columns, area = right - left, (bottom - top) * (right - left)
    count = n * area
    length = (count + parts - 1) // parts
    left_columns, right_columns = i * tile + jnp.arange(tile), j * tile + jnp.arange(tile)

    def rows_at(first):
        """Rows of the image array for pixels of the box, counted from `first`, and which of them there are."""
        place = first + jnp.arange(ROWS)
        within = place % area
        row = (place // area * height + top + within // columns) * width + left + within % columns
        return row, place < jnp.minimum(count, (part + 1) * length)

    def load(row, there, column):
        mask = there[:, None] & (column < c)[None, :]
        return triton.load(x_ref.at[row[:, None], column[None, :]], mask=mask, other=0.0)

    def body(k, total):
        row, there = rows_at(part * length + k * ROWS)
        a = load(row, there, left_columns)
        b = load(row + down * width + across, there, right_columns)
        return total + jnp.dot(a.T, b, preferred_element_type=jnp.float32)

    @pl.when((j >= i) if symmetric else (j >= 0))
    def _():
        total = lax.fori_loop(0, (length + ROWS - 1) // ROWS, body, jnp.zeros((tile, tile), jnp.float32))

        def store(rows, columns, value):
            mask = (rows < c)[:, None] & (columns < c)[None, :]
            triton.store(out_ref.at[part, term, rows[:, None], columns[None, :]], value, mask=mask)

        store(left_columns, right_columns, total)
        if symmetric:
            store(right_columns, left_columns, total.T)
