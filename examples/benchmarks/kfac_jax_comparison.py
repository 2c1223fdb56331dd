"""Compare kfac with kfac-jax on three small networks: detected layers, final loss and seconds per step.

    pip install git+https://github.com/google-deepmind/kfac-jax
    python examples/benchmarks/kfac_jax_comparison.py

kfac-jax is not a dependency. Its current PyPI release does not run on the current JAX, so install it from source.

The data are scikit-learn's handwritten digits: 1,500 for training, the other 297 for testing. All runs use the same
batches with 500 images. Both optimizers choose from the same learning rates and dampings, and the script prints the run
with the lowest training loss. In addition, kfac-jax runs as its authors recommend, with learning rate, momentum and
damping from its quadratic model.
"""

from __future__ import annotations

import argparse
import collections
import functools
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import kfac

RATES, DAMPINGS = (0.03, 0.1, 0.3, 1.0), (1e-3, 1e-2)


def initial(shapes: dict[str, tuple[int, ...]]) -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    scale = {name: np.prod(shape[:-1]) ** -0.5 if len(shape) > 1 else 0.0 for name, shape in shapes.items()}
    return {name: jnp.asarray(rng.normal(size=shape) * scale[name], jnp.float32) for name, shape in shapes.items()}


def mlp(p, x):
    x = jnp.tanh(x @ p["w1"] + p["b1"])
    x = jnp.tanh(x @ p["w2"] + p["b2"])
    return x @ p["w3"] + p["b3"]


