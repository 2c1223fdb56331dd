"""Predict a run's cost on many devices, and choose intervals that meet a given overhead."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping

from kfac._checks import RENAMED, check, check_given, with_hints
from kfac._curvature.preconditioner import BlockPreconditioner
from kfac._distributed.cost_model import applied, products_of, statistics_of
from kfac._layers import Layers, format_bytes
from kfac.planning._assignment import Assignment, gradient_bytes, with_positions


@dataclasses.dataclass(frozen=True)
class Hardware:
    """A device's assumed speed and memory. Replace these numbers with your measurements.

    Attributes:
      flops: FLOPs per second in the matrix products of the model and of the statistics.
      inversion_flops: FLOPs per second in float32 factorisations. A single factorisation does not fill a device.
      bandwidth: bytes per second that a device sends while it receives as many.
      memory: bytes of memory.
    """

    flops: float
    inversion_flops: float
    bandwidth: float
    memory: float = 8e10


# FLOPs are a fifth of the H100's bfloat16 peak (989 TFLOP/s), and two fifths of the TPU v5p's (459 TFLOP/s). Each H100
# has a network of 400 Gbit/s. A TPU v5p has six links with 4,800 Gbit/s together; a ring uses the two links on one axis
# of the torus.
HARDWARE = {
    "h100": Hardware(2e14, 1e13, 5e10, 8e10),
    "tpu-v5p": Hardware(1.8e14, 5e12, 2e11, 9.5e10),
}


# `Plan.seconds` has these keys for messages whose own name already stands for computation.
_SENT = {"statistics": "statistics' messages", "inverses": "refreshes' messages"}


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
    """The predicted cost of a run, as returned by `plan`. Print it to see a table.

    Attributes:
      assignment: the blocks' owners.
      batch: the global batch size in examples.
      hardware: a device's assumed speed and memory.
      overhead: the target overhead, as a fraction of a first-order step's time.
      statistics_period: the interval between statistics, in steps. None if no interval meets the overhead.
      inverse_update_period: the interval between refreshes, in steps. None if no interval meets the overhead.
      flops: FLOPs of a device, by part: `"model"` and `"preconditioning"` in each step, `"statistics"` each time they
        are taken, and `"inversions"` in each refresh, on the critical path.
      messages: bytes by kind of message, by part: `"gradients"` and `"results"` (preconditioned gradients) in each
        step, `"statistics"` each time they are taken, and `"inverses"` (bases that all devices get) in each refresh.
      seconds: predicted time of each part, each time. The keys are the keys of `flops`, `"gradients"`, `"results"`,
        `"statistics' messages"` and `"refreshes' messages"`.
      memory: bytes of a device, by part: `"parameters"`, `"gradients"`, `"state"` (averages, inverses, momentum) and
        `"statistics"` of a step, which are packed on several devices. Activations are not included.
      largest: the layer whose block costs most to invert, and the block's share of the critical path.
    """

    assignment: Assignment
    batch: int
    hardware: Hardware
    overhead: float
    statistics_period: int | None
    inverse_update_period: int | None
    flops: dict[str, float]
    messages: dict[str, dict[str, int]]
    seconds: dict[str, float]
    memory: dict[str, int]
    largest: tuple[str, float]

    @property
    def fits(self) -> bool:
        """Whether everything except activations fits into a device's memory."""
        return sum(self.memory.values()) <= self.hardware.memory

    @property
    def first_order_seconds(self) -> float:
        """Seconds for a step without K-FAC, including the model and its gradients' messages.

        These messages are `Assignment.gradients_messages`, which include messages to the blocks' owners.
        """
        return self.seconds["model"] + self.seconds["gradients"]

    @property
    def extra_seconds(self) -> float:
        """Seconds that K-FAC adds to a mean step.

        Without intervals, this counts preconditioning and its messages only.
        """
        always = self.seconds["preconditioning"] + self.seconds["results"]
        if not self.statistics_period or not self.inverse_update_period:
            return always
        return always + _seldom(
            self.seconds, self.statistics_period, self.inverse_update_period
        )

    def __repr__(self) -> str:
        return _text(self)


