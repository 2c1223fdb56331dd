"""Define a causal transformer in plain jax.numpy.

It uses stacked weights under `lax.scan`, `jax.checkpoint` and bfloat16 computation.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import kfac

Params = dict[str, Any]

PROJECTIONS = "queries", "keys", "values"


@dataclasses.dataclass(frozen=True)
class Transformer:
    """Hold the network's sizes and computation type. The parameters are always float32."""

    vocabulary: int
    context: int = 64
    width: int = 64
    layers: int = 2
    heads: int = 2
    dtype: str = "bfloat16"
    tied: bool = False  # whether the head uses the token table as its kernel, and has no bias
    fused: bool = True  # whether queries, keys and values have a single kernel
    rotary: bool = False  # whether positions rotate queries and keys (arXiv:2104.09864), and have no table

    def init(self, key: jax.Array) -> Params:
        """Return initial parameters. Kernels have variance 1 / d_in.

        The kernels that write to the residual stream start smaller, depending on their number.
        """
        d, k = self.width, self.layers
        keys = iter(jax.random.split(key, 7))

        def dense(*shape: int, scale: float = 1.0) -> Params:
            kernel = jax.random.normal(next(keys), shape) * scale * shape[-2] ** -0.5
            return {"kernel": kernel, "bias": jnp.zeros((*shape[:-2], shape[-1]))}

        def norm(*shape: int) -> Params:
            return {"scale": jnp.ones(shape), "shift": jnp.zeros(shape)}

        def projections() -> dict[str, Params]:
            fused = dense(k, d, 3 * d)
            if self.fused:
                return {"queries_keys_values": fused}
            parts = [jnp.split(fused[leaf], 3, axis=-1) for leaf in ("kernel", "bias")]
            return {name: {"kernel": x, "bias": b} for name, x, b in zip(PROJECTIONS, *parts, strict=True)}

        residual = (2 * k) ** -0.5
        tables = {"tokens": jax.random.normal(next(keys), (self.vocabulary, d))}
        if not self.rotary:
            tables["positions"] = 0.1 * jax.random.normal(next(keys), (self.context, d))
        params = tables | {
            "blocks": {
                "norm_attention": norm(k, d),
                **projections(),
                "attention": dense(k, d, d, scale=residual),
                "norm_mlp": norm(k, d),
                "up": dense(k, d, 4 * d),
                "down": dense(k, 4 * d, d, scale=residual),
            },
            "norm": norm(d),
        }
        return params if self.tied else params | {"head": dense(d, self.vocabulary)}

    def logits(self, params: Params, tokens: jax.Array) -> jax.Array:
        """Return float32 logits of each next token: `[batch, time, vocabulary]` from `[batch, time]`."""
        dtype = jnp.dtype(self.dtype)
        batch, time = tokens.shape
        causal = jnp.tril(jnp.ones((time, time), bool))

        def dense(layer: Params, x: jax.Array) -> jax.Array:
            return x.astype(dtype) @ layer["kernel"].astype(dtype) + layer["bias"].astype(dtype)

        def norm(layer: Params, x: jax.Array) -> jax.Array:
            x = x.astype(jnp.float32)
            x = x - x.mean(-1, keepdims=True)
            x = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)
            return x * layer["scale"] + layer["shift"]

        @jax.checkpoint
        def block(x: jax.Array, layer: Params) -> tuple[jax.Array, None]:
            normed = norm(layer["norm_attention"], x)
            names = ("queries_keys_values",) if self.fused else PROJECTIONS
            qkv = jnp.concatenate([dense(layer[name], normed) for name in names], axis=-1)
            q, k, v = jnp.moveaxis(qkv.reshape(batch, time, 3, self.heads, -1), 2, 0)
            if self.rotary:
                q, k = rotated(q), rotated(k)
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) * q.shape[-1] ** -0.5
            weights = jax.nn.softmax(jnp.where(causal, scores, -1e30)).astype(dtype)
            mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(batch, time, -1)
            x = x + dense(layer["attention"], mixed)
            x = x + dense(layer["down"], jax.nn.relu(dense(layer["up"], norm(layer["norm_mlp"], x))))
            return x, None

        x = params["tokens"][tokens]
        if not self.rotary:
            x = x + params["positions"][:time]
        x, _ = lax.scan(block, x.astype(dtype), params["blocks"])
        x = norm(params["norm"], x)
        if self.tied:
            return (x.astype(dtype) @ params["tokens"].T.astype(dtype)).astype(jnp.float32)
        return dense(params["head"], x).astype(jnp.float32)

    def loss(self, params: Params, tokens: jax.Array) -> jax.Array:
        """Return the mean of `-log p` over tokens, in nats. `tokens` has shape `[batch, context + 1]`."""
        logits = kfac.mark_output(self.logits(params, tokens[:, :-1]), "categorical")
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1)
        return -jnp.mean(chosen)


def rotated(x: jax.Array) -> jax.Array:
    """Rotate pairs of entries of `[batch, time, heads, entries]` by angles that grow with the position.

    The product of a query and a key then depends only on the distance between their positions. Entry `i` forms a pair
    with entry `i + entries / 2`, and turns by `10000^(-2 i / entries)` per position.
    """
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None, None] * 10000.0 ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)
    return turned.astype(x.dtype)
