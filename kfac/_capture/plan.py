"""Plan the taps for all layers: their operations, and how they convert inputs and gradients to the normal form."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec, get_abstract_mesh

from kfac._capture import axes as axes_lib
from kfac._capture.axes import arrangement, begins, flatten
from kfac._capture.find_layers import layers_of
from kfac._capture.finish import ElementwiseFinisher, Entries, KroneckerFinisher
from kfac._capture.outputs import Marks
from kfac._capture.primitives import Read
from kfac._capture.reduce_scatter import ReduceScatter
from kfac._capture.states import Use
from kfac._capture.taps import ElementwiseTap, Key, KroneckerTap, TapPlan
from kfac._capture.trace import Trace, split_over
from kfac._factors import Basis, Factors, Kronecker, Ragged
from kfac._layers import Layer, Layers
from kfac._mesh import AxisName, device_axes, dividing_axes, split_along
from kfac._statistics.convolution import Convolution
from kfac._statistics.rows import Arrangement, Lookup

# A probe, or its cotangent.
Probe = Array | jax.ShapeDtypeStruct | Kronecker | Ragged


class StatisticsPlan(NamedTuple):
    """A plan by which `value_and_grad` collects and finishes the statistics of a loss.

    Attributes:
      num_examples: `n`, the number of examples over which the loss is a mean.
      batch: the number of examples in the batch; None if it is not known.
      plan: the taps at their operations.
      lies: the explicit mesh axes along which the batch is split.
      wire: dtype in which devices send sums.
      finishers: by layer name, the finisher that converts the cotangents of the layer's probes to its statistics.
    """

    num_examples: int
    batch: int | None
    plan: TapPlan
    lies: AxisName | None
    wire: str
    finishers: dict[str, KroneckerFinisher | ElementwiseFinisher]

    @property
    def probes(self) -> dict[Key, Probe]:
        """Shapes and dtypes of all probes, by key."""
        probes: dict[Key, Probe] = {}
        for finisher in self.finishers.values():
            probes |= finisher.probes
        return probes

    def eigenvectors(self, basis: Mapping[str, Basis]) -> dict[Key, Any]:
        """Arrange the eigenvectors of the layers in `basis` for the layers' taps."""
        vectors: dict[Key, Any] = {}
        for name, of_layer in basis.items():
            finisher = self.finishers[name]
            if isinstance(finisher, KroneckerFinisher):
                vectors |= finisher.eigenvectors(of_layer)
        return vectors

    def factors(self, cotangents: Mapping[Key, Any]) -> Factors:
        """Compute the factors from the probes' cotangents."""
        blocks = {}
        for name, finisher in self.finishers.items():
            blocks[name] = finisher.finish([cotangents[key] for key in finisher.probes])
        return Factors(blocks)


def plan_taps(
    traced: Trace,
    layers: Layers,
    marks: Marks,
    num_examples: int | None,
    moments: bool,
    wire: str,
) -> StatisticsPlan:
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
    if analysis.layers._unclear:
        raise ValueError(analysis.layers._unclear)
    check_same(layers, analysis.layers)
    planned = StatisticsPlan(
        analysis.num_examples or 1,
        traced.batch.num_examples,
        TapPlan(analysis.reads.multipliers, analysis.reads.merges),
        split_over(traced),
        wire,
        {},
    )
    for layer in layers.with_factors:
        uses = [analysis.uses[path] for path in layer.params]
        if layer.kronecker:
            _plan_kronecker(planned, layer, uses, moments and layer.supports_ekfac)
        else:
            _plan_elementwise(planned, layer, uses)
    return planned


# Attributes that depend on the size and length of a batch, and the cuts of factors, which only `find_layers` makes.
BATCH_DEPENDENT = "overlap positions has_example_gradients num_blocks diagonal".split()


def check_same(expected: Layers, found: Layers) -> None:
    """Raise a `ValueError` if a loss has other layers than `expected`."""
    if expected.paths != found.paths:
        differing = ", ".join(sorted(set(expected.paths) ^ set(found.paths))[:5])
        raise ValueError(
            f"the parameters are not those that `layers` was found with; they differ in {differing}"
        )
    for a, b in zip(expected, found, strict=False):
        others = []
        for field in dataclasses.fields(a):
            name = field.name
            compared = field.compare and name not in BATCH_DEPENDENT
            if compared and getattr(a, name) != getattr(b, name):
                others.append(name)
        if others:
            raise ValueError(
                f"loss_fn has other layers than `layers`: expected {a.describe()}, found {b.describe()}, which differ "
                f"in {', '.join(others)}. Call find_layers with the same function and with arguments of the same kind."
            )


