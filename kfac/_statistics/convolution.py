"""The inputs of a convolution in the normal form of `rows.py`: every output position is a row, the patch that it sees.

Patches of the whole batch are never formed. With stride 1, `gram` comes from correlations by offset (`offsets.py`),
where those take fewer products; else from patches, those of a few images at a time.
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
from kfac._statistics.rows import Arrangement, Rows, accumulator, append, as_floats, bordered, diagonal_blocks
from kfac._varying import sum_of_parts

# Patches are formed for so many elements at a time (16 MB in float32).
PATCH_ELEMENTS = 1 << 22
ON_GPUS = 64  # times as many where a launch costs more than the memory

# With fewer channels, patches take no longer than correlations, and a matrix product sums with less rounding than XLA's
# convolutions do.
FEW_CHANNELS = 16


@dataclasses.dataclass(frozen=True)
class Convolution:
    """The geometry of `lax.conv_general_dilated`, one entry for each spatial dimension; `spec` is `lhs_spec`."""

    spec: tuple[int, ...]
    window: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    lhs_dilation: tuple[int, ...]
    rhs_dilation: tuple[int, ...]
    out: tuple[int, ...]

    @property
    def overlap(self) -> float:
        """How many windows hold an input position, away from the edges."""
        reach = zip(self.window, self.strides, self.out, strict=True)
        return math.prod(max(1.0, min(size / stride, float(places))) for size, stride, places in reach)

    def form(self, x, arrange, homogeneous, images, dtype) -> Patches:
        batch, channel, *spatial = self.spec
        return Patches(as_floats(x, dtype).transpose(batch, *spatial, channel), self, arrange, images, homogeneous)


def padded(x: jax.Array, padding: Sequence[tuple[int, int]], dilation: Sequence[int]) -> jax.Array:
    """Images `[n, *spatial, channels]` with their padding, and zeros between their pixels where these are dilated."""
    config = [(low, high, step - 1) for (low, high), step in zip(padding, dilation, strict=True)]
    return lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *config, (0, 0, 0)])


def patches(x: jax.Array, conv: Convolution) -> jax.Array:
    """The inputs each output position sees: `[n, *out, *window, channels]`.

    Args:
      x: `[n, *spatial, channels]`, already transposed.
      conv: the geometry.
    """
    out, rank = padded(x, conv.padding, conv.lhs_dilation), len(conv.window)
    # Each axis becomes two, positions and window, by one gather: a slice for every tap would be as many kernels.
    for k in reversed(range(rank)):
        size, window, stride = conv.out[k], conv.window[k], conv.strides[k]
        if window == 1:
            out = lax.slice_in_dim(out, 0, (size - 1) * stride + 1, stride, 1 + k)
            out = jnp.expand_dims(out, 2 + k)
        else:
            seen = stride * np.arange(size)[:, None] + conv.rhs_dilation[k] * np.arange(window)
            out = jnp.take(out, seen, axis=1 + k, mode="clip")
    return out.transpose(0, *range(1, 2 * rank, 2), *range(2, 2 * rank + 1, 2), 2 * rank + 1)


@dataclasses.dataclass(frozen=True)
class Patches:
    """The rows that a convolution reads, kept as its image.

    Attributes:
      image: `[n, *spatial, channels]`.
      conv: the geometry.
      arrange: brings patches of the whole batch to `[copies, n, s, d]`; axes of rows come before the others.
      images: whether the images are the examples, or there is a single example. Where neither is so, only `gram` and
        `diagonal` go without forming all patches.
      homogeneous: the last entry of every row; None without one.
    """

    image: jax.Array
    conv: Convolution
    arrange: Arrangement
    images: bool
    homogeneous: float | None = None

    @property
    def count(self) -> int:
        """Number of rows."""
        return len(self.image) * math.prod(self.conv.out)

    def gram(self) -> jax.Array:
        axes = None
        # Correlations are between all channels, so those of groups are better off with patches.
        if not self.arrange.copies and self.image.shape[-1] >= FEW_CHANNELS:
            axes = offset_axes(self.image.shape[1:-1], self.conv)
        moment = self._gram_of_patches() if axes is None else self._gram_of_offsets(axes)
        # Patches are linear in the image, so those of the summed image are the sums.
        summed = jnp.sum(self.image, axis=0, keepdims=True, dtype=moment.dtype)
        total = jnp.sum(self._arranged(1)(patches(summed, self.conv)), axis=(1, 2))
        return bordered(moment, total, self.homogeneous, self.count)

    def blocks(self, count: int) -> jax.Array:
        return diagonal_blocks(self.gram(), count)

    def diagonal(self) -> jax.Array:
        squares = jnp.sum(self._sums_by_image(lambda x: jnp.square(x.astype(accumulator(x.dtype)))), axis=1)
        return append(squares, self.homogeneous, self.count)

    def sums(self) -> jax.Array:
        total = self._sums_by_image(lambda x: x)
        total = total if self.arrange.examples else jnp.sum(total, axis=1, keepdims=True)
        return append(total, self.homogeneous, self.count // total.shape[1])

    def by_example(self) -> jax.Array:
        return self.image if self.images else Rows(self.arrange(patches(self.image, self.conv))).by_example()

    def part(self, part: jax.Array) -> jax.Array:
        if self.images:
            part = jnp.moveaxis(self._arranged(part.shape[0])(patches(part, self.conv)), 0, 1)
        return append(part, self.homogeneous, 1)

    def _arranged(self, images: int) -> Arrangement:
        """The arrangement for patches of so many images."""
        alone = self.image.shape[0] == 1  # an axis of length one has no place in it
        return self.arrange if alone else self.arrange._replace(split=(images, *self.arrange.split[1:]))

    def _of_features(self, lead: tuple[int, ...]) -> Arrangement:
        """Returns the arrangement of features behind axes `lead`, which hold the examples."""
        first, more = len(self.arrange.examples) + len(self.arrange.rows), len(lead)

        def moved(positions):
            return tuple(k - first + more for k in positions if k >= first)

        arrange = self.arrange
        split = (*lead, *arrange.split[first:])
        copies, features, flips = map(moved, (arrange.copies, arrange.features, arrange.flips))
        return Arrangement(split, copies, tuple(range(more)), (), features, flips)

    def _sums_by_image(self, of: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """Sums over positions of a function of each entry of the patches, `[copies, images, d]`.

        No more is formed of the patches than one tap of the window at a time.
        """
        x, conv, taps = self.image, self.conv, []
        for offset in itertools.product(*(range(size) for size in conv.window)):
            moved = [(p[0] - o * d, p[1]) for p, o, d in zip(conv.padding, offset, conv.rhs_dilation, strict=True)]
            one = dataclasses.replace(conv, window=(1,) * len(conv.window), padding=tuple(moved))
            seen = of(patches(x, one).reshape(x.shape[0], -1, x.shape[-1]))
            taps.append(jnp.sum(seen, axis=1, dtype=accumulator(x.dtype)))
        return self._of_features((x.shape[0],))(jnp.stack(taps, axis=1))[:, :, 0]

    def _gram_of_offsets(self, axes: tuple[Axis, ...]) -> jax.Array:
        """Forms `gram` by correlations, with features in the order of the kernel, no longer (window, channel)."""
        form = self._of_features(())
        names, order = form.split, form.features
        moment = offset_moment(self.image, axes).reshape(*names, *names)
        flips = [*form.flips, *(k + len(names) for k in form.flips)]
        moment = jnp.flip(moment, flips) if flips else moment
        return moment.transpose(*order, *(k + len(names) for k in order)).reshape(1, math.prod(names), math.prod(names))

    def _gram_of_patches(self) -> jax.Array:
        conv, taps, n = self.conv, math.prod(self.conv.window), len(self.image)
        # A window of one tap makes patches no larger than the image.
        limit = n if taps == 1 else max(1, PATCH_ELEMENTS // (math.prod(conv.out) * taps * self.image.shape[-1]))

        def moments(part):
            return Rows(self._arranged(part.shape[0])(patches(part, conv))).gram()

        few, many = (functools.partial(sum_of_parts, moments, k * limit) for k in (1, ON_GPUS))
        return few(self.image) if n <= limit else lax.platform_dependent(self.image, cuda=many, default=few)


def offset_axes(sizes: Sequence[int], conv: Convolution) -> tuple[Axis, ...] | None:
    """The geometry for `offset_moment`; None where patches are the better way."""
    taps, positions = math.prod(conv.window), math.prod(conv.out)
    if taps == 1 or max(conv.strides) > 1 or max(conv.lhs_dilation) > 1:
        return None
    axes = tuple(map(Axis, sizes, conv.window, conv.rhs_dilation, (low for low, _ in conv.padding), conv.out))
    # Products for all offsets, of which symmetry leaves half, and half as many again for the borders; patches have to
    # take twice as many.
    products = 1.5 * math.prod(axis.size * (2 * axis.steps + 1) for axis in axes)
    return axes if products < taps**2 * positions else None
