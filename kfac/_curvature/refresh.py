"""New inverses of a stack of blocks: portion by portion, and once more with ten times the damping where that fails."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kfac._curvature.inverse import Inverse, damping_of_blocks, finite
from kfac._factors import per_block
from kfac._varying import as_varying, varying_axes

RETRY = 10.0  # a block that fails is tried once more with so many times the damping

# Blocks are worked on so many together that their factors have at most this many elements: a GPU is idle with single
# matrices of a few hundred rows, and some GB of memory are there for the while.
TOGETHER = 1 << 27


class Refreshed(NamedTuple):
    """Inverses of a stack of `k` blocks.

    Attributes:
      inverse: what is kept of them; where `valid` is false, as it was before.
      valid: `[k]`, whether the inverse is new.
      condition: `[k]`, the condition numbers that `Inverse.refresh` returned; 0 where not valid.
    """

    inverse: Any
    valid: jax.Array
    condition: jax.Array


def refresh(inverse: Inverse, kept: Any, factors: Any, wanted: jax.Array, damping: jax.Array) -> Refreshed:
    """Refreshes the blocks of a stack that are `wanted`.

    A scan over portions of the stack, with a fixed number of turns. The second half of the turns is for blocks that
    failed in the first, with ten times the damping; so the inversion is compiled once. A portion of which no block is
    wanted is left out. A block that fails twice, or is not wanted, stays as it is. Nothing non-finite is ever returned.

    Args:
      inverse: the kind.
      kept: what is kept so far, stacks of `k`.
      factors: their running averages.
      wanted: `[k]`.
      damping: a scalar.
    """
    damping = jnp.asarray(damping, jax.tree.leaves(factors)[0].dtype)
    arguments = as_varying((kept, factors, wanted, damping), varying_axes((kept, factors, wanted, damping)))
    size = sum(math.prod(x.shape[1:]) for x in jax.tree.leaves(factors))
    # Equal portions: the last one does not do much again.
    width = -(-len(wanted) // -(-len(wanted) // max(1, TOGETHER // size)))
    return in_portions(functools.partial(_refresh, inverse), width, *arguments)


def once_if(needed: jax.Array, change: Callable[[Any], Any], stacks: Any) -> Any:
    """`change(stacks)` where `needed`, else `stacks`; in their place.

    A loop that turns once at most: XLA copies all that a conditional may change, which would be all inverses in each
    step, and nothing of what a loop changes. In a step that changes nothing the host reads one predicate either way.
    """
    return lax.while_loop(lambda now: now[0], lambda now: (now[0] & False, change(now[1])), (needed, stacks))[1]


def in_portions(fn: Callable[..., Any], width: int, *arguments: Any) -> Any:
    """Calls `fn(width, *arguments)`, which works on `width` matrices at once; on CPUs `fn(1, ...)`, one by one.

    There JAX's LAPACK calls hand the matrices of a batch to XLA's threads and wait for them, on one of these threads:
    with as many simulated devices as cores all wait, and none is left to work.
    """
    if width == 1:
        return fn(1, *arguments)
    return lax.platform_dependent(*arguments, cpu=functools.partial(fn, 1), default=functools.partial(fn, width))


def one_by_one(fn: Callable[..., Any], *stacks: Any) -> Any:
    """Stacks of what `fn` returns of each member of `stacks`, in portions of all of them."""

    def portion(width, *stacks):
        return lax.map(lambda members: fn(*members), stacks, batch_size=width)

    return in_portions(portion, len(jax.tree.leaves(stacks)[0]), *stacks)


def _refresh(inverse: Inverse, width: int, kept: Any, factors: Any, wanted: jax.Array, damping: jax.Array) -> Refreshed:
    """`refresh`, in portions of `width` blocks."""
    k = len(wanted)
    # The last portion begins earlier where `width` does not divide `k`: what is done by then is not done again.
    starts = np.minimum(np.arange(0, k, width), k - width)
    dampings = [1.0, RETRY] if inverse.damped else [1.0]
    turns = np.tile(starts, len(dampings)), np.repeat(np.asarray(dampings, np.float32), len(starts))

    def turn(progress, now):
        start, more = now

        def rows(tree):
            return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, width), tree)

        # Cut before the branch, whose kernels are then the same for stacks of any length, and compiled once. Factors
        # are cut inside, where XLA needs no copy of them.
        old = rows(progress)
        unfinished = rows(wanted) & ~(old[1] > 0)

        def attempt():
            averages = rows(factors)
            both = inverse.refresh(old[0], averages, more * damping_of_blocks(inverse, averages, damping))
            new, condition = as_varying(both, varying_axes(old))
            usable = unfinished & (condition > 0)
            for leaf in jax.tree.leaves(new):
                usable &= finite(leaf)
            new = new, condition.astype(old[1].dtype)
            if width == 1:  # no kernel, where a selection is one for each array
                return lax.cond(usable[0], lambda: new, lambda: old)
            return jax.tree.map(lambda new, old: jnp.where(per_block(usable, old), new, old), new, old)

        new = lax.cond(jnp.any(unfinished), attempt, lambda: old)
        return jax.tree.map(lambda x, part: lax.dynamic_update_slice_in_dim(x, part, start, 0), progress, new), None

    none = jnp.zeros(k, jax.tree.leaves(factors)[0].dtype)
    (kept, condition), _ = lax.scan(turn, (kept, as_varying(none, varying_axes(wanted))), turns)
    return Refreshed(kept, condition > 0, condition)
