"""What a run on many devices would take, and which intervals keep it to a given overhead."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

from kfac._checks import check, check_given
from kfac._curvature.inverse import Inverse
from kfac._distributed.intervals import applied, products_of, statistics_of
from kfac._layers import Layers, format_bytes
from kfac.planning._assignment import Assignment


@dataclasses.dataclass(frozen=True)
class Hardware:
    """What a device is taken to do in a second; an assumption, which a measurement should replace.

    Attributes:
      flops: in matrix products of the model and of statistics.
      inversion_flops: in float32 factorisations, of which one matrix does not fill a device.
      bandwidth: bytes that it sends while it receives as many.
      memory: bytes that it holds.
    """

    flops: float
    inversion_flops: float
    bandwidth: float
    memory: float = 8e10


# A fifth to two fifths of the bfloat16 peaks, 989 and 459 TFLOP/s; a network of 400 Gbit/s for each H100, and of the
# 4,800 Gbit/s of a TPU v5p's six links those of one axis of the torus.
HARDWARE = {"h100": Hardware(2e14, 1e13, 5e10, 8e10), "tpu-v5p": Hardware(1.8e14, 5e12, 2e11, 9.5e10)}


# What the seconds of messages are called where those of something else have their name.
_SENT = {"statistics": "statistics' messages", "inverses": "refreshes' messages"}


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
    """What a run would take; print it. What `plan` returns.

    Attributes:
      assignment: who owns what.
      batch: examples of all devices together.
      hardware: what a device is taken to do.
      overhead: the share of the time of a first-order step that was asked for.
      statistics_every: statistics are taken every so many steps; None where no interval is long enough.
      inverse_every: each inverse is refreshed every so many steps; likewise.
      flops: of one device: of the `"model"` and the `"statistics"` each time, of `"preconditioning"` each step, and
        of the critical path of the `"inversions"` of a cycle.
      messages: bytes by kind of `"gradients"`, `"statistics"`, `"results"`, `"inverses"` that all get.
      seconds: of the same, each time.
      memory: bytes of one device: `"parameters"`, `"gradients"`, `"state"` (averages, inverses, momentum) and
        `"statistics"` of a step, packed on several devices. Activations are no part of it.
      largest: the layer whose block costs most to invert, and its share of the critical path.
    """

    assignment: Assignment
    batch: int
    hardware: Hardware
    overhead: float
    statistics_every: int | None
    inverse_every: int | None
    flops: dict[str, float]
    messages: dict[str, dict[str, int]]
    seconds: dict[str, float]
    memory: dict[str, int]
    largest: tuple[str, float]

    @property
    def fits(self) -> bool:
        """Whether a device holds all but activations."""
        return sum(self.memory.values()) <= self.hardware.memory

    @property
    def first_order_seconds(self) -> float:
        """Of a step without K-FAC: the model and the all-reduce of its gradients."""
        return self.seconds["model"] + self.seconds["gradients"]

    @property
    def extra_seconds(self) -> float:
        """What K-FAC adds to the mean step; without intervals, what it adds to every step."""
        always = self.seconds["preconditioning"] + self.seconds["results"]
        if not self.statistics_every or not self.inverse_every:
            return always
        return always + _seldom(self.seconds, self.statistics_every, self.inverse_every)

    def __repr__(self) -> str:
        return _text(self)


def plan(
    layers: Layers,
    *,
    devices: int,
    batch: int,
    hardware: str | Hardware = "h100",
    overhead: float = 0.05,
    inverse: Inverse | None = None,
    gradients: str = "averaged",
    communication_dtype: str = "float32",
    inverse_every: int | None = None,
    statistics_every: int | None = None,
    **rates: float,
) -> Plan:
    """What K-FAC would take on so many devices, counted from shapes; it compiles nothing and needs no device.

    FLOPs of the model are those of the matrix products and convolutions that read parameters, three times for forward
    and backward pass; of the statistics those of dense products, of which convolutions of stride 1 take up to seven
    times less. Seconds are predictions: FLOPs and bytes over what the hardware is taken to do, nothing overlapping.

    Args:
      layers: what `find_layers` returned, with the shapes of real examples.
      devices: how many.
      batch: examples of all devices together.
      hardware: `"h100"`, `"tpu-v5p"`, or a `Hardware`.
      overhead: by what share of the time of a first-order step the mean step may be longer. The shortest intervals for
        which that is so are picked: first one for both, then statistics as often as the rest allows.
      inverse: how blocks are inverted, as given to the optimizer. None: as `kfac.kfac` does by default.
      gradients: as of `Assignment`.
      communication_dtype: likewise.
      inverse_every: the interval between refreshes, if it is not to be picked.
      statistics_every: likewise between statistics.
      **rates: fields of `Hardware` that are known better: `flops`, `inversion_flops`, `bandwidth`.

    Returns:
      A `Plan`.

    Raises:
      ValueError: an argument is out of range, or a layer was found without positions.
    """
    machine = _machine(hardware, rates)
    check(batch=batch, overhead=overhead)
    check_given(inverse_every=inverse_every, statistics_every=statistics_every)
    assignment = Assignment(layers, devices, inverse, gradients, communication_dtype)
    flops, messages, seconds = _costs(assignment, batch, machine)
    budget = overhead * (seconds["model"] + seconds["gradients"]) - seconds["preconditioning"] - seconds["results"]
    statistics_every, inverse_every = _intervals(seconds, budget, statistics_every, inverse_every)
    owned = [group.layers[0].name for group in assignment.groups if group.owned]
    work, layer = max(zip((cost.work for cost in assignment.costs), owned, strict=True), default=(0, "no layer"))
    share = work / max(1, *assignment.cost_per_device)
    return Plan(assignment, batch, machine, overhead, statistics_every, inverse_every, flops, messages, seconds,
                _memory(assignment), (layer, share))  # fmt: skip


def _machine(hardware: str | Hardware, rates: dict[str, float]) -> Hardware:
    if isinstance(hardware, str) and hardware not in HARDWARE:
        raise ValueError(f"hardware must be one of {', '.join(map(repr, HARDWARE))} or a Hardware, but is {hardware!r}")
    machine = HARDWARE[hardware] if isinstance(hardware, str) else hardware
    fields = {field.name for field in dataclasses.fields(Hardware)}
    for name, rate in rates.items():
        if name not in fields:
            raise TypeError(f"plan has no argument {name!r}; rates of hardware are {', '.join(sorted(fields))}")
        check(**{name: rate})
    return dataclasses.replace(machine, **rates)


def _costs(assignment: Assignment, batch: int, machine: Hardware) -> tuple[dict, dict, dict]:
    """FLOPs, bytes by kind of message, and seconds."""
    layers, local = assignment.layers, batch / assignment.devices
    flops = {
        "model": 3 * local * sum(map(products_of, layers)),
        "statistics": local * sum(map(statistics_of, layers)),
        "preconditioning": sum(
            assignment.shards[g.name].positions * applied(g.shapes) for g in assignment.groups if g.owned
        ),
        "inversions": max(assignment.cost_per_device) * assignment.kind.flops,
    }
    messages = {
        "gradients": assignment.gradients_messages,
        "statistics": assignment.statistics_messages,
        "results": assignment.results_messages,
        "inverses": assignment.fetched_messages,
    }
    rates = dict.fromkeys(flops, machine.flops) | {"inversions": machine.inversion_flops}
    ring = 2 * (assignment.devices - 1) / assignment.devices / machine.bandwidth
    sent = {_SENT.get(name, name): ring * in_all_reduces(kinds) for name, kinds in messages.items()}
    return flops, messages, {name: flops[name] / rates[name] for name in flops} | sent


def _memory(assignment: Assignment) -> dict[str, int]:
    """Bytes of one device, all in float32. Gradients that are split go to owners as stacks; so are parameters split."""
    parameters = 4 * sum(layer.num_params for layer in assignment.layers)
    share = -(-parameters // assignment.devices) if assignment.gradients == "split" else parameters
    at_owners = assignment.results_messages.get("all-to-all", 0) if assignment.gradients == "split" else 0
    memory = {"parameters": share, "gradients": share + at_owners}
    return memory | {"state": assignment.memory_per_device, "statistics": _statistics_memory(assignment)}


def _statistics_memory(assignment: Assignment) -> int:
    """Counts bytes of statistics on a device: whole on one, else packed, or a part if gradients are split.

    And then the own blocks and the largest layer unpacked.
    """
    if assignment.devices == 1:
        shapes = [shape for layer in assignment.layers.with_factors for shape in layer.factor_shapes.values()]
        return 4 * sum(map(math.prod, shapes))
    if assignment.gradients != "split":
        return 4 * assignment.packed_elements
    groups = [group for group in assignment.groups if group.captured and group.owned]
    owned = sum(assignment.shards[g.name].positions * sum(map(math.prod, g.shapes.values())) for g in groups)
    sides = [sum(map(math.prod, layer.side_shapes.values())) for g in groups for layer in g.layers]
    return 4 * (assignment.packed_elements // assignment.devices + owned + max(sides, default=0))


def _too_large(plan: Plan) -> list[str]:
    """What does not fit, and the option that makes it fit."""
    if plan.fits:
        return []
    assignment, needed = plan.assignment, format_bytes(sum(plan.memory.values()))
    split = dataclasses.replace(assignment, gradients="split")
    rest, most = sum(_memory(split).values()), max(plan.memory, key=lambda part: plan.memory[part])
    if assignment.devices > 1 and assignment.gradients != "split" and rest <= plan.hardware.memory:
        way = f"split the parameters over the devices, gradients='split' here: {format_bytes(rest)}"
    else:
        way = f"most of it: {most}. find_layers(max_dim=...) makes state and statistics smaller, more devices all else"
    return [f"DOES NOT FIT: {needed} without activations, but a device has {format_bytes(plan.hardware.memory)}. {way}"]


def in_all_reduces(messages: dict[str, int]) -> float:
    """Bytes of an all-reduce that takes as long: it is a reduce-scatter and an all-gather, so others count half."""
    return sum(size if kind == "all-reduce" else size / 2 for kind, size in messages.items())


def _seldom(seconds: dict[str, float], statistics_every: int, inverse_every: int) -> float:
    """Returns the seconds of a mean step for what is not done in every step."""
    statistics = seconds["statistics"] + seconds["statistics' messages"]
    return statistics / statistics_every + (seconds["inversions"] + seconds["refreshes' messages"]) / inverse_every


def _intervals(seconds, budget: float, statistics_every, inverse_every) -> tuple[int | None, int | None]:
    """Returns the shortest intervals whose work fits into `budget` seconds of a mean step; given ones stay."""
    least = _seldom(seconds, statistics_every or 1 << 30, inverse_every or 1 << 30)
    if (statistics_every and inverse_every) or least >= budget:
        return statistics_every, inverse_every
    every = (round(1.02**n) for n in itertools.count())  # an interval of hundreds of steps need not be exact
    both = next(n for n in every if _seldom(seconds, statistics_every or n, inverse_every or n) <= budget)
    inverse_every = inverse_every or both
    if not statistics_every:
        statistics_every = next(n for n in range(1, both + 1) if _seldom(seconds, n, inverse_every) <= budget)
    return statistics_every, inverse_every


def _text(plan: Plan) -> str:
    assignment, hardware = plan.assignment, plan.hardware
    lines = [
        *_too_large(plan),
        f"{assignment.devices:,} device(s), batch {plan.batch:,}; ASSUMED of a device, in a second: "
        f"{hardware.flops:.3g} FLOPs, {hardware.inversion_flops:.3g} in inversions, "
        f"{format_bytes(hardware.bandwidth)} sent",
        f"{'part':<22}{'FLOPs of a device':>18}{'predicted ms':>14}  messages",
    ]
    for name in ("model", "gradients", "statistics", "inversions", "preconditioning", "results", "inverses"):
        kinds: dict[str, Any] = plan.messages.get(name, {})
        seconds = sum(plan.seconds.get(part, 0.0) for part in {name, _SENT.get(name, name)})
        if name in plan.flops or kinds:
            flops = f"{plan.flops[name]:.3g}" if name in plan.flops else ""
            sent = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in kinds.items())
            lines.append(f"{name:<22}{flops:>18}{1e3 * seconds:>14.3f}  {sent}".rstrip())
    name, share = plan.largest
    costs = assignment.cost_per_device
    busiest = max(costs) / max(1, sum(costs)) * assignment.devices
    lines += [
        f"critical path of a refresh: {plan.flops['inversions']:.3g} FLOPs, "
        f"{1e3 * plan.seconds['inversions']:.3g} ms, {busiest:.2f} times all work over all devices; {share:.0%} of it "
        f"is a block of the shape of {name}"
        + (": find_layers(max_dim=...) cuts its factors into blocks" if share > 0.3 else ""),
        "memory of a device: " + ", ".join(f"{part} {format_bytes(size)}" for part, size in plan.memory.items()),
    ]
    base, extra = plan.first_order_seconds, plan.extra_seconds
    takes = f"no intervals keep to {plan.overhead:.1%}: what is done at every step alone takes"
    if plan.statistics_every and plan.inverse_every:
        takes = f"statistics every {plan.statistics_every} and inverses every {plan.inverse_every} step(s):"
    lines.append(f"{takes} {1e3 * extra:.3g} ms more than {1e3 * base:.3g} ms, {extra / base:.1%}")
    return "\n".join(lines)
