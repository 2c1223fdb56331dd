"""Second moments of per-example gradients in the eigenbasis of the factors: what EKFAC corrects eigenvalues with.

With the eigenvectors `Q_A` and `Q_G` of the factors of a layer, and the share `sum_p g_p a_p^T` that an example with
positions `p` has in the gradient, they are `n sum_i (Q_G^T (sum_p g_ip a_ip^T) Q_A)^2`, elementwise (George et al.
2018, section 3). Among all matrices with these eigenvectors, the one with these eigenvalues is nearest to the layer's
block of the Fisher matrix.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kfac._capture import axes as axes_lib
from kfac._capture.axes import Arrangement
from kfac._capture.reads import Read
from kfac._factors import Kronecker
from kfac._statistics.dense import PATCH_ELEMENTS, Convolution, for_examples, patches
from kfac._varying import zeros_of


@dataclasses.dataclass(frozen=True)
class MomentSums:
    """Sums of squares of per-example gradients in a basis, at the one use of a kernel.

    Attributes:
      basis: key of the layer's eigenvectors among the probes.
      examples: how many the rows of both sides fall into; those of one example follow each other.
      arrange_x: brings the input, or its patches, to `[copies, rows, features]`, rows in the order of `arrange_g`.
      arrange_g: brings the gradient to `[copies, rows, d_out]`.
      geometry: that of a convolution.
      by_image: whether the images of a convolution are the examples, so that it needs the patches of a few at a time.
      homogeneous: the last entry of every row of the input, which belongs to a bias; None without one.
      subsample: only every `subsample`-th example is taken, with so much more weight.
      groups: of so many equal runs of examples it takes every `subsample`-th; sequences, where tokens are examples.
      dtype: of the sums.
    """

    basis: tuple[Any, ...]
    examples: int
    arrange_x: Arrangement
    arrange_g: Arrangement
    geometry: Convolution | None
    by_image: bool
    homogeneous: float | None
    subsample: int
    groups: int
    dtype: Any

    def __call__(self, x: jax.Array, g: jax.Array, number: jax.Array | None, basis: Kronecker) -> jax.Array:
        """Sums of squares, `[copies, d_out, d_in]`.

        Args:
          x: the input as the operation reads it.
          g: the gradient with respect to its result.
          number: what the kernel is multiplied by, if by anything.
          basis: `Q_A` `[copies, d_in, d_in]` and `Q_G` `[copies, d_out, d_out]`.
        """
        if self.geometry is not None:
            batch, channel, *spatial = self.geometry.spec
            x = x.transpose(batch, *spatial, channel)
        inputs = x if self.by_image else self._inputs(x, self.examples)
        gradients = _by_example(self.arrange_g(g), self.examples)
        if self.subsample > 1:
            inputs, gradients = self._thinned(inputs), self._thinned(gradients)

        def squares(part):
            inputs, gradients = part
            a = self._inputs(inputs, len(inputs)) if self.by_image else inputs
            return _squares(self._finish(a, number), gradients.astype(self.dtype), basis)

        taken, copies, positions, d_out = gradients.shape
        d_in = basis.A.shape[-1]
        elements = copies * (d_in * d_out * (positions > 1) + positions * (d_in + d_out))
        limit = min(taken, max(1, PATCH_ELEMENTS // elements))
        chunk = next(size for size in range(limit, 0, -1) if taken % size == 0)
        parts = inputs, gradients
        if chunk == taken:
            return squares(parts) * (self.examples / taken)
        parts = jax.tree.map(lambda x: x.reshape(taken // chunk, chunk, *x.shape[1:]), parts)
        zeros = zeros_of(squares, jax.tree.map(lambda x: x[0], parts))
        total, _ = lax.scan(lambda total, part: (total + squares(part), None), zeros, parts)
        return total * (self.examples / taken)

    def _thinned(self, x: jax.Array) -> jax.Array:
        taken = x.reshape(self.groups, -1, *x.shape[1:])[:: self.subsample]
        return taken.reshape(-1, *x.shape[1:])

    def _inputs(self, x: jax.Array, examples: int) -> jax.Array:
        """`[examples, copies, positions, features]`."""
        if self.geometry is None:
            return _by_example(self.arrange_x(x), examples)
        arrange = for_examples(self.arrange_x, examples) if self.by_image else self.arrange_x
        return _by_example(arrange(patches(x, self.geometry)), examples)

    def _finish(self, rows: jax.Array, number: jax.Array | None) -> jax.Array:
        """Inputs in the dtype of the sums, times the kernel's number, with the entry of the bias."""
        rows = rows.astype(self.dtype)
        if number is not None:
            rows = rows * number
        if self.homogeneous is None:
            return rows
        return jnp.pad(rows, ((0, 0), (0, 0), (0, 0), (0, 1)), constant_values=self.homogeneous)


def _by_example(rows: jax.Array, examples: int) -> jax.Array:
    """`[copies, rows, d]` as `[examples, copies, positions, d]`."""
    copies, count, width = rows.shape
    return jnp.moveaxis(rows.reshape(copies, examples, count // examples, width), 1, 0)


def _squares(a: jax.Array, g: jax.Array, basis: Kronecker) -> jax.Array:
    """Sums over examples of squares of their gradients in the basis.

    Args:
      a: inputs `[examples, copies, positions, d_in]`.
      g: output gradients `[examples, copies, positions, d_out]`.
      basis: `Q_A` and `Q_G`.
    """
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


def row_positions(read: Read, eqn: Any) -> tuple[list[int], list[int]]:
    """The axes that make the rows of a product's or convolution's result, and the same ones in its input.

    Both are positions among all atoms, in the order of the result; the input may have them in another.
    """
    numbers = eqn.params["dimension_numbers"]
    if read.op == "conv":
        # Axes of the patches: the images, the positions in the order of `out_spec`, the window and channels.
        axis_of = dict(zip((numbers.out_spec[0], *numbers.out_spec[2:]), range(len(numbers.out_spec)), strict=False))
        order = [axis_of[k] for k in sorted(axis_of)]
    else:
        contract, batch = (sides[1 - read.operand] for sides in numbers)
        free = [k for k in range(len(read.x_axes)) if k not in contract and k not in batch]
        order = [*batch, *free]
    starts = [sum(map(len, read.x_axes[:k])) for k in range(len(read.x_axes))]
    in_x = [starts[k] + p for k in order for p, atom in enumerate(read.x_axes[k]) if not atom.of_leaf]
    x, y = axes_lib.flatten(read.x_axes), axes_lib.flatten(read.y_axes)
    in_y = [p for p, atom in enumerate(y) if not atom.of_leaf]
    assert [x[p].size for p in in_x] == [y[p].size for p in in_y], read
    return in_y, in_x
