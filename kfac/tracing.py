"""Finds the operations that read parameters, in the jaxpr of a loss function.

The modules that know about jaxprs are this one, `replay.py`, `likelihood.py` and `convolutions.py`. The walk gives
every variable one of these states:

- `Data`: depends on the arguments. `active` once a parameter took part, `output` while it is still the unbranched
  result of a read, which is what a bias or shift is joined to.
- `View`: one parameter leaf seen through casts, reshapes, transposes and scans, axis by axis (`axes.py`). `scaled`
  after an elementwise product with something that has no example axis, as in `(x - mean) * (rsqrt(var) * scale)`.
- `Derived`: computed from parameters in any other way. Harmless as long as no product reads it: a weight penalty.
- a parameter that the user skipped counts as `Data`.

A `Read` is an equation where a parameter meets data in a way whose per-example gradient is known: a matrix product,
a convolution, or an elementwise sum or product that repeats the parameter over examples.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
from jax.extend import core as jex

from kfac import axes as axes_lib
from kfac import operands
from kfac.axes import Atom, Axes
from kfac.layers import UnsupportedLayerError

Path = tuple[int, ...]  # equation indices, from the outermost jaxpr inwards

CALLS = frozenset({"jit", "pjit", "closed_call", "core_call", "core_closed_call"})
REMATS = frozenset({"checkpoint", "remat", "remat2"})
_IDENTITIES = frozenset(
    {"convert_element_type", "copy", "copy_p", "name", "reduce_precision", "sharding_constraint", "pvary", "pcast"}
    | {"reshard", "mesh_cast"}
)
_PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})
_LOOKUPS = frozenset({"gather"})
_PARTS = frozenset({"slice", "split", "unstack"})
# Their parameters hold the jaxpr of how two elements combine, which is no construct that swallows a parameter.
_COMBINING = ("scatter", "reduce")
_KERNEL_OPS = frozenset({"dense", "conv"})


@dataclasses.dataclass(frozen=True)
class Output:
    """The result of read number `read`; axes that are not the parameter's are foreign."""

    read: int
    axes: Axes


@dataclasses.dataclass(frozen=True)
class Data:
    active: bool = False
    output: Output | None = None
    made_of: frozenset[int] = frozenset()  # leaves that it still consists of: looked-up rows, updated weights
    skipped: bool = False  # a parameter that the user skipped
    fixed: bool = False  # does not depend on the array arguments of the loss, so it holds no examples


@dataclasses.dataclass(frozen=True)
class View:
    leaf: int
    axes: Axes
    start: tuple[int, ...]  # the first entry of each leaf axis that it holds: not zeros where it is a slice
    stack: tuple[axes_lib.Axis, ...] = ()  # for each enclosing scan, the atoms it iterates over (none: read each time)
    scaled: bool = False
    uniform: bool = True  # scaled, if at all, by numbers only
    mixed: bool = False  # scaled by an array of data, so that it might be an activation of a single example


@dataclasses.dataclass(frozen=True)
class Derived:
    leaves: frozenset[int]
    how: str
    repeated: bool = False  # broadcast over examples or positions: an activation rather than a parameter
    mixed: bool = False
    product: str = ""  # the matrix product or convolution on the way: what it becomes must not meet data


State = Data | View | Derived


