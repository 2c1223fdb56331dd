"""What each primitive of JAX does with a parameter: the one table to extend.

- `Follow`: only the form of a parameter changes. Its axes go on.
- `Read`: a parameter meets data, in a way whose per-example gradient is known.

Any other operation computes something derived from a parameter. That is harmless for a weight penalty; where it meets
data, the parameter gets the gradient's own factors. A new entry is a function like `_read_product` and its name in
`_TABLE`; the name of a product stands in `PRODUCTS`, too, and that of a change of form in `_WHOLE` and `_MOVES`.
Programs inside an equation are looked into before (`equations.called`). `register_primitive` adds a user's operations.
What operations do with the axes of data is said here, too (`placed`, `indexed`).
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
# Operations on arrays of one shape, or of ones in the place of some of its lengths.
ELEMENTWISE: dict[str, Callable[..., jax.Array]] = {
    **{name: getattr(lax, name) for name in ("add", "sub", "mul", "div", "max", "min", "pow", "select_n")},
    "add_any": lax.add,
}
_MOVES = frozenset({*FORMS, "rev", "tile", "slice", "split", "unstack"})
DENSE = Dense()


class Follow(NamedTuple):
    """The same parameter in another form.

    Attributes:
      axes: the axes of each result.
      moved: for each result, pairs of a leaf axis and how many entries of it lie before the first one that is kept.
    """

    axes: tuple[Axes, ...]
    moved: tuple[tuple[tuple[int, int], ...], ...] = ((),)


@dataclasses.dataclass(frozen=True)
class Read:
    """A parameter meets data: all that a tap has to know of the operation.

    Attributes:
      op: `"dense"`, `"conv"`, `"embedding"`, `"mul"` or `"add"`.
      name: of the primitive.
      operand: which input the parameter is.
      other: which input the data is.
      x_axes: axes of the data in terms of the leaf (dense), of its patches (conv) or of the counts of rows (embedding).
      y_axes: axes of the result; what is not the leaf's is foreign.
      dtype: in which sums over rows are formed.
      batched: leaf atoms that are a batch axis of the operation: independent copies.
      rows: pairs of positions among all atoms of `y_axes` and of `x_axes`: the same examples and positions.
      geometry: brings the data to the normal form.
      sign: -1 where the parameter is subtracted.
      divides: whether the data is divided by rather than multiplied with.
      groups: which input says how many rows each copy reads, one after the other, if that is data.
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

# A reason in words says why an operation is not followed. None: neither a `Follow` nor a `Read` of this operand.
Meaning = Follow | Read | str | None
# A rule gets an equation, which of its inputs is the parameter, the axes of that, and those of all inputs taken as
# arrays of data, of which it reads those of the other input.
Rule = Callable[[Any, int, Axes, Sequence[Axes]], Meaning]


def meaning(eqn: Any, operand: int, axes: Axes, data: Sequence[Axes]) -> Meaning:
    """What an equation does with a parameter that is its input number `operand`.

    Args:
      eqn: the equation.
      operand: which of its inputs.
      axes: of the parameter.
      data: of all inputs, as arrays of data.
    """
    like = registered(eqn)
    if callable(like):
        return _alike(eqn, like, operand, axes, data)
    rule = _TABLE.get(eqn.primitive.name)
    return rule(eqn, operand, axes, data) if rule else None


def is_product(eqn: Any) -> bool:
    """Whether an equation is a matrix product or convolution, or like one."""
    like = registered(eqn)
    return (_single(eqn, like)[0] if callable(like) else eqn).primitive.name in PRODUCTS


