"""Find the axes that hold the examples in a program's arrays, and the order of the examples.

An axis holds examples if it is longer in the second of two traces. If the axis holds positions as well, as after
`x.reshape(-1, d)`, the operations show whether examples or positions run faster. Rows in another order than the batch
(sorted or gathered rows, or more or fewer rows than examples) are marked as `MIXED`. Sums over all `MIXED` rows are
exact, but no row is known to belong to a particular example.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence

from kfac._capture import axis_rules, parameters
from kfac._capture.axes import (
    EXAMPLES,
    Axes,
    Axis,
    examples,
    flatten,
    foreign,
    holds_examples,
    mixed,
)
from kfac._capture.program import Op, Program, Value

# The attributes of a `Value` that this module sets.
FACTS = ("axes", "of_batch", "from_arguments", "concatenated", "leaves")
_facts = operator.attrgetter(*FACTS)


def _copy(value: Value, other: Value) -> None:
    for name in FACTS:
        setattr(value, name, getattr(other, name))


def _add(value: Value, other: Value) -> None:
    """Record that `value` depends on all that `other` depends on."""
    value.of_batch |= other.of_batch
    value.from_arguments |= other.from_arguments
    value.concatenated |= other.concatenated
    value.leaves |= other.leaves


def _all_foreign(value: Value) -> Axes:
    return tuple(map(foreign, value.shape))


def place(
    program: Program,
    num_params: int,
    doubled: Collection[int],
    n: int | None,
) -> None:
    """Record each array's axes, and whether the array depends on parameters, arguments and the batch.

    Args:
      program: the loss.
      num_params: the number of parameters, which are the program's first arguments.
      doubled: the arguments that hold the examples on their first axis, counted from 0 after the parameters.
      n: the number of examples. None if the examples are unknown; any argument and any constant array may hold them.
    """
    for k, value in enumerate(program.inputs):
        held = k - num_params in doubled
        value.axes = _all_foreign(value)
        if held and n:
            # The rows of a batch with another length do not correspond to the `n` examples.
            rows = value.shape[0]
            axis = examples(n) if rows == n else mixed(rows)
            value.axes = (axis, *value.axes[1:])
        value.leaves = frozenset({k} if k < num_params else ())
        value.from_arguments = k >= num_params
        value.of_batch = held or (value.from_arguments and n is None)
    _place_all(program, n)


def _place_all(program: Program, n: int | None) -> None:
    """Record the facts about all arrays of a program, from the facts about its inputs."""
    for value in program.consts:
        value.axes = _with_examples(value, _all_foreign(value), n)
        value.of_batch = (n is None and value.size > 1) or any(value.grown)
    makers = {}
    for op in program.ops:
        makers.update(dict.fromkeys(op.outputs, op))
        if op.scan:
            _place_scan(op, n)
        elif op.inner:
            for k, value in enumerate(op.inputs):
                _copy(op.inner.inputs[k], value)
            _place_all(op.inner, n)
            for k, value in enumerate(op.outputs):
                _copy(value, op.inner.outputs[k])
        else:
            placed = _placed(op, makers)
            joins = _joins(op)
            for k, value in enumerate(op.outputs):
                axes = _suggested(value, op.inputs) if placed is None else placed[k]
                value.axes = _with_examples(value, axes, n)
                value.of_batch = any(value.grown)
                value.concatenated = joins
                for other in op.inputs:
                    _add(value, other)
                if not op.alive:
                    value.leaves = frozenset()


def _placed(op: Op, makers: Mapping[Value, Op]) -> list[Axes] | None:
    """Return the result axes of an operation on data, or None if the operation says nothing about them."""
    if op.name == "gather" or op.name.startswith("scatter"):
        of_data = _columns_of_data(op.inputs[1], makers)
        axes = [value.axes for value in op.inputs]
        return [axis_rules.indexed(op.eqn, axes, of_data)]
    axes = [value.axes or _all_foreign(value) for value in op.inputs]
    if any(value.from_arguments and any(value.grown) for value in op.inputs):
        # Constants that grow with the batch, such as zeros, take the order of the data.
        for k, value in enumerate(op.inputs):
            if not value.from_arguments:
                pairs = zip(axes[k], value.shape, value.grown, strict=True)
                axes[k] = tuple(foreign(n) if grown else a for a, n, grown in pairs)
    return axis_rules.placed(op.eqn, axes)


def _joins(op: Op) -> bool:
    """Return whether an op concatenates rows of the batch with other rows, such as a second batch or a constant.

    With twice as many examples, the concatenated axis then grows, but does not double.
    """
    if op.name != "concatenate":
        return False
    along = parameters.parameter(op.eqn, "dimension")
    (result,) = op.outputs
    size = result.shape[along]
    return result.twice[along] not in (size, 2 * size)


def _columns_of_data(indices: Value, makers: Mapping[Value, Op]) -> list[bool]:
    """Return whether each index component depends on data. In `x[jnp.arange(n), k]`, the first does not."""
    maker = makers.get(indices)
    if maker and maker.name == "concatenate":
        columns = []
        for part in maker.inputs:
            columns += [part.from_arguments] * part.shape[-1]
        # Otherwise the parts are joined along another axis.
        if len(columns) == indices.shape[-1]:
            return columns
    return [indices.from_arguments] * indices.shape[-1]


def _place_scan(op: Op, n: int | None) -> None:
    """Record the axes inside a scan. If the scan goes over examples, each iteration sees only some of them."""
    assert op.inner and op.scan
    scan = op.scan
    inside = op.inner.inputs
    for k, value in enumerate(op.inputs):
        _copy(inside[k], value)
        if k >= scan.last:
            inside[k].axes = value.axes[1:]
    carry = inside[scan.consts : scan.last]
    # A carry may begin to depend on data, or lose its order, in a later iteration.
    changed = True
    while changed:
        _place_all(op.inner, n)
        before = list(map(_facts, carry))
        for start, end in zip(carry, op.inner.outputs, strict=False):
            pairs = zip(start.axes, end.axes, start.shape, strict=True)
            start.axes = tuple(a if a == b else mixed(size) for a, b, size in pairs)
            _add(start, end)
        changed = before != list(map(_facts, carry))
    op.along = _along(op)
    for k, value in enumerate(op.outputs):
        end = op.inner.outputs[k]
        if k < scan.carried:
            _copy(value, carry[k])
            value.leaves = end.leaves
        else:
            _copy(value, end)
            value.axes = (op.along, *end.axes)
            value.of_batch |= op.longer


def _along(op: Op) -> Axis:
    """Return the axis that a scan iterates over."""
    assert op.scan
    if not op.longer:
        return foreign(op.scan.length)
    unordered = mixed(op.scan.length)
    sliced = op.inputs[op.scan.last :]
    axes = {value.axes[0] for value in sliced if value.grown[0]} - {unordered}
    return axes.pop() if len(axes) == 1 else unordered


def _with_examples(
    value: Value,
    axes: Axes,
    n: int | None,
) -> Axes:
    """Mark the axes of an array that grow although no operand explains their growth.

    An axis that grows from `n` to `2 n` holds the examples in order. All other such axes are mixed.
    """
    if n in (None, 1):
        return axes
    result = list(axes)
    for k, size in enumerate(value.shape):
        if value.grown[k] and not holds_examples(axes[k]):
            doubled = (size, value.twice[k]) == (n, 2 * n)
            result[k] = examples(size) if doubled else mixed(size)
    return tuple(result)


def _suggested(value: Value, inputs: Sequence[Value]) -> Axes:
    """Suggest the axes of a result if its operation says nothing about them.

    A growing axis takes the input axis that has the same length and grows too. If no input axis does so, or several
    different axes do, the growing axis is mixed if any input axis grows. All other axes are foreign.
    """
    result = []
    for size, grown in zip(value.shape, value.grown, strict=True):
        axis = foreign(size)
        candidates = set()
        for other in inputs if grown else ():
            for k, longer in enumerate(other.grown):
                if longer:
                    axis = mixed(size)
                    if other.shape[k] == size:
                        candidates.add(other.axes[k])
        candidates.discard(mixed(size))
        result.append(candidates.pop() if len(candidates) == 1 else axis)
    return tuple(result)


def positions_of_examples(axes: Axes, n: int) -> tuple[int, ...] | None:
    """Find the atoms of an array that hold its `n` examples.

    If several axes hold the examples, as in a similarity matrix, the first axis counts.

    Returns:
      The positions of these atoms among all atoms of the array, from the slowest to the fastest. Empty for a single
      example. None if examples are missing or not in order.
    """
    flat = flatten(axes)
    by_stride: dict[int, int] = {}
    for position, atom in enumerate(flat):
        if atom.axis == EXAMPLES and not atom.flipped:
            by_stride.setdefault(atom.stride, position)
    inner = 1
    for stride, position in sorted(by_stride.items()):
        if stride != inner:
            return None
        inner *= flat[position].size
    if inner != n:
        return None
    return tuple(by_stride[stride] for stride in sorted(by_stride, reverse=True))
