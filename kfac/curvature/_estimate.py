"""Averages the factors over a data set, batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import optax
from jax import Array
from optax import Params

from kfac._capture.value_and_grad import Evaluator
from kfac._factors import Basis, Factors
from kfac._layers import Layers
from kfac._mesh import on_mesh


def estimate_factors(
    loss_fn: Callable,
    layers: Layers,
    params: Params,
    batches: Iterable[Any],
    *,
    fisher: str = "empirical",
    key: Array | None = None,
    basis: Mapping[str, Basis] | None = None,
    has_aux: bool = False,
    num_examples: int | None = None,
) -> Factors:
    """Average the factors over the examples of all batches, at fixed parameters.

    Memory does not grow with the number of batches. Batches may differ in size; each new size is compiled once. To use
    several devices, place `params` and the batches on a mesh.

    Args:
      loss_fn: `loss_fn(params, batch)`, the mean loss of a batch, as for `value_and_grad`.
      layers: the layers that `find_layers` returned for `loss_fn`.
      params: the parameters.
      batches: an iterable of batches, such as a list or a data loader. It is iterated once.
      fisher: `"empirical"`, `"sampled"` or `"expected"`, as for `value_and_grad`.
      key: a PRNG key, required by `"sampled"` and `"expected"`. The index of each batch is folded into it.
      basis: the eigenvectors that `kfac.curvature.eigenbasis(factors, layers)` returns for the factors of a first pass.
        With `basis`, the result also holds the moments in this basis. Pass both to
        `kfac.curvature.block_operator(layers, factors, basis=basis)`.
      has_aux: whether `loss_fn` returns a pair.
      num_examples: the number of examples in each batch, as for `value_and_grad`.

    Returns:
      A `Factors`.

    Raises:
      ValueError: `batches` is empty. `value_and_grad` lists the other errors.
    """
    evaluate = Evaluator(loss_fn, layers, has_aux, fisher, num_examples, "float32")

    @jax.jit(donate_argnums=0)
    @on_mesh
    def added(total, params, batch, number):
        own_key = None if key is None else jax.random.fold_in(key, number)
        found = evaluate(params, (batch,), {}, own_key, basis, gradients=False)
        n = float(found.num_examples)
        weighted = optax.tree.scale(n, found.factors.whole()), n
        return weighted if total is None else optax.tree.add(total, weighted)

    total = None
    for number, batch in enumerate(batches):
        total = added(total, params, batch, number)
    if total is None:
        raise ValueError("batches is empty: there is nothing to take statistics of")
    factors, count = total
    return optax.tree.scale(1 / count, factors)
