"""Define how each JAX primitive treats a parameter, in two tables.

The rules distinguish two cases:

- `Follow`: the operation only changes the parameter's form. The capture keeps following its axes (`MOVES`).
- `Read`: the operation combines the parameter with data, and its per-example gradients are known (`READS`).

Any other operation computes a new array from the parameter. This is harmless if the array only enters a weight penalty.
If the array meets data, the parameter gets gradient factors.

To support another primitive, write a function like `_read_product` and enter it in `READS`. Add a product's name to
`PRODUCTS` as well. A change in form goes into `axis_rules.MOVES`.

The capture looks inside calls, remats and scans before it asks these tables (`equations.called`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn
from jax.lax import GatherScatterMode

from kfac._capture.axes import (
    Atom,
    Axes,
    Axis,
    atoms_of,
    flatten,
    foreign,
    insert,
    is_broadcast,
    mixed,
    remaining,
    reshape,
    take,
)
from kfac._capture.axis_rules import MOVES, DataAxes, Follow, broadcast_axes, cast
from kfac._capture.equations import IDENTITIES, SUMS
from kfac._capture.parameters import array_type, parameter, result_shape, shapes
from kfac._statistics.convolution import Convolution
from kfac._statistics.rows import Lookup, accumulator

PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general"})
# Elementwise operations with two operands.
BINARY = SUMS | {"mul", "div", "max", "min", "pow"}
# The dimension numbers of `lax.ragged_dot`.
_RAGGED_DOT = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))


@dataclass(frozen=True)
class Read:
    """An operation that combines a parameter with data, with all facts that a tap needs.

    Attributes:
      op: `"dense"`, `"conv"` or `"embedding"`; `"add"` for a sum or difference, `"mul"` for any other elementwise
        operation; `"copy"` if each example gets a copy of the parameter.
      operand: the parameter's position among the inputs.
      x_axes: axes for the data (dense), its patches (conv), the row counts (embedding) or the result (elementwise).
        Axes that the kernel shares, contracted or batched, consist of leaf atoms.
      y_axes: the result's axes. An atom outside the leaf holds examples or is foreign.
      dtype: dtype in which sums over rows are accumulated.
      batched: leaf atoms on a batch axis. Their entries are independent copies of the kernel.
      rows: pairs `(p, q)`: atom `p` of `y_axes` holds the same examples or positions as atom `q` of `x_axes`. Both are
        counted over all atoms.
      geometry: the convolution or lookup; None for any other operation.
      sign: -1 if the parameter is subtracted, otherwise 1.
      groups: in a ragged product, the position of the input with the group sizes. Each copy of the kernel reads a group
        of consecutive rows.
    """

    op: str
    operand: int
    x_axes: Axes
    y_axes: Axes
    dtype: Any
    batched: tuple[Atom, ...] = ()
    rows: tuple[tuple[int, int], ...] = ()
    geometry: Convolution | Lookup | None = None
    sign: int = 1
    groups: int | None = None

    @property
    def other(self) -> int:
        """The data's position among the inputs."""
        return 1 - self.operand


# -- the tables --------------------------------------------------------------------------------------------------------

# A string is the reason why this operand has no exact statistics. None: the rules do not cover this use of the operand.
Meaning = Follow | Read | str | None
# A rule takes an equation, the parameter's position among its inputs, the parameter's axes, and all inputs' axes as
# data. In the last argument it only uses the axes of the other input.
Rule = Callable[[JaxprEqn, int, Axes, DataAxes], Meaning]


def meaning(eqn: JaxprEqn, operand: int, axes: Axes, data: DataAxes) -> Meaning:
    """Return what an equation does with a parameter.

    Args:
      eqn: the equation.
      operand: the parameter's position among the inputs.
      axes: the parameter's axes.
      data: the axes of all inputs as data.
    """
    name = eqn.primitive.name
    if name in MOVES:
        return MOVES[name](eqn, axes)
    if name in IDENTITIES or name == "neg":  # `find_reads` counts -1 as a scale
        return cast(eqn, axes)
    if name in READS:
        return READS[name](eqn, operand, axes, data)
    return None


