"""Inspect and evaluate the equations of a jaxpr.

`program.py` builds a program's operations with these functions. `primitives.py` says how each operation treats a
parameter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend import core as jex
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.sharding import PartitionSpec

from kfac._capture.likelihoods import MarkName
from kfac._capture.parameters import (
    CALLS,
    array_type,
    inner_program,
    parameter,
    shapes,
)

SUMS = frozenset({"add", "add_any", "sub"})
IDENTITIES = frozenset(
    "convert_element_type copy copy_p name reduce_precision sharding_constraint pvary pcast reshard mesh_cast".split()
)
FORMS = frozenset("reshape squeeze expand_dims transpose broadcast_in_dim".split())
# Functions of single entries.
FUNCTIONS = frozenset(
    "abs acos acosh asin asinh atan atanh cbrt cos cosh digamma erf erf_inv erfc exp exp2 expm1 integer_pow lgamma log "
    "log1p logistic rsqrt sin sinh sqrt square tan tanh".split()
)
WITHOUT_GRADIENT = frozenset({"stop_gradient", "floor", "ceil", "round", "sign"})


def called(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """Return the program that replaces an equation, or None if the equation stays.

    It is the program that the equation calls once, or `mul` for a `dot_general` that scales an array.
    """
    name = eqn.primitive.name
    if name == "dot_general":
        return _elementwise_product(eqn)
    return inner_program(eqn, CALLS[name]) if name in CALLS else None


def _elementwise_product(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """Return a program with `mul` for a `dot_general` that scales an array, or None for any other `dot_general`.

    For example, `jnp.einsum("nd,d->nd", x, scale)` has the batch axis `d` and no contracted axis. Without this,
    each element of `scale` would count as a kernel with one input and one output.
    """
    contract, batch = parameter(eqn, "dimension_numbers")
    arrays = [array_type(var) for var in eqn.invars]
    scales = any(len(b) == x.ndim for b, x in zip(batch, arrays, strict=True))
    if contract[0] or not scales:
        return None
    dtype = array_type(eqn.outvars[0]).dtype
    rank = max(x.ndim for x in arrays)
    sharding = parameter(eqn, "out_sharding")

    def multiply(*operands):
        forms = []
        for x, axes in zip(operands, batch, strict=True):
            free = [k for k in range(x.ndim) if k not in axes]
            # The batch axes come first in the result.
            x = jnp.transpose(x, (*axes, *free)).astype(dtype)
            if sharding is not None:
                spec = (*sharding.spec, *[None] * rank)[: x.ndim]
                x = jax.reshard(x, sharding.update(spec=PartitionSpec(*spec)))
            forms.append(jnp.expand_dims(x, range(x.ndim, rank)))
        return forms[0] * forms[1]

    return jax.make_jaxpr(multiply)(*arrays)


def shardings(eqn: JaxprEqn) -> tuple[Sequence[object], Sequence[object]]:
    """Return the shardings that a `jit` inside the loss gives its arguments and results.

    JAX represents an array without a sharding by a special object. Calls other than `jit` have no shardings at all.
    """
    if eqn.primitive.name != "jit":
        return (), ()
    return parameter(eqn, "in_shardings"), parameter(eqn, "out_shardings")


def evaluate(within: Jaxpr, eqn: JaxprEqn, values: Sequence[Array]) -> list[Array]:
    """Evaluate an equation of the jaxpr `within` through the public `jaxpr_as_fun`."""
    variables = {}
    for var, value in zip(eqn.invars, values, strict=True):
        if not isinstance(var, jex.Literal):
            variables[var] = value
    # Copy the surrounding jaxpr, because a new jaxpr needs debugging information that no public function makes.
    jaxpr = within.replace(
        constvars=[],
        invars=list(variables),
        outvars=eqn.outvars,
        eqns=[eqn],
        effects=eqn.effects,
    )
    return jex.jaxpr_as_fun(ClosedJaxpr(jaxpr, ()))(*variables.values())


def mark(eqn: JaxprEqn) -> MarkName | None:
    """Return the name of a marked output, or None for other equations."""
    if eqn.primitive.name != "name":
        return None
    name = parameter(eqn, "name")
    return name if isinstance(name, MarkName) else None


def holds_mark(eqn: JaxprEqn) -> bool:
    """Return whether a program inside an equation marks an output."""
    for program in jax.tree.leaves(list(eqn.params.values())):
        if isinstance(program, ClosedJaxpr | Jaxpr):
            if any(mark(inner) or holds_mark(inner) for inner in program.eqns):
                return True
    return False


def sums(eqn: JaxprEqn) -> bool:
    """Return whether each result entry is a signed sum of input entries, or an input entry scaled by one number."""
    name = eqn.primitive.name
    if name in ("mul", "div"):
        first, second = map(math.prod, shapes(eqn.invars))
        return second == 1 or (first == 1 and name == "mul")
    return name in SUMS | IDENTITIES | FORMS | {"reduce_sum", "neg"}