def _rows(use: Use, examples: Collection[int]) -> list[int]:
    """Return the positions of the result's atoms that hold neither a part of the leaf nor the examples."""
    flat = flatten(use.read.y_axes)
    return [p for p, atom in enumerate(flat) if not (atom.of_leaf or p in examples)]


# -- Kronecker layers --------------------------------------------------------------------------------------------------


def _plan_kronecker(
    planned: StatisticsPlan,
    layer: Layer,
    uses: Sequence[list[Use]],
    moments: bool,
) -> None:
    """Put taps behind all uses of a kernel, and plan how their sums become factors.

    Args:
      planned: the plan to extend.
      layer: the layer.
      uses: the uses of the kernel and of the bias, if any. Uses that read the same part of the kernel in the same
        orientation share a probe.
      moments: whether the taps also sum squares of per-example gradients in an eigenbasis.
    """
    batch = planned.batch or 1
    kernel_uses, *bias_uses = uses
    with_bias = {
        use.joined[0] for of_bias in bias_uses for use in of_bias if use.joined
    }
    dtype = jnp.result_type(*{use.read.dtype for use in kernel_uses})
    taps = []
    for use in kernel_uses:
        read = use.read
        examples = _examples(planned, layer, use, moments)
        rows = _rows(use, examples)
        in_x = dict(read.rows)
        x_examples = [in_x[p] for p in examples if p in in_x]
        x_rows = [in_x[p] for p in rows if p in in_x]
        role = "" if use.layout == layer.layouts[0] else "transposed"
        key = Key(layer.name, use.part, role)
        tap = KroneckerTap(
            key=key,
            use=use,
            layer=layer,
            arrange_x=arrangement(read.x_axes, read.batched, x_examples, x_rows),
            arrange_g=arrangement(read.y_axes, read.batched, examples, rows),
            homogeneous=float(use.op in with_bias) if layer.has_bias else None,
            dtype=dtype,
            basis=key._replace(role="eigenvectors") if moments else None,
        )
        taps.append(tap)
    taps = _over_devices(planned, layer, taps)
    for tap in taps:
        keys = [tap.key, tap.basis] if tap.basis else [tap.key]
        planned.plan.place(tap, keys, tap.use.loops())
    planned.finishers[layer.name] = KroneckerFinisher(
        layer, taps, planned.num_examples, batch
    )


def _over_devices(
    planned: StatisticsPlan,
    layer: Layer,
    taps: list[KroneckerTap],
) -> list[KroneckerTap]:
    """Return a layer's taps for several devices, which pack their sums.

    The taps stay the same, without packed sums, in these cases:

    - There is only one device.
    - The layer's factors are not linear in the sums (ragged, transposed or reduced kernels).
    - The program runs over a mesh, and a tap's data or gradient cannot be split by examples, or the taps would split
      over different mesh axes. XLA then sums whole matrices.
    """
    linear = layer.weight_sharing == "expand"
    for tap in taps:
        linear &= not tap.key.role and tap.use.read.groups is None
    if not linear:
        return taps
    scatter = ReduceScatter(tuple(layer.side_shapes.values()), planned.wire)
    if device_axes():
        return [dataclasses.replace(tap, scatter=scatter) for tap in taps]
    own_probes = len({tap.key for tap in taps}) == len(taps)
    at_once = own_probes and all(tap.use.times() == 1 for tap in taps)
    scatter = scatter._replace(at_once=at_once)
    result = [_over_mesh(tap, planned.batch, scatter) for tap in taps]
    axes = {tap.scatter.axes if tap.scatter else () for tap in result}
    return result if len(axes) == 1 else taps


