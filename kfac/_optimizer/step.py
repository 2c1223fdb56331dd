"""One step of the preconditioner on one device, as a list of stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from kfac._curvature.averages import averaged
from kfac._curvature.blocks import Group
from kfac._curvature.inverse import finite, per_block
from kfac._curvature.refresh import refresh
from kfac._curvature.symmetric import flatten_block, unflatten_block
from kfac._distributed.assignment import Shard
from kfac._distributed.collectives import gather_from_owners, means_to_owners, owns_last, take_own
from kfac._factors import Block, Coarse, Factors, Kronecker, Tied, Unitwise
from kfac._layers import leaves_by_path
from kfac._optimizer.state import BlockState, Config, KfacMetrics, KfacState, Owned, Replica, check_state, match_leaves
from kfac._varying import AxisName, as_varying, axis_size, varying_axes

Vectors = dict[str, jax.Array]  # for each group `[k]`, a number for each block


class Now(NamedTuple):
    """The scalars of one step."""

    damping: jax.Array
    unitwise: jax.Array
    decay: jax.Array
    period: jax.Array
    warmup: jax.Array


class Gradients(NamedTuple):
    """The gradients as they came, and as the blocks see them.

    Attributes:
      leaves: by path.
      matrices: of each group, `[k, d_out, d_in]`.
      square: their squared norm.
      usable: whether all are finite, on all devices.
    """

    leaves: dict[str, jax.Array]
    matrices: dict[str, jax.Array]
    square: jax.Array
    usable: jax.Array


class Due(NamedTuple):
    """What is to be done in a step, as agreed between devices.

    Attributes:
      changed: the last step that brought statistics or another damping.
      refresh: whether any block of any device may be refreshed.
      blocks: which of the blocks that a device holds are in turn.
    """

    changed: jax.Array
    refresh: jax.Array
    blocks: Vectors


class Taken(NamedTuple):
    """What came of the statistics of a step.

    Attributes:
      blocks: with these in their averages.
      left_out: which blocks left theirs out, as they are not finite.
      change: `||batch - average|| / ||average||`, summed over this device's Kronecker factors.
    """

    blocks: dict[str, BlockState]
    left_out: Vectors
    change: jax.Array


class Inverses(NamedTuple):
    """What came of a refresh: the blocks, what all devices have of them, and which blocks were wanted in vain."""

    blocks: dict[str, BlockState]
    replicas: dict[str, Replica]
    failed: Vectors


class Place(NamedTuple):
    """Where a step is: what is fixed, the scalars, and which blocks this device holds.

    Attributes:
      config: what is fixed.
      now: the scalars.
      shards: how Kronecker groups lie on devices.
      mine: of each group, `[positions]`: whether the block there is a device's own.
    """

    config: Config
    now: Now
    shards: dict[str, Shard]
    mine: Vectors


def preconditioned_step(
    config: Config, updates: Any, state: KfacState, now: Now, factors: Factors | None, *, local: bool
) -> tuple[Any, KfacState]:
    """One step on one device; `local` statistics are still to be averaged over devices."""
    check(config, state, updates, factors if local else None)
    place = locate(config, state, now)
    gradients = take_gradients(place, state, updates)
    due = decide(place, state, gradients.usable, statistics=factors is not None)
    taken = Taken(state.blocks, {}, jnp.zeros((), jnp.float32))
    if factors is not None:
        batch = average_statistics(place, factors, local=local)
        taken = take_in(place, state.blocks, batch, gradients.usable)
    inverses = refresh_inverses(place, taken.blocks, state.replicas, due, gradients.usable)
    preconditioned = precondition(place, inverses, gradients.matrices)
    leaves, square, usable = restore(config, gradients, preconditioned)
    state = count(place, state, due, taken if factors is not None else None, inverses, gradients.square, square, usable)
    paths = leaves_by_path(updates)
    return jax.tree.unflatten(jax.tree.structure(updates), [leaves[path] for path in paths]), state


def check(config: Config, state: KfacState, updates: Any, local: Factors | None) -> None:
    """Raises where the axis, the state, the gradients or local statistics are not what this step needs."""
    axis, devices = config.axis, axis_size(config.axis)
    if axis is not None and devices is None:
        raise ValueError(
            f"axis_name={axis!r} is not bound: call update inside jax.pmap or jax.shard_map over that axis, "
            "or pass mesh="
        )
    check_state(config, state, devices or 1)
    match_leaves(config.layers, updates, "updates")
    if axis is not None:
        _check_varying(axis, updates, local)


def _check_varying(axis: AxisName, updates: Any, factors: Factors | None) -> None:
    """Raises where `shard_map` knows that averages over devices are missing or would be."""
    differing = sorted(varying_axes(updates))
    if differing:
        raise ValueError(
            f"updates differ between the devices of {differing}: average the gradients first, "
            f"jax.lax.pmean(grads, {differing[0] if len(differing) == 1 else tuple(differing)!r})"
        )
    names = set(axis) if isinstance(axis, tuple) else {axis}
    missing = sorted(varying_axes(factors) - names) if factors is not None else []
    if missing:
        raise ValueError(
            f"factors differ between the devices of {missing}, which axis_name={axis!r} does not name: pass "
            f"axis_name={(*sorted(names), *missing)!r}"
        )


def locate(config: Config, state: KfacState, now: Now) -> Place:
    """Which blocks this device holds; all have those that are not Kronecker products."""
    shards = {name: own.shard for name, own in state.owned.items()}
    mine = {
        group.name: owns_last(shards[group.name], config.axis) if group.kronecker else jnp.ones(group.size, bool)
        for group in config.groups
    }
    return Place(config, now, shards, mine)


def take_gradients(place: Place, state: KfacState, updates: Any) -> Gradients:
    """The gradients as matrices, and whether this is a step at all."""
    config = place.config
    leaves, blocks = leaves_by_path(updates), state.blocks
    matrices = {group.name: group.stack_matrices(leaves, blocks[group.name].weight.dtype) for group in config.groups}
    square = _square(matrices.values())
    usable = _all_finite(square, (leaf for path, leaf in leaves.items() if path in config.skipped))
    if config.axis is not None:
        # The same decision everywhere, whatever one device has seen: what follows holds collectives.
        usable = lax.pmin(usable.astype(jnp.int32), config.axis) > 0
    return Gradients(leaves, matrices, square, usable)


def decide(place: Place, state: KfacState, usable: jax.Array, *, statistics: bool) -> Due:
    """Which blocks are in turn: in warmup all, after it those whose phase it is, if there was a change since."""
    config, now, step = place.config, place.now, state.count
    changed = (now.damping != state.damping) | (now.unitwise != state.unitwise_damping) | statistics
    last_change = jnp.where(usable & changed, step, state.changed)
    everything = usable & now.warmup & statistics
    cycle = usable & (step - last_change < now.period)
    # In a cycle with fewer phases than steps nothing is left for the last ones: theirs is a phase of no block.
    phase = jnp.minimum(step % now.period, config.phases)
    busy = np.isin(np.arange(config.phases + 1), np.concatenate([np.zeros(0, int), *config.turns.values()]))
    blocks = {}
    for name, turns in config.turns.items():
        own = take_own(jnp.asarray(turns), place.shards[name], config.axis) if name in place.shards else turns
        blocks[name] = everything | (cycle & (own == phase))
    return Due(last_change, everything | (cycle & jnp.asarray(busy)[phase]), blocks)


def average_statistics(place: Place, factors: Factors, *, local: bool) -> dict[str, Block]:
    """This step's statistics of the blocks that this device keeps, averaged over devices."""
    config, shards, axis = place.config, place.shards, place.config.axis
    factors = _of_whole_batch(factors, axis if local else None)
    stacks = {group.name: group.stack_factors(factors, moments=config.has_moments(group)) for group in config.groups}
    if axis is None:
        return stacks
    if not local:
        return {
            name: take_own(stack, shards[name], axis) if name in shards else stack for name, stack in stacks.items()
        }
    dtypes = {name: jax.tree.leaves(stack)[0].dtype for name, stack in stacks.items()}
    sent = {name: flatten_block(stack) for name, stack in stacks.items()}
    if config.distribution.communication_dtype != "float32":
        sent = {name: stack.astype(config.distribution.communication_dtype) for name, stack in sent.items()}
    received = means_to_owners(sent, shards, axis, dtypes)
    return {name: unflatten_block(received[name], stack) for name, stack in stacks.items()}


