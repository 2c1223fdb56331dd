"""Follows every parameter through the program of a loss to the operations that read it.

The walk gives each array a state (`states.py`), and records a `Use` where a view of a leaf meets data. What carries no
gradient to the loss is walked past: no read, no branch of an output. Where a leaf meets data in a way without exact
rows, that is noted with the reason, and the walk goes on.

Some rows are the same for all examples, as the constant tangents of a forward-mode derivative. Their read is a `late`
use: its result is followed as data that is `shared`, until it meets the examples in a broadcast (`_with_shared`).
There each example gets a gradient of its own.
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
from kfac._capture.primitives import Follow, Read, broadcast_axes
from kfac._capture.program import Op, Program, Value
from kfac._capture.states import NONE, Data, Derived, Output, State, Use, View, is_repeated
from kfac._capture.taps import Plan
from kfac._capture.trace import Trace
from kfac._layers import KRONECKER_KINDS, Layout

KERNEL_OPS = frozenset({"dense", "conv"})


class Inexact(NamedTuple):
    """Why a leaf has no exact rows: the operation that reads it, the reason, and its matrices where they are known."""

    operation: str
    reason: str
    layout: Layout | None = None


class Reads:
    """How the program of a loss uses its parameters.

    `_visit` gives the states of an op's results from those of its inputs. In this order it asks: does the op reach the
    loss; are there rows that all examples share (`_with_shared`); is there a program inside (`_scan`, `_walk`); are all
    inputs data (`_through_data`); is it a product (`_product`); is one input a view (`_of_one`). Else parameters are
    mixed in a way without exact rows (`_derive`). Each of these returns states, and may record a `Use` or an `Inexact`.

    Attributes:
      uses: the use of a parameter at each op that reads one, in program order.
      inexact: leaves that meet data in a way without exact rows.
      unmarked: whether one meets data on a way to the loss without a marked output.
      beside_others: an operation that reads rows of the batch beside others in a concatenation; empty without one.
      plan: what a replay has to know beside the taps. `multipliers`: which operand is the view, of operations that
        produce a scaled one. `merges`: the axis of the examples, where rows that all of them share meet them. `inside`:
        scans and remats that such rows go into, or a scaled view comes out of.
      n: the number of examples of the batch; None where it is not known.
      hidden: whether the loss has arguments, and hides its examples.
    """

    def __init__(self, traced: Trace, skipped: set[int]):
        self.n = traced.batch.num_examples
        self.hidden = self.n is None and bool(traced.arrays)
        self.uses: dict[Op, Use] = {}
        self.inexact: dict[int, Inexact] = {}
        self.unmarked, self.beside_others = False, ""
        self.plan = Plan()
        self._merged: set[Op] = set()  # late uses whose rows have met the examples
        self._leaked: set[Op] = set()  # and those that reach the loss by themselves
        states: list[State] = [
            Data() if k in skipped else View(k, shape, axes_lib.leaf_axes(shape), (0,) * len(shape))
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
        # A gradient with respect to one branch alone is not that of a layer's output.
        states = list(map(_unbranched, states, op.inputs))
        if op.unmarked and not op.inner and any(isinstance(s, View) for s in states):
            pairs = zip(op.inputs, states, strict=True)
            self.unmarked |= any(value.of_batch for value, s in pairs if isinstance(s, Data))
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
            # A scaled view would need its multiplier carried across; no model is written that way.
            across = functools.partial(dataclasses.replace, inexact=f"it goes through a product, then {op.name}")
            return [across(s) if isinstance(s, View) and s.scaled else s for s in states]
        if op.inner:
            leaving = self._scan(op, states) if op.scan else self._walk(op.inner, states)
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
        """Follows an operation of activations alone: they remain a layer's output while its axes can be followed."""
        shared = frozenset[Op]().union(*(s.shared for s in states))
        outputs = [k for k, s in enumerate(states) if isinstance(s, Data) and s.output]
        if len(outputs) != 1 or len(op.outputs) != 1:
            return Data(shared=shared)
        (k,) = outputs
        state, shape, result = states[k], op.inputs[k].shape, op.outputs[0].shape
        assert isinstance(state, Data) and state.output
        output = None
        if len(states) == 1:
            meaning = op.meaning(0, state.output.axes) if op.name not in ("neg", "slice") else None
            output = dataclasses.replace(state.output, axes=meaning.axes[0]) if isinstance(meaning, Follow) else None
        elif op.name == "mul" or (op.name == "div" and k == 0):
            if self.uses[state.output.use].read.op == "mul":
                # x * (rsqrt(var) * scale) + shift: the product with x stands between a scale and its shift. To put
                # both in one block needs no more than that they act on the same channels.
                output = Output(state.output.use, broadcast_axes(state.output.axes, shape, result))
        elif (op.name in ("add", "add_any") or (op.name == "sub" and k == 0)) and shape == result:
            # A sum with other data has the same gradient: a bias may come after a residual connection.
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
                is_repeated(state, op.inputs[k]) or op.inner.outputs[k - first] is not op.inner.inputs[k]
            ):
                # A learned initial state, broadcast over the examples; or a kernel that a loop works on.
                state = self._meets(state, op, "a scan carries it on and changes it")
            elif isinstance(state, View) and sliced and axes_lib.is_broadcast(state.axes[:1]):
                state = self._meets(state, op, "a scan iterates over copies of it")
            elif isinstance(state, View):
                atoms = state.axes[0] if sliced else ()
                axes = state.axes[1:] if sliced else state.axes
                state = dataclasses.replace(state, axes=axes, stack=(*state.stack, atoms))
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
                # From the second iteration on, what the walk took for data is made of parameters.
                results.append(self._meets(state, op, "an iteration hands it to the next"))
            else:
                results.append(Derived(state.leaves, "scan"))
        return results

    # -- rows that all examples share, as constant tangents --------------------------------------------------------

    def _with_shared(self, op: Op, states: list[State]) -> Sequence[State] | None:
        """Results of an op with rows that all examples share; None where it is one like others.

        Where they meet the examples by way of a broadcast, each example has a gradient of its own with respect to them.
        """
        if op.inner and not op.scan:
            self.plan.look_inside(op)
        if op.inner or any(not isinstance(s, Data) for s in states):
            return None
        shared = frozenset[Op]().union(*(s.shared for s in states))
        sharing = [k for k, s in enumerate(states) if s.shared]
        beside_examples = any(value.of_batch for k, value in enumerate(op.inputs) if k not in sharing)
        if beside_examples and op.summed and op.name in SUMS:
            self._leaked |= shared
            return [Data()]
        shape, result = op.inputs[sharing[0]].shape, op.outputs[0]
        grown = [k for k, longer in enumerate(result.grown) if longer]
        elementwise = op.name == "broadcast_in_dim" or op.name in primitives.ELEMENTWISE
        met = [k for k in grown if op.name == "broadcast_in_dim" or shape[k : k + 1] == (1,)]
        of_one_shape = len({op.inputs[k].shape for k in sharing}) == 1
        if elementwise and of_one_shape and len(met) == 1 and result.axes[met[0]] == axes_lib.examples(self.n or 1):
            self.plan.merges[op] = met[0]
            self.plan.look_inside(op)
            self._merged |= shared
            return [Data()]
        return None

    def _stay_shared(self, op: Op, states: list[State]) -> bool:
        """Whether the result of an op that reads rows that all examples share is shared by all of them, too."""
        if op.inner:
            return not op.scan
        params = [s for s in states if not isinstance(s, Data)]
        if params:
            one = len(params) == 1 and isinstance(params[0], View)
            return one and (op.product or op.name in ("add", "add_any"))
        others = [v for v, s in zip(op.inputs, states, strict=True) if not s.shared]
        return len(op.outputs) == 1 and not any(op.outputs[0].grown) and not any(value.of_batch for value in others)

    def _unshared(self, state: State) -> State:
        """Data that share no rows any more: those that read them have no rows for each example."""
        if not isinstance(state, Data) or not state.shared:
            return state
        for use in self.uses.values():
            if use.op in state.shared:
                self._note(use.leaf, use.read.name, "it reads rows that all examples share", use)
        return dataclasses.replace(state, shared=frozenset())

    def _settle(self) -> None:
        """Decides what late uses count for, once the program has been walked.

        - Its result meets the examples: it is exact, unless the result reaches the loss in another way as well.
        - It never does, and the rows are of an argument: another batch, exact only where marks give its weight.
        - It never does, and the rows are constants: if nothing else reads the kernel, a penalty, which does not count
          (`dropped`); else maybe a batch, as one point of a boundary is, which a mark has to say.
        - The loss hides its examples: they may be these constants, and it counts as any use.

        A bias follows its kernel.
        """
        with_rows = {use.leaf for use in self.uses.values() if not use.late}
        for op, use in self.uses.items():
            if use.late and op in self._merged & self._leaked:
                self._note(use.leaf, use.read.name, "it reads rows that examples share, and the loss by itself", use)
            elif use.late and op not in self._merged:
                # A loss that hides its examples may have them in constants.
                apart = self.n is not None and (self.unmarked or op.unmarked)
                of_arguments = op.inputs[use.read.other].from_arguments
                if apart and (of_arguments or use.leaf in with_rows):
                    shape = [math.prod(atom.size for atom in axis) for axis in use.read.x_axes]
                    what = "rows of another batch" if of_arguments else f"a constant {shape} too, as a penalty does"
                    how = "kfac.output(..., weight=)" + ", or batch_argnums=(1, 2) if it is as long" * of_arguments
                    self._note(use.leaf, use.read.name, f"it reads {what}, without {how}", use)
                else:
                    self.uses[op] = dataclasses.replace(use, late=False, dropped=apart)
            if use.joined and self.uses[use.joined[0]].dropped:  # the kernel's, which comes before
                self.uses[op] = dataclasses.replace(use, dropped=True)
                if self.uses[use.joined[0]].leaf in self.inexact:
                    self._note(use.leaf, use.read.name, "it is added to rows that all examples share")

    # -- reads ---------------------------------------------------------------------------------------------------

    def _add(self, use: Use) -> Data:
        self.uses[use.op] = use
        return Data(Output(use.op, use.read.y_axes))

    def _product(self, op: Op, states: list[State]) -> State:
        problem = ""
        views = [(k, state) for k, state in enumerate(states) if isinstance(state, View)]
        for k, view in sorted(views, key=lambda pair: is_repeated(pair[1], op.inputs[pair[0]])):
            meaning = op.meaning(k, view.axes)
            if not isinstance(meaning, Read) or is_repeated(view, op.inputs[k]):
                repeated = "its entries are repeated before the product"
                problem = problem or (meaning if isinstance(meaning, str) else repeated)
                continue
            other, value = states[meaning.other], op.inputs[meaning.other]
            if not (isinstance(other, Data) or is_repeated(other, value)):
                continue
            has_rows = not isinstance(other, Data) or (value.of_batch and not other.shared)
            if not has_rows and meaning.op != "dense":
                continue
            self._meets(other, op, "it is broadcast to the examples, which then see it as an activation")
            use = Use(meaning, view, op, late=not has_rows)
            self.beside_others = self.beside_others or (op.describe() if value.concatenated else "")
            if not self._exact(use, constants=self.hidden and not value.from_arguments):
                return Data()
            result = self._add(use)
            return result if has_rows else dataclasses.replace(result, shared=other.shared | {op})
        return self._derive(op, states, problem)

    def _exact(self, use: Use, constants: bool) -> bool:
        """Tells whether a read of a kernel has exact rows, else notes why. `constants`: it reads some, maybe shared."""
        view, operation = use.view, use.op.describe()
        for leaf in view.beside:
            self._note(leaf, operation, "the kernel is a different array, computed from it")
        reasons = [
            view.inexact,
            "its values are multiplied by others before the product" * (not view.uniform),
            "it reads a slice that is not one of several equal parts of the parameter" * (view.picks is None),
            "it reads constants, which the examples that the loss hides may share" * constants,
        ]
        reason = next(filter(None, reasons), "")
        if reason:
            self._note(view.leaf, operation, reason, use)
        return not reason

    def _of_one(self, op: Op, view: View, states: list[State]) -> list[State] | None:
        """What becomes of a single parameter view; None if it can no longer be followed."""
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
                views.append(dataclasses.replace(view, axes=axes, start=tuple(start), scaled=scaled))
            return views
        if op.name == "gather" and operand == 0:
            state = self._lookup(op, meaning, view)
        elif isinstance(meaning, Read):
            state = self._elementwise(op, meaning, view, states)
        else:
            return None
        return None if state is None else [state]

    def _elementwise(self, op: Op, read: Read, view: View, states: list[State]) -> State | None:
        """A sum or product of a view with an array that is no parameter."""
        other, value = states[read.other], op.inputs[read.other]
        assert isinstance(other, Data)
        axes = axes_lib.with_rows(read.y_axes, op.outputs[0].axes)
        read = dataclasses.replace(read, x_axes=axes, y_axes=axes)
        # A batch of one, or an iteration over examples, has none of them among the atoms; a hidden one may be of one.
        one = self.n is None or any(loop.longer for loop in op.loops)
        held = any(op.outputs[0].grown) or (one and value.of_batch)
        repeated, additive = axes_lib.is_broadcast(axes) or held, read.op == "add"
        if read.divides and read.operand == 1:
            return None
        joined = None
        # From `b - y` a kernel would get gradients of the other sign than its bias.
        opposite = op.name == "sub" and read.operand == 0
        if additive and other.output and not view.scaled and not (opposite and self._is_kernel(other.output.use)):
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
        scaled = not additive or view.scaled or read.sign < 0  # of a sum the gradient is the same, or minus it
        if scaled:
            self._scale(op, read.operand)
        uniform, mixed = view.uniform and (additive or value.size == 1), view.mixed or (not additive and value.of_batch)
        return dataclasses.replace(view, axes=axes, scaled=scaled, uniform=uniform, mixed=mixed)

    def _lookup(self, op: Op, read: Any, view: View) -> State | None:
        """Rows of a table. Each is known to meet data once for each index, unless the indices hold no examples."""
        if not op.inputs[1].of_batch:
            return None
        whole = sum(math.prod(a.size for a in axis) > 1 for axis in view.axes) <= 2  # a table of more axes is no matrix
        exact = isinstance(read, Read) and view.uniform and not (view.inexact or view.beside)
        if not (exact and whole) or view.picks is None:
            return self._meets(view, op, "it is not looked up row by row")
        self.uses[op] = Use(read, view, op)
        return Data()  # to which no bias is joined

    def _scale(self, op: Op, operand: int) -> None:
        """Notes that an op makes a scaled view of its input number `operand`."""
        self.plan.multipliers[op] = operand
        self.plan.look_inside(op)

    def _is_kernel(self, op: Op) -> bool:
        return self.uses[op].read.op in KERNEL_OPS

    def _join(self, view: View, y_axes: Axes, output: Output) -> tuple[Op, tuple[tuple[Atom, Atom], ...]] | None:
        """Pairs the elements of a vector with the features of the output of a use that it is added to.

        Args:
          view: the vector.
          y_axes: where its axes are in the sum.
          output: the use, and where the axes of its leaf are in the sum.

        Returns:
          The use, and pairs of atoms, of the vector's leaf and of the use's, in the memory order of the vector; None
          unless the vector has one element for each feature of each copy, in the same order.
        """
        use = self.uses[output.use]
        picks, of_use = view.picks, use.view.picks
        if len(view.stack) != len(use.view.stack) or picks is None or of_use is None:
            return None
        if [(atom.size, index) for atom, index in picks] != [(atom.size, index) for atom, index in of_use]:
            return None
        pairs = [(atom, partner) for (atom, _), (partner, _) in zip(picks, of_use, strict=True)]
        # Axis by axis: first those of the scans around, then those of the sum.
        atoms = axes_lib.atoms_of((*use.view.stack, *use.read.y_axes))
        theirs = (*use.view.stack, *(axes_lib.split_like(axis, atoms) for axis in output.axes))
        for axis, other in zip((*view.stack, *y_axes), theirs, strict=True):
            refined = None if other is None else axes_lib.common_refinement(axis, other)
            if refined is None or any(a.of_leaf != b.of_leaf for a, b in refined):
                return None
            pairs += [(a, b) for a, b in refined if a.of_leaf]
        pairs.sort(key=lambda pair: pair[0].memory_order)
        # A kernel and its bias are brought to [copies, features] each by its own layout, so only the order among copies
        # and that among features must agree. A scale and its shift are used as they lie in memory.
        copies = {*use.copies} if use.read.op in KERNEL_OPS else set()
        for of_copies in (True, False):
            order = [b.memory_order for _, b in pairs if any(axes_lib.is_part(b, atom) for atom in copies) == of_copies]
            if order != sorted(order):
                return None
        return output.use, tuple(pairs)

    # -- everything else -----------------------------------------------------------------------------------------

    def _derive(self, op: Op, states: list[State], reason: str = "") -> State:
        """Parameters in an operation without exact rows: another array of parameters, or where they meet data."""
        params = [(value, s) for value, s in zip(op.inputs, states, strict=True) if not isinstance(s, Data)]
        leaves = NONE.union(*(s.leaves for _, s in params))
        how = next((s.how for _, s in params if isinstance(s, Derived)), op.name)
        data = [value for value, s in zip(op.inputs, states, strict=True) if isinstance(s, Data)]
        mixed = any(isinstance(s, View) and s.mixed for _, s in params)
        if mixed or any(value.of_batch for value in data) or any(s.shared for s in states):
            if op.summed and op.name in SUMS and all(value.size == 1 for value, _ in params):
                return Data()  # a penalty, added to the losses of the examples
            for _, s in params:
                built = f"the kernel is computed from it by {s.how}" if op.product and isinstance(s, Derived) else ""
                self._meets(s, op, reason or built or f"what {how} makes of it has no known rows")
            return Data()
        (result, *more) = op.outputs
        followed = [s for value, s in params if isinstance(s, View) and value.shape == result.shape]
        if followed and not more and not op.product:
            view = followed[0]
            operand = next(k for k, s in enumerate(states) if s is view)
            # By place, as `w * w` reads one view twice.
            others = [(op.inputs[k], s) for k, s in enumerate(states) if k != operand]
            beside = NONE.union(*(s.leaves for _, s in others))
            by_number = op.name == "mul" and all(value.size == 1 for value, _ in others)
            # The base of a sum, and what a learned number multiplies, keep exact rows; other leaves in it have none.
            if beside and view.leaf not in beside and (op.name in ("add", "add_any") or by_number):
                if by_number or view.scaled:
                    self._scale(op, operand)
                return dataclasses.replace(view, scaled=view.scaled or by_number, beside=view.beside | beside)
            why = view.inexact or f"it is multiplied by, or made into, something else by {op.name}"
            return dataclasses.replace(view, inexact=why, beside=view.beside | (beside - {view.leaf}))
        grew = op.name == "broadcast_in_dim" and (any(result.grown) or self.n is None)
        return Derived(leaves, how, repeated=all(is_repeated(s, value) for value, s in params) or grew)

    def _meets(self, state: State, op: Op, reason: str) -> Data:
        """A parameter that meets data in a way without exact rows."""
        for leaf in state.leaves:
            earlier = state.inexact if isinstance(state, View) and state.leaf == leaf else ""
            self._note(leaf, op.describe(), earlier or reason)
        return Data()

    def _note(self, leaf: int, operation: str, reason: str, use: Use | None = None) -> None:
        kernel = use is not None and use.read.op in KRONECKER_KINDS and use.view.picks is not None
        layout = use.layout if use is not None and kernel else None
        noted = self.inexact.get(leaf)
        if noted is None or (noted.layout is None and layout is not None):
            self.inexact[leaf] = Inexact(*(noted[:2] if noted else (operation, reason)), layout)


def _unbranched(state: State, value: Value) -> State:
    return dataclasses.replace(state, output=None) if value.branched and isinstance(state, Data) else state
