"""Define optimizers that take over one part of K-FAC's default each: its adaptive rates, or its step lengths."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

# K-FAC's default has the same values: the bounds of the cosine, the largest change in a step, the cosine beyond a bound
# for this change, the share that is forgotten, and the highest multiplier.
AGREES, TOO_FAR, FOLLOWS, FULL, FORGETS, FASTEST = 0.02, -0.1, 0.2, 0.1, 0.02, 4.0
BESIDE_KERNELS = 0.1  # root mean square of the steps of vectors and tables, relative to the rate


class Adaptive(NamedTuple):
    """Hold the wrapped state, a multiplier and the last update for each parameter, the step, and the highest rate."""

    inner: Any
    multipliers: Any
    last: Any
    step: jax.Array
    highest: jax.Array


def adaptive_rates(inner: optax.GradientTransformation, rate: Any) -> optax.GradientTransformation:
    """Multiply each parameter's update by 1 to 4, as K-FAC's `adaptive_layer_rates` does for each layer.

    A multiplier grows if the loss still falls along the parameter's last update, and falls if this update went too far.
    """

    def init(params: Any) -> Adaptive:
        ones, zeros = jax.tree.map(lambda p: jnp.ones(()), params), jax.tree.map(jnp.zeros_like, params)
        return Adaptive(inner.init(params), ones, zeros, jnp.zeros((), jnp.int32), jnp.zeros(()))

    def update(grads: Any, state: Adaptive, params: Any = None) -> tuple[Any, Adaptive]:
        now, before = rate(state.step), rate(jnp.maximum(state.step - 1, 0))
        full = (state.step > 0) & (now > 0) & (now <= before) & (now >= state.highest / 2)

        def adapted(multiplier: jax.Array, grad: jax.Array, last: jax.Array) -> jax.Array:
            norms = jnp.linalg.norm(grad.ravel()) * jnp.linalg.norm(last.ravel())
            cosine = -jnp.vdot(grad, last) / jnp.where(norms > 0, norms, 1)
            beyond = cosine - jnp.clip(cosine, TOO_FAR, AGREES)
            beyond = jnp.minimum(beyond, jnp.where(full, jnp.inf, 0))
            grown = multiplier ** (1 - FORGETS) * jnp.exp(FOLLOWS * jnp.clip(beyond / FULL, -1, 1))
            return jnp.clip(grown, 1, FASTEST)

        multipliers = jax.tree.map(adapted, state.multipliers, grads, state.last)
        last, held = inner.update(grads, state.inner, params)
        updates = jax.tree.map(jnp.multiply, multipliers, last)
        return updates, Adaptive(held, multipliers, last, state.step + 1, jnp.maximum(state.highest, now))

    return optax.GradientTransformation(init, update)


def spectral_norm(matrix: jax.Array) -> jax.Array:
    """Estimate a matrix's largest singular value from below by eight power iterations."""
    vector = jnp.cos(1.0 + jnp.arange(matrix.shape[1]) ** 1.5)
    for _ in range(8):
        vector = matrix.T @ (matrix @ vector)
        vector = vector / jnp.maximum(jnp.linalg.norm(vector), 1e-30)
    return jnp.linalg.norm(matrix @ vector)


def spectral_step(matrix: jax.Array, overlap: float) -> jax.Array:
    """Give a kernel's step, [d_in, d_out], the spectral norm `sqrt(overlap * max(1, d_out / d_in))`."""
    d_in, d_out = matrix.shape
    length = (overlap * max(1.0, d_out / d_in)) ** 0.5
    return matrix * length / jnp.maximum(spectral_norm(matrix), 1e-30)


def vector_step(step: jax.Array) -> jax.Array:
    """Give the step of a vector or a table the root mean square 0.1 over its nonzero elements."""
    mean = jnp.sum(step**2) / jnp.maximum(jnp.sum(step != 0), 1)
    return step * BESIDE_KERNELS / jnp.maximum(jnp.sqrt(mean), 1e-30)
