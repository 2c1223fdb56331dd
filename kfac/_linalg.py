"""Linear algebra on stacks of equally shaped matrices: products, Cholesky factors, inverses, sums.

Factorisations use `exact_product` only: products in reduced precision (TF32, bfloat16 passes) would lose the small
eigenvalues, for which damping matters most.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.typing import DTypeLike

from kfac._factors import is_diagonal, safe_ratio
from kfac._packing import Shape, pad_end

LEAF = 600  # larger matrices are split into halves; smaller leaves gain little and take time to compile


def identities(
    shape: Shape,
    dtype: DTypeLike,
) -> Array:
    """Return a stack of identity matrices `[..., d, d]`, or for a shape `[k, d]` their diagonals, which are ones."""
    if len(shape) == 2:
        return jnp.ones(shape, dtype)
    return jnp.broadcast_to(jnp.eye(shape[-1], dtype=dtype), shape)


def aligned(
    stack: Array,
    multiple: int = 8,
) -> Array:
    """Pad the last two axes with zeros to a multiple, for products on tensor cores.

    Tensor cores load 16 bytes at a time. With a bias, a factor often has an odd number of rows. On an H200 its products
    took up to four times as long as products at the next even size. Axes shorter than 64 are not padded.
    """
    missing = [-n % multiple if n >= 64 else 0 for n in stack.shape[-2:]]
    return pad_end(stack, *missing)


def product(
    spec: str,
    precision: str,
    dtype: DTypeLike,
    wide: DTypeLike,
    *operands: Array,
) -> Array:
    """Compute an `einsum` of two operands in the arithmetic `precision`.

    Args:
      spec: the subscripts.
      precision: an option of `BlockPreconditioner`.
      dtype: the dtype to which both operands are cast.
      wide: the dtype of the sums and the result.
      *operands: the two operands.
    """
    operands = tuple(x.astype(dtype) for x in operands)

    def einsum(arithmetic, *operands):
        return jnp.einsum(
            spec, *operands, precision=arithmetic, preferred_element_type=wide
        )

    if precision in ("float32", "bfloat16") or dtype != jnp.float32:
        return einsum("highest", *operands)
    # TF32 on GPUs, three products on TPUs, float32 on CPUs.
    high = functools.partial(einsum, "high")
    if precision == "tensorfloat32":
        return high(*operands)
    thrice = functools.partial(einsum, lax.DotAlgorithmPreset.BF16_BF16_F32_X3)
    return lax.platform_dependent(*operands, cuda=thrice, default=high)


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
        return jnp.matmul(aligned(a), aligned(b), precision=parts)[..., :rows, :columns]

    cuda = plain if wide else on_tensor_cores
    return lax.platform_dependent(a, b, cuda=cuda, default=plain)


def add_diagonal(
    stack: Array,
    amount: Array,
) -> Array:
    """Return `stack[k] + diag(amount[k])`, with `amount` `[k, d]`, or `[k]` for multiples of the identity."""
    k, d = stack.shape[:2]
    diagonal = jnp.broadcast_to(amount.reshape(k, -1), (k, d))
    if not is_diagonal(stack):
        # The diagonal is every (d + 1)-th element of a matrix. If an identity matrix were used instead, XLA would keep
        # it in memory through the loop over all blocks.
        zero = jnp.zeros((), diagonal.dtype)
        diagonal = lax.pad(diagonal, zero, [(0, 0, 0), (0, 0, d)]).reshape(stack.shape)
    return stack + diagonal


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


def factorise(stack: Array) -> Factorisation:
    """Compute the Cholesky factors of symmetric positive definite matrices `[k, d, d]`, and their inverses."""
    d = stack.shape[-1]
    if d <= LEAF:
        # LAPACK expects column-major matrices. Passing the transpose, which is equal by symmetry, saves XLA a copy.
        factor = lax.linalg.cholesky(stack.mT, symmetrize_input=False)
        identity = jnp.broadcast_to(jnp.eye(d, dtype=stack.dtype), stack.shape)
        return lax.linalg.triangular_solve(factor, identity, left_side=True, lower=True)
    # With S = [[S1, S2^T], [S2, S3]] = L L^T, the corner solves C L1^T = S2, and L2 factorises the Schur complement
    # S3 - C C^T.
    h = d // 2
    first = factorise(stack[:, :h, :h])
    corner = solve(stack[:, h:, :h], first)
    last = factorise(stack[:, h:, h:] - exact_product(corner, corner.mT))
    # B = -L2^-1 C W1. For `orthonormal`, which only solves, XLA drops this product.
    below = -solve(_from_right(corner, first).mT, last).mT
    return Halves(first, corner, below, last)


def solve(
    b: Array,
    factor: Factorisation,
) -> Array:
    """Return `B L^-T`. Of the inverse, only the diagonal blocks are used."""
    if not isinstance(factor, Halves):
        return exact_product(b, factor.mT)
    # By substitution: X1 L1^T = B1, then X2 L2^T = B2 - X1 C^T. A product with the whole W^T would be less accurate.
    h = factor.corner.shape[-1]
    left = solve(b[:, :, :h], factor.first)
    rest = b[:, :, h:] - exact_product(left, factor.corner.mT)
    return jnp.concatenate([left, solve(rest, factor.last)], axis=2)


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
    # W^T W = [[W1^T W1 + B^T B, B^T W2], [W2^T B, W2^T W2]]
    below = factor.below
    top = _gram(factor.first) + _symmetric(exact_product(below.mT, below))
    beside = _from_right(below.mT, factor.last)
    upper = jnp.concatenate([top, beside], axis=2)
    lower = jnp.concatenate([beside.mT, _gram(factor.last)], axis=2)
    return jnp.concatenate([upper, lower], axis=1)


def _symmetric(stack: Array) -> Array:
    return (stack + stack.mT) / 2


def sums(
    stacks: Sequence[Array],
    first: int = 1,
) -> Sequence[Array]:
    """Sum stacks of equal shape over all axes from `first` on.

    One reduction sums all stacks. It reads their common inputs only once and is only one kernel to compile.
    """
    zeros = [jnp.zeros((), x.dtype) for x in stacks]
    axes = tuple(range(first, stacks[0].ndim))
    return lax.reduce(stacks, zeros, optax.tree.add, axes)


def cosine(
    a: Array,
    b: Array,
) -> Array:
    """Return the cosines `[k]` between the members of two stacks, 0 if a member is zero."""
    ab, aa, bb = sums([a * b, a * a, b * b])
    return safe_ratio(ab, jnp.sqrt(aa) * jnp.sqrt(bb))


def finite(
    stack: Array,
    dims: int = 1,
) -> Array:
    """Return for each entry along the first `dims` dimensions of `stack` whether all its numbers are finite.

    The test looks at their sum: NaN stays NaN, and infinities stay infinite or become NaN. Finite numbers whose sum
    overflows count as not finite. A test of every number would need an array as large as the stack.
    """
    # Sums of ordinary numbers would overflow in float16.
    wide = jnp.promote_types(stack.dtype, jnp.float32)
    return jnp.isfinite(jnp.sum(stack, axis=tuple(range(dims, stack.ndim)), dtype=wide))