def cnn(p, x):
    x = x.reshape(-1, 8, 8, 1)
    for k, stride in ((1, 1), (2, 2)):
        x = jax.lax.conv_general_dilated(
            x, p[f"k{k}"], (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jax.nn.relu(x + p[f"b{k}"])
    return x.mean((1, 2)) @ p["w"] + p["b"]


def attention(p, x):
    """Return the logits of an attention block whose tokens are an image's rows."""
    x = x.reshape(-1, 8, 8) @ p["embed"] + p["position"]
    q, k, v = (jnp.einsum("ntd,dhe->nthe", x, p[name]) for name in "qkv")
    weights = jax.nn.softmax(jnp.einsum("nthe,nshe->nhts", q, k) / q.shape[-1] ** 0.5)
    x = x + jnp.einsum("nhts,nshe,hed->ntd", weights, v, p["o"])
    x = x + jax.nn.gelu(x @ p["up"]) @ p["down"]
    return x.mean(1) @ p["head"] + p["bias"]


NETWORKS: dict[str, tuple[Callable, dict[str, tuple[int, ...]]]] = {
    "MLP": (mlp, {"w1": (64, 64), "b1": (64,), "w2": (64, 64), "b2": (64,), "w3": (64, 10), "b3": (10,)}),
    "CNN": (cnn, {"k1": (3, 3, 1, 16), "b1": (16,), "k2": (3, 3, 16, 32), "b2": (32,), "w": (32, 10), "b": (10,)}),
    "attention": (
        attention,
        {
            "embed": (8, 32),
            "position": (8, 32),
            **{name: (32, 4, 8) for name in "qkv"},
            "o": (4, 8, 32),
            "up": (32, 64),
            "down": (64, 32),
            "head": (32, 10),
            "bias": (10,),
        },
    ),
}


def batches(steps: int) -> Iterator[tuple[jax.Array, jax.Array]]:
    images, labels = load_digits(return_X_y=True)
    images, labels, rng = (images[:1500] / 16).astype(np.float32), labels[:1500], np.random.default_rng(0)
    rows = itertools.chain.from_iterable(rng.permutation(1500).reshape(3, 500) for _ in itertools.count())
    for _, own in zip(range(steps), rows, strict=False):
        yield jnp.asarray(images[own]), jnp.asarray(labels[own])


def loss_fn(network: Callable, mark: Callable, params: Any, batch: Any) -> jax.Array:
    logits = mark(network(params, batch[0]), batch[1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()


def ours(network, params, steps, rate, damping) -> tuple[Any, list[float], dict[str, int]]:
    loss = functools.partial(loss_fn, network, lambda logits, labels: kfac.mark_output(logits, "categorical"))
    layers = kfac.find_layers(loss, params, next(batches(1)))
    tx = kfac.natural_gradient(
        optax.linear_schedule(rate, 0, steps), layers, momentum=0.9, nesterov=True, lr_in_momentum=False,
        damping=damping, factor_ema_decay=0.95, unitwise_damping_scale=1.0,
    )  # fmt: skip
    measure = kfac.value_and_grad(loss, layers, fisher="sampled")

    @jax.jit
    def step(params, state, batch, key):
        _, grads, factors = measure(params, batch, fisher_key=key)
        updates, state = tx.update(grads, kfac.observe(state, factors), params)
        return optax.apply_updates(params, updates), state

    state, seconds = tx.init(params), []
    for k, batch in enumerate(batches(steps)):
        start = time.perf_counter()
        params, state = jax.block_until_ready(step(params, state, batch, jax.random.key(k)))
        seconds.append(time.perf_counter() - start)
    return params, seconds, dict(collections.Counter(layer.kind for layer in layers))


def theirs(network, params, steps, rate, damping) -> tuple[Any, list[float], dict[str, int]]:
    """Train with kfac-jax. If `rate` is None, kfac-jax chooses learning rate, momentum and damping."""
    import kfac_jax

    def mark(logits, labels):
        kfac_jax.register_softmax_cross_entropy_loss(logits, labels)
        return logits

    own = rate is None
    optimizer = kfac_jax.Optimizer(
        jax.value_and_grad(functools.partial(loss_fn, network, mark)),
        l2_reg=0.0,
        num_burnin_steps=0,
        use_adaptive_learning_rate=own,
        use_adaptive_momentum=own,
        use_adaptive_damping=own,
        learning_rate_schedule=None if own else (lambda k: rate * (1 - k / steps)),
        momentum_schedule=None if own else (lambda k: 0.9),
        damping_schedule=None if own else (lambda k: damping),
        initial_damping=1.0 if own else None,
    )
    params = jax.tree.map(jnp.copy, params)  # kfac-jax donates its arguments
    state, seconds = optimizer.init(params, jax.random.key(0), next(batches(1))), []
    kinds = collections.Counter(type(block).__name__ for block in optimizer._estimator.blocks)
    for k, batch in enumerate(batches(steps)):
        start = time.perf_counter()
        params, state, _ = optimizer.step(params, state, jax.random.key(k), batch=batch, global_step_int=k)
        jax.block_until_ready(params)
        seconds.append(time.perf_counter() - start)
    return params, seconds, dict(kinds)


def compare(name: str, steps: int) -> list[dict[str, Any]]:
    network, shapes = NETWORKS[name]
    params, rows = initial(shapes), []
    images, labels = load_digits(return_X_y=True)
    train = jnp.asarray(images[:1500] / 16, jnp.float32), jnp.asarray(labels[:1500])
    test = jnp.asarray(images[1500:] / 16, jnp.float32), labels[1500:]
    tuned: list[tuple[Any, Any]] = list(itertools.product(RATES, DAMPINGS))
    methods = ("kfac", ours, tuned), ("kfac-jax", theirs, tuned), ("kfac-jax, own rates", theirs, [(None, None)])
    for method, run, trials in methods:
        results: list[dict[str, Any]] = []
        for rate, damping in trials:
            end, seconds, kinds = run(network, params, steps, rate, damping)
            loss = float(loss_fn(network, lambda logits, labels: logits, end, train))
            accuracy = float((network(end, test[0]).argmax(-1) == test[1]).mean())
            loss = loss if np.isfinite(loss) else float("inf")
            step = statistics.median(seconds[steps // 2 :])
            row = {"rate": rate, "damping": damping, "loss": loss, "test": accuracy, "first": seconds[0], "step": step}
            results.append(row)
        best = min(results, key=lambda row: row["loss"])
        rows.append({"network": name, "method": method, "layers": kinds, **best})
        print(
            f"{name:9} {method:19} loss {best['loss']:.5f}  test {best['test']:.1%}  {1e3 * best['step']:6.1f} ms, "
            f"first {best['first']:.1f} s  rate {best['rate']}  damping {best['damping']}  {kinds}",
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="steps per run")
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--json", help="write the rows to this file as well")
    options = parser.parse_args()
    rows = [row for name in options.networks for row in compare(name, options.steps)]
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
