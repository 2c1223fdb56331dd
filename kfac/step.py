"""One step of the preconditioner on one device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from kfac.assignment import Shard, group_costs, make_phases, packed_size
from kfac.blocks import Group, apply_inverse
from kfac.collectives import (
    as_varying,
    axis_size,
    gather_from_owners,
    mean_over,
    mean_to_owners,
    own_range,
    owns_last,
    take_own,
    varying_axes,
)
from kfac.inverse import refresh_kronecker, refresh_unitwise
from kfac.layers import Block, Factors, Kronecker, Unitwise
from kfac.state import BlockState, Config, KfacMetrics, KfacState, Owned, Replica, match_leaves, rebuild


class Now(NamedTuple):
    """The scalars of one step."""

    damping: jax.Array
    unitwise: jax.Array
    decay: jax.Array
    period: jax.Array
    warmup: jax.Array


def preconditioned_step(
    config: Config, updates: Any, state: KfacState, now: Now, factors: Factors | None, *, local: bool
) -> tuple[Any, KfacState]:
    """One step on one device; `local` statistics are still to be averaged over devices."""
    axis = config.axis_name
    devices = axis_size(axis)
    if axis is not None and devices is None:
        raise ValueError(
            f"axis_name={axis!r} is not bound: call update inside jax.pmap or jax.shard_map over that axis, or pass mesh="
        )
    _check_devices(state, devices or 1)
    leaves = match_leaves(config.layers, updates, "updates")
    matrices = {group.name: group.stack_matrices(leaves, _dtype(state, group)) for group in config.groups}
    usable = _all_finite([*matrices.values(), *(leaf for path, leaf in leaves.items() if path in config.skipped)])
    if axis is not None:
        # The same decision everywhere, whatever one device has seen: what follows holds collectives.
        usable = lax.pmin(usable.astype(jnp.int32), axis) > 0
    if factors is not None:
        # Inversions begin when all gradients are there: on small machines XLA's CPU schedule can deadlock between the
        # convolutions that gradients come from and LAPACK calls.
        factors, _ = lax.optimization_barrier((factors, as_varying(usable, varying_axes(factors))))
    count = state.count
    changed = (now.damping != state.damping) | (now.unitwise != state.unitwise_damping) | (factors is not None)
    last_change = jnp.where(usable & changed, count, state.changed)
    everything = now.warmup & (factors is not None)
    cycle = usable & (count - last_change < now.period)
    due = usable & (everything | (cycle & ((count % now.period == 0) | (config.phases > 1))))

    owned, shared, replicas = {}, {}, {}
    skipped, failed = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
    preconditioned: dict[str, jax.Array] = {}
    schedule = make_phases(group_costs(config.groups), config.phases)
    for group in config.kronecker:
        name = group.name
        blocks, shard = state.owned[name].blocks, state.owned[name].shard
        mine = owns_last(shard, axis)
        if factors is not None:
            stacks = group.stack_factors(factors)
            batch = _mean_to_owners(config, stacks, group, shard) if local else take_own(stacks, shard, axis)
            blocks, bad = _accumulate(blocks, batch, now.decay, usable, mine)
            skipped += bad
        bounds = jnp.asarray(schedule[name], jnp.int32)
        phase = count % config.phases
        start = jnp.where(everything, 0, bounds[phase])
        stop = jnp.where(due, jnp.where(everything, shard.blocks, bounds[phase + 1]), start)
        blocks, bad = _refresh_range(blocks, *own_range(shard, axis, start, stop), now.damping)
        failed += bad
        owned[name] = Owned(blocks, shard)

        if name in state.replicas:
            replicas[name] = lax.cond(
                stop > start,
                lambda own, old, group=group, shard=shard: _gather_inverses(config, own, old, group, shard),
                lambda own, old: old,
                blocks,
                state.replicas[name],
            )
            preconditioned[name] = _apply(replicas[name].inverse, replicas[name].ready, matrices[name])
        else:
            own = _apply(blocks.inverse, blocks.condition > 0, take_own(matrices[name], shard, axis))
            preconditioned[name] = gather_from_owners(own, shard, axis)

    worst = [jnp.zeros((), jnp.float32)] + [_worst(own.blocks.condition, jnp.float32) for own in owned.values()]
    oldest = [jnp.zeros((), jnp.int32)] + [_worst(own.blocks.age, jnp.int32) for own in owned.values()]
    condition, age = jnp.max(jnp.stack(worst)), jnp.max(jnp.stack(oldest))
    if axis is not None and config.kronecker:
        skipped, failed = lax.psum((skipped, failed), axis)
        condition, age = lax.pmax((condition, age), axis)

    # A unit-wise block is cheap, so every device has them all; they are refreshed with the first phase of a cycle.
    due = usable & (everything | (cycle & (count % now.period == 0)))
    for group in config.unitwise:
        name, blocks = group.name, state.shared[group.name]
        if factors is not None:
            batch = group.stack_factors(factors)
            batch = mean_over(batch, axis) if local else batch
            blocks, bad = _accumulate(blocks, batch, now.decay, usable, jnp.ones(group.size, bool))
            skipped += bad
        blocks, bad = _refresh_unitwise(blocks, due, now.unitwise)
        failed += bad
        shared[name] = blocks
        preconditioned[name] = _apply(blocks.inverse, blocks.condition > 0, matrices[name])
        condition = jnp.maximum(condition, _worst(blocks.condition, jnp.float32))
        age = jnp.maximum(age, _worst(blocks.age, jnp.int32))

    new = {path: leaf for group in config.groups for path, leaf in group.split_matrices(preconditioned[group.name]).items()}
    result = {path: new[path].astype(leaf.dtype) for path, leaf in leaves.items() if path in new}
    usable &= _all_finite(preconditioned.values())
    metrics = KfacMetrics(
        gradient_norm=_norm(matrices.values()),
        preconditioned_norm=_norm(preconditioned.values()),
        condition=condition,
        inverse_age=age,
        skipped_statistics=state.metrics.skipped_statistics + skipped,
        failed_inversions=state.metrics.failed_inversions + failed,
        skipped_steps=state.metrics.skipped_steps + ~usable,
    )
    count = jnp.where(usable, optax.safe_increment(count), count)
    damping = jnp.where(usable, now.damping, state.damping), jnp.where(usable, now.unitwise, state.unitwise_damping)
    state = KfacState(count, last_change, *damping, owned, shared, replicas, metrics)
    return rebuild(updates, leaves | result), state


def _all_finite(arrays: Iterable[jax.Array]) -> jax.Array:
    return jnp.all(jnp.stack([jnp.array(True), *(jnp.all(jnp.isfinite(x)) for x in arrays)]))


def _dtype(state: KfacState, group: Group) -> Any:
    blocks = state.owned[group.name].blocks if group.kronecker else state.shared[group.name]
    return blocks.weight.dtype


def _check_devices(state: KfacState, devices: int) -> None:
    for owned in state.owned.values():
        if owned.shard.devices != devices:
            raise ValueError(
                f"the optimizer state is one for {owned.shard.devices} device(s), but update runs on {devices}. Initialise "
                "it where the axis is bound, e.g. jax.pmap(tx.init, axis_name=...)(params); a state from another number of "
                "devices is converted by kfac.gather_state and kfac.scatter_state."
            )


def per_block(values: jax.Array, like: jax.Array) -> jax.Array:
    return values.reshape(-1, *(1,) * (like.ndim - 1))


def _worst(values: jax.Array, dtype: Any) -> jax.Array:
    return jnp.max(values, initial=0).astype(dtype)


def _norm(arrays: Iterable[jax.Array]) -> jax.Array:
    total = sum((jnp.sum(jnp.square(x.astype(jnp.float32))) for x in arrays), jnp.zeros((), jnp.float32))
    return jnp.sqrt(total)


def _mean_to_owners(config: Config, stacks: Block, group: Group, shard: Shard) -> Kronecker:
    """Means over devices of a group's statistics, in one message."""
    assert isinstance(stacks, Kronecker)
    if config.axis_name is None:
        return stacks
    dtype = stacks.A.dtype
    sent = jnp.concatenate([config.encode(stacks.A), config.encode(stacks.G)], axis=1).astype(config.wire_dtype)
    received = mean_to_owners(sent, shard, config.axis_name).astype(dtype)
    cut = packed_size(group.d_in, config.triangular)
    return Kronecker(config.decode(received[:, :cut], group.d_in), config.decode(received[:, cut:], group.d_out))


