"""Connect processes and devices, lock the output folder, and handle signals and errors."""

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
    """Configure JAX, and connect to the other processes, if any."""
    jax.config.update("jax_enable_x64", config.dtype == "float64")
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(Path.home() / ".cache" / "kfac-imagenet" / "programs"))
    if config.distributed or config.processes:
        where, n, i = config.processes or (None, None, None)
        # Process 0 may still write files when the others end, so allow some time.
        jax.distributed.initialize(where, n and int(n), i and int(i), shutdown_timeout_seconds=60)


def row_of_devices(wanted: int | None) -> Mesh:
    """Return a mesh of all devices in a row, sorted by process, or of `wanted` devices in a single process."""
    found = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    if wanted is not None and (wanted > len(found) or (jax.process_count() > 1 and wanted != len(found))):
        hint = "; JAX_NUM_CPU_DEVICES sets the number on a CPU" if found[0].platform == "cpu" else ""
        raise UserError(f"--devices {wanted} does not fit the {len(found)} device(s) of {jax.process_count()} "
                        f"process(es){hint}")  # fmt: skip
    return Mesh(np.array(found[:wanted]), (AXIS,), axis_types=(AxisType.Auto,))


def is_first() -> bool:
    """Return whether this process writes and prints."""
    return jax.process_index() == 0


def everyone(text: str) -> list[str]:
    """Return the texts from all processes, in process order. All processes must call it."""
    if jax.process_count() == 1:
        return [text]
    data = np.frombuffer(text.encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.array([len(data)])).ravel()
    padded = np.zeros(max(1, sizes.max()), np.uint8)
    padded[: len(data)] = data
    rows = multihost_utils.process_allgather(padded)
    return [row[:size].tobytes().decode() for row, size in zip(rows, sizes, strict=True)]


def on_first(call: Callable[[], Any]) -> Any:
    """Run `call` in process 0 while the others wait. If it fails, raise its error in all processes."""
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
    """Create the output folder, or check that the run in it has the same options and images.

    Return the folder and its lock.
    """
    if len(set(everyone(str(found)))) > 1:
        raise UserError("the processes do not see the same images; all of them must see --data-dir")
    # Each process names a new folder by its own clock. Use the name from process 0.
    config = dataclasses.replace(config, output=Path(everyone(str(config.output))[0]))
    return config.output, on_first(lambda: _open_output(config, found))


def _open_output(config: Any, found: dict[str, Any]) -> int:
    output, known, begun = config.output, (config.output / "config.json").exists(), cfg.begun(config.output)
    if output.exists() and not output.is_dir():
        raise UserError(f"--output {output} is a file, not a folder")
    if not known and output.exists() and set(os.listdir(output)) - {".lock", ".config.json"}:
        raise UserError(f"--output {output} is in use, but by no run of this script; name a new folder")
    if begun:
        saved, before = cfg.load(output)
        cfg.same_run(config, saved)
        if before != found:
            raise UserError(f"the data differ from the run in {output}: {found} now, {before} then; point "
                            "--data-dir to the same images")  # fmt: skip
    output.mkdir(parents=True, exist_ok=True)
    # The system holds the lock until this process ends, even after a crash.
    lock = os.open(output / ".lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise UserError(f"--output {output} is in use: another process trains there; name a new folder") from error
    except OSError:
        pass  # this file system has no locks
    if not begun:
        cfg.save(config, found, output)
    return lock


class Stop:
    """End the run after the current step at SIGTERM or Ctrl-C. A second signal ends it at once."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self.together = jax.process_count() > 1
        # With several processes, JAX handles SIGTERM. It finds a step that all processes can still reach.
        numbers = [signal.SIGINT] if self.together else [signal.SIGINT, signal.SIGTERM]
        self.before = {number: signal.signal(number, self._note) for number in numbers}

    def _note(self, number: int, frame: Any) -> None:
        self.signal = number
        signal.signal(number, signal.SIG_DFL)
        if self.together:
            os.kill(os.getpid(), signal.SIGTERM)

    def asked(self, step: int) -> bool:
        """Return whether to end after this step. The answer is the same in all processes."""
        if self.together and multihost_utils.reached_preemption_sync_point(step):
            self.signal = self.signal or signal.SIGTERM
            return True
        return not self.together and self.signal is not None

    def restore(self) -> int:
        """Restore the signal handlers. Return the exit code: 0, or 128 plus the signal's number, as in a shell.

        Wait for all processes first, because many batch systems end a job when its first process ends.
        """
        everyone("")
        for number, handler in self.before.items():
            signal.signal(number, handler)
        return 128 + self.signal if self.signal else 0


def script(main: Callable[[list[str]], int | None]) -> None:
    """Run `main`, and exit with the code that it returns. Report user and system errors in one sentence."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # exit at once, because other processes may wait for this process
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        os._exit(128 + signal.SIGPIPE)
    except OSError as error:
        if error.errno not in SYSTEM_ERRORS:
            raise
        sys.exit(f"error: {error.filename or 'a file'} cannot be read or written: {error.strerror}; correct this, and "
                 "the same command resumes the run from the last checkpoint")  # fmt: skip
