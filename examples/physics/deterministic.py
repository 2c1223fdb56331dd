"""Whole batches without a rate to choose: the step that a quadratic model of the loss likes best."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

import kfac
from kfac._capture.outputs import marked
from kfac._varying import device_axes


def deterministic(layers: kfac.Layers, *, num_examples: int | None = None) -> optax.GradientTransformationExtraArgs:
    """K-FAC for whole batches, as of a differential equation: no rate, momentum or damping to choose.

    The step is the best combination `a d + b s` of K-FAC's direction `d` and the last step `s`: that at which the
    quadratic model with the *whole* Gauss-Newton matrix `F` of the batch has its minimum,

        h + <grad h, a d + b s> + <a d + b s, (F + l I) (a d + b s)> / 2

    (Martens & Grosse 2015, section 7). Its products with `F` are two forward-mode derivatives. The damping `l`, which
    blocks have as well, is a multiple of the loss, as Levenberg and Marquardt have it; the multiple begins at 1 and
    follows `adaptive_damping`, never below 0.1. A step after which the loss is larger is taken back. It takes the same
    batch in every step, a loss whose minimum is near zero, and statistics of the whole matrix::

        measure = kfac.value_and_grad(loss_fn, layers, fisher="expected")
        loss, grads, factors = measure(params, batch, fisher_key=key)
        value_fn = lambda params: loss_fn(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params, factors=factors, value_fn=value_fn)

    With minibatches the loss of each has a minimum of its own: use `kfac.kfac`.

    Args:
      layers: what `find_layers` returned.
      num_examples: how many examples the loss is the mean of, as for `value_and_grad`.

    Returns:
      An `optax.GradientTransformationExtraArgs`; `kfac.diagnostics` reports `damping`, `reduction_ratio`, `taken_back`.

    Raises:
      ValueError: as of `adaptive_damping`; in `update`, this is inside of `shard_map` or `pmap`. Several devices are
        used by placing parameters and batch on a mesh.

    References:
      Martens and Grosse, "Optimizing Neural Networks with Kronecker-factored Approximate Curvature", 2015,
      https://arxiv.org/abs/1503.05671
    """
    step = functools.partial(_quadratic_step, layers, num_examples)
    return kfac.presets.adaptive_damping(
        step, 1.0, every=1, decay=0.5, minimum=0.1, maximum=1e6, num_examples=num_examples
    )


def _quadratic_step(
    layers: kfac.Layers, num_examples: int | None, multiple: Any
) -> optax.GradientTransformationExtraArgs:
    def preconditioner(damping):
        return kfac.scale_by_kfac(layers, damping=damping, factor_decay=0.0, inverse=kfac.Eigh())

    def init(params):
        return preconditioner(1.0).init(params), optax.tree.zeros_like(params)

    def update(updates, state, params, *, value_fn, factors=None, **extra):
        del extra
        if device_axes():
            raise ValueError("deterministic measures the loss of the whole batch: use jax.jit on a mesh, not shard_map")
        loss = marked(value_fn, params, num_examples, "deterministic")
        (value, outputs), push = jax.linearize(loss.evaluate, params)
        # A loss that is negative up to a constant, or zero, has no scale of its own.
        damping = multiple * jnp.maximum(value, jnp.finfo(value.dtype).tiny)
        direction, inner = preconditioner(damping).update(updates, state[0], params, factors=factors)
        pair = jnp.stack([ravel_pytree(direction)[0], ravel_pytree(state[1])[0]])
        norms = jnp.linalg.norm(pair, axis=1, keepdims=True)  # which differ by orders of magnitude
        pair, unravel = pair / jnp.where(norms > 0, norms, 1), ravel_pytree(params)[1]
        rows = jnp.stack([ravel_pytree(loss.times_root(outputs, push(unravel(d))[1]))[0] for d in pair])
        slopes = jnp.matmul(pair, ravel_pytree(updates)[0], precision="highest")
        model = jnp.matmul(rows, rows.T, precision="highest") + damping * jnp.matmul(pair, pair.T, precision="highest")
        # The first step has no last one, and the direction may be that of the last step.
        sizes = jnp.diag(model)
        model += jnp.diag(16 * jnp.finfo(model.dtype).eps * sizes + (sizes == 0))
        step = unravel(-jnp.linalg.solve(model, slopes) @ pair)
        return step, (inner, step)

    return optax.GradientTransformationExtraArgs(init, update)
