"""Define the state of the preconditioner, and check a state against layers and devices."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import optax
from jax import Array
from jax.sharding import PartitionSpec

from kfac._curvature.blocks import Group, group_layers
from kfac._curvature.preconditioner import BlockPreconditioner
from kfac._distributed.distribution import Distribution
from kfac._distributed.owners import BlockAssignment, assign_blocks
from kfac._factors import Block
from kfac._layers import Layers
from kfac._leaves import leaves_by_path
from kfac._mesh import AxisName, PyTree
from kfac._optimizer.interval import Interval
from kfac._optimizer.options import Options
from kfac._optimizer.step_scaling import MomentumState

Node = TypeVar("Node", bound=tuple)


class KfacMetrics(NamedTuple):
    """Scalars of the last step, for `diagnostics`.

    Attributes:
      damping: the damping of the last step.
      gradient_norm: 2-norm of the gradient, over the parameters that have a curvature block.
      preconditioned_norm: 2-norm of the preconditioned gradient, over the same parameters.
      condition: largest condition number over all blocks, see `diagnostics`.
      inverse_age: number of steps since the oldest preconditioner in use was refreshed.
      kl_clip_scale: factor by which the KL clip multiplied the step; 1 without a KL clip.
      min_layer_rate: lowest adaptive layer rate, a factor on the learning rate; 1 without adaptive rates, 0 before the
        first step.
      max_layer_rate: highest adaptive layer rate, with the same exceptions.
      skipped_statistics: how many times a block left non-finite statistics out of its running average.
      failed_inversions: how many times a block kept its preconditioner because a factorisation failed.
      skipped_steps: number of steps skipped because the gradient, the preconditioned gradient, or the update after a
        cast to the gradient's dtype was not finite.
    """

    damping: Array
    gradient_norm: Array
    preconditioned_norm: Array
    condition: Array
    kl_clip_scale: Array
    min_layer_rate: Array
    max_layer_rate: Array
    inverse_age: Array
    skipped_statistics: Array
    failed_inversions: Array
    skipped_steps: Array


# The state of a `BlockPreconditioner`: any tree of arrays `[k, ...]`.
PreconditionerState: TypeAlias = Any


class BlockState(NamedTuple):
    """The state of `k` blocks of the same shape.

    Attributes:
      factors: bias-corrected running averages, `[k, ...]`.
      weight: `[k]`, the sum of the weights in each average; 0 before the first statistics.
      preconditioner: the state of the `BlockPreconditioner`, a tree of arrays `[k, ...]`.
      condition: `[k]`, condition number at the last successful refresh; 0 before the first.
      inverted: `[k]`, the step of the last successful refresh; 0 before the first.
      momentum_state: momentum and adaptive rates.
    """

    factors: Block
    weight: Array
    preconditioner: PreconditionerState
    condition: Array
    inverted: Array
    momentum_state: MomentumState

    @property
    def ready(self) -> Array:
        """Whether each block has been refreshed, `[k]`."""
        return self.condition > 0


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Settings:
    """The layers, and how their blocks are preconditioned. This contains no arrays and no schedules.

    Attributes:
      layers: the layers.
      preconditioner: the preconditioner of Kronecker blocks.
      distribution: how several devices are used.
      refreshes: whether `observe` refreshes preconditioners when it receives statistics.
      interval: the interval between statistics; None if it is an array.
      devices: the number of devices to which blocks are dealt.
      param_specs: paths and `PartitionSpec`s of the parameters, if some are known to be split over a mesh's automatic
        axes. Arrays do not show this split under `jit`.
    """

    layers: Layers
    preconditioner: BlockPreconditioner
    distribution: Distribution
    refreshes: bool
    interval: Interval | None = None
    devices: int = 1
    param_specs: tuple[tuple[str, PartitionSpec], ...] = ()

    @functools.cached_property
    def groups(self) -> tuple[Group, ...]:
        """The layers' groups of equal block shape."""
        return group_layers(self.layers, self.preconditioner)

    @functools.cached_property
    def assignments(self) -> dict[str, BlockAssignment]:
        """How each group's blocks are dealt to devices."""
        return assign_blocks(self.groups, self.devices)

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        """The hash. It is cached because `jax.jit` uses it in each call."""
        return hash(tuple(getattr(self, x.name) for x in dataclasses.fields(self)))


