"""Write `metrics.jsonl` and `curves.png` for a run, and plot several runs on one page.

python examples/imagenet/report.py runs/a runs/b --output curves.png
"""

import argparse
import itertools
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import processes
from files import UserError

Records = list[dict[str, Any]]


class Metrics:
    """Append records to `metrics.jsonl` in `folder`, each with its step. Only a process with `writes` writes.

    Records after `step` are dropped first, because the resumed run makes them again. Damaged lines move to
    `metrics.damaged`. The method `add` gets the squared norms for the leaves in `watched`.
    """

    def __init__(
        self, folder: Path, step: int, per_epoch: float = 1.0, watched: Any = None, writes: bool = True
    ) -> None:
        self._file: Any = None
        self.path, self.per_epoch = folder / "metrics.jsonl", per_epoch
        found, damaged = read(self.path)
        self.records = [record for record in found if record["step"] <= step]
        self.watched = watched or {}
        self._pending: list[tuple[int, dict[str, Any], Any]] = []
        self._read_at = time.perf_counter()
        # Count the seconds as if the run had never stopped.
        self._began = self._read_at - max((record.get("seconds", 0.0) for record in self.records[-100:]), default=0.0)
        if writes:
            if damaged:
                aside = folder / "metrics.damaged"
                with aside.open("ab") as file:
                    file.writelines(line + b"\n" for line in damaged)
                say(f"{len(damaged)} damaged line(s) of {self.path} are set aside in {aside.name}; the other "
                    f"{len(found)} are good")  # fmt: skip
            # Replace the file at once, so that a run that is killed here keeps its records.
            whole = self.path.with_suffix(".tmp")
            whole.write_text("".join(map(_line, self.records)))
            whole.replace(self.path)
            self._file = self.path.open("a", buffering=1)

    @property
    def accuracies(self) -> list[float]:
        """Return the accuracies from all validations so far."""
        return [record["val_accuracy"] for record in self.records if "val_accuracy" in record]

    def add(self, step: int, values: dict[str, Any], squares: Any) -> None:
        """Record a step's results. Wait for the previous step, so that batches do not pile up on the device."""
        self._pending.append((step, values, squares))
        if len(self._pending) > 1:
            jax.block_until_ready(self._pending[-2][1])

    def flush(self, rate: Callable[[int], Any]) -> dict[str, Any]:
        """Write the added records, which waits for the device. Return the last record.

        Its entry "bad" names all values that are not finite. It is empty if all values are finite.
        """
        pending, before, self._read_at = jax.device_get(self._pending), self._read_at, time.perf_counter()
        self._pending, record = [], {}
        for k, (step, values, squares) in enumerate(pending, 1):
            # The time of each step is unknown, so spread the steps evenly between two readings.
            seconds = before + (self._read_at - before) * k / len(pending) - self._began
            record = {name: float(value) for name, value in values.items()}
            record = {"seconds": round(seconds, 3), "learning_rate": float(rate(step - 1)), **record}
            self.write({"step": step, **record})
            if names := not_finite(record["loss"], squares, self.watched):
                return record | {"bad": f"{names} became NaN or infinite at step {step}"}
        return record | {"bad": ""}

    def validated(self, step: int, result: dict[str, float], broken: int) -> None:
        self._read_at = time.perf_counter()
        self.write({"step": step, **result, "broken_images": broken, "seconds": round(self._read_at - self._began, 3)})

    def write(self, record: dict[str, Any]) -> None:
        epoch = round(record["step"] / self.per_epoch, 4)
        self.records.append({"step": record["step"], "epoch": epoch, **record})
        if self._file is not None:
            self._file.write(_line(self.records[-1]))

    def close(self, title: str = "") -> None:
        """Close the file and draw `curves.png`."""
        if self._file is not None:
            plot({self.path.parent.name: self.records}, self.path.with_name("curves.png"), title)
            self._file.close()


def read(path: Path) -> tuple[Records, list[bytes]]:
    """Return the records in a metrics file, and its damaged or incomplete lines."""
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


def _line(record: dict[str, Any]) -> str:
    # JSON has no NaN.
    finite = {k: None if isinstance(x, float) and not math.isfinite(x) else x for k, x in record.items()}
    return json.dumps(finite) + "\n"


def say(text: str) -> None:
    """Print a line in the first process."""
    if processes.is_first():
        print(text, flush=True)


