"""Collect a parameter's statistics with taps behind the operations that read it.

A tap is an identity on the result of an operation. Its backward pass also computes statistics of the operation's input
and of the gradient that passes through, and returns them as the cotangent of a `probe`. Differentiating the loss with
respect to the probes therefore yields the statistics in the same backward pass as the gradients.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax import Array, lax
from jax.sharding import PartitionSpec

from kfac._capture.program import Op
from kfac._capture.reduce_scatter import ReduceScatter
from kfac._capture.states import Use
from kfac._factors import Kronecker, Ragged
from kfac._layers import Layer
from kfac._mesh import with_auto_axes
from kfac._packing import pieces_along
from kfac._statistics.convolution import Patches
from kfac._statistics.moments import example_gradients, squares_in_basis
from kfac._statistics.rows import (
    Arrangement,
    Lookup,
    RaggedRows,
    Rows,
    as_floats,
)


class Key(NamedTuple):
    """The key of a probe, or of another entry among the probes.

    Attributes:
      layer: the layer's name; empty for a mark.
      number: for a Kronecker layer, the number of the part (`Use.part`). For another layer or a mark, any number.
      role: `"transposed"` for a use that reads the part's transpose, and `"eigenvectors"` for the part's eigenvectors.
        Otherwise empty.
    """

    layer: str
    number: int
    role: str = ""


# The probes and other entries: zeros for the taps, eigenvectors, and inputs of the marks.
Probes = Mapping[Key, Array | Kronecker | Ragged]
# The arrays from which a tap computes its sums, besides the gradient.
Residuals = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class KroneckerTap:
    """The sums of `a a^T` and `g g^T` at a single use of a kernel, or their diagonals or diagonal blocks.

    For an embedding lookup, the diagonal of `a a^T` holds counts. If the layer has the setting "reduce", the tap sums
    `a` and `g` over the positions of each example, `[copies, n, d]`. Their products are formed after all uses have been
    summed. With a `basis`, the tap also sums the squares of per-example gradients in the basis. The eigenvectors come
    with the residuals.

    Attributes:
      key: the probe's key.
      use: the operation, and the part of the kernel that it reads.
      layer: the kernel's layer.
      arrange_x: brings the data, or a convolution's patches, to the normal form.
      arrange_g: brings the gradient to the normal form.
      homogeneous: the last entry of every input: 1 with the bias, or 0 in a use without the bias; None for a layer
        without a bias.
      dtype: the sums' dtype.
      basis: the key of the layer's eigenvectors among the probes; None if the tap sums no squares.
      scatter: how devices pack and add up the sums; None on a single device, or if this is left to XLA. If `scatter`
        has mesh axes, `arrange_x` and `arrange_g` arrange the examples of a single device.
    """

    key: Key
    use: Use
    layer: Layer
    arrange_x: Arrangement
    arrange_g: Arrangement
    homogeneous: float | None
    dtype: np.dtype
    basis: Key | None = None
    scatter: ReduceScatter | None = None

    def residuals(
        self,
        values: Sequence[Array],
        multiplier: Array | None,
        probes: Probes,
    ) -> Residuals:
        """Return the arrays that `statistics` needs: data, multiplier, eigenvectors and group sizes.

        Args:
          values: the op's inputs.
          multiplier: the factors by which the kernel has been multiplied, all equal. None if it has not.
          probes: the entries among the probes.
        """
        read = self.use.read
        number = None if multiplier is None else multiplier.reshape(-1)[0]
        basis = None if self.basis is None else probes[self.basis]
        sizes = None if read.groups is None else values[read.groups]
        return values[read.other], number, basis, sizes

    def statistics(self, residuals: Residuals, g: Array) -> Kronecker | Ragged:
        """Return the sums, from the arrays of `residuals` and the gradient `g`."""
        x, number, basis, sizes = residuals
        conv = self.use.read.geometry
        outputs: Any = Rows(self.arrange_g(g))
        if isinstance(conv, Lookup):
            counts = self.arrange_x(conv.counts(x, self.dtype))[:, 0, 0]
            if number is not None:
                counts = counts * number**2
            return Kronecker(counts, self._side("G", outputs))
        if conv and not self.use.op.loops:
            # Otherwise XLA would form patches from the arrays that the image is computed from, and keep them.
            x = lax.optimization_barrier(x)
        x = as_floats(x, self.dtype)
        if number is not None:
            # (c w) x = w (c x). The entry appended to `x` for a bias is not scaled.
            x = x * number.astype(x.dtype)
        inputs: Any
        if conv:
            image = conv.channels_last(x)
            inputs = Patches(image, conv, self.arrange_x, self.homogeneous)
        else:
            inputs = Rows(self.arrange_x(x), self.homogeneous)
        if sizes is not None:
            inputs = RaggedRows(inputs.array[0, 0], sizes)
            outputs = RaggedRows(outputs.array[0, 0], sizes)
            return Ragged(self._side("A", inputs), self._side("G", outputs), sizes)
        moments = None
        if basis is not None:
            moments = squares_in_basis(inputs, outputs, basis, self.dtype)
        return Kronecker(self._side("A", inputs), self._side("G", outputs), moments)

    def _side(self, side: str, rows: Any) -> Array:
        """Return the sums of the rows on the side `"A"` (inputs) or `"G"` (output gradients)."""
        layer = self.layer
        if layer.weight_sharing == "reduce":
            return rows.sums()
        if self.key.role == "transposed":
            side = "G" if side == "A" else "A"
        if side in layer.diagonal:
            return rows.diagonal()
        count = pieces_along(side, layer.num_blocks)
        return rows.blocks(count) if count > 1 else rows.gram()


@dataclasses.dataclass(frozen=True)
class ElementwiseTap:
    """Per-example gradients `[n, units]` at a single use of a scale, a shift or another vector.

    Attributes:
      key: the probe's key.
      use: the operation.
      arrange: brings the gradient to the normal form.
      dtype: the statistics' dtype.
      lies: the gradients' sharding over explicit mesh axes, which split the examples; None without such axes.
    """

    key: Key
    use: Use
    arrange: Arrangement
    dtype: np.dtype
    lies: PartitionSpec | None = None

    def residuals(
        self,
        values: Sequence[Array],
        multiplier: Array | None,
        probes: Probes,
    ) -> Residuals:
        """Return the arrays that `coefficient` needs: the inputs, except for a sum, and the multiplier."""
        return () if self.use.read.op == "add" else tuple(values), multiplier

    def coefficient(
        self,
        values: Sequence[Array],
        multiplier: Array | None,
    ) -> Array | None:
        """Return the derivatives of the result with respect to the parameter, without `Read.sign`. None: all are 1."""
        if not values:
            return multiplier
        use = self.use
        return use.op.derivatives(values, use.read.operand, multiplier)[0]

    def statistics(self, coefficient: Array | None, g: Array) -> Array:
        """Return the gradients, from `coefficient` and the result's gradient `g`."""
        return self.use.read.sign * example_gradients(g, coefficient, self.arrange)


