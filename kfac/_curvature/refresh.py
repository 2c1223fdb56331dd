"""Refresh a stack of preconditioners in portions, and try failed blocks again with ten times the damping."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from kfac._curvature.preconditioner import BlockPreconditioner, damping_of_blocks
from kfac._factors import Block, per_block
from kfac._linalg import finite
from kfac._mesh import PyTree, as_varying, varying_axes

RETRY = 10.0  # the factor on the damping when a failed block is tried again

# A portion's factors have at most this many elements. A single matrix with a few hundred rows leaves a GPU mostly idle,
# and a few GB of memory are free during a refresh.
TOGETHER = 1 << 27


class Refreshed(NamedTuple):
    """The result of refreshing `k` blocks.

    Attributes:
      preconditioner: the state. A block that is not `valid` has its old state.
      valid: whether each block's state is new, `[k]`.
      condition: the condition numbers from `BlockPreconditioner.refresh`, `[k]`; 0 for blocks that are not valid.
    """

    preconditioner: PyTree
    valid: Array
    condition: Array


def refresh(
    preconditioner: BlockPreconditioner,
    state: PyTree,
    factors: Block,
    wanted: Array,
    damping: Array,
) -> Refreshed:
    """Refresh the `wanted` blocks in a stack.

    A scan goes over portions of the stack with a fixed number of iterations. If the preconditioner is `damped`, the
    second half of the iterations tries failed blocks again with ten times the damping. The refresh is compiled only
    once. Portions without wanted blocks are skipped. A block that fails in all attempts, or is not wanted, keeps its
    old state. A non-finite new state counts as a failure and is never returned.

    Args:
      preconditioner: the preconditioner.
      state: the old state, stacks of `k` blocks.
      factors: the averaged factors.
      wanted: which blocks to refresh, `[k]`.
      damping: a scalar.
    """
    damping = jnp.asarray(damping, jax.tree.leaves(factors)[0].dtype)
    arguments = (state, factors, wanted, damping)
    arguments = as_varying(arguments, varying_axes(arguments))
    size = sum(math.prod(x.shape[1:]) for x in jax.tree.leaves(factors))
    # With equal portions, the last two portions overlap only little.
    portions = -(-len(wanted) // max(1, TOGETHER // size))
    width = -(-len(wanted) // portions)
    return in_portions(functools.partial(_refresh, preconditioner), width, *arguments)


def in_portions(
    fn: Callable[..., PyTree],
    width: int,
    *arguments: PyTree,
) -> PyTree:
    """Call `fn(width, *arguments)`, which processes `width` matrices at once, or on CPUs `fn(1, *arguments)`.

    On CPUs, JAX's LAPACK calls hand the matrices in a batch to XLA's threads, and wait for them on such a thread. With
    as many simulated devices as cores, all threads would wait and no thread would be left to work.
    """
    if width == 1:
        return fn(1, *arguments)
    return lax.platform_dependent(
        *arguments, cpu=functools.partial(fn, 1), default=functools.partial(fn, width)
    )


def _refresh(
    preconditioner: BlockPreconditioner,
    width: int,
    state: PyTree,
    factors: Block,
    wanted: Array,
    damping: Array,
) -> Refreshed:
    """Implement `refresh` in portions of `width` blocks."""
    k = len(wanted)
    # If `width` does not divide `k`, the last portion starts earlier and overlaps the one before. The second attempt
    # and the overlap skip blocks that are valid already, so each block is refreshed once.
    starts = np.minimum(np.arange(0, k, width), k - width)
    attempts = [1.0, RETRY] if preconditioner.damped else [1.0]
    scales = np.repeat(np.asarray(attempts, np.float32), len(starts))

    def turn(progress, now):
        start, scale = now

        def rows(tree):
            return jax.tree.map(
                lambda x: lax.dynamic_slice_in_dim(x, start, width), tree
            )

        # Slice the state before the branch. The branch then has the same kernels for stacks of any length, which are
        # compiled once.
        old = rows(progress)
        unfinished = rows(wanted) & ~old.valid

        def attempt():
            # Slice the factors inside the branch, where XLA reads them in place. A slice before it would be a copy.
            averages = rows(factors)
            amount = scale * damping_of_blocks(preconditioner, averages, damping)
            return _refresh_portion(preconditioner, old, averages, unfinished, amount)

        # In the second attempt this is usually false, so a retry that no block needs costs nothing.
        new = lax.cond(jnp.any(unfinished), attempt, lambda: old)

        def written(x, part):
            # XLA updates the scan's carry in place.
            return lax.dynamic_update_slice_in_dim(x, part, start, 0)

        return jax.tree.map(written, progress, new), None

    flags = jnp.zeros(k, bool), jnp.zeros(k, jax.tree.leaves(factors)[0].dtype)
    # `shard_map` requires that the scan's carry varies over the same devices before and after.
    begin = Refreshed(state, *as_varying(flags, varying_axes(wanted)))
    # One scan with both attempts, so that the factorisation, which takes long to compile, is compiled once.
    turns = (np.tile(starts, len(attempts)), scales)
    return lax.scan(turn, begin, turns)[0]


def _refresh_portion(
    preconditioner: BlockPreconditioner,
    old: Refreshed,
    factors: Block,
    unfinished: Array,
    damping: Array,
) -> Refreshed:
    """Refresh the `unfinished` blocks in a portion.

    Args:
      preconditioner: the preconditioner.
      old: the portion after the attempts so far.
      factors: the averaged factors.
      unfinished: which blocks to refresh.
      damping: each block's damping.

    Returns:
      The portion after this attempt. Blocks that fail are unchanged.
    """
    result = preconditioner.refresh(old.preconditioner, factors, damping)
    # A result that is the same on all devices, such as a constant condition number, must vary like the old one.
    state, condition = as_varying(result, varying_axes(old))
    usable = unfinished & (condition > 0)
    for leaf in jax.tree.leaves(state):
        usable &= finite(leaf)
    new = Refreshed(state, old.valid | usable, condition.astype(old.condition.dtype))
    # A conditional launches no kernel, whereas a selection launches one for each array.
    if len(usable) == 1:
        return lax.cond(usable[0], lambda: new, lambda: old)
    return jax.tree.map(
        lambda new, old: jnp.where(per_block(usable, old), new, old), new, old
    )
