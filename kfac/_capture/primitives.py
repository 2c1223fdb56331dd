"""Define how each JAX primitive treats a parameter, in one table.

The rules in `_TABLE` distinguish two cases:

- `Follow`: the operation only changes the parameter's form. The capture keeps following its axes.
- `Read`: the operation combines the parameter with data, and its per-example gradients are known.

Any other operation computes a new array from the parameter. This is harmless if the array only enters a weight penalty.
If the array meets data, the parameter gets gradient factors.

To support another primitive, write a function like `_read_product` and enter it in `_TABLE`. Add a product's name to
`PRODUCTS` as well. A change in form goes into `_MOVES` and, if it keeps all entries, into `_WHOLE`, which `_TABLE`
includes.

The capture looks inside calls, remats and scans before it asks this table (`equations.called`). `register_primitive`
adds operations that users define. `placed` and `indexed` follow the axes of data.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.lax import GatherScatterMode

from kfac._capture import axes as axes_lib
from kfac._capture.axes import Atom, Axes, Axis, foreign, holds_examples, mixed
from kfac._capture.equations import FORMS, IDENTITIES, SUMS, called, name_of, registered
from kfac._capture.parameters import REDUCTIONS, parameter
from kfac._statistics.convolution import Convolution
from kfac._statistics.rows import Dense, Geometry, Lookup, accumulator

PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general"})
# Elementwise operations, whose operands broadcast to the result's shape.
ELEMENTWISE: dict[str, Callable[..., jax.Array]] = {
    **{
        name: getattr(lax, name)
        for name in ("add", "sub", "mul", "div", "max", "min", "pow", "select_n")
    },
    "add_any": lax.add,
}
_MOVES = frozenset({*FORMS, "rev", "tile", "slice", "split", "unstack"})
DENSE = Dense()


class Follow(NamedTuple):
    """The same parameter in another form.

    Attributes:
      axes: each result's axes.
      moved: for each result, pairs `(axis, count)`. The result starts `count` entries further along this leaf axis.
    """

    axes: tuple[Axes, ...]
    moved: tuple[tuple[tuple[int, int], ...], ...] = ((),)


@dataclasses.dataclass(frozen=True)
class Read:
    """An operation that combines a parameter with data, with all facts that a tap needs.

    Attributes:
      op: `"dense"`, `"conv"`, `"embedding"`, `"mul"` or `"add"`.
      name: the primitive's name, or the registered operation's name.
      operand: the parameter's position among the inputs.
      other: the data's position among the inputs.
      x_axes: axes for the data (dense), its patches (conv), the row counts (embedding) or the result (elementwise).
        Axes that the kernel shares, contracted or batched, consist of leaf atoms.
      y_axes: the result's axes. An atom outside the leaf holds examples or is foreign.
      dtype: dtype in which sums over rows are accumulated.
      batched: leaf atoms on a batch axis. Their entries are independent copies of the kernel.
      rows: pairs `(p, q)`: atom `p` of `y_axes` holds the same examples or positions as atom `q` of `x_axes`. Both are
        counted over all atoms.
      geometry: converts the data to the normal form.
      sign: -1 if the parameter is subtracted, otherwise 1.
      divides: whether the operation is a division.
      groups: in a ragged product, the position of the input with the group sizes. Each copy of the kernel reads a group
        of consecutive rows.
    """

    op: str
    name: str
    operand: int
    other: int
    x_axes: Axes
    y_axes: Axes
    dtype: Any
    batched: tuple[Atom, ...] = ()
    rows: tuple[tuple[int, int], ...] = ()
    geometry: Geometry = DENSE
    sign: int = 1
    divides: bool = False
    groups: int | None = None


# -- the table ---------------------------------------------------------------------------------------------------------

# A string is the reason why this operand has no exact statistics. None: the rules do not cover this use of the operand.
Meaning = Follow | Read | str | None
# A rule takes an equation, the parameter's position among its inputs, the parameter's axes, and all inputs' axes as
# data. In the last argument it only uses the axes of the other input.
Rule = Callable[[Any, int, Axes, Sequence[Axes]], Meaning]


def meaning(eqn: Any, operand: int, axes: Axes, data: Sequence[Axes]) -> Meaning:
    """Return what an equation does with a parameter.

    Args:
      eqn: the equation.
      operand: the parameter's position among the inputs.
      axes: the parameter's axes.
      data: the axes of all inputs as data.

    Raises:
      ValueError: the equation is a registered operation, and its `like` is not a single operation on its inputs.
    """
    like = registered(eqn)
    if callable(like):
        return _alike(eqn, like, operand, axes, data)
    rule = _TABLE.get(eqn.primitive.name)
    return rule(eqn, operand, axes, data) if rule else None


def is_product(eqn: Any) -> bool:
    """Return whether an equation is a matrix product or a convolution, or is registered as such."""
    like = registered(eqn)
    return (_single(eqn, like)[0] if callable(like) else eqn).primitive.name in PRODUCTS


def placed(eqn: Any, data: Sequence[Axes]) -> list[Axes] | None:
    """Return each result's axes for an equation on data, or None if only their lengths are known."""
    name, shapes = eqn.primitive.name, [tuple(v.aval.shape) for v in eqn.invars]
    outs = [tuple(var.aval.shape) for var in eqn.outvars]
    if name in _MOVES and len(eqn.invars) == 1:
        meaning = _TABLE[name](eqn, 0, data[0], data)
        return list(meaning.axes) if isinstance(meaning, Follow) else None
    if name in ("concatenate", "stack"):
        return [_side_by_side(eqn, data, outs[0])]
    if name == "dot_general":
        contract, batch = parameter(eqn, "dimension_numbers")
        free = [
            [
                a
                for k, a in enumerate(data[i])
                if k not in contract[i] and k not in batch[i]
            ]
            for i in (0, 1)
        ]
        return [(*(data[0][k] for k in batch[0]), *free[0], *free[1])]
    if name == "conv_general_dilated" and parameter(eqn, "batch_group_count") == 1:
        numbers = parameter(eqn, "dimension_numbers")
        result = [foreign(size) for size in outs[0]]
        result[numbers.out_spec[0]] = data[0][numbers.lhs_spec[0]]
        return [tuple(result)]
    if name == "sort":
        lost = parameter(eqn, "dimension")
        return [
            tuple(
                mixed(outs[0][k]) if k == lost and holds_examples(a) else a
                for k, a in enumerate(axes)
            )
            for axes in data
        ]
    if name in REDUCTIONS and len(eqn.invars) == 1:
        return [
            tuple(
                axis
                for k, axis in enumerate(data[0])
                if k not in parameter(eqn, "axes")
            )
        ]
    if len(outs) == 1 and name != "dynamic_update_slice":
        alike = [
            axes
            for axes, shape in zip(data, shapes, strict=True)
            if _broadcasts(shape, outs[0])
        ]
        if alike and math.prod(outs[0]) > 1:
            return [
                tuple(
                    _agreed(axis, outs[0][k])
                    for k, axis in enumerate(zip(*alike, strict=True))
                )
            ]
    return None


