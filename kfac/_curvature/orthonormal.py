"""Compute the orthonormal factor `Q` of a QR factorisation by matrix products."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from kfac._factors import per_block
from kfac._linalg import add_diagonal, aligned, close_product, factorise, solve
from kfac._mesh import as_varying, varying_axes

# Above this Frobenius norm of `X^T X - I`, the Gram matrix gets a shift, so that its Cholesky factor exists.
FAR = 0.5

# The factor on the shift when a Gram matrix has no Cholesky factor in spite of it.
MORE = 16.0

# The maximum number of passes. In the first refreshes a few are needed, later one.
PASSES = 20

# With this multiple, half of a padded matrix is still a multiple of the 8 elements that `aligned` needs.
ALIGNMENT = 16


class Iterate(NamedTuple):
    """The state of the iteration for `k` matrices.

    Attributes:
      passes: the number of passes, `[k]`.
      columns: the columns `X`, `[k, d, d]`.
      error: `X^T X - I`.
      distance: the Frobenius norm of `error`, `[k]`.
      shift: the shift for the next pass, if the matrix needs one, `[k]`.
    """

    passes: Array
    columns: Array
    error: Array
    distance: Array
    shift: Array


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
    """Return `X L^-T` with `L L^T = X^T X`, repeated until the columns are orthonormal.

    On GPUs, products between columns differ from 0 and 1 by up to 1e-4 in float32. On other platforms the difference is
    rounding error.

    The columns are normalised first. If they are far from orthogonal, rounding can make their Gram matrix indefinite.
    It then gets a shift comparable to the rounding errors, and the next pass starts closer to orthonormal columns
    (shifted Cholesky-QR, Fukaya et al. 2020, https://arxiv.org/abs/1809.11085). If the Cholesky factor does not exist
    in spite of the shift, the next pass repeats with a larger shift. Fukaya's shift is always sufficient, but it is so
    large that every matrix would need an extra pass.

    The last pass needs no Cholesky factor. For `X^T X = I + E` with a small `E`, `L^-T` is `I - U` to first order. The
    matrix `U` is the part of `E` above the diagonal plus half of its diagonal. The error is `E` squared.

    Rounding in a Gram matrix only changes `L`, and the next pass corrects its effect, so Gram matrices are
    `close_product`s. Rounding in `X L^-T` would change the directions of columns that are nearly parallel.

    The columns must differ by more than rounding, and their squares must be finite.
    """
    k, d = stack.shape[:2]
    eps = jnp.finfo(stack.dtype).eps
    # Squared, this distance is the accepted error.
    near = (16 * d**0.5 * eps) ** 0.5
    begin = jnp.zeros(k, jnp.int32), jnp.full(k, d * eps, stack.dtype)
    passes, least = as_varying(begin, varying_axes(stack))
    norms = jnp.sqrt(jnp.sum(jnp.square(stack), axis=1, keepdims=True))

    def iterate(passes, columns):
        gram = close_product(columns.mT, columns)
        error = add_diagonal(gram, -jnp.ones_like(gram[:, 0, 0]))
        distance = jnp.sqrt(jnp.sum(jnp.square(error), axis=(1, 2)))
        return Iterate(passes, columns, error, distance, least)

    def nearer(now):
        shift = jnp.where(now.distance > FAR, now.shift, 0)
        gram = add_diagonal(now.error, 1 + shift)
        new = iterate(now.passes + 1, solve(now.columns, factorise(gram)))
        again = now._replace(passes=new.passes, shift=MORE * now.shift)
        succeeded = jnp.isfinite(new.distance)

        def choose(new, again):
            return jnp.where(per_block(succeeded, new), new, again)

        return jax.tree.map(choose, new, again)

    def unfinished(now):
        # A matrix that is not finite has a distance of NaN, and is finished.
        return jnp.any((now.distance > near) & (now.passes < PASSES))

    start = iterate(passes, _aligned(stack / jnp.where(norms > 0, norms, 1)))
    last = lax.while_loop(unfinished, nearer, start)
    above = (jnp.triu(last.error) + jnp.triu(last.error, 1)) / 2
    columns = last.columns - close_product(last.columns, above)
    return columns[:, :d, :d]


def _aligned(stack: Array) -> Array:
    """Pad `[k, d, d]` with an identity to a multiple of `ALIGNMENT`, once for all products in the iteration."""
    padded = aligned(stack, ALIGNMENT)
    tail = jnp.arange(padded.shape[-1]) >= stack.shape[-1]
    return padded + jnp.diag(tail.astype(stack.dtype))
