"""A loss function as a program that can be walked: its equations, what is inside them, and what reaches the loss.

A `Program` is a jaxpr, an `Op` one of its equations. What equations mean is in `primitives.py`; the rest of the capture
sees no more of them than an `Op` shows.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.extend import core as jex

from kfac._capture import primitives
from kfac._layers import leaf_paths

Path = tuple[int, ...]  # positions of ops, from the outermost program inwards
State = TypeVar("State")


@dataclasses.dataclass(eq=False)
class Op:
    """One equation of a program.

    Attributes:
      eqn: the equation itself.
      call: what it calls, if that can be looked into.
      inner: the program inside, of a call, a remat, a scan or a rule for derivatives.
      live: whether each result reaches the loss by a way that carries a gradient.
      alive: whether one does, or something inside.
      summed: whether they reach it by sums and factors alone, as the terms of a penalty do.
      branched: whether each input is an array that something else live reads as well.
    """

    eqn: Any
    call: primitives.Call | None
    inner: Program | None
    live: tuple[bool, ...] = ()
    alive: bool = False
    summed: bool = False
    branched: tuple[bool, ...] = ()

    @property
    def name(self) -> str:
        return self.eqn.primitive.name

    @functools.cached_property
    def inputs(self) -> Sequence[Any]:
        """Its inputs; of a rule for derivatives, those that have tangents once more."""
        own = self.eqn.invars
        again = [var for var in own if jnp.issubdtype(var.aval.dtype, jnp.inexact)] if self.by_rule else []
        return [*own, *again]

    @property
    def outputs(self) -> Sequence[Any]:
        return self.eqn.outvars

    @functools.cached_property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the inputs."""
        return tuple(tuple(getattr(var.aval, "shape", ())) for var in self.inputs)

    @property
    def sizes(self) -> list[int]:
        """Numbers of elements of the inputs."""
        return [math.prod(shape) for shape in self.shapes]

    @functools.cached_property
    def results(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the results."""
        return tuple(tuple(getattr(var.aval, "shape", ())) for var in self.outputs)

    @functools.cached_property
    def literals(self) -> tuple[bool, ...]:
        """Whether each input is a number written into the program."""
        return tuple(isinstance(var, jex.Literal) for var in self.inputs)

    @property
    def num_values(self) -> int:
        """How many of its inputs are values rather than tangents."""
        return len(self.eqn.invars)

    @property
    def by_rule(self) -> bool:
        """Whether the program inside is a rule for derivatives."""
        return self.call is not None and self.call.kind == "rule"

    @property
    def opaque(self) -> bool:
        """Whether it holds a program that cannot be looked into."""
        return self.inner is None and any(True for _ in primitives.inside(self.eqn))

    def meaning(self, operand: int, axes: primitives.Axes) -> primitives.Meaning:
        """What it does with a parameter that is its input number `operand` and has these axes."""
        return primitives.meaning(self.eqn, operand, axes)

    @property
    def registered(self) -> bool:
        """Whether the user has said what it is like."""
        return primitives.is_registered(self.eqn)

    @functools.cached_property
    def product(self) -> bool:
        """Whether it is a matrix product or convolution, or like one."""
        return primitives.is_product(self.eqn)

    @property
    def keeps_values(self) -> bool:
        return primitives.keeps_values(self.eqn)

    def contains_product(self) -> bool:
        return primitives.contains_product(self.eqn)

    def describe(self) -> str:
        """Its name and the shapes of its inputs, for messages."""
        return f"{self.name}({', '.join(str(list(shape)) for shape in self.shapes)})"


@dataclasses.dataclass(eq=False)
class Program:
    """A jaxpr whose ops know what is inside them, and what of it reaches the loss.

    Attributes:
      jaxpr: the jaxpr.
      consts: values of its constants.
      ops: its equations.
      branched: whether each result is also read by something live inside.
    """

    jaxpr: Any
    consts: Sequence[Any]
    ops: list[Op]
    branched: tuple[bool, ...] = ()

    def run(
        self,
        states: Sequence[State],
        constant: Callable[[Any], State],
        number: Callable[[Any], State],
        visit: Callable[[int, Op, list[State]], Sequence[State]],
    ) -> list[State]:
        """Computes with states in the place of arrays: those of the results, from those of the inputs.

        Args:
          states: of the inputs.
          constant: of constants, from their values.
          number: of numbers written into the program.
          visit: gives the states of an op's results from its position, itself and the states of its inputs.
        """
        env: dict[Any, State] = dict(zip(self.jaxpr.constvars, map(constant, self.consts), strict=True))
        env.update(zip(self.jaxpr.invars, states, strict=True))

        def read(var) -> State:
            return number(var.val) if isinstance(var, jex.Literal) else env[var]

        for index, op in enumerate(self.ops):
            env.update(zip(op.outputs, visit(index, op, [read(var) for var in op.inputs]), strict=True))
        return [read(var) for var in self.jaxpr.outvars]

    def hands_on(self, result: int, argument: int) -> bool:
        """Whether a result is one of the arguments, as it came."""
        return self.jaxpr.outvars[result] is self.jaxpr.invars[argument]


def program(jaxpr: Any, consts: Sequence[Any], rules: bool = True) -> Program:
    ops = []
    for eqn in jaxpr.eqns:
        found = primitives.call(eqn, rules)
        # The rule of a function may call it.
        inner = program(found.jaxpr, found.consts, rules and found.kind != "rule") if found else None
        ops.append(Op(eqn, found, inner))
    return Program(jaxpr, consts, ops)


class Reached(NamedTuple):
    """How an array reaches the loss: whether a gradient comes back, and whether by sums and numbers alone."""

    live: bool
    summed: bool


def mark_live(found: Program, results: Sequence[Reached], roots: Collection[Op] = ()) -> list[Reached]:
    """Notes what reaches the loss.

    Integers and booleans carry no gradient, nor does what goes through `stop_gradient` and the like.

    Args:
      found: the program.
      results: how its results do.
      roots: ops whose results do, whoever reads them.

    Returns:
      How the arguments do.
    """
    readers: collections.Counter[Any] = collections.Counter()
    bent: set[Any] = set()  # of these arrays, what does not reach the loss by sums and numbers alone

    def reach(var, how: Reached) -> None:
        if how.live and not isinstance(var, jex.Literal) and jnp.issubdtype(var.aval.dtype, jnp.inexact):
            readers[var] += 1
            if not how.summed:
                bent.add(var)

    def reached(var) -> Reached:
        live = not isinstance(var, jex.Literal) and readers[var] > 0
        return Reached(live, live and var not in bent)

    for var, how in zip(found.jaxpr.outvars, results, strict=True):
        reach(var, how)
    for op in reversed(found.ops):
        ways = [reached(var) for var in op.outputs]
        if op in roots:
            ways = [Reached(True, False)] * len(ways)
        if primitives.stops_gradient(op.eqn):
            ways = [Reached(False, False)] * len(ways)
        inputs = _inputs_of(op, ways, roots)
        op.live = tuple(way.live for way in ways)
        op.alive = any(op.live) or (op.inner is not None and any(inner.alive for inner in op.inner.ops))
        op.summed = all(way.summed for way in ways if way.live)
        for var, how in zip(op.inputs, inputs, strict=True):
            reach(var, how)
    for op in found.ops:
        op.branched = tuple(reached(var).live and readers[var] > 1 for var in op.inputs)
    found.branched = tuple(reached(var).live and readers[var] > 1 for var in found.jaxpr.outvars)
    return [reached(var) for var in found.jaxpr.invars]


def _inputs_of(op: Op, ways: Sequence[Reached], roots: Collection[Op]) -> list[Reached]:
    """How the inputs of an op reach the loss, if its results do in these ways."""
    if op.inner and op.call:
        scan = op.call.scan
        if not scan:
            inputs, values = mark_live(op.inner, ways, roots), op.num_values if op.by_rule else 0
            return [Reached(False, False)] * values + inputs[values:]
        ways = [Reached(way.live, False) for way in ways]
        while True:  # a carry also reaches it by way of a later iteration
            inputs = mark_live(op.inner, ways, roots)
            carried = [way.live for way in inputs[scan.consts : scan.consts + scan.carried]]
            live = [a.live or b for a, b in zip(ways, carried, strict=False)]
            grown = [Reached(now, False) for now in live] + ways[scan.carried :]
            if grown == ways:
                return [Reached(way.live, False) for way in inputs]
            ways = grown
    alive = any(way.live for way in ways)
    summed = alive and all(way.summed for way in ways if way.live) and primitives.sums(op.eqn)
    return [Reached(alive, summed)] * len(op.inputs)


class Trace(NamedTuple):
    """A traced loss and how to call it with flat arguments."""

    program: Program
    arrays: list[Any]  # the dynamic leaves of the arguments, after the parameters
    rebuild: Callable[[Sequence[Any]], Any]  # flat outputs -> (loss, aux)
    names: list[str]  # paths of the parameter leaves
    shapes: list[tuple[int, ...]]

    @property
    def num_leaves(self) -> int:
        return len(self.names)


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def check_params(params: Any) -> tuple[list[str], list[tuple[int, ...]]]:
    """Paths and shapes of the parameter leaves, in the order of `jax.tree.leaves`.

    Raises:
      ValueError: there are none, or two have one path.
      TypeError: one is no real array.
    """
    names, leaves = leaf_paths(params), jax.tree.leaves(params)
    if not names:
        raise ValueError("params has no leaves: there is nothing to train")
    repeated = [name for name, count in collections.Counter(names).items() if count > 1]
    if repeated:
        raise ValueError(f"two parameter leaves have the path {repeated[0]!r}; rename one")
    for name, leaf in zip(names, leaves, strict=True):
        if not _is_array(leaf):
            raise TypeError(f"parameter {name!r} must be an array, but is of type {type(leaf).__name__}")
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise TypeError(
                f"parameter {name!r} has dtype {leaf.dtype}: kfac differentiates real parameters only. Keep other "
                "arrays out of params, as a further argument of loss_fn: those of a flax nnx module by "
                "nnx.split(module, nnx.Param, ...)"
            )
    return names, [tuple(leaf.shape) for leaf in leaves]


def trace(loss_fn: Callable, has_aux: bool, params: Any, args: tuple, kwargs: dict) -> Trace:
    """Traces `loss_fn(params, *args, **kwargs)`; arguments that are not arrays stay what they are."""
    names, shapes = check_params(params)
    leaves, treedef = jax.tree.flatten((args, kwargs))
    dynamic = [k for k, leaf in enumerate(leaves) if _is_array(leaf)]
    arrays = [leaves[k] for k in dynamic]
    flat_params, params_tree = jax.tree.flatten(params)
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

    found = program(closed.jaxpr, closed.consts)
    mark_live(found, [Reached(True, True), *[Reached(False, False)] * (len(closed.jaxpr.outvars) - 1)])
    return Trace(found, arrays, rebuild, names, shapes)


def aim_at(traced: Trace, roots: Collection[Op]) -> None:
    """Notes what reaches the results of some ops, in the place of what reaches the loss."""
    outputs = traced.program.jaxpr.outvars
    mark_live(traced.program, [Reached(False, False)] * len(outputs), roots)