def indexed(eqn: Any, data: Sequence[Axes], fresh: Sequence[bool]) -> Axes:
    """Return the result's axes for a gather or scatter on data.

    If data-dependent indices select entries along an axis of examples, their order is unknown and the axis is `MIXED`.

    Args:
      eqn: the gather or scatter.
      data: the axes of all inputs.
      fresh: for each index component, whether it is independent of data.
    """
    numbers, out = parameter(eqn, "dimension_numbers"), tuple(eqn.outvars[0].aval.shape)
    if eqn.primitive.name != "gather":
        chosen = {
            k
            for k, fixed in zip(
                numbers.scatter_dims_to_operand_dims, fresh, strict=True
            )
            if not fixed
        }
        grown = zip(data[0], out, strict=True)
        return tuple(
            mixed(size) if k in chosen and holds_examples(a) else a
            for k, (a, size) in enumerate(grown)
        )
    table, sizes = tuple(eqn.invars[0].aval.shape), parameter(eqn, "slice_sizes")
    chosen = {
        k
        for k, fixed in zip(numbers.start_index_map, fresh, strict=True)
        if not fixed and sizes[k] < table[k]
    }
    lost = any(holds_examples(data[0][k]) for k in chosen)
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    whole = iter(
        [
            a if sizes[k] == table[k] else foreign(sizes[k])
            for k, a in enumerate(data[0])
            if k not in gone
        ]
    )
    rows = iter(
        mixed(size)
        if lost
        and holds_examples(axis)
        and k not in numbers.start_indices_batching_dims
        else axis
        for k, (axis, size) in enumerate(
            zip(data[1][:-1], eqn.invars[1].aval.shape, strict=False)
        )
    )
    return tuple(
        next(whole if k in numbers.offset_dims else rows) for k in range(len(out))
    )


