"""From layers to taps: where they stand, and what brings the sums that they collect to factors."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kfac._capture import axes as axes_lib
from kfac._capture.axes import Atom
from kfac._capture.find_layers import Found, layers_of
from kfac._capture.outputs import Marks
from kfac._capture.states import Use, by_part, unsupported
from kfac._capture.taps import ElementwiseTap, Key, KroneckerTap, Plan, Tap
from kfac._capture.trace import Trace
from kfac._factors import Coarse, Factors, Kronecker, Ragged, Tied, Unitwise
from kfac._layers import KRONECKER_KINDS, Layer, Layers
from kfac._statistics.rows import Arrangement, accumulator


@dataclasses.dataclass
class Planned:
    """All that `value_and_grad` needs to collect and finish the statistics of a loss.

    Attributes:
      found: the layers.
      num_examples: `n`.
      plan: where the taps are.
      probes: shape and dtype of what each tap sums.
      finish: what brings these sums to factors, by layer, and their keys.
      spread: what brings the eigenvectors of a layer to its taps, by layer.
    """

    found: Found
    num_examples: int
    plan: Plan = dataclasses.field(default_factory=Plan)
    probes: dict[Key, Any] = dataclasses.field(default_factory=dict)
    finish: dict[str, tuple[list[Key], Callable[[list[Any]], Any]]] = dataclasses.field(default_factory=dict)
    spread: dict[str, Callable[[Kronecker], dict[Key, Kronecker]]] = dataclasses.field(default_factory=dict)

    @property
    def layers(self) -> Layers:
        return self.found.layers

    def factors(self, sums: dict[Key, Any], grads: Sequence[Any]) -> Factors:
        """Factors from the cotangents of the probes and, for coarse diagonals, the gradients."""
        by_path = dict(zip(self.layers.paths, grads, strict=True))
        blocks: dict[str, Any] = {}
        for layer in self.layers.with_factors:
            if layer.coarse:
                g = by_path[layer.params[0]]
                mean = g.astype(accumulator(g.dtype)).reshape(-1)
                blocks[layer.name] = Coarse(mean, jnp.full_like(mean, self.num_examples, shape=()))
            else:
                keys, finish = self.finish[layer.name]
                blocks[layer.name] = finish([sums[key] for key in keys])
        return Factors(blocks)

    def place(self, tap: Tap) -> None:
        """Puts a tap behind an op, and tells each scan around it whether the tap's probe is sliced there."""
        use = tap.use
        self.plan.at(use.path).taps.setdefault(use.path[-1], []).append(tap)
        levels = {position: bool(atoms) for (position, _), atoms in zip(use.scans, use.view.stack, strict=True)}
        plan = self.plan
        for position, index in enumerate(use.path[:-1]):
            plan = plan.children[index]
            if position in levels:
                if plan.iterated.setdefault(tap.key, levels[position]) != levels[position]:
                    raise unsupported(tap.key[0], "two operations in a scan", "only one of them iterates over it")
                if isinstance(tap, KroneckerTap) and tap.basis:
                    plan.iterated[tap.basis] = levels[position]


def plan_taps(
    traced: Trace, options: Layers, marks: Marks, num_examples: int | None, subsample: int, moments: bool
) -> Planned:
    """Finds the layers of a traced loss and plans their taps.

    Args:
      traced: the traced loss.
      options: what holds the options of `find_layers`.
      marks: its marked outputs.
      num_examples: the number of examples, if the user gave it.
      subsample: statistics come from every `subsample`-th example.
      moments: whether taps also sum squares of per-example gradients, in a basis.

    Raises:
      ValueError: the number of examples is not clear, or a layer that has to cannot tell them from positions.
    """
    found = layers_of(traced, options, marks, num_examples)
    if found.num_examples is None and found.layers.with_factors:
        raise ValueError(found.unclear)
    planned = Planned(found, found.num_examples or 1)
    for layer in found.layers:
        uses = found.uses[layer.name]
        if layer.kind in KRONECKER_KINDS:
            _plan_kronecker(planned, layer, uses[0], subsample, moments and layer.correctable)
        elif any(uses) and not layer.coarse:
            _plan_elementwise(planned, layer, uses, subsample)
    for path, operand in found.reads.multipliers.items():
        # Only where the program holds a tap: elsewhere nothing reads the multiplier.
        planned.plan.at(path).multipliers[path[-1]] = operand
    for path, (axis, _) in found.reads.merges.items():
        planned.plan.at(path).merges[path[-1]] = axis
    for path in found.reads.carriers | found.reads.shared_calls:
        planned.plan.at((*path, 0))
    return planned