def placed(eqn: Any, data: Sequence[Axes]) -> list[Axes] | None:
    """The axes of each result of an equation of data; None where nothing is known but their lengths."""
    name, shapes = eqn.primitive.name, [tuple(v.aval.shape) for v in eqn.invars]
    outs = [tuple(var.aval.shape) for var in eqn.outvars]
    if name in _MOVES and len(eqn.invars) == 1:
        meaning = _TABLE[name](eqn, 0, data[0], data)
        return list(meaning.axes) if isinstance(meaning, Follow) else None
    if name in ("concatenate", "stack"):
        return [_side_by_side(eqn, data, outs[0])]
    if name == "dot_general":
        contract, batch = parameter(eqn, "dimension_numbers")
        free = [[a for k, a in enumerate(data[i]) if k not in contract[i] and k not in batch[i]] for i in (0, 1)]
        return [(*(data[0][k] for k in batch[0]), *free[0], *free[1])]
    if name == "conv_general_dilated" and parameter(eqn, "batch_group_count") == 1:
        numbers = parameter(eqn, "dimension_numbers")
        result = [foreign(size) for size in outs[0]]
        result[numbers.out_spec[0]] = data[0][numbers.lhs_spec[0]]
        return [tuple(result)]
    if name == "sort":
        lost = parameter(eqn, "dimension")
        return [
            tuple(mixed(outs[0][k]) if k == lost and holds_examples(a) else a for k, a in enumerate(axes))
            for axes in data
        ]
    if name in REDUCTIONS and len(eqn.invars) == 1:
        return [tuple(axis for k, axis in enumerate(data[0]) if k not in parameter(eqn, "axes"))]
    if len(outs) == 1 and name != "dynamic_update_slice":
        alike = [axes for axes, shape in zip(data, shapes, strict=True) if _broadcasts(shape, outs[0])]
        if alike and math.prod(outs[0]) > 1:
            return [tuple(_agreed(axis, outs[0][k]) for k, axis in enumerate(zip(*alike, strict=True)))]
    return None


def indexed(eqn: Any, data: Sequence[Axes], fresh: Sequence[bool]) -> Axes:
    """Returns the axes of the result of a gather or scatter of data; `fresh` tells which indices do not depend on data.

    What data choose along the axis of the examples is in no order that is known.
    """
    numbers, out = parameter(eqn, "dimension_numbers"), tuple(eqn.outvars[0].aval.shape)
    if eqn.primitive.name != "gather":
        chosen = {k for k, fixed in zip(numbers.scatter_dims_to_operand_dims, fresh, strict=True) if not fixed}
        grown = zip(data[0], out, strict=True)
        return tuple(mixed(size) if k in chosen and holds_examples(a) else a for k, (a, size) in enumerate(grown))
    table, sizes = tuple(eqn.invars[0].aval.shape), parameter(eqn, "slice_sizes")
    chosen = {k for k, fixed in zip(numbers.start_index_map, fresh, strict=True) if not fixed and sizes[k] < table[k]}
    lost = any(holds_examples(data[0][k]) for k in chosen)
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    whole = iter([a if sizes[k] == table[k] else foreign(sizes[k]) for k, a in enumerate(data[0]) if k not in gone])
    rows = iter(
        mixed(size) if lost and holds_examples(axis) and k not in numbers.start_indices_batching_dims else axis
        for k, (axis, size) in enumerate(zip(data[1][:-1], eqn.invars[1].aval.shape, strict=False))
    )
    return tuple(next(whole if k in numbers.offset_dims else rows) for k in range(len(out)))


def _broadcasts(shape: tuple[int, ...], out: tuple[int, ...]) -> bool:
    """Whether an operand of an elementwise operation may have this shape."""
    return len(shape) == len(out) > 0 and all(length in (1, size) for length, size in zip(shape, out, strict=True))


def _agreed(axes: Sequence[Axis], size: int) -> Axis:
    """Returns the axis of a result whose operands have these axes: examples of one operand are those of the result."""
    whole = {axis for axis in axes if math.prod(atom.size for atom in axis) == size}
    in_order = {axis for axis in whole if holds_examples(axis) and all(atom.axis != axes_lib.MIXED for atom in axis)}
    if len(in_order) == 1:
        return in_order.pop()
    return mixed(size) if any(map(holds_examples, whole)) else foreign(size)


def _side_by_side(eqn: Any, data: Sequence[Axes], out: tuple[int, ...]) -> Axes:
    stacked = eqn.primitive.name == "stack"
    along = parameter(eqn, "axis" if stacked else "dimension")
    parts = [(*axes[:along], (), *axes[along:]) if stacked else axes for axes in data]
    result = [_agreed(axis, size) for axis, size in zip(zip(*parts, strict=True), out, strict=True)]
    joined = {axes[along] for axes in parts}
    unlike = mixed(out[along]) if any(map(holds_examples, joined)) else foreign(out[along])
    one = joined.pop() if len(joined) == 1 else unlike
    equal = math.prod(atom.size for atom in one) * len(parts) == out[along]
    result[along] = (*foreign(len(parts)), *one) if equal else one
    return tuple(result)


