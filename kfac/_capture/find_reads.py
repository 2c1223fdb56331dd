"""Follows every parameter through the program of a loss to the operations that read it.

What is known of each array on the way is in `states.py`. What carries no gradient to the loss is walked past: no read,
no branch of an output, no reason to refuse.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import jax
import numpy as np

from kfac._capture import axes as axes_lib
from kfac._capture import parts, primitives
from kfac._capture.axes import Atom, Axes
from kfac._capture.outputs import is_key
from kfac._capture.primitives import SUMS, Follow, Read, spread
from kfac._capture.replay import compute
from kfac._capture.states import (
    KERNEL_OPS,
    NOT_WITH_EXAMPLES,
    Data,
    Derived,
    Output,
    State,
    Use,
    View,
    is_active,
    is_repeated,
    leaves_of,
    unsupported,
)
from kfac._capture.trace import Op, Path, Program, Trace


class Reads:
    """How the program of a loss uses its parameters.

    Attributes:
      uses: every read, in program order.
      coarse: leaves that meet data in a way without known per-example gradients, and how.
      derived: leaves that something else is computed from, and how.
      products: leaves whose product with another parameter something is computed from, and that product.
      skipped_products: lengths of the first axes that are not the parameter's, where products read skipped ones.
      lengths: leading lengths above one of the array arguments but for PRNG keys.
      single: whether one of them has a leading length of one.
      late_products: leaves that are multiplied with rows that all examples share, and that product.
      merges: where rows that all examples share meet the examples: the axis of these, and its length.
      shared_calls: operations into which such rows are handed.
      multipliers: operations that produce a scaled view, and the operand that is the view.
      carriers: operations out of which a scaled view is handed.
    """

    def __init__(self, traced: Trace, skipped: set[int]):
        self.names, self.shapes = traced.names, traced.shapes
        self.uses: list[Use] = []
        self.coarse: dict[int, str] = {}
        self.derived: dict[int, str] = {}
        self.products: dict[int, str] = {}
        self.skipped_products: dict[int | None, str] = {}
        self.late_products: dict[int, str] = {}
        self.merges: dict[Path, tuple[int, int]] = {}
        self.shared_calls: set[Path] = set()
        self.multipliers: dict[Path, int] = {}
        self.carriers: set[Path] = set()
        shapes = [tuple(array.shape) for array in traced.arrays if not is_key(array)]
        self.lengths = {shape[0] for shape in shapes if shape and shape[0] > 1}
        self.single = any(shape and shape[0] == 1 for shape in shapes)
        self._sizes = {size for shape in shapes for size in shape[:-1] if size > 1} | self.lengths
        # A loss without array arguments has its examples in constants.
        self._constants = Data(fixed=bool(traced.arrays))
        states: list[State] = [
            Data(active=True, skipped=True, fixed=True)
            if k in skipped
            else View(k, axes_lib.leaf_axes(shape), (0,) * len(shape))
            for k, shape in enumerate(self.shapes)
        ]
        states += [Data()] * len(traced.arrays)
        loss, *_ = self._walk(traced.program, states, (), ())
        if isinstance(loss, Data) and loss.shared:
            self._refuse_shared(loss.shared)

    # -- walking -------------------------------------------------------------------------------------------------

    def _walk(self, program: Program, states: Sequence[State], path: Path, scans) -> list[State]:
        def visit(index: int, op: Op, states: list[State]) -> list[State]:
            # A gradient with respect to one branch alone is not that of a layer's output.
            found = self._visit(op, list(map(_unbranched, states, op.branched)), (*path, index), scans)
            if len(found) == 1 and isinstance(found[0], Data) and not found[0].active:
                found = [dataclasses.replace(found[0], value=_computed(program, op, states))]
            return found

        def constant(value):
            return dataclasses.replace(self._constants, value=lambda: value)

        results = program.run(states, constant, lambda value: Data(value=lambda: value), visit)
        return list(map(_unbranched, results, program.branched))

    def _visit(self, op: Op, states: list[State], path: Path, scans) -> list[State]:
        params = [s for s in states if not isinstance(s, Data)]
        known = params or any(isinstance(s, Data) and (s.output or s.made_of or s.shared) for s in states)
        if not op.alive or not known:
            if op.alive and (op.product or op.name == "gather"):
                self._note_skipped(op, states)
            skipped = len(states) == 1 and op.keeps_values and isinstance(states[0], Data) and states[0].skipped
            # Parameters that carry no gradient are numbers, but no examples.
            constants = [Data(fixed=True) if not isinstance(s, Data) else s for s in states]
            active = any(isinstance(s, Data) and s.active for s in states)
            return [Data(active, skipped=skipped, fixed=self._is_fixed(op, constants))] * len(op.outputs)
        if any(isinstance(s, Data) and s.shared for s in states):
            found = self._with_shared(op, states, params, path)
            if found is not None:
                return found
        if op.name == "optimization_barrier":
            return [_at_barrier(s) for s in states]
        if op.inner:
            if op.by_rule:  # only tangents carry a gradient
                values = op.num_values
                numbers = [s if isinstance(s, Data) and not s.skipped else Data(fixed=True) for s in states[:values]]
                states = [*map(_unbranched, numbers, [True] * values), *states[values:]]
            leaving = (
                self._scan(op, states, path, scans) if op.name == "scan" else self._walk(op.inner, states, path, scans)
            )
            if any(isinstance(s, View) and s.scaled for s in leaving):
                self.carriers.add(path)
            return leaving
        if op.opaque and params and not op.registered:
            return self._opaque(op, states)
        if op.product:
            return [self._product(op, states, path, scans)]
        if not params:
            return [self._through_data(op, states)] * len(op.outputs)
        along = primitives.joins(op.eqn)
        if along is not None:
            joined = parts.concatenated(states, op.shapes, op.results[0], along)
            if joined:
                return [joined]
        if len(params) == 1 and isinstance(params[0], View):
            found = self._of_one(op, params[0], states, path, scans)
            if found is not None:
                return found
        return [self._derive(op, states)] * len(op.outputs)

    def _with_shared(self, op: Op, states: list[State], params: Sequence[State], path: Path) -> list[State] | None:
        """Results of an op with rows that all examples share; None where it is one like others.

        Where they meet the examples by way of a broadcast, each example has a gradient of its own with respect to them.
        """
        leaves = frozenset().union(*(s.shared for s in states if isinstance(s, Data)))
        if op.inner:
            if op.by_rule or (op.call and op.call.scan):
                self._refuse_shared(leaves)
            self.shared_calls.add(path)
            return None
        if params:
            one = len(params) == 1 and isinstance(params[0], View)
            if not (op.product or (one and op.name in SUMS)):
                self._refuse_shared(leaves)
            return None
        where = [k for k, s in enumerate(states) if isinstance(s, Data) and s.shared]
        given = zip(states, op.literals, strict=True)
        alone = all(literal or (isinstance(s, Data) and s.fixed) for s, literal in given) and len(op.outputs) == 1
        if alone and op.name == "broadcast_in_dim":
            new = primitives.added_axes(op.eqn)
        elif alone or op.name not in primitives.ELEMENTWISE:
            new = []
        else:
            shape = next(shape for k, shape in enumerate(op.shapes) if k in where)
            new = [k for k, (own, size) in enumerate(zip(shape, op.results[0], strict=False)) if own == 1 < size]
        axes = [k for k in new if op.results[0][k] in self.lengths]
        if len(axes) == 1 and len({op.shapes[k] for k in where}) == 1:
            self.merges[path] = axes[0], op.results[0][axes[0]]
            return [Data(active=True)]
        if not alone:
            self._refuse_shared(leaves)
        followed = self._through_data(op, states)
        assert isinstance(followed, Data)
        return [dataclasses.replace(followed, shared=leaves, fixed=True)] * len(op.outputs)

    def _refuse_shared(self, leaves: frozenset[int]) -> NoReturn:
        names = [self.names[leaf] for leaf in sorted(leaves)]
        raise unsupported(names, self.late_products[min(leaves)], NOT_WITH_EXAMPLES)

    def _note_skipped(self, op: Op, states: list[State]) -> None:
        for k, state in enumerate(states):
            if isinstance(state, Data) and state.skipped:
                found = op.meaning(k, axes_lib.leaf_axes(op.shapes[k]))
                if isinstance(found, Read):
                    self.skipped_products.setdefault(found.leading, "a skipped parameter")

    def _through_data(self, op: Op, states: list[State]) -> State:
        """Activations only: keep what is known of a layer's output while its axes can be followed."""
        active, fixed = any(is_active(s) for s in states), self._is_fixed(op, states)
        known = [k for k, s in enumerate(states) if isinstance(s, Data) and (s.output or s.made_of)]
        if len(known) != 1 or len(op.outputs) != 1:
            return Data(active, fixed=fixed)
        state = states[known[0]]
        assert isinstance(state, Data)
        if len(states) == 1:
            found = op.meaning(0, state.output.axes) if state.output and op.name not in ("neg", "slice") else None
            output = None
            if state.output and isinstance(found, Follow):
                output = dataclasses.replace(state.output, axes=found.axes[0])
            return Data(active, output, state.made_of if op.keeps_values else frozenset(), fixed=fixed)
        scales = op.name == "mul" or (op.name == "div" and known[0] == 0)
        if scales and state.output and self.uses[state.output.use].read.op == "mul":
            # x * (rsqrt(var) * scale) + shift: the product with x stands between a scale and its shift. To put both in
            # one block needs no more than that they act on the same channels.
            axes = spread(state.output.axes, op.shapes[known[0]], op.results[0])
            return Data(active, Output(state.output.use, axes, multiplied=True), fixed=fixed)
        added = op.name in ("add", "add_any") or (op.name == "sub" and known[0] == 0)
        if added and state.output and op.shapes[known[0]] == op.results[0]:
            # A sum with other data has the same gradient: a bias may come after a residual connection.
            return Data(active, state.output, fixed=fixed)
        return Data(active, fixed=fixed)

    def _scan(self, op: Op, states: list[State], path: Path, scans) -> list[State]:
        assert op.inner and op.call and op.call.scan
        first, carried, length = op.call.scan
        last = first + carried
        fixed = _fixed_in_scan(
            op, [lit or (isinstance(s, Data) and s.fixed) for lit, s in zip(op.literals, states, strict=True)]
        )
        entering: list[State] = []
        for k, state in enumerate(states):
            if isinstance(state, Data):
                if first <= k < last:
                    state = Data(active=True, fixed=fixed[k])
                state = dataclasses.replace(state, output=None, value=state.value if k < first else None)
            elif first <= k < last and is_repeated(state):
                # A learned initial state, broadcast over the examples.
                self._met_data(state, "broadcast, then scan")
                state = Data(active=True)
            elif first <= k < last and not op.inner.hands_on(k - first, k):
                self._refuse(state, op, "a scan changes it from iteration to iteration")
            elif isinstance(state, View):
                atoms = state.axes[0] if k >= last else ()
                if k >= last and axes_lib.is_broadcast((atoms,)):
                    self._refuse(state, op, "a scan iterates over copies of it")
                axes = state.axes[1:] if k >= last else state.axes
                state = dataclasses.replace(state, axes=axes, stack=(*state.stack, atoms))
            entering.append(state)
        leaving = self._walk(op.inner, entering, path, (*scans, (len(path) - 1, length)))
        results: list[State] = []
        for k, state in enumerate(leaving):
            if isinstance(state, Data):
                results.append(Data(active=True, fixed=state.fixed))
            elif k < carried and not isinstance(entering[first + k], Data):
                results.append(states[first + k])
            elif k < carried and is_repeated(state):
                self._met_data(state, "scan")
                results.append(Data(active=True))
            elif k < carried and math.prod(op.results[k]) > 1:
                # From the second iteration on, what the walk took for data is made of parameters.
                self._refuse(state, op, "an iteration hands it to the next")
            else:
                results.append(Derived(leaves_of(state), "scan"))
        return results

    def _is_fixed(self, op: Op, states: Sequence[State]) -> bool:
        """Whether a result depends on no array argument.

        Zeros of the size of a batch may be its initial state: they do not count.
        """
        if op.inner and not states:
            return False
        own = [s for s, literal in zip(states, op.literals, strict=True) if not literal]
        if not own:
            shape = op.results[0] if op.results else ()
            of_batch = len(shape) > 1 and self._sizes.intersection(shape)
            return op.name != "broadcast_in_dim" or not (of_batch or not self._constants.fixed)
        if op.name == "broadcast_in_dim" and any(
            op.results[0][k] in self.lengths for k in primitives.added_axes(op.eqn)
        ):
            return False  # a constant repeated for every example
        return all(isinstance(s, Data) and s.fixed for s in own)

    # -- reads ---------------------------------------------------------------------------------------------------

    def _add(self, use: Use) -> Data:
        self.uses.append(use)
        return Data(active=True, output=Output(len(self.uses) - 1, use.read.y_axes))

    def _picks(self, view: View) -> tuple[tuple[Atom, int], ...] | None:
        """Which part of its leaf a view is (`axes.picks`)."""
        return axes_lib.picks(self.shapes[view.leaf], view.start, axes_lib.atoms_of((*view.stack, *view.axes)))

    def _kernel(self, read: Read, view: View, path: Path, scans) -> Use:
        return Use(read, view.leaf, view, path, scans, self._picks(view))

    def _product(self, op: Op, states: list[State], path: Path, scans) -> State:
        given = zip(states, op.literals, strict=True)
        states = [self._constants if literal else state for state, literal in given]
        operand = self._kernel_operand(op, states)
        if operand is None:
            return self._product_of_others(op, states)
        view = states[operand]
        assert isinstance(view, View)
        found = op.meaning(operand, view.axes)
        if isinstance(found, str):
            self._refuse(view, op, found)
        if not isinstance(found, Read):
            # Broadcast over examples and then multiplied: an activation (a learned initial state).
            if not self._sizes.intersection(axes_lib.foreign_sizes(view.axes)) and self.lengths:
                self._refuse(view, op, "its entries are repeated before the product")
            self._met_data(view, f"broadcast, then {op.name}")
            return Data(active=True)
        other = states[found.other]
        late = isinstance(other, Data) and other.fixed
        reads = None if late and view.parts else parts.reads_of_parts(view, found)
        if reads is None:
            self._refuse(view, op, "it reads something else than whole parts of what is put together there")
        uses = [self._kernel(read, part, path, scans) for part, read in reads]
        if view.parts:
            self.uses += uses
            return Data(active=True)
        (use,) = uses
        if not isinstance(other, Data) or not late:
            return self._add(use)
        result = self._add(dataclasses.replace(use, late=True))
        self.late_products.setdefault(view.leaf, op.describe())
        return dataclasses.replace(result, shared=other.shared | {view.leaf}, fixed=True)

    def _kernel_operand(self, op: Op, states: list[State]) -> int | None:
        """Which operand of a product is the kernel; None if none is."""
        views = {k: s for k, s in enumerate(states) if isinstance(s, View)}
        kernels = [k for k, view in views.items() if not axes_lib.is_broadcast(view.axes)] or list(views)
        for k in kernels:
            found = op.meaning(k, views[k].axes)
            other = states[found.other if isinstance(found, Read) else 1 - k]
            if is_repeated(other):
                self._met_data(other, f"broadcast, then {op.name}")
            elif not isinstance(other, Data) or other.fixed:
                continue
            return self._uniform(op, views[k], k)
        for k in kernels:  # of rows that all examples share
            found = op.meaning(k, views[k].axes)
            if isinstance(found, Read) and found.op == "dense" and isinstance(states[found.other], Data):
                return self._uniform(op, views[k], k)
        return None

    def _uniform(self, op: Op, view: View, k: int) -> int:
        if not (view.uniform or view.masked):
            reason = "its values are multiplied by others before the product (one number or mask is followed)"
            self._refuse(view, op, reason)
        return k

    def _product_of_others(self, op: Op, states: list[State]) -> State:
        shared = frozenset().union(*(s.shared for s in states if isinstance(s, Data)))
        if shared:
            self._refuse_shared(shared)
        if all(isinstance(s, Data) for s in states):
            for state, other in zip(states, reversed(states), strict=True):
                if isinstance(state, Data) and state.made_of and not (isinstance(other, Data) and other.skipped):
                    self._refuse(state, op, "the product reads rows looked up in it, or what became of it")
            return Data(any(is_active(s) for s in states))
        if any(isinstance(s, Data) and not s.fixed for s in states):
            state = next(s for s in states if not isinstance(s, Data))
            if not isinstance(state, Derived) or not state.repeated:
                reason = "its other operand holds no examples"
                if isinstance(state, Derived):
                    reason = f"the kernel is a different array, computed from it by {state.how}"
                self._refuse(state, op, reason)
            self._met_data(state, f"{state.how}, then {op.name}")
            return Data(active=True)
        for state, other in zip(states, reversed(states), strict=True):
            if isinstance(other, (View, Derived)) and other.mixed:
                reason = "with a single example, an activation cannot be told from a parameter; take at least two"
                self._refuse(state, op, reason)
        derived = self._derive(op, states)
        assert isinstance(derived, Derived)
        self.products.update(dict.fromkeys(derived.leaves, op.describe()))
        return dataclasses.replace(derived, product=op.describe())

    def _of_one(self, op: Op, view: View, states: list[State], path: Path, scans) -> list[State] | None:
        """What becomes of a single parameter view; None if it can no longer be followed."""
        operand = next(k for k, s in enumerate(states) if s is view)
        if op.name == "select_n" and len(states) == 3 and operand > 0:
            if not (_is_mask(states[0]) and _is_mask(states[3 - operand], (0,))):
                return None
            self.multipliers[path] = operand
            return [dataclasses.replace(view, scaled=True, uniform=False, masked=not view.scaled)]
        found = op.meaning(operand, view.axes)
        if isinstance(found, Follow):
            scaled = view.scaled or op.name == "neg"
            if scaled:
                self.multipliers[path] = operand
            return [self._moved(view, *part, scaled) for part in zip(found.axes, found.moved, strict=True)]
        if op.name == "gather" and operand == 0:
            return [self._lookup(op, found if isinstance(found, Read) else None, view, states, path, scans)]
        if not isinstance(found, Read):
            return None
        state = self._elementwise(op, found, view, states, path, scans)
        return None if state is None else [state]

    def _moved(self, view: View, axes: Axes, moves: Iterable[tuple[int, int]], scaled: bool) -> View:
        start = list(view.start)
        for leaf_axis, by in moves:
            start[leaf_axis] += by
        return dataclasses.replace(view, axes=axes, start=tuple(start), scaled=scaled)

    def _elementwise(self, op: Op, read: Read, view: View, states: list[State], path: Path, scans) -> State | None:
        """A sum or product of a view with an array that is no parameter."""
        operand, other = read.operand, states[read.other]
        assert isinstance(other, Data)
        repeated, additive = axes_lib.is_broadcast(read.y_axes), read.op == "add"
        if additive and op.literals[read.other] and read.sign == 1 and not view.scaled:
            return view  # a constant offset, as in (1 + scale): the gradient is the same
        if read.divides and operand == 1:
            return None
        if other.fixed and (additive or repeated) and not other.shared:
            return None  # not yet an activation
        if not additive and not repeated:
            self.multipliers[path] = operand
            # A number made of parameters may depend on this one: its kernel is normalised.
            number = op.sizes[read.other] == 1 and not other.active
            masked = not (view.scaled or number or read.divides) and _is_mask(other)
            mixed = view.mixed or (op.sizes[read.other] > 1 and not masked)
            uniform = view.uniform and number
            return dataclasses.replace(view, scaled=True, uniform=uniform, mixed=mixed, masked=masked)
        if not repeated and not other.active:
            return None
        if view.parts:
            reads = parts.reads_of_parts(view, read) if additive and repeated and not view.scaled else None
            self.uses += [Use(own, part.leaf, part, path, scans, self._picks(part)) for part, own in reads or ()]
            return Data(active=True) if reads else None
        joined, directly = None, False
        # From `b - y` a kernel would get gradients of the other sign than its bias.
        opposite = op.name == "sub" and operand == 0
        if additive and other.output and not view.scaled and not (opposite and self._is_kernel(other.output)):
            joined = self._join(view, read.y_axes, other.output)
            same = joined is not None and other.output.axes == self.uses[joined[0]].read.y_axes
            directly = same and not other.output.multiplied and not opposite
        if other.shared and not (joined and self._is_kernel(Output(joined[0], ()))):
            self._refuse(view, op, NOT_WITH_EXAMPLES)
        result = self._add(Use(read, view.leaf, view, path, scans, self._picks(view), joined, directly))
        if other.shared:
            return dataclasses.replace(result, shared=other.shared, fixed=True)
        # An update of the size of the parameter, as in a model that takes gradient steps of its own.
        return result if repeated or joined else dataclasses.replace(result, made_of=frozenset({view.leaf}))

    def _lookup(self, op: Op, read: Read | None, view: View, states: list[State], path: Path, scans) -> Data:
        """Rows of a table. Each is known to meet data once for each index, unless the indices hold no examples."""
        kernels = sum(math.prod(a.size for a in axis) > 1 for axis in view.axes) > 2
        indices = states[1]
        assert isinstance(indices, Data)
        if read is None or view.parts or not view.uniform or indices.fixed or self._picks(view) is None:
            self._met_data(view, op.name)
            return Data(active=True, made_of=leaves_of(view), fixed=self._is_fixed(op, states))
        self.uses.append(self._kernel(read, view, path, scans))
        # Rows with more than one axis may be kernels, chosen by the example; a product that reads those is refused.
        return Data(active=True, made_of=frozenset({view.leaf} if kernels else ()))

    def _is_kernel(self, output: Output) -> bool:
        return self.uses[output.use].read.op in KERNEL_OPS

    def _join(self, view: View, y_axes: Axes, output: Output) -> tuple[int, tuple[tuple[Atom, Atom], ...]] | None:
        """Pairs a vector with the features of the output it is added to; None unless it has one element for each."""
        use = self.uses[output.use]
        picks = self._picks(view)
        if len(view.stack) != len(use.view.stack) or picks is None or use.picks is None:
            return None
        if [(atom.size, index) for atom, index in picks] != [(atom.size, index) for atom, index in use.picks]:
            return None
        outputs = axes_lib.atoms_of((*use.view.stack, *use.read.y_axes))
        found = [axes_lib.split_like(axis, outputs) for axis in output.axes]
        pairs = [(mine, theirs) for (mine, _), (theirs, _) in zip(picks, use.picks, strict=True)]
        for mine, theirs in zip((*view.stack, *y_axes), (*use.view.stack, *found), strict=True):
            refined = None if theirs is None else axes_lib.common_refinement(mine, theirs)
            if refined is None or any(a.of_leaf != b.of_leaf for a, b in refined):
                return None
            pairs += [(a, b) for a, b in refined if a.of_leaf]
        pairs.sort(key=lambda pair: pair[0].memory_order)
        # A kernel and its bias are brought to [copies, features] each by its own layout, so only the order among copies
        # and that among features must agree. A scale and its shift are used as they lie in memory.
        stack = {*use.copies} if use.read.op in KERNEL_OPS else set()
        for stacked in (True, False):
            order = [b.memory_order for _, b in pairs if any(axes_lib.is_part(b, atom) for atom in stack) == stacked]
            if order != sorted(order):
                return None
        return output.use, tuple(pairs)

    # -- everything else -----------------------------------------------------------------------------------------

    def _met_data(self, state: State, how: str) -> None:
        if isinstance(state, Derived) and state.product:
            raise unsupported([self.names[leaf] for leaf in sorted(state.leaves)], state.product, NOT_WITH_EXAMPLES)
        for leaf in () if isinstance(state, Data) else leaves_of(state):
            self.coarse.setdefault(leaf, how)

    def _derive(self, op: Op, states: list[State]) -> State:
        """Parameters in an operation whose per-example gradients are not known."""
        sources = [s for s in states if not isinstance(s, Data)]
        data = [
            s for s, lit in zip(states, op.literals, strict=True) if isinstance(s, Data) and not s.fixed and not lit
        ]
        repeated = [is_repeated(s) for s in sources]
        size = max((math.prod(shape) for shape in op.results), default=0)
        grew = any(own < size for own, s in zip(op.sizes, states, strict=True) if not isinstance(s, Data))
        leaves = frozenset().union(*(leaves_of(s) for s in sources))
        how = next((s.how for s in sources if isinstance(s, Derived)), op.name)
        for leaf in leaves:
            self.derived.setdefault(leaf, how)
        product = next((s.product for s in sources if isinstance(s, Derived) and s.product), "")
        scalars = all(isinstance(s, Data) or own == 1 for own, s in zip(op.sizes, states, strict=True))
        if data and scalars and op.name in SUMS and op.results[0] and op.summed:
            return Data(active=True)  # a penalty, added to the losses of the examples
        if op.name == "gather" and data:
            for state in sources:
                self._met_data(state, how)
            return Data(active=True, made_of=leaves)
        # A scalar made of parameters and added to the loss is a penalty; one that multiplies it is none.
        mixed = any(is_active(s) for s in data) and (size > 1 or op.name not in SUMS)
        if data and (any(repeated) or grew or mixed):
            for state in sources:
                self._met_data(state, how)
            return Data(active=True, made_of=frozenset() if any(repeated) or grew else leaves)
        met = any(isinstance(s, Data) and not s.fixed and own > 1 for own, s in zip(op.sizes, states, strict=True))
        return Derived(
            leaves,
            how,
            repeated=all(repeated) or (op.name == "broadcast_in_dim" and grew),
            mixed=met or any(isinstance(s, (View, Derived)) and s.mixed for s in sources),
            product=product,
        )

    def _opaque(self, op: Op, states: list[State]) -> list[State]:
        if op.name == "custom_jvp_call" and not op.contains_product():
            return [self._derive(op, states)] * len(op.outputs)
        state = next(s for s in states if not isinstance(s, Data))
        self._refuse(state, op, f"what {op.name} does with it cannot be followed")

    def _refuse(self, state: State, op: Op, reason: str) -> NoReturn:
        raise unsupported([self.names[leaf] for leaf in sorted(leaves_of(state))], op.describe(), reason)


