"""One step of the preconditioner on one device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from kfac._curvature.blocks import Group, apply_eigen, apply_inverse
from kfac._curvature.cholesky import Refreshed, eigen_condition, finite, refresh_unitwise
from kfac._curvature.ekfac import Moments, corrected_eigenvalues, into_basis
from kfac._curvature.refresh import refresh_kronecker
from kfac._distributed.assignment import Shard
from kfac._distributed.collectives import gather_from_owners, means_to_owners, owns_last, take_own
from kfac._factors import Block, Eigen, Factors, Kronecker, is_diagonal
from kfac._optimizer.state import BlockState, Config, KfacMetrics, KfacState, Owned, Replica, match_leaves, rebuild
from kfac._varying import AxisName, as_varying, axis_size, varying_axes


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
            f"axis_name={axis!r} is not bound: call update inside jax.pmap or jax.shard_map over that axis, "
            "or pass mesh="
        )
    _check_groups(config, state)
    check_devices(state, devices or 1)
    for owned in state.owned.values():
        if owned.blocks.weight.shape[0] != owned.shard.positions:
            raise ValueError(
                f"this device must get {owned.shard.positions} of the state's {owned.shard.blocks} blocks of a shape, "
                f"but gets {owned.blocks.weight.shape[0]}: use kfac.state_specs for in_specs and out_specs of the state"
            )
    _check_form(config, state)
    if set(state.replicas) != {group.name for group in config.kronecker if config.replicates(group)}:
        if config.inverse == "ekfac":
            have, convert = (
                ("a", "kfac.scatter_state(opt_state, 1)") if axis else ("no", "kfac.gather_state(opt_state)")
            )
            raise ValueError(
                f"with inverse='ekfac' a state is another where there is an axis of devices, if only of one: update "
                f"has {have} such axis, but the state is one for the other case: {convert} makes it from that."
            )
        mode, other = ("replicated", "sharded") if config.replicated else ("sharded", "replicated")
        raise ValueError(
            f"precondition={mode!r}, but the optimizer state is one for precondition={other!r}: initialise it with the "
            "same option."
        )
    leaves = match_leaves(config.layers, updates, "updates")
    if axis is not None:
        _check_varying(axis, updates, factors if local else None)
    matrices = {group.name: group.stack_matrices(leaves, _dtype(state, group)) for group in config.groups}
    square = _square(matrices.values())
    usable = _all_finite(square, (leaf for path, leaf in leaves.items() if path in config.skipped))
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

    blocks = state.blocks
    shards = {name: own.shard for name, own in state.owned.items()}
    mine = {group.name: _owned(group, shards, axis) for group in config.groups}
    skipped = skipped_by_all = jnp.zeros((), jnp.int32)  # of this device's own blocks, and of those that all have
    change = jnp.zeros((), jnp.float32)  # summed over this device's Kronecker factors
    if factors is not None:
        batch = _batch_statistics(config, factors, shards, local=local)
        blocks, left_out, change = _with_statistics(config, blocks, batch, shards, mine, usable, now.decay)
        skipped, skipped_by_all = _number(left_out, config.kronecker), _number(left_out, config.unitwise)

    phase = jnp.minimum(count % now.period, config.phases) if config.phases > 1 else jnp.zeros((), jnp.int32)
    wanted = {}
    for name, turns in config.turns.items():
        turn = everything | (take_own(jnp.asarray(turns), shards[name], axis) == phase)
        wanted[name] = due & turn & mine[name] & (blocks[name].weight > 0)
    factors_of, inverses_of = ({n: getattr(blocks[n], part) for n in wanted} for part in ("factors", "inverse"))
    refreshes = refresh_kronecker(factors_of, inverses_of, wanted, now.damping, eigen=config.eigen)
    for name, refresh in refreshes.items():
        blocks[name] = _refreshed(config, blocks[name], refresh, usable, now.damping)
    failed = _number({name: wanted[name] & ~refresh.valid for name, refresh in refreshes.items()}, config.kronecker)
    # In a cycle longer than there are blocks, nothing is left for the last steps.
    busy = np.isin(np.arange(config.phases + 1), [turn for turns in config.turns.values() for turn in turns])
    refreshed = due & (everything | jnp.asarray(busy)[phase])
    replicas = _refresh_replicas(config, state.replicas, blocks, shards, refreshed)
    # A unit-wise block is cheap, so every device has them all, and they are refreshed with the first phase of a cycle.
    due = usable & (everything | (cycle & (count % now.period == 0)))
    wanted = {group.name: due & (blocks[group.name].weight > 0) for group in config.unitwise}
    factors_of, inverses_of = ({n: getattr(blocks[n], part) for n in wanted} for part in ("factors", "inverse"))
    refreshes = refresh_unitwise(factors_of, inverses_of, wanted, now.unitwise)
    for name, refresh in refreshes.items():
        blocks[name] = _refreshed(config, blocks[name], refresh, usable, now.damping)
    failed_by_all = _number(
        {name: wanted[name] & ~refresh.valid for name, refresh in refreshes.items()}, config.unitwise
    )

    preconditioned = _precondition(config, blocks, replicas, shards, matrices, now.damping)
    new: dict[str, jax.Array] = {}
    for group in config.groups:
        new.update(group.split_matrices(preconditioned[group.name]))
    result = {path: new[path].astype(leaf.dtype) if path in new else leaf for path, leaf in leaves.items()}
    # What is finite as it was computed may be too large for a narrower dtype of the gradients.
    narrowed = [leaf for path, leaf in result.items() if path in new and leaf.dtype != new[path].dtype]
    preconditioned_square = _square(preconditioned.values())
    usable &= _all_finite(preconditioned_square, narrowed)
    counts = jnp.stack([skipped, failed, (~usable).astype(jnp.int32)])
    conditions, ages = (_join(getattr(b, part) for b in blocks.values()) for part in ("condition", "age"))
    extremes = jnp.stack([jnp.max(numbers).astype(jnp.float32) for numbers in (conditions, ages)])
    if axis is not None:
        counts, extremes = lax.psum(counts, axis), lax.pmax(extremes, axis)
        change = lax.psum(change, axis)
    usable = counts[2] == 0  # agreed once more: the next step's decisions follow from it
    number = 2 * sum(group.size for group in config.kronecker)
    if factors is None:
        change = state.metrics.statistics_change
    else:
        change = jnp.where(usable, change / max(number, 1), state.metrics.statistics_change)
    metrics = KfacMetrics(
        gradient_norm=jnp.sqrt(square).astype(jnp.float32),
        preconditioned_norm=jnp.sqrt(preconditioned_square).astype(jnp.float32),
        condition=extremes[0],
        statistics_change=change,
        inverse_age=extremes[1].astype(jnp.int32),
        skipped_statistics=state.metrics.skipped_statistics + counts[0] + skipped_by_all,
        failed_inversions=state.metrics.failed_inversions + counts[1] + failed_by_all,
        skipped_steps=state.metrics.skipped_steps + ~usable,
    )
    state = KfacState(
        count=jnp.where(usable, optax.safe_increment(count), count),
        changed=last_change,
        damping=jnp.where(usable, now.damping, state.damping),
        unitwise_damping=jnp.where(usable, now.unitwise, state.unitwise_damping),
        owned={name: Owned(blocks[name], shard) for name, shard in shards.items()},
        shared={group.name: blocks[group.name] for group in config.unitwise},
        replicas=replicas,
        metrics=metrics,
    )
    return rebuild(updates, result), state


def _all_finite(square: jax.Array, leaves: Iterable[jax.Array]) -> jax.Array:
    """Whether a sum of squares and some leaves are finite."""
    return jnp.all(jnp.isfinite(square) & jnp.stack([jnp.array(True), *(finite(leaf, 0) for leaf in leaves)]))


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


def _dtype(state: KfacState, group: Group) -> Any:
    blocks = state.owned[group.name].blocks if group.kronecker else state.shared[group.name]
    return blocks.weight.dtype


def _check_groups(config: Config, state: KfacState) -> None:
    """Raises where a state is that of another model."""
    found = {name: owned.shard.blocks for name, owned in state.owned.items()}
    found |= {name: blocks.weight.shape[-1] for name, blocks in state.shared.items()}
    expected = {group.name: group.size for group in config.groups}
    for name in expected | found:
        has, needs = found.get(name, 0), expected.get(name, 0)
        if has != needs:
            raise ValueError(
                f"the optimizer state is not one for these layers: it has {has} blocks {name}, where the layers have "
                f"{needs}. Initialise it with the same layers, or restore the checkpoint of this model."
            )


def _check_form(config: Config, state: KfacState) -> None:
    """Raises where a state has inverses of another kind."""
    for group in config.kronecker:
        blocks = state.owned[group.name].blocks
        assert isinstance(blocks.inverse, Kronecker)
        if all(is_diagonal(part) for part in jax.tree.leaves(blocks.factors)):
            continue
        eigen = any(isinstance(side, Eigen) for side in (blocks.inverse.A, blocks.inverse.G))
        if eigen != config.eigen or (blocks.moments is not None) != config.corrects(group):
            kept = "ekfac" if blocks.moments is not None else "eigh" if eigen else "cholesky"
            raise ValueError(
                f"inverse={config.inverse!r}, but the optimizer state is one for inverse={kept!r}: initialise it with "
                "the same option."
            )


def check_devices(state: KfacState, devices: int) -> None:
    for owned in state.owned.values():
        if owned.shard.devices != devices:
            raise ValueError(
                f"the optimizer state is one for {owned.shard.devices} device(s), but update runs on {devices}. "
                "Initialise it where the axis is bound, e.g. jax.pmap(tx.init, axis_name=...)(params); a state from "
                "another number of devices is converted by kfac.gather_state and kfac.scatter_state."
            )


def _owned(group: Group, shards: dict[str, Shard], axis: AxisName | None) -> jax.Array:
    """`[positions]`: whether the block there is a device's own."""
    return owns_last(shards[group.name], axis) if group.kronecker else jnp.ones(group.size, bool)