class KfacState(NamedTuple):
    """State of `scale_by_kfac`. All leaves are arrays. Dictionaries are keyed by group name, such as `kronecker_64x32`.

    Attributes:
      count: number of optimizer steps so far. Steps with a non-finite result are not counted. Schedules and the optax
        parts of `kfac` do not advance in such a step. The interval between statistics advances, so that the host can
        count it without asking the device.
      step_rejected: whether the last step was rejected because its result was not finite.
      last_statistics_step: the count at the last `observe` with statistics; -1 before the first.
      refreshed: the count at the last refresh of the preconditioners; -1 until the first refresh of all blocks.
      due: whether `observe` should be called before the next step.
      refresh_due: whether the next `observe` with statistics also refreshes the preconditioners, unless
        `settings.refreshes` is false.
      observe_damping: the damping for the next `observe`, evaluated at `count`.
      unitwise_damping_scale: the factor on the damping for unit-wise and diagonal blocks, evaluated at `count`.
      factor_ema_decay: the decay of the running averages per step, evaluated at `count`.
      blocks: the blocks that this device owns, as stacks of `k` blocks for each group. Outside `shard_map`, all
        devices' blocks. Each stack has the fields `factors` (running averages, a `Kronecker` or a `Unitwise` of arrays
        `[k, ...]`), `weight` (`[k]`, 0 before the first statistics), `preconditioner`, `condition` (`[k]`), `inverted`
        (`[k]`, the step of the last refresh) and `momentum_state` (momentum and rates). If a group has fewer blocks
        than devices, the fields that `flat_state` stores are `Place` objects, which point into its rows.
      flat_state: the groups that have fewer blocks than devices. For each stored field of `BlockState`, a row
        `[1, elements]`; outside `shard_map`, a row for each device. Factors are packed as triangles, as in `Packed`.
      learning_rates: `[2]`, the last and the highest learning rate so far, for `adaptive_layer_rates`.
      members: for each group, a dictionary with a single entry. Its key lists the group's layer names in block order,
        and its value is the number of blocks. So a checkpoint for other layer names has another tree structure.
      metrics: scalars of the last step.
      settings: the optimizer's settings that `observe` needs. Static.
    """

    count: Array  # type: ignore[assignment]  # optax's name for it
    step_rejected: Array
    last_statistics_step: Array
    refreshed: Array
    due: Array
    refresh_due: Array
    observe_damping: Array
    unitwise_damping_scale: Array
    factor_ema_decay: Array
    blocks: dict[str, BlockState]
    flat_state: dict[str, Array]
    learning_rates: Array
    members: dict[str, dict[str, Array]]
    metrics: KfacMetrics
    settings: Settings


def state_spec(axis_name: AxisName) -> KfacState:
    """Return the `PartitionSpec`s of a `KfacState`, each of which applies to a whole field."""
    specs: dict[str, Any] = dict.fromkeys(KfacState._fields, PartitionSpec())
    specs["blocks"] = specs["flat_state"] = PartitionSpec(axis_name)
    return KfacState(**specs)


class AdaptiveDampingState(NamedTuple):
    """State of `kfac.adaptive_damping`. It is defined here because `diagnostics` reads it.

    Attributes:
      count: number of updates so far.
      next_damping: the damping of the next step, float32.
      reduction_ratio: actual change of the loss divided by the predicted change, at the last measurement; 0 before
        the first.
      inner: the state of the optimizer.
      rejected_steps: number of steps rejected so far because the loss grew or became non-finite.
      again: whether the last step was rejected, so that the next step is measured.
    """

    count: Array  # type: ignore[assignment]  # optax's name for it
    # Not `damping`: `optax.tree.get(opt_state, "damping")` must find a single value.
    next_damping: Array
    reduction_ratio: Array
    inner: Any
    rejected_steps: Array
    again: Array


def match_leaves(
    layers: Layers,
    tree: PyTree,
    what: str,
) -> dict[str, Array]:
    """Return the leaves of parameters or gradients by path, after checking them against `layers`.

    `optax.masked` replaces leaves by empty nodes. It may hide a whole layer, but not only some of its leaves.

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
        raise ValueError(
            f"{what} are one array, in which layers cannot be told apart: put what flattens them, such as "
            "optax.flatten, around the other parts of the chain"
        )
    if unknown:
        raise ValueError(
            f"{what} have a leaf {unknown[0]!r} that `layers` was found without: call find_layers again"
        )
    masked = find_nodes(tree, optax.MaskedNode)
    for layer in layers:
        present = [path for path in layer.params if path in leaves]
        missing = [path for path in layer.params if path not in leaves]
        if missing and (present or not masked):
            reason = "is missing"
            if masked:
                rules = {f"^{re.escape(path)}$": "skip" for path in missing}
                reason = (
                    f"is masked, but {present[0]!r} is not: give both the same label in optax.partition or "
                    "optax.masked, or take it out of the layer, "
                    f"kfac.find_layers(loss_fn, params, batch, rules={rules!r})"
                )
            raise ValueError(
                f"{what}: leaf {missing[0]!r} of layer {layer.name!r} {reason}"
            )
        for path, shape in zip(layer.params, layer.shapes, strict=True):
            if path in leaves and tuple(leaves[path].shape) != shape:
                raise ValueError(
                    f"{what}: leaf {path!r} of layer {layer.name!r} must have shape {shape}, but has "
                    f"{tuple(leaves[path].shape)}"
                )
    if not leaves:
        raise ValueError(f"{what} have no leaves")
    return leaves


def is_variable(node: object) -> bool:
    """Return whether a tree node is a mutable variable, such as flax nnx uses for an optimizer's state."""
    return hasattr(node, "get_value") and hasattr(node, "set_value")


