"""Where the taps of each layer are, and what brings the sums that they collect to factors."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kfac._capture import axes as axes_lib
from kfac._capture.analysis import Analysis
from kfac._capture.axes import Atom
from kfac._capture.operands import FILL_OR_DROP, row_axis
from kfac._capture.outputs import Marks
from kfac._capture.reads import Read, by_part, part_index, unsupported
from kfac._capture.replay import ElementwiseTap, Key, KroneckerTap, Plan
from kfac._capture.trace import Trace, equations_along
from kfac._factors import Factors, Kronecker, Unitwise
from kfac._layers import Layer, Layers
from kfac._statistics.dense import Convolution, Lookup, accumulator
from kfac._statistics.per_example import MomentSums, row_positions


@dataclasses.dataclass
class Resolved:
    """Layers, and all that `value_and_grad` needs to collect and finish their statistics.

    Attributes:
      layers: the layers.
      plan: where the taps are.
      probes: shape and dtype of what each tap sums.
      finish: what brings these sums to factors, by layer, and their keys.
      num_examples: `n`.
      marks: the marked outputs.
      spread: what brings the eigenvectors of a layer to its taps, by layer.
    """

    layers: Layers
    plan: Plan
    probes: dict[Key, Any]
    finish: dict[str, tuple[list[Key], Callable[[list[Any]], Any]]]
    num_examples: int
    marks: Marks
    spread: dict[str, Callable[[Kronecker], dict[Key, Kronecker]]] = dataclasses.field(default_factory=dict)

    def factors(self, sums: dict[Key, Any], grads: Sequence[Any]) -> Factors:
        """Factors from the cotangents of the probes and, for coarse diagonals, the gradients."""
        by_path = dict(zip(self.layers.paths, grads, strict=True))
        blocks = {}
        for layer in self.layers.with_factors:
            if layer.coarse:
                g = by_path[layer.params[0]]
                squared = self.num_examples * jnp.square(g.astype(accumulator(g.dtype)))
                blocks[layer.name] = Unitwise(squared.reshape(layer.factor_shapes["F"]))
            else:
                keys, finish = self.finish[layer.name]
                blocks[layer.name] = finish([sums[key] for key in keys])
        return Factors(blocks)


def plan_kronecker(
    resolved: Resolved,
    layer: Layer,
    reads: list[Read],
    analysis: Analysis,
    traced: Trace,
    strict: bool,
    subsample: int,
    ekfac: bool,
) -> None:
    dtype = _accumulator(traced, reads)
    n, reduce = resolved.num_examples, layer.weight_sharing == "reduce"
    with_bias = {
        read.joined[0] for read in analysis.reads if read.joined and analysis.names[read.leaf] in layer.params[1:]
    }
    for read in reads:
        eqn = equations_along(traced, read.path)[-1]
        index = next(k for k, other in enumerate(analysis.reads) if other is read)
        bias = "none" if not layer.has_bias else "one" if index in with_bias else "zero"
        x_axes = read.x_axes
        if read.op == "conv" and (reduce or "A" in layer.diagonal):
            spatial = len(eqn.params["window_strides"])
            x_axes = (x_axes[0], *x_axes[1 + spatial :])  # of sums over positions
        arrange_x = axes_lib.arrangement(x_axes, read.batched)
        arrange_g = axes_lib.arrangement(read.y_axes, read.batched)
        if reduce:
            if not strict and n > 1 and not all(_sizes(axes, n) for axes in (x_axes, read.y_axes)):
                return
            images = _images(read, eqn, n)
            x_example, g_example = images or (
                _example_position(x_axes, n, layer.params[0], read, eqn, strict),
                _result_position(read, eqn, n, layer.params[0], strict),
            )
            arrange_x, arrange_g = arrange_x.grouped_by(x_example), arrange_g.grouped_by(g_example)
        elif subsample > 1:
            x_example, g_example = _subsampled(resolved, layer, read, eqn, subsample)
            arrange_x, arrange_g = arrange_x.grouped_by(x_example), arrange_g.grouped_by(g_example)
        tap = KroneckerTap(
            (layer.name, part_index(read)),
            read.operand,
            arrange_x,
            arrange_g,
            _geometry(read, eqn),
            bias,
            dtype,
            layer.diagonal,
            n if reduce else None,
            subsample,
            _moments(resolved, layer, read, eqn, bias, dtype, subsample, arrange_g)
            if ekfac and layer.correctable
            else None,
        )
        _place(resolved, traced, read, tap)
    read = reads[0]
    scanned = [length for length, atoms in zip(read.scans, read.view.stack, strict=True) if atoms]
    batched = math.prod(atom.size for atom in read.batched)
    tails = {"A": (n, layer.d_in), "G": (n, layer.d_out)} if reduce else dict(layer.block_shapes)
    if ekfac and layer.correctable:
        tails["moments"] = (layer.d_out, layer.d_in)
    summed = {name: jax.ShapeDtypeStruct((*scanned, batched, *tail), dtype) for name, tail in tails.items()}
    positions = {part_index(part[0]): sum(read.rows for read in part) / n for part in by_part(reads)}
    resolved.probes.update({(layer.name, part): Kronecker(**summed) for part in positions})
    parts = math.prod(atom.size for atom in read.picked)
    # What the taps arrange is in memory order already; scans go in the order in which the parameter is read.
    batches = sorted((atom._replace(flipped=False) for atom in read.batched), key=lambda atom: atom.memory_order)
    stack = [*read.picked, *read.scanned, *batches]
    lead = (layer.copies,) if layer.stacked else ()

    def of_part(sums: Kronecker, positions: float) -> Kronecker:
        moments = None if sums.moments is None else sums.moments * n
        if reduce:
            return Kronecker(sums.A / positions, sums.G, moments)
        # G = (n / s) sum g g^T with s positions per example.
        return Kronecker(sums.A / n, sums.G * (n / positions), moments)

    def finish(sums: list[Kronecker]) -> Kronecker:
        found = {part: of_part(moments, s) for moments, (part, s) in zip(sums, positions.items(), strict=True)}
        unread = jax.tree.map(jnp.zeros_like, sums[0])
        by_part = [found.get(part, unread) for part in range(parts)]
        stacked = jax.tree.map(lambda *blocks: jnp.stack(blocks), *by_part) if parts > 1 else by_part[0]
        ordered = {
            f: _in_memory_order(getattr(stacked, f), stack, tail).reshape(*lead, *tail) for f, tail in tails.items()
        }
        if not reduce:
            return Kronecker(**ordered)

        def moment(factor, rows):
            if factor in layer.diagonal:
                return jnp.sum(jnp.square(rows), axis=-2)
            return jnp.einsum("...ni,...nj->...ij", rows, rows, precision=jax.lax.Precision.HIGHEST)

        squares = {"A": moment("A", ordered["A"]) / n, "G": moment("G", ordered["G"]) * n}
        return Kronecker(**{**ordered, **squares})

    def spread(basis: Kronecker) -> dict[Key, Kronecker]:
        """The layer's eigenvectors as the taps of its parts take them, the other way round than `finish`."""

        def arranged(vectors):
            tail = vectors.shape[-2:]
            return _from_memory_order(vectors, stack, tail).reshape(parts, *scanned, batched, *tail)

        whole = jax.tree.map(arranged, basis)
        return {_basis_key(layer, part): jax.tree.map(lambda x, part=part: x[part], whole) for part in positions}

    if ekfac and layer.correctable:
        resolved.spread[layer.name] = spread
    resolved.finish[layer.name] = [(layer.name, part) for part in positions], finish


