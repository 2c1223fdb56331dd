"""Messages between devices and block owners.

Every device owns equally many of a group's first blocks. For each group, one reduce-scatter or all-gather moves them.
XLA combines these messages.

The groups' remainders travel together. A device's remainder blocks are laid end to end in its *segment*, here three
blocks of two groups on three devices::

    device 0   | a       |
    device 1   | b       | c   |
    device 2   |

A reduce-scatter or all-gather has equal room for each device. If every segment got the length of the longest, ResNet-50
on 64 devices would send 6 times the gradients' size. Instead each block is cut into a share for each device. The
reduce-scatter gives device `d` the share `d` of all blocks, and an all-to-all takes the shares to the owners, which
sends 1.09 times the gradients' size. To gather, the same two messages go backwards.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from kfac._distributed.owners import BlockAssignment
from kfac._mesh import AxisNames, as_varying, varying_axes
from kfac._packing import cut, pad_end

Stacks = dict[str, Array]
BlockAssignments = Mapping[str, BlockAssignment]


class Segments(NamedTuple):
    """Remainder blocks laid end to end on their owners.

    Attributes:
      starts: for each group with a remainder, where its blocks start in their owners' segments, by owner.
      length: the longest segment's length.
    """

    starts: dict[str, dict[int, int]]
    length: int


def lay_end_to_end(
    assignments: BlockAssignments,
    sizes: Mapping[str, int],
) -> Segments:
    """Lay the remainders' blocks end to end on their owners.

    Args:
      assignments: how each group is dealt to devices.
      sizes: for each group, the number of elements in a block.
    """
    lengths: collections.Counter[int] = collections.Counter()
    starts = {}
    # Sort the groups, because `jit` reorders the groups in a state.
    for name in sorted(sizes):
        owners = assignments[name].owners
        if owners:
            starts[name] = {device: lengths[device] for device in owners}
            lengths.update(dict.fromkeys(owners, sizes[name]))
    return Segments(starts, max(lengths.values(), default=0))


def lay_out_shares(
    assignments: BlockAssignments,
    sizes: Mapping[str, int],
) -> tuple[dict[str, int], Segments]:
    """Cut the remainders' blocks into a share for each device, and lay the shares end to end by owner.

    Args:
      assignments: how each group is dealt to devices.
      sizes: for each group, the number of elements in a block.

    Returns:
      The number of elements in a share, for each group, and the segments.
    """
    devices = next(iter(assignments.values())).devices
    shares = {name: -(-size // devices) for name, size in sizes.items()}
    return shares, lay_end_to_end(assignments, shares)


def sums_to_owners(
    blocks: Stacks,
    assignments: BlockAssignments,
    owners: AxisNames,
) -> Stacks:
    """Sum blocks over devices, and give each owner the sums of its blocks.

    Args:
      blocks: `[blocks, elements]` for each group.
      assignments: how each group is dealt to devices.
      owners: the axes over which blocks are dealt.

    Returns:
      `[positions, elements]` for each group. A device without a remainder block has arbitrary numbers at the last
      position.
    """
    devices = lax.axis_size(owners)
    owned: Stacks = {}
    remainders: Stacks = {}
    for name, x in blocks.items():
        full = assignments[name].full
        even, remainders[name] = jnp.split(x, [full * devices])
        if full:
            by_device = even.reshape(full, devices, -1).swapaxes(0, 1)
            owned[name] = lax.psum_scatter(by_device, owners)
    sizes, (starts_of, length) = _layout_of(blocks, assignments)
    if not starts_of:
        return owned
    sent = [_cut_into_shares(remainders[name], devices) for name in starts_of]
    flat = lax.psum_scatter(jnp.concatenate(sent, axis=1), owners)
    parts = cut(flat, [x.shape[1] for x in sent])
    # The share of each block, by owner.
    by_owner: dict[int, list[Array]] = {}
    for (name, starts), part in zip(starts_of.items(), parts, strict=True):
        for owner, share in zip(starts, part.reshape(-1, sizes[name]), strict=True):
            by_owner.setdefault(owner, []).append(share)
    rows = []
    for shares in by_owner.values():
        row = jnp.concatenate(shares)
        rows.append(pad_end(row, length - len(row)))
    rows.append(jnp.zeros_like(rows[0]))
    row_of = np.full(devices, len(by_owner), np.int32)
    row_of[list(by_owner)] = np.arange(len(by_owner))
    segment = lax.all_to_all(jnp.stack(rows)[row_of], owners, 0, 0, tiled=True)
    for name, starts in starts_of.items():
        begin = of_this_device(starts, length, owners)
        last = lax.dynamic_slice_in_dim(segment, begin, sizes[name], 1)
        last = last.reshape(1, -1)[:, : blocks[name].shape[1]]
        owned[name] = jnp.concatenate([owned[name], last]) if name in owned else last
    return owned


def gather_from_owners(
    owned: Stacks,
    assignments: BlockAssignments,
    owners: AxisNames,
) -> Stacks:
    """Gather each device's `[positions, elements]` to all blocks `[blocks, elements]` on all devices."""
    # If `shard_map` tracks varying axes, mark the result as replicated. Under `vmap`, JAX has no such gather.
    to = "invarying" if varying_axes(lax.axis_index(owners)) else "varying"
    gathered: dict[str, list[Array]] = {}
    for name, x in owned.items():
        full = assignments[name].full
        gathered[name] = []
        if full:
            by_device = lax.all_gather(x[:full], owners, to=to)
            gathered[name].append(by_device.swapaxes(0, 1).reshape(-1, x.shape[1]))
    sizes, (starts_of, length) = _layout_of(owned, assignments)
    if starts_of:
        devices = lax.axis_size(owners)
        # A device without a remainder block writes its placeholder behind the segment, where no device reads it.
        room = length + max(sizes.values())
        segment = jnp.zeros((devices, room), jnp.result_type(*owned.values()))
        segment = as_varying(segment, varying_axes(owned))
        for name, starts in starts_of.items():
            last = _cut_into_shares(owned[name][-1:], devices).astype(segment.dtype)
            begin = of_this_device(starts, length, owners)
            segment = lax.dynamic_update_slice_in_dim(segment, last, begin, 1)
        # Row `d` holds this device's share of device `d`'s blocks.
        rows = lax.all_to_all(segment[:, :length], owners, 0, 0, tiled=True)
        shares = {}
        for name, starts in starts_of.items():
            size = sizes[name]
            parts = [rows[owner, k : k + size] for owner, k in starts.items()]
            shares[name] = jnp.concatenate(parts)
        flat = lax.all_gather(jnp.concatenate(list(shares.values())), owners, to=to)
        parts = cut(flat, [len(x) for x in shares.values()])
        for (name, starts), part in zip(starts_of.items(), parts, strict=True):
            by_block = part.reshape(devices, len(starts), -1).swapaxes(0, 1)
            blocks = by_block.reshape(len(starts), -1)
            gathered[name].append(blocks[:, : owned[name].shape[1]])
    return {name: jnp.concatenate(blocks) for name, blocks in gathered.items()}


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


def _layout_of(
    blocks: Stacks,
    assignments: BlockAssignments,
) -> tuple[dict[str, int], Segments]:
    return lay_out_shares(assignments, {n: x.shape[1] for n, x in blocks.items()})


def _cut_into_shares(blocks: Array, devices: int) -> Array:
    """Cut blocks `[blocks, elements]` into shares `[devices, blocks * share]`."""
    x = pad_end(blocks, -blocks.shape[1] % devices)
    return x.reshape(len(x), devices, -1).swapaxes(0, 1).reshape(devices, -1)
