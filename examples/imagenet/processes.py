"""Processes and devices: who takes part, what they tell each other, who trains in a folder, which signals end a run."""

import dataclasses
import errno
import fcntl
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh

import config as cfg
from files import UserError
from recipe import AXIS

SYSTEM_ERRORS = (errno.EIO, errno.ESTALE, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ETIMEDOUT, errno.EACCES)


def meet(config: Any) -> None:
    """Sets JAX up, and meets the other processes, if there are any."""
    jax.config.update("jax_enable_x64", config.dtype == "float64")
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(Path.home() / ".cache" / "kfac-imagenet" / "programs"))
    if config.distributed or config.processes:
        where, n, i = config.processes or (None, None, None)
        # Processes that end differ by what process 0 still writes, hence some patience.
        jax.distributed.initialize(where, n and int(n), i and int(i), shutdown_timeout_seconds=60)


def row_of_devices(wanted: int | None) -> Mesh:
    """All devices of all processes in a row, those of a process side by side; or `wanted` of one process."""
    found = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    if wanted is not None and (wanted > len(found) or (jax.process_count() > 1 and wanted != len(found))):
        hint = "; JAX_NUM_CPU_DEVICES sets the number for a CPU" if found[0].platform == "cpu" else ""
        raise UserError(f"--devices {wanted} does not fit the {len(found)} of {jax.process_count()} process(es){hint}")
    return Mesh(np.array(found[:wanted]), (AXIS,), axis_types=(AxisType.Auto,))


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


def on_first(call: Callable[[], Any]) -> Any:
    """Process 0 does it, the others wait; what it refuses, or the system refuses it, is refused by all."""
    error, result = "", None
    try:
        result = call() if is_first() else None
    except UserError as refused:
        error = str(refused)
    except OSError as refused:
        error = f"{refused.filename or 'a file'} cannot be written: {refused.strerror}"
    if error := everyone(error)[0]:
        raise UserError(error)
    return result


def open_output(config: Any, found: dict[str, Any]) -> tuple[Path, int | None]:
    """Makes the output folder, or sees that the run in it is this one, of the same images. The folder and its lock."""
    if len(set(everyone(str(found)))) > 1:
        raise UserError("the processes do not see the same images; --data-dir must be one that all of them see")
    # Each process has named a new folder by its own clock.
    config = dataclasses.replace(config, output=Path(everyone(str(config.output))[0]))
    return config.output, on_first(lambda: _open_output(config, found))


def _open_output(config: Any, found: dict[str, Any]) -> int:
    output, known, begun = config.output, (config.output / "config.json").exists(), cfg.begun(config.output)
    if output.exists() and not output.is_dir():
        raise UserError(f"--output {output} is a file, not a folder")
    if not known and output.exists() and set(os.listdir(output)) - {".lock", ".config.json"}:
        raise UserError(f"--output {output} is in use, by no run of this script; name a new folder")
    if begun:
        saved, before = cfg.load(output)
        cfg.same_run(config, saved)
        if before != found:
            raise UserError(f"the data are not those of the run in {output}: {found} now, {before} then; point "
                            "--data-dir to the same images")  # fmt: skip
    output.mkdir(parents=True, exist_ok=True)
    # Held until this process ends, however it does, which no package does better.
    lock = os.open(output / ".lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise UserError(f"--output {output} is in use: another process trains there; name a new one") from error
    except OSError:
        pass  # a file system without locks
    if not begun:
        cfg.save(config, found, output)
    return lock


class Stop:
    """Notes SIGTERM and Ctrl-C, which end the run after the step at hand; a second one ends it now."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self.together = jax.process_count() > 1
        # JAX itself waits for the SIGTERM of any process and finds a step that all of them can still reach.
        numbers = [signal.SIGINT] if self.together else [signal.SIGINT, signal.SIGTERM]
        self.before = {number: signal.signal(number, self._note) for number in numbers}

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

    def restore(self) -> int:
        """The exit code, 128 + the signal's number as in a shell. Waits for all processes: the first to end would end
        the others in many a batch system.
        """
        everyone("")
        for number, handler in self.before.items():
            signal.signal(number, handler)
        return 128 + self.signal if self.signal else 0


def script(main: Callable[[list[str]], int | None]) -> None:
    """Runs a script, whose refusals and trouble with the system are one sentence; `main` returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # at once: the other processes may wait for this one
    except BrokenPipeError:  # `| head` has seen enough
        os._exit(128 + signal.SIGPIPE)
    except OSError as error:
        if error.errno not in SYSTEM_ERRORS:
            raise
        sys.exit(f"error: {error.filename or 'a file'} cannot be read or written: {error.strerror}; mend that, and the "
                 "same command goes on from the last checkpoint")  # fmt: skip