def _cast(eqn: Any, axes: Axes) -> Axes | None:
    return axes if jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating) else None


def _reversed(eqn: Any, axes: Axes) -> Axes:
    return tuple(axes_lib.flip(a) if k in parameter(eqn, "dimensions") else a for k, a in enumerate(axes))


def _reshaped(eqn: Any, axes: Axes) -> Axes | None:
    order = parameter(eqn, "dimensions") if eqn.primitive.name == "reshape" else None
    axes = axes if order is None else tuple(axes[k] for k in order)  # of the transposed array, if it says so
    return axes_lib.reshape(axes, eqn.outvars[0].aval.shape)


def _broadcast(eqn: Any, axes: Axes) -> Axes:
    total = eqn.outvars[0].aval.shape
    operand = zip(axes, eqn.invars[0].aval.shape, strict=True)
    source: dict[int, tuple[Axis, int]] = dict(zip(parameter(eqn, "broadcast_dimensions"), operand, strict=True))
    pairs = [source.get(k, ((), 1)) for k in range(len(total))]
    return broadcast_axes([axis for axis, _ in pairs], [size for _, size in pairs], total)


# The axes of the result of each operation that keeps all entries of its one array; None where they cannot be told.
_WHOLE: dict[str, Callable[[Any, Axes], Axes | None]] = {
    **dict.fromkeys(IDENTITIES, _cast),
    **dict.fromkeys(("reshape", "squeeze", "expand_dims"), _reshaped),
    "broadcast_in_dim": _broadcast,
    "transpose": lambda eqn, axes: tuple(axes[k] for k in parameter(eqn, "permutation")),
    "rev": _reversed,
    "tile": lambda eqn, axes: tuple((*foreign(n), *a) for n, a in zip(parameter(eqn, "reps"), axes, strict=True)),
}


def _follow_whole(eqn: Any, operand: int, axes: Axes, data: Sequence[Axes]) -> Meaning:
    """Follows an operation that keeps all entries of its one array."""
    form = _WHOLE[eqn.primitive.name](eqn, axes)
    return None if form is None else Follow((form,))


def _follow_parts(eqn: Any, operand: int, axes: Axes, data: Sequence[Axes]) -> Meaning:
    """Follows slices at places that do not depend on data, each to the box of entries that is left."""
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
            lengths = [1] * len(eqn.outvars) if name == "unstack" else parameter(eqn, "sizes")
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


def broadcast_axes(axes: Sequence[Axis], shape: Sequence[int], total: Sequence[int]) -> Axes:
    """Axes of an operand after an elementwise operation has broadcast it from `shape` to `total`."""
    if len(shape) != len(total):  # a scalar, which has no axes of its own
        return tuple(foreign(size) for size in total)
    return tuple(axis if n == size else foreign(size) for axis, n, size in zip(axes, shape, total, strict=True))


def _read_elementwise(eqn: Any, operand: int, axes: Axes, data: Sequence[Axes]) -> Meaning:
    """Reads a sum or a product of two arrays, element by element."""
    name, out = eqn.primitive.name, eqn.outvars[0].aval.shape
    y_axes = broadcast_axes(axes, eqn.invars[operand].aval.shape, out)
    sign = -1 if name == "sub" and operand == 1 else 1
    return _read(eqn, operand, "add" if name in SUMS else "mul", y_axes, y_axes, sign=sign, divides=name == "div")


def _read_product(eqn: Any, operand: int, axes: Axes, data: Sequence[Axes]) -> Meaning:
    """Reads a product whose input number `operand` is a kernel; None for a broadcast one, which is an activation."""
    contract, batch = parameter(eqn, "dimension_numbers")
    x = eqn.invars[1 - operand].aval
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return "it is multiplied with complex data, whose statistics are not implemented"
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
        if not axes_lib.is_broadcast([axes[w_axis]]):  # else the same kernel for all of its entries
            x_axes[k] = axes[w_axis]
    free_w, free_x = [axes[k] for k in w_free], [x_axes[k] for k in x_free]
    y_axes = (*(x_axes[k] for k in x_batch), *(free_w + free_x if operand == 0 else free_x + free_w))
    batched = tuple(axes_lib.atoms_of(x_axes[k] for k in x_batch))
    rows = _rows(y_axes, tuple(x_axes), [*x_batch, *x_free])
    return _read(eqn, operand, "dense", x_axes, y_axes, batched=batched, rows=rows)


