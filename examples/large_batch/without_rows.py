"""Compare K-FAC with AdamW and Muon on networks whose kernels have no exact rows.

    python examples/large_batch/without_rows.py                # three seeds, about ten minutes on two cores
    python examples/large_batch/without_rows.py --seeds 1 --networks "weight norm"

Instead of rows, K-FAC uses the gradient's own factors. The small networks train on scikit-learn's digits for 60 steps
at batch size N/10. K-FAC skips no parameter, and sets only the rate. For each method, the script prints the result with
the best rate. The result is the mean of the last five training losses, averaged over the seeds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import kfac
from methods import schedule

STEPS, BATCH, WIDTH = 60, 180, 64
RATES = {
    "kfac": (0.02, 0.05, 0.1, 0.2),
    "adamw": (0.003, 0.01, 0.03, 0.1),
    "muon": (0.02, 0.05, 0.1, 0.2),
}

Params = dict[str, Any]


def normal(key: jax.Array, *shape: int) -> jax.Array:
    return jax.random.normal(key, shape) / np.prod(shape[:-1]) ** 0.5


def tree(key: jax.Array, **shapes: tuple[int, ...]) -> Params:
    keys = jax.random.split(key, len(shapes))
    return {
        name: normal(k, *shape) if len(shape) > 1 else jnp.zeros(shape)
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def perceptron(kernel: Callable[[Params, str], jax.Array]) -> Callable[[Params, Any], jax.Array]:
    """Return the loss of a network with two hidden layers, whose kernels come from `kernel`."""

    def loss(p: Params, batch: Any) -> jax.Array:
        x = batch["image"].reshape(-1, 64)
        for k in range(3):
            x = x @ kernel(p, f"w{k}") + p[f"b{k}"]
            x = jax.nn.relu(x) if k < 2 else x
        return cross_entropy(x, batch["label"])

    return loss


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


SIZES = (64, WIDTH), (WIDTH, WIDTH), (WIDTH, 10)
PLAIN = {f"w{k}": size for k, size in enumerate(SIZES)} | {f"b{k}": size[1:] for k, size in enumerate(SIZES)}


class Network(NamedTuple):
    init: Callable[[jax.Array], Params]
    loss: Callable[[Params, Any], jax.Array]


def weight_norm() -> Network:
    """Return a network with a direction and a length for each output (Salimans & Kingma 2016)."""

    def init(key: jax.Array) -> Params:
        params = tree(key, **PLAIN)
        return params | {f"g{k}": jnp.linalg.norm(params[f"w{k}"], axis=0) for k in range(3)}

    def kernel(p: Params, name: str) -> jax.Array:
        return p[name] * (p[name.replace("w", "g")] / jnp.linalg.norm(p[name], axis=0))

    return Network(init, perceptron(kernel))


def spectral_norm() -> Network:
    """Return a network with a learned gain whose kernels are divided by their largest singular value.

    The singular value is an estimate (Miyato et al. 2018).
    """

    def init(key: jax.Array) -> Params:
        return tree(key, **PLAIN) | {"gain": jnp.full((), 3.0)}

    def kernel(p: Params, name: str) -> jax.Array:
        w = p[name]
        u = jnp.ones(w.shape[1]) / w.shape[1] ** 0.5
        for _ in range(3):
            v = jax.lax.stop_gradient(w @ u)
            v = v / jnp.linalg.norm(v)
            u = jax.lax.stop_gradient(v @ w)
            u = u / jnp.linalg.norm(u)
        return p["gain"] * w / (v @ w @ u)

    return Network(init, perceptron(kernel))


def standardised() -> Network:
    """Return convolutions whose kernels have zero mean and unit variance for each output (Qiao et al. 2019)."""

    def init(key: jax.Array) -> Params:
        kernels = {"c0": (3, 3, 1, 16), "c1": (3, 3, 16, 16), "c2": (3, 3, 16, 32), "w": (32, 10)}
        return tree(key, **kernels, b0=(16,), b1=(16,), b2=(32,))

    def loss(p: Params, batch: Any) -> jax.Array:
        x = batch["image"][..., None]
        for k in range(3):
            w = p[f"c{k}"]
            w = w - w.mean((0, 1, 2), keepdims=True)
            w = w / (w.std((0, 1, 2), keepdims=True) * np.prod(w.shape[:3]) ** 0.5 + 1e-5)
            x = jax.lax.conv_general_dilated(
                x, w, (1 + (k > 0),) * 2, "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = 1.4 * jax.nn.relu(x + p[f"b{k}"])
        return cross_entropy(x.mean((1, 2)) @ p["w"], batch["label"])

    return Network(init, loss)


def adapters() -> Network:
    """Return a network whose kernels are frozen, with low-rank adapters (Hu et al. 2021).

    The adapters have rank 8, and are added to the kernels before use.
    """
    frozen = tree(jax.random.key(100), **PLAIN)

    def init(key: jax.Array) -> Params:
        shapes: dict[str, tuple[int, ...]] = {f"a{k}": (size[0], 8) for k, size in enumerate(SIZES)}
        shapes |= {f"b{k}": size[1:] for k, size in enumerate(SIZES)}
        return tree(key, **shapes) | {f"z{k}": jnp.zeros((8, size[1])) for k, size in enumerate(SIZES)}

    def kernel(p: Params, name: str) -> jax.Array:
        return frozen[name] + p[name.replace("w", "a")] @ p[name.replace("w", "z")]

    return Network(init, perceptron(kernel))


def quantised() -> Network:
    """Return a network whose kernels are rounded to 15 values.

    The step between values is learned, and the gradient passes straight through the rounding.
    """

    def init(key: jax.Array) -> Params:
        return tree(key, **PLAIN) | {f"s{k}": jnp.zeros(()) for k in range(3)}

    def kernel(p: Params, name: str) -> jax.Array:
        step = 0.1 * jnp.exp(p[name.replace("w", "s")])
        scaled = jnp.clip(p[name] / step, -7, 7)
        return step * (scaled + jax.lax.stop_gradient(jnp.round(scaled) - scaled))

    return Network(init, perceptron(kernel))


def hypernetwork() -> Network:
    """Return a network whose kernels come from a small hypernetwork (Ha et al. 2016).

    The hypernetwork computes each layer's kernel from a learned code.
    """
    rank = 16

    def init(key: jax.Array) -> Params:
        params = tree(key, codes=(3, rank), first=(rank, 32), bias=(32,), rows=(32, 64 * 8), columns=(32, 8 * 64))
        return params | {f"b{k}": jnp.zeros(size[1:]) for k, size in enumerate(SIZES)}

    def kernel(p: Params, name: str) -> jax.Array:
        k = int(name[1:])
        h = jnp.tanh(4 * p["codes"][k] @ p["first"] + p["bias"])
        rows, columns = (h @ p["rows"]).reshape(64, 8), (h @ p["columns"]).reshape(8, 64)
        return rows[: SIZES[k][0]] @ columns[:, : SIZES[k][1]] / 4

    return Network(init, perceptron(kernel))


NETWORKS = {
    "weight norm": weight_norm(),
    "spectral norm": spectral_norm(),
    "weight-standardised convolutions": standardised(),
    "low-rank adapters": adapters(),
    "fake quantisation": quantised(),
    "hypernetwork": hypernetwork(),
}


def optimizer(method: str, rate: float, layers: kfac.Layers | None) -> Any:
    rates = schedule(rate, STEPS)
    if method == "kfac":
        assert layers is not None
        return kfac.kfac(rates, layers)
    if method == "adamw":
        return optax.adamw(rates, b2=0.99, weight_decay=0.0)

    def dimensions(params: Any) -> Any:
        return jax.tree.map(
            lambda x: optax.contrib.MuonDimensionNumbers(tuple(range(x.ndim - 1)), x.ndim - 1) if x.ndim > 1 else None,
            params,
        )

    return optax.contrib.muon(
        rates, beta=0.9, nesterov=True, adam_b2=0.95, adam_learning_rate=lambda count: 0.3 * rates(count),
        muon_weight_dimension_numbers=dimensions,
    )  # fmt: skip


def trained(init: Callable[..., Any], loss_fn: Callable[..., Any], make: Callable[..., Any], seed: int) -> np.ndarray:
    """Train on digits and return the loss of each step.

    `make(params, batch)` returns the layers and the optimizer. The layers are None except for K-FAC.
    """
    images, labels = load_digits(return_X_y=True)
    data = {"image": (images / 16).reshape(-1, 8, 8).astype(np.float32), "label": labels.astype(np.int32)}
    params, rng = init(jax.random.key(seed)), np.random.default_rng(seed)
    batches = [{k: x[rows] for k, x in data.items()} for rows in (rng.permutation(1797)[:BATCH] for _ in range(STEPS))]
    layers, tx = make(params, batches[0])

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        if layers is None:
            loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        else:
            loss, grads, factors = kfac.value_and_grad(loss_fn, layers)(params, batch)
            state = kfac.observe(state, factors)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    state, losses = tx.init(params), []
    for batch in batches:
        params, state, loss = step(params, state, batch)
        losses.append(float(loss))
    return np.array(losses)


def train(network: Network, method: str, rate: float, seed: int) -> float:
    """Train, and return the mean of the last five training losses."""

    def make(params: Any, batch: Any) -> Any:
        layers = kfac.find_layers(network.loss, params, batch) if method == "kfac" else None
        return layers, optimizer(method, rate, layers)

    return float(np.mean(trained(network.init, network.loss, make, seed)[-5:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--networks", nargs="*", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--methods", nargs="*", default=list(RATES), choices=list(RATES))
    options = parser.parse_args()
    for name in options.networks:
        network, cells = NETWORKS[name], []
        for method in options.methods:
            seeds = range(options.seeds)
            found = {rate: [train(network, method, rate, seed) for seed in seeds] for rate in RATES[method]}
            best = min(found, key=lambda rate: np.nan_to_num(np.mean(found[rate]), nan=np.inf))
            spread = f" +- {np.std(found[best], ddof=1):.4f}" if options.seeds > 1 else ""
            cells.append(f"{method} {np.mean(found[best]):.4f}{spread} ({best})")
        print(f"{name}: " + ", ".join(cells), flush=True)


if __name__ == "__main__":
    main()
