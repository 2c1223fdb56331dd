"""Which device owns which block, and the memory and messages that this takes, counted from shapes."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh

from kfac._checks import check, check_layers
from kfac._curvature.blocks import Group, group_layers
from kfac._curvature.inverse import Inverse, check_inverse, count_bytes
from kfac._curvature.soap import Soap
from kfac._distributed.distribution import Distribution
from kfac._distributed.owners import Cost, Shard, group_costs, make_shards
from kfac._distributed.segments import BUCKETS, make_buckets, make_segments
from kfac._distributed.ways import Way
from kfac._factors import Block
from kfac._layers import Layers
from kfac._optimizer.moves import Moves
from kfac._optimizer.over_mesh import init_over_mesh
from kfac._optimizer.place import Config
from kfac._optimizer.state import Settings
from kfac._packing import room


@dataclasses.dataclass(frozen=True, repr=False)
class Assignment:
    """The assignment of blocks to devices. Print it before you rent machines.

    All numbers are counted from the layers' shapes. Message sizes are in bytes: a device's input to an all-reduce, a
    reduce-scatter or an all-to-all, and a device's output from an all-gather. On `D` devices, a ring moves (D-1)/D of
    these bytes in and out of each device. An all-reduce moves twice as much.

    Attributes:
      layers: the layers.
      devices: number of devices.
      inverse: the kind of inverse, as for the optimizer. None: `Soap()`, the default of `kfac.kfac`.
      gradients: how gradients get to the blocks' owners.

        - `"averaged"`: an all-reduce gives them to all devices, by `lax.pmean`, or by XLA for replicated parameters.
        - `"local"`: each device has its own gradients, as inside `jax.shard_map`. They are averaged at the owners only.
        - `"split"`: parameters are split over the devices. Their gradients go to the owners only.
      communication_dtype: the dtype of the statistics' messages, as for `value_and_grad`.
    """

    layers: Layers
    devices: int = 1
    inverse: Inverse | None = None
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
        check_inverse(self.kind)

    @property
    def kind(self) -> Inverse:
        """The kind of inverse, which is `inverse`, or `Soap()` if this is None."""
        return Soap() if self.inverse is None else self.inverse

    @functools.cached_property
    def groups(self) -> tuple[Group, ...]:
        """The groups of equal blocks."""
        return group_layers(self.layers)

    @functools.cached_property
    def shards(self) -> dict[str, Shard]:
        """How each Kronecker group is dealt to the devices, by group name."""
        return make_shards(self.costs, self.devices)

    @property
    def costs(self) -> list[Cost]:
        """The work and the size of the blocks, for each Kronecker group."""
        return group_costs(self.groups)

    @functools.cached_property
    def cost_per_device(self) -> list[int]:
        """Work of a refresh on each device, in units of `n^3`. The largest number is the critical path."""
        shares = [
            cost.work * np.sum(self.shards[cost.name].held, axis=1)
            for cost in self.costs
        ]
        return sum(shares, np.zeros(self.devices, int)).tolist()

    @property
    def memory_per_device(self) -> int:
        """Bytes that each device holds for running averages, inverses and momentum."""
        mesh, way = (
            AbstractMesh((self.devices,), ("devices",)),
            Way(("devices",), ("devices",)),
        )
        config = Config(self.layers, self.groups, self.kind, way, Moves(momentum=0.9))
        settings = Settings(self.layers, self.layers, self.kind, Distribution(), True)
        state = jax.eval_shape(lambda: init_over_mesh(config, settings, mesh, {}))

        def held(owned):
            return count_bytes([(x.factors, x.inverse, x.motion) for x in owned])

        dealt = held(x.blocks for x in state.owned.values()) + count_bytes(
            state.segment
        )
        return (
            dealt // self.devices
            + held(state.shared.values())
            + count_bytes(state.bases)
        )

    @property
    def statistics_messages(self) -> dict[str, int]:
        """Message bytes for a batch's statistics, by kind of message.

        If gradients are split, a reduce-scatter first gives each device an equal part of each Kronecker layer's
        statistics. An all-to-all then sends these parts to the owners. An all-reduce averages all other statistics.
        """
        wire = self.communication_dtype
        if self.gradients == "split" and self.devices > 1:
            captured = [group for group in self.groups if group.captured]
            rest = sum(
                g.size * count_bytes(self._statistics(g))
                for g in captured
                if not g.owned
            )
            sizes = {
                g.name: count_bytes(jax.eval_shape(lambda g=g: self._packed(g)))
                for g in captured
                if g.owned
            }
            owned = sum(
                self.shards[name].positions * size for name, size in sizes.items()
            )
            narrow = jnp.dtype(wire).itemsize * self.packed_elements
            return {"reduce-scatter": narrow, "all-to-all": owned, "all-reduce": rest}

        packed = self._messages(
            lambda g: self._packed(g, wire) if g.captured else None,
            "reduce-scatter",
            BUCKETS,
        )
        own = self._messages(
            lambda g: None if g.captured else self._gradient(g), "reduce-scatter"
        )
        return {kind: packed.get(kind, 0) + own.get(kind, 0) for kind in packed | own}

    @property
    def packed_elements(self) -> int:
        """Number of elements in all captured Kronecker layers' packed statistics."""
        layers = [
            layer
            for group in self.groups
            if group.captured and group.owned
            for layer in group.layers
        ]
        return sum(
            layer.copies * math.prod(room(shape))
            for layer in layers
            for shape in layer.side_shapes.values()
        )

    def _packed(self, group: Group, dtype: Any = None) -> Any:
        """Return a block's packed statistics."""
        return self._statistics(group).packed(tuple(group.shapes.values()), dtype=dtype)

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
        gathered = [
            layer for group in self.groups if group.owned for layer in group.layers
        ]
        if self.gradients == "split":
            everywhere = 4 * sum(
                layer.num_params
                for layer in self.layers.with_blocks
                if layer not in gathered
            )
            whole = 4 * sum(layer.num_params for layer in self.layers)
            return {
                "reduce-scatter": whole,
                "all-gather": everywhere,
            } | self.results_messages
        to_owners = gathered if self.gradients == "local" else []
        averaged = 4 * sum(
            layer.num_params for layer in self.layers if layer not in to_owners
        )
        sent = self._messages(self._gradient, "reduce-scatter") if to_owners else {}
        return sent | {"all-reduce": averaged}

    @property
    def results_messages(self) -> dict[str, int]:
        """Message bytes for a step's preconditioned gradients, by kind of message.

        An all-gather sends them to all devices. If gradients are split, an all-to-all returns them to their parameters'
        devices.
        """
        if self.gradients != "split":
            return self._messages(self._gradient, "all-gather")
        blocks = sum(
            self.shards[g.name].positions * g.d_out * g.d_in
            for g in self.groups
            if g.owned
        )
        return {"all-to-all": 4 * blocks} if self.devices > 1 else {}

    @property
    def fetched_messages(self) -> dict[str, int]:
        """Message bytes for the new bases that all devices get after a refresh with `Ekfac`, by kind of message."""
        return self._messages(self._basis, "all-gather")

    def _messages(
        self, block: Callable[[Group], Any], kind: str, number: int = 1
    ) -> dict[str, int]:
        """Return the message bytes by kind, as the functions in `collectives` send them.

        Args:
          block: returns the arrays to send for a block in a group, or None.
          kind: the message between devices and owners: `"reduce-scatter"` or `"all-gather"`. With the first, groups
            without owners are all-reduced.
          number: the largest number of buckets.
        """
        arrays = {
            g: jax.tree.leaves(jax.eval_shape(functools.partial(block, g)))
            for g in self.groups
        }
        itemsize = max(
            (
                x.dtype.itemsize
                for g, leaves in arrays.items()
                if g.owned
                for x in leaves
            ),
            default=1,
        )
        sizes = {}
        total: collections.Counter[str] = collections.Counter()
        for group, leaves in arrays.items():
            if group.owned:
                sizes[group.name] = count_bytes(leaves) // itemsize
            elif kind == "reduce-scatter":
                total["all-reduce"] += group.size * count_bytes(leaves)
        buckets = make_buckets(
            {
                name: self.shards[name].blocks * size
                for name, size in sizes.items()
                if size
            },
            number,
        )
        for names in buckets:
            segments = make_segments(self.shards, {name: sizes[name] for name in names})
            width = segments.width + sum(
                self.shards[name].full * sizes[name] for name in names
            )
            total[kind] += self.devices * width * itemsize
            total["all-to-all"] += self.devices * segments.exchanged * itemsize
        return {kind: size for kind, size in total.items() if size and self.devices > 1}

    def _gradient(self, group: Group) -> Any:
        """Return a block's gradient, or None if the group has no owners."""
        return jnp.zeros((1, group.d_out * group.d_in)) if group.owned else None

    def _statistics(self, group: Group) -> Block:
        """Return a block's statistics."""
        return group.zeros(1, jnp.float32, group.moments(self.kind))

    def _basis(self, group: Group) -> Any:
        """Return a block's basis, which all devices get, or None."""
        return (
            self.kind.basis(self.kind.init(self._statistics(group)))
            if group.owned
            else None
        )

    def owners(self) -> list[tuple[str, int, int]]:
        """Return every Kronecker block's owner: `(layer name, copy or piece, device)`."""
        return [
            (layer.name, copy, self.shards[group.name].location(start + copy)[0])
            for group in self.groups if group.owned
            for layer, count, start in zip(group.layers, group.counts, group.starts, strict=True)
            for copy in range(count)
        ]  # fmt: skip

    def __repr__(self) -> str:
        return _table(self)


def _table(plan: Assignment) -> str:
    by_device: dict[int, list[str]] = {device: [] for device in range(plan.devices)}
    for name, copy, device in plan.owners():
        by_device[device].append(
            f"{name}[{copy}]"
            if plan.layers[name].copies * plan.layers[name].pieces > 1
            else name
        )
    costs = plan.cost_per_device
    total, worst = sum(costs), max(costs)
    lines = [f"{'device':>6}  {'n^3 work':>9}  {'share':>6}  layers"]
    shown = range(plan.devices) if plan.devices <= 64 else range(16)
    for device in shown:
        share = costs[device] / total if total else 0
        owned = ", ".join(by_device[device]) or "-"
        lines.append(f"{device:>6}  {costs[device]:>9.3g}  {share:>6.1%}  {owned}")
    if len(shown) < plan.devices:
        idle = sum(cost == 0 for cost in costs)
        lines.append(
            f"   ... {plan.devices - len(shown)} more devices; {idle} devices own nothing"
        )
    lines.append(
        f"one refresh: {total:.3g} n^3 in all; busiest device {worst:.3g}, "
        f"{worst * plan.devices / total if total else 1:.2f} times the mean"
    )
    return "\n".join(lines)