def _read(
    eqn: JaxprEqn, operand: int, op: str, x_axes: Axes, y_axes: Axes, **more: Any
) -> Read:
    """Build the `Read` of an operation on two arrays.

    Sums over rows are accumulated in the widest accumulator dtype among inputs and results.
    """
    arrays = map(array_type, (*eqn.invars[:2], *eqn.outvars))
    dtype = jnp.result_type(*(accumulator(array.dtype) for array in arrays))
    return Read(op, operand, x_axes, y_axes, dtype, **more)


def _read_elementwise(eqn: JaxprEqn, operand: int, axes: Axes, data: DataAxes) -> Read:
    """Read an elementwise function of two arrays."""
    name = eqn.primitive.name
    shape = shapes(eqn.invars)[operand]
    y_axes = broadcast_axes(axes, shape, result_shape(eqn))
    sign = -1 if name == "sub" and operand == 1 else 1
    op = "add" if name in SUMS else "mul"
    return _read(eqn, operand, op, y_axes, y_axes, sign=sign)


def _read_product(eqn: JaxprEqn, operand: int, axes: Axes, data: DataAxes) -> Meaning:
    """Read a matrix product with a kernel. Return None for a broadcast kernel, which is an activation."""
    other = 1 - operand
    if jnp.issubdtype(array_type(eqn.invars[other]).dtype, jnp.complexfloating):
        return (
            "it is multiplied with complex data, whose statistics are not implemented"
        )
    contract, batch = parameter(eqn, "dimension_numbers")
    x_axes = list(data[other])
    x_batch = batch[other]
    w_shared = (*contract[operand], *batch[operand])
    x_shared = (*contract[other], *x_batch)
    w_free = remaining(len(axes), w_shared)
    x_free = remaining(len(x_axes), x_shared)
    if is_broadcast(take(axes, (*contract[operand], *w_free))):
        return None
    for k, w_axis in zip(x_shared, take(axes, w_shared), strict=True):
        # Along a broadcast batch axis, all entries share one kernel.
        if not is_broadcast([w_axis]):
            x_axes[k] = w_axis
    free = [take(x_axes, x_free)]
    free.insert(operand, take(axes, w_free))
    batch_axes = take(x_axes, x_batch)
    y_axes = sum(free, batch_axes)
    return _read(
        eqn,
        operand,
        "dense",
        tuple(x_axes),
        y_axes,
        batched=tuple(atoms_of(batch_axes)),
        rows=_rows(y_axes, x_axes, (*x_batch, *x_free)),
    )


def _read_ragged_product(
    eqn: JaxprEqn, operand: int, axes: Axes, data: DataAxes
) -> Meaning:
    """Read `lax.ragged_dot`, which multiplies each group of rows by a separate kernel."""
    numbers = parameter(eqn, "ragged_dot_dimension_numbers")
    if numbers != _RAGGED_DOT or len(data[0]) != 2:
        return "of ragged products only those of lax.ragged_dot have statistics, whose groups are of rows of the data"
    groups = axes[0]
    in_order = list(groups) == sorted(groups, key=lambda atom: atom.memory_order)
    flipped = any(atom.flipped for atom in groups)
    if operand != 1 or is_broadcast(axes) or not in_order or flipped:
        return "the kernels of its groups are not in the order of the parameter"
    rows = data[0][0]
    return _read(
        eqn,
        operand,
        "dense",
        (rows, axes[1]),
        (rows, axes[2]),
        batched=groups,
        rows=tuple((k, k) for k in range(len(rows))),
        groups=2,
    )


