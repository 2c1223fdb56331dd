"""What each primitive of JAX does with a parameter: the one table to extend.

- `Follow`: only the form of a parameter changes. Its axes go on.
- `Read`: a parameter meets data, in a way whose per-example gradient is known.
- `Call`: a program inside, to be looked into.

A primitive that is in none of the three makes what is derived from a parameter: harmless for a weight penalty, refused
where it meets data. `register_primitive` adds entries for operations of a user's own.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex
from jax.lax import GatherScatterMode

from kfac._capture import axes as axes_lib
from kfac._capture.axes import Atom, Axes, foreign
from kfac._statistics.convolution import Convolution
from kfac._statistics.rows import Dense, Geometry, Lookup, accumulator

PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general"})
SUMS = frozenset({"add", "add_any", "sub"})
# Operations on arrays of one shape, or of ones in the place of some of its lengths.
ELEMENTWISE: dict[str, Callable[..., jax.Array]] = {
    **{name: getattr(lax, name) for name in ("add", "sub", "mul", "div", "max", "min", "pow", "select_n")},
    "add_any": lax.add,
}
_CALLS = frozenset({"jit", "pjit", "closed_call", "core_call", "core_closed_call"})
_REMATS = frozenset({"checkpoint", "remat", "remat2"})
_IDENTITIES = frozenset(
    {"convert_element_type", "copy", "copy_p", "name", "reduce_precision", "sharding_constraint", "pvary", "pcast"}
    | {"reshard", "mesh_cast"}
)
_FORMS = frozenset({"reshape", "squeeze", "expand_dims", "transpose", "broadcast_in_dim"})
_WITHOUT_GRADIENT = frozenset({"stop_gradient", "floor", "ceil", "round", "sign"})
# Their parameters hold how two elements combine, which is no program that swallows a parameter.
_COMBINING = ("scatter", "reduce")


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
      shape: shape of the result.
      dtype: in which sums over rows are formed.
      leading: length of the first axis that is not the parameter's; None without one.
      batched: leaf atoms that are a batch axis of the operation: independent copies.
      rows: pairs of positions among all atoms of `y_axes` and of `x_axes`: the same examples and positions.
      images: for a convolution, its pair of `rows` that are the images, if there are several.
      reorders: whether the result may have examples and positions in another order than the data.
      geometry: brings the data to the normal form.
      sign: -1 where the parameter is subtracted.
      divides: whether the data is divided by rather than multiplied with.
      repeats: how often the operation reads each entry of the parameter with the same data, as `jnp.repeat` makes it.
      x_box: which entries of the data meet the parameter, if not all.
      y_box: which entries of the result it takes part in.
      groups: which input says how many rows each copy reads, one after the other, if that is data.
    """

    op: str
    name: str
    operand: int
    other: int
    x_axes: Axes
    y_axes: Axes
    shape: tuple[int, ...]
    dtype: Any
    leading: int | None
    batched: tuple[Atom, ...] = ()
    rows: tuple[tuple[int, int], ...] = ()
    images: tuple[int, int] | None = None
    reorders: bool = False
    geometry: Geometry = DENSE
    sign: int = 1
    divides: bool = False
    repeats: int = 1
    x_box: axes_lib.Box | None = None
    y_box: axes_lib.Box | None = None
    groups: int | None = None


class Scan(NamedTuple):
    """Of a scan's inputs, how many are the same in each iteration, and how many are carried on; its length."""

    consts: int
    carried: int
    length: int


class Call(NamedTuple):
    """A program inside an equation: of `"call"`, `"remat"` or `"scan"`.

    Of `"rule"` it is the rule of a `jax.custom_jvp` function: its arguments are the inputs and then the tangents of
    those that have one, its results the tangents of the results.
    """

    kind: str
    jaxpr: Any
    consts: Sequence[Any]
    scan: Scan | None = None


# -- what is inside ----------------------------------------------------------------------------------------------------