def _basis_key(layer: Layer, part: int) -> Key:
    return layer.name, part, "eigenvectors"


def _moments(
    resolved: Resolved,
    layer: Layer,
    read: Read,
    eqn: Any,
    bias: str,
    dtype: Any,
    subsample: int,
    arrange_g: axes_lib.Arrangement,
) -> MomentSums:
    """What sums the squares of per-example gradients at the one read of a kernel; `arrange_g` is that of its `G`."""
    n = resolved.num_examples
    rows_y, rows_x = row_positions(read, eqn)
    flat = axes_lib.flatten(read.y_axes)
    images, geometry = _images(read, eqn, n), _geometry(read, eqn)
    assert not isinstance(geometry, Lookup)
    if math.prod(flat[p].size for p in rows_y) == n:
        examples = tuple(rows_y)  # a row for each example
    elif images:
        examples = (images[1],)
    else:
        examples = () if n == 1 or _sizes(read.y_axes, n) else resolved.marks.token_axes(flat, n)
        if math.prod(flat[p].size for p in examples) != n:
            example = _result_position(read, eqn, n, layer.params[0], strict=True)
            examples = () if example is None else (example,)
    # `subsample` takes every so many along the first axis, that of sequences where tokens are examples.
    first = arrange_g.rows[0] if subsample > 1 else None
    examples = tuple(sorted(examples, key=lambda p: p != first))
    order = [*examples, *(p for p in rows_y if p not in examples)]
    in_x = dict(zip(rows_y, rows_x, strict=True))
    return MomentSums(
        _basis_key(layer, part_index(read)),
        n,
        axes_lib.arrangement(read.x_axes, read.batched)._replace(rows=tuple(in_x[p] for p in order)),
        axes_lib.arrangement(read.y_axes, read.batched)._replace(rows=tuple(order)),
        geometry,
        images is not None,
        {"none": None, "one": 1.0, "zero": 0.0}[bias],
        subsample,
        min(n, arrange_g.leading),
        dtype,
    )


