"""Messages between devices and block owners."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kfac._distributed.owners import Shard
from kfac._distributed.segments import Segments, make_buckets, make_segments
from kfac._packing import cut
from kfac._varying import AxisName, as_varying, axis_names, varying_axes

Stacks = Mapping[str, jax.Array]
Shards = Mapping[str, Shard]


def _fused(
    message: Callable[[jax.Array], jax.Array], arrays: Stacks
) -> dict[str, jax.Array]:
    """Apply the collective `message` to all arrays at once, concatenated along their last axis."""
    if not arrays:
        return {}
    result = message(jnp.concatenate(list(arrays.values()), axis=-1))
    return dict(
        zip(arrays, cut(result, [x.shape[-1] for x in arrays.values()]), strict=True)
    )


def means_to_owners(
    stacks: Stacks,
    shards: Shards,
    axis_name: AxisName,
    buckets: int,
    beside: tuple[str, ...],
) -> dict[str, jax.Array]:
    """Average stacks of blocks over devices, and give each owner the means of its blocks.

    Each bucket takes a reduce-scatter. If the segments' lengths differ, the bucket also takes an all-to-all. With
    several buckets, the first message can overlap with the backward pass. Groups without a shard are all-reduced.

    Args:
      stacks: `[blocks, ...]` for each group.
      shards: how each group is dealt to devices. A group without a shard goes to all devices.
      axis_name: the axis, or the axes, over which blocks are dealt.
      buckets: into how many buckets the groups are divided.
      beside: further axes to average over. Owners along these axes add up their sums.

    Returns:
      For each group this device's stack `[positions, ...]`, or `[blocks, ...]` without a shard. Sums are formed in
      the dtype of `stacks`. The means have this dtype or float32, whichever is wider.
    """
    flat = {name: x.reshape(len(x), -1) for name, x in stacks.items()}
    sums: dict[str, jax.Array] = {}
    for names in make_buckets(
        {name: x.size for name, x in flat.items() if name in shards}, buckets
    ):
        owned = _sums_to_owners({name: flat[name] for name in names}, shards, axis_name)
        sums |= _fused(lambda x: lax.psum(x, beside), owned) if beside else owned
    everywhere = {name: x.reshape(-1) for name, x in flat.items() if name not in shards}
    axes = (*axis_names(axis_name), *beside)
    sums |= _fused(lambda x: lax.psum(x, axes), everywhere)
    owned = {name: sums[name].reshape(-1, *x.shape[1:]) for name, x in stacks.items()}
    return {
        n: x.astype(jnp.promote_types(x.dtype, jnp.float32)) / lax.axis_size(axes)
        for n, x in owned.items()
    }


REST = ""  # among the names of groups, this key stands for the remainders' segments


def _sums_to_owners(
    flat: Stacks, shards: Shards, axis_name: AxisName
) -> dict[str, jax.Array]:
    """Sum blocks over devices, and return this device's blocks.

    Args:
      flat: `[blocks, elements]` for each group.
      shards: how each group is dealt to devices.
      axis_name: the axes over which blocks are dealt.

    Returns:
      A vector `[positions * elements]` for each group. A device without a remainder block has arbitrary numbers at the
      last position.
    """
    devices = lax.axis_size(axis_name)
    elements = {name: x.shape[1] for name, x in flat.items()}
    segments = make_segments(shards, elements)
    dealt = {
        name: shards[name].full * devices for name in flat
    }  # blocks that are dealt out evenly
    sent = {
        name: _by_device(flat[name][:count], devices)
        for name, count in dealt.items()
        if count
    }
    remainders = {name: flat[name][dealt[name] :] for name in segments.starts}
    owned = _fused(
        lambda x: lax.psum_scatter(x, axis_name),
        sent | _in_segments(remainders, segments),
    )
    if not remainders:
        return owned
    segment = _whole_segment(owned.pop(REST), segments, axis_name)
    for name, starts in segments.starts.items():
        begin = of_this_device(starts, segments.room, axis_name)
        last = lax.dynamic_slice_in_dim(segment, begin, elements[name])
        owned[name] = jnp.append(owned[name], last) if name in owned else last
    return owned


def gather_from_owners(
    owned: Stacks, shards: Shards, axis_name: AxisName
) -> dict[str, jax.Array]:
    """Gather each device's `[positions, ...]` to all blocks `[blocks, ...]` on all devices.

    This takes one all-gather. If the segments' lengths differ, an all-to-all before it distributes the pieces of longer
    segments.
    """
    if not owned:
        return {}
    devices = lax.axis_size(axis_name)
    flat = {name: x.reshape(len(x), -1) for name, x in owned.items()}
    segments = make_segments(shards, {name: x.shape[1] for name, x in flat.items()})
    # A device without a remainder block writes its placeholder behind the segment, where no device reads it.
    longest, dtype = (
        max(x.shape[1] for x in flat.values()),
        jnp.result_type(*flat.values()),
    )
    segment = as_varying(jnp.zeros(segments.room + longest, dtype), varying_axes(flat))
    for name, starts in segments.starts.items():
        begin = of_this_device(starts, segments.room, axis_name)
        segment = lax.dynamic_update_slice_in_dim(
            segment, flat[name][-1].astype(dtype), begin, 0
        )

    # If `shard_map` tracks varying axes, mark the result as replicated. Under `vmap`, JAX has no such gather.
    to = "invarying" if varying_axes(lax.axis_index(axis_name)) else "varying"
    sent = {
        name: x[: shards[name].full].reshape(-1)
        for name, x in flat.items()
        if shards[name].full
    }
    sent |= (
        {REST: _dealt_segment(segment[: segments.room], segments, axis_name)}
        if segments.starts
        else {}
    )
    gathered = _fused(lambda x: lax.all_gather(x, axis_name, to=to), sent)
    whole = _segments_in(gathered.pop(REST), segments) if segments.starts else {}
    for name, x in flat.items():
        blocks = (
            [gathered[name].reshape(devices, -1, x.shape[1]).swapaxes(0, 1)]
            if name in gathered
            else []
        )
        places = segments.starts.get(name, {}).items()
        blocks += [
            whole[device][start : start + x.shape[1]] for device, start in places
        ]
        gathered[name] = jnp.concatenate(
            [block.reshape(-1, x.shape[1]) for block in blocks]
        )
    return {name: gathered[name].reshape(-1, *x.shape[1:]) for name, x in owned.items()}


def _by_device(flat: jax.Array, devices: int) -> jax.Array:
    """Rearrange blocks `[full * devices, elements]` by device: `[devices, full * elements]`."""
    return flat.reshape(-1, devices, flat.shape[1]).swapaxes(0, 1).reshape(devices, -1)


def of_this_device(
    table: Mapping[int, int], otherwise: int, axis_name: AxisName
) -> jax.Array:
    """Return this device's entry in a table that is keyed by device.

    Args:
      table: the entries.
      otherwise: the result if the table lacks this device. No entry may be larger.
      axis_name: the axes over which devices are numbered.
    """
    devices, values = (
        np.array(list(x), np.int32) for x in (table.keys(), table.values())
    )
    return jnp.min(
        jnp.where(lax.axis_index(axis_name) == devices, values, np.int32(otherwise))
    )


def _in_segments(rests: Stacks, segments: Segments) -> dict[str, jax.Array]:
    """Lay out the remainders' blocks for the reduce-scatter.

    Args:
      rests: for each group the remainder's blocks, `[remainder, elements]`.
      segments: their layout.

    Returns:
      `[devices, segments.width]` under the key `REST`. Row `d` goes to device `d`: its segment's direct part, then a
      piece from each segment's rest. Empty without remainders.
    """
    if not rests:
        return {}
    blocks: dict[int, list[jax.Array]] = {device: [] for device in segments.lengths}
    for name, x in rests.items():
        for device, block in zip(
            segments.starts[name],
            cut(x.reshape(-1), len(x) * [x.shape[1]]),
            strict=True,
        ):
            blocks[device].append(block)
    direct, devices = segments.direct, segments.devices
    ends = list(
        itertools.accumulate(
            direct + devices * piece for piece in segments.pieces.values()
        )
    )
    flat = _laid_out(
        dict(zip([0, *ends], map(jnp.concatenate, blocks.values()), strict=False)),
        ends[-1],
    )
    if not direct:
        return {REST: flat.reshape(-1, devices).T}
    whole = jnp.split(flat, ends[:-1])
    rest = jnp.concatenate([x[direct:] for x in whole]).reshape(-1, devices).T
    return {
        REST: jnp.concatenate([jnp.stack([x[:direct] for x in whole]), rest], axis=1)
    }


def _segments_in(rows: jax.Array, segments: Segments) -> dict[int, jax.Array]:
    """Undo `_in_segments`: return each device's segment, given the rows `[devices, width]`."""
    direct, lengths = (
        segments.direct,
        [segments.devices * piece for piece in segments.pieces.values()],
    )
    whole = dict(
        zip(segments.lengths, cut(rows[:, direct:].T.reshape(-1), lengths), strict=True)
    )
    return (
        {
            device: jnp.concatenate([rows[device, :direct], x])
            for device, x in whole.items()
        }
        if direct
        else whole
    )


