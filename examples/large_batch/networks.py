"""Compare K-FAC's defaults with SOAP, Muon, AdamW, LARS, LAMB and SGD on several kinds of networks.

    python examples/large_batch/networks.py run --data-dir data/cifar10
    python examples/large_batch/networks.py bracket --methods muon --rates 0.03    # search for the best rate
    python examples/large_batch/networks.py report
    python examples/large_batch/networks.py times --methods kfac muon adamw    # seconds per step
    python examples/large_batch/networks.py compile --methods sgd muon kfac    # processor seconds to compile
    python examples/large_batch/networks.py start                              # processor seconds to the first step
    python examples/large_batch/networks.py first-step --networks "MLP-Mixer" --methods kfac    # one of these starts

All methods train for 60 steps at batch size N/10 (`--batch 10`) with the study's schedule: the rate rises for a tenth
of the steps and then falls to zero. `--schedule tail` scores the mean weights over the last tenth of the steps.
`--schedule average` keeps the rate constant after its warm-up, and scores the mean weights over the last quarter of
the steps. Trials that are already in --results are not repeated.

`bracket` starts with --rates, and then tries half and twice the best rate until both of its neighbours are no better. A
row has the processor seconds of all steps without compiling, and the seconds that compiling adds to the first step.

The methods are:

- "kfac": `kfac.train_step` with default options. If `kfac.statistics_due` returns True, a separate program takes
  statistics from a quarter of the examples.
- "kfac-one-rate": the same with `adaptive_layer_rates=False`.
- "kfac-whole-kernels": the same with `find_layers(max_factor_dim=8192)`, which does not cut oblong kernels.
- "kfac-decay-0.99": the same with `SOAP(decay=0.99)`.
- "kfac-every-step": statistics from all examples in every step.
- "kfac-cholesky": the same with `preconditioner=kfac.Cholesky()`.
- "no-statistics": the same without any call of `kfac.observe`. Momentum, step lengths and adaptive rates remain.
- "gauss-newton": `kfac.gauss_newton` for minibatches, on networks that mark their output. The rate is the fraction of
  the minimising step. "gauss-newton-0", "-2" and "-16" have this number of conjugate-gradient iterations, not 6.
- "soap": published SOAP, with Shampoo's matrices.
- "soap-spectral": the same with K-FAC's step lengths.
- "muon": Muon, whose Adam has 0.3 times the rate for tables, heads and vectors.
- "muon-adam-1", "muon-adam-3": the same with 1 and 3 times the rate. `bracket` starts with Muon's best rate and its
  neighbours.
- "muon-adaptive": the same as "muon" with K-FAC's adaptive layer rates.
- "adamw", "lars", "lamb", "sgd": the methods in `methods.py`.

Some methods have stored results only:

- "kfac-soap-eigh": a `SOAP` preconditioner that decomposed its factors.
- "kfac-0.3.0": the default in version 0.3.0.
- "kfac-whole": the default with `find_layers(max_factor_dim=8192)`.
- "kfac-before": the default between version 0.3.0 and "kfac-at-once".
- "kfac-at-once": a default whose intervals did not grow.
- "kfac-alike": the default after "kfac-at-once". It moved convolutions as far as dense kernels.
- "kfac-frobenius" and names that begin with it: version 0.3, whose steps had a Frobenius norm.
- "kfac-no-overlap": the present default without the factor `Layer.overlap`.
- "kfac-0.99-0.95": "kfac-decay-0.99" with momentum 0.95.
- "kfac-square-pieces": the default that cut all dense kernels with 256 or more rows into pieces. Networks without such
  kernels have "kfac" for it. With "-0.99" or "-0.99-0.95", its decay and momentum.
- "kfac-own-mask-token": the default that gave the masked autoencoder's mask token the gradient's own factors.
- "kfac-long-mask-token": the default that gave this mask token steps of the same length as other vectors.
- "kfac-in-one-pass": the default with statistics in the gradient's backward pass.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

EXAMPLES = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(EXAMPLES / folder) for folder in ("benchmarks", "imagenet", "language_model", "physics", ".")]

import environment  # noqa: F401, E402, I001  before JAX is imported
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import linen as nn  # noqa: E402

import first_attempt  # noqa: E402
import kfac  # noqa: E402
import ablations  # noqa: E402
import brackets  # noqa: E402
import methods  # noqa: E402
import models  # noqa: E402
import simple  # noqa: E402
import soap as published  # noqa: E402
import tasks  # noqa: E402
import topics  # noqa: E402
from counting import count_distinct_kernels  # noqa: E402
from data import Plan  # noqa: E402
from fashion import FASHION  # noqa: E402
from held_out import HELD_OUT  # noqa: E402
from other_networks import OTHERS, Problem  # noqa: E402
from speed import median_times  # noqa: E402
from transformer import Transformer  # noqa: E402
from vit import ViT  # noqa: E402

EVERY = math.inf  # as `overhead`, it allows statistics and refreshes in every step
KFAC: dict[str, dict[str, Any]] = {
    "kfac": {},
    "kfac-one-rate": {"adaptive_layer_rates": False},
    "kfac-whole-kernels": {"max_factor_dim": 8192},
    "kfac-decay-0.99": {"preconditioner": kfac.SOAP(decay=0.99)},
    "kfac-every-step": {"overhead": EVERY},
    "kfac-cholesky": {"overhead": EVERY, "preconditioner": kfac.Cholesky()},
    "no-statistics": {},
}
# With marked outputs, factors of sampled targets, and products of the examples that the statistics use.
NEWTON: dict[str, dict[str, Any]] = {
    "gauss-newton": {},
    **{f"gauss-newton-{number}": {"iterations": number} for number in (0, 2, 16)},
}
METHODS = (*KFAC, *NEWTON, "soap", "soap-spectral", *brackets.MUON, "muon-adaptive", "adamw", "lars", "lamb", "sgd")
RATES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
RESULTS = Path(__file__).resolve().parent / "results" / "networks.jsonl"


class Plain(nn.Module):
    """Classify images with the study's residual network, but without normalisation.

    Instead, convolutions have biases, and each block adds half its output.
    """

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        del train
        conv = functools.partial(nn.Conv, kernel_init=models.he_normal)
        x = nn.relu(conv(16, (3, 3))(x))
        for i in range(3):
            width, strides = 16 * 2**i, (2, 2) if i else (1, 1)
            y = conv(width, (3, 3))(nn.relu(conv(width, (3, 3), strides)(x)))
            shortcut = conv(width, (1, 1), strides)(x) if x.shape != y.shape else x
            x = nn.relu(shortcut + 0.5 * y)
        return nn.Dense(10)(x.mean((1, 2)))


class Mixer(nn.Module):
    """Classify images with an MLP-Mixer (Tolstikhin et al. 2021).

    Perceptrons over patches and perceptrons over channels alternate.
    """

    width: int = 64
    depth: int = 4

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        del train
        x = nn.Conv(self.width, (4, 4), (4, 4), padding="VALID")(x)
        x = x.reshape(len(x), -1, self.width)
        patches = x.shape[1]
        for _ in range(self.depth):
            y = nn.LayerNorm()(x).swapaxes(1, 2)
            x = x + nn.Dense(patches)(nn.gelu(nn.Dense(4 * patches)(y))).swapaxes(1, 2)
            x = x + nn.Dense(self.width)(nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x))))
        return nn.Dense(10)(nn.LayerNorm()(x).mean(1))


def images(model: nn.Module, data_dir: Path, share: int, name: str = "cifar") -> Problem:
    """Return the problem of classifying images. The score is the accuracy on validation images.

    N is 5,000 for the study's part of CIFAR-10, and 50,000 for Fashion-MNIST.
    """
    task = tasks.load(name, data_dir)
    mean, std = jnp.asarray(task.mean), jnp.asarray(task.std)

    def init(key: jax.Array) -> tuple[Any, Any]:
        variables = model.init(key, jnp.zeros((1, *task.shape)), train=False)
        return variables["params"], variables.get("batch_stats", {})

    def logits(params: Any, state: Any, pixels: Any, train: bool) -> Any:
        variables = {"params": params, "batch_stats": state}
        return model.apply(variables, (pixels / 255 - mean) / std, train, mutable=["batch_stats"])

    def loss(params: Any, state: Any, pixels: Any, labels: Any) -> tuple[jax.Array, Any]:
        found, new = logits(params, state, pixels, train=True)
        found = kfac.mark_output(found, "categorical")
        targets = optax.smooth_labels(jax.nn.one_hot(labels, 10), task.smoothing)
        return jnp.mean(optax.softmax_cross_entropy(found, targets)), new.get("batch_stats", {})

    @jax.jit
    def right(params: Any, state: Any, pixels: Any, labels: Any) -> jax.Array:
        return jnp.mean(jnp.argmax(logits(params, state, pixels, train=False)[0], -1) == labels)

    def batches(seed: int, steps: int) -> Iterator[tuple[Any, ...]]:
        size = len(task.train) // share
        for batch in task.train.batches(Plan(len(task.train), size, np.arange(size), seed, 0, steps)):
            yield batch.images, batch.labels

    def score(params: Any, state: Any) -> float:
        parts = (tuple(x[i : i + 500] for x in task.val) for i in range(0, len(task.val[1]), 500))
        return float(np.mean([right(params, state, *part) for part in parts]))

    return Problem(init, loss, batches, score)


def text(data_dir: Path, share: int, width: int = 64) -> Problem:
    """Return the problem of predicting characters with the transformer from `examples/language_model`.

    The score is minus the validation loss in nats per character. N is 640.
    """
    del data_dir
    model = Transformer(vocabulary=len(topics.ALPHABET), width=width, dtype="float32")
    train, held_out = topics.tokens()
    length = model.context + 1
    rows = held_out[: 256 * length].reshape(4, 64, length)
    evaluate = jax.jit(model.loss)

    def batches(seed: int, steps: int) -> Iterator[tuple[Any, ...]]:
        for step in range(steps):
            begin = np.random.default_rng((seed, step)).integers(0, len(train) - length + 1, round(640 / share))
            yield (jnp.asarray(train[begin[:, None] + np.arange(length)]),)

    return Problem(
        lambda key: (model.init(key), {}), lambda params, state, tokens: (model.loss(params, tokens), state), batches,
        lambda params, state: -float(np.mean([evaluate(params, part) for part in rows])), ("blocks",),
        r"^\['(tokens|positions|head)'\]",
    )  # fmt: skip


def vision_transformer(width: int = 96) -> nn.Module:
    return ViT(10, width=width, depth=4, heads=4, patch=4)


PROBLEMS: dict[str, Callable[[Path, int], Problem]] = {
    "residual network, batch norm": functools.partial(
        images, models.ResNet((1, 1, 1), num_classes=10, width=16, stem="small", init_scheme="he")
    ),
    "residual network, no normalisation": functools.partial(images, Plain()),
    "vision transformer": functools.partial(images, vision_transformer()),
    "MLP-Mixer": functools.partial(images, Mixer()),
    "character transformer": text,
    **OTHERS,
    "character transformer, width 256": functools.partial(text, width=256),
}
DEFAULT = tuple(PROBLEMS)  # other networks need a different --data-dir, and wide vision transformers take long
PROBLEMS |= {
    f"vision transformer, width {width}": functools.partial(images, vision_transformer(width)) for width in (192, 384)
}
PROBLEMS |= {name: functools.partial(images, model, name="fashion") for name, model in FASHION.items()}
PROBLEMS |= {name: network.make for name, network in HELD_OUT.items()}


def kernel_shape(path: Any, leaf: Any, problem: Problem) -> tuple[int, int, int] | None:
    """Return the number of copies, inputs and outputs if the parameter is treated as a matrix, otherwise None.

    Tables and a transformer's head are not treated as matrices.
    """
    first = int(any(str(getattr(key, "key", key)) in problem.stacked for key in path))
    if leaf.ndim - first < 2 or re.search(problem.table, jax.tree_util.keystr(path)):
        return None
    copies = leaf.shape[0] if first else 1
    return copies, leaf.size // copies // leaf.shape[-1], leaf.shape[-1]


def soap(rate: Any, problem: Problem, overlaps: dict[str, float] | None = None) -> optax.GradientTransformation:
    """Return SOAP for kernels as matrices, and Adam for all other parameters.

    As published, SOAP renews its bases every ten steps. With `overlaps`, a factor for each kernel, the steps get
    K-FAC's lengths.
    """
    direction, adam = published.soap(b1=0.9), optax.scale_by_adam(0.9, 0.95)

    def matrices(tree: Any) -> dict[str, list[jax.Array]]:
        found = {jax.tree_util.keystr(path): (path, leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
        shapes = {name: kernel_shape(path, leaf, problem) for name, (path, leaf) in found.items()}
        return {name: list(found[name][1].reshape(shape)) for name, shape in shapes.items() if shape}

    def init(params: Any) -> Any:
        return direction.init(matrices(params)), adam.init(params)

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        kernels, first = direction.update(matrices(grads), state[0])
        rest, second = adam.update(grads, state[1])
        if overlaps is not None:
            rest = jax.tree.map(ablations.vector_step, rest)
            for name, steps in kernels.items():
                kernels[name] = [ablations.spectral_step(step, overlaps[name]) for step in steps]

        def chosen(path: Any, leaf: jax.Array) -> jax.Array:
            own = kernels.get(jax.tree_util.keystr(path))
            return leaf if own is None else jnp.stack(own).reshape(leaf.shape)

        return jax.tree_util.tree_map_with_path(chosen, rest), (first, second)

    return optax.chain(
        optax.GradientTransformation(init, update), optax.add_decayed_weights(5e-4, methods.is_kernel),
        optax.scale_by_learning_rate(rate),
    )  # fmt: skip


def kernel_overlaps(problem: Problem) -> dict[str, float]:
    """Return `Layer.overlap` for each parameter: the number of windows of a convolution that hold an input position."""
    params, state = problem.init(jax.random.key(0))
    layers = kfac.find_layers(problem.loss, params, state, *next(problem.batches(0, 1)), has_aux=True)
    found = {path: layer.overlap for layer in layers for path in layer.params}
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    return {name: found.get(path, 1.0) for name, path in zip(names, layers.paths, strict=True)}


def muon(rate: Any, problem: Problem, adam: float) -> optax.GradientTransformation:
    """Return Muon for kernels as matrices of inputs against outputs.

    Adam trains tables, a transformer's head and vectors at `adam` times the rate.
    """

    def dimensions(params: Any) -> Any:
        def of(path: Any, leaf: Any) -> Any:
            shape = kernel_shape(path, leaf, problem)
            if shape is None:
                return None
            first = int(shape[0] > 1)
            return optax.contrib.MuonDimensionNumbers(tuple(range(first, leaf.ndim - 1)), leaf.ndim - 1)

        return jax.tree_util.tree_map_with_path(of, params)

    return optax.contrib.muon(
        rate, beta=0.9, weight_decay=5e-4, weight_decay_mask=methods.is_kernel, nesterov=True, adam_b2=0.95,
        adam_learning_rate=lambda count: adam * rate(count), muon_weight_dimension_numbers=dimensions,
    )  # fmt: skip


class Programs(NamedTuple):
    """Hold compiled functions that serve all rates, seeds and numbers of steps.

    A `carry` holds the parameters, the model's mutable state, the optimizer's state, and each step's rate.

    Attributes:
      init: `init(params)` returns the optimizer's state.
      observe: `observe(carry, batch)` takes statistics and returns the new carry. None except for K-FAC.
      step: `step(carry, batch)` returns the new carry and the loss.
    """

    init: Any
    observe: Any
    step: Any


@functools.cache
def programs(problem: Problem, method: str, share: int | None) -> Programs:
    """Return a method's programs. See `prepared` for `share`."""
    layers: Any = None
    settings: dict[str, Any] = {}
    overlaps = kernel_overlaps(problem) if method == "soap-spectral" else None
    if method in KFAC | NEWTON:
        params, state = problem.init(jax.random.key(0))
        first = next(problem.batches(0, 1))
        batch = range(2, 2 + len(first))
        settings = dict((KFAC | NEWTON)[method])
        find = {"batch_argnums": tuple(batch), "max_factor_dim": settings.pop("max_factor_dim", None)}
        layers = kfac.find_layers(problem.loss, params, state, *first, has_aux=True, **find)
        quarter = "overhead" not in settings and (layers.num_examples or 0) >= 64
        share = share or (4 if quarter else 1)

    def optimizer(rates: jax.Array) -> Any:
        rate = rates.__getitem__
        if method in NEWTON:
            return kfac.gauss_newton(rate, layers, factor_ema_decay=0.9, damping=0.1, min_damping=0.001, **settings)
        if layers is not None:
            return kfac.kfac(rate, layers, **settings)
        if method in ("soap", "soap-spectral"):
            return soap(rate, problem, overlaps)
        if method == "muon-adaptive":
            return ablations.adaptive_rates(muon(rate, problem, brackets.MUON["muon"]), rate)
        if method in brackets.MUON:
            return muon(rate, problem, brackets.MUON[method])
        # the study's settings
        return methods.METHODS[method].make(
            rate, {"momentum": 0.9, "b2": 0.99, "weight_decay": 5e-4, "vectors": 3.0}, None
        )

    @functools.partial(jax.jit, donate_argnums=0)
    def observe(carry: Any, batch: Any) -> Any:
        params, state, opt_state, rates = carry
        fisher = "sampled" if method in NEWTON else "empirical"
        measure = kfac.statistics(problem.loss, layers, fraction=1 / (share or 1), has_aux=True, fisher=fisher)
        key = jax.random.fold_in(jax.random.key(0), opt_state.count) if method in NEWTON else None
        return params, state, kfac.observe(opt_state, measure(params, state, *batch, fisher_key=key)), rates

    @functools.partial(jax.jit, donate_argnums=0)
    def step(carry: Any, batch: Any) -> Any:
        params, state, opt_state, rates = carry
        (loss, state), grads = jax.value_and_grad(problem.loss, has_aux=True)(params, state, *batch)
        part = jax.tree.map(lambda x: x[:: share or 1], batch)
        of = lambda batch: lambda params: problem.loss(params, carry[1], *batch)[0]  # noqa: E731
        losses = {"value_fn": of(batch), "curvature_fn": of(part)} if method in NEWTON else {}
        updates, opt_state = optimizer(rates).update(grads, opt_state, params, **losses)
        return (optax.apply_updates(params, updates), state, opt_state, rates), loss

    init = jax.jit(lambda params: optimizer(jnp.zeros(1)).init(params))
    observes = layers is not None and method != "no-statistics"
    return Programs(init, observe if observes else None, step)


