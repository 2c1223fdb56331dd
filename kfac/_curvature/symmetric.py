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

from kfac._factors import Kronecker, is_diagonal
from kfac._triangles import pack, unpack


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


def flatten_block(block: Kronecker) -> jax.Array:
    """`flatten` of factors or inverses; of matrices `A` and `G`, which are symmetric, the triangles."""
    return flatten(_sides(pack, block))


def unflatten_block(flat: jax.Array, like: Kronecker) -> Kronecker:
    """The inverse of `flatten_block`."""
    packed = unflatten(flat, jax.eval_shape(functools.partial(_sides, pack), like))
    return _sides(unpack, packed, like)


def _sides(fn: Callable[..., jax.Array], block: Kronecker, like: Kronecker | None = None) -> Kronecker:
    def side(name: str) -> Any:
        stack = getattr(block, name)
        if is_diagonal(stack):
            return stack
        return fn(stack) if like is None else fn(stack, getattr(like, name).shape[-1])

    return dataclasses.replace(block, A=side("A"), G=side("G"))