# -- Kronecker layers --------------------------------------------------------------------------------------------------


def _plan_kronecker(planned: Planned, layer: Layer, uses: list[Use], subsample: int, moments: bool) -> None:
    biases, paths = layer.params[1:], planned.found.layers.paths
    with_bias = {use.joined[0] for use in planned.found.reads.uses if use.joined and paths[use.leaf] in biases}
    dtype = jnp.result_type(*{use.read.dtype for use in uses})
    for use in uses:
        index = next(k for k, other in enumerate(planned.found.reads.uses) if other is use)
        if use.late:
            planned.plan.at(use.path).late[use.path[-1]] = planned.num_examples
        use = use.for_all(planned.num_examples)
        read = use.read
        examples = _examples(planned, layer, use, subsample, moments)
        rest = [p for p, atom in enumerate(axes_lib.flatten(read.y_axes)) if not atom.of_leaf and p not in examples]
        in_x = dict(read.rows)
        x_rows = [[in_x[p] for p in part if p in in_x] for part in (examples, rest)]
        tap = KroneckerTap(
            key=_key(layer, use),
            use=use,
            arrange_x=_in_runs(planned, axes_lib.arrangement(read.x_axes, read.batched, *x_rows)),
            arrange_g=_in_runs(planned, axes_lib.arrangement(read.y_axes, read.batched, examples, rest)),
            images=not examples or (read.images is not None and tuple(examples) == (read.images[0],)),
            homogeneous=1.0 if _counted(uses) or index in with_bias else 0.0 if layer.has_bias else None,
            dtype=dtype,
            diagonal=layer.diagonal
            if use.layout == layer.layouts[0]
            else tuple(_OTHER[side] for side in layer.diagonal),
            reduce=layer.weight_sharing == "reduce",
            subsample=subsample,
            basis=_basis_key(layer, use.part) if moments else None,
        )
        planned.place(tap)
    _finish_kronecker(planned, layer, uses, dtype, moments)


def _counted(uses: list[Use]) -> bool:
    """Whether the number of rows that a copy reads is data."""
    return any(use.read.groups is not None for use in uses)


def _finish_kronecker(planned: Planned, layer: Layer, uses: list[Use], dtype: Any, moments: bool) -> None:
    """The probes of a layer, and what brings the sums of its parts and copies to factors."""
    n, reduce, use = planned.num_examples, layer.weight_sharing == "reduce", uses[0]
    batched = math.prod(atom.size for atom in use.read.batched)
    tails = {"A": (n, layer.d_in), "G": (n, layer.d_out)} if reduce else dict(layer.block_shapes)
    if moments:
        tails["moments"] = (layer.d_out, layer.d_in)
    counted = _counted(uses)
    wider = tails | ({"A": tuple(size + 1 for size in tails["A"])} if counted else {})
    summed = {name: jax.ShapeDtypeStruct((*use.iterated, batched, *tail), dtype) for name, tail in wider.items()}
    positions = {part[0].part: sum(use.for_all(n).rows for use in part) / n for part in by_part(uses)}
    keys = list(dict.fromkeys(_key(layer, use) for use in uses))
    for key in keys:
        # Of its transpose, the layer's outputs are the inputs.
        planned.probes[key] = Kronecker(**summed) if len(key) == 2 else Kronecker(summed["G"], summed["A"])
    parts = math.prod(atom.size for atom in use.picked)
    # What the taps arrange is in memory order already; scans go in the order in which the parameter is read.
    batches = sorted((atom._replace(flipped=False) for atom in use.read.batched), key=lambda atom: atom.memory_order)
    stack = [*use.picked, *use.scanned, *batches]
    lead = (layer.copies,) if layer.stacked else ()

    def of_part(sums: Kronecker, positions: float) -> Kronecker | Ragged:
        moments = None if sums.moments is None else sums.moments * n
        if counted:  # a homogeneous entry has counted the rows
            whole = "A" not in layer.diagonal
            rows = sums.A[..., -1, -1] if whole else sums.A[..., -1]
            return Ragged((sums.A[..., :-1, :-1] if whole else sums.A[..., :-1]) / n, sums.G * n, rows / n)
        if reduce:
            return Kronecker(sums.A / positions, sums.G, moments)
        # G = (n / s) sum g g^T with s positions per example.
        return Kronecker(sums.A / n, sums.G * (n / positions), moments)

    def squares(factor: str, rows: jax.Array) -> jax.Array:
        if factor in layer.diagonal:
            return jnp.sum(jnp.square(rows), axis=-2)
        return jnp.einsum("...ni,...nj->...ij", rows, rows, precision=jax.lax.Precision.HIGHEST)

    def finish(sums: list[Kronecker]) -> Kronecker | Tied | Ragged:
        by_key = dict(zip(keys, sums, strict=True))
        direct = {key[1]: of_part(own, positions[key[1]]) for key, own in by_key.items() if len(key) == 2}
        turned = {
            key[1]: Kronecker(own.G * n, own.A / (n * positions[key[1]])) for key, own in by_key.items() if len(key) > 2
        }
        return Tied(gather(direct), gather(turned), layer.diagonal) if turned else gather(direct)

    def gather(found: dict[int, Any]) -> Any:
        unread = jax.tree.map(jnp.zeros_like, next(iter(found.values())))
        by_part = [found.get(part, unread) for part in range(parts)]
        stacked = jax.tree.map(lambda *blocks: jnp.stack(blocks), *by_part) if parts > 1 else by_part[0]
        names = {"A": tails["A"], "squares": tails["G"], "rows": ()} if counted else tails
        ordered = {
            f: _in_memory_order(getattr(stacked, f), stack, tail).reshape(*lead, *tail) for f, tail in names.items()
        }
        if reduce:
            ordered |= {"A": squares("A", ordered["A"]) / n, "G": squares("G", ordered["G"]) * n}
        return Ragged(**ordered) if counted else Kronecker(**ordered)

    def spread(basis: Kronecker) -> dict[Key, Kronecker]:
        """The layer's eigenvectors as the taps of its parts take them, the other way round than `finish`."""

        def arranged(vectors):
            tail = vectors.shape[-2:]
            return _from_memory_order(vectors, stack, tail).reshape(parts, *use.iterated, batched, *tail)

        whole = jax.tree.map(arranged, basis)
        return {_basis_key(layer, part): jax.tree.map(lambda x, part=part: x[part], whole) for part in positions}

    if moments:
        planned.spread[layer.name] = spread
    planned.finish[layer.name] = keys, finish


