"""Follow every parameter through a loss's program to the operations that read it.

The walk gives each array a state (`states.py`), and records a `Use` if a view of a leaf meets data. Operations that
carry no gradient to the loss are ignored: they read no parameter, and they are no branch of an output. If a leaf meets
data in a way without exact rows, the walk notes the reason and goes on.

Some rows are the same for all examples, such as the constant tangents of a forward-mode derivative. The read of such
rows is a `late` use. Its result is followed as `shared` data until it meets the examples in a broadcast
(`_with_shared`). At this broadcast, each example gets a gradient of its own.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from kfac._capture import axes as axes_lib
from kfac._capture import primitives
from kfac._capture.axes import Atom, Axes
from kfac._capture.equations import SUMS
from kfac._capture.form_rules import Follow, broadcast_axes
from kfac._capture.program import Op, Program, Value
from kfac._capture.read_rules import Read
from kfac._capture.states import (
    NONE,
    Data,
    Derived,
    Output,
    State,
    Use,
    View,
    is_repeated,
)
from kfac._capture.taps import Plan
from kfac._capture.trace import Trace
from kfac._layers import KRONECKER_KINDS, Layout

KERNEL_OPS = frozenset({"dense", "conv"})


class Inexact(NamedTuple):
    """Why a leaf has no exact rows.

    Attributes:
      operation: describes the operation that reads the leaf.
      reason: why there are no exact rows.
      layout: the layout of the leaf's matrices, or None if unknown.
    """

    operation: str
    reason: str
    layout: Layout | None = None


class Reads:
    """How the program of a loss uses its parameters.

    `_visit` computes the states of an op's results from the states of its inputs. It checks these cases in order:

    1. The op carries no gradient to the loss.
    2. Rows that all examples share meet the examples (`_with_shared`).
    3. The op has a program inside (`_scan`, `_walk`).
    4. All inputs are data (`_through_data`).
    5. The op is a product (`_product`).
    6. A single input depends on parameters, and it is a view (`_of_one`).
    7. Otherwise, parameters are combined in a way without exact rows (`_derive`).

    Each of these methods returns states, and may record a `Use` or an `Inexact`.

    Attributes:
      uses: maps each op that reads a parameter to its `Use`, in program order.
      inexact: maps each leaf that meets data in a way without exact rows to the reason.
      unmarked: whether a parameter meets the batch on a way to the loss without a marked output.
      beside_others: describes a product that reads batch rows concatenated with other rows. Empty if there is no such
        product.
      plan: the parts of a replay's plan that do not depend on taps. `multipliers` maps each op that produces a scaled
        view to the operand that is the view. `merges` maps each op at which shared rows meet the examples to the axis
        of the examples. `inside` holds the scans and remats around such ops, remats that shared rows enter, and scans
        and remats that a scaled view leaves.
      n: the number of examples in the batch, or None if unknown.
      hidden: whether the loss has array arguments, but their examples are unknown.
    """

    def __init__(self, traced: Trace, skipped: set[int]):
        self.n = traced.batch.num_examples
        self.hidden = self.n is None and bool(traced.arrays)
        self.uses: dict[Op, Use] = {}
        self.inexact: dict[int, Inexact] = {}
        self.unmarked, self.beside_others = False, ""
        self.plan = Plan()
        self._merged: set[Op] = set()  # late uses whose results have met the examples
        self._leaked: set[Op] = (
            set()
        )  # late uses whose results reach the loss by themselves
        states: list[State] = [
            Data()
            if k in skipped
            else View(k, shape, axes_lib.leaf_axes(shape), (0,) * len(shape))
            for k, shape in enumerate(traced.shapes)
        ]
        states += [Data()] * len(traced.arrays)
        loss, *_ = self._walk(traced.program, states)
        self._leaked |= loss.shared
        self._settle()

    # -- walking -------------------------------------------------------------------------------------------------

    def _walk(self, program: Program, states: Sequence[State]) -> list[State]:
        results = program.run(states, lambda _: Data(), self._visit)
        return list(map(_unbranched, results, program.outputs))

    def _visit(self, op: Op, states: list[State]) -> Sequence[State]:
        # The gradient with respect to a single branch is not the gradient with respect to a layer's output.
        states = list(map(_unbranched, states, op.inputs))
        if op.unmarked and not op.inner and any(isinstance(s, View) for s in states):
            pairs = zip(op.inputs, states, strict=True)
            self.unmarked |= any(
                value.of_batch for value, s in pairs if isinstance(s, Data)
            )
        if not op.alive:
            return [Data()] * len(op.outputs)
        if any(s.shared for s in states):
            results = self._with_shared(op, states)
            if results is not None:
                return results
            if not self._stay_shared(op, states):
                states = list(map(self._unshared, states))
        params = [s for s in states if not isinstance(s, Data)]
        if op.name == "optimization_barrier":
            # To follow a scaled view, its multiplier would have to cross the barrier. No known model needs this.
            across = functools.partial(
                dataclasses.replace,
                inexact=f"it goes through a product, then {op.name}",
            )
            return [
                across(s) if isinstance(s, View) and s.scaled else s for s in states
            ]
        if op.inner:
            leaving = (
                self._scan(op, states) if op.scan else self._walk(op.inner, states)
            )
            if any(isinstance(s, View) and s.scaled for s in leaving):
                self.plan.look_inside(op)
            return leaving
        if not params:
            return [self._through_data(op, states)] * len(op.outputs)
        if op.product:
            return [self._product(op, states)]
        if len(params) == 1 and isinstance(params[0], View):
            results = self._of_one(op, params[0], states)
            if results is not None:
                return results
        return [self._derive(op, states)] * len(op.outputs)

    def _through_data(self, op: Op, states: list[State]) -> Data:
        """Follow an op whose inputs are all data. A layer's output stays an output while its axes can be followed."""
        shared = frozenset[Op]().union(*(s.shared for s in states))
        outputs = [k for k, s in enumerate(states) if isinstance(s, Data) and s.output]
        if len(outputs) != 1 or len(op.outputs) != 1:
            return Data(shared=shared)
        (k,) = outputs
        state, shape, result = states[k], op.inputs[k].shape, op.outputs[0].shape
        assert isinstance(state, Data) and state.output
        output = None
        if len(states) == 1:
            meaning = (
                op.meaning(0, state.output.axes)
                if op.name not in ("neg", "slice")
                else None
            )
            output = (
                dataclasses.replace(state.output, axes=meaning.axes[0])
                if isinstance(meaning, Follow)
                else None
            )
        elif op.name == "mul" or (op.name == "div" and k == 0):
            if self.uses[state.output.use].read.op == "mul":
                # In x * (rsqrt(var) * scale) + shift, the product with x comes between the scale and its shift. The
                # two can share a block as long as they act on the same channels.
                output = Output(
                    state.output.use, broadcast_axes(state.output.axes, shape, result)
                )
        elif (
            op.name in ("add", "add_any") or (op.name == "sub" and k == 0)
        ) and shape == result:
            # Adding other data does not change the gradient, so a bias may come after a residual connection.
            output = state.output
        return Data(output, shared)

    def _scan(self, op: Op, states: list[State]) -> list[State]:
        assert op.inner and op.scan
        first, last = op.scan.consts, op.scan.last
        entering: list[State] = []
        for k, state in enumerate(states):
            carried, sliced = first <= k < last, k >= last
            if isinstance(state, Data):
                state = Data()
            elif carried and (
                is_repeated(state, op.inputs[k])
                or op.inner.outputs[k - first] is not op.inner.inputs[k]
            ):
                # Either a learned initial state that is broadcast over the examples, or a kernel that the loop changes.
                state = self._meets(state, op, "a scan carries it on and changes it")
            elif (
                isinstance(state, View)
                and sliced
                and axes_lib.is_broadcast(state.axes[:1])
            ):
                state = self._meets(state, op, "a scan iterates over copies of it")
            elif isinstance(state, View):
                atoms = state.axes[0] if sliced else ()
                axes = state.axes[1:] if sliced else state.axes
                state = dataclasses.replace(
                    state, axes=axes, stack=(*state.stack, atoms)
                )
            entering.append(state)
        leaving = self._walk(op.inner, entering)
        results: list[State] = []
        for k, state in enumerate(leaving):
            if k < op.scan.carried and not isinstance(entering[first + k], Data):
                results.append(states[first + k])
            elif isinstance(state, Data):
                self._unshared(state)
                results.append(Data())
            elif k < op.scan.carried and op.outputs[k].size > 1:
                # From the second iteration on, the body reads parameters in an input that the walk took for data.
                results.append(
                    self._meets(state, op, "an iteration hands it to the next")
                )
            else:
                results.append(Derived(state.leaves, "scan"))
        return results

    # -- rows that all examples share, as constant tangents --------------------------------------------------------

    def _with_shared(self, op: Op, states: list[State]) -> Sequence[State] | None:
        """Return the states after an op at which shared rows meet the examples, or None for any other op.

        If shared rows meet the examples in a broadcast, each example has a gradient of its own with respect to these
        rows. If shared rows are added to the examples' part of the loss, they reach the loss by themselves.
        """
        if op.inner and not op.scan:
            self.plan.look_inside(op)
        if op.inner or any(not isinstance(s, Data) for s in states):
            return None
        shared = frozenset[Op]().union(*(s.shared for s in states))
        sharing = [k for k, s in enumerate(states) if s.shared]
        beside_examples = any(
            value.of_batch for k, value in enumerate(op.inputs) if k not in sharing
        )
        if beside_examples and op.summed and op.name in SUMS:
            self._leaked |= shared
            return [Data()]
        shape, result = op.inputs[sharing[0]].shape, op.outputs[0]
        grown = [k for k, longer in enumerate(result.grown) if longer]
        elementwise = op.name == "broadcast_in_dim" or op.name in primitives.ELEMENTWISE
        met = [
            k
            for k in grown
            if op.name == "broadcast_in_dim" or shape[k : k + 1] == (1,)
        ]
        of_one_shape = len({op.inputs[k].shape for k in sharing}) == 1
        if (
            elementwise
            and of_one_shape
            and len(met) == 1
            and result.axes[met[0]] == axes_lib.examples(self.n or 1)
        ):
            self.plan.merges[op] = met[0]
            self.plan.look_inside(op)
            self._merged |= shared
            return [Data()]
        return None

    def _stay_shared(self, op: Op, states: list[State]) -> bool:
        """Return whether the result of an op that reads shared rows is shared by all examples, too."""
        if op.inner:
            return not op.scan
        params = [s for s in states if not isinstance(s, Data)]
        if params:
            one = len(params) == 1 and isinstance(params[0], View)
            return one and (op.product or op.name in ("add", "add_any"))
        others = [v for v, s in zip(op.inputs, states, strict=True) if not s.shared]
        return (
            len(op.outputs) == 1
            and not any(op.outputs[0].grown)
            and not any(value.of_batch for value in others)
        )

    def _unshared(self, state: State) -> State:
        """Return the state without shared rows, and note that the kernels that read these rows are inexact."""
        if not isinstance(state, Data) or not state.shared:
            return state
        for use in self.uses.values():
            if use.op in state.shared:
                self._note(
                    use.leaf,
                    use.read.name,
                    "it reads rows that all examples share",
                    use,
                )
        return dataclasses.replace(state, shared=frozenset())

    def _settle(self) -> None:
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
        with_rows = {use.leaf for use in self.uses.values() if not use.late}
        for op, use in self.uses.items():
            if use.late and op in self._merged & self._leaked:
                self._note(
                    use.leaf,
                    use.read.name,
                    "it reads rows that examples share, and the loss by itself",
                    use,
                )
            elif use.late and op not in self._merged:
                # If the examples are unknown, constants may hold them.
                apart = self.n is not None and (self.unmarked or op.unmarked)
                of_arguments = op.inputs[use.read.other].from_arguments
                if apart and (of_arguments or use.leaf in with_rows):
                    shape = [
                        math.prod(atom.size for atom in axis)
                        for axis in use.read.x_axes
                    ]
                    what = (
                        "rows of another batch"
                        if of_arguments
                        else f"a constant {shape} too, as a penalty does"
                    )
                    how = (
                        "kfac.output(..., weight=)"
                        + ", or batch_argnums=(1, 2) if it is as long" * of_arguments
                    )
                    self._note(
                        use.leaf, use.read.name, f"it reads {what}, without {how}", use
                    )
                else:
                    self.uses[op] = dataclasses.replace(use, late=False, dropped=apart)
            if (
                use.joined and self.uses[use.joined[0]].dropped
            ):  # the kernel's use comes first
                self.uses[op] = dataclasses.replace(use, dropped=True)
                if self.uses[use.joined[0]].leaf in self.inexact:
                    self._note(
                        use.leaf,
                        use.read.name,
                        "it is added to rows that all examples share",
                    )

    # -- reads ---------------------------------------------------------------------------------------------------

    def _add(self, use: Use) -> Data:
        self.uses[use.op] = use
        return Data(Output(use.op, use.read.y_axes))

    def _product(self, op: Op, states: list[State]) -> State:
        problem = ""
        views = [
            (k, state) for k, state in enumerate(states) if isinstance(state, View)
        ]
        for k, view in sorted(
            views, key=lambda pair: is_repeated(pair[1], op.inputs[pair[0]])
        ):
            meaning = op.meaning(k, view.axes)
            if not isinstance(meaning, Read) or is_repeated(view, op.inputs[k]):
                repeated = "its entries are repeated before the product"
                problem = problem or (meaning if isinstance(meaning, str) else repeated)
                continue
            other, value = states[meaning.other], op.inputs[meaning.other]
            if not (isinstance(other, Data) or is_repeated(other, value)):
                continue
            has_rows = not isinstance(other, Data) or (
                value.of_batch and not other.shared
            )
            if not has_rows and meaning.op != "dense":
                continue
            self._meets(
                other,
                op,
                "it is broadcast to the examples, which then see it as an activation",
            )
            use = Use(meaning, view, op, late=not has_rows)
            self.beside_others = self.beside_others or (
                op.describe() if value.concatenated else ""
            )
            if not self._exact(use, constants=self.hidden and not value.from_arguments):
                return Data()
            result = self._add(use)
            return (
                result
                if has_rows
                else dataclasses.replace(result, shared=other.shared | {op})
            )
        return self._derive(op, states, problem)

    def _exact(self, use: Use, constants: bool) -> bool:
        """Return whether a kernel's use has exact rows. If it does not, note why.

        Args:
          use: the kernel's use.
          constants: whether it reads constants that unknown examples may share.
        """
        view, operation = use.view, use.op.describe()
        for leaf in view.beside:
            self._note(
                leaf, operation, "the kernel is a different array, computed from it"
            )
        reasons = [
            view.inexact,
            "its values are multiplied by others before the product"
            * (not view.uniform),
            "it reads a slice that is not one of several equal parts of the parameter"
            * (view.picks is None),
            "it reads constants, which the examples that the loss hides may share"
            * constants,
        ]
        reason = next(filter(None, reasons), "")
        if reason:
            self._note(view.leaf, operation, reason, use)
        return not reason

    def _of_one(self, op: Op, view: View, states: list[State]) -> list[State] | None:
        """Return the states after an op on a single parameter view, or None if the view cannot be followed further."""
        operand = next(k for k, s in enumerate(states) if s is view)
        meaning = op.meaning(operand, view.axes)
        if isinstance(meaning, Follow):
            scaled = view.scaled or op.name == "neg"
            if scaled:
                self._scale(op, operand)
            views: list[State] = []
            for axes, moves in zip(meaning.axes, meaning.moved, strict=True):
                start = list(view.start)
                for leaf_axis, by in moves:
                    start[leaf_axis] += by
                views.append(
                    dataclasses.replace(
                        view, axes=axes, start=tuple(start), scaled=scaled
                    )
                )
            return views
        if op.name == "gather" and operand == 0:
            state = self._lookup(op, meaning, view)
        elif isinstance(meaning, Read):
            state = self._elementwise(op, meaning, view, states)
        else:
            return None
        return None if state is None else [state]

    def _elementwise(
        self, op: Op, read: Read, view: View, states: list[State]
    ) -> State | None:
        """Return the state after a sum or product of a view with data, or None if the op cannot be followed."""
        other, value = states[read.other], op.inputs[read.other]
        assert isinstance(other, Data)
        axes = axes_lib.with_rows(read.y_axes, op.outputs[0].axes)
        read = dataclasses.replace(read, x_axes=axes, y_axes=axes)
        # The atoms do not show a batch of one example, or examples that a scan iterates over. An unknown batch may have
        # one example.
        one = self.n is None or any(loop.longer for loop in op.loops)
        held = any(op.outputs[0].grown) or (one and value.of_batch)
        repeated, additive = axes_lib.is_broadcast(axes) or held, read.op == "add"
        if read.divides and read.operand == 1:
            return None
        joined = None
        # In `b - y`, the gradients of a kernel have the opposite sign to the gradients of its bias.
        opposite = op.name == "sub" and read.operand == 0
        if (
            additive
            and other.output
            and not view.scaled
            and not (opposite and self._is_kernel(other.output.use))
        ):
            joined = self._join(view, axes, other.output)
        if joined or (repeated and value.of_batch and not other.shared):
            if view.inexact or view.beside:
                return None
            if other.shared and not (joined and self._is_kernel(joined[0])):
                self._unshared(other)
            result = self._add(Use(read, view, op, joined))
            return dataclasses.replace(result, shared=other.shared)
        if other.shared:
            return None
        scaled = (
            not additive or view.scaled or read.sign < 0
        )  # a sum keeps the gradient up to its sign
        if scaled:
            self._scale(op, read.operand)
        uniform, mixed = (
            view.uniform and (additive or value.size == 1),
            view.mixed or (not additive and value.of_batch),
        )
        return dataclasses.replace(
            view, axes=axes, scaled=scaled, uniform=uniform, mixed=mixed
        )

    def _lookup(self, op: Op, read: Any, view: View) -> State | None:
        """Return the state after rows of a table are looked up, or None if the indices do not depend on the batch.

        Each index reads one row.
        """
        if not op.inputs[1].of_batch:
            return None
        whole = (
            sum(math.prod(a.size for a in axis) > 1 for axis in view.axes) <= 2
        )  # the table must be a matrix
        exact = (
            isinstance(read, Read)
            and view.uniform
            and not (view.inexact or view.beside)
        )
        if not (exact and whole) or view.picks is None:
            return self._meets(view, op, "it is not looked up row by row")
        self.uses[op] = Use(read, view, op)
        return Data()  # no bias is joined to a lookup

    def _scale(self, op: Op, operand: int) -> None:
        """Note that an op makes a scaled view of its input number `operand`."""
        self.plan.multipliers[op] = operand
        self.plan.look_inside(op)

    def _is_kernel(self, op: Op) -> bool:
        return self.uses[op].read.op in KERNEL_OPS

    def _join(
        self, view: View, y_axes: Axes, output: Output
    ) -> tuple[Op, tuple[tuple[Atom, Atom], ...]] | None:
        """Pair the elements of a vector with the output features of the use that the vector is added to.

        Args:
          view: the vector.
          y_axes: the axes of the sum in atoms of the vector's leaf.
          output: the use, and the axes of the sum in atoms of the use's leaf.

        Returns:
          The op of the use, and pairs of atoms: first from the vector's leaf, second from the use's leaf. The pairs are
          in the vector's memory order. None unless the vector has one element for each feature of each copy, in the
          same order.
        """
        use = self.uses[output.use]
        picks, of_use = view.picks, use.view.picks
        if len(view.stack) != len(use.view.stack) or picks is None or of_use is None:
            return None
        if [(atom.size, index) for atom, index in picks] != [
            (atom.size, index) for atom, index in of_use
        ]:
            return None
        pairs = [
            (atom, partner)
            for (atom, _), (partner, _) in zip(picks, of_use, strict=True)
        ]
        # Compare axis by axis: first the axes of the surrounding scans, then the axes of the sum.
        atoms = axes_lib.atoms_of((*use.view.stack, *use.read.y_axes))
        theirs = (
            *use.view.stack,
            *(axes_lib.split_like(axis, atoms) for axis in output.axes),
        )
        for axis, other in zip((*view.stack, *y_axes), theirs, strict=True):
            refined = None if other is None else axes_lib.common_refinement(axis, other)
            if refined is None or any(a.of_leaf != b.of_leaf for a, b in refined):
                return None
            pairs += [(a, b) for a, b in refined if a.of_leaf]
        pairs.sort(key=lambda pair: pair[0].memory_order)
        # A kernel and its bias are each brought to [copies, features] by their own layouts. Therefore, only the order
        # among copies and the order among features must agree. A scale and its shift are used in memory order.
        copies = {*use.copies} if use.read.op in KERNEL_OPS else set()
        for of_copies in (True, False):
            order = [
                b.memory_order
                for _, b in pairs
                if any(axes_lib.is_part(b, atom) for atom in copies) == of_copies
            ]
            if order != sorted(order):
                return None
        return output.use, tuple(pairs)

    # -- everything else -----------------------------------------------------------------------------------------

    def _derive(self, op: Op, states: list[State], reason: str = "") -> State:
        """Return the state after an op that combines parameters in a way without exact rows.

        If the parameters meet data, the result is data, and the leaves are noted as inexact (except in a penalty that
        is added to the loss). Otherwise, the result is another array of parameters.
        """
        params = [
            (value, s)
            for value, s in zip(op.inputs, states, strict=True)
            if not isinstance(s, Data)
        ]
        leaves = NONE.union(*(s.leaves for _, s in params))
        how = next((s.how for _, s in params if isinstance(s, Derived)), op.name)
        data = [
            value
            for value, s in zip(op.inputs, states, strict=True)
            if isinstance(s, Data)
        ]
        mixed = any(isinstance(s, View) and s.mixed for _, s in params)
        if (
            mixed
            or any(value.of_batch for value in data)
            or any(s.shared for s in states)
        ):
            if (
                op.summed
                and op.name in SUMS
                and all(value.size == 1 for value, _ in params)
            ):
                return Data()  # a penalty that is added to the loss
            for _, s in params:
                built = (
                    f"the kernel is computed from it by {s.how}"
                    if op.product and isinstance(s, Derived)
                    else ""
                )
                self._meets(
                    s,
                    op,
                    reason or built or f"what {how} makes of it has no known rows",
                )
            return Data()
        (result, *more) = op.outputs
        followed = [
            s
            for value, s in params
            if isinstance(s, View) and value.shape == result.shape
        ]
        if followed and not more and not op.product:
            view = followed[0]
            operand = next(k for k, s in enumerate(states) if s is view)
            # Select by position, because `w * w` reads the same view twice.
            others = [(op.inputs[k], s) for k, s in enumerate(states) if k != operand]
            beside = NONE.union(*(s.leaves for _, s in others))
            by_number = op.name == "mul" and all(value.size == 1 for value, _ in others)
            # The first view in a sum of parameters keeps exact rows, and so does a view times a learned number. The
            # other leaves have no exact rows.
            if (
                beside
                and view.leaf not in beside
                and (op.name in ("add", "add_any") or by_number)
            ):
                if by_number or view.scaled:
                    self._scale(op, operand)
                return dataclasses.replace(
                    view, scaled=view.scaled or by_number, beside=view.beside | beside
                )
            why = (
                view.inexact
                or f"it is multiplied by, or made into, something else by {op.name}"
            )
            return dataclasses.replace(
                view, inexact=why, beside=view.beside | (beside - {view.leaf})
            )
        grew = op.name == "broadcast_in_dim" and (any(result.grown) or self.n is None)
        return Derived(
            leaves,
            how,
            repeated=all(is_repeated(s, value) for value, s in params) or grew,
        )

    def _meets(self, state: State, op: Op, reason: str) -> Data:
        """Note that the leaves of `state` meet data in a way without exact rows. Return the state of the result."""
        for leaf in state.leaves:
            earlier = (
                state.inexact if isinstance(state, View) and state.leaf == leaf else ""
            )
            self._note(leaf, op.describe(), earlier or reason)
        return Data()

    def _note(
        self, leaf: int, operation: str, reason: str, use: Use | None = None
    ) -> None:
        kernel = (
            use is not None
            and use.read.op in KRONECKER_KINDS
            and use.view.picks is not None
        )
        layout = use.layout if use is not None and kernel else None
        noted = self.inexact.get(leaf)
        if noted is None or (noted.layout is None and layout is not None):
            self.inexact[leaf] = Inexact(
                *(noted[:2] if noted else (operation, reason)), layout
            )


def _unbranched(state: State, value: Value) -> State:
    return (
        dataclasses.replace(state, output=None)
        if value.branched and isinstance(state, Data)
        else state
    )
