"""Record the operations that combine a parameter with data, or with other parameters.

Each function returns the state of the operation's result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from kfac._capture import axes as axes_lib
from kfac._capture.axes import Atom, Axes
from kfac._capture.equations import SUMS
from kfac._capture.findings import Findings
from kfac._capture.primitives import Meaning, Read
from kfac._capture.program import Op
from kfac._capture.states import (
    Data,
    Derived,
    Joined,
    Output,
    State,
    Use,
    View,
    is_repeated,
    leaves_of,
)

KERNEL_OPS = frozenset({"dense", "conv"})


def product(found: Findings, op: Op, states: Sequence[State]) -> State:
    """Return the state after a matrix product or convolution that reads a parameter."""
    views = [(k, state) for k, state in enumerate(states) if isinstance(state, View)]
    views.sort(key=lambda pair: is_repeated(pair[1], op.inputs[pair[0]]))
    problem = ""
    for k, view in views:
        meaning = op.meaning(k, view.axes)
        if isinstance(meaning, Read) and not is_repeated(view, op.inputs[k]):
            result = _kernel(found, op, meaning, view, states[meaning.other])
            if result is not None:
                return result
        elif isinstance(meaning, str):
            problem = problem or meaning
        else:
            problem = problem or "its entries are repeated before the product"
    return derive(found, op, states, problem)


def _kernel(
    found: Findings, op: Op, read: Read, view: View, other: State
) -> Data | None:
    """Record a product with a kernel. Return None if the product has no rows of data."""
    value = op.inputs[read.other]
    if isinstance(other, Data):
        has_rows = value.of_batch and not other.shared
    elif is_repeated(other, value):
        has_rows = True
    else:
        return None
    if not has_rows and read.op != "dense":
        return None
    found.meets(
        other, op, "it is broadcast to the examples, which then see it as an activation"
    )
    if value.concatenated and not found.beside_others:
        found.beside_others = op.describe()
    use = Use(read, view, op, late=not has_rows)
    for leaf in view.beside:
        found.note(
            leaf, op.describe(), "the kernel is a different array, computed from it"
        )
    reason = _why_inexact(view)
    if not reason and found.hidden and not value.from_arguments:
        reason = "it reads constants, which the examples that the loss hides may share"
    if reason:
        found.note_use(use, reason, op.describe())
        return Data()
    result = found.add(use)
    if has_rows:
        return result
    return dataclasses.replace(result, shared=other.shared | {op})


def _why_inexact(view: View) -> str:
    """Return why a product with a view has no exact rows, or an empty string if it has."""
    if view.inexact:
        return view.inexact
    if not view.uniform:
        return "its values are multiplied by others before the product"
    if view.picks is None:
        return (
            "it reads a slice that is not one of several equal parts of the parameter"
        )
    return ""


def elementwise(
    found: Findings, op: Op, read: Read, view: View, states: Sequence[State]
) -> Data | View | None:
    """Return the state after a sum or product of a view with data, or None if the op cannot be followed."""
    other, value, (result,) = states[read.other], op.inputs[read.other], op.outputs
    assert isinstance(other, Data)
    if read.divides and read.operand == 1:
        return None
    axes = axes_lib.with_rows(read.y_axes, result.axes)
    read = dataclasses.replace(read, x_axes=axes, y_axes=axes)
    joined = _join(found, op, read, view, other.output)
    meets_rows = value.of_batch and not other.shared
    if joined or (meets_rows and _has_rows(found, op, axes)):
        if view.inexact or view.beside:
            return None
        if joined is None or found.uses[joined.op].read.op not in KERNEL_OPS:
            found.unshared(other)
        state = found.add(Use(read, view, op, joined))
        return dataclasses.replace(state, shared=other.shared)
    if other.shared:
        return None
    view = dataclasses.replace(view, axes=axes)
    if read.op == "mul":
        view = dataclasses.replace(
            view,
            scaled=True,
            uniform=view.uniform and value.size == 1,
            mixed=view.mixed or value.of_batch,
        )
    elif read.sign < 0:  # a sum keeps the gradient up to its sign
        view = dataclasses.replace(view, scaled=True)
    if view.scaled:
        found.scale(op, read.operand)
    return view


def _has_rows(found: Findings, op: Op, axes: Axes) -> bool:
    """Return whether the result of a view and data of the batch, with these axes, has several rows."""
    if axes_lib.is_broadcast(axes) or any(op.outputs[0].grown):
        return True
    # The atoms do not show a batch of one example, or examples that a scan iterates over. An unknown batch may have
    # one example.
    return found.n is None or any(loop.longer for loop in op.loops)


def lookup(found: Findings, op: Op, meaning: Meaning, view: View) -> Data | None:
    """Return the state after rows of a table are looked up, or None if the indices do not depend on the batch.

    Each index reads one row.
    """
    if not op.inputs[1].of_batch:
        return None
    is_matrix = sum(map(bool, view.axes)) <= 2
    exact = isinstance(meaning, Read) and not (view.beside or _why_inexact(view))
    if not isinstance(meaning, Read) or not exact or not is_matrix:
        return found.meets(view, op, "it is not looked up row by row")
    found.uses[op] = Use(meaning, view, op)
    return Data()  # no bias is joined to a lookup


def _join(
    found: Findings, op: Op, read: Read, view: View, output: Output | None
) -> Joined | None:
    """Join a vector to the use to whose result it is added.

    Returns:
      The use, with pairs in the vector's memory order. None unless the vector has one element for each feature of each
      copy, in the same order.
    """
    if output is None or read.op != "add" or view.scaled:
        return None
    use = found.uses[output.use]
    is_kernel = use.read.op in KERNEL_OPS
    # In `b - y`, the gradients of a kernel have the opposite sign to the gradients of its bias.
    if is_kernel and op.name == "sub" and read.operand == 0:
        return None
    pairs = _pair_atoms(view, read.y_axes, use, output.axes)
    if pairs is None:
        return None
    pairs.sort(key=lambda pair: pair[0].memory_order)
    # A kernel and its bias are each brought to [copies, features] by their own layouts. Therefore, only the order
    # among copies and the order among features must agree. A scale and its shift are used in memory order.
    copies: list[tuple[int, int]] = []
    features: list[tuple[int, int]] = []
    for _, atom in pairs:
        of_copies = any(axes_lib.is_part(atom, whole) for whole in use.copies)
        (copies if is_kernel and of_copies else features).append(atom.memory_order)
    if copies != sorted(copies) or features != sorted(features):
        return None
    return Joined(output.use, tuple(pairs))


def _pair_atoms(
    view: View, axes: Axes, use: Use, use_axes: Axes
) -> list[tuple[Atom, Atom]] | None:
    """Pair the elements of a vector with the output features of a use.

    Args:
      view: the vector.
      axes: the axes of the sum in atoms of the vector's leaf.
      use: the use that the vector is added to.
      use_axes: the axes of the sum in atoms of the use's leaf.

    Returns:
      Pairs of atoms, first from the vector's leaf, second from the use's leaf. None if the atoms do not correspond.
    """
    picks, of_use = view.picks, use.view.picks
    if len(view.stack) != len(use.view.stack) or picks is None or of_use is None:
        return None
    if len(picks) != len(of_use):
        return None
    pairs = []
    for (atom, entry), (partner, other_entry) in zip(picks, of_use, strict=True):
        if atom.size != partner.size or entry != other_entry:
            return None
        pairs.append((atom, partner))
    # Compare axis by axis: first the axes of the surrounding scans, then the axes of the sum.
    atoms = axes_lib.atoms_of(use.view.stack + use.read.y_axes)
    split = [axes_lib.split_like(axis, atoms) for axis in use_axes]
    for axis, other in zip(view.stack + axes, [*use.view.stack, *split], strict=True):
        refined = None if other is None else axes_lib.common_refinement(axis, other)
        if refined is None:
            return None
        for atom, partner in refined:
            if atom.of_leaf != partner.of_leaf:
                return None
            if atom.of_leaf:
                pairs.append((atom, partner))
    return pairs


# -- everything else ---------------------------------------------------------------------------------------------------


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
