"""Which axes of a kernel are inputs, outputs and copies in the operation that reads it."""

from __future__ import annotations

from typing import Any, NamedTuple

from jax.lax import GatherScatterMode

from kfac._capture import axes as axes_lib
from kfac._capture.axes import Atom, Axes, foreign

FILL_OR_DROP = GatherScatterMode.FILL_OR_DROP


class Operands(NamedTuple):
    """The axes of one equation in terms of a parameter leaf.

    Attributes:
      x_axes: axes of the other operand, of its patches (convolution), or of the counts of rows (lookup).
      y_axes: axes of the result.
      leading: length of the first axis that is not the parameter's; None without one.
      batched: leaf atoms that are independent copies.
    """

    x_axes: Axes
    y_axes: Axes
    leading: int | None
    batched: tuple[Atom, ...] = ()


def product(eqn: Any, axes: Axes, operand: int) -> Operands | None:
    """A `dot_general` whose operand number `operand` has these axes; None for a broadcast one, which is no kernel."""
    contract, batch = eqn.params["dimension_numbers"]
    x = eqn.invars[1 - operand].aval
    w_contract, x_contract = contract[operand], contract[1 - operand]
    w_batch, x_batch = batch[operand], batch[1 - operand]
    w_free = [k for k in range(len(axes)) if k not in w_contract and k not in w_batch]
    x_free = [k for k in range(x.ndim) if k not in x_contract and k not in x_batch]
    if axes_lib.is_broadcast(tuple(axes[k] for k in (*w_contract, *w_free))):
        return None
    x_axes: list[axes_lib.Axis] = [()] * x.ndim
    for k, w_axis in [*zip(x_contract, w_contract, strict=True), *zip(x_batch, w_batch, strict=True)]:
        x_axes[k] = axes[w_axis]
    for k in x_free:
        x_axes[k] = foreign(x.shape[k])
    free_w, free_x = [axes[k] for k in w_free], [x_axes[k] for k in x_free]
    y_axes = (*(axes[k] for k in w_batch), *(free_w + free_x if operand == 0 else free_x + free_w))
    examples = sorted([*x_free, *(k for k in x_batch if axes_lib.is_broadcast((x_axes[k],)))])
    batched = tuple(axes_lib.atoms_of(axes[k] for k in w_batch))
    return Operands(tuple(x_axes), y_axes, x.shape[examples[0]] if examples else None, batched)


def lookup(eqn: Any, axes: Axes) -> Operands | None:
    """A `gather` that takes whole rows of a table, one for each index; None if it is another."""
    numbers, mode = eqn.params["dimension_numbers"], eqn.params["mode"]
    out = eqn.outvars[0].aval.shape
    rows = row_axis(eqn)
    if rows is None or numbers.operand_batching_dims or axes_lib.is_broadcast(axes):
        return None
    # A slice along the whole of an axis starts at its beginning, whatever its index says, if that is clamped.
    alone = len(numbers.start_index_map) == 1 and mode in (FILL_OR_DROP, GatherScatterMode.PROMISE_IN_BOUNDS)
    positions = [k for k in range(len(out)) if k not in numbers.offset_dims]
    if not (alone or mode == GatherScatterMode.CLIP) or not positions:
        return None
    row = iter([() if k == rows else axis for k, axis in enumerate(axes) if k not in numbers.collapsed_slice_dims])
    y_axes = tuple(foreign(size) if k in positions else next(row) for k, size in enumerate(out))
    return Operands((axes[rows],), y_axes, out[positions[0]])


def row_axis(eqn: Any) -> int | None:
    """The one axis of which a `gather` takes a single element, while it takes the others whole."""
    numbers, table = eqn.params["dimension_numbers"], eqn.invars[0].aval.shape
    taken = [k for k, size in enumerate(eqn.params["slice_sizes"]) if size != table[k]]
    taken = taken or list(numbers.collapsed_slice_dims)  # a table of one row
    (axis,) = taken if len(taken) == 1 else (None,)
    if axis is None or axis not in numbers.start_index_map or not set(numbers.collapsed_slice_dims) <= {axis}:
        return None
    return axis if eqn.params["slice_sizes"][axis] == 1 else None


def convolution(eqn: Any, axes: Axes) -> Operands | None:
    """A convolution whose kernel has these axes; None if its groups of channels cut across parts of an axis.

    Groups are independent copies: the first of them reads the first channels, and its are the first outputs.
    """
    numbers, groups = eqn.params["dimension_numbers"], eqn.params["feature_group_count"]
    lhs, out = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    out_channel, in_channel, *window = numbers.rhs_spec
    channels = out[numbers.out_spec[1]]
    split = axes_lib.reshape((axes[out_channel],), (groups, channels // groups))
    if split is None:
        return None
    group, outputs = split
    x_axes = (
        foreign(lhs[numbers.lhs_spec[0]]),
        *(foreign(out[k]) for k in numbers.out_spec[2:]),
        *(axes[k] for k in window),
        group + axes[in_channel],
    )
    y_axes = [foreign(size) for size in out]
    y_axes[numbers.out_spec[1]] = group + outputs
    return Operands(x_axes, tuple(y_axes), lhs[numbers.lhs_spec[0]], group)
