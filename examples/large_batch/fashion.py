"""Define five networks for Fashion-MNIST, each of a different kind.

`networks.py` trains them if `--data-dir` names the folder with the Fashion-MNIST files. Debian's package
dataset-fashion-mnist has these files. No K-FAC default was chosen on these networks.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn


class Perceptron(nn.Module):
    """Classify images with three dense layers."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        del train
        x = x.reshape(len(x), -1)
        for width in (256, 128):
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(10)(x)


class Convolutions(nn.Module):
    """Classify images with two convolutions and two dense layers.

    If `norm` is set, a batch norm follows each convolution.
    """

    norm: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        for width in (16, 32):
            x = nn.Conv(width, (3, 3), use_bias=not self.norm)(x)
            if self.norm:
                x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
            x = nn.max_pool(nn.relu(x), (2, 2), (2, 2))
        x = nn.relu(nn.Dense(64)(x.reshape(len(x), -1)))
        return nn.Dense(10)(x)


class Rows(nn.Module):
    """Classify images with a transformer whose tokens are the image rows."""

    width: int = 64
    depth: int = 2

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        del train
        x = nn.Dense(self.width)(x[..., 0])
        x = x + self.param("positions", nn.initializers.normal(0.02), x.shape[1:])
        for _ in range(self.depth):
            x = x + nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(x))
            x = x + nn.Dense(self.width)(nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x))))
        return nn.Dense(10)(nn.LayerNorm()(x).mean(1))


class Recurrent(nn.Module):
    """Classify images with a GRU over the image rows."""

    width: int = 96

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        del train
        outputs: Any = nn.RNN(nn.GRUCell(self.width))(x[..., 0])
        return nn.Dense(10)(jnp.tanh(outputs[:, -1]))


FASHION: dict[str, nn.Module] = {
    "fashion: perceptron": Perceptron(),
    "fashion: convolutions": Convolutions(),
    "fashion: batch norm": Convolutions(norm=True),
    "fashion: transformer over rows": Rows(),
    "fashion: GRU over rows": Recurrent(),
}
