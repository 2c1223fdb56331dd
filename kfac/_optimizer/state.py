"""Define the state of the preconditioner, and check a state against layers and devices."""

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
      preconditioned_norm: 2-norm of the preconditioned gradient, over the same parameters.
      condition: largest condition number over all blocks, each from the block's last inversion. `Cholesky` uses the
        1-norm of the damped factors, and inverses with eigenvectors use the 2-norm of the damped blocks. Unit-wise
        blocks use the 1-norm.
      inverse_age: number of steps since the oldest inverse in use was computed.
      kl_clip_scale: factor by which the KL clip multiplied the step; 1 without a KL clip.
      slowest: lowest adaptive layer rate, a factor on the learning rate; 1 without adaptive rates, 0 before the first
        step.
      fastest: highest adaptive layer rate, with the same exceptions.
      skipped_statistics: how many times a block left non-finite statistics out of its running average.
      failed_inversions: how many times a block kept its previous inverse because factorisation failed.
      skipped_steps: number of steps skipped because the gradient, the preconditioned gradient, or the update after a
        cast to the gradient's dtype was not finite.
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
    """The state of `k` blocks of the same shape.

    Attributes:
      factors: bias-corrected running averages, `[k, ...]`.
      weight: `[k]`, the sum of the weights in each average; 0 before the first statistics.
      inverse: the state of the `Inverse`, a tree of arrays `[k, ...]`.
      condition: `[k]`, condition number at the last successful inversion; 0 before the first.
      inverted: `[k]`, the step of the last successful inversion; 0 before the first.
      motion: momentum and adaptive rates.
    """

    factors: Block
    weight: jax.Array
    inverse: Any
    condition: jax.Array
    inverted: jax.Array
    motion: Motion


class Segment(NamedTuple):
    """The blocks that a device owns in groups with fewer blocks than devices, concatenated into a vector per part.

    Factors are packed as triangles, as in `Packed`. Outside `shard_map`, each vector concatenates all devices' vectors.
    A field is None if there are no such groups, or if their blocks do not have this part.
    """

    factors: jax.Array | None = None
    inverse: jax.Array | None = None
    motion: jax.Array | None = None


def form_of(blocks: BlockState) -> Any:
    """Return the tree structure and the array shapes `[1, ...]` of a single block, as a hashable value."""
    leaves, structure = jax.tree.flatten(blocks)
    return structure, tuple(
        jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype) for x in leaves
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Owned:
    """The blocks of a group that this device owns. Outside `shard_map`, all devices' blocks, concatenated.

    If the group has fewer blocks than devices, the parts that `Segment` stores are None here. `form` then holds the
    shapes for unpacking them, as `form_of` returns them.
    """

    blocks: BlockState
    shard: Shard = dataclasses.field(metadata={"static": True})
    form: Any = dataclasses.field(default=None, metadata={"static": True})

    @property
    def shapes(self) -> BlockState:
        """The shapes of a single block if `Segment` stores the group's blocks; otherwise the blocks themselves."""
        return self.blocks if self.form is None else jax.tree.unflatten(*self.form)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Splits:
    """Paths and `PartitionSpec`s of the parameters, if some are known to be split over a mesh; otherwise empty."""

    specs: tuple[tuple[str, PartitionSpec], ...] = ()


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Settings:
    """The optimizer's settings that `observe` needs. They contain no arrays and no schedules.

    Attributes:
      layers: the layers, without biases that `optax.masked` or `optax.partition` hides from the optimizer.
      found: the layers as `find_layers` returned them.
      inverse: the inverse for Kronecker blocks.
      distribution: how several devices are used.
      refreshes: whether `observe` refreshes inverses when it receives statistics.
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
        """The hash. It is cached because `jax.jit` uses it in each call."""
        return hash(
            (self.layers, self.found, self.inverse, self.distribution, self.refreshes)
        )


class KfacState(NamedTuple):
    """State of `scale_by_kfac`. All leaves are arrays. Dictionaries are keyed by group name, such as `kronecker_64x32`.

    Attributes:
      count: number of optimizer steps so far. Steps with a non-finite result are not counted. Schedules, the refresh
        interval and the optax parts of `kfac` do not advance in such a step.
      refused: whether the last step was rejected because its result was not finite.
      measured: the count at the last `observe` with statistics; -1 before the first.
      refreshed: the count at the last refresh of the inverses; -1 before the first.
      due: whether `observe` should be called before the next step.
      refresh_due: whether the next `observe` with statistics also refreshes the inverses, unless
        `settings.refreshes` is false.
      observe_damping: the damping for the next `observe`, evaluated at `count`.
      unitwise_damping: the factor on the damping for unit-wise and diagonal blocks, evaluated at `count`.
      factor_decay: the decay of the running averages per step, evaluated at `count`.
      owned: Kronecker blocks; each device holds its own blocks.
      segment: flat vectors for groups in `owned` that have fewer blocks than devices.
      shared: unit-wise and diagonal blocks, the same on all devices.
      bases: eigenvectors of blocks with moments, the same on all devices. Empty on a single device or without `Ekfac`.
      learning_rates: `[2]`, the last and the highest learning rate so far, for `adaptive_layer_rates`.
      members: for each group, a dictionary with a single entry. Its key lists the group's layer names in block order,
        and its value is the number of blocks. So a checkpoint for other layer names has another tree structure.
      metrics: scalars of the last step.
      splits: how parameters are split over a mesh's automatic axes. Static, because arrays do not show this split under
        `jit`.
      settings: the optimizer's settings that `observe` needs. Static.
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
        """All blocks that this device holds, both its own and the shared blocks, as stacks of `k` blocks per group.

        Each stack has the fields `factors` (running averages, a `Kronecker` or a `Unitwise` of arrays `[k, ...]`),
        `weight` (`[k]`, 0 before the first statistics), `inverse`, `condition` (`[k]`), `inverted` (`[k]`, the step of
        the last inversion) and `motion` (momentum and rates). If a group has fewer blocks than devices, the parts that
        `segment` stores are None.
        """
        return {name: owned.blocks for name, owned in self.owned.items()} | self.shared


