"""Second moments of per-example gradients: in an eigenbasis, for EKFAC, and of elementwise parameters."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from kfac._factors import Kronecker
from kfac._statistics.convolution import PATCH_ELEMENTS
from kfac._statistics.rows import Arrangement, Form, Rows, accumulator
from kfac._varying import sum_of_parts


def squares_in_basis(x: Form, g: Rows, basis: Kronecker, dtype: Any) -> jax.Array:
    """Sums over examples of squares of their gradients in an eigenbasis, `[copies, d_out, d_in]`.

    With the eigenvectors `Q_A` and `Q_G` of the factors of a layer, and the share `sum_p g_p a_p^T` that an example
    with positions `p` has in the gradient, it is `sum_i (Q_G^T (sum_p g_ip a_ip^T) Q_A)^2`, elementwise (George et al.
    2018, section 3). Among all matrices with these eigenvectors, the one whose eigenvalues are `n` times that is
    nearest to the layer's block of the Fisher matrix.

    Args:
      x: inputs, a few examples at a time.
      g: output gradients, of the same examples.
      basis: `Q_A` `[copies, d_in, d_in]` and `Q_G` `[copies, d_out, d_out]`.
      dtype: of the sums.
    """
    copies, _, positions, d_out = g.array.shape
    d_in = basis.A.shape[-1]
    elements = copies * (d_in * d_out * (positions > 1) + positions * (d_in + d_out))

    def squares(inputs, gradients):
        return _squares(x.part(inputs).astype(dtype), g.part(gradients).astype(dtype), basis)

    return sum_of_parts(squares, max(1, PATCH_ELEMENTS // elements), x.by_example(), g.by_example())


def _squares(a: jax.Array, g: jax.Array, basis: Kronecker) -> jax.Array:
    """`squares_in_basis` of inputs `[n, copies, s, d_in]` and output gradients `[n, copies, s, d_out]`."""
    q_a, q_g = basis.A.astype(a.dtype), basis.G.astype(a.dtype)
    positions, d_in, d_out = a.shape[2], a.shape[3], g.shape[3]
    # Into the basis either rows, of which there are many, or the gradient, which is one matrix for each example.
    rows_first = positions * (d_in**2 + d_out**2) <= d_in * d_out * (d_in + d_out)
    if rows_first:
        a, g = jnp.einsum("ncsi,cij->ncsj", a, q_a), jnp.einsum("ncso,cop->ncsp", g, q_g)
    if positions == 1:
        return jnp.einsum("nco,nci->coi", jnp.square(g[:, :, 0]), jnp.square(a[:, :, 0]))
    gradients = jnp.einsum("ncso,ncsi->ncoi", g, a)
    if not rows_first:
        gradients = jnp.einsum("cop,ncoi,cij->ncpj", q_g, gradients, q_a)
    return jnp.sum(jnp.square(gradients), axis=0)


def example_gradients(g: jax.Array, coefficient: jax.Array | None, arrange: Arrangement) -> jax.Array:
    """Gradients of each example with respect to an elementwise parameter, summed over positions, `[n, units]`.

    Args:
      g: gradient with respect to the result of the sum or product.
      coefficient: what the parameter was multiplied by, broadcastable to `g`; None for a sum.
      arrange: brings `g` to `[1, n, s, units]`.
    """

    def taken(x):
        return jnp.broadcast_to(x, g.shape).reshape(arrange.split)

    gradients = taken(g).astype(accumulator(g.dtype))
    if coefficient is not None:
        gradients = gradients * taken(coefficient).astype(gradients.dtype)
    axes = [*arrange.examples, *arrange.features]
    order = sorted(axes)
    # Summed before the transposition, as the array lies.
    gradients = jnp.sum(gradients, axis=arrange.rows).transpose([order.index(k) for k in axes])
    return gradients.reshape(-1, math.prod(arrange.split[k] for k in arrange.features))
