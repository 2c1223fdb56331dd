"""Which device owns which block, and the memory and messages that this takes, counted from shapes."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AbstractMesh

from kfac._checks import check, check_layers
from kfac._curvature.blocks import Group, group_layers
from kfac._curvature.preconditioner import (
    BlockPreconditioner,
    check_preconditioner,
    count_bytes,
)
from kfac._curvature.soap import SOAP
from kfac._distributed.comm import CommContext
from kfac._distributed.distribution import Distribution
from kfac._distributed.message_layout import BUCKETS, make_buckets, make_message_layout
from kfac._distributed.owners import BlockAssignment, Cost, assign_blocks, group_costs
from kfac._factors import Block, Kronecker, Statistics
from kfac._layers import Layer, Layers
from kfac._optimizer.config import Config
from kfac._optimizer.sharded_step import init_over_mesh
from kfac._optimizer.state import Settings
from kfac._optimizer.step_scaling import ScalingConfig
from kfac._packing import padded_shape


@dataclasses.dataclass(frozen=True, repr=False)
class Assignment:
    """The assignment of blocks to devices. Print it before you rent machines.

    All numbers are counted from the layers' shapes. Message sizes are in bytes: a device's input to an all-reduce, a
    reduce-scatter or an all-to-all, and a device's output from an all-gather. On `D` devices, a ring moves (D-1)/D of
    these bytes in and out of each device. An all-reduce moves twice as much.

    Attributes:
      layers: the layers.
      devices: number of devices.
      preconditioner: the kind of inverse, as for the optimizer. None: `SOAP()`, the default of `kfac.kfac`.
      gradients: how gradients get to the blocks' owners.

        - `"averaged"`: an all-reduce gives them to all devices, by `lax.pmean`, or by XLA for replicated parameters.
        - `"local"`: each device has its own gradients, as inside `jax.shard_map`. They are averaged at the owners only.
        - `"split"`: parameters are split over the devices. Their gradients go to the owners only.
      communication_dtype: the dtype of the statistics' messages, as for `value_and_grad`.
    """

    layers: Layers
    devices: int = 1
    preconditioner: BlockPreconditioner | None = None
    gradients: str = "averaged"
    communication_dtype: str = "float32"

    def __post_init__(self):
        """Check the arguments."""
        check_layers(self.layers)
        check(
            devices=self.devices,
            gradients=self.gradients,
            communication_dtype=self.communication_dtype,
        )
        check_preconditioner(self.kind)

    @property
    def kind(self) -> BlockPreconditioner:
        """The kind of inverse, which is `preconditioner`, or `SOAP()` if this is None."""
        return SOAP() if self.preconditioner is None else self.preconditioner

    @functools.cached_property
    def groups(self) -> tuple[Group, ...]:
        """The groups of equal blocks."""
        return group_layers(self.layers)

    @functools.cached_property
    def assignments(self) -> dict[str, BlockAssignment]:
        """How each Kronecker group is dealt to the devices, by group name."""
        return assign_blocks(self.costs, self.devices)

    @property
    def costs(self) -> list[Cost]:
        """The work and the size of the blocks, for each Kronecker group."""
        return group_costs(self.groups)

    @functools.cached_property
    def cost_per_device(self) -> list[int]:
        """Work of a refresh on each device, in units of `n^3`. The largest number is the critical path."""
        total = np.zeros(self.devices, int)
        for cost in self.costs:
            total += cost.work * np.sum(self.assignments[cost.name].slot_mask, axis=1)
        return total.tolist()

    @property
    def memory_per_device(self) -> int:
        """Bytes that each device holds for running averages, inverses and momentum."""
        mesh = AbstractMesh((self.devices,), ("devices",))
        comm = CommContext(("devices",), ("devices",))
        config = Config(
            self.layers, self.groups, self.kind, comm, ScalingConfig(momentum=0.9)
        )
        settings = Settings(self.layers, self.kind, Distribution(), True)
        state = jax.eval_shape(lambda: init_over_mesh(config, settings, mesh, {}))

        def in_blocks(states):
            return count_bytes(
                [(x.factors, x.preconditioner, x.momentum_state) for x in states]
            )

        spread = in_blocks(owned.blocks for owned in state.owned.values())
        spread += count_bytes(state.flat_state)
        copied = in_blocks(state.shared.values()) + count_bytes(state.bases)
        return spread // self.devices + copied

    @property
    def statistics_messages(self) -> dict[str, int]:
        """Message bytes for a batch's statistics, by kind of message.

        If gradients are split, a reduce-scatter first gives each device an equal part of each Kronecker layer's
        statistics. An all-to-all then sends these parts to the owners. An all-reduce averages all other statistics.
        """
        if self.gradients == "split" and self.devices > 1:
            narrow = jnp.dtype(self.communication_dtype).itemsize * self.packed_elements
            owned = 0
            rest = 0
            for group in self.groups:
                if group.captured and group.owned:
                    packed = jax.eval_shape(functools.partial(self._packed, group))
                    positions = self.assignments[group.name].slots
                    owned += positions * count_bytes(packed)
                elif group.captured:
                    rest += group.size * count_bytes(self._statistics(group))
            return {"reduce-scatter": narrow, "all-to-all": owned, "all-reduce": rest}

        def captured(group):
            if not group.captured:
                return None
            return self._packed(group, self.communication_dtype)

        def own(group):
            return None if group.captured else self._gradient(group)

        return dict(
            self._messages(captured, "reduce-scatter", BUCKETS)
            + self._messages(own, "reduce-scatter")
        )

    @property
    def packed_elements(self) -> int:
        """Number of elements in all captured Kronecker layers' packed statistics."""
        total = 0
        for layer in self.layers.with_factors:
            if layer.block.owned:
                for shape in layer.side_shapes.values():
                    total += layer.copies * math.prod(padded_shape(shape))
        return total

    @property
    def gradients_messages(self) -> dict[str, int]:
        """Message bytes for a step's gradients, by kind of message.

        - `"averaged"`: an all-reduce of all gradients.
        - `"local"`: a reduce-scatter averages the blocks' gradients to the owners, with an all-to-all if segments
          differ. An all-reduce averages all other gradients.
        - `"split"`: a reduce-scatter averages all gradients to their parameters' devices. An all-to-all then sends the
          blocks' gradients to the owners. An all-gather sends the gradients of unit-wise and diagonal layers to all
          devices.
        """
        if self.devices == 1:
            return {}
        whole = gradient_bytes(self.layers)
        if self.gradients == "averaged":
            return {"all-reduce": whole}
        with_blocks = self.layers.with_blocks
        owned = gradient_bytes(layer for layer in with_blocks if layer.block.owned)
        if self.gradients == "local":
            to_owners = self._messages(self._gradient, "reduce-scatter")
            return {**to_owners, "all-reduce": whole - owned}
        everywhere = gradient_bytes(with_blocks) - owned
        to_devices = {"reduce-scatter": whole, "all-gather": everywhere}
        return to_devices | self.results_messages

    @property
    def results_messages(self) -> dict[str, int]:
        """Message bytes for a step's preconditioned gradients, by kind of message.

        An all-gather sends them to all devices. If gradients are split, an all-to-all returns them to their parameters'
        devices.
        """
        if self.gradients != "split":
            return dict(self._messages(self._gradient, "all-gather"))
        if self.devices == 1:
            return {}
        elements = sum(n * g.d_out * g.d_in for n, g in with_positions(self))
        return {"all-to-all": 4 * elements}

    @property
    def fetched_messages(self) -> dict[str, int]:
        """Message bytes for the new bases that all devices get after a refresh with `EKFAC`, by kind of message."""
        return dict(self._messages(self._basis, "all-gather"))

    def _messages(
        self,
        block: Callable[[Group], Any],
        kind: str,
        number: int = 1,
    ) -> collections.Counter[str]:
        """Return the message bytes by kind, as the functions in `collectives` send them.

        Args:
          block: returns the arrays to send for a block in a group, all of one dtype, or None.
          kind: the message between devices and owners: `"reduce-scatter"` or `"all-gather"`. With the first, groups
            without owners are all-reduced.
          number: the largest number of buckets.
        """
        total: collections.Counter[str] = collections.Counter()
        if self.devices == 1:
            return total
        sizes = {}
        in_all = {}
        itemsize = 0
        for group in self.groups:
            arrays = jax.tree.leaves(jax.eval_shape(functools.partial(block, group)))
            if group.owned and arrays:
                itemsize = arrays[0].dtype.itemsize
                sizes[group.name] = sum(x.size for x in arrays)
                in_all[group.name] = group.size * sizes[group.name]
            elif kind == "reduce-scatter":
                total["all-reduce"] += group.size * count_bytes(arrays)
        for names in make_buckets(in_all, number):
            layout = make_message_layout(
                self.assignments, {name: sizes[name] for name in names}
            )
            width = layout.width
            for name in names:
                width += self.assignments[name].full * sizes[name]
            total[kind] += self.devices * width * itemsize
            total["all-to-all"] += self.devices * layout.exchanged * itemsize
        return +total  # unary plus drops zeros

    def _gradient(self, group: Group) -> Array | None:
        """Return a block's gradient, or None if the group has no owners."""
        return jnp.zeros((1, group.d_out * group.d_in)) if group.owned else None

    def _statistics(self, group: Group) -> Block:
        """Return a block's statistics."""
        return group.zeros(1, jnp.float32, group.moments(self.kind))

    def _packed(self, group: Group, dtype: str | None = None) -> Statistics:
        """Return a block's packed statistics."""
        return self._statistics(group).packed(tuple(group.shapes.values()), dtype=dtype)

    def _basis(self, group: Group) -> Kronecker | None:
        """Return a block's basis, which all devices get, or None."""
        if not group.owned:
            return None
        return self.kind.basis(self.kind.init(self._statistics(group)))

    def owners(self) -> list[tuple[str, int, int]]:
        """Return every Kronecker block's owner: `(layer name, copy or piece, device)`."""
        owners = []
        for group in self.groups:
            if group.owned:
                members = zip(group.layers, group.counts, group.starts, strict=True)
                for layer, count, start in members:
                    for copy in range(count):
                        device, _ = self.assignments[group.name].location(start + copy)
                        owners.append((layer.name, copy, device))
        return owners

    def __repr__(self) -> str:
        return _table(self)


