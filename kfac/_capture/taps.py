"""Collect a parameter's statistics with taps behind the operations that read it.

A tap is an identity on the result of an operation. Its backward pass also computes statistics of the operation's input
and of the gradient that passes through, and returns them as the cotangent of a `probe`. Differentiating the loss with
respect to the probes therefore yields the statistics in the same backward pass as the gradients.
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

# The key of a probe, or of another entry among the probes:
# - for a Kronecker layer, its name and the number of the part (`Use.part`), then "transposed" if the use reads the
#   part's transpose;
# - for another layer, its name and a number;
# - for a mark, "" and a number;
# - for eigenvectors, the layer's name, the part and "eigenvectors".
Key = tuple[Any, ...]
Probes = Mapping[Key, Any]


@dataclasses.dataclass(frozen=True)
class KroneckerTap:
    """The sums of `a a^T` and `g g^T` at a single use of a kernel, or their diagonals or diagonal blocks.

    For an embedding lookup, the diagonal of `a a^T` holds counts. With `reduce`, the tap sums `a` and `g` over the
    positions of each example, `[copies, n, d]`. Their products are formed after all uses have been summed. With a
    `basis`, the tap also sums the squares of per-example gradients in the basis. The eigenvectors come with the
    residuals.

    Attributes:
      key: the probe's key.
      use: the operation, and the part of the kernel that it reads.
      arrange_x: brings the data, or a convolution's patches, to the normal form.
      arrange_g: brings the gradient to the normal form.
      images: whether a convolution's images are the examples.
      homogeneous: the last entry of every input: 1 with the bias, or 0 in a use without the bias; None for a layer
        without a bias.
      dtype: the sums' dtype.
      diagonal: the sides, `"A"` or `"G"`, that are kept as diagonals.
      cut: the number of diagonal blocks for `A` and for `G`.
      reduce: whether the layer has the setting "reduce" (K-FAC-reduce).
      basis: the key of the layer's eigenvectors among the probes; None if the tap sums no squares.
      spread: how devices pack and add up the sums; None on a single device, or if this is left to XLA. If `spread` has
        mesh axes, `arrange_x` and `arrange_g` arrange the examples of a single device.
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

    def residuals(
        self, values: Sequence[jax.Array], multiplier: jax.Array | None, probes: Probes
    ) -> Any:
        # All entries of a scaled kernel are multiplied by the same number.
        number = None if multiplier is None else multiplier.reshape(-1)[0]
        sizes = None if self.use.read.groups is None else values[self.use.read.groups]
        return (
            values[self.use.read.other],
            number,
            None if self.basis is None else probes[self.basis],
            sizes,
        )

    def statistics(self, residuals: Any, g: jax.Array) -> Kronecker | Ragged:
        read, (x, number, basis, sizes) = self.use.read, residuals
        if number is not None and not isinstance(read.geometry, Lookup):
            x = as_floats(x, self.dtype)
            x = x * number.astype(
                x.dtype
            )  # (c w) x = w (c x); the entry appended to x for a bias is not scaled
        # Without the barrier, XLA would form patches from the arrays that the image is computed from, and keep them.
        if not self.use.op.loops and read.op == "conv":
            x = lax.optimization_barrier(x)
        inputs: Any = read.geometry.form(
            x, self.arrange_x, self.homogeneous, self.images, self.dtype
        )
        outputs: Any = Rows(self.arrange_g(g))
        if sizes is not None:
            inputs, outputs = (
                Groups(form.array[0, 0], sizes) for form in (inputs, outputs)
            )
            return Ragged(self._side("A", inputs), self._side("G", outputs), sizes)
        moments = (
            None
            if basis is None
            else squares_in_basis(inputs, outputs, basis, self.dtype)
        )
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
    """Per-example gradients `[n, units]` at a single use of a scale or shift.

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
    dtype: Any
    lies: PartitionSpec | None = None

    @property
    def other(self) -> int | None:
        """The number of the input that the parameter is multiplied with; None for a sum."""
        return self.use.read.other if self.use.read.op == "mul" else None

    def residuals(
        self, values: Sequence[jax.Array], multiplier: jax.Array | None, probes: Probes
    ) -> Any:
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
    """Return `y`. The cotangent of `probe` is the statistics that the tap computes."""
    del tap, residuals, probe
    return y


def _backward(tap, residuals, g):
    def statistics(residuals, g):
        return jax.tree.map(
            lambda moment: moment.astype(tap.dtype), tap.statistics(residuals, g)
        )

    if isinstance(tap, KroneckerTap) and tap.spread is not None:
        return None, g, tap.spread.sums(statistics, residuals, g)
    lies = tap.lies if isinstance(tap, ElementwiseTap) else None
    return None, g, whole(statistics, lies)(residuals, g)


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
    # Tangents that are not arrays are symbolic zeros.
    moving = iter(
        lax.optimization_barrier(
            [x for x in jax.tree.leaves(tangents[0]) if isinstance(x, jax.Array)]
        )
    )
    return primals[0], jax.tree.map(
        lambda x: next(moving) if isinstance(x, jax.Array) else x, tangents[0]
    )


# The function at a marked output. From the output and the mark's entry among the probes, it computes the output's
# replacement and a value to hand out.
AtMark = Callable[[jax.Array, Any], tuple[jax.Array, jax.Array]]


@dataclasses.dataclass
class Plan:
    """The additions of a replay to a program and the programs inside it.

    Attributes:
      taps: the taps behind an op.
      multipliers: for an op whose result is a scaled view of a parameter, the number of the operand that is the view.
      late: for an op with taps that reads rows shared by all examples, the number of examples.
      merges: for an op at which shared rows meet the examples, the result's axis of examples.
      marks: for a marked output, its key and its function.
      inside: the scans and remats whose bodies are replayed. For each, the keys of the probes used there, with True for
        a probe that has an entry for each iteration.
    """

    taps: dict[Op, list[Tap]] = dataclasses.field(default_factory=dict)
    multipliers: dict[Op, int] = dataclasses.field(default_factory=dict)
    late: dict[Op, int] = dataclasses.field(default_factory=dict)
    merges: dict[Op, int] = dataclasses.field(default_factory=dict)
    marks: dict[Op, tuple[Key, AtMark]] = dataclasses.field(default_factory=dict)
    inside: dict[Op, dict[Key, bool]] = dataclasses.field(default_factory=dict)

    def look_inside(
        self, op: Op, keys: Sequence[Key] = (), iterated: Sequence[Op] = ()
    ) -> None:
        """Replay the bodies of the scans and remats around an op, and of the op itself if it is one.

        The probes `keys` are used there. They have an entry for each iteration of the scans `iterated`.
        """
        for outer in (*op.around, *([op] if op.inner else [])):
            self.inside.setdefault(outer, {}).update(
                (key, outer in iterated) for key in keys
            )