Tap = KroneckerTap | ElementwiseTap


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def tapped(
    tap: Tap,
    residuals: Residuals,
    y: Array,
    probe: Any,
) -> Array:
    """Return `y`. The cotangent of `probe` is the statistics that the tap computes."""
    return y


def _backward(tap, residuals, g):
    def statistics(residuals, g):
        return optax.tree.cast(tap.statistics(residuals, g), tap.dtype)

    if isinstance(tap, ElementwiseTap):
        coefficient = tap.coefficient(*residuals)
        return None, g, with_auto_axes(statistics, tap.lies)(coefficient, g)
    if tap.scatter is None:
        return None, g, with_auto_axes(statistics)(residuals, g)

    return None, g, tap.scatter.sums(statistics, residuals, g)


tapped.defvjp(lambda tap, residuals, y, probe: (y, residuals), _backward)


@jax.custom_jvp
def together(values: Any) -> Any:
    """Return `values`, whose cotangents are computed together (an optimization barrier in the backward pass).

    The barrier ties a layer's operands to the layer's probe. Without it, XLA would compute the statistics and the
    kernel's gradient at different times, and keep their operands in memory between the two.
    """
    return values


@functools.partial(together.defjvp, symbolic_zeros=True)
def _together(primals, tangents):
    arrays = [x for x in jax.tree.leaves(tangents[0]) if isinstance(x, Array)]
    tied = iter(lax.optimization_barrier(arrays))

    # Tangents that are not arrays are symbolic zeros.
    return primals[0], jax.tree.map(
        lambda x: next(tied) if isinstance(x, Array) else x, tangents[0]
    )


# The function at a marked output. From the output and the mark's entry among the probes, it computes the output's
# replacement and a value to hand out.
AtMark = Callable[[Array, Any], tuple[Array, Array]]


class TapPlan:
    """The additions of a replay to a program and the programs inside it.

    Attributes:
      taps: the tap behind an op.
      multipliers: for an op whose result is a scaled view of a parameter, the number of the operand that is the view.
      merges: for an op at which common rows meet the examples, the result's axis of examples.
      marks: for a marked output, its key and its function.
      sliced: for a scan, the keys of the probes that have an entry for each iteration.
    """

    def __init__(self, multipliers: Mapping[Op, int], merges: Mapping[Op, int]):
        self.taps: dict[Op, Tap] = {}
        self.multipliers = multipliers
        self.merges = merges
        self.marks: dict[Op, tuple[Key, AtMark]] = {}
        self.sliced = collections.defaultdict[Op, list[Key]](list)

    def place(
        self,
        tap: Tap,
        keys: Sequence[Key],
        iterated: Sequence[Op],
    ) -> None:
        """Put a tap behind its operation. See `slice_probes` for the other arguments."""
        self.taps[tap.use.op] = tap
        self.slice_probes(keys, iterated)

    def slice_probes(self, keys: Sequence[Key], iterated: Sequence[Op]) -> None:
        """Give the probes `keys` an entry for each iteration of the scans `iterated`."""
        for loop in iterated:
            self.sliced[loop] += keys