def _over_mesh(
    tap: KroneckerTap,
    batch: int | None,
    scatter: ReduceScatter,
) -> KroneckerTap:
    """Return a tap for one device's share of the examples.

    The tap stays the same if no mesh axis divides the examples, or if they do not begin an axis of both the data and
    the gradient.
    """
    read = tap.use.read
    examples = tap.use.examples(batch)
    if not examples:
        return tap
    # The examples may be several atoms, as in `x.reshape(2, n // 2, d)`. The mesh splits the slowest, so that each
    # device has a run of neighbouring examples.
    position = examples[0]
    x = _data_axis(read, position)
    g = begins(read.y_axes, position)
    # `shard_map` cuts an array's axis into runs of neighbours. A run holds whole examples only if the examples are the
    # slowest atom of the axis and the devices divide them.
    axes = dividing_axes(flatten(read.y_axes)[position].size)
    if x is None or g is None or not axes:
        return tap
    devices = math.prod(get_abstract_mesh().shape[name] for name in axes)

    def share(arrange: Arrangement, position: int) -> Arrangement:
        split = list(arrange.split)
        split[position] //= devices
        return arrange._replace(split=tuple(split))

    arrange_x = tap.arrange_x
    # A lookup counts its indices, however many there are, so only its gradient has a shape to divide.
    if not isinstance(read.geometry, Lookup):
        arrange_x = share(arrange_x, dict(read.rows)[position])
    return dataclasses.replace(
        tap,
        arrange_x=arrange_x,
        arrange_g=share(tap.arrange_g, position),
        scatter=scatter._replace(axes=axes, x=x, g=g),
    )


def _data_axis(read: Read, position: int) -> int | None:
    """Return the data's axis that begins with the examples, which are atom number `position` of the result.

    The result is None if there is no such axis.
    """
    row = dict(read.rows).get(position)
    if isinstance(read.geometry, Lookup):
        # The data are the indices. Their first axis must be the result's first axis.
        return 0 if begins(read.y_axes, position) == 0 else None
    if isinstance(read.geometry, Convolution):
        # `rows` counts atoms of the patches `[n, positions..., features]`, but the tap splits the images. Their batch
        # axis is anywhere, and only the patches' first atom comes from it.
        return read.geometry.spec[0] if row == 0 else None
    return None if row is None else begins(read.x_axes, row)


def _examples(
    planned: StatisticsPlan,
    layer: Layer,
    use: Use,
    moments: bool,
) -> tuple[int, ...]:
    """Return the positions of the result's atoms that hold the examples.

    The tuple is empty if the tap need not separate the examples, or if there is a single example. If the order of the
    examples is not known, the first atom that holds rows stands for them.
    """
    by_example = moments or layer.weight_sharing == "reduce"
    if use.read.groups is not None or not by_example:
        return ()
    examples = use.examples(planned.batch)
    if examples is None:
        return tuple(position for position, _ in use.read.rows[:1])
    return examples


# -- elementwise layers ------------------------------------------------------------------------------------------------


def _plan_elementwise(
    planned: StatisticsPlan,
    layer: Layer,
    uses: Sequence[list[Use]],
) -> None:
    """Put taps behind all uses of an elementwise layer's parameters, each with a probe of its own."""
    probes: dict[Key, jax.ShapeDtypeStruct] = {}
    entries = {}
    for column, uses_of_leaf in enumerate(uses):
        dtype = jnp.result_type(*{use.read.dtype for use in uses_of_leaf})
        for use in uses_of_leaf:
            examples = use.examples(planned.batch)
            assert examples is not None, "the leaf would have the gradient's diagonal"
            y_axes = use.read.y_axes
            arrange = arrangement(y_axes, (), examples, _rows(use, examples))
            # The gradients are not flipped, because `where` gives the entries in the order in which they are read.
            arrange = arrange._replace(flips=())
            flat = flatten(y_axes)
            atoms = [*use.scanned, *(flat[p] for p in arrange.features)]
            where = axes_lib.entries(use.view.shape, use.view.start, atoms)
            key = Key(layer.name, len(probes))
            loops = use.loops(examples=True)
            over_examples = tuple(k for k, loop in enumerate(loops) if loop.longer)
            entries[key] = Entries(column, where, over_examples)
            n = math.prod(arrange.split[p] for p in examples)
            units = math.prod(arrange.split[p] for p in arrange.features)
            shape = (*(loop.length for loop in loops), n, units)
            # Only a single axis of examples can be split over devices.
            axes = planned.lies if len(examples) == 1 else None
            lies = split_along(axes, shape, len(loops))
            probes[key] = jax.ShapeDtypeStruct(shape, dtype, sharding=lies)
            spec = None if lies is None else PartitionSpec(axes)
            tap = ElementwiseTap(key, use, arrange, dtype, spec)
            planned.plan.place(tap, [key], loops)
    planned.finishers[layer.name] = ElementwiseFinisher(
        layer, planned.num_examples, probes, entries
    )
