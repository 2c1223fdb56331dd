"""Around the steps of a run: its output folder, validation, traces, and its end when something became NaN."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import jax
from jax.sharding import Mesh

import config as cfg
import data
import devices
from checkpoints import Checkpoints
from errors import UserError


def open_output(config: cfg.Config, dataset: data.Dataset) -> None:
    """Makes the output folder, marked with the configuration; refuses one that is in use."""
    output = config.run.output
    assert output is not None
    if config.run.resume:
        return
    if output.exists() and not output.is_dir():
        raise UserError(f"--output {output} is a file, not a folder")
    if output.exists() and any(output.iterdir()):
        raise UserError(f"--output {output} is in use; go on with that run by --resume, or name a "
                        "new folder")  # fmt: skip
    try:
        output.mkdir(parents=True, exist_ok=True)
        cfg.save(config, dataset.found(), output)
    except OSError as error:
        raise UserError(f"--output {output} cannot be written: {error.strerror}") from error


def validate(
    evaluate: Callable[..., Any],
    state: Any,
    dataset: data.Dataset,
    size: int,
    mesh: Mesh,
    note_broken: Callable[[tuple[str, ...]], None],
) -> dict[str, float]:
    """Loss and accuracy over all readable validation images, each counted once."""
    sums = [0.0, 0.0, 0.0]
    rows = devices.own_rows(mesh, size // mesh.size, 1)
    batches = data.val_batches(dataset.val, size, rows)
    for got in data.prefetch(batches, functools.partial(devices.place, mesh)):
        note_broken(got.broken)
        new = evaluate(state.params, state.batch_stats, got._replace(broken=()))
        sums = [a + float(b) for a, b in zip(sums, new, strict=True)]
    if not sums[2]:
        raise UserError("none of the validation images can be read")
    return {"val_loss": sums[0] / sums[2], "val_accuracy": sums[1] / sums[2]}


class Trace:
    """Writes what `jax.profiler` sees of the steps from the first to the last of `steps`, (0, 0) for none."""

    def __init__(self, steps: tuple[int, int], folder: Path) -> None:
        self.first, self.last = steps
        self.folder = folder
        self.running = False

    def before(self, step: int) -> None:
        if self.first <= step <= self.last and not self.running:
            jax.profiler.start_trace(str(self.folder))
            self.running = True

    def after(self, step: int, result: Any) -> None:
        if self.running and step == self.last:
            jax.block_until_ready(result)
            self.end()

    def end(self) -> None:
        if self.running:
            jax.profiler.stop_trace()
            self.running = False


def stop_at_nan(what: str, step: int, checkpoints: Checkpoints, config: cfg.Config) -> NoReturn:
    """Ends the run; what is on disk is from before."""
    checkpoints.close()
    latest, optim = checkpoints.latest(), config.optim
    kept = "no checkpoint was written yet" if latest is None else (
        f"the checkpoint of step {latest} in {config.run.output} is good"
    )  # fmt: skip
    remedy = f"a --learning-rate below {optim.learning_rate}"
    if optim.optimizer == "kfac":
        remedy += f" or a --damping above {optim.damping}"
    raise UserError(f"{what} became NaN or infinite at step {step}; {kept}; a new run may do with {remedy}")
