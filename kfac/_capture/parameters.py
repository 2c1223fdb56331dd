"""Read the parameters of JAX's equations.

A parameter's name and form may change with any JAX release, so no other module reads a parameter by its name.
`tests/capture/test_parameters.py` traces a program for each of these parameters and checks the parameter's value.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax import Array
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from kfac._packing import Shape

Variable = Var | Literal

# The parameter that holds the program of a call. JAX 0.11 renamed `closed_call` to `eval_jaxpr`.
CALLS = {"jit": "jaxpr", "closed_call": "call_jaxpr", "eval_jaxpr": "call_jaxpr"}
REDUCTIONS = frozenset(
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax argmin".split()
)
DEVICE_SUMS = frozenset({"psum", "psum_invariant"})


class UnknownEquationError(NotImplementedError):
    """The installed JAX gives an equation a form that this version of the package does not know."""

    def __init__(self, eqn: JaxprEqn, found: str):
        super().__init__(
            f"JAX {jax.__version__} gives the primitive {eqn.primitive.name!r} {found}: this version of kfac does not "
            "know that form; install a JAX version that docs/development/compatibility.md lists, or report it"
        )


def array_type(variable: Variable) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of a variable."""
    aval: Any = variable.aval
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def shapes(variables: Sequence[Variable]) -> list[Shape]:
    return [array_type(variable).shape for variable in variables]


def result_shape(eqn: JaxprEqn) -> Shape:
    """Return the shape of an equation's first result."""
    return array_type(eqn.outvars[0]).shape


def parameter(eqn: JaxprEqn, name: str) -> Any:
    """Return an equation's parameter.

    Raises:
      UnknownEquationError: the equation has no such parameter in the installed JAX.
    """
    if name not in eqn.params:
        others = ", ".join(sorted(eqn.params)) or "none at all"
        raise UnknownEquationError(eqn, f"no parameter {name!r}, but {others}")
    return eqn.params[name]


def chosen(eqn: JaxprEqn, names: Sequence[str]) -> dict[str, Any]:
    """Return some of an equation's parameters, by name."""
    return {name: parameter(eqn, name) for name in names}


def elementwise(eqn: JaxprEqn, values: Sequence[Array]) -> Array:
    """Apply an elementwise equation to arrays of other shapes than its own, which `equations.evaluate` expects."""
    return eqn.primitive.bind(*values, **eqn.params)


class Scan(NamedTuple):
    """The roles of a scan's operands: constants come first, then the carry, then the sliced arrays.

    Attributes:
      consts: the number of constant operands, which each iteration reads whole.
      carried: the number of carried operands, which each iteration passes to the next.
      length: the number of iterations.
    """

    consts: int
    carried: int
    length: int

    @property
    def last(self) -> int:
        """The position of the first sliced operand."""
        return self.consts + self.carried


def scan(eqn: JaxprEqn) -> Scan | None:
    """Return the roles of a scan's operands, or None if the equation is not a scan.

    The roles are derived from shapes, because JAX 0.11 changed the parameters that hold them. A sliced operand has a
    leading axis that the body's argument lacks. A stacked result has a leading axis that the body's result lacks. All
    other results are the carry.

    Raises:
      UnknownEquationError: the operands do not fit the scan's body.
    """
    if eqn.primitive.name != "scan":
        return None
    body = inner_program(eqn, "jaxpr").jaxpr
    length = parameter(eqn, "length")
    entering = shapes(eqn.invars)
    leaving = shapes(eqn.outvars)
    carried = len(leaving) - _sliced(leaving, shapes(body.outvars), length)
    consts = len(entering) - _sliced(entering, shapes(body.invars), length) - carried
    if consts < 0 or entering[consts : consts + carried] != leaving[:carried]:
        raise UnknownEquationError(
            eqn, "operands that are not constants, carry and slices in this order"
        )
    return Scan(consts, carried, length)


def _sliced(outer: list[Shape], inner: list[Shape], length: int) -> int:
    """Count the `outer` shapes that the scan slices or stacks, compared with the body's `inner` shapes."""
    with_axis = [(length, *shape) for shape in inner]
    return sum(map(operator.eq, outer, with_axis))


def inner_program(eqn: JaxprEqn, name: str) -> ClosedJaxpr:
    """Return the closed jaxpr in the parameter `name`. JAX stores some jaxprs without constants.

    Raises:
      UnknownEquationError: the parameter does not hold a jaxpr.
    """
    program = parameter(eqn, name)
    if isinstance(program, ClosedJaxpr):
        return program
    if isinstance(program, Jaxpr):
        return ClosedJaxpr(program, ())
    found = type(program).__name__
    raise UnknownEquationError(eqn, f"a {found} in {name!r} where a jaxpr was expected")
