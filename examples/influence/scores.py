"""Compute influence functions: the effect of leaving a training example out, without retraining."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

import kfac


def curvature(
    loss: Callable, params: Any, batches: Sequence[Any], decay: float, **options: Any
) -> dict[str, kfac.curvature.BlockOperator]:
    """Return the EK-FAC and K-FAC curvature of `loss(params, batch) + decay / 2 |params|^2`."""
    layers = kfac.find_layers(loss, params, batches[0])
    factors = kfac.curvature.estimate_factors(loss, layers, params, batches, **options)
    basis = kfac.curvature.eigenbasis(factors, layers)
    corrected = kfac.curvature.estimate_factors(loss, layers, params, batches, basis=basis, **options)
    return {
        "EK-FAC": kfac.curvature.block_operator(layers, corrected, basis=basis, damping=decay),
        "K-FAC": kfac.curvature.block_operator(layers, factors, damping=decay),
    }


def gradients(fn: Callable, params: Any, rows: Any) -> jax.Array:
    """Return the gradient of `fn(params, row)` for every row: `[rows, parameters]`. Each row is a separate batch."""

    def one(row):
        return ravel_pytree(jax.grad(lambda p: jnp.sum(fn(p, jax.tree.map(lambda x: x[None], row))))(params))[0]

    return jax.jit(lambda rows: jax.lax.map(one, rows))(rows)


def influence(
    operator: kfac.curvature.BlockOperator | None, params: Any, measured: jax.Array, examples: jax.Array
) -> np.ndarray:
    """Return how much each measure grows if an example is left out: `[measures, examples]`.

    If an example's gradient is missing from the mean, the minimum moves by `H^-1 gradient / n` (Cook & Weisberg 1982;
    Koh & Liang 2017). If `operator` is None, the result is the product of the gradients.

    Args:
      operator: the curvature `H`.
      params: the parameters at the minimum.
      measured: the gradient of each measure.
      examples: the gradient of each example's loss.
    """
    if operator is not None:
        unravel, inverse = ravel_pytree(params)[1], operator.inv()
        measured = jax.vmap(lambda row: ravel_pytree(inverse @ unravel(row))[0])(measured)
    return np.asarray(measured @ examples.T) / len(examples)