def _of_whole_batch(factors: Factors, axis: AxisName | None) -> Factors:
    """The factors with the blocks that are no averages formed from what is one, over all devices, as on one."""

    def formed(block):
        if isinstance(block, Tied):
            return block.combined(lambda traces: lax.pmean(traces, axis) if axis is not None else traces)
        if not isinstance(block, Coarse):
            return block
        if axis is None:
            return Unitwise(block.F)
        count = block.count * lax.axis_size(axis)
        return Unitwise(as_varying(Coarse(lax.pmean(block.mean, axis), count).F, varying_axes(block.mean)))

    return Factors({name: formed(block) for name, block in factors.items()})


def take_in(place: Place, blocks: dict[str, BlockState], batch: dict[str, Block], usable: jax.Array) -> Taken:
    """Running averages with this step's statistics; a block whose are not finite leaves them out."""
    config, mine, decay = place.config, place.mine, place.now.decay
    moments = {name: block.moments for name, block in batch.items() if isinstance(block, Kronecker)}
    batch = {n: dataclasses.replace(b, moments=None) if isinstance(b, Kronecker) else b for n, b in batch.items()}
    sizes = {name: _squares(blocks[name].factors) for name in batch}
    moved = {name: _squares(_differences(batch[name], blocks[name].factors)) for name in batch}
    good = {name: jnp.isfinite(sum(squares)) for name, squares in moved.items()}
    good |= {name: good[name] & finite(moment) for name, moment in moments.items() if moment is not None}
    taken = {name: good[name] & mine[name] & usable for name in batch}
    changes = [
        _relative(*pair, taken[name], mine[name])
        for name in place.shards
        for pair in zip(moved[name], sizes[name], strict=True)
    ]
    change = jnp.sum(_join(changes), dtype=jnp.float32)
    result = {}
    for group in config.groups:
        name, old = group.name, blocks[group.name]
        known = after(change, taken[name]) if group.kronecker else taken[name]
        kept = old.inverse
        if config.has_moments(group):
            # Those before the first decomposition are in no basis that is kept.
            own = take_own(jnp.asarray(group.corrected), place.shards[name], config.axis)
            kept = config.inverse.absorb(kept, moments[name], decay, known & own & (old.condition > 0))
        factors, weight = averaged(old.factors, old.weight, batch[name], decay, known)
        result[name] = old._replace(factors=factors, weight=weight, inverse=kept)
    return Taken(result, {name: ~good[name] & mine[name] for name in batch}, change)


