"""Train a network for handwritten digits with flax's own training steps and K-FAC.

    python examples/trainers/flax_fit.py linen                  # flax.training.train_state.TrainState
    python examples/trainers/flax_fit.py nnx                    # flax.nnx.Optimizer
    python examples/trainers/flax_fit.py nnx --method adamw

Both training steps are those of flax's documentation. The optimizer is their only difference between K-FAC and AdamW.
K-FAC adds the function `observe` and two lines in the loop. The network has batch norm and dropout.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training import train_state
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import kfac

Batch = tuple[Any, Any]
RATES = {"kfac": 0.1, "adamw": 0.03}
FRACTION = 1 / 4  # the share of examples that statistics use


def digits() -> tuple[Batch, Batch]:
    """Return training images `[1437, 64]` with their labels, and test images with theirs."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    x, x_test, y, y_test = train_test_split(images, labels, test_size=0.2, random_state=0)
    return (x, y), (x_test, y_test)


def batches(data: Batch, steps: int, seed: int, size: int = 256) -> Iterator[Batch]:
    """Yield a random batch for each step."""
    random = np.random.default_rng(seed)
    for _ in range(steps):
        rows = random.choice(len(data[0]), size, replace=False)
        yield data[0][rows], data[1][rows]


def optimizer(method: str, rate: float, steps: int, layers: Any) -> optax.GradientTransformation:
    """Return K-FAC, or AdamW, with the same schedule."""
    schedule = kfac.schedules.warmup_linear_decay(rate, steps)
    if method == "adamw":
        return optax.adamw(schedule)
    return kfac.kfac(schedule, layers)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


# -- flax linen --------------------------------------------------------------------------------------------------------


class Linen(nn.Module):
    """Classify digits with two hidden layers."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        for _ in range(2):
            x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(nn.Dense(64, use_bias=False)(x))
            x = nn.Dropout(0.1, deterministic=not train)(nn.relu(x))
        return nn.Dense(10)(x)


class TrainState(train_state.TrainState):
    """flax's state, with batch norm's averages and a key for dropout, as in flax's documentation."""

    batch_stats: Any
    key: jax.Array


def linen_loss(params: Any, batch_stats: Any, key: jax.Array, batch: Batch) -> tuple[jax.Array, Any]:
    """Return the loss and the new averages of batch norm."""
    variables = {"params": params, "batch_stats": batch_stats}
    logits, new = Linen().apply(variables, batch[0], True, rngs={"dropout": key}, mutable=["batch_stats"])
    return cross_entropy(logits, batch[1]), new["batch_stats"]


def fit_linen(method: str, rate: float, steps: int, seed: int) -> tuple[float, list[float]]:
    """Train with `TrainState`. Return the test accuracy and the loss of each step."""
    train, test = digits()
    init_key, key = jax.random.split(jax.random.key(seed))
    variables = Linen().init(init_key, train[0][:1], False)
    params, batch_stats = variables["params"], variables["batch_stats"]
    example = next(batches(train, 1, seed))
    layers = kfac.find_layers(linen_loss, params, batch_stats, key, example, has_aux=True, batch_argnums=3)
    tx = optimizer(method, rate, steps, layers)
    state = TrainState.create(apply_fn=Linen().apply, params=params, tx=tx, batch_stats=batch_stats, key=key)

    @jax.jit
    def observe(state: TrainState, batch: Batch) -> TrainState:
        statistics = kfac.statistics(linen_loss, layers, fraction=FRACTION, has_aux=True)
        key = jax.random.fold_in(state.key, state.step)
        return kfac.observe(state, statistics(state.params, state.batch_stats, key, batch))

    @jax.jit
    def step(state: TrainState, batch: Batch) -> tuple[TrainState, jax.Array]:
        key = jax.random.fold_in(state.key, state.step)
        grad_fn = jax.value_and_grad(linen_loss, has_aux=True)
        (loss, batch_stats), grads = grad_fn(state.params, state.batch_stats, key, batch)
        return state.apply_gradients(grads=grads, batch_stats=batch_stats), loss

    losses = []
    for batch in batches(train, steps, seed):
        if method == "kfac" and kfac.statistics_due(state):
            state = observe(state, batch)
        state, loss = step(state, batch)
        losses.append(float(loss))
    logits = state.apply_fn({"params": state.params, "batch_stats": state.batch_stats}, test[0], False)
    return float((logits.argmax(-1) == test[1]).mean()), losses


# -- flax nnx ----------------------------------------------------------------------------------------------------------


class Nnx(nnx.Module):
    """Classify digits with two hidden layers."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.List([nnx.Linear(64, 64, use_bias=False, rngs=rngs) for _ in range(2)])
        self.norms = nnx.List([nnx.BatchNorm(64, momentum=0.9, rngs=rngs) for _ in range(2)])
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.output = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for hidden, norm in zip(self.hidden, self.norms, strict=True):
            x = self.dropout(nnx.relu(norm(hidden(x))))
        return self.output(x)


def fit_nnx(method: str, rate: float, steps: int, seed: int) -> tuple[float, list[float]]:
    """Train with `nnx.Optimizer`. Return the test accuracy and the loss of each step."""
    train, test = digits()
    model = Nnx(nnx.Rngs(seed))
    graph, params, rest = nnx.split(model, nnx.Param, ...)  # type: ignore[misc]

    def pure_loss(params: Any, rest: Any, batch: Batch) -> jax.Array:
        return cross_entropy(nnx.merge(graph, params, rest)(batch[0]), batch[1])

    example = next(batches(train, 1, seed))
    layers = kfac.find_layers(pure_loss, params, rest, example, batch_argnums=2)
    trainer = nnx.Optimizer(model, optimizer(method, rate, steps, layers), wrt=nnx.Param)

    @nnx.jit
    def observe(model: Nnx, trainer: nnx.Optimizer, batch: Batch) -> None:
        _, params, rest = nnx.split(model, nnx.Param, ...)  # type: ignore[misc]
        statistics = kfac.statistics(pure_loss, layers, fraction=FRACTION)
        trainer.opt_state = kfac.observe(trainer.opt_state, statistics(params, rest, batch))

    @nnx.jit
    def step(model: Nnx, trainer: nnx.Optimizer, batch: Batch) -> jax.Array:
        loss, grads = nnx.value_and_grad(lambda model: cross_entropy(model(batch[0]), batch[1]))(model)
        trainer.update(model, grads)
        return loss

    model.train()
    losses = []
    for batch in batches(train, steps, seed):
        if method == "kfac" and kfac.statistics_due(trainer.opt_state):
            observe(model, trainer, batch)
        losses.append(float(step(model, trainer, batch)))
    model.eval()
    return float((model(jnp.asarray(test[0])).argmax(-1) == test[1]).mean()), losses


FITS = {"linen": fit_linen, "nnx": fit_nnx}


def main(argv: list[str] | None = None) -> float:
    """Train, print losses and the test accuracy, and return the accuracy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", choices=FITS)
    parser.add_argument("--method", choices=RATES, default="kfac")
    parser.add_argument("--rate", type=float, help="the largest learning rate; 0.1 for kfac, 0.03 for adamw")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.steps < 1:
        parser.error("--steps must be at least 1")
    rate = RATES[args.method] if args.rate is None else args.rate
    accuracy, losses = FITS[args.library](args.method, rate, args.steps, args.seed)
    for count in range(0, args.steps, 10):
        print(f"step {count:3d}  loss {losses[count]:.4f}")
    print(f"test accuracy {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    main()
