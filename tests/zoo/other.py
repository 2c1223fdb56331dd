"""Plain models of all sorts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from zoo.specimens import cross_entropy, data, specimen, tokens, tree


@specimen("multilayer perceptron", "`x @ w + b` in bare jax.numpy")
def perceptron():
    def loss(p, b):
        h = jnp.tanh(b["x"] @ p["in"]["w"] + p["in"]["b"])
        return cross_entropy(h @ p["out"]["w"] + p["out"]["b"], b["y"])

    params = tree(**{"in": {"w": (5, 8), "b": (8,)}, "out": {"w": (8, 3), "b": (3,)}})
    return loss, params, {"x": data(0, 5), "y": tokens(0, below=3)}
