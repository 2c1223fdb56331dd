"""Predict a run's cost on many devices from the layers' shapes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh

from kfac._capture.thin_batch import statistics_one_in
from kfac._checks import (
    check,
    check_choice,
    check_given,
    check_layers,
)
from kfac._curvature.blocks import Group
from kfac._curvature.cost_model import (
    OVERHEAD,
    REFRESH_PRICE,
    affordable,
    applied,
    products_of,
    statistics_of,
)
from kfac._curvature.preconditioner import (
    BlockPreconditioner,
    check_preconditioner,
)
from kfac._curvature.soap import SOAP
from kfac._distributed.comm import CommContext
from kfac._distributed.distribution import Distribution
from kfac._distributed.owners import lay_out_rounds
from kfac._factors import Statistics
from kfac._layers import Layers, format_bytes
from kfac._mesh import PyTree
from kfac._optimizer.init_state import init_state
from kfac._optimizer.options import Options
from kfac._optimizer.state import Settings


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

    def __post_init__(self):
        """Check the numbers."""
        check(**dataclasses.asdict(self))


# FLOPs are a fifth of the H100's bfloat16 peak (989 TFLOP/s), and two fifths of the TPU v5p's (459 TFLOP/s). Each H100
# has a network of 400 Gbit/s. A TPU v5p has six links with 4,800 Gbit/s together; a ring uses the two links on one axis
# of the torus.
HARDWARE = {
    "h100": Hardware(2e14, 1e13, 5e10, 8e10),
    "tpu-v5p": Hardware(1.8e14, 5e12, 2e11, 9.5e10),
}


@dataclasses.dataclass(frozen=True, repr=False)
class Estimate:
    """The predicted cost of a run, as returned by `estimate`. Print it to see a table.

    The cost has four parts. `"gradients"` and `"preconditioning"` occur in each step, `"statistics"` each time they are
    taken, and `"refresh"` each time the preconditioners are refreshed.

    Attributes:
      devices: the number of devices.
      batch: the global batch size in examples.
      hardware: a device's assumed speed and memory.
      statistics_period: the interval between statistics, in steps.
      inverse_update_period: the interval between refreshes, in steps.
      flops: FLOPs of the busiest device, by part.
      messages: bytes that a device sends, by part: the all-reduce of the gradients, the gather of the preconditioned
        gradients, the statistics on the way to the blocks' owners, and `EKFAC`'s bases.
      memory: bytes of a device: `"parameters"`, `"gradients"`, `"state"` (averages, preconditioners, momentum) and
        `"statistics"` of a step, which are packed on several devices. Activations are not included.
    """

    devices: int
    batch: int
    hardware: Hardware
    statistics_period: int
    inverse_update_period: int
    flops: dict[str, float]
    messages: dict[str, float]
    memory: dict[str, int]

    @property
    def seconds(self) -> dict[str, float]:
        """Predicted time, by part."""
        hardware = self.hardware
        seconds = {}
        for part, flops in self.flops.items():
            rate = hardware.inversion_flops if part == "refresh" else hardware.flops
            sent = self.messages[part] / hardware.bandwidth
            seconds[part] = flops / rate + sent
        return seconds

    @property
    def fits(self) -> bool:
        """Whether everything except activations fits into a device's memory."""
        return sum(self.memory.values()) <= self.hardware.memory

    @property
    def extra_seconds(self) -> float:
        """Seconds that K-FAC adds to a mean step."""
        seconds = self.seconds
        return (
            seconds["preconditioning"]
            + seconds["statistics"] / self.statistics_period
            + seconds["refresh"] / self.inverse_update_period
        )

    def __repr__(self) -> str:
        hardware = self.hardware
        seconds = self.seconds
        lines = [
            f"{self.devices:,} device(s), batch {self.batch:,}; ASSUMED of a device, in a second: "
            f"{hardware.flops:.3g} FLOPs, {hardware.inversion_flops:.3g} in refreshes, "
            f"{format_bytes(hardware.bandwidth)} sent",
            f"{'part':<16}{'FLOPs of a device':>18}{'sent':>10}{'predicted ms':>14}",
        ]
        for part, flops in self.flops.items():
            sent = format_bytes(self.messages[part])
            lines.append(
                f"{part:<16}{flops:>18.3g}{sent:>10}{1e3 * seconds[part]:>14.3f}"
            )
        memory = [f"{part} {format_bytes(size)}" for part, size in self.memory.items()]
        fits = "fits into" if self.fits else "DOES NOT FIT into"
        lines += [
            f"memory of a device without activations: {', '.join(memory)}; {fits} {format_bytes(hardware.memory)}",
            f"statistics every {self.statistics_period} and refreshes every {self.inverse_update_period} step(s): "
            f"{1e3 * self.extra_seconds:.3g} ms more than {1e3 * seconds['gradients']:.3g} ms",
        ]
        return "\n".join(lines)


