"""EKFAC: replace the eigenvalue products by averaged second moments in the eigenbasis."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from kfac._curvature.eigh import Eigen, Eigh, condition_of
from kfac._curvature.preconditioner import averaged, with_option_hints
from kfac._factors import Basis
from kfac._linalg import close_product


class EKFACState(NamedTuple):
    """The decomposed factors of `k` blocks, and second moments of per-example gradients in this eigenbasis.

    Attributes:
      A: as in `EighState`.
      G: as in `EighState`.
      moments: the moments' bias-corrected running average, `[k, d_out, d_in]`. None if no block has moments.
      weight: the sum of the weights in the average, `[k]`; 0 before the first moments. None if no block has moments.
    """

    A: Eigen
    G: Eigen
    moments: Array | None = None
    weight: Array | None = None


@with_option_hints
@dataclasses.dataclass(frozen=True)
class EKFAC(Eigh):
    """Corrected eigenvalues: `Q_G [(Q_G^T V Q_A) / (s + l)] Q_A^T` with second moments `s` of per-example gradients.

    ::

        optimizer = kfac.kfac(0.1, layers, preconditioner=kfac.EKFAC())
        opt_state = optimizer.init(params)
        basis = kfac.curvature.eigenbasis(opt_state, layers)
        factors = kfac.statistics(loss_fn, layers)(params, batch, basis=basis)
        opt_state = kfac.observe(opt_state, factors)

    `s` is the running average of the squared per-example gradients in the factors' eigenbasis. `s` is updated with all
    statistics, and transformed to the new basis at each refresh. A layer has no such moments if it has a diagonal
    factor, several uses or unknown examples, or if its kernel is cut into pieces (`find_layers(max_factor_dim=8192)`
    keeps oblong kernels whole). For these layers, and before a layer's first moments, `s` is `l_G l_A^T` as with
    `Eigh`. Statistics must contain the moments: `kfac.value_and_grad(loss_fn, layers)(params, batch,
    basis=kfac.curvature.eigenbasis(opt_state, layers))`.

    Eigenvectors of equal eigenvalues are arbitrary, and moments depend on them. If a batch has fewer examples than a
    factor has rows, many eigenvalues are zero, and rounding decides: on four devices in float64, steps differed by 2 to
    8 percent from steps on one device.

    Args:
      precision: the arithmetic in which eigenvectors are applied: `"float32"`, `"bfloat16_3x"`, `"tensorfloat32"` or
        `"bfloat16"`. With `"bfloat16"` the eigenvectors are also stored in bfloat16. Decompositions are always computed
        in float32, and eigenvalues are stored in float32.
      scale_damping: whether a block's damping is in units of its mean eigenvalue, see `BlockPreconditioner`.

    Raises:
      ValueError: `precision` is not an accepted value, or `scale_damping` is not a bool.

    References:
      George et al., "Fast Approximate Natural Gradient Descent in a Kronecker-factored Eigenbasis", 2018,
      https://arxiv.org/abs/1806.03884
    """

    uses_example_moments = True

    def init(self, factors):
        """Return the state of `Eigh`, with zero moments if any block has moments."""
        state = EKFACState(*super().init(factors))
        if factors.moments is None:
            return state
        weight = jnp.zeros_like(factors.moments[:, 0, 0])
        return state._replace(moments=factors.moments, weight=weight)

    def refresh(self, state, factors, damping):
        """Decompose both factors, and transform the moments to the new basis."""
        (a, g), condition = super().refresh(state, factors, damping)
        if state.moments is None:
            return EKFACState(a, g), condition
        moments = between_bases(
            state.moments, self.basis(state), Basis(a.vectors, g.vectors)
        )
        new = EKFACState(a, g, moments, state.weight)
        values = self._eigenvalues(new).reshape(len(damping), -1)
        return new, condition_of(values, jnp.ones_like(values), damping)

    def spectrum(self, state, factors, damping):
        """Return the stored eigenvectors and the damped moments.

        Blocks without moments have products `(q_A^T A q_A) (q_G^T G q_G)` along the stored eigenvectors instead.
        """
        if state is None or state.moments is None:
            return super().spectrum(state, factors, damping)

        def along(eigen, factor):
            q = eigen.vectors.astype(factor.dtype)
            values = jnp.einsum("kji,kjl,kli->ki", q, factor, q, precision="highest")
            return Eigen(q, values)

        state = state._replace(A=along(state.A, factors.A), G=along(state.G, factors.G))
        return self.basis(state), self._eigenvalues(state) + damping[:, None, None]

    def _eigenvalues(self, state):
        """Return the moments of blocks that have received any, and the products of eigenvalues for other blocks."""
        products = super()._eigenvalues(state)
        if state.moments is None:
            return products
        return jnp.where(state.weight[:, None, None] > 0, state.moments, products)

    def update_moments(self, state, moments, decay, taken):
        """Update the running average of the moments."""
        new, weight = averaged(state.moments, state.weight, moments, decay, taken)
        return state._replace(moments=new, weight=weight)

    def basis(self, state):
        """Return the eigenvectors, or None for a stack without moments."""
        if state.moments is None:
            return None
        return Basis(state.A.vectors, state.G.vectors)


def between_bases(
    moments: Array,
    old: Basis,
    new: Basis,
) -> Array:
    """Transform moments `[k, d_out, d_in]` to another eigenbasis, see `squared_basis_change`."""
    g = squared_basis_change(old.G, new.G, moments.dtype)
    a = squared_basis_change(old.A, new.A, moments.dtype)
    return close_product(close_product(g, moments), a.mT)


def squared_basis_change(
    old: Array,
    new: Array,
    dtype: DTypeLike,
) -> Array:
    """Return the elementwise squares of `Q_new^T Q_old` in `dtype`, which transform moments `s` `[k, d_out, d_in]`.

    Take the matrix whose eigenvalues in the old basis are `s`. Its diagonal in the new basis is
    `(T_G * T_G) s (T_A * T_A)^T`. The moments hardly change if the basis has moved little, and their sum never changes.
    """
    change = close_product(new.astype(dtype).mT, old.astype(dtype))
    square = jnp.square(change)
    # Normalise each column's sum to 1, so that the moments keep their sum even if eigenvectors are rounded to bfloat16.
    return square / jnp.sum(square, axis=-2, keepdims=True)
