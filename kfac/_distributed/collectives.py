"""Messages between devices and block owners."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from kfac._distributed.message_layout import (
    MessageLayout,
    make_buckets,
    make_message_layout,
)
from kfac._distributed.owners import BlockAssignment
from kfac._mesh import AxisNames, as_varying, varying_axes
from kfac._packing import cut

Stacks = dict[str, Array]
BlockAssignments = Mapping[str, BlockAssignment]


# The key of the remainders' segments among the groups' names in a message.
REST = ""


def _fused(
    message: Callable[[Array], Array],
    arrays: Stacks,
) -> Stacks:
    """Apply the collective `message` to all arrays at once, concatenated along their last axis."""
    if not arrays:
        return {}
    result = message(jnp.concatenate(list(arrays.values()), axis=-1))
    parts = cut(result, [x.shape[-1] for x in arrays.values()])
    return dict(zip(arrays, parts, strict=True))


def means_to_owners(
    stacks: Stacks,
    assignments: BlockAssignments,
    owners: AxisNames,
    buckets: int,
    replicas: AxisNames,
) -> Stacks:
    """Average stacks of blocks over devices, and give each owner the means of its blocks.

    Each bucket takes a reduce-scatter. If the segments' lengths differ, the bucket also takes an all-to-all. With
    several buckets, the first message can overlap with the backward pass. Groups without an assignment are all-reduced.

    Args:
      stacks: `[blocks, ...]` for each group.
      assignments: how each group is dealt to devices. A group without an assignment goes to all devices.
      owners: the axes over which blocks are dealt.
      buckets: into how many buckets the groups are divided.
      replicas: further axes to average over. Owners along these axes add up their sums.

    Returns:
      For each group this device's stack `[positions, ...]`, or `[blocks, ...]` without an assignment. Sums are formed
      in the dtype of `stacks`. The means have this dtype or float32, whichever is wider.
    """
    flat = _flatten_blocks(stacks)
    sizes = {name: x.size for name, x in flat.items() if name in assignments}
    sums: Stacks = {}
    for names in make_buckets(sizes, buckets):
        owned = _sums_to_owners(
            {name: flat[name] for name in names}, assignments, owners
        )
        if replicas:
            owned = _fused(lambda x: lax.psum(x, replicas), owned)
        sums |= owned
    axes = (*owners, *replicas)
    everywhere = {
        name: x.reshape(-1) for name, x in flat.items() if name not in assignments
    }
    sums |= _fused(lambda x: lax.psum(x, axes), everywhere)
    means = {}
    for name, x in stacks.items():
        total = sums[name].reshape(-1, *x.shape[1:])
        dtype = jnp.promote_types(total.dtype, jnp.float32)
        means[name] = total.astype(dtype) / lax.axis_size(axes)
    return means


def _flatten_blocks(stacks: Stacks) -> Stacks:
    """Return stacks `[blocks, ...]` as `[blocks, elements]`."""
    return {name: x.reshape(len(x), -1) for name, x in stacks.items()}


def _layout_of(
    flat: Stacks,
    assignments: BlockAssignments,
) -> MessageLayout:
    """Return the layout of the remainders of groups `[blocks, elements]`."""
    return make_message_layout(
        assignments, {name: x.shape[1] for name, x in flat.items()}
    )


def _sums_to_owners(
    flat: Stacks,
    assignments: BlockAssignments,
    owners: AxisNames,
) -> Stacks:
    """Sum blocks over devices, and return this device's blocks.

    Args:
      flat: `[blocks, elements]` for each group.
      assignments: how each group is dealt to devices.
      owners: the axes over which blocks are dealt.

    Returns:
      A vector `[positions * elements]` for each group. A device without a remainder block has arbitrary numbers at the
      last position.
    """
    layout = _layout_of(flat, assignments)
    devices = layout.devices
    sent = {}
    remainders = {}
    for name, x in flat.items():
        # Every device owns equally many of the first blocks.
        even = assignments[name].full * devices
        remainders[name] = x[even:]
        if even:
            by_position = x[:even].reshape(-1, devices, x.shape[1])
            sent[name] = by_position.swapaxes(0, 1).reshape(devices, -1)
    if layout.starts:
        sent[REST] = _pack_remainders(remainders, layout)
    owned = _fused(lambda x: lax.psum_scatter(x, owners), sent)
    if not layout.starts:
        return owned
    segment = _collect_segment(owned.pop(REST), layout, owners)
    for name, starts in layout.starts.items():
        begin = of_this_device(starts, layout.room, owners)
        last = lax.dynamic_slice_in_dim(segment, begin, flat[name].shape[1])
        owned[name] = jnp.append(owned[name], last) if name in owned else last
    return owned


def gather_from_owners(
    owned: Stacks,
    assignments: BlockAssignments,
    owners: AxisNames,
) -> Stacks:
    """Gather each device's `[positions, ...]` to all blocks `[blocks, ...]` on all devices.

    This takes one all-gather. If the segments' lengths differ, an all-to-all before it distributes the pieces of longer
    segments.
    """
    if not owned:
        return {}
    flat = _flatten_blocks(owned)
    layout = _layout_of(flat, assignments)
    sent = {}
    for name, x in flat.items():
        full = assignments[name].full
        if full:
            sent[name] = x[:full].reshape(-1)
    if layout.starts:
        segment = _fill_segment(flat, layout, owners)
        sent[REST] = _distribute_segment(segment, layout, owners)

    # If `shard_map` tracks varying axes, mark the result as replicated. Under `vmap`, JAX has no such gather.
    to = "invarying" if varying_axes(lax.axis_index(owners)) else "varying"
    gathered = _fused(lambda x: lax.all_gather(x, owners, to=to), sent)
    segment_of = {}
    if layout.starts:
        segment_of = _unpack_remainders(gathered.pop(REST), layout)
    result = {}
    for name, x in flat.items():
        elements = x.shape[1]
        blocks = []
        if name in gathered:
            by_device = gathered[name].reshape(layout.devices, -1, elements)
            blocks.append(by_device.swapaxes(0, 1).reshape(-1, elements))
        for device, start in layout.starts.get(name, {}).items():
            block = segment_of[device][start : start + elements]
            blocks.append(block.reshape(-1, elements))
        result[name] = jnp.concatenate(blocks).reshape(-1, *owned[name].shape[1:])
    return result


def of_this_device(
    table: Mapping[int, int],
    otherwise: int,
    owners: AxisNames,
) -> Array:
    """Return this device's entry in a table that is keyed by device.

    Args:
      table: the entries.
      otherwise: the result if the table lacks this device. No entry may be larger.
      owners: the axes over which devices are numbered.
    """
    devices = np.array(list(table), np.int32)
    values = np.array(list(table.values()), np.int32)
    is_entry = lax.axis_index(owners) == devices
    return jnp.min(jnp.where(is_entry, values, np.int32(otherwise)))


def _pack_remainders(
    remainders: Stacks,
    layout: MessageLayout,
) -> Array:
    """Lay out the remainders' blocks for the reduce-scatter.

    Args:
      remainders: for each group the remainder's blocks, `[remainder, elements]`.
      layout: their layout.

    Returns:
      `[devices, layout.width]`. Row `d` goes to device `d`: its segment's direct part, then a piece from each
      segment's rest.
    """
    blocks: dict[int, list[Array]] = {device: [] for device in layout.lengths}
    for name, starts in layout.starts.items():
        parts = jnp.split(remainders[name].reshape(-1), len(starts))
        for device, block in zip(starts, parts, strict=True):
            blocks[device].append(block)
    direct = layout.direct
    devices = layout.devices
    padded = [direct + devices * piece for piece in layout.pieces.values()]
    *begins, end = itertools.accumulate(padded, initial=0)
    flat = _place_vectors([jnp.concatenate(x) for x in blocks.values()], begins, end)
    if not direct:
        return flat.reshape(-1, devices).T
    whole_segments = jnp.split(flat, begins[1:])
    rest = jnp.concatenate([x[direct:] for x in whole_segments]).reshape(-1, devices).T
    first = jnp.stack([x[:direct] for x in whole_segments])
    return jnp.concatenate([first, rest], axis=1)


def _unpack_remainders(
    rows: Array,
    layout: MessageLayout,
) -> dict[int, Array]:
    """Undo `_pack_remainders`: return each device's segment, given the rows `[devices, width]`."""
    direct = layout.direct
    lengths = [layout.devices * piece for piece in layout.pieces.values()]
    rests = cut(rows[:, direct:].T.reshape(-1), lengths)
    whole_segments = dict(zip(layout.lengths, rests, strict=True))
    if direct:
        for device, rest in whole_segments.items():
            whole_segments[device] = jnp.concatenate([rows[device, :direct], rest])
    return whole_segments


