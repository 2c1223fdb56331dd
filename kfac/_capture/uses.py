"""Record the operations that combine a parameter with data, or with other parameters.

Each function returns the state of the operation's result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kfac._capture.axes import (
    Atom,
    Axes,
    atoms_of,
    common_refinement,
    examples,
    is_broadcast,
    is_part,
    split_like,
    with_rows,
)
from kfac._capture.equations import SUMS
from kfac._capture.primitives import Meaning, Read
from kfac._capture.program import Op, Value
from kfac._capture.states import (
    Data,
    Derived,
    Findings,
    Joined,
    Operand,
    Operands,
    Output,
    State,
    Use,
    View,
    leaves_of,
)
from kfac._layers import KRONECKER_KINDS
from kfac._statistics.rows import accumulator


def product(found: Findings, op: Op, operands: Operands) -> State:
    """Return the state after a matrix product or convolution that reads a parameter."""
    problem = ""
    for k in sorted(range(len(operands)), key=lambda k: operands[k].repeated):
        view = operands[k].state
        if not isinstance(view, View):
            continue
        meaning = op.meaning(k, view.axes)
        if isinstance(meaning, Read) and not operands[k].repeated:
            result = _kernel(found, op, meaning, view, operands[meaning.other])
            if result is not None:
                return result
        elif not problem:
            repeated = "its entries are repeated before the product"
            problem = meaning if isinstance(meaning, str) else repeated
    return derive(found, op, operands, problem)


def _kernel(
    found: Findings, op: Op, read: Read, view: View, other: Operand
) -> Data | None:
    """Record a product with a kernel. Return None if the product has no rows of data."""
    value, state = other
    if isinstance(state, Data):
        has_rows = value.of_batch and not state.common
    else:
        has_rows = other.repeated
    if not has_rows and (read.op != "dense" or not isinstance(state, Data)):
        return None
    found.meets(
        state, op, "it is broadcast to the examples, which then see it as an activation"
    )
    operation = op.describe()
    if value.concatenated and not found.beside_others:
        found.beside_others = operation
    for leaf in view.beside:
        found.note(leaf, operation, "the kernel is a different array, computed from it")
    use = Use(read, view, op, late=not has_rows)
    reason = _why_inexact(view)
    if not reason and found.hidden and not value.from_arguments:
        reason = "it reads constants, which the examples that the loss hides may share"
    if reason:
        found.note_use(use, reason, operation)
        return Data()
    result = found.add(use)
    if has_rows:
        return result
    return replace(result, common=state.common | {op})


def _why_inexact(view: View) -> str:
    """Return why a product with a view has no exact rows, or an empty string if it has."""
    if view.inexact:
        return view.inexact
    if view.uneven:
        return view.uneven
    if view.picks is None:
        return (
            "it reads a slice that is not one of several equal parts of the parameter"
        )
    return ""


def elementwise(
    found: Findings, op: Op, read: Read, view: View, other: Operand
) -> Data | View | None:
    """Return the state after an elementwise function of a view and data, or None if the op cannot be followed."""
    value, data = other
    assert isinstance(data, Data)
    (result,) = op.outputs
    axes = with_rows(read.y_axes, result.axes)
    read = replace(read, x_axes=axes, y_axes=axes)
    joined = _join(found, op, read, view, data.output)
    # The atoms do not show a batch of one example, or examples that a scan iterates over. An unknown batch may have
    # one example.
    hidden = found.n is None or any(loop.longer for loop in op.loops)
    repeats = hidden or is_broadcast(axes) or any(result.grown)
    if joined or (repeats and value.of_batch and not data.common):
        if view.inexact or view.beside:
            return None
        if joined is None or found.uses[joined.op].read.op not in KRONECKER_KINDS:
            found.without_common_rows(data)
        state = found.add(Use(read, view, op, joined))
        return replace(state, common=data.common)
    if data.common:
        return None
    if read.op == "add":
        # A sum keeps the gradient up to its sign.
        return replace(view, axes=axes, scaled=view.scaled or read.sign < 0)
    uneven = ""
    if not is_multiple(op, read.operand):
        uneven = changed_by(op)
    elif value.size > 1:
        uneven = "its values are multiplied by others before the product"
    return after_function(op, replace(view, axes=axes), uneven)


def is_multiple(op: Op, operand: int) -> bool:
    """Return whether the result of an op is its input number `operand`, multiplied by another input."""
    return op.name == "mul" or (op.name == "div" and operand == 0)


def after_function(op: Op, view: View, uneven: str) -> View:
    """Return the state after an op whose entries are functions of the view's entries. `uneven` is as in `View`."""
    mixed = view.mixed or op.outputs[0].of_batch
    return replace(view, scaled=True, uneven=view.uneven or uneven, mixed=mixed)


def changed_by(op: Op) -> str:
    """Return the reason why a product has no exact rows after an op on its kernel."""
    return f"it is multiplied by, or made into, something else by {op.name}"


# The operations that put copies of a parameter next to the examples' data.
COPIES = frozenset({"concatenate", "scatter", "scatter-add", "select_n", "stack"})