def call(eqn: Any, rules: bool = False) -> Call | None:
    """The program inside an equation, if it can be looked into; with `rules`, that may be a rule for derivatives."""
    name = eqn.primitive.name
    kind = "call" if name in _CALLS else "remat" if name in _REMATS else "scan" if name == "scan" else None
    if kind is None and _looked_into(eqn):
        kind = "call"
    if kind is None:
        return _rule(eqn) if rules and name == "custom_jvp_call" and contains_product(eqn) else None
    inner = eqn.params["jaxpr" if "jaxpr" in eqn.params else "call_jaxpr"]
    jaxpr, consts = (inner.jaxpr, inner.consts) if isinstance(inner, jex.ClosedJaxpr) else (inner, ())
    if kind != "scan":
        return Call(kind, jaxpr, consts)
    return Call(kind, jaxpr, consts, Scan(*(eqn.params[key] for key in ("num_consts", "num_carry", "length"))))


def evaluate(within: Any, eqn: Any, values: Sequence[Any]) -> list[Any]:
    """Results of one equation of the jaxpr `within`; it is bound only through the public `jaxpr_as_fun`."""
    variables = {var: value for var, value in zip(eqn.invars, values, strict=True) if not isinstance(var, jex.Literal)}
    # A copy of the jaxpr around it, because a new one wants debugging information that no public function makes.
    jaxpr = within.replace(constvars=[], invars=list(variables), outvars=eqn.outvars, eqns=[eqn], effects=eqn.effects)
    return jex.jaxpr_as_fun(jex.ClosedJaxpr(jaxpr, ()))(*variables.values())


def _rule(eqn: Any) -> Call:
    moving = [jnp.issubdtype(var.aval.dtype, jnp.inexact) for var in eqn.invars]

    def tangents_of(primals, tangents):
        some, within = iter(tangents), eqn.params["call_jaxpr"].jaxpr
        own = [next(some) if m else np.zeros(x.shape, jax.dtypes.float0) for m, x in zip(moving, primals, strict=True)]
        outs, found = jax.jvp(lambda *values: evaluate(within, eqn, values), tuple(primals), tuple(own))
        return [t if t.dtype == x.dtype else jnp.zeros_like(x) for t, x in zip(found, outs, strict=True)]

    primals = [var.aval for var in eqn.invars]  # which tell over which devices they vary
    closed = jax.make_jaxpr(tangents_of)(primals, list(itertools.compress(primals, moving)))
    return Call("rule", closed.jaxpr, closed.consts)


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


def contains(eqn: Any, wanted: Callable[[Any], bool]) -> bool:
    """Whether an equation, or one inside it, is wanted."""
    return wanted(eqn) or any(contains(inner, wanted) for jaxpr in inside(eqn) for inner in jaxpr.eqns)


def contains_product(eqn: Any) -> bool:
    return contains(eqn, is_product)


def is_product(eqn: Any) -> bool:
    """Whether an equation is a matrix product or convolution, or like one."""
    like = _like(eqn)
    return (eqn if like is None else _single(eqn, like)[0]).primitive.name in PRODUCTS


def is_named(eqn: Any, prefix: str) -> str | None:
    """Of a `checkpoint_name` that begins with `prefix`, the rest."""
    name = eqn.params["name"] if eqn.primitive.name == "name" else ""
    return name.removeprefix(prefix) if name.startswith(prefix) else None


def added_axes(eqn: Any) -> list[int]:
    """Which axes of length above one the result of a `broadcast_in_dim` has that its input has not, or repeats."""
    shape = eqn.outvars[0].aval.shape
    given = zip(eqn.params["broadcast_dimensions"], eqn.invars[0].aval.shape, strict=True)
    own = {k for k, size in given if size == shape[k]}
    return [k for k, size in enumerate(shape) if k not in own and size > 1]


def joins(eqn: Any) -> int | None:
    """The axis along which an equation puts its inputs side by side, if it does."""
    name = {"concatenate": "dimension", "stack": "axis"}.get(eqn.primitive.name)
    return eqn.params[name] if name else None


def stops_gradient(eqn: Any) -> bool:
    return eqn.primitive.name in _WITHOUT_GRADIENT


def sums(eqn: Any) -> bool:
    """Whether the result is a sum of entries of the inputs, or of one with a number for a factor."""
    if eqn.primitive.name in ("mul", "div"):
        sizes = [math.prod(var.aval.shape) for var in eqn.invars]
        return sizes[1] == 1 or (sizes[0] == 1 and eqn.primitive.name == "mul")
    return eqn.primitive.name in SUMS or eqn.primitive.name in ("reduce_sum", "neg") or keeps_values(eqn)


def keeps_values(eqn: Any) -> bool:
    """Whether the result has the values of the one input, in another form."""
    return eqn.primitive.name in _IDENTITIES or eqn.primitive.name in _FORMS


