"""Plan the taps for all layers: their operations, and how they convert inputs and gradients to the normal form."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from kfac._capture import axes as axes_lib
from kfac._capture.find_layers import layers_of
from kfac._capture.finish import Sums, basis_key, finish_kronecker, probe_key
from kfac._capture.outputs import Marks
from kfac._capture.spread import Spread
from kfac._capture.states import Use
from kfac._capture.taps import ElementwiseTap, Key, KroneckerTap, Plan, Tap
from kfac._capture.trace import Trace
from kfac._factors import Factors, Unitwise
from kfac._layers import KRONECKER_KINDS, UNITWISE_KINDS, Layer, Layers
from kfac._statistics.convolution import Convolution
from kfac._statistics.rows import Arrangement, Dense, Lookup
from kfac._varying import AxisName, device_axes, dividing_axes, split_along, whole


@dataclasses.dataclass
class Planned:
    """A plan by which `value_and_grad` collects and finishes the statistics of a loss.

    Attributes:
      num_examples: `n`, the number of examples over which the loss is a mean.
      batch: the number of examples in the batch; None if it is not known.
      plan: the taps at their operations.
      lies: the explicit mesh axes along which the batch is split.
      wire: dtype in which devices send sums.
      sums: each layer's probes, by layer name.
    """

    num_examples: int
    batch: int | None
    plan: Plan
    lies: AxisName | None = None
    wire: str = "float32"
    sums: dict[str, Sums] = dataclasses.field(default_factory=dict)

    @property
    def probes(self) -> dict[Key, Any]:
        """Shapes and dtypes of all probes, by key."""
        return {
            key: probe
            for sums in self.sums.values()
            for key, probe in sums.probes.items()
        }

    def factors(self, cotangents: dict[Key, Any]) -> Factors:
        """Compute the factors from the probes' cotangents."""
        return Factors(
            {
                name: sums.finish([cotangents[key] for key in sums.probes])
                for name, sums in self.sums.items()
            }
        )

    def place(self, tap: Tap) -> None:
        """Put a tap behind its operation, and tell each enclosing scan whether it slices the tap's probe."""
        op, levels = (
            tap.use.op,
            tap.use.levels(examples=isinstance(tap, ElementwiseTap)),
        )
        keys = (
            [tap.key, tap.basis]
            if isinstance(tap, KroneckerTap) and tap.basis
            else [tap.key]
        )
        self.plan.taps.setdefault(op, []).append(tap)
        self.plan.look_inside(op, keys, [loop for loop, iterates in levels if iterates])


def plan_taps(
    traced: Trace,
    layers: Layers,
    marks: Marks,
    num_examples: int | None,
    moments: bool,
    wire: str,
) -> Planned:
    """Find the layers of a traced loss and plan their taps.

    Args:
      traced: the traced loss.
      layers: the result of `find_layers`. Its options are used again, and the loss must have the same layers.
      marks: the loss's marked outputs.
      num_examples: the number of examples, if the user gave it.
      moments: whether taps also sum squares of per-example gradients in an eigenbasis.
      wire: dtype in which devices send sums.

    Raises:
      ValueError: the number of examples is not clear, or the loss has other layers than `layers`.
    """
    analysis = layers_of(traced, layers, marks, num_examples)
    n, batch = analysis.num_examples, traced.batch.num_examples
    if analysis.layers.unclear:
        raise ValueError(analysis.layers.unclear)
    check_same(layers, analysis.layers)
    planned = Planned(n or 1, batch, analysis.reads.plan, traced.batch.lies, wire)
    corrected = {layer.name for layer in layers if moments and layer.correctable}
    for layer in analysis.layers:
        uses = analysis.uses[layer.name]
        if layer.kind in KRONECKER_KINDS:
            kernel, biases = uses[0], [use for of_bias in uses[1:] for use in of_bias]
            _plan_kronecker(planned, layer, kernel, biases, layer.name in corrected)
        elif layer.kind in UNITWISE_KINDS:
            _plan_elementwise(planned, layer, uses)
    return planned


