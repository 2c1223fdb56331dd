"""What the preconditioner keeps between steps."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec

from kfac._curvature.blocks import Group, group_layers
from kfac._curvature.inverse import Inverse
from kfac._distributed.distribution import Distribution
from kfac._distributed.owners import Shard, group_costs, make_shards
from kfac._factors import Block
from kfac._layers import Layers, leaves_by_path
from kfac._optimizer.moves import Motion
from kfac._optimizer.place import Config
from kfac._varying import as_varying, axis_size, varying_axes


class KfacMetrics(NamedTuple):
    """Scalars of the last step, for `diagnostics`.

    Attributes:
      damping: the damping of the last step.
      gradient_norm: 2-norm of the gradient, over the parameters that have a curvature block.
      preconditioned_norm: the same of the preconditioned gradient.
      condition: largest condition number of what is inverted, each as of its last inversion: of the damped factors in
        the 1-norm; of eigendecompositions, of the damped blocks in the 2-norm.
      inverse_age: steps since the oldest of the inverses in use was computed.
      kl_clip_scale: what the KL clip multiplied the step by; 1 without one.
      slowest: the lowest of the layers' rates, by which the learning rate is multiplied; 0 before the first step.
      fastest: the highest.
      skipped_statistics: how many times a block left non-finite statistics out of its running average.
      failed_inversions: how many times a block kept its previous inverse because factorisation failed.
      skipped_steps: how many times the gradient, or the preconditioned one, was not finite.
    """

    damping: jax.Array
    gradient_norm: jax.Array
    preconditioned_norm: jax.Array
    condition: jax.Array
    kl_clip_scale: jax.Array
    slowest: jax.Array
    fastest: jax.Array
    inverse_age: jax.Array
    skipped_statistics: jax.Array
    failed_inversions: jax.Array
    skipped_steps: jax.Array


COUNTED = ("inverse_age", "skipped_statistics", "failed_inversions", "skipped_steps")


class BlockState(NamedTuple):
    """What is kept of `k` blocks of one shape.

    Attributes:
      factors: bias-corrected running averages, `[k, ...]`.
      weight: `[k]`, the sum of the weights in each average; 0 before the first statistics.
      inverse: what the kind of inverse keeps, arrays `[k, ...]`.
      condition: `[k]`, condition number at the last inversion; 0 before the first.
      inverted: `[k]`, the step of the last inversion; 0 before the first.
      motion: momentum and rates.
    """

    factors: Block
    weight: jax.Array
    inverse: Any
    condition: jax.Array
    inverted: jax.Array
    motion: Motion


class Segment(NamedTuple):
    """What a device owns of groups with fewer blocks than devices, end to end: a vector for each part of their state.

    Averages stand as triangles, as in `Packed`. From outside of `shard_map`, the vectors of all devices one after the
    other. None where there is nothing.
    """

    factors: jax.Array | None = None
    inverse: jax.Array | None = None
    motion: jax.Array | None = None


def form_of(blocks: BlockState) -> Any:
    """The shapes `[1, ...]` of one block as a value that can be compared."""
    leaves, structure = jax.tree.flatten(blocks)
    return structure, tuple(jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype) for x in leaves)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Owned:
    """The blocks of one group that this device owns. From outside of `shard_map`, those of all devices in a row.

    Of a group with fewer blocks than devices the parts in `Segment` are None here, and `form` has the shapes to open
    them with.
    """

    blocks: BlockState
    shard: Shard = dataclasses.field(metadata={"static": True})
    form: Any = dataclasses.field(default=None, metadata={"static": True})

    @property
    def shapes(self) -> BlockState:
        """Of one block that is, or is to be, in a segment; else the blocks themselves."""
        return self.blocks if self.form is None else jax.tree.unflatten(*self.form)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Splits:
    """Paths and `PartitionSpec`s of parameters some of which are split over a mesh; nothing where `init` saw none."""

    specs: tuple[tuple[str, PartitionSpec], ...] = ()


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Settings:
    """What `observe` must know of the optimizer. No array, and no schedule.

    Attributes:
      layers: the layers, without biases that `optax.masked` or `optax.partition` hides from the optimizer.
      found: the layers as `find_layers` returned them.
      inverse: the inverse of Kronecker blocks.
      distribution: how several devices are used.
      refreshes: whether `observe` refreshes inverses by itself.
    """

    layers: Layers
    found: Layers
    inverse: Inverse
    distribution: Distribution
    refreshes: bool

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        """The hash, which `jax.jit` asks for in each call."""
        return hash((self.layers, self.found, self.inverse, self.distribution, self.refreshes))


class KfacState(NamedTuple):
    """State of `scale_by_kfac`: arrays only. Dictionaries are keyed by the shape of the blocks they stack.

    Attributes:
      count: optimizer steps so far. One whose result is not finite is none: schedules and the interval of the refreshes
        stay where they are, as they do in the optax parts of `kfac`.
      refused: whether the last step was none, as its result was not finite.
      measured: the count at the last `observe`; -1 before the first.
      refreshed: the count at the last refresh of the inverses; -1 before the first.
      due: whether `observe` should be called before the next step.
      refresh_due: whether that call computes new inverses.
      observe_damping: the damping for the next `observe`, like the next two the value at this count.
      unitwise_damping: the factor on it for unit-wise and diagonal blocks.
      factor_decay: the decay of the running averages in one step.
      owned: Kronecker blocks, each device its own.
      segment: parts of `owned` that stand end to end, of groups with fewer blocks than devices.
      shared: unit-wise and diagonal blocks, the same on all devices.
      bases: eigenvectors of blocks with moments, the same on all devices; only on several, with `Ekfac`.
      learning_rates: the last and the highest so far, which `adaptive_layer_rates` goes by.
      members: the number of blocks of each group, by the names of its layers, whose blocks they are in this order. So a
        checkpoint of layers of another name is one of another structure.
      metrics: scalars of the last step.
      splits: no array: how parameters are split over automatic axes of a mesh, which nothing else tells under `jit`.
      settings: no array: what `observe` must know of the optimizer.
    """

    count: jax.Array  # type: ignore[assignment]  # optax's name for it
    refused: jax.Array
    measured: jax.Array
    refreshed: jax.Array
    due: jax.Array
    refresh_due: jax.Array
    observe_damping: jax.Array
    unitwise_damping: jax.Array
    factor_decay: jax.Array
    owned: dict[str, Owned]
    segment: Segment
    shared: dict[str, BlockState]
    bases: dict[str, Any]
    learning_rates: jax.Array
    members: dict[str, dict[str, jax.Array]]
    metrics: KfacMetrics
    splits: Splits
    settings: Settings

    @property
    def blocks(self) -> dict[str, BlockState]:
        """All blocks this device holds, its own and those that all devices share, in stacks of `k` of one shape.

        Each has the fields `factors` (running averages, a `Kronecker` or a `Unitwise` of arrays `[k, ...]`), `weight`
        (`[k]`, 0 before the first statistics), `inverse`, `condition` (`[k]`), `inverted` (`[k]`, the step) and
        `motion` (momentum and rates).
        """
        return {name: owned.blocks for name, owned in self.owned.items()} | self.shared


class AdaptiveDampingState(NamedTuple):
    """State of `adaptive_damping`, here as `diagnostics` looks for it.

    Attributes:
      count: updates so far.
      next_damping: the damping of the next step, float32.
      reduction_ratio: actual over predicted change of the loss when it was last measured; NaN before.
      inner: the state of the optimizer.
      taken_back: how many steps were taken back so far.
      again: whether the last one was, so that the next is measured.
    """

    count: jax.Array  # type: ignore[assignment]  # optax's name for it
    next_damping: jax.Array  # not `damping`: `optax.tree.get(opt_state, "damping")` finds one value only
    reduction_ratio: jax.Array
    inner: Any
    taken_back: jax.Array
    again: jax.Array


def shards_of(state: KfacState) -> dict[str, Shard]:
    """How the groups whose blocks have owners are dealt to devices."""
    return {name: owned.shard for name, owned in state.owned.items()}


def splits_of(state: KfacState) -> dict[str, PartitionSpec]:
    """How parameters are split over automatic axes of a mesh, as `init` saw it, or `find_layers`."""
    return dict(state.splits.specs or state.settings.found.splits)


def devices_of(state: KfacState) -> int:
    """The number of devices that blocks are dealt to; 1 where no group is."""
    return max((shard.devices for shard in shards_of(state).values()), default=1)


def with_blocks(state: KfacState, blocks: dict[str, BlockState]) -> KfacState:
    """The state with other blocks."""
    owned = {name: dataclasses.replace(owned, blocks=blocks[name]) for name, owned in state.owned.items()}
    return state._replace(owned=owned, shared={name: blocks[name] for name in state.shared})


def init_state(config: Config, settings: Settings, params: Any) -> KfacState:
    """The state before the first step, with all blocks in stacks: `segment.closed` puts parts of them end to end."""
    # `optax.tree.map_params` asks for the state of a placeholder that has no leaves.
    leaves = match_leaves(config.layers, params, "params") if jax.tree.leaves(params) else {}
    # Statistics of a float64 model stay in float64; nothing else is ever wider than float32.
    dtype = jnp.result_type(jnp.float32, *(leaf.dtype for leaf in leaves.values()))
    devices, owners = axis_size(config.way.owners) or 1, config.way.owners
    shards = make_shards(group_costs(config.groups), devices)

    def inverses(group: Group, size: int) -> Any:
        inverse = group.inverse_of(config.inverse)
        kept = inverse.init(group.zeros(size, dtype, group.moments(config.inverse)))
        for leaf in jax.tree.leaves(kept):
            if not jnp.issubdtype(leaf.dtype, jnp.floating):  # integers would be rounded on the way between devices
                raise ValueError(f"inverse={inverse!r} keeps an array of {leaf.dtype}: keep floating arrays only")
        return kept

    def blocks(group: Group, size: int) -> BlockState:
        weight, condition, inverted = jnp.zeros(size, dtype), jnp.zeros(size, dtype), jnp.zeros(size, jnp.int32)
        has_momentum = config.moves.momentum is not None and not group.inverse_of(config.inverse).takes_gradients
        momentum = jnp.zeros((size, group.d_in, group.d_out), dtype) if has_momentum else None
        motion = Motion(momentum, jnp.ones(size, dtype) if config.moves.adaptive_layer_rates else None)
        return BlockState(group.zeros(size, dtype), weight, inverses(group, size), condition, inverted, motion)

    def owned(group: Group) -> Owned:
        shard = shards[group.name]
        stacks = blocks(group, shard.positions)
        new = Owned(stacks, shard, None if shard.full else form_of(stacks))
        # A device's own blocks are marked as such, where `shard_map` checks that (`lax.axis_index` varies if it does).
        return as_varying(new, varying_axes(lax.axis_index(owners))) if axis_size(owners) else new

    with_bases = [group for group in config.groups if devices > 1 and group.moments(config.inverse)]
    return KfacState(
        count=jnp.zeros((), jnp.int32),
        refused=jnp.zeros((), bool),
        measured=jnp.full((), -1, jnp.int32),
        refreshed=jnp.full((), -1, jnp.int32),
        due=jnp.ones((), bool),
        refresh_due=jnp.ones((), bool),
        observe_damping=jnp.zeros((), jnp.float32),
        unitwise_damping=jnp.zeros((), jnp.float32),
        factor_decay=jnp.zeros((), jnp.float32),
        owned={group.name: owned(group) for group in config.owned},
        segment=Segment(),
        shared={group.name: blocks(group, group.size) for group in config.groups if not group.owned},
        bases={g.name: config.inverse.basis(inverses(g, g.size)) for g in with_bases},
        learning_rates=jnp.zeros(2, jnp.float32),
        members={group.name: {group.members: jnp.full((), group.size, jnp.int32)} for group in config.groups},
        metrics=KfacMetrics(*(jnp.zeros((), jnp.int32 if x in COUNTED else jnp.float32) for x in KfacMetrics._fields)),
        splits=Splits(),
        settings=settings,
    )


def match_leaves(layers: Layers, tree: Any, what: str) -> dict[str, jax.Array]:
    """Leaves of parameters or gradients by path, checked against `layers`.

    `optax.masked` replaces leaves by empty nodes: a layer may be missing as a whole, but not in part
    (`arguments.fitted` takes away biases before).
    """
    leaves = leaves_by_path(tree)
    unknown = [path for path in leaves if path not in layers.paths]
    if unknown and jax.tree_util.all_leaves([tree]):
        how = "put what flattens them, such as optax.flatten, around the other parts of the chain"
        raise ValueError(f"{what} are one array, in which layers cannot be told apart: {how}")
    if unknown:
        raise ValueError(f"{what} have a leaf {unknown[0]!r} that `layers` was found without: call find_layers again")
    masked = has_masked(tree)
    for layer in layers:
        missing = [path for path in layer.params if path not in leaves]
        if missing and (not masked or len(missing) < len(layer.params)):
            rest = [path for path in layer.params if path in leaves]
            reason = f"is masked, but {rest[0]!r} is not: {how_to_hide(missing)}" if masked else "is missing"
            raise ValueError(f"{what}: leaf {missing[0]!r} of layer {layer.name!r} {reason}")
        for path, shape in zip(layer.params, layer.shapes, strict=True):
            if path in leaves and tuple(leaves[path].shape) != shape:
                leaf = f"leaf {path!r} of layer {layer.name!r}"
                raise ValueError(f"{what}: {leaf} must have shape {shape}, but has {tuple(leaves[path].shape)}")
    if not leaves:
        raise ValueError(f"{what} have no leaves")
    return leaves


def how_to_hide(paths: Sequence[str]) -> str:
    """What to write where some leaves of a layer are for another optimizer."""
    patterns = tuple(f"^{re.escape(path)}$" for path in paths)
    out = f"kfac.find_layers(loss_fn, params, batch, skip={patterns!r})"
    return f"give both the same label in optax.partition or optax.masked, or take it out of the layer, {out}"


def has_masked(tree: Any) -> bool:
    """Whether `optax.masked` has replaced a leaf of `tree`."""
    return bool(find_nodes(tree, optax.MaskedNode))


def is_variable(node: Any) -> bool:
    """Whether a node of a tree is a mutable variable, like those in which flax nnx keeps an optimizer's state."""
    return hasattr(node, "get_value") and hasattr(node, "set_value")