def _broadcasts(shape: tuple[int, ...], out: tuple[int, ...]) -> bool:
    """Return whether an elementwise operation can broadcast an operand from `shape` to `out`."""
    return len(shape) == len(out) > 0 and all(
        length in (1, size) for length, size in zip(shape, out, strict=True)
    )


def _agreed(axes: Sequence[Axis], size: int) -> Axis:
    """Return an axis of an elementwise result from the operands' axes at this position.

    If exactly one axis with the full `size` has its examples in order, the result keeps this axis. Otherwise the result
    is `MIXED` if any such axis holds examples, and foreign if not.
    """
    whole = {axis for axis in axes if math.prod(atom.size for atom in axis) == size}
    in_order = {
        axis
        for axis in whole
        if holds_examples(axis) and all(atom.axis != axes_lib.MIXED for atom in axis)
    }
    if len(in_order) == 1:
        return in_order.pop()
    return mixed(size) if any(map(holds_examples, whole)) else foreign(size)


def _side_by_side(eqn: Any, data: Sequence[Axes], out: tuple[int, ...]) -> Axes:
    stacked = eqn.primitive.name == "stack"
    along = parameter(eqn, "axis" if stacked else "dimension")
    parts = [(*axes[:along], (), *axes[along:]) if stacked else axes for axes in data]
    result = [
        _agreed(axis, size)
        for axis, size in zip(zip(*parts, strict=True), out, strict=True)
    ]
    joined = {axes[along] for axes in parts}
    unlike = (
        mixed(out[along]) if any(map(holds_examples, joined)) else foreign(out[along])
    )
    one = joined.pop() if len(joined) == 1 else unlike
    equal = math.prod(atom.size for atom in one) * len(parts) == out[along]
    result[along] = (*foreign(len(parts)), *one) if equal else one
    return tuple(result)


def _cast(eqn: Any, axes: Axes) -> Axes | None:
    return axes if jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating) else None


def _reversed(eqn: Any, axes: Axes) -> Axes:
    return tuple(
        axes_lib.flip(a) if k in parameter(eqn, "dimensions") else a
        for k, a in enumerate(axes)
    )


def _reshaped(eqn: Any, axes: Axes) -> Axes | None:
    order = parameter(eqn, "dimensions") if eqn.primitive.name == "reshape" else None
    axes = (
        axes if order is None else tuple(axes[k] for k in order)
    )  # `dimensions` transposes before the reshape
    return axes_lib.reshape(axes, eqn.outvars[0].aval.shape)


def _broadcast(eqn: Any, axes: Axes) -> Axes:
    total = eqn.outvars[0].aval.shape
    operand = zip(axes, eqn.invars[0].aval.shape, strict=True)
    source: dict[int, tuple[Axis, int]] = dict(
        zip(parameter(eqn, "broadcast_dimensions"), operand, strict=True)
    )
    pairs = [source.get(k, ((), 1)) for k in range(len(total))]
    return broadcast_axes(
        [axis for axis, _ in pairs], [size for _, size in pairs], total
    )


