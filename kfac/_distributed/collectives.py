"""The traffic between devices and the owners of blocks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kfac._distributed.owners import Shard
from kfac._distributed.segments import Segments, make_buckets, make_segments
from kfac._varying import AxisName, as_varying, varying_axes


def owns_last(shard: Shard, axis_name: AxisName | None) -> jax.Array:
    """`[positions]`, false where this device holds no block at the last position."""
    last = jnp.arange(shard.positions) >= shard.full
    return ~last | (jnp.any(_own_block(shard, axis_name)) if shard.owners else False)


def _own_block(shard: Shard, axis_name: AxisName | None) -> jax.Array:
    """`[remainder]`, which of the blocks of the remainder is this device's, if any is."""
    return lax.axis_index(axis_name) == np.array(shard.owners, np.int32)


def take_own(stacks: Mapping[str, Any], shards: Mapping[str, Shard], axis_name: AxisName | None) -> dict[str, Any]:
    """From stacks `[blocks, ...]` of each group, which all devices have, this device's `[positions, ...]`.

    A device without a block at the last position gets one of the others' there. All get all blocks of a group that is
    not among `shards`.
    """
    if axis_name is None:
        return dict(stacks)

    def own(stack, shard):
        parts = []
        if shard.full:
            dealt = stack[: shard.full * shard.devices].reshape(shard.full, shard.devices, *stack.shape[1:])
            parts.append(lax.dynamic_index_in_dim(dealt, lax.axis_index(axis_name), axis=1, keepdims=False))
        if shard.owners:
            block = shard.full * shard.devices + jnp.argmax(_own_block(shard, axis_name))
            parts.append(lax.dynamic_slice_in_dim(stack, block, 1))
        return jnp.concatenate(parts)

    mine = {name: jax.tree.map(lambda x, s=shards[name]: own(x, s), stacks[name]) for name in stacks if name in shards}
    return dict(stacks) | mine


