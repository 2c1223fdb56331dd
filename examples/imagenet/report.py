"""What a run leaves to be seen: `metrics.jsonl`, TensorBoard event files, `curves.png`; and one page on several runs.

python examples/imagenet/report.py runs/a runs/b --output curves.png
"""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from config import UserError

Records = list[dict[str, Any]]


class Curves(NamedTuple):
    """One run on a page."""

    label: str
    records: Records


def duration(seconds: float) -> str:
    """`75` as `1:15`."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Metrics:
    """Appends records to `metrics.jsonl`, each with the step it belongs to; without a path, nowhere.

    Records after `step` are dropped first: a run that was stopped between two checkpoints makes
    them again. With `events` each goes to a file for TensorBoard too.
    """

    def __init__(self, path: Path | None, step: int, events: bool = False) -> None:
        self.records: Records = []
        self._file = None
        self._events: Any = None
        if path is None:
            return
        self.records = [record for record in read(path) if record["step"] <= step]
        # In one go: a run killed here keeps what it had.
        whole = path.with_suffix(".tmp")
        whole.write_text("".join(map(_line, self.records)))
        whole.replace(path)
        self._file = path.open("a", buffering=1)
        if events:
            self._events = _event_writer(path.parent / "tensorboard", step)

    @property
    def seconds(self) -> float:
        """How long the run has trained up to its last record."""
        return max((record.get("seconds", 0.0) for record in self.records[-100:]), default=0.0)

    def write(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        if self._file is not None:
            self._file.write(_line(record))
        if self._events is not None:
            for name, value in record.items():
                if name != "step":
                    self._events.add_scalar(name, value, record["step"])

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._events is not None:
            self._events.close()


def _event_writer(folder: Path, step: int) -> Any:
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise UserError("--tensorboard needs the package tensorboardX; pip install tensorboardX") from error
    # A resumed run's own later events are hidden: it makes them again.
    return SummaryWriter(str(folder), purge_step=step + 1)


def _line(record: dict[str, Any]) -> str:
    # JSON knows no NaN.
    known = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in record.items()
    }
    return json.dumps(known) + "\n"


def read(path: Path) -> Records:
    """The records of a metrics file; a last line cut off by a crash is left out."""
    if not path.is_file():
        return []
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records


def load(folder: Path) -> Curves:
    """A run from its folder, called by the folder's name and what it trained."""
    records = read(folder / "metrics.jsonl")
    if not records:
        raise UserError(f"{folder} holds no run: it has no metrics.jsonl, or an empty one")
    try:
        saved = json.loads((folder / "config.json").read_text())
        named, optim = saved["run"]["config"], saved["optim"]
        parts = [optim["optimizer"], f"batch {optim['global_batch']:,}", saved["data"]["source"]]
        about = ": " + ", ".join([named, *parts] if named else parts)
    except (OSError, ValueError, KeyError, TypeError):
        about = ""
    return Curves(folder.resolve().name + about, records)


def plot(runs: list[Curves], path: Path, title: str) -> None:
    """Loss and accuracy against steps, epochs and seconds; training thin, validation with dots."""
    from matplotlib.figure import Figure

    across = [("step", "optimizer step"), ("epoch", "epoch"), ("seconds", "seconds of training")]
    figure = Figure(figsize=(14, 7.5), layout="constrained")
    if title:
        figure.suptitle(title)
    grid = figure.subplots(2, 3, sharex="col", sharey="row")
    for k, run in enumerate(runs):
        color = f"C{k % 10}"
        for row, key in enumerate(("loss", "accuracy")):
            factor = 100 if key == "accuracy" else 1
            train = [r for r in run.records if r.get(key) is not None]
            val = [r for r in run.records if r.get("val_" + key) is not None]
            for column, (name, _) in enumerate(across):
                axes = grid[row, column]
                x, y = _points(train, name, key)
                axes.plot(*_smooth(x, y * factor), color=color, alpha=0.45, linewidth=1)
                x, y = _points(val, name, "val_" + key)
                axes.plot(x, y * factor, color=color, marker="o", markersize=3.5, linewidth=1.8)
    _scale(grid, runs)
    for row, label in enumerate(("loss", "accuracy (%)")):
        grid[row, 0].set_ylabel(label)
        for column, (_, name) in enumerate(across):
            grid[row, column].grid(alpha=0.3)
            if row == 1:
                grid[row, column].set_xlabel(name)
    _legend(figure, runs)
    figure.savefig(path, dpi=110)


def _points(records: Records, across: str, key: str) -> tuple[np.ndarray, np.ndarray]:
    found = [(r[across], r[key]) for r in records if r.get(across) is not None]
    x, y = zip(*found, strict=True) if found else ((), ())
    return np.array(x, float), np.array(y, float)


def _smooth(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Means over a fortieth of the run: what single batches do hides where it goes."""
    window = max(1, len(y) // 40)
    if len(y) < window or not len(y):
        return x, y
    return x[window - 1 :], np.convolve(y, np.ones(window) / window, "valid")


def _scale(grid: Any, runs: list[Curves]) -> None:
    losses = [r[key] for run in runs for r in run.records for key in ("loss", "val_loss") if r.get(key) is not None]
    if losses and min(losses) > 0 and max(losses) > 20 * min(losses):
        grid[0, 0].set_yscale("log")
    grid[1, 0].set_ylim(0, 101)


def _legend(figure: Any, runs: list[Curves]) -> None:
    from matplotlib.lines import Line2D

    handles = []
    for k, run in enumerate(runs):
        accuracies = [r["val_accuracy"] for r in run.records if r.get("val_accuracy") is not None]
        found = f" ({accuracies[-1]:.1%} at the end, best {max(accuracies):.1%})" if accuracies else ""
        handles.append(Line2D([], [], color=f"C{k % 10}", linewidth=3, label=run.label + found))
    handles.append(Line2D([], [], color="gray", marker="o", markersize=3.5, linewidth=1.8, label="validation"))
    handles.append(Line2D([], [], color="gray", alpha=0.45, linewidth=1, label="training, as augmented"))
    figure.legend(handles=handles, loc="outside lower center", ncols=min(2, len(handles)), frameon=False)


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
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"error: {error}")