def pure(tree: Any) -> Any:
    """Replace mutable variables by their values."""
    return jax.tree.map(lambda x: x.get_value() if is_variable(x) else x, tree, is_leaf=is_variable)


def find_nodes(tree: Any, kind: Any) -> list[Any]:
    """The nodes of a type in a tree, also within one another."""
    outermost = [x for x in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kind)) if isinstance(x, kind)]
    return outermost + [inner for node in outermost for inner in find_nodes(tuple(node), kind)]


def find_state(opt_state: Any, argument: str) -> KfacState:
    """The one `KfacState` in an optimizer state."""
    states = pure(find_nodes(opt_state, KfacState))
    if len(states) != 1:
        actual = f"is of type {type(opt_state).__name__} and holds {len(states)}"
        how = "; give the part of each" if states else ": it is what init of the optimizer has returned"
        raise ValueError(f"{argument} must hold one state of scale_by_kfac, but {actual}{how}")
    return states[0]


def blocks_of(state: KfacState, layers: Layers, argument: str) -> Iterator[tuple[Group, BlockState]]:
    """The blocks of each group, all of which a state of one device holds."""
    groups = group_layers(layers)
    check_groups(groups, state)
    for group in groups:
        if devices_of(state) > 1 or state.blocks[group.name].weight.ndim != 1:  # of several they are in another order
            raise ValueError(f"{argument} must be the state of one device: call kfac.state.gather_state on it")
        yield group, state.blocks[group.name]


