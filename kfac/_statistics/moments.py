"""Second moments of per-example gradients: in an eigenbasis for EKFAC, and for elementwise parameters."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from kfac._factors import Basis
from kfac._mesh import sum_of_parts
from kfac._statistics.convolution import PATCH_ELEMENTS, Patches
from kfac._statistics.rows import Arrangement, Rows, accumulator


def squares_in_basis(
    x: Rows | Patches,
    g: Rows,
    basis: Basis,
    dtype: DTypeLike,
) -> Array:
    """Sum the squared per-example gradients in an eigenbasis, `[copies, d_out, d_in]`.

    The factors have the eigenvectors `Q_A` and `Q_G`. Example `i` contributes `sum_p g_ip a_ip^T`, a sum over positions
    `p`, to the gradient. The result is `sum_i (Q_G^T (sum_p g_ip a_ip^T) Q_A)^2`, squared elementwise (George et al.
    2018, section 3). Among all matrices with these eigenvectors, the nearest to the layer's Fisher block has `n` times
    the result as eigenvalues.

    Args:
      x: the inputs. Parts of the batch are processed one after another.
      g: the output gradients for the same examples.
      basis: `Q_A` `[copies, d_in, d_in]` and `Q_G` `[copies, d_out, d_out]`.
      dtype: the dtype of the sums.
    """
    copies, _, positions, d_out = g.array.shape
    d_in = basis.A.shape[-1]
    elements = copies * (d_in * d_out * (positions > 1) + positions * (d_in + d_out))

    def squares(inputs, gradients):
        a = x.part(inputs).astype(dtype)
        return _squares(a, g.part(gradients).astype(dtype), basis)

    limit = max(1, PATCH_ELEMENTS // elements)
    return sum_of_parts(squares, limit, x.by_example(), g.by_example())


def _squares(
    a: Array,
    g: Array,
    basis: Basis,
) -> Array:
    """Compute `squares_in_basis` from inputs `[n, copies, s, d_in]` and output gradients `[n, copies, s, d_out]`."""
    q_a = basis.A.astype(a.dtype)
    q_g = basis.G.astype(a.dtype)
    positions, d_in = a.shape[2:]
    d_out = g.shape[3]
    # Rotate either the rows or the gradient, which is one matrix per example, whichever takes fewer products.
    rows_first = positions * (d_in**2 + d_out**2) <= d_in * d_out * (d_in + d_out)
    if rows_first:
        a = jnp.einsum("ncsi,cij->ncsj", a, q_a)
        g = jnp.einsum("ncso,cop->ncsp", g, q_g)
    if positions == 1:
        g = jnp.square(g[:, :, 0])
        return jnp.einsum("nco,nci->coi", g, jnp.square(a[:, :, 0]))
    gradients = jnp.einsum("ncso,ncsi->ncoi", g, a)
    if not rows_first:
        gradients = jnp.einsum("cop,ncoi,cij->ncpj", q_g, gradients, q_a)
    return jnp.sum(jnp.square(gradients), axis=0)


def example_gradients(
    g: Array,
    coefficient: Array | None,
    arrange: Arrangement,
) -> Array:
    """Return the per-example gradients with respect to an elementwise parameter, summed over positions, `[n, units]`.

    Args:
      g: the gradient with respect to the sum or product.
      coefficient: the factor by which the parameter was multiplied, broadcastable to `g`; None for a sum.
      arrange: brings `g` to `[1, n, s, units]`.
    """

    def taken(x):
        return jnp.broadcast_to(x, g.shape).reshape(arrange.split)

    gradients = taken(g).astype(accumulator(g.dtype))
    if coefficient is not None:
        gradients = gradients * taken(coefficient).astype(gradients.dtype)
    axes = [*arrange.examples, *arrange.features]
    gradients = jnp.einsum(gradients, [*range(gradients.ndim)], axes)
    return gradients.reshape(-1, math.prod(arrange.split[k] for k in arrange.features))
