"""Devices and processes: who takes part, which images are whose, and what processes tell each other."""

import json
import os
import signal
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import config as cfg
from config import UserError

AXIS = "devices"
SAME, SPLIT = PartitionSpec(), PartitionSpec(AXIS)


def start(config: cfg.Hardware) -> None:
    """Meets the other processes, if there are any."""
    if not config.distributed and config.coordinator is None:
        return
    try:
        # Processes that end differ by what process 0 still writes, hence some patience.
        jax.distributed.initialize(
            config.coordinator, config.num_processes, config.process_id, shutdown_timeout_seconds=60
        )
    except (ValueError, RuntimeError) as error:
        how = "" if config.coordinator else (
            "; where the environment does not tell, name --coordinator, --num-processes and --process-id"
        )  # fmt: skip
        raise UserError(f"the processes do not meet: {str(error).strip().splitlines()[0]}{how}") from error


def make_mesh(wanted: int | None) -> Mesh:
    """All devices of all processes in a row, those of a process side by side; or `wanted` of one process."""
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    if wanted is not None and jax.process_count() > 1 and wanted != len(devices):
        raise UserError(f"--devices {wanted} is not the number of devices that the "
                        f"{jax.process_count()} processes have, {len(devices)}; leave it out")  # fmt: skip
    if wanted is not None and wanted > len(devices):
        hint = "; JAX_NUM_CPU_DEVICES sets the number for a CPU" if devices[0].platform == "cpu" else ""
        raise UserError(f"--devices {wanted} is more than the {len(devices)} there are{hint}")
    return Mesh(np.array(devices[:wanted]), (AXIS,), axis_types=(AxisType.Auto,))


def divide(config: cfg.Optimization, devices: int) -> tuple[int, int]:
    """Images per device and micro-batch, and the number of micro-batches."""
    batch, local = config.global_batch, config.local_batch
    if local is None and batch % devices:
        raise UserError(f"--global-batch {batch} does not divide over {devices} devices")
    local = local or batch // devices
    if batch % (devices * local):
        raise UserError(f"--global-batch {batch} is not a multiple of {devices * local}, which is "
                        f"--local-batch {local} on {devices} device(s)")  # fmt: skip
    return local, batch // (devices * local)


def own_rows(mesh: Mesh, local: int, micro_batches: int) -> np.ndarray:
    """Which images of a global batch this process loads, in the order of its devices.

    The batch is cut into micro-batches first and those into devices, so a micro-batch holds the same images on any
    number of devices.
    """
    mine = [k for k, device in enumerate(mesh.devices) if device.process_index == jax.process_index()]
    rows = np.arange(micro_batches * mesh.size * local).reshape(micro_batches, mesh.size, local)
    return rows[:, mine].swapaxes(0, 1).ravel()


def own_indices(devices: int, local: int, micro_batches: int) -> jax.Array:
    """Where a device's images stand in the global batch, in its order; inside of the row of devices."""
    part, place = jnp.arange(micro_batches)[:, None], jnp.arange(local)
    return ((part * devices + lax.axis_index(AXIS)) * local + place).ravel()


def in_batch_order(x: jax.Array, devices: int, local: int) -> jax.Array:
    """An array that is split over devices like the images, in the order of the global batch."""
    return x.reshape(devices, -1, local, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)


def in_device_order(x: jax.Array, devices: int, local: int) -> jax.Array:
    """The inverse of `in_batch_order`."""
    return x.reshape(-1, devices, local, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)


def shardings(mesh: Mesh, specs: Any) -> Any:
    """Where arrays with these partition specs lie."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda node: isinstance(node, jax.P))


def place(mesh: Mesh, arrays: Any) -> Any:
    """Global arrays, split over the devices, from what this process has loaded of them."""
    sharding = NamedSharding(mesh, SPLIT)
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, x), arrays)


def is_first() -> bool:
    """Whether this is the process that writes and prints."""
    return jax.process_index() == 0


def everyone(text: str) -> list[str]:
    """What each process passes, in their order; all must call it."""
    if jax.process_count() == 1:
        return [text]
    data = np.frombuffer(text.encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.array([len(data)])).ravel()
    padded = np.zeros(max(1, sizes.max()), np.uint8)
    padded[: len(data)] = data
    rows = multihost_utils.process_allgather(padded)
    return [row[:size].tobytes().decode() for row, size in zip(rows, sizes, strict=True)]


def union(names: set[str]) -> set[str]:
    """The names that any process has; all must call it."""
    return {name for text in everyone(json.dumps(sorted(names))) for name in json.loads(text)}


def on_first(call: Callable[[], None]) -> None:
    """Process 0 does it, the others wait; what it refuses is refused by all."""
    error = ""
    if is_first():
        try:
            call()
        except UserError as refused:
            error = str(refused)
    if error := everyone(error)[0]:
        raise UserError(error)


class Stop:
    """Notes SIGTERM and Ctrl-C, which end the run after the step at hand; a second one ends it now."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self.together = jax.process_count() > 1
        self.before = {number: signal.signal(number, self._note) for number in self._numbers()}

    def _numbers(self) -> list[int]:
        # JAX itself waits for the SIGTERM of any process and finds a step that all of them can still reach.
        return [signal.SIGINT] if self.together else [signal.SIGINT, signal.SIGTERM]

    def _note(self, number: int, frame: Any) -> None:
        self.signal = number
        signal.signal(number, signal.SIG_DFL)
        if self.together:
            os.kill(os.getpid(), signal.SIGTERM)

    def asked(self, step: int) -> bool:
        """Whether to end after this step, the same in every process."""
        if self.together and multihost_utils.reached_preemption_sync_point(step):
            self.signal = self.signal or signal.SIGTERM
            return True
        return not self.together and self.signal is not None

    def restore(self) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
