"""Compute the influence of single examples by blocks and by the whole matrix, and check it by further training.

python examples/influence/single.py    # print Spearman's correlation, averaged over 20 predictions
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from scipy.stats import spearmanr
from sklearn.datasets import load_digits

import kfac
from images import init, network
from scores import curvature, gradients, influence

DECAY, EXAMPLES, QUERIES = 1e-2, 60, 20


def regression() -> tuple[Any, Any, Any, Callable, Callable]:
    """Return a regression problem with four inputs. The measure is the prediction.

    The targets are the noisy outputs of another network with the same sizes.
    """
    rng = np.random.default_rng(0)
    x = rng.normal(size=(EXAMPLES + QUERIES, 4))
    y = np.asarray(network(init(jax.random.key(1), (4, 10, 1)), jnp.asarray(x))) + 0.1 * rng.normal(size=(len(x), 1))

    def losses(params, batch):
        return 0.5 * jnp.sum((kfac.mark_output(network(params, batch[0]), "gaussian") - batch[1]) ** 2, axis=-1)

    return init(jax.random.key(0), (4, 10, 1)), x, y, losses, lambda p, batch: network(p, batch[0])[:, 0]


def digits() -> tuple[Any, Any, Any, Callable, Callable]:
    """Return the problem of classifying four digits by eight principal components.

    The measure is the log odds of the right class.
    """
    x, y = load_digits(n_class=4, return_X_y=True)
    order = np.random.default_rng(0).permutation(len(y))[: EXAMPLES + QUERIES]
    x = (x[order] - x.mean(0)) @ np.linalg.svd(x - x.mean(0), full_matrices=False)[2][:8].T / 16

    def losses(params, batch):
        logits = kfac.mark_output(network(params, batch[0]), "categorical")
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1])

    def log_odds(params, batch):
        p = jnp.take_along_axis(jax.nn.log_softmax(network(params, batch[0])), batch[1][:, None], -1)[:, 0]
        return p - jnp.log1p(-jnp.exp(p))

    return init(jax.random.key(0), (8, 6, 4)), x, y[order], losses, log_odds


def minimum(objective: Callable, flat: jax.Array, steps: int) -> jax.Array:
    """Find the minimum by Newton's method.

    Each step uses the Hessian's absolute eigenvalues and the best of eight step lengths.
    """

    def step(flat, _):
        values, vectors = jnp.linalg.eigh(jax.hessian(objective)(flat))
        newton = vectors @ ((vectors.T @ jax.grad(objective)(flat)) / jnp.maximum(jnp.abs(values), 1e-4))
        tried = flat - 0.5 ** jnp.arange(8)[:, None] * newton
        return tried[jnp.argmin(jax.vmap(objective)(tried))], None

    return jax.lax.scan(step, flat, length=steps)[0]


def run(problem: Callable, steps: int = 300) -> dict[str, float]:
    """Return Spearman's correlation between predicted and measured changes for the left-out examples."""
    params, x, y, losses, measure = problem()
    batch, query = (x[:EXAMPLES], y[:EXAMPLES]), (x[EXAMPLES:], y[EXAMPLES:])
    loss = lambda p, batch: losses(p, batch).mean()  # noqa: E731
    flat, unravel = ravel_pytree(params)

    def objective(flat, kept):
        return kept @ losses(unravel(flat), batch) / EXAMPLES + 0.5 * DECAY * flat @ flat

    flat = jax.jit(lambda flat: minimum(lambda f: objective(f, jnp.ones(EXAMPLES)), flat, steps))(flat)
    without = 1 - jnp.eye(EXAMPLES)
    moved = jax.jit(jax.vmap(lambda kept: minimum(lambda f: objective(f, kept), flat, 30)))(without)
    params = unravel(flat)
    changes = np.asarray(jax.vmap(lambda f: measure(unravel(f), query) - measure(params, query))(moved))

    measured, examples = gradients(measure, params, query), gradients(losses, params, batch)
    operators = curvature(loss, params, [batch], DECAY, fisher="expected", key=jax.random.key(0))
    whole = kfac.curvature.gauss_newton(loss, params, batch).to_dense() + DECAY * jnp.eye(len(flat))
    predicted = {"gradients": influence(None, params, measured, examples)}
    predicted |= {name: influence(operator, params, measured, examples) for name, operator in operators.items()}
    predicted["whole"] = influence(None, params, jnp.linalg.solve(whole, measured.T).T, examples)
    found = {}
    for name, scores in predicted.items():
        found[name] = float(np.mean([spearmanr(a, b).statistic for a, b in zip(scores, changes.T, strict=True)]))
    hessian = jax.jit(jax.hessian(functools.partial(objective, kept=jnp.ones(EXAMPLES))))(flat)
    exact = np.asarray(measured @ jnp.linalg.solve(hessian, examples.T)) / EXAMPLES
    found["Hessian"] = float(np.mean([spearmanr(a, b).statistic for a, b in zip(exact, changes.T, strict=True)]))
    return found


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    for problem in (regression, digits):
        print(problem.__name__, {name: round(value, 2) for name, value in run(problem).items()}, flush=True)