def per_block(values: jax.Array, like: jax.Array) -> jax.Array:
    return values.reshape(-1, *(1,) * (like.ndim - 1))


def _join(vectors: Iterable[jax.Array]) -> jax.Array:
    """A zero and the numbers of all groups: reduced together, they take one kernel instead of many."""
    # Without a barrier XLA reduces the parts one by one.
    return lax.optimization_barrier(jnp.concatenate([jnp.zeros(1, bool), *vectors]))


def _number(found: dict[str, jax.Array], groups: Iterable[Group]) -> jax.Array:
    """How many blocks of these groups were found."""
    return jnp.sum(_join(found[group.name] for group in groups), dtype=jnp.int32)


def _square(arrays: Iterable[jax.Array]) -> jax.Array:
    """The squared norm of all arrays together."""
    return sum((jnp.sum(jnp.square(x)) for x in arrays), jnp.zeros((), jnp.float32))


def _batch_statistics(config: Config, factors: Factors, shards: dict[str, Shard], *, local: bool) -> dict[str, Block]:
    """This step's statistics of the blocks that this device keeps, averaged over devices."""
    axis = config.axis_name
    stacks = {group.name: group.stack_factors(factors, moments=config.corrects(group)) for group in config.groups}
    if axis is None:
        return stacks
    if not local:
        return {
            name: take_own(stack, shards[name], axis) if name in shards else stack for name, stack in stacks.items()
        }
    dtypes = {name: jax.tree.leaves(stack)[0].dtype for name, stack in stacks.items()}
    sent = {name: config.encode(stack) for name, stack in stacks.items()}
    if config.wire_dtype == jnp.bfloat16:
        sent = {name: stack.astype(jnp.bfloat16) for name, stack in sent.items()}
    received = means_to_owners(sent, shards, axis, dtypes)
    return {group.name: config.decode(received[group.name], group) for group in config.groups}