@dataclasses.dataclass(frozen=True)
class Read:
    """One equation that reads a parameter leaf.

    Attributes:
      path: which equation.
      op: `"dense"`, `"conv"`, `"embedding"`, `"mul"` or `"add"`.
      operand: which operand of the equation the parameter is.
      x_axes: axes of the other operand in terms of the leaf (dense), of its patches (conv) or of the counts of rows
        (embedding).
      y_axes: axes of the result.
      leading: length of the first axis that is not the parameter's; None without one.
      shape: shape of the result.
      batched: leaf atoms that are a batch axis of the product: independent copies.
      sign: -1 where the parameter is subtracted.
      joined: the read whose result this one (a bias or shift) is added to, with the atoms of both leaves in pairs.
      scans: lengths of the enclosing scans.
      picks: where a product reads one of several equal parts of the leaf, which (`axes.picks`).
    """

    path: Path
    op: str
    leaf: int
    view: View
    operand: int
    x_axes: Axes
    y_axes: Axes
    leading: int | None
    shape: tuple[int, ...]
    batched: tuple[Atom, ...] = ()
    sign: int = 1
    joined: tuple[int, tuple[tuple[Atom, Atom], ...]] | None = None
    scans: tuple[int, ...] = ()
    picks: tuple[tuple[Atom, int], ...] | None = ()

    @property
    def picked(self) -> tuple[Atom, ...]:
        return tuple(atom for atom, _ in self.picks or ())

    @property
    def copies(self) -> tuple[Atom, ...]:
        """Atoms of the leaf that hold independent copies of a kernel."""
        return (*self.picked, *self.scanned, *self.batched)

    @property
    def scanned(self) -> tuple[Atom, ...]:
        return tuple(atom for axis in self.view.stack for atom in axis)

    @property
    def uses(self) -> int:
        """How often the parameter is read: once in each iteration that shares it."""
        return math.prod(length for length, atoms in zip(self.scans, self.view.stack, strict=True) if not atoms)

    @property
    def rows(self) -> int:
        """Rows this read contributes: positions of all examples, over all iterations that share the parameter."""
        return self.uses * math.prod(atom.size for axis in self.y_axes for atom in axis if not atom.of_leaf)


class Trace(NamedTuple):
    """The jaxpr of a loss and how to call it with flat arguments."""

    closed: jex.ClosedJaxpr
    arrays: list[Any]  # the dynamic leaves of the arguments, after the parameters
    rebuild: Callable[[Sequence[Any]], Any]  # flat outputs -> (loss, aux)


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def trace(loss_fn: Callable, has_aux: bool, params: Any, args: tuple, kwargs: dict) -> Trace:
    """Traces `loss_fn(params, *args, **kwargs)`; arguments that are not arrays stay what they are."""
    leaves, treedef = jax.tree.flatten((args, kwargs))
    dynamic = [k for k, leaf in enumerate(leaves) if _is_array(leaf)]
    arrays = [leaves[k] for k in dynamic]
    flat_params, params_tree = jax.tree.flatten(params)
    for leaf in flat_params:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise TypeError(f"kfac differentiates real parameters only, but a parameter leaf has dtype {leaf.dtype}")
    static_aux: dict[int, Any] = {}
    aux_tree: list[Any] = []

    def flat_loss(flat_params, arrays):
        filled = list(leaves)
        for k, array in zip(dynamic, arrays, strict=True):
            filled[k] = array
        call_args, call_kwargs = jax.tree.unflatten(treedef, filled)
        out = loss_fn(jax.tree.unflatten(params_tree, flat_params), *call_args, **call_kwargs)
        if has_aux and not (isinstance(out, tuple) and len(out) == 2):
            raise TypeError(f"with has_aux=True loss_fn must return (loss, aux), but returned {type(out).__name__}")
        loss, aux = out if has_aux else (out, None)
        if not _is_array(loss) or jnp.shape(loss) != () or not jnp.issubdtype(loss.dtype, jnp.floating):
            what = f"shape {jnp.shape(loss)}, dtype {loss.dtype}" if _is_array(loss) else type(loss).__name__
            hint = "" if has_aux else "; for a pair (loss, aux) pass has_aux=True"
            raise TypeError(f"loss_fn must return a real scalar, the mean loss, but returned {what}{hint}")
        aux_leaves, tree = jax.tree.flatten(aux)
        aux_tree.append(tree)
        static_aux.update({k: leaf for k, leaf in enumerate(aux_leaves) if not _is_array(leaf)})
        return [loss, *(leaf for leaf in aux_leaves if _is_array(leaf))]

    closed = jax.make_jaxpr(flat_loss)(flat_params, arrays)

    def rebuild(outs):
        loss, *dynamic_aux = outs
        tree = aux_tree[-1]
        queue = iter(dynamic_aux)
        aux = [static_aux[k] if k in static_aux else next(queue) for k in range(tree.num_leaves)]
        return loss, jax.tree.unflatten(tree, aux)

    return Trace(closed, arrays, rebuild)