@with_hints(RENAMED)
def plan(
    layers: Layers,
    *,
    devices: int,
    batch: int,
    hardware: str | Hardware = "h100",
    overhead: float = 0.05,
    preconditioner: BlockPreconditioner | None = None,
    gradients: str = "averaged",
    communication_dtype: str = "float32",
    inverse_update_period: int | None = None,
    statistics_period: int | None = None,
    **rates: float,
) -> Plan:
    """Predict the cost of K-FAC on many devices from the layers' shapes. This compiles nothing and needs no device.

    The model's FLOPs count the matrix products and convolutions that read parameters, three times for the forward and
    the backward pass. The statistics' FLOPs count dense products. For convolutions with stride 1, the real number is up
    to 7 times smaller. Seconds are FLOPs and bytes divided by the assumed rates of the hardware, without overlap.

    Args:
      layers: the result of `find_layers` for real example shapes.
      devices: number of devices.
      batch: the global batch size in examples.
      hardware: `"h100"`, `"tpu-v5p"`, or a `Hardware`.
      overhead: the acceptable overhead of a mean step, as a fraction of a first-order step's time. The function picks
        the shortest intervals that meet it: first a common interval, then a shorter interval for statistics if the
        budget allows this.
      preconditioner: the kind of inverse, as for the optimizer. None: `SOAP()`, the default of `kfac.kfac`.
      gradients: how gradients get to the blocks' owners; see `Assignment`.
      communication_dtype: the dtype of the statistics' messages, as for `value_and_grad`.
      inverse_update_period: the interval between refreshes. None picks it.
      statistics_period: the interval between statistics. None picks it.
      **rates: values that replace fields of `hardware`: `flops`, `inversion_flops`, `bandwidth`, `memory`.

    Returns:
      A `Plan`.

    Raises:
      ValueError: an argument is out of range, or a layer was found without positions.
      TypeError: `rates` has a key that is not a field of `Hardware`.
    """
    machine = _machine(hardware, rates)
    check(batch=batch, overhead=overhead)
    check_given(
        inverse_update_period=inverse_update_period, statistics_period=statistics_period
    )
    assignment = Assignment(
        layers, devices, preconditioner, gradients, communication_dtype
    )
    flops = _flops(assignment, batch)
    messages = {
        "gradients": assignment.gradients_messages,
        "statistics": assignment.statistics_messages,
        "results": assignment.results_messages,
        "inverses": assignment.fetched_messages,
    }
    seconds = _seconds(flops, messages, devices, machine)
    first_order = seconds["model"] + seconds["gradients"]
    budget = overhead * first_order - seconds["preconditioning"] - seconds["results"]
    statistics_period, inverse_update_period = _intervals(
        seconds, budget, statistics_period, inverse_update_period
    )
    return Plan(
        assignment,
        batch,
        machine,
        overhead,
        statistics_period,
        inverse_update_period,
        flops,
        messages,
        seconds,
        _memory(assignment),
        _largest(assignment),
    )


def _machine(hardware: str | Hardware, rates: dict[str, float]) -> Hardware:
    if isinstance(hardware, str):
        if hardware not in HARDWARE:
            raise ValueError(
                f"hardware must be one of {', '.join(map(repr, HARDWARE))} or a Hardware, but is {hardware!r}"
            )
        hardware = HARDWARE[hardware]
    fields = sorted(field.name for field in dataclasses.fields(Hardware))
    for name, rate in rates.items():
        if name not in fields:
            raise TypeError(
                f"plan has no argument {name!r}; rates of hardware are {', '.join(fields)}"
            )
        check(**{name: rate})
    return dataclasses.replace(hardware, **rates)


