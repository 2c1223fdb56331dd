"""Follow axes through operations: of parameters, whose form changes, and of data, whose examples may lose their order.

`MOVES` has a rule for each operation that moves or selects a parameter's entries. A rule takes an equation and the axes
of its only array. It returns the results' axes, or None if they cannot be followed.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from kfac._capture.axes import (
    MIXED,
    Axes,
    Axis,
    Moves,
    cut,
    flip,
    foreign,
    holds_examples,
    insert,
    length,
    mixed,
    remaining,
    reshape,
    take,
)
from kfac._capture.parameters import (
    REDUCTIONS,
    array_type,
    parameter,
    result_shape,
    shapes,
)

# The axes of all inputs of an equation, as data.
DataAxes = Sequence[Axes]


class Follow(NamedTuple):
    """The same parameter in another form.

    Attributes:
      axes: each result's axes.
      moved: for each result, pairs `(axis, count)`. The result starts `count` entries further along this leaf axis.
    """

    axes: tuple[Axes, ...]
    moved: tuple[Moves, ...] = ((),)


def cast(eqn: JaxprEqn, axes: Axes) -> Follow | None:
    """Follow a copy, unless it is a cast to integers."""
    if not jnp.issubdtype(array_type(eqn.outvars[0]).dtype, jnp.floating):
        return None
    return Follow((axes,))


def broadcast_axes(
    axes: Axes,
    shape: Sequence[int],
    total: Sequence[int],
    positions: Iterable[int] | None = None,
) -> Axes:
    """Return an operand's axes after it has been broadcast from `shape` to `total`.

    `positions` says which of the result's axes they become. None: all, or none of them if the operand is a scalar.
    """
    result = list(map(foreign, total))
    if positions is None:
        positions = range(len(shape))
    for k, axis, size in zip(positions, axes, shape, strict=True):
        if size == total[k]:
            result[k] = axis
    return tuple(result)


def _broadcast(eqn: JaxprEqn, axes: Axes) -> Follow:
    positions = parameter(eqn, "broadcast_dimensions")
    shape = shapes(eqn.invars)[0]
    return Follow((broadcast_axes(axes, shape, result_shape(eqn), positions),))


def _reshape(eqn: JaxprEqn, axes: Axes) -> Follow | None:
    result = reshape(axes, result_shape(eqn))
    if result is None:
        return None
    return Follow((result,))


def _transpose_and_reshape(eqn: JaxprEqn, axes: Axes) -> Follow | None:
    order = parameter(eqn, "dimensions")
    if order is not None:
        axes = take(axes, order)
    return _reshape(eqn, axes)


def _transpose(eqn: JaxprEqn, axes: Axes) -> Follow:
    return Follow((take(axes, parameter(eqn, "permutation")),))


def _reverse(eqn: JaxprEqn, axes: Axes) -> Follow:
    result = list(axes)
    for k in parameter(eqn, "dimensions"):
        result[k] = flip(axes[k])
    return Follow((tuple(result),))


def _tile(eqn: JaxprEqn, axes: Axes) -> Follow:
    repeats = map(foreign, parameter(eqn, "reps"))
    return Follow((tuple(map(operator.add, repeats, axes)),))


def _slice(eqn: JaxprEqn, axes: Axes) -> Follow | None:
    strides = parameter(eqn, "strides")
    if strides is not None and any(step != 1 for step in strides):
        return None
    starts = parameter(eqn, "start_indices")
    result: Axes = ()
    moves: Moves = ()
    for part in map(cut, axes, starts, result_shape(eqn)):
        if part is None:
            return None
        axis, skipped = part
        result += (axis,)
        moves += skipped
    return Follow((result,), (moves,))


def _split(eqn: JaxprEqn, axes: Axes) -> Follow | None:
    """Follow a split or unstack along an axis."""
    along = parameter(eqn, "axis")
    unstacks = eqn.primitive.name == "unstack"
    sizes = [1] * len(eqn.outvars) if unstacks else parameter(eqn, "sizes")
    before = axes[:along]
    after = axes[along + 1 :]
    results = []
    moved = []
    start = 0
    for size in map(int, sizes):
        part = cut(axes[along], start, size)
        if part is None:
            return None
        axis, moves = part
        results.append(before + after if unstacks else (*before, axis, *after))
        moved.append(moves)
        start += size
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
    "unstack": _split,
}


# -- data --------------------------------------------------------------------------------------------------------------


def placed(eqn: JaxprEqn, data: DataAxes) -> list[Axes] | None:
    """Return each result's axes for an equation on data, or None if only their lengths are known."""
    name = eqn.primitive.name
    if name in MOVES:
        form = MOVES[name](eqn, data[0])
        if form is None:
            return None
        return list(form.axes)
    if name == "sort":
        dimension = parameter(eqn, "dimension")
        return [_shuffled(axes, {dimension}) for axes in data]
    if len(eqn.outvars) != 1 or name == "dynamic_update_slice":
        return None
    result = _DATA_RULES.get(name, _elementwise)(eqn, data)
    if result is None:
        return None
    return [result]