# Operations that keep all entries of their only array. Each function returns the result's axes, or None if the result
# cannot be followed.
_WHOLE: dict[str, Callable[[Any, Axes], Axes | None]] = {
    **dict.fromkeys(IDENTITIES, _cast),
    **dict.fromkeys(("reshape", "squeeze", "expand_dims"), _reshaped),
    "broadcast_in_dim": _broadcast,
    "transpose": lambda eqn, axes: tuple(
        axes[k] for k in parameter(eqn, "permutation")
    ),
    "rev": _reversed,
    "tile": lambda eqn, axes: tuple(
        (*foreign(n), *a) for n, a in zip(parameter(eqn, "reps"), axes, strict=True)
    ),
}


def _follow_whole(eqn: Any, operand: int, axes: Axes, data: Sequence[Axes]) -> Meaning:
    """Follow an operation that keeps all entries of its only array."""
    form = _WHOLE[eqn.primitive.name](eqn, axes)
    return None if form is None else Follow((form,))


def _follow_parts(eqn: Any, operand: int, axes: Axes, data: Sequence[Axes]) -> Meaning:
    """Follow a slice, split or unstack to each result, if the result is a box in the leaf."""
    name, shape = eqn.primitive.name, eqn.invars[0].aval.shape
    strides = parameter(eqn, "strides") if name == "slice" else None
    if strides is not None and any(step != 1 for step in strides):
        return None
    results, moves = [], []
    for k, out in enumerate(eqn.outvars):
        first, sizes = [0] * len(shape), list(shape)
        if name == "slice":
            first, sizes = list(parameter(eqn, "start_indices")), list(out.aval.shape)
        else:
            axis = parameter(eqn, "axis")
            lengths = (
                [1] * len(eqn.outvars) if name == "unstack" else parameter(eqn, "sizes")
            )
            first[axis], sizes[axis] = sum(map(int, lengths[:k])), int(lengths[k])
        cuts = [axes_lib.cut(*cut) for cut in zip(axes, first, sizes, strict=True)]
        if any(part is None for part in cuts):
            return None
        left = [part[0] for part in cuts if part]
        if name == "unstack":
            del left[parameter(eqn, "axis")]
        results.append(tuple(left))
        moves.append(tuple(move for part in cuts if part for move in part[1]))
    return Follow(tuple(results), tuple(moves))


def broadcast_axes(
    axes: Sequence[Axis], shape: Sequence[int], total: Sequence[int]
) -> Axes:
    """Return an operand's axes after an elementwise operation has broadcast it from `shape` to `total`."""
    if len(shape) != len(total):  # a scalar has no axes
        return tuple(foreign(size) for size in total)
    return tuple(
        axis if n == size else foreign(size)
        for axis, n, size in zip(axes, shape, total, strict=True)
    )


def _read_elementwise(
    eqn: Any, operand: int, axes: Axes, data: Sequence[Axes]
) -> Meaning:
    """Read an elementwise sum, difference, product or quotient of two arrays."""
    name, out = eqn.primitive.name, eqn.outvars[0].aval.shape
    y_axes = broadcast_axes(axes, eqn.invars[operand].aval.shape, out)
    sign = -1 if name == "sub" and operand == 1 else 1
    return _read(
        eqn,
        operand,
        "add" if name in SUMS else "mul",
        y_axes,
        y_axes,
        sign=sign,
        divides=name == "div",
    )


