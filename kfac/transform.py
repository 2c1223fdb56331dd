"""The preconditioner as an optax gradient transformation."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from kfac.assignment import Shard, make_phases, make_shards, packed_size
from kfac.blocks import Group, apply_inverse, check_factors, group_layers
from kfac.collectives import (
    AxisName,
    as_varying,
    axis_size,
    gather_from_owners,
    mean_over,
    mean_to_owners,
    owns_last,
    pack,
    take_own,
    unpack,
    varying_axes,
)
from kfac.inverse import refresh_kronecker, refresh_unitwise
from kfac.layers import Block, Factors, Kronecker, Layers, Unitwise, leaves_by_path

Scalar = float | jax.Array
ScalarOrSchedule = Scalar | Callable[[jax.Array], jax.typing.ArrayLike]


class KfacMetrics(NamedTuple):
    """Scalars of the last step, for `diagnostics`.

    Attributes:
      gradient_norm: 2-norm of the gradient, over the parameters that have a curvature block.
      preconditioned_norm: the same of the preconditioned gradient.
      condition: largest 1-norm condition number of a damped factor, each as of its last inversion.
      inverse_age: steps since the oldest of the inverses in use was computed.
      skipped_statistics: how many times a block left non-finite statistics out of its running average.
      failed_inversions: how many times a block kept its previous inverse because factorisation failed.
    """

    gradient_norm: jax.Array
    preconditioned_norm: jax.Array
    condition: jax.Array
    inverse_age: jax.Array
    skipped_statistics: jax.Array
    failed_inversions: jax.Array


class BlockState(NamedTuple):
    """What is kept of `k` blocks of one shape.

    Attributes:
      factors: bias-corrected running averages, `[k, ...]`.
      weight: `[k]`, the sum of the weights in each average; 0 before the first statistics.
      inverse: damped inverses, shaped like `factors`; identities before the first.
      condition: `[k]`, 1-norm condition number of the worse damped factor at the last inversion; 0 before the first.
      age: `[k]`, steps since the last inversion.
    """

    factors: Block
    weight: jax.Array
    inverse: Block
    condition: jax.Array
    age: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Owned:
    """Blocks of one group that this device owns, at its positions; seen from outside, those of all devices in a row."""

    blocks: BlockState
    shard: Shard = dataclasses.field(metadata={"static": True})


class Replica(NamedTuple):
    """All inverses of a group, on every device, and whether each has been computed yet."""

    inverse: Kronecker
    ready: jax.Array


class KfacState(NamedTuple):
    """State of `scale_by_kfac`: arrays only. Dictionaries are keyed by the shape of the blocks they stack.

    Attributes:
      count: optimizer steps so far.
      changed: the last step that brought statistics or another damping, or could not be used.
      damping: the damping of the last step.
      unitwise_damping: that of unit-wise and diagonal blocks.
      owned: Kronecker blocks, each device its own.
      shared: unit-wise and diagonal blocks, the same on all devices.
      replicas: with `precondition="replicated"` the inverses of all devices, else empty.
      metrics: scalars of the last step.
    """

    count: jax.Array  # type: ignore[assignment]  # optax's name for it
    changed: jax.Array
    damping: jax.Array
    unitwise_damping: jax.Array
    owned: dict[str, Owned]
    shared: dict[str, BlockState]
    replicas: dict[str, Replica]
    metrics: KfacMetrics


def value_at(scalar: ScalarOrSchedule, count: jax.Array) -> jax.Array:
    """A scalar, or a schedule at step `count`, as float32."""
    return jnp.asarray(scalar(count) if callable(scalar) else scalar, jnp.float32)


def check_range(name: str, value: Any, low: float, high: float, *, open_low: bool = False, open_high: bool = False):
    """Raises `ValueError` where a plain number is not in the range; schedules and arrays are taken as they are."""
    if callable(value) or isinstance(value, jax.Array):
        return
    left, right = "(" if open_low else "[", ")" if open_high else "]"
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be a number or a schedule, but is {value!r}") from None
    above = number > low if open_low else number >= low
    below = number < high if open_high else number <= high
    if math.isnan(number) or not (above and below):
        raise ValueError(f"{name} must lie in {left}{low:g}, {high:g}{right}, but is {value!r}")


def _check_count(name: str, value: Any, low: int) -> None:
    if not isinstance(value, jax.Array) and (isinstance(value, bool) or value != int(value) or value < low):
        raise ValueError(f"{name} must be an integer, at least {low}, but is {value!r}")


def _check_choice(name: str, value: Any, accepted: tuple[str, ...]) -> None:
    if value not in accepted:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, accepted))}, but is {value!r}")


def scale_by_kfac(
    layers: Layers,
    *,
    damping: ScalarOrSchedule = 1e-3,
    factor_decay: ScalarOrSchedule = 0.95,
    inverse_every: int | jax.Array = 1,
    refresh_warmup: int | jax.Array = 10,
    staggered: bool | None = None,
    inverse: str = "cholesky",
    precision: str = "float32",
    unitwise_damping: ScalarOrSchedule = 1.0,
    axis_name: AxisName | None = None,
    mesh: Mesh | None = None,
    precondition: str = "sharded",
    communication_dtype: str = "float32",
    triangular: bool = True,
) -> optax.GradientTransformationExtraArgs:
    """Preconditions gradients with damped inverses of Kronecker factors.

    The gradient `V` of a layer in matrix form becomes `(G + sqrt(l)/pi I)^-1 V (A + pi sqrt(l) I)^-1` with damping `l`
    and `pi^2 = (tr A / dim A) / (tr G / dim G)` (Martens & Grosse 2015; Osawa et al. 2019). Normalisation parameters are
    multiplied by `(F + u l I)^-1` of their channel's block, with `u = unitwise_damping`. Skipped parameters pass through
    unchanged, and so do all until the first statistics arrive.

    `update(grads, state, params=None, *, factors=None)` takes the statistics of the step as `factors`; without them
    the step uses what it knows. The running average is `F <- decay F + (1 - decay) F_batch`, bias-corrected. A refresh
    of the inverses follows the statistics of its step and precedes the preconditioning of its gradient; one that could
    change nothing (no statistics and no other damping since the last) is left out.

    With several devices (`axis_name`, `mesh`) every Kronecker block has an owner. Statistics arrive local and are
    averaged to the owners, which keep the running averages, invert, and precondition their blocks; the preconditioned
    gradients are gathered. Gradients are expected to be averaged over devices already (`lax.pmean`).

    Blocks with non-finite statistics leave them out of their average; a block whose factorisation fails, with ten times
    the damping as well, keeps its last inverse; a step with a non-finite gradient changes neither. `diagnostics` counts
    these.

    Args:
      layers: what `find_layers` returned.
      damping: positive scalar or schedule of the step; takes effect at the next refresh.
      factor_decay: decay of the running averages, in [0, 1); 0 uses the last statistics alone. Scalar or schedule.
      inverse_every: each inverse is refreshed every so many steps, counted from the first.
      refresh_warmup: during so many first steps, every step with statistics refreshes all inverses.
      staggered: spread the refreshes of the blocks over `inverse_every` steps by cost, so that no step pays for all;
        False refreshes all of them at steps 0, `inverse_every`, 2 `inverse_every`, ... None staggers where
        `inverse_every` is a plain integer, which it takes.
      inverse: `"cholesky"`.
      precision: dtype in which inverses are kept and applied, `"float32"` or `"bfloat16"`. They are always computed
        in float32.
      unitwise_damping: factor on `damping` for unit-wise and diagonal blocks. Scalar or schedule.
      axis_name: the named axis of devices, of `jax.pmap`, `jax.shard_map` or `mesh`; a tuple for several.
      mesh: for plain `jit` over sharded arrays. `init` and `update` then open a `shard_map` of their own over it, and
        `factors` are those of the global batch, as `value_and_grad` under such a `jit` returns them.
      precondition: `"sharded"`: owners precondition, gradients are gathered every step. `"replicated"`: inverses are
        gathered when refreshed, and every device preconditions all blocks: fewer messages, more memory.
      communication_dtype: dtype of statistics on the wire, `"float32"` or `"bfloat16"`.
      triangular: send upper triangles of symmetric matrices only.

    Returns:
      An `optax.GradientTransformationExtraArgs`. Updates keep the dtype of the gradients.

    Raises:
      ValueError: an argument is out of range; in `update`, the gradients or factors are not those of `layers`, or the
        state is one for another number of devices.
    """
    if not isinstance(layers, Layers):
        raise ValueError(f"layers must be what kfac.find_layers returns, but is {type(layers).__name__}")
    check_range("damping", damping, 0, math.inf, open_low=True, open_high=True)
    check_range("factor_decay", factor_decay, 0, 1, open_high=True)
    check_range("unitwise_damping", unitwise_damping, 0, math.inf, open_low=True, open_high=True)
    _check_count("inverse_every", inverse_every, 1)
    _check_count("refresh_warmup", refresh_warmup, 0)
    _check_choice("inverse", inverse, ("cholesky",))
    _check_choice("precision", precision, ("float32", "bfloat16"))
    _check_choice("precondition", precondition, ("sharded", "replicated"))
    _check_choice("communication_dtype", communication_dtype, ("float32", "bfloat16"))
    if staggered and isinstance(inverse_every, jax.Array):
        raise ValueError("staggered=True needs inverse_every to be a plain int (a static argument), but it is an array")
    if staggered is None:
        staggered = not isinstance(inverse_every, jax.Array)
    if mesh is not None and axis_name is None:
        axis_name = tuple(mesh.axis_names)
    config = _Config(
        layers=layers,
        groups=group_layers(layers),
        axis_name=axis_name,
        phases=int(inverse_every) if staggered and not isinstance(inverse_every, jax.Array) else 1,
        replicated=precondition == "replicated",
        wire_dtype=jnp.dtype(communication_dtype),
        triangular=triangular,
        precision=precision,
    )

    if mesh is not None:
        assert axis_name is not None
        same, split = PartitionSpec(), _specs(KfacState(*[0] * len(KfacState._fields)), axis_name)
        init_on_mesh = jax.jit(
            jax.shard_map(functools.partial(_init, config), mesh=mesh, in_specs=(same,), out_specs=split)
        )
        update_on_mesh = jax.shard_map(
            functools.partial(_update, config, local=False),
            mesh=mesh,
            in_specs=(same, split, same, same),
            out_specs=(same, split),
        )

    def init(params: Any) -> KfacState:
        if mesh is not None and axis_size(axis_name) is None:
            return init_on_mesh(params)
        return _init(config, params)

    def update(updates: Any, state: KfacState, params: Any = None, *, factors: Factors | None = None, **extra: Any):
        del params, extra
        if factors is not None:
            check_factors(factors, layers)
        count = state.count
        now = _Now(
            damping=value_at(damping, count),
            unitwise=value_at(damping, count) * value_at(unitwise_damping, count),
            decay=value_at(factor_decay, count),
            period=jnp.asarray(inverse_every).astype(jnp.int32),
            warmup=count < jnp.asarray(refresh_warmup).astype(jnp.int32),
        )
        if mesh is not None and axis_size(axis_name) is None:
            return update_on_mesh(updates, state, now, factors)
        return _update(config, updates, state, now, factors, local=True)

    return optax.GradientTransformationExtraArgs(init, update)


@dataclasses.dataclass(frozen=True)
class _Config:
    """What is fixed when the transformation is made; `phases` is the length of a staggered cycle."""

    layers: Layers
    groups: tuple[Group, ...]
    axis_name: AxisName | None
    phases: int
    replicated: bool
    wire_dtype: Any
    triangular: bool
    precision: str

    def encode(self, stack: jax.Array) -> jax.Array:
        """Symmetric matrices `[k, d, d]` as they are sent, `[k, elements]`."""
        return (pack(stack) if self.triangular else stack).reshape(stack.shape[0], -1)

    def decode(self, flat: jax.Array, d: int) -> jax.Array:
        """The inverse of `encode`."""
        if not self.triangular:
            return flat.reshape(-1, d, d)
        half = (d + 1) // 2
        return unpack(flat.reshape(-1, half, 2 * half + 1), d)

    @functools.cached_property
    def kronecker(self) -> tuple[Group, ...]:
        return tuple(group for group in self.groups if group.kronecker)

    @functools.cached_property
    def unitwise(self) -> tuple[Group, ...]:
        return tuple(group for group in self.groups if not group.kronecker)


class _Now(NamedTuple):
    """The scalars of one step."""

    damping: jax.Array
    unitwise: jax.Array
    decay: jax.Array
    period: jax.Array
    warmup: jax.Array


# -- state -----------------------------------------------------------------------------------------------------------


def _init(config: _Config, params: Any) -> KfacState:
    leaves = _match(config.layers, params, "params")
    # Statistics of a float64 model stay in float64; nothing else is ever wider than float32.
    dtype = jnp.result_type(jnp.float32, *(leaf.dtype for leaf in leaves.values()))
    kept = dtype if config.precision == "float32" else jnp.dtype(config.precision)
    devices = axis_size(config.axis_name) or 1
    shards = make_shards(config.groups, devices)

    def blocks(group: Group, size: int) -> BlockState:
        return BlockState(
            factors=group.zeros(size, dtype),
            weight=jnp.zeros(size, dtype),
            inverse=group.identity(size, kept),
            condition=jnp.zeros(size, dtype),
            age=jnp.zeros(size, jnp.int32),
        )

    def own(group: Group) -> Owned:
        shard = shards[group.name]
        return Owned(_own_varying(blocks(group, shard.positions), config.axis_name, devices), shard)

    replicas = {}
    if config.replicated and devices > 1:
        for group in config.kronecker:
            inverse = group.identity(group.size, kept)
            assert isinstance(inverse, Kronecker)
            replicas[group.name] = Replica(inverse, jnp.zeros(group.size, bool))
    return KfacState(
        count=jnp.zeros((), jnp.int32),
        changed=jnp.full((), -1, jnp.int32),
        damping=jnp.zeros((), jnp.float32),
        unitwise_damping=jnp.zeros((), jnp.float32),
        owned={group.name: own(group) for group in config.kronecker},
        shared={group.name: blocks(group, group.size) for group in config.unitwise},
        replicas=replicas,
        metrics=KfacMetrics(
            *(jnp.zeros((), jnp.float32) for _ in range(3)), *(jnp.zeros((), jnp.int32) for _ in range(3))
        ),
    )


def _own_varying(tree: Any, axis_name: AxisName | None, devices: int) -> Any:
    """Marks a device's own blocks as its own, where `shard_map` checks that (`lax.axis_index` varies if it does)."""
    return as_varying(tree, varying_axes(lax.axis_index(axis_name))) if axis_name and devices > 1 else tree


