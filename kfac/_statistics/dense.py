"""Second moments of each kind of read: what the backward pass of a tap computes.

Everything here returns plain sums over rows; `planning.py` divides by the number of examples and positions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kfac._capture.axes import Arrangement
from kfac._statistics.correlations import Axis as ConvAxis
from kfac._statistics.correlations import offset_moment
from kfac._statistics.correlations import products as offset_products
from kfac._varying import zeros_of

# Patches of a convolution are formed for so many elements at a time (16 MB in float32), not for the whole batch.
PATCH_ELEMENTS = 1 << 22

# With fewer channels patches are as fast as correlations, and a matrix product sums with less rounding than XLA's
# convolutions do.
FEW_CHANNELS = 16


def accumulator(dtype: Any) -> Any:
    """The dtype in which products of `dtype` operands are summed: float32 at least."""
    return jnp.promote_types(dtype, jnp.float32)


def gram(rows: jax.Array) -> jax.Array:
    """Sum of outer products: `[copies, rows, d]` to `[copies, d, d]`, accumulated in float32 or better."""
    return jnp.einsum("cri,crj->cij", rows, rows, preferred_element_type=accumulator(rows.dtype))


def with_homogeneous(moment: jax.Array, sums: jax.Array | None, rows: int) -> jax.Array:
    """Appends the row and column of a homogeneous coordinate: 1 in every row, or 0 where `sums` is None.

    Args:
      moment: `[copies, d, d]`, sum of outer products.
      sums: `[copies, d]`, sum of the rows; None for a use of the kernel without its bias.
      rows: how many rows were summed.
    """
    if sums is None:
        return jnp.pad(moment, ((0, 0), (0, 1), (0, 1)))
    corner = jnp.full((moment.shape[0], 1, 1), rows, moment.dtype)
    top = jnp.concatenate([moment, sums[:, :, None]], axis=2)
    bottom = jnp.concatenate([sums[:, None, :], corner], axis=2)
    return jnp.concatenate([top, bottom], axis=1)


def dense_moment(x: jax.Array, arrange: Arrangement, bias: str) -> jax.Array:
    """Sum of `a a^T` over the rows of a dense layer's input.

    Args:
      x: the input as the product reads it.
      arrange: brings it to `[copies, rows, d_in]`.
      bias: `"none"`: no homogeneous coordinate; `"one"`: a homogeneous 1; `"zero"`: this use of the kernel adds no
        bias.
    """
    rows = arrange(x)
    return _finish(gram(rows), jnp.sum(rows, axis=1, dtype=accumulator(x.dtype)), rows.shape[1], bias)


def _finish(moment: jax.Array, sums: jax.Array, rows: int, bias: str) -> jax.Array:
    if bias == "none":
        return moment
    return with_homogeneous(moment, sums if bias == "one" else None, rows)


def position_sums(rows: jax.Array, groups: int) -> jax.Array:
    """Sums over the rows of each of `groups` equal runs of them: `[copies, rows, d]` to `[copies, groups, d]`."""
    copies, count, width = rows.shape
    return jnp.sum(rows.reshape(copies, groups, count // groups, width), axis=2, dtype=accumulator(rows.dtype))


def squared(rows: jax.Array) -> jax.Array:
    """Squares of the entries; their sums over rows are the diagonal of `gram`."""
    return jnp.square(rows.astype(accumulator(rows.dtype)))


class Lookup(NamedTuple):
    """A gather of rows of a table.

    Attributes:
      rows: how many rows the table has.
      column: which component of an index vector says the row.
      drop: whether indices out of range are dropped; otherwise they are clamped.
    """

    rows: int
    column: int
    drop: bool


def lookup_counts(indices: jax.Array, lookup: Lookup, dtype: Any) -> jax.Array:
    """How often each row is looked up, `[rows]`: the diagonal of the sum of `a a^T` over one-hot `a`.

    Args:
      indices: as `lax.gather` takes them, `[..., components]`; a negative one is out of range.
      lookup: what is looked up in.
      dtype: of the counts.
    """
    flat = indices[..., lookup.column].reshape(-1)
    inside = jnp.clip(flat, 0, lookup.rows - 1)
    weight = (flat == inside).astype(dtype) if lookup.drop else jnp.ones_like(flat, dtype)
    return jax.ops.segment_sum(weight, inside, num_segments=lookup.rows)


class Convolution(NamedTuple):
    """The geometry of `lax.conv_general_dilated`, one entry for each spatial dimension; `spec` is `lhs_spec`."""

    spec: tuple[int, ...]
    window: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    lhs_dilation: tuple[int, ...]
    rhs_dilation: tuple[int, ...]
    out: tuple[int, ...]


def patches(x: jax.Array, conv: Convolution) -> jax.Array:
    """The inputs each output position sees: `[n, *out, *window, channels]`.

    Args:
      x: `[n, *spatial, channels]`, already transposed.
      conv: the geometry.
    """
    config = [(low, high, step - 1) for (low, high), step in zip(conv.padding, conv.lhs_dilation, strict=True)]
    out = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *config, (0, 0, 0)])
    rank = len(conv.window)
    # Each axis becomes two, positions and window. A gather is one kernel, and faster than a slice for every tap.
    for k in reversed(range(rank)):
        size, window, stride = conv.out[k], conv.window[k], conv.strides[k]
        if window == 1:
            out = lax.slice_in_dim(out, 0, (size - 1) * stride + 1, stride, 1 + k)
            out = jnp.expand_dims(out, 2 + k)
        else:
            seen = stride * np.arange(size)[:, None] + conv.rhs_dilation[k] * np.arange(window)
            out = jnp.take(out, seen, axis=1 + k, mode="clip")
    return out.transpose(0, *range(1, 2 * rank, 2), *range(2, 2 * rank + 1, 2), 2 * rank + 1)


def patch_sums(x: jax.Array, conv: Convolution, of: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Sums over output positions of a function of each entry of the patches: `[n, *window, channels]`.

    No more is formed of the patches than one tap of the window at a time.

    Args:
      x: the image in the layout of the convolution.
      conv: the geometry.
      of: an elementwise function.
    """
    batch, channel, *spatial = conv.spec
    x = x.transpose(batch, *spatial, channel)
    taps = []
    for offset in itertools.product(*(range(size) for size in conv.window)):
        moved = [(p[0] - o * d, p[1]) for p, o, d in zip(conv.padding, offset, conv.rhs_dilation, strict=True)]
        one = conv._replace(window=(1,) * len(conv.window), padding=tuple(moved))
        seen = of(patches(x, one).reshape(x.shape[0], -1, x.shape[-1]))
        taps.append(jnp.sum(seen, axis=1, dtype=accumulator(x.dtype)))
    return jnp.stack(taps, axis=1).reshape(x.shape[0], *conv.window, x.shape[-1])