def copies(
    found: Findings,
    op: Op,
    operands: Operands,
    operand: Operand,
    results: Sequence[Value],
) -> bool:
    """Record that each example gets a copy of a parameter, as of a class token. Return whether this is so.

    Each example then has a gradient with respect to its own copy, whatever operations follow. The copies are equal, so
    the other inputs decide which example owns which copy: every array must have the examples in order on a single axis.

    Args:
      found: the findings.
      op: the operation that reads the copies.
      operands: its inputs.
      operand: the copies.
      results: its results, or in a scan the carry that the copies become.
    """
    value, view = operand
    if not isinstance(view, View) or view.inexact or view.beside or not view.made:
        return False
    made, position = view.made
    # Only the results of the op `made` itself have its taps. Another reader may be a use of its own.
    if made.outputs != [value] or value.branched:
        return False
    data = [x.value for x in operands if any(x.value.grown)]
    if not any(x.from_arguments for x in data) or not any(value.grown):
        return False
    in_order = (examples(found.n or 0),)
    if found.n != 1 and any(x.rows != in_order for x in (*data, *results)):
        return False
    if op.name.startswith("scatter") and any(op.inputs[1].grown):
        return False
    axes = with_rows(view.axes, value.axes)
    dtype = accumulator(value.dtype)
    found.add(Use(Read("copy", position, axes, axes, dtype), view, made))
    return True


def lookup(found: Findings, op: Op, meaning: Meaning, view: View) -> Data | None:
    """Return the state after rows of a table are looked up, or None if the indices do not depend on the batch.

    Each index reads one row.
    """
    if not op.inputs[1].of_batch:
        return None
    is_matrix = sum(map(bool, view.axes)) <= 2
    exact = is_matrix and not view.beside and not _why_inexact(view)
    if not exact or not isinstance(meaning, Read):
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
    is_kernel = use.read.op in KRONECKER_KINDS
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
        of_copies = is_kernel and any(is_part(atom, whole) for whole in use.copies)
        (copies if of_copies else features).append(atom.memory_order)
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
    picks = view.picks
    stack = use.view.stack
    if picks is None or use.view.picks is None or len(view.stack) != len(stack):
        return None
    # Layer 3 of a stacked bias belongs to layer 3 of the stacked kernel only.
    if [entry for _, entry in picks] != [entry for _, entry in use.view.picks]:
        return None
    # Compare axis by axis: first the parts of the leaves, then the axes of the surrounding scans, then the axes of the
    # sum. The sum may have merged atoms of the kernel, as `reshape` does, or lost them by broadcasting. Split its axes
    # at the kernel's own atoms, so that only whole atoms are paired.
    atoms = atoms_of(stack + use.read.y_axes)
    split = [split_like(axis, atoms) for axis in use_axes]
    own = [*((atom,) for atom, _ in picks), *view.stack, *axes]
    theirs = [*((atom,) for atom in use.picked), *stack, *split]
    pairs = []
    for axis, other in zip(own, theirs, strict=True):
        # Beside a kernel's features `[2, 3]`, a bias `[6]` becomes `[2, 3]`, too. Atoms `[4, 6]` and `[6, 4]` have no
        # common refinement: their elements correspond, but their layouts do not.
        refined = None if other is None else common_refinement(axis, other)
        if refined is None:
            return None
        for atom, partner in refined:
            # A feature without an entry of the vector has no bias, and an entry that is added along examples or
            # positions belongs to no single feature.
            if atom.of_leaf != partner.of_leaf:
                return None
            if atom.of_leaf:
                pairs.append((atom, partner))
    return pairs


# -- everything else ---------------------------------------------------------------------------------------------------


def derive(found: Findings, op: Op, operands: Operands, reason: str = "") -> State:
    """Return the state after an op that combines parameters in a way without exact rows.

    If the parameters meet data, the result is data, and the leaves are noted as inexact (except in a penalty that
    is added to the loss). Otherwise, the result is another array of parameters.
    """
    params = [x for x in operands if not isinstance(x.state, Data)]
    derived = [x.state.how for x in params if isinstance(x.state, Derived)]
    how = derived[0] if derived else op.name
    result = op.outputs[0]
    if any(x.meets_data for x in operands):
        numbers = all(x.value.size == 1 and not x.meets_data for x in params)
        if numbers and op.summed and op.name in SUMS:
            found.apart |= leaves_of(params)
            return Data()  # a penalty that is added to the loss
        for operand in params:
            state = operand.state
            if op.name in COPIES and copies(found, op, operands, operand, op.outputs):
                continue
            why = f"what {how} makes of it has no known rows"
            if op.product and isinstance(state, Derived):
                why = f"the kernel is computed from it by {state.how}"
            found.meets(state, op, reason or why)
        return Data()
    if len(op.outputs) == 1 and not op.product:
        for k, (value, state) in enumerate(operands):
            if isinstance(state, View) and value.shape == result.shape:
                return _combine(found, op, k, state, operands)
    repeated = all(x.repeated for x in params)
    if op.name == "broadcast_in_dim":
        repeated |= any(result.grown) or found.n is None
    return Derived(leaves_of(params), how, repeated)


def _combine(
    found: Findings, op: Op, operand: int, view: View, operands: Operands
) -> View:
    """Return the state after operand number `operand`, a view, is combined with others to an array of its shape."""
    # Select by position, because `w * w` reads the same view twice.
    others = [x for k, x in enumerate(operands) if k != operand]
    beside = leaves_of(others)
    by_number = op.name == "mul" and all(value.size == 1 for value, _ in others)
    # The first view in a sum of parameters keeps exact rows, and so does a view times a learned number. The other
    # leaves have no exact rows.
    keeps_rows = by_number or op.name in ("add", "add_any")
    if keeps_rows and beside and view.leaf not in beside:
        scaled = view.scaled or by_number
        if scaled:
            found.multipliers[op] = operand
        return replace(view, scaled=scaled, beside=view.beside | beside)
    return replace(
        view,
        inexact=view.inexact or changed_by(op),
        beside=view.beside | (beside - {view.leaf}),
    )