# -- the table ---------------------------------------------------------------------------------------------------------

# A refusal is a reason in words. None: neither a `Follow` nor a `Read` of this operand.
Meaning = Follow | Read | str | None
Rule = Callable[[Any, int, Axes], Meaning]


def meaning(eqn: Any, operand: int, axes: Axes) -> Meaning:
    """What an equation does with a parameter that is its input number `operand` and has these axes."""
    like = _like(eqn)
    if like is not None:
        return _alike(eqn, like, operand, axes)
    rule = _TABLE.get(eqn.primitive.name)
    return rule(eqn, operand, axes) if rule else None


def _same(eqn: Any, operand: int, axes: Axes) -> Meaning:
    if not jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating):
        return None
    return Follow((axes,))


def _transpose(eqn: Any, operand: int, axes: Axes) -> Meaning:
    return Follow((tuple(axes[k] for k in eqn.params["permutation"]),))


def _broadcast(eqn: Any, operand: int, axes: Axes) -> Meaning:
    old, new = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    return Follow((axes_lib.broadcast(axes, old, new, eqn.params["broadcast_dimensions"]),))


def _reshape(eqn: Any, operand: int, axes: Axes) -> Meaning:
    order = eqn.params.get("dimensions") if eqn.primitive.name == "reshape" else None
    axes = axes if order is None else tuple(axes[k] for k in order)  # of the transposed array, if it says so
    found = axes_lib.reshape(axes, eqn.outvars[0].aval.shape)
    return None if found is None else Follow((found,))


def _tile(eqn: Any, operand: int, axes: Axes) -> Meaning:
    return Follow((tuple((*foreign(times), *axis) for times, axis in zip(eqn.params["reps"], axes, strict=True)),))


def _reverse(eqn: Any, operand: int, axes: Axes) -> Meaning:
    return Follow((tuple(axes_lib.flip(a) if k in eqn.params["dimensions"] else a for k, a in enumerate(axes)),))


def _parts(eqn: Any, operand: int, axes: Axes) -> Meaning:
    """Slices at places that do not depend on data."""
    name, params, shape = eqn.primitive.name, eqn.params, eqn.invars[0].aval.shape
    if name == "slice" and params["strides"] is not None and any(step != 1 for step in params["strides"]):
        return None
    results, moves = [], []
    for k, out in enumerate(eqn.outvars):
        first, sizes = [0] * len(shape), list(shape)
        if name == "slice":
            first, sizes = list(params["start_indices"]), list(out.aval.shape)
        elif name == "split":
            axis, lengths = params["axis"], params["sizes"]
            first[axis], sizes[axis] = sum(map(int, lengths[:k])), int(lengths[k])
        else:  # unstack
            first[params["axis"]], sizes[params["axis"]] = k, 1
        found = [axes_lib.cut(*cut) for cut in zip(axes, first, sizes, strict=True)]
        if any(part is None for part in found):
            return None
        left = [part[0] for part in found if part]
        if name == "unstack":
            del left[params["axis"]]
        results.append(tuple(left))
        moves.append(tuple(move for part in found if part for move in part[1]))
    return Follow(tuple(results), tuple(moves))


def spread(axes: Axes, shape: Sequence[int], total: Sequence[int]) -> Axes:
    """Axes of an operand after an elementwise operation has broadcast it from `shape` to `total`."""
    if len(shape) != len(total):  # a scalar, which has no axes of its own
        return tuple(foreign(size) for size in total)
    return tuple(axis if own == size else foreign(size) for axis, own, size in zip(axes, shape, total, strict=True))


def _elementwise(eqn: Any, operand: int, axes: Axes) -> Meaning:
    if len(eqn.invars) != 2:
        return Follow((axes,))  # minus: a scale of -1
    name, out = eqn.primitive.name, eqn.outvars[0].aval.shape
    y_axes = spread(axes, eqn.invars[operand].aval.shape, out)
    return Read(
        op="add" if name in SUMS else "mul",
        name=name,
        operand=operand,
        other=1 - operand,
        x_axes=y_axes,
        y_axes=y_axes,
        shape=tuple(out),
        dtype=_dtype(eqn),
        leading=next((atom.size for axis in y_axes for atom in axis if not atom.of_leaf), None),
        sign=-1 if name == "sub" and operand == 1 else 1,
        divides=name == "div",
    )


