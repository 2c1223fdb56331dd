"""Follow the axes of data through operations: which axes hold the examples afterwards, and in which order."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

from jax.extend.core import JaxprEqn

from kfac._capture.axes import (
    MIXED,
    Axes,
    Axis,
    foreign,
    holds_examples,
    insert,
    length,
    mixed,
    remaining,
    take,
)
from kfac._capture.form_rules import MOVES
from kfac._capture.parameters import REDUCTIONS, Shape, parameter, shapes


def placed(eqn: JaxprEqn, data: Sequence[Axes]) -> list[Axes] | None:
    """Return each result's axes for an equation on data, or None if only their lengths are known."""
    name = eqn.primitive.name
    if name in MOVES and len(data) == 1:
        moved = MOVES[name](eqn, data[0])
        return None if moved is None else list(moved.axes)
    if name in REDUCTIONS and len(data) == 1:
        left = remaining(len(data[0]), parameter(eqn, "axes"))
        return [take(data[0], left)]
    if name == "sort":
        dimension = parameter(eqn, "dimension")
        return [_shuffled(axes, {dimension}) for axes in data]
    if name in _RULES:
        result = _RULES[name](eqn, data)
    elif len(eqn.outvars) == 1 and name != "dynamic_update_slice":
        result = _elementwise(eqn, data)
    else:
        return None
    return None if result is None else [result]


def _shuffled(axes: Axes, dimensions: Collection[int]) -> Axes:
    """Return the axes after the entries along these dimensions have been brought to an unknown order."""
    result = list(axes)
    for k in dimensions:
        if holds_examples(axes[k]):
            result[k] = mixed(length(axes[k]))
    return tuple(result)


def _product(eqn: JaxprEqn, data: Sequence[Axes]) -> Axes:
    contract, batch = parameter(eqn, "dimension_numbers")
    result = take(data[0], batch[0])
    for k, axes in enumerate(data):
        result += take(axes, remaining(len(axes), (*contract[k], *batch[k])))
    return result


def _convolution(eqn: JaxprEqn, data: Sequence[Axes]) -> Axes | None:
    if parameter(eqn, "batch_group_count") != 1:
        return _elementwise(eqn, data)
    numbers = parameter(eqn, "dimension_numbers")
    result = list(map(foreign, shapes(eqn.outvars)[0]))
    result[numbers.out_spec[0]] = data[0][numbers.lhs_spec[0]]
    return tuple(result)


def _elementwise(eqn: JaxprEqn, data: Sequence[Axes]) -> Axes | None:
    """Return the result's axes if operands broadcast to the result's shape, or None if no operand does."""
    (out,) = shapes(eqn.outvars)
    operands = [
        axes
        for axes, shape in zip(data, shapes(eqn.invars), strict=True)
        if _broadcasts(shape, out)
    ]
    if not operands or math.prod(out) <= 1:
        return None
    return tuple(map(_agreed, zip(*operands, strict=True), out))


def _broadcasts(shape: Shape, out: Shape) -> bool:
    """Return whether an elementwise operation can broadcast an operand from `shape` to `out`."""
    if len(shape) != len(out) or not out:
        return False
    return all(n in (1, size) for n, size in zip(shape, out, strict=True))


def _agreed(axes: Sequence[Axis], size: int) -> Axis:
    """Return an axis of an elementwise result from the operands' axes at this position.

    If exactly one axis with the full `size` has its examples in order, the result keeps this axis. Otherwise the result
    is `MIXED` if any such axis holds examples, and foreign if not.
    """
    holders = {axis for axis in axes if length(axis) == size and holds_examples(axis)}
    in_order = [axis for axis in holders if all(atom.axis != MIXED for atom in axis)]
    if len(in_order) == 1:
        return in_order[0]
    return mixed(size) if holders else foreign(size)


def _concatenation(eqn: JaxprEqn, data: Sequence[Axes]) -> Axes:
    return _side_by_side(eqn, data, parameter(eqn, "dimension"))


def _stack(eqn: JaxprEqn, data: Sequence[Axes]) -> Axes:
    along = parameter(eqn, "axis")
    parts = [insert(axes, [along], [()]) for axes in data]
    return _side_by_side(eqn, parts, along)


def _side_by_side(eqn: JaxprEqn, parts: Sequence[Axes], along: int) -> Axes:
    (out,) = shapes(eqn.outvars)
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


_RULES: dict[str, Callable[[JaxprEqn, Sequence[Axes]], Axes | None]] = {
    "concatenate": _concatenation,
    "stack": _stack,
    "dot_general": _product,
    "conv_general_dilated": _convolution,
}


def indexed(eqn: JaxprEqn, data: Sequence[Axes], fresh: Sequence[bool]) -> Axes:
    """Return the result's axes for a gather or scatter on data.

    If data-dependent indices select entries along an axis of examples, their order is unknown and the axis is `MIXED`.

    Args:
      eqn: the gather or scatter.
      data: the axes of all inputs.
      fresh: for each index component, whether it is independent of data.
    """
    numbers = parameter(eqn, "dimension_numbers")
    if eqn.primitive.name != "gather":
        return _shuffled(data[0], _chosen(numbers.scatter_dims_to_operand_dims, fresh))
    table, indices = data
    (shape, _), sizes = shapes(eqn.invars), parameter(eqn, "slice_sizes")
    lost = False
    for k in _chosen(numbers.start_index_map, fresh):
        lost |= sizes[k] < shape[k] and holds_examples(table[k])
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


def _chosen(dimensions: Sequence[int], fresh: Sequence[bool]) -> list[int]:
    """Return the dimensions along which data-dependent indices select entries."""
    return [k for k, fixed in zip(dimensions, fresh, strict=True) if not fixed]
