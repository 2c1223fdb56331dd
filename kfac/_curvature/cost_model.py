"""Affordable intervals for statistics and refreshes, counted from the layers' shapes."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import Array

from kfac._curvature.preconditioner import BlockPreconditioner
from kfac._layers import KRONECKER_KINDS, Layer, Layers
from kfac._packing import Shape

OVERHEAD = 0.1  # the default of `kfac.kfac(overhead=)`
# The time of a refresh's FLOP, relative to a gradient's FLOP. Measured on CPUs, and on an H200 with a GPT of 124
# million parameters: see docs/evidence.md.
REFRESH_PRICE_ON_CPUS = 3.0
REFRESH_PRICE = 8.0
LONGEST = 16  # the upper bound of `affordable`, because longer intervals have not been tried on many networks


def affordable(
    layers: Layers,
    preconditioner: BlockPreconditioner,
    overhead: float | Array,
    one_in: int,
    price: float | None = None,
) -> int | Array:
    """Return the shortest interval at which statistics and refreshes cost at most `overhead` of the gradient's work.

    The interval never exceeds `LONGEST`. It is `LONGEST` if the gradient's work is unknown, because no layer has known
    positions: experts have none, nor has any layer of a loss that hides its batch. It does not depend on the number of
    devices, because devices share refreshes just as they share examples.

    Args:
      layers: the layers, found with a step's batch.
      preconditioner: the preconditioner of Kronecker blocks.
      overhead: the acceptable work for statistics and refreshes in a mean step, as a fraction of the gradient's work.
      one_in: statistics use every `one_in`-th example.
      price: see `work_of_layers`.

    Returns:
      The interval in steps: an array if `overhead` is an array, otherwise an `int`.
    """
    work = sum(work_of_layers(layers, preconditioner, one_in, price).values())
    gradients = work_of_gradients(layers)
    # An unknown cost counts as a large one, because statistics in every step can cost more than the step.
    fraction = work / gradients if gradients else sys.float_info.max
    interval = fraction / overhead
    # An array comes from `optax.inject_hyperparams`.
    if isinstance(overhead, Array):
        return jnp.clip(jnp.ceil(interval), 1, LONGEST).astype(jnp.int32)
    # `interval` may be infinite, which `math.ceil` refuses.
    return max(1, math.ceil(min(LONGEST, interval)))


def prices_of_layers(
    layers: Layers,
    preconditioner: BlockPreconditioner,
    period: int,
    one_in: int,
) -> dict[str, float]:
    """Return the cost of each layer's curvature in a mean step, as a fraction of the whole gradient's work.

    Args:
      layers: the layers.
      preconditioner: the preconditioner of Kronecker blocks.
      period: the interval between statistics and between refreshes, in steps.
      one_in: statistics use every `one_in`-th example.

    Returns:
      The costs by layer name. Empty if the gradient's work is unknown.
    """
    gradients = work_of_gradients(layers)
    if not gradients:
        return {}
    curvature_work = work_of_layers(layers, preconditioner, one_in)
    prices = {}
    for layer in layers:
        if layer.name not in curvature_work:
            continue
        work = curvature_work[layer.name] / period
        if layer.kind in KRONECKER_KINDS:
            blocks = layer.copies * layer.pieces
            work += preconditioner.products * blocks * applied(layer.block_shapes)
        prices[layer.name] = work / gradients
    return prices


def work_of_gradients(layers: Layers) -> float:
    """Return the FLOPs of a batch's gradient: three times the layers' forward products, and frozen products."""
    forward = sum(products_of(x) for x in layers if x.positions is not None)
    return (layers.num_examples or 0) * (3 * forward + layers._frozen_flops)


def work_of_layers(
    layers: Layers,
    preconditioner: BlockPreconditioner,
    one_in: int,
    price: float | None = None,
) -> dict[str, float]:
    """Return the work for statistics and refreshes by layer, in gradient FLOPs.

    Statistics use every `one_in`-th example. They need a forward pass, and a backward pass to the layers' outputs. The
    layers share the cost of frozen products. A refresh's FLOP counts `price` times. None: `REFRESH_PRICE`, or
    `REFRESH_PRICE_ON_CPUS` on CPUs.
    """
    if price is None:
        on_cpus = jax.default_backend() == "cpu"
        price = REFRESH_PRICE_ON_CPUS if on_cpus else REFRESH_PRICE
    examples = (layers.num_examples or 0) / one_in
    known = [layer for layer in layers if layer.positions is not None]
    work = {}
    for layer in known:
        passes = 2 * products_of(layer) + layers._frozen_flops / len(known)
        statistics = examples * (statistics_of(layer) + passes)
        cubes = layer.copies * layer.refresh_cost
        refresh = price * preconditioner.flops_per_cube * cubes
        work[layer.name] = statistics + refresh
    return work


def applied(shapes: Mapping[str, Shape]) -> float:
    """Return the FLOPs to multiply a block's gradient by a factor on each side.

    Args:
      shapes: the factors' shapes: `(d, d)` for a matrix, `(d,)` for a diagonal.
    """
    elements = 1.0
    sides = 0
    for size, *others in shapes.values():
        elements *= size
        sides += size if others else 1
    return 2 * elements * sides


def products_of(layer: Layer) -> float:
    """Return the FLOPs of a layer's products in an example's forward pass. Embeddings count as 0.

    Raises:
      ValueError: a dense layer or convolution was found without positions.
    """
    if layer.kind not in KRONECKER_KINDS or layer.kind == "embedding":
        return 0.0
    if layer.positions is None:
        raise ValueError(
            f"layers: {layer.name!r} was found without positions: call find_layers with real shapes, and dense layers "
            "for experts, whose rows the data choose"
        )
    return 2.0 * layer.positions * layer.copies * layer.d_in * layer.d_out


def statistics_of(layer: Layer) -> float:
    """Return the FLOPs to form a layer's factors `A` and `G` for an example. Diagonal factors count as 0."""
    if layer.kind not in KRONECKER_KINDS or layer.positions is None:
        return 0.0
    entries = 0
    for name, shape in layer.side_shapes.items():
        if name not in layer.diagonal:
            entries += math.prod(shape)
    return 2.0 * layer.positions * layer.copies * entries
