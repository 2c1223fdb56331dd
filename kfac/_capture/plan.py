"""From layers to taps: where they stand, and what brings the sums that they collect to factors."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from kfac._capture import axes as axes_lib
from kfac._capture.axes import Atom
from kfac._capture.find_layers import Found, layers_of, placed_rows
from kfac._capture.outputs import Marks
from kfac._capture.spread import Spread
from kfac._capture.states import Use, by_part
from kfac._capture.taps import ElementwiseTap, Key, KroneckerTap, Plan, Tap
from kfac._capture.trace import Trace
from kfac._factors import Factors, Kronecker, Ragged, Tied, Unitwise
from kfac._layers import KRONECKER_KINDS, UNITWISE_KINDS, Layer, Layers
from kfac._statistics.convolution import Convolution
from kfac._statistics.rows import Arrangement, Dense, Lookup, diagonal_blocks, in_blocks
from kfac._varying import AxisName, dividing_axes, split_along, whole, within_devices


@dataclasses.dataclass
class Planned:
    """All that `value_and_grad` needs to collect and finish the statistics of a loss.

    Attributes:
      found: the layers.
      num_examples: `n`, that of which the loss is the mean.
      batch: how many the batch has; None where that is not known.
      plan: where the taps are.
      lies: the explicit axes of a mesh along which the batch is split.
      wire: dtype of sums between devices.
      probes: shape and dtype of what each tap sums.
      finish: what brings these sums to factors, by layer, and their keys.
      spread: what brings the eigenvectors of a layer to its taps, by layer.
    """

    found: Found
    num_examples: int
    batch: int | None
    plan: Plan
    lies: AxisName | None = None
    wire: str = "float32"
    probes: dict[Key, Any] = dataclasses.field(default_factory=dict)
    finish: dict[str, tuple[list[Key], Callable[[list[Any]], Any]]] = dataclasses.field(default_factory=dict)
    spread: dict[str, Callable[[Kronecker], dict[Key, Kronecker]]] = dataclasses.field(default_factory=dict)

    def factors(self, sums: dict[Key, Any]) -> Factors:
        """Factors from the cotangents of the probes."""
        finishers = {layer.name: self.finish[layer.name] for layer in self.found.layers.with_factors}
        return Factors({name: finish([sums[key] for key in keys]) for name, (keys, finish) in finishers.items()})

    def place(self, tap: Tap) -> None:
        """Puts a tap behind an op, and tells each scan around it whether the tap's probe is sliced there."""
        path = tap.use.path
        self.plan.at(path).taps.setdefault(path[-1], []).append(tap)
        for loop, iterates in tap.use.levels(examples=isinstance(tap, ElementwiseTap)):
            inside = self.plan.at(path[: loop.place + 2]).iterated
            inside[tap.key] = iterates
            if isinstance(tap, KroneckerTap) and tap.basis:
                inside[tap.basis] = iterates


def plan_taps(
    traced: Trace, options: Layers, marks: Marks, num_examples: int | None, subsample: int, moments: bool, wire: str
) -> Planned:
    """Finds the layers of a traced loss and plans their taps.

    Args:
      traced: the traced loss.
      options: what holds the options of `find_layers`.
      marks: its marked outputs.
      num_examples: the number of examples, if the user gave it.
      subsample: statistics come from every `subsample`-th example.
      moments: whether taps also sum squares of per-example gradients, in a basis.
      wire: dtype of sums between devices.

    Raises:
      ValueError: the number of examples is not clear, or below `subsample`; the layers are not those of `options`.
    """
    found = layers_of(traced, options, marks, num_examples)
    n, batch = found.num_examples, traced.batch.num_examples
    if n is None and found.layers.with_factors:
        raise ValueError(found.unclear)
    if subsample > (batch or n or subsample):
        raise ValueError(f"subsample={subsample}, but the batch has {batch or n} example(s)")
    check_same(options, found.layers)
    planned = Planned(found, n or 1, batch, found.reads.plan, traced.batch.lies, wire)
    corrected = {layer.name for layer in options if moments and layer.correctable}
    for layer in found.layers:
        uses = found.uses[layer.name]
        if layer.kind in KRONECKER_KINDS:
            _plan_kronecker(planned, layer, uses[0], subsample, layer.name in corrected)
        elif layer.kind in UNITWISE_KINDS:
            _plan_elementwise(planned, layer, uses, subsample)
    return planned