def subjaxprs(eqn: Any) -> Iterator[jex.Jaxpr]:
    """The jaxprs among the parameters of an equation."""
    for value in eqn.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, jex.ClosedJaxpr):
                yield item.jaxpr
            elif isinstance(item, jex.Jaxpr):
                yield item


def open_jaxpr(jaxpr: Any) -> tuple[jex.Jaxpr, Sequence[Any]]:
    return (jaxpr.jaxpr, jaxpr.consts) if isinstance(jaxpr, jex.ClosedJaxpr) else (jaxpr, ())


def inner_jaxpr(eqn: Any) -> tuple[jex.Jaxpr, Sequence[Any]]:
    """The jaxpr that a call, a remat or a scan evaluates, and its constants."""
    return open_jaxpr(eqn.params["jaxpr" if "jaxpr" in eqn.params else "call_jaxpr"])


def _contains_product(eqn: Any) -> bool:
    return eqn.primitive.name in _PRODUCTS or any(
        _contains_product(inner) for jaxpr in subjaxprs(eqn) for inner in jaxpr.eqns
    )


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
            skipped = len(states) == 1 and _keeps_values(eqn) and isinstance(states[0], Data) and states[0].skipped
            return [Data(any(_active(s) for s in states), skipped=skipped, fixed=_fixed(eqn, states))] * len(
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
        if len(params) == 1 and isinstance(params[0], View) and name in _PARTS:
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
        active, fixed = any(_active(s) for s in states), _fixed(eqn, states)
        known = [k for k, s in enumerate(states) if isinstance(s, Data) and (s.output or s.made_of)]
        if len(known) != 1 or len(eqn.outvars) != 1:
            return Data(active, fixed=fixed)
        state = states[known[0]]
        assert isinstance(state, Data)
        if len(states) == 1:
            axes = _follow(eqn, state.output.axes) if state.output else None
            output = Output(state.output.read, axes) if state.output and axes is not None else None
            return Data(active, output, state.made_of if _keeps_values(eqn) else frozenset(), fixed=fixed)
        scales = eqn.primitive.name == "mul" or (eqn.primitive.name == "div" and known[0] == 0)
        if scales and state.output and self.reads[state.output.read].op == "mul":
            # x * (rsqrt(var) * scale) + shift: the product with x stands between a scale and its shift. To put both in
            # one block needs no more than that they act on the same channels.
            axes = _spread(state.output.axes, eqn.invars[known[0]].aval.shape, eqn.outvars[0].aval.shape)
            return Data(active, Output(state.output.read, axes), fixed=fixed)
        return Data(active, fixed=fixed)

    def _scan(self, eqn, states: list[State], path: Path, scans: tuple[int, ...]) -> list[State]:
        body, _ = open_jaxpr(eqn.params["jaxpr"])
        num_consts, num_carry = eqn.params["num_consts"], eqn.params["num_carry"]
        given = zip(eqn.invars, states, strict=True)
        fixed = [isinstance(var, jex.Literal) or (isinstance(s, Data) and s.fixed) for var, s in given]
        fixed = _fixed_in_scan(body, fixed, num_consts, num_carry)
        entering: list[State] = []
        for k, state in enumerate(states):
            carried = num_consts <= k < num_consts + num_carry
            if isinstance(state, Data):
                if carried:
                    state = Data(active=True, fixed=fixed[k])
                state = dataclasses.replace(state, output=None)
            elif carried and _is_repeated(state):
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
            elif k < num_carry and _is_repeated(state):
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

    def _dot(self, eqn, states: list[State], path: Path, scans) -> State:
        (contract, batch) = eqn.params["dimension_numbers"]
        operand = self._product_operand(eqn, states)
        if operand is None:
            return self._product_of_others(eqn, states)
        view, x = states[operand], eqn.invars[1 - operand].aval
        assert isinstance(view, View)
        w_contract, x_contract = contract[operand], contract[1 - operand]
        w_batch, x_batch = batch[operand], batch[1 - operand]
        w_free = [k for k in range(len(view.axes)) if k not in w_contract and k not in w_batch]
        x_free = [k for k in range(x.ndim) if k not in x_contract and k not in x_batch]
        if axes_lib.is_broadcast(tuple(view.axes[k] for k in (*w_contract, *w_free))):
            # Broadcast over examples and then multiplied: an activation (a learned initial state).
            self._met_data(view, f"broadcast, then {eqn.primitive.name}")
            return Data(active=True)
        x_axes: list[axes_lib.Axis] = [()] * x.ndim
        for k, w_axis in [*zip(x_contract, w_contract, strict=True), *zip(x_batch, w_batch, strict=True)]:
            x_axes[k] = view.axes[w_axis]
        for k in x_free:
            x_axes[k] = axes_lib.foreign(x.shape[k])
        free_w, free_x = [view.axes[k] for k in w_free], [x_axes[k] for k in x_free]
        y_axes = (*(view.axes[k] for k in w_batch), *(free_w + free_x if operand == 0 else free_x + free_w))
        examples = sorted([*x_free, *(k for k in x_batch if axes_lib.is_broadcast((x_axes[k],)))])
        return self._add(
            Read(
                path, "dense", view.leaf, view, operand, tuple(x_axes), y_axes,
                x.shape[examples[0]] if examples else None, tuple(eqn.outvars[0].aval.shape),
                batched=tuple(axes_lib.atoms_of(view.axes[k] for k in w_batch)), scans=scans,
                picks=self._picks(view, eqn),
            )
        )  # fmt: skip

    def _picks(self, view: View, eqn) -> tuple[tuple[Atom, int], ...]:
        """Which part of its leaf a kernel is."""
        atoms = axes_lib.atoms_of((*view.stack, *view.axes))
        picks = axes_lib.picks(self.shapes[view.leaf], view.start, atoms)
        if picks is None:
            self._refuse(view, eqn, "it reads a slice that is not one of several equal parts of the parameter")
        return picks

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
        return self._add(
            Read(
                path, "conv", view.leaf, view, operand, found.x_axes, found.y_axes, found.leading,
                tuple(eqn.outvars[0].aval.shape), found.batched, scans=scans, picks=self._picks(view, eqn),
            )
        )  # fmt: skip

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
            return Data(any(_active(s) for s in states))
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
        found = [_cut(eqn, view, k) for k in range(len(eqn.outvars))]
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
            axes = _follow(eqn, view.axes)
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
        y_axes = _spread(view.axes, eqn.invars[operand].aval.shape, out.shape)
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
        atoms = axes_lib.atoms_of((*view.stack, *view.axes))
        result = self._add(
            Read(
                path, "add" if additive else "mul", view.leaf, view, operand, y_axes, y_axes, leading,
                tuple(out.shape), sign=-1 if name == "sub" and operand == 1 else 1, joined=joined, scans=scans,
                picks=axes_lib.picks(self.shapes[view.leaf], view.start, atoms),
            )
        )  # fmt: skip
        # An update of the size of the parameter, as in a model that takes gradient steps of its own.
        return result if repeated or joined else dataclasses.replace(result, made_of=frozenset({view.leaf}))

    def _lookup(self, eqn, view: View, states: list[State], path: Path, scans) -> Data:
        """Rows of a table. Each is known to meet data once for each index, unless the indices hold no examples."""
        found, indices = operands.lookup(eqn, view.axes), states[1]
        kernels = sum(math.prod(a.size for a in axis) > 1 for axis in view.axes) > 2
        assert isinstance(indices, Data)
        picks = axes_lib.picks(self.shapes[view.leaf], view.start, axes_lib.atoms_of((*view.stack, *view.axes)))
        if found is None or not view.uniform or indices.fixed or picks is None:
            self._met_data(view, eqn.primitive.name)
            return Data(active=True, made_of=frozenset({view.leaf}), fixed=_fixed(eqn, states))
        self.reads.append(
            Read(
                path, "embedding", view.leaf, view, 0, found.x_axes, found.y_axes, found.leading,
                tuple(eqn.outvars[0].aval.shape), scans=scans, picks=picks,
            )
        )  # fmt: skip
        # Rows with more than one axis may be kernels, chosen by the example; a product that reads those is refused.
        return Data(active=True, made_of=frozenset({view.leaf} if kernels else ()))

    def _is_kernel(self, output: Output) -> bool:
        return self.reads[output.read].op in _KERNEL_OPS

    def _join(self, view: View, y_axes: Axes, output: Output) -> tuple[int, tuple[tuple[Atom, Atom], ...]] | None:
        """Pairs a vector with the features of the output it is added to; None unless it has one element for each."""
        read = self.reads[output.read]
        picks = axes_lib.picks(self.shapes[view.leaf], view.start, axes_lib.atoms_of((*view.stack, *view.axes)))
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
        for leaf in _leaves(state):
            self.coarse.setdefault(leaf, how)

    def _derive(self, eqn, states: list[State]) -> State:
        """Parameters in an operation whose per-example gradients are not known."""
        name = eqn.primitive.name
        sources = [s for s in states if not isinstance(s, Data)]
        operands = list(zip(eqn.invars, states, strict=True))
        data = [s for v, s in operands if isinstance(s, Data) and not s.fixed and not isinstance(v, jex.Literal)]
        repeated = [_is_repeated(s) for s in sources]
        size = max((math.prod(var.aval.shape) for var in eqn.outvars), default=0)
        grew = any(
            math.prod(var.aval.shape) < size
            for var, s in zip(eqn.invars, states, strict=True)
            if not isinstance(s, Data)
        )
        leaves = frozenset().union(*(_leaves(s) for s in sources))
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
        mixed = any(_active(s) for s in data) and (size > 1 or name not in ("add", "add_any", "sub"))
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
        if name == "custom_jvp_call" and not _contains_product(eqn):
            return [self._derive(eqn, states)] * len(eqn.outvars)
        state = next(s for s in states if not isinstance(s, Data))
        self._refuse(state, eqn, f"what {name} does with it cannot be followed")

    def _refuse(self, state: State, eqn, reason: str) -> NoReturn:
        leaves = sorted(state.made_of if isinstance(state, Data) else _leaves(state))
        shapes = ", ".join(str(list(getattr(var.aval, "shape", ()))) for var in eqn.invars)
        raise unsupported([self.names[leaf] for leaf in leaves], f"{eqn.primitive.name}({shapes})", reason)


NOT_WITH_EXAMPLES = (
    "the other operand of the product holds no examples (it is a constant, a skipped parameter or another parameter), "
    "so the result is one more array of parameters. Examples that loss_fn closes over must become arguments of it"
)


def unsupported(parameters: str | Sequence[str], operation: str, reason: str) -> UnsupportedLayerError:
    names = [parameters] if isinstance(parameters, str) else list(parameters)
    patterns = ", ".join(repr(f"^{re.escape(name)}$") for name in names)
    which = f"parameter {names[0]!r} is" if len(names) == 1 else f"parameters {', '.join(map(repr, names))} are"
    return UnsupportedLayerError(
        f"{which} read by {operation} in a way that has no exact Kronecker factors: {reason}. To train without "
        f"preconditioning, pass skip=({patterns},) to find_layers; or change how the model uses it."
    )


def _fixed(eqn, states: Sequence[State]) -> bool:
    """Whether a result depends on no array argument. Zeros may be the initial state of a batch: they do not count."""
    if eqn.primitive.name in CALLS and not states:
        return False
    own = [s for var, s in zip(eqn.invars, states, strict=True) if not isinstance(var, jex.Literal)]
    if not own:
        return eqn.primitive.name != "broadcast_in_dim"
    return all(isinstance(s, Data) and s.fixed for s in own)


def _fixed_in_scan(body: jex.Jaxpr, fixed: Sequence[bool], num_consts: int, num_carry: int) -> list[bool]:
    """Which inputs of a scan's body depend on no array argument in any iteration, as a counter of iterations does.

    Args:
      body: the jaxpr of an iteration.
      fixed: whether each input is so in the first iteration.
      num_consts: how many inputs come before those that are carried on.
      num_carry: how many are.
    """
    fixed = list(fixed)
    while True:
        known = {var for var, is_fixed in zip(body.invars, fixed, strict=True) if is_fixed}
        for eqn in body.eqns:
            own = [var for var in eqn.invars if not isinstance(var, jex.Literal)]
            if all(var in known for var in own) and (own or eqn.primitive.name != "broadcast_in_dim"):
                known.update(eqn.outvars)
        leaving = [isinstance(var, jex.Literal) or var in known for var in body.outvars[:num_carry]]
        still = [
            is_fixed and (not num_consts <= k < num_consts + num_carry or leaving[k - num_consts])
            for k, is_fixed in enumerate(fixed)
        ]
        if still == fixed:
            return fixed
        fixed = still


def _active(state: State) -> bool:
    return state.active if isinstance(state, Data) else True


def _is_repeated(state: State) -> bool:
    return (
        axes_lib.is_broadcast(state.axes) if isinstance(state, View) else isinstance(state, Derived) and state.repeated
    )


def _leaves(state: State) -> frozenset[int]:
    if isinstance(state, View):
        return frozenset({state.leaf})
    return state.leaves if isinstance(state, Derived) else frozenset()


def _within_any(part: Atom, atoms: Iterable[Atom]) -> bool:
    return any(axes_lib.is_part(part, atom) for atom in atoms)


def _spread(axes: Axes, shape: Sequence[int], total: Sequence[int]) -> Axes:
    """Axes of an operand after an elementwise operation has broadcast it from `shape` to `total`."""
    if len(shape) != len(total):  # a scalar, which has no axes of its own
        return tuple(axes_lib.foreign(size) for size in total)
    return tuple(
        axis if own == size else axes_lib.foreign(size) for axis, own, size in zip(axes, shape, total, strict=True)
    )


def _cut(eqn, view: View, k: int) -> tuple[Axes, tuple[int, ...]] | None:
    """Axes and start of result `k` of an equation that takes parts; None if it cannot be followed."""
    name, params, shape = eqn.primitive.name, eqn.params, eqn.invars[0].aval.shape
    first, sizes = [0] * len(shape), list(shape)
    if name == "slice":
        if params["strides"] is not None and any(step != 1 for step in params["strides"]):
            return None
        first, sizes = list(params["start_indices"]), list(eqn.outvars[0].aval.shape)
    elif name == "split":
        axis, lengths = params["axis"], params["sizes"]
        first[axis], sizes[axis] = sum(map(int, lengths[:k])), int(lengths[k])
    else:  # unstack
        axis = params["axis"]
        first[axis], sizes[axis] = k, 1
    start, axes = list(view.start), []
    for axis, begin, size in zip(view.axes, first, sizes, strict=True):
        found = axes_lib.cut(axis, begin, size)
        if found is None:
            return None
        axes.append(found[0])
        for leaf_axis, moved in found[1]:
            start[leaf_axis] += moved
    if name == "unstack":
        del axes[params["axis"]]
    return tuple(axes), tuple(start)


def _keeps_values(eqn) -> bool:
    shape_ops = ("reshape", "squeeze", "expand_dims", "transpose", "broadcast_in_dim")
    return eqn.primitive.name in _IDENTITIES or eqn.primitive.name in shape_ops


def _follow(eqn, axes: Axes) -> Axes | None:
    """Axes after an operation on shape or dtype; None if the operation is another."""
    name = eqn.primitive.name
    out = eqn.outvars[0].aval
    if name in _IDENTITIES:
        return axes
    if name == "transpose":
        return tuple(axes[k] for k in eqn.params["permutation"])
    if name == "broadcast_in_dim":
        return axes_lib.broadcast(axes, eqn.invars[0].aval.shape, out.shape, eqn.params["broadcast_dimensions"])
    if name in ("squeeze", "expand_dims"):
        return axes_lib.reshape(axes, out.shape)
    if name == "rev":
        return tuple(axes_lib.flip(a) if k in eqn.params["dimensions"] else a for k, a in enumerate(axes))
    if name == "reshape":  # of the transposed array, if it says so
        order = eqn.params["dimensions"]
        return axes_lib.reshape(axes if order is None else tuple(axes[k] for k in order), out.shape)
    return None