def _fused(message: Callable[[jax.Array], jax.Array], arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """`message` of all arrays in one: they are laid end to end along a last axis, and its result is cut up again."""
    return _cut(message(jnp.concatenate(arrays, axis=-1)), [x.shape[-1] for x in arrays]) if arrays else []


def _cut(x: jax.Array, lengths: Collection[int]) -> list[jax.Array]:
    """An array in parts of such lengths, along its last axis."""
    return jnp.split(x, list(itertools.accumulate(lengths))[:-1], axis=-1) if lengths else []


def _laid_out(parts: Mapping[int, jax.Array], end: int) -> jax.Array:
    """Vectors where each is said to begin, one behind the other, in one that ends at `end`; zeros in between."""
    arrays, until = list(parts.values()), [*list(parts)[1:], end]
    zero = jnp.zeros((), jnp.result_type(*arrays))
    room = [stop - begin for begin, stop in zip(parts, until, strict=True)]
    filled = [lax.pad(x, zero, [(0, n - len(x), 0)]) if n > len(x) else x for x, n in zip(arrays, room, strict=True)]
    before = next(iter(parts))
    return jnp.concatenate([jnp.broadcast_to(zero, before), *filled] if before else filled)


def means_to_owners(
    stacks: Mapping[str, jax.Array],
    shards: Mapping[str, Shard],
    axis_name: AxisName,
    dtypes: Mapping[str, Any],
    buckets: int = 1,
) -> dict[str, jax.Array]:
    """Means over devices of stacks of blocks, each block where it is owned.

    For each bucket of groups there is a reduce-scatter and, where segments differ, an all-to-all. With several buckets
    the first can be sent while the backward pass goes on. What all devices keep is all-reduced.

    Args:
      stacks: `[blocks, ...]` for each group.
      shards: how the groups lie on the devices. All devices get all blocks of a group that is not among them.
      axis_name: the axis.
      dtypes: of the results, for each group; sums are in the dtype of `stacks`.
      buckets: how many.

    Returns:
      `[positions, ...]`, or `[blocks, ...]` for groups without a shard.
    """
    devices = lax.axis_size(axis_name)
    flat = {name: x.reshape(len(x), -1) for name, x in stacks.items()}
    parts: dict[str, list[jax.Array]] = {name: [] for name in flat}
    first = []
    for names in make_buckets({name: x.size for name, x in flat.items() if name in shards}, buckets):
        segments = make_segments(shards, {name: flat[name].shape[1] for name in names})
        whole = {name: shards[name].full * devices for name in names if shards[name].full}
        sent = [_by_device(flat[name][:count], devices) for name, count in whole.items()]
        rests = {name: flat[name][whole.get(name, 0) :] for name in segments.starts}
        own = _fused(lambda x: lax.psum_scatter(x, axis_name), [*sent, *_in_segments(rests, segments)])
        first.append((segments, own[len(whole) :]))
        for name, x in zip(whole, own, strict=False):
            parts[name].append(x)
    for (segments, _), segment in zip(first, _whole_segments(first, axis_name), strict=True):
        for name, starts in segments.starts.items():
            begin = _here(starts, segments.room, axis_name)
            parts[name].append(lax.dynamic_slice_in_dim(segment, begin, flat[name].shape[1]))
    everywhere = [name for name in stacks if name not in shards]
    summed = _fused(lambda x: lax.psum(x, axis_name), [flat[name].reshape(-1) for name in everywhere])
    parts |= {name: [x] for name, x in zip(everywhere, summed, strict=True)}
    sums = {name: jnp.concatenate(own).reshape(-1, *stacks[name].shape[1:]) for name, own in parts.items()}
    return {name: x.astype(dtypes[name]) / devices for name, x in sums.items()}


def gather_from_owners(
    own: Mapping[str, jax.Array], shards: Mapping[str, Shard], axis_name: AxisName
) -> dict[str, jax.Array]:
    """From each device's `[positions, ...]`, all blocks `[blocks, ...]` on all devices.

    One all-gather; where segments differ, an all-to-all before it cuts the rest of the longer ones in pieces.
    """
    if not own:
        return {}
    devices = lax.axis_size(axis_name)
    flat = {name: x.reshape(len(x), -1) for name, x in own.items()}
    segments = make_segments(shards, {name: x.shape[1] for name, x in flat.items()})
    # Devices without a block of a group put what stands in its place behind the segment.
    longest, dtype = max(x.shape[1] for x in flat.values()), jnp.result_type(*flat.values())
    segment = as_varying(jnp.zeros(segments.room + longest, dtype), varying_axes(flat))
    for name, starts in segments.starts.items():
        begin = _here(starts, segments.room, axis_name)
        segment = lax.dynamic_update_slice_in_dim(segment, flat[name][-1].astype(dtype), begin, 0)

    # Where shard_map keeps track of it, the result is the same on all devices. Under vmap there is no such gather.
    to = "invarying" if varying_axes(lax.axis_index(axis_name)) else "varying"
    whole = {name: shards[name].full for name in flat if shards[name].full}
    sent = [flat[name][:count].reshape(-1) for name, count in whole.items()]
    sent += [_dealt_segment(segment[: segments.room], segments, axis_name)] if segments.lengths else []
    found = _fused(lambda x: lax.all_gather(x, axis_name, to=to), sent)
    parts: dict[str, list[jax.Array]] = {name: [] for name in flat}
    for (name, count), x in zip(whole.items(), found, strict=False):
        parts[name].append(x.reshape(devices, count, -1).swapaxes(0, 1).reshape(devices * count, -1))
    segment_of = _segments_in(found[-1], segments) if segments.lengths else {}
    for name, starts in segments.starts.items():
        size = flat[name].shape[1]
        parts[name] += [segment_of[device][None, start : start + size] for device, start in starts.items()]
    return {name: jnp.concatenate(blocks).reshape(-1, *own[name].shape[1:]) for name, blocks in parts.items()}


def _by_device(flat: jax.Array, devices: int) -> jax.Array:
    """Blocks `[full * devices, elements]` as those of each device, `[devices, full * elements]`."""
    return flat.reshape(-1, devices, flat.shape[1]).swapaxes(0, 1).reshape(devices, -1)


def _here(table: Mapping[int, int], otherwise: int, axis_name: AxisName) -> jax.Array:
    """What a table by device has for this one; `otherwise`, which is not less than any of it, where it has nothing."""
    devices, values = (np.array(list(x), np.int32) for x in (table.keys(), table.values()))
    return jnp.min(jnp.where(lax.axis_index(axis_name) == devices, values, np.int32(otherwise)))


def _in_segments(rests: Mapping[str, jax.Array], segments: Segments) -> list[jax.Array]:
    """Blocks of remainders `[remainder, elements]` as the message has them for each device, `[devices, elements]`."""
    if not rests:
        return []
    parts: dict[int, list[jax.Array]] = {device: [] for device in segments.lengths}
    for name, x in rests.items():
        for device, block in zip(segments.starts[name], _cut(x.reshape(-1), len(x) * [x.shape[1]]), strict=True):
            parts[device].append(block)
    direct, devices = segments.direct, segments.devices
    lengths = [direct + devices * piece for piece in segments.pieces.values()]
    begins = [0, *itertools.accumulate(lengths)]
    flat = _laid_out(dict(zip(begins, map(jnp.concatenate, parts.values()), strict=False)), begins[-1])
    if not direct:
        return [flat.reshape(-1, devices).T]
    whole = _cut(flat, lengths)
    rest = [x[direct:] for x in whole if len(x) > direct]
    return [jnp.stack([x[:direct] for x in whole]), *([jnp.concatenate(rest).reshape(-1, devices).T] if rest else [])]


def _segments_in(rows: jax.Array, segments: Segments) -> dict[int, jax.Array]:
    """The inverse: the segment of each device, from the `rows` of all."""
    direct, lengths = segments.direct, [segments.devices * piece for piece in segments.pieces.values()]
    whole = dict(zip(segments.lengths, _cut(rows[:, direct:].T.reshape(-1), lengths), strict=True))
    return {device: jnp.concatenate([rows[device, :direct], x]) for device, x in whole.items()} if direct else whole


def _whole_segments(first: Sequence[tuple[Segments, list[jax.Array]]], axis_name: AxisName) -> list[jax.Array]:
    """This device's segment of each message, from what it got in `first`: a second message brings the pieces."""
    own = [jnp.concatenate(found) if found else None for _, found in first]
    if not any(segments.exchanged for segments, _ in first):
        return own
    pieces: dict[int, list[jax.Array]] = {}
    begins = []
    for (segments, _), x in zip(first, own, strict=True):
        lengths = {device: piece for device, piece in segments.pieces.items() if piece}
        begins.append({device: segments.devices * sum(map(len, pieces.get(device, []))) for device in lengths})
        for device, piece in zip(lengths, _cut(x[segments.direct :], lengths.values()) if lengths else [], strict=True):
            pieces.setdefault(device, []).append(piece)
    rest = _exchanged({device: jnp.concatenate(parts) for device, parts in sorted(pieces.items())}, axis_name)
    total, longest = len(rest), max(segments.room - segments.direct for segments, _ in first)
    rest = _laid_out({0: rest}, total + longest)
    whole = []
    for (segments, _), x, table in zip(first, own, begins, strict=True):
        if table:
            later = lax.dynamic_slice_in_dim(rest, _here(table, total, axis_name), segments.room - segments.direct)
            x = jnp.concatenate([x[: segments.direct], later])
        whole.append(x)
    return whole


def _exchanged(pieces: Mapping[int, jax.Array], axis_name: AxisName) -> jax.Array:
    """All devices' pieces for this one, put together, from this one's for each device."""
    devices, width = lax.axis_size(axis_name), max(map(len, pieces.values()))
    sent = _laid_out({device * width: x for device, x in pieces.items()}, devices * width)
    return lax.all_to_all(sent, axis_name, 0, 0, tiled=True).reshape(devices, width).T.reshape(-1)


def _dealt_segment(segment: jax.Array, segments: Segments, axis_name: AxisName) -> jax.Array:
    """The direct part of this device's segment, and its pieces of the rest of all."""
    if not segments.exchanged:
        return segment
    rest = segment[segments.direct :].reshape(-1, segments.devices).T.reshape(-1)
    received = lax.all_to_all(rest, axis_name, 0, 0, tiled=True).reshape(segments.devices, -1)
    pieces = [received[device, :length] for device, length in segments.pieces.items() if length]
    return jnp.concatenate([segment[: segments.direct], *pieces])
