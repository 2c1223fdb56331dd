"""A loss function as a flat program: its operations, what is inside them, and what of it reaches the loss.

Calls are written out where they stand; a `scan` and a `remat` alone hold a program of their own. What equations mean is
in `equations.py` and `primitives.py`; the rest of the capture sees no more of them than an `Op` shows.
"""

from __future__ import annotations

import collections
import dataclasses
import difflib
import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.extend import core as jex

from kfac._capture import equations, parameters, primitives
from kfac._capture.axes import Axes, Axis

State = TypeVar("State")


@dataclasses.dataclass(eq=False)
class Value:
    """An array of a program.

    Passes over the program note facts of it, in this order: `compare` `twice`; `mark_live` `branched`; `examples.place`
    `axes`, `of_batch`, `from_arguments`, `concatenated` and `leaves`.

    Attributes:
      shape: its shape.
      dtype: its dtype.
      number: what it is, of a number written into the program.
      twice: its shape where the loss is traced with twice as many examples; None where that is not known.
      axes: its axes in atoms, with those that hold examples marked (`examples.py`).
      of_batch: whether it depends on the batch, or holds examples.
      from_arguments: whether it depends on array arguments of the loss.
      concatenated: whether it depends on rows of the batch that stand beside others, as those of a second batch.
      leaves: the parameter leaves that it depends on by a way that carries a gradient.
      branched: whether it reaches the loss by several ops, or by one and as a result.
    """

    shape: tuple[int, ...]
    dtype: Any
    number: Any = None
    twice: tuple[int, ...] | None = None
    axes: Axes = ()
    of_batch: bool = False
    from_arguments: bool = False
    concatenated: bool = False
    leaves: frozenset[int] = frozenset()
    branched: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def grown(self) -> tuple[bool, ...]:
        """Which of its axes are longer with twice as many examples."""
        return tuple(a != b for a, b in zip(self.shape, self.twice or self.shape, strict=True))


@dataclasses.dataclass(eq=False)
class Op:
    """One equation of a program.

    Passes note facts of it as of a `Value`: `compare` `longer`; `mark_live` `alive`, `summed` and `unmarked`;
    `examples.place` `along`.

    Attributes:
      eqn: the equation itself.
      within: the jaxpr that it is one of.
      inputs: what it reads.
      outputs: what it computes.
      scan: of a scan, what it does with its inputs.
      inner: the program inside a scan and a remat.
      around: the scans and remats that it is inside of, from the outermost inwards.
      longer: of a scan, whether its length grows with the examples.
      along: and the axis that it goes along.
      alive: whether a result reaches the loss by a way that carries a gradient, or something inside does.
      summed: whether they reach it by sums and factors alone, as the terms of a penalty do.
      unmarked: whether one reaches it by a way without a marked output.
    """

    eqn: Any
    within: Any
    inputs: list[Value]
    outputs: list[Value]
    scan: parameters.Scan | None = None
    inner: Program | None = None
    around: tuple[Op, ...] = ()
    longer: bool = False
    along: Axis = ()
    alive: bool = False
    summed: bool = False
    unmarked: bool = False

    @property
    def name(self) -> str:
        return self.eqn.primitive.name

    @property
    def length(self) -> int:
        """How many iterations it has: one, if it is no scan."""
        return self.scan.length if self.scan else 1

    @property
    def loops(self) -> tuple[Op, ...]:
        """The scans that it is inside of."""
        return tuple(op for op in self.around if op.scan)

    def meaning(self, operand: int, axes: Axes) -> primitives.Meaning:
        """What it does with a parameter that is its input number `operand` and has these axes."""
        return primitives.meaning(self.eqn, operand, axes, [value.axes for value in self.inputs])

    @functools.cached_property
    def product(self) -> bool:
        """Whether it is a matrix product or convolution, or like one."""
        return primitives.is_product(self.eqn)

    def compute(self, values: Sequence[Any]) -> list[Any]:
        """Its results."""
        return equations.evaluate(self.within, self.eqn, values)

    def describe(self) -> str:
        """Its name and the shapes of its inputs, for messages."""
        return f"{self.name}({', '.join(str(list(value.shape)) for value in self.inputs)})"