def _read_ragged_product(eqn: Any, operand: int, axes: Axes, data: Sequence[Axes]) -> Meaning:
    """A product of each group of rows with a kernel of its own, `lax.ragged_dot`."""
    numbers = parameter(eqn, "ragged_dot_dimension_numbers")
    contract, batch = numbers.dot_dimension_numbers
    x, groups = eqn.invars[0].aval, axes[0] if axes else ()
    plain = tuple(map(tuple, contract)) == ((1,), (1,)) and not any(batch) and x.ndim == 2
    if not plain or tuple(numbers.lhs_ragged_dimensions) != (0,) or tuple(numbers.rhs_group_dimensions) != (0,):
        return "of ragged products only those of lax.ragged_dot have statistics, whose groups are of rows of the data"
    in_order = list(groups) == sorted(groups, key=lambda atom: atom.memory_order)
    if operand != 1 or axes_lib.is_broadcast(axes) or not in_order or any(atom.flipped for atom in groups):
        return "the kernels of its groups are not in the order of the parameter"
    rows = data[0][0]
    same = tuple((k, k) for k in range(len(rows)))
    return _read(eqn, 1, "dense", (rows, axes[1]), (rows, axes[2]), batched=groups, rows=same, groups=2)


def _rows(y_axes: Axes, x_axes: Axes, order: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """`Read.rows`, where the axes of `x_axes` with rows come in `order` in the result."""
    starts = [sum(map(len, x_axes[:k])) for k in range(len(x_axes))]
    in_x = [starts[k] + p for k in order for p, atom in enumerate(x_axes[k]) if not atom.of_leaf]
    in_y = [p for p, atom in enumerate(axes_lib.flatten(y_axes)) if not atom.of_leaf]
    return tuple(zip(in_y, in_x, strict=True))


def _read_convolution(eqn: Any, operand: int, axes: Axes, data: Sequence[Axes]) -> Meaning:
    """Groups of channels are independent copies: each reads its part of the input channels, and writes its outputs."""
    numbers = parameter(eqn, "dimension_numbers")
    if operand == 0:
        return "it is the image of a convolution, not its kernel"
    if axes_lib.is_broadcast(axes):
        return "a broadcast kernel"
    if parameter(eqn, "batch_group_count") != 1:
        return f"batch_group_count={parameter(eqn, 'batch_group_count')} is not supported"
    groups = parameter(eqn, "feature_group_count")
    lhs, kernel, out = (tuple(var.aval.shape) for var in (*eqn.invars, *eqn.outvars))
    out_channel, in_channel, *window = numbers.rhs_spec
    channels = out[numbers.out_spec[1]]
    split = axes_lib.reshape((axes[out_channel],), (groups, channels // groups))
    if split is None:
        return f"feature_group_count={groups} cuts across axes of the parameter"
    group, outputs = split
    images = data[0][numbers.lhs_spec[0]]
    if len(images) > 1:  # patches are of one axis of images
        images = mixed(lhs[numbers.lhs_spec[0]])
    positions = [foreign(out[k]) for k in numbers.out_spec[2:]]
    x_axes = (images, *positions, *(axes[k] for k in window), group + axes[in_channel])
    y_axes = [foreign(size) for size in out]
    y_axes[numbers.out_spec[0]], y_axes[numbers.out_spec[1]] = images, group + outputs
    # Axes of the patches: the images, the positions in the order of `out_spec`, the window and channels.
    axis_of = dict(zip((numbers.out_spec[0], *numbers.out_spec[2:]), range(len(out)), strict=False))
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
    return _read(eqn, operand, "conv", x_axes, y_axes, batched=group, rows=rows, geometry=geometry)


def _read_lookup(eqn: Any, operand: int, axes: Axes, data: Sequence[Axes]) -> Meaning:
    """A gather that takes whole rows of a table, one for each index; None if it is another."""
    if operand != 0:
        return None
    numbers, mode, sizes = parameter(eqn, "dimension_numbers"), parameter(eqn, "mode"), parameter(eqn, "slice_sizes")
    table, out = eqn.invars[0].aval.shape, tuple(eqn.outvars[0].aval.shape)
    taken = [k for k, size in enumerate(sizes) if size != table[k]] or list(numbers.collapsed_slice_dims)
    if len(taken) != 1 or taken[0] not in numbers.start_index_map or sizes[taken[0]] != 1:
        return None
    (row_axis,) = taken
    if (
        numbers.operand_batching_dims
        or axes_lib.is_broadcast(axes)
        or not set(numbers.collapsed_slice_dims) <= {row_axis}
    ):
        return None
    drop = mode == GatherScatterMode.FILL_OR_DROP
    # A slice along the whole of an axis starts at its beginning, whatever its index says, if that is clamped.
    alone = len(numbers.start_index_map) == 1 and (drop or mode == GatherScatterMode.PROMISE_IN_BOUNDS)
    positions = [k for k in range(len(out)) if k not in numbers.offset_dims]
    if not (alone or mode == GatherScatterMode.CLIP) or not positions:
        return None
    row = iter([() if k == row_axis else axis for k, axis in enumerate(axes) if k not in numbers.collapsed_slice_dims])
    looked_up = iter(data[1][:-1])
    y_axes = [next(looked_up) if k in positions else next(row) for k in range(len(out))]
    geometry = Lookup(table[row_axis], tuple(numbers.start_index_map).index(row_axis), drop)
    return _read(eqn, 0, "embedding", (axes[row_axis],), y_axes, geometry=geometry)


def _read(eqn: Any, operand: int, op: str, x_axes: Sequence[Axis], y_axes: Sequence[Axis], **more: Any) -> Read:
    """Makes the read of an operation of two arrays. Sums over rows have the widest dtype of its inputs and results."""
    dtype = jnp.result_type(*{accumulator(var.aval.dtype) for var in (*eqn.invars[:2], *eqn.outvars)})
    return Read(op, eqn.primitive.name, operand, 1 - operand, tuple(x_axes), tuple(y_axes), dtype, **more)


_TABLE: dict[str, Rule] = {
    **dict.fromkeys(_WHOLE, _follow_whole),
    **dict.fromkeys(("slice", "split", "unstack"), _follow_parts),
    **dict.fromkeys(("add", "add_any", "sub", "mul", "div"), _read_elementwise),
    "neg": lambda eqn, operand, axes, data: Follow((axes,)),  # a scale of -1
    "dot_general": _read_product,
    "conv_general_dilated": _read_convolution,
    "gather": _read_lookup,
    "ragged_dot_general": _read_ragged_product,
}


def _single(eqn: Any, like: Callable[..., Any]) -> tuple[Any, list[Any]]:
    """The single operation that `like` is, and which of its variables each input of `eqn` is."""
    avals = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in eqn.invars]
    jaxpr: Any = jax.make_jaxpr(like)(*avals).jaxpr
    order = list(jaxpr.invars)
    while len(jaxpr.eqns) == 1 and (inner := called(jaxpr.eqns[0])) and inner[0] != "scan":
        inside_of = dict(zip(jaxpr.eqns[0].invars, inner[1].jaxpr.invars, strict=True))
        jaxpr, order = inner[1].jaxpr, [inside_of.get(var) for var in order]
    shapes = [[tuple(var.aval.shape) for var in outvars] for outvars in (jaxpr.outvars, eqn.outvars)]
    if len(jaxpr.eqns) != 1 or shapes[0] != shapes[1]:
        result = f"a result of shape {', '.join(map(str, shapes[1]))}"
        raise ValueError(
            f"register_primitive({name_of(eqn)}): like must be a single operation with {result}, but is\n{jaxpr}"
        )
    return jaxpr.eqns[0], order


def _alike(eqn: Any, like: Callable[..., Any], operand: int, axes: Axes, data: Sequence[Axes]) -> Meaning:
    """Returns the meaning of the operation that `like` is, with the inputs counted as those of `eqn`."""
    inner, order = _single(eqn, like)
    position = next((k for k, var in enumerate(inner.invars) if var is order[operand]), None)
    if position is None:
        return None
    places = [next((k for k, source in enumerate(order) if source is var), None) for var in inner.invars]
    result = meaning(inner, position, axes, [() if k is None else data[k] for k in places])
    if not isinstance(result, Read):
        return result
    other = places[result.other]
    if other is None:
        raise ValueError(
            f"register_primitive({name_of(eqn)}): like combines an array with a constant of its own, by "
            f"{inner.primitive.name}: let it be one operation of what it is given, lambda w: w.T or lambda x, w: x @ w"
        )
    return dataclasses.replace(result, operand=operand, other=other, name=name_of(eqn))