def after(number: jax.Array, flags: jax.Array) -> jax.Array:
    """`flags`, but not before `number` is there, which is not negative.

    So what is written according to the flags waits for all that reads the old values to get the number, and can be
    written in their place. XLA takes away an optimization barrier here, and would then copy the old values.
    """
    return flags & ~(number < -1)


def refresh_inverses(
    place: Place, blocks: dict[str, BlockState], replicas: dict[str, Replica], due: Due, usable: jax.Array
) -> Inverses:
    """New inverses of the blocks that are due and have statistics, and of the replicas of them.

    All under one conditional, with a predicate that devices agree on: a step without a refresh does none of it, and a
    refresh begins when all gradients are known. XLA changes the stacks in their place.
    """
    config = place.config
    wanted = {name: due.blocks[name] & place.mine[name] & (blocks[name].weight > 0) for name in blocks}
    stacks = {name: (block.inverse, block.condition) for name, block in blocks.items()}
    none = {name: as_varying(jnp.zeros(flags.shape, bool), varying_axes(flags)) for name, flags in wanted.items()}

    def renewed(stacks, replicas):
        new, valid = {}, {}
        for group in config.groups:
            name, (kept, condition) = group.name, stacks[group.name]
            damping = place.now.damping if group.kronecker else place.now.unitwise
            result = refresh(group.kind(config.inverse), kept, blocks[name].factors, wanted[name], damping)
            new[name] = result.inverse, jnp.where(result.valid, result.condition, condition)
            valid[name] = result.valid
        return new, _fetched(place, replicas, new), valid

    def unchanged(stacks, replicas):
        return stacks, replicas, none

    stacks, replicas, valid = lax.cond(due.refresh, renewed, unchanged, stacks, replicas)
    result = {}
    for name, block in blocks.items():
        # Inverses left as they are get older, unless the step is not usable and so none.
        age = jnp.where(~valid[name] & (block.condition > 0), block.age + usable, 0)
        result[name] = block._replace(inverse=stacks[name][0], condition=stacks[name][1], age=age)
    return Inverses(result, replicas, {name: wanted[name] & ~valid[name] for name in blocks})


