"""Train physics-informed networks with Gauss-Newton, exactly or by K-FAC, and other methods, and compare errors.

    taskset -c 0 python examples/physics/pinn.py run --seconds 60    # one core
    python examples/physics/pinn.py report                           # the table and docs/physics.png

`run` stores a row for each problem and method in --results, and does not repeat stored rows. A method's budget is in
seconds of the processor, so a busy machine does not change the comparison. Compiling is excluded. "ssbroyden" needs
`pip install ssbroyden-optimistix`.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from equations import PROBLEMS, Problem, init, network, points
from solvers import start

# Each method's setting serves all equations: a rate, L-BFGS's memory, or the least damping of exact Gauss-Newton steps.
# K-FAC and self-scaled Broyden need no setting.
SETTINGS = {"adam": 1e-2, "soap": 1e-2, "lbfgs": 50.0, "ssbroyden": 0.0, "gauss-newton": 1e-12, "kfac": 0.0}
NAMES = ["Adam", "SOAP", "L-BFGS", "self-scaled Broyden", "exact Gauss-Newton", "K-FAC"]
LABELS = dict(zip(SETTINGS, NAMES, strict=True))
KEYS = "problem", "method", "budget", "seed"
HERE = Path(__file__).parent


def compiled(name: str, problem: Problem, seed: int) -> tuple[Any, Any, Callable, int]:
    """Return the initial parameters and state, a program for several steps, the error function, and the step count.

    The error is the relative L2 error.
    """
    params = init(jax.random.key(seed), problem)
    batch = points(problem, 2 * seed, problem.inner), points(problem, 2 * seed + 1, problem.edge, faces=True)
    test = points(problem, 10**6, 4000)
    state, step = start(name, problem, batch, params, SETTINGS[name])
    count = 10 if name in ("adam", "soap") else 2

    def several(params, state, fall, key):
        body = lambda carry, key: (step(*carry, SETTINGS[name], fall, key), None)  # noqa: E731
        return jax.lax.scan(body, (params, state), jax.random.split(key, count))[0]

    def error(params):
        u, exact = (jax.vmap(f)(test) for f in (lambda x: network(params, x), problem.exact))
        return jnp.linalg.norm(u - exact) / jnp.linalg.norm(exact)

    return (
        (params, state),
        jax.jit(several).lower(params, state, 1.0, jax.random.key(0)).compile(),
        jax.jit(error),
        count,
    )


def train(name: str, problem: Problem, seconds: float, seed: int = 0) -> dict[str, Any]:
    """Train, and return the last error, the steps, the seconds to compile, and a curve of seconds and errors."""
    began = time.process_time()
    carry, steps, error, count = compiled(name, problem, seed)
    compiling = time.process_time() - began
    curve, spent, done = [(0.0, float(error(carry[0])))], 0.0, 0
    while spent < seconds:
        began = time.process_time()
        fall = 0.5 + 0.5 * np.cos(np.pi * spent / seconds)
        carry = jax.block_until_ready(steps(*carry, fall, jax.random.key(done)))
        spent, done = spent + time.process_time() - began, done + count
        if spent >= min(seconds, curve[-1][0] + seconds / 40):
            curve.append((round(spent, 2), float(f"{error(carry[0]):.3e}")))
    row: dict[str, Any] = {"error": curve[-1][1], "steps": done, "compiling": round(compiling, 1)}
    if problem.coefficient is not None:
        row["coefficient"] = float(carry[0][-1]["coefficient"])
    return row | {"curve": curve}


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def run(options: argparse.Namespace) -> None:
    """Run every method once on each problem, with the same initial parameters and the same points."""
    stored = {tuple(row[key] for key in KEYS) for row in read(options.results)}
    for title in options.problems:
        for name in options.methods:
            key = title, name, options.seconds, options.seed
            if key in stored:
                continue
            row = dict(zip(KEYS, key, strict=True)) | train(name, PROBLEMS[title], options.seconds, options.seed)
            with options.results.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print({name: value for name, value in row.items() if name != "curve"}, flush=True)


def report(options: argparse.Namespace) -> None:
    """Print a table of errors, and draw the curves. Each problem's largest budget counts."""
    rows = [row for row in read(options.results) if row["seed"] == options.seed and row["problem"] in options.problems]
    methods = [name for name in options.methods if any(row["method"] == name for row in rows)]
    print("| problem | seconds | " + " | ".join(LABELS[name] for name in methods) + " |")
    print("|---" * (2 + len(methods)) + "|")
    chosen = {}
    for title in options.problems:
        budgets = [row["budget"] for row in rows if row["problem"] == title]
        if not budgets:
            continue
        own = {row["method"]: row for row in rows if (row["problem"], row["budget"]) == (title, max(budgets))}
        errors = [f"{own[name]['error']:.1e}" if name in own else "" for name in methods]
        print(f"| {title} | {max(budgets):g} | " + " | ".join(errors) + " |")
        chosen[title] = own
    last = [row for own in chosen.values() for row in own.values()]
    times = [[row["compiling"] for row in last if row["method"] == name] for name in methods]
    print("| seconds to compile | | " + " | ".join(f"{min(t):.1f} to {max(t):.1f}" for t in times) + " |")
    drawn = {title: own for title, own in chosen.items() if all("curve" in row for row in own.values())}
    if not drawn:
        return
    columns, lines = min(4, len(drawn)), -(-len(drawn) // 4)
    figure = Figure(figsize=(4 * columns, 3.4 * lines), layout="constrained")
    for place, (title, own) in enumerate(drawn.items(), 1):
        axis = figure.add_subplot(lines, columns, place)
        for number, name in enumerate(methods):
            if name in own:
                axis.semilogy(*zip(*own[name]["curve"], strict=True), label=LABELS[name], color=f"C{number}")
        axis.set(title=title, xlabel="seconds of the processor", ylabel="relative L2 error")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(methods))
    figure.savefig(options.figure, dpi=100)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["run", "report"])
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=list(PROBLEMS), metavar="PROBLEM")
    parser.add_argument("--methods", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--seconds", type=float, default=60.0, help="processor seconds for each method")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--results", type=Path, default=HERE / "results.jsonl")
    parser.add_argument("--figure", type=Path, default=HERE.parents[1] / "docs" / "physics.png")
    options = parser.parse_args(arguments)
    {"run": run, "report": report}[options.action](options)


if __name__ == "__main__":
    # The better methods reach errors below the accuracy of a float32 Laplacian.
    jax.config.update("jax_enable_x64", True)
    main()