def pure(tree: PyTree) -> PyTree:
    """Replace the mutable variables in a tree by their values."""

    def value(leaf):
        return leaf.get_value() if is_variable(leaf) else leaf

    return jax.tree.map(value, tree, is_leaf=is_variable)


def find_nodes(tree: PyTree, kind: type[Node]) -> list[Node]:
    """Return the nodes of a type in a tree, including nodes inside such nodes."""

    def is_kind(node):
        return isinstance(node, kind)

    outermost = [x for x in jax.tree.leaves(tree, is_leaf=is_kind) if is_kind(x)]
    inside = [find_nodes(tuple(node), kind) for node in outermost]
    return sum(inside, outermost)


def find_states(opt_state: PyTree, argument: str) -> list[KfacState]:
    """Return the K-FAC states in a tree. Raise a `ValueError` if there is no such state."""
    states = find_nodes(opt_state, KfacState)
    if not states:
        raise ValueError(
            f"{argument} holds no state of kfac.kfac, but is of type {type(opt_state).__name__}: pass what tx.init "
            "returned"
        )
    return states


def find_state(opt_state: PyTree, argument: str) -> KfacState:
    """Return the only K-FAC state in a tree. Raise a `ValueError` unless there is exactly one."""
    states = find_states(opt_state, argument)
    if len(states) > 1:
        raise ValueError(
            f"{argument} must hold one K-FAC state, but holds {len(states)}: give the part of each"
        )
    return pure(states[0])


def on_states(
    fn: Callable[[KfacState], PyTree],
    tree: PyTree,
    other: Callable[[PyTree], PyTree] = lambda leaf: leaf,
) -> PyTree:
    """Map `fn` over the K-FAC states in a tree, and `other` over all other leaves."""

    def is_state(node):
        return isinstance(node, KfacState)

    def mapped(node):
        return fn(node) if is_state(node) else other(node)

    return jax.tree.map(mapped, tree, is_leaf=is_state)


def blocks_of(
    state: KfacState,
    layers: Layers,
    argument: str,
) -> Iterator[tuple[Group, BlockState]]:
    """Yield each group with its blocks, from a state for a single device.

    Raises:
      ValueError: if the state is for other layers or for several devices.
    """
    groups = group_layers(layers, state.settings.preconditioner)
    check_groups(groups, state)
    for group in groups:
        blocks = state.blocks[group.name]
        # Several devices order their blocks differently.
        if state.settings.devices > 1 or blocks.weight.ndim != 1:
            raise ValueError(
                f"{argument} must be the state of one device: call kfac.state.gather_state on it"
            )
        yield group, blocks


# -- refusals --------------------------------------------------------------------------------------------------------


def check_state(settings: Settings, devices: int, state: KfacState) -> None:
    """Raise a `ValueError` if the state was initialised with other settings or another number of devices."""
    check_blocks(state, devices)
    if state.settings.preconditioner != settings.preconditioner:
        raise ValueError(
            f"preconditioner={settings.preconditioner!r}, but the optimizer state is one for "
            f"preconditioner={state.settings.preconditioner!r}: name the one that it was initialised with"
        )


def check_momentum(options: Options, group: Group, state: MomentumState) -> None:
    """Raise a `ValueError` if the state of a group was initialised with other options."""
    for option, expected, array in (
        ("momentum", options.has_momentum(group), state.momentum),
        ("adaptive_layer_rates", options.adaptive_layer_rates, state.rate),
    ):
        if expected != (array is not None):
            has = "none" if expected else "some"
            raise ValueError(
                f"{option}= does not go with its state, which has {has} for blocks {group.name}: initialise it with "
                "the same"
            )


def check_blocks(state: KfacState, devices: int) -> None:
    """Raise a `ValueError` if the state here does not hold one device's blocks for this number of devices."""
    check_devices(state, devices)
    for name, assignment in state.settings.assignments.items():
        actual = len(state.blocks[name].weight)
        expected = assignment.slots
        if actual != expected:
            raise ValueError(
                f"this device must get {expected} of the state's {assignment.blocks} blocks of a shape, but gets "
                f"{actual}: use kfac.state.state_specs for its in_specs and out_specs"
            )


def check_groups(groups: Sequence[Group], state: KfacState) -> None:
    """Raise a `ValueError` if the state was initialised with other layers."""

    def described(groups):
        return {group.name: f"{group.size} of {group.members}" for group in groups}

    actual = described(state.settings.groups)
    expected = described(groups)
    for name in expected | actual:
        has = actual.get(name, "none")
        needs = expected.get(name, "none")
        if has != needs:
            raise ValueError(
                f"the optimizer state is not one for these layers: its blocks {name} are {has}; the layers need "
                f"{needs}. Initialise it with the same, or restore the checkpoint of this model"
            )


def check_devices(state: KfacState, devices: int) -> None:
    """Raise a `ValueError` if the state was initialised for another number of devices."""
    if state.settings.devices != devices:
        raise ValueError(
            f"the optimizer state is one for {state.settings.devices} device(s), but this runs on {devices}: "
            "initialise it where the axis is bound, with the same distribution=; kfac.state.scatter_state moves one "
            "from kfac.state.gather_state to another number of devices"
        )
