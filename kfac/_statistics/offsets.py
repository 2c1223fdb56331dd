"""Second moments of overlapping windows, from correlations by relative offset.

With stride 1, the block of `A` for taps `i` and `j` of a convolution's window is `sum_p x[p + i] x[p + j]^T` over
output positions `p`. Except at the image border, the block depends only on `j - i`. It is the correlation
`C[d] = sum_q x[q] x[q + d]^T` over all `q` for which `q` and `q + d` are inside the image, minus the strips of `q` that
tap `i` never reaches. A 3 x 3 window has 81 blocks but only 25 offsets, and `C[-d] = C[d]^T` leaves 13. The
correlations are a convolution of the image with itself, the same operation as a kernel's gradient. They are therefore
as fast as a kernel's gradient and form no patches.

Take an axis with length `H`, window `w`, dilation `r`, low padding `lo` and `O` outputs. Tap `i` reaches `q` in
`[i r - lo, i r - lo + O)`, which is all `q` minus a low and a high strip. The sum over a box is then an
inclusion-exclusion over the choice, for each axis, between all `q` and a strip. With the usual paddings, the strips are
one or two pixels wide.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from kfac._statistics.rows import accumulator


class WindowAxis(NamedTuple):
    """A spatial axis of a convolution with stride 1 and no input dilation. `low` is the padding before the axis."""

    size: int
    window: int
    dilation: int
    low: int
    out: int

    @property
    def steps(self) -> int:
        """The largest distance, in taps, between two taps that can both be inside the image."""
        return min(self.window - 1, (self.size - 1) // self.dilation)

    def pairs(self) -> list[Pair | None]:
        """Return all pairs of taps, and None for two taps that are never both inside the image."""
        pairs = []
        for i, j in itertools.product(range(self.window), repeat=2):
            offset = (j - i) * self.dilation
            first, last = max(0, -offset), min(self.size, self.size - offset)
            begin = i * self.dilation - self.low
            start = max(first, begin)
            stop = min(last, begin + self.out)
            strips = tuple((a, b) for a, b in ((first, start), (stop, last)) if a < b)
            pairs.append(Pair(j - i, offset, strips) if start < stop else None)
        return pairs

    def partial(self) -> list[Pair]:
        """Return the distinct pairs that do not reach all positions."""
        return sorted({pair for pair in self.pairs() if pair and pair.strips})

    def places(self) -> np.ndarray:
        """Return each pair's index along this axis in the result of `_by_pair`, `[window, window]`."""
        offsets = 2 * self.steps + 1
        partial = self.partial()
        places = []
        for pair in self.pairs():
            if pair is None:
                places.append(offsets + len(partial))
            elif pair.strips:
                places.append(offsets + partial.index(pair))
            else:
                places.append(self.steps + pair.steps)
        return np.reshape(places, (self.window, self.window))


class Pair(NamedTuple):
    """Two taps, and the positions to subtract from their correlation.

    Attributes:
      steps: the distance between the taps, in taps.
      offset: the distance in pixels.
      strips: ranges `(start, stop)` of positions `q` that the first tap never reaches, although both `q` and
        `q + offset` are inside the image.
    """

    steps: int
    offset: int
    strips: tuple[tuple[int, int], ...]


def offset_moment(
    x: Array,
    axes: Sequence[WindowAxis],
) -> Array:
    """Sum `a a^T` over examples and output positions, where `a` holds the inputs in the window.

    Args:
      x: `[n, *spatial, channels]`.
      axes: the geometry along each spatial axis.

    Returns:
      `[*window, channels, *window, channels]`, accumulated in float32 or better.
    """
    wide = accumulator(x.dtype)
    of_pairs = functools.partial(_of_pairs, axes=axes)
    if x.dtype == wide:
        return of_pairs(x)

    def of_wide_pairs(x):
        return of_pairs(x.astype(wide))

    # No backend convolves narrow operands into float32. Widening them gives the same products, but is slow on a GPU.
    return lax.platform_dependent(x, cuda=of_pairs, default=of_wide_pairs)


def _of_pairs(
    x: Array,
    axes: Sequence[WindowAxis],
) -> Array:
    """Compute `offset_moment` from the correlations for all offsets at once."""
    distinct = _by_pair(x, x, axes, 0)
    # The index of each tap pair's distinct block, [*window, *window].
    rank = len(axes)
    places = []
    for k, axis in enumerate(axes):
        others = [j for j in range(2 * rank) if j % rank != k]
        places.append(np.expand_dims(axis.places(), others))
    index = np.ravel_multi_index(np.broadcast_arrays(*places), distinct.shape[:-2])
    window = [axis.window for axis in axes]
    taps, channels = math.prod(window), x.shape[-1]
    distinct = distinct.reshape(-1, channels, channels)
    # A gather writes the matrix once. Concatenating slices, or correcting in place, takes two to four times as long.
    blocks = jnp.take(distinct, index.reshape(taps, taps), axis=0, mode="clip")
    return blocks.transpose(0, 2, 1, 3).reshape(*window, channels, *window, channels)


