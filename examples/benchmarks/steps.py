"""Build training steps of whole networks, for `gpu.py` to time and for `h100_program.py` to count."""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import environment  # noqa: F401, isort: skip; before JAX is imported

import jax
import jax.numpy as jnp
import optax
from jax import lax

import kfac
import models

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "language_model"))
from transformer import Transformer
from vit import ViT, vit_b16

AXIS = "devices"
FIRST_ORDER = ("sgd", "adamw", "muon")
# The K-FAC rows are a step without statistics, a step with the whole batch's statistics, and two programs that do not
# train: `observe` takes statistics on a quarter of the examples, and `refresh` recomputes all inverses.
ROWS = (*FIRST_ORDER, "without", "statistics", "observe", "refresh")
INVERSES = {"cholesky": kfac.Cholesky(), "eigh": kfac.Eigh(), "soap": kfac.SOAP()}


class Task(NamedTuple):
    """A network to train: its loss, its parameters' shapes, and the shapes of a device's batch."""

    loss_fn: Callable[..., jax.Array]
    params: Any
    batch: Any
    max_factor_dim: int | None = None


def image_task(arch: str, images: int, size: int, classes: int, **sizes: Any) -> Task:
    """Return the task for an image network in bfloat16: the cross-entropy, with batch norm in training mode."""
    model: Any
    if sizes:
        network = ViT if arch.startswith("vit") else models.ResNet
        model = network(num_classes=classes, dtype=jnp.bfloat16, **sizes)
    else:
        model = vit_b16(classes, jnp.bfloat16) if arch == "vit-b16" else models.create(arch, classes, "bfloat16")
    batch = jax.ShapeDtypeStruct((images, size, size, 3), jnp.float32), jax.ShapeDtypeStruct((images,), jnp.int32)
    variables = jax.eval_shape(lambda x: model.init(jax.random.key(0), x, train=False), batch[0])
    averages = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), variables.get("batch_stats", {}))

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        images, labels = batch
        state = {"params": params, "batch_stats": averages}
        logits, _ = model.apply(state, images, train=True, mutable=["batch_stats"])
        return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()

    return Task(loss_fn, variables["params"], batch)


def language_task(sequences: int, model: Transformer) -> Task:
    """Return the task for a language model. Factors with the vocabulary's size are diagonal."""
    params = jax.eval_shape(model.init, jax.random.key(0))
    return Task(model.loss, params, jax.ShapeDtypeStruct((sequences, model.context + 1), jnp.int32))


def task(name: str, options: argparse.Namespace) -> Task:
    """Return the task called `name`, at full or `--small` size."""
    if name == "gpt-124m":
        little = Transformer(512, context=32, width=64, layers=2, heads=2, tied=True)
        full = Transformer(50257, context=1024, width=768, layers=12, heads=12, tied=True)
        return language_task(options.batch or 8, little if options.small else full)
    images = options.batch or {"resnet50": 256, "vit-b16": 128}[name]
    if not options.small:
        return image_task(name, images, options.image_size, 1000)
    residual: dict[str, Any] = dict(stages=(1, 1), width=16, bottleneck=True)
    small = dict(width=32, depth=2, heads=2, patch=8) if name == "vit-b16" else residual
    return image_task(name, options.batch or 4, 32, 10, **small)


# -- steps ------------------------------------------------------------------------------------------------------------


def first_order(row: str) -> optax.GradientTransformation:
    """Return an optax optimizer.

    Muon treats each kernel as a matrix, including each kernel in a scan's stack. Its Adam updates tables, heads and
    vectors.
    """
    if row == "sgd":
        return optax.sgd(0.1, momentum=0.9)
    if row == "adamw":
        return optax.adamw(1e-3)

    def dimensions(params: Any) -> Any:
        def of(path: Any, leaf: Any) -> Any:
            name = jax.tree_util.keystr(path)
            first = int("blocks" in name)
            if leaf.ndim - first < 2 or any(word in name for word in ("tokens", "positions", "head", "Dense")):
                return None
            return optax.contrib.MuonDimensionNumbers(tuple(range(first, leaf.ndim - 1)), leaf.ndim - 1)

        return jax.tree_util.tree_map_with_path(of, params)

    return optax.contrib.muon(0.02, beta=0.9, muon_weight_dimension_numbers=dimensions)


def make_step(row: str, task: Task, options: argparse.Namespace) -> tuple[Callable[..., Any], Any]:
    """Return a row's step, as it runs on each of `--devices`, and its optimizer."""
    axis = AXIS if options.devices > 1 else None

    def mean(tree: Any) -> Any:
        return lax.pmean(tree, axis) if axis else tree

    if row in FIRST_ORDER:
        optimizer = first_order(row)

        def plain(params: Any, state: Any, batch: Any) -> Any:
            loss, grads = jax.value_and_grad(task.loss_fn)(params, batch)
            updates, state = optimizer.update(mean(grads), state, params)
            return optax.apply_updates(params, updates), state, mean(loss)

        return plain, optimizer
    layers = kfac.find_layers(task.loss_fn, task.params, task.batch, max_factor_dim=task.max_factor_dim)
    distribution = kfac.Distribution(axis_name=axis)
    every = options.inverse_update_period if options.refresh == "inside" and row != "refresh" else None
    tx = kfac.kfac(
        0.1,
        layers,
        distribution=distribution,
        preconditioner=INVERSES[options.preconditioner],
        inverse_update_period=every,
    )

    def refresh(params: Any, state: Any, batch: Any) -> Any:
        del batch
        return params, kfac.observe(state), jnp.zeros(())

    def observe(params: Any, state: Any, batch: Any) -> Any:
        factors = kfac.statistics(task.loss_fn, layers, fraction=1 / 4)(params, batch)
        return params, kfac.observe(state, factors), jnp.zeros(())

    def without(params: Any, state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(task.loss_fn)(params, batch)
        updates, state = tx.update(mean(grads), state, params)
        return optax.apply_updates(params, updates), state, mean(loss)

    def with_statistics(params: Any, state: Any, batch: Any) -> Any:
        loss, grads, factors = kfac.value_and_grad(task.loss_fn, layers)(params, batch)
        updates, state = tx.update(mean(grads), kfac.observe(state, factors), params)
        return optax.apply_updates(params, updates), state, mean(loss)

    programs = {"without": without, "statistics": with_statistics, "observe": observe, "refresh": refresh}
    return programs[row], tx


def table(rows: list[dict[str, Any]]) -> str:
    """Return rows as a Markdown table."""
    names = list(dict.fromkeys(name for row in rows for name in row))

    def text(value: Any) -> str:
        if not isinstance(value, float):
            return str(value)
        return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"

    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    return "\n".join(lines + ["| " + " | ".join(text(row.get(n, "")) for n in names) + " |" for row in rows])
