"""Define how each JAX primitive treats a parameter, in one table.

The rules in the tables distinguish two cases:

- `Follow`: the operation only changes the parameter's form. The capture keeps following its axes (`form_rules.py`).
- `Read`: the operation combines the parameter with data, and its per-example gradients are known (`read_rules.py`).

Any other operation computes a new array from the parameter. This is harmless if the array only enters a weight penalty.
If the array meets data, the parameter gets gradient factors.

To support another primitive, write a function like `read_rules._product` and enter it in `read_rules.RULES`. Add a
product's name to `PRODUCTS` as well. A change in form goes into `form_rules.MOVES`.

The capture looks inside calls, remats and scans before it asks these tables (`equations.called`). `register_primitive`
adds operations that users define. `placed` and `indexed` follow the axes of data (`data_rules.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import JaxprEqn, Literal, Var

from kfac._capture.axes import Axes
from kfac._capture.data_rules import indexed as indexed
from kfac._capture.data_rules import placed as placed
from kfac._capture.equations import IDENTITIES, called, name_of, registered
from kfac._capture.form_rules import MOVES, Follow, cast, same_form
from kfac._capture.parameters import Variable, array_type, shapes
from kfac._capture.read_rules import PRODUCTS, RULES, MaybeRead, Read

_ELEMENTWISE = ("add", "sub", "mul", "div", "max", "min", "pow", "select_n")
# Elementwise operations, whose operands broadcast to the result's shape.
ELEMENTWISE: dict[str, Callable[..., jax.Array]] = {
    "add_any": lax.add,
    **{name: getattr(lax, name) for name in _ELEMENTWISE},
}

Meaning = Follow | MaybeRead


def meaning(eqn: JaxprEqn, operand: int, axes: Axes, data: Sequence[Axes]) -> Meaning:
    """Return what an equation does with a parameter.

    Args:
      eqn: the equation.
      operand: the parameter's position among the inputs.
      axes: the parameter's axes.
      data: the axes of all inputs as data.

    Returns:
      How the equation changes the parameter's form or reads the parameter. A string is the reason why this operand has
      no exact statistics. None: the rules do not cover this use of the operand.

    Raises:
      ValueError: the equation is a registered operation, and its `like` is not a single operation on its inputs.
    """
    like = registered(eqn)
    if callable(like):
        return _alike(eqn, like, operand, axes, data)
    name = eqn.primitive.name
    if name in MOVES:
        return MOVES[name](eqn, axes)
    if name in IDENTITIES:
        return cast(eqn, axes)
    if name == "neg":  # `find_reads` counts it as a scale of -1
        return same_form(axes)
    if name in RULES:
        return RULES[name](eqn, operand, axes, data)
    return None


def is_product(eqn: JaxprEqn) -> bool:
    """Return whether an equation is a matrix product or a convolution, or is registered as such."""
    like = registered(eqn)
    if callable(like):
        eqn, _ = _single(eqn, like)
    return eqn.primitive.name in PRODUCTS


def _single(
    eqn: JaxprEqn, like: Callable[..., Any]
) -> tuple[JaxprEqn, list[int | None]]:
    """Trace `like` and return its only equation, and the number of each of its inputs among the inputs of `eqn`.

    The number is None for a constant.

    Raises:
      ValueError: `like` is not a single operation, or its results do not have the shapes of `eqn`'s results.
    """
    jaxpr = jax.make_jaxpr(like)(*map(array_type, eqn.invars)).jaxpr
    numbers = {var: k for k, var in enumerate(jaxpr.invars)}
    while len(jaxpr.eqns) == 1:
        (call,) = jaxpr.eqns
        kind, program = called(call) or ("", None)
        if program is None or kind == "scan":
            break
        inside = {}
        for var, inner in zip(call.invars, program.jaxpr.invars, strict=True):
            number = _number(numbers, var)
            if number is not None:
                inside[inner] = number
        numbers, jaxpr = inside, program.jaxpr
    if len(jaxpr.eqns) != 1 or shapes(jaxpr.outvars) != shapes(eqn.outvars):
        result = f"a result of shape {', '.join(map(str, shapes(eqn.outvars)))}"
        raise ValueError(
            f"register_primitive({name_of(eqn)}): like must be a single operation with {result}, but is\n{jaxpr}"
        )
    (operation,) = jaxpr.eqns
    return operation, [_number(numbers, var) for var in operation.invars]


def _number(numbers: dict[Var, int], var: Variable) -> int | None:
    return None if isinstance(var, Literal) else numbers.get(var)


def _alike(
    eqn: JaxprEqn,
    like: Callable[..., Any],
    operand: int,
    axes: Axes,
    data: Sequence[Axes],
) -> Meaning:
    """Return the meaning of the only equation in `like`, with inputs numbered as in `eqn`.

    Raises:
      ValueError: `like` is not a single operation, or combines an input with a constant.
    """
    operation, numbers = _single(eqn, like)
    if operand not in numbers:
        return None
    inputs = [() if number is None else data[number] for number in numbers]
    result = meaning(operation, numbers.index(operand), axes, inputs)
    if not isinstance(result, Read):
        return result
    other = numbers[result.other]
    if other is None:
        raise ValueError(
            f"register_primitive({name_of(eqn)}): like combines an array with a constant of its own, by "
            f"{operation.primitive.name}: let it be one operation of what it is given, lambda w: w.T or "
            "lambda x, w: x @ w"
        )
    return dataclasses.replace(result, operand=operand, other=other, name=name_of(eqn))