def _read_product(eqn: Any, operand: int, axes: Axes, data: Sequence[Axes]) -> Meaning:
    """Read a matrix product with a kernel. Return None for a broadcast kernel, which is an activation."""
    contract, batch = parameter(eqn, "dimension_numbers")
    x = eqn.invars[1 - operand].aval
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return (
            "it is multiplied with complex data, whose statistics are not implemented"
        )
    w_contract, x_contract = contract[operand], contract[1 - operand]
    w_batch, x_batch = batch[operand], batch[1 - operand]
    w_free = [k for k in range(len(axes)) if k not in w_contract and k not in w_batch]
    x_free = [k for k in range(x.ndim) if k not in x_contract and k not in x_batch]
    if axes_lib.is_broadcast([axes[k] for k in (*w_contract, *w_free)]):
        return None
    x_axes = list(data[1 - operand])
    for k, w_axis in zip(x_contract, w_contract, strict=True):
        x_axes[k] = axes[w_axis]
    for k, w_axis in zip(x_batch, w_batch, strict=True):
        if not axes_lib.is_broadcast(
            [axes[w_axis]]
        ):  # along a broadcast axis, all entries share one kernel
            x_axes[k] = axes[w_axis]
    free_w, free_x = [axes[k] for k in w_free], [x_axes[k] for k in x_free]
    y_axes = (
        *(x_axes[k] for k in x_batch),
        *(free_w + free_x if operand == 0 else free_x + free_w),
    )
    batched = tuple(axes_lib.atoms_of(x_axes[k] for k in x_batch))
    rows = _rows(y_axes, tuple(x_axes), [*x_batch, *x_free])
    return _read(eqn, operand, "dense", x_axes, y_axes, batched=batched, rows=rows)


def _read_ragged_product(
    eqn: Any, operand: int, axes: Axes, data: Sequence[Axes]
) -> Meaning:
    """Read `lax.ragged_dot`, which multiplies each group of rows by a separate kernel."""
    numbers = parameter(eqn, "ragged_dot_dimension_numbers")
    contract, batch = numbers.dot_dimension_numbers
    x, groups = eqn.invars[0].aval, axes[0] if axes else ()
    plain = (
        tuple(map(tuple, contract)) == ((1,), (1,)) and not any(batch) and x.ndim == 2
    )
    if (
        not plain
        or tuple(numbers.lhs_ragged_dimensions) != (0,)
        or tuple(numbers.rhs_group_dimensions) != (0,)
    ):
        return "of ragged products only those of lax.ragged_dot have statistics, whose groups are of rows of the data"
    in_order = list(groups) == sorted(groups, key=lambda atom: atom.memory_order)
    if (
        operand != 1
        or axes_lib.is_broadcast(axes)
        or not in_order
        or any(atom.flipped for atom in groups)
    ):
        return "the kernels of its groups are not in the order of the parameter"
    rows = data[0][0]
    same = tuple((k, k) for k in range(len(rows)))
    return _read(
        eqn,
        1,
        "dense",
        (rows, axes[1]),
        (rows, axes[2]),
        batched=groups,
        rows=same,
        groups=2,
    )


