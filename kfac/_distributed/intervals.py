"""How often statistics and refreshes are affordable, counted from the shapes of the layers."""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from kfac._curvature.inverse import Inverse
from kfac._layers import KRONECKER_KINDS, Layer, Layers

COST = 0.1  # of `kfac.kfac` by default
# The time of a refresh's FLOP over a FLOP of the gradient's. Measured on CPUs, and on an H200 with a GPT of 124 million
# parameters: docs/evidence.md.
REFRESH_PRICE_ON_CPUS = 3.0
REFRESH_PRICE = 8.0
LONGEST = 16  # of the intervals that `affordable` gives: no longer one was tried on networks of many kinds


def affordable(layers: Layers, inverse: Inverse, cost: float | jax.Array, share: int) -> int | jax.Array:
    """Return the shortest interval at which statistics and refreshes take `cost` of the work of the gradients.

    Statistics come from every `share`-th example. The interval holds for any number of devices, which share out
    refreshes like examples.
    """
    interval = sum(work_of_layers(layers, inverse, share).values()) / (work_of_gradients(layers) or math.inf) / cost
    if isinstance(cost, jax.Array):  # as `optax.inject_hyperparams` has it
        return jnp.clip(jnp.ceil(interval), 1, LONGEST).astype(jnp.int32)
    return min(LONGEST, max(1, math.ceil(interval)))


def prices_of_layers(layers: Layers, inverse: Inverse, every: int, share: int) -> dict[str, float]:
    """Return the work for the curvature of each layer in a mean step, over that of all gradients."""
    gradients = work_of_gradients(layers)
    if not gradients:
        return {}
    seldom = work_of_layers(layers, inverse, share)

    def price(layer: Layer) -> float:
        products = 0.0
        if layer.kind in KRONECKER_KINDS:
            products = inverse.products * layer.copies * layer.pieces * applied(layer.block_shapes)
        return (seldom[layer.name] / every + products) / gradients

    return {layer.name: price(layer) for layer in layers if layer.name in seldom}


def work_of_gradients(layers: Layers) -> float:
    """Return FLOPs of the gradients of a batch: three products for each of the forward pass."""
    return 3 * (layers.num_examples or 0) * sum(products_of(x) for x in layers if x.positions is not None)


def work_of_layers(layers: Layers, inverse: Inverse, share: int) -> dict[str, float]:
    """Return FLOPs of statistics and refreshes by layer, in FLOPs of the gradient's price.

    Statistics of every `share`-th example need a forward pass, and a backward pass to the outputs of layers.
    """
    price = inverse.flops * (REFRESH_PRICE_ON_CPUS if jax.default_backend() == "cpu" else REFRESH_PRICE)
    examples = (layers.num_examples or 0) / share
    return {
        layer.name: examples * (statistics_of(layer) + 2 * products_of(layer)) + price * layer.copies * layer.inversion
        for layer in layers
        if layer.positions is not None
    }


def applied(shapes: Mapping[str, tuple[int, ...]]) -> float:
    """Return FLOPs of the products of one block's gradient with a matrix, or a diagonal, on each side."""
    sides = sum(shape[0] if len(shape) > 1 else 1 for shape in shapes.values())
    return 2.0 * math.prod(shape[0] for shape in shapes.values()) * sides


def products_of(layer: Layer) -> float:
    """FLOPs of the products that read a layer in the forward pass of one example."""
    if layer.kind not in KRONECKER_KINDS or layer.kind == "embedding":
        return 0.0
    if layer.positions is None:
        how = "call find_layers with real shapes, and dense layers for experts, whose rows the data choose"
        raise ValueError(f"layers: {layer.name!r} was found without positions: {how}")
    return 2.0 * layer.positions * layer.copies * layer.d_in * layer.d_out


def statistics_of(layer: Layer) -> float:
    """FLOPs of the factors of one example."""
    if layer.kind not in KRONECKER_KINDS or layer.positions is None:
        return 0.0
    entries = sum(math.prod(shape) for name, shape in layer.side_shapes.items() if name not in layer.diagonal)
    return 2.0 * layer.positions * layer.copies * entries