def _refresh_replicas(
    config: Config,
    replicas: dict[str, Replica],
    blocks: dict[str, BlockState],
    shards: dict[str, Shard],
    refreshed: jax.Array,
) -> dict[str, Replica]:
    """The inverses of all devices, fetched in two messages if any have been `refreshed`."""
    axis = config.axis_name
    groups = [group for group in config.kronecker if group.name in replicas]

    def fetch(owned, old):
        sent = {}
        for group in groups:
            own = owned[group.name]
            encoded = config.encode_inverse(own.inverse)
            sent[group.name] = jnp.concatenate([encoded, (own.condition > 0).astype(encoded.dtype)[:, None]], axis=1)
        received = gather_from_owners(sent, shards, axis) if axis is not None else sent
        new = {}
        for group in groups:
            inverse = config.decode_inverse(received[group.name][:, :-1], group, old[group.name].inverse)
            new[group.name] = Replica(inverse, received[group.name][:, -1] > 0)
        return new

    if not groups:
        return {}
    return lax.cond(refreshed, fetch, lambda owned, old: old, {g.name: blocks[g.name] for g in groups}, replicas)


def _precondition(
    config: Config,
    blocks: dict[str, BlockState],
    replicas: dict[str, Replica],
    shards: dict[str, Shard],
    matrices: dict[str, jax.Array],
    damping: jax.Array,
) -> dict[str, jax.Array]:
    """Preconditioned gradients of all groups: of one's own blocks and then gathered, or of all by every device."""
    axis = config.axis_name

    def apply(inverse: Block, ready: jax.Array, matrices: jax.Array, moments: Moments | None) -> jax.Array:
        """Preconditioned gradients `[k, d_out, d_in]`; as they are where a block has no inverse yet."""
        if config.eigen and isinstance(inverse, Kronecker):
            applied = apply_eigen(inverse, corrected_eigenvalues(inverse, moments), matrices, damping)
        else:
            applied = apply_inverse(inverse, matrices)
        return jnp.where(per_block(ready, matrices), applied, matrices)

    result, own = {}, {}
    for group in config.groups:
        name, kept = group.name, blocks[group.name]
        if config.replicated and name in replicas:
            result[name] = apply(replicas[name].inverse, replicas[name].ready, matrices[name], None)
        elif group.kronecker and axis is not None:
            mine = take_own(matrices[name], shards[name], axis)
            own[name] = apply(kept.inverse, kept.condition > 0, mine, kept.moments)
        else:
            result[name] = apply(kept.inverse, kept.condition > 0, matrices[name], kept.moments)
    return result | (gather_from_owners(own, shards, axis) if axis is not None else {})


