"""Orthonormal columns that span what those of a matrix do, one after the other: the `Q` of a QR factorisation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from kfac._curvature.cholesky import add_diagonal, exact_product, factorise, solve
from kfac._varying import as_varying, varying_axes

# Where columns are as far from orthogonal as this, a Gram matrix needs a shift to have a Cholesky factor for sure.
FAR = 0.5

# More than were ever needed: columns that are all but parallel took seven in float32, those of a refresh take two.
PASSES = 20


def orthonormal(stack: jax.Array) -> jax.Array:
    """The `Q` of `[k, d, d]`, but for the signs of its columns.

    LAPACK's on CPUs. On CUDA a factorisation of a stack is a loop of single ones, each of many small kernels: there it
    is made of matrix products.
    """
    return lax.platform_dependent(
        stack, cpu=lambda x: lax.linalg.qr(x, full_matrices=False)[0], default=orthonormal_by_products
    )


def orthonormal_by_products(stack: jax.Array) -> jax.Array:
    """`X L^-T` with `L L^T = X^T X`, again and again until it is orthonormal to rounding.

    Columns get the norm 1 first. Where they are far from orthogonal, rounding can make their Gram matrix indefinite. It
    gets a shift of rounding's size then, and the next pass begins closer (shifted Cholesky-QR, Fukaya et al. 2020,
    https://arxiv.org/abs/1809.11085). Columns must differ by more than rounding, and their squares be finite: `follow`
    divides by the mean eigenvalue, and adds `FLOOR`.
    """
    d = stack.shape[-1]
    eps = jnp.finfo(stack.dtype).eps
    norms = jnp.sqrt(jnp.sum(jnp.square(stack), axis=1, keepdims=True))

    def measured(x):
        gram = exact_product(x.mT, x)
        beside = jnp.sum(jnp.square(add_diagonal(gram, -jnp.ones_like(gram[:, 0, 0]))), axis=(1, 2))
        return x, gram, jnp.sqrt(beside)

    def nearer(now):
        count, (x, gram, distance) = now
        shift = jnp.where(distance > FAR, d * eps, 0)
        return count + 1, measured(solve(x, *factorise(add_diagonal(gram, shift.astype(x.dtype)))))

    def unfinished(now):
        count, (_, _, distance) = now
        return jnp.any(distance > 16 * d**0.5 * eps) & (count < PASSES)

    start = as_varying(jnp.int32(0), varying_axes(stack)), measured(stack / jnp.where(norms > 0, norms, 1))
    return lax.while_loop(unfinished, nearer, start)[1][0]