def _rows(
    y_axes: Axes, x_axes: Sequence[Axis], order: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """Return `Read.rows`. `order` lists the axes of `x_axes` that hold rows, in the result's order."""
    starts = [0, *itertools.accumulate(map(len, x_axes))]
    in_x = []
    for k in order:
        atoms = enumerate(x_axes[k], starts[k])
        in_x += [p for p, atom in atoms if not atom.of_leaf]
    atoms = enumerate(flatten(y_axes))
    in_y = [p for p, atom in atoms if not atom.of_leaf]
    return tuple(zip(in_y, in_x, strict=True))


def _read_convolution(
    eqn: JaxprEqn, operand: int, axes: Axes, data: DataAxes
) -> Meaning:
    """Read a convolution's kernel.

    Channel groups are independent copies: each group reads its own input channels and writes its own output channels.
    """
    if operand == 0:
        return "it is the image of a convolution, not its kernel"
    if is_broadcast(axes):
        return "a broadcast kernel"
    batch_groups = parameter(eqn, "batch_group_count")
    if batch_groups != 1:
        return f"batch_group_count={batch_groups} is not supported"
    numbers = parameter(eqn, "dimension_numbers")
    out_channel, in_channel, *window = numbers.rhs_spec
    image_axis, channel_axis, *positions = numbers.out_spec
    lhs, kernel = shapes(eqn.invars)
    out = result_shape(eqn)
    groups = parameter(eqn, "feature_group_count")
    group_shape = groups, out[channel_axis] // groups
    split = reshape((axes[out_channel],), group_shape)
    if split is None:
        return f"feature_group_count={groups} cuts across axes of the parameter"
    group, outputs = split
    images = data[0][numbers.lhs_spec[0]]
    if len(images) > 1:  # patches have their images on a single atom
        images = mixed(lhs[numbers.lhs_spec[0]])
    y_axes = list(map(foreign, out))
    # The patches have these axes: images, positions in `out_spec` order, window, channels.
    x_axes = (
        images,
        *take(y_axes, positions),
        *take(axes, window),
        group + axes[in_channel],
    )
    y_axes[image_axis] = images
    y_axes[channel_axis] = group + outputs
    row_axes = [image_axis, *positions]
    order = sorted(range(len(row_axes)), key=row_axes.__getitem__)
    geometry = Convolution(
        spec=numbers.lhs_spec,
        window=tuple(kernel[k] for k in window),
        strides=parameter(eqn, "window_strides"),
        padding=parameter(eqn, "padding"),
        lhs_dilation=parameter(eqn, "lhs_dilation"),
        rhs_dilation=parameter(eqn, "rhs_dilation"),
        out=tuple(out[k] for k in positions),
    )
    return _read(
        eqn,
        operand,
        "conv",
        x_axes,
        tuple(y_axes),
        batched=group,
        rows=_rows(tuple(y_axes), x_axes, order),
        geometry=geometry,
    )


def _read_lookup(
    eqn: JaxprEqn, operand: int, axes: Axes, data: DataAxes
) -> Read | None:
    """Read a gather that takes one whole table row per index. Return None for any other gather."""
    numbers = parameter(eqn, "dimension_numbers")
    sizes = parameter(eqn, "slice_sizes")
    table = shapes(eqn.invars)[0]
    collapsed = numbers.collapsed_slice_dims
    index_map = numbers.start_index_map
    taken = [k for k, size in enumerate(sizes) if size != table[k]]
    taken = taken or list(collapsed)
    if operand != 0 or len(taken) != 1 or is_broadcast(axes):
        return None
    (row_axis,) = taken
    whole_rows = sizes[row_axis] == 1 and set(collapsed) <= {row_axis}
    if not whole_rows or row_axis not in index_map or numbers.operand_batching_dims:
        return None
    mode = parameter(eqn, "mode")
    drops = mode == GatherScatterMode.FILL_OR_DROP
    in_bounds = drops or mode == GatherScatterMode.PROMISE_IN_BOUNDS
    # With CLIP, a slice as long as its axis always starts at 0, so the index may have other components as well.
    single = in_bounds and len(index_map) == 1
    if not single and mode != GatherScatterMode.CLIP:
        return None
    if len(numbers.offset_dims) == len(result_shape(eqn)):
        return None
    row = list(axes)
    row[row_axis] = ()
    kept = take(row, remaining(len(row), collapsed))
    y_axes = insert(data[1][:-1], numbers.offset_dims, kept)
    return _read(
        eqn,
        operand,
        "embedding",
        (axes[row_axis],),
        y_axes,
        geometry=Lookup(table[row_axis], tuple(index_map).index(row_axis), drops),
    )


READS: dict[str, Rule] = {
    **dict.fromkeys(BINARY, _read_elementwise),
    "dot_general": _read_product,
    "conv_general_dilated": _read_convolution,
    "gather": _read_lookup,
    "ragged_dot_general": _read_ragged_product,
}
