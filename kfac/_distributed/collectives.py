"""The traffic between devices and the owners of blocks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kfac._distributed.assignment import Shard
from kfac._varying import AxisName, as_varying, varying_axes

BUCKETS = 4  # messages of statistics; the more, the sooner the first, and the more there are to start


def owns_last(shard: Shard, axis_name: AxisName | None) -> jax.Array:
    """`[positions]`, false where this device holds no block at the last position."""
    position = jnp.arange(shard.positions)
    return (position < shard.full) | (_extra(shard, axis_name) < shard.remainder)


def _extra(shard: Shard, axis_name: AxisName | None) -> jax.Array:
    """Which block of the remainder is this device's; `remainder` or more if none is."""
    if axis_name is None:
        return jnp.zeros((), jnp.int32)
    return (lax.axis_index(axis_name) - shard.offset) % shard.devices


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
        if shard.remainder:
            parts.append(_own_of_remainder(stack[shard.full * shard.devices :], shard, axis_name))
        return jnp.concatenate(parts)

    mine = {name: jax.tree.map(lambda x, s=shards[name]: own(x, s), stacks[name]) for name in stacks if name in shards}
    return dict(stacks) | mine


def _own_of_remainder(rest: jax.Array, shard: Shard, axis_name: AxisName) -> jax.Array:
    return lax.dynamic_slice_in_dim(rest, jnp.minimum(_extra(shard, axis_name), shard.remainder - 1), 1)