def _unbranched(state: State, branched: bool) -> State:
    return dataclasses.replace(state, output=None) if branched and isinstance(state, Data) and state.output else state


def _at_barrier(state: State) -> State:
    # A scaled view would need its multiplier carried across; no model is written that way.
    if isinstance(state, View) and state.scaled:
        return Derived(leaves_of(state), "a product, then optimization_barrier", mixed=state.mixed)
    return state


def _computed(program: Program, op: Op, states: Sequence[State]) -> Callable[[], Any] | None:
    """How to compute the result of an op of constants; None if it is one of other arrays."""
    values = [s.value for s in states if isinstance(s, Data) and s.value]
    if len(values) < len(states):
        return None
    return lambda: compute(program, op, [value() for value in values])[0]


def _is_mask(state: State, numbers: Sequence[int] = (0, 1)) -> bool:
    """Whether an array is a constant that holds only these numbers, and all of them are known now."""
    if not isinstance(state, Data) or state.value is None:
        return False
    try:
        with jax.ensure_compile_time_eval():
            return bool(np.isin(np.asarray(state.value()), numbers).all())
    except jax.errors.TracerArrayConversionError:
        return False


def _fixed_in_scan(op: Op, fixed: Sequence[bool]) -> list[bool]:
    """Which inputs of a scan depend on no array argument in any iteration, as a counter of iterations does.

    Args:
      op: the scan.
      fixed: whether each input is so in the first iteration.
    """
    assert op.inner and op.call and op.call.scan
    first, carried, _ = op.call.scan

    def visit(_: int, inner: Op, states: list[bool]) -> list[bool]:
        alone = all(inner.literals) and inner.name == "broadcast_in_dim"
        return [all(states) and not alone] * len(inner.outputs)

    fixed = list(fixed)
    while True:
        leaving = op.inner.run(fixed, lambda _: False, lambda _: True, visit)
        still = [
            constant and (not first <= k < first + carried or leaving[k - first]) for k, constant in enumerate(fixed)
        ]
        if still == fixed:
            return fixed
        fixed = still
