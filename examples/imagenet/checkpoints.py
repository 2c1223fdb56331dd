"""Checkpoints by orbax, written while training goes on: the last few, and the best by validation accuracy."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as ocp_managers

import devices
import kfac
from errors import UserError

# In place of an accuracy, below all of them.
NOT_VALIDATED = -1.0


def portable(num_devices: int, local_batch: int, state: Any) -> Any:
    """The state of a run as one device would hold it, but for mixed images, which stay split, in their batch's order.

    A copy, for it is written while the next steps overwrite the state.
    """
    if _has_kfac(state):
        state = state._replace(opt_state=kfac.gather_state(state.opt_state))
    mixed = jax.tree.map(lambda x: devices.in_batch_order(x, num_devices, local_batch), state.mixed)
    return jax.tree.map(jnp.copy, state._replace(mixed=mixed))


def placed(num_devices: int, local_batch: int, state: Any) -> Any:
    """The inverse of `portable`, for any number of devices."""
    if _has_kfac(state):
        state = state._replace(opt_state=kfac.scatter_state(state.opt_state, num_devices))
    mixed = jax.tree.map(lambda x: devices.in_device_order(x, num_devices, local_batch), state.mixed)
    return state._replace(mixed=mixed)


def _has_kfac(state: Any) -> bool:
    nodes = jax.tree.leaves(state.opt_state, is_leaf=lambda node: isinstance(node, kfac.KfacState))
    return any(isinstance(node, kfac.KfacState) for node in nodes)


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


class Checkpoints:
    """The checkpoints of a run, in `folder`."""

    def __init__(self, folder: Path, keep: int) -> None:
        def accuracy(metrics: Any) -> float:
            return float(metrics["val_accuracy"])

        policies = [ocp_managers.LatestN(keep), ocp_managers.BestN(get_metric_fn=accuracy, n=1)]
        self._manager = ocp.CheckpointManager(
            folder.absolute(),
            options=ocp.CheckpointManagerOptions(
                best_fn=accuracy,
                preservation_policy=ocp_managers.AnyPreservationPolicy(policies),
                enable_async_checkpointing=True,
            ),
        )

    def latest(self) -> int | None:
        """Step of the last one, complete or being written."""
        return self._manager.latest_step()

    def best(self) -> float:
        """The best validation accuracy of one that is kept."""
        known = [self._manager.metrics(step) for step in self._manager.all_steps()]
        return max((metrics["val_accuracy"] for metrics in known if metrics), default=NOT_VALIDATED)

    def restore(self, like: Any) -> tuple[Any, dict[str, Any]]:
        """The last state, with the shapes and the places of `like`, and what was saved beside it.

        Raises `UserError` where it cannot be read, or is one of another run; what is on disk stays as it is.
        """
        step = self._manager.latest_step()
        items = ocp.args.Composite(state=ocp.args.StandardRestore(like), extra=ocp.args.JsonRestore())
        try:
            saved = self._manager.restore(step, args=items)
        except Exception as error:  # orbax raises what it meets: of JSON, of tensorstore, of the file system
            raise UserError(self._complaint(step, like, error)) from error
        return saved["state"], saved["extra"]

    def _complaint(self, step: int, like: Any, error: Exception) -> str:
        """Why the checkpoint of `step` is of no use, and what to do."""
        folder = Path(self._manager.directory) / str(step)
        if differs := _difference(folder / "state", like):
            return (f"the checkpoint {folder} is not one of this run: {differs}; resume with the model, the options of "
                    "the optimizer and the version of kfac that wrote it, or start a new run")  # fmt: skip
        earlier = [other for other in self._manager.all_steps() if other < step]
        rest = f"--resume then goes on from step {max(earlier)}" if earlier else "there is none before it"
        reason = (str(error).strip().splitlines() or [""])[0][:200]
        return (f"the checkpoint {folder} cannot be read, its files are cut short or missing "
                f"({type(error).__name__}: {reason}); remove that folder, {rest}")  # fmt: skip

    def save(self, step: int, state: Any, extra: dict[str, Any], val_accuracy: float | None) -> None:
        """Returns as soon as `state` is on the host; it must not share memory with what the next step overwrites."""
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), extra=ocp.args.JsonSave(extra))
        # orbax warns of a checkpoint without metrics; one that was not validated is never the best.
        metrics = {"val_accuracy": NOT_VALIDATED if val_accuracy is None else val_accuracy}
        self._manager.save(step, args=items, metrics=metrics)

    def close(self) -> None:
        """Waits for what is being written."""
        self._manager.close()
