"""Stacks as they are sent: flat, and of symmetric matrices the upper triangles only."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kfac._factors import Block, Kronecker, is_diagonal


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


def unpack(packed: jax.Array, d: int) -> jax.Array:
    """The inverse of `pack`, for matrices of dimension `d`."""
    h = packed.shape[-2]
    triangles, corner = packed[..., : h + 1], packed[..., h + 1 :]
    upper, lower = jnp.triu(triangles[..., 1:]), jnp.tril(triangles[..., :h])
    first = upper + jnp.triu(upper, 1).mT
    last = lower + jnp.tril(lower, -1).mT
    top = jnp.concatenate([first, corner], axis=-1)
    bottom = jnp.concatenate([corner.mT, last], axis=-1)
    return jnp.concatenate([top, bottom], axis=-2)[..., :d, :d]


def flatten(tree: Any) -> jax.Array:
    """Arrays `[k, ...]` side by side, `[k, elements]`, in the widest of their dtypes."""
    return jnp.concatenate([x.reshape(x.shape[0], -1) for x in jax.tree.leaves(tree)], axis=1)


def unflatten(flat: jax.Array, like: Any) -> Any:
    """The inverse of `flatten`, for arrays (or `jax.ShapeDtypeStruct`s) `like`, but for their number `k`."""
    leaves, treedef = jax.tree.flatten(like)
    ends = list(itertools.accumulate(math.prod(leaf.shape[1:]) for leaf in leaves))
    parts = jnp.split(flat, ends[:-1], axis=1)
    whole = [part.reshape(-1, *x.shape[1:]).astype(x.dtype) for part, x in zip(parts, leaves, strict=True)]
    return jax.tree.unflatten(treedef, whole)


def flatten_block(block: Block) -> jax.Array:
    """`flatten` of statistics or inverses; of matrices `A` and `G`, which are symmetric, the triangles."""
    return flatten(_sides(pack, block))


def unflatten_block(flat: jax.Array, like: Block) -> Block:
    """The inverse of `flatten_block`."""
    packed = unflatten(flat, jax.eval_shape(functools.partial(_sides, pack), like))
    return _sides(unpack, packed, like)


def _sides(fn: Callable[..., jax.Array], block: Block, like: Block | None = None) -> Block:
    if not isinstance(block, Kronecker):
        return block

    def side(name: str) -> Any:
        stack = getattr(block, name)
        if is_diagonal(stack):
            return stack
        return fn(stack) if like is None else fn(stack, getattr(like, name).shape[-1])

    return dataclasses.replace(block, A=side("A"), G=side("G"))
