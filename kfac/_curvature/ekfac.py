"""EKFAC: running averages of second moments in the eigenbasis, in the place of the products of eigenvalues."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kfac._curvature.cholesky import block_eigenvalues
from kfac._factors import Eigen, Kronecker


class Moments(NamedTuple):
    """Of `k` blocks, the second moments of per-example gradients in the eigenbasis that they are preconditioned in.

    Attributes:
      average: bias-corrected running average, `[k, d_out, d_in]`.
      weight: `[k]`, the sum of the weights in it; 0 before the first.
    """

    average: jax.Array
    weight: jax.Array


def corrected_eigenvalues(inverse: Kronecker, moments: Moments | None) -> jax.Array:
    """The eigenvalues that a block is taken to have, `[k, d_out, d_in]`.

    The moments where there are some; else, and without `moments`, the products of the eigenvalues of the factors.
    """
    products = block_eigenvalues(inverse)
    if moments is None:
        return products
    return jnp.where(moments.weight[:, None, None] > 0, moments.average, products)


def into_basis(average: jax.Array, old: Kronecker, new: Kronecker, changed: jax.Array) -> jax.Array:
    """Moments in a new eigenbasis: the diagonal, there, of the matrix that had them for eigenvalues in the old one.

    With `T = Q_new^T Q_old` of both sides it is `(T_G * T_G) s (T_A * T_A)^T`, `*` elementwise. So what has been learnt
    of a block stays where the basis has moved little, and their sum always.

    Args:
      average: `[k, d_out, d_in]`.
      old: eigendecompositions before.
      new: eigendecompositions from now on.
      changed: `[k]`, of which blocks they are others.
    """

    def one(block):
        average, old, new, changed = block
        return lax.cond(changed, _turned, lambda average, old, new: average, average, old, new)

    def vectors(inverse):
        assert isinstance(inverse.A, Eigen) and isinstance(inverse.G, Eigen)
        return Kronecker(inverse.A.vectors, inverse.G.vectors)

    blocks = average, vectors(old), vectors(new), changed
    return lax.cond(jnp.any(changed), lambda blocks: lax.map(one, blocks), lambda blocks: blocks[0], blocks)


def _turned(average: jax.Array, old: Kronecker, new: Kronecker) -> jax.Array:
    def squared(old, new):
        turn = jnp.matmul(new.astype(average.dtype).T, old.astype(average.dtype), precision=lax.Precision.HIGHEST)
        # Columns sum to 1, so that no part of the sum is lost where vectors are rounded to bfloat16.
        square = jnp.square(turn)
        return square / jnp.sum(square, axis=0)

    g, a = squared(old.G, new.G), squared(old.A, new.A)
    return jnp.einsum("ij,jk,lk->il", g, average, a, precision=lax.Precision.HIGHEST)