def state_specs(tx: optax.GradientTransformation, params: Any, axis_name: AxisName) -> Any:
    """`PartitionSpec`s of an optimizer state, for `in_specs` and `out_specs` of `jax.shard_map` or shardings of `jit`.

    Args:
      tx: the optimizer: `kfac`, or any chain that holds `scale_by_kfac`.
      params: the parameters, arrays or `jax.ShapeDtypeStruct`.
      axis_name: the axis given to the optimizer.

    Returns:
      A tree prefix of the state: Kronecker blocks are split along the axis, everything else is the same on all devices.
    """
    return _specs(jax.eval_shape(tx.init, params), axis_name)


def _specs(tree: Any, axis_name: AxisName) -> Any:
    same, split = PartitionSpec(), PartitionSpec(axis_name)

    def is_state(node):
        return isinstance(node, KfacState)

    def specs(node):
        # A spec stands for the whole subtree below it.
        return KfacState(same, same, same, same, split, same, same, same) if is_state(node) else same

    return jax.tree.map(specs, tree, is_leaf=is_state)


# -- update ----------------------------------------------------------------------------------------------------------


def _update(
    config: _Config, updates: Any, state: KfacState, now: _Now, factors: Factors | None, *, local: bool
) -> tuple[Any, KfacState]:
    """One step on one device; `local` statistics are still to be averaged over devices."""
    axis = config.axis_name
    devices = axis_size(axis)
    if axis is not None and devices is None:
        raise ValueError(
            f"axis_name={axis!r} is not bound: call update inside jax.pmap or jax.shard_map over that axis, or pass mesh="
        )
    _check_devices(state, devices or 1)
    leaves = _match(config.layers, updates, "updates")
    usable = jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in leaves.values()]))
    if axis is not None:
        # The same decision everywhere, whatever one device has seen: what follows holds collectives.
        usable = lax.pmin(usable.astype(jnp.int32), axis) > 0
    count = state.count
    changed = (now.damping != state.damping) | (now.unitwise != state.unitwise_damping) | (factors is not None)
    # A step that cannot be used leaves its refresh to be made up for in the next cycle.
    last_change = jnp.where(usable, jnp.where(changed, count, state.changed), count + 1)
    everything = now.warmup & (factors is not None)
    cycle = usable & (count - last_change < now.period)
    due = usable & (everything | (cycle & ((count % now.period == 0) | (config.phases > 1))))

    owned, shared, replicas = {}, {}, {}
    skipped, failed = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
    preconditioned: dict[str, jax.Array] = {}
    if factors is not None:
        # One after the other: on small machines XLA's CPU schedule can deadlock between the convolutions that the
        # gradients come from and the LAPACK calls that the statistics go to.
        factors, leaves = lax.optimization_barrier((factors, leaves))
    schedule = make_phases(config.groups, {name: own.shard for name, own in state.owned.items()}, config.phases)
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
        stop = jnp.where(due, jnp.where(everything, shard.positions, bounds[phase + 1]), start)
        blocks, bad = _refresh_range(blocks, start, jnp.minimum(stop, jnp.sum(mine)), now.damping)
        failed += bad
        owned[name] = Owned(blocks, shard)

        dtype = blocks.weight.dtype
        matrices = group.stack_matrices(leaves, dtype)
        if name in state.replicas:
            replicas[name] = lax.cond(
                stop > start,
                lambda own, old, group=group, shard=shard: _gather_inverses(config, own, old, group, shard),
                lambda own, old: old,
                blocks,
                state.replicas[name],
            )
            result = _apply(replicas[name].inverse, replicas[name].ready, matrices)
        else:
            mine_only = take_own(matrices, shard, axis)
            result = gather_from_owners(_apply(blocks.inverse, blocks.condition > 0, mine_only), shard, axis)
        preconditioned.update(group.split_matrices(result))

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
        matrices = group.stack_matrices(leaves, blocks.weight.dtype)
        preconditioned.update(group.split_matrices(_apply(blocks.inverse, blocks.condition > 0, matrices)))
        condition = jnp.maximum(condition, _worst(blocks.condition, jnp.float32))
        age = jnp.maximum(age, _worst(blocks.age, jnp.int32))

    result = {path: preconditioned[path].astype(leaf.dtype) for path, leaf in leaves.items() if path in preconditioned}
    metrics = KfacMetrics(
        gradient_norm=_norm([leaves[path] for path in result]),
        preconditioned_norm=_norm(list(result.values())),
        condition=condition,
        inverse_age=age,
        skipped_statistics=state.metrics.skipped_statistics + skipped,
        failed_inversions=state.metrics.failed_inversions + failed,
    )
    state = KfacState(
        optax.safe_increment(count), last_change, now.damping, now.unitwise, owned, shared, replicas, metrics
    )
    return _rebuild(updates, leaves | result), state