class AdaptiveDampingState(NamedTuple):
    """State of `kfac.presets.adaptive_damping`. It is defined here because `diagnostics` reads it.

    Attributes:
      count: number of updates so far.
      next_damping: the damping of the next step, float32.
      reduction_ratio: actual change of the loss divided by the predicted change, at the last measurement; NaN before
        the first.
      inner: the state of the optimizer.
      taken_back: number of steps rejected so far because the loss grew or became non-finite.
      again: whether the last step was rejected, so that the next step is measured.
    """

    count: jax.Array  # type: ignore[assignment]  # optax's name for it
    next_damping: (
        jax.Array
    )  # not `damping`: `optax.tree.get(opt_state, "damping")` must find a single value
    reduction_ratio: jax.Array
    inner: Any
    taken_back: jax.Array
    again: jax.Array


def shards_of(state: KfacState) -> dict[str, Shard]:
    """Return the assignment of blocks to devices, for each group whose blocks have owners."""
    return {name: owned.shard for name, owned in state.owned.items()}


def splits_of(state: KfacState) -> dict[str, PartitionSpec]:
    """Return the parameters' `PartitionSpec`s over a mesh, by path.

    They come from `init`, or from `find_layers` if `init` found no split parameters.
    """
    return dict(state.splits.specs or state.settings.found.splits)


def devices_of(state: KfacState) -> int:
    """Return the number of devices that the blocks are assigned to; 1 if no group has owners."""
    return max((shard.devices for shard in shards_of(state).values()), default=1)


def with_blocks(state: KfacState, blocks: dict[str, BlockState]) -> KfacState:
    """Return the state with `blocks` in place of its blocks."""
    owned = {
        name: dataclasses.replace(owned, blocks=blocks[name])
        for name, owned in state.owned.items()
    }
    return state._replace(
        owned=owned, shared={name: blocks[name] for name in state.shared}
    )


