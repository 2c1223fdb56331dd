"""How often statistics and refreshes are affordable, counted from the shapes of the layers."""

from __future__ import annotations

import math

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


def affordable(layers: Layers, inverse: Inverse, cost: float | jax.Array) -> int | jax.Array:
    """The interval of "auto": the shortest at which statistics and refreshes take `cost` of the gradients' work.

    The interval holds for any number of devices, which share out refreshes like examples.
    """
    gradients = 3 * (layers.num_examples or 0) * sum(products_of(x) for x in layers if x.positions is not None)
    interval = seldom_work(layers, inverse) / (gradients or math.inf) / cost
    if isinstance(cost, jax.Array):  # as `optax.inject_hyperparams` has it
        return jnp.clip(jnp.ceil(interval), 1, LONGEST).astype(jnp.int32)
    return min(LONGEST, max(1, math.ceil(interval)))


def seldom_work(layers: Layers, inverse: Inverse, subsample: int = 1) -> float:
    """Return FLOPs of statistics of every `subsample`-th example, and of refreshes in FLOPs of the gradient's price."""
    counted = [layer for layer in layers if layer.positions is not None]
    price = REFRESH_PRICE_ON_CPUS if jax.default_backend() == "cpu" else REFRESH_PRICE
    refreshes = price * inverse.flops * sum(layer.copies * layer.inversion for layer in counted)
    return (layers.num_examples or 0) / subsample * sum(map(statistics_of, counted)) + refreshes


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