def _check_devices(state: KfacState, devices: int) -> None:
    for owned in state.owned.values():
        if owned.shard.devices != devices:
            raise ValueError(
                f"the optimizer state is one for {owned.shard.devices} device(s), but update runs on {devices}. Initialise "
                "it where the axis is bound, e.g. jax.pmap(tx.init, axis_name=...)(params); a state from another number of "
                "devices is converted by kfac.gather_state and kfac.scatter_state."
            )


def _per_block(values: jax.Array, like: jax.Array) -> jax.Array:
    return values.reshape(-1, *(1,) * (like.ndim - 1))


def _worst(values: jax.Array, dtype: Any) -> jax.Array:
    return jnp.max(values, initial=0).astype(dtype)


def _norm(leaves: list[jax.Array]) -> jax.Array:
    total = sum((jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in leaves), jnp.zeros((), jnp.float32))
    return jnp.sqrt(total)


def _mean_to_owners(config: _Config, stacks: Block, group: Group, shard: Shard) -> Kronecker:
    """Means over devices of a group's statistics, in one message."""
    assert isinstance(stacks, Kronecker)
    if config.axis_name is None:
        return stacks
    dtype = stacks.A.dtype
    sent = jnp.concatenate([config.encode(stacks.A), config.encode(stacks.G)], axis=1).astype(config.wire_dtype)
    received = mean_to_owners(sent, shard, config.axis_name).astype(dtype)
    cut = packed_size(group.d_in, config.triangular)
    return Kronecker(config.decode(received[:, :cut], group.d_in), config.decode(received[:, cut:], group.d_out))


