"""EKFAC: replace the eigenvalue products by averaged second moments in the eigenbasis."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from kfac._checks import check_shapes
from kfac._curvature.cholesky import close_product
from kfac._curvature.eigh import (
    Eigh,
    block_eigenvalues,
    condition_of,
)
from kfac._curvature.preconditioner import averaged
from kfac._factors import Eigen, Kronecker


class Moments(NamedTuple):
    """Second moments of `k` blocks' per-example gradients in the preconditioner's eigenbasis.

    Attributes:
      average: the bias-corrected running average, `[k, d_out, d_in]`.
      weight: the sum of the weights in the average, `[k]`; 0 before the first statistics.
    """

    average: Array
    weight: Array


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

    Args:
      precision: the arithmetic in which eigenvectors are applied: `"float32"`, `"bfloat16_3x"`, `"tensorfloat32"` or
        `"bfloat16"`. With `"bfloat16"` the eigenvectors are also stored in bfloat16. Decompositions are always computed
        in float32, and eigenvalues are stored in float32.
      relative: whether the damping of a block is in units of its mean eigenvalue, see `BlockPreconditioner`.

    Raises:
      ValueError: `precision` is not an accepted value, or `relative` is not a bool.

    References:
      George et al., "Fast Approximate Natural Gradient Descent in a Kronecker-factored Eigenbasis", 2018,
      https://arxiv.org/abs/1806.03884
    """

    takes_moments = True

    def init(self, factors):
        """Return the state of `Eigh`, with zero moments if any block has moments."""
        state = super().init(factors)
        if factors.moments is None:
            return state
        weight = jnp.zeros_like(factors.moments[:, 0, 0])
        return dataclasses.replace(state, moments=Moments(factors.moments, weight))

    def refresh(self, state, factors, damping):
        """Decompose both factors, and transform the moments to the new basis."""
        new, condition = super().refresh(state, factors, damping)
        if state.moments is None:
            return new, condition
        average = between_bases(state.moments.average, state, new)
        new = dataclasses.replace(new, moments=state.moments._replace(average=average))
        values = block_eigenvalues(new).reshape(len(damping), -1)
        return new, condition_of(values, jnp.ones_like(values), damping)

    def spectrum(self, state, factors, damping):
        """Return the stored eigenvectors and the damped moments.

        Blocks without moments have products `(q_A^T A q_A) (q_G^T G q_G)` along the stored eigenvectors instead.
        """
        if state is None or state.moments is None:
            return super().spectrum(state, factors, damping)

        def along(side, factor):
            q = side.vectors.astype(factor.dtype)
            values = jnp.einsum("kji,kjl,kli->ki", q, factor, q, precision="highest")
            return Eigen(q, values)

        basis = Kronecker(along(state.A, factors.A), along(state.G, factors.G))
        values = block_eigenvalues(dataclasses.replace(basis, moments=state.moments))
        return basis, values + damping[:, None, None]

    def update_moments(self, state, moments, decay, taken):
        """Update the running average of the moments."""
        old = state.moments
        average, weight = averaged(old.average, old.weight, moments, decay, taken)
        return dataclasses.replace(state, moments=Moments(average, weight))

    def basis(self, state):
        """Return the eigenvectors, or None for a stack without moments."""
        if state.moments is None:
            return None
        return Kronecker(state.A.vectors, state.G.vectors)

    def check(self, layer, block):
        """Raise a `ValueError` if a layer's moments are missing or have a wrong shape."""
        if not layer.supports_ekfac:
            return
        if block.moments is None:
            how = "value_and_grad(...)(params, batch, basis=kfac.curvature.eigenbasis(opt_state, layers))"
            raise ValueError(
                f"factors of layer {layer.name!r} have no moments, which preconditioner={self!r} needs: {how}"
            )
        shape = (*block.A.shape[:-2], layer.d_out, layer.d_in)
        check_shapes(f"factors of layer {layer.name!r}", block, {"moments": shape})


def between_bases(
    moments: Array,
    old: Kronecker,
    new: Kronecker,
) -> Array:
    """Transform moments `[k, d_out, d_in]` to another eigenbasis, see `squared_basis_change`."""
    dtype = moments.dtype
    if isinstance(new.G, Eigen):
        change = squared_basis_change(old.G.vectors, new.G.vectors, dtype)
        moments = close_product(change, moments)
    if isinstance(new.A, Eigen):
        change = squared_basis_change(old.A.vectors, new.A.vectors, dtype)
        moments = close_product(moments, change.mT)
    return moments


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