def init_state(config: Config, settings: Settings, params: Any) -> KfacState:
    """Return the state before the first step, with all blocks in stacks.

    `segment.closed` then moves the blocks of groups with fewer blocks than devices into the state's flat vectors.
    """
    # `optax.tree.map_params` calls `init` with a placeholder that has no leaves.
    leaves = (
        match_leaves(config.layers, params, "params") if jax.tree.leaves(params) else {}
    )
    # Averages and momenta are float64 if a parameter is float64, and float32 otherwise.
    dtype = jnp.result_type(jnp.float32, *(leaf.dtype for leaf in leaves.values()))
    devices, owners = axis_size(config.way.owners) or 1, config.way.owners
    shards = make_shards(group_costs(config.groups), devices)

    def inverses(group: Group, size: int) -> Any:
        inverse = group.inverse_of(config.inverse)
        kept = inverse.init(group.zeros(size, dtype, group.moments(config.inverse)))
        for leaf in jax.tree.leaves(kept):
            if not jnp.issubdtype(
                leaf.dtype, jnp.floating
            ):  # messages between devices would round integers
                raise ValueError(
                    f"inverse={inverse!r} keeps an array of {leaf.dtype}: keep floating arrays only"
                )
        return kept

    def blocks(group: Group, size: int) -> BlockState:
        weight, condition, inverted = (
            jnp.zeros(size, dtype),
            jnp.zeros(size, dtype),
            jnp.zeros(size, jnp.int32),
        )
        has_momentum = (
            config.moves.momentum is not None
            and not group.inverse_of(config.inverse).takes_gradients
        )
        momentum = (
            jnp.zeros((size, group.d_in, group.d_out), dtype) if has_momentum else None
        )
        motion = Motion(
            momentum,
            jnp.ones(size, dtype) if config.moves.adaptive_layer_rates else None,
        )
        return BlockState(
            group.zeros(size, dtype),
            weight,
            inverses(group, size),
            condition,
            inverted,
            motion,
        )

    def owned(group: Group) -> Owned:
        shard = shards[group.name]
        stacks = blocks(group, shard.positions)
        new = Owned(stacks, shard, None if shard.full else form_of(stacks))
        # Mark the blocks as varying over devices if `shard_map` checks this. `lax.axis_index` varies only if it does.
        return (
            as_varying(new, varying_axes(lax.axis_index(owners)))
            if axis_size(owners)
            else new
        )

    with_bases = [
        group
        for group in config.groups
        if devices > 1 and group.moments(config.inverse)
    ]
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
        shared={
            group.name: blocks(group, group.size)
            for group in config.groups
            if not group.owned
        },
        bases={g.name: config.inverse.basis(inverses(g, g.size)) for g in with_bases},
        learning_rates=jnp.zeros(2, jnp.float32),
        members={
            group.name: {group.members: jnp.full((), group.size, jnp.int32)}
            for group in config.groups
        },
        metrics=KfacMetrics(
            *(
                jnp.zeros((), jnp.int32 if x in COUNTED else jnp.float32)
                for x in KfacMetrics._fields
            )
        ),
        splits=Splits(),
        settings=settings,
    )


def match_leaves(layers: Layers, tree: Any, what: str) -> dict[str, jax.Array]:
    """Return the leaves of parameters or gradients by path, after checking them against `layers`.

    `optax.masked` replaces leaves by empty nodes. It may hide a whole layer, but not only some of its leaves.
    `arguments.fitted` has already removed hidden biases from `layers`.

    Args:
      layers: the layers.
      tree: the parameters or gradients.
      what: the name of `tree` for error messages.

    Raises:
      ValueError: if leaves are unknown, missing or of another shape, or if there are no leaves.
    """
    leaves = leaves_by_path(tree)
    unknown = [path for path in leaves if path not in layers.paths]
    if unknown and jax.tree_util.all_leaves([tree]):
        how = "put what flattens them, such as optax.flatten, around the other parts of the chain"
        raise ValueError(
            f"{what} are one array, in which layers cannot be told apart: {how}"
        )
    if unknown:
        raise ValueError(
            f"{what} have a leaf {unknown[0]!r} that `layers` was found without: call find_layers again"
        )
    masked = has_masked(tree)
    for layer in layers:
        missing = [path for path in layer.params if path not in leaves]
        if missing and (not masked or len(missing) < len(layer.params)):
            rest = [path for path in layer.params if path in leaves]
            reason = (
                f"is masked, but {rest[0]!r} is not: {how_to_hide(missing)}"
                if masked
                else "is missing"
            )
            raise ValueError(
                f"{what}: leaf {missing[0]!r} of layer {layer.name!r} {reason}"
            )
        for path, shape in zip(layer.params, layer.shapes, strict=True):
            if path in leaves and tuple(leaves[path].shape) != shape:
                leaf = f"leaf {path!r} of layer {layer.name!r}"
                raise ValueError(
                    f"{what}: {leaf} must have shape {shape}, but has {tuple(leaves[path].shape)}"
                )
    if not leaves:
        raise ValueError(f"{what} have no leaves")
    return leaves


def how_to_hide(paths: Sequence[str]) -> str:
    """Return advice for an error message about a layer that has only some of its leaves masked."""
    patterns = tuple(f"^{re.escape(path)}$" for path in paths)
    out = f"kfac.find_layers(loss_fn, params, batch, skip={patterns!r})"
    return f"give both the same label in optax.partition or optax.masked, or take it out of the layer, {out}"


def has_masked(tree: Any) -> bool:
    """Return whether `optax.masked` has replaced a leaf of `tree`."""
    return bool(find_nodes(tree, optax.MaskedNode))


def is_variable(node: Any) -> bool:
    """Return whether a tree node is a mutable variable, such as flax nnx uses for an optimizer's state."""
    return hasattr(node, "get_value") and hasattr(node, "set_value")


def pure(tree: Any) -> Any:
    """Replace the mutable variables in a tree by their values."""
    return jax.tree.map(
        lambda x: x.get_value() if is_variable(x) else x, tree, is_leaf=is_variable
    )