# -- refusals --------------------------------------------------------------------------------------------------------


def check_state(config: Config, state: KfacState) -> None:
    """Raise if a state is one for other options or another number of devices."""
    check_devices(state, config.way.devices)
    if state.owned and state.settings.inverse != config.inverse:  # `kfac.kfac` may have chosen one by the layers
        actual = state.settings.inverse
        named = f"inverse={config.inverse!r}, but the optimizer state is one for inverse={actual!r}"
        raise ValueError(f"{named}: name the one that it was initialised with")
    for group in config.groups:
        owned = state.owned.get(group.name)
        if owned is not None:
            check_positions(owned)
        motion = state.shared[group.name].motion if owned is None else owned.shapes.motion
        has_momentum = config.moves.momentum is not None and not group.inverse_of(config.inverse).takes_gradients
        wanted = {"momentum": has_momentum, "adaptive_layer_rates": config.moves.adaptive_layer_rates}
        for (option, wants), array in zip(wanted.items(), motion, strict=True):
            if wants != (array is not None):
                has = f"has {'none' if array is None else 'some'} for blocks {group.name}"
                raise ValueError(f"{option}= does not go with its state, which {has}: initialise it with the same")


def check_positions(owned: Owned) -> None:
    """Raise if a device does not get its own blocks of a group."""
    if owned.blocks.weight.shape[0] != owned.shard.positions:
        needs = f"{owned.shard.positions} of the state's {owned.shard.blocks} blocks of a shape"
        how = f"but gets {owned.blocks.weight.shape[0]}: use kfac.state.state_specs for its in_specs and out_specs"
        raise ValueError(f"this device must get {needs}, {how}")


def check_groups(groups: Sequence[Group], state: KfacState) -> None:
    """Raises where a state is one for other layers."""
    sizes = {name: owned.shard.blocks for name, owned in state.owned.items()}
    sizes |= {name: blocks.weight.shape[-1] for name, blocks in state.shared.items()}
    actual = {name: f"{sizes[name]} of {next(iter(members))}" for name, members in state.members.items()}
    expected = {group.name: f"{group.size} of {group.members}" for group in groups}
    for name in expected | actual:
        has, needs = actual.get(name, "none"), expected.get(name, "none")
        if has != needs:
            how = f"the layers need {needs}. Initialise it with the same, or restore the checkpoint of this model"
            raise ValueError(f"the optimizer state is not one for these layers: its blocks {name} are {has}; {how}")


def check_devices(state: KfacState, devices: int) -> None:
    """Raises where a state is one for another number of devices."""
    if state.owned and devices_of(state) != devices:
        how = "initialise it where the axis is bound, with the same distribution=; kfac.state.scatter_state moves one"
        given = f"the optimizer state is one for {devices_of(state)} device(s), but this runs on {devices}"
        raise ValueError(f"{given}: {how} from kfac.state.gather_state to another number of devices")