def _by_pair(
    left: Array,
    right: Array,
    axes: Sequence[WindowAxis],
    k: int,
) -> Array:
    """Return `sum_q left[q] right[q + d]^T` as `[*offsets, channels, channels]`.

    Along the axes from `k` on, the offsets are followed by the distinct tap pairs that do not reach all positions, and
    by a zero entry if some tap pairs are never both inside the image.
    """
    if k == len(axes):
        return _correlate(left, right, axes)
    # Offsets count all positions. Near the border a tap pair sees fewer, so take the missing strips off below.
    everywhere = _by_pair(left, right, axes, k + 1)
    axis = axes[k]
    partial = axis.partial()
    more = len(partial) + (None in axis.pairs())
    if not more:
        return everywhere
    # Write in place, because XLA would fuse a concatenation with the computation of its parts, element by element.
    widths = [(0, 0)] * everywhere.ndim
    widths[k] = (0, more)
    result = jnp.pad(everywhere, widths)
    for place, pair in enumerate(partial, everywhere.shape[k]):
        # Zero is in the middle of the offsets, hence `axis.steps +`.
        part = lax.index_in_dim(everywhere, axis.steps + pair.steps, axis=k)
        for start, stop in pair.strips:
            # The data are already cut to the strip. The two slices below apply the offset, so a window of 1 is left.
            length = stop - start
            strip = list(axes)
            strip[k] = WindowAxis(length, 1, 1, 0, length)
            from_left = lax.slice_in_dim(left, start, stop, axis=k + 1)
            from_right = from_left
            # Reuse the same slice where both sides agree, because `_correlate` then halves the work.
            if left is not right or pair.offset:
                start += pair.offset
                from_right = lax.slice_in_dim(right, start, start + length, axis=k + 1)
            part -= _by_pair(from_left, from_right, strip, k + 1)
        result = lax.dynamic_update_slice_in_dim(result, part, place, axis=k)
    return result


def _correlate(
    left: Array,
    right: Array,
    axes: Sequence[WindowAxis],
) -> Array:
    """Return `sum_q left[q] right[q + d]^T` for all offsets `d` between taps, `[*offsets, channels, channels]`."""
    rank = len(axes)
    dtype = accumulator(left.dtype)
    if not any(axis.steps for axis in axes):
        # With a single offset, a matrix product suffices and avoids the layouts that convolutions need.
        left = left.reshape(-1, left.shape[-1])
        right = right.reshape(-1, right.shape[-1])
        moment = jnp.einsum("ri,rj->ij", left, right, preferred_element_type=dtype)
        return moment.reshape((1,) * rank + moment.shape)
    if left.dtype != dtype:
        return _products(left, right, axes)
    middle = tuple(range(1, rank + 1))
    # As in a kernel's gradient, swap the roles of batch and channels.
    spec = lax.ConvDimensionNumbers(
        (rank + 1, 0, *middle), (rank + 1, 0, *middle), (rank + 1, rank, *range(rank))
    )
    dilation = [axis.dilation for axis in axes]
    reach = [axis.steps * axis.dilation for axis in axes]
    padding = [(r, r) for r in reach]
    # If an image is correlated with itself, `C[-d] = C[d]^T`, so compute only half of the offsets along this axis.
    half = None
    if left is right:
        half = next(k for k, axis in enumerate(axes) if axis.steps)
        padding[half] = (0, reach[half])
    ahead = lax.conv_general_dilated(
        right, left, dilation, padding, dimension_numbers=spec
    )
    if half is None:
        return ahead
    behind = lax.rev(lax.slice_in_dim(ahead, 1, None, axis=half), range(rank)).mT
    return jnp.concatenate([behind, ahead], axis=half)


def _products(
    left: Array,
    right: Array,
    axes: Sequence[WindowAxis],
) -> Array:
    """Compute `_correlate` as a matrix product with shifted copies, which sums narrow operands in float32."""
    reach = [axis.steps * axis.dilation for axis in axes]
    padded = jnp.pad(right, [(0, 0), *((r, r) for r in reach), (0, 0)])
    shifts = [range(0, 2 * a.steps * a.dilation + 1, a.dilation) for a in axes]
    shifted = []
    for starts in itertools.product(*shifts):
        ends = [a + b for a, b in zip(starts, left.shape[1:-1], strict=True)]
        copy = lax.slice(padded, (0, *starts, 0), (len(left), *ends, left.shape[-1]))
        shifted.append(copy)
    moment = jnp.einsum(
        "n...i,on...j->oij",
        left,
        jnp.stack(shifted),
        preferred_element_type=accumulator(left.dtype),
    )
    return moment.reshape(*(len(x) for x in shifts), *moment.shape[1:])
