"""Draw how the score depends on the rows and the interval of the default method's statistics.

    python examples/large_batch/rows_and_intervals.py run --data-dir data/cifar10
    python examples/large_batch/rows_and_intervals.py plot

The statistics of each named network use every k-th example. After the first ten steps, every i-th step takes
statistics and refreshes. Both `k` and `i` are 1, 4 and 16. Otherwise the runs are the same as in `networks.py run
--methods kfac`. Trials that are already in the results are not repeated.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import networks  # isort: skip; it extends sys.path and imports JAX

import jax

import methods

FOLDER = Path(__file__).resolve().parent / "results"
RESULTS = FOLDER / "rows_and_intervals.jsonl"
NAMES = ("recurrent characters", "set transformer")
SHARES = INTERVALS = (1, 4, 16)


def trials(problem: networks.Problem, share: int, rate: float, seed: int, steps: int) -> Any:
    """Return `score(interval)`, which trains with statistics from every `share`-th example.

    All intervals share two compiled programs.
    """
    # With this method's overhead, every step with statistics refreshes, and other steps do not.
    schedule = methods.schedule(rate, steps)
    step, carry, batches = networks.prepared(problem, "kfac-every-step", schedule, seed, steps, share)
    begin, data = jax.device_get(carry), list(batches)

    def score(interval: int) -> float:
        now = jax.device_put(begin)
        for count, batch in enumerate(data):
            now, _ = step(now, batch, due=count < 10 or count % interval == 0)
        return round(problem.score(*now[:2]), 4)

    return score


def run(options: argparse.Namespace) -> None:
    done = networks.read(options.results)
    for seed, name, share in itertools.product(options.seeds, options.networks, SHARES):
        same = {"network": name, "share": share, "rate": options.rate, "seed": seed, "steps": options.steps}
        missing = [i for i in INTERVALS if not any((same | {"interval": i}).items() <= r.items() for r in done)]
        if not missing:
            continue
        score = trials(networks.PROBLEMS[name](options.data_dir, 10), share, options.rate, seed, options.steps)
        for interval in missing:
            record = same | {"interval": interval, "score": score(interval)}
            with options.results.open("a") as file:
                file.write(json.dumps(record) + "\n")
            print(json.dumps(record), flush=True)


def plot(options: argparse.Namespace) -> None:
    """Draw a map for each network, with the score in each cell.

    Scores are percentages, or nats with their sign reversed.
    """
    import matplotlib

    matplotlib.use("Agg")
    import numpy as np
    from matplotlib import pyplot

    records = networks.read(options.results)
    names = [name for name in options.networks if any(r["network"] == name for r in records)]
    figure, axes = pyplot.subplots(1, len(names), figsize=(2.6 * len(names), 2.9), layout="constrained", squeeze=False)
    for axis, name in zip(axes[0], names, strict=True):
        cells = np.full((len(SHARES), len(INTERVALS)), np.nan)
        for (i, share), (j, interval) in itertools.product(enumerate(SHARES), enumerate(INTERVALS)):
            here = {"network": name, "share": share, "interval": interval}
            cells[i, j] = np.mean([r["score"] for r in records if here.items() <= r.items()] or [np.nan])
        axis.imshow(cells, cmap="Blues", vmin=np.nanmin(cells), vmax=2 * np.nanmax(cells) - np.nanmin(cells))
        for (i, j), cell in np.ndenumerate(cells):
            text = f"{100 * cell:.1f}%" if cell > 0 else f"{-cell:.3f}"
            axis.text(j, i, text, ha="center", va="center", fontsize=9)
        axis.set_title(name, fontsize=9)
        axis.set_xticks(range(len(INTERVALS)), map(str, INTERVALS))
        axis.set_yticks(range(len(SHARES)), [f"1/{k}" if k > 1 else "all" for k in SHARES])
        axis.set_xlabel("steps between statistics", fontsize=8)
    axes[0][0].set_ylabel("share of the rows", fontsize=8)
    figure.savefig(FOLDER / "rows_and_intervals.png", dpi=120, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "plot"))
    parser.add_argument("--data-dir", type=Path, default=Path("data/cifar10"), help="folder with CIFAR-10")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--networks", nargs="+", choices=networks.PROBLEMS, default=NAMES, metavar="NAME")
    parser.add_argument("--rate", type=float, default=0.1)
    parser.add_argument("--steps", type=int, default=45)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    options = parser.parse_args()
    (run if options.what == "run" else plot)(options)


if __name__ == "__main__":
    main()
