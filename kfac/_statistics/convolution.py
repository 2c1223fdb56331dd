"""Convolution inputs in the normal form of `rows.py`: each output position is a row, the patch that the window covers.

With stride 1, `gram` uses correlations by offset (`offsets.py`) if they take fewer products. Otherwise it forms the
patches for a few images at a time, never for a whole large batch.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from kfac._mesh import sum_of_parts
from kfac._packing import Shape
from kfac._statistics.offsets import WindowAxis, offset_moment
from kfac._statistics.rows import (
    Arrangement,
    Rows,
    accumulator,
    append,
    bordered,
    diagonal_blocks,
)

# The number of patch elements formed at a time (16 MB in float32).
PATCH_ELEMENTS = 1 << 22
ON_GPUS = 64  # factor on PATCH_ELEMENTS on GPUs, where launches cost more than memory

# With fewer channels, patches take no longer than correlations, and a matrix product has smaller rounding errors than
# XLA's convolutions.
FEW_CHANNELS = 16


@dataclasses.dataclass(frozen=True)
class Convolution:
    """The geometry of `lax.conv_general_dilated`, with an entry per spatial dimension. `spec` is its `lhs_spec`."""

    spec: Shape
    window: Shape
    strides: Shape
    padding: tuple[tuple[int, int], ...]
    lhs_dilation: Shape
    rhs_dilation: Shape
    out: Shape

    @property
    def overlap(self) -> float:
        """The number of windows that contain an input position, away from the edges."""
        axes = zip(self.window, self.strides, self.out, strict=True)
        return math.prod(max(1.0, min(w / stride, out)) for w, stride, out in axes)

    def channels_last(self, x: Array) -> Array:
        """Return the operation's images as `[n, *spatial, channels]`."""
        batch, channel, *spatial = self.spec
        return x.transpose(batch, *spatial, channel)


def patches(
    x: Array,
    conv: Convolution,
) -> Array:
    """Return the inputs in each output position's window, `[n, *out, *window, channels]`.

    Args:
      x: the images, transposed to `[n, *spatial, channels]`.
      conv: the geometry.
    """
    config = [(0, 0, 0)]
    for (low, high), step in zip(conv.padding, conv.lhs_dilation, strict=True):
        config.append((low, high, step - 1))
    out = lax.pad(x, jnp.zeros((), x.dtype), [*config, (0, 0, 0)])
    rank = len(conv.window)
    # One gather splits each axis into positions and window. A slice for every tap would need a kernel for every tap.
    for k in reversed(range(rank)):
        size = conv.out[k]
        window = conv.window[k]
        stride = conv.strides[k]
        if window == 1:
            out = lax.slice_in_dim(out, 0, (size - 1) * stride + 1, stride, 1 + k)
            out = jnp.expand_dims(out, 2 + k)
        else:
            starts = stride * np.arange(size)
            taps = conv.rhs_dilation[k] * np.arange(window)
            out = jnp.take(out, starts[:, None] + taps, axis=1 + k, mode="clip")
    axes = range(1, 2 * rank + 1)
    return out.transpose(0, *axes[::2], *axes[1::2], 2 * rank + 1)


