"""Train physics-informed networks with K-FAC, Gauss-Newton, Adam, SOAP and L-BFGS, and compare errors over time.

python examples/physics/pinn.py    # print a table, write results.json, draw docs/physics.png; about ten minutes
"""

import json
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

# Each method's setting serves all equations: a rate, L-BFGS's memory, or the damping relative to the loss. K-FAC needs
# no setting.
SETTINGS = {"adam": 1e-2, "soap": 1e-2, "lbfgs": 50.0, "gauss-newton": 1e-4, "kfac": 0.0}


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


def train(name: str, problem: Problem, seconds: float, seed: int = 0) -> list[dict[str, float]]:
    """Train, and return a curve of steps, processor seconds and errors. The first point has the compilation seconds."""
    began = time.process_time()
    carry, steps, error, count = compiled(name, problem, seed)
    compiling = time.process_time() - began
    curve, spent, done = [{"steps": 0, "seconds": 0.0, "error": float(error(carry[0])), "compiling": compiling}], 0.0, 0
    while spent < seconds:
        began = time.process_time()
        fall = 0.5 + 0.5 * np.cos(np.pi * spent / seconds)
        carry = jax.block_until_ready(steps(*carry, fall, jax.random.key(done)))
        spent, done = spent + time.process_time() - began, done + count
        if spent >= min(seconds, curve[-1]["seconds"] + seconds / 40):
            curve.append({"steps": done, "seconds": spent, "error": float(error(carry[0]))})
    if problem.coefficient is not None:
        curve[-1]["coefficient"] = float(carry[0][-1]["coefficient"])
    return curve


def compare(seconds: float, names: Sequence[str], path: Path, picture: Path, seed: int = 1) -> dict[str, Any]:
    """Run every method once on each problem, with the same initial parameters and the same points."""
    found: dict[str, Any] = {}
    figure = Figure(figsize=(4 * len(names), 3.4), layout="constrained")
    for axis, title in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        for name in SETTINGS:
            curve = train(name, PROBLEMS[title], seconds, seed)
            last = found.setdefault(title, {})[name] = curve[-1] | {"compiling": curve[0]["compiling"]}
            known = f", coefficient {last['coefficient']:.4f}" if "coefficient" in last else ""
            print(
                f"{title}: {name} {last['error']:.1e} ({last['steps']}{known}), {last['compiling']:.1f} s", flush=True
            )
            axis.semilogy([c["seconds"] for c in curve], [c["error"] for c in curve], label=name)
        axis.set(title=title, xlabel="seconds of the processor", ylabel="relative L2 error")
    figure.axes[0].legend()
    figure.savefig(picture, dpi=100)
    path.write_text(json.dumps(found, indent=1) + "\n")
    return found


if __name__ == "__main__":
    # The better methods reach errors below the accuracy of a float32 Laplacian.
    jax.config.update("jax_enable_x64", True)
    results = Path(__file__).with_name("results.json")
    compare(10, list(PROBLEMS), results, Path(__file__).parents[2] / "docs" / "physics.png")
