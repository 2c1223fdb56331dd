"""Checkpoints, for any number of devices: the state by orbax, what else a run must know as JSON, and the checksums of
all of it, written before the folder gets its name. What is not as it was written is set aside, never restored.

Weights of a run, for use elsewhere: `weights(Path("runs/a"))`.
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

# What `sha256sum --check SHA256SUMS` reads, too.
SUMS = "SHA256SUMS"


# The state of a run for any number of devices.


def for_any_devices(mesh: Any, specs: Any, local_batch: int, has_kfac: bool) -> tuple[Callable[[Any], Any], ...]:
    """Two functions, compiled for a row of devices: a state as one device would hold it, but for mixed images, which
    stay split, in their batch's order; and the inverse, for any number of devices.
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
    """An array that is split over devices like the images, in the order of the global batch."""
    return x.reshape(devices, -1, local, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)


def in_device_order(x: jax.Array, devices: int, local: int) -> jax.Array:
    """The inverse of `in_batch_order`."""
    return x.reshape(-1, devices, local, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)


# On disk.


class Checkpoints:
    """The checkpoints of a run in `folder`: the last few, and the best by accuracy."""

    def __init__(self, folder: Path, keep: int, gather: Any = lambda state: state, scatter: Any = lambda state: state):
        """`gather` makes of a state what is saved, `scatter` a state of that."""
        self.folder, self.keep, self.gather, self.scatter = folder.absolute(), keep, gather, scatter
        self.resumed: int | None = None
        on_first(lambda: list(map(shutil.rmtree, self.folder.glob("*.partial"))))

    def latest(self) -> int | None:
        return max(steps(self.folder), default=None)

    def describe(self) -> str:
        """For who has to go back to the last one, or to the one before that from which this run went on."""
        found = sorted(steps(self.folder), reverse=True)
        good = next((k for k in found if k != self.resumed and not damage(self.folder / str(k))), None)
        if self.resumed and (good is None or good < self.resumed):
            before = f"from {good}, whose checksums are right" if good else "anew, for there is none before it"
            place = self.folder / str(self.resumed)
            return f"the run went on from the checkpoint {place}; without it the same command begins {before}"
        return f"the checkpoint {self.folder / str(good)} is good" if good else "no checkpoint was written yet"

    def restore(self, state: Any) -> tuple[Any, dict[str, Any]]:
        """The last state that is as it was written, placed like `state`, and what was saved beside it.

        Raises `UserError` where there is none, or where it is one of another run; then nothing on disk is changed.
        """
        like = self.gather(state)
        while (step := self.latest()) is not None:
            path, reason = self.folder / str(step), ""
            # Each process checks its share of the files.
            if not (bad := max(everyone(damage(path, jax.process_index(), jax.process_count())))):
                try:
                    saved = ocp.StandardCheckpointer().restore(path / "state", like)
                except Exception as error:  # orbax raises what it meets: of tensorstore, of the file system
                    _stop_at_system_error(error, path)
                    reason = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"
                if not (reason := max(everyone(reason))):
                    self.resumed = step
                    return self.scatter(saved), json.loads((path / "about.json").read_text())
                raise UserError(f"the checkpoint {path} is not one of this run: {reason}; go on with the model, "
                                "optimizer and version of kfac that wrote it, or name another --output")  # fmt: skip
            if len(steps(self.folder)) == 1:
                raise UserError(f"the checkpoint {path} is damaged ({bad}), and there is no other; remove "
                                f"{self.folder} to begin anew")  # fmt: skip
            on_first(lambda at=path, why=bad: set_aside(at, why))  # type: ignore[misc]
        raise UserError(f"{self.folder} holds no checkpoint")

    def save(self, step: int, state: Any, extra: dict[str, Any], val_accuracy: float | None) -> None:
        """Returns when it is written, with `extra` beside it; and removes those that are not kept."""
        partial, path = self.folder / f"{step}.partial", self.folder / str(step)
        try:
            if path.exists():  # nothing has happened since
                return
            on_first(lambda: partial.mkdir(parents=True))
            with ocp.StandardCheckpointer() as writer:
                writer.save(partial / "state", self.gather(state))
            on_first(lambda: self._finish(partial, path, {**extra, "val_accuracy": val_accuracy}))
        except Exception as error:  # as in `restore`
            reason = _system_error(error) or f"{type(error).__name__}: {str(error).strip()[:200]}"
            raise UserError(f"no checkpoint can be written to {self.folder}: {reason}; make room, and the same command "
                            "goes on from the last one that is there") from error  # fmt: skip

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
    """Steps and accuracies of the checkpoints that say one, the best first."""
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
    """What is not as it was written in the checkpoint `path`, of every so many files; empty if nothing."""
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
    print(f"the checkpoint {path} is damaged ({why}); it is set aside as {place.name}", flush=True)


def _system_error(error: BaseException | None) -> str:
    """What the system said where it, and not the files, is the cause; else empty."""
    while error is not None:
        for code in SYSTEM_ERRORS:  # tensorstore says it in words
            if getattr(error, "errno", None) == code or os.strerror(code) in str(error):
                return os.strerror(code)
        error = error.__cause__ or error.__context__
    return ""


def _stop_at_system_error(error: BaseException, path: Path) -> None:
    if reason := _system_error(error):
        raise UserError(f"{path} cannot be read now: {reason}; it may be good, so nothing was changed") from error


def weights(run: Path) -> tuple[Any, Any, int]:
    """Parameters (averaged ones if it has them) and batch-norm averages of a run's best good checkpoint, its step."""
    folder = run.absolute() / "checkpoints"
    for step, _ in by_accuracy(folder):
        if not (reason := damage(folder / str(step))):
            break
        print(f"the checkpoint {folder / str(step)} is damaged ({reason}) and left out", flush=True)
    else:
        raise UserError(f"{run} holds no checkpoint that is as it was written; it must be the output folder of a run")
    checkpointer, path = ocp.PyTreeCheckpointer(), folder / str(step) / "state"
    tree = checkpointer.metadata(path).item_metadata.tree
    plain = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
    saved = checkpointer.restore(path, restore_args=plain)
    return *(saved.get("ema") or (saved["params"], saved.get("batch_stats", {}))), step
