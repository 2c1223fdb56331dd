"""Convert factors to vectors and back, for messages and storage. A symmetric matrix becomes its upper triangle."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax

from kfac._mesh import PyTree

Shape: TypeAlias = tuple[int, ...]


def pack(stack: Array) -> Array:
    """Return the upper triangles of symmetric matrices `[k, d, d]` as `[k, h, 2 h + 1]`, with `h = ceil(d / 2)`.

    The triangles of the two diagonal blocks `[h, h]` together fill a rectangle of `h` by `h + 1`. The upper right block
    follows to the right. This takes slices and masks only, because index tables would be as large as the matrices.
    """
    d = stack.shape[-1]
    h = (d + 1) // 2
    # An odd matrix gets a zero row and a zero column.
    stack = pad_end(stack, 2 * h - d, 2 * h - d)
    first = stack[:, :h, :h]
    last = stack[:, h:, h:]
    corner = stack[:, :h, h:]
    row = lax.broadcasted_iota(jnp.int32, (h, h + 1), 0)
    column = lax.broadcasted_iota(jnp.int32, (h, h + 1), 1)
    shifted = jnp.pad(first, ((0, 0), (0, 0), (1, 0)))
    triangles = jnp.where(column > row, shifted, pad_end(last, 1))
    return jnp.concatenate([triangles, corner], axis=-1)


def pad_end(
    x: Array,
    *counts: int,
) -> Array:
    """Append zeros at the end of the last axes, as many as `counts`."""
    if not any(counts):
        return x
    widths = [(0, 0)] * (x.ndim - len(counts))
    return jnp.pad(x, [*widths, *((0, count) for count in counts)])


def join_stacks(*stacks: Array) -> Array:
    """Concatenate along the first axis.

    On CPUs, the operands are flat vectors, which XLA copies. With up to eight matrices it would compile a loop over
    each of them, once for every kernel that reads the result.
    """

    def plain(*stacks):
        return jnp.concatenate(stacks)

    def flat(*stacks):
        count = sum(len(x) for x in stacks)
        return plain(*map(jnp.ravel, stacks)).reshape(count, *stacks[0].shape[1:])

    # A single stack is joined already. An array that is sharded over a mesh cannot be flattened.
    if len(stacks) == 1 or jax.sharding.get_abstract_mesh().size > 1:
        return plain(*stacks)
    return lax.platform_dependent(*stacks, cpu=flat, default=plain)


def packed_size(d: int) -> int:
    """Return the number of elements in a packed matrix `[d, d]`."""
    h = (d + 1) // 2
    return h * (2 * h + 1)


def unpack(
    flat: Array,
    d: int,
) -> Array:
    """Undo `pack`.

    Args:
      flat: packed matrices as vectors `[..., elements]`. Elements beyond `packed_size(d)` are padding.
      d: the matrix size.

    Returns:
      The symmetric matrices `[k, d, d]`, where `k` is the product of the leading axes.
    """
    h = (d + 1) // 2
    packed = flat[..., : packed_size(d)].reshape(-1, h, 2 * h + 1)
    triangles = packed[..., : h + 1]
    corner = packed[..., h + 1 :]
    upper = jnp.triu(triangles[..., 1:])
    lower = jnp.tril(triangles[..., :h])
    first = upper + jnp.triu(upper, 1).mT
    last = lower + jnp.tril(lower, -1).mT
    top = jnp.concatenate([first, corner], axis=-1)
    bottom = jnp.concatenate([corner.mT, last], axis=-1)
    return jnp.concatenate([top, bottom], axis=-2)[..., :d, :d]


def padded_shape(
    shape: Shape,
    multiple: int = 1,
) -> tuple[int, int]:
    """Return the lengths of the last two axes after `as_vectors`: pieces and elements.

    Args:
      shape: the factor's shape, as for `as_vectors`.
      multiple: the number of elements is rounded up to a multiple of this.
    """
    size = shape[0] if len(shape) == 1 else packed_size(shape[-1])
    return math.prod(shape[:-2]), -(-size // multiple) * multiple


def as_vectors(
    x: Array,
    shape: Shape,
) -> Array:
    """Return factors `[..., *shape]` as vectors `[..., pieces, elements]`.

    Args:
      x: matrices `[..., d, d]`, stacks of diagonal blocks `[..., pieces, d, d]`, or diagonals `[..., d]`.
      shape: a single factor's shape, without the leading axes.
    """
    lead = x.shape[: x.ndim - len(shape)]
    if len(shape) > 1:
        x = pack(x.reshape(-1, *shape[-2:]))
    return x.reshape(*lead, math.prod(shape[:-2]), -1)


def pad_to_devices(flat: Array, devices: int | None = None) -> Array:
    """Pad vectors with zeros to a multiple of `devices` elements, by default of the mesh size."""
    if devices is None:
        devices = max(1, jax.sharding.get_abstract_mesh().size)
    return pad_end(flat, -flat.shape[-1] % devices)


def from_vectors(
    flat: Array,
    shape: Shape,
) -> Array:
    """Undo `as_vectors` and remove padding."""
    if len(shape) == 1:
        return flat[..., 0, : shape[0]]
    return unpack(flat, shape[-1]).reshape(*flat.shape[:-2], *shape)


def flatten(tree: PyTree) -> Array:
    """Concatenate the leaves `[k, ...]` of a tree to an array `[k, elements]`, in the widest of their dtypes."""
    flat = [x.reshape(x.shape[0], -1) for x in jax.tree.leaves(tree)]
    return jnp.concatenate(flat, axis=1)


def unflatten(
    flat: Array,
    like: PyTree,
) -> PyTree:
    """Undo `flatten`.

    Args:
      flat: an array `[k, elements]`.
      like: a tree of arrays or `jax.ShapeDtypeStruct`s with the shapes and dtypes to restore. Its `k` may differ.
    """
    leaves, treedef = jax.tree.flatten(like)
    parts = cut(flat, [math.prod(leaf.shape[1:]) for leaf in leaves])
    restored = []
    for part, leaf in zip(parts, leaves, strict=True):
        restored.append(part.reshape(-1, *leaf.shape[1:]).astype(leaf.dtype))
    return jax.tree.unflatten(treedef, restored)


def cut(
    x: Array,
    lengths: Iterable[int],
) -> list[Array]:
    """Split an array along its last axis into parts of these lengths."""
    return jnp.split(x, list(itertools.accumulate(lengths))[:-1], axis=-1)


def pieces_along(side: str, num_blocks: tuple[int, int]) -> int:
    """Return the number of pieces along the side `"A"` or `"G"`, from `Layer.num_blocks`."""
    return num_blocks["AG".index(side)]


def in_blocks(
    rows: Array,
    count: int,
) -> Array:
    """Split rows `[..., n, d]` into `count` blocks of neighbouring features: `[..., count, n, features]`.

    The last block is padded with zeros.
    """
    features = -(-rows.shape[-1] // count)
    rows = pad_end(rows, count * features - rows.shape[-1])
    return jnp.moveaxis(rows.reshape(*rows.shape[:-1], count, features), -2, -3)
