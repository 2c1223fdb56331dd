"""Convolution inputs in the normal form of `rows.py`: each output position is a row, the patch that the window covers.

With stride 1, `gram` uses correlations by offset (`offsets.py`) if they take fewer products. Otherwise it forms the
patches for a few images at a time, never for a whole large batch.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kfac._statistics.offsets import Axis, offset_moment
from kfac._statistics.rows import (
    Arrangement,
    Rows,
    accumulator,
    append,
    as_floats,
    bordered,
    diagonal_blocks,
)
from kfac._varying import sum_of_parts

# The number of patch elements formed at a time (16 MB in float32).
PATCH_ELEMENTS = 1 << 22
ON_GPUS = 64  # factor on PATCH_ELEMENTS on GPUs, where launches cost more than memory

# With fewer channels, patches take no longer than correlations, and a matrix product has smaller rounding errors than
# XLA's convolutions.
FEW_CHANNELS = 16


@dataclasses.dataclass(frozen=True)
class Convolution:
    """The geometry of `lax.conv_general_dilated`, with an entry per spatial dimension. `spec` is its `lhs_spec`."""

    spec: tuple[int, ...]
    window: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    lhs_dilation: tuple[int, ...]
    rhs_dilation: tuple[int, ...]
    out: tuple[int, ...]

    @property
    def overlap(self) -> float:
        """The number of windows that contain an input position, away from the edges."""
        reach = zip(self.window, self.strides, self.out, strict=True)
        return math.prod(
            max(1.0, min(size / stride, float(places)))
            for size, stride, places in reach
        )

    def form(self, x, arrange, homogeneous, images, dtype) -> Patches:
        batch, channel, *spatial = self.spec
        return Patches(
            as_floats(x, dtype).transpose(batch, *spatial, channel),
            self,
            arrange,
            images,
            homogeneous,
        )


def padded(
    x: jax.Array, padding: Sequence[tuple[int, int]], dilation: Sequence[int]
) -> jax.Array:
    """Pad images `[n, *spatial, channels]`, and put zeros between the pixels of dilated dimensions."""
    config = [
        (low, high, step - 1)
        for (low, high), step in zip(padding, dilation, strict=True)
    ]
    return lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *config, (0, 0, 0)])


def patches(x: jax.Array, conv: Convolution) -> jax.Array:
    """Return the inputs in each output position's window, `[n, *out, *window, channels]`.

    Args:
      x: the images, transposed to `[n, *spatial, channels]`.
      conv: the geometry.
    """
    out, rank = padded(x, conv.padding, conv.lhs_dilation), len(conv.window)
    # One gather splits each axis into positions and window. A slice for every tap would need a kernel for every tap.
    for k in reversed(range(rank)):
        size, window, stride = conv.out[k], conv.window[k], conv.strides[k]
        if window == 1:
            out = lax.slice_in_dim(out, 0, (size - 1) * stride + 1, stride, 1 + k)
            out = jnp.expand_dims(out, 2 + k)
        else:
            seen = stride * np.arange(size)[:, None] + conv.rhs_dilation[k] * np.arange(
                window
            )
            out = jnp.take(out, seen, axis=1 + k, mode="clip")
    return out.transpose(
        0, *range(1, 2 * rank, 2), *range(2, 2 * rank + 1, 2), 2 * rank + 1
    )


@dataclasses.dataclass(frozen=True)
class Patches:
    """The rows that a convolution reads, stored as the image.

    Attributes:
      image: `[n, *spatial, channels]`.
      conv: the geometry.
      arrange: brings the whole batch's patches to `[copies, n, s, d]`. In its `split`, the axes for examples and
        positions come before all other axes.
      images: whether the images are the examples. Otherwise `by_example` forms the whole batch's patches.
      homogeneous: the last entry of every row, None for a layer without a bias.
    """

    image: jax.Array
    conv: Convolution
    arrange: Arrangement
    images: bool
    homogeneous: float | None = None

    @property
    def count(self) -> int:
        """The number of rows."""
        return len(self.image) * math.prod(self.conv.out)

    def gram(self) -> jax.Array:
        axes = None
        # Correlations pair all channels, even across groups, so grouped convolutions use patches.
        if not self.arrange.copies and self.image.shape[-1] >= FEW_CHANNELS:
            axes = offset_axes(self.image.shape[1:-1], self.conv)
        moment = (
            self._gram_of_patches() if axes is None else self._gram_of_offsets(axes)
        )
        # Patches are linear in the image, so the patches of the summed image are the summed patches.
        summed = jnp.sum(self.image, axis=0, keepdims=True, dtype=moment.dtype)
        total = jnp.sum(self._arranged(1)(patches(summed, self.conv)), axis=(1, 2))
        return bordered(moment, total, self.homogeneous, self.count)

    def blocks(self, count: int) -> jax.Array:
        return diagonal_blocks(self.gram(), count)

    def diagonal(self) -> jax.Array:
        squares = jnp.sum(
            self._sums_by_image(lambda x: jnp.square(x.astype(accumulator(x.dtype)))),
            axis=1,
        )
        return append(squares, self.homogeneous, self.count)

    def sums(self) -> jax.Array:
        total = self._sums_by_image(lambda x: x)
        total = (
            total if self.arrange.examples else jnp.sum(total, axis=1, keepdims=True)
        )
        return append(total, self.homogeneous, self.count // total.shape[1])

    def by_example(self) -> jax.Array:
        return (
            self.image
            if self.images
            else Rows(self.arrange(patches(self.image, self.conv))).by_example()
        )

    def part(self, part: jax.Array) -> jax.Array:
        if self.images:
            part = jnp.moveaxis(
                self._arranged(part.shape[0])(patches(part, self.conv)), 0, 1
            )
        return append(part, self.homogeneous, 1)

    def _arranged(self, images: int) -> Arrangement:
        """Return the arrangement for patches from `images` images."""
        alone = (
            self.image.shape[0] == 1
        )  # the axis of a single image does not appear in `split`
        return (
            self.arrange
            if alone
            else self.arrange._replace(split=(images, *self.arrange.split[1:]))
        )

    def _of_features(self, lead: tuple[int, ...]) -> Arrangement:
        """Return the arrangement for arrays whose axes are `lead`, which hold the examples, and the features."""
        first, more = len(self.arrange.examples) + len(self.arrange.rows), len(lead)

        def moved(positions):
            return tuple(k - first + more for k in positions if k >= first)

        arrange = self.arrange
        split = (*lead, *arrange.split[first:])
        copies, features, flips = map(
            moved, (arrange.copies, arrange.features, arrange.flips)
        )
        return Arrangement(split, copies, tuple(range(more)), (), features, flips)

    def _sums_by_image(self, of: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """Apply a function to each patch entry and sum over positions, `[copies, images, d]`.

        Only a single tap is formed at a time.
        """
        x, conv, taps = self.image, self.conv, []
        for offset in itertools.product(*(range(size) for size in conv.window)):
            moved = [
                (p[0] - o * d, p[1])
                for p, o, d in zip(conv.padding, offset, conv.rhs_dilation, strict=True)
            ]
            one = dataclasses.replace(
                conv, window=(1,) * len(conv.window), padding=tuple(moved)
            )
            seen = of(patches(x, one).reshape(x.shape[0], -1, x.shape[-1]))
            taps.append(jnp.sum(seen, axis=1, dtype=accumulator(x.dtype)))
        return self._of_features((x.shape[0],))(jnp.stack(taps, axis=1))[:, :, 0]

    def _gram_of_offsets(self, axes: tuple[Axis, ...]) -> jax.Array:
        """Compute `gram` from correlations, and reorder its features from (window, channel) to the kernel's order."""
        form = self._of_features(())
        names, order = form.split, form.features
        moment = offset_moment(self.image, axes).reshape(*names, *names)
        flips = [*form.flips, *(k + len(names) for k in form.flips)]
        moment = jnp.flip(moment, flips) if flips else moment
        return moment.transpose(*order, *(k + len(names) for k in order)).reshape(
            1, math.prod(names), math.prod(names)
        )

    def _gram_of_patches(self) -> jax.Array:
        conv, taps, n = self.conv, math.prod(self.conv.window), len(self.image)
        # With a single tap, the patches are no larger than the image.
        limit = (
            n
            if taps == 1
            else max(
                1, PATCH_ELEMENTS // (math.prod(conv.out) * taps * self.image.shape[-1])
            )
        )

        def moments(part):
            return Rows(self._arranged(part.shape[0])(patches(part, conv))).gram()

        few, many = (
            functools.partial(sum_of_parts, moments, k * limit) for k in (1, ON_GPUS)
        )
        return (
            few(self.image)
            if n <= limit
            else lax.platform_dependent(self.image, cuda=many, default=few)
        )


def offset_axes(sizes: Sequence[int], conv: Convolution) -> tuple[Axis, ...] | None:
    """Return the geometry for `offset_moment`, or None if patches are faster or the geometry needs them."""
    taps, positions = math.prod(conv.window), math.prod(conv.out)
    if taps == 1 or max(conv.strides) > 1 or max(conv.lhs_dilation) > 1:
        return None
    axes = tuple(
        map(
            Axis,
            sizes,
            conv.window,
            conv.rhs_dilation,
            (low for low, _ in conv.padding),
            conv.out,
        )
    )
    # The factor 1.5 is 0.75 times 2. Symmetry halves the products for all offsets, and the borders add half of the
    # remainder. Patches must take at least twice as many products as correlations.
    products = 1.5 * math.prod(axis.size * (2 * axis.steps + 1) for axis in axes)
    return axes if products < taps**2 * positions else None
