"""`observe` on each device: update running averages with statistics, and refresh preconditioners from the averages.

`CommContext` sends the messages between devices. The same code serves a single device.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from kfac._curvature.blocks import Group
from kfac._curvature.kronecker import to_send
from kfac._curvature.preconditioner import averaged
from kfac._curvature.refresh import refresh
from kfac._distributed.comm import CommContext
from kfac._factors import Average, Factors, Packed
from kfac._linalg import finite
from kfac._optimizer.exchange import StepContext, Vectors, join
from kfac._optimizer.flat_state import block_of, with_parts
from kfac._optimizer.state import KfacState, check_blocks
from kfac._packing import pad_to_devices

# A batch's statistics by group name: captured statistics with arrays `[k, ...]`, and for gradient factors the gradients
# as matrices `[k, d_in, d_out]`.
BatchStacks = dict[str, Any]


def observe_here(
    comm: CommContext,
    state: KfacState,
    batch: Factors | BatchStacks | None,
) -> KfacState:
    """Update the averages and preconditioners that this device holds.

    Args:
      comm: how blocks are distributed over devices, and the communication between the devices.
      state: the state before, with the blocks that this device holds.
      batch: the statistics of a batch: this device's `Factors`, or `BatchStacks` that are already averaged over
        devices. None refreshes all preconditioners from the present averages.

    Returns:
      The state with new averages and preconditioners.

    Raises:
      ValueError: the state is for another number of devices, it does not hold the blocks that this device owns, or the
        factors differ along axes of devices that `axis_name=` does not name.
    """
    check_blocks(state, comm.devices)
    context = StepContext(state.settings, comm, state)
    left_out: Vectors = {}
    failed: Vectors = {}
    refreshed = jnp.zeros((), bool)
    if batch is None:
        refreshed = state.last_statistics_step >= 0
        state, failed = refresh_preconditioners(comm, state, jnp.ones((), bool))
    else:
        if isinstance(batch, Factors):
            comm.check("factors", batch)
            batch = average_over_devices(context, batch)
        state, left_out = update_ema(context, batch)
        if state.settings.refreshes:
            # `optax.contrib.sam` turns the state's flags into integers.
            refreshed = state.refresh_due.astype(bool)
            state, failed = refresh_preconditioners(comm, state, refreshed)
        # A copy: outside `jit` both would be one buffer, which a step that donates its state may not receive twice.
        last = jnp.array(state.count)
        state = state._replace(last_statistics_step=last, due=jnp.zeros((), bool))
    counts = [jnp.sum(join(flags.values())) for flags in (left_out, failed)]
    skipped, failures = comm.total(jnp.stack(counts).astype(jnp.int32))
    # A block without a preconditioner keeps its gradient. So the first refresh counts only once all blocks took part,
    # otherwise a block with broken statistics would wait for a whole interval.
    refreshed &= (state.refreshed >= 0) | (skipped + failures == 0)
    metrics = state.metrics._replace(
        skipped_statistics=state.metrics.skipped_statistics + skipped,
        failed_inversions=state.metrics.failed_inversions + failures,
    )
    return state._replace(
        refreshed=jnp.where(refreshed, state.count, state.refreshed), metrics=metrics
    )


def average_over_devices(context: StepContext, factors: Factors) -> BatchStacks:
    """Return the statistics of the blocks that this device holds, stacked and averaged over devices."""
    comm = context.comm
    stacks = stack_statistics(context, factors, comm.mean)
    # Kronecker factors have a message of their own, because they may be sent in bfloat16.
    packed = {n: x for n, x in stacks.items() if isinstance(x, Packed)}
    others = {n: x for n, x in stacks.items() if n not in packed}
    if context.settings.distribution.communication_dtype == "bfloat16":
        packed = optax.tree.cast(packed, jnp.bfloat16)
    assignments = context.assignments
    return comm.means(packed, assignments) | comm.means(others, assignments)


def stack_statistics(
    context: StepContext,
    factors: Factors,
    mean: Average | None = None,
) -> BatchStacks:
    """Stack the statistics of all blocks, and the gradients of blocks with gradient factors.

    On several devices, Kronecker factors are packed.

    The factors of `Tied` statistics are not linear in their traces, nor the factors of `Ragged` statistics in their row
    counts. So `mean`, if given, averages traces and row counts over devices first. The mean of the result over devices
    then equals the statistics that a single device computes from the whole batch.
    """
    settings = context.settings
    alone = context.comm.alone
    stacks: BatchStacks = {}
    for group in settings.groups:
        if not group.captured:
            stacks |= context.stack(factors.gradients, [group])
            continue
        packs = group.kronecker and not alone
        sent = {}
        for layer in group.layers:
            block: Any = factors[layer.name]
            if group.padded or alone:
                block = group.with_padding(block.combined(mean))
            if packs:
                shapes = group.shapes if group.padded else layer.side_shapes
                if not isinstance(block, Packed):
                    block = block.combined(mean).packed(tuple(shapes.values()))
                block = to_send(layer, block)
            sent[layer.name] = block
        moments = group.moments(settings.preconditioner)
        if moments is not None and packs:
            moments = pad_to_devices(jnp.zeros((1, math.prod(moments)))).shape
        stack: Any = group.stack_factors(Factors(sent), moments)
        if packs:
            stack = Packed(stack, tuple(group.shapes.values()))
        stacks[group.name] = stack
    return stacks


def update_ema(context: StepContext, stacks: BatchStacks) -> tuple[KfacState, Vectors]:
    """Update the running averages with the statistics of a batch, except for blocks with non-finite statistics.

    Args:
      context: the blocks that this device holds.
      stacks: the statistics of these blocks, averaged over devices.

    Returns:
      The new state, and for each group a mask `[k]` of this device's own blocks that ignored their statistics.
    """
    settings = context.settings
    comm = context.comm
    state = context.state
    # The decay is per step, so averages from `age` steps ago decay `age` times.
    age = jnp.maximum(state.count - state.last_statistics_step, 1)
    steps = jnp.where(state.last_statistics_step < 0, 1, age)
    decay = state.factor_ema_decay.astype(jnp.result_type(float)) ** steps
    left_out = {}
    for group in settings.groups:
        name = group.name
        block = block_of(state, comm, name)
        statistics: Any
        if group.captured:
            statistics = stacks[name].unpacked()
        else:
            statistics = group.of_gradients(stacks[name])
        # Statistics also count as non-finite if their squares overflow. A batch with such large statistics would
        # dominate the average for hundreds of steps.
        flags = [finite(x * x) for x in jax.tree.leaves(statistics)]
        good = jnp.all(jnp.stack(flags), axis=0)
        taken = good & context.owns[name]
        left_out[name] = ~good & context.owns[name]
        if statistics.moments is not None:
            corrected = context.take(name, jnp.asarray(group.corrected))
            # Before the first decomposition there is no eigenbasis in which moments could be kept.
            corrected &= block.ready
            preconditioner = settings.preconditioner.update_moments(
                block.preconditioner,
                statistics.moments,
                decay,
                taken & corrected,
            )
            state = with_parts(state, comm, name, preconditioner=preconditioner)
            statistics = dataclasses.replace(statistics, moments=None)
        # Gradient factors are divided by roots of their trace, so undo this before averaging.
        old = group.scaled(block.factors, back=True)
        averages, weight = averaged(old, block.weight, statistics, decay, taken)
        averages = group.scaled(averages)
        state = with_parts(state, comm, name, factors=averages, weight=weight)
    return state, left_out


def refresh_preconditioners(
    comm: CommContext,
    state: KfacState,
    needed: Array,
) -> tuple[KfacState, Vectors]:
    """Refresh the preconditioners of this device's blocks that have statistics.

    XLA updates the stacks in place.

    Args:
      comm: how blocks are distributed over devices, and the communication between the devices.
      state: the state before.
      needed: a scalar flag that says whether to refresh, equal on all devices.

    Returns:
      The new state, and for each group a mask `[k]` of the blocks whose refresh failed.
    """

    # A loop with at most one iteration. For a conditional, XLA would copy all arrays that may change, here all
    # preconditioners in every step. It does not copy the arrays that a loop changes. In a step without changes, the
    # host reads one predicate for a loop as well as for a conditional.
    def once(now):
        needed, new, _ = now
        failed = {}
        for group in new.settings.groups:
            new, failed[group.name] = refresh_group(comm, group, new)
        return needed & False, new, failed

    # No weight is negative. The comparison varies over the same devices as the result.
    none_failed = {name: block.weight < 0 for name, block in state.blocks.items()}
    start = needed, state, none_failed
    _, state, failed = lax.while_loop(lambda now: now[0], once, start)
    return state, failed


def refresh_group(
    comm: CommContext,
    group: Group,
    state: KfacState,
) -> tuple[KfacState, Array]:
    """Refresh the preconditioners of a group.

    Args:
      comm: how blocks are distributed over devices, and the communication between the devices.
      group: the group.
      state: the state before.

    Returns:
      The new state, and a mask `[k]` of the blocks whose refresh failed.
    """
    name = group.name
    block = block_of(state, comm, name)
    assignment = state.settings.assignments[name]
    wanted = (block.weight > 0) & comm.owns(assignment)
    preconditioner = group.preconditioner_of(state.settings.preconditioner)
    damping = state.observe_damping
    if not group.kronecker:
        damping = damping * state.unitwise_damping_scale
    factors = block.factors
    if group.padded and preconditioner.padding is not None:
        sizes = comm.take(group.sizes(), assignment)
        factors = group.filled(factors, sizes, preconditioner.padding)
    result = refresh(preconditioner, block.preconditioner, factors, wanted, damping)
    state = with_parts(
        state,
        comm,
        name,
        preconditioner=result.preconditioner,
        condition=jnp.where(result.valid, result.condition, block.condition),
        inverted=jnp.where(result.valid, state.count, block.inverted),
    )
    return state, wanted & ~result.valid
