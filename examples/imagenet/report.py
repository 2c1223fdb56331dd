"""What a run leaves to be seen: lines on the terminal, `metrics.jsonl`, `curves.png`."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np


def duration(seconds: float) -> str:
    """`75` as `1:15`."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Metrics:
    """Appends records to `metrics.jsonl`, each with the step it belongs to; without a path, nowhere.

    Records after `step` are dropped first: a run that was stopped between two checkpoints makes
    them again.
    """

    def __init__(self, path: Path | None, step: int) -> None:
        self.records: list[dict[str, Any]] = []
        self._file = None
        if path is None:
            return
        self.records = [record for record in read(path) if record["step"] <= step]
        path.write_text("".join(map(_line, self.records)))
        self._file = path.open("a", buffering=1)

    def write(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        if self._file is not None:
            self._file.write(_line(record))


def _line(record: dict[str, Any]) -> str:
    # JSON knows no NaN.
    known = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in record.items()
    }
    return json.dumps(known) + "\n"


def read(path: Path) -> list[dict[str, Any]]:
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


def plot(records: list[dict[str, Any]], path: Path, title: str) -> None:
    """Loss and accuracy against steps, training and validation."""
    from matplotlib.figure import Figure

    train = [r for r in records if r.get("loss") is not None]
    val = [r for r in records if r.get("val_loss") is not None]
    figure = Figure(figsize=(10, 4), layout="constrained")
    figure.suptitle(title)
    for axes, key, label in zip(figure.subplots(1, 2), ("loss", "accuracy"), ("loss", "accuracy (%)"), strict=True):
        factor = 100 if key == "accuracy" else 1
        steps = np.array([r["step"] for r in train])
        values = np.array([r[key] * factor for r in train])
        axes.plot(steps, values, color="tab:blue", alpha=0.25, linewidth=1)
        window = max(1, len(values) // 40)
        if len(values) >= window:
            mean = np.convolve(values, np.ones(window) / window, "valid")
            axes.plot(steps[window - 1 :], mean, color="tab:blue", label="training")
        at = [r["step"] for r in val]
        on = [r["val_" + key] * factor for r in val]
        axes.plot(at, on, color="tab:orange", marker="o", markersize=4, label="validation")
        if on and key == "accuracy":
            axes.annotate(
                f"{on[-1]:.1f}%", (at[-1], on[-1]), (0, -14), textcoords="offset points",
                ha="right", va="top", color="tab:orange",
            )  # fmt: skip
            axes.set_ylim(top=101.5)
        axes.set_xlabel("optimizer step")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
        axes.legend(loc="upper right" if key == "loss" else "lower right")
    if train and min(r["loss"] for r in train) > 0:
        figure.axes[0].set_yscale("log")
    figure.savefig(path, dpi=120)
