"""Checkpoints by orbax, written while training goes on, for any number of devices; and what a fault makes of them.

Each has the checksums of all its files, written last. What does not have them any more is set aside, never restored.

Weights of a run, for use elsewhere: `weights(Path("runs/a"))`.
"""

import contextlib
import functools
import hashlib
import json
import logging
import math
import os
import shutil
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint import checkpoint_managers as ocp_managers

import config as cfg
import kfac
import recipe
from files import UserError
from processes import SYSTEM_ERRORS, everyone, is_first, on_first

# In place of an accuracy, below all of them.
NOT_VALIDATED = -1.0
# Batches out of which a run that goes on makes its mixed images again: all before weighs some 2^-24 of a pixel.
REMADE = 10
# What `sha256sum --check SHA256SUMS` reads, too.
SUMS = "SHA256SUMS"
SAME, SPLIT = PartitionSpec(), PartitionSpec(recipe.AXIS)


# The state of a run for any number of devices.


def for_any_devices(mesh: Any, specs: Any, local_batch: int, lean: bool) -> tuple[Callable[[Any], Any], ...]:
    """Two functions, compiled for a row of devices: a state as one device would hold it, but for mixed images, which
    stay split, in their batch's order (with `lean` they are left out); and the inverse, for any number of devices.
    """

    def portable(state: Any) -> Any:
        if _has_kfac(state):
            state = state._replace(opt_state=kfac.state.gather_state(state.opt_state))
        mixed = jax.tree.map(lambda x: in_batch_order(x, mesh.size, local_batch), state.mixed)
        # A copy, for it is written while the next steps overwrite the state.
        return jax.tree.map(jnp.copy, state._replace(mixed=mixed))

    def placed(state: Any) -> Any:
        if _has_kfac(state):
            state = state._replace(opt_state=kfac.state.scatter_state(state.opt_state, mesh.size))
        return state._replace(mixed=jax.tree.map(lambda x: in_device_order(x, mesh.size, local_batch), state.mixed))

    def lying(specs: Any) -> Any:
        is_spec = lambda x: isinstance(x, PartitionSpec)  # noqa: E731
        return jax.tree.map(functools.partial(NamedSharding, mesh), specs, is_leaf=is_spec)

    gather = jax.jit(portable, out_shardings=lying(specs._replace(opt_state=SAME)))
    scatter = jax.jit(placed, out_shardings=lying(specs))
    return (lambda state: gather(state._replace(mixed=()) if lean else state)), scatter


def is_lean(wanted: str, mixed: Any) -> bool:
    """Whether checkpoints leave the mixed images out; of its own accord above 1 GB."""
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(mixed))
    return size > {"keep": math.inf, "auto": 1e9, "remake": 0}[wanted]


def mixed_again(run: recipe.Run, mesh: Any, first: int, batches: Any, mixed: Any) -> Any:
    """What running mixup carries after `batches`, those from step `first` on: for a checkpoint that left it out."""
    specs: Any = {"in_specs": (SAME, SPLIT, SPLIT), "out_specs": SPLIT}
    mix = jax.jit(jax.shard_map(lambda *args: recipe.augmented(run, *args)[1], mesh=mesh, **specs))
    for step, got in enumerate(batches, first):
        mixed = mix(jnp.int32(step), (got.images, got.labels), mixed)
    return mixed


def in_batch_order(x: jax.Array, devices: int, local: int) -> jax.Array:
    """An array that is split over devices like the images, in the order of the global batch."""
    return x.reshape(devices, -1, local, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)


def in_device_order(x: jax.Array, devices: int, local: int) -> jax.Array:
    """The inverse of `in_batch_order`."""
    return x.reshape(-1, devices, local, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)


def _has_kfac(state: Any) -> bool:
    nodes = jax.tree.leaves(state.opt_state, is_leaf=lambda node: isinstance(node, kfac.state.KfacState))
    return any(isinstance(node, kfac.state.KfacState) for node in nodes)


# On disk.


