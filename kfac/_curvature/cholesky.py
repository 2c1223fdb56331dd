"""Damped inverses of stacked factors, and what happens when one fails.

Everything works on stacks of equal shape, in float32 or better and at the highest matrix-product precision: reduced
precision products (TF32, bf16 passes) inside a factorisation lose the small eigenvalues that damping is about.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kfac._factors import Eigen, Kronecker, Unitwise, is_diagonal

LEAF = 600  # larger matrices are treated by halves; smaller leaves gain little, and cost time to compile
RETRY = 10.0  # a factorisation that fails is tried once more with so many times the damping


class Refreshed(NamedTuple):
    """Inverses of a stack of `k` blocks.

    Attributes:
      inverse: the inverses; where `valid` is false, what they were before.
      valid: `[k]`, whether the inverse is new.
      condition: `[k]`, 1-norm condition number of the worse damped factor of each block.
    """

    inverse: Kronecker | Unitwise
    valid: jax.Array
    condition: jax.Array


def even_size(d: int) -> int:
    """The smallest dimension from `d` on of which all halves in `spd_inverse` are equal."""
    leaves = 1
    while leaves * LEAF < d:
        leaves *= 2
    return -(-d // leaves) * leaves


def add_diagonal(stack: jax.Array, amount: jax.Array, size: jax.Array | int) -> jax.Array:
    """`stack[k] + amount[k] I`, where all beyond the leading `size` rows and columns is zero so far.

    There, the diagonal becomes that of the first row, so that neither the 1-norm nor that of the inverse can grow.
    """
    k, d = stack.shape[:2]
    corner = stack.reshape(k, -1)[:, :1]
    diagonal = amount[:, None] + jnp.where(np.arange(d) < size, 0, corner)
    if not is_diagonal(stack):
        # Every (d + 1)-th element of a matrix. An identity matrix would be kept through the loop over all blocks.
        diagonal = lax.pad(diagonal, jnp.zeros((), diagonal.dtype), [(0, 0, 0), (0, 0, d)]).reshape(stack.shape)
    return stack + diagonal


# A lower triangular matrix by halves: `(first, corner, last)` stands for `[[first, 0], [corner, last]]`.
Lower = jax.Array | tuple["Lower", jax.Array, "Lower"]


def spd_inverse(stack: jax.Array) -> jax.Array:
    """Inverses of symmetric positive definite `[k, d, d]`, symmetric; NaN where one is not positive definite.

    Of diagonals `[k, d]`, those of the inverses. Else `W^T W`, with `W` the inverse of the Cholesky factor. Large
    matrices are treated by halves, so that most of the work is matrix products, which use all of a device where the
    factorisations and triangular solves of LAPACK and cuSOLVER do not, and so that few of them are with zeros. Only
    diagonal blocks are inverted explicitly, which keeps the accuracy of a Cholesky factorisation (Higham 2002, chapters
    8, 10 and 14).
    """
    if is_diagonal(stack):
        return jnp.where(stack > 0, 1 / stack, jnp.nan)
    return _gram(_factorise(stack)[1])


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def _factorise(stack: jax.Array) -> tuple[Lower, Lower]:
    """The Cholesky factor `L` of symmetric positive definite `[k, d, d]`, and its inverse `W`."""
    d = stack.shape[-1]
    if d <= LEAF:
        # LAPACK reads columns. A symmetric matrix and its transpose are the same, and this spares XLA a copy of more.
        factor = lax.linalg.cholesky(stack.mT, symmetrize_input=False)
        identity = jnp.broadcast_to(jnp.eye(d, dtype=stack.dtype), stack.shape)
        return factor, lax.linalg.triangular_solve(factor, identity, left_side=True, lower=True)
    h = d // 2
    first, inverse = _factorise(stack[:, :h, :h])
    corner = _solve(stack[:, h:, :h], first, inverse)
    last, inverse_of_last = _factorise(stack[:, h:, h:] - _product(corner, corner.mT))
    below = -_from_left(inverse_of_last, _from_right(corner, inverse))
    return (first, corner, last), (inverse, below, inverse_of_last)


def _solve(b: jax.Array, factor: Lower, inverse: Lower) -> jax.Array:
    """`B L^-T`, from the inverses of the diagonal blocks of `L` alone."""
    if not isinstance(factor, tuple) or not isinstance(inverse, tuple):
        assert not isinstance(factor, tuple) and not isinstance(inverse, tuple)
        return _product(b, inverse.mT)
    first, corner, last = factor
    h = corner.shape[-1]
    left = _solve(b[:, :, :h], first, inverse[0])
    right = _solve(b[:, :, h:] - _product(left, corner.mT), last, inverse[2])
    return jnp.concatenate([left, right], axis=2)


def _from_left(lower: Lower, b: jax.Array) -> jax.Array:
    """`W B`."""
    if not isinstance(lower, tuple):
        return _product(lower, b)
    first, corner, last = lower
    h = corner.shape[-1]
    top, bottom = b[:, :h], b[:, h:]
    return jnp.concatenate([_from_left(first, top), _product(corner, top) + _from_left(last, bottom)], axis=1)


def _from_right(b: jax.Array, lower: Lower) -> jax.Array:
    """`B W`."""
    if not isinstance(lower, tuple):
        return _product(b, lower)
    first, corner, last = lower
    h = corner.shape[-1]
    left, right = b[:, :, :h], b[:, :, h:]
    return jnp.concatenate([_from_right(left, first) + _product(right, corner), _from_right(right, last)], axis=2)


def _gram(lower: Lower) -> jax.Array:
    """`W^T W`, symmetric to the last bit."""
    if not isinstance(lower, tuple):
        return _symmetric(_product(lower.mT, lower))
    first, corner, last = lower
    top = _gram(first) + _symmetric(_product(corner.mT, corner))
    below = _transposed_from_left(last, corner)
    upper = jnp.concatenate([top, below.mT], axis=2)
    return jnp.concatenate([upper, jnp.concatenate([below, _gram(last)], axis=2)], axis=1)


def _transposed_from_left(lower: Lower, b: jax.Array) -> jax.Array:
    """`W^T B`."""
    if not isinstance(lower, tuple):
        return _product(lower.mT, b)
    first, corner, last = lower
    h = corner.shape[-1]
    top, bottom = b[:, :h], b[:, h:]
    upper = _transposed_from_left(first, top) + _product(corner.mT, bottom)
    return jnp.concatenate([upper, _transposed_from_left(last, bottom)], axis=1)


def _symmetric(stack: jax.Array) -> jax.Array:
    return (stack + stack.mT) / 2


def _one_norm(stack: jax.Array) -> jax.Array:
    if is_diagonal(stack):
        return jnp.max(jnp.abs(stack), axis=-1)
    return jnp.max(jnp.sum(jnp.abs(stack), axis=-2), axis=-1)


def finite(stack: jax.Array, dims: int = 1) -> jax.Array:
    """Whether all numbers are finite of each of what `stack` has along its first `dims` dimensions.

    By their sum: NaN stays in it, infinities stay or become NaN. Finite numbers whose sum is too large for float32
    count as not finite. `isfinite` of every number would be an array as large as the stack, with a reduction of its
    own, three times as slow and long to compile.
    """
    # In float16, sums of ordinary numbers would overflow.
    wide = jnp.promote_types(stack.dtype, jnp.float32)
    return jnp.isfinite(jnp.sum(stack, axis=tuple(range(dims, stack.ndim)), dtype=wide))


def invert_damped(
    stack: jax.Array, amount: jax.Array, size: jax.Array | int, dtype: Any
) -> tuple[jax.Array, jax.Array]:
    """Inverses of `stack[k] + amount[k] I` in `dtype`, and their 1-norm condition numbers; 0 where not finite.

    They are those of the leading `size` rows and columns, if all others are zero.
    """
    damped = add_diagonal(stack, amount, size)
    inverse = spd_inverse(damped)
    condition = _one_norm(damped) * _one_norm(inverse)
    kept = inverse.astype(dtype)
    # The condition number tells what overflowed on the way: the inverse alone would then be zero.
    usable = finite(kept) & jnp.isfinite(condition)
    return kept, jnp.where(usable, condition, 0)


def decompose(stack: jax.Array, dtype: Any) -> tuple[Eigen | jax.Array, jax.Array]:
    """Eigenvectors in `dtype` and eigenvalues of symmetric `[k, d, d]`, and 1 where they are finite, 0 where not.

    Of diagonals `[k, d]` the eigenvalues alone. Rounding can make those of a second moment negative: they become 0.
    """
    if is_diagonal(stack):
        return jnp.maximum(stack, 0), finite(stack).astype(stack.dtype)
    vectors, values = lax.linalg.eigh(stack.mT, symmetrize_input=False)  # the transpose as in `_factorise`
    values, vectors = jnp.maximum(values, 0), vectors.astype(dtype)
    usable = finite(values) & finite(vectors)
    return Eigen(vectors, values), usable.astype(stack.dtype)


def eigen_condition(values: jax.Array, damping: jax.Array) -> jax.Array:
    """`[k]`, the condition numbers of damped blocks with eigenvalues `values` `[k, d_out, d_in]`."""
    # What a schedule may bring, zero or NaN, is no reason to take the decompositions for missing.
    damping = jnp.where(damping > 0, damping, 0).astype(values.dtype)
    low, high = jnp.min(values, axis=(1, 2)) + damping, jnp.max(values, axis=(1, 2)) + damping
    return jnp.where(low > 0, high / jnp.where(low > 0, low, 1), jnp.inf)


def block_eigenvalues(inverse: Kronecker) -> jax.Array:
    """`l_G l_A^T`, the eigenvalues of `A (x) G`, `[k, d_out, d_in]`."""
    return eigenvalues(inverse.G)[:, :, None] * eigenvalues(inverse.A)[:, None, :]


def eigenvalues(side: Eigen | jax.Array) -> jax.Array:
    """`[k, d]`; of a diagonal factor they are all that is kept."""
    return side.values if isinstance(side, Eigen) else side


def refresh_unitwise(
    factors: Mapping[str, Unitwise],
    previous: Mapping[str, Unitwise],
    due: Mapping[str, jax.Array],
    damping: jax.Array,
) -> dict[str, Refreshed]:
    """Inverts `F + damping I` in closed form for every channel of the layers that are due.

    A layer with a channel that is not positive definite is tried again with ten times the damping; failing still, it
    keeps its previous inverse.

    Args:
      factors: stacks of `F` `[k, channels, p, p]` with `p` 1 or 2.
      previous: the inverses so far.
      due: `[k]` for each stack.
      damping: a scalar.
    """
    results: dict[str, Refreshed] = {}
    for size in sorted({stack.F.shape[-1] for stack in factors.values()}):
        stacks = {name: stack for name, stack in factors.items() if stack.F.shape[-1] == size}
        results |= _refresh_channels(stacks, previous, due, damping)
    return results


def _refresh_channels(
    factors: Mapping[str, Unitwise],
    previous: Mapping[str, Unitwise],
    due: Mapping[str, jax.Array],
    damping: jax.Array,
) -> dict[str, Refreshed]:
    """`refresh_unitwise` for blocks of one size: the channels of all layers as one array, which compiles sooner."""
    shapes = [stack.F.shape for stack in factors.values()]
    channels = np.repeat([shape[1] for shape in shapes], [shape[0] for shape in shapes])  # of each layer
    layer = np.repeat(np.arange(len(channels)), channels)
    size = shapes[0][-1]
    blocks = jnp.concatenate([stack.F.reshape(-1, size, size) for stack in factors.values()])
    # Both attempts at once, along a first axis.
    amounts = jnp.stack([damping, RETRY * damping]).astype(blocks.dtype)[:, None]
    inverse, condition, definite = (_inverse_1x1 if size == 1 else _inverse_2x2)(blocks, amounts)
    inverse = inverse.astype(next(iter(previous.values())).F.dtype)
    condition = jnp.where(definite & jnp.isfinite(condition) & finite(inverse, 2), condition, jnp.inf)
    worst = jax.ops.segment_max(condition.T, layer, len(channels), indices_are_sorted=True)
    first, again = jnp.isfinite(worst).T & jnp.concatenate([due[name] for name in factors])
    valid, worst = first | again, jnp.where(first, worst[:, 0], worst[:, 1])

    results = {}
    start = at = 0
    for name, (count, width, *_) in zip(factors, shapes, strict=True):
        stop, end = start + count, at + count * width
        tries = inverse[:, at:end].reshape(2, count, width, size, size)
        kept = previous[name].F
        kept = jnp.where(again[start:stop, None, None, None], tries[1], kept)
        kept = jnp.where(first[start:stop, None, None, None], tries[0], kept)
        results[name] = Refreshed(Unitwise(kept), valid[start:stop], worst[start:stop])
        start, at = stop, end
    return results


def _inverse_1x1(f: jax.Array, damping: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    value = f[..., 0, 0] + damping
    return (1 / value)[..., None, None], value / value, value > 0


def _inverse_2x2(f: jax.Array, damping: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Inverse, condition and whether positive definite, of each damped 2x2 block.

    The determinant is summed from terms that are not negative where the block is a second moment, so it cannot cancel
    to zero.
    """
    # Divided by the larger of the diagonal entries: products of large second moments overflow.
    scale = jnp.maximum(f[..., 0, 0], f[..., 1, 1]) + damping
    a, b, d, shift = f[..., 0, 0] / scale, f[..., 0, 1] / scale, f[..., 1, 1] / scale, damping / scale
    # A second moment has |b| <= sqrt(a d), but rounding in the sums behind it can exceed that by a little. What exceeds
    # it by more is indefinite, and only damping can help.
    limit = jnp.sqrt(jnp.maximum(a, 0)) * jnp.sqrt(jnp.maximum(d, 0))
    moment = (jnp.minimum(a, d) >= 0) & (jnp.abs(b) <= (1 + jnp.sqrt(jnp.finfo(f.dtype).eps)) * limit)
    b = jnp.where(moment, jnp.clip(b, -limit, limit), b)
    minor = a * d - b * b
    determinant = jnp.where(moment, jnp.maximum(minor, 0), minor) + shift * (a + d) + shift * shift
    rows = [jnp.stack([d + shift, -b], axis=-1), jnp.stack([-b, a + shift], axis=-1)]
    inverse = jnp.stack(rows, axis=-2) / (determinant * scale)[..., None, None]
    condition = (jnp.maximum(a, d) + shift + jnp.abs(b)) ** 2 / determinant
    definite = (scale > 0) & (a + shift > 0) & (d + shift > 0) & (determinant > 0)
    return inverse, condition, definite
