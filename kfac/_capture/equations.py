"""Inspect and evaluate the equations of a jaxpr, and register a user's operations.

`program.py` builds a program's operations with these functions. `primitives.py` says how each operation treats a
parameter.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax import Array
from jax.extend import core as jex
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from kfac._capture.parameters import (
    CALLS,
    CUSTOM_DERIVATIVES,
    DEVICE_SUMS,
    inner_program,
    parameter,
    shapes,
)

SUMS = frozenset({"add", "add_any", "sub"})
IDENTITIES = frozenset(
    {
        "convert_element_type",
        "copy",
        "copy_p",
        "name",
        "reduce_precision",
        "sharding_constraint",
        "pvary",
        "pcast",
        "reshard",
        "mesh_cast",
    }
)
FORMS = frozenset(
    {"reshape", "squeeze", "expand_dims", "transpose", "broadcast_in_dim"}
)
_WITHOUT_GRADIENT = frozenset({"stop_gradient", "floor", "ceil", "round", "sign"})
# The programs inside these primitives only combine two elements, so they cannot hide a parameter.
_COMBINING = ("scatter", "reduce")


def called(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """Return the program that an equation calls once, or None for any other equation."""
    name = eqn.primitive.name
    if name in CALLS:
        return inner_program(eqn, CALLS[name])
    if name in CUSTOM_DERIVATIVES and registered(eqn) is LOOK_INSIDE:
        return inner_program(eqn, "call_jaxpr")
    return None


def body(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """Return the body of a scan or remat, or None for any other equation."""
    if eqn.primitive.name in ("remat2", "scan"):
        return inner_program(eqn, "jaxpr")
    return None


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


def evaluate_multiplier(
    within: Jaxpr, eqn: JaxprEqn, values: Sequence[Array]
) -> list[Array]:
    """Evaluate an equation on the multiplier of a parameter, which takes the parameter's place in `values`.

    For a registered operation, call its `like` function, because the operation itself may round.
    """
    like = registered(eqn)
    if callable(like):
        return [like(*values)]
    return evaluate(within, eqn, values)


def inside(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    """Yield the programs in an equation's parameters, except programs that only combine two elements."""
    if eqn.primitive.name.startswith(_COMBINING):
        return
    for value in eqn.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, ClosedJaxpr):
                yield item.jaxpr
            elif isinstance(item, Jaxpr):
                yield item


MARK = "kfac.mark_output/"  # prefix of a marked output's name


def mark(eqn: JaxprEqn) -> str:
    """Return `"likelihood/weight"` from the name of a marked output, or an empty string for other equations."""
    if eqn.primitive.name != "name":
        return ""
    name = parameter(eqn, "name")
    return name.removeprefix(MARK) if name.startswith(MARK) else ""


def holds_mark(eqn: JaxprEqn) -> bool:
    """Return whether a program inside an equation marks an output."""
    for jaxpr in inside(eqn):
        if any(mark(inner) or holds_mark(inner) for inner in jaxpr.eqns):
            return True
    return False


def devices_summed(eqn: JaxprEqn) -> tuple[str, ...]:
    """Return the device axes over which an equation sums."""
    if eqn.primitive.name in DEVICE_SUMS:
        return tuple(parameter(eqn, "axes"))
    return ()