def _with_statistics(
    config: Config,
    blocks: dict[str, BlockState],
    batch: dict[str, Block],
    shards: dict[str, Shard],
    mine: dict[str, jax.Array],
    usable: jax.Array,
    decay: jax.Array,
) -> tuple[dict[str, BlockState], dict[str, jax.Array], jax.Array]:
    """Blocks with this step's statistics in their averages.

    Returns:
      The blocks; which of them left their statistics out, as these are not finite, `[k]` for each group; and the
      relative changes `||batch - average|| / ||average||`, summed over this device's Kronecker factors.
    """
    batch, moments = _without_moments(batch)
    sizes = {name: _squares(blocks[name].factors) for name in batch}
    moved = {name: _squares(_differences(batch[name], blocks[name].factors)) for name in batch}
    good = {name: jnp.isfinite(sum(squares)) for name, squares in moved.items()}
    good |= {name: good[name] & finite(moment) for name, moment in moments.items()}
    taken = {name: good[name] & mine[name] & usable for name in batch}
    changes = [
        _relative(*pair, taken[name], mine[name])
        for name in shards
        for pair in zip(moved[name], sizes[name], strict=True)
    ]
    change = jnp.sum(_join(changes), dtype=jnp.float32)
    result = {}
    for group in config.groups:
        # True always: so the averages wait for all that reads the old ones, and can be written in their place. XLA
        # drops an optimization barrier here, and would copy them.
        known = taken[group.name] & ~(change < -1) if group.kronecker else taken[group.name]
        old = blocks[group.name]
        if old.moments is not None:
            # Those before the first decomposition are in no basis that is kept.
            own = take_own(jnp.asarray(group.corrected), shards[group.name], config.axis_name)
            found = known & own & (old.condition > 0)
            old = old._replace(moments=Moments(*_averaged(*old.moments, moments[group.name], decay, found)))
        result[group.name] = _accumulate(old, batch[group.name], decay, known)
    return result, {name: ~good[name] & mine[name] for name in batch}, change


