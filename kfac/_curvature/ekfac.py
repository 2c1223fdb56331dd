"""EKFAC: running averages of second moments in the eigenbasis, in the place of the products of eigenvalues."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kfac._checks import check_shapes
from kfac._curvature.eigh import Eigh, block_eigenvalues, condition_of, ends
from kfac._curvature.inverse import averaged, product
from kfac._factors import Eigen, Kronecker


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    """Multiplies stacks on tensor cores: moments are estimates, and wrong by far more than 1e-5."""
    return product("kij,kjl->kil", "bfloat16_3x", a.dtype, a.dtype, a, b)


class Moments(NamedTuple):
    """The second moments of per-example gradients of `k` blocks, in the eigenbasis that they are preconditioned in.

    Attributes:
      average: bias-corrected running average, `[k, d_out, d_in]`.
      weight: `[k]`, the sum of the weights in it; 0 before the first.
    """

    average: jax.Array
    weight: jax.Array


@dataclasses.dataclass(frozen=True)
class Ekfac(Eigh):
    """Corrected eigenvalues: `Q_G [(Q_G^T V Q_A) / (s + l)] Q_A^T` with second moments `s` of per-example gradients.

    `s` is the running average of the squares of per-example gradients in the eigenbasis of the factors. It is updated
    with all statistics, and turned into the new basis at each refresh. For layers with a diagonal factor or several
    uses, for kernels that are cut (`find_layers(max_dim=8192)` leaves oblong ones whole), and until a layer has some,
    it is `l_G l_A^T` as with `Eigh`. Statistics must have these moments:
    `kfac.value_and_grad(loss_fn, layers)(params, batch, basis=kfac.curvature.eigenbasis(opt_state, layers))`.

    Args:
      precision: the arithmetic in which eigenvectors are applied: `"float32"`, `"bfloat16_3x"`, `"tensorfloat32"` or
        `"bfloat16"`, in which they are then kept. They are always computed in float32, and eigenvalues kept in it.
      relative: whether the damping of a block is in units of its mean eigenvalue: see `Inverse`.

    Raises:
      ValueError: `precision` is none of these, or `relative` is no bool.

    References:
      George et al., "Fast Approximate Natural Gradient Descent in a Kronecker-factored Eigenbasis", 2018,
      https://arxiv.org/abs/1806.03884
    """

    takes_moments = True

    def init(self, factors):
        """What `Eigh` has, with moments for blocks that have them."""
        inverse = super().init(factors)
        if factors.moments is None:
            return inverse
        return dataclasses.replace(inverse, moments=Moments(factors.moments, jnp.zeros_like(factors.moments[:, 0, 0])))

    def refresh(self, kept, factors, damping):
        """Decompositions of both factors, and the moments in the new basis."""
        new, condition = super().refresh(kept, factors, damping)
        if kept.moments is None:
            return new, condition
        turned = between_bases(kept.moments.average, kept, new, squared_turn)
        new = dataclasses.replace(new, moments=kept.moments._replace(average=turned))
        return new, condition_of(ends(block_eigenvalues(new).reshape(len(damping), -1)), (1.0, 1.0), damping)

    def spectrum(self, kept, factors, damping):
        """The eigenvectors are the kept ones; without moments the eigenvalues are what the factors have along them."""
        if kept is None or kept.moments is None:
            return super().spectrum(kept, factors, damping)

        def along(side, factor):
            q = side.vectors.astype(factor.dtype)
            return Eigen(q, jnp.einsum("kji,kjl,kli->ki", q, factor, q, precision=lax.Precision.HIGHEST))

        basis = Kronecker(along(kept.A, factors.A), along(kept.G, factors.G))
        values = block_eigenvalues(dataclasses.replace(basis, moments=kept.moments))
        return basis, values + damping[:, None, None]

    def absorb(self, kept, moments, decay, taken):
        """Takes them into the running average of the moments."""
        average, weight = averaged(kept.moments.average, kept.moments.weight, moments, decay, taken)
        return dataclasses.replace(kept, moments=Moments(average, weight))

    def basis(self, kept):
        """The eigenvectors of blocks that have moments."""
        return None if kept.moments is None else Kronecker(kept.A.vectors, kept.G.vectors)

    def check(self, layer, block):
        """Moments must be there, and of the right shape."""
        if not layer.correctable:
            return
        if block.moments is None:
            how = "value_and_grad(...)(params, batch, basis=kfac.curvature.eigenbasis(opt_state, layers))"
            raise ValueError(f"factors of layer {layer.name!r} have no moments, which inverse={self!r} needs: {how}")
        shape = (*block.A.shape[:-2], layer.d_out, layer.d_in)
        check_shapes(f"factors of layer {layer.name!r}", block, {"moments": shape})


def between_bases(matrices: jax.Array, old: Kronecker, new: Kronecker, of: Callable[..., jax.Array]) -> jax.Array:
    """Brings matrices `[k, d_out, d_in]` from one eigenbasis into another: `T_G V T_A^T`, with `T` by `of`."""
    if isinstance(new.G, Eigen):
        matrices = _product(of(old.G.vectors, new.G.vectors, matrices.dtype), matrices)
    if isinstance(new.A, Eigen):
        matrices = _product(matrices, of(old.A.vectors, new.A.vectors, matrices.dtype).mT)
    return matrices


def turn(old: jax.Array, new: jax.Array, dtype: Any) -> jax.Array:
    """`Q_new^T Q_old`, in `dtype`, of stacks of eigenvectors."""
    return _product(new.astype(dtype).mT, old.astype(dtype))


def squared_turn(old: jax.Array, new: jax.Array, dtype: Any) -> jax.Array:
    """The squares of `Q_new^T Q_old`, in `dtype`, of stacks of eigenvectors: what turns moments `s` `[k, d_out, d_in]`.

    `(T_G * T_G) s (T_A * T_A)^T` is the diagonal, in the new basis, of the matrix that had `s` for eigenvalues in the
    old one. So what has been learnt of a block stays where the basis has moved little, and their sum always.
    """
    square = jnp.square(turn(old, new, dtype))
    # Columns sum to 1, so that no part of the sum is lost where vectors are rounded to bfloat16.
    return square / jnp.sum(square, axis=-2, keepdims=True)
