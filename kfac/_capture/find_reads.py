"""Follow every parameter through a loss's program to the operations that read it.

The walk gives each array a state (`states.py`), and records a `Use` if a view of a leaf meets data. Operations that
carry no gradient to the loss are ignored: they read no parameter, and they are no branch of an output. If a leaf meets
data in a way without exact rows, the walk notes the reason and goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kfac._capture import common_rows, uses
from kfac._capture.axes import Axis, is_broadcast, leaf_axes
from kfac._capture.axis_rules import Follow, broadcast_axes
from kfac._capture.equations import FUNCTIONS, SUMS
from kfac._capture.primitives import Read
from kfac._capture.program import Op, Program, Value
from kfac._capture.states import (
    Data,
    Derived,
    Findings,
    Operand,
    Operands,
    Output,
    State,
    View,
    common_reads,
)
from kfac._capture.trace import Trace


class Reads(Findings):
    """How the program of a loss uses its parameters.

    `_visit` computes the states of an op's results from the states of its inputs. It checks these cases in order:

    1. The op carries no gradient to the loss.
    2. Rows that all examples share meet the examples (`common_rows.py`).
    3. The op has a program inside (`_scan`, `_walk`).
    4. All inputs are data (`_output_after`).
    5. The op is a product (`uses.product`).
    6. A single input depends on parameters, and it is a view (`_of_one`).
    7. Otherwise, parameters are combined in a way without exact rows (`uses.derive`).

    Each of these functions returns states, and may record a `Use` or an `Inexact`.
    """

    def __init__(self, traced: Trace, skipped: set[int]):
        n = traced.batch.num_examples
        super().__init__(n, hidden=n is None and bool(traced.arrays))
        states = []
        for leaf, shape in enumerate(traced.shapes):
            view = View(leaf, shape, leaf_axes(shape), (0,) * len(shape))
            states.append(Data() if leaf in skipped else view)
        states += [Data()] * len(traced.arrays)
        loss, *_ = self._walk(traced.program, states)
        self.leaked |= loss.common
        if isinstance(loss, View) and loss.mixed:
            for leaf in loss.leaves:
                self.note(leaf, "the loss", "it multiplies a mean over the examples")
        self.apart |= loss.leaves
        common_rows.settle(self)

    def _walk(self, program: Program, states: Sequence[State]) -> list[State]:
        results = program.run(states, lambda _: Data(), self._visit)
        return list(map(_unbranched, results, program.outputs))

    def _visit(self, op: Op, states: list[State]) -> Sequence[State]:
        # The gradient with respect to a single branch is not the gradient with respect to a layer's output.
        states = list(map(_unbranched, states, op.inputs))
        operands = list(map(Operand, op.inputs, states))
        if op.unmarked and not op.inner:
            batch = any(
                isinstance(x.state, Data) and x.value.of_batch for x in operands
            )
            self.unmarked |= batch and any(isinstance(x, View) for x in states)
        if not op.alive:
            return [Data()] * len(op.outputs)
        if common_reads(operands):
            if common_rows.meet_examples(self, op, operands):
                return [Data()]
            if not common_rows.stay_common(op, operands):
                states = list(map(self.without_common_rows, states))
                operands = list(map(Operand, op.inputs, states))
        if op.name == "optimization_barrier":
            return list(map(_behind_barrier, states))
        if op.inner:
            return self._scan(op, states) if op.scan else self._walk(op.inner, states)
        with_params = [k for k, s in enumerate(states) if not isinstance(s, Data)]
        if not with_params:
            result = Data(self._output_after(op, operands), common_reads(operands))
            return [result] * len(op.outputs)
        if op.product:
            return [uses.product(self, op, operands)]
        if len(with_params) == 1:
            results = self._of_one(op, with_params[0], operands)
            if results is not None:
                return results
        return [uses.derive(self, op, operands)] * len(op.outputs)

    def _output_after(self, op: Op, operands: Operands) -> Output | None:
        """Return the layer's output that the result of an op on data still is, or None if it is no output."""
        outputs = [
            (k, value.shape, state.output)
            for k, (value, state) in enumerate(operands)
            if isinstance(state, Data) and state.output
        ]
        if len(outputs) != 1 or len(op.outputs) != 1:
            return None
        ((k, shape, output),) = outputs
        if len(operands) == 1:
            meaning = op.meaning(0, output.axes)
            if op.name in ("neg", "slice") or not isinstance(meaning, Follow):
                return None
            return Output(output.use, meaning.axes[0])
        result = op.outputs[0].shape
        if uses.is_multiple(op, k):
            # In x * (rsqrt(var) * scale) + shift, the product with x comes between the scale and its shift. The
            # two can share a block as long as they act on the same channels.
            if self.uses[output.use].read.op != "mul":
                return None
            return Output(output.use, broadcast_axes(output.axes, shape, result))
        # Adding other data does not change the gradient, so a bias may come after a residual connection.
        adds = op.name in SUMS and (op.name != "sub" or k == 0)
        if not adds or shape != result:
            return None
        return output

    def _scan(self, op: Op, states: Sequence[State]) -> list[State]:
        assert op.inner and op.scan
        operands = list(map(Operand, op.inputs, states))
        entering = [self._enter_scan(op, k, operands) for k in range(len(states))]
        results = []
        for k, state in enumerate(self._walk(op.inner, entering)):
            position = op.scan.consts + k
            carried = k < op.scan.carried
            if carried and not isinstance(entering[position], Data):
                results.append(states[position])
            elif isinstance(state, Data):
                self.without_common_rows(state)
                results.append(Data())
            elif carried and op.outputs[k].size > 1:
                # From the second iteration on, the body reads parameters in an input that the walk took for data.
                results.append(
                    self.meets(state, op, "an iteration hands it to the next")
                )
            else:
                results.append(Derived(state.leaves, "scan"))
        return results

    def _enter_scan(self, op: Op, k: int, operands: Operands) -> State:
        """Return the state of input number `k` in a scan's body."""
        assert op.inner and op.scan
        operand = operands[k]
        state = operand.state
        if isinstance(state, Data):
            return Data()
        if op.scan.consts <= k < op.scan.last:
            # Either a learned initial state that is broadcast over the examples, or a kernel that the loop changes.
            changed = op.inner.outputs[k - op.scan.consts] is not op.inner.inputs[k]
            if changed or operand.repeated:
                if uses.copies(self, op, operands, operand, [op.inner.inputs[k]]):
                    return Data()
                return self.meets(state, op, "a scan carries it on and changes it")
        if isinstance(state, Derived):
            return state
        sliced: Axis = ()
        if k >= op.scan.last:
            sliced = state.axes[0]
            state = replace(state, axes=state.axes[1:])
        if is_broadcast([sliced]):
            return self.meets(state, op, "a scan iterates over copies of it")
        return replace(state, stack=(*state.stack, sliced))

    def _of_one(
        self, op: Op, operand: int, operands: Operands
    ) -> Sequence[State] | None:
        """Return the states after an op on a single parameter, or None if the parameter cannot be followed further."""
        view = operands[operand].state
        if not isinstance(view, View):
            return None
        meaning = op.meaning(operand, view.axes)
        states: list[Data | View | None] = [None]
        if isinstance(meaning, Follow):
            if op.name == "neg":
                view = replace(view, scaled=True)
            states = list(map(view.moved, meaning.axes, meaning.moved))
        elif op.name in FUNCTIONS:
            states = [uses.after_function(op, view, uses.changed_by(op))]
        elif op.name == "gather" and operand == 0:
            states = [uses.lookup(self, op, meaning, view)]
        elif isinstance(meaning, Read):
            other = operands[meaning.other]
            states = [uses.elementwise(self, op, meaning, view, other)]
        results = []
        for state in states:
            if state is None:
                return None
            if isinstance(state, View):
                if state.scaled:
                    self.multipliers[op] = operand
                state = replace(state, made=(op, operand))
            results.append(state)
        return results


def _behind_barrier(state: State) -> State:
    # To follow a scaled view, its multiplier would have to cross the barrier. No known model needs this.
    if isinstance(state, View) and state.scaled:
        return replace(
            state, inexact="it goes through a product, then optimization_barrier"
        )
    return state


def _unbranched(state: State, value: Value) -> State:
    if value.branched and isinstance(state, Data):
        return replace(state, output=None)
    return state
