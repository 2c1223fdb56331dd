"""Invert both damped factors by Cholesky factorisations.

All functions work on stacks of equally shaped matrices, in float32 or better, with matrix products at the highest
precision. Reduced-precision products (TF32, bfloat16 passes) inside a factorisation would lose the small eigenvalues,
for which damping matters most.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kfac._curvature.eigh import decompose, eigenvalues
from kfac._curvature.inverse import Inverse, aligned, identities, product
from kfac._factors import Kronecker, diagonals, is_diagonal

LEAF = 600  # larger matrices are split into halves; smaller leaves gain little and take time to compile


@dataclasses.dataclass(frozen=True)
class Cholesky(Inverse):
    """`(G + sqrt(l)/pi I)^-1 V (A + pi sqrt(l) I)^-1`: both factors inverted, with factored Tikhonov damping.

    Here `pi^2 = (tr A / dim A) / (tr G / dim G)` (Martens & Grosse 2015, section 6.3). A changed damping takes effect
    at the next refresh. A block's condition number is the larger 1-norm condition number of its two damped factors.

    Args:
      precision: the arithmetic in which inverses are applied: `"float32"`, `"bfloat16_3x"`, `"tensorfloat32"` or
        `"bfloat16"`. With `"bfloat16"` the inverses are also stored in bfloat16. They are always computed in float32.
      relative: whether the damping of a block is in units of its mean eigenvalue, see `Inverse`.

    Raises:
      ValueError: `precision` is not an accepted value, or `relative` is not a bool.

    References:
      Martens and Grosse, "Optimizing Neural Networks with Kronecker-factored Approximate Curvature", 2015,
      https://arxiv.org/abs/1503.05671
    """

    def init(self, factors):
        """Return identities in the shapes of `A` and `G`."""
        dtype = self.kept_dtype(factors.A.dtype)
        return Kronecker(
            identities(factors.A.shape, dtype), identities(factors.G.shape, dtype)
        )

    def refresh(self, kept, factors, damping):
        """Invert both damped factors."""
        on_a, on_g = split_damping(factors, damping)
        a, condition_a = invert_damped(factors.A, on_a, kept.A.dtype)
        g, condition_g = invert_damped(factors.G, on_g, kept.G.dtype)
        both = (condition_a > 0) & (condition_g > 0)
        return Kronecker(a, g), jnp.where(
            both, jnp.maximum(condition_a, condition_g), 0
        )

    def apply(self, kept, matrices, damping):
        """Return `G^-1 V A^-1`."""
        del damping  # the inverses contain the damping of their refresh
        dtype, wide = kept.A.dtype, matrices.dtype
        # Compute the transpose, because most kernels and their gradients have the output axis last in memory.
        left = "ka" if is_diagonal(kept.A) else "kab"
        half = product(
            f"{left},k{left[-1]}c->kac",
            self.precision,
            dtype,
            wide,
            kept.A,
            matrices.mT,
        )
        right = "kac,kc->kac" if is_diagonal(kept.G) else "kac,kcd->kad"
        return product(right, self.precision, dtype, wide, half, kept.G).mT

    def spectrum(self, kept, factors, damping):
        """Return both factors' eigenvectors, and the products of the damped factors' eigenvalues."""
        on_a, on_g = split_damping(factors, damping)
        basis = Kronecker(
            *(decompose(factor, factor.dtype) for factor in (factors.A, factors.G))
        )
        g, a = (
            eigenvalues(basis.G) + on_g[:, None],
            eigenvalues(basis.A) + on_a[:, None],
        )
        return basis, g[:, :, None] * a[:, None, :]


def split_damping(
    factors: Kronecker, damping: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the factored Tikhonov damping for `A` and for `G`, each `[k]`, from `damping` `[k]`.

    With `pi^2 = (tr A / dim A) / (tr G / dim G)`, the diagonal of `A` gets `pi sqrt(damping)`, and the diagonal of `G`
    gets `sqrt(damping) / pi` (Martens & Grosse 2015, section 6.3). If a trace is zero, `pi` is 1.
    """
    a, g = (jnp.mean(diagonals(stack), axis=1) for stack in (factors.A, factors.G))
    usable = (a > 0) & (g > 0)
    pi = jnp.where(
        usable, jnp.sqrt(jnp.where(usable, a, 1)) / jnp.sqrt(jnp.where(usable, g, 1)), 1
    )
    root = jnp.sqrt(damping.astype(pi.dtype))
    return pi * root, root / pi


def add_diagonal(stack: jax.Array, amount: jax.Array) -> jax.Array:
    """Return `stack[k] + amount[k] I`."""
    k, d = stack.shape[:2]
    diagonal = jnp.broadcast_to(amount[:, None], (k, d))
    if not is_diagonal(stack):
        # The diagonal is every (d + 1)-th element of a matrix. If an identity matrix were used instead, XLA would keep
        # it in memory through the loop over all blocks.
        diagonal = lax.pad(
            diagonal, jnp.zeros((), diagonal.dtype), [(0, 0, 0), (0, 0, d)]
        ).reshape(stack.shape)
    return stack + diagonal


def invert_damped(
    stack: jax.Array, amount: jax.Array, dtype: Any
) -> tuple[jax.Array, jax.Array]:
    """Return the inverses of `stack[k] + amount[k] I` in `dtype`, and the condition numbers in the 1-norm.

    A condition number that is not finite is returned as 0, which marks a failed inversion.
    """
    damped = add_diagonal(stack, amount)
    inverse = spd_inverse(damped)
    # The condition number reveals an overflow during the inversion. The inverse itself would then be zero, and finite.
    condition = _one_norm(damped) * _one_norm(inverse)
    return inverse.astype(dtype), jnp.where(jnp.isfinite(condition), condition, 0)


