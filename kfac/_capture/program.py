"""Flatten a loss function into a list of operations, and find the operations that reach the loss.

Calls are inlined; only a `scan` or a `remat` has a program of its own. The modules `equations.py` and `primitives.py`
define the meaning of an equation.
"""

from __future__ import annotations

import difflib
import enum
import functools
import math
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from kfac._capture import equations, parameters, primitives
from kfac._capture.axes import Axes, Axis, holds_examples

State = TypeVar("State")


@dataclass(eq=False)
class Value:
    """An array of a program.

    Three passes over the program set further attributes, in this order: `compare` sets `twice`, `mark_live` sets
    `branched`, and `examples.place` sets `axes`, `of_batch`, `from_arguments`, `concatenated` and `leaves`.

    Attributes:
      shape: the shape.
      dtype: the dtype.
      twice: the array's shape in the trace with twice as many examples, or `shape` if that shape is not known.
      number: the value of a literal in the jaxpr; None for any other array.
      axes: the axes, as atoms (`axes.py`). Atoms that hold examples are marked (`examples.py`).
      of_batch: whether the array depends on the batch or has an axis of examples. If the loss hides its examples, its
        arguments and constant arrays count as the batch.
      from_arguments: whether the array depends on array arguments of the loss other than the parameters.
      concatenated: whether the array depends on a concatenation of batch rows with other rows, such as a second batch.
      leaves: the parameter leaves, by position, on which the array depends through ops that are `alive`.
      branched: whether several readers send a gradient back to the array. The program's result counts as a reader.
    """

    shape: tuple[int, ...]
    dtype: Any
    twice: tuple[int, ...]
    number: Any = None
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
        """For each axis, whether it is longer with twice as many examples."""
        return tuple(map(operator.ne, self.shape, self.twice))

    @property
    def rows(self) -> Axes:
        """The axes that hold examples, and axes that are longer with twice as many examples."""
        pairs = zip(self.axes, self.grown, strict=True)
        return tuple(axis for axis, longer in pairs if longer or holds_examples(axis))


@dataclass(eq=False)
class Op:
    """One equation of a program.

    The passes that `Value` names also set attributes of ops: `compare` sets `longer`, `mark_live` sets `alive`,
    `summed` and `unmarked`, and `examples.place` sets `along`.

    Attributes:
      eqn: the equation.
      within: the jaxpr that contains the equation.
      inputs: the arrays that the equation reads.
      outputs: the arrays that the equation computes.
      scan: for a scan, its operands' roles; None for any other equation.
      inner: the body of a scan or remat; None for any other equation.
      around: the scans and remats that enclose the op, outermost first.
      longer: for a scan, whether its length grows with the number of examples.
      along: for a scan, the axis over which it iterates.
      alive: whether a gradient flows back from the loss to a result of this op, or of an op inside.
      summed: whether the results reach the loss only through sums and multiplications by scalars, as the terms of a
        penalty do.
      unmarked: whether a result reaches the loss on a path without a marked output.
    """

    eqn: JaxprEqn
    within: Jaxpr
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
        """The number of iterations, which is 1 unless the op is a scan."""
        return self.scan.length if self.scan else 1

    @property
    def loops(self) -> tuple[Op, ...]:
        """The scans that enclose the op."""
        return tuple(op for op in self.around if op.scan)

    def meaning(self, operand: int, axes: Axes) -> primitives.Meaning:
        """Return what the op does with a parameter that has these axes and is its input number `operand`."""
        data = [value.axes for value in self.inputs]
        return primitives.meaning(self.eqn, operand, axes, data)

    @property
    def product(self) -> bool:
        """Whether the op is a matrix product or convolution."""
        return self.name in primitives.PRODUCTS

    @property
    def contracted(self) -> int:
        """The number of terms in each entry of a matrix product or convolution."""
        numbers = parameters.parameter(self.eqn, "dimension_numbers")
        first, second = self.inputs
        if self.name == "dot_general":
            return math.prod(first.shape[k] for k in numbers[0][0])
        return second.size // second.shape[numbers.rhs_spec[0]]

    def compute(self, values: Sequence[Array]) -> list[Array]:
        """Compute the op's results."""
        return equations.evaluate(self.within, self.eqn, values)

    def derivatives(
        self, values: Sequence[Array], operand: int, tangent: Array | None
    ) -> list[Array]:
        """Return the derivatives of the results along a tangent of input number `operand`. None: a tangent of ones."""
        if tangent is None:
            tangent = jnp.ones_like(values[operand])

        def results(value):
            inputs = list(values)
            inputs[operand] = value
            return self.compute(inputs)

        return jax.jvp(results, (values[operand],), (tangent,))[1]

    def describe(self) -> str:
        """Return the op's name and its inputs' shapes, for messages."""
        shapes = [str(list(value.shape)) for value in self.inputs]
        return f"{self.name}({', '.join(shapes)})"