def _gather_inverses(config: Config, own: BlockState, old: Replica, group: Group, shard: Shard) -> Replica:
    assert isinstance(own.inverse, Kronecker)
    del old
    sent = jnp.concatenate([config.encode(own.inverse.A), config.encode(own.inverse.G)], axis=1)
    received = gather_from_owners(sent, shard, config.axis_name)
    cut = packed_size(group.d_in, config.triangular)
    inverse = Kronecker(config.decode(received[:, :cut], group.d_in), config.decode(received[:, cut:], group.d_out))
    ready = gather_from_owners((own.condition > 0).astype(jnp.int32), shard, config.axis_name)
    return Replica(inverse, ready > 0)


def _accumulate(
    blocks: BlockState, batch: Block, decay: jax.Array, usable: jax.Array, mine: jax.Array
) -> tuple[BlockState, jax.Array]:
    """Running averages with this step's statistics, and how many blocks left them out because they are not finite."""
    finite = jnp.ones(mine.shape, bool)
    for stack in jax.tree.leaves(batch):
        finite &= jnp.all(jnp.isfinite(stack), axis=tuple(range(1, stack.ndim)))
    taken = finite & mine & usable
    decay = decay.astype(blocks.weight.dtype)
    total = decay * blocks.weight + (1 - decay)
    # A decay of 1, which only a schedule can bring, waits for later statistics.
    share = jnp.where(taken & (total > 0), (1 - decay) / total, 0)

    def average(old, new):
        new = jnp.where(per_block(taken, new), new.astype(old.dtype), 0)
        return (1 - per_block(share, old)) * old + per_block(share, old) * new

    factors = jax.tree.map(average, blocks.factors, batch)
    weight = jnp.where(taken, total, blocks.weight)
    return blocks._replace(factors=factors, weight=weight), jnp.sum(~finite & mine, dtype=jnp.int32)