def with_positions(assignment: Assignment) -> list[tuple[int, Group]]:
    """Return the groups whose blocks have owners, each with the number of positions for its blocks on a device."""
    return [
        (assignment.assignments[group.name].slots, group)
        for group in assignment.groups
        if group.owned
    ]


def gradient_bytes(layers: Iterable[Layer]) -> int:
    """Return the bytes of the layers' gradients in float32."""
    return 4 * sum(layer.num_params for layer in layers)


def _table(plan: Assignment) -> str:
    by_device = collections.defaultdict(list)
    for name, copy, device in plan.owners():
        layer = plan.layers[name]
        several = layer.copies * layer.pieces > 1
        by_device[device].append(f"{name}[{copy}]" if several else name)
    costs = plan.cost_per_device
    total = sum(costs)
    worst = max(costs)
    lines = [f"{'device':>6}  {'n^3 work':>9}  {'share':>6}  layers"]
    shown = plan.devices if plan.devices <= 64 else 16
    for device, cost in enumerate(costs[:shown]):
        share = cost / max(total, 1)
        owned = ", ".join(by_device[device]) or "-"
        lines.append(f"{device:>6}  {cost:>9.3g}  {share:>6.1%}  {owned}")
    if shown < plan.devices:
        lines.append(
            f"   ... {plan.devices - shown} more devices; {costs.count(0)} devices own nothing"
        )
    ratio = worst * plan.devices / total if total else 1
    lines.append(
        f"one refresh: {total:.3g} n^3 in all; busiest device {worst:.3g}, {ratio:.2f} times the mean"
    )
    return "\n".join(lines)