def _reduction(eqn: JaxprEqn, data: DataAxes) -> Axes:
    (axes,) = data
    return take(axes, remaining(len(axes), parameter(eqn, "axes")))


def _shuffled(axes: Axes, dimensions: Iterable[int]) -> Axes:
    """Return the axes after the entries along these dimensions have been brought to an unknown order."""
    result = list(axes)
    for k in dimensions:
        if holds_examples(axes[k]):
            result[k] = mixed(length(axes[k]))
    return tuple(result)


def _product(eqn: JaxprEqn, data: DataAxes) -> Axes:
    contract, batch = parameter(eqn, "dimension_numbers")
    result = take(data[0], batch[0])
    for k, axes in enumerate(data):
        result += take(axes, remaining(len(axes), (*contract[k], *batch[k])))
    return result


def _convolution(eqn: JaxprEqn, data: DataAxes) -> Axes | None:
    if parameter(eqn, "batch_group_count") != 1:
        return _elementwise(eqn, data)
    numbers = parameter(eqn, "dimension_numbers")
    result = list(map(foreign, result_shape(eqn)))
    result[numbers.out_spec[0]] = data[0][numbers.lhs_spec[0]]
    return tuple(result)


def _elementwise(eqn: JaxprEqn, data: DataAxes) -> Axes | None:
    """Return the result's axes if operands broadcast to the result's shape, or None if no operand does."""
    out = result_shape(eqn)
    operands = []
    for axes, shape in zip(data, shapes(eqn.invars), strict=True):
        sizes = zip(shape, out, strict=False)
        if len(shape) == len(out) and all(n in (1, size) for n, size in sizes):
            operands.append(axes)
    if not operands or math.prod(out) <= 1:
        return None
    return tuple(map(_agreed, zip(*operands, strict=True), out))


def _agreed(axes: Sequence[Axis], size: int) -> Axis:
    """Return an axis of an elementwise result from the operands' axes at this position.

    If exactly one axis with the full `size` has its examples in order, the result keeps this axis. Otherwise the result
    is `MIXED` if any such axis holds examples, and foreign if not.
    """
    holders = {axis for axis in axes if length(axis) == size and holds_examples(axis)}
    in_order = [axis for axis in holders if all(atom.axis != MIXED for atom in axis)]
    if len(in_order) == 1:
        return in_order[0]
    if holders:
        return mixed(size)
    return foreign(size)


def _side_by_side(eqn: JaxprEqn, data: DataAxes) -> Axes:
    """Return the result's axes for `concatenate` or `stack`."""
    out = result_shape(eqn)
    parts = data
    if eqn.primitive.name == "stack":
        along = parameter(eqn, "axis")
        parts = [insert(axes, [along], [()]) for axes in data]
    else:
        along = parameter(eqn, "dimension")
    result = list(map(_agreed, zip(*parts, strict=True), out))
    joined = {axes[along] for axes in parts}
    if len(joined) == 1:
        (axis,) = joined
    elif any(map(holds_examples, joined)):
        axis = mixed(out[along])
    else:
        axis = foreign(out[along])
    # Equal parts of equal length are a new axis, slower than the axis of each part.
    if length(axis) * len(parts) == out[along]:
        axis = (*foreign(len(parts)), *axis)
    result[along] = axis
    return tuple(result)


_DATA_RULES: dict[str, Callable[[JaxprEqn, DataAxes], Axes | None]] = {
    "concatenate": _side_by_side,
    "stack": _side_by_side,
    "dot_general": _product,
    "conv_general_dilated": _convolution,
    **dict.fromkeys(REDUCTIONS, _reduction),
}


def indexed(eqn: JaxprEqn, data: DataAxes, of_data: Sequence[bool]) -> Axes:
    """Return the result's axes for a gather or scatter on data.

    If data-dependent indices select entries along an axis of examples, their order is unknown and the axis is `MIXED`.

    Args:
      eqn: the gather or scatter.
      data: the axes of all inputs.
      of_data: for each index component, whether it depends on data.
    """
    numbers = parameter(eqn, "dimension_numbers")
    if eqn.primitive.name != "gather":
        selected = numbers.scatter_dims_to_operand_dims
        return _shuffled(data[0], itertools.compress(selected, of_data))
    table, indices = data
    shape = shapes(eqn.invars)[0]
    sizes = parameter(eqn, "slice_sizes")
    chosen = itertools.compress(numbers.start_index_map, of_data)
    lost = any(sizes[k] < shape[k] and holds_examples(table[k]) for k in chosen)
    rows = indices[:-1]
    if lost:
        rows = _shuffled(
            rows, remaining(len(rows), numbers.start_indices_batching_dims)
        )
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    window = [
        table[k] if sizes[k] == shape[k] else foreign(sizes[k])
        for k in remaining(len(table), gone)
    ]
    return insert(rows, numbers.offset_dims, window)