class Checkpoints:
    """The checkpoints of a run in `folder`, written while it goes on: the last few, and the best by accuracy."""

    def __init__(
        self,
        folder: Path,
        keep: int,
        gather: Callable[[Any], Any] = lambda state: state,
        scatter: Callable[[Any], Any] = lambda state: state,
    ) -> None:
        """`gather` makes of a state what is saved, `scatter` a state of that."""
        self.folder, self.keep, self.gather, self.scatter = folder.absolute(), keep, gather, scatter
        self.resumed: int | None = None
        on_first(lambda: sweep(self.folder))
        self._open()

    def _open(self) -> None:
        policies = [ocp_managers.LatestN(self.keep), ocp_managers.BestN(get_metric_fn=_accuracy, n=1)]
        options = ocp.CheckpointManagerOptions(
            best_fn=_accuracy, preservation_policy=ocp_managers.AnyPreservationPolicy(policies),
            enable_async_checkpointing=True,
            # Called when all files are there, of all processes, and before the folder gets its name.
            async_options=ocp.AsyncOptions(post_finalization_callback=lambda: write_sums(self.folder)),
        )  # fmt: skip
        self._manager = ocp.CheckpointManager(self.folder, options=options)

    def latest(self) -> int | None:
        """Step of the last one, complete or being written."""
        return self._manager.latest_step()

    def describe(self) -> str:
        """For who has to go back to the last one, or to the one before that from which this run went on."""
        steps = sorted((int(path.name) for path in step_folders(self.folder)), reverse=True)
        good = next((k for k in steps if k != self.resumed and not damage(self.folder / str(k))), None)
        if self.resumed and (good is None or good < self.resumed):
            before = f"from {good}, whose checksums are right" if good else "anew, for there is none before it"
            place = self.folder / str(self.resumed)
            return f"the run went on from the checkpoint {place}; without it the same command begins {before}"
        return f"the checkpoint {self.folder / str(good)} is good" if good else "no checkpoint was written yet"

    def restore(self, state: Any) -> tuple[Any, dict[str, Any]]:
        """The last state that is as it was written, in the shapes and places of `state`, and what was saved beside it.

        One that is damaged is set aside under another name, for the one before. Raises `UserError` where there is none,
        or where it is one of another run; then what is on disk stays as it is.
        """
        like = self.gather(state)
        while (step := self.latest()) is not None:
            # Each process checks its share of the files.
            reason = damage(self.folder / str(step), jax.process_index(), jax.process_count())
            reason = next((one for one in everyone(reason) if one), "")
            if intact := not reason:
                try:
                    items = ocp.args.Composite(state=ocp.args.StandardRestore(like), extra=ocp.args.JsonRestore())
                    saved = self._manager.restore(step, args=items)
                except Exception as error:  # orbax raises what it meets: of JSON, of tensorstore, of the file system
                    _stop_at_system_error(error, self.folder / str(step))
                    reason = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"
                reason = next((one for one in everyone(reason) if one), "")
            if not reason:
                self.resumed = step
                return self.scatter(saved["state"]), saved["extra"]
            if intact and (differs := _difference(self.folder / str(step) / "state", like)):
                raise UserError(
                    f"the checkpoint {self.folder / str(step)} is not one of this run: {differs}; go on with the "
                    "model, the optimizer and the version of kfac that wrote it, or name another --output"
                )
            self._manager.close()
            if len(list(step_folders(self.folder))) == 1:
                raise UserError(f"the checkpoint {self.folder / str(step)} is damaged ({reason}), and there is no "
                                f"other; remove {self.folder} to begin anew")  # fmt: skip
            on_first(lambda at=step, why=reason: set_aside(self.folder / str(at), why))  # type: ignore[misc]
            self._open()
        raise UserError(f"{self.folder} holds no checkpoint")

    def save(self, step: int, state: Any, extra: dict[str, Any], val_accuracy: float | None) -> None:
        """Returns as soon as `state` is on the host; it must not share memory with what the next step overwrites."""
        items = ocp.args.Composite(state=ocp.args.StandardSave(self.gather(state)), extra=ocp.args.JsonSave(extra))
        # orbax warns of a checkpoint without metrics; one that was not validated is never the best.
        metrics = {"val_accuracy": NOT_VALIDATED if val_accuracy is None else val_accuracy}
        with self._writing():
            self._manager.save(step, args=items, metrics=metrics)

    def close(self) -> None:
        """Waits for what is being written."""
        with self._writing():
            self._manager.close()

    @contextlib.contextmanager
    def _writing(self) -> Any:
        try:
            yield
        except Exception as error:  # as in `restore`, and from the thread that writes
            reason = _system_error(error) or f"{type(error).__name__}: {str(error).strip()[:200]}"
            raise UserError(f"no checkpoint can be written to {self.folder}: {reason}; make room, and the same command "
                            "goes on from the last one that is there") from error  # fmt: skip


