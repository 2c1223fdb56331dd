"""Run variational Monte Carlo for hydrogen, helium and lithium with a small FermiNet, K-FAC, SPRING and Adam.

python examples/wavefunction/vmc.py    # print a table, and draw docs/wavefunction.png
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.linalg as jsl
import numpy as np
import optax
from jax import lax
from jax.flatten_util import ravel_pytree
from matplotlib.figure import Figure

import kfac
from ferminet import ATOMS, SMALL, Atom, Sizes, clipped, init, local_energies, log_psi, logs, make_energy

# Initial learning rates. They fall as 1 / (1 + 5 t) from t = 0 to 1.
RATES = {"adam": 1e-2, "kfac": 0.1, "kfac, centred": 0.1, "spring": 0.1}


def walk(params: Any, atom: Atom, x: jax.Array, width: jax.Array, key: jax.Array, steps: int = 10) -> Any:
    """Move all electrons by `steps` Metropolis steps, and return the new positions and an adapted width.

    The width moves towards an acceptance rate of a half.
    """
    density = jax.vmap(lambda x: 2 * log_psi(params, atom, x))

    def move(carry, key):
        x, now = carry
        k1, k2 = jax.random.split(key)
        new = x + width * jax.random.normal(k1, x.shape)
        then = density(new)
        accept = jnp.log(jax.random.uniform(k2, now.shape)) < then - now
        return (jnp.where(accept[:, None], new, x), jnp.where(accept, then, now)), accept.mean()

    (x, _), accepted = lax.scan(move, (x, density(x)), jax.random.split(key, steps))
    return x, width * jnp.exp(0.1 * (accepted.mean() - 0.5))


def centred(direction: Any, mean: Any, along: Any) -> Any:
    """Return `(F - m m^T)^-1 g` layer by layer from `F^-1 g`, `m` and `F^-1 m` (Sherman & Morrison).

    A constant factor of psi has no effect, so the natural gradient needs the covariance of the gradients of log |psi|.
    `F` holds their second moments.
    """

    def one(d, m, a):
        share = optax.tree.vdot(m, d) / jnp.maximum(1 - optax.tree.vdot(m, a), 0.1)
        return jax.tree.map(lambda d, a: d + share * a, d, a)

    return {name: one(direction[name], mean[name], along[name]) for name in direction}


def bounded(direction: Any, gradient: Any, rate: jax.Array) -> Any:
    """Return `rate` times the direction, with a squared length of at most 1e-3 in the metric (Ba et al. 2017)."""
    squared = rate**2 * jnp.abs(optax.tree.vdot(direction, gradient))
    return optax.tree.scale(rate * jnp.minimum(1, jnp.sqrt(1e-3 / squared)), direction)


def start(name: str, atom: Atom, params: Any, x: jax.Array, damping: float = 1e-3) -> tuple[Any, Callable]:
    """Return an initial state and `step(params, state, x, rate, key)`.

    A step returns the energy before it, the change to subtract from the parameters, and the new state.
    """
    energy, marked = make_energy(atom), lambda params, x: logs(params, atom, x).mean()
    layers = kfac.find_layers(marked, params, x)
    # As for the surrogate, gradients are half the energy's gradients. The matrix then uses the gradients of log |psi|.

    if name == "adam":
        adam = optax.scale_by_adam()

        def first_order(params, state, x, rate, key):
            value, grads = jax.value_and_grad(energy)(params, x)
            update, state = adam.update(grads, state)
            return value, optax.tree.scale(rate, update), state

        return adam.init(params), first_order

    if name == "spring":

        def spring(params, last, x, rate, key):
            """Apply MinSR through the walkers' kernel, with the last step as a guess (Goldshlager et al. 2024)."""
            value, change = clipped(local_energies(params, atom, x))
            slope = jax.vmap(lambda x: ravel_pytree(jax.grad(log_psi)(params, atom, x))[0])(x)
            slope = (slope - slope.mean(0)) / len(x) ** 0.5
            guess = 0.95 * last
            kernel = slope @ slope.T + 1 / len(x) + damping * jnp.eye(len(x))
            dual = jsl.solve(kernel, change / len(x) ** 0.5 - slope @ guess, assume_a="pos")
            direction = guess + slope.T @ dual
            step = direction * jnp.minimum(rate, 1e-3**0.5 / jnp.linalg.norm(direction))
            return value, ravel_pytree(params)[1](step), direction

        return jnp.zeros_like(ravel_pytree(params)[0]), spring

    tx = kfac.scale_by_kfac(layers, damping=damping, factor_ema_decay=0.95)
    measure = kfac.value_and_grad(marked, layers, fisher="expected")

    def kronecker(params, state, x, rate, key):
        value, grads = jax.value_and_grad(energy)(params, x)
        _, mean, factors = measure(params, x, fisher_key=key)
        direction, state = tx.update(grads, kfac.observe(state, factors), params)
        if name == "kfac, centred":
            direction = centred(direction, mean, tx.update(mean, state, params)[0])
        return value, bounded(direction, grads, rate), state

    return tx.init(params), kronecker


