"""The middle of a step: statistics go into running averages, and these into inverses."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from kfac._curvature.blocks import Group
from kfac._curvature.inverse import averaged, finite
from kfac._curvature.refresh import once_if, refresh
from kfac._distributed.ways import Way
from kfac._factors import Factors, Statistics
from kfac._layers import Layer
from kfac._optimizer.place import Config, Place, Vectors
from kfac._optimizer.segment import part_of, with_parts
from kfac._optimizer.state import KfacState, shards_of
from kfac._packing import filled, flatten, unflatten
from kfac._varying import as_varying, device_axes, varying_axes


def average_statistics(place: Place, factors: Factors) -> dict[str, Statistics]:
    """This step's statistics of the blocks that this device keeps, averaged over devices."""
    config, way = place.config, place.config.way
    if not way.alone:
        return way.statistics(stack_packed(config, factors, way.mean), place.shards)
    whole = Factors({name: block.combined() for name, block in factors.items()})
    return {g.name: g.stack_factors(whole, g.moments(config.inverse)) for g in config.groups if g.captured}


def stack_packed(config: Config, factors: Factors, mean: Callable[[Any], Any] | None = None) -> dict[str, Statistics]:
    """The statistics of all blocks `[k, ...]`, packed.

    Those of tied and ragged kernels are no averages, but made of some. The `mean` takes these over devices first, so
    that the statistics are those of one device.
    """
    # As the others, with which they share a message.
    dtype = jnp.bfloat16 if any(block.wire == jnp.bfloat16 for block in factors.values()) else None
    fill = (lambda flat: flat) if device_axes() else filled  # over a mesh all are

    def to_send(group: Group, layer: Layer) -> Any:
        packed = factors[layer.name].packed(tuple(layer.side_shapes.values()), mean, dtype)
        return group.block.to_send(layer, packed, fill)

    stacks: dict[str, Any] = {}
    for group in [group for group in config.groups if group.captured]:
        moments = group.moments(config.inverse)
        moments = None if moments is None else fill(jnp.zeros(math.prod(moments))).shape
        stack = group.stack_factors(Factors({x.name: to_send(group, x) for x in group.layers}), moments)
        stacks[group.name] = group.block.sent(group.shapes, stack)
    return stacks


def take_in(place: Place, state: KfacState, batch: dict[str, Any], usable: jax.Array) -> tuple[KfacState, Vectors]:
    """Takes this step's statistics into the running averages; a block whose statistics are not finite leaves them out.

    Args:
      place: where the step is.
      state: that before the step.
      batch: the statistics of the step, averaged over devices, of the blocks that this device keeps: `[k, ...]`.
      usable: whether the gradients are finite, on all devices.

    Returns:
      The state, and which blocks left theirs out.
    """
    config, way, left_out = place.config, place.config.way, {}
    steps = jnp.where(state.measured < 0, 1, jnp.maximum(state.count - state.measured, 1))
    decay = place.now.decay.astype(jnp.result_type(float)) ** steps
    for group in config.groups:
        name, block, statistics = group.name, state.blocks[group.name], batch[group.name]
        # So large that squares are not finite, one batch would fill the average for hundreds of steps.
        good = jnp.all(jnp.stack([finite(x * x) for x in jax.tree.leaves(statistics)]), axis=0)
        taken, left_out[name] = good & place.owns[name] & usable, ~good & place.owns[name]
        if statistics.moments is not None:
            # Those before the first decomposition are in no basis that is kept.
            corrected = way.take({name: jnp.asarray(group.corrected)}, place.shards)[name] & (block.condition > 0)
            inverse_state = part_of(state, way, name, "inverse")
            inverse = config.inverse.absorb(inverse_state, statistics.moments, decay, taken & corrected)
            state = with_parts(state, way, name, inverse=inverse)
            statistics = dataclasses.replace(statistics, moments=None)
        old = group.scaled(part_of(state, way, name, "factors"), back=True)
        average, weight = averaged(old, block.weight, statistics, decay, taken)
        state = with_parts(state, way, name, factors=group.scaled(average), weight=weight)
    return state, left_out


def refresh_inverses(
    way: Way, state: KfacState, dampings: tuple[jax.Array, jax.Array], needed: jax.Array | None = None
) -> tuple[KfacState, Vectors]:
    """Refreshes the inverses of a device's blocks that have statistics, and the bases that all have.

    XLA changes stacks in their place, once all gradients are known.

    Args:
      way: how blocks lie on devices.
      state: that before.
      dampings: that of Kronecker blocks, and that of the others.
      needed: whether to do anything, on which devices agree; None: do it.

    Returns:
      The state, and which blocks failed.
    """
    wanted = {name: block.weight > 0 for name, block in state.blocks.items()}
    wanted |= {name: wanted[name] & way.owns(shard) for name, shard in shards_of(state).items()}
    wanted = wanted if needed is None else {name: flags & needed for name, flags in wanted.items()}
    nothing = {name: as_varying(jnp.zeros(flags.shape, bool), varying_axes(flags)) for name, flags in wanted.items()}

    def refreshed(old: tuple[KfacState, Vectors]) -> tuple[KfacState, Vectors]:
        new, failed = old
        for name, block in state.blocks.items():
            inverse_state, owned = part_of(new, way, name, "inverse"), state.owned.get(name)
            kind, damping = (inverse_state.inverse, dampings[1]) if owned is None else (owned.inverse, dampings[0])
            result = refresh(kind, inverse_state, part_of(new, way, name, "factors"), wanted[name], damping)
            condition = jnp.where(result.valid, result.condition, block.condition)
            inverted = jnp.where(result.valid, state.count, block.inverted)
            new = with_parts(new, way, name, inverse=result.inverse, condition=condition, inverted=inverted)
            failed = failed | {name: wanted[name] & ~result.valid}
        # What all devices have of the inverses, from their owners.
        sent = {n: flatten(new.owned[n].inverse.basis(part_of(new, way, n, "inverse"))) for n in new.bases}
        received = way.gather(sent, shards_of(state))
        bases = {name: unflatten(flat, new.bases[name]) for name, flat in received.items()}
        return new._replace(bases=bases), failed

    return refreshed((state, nothing)) if needed is None else once_if(needed, refreshed, (state, nothing))