def estimate(
    layers: Layers,
    *,
    devices: int,
    batch: int | None = None,
    hardware: str | Hardware = "h100",
    overhead: float = OVERHEAD,
    preconditioner: BlockPreconditioner | None = None,
    statistics_fraction: float | None = None,
    statistics_period: int | None = None,
    inverse_update_period: int | None = None,
) -> Estimate:
    """Predict the cost of K-FAC on many devices from the layers' shapes. This compiles nothing and needs no device.

    Gradients are averaged by an all-reduce, and messages are float32. The gradients' FLOPs count the matrix products
    and convolutions with learned kernels three times, and with frozen kernels once or twice. The statistics' FLOPs
    count dense products; for convolutions with stride 1, the real number is up to 7 times smaller. Statistics include a
    forward and a backward pass of their own, except if each step takes them from all examples, as `value_and_grad`
    does. Seconds are FLOPs and bytes divided by the assumed rates of the hardware, without overlap.

    Args:
      layers: the result of `find_layers` for real example shapes.
      devices: number of devices.
      batch: the global batch size in examples. None: the number of examples that the layers were found with.
      hardware: `"h100"`, `"tpu-v5p"`, or a `Hardware`.
      overhead: the target overhead, as for `kfac.kfac`. It sets both intervals to the interval that `kfac.kfac` takes
        on an accelerator, if its layers are found with this batch.
      preconditioner: as for `kfac.kfac`. None: `SOAP()`.
      statistics_fraction: the fraction of the examples with statistics, as for `statistics`.
      statistics_period: the interval between statistics, instead of the interval that `overhead` sets.
      inverse_update_period: the interval between refreshes, instead of the interval that `overhead` sets.

    Returns:
      An `Estimate`.

    Raises:
      ValueError: an argument is out of range, or a layer was found without positions.
    """
    check_layers(layers)
    preconditioner = SOAP() if preconditioner is None else preconditioner
    check_preconditioner(preconditioner)
    if not isinstance(hardware, Hardware):
        check_choice("hardware", hardware, [*HARDWARE])
        hardware = HARDWARE[hardware]
    batch = layers.num_examples if batch is None else batch
    if batch is None:
        raise ValueError(
            "the layers were found without a number of examples: pass batch="
        )
    check(devices=devices, batch=batch, overhead=overhead)
    check_given(
        statistics_period=statistics_period, inverse_update_period=inverse_update_period
    )
    layers = dataclasses.replace(layers, num_examples=batch)
    one_in = statistics_one_in(layers, statistics_fraction, "statistics_fraction")
    period = int(affordable(layers, preconditioner, overhead, one_in, REFRESH_PRICE))
    statistics_period = statistics_period or period
    settings = Settings(layers, preconditioner, Distribution(), True, devices=devices)
    groups = settings.groups
    assignments = settings.assignments

    def moved(sizes: Mapping[str, int]) -> int:
        """Return the bytes that a device sends if blocks go to their owners, or from their owners to all devices.

        Args:
          sizes: the bytes of a block, for each group.
        """
        shares = {}
        width = 0
        for name, size in sizes.items():
            assignment = assignments[name]
            width += assignment.full * size
            if assignment.rest:
                shares[name] = -(-size // devices)
                width += assignment.rest * shares[name]
        _, length = lay_out_rounds(assignments, shares)
        return (devices - 1) * (width + length)

    # The bytes of a block's gradient, statistics and basis, for each group.
    kernels = {}
    sent = {}
    bases = {}
    products = 0.0
    stored = 0
    for group in groups:
        elements = 4 * group.d_in * group.d_out
        block, basis = jax.eval_shape(
            functools.partial(_block, group, preconditioner, devices > 1)
        )
        size = _count_bytes(block) if group.captured else elements
        stored += group.size * size
        kernels[group.name] = elements
        sent[group.name] = size
        bases[group.name] = _count_bytes(basis)
        if group.kronecker:
            products += assignments[group.name].slots * applied(group.shapes)
    work = np.zeros(devices)
    for group in groups:
        work += group.work * np.sum(assignments[group.name].slot_mask, axis=1)

    examples = batch / devices
    forward = sum(map(products_of, layers))
    statistics = sum(map(statistics_of, layers))
    if one_in > 1 or statistics_period > 1:
        statistics += 2 * forward + layers._frozen_flops
    gradients = 4 * sum(layer.num_params for layer in layers)
    flops = {
        "gradients": examples * (3 * forward + layers._frozen_flops),
        "statistics": examples / one_in * statistics,
        "preconditioning": preconditioner.products * products,
        "refresh": preconditioner.flops_per_cube * float(max(work)),
    }
    messages = {
        "gradients": 2 * (devices - 1) / devices * gradients,
        "preconditioning": moved(kernels),
        "statistics": moved(sent) + moved(bases),
        "refresh": 0.0,
    }
    memory = {
        "parameters": gradients,
        "gradients": gradients,
        "state": _state_bytes(settings),
        "statistics": stored,
    }
    return Estimate(
        devices,
        batch,
        hardware,
        statistics_period,
        inverse_update_period or period,
        flops,
        messages,
        memory,
    )


def _block(
    group: Group,
    preconditioner: BlockPreconditioner,
    several: bool,
) -> tuple[Statistics, PyTree]:
    """Return a block's statistics, packed for `several` devices, and its basis, which all devices need."""
    block = group.zeros(1, jnp.float32, group.moments(preconditioner))
    basis = None
    if group.kronecker:
        basis = preconditioner.basis(preconditioner.init(block))
    if several:
        return block.packed(tuple(group.shapes.values())), basis
    return block, basis


def _count_bytes(tree: PyTree) -> int:
    """Return the total size of all arrays in bytes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _state_bytes(settings: Settings) -> int:
    """Return the bytes of a device's state, with momentum."""
    devices = settings.devices
    mesh = AbstractMesh((devices,), ("devices",))
    comm = CommContext(("devices",), ("devices",))
    options = Options(preconditioner=settings.preconditioner, momentum=0.9)
    state = jax.eval_shape(lambda: init_state(settings, options, comm, mesh, {}))
    return _count_bytes((state.blocks, state.flat_state)) // devices