def _rows(
    y_axes: Axes, x_axes: Axes, order: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """Return `Read.rows`. `order` lists the axes of `x_axes` that hold rows, in the result's order."""
    starts = [sum(map(len, x_axes[:k])) for k in range(len(x_axes))]
    in_x = [
        starts[k] + p
        for k in order
        for p, atom in enumerate(x_axes[k])
        if not atom.of_leaf
    ]
    in_y = [p for p, atom in enumerate(axes_lib.flatten(y_axes)) if not atom.of_leaf]
    return tuple(zip(in_y, in_x, strict=True))


def _read_convolution(
    eqn: Any, operand: int, axes: Axes, data: Sequence[Axes]
) -> Meaning:
    """Read a convolution's kernel.

    Channel groups are independent copies: each group reads its own input channels and writes its own output channels.
    """
    numbers = parameter(eqn, "dimension_numbers")
    if operand == 0:
        return "it is the image of a convolution, not its kernel"
    if axes_lib.is_broadcast(axes):
        return "a broadcast kernel"
    if parameter(eqn, "batch_group_count") != 1:
        return (
            f"batch_group_count={parameter(eqn, 'batch_group_count')} is not supported"
        )
    groups = parameter(eqn, "feature_group_count")
    lhs, kernel, out = (tuple(var.aval.shape) for var in (*eqn.invars, *eqn.outvars))
    out_channel, in_channel, *window = numbers.rhs_spec
    channels = out[numbers.out_spec[1]]
    split = axes_lib.reshape((axes[out_channel],), (groups, channels // groups))
    if split is None:
        return f"feature_group_count={groups} cuts across axes of the parameter"
    group, outputs = split
    images = data[0][numbers.lhs_spec[0]]
    if len(images) > 1:  # patches have their images on a single atom
        images = mixed(lhs[numbers.lhs_spec[0]])
    positions = [foreign(out[k]) for k in numbers.out_spec[2:]]
    x_axes = (images, *positions, *(axes[k] for k in window), group + axes[in_channel])
    y_axes = [foreign(size) for size in out]
    y_axes[numbers.out_spec[0]], y_axes[numbers.out_spec[1]] = images, group + outputs
    # The patches have these axes: images, positions in `out_spec` order, window, channels.
    axis_of = dict(
        zip((numbers.out_spec[0], *numbers.out_spec[2:]), range(len(out)), strict=False)
    )
    rows = _rows(tuple(y_axes), x_axes, [axis_of[k] for k in sorted(axis_of)])
    geometry = Convolution(
        spec=tuple(numbers.lhs_spec),
        window=tuple(kernel[k] for k in window),
        strides=tuple(parameter(eqn, "window_strides")),
        padding=tuple(map(tuple, parameter(eqn, "padding"))),
        lhs_dilation=tuple(parameter(eqn, "lhs_dilation")),
        rhs_dilation=tuple(parameter(eqn, "rhs_dilation")),
        out=tuple(out[k] for k in numbers.out_spec[2:]),
    )
    return _read(
        eqn,
        operand,
        "conv",
        x_axes,
        y_axes,
        batched=group,
        rows=rows,
        geometry=geometry,
    )


def _read_lookup(eqn: Any, operand: int, axes: Axes, data: Sequence[Axes]) -> Meaning:
    """Read a gather that takes one whole table row per index. Return None for any other gather."""
    if operand != 0:
        return None
    numbers, mode, sizes = (
        parameter(eqn, "dimension_numbers"),
        parameter(eqn, "mode"),
        parameter(eqn, "slice_sizes"),
    )
    table, out = eqn.invars[0].aval.shape, tuple(eqn.outvars[0].aval.shape)
    taken = [k for k, size in enumerate(sizes) if size != table[k]] or list(
        numbers.collapsed_slice_dims
    )
    if (
        len(taken) != 1
        or taken[0] not in numbers.start_index_map
        or sizes[taken[0]] != 1
    ):
        return None
    (row_axis,) = taken
    if (
        numbers.operand_batching_dims
        or axes_lib.is_broadcast(axes)
        or not set(numbers.collapsed_slice_dims) <= {row_axis}
    ):
        return None
    drop = mode == GatherScatterMode.FILL_OR_DROP
    # With CLIP, a slice as long as its axis always starts at 0, so the index may have other components as well.
    alone = len(numbers.start_index_map) == 1 and (
        drop or mode == GatherScatterMode.PROMISE_IN_BOUNDS
    )
    positions = [k for k in range(len(out)) if k not in numbers.offset_dims]
    if not (alone or mode == GatherScatterMode.CLIP) or not positions:
        return None
    row = iter(
        [
            () if k == row_axis else axis
            for k, axis in enumerate(axes)
            if k not in numbers.collapsed_slice_dims
        ]
    )
    looked_up = iter(data[1][:-1])
    y_axes = [next(looked_up) if k in positions else next(row) for k in range(len(out))]
    geometry = Lookup(
        table[row_axis], tuple(numbers.start_index_map).index(row_axis), drop
    )
    return _read(eqn, 0, "embedding", (axes[row_axis],), y_axes, geometry=geometry)


def _read(
    eqn: Any,
    operand: int,
    op: str,
    x_axes: Sequence[Axis],
    y_axes: Sequence[Axis],
    **more: Any,
) -> Read:
    """Build the `Read` of an operation on two arrays.

    Sums over rows are accumulated in the widest accumulator dtype among inputs and results.
    """
    dtype = jnp.result_type(
        *{accumulator(var.aval.dtype) for var in (*eqn.invars[:2], *eqn.outvars)}
    )
    return Read(
        op,
        eqn.primitive.name,
        operand,
        1 - operand,
        tuple(x_axes),
        tuple(y_axes),
        dtype,
        **more,
    )


_TABLE: dict[str, Rule] = {
    **dict.fromkeys(_WHOLE, _follow_whole),
    **dict.fromkeys(("slice", "split", "unstack"), _follow_parts),
    **dict.fromkeys(("add", "add_any", "sub", "mul", "div"), _read_elementwise),
    "neg": lambda eqn, operand, axes, data: Follow(
        (axes,)
    ),  # `find_reads` counts it as a scale of -1
    "dot_general": _read_product,
    "conv_general_dilated": _read_convolution,
    "gather": _read_lookup,
    "ragged_dot_general": _read_ragged_product,
}


def _single(eqn: Any, like: Callable[..., Any]) -> tuple[Any, list[Any]]:
    """Trace `like` and return its only equation, and the variable in it for each input of `eqn`.

    The variable is None for an input that does not reach the equation.

    Raises:
      ValueError: `like` is not a single operation, or its results do not have the shapes of `eqn`'s results.
    """
    avals = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in eqn.invars]
    jaxpr: Any = jax.make_jaxpr(like)(*avals).jaxpr
    order = list(jaxpr.invars)
    while (
        len(jaxpr.eqns) == 1 and (inner := called(jaxpr.eqns[0])) and inner[0] != "scan"
    ):
        inside_of = dict(zip(jaxpr.eqns[0].invars, inner[1].jaxpr.invars, strict=True))
        jaxpr, order = inner[1].jaxpr, [inside_of.get(var) for var in order]
    shapes = [
        [tuple(var.aval.shape) for var in outvars]
        for outvars in (jaxpr.outvars, eqn.outvars)
    ]
    if len(jaxpr.eqns) != 1 or shapes[0] != shapes[1]:
        result = f"a result of shape {', '.join(map(str, shapes[1]))}"
        raise ValueError(
            f"register_primitive({name_of(eqn)}): like must be a single operation with {result}, but is\n{jaxpr}"
        )
    return jaxpr.eqns[0], order


def _alike(
    eqn: Any, like: Callable[..., Any], operand: int, axes: Axes, data: Sequence[Axes]
) -> Meaning:
    """Return the meaning of the only equation in `like`, with inputs numbered as in `eqn`.

    Raises:
      ValueError: `like` is not a single operation, or combines an input with a constant.
    """
    inner, order = _single(eqn, like)
    position = next(
        (k for k, var in enumerate(inner.invars) if var is order[operand]), None
    )
    if position is None:
        return None
    places = [
        next((k for k, source in enumerate(order) if source is var), None)
        for var in inner.invars
    ]
    result = meaning(
        inner, position, axes, [() if k is None else data[k] for k in places]
    )
    if not isinstance(result, Read):
        return result
    other = places[result.other]
    if other is None:
        raise ValueError(
            f"register_primitive({name_of(eqn)}): like combines an array with a constant of its own, by "
            f"{inner.primitive.name}: let it be one operation of what it is given, lambda w: w.T or lambda x, w: x @ w"
        )
    return dataclasses.replace(result, operand=operand, other=other, name=name_of(eqn))
