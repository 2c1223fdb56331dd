"""`observe` on one device: update running averages with statistics, and refresh inverses from the averages."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kfac._curvature.blocks import Group
from kfac._curvature.inverse import averaged, finite
from kfac._curvature.refresh import once_if, refresh
from kfac._distributed.ways import Way
from kfac._factors import Factors, Statistics
from kfac._layers import Layer
from kfac._optimizer.place import Config, Place, Vectors, join
from kfac._optimizer.segment import part_of, with_parts
from kfac._optimizer.state import KfacState, check_devices, check_positions, shards_of
from kfac._packing import filled, flatten, unflatten
from kfac._varying import as_varying, device_axes, varying_axes


class Stacks(NamedTuple):
    """The statistics of a batch, in a stack for each group.

    Attributes:
      statistics: the captured statistics by group name, arrays `[k, ...]`.
      gradients: the gradients of groups with gradient factors by group name, as matrices `[k, d_in, d_out]`.
    """

    statistics: Mapping[str, Statistics]
    gradients: Vectors


def observe_here(
    config: Config, state: KfacState, statistics: Factors | Stacks | None
) -> KfacState:
    """Observe on one device.

    Args:
      config: the fixed settings.
      state: the state before, with the blocks that this device holds.
      statistics: this device's `Factors`, or `Stacks` that are already averaged over devices. None refreshes all
        inverses from the present averages.

    Returns:
      The state with new averages and inverses.

    Raises:
      ValueError: the state is for another number of devices, it does not hold the blocks that this device owns, or the
        factors differ along axes of devices that `axis_name=` does not name.
    """
    way = config.way
    check_devices(state, way.devices)
    for owned in state.owned.values():
        check_positions(owned)
    place = Place(config, shards_of(state))
    left_out: Vectors = {}
    failed: Vectors = {}
    if statistics is None:
        state, failed = refresh_inverses(way, state)
        state = state._replace(refreshed=state.count)
    else:
        if isinstance(statistics, Factors):
            way.check("factors", statistics)
            statistics = average_over_devices(place, state, statistics)
        state, left_out = take_in(place, state, statistics)
        if state.settings.refreshes:
            due = state.refresh_due.astype(
                bool
            )  # `optax.contrib.sam` turns the state's flags into integers
            state, failed = refresh_inverses(way, state, due)
            state = state._replace(
                refreshed=jnp.where(due, state.count, state.refreshed)
            )
        state = state._replace(measured=state.count, due=jnp.zeros((), bool))
    skipped, failures = way.total(
        jnp.stack([count_blocks(way, state, flags) for flags in (left_out, failed)])
    )
    metrics = state.metrics._replace(
        skipped_statistics=state.metrics.skipped_statistics + skipped,
        failed_inversions=state.metrics.failed_inversions + failures,
    )
    return state._replace(metrics=metrics)


def average_over_devices(place: Place, state: KfacState, factors: Factors) -> Stacks:
    """Return the statistics of the blocks that this device holds, stacked and averaged over devices."""
    config, way = place.config, place.config.way
    gradients = stack_gradients(config, state, factors)
    if not way.alone:
        statistics = way.statistics(
            stack_packed(config, factors, way.mean), place.shards
        )
        return Stacks(
            statistics,
            way.means(
                gradients, {n: x for n, x in place.shards.items() if n in gradients}
            ),
        )
    whole = Factors({name: block.combined() for name, block in factors.items()})
    stacks = {
        g.name: g.stack_factors(whole, g.moments(config.inverse))
        for g in config.groups
        if g.captured
    }
    return Stacks(stacks, gradients)


def stack_gradients(config: Config, state: KfacState, factors: Factors) -> Vectors:
    """Stack the gradients of all blocks with gradient factors, by group: `[k, d_in, d_out]`."""
    groups = [group for group in config.groups if not group.captured]
    return {
        g.name: g.stack_matrices(factors.gradients, state.blocks[g.name].weight.dtype)
        for g in groups
    }


def stack_packed(
    config: Config, factors: Factors, mean: Callable[[Any], Any] | None = None
) -> dict[str, Statistics]:
    """Stack the packed statistics of all blocks, `[k, ...]`, for each group with captured statistics.

    The factors of `Tied` statistics are not linear in their traces, nor the factors of `Ragged` statistics in their row
    counts. So `mean`, if given, averages traces and row counts over devices first. The mean of the result over devices
    then equals the statistics that a single device computes from the whole batch.
    """
    # All blocks share a message, so if some blocks are in bfloat16, the others are cast to it.
    dtype = (
        jnp.bfloat16
        if any(block.wire == jnp.bfloat16 for block in factors.values())
        else None
    )
    fill = (
        (lambda flat: flat) if device_axes() else filled
    )  # over a mesh all vectors are padded

    def to_send(group: Group, layer: Layer) -> Any:
        packed = factors[layer.name].packed(
            tuple(layer.side_shapes.values()), mean, dtype
        )
        return group.block.to_send(layer, packed, fill)

    stacks: dict[str, Any] = {}
    for group in [group for group in config.groups if group.captured]:
        moments = group.moments(config.inverse)
        moments = None if moments is None else fill(jnp.zeros(math.prod(moments))).shape
        stack = group.stack_factors(
            Factors({x.name: to_send(group, x) for x in group.layers}), moments
        )
        stacks[group.name] = group.block.sent(group.shapes, stack)
    return stacks


def take_in(
    place: Place, state: KfacState, stacks: Stacks
) -> tuple[KfacState, Vectors]:
    """Update the running averages with the statistics of a batch, except for blocks with non-finite statistics.

    Args:
      place: the blocks that this device holds.
      state: the state before.
      stacks: the statistics of these blocks, averaged over devices.

    Returns:
      The new state, and for each group a mask `[k]` of this device's own blocks that ignored their statistics.
    """
    config, way, left_out = place.config, place.config.way, {}
    batch: dict[str, Any] = {
        name: stack.unpacked() for name, stack in stacks.statistics.items()
    }
    for group in config.groups:
        if not group.captured:
            batch[group.name] = group.block.of_gradients(
                group.shapes, stacks.gradients[group.name]
            )
    steps = jnp.where(
        state.measured < 0, 1, jnp.maximum(state.count - state.measured, 1)
    )
    decay = state.factor_decay.astype(jnp.result_type(float)) ** steps
    for group in config.groups:
        name, block, statistics = (
            group.name,
            state.blocks[group.name],
            batch[group.name],
        )
        # Statistics also count as non-finite if their squares overflow. A batch with such large statistics would
        # dominate the average for hundreds of steps.
        good = jnp.all(
            jnp.stack([finite(x * x) for x in jax.tree.leaves(statistics)]), axis=0
        )
        taken, left_out[name] = good & place.owns[name], ~good & place.owns[name]
        if statistics.moments is not None:
            # Before the first decomposition there is no eigenbasis in which moments could be kept.
            corrected = way.take({name: jnp.asarray(group.corrected)}, place.shards)[
                name
            ] & (block.condition > 0)
            inverse_state = part_of(state, way, name, "inverse")
            inverse = config.inverse.absorb(
                inverse_state, statistics.moments, decay, taken & corrected
            )
            state = with_parts(state, way, name, inverse=inverse)
            statistics = dataclasses.replace(statistics, moments=None)
        old = group.scaled(part_of(state, way, name, "factors"), back=True)
        average, weight = averaged(old, block.weight, statistics, decay, taken)
        state = with_parts(
            state, way, name, factors=group.scaled(average), weight=weight
        )
    return state, left_out


def refresh_inverses(
    way: Way, state: KfacState, needed: jax.Array | None = None
) -> tuple[KfacState, Vectors]:
    """Refresh the inverses of this device's blocks that have statistics, and the bases that all devices hold.

    XLA updates the stacks in place.

    Args:
      way: how blocks lie on devices.
      state: the state before.
      needed: a scalar flag that says whether to refresh, equal on all devices. None means True.

    Returns:
      The new state, and for each group a mask `[k]` of the blocks whose inversion failed.
    """
    wanted = {name: block.weight > 0 for name, block in state.blocks.items()}
    wanted |= {
        name: wanted[name] & way.owns(shard) for name, shard in shards_of(state).items()
    }
    wanted = (
        wanted
        if needed is None
        else {name: flags & needed for name, flags in wanted.items()}
    )
    nothing = {
        name: as_varying(jnp.zeros(flags.shape, bool), varying_axes(flags))
        for name, flags in wanted.items()
    }

    def refreshed(old: tuple[KfacState, Vectors]) -> tuple[KfacState, Vectors]:
        new, failed = old
        for name, block in state.blocks.items():
            inverse_state, owned = (
                part_of(new, way, name, "inverse"),
                state.owned.get(name),
            )
            kind = inverse_state.inverse if owned is None else state.settings.inverse
            damping = state.observe_damping * (
                state.unitwise_damping if owned is None else 1
            )
            result = refresh(
                kind,
                inverse_state,
                part_of(new, way, name, "factors"),
                wanted[name],
                damping,
            )
            condition = jnp.where(result.valid, result.condition, block.condition)
            inverted = jnp.where(result.valid, state.count, block.inverted)
            new = with_parts(
                new,
                way,
                name,
                inverse=result.inverse,
                condition=condition,
                inverted=inverted,
            )
            failed = failed | {name: wanted[name] & ~result.valid}
        # Gather the bases from their owners to all devices.
        sent = {
            n: flatten(state.settings.inverse.basis(part_of(new, way, n, "inverse")))
            for n in new.bases
        }
        received = way.gather(sent, shards_of(state))
        bases = {
            name: unflatten(flat, new.bases[name]) for name, flat in received.items()
        }
        return new._replace(bases=bases), failed

    return (
        refreshed((state, nothing))
        if needed is None
        else once_if(needed, refreshed, (state, nothing))
    )


def count_blocks(way: Way, state: KfacState, flags: Vectors) -> jax.Array:
    """Count the flagged blocks of this device. Only the first device counts the blocks that all devices hold."""
    first = jnp.asarray(lax.axis_index(way.owners) == 0)
    return jnp.sum(
        join(x if name in state.owned else x & first for name, x in flags.items()),
        dtype=jnp.int32,
    )