def _of_any_images(layers: Layers) -> Layers:
    """Set every layer's `overlap` to 1, because it depends on the image size."""
    return dataclasses.replace(
        layers,
        blocks=tuple(dataclasses.replace(layer, overlap=1.0) for layer in layers),
    )


def check_same(expected: Layers, found: Layers) -> None:
    """Raise a `ValueError` if a loss has other layers than `expected`."""
    expected, found = _of_any_images(expected), _of_any_images(found)
    if expected == found:
        return
    if expected.paths != found.paths:
        differing = ", ".join(sorted(set(expected.paths) ^ set(found.paths))[:5])
        raise ValueError(
            f"the parameters are not those that `layers` was found with; they differ in {differing}"
        )
    a, b = next((a, b) for a, b in zip(expected, found, strict=False) if a != b)
    other = [
        f.name
        for f in dataclasses.fields(a)
        if f.compare and getattr(a, f.name) != getattr(b, f.name)
    ]
    raise ValueError(
        f"loss_fn has other layers than `layers`: expected {a.describe()}, found {b.describe()}, which differ in "
        f"{', '.join(other)}. Call find_layers with the same function and with arguments of the same kind."
    )


# -- Kronecker layers --------------------------------------------------------------------------------------------------


def _plan_kronecker(
    planned: Planned, layer: Layer, uses: list[Use], biases: list[Use], moments: bool
) -> None:
    """Put taps behind all uses of a kernel, and plan how their sums become factors.

    Args:
      planned: the plan to extend.
      layer: the layer.
      uses: the kernel's uses. Uses that read the same part in the same orientation share a probe.
      biases: the bias's uses.
      moments: whether the taps also sum squares of per-example gradients in an eigenbasis.
    """
    batch = planned.batch or 1
    with_bias = {use.joined[0] for use in biases if use.joined}
    dtype = jnp.result_type(*{use.read.dtype for use in uses})
    taps = []
    for use in uses:
        if use.late:
            planned.plan.late[use.op] = batch
        use = use.for_all(batch)
        read = use.read
        examples = _examples(planned, layer, use, moments)
        rest = [
            p
            for p, atom in enumerate(axes_lib.flatten(read.y_axes))
            if not atom.of_leaf and p not in examples
        ]
        in_x = dict(read.rows)
        x_rows = [[in_x[p] for p in part if p in in_x] for part in (examples, rest)]
        turned = use.layout != layer.layouts[0]
        tap = KroneckerTap(
            key=probe_key(layer, use),
            use=use,
            arrange_x=axes_lib.arrangement(read.x_axes, read.batched, *x_rows),
            arrange_g=axes_lib.arrangement(read.y_axes, read.batched, examples, rest),
            images=read.op == "conv" and x_rows[0] == [0],
            homogeneous=1.0 if use.op in with_bias else 0.0 if layer.has_bias else None,
            dtype=dtype,
            diagonal=tuple({"A": "G", "G": "A"}[side] for side in layer.diagonal)
            if turned
            else layer.diagonal,
            cut=layer.cut[::-1] if turned else layer.cut,
            reduce=layer.weight_sharing == "reduce",
            basis=basis_key(layer, use.part) if moments else None,
        )
        taps.append(tap)
    spread = _spread_taps(planned, layer, taps)
    for tap in spread or taps:
        planned.place(tap)
    over = spread[0].spread if spread else None
    planned.sums[layer.name] = finish_kronecker(
        layer, uses, planned.num_examples, batch, dtype, moments, over
    )