@dataclasses.dataclass(eq=False)
class Program:
    """Operations in their order.

    Attributes:
      inputs: the arguments.
      consts: constants, with their values.
      ops: the operations.
      outputs: the results.
      around: the scans and remats that it is inside of, from the outermost inwards.
    """

    inputs: list[Value]
    consts: dict[Value, Any]
    ops: list[Op]
    outputs: list[Value]
    around: tuple[Op, ...] = ()

    def run(
        self,
        states: Sequence[State],
        constant: Callable[[Value], State],
        visit: Callable[[Op, list[State]], Sequence[State]],
    ) -> list[State]:
        """Computes the states of the results from those of the inputs, as the program computes arrays.

        Args:
          states: of the inputs.
          constant: of constants, and of numbers written into the program.
          visit: gives the states of an op's results from itself and the states of its inputs.
        """
        env: dict[Value, State] = {const: constant(const) for const in self.consts}
        env.update(zip(self.inputs, states, strict=True))

        def read(value: Value) -> State:
            return env[value] if value.number is None else constant(value)

        for op in self.ops:
            env.update(zip(op.outputs, visit(op, list(map(read, op.inputs))), strict=True))
        return list(map(read, self.outputs))

    def axes_averaged_over(self) -> tuple[str, ...]:
        """Returns the axes of devices over which the loss, the first result, is summed or averaged."""
        makers = {value: op for op in self.ops for value in op.outputs}
        ahead, axes = [self.outputs[0]], list[str]()
        while ahead:
            maker = makers.get(ahead.pop())
            if maker is not None and all(value.shape == () for value in maker.outputs) and maker.inner is None:
                axes += equations.devices_summed(maker.eqn)
                ahead += [value for value in maker.inputs if value.shape == () and value.leaves]
        return tuple(dict.fromkeys(axes))

    def walk(self) -> Iterator[Op]:
        """All operations, and those inside them."""
        for op in self.ops:
            yield op
            if op.inner:
                yield from op.inner.walk()


def flat(closed: Any, around: tuple[Op, ...] = ()) -> Program:
    """The program of a closed jaxpr, with calls written out, inside the scans and remats `around`."""
    program = Program(list(map(_value, closed.jaxpr.invars)), {}, [], [], around)
    program.outputs = _inline(program, closed, program.inputs)
    return program


def _value(var: Any) -> Value:
    number = var.val if isinstance(var, jex.Literal) else None
    return Value(tuple(getattr(var.aval, "shape", ())), var.aval.dtype, number)


def _inline(into: Program, closed: Any, inputs: Sequence[Value]) -> list[Value]:
    """Adds the operations of a jaxpr to a program; its results."""
    jaxpr = closed.jaxpr
    constants = list(map(_value, jaxpr.constvars))
    into.consts.update(zip(constants, closed.consts, strict=True))
    env: dict[Any, Value] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *inputs), strict=True))

    def read(variables) -> list[Value]:
        return [_value(var) if isinstance(var, jex.Literal) else env[var] for var in variables]

    for eqn in jaxpr.eqns:
        inputs, (kind, inner) = read(eqn.invars), equations.called(eqn) or ("", None)
        if kind == "call":
            entering, leaving = equations.shardings(eqn)
            results = _inline(into, inner, _constrained(into, inputs, entering))
            results = _constrained(into, results, leaving)
        else:
            results = list(map(_value, eqn.outvars))
            op = Op(eqn, jaxpr, inputs, results, parameters.scan(eqn), around=into.around)
            op.inner = flat(inner, (*into.around, op)) if inner else None
            into.ops.append(op)
        env.update(zip(eqn.outvars, results, strict=True))
    return read(jaxpr.outvars)


def _constrained(program: Program, values: list[Value], shardings: Sequence[Any]) -> list[Value]:
    """Values that lie as a `jit` inside the loss has it."""
    result = []
    for value, sharding in zip(values, shardings or [None] * len(values), strict=True):
        if isinstance(sharding, jax.sharding.Sharding) and value.number is None:
            put = functools.partial(jax.lax.with_sharding_constraint, shardings=sharding)
            closed = jax.make_jaxpr(put)(jax.ShapeDtypeStruct(value.shape, value.dtype))
            new = dataclasses.replace(value)
            program.ops.append(Op(closed.jaxpr.eqns[0], closed.jaxpr, [value], [new], around=program.around))
            value = new
        result.append(value)
    return result


# -- twice as many examples --------------------------------------------------------------------------------------------


class AnotherProgramError(Exception):
    """With twice as many examples the loss is another program."""


