"""SOAP: Adam in the eigenbasis of the factors."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kfac._checks import check_range
from kfac._curvature.cholesky import exact_product
from kfac._curvature.eigh import Ends, condition_of, ends, rotate
from kfac._curvature.ekfac import between_bases, turn
from kfac._curvature.inverse import Inverse, averaged, cosine, identities
from kfac._curvature.orthonormal import orthonormal
from kfac._factors import Eigen, Kronecker, is_diagonal, per_block


class Adam(NamedTuple):
    """What Adam keeps of `k` blocks, in their eigenbasis, with outputs last as kernels mostly lie in memory.

    Attributes:
      average: bias-corrected running average of squared gradients, `[k, d_in, d_out]`.
      weight: `[k]`, the sum of the weights in it; 0 before the first.
      trace: the momentum of the gradients, `[k, d_in, d_out]`.
    """

    average: jax.Array
    weight: jax.Array
    trace: jax.Array


@dataclasses.dataclass(frozen=True)
class Soap(Inverse):
    """Adam in the eigenbasis of the factors: `Q_G [(Q_G^T V Q_A) / sqrt(v + l)] Q_A^T`, elementwise in the brackets.

    `v` is the running average of the squares of the gradient of the whole batch in that basis, where `Ekfac` has those
    of examples. It takes in the gradient of every step, with or without statistics, and goes with the vectors where a
    refresh changes their order. `V` is the momentum of the gradients, which is kept in the eigenbasis and turned with
    it, so that a step takes four products. The factors are those of K-FAC, from gradients of examples, where SOAP
    itself has those of Shampoo, from gradients of batches. The curvature chooses the basis, and no length of a step:
    that comes from `step_norm` or `trust_ratio`, and is Adam's without either.

    There is no eigendecomposition. From the identity on, each refresh takes the basis one step of orthogonal iteration
    further, `Q <- qr(A Q)`, so that it follows the factors: the first ten steps, which all refresh, bring it close.

    Args:
      precision: the arithmetic in which eigenvectors are applied: `"float32"`, `"bfloat16_3x"`, `"tensorfloat32"`, the
        default, or `"bfloat16"`. They are always computed in float32, and kept in it like the moments.
      relative: whether the damping `l` of a block is in units of the mean of its `v`.
      decay: that of the running average, in [0, 1).

    Raises:
      ValueError: `precision` is none of these, `relative` is no bool, or `decay` is out of range.

    References:
      Vyas et al., "SOAP: Improving and Stabilizing Shampoo using Adam", 2024, https://arxiv.org/abs/2409.11321
    """

    precision: str = "tensorfloat32"
    decay: float = 0.95

    damped: ClassVar[bool] = False
    takes_gradients: ClassVar[bool] = True
    relative_damping: ClassVar[float] = 1e-4
    products: ClassVar[int] = 2
    flops: ClassVar[float] = 14 / 3  # a product, and a QR factorisation (Golub & Van Loan 2013, section 5.2)

    def __post_init__(self):
        """Checks the arguments."""
        super().__post_init__()
        check_range("decay", self.decay, "[0, 1)")

    def init(self, factors):
        """Identities, and moments that are zero."""
        zeros = jnp.zeros((*factors.A.shape[:2], factors.G.shape[1]), factors.A.dtype)
        sides = [None if is_diagonal(x) else Eigen(identities(x.shape, x.dtype), None) for x in (factors.A, factors.G)]
        # Arrays of their own, so that all can be donated.
        return Kronecker(sides[0], sides[1], Adam(zeros, zeros[:, 0, 0], jnp.zeros_like(zeros)))

    def refresh(self, kept, factors, damping):
        """Both bases a step further, the squares in their order, and the momentum in the new ones."""
        a, g = follow(kept.A, factors.A), follow(kept.G, factors.G)
        average, new = kept.moments.average, Kronecker(a.basis, g.basis)
        for axis, order in (1, a.order), (2, g.order):
            if order is not None:
                average = jnp.take_along_axis(average, jnp.expand_dims(order, 3 - axis), axis, mode="promise_in_bounds")
        trace = between_bases(kept.moments.trace, Kronecker(kept.G, kept.A), Kronecker(g.basis, a.basis), turn)
        moments = kept.moments._replace(average=average, trace=trace)
        return dataclasses.replace(new, moments=moments), condition_of(a.ends, g.ends, damping)

    def advance(self, kept, matrices, damping, momentum, ready):
        """Takes in squares and momentum of gradients, in the eigenbasis; divides momentum by the root of squares."""
        new, old = self._turned(kept, matrices, back=False), kept.moments
        average, weight = averaged(old.average, old.weight, jnp.square(new), jnp.asarray(self.decay), ready)
        trace, ahead = momentum.moved(old.trace, new)
        scaled = jnp.where(per_block(ready, ahead), self._scaled(average, ahead, damping), ahead)
        moved = self._turned(kept, scaled.astype(matrices.dtype), back=True)
        angle = cosine(self._scaled(old.average, old.trace, damping), new)
        return dataclasses.replace(kept, moments=Adam(average, weight, trace)), moved, angle

    def apply(self, kept, matrices, damping):
        """A division by the root of the moments, in the eigenbasis."""
        scaled = self._scaled(kept.moments.average, self._turned(kept, matrices.mT, back=False), damping)
        return self._turned(kept, scaled.astype(matrices.dtype), back=True).mT

    def _scaled(self, average, matrices, damping):
        least = jnp.finfo(average.dtype).tiny  # for a block that has had no gradient for long, or none so far
        mean = jnp.mean(average, axis=(1, 2), keepdims=True) if self.relative else 1
        damping = jnp.where(damping > 0, jnp.maximum(damping * mean, least), jnp.nan).astype(average.dtype)
        return matrices / jnp.sqrt(average + damping)

    def _turned(self, kept, matrices, *, back):
        # In bfloat16 a basis would not stay orthogonal from one refresh to the next: it is rounded here only.
        basis = Kronecker(*jax.tree.map(lambda x: x.astype(self.kept_dtype(x.dtype)), (kept.G, kept.A)))
        return rotate(matrices, basis, self.precision, back=back)


# What is added to the eigenvalues of a factor, in units of their mean, so that columns which it takes to next to
# nothing stay as they were. With 1e-4 and less rounding chose them where there are fewer rows than dimensions: the same
# rows in another order gave other steps.
FLOOR = 1e-2


class Followed(NamedTuple):
    """A basis of `k` matrices `[k, d, d]` a step further; of diagonals `[k, d]` the ends alone.

    Attributes:
      basis: the eigenvectors.
      ends: the smallest and the largest of what the matrix had along the old vectors.
      order: `[k, d]`, which of the old vectors each comes from: that with most of the matrix along it is the first.
    """

    basis: Eigen | None
    ends: Ends
    order: jax.Array | None


def follow(kept: Eigen | None, stack: jax.Array) -> Followed:
    """The eigenvectors that are `kept` of symmetric `[k, d, d]`, one step of orthogonal iteration closer."""
    if kept is None:
        return Followed(None, ends(stack), None)
    image = exact_product(stack, kept.vectors)
    along, order = lax.top_k(jnp.sum(kept.vectors * image, axis=1), stack.shape[-1])
    mean = per_block(jnp.mean(along, axis=1), image)
    image = image / jnp.where(mean > 0, mean, 1) + FLOOR * kept.vectors
    image = jnp.take_along_axis(image, order[:, None, :], axis=2, mode="promise_in_bounds")
    return Followed(Eigen(orthonormal(image), None), (along[:, -1], along[:, 0]), order)