def train(
    name: str, atom: Atom, steps: int, walkers: int, seed: int = 0, sizes: Sizes = SMALL, rate: float | None = None
) -> tuple[Any, Any, list[float], float]:
    """Train, and return the parameters, the walkers and their width, the batches' energies, and seconds per step."""
    k1, k2, k3 = jax.random.split(jax.random.key(seed), 3)
    params, x = init(k1, atom, sizes), jax.random.normal(k2, (walkers, 3 * atom.charge))
    width = jnp.asarray(0.5)
    state, step = start(name, atom, params, x)
    x, width = jax.jit(walk, static_argnums=(1, 5))(params, atom, x, width, k3, 100)
    first = RATES[name] if rate is None else rate

    @jax.jit
    def iterate(params, state, x, width, k):
        key = jax.random.fold_in(k3, k)
        x, width = walk(params, atom, x, width, key)
        value, change, state = step(params, state, x, first / (1 + k / (0.2 * steps)), key)
        return jax.tree.map(jnp.subtract, params, change), state, x, width, value

    energies, begin = [], 0.0
    for k in range(steps):
        params, state, x, width, value = iterate(params, state, x, width, k)
        energies.append(float(value))
        begin = begin or time.process_time()  # excludes compilation
        if k % 20 == 19:
            print(
                f"\r{name}: step {k + 1} of {steps}, {np.mean(energies[-20:]):.4f}", end="", file=sys.stderr, flush=True
            )
    print(file=sys.stderr)
    return params, (x, width), energies, (time.process_time() - begin) / max(1, steps - 1)


def evaluate(params: Any, atom: Atom, x: jax.Array, width: jax.Array, rounds: int = 200) -> tuple[float, float]:
    """Return the energy without clipping and its standard error, from `rounds` further rounds."""

    @jax.jit
    def of_rounds(x, width):
        def one(carry, key):
            x, width = walk(params, atom, carry[0], carry[1], key)
            return (x, width), local_energies(params, atom, x).mean()

        return lax.scan(one, (x, width), jax.random.split(jax.random.key(10**6), rounds))[1]

    blocks = np.asarray(of_rounds(x, width), np.float64)
    blocks = blocks.reshape(min(20, rounds), -1).mean(1)  # successive rounds are correlated
    return float(blocks.mean()), float(blocks.std(ddof=1) / len(blocks) ** 0.5)


def run(
    plan: dict[str, tuple[str, ...]], steps: int = 250, walkers: int = 512, rounds: int = 200,
    sizes: Sizes = SMALL, picture: Path | None = None,
) -> list[tuple[str, str, float, float, float]]:  # fmt: skip
    """Return rows with atom, method, energy error, standard error and seconds per step. Errors are in millihartree."""
    found, figure = [], Figure(figsize=(10, 3.4), layout="constrained")
    for axis, (title, names) in zip(figure.subplots(1, len(plan), squeeze=False)[0], plan.items(), strict=True):
        for name in names:
            atom = ATOMS[title]
            params, (x, width), energies, seconds = train(name, atom, steps, walkers, sizes=sizes)
            energy, deviation = evaluate(params, atom, x, width, rounds)
            found.append((title, name, 1e3 * (energy - atom.energy), 1e3 * deviation, seconds))
            print("| {} | {} | {:.2f} ± {:.2f} | {:.3f} |".format(*found[-1]), flush=True)
            smooth = np.convolve(energies, np.full(10, 0.1), "valid")
            axis.semilogy(np.arange(len(smooth)) + 10, 1e3 * np.abs(smooth - atom.energy), label=name)
        axis.set(title=title, xlabel="step")
        axis.legend()
    figure.axes[0].set_ylabel("error of the energy, millihartree")
    if picture:
        figure.savefig(picture, dpi=100)
    return found


if __name__ == "__main__":
    print("| atom | method | error in millihartree | s a step |")
    two = "kfac", "spring"
    plan = {"hydrogen": two, "helium": ("kfac", "kfac, centred", "spring", "adam"), "lithium": two}
    run(plan, picture=Path(__file__).parents[2] / "docs" / "wavefunction.png")
