"""Run a trial: train a task with a method and its settings for a budget of steps."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import kfac
import methods
from adaptive_interval import AdaptiveInterval, change_of
from batches import Plan
from tasks import Task

# Settings that need a separate program. All other settings are numbers that the program takes as arguments.
STATIC = (
    "nesterov", "lr_in_momentum", "precision", "fisher", "subsample", "statistics_dtype", "rescale", "turned",
    "tangent", "batch_norm_blocks", "preconditioner",
    "momentum_first", "eigenbasis_adam", "adaptive_damping",
)  # fmt: skip
# Settings that decide, outside the programs, when to collect statistics.
OUTSIDE = ("statistics_period", "statistics_threshold")
STATISTICS_WARMUP = 10  # the number of first steps that all collect statistics


@dataclasses.dataclass(frozen=True)
class Trial:
    """Identify a trial. Trials with equal fields are the same trial and run only once."""

    task: str
    method: str
    settings: dict[str, Any]
    batch: int
    steps: int
    seed: int = 0
    eval_every: int = 5

    @property
    def key(self) -> str:
        """Return a text that is the same for equal trials."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)


class State(NamedTuple):
    params: Any
    batch_stats: Any
    opt_state: Any
    kernel_norms: Any


class Programs(NamedTuple):
    """Hold the compiled parts of a trial. `observe` takes statistics, and is None except for K-FAC."""

    init: Any
    observe: Any
    step: Any
    evaluate: Any


def normalised(task: Task, images: jax.Array) -> jax.Array:
    mean, std = jnp.asarray(task.mean), jnp.asarray(task.std)
    return (images.astype(jnp.float32) / 255 - mean) / std


@functools.lru_cache(maxsize=64)
def programs(task: Task, method: str, static: tuple[tuple[str, Any], ...], names: tuple[str, ...], batch: int):
    """Compile the programs that similar trials share. Budget, rates and other numbers are arguments."""
    fixed = dict(static)
    model = task.model
    use_kfac = method == "kfac"
    images_like = jax.ShapeDtypeStruct((batch, *task.shape), jnp.uint8)
    labels_like = jax.ShapeDtypeStruct((batch,), jnp.int32)

    def loss_fn(params, batch_stats, images, labels):
        logits, new = model.apply(
            {"params": params, "batch_stats": batch_stats}, normalised(task, images), train=True,
            mutable=["batch_stats"],
        )  # fmt: skip
        if fixed.get("fisher") == "sampled" or fixed.get("adaptive_damping"):
            logits = kfac.mark_output(logits, "categorical")
        targets = optax.smooth_labels(jax.nn.one_hot(labels, logits.shape[-1]), task.smoothing)
        return jnp.mean(optax.softmax_cross_entropy(logits, targets)), new["batch_stats"]

    def fresh(key):
        return model.init(key, jnp.zeros((1, *task.shape)), train=False)

    layers: Any = None
    if use_kfac:
        like = jax.eval_shape(fresh, jax.random.key(0))
        layers = kfac.find_layers(
            loss_fn, like["params"], like["batch_stats"], images_like, labels_like, has_aux=True,
            rules={} if fixed.get("batch_norm_blocks", True) else {"norm": "skip"},
        )  # fmt: skip

    def transform(settings, steps):
        rate = methods.schedule(settings["learning_rate"], steps)
        numbers = {**settings, **fixed, "steps": steps}
        return optax.with_extra_args_support(methods.METHODS[method].make(rate, numbers, layers))

    def init(key, settings, steps):
        variables = fresh(key)
        params = variables["params"]
        norms = jax.tree.map(lambda leaf: jnp.linalg.norm(leaf.ravel()), params)
        return State(params, variables["batch_stats"], transform(settings, steps).init(params), norms)

    def observe(state, images, labels, key):
        """Return the state with new statistics, and their relative change from the running averages."""
        measure = kfac.statistics(
            loss_fn, layers, has_aux=True, fisher=fixed.get("fisher", "empirical"),
            fraction=1 / fixed.get("subsample", 1),
        )  # fmt: skip
        extra: dict[str, Any] = {"fisher_key": key} if fixed.get("fisher") == "sampled" else {}
        if fixed.get("preconditioner") == "ekfac":
            extra["basis"] = kfac.curvature.eigenbasis(state.opt_state, layers)
        factors = measure(state.params, state.batch_stats, images, labels, **extra)
        if rounded := fixed.get("statistics_dtype"):
            factors = jax.tree.map(lambda x: x.astype(rounded).astype(x.dtype), factors)
        change = change_of(factors, kfac.curvature.factors_from_state(state.opt_state, layers))
        return state._replace(opt_state=kfac.observe(state.opt_state, factors)), change

    def step(state, images, labels, settings, steps):
        plain = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, batch_stats), grads = plain(state.params, state.batch_stats, images, labels)
        value: dict[str, Any] = {}
        if fixed.get("adaptive_damping"):
            value["value_fn"] = lambda params: loss_fn(params, state.batch_stats, images, labels)[0]
        updates, opt_state = transform(settings, steps).update(grads, state.opt_state, state.params, **value)
        params = optax.apply_updates(state.params, updates)
        if fixed.get("rescale"):
            params = methods.rescaled(params, state.kernel_norms)
        return State(params, batch_stats, opt_state, state.kernel_norms), loss

    def evaluate(params, batch_stats, images, labels):
        logits: Any = model.apply({"params": params, "batch_stats": batch_stats}, normalised(task, images), train=False)
        return jnp.mean(jnp.argmax(logits, -1) == labels)

    number = jax.ShapeDtypeStruct((), jnp.float32)
    numbers = dict.fromkeys(names, number)
    key_like = jax.eval_shape(lambda: jax.random.key(0))
    init_program = jax.jit(init)
    state_like = jax.eval_shape(init, key_like, numbers, number)

    def compiled(fn, *arguments):
        return jax.jit(fn, donate_argnums=0).lower(state_like, images_like, labels_like, *arguments).compile()

    observe_program = compiled(observe, key_like) if use_kfac else None
    return Programs(init_program, observe_program, compiled(step, numbers, number), jax.jit(evaluate))