def _product(eqn: Any, operand: int, axes: Axes) -> Meaning:
    """A product whose operand number `operand` is a kernel; None for a broadcast one, which is an activation."""
    contract, batch = eqn.params["dimension_numbers"]
    x = eqn.invars[1 - operand].aval
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return "it is multiplied with complex data, whose statistics are not implemented"
    w_contract, x_contract = contract[operand], contract[1 - operand]
    w_batch, x_batch = batch[operand], batch[1 - operand]
    w_free = [k for k in range(len(axes)) if k not in w_contract and k not in w_batch]
    x_free = [k for k in range(x.ndim) if k not in x_contract and k not in x_batch]
    # Entries that are repeated in place are read so often; other axes may be those of examples.
    foreign_free = [axes[k] and not axes_lib.atoms_of([axes[k]]) for k in w_free]
    if axes_lib.is_broadcast([axes[k] for k in w_contract]) or any(foreign_free):
        return None
    x_axes: list[axes_lib.Axis] = [()] * x.ndim
    for k, w_axis in [*zip(x_contract, w_contract, strict=True), *zip(x_batch, w_batch, strict=True)]:
        x_axes[k] = axes[w_axis]
    for k in x_free:
        x_axes[k] = foreign(x.shape[k])
    free_w, free_x = [axes[k] for k in w_free], [x_axes[k] for k in x_free]
    y_axes = (*(axes[k] for k in w_batch), *(free_w + free_x if operand == 0 else free_x + free_w))
    start = len(w_batch) + (0 if operand == 0 else len(x_free))
    repeats = math.prod(axes_lib.foreign_sizes(free_w))
    repeated = [k for k in x_batch if axes_lib.is_broadcast((x_axes[k],))]
    examples = sorted([*x_free, *repeated])
    return Read(
        op="dense",
        name=eqn.primitive.name,
        operand=operand,
        other=1 - operand,
        x_axes=tuple(x_axes),
        y_axes=y_axes,
        shape=tuple(eqn.outvars[0].aval.shape),
        dtype=_dtype(eqn),
        leading=x.shape[examples[0]] if examples else None,
        batched=tuple(axes_lib.atoms_of(axes[k] for k in w_batch)),
        rows=_rows(y_axes, tuple(x_axes), [*x_batch, *x_free], range(start, start + len(w_free))),
        reorders=bool(repeated) or repeats > 1,
        repeats=repeats,
    )


