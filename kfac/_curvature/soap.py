"""SOAP: Adam in the eigenbasis of the factors."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from kfac._checks import check_range
from kfac._curvature.eigh import block_eigenvalues, eigen_condition, rotate, unturned
from kfac._curvature.ekfac import Moments, into_basis
from kfac._curvature.inverse import Inverse, averaged, diagonals, per_block
from kfac._factors import Eigen, Kronecker


@dataclasses.dataclass(frozen=True)
class Soap(Inverse):
    """Adam in the eigenbasis of the factors: `Q_G [(Q_G^T V Q_A) / sqrt(v + l)] Q_A^T`, elementwise in the brackets.

    `v` is the running average of the squares of the gradient of the whole batch in that basis, where `Ekfac` has those
    of examples. It takes in the gradient of every step, with or without statistics, and is turned into the new basis at
    each refresh. `V` is the momentum of the gradients, which `kfac.kfac` hands over for this inverse. The factors are
    those of K-FAC, from gradients of examples, where SOAP itself has those of Shampoo, from gradients of batches.
    The curvature chooses the basis, and no length of a step: that is from `trust_ratio`, or Adam's without one.

    There is no eigendecomposition. From the identity on, each refresh takes the basis one step of orthogonal iteration
    further, `Q <- qr(A Q)`, so that it follows the factors: the first ten steps, which all refresh, bring it close.

    Args:
      precision: the arithmetic in which eigenvectors are applied: `"float32"`, `"bfloat16_3x"`, `"tensorfloat32"` or
        `"bfloat16"`. They are always computed in float32, and kept in it like the moments.
      relative: whether the damping `l` of a block is in units of the mean of its `v`.
      decay: that of the running average, in [0, 1).

    Raises:
      ValueError: `precision` is none of these, `relative` is no bool, or `decay` is out of range.

    References:
      Vyas et al., "SOAP: Improving and Stabilizing Shampoo using Adam", 2024, https://arxiv.org/abs/2409.11321
    """

    decay: float = 0.95

    damped: ClassVar[bool] = False
    takes_gradients: ClassVar[bool] = True
    relative_damping: ClassVar[float] = 1e-4
    flops: ClassVar[float] = 14 / 3  # a product, and a QR factorisation (Golub & Van Loan 2013, section 5.2)

    def __post_init__(self):
        """Checks the arguments."""
        super().__post_init__()
        check_range("decay", self.decay, 0, 1, open_high=True)

    def init(self, factors):
        """As of `Eigh`, with moments that are zero."""
        a, g = factors.A, factors.G
        moments = Moments(jnp.zeros((*g.shape[:2], a.shape[1]), a.dtype), jnp.zeros(len(a), a.dtype))
        return Kronecker(unturned(a, a.dtype), unturned(g, g.dtype), moments)

    def refresh(self, kept, factors, damping):
        """Both bases a step further, and the moments in the new ones."""
        new = Kronecker(follow(kept.A, factors.A), follow(kept.G, factors.G))
        moments = kept.moments._replace(average=into_basis(kept.moments.average, kept, new))
        return dataclasses.replace(new, moments=moments), eigen_condition(block_eigenvalues(new), damping)

    def observe(self, kept, matrices, taken):
        """Squares of gradients in the eigenbasis into their running average."""
        squares = jnp.square(self._turned(kept, matrices, back=False))
        moments = Moments(*averaged(kept.moments.average, kept.moments.weight, squares, jnp.asarray(self.decay), taken))
        return dataclasses.replace(kept, moments=moments)

    def apply(self, kept, matrices, damping):
        """In the eigenbasis, a division by the root of the moments."""
        average = kept.moments.average
        least = jnp.finfo(average.dtype).tiny  # for a block that has had no gradient for long, or none so far
        mean = jnp.mean(average, axis=(1, 2), keepdims=True) if self.relative else 1
        damping = jnp.where(damping > 0, jnp.maximum(damping * mean, least), jnp.nan).astype(average.dtype)
        scaled = self._turned(kept, matrices, back=False) / jnp.sqrt(average + damping)
        return self._turned(kept, scaled.astype(matrices.dtype), back=True)

    def _turned(self, kept, matrices, *, back):
        # In bfloat16 a basis would not stay orthogonal from one refresh to the next: it is rounded here only.
        basis = Kronecker(*jax.tree.map(lambda x: x.astype(self.kept_dtype(x.dtype)), (kept.A, kept.G)))
        return rotate(matrices, basis, self.precision, back=back)


# What is added to the eigenvalues of a factor, in units of their mean, so that columns which it takes to nothing but
# rounding stay as they were, and bases do not wander where there is nothing to follow.
FLOOR = 1e-6


def follow(kept: Eigen | jax.Array, stack: jax.Array) -> Eigen | jax.Array:
    """The eigenvectors that are `kept` of symmetric `[k, d, d]`, one step of orthogonal iteration closer.

    With columns in the order of what the matrix has along them, from the largest down, which are the values that come
    with the new ones. Of diagonals `[k, d]` the numbers alone.
    """
    if not isinstance(kept, Eigen):
        return jnp.maximum(stack, 0)
    mean = jnp.mean(diagonals(stack), axis=1)
    scale = per_block(jnp.where(mean > 0, mean, 1), stack)
    image = jnp.matmul(stack / scale, kept.vectors, precision=lax.Precision.HIGHEST)
    along = jnp.sum(kept.vectors * image, axis=1)
    order = jnp.argsort(-along, axis=1)
    image = jnp.take_along_axis(image + FLOOR * kept.vectors, order[:, None, :], axis=2)
    values = jnp.take_along_axis(jnp.maximum(along, 0), order, axis=1) * scale[:, :, 0]
    return Eigen(lax.linalg.qr(image, full_matrices=False)[0], values)