@dataclass(eq=False)
class Program:
    """Operations in execution order.

    Attributes:
      inputs: the arguments.
      consts: the constants, with their values.
      ops: the operations.
      outputs: the results.
      around: the scans and remats that enclose the program, outermost first.
    """

    inputs: list[Value]
    consts: dict[Value, Array]
    ops: list[Op]
    outputs: list[Value]
    around: tuple[Op, ...] = ()

    def run(
        self,
        states: Sequence[State],
        constant: Callable[[Value], State],
        visit: Callable[[Op, list[State]], Sequence[State]],
    ) -> list[State]:
        """Run the program on a state for each array, instead of on the array itself.

        The caller chooses what a state is. In `replay`, it is the array's value, and in `find_reads`, it tells which
        parameters are in the array.

        Args:
          states: the inputs' states.
          constant: returns the state of a constant or a literal.
          visit: returns the states of an op's results, from the op and its inputs' states.

        Returns:
          The results' states.
        """
        env = dict(zip(self.inputs, states, strict=True))

        def read(value: Value) -> State:
            return env[value] if value in env else constant(value)

        for op in self.ops:
            results = visit(op, list(map(read, op.inputs)))
            env.update(zip(op.outputs, results, strict=True))
        return list(map(read, self.outputs))

    def axes_averaged_over(self) -> tuple[str, ...]:
        """Return the device axes over which the loss, the first result, is summed or averaged."""
        # The scalars from which the loss is computed.
        terms = {self.outputs[0]}
        axes = []
        for op in reversed(self.ops):
            arrays = any(value.shape for value in op.outputs)
            if arrays or op.inner or terms.isdisjoint(op.outputs):
                continue
            if op.name in parameters.DEVICE_SUMS:
                axes += parameters.parameter(op.eqn, "axes")
            terms |= {x for x in op.inputs if x.shape == () and x.leaves}
        return tuple(dict.fromkeys(axes))

    def walk(self) -> Iterator[Op]:
        """Yield all operations, including the operations inside scans and remats."""
        for op in self.ops:
            yield op
            if op.inner:
                yield from op.inner.walk()


def flat(closed: ClosedJaxpr, around: tuple[Op, ...] = ()) -> Program:
    """Return the program of a closed jaxpr with calls inlined, enclosed by the scans and remats `around`."""
    program = Program(list(map(_value, closed.jaxpr.invars)), {}, [], [], around)
    program.outputs = _inline(program, closed, program.inputs)
    return program


def _value(var: parameters.Variable) -> Value:
    array = parameters.array_type(var)
    number = var.val if isinstance(var, Literal) else None
    return Value(array.shape, array.dtype, array.shape, number)


def _inline(into: Program, closed: ClosedJaxpr, inputs: Sequence[Value]) -> list[Value]:
    """Add a jaxpr's operations to a program, and return the jaxpr's results."""
    jaxpr = closed.jaxpr
    constants = list(map(_value, jaxpr.constvars))
    into.consts.update(zip(constants, closed.consts, strict=True))
    variables = [*jaxpr.constvars, *jaxpr.invars]
    env: dict[Var, Value] = dict(zip(variables, [*constants, *inputs], strict=True))

    def read(var: parameters.Variable) -> Value:
        return _value(var) if isinstance(var, Literal) else env[var]

    for eqn in jaxpr.eqns:
        inputs = list(map(read, eqn.invars))
        call = equations.called(eqn)
        if call:
            entering, leaving = equations.shardings(eqn)
            results = _inline(into, call, _constrained(into, inputs, entering))
            results = _constrained(into, results, leaving)
        else:
            results = list(map(_value, eqn.outvars))
            scan = parameters.scan(eqn)
            op = Op(eqn, jaxpr, inputs, results, scan, around=into.around)
            if op.name in ("remat2", "scan"):
                body = parameters.inner_program(eqn, "jaxpr")
                op.inner = flat(body, (*into.around, op))
            into.ops.append(op)
        env.update(zip(eqn.outvars, results, strict=True))
    return list(map(read, jaxpr.outvars))


def _constrained(
    program: Program, values: Sequence[Value], shardings: Sequence[object]
) -> list[Value]:
    """Return values constrained to the shardings that a `jit` inside the loss gives its arguments or results."""
    result = list(values)
    for k, sharding in enumerate(shardings):
        value = values[k]
        if isinstance(sharding, jax.sharding.Sharding) and value.number is None:
            put = functools.partial(
                jax.lax.with_sharding_constraint, shardings=sharding
            )
            array = jax.ShapeDtypeStruct(value.shape, value.dtype)
            (result[k],) = _inline(program, jax.make_jaxpr(put)(array), [value])
    return result


# -- twice as many examples --------------------------------------------------------------------------------------------


class AnotherProgramError(Exception):
    """The loss traced with twice as many examples has other operations."""