def _whole_segment(
    owned: jax.Array, segments: Segments, axis_name: AxisName
) -> jax.Array:
    """Return this device's segment.

    Args:
      owned: this device's row `[segments.width]`: its segment's direct part, and a piece from each segment's rest.
      segments: the layout.
      axis_name: the axes for the all-to-all.
    """
    devices, width = segments.devices, segments.exchanged
    if not width:
        return owned
    pieces = cut(owned[segments.direct :], segments.pieces.values())
    begins = [device * width for device in segments.pieces]
    sent = _laid_out(dict(zip(begins, pieces, strict=True)), devices * width)
    received = (
        lax.all_to_all(sent, axis_name, 0, 0, tiled=True).reshape(devices, width).T
    )
    return jnp.concatenate([owned[: segments.direct], received.reshape(-1)])


def _dealt_segment(
    segment: jax.Array, segments: Segments, axis_name: AxisName
) -> jax.Array:
    """Undo `_whole_segment`."""
    if not segments.exchanged:
        return segment
    rest = segment[segments.direct :].reshape(-1, segments.devices).T.reshape(-1)
    received = lax.all_to_all(rest, axis_name, 0, 0, tiled=True).reshape(
        segments.devices, -1
    )
    pieces = [received[device, :length] for device, length in segments.pieces.items()]
    return jnp.concatenate([segment[: segments.direct], *pieces])


def _laid_out(parts: Mapping[int, jax.Array], end: int) -> jax.Array:
    """Place vectors at increasing positions in a zero vector.

    Args:
      parts: the vectors, keyed by their start.
      end: the result's length.
    """
    arrays, until = list(parts.values()), [*list(parts)[1:], end]
    zero = jnp.zeros((), jnp.result_type(*arrays))
    gaps = [
        stop - begin - len(x)
        for begin, stop, x in zip(parts, until, arrays, strict=True)
    ]
    filled = [
        lax.pad(x.astype(zero.dtype), zero, [(0, gap, 0)])
        for x, gap in zip(arrays, gaps, strict=True)
    ]
    return jnp.concatenate([jnp.broadcast_to(zero, next(iter(parts))), *filled])
