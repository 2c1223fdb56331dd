"""Who owns which block, and when it is inverted: pure arithmetic on shapes, no devices.

Blocks of equal shape form a group of `K`. They are dealt to `D` devices in turn: device `d` owns

    block     p D + d                        at its positions p = 0 ... full - 1,      full = K // D
    block     full D + (d - offset) mod D    at its position full, if that is < K

so ownership is a formula in the device's index, and neither the program nor any table grows with `D`. Each group's
`offset` is chosen so that the remainders fill up the devices evenly.

A staggered refresh cuts the work into `inverse_every` phases, largest blocks first, each to the phase with the least
work so far. The schedule is one of blocks, so training does not depend on the number of devices. Blocks of a group cost
the same, so they can be numbered in the order of their phases: each device then has a run of positions in a phase.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp

from kfac._checks import check_layers, check_positive_int, check_type
from kfac._curvature.blocks import Group, group_layers
from kfac._curvature.cholesky import Cholesky
from kfac._curvature.inverse import Inverse, count_bytes
from kfac._curvature.symmetric import flatten_block
from kfac._distributed.distribution import Distribution
from kfac._layers import Layers, format_bytes


@dataclasses.dataclass(frozen=True)
class Shard:
    """How the `blocks` of a group lie on `devices`.

    Attributes:
      blocks: `K`.
      devices: `D`.
      offset: the device that owns the first block of the remainder.
    """

    blocks: int
    devices: int
    offset: int = 0

    @property
    def full(self) -> int:
        """Blocks that every device owns."""
        return self.blocks // self.devices

    @property
    def remainder(self) -> int:
        """Blocks left over, one each for the first devices from `offset` on."""
        return self.blocks % self.devices

    @property
    def positions(self) -> int:
        """Length of the stacks each device holds."""
        return self.full + (self.remainder > 0)

    def location(self, block: int) -> tuple[int, int]:
        """Device and position of a block."""
        position, device = divmod(block, self.devices)
        return (device if position < self.full else (device + self.offset) % self.devices), position

    def held(self, device: int) -> int:
        """How many blocks a device owns."""
        return self.full + ((device - self.offset) % self.devices < self.remainder)


Costs = Sequence[tuple[str, int, int]]  # name of a Kronecker group, number of its blocks, work to invert one


def block_cost(shapes: Iterable[tuple[int, ...]]) -> int:
    """Work to invert a Kronecker block with factors of such shapes, in `n^3`; that of a diagonal one is `n`."""
    return sum(shape[0] if len(shape) == 1 else shape[0] ** 3 for shape in shapes)


def group_costs(groups: Sequence[Group]) -> Costs:
    return [(g.name, g.size, block_cost(g.shapes.values())) for g in groups if g.kronecker]


def make_shards(costs: Costs, devices: int) -> dict[str, Shard]:
    """Spreads every group over the devices, the most expensive remainders first."""
    load = [0] * devices
    shards = {}
    for name, size, cost in sorted(costs, key=lambda item: (-item[2], item[0])):
        remainder = size % devices
        offset = 0
        if remainder:
            # The run of devices whose busiest member is least busy, then with the least work in all.
            def busy(start: int, remainder: int = remainder) -> tuple[int, int]:
                run = [load[(start + k) % devices] for k in range(remainder)]
                return max(run), sum(run)

            offset = min(range(devices), key=busy)
            for k in range(remainder):
                load[(offset + k) % devices] += cost
        shards[name] = Shard(size, devices, offset)
    return shards


def make_phases(costs: Costs, phases: int) -> dict[str, tuple[int, ...]]:
    """Spreads the blocks of all groups over `phases` steps.

    Returns:
      For each group `bounds` of length `phases + 1`: phase `p` inverts blocks `bounds[p]` up to `bounds[p + 1]`.
    """
    items = [(cost, name) for name, size, cost in costs for _ in range(size)]
    least = [(0, phase) for phase in range(phases)]  # a heap
    counts = {name: [0] * phases for name, _, _ in costs}
    for cost, name in sorted(items, key=lambda item: (-item[0], item[1])):
        load, phase = least[0]
        heapq.heapreplace(least, (load + cost, phase))
        counts[name][phase] += 1
    return {name: tuple(itertools.accumulate(count, initial=0)) for name, count in counts.items()}


@dataclasses.dataclass(frozen=True, repr=False)
class Assignment:
    """The plan of a distributed preconditioner; print it before renting machines.

    Everything in it is counted from the shapes of the layers. Bytes are those of the operands of collectives; a ring
    moves (D-1)/D of them in and out of each device for a reduce-scatter or gather, twice that for an all-reduce.

    Attributes:
      layers: the layers.
      devices: number of devices.
      inverse_every: steps over which a refresh is spread.
      inverse: how blocks are inverted, as given to the optimizer.
      distribution: how devices are used, likewise.
    """

    layers: Layers
    devices: int = 1
    inverse_every: int = 1
    inverse: Inverse = Cholesky()
    distribution: Distribution | None = None

    def __post_init__(self):
        """Checks the arguments."""
        check_layers(self.layers)
        check_positive_int("devices", self.devices)
        check_positive_int("inverse_every", self.inverse_every)
        check_type("inverse", self.inverse, Inverse, "a kind of inverse such as kfac.Cholesky()")
        if self.distribution is not None:
            check_type("distribution", self.distribution, Distribution, "a kfac.Distribution or None")
        self._uses.staggers(self.inverse, several=self.devices > 1)

    @property
    def _uses(self) -> Distribution:
        return self.distribution or Distribution()

    @property
    def _steps(self) -> int:
        """Steps of a cycle."""
        return self.inverse_every if self._uses.staggers(self.inverse, several=self.devices > 1) else 1

    @functools.cached_property
    def groups(self) -> tuple[Group, ...]:
        """The groups of equal blocks."""
        return group_layers(self.layers)

    @functools.cached_property
    def shards(self) -> dict[str, Shard]:
        """How each Kronecker group lies on the devices."""
        return make_shards(group_costs(self.groups), self.devices)

    @functools.cached_property
    def phases(self) -> dict[str, tuple[int, ...]]:
        """Which blocks each step of a cycle inverts."""
        return make_phases(group_costs(self.groups), self._steps)

    @functools.cached_property
    def cost_per_device(self) -> list[int]:
        """Work of one whole refresh on each device, in `n^3`."""
        load = [0] * self.devices
        for name, _, cost in group_costs(self.groups):
            for device in range(self.devices):
                load[device] += cost * self.shards[name].held(device)
        return load

    @functools.cached_property
    def cost_per_step(self) -> list[int]:
        """Work of the busiest device in each step of a cycle, in `n^3`."""
        bounds, shards = self.phases, self.shards
        busiest = []
        for phase in range(self._steps):
            load = [0] * self.devices
            for name, _, cost in group_costs(self.groups):
                first, last = bounds[name][phase : phase + 2]
                for block in range(first, last):
                    load[shards[name].location(block)[0]] += cost
            busiest.append(max(load))
        return busiest

    @property
    def memory_per_device(self) -> int:
        """Bytes of running averages and inverses that every device holds."""
        total = 0
        for group in self.groups:
            statistics, kept, shared = self._sizes(group)
            held = self.shards[group.name].positions if group.kronecker else group.size
            total += held * (statistics + kept) + group.size * shared
        return total

    def _sizes(self, group: Group) -> tuple[int, int, int]:
        """Bytes of one block: of statistics, of what its inverse keeps, and of what all devices keep of that."""
        kind = group.kind(self.inverse)
        statistics = jax.eval_shape(lambda: group.zeros(1, jnp.float32))
        factors = jax.eval_shape(lambda: group.zeros(1, jnp.float32, moments=kind.takes_moments))
        several = self.devices > 1
        shared = jax.eval_shape(lambda f: self._uses.shared(kind, kind.init(f), several=several), factors)
        return count_bytes(statistics), kind.size(factors), count_bytes(shared) if group.kronecker else 0

    @property
    def reduced_bytes(self) -> int:
        """Bytes of statistics that each device puts into reductions, each time there are statistics."""
        if self.devices == 1:
            return 0
        wire = jnp.dtype(self._uses.communication_dtype)

        def sent(group):
            block = group.zeros(group.size, wire, moments=group.kind(self.inverse).takes_moments)
            return flatten_block(block)

        return sum(count_bytes(jax.eval_shape(functools.partial(sent, group))) for group in self.groups)

    @property
    def gathered_bytes(self) -> int:
        """Bytes gathered, of preconditioned gradients each step or, if they are replicated, of inverses each cycle."""
        if self.devices == 1:
            return 0
        if self._uses.replicated:
            return self._sent()
        return sum(4 * group.size * group.d_out * group.d_in for group in self.groups if group.kronecker)

    @property
    def fetched_bytes(self) -> int:
        """Bytes of eigenvectors that all devices get besides, with `Ekfac`, in each step with a refresh."""
        return 0 if self.devices == 1 or self._uses.replicated else self._sent()

    def _sent(self) -> int:
        """Bytes of what all devices get of inverses, as it is sent."""

        def sent(group):
            kept = self.inverse.init(group.zeros(group.size, jnp.float32, moments=self.inverse.takes_moments))
            shared = self._uses.shared(self.inverse, kept, several=True)
            return None if shared is None else self._uses.encode(self.inverse, shared)

        groups = [group for group in self.groups if group.kronecker]
        return sum(count_bytes(jax.eval_shape(functools.partial(sent, group))) for group in groups)

    def owners(self) -> list[tuple[str, int, int]]:
        """Owner of every Kronecker block: `(layer name, copy, device)`."""
        rows = []
        for group in self.groups:
            if not group.kronecker:
                continue
            block = 0
            for layer in group.layers:
                for copy in range(layer.copies):
                    rows.append((layer.name, copy, self.shards[group.name].location(block)[0]))
                    block += 1
        return rows

    def __repr__(self) -> str:
        return _table(self)


def _table(plan: Assignment) -> str:
    by_device: dict[int, list[str]] = {device: [] for device in range(plan.devices)}
    copies = {layer.name: layer.copies for layer in plan.layers}
    for name, copy, device in plan.owners():
        by_device[device].append(f"{name}[{copy}]" if copies[name] > 1 else name)
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
    steps = plan.cost_per_step
    mean = total / plan.devices
    lines += [
        f"one refresh: {total:.3g} n^3 in all; busiest device {worst:.3g}, "
        f"{worst / mean if mean else 1:.2f} times the mean",
        f"spread over {len(steps)} steps: worst step {max(steps):.3g}, mean {sum(steps) / len(steps):.3g}",
        f"memory per device (averages and inverses): {format_bytes(plan.memory_per_device)}",
        f"reduced per device, each time there are statistics: {format_bytes(plan.reduced_bytes)}",
        f"gathered per {'refresh' if plan._uses.replicated else 'step'}: {format_bytes(plan.gathered_bytes)}",
    ]
    if plan.fetched_bytes:
        lines.append(f"eigenvectors to all devices, each step with a refresh: {format_bytes(plan.fetched_bytes)}")
    return "\n".join(lines)
