"""Who owns which block, and when it is inverted: pure arithmetic on shapes, no devices.

Blocks of equal shape form a group of `K`. They are dealt to `D` devices in turn: device `d` owns

    block     p D + d                        at its positions p = 0 ... full - 1,      full = K // D
    block     full D + (d - offset) mod D    at its position full, if that is < K

so ownership is a formula in the device's index, and neither the program nor any table grows with `D`. The remainders of
all groups, the most expensive first, are dealt like a pack of cards: each begins with the device after the last one
that got a block.

What devices do at the same time are *rows*: of every group `full` rows of equal blocks, one for each device, and the
remainders in the order in which they were dealt, `D` at a time, so that a row costs what its first block does. A
staggered refresh deals the rows to the steps of a cycle, the most expensive first, each to the step with the least work
so far. So as little time as may be is spent waiting for other devices: staggered by blocks, in whatever order, all but
one device would wait in every step. With more devices than blocks there is one row, and nothing to stagger.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kfac._checks import check_layers, check_positive_int, check_type
from kfac._curvature.blocks import Group, group_layers
from kfac._curvature.cholesky import Cholesky
from kfac._curvature.inverse import Inverse, count_bytes
from kfac._curvature.symmetric import flatten_block
from kfac._distributed.distribution import Distribution, encode, shared, staggers
from kfac._factors import Block
from kfac._layers import Layers, format_bytes


@dataclasses.dataclass(frozen=True)
class Shard:
    """How the `blocks` of a group lie on `devices`.

    Attributes:
      blocks: `K`.
      devices: `D`.
      offset: the device that owns the first block of the remainder.
      row: which of the rows of remainders that block stands in.
    """

    blocks: int
    devices: int
    offset: int = 0
    row: int = 0

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

    @property
    def runs(self) -> list[tuple[int, int, int, int]]:
        """Blocks of the remainder side by side, `(row, first device, first block, end)`: in at most two rows."""
        cut = min(self.remainder, self.devices - self.offset)
        runs = [(self.row, self.offset, 0, cut), (self.row + 1, 0, cut, self.remainder)]
        return [run for run in runs if run[2] < run[3]]

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


def _dealt(costs: Costs) -> Costs:
    """The order in which groups are dealt."""
    return sorted(costs, key=lambda item: (-item[2], item[0]))


def make_shards(costs: Costs, devices: int) -> dict[str, Shard]:
    """Spreads every group over the devices."""
    shards, dealt = {}, 0
    for name, size, _ in _dealt(costs):
        shards[name] = Shard(size, devices, dealt % devices, dealt // devices)
        dealt += size % devices
    return shards


def make_turns(costs: Costs, phases: int, devices: int) -> dict[str, np.ndarray]:
    """In which of `phases` steps of a cycle each block is refreshed, `[blocks]` for each group.

    Rows are those of so many `devices`.
    """
    rows = {name: np.arange(size) // devices for name, size, _ in costs}  # those of one group alone
    work: dict[tuple[str, int], int] = {}
    dealt = 0
    for name, size, cost in _dealt(costs):
        work |= {(name, row): cost for row in range(size // devices)}
        rest = size % devices
        for row in {(dealt + block) // devices for block in range(rest)}:
            work.setdefault(("", row), cost)  # that of its first block, which costs most
        dealt += rest
    least = [(0, phase) for phase in range(phases)]  # a heap
    phase_of = {}
    for key, cost in sorted(work.items(), key=lambda item: -item[1]):
        load, phase_of[key] = least[0]
        heapq.heapreplace(least, (load + cost, phase_of[key]))
    turns, dealt = {}, 0
    for name, size, _ in _dealt(costs):
        full, rest = size // devices * devices, size % devices
        own = [phase_of[name, row] for row in rows[name][:full]]
        turns[name] = np.array(own + [phase_of["", (dealt + block) // devices] for block in range(rest)], int)
        dealt += rest
    return turns


@dataclasses.dataclass(frozen=True, repr=False)
class Assignment:
    """The plan of a distributed preconditioner; print it before renting machines.

    Everything in it is counted from the shapes of the layers. Of the bytes of a message a ring moves (D-1)/D in and out
    of each device for a reduce-scatter, gather or all-to-all, twice that for an all-reduce.

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
        check_type("distribution", self.distribution, Distribution | None, "a kfac.Distribution or None")
        staggers(self._uses, self.inverse, several=self.devices > 1)

    @property
    def _uses(self) -> Distribution:
        return self.distribution or Distribution()

    @property
    def _steps(self) -> int:
        """Steps of a cycle."""
        return self.inverse_every if staggers(self._uses, self.inverse, several=self.devices > 1) else 1

    @functools.cached_property
    def groups(self) -> tuple[Group, ...]:
        """The groups of equal blocks."""
        return group_layers(self.layers)

    @functools.cached_property
    def shards(self) -> dict[str, Shard]:
        """How each Kronecker group lies on the devices."""
        return make_shards(group_costs(self.groups), self.devices)

    @functools.cached_property
    def _work(self) -> np.ndarray:
        """`[steps, devices]`: the work of each device in each step of a cycle, in `n^3`."""
        costs = group_costs(self.groups)
        turns = make_turns(costs, self._steps, self._uses.schedule_for or self.devices)
        work = np.zeros((self._steps, self.devices))
        for name, size, cost in costs:
            owners = np.array([self.shards[name].location(block)[0] for block in range(size)])
            np.add.at(work, (turns[name], owners), cost)
        return work

    @property
    def cost_per_device(self) -> list[int]:
        """Work of one whole refresh on each device, in `n^3`."""
        return [int(work) for work in self._work.sum(axis=0)]

    @property
    def cost_per_step(self) -> list[int]:
        """Work of the busiest device in each step of a cycle, in `n^3`; their sum is the critical path."""
        return [int(work) for work in self._work.max(axis=1)]

    @property
    def memory_per_device(self) -> int:
        """Bytes of running averages and inverses that every device holds."""
        total = 0
        for group in self.groups:
            kind, factors = group.kind(self.inverse), jax.eval_shape(lambda group=group: self._statistics(group))
            held = self.shards[group.name].positions if group.kronecker else group.size
            total += held * (4 * sum(map(math.prod, group.shapes.values())) + kind.size(factors))
        everywhere = self.devices > 1 or self._uses.replicated
        return total + (self._bytes(lambda group: self._shared(group, shared)) if everywhere else 0)

    @property
    def statistics_messages(self) -> dict[str, int]:
        """Bytes of statistics by kind of message, each time there are some.

        Of all-reduces, reduce-scatters and all-to-alls what a device puts in, of all-gathers what it gets.
        """
        wire = self._uses.communication_dtype
        return self._messages(lambda g: flatten_block(self._statistics(g, wire)), "reduce-scatter")

    @property
    def gradients_messages(self) -> dict[str, int]:
        """As `statistics_messages`, of the gradients, averaged everywhere, or to the owners where they arrive local."""
        if self._uses.gradients == "averaged" or self.devices == 1:
            size = 4 * sum(layer.num_params for layer in self.layers)
            return {"all-reduce": size} if self.devices > 1 else {}
        sent = self._messages(lambda g: jax.ShapeDtypeStruct((1, g.d_out * g.d_in), jnp.float32), "reduce-scatter")
        skipped = 4 * sum(layer.num_params for layer in self.layers if layer.kind == "skipped")
        return sent | {"all-reduce": sent.get("all-reduce", 0) + skipped}

    @property
    def results_messages(self) -> dict[str, int]:
        """As `statistics_messages`, of what is gathered, gradients each step or, replicated, inverses each refresh."""
        if self._uses.replicated:
            return self._messages(lambda group: self._shared(group, encode), "all-gather")
        return self._messages(lambda g: jax.ShapeDtypeStruct((1, g.d_out * g.d_in), jnp.float32), "all-gather")

    @property
    def fetched_messages(self) -> dict[str, int]:
        """The same of the eigenvectors that all devices get besides, with `Ekfac`, in each step with a refresh."""
        if self._uses.replicated or not self.inverse.takes_moments:
            return {}
        return self._messages(lambda group: self._shared(group, encode), "all-gather")

    def _messages(self, block: Callable[[Group], Any], kind: str) -> dict[str, int]:
        """Bytes by kind of message, from what there is of one block of a group: as `collectives` sends it."""
        total: collections.Counter[str] = collections.Counter()
        rows: dict[int, int] = {}  # of the remainders, with the longest piece in each
        for group in self.groups if self.devices > 1 else ():
            leaves = jax.tree.leaves(jax.eval_shape(functools.partial(block, group)))
            if not group.kronecker:
                total["all-reduce"] += group.size * count_bytes(leaves) * (kind == "reduce-scatter")
                continue
            shard = self.shards[group.name]
            padded = sum(-(-math.prod(x.shape) // self.devices) * self.devices * x.dtype.itemsize for x in leaves)
            total[kind] += shard.full * self.devices * count_bytes(leaves) + shard.remainder * padded
            rows |= {row: max(padded, rows.get(row, 0)) for row, *_ in shard.runs}
        total["all-to-all"] = sum(rows.values())
        return {kind: size for kind, size in total.items() if size}

    def _statistics(self, group: Group, dtype: Any = jnp.float32) -> Block:
        """One block's."""
        return group.zeros(1, dtype, moments=group.kind(self.inverse).takes_moments)

    def _shared(self, group: Group, form: Callable[[Distribution, Inverse, Any], Any]) -> Any:
        """What all devices get of the inverse of one block, in a `form`: `shared` or `encode`."""
        kept = self.inverse.init(self._statistics(group)) if group.kronecker else None
        there = kept is not None and shared(self._uses, self.inverse, kept) is not None
        return form(self._uses, self.inverse, kept) if there else None

    def _bytes(self, block: Callable[[Group], Any]) -> int:
        """Bytes of all blocks, from what there is of one."""
        return sum(group.size * count_bytes(jax.eval_shape(functools.partial(block, group))) for group in self.groups)

    def owners(self) -> list[tuple[str, int, int]]:
        """Owner of every Kronecker block: `(layer name, copy, device)`."""
        rows = []
        for group in self.groups:
            if group.kronecker:
                copies = [(layer.name, copy) for layer in group.layers for copy in range(layer.copies)]
                shard = self.shards[group.name]
                rows += [(*copy, shard.location(block)[0]) for block, copy in enumerate(copies)]
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
        f"spread over {len(steps)} steps: worst step {max(steps):.3g}, mean {sum(steps) / len(steps):.3g}, "
        f"critical path {sum(steps):.3g}",
        f"memory per device (averages and inverses): {format_bytes(plan.memory_per_device)}",
        f"reduced per device, each time there are statistics: {by_kind(plan.statistics_messages)}",
        f"gathered per {'refresh' if plan._uses.replicated else 'step'}: {by_kind(plan.results_messages)}",
    ]
    if plan.fetched_messages:
        lines.append(f"eigenvectors to all devices, each step with a refresh: {by_kind(plan.fetched_messages)}")
    return "\n".join(lines)


def by_kind(messages: dict[str, int]) -> str:
    """Bytes by kind of message, in words."""
    return ", ".join(f"{kind} {format_bytes(size)}" for kind, size in messages.items()) or "nothing"