def find_nodes(tree: Any, kind: Any) -> list[Any]:
    """Return the nodes of a type in a tree, including nodes inside such nodes."""
    outermost = [
        x
        for x in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kind))
        if isinstance(x, kind)
    ]
    return outermost + [
        inner for node in outermost for inner in find_nodes(tuple(node), kind)
    ]


def find_state(opt_state: Any, argument: str) -> KfacState:
    """Return the only `KfacState` in an optimizer state. Raise a `ValueError` unless there is exactly one."""
    states = pure(find_nodes(opt_state, KfacState))
    if len(states) != 1:
        actual = f"is of type {type(opt_state).__name__} and holds {len(states)}"
        how = (
            "; give the part of each"
            if states
            else ": it is what init of the optimizer has returned"
        )
        raise ValueError(
            f"{argument} must hold one state of scale_by_kfac, but {actual}{how}"
        )
    return states[0]


def blocks_of(
    state: KfacState, layers: Layers, argument: str
) -> Iterator[tuple[Group, BlockState]]:
    """Yield each group with its blocks, from a state for a single device.

    Raises:
      ValueError: if the state is for other layers or for several devices.
    """
    groups = group_layers(layers)
    check_groups(groups, state)
    for group in groups:
        if (
            devices_of(state) > 1 or state.blocks[group.name].weight.ndim != 1
        ):  # several devices order them differently
            raise ValueError(
                f"{argument} must be the state of one device: call kfac.state.gather_state on it"
            )
        yield group, state.blocks[group.name]


# -- refusals --------------------------------------------------------------------------------------------------------


def check_state(config: Config, state: KfacState) -> None:
    """Raise a `ValueError` if the state was initialised with other options or another number of devices."""
    check_devices(state, config.way.devices)
    if (
        state.owned and state.settings.inverse != config.inverse
    ):  # `kfac.kfac` may have chosen it from the layers
        raise ValueError(
            f"inverse={config.inverse!r}, but the optimizer state is one for inverse={state.settings.inverse!r}: name "
            "the one that it was initialised with"
        )
    for group in config.groups:
        owned = state.owned.get(group.name)
        if owned is not None:
            check_positions(owned)
        motion = (
            state.shared[group.name].motion if owned is None else owned.shapes.motion
        )
        has_momentum = (
            config.moves.momentum is not None
            and not group.inverse_of(config.inverse).takes_gradients
        )
        wanted = {
            "momentum": has_momentum,
            "adaptive_layer_rates": config.moves.adaptive_layer_rates,
        }
        for (option, wants), array in zip(wanted.items(), motion, strict=True):
            if wants != (array is not None):
                has = (
                    f"has {'none' if array is None else 'some'} for blocks {group.name}"
                )
                raise ValueError(
                    f"{option}= does not go with its state, which {has}: initialise it with the same"
                )


def check_positions(owned: Owned) -> None:
    """Raise a `ValueError` if the number of a group's blocks here is not the number that each device holds."""
    if owned.blocks.weight.shape[0] != owned.shard.positions:
        needs = f"{owned.shard.positions} of the state's {owned.shard.blocks} blocks of a shape"
        how = f"but gets {owned.blocks.weight.shape[0]}: use kfac.state.state_specs for its in_specs and out_specs"
        raise ValueError(f"this device must get {needs}, {how}")


def check_groups(groups: Sequence[Group], state: KfacState) -> None:
    """Raise a `ValueError` if the state was initialised with other layers."""
    sizes = {name: owned.shard.blocks for name, owned in state.owned.items()}
    sizes |= {name: blocks.weight.shape[-1] for name, blocks in state.shared.items()}
    actual = {
        name: f"{sizes[name]} of {next(iter(members))}"
        for name, members in state.members.items()
    }
    expected = {group.name: f"{group.size} of {group.members}" for group in groups}
    for name in expected | actual:
        has, needs = actual.get(name, "none"), expected.get(name, "none")
        if has != needs:
            how = f"the layers need {needs}. Initialise it with the same, or restore the checkpoint of this model"
            raise ValueError(
                f"the optimizer state is not one for these layers: its blocks {name} are {has}; {how}"
            )


def check_devices(state: KfacState, devices: int) -> None:
    """Raise a `ValueError` if the state was initialised for another number of devices."""
    if state.owned and devices_of(state) != devices:
        how = "initialise it where the axis is bound, with the same distribution=; kfac.state.scatter_state moves one"
        given = f"the optimizer state is one for {devices_of(state)} device(s), but this runs on {devices}"
        raise ValueError(
            f"{given}: {how} from kfac.state.gather_state to another number of devices"
        )