@dataclasses.dataclass(frozen=True)
class Patches:
    """The rows that a convolution reads, stored as the image, with the methods of `Rows`.

    Attributes:
      image: `[n, *spatial, channels]`.
      conv: the geometry.
      arrange: brings the whole batch's patches to `[copies, n, s, d]`. In its `split`, the axes for examples and
        positions come before all other axes.
      homogeneous: the last entry of every row, None for a layer without a bias.
    """

    image: Array
    conv: Convolution
    arrange: Arrangement
    homogeneous: float | None = None

    @property
    def images(self) -> bool:
        """Whether the images are the examples. Otherwise `by_example` forms the whole batch's patches."""
        # The first atom of the patches holds the images.
        return self.arrange.examples == (0,)

    @property
    def count(self) -> int:
        """The number of rows."""
        return len(self.image) * math.prod(self.conv.out)

    def gram(self) -> Array:
        axes = None
        # Correlations pair all channels, even across groups, so grouped convolutions use patches.
        if not self.arrange.copies and self.image.shape[-1] >= FEW_CHANNELS:
            axes = offset_axes(self.image.shape[1:-1], self.conv)
        if axes is None:
            moment = self._gram_of_patches()
        else:
            moment = self._gram_of_offsets(axes)
        return bordered(moment, self._total(self.image), self.homogeneous, self.count)

    def blocks(self, count: int) -> Array:
        return diagonal_blocks(self.gram(), count)

    def diagonal(self) -> Array:
        image = self.image.astype(accumulator(self.image.dtype))
        return append(self._total(jnp.square(image)), self.homogeneous, self.count)

    def _total(self, image: Array) -> Array:
        """Return the sum of all patches, `[copies, d]`."""
        # Patches are linear in the image, so the patches of the summed image are the summed patches.
        summed = jnp.sum(image, axis=0, keepdims=True, dtype=accumulator(image.dtype))
        return jnp.sum(self._arranged(patches(summed, self.conv)), axis=(1, 2))

    def sums(self) -> Array:
        x = self.image
        positions = range(1, 1 + len(self.conv.out))
        seen = patches(x, self.conv)
        total = jnp.sum(seen, axis=positions, dtype=accumulator(x.dtype))
        total = self._feature_arrangement((len(x),))(total)[:, :, 0]
        if not self.arrange.examples:
            total = jnp.sum(total, axis=1, keepdims=True)
        return append(total, self.homogeneous, self.count // total.shape[1])

    def by_example(self) -> Array:
        if self.images:
            return self.image
        return Rows(self.arrange(patches(self.image, self.conv))).by_example()

    def part(self, part: Array) -> Array:
        if self.images:
            part = self._arranged(patches(part, self.conv))
            part = jnp.moveaxis(part, 0, 1)
        return append(part, self.homogeneous, 1)

    def _arranged(self, rows: Array) -> Array:
        """Bring the patches of any number of images to the normal form."""
        arrange = self.arrange
        # The axis of a single image does not appear in `split`.
        if len(self.image) > 1:
            arrange = arrange._replace(split=(len(rows), *arrange.split[1:]))
        return arrange(rows)

    def _feature_arrangement(self, lead: Shape) -> Arrangement:
        """Return the arrangement for arrays whose axes are `lead`, which hold the examples, and the features."""
        arrange = self.arrange
        first = len(arrange.examples) + len(arrange.rows)

        def moved(axes):
            return tuple(k - first + len(lead) for k in axes if k >= first)

        return Arrangement(
            split=(*lead, *arrange.split[first:]),
            copies=moved(arrange.copies),
            examples=tuple(range(len(lead))),
            rows=(),
            features=moved(arrange.features),
            flips=moved(arrange.flips),
        )

    def _gram_of_offsets(self, axes: tuple[WindowAxis, ...]) -> Array:
        """Compute `gram` from correlations, and reorder its features from (window, channel) to the kernel's order."""
        form = self._feature_arrangement(())
        split = form.split
        rank = len(split)
        d = math.prod(split)
        moment = offset_moment(self.image, axes).reshape(*split, *split)
        if form.flips:
            moment = jnp.flip(moment, [*form.flips, *(k + rank for k in form.flips)])
        order = [*form.features, *(k + rank for k in form.features)]
        return moment.transpose(order).reshape(1, d, d)

    def _gram_of_patches(self) -> Array:
        conv = self.conv
        n = len(self.image)
        taps = math.prod(conv.window)
        # With a single tap, the patches are no larger than the image.
        limit = n
        if taps > 1:
            elements = math.prod(conv.out) * taps * self.image.shape[-1]
            limit = max(1, PATCH_ELEMENTS // elements)

        def moments(part):
            return Rows(self._arranged(patches(part, conv))).gram()

        few = functools.partial(sum_of_parts, moments, limit)
        if n <= limit:
            return few(self.image)
        many = functools.partial(sum_of_parts, moments, ON_GPUS * limit)
        return lax.platform_dependent(self.image, cuda=many, default=few)


def offset_axes(
    sizes: Sequence[int],
    conv: Convolution,
) -> tuple[WindowAxis, ...] | None:
    """Return the geometry for `offset_moment`, or None if patches are faster or the geometry needs them."""
    taps = math.prod(conv.window)
    positions = math.prod(conv.out)
    if taps == 1 or max(conv.strides) > 1 or max(conv.lhs_dilation) > 1:
        return None
    lows = [low for low, _ in conv.padding]
    axes = tuple(map(WindowAxis, sizes, conv.window, conv.rhs_dilation, lows, conv.out))
    # The factor 1.5 is 0.75 times 2. Symmetry halves the products for all offsets, and the borders add half of the
    # remainder. Patches must take at least twice as many products as correlations.
    products = 1.5 * math.prod(axis.size * (2 * axis.steps + 1) for axis in axes)
    return axes if products < taps**2 * positions else None
