"""Bias-corrected running averages of stacks of blocks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kfac._curvature.inverse import per_block


def averaged(average: Any, weight: jax.Array, new: Any, decay: jax.Array, taken: jax.Array) -> tuple[Any, jax.Array]:
    """A running average and the sum `[k]` of its weights, with what is new of the blocks that are `taken`.

    `F <- decay F + (1 - decay) F_new`, divided by the sum of the weights, so that the first is used as it is.

    Args:
      average: stacks `[k, ...]`.
      weight: `[k]`, 0 before the first.
      new: stacks like `average`.
      decay: a scalar.
      taken: `[k]`.
    """
    decay = decay.astype(weight.dtype)
    total = decay * weight + (1 - decay)
    # A decay of 1, which only a schedule can bring, waits for later statistics.
    share = jnp.where(taken & (total > 0), (1 - decay) / total, 0)

    def one(old, new):
        new = jnp.where(per_block(taken, new), new.astype(old.dtype), 0)
        return (1 - per_block(share, old)) * old + per_block(share, old) * new

    return jax.tree.map(one, average, new), jnp.where(taken, total, weight)
