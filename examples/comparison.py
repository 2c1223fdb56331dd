"""Share a training loop, a hyperparameter search and reports among the examples that compare optimizers.

Each optimizer gets a number of trials, and K-FAC gets no more than the others. Trials are points drawn without
replacement from the optimizer's grid, and a JSON file keeps them. The trial with the lowest final loss runs again with
other initial weights and batches. Only these runs are compared.
"""

import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "benchmarks"))

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro

import environment  # noqa: F401, isort: skip; before JAX starts

import kfac
from files import UserError

Settings = dict[str, float]
Grid = dict[str, tuple[float, ...]]
# A record for each evaluation: step, seconds so far, losses.
Curve = list[dict[str, float]]


@dataclasses.dataclass
class Options:
    """Train with every optimizer at its best trial's settings, and compare them."""

    steps: int
    """Steps per run. The learning rate always falls to zero at the end of the run."""
    every: int
    """Steps between evaluations."""
    trials: int
    """With --tune: the number of grid points for each optimizer."""
    refine: int = 2
    """With --tune: how often to repeat the best trial with double and half its learning rate. K-FAC repeats once."""
    seeds: int = 3
    """Runs to average for each optimizer. Trials use a different seed."""
    tune: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Run the trials that trials.jsonl does not have yet."""
    only: tuple[str, ...] = ()
    """Optimizers to use: all by default."""
    folder: Path = Path()
    """Folder with trials.jsonl."""
    report: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Compare and draw the best trials without training."""
    figure: Path = Path("curves.png")
    """With --report: file for the figure with the loss curves."""


def shape(step: Any, steps: Any, warmup: Any) -> Any:
    """Return the learning rate at a step (counted from 0), relative to its peak.

    The rate rises linearly for the fraction `warmup` of the steps, and then falls like half a cosine.
    """
    rise = (step + 1) / jnp.maximum(warmup * steps, 1)
    done = jnp.clip((step - warmup * steps) / (steps * (1 - warmup)), 0, 1)
    return jnp.where(rise < 1, rise, 0.5 * (1 + jnp.cos(jnp.pi * done)))


