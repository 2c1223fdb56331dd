"""Train the K-FAC papers' deep autoencoder on scikit-learn's digits with K-FAC, Nesterov momentum and Adam.

python examples/autoencoder/deep_autoencoder.py          # train with all three and print the comparison
python examples/autoencoder/deep_autoencoder.py --tune   # search the settings
"""

import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent))

import comparison  # noqa: E402, I001  before JAX starts
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
from sklearn.datasets import load_digits  # noqa: E402

import kfac  # noqa: E402

Params = list[dict[str, jax.Array]]

GRIDS: dict[str, comparison.Grid] = {
    "nesterov": {
        "learning_rate": (0.003, 0.01, 0.02, 0.04),
        "momentum": (0.9, 0.95, 0.98, 0.99),
        "warmup": (0.02, 0.1),
    },
    "adam": {
        "learning_rate": (1e-3, 2e-3, 4e-3, 8e-3, 16e-3),
        "b1": (0.9, 0.95),
        "b2": (0.95, 0.99, 0.999),
        "warmup": (0.02, 0.1),
    },
    "kfac": {
        "learning_rate": (0.01, 0.03, 0.1, 0.3),
        "damping": (1e-4, 1e-3, 1e-2, 0.1),
        "momentum": (0.9, 0.95),
        "kl_clip": (0.1, 1.0, 10.0),
        "warmup": (0.02,),
    },
}


def init(key: jax.Array, widths: tuple[int, ...]) -> Params:
    """Return layers with these widths down to the code and up again. Kernels have variance 1 / d_in."""
    widths = widths + widths[-2::-1]
    keys = jax.random.split(key, len(widths) - 1)
    return [
        {"kernel": jax.random.normal(key, (d_in, d_out)) * d_in**-0.5, "bias": jnp.zeros(d_out)}
        for key, d_in, d_out in zip(keys, widths, widths[1:], strict=False)
    ]


def logits(params: Params, images: jax.Array) -> jax.Array:
    """Return the output's logits. All layers use tanh, except for the code and the output."""
    x = images
    for k, layer in enumerate(params, 1):
        x = x @ layer["kernel"] + layer["bias"]
        x = x if k in (len(params) // 2, len(params)) else jnp.tanh(x)
    return x


def loss(params: Params, images: jax.Array) -> jax.Array:
    """Return the mean of `-log p` over images.

    Each pixel is a Bernoulli variable with the grey value as its target.
    """
    out = kfac.mark_output(logits(params, images), "bernoulli")
    return jnp.mean(jnp.sum(optax.sigmoid_binary_cross_entropy(out, images), axis=-1))


def squared_error(params: Params, images: jax.Array) -> jax.Array:
    """Return the papers' error: the squared error, summed over pixels and averaged over images."""
    return jnp.mean(jnp.sum((jax.nn.sigmoid(logits(params, images)) - images) ** 2, axis=-1))


def optimizer(name: str, rate: Any, numbers: dict[str, Any], layers: kfac.Layers) -> Any:
    match name:
        case "nesterov":
            return optax.sgd(rate, numbers["momentum"], nesterov=True)
        case "adam":
            return optax.adam(rate, numbers["b1"], numbers["b2"])
        case _:
            return kfac.natural_gradient(
                rate, layers, damping=numbers["damping"], momentum=numbers["momentum"], nesterov=True,
                lr_in_momentum=False, kl_clip=numbers["kl_clip"], factor_ema_decay=0.95, unitwise_damping_scale=1.0,
            )  # fmt: skip


def make(widths: tuple[int, ...] = (64, 200, 100, 50, 6)) -> comparison.Task:
    """Return the task. Every batch has all 1,797 images, so only the sampled statistics are noisy."""
    images = jnp.asarray(load_digits().data / 16, jnp.float32)
    return comparison.Task(
        init=lambda key: init(key, widths),
        batch=lambda seed, step: images,
        loss=loss,
        evaluate=lambda params: {"training": loss(params, images), "squared": squared_error(params, images)},
        optimizer=optimizer,
        fisher="sampled",
    )


OPTIONS = comparison.Options(steps=300, every=10, trials=16, folder=FOLDER)


def main(args: list[str]) -> None:
    comparison.main(make, GRIDS, OPTIONS, args, measure="training", label="cross-entropy of an image in nats")


if __name__ == "__main__":
    comparison.script(main)
