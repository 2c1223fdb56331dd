"""Taps: what stands behind an operation that reads a parameter, and collects its statistics.

A tap is an identity on the result of an operation. Its backward pass also returns statistics of the operation's input
and of the gradient that passes through, as the cotangent of a `probe`: differentiating the loss with respect to the
probes yields the statistics in the same backward pass as the gradients.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec

from kfac._capture.program import Op
from kfac._capture.spread import Spread
from kfac._capture.states import Use
from kfac._factors import Kronecker, Ragged
from kfac._statistics.moments import example_gradients, squares_in_basis
from kfac._statistics.rows import Arrangement, Groups, Lookup, OneHot, Rows, as_floats
from kfac._varying import whole

# Of a probe of a Kronecker layer its name and `Use.part`, and "transposed" where that reads the transpose; of another
# layer its name and a number; of a mark "" and a number; of eigenvectors the layer's name, the part and "eigenvectors".
Key = tuple[Any, ...]
Probes = Mapping[Key, Any]


@dataclasses.dataclass(frozen=True)
class KroneckerTap:
    """Sums of `a a^T` and `g g^T` at one use of a kernel, or of their diagonals, or of blocks of them.

    Of a lookup the diagonal of `a a^T` are counts. In the setting "reduce" it is sums of `a` and `g` over the positions
    of each example, `[copies, n, d]`: their products can be formed when all uses have been summed. With a basis also
    sums of squares of per-example gradients in it, which comes with the residuals.

    Attributes:
      key: of the probe.
      use: the operation, and what of the kernel it reads.
      arrange_x: brings the data, or the patches of it, to the normal form.
      arrange_g: brings the gradient to it.
      images: whether the images of a convolution are the examples, or there is one example.
      homogeneous: the last entry of every input: 1 with a bias, 0 in a use of the kernel without it; None for no bias.
      dtype: of the sums.
      diagonal: which of the two are kept as their diagonals.
      cut: in how many diagonal blocks each is kept.
      reduce: whether the setting is "reduce".
      basis: key of the layer's eigenvectors among the probes.
      spread: how its sums are formed over a mesh, with what arranges the examples of a device; None where that is
        left to XLA, or there is one device.
    """

    key: Key
    use: Use
    arrange_x: Arrangement
    arrange_g: Arrangement
    images: bool
    homogeneous: float | None
    dtype: Any
    diagonal: tuple[str, ...] = ()
    cut: tuple[int, int] = (1, 1)
    reduce: bool = False
    basis: Key | None = None
    spread: Spread | None = None

    def residuals(self, values: Sequence[jax.Array], multiplier: jax.Array | None, probes: Probes) -> Any:
        # A kernel is multiplied by the same number everywhere, if at all.
        number = None if multiplier is None else multiplier.reshape(-1)[0]
        sizes = None if self.use.read.groups is None else values[self.use.read.groups]
        return values[self.use.read.other], number, None if self.basis is None else probes[self.basis], sizes

    def statistics(self, residuals: Any, g: jax.Array) -> Kronecker | Ragged:
        read, (x, number, basis, sizes) = self.use.read, residuals
        if number is not None and not isinstance(read.geometry, Lookup):
            x = as_floats(x, self.dtype)
            x = x * number.astype(x.dtype)  # (c w) x = w (c x); what is appended to x for a bias is not scaled
        # XLA would form patches from the operands of the image, and keep these.
        if not self.use.op.loops and read.op == "conv":
            x = lax.optimization_barrier(x)
        inputs: Any = read.geometry.form(x, self.arrange_x, self.homogeneous, self.images, self.dtype)
        outputs: Any = Rows(self.arrange_g(g))
        if sizes is not None:
            inputs, outputs = (Groups(form.array[0, 0], sizes) for form in (inputs, outputs))
            return Ragged(self._side("A", inputs), self._side("G", outputs), sizes)
        moments = None if basis is None else squares_in_basis(inputs, outputs, basis, self.dtype)
        a, g = self._side("A", inputs), self._side("G", outputs)
        counted = number is not None and isinstance(inputs, OneHot)
        return Kronecker(a * number**2 if counted else a, g, moments)

    def _side(self, side: str, form: Any) -> jax.Array:
        if self.reduce or side in self.diagonal:
            return form.sums() if self.reduce else form.diagonal()
        count = self.cut["AG".index(side)]
        return form.blocks(count) if count > 1 else form.gram()


@dataclasses.dataclass(frozen=True)
class ElementwiseTap:
    """Per-example gradients `[n, units]` at one use of a scale or shift.

    Attributes:
      key: of the probe.
      use: the operation.
      arrange: brings the gradient to the normal form.
      dtype: of the statistics.
      lies: how the gradients lie over explicit axes of a mesh: as the examples do.
    """

    key: Key
    use: Use
    arrange: Arrangement
    dtype: Any
    lies: PartitionSpec | None = None

    @property
    def other(self) -> int | None:
        """Which input the data is that the parameter is multiplied with; None for a sum."""
        return self.use.read.other if self.use.read.op == "mul" else None

    def residuals(self, values: Sequence[jax.Array], multiplier: jax.Array | None, probes: Probes) -> Any:
        del probes
        return None if self.other is None else values[self.other], multiplier

    def statistics(self, residuals: Any, g: jax.Array) -> jax.Array:
        (other, coefficient), read = residuals, self.use.read
        if other is not None:
            factor = 1 / other if read.divides else other
            coefficient = factor if coefficient is None else factor * coefficient
        return read.sign * example_gradients(g, coefficient, self.arrange)


Tap = KroneckerTap | ElementwiseTap


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def tapped(tap: Tap, residuals: Any, y: jax.Array, probe: Any) -> jax.Array:
    """`y`, with statistics for the cotangent of `probe`."""
    del tap, residuals, probe
    return y


def _backward(tap, residuals, g):
    def statistics(residuals, g):
        return jax.tree.map(lambda moment: moment.astype(tap.dtype), tap.statistics(residuals, g))

    if isinstance(tap, KroneckerTap) and tap.spread is not None:
        return None, g, tap.spread.sums(statistics, residuals, g)
    lies = tap.lies if isinstance(tap, ElementwiseTap) else None
    return None, g, whole(statistics, lies)(residuals, g)


tapped.defvjp(lambda tap, residuals, y, probe: (y, residuals), _backward)


@jax.custom_jvp
def together(values: Any) -> Any:
    """Identity whose cotangents are computed together (an optimization barrier in the backward pass).

    It ties the operands of a layer to its probe. Else XLA would compute statistics and the gradient of the kernel at
    different times, and keep until then what they are made of.
    """
    return values


@functools.partial(together.defjvp, symbolic_zeros=True)
def _together(primals, tangents):
    # Those that are no arrays are symbols of zeros.
    moving = iter(lax.optimization_barrier([x for x in jax.tree.leaves(tangents[0]) if isinstance(x, jax.Array)]))
    return primals[0], jax.tree.map(lambda x: next(moving) if isinstance(x, jax.Array) else x, tangents[0])


# At a marked output: from its value and the mark's entry among the probes, the value to go on with and one to hand out.
AtMark = Callable[[jax.Array, Any], tuple[jax.Array, jax.Array]]


@dataclasses.dataclass
class Plan:
    """What a replay does at the ops of a program, and of those inside it, beside computing them.

    Attributes:
      taps: taps behind ops.
      multipliers: ops whose result is a scaled view of a parameter, and the operand that is the view.
      late: taps of reads of rows that all examples share, and the number of these.
      merges: ops at which such rows meet the examples, and the axis of these.
      marks: what happens at marked outputs, with their keys.
      inside: scans and remats that are looked into, with the keys of the probes used there, and whether each has an
        entry for each iteration.
    """

    taps: dict[Op, list[Tap]] = dataclasses.field(default_factory=dict)
    multipliers: dict[Op, int] = dataclasses.field(default_factory=dict)
    late: dict[Op, int] = dataclasses.field(default_factory=dict)
    merges: dict[Op, int] = dataclasses.field(default_factory=dict)
    marks: dict[Op, tuple[Key, AtMark]] = dataclasses.field(default_factory=dict)
    inside: dict[Op, dict[Key, bool]] = dataclasses.field(default_factory=dict)

    def look_inside(self, op: Op, keys: Sequence[Key] = (), iterated: Sequence[Op] = ()) -> None:
        """Looks into the scans and remats around an op, and into itself if it is one, with probes that some iterate."""
        for outer in (*op.around, *([op] if op.inner else [])):
            self.inside.setdefault(outer, {}).update((key, outer in iterated) for key in keys)