def _ragged_product(eqn: Any, operand: int, axes: Axes) -> Meaning:
    """A product of each group of rows with a kernel of its own, `lax.ragged_dot`."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    contract, batch = numbers.dot_dimension_numbers
    x, groups = eqn.invars[0].aval, axes[0] if axes else ()
    plain = tuple(map(tuple, contract)) == ((1,), (1,)) and not any(batch) and x.ndim == 2
    if not plain or tuple(numbers.lhs_ragged_dimensions) != (0,) or tuple(numbers.rhs_group_dimensions) != (0,):
        return "of ragged products only those of lax.ragged_dot have statistics, whose groups are of rows of the data"
    in_order = list(groups) == sorted(groups, key=lambda atom: atom.memory_order)
    if operand != 1 or axes_lib.is_broadcast(axes) or not in_order or any(atom.flipped for atom in groups):
        return "the kernels of its groups are not in the order of the parameter"
    rows = foreign(x.shape[0])
    return Read(
        op="dense",
        name=eqn.primitive.name,
        operand=1,
        other=0,
        x_axes=(rows, axes[1]),
        y_axes=(rows, axes[2]),
        shape=tuple(eqn.outvars[0].aval.shape),
        dtype=_dtype(eqn),
        leading=x.shape[0],
        batched=groups,
        rows=tuple((k, k) for k in range(len(rows))),
        groups=2,
    )


def _rows(y_axes: Axes, x_axes: Axes, order: Sequence[int], own: Sequence[int] = ()) -> tuple[tuple[int, int], ...]:
    """`Read.rows`, where the axes of `x_axes` with rows come in `order` in the result, but for its axes `own`."""
    starts = [sum(map(len, x_axes[:k])) for k in range(len(x_axes))]
    in_x = [starts[k] + p for k in order for p, atom in enumerate(x_axes[k]) if not atom.of_leaf]
    flat = [(atom, k) for k, axis in enumerate(y_axes) for atom in axis]
    in_y = [p for p, (atom, k) in enumerate(flat) if not atom.of_leaf and k not in own]
    return tuple(zip(in_y, in_x, strict=True))


def _convolution(eqn: Any, operand: int, axes: Axes) -> Meaning:
    """Groups of channels are independent copies: the first reads the first channels, and its are the first outputs."""
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    if operand == 0:
        return "it is the image of a convolution, not its kernel"
    if axes_lib.is_broadcast(axes):
        return "a broadcast kernel"
    if params["batch_group_count"] != 1:
        return f"batch_group_count={params['batch_group_count']} is not supported"
    groups = params["feature_group_count"]
    lhs, kernel, out = (tuple(var.aval.shape) for var in (*eqn.invars, *eqn.outvars))
    out_channel, in_channel, *window = numbers.rhs_spec
    channels = out[numbers.out_spec[1]]
    split = axes_lib.reshape((axes[out_channel],), (groups, channels // groups))
    if split is None:
        return f"feature_group_count={groups} cuts across axes of the parameter"
    group, outputs = split
    images = lhs[numbers.lhs_spec[0]]
    positions = [foreign(out[k]) for k in numbers.out_spec[2:]]
    x_axes = (foreign(images), *positions, *(axes[k] for k in window), group + axes[in_channel])
    y_axes = [foreign(size) for size in out]
    y_axes[numbers.out_spec[1]] = group + outputs
    # Axes of the patches: the images, the positions in the order of `out_spec`, the window and channels.
    axis_of = dict(zip((numbers.out_spec[0], *numbers.out_spec[2:]), range(len(out)), strict=False))
    lead = sum(len(axis) for axis in y_axes[: numbers.out_spec[0]])
    return Read(
        op="conv",
        name=eqn.primitive.name,
        operand=operand,
        other=0,
        x_axes=x_axes,
        y_axes=tuple(y_axes),
        shape=out,
        dtype=_dtype(eqn),
        leading=images,
        batched=group,
        rows=_rows(tuple(y_axes), x_axes, [axis_of[k] for k in sorted(axis_of)]),
        images=(lead, 0) if images > 1 else None,
        geometry=Convolution(
            spec=tuple(numbers.lhs_spec),
            window=tuple(kernel[k] for k in window),
            strides=tuple(params["window_strides"]),
            padding=tuple(tuple(pair) for pair in params["padding"]),
            lhs_dilation=tuple(params["lhs_dilation"]),
            rhs_dilation=tuple(params["rhs_dilation"]),
            out=tuple(out[k] for k in numbers.out_spec[2:]),
        ),
    )


def _lookup(eqn: Any, operand: int, axes: Axes) -> Meaning:
    """A gather that takes whole rows of a table, one for each index; None if it is another."""
    if operand != 0:
        return None
    numbers, mode, sizes = eqn.params["dimension_numbers"], eqn.params["mode"], eqn.params["slice_sizes"]
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
    return Read(
        op="embedding",
        name=eqn.primitive.name,
        operand=0,
        other=1,
        x_axes=(axes[row_axis],),
        y_axes=tuple(foreign(size) if k in positions else next(row) for k, size in enumerate(out)),
        shape=out,
        dtype=_dtype(eqn),
        leading=out[positions[0]],
        geometry=Lookup(table[row_axis], tuple(numbers.start_index_map).index(row_axis), drop),
    )


def _dtype(eqn: Any) -> Any:
    """The dtype of sums over rows: wide enough for all that the operation takes and gives."""
    return accumulator(jnp.result_type(*{var.aval.dtype for var in (*eqn.invars[:2], *eqn.outvars)}))


_TABLE: dict[str, Rule] = {
    **dict.fromkeys(_IDENTITIES, _same),
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast,
    **dict.fromkeys(("reshape", "squeeze", "expand_dims"), _reshape),
    "rev": _reverse,
    "tile": _tile,
    **dict.fromkeys(("slice", "split", "unstack"), _parts),
    **dict.fromkeys(("add", "add_any", "sub", "mul", "div", "neg"), _elementwise),
    "dot_general": _product,
    "conv_general_dilated": _convolution,
    "gather": _lookup,
    "ragged_dot_general": _ragged_product,
}

# -- a user's own ------------------------------------------------------------------------------------------------------

_REGISTERED: dict[str, Callable[..., Any] | None] = {}


def register_primitive(name: str, like: Callable[..., Any] | None = None) -> None:
    """Says what an operation is that `find_layers` does not know: a Pallas kernel, an FFI call, a custom derivative.

    The operation itself goes on to compute values and gradients. What it is like tells how parameters pass through it
    and which statistics belong to it::

        kfac.register_primitive("my_matmul", lambda x, w: x @ w)  # reads the kernel w
        kfac.register_primitive("my_transpose", lambda w: w.T)    # only its form changes
        kfac.register_primitive("my_block")                       # a function with a derivative of its own: look inside

    Without `like`, a function with `jax.custom_vjp` or `jax.custom_jvp` is taken for what is written in it, so its
    layers are found, and it is differentiated as written: its custom derivative must be no more than a faster or
    more accurate way to that.

    Args:
      name: of the primitive; or the `name` of a `pallas_call`, the target of an `ffi_call`, the name of a function with
        a custom derivative.
      like: a function of the same arrays, in the same order, that is a single operation of JAX: a product `x @ w`
        (`jnp.einsum`, `lax.dot_general`), a convolution, a change of form. None: look inside.

    Returns:
      Nothing.

    Raises:
      ValueError: `name` is no string or `like` no function.
    """
    if not isinstance(name, str) or not name:
        raise ValueError(f"name must be the name of a primitive or function, but is {name!r}")
    if like is not None and not callable(like):
        raise ValueError(f"like must be a function or None, but is {like!r}")
    _REGISTERED[name] = like


def _names(eqn: Any) -> list[str]:
    """What an equation can be registered as."""
    names = [eqn.primitive.name, eqn.params.get("target_name")]
    if eqn.primitive.name == "pallas_call":
        names.append(eqn.params.get("name"))
    if "call_jaxpr" in eqn.params:
        inner = eqn.params["call_jaxpr"]
        debug = getattr(getattr(inner, "jaxpr", inner), "debug_info", None)
        names.append(getattr(debug, "func_name", None))
    return [name for name in names if isinstance(name, str)]


def _like(eqn: Any) -> Callable[..., Any] | None:
    """What a user has said that an equation is like."""
    return next((like for name in _names(eqn) if (like := _REGISTERED.get(name)) is not None), None)


def is_registered(eqn: Any) -> bool:
    return _like(eqn) is not None


def _looked_into(eqn: Any) -> bool:
    """Whether a user has said to look inside."""
    return "call_jaxpr" in eqn.params and any(name in _REGISTERED and not _REGISTERED[name] for name in _names(eqn))


def _single(eqn: Any, like: Callable[..., Any]) -> tuple[Any, list[Any]]:
    """The single operation that `like` is, and which of its variables each input of `eqn` is."""
    avals = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in eqn.invars]
    given = jaxpr = jax.make_jaxpr(like)(*avals).jaxpr
    order = list(given.invars)
    while len(jaxpr.eqns) == 1 and (called := call(jaxpr.eqns[0])) and called.kind in ("call", "remat"):
        inside_of = dict(zip(jaxpr.eqns[0].invars, called.jaxpr.invars, strict=True))
        jaxpr, order = called.jaxpr, [inside_of.get(var) for var in order]
    shapes = [[tuple(var.aval.shape) for var in outvars] for outvars in (jaxpr.outvars, eqn.outvars)]
    if len(jaxpr.eqns) != 1 or shapes[0] != shapes[1]:
        raise ValueError(
            f"register_primitive({_names(eqn)[-1]!r}): like must be a single operation with a result of shape "
            f"{', '.join(map(str, shapes[1]))}, but is\n{jaxpr}"
        )
    return jaxpr.eqns[0], order


def _alike(eqn: Any, like: Callable[..., Any], operand: int, axes: Axes) -> Meaning:
    """The meaning of that operation, with the inputs counted as those of `eqn`."""
    inner, order = _single(eqn, like)
    position = next((k for k, var in enumerate(inner.invars) if var is order[operand]), None)
    found = None if position is None else meaning(inner, position, axes)
    if not isinstance(found, Read):
        return found
    other = next(k for k, var in enumerate(order) if var is inner.invars[found.other])
    return dataclasses.replace(found, operand=operand, other=other, name=_names(eqn)[-1])
