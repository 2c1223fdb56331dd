"""Measure how many extra steps K-FAC needs if it splits large factors into diagonal blocks.

    python examples/benchmarks/blocks.py --seeds 2

The network is an autoencoder with 1,024-wide layers on scikit-learn's handwritten digits. Its factors are whole, or
split into blocks with 512, 256 or 128 rows (`find_layers(max_factor_dim=)`). All runs have the same initial weights,
batches and learning rate. The rate falls to zero at the end. For each bound and seed, the script prints:

- the loss on all training images after the last step,
- the first step at which the running mean of the batch losses reaches the whole factors' final value,
- the memory for averages and inverses.

A run takes two minutes on two cores.
"""

import argparse
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import kfac

WIDTHS = (64, 1024, 1024, 16, 1024, 1024, 64)


def initial(seed):
    rng = np.random.default_rng(seed)
    pairs = itertools.pairwise(WIDTHS)
    return [
        {"kernel": jnp.asarray(rng.normal(size=pair) / pair[0] ** 0.5, jnp.float32), "bias": jnp.zeros(pair[1])}
        for pair in pairs
    ]


def loss_fn(params, x):
    h = x
    for k, layer in enumerate(params):
        h = h @ layer["kernel"] + layer["bias"]
        h = h if k in (2, len(params) - 1) else jnp.tanh(h)
    return jnp.mean(jnp.sum(optax.sigmoid_binary_cross_entropy(h, x), axis=-1))


def train(images, max_factor_dim, rate, steps, batch, seed):
    """Return each batch's loss, the final loss on all images, and the state's size in bytes."""
    rates = optax.linear_schedule(rate, 0.0, steps)
    params, rng, losses = initial(seed), np.random.default_rng(seed), []
    layers = kfac.find_layers(loss_fn, params, images[:batch], max_factor_dim=max_factor_dim)
    step = kfac.train_step(loss_fn, rates, layers=layers)
    state = step.init(params, images[:batch])
    for _ in range(steps):
        params, state, loss = step(params, state, images[rng.choice(len(images), batch, replace=False)])
        losses.append(float(loss))
    memory = kfac.planning.estimate(layers, devices=1).memory["state"]
    return losses, float(jax.jit(loss_fn)(params, images)), memory


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rate", type=float, default=0.1)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--bounds", type=int, nargs="+", default=[1025, 513, 257, 129], help="including the bias's row")
    options = parser.parse_args()
    images = jnp.asarray(load_digits().data / 16, jnp.float32)
    for seed in range(options.seeds):
        target = None
        for bound in options.bounds:
            losses, end, memory = train(images, bound, options.rate, options.steps, options.batch, seed)
            means = np.convolve(losses, np.ones(5) / 5, "valid")
            target = means[-1] if target is None else target
            first = next((k + 5 for k, mean in enumerate(means) if mean <= target), None)
            print(f"seed {seed} max_factor_dim={bound}: loss {end:.3f}, target reached at step {first}, state "
                  f"{memory / 1e6:.0f} MB", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
