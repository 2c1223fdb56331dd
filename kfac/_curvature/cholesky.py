"""Invert both damped factors by Cholesky factorisations, in float32 or better."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from kfac._curvature.eigh import decompose_factors, outer_products
from kfac._curvature.preconditioner import BlockPreconditioner, with_option_hints
from kfac._factors import Basis, Kronecker, diagonals, is_diagonal
from kfac._linalg import add_diagonal, identities, product, spd_inverse


class CholeskyState(NamedTuple):
    """The inverses of `k` blocks' damped factors.

    Attributes:
      A: `(A + pi sqrt(l) I)^-1`, `[k, d_in, d_in]`, or `[k, d_in]` for a diagonal factor.
      G: `(G + sqrt(l)/pi I)^-1`, `[k, d_out, d_out]`, or `[k, d_out]` for a diagonal factor.
    """

    A: Array
    G: Array


@with_option_hints
@dataclasses.dataclass(frozen=True)
class Cholesky(BlockPreconditioner):
    """`(G + sqrt(l)/pi I)^-1 V (A + pi sqrt(l) I)^-1`: both factors inverted, with factored Tikhonov damping.

    ::

        optimizer = kfac.kfac(0.1, layers, preconditioner=kfac.Cholesky())

    Here `pi^2 = (tr A / dim A) / (tr G / dim G)` (Martens & Grosse 2015, section 6.3). A changed damping takes effect
    at the next refresh. A block's condition number is the larger 1-norm condition number of its two damped factors.

    Args:
      precision: the arithmetic in which inverses are applied: `"float32"`, `"bfloat16_3x"`, `"tensorfloat32"` or
        `"bfloat16"`. With `"bfloat16"` the inverses are also stored in bfloat16. They are always computed in float32.
      scale_damping: whether a block's damping is in units of its mean eigenvalue, see `BlockPreconditioner`.

    Raises:
      ValueError: `precision` is not an accepted value, or `scale_damping` is not a bool.

    References:
      Martens and Grosse, "Optimizing Neural Networks with Kronecker-factored Approximate Curvature", 2015,
      https://arxiv.org/abs/1503.05671
    """

    padding = 1.0

    def init(self, factors):
        """Return identities in the shapes of `A` and `G`."""
        dtype = self.state_dtype(factors.A.dtype)
        return CholeskyState(
            identities(factors.A.shape, dtype), identities(factors.G.shape, dtype)
        )

    def refresh(self, state, factors, damping):
        """Invert both damped factors."""
        on_a, on_g = split_damping(factors, damping)
        a, condition_a = invert_damped(factors.A, on_a, state.A.dtype)
        g, condition_g = invert_damped(factors.G, on_g, state.G.dtype)
        usable = (condition_a > 0) & (condition_g > 0)
        condition = jnp.where(usable, jnp.maximum(condition_a, condition_g), 0)
        return CholeskyState(a, g), condition

    def apply(self, state, matrices, damping):
        """Return `G^-1 V A^-1`."""
        # The inverses contain the damping of their refresh.
        dtype = state.A.dtype
        wide = matrices.dtype
        # Compute the transpose, because most kernels and their gradients have the output axis last in memory.
        left = "ka,kac->kac" if is_diagonal(state.A) else "kab,kbc->kac"
        half = product(left, self.precision, dtype, wide, state.A, matrices.mT)
        right = "kac,kc->kac" if is_diagonal(state.G) else "kac,kcd->kad"
        return product(right, self.precision, dtype, wide, half, state.G).mT

    def spectrum(self, state, factors, damping):
        """Return both factors' eigenvectors, and the products of the damped factors' eigenvalues."""
        on_a, on_g = split_damping(factors, damping)
        a, g = decompose_factors(factors, factors.A.dtype)
        values = outer_products(g.values + on_g[:, None], a.values + on_a[:, None])
        return Basis(a.vectors, g.vectors), values


def split_damping(
    factors: Kronecker,
    damping: Array,
) -> tuple[Array, Array]:
    """Return the factored Tikhonov damping for `A` and for `G`, each `[k]`, from `damping` `[k]`.

    With `pi^2 = (tr A / dim A) / (tr G / dim G)`, the diagonal of `A` gets `pi sqrt(damping)`, and the diagonal of `G`
    gets `sqrt(damping) / pi` (Martens & Grosse 2015, section 6.3). If a trace is zero, `pi` is 1.
    """
    a = jnp.mean(diagonals(factors.A), axis=1)
    g = jnp.mean(diagonals(factors.G), axis=1)
    usable = (a > 0) & (g > 0)
    ratio = jnp.sqrt(jnp.where(usable, a, 1)) / jnp.sqrt(jnp.where(usable, g, 1))
    pi = jnp.where(usable, ratio, 1)
    root = jnp.sqrt(damping.astype(pi.dtype))
    return pi * root, root / pi


def invert_damped(
    stack: Array,
    amount: Array,
    dtype: DTypeLike,
) -> tuple[Array, Array]:
    """Return the inverses of `stack[k] + amount[k] I` in `dtype`, and the condition numbers in the 1-norm.

    A condition number that is not finite is returned as 0, which marks a failed inversion.
    """
    damped = add_diagonal(stack, amount)
    inverse = spd_inverse(damped)
    # The condition number reveals an overflow during the inversion, after which the inverse is zero, and so finite.
    condition = _one_norm(damped) * _one_norm(inverse)
    return inverse.astype(dtype), jnp.where(jnp.isfinite(condition), condition, 0)


def _one_norm(stack: Array) -> Array:
    columns = jnp.abs(stack)
    if not is_diagonal(stack):
        columns = jnp.sum(columns, axis=-2)
    return jnp.max(columns, axis=-1)
