"""Count a program's floating-point operations and the distinct kernels that its compiler generates."""

import math
import re
from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core as jex


def count_flops(fn: Callable[..., Any], *args: Any) -> int:
    """Count the FLOPs in matrix products and convolutions.

    A multiplication and an addition count as two. A `scan` counts with its number of iterations, and a `cond` with its
    most expensive branch. A `while` loop does not count, because its number of iterations is unknown. This excludes the
    preconditioner's loops over inverses.
    """
    return _count(jax.make_jaxpr(fn)(*args).jaxpr)


def _count(jaxpr: Any) -> int:
    return sum(_equation(eqn) for eqn in jaxpr.eqns)


def _equation(eqn: Any) -> int:
    name = eqn.primitive.name
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        out = math.prod(eqn.outvars[0].aval.shape)
        return 2 * out * math.prod(eqn.invars[0].aval.shape[k] for k in contracted)
    if name == "conv_general_dilated":
        return _convolution(eqn)
    if name == "while":
        return 0
    inner = [_count(program) for value in eqn.params.values() for program in _jaxprs(value)]
    if name == "cond":
        return max(inner, default=0)
    return sum(inner) * (eqn.params["length"] if name == "scan" else 1)


def _jaxprs(value: Any) -> list[Any]:
    """Return the jaxprs, closed or open, in an equation's parameter."""
    values = value if isinstance(value, tuple | list) else [value]
    return [v for v in values if isinstance(v, (jex.Jaxpr, jex.ClosedJaxpr))]


def _convolution(eqn: Any) -> int:
    """Count a convolution's FLOPs, except for products with padding or with a dilated image's zeros."""
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    image, kernel, out = eqn.invars[0].aval.shape, eqn.invars[1].aval.shape, eqn.outvars[0].aval.shape
    total = 2 * out[numbers.out_spec[0]] * kernel[numbers.rhs_spec[0]] * kernel[numbers.rhs_spec[1]]
    for k in range(len(out) - 2):
        (low, _), stride = params["padding"][k], params["window_strides"][k]
        spread, step = params["lhs_dilation"][k], params["rhs_dilation"][k]
        size, taps = image[numbers.lhs_spec[2 + k]], kernel[numbers.rhs_spec[2 + k]]
        total *= sum(
            (place := position * stride - low + tap * step) % spread == 0 and 0 <= place <= (size - 1) * spread
            for position in range(out[numbers.out_spec[2 + k]])
            for tap in range(taps)
        )
    return total // params["batch_group_count"]


def count_distinct_kernels(program: str) -> int:
    """Count the kernels that XLA generates for a compiled program, given as text. Library kernels do not count.

    Fusions that differ only in their names count once, because XLA's CPU backend compiles them once. This number
    predicts the compile time, and it has no noise.
    """
    bodies = dict(re.findall(r"^%?([\w.-]+) \([^\n]*\{\n(.*?)\n\}", program, re.DOTALL | re.MULTILINE))
    calls = (line for line in program.splitlines() if " fusion(" in line and "__ynn_fusion" not in line)
    return len({_without_names(bodies[line.split("calls=%")[1].split(",")[0]]) for line in calls})


def _without_names(body: str) -> str:
    numbers: dict[str, str] = {}
    body = re.sub(r", metadata=\{[^}]*\}", "", body)
    return re.sub(r"%[\w.-]+", lambda name: numbers.setdefault(name[0], f"%{len(numbers)}"), body)
