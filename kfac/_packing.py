"""Arrays as vectors, symmetric matrices as their upper triangles: what is sent and kept of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def pack(stack: jax.Array) -> jax.Array:
    """The upper triangles of symmetric matrices `[k, d, d]` as `[k, h, 2 h + 1]`, `h = ceil(d / 2)`.

    The upper left triangle, and the lower right one mirrored, fill a rectangle of `h` by `h + 1`; the upper right block
    stands beside it. Slices and masks only: index tables would be as large as the matrices.
    """
    d = stack.shape[-1]
    if d % 2:  # one more row and column of zeros
        stack = jnp.pad(stack, ((0, 0), (0, 1), (0, 1)))
    h = (d + 1) // 2
    first, last, corner = stack[:, :h, :h], stack[:, h:, h:], stack[:, :h, h:]
    row, column = lax.broadcasted_iota(jnp.int32, (h, h + 1), 0), lax.broadcasted_iota(jnp.int32, (h, h + 1), 1)
    shifted = jnp.pad(first, ((0, 0), (0, 0), (1, 0)))
    triangles = jnp.where(column > row, shifted, jnp.pad(last, ((0, 0), (0, 0), (0, 1))))
    return jnp.concatenate([triangles, corner], axis=-1)


def packed_size(d: int) -> int:
    """Elements of what `pack` returns for one matrix."""
    return math.prod(jax.eval_shape(pack, jax.ShapeDtypeStruct((1, d, d), jnp.float32)).shape)


def unpack(flat: jax.Array, d: int) -> jax.Array:
    """Matrices `[k, d, d]` from vectors of what `pack` returned for them; what is behind is left out."""
    h = (d + 1) // 2
    packed = flat[..., : packed_size(d)].reshape(-1, h, 2 * h + 1)
    triangles, corner = packed[..., : h + 1], packed[..., h + 1 :]
    upper, lower = jnp.triu(triangles[..., 1:]), jnp.tril(triangles[..., :h])
    first = upper + jnp.triu(upper, 1).mT
    last = lower + jnp.tril(lower, -1).mT
    top = jnp.concatenate([first, corner], axis=-1)
    bottom = jnp.concatenate([corner.mT, last], axis=-1)
    return jnp.concatenate([top, bottom], axis=-2)[..., :d, :d]


def room(shape: tuple[int, ...], multiple: int = 1) -> tuple[int, int]:
    """The last two axes of what `as_vectors` returns, the last filled up to a multiple."""
    size = shape[0] if len(shape) == 1 else packed_size(shape[-1])
    return math.prod(shape[:-2]), -(-size // multiple) * multiple


def as_vectors(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Factors `[..., *shape]` as vectors `[..., pieces, elements]`.

    Args:
      x: whole matrices `[..., d, d]`, diagonal blocks of them `[..., pieces, d, d]`, or diagonals `[..., d]`.
      shape: of one of these.
    """
    flat = x if len(shape) == 1 else pack(x.reshape(-1, *shape[-2:]))
    return flat.reshape(*x.shape[: x.ndim - len(shape)], math.prod(shape[:-2]), -1)


def filled(flat: jax.Array) -> jax.Array:
    """Vectors with zeros behind, so that the devices of the mesh divide the number of elements."""
    missing = -flat.shape[-1] % max(1, jax.sharding.get_abstract_mesh().size)
    return jnp.pad(flat, [(0, 0)] * (flat.ndim - 1) + [(0, missing)]) if missing else flat


def from_vectors(flat: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of `as_vectors`; what is behind is left out."""
    if len(shape) == 1:
        return flat[..., 0, : shape[0]]
    return unpack(flat, shape[-1]).reshape(*flat.shape[:-2], *shape)


def flatten(tree: Any) -> jax.Array:
    """Arrays `[k, ...]` side by side, `[k, elements]`, in the widest of their dtypes."""
    return jnp.concatenate([x.reshape(x.shape[0], -1) for x in jax.tree.leaves(tree)], axis=1)


def unflatten(flat: jax.Array, like: Any) -> Any:
    """The inverse of `flatten`, for arrays (or `jax.ShapeDtypeStruct`s) `like`, but for their number `k`."""
    leaves, treedef = jax.tree.flatten(like)
    parts = zip(cut(flat, (math.prod(leaf.shape[1:]) for leaf in leaves)), leaves, strict=True)
    return jax.tree.unflatten(treedef, [part.reshape(-1, *x.shape[1:]).astype(x.dtype) for part, x in parts])


def cut(x: jax.Array, lengths: Iterable[int]) -> list[jax.Array]:
    """An array in parts of such lengths, along its last axis."""
    return jnp.split(x, list(itertools.accumulate(lengths))[:-1], axis=-1)


def in_blocks(rows: jax.Array, count: int) -> jax.Array:
    """Rows `[..., n, d]` as `[..., count, n, features]`, each with some neighbouring features of all."""
    features = -(-rows.shape[-1] // count)
    rows = jnp.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, count * features - rows.shape[-1])])
    return jnp.moveaxis(rows.reshape(*rows.shape[:-1], count, features), -2, -3)