def squares(tree: Any) -> Any:
    """Return each leaf's squared norm. It is not finite if a number in the leaf or its square is not finite."""
    return jnp.stack([jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)] or [jnp.float32(0)])


def not_finite(loss: float, squares: dict[str, Any], trees: dict[str, Any]) -> str:
    """Return the names of all non-finite values in words, or an empty string.

    The values are the loss and the leaves of `trees`, which have the squared norms `squares`.
    """
    found = [] if np.isfinite(loss) else ["the loss"]
    for kind, tree in trees.items():
        paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
        bad = [path for path, value in zip(paths, squares[kind], strict=False) if not np.isfinite(value)]
        if bad:
            name = jax.tree_util.keystr(bad[0], simple=True, separator="/")
            found.append(f"the {kind} {name}" + (f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""))
    return " and ".join(found)


def plot(runs: dict[str, Records], path: Path, title: str) -> None:
    """Plot loss and accuracy against steps, epochs and seconds, with a thin training line and validation dots."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(14, 7.5), layout="constrained")
    figure.suptitle(title)
    grid = figure.subplots(2, 3, sharex="col", sharey="row")
    for (k, records), (row, key), (column, across) in itertools.product(
        enumerate(runs.values()), enumerate(("loss", "accuracy")), enumerate(("step", "epoch", "seconds"))
    ):
        x, y = _points(records, across, key)
        # Average over a fortieth of the run, because single batches vary too much to show the trend.
        window = max(1, len(y) // 40)
        x, y = x[window - 1 :], np.convolve(y, np.ones(window) / window, "valid") if len(y) else y
        grid[row, column].plot(x, y, f"C{k}", alpha=0.45, linewidth=1)
        grid[row, column].plot(*_points(records, across, f"val_{key}"), f"C{k}o-", markersize=3.5)
    for column, name in enumerate(("optimizer step", "epoch", "seconds of training")):
        grid[1, column].set_xlabel(name)
    grid[0, 0].set_ylabel("loss")
    grid[1, 0].set_ylabel("accuracy (%)")
    for axes in grid.flat:
        axes.grid(alpha=0.3)
        for line in axes.lines:  # draw lines at 100% in full, and keep the layout
            line.set(clip_on=False, in_layout=False)
    losses = [value for line in grid[0, 0].lines for value in np.asarray(line.get_ydata())]
    if losses and 0 < 10 * min(losses) < max(losses):
        grid[0, 0].set_yscale("log")
    grid[1, 0].set_ylim(0, 100)
    handles = [Line2D([], [], color=f"C{k}", linewidth=3, label=_summary(*run)) for k, run in enumerate(runs.items())]
    handles.append(Line2D([], [], color="gray", marker="o", markersize=3.5, label="validation"))
    handles.append(Line2D([], [], color="gray", alpha=0.45, linewidth=1, label="training (augmented images)"))
    figure.legend(handles=handles, loc="outside lower center", ncols=min(2, len(handles)), frameon=False)
    figure.savefig(path, dpi=110)


def _points(records: Records, across: str, key: str) -> tuple[np.ndarray, np.ndarray]:
    found = [(r[across], r[key]) for r in records if r.get(key) is not None and r.get(across) is not None]
    x, y = np.array(found, float).reshape(-1, 2).T
    return x, y * 100 if key.endswith("accuracy") else y


def _summary(name: str, records: Records) -> str:
    found = [record["val_accuracy"] for record in records if record.get("val_accuracy") is not None]
    return f"{name} ({found[-1]:.1%} at the end, best {max(found):.1%})" if found else name


def main(args: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="report.py", description="Plot several runs on one page.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="output folders of train.py")
    parser.add_argument("--output", type=Path, default=Path("curves.png"), help="PNG, PDF or SVG (default: curves.png)")
    options = parser.parse_args(args)
    runs = {}
    for folder in options.runs:
        runs[str(folder)], _ = read(folder / "metrics.jsonl")
        if not runs[str(folder)]:
            raise UserError(f"{folder} holds no run: its metrics.jsonl is missing or empty")
    try:
        plot(runs, options.output, "")
    except (OSError, ValueError) as error:
        raise UserError(f"--output {options.output} cannot be written: {error}") from error
    print(f"wrote {options.output}")


if __name__ == "__main__":
    processes.script(main)
