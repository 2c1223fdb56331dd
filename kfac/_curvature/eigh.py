"""Eigendecompose both factors, and add the current step's damping to the products of their eigenvalues."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from kfac._curvature.preconditioner import (
    BlockPreconditioner,
    damping_of_blocks,
    with_option_hints,
)
from kfac._factors import Basis, Kronecker, is_diagonal, per_block
from kfac._linalg import aligned, identities, product


class Eigen(NamedTuple):
    """The eigendecompositions `vectors diag(values) vectors^T` of `k` factors.

    Attributes:
      vectors: the eigenvectors, `[k, d, d]`. None for diagonal factors, whose eigenvectors are the identity.
      values: the eigenvalues, not negative, `[k, d]`.
    """

    vectors: Array | None
    values: Array


class EighState(NamedTuple):
    """The decomposed factors of `k` blocks, without damping."""

    A: Eigen
    G: Eigen


@with_option_hints
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
      scale_damping: whether a block's damping is in units of its mean eigenvalue, see `BlockPreconditioner`.

    Raises:
      ValueError: `precision` is not an accepted value, or `scale_damping` is not a bool.

    References:
      Grosse and Martens, "A Kronecker-factored approximate Fisher matrix for convolution layers", 2016,
      https://arxiv.org/abs/1602.01407
    """

    damped = False
    padding = 1.0
    products = 2
    flops_per_cube = 9.0  # Golub & Van Loan 2013, section 8.3

    def init(self, factors):
        """Return decomposed identities."""
        dtype = self.state_dtype(factors.A.dtype)
        return EighState(
            decomposed_identities(factors.A, dtype),
            decomposed_identities(factors.G, dtype),
        )

    def refresh(self, state, factors, damping):
        """Decompose both factors."""
        # The new decompositions do not depend on the old state.
        new = decompose_factors(factors, self.state_dtype(factors.A.dtype))
        return new, condition_of(new.A.values, new.G.values, damping)

    def spectrum(self, state, factors, damping):
        """Decompose both factors, and return the damped products of their eigenvalues."""
        a, g = decompose_factors(factors, factors.A.dtype)
        values = outer_products(g.values, a.values) + damping[:, None, None]
        return Basis(a.vectors, g.vectors), values

    def apply(self, state, matrices, damping):
        """Divide the gradients by the damped eigenvalues in the eigenbasis."""
        diagonal_factors = Kronecker(state.A.values, state.G.values)
        damping = damping_of_blocks(self, diagonal_factors, damping)
        values = self._eigenvalues(state)
        damping = jnp.where(damping > 0, damping, jnp.nan).astype(values.dtype)
        turn = functools.partial(
            rotate,
            precision=self.precision,
            rows=state.G.vectors,
            columns=state.A.vectors,
        )
        scaled = turn(matrices, back=False) / (values + per_block(damping, values))
        return turn(scaled.astype(matrices.dtype), back=True)

    def _eigenvalues(self, state: Any) -> Array:
        """Return the blocks' eigenvalues without damping, `[k, d_out, d_in]`."""
        return outer_products(state.G.values, state.A.values)


def decomposed_identities(
    stack: Array,
    dtype: DTypeLike,
) -> Eigen:
    """Return decomposed identities with the shape of `stack` and with eigenvectors in `dtype`."""
    vectors = None if is_diagonal(stack) else identities(stack.shape, dtype)
    return Eigen(vectors, jnp.ones(stack.shape[:2], stack.dtype))


def decompose_factors(factors: Kronecker, dtype: DTypeLike) -> EighState:
    """Apply `decompose` to both factors."""
    return EighState(decompose(factors.A, dtype), decompose(factors.G, dtype))


def decompose(
    stack: Array,
    dtype: DTypeLike,
) -> Eigen:
    """Decompose symmetric matrices `[k, d, d]` or diagonals `[k, d]`, with eigenvectors in `dtype`.

    Negative eigenvalues become 0, because rounding can make the eigenvalues of a second moment negative.
    """
    if is_diagonal(stack):
        return Eigen(None, jnp.maximum(stack, 0))
    # LAPACK expects column-major matrices. Passing the transpose, which is equal by symmetry, saves XLA a copy.
    vectors, values = lax.linalg.eigh(stack.mT, symmetrize_input=False)
    return Eigen(vectors.astype(dtype), jnp.maximum(values, 0))


def outer_products(
    g: Array,
    a: Array,
) -> Array:
    """Return `l_G l_A^T`, the eigenvalues `[k, d_out, d_in]` of `A (x) G`, from both factors' eigenvalues."""
    return g[:, :, None] * a[:, None, :]


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
    *,
    rows: Array | None,
    columns: Array | None,
    precision: str,
    back: bool,
) -> Array:
    """Return `R^T V C`, or with `back` `R V C^T`.

    Args:
      matrices: `V`, `[k, m, n]`.
      rows: the basis `R` of the rows' space, `[k, m, m]`. None stands for the identity.
      columns: the basis `C` of the columns' space, `[k, n, n]`, or None.
      precision: the arithmetic, an option of `BlockPreconditioner`.
      back: whether to return from the bases.
    """

    def by_products(x, rows, columns):
        if rows is not None:
            left = "kab,kbc->kac" if back else "kba,kbc->kac"
            x = product(left, precision, rows.dtype, x.dtype, rows, x)
        if columns is not None:
            right = "kac,kdc->kad" if back else "kac,kcd->kad"
            x = product(right, precision, columns.dtype, x.dtype, x, columns)
        return x

    def by_aligned_products(*arrays):
        m, n = matrices.shape[1:]
        return by_products(*jax.tree.map(aligned, arrays))[:, :m, :n]

    return lax.platform_dependent(
        matrices, rows, columns, cuda=by_aligned_products, default=by_products
    )