def _fused(message: Callable[[jax.Array], jax.Array], arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """`message` of all arrays in one: they are laid end to end along a last axis, and its result is cut up again."""
    if not arrays:
        return []
    flat = message(jnp.concatenate([x.reshape(*x.shape[:-1], -1) for x in arrays], axis=-1))
    ends = list(itertools.accumulate(x.shape[-1] for x in arrays))
    return jnp.split(flat, ends[:-1], axis=-1)


def means_to_owners(
    stacks: Mapping[str, jax.Array], shards: Mapping[str, Shard], axis_name: AxisName, dtypes: Mapping[str, Any]
) -> dict[str, jax.Array]:
    """Means over devices of stacks of blocks, each block where it is owned.

    A reduce-scatter for the blocks of which every device gets some. Those of the remainders are reduce-scattered in
    pieces, of every block one for each device, which then go to its owner: that is less to send than an all-reduce.
    What all devices keep is all-reduced. There are a few buckets of groups, a message each whatever their number, so
    that the first can be sent while the backward pass goes on.

    Args:
      stacks: `[blocks, ...]` for each group.
      shards: how the groups lie on the devices. All devices get all blocks of a group that is not among them.
      axis_name: the axis.
      dtypes: of the results, for each group; sums are in the dtype of `stacks`.

    Returns:
      `[positions, ...]`, or `[blocks, ...]` for groups without a shard.
    """
    devices = lax.axis_size(axis_name)
    parts: dict[str, list[jax.Array]] = {name: [] for name in stacks}
    pieces = {}

    def to_owners(x):
        return lax.psum_scatter(x, axis_name)

    for names in _buckets({name: stacks[name].size for name in stacks if name in shards}):
        full, rest = ([name for name in names if getattr(shards[name], part)] for part in ("full", "remainder"))
        dealt = [_by_device(stacks[n][: shards[n].full * devices], devices) for n in full]
        for name, own in zip(full, _fused(to_owners, dealt), strict=True):
            parts[name].append(own.reshape(shards[name].full, *stacks[name].shape[1:]))
        cut = [jnp.moveaxis(_pieces(stacks[n][shards[n].full * devices :], devices), 1, 0) for n in rest]
        for name, own in zip(rest, _fused(to_owners, [x.reshape(devices, -1) for x in cut]), strict=True):
            pieces[name] = own.reshape(shards[name].remainder, -1)
    for name, own in _pieces_to_owners(pieces, shards, axis_name).items():
        parts[name].append(_whole(own[None], stacks[name].shape[1:]))
    everywhere = [name for name in stacks if name not in shards]
    summed = _fused(lambda x: lax.psum(x, axis_name), [stacks[n].reshape(-1) for n in everywhere])
    for name, own in zip(everywhere, summed, strict=True):
        parts[name].append(own.reshape(stacks[name].shape))
    return {name: jnp.concatenate(parts[name]).astype(dtypes[name]) / devices for name in stacks}


def _buckets(sizes: Mapping[str, int]) -> list[list[str]]:
    """The groups in buckets of about equal size, in the order in which a backward pass has finished them.

    Groups stand in the order of their first layers, which are the last that it comes to.
    """
    buckets: list[list[str]] = [[] for _ in range(BUCKETS)]
    total, seen = max(1, sum(sizes.values())), 0
    for name in reversed(list(sizes)):
        buckets[seen * BUCKETS // total].append(name)
        seen += sizes[name]
    return [names for names in buckets if names]


def gather_from_owners(
    own: Mapping[str, jax.Array], shards: Mapping[str, Shard], axis_name: AxisName
) -> dict[str, jax.Array]:
    """From each device's `[positions, ...]`, all blocks `[blocks, ...]` on all devices.

    One all-gather for the blocks that every device has; those of the remainders are first cut in pieces, one for each
    device, so that there is no room and no message for blocks that are not there.
    """
    devices = lax.axis_size(axis_name)
    full = [name for name in own if shards[name].full]
    rest = [name for name in own if shards[name].remainder]

    # Where shard_map keeps track of it, the result is the same on all devices. Under vmap there is no such gather.
    to = "invarying" if varying_axes(lax.axis_index(axis_name)) else "varying"

    def everywhere(x):
        return lax.all_gather(x, axis_name, to=to)

    parts: dict[str, list[jax.Array]] = {name: [] for name in own}
    gathered = _fused(everywhere, [own[n][: shards[n].full].reshape(-1) for n in full])
    for name, x in zip(full, gathered, strict=True):
        dealt = x.reshape(devices, shards[name].full, *own[name].shape[1:]).swapaxes(0, 1)
        parts[name].append(dealt.reshape(-1, *own[name].shape[1:]))
    cut = {n: _pieces(own[n][shards[n].full :], devices)[0] for n in rest}
    held = [x.reshape(-1) for x in _pieces_from_owners(cut, shards, axis_name).values()]
    for name, x in zip(rest, _fused(everywhere, held), strict=True):
        blocks = jnp.moveaxis(x.reshape(devices, shards[name].remainder, -1), 0, 1)
        parts[name].append(_whole(blocks, own[name].shape[1:]))
    return {name: jnp.concatenate(found) for name, found in parts.items()}


def _by_device(stack: jax.Array, devices: int) -> jax.Array:
    """Blocks `[full * devices, ...]` as those of each device, `[devices, elements]`."""
    return stack.reshape(-1, devices, *stack.shape[1:]).swapaxes(0, 1).reshape(devices, -1)


def _pieces(stack: jax.Array, devices: int) -> jax.Array:
    """Blocks `[k, ...]` cut in equal pieces, the last filled up with zeros: `[k, devices, elements]`."""
    flat = stack.reshape(stack.shape[0], -1)
    return jnp.pad(flat, ((0, 0), (0, -flat.shape[1] % devices))).reshape(stack.shape[0], devices, -1)


def _whole(pieces: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of `_pieces`, for blocks of that shape."""
    return pieces.reshape(pieces.shape[0], -1)[:, : math.prod(shape)].reshape(-1, *shape)


def _pieces_to_owners(
    pieces: Mapping[str, jax.Array], shards: Mapping[str, Shard], axis_name: AxisName
) -> dict[str, jax.Array]:
    """From a piece of each block of a remainder, `[remainder, elements]`, those of one's own, `[devices, elements]`.

    Blocks of a row, which may be of several groups, share the room that the largest takes.
    """
    rows = _empty_rows(pieces, shards)
    for name, x in pieces.items():
        for row, device, start, stop in shards[name].runs:
            rows[row] = lax.dynamic_update_slice(rows[row], x[start:stop].astype(rows[row].dtype), (device, 0))
    received, result = _exchanged(rows, axis_name), {}
    for name, x in pieces.items():
        found = [received[row][:, : x.shape[1]] for row, *_ in shards[name].runs]
        own = lax.axis_index(axis_name) >= shards[name].offset
        result[name] = jnp.where(own, found[0], found[-1])
    return result


def _pieces_from_owners(
    own: Mapping[str, jax.Array], shards: Mapping[str, Shard], axis_name: AxisName
) -> dict[str, jax.Array]:
    """The inverse of `_pieces_to_owners`."""
    rows, index = _empty_rows(own, shards), lax.axis_index(axis_name)
    for name, x in own.items():
        for row, device, start, stop in shards[name].runs:
            here = (index >= device) & (index < device + stop - start)
            filled = jnp.pad(x, ((0, 0), (0, rows[row].shape[1] - x.shape[1])))
            rows[row] = jnp.where(here, filled.astype(rows[row].dtype), rows[row])
    received, result = _exchanged(rows, axis_name), {}
    for name, x in own.items():
        runs = shards[name].runs
        found = [received[row][device : device + b - a, : x.shape[1]] for row, device, a, b in runs]
        result[name] = jnp.concatenate(found)
    return result


def _empty_rows(pieces: Mapping[str, jax.Array], shards: Mapping[str, Shard]) -> dict[int, jax.Array]:
    """`[devices, elements]` for each row of the remainders, with room for the longest of the pieces."""
    widths: dict[int, int] = {}
    for name, x in pieces.items():
        widths |= {row: max(x.shape[1], widths.get(row, 0)) for row, *_ in shards[name].runs}
    dtype = jnp.result_type(*pieces.values()) if pieces else jnp.float32
    devices = next((shards[name].devices for name in pieces), 0)
    axes = varying_axes(dict(pieces))
    return {row: as_varying(jnp.zeros((devices, width), dtype), axes) for row, width in sorted(widths.items())}


def _exchanged(rows: Mapping[int, jax.Array], axis_name: AxisName) -> dict[int, jax.Array]:
    """`[devices, ...]`, what this device has for each, as what each has for this one; in one message."""
    sent = _fused(lambda x: lax.all_to_all(x, axis_name, split_axis=0, concat_axis=0), list(rows.values()))
    return dict(zip(rows, sent, strict=True))