def compare(program: Program, twin: Program, alike: bool) -> None:
    """Record how a program grows with twice as many examples: set its `Value.twice` and `Op.longer`.

    Args:
      program: the loss's program.
      twin: its program with twice as many examples.
      alike: whether both programs must have the same operations. A loss may use other operations for a single example,
        for example for a gather. If `alike` is false, only runs of matching operations are compared.

    Raises:
      AnotherProgramError: the programs must be alike, but their operations differ.
    """
    blocks: Sequence[tuple[int, int, int]] = [(0, 0, len(program.ops))]
    forms = list(map(_form, program.ops))
    other_forms = list(map(_form, twin.ops))
    if forms != other_forms:
        if alike:
            raise AnotherProgramError
        matcher = difflib.SequenceMatcher(None, forms, other_forms, autojunk=False)
        blocks = matcher.get_matching_blocks()
    _compare_arrays(program.inputs, twin.inputs)
    if len(program.consts) == len(twin.consts):
        _compare_arrays(program.consts, twin.consts)
    for start, other_start, count in blocks:
        for k in range(count):
            op = program.ops[start + k]
            other = twin.ops[other_start + k]
            _compare_arrays(op.outputs, other.outputs)
            if op.inner and other.inner:
                compare(op.inner, other.inner, alike)
                op.longer = op.length != other.length


def _form(op: Op) -> tuple[str | int, ...]:
    """Return an op's name and its arrays' numbers of axes."""
    return op.name, *(len(value.shape) for value in (*op.inputs, *op.outputs))


def _compare_arrays(values: Iterable[Value], larger: Iterable[Value]) -> None:
    for value, other in zip(values, larger, strict=True):
        value.twice = other.shape


# -- reaching the loss -------------------------------------------------------------------------------------------------


class Way(enum.Flag):
    """How an array reaches the loss. Ways combine with `|`.

    LIVE: a gradient flows back to the array.
    COMPUTED: on some path to the loss, there are operations other than sums and multiplications by scalars. The terms
      of a penalty reach the loss without such operations.
    UNMARKED: some path to the loss has no marked output.
    """

    LIVE = enum.auto()
    COMPUTED = enum.auto()
    UNMARKED = enum.auto()


NOT_AT_ALL = Way(0)


def mark_live(program: Program, roots: Collection[Op] = ()) -> None:
    """Record which arrays and ops reach the loss, the first result.

    With `roots`, record instead which of them reach the results of these ops. `Op.unmarked` and `Value.branched` stay
    as they are, because they always refer to the loss, as in `find_layers`. No gradient flows through integers,
    booleans, or operations without a gradient, such as `stop_gradient`.
    """
    loss = NOT_AT_ALL if roots else Way.LIVE | Way.UNMARKED
    others = [NOT_AT_ALL] * (len(program.outputs) - 1)
    _note_reached(program, [loss, *others], roots)


def _note_reached(
    program: Program, results: Sequence[Way], roots: Collection[Op]
) -> list[Way]:
    """Record which arrays and ops reach the loss, and return how the program's inputs do.

    `results` says how the program's results reach the loss. `roots` is as for `mark_live`.
    """
    ways = {}

    def reach(value: Value, way: Way) -> None:
        variable = value.number is None and jnp.issubdtype(value.dtype, jnp.inexact)
        if Way.LIVE in way and variable:
            if not roots:
                value.branched = value in ways
            ways[value] = reached(value) | way

    def reached(value: Value) -> Way:
        return ways.get(value, NOT_AT_ALL)

    for value, way in zip(program.outputs, results, strict=True):
        reach(value, way)
    for op in reversed(program.ops):
        leaving = list(map(reached, op.outputs))
        if op.name in equations.WITHOUT_GRADIENT:
            leaving = [NOT_AT_ALL] * len(leaving)
        elif op in roots:
            # This is how an array reaches the results of `roots`.
            leaving = [Way.LIVE | Way.COMPUTED] * len(leaving)
        entering = _inputs_of(op, leaving, roots)
        together = _by_all(leaving)
        op.alive = Way.LIVE in together
        op.summed = op.alive and Way.COMPUTED not in together
        if op.inner:
            op.alive |= any(inner.alive for inner in op.inner.ops)
        if not roots:
            op.unmarked = Way.UNMARKED in together
        for value, way in zip(op.inputs, entering, strict=True):
            reach(value, way)
    return list(map(reached, program.inputs))


def _by_all(ways: Iterable[Way]) -> Way:
    return functools.reduce(operator.or_, ways, NOT_AT_ALL)


def _inputs_of(op: Op, ways: Sequence[Way], roots: Collection[Op]) -> list[Way]:
    """Return how an op's inputs reach the loss, if its results reach the loss in `ways`."""
    if op.inner is None:
        way = _by_all(ways)
        if not equations.sums(op.eqn):
            way |= Way.COMPUTED
        if equations.mark(op.eqn):
            way &= ~Way.UNMARKED
        return [way] * len(op.inputs)
    if op.scan is None:
        return _note_reached(op.inner, ways, roots)
    # An input of a scan always counts as computed, because the body may do anything with it.
    ways = [way | Way.COMPUTED for way in ways]
    while True:
        inputs = _note_reached(op.inner, ways, roots)
        # A carry also reaches the loss through later iterations.
        more = list(ways)
        for k in range(op.scan.carried):
            more[k] |= inputs[op.scan.consts + k]
        if more == ways:
            return inputs
        ways = more
