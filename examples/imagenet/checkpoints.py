"""Write and restore checkpoints for any number of devices.

A checkpoint holds the state (by orbax), other values (as JSON) and checksums for all files. The folder gets its final
name last. Damaged checkpoints are renamed, never restored. `weights(Path("runs/a"))` returns a run's weights for use
elsewhere.
"""

import functools
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

import kfac
from files import UserError
from processes import SYSTEM_ERRORS, everyone, on_first

# `sha256sum --check SHA256SUMS` also reads this file.
SUMS = "SHA256SUMS"


# Converting the state for any number of devices.


def for_any_devices(mesh: Any, specs: Any, local_batch: int, has_kfac: bool) -> tuple[Callable[[Any], Any], ...]:
    """Return two compiled functions: `gather` and its inverse, `scatter`.

    `gather` converts a state to its form on a single device. Mixed images stay split over the devices, but in the order
    of the global batch. `scatter` converts such a state for any number of devices.
    """

    def portable(state: Any) -> Any:
        mixed = jax.tree.map(lambda x: in_batch_order(x, mesh.size, local_batch), state.mixed)
        opt_state = kfac.state.gather_state(state.opt_state) if has_kfac else state.opt_state
        return state._replace(mixed=mixed, opt_state=opt_state)

    def placed(state: Any) -> Any:
        mixed = jax.tree.map(lambda x: in_device_order(x, mesh.size, local_batch), state.mixed)
        where = kfac.Distribution(mesh.axis_names[0])
        opt_state = state.opt_state
        if has_kfac:
            opt_state = kfac.state.scatter_state(opt_state, mesh.size, distribution=where)
        return state._replace(mixed=mixed, opt_state=opt_state)

    lying = functools.partial(jax.tree.map, functools.partial(NamedSharding, mesh))
    gather = jax.jit(portable, out_shardings=lying(specs._replace(opt_state=PartitionSpec())))
    return gather, jax.jit(placed, out_shardings=lying(specs))


def in_batch_order(x: jax.Array, devices: int, local: int) -> jax.Array:
    """Reorder an array that is split over devices like the images, into the order of the global batch."""
    return x.reshape(devices, -1, local, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)


def in_device_order(x: jax.Array, devices: int, local: int) -> jax.Array:
    """Invert `in_batch_order`."""
    return x.reshape(-1, devices, local, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)


# On disk.


class Checkpoints:
    """Keep a run's checkpoints in `folder`: the last `keep`, and the best by validation accuracy."""

    def __init__(self, folder: Path, keep: int, gather: Any = lambda state: state, scatter: Any = lambda state: state):
        """Set `gather`, which converts a state to its saved form, and `scatter`, which converts it back."""
        self.folder, self.keep, self.gather, self.scatter = folder.absolute(), keep, gather, scatter
        self.resumed: int | None = None
        on_first(lambda: list(map(shutil.rmtree, self.folder.glob("*.partial"))))

    def latest(self) -> int | None:
        return max(steps(self.folder), default=None)

    def describe(self) -> str:
        """Return advice for a user whose run has failed.

        The advice names the last good checkpoint. If the run was resumed from that checkpoint, it may have caused the
        failure, so the advice names the good checkpoint before it.
        """
        found = sorted(steps(self.folder), reverse=True)
        good = next((k for k in found if k != self.resumed and not damage(self.folder / str(k))), None)
        if self.resumed and (good is None or good < self.resumed):
            before = f"from {good}, whose checksums are right" if good else "from the beginning, as there is no other"
            place = self.folder / str(self.resumed)
            return f"the run was resumed from {place}; if you remove this checkpoint, the same command starts {before}"
        return f"the checkpoint {self.folder / str(good)} is good" if good else "no checkpoint was written yet"

    def restore(self, state: Any) -> tuple[Any, dict[str, Any]]:
        """Return the last undamaged state, placed like `state`, and the other values in its checkpoint.

        Raise `UserError` if there is no such checkpoint, or if it belongs to another run. Then nothing on disk changes.
        """
        like = self.gather(state)
        while (step := self.latest()) is not None:
            path, reason = self.folder / str(step), ""
            # Each process checks its share of the files.
            if not (bad := max(everyone(damage(path, jax.process_index(), jax.process_count())))):
                try:
                    saved = ocp.StandardCheckpointer().restore(path / "state", like)
                except Exception as error:  # orbax raises errors from tensorstore and the file system
                    _stop_at_system_error(error, path)
                    reason = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"
                if not (reason := max(everyone(reason))):
                    self.resumed = step
                    return self.scatter(saved), json.loads((path / "about.json").read_text())
                raise UserError(f"the checkpoint {path} is not from this run: {reason}; use the model, optimizer "
                                "and version of kfac that wrote it, or name another --output")  # fmt: skip
            if len(steps(self.folder)) == 1:
                raise UserError(f"the checkpoint {path} is damaged ({bad}), and there is no other; remove "
                                f"{self.folder} to start again")  # fmt: skip
            on_first(lambda at=path, why=bad: set_aside(at, why))  # type: ignore[misc]
        raise UserError(f"{self.folder} holds no checkpoint")

    def save(self, step: int, state: Any, extra: dict[str, Any], val_accuracy: float | None) -> None:
        """Write a checkpoint with the values `extra`, and then remove old checkpoints."""
        partial, path = self.folder / f"{step}.partial", self.folder / str(step)
        try:
            if path.exists():  # this step is already saved
                return
            on_first(lambda: partial.mkdir(parents=True))
            with ocp.StandardCheckpointer() as writer:
                writer.save(partial / "state", self.gather(state))
            on_first(lambda: self._finish(partial, path, {**extra, "val_accuracy": val_accuracy}))
        except Exception as error:  # orbax raises any type, as in `restore`
            reason = _system_error(error) or f"{type(error).__name__}: {str(error).strip()[:200]}"
            raise UserError(f"no checkpoint can be written to {self.folder}: {reason}; make room, and the same command "
                            "resumes from the last checkpoint") from error  # fmt: skip

    def _finish(self, partial: Path, path: Path, about: dict[str, Any]) -> None:
        (partial / "about.json").write_text(json.dumps(about))
        with (partial / SUMS).open("w") as file:
            file.writelines(f"{_sum(part)}  {part.relative_to(partial)}\n" for part in _contents(partial))
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
        found = sorted(steps(self.folder))
        for step in {*found} - {*found[-self.keep :], *[k for k, _ in by_accuracy(self.folder)[:1]]}:
            gone = (self.folder / str(step)).rename(self.folder / f"{step}.partial")
            shutil.rmtree(gone)