def compare(program: Program, twin: Program, alike: bool) -> None:
    """Notes what grows between a program and the twin that it is with twice as many examples.

    Args:
      program: the program.
      twin: the other one.
      alike: whether the two must do the same operations. A batch of one may do some in another way, as a gather; what
        is between the same operations is then not compared.

    Raises:
      AnotherProgramError: the twin does not do the same operations.
    """

    def form(op):
        return op.name, *(len(value.shape) for value in (*op.inputs, *op.outputs))

    forms, other_forms = list(map(form, program.ops)), list(map(form, twin.ops))
    blocks: Sequence[tuple[int, int, int]] = [(0, 0, len(forms))]
    if forms != other_forms:
        if alike:
            raise AnotherProgramError
        blocks = difflib.SequenceMatcher(None, forms, other_forms, autojunk=False).get_matching_blocks()
    arrays = list(zip(program.inputs, twin.inputs, strict=True))
    if len(program.consts) == len(twin.consts):
        arrays += zip(program.consts, twin.consts, strict=True)
    for start, other_start, count in blocks:
        for op, other in zip(program.ops[start : start + count], twin.ops[other_start:], strict=False):
            arrays += zip(op.outputs, other.outputs, strict=True)
            if op.inner and other.inner:
                compare(op.inner, other.inner, alike)
                op.longer = op.length != other.length
    for value, larger in arrays:
        value.twice = larger.shape


# -- what reaches the loss ---------------------------------------------------------------------------------------------


class Reached(NamedTuple):
    """How an array reaches the loss.

    Attributes:
      live: whether a gradient comes back to it.
      summed: whether it gets there by sums and factors alone, as the terms of a penalty do.
      unmarked: whether one of its ways has no marked output.
    """

    live: bool = False
    summed: bool = False
    unmarked: bool = False


def _by_all(ways: Iterable[Reached]) -> Reached:
    """How an array reaches the loss that does so in several ways."""
    live = [way for way in ways if way.live]
    return Reached(bool(live), bool(live) and all(way.summed for way in live), any(way.unmarked for way in live))


def mark_live(program: Program, roots: Collection[Op] = ()) -> None:
    """Notes what reaches the loss, the first result; with `roots`, what reaches the results of these ops instead.

    Integers and booleans carry no gradient, nor does what goes through `stop_gradient` and the like.
    """
    loss = Reached() if roots else Reached(live=True, summed=True, unmarked=True)
    _note_reached(program, [loss, *[Reached()] * (len(program.outputs) - 1)], roots)


def _note_reached(program: Program, results: Sequence[Reached], roots: Collection[Op]) -> list[Reached]:
    """Notes what reaches the loss, if the results of a program do so in these ways; returns how its arguments do."""
    ways: dict[Value, list[Reached]] = collections.defaultdict(list)  # of each array, one for each live reader

    def reach(value: Value, way: Reached) -> None:
        if way.live and value.number is None and jnp.issubdtype(value.dtype, jnp.inexact):
            ways[value].append(way)

    def reached(value: Value) -> Reached:
        value.branched = len(ways[value]) > 1
        return _by_all(ways[value])

    for value, way in zip(program.outputs, results, strict=True):
        reach(value, way)
    for op in reversed(program.ops):
        leaving = list(map(reached, op.outputs))
        if op in roots:
            leaving = [Reached(live=True)] * len(leaving)
        if equations.stops_gradient(op.eqn):
            leaving = [Reached()] * len(leaving)
        entering = _inputs_of(op, leaving, roots)
        together = _by_all(leaving)
        op.alive = together.live or (op.inner is not None and any(inner.alive for inner in op.inner.ops))
        op.summed = together.summed
        if not roots:  # of the loss, whatever the roots are
            op.unmarked = together.unmarked
        for value, way in zip(op.inputs, entering, strict=True):
            reach(value, way)
    return list(map(reached, program.inputs))


def _inputs_of(op: Op, ways: Sequence[Reached], roots: Collection[Op]) -> list[Reached]:
    """How the inputs of an op reach the loss, if its results do in these ways."""
    if op.inner and not op.scan:
        return _note_reached(op.inner, ways, roots)
    if op.inner and op.scan:
        scan, ways = op.scan, [way._replace(summed=False) for way in ways]
        while True:  # a carry also reaches it by way of a later iteration
            # An iteration may do anything with what it gets.
            inputs = [way._replace(summed=False) for way in _note_reached(op.inner, ways, roots)]
            carried = zip(ways, inputs[scan.consts : scan.last], strict=False)
            more = [*map(_by_all, carried), *ways[scan.carried :]]
            if more == ways:
                return inputs
            ways = more
    live, summed, unmarked = _by_all(ways)
    way = Reached(live, summed and equations.sums(op.eqn), unmarked and not equations.mark(op.eqn))
    return [way] * len(op.inputs)