_OTHER = {"A": "G", "G": "A"}


def _key(layer: Layer, use: Use) -> Key:
    """Of the probe of a use: which part of the layer it reads, and whether as its transpose."""
    return (layer.name, use.part) if use.layout == layer.layouts[0] else (layer.name, use.part, "transposed")


def _basis_key(layer: Layer, part: int) -> Key:
    return layer.name, part, "eigenvectors"


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


# -- which axes are the examples ---------------------------------------------------------------------------------------


def _examples(planned: Planned, layer: Layer, use: Use, subsample: int, moments: bool) -> tuple[int, ...]:
    """Which of all atoms of a result are the examples; none where nothing asks for single ones, or there is one only.

    With `subsample` the first is what is thinned: whole sequences, where tokens are examples.

    Raises:
      ValueError: they have no axis of their own, or are fewer than `subsample`.
    """
    n, read, name = planned.num_examples, use.read, layer.params[0]
    if read.groups is not None and (moments or subsample > 1 or layer.weight_sharing == "reduce"):
        raise ValueError(
            f"parameter {name!r} is read by {read.name}, whose rows are sorted by their groups: which examples they "
            "are is not known there, so subsample=, reduce= and basis= are not for it. Leave it out with skip=."
        )
    thinned: tuple[int, ...] = ()
    if subsample > 1 and (moments or layer.weight_sharing != "reduce"):
        count = planned.found.marks.sequences(n)
        if subsample > count:
            what = "example(s)" if count == n else "sequence(s)"
            way_out = "" if count == n else ". To take single tokens mark the output as [sequences * tokens, features]"
            raise ValueError(f"subsample={subsample}, but layer {layer.name!r} sees {count} {what} at a time{way_out}")
        thinned = _result_axis(planned, use, n if _sizes(planned, use, n, name) else count, name)
    if not moments:
        return _result_axis(planned, use, n, name) if layer.weight_sharing == "reduce" else thinned
    flat = axes_lib.flatten(read.y_axes)
    rows = tuple(p for p, _ in read.rows)
    if math.prod(flat[p].size for p in rows) == n:
        examples = rows  # a row for each example
    else:
        alone = n == 1 or read.images or _sizes(planned, use, n, name)
        tokens = () if alone else planned.found.marks.token_axes(flat, n)
        examples = tokens if math.prod(flat[p].size for p in tokens) == n else _result_axis(planned, use, n, name)
    return tuple(sorted(examples, key=lambda p: p not in thinned))