def steps(folder: Path) -> list[int]:
    return [int(path.name) for path in folder.glob("*/") if path.name.isdecimal()]


def by_accuracy(folder: Path) -> list[tuple[int, float]]:
    """Return steps and accuracies of all checkpoints with a readable accuracy, best first."""
    found = []
    for step in steps(folder):
        try:
            accuracy = json.loads((folder / str(step) / "about.json").read_text())["val_accuracy"]
            found.append((step, -1.0 if accuracy is None else float(accuracy)))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return sorted(found, key=lambda row: (row[1], row[0]), reverse=True)


def _sum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _contents(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file() and file.name != SUMS)


def damage(path: Path, first: int = 0, every: int = 1) -> str:
    """Return the first damage in the checkpoint `path`, or an empty string.

    Checksums are compared for the files `first`, `first + every` and so on.
    """
    try:
        rows = (path / SUMS).read_text().split("\n")[:-1]
        known = {name: digest for digest, name in (row.split("  ", 1) for row in rows)}
        found = {str(file.relative_to(path)) for file in _contents(path)}
        if differs := sorted(found ^ known.keys()):
            return f"{differs[0]} is {'not in ' + SUMS if differs[0] in found else 'missing'}"
        return next((f"{name} is not as it was written" for name in sorted(known)[first::every]
                     if _sum(path / name) != known[name]), "")  # fmt: skip
    except ValueError:
        return f"{SUMS} is damaged"
    except OSError as error:
        _stop_at_system_error(error, path)
        return f"{error.filename or SUMS}: {error.strerror}"


def set_aside(path: Path, why: str) -> None:
    place = next(place for k in range(10**6) if not (place := path.with_name(f"damaged-{path.name}-{k}")).exists())
    path.rename(place)
    print(f"the checkpoint {path} is damaged ({why}); it was renamed to {place.name}", flush=True)


def _system_error(error: BaseException | None) -> str:
    """Return the system's message if the system, not the checkpoint, caused the error. Else return an empty string."""
    while error is not None:
        for code in SYSTEM_ERRORS:  # tensorstore has the system's message in its text
            if getattr(error, "errno", None) == code or os.strerror(code) in str(error):
                return os.strerror(code)
        error = error.__cause__ or error.__context__
    return ""


def _stop_at_system_error(error: BaseException, path: Path) -> None:
    if reason := _system_error(error):
        raise UserError(f"{path} cannot be read now: {reason}; it may be good, so nothing was changed") from error


def weights(run: Path) -> tuple[Any, Any, int]:
    """Return parameters, batch-norm averages and step of a run's best undamaged checkpoint.

    If the run averages its weights, return the averages.
    """
    folder = run.absolute() / "checkpoints"
    for step, _ in by_accuracy(folder):
        if not (reason := damage(folder / str(step))):
            break
        print(f"the checkpoint {folder / str(step)} is damaged ({reason}); it is skipped", flush=True)
    else:
        raise UserError(f"{run} holds no undamaged checkpoint; it must be the output folder of a run")
    checkpointer, path = ocp.PyTreeCheckpointer(), folder / str(step) / "state"
    tree = checkpointer.metadata(path).item_metadata.tree
    plain = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
    saved = checkpointer.restore(path, restore_args=plain)
    return *(saved.get("ema") or (saved["params"], saved.get("batch_stats", {}))), step