def _result_position(read: Read, eqn: Any, n: int, parameter: str, strict: bool) -> int | None:
    """`_example_position` of a read's result.

    With the kernel on the left of a product the examples come behind the outputs; that they lead its input says it.
    """
    if read.op == "dense" and n > 1 and not _reorders(read, eqn):
        rows_y, rows_x = row_positions(read, eqn)
        if 0 in rows_x and axes_lib.flatten(read.x_axes)[0].size == n:
            return rows_y[rows_x.index(0)]
    return _example_position(read.y_axes, n, parameter, read, eqn, strict)


def _sizes(axes: axes_lib.Axes, n: int) -> list[int]:
    """Positions, among all atoms of `axes`, of those that may be the axis of `n` examples."""
    return [position for position, atom in enumerate(axes_lib.flatten(axes)) if not atom.of_leaf and atom.size == n]


def _reorders(read: Read, eqn: Any) -> bool:
    """Whether a product may bring the axes of examples and positions into another order than that of its input."""
    if read.op != "dense":
        return False
    batch = eqn.params["dimension_numbers"][1][1 - read.operand]
    return any(axes_lib.is_broadcast((read.x_axes[k],)) for k in batch)


def _example_position(axes: axes_lib.Axes, n: int, parameter: str, read: Read, eqn: Any, strict: bool) -> int | None:
    """Which of all atoms of `axes` are the `n` examples; None for a single one, which needs no axis.

    Raises:
      ValueError: none can be, or another might.
    """
    if n == 1:
        return None
    flat = axes_lib.flatten(axes)
    matching = _sizes(axes, n)
    example = next(iter(matching), None)
    # Behind another axis, length alone tells the examples only if they can be on no other.
    others = [p for p, atom in enumerate(flat) if not atom.of_leaf and atom.size % n == 0 and p != example]
    # Where a kernel has been broadcast, then reshaped, its axes say nothing about the order of the data.
    axis_of = [axis for axis in axes for _ in axis]
    joined = example is not None and sum(not atom.of_leaf for atom in axis_of[example]) > 1
    if strict and (joined or (others and (example or _reorders(read, eqn)))):
        raise ValueError(
            f"parameter {parameter!r} is read by {eqn.primitive.name} on an array of shape {list(read.shape)}: it is "
            f"not clear which of its axes has the {n} examples. Put the examples first, or take another number of them."
        )
    if example is None:
        raise ValueError(
            f"parameter {parameter!r} is read by {eqn.primitive.name} on an array of shape {list(read.shape)} none of "
            f"whose axes has the {n} examples: pass num_examples= to value_and_grad, keep the examples on an axis of "
            "their own there, or leave it out with skip=."
        )
    return example


