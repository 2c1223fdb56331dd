"""Find the number of steps that optimizers need to a target score, from small to large batches.

    python examples/large_batch/batch_sizes.py run --data-dir data/cifar10
    python examples/large_batch/batch_sizes.py report

The targets are a validation accuracy of 50% (residual network) or 40% (vision transformer), and a validation loss of
2.4 nats (character transformer) or 16.5 nats (deep autoencoder). Muon's Adam has 0.3 of its rate on images and the same
rate on text, each the best of 0.3, 1 and 3 at N/10.

For each batch size, a method first tries three learning rates at the same budget of steps. They are 0.5, 1 and 2 times
the method's rate in `RATES`, scaled by the root of the batch size. While the largest or smallest rate is best, the
method tries another rate beyond it, at most four times. The best rate then runs with larger or smaller budgets, until
one budget reaches the target and the next smaller budget misses it. The number of steps is interpolated between the
two, on a logarithmic scale. In each run, the rate falls to zero at the end of its budget. The rate is searched with
seed 0, and other seeds search only the budget at this rate. `run` stores each trial in --results and does not repeat
it. `report` prints the mean and standard deviation over the seeds, and draws the means.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / folder) for folder in ("benchmarks", "imagenet")]

import environment  # noqa: F401, E402, I001  before JAX is imported
import brackets  # noqa: E402
import curves  # noqa: E402
import networks  # noqa: E402
from files import UserError  # noqa: E402
from reporting import LABELS, crossing  # noqa: E402

# Targets for the score: the validation accuracy, or the negative validation loss.
TARGETS = {
    "residual network, batch norm": 0.5,
    "vision transformer": 0.4,
    "character transformer": -2.4,
    "deep autoencoder": -16.5,
}
RATES = {"kfac": 0.1, "muon": 0.1, "muon-adam-1": 0.1, "soap": 0.01, "adamw": 0.01}  # at batches of N/10
RATES |= dict.fromkeys(networks.NEWTON, 1.0)
METHODS = {"character transformer": ["kfac", "muon-adam-1", "soap", "adamw"]}
OTHERWISE = ["kfac", "muon", "soap", "adamw"]
NAMES = LABELS | {"soap": "SOAP", "muon-adam-1": "Muon", "gauss-newton": "Gauss-Newton"}
NAMES |= {
    name: f"Gauss-Newton, {settings['iterations']} iterations" for name, settings in networks.NEWTON.items() if settings
}
FACTORS = 0.5, 1.0, 2.0
EXTENSIONS = 4  # the number of rates to try beyond these
# The budgets of steps at which rates are tried, by N / batch.
FIRST = {1: 30, 2: 30, 4: 40, 10: 60, 50: 160, 200: 640}
BUDGETS = 4  # the number of larger and of smaller budgets, each by the root of two

KEYS = "network", "method", "batch", "steps", "rate", "seed"
Scores = dict[tuple[Any, ...], float]  # by the values of KEYS


class Found(NamedTuple):
    """Hold the steps to the target for each seed, and the rate. Steps are infinite if all budgets were too small."""

    steps: list[float]
    rate: float

    @property
    def mean(self) -> float:
        return statistics.fmean(self.steps)

    @property
    def spread(self) -> float:
        return statistics.stdev(self.steps) if len(self.steps) > 1 and math.isfinite(self.mean) else 0.0


class Missing(Exception):
    """A trial that `report` needs is not stored."""


def budget(share: int, number: int) -> int:
    return round(FIRST[share] * 2 ** (number / 2))


def steps_to_target(
    share: int, rates: Iterable[float], target: float, score: Callable[[int, float], float]
) -> tuple[float, float]:
    """Return the steps to the target and the best learning rate.

    The steps are infinite if the largest budget misses the target. If the smallest budget reaches it, they are this
    budget.

    Args:
      share: N divided by the batch size.
      rates: the learning rates to try first.
      target: the target for the score.
      score: `score(steps, rate)` runs a trial.
    """
    scores = {rate: score(budget(share, 0), rate) for rate in rates}
    for _ in range(EXTENSIONS):
        best = max(scores, key=lambda rate: scores[rate])
        if best not in (min(scores), max(scores)):
            break
        beyond = best * 2 if best == max(scores) else best / 2
        scores[beyond] = score(budget(share, 0), beyond)
    best = max(scores, key=lambda rate: scores[rate])
    return steps_at_rate(share, best, target, score), best


def steps_at_rate(share: int, rate: float, target: float, score: Callable[[int, float], float]) -> float:
    """Return the steps to the target at a rate, as `steps_to_target` does."""
    found = {0: score(budget(share, 0), rate)}
    number = 0
    while found[number] >= target and number > -BUDGETS:
        number -= 1
        found[number] = score(budget(share, number), rate)
    while found[number] < target and number < BUDGETS:
        number += 1
        if number not in found:
            found[number] = score(budget(share, number), rate)
    ran = [k for k in sorted(found) if math.isfinite(found[k])]
    if not ran:
        return math.inf
    return crossing([[{"steps": budget(share, k), "val_accuracy": found[k]}] for k in ran], target)[0]


def table(
    options: argparse.Namespace, stored: Scores, train: Callable[[tuple[Any, ...]], float]
) -> dict[str, dict[str, dict[int, Found]]]:
    """Return what was found by network, method and N / batch.

    `train` runs a trial that is not stored, from the values of `KEYS`. If it raises `Missing`, the seed is left out.
    """
    found: dict[str, dict[str, dict[int, Found]]] = {}
    searches = [
        (name, share, method)
        for name in options.networks
        for method, share in itertools.product(options.methods or METHODS.get(name, OTHERWISE), options.shares)
    ]
    for name, share, method in searches:

        def score(steps: int, rate: float, of: tuple[Any, ...] = (name, method, share), seed: int = 0) -> float:
            key = (*of, steps, rate, seed)
            if key not in stored:
                stored[key] = train(key)
            return stored[key]

        scale = math.sqrt(10 / share)
        # The minimising step has no scale.
        scale = 1.0 if method in networks.NEWTON else scale
        rates = [RATES[method] * factor * scale for factor in FACTORS]
        try:
            steps, rate = steps_to_target(share, rates, TARGETS[name], score)
        except Missing:
            continue
        by_seed = [steps]
        for seed in sorted({*options.seeds} - {0}):
            with contextlib.suppress(Missing):
                by_seed.append(steps_at_rate(share, rate, TARGETS[name], functools.partial(score, seed=seed)))
        found.setdefault(name, {}).setdefault(method, {})[share] = Found(by_seed, rate)
    return found


def run(options: argparse.Namespace) -> None:
    problem = functools.cache(lambda name, share: networks.PROBLEMS[name](options.data_dir, share))

    def train(key: tuple[Any, ...]) -> float:
        name, method, share, steps, rate, seed = key
        result = networks.run(problem(name, share), method, rate, seed, steps, "falling")
        curves.add(options.results, dict(zip(KEYS, key, strict=True)) | result)
        return brackets.score_of(result)

    table(options, read(options.results), train)


def read(path: Path) -> Scores:
    """Return the scores of stored trials."""
    stored = {}
    for number, line in enumerate(path.read_text().splitlines() if path.is_file() else [], 1):
        try:
            row = {"seed": 0} | json.loads(line)
            stored[tuple(row[name] for name in KEYS)] = brackets.score_of(row)
        except (ValueError, KeyError) as error:
            raise UserError(f"{path}, line {number}, is no trial of this script ({error!r}): remove it") from None
    return stored


def report(options: argparse.Namespace) -> None:
    def train(key: tuple[Any, ...]) -> float:
        raise Missing(key)

    stored = read(options.results)
    options.seeds = sorted({key[-1] for key in stored})
    found = table(options, stored, train)
    if not found:
        raise SystemExit(f"no complete search in {options.results}: begin with `run`")
    for name, methods in found.items():
        print(f"\n{name}: steps to {target(name)} (rate)\n")
        print(
            "| batch | " + " | ".join(NAMES[method] for method in methods) + " |\n" + "|---" * (1 + len(methods)) + "|"
        )
        for share in options.shares:
            cells = [cell(share, methods[method][share]) if share in methods[method] else "" for method in methods]
            print(f"| N/{share} | " + " | ".join(cells) + " |")
    draw(found, options.figure)


def cell(share: int, found: Found) -> str:
    if math.isinf(found.mean):
        return f"more than {budget(share, BUDGETS)} ({found.rate:.2g})"
    spread = f" ± {found.spread:.0f}" if len(found.steps) > 1 else ""
    return f"{found.mean:.0f}{spread} ({found.rate:.2g})"


def target(name: str) -> str:
    return f"{TARGETS[name]:.0%}" if TARGETS[name] > 0 else f"{-TARGETS[name]:g} nats"


def draw(found: dict[str, dict[str, dict[int, Found]]], path: Path) -> None:
    """Draw the steps to the target against the batch size, one panel for each network.

    Bars are standard deviations over seeds. A hollow triangle marks a search whose largest budget missed the target.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, row = plt.subplots(1, len(found), figsize=(4.5 * len(found), 3.6), layout="constrained", squeeze=False)
    for axis, (name, methods) in zip(row[0], found.items(), strict=True):
        for method, results in methods.items():
            points = [(share, at.mean, at.spread) for share, at in results.items() if math.isfinite(at.mean)]
            places, means, spreads = zip(*points, strict=True) if points else ((), (), ())
            color = f"C{list(dict.fromkeys(NAMES.values())).index(NAMES[method])}"  # as in the study's pictures
            axis.errorbar(places, means, spreads, fmt="o-", label=NAMES[method], color=color)
            for share, at in results.items():
                if math.isinf(at.mean):  # more than the largest budget
                    axis.plot(share, budget(share, BUDGETS), "^", color=color, fillstyle="none")
        axis.set_title(f"{name}: steps to {target(name)}", fontsize=9)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.invert_xaxis()
        shares = sorted({share for results in methods.values() for share in results})
        axis.set_xticks(shares, [f"N/{share}" for share in shares])
        axis.set_yticks([30, 60, 100, 200, 400, 800, 1600], ["30", "60", "100", "200", "400", "800", "1,600"])
        axis.minorticks_off()
        axis.set_xlabel("batch size")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    row[0][0].set_ylabel("steps")
    figure.savefig(path, dpi=120)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["run", "report"])
    parser.add_argument("--data-dir", type=Path, default=Path("data/cifar10"), help="folder with CIFAR-10")
    parser.add_argument("--networks", nargs="+", choices=TARGETS, default=list(TARGETS), metavar="NAME",
                        help=" or ".join(map(repr, TARGETS)))  # fmt: skip
    parser.add_argument("--methods", nargs="+", choices=RATES, help="default: K-FAC, Muon, SOAP and AdamW")
    parser.add_argument("--shares", nargs="+", type=int, choices=FIRST, default=list(FIRST), help="N / batch")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="`report` shows all")
    parser.add_argument("--results", type=Path, default=HERE / "results" / "batch_sizes.jsonl")
    parser.add_argument("--figure", type=Path, default=HERE / "results" / "batch_sizes.png")
    options = parser.parse_args(arguments)
    try:
        {"run": run, "report": report}[options.action](options)
    except UserError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
