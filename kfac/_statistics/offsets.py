"""Second moments of overlapping windows, from correlations by relative offset.

With stride 1, the block of `A` for taps `i` and `j` of a convolution's window is `sum_p x[p + i] x[p + j]^T` over
output positions `p`. But for the border of the image it depends on `j - i` alone: it is the correlation
`C[d] = sum_q x[q] x[q + d]^T` over all `q` with `q` and `q + d` inside the image, without the strips of `q` that tap
`i` never reaches. A window of 3 x 3 has 81 blocks but 25 offsets, and `C[-d] = C[d]^T` leaves 13. The correlations are
a convolution of the image with itself, the same operation as a kernel's gradient, so they run as fast as that and form
no patches.

Along one axis of length `H`, window `w`, dilation `r`, low padding `lo` and `O` outputs, tap `i` reaches `q` in
`[i r - lo, i r - lo + O)`. With "all `q`" less a low and a high strip on every axis, the sum over a box is an
inclusion-exclusion over choices of "all" or a strip for each axis; the strips are one or two pixels wide for the usual
paddings.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kfac._statistics.rows import accumulator


class Axis(NamedTuple):
    """One spatial axis of a convolution of stride 1 without input dilation; `low` is the padding before it."""

    size: int
    window: int
    dilation: int
    low: int
    out: int

    @property
    def steps(self) -> int:
        """Taps so many apart, and no more, can both be inside the image."""
        return min(self.window - 1, (self.size - 1) // self.dilation)

    def pair(self, i: int, j: int) -> Pair | None:
        """What the block of taps `i` and `j` is the sum of; None if they are never both inside the image."""
        offset = (j - i) * self.dilation
        first, last = max(0, -offset), min(self.size, self.size - offset)
        start = max(first, i * self.dilation - self.low)
        stop = min(last, i * self.dilation - self.low + self.out)
        if start >= stop:
            return None
        return Pair(j - i, offset, tuple((a, b) for a, b in ((first, start), (stop, last)) if a < b))

    def pairs(self) -> list[Pair | None]:
        return [self.pair(i, j) for i, j in itertools.product(range(self.window), repeat=2)]

    def partial(self) -> list[Pair]:
        """The distinct pairs whose sum is not over all positions."""
        return sorted({pair for pair in self.pairs() if pair and pair.strips})

    def places(self) -> np.ndarray:
        """`[window, window]`: where each pair is along an axis of `_by_pair`."""
        order: dict[Pair | None, int] = {pair: k for k, pair in enumerate(self.partial(), 2 * self.steps + 1)}
        order[None] = 2 * self.steps + 1 + len(order)
        places = [order[p] if p is None or p.strips else self.steps + p.steps for p in self.pairs()]
        return np.reshape(places, (self.window, self.window))


class Pair(NamedTuple):
    """Two taps `steps` apart, and the positions that they share by `offset` but do not reach, as `(start, stop)`."""

    steps: int
    offset: int
    strips: tuple[tuple[int, int], ...]


def _one(length: int) -> Axis:
    """An axis already cut to `length` positions."""
    return Axis(length, 1, 1, 0, length)


def offset_moment(x: jax.Array, axes: Sequence[Axis]) -> jax.Array:
    """Sum over examples and output positions of `a a^T`, `a` the window's inputs.

    Args:
      x: `[n, *spatial, channels]`.
      axes: the geometry along each spatial axis.

    Returns:
      `[*window, channels, *window, channels]`, accumulated in float32 or better.
    """
    wide, of_pairs = accumulator(x.dtype), functools.partial(_of_pairs, axes=axes)
    if x.dtype == wide:
        return of_pairs(x)
    # Narrow operands are convolved into float32 by no backend. Widened their products are the same, but on a GPU slow.
    return lax.platform_dependent(x, cuda=of_pairs, default=lambda x: of_pairs(x.astype(wide)))


def _of_pairs(x: jax.Array, axes: Sequence[Axis]) -> jax.Array:
    """`offset_moment` from correlations for all offsets at once."""
    distinct = _by_pair(x, x, axes, 0)
    # [*window, *window]: the place among the distinct blocks of each pair of taps.
    rank = len(axes)
    others = [tuple(j for j in range(2 * rank) if j % rank != k) for k in range(rank)]
    places = [np.expand_dims(axis.places(), other) for axis, other in zip(axes, others, strict=True)]
    index = np.ravel_multi_index(np.broadcast_arrays(*places), distinct.shape[:-2])
    taps, channels = math.prod(axis.window for axis in axes), x.shape[-1]
    # A gather writes the matrix once; slices put together, or corrections in place, take two to four times as long.
    blocks = jnp.take(distinct.reshape(-1, channels, channels), index.reshape(taps, taps), axis=0, mode="clip")
    shape = [*(axis.window for axis in axes), channels]
    return blocks.transpose(0, 2, 1, 3).reshape(*shape, *shape)


def _by_pair(left: jax.Array, right: jax.Array, axes: Sequence[Axis], k: int) -> jax.Array:
    """`sum_q left[q] right[q + d]^T` as `[*offsets, channels, channels]`.

    Along the axes from `k` on, the offsets are followed by the distinct pairs of taps that do not reach all positions,
    and by zeros if there are pairs that are never both inside the image.
    """
    if k == len(axes):
        return _correlate(left, right, axes)
    everywhere = _by_pair(left, right, axes, k + 1)
    partial, size = axes[k].partial(), everywhere.shape[k]
    more = len(partial) + (None in axes[k].pairs())
    if not more:
        return everywhere
    # Written in place: a concatenation would be fused with what computes its parts, element by element.
    result = jnp.pad(everywhere, [(0, more if j == k else 0) for j in range(everywhere.ndim)])
    for place, pair in enumerate(partial, size):
        part = lax.index_in_dim(everywhere, axes[k].steps + pair.steps, axis=k)
        for start, stop in pair.strips:
            from_left = lax.slice_in_dim(left, start, stop, axis=k + 1)
            from_right = from_left
            if left is not right or pair.offset:
                from_right = lax.slice_in_dim(right, start + pair.offset, stop + pair.offset, axis=k + 1)
            part -= _by_pair(from_left, from_right, [*axes[:k], _one(stop - start), *axes[k + 1 :]], k + 1)
        result = lax.dynamic_update_slice_in_dim(result, part, place, axis=k)
    return result


def _correlate(left: jax.Array, right: jax.Array, axes: Sequence[Axis]) -> jax.Array:
    """The sums for all offsets between taps, `[*offsets, channels, channels]`."""
    rank = len(axes)
    if not any(axis.steps for axis in axes):
        # All there is to sum over, without the layouts that convolutions need.
        left, right = (part.reshape(-1, part.shape[-1]) for part in (left, right))
        moment = jnp.einsum("ri,rj->ij", left, right, preferred_element_type=accumulator(left.dtype))
        return moment.reshape((1,) * rank + moment.shape)
    if left.dtype != accumulator(left.dtype):
        return _products(left, right, axes)
    middle = tuple(range(1, rank + 1))
    # As in a kernel's gradient, channels take the place of the batch, and examples that of channels.
    spec = lax.ConvDimensionNumbers((rank + 1, 0, *middle), (rank + 1, 0, *middle), (rank + 1, rank, *range(rank)))
    reach = [axis.steps * axis.dilation for axis in axes]
    padding = [(r, r) for r in reach]
    # The axis along which an image's correlations with itself are transposed by a change of sign.
    half = next(k for k, axis in enumerate(axes) if axis.steps) if left is right else None
    if half is not None:
        padding[half] = (0, reach[half])
    ahead = lax.conv_general_dilated(right, left, [axis.dilation for axis in axes], padding, dimension_numbers=spec)
    if half is None:
        return ahead
    behind = lax.rev(lax.slice_in_dim(ahead, 1, None, axis=half), range(rank)).mT
    return jnp.concatenate([behind, ahead], axis=half)


def _products(left: jax.Array, right: jax.Array, axes: Sequence[Axis]) -> jax.Array:
    """`_correlate` from a matrix product with shifted copies, which takes narrow operands into float32."""
    reach = [axis.steps * axis.dilation for axis in axes]
    padded = jnp.pad(right, [(0, 0), *((r, r) for r in reach), (0, 0)])
    sizes = left.shape[1:-1]
    starts = itertools.product(*(range(0, 2 * r + 1, a.dilation) for r, a in zip(reach, axes, strict=True)))
    shifted = [
        lax.slice(padded, (0, *at, 0), (len(left), *map(sum, zip(at, sizes, strict=True)), left.shape[-1]))
        for at in starts
    ]
    moment = jnp.einsum("n...i,on...j->oij", left, jnp.stack(shifted), preferred_element_type=accumulator(left.dtype))
    return moment.reshape(*(2 * axis.steps + 1 for axis in axes), *moment.shape[1:])