def _in_runs(planned: Planned, arrange: Arrangement) -> Arrangement:
    """An arrangement that knows how many rows of a sequence are examples, where the axis of all rows has them."""
    n = planned.num_examples
    folded = arrange.examples and arrange.split[arrange.examples[0]] == n
    return arrange._replace(within=n // planned.found.marks.sequences(n) if folded else 1)


def _sizes(planned: Planned, use: Use, n: int, parameter: str) -> list[int]:
    """Positions, among all atoms of a result, of those that may be the axis of `n` examples.

    Raises:
      ValueError: tokens of sequences are examples, and the axis of all comes behind one that may be of the sequences.
    """
    flat = axes_lib.flatten(use.read.y_axes)
    sizes = {position: atom.size for position, atom in enumerate(flat) if not atom.of_leaf}
    found = [position for position, size in sizes.items() if size == n]
    sequences = planned.found.marks.sequences(n)
    if found and not use.read.images and 1 < sequences < n and next(iter(sizes.values())) == sequences:
        raise ValueError(
            f"{_where(use, parameter)}: it is not clear whether its first axis has the {sequences} sequences, or "
            f"another the {n} tokens of all of them. Take another number of sequences."
        )
    return found


def _where(use: Use, parameter: str) -> str:
    return f"parameter {parameter!r} is read by {use.read.name} on an array of shape {list(use.read.shape)}"


def _result_axis(planned: Planned, use: Use, n: int, parameter: str) -> tuple[int, ...]:
    """Which of all atoms of a result are the `n` examples; none for a single one, which needs no axis.

    The dimension numbers of a convolution say it: nothing else of the same length can be taken for its images. With the
    kernel on the left of a product the examples come behind the outputs; that they lead its input says it.
    """
    read = use.read
    if read.images and axes_lib.flatten(read.x_axes)[0].size == n:
        return (read.images[0],)
    if read.op == "dense" and n > 1 and not read.reorders:
        leading = [y for y, x in read.rows if x == 0]
        if leading and axes_lib.flatten(read.x_axes)[0].size == n:
            return (leading[0],)
    example = _example_position(planned, use, n, parameter)
    return () if example is None else (example,)


def _example_position(planned: Planned, use: Use, n: int, parameter: str) -> int | None:
    """Which atom of a result is the axis of the `n` examples, by its length; None for a single example.

    Raises:
      ValueError: none can be, or another might.
    """
    if n == 1:
        return None
    read, axes = use.read, use.read.y_axes
    flat = axes_lib.flatten(axes)
    example = next(iter(_sizes(planned, use, n, parameter)), None) if read.op != "conv" else None
    # Behind another axis, length alone tells the examples only if they can be on no other.
    others = [p for p, atom in enumerate(flat) if not atom.of_leaf and atom.size % n == 0 and p != example]
    # Where a kernel has been broadcast, then reshaped, its axes say nothing about the order of the data.
    axis_of = [axis for axis in axes for _ in axis]
    joined = example is not None and sum(not atom.of_leaf for atom in axis_of[example]) > 1
    where = _where(use, parameter)
    if joined or (others and (example or read.reorders)):
        raise ValueError(
            f"{where}: it is not clear which of its axes has the {n} examples. Put the examples first, or take another "
            "number of them."
        )
    if example is None:
        raise ValueError(
            f"{where} none of whose axes has the {n} examples: pass another num_examples= to value_and_grad, or keep "
            "the examples on an axis of their own there, or leave it out with skip=. Where the loss uses a part of the "
            "output alone, as logits[:, :-1], give the network that part of the inputs."
        )
    return example


# -- elementwise layers ------------------------------------------------------------------------------------------------


def _plan_elementwise(planned: Planned, layer: Layer, uses: list[list[Use]], subsample: int) -> None:
    n, shapes = planned.num_examples, planned.found.reads.shapes
    probes: dict[Key, tuple[int, np.ndarray]] = {}  # of which leaf it is, and of which of its entries
    known: dict[tuple, Key] = {}
    taps: list[ElementwiseTap] = []
    counts: set[int] = set()
    for column, (parameter, own) in enumerate(zip(layer.params, uses, strict=True)):
        dtype = jnp.result_type(*{use.read.dtype for use in own})
        for use in own:
            arrange = _elementwise_arrangement(planned, use, parameter)
            flat = axes_lib.flatten(use.read.y_axes)
            counts.add(math.prod(flat[p].size for p in arrange.examples))
            if len(counts) > 1:
                raise ValueError(
                    f"parameter {parameter!r} is read on arrays that have {' and '.join(map(str, sorted(counts)))} of "
                    f"the {n} examples: pass num_examples= to value_and_grad"
                )
            atoms = [*use.scanned, *(flat[p] for p in arrange.features)]
            where = axes_lib.entries(shapes[use.leaf], use.view.start, atoms)
            # Uses of the same entries are summed for each example before they are squared.
            key = known.setdefault((column, use.iterated, where.tobytes()), (layer.name, len(known)))
            probes[key] = column, where
            taps.append(ElementwiseTap(key, use, arrange, dtype))
    columns = _columns(planned, layer, taps, probes)
    # Uses that number their examples in different ways would take different ones.
    runs, *others = {tap.arrange.runs for tap in taps}
    subsample = 1 if others else subsample
    taken = -(-runs // subsample)
    for tap in taps:
        if columns and probes[tap.key][0] > 0:
            continue  # the shift's are formed together with those of its scale
        tap = dataclasses.replace(tap, columns=columns, subsample=subsample)
        width = math.prod(tap.arrange.split[p] for p in tap.arrange.features)
        shape = (width, columns, columns) if columns else (next(iter(counts)) // runs * taken, width)
        planned.probes[tap.key] = jax.ShapeDtypeStruct((*tap.use.iterated, *shape), tap.dtype)
        planned.place(tap)
    keys = [key for key, (column, _) in probes.items() if not (columns and column)]
    finish = _of_moments if columns else _of_gradients
    entries = [probes[key] for key in keys]
    planned.finish[layer.name] = keys, lambda sums: finish(layer, n * runs / taken, entries, sums)


def _elementwise_arrangement(planned: Planned, use: Use, parameter: str) -> Arrangement:
    n, flat = planned.num_examples, axes_lib.flatten(use.read.y_axes)
    examples: tuple[int, ...] = ()
    if n > 1 and not _sizes(planned, use, n, parameter):
        examples = planned.found.marks.token_axes(flat, n)
    if not examples:
        example = _example_position(planned, use, n, parameter)
        examples = () if example is None else (example,)
    rows = [p for p, atom in enumerate(flat) if not atom.of_leaf and p not in examples]
    # Entries are put in their places as they are read.
    return _in_runs(planned, axes_lib.arrangement(use.read.y_axes, (), examples, rows)._replace(flips=()))


def _columns(
    planned: Planned, layer: Layer, taps: list[ElementwiseTap], probes: dict[Key, tuple[int, np.ndarray]]
) -> int | None:
    """How many parameters of a channel a tap can form the moments of by itself, which takes no per-example gradients.

    That is so where every entry is read once, and a shift is added right behind the product with its scale. None where
    it is not.
    """
    read = np.zeros((len(layer.params), layer.d_out), int)
    for tap in taps:
        column, where = probes[tap.key]
        np.add.at(read[column], where, tap.use.times)
    if not (read == 1).all():
        return None
    scales = {id(tap.use): tap for tap in taps if probes[tap.key][0] == 0}
    for tap in taps:
        use = tap.use
        if probes[tap.key][0] == 0:
            continue
        assert use.joined is not None
        scale = scales.get(id(planned.found.reads.uses[use.joined[0]]))
        same = scale is not None and np.array_equal(probes[scale.key][1], probes[tap.key][1])
        if not (same and use.directly and use.read.sign == 1):
            return None
    return len(layer.params)


def _of_moments(layer: Layer, n: float, entries: list[tuple[int, np.ndarray]], sums: list[jax.Array]) -> Unitwise:
    moments = jnp.concatenate([own.reshape(-1, layer.d_in, layer.d_in) for own in sums])
    where = np.concatenate([where for _, where in entries])
    return Unitwise(n * (moments if np.array_equal(where, np.arange(layer.d_out)) else moments[np.argsort(where)]))


def _of_gradients(layer: Layer, n: float, entries: list[tuple[int, np.ndarray]], sums: list[jax.Array]) -> Unitwise:
    columns: list[list[jax.Array]] = [[] for _ in layer.params]
    for (column, where), g in zip(entries, sums, strict=True):
        g = jnp.moveaxis(g, -2, 0).reshape(g.shape[-2], -1)
        if not np.array_equal(where, np.arange(layer.d_out)):
            g = jnp.zeros((len(g), layer.d_out), g.dtype).at[:, where].set(g)
        columns[column].append(g)
    each = [sum(parts[1:], parts[0]) for parts in columns]
    moments = [[jnp.sum(a * b, axis=0) for b in each] for a in each]
    return Unitwise(n * jnp.stack([jnp.stack(row, axis=-1) for row in moments], axis=-2))