def conv_moment(x: jax.Array, conv: Convolution, arrange: Arrangement, bias: str) -> jax.Array:
    """Sum of `a a^T` over the patches of a convolution; patches of the whole batch are never formed.

    With stride 1 it comes from correlations by offset, where those take fewer products; else from patches, a few
    examples at a time.

    Args:
      x: the image in the layout of the convolution.
      conv: the geometry.
      arrange: brings patches of the whole batch to `[1, rows, d_in]`.
      bias: as for `dense_moment`.
    """
    batch, channel, *spatial = conv.spec
    x = x.transpose(batch, *spatial, channel)
    # Correlations are between all channels, so those of groups are better off with patches.
    axes = None if arrange.stack or x.shape[-1] < FEW_CHANNELS else conv_axes(x.shape[1:-1], conv)
    if axes is None:
        moment = _patch_moment(x, conv, arrange)
    else:
        # Features in the order of the kernel, from (window, channel).
        names = arrange.split[len(arrange.rows) :]
        order = [k - len(arrange.rows) for k in arrange.features]
        moment = offset_moment(x, axes).reshape(*names, *names)
        flips = [k - len(arrange.rows) for k in arrange.flips if k >= len(arrange.rows)]
        moment = jnp.flip(moment, [*flips, *(k + len(names) for k in flips)]) if flips else moment
        moment = moment.transpose(*order, *(k + len(names) for k in order))
        moment = moment.reshape(1, math.prod(names), math.prod(names))
    if bias == "none":
        return moment
    # Patches are linear in the image, so those of the summed image are the sums.
    sums = jnp.sum(x, axis=0, keepdims=True, dtype=accumulator(x.dtype))
    of_one = for_examples(arrange, 1) if x.shape[0] > 1 else arrange
    sums = jnp.sum(of_one(patches(sums, conv)), axis=1)
    return with_homogeneous(moment, sums if bias == "one" else None, x.shape[0] * math.prod(conv.out))