def _refresh_range(
    blocks: BlockState, start: jax.Array, stop: jax.Array, damping: jax.Array
) -> tuple[BlockState, jax.Array]:
    """New inverses at positions `start` up to `stop`, one at a time, in place; and how many failed."""
    assert isinstance(blocks.factors, Kronecker) and isinstance(blocks.inverse, Kronecker)
    aged = jnp.where(blocks.weight > 0, blocks.age + 1, 0)

    def one(position, carry):
        inverse, condition, age, failed = carry

        def at(stack):
            return lax.dynamic_slice_in_dim(stack, position, 1)

        new = refresh_kronecker(jax.tree.map(at, blocks.factors), jax.tree.map(at, inverse), damping)
        known = at(blocks.weight) > 0
        taken = new.valid & known

        def put(stack, fresh):
            fresh = jnp.where(per_block(taken, fresh), fresh, at(stack))
            return lax.dynamic_update_slice_in_dim(stack, fresh, position, 0)

        inverse = jax.tree.map(put, inverse, new.inverse)
        return (
            inverse,
            put(condition, new.condition.astype(condition.dtype)),
            put(age, jnp.zeros_like(at(age))),
            failed + jnp.sum(known & ~new.valid, dtype=jnp.int32),
        )

    carry = (blocks.inverse, blocks.condition, aged, jnp.zeros((), jnp.int32))
    carry = as_varying(carry, varying_axes((blocks, start, stop, damping)))
    inverse, condition, age, failed = lax.fori_loop(start, stop, one, carry)
    return blocks._replace(inverse=inverse, condition=condition, age=age), failed


def _refresh_unitwise(blocks: BlockState, due: jax.Array, damping: jax.Array) -> tuple[BlockState, jax.Array]:
    """New inverses of unit-wise blocks if `due`, and how many failed."""
    assert isinstance(blocks.factors, Unitwise) and isinstance(blocks.inverse, Unitwise)
    new = refresh_unitwise(blocks.factors, blocks.inverse, damping)
    known = blocks.weight > 0
    taken = new.valid & known & due
    inverse = jnp.where(per_block(taken, new.inverse.F), new.inverse.F, blocks.inverse.F)
    return blocks._replace(
        inverse=Unitwise(inverse),
        condition=jnp.where(taken, new.condition, blocks.condition),
        age=jnp.where(taken | ~known, 0, blocks.age + 1),
    ), jnp.sum(known & ~new.valid & due, dtype=jnp.int32)


def _apply(inverse: Block, ready: jax.Array, matrices: jax.Array) -> jax.Array:
    """Preconditioned gradients `[k, d_out, d_in]`; as they are where a block has no inverse yet."""
    return jnp.where(per_block(ready, matrices), apply_inverse(inverse, matrices), matrices)