def prepared(
    problem: Problem, method: str, rate: Any, seed: int, steps: int, share: int | None = None
) -> tuple[Any, Any, Iterator[Any]]:
    """Return `step(carry, batch, due=None) -> (carry, loss)`, its first `carry` (see `Programs`), and the batches.

    K-FAC takes statistics before a step if `due` is True. By default, `kfac.statistics_due` decides. The statistics use
    every `share`-th example. If `share` is None, methods with an "overhead" option use all examples, and other methods
    use the same share as `train_step`.
    """
    init, observe, program = programs(problem, method, share)
    params, state = problem.init(jax.random.key(seed))
    length = max(1024, steps)  # the same for all runs, because the program depends on it
    rates = jnp.broadcast_to(jnp.asarray(rate(jnp.arange(length)), jnp.float32), length)

    def step(carry: Any, batch: Any, due: bool | None = None) -> Any:
        if due is None:
            due = observe is not None and bool(kfac.statistics_due(carry[2]))
        if due:
            carry = observe(carry, batch)
        return program(carry, batch)

    return step, (params, state, init(params), rates), problem.batches(seed, steps)


@functools.cache
def compile_seconds(problem: Problem, method: str) -> list[float]:
    """Return a list that holds the processor seconds for compiling after the process's first trial of the method."""
    del problem, method
    return []