def _subsampled(
    resolved: Resolved, layer: Layer, read: Read, eqn: Any, subsample: int
) -> tuple[int | None, int | None]:
    """Which of all atoms of a read's input, and of its output, are the examples of which `subsample` takes a part.

    Raises:
      ValueError: they have no axis of their own, or are fewer than `subsample`.
    """
    n, parameter = resolved.num_examples, layer.params[0]
    # Where every token is an example, `subsample` takes whole sequences.
    count = n if _sizes(read.y_axes, n) else resolved.marks.sequences(n)
    if subsample > count:
        raise ValueError(f"subsample={subsample}, but layer {layer.name!r} sees {count} example(s) at a time")
    if read.op == "conv":
        images = _images(read, eqn, count)
        return images or (None, _example_position((read.x_axes[0],), count, parameter, read, eqn, strict=True))
    g_example = _result_position(read, eqn, count, parameter, strict=True)
    if read.op == "embedding":
        return None, g_example  # counts of rows are those of all examples
    return _example_position(read.x_axes, count, parameter, read, eqn, strict=True), g_example


def _images(read: Read, eqn: Any, n: int) -> tuple[int, int] | None:
    """Where, among all atoms, the `n` images of a convolution are, in its input and its output; None if they are not.

    Its dimension numbers say it: nothing else of the same length can be taken for them.
    """
    if read.op != "conv" or n == 1 or math.prod(atom.size for atom in read.x_axes[0]) != n:
        return None
    out = eqn.params["dimension_numbers"].out_spec[0]
    return 0, sum(len(axis) for axis in read.y_axes[:out])


def _in_memory_order(array: jax.Array, stack: list[Atom], tail: tuple[int, ...]) -> jax.Array:
    order = sorted(range(len(stack)), key=lambda k: stack[k].memory_order)
    array = array.reshape(*(atom.size for atom in stack), *tail)
    flips = [k for k, atom in enumerate(stack) if atom.flipped]
    array = jnp.flip(array, flips) if flips else array
    return array.transpose(*order, *range(len(stack), len(stack) + len(tail)))


def _from_memory_order(array: jax.Array, stack: list[Atom], tail: tuple[int, ...]) -> jax.Array:
    """The inverse of `_in_memory_order`."""
    order = sorted(range(len(stack)), key=lambda k: stack[k].memory_order)
    array = array.reshape(*(stack[k].size for k in order), *tail)
    array = array.transpose(*map(order.index, range(len(stack))), *range(len(stack), len(stack) + len(tail)))
    flips = [k for k, atom in enumerate(stack) if atom.flipped]
    return jnp.flip(array, flips) if flips else array


