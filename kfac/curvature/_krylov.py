"""Krylov methods for a symmetric matrix that is known by its products: conjugate gradients and Lanczos' method."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

Product = Callable[[Array], Array]


def matmul(a: Array, b: Array) -> Array:
    """Multiply in full precision."""
    return jnp.matmul(a, b, precision="highest")


def first_column(fn: Product, matrix: Array) -> Array:
    """Return `fn(T) e_1` for a small symmetric matrix `T`; `fn` maps eigenvalues."""
    values, rotation = jnp.linalg.eigh(matrix)
    first = rotation[0]
    return matmul(rotation, jnp.where(first == 0, 0.0, first * fn(values)))


def lanczos(
    product: Product,
    start: Array,
    steps: int,
) -> tuple[Array, Array, Array]:
    """Run Lanczos' method with full reorthogonalization.

    Each new vector is orthogonalized twice against all earlier vectors. If the Krylov space is exhausted, a random
    vector continues the basis, and the off-diagonal entry between this vector and its predecessor is zero.

    Returns:
      An orthonormal basis `[steps, p]` whose first vector is parallel to `start`, the tridiagonal matrix
      `[steps, steps]`, and the next off-diagonal entry.
    """
    epsilon = jnp.finfo(start.dtype).eps

    def orthogonal(v, basis):
        for _ in range(2):
            v = v - matmul(matmul(basis, v), basis)
        return v

    def unit(v):
        norm = jnp.linalg.norm(v)
        return v / jnp.where(norm > 0, norm, 1)

    def step(k, state):
        basis, alphas, betas, largest = state
        new = product(basis[k])
        alpha = jnp.vdot(basis[k], new)
        new = orthogonal(new, basis)
        beta = jnp.linalg.norm(new)
        largest = jnp.maximum(largest, jnp.abs(alpha) + beta)
        exhausted = beta <= 16 * epsilon * largest
        key = jax.random.fold_in(jax.random.key(0), k)
        random_vector = jax.random.normal(key, new.shape, new.dtype)
        new = unit(orthogonal(unit(jnp.where(exhausted, random_vector, new)), basis))
        basis = basis.at[k + 1].set(new)
        alphas = alphas.at[k].set(alpha)
        betas = betas.at[k].set(jnp.where(exhausted, 0, beta))
        return basis, alphas, betas, largest

    basis = jnp.zeros((steps + 1, start.size), start.dtype).at[0].set(unit(start))
    empty = jnp.zeros(steps, start.dtype)
    initial = basis, empty, empty, jnp.zeros((), start.dtype)
    basis, alphas, betas, _ = lax.fori_loop(0, steps, step, initial)
    beside = betas[:-1]
    tridiagonal = jnp.diag(alphas) + jnp.diag(beside, 1) + jnp.diag(beside, -1)
    return basis[:-1], tridiagonal, betas[-1]


def conjugate_gradients(
    product: Product,
    b: Array,
    precondition: Product,
    tolerance: float,
    max_steps: int,
) -> tuple[Array, Array, Array]:
    """Solve `M x = b` by conjugate gradients.

    Args:
      product: multiplies a vector by `M`.
      b: the right-hand side, `[p]`.
      precondition: multiplies a vector by an approximate inverse of `M`.
      tolerance: stop when the residual norm is at most `tolerance` times the norm of `b`.
      max_steps: the maximum number of steps.

    Returns:
      The solution, the number of steps, and the residual norm divided by the norm of `b`.
    """
    size = jnp.linalg.norm(b)

    def unfinished(state):
        _, r, _, _, k = state
        return (jnp.linalg.norm(r) > tolerance * size) & (k < max_steps)

    def step(state):
        x, r, p, rz, k = state
        moved = product(p)
        rate = rz / jnp.vdot(p, moved)
        x = x + rate * p
        r = r - rate * moved
        z = precondition(r)
        new = jnp.vdot(r, z)
        return x, r, z + new / rz * p, new, k + 1

    z = precondition(b)
    initial = jnp.zeros_like(b), b, z, jnp.vdot(b, z), jnp.zeros((), jnp.int32)
    x, r, _, _, k = lax.while_loop(unfinished, step, initial)
    return x, k, jnp.linalg.norm(r) / jnp.where(size > 0, size, 1)
