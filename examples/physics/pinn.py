"""Physics-informed networks: K-FAC and Gauss-Newton against Adam, SOAP and L-BFGS, error against seconds.

python examples/physics/pinn.py           # all methods at the best settings of their trials: a table, docs/physics.png
python examples/physics/pinn.py --tune    # the trials, which trials.json holds
"""

import functools
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from equations import PROBLEMS, Problem, init, network, points
from solvers import start

TRIALS = Path(__file__).with_name("trials.json")
# One setting is tuned for each method, over as many values. All have the same seconds.
GRIDS: dict[str, tuple[float, ...]] = {
    "adam": (3e-3, 1e-2, 3e-2, 1e-1),  # rate
    "soap": (1e-3, 3e-3, 1e-2, 3e-2),  # rate
    "lbfgs": (5.0, 20.0, 50.0, 100.0),  # memory
    "gauss-newton": (1e-6, 1e-5, 1e-4, 1e-3),  # damping over the loss
    "kfac": (1e-4, 1e-3, 1e-2, 1e-1),  # damping
}


@functools.cache
def compiled(name: str, problem: Problem, memory: float, seed: int) -> tuple[Any, Any, Callable, int]:
    """Parameters and state at the beginning, several steps in one, how many, and the relative L2 error."""
    params = init(jax.random.key(seed), (len(problem.low), *problem.widths, 1))
    batch = points(problem, 2 * seed, problem.inner), points(problem, 2 * seed + 1, problem.edge, faces=True)
    test = points(problem, 10**6, 4000)
    state, step = start(name, problem, batch, params, memory)
    count = 10 if name in ("adam", "soap") else 2

    def several(params, state, setting, fall, key):
        body = lambda carry, key: (step(*carry, setting, fall, key), None)  # noqa: E731
        return jax.lax.scan(body, (params, state), jax.random.split(key, count))[0]

    def error(params):
        u, exact = (jax.vmap(f)(test) for f in (lambda x: network(params, x), problem.exact))
        return jnp.linalg.norm(u - exact) / jnp.linalg.norm(exact)

    steps = jax.jit(several).lower(params, state, 1.0, 1.0, jax.random.key(0)).compile()
    return (params, state), steps, jax.jit(error), count


def train(name: str, problem: Problem, setting: float, seconds: float, seed: int = 0) -> list[dict[str, float]]:
    """Steps, seconds of the processor in them (compiling and errors left out), and errors."""
    carry, steps, error, count = compiled(name, problem, setting if name == "lbfgs" else 0, seed)
    curve, spent, done = [{"steps": 0, "seconds": 0.0, "error": float(error(carry[0]))}], 0.0, 0
    while spent < seconds:
        began = time.process_time()
        fall = 0.5 + 0.5 * np.cos(np.pi * spent / seconds)
        carry = jax.block_until_ready(steps(*carry, setting, fall, jax.random.key(done)))
        spent, done = spent + time.process_time() - began, done + count
        if spent >= min(seconds, curve[-1]["seconds"] + seconds / 40):
            curve.append({"steps": done, "seconds": spent, "error": float(error(carry[0]))})
    return curve


def tune(seconds: float, names: Sequence[str], path: Path) -> None:
    trials: dict[str, Any] = {}
    for title in names:
        for name, grid in GRIDS.items():
            for setting in grid:
                error = train(name, PROBLEMS[title], setting, seconds)[-1]["error"]
                trials.setdefault(title, {}).setdefault(name, {})[f"{setting:g}"] = error
                print(f"{title}: {name} {setting:g}: {error:.2e}", flush=True)
    path.write_text(json.dumps(trials, indent=1) + "\n")


def compare(
    seconds: float, names: Sequence[str], path: Path, picture: Path, seed: int = 1
) -> dict[str, dict[str, float]]:
    """Every method with the setting that had the least error in the trials, from another start and at other points."""
    trials = json.loads(path.read_text())
    found: dict[str, Any] = {}
    figure = Figure(figsize=(4 * len(names), 3.4), layout="constrained")
    axes = figure.subplots(1, len(names), squeeze=False)
    for axis, title in zip(axes[0], names, strict=True):
        for name in GRIDS:
            errors = {setting: e if np.isfinite(e) else np.inf for setting, e in trials[title][name].items()}
            setting = min(errors, key=errors.__getitem__)
            curve = train(name, PROBLEMS[title], float(setting), seconds, seed)
            last = found.setdefault(title, {})[name] = curve[-1]
            print(f"| {title} | {name} | {setting} | {last['steps']} | {last['error']:.1e} |", flush=True)
            axis.semilogy([c["seconds"] for c in curve], [c["error"] for c in curve], label=name)
        axis.set(title=title, xlabel="seconds of the processor", ylabel="relative L2 error")
    axes[0][0].legend()
    figure.savefig(picture, dpi=100)
    return found


if __name__ == "__main__":
    # The errors of the better methods are below what float32 can compute of a Laplacian.
    jax.config.update("jax_enable_x64", True)
    if "--tune" in sys.argv:
        tune(6, list(PROBLEMS), TRIALS)
    else:
        compare(10, list(PROBLEMS), TRIALS, Path(__file__).parents[2] / "docs" / "physics.png")
