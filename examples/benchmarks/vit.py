"""Define a vision transformer in flax linen for measurements, with float32 parameters and any compute dtype."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn


class ViT(nn.Module):
    """A vision transformer (Dosovitskiy et al. 2021).

    Positions are fixed, and the head takes the mean over tokens, as in Beyer et al. 2022. `train` and `axis_name` have
    no effect. They match the interface of the residual networks.
    """

    num_classes: int
    width: int
    depth: int
    heads: int
    patch: int = 16
    dtype: Any = jnp.float32
    axis_name: str | None = None

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        del train
        wide = jnp.promote_types(self.dtype, jnp.float32)
        norm = partial(nn.LayerNorm, dtype=self.dtype, param_dtype=wide)
        dense = partial(nn.Dense, dtype=self.dtype, param_dtype=wide)
        size = (self.patch, self.patch)
        x = nn.Conv(self.width, size, size, padding="VALID", dtype=self.dtype, param_dtype=wide, name="patches")(x)
        n, height, width, _ = x.shape
        x = x.reshape(n, height * width, self.width) + sincos(height, width, self.width).astype(self.dtype)
        for i in range(self.depth):
            y = norm(name=f"block{i + 1}_norm1")(x)
            q, k, v = (dense(self.width, name=f"block{i + 1}_{name}")(y) for name in ("query", "key", "value"))
            q, k, v = (part.reshape(n, -1, self.heads, self.width // self.heads) for part in (q, k, v))
            y = jax.nn.dot_product_attention(q, k, v).reshape(x.shape)
            x = x + dense(self.width, name=f"block{i + 1}_out")(y)
            y = nn.gelu(dense(4 * self.width, name=f"block{i + 1}_up")(norm(name=f"block{i + 1}_norm2")(x)))
            x = x + dense(self.width, name=f"block{i + 1}_down")(y)
        x = jnp.mean(norm(name="norm")(x), axis=1)
        return dense(self.num_classes, kernel_init=nn.initializers.normal(0.01), name="head")(x).astype(wide)


def sincos(height: int, width: int, channels: int) -> jax.Array:
    """Return sines and cosines of both coordinates for each patch."""
    frequency = 1 / 10_000 ** (jnp.arange(channels // 4) / (channels // 4 - 1))
    y, x = (axis.ravel()[:, None] * frequency for axis in jnp.mgrid[:height, :width])
    return jnp.concatenate([jnp.sin(x), jnp.cos(x), jnp.sin(y), jnp.cos(y)], 1)


def vit_b16(num_classes: int, dtype: Any) -> ViT:
    return ViT(num_classes, width=768, depth=12, heads=12, dtype=dtype)
