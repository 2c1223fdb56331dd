"""What an operation leaves of what is known: the axes of a parameter, and that an array holds no examples."""

from __future__ import annotations

from collections.abc import Sequence

from jax.extend import core as jex

from kfac._capture import axes as axes_lib
from kfac._capture.axes import Axes
from kfac._capture.reads import Data, State, View
from kfac._capture.trace import CALLS

_IDENTITIES = frozenset(
    {"convert_element_type", "copy", "copy_p", "name", "reduce_precision", "sharding_constraint", "pvary", "pcast"}
    | {"reshard", "mesh_cast"}
)
PARTS = frozenset({"slice", "split", "unstack"})


def spread(axes: Axes, shape: Sequence[int], total: Sequence[int]) -> Axes:
    """Axes of an operand after an elementwise operation has broadcast it from `shape` to `total`."""
    if len(shape) != len(total):  # a scalar, which has no axes of its own
        return tuple(axes_lib.foreign(size) for size in total)
    return tuple(
        axis if own == size else axes_lib.foreign(size) for axis, own, size in zip(axes, shape, total, strict=True)
    )


def cut(eqn, view: View, k: int) -> tuple[Axes, tuple[int, ...]] | None:
    """Axes and start of result `k` of an equation that takes parts; None if it cannot be followed."""
    name, params, shape = eqn.primitive.name, eqn.params, eqn.invars[0].aval.shape
    first, sizes = [0] * len(shape), list(shape)
    if name == "slice":
        if params["strides"] is not None and any(step != 1 for step in params["strides"]):
            return None
        first, sizes = list(params["start_indices"]), list(eqn.outvars[0].aval.shape)
    elif name == "split":
        axis, lengths = params["axis"], params["sizes"]
        first[axis], sizes[axis] = sum(map(int, lengths[:k])), int(lengths[k])
    else:  # unstack
        axis = params["axis"]
        first[axis], sizes[axis] = k, 1
    start, axes = list(view.start), []
    for axis, begin, size in zip(view.axes, first, sizes, strict=True):
        found = axes_lib.cut(axis, begin, size)
        if found is None:
            return None
        axes.append(found[0])
        for leaf_axis, moved in found[1]:
            start[leaf_axis] += moved
    if name == "unstack":
        del axes[params["axis"]]
    return tuple(axes), tuple(start)


def keeps_values(eqn) -> bool:
    shape_ops = ("reshape", "squeeze", "expand_dims", "transpose", "broadcast_in_dim")
    return eqn.primitive.name in _IDENTITIES or eqn.primitive.name in shape_ops


def follow(eqn, axes: Axes) -> Axes | None:
    """Axes after an operation on shape or dtype; None if the operation is another."""
    name = eqn.primitive.name
    out = eqn.outvars[0].aval
    if name in _IDENTITIES:
        return axes
    if name == "transpose":
        return tuple(axes[k] for k in eqn.params["permutation"])
    if name == "broadcast_in_dim":
        return axes_lib.broadcast(axes, eqn.invars[0].aval.shape, out.shape, eqn.params["broadcast_dimensions"])
    if name in ("squeeze", "expand_dims"):
        return axes_lib.reshape(axes, out.shape)
    if name == "rev":
        return tuple(axes_lib.flip(a) if k in eqn.params["dimensions"] else a for k, a in enumerate(axes))
    if name == "reshape":  # of the transposed array, if it says so
        order = eqn.params["dimensions"]
        return axes_lib.reshape(axes if order is None else tuple(axes[k] for k in order), out.shape)
    return None


def is_fixed(eqn, states: Sequence[State]) -> bool:
    """Whether a result depends on no array argument. Zeros may be the initial state of a batch: they do not count."""
    if eqn.primitive.name in CALLS and not states:
        return False
    own = [s for var, s in zip(eqn.invars, states, strict=True) if not isinstance(var, jex.Literal)]
    if not own:
        return eqn.primitive.name != "broadcast_in_dim"
    return all(isinstance(s, Data) and s.fixed for s in own)


def fixed_in_scan(body: jex.Jaxpr, fixed: Sequence[bool], num_consts: int, num_carry: int) -> list[bool]:
    """Which inputs of a scan's body depend on no array argument in any iteration, as a counter of iterations does.

    Args:
      body: the jaxpr of an iteration.
      fixed: whether each input is so in the first iteration.
      num_consts: how many inputs come before those that are carried on.
      num_carry: how many are.
    """
    fixed = list(fixed)
    while True:
        known = {var for var, constant in zip(body.invars, fixed, strict=True) if constant}
        for eqn in body.eqns:
            own = [var for var in eqn.invars if not isinstance(var, jex.Literal)]
            if all(var in known for var in own) and (own or eqn.primitive.name != "broadcast_in_dim"):
                known.update(eqn.outvars)
        leaving = [isinstance(var, jex.Literal) or var in known for var in body.outvars[:num_carry]]
        still = [
            constant and (not num_consts <= k < num_consts + num_carry or leaving[k - num_consts])
            for k, constant in enumerate(fixed)
        ]
        if still == fixed:
            return fixed
        fixed = still