def _accuracy(metrics: Any) -> float:
    return float(metrics["val_accuracy"])


def step_folders(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name.isdecimal()] if folder.is_dir() else []


def sweep(folder: Path) -> None:
    """Removes what a kill left half written or half deleted, and sets aside a newest one without its metadata."""
    if not folder.is_dir():
        return
    for partial in folder.glob("*.orbax-checkpoint-tmp*"):
        shutil.rmtree(partial, ignore_errors=True)
    good = [int(path.name) for path in step_folders(folder) if _is_whole(path)]
    for path in step_folders(folder):
        if int(path.name) not in good:
            # Half deleted, as a later one was good; or damaged.
            if any(step > int(path.name) for step in good) and not (path / SUMS).exists():
                shutil.rmtree(path, ignore_errors=True)
            else:
                set_aside(path, "its metadata is missing or damaged")


def _is_whole(path: Path) -> bool:
    """Whether the small files, which orbax reads before any other, are there."""
    try:
        json.loads((path / "extra" / "metadata").read_text())
        json.loads((path / "_CHECKPOINT_METADATA").read_text())
        return "val_accuracy" in json.loads((path / "metrics" / "metrics").read_text())
    except ValueError:
        return False
    except OSError as error:
        _stop_at_system_error(error, path)
        return False


def _contents(path: Path) -> list[Path]:
    """All files of a checkpoint but its own few notes, to which orbax adds the time when it gives it its name."""
    return sorted(file for item in path.iterdir() for file in item.rglob("*") if file.is_file())


def _sum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_sums(folder: Path) -> None:
    """Adds checksums to the checkpoint in `folder` that has all its files and not yet its name."""
    if is_first():
        for whole in folder.glob("*.orbax-checkpoint-tmp*"):
            lines = [f"{_sum(path)}  {path.relative_to(whole)}\n" for path in _contents(whole)]
            with (whole / SUMS).open("w") as file:
                file.writelines(lines)
                file.flush()
                os.fsync(file.fileno())


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


def hush() -> None:
    """Lets threads of orbax fail in silence: what went wrong there is raised where the main thread waits for them."""
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    loud, loud_in_threads = sys.excepthook, threading.excepthook

    def of_orbax(trace: Any) -> bool:
        return any("orbax" in frame.f_code.co_filename for frame, _ in traceback.walk_tb(trace))

    def in_threads(args: Any) -> None:
        if not of_orbax(args.exc_traceback):
            loud_in_threads(args)

    def elsewhere(kind: Any, error: Any, trace: Any) -> None:
        # tensorstore calls this hook in its own threads, when the loop that it would answer to has ended.
        if threading.current_thread() is threading.main_thread() and "Event loop is closed" not in str(error):
            loud(kind, error, trace)

    sys.excepthook, threading.excepthook = elsewhere, in_threads


def set_aside(path: Path, why: str) -> None:
    place = next(place for k in range(10**6) if not (place := path.with_name(f"damaged-{path.name}-{k}")).exists())
    path.rename(place)
    print(f"the checkpoint {path} is damaged ({why}); it is set aside as {place.name}", flush=True)


