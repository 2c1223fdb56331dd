"""Stacks as they are sent: flat."""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp


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
