"""Compute the orthonormal factor `Q` of a QR factorisation by matrix products."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from kfac._curvature.cholesky import add_diagonal, exact_product, factorise, solve
from kfac._curvature.inverse import aligned
from kfac._varying import as_varying, varying_axes

# Above this Frobenius norm of `X^T X - I`, the Gram matrix gets a shift, so that its Cholesky factor surely exists.
FAR = 0.5

# Below this norm, a first-order series replaces the Cholesky factor. Its error is the square of the norm.
NEAR = 1e-2

# The maximum number of passes. Almost parallel columns took seven passes in float32. In a refresh, two suffice.
PASSES = 20

# With this multiple, half of a padded matrix is still a multiple of the 8 elements that `aligned` needs.
ALIGNMENT = 16


class Iterate(NamedTuple):
    """The state of the iteration for `k` matrices.

    Attributes:
      passes: the number of passes.
      columns: the columns `X`, `[k, d, d]`.
      error: `X^T X - I`.
      distance: the Frobenius norm of `error`, `[k]`.
    """

    passes: Array
    columns: Array
    error: Array
    distance: Array


def orthonormal(stack: Array) -> Array:
    """Return the `Q` in a QR factorisation of `[k, d, d]`, up to the signs of its columns.

    CPUs use LAPACK. On CUDA, factorising a stack would be a loop over many small kernels, so all other platforms use
    matrix products.
    """
    return lax.platform_dependent(
        stack,
        cpu=lambda x: lax.linalg.qr(x, full_matrices=False)[0],
        default=orthonormal_by_products,
    )


def orthonormal_by_products(stack: Array) -> Array:
    """Return `X L^-T` with `L L^T = X^T X`, repeated until the columns are orthonormal to rounding.

    The columns are normalised first. If the columns are far from orthogonal, rounding can make their Gram matrix
    indefinite. The Gram matrix then gets a small shift, comparable to the rounding errors, and the next pass starts
    closer to orthonormal columns (shifted Cholesky-QR, Fukaya et al. 2020, https://arxiv.org/abs/1809.11085). If the
    columns are nearly orthonormal, with `X^T X = I + E`, the factor `L^-T` is `I - U` to first order in `E`. The matrix
    `U` is the part of `E` above the diagonal plus half of its diagonal.

    The columns must differ by more than rounding, and their squares must be finite.
    """
    d = stack.shape[-1]
    eps = jnp.finfo(stack.dtype).eps
    norms = jnp.sqrt(jnp.sum(jnp.square(stack), axis=1, keepdims=True))

    def iterate(passes, columns):
        gram = exact_product(columns.mT, columns)
        error = add_diagonal(gram, -jnp.ones_like(gram[:, 0, 0]))
        distance = jnp.sqrt(jnp.sum(jnp.square(error), axis=(1, 2)))
        return Iterate(passes, columns, error, distance)

    def by_factor(now):
        shift = jnp.where(now.distance > FAR, d * eps, 0)
        gram = add_diagonal(now.error, (1 + shift).astype(stack.dtype))
        return solve(now.columns, factorise(gram))

    def by_series(now):
        above = (jnp.triu(now.error) + jnp.triu(now.error, 1)) / 2
        return now.columns - exact_product(now.columns, above)

    def nearer(now):
        near = jnp.all(now.distance < NEAR)
        return iterate(now.passes + 1, lax.cond(near, by_series, by_factor, now))

    def unfinished(now):
        far = jnp.any(now.distance > 16 * d**0.5 * eps)
        return far & (now.passes < PASSES)

    passes = as_varying(jnp.int32(0), varying_axes(stack))
    start = iterate(passes, _aligned(stack / jnp.where(norms > 0, norms, 1)))
    return lax.while_loop(unfinished, nearer, start).columns[:, :d, :d]


def _aligned(stack: Array) -> Array:
    """Pad `[k, d, d]` with an identity to a multiple of `ALIGNMENT`, once for all products in the iteration."""
    d = stack.shape[-1]
    padded = aligned(stack, ALIGNMENT)
    tail = jnp.arange(padded.shape[-1]) >= d
    return padded + jnp.diag(tail.astype(stack.dtype))