def _flops(assignment: Assignment, batch: int) -> dict[str, float]:
    """Return a device's FLOPs by part of a step."""
    layers = assignment.layers
    local = batch / assignment.devices
    return {
        "model": 3 * local * sum(map(products_of, layers)),
        "statistics": local * sum(map(statistics_of, layers)),
        "preconditioning": sum(
            n * applied(group.shapes) for n, group in with_positions(assignment)
        ),
        "inversions": max(assignment.cost_per_device) * assignment.kind.flops,
    }


def _seconds(
    flops: dict[str, float],
    messages: dict[str, dict[str, int]],
    devices: int,
    machine: Hardware,
) -> dict[str, float]:
    """Return the seconds by part of a step."""
    seconds = {name: count / machine.flops for name, count in flops.items()}
    seconds["inversions"] = flops["inversions"] / machine.inversion_flops
    ring = 2 * (devices - 1) / devices / machine.bandwidth
    for name, kinds in messages.items():
        seconds[_SENT.get(name, name)] = ring * in_all_reduces(kinds)
    return seconds


def _largest(assignment: Assignment) -> tuple[str, float]:
    """Return the layer whose block costs most to invert, and the block's share of the critical path."""
    names = {group.name: group.layers[0].name for group in assignment.groups}
    blocks = [(cost.work, names[cost.name]) for cost in assignment.costs]
    work, layer = max(blocks, default=(0, "no layer"))
    return layer, work / max(1, *assignment.cost_per_device)