def split_settings(settings: dict[str, Any]) -> tuple[tuple[tuple[str, Any], ...], dict[str, Any]]:
    """Split the settings into `STATIC` settings, which need a separate program, and numbers."""
    static = tuple(sorted((name, value) for name, value in settings.items() if name in STATIC))
    return static, {name: np.float32(value) for name, value in settings.items() if name not in (*STATIC, *OUTSIDE)}


def prepare(task: Task, trial: Trial) -> tuple[Programs, dict[str, Any]]:
    """Return a trial's programs and their numeric arguments."""
    static, numbers = split_settings(trial.settings)
    return programs(task, trial.method, static, tuple(sorted(numbers)), trial.batch), numbers


def run(task: Task, trial: Trial) -> dict[str, Any]:
    """Train, and return the trial with its validation curve, losses and test accuracy.

    If the loss becomes non-finite, the trial stops, and its accuracies count as chance.
    """
    compiled, numbers = prepare(task, trial)
    steps = np.float32(trial.steps)
    key = jax.random.key(trial.seed)
    state = compiled.init(key, numbers, steps)
    plan = Plan(len(task.train), trial.batch, np.arange(trial.batch), trial.seed, 0, trial.steps)
    every = trial.settings.get("statistics_period", 1)
    interval = AdaptiveInterval(trial.settings.get("statistics_threshold", 0.1))
    curve: list[tuple[int, float]] = []
    losses: list[float] = []
    collected = 0
    began = time.perf_counter()
    for number, batch in enumerate(task.train.batches(plan)):
        due = interval.due(number) if every == "adaptive" else number % every == 0
        due |= number < STATISTICS_WARMUP
        if compiled.observe and due:
            collected += 1
            state, change = compiled.observe(state, batch.images, batch.labels, jax.random.fold_in(key, number))
            if every == "adaptive":
                interval.record(number, float(change))
        state, loss = compiled.step(state, batch.images, batch.labels, numbers, steps)
        losses.append(float(loss))
        if not math.isfinite(losses[-1]):
            break
        if (number + 1) % trial.eval_every == 0 or number + 1 == trial.steps:
            curve.append((number + 1, round(accuracy(compiled, state, task.val), 4)))
    finite = len(losses) == trial.steps and math.isfinite(losses[-1])
    seconds = time.perf_counter() - began
    norms = jax.tree.map(lambda leaf: jnp.linalg.norm(leaf.ravel()), state.params)
    growth = jax.tree.map(lambda new, old, yes: float(new / old) if yes else 0.0, norms, state.kernel_norms,
                          methods.is_kernel(state.params))  # fmt: skip
    return {
        **dataclasses.asdict(trial),
        "finite": finite,
        "curve": curve,
        "val_accuracy": curve[-1][1] if finite else 0.1,
        "test_accuracy": round(accuracy(compiled, state, task.test), 4) if finite else 0.1,
        "losses": [round(loss, 4) for loss in losses if math.isfinite(loss)],
        "norm_growth": round(max(jax.tree.leaves(growth)), 3) if finite else None,
        "steps_with_statistics": collected,
        "seconds": round(seconds, 2),
    }


def accuracy(compiled: Programs, state: State, split: tuple[np.ndarray, np.ndarray]) -> float:
    """Return the accuracy with averaged batch-norm statistics, over equal parts of the images."""
    images, labels = split
    size = max(d for d in range(1, 501) if len(labels) % d == 0)
    parts = range(0, len(labels), size)
    right = [
        compiled.evaluate(state.params, state.batch_stats, images[i : i + size], labels[i : i + size]) for i in parts
    ]
    return float(np.mean([float(x) for x in right]))