def _collect_segment(
    owned: Array,
    layout: MessageLayout,
    owners: AxisNames,
) -> Array:
    """Return this device's segment.

    Args:
      owned: this device's row `[layout.width]`: its segment's direct part, and a piece from each segment's rest.
      layout: the layout.
      owners: the axes for the all-to-all.
    """
    devices = layout.devices
    width = layout.exchanged
    if not width:
        return owned
    direct, rest = jnp.split(owned, [layout.direct])
    begins = [device * width for device in layout.pieces]
    sent = _place_vectors(cut(rest, layout.pieces.values()), begins, devices * width)
    received = lax.all_to_all(sent, owners, 0, 0, tiled=True)
    return jnp.concatenate([direct, received.reshape(devices, width).T.reshape(-1)])


def _fill_segment(
    flat: Stacks,
    layout: MessageLayout,
    owners: AxisNames,
) -> Array:
    """Return this device's segment, given its blocks `[positions, elements]`."""
    # A device without a remainder block writes its placeholder behind the segment, where no device reads it.
    longest = max(x.shape[1] for x in flat.values())
    dtype = jnp.result_type(*flat.values())
    segment = as_varying(jnp.zeros(layout.room + longest, dtype), varying_axes(flat))
    for name, starts in layout.starts.items():
        begin = of_this_device(starts, layout.room, owners)
        last = flat[name][-1].astype(dtype)
        segment = lax.dynamic_update_slice_in_dim(segment, last, begin, 0)
    return segment[: layout.room]


def _distribute_segment(
    segment: Array,
    layout: MessageLayout,
    owners: AxisNames,
) -> Array:
    """Undo `_collect_segment`."""
    devices = layout.devices
    if not layout.exchanged:
        return segment
    direct, rest = jnp.split(segment, [layout.direct])
    sent = rest.reshape(-1, devices).T.reshape(-1)
    received = lax.all_to_all(sent, owners, 0, 0, tiled=True).reshape(devices, -1)
    pieces = [received[device, :length] for device, length in layout.pieces.items()]
    return jnp.concatenate([direct, *pieces])


def _place_vectors(
    vectors: Sequence[Array],
    begins: Sequence[int],
    end: int,
) -> Array:
    """Place vectors at the increasing positions `begins` in a zero vector of length `end`."""
    zero = jnp.zeros((), jnp.result_type(*vectors))
    parts = [jnp.broadcast_to(zero, begins[0])]
    for x, begin, stop in zip(vectors, begins, [*begins[1:], end], strict=True):
        gap = stop - begin - len(x)
        parts.append(lax.pad(x.astype(zero.dtype), zero, [(0, gap, 0)]))
    return jnp.concatenate(parts)
