"""Compare exact factors with gradient factors for kernels that a model transforms before use.

    python examples/benchmarks/exact_or_gradient.py            # three seeds, a few minutes

Models often concatenate, split, repeat or mask kernels before use. Depending on how they do it, the package finds no
exact factors and uses the gradient's own factors. Each network here is written so that exact factors exist. It trains
twice with the defaults: with exact factors, and with gradient factors for the transformed kernels.

Each run takes 60 steps on scikit-learn's digits, with a tenth of the data as the batch. For both kinds, the script
prints the mean training loss over the last five steps at the best rate. It also prints how many steps exact factors
need to reach the gradient factors' final loss.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / folder) for folder in ("large_batch", "imagenet")]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

import kfac  # noqa: E402
from methods import schedule  # noqa: E402
from without_rows import STEPS, cross_entropy, trained, tree  # noqa: E402

RATES = 0.03, 0.1, 0.2


class Case(NamedTuple):
    """A network, and the kernels that other models typically build without exact factors."""

    init: Callable[[jax.Array], Any]
    loss: Callable[[Any, Any], jax.Array]
    built: str  # a regular expression for the kernels' names
    masked: bool = False  # True if a mask multiplies the kernel


# -- attention over a digit's rows: a fused kernel with unequal parts, or key and value kernels repeated for heads -----

WIDTH, HEADS, GROUPS, DEPTH = 32, 4, 2, 8


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    k, v = (jnp.repeat(x, HEADS // GROUPS, axis=2) for x in (k, v))
    scores = jnp.einsum("nqhd,nkhd->nhqk", q, k) / DEPTH**0.5
    return jnp.einsum("nhqk,nkhd->nqhd", jax.nn.softmax(scores), v).reshape(*q.shape[:2], -1)


def transformer(fused: bool) -> Case:
    sizes = HEADS * DEPTH, GROUPS * DEPTH, GROUPS * DEPTH

    def init(key: jax.Array) -> Any:
        shapes: dict[str, Any] = {"in": (8, WIDTH), "positions": (8, WIDTH), "head": (WIDTH, 10), "c": (10,)}
        for k in range(2):
            parts = {"qkv": sum(sizes)} if fused else dict(zip("qkv", sizes, strict=True))
            kernels = {name: (WIDTH, size) for name, size in parts.items()}
            shapes |= {f"{name}{k}": shape for name, shape in kernels.items()}
            shapes |= {f"o{k}": (WIDTH, WIDTH), f"up{k}": (WIDTH, 64), f"down{k}": (64, WIDTH)}
        return tree(key, **shapes)

    def norm(x: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)

    def loss(p: Any, batch: Any) -> jax.Array:
        x = batch["image"] @ p["in"] + p["positions"]
        for k in range(2):
            h = norm(x)
            if fused:
                parts = jnp.split(h @ p[f"qkv{k}"], np.cumsum(sizes)[:-1], -1)
            else:
                parts = [h @ p[f"{name}{k}"] for name in "qkv"]
            x = x + attention(*(part.reshape(*part.shape[:2], -1, DEPTH) for part in parts)) @ p[f"o{k}"]
            x = x + jax.nn.gelu(norm(x) @ p[f"up{k}"]) @ p[f"down{k}"]
        return cross_entropy(jnp.mean(norm(x), 1) @ p["head"] + p["c"], batch["label"])

    return Case(init, loss, "^qkv" if fused else "^[kv][0-9]")


# -- recurrence: gate kernels that are concatenated, or split from a larger kernel into unequal parts ------------------


def lstm() -> Case:
    gates = "ifgo"

    def init(key: jax.Array) -> Any:
        shapes: dict[str, Any] = {f"x{g}": (8, WIDTH) for g in gates} | {f"h{g}": (WIDTH, WIDTH) for g in gates}
        return tree(key, **shapes, **{f"b{g}": (WIDTH,) for g in gates}, head=(WIDTH, 10), c=(10,))

    def loss(p: Any, batch: Any) -> jax.Array:
        def cell(state: Any, x: jax.Array) -> Any:
            c, h = state
            i, f, g, o = (x @ p[f"x{n}"] + h @ p[f"h{n}"] + p[f"b{n}"] for n in gates)
            c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            return (c, jax.nn.sigmoid(o) * jnp.tanh(c)), None

        start = jnp.zeros((2, len(batch["image"]), WIDTH))
        (_, h), _ = jax.lax.scan(cell, (start[0], start[1]), batch["image"].swapaxes(0, 1))
        return cross_entropy(h @ p["head"] + p["c"], batch["label"])

    return Case(init, loss, "^[xh][ifgo]")


def gru() -> Case:
    def init(key: jax.Array) -> Any:
        return tree(
            key, x=(8, 3 * WIDTH), rz=(WIDTH, 2 * WIDTH), n=(WIDTH, WIDTH), b=(3 * WIDTH,), head=(WIDTH, 10), c=(10,)
        )

    def loss(p: Any, batch: Any) -> jax.Array:
        def cell(h: jax.Array, x: jax.Array) -> Any:
            r, z, n = jnp.split(x @ p["x"] + p["b"], 3, -1)
            own_r, own_z = jnp.split(h @ p["rz"], 2, -1)
            r, z = jax.nn.sigmoid(r + own_r), jax.nn.sigmoid(z + own_z)
            return (1 - z) * jnp.tanh(n + (r * h) @ p["n"]) + z * h, None

        h, _ = jax.lax.scan(cell, jnp.zeros((len(batch["image"]), WIDTH)), batch["image"].swapaxes(0, 1))
        return cross_entropy(h @ p["head"] + p["c"], batch["label"])

    return Case(init, loss, "^(rz|n)$")


# -- a masked autoencoder for distribution estimation (Germain et al. 2015): kernels times constant masks --------------


def made() -> Case:
    degrees = [np.arange(64), np.arange(128) % 63, np.arange(128) % 63, np.arange(64)]
    masks = [(a[:, None] <= b).astype(np.float32) for a, b in itertools.pairwise(degrees[:3])]
    masks.append((degrees[2][:, None] < degrees[3]).astype(np.float32))

    def init(key: jax.Array) -> Any:
        shapes = {f"w{k}": mask.shape for k, mask in enumerate(masks)}
        return tree(key, **shapes, **{f"b{k}": mask.shape[1:] for k, mask in enumerate(masks)})

    def loss(p: Any, batch: Any) -> jax.Array:
        pixels = (batch["image"].reshape(-1, 64) > 0.5).astype(jnp.float32)
        x = pixels
        for k, mask in enumerate(masks):
            x = x @ (p[f"w{k}"] * mask) + p[f"b{k}"]
            x = jax.nn.relu(x) if k < 2 else x
        return jnp.mean(jnp.sum(optax.sigmoid_binary_cross_entropy(x, pixels), -1))

    return Case(init, loss, "^w", masked=True)


# -- constant tangents that all examples share: a network fitted to slopes ---------------------------------------------


def slopes() -> Case:
    def init(key: jax.Array) -> Any:
        return tree(key, w1=(2, 64), b1=(64,), w2=(64, 64), b2=(64,), w3=(64, 1))

    def network(p: Any, x: jax.Array) -> jax.Array:
        return (jnp.tanh(jnp.tanh(x @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"]) @ p["w3"])[..., 0]

    def loss(p: Any, batch: Any) -> jax.Array:
        x = 3 * batch["image"].reshape(-1, 64)[:, 20:22] + batch["image"].reshape(-1, 64)[:, 42:44]
        target = jax.vmap(jax.grad(lambda x: jnp.sin(2 * x[0]) * jnp.cos(x[1])))(x)
        total = jnp.zeros(len(x))
        for k in range(2):  # each example has its own copy of the tangent
            tangent = jnp.zeros_like(x).at[:, k].set(1.0)
            total += (jax.jvp(lambda x: network(p, x), (x,), (tangent,))[1] - target[:, k]) ** 2
        return jnp.mean(total)

    return Case(init, loss, "^w1")


CASES = {
    "unequal parts of a fused kernel": transformer(fused=True),
    "key and value kernels repeated": transformer(fused=False),
    "LSTM kernels put together": lstm(),
    "GRU kernels of unequal parts": gru(),
    "constant masks (MADE)": made(),
    "constant tangents (first layer)": slopes(),
}


def train(case: Case, rules: dict[str, str], rate: float, seed: int) -> np.ndarray:
    """Train a case; return the loss at each step."""

    def make(params: Any, batch: Any) -> Any:
        layers = kfac.find_layers(case.loss, params, batch, rules=rules)
        return layers, kfac.kfac(schedule(rate, STEPS), layers)

    return trained(case.init, case.loss, make, seed)


def smooth(losses: np.ndarray) -> np.ndarray:
    return np.convolve(losses, np.ones(5) / 5, "valid")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    options = parser.parse_args()
    for name in options.cases:
        case = CASES[name]
        ends: dict[str, list[np.ndarray]] = {}
        for kind, rules in (("rows", {}), ("gradient", {case.built: "gradient"})):
            runs = {rate: [train(case, rules, rate, seed) for seed in range(options.seeds)] for rate in RATES}
            best = min(RATES, key=lambda rate: np.mean([smooth(run)[-1] for run in runs[rate]]))
            ends[kind] = runs[best]
            values = [smooth(run)[-1] for run in runs[best]]
            print(f"{name}, {kind}: {np.mean(values):.4f} +- {np.std(values, ddof=1):.4f} at {best}", flush=True)
        steps = []
        for rows, own in zip(ends["rows"], ends["gradient"], strict=True):
            reached = np.flatnonzero(smooth(rows) <= smooth(own)[-1])
            steps.append((reached[0] + 5) / STEPS if len(reached) else np.nan)
        share = np.round(steps, 2)
        print(f"    exact factors reach the gradient factors' final loss after {share} of the 60 steps", flush=True)


if __name__ == "__main__":
    main()