def stops_gradient(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in _WITHOUT_GRADIENT


def sums(eqn: JaxprEqn) -> bool:
    """Return whether each result entry is a signed sum of input entries, or an input entry scaled by one number."""
    name = eqn.primitive.name
    if name in ("mul", "div"):
        first, second = map(math.prod, shapes(eqn.invars))
        return second == 1 or (first == 1 and name == "mul")
    return name in SUMS | IDENTITIES | FORMS | {"reduce_sum", "neg"}


# -- what a user has registered ----------------------------------------------------------------------------------------

LOOK_INSIDE = "look inside"

# A primitive, the position of a function in its source file, or the target name of a foreign function. Target names
# are unique in a process.
Key = jex.Primitive | str | tuple[str, int, str]
# Maps each registered operation to its `like` function, or to `LOOK_INSIDE`.
_REGISTERED: dict[Key, Callable[..., Any] | str] = {}


def register_primitive(
    operation: Callable[..., Any] | Any, like: Callable[..., Any] | None = None
) -> None:
    """Tell `find_layers` about an unknown operation: a custom derivative, a Pallas kernel or an FFI call.

    The operation itself still computes values and gradients. `like` says how parameters pass through the operation, and
    which statistics belong to it::

        kfac.register_primitive(my_matmul, lambda x, w: x @ w)  # reads the kernel w
        kfac.register_primitive(my_transpose, lambda w: w.T)    # only its form changes
        kfac.register_primitive(rounded, jnp.copy)              # not even that: its derivative is the identity
        kfac.register_primitive(my_block)                       # a function with a derivative of its own: look inside

    Without `like`, the body of a function with `jax.custom_vjp` or `jax.custom_jvp` is used instead. `find_layers`
    finds the layers in the body, and `value_and_grad` differentiates the body. The custom derivative must therefore be
    only a faster or more accurate way to compute the body's derivative.

    Args:
      operation: a function with a custom derivative, the kernel of a `pallas_call`, a primitive from `jax.extend.core`,
        or the target name of an `ffi_call` (a string).
      like: a function that takes the same arrays in the same order and consists of a single JAX operation: a product
        `x @ w` (`jnp.einsum`, `lax.dot_general`), a convolution or a change of shape. With None, look inside a function
        with a custom derivative. The kernel of a `pallas_call` has no body to look into, so None has no effect on it.

    Raises:
      ValueError: `operation` is not one of these, or is defined inside another function; or `like` is not a function,
        or is None for a primitive or a target name.
    """
    key = _key(operation)
    if key is None:
        raise ValueError(
            "operation must be a function with a custom derivative, the kernel of a pallas_call, a primitive, or the "
            f"target of an ffi_call, but is {operation!r}: define it at the top level of a module"
        )
    if like is not None and not callable(like):
        raise ValueError(f"like must be a function or None, but is {like!r}")
    if like is None and isinstance(operation, jex.Primitive | str):
        raise ValueError(
            f"like must be a function, since {operation!r} has no body to look into"
        )
    _REGISTERED[key] = LOOK_INSIDE if like is None else like


def _key(operation: object) -> Key | None:
    """Return the key of an operation in the registry, or None if the operation cannot be registered."""
    if isinstance(operation, jex.Primitive | str):
        return operation or None
    written = inspect.unwrap(operation) if callable(operation) else None
    while isinstance(written, functools.partial):
        written = written.func
    code = getattr(written, "__code__", None)
    # A function may define several such operations, and they cannot be told apart.
    if code is None or "<locals>" in code.co_qualname:
        return None
    return code.co_filename, code.co_firstlineno, code.co_name


def registered(eqn: JaxprEqn) -> Callable[..., Any] | str | None:
    """Return the `like` function or `LOOK_INSIDE` that a user has registered for an equation, otherwise None."""
    if not _REGISTERED:
        return None
    keys: list[Any] = [eqn.primitive, _target(eqn)]
    inner = next(inside(eqn), None)
    info: Any = None if inner is None else inner.debug_info
    if info is not None:
        place = info.func_filename, info.func_lineno
        keys.append((*place, info.func_name))
        if (
            eqn.primitive.name == "pallas_call"
            and parameter(eqn, "name") == info.func_name
        ):
            keys += [
                key
                for key in _REGISTERED
                if isinstance(key, tuple) and key[:2] == place
            ]
    return next((_REGISTERED[key] for key in keys if key in _REGISTERED), None)


def name_of(eqn: JaxprEqn) -> str:
    """Return the name of a registered operation, for messages."""
    inner = next(inside(eqn), None)
    name = eqn.primitive.name if inner is None else inner.debug_info.func_name
    return _target(eqn) or name


def _target(eqn: JaxprEqn) -> str | None:
    """Return the target name of the foreign function that an equation calls, or None for other equations."""
    if eqn.primitive.name == "ffi_call":
        return parameter(eqn, "target_name")
    return None
