"""Measure how much a badly chosen damping costs, with fixed and with adaptive damping.

    python examples/benchmarks/adaptive_damping.py

The script trains a small network on handwritten digits for 100 steps at batch 500. It prints the training loss for
initial dampings from 1e-4 to 1. It takes about a minute.
"""

import itertools

import environment  # noqa: F401, isort: skip; before JAX is imported

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import kfac

SIZES = (64, 100, 50, 10)
STEPS, BATCH = 100, 500


def loss_fn(params, batch):
    x, labels = batch
    for layer in params[:-1]:
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
    logits = kfac.mark_output(x @ params[-1]["kernel"] + params[-1]["bias"], "categorical")
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def train(tx, layers, params, data):
    """Train the network; return its loss on all images and the last damping."""

    @jax.jit
    def step(params, state, batch, key):
        _, grads, factors = kfac.value_and_grad(loss_fn, layers, fisher="sampled")(params, batch, fisher_key=key)
        state = kfac.observe(state, factors)
        updates, state = tx.update(grads, state, params, value_fn=lambda p: loss_fn(p, batch))
        return optax.apply_updates(params, updates), state

    state, rng = tx.init(params), np.random.default_rng(1)
    for number in range(STEPS):
        chosen = rng.choice(len(data[0]), BATCH, replace=False)
        batch = jax.tree.map(lambda x, chosen=chosen: x[chosen], data)
        params, state = step(params, state, batch, jax.random.key(number))
    return float(loss_fn(params, data)), float(kfac.diagnostics(state)["damping"])


def main():
    images, labels = load_digits(return_X_y=True)
    data = jnp.asarray(images / 16, jnp.float32), jnp.asarray(labels)
    rng = np.random.default_rng(0)
    params = [
        {"kernel": jnp.asarray(rng.normal(size=(a, b)) / np.sqrt(a), jnp.float32), "bias": jnp.zeros(b)}
        for a, b in itertools.pairwise(SIZES)
    ]
    layers = kfac.find_layers(loss_fn, params, data)

    def optimizer(damping):
        return kfac.natural_gradient(
            1.0, layers, damping=damping, momentum=None, factor_ema_decay=0.95, unitwise_damping_scale=1.0
        )

    print(f"{'damping':>8} {'loss, fixed':>12} {'loss, adaptive':>15} {'its last damping':>17}")
    for damping in (1e-4, 1e-3, 1e-2, 1e-1, 1.0):
        fixed, _ = train(optimizer(damping), layers, params, data)
        adaptive, last = train(kfac.adaptive_damping(optimizer, damping), layers, params, data)
        print(f"{damping:8.0e} {fixed:12.2g} {adaptive:15.2g} {last:17.2g}", flush=True)


if __name__ == "__main__":
    main()
