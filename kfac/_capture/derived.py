"""Follow arrays that are computed from parameters in a way without exact rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from kfac._capture.equations import SUMS
from kfac._capture.findings import Findings
from kfac._capture.program import Op
from kfac._capture.states import (
    Data,
    Derived,
    State,
    View,
    is_repeated,
    leaves_of,
)


def derive(found: Findings, op: Op, states: Sequence[State], reason: str = "") -> State:
    """Return the state after an op that combines parameters in a way without exact rows.

    If the parameters meet data, the result is data, and the leaves are noted as inexact (except in a penalty that
    is added to the loss). Otherwise, the result is another array of parameters.
    """
    params = [
        (value, state)
        for value, state in zip(op.inputs, states, strict=True)
        if not isinstance(state, Data)
    ]
    derived = [state.how for state in states if isinstance(state, Derived)]
    how = derived[0] if derived else op.name
    if _meets_data(op, states):
        numbers = all(value.size == 1 for value, _ in params)
        if numbers and op.summed and op.name in SUMS:
            return Data()  # a penalty that is added to the loss
        for _, state in params:
            built = f"what {how} makes of it has no known rows"
            if op.product and isinstance(state, Derived):
                built = f"the kernel is computed from it by {state.how}"
            found.meets(state, op, reason or built)
        return Data()
    result = op.outputs[0]
    if len(op.outputs) == 1 and not op.product:
        for value, state in params:
            if isinstance(state, View) and value.shape == result.shape:
                return _combine(found, op, state, states)
    repeated = all(is_repeated(state, value) for value, state in params)
    if op.name == "broadcast_in_dim":
        repeated |= any(result.grown) or found.n is None
    return Derived(leaves_of(states), how, repeated)


def _meets_data(op: Op, states: Sequence[State]) -> bool:
    for value, state in zip(op.inputs, states, strict=True):
        if isinstance(state, Data) and (value.of_batch or state.shared):
            return True
        if isinstance(state, View) and state.mixed:
            return True
    return False


def _combine(found: Findings, op: Op, view: View, states: Sequence[State]) -> View:
    """Return the state after a view has been combined with other parameters to an array of the same shape."""
    # Select by position, because `w * w` reads the same view twice.
    operand = states.index(view)
    others = [k for k in range(len(states)) if k != operand]
    beside = leaves_of(states[k] for k in others)
    by_number = op.name == "mul" and all(op.inputs[k].size == 1 for k in others)
    # The first view in a sum of parameters keeps exact rows, and so does a view times a learned number. The other
    # leaves have no exact rows.
    keeps_rows = by_number or op.name in ("add", "add_any")
    if keeps_rows and beside and view.leaf not in beside:
        scaled = view.scaled or by_number
        if scaled:
            found.scale(op, operand)
        return dataclasses.replace(view, scaled=scaled, beside=view.beside | beside)
    why = f"it is multiplied by, or made into, something else by {op.name}"
    return dataclasses.replace(
        view,
        inexact=view.inexact or why,
        beside=view.beside | (beside - {view.leaf}),
    )
