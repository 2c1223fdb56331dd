"""What a run leaves to be seen: `metrics.jsonl`, TensorBoard event files, `curves.png`; and one page on several runs.

python examples/imagenet/report.py runs/a runs/b --output curves.png
"""

import argparse
import contextlib
import itertools
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import batches
import processes
from files import UserError

Records = list[dict[str, Any]]
# Steps in a row that are left out before the run ends after all.
MOST_SKIPPED = 20


class Curves(NamedTuple):
    """One run on a page; those of a group, which differ by their seeds, share a colour."""

    label: str
    records: Records
    group: str = ""


class Metrics:
    """Appends records to `metrics.jsonl` in `folder`, each with the step it belongs to, in the process that `writes`.

    Records after `step` are dropped first: a run that was stopped between two checkpoints makes them again. Lines that
    are no records are kept in `metrics.damaged`. With `tensorboard` event files get them too. `variables` give names
    to what is not finite.
    """

    def __init__(
        self, folder: Path, step: int, per_epoch: float = 1.0, variables: Any = None, tensorboard: bool = False,
        writes: bool = True,
    ) -> None:  # fmt: skip
        path = folder / "metrics.jsonl"
        found, damaged = read(path)
        self.records = [record for record in found if record["step"] <= step]
        self.per_epoch = per_epoch
        params, batch_stats = (variables or {}).get("params"), (variables or {}).get("batch_stats")
        self.watched = {"gradient": params, "parameter": params, "batch-norm average": batch_stats}
        self.skipped, self.in_a_row = sum(bool(record.get("skipped")) for record in self.records), 0
        self._file: Any = None
        self._events: Any = None
        self._pending: list[tuple[int, dict[str, Any], Any]] = []
        self._read_at = time.perf_counter()
        # As if the run had never been stopped.
        self._began = self._read_at - max((record.get("seconds", 0.0) for record in self.records[-100:]), default=0.0)
        if tensorboard and writes:
            # A resumed run's own later events are hidden: it makes them again.
            from tensorboardX import SummaryWriter

            self._events = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
        if writes:
            with _said(path):
                if damaged:
                    aside = path.with_name("metrics.damaged")
                    with aside.open("ab") as file:
                        file.writelines(line + b"\n" for line in damaged)
                    say(
                        f"{len(damaged)} damaged line(s) of {path} are set aside in {aside.name}; {len(found)} are good"
                    )
                # In one go: a run killed here keeps what it had.
                whole = path.with_suffix(".tmp")
                whole.write_text("".join(map(_line, self.records)))
                whole.replace(path)
                self._file = path.open("a", buffering=1)

    @property
    def accuracies(self) -> list[float]:
        """Of the validations so far."""
        return [record["val_accuracy"] for record in self.records if "val_accuracy" in record]

    def best(self) -> str:
        found = self.accuracies
        return f"{found[-1]:.2%} (best {max(found):.2%})" if found else "not measured"

    def add(self, step: int, values: dict[str, Any], squares: Any) -> None:
        """Notes what a step returned; waits for the one before, or else batches would pile up on the device."""
        self._pending.append((step, values, squares))
        if len(self._pending) > 1:
            jax.block_until_ready(self._pending[-2][1])

    def flush(self, rate: Callable[[int], Any]) -> dict[str, Any]:
        """Writes what was added, which waits for the device, and returns the last record.

        Its "bad" says what was not finite and in which step, empty if nothing. The schedule does not go on in steps
        that were left out for it, and a few of them are no reason to end.
        """
        pending, before, self._read_at = jax.device_get(self._pending), self._read_at, time.perf_counter()
        self._pending, record = [], {}
        for k, (step, values, squares) in enumerate(pending, 1):
            # When the steps between two readings ended is not known: evenly spread.
            seconds = before + (self._read_at - before) * k / len(pending) - self._began
            record = {name: float(value) for name, value in values.items()}
            left_out = bool(record.get("skipped"))
            record = {"seconds": round(seconds, 3), "learning_rate": float(rate(step - 1 - self.skipped)), **record}
            self.write({"step": step, **record})
            self.skipped, self.in_a_row = self.skipped + left_out, (self.in_a_row + 1) * left_out
            names = not_finite(record["loss"], squares, self.watched)
            if names if not left_out else self.in_a_row > MOST_SKIPPED:
                # What the step would have made of the parameters has been left out.
                return record | {"bad": f"{names or 'a parameter'} became NaN or infinite at step {step}"}
        return record | {"bad": ""}

    def validated(self, step: int, result: dict[str, float], broken: int) -> None:
        self._read_at = time.perf_counter()
        self.write({"step": step, **result, "broken_images": broken, "seconds": round(self._read_at - self._began, 3)})

    def write(self, record: dict[str, Any]) -> None:
        step, epoch = record["step"], round(record["step"] / self.per_epoch, 4)
        self.records.append({"step": step, "epoch": epoch, **record})
        if self._file is not None:
            with _said(Path(self._file.name)):
                self._file.write(_line(self.records[-1]))
        numbers = {name: value for name, value in self.records[-1].items() if name != "step"}
        for name, value in numbers.items() if self._events is not None else ():
            self._events.add_scalar(name, value, step)

    def close(self, title: str = "") -> None:
        """Ends all, and draws `curves.png`."""
        if self._file is not None:
            folder = Path(self._file.name).parent
            plot([Curves(folder.name, self.records)], folder / "curves.png", title)
            self._file.close()
        if self._events is not None:
            self._events.close()


