"""Closed-form inverses of small dense blocks, one per channel: normalisation scales and shifts, single elements."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array

from kfac._curvature.preconditioner import BlockPreconditioner
from kfac._factors import Basis
from kfac._linalg import identities


@dataclasses.dataclass(frozen=True)
class ChannelPreconditioner(BlockPreconditioner):
    """`(F + l I)^-1 v` for every channel, with `F` `[k, channels, p, p]` and `p` 1 or 2.

    A layer's channels form one block. The block fails if a channel is not positive definite after damping. The block's
    condition number is the largest 1-norm condition number of its channels. The state is the inverses, an array
    `[k, channels, p, p]`.
    """

    padding = 1.0

    def init(self, factors):
        """Return identities shaped like the statistics."""
        return identities(factors.F.shape, self.state_dtype(factors.F.dtype))

    def refresh(self, state, factors, damping):
        """Invert all channels in closed form."""
        blocks = factors.F
        invert = _inverse_1x1 if blocks.shape[-1] == 1 else _inverse_2x2
        damping = damping.astype(blocks.dtype)[:, None]
        inverse, condition, definite = invert(blocks, damping)
        usable = jnp.all(definite & jnp.isfinite(condition), axis=1)
        worst = jnp.where(usable, jnp.max(condition, axis=1), 0)
        return inverse.astype(state.dtype), worst

    def spectrum(self, state, factors, damping):
        """Decompose each channel."""
        values, vectors = jnp.linalg.eigh(factors.F)
        # Rounding can make eigenvalues of a second moment negative.
        values = jnp.maximum(values, 0)
        return Basis(vectors, None), values[..., None, :] + damping[:, None, None, None]

    def apply(self, state, matrices, damping):
        """Multiply each channel by its inverse, in float32 or better."""
        # The inverses contain the damping at their refresh.
        return jnp.sum(state.astype(matrices.dtype) * matrices[:, :, None, :], axis=-1)


# The inverses of damped blocks, `[k, channels, p, p]`, their condition numbers, `[k, channels]`, and whether each block
# is positive definite, `[k, channels]`.
Inverted = tuple[Array, Array, Array]


def _inverse_1x1(
    f: Array,
    damping: Array,
) -> Inverted:
    value = f[..., 0, 0] + damping
    return (1 / value)[..., None, None], value / value, value > 0


def _inverse_2x2(
    f: Array,
    damping: Array,
) -> Inverted:
    """Invert damped 2x2 blocks.

    If the block is a second moment, the determinant is a sum of non-negative terms, so it cannot cancel to zero.
    """
    # Divide by the larger diagonal entry, because products of large second moments overflow.
    scale = jnp.maximum(f[..., 0, 0], f[..., 1, 1]) + damping
    a = f[..., 0, 0] / scale
    b = f[..., 0, 1] / scale
    d = f[..., 1, 1] / scale
    shift = damping / scale
    # A second moment has |b| <= sqrt(a d), but rounding in its sums can exceed this bound slightly. If a block exceeds
    # the bound by more, it is indefinite, and only damping can make it positive definite.
    limit = jnp.sqrt(jnp.maximum(a, 0)) * jnp.sqrt(jnp.maximum(d, 0))
    tolerance = 1 + jnp.sqrt(jnp.finfo(f.dtype).eps)
    moment = (jnp.minimum(a, d) >= 0) & (jnp.abs(b) <= tolerance * limit)
    b = jnp.where(moment, jnp.clip(b, -limit, limit), b)
    minor = a * d - b * b
    minor = jnp.where(moment, jnp.maximum(minor, 0), minor)
    determinant = minor + shift * (a + d) + shift * shift
    adjugate = jnp.stack([d + shift, -b, -b, a + shift], axis=-1)
    inverse = adjugate.reshape(f.shape) / (determinant * scale)[..., None, None]
    condition = (jnp.maximum(a, d) + shift + jnp.abs(b)) ** 2 / determinant
    definite = (scale > 0) & (a + shift > 0) & (d + shift > 0) & (determinant > 0)
    return inverse, condition, definite