class Task:
    """A training task with compiled steps. Settings are arguments of the steps, so all trials share the programs.

    Args:
      init: maps a key to initial parameters.
      batch: maps a seed and a step to a batch.
      loss: maps parameters and a batch to the mean loss, with the output marked for K-FAC.
      evaluate: maps parameters to losses by name.
      optimizer: maps an optimizer's name, the current learning rate, its settings and the layers to an optax
        transformation.
      fisher: the Fisher matrix for K-FAC's statistics, "sampled" or "empirical".
    """

    def __init__(self, *, init: Callable[..., Any], batch: Callable[..., Any], loss: Callable[..., Any],
                 evaluate: Callable[..., Any], optimizer: Callable[..., Any], fisher: str) -> None:  # fmt: skip
        self.init, self.batch, self.loss, self.optimizer, self.fisher = init, batch, loss, optimizer, fisher
        self.evaluate = jax.jit(evaluate)
        self.layers = kfac.find_layers(loss, init(jax.random.key(0)), batch(0, 0))
        self.compiled: dict[str, Callable[..., Any]] = {}

    def step(self, name: str, params: Any, state: Any, batch: Any, count: Any, steps: Any, numbers: Any) -> Any:
        rate = numbers["learning_rate"] * shape(count, steps, numbers["warmup"])
        tx = self.optimizer(name, rate, numbers, self.layers)
        if name == "kfac":
            measure = kfac.value_and_grad(self.loss, self.layers, fisher=self.fisher)
            drawing = {"fisher_key": jax.random.fold_in(jax.random.key(0), count)} if self.fisher == "sampled" else {}
            loss, grads, factors = measure(params, batch, **drawing)
            state = kfac.observe(state, factors)
        else:
            loss, grads = jax.value_and_grad(self.loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    def run(self, name: str, settings: Settings, steps: int, seed: int, every: int) -> Curve:
        """Train once; return the curve. Its processor seconds exclude compiling, making batches and evaluating."""
        params = self.init(jax.random.key(seed))
        state = self.optimizer(name, settings["learning_rate"], settings, self.layers).init(params)
        rest = jnp.float32(steps), {key: jnp.float32(value) for key, value in settings.items()}
        if name not in self.compiled:
            step = jax.jit(self.step, static_argnums=0, donate_argnums=(1, 2))
            self.compiled[name] = step.lower(name, params, state, self.batch(seed, 0), 0, *rest).compile()
        curve: Curve = []
        losses: list[float] = []
        seconds = 0.0
        for count in range(steps):
            batch, began = self.batch(seed, count), time.process_time()
            params, state, loss = jax.block_until_ready(self.compiled[name](params, state, batch, count, *rest))
            seconds += time.process_time() - began
            losses.append(float(loss))
            if (count + 1) % every == 0 or count + 1 == steps:
                found = {name: round(float(value), 5) for name, value in self.evaluate(params).items()}
                mean = round(float(np.mean(losses)), 5)
                curve.append({"step": count + 1, "seconds": round(seconds, 3), "batches": mean, **found})
                losses = []
                if not np.isfinite(list(found.values())).all():
                    break
        return curve


def points(grid: Grid, number: int) -> list[Settings]:
    """Return distinct grid points in a random order that is always the same."""
    every = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    return [every[k] for k in np.random.default_rng(0).permutation(len(every))[:number]]


def read(path: Path) -> list[dict[str, Any]]:
    """Return the trials in a file, or an empty list if there is no file. An incomplete last line is skipped."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def search(task: Task, grids: dict[str, Grid], options: Options, measure: str) -> None:
    """Run the trials that the file lacks, and add a line for each. The optimizers take turns."""
    path = options.folder / "trials.jsonl"
    whole = read(path)
    if path.exists() and not path.read_text().endswith("\n"):  # otherwise the next line would continue the last
        path.write_text("".join(json.dumps(trial) + "\n" for trial in whole))
    done = [(trial["optimizer"], trial["settings"], trial["steps"]) for trial in whole]

    def run(name: str, settings: Settings) -> None:
        if (name, settings, options.steps) in done:
            return
        curve = task.run(name, settings, options.steps, 0, options.every)
        trial = {"optimizer": name, "settings": settings, "steps": options.steps, "curve": curve}
        with path.open("a") as file:
            file.write(json.dumps(trial) + "\n")
        done.append((name, settings, options.steps))
        print(f"{name}: {settings} ends at {curve[-1]}", flush=True)

    each = {name: points(grids[name], options.trials) for name in grids}
    for number in range(options.trials):
        for name in grids:
            if number < len(each[name]):
                run(name, each[name][number])
    # The best rate may lie outside the grid. K-FAC gets no more trials than the others.
    for again in range(options.refine):
        for name in grids:
            if again and name == "kfac":
                continue
            settings = best(read(path), name, measure)["settings"]
            for factor in (2.0, 0.5):
                run(name, {**settings, "learning_rate": settings["learning_rate"] * factor})


def best(trials: Sequence[dict[str, Any]], name: str, measure: str) -> dict[str, Any]:
    """Return the optimizer's trial with the lowest final loss. Trials that diverged rank last."""
    own = [trial for trial in trials if trial["optimizer"] == name]
    if not own:
        raise UserError(f"trials.jsonl has no trials of {name}: run --tune first")
    return min(own, key=lambda trial: _last(trial["curve"], measure))


def _last(curve: Curve, measure: str) -> float:
    return curve[-1][measure] if np.isfinite(curve[-1][measure]) else np.inf


def mean(curves: Sequence[Curve]) -> Curve:
    """Return the mean over runs, record by record."""
    return [{name: float(np.mean([r[name] for r in rows])) for name in rows[0]} for rows in zip(*curves, strict=False)]


def first_at(curve: Curve, measure: str, target: float) -> dict[str, float] | None:
    """Return the first record whose loss is at most `target`, or None."""
    return next((record for record in curve if record[measure] <= target), None)


def baseline(curves: dict[str, Curve], measure: str) -> str:
    """Return the name of the best first-order optimizer."""
    return min((name for name in curves if name != "kfac"), key=lambda name: _last(curves[name], measure))


def table(curves: dict[str, Curve], against: str, measure: str) -> Iterator[str]:
    """Yield a Markdown table: each optimizer's final loss, and when it reached the final loss of `against`."""
    target, steps = curves[against][-1][measure], curves[against][-1]["step"]
    yield f"| optimizer | {measure} loss at the end | step at which it is {target:.4f} | seconds until then | a step |"
    yield "|---|---|---|---|---|"
    for name, curve in curves.items():
        there, end = first_at(curve, measure, target), curve[-1]
        when = f"{there['step']:.0f} ({there['step'] / steps:.0%}) | {there['seconds']:.1f}" if there else "- | -"
        yield f"| {name} | {end[measure]:.4f} | {when} | {end['seconds'] / end['step']:.3f} |"


def figure(path: Path, curves: dict[str, Curve], measure: str, label: str, logarithmic: bool) -> None:
    """Draw the losses against steps and against seconds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    drawn, axes = plt.subplots(1, 2, figsize=(9, 3.5), sharey=True, layout="constrained")
    for axis, against in zip(axes, ("step", "seconds"), strict=True):
        for name, curve in curves.items():
            axis.plot([r[against] for r in curve], [r[measure] for r in curve], label=name)
        axis.set_xlabel("steps" if against == "step" else "seconds of processor time")
        axis.grid(alpha=0.3)
        if logarithmic:
            axis.set_yscale("log")
    axes[0].set_ylabel(label)
    axes[0].legend()
    drawn.savefig(path, dpi=120)
    plt.close(drawn)


def main(task: Callable[[], Task], grids: dict[str, Grid], default: Options, args: list[str], *, measure: str,
         label: str, logarithmic: bool = False) -> None:  # fmt: skip
    """Run an example's command line: the search with `--tune`, otherwise the comparison."""
    options = tyro.cli(Options, args=args, default=default)
    if options.refine < 0:
        raise UserError(f"--refine is {options.refine} but must be at least 0")
    for name in ("steps", "every", "trials", "seeds"):
        if getattr(options, name) < 1:
            raise UserError(f"--{name} is {getattr(options, name)} but must be at least 1")
    if unknown := set(options.only) - set(grids):
        raise UserError(f"--only {' '.join(sorted(unknown))}: must be among {', '.join(grids)}")
    grids = {name: grid for name, grid in grids.items() if name in (options.only or grids)}
    if options.tune:
        search(task(), grids, options, measure)
        return
    trials = read(options.folder / "trials.jsonl")
    chosen = {name: best(trials, name, measure) for name in grids}
    if options.report:
        if not set(grids) - {"kfac"}:
            raise UserError("--report compares K-FAC with other optimizers: name another in --only, or omit --only")
        curves = {name: trial["curve"] for name, trial in chosen.items()}
        print("\n".join(table(curves, baseline(curves, measure), measure)))
        figure(options.figure, curves, measure, label, logarithmic)
        return
    made = task()
    print(made.layers)
    curves = {}
    for name in grids:
        settings = chosen[name]["settings"]
        print(f"{name}: {settings}", flush=True)
        runs = [made.run(name, settings, options.steps, 1 + k, options.every) for k in range(options.seeds)]
        curves[name] = mean(runs)
        for record in curves[name]:
            print("  ".join(f"{key} {value:.4g}" for key, value in record.items()), flush=True)
    if set(curves) - {"kfac"}:
        print("\n".join(table(curves, baseline(curves, measure), measure)))


def script(run: Callable[[list[str]], None]) -> None:
    """Run the example. Exit with a one-line message after a `UserError`."""
    try:
        run(sys.argv[1:])
    except UserError as error:
        sys.exit(f"error: {error}")