def _gather_inverses(config: _Config, own: BlockState, old: Replica, group: Group, shard: Shard) -> Replica:
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
    finite = usable
    for stack in jax.tree.leaves(batch):
        finite &= jnp.all(jnp.isfinite(stack), axis=tuple(range(1, stack.ndim)))
    taken = finite & mine
    decay = decay.astype(blocks.weight.dtype)
    total = decay * blocks.weight + (1 - decay)
    share = jnp.where(taken, (1 - decay) / total, 0)

    def average(old, new):
        new = jnp.where(_per_block(taken, new), new.astype(old.dtype), 0)
        return (1 - _per_block(share, old)) * old + _per_block(share, old) * new

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
            fresh = jnp.where(_per_block(taken, fresh), fresh, at(stack))
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
    inverse = jnp.where(_per_block(taken, new.inverse.F), new.inverse.F, blocks.inverse.F)
    return blocks._replace(
        inverse=Unitwise(inverse),
        condition=jnp.where(taken, new.condition, blocks.condition),
        age=jnp.where(taken | ~known, 0, blocks.age + 1),
    ), jnp.sum(known & ~new.valid & due, dtype=jnp.int32)


def _apply(inverse: Block, ready: jax.Array, matrices: jax.Array) -> jax.Array:
    """Preconditioned gradients `[k, d_out, d_in]`; as they are where a block has no inverse yet."""
    return jnp.where(_per_block(ready, matrices), apply_inverse(inverse, matrices), matrices)


