"""SOAP: Adam in the eigenbasis of the factors."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from kfac._checks import check_range
from kfac._curvature.eigh import Eigh, eigenvalues, rotate
from kfac._curvature.ekfac import Moments, squared_turn
from kfac._curvature.inverse import Inverse, averaged, per_block
from kfac._factors import Eigen


@dataclasses.dataclass(frozen=True)
class Soap(Eigh):
    """Adam in the eigenbasis of the factors: `Q_G [(Q_G^T V Q_A) / sqrt(v + l)] Q_A^T`, elementwise in the brackets.

    `v` is the running average of the squares of the gradient of the whole batch in that basis, where `Ekfac` has those
    of examples. It takes in the gradient of every step, with or without statistics, and is turned into the new basis at
    each refresh. `V` is the momentum of the gradients, which `kfac.kfac` hands over for this inverse. The factors are
    those of K-FAC, from gradients of examples, where SOAP itself has those of Shampoo, from gradients of batches.
    The curvature chooses the basis, and no length of a step: that is from `trust_ratio`, or Adam's without one.

    Args:
      precision: the arithmetic in which eigenvectors are applied: `"float32"`, `"bfloat16_3x"`, `"tensorfloat32"` or
        `"bfloat16"`, in which they are then kept. They are always computed in float32, and moments kept in it.
      relative: whether the damping `l` of a block is in units of the mean of its `v`.
      decay: that of the running average, in [0, 1).

    Raises:
      ValueError: `precision` is none of these, `relative` is no bool, or `decay` is out of range.

    References:
      Vyas et al., "SOAP: Improving and Stabilizing Shampoo using Adam", 2024, https://arxiv.org/abs/2409.11321
    """

    decay: float = 0.95

    takes_gradients: ClassVar[bool] = True
    relative_damping: ClassVar[float] = 1e-4

    def __post_init__(self):
        """Checks the arguments."""
        super().__post_init__()
        check_range("decay", self.decay, 0, 1, open_high=True)

    def init(self, factors):
        """As of `Eigh`, with moments that are zero."""
        inverse = super().init(factors)
        a, g = eigenvalues(inverse.A), eigenvalues(inverse.G)
        moments = Moments(jnp.zeros((*g.shape, a.shape[1]), a.dtype), jnp.zeros(len(a), a.dtype))
        return dataclasses.replace(inverse, moments=moments)

    def refresh(self, kept, factors, damping):
        """Decompositions of both factors, and the moments in the new basis."""
        new, condition = super().refresh(kept, factors, damping)
        average = kept.moments.average
        if isinstance(new.G, Eigen):
            average = squared_turn(kept.G.vectors, new.G.vectors, average.dtype) @ average
        if isinstance(new.A, Eigen):
            average = average @ squared_turn(kept.A.vectors, new.A.vectors, average.dtype).mT
        return dataclasses.replace(new, moments=kept.moments._replace(average=average)), condition

    def observe(self, kept, matrices, taken):
        """Squares of gradients in the eigenbasis into their running average."""
        average, weight = kept.moments
        squares = jnp.square(rotate(matrices, kept, self.precision, back=False))
        moments = Moments(*averaged(average, weight, squares, jnp.asarray(self.decay), taken))
        return dataclasses.replace(kept, moments=moments)

    def apply(self, kept, matrices, damping):
        """In the eigenbasis, a division by the root of the moments."""
        average = kept.moments.average
        least = jnp.finfo(average.dtype).tiny  # for a block that has had no gradient for long, or none so far
        mean = jnp.mean(average, axis=(1, 2)) if self.relative else 1
        damping = jnp.where(damping > 0, jnp.maximum(damping * mean, least), jnp.nan).astype(average.dtype)
        damping = jnp.broadcast_to(damping, len(average))
        scaled = rotate(matrices, kept, self.precision, back=False) / jnp.sqrt(average + per_block(damping, average))
        return rotate(scaled.astype(matrices.dtype), kept, self.precision, back=True)

    spectrum = Inverse.spectrum