def check_same(expected: Layers, found: Layers) -> None:
    if expected == found:
        return
    if expected.paths != found.paths:
        differing = ", ".join(sorted(set(expected.paths) ^ set(found.paths))[:5])
        raise ValueError(f"the parameters are not those that `layers` was found with; they differ in {differing}")
    a, b = next((a, b) for a, b in zip(expected, found, strict=False) if a != b)
    other = [f.name for f in dataclasses.fields(a) if f.compare and getattr(a, f.name) != getattr(b, f.name)]
    raise ValueError(
        f"loss_fn has other layers than `layers`: expected {a.describe()}, found {b.describe()}, which differ in "
        f"{', '.join(other)}. Call find_layers with the same function and with arguments of the same kind."
    )


# -- Kronecker layers --------------------------------------------------------------------------------------------------


def _plan_kronecker(planned: Planned, layer: Layer, uses: list[Use], subsample: int, moments: bool) -> None:
    biases, paths = layer.params[1:], planned.found.layers.paths
    with_bias = {use.joined[0] for use in planned.found.reads.uses if use.joined and paths[use.leaf] in biases}
    dtype = jnp.result_type(*{use.read.dtype for use in uses})
    taps = []
    for use in uses:
        index = next(k for k, other in enumerate(planned.found.reads.uses) if other is use)
        if use.late:
            planned.plan.at(use.path).late[use.path[-1]] = planned.batch or 1
        use = use.for_all(planned.batch or 1)
        read = use.read
        examples = _examples(planned, layer, use, subsample, moments)
        rest = [p for p, atom in enumerate(axes_lib.flatten(read.y_axes)) if not atom.of_leaf and p not in examples]
        in_x = dict(read.rows)
        x_rows = [[in_x[p] for p in part if p in in_x] for part in (examples, rest)]
        turned = use.layout != layer.layouts[0]
        tap = KroneckerTap(
            key=_key(layer, use),
            use=use,
            arrange_x=axes_lib.arrangement(read.x_axes, read.batched, *x_rows),
            arrange_g=axes_lib.arrangement(read.y_axes, read.batched, examples, rest),
            images=not examples or (read.op == "conv" and x_rows[0] == [0]),
            homogeneous=1.0 if _counted(uses) or index in with_bias else 0.0 if layer.has_bias else None,
            dtype=dtype,
            diagonal=tuple(_OTHER[side] for side in layer.diagonal) if turned else layer.diagonal,
            cut=(1, 1) if _counted(uses) else layer.cut[::-1] if turned else layer.cut,
            reduce=layer.weight_sharing == "reduce",
            subsample=subsample,
            basis=_basis_key(layer, use.part) if moments else None,
        )
        taps.append(tap)
    spread = _spread_taps(planned, layer, taps)
    for tap in spread or taps:
        planned.place(tap)
    _finish_kronecker(planned, layer, uses, dtype, moments, spread[0].spread if spread else None)


def _spread_taps(planned: Planned, layer: Layer, taps: list[KroneckerTap]) -> list[KroneckerTap] | None:
    """Returns the taps of a layer on several devices, which pack sums; None on one, or where others are averaged.

    Over a mesh they are for each device's examples. Where it is not known how these lie XLA adds up whole matrices.
    """
    keys, shapes = {tap.key for tap in taps}, tuple(layer.side_shapes.values())
    combined = any(len(key) > 2 for key in keys) or any(tap.use.read.groups is not None for tap in taps)
    if combined or layer.weight_sharing == "reduce":
        return None
    if within_devices():
        return [dataclasses.replace(tap, spread=Spread(shapes, planned.wire)) for tap in taps]
    alone = len(keys) == len(taps) and all(tap.use.times == 1 for tap in taps)
    taps_or_none = [_spread_tap(tap, planned.batch, Spread(shapes, planned.wire, at_once=alone)) for tap in taps]
    spread_taps = [tap for tap in taps_or_none if tap is not None]
    axes = {tap.spread.axes for tap in spread_taps if tap.spread is not None}
    return spread_taps if len(spread_taps) == len(taps) and len(axes) == 1 else None