@contextlib.contextmanager
def _said(path: Path) -> Any:
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}; make room or mend it, and the same command goes "
                        "on from the last checkpoint") from error  # fmt: skip


def _line(record: dict[str, Any]) -> str:
    # JSON knows no NaN.
    finite = {k: None if isinstance(x, float) and not math.isfinite(x) else x for k, x in record.items()}
    return json.dumps(finite) + "\n"


def say(text: str) -> None:
    """Prints a line in one of the processes, above the progress bar of a terminal."""
    if processes.is_first():
        tqdm.write(text, file=sys.stdout)
        sys.stdout.flush()


class Trace:
    """Writes what `jax.profiler` sees of the steps `FIRST:LAST`, None for none, of a run of `steps`."""

    def __init__(self, wanted: str | None, steps: int) -> None:
        self.first, self.last = map(int, (wanted or "0:0").split(":"))
        self.running = False
        if self.first > steps:
            raise UserError(f"--profile {wanted} begins after the last step, {steps}")

    def before(self, step: int, folder: Path) -> None:
        if self.first <= step <= self.last and not self.running:
            jax.profiler.start_trace(str(folder / "profile"))
            self.running = True

    def after(self, step: int, result: Any, ends: bool) -> None:
        if self.running and (ends or step == self.last):
            jax.block_until_ready(result)
            jax.profiler.stop_trace()
            self.running = False


class Progress:
    """A bar on a terminal, and lines that stay."""

    def __init__(self, start: int, total: int, batch: int, per_epoch: float) -> None:
        self.batch, self.per_epoch, self.total, self.at, self.start = batch, per_epoch, total, start, start
        hidden = None if processes.is_first() else True
        self.bar = tqdm(total=total, initial=start, unit="step", leave=False, disable=hidden)
        self.speed, self.began = 0.0, time.perf_counter()
        self.last_line = self.began

    def read(self, step: int) -> None:
        """To be called when the device has done `step`: validation and checkpoints are no part of the speed."""
        self.speed, self.at = (step - self.at) / (time.perf_counter() - self.last_line), step

    def line(self, step: int, record: dict[str, Any]) -> None:
        text = (f"step {step:>{len(str(self.total))}}/{self.total}  epoch {step / self.per_epoch:5.1f}  "
                f"loss {record['loss']:.4f}  accuracy {record['accuracy']:6.1%}")  # fmt: skip
        if "val_loss" in record:
            text += f"  val loss {record['val_loss']:.4f}  val accuracy {record['val_accuracy']:.1%}"
        self.last_line = time.perf_counter()
        left = tqdm.format_interval((self.total - step) * (self.last_line - self.began) / (step - self.start))
        say(f"{text}  {self.speed * self.batch:,.0f} images/s  {1 / self.speed:.3g} s/step  {left} left")


def squares(tree: Any) -> Any:
    """The squared norm of each leaf: not finite where one of its numbers is not, or their square."""
    return jnp.stack([jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)] or [jnp.float32(0)])


def not_finite(loss: float, squares: dict[str, Any], trees: dict[str, Any]) -> str:
    """Which of the loss and the leaves of `trees`, by their `squares`, are not finite, in words; empty if all are."""
    found = [] if np.isfinite(loss) else ["the loss"]
    for kind, tree in trees.items():
        paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
        bad = [path for path, value in zip(paths, squares[kind], strict=False) if not np.isfinite(value)]
        if bad:
            name = jax.tree_util.keystr(bad[0], simple=True, separator="/")
            found.append(f"the {kind} {name}" + (f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""))
    return " and ".join(found)