def run(problem: Problem, method: str, learning_rate: float, seed: int, steps: int, schedule: str) -> dict[str, Any]:
    """Run a trial, and return its score, its last loss and its seconds.

    The score is None if the loss becomes non-finite. The processor seconds of all steps exclude compiling, because they
    replace the first step by a mean step. Later trials in a process repeat the compile seconds of the first trial.
    """
    entered = time.process_time()
    falling = methods.schedule(learning_rate, steps)
    rate, tail = falling, 1  # the mean covers only the last step
    if schedule == "tail":
        tail = max(1, steps // 10)
    elif schedule == "average":
        rate, tail = (lambda count: falling(jnp.minimum(count, math.ceil(0.1 * steps) - 1))), max(1, steps // 4)
    step, carry, batches = prepared(problem, method, rate, seed, steps)

    @functools.partial(jax.jit, donate_argnums=0)
    def add(mean: Any, last: Any) -> Any:
        return jax.tree.map(lambda m, x: m + x / tail, mean, last)

    mean, losses, began, began_processor = jax.tree.map(jnp.zeros_like, carry[:2]), [], 0.0, 0.0
    mean = add(mean, jax.tree.map(jnp.zeros_like, mean))  # compile it before the clock starts
    for batch in batches:
        carry, loss = step(carry, batch)
        losses.append(float(loss))
        if not math.isfinite(losses[-1]):
            break
        if len(losses) == 1:
            began, began_processor = time.perf_counter(), time.process_time()
        if len(losses) > steps - tail:
            mean = add(mean, carry[:2])
    later = max(1, len(losses) - 1)
    seconds = (time.perf_counter() - began) / later
    processor = (time.process_time() - began_processor) / later
    compiling = compile_seconds(problem, method)
    if not compiling:
        compiling.append(began_processor - entered - processor)
    score = problem.score(*mean) if math.isfinite(losses[-1]) else None
    return {
        "score": score and round(score, 4), "loss": round(losses[-1], 4), "seconds_per_step": round(seconds, 3),
        "processor_seconds": round(processor * len(losses), 2), "compile_seconds": round(compiling[0], 2),
    }  # fmt: skip


def times(name: str, problem: Problem, chosen: list[str], repeats: int, steps: int) -> None:
    """Print each method's median milliseconds per step in two phases.

    The first phase covers the first `steps` steps, usually 45. The second phase covers 16 steps after step 80, when
    K-FAC's interval no longer grows. The times exclude compilation, and the batches are in memory. The function also
    compares a K-FAC run of `steps` steps with a Muon run of 60 steps.
    """
    prepare = {method: prepared(problem, method, lambda count: 0.01, 0, 1) for method in chosen}
    batch = next(problem.batches(0, 1))

    def after(method: str, carry: Any, count: int) -> Any:
        for _ in range(count):
            carry, loss = prepare[method][0](carry, batch)
        loss.block_until_ready()
        return carry

    begin = {method: jax.device_get(carry) for method, (_, carry, _) in prepare.items()}
    later = {method: jax.device_get(after(method, carry, 80)) for method, carry in begin.items()}
    phases = {True: (begin, steps), False: (later, 16)}

    def call(method: str, first: bool) -> None:
        carries, count = phases[first]
        after(method, jax.device_put(carries[method]), count)

    calls = {f"{m} {first}": functools.partial(call, m, first) for m in chosen for first in phases}
    found = median_times(calls, repeats)
    early, late = ({m: found[f"{m} {first}"] / count for m in chosen} for first, (_, count) in phases.items())
    cells = [f"{m} {1e3 * late[m]:.0f} ms ({1e3 * early[m]:.0f} in the first {steps})" for m in chosen]
    if {"kfac", "muon"} <= early.keys():
        ratio = steps * early["kfac"] / (60 * late["muon"])
        cells.append(f"kfac over muon {late['kfac'] / late['muon']:.2f}, {steps} steps over 60: {ratio:.2f}")
    print(f"{name}: {', '.join(cells)}", flush=True)


def compiled(name: str, problem: Problem, chosen: list[str]) -> None:
    """Print each method's kernel count, and the processor seconds to trace and compile its programs."""
    first = 0.0
    for method in chosen:
        _, carry, batches = prepared(problem, method, lambda count: 0.01, 0, 1)
        batch = next(batches)
        made = programs(problem, method, None)
        total, kernels = 0.0, []
        for program in [made.step, made.observe] if made.observe else [made.step]:
            began = time.process_time()
            text = program.lower(carry, batch).compile().as_text()
            total += time.process_time() - began
            kernels.append(count_distinct_kernels(text))
        first = first or total
        counts = f"{kernels[0]} kernels" + "".join(f" and {count} for statistics" for count in kernels[1:])
        print(f"{name}: {method} {total:.1f} s, {total / first:.2f} of {chosen[0]}'s, {counts}")


README = "the README's first command"  # runs two steps, with an evaluation and a checkpoint


def first_step(name: str, method: str, data_dir: Path) -> float:
    """Return this process's processor seconds from the initial parameters to the first loss.

    K-FAC uses `kfac.train_step`. AdamW uses a first-order step in its place.
    """
    maker = kfac.train_step if method == "kfac" else functools.partial(first_attempt.first_order, optimizer=method)
    if name == README:
        vars(simple)["kfac"] = SimpleNamespace(**vars(kfac) | {"train_step": maker})
        with tempfile.TemporaryDirectory() as output, contextlib.redirect_stdout(sys.stderr):
            began = time.process_time()
            simple.main(["--steps", "2", "--output", output])
            return time.process_time() - began
    problem = PROBLEMS[name](data_dir, 10)
    params, state = problem.init(jax.random.key(0))
    batch = next(problem.batches(0, 1))
    began = time.process_time()
    step: Any = maker(problem.loss, 0.1, has_aux=True, verbose=False)
    opt_state = step.init(params, state, *batch)
    jax.block_until_ready(step(params, opt_state, state, *batch))
    return time.process_time() - began


def starts(names: list[str], data_dir: Path) -> None:
    """Print the seconds to the first step for a first and a second start of each network.

    Each start is a separate process. The second start finds the first start's compilation cache.
    """
    for name in names:
        found = {}
        for method in ("adamw", "kfac"):
            with tempfile.TemporaryDirectory() as home:
                held = os.environ | {"HOME": home, "JAX_COMPILATION_CACHE_DIR": home}
                words = ["first-step", "--networks", name, "--methods", method, "--data-dir", str(data_dir)]
                for start in ("first", "second"):
                    ran = subprocess.run(
                        [sys.executable, __file__, *words], env=held, stdout=subprocess.PIPE, text=True, check=True
                    )
                    found[method, start] = float(ran.stdout.split()[-1])
        for start in ("first", "second"):
            adamw, ours = found["adamw", start], found["kfac", start]
            print(f"{name}: {start} start adamw {adamw:.1f} s, kfac {ours:.1f} s, {ours / adamw:.2f} times", flush=True)


def read(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text().splitlines() if path.is_file() else []
    return [{"batch": 10, "schedule": "falling", **json.loads(line)} for line in lines]


class Trials:
    """Hold a network's stored trials, and run and store other trials.

    Args:
      records: all stored trials.
      path: the file for new trials.
      problem: the network's problem.
      same: the network's name, the number of steps, N divided by the batch size, and the schedule.
    """

    def __init__(self, records: list[dict[str, Any]], path: Path, problem: Problem, same: dict[str, Any]) -> None:
        self._records = [record for record in records if same.items() <= record.items()]
        self._path, self._problem, self._same = path, problem, same

    def stored(self, method: str) -> list[dict[str, Any]]:
        return [record for record in self._records if record["method"] == method]

    def run(self, method: str, rate: float, seed: int) -> bool:
        """Run and store a trial, unless it is stored. Return whether it ran."""
        if any((record["rate"], record["seed"]) == (rate, seed) for record in self.stored(method)):
            return False
        trial = {"network": self._same["network"], "method": method, "rate": rate, "seed": seed} | self._same
        record = trial | run(self._problem, method, rate, seed, self._same["steps"], self._same["schedule"])
        record["finished"] = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(json.dumps(record), flush=True)
        self._records.append(record)
        return True


def search(trials: Trials, method: str, rates: list[float], seeds: list[int]) -> None:
    """Search for a method's best rate with the first seed, and then run the best rate with all seeds.

    If no trial is stored, the search begins with `rates`. For Muon with another rate of Adam, it begins with the best
    rate of "muon" and its neighbours.
    """
    if method in brackets.MUON and method != "muon" and trials.stored("muon"):
        of_muon = brackets.bracket(brackets.mean_scores(trials.stored("muon")))
        rates = [rate for rate in of_muon if rate is not None]
    elif trials.stored(method):
        rates = []
    for rate in rates:
        trials.run(method, rate, seeds[0])
    more = True
    while more:
        found = brackets.bracket(brackets.mean_scores(trials.stored(method)))
        wanted = [(found.best, seed) for seed in seeds] if found.closed else [(r, seeds[0]) for r in found.missing()]
        more = any([trials.run(method, rate, seed) for rate, seed in wanted])


def report(records: list[dict[str, Any]]) -> None:
    """Print a row for each network and method, with the mean score over seeds at each rate."""
    for name in PROBLEMS:
        print(f"\n{name}")
        for method in (*METHODS, *sorted({r["method"] for r in records}.difference(METHODS))):
            cells = []
            for rate in sorted({r["rate"] for r in records if (r["network"], r["method"]) == (name, method)}):
                found = [r for r in records if (r["network"], r["method"], r["rate"]) == (name, method, rate)]
                scores = [r["score"] for r in found if r["score"] is not None]
                lost = f" ({len(found) - len(scores)} not finite)" if len(scores) < len(found) else ""
                spread = f" +- {np.std(scores, ddof=1):.4f}" if len(scores) > 1 else ""
                cells.append(f"{rate:g}: {np.mean(scores):.4f}{spread}{lost}" if scores else f"{rate:g}: -{lost}")
            if cells:
                found = [r for r in records if (r["network"], r["method"]) == (name, method)]
                ending = verdict(found) if method in METHODS else "no longer searched: the setting is gone"
                print(f"  {method:14} " + "   ".join([*cells, ending]))


def verdict(records: list[dict[str, Any]]) -> str:
    """Return a method's best rate, or the reason why the search has not found the best rate."""
    searched = brackets.bracket(brackets.mean_scores(records))
    if searched.closed:
        return f"best: {searched.best:g}"
    rates = " and ".join(f"{rate:g}" for rate in searched.missing())
    return f"at the edge: {searched.best:g}, {rates} did not run"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "bracket", "report", "times", "compile", "start", "first-step"))
    parser.add_argument("--data-dir", type=Path, default=Path("data/cifar10"), help="folder with CIFAR-10")
    parser.add_argument(
        "--results", nargs="+", type=Path, default=[RESULTS], metavar="FILE",
        help="files with a line per trial; new lines go to the last file",
    )  # fmt: skip
    parser.add_argument("--networks", nargs="+", choices=[*PROBLEMS, README], metavar="NAME")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES))
    parser.add_argument("--steps", type=int, help="60, except for held-out networks, which have their own number")
    parser.add_argument(
        "--batch", type=int, metavar="SHARE", help="N divided by the batch size: 10, except for held-out networks"
    )
    parser.add_argument(
        "--schedule", default="falling", choices=("falling", "tail", "average"), help="schedule of the rate, see above"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--repeats", type=int, default=5, help="repetitions of each timing")
    options = parser.parse_args()
    if options.what == "first-step":
        if not options.networks or len(options.methods) > 1:
            parser.error("first-step needs one network and one method: --networks NAME --methods kfac")
        print(first_step(options.networks[0], options.methods[0], options.data_dir))
        return
    if options.what == "start":
        starts(options.networks or ["vision transformer", "character transformer", README], options.data_dir)
        return
    options.networks = options.networks or list(DEFAULT)
    for name in ("batch", "steps"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            parser.error(f"--{name} must be 1 or more, but is {getattr(options, name)}")
    records = [record for path in options.results for record in read(path)]
    if options.what == "report":
        report([r for name in PROBLEMS for r in records if settings(name, options).items() <= r.items()])
        return
    for name in options.networks:
        same = settings(name, options)
        problem = PROBLEMS[name](options.data_dir, same["batch"])
        if options.what == "times":
            times(name, problem, options.methods, options.repeats, same["steps"])
            continue
        if options.what == "compile":
            compiled(name, problem, options.methods)
            continue
        trials = Trials(records, options.results[-1], problem, same)
        for method in options.methods:
            if options.what == "bracket":
                search(trials, method, options.rates, options.seeds)
                continue
            for rate, seed in itertools.product(options.rates, options.seeds):
                trials.run(method, rate, seed)


def settings(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return a network's name, number of steps, N divided by the batch size, and schedule."""
    network = HELD_OUT.get(name)
    steps, batch = (network.steps, network.share) if network else (60, 10)
    return {
        "network": name, "steps": options.steps or steps, "batch": options.batch or batch, "schedule": options.schedule
    }  # fmt: skip


if __name__ == "__main__":
    main()
