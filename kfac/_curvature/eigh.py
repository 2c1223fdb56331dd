"""Eigendecompose both factors, and add the current step's damping to the products of their eigenvalues."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kfac._curvature.inverse import (
    Inverse,
    aligned,
    damping_of_blocks,
    identities,
    product,
)
from kfac._factors import Eigen, Kronecker, is_diagonal, per_block


@dataclasses.dataclass(frozen=True)
class Eigh(Inverse):
    """`(A (x) G + l I)^-1` exactly: `Q_G [(Q_G^T V Q_A) / (l_G l_A^T + l)] Q_A^T`.

    The damping `l` is the current step's damping, even if the decompositions `A = Q_A diag(l_A) Q_A^T` are older. The
    decompositions take several times as long as the inverses in `Cholesky`, and applying them takes twice as long. A
    block's condition number is in the 2-norm and includes the damping at its refresh.

    Args:
      precision: the arithmetic in which eigenvectors are applied: `"float32"`, `"bfloat16_3x"`, `"tensorfloat32"` or
        `"bfloat16"`. With `"bfloat16"` the eigenvectors are also stored in bfloat16. Decompositions are always computed
        in float32, and eigenvalues are stored in float32.
      relative: whether the damping of a block is in units of its mean eigenvalue, see `Inverse`.

    Raises:
      ValueError: `precision` is not an accepted value, or `relative` is not a bool.

    References:
      Grosse and Martens, "A Kronecker-factored approximate Fisher matrix for convolution layers", 2016,
      https://arxiv.org/abs/1602.01407
    """

    damped = False
    products = 2
    flops = 9.0  # Golub & Van Loan 2013, section 8.3

    def init(self, factors):
        """Return identities. A diagonal factor has eigenvalues only."""
        dtype = self.kept_dtype(factors.A.dtype)
        return Kronecker(unturned(factors.A, dtype), unturned(factors.G, dtype))

    def refresh(self, kept, factors, damping):
        """Decompose both factors."""
        del kept  # the new decompositions do not depend on the old state
        dtype = self.kept_dtype(factors.A.dtype)
        new = Kronecker(decompose(factors.A, dtype), decompose(factors.G, dtype))
        return new, condition_of(
            ends(eigenvalues(new.A)), ends(eigenvalues(new.G)), damping
        )

    def spectrum(self, kept, factors, damping):
        """Decompose both factors, and return the damped products of their eigenvalues."""
        basis = Kronecker(
            *(decompose(factor, factor.dtype) for factor in (factors.A, factors.G))
        )
        return basis, block_eigenvalues(basis) + damping[:, None, None]

    def apply(self, kept, matrices, damping):
        """Divide the gradients by the damped eigenvalues in the eigenbasis."""
        damping = damping_of_blocks(
            self, Kronecker(eigenvalues(kept.A), eigenvalues(kept.G)), damping
        )
        values = block_eigenvalues(kept)
        damping = per_block(
            jnp.where(damping > 0, damping, jnp.nan).astype(values.dtype), values
        )
        scaled = rotate(matrices, kept, self.precision, back=False) / (values + damping)
        return rotate(scaled.astype(matrices.dtype), kept, self.precision, back=True)


def unturned(stack: jax.Array, dtype: Any) -> Eigen | jax.Array:
    """Return decomposed identities with the shape of `stack` and with eigenvectors in `dtype`.

    For diagonals `[k, d]`, return the eigenvalues only, which are ones.
    """
    values = jnp.ones(stack.shape[:2], stack.dtype)
    return (
        values if is_diagonal(stack) else Eigen(identities(stack.shape, dtype), values)
    )


def decompose(stack: jax.Array, dtype: Any) -> Eigen | jax.Array:
    """Return eigenvectors in `dtype` and eigenvalues of symmetric matrices `[k, d, d]`.

    For diagonals `[k, d]`, return the eigenvalues only. Negative eigenvalues become 0, because rounding can make the
    eigenvalues of a second moment negative.
    """
    if is_diagonal(stack):
        return jnp.maximum(stack, 0)
    # LAPACK expects column-major matrices. Passing the transpose, which is equal by symmetry, saves XLA a copy.
    vectors, values = lax.linalg.eigh(stack.mT, symmetrize_input=False)
    return Eigen(vectors.astype(dtype), jnp.maximum(values, 0))


def eigenvalues(side: Eigen | jax.Array) -> jax.Array:
    """Return one side's eigenvalues `[k, d]`. For a diagonal factor, `side` is the array of eigenvalues."""
    return side.values if isinstance(side, Eigen) else side


def block_eigenvalues(inverse: Kronecker) -> jax.Array:
    """Return the blocks' eigenvalues `[k, d_out, d_in]`.

    They are the moments for blocks that have received any, otherwise `l_G l_A^T`, the eigenvalues of `A (x) G`.
    """
    products = eigenvalues(inverse.G)[:, :, None] * eigenvalues(inverse.A)[:, None, :]
    if inverse.moments is None:
        return products
    return jnp.where(
        inverse.moments.weight[:, None, None] > 0, inverse.moments.average, products
    )


Ends = tuple[
    jax.Array, jax.Array
]  # the smallest and the largest eigenvalue of `k` matrices, `[k]` each


def ends(values: jax.Array) -> Ends:
    """Return the smallest and the largest eigenvalue of each matrix, `[k]` each, from `[k, d]`."""
    return jnp.min(values, axis=1), jnp.max(values, axis=1)


def condition_of(a: Ends, g: Any, damping: jax.Array) -> jax.Array:
    """Return the condition numbers `[k]` of blocks `A (x) G` with `damping` `[k]`.

    Args:
      a: the smallest and the largest eigenvalue of each `A`.
      g: the same for each `G`, or two numbers.
      damping: `[k]`.
    """
    # Rounding can make the eigenvalues of a second moment negative. If a schedule returns zero or NaN for the damping,
    # the condition number must still not mark the decompositions as failed.
    damping = jnp.where(damping > 0, damping, 0).astype(a[0].dtype)
    low, high = (
        jnp.maximum(x, 0) * jnp.maximum(y, 0) + damping
        for x, y in zip(a, g, strict=True)
    )
    return jnp.where(low <= 0, jnp.inf, high / jnp.where(low <= 0, 1, low))  # NaN stays


def rotate(
    matrices: jax.Array, inverse: Kronecker, precision: str, *, back: bool
) -> jax.Array:
    """Return `Q_G^T V Q_A`, or with `back` `Q_G V Q_A^T`. The eigenvectors of a diagonal factor are the identity."""

    def by_aligned_products(matrices, vectors):
        rows, columns = matrices.shape[1:]
        return by_products(aligned(matrices), jax.tree.map(aligned, vectors))[
            :, :rows, :columns
        ]

    def by_products(matrices, vectors):
        g, a = vectors
        if g is not None:
            left = "kab,kbc->kac" if back else "kba,kbc->kac"
            matrices = product(left, precision, g.dtype, matrices.dtype, g, matrices)
        if a is not None:
            right = "kac,kdc->kad" if back else "kac,kcd->kad"
            matrices = product(right, precision, a.dtype, matrices.dtype, matrices, a)
        return matrices

    vectors = [
        side.vectors if isinstance(side, Eigen) else None
        for side in (inverse.G, inverse.A)
    ]
    return lax.platform_dependent(
        matrices, vectors, cuda=by_aligned_products, default=by_products
    )