def _spread_taps(
    planned: Planned, layer: Layer, taps: list[KroneckerTap]
) -> list[KroneckerTap] | None:
    """Return a layer's taps for several devices, which pack their sums, or None if the sums are not packed.

    Sums are not packed in these cases:

    - There is only one device.
    - The layer's factors are not linear in the sums (ragged, transposed or reduced kernels).
    - The program runs over a mesh, and a tap's data or gradient cannot be split by examples, or the taps would split
      over different mesh axes. XLA then sums whole matrices.
    """
    keys, shapes = {tap.key for tap in taps}, tuple(layer.side_shapes.values())
    combined = any(len(key) > 2 for key in keys) or any(
        tap.use.read.groups is not None for tap in taps
    )
    if combined or layer.weight_sharing == "reduce":
        return None
    if device_axes():
        return [
            dataclasses.replace(tap, spread=Spread(shapes, planned.wire))
            for tap in taps
        ]
    alone = len(keys) == len(taps) and all(tap.use.times == 1 for tap in taps)
    taps_or_none = [
        _spread_tap(tap, planned.batch, Spread(shapes, planned.wire, at_once=alone))
        for tap in taps
    ]
    spread_taps = [tap for tap in taps_or_none if tap is not None]
    axes = {tap.spread.axes for tap in spread_taps if tap.spread is not None}
    return spread_taps if len(spread_taps) == len(taps) and len(axes) == 1 else None


def _spread_tap(
    tap: KroneckerTap, batch: int | None, spread: Spread
) -> KroneckerTap | None:
    """Return a tap for one device's share of the examples.

    The result is None if no mesh axis divides the examples, or if they do not begin an axis of both the data and the
    gradient.
    """
    read, geometry = tap.use.read, tap.use.read.geometry
    examples = tap.use.examples(batch)
    if not examples:
        return None
    position, rows = examples[0], dict(read.rows)
    size, g = (
        axes_lib.flatten(read.y_axes)[position].size,
        axes_lib.begins(read.y_axes, position),
    )
    if isinstance(geometry, Lookup):
        x = 0 if g == 0 else None  # the indices' first axis
    elif isinstance(geometry, Convolution):
        x = (
            geometry.spec[0] if rows.get(position) == 0 else None
        )  # the patches' first atom holds the images
    else:
        x = (
            axes_lib.begins(read.x_axes, rows[position])
            if isinstance(geometry, Dense) and position in rows
            else None
        )
    axes = dividing_axes(size)
    devices = math.prod(jax.sharding.get_abstract_mesh().shape[name] for name in axes)
    if x is None or g is None or not axes:
        return None

    def shared_out(arrange: Arrangement, position: int | None) -> Arrangement:
        split = (
            n // devices if k == position else n for k, n in enumerate(arrange.split)
        )
        return arrange._replace(split=tuple(split))

    arrange_x = (
        tap.arrange_x
        if isinstance(geometry, Lookup)
        else shared_out(tap.arrange_x, rows[position])
    )
    spread = dataclasses.replace(spread, axes=axes, x=x, g=g)
    return dataclasses.replace(
        tap,
        arrange_x=arrange_x,
        arrange_g=shared_out(tap.arrange_g, position),
        spread=spread,
    )


def _examples(
    planned: Planned, layer: Layer, use: Use, moments: bool
) -> tuple[int, ...]:
    """Return the positions of the result's atoms that hold the examples.

    The tuple is empty if the tap need not separate the examples, or if there is a single example. If the order of the
    examples is not known, the first atom that holds rows stands for them.
    """
    if use.read.groups is not None or not (moments or layer.weight_sharing == "reduce"):
        return ()
    examples = use.examples(planned.batch)
    return tuple(p for p, _ in use.read.rows[:1]) if examples is None else examples


# -- elementwise layers ------------------------------------------------------------------------------------------------


class Entries(NamedTuple):
    """The leaf entries for which an elementwise layer's probe collects gradients.

    Attributes:
      column: the leaf's position in `Layer.params`.
      where: the entries' indices in the flat leaf.
      lengths: the lengths of the scans for which the probe has an axis.
      loops: positions, within `lengths`, of the scans over examples.
    """

    column: int
    where: np.ndarray
    lengths: tuple[int, ...]
    loops: tuple[int, ...]