# A lower triangular matrix, split into halves: `(first, corner, last)` represents `[[first, 0], [corner, last]]`.
Lower = jax.Array | tuple["Lower", jax.Array, "Lower"]


def spd_inverse(stack: jax.Array) -> jax.Array:
    """Invert symmetric positive definite matrices `[k, d, d]`, or diagonals `[k, d]`.

    The inverse is `W^T W`, where `W` is the inverse of the Cholesky factor. It is exactly symmetric, and NaN for a
    matrix that is not positive definite.

    Large matrices are split into halves recursively. Most of the work is then matrix products, which use the whole
    device, unlike LAPACK's and cuSOLVER's factorisations and triangular solves. The splitting also avoids most
    products with zeros. Only diagonal blocks are inverted explicitly, which keeps the accuracy of a Cholesky
    factorisation (Higham 2002, chapters 8, 10 and 14).
    """
    if is_diagonal(stack):
        return jnp.where(stack > 0, 1 / stack, jnp.nan)
    return _gram(factorise(stack)[1])


def exact_product(a: jax.Array, b: jax.Array) -> jax.Array:
    """Multiply stacks of matrices without reduced precision.

    On CUDA, a float32 product is computed as six products between bfloat16 parts. The parts hold all 24 bits of a
    float32 number, and the sums are in float32, so the error is no larger than float32's own. At an H100's peak rates,
    the six products take 0.4 times as long as the float32 product.
    """
    exact = functools.partial(jnp.matmul, precision="highest")
    return lax.platform_dependent(
        a, b, cuda=_sixfold if a.dtype == jnp.float32 else exact, default=exact
    )


def _sixfold(a: jax.Array, b: jax.Array) -> jax.Array:
    rows, columns = a.shape[-2], b.shape[-1]
    product = jnp.matmul(aligned(a), aligned(b), precision="BF16_BF16_F32_X6")
    return product[..., :rows, :columns]


def factorise(stack: jax.Array) -> tuple[Lower, Lower]:
    """Return the Cholesky factor `L` of symmetric positive definite matrices `[k, d, d]`, and its inverse `W`."""
    d = stack.shape[-1]
    if d <= LEAF:
        # LAPACK expects column-major matrices. Passing the transpose, which is equal by symmetry, saves XLA a copy.
        factor = lax.linalg.cholesky(stack.mT, symmetrize_input=False)
        identity = jnp.broadcast_to(jnp.eye(d, dtype=stack.dtype), stack.shape)
        return factor, lax.linalg.triangular_solve(
            factor, identity, left_side=True, lower=True
        )
    h = d // 2
    first, inverse = factorise(stack[:, :h, :h])
    corner = solve(stack[:, h:, :h], first, inverse)
    last, inverse_of_last = factorise(
        stack[:, h:, h:] - exact_product(corner, corner.mT)
    )
    below = -_from_left(inverse_of_last, _from_right(corner, inverse))
    return (first, corner, last), (inverse, below, inverse_of_last)


def solve(b: jax.Array, factor: Lower, inverse: Any) -> jax.Array:
    """Return `B L^-T` for `L = factor`. Only the diagonal blocks of `inverse = L^-1` are used."""
    if not isinstance(factor, tuple):
        return exact_product(b, inverse.mT)
    first, corner, last = factor
    h = corner.shape[-1]
    left = solve(b[:, :, :h], first, inverse[0])
    right = solve(b[:, :, h:] - exact_product(left, corner.mT), last, inverse[2])
    return jnp.concatenate([left, right], axis=2)


def _from_left(lower: Lower, b: jax.Array) -> jax.Array:
    """Return `W B` for `W = lower`."""
    if not isinstance(lower, tuple):
        return exact_product(lower, b)
    first, corner, last = lower
    h = corner.shape[-1]
    top, bottom = b[:, :h], b[:, h:]
    return jnp.concatenate(
        [_from_left(first, top), exact_product(corner, top) + _from_left(last, bottom)],
        axis=1,
    )


def _from_right(b: jax.Array, lower: Lower) -> jax.Array:
    """Return `B W` for `W = lower`."""
    if not isinstance(lower, tuple):
        return exact_product(b, lower)
    first, corner, last = lower
    h = corner.shape[-1]
    left, right = b[:, :, :h], b[:, :, h:]
    return jnp.concatenate(
        [
            _from_right(left, first) + exact_product(right, corner),
            _from_right(right, last),
        ],
        axis=2,
    )


def _gram(lower: Lower) -> jax.Array:
    """Return `W^T W` for `W = lower`, symmetric to the last bit."""
    if not isinstance(lower, tuple):
        return _symmetric(exact_product(lower.mT, lower))
    first, corner, last = lower
    top = _gram(first) + _symmetric(exact_product(corner.mT, corner))
    beside = _from_right(corner.mT, last)
    upper = jnp.concatenate([top, beside], axis=2)
    return jnp.concatenate(
        [upper, jnp.concatenate([beside.mT, _gram(last)], axis=2)], axis=1
    )


def _symmetric(stack: jax.Array) -> jax.Array:
    return (stack + stack.mT) / 2


def _one_norm(stack: jax.Array) -> jax.Array:
    return jnp.max(
        jnp.abs(stack) if is_diagonal(stack) else jnp.sum(jnp.abs(stack), axis=-2),
        axis=-1,
    )
