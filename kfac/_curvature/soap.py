"""SOAP: Adam in the eigenbasis of the factors."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from kfac._checks import check_range
from kfac._curvature.eigh import rotate
from kfac._curvature.orthonormal import orthonormal
from kfac._curvature.preconditioner import (
    BlockPreconditioner,
    averaged,
    with_option_hints,
)
from kfac._factors import is_diagonal, per_block
from kfac._linalg import cosine, exact_product, finite, identities


class SOAPState(NamedTuple):
    """The bases of `k` blocks, and Adam's state in them. Outputs come last, as in the memory layout of most kernels.

    Attributes:
      A: approximate eigenvectors of `A`, `[k, d_in, d_in]`. None for diagonal factors.
      G: approximate eigenvectors of `G`, `[k, d_out, d_out]`. None for diagonal factors.
      squares: the bias-corrected running average of squared gradients, `[k, d_in, d_out]`.
      weight: the sum of the weights in `squares`, `[k]`; 0 before the first gradient.
      momentum: the gradients' momentum, `[k, d_in, d_out]`.
    """

    A: Array | None
    G: Array | None
    squares: Array
    weight: Array
    momentum: Array


@with_option_hints
@dataclasses.dataclass(frozen=True)
class SOAP(BlockPreconditioner):
    """Adam in the eigenbasis of the factors: `Q_G [(Q_G^T V Q_A) / sqrt(v + l)] Q_A^T`, elementwise in the brackets.

    ::

        optimizer = kfac.kfac(0.1, layers, preconditioner=kfac.SOAP(decay=0.99))

    `v` is the running average of the squared batch gradients in the eigenbasis, whereas `EKFAC` averages squared
    per-example gradients. Every step's gradient updates `v`, with or without statistics. If a refresh changes the order
    of the eigenvectors, the entries of `v` change their order too. `V` is the gradients' momentum. It is stored in the
    eigenbasis and transformed at each refresh, so a step takes four matrix products.

    The factors are K-FAC's, from per-example gradients. The original SOAP has Shampoo's factors, from batch gradients.
    The curvature determines only the basis. `kfac.kfac` sets the step length. In `kfac.natural_gradient` it is Adam's,
    or that of `trust_ratio`.

    There is no eigendecomposition. The basis starts as the identity, and each refresh makes one step of orthogonal
    iteration, `Q <- qr(A Q)`, so the basis follows the factors. By default the first ten steps all refresh, which
    brings the basis close to the eigenvectors.

    Args:
      precision: the arithmetic in which eigenvectors are applied: `"float32"`, `"bfloat16_3x"`, `"tensorfloat32"` (the
        default) or `"bfloat16"`. A refresh transforms the momentum in the same arithmetic. Eigenvectors and squares are
        always computed in float32, and everything is stored in float32.
      scale_damping: whether a block's damping `l` is in units of the mean of its `v`.
      decay: the running average's decay, in [0, 1).

    Raises:
      ValueError: `precision` is not an accepted value, `scale_damping` is not a bool, or `decay` is out of range.

    References:
      Vyas et al., "SOAP: Improving and Stabilizing Shampoo using Adam", 2024, https://arxiv.org/abs/2409.11321
    """

    precision: str = "tensorfloat32"
    decay: float = 0.95

    damped = False
    owns_momentum = True
    default_damping = 1e-4
    padding = -1.0
    products = 2
    # A product and a QR factorisation (Golub & Van Loan 2013, section 5.2).
    flops_per_cube = 14 / 3

    def __post_init__(self):
        """Check the arguments."""
        super().__post_init__()
        check_range("decay", self.decay, "[0, 1)")

    def init(self, factors):
        """Return identities as eigenvectors, and zero squares and momentum."""

        def identity(stack):
            return None if is_diagonal(stack) else identities(stack.shape, stack.dtype)

        zeros = jnp.zeros((*factors.A.shape[:2], factors.G.shape[1]), factors.A.dtype)
        return SOAPState(
            A=identity(factors.A),
            G=identity(factors.G),
            squares=zeros,
            weight=zeros[:, 0, 0],
            # Not the array of the squares, so that each can be donated.
            momentum=jnp.zeros_like(zeros),
        )

    def refresh(self, state, factors, damping):
        """Advance both bases, reorder the squares accordingly, and transform the momentum to the new bases."""
        a, a_order = orthogonal_iteration(state.A, factors.A)
        g, g_order = orthogonal_iteration(state.G, factors.G)
        # Squares have no signs, so they cannot be rotated. Between refreshes eigenvectors mostly change places.
        squares = jax.vmap(_reorder)(state.squares, a_order, g_order)
        new = state._replace(A=a, G=g, squares=squares)
        # The momentum is a sum of gradients, so it is rotated out of the old basis and into the new basis.
        momentum = self._rotated(state, state.momentum, back=True)
        momentum = self._rotated(new, momentum, back=False)
        # `applied_condition` computes the condition numbers, in each step. Here, they only say whether both factors are
        # finite: LAPACK may return a finite basis for a factor that is not.
        usable = finite(factors.A) & finite(factors.G)
        return new._replace(momentum=momentum), usable.astype(state.weight.dtype)

    def precondition_momentum(self, state, matrices, damping, momentum, ready):
        """Update squares and momentum in the eigenbasis, and divide the momentum by the root of the squares."""
        gradient = self._rotated(state, matrices, back=False)
        squares, weight = averaged(
            state.squares,
            state.weight,
            jnp.square(gradient),
            jnp.asarray(self.decay),
            ready,
        )
        trace, ahead = momentum.moved(state.momentum, gradient)
        scaled = self._scaled(squares, ahead, damping)
        # Before the first refresh there are no squares, and the basis is the identity.
        scaled = jnp.where(per_block(ready, ahead), scaled, ahead)
        moved = self._rotated(state, scaled.astype(matrices.dtype), back=True)
        # Rotations keep angles, so the cosine is taken in the basis, where the old momentum already is.
        last_direction = self._scaled(state.squares, state.momentum, damping)
        new = state._replace(squares=squares, weight=weight, momentum=trace)
        return new, moved, cosine(last_direction, gradient)

    def applied_condition(self, state, damping):
        """Return the condition numbers of the blocks `sqrt(v + l)`, by which a step divides.

        Entries that never had a gradient do not count, and padding is such an entry.
        """
        damped = self._damped(state.squares, damping)
        highest = jnp.max(damped, axis=(1, 2))
        lowest = jnp.min(
            jnp.where(state.squares > 0, damped, per_block(highest, damped)),
            axis=(1, 2),
        )
        return jnp.sqrt(highest / lowest)

    def _scaled(self, squares, matrices, damping):
        return matrices / jnp.sqrt(self._damped(squares, damping))

    def _damped(self, squares, damping):
        # Squares are zero in a block whose gradients have always been zero, and so is their mean. A damping of at least
        # `least` keeps 0 / 0 out of such a block.
        least = jnp.finfo(squares.dtype).tiny
        mean = (
            jnp.mean(squares, axis=(1, 2), keepdims=True) if self.scale_damping else 1
        )
        # A schedule can return zero or a negative number. NaN makes the step count as failed.
        damping = jnp.where(damping > 0, jnp.maximum(damping * mean, least), jnp.nan)
        return squares + damping.astype(squares.dtype)

    def _rotated(self, state, matrices, *, back):
        # Round the bases only here. Bases stored in bfloat16 would not stay orthogonal between refreshes.
        def rounded(x):
            return x.astype(self.state_dtype(x.dtype))

        a, g = jax.tree.map(rounded, (state.A, state.G))
        # The matrices are `[k, d_in, d_out]`: their rows belong to the inputs.
        return rotate(matrices, rows=a, columns=g, precision=self.precision, back=back)


# Added to a factor's eigenvalues, in units of their mean. Eigenvectors with an eigenvalue of almost zero then stay as
# they are. With 1e-4 and less, rounding determined these eigenvectors if a batch had fewer rows than the factor. The
# same rows in another order then gave different steps.
FLOOR = 1e-2


def orthogonal_iteration(old: Array | None, stack: Array) -> tuple[Array | None, Array]:
    """Update the approximate eigenvectors `old` of symmetric `[k, d, d]` by an orthogonal iteration step.

    Returns:
      The new eigenvectors `[k, d, d]`, or None for the identity, which a diagonal factor has; and for each of them the
      index of the old eigenvector from which it is computed, `[k, d]`. Old eigenvectors are taken in descending order
      of their Rayleigh quotients `q^T A q`.
    """
    if old is None:
        return None, lax.broadcasted_iota(jnp.int32, stack.shape, 1)
    image = exact_product(stack, old)
    quotients = jnp.sum(old * image, axis=1)
    # QR keeps the direction of the first column and subtracts it from all others. In descending order, the largest
    # eigenvectors are therefore found first, as in the power method.
    quotients, order = lax.top_k(quotients, stack.shape[1])
    # Padding has negative entries, so it comes last. Absolute values have the same mean with and without padding.
    mean = per_block(jnp.mean(jnp.abs(quotients), axis=1), image)
    # Adding a multiple of the old vectors adds the multiple to all eigenvalues and leaves the eigenvectors.
    image = image / jnp.where(mean > 0, mean, 1) + FLOOR * old
    image = jnp.take_along_axis(image, order[:, None], 2, mode="promise_in_bounds")
    return orthonormal(image), order


def _reorder(matrix: Array, rows: Array, columns: Array) -> Array:
    """Reorder the rows and columns of a matrix by indices."""
    # One gather for rows and columns compiles to fewer kernels than two.
    return matrix.at[rows[:, None], columns].get(
        mode="promise_in_bounds", wrap_negative_indices=False
    )
