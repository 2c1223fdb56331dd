"""Follow rows that all examples share, such as the constant tangents of a forward-mode derivative.

The read of such rows is a `late` use. Its result is followed as `common` data until it meets the examples in a
broadcast (`meet_examples`). At this broadcast, each example gets a gradient of its own.
"""

from __future__ import annotations

from dataclasses import replace

from kfac._capture.axes import examples, length
from kfac._capture.equations import SUMS
from kfac._capture.primitives import BINARY, Read
from kfac._capture.program import Op
from kfac._capture.states import (
    Data,
    Findings,
    Operands,
    Use,
    View,
    common_reads,
)


def meet_examples(found: Findings, op: Op, operands: Operands) -> bool:
    """Record whether common rows meet the examples at an op. If they do, its result is data like any other.

    If common rows meet the examples in a broadcast, each example has a gradient of its own with respect to these
    rows. If common rows are added to the examples' part of the loss, they reach the loss by themselves.
    """
    if op.inner or not all(isinstance(x.state, Data) for x in operands):
        return False
    if op.summed and op.name in SUMS and _beside_examples(operands):
        found.leaked |= common_reads(operands)
        return True
    axis = _axis_of_examples(op, operands, found.n)
    if axis is None:
        return False
    found.merges[op] = axis
    found.merged |= common_reads(operands)
    return True


def _beside_examples(operands: Operands) -> bool:
    """Return whether another operand than the common rows depends on the batch."""
    return any(x.value.of_batch and not x.state.common for x in operands)


def _axis_of_examples(op: Op, operands: Operands, n: int | None) -> int | None:
    """Return the result's axis at which common rows meet the examples, or None if they do not."""
    shapes = {x.value.shape for x in operands if x.state.common}
    broadcasts = op.name == "broadcast_in_dim"
    elementwise = op.name in BINARY or op.name == "select_n"
    if len(shapes) != 1 or not (broadcasts or elementwise):
        return None
    (shape,) = shapes
    (result,) = op.outputs
    met = [
        k
        for k, longer in enumerate(result.grown)
        if longer and (broadcasts or shape[k : k + 1] == (1,))
    ]
    if len(met) != 1 or result.axes[met[0]] != examples(n or 1):
        return None
    return met[0]


def stay_common(op: Op, operands: Operands) -> bool:
    """Return whether the result of an op that reads common rows is shared by all examples, too."""
    if op.inner:
        return not op.scan
    params = [x.state for x in operands if not isinstance(x.state, Data)]
    if params:
        followed = op.product or op.name in ("add", "add_any")
        return followed and len(params) == 1 and isinstance(params[0], View)
    if _beside_examples(operands) or len(op.outputs) > 1:
        return False
    return not any(op.outputs[0].grown)


def settle(found: Findings) -> None:
    """Decide how each late use counts, after the walk.

    A use whose result meets the examples is exact, unless the result also reaches the loss by itself. If the result
    never meets the examples, the first case that applies decides:

    - The number of examples is unknown: the constants may hold the examples, and the use counts like any other.
    - This use, and all reads that meet the batch, reach the loss only through marked outputs. The use counts like
      any other, because a mark gives its weight.
    - The rows come from an argument: they are another batch, and the use is inexact.
    - The rows are constants, and the parameter has a use that is not late: the rows may be a batch, such as a
      single boundary point, and the use is inexact.
    - The rows are constants, and the parameter has only late uses: this use is a penalty, which does not count
      (`dropped`).

    A bias follows its kernel.
    """
    with_rows = {use.leaf for use in found.uses.values() if not use.late}
    for op, use in found.uses.items():
        if use.joined:  # the kernel's use comes first
            kernel = found.uses[use.joined.op]
            if kernel.dropped:
                found.uses[op] = replace(use, dropped=True)
                if kernel.leaf in found.inexact:
                    found.note_use(use, "it is added to rows that all examples share")
        elif use.late and op not in found.merged:
            _settle_apart(found, use, use.leaf in with_rows)
        # The result's gradient is a sum over two paths, and only the path through the batch has a row for each example.
        elif op in found.leaked:
            found.note_use(
                use, "it reads rows that examples share, and the loss by itself"
            )
        elif use.late:
            found.uses[op] = replace(use, read=_repeated(use.read, found.n or 1))


def _repeated(read: Read, n: int) -> Read:
    """Return a read of rows that are repeated for `n` examples, on a new first axis."""
    axis = examples(n)
    new = len(axis)
    rows = [(k, k) for k in range(new)] + [(y + new, x + new) for y, x in read.rows]
    return replace(
        read,
        x_axes=(axis, *read.x_axes),
        y_axes=(axis, *read.y_axes),
        rows=tuple(rows),
    )


def _settle_apart(found: Findings, use: Use, with_rows: bool) -> None:
    """Decide how a late use counts if its result never meets the examples.

    `with_rows` says whether the parameter has a use that is not late.
    """
    op = use.op
    # If the examples are unknown, constants may hold them. If only marked outputs carry the rows, the marks say what
    # they weigh.
    apart = found.n is not None and (found.unmarked or op.unmarked)
    of_arguments = op.inputs[use.read.other].from_arguments
    # A parameter that reads nothing but constants has a penalty, which says nothing about the examples. Beside exact
    # rows, the constants may be a batch of their own, with an unknown weight.
    if not apart or not (of_arguments or with_rows):
        found.uses[op] = replace(use, late=False, dropped=apart)
    elif of_arguments:
        found.note_use(
            use,
            "it reads rows of another batch, without kfac.mark_output(..., weight=), or batch_argnums=(1, 2) if it is "
            "as long",
        )
    else:
        shape = list(map(length, use.read.x_axes))
        found.note_use(
            use,
            f"it reads a constant {shape} too, as a penalty does, without kfac.mark_output(..., weight=)",
        )
