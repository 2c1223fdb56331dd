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
import math
from collections.abc import Iterable, Sequence

from kfac._curvature.blocks import Group, group_layers
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


def packed_size(shape: tuple[int, ...], triangular: bool = True) -> int:
    """Elements of a factor on the wire: the upper triangle of a matrix (of an even dimension), or all of it."""
    if not triangular or len(shape) == 1:
        return math.prod(shape)
    even = shape[0] + shape[0] % 2
    return even * (even + 1) // 2


@dataclasses.dataclass(frozen=True, repr=False)
class Assignment:
    """The plan of a distributed preconditioner; print it before renting machines.

    Everything in it is counted from the shapes of the layers. Bytes are those of the operands of collectives; a ring
    moves (D-1)/D of them in and out of each device for a reduce-scatter or gather, twice that for an all-reduce.

    Attributes:
      layers: the layers.
      devices: number of devices.
      inverse_every: steps over which a refresh is spread.
      staggered: whether it is spread at all.
      precondition: `"sharded"` or `"replicated"`.
      triangular: whether upper triangles are sent.
      wire_bytes: bytes per element on the wire.
      inverse_bytes: bytes per element of an inverse, or of eigenvectors.
      inverse: `"cholesky"`, `"eigh"` or `"ekfac"`: whether inverses or eigendecompositions are kept, with moments.
    """

    layers: Layers
    devices: int = 1
    inverse_every: int = 1
    staggered: bool = True
    precondition: str = "sharded"
    triangular: bool = True
    wire_bytes: int = 4
    inverse_bytes: int = 4
    inverse: str = "cholesky"

    def __post_init__(self):
        """Checks the arguments."""
        if not isinstance(self.layers, Layers):
            raise ValueError(f"layers must be what kfac.find_layers returns, but is {type(self.layers).__name__}")
        for name in ("devices", "inverse_every"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive int, but is {value!r}")
        for name in ("staggered", "triangular"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, but is {getattr(self, name)!r}")
        for name in ("wire_bytes", "inverse_bytes"):
            if getattr(self, name) not in (2, 4):
                raise ValueError(f"{name} must be 2 or 4, but is {getattr(self, name)!r}")
        if self.precondition not in ("sharded", "replicated"):
            raise ValueError(f"precondition must be 'sharded' or 'replicated', but is {self.precondition!r}")
        if self.inverse not in ("cholesky", "eigh", "ekfac"):
            raise ValueError(f"inverse must be 'cholesky', 'eigh' or 'ekfac', but is {self.inverse!r}")
        if self.inverse == "ekfac" and self.precondition == "replicated":
            raise ValueError("precondition='replicated' is not for inverse='ekfac': leave it at 'sharded'")

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
        return make_phases(group_costs(self.groups), self.inverse_every if self.staggered else 1)

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
        phases = self.inverse_every if self.staggered else 1
        busiest = []
        for phase in range(phases):
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
            elements = sum(math.prod(shape) for shape in group.shapes.values())
            if group.kronecker:
                inverse = self._inverse_size(group)
                total += self.shards[group.name].positions * (4 * elements + inverse + 4 * self._moments(group))
                if self.precondition == "replicated" or (self.devices > 1 and self._moments(group)):
                    total += group.size * inverse
            else:
                total += group.size * elements * (4 + self.inverse_bytes)
        return total

    def _inverse_size(self, group: Group) -> int:
        """Bytes of what is kept to apply the inverse of one block; eigenvalues are in float32."""
        if self.inverse == "cholesky":
            return sum(math.prod(shape) for shape in group.shapes.values()) * self.inverse_bytes
        vectors = sum(shape[0] ** 2 for shape in group.shapes.values() if len(shape) == 2)
        return vectors * self.inverse_bytes + 4 * (group.d_in + group.d_out)

    def _moments(self, group: Group) -> int:
        """Elements of the second moments of one block."""
        return group.d_out * group.d_in if self.inverse == "ekfac" and group.correctable else 0

    @property
    def reduced_bytes(self) -> int:
        """Bytes of statistics that each device puts into reductions, each time there are statistics."""
        if self.devices == 1:
            return 0
        total = 0
        for group in self.groups:
            packed = sum(packed_size(s, self.triangular and group.kronecker) for s in group.shapes.values())
            total += group.size * (packed + self._moments(group)) * self.wire_bytes
        return total

    @property
    def gathered_bytes(self) -> int:
        """Bytes gathered, of preconditioned gradients each step or, if they are replicated, of inverses each cycle."""
        if self.devices == 1:
            return 0
        if self.precondition == "replicated":
            return sum(self._sent(group) for group in self.groups if group.kronecker)
        return sum(4 * group.size * group.d_out * group.d_in for group in self.groups if group.kronecker)

    @property
    def fetched_bytes(self) -> int:
        """Bytes of eigendecompositions that all devices get besides, with `"ekfac"`, in each step with a refresh."""
        return sum(self._sent(group) for group in self.groups if self.devices > 1 and self._moments(group))

    def _sent(self, group: Group) -> int:
        """Bytes of the inverses of a group, as they are sent."""
        if self.inverse == "cholesky":
            packed = sum(packed_size(shape, self.triangular) for shape in group.shapes.values())
            return group.size * packed * self.inverse_bytes
        # Whole, and eigenvectors in the dtype of the eigenvalues.
        return 4 * group.size * sum(math.prod(s) + s[0] * (len(s) == 2) for s in group.shapes.values())

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
        f"gathered per {'step' if plan.precondition == 'sharded' else 'refresh'}: {format_bytes(plan.gathered_bytes)}",
    ]
    if plan.fetched_bytes:
        lines.append(f"eigenvectors to all devices, each step with a refresh: {format_bytes(plan.fetched_bytes)}")
    return "\n".join(lines)
