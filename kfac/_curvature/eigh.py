"""Eigendecompose both factors, and add the current step's damping to the products of their eigenvalues."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from kfac._curvature.preconditioner import (
    BlockPreconditioner,
    aligned,
    damping_of_blocks,
    identities,
    product,
)
from kfac._factors import Eigen, Kronecker, is_diagonal, per_block


@dataclasses.dataclass(frozen=True)
class Eigh(BlockPreconditioner):
    """`(A (x) G + l I)^-1` exactly: `Q_G [(Q_G^T V Q_A) / (l_G l_A^T + l)] Q_A^T`.

    ::

        optimizer = kfac.kfac(0.1, layers, preconditioner=kfac.Eigh())

    The damping `l` is the current step's damping, even if the decompositions `A = Q_A diag(l_A) Q_A^T` are older. The
    decompositions take several times as long as the inverses in `Cholesky`, and applying them takes twice as long. A
    block's condition number is in the 2-norm and includes the damping at its refresh.

    Args:
      precision: the arithmetic in which eigenvectors are applied: `"float32"`, `"bfloat16_3x"`, `"tensorfloat32"` or
        `"bfloat16"`. With `"bfloat16"` the eigenvectors are also stored in bfloat16. Decompositions are always computed
        in float32, and eigenvalues are stored in float32.
      relative: whether the damping of a block is in units of its mean eigenvalue, see `BlockPreconditioner`.

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
        dtype = self.state_dtype(factors.A.dtype)
        return Kronecker(
            identity_basis(factors.A, dtype), identity_basis(factors.G, dtype)
        )

    def refresh(self, state, factors, damping):
        """Decompose both factors."""
        # The new decompositions do not depend on the old state.
        new = decompose_factors(factors, self.state_dtype(factors.A.dtype))
        return new, condition_of(eigenvalues(new.A), eigenvalues(new.G), damping)

    def spectrum(self, state, factors, damping):
        """Decompose both factors, and return the damped products of their eigenvalues."""
        basis = decompose_factors(factors, factors.A.dtype)
        return basis, block_eigenvalues(basis) + damping[:, None, None]

    def apply(self, state, matrices, damping):
        """Divide the gradients by the damped eigenvalues in the eigenbasis."""
        factors = Kronecker(eigenvalues(state.A), eigenvalues(state.G))
        damping = damping_of_blocks(self, factors, damping)
        values = block_eigenvalues(state)
        damping = jnp.where(damping > 0, damping, jnp.nan).astype(values.dtype)
        scaled = rotate(matrices, state, self.precision, back=False)
        scaled = scaled / (values + per_block(damping, values))
        return rotate(scaled.astype(matrices.dtype), state, self.precision, back=True)


def identity_basis(
    stack: Array,
    dtype: DTypeLike,
) -> Eigen | Array:
    """Return decomposed identities with the shape of `stack` and with eigenvectors in `dtype`.

    For diagonals `[k, d]`, return the eigenvalues only, which are ones.
    """
    values = jnp.ones(stack.shape[:2], stack.dtype)
    if is_diagonal(stack):
        return values
    return Eigen(identities(stack.shape, dtype), values)


def decompose_factors(
    factors: Kronecker,
    dtype: DTypeLike,
) -> Kronecker:
    """Apply `decompose` to both factors."""
    return Kronecker(decompose(factors.A, dtype), decompose(factors.G, dtype))


def decompose(
    stack: Array,
    dtype: DTypeLike,
) -> Eigen | Array:
    """Return eigenvectors in `dtype` and eigenvalues of symmetric matrices `[k, d, d]`.

    For diagonals `[k, d]`, return the eigenvalues only. Negative eigenvalues become 0, because rounding can make the
    eigenvalues of a second moment negative.
    """
    if is_diagonal(stack):
        return jnp.maximum(stack, 0)
    # LAPACK expects column-major matrices. Passing the transpose, which is equal by symmetry, saves XLA a copy.
    vectors, values = lax.linalg.eigh(stack.mT, symmetrize_input=False)
    return Eigen(vectors.astype(dtype), jnp.maximum(values, 0))


def eigenvalues(side: Eigen | Array) -> Array:
    """Return one side's eigenvalues `[k, d]`. For a diagonal factor, `side` is the array of eigenvalues."""
    return side.values if isinstance(side, Eigen) else side


def block_eigenvalues(state: Kronecker) -> Array:
    """Return the blocks' eigenvalues `[k, d_out, d_in]`.

    They are the moments for blocks that have received any, otherwise `l_G l_A^T`, the eigenvalues of `A (x) G`.
    """
    products = eigenvalues(state.G)[:, :, None] * eigenvalues(state.A)[:, None, :]
    if state.moments is None:
        return products
    has_moments = state.moments.weight[:, None, None] > 0
    return jnp.where(has_moments, state.moments.average, products)


def condition_of(
    a: Array,
    g: Array,
    damping: Array,
) -> Array:
    """Return the condition numbers `[k]` of blocks `A (x) G`, given both factors' eigenvalues and `damping` `[k]`."""
    # If a schedule returns zero or NaN for the damping, the condition number must still not mark the decompositions as
    # failed.
    damping = jnp.where(damping > 0, damping, 0).astype(a.dtype)
    # Rounding can make the eigenvalues of a second moment negative.
    a = jnp.maximum(a, 0)
    g = jnp.maximum(g, 0)
    low = jnp.min(a, axis=1) * jnp.min(g, axis=1) + damping
    high = jnp.max(a, axis=1) * jnp.max(g, axis=1) + damping
    # NaN stays.
    return jnp.where(low <= 0, jnp.inf, high / jnp.where(low <= 0, 1, low))


def rotate(
    matrices: Array,
    state: Kronecker,
    precision: str,
    *,
    back: bool,
) -> Array:
    """Return `Q_G^T V Q_A`, or with `back` `Q_G V Q_A^T`. The eigenvectors of a diagonal factor are the identity."""

    def by_products(matrices, basis):
        g = basis.G
        a = basis.A
        if g is not None:
            left = "kab,kbc->kac" if back else "kba,kbc->kac"
            matrices = product(left, precision, g.dtype, matrices.dtype, g, matrices)
        if a is not None:
            right = "kac,kdc->kad" if back else "kac,kcd->kad"
            matrices = product(right, precision, a.dtype, matrices.dtype, matrices, a)
        return matrices

    def by_aligned_products(matrices, basis):
        rows, columns = matrices.shape[1:]
        aligned_basis = jax.tree.map(aligned, basis)
        return by_products(aligned(matrices), aligned_basis)[:, :rows, :columns]

    basis = Kronecker(_vectors(state.A), _vectors(state.G))
    return lax.platform_dependent(
        matrices, basis, cuda=by_aligned_products, default=by_products
    )


def _vectors(side: Eigen | Array | None) -> Array | None:
    """Return one side's eigenvectors, or None for the identity."""
    return side.vectors if isinstance(side, Eigen) else None