def _without_moments(batch: dict[str, Block]) -> tuple[dict[str, Block], dict[str, jax.Array]]:
    """The statistics that all kinds of inverses have, and the moments by themselves."""
    moments = {n: b.moments for n, b in batch.items() if isinstance(b, Kronecker) and b.moments is not None}
    return {n: Kronecker(b.A, b.G) if isinstance(b, Kronecker) else b for n, b in batch.items()}, moments


def _differences(batch: Block, average: Block) -> Block:
    return jax.tree.map(lambda new, old: new.astype(old.dtype) - old, batch, average)


def _squares(tree: Any) -> list[jax.Array]:
    """The squared Frobenius norms `[k]` of each stack."""
    return [jnp.sum(jnp.square(x), axis=tuple(range(1, x.ndim))) for x in jax.tree.leaves(tree)]


def _relative(change: jax.Array, size: jax.Array, taken: jax.Array, mine: jax.Array) -> jax.Array:
    """`[k]`: `||batch - average|| / ||average||` of the factors that are a device's own, from the squares of both.

    1 where there is no average so far or the statistics are left out.
    """
    known = taken & (size > 0)
    return jnp.where(mine, jnp.where(known, jnp.sqrt(change / jnp.where(known, size, 1)), 1), 0)


def _averaged(average: Any, weight: jax.Array, new: Any, decay: jax.Array, taken: jax.Array) -> tuple[Any, jax.Array]:
    """A bias-corrected running average and the sum of its weights, with what is new of the blocks that are `taken`."""
    decay = decay.astype(weight.dtype)
    total = decay * weight + (1 - decay)
    # A decay of 1, which only a schedule can bring, waits for later statistics.
    share = jnp.where(taken & (total > 0), (1 - decay) / total, 0)

    def one(old, new):
        new = jnp.where(per_block(taken, new), new.astype(old.dtype), 0)
        return (1 - per_block(share, old)) * old + per_block(share, old) * new

    return jax.tree.map(one, average, new), jnp.where(taken, total, weight)


def _accumulate(blocks: BlockState, batch: Block, decay: jax.Array, taken: jax.Array) -> BlockState:
    """Running averages with the statistics of the blocks whose are `taken`."""
    factors, weight = _averaged(blocks.factors, blocks.weight, batch, decay, taken)
    return blocks._replace(factors=factors, weight=weight)


def _refreshed(config: Config, blocks: BlockState, new: Refreshed, usable: jax.Array, damping: jax.Array) -> BlockState:
    """Blocks with their new inverses. Those left as they are get older, unless the step is not `usable` and so none."""
    condition, moments = new.condition, blocks.moments
    if isinstance(new.inverse, Kronecker):
        assert isinstance(blocks.inverse, Kronecker)
        if moments is not None:
            moments = moments._replace(average=into_basis(moments.average, blocks.inverse, new.inverse, new.valid))
        if config.eigen:
            condition = eigen_condition(corrected_eigenvalues(new.inverse, moments), damping)
    return blocks._replace(
        inverse=new.inverse,
        moments=moments,
        condition=jnp.where(new.valid, condition, blocks.condition),
        age=jnp.where(~new.valid & (blocks.condition > 0), blocks.age + usable, 0),
    )