def plan_elementwise(resolved, layer, leaves, by_leaf, shapes, traced, strict: bool) -> None:
    n = resolved.num_examples
    keys: list[Key] = []
    entries: list[
        tuple[int, np.ndarray]
    ] = []  # for each key, which of the leaves it belongs to and which entries of it
    rows: set[int] = set()
    for k, leaf in enumerate(leaves):
        dtype = _accumulator(traced, by_leaf[leaf])
        known: dict[tuple, Key] = {}
        for read in by_leaf[leaf]:
            eqn = equations_along(traced, read.path)[-1]
            flat = axes_lib.flatten(read.y_axes)
            examples: tuple[int, ...] = ()
            if n > 1 and not _sizes(read.y_axes, n):
                examples = resolved.marks.token_axes(flat, n)
                if not strict and not examples:
                    return
            if not examples:
                example = _example_position(read.y_axes, n, layer.params[k], read, eqn, strict)
                examples = () if example is None else (example,)
            units = sorted((p for p, atom in enumerate(flat) if atom.of_leaf), key=lambda p: flat[p].memory_order)
            rows.add(math.prod(flat[p].size for p in examples))
            if len(rows) > 1:
                raise ValueError(
                    f"parameter {layer.params[k]!r} is read on arrays that have {' and '.join(map(str, sorted(rows)))} "
                    f"of the {n} examples: pass num_examples= to value_and_grad"
                )
            scanned = tuple(length for length, atoms in zip(read.scans, read.view.stack, strict=True) if atoms)
            where = axes_lib.entries(shapes[leaf], read.view.start, [*read.scanned, *(flat[p] for p in units)])
            # Uses of the same entries are summed for each example before they are squared.
            key = known.setdefault((scanned, where.tobytes()), (layer.name, len(keys)))
            if key not in resolved.probes:
                keys.append(key)
                entries.append((k, where))
                width = math.prod(flat[p].size for p in units)
                resolved.probes[key] = jax.ShapeDtypeStruct((*scanned, min(rows), width), dtype)
            tap = ElementwiseTap(
                key,
                read.operand,
                eqn.primitive.name,
                tuple(atom.size for atom in flat),
                examples,
                tuple(units),
                read.sign,
                dtype,
            )
            _place(resolved, traced, read, tap)

    def finish(sums: list[jax.Array]) -> Unitwise:
        columns: list[list[jax.Array]] = [[] for _ in leaves]
        for (k, where), g in zip(entries, sums, strict=True):
            g = jnp.moveaxis(g, -2, 0).reshape(g.shape[-2], -1)
            if not np.array_equal(where, np.arange(layer.d_out)):
                g = jnp.zeros((len(g), layer.d_out), g.dtype).at[:, where].set(g)
            columns[k].append(g)
        each = [sum(parts[1:], parts[0]) for parts in columns]
        moments = [[jnp.sum(a * b, axis=0) for b in each] for a in each]
        return Unitwise(n * jnp.stack([jnp.stack(row, axis=-1) for row in moments], axis=-2))

    resolved.finish[layer.name] = keys, finish


def _accumulator(traced: Trace, reads: list[Read]) -> Any:
    """The dtype of the sums over all uses of a parameter, which need not have one dtype."""
    equations = [equations_along(traced, read.path)[-1] for read in reads]
    dtypes = {var.aval.dtype for eqn in equations for var in (*eqn.invars, *eqn.outvars)}
    return accumulator(jnp.result_type(*dtypes))


def _place(resolved: Resolved, traced: Trace, read: Read, tap: KroneckerTap | ElementwiseTap) -> None:
    """Puts a tap behind an equation, and tells each scan around it whether the tap's probe is sliced there."""
    resolved.plan.at(read.path).taps[read.path[-1]] = tap
    plan, levels = resolved.plan, iter(read.view.stack)
    for index, eqn in zip(read.path, equations_along(traced, read.path)[:-1], strict=False):
        plan = plan.children[index]
        if eqn.primitive.name == "scan":
            iterated = bool(next(levels))
            if plan.iterated.setdefault(tap.key, iterated) != iterated:
                raise unsupported(tap.key[0], "two operations in a scan", "only one of them iterates over it")
            if isinstance(tap, KroneckerTap) and tap.moments:
                plan.iterated[tap.moments.basis] = iterated


def _geometry(read: Read, eqn: Any) -> Convolution | Lookup | None:
    if read.op == "dense":
        return None
    numbers = eqn.params["dimension_numbers"]
    if read.op == "embedding":
        axis = row_axis(eqn)
        assert axis is not None
        column = tuple(numbers.start_index_map).index(axis)
        return Lookup(eqn.invars[0].aval.shape[axis], column, eqn.params["mode"] == FILL_OR_DROP)
    kernel, out = eqn.invars[1].aval.shape, eqn.outvars[0].aval.shape
    return Convolution(
        tuple(numbers.lhs_spec),
        tuple(kernel[k] for k in numbers.rhs_spec[2:]),
        tuple(eqn.params["window_strides"]),
        tuple(tuple(pair) for pair in eqn.params["padding"]),
        tuple(eqn.params["lhs_dilation"]),
        tuple(eqn.params["rhs_dilation"]),
        tuple(out[k] for k in numbers.out_spec[2:]),
    )