def _system_error(error: BaseException | None) -> str:
    """What the system said where it, and not the files, is the cause; else empty."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in SYSTEM_ERRORS:
            return os.strerror(error.errno)
        for code in SYSTEM_ERRORS:  # tensorstore says it in words
            if os.strerror(code) in str(error):
                return os.strerror(code)
        error = error.__cause__ or error.__context__
    return ""


def _stop_at_system_error(error: BaseException, path: Path) -> None:
    if reason := _system_error(error):
        raise UserError(f"{path} cannot be read now: {reason}; it may be good, so nothing was changed") from error


def _difference(folder: Path, like: Any) -> str:
    """In what the state in `folder` differs from `like`; empty where it does not or cannot be read."""

    def shapes(tree: Any) -> dict[str, tuple[int, ...]]:
        leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
        return {jax.tree_util.keystr(path, simple=True, separator="/"): tuple(leaf.shape) for path, leaf in leaves}

    try:
        found = shapes(ocp.PyTreeCheckpointer().metadata(folder).item_metadata.tree)
    except Exception:  # as in `restore`
        return ""
    wanted = shapes(like)
    for path in sorted(wanted.keys() | found.keys()):
        if path not in found:
            return f"it has no {path}"
        if path not in wanted:
            return f"it has {path}, which this run does not"
        if found[path] != wanted[path]:
            return f"its {path} has shape {list(found[path])}, that of this run {list(wanted[path])}"
    return ""


def best(run: Path) -> tuple[int, Path]:
    """Step and folder of a run's best checkpoint, of those that are as they were written."""
    found = [(json.loads((path / "metrics" / "metrics").read_text())["val_accuracy"], int(path.name), path)
             for path in step_folders(run.absolute() / "checkpoints") if _is_whole(path)]  # fmt: skip
    for _, step, path in sorted(found, reverse=True):
        if not (reason := damage(path)):
            return step, path
        print(f"the checkpoint {path} is damaged ({reason}) and left out", flush=True)
    raise UserError(f"{run} holds no checkpoint{' that is as it was written' * bool(found)}; it must be the output "
                    "folder of a run")  # fmt: skip


def weights(run: Path) -> tuple[Any, Any, int]:
    """Parameters and batch-norm averages of a run's best checkpoint as NumPy arrays (averaged ones if it has them), and
    its step."""
    step, path = best(run)
    checkpointer = ocp.PyTreeCheckpointer()
    tree = checkpointer.metadata(path / "state").item_metadata.tree
    wanted = "ema" if jax.tree.leaves(tree.get("ema")) else None
    part = (
        {wanted: tree[wanted]} if wanted else {name: tree[name] for name in ("params", "batch_stats") if name in tree}
    )
    try:
        saved = checkpointer.restore(path / "state", args=ocp.args.PyTreeRestore(
            item=part, partial_restore=True,
            restore_args=jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), part),
        ))  # fmt: skip
    except Exception as error:
        raise UserError(f"the checkpoint {path} cannot be read ({type(error).__name__})") from error
    return *(saved["ema"] if wanted else (saved["params"], saved.get("batch_stats", {}))), step


def to_begin_with(config: Any) -> Path | None:
    """The run of `--init-from`, which must have a checkpoint, unless the run that it is for has one already."""
    if config.init_from is None or cfg.begun(config.output):
        return None
    run = Path(config.init_from)
    best(run)
    return run


def taken_over(run: Path, variables: dict[str, Any]) -> dict[str, Any]:
    """`variables` with the weights of `run` where they have the same shapes; what has others, as a new head, stays."""
    params, batch_stats, _ = weights(run)
    known = {jax.tree_util.keystr(path): leaf for path, leaf in
             jax.tree_util.tree_flatten_with_path({"params": params, "batch_stats": batch_stats})[0]}  # fmt: skip
    taken = 0

    def take(path: Any, own: jax.Array) -> jax.Array:
        nonlocal taken
        found = known.get(jax.tree_util.keystr(path))
        if found is None or found.shape != own.shape:
            return own
        taken += 1
        return jax.device_put(found.astype(own.dtype), own.sharding)

    variables = jax.tree_util.tree_map_with_path(take, variables)
    total = len(jax.tree.leaves(variables))
    if 2 * taken < total:
        raise UserError(f"--init-from {run} fits {taken} of the {total} arrays of this network; give the same --arch")
    if is_first():
        print(f"{taken} of {total} arrays begin as those of {run}", flush=True)
    return variables
