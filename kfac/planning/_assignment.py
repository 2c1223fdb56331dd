"""The plan of a distributed preconditioner, counted from shapes: who owns what, and what that takes."""

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
    """The plan of a distributed preconditioner; print it before renting machines.

    Everything in it is counted from the shapes of the layers. Of the bytes of a message a ring moves (D-1)/D in and out
    of each device for a reduce-scatter, gather or all-to-all, twice that for an all-reduce.

    Attributes:
      layers: the layers.
      devices: number of devices.
      inverse: how blocks are inverted, as given to the optimizer. None: as `kfac.kfac` does by default.
      gradients: how they get to the owners. `"averaged"` on all devices, as by `lax.pmean`, or by XLA for parameters
        that all devices have; `"local"`: as they are inside `jax.shard_map`, averaged at the owners alone; `"split"`:
        to the owners alone, of parameters that are split over the devices.
      communication_dtype: of statistics, as given to `value_and_grad`.
    """

    layers: Layers
    devices: int = 1
    inverse: Inverse | None = None
    gradients: str = "averaged"
    communication_dtype: str = "float32"

    def __post_init__(self):
        """Checks the arguments."""
        check_layers(self.layers)
        check(devices=self.devices, gradients=self.gradients, communication_dtype=self.communication_dtype)
        check_inverse(self.kind)

    @property
    def kind(self) -> Inverse:
        """`inverse`, or what is used by default."""
        return Soap() if self.inverse is None else self.inverse

    @functools.cached_property
    def groups(self) -> tuple[Group, ...]:
        """The groups of equal blocks."""
        return group_layers(self.layers)

    @functools.cached_property
    def shards(self) -> dict[str, Shard]:
        """How each Kronecker group lies on the devices."""
        return make_shards(self.costs, self.devices)

    @property
    def costs(self) -> list[Cost]:
        """What there is to do for the blocks of each Kronecker group."""
        return group_costs(self.groups)

    @functools.cached_property
    def cost_per_device(self) -> list[int]:
        """Work of a refresh on each device, in `n^3`; the largest is the critical path."""
        shares = [cost.work * np.sum(self.shards[cost.name].held, axis=1) for cost in self.costs]
        return sum(shares, np.zeros(self.devices, int)).tolist()

    @property
    def memory_per_device(self) -> int:
        """Bytes of running averages, inverses and momentum that every device holds."""
        mesh, way = AbstractMesh((self.devices,), ("devices",)), Way(("devices",), ("devices",))
        config = Config(self.layers, self.groups, self.kind, way, Moves(momentum=0.9))
        settings = Settings(self.layers, self.layers, self.kind, Distribution(), True)
        state = jax.eval_shape(lambda: init_over_mesh(config, settings, mesh, {}))

        def held(owned):
            return count_bytes([(x.factors, x.inverse, x.motion) for x in owned])

        dealt = held(x.blocks for x in state.owned.values()) + count_bytes(state.segment)
        return dealt // self.devices + held(state.shared.values()) + count_bytes(state.bases)

    @property
    def statistics_messages(self) -> dict[str, int]:
        """Bytes of statistics by kind of message, each time there are some.

        Of all-reduces, reduce-scatters and all-to-alls what a device puts in, of all-gathers what it gets. Where
        gradients are split, all devices get an equal part of each layer's, which then goes to its owner.
        """
        wire = self.communication_dtype
        if self.gradients == "split" and self.devices > 1:
            captured = [group for group in self.groups if group.captured]
            rest = sum(g.size * count_bytes(self._statistics(g)) for g in captured if not g.owned)
            sizes = {g.name: count_bytes(jax.eval_shape(lambda g=g: self._packed(g))) for g in captured if g.owned}
            owned = sum(self.shards[name].positions * size for name, size in sizes.items())
            narrow = jnp.dtype(wire).itemsize * self.packed_elements
            return {"reduce-scatter": narrow, "all-to-all": owned, "all-reduce": rest}

        packed = self._messages(lambda g: self._packed(g, wire) if g.captured else None, "reduce-scatter", BUCKETS)
        own = self._messages(lambda g: None if g.captured else self._gradient(g), "reduce-scatter")
        return {kind: packed.get(kind, 0) + own.get(kind, 0) for kind in packed | own}

    @property
    def packed_elements(self) -> int:
        """Number of elements of the packed statistics of all Kronecker layers."""
        layers = [layer for group in self.groups if group.captured and group.owned for layer in group.layers]
        return sum(layer.copies * math.prod(room(shape)) for layer in layers for shape in layer.side_shapes.values())

    def _packed(self, group: Group, dtype: Any = None) -> Any:
        """The statistics of one block, packed."""
        return self._statistics(group).packed(tuple(group.shapes.values()), dtype=dtype)

    @property
    def gradients_messages(self) -> dict[str, int]:
        """As `statistics_messages`, of the gradients, averaged everywhere, or to the owners where they arrive local.

        Of those that are split: over the same devices; first averaged, each to where its parameter lies.
        """
        if self.devices == 1:
            return {}
        gathered = [layer for group in self.groups if group.owned for layer in group.layers]
        if self.gradients == "split":
            everywhere = 4 * sum(layer.num_params for layer in self.layers.with_blocks if layer not in gathered)
            whole = 4 * sum(layer.num_params for layer in self.layers)
            return {"reduce-scatter": whole, "all-gather": everywhere} | self.results_messages
        to_owners = gathered if self.gradients == "local" else []
        averaged = 4 * sum(layer.num_params for layer in self.layers if layer not in to_owners)
        sent = self._messages(self._gradient, "reduce-scatter") if to_owners else {}
        return sent | {"all-reduce": averaged}

    @property
    def results_messages(self) -> dict[str, int]:
        """As `statistics_messages`, of the preconditioned gradients that are gathered in each step, or split again."""
        if self.gradients != "split":
            return self._messages(self._gradient, "all-gather")
        blocks = sum(self.shards[g.name].positions * g.d_out * g.d_in for g in self.groups if g.owned)
        return {"all-to-all": 4 * blocks} if self.devices > 1 else {}

    @property
    def fetched_messages(self) -> dict[str, int]:
        """As `results_messages`, of the bases that all devices get in a step with a refresh, with `Ekfac`."""
        return self._messages(self._basis, "all-gather")

    def _messages(self, block: Callable[[Group], Any], kind: str, number: int = 1) -> dict[str, int]:
        """Bytes by kind of message, from what there is of one block of a group: as `collectives` sends it."""
        arrays = {g: jax.tree.leaves(jax.eval_shape(functools.partial(block, g))) for g in self.groups}
        itemsize = max((x.dtype.itemsize for g, leaves in arrays.items() if g.owned for x in leaves), default=1)
        sizes = {}
        total: collections.Counter[str] = collections.Counter()
        for group, leaves in arrays.items():
            if group.owned:
                sizes[group.name] = count_bytes(leaves) // itemsize
            elif kind == "reduce-scatter":
                total["all-reduce"] += group.size * count_bytes(leaves)
        buckets = make_buckets({name: self.shards[name].blocks * size for name, size in sizes.items() if size}, number)
        for names in buckets:
            segments = make_segments(self.shards, {name: sizes[name] for name in names})
            width = segments.width + sum(self.shards[name].full * sizes[name] for name in names)
            total[kind] += self.devices * width * itemsize
            total["all-to-all"] += self.devices * segments.exchanged * itemsize
        return {kind: size for kind, size in total.items() if size and self.devices > 1}

    def _gradient(self, group: Group) -> Any:
        """One block's."""
        return jnp.zeros((1, group.d_out * group.d_in)) if group.owned else None

    def _statistics(self, group: Group) -> Block:
        """One block's."""
        return group.zeros(1, jnp.float32, group.moments(self.kind))

    def _basis(self, group: Group) -> Any:
        """What all devices get of the inverse of one block."""
        return self.kind.basis(self.kind.init(self._statistics(group))) if group.owned else None

    def owners(self) -> list[tuple[str, int, int]]:
        """Owner of every Kronecker block: `(layer name, copy or piece, device)`."""
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
        by_device[device].append(f"{name}[{copy}]" if plan.layers[name].copies * plan.layers[name].pieces > 1 else name)
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
        lines.append(f"   ... {plan.devices - len(shown)} more devices; {idle} devices own nothing")
    lines.append(
        f"one refresh: {total:.3g} n^3 in all; busiest device {worst:.3g}, "
        f"{worst * plan.devices / total if total else 1:.2f} times the mean"
    )
    return "\n".join(lines)