def conv_axes(sizes: Sequence[int], conv: Convolution) -> tuple[ConvAxis, ...] | None:
    """The geometry for `offset_moment`; None where patches are the better way."""
    taps, positions = math.prod(conv.window), math.prod(conv.out)
    if taps == 1 or max(conv.strides) > 1 or max(conv.lhs_dilation) > 1:
        return None
    lows = [low for low, _ in conv.padding]
    axes = tuple(map(ConvAxis, sizes, conv.window, conv.rhs_dilation, lows, conv.out))
    return axes if 2 * offset_products(axes) < taps**2 * positions else None


def for_examples(arrange: Arrangement, count: int) -> Arrangement:
    """An arrangement made for patches of several examples, the first of its axes, for those of `count`."""
    return arrange._replace(split=(count, *arrange.split[1:]))


def _patch_moment(x: jax.Array, conv: Convolution, arrange: Arrangement) -> jax.Array:
    n = x.shape[0]
    taps = math.prod(conv.window)
    limit = max(1, PATCH_ELEMENTS // (math.prod(conv.out) * taps * x.shape[-1]))
    # A window of one tap makes patches no larger than the image.
    chunk = n if taps == 1 else next(size for size in range(min(n, limit), 0, -1) if n % size == 0)
    of_chunk = for_examples(arrange, chunk) if n > 1 else arrange

    def moments(part):
        return gram(of_chunk(patches(part, conv)))

    if chunk == n:
        return moments(x)
    parts = x.reshape(n // chunk, chunk, *x.shape[1:])
    return lax.scan(lambda total, part: (total + moments(part), None), zeros_of(moments, parts[0]), parts)[0]


def per_example(
    g: jax.Array,
    coefficient: jax.Array | None,
    split: tuple[int, ...],
    examples: tuple[int, ...],
    units: tuple[int, ...],
) -> jax.Array:
    """Gradients of each example with respect to an elementwise parameter, summed over positions.

    Args:
      g: gradient with respect to the result of the sum or product.
      coefficient: what the parameter was multiplied by, broadcastable to `g`; None for a sum.
      split: shape that separates the parameter's axes from the others.
      examples: positions of the axes of the examples in `split`; none for a single example.
      units: positions of the parameter's axes, in its memory order.

    Returns:
      `[n, units]`.
    """
    dtype = accumulator(g.dtype)
    g = g.astype(dtype)
    if coefficient is not None:
        g = g * coefficient.astype(dtype)
    g = g.reshape(split)
    kept = examples + units
    summed = tuple(k for k in range(len(split)) if k not in kept)
    remaining = [k for k in range(len(split)) if k not in summed]
    g = jnp.sum(g, axis=summed).transpose([remaining.index(k) for k in kept])
    return g.reshape(math.prod(split[k] for k in examples), -1)