def _spread_tap(tap: KroneckerTap, batch: int | None, spread: Spread) -> KroneckerTap | None:
    """Splits the slowest axis of the examples, if it is the slowest of an axis of both arrays."""
    read, geometry = tap.use.read, tap.use.read.geometry
    placed = placed_rows(tap.use, batch) if batch else None
    if placed is None or not placed[1]:
        return None
    position, rows = placed[1][0], dict(read.rows)
    size, g = axes_lib.flatten(read.y_axes)[position].size, axes_lib.begins(read.y_axes, position)
    if isinstance(geometry, Lookup):
        x = 0 if g == 0 else None  # the first axis of the indices
    elif isinstance(geometry, Convolution):
        x = geometry.spec[0] if rows.get(position) == 0 else None
    else:
        x = axes_lib.begins(read.x_axes, rows[position]) if isinstance(geometry, Dense) and position in rows else None
    axes = dividing_axes(size)
    devices = math.prod(jax.sharding.get_abstract_mesh().shape[name] for name in axes)
    if x is None or g is None or not axes:
        return None
    if tap.subsample > 1 and (tap.arrange_g.examples[:1] != (position,) or size // devices % tap.subsample):
        return None  # a device's are not those that one would take

    def shared_out(arrange: Arrangement, position: int | None) -> Arrangement:
        split = (n // devices if k == position else n for k, n in enumerate(arrange.split))
        return arrange._replace(split=tuple(split))

    arrange_x = tap.arrange_x if isinstance(geometry, Lookup) else shared_out(tap.arrange_x, rows[position])
    spread = dataclasses.replace(spread, axes=axes, x=x, g=g)
    return dataclasses.replace(tap, arrange_x=arrange_x, arrange_g=shared_out(tap.arrange_g, position), spread=spread)


def _counted(uses: list[Use]) -> bool:
    """Whether the number of rows that a copy reads is data."""
    return any(use.read.groups is not None for use in uses)


def _finish_kronecker(
    planned: Planned, layer: Layer, uses: list[Use], dtype: Any, moments: bool, over: Spread | None
) -> None:
    """Plans the probes of a Kronecker layer, and how the sums that they collect become its factors.

    Each part of the kernel has a probe, and one more where it is read as its transpose. Its arrays are
    `[*scans, batched, ...]`: an entry for each iteration of the scans that go over the kernel, for each copy in a
    batched product, and then what is summed of one copy. The factors have these in the order of the kernel in memory.

    Args:
      planned: what is known of the loss; takes the probes and what finishes their sums.
      layer: the layer.
      uses: the uses of its kernel.
      dtype: of the sums.
      moments: whether squares of per-example gradients are summed as well.
      over: how the sums are spread over devices; None where they are not.
    """
    n, examples, use = planned.num_examples, planned.batch or 1, uses[0]
    reduce, counted = layer.weight_sharing == "reduce", _counted(uses)
    batched = math.prod(atom.size for atom in use.read.batched)
    shapes = {"A": (examples, layer.d_in), "G": (examples, layer.d_out)} if reduce else dict(layer.side_shapes)
    if moments:
        shapes["moments"] = (layer.d_out, layer.d_in)
    summed = shapes
    if counted:  # whole, and with a homogeneous entry that counts the rows
        uncut = dataclasses.replace(layer, cut=(1, 1)).side_shapes
        summed = {"A": tuple(size + 1 for size in uncut["A"]), "G": uncut["G"]}
    probes = {name: jax.ShapeDtypeStruct((*use.iterated, batched, *shape), dtype) for name, shape in summed.items()}
    if over is not None:
        flat = {name: (math.prod(shape),) if name == "moments" else shape for name, shape in shapes.items()}
        probes = {name: over.probe(use.iterated, batched, shape, dtype) for name, shape in flat.items()}
        shapes = {name: over.room(shape) for name, shape in flat.items()}
    positions = {part[0].part: sum(use.for_all(examples).rows for use in part) / n for part in by_part(uses)}
    keys = list(dict.fromkeys(_key(layer, use) for use in uses))
    for key in keys:
        # Of its transpose, the layer's outputs are the inputs.
        planned.probes[key] = Kronecker(**probes) if len(key) == 2 else Kronecker(probes["G"], probes["A"])
    parts = math.prod(atom.size for atom in use.picked)
    # What the taps arrange is in memory order already; scans go in the order in which the parameter is read.
    batches = sorted((atom._replace(flipped=False) for atom in use.read.batched), key=lambda atom: atom.memory_order)
    stack = [*use.picked, *use.scanned, *batches]
    lead = (layer.copies,) if layer.stacked else ()

    def of_part(sums: Kronecker, positions: float) -> Kronecker | Ragged:
        """The factors of one part, from its sums and the positions of an example."""
        moments = None if sums.moments is None else sums.moments * n
        if counted:
            whole = "A" not in layer.diagonal
            rows = sums.A[..., -1, -1] if whole else sums.A[..., -1]
            a = sums.A[..., :-1, :-1] if whole else sums.A[..., :-1]
            squares = diagonal_blocks(sums.G * n, layer.cut[1])
            return Ragged(diagonal_blocks(a / n, layer.cut[0]), squares, rows / n)
        if reduce:
            return Kronecker(sums.A / positions, sums.G, moments)
        # G = (n / s) sum g g^T with s positions per example.
        return Kronecker(sums.A / n, sums.G * (n / positions), moments)

    def of_transpose(sums: Kronecker, positions: float) -> Kronecker:
        """As `of_part`, of one that is read as its transpose."""
        return Kronecker(sums.G * n, sums.A / (n * positions))

    def products(side: str, rows: jax.Array) -> jax.Array:
        """With `reduce`: one factor, from the rows `[..., n, d]` of all examples."""
        if side in layer.diagonal:
            return jnp.sum(jnp.square(rows), axis=-2)
        count = layer.cut["AG".index(side)]
        rows = in_blocks(rows, count) if count > 1 else rows
        return jnp.einsum("...ni,...nj->...ij", rows, rows, precision=jax.lax.Precision.HIGHEST)

    def of_layer(of_parts: dict[int, Any]) -> Any:
        """The factors of the layer, from those of its parts; zeros for a part that is not read."""
        unread = jax.tree.map(jnp.zeros_like, next(iter(of_parts.values())))
        blocks = [of_parts.get(part, unread) for part in range(parts)]
        stacked = jax.tree.map(lambda *blocks: jnp.stack(blocks), *blocks) if parts > 1 else blocks[0]
        names = {"A": shapes["A"], "squares": shapes["G"], "rows": ()} if counted else shapes
        ordered = {
            f: _in_memory_order(getattr(stacked, f), stack, shape).reshape(*lead, *shape) for f, shape in names.items()
        }
        if reduce:
            ordered |= {"A": products("A", ordered["A"]) / n, "G": products("G", ordered["G"]) * n}
        return Ragged(**ordered) if counted else Kronecker(**ordered)

    def finish(sums: list[Kronecker]) -> Kronecker | Tied | Ragged:
        """The statistics of the layer, from the sums of its probes in the order of `keys`."""
        by_key = dict(zip(keys, sums, strict=True))
        direct = {key[1]: of_part(own, positions[key[1]]) for key, own in by_key.items() if len(key) == 2}
        turned = {key[1]: of_transpose(own, positions[key[1]]) for key, own in by_key.items() if len(key) > 2}
        return Tied(of_layer(direct), of_layer(turned), layer.diagonal, layer.cut) if turned else of_layer(direct)

    def spread(basis: Kronecker) -> dict[Key, Kronecker]:
        """The layer's eigenvectors as the taps of its parts take them, the other way round than `finish`."""

        def arranged(vectors):
            shape = vectors.shape[-2:]
            return _from_memory_order(vectors, stack, shape).reshape(parts, *use.iterated, batched, *shape)

        whole = jax.tree.map(arranged, basis)
        return {_basis_key(layer, part): jax.tree.map(lambda x, part=part: x[part], whole) for part in positions}

    if moments:
        planned.spread[layer.name] = spread
    planned.finish[layer.name] = keys, finish if over is None else over.packed(finish, len(use.iterated), len(lead))


_OTHER = {"A": "G", "G": "A"}


def _key(layer: Layer, use: Use) -> Key:
    """Returns the key of the probe of a use: the part of the layer that it reads, and whether as its transpose."""
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


def _examples(planned: Planned, layer: Layer, use: Use, subsample: int, moments: bool) -> tuple[int, ...]:
    """Returns which atoms of a result are the examples; none where no single examples are asked for, or there is one.

    Where they are not told apart, `subsample` thins whatever rows there are, but not those of ragged products.
    """
    if use.read.groups is not None or not (moments or subsample > 1 or layer.weight_sharing == "reduce"):
        return ()
    placed = placed_rows(use, planned.batch) if planned.batch else None
    if placed is not None and (placed[1] or moments or layer.weight_sharing == "reduce"):
        return placed[1]
    return tuple(p for p, _ in use.read.rows[:1])


# -- elementwise layers ------------------------------------------------------------------------------------------------


class Entries(NamedTuple):
    """What a probe of an elementwise layer is of.

    Attributes:
      column: the leaf, counted in `Layer.params`.
      where: the entries of it.
      lengths: of the scans that the probe has an axis for.
      loops: which of these go over examples.
    """

    column: int
    where: np.ndarray
    lengths: tuple[int, ...]
    loops: tuple[int, ...]


def _plan_elementwise(planned: Planned, layer: Layer, uses: list[list[Use]], subsample: int) -> None:
    n, shapes = planned.batch, planned.found.reads.shapes
    assert n is not None, "where it is not known, vectors have the gradient's own diagonal"
    probes: dict[Key, Entries] = {}
    keys: dict[tuple, Key] = {}
    taps: list[ElementwiseTap] = []
    for column, uses_of_leaf in enumerate(uses):
        dtype = jnp.result_type(*{use.read.dtype for use in uses_of_leaf})
        for use in uses_of_leaf:
            placed = placed_rows(use, n)
            assert placed is not None, "without it the leaf has the gradient's own diagonal"
            flat = axes_lib.flatten(use.read.y_axes)
            rows = [p for p, atom in enumerate(flat) if not atom.of_leaf and p not in placed[1]]
            # Entries are put in their places as they are read.
            arrange = axes_lib.arrangement(use.read.y_axes, (), placed[1], rows)._replace(flips=())
            atoms = [*use.scanned, *(flat[p] for p in arrange.features)]
            where = axes_lib.entries(shapes[use.leaf], use.view.start, atoms)
            # Uses of the same entries are summed for each example before they are squared.
            iterated = [loop for loop, iterates in use.levels(examples=True) if iterates]
            lengths = tuple(loop.length for loop in iterated)
            key = keys.setdefault((column, lengths, placed[1] == (), where.tobytes()), (layer.name, len(keys)))
            probes[key] = Entries(column, where, lengths, tuple(k for k, loop in enumerate(iterated) if loop.longer))
            taps.append(ElementwiseTap(key, use, arrange, dtype))
    # Every how many-th example, where they lie on one axis.
    alone = all(len(tap.arrange.examples) == 1 and not probes[tap.key].loops for tap in taps)
    every = subsample if alone else 1
    for tap in taps:
        sizes = [[tap.arrange.split[p] for p in part] for part in (tap.arrange.examples, tap.arrange.features)]
        shape = -(-math.prod(sizes[0]) // every), math.prod(sizes[1])
        lengths = probes[tap.key].lengths
        lies = split_along(planned.lies if len(sizes[0]) == 1 else None, (*lengths, *shape), len(lengths))
        planned.probes[tap.key] = jax.ShapeDtypeStruct((*lengths, *shape), tap.dtype, sharding=lies)
        planned.place(
            dataclasses.replace(tap, subsample=every, lies=None if lies is None else PartitionSpec(*lies.spec[-2:]))
        )
    weight, known_entries = planned.num_examples * n / -(-n // every), list(probes.values())
    planned.finish[layer.name] = list(probes), whole(functools.partial(_of_gradients, layer, weight, known_entries))


def _of_gradients(layer: Layer, n: float, entries: list[Entries], sums: list[jax.Array]) -> Unitwise:
    columns: list[list[jax.Array]] = [[] for _ in layer.params]
    for (column, where, _, loops), g in zip(entries, sums, strict=True):
        g = jnp.moveaxis(g, (*loops, -2), range(len(loops) + 1))
        g = g.reshape(math.prod(g.shape[: len(loops) + 1]), -1)
        if not np.array_equal(where, np.arange(layer.d_out)):
            g = jnp.zeros((len(g), layer.d_out), g.dtype).at[:, where].set(g)
        columns[column].append(g)
    each = [sum(parts[1:], parts[0]) for parts in columns]
    moments = [[jnp.sum(a * b, axis=0) for b in each] for a in each]
    return Unitwise(n * jnp.stack([jnp.stack(row, axis=-1) for row in moments], axis=-2))