def _fetched(place: Place, replicas: dict[str, Replica], stacks: dict[str, Any]) -> dict[str, Replica]:
    """What all devices have of the inverses, from their owners in two messages."""
    config, axis = place.config, place.config.axis
    distribution, sent = config.distribution, {}
    for name in replicas:
        kept, condition = stacks[name]
        encoded = distribution.encode(config.inverse, distribution.shared(config.inverse, kept, several=True))
        sent[name] = jnp.concatenate([encoded, (condition > 0).astype(encoded.dtype)[:, None]], axis=1)
    received = gather_from_owners(sent, place.shards, axis) if axis is not None and sent else sent
    return {
        name: Replica(distribution.decode(config.inverse, flat[:, :-1], replicas[name].inverse), flat[:, -1] > 0)
        for name, flat in received.items()
    }


def precondition(place: Place, inverses: Inverses, matrices: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Preconditioned gradients of all groups: of one's own blocks and then gathered, or of all by every device."""
    config, axis = place.config, place.config.axis

    def apply(group: Group, kept: Any, ready: jax.Array, matrices: jax.Array) -> jax.Array:
        """Preconditioned gradients `[k, d_out, d_in]`; as they are where a block has no inverse yet."""
        applied = group.kind(config.inverse).apply(kept, matrices, place.now.damping)
        return jnp.where(per_block(ready, matrices), applied, matrices)

    result, own = {}, {}
    for group in config.groups:
        name, block = group.name, inverses.blocks[group.name]
        if group.kronecker and config.distribution.replicated:
            result[name] = apply(group, *inverses.replicas[name], matrices[name])
        elif group.kronecker and axis is not None:
            mine = take_own(matrices[name], place.shards[name], axis)
            own[name] = apply(group, block.inverse, block.condition > 0, mine)
        else:
            result[name] = apply(group, block.inverse, block.condition > 0, matrices[name])
    return result | (gather_from_owners(own, place.shards, axis) if axis is not None else {})


def restore(
    config: Config, gradients: Gradients, preconditioned: dict[str, jax.Array]
) -> tuple[dict[str, jax.Array], jax.Array, jax.Array]:
    """The preconditioned gradients as leaves in their dtypes, their squared norm, and whether all are finite."""
    new: dict[str, jax.Array] = {}
    for group in config.groups:
        new.update(group.split_matrices(preconditioned[group.name]))
    result = {p: new[p].astype(leaf.dtype) if p in new else leaf for p, leaf in gradients.leaves.items()}
    # What is finite as it was computed may be too large for a narrower dtype of the gradients.
    narrowed = [leaf for path, leaf in result.items() if path in new and leaf.dtype != new[path].dtype]
    square = _square(preconditioned.values())
    return result, square, gradients.usable & _all_finite(square, narrowed)


def count(
    place: Place,
    state: KfacState,
    due: Due,
    taken: Taken | None,
    inverses: Inverses,
    square: jax.Array,
    preconditioned_square: jax.Array,
    usable: jax.Array,
) -> KfacState:
    """The state after the step, with what devices have to tell each other of it."""
    config, now, blocks, metrics = place.config, place.now, inverses.blocks, state.metrics
    skipped = _number(config, taken.left_out if taken is not None else {})
    counts = jnp.stack([skipped, _number(config, inverses.failed), (~usable).astype(jnp.int32)])
    conditions, ages = (_join(getattr(b, part) for b in blocks.values()) for part in ("condition", "age"))
    extremes = jnp.stack([jnp.max(numbers).astype(jnp.float32) for numbers in (conditions, ages)])
    change = taken.change if taken is not None else None
    if config.axis is not None:
        counts, extremes = lax.psum(counts, config.axis), lax.pmax(extremes, config.axis)
        change = lax.psum(change, config.axis) if change is not None else None
    usable = counts[2] == 0  # agreed once more: the next step's decisions follow from it
    if change is not None:
        change = change / max(2 * sum(group.size for group in config.kronecker), 1)
        change = jnp.where(usable, change, metrics.statistics_change)
    metrics = KfacMetrics(
        gradient_norm=jnp.sqrt(square).astype(jnp.float32),
        preconditioned_norm=jnp.sqrt(preconditioned_square).astype(jnp.float32),
        condition=extremes[0],
        statistics_change=metrics.statistics_change if change is None else change,
        inverse_age=extremes[1].astype(jnp.int32),
        skipped_statistics=metrics.skipped_statistics + counts[0],
        failed_inversions=metrics.failed_inversions + counts[1],
        skipped_steps=metrics.skipped_steps + ~usable,
    )
    return KfacState(
        count=jnp.where(usable, optax.safe_increment(state.count), state.count),
        refused=~usable,
        changed=due.changed,
        damping=jnp.where(usable, now.damping, state.damping),
        unitwise_damping=jnp.where(usable, now.unitwise, state.unitwise_damping),
        owned={name: Owned(blocks[name], shard, config.inverse) for name, shard in place.shards.items()},
        shared={group.name: blocks[group.name] for group in config.groups if not group.kronecker},
        replicas=inverses.replicas,
        metrics=metrics,
    )


def _all_finite(square: jax.Array, leaves: Iterable[jax.Array]) -> jax.Array:
    """Whether a sum of squares and some leaves are finite."""
    return jnp.all(jnp.isfinite(square) & jnp.stack([jnp.array(True), *(finite(leaf, 0) for leaf in leaves)]))


def _join(vectors: Iterable[jax.Array]) -> jax.Array:
    """A zero and the numbers of all groups: reduced together, they take one kernel instead of many."""
    # Without a barrier XLA reduces the parts one by one.
    return lax.optimization_barrier(jnp.concatenate([jnp.zeros(1, bool), *vectors]))


def _number(config: Config, found: Vectors) -> jax.Array:
    """How many blocks were found, so that the sum over devices counts each once: those that all have, on the first."""
    first = jnp.array(True) if config.axis is None else lax.axis_index(config.axis) == 0
    own = {group.name for group in config.kronecker}
    return jnp.sum(_join(x if name in own else x & first for name, x in found.items()), dtype=jnp.int32)


def _square(arrays: Iterable[jax.Array]) -> jax.Array:
    """The squared norm of all arrays together."""
    return sum((jnp.sum(jnp.square(x)) for x in arrays), jnp.zeros((), jnp.float32))


def _squares(tree: Any) -> list[jax.Array]:
    """The squared Frobenius norms `[k]` of each stack."""
    return [jnp.sum(jnp.square(x), axis=tuple(range(1, x.ndim))) for x in jax.tree.leaves(tree)]


def _differences(batch: Block, average: Block) -> Block:
    return jax.tree.map(lambda new, old: new.astype(old.dtype) - old, batch, average)


def _relative(change: jax.Array, size: jax.Array, taken: jax.Array, mine: jax.Array) -> jax.Array:
    """`[k]`: `||batch - average|| / ||average||` of the factors that are a device's own, from the squares of both.

    1 where there is no average so far or the statistics are left out.
    """
    known = taken & (size > 0)
    return jnp.where(mine, jnp.where(known, jnp.sqrt(change / jnp.where(known, size, 1)), 1), 0)
