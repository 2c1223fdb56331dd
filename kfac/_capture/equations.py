"""What an equation of a jaxpr holds and does, and what a user has registered for it.

`program.py` turns equations into operations with what is here; `primitives.py` says what they do with a parameter.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax.extend import core as jex

from kfac._capture.parameters import CALLS, CUSTOM_DERIVATIVES, DEVICE_SUMS, inner_program, parameter

SUMS = frozenset({"add", "add_any", "sub"})
IDENTITIES = frozenset(
    {"convert_element_type", "copy", "copy_p", "name", "reduce_precision", "sharding_constraint", "pvary", "pcast"}
    | {"reshard", "mesh_cast"}
)
FORMS = frozenset({"reshape", "squeeze", "expand_dims", "transpose", "broadcast_in_dim"})
_WITHOUT_GRADIENT = frozenset({"stop_gradient", "floor", "ceil", "round", "sign"})
# Their parameters hold how two elements combine, which is no program that swallows a parameter.
_COMBINING = ("scatter", "reduce")


def called(eqn: Any) -> tuple[str, Any] | None:
    """Return the kind of an equation with a program inside, and this program as a closed jaxpr.

    The kind is `"call"`, `"remat"` or `"scan"`. The result is None for any other equation.
    """
    name = eqn.primitive.name
    if name in CALLS:
        return "call", inner_program(eqn, CALLS[name])
    if name == "remat2":
        return "remat", inner_program(eqn, "jaxpr")
    if name == "scan":
        return "scan", inner_program(eqn, "jaxpr")
    if name in CUSTOM_DERIVATIVES and registered(eqn) is LOOK_INSIDE:
        return "call", inner_program(eqn, "call_jaxpr")
    return None


def shardings(eqn: Any) -> tuple[Sequence[Any], Sequence[Any]]:
    """Return the shardings that a `jit` inside the loss gives its arguments and results.

    JAX has an object of its own for an array without a sharding. Calls other than `jit` have no shardings at all.
    """
    if eqn.primitive.name != "jit":
        return (), ()
    return parameter(eqn, "in_shardings"), parameter(eqn, "out_shardings")


def evaluate(within: Any, eqn: Any, values: Sequence[Any]) -> list[Any]:
    """Evaluates one equation of the jaxpr `within`, through the public `jaxpr_as_fun`."""
    variables = {var: value for var, value in zip(eqn.invars, values, strict=True) if not isinstance(var, jex.Literal)}
    # A copy of the jaxpr around it, because a new one wants debugging information that no public function makes.
    jaxpr = within.replace(constvars=[], invars=list(variables), outvars=eqn.outvars, eqns=[eqn], effects=eqn.effects)
    return jex.jaxpr_as_fun(jex.ClosedJaxpr(jaxpr, ()))(*variables.values())


def evaluate_multiplier(within: Any, eqn: Any, values: Sequence[Any]) -> list[Any]:
    """As `evaluate`, of what a parameter is multiplied by; a registered operation, which may round, by its `like`."""
    like = registered(eqn)
    return [like(*values)] if callable(like) else evaluate(within, eqn, values)


def inside(eqn: Any) -> Iterator[Any]:
    """The programs among the parameters of an equation, but for those that only combine two elements."""
    if eqn.primitive.name.startswith(_COMBINING):
        return
    for value in eqn.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, jex.ClosedJaxpr):
                yield item.jaxpr
            elif isinstance(item, jex.Jaxpr):
                yield item


MARK = "kfac.output/"  # how the name of a marked output begins


def mark(eqn: Any) -> str:
    """What the name of a marked output says, `"likelihood/weight"`; empty for other equations."""
    name = parameter(eqn, "name") if eqn.primitive.name == "name" else ""
    return name.removeprefix(MARK) if name.startswith(MARK) else ""


def holds_mark(eqn: Any) -> bool:
    """Whether an output is marked in a program inside an equation."""
    return any(mark(inner) or holds_mark(inner) for jaxpr in inside(eqn) for inner in jaxpr.eqns)


def devices_summed(eqn: Any) -> tuple[str, ...]:
    """The named axes of devices over which an equation sums."""
    return tuple(parameter(eqn, "axes")) if eqn.primitive.name in DEVICE_SUMS else ()


def stops_gradient(eqn: Any) -> bool:
    return eqn.primitive.name in _WITHOUT_GRADIENT


def sums(eqn: Any) -> bool:
    """Tells whether the result is a sum of entries of the inputs, or one of these times a number."""
    if eqn.primitive.name in ("mul", "div"):
        sizes = [math.prod(var.aval.shape) for var in eqn.invars]
        return sizes[1] == 1 or (sizes[0] == 1 and eqn.primitive.name == "mul")
    return eqn.primitive.name in {*SUMS, "reduce_sum", "neg", *IDENTITIES, *FORMS}


# -- what a user has registered ----------------------------------------------------------------------------------------

LOOK_INSIDE = "look inside"

# By what is registered, what it is like, or `LOOK_INSIDE`: a primitive, where a function stands in its file, or the
# name of the target of a foreign function, which all of a process share.
_REGISTERED: dict[Any, Callable[..., Any] | str] = {}


def register_primitive(operation: Callable[..., Any] | Any, like: Callable[..., Any] | None = None) -> None:
    """Says what an operation is that `find_layers` does not know: a custom derivative, a Pallas kernel, an FFI call.

    The operation itself goes on to compute values and gradients. What it is like tells how parameters pass through it
    and which statistics belong to it::

        kfac.register_primitive(my_matmul, lambda x, w: x @ w)  # reads the kernel w
        kfac.register_primitive(my_transpose, lambda w: w.T)    # only its form changes
        kfac.register_primitive(rounded, jnp.copy)              # not even that: its derivative is the identity
        kfac.register_primitive(my_block)                       # a function with a derivative of its own: look inside

    Without `like`, a function with `jax.custom_vjp` or `jax.custom_jvp` is taken for what is written in it, so its
    layers are found, and it is differentiated as written: its custom derivative must be no more than a faster or
    more accurate way to that.

    Args:
      operation: a function with a custom derivative; the kernel of a `pallas_call`; a primitive of
        `jax.extend.core`; or of an `ffi_call` the name of its target, a string.
      like: a function of the same arrays, in the same order, that is a single operation of JAX: a product `x @ w`
        (`jnp.einsum`, `lax.dot_general`), a convolution, a change of form. None: look inside.

    Raises:
      ValueError: `operation` is none of these, or `like` no function.
    """
    key = _key(operation)
    if key is None:
        raise ValueError(
            "operation must be a function with a custom derivative, the kernel of a pallas_call, a primitive, or the "
            f"target of an ffi_call, but is {operation!r}: define it at the top level of a module"
        )
    if like is not None and not callable(like):
        raise ValueError(f"like must be a function or None, but is {like!r}")
    _REGISTERED[key] = LOOK_INSIDE if like is None else like


def _key(operation: Any) -> Any:
    """What stands for an operation in the table."""
    if isinstance(operation, jex.Primitive) or (isinstance(operation, str) and operation):
        return operation
    written = inspect.unwrap(operation) if callable(operation) else None
    while isinstance(written, functools.partial):
        written = written.func
    code = getattr(written, "__code__", None)
    if code is None or "<locals>" in code.co_qualname:
        return None  # of those that one function makes several times, none can be told from the others
    return code.co_filename, code.co_firstlineno, code.co_name


def registered(eqn: Any) -> Callable[..., Any] | str | None:
    """What a user has said that an equation is like."""
    if not _REGISTERED:
        return None
    keys: list[Any] = [eqn.primitive, _target(eqn)]
    inner = next(inside(eqn), None)
    if inner is not None and (info := inner.debug_info) is not None:
        place = info.func_filename, info.func_lineno
        keys.append((*place, info.func_name))
        if eqn.primitive.name == "pallas_call" and parameter(eqn, "name") == info.func_name:
            keys += [key for key in _REGISTERED if isinstance(key, tuple) and key[:2] == place]
    return next((_REGISTERED[key] for key in keys if key in _REGISTERED), None)


def name_of(eqn: Any) -> str:
    """Names a registered operation, for messages."""
    inner = next(inside(eqn), None)
    return _target(eqn) or (inner.debug_info.func_name if inner is not None else eqn.primitive.name)


def _target(eqn: Any) -> str | None:
    """Return the name of the foreign function that an equation calls."""
    return parameter(eqn, "target_name") if eqn.primitive.name == "ffi_call" else None
