"""A loss function as a jaxpr, and the way into the jaxprs inside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core as jex

Path = tuple[int, ...]  # equation indices, from the outermost jaxpr inwards

CALLS = frozenset({"jit", "pjit", "closed_call", "core_call", "core_closed_call"})
REMATS = frozenset({"checkpoint", "remat", "remat2"})
PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})


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


def contains_product(eqn: Any) -> bool:
    return eqn.primitive.name in PRODUCTS or any(
        contains_product(inner) for jaxpr in subjaxprs(eqn) for inner in jaxpr.eqns
    )


def equations_along(traced: Trace, path: Sequence[int]) -> list[Any]:
    """The equations along a path, the one it ends at last."""
    jaxpr = traced.closed.jaxpr
    found = []
    for index in path:
        found.append(jaxpr.eqns[index])
        if len(found) < len(path):
            jaxpr, _ = inner_jaxpr(found[-1])
    return found
