"""Compare learning rates for fine-tuning a digit classifier on a few noisy digits.

    python examples/adoptions/fine_tuning.py

A 64-64-64-10 perceptron is trained with K-FAC at rate 0.1 on 1,536 digits, for 60 steps at batch 256. K-FAC or AdamW
then fine-tunes it on 128 or 512 of these digits with added noise, for 24 steps at batch 64. The script prints the loss
on noisy held-out digits in nats, before and after fine-tuning, for three seeds. It takes a few minutes on two cores.
"""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import kfac

RATES = {"kfac": (0.1, 0.05, 0.02, 0.01, 0.005, 0.002), "adamw": (0.01, 0.003, 0.001, 0.0003)}
STEPS, BATCH, SEEDS = 24, 64, 3
SIZES = (64, 64, 64, 10)


def init(seed: int) -> list[dict[str, jax.Array]]:
    keys = jax.random.split(jax.random.key(seed), len(SIZES) - 1)
    return [
        {"kernel": jax.random.normal(key, (rows, columns)) / 8, "bias": jnp.zeros(columns)}
        for key, rows, columns in zip(keys, SIZES, SIZES[1:], strict=False)
    ]


def loss_fn(params: list[dict[str, jax.Array]], batch: tuple[Any, Any]) -> jax.Array:
    x, labels = batch
    for layer in params[:-1]:
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
    logits = x @ params[-1]["kernel"] + params[-1]["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def noisy(images: np.ndarray, seed: int) -> np.ndarray:
    noise = 0.3 * np.random.default_rng(seed).standard_normal(images.shape)
    return np.clip(images + noise, 0, 1).astype(np.float32)


def batches(data: tuple[np.ndarray, np.ndarray], size: int, steps: int, seed: int) -> list[tuple[Any, Any]]:
    order = np.random.default_rng(seed)
    found: list[tuple[Any, Any]] = []
    while len(found) < steps:
        for rows in order.permutation(len(data[0])).reshape(-1, size):
            found.append((data[0][rows], data[1][rows]))
    return found[:steps]


class Trainer:
    """A method at a given rate. All seeds share its compiled programs."""

    def __init__(self, method: str, rate: float, size: int, steps: int):
        schedule = kfac.schedules.warmup_linear_decay(rate, steps)
        example = np.zeros((size, 64), np.float32), np.zeros(size, np.int32)
        layers = kfac.find_layers(loss_fn, init(0), example)
        self.observes = method == "kfac"
        self.tx = kfac.kfac(schedule, layers) if self.observes else optax.adamw(schedule)

        @jax.jit
        def observe(state, params, batch):
            return kfac.observe(state, kfac.statistics(loss_fn, layers, fraction=1 / 4)(params, batch))

        @jax.jit
        def step(params, state, batch):
            grads = jax.grad(loss_fn)(params, batch)
            updates, state = self.tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        self.observe, self.step = observe, step

    def train(self, params: Any, data: list[tuple[Any, Any]]) -> Any:
        state = self.tx.init(params)
        for batch in data:
            if self.observes and kfac.statistics_due(state):
                state = self.observe(state, params, batch)
            params, state = self.step(params, state, batch)
        return params


def main() -> None:
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    images, held, labels, held_labels = train_test_split(images, labels, train_size=1536, random_state=0)
    first = Trainer("kfac", 0.1, 256, 60)
    trained = [first.train(init(seed), batches((images, labels), 256, 60, seed)) for seed in range(SEEDS)]
    new, test = noisy(images, 1), (noisy(held, 2), held_labels)
    before = [float(loss_fn(params, test)) for params in trained]
    print("| method, rate | examples | held-out loss, three seeds | mean |\n|---|---|---|---|")
    print(row("before", 0, before))
    for count in (128, 512):
        for method, rates in RATES.items():
            for rate in rates:
                trainer = Trainer(method, rate, BATCH, STEPS)
                losses = []
                for seed, params in enumerate(trained):
                    data = batches((new[:count], labels[:count]), BATCH, STEPS, seed)
                    losses.append(float(loss_fn(trainer.train(params, data), test)))
                print(row(f"{method}, {rate}", count, losses), flush=True)


def row(name: str, count: int, losses: list[float]) -> str:
    return f"| {name} | {count} | {', '.join(f'{x:.3f}' for x in losses)} | {np.mean(losses):.3f} |"


if __name__ == "__main__":
    main()