def _memory(assignment: Assignment) -> dict[str, int]:
    """Return a device's bytes by part, all in float32.

    If gradients are split, a device holds its share of the parameters and gradients, and in addition its own blocks'
    gradients as stacks.
    """
    parameters = gradient_bytes(assignment.layers)
    gradients = parameters
    if assignment.gradients == "split":
        parameters = -(-parameters // assignment.devices)
        gradients = parameters + assignment.results_messages.get("all-to-all", 0)
    return {
        "parameters": parameters,
        "gradients": gradients,
        "state": assignment.memory_per_device,
        "statistics": 4 * _statistics_elements(assignment),
    }


def _statistics_elements(assignment: Assignment) -> int:
    """Return the number of elements that a device holds for a step's statistics.

    A single device holds whole factors, several devices hold packed factors. If gradients are split, a device holds its
    share of the packed factors, its own blocks, and the largest layer's unpacked factors.
    """
    if assignment.devices == 1:
        factors = [layer.factor_shapes for layer in assignment.layers.with_factors]
        return sum(map(_elements, factors))
    if assignment.gradients != "split":
        return assignment.packed_elements
    held = assignment.packed_elements // assignment.devices
    for positions, group in with_positions(assignment):
        if group.captured:
            held += positions * _elements(group.shapes)
    largest = 0
    for layer in assignment.layers.with_factors:
        if layer.block.owned:
            largest = max(largest, _elements(layer.side_shapes))
    return held + largest


def _elements(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return sum(map(math.prod, shapes.values()))


def _too_large(plan: Plan) -> list[str]:
    """Return a warning that names the required memory and the option that helps. Empty if the run fits."""
    if plan.fits:
        return []
    split = dataclasses.replace(plan.assignment, gradients="split")
    rest = sum(_memory(split).values())
    most = max(plan.memory, key=lambda part: plan.memory[part])
    way = (
        f"most of it: {most}. find_layers(max_factor_dim=...) makes state and statistics smaller, "
        "more devices all else"
    )
    several = plan.assignment.devices > 1 and plan.assignment.gradients != "split"
    if several and rest <= plan.hardware.memory:
        way = f"split the parameters over the devices, gradients='split' here: {format_bytes(rest)}"
    needed = format_bytes(sum(plan.memory.values()))
    return [
        f"DOES NOT FIT: {needed} without activations, but a device has {format_bytes(plan.hardware.memory)}. {way}"
    ]


def in_all_reduces(messages: dict[str, int]) -> float:
    """Return the bytes of an all-reduce that takes as long as these messages.

    An all-reduce is a reduce-scatter and an all-gather, so messages of other kinds count half.
    """
    return (sum(messages.values()) + messages.get("all-reduce", 0)) / 2


def _seldom(
    seconds: dict[str, float],
    statistics_period: int,
    inverse_update_period: int,
) -> float:
    """Return the seconds of a mean step that go into statistics, refreshes and their messages."""
    statistics = seconds["statistics"] + seconds["statistics' messages"]
    refreshes = seconds["inversions"] + seconds["refreshes' messages"]
    return statistics / statistics_period + refreshes / inverse_update_period


def _intervals(
    seconds: dict[str, float],
    budget: float,
    statistics_period: int | None,
    inverse_update_period: int | None,
) -> tuple[int | None, int | None]:
    """Return the shortest intervals whose work fits into `budget` seconds of a mean step. Given intervals stay."""

    def work(n):
        return _seldom(seconds, statistics_period or n, inverse_update_period or n)

    if (statistics_period and inverse_update_period) or work(1 << 30) >= budget:
        return statistics_period, inverse_update_period
    # Intervals of hundreds of steps need not be exact.
    candidates = (round(1.02**k) for k in itertools.count())
    both = next(n for n in candidates if work(n) <= budget)
    inverse_update_period = inverse_update_period or both
    if not statistics_period:
        statistics_period = next(n for n in range(1, both + 1) if work(n) <= budget)
    return statistics_period, inverse_update_period


def _text(plan: Plan) -> str:
    assignment = plan.assignment
    hardware = plan.hardware
    rows = []
    for part in (
        "model",
        "gradients",
        "statistics",
        "inversions",
        "preconditioning",
        "results",
        "inverses",
    ):
        if part in plan.flops or plan.messages[part]:
            rows.append(_row(plan, part))
    name, share = plan.largest
    cut = (
        ": find_layers(max_factor_dim=...) cuts its factors into blocks"
        if share > 0.3
        else ""
    )
    costs = assignment.cost_per_device
    busiest = max(costs) / max(1, sum(costs)) * assignment.devices
    memory = [f"{part} {format_bytes(size)}" for part, size in plan.memory.items()]
    takes = f"no intervals keep to {plan.overhead:.1%}: what is done at every step alone takes"
    if plan.statistics_period and plan.inverse_update_period:
        takes = f"statistics every {plan.statistics_period} and inverses every {plan.inverse_update_period} step(s):"
    base = plan.first_order_seconds
    extra = plan.extra_seconds
    lines = [
        *_too_large(plan),
        f"{assignment.devices:,} device(s), batch {plan.batch:,}; ASSUMED of a device, in a second: "
        f"{hardware.flops:.3g} FLOPs, {hardware.inversion_flops:.3g} in inversions, "
        f"{format_bytes(hardware.bandwidth)} sent",
        f"{'part':<22}{'FLOPs of a device':>18}{'predicted ms':>14}  messages",
        *rows,
        f"critical path of a refresh: {plan.flops['inversions']:.3g} FLOPs, "
        f"{1e3 * plan.seconds['inversions']:.3g} ms, {busiest:.2f} times all work over all devices; {share:.0%} of it "
        f"is a block of the shape of {name}{cut}",
        f"memory of a device: {', '.join(memory)}",
        f"{takes} {1e3 * extra:.3g} ms more than {1e3 * base:.3g} ms, {extra / base:.1%}",
    ]
    return "\n".join(lines)


def _row(plan: Plan, part: str) -> str:
    """Return a part's row of the table."""
    seconds = sum(plan.seconds.get(key, 0) for key in {part, _SENT.get(part, part)})
    flops = f"{plan.flops[part]:.3g}" if part in plan.flops else ""
    kinds = plan.messages.get(part, {})
    sent = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in kinds.items())
    return f"{part:<22}{flops:>18}{1e3 * seconds:>14.3f}  {sent}".rstrip()
