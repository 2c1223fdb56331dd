"""Follow a parameter's axes through operations that change only its form.

`MOVES` has a rule for each operation that moves or selects entries. A rule takes an equation and the axes of its only
array. It returns the results' axes, or None if they cannot be followed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from kfac._capture import axes as axes_lib
from kfac._capture.axes import Axes, Axis, Moves, foreign, take
from kfac._capture.parameters import array_type, parameter, shapes


class Follow(NamedTuple):
    """The same parameter in another form.

    Attributes:
      axes: each result's axes.
      moved: for each result, pairs `(axis, count)`. The result starts `count` entries further along this leaf axis.
    """

    axes: tuple[Axes, ...]
    moved: tuple[Moves, ...] = ((),)


def same_form(axes: Axes) -> Follow:
    return Follow((axes,))


def cast(eqn: JaxprEqn, axes: Axes) -> Follow | None:
    """Follow a copy, unless it is a cast to integers."""
    floating = jnp.issubdtype(array_type(eqn.outvars[0]).dtype, jnp.floating)
    return same_form(axes) if floating else None


def broadcast_axes(
    axes: Sequence[Axis], shape: Sequence[int], total: Sequence[int]
) -> Axes:
    """Return an operand's axes after an elementwise operation has broadcast it from `shape` to `total`."""
    if len(shape) != len(total):  # a scalar has no axes
        return tuple(map(foreign, total))
    return _broadcast_to(total, range(len(total)), axes, shape)


def _broadcast_to(
    total: Sequence[int],
    positions: Sequence[int],
    axes: Sequence[Axis],
    shape: Sequence[int],
) -> Axes:
    """Return the axes of an array of shape `total`, at whose `positions` the operand's axes are broadcast."""
    result = list(map(foreign, total))
    for k, axis, size in zip(positions, axes, shape, strict=True):
        if size == total[k]:
            result[k] = axis
    return tuple(result)


def _broadcast(eqn: JaxprEqn, axes: Axes) -> Follow:
    positions = parameter(eqn, "broadcast_dimensions")
    total, shape = shapes(eqn.outvars)[0], shapes(eqn.invars)[0]
    return same_form(_broadcast_to(total, positions, axes, shape))


def _reshape(eqn: JaxprEqn, axes: Axes) -> Follow | None:
    result = axes_lib.reshape(axes, shapes(eqn.outvars)[0])
    return None if result is None else same_form(result)


def _transpose_and_reshape(eqn: JaxprEqn, axes: Axes) -> Follow | None:
    order = parameter(eqn, "dimensions")
    return _reshape(eqn, axes if order is None else take(axes, order))


def _transpose(eqn: JaxprEqn, axes: Axes) -> Follow:
    return same_form(take(axes, parameter(eqn, "permutation")))


def _reverse(eqn: JaxprEqn, axes: Axes) -> Follow:
    result = list(axes)
    for k in parameter(eqn, "dimensions"):
        result[k] = axes_lib.flip(axes[k])
    return same_form(tuple(result))


def _tile(eqn: JaxprEqn, axes: Axes) -> Follow:
    repeats = map(foreign, parameter(eqn, "reps"))
    return same_form(tuple(a + b for a, b in zip(repeats, axes, strict=True)))


def _slice(eqn: JaxprEqn, axes: Axes) -> Follow | None:
    strides = parameter(eqn, "strides")
    if strides is not None and any(step != 1 for step in strides):
        return None
    return _follow_boxes(axes, [parameter(eqn, "start_indices")], shapes(eqn.outvars))


def _split(eqn: JaxprEqn, axes: Axes) -> Follow | None:
    return _follow_pieces(eqn, axes, parameter(eqn, "sizes"))


def _unstack(eqn: JaxprEqn, axes: Axes) -> Follow | None:
    pieces = _follow_pieces(eqn, axes, [1] * len(eqn.outvars))
    if pieces is None:
        return None
    axis = parameter(eqn, "axis")
    without = tuple(part[:axis] + part[axis + 1 :] for part in pieces.axes)
    return pieces._replace(axes=without)


def _follow_pieces(eqn: JaxprEqn, axes: Axes, sizes: Sequence[int]) -> Follow | None:
    """Follow an array that is cut into pieces of these sizes along an axis."""
    axis, (shape,) = parameter(eqn, "axis"), shapes(eqn.invars)
    starts, pieces = [], []
    position = 0
    for size in map(int, sizes):
        start, piece = [0] * len(shape), list(shape)
        start[axis], piece[axis] = position, size
        position += size
        starts.append(start)
        pieces.append(piece)
    return _follow_boxes(axes, starts, pieces)


def _follow_boxes(
    axes: Axes, starts: Sequence[Sequence[int]], boxes: Sequence[Sequence[int]]
) -> Follow | None:
    """Follow an array to results that are boxes of these shapes in it. Return None unless all are boxes in the leaf."""
    results, moved = [], []
    for start, shape in zip(starts, boxes, strict=True):
        result: list[Axis] = []
        moves: Moves = ()
        for axis, first, size in zip(axes, start, shape, strict=True):
            part = axes_lib.cut(axis, first, size)
            if part is None:
                return None
            result.append(part[0])
            moves += part[1]
        results.append(tuple(result))
        moved.append(moves)
    return Follow(tuple(results), tuple(moved))


MOVES: dict[str, Callable[[JaxprEqn, Axes], Follow | None]] = {
    "reshape": _transpose_and_reshape,
    "squeeze": _reshape,
    "expand_dims": _reshape,
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "rev": _reverse,
    "tile": _tile,
    "slice": _slice,
    "split": _split,
    "unstack": _unstack,
}