def input_speed(split: Any, batch: int, images: int, workers: int) -> None:
    """Prints how many images a second the input pipeline alone delivers, and for how much processor time."""
    steps = -(-images // batch)
    # More than are taken, so that the workers are as busy at the end as at the beginning.
    stream = batches.train_batches(split, batch, 0, 0, 2 + 2 * steps)
    broken = {name for _ in range(2) for name in next(stream).broken}
    began, busy = time.perf_counter(), _cpu_seconds()
    broken |= {name for _ in range(steps) for name in next(stream).broken}
    seconds, cpu, images = time.perf_counter() - began, _cpu_seconds() - busy, steps * batch
    stream.close()
    print(f"{images} images in batches of {batch} by {workers} worker(s), {len(broken)} broken: {images / seconds:.0f} "
          f"images/s; {images / cpu:.0f} images/s per core, by {1e3 * cpu / images:.2f} ms of its time")  # fmt: skip


def _cpu_seconds() -> float:
    """Processor time, user and system, of this process and its workers so far."""
    # The name, in parentheses, may hold anything; user and system time are fields 14 and 15.
    stats = [Path(f"/proc/{worker.pid}/stat").read_text() for worker in multiprocessing.active_children()]
    ticks = sum(int(field) for text in stats for field in text.rpartition(")")[2].split()[11:13])
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def read(path: Path) -> tuple[Records, list[bytes]]:
    """The records of a metrics file, and the lines that are none: damaged, or cut off by a crash."""
    records, damaged = [], []
    for line in path.read_bytes().split(b"\n") if path.is_file() else ():
        try:
            record = json.loads(line)
            if not isinstance(record["step"], int):
                raise ValueError("a record begins with its step")
            records.append(record)
        except (ValueError, KeyError, TypeError):
            damaged += [line] if line else []
    return records, damaged


def load(folder: Path) -> Curves:
    """A run from its folder, called by the folder's name and what it trained."""
    records, damaged = read(folder / "metrics.jsonl")
    if damaged:
        say(f"{folder / 'metrics.jsonl'}: {len(damaged)} damaged line(s) are left out")
    if not records:
        raise UserError(f"{folder} holds no run: it has no metrics.jsonl, or an empty one")
    try:
        saved = json.loads((folder / "config.json").read_text())
        parts = [saved["config"], saved["optimizer"], f"batch {saved['global_batch']:,}", saved["data"]]
        about = ", ".join(filter(None, parts))
    except (OSError, ValueError, KeyError, TypeError):
        about = ""
    return Curves(": ".join(filter(None, (folder.resolve().name, about))), records, about)


def plot(runs: list[Curves], path: Path, title: str) -> None:
    """Loss and accuracy against steps, epochs and seconds; training thin, validation with dots."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(14, 7.5), layout="constrained")
    figure.suptitle(title)
    grid = figure.subplots(2, 3, sharex="col", sharey="row")
    groups: dict[str, list[Curves]] = {}
    for run in runs:
        groups.setdefault(run.group or run.label, []).append(run)
    for color, group in enumerate(groups.values()):
        for run, (row, key), (column, across) in itertools.product(
            group, enumerate(("loss", "accuracy")), enumerate(("step", "epoch", "seconds"))
        ):
            x, y = _points(run.records, across, key)
            # Means over a fortieth of the run: what single batches do hides where it goes.
            window = max(1, len(y) // 40)
            x, y = x[window - 1 :], np.convolve(y, np.ones(window) / window, "valid") if len(y) else y
            grid[row, column].plot(x, y, f"C{color}", alpha=0.45, linewidth=1)
            grid[row, column].plot(*_points(run.records, across, f"val_{key}"), f"C{color}o-", markersize=3.5)
    for column, name in enumerate(("optimizer step", "epoch", "seconds of training")):
        grid[1, column].set_xlabel(name)
    grid[0, 0].set_ylabel("loss")
    grid[1, 0].set_ylabel("accuracy (%)")
    for axes in grid.flat:
        axes.grid(alpha=0.3)
        for line in axes.lines:  # lines at 100% are not cut in half, and change no layout
            line.set(clip_on=False, in_layout=False)
    losses = [value for line in grid[0, 0].lines for value in np.asarray(line.get_ydata())]
    if losses and 0 < 10 * min(losses) < max(losses):
        grid[0, 0].set_yscale("log")
    grid[1, 0].set_ylim(0, 100)
    handles = [
        Line2D([], [], color=f"C{k}", linewidth=3, label=_summary(*item)) for k, item in enumerate(groups.items())
    ]
    handles.append(Line2D([], [], color="gray", marker="o", markersize=3.5, label="validation"))
    handles.append(Line2D([], [], color="gray", alpha=0.45, linewidth=1, label="training, as augmented"))
    figure.legend(handles=handles, loc="outside lower center", ncols=min(2, len(handles)), frameon=False)
    figure.savefig(path, dpi=110)


def _points(records: Records, across: str, key: str) -> tuple[np.ndarray, np.ndarray]:
    found = [(r[across], r[key]) for r in records if r.get(key) is not None and r.get(across) is not None]
    x, y = np.array(found, float).reshape(-1, 2).T
    return x, y * 100 if key.endswith("accuracy") else y


def _summary(name: str, runs: list[Curves]) -> str:
    accuracies = [[r["val_accuracy"] for r in run.records if r.get("val_accuracy") is not None] for run in runs]
    last = [found[-1] for found in accuracies if found]
    if len(last) > 1:
        return f"{name} ({len(last)} runs, {np.mean(last):.1%} at the end, from {min(last):.1%} to {max(last):.1%})"
    return f"{runs[0].label} ({last[0]:.1%} at the end, best {max(accuracies[0]):.1%})" if last else name


def main(args: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="report.py", description="One page comparing several runs.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="output folders of train.py")
    parser.add_argument("--output", type=Path, default=Path("curves.png"), help="PNG, PDF or SVG (default: curves.png)")
    options = parser.parse_args(args)
    runs = [load(folder) for folder in options.runs]
    try:
        plot(runs, options.output, "")
    except (OSError, ValueError) as error:
        raise UserError(f"--output {options.output} cannot be written: {error}") from error
    print(f"wrote {options.output}")


if __name__ == "__main__":
    processes.script(main)
