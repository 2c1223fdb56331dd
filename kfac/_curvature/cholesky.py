"""Invert both damped factors by Cholesky factorisations.

All functions work on stacks of equally shaped matrices, in float32 or better. Factorisations use `exact_product` only:
products in reduced precision (TF32, bfloat16 passes) would lose the small eigenvalues, for which damping matters most.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from kfac._curvature.eigh import decompose, outer_products
from kfac._curvature.preconditioner import (
    BlockPreconditioner,
    aligned,
    identities,
    product,
    with_option_hints,
)
from kfac._factors import Basis, Kronecker, diagonals, is_diagonal

LEAF = 600  # larger matrices are split into halves; smaller leaves gain little and take time to compile


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

    def init(self, factors):
        """Return identities in the shapes of `A` and `G`."""
        dtype = self.state_dtype(factors.A.dtype)
        a = identities(factors.A.shape, dtype)
        g = identities(factors.G.shape, dtype)
        return CholeskyState(a, g)

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
        a = decompose(factors.A, factors.A.dtype)
        g = decompose(factors.G, factors.G.dtype)
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


def add_diagonal(
    stack: Array,
    amount: Array,
) -> Array:
    """Return `stack[k] + amount[k] I`."""
    k, d = stack.shape[:2]
    diagonal = jnp.broadcast_to(amount[:, None], (k, d))
    if not is_diagonal(stack):
        # The diagonal is every (d + 1)-th element of a matrix. If an identity matrix were used instead, XLA would keep
        # it in memory through the loop over all blocks.
        zero = jnp.zeros((), diagonal.dtype)
        diagonal = lax.pad(diagonal, zero, [(0, 0, 0), (0, 0, d)]).reshape(stack.shape)
    return stack + diagonal


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
    # The condition number reveals an overflow during the inversion. The inverse itself would then be zero, and finite.
    condition = _one_norm(damped) * _one_norm(inverse)
    return inverse.astype(dtype), jnp.where(jnp.isfinite(condition), condition, 0)


class Halves(NamedTuple):
    """A Cholesky factor `L = [[L1, 0], [C, L2]]` and its inverse `W = [[W1, 0], [B, W2]]`.

    Attributes:
      first: `L1` and `W1`.
      corner: `C`.
      below: `B`.
      last: `L2` and `W2`.
    """

    first: Factorisation
    corner: Array
    below: Array
    last: Factorisation


# A Cholesky factor and its inverse. A small factor is not split, and only its inverse `W` is kept.
Factorisation = Array | Halves


def spd_inverse(stack: Array) -> Array:
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
    return _gram(factorise(stack))


def exact_product(
    a: Array,
    b: Array,
) -> Array:
    """Multiply stacks of matrices without reduced precision.

    On CUDA, a float32 product is computed as six products between bfloat16 parts. The parts hold all 24 bits of a
    float32 number, and the sums are in float32, so the error is no larger than float32's own. At an H100's peak rates,
    the six products take 0.4 times as long as the float32 product.
    """
    return _product_of_parts(a, b, "BF16_BF16_F32_X6", "highest")


def close_product(
    a: Array,
    b: Array,
) -> Array:
    """Multiply stacks of matrices in three products between bfloat16 parts, with a relative error of 1e-5.

    On an H200 this takes half the time of `exact_product`. On CPUs, and for float64, the product is exact.
    """
    return _product_of_parts(a, b, "BF16_BF16_F32_X3", "high")


def _product_of_parts(
    a: Array,
    b: Array,
    parts: str,
    otherwise: str,
) -> Array:
    """Multiply stacks in the arithmetic `parts` on CUDA, and in `otherwise` on other platforms."""
    rows = a.shape[-2]
    columns = b.shape[-1]
    wide = a.dtype != jnp.float32

    def plain(a, b):
        return jnp.matmul(a, b, precision="highest" if wide else otherwise)

    def on_tensor_cores(a, b):
        product = jnp.matmul(aligned(a), aligned(b), precision=parts)
        return product[..., :rows, :columns]

    cuda = plain if wide else on_tensor_cores
    return lax.platform_dependent(a, b, cuda=cuda, default=plain)


def factorise(stack: Array) -> Factorisation:
    """Compute the Cholesky factors of symmetric positive definite matrices `[k, d, d]`, and their inverses."""
    d = stack.shape[-1]
    if d <= LEAF:
        # LAPACK expects column-major matrices. Passing the transpose, which is equal by symmetry, saves XLA a copy.
        factor = lax.linalg.cholesky(stack.mT, symmetrize_input=False)
        identity = jnp.broadcast_to(jnp.eye(d, dtype=stack.dtype), stack.shape)
        return lax.linalg.triangular_solve(factor, identity, left_side=True, lower=True)
    h = d // 2
    first = factorise(stack[:, :h, :h])
    corner = solve(stack[:, h:, :h], first)
    last = factorise(stack[:, h:, h:] - exact_product(corner, corner.mT))
    below = -_from_left(last, _from_right(corner, first))
    return Halves(first, corner, below, last)


def solve(
    b: Array,
    factor: Factorisation,
) -> Array:
    """Return `B L^-T`. Of the inverse, only the diagonal blocks are used."""
    if not isinstance(factor, Halves):
        return exact_product(b, factor.mT)
    h = factor.corner.shape[-1]
    left = solve(b[:, :, :h], factor.first)
    rest = b[:, :, h:] - exact_product(left, factor.corner.mT)
    return jnp.concatenate([left, solve(rest, factor.last)], axis=2)


def _from_left(
    factor: Factorisation,
    b: Array,
) -> Array:
    """Return `W B`."""
    if not isinstance(factor, Halves):
        return exact_product(factor, b)
    h = factor.below.shape[-1]
    top = _from_left(factor.first, b[:, :h])
    bottom = exact_product(factor.below, b[:, :h]) + _from_left(factor.last, b[:, h:])
    return jnp.concatenate([top, bottom], axis=1)


def _from_right(
    b: Array,
    factor: Factorisation,
) -> Array:
    """Return `B W`."""
    if not isinstance(factor, Halves):
        return exact_product(b, factor)
    h = factor.below.shape[-1]
    right = b[:, :, h:]
    left = _from_right(b[:, :, :h], factor.first) + exact_product(right, factor.below)
    return jnp.concatenate([left, _from_right(right, factor.last)], axis=2)


def _gram(factor: Factorisation) -> Array:
    """Return `W^T W`, symmetric to the last bit."""
    if not isinstance(factor, Halves):
        return _symmetric(exact_product(factor.mT, factor))
    below = factor.below
    top = _gram(factor.first) + _symmetric(exact_product(below.mT, below))
    beside = _from_right(below.mT, factor.last)
    upper = jnp.concatenate([top, beside], axis=2)
    lower = jnp.concatenate([beside.mT, _gram(factor.last)], axis=2)
    return jnp.concatenate([upper, lower], axis=1)


def _symmetric(stack: Array) -> Array:
    return (stack + stack.mT) / 2


def _one_norm(stack: Array) -> Array:
    columns = jnp.abs(stack)
    if not is_diagonal(stack):
        columns = jnp.sum(columns, axis=-2)
    return jnp.max(columns, axis=-1)
