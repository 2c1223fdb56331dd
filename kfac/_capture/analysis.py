"""Walks the jaxpr of a loss function and finds the operations that read parameters.

What it knows of each variable on the way, and what it records of a read, is in `reads.py`.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import jax.numpy as jnp
from jax.extend import core as jex

from kfac._capture import axes as axes_lib
from kfac._capture import operands
from kfac._capture.axes import Atom, Axes
from kfac._capture.following import PARTS, cut, fixed_in_scan, follow, is_fixed, keeps_values, spread
from kfac._capture.reads import (
    NOT_WITH_EXAMPLES,
    Data,
    Derived,
    Output,
    Read,
    State,
    View,
    is_active,
    is_repeated,
    leaves_of,
    unsupported,
)
from kfac._capture.trace import CALLS, REMATS, Path, Trace, contains_product, inner_jaxpr, open_jaxpr, subjaxprs

_LOOKUPS = frozenset({"gather"})
# Their parameters hold the jaxpr of how two elements combine, which is no construct that swallows a parameter.
_COMBINING = ("scatter", "reduce")
_KERNEL_OPS = frozenset({"dense", "conv"})


class Analysis:
    """The reads of a traced loss.

    Attributes:
      reads: every read, in program order.
      coarse: leaves that meet data in a way without known per-example gradients, and how.
      multipliers: equations that produce a scaled view, and the operand that is the view.
      carriers: equations out of which a scaled view is handed.
    """

    def __init__(self, trace: Trace, names: Sequence[str], shapes: Sequence[tuple[int, ...]], skipped: set[int]):
        self.names = names
        self.shapes = shapes
        self.reads: list[Read] = []
        self.coarse: dict[int, str] = {}
        self.derived: dict[int, str] = {}
        self.products: dict[int, str] = {}
        self.multipliers: dict[Path, int] = {}
        self.carriers: set[Path] = set()
        # A loss without array arguments has its examples in constants.
        self._constants = Data(fixed=bool(trace.arrays))
        states: list[State] = [
            Data(active=True, skipped=True, fixed=True)
            if k in skipped
            else View(k, axes_lib.leaf_axes(shape), (0,) * len(shape))
            for k, shape in enumerate(shapes)
        ]
        jaxpr = trace.closed.jaxpr
        states += [Data()] * (len(jaxpr.invars) - len(states))
        # The other outputs are auxiliary: they carry no gradient, so they do not count as branches of a layer's output.
        self._walk(jaxpr, states, (), (), jaxpr.outvars[:1])

    # -- walking -------------------------------------------------------------------------------------------------

    def _walk(self, jaxpr, states: Sequence[State], path: Path, scans: tuple[int, ...], outvars=None) -> list[State]:
        outvars = jaxpr.outvars if outvars is None else outvars
        env: dict[Any, State] = dict.fromkeys(jaxpr.constvars, self._constants)
        env.update(zip(jaxpr.invars, states, strict=True))
        uses = collections.Counter(var for eqn in jaxpr.eqns for var in eqn.invars if not isinstance(var, jex.Literal))
        uses.update(var for var in outvars if not isinstance(var, jex.Literal))

        def read(var) -> State:
            if isinstance(var, jex.Literal):
                return Data()
            state = env[var]
            if isinstance(state, Data) and state.output and uses[var] > 1:
                # A gradient with respect to one branch alone is not that of the layer's output.
                return dataclasses.replace(state, output=None)
            return state

        for index, eqn in enumerate(jaxpr.eqns):
            results = self._equation(eqn, [read(var) for var in eqn.invars], (*path, index), scans)
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(var) for var in jaxpr.outvars]

    def _equation(self, eqn, states: list[State], path: Path, scans: tuple[int, ...]) -> list[State]:
        name = eqn.primitive.name
        params = [s for s in states if not isinstance(s, Data)]
        if not params and not any(isinstance(s, Data) and (s.output or s.made_of) for s in states):
            skipped = len(states) == 1 and keeps_values(eqn) and isinstance(states[0], Data) and states[0].skipped
            return [Data(any(is_active(s) for s in states), skipped=skipped, fixed=is_fixed(eqn, states))] * len(
                eqn.outvars
            )
        if name == "optimization_barrier":
            return [self._at_barrier(s) for s in states]
        if name in CALLS or name in REMATS or name == "scan":
            if name == "scan":
                leaving = self._scan(eqn, states, path, scans)
            else:
                leaving = self._walk(inner_jaxpr(eqn)[0], states, path, scans)
            if any(isinstance(s, View) and s.scaled for s in leaving):
                self.carriers.add(path)
            return leaving
        if any(True for _ in subjaxprs(eqn)) and params and not name.startswith(_COMBINING):
            return self._opaque(eqn, states)
        if name == "dot_general":
            return [self._dot(eqn, states, path, scans)]
        if name == "conv_general_dilated":
            return [self._conv(eqn, states, path, scans)]
        if not params:
            return [self._through_data(eqn, states)] * len(eqn.outvars)
        if name == "stop_gradient":
            return [Data(fixed=True)]
        if len(params) == 1 and isinstance(params[0], View) and name in PARTS:
            return self._parts(eqn, params[0], path)
        if len(params) == 1 and isinstance(params[0], View) and len(eqn.outvars) == 1:
            operand = next(k for k, s in enumerate(states) if s is params[0])
            state = self._view(eqn, params[0], operand, states, path, scans)
            if state is not None:
                return [state]
        return [self._derive(eqn, states)] * len(eqn.outvars)

    def _at_barrier(self, state: State) -> State:
        # A scaled view would need its multiplier carried across; no model is written that way.
        if isinstance(state, View) and state.scaled:
            return Derived(frozenset({state.leaf}), "a product, then optimization_barrier", mixed=state.mixed)
        return state

    def _through_data(self, eqn, states: list[State]) -> State:
        """Activations only: keep what is known of a layer's output while its axes can be followed."""
        active, fixed = any(is_active(s) for s in states), is_fixed(eqn, states)
        known = [k for k, s in enumerate(states) if isinstance(s, Data) and (s.output or s.made_of)]
        if len(known) != 1 or len(eqn.outvars) != 1:
            return Data(active, fixed=fixed)
        state = states[known[0]]
        assert isinstance(state, Data)
        if len(states) == 1:
            axes = follow(eqn, state.output.axes) if state.output else None
            output = Output(state.output.read, axes) if state.output and axes is not None else None
            return Data(active, output, state.made_of if keeps_values(eqn) else frozenset(), fixed=fixed)
        scales = eqn.primitive.name == "mul" or (eqn.primitive.name == "div" and known[0] == 0)
        if scales and state.output and self.reads[state.output.read].op == "mul":
            # x * (rsqrt(var) * scale) + shift: the product with x stands between a scale and its shift. To put both in
            # one block needs no more than that they act on the same channels.
            axes = spread(state.output.axes, eqn.invars[known[0]].aval.shape, eqn.outvars[0].aval.shape)
            return Data(active, Output(state.output.read, axes), fixed=fixed)
        return Data(active, fixed=fixed)

    def _scan(self, eqn, states: list[State], path: Path, scans: tuple[int, ...]) -> list[State]:
        body, _ = open_jaxpr(eqn.params["jaxpr"])
        num_consts, num_carry = eqn.params["num_consts"], eqn.params["num_carry"]
        given = zip(eqn.invars, states, strict=True)
        fixed = [isinstance(var, jex.Literal) or (isinstance(s, Data) and s.fixed) for var, s in given]
        fixed = fixed_in_scan(body, fixed, num_consts, num_carry)
        entering: list[State] = []
        for k, state in enumerate(states):
            carried = num_consts <= k < num_consts + num_carry
            if isinstance(state, Data):
                if carried:
                    state = Data(active=True, fixed=fixed[k])
                state = dataclasses.replace(state, output=None)
            elif carried and is_repeated(state):
                # A learned initial state, broadcast over the examples.
                self._met_data(state, "broadcast, then scan")
                state = Data(active=True)
            elif carried and body.outvars[k - num_consts] is not body.invars[k]:
                self._refuse(state, eqn, "a scan changes it from iteration to iteration")
            elif isinstance(state, View):
                iterated = k >= num_consts + num_carry
                atoms = state.axes[0] if iterated else ()
                if iterated and axes_lib.is_broadcast((atoms,)):
                    self._refuse(state, eqn, "a scan iterates over copies of it")
                axes = state.axes[1:] if iterated else state.axes
                state = dataclasses.replace(state, axes=axes, stack=(*state.stack, atoms))
            entering.append(state)
        leaving = self._walk(body, entering, path, (*scans, eqn.params["length"]))
        results: list[State] = []
        for k, state in enumerate(leaving):
            if isinstance(state, Data):
                results.append(Data(active=True, fixed=state.fixed))
            elif k < num_carry and not isinstance(entering[num_consts + k], Data):
                results.append(states[num_consts + k])
            elif k < num_carry and is_repeated(state):
                self._met_data(state, "scan")
                results.append(Data(active=True))
            elif k < num_carry and math.prod(eqn.outvars[k].aval.shape) > 1:
                # From the second iteration on, what the walk took for data is made of parameters.
                self._refuse(state, eqn, "an iteration hands it to the next")
            else:
                leaves = frozenset({state.leaf}) if isinstance(state, View) else state.leaves
                results.append(Derived(leaves, "scan"))
        return results

    # -- reads ---------------------------------------------------------------------------------------------------

    def _add(self, read: Read) -> Data:
        self.reads.append(read)
        return Data(active=True, output=Output(len(self.reads) - 1, read.y_axes))

    def _picks(self, view: View) -> tuple[tuple[Atom, int], ...] | None:
        """Which part of its leaf a view is (`axes.picks`)."""
        return axes_lib.picks(self.shapes[view.leaf], view.start, axes_lib.atoms_of((*view.stack, *view.axes)))

    def _kernel(self, eqn, op: str, view: View, operand: int, found: operands.Operands, path: Path, scans) -> Read:
        picks = self._picks(view)
        if picks is None:
            self._refuse(view, eqn, "it reads a slice that is not one of several equal parts of the parameter")
        return Read(
            path, op, view.leaf, view, operand, found.x_axes, found.y_axes, found.leading,
            tuple(eqn.outvars[0].aval.shape), found.batched, scans=scans, picks=picks,
        )  # fmt: skip

    def _dot(self, eqn, states: list[State], path: Path, scans) -> State:
        operand = self._product_operand(eqn, states)
        if operand is None:
            return self._product_of_others(eqn, states)
        view = states[operand]
        assert isinstance(view, View)
        found = operands.product(eqn, view.axes, operand)
        if found is None:
            # Broadcast over examples and then multiplied: an activation (a learned initial state).
            self._met_data(view, f"broadcast, then {eqn.primitive.name}")
            return Data(active=True)
        return self._add(self._kernel(eqn, "dense", view, operand, found, path, scans))

    def _conv(self, eqn, states: list[State], path: Path, scans) -> State:
        operand = self._product_operand(eqn, states)
        if operand is None:
            return self._product_of_others(eqn, states)
        view = states[operand]
        assert isinstance(view, View)
        if operand == 0:
            self._refuse(view, eqn, "it is the image of a convolution, not its kernel")
        if axes_lib.is_broadcast(view.axes):
            self._refuse(view, eqn, "a broadcast kernel")
        if eqn.params["batch_group_count"] != 1:
            self._refuse(view, eqn, f"batch_group_count={eqn.params['batch_group_count']} is not supported")
        found = operands.convolution(eqn, view.axes)
        if found is None:
            count = eqn.params["feature_group_count"]
            self._refuse(view, eqn, f"feature_group_count={count} cuts across axes of the parameter")
        return self._add(self._kernel(eqn, "conv", view, operand, found, path, scans))

    def _product_operand(self, eqn, states: list[State]) -> int | None:
        """Which operand of a product is the kernel; None if neither is."""
        views = [k for k, s in enumerate(states) if isinstance(s, View)]
        kernels = [k for k in views if not axes_lib.is_broadcast(states[k].axes)] or views  # type: ignore[union-attr]
        for k in kernels:
            other = states[1 - k]
            if isinstance(other, Derived) and other.repeated:
                self._met_data(other, f"broadcast, then {eqn.primitive.name}")
            elif isinstance(other, View) and axes_lib.is_broadcast(other.axes):
                self._met_data(other, f"broadcast, then {eqn.primitive.name}")
            elif not isinstance(other, Data) or other.fixed:
                continue
            view = states[k]
            assert isinstance(view, View)
            if not view.uniform:
                self._refuse(view, eqn, "its values are multiplied by others before the product")
            return k
        return None

    def _product_of_others(self, eqn, states: list[State]) -> State:
        if all(isinstance(s, Data) for s in states):
            for state, other in zip(states, reversed(states), strict=True):
                if isinstance(state, Data) and state.made_of and not (isinstance(other, Data) and other.skipped):
                    self._refuse(state, eqn, "the product reads rows looked up in it, or what became of it")
            return Data(any(is_active(s) for s in states))
        if any(isinstance(s, Data) and not s.fixed for s in states):
            state = next(s for s in states if not isinstance(s, Data))
            if not isinstance(state, Derived) or not state.repeated:
                reason = "its other operand holds no examples"
                if isinstance(state, Derived):
                    reason = f"the kernel is a different array, computed from it by {state.how}"
                self._refuse(state, eqn, reason)
            self._met_data(state, f"{state.how}, then {eqn.primitive.name}")
            return Data(active=True)
        for state, other in zip(states, reversed(states), strict=True):
            if isinstance(other, (View, Derived)) and other.mixed:
                reason = "with a single example, an activation cannot be told from a parameter; take at least two"
                self._refuse(state, eqn, reason)
        derived = self._derive(eqn, states)
        assert isinstance(derived, Derived)
        shapes = ", ".join(str(list(var.aval.shape)) for var in eqn.invars)
        product = f"{eqn.primitive.name}({shapes})"
        self.products.update(dict.fromkeys(derived.leaves, product))
        return dataclasses.replace(derived, product=product)

    def _parts(self, eqn, view: View, path: Path) -> list[State]:
        """Slices of a view at places that do not depend on data."""
        found = [cut(eqn, view, k) for k in range(len(eqn.outvars))]
        if not all(found):
            return [self._derive(eqn, [view])] * len(eqn.outvars)
        if view.scaled:
            self.multipliers[path] = 0
        return [dataclasses.replace(view, axes=part[0], start=part[1]) for part in found if part]

    def _view(self, eqn, view: View, operand: int, states: list[State], path: Path, scans) -> State | None:
        """What becomes of a single parameter view; None if it can no longer be followed."""
        name = eqn.primitive.name
        out = eqn.outvars[0].aval
        if len(states) == 1:
            if name == "neg":
                self.multipliers[path] = operand
                return dataclasses.replace(view, scaled=True)
            if name == "convert_element_type" and not jnp.issubdtype(out.dtype, jnp.floating):
                return None
            axes = follow(eqn, view.axes)
            if axes is None:
                return None
            if view.scaled:
                self.multipliers[path] = operand
            return dataclasses.replace(view, axes=axes)
        if name in _LOOKUPS and operand == 0:
            return self._lookup(eqn, view, states, path, scans)
        if len(states) != 2 or name not in ("add", "add_any", "sub", "mul", "div"):
            return None
        other_var, other = eqn.invars[1 - operand], states[1 - operand]
        assert isinstance(other, Data)
        y_axes = spread(view.axes, eqn.invars[operand].aval.shape, out.shape)
        repeated = axes_lib.is_broadcast(y_axes)
        additive = name in ("add", "add_any", "sub")
        if additive and isinstance(other_var, jex.Literal) and (operand == 0 or name != "sub") and not view.scaled:
            return view  # a constant offset, as in (1 + scale): the gradient is the same
        if name == "div" and operand == 1:
            return None
        if other.fixed and (additive or repeated):
            return None  # not yet an activation
        if not additive and not repeated:
            self.multipliers[path] = operand
            # A number made of parameters may depend on this one: its kernel is normalised.
            number = math.prod(other_var.aval.shape) == 1 and not other.active
            return dataclasses.replace(
                view,
                scaled=True,
                uniform=view.uniform and number,
                mixed=view.mixed or math.prod(other_var.aval.shape) > 1,
            )
        if not repeated and not other.active:
            return None
        leading = next((a.size for axis in y_axes for a in axis if not a.of_leaf), None)
        joined = None
        # From `b - y` a kernel would get gradients of the other sign than its bias.
        opposite = name == "sub" and operand == 0
        if additive and other.output and not view.scaled and not (opposite and self._is_kernel(other.output)):
            joined = self._join(view, y_axes, other.output)
        result = self._add(
            Read(
                path, "add" if additive else "mul", view.leaf, view, operand, y_axes, y_axes, leading,
                tuple(out.shape), sign=-1 if name == "sub" and operand == 1 else 1, joined=joined, scans=scans,
                picks=self._picks(view),
            )
        )  # fmt: skip
        # An update of the size of the parameter, as in a model that takes gradient steps of its own.
        return result if repeated or joined else dataclasses.replace(result, made_of=frozenset({view.leaf}))

    def _lookup(self, eqn, view: View, states: list[State], path: Path, scans) -> Data:
        """Rows of a table. Each is known to meet data once for each index, unless the indices hold no examples."""
        found, indices = operands.lookup(eqn, view.axes), states[1]
        kernels = sum(math.prod(a.size for a in axis) > 1 for axis in view.axes) > 2
        assert isinstance(indices, Data)
        if found is None or not view.uniform or indices.fixed or self._picks(view) is None:
            self._met_data(view, eqn.primitive.name)
            return Data(active=True, made_of=frozenset({view.leaf}), fixed=is_fixed(eqn, states))
        self.reads.append(self._kernel(eqn, "embedding", view, 0, found, path, scans))
        # Rows with more than one axis may be kernels, chosen by the example; a product that reads those is refused.
        return Data(active=True, made_of=frozenset({view.leaf} if kernels else ()))

    def _is_kernel(self, output: Output) -> bool:
        return self.reads[output.read].op in _KERNEL_OPS

    def _join(self, view: View, y_axes: Axes, output: Output) -> tuple[int, tuple[tuple[Atom, Atom], ...]] | None:
        """Pairs a vector with the features of the output it is added to; None unless it has one element for each."""
        read = self.reads[output.read]
        picks = self._picks(view)
        if len(view.stack) != len(read.view.stack) or picks is None or read.picks is None:
            return None
        if [(atom.size, index) for atom, index in picks] != [(atom.size, index) for atom, index in read.picks]:
            return None
        outputs = axes_lib.atoms_of((*read.view.stack, *read.y_axes))
        found = [axes_lib.split_like(axis, outputs) for axis in output.axes]
        pairs = [(mine, theirs) for (mine, _), (theirs, _) in zip(picks, read.picks, strict=True)]
        for mine, theirs in zip((*view.stack, *y_axes), (*read.view.stack, *found), strict=True):
            refined = None if theirs is None else axes_lib.common_refinement(mine, theirs)
            if refined is None or any(a.of_leaf != b.of_leaf for a, b in refined):
                return None
            pairs += [(a, b) for a, b in refined if a.of_leaf]
        pairs.sort(key=lambda pair: pair[0].memory_order)
        # A kernel and its bias are brought to [copies, features] each by its own layout, so only the order among copies
        # and that among features must agree. A scale and its shift are used as they lie in memory.
        stack = {*read.copies} if read.op in _KERNEL_OPS else set()
        for stacked in (True, False):
            order = [b.memory_order for _, b in pairs if _within_any(b, stack) == stacked]
            if order != sorted(order):
                return None
        return output.read, tuple(pairs)

    # -- everything else -----------------------------------------------------------------------------------------

    def _met_data(self, state: State, how: str) -> None:
        if isinstance(state, Derived) and state.product:
            raise unsupported([self.names[leaf] for leaf in sorted(state.leaves)], state.product, NOT_WITH_EXAMPLES)
        for leaf in leaves_of(state):
            self.coarse.setdefault(leaf, how)

    def _derive(self, eqn, states: list[State]) -> State:
        """Parameters in an operation whose per-example gradients are not known."""
        name = eqn.primitive.name
        sources = [s for s in states if not isinstance(s, Data)]
        operands = list(zip(eqn.invars, states, strict=True))
        data = [s for v, s in operands if isinstance(s, Data) and not s.fixed and not isinstance(v, jex.Literal)]
        repeated = [is_repeated(s) for s in sources]
        size = max((math.prod(var.aval.shape) for var in eqn.outvars), default=0)
        grew = any(
            math.prod(var.aval.shape) < size
            for var, s in zip(eqn.invars, states, strict=True)
            if not isinstance(s, Data)
        )
        leaves = frozenset().union(*(leaves_of(s) for s in sources))
        how = next((s.how for s in sources if isinstance(s, Derived)), name)
        for leaf in leaves:
            self.derived.setdefault(leaf, how)
        product = next((s.product for s in sources if isinstance(s, Derived) and s.product), "")
        total = eqn.outvars[0].aval if eqn.outvars else None
        scalars = all(isinstance(s, Data) or math.prod(v.aval.shape) == 1 for v, s in operands)
        if data and scalars and name in ("add", "add_any", "sub") and total is not None and 0 < total.ndim < 2:
            return Data(active=True)  # a penalty, added to the losses of the examples
        if name in _LOOKUPS and data:
            for state in sources:
                self._met_data(state, how)
            return Data(active=True, made_of=leaves)
        # A scalar made of parameters and added to the loss is a penalty; one that multiplies it is none.
        mixed = any(is_active(s) for s in data) and (size > 1 or name not in ("add", "add_any", "sub"))
        if data and (any(repeated) or grew or mixed):
            for state in sources:
                self._met_data(state, how)
            return Data(active=True, made_of=frozenset() if any(repeated) or grew else leaves)
        met = any(isinstance(s, Data) and not s.fixed and math.prod(v.aval.shape) > 1 for v, s in operands)
        return Derived(
            leaves,
            how,
            repeated=all(repeated) or (name == "broadcast_in_dim" and grew),
            mixed=met or any(isinstance(s, (View, Derived)) and s.mixed for s in sources),
            product=product,
        )

    def _opaque(self, eqn, states: list[State]) -> list[State]:
        name = eqn.primitive.name
        if name == "custom_jvp_call" and not contains_product(eqn):
            return [self._derive(eqn, states)] * len(eqn.outvars)
        state = next(s for s in states if not isinstance(s, Data))
        self._refuse(state, eqn, f"what {name} does with it cannot be followed")

    def _refuse(self, state: State, eqn, reason: str) -> NoReturn:
        leaves = sorted(state.made_of if isinstance(state, Data) else leaves_of(state))
        shapes = ", ".join(str(list(getattr(var.aval, "shape", ()))) for var in eqn.invars)
        raise unsupported([self.names[leaf] for leaf in leaves], f"{eqn.primitive.name}({shapes})", reason)


def _within_any(part: Atom, atoms: Iterable[Atom]) -> bool:
    return any(axes_lib.is_part(part, atom) for atom in atoms)
