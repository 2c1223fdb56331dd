"""What a bound on factors costs in steps: an autoencoder of 1,024-wide layers whose factors are cut into blocks.

python examples/benchmarks/blocks.py --seeds 2

Factors are whole, or diagonal blocks of 512, 256 and 128 rows (`find_layers(max_factor_dim=)`). All runs have the same
initial weights, batches and rate, which falls to zero at the end. For each bound and seed there is the loss on the
training images after the last step, the step at which the running mean of the loss of batches first is what whole
factors end at, and the memory of averages and inverses. Handwritten digits of scikit-learn; two minutes a run on two
cores.
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
    """The loss of each batch, that on all images at the end, and the bytes of the state."""
    rates = optax.linear_schedule(rate, 0.0, steps)
    step = kfac.train_step(loss_fn, rates, max_factor_dim=max_factor_dim)
    params, rng, losses = initial(seed), np.random.default_rng(seed), []
    state = step.init(params, images[:batch])
    for _ in range(steps):
        params, state, loss = step(params, state, images[rng.choice(len(images), batch, replace=False)])
        losses.append(float(loss))
    layers = kfac.find_layers(loss_fn, params, images[:batch], max_factor_dim=max_factor_dim)
    return losses, float(jax.jit(loss_fn)(params, images)), kfac.planning.Assignment(layers).memory_per_device


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rate", type=float, default=0.1)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--bounds", type=int, nargs="+", default=[1025, 513, 257, 129], help="with the bias's row")
    options = parser.parse_args()
    images = jnp.asarray(load_digits().data / 16, jnp.float32)
    for seed in range(options.seeds):
        target = None
        for bound in options.bounds:
            losses, end, memory = train(images, bound, options.rate, options.steps, options.batch, seed)
            means = np.convolve(losses, np.ones(5) / 5, "valid")
            target = means[-1] if target is None else target
            first = next((k + 5 for k, mean in enumerate(means) if mean <= target), None)
            print(f"seed {seed} max_factor_dim={bound}: {end:.3f}, there after {first} steps, state "
                  f"{memory / 1e6:.0f} MB", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