def _plan_elementwise(planned: Planned, layer: Layer, uses: list[list[Use]]) -> None:
    """Put taps behind all uses of an elementwise layer's parameters.

    Uses that read the same entries share a probe, which adds up their gradients for each example.
    """
    n = planned.batch
    assert n is not None, (
        "where it is not known, vectors have the gradient's own diagonal"
    )
    entries: dict[Key, Entries] = {}
    keys: dict[tuple, Key] = {}
    taps: list[ElementwiseTap] = []
    for column, uses_of_leaf in enumerate(uses):
        dtype = jnp.result_type(*{use.read.dtype for use in uses_of_leaf})
        for use in uses_of_leaf:
            examples = use.examples(n)
            assert examples is not None, (
                "without them the leaf has the gradient's own diagonal"
            )
            flat = axes_lib.flatten(use.read.y_axes)
            rows = [
                p
                for p, atom in enumerate(flat)
                if not atom.of_leaf and p not in examples
            ]
            # The gradients are not flipped, because `where` gives the entries in the order in which they are read.
            arrange = axes_lib.arrangement(
                use.read.y_axes, (), examples, rows
            )._replace(flips=())
            atoms = [*use.scanned, *(flat[p] for p in arrange.features)]
            where = axes_lib.entries(use.view.shape, use.view.start, atoms)
            # Uses of the same entries get the same key: their gradients are summed per example before squaring.
            iterated = [
                loop for loop, iterates in use.levels(examples=True) if iterates
            ]
            lengths = tuple(loop.length for loop in iterated)
            key = keys.setdefault(
                (column, lengths, examples == (), where.tobytes()),
                (layer.name, len(keys)),
            )
            entries[key] = Entries(
                column,
                where,
                lengths,
                tuple(k for k, loop in enumerate(iterated) if loop.longer),
            )
            taps.append(ElementwiseTap(key, use, arrange, dtype))
    probes: dict[Key, jax.ShapeDtypeStruct] = {}
    for tap in taps:
        sizes = [
            [tap.arrange.split[p] for p in part]
            for part in (tap.arrange.examples, tap.arrange.features)
        ]
        shape = math.prod(sizes[0]), math.prod(sizes[1])
        lengths = entries[tap.key].lengths
        lies = split_along(
            planned.lies if len(sizes[0]) == 1 else None,
            (*lengths, *shape),
            len(lengths),
        )
        probes[tap.key] = jax.ShapeDtypeStruct(
            (*lengths, *shape), tap.dtype, sharding=lies
        )
        planned.place(
            dataclasses.replace(
                tap, lies=None if lies is None else PartitionSpec(*lies.spec[-2:])
            )
        )
    finish = functools.partial(
        _of_gradients, layer, planned.num_examples, list(entries.values())
    )
    planned.sums[layer.name] = Sums(probes, whole(finish))


def _of_gradients(
    layer: Layer, n: float, entries: list[Entries], sums: list[jax.Array]
) -> Unitwise:
    """Return an elementwise layer's block from the per-example gradients in its probes.

    A channel's block is `n sum_i g_i g_i^T`, where `g_i` is example `i`'s gradient for the channel's parameters.
    """
    columns: list[list[jax.Array]] = [[] for _ in layer.params]
    for (column, where, _, loops), g in zip(entries, sums, strict=True):
        g = jnp.moveaxis(g, (*loops, -2), range(len(loops) + 1))
        g = g.reshape(math.prod(g.shape[: len(loops) + 1]), -1)
        if not np.array_equal(where, np.arange(layer.d_out)):
            g = jnp.zeros((len(g), layer.d_out), g.dtype).at[:, where].set(g)
        columns[column].append(g)
    of_leaves = [sum(parts[1:], parts[0]) for parts in columns]
    moments = [[jnp.sum(a * b, axis=0) for b in of_leaves] for a in of_leaves]
    return Unitwise(
        n * jnp.stack([jnp.stack(row, axis=-1) for row in moments], axis=-2)
    )