# -- trees -----------------------------------------------------------------------------------------------------------


def _match(layers: Layers, tree: Any, what: str) -> dict[str, jax.Array]:
    """Leaves of parameters or gradients by path, checked against `layers`.

    `optax.masked` replaces leaves by empty nodes: a layer may be missing as a whole, but not in part.
    """
    leaves = leaves_by_path(tree)
    unknown = [path for path in leaves if path not in layers.paths]
    if unknown:
        raise ValueError(f"{what} have a leaf {unknown[0]!r} that `layers` was found without: call find_layers again")
    masked = any(isinstance(x, optax.MaskedNode) for x in jax.tree.leaves(tree, is_leaf=_is_masked))
    for layer in layers:
        missing = [path for path in layer.params if path not in leaves]
        if missing and (not masked or len(missing) < len(layer.params)):
            reason = "is masked but the rest of its layer is not" if masked else "is missing"
            raise ValueError(f"{what}: leaf {missing[0]!r} of layer {layer.name!r} {reason}")
        for path, shape in zip(layer.params, layer.shapes, strict=True):
            if path in leaves and tuple(leaves[path].shape) != shape:
                raise ValueError(
                    f"{what}: leaf {path!r} of layer {layer.name!r} must have shape {shape}, "
                    f"but has {tuple(leaves[path].shape)}"
                )
    if not leaves:
        raise ValueError(f"{what} have no leaves")
    return leaves


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)


def _rebuild(tree: Any, leaves: dict[str, jax.Array]) -> Any:
    paths = leaves_by_path(tree)
    return jax.tree.unflatten(jax.tree.structure(tree), [leaves[path] for path in paths])


