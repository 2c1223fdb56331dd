"""The traffic between devices and the owners of blocks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kfac._distributed.assignment import Shard
from kfac._varying import AxisName, as_varying, varying_axes


def owns_last(shard: Shard, axis_name: AxisName | None) -> jax.Array:
    """`[positions]`, false where this device holds no block at the last position."""
    position = jnp.arange(shard.positions)
    return (position < shard.full) | (_extra(shard, axis_name) < shard.remainder)


def _extra(shard: Shard, axis_name: AxisName | None) -> jax.Array:
    """Which block of the remainder is this device's; `remainder` or more if none is."""
    if axis_name is None:
        return jnp.zeros((), jnp.int32)
    return (lax.axis_index(axis_name) - shard.offset) % shard.devices


def take_own(tree: Any, shard: Shard, axis_name: AxisName | None) -> Any:
    """From stacks `[blocks, ...]` that all devices have, this device's `[positions, ...]`.

    A device without a block at the last position gets one of the others' there.
    """
    if axis_name is None:
        return tree

    def own(stack):
        parts = []
        if shard.full:
            dealt = stack[: shard.full * shard.devices].reshape(shard.full, shard.devices, *stack.shape[1:])
            parts.append(lax.dynamic_index_in_dim(dealt, lax.axis_index(axis_name), axis=1, keepdims=False))
        if shard.remainder:
            parts.append(_own_of_remainder(stack[shard.full * shard.devices :], shard, axis_name))
        return jnp.concatenate(parts)

    return jax.tree.map(own, tree)


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

    A reduce-scatter for the blocks of which every device gets some, an all-reduce for the remainders and for what all
    devices keep; one message each, whatever the number of groups.

    Args:
      stacks: `[blocks, ...]` for each group.
      shards: how the groups lie on the devices. All devices get all blocks of a group that is not among them.
      axis_name: the axis.
      dtypes: of the results, for each group; sums are in the dtype of `stacks`.

    Returns:
      `[positions, ...]`, or `[blocks, ...]` for groups without a shard.
    """
    devices = lax.axis_size(axis_name)
    full = [name for name, shard in shards.items() if shard.full]
    rest = [name for name in stacks if name not in shards or shards[name].remainder]

    def cut(name):
        return shards[name].full * devices if name in shards else 0

    dealt = [stacks[n][: cut(n)].reshape(shards[n].full, devices, -1).swapaxes(0, 1).reshape(devices, -1) for n in full]
    scattered = dict(zip(full, _fused(lambda x: lax.psum_scatter(x, axis_name), dealt), strict=True))
    summed = _fused(lambda x: lax.psum(x, axis_name), [stacks[n][cut(n) :].reshape(-1) for n in rest])
    reduced = {n: x.reshape(-1, *stacks[n].shape[1:]) for n, x in zip(rest, summed, strict=True)}
    result = {}
    for name, stack in stacks.items():
        if name not in shards:
            result[name] = reduced[name].astype(dtypes[name]) / devices
            continue
        parts = [scattered[name].reshape(-1, *stack.shape[1:])] if name in scattered else []
        if name in reduced:
            parts.append(_own_of_remainder(reduced[name], shards[name], axis_name))
        result[name] = jnp.concatenate(parts).astype(dtypes[name]) / devices
    return result


def gather_from_owners(
    own: Mapping[str, jax.Array], shards: Mapping[str, Shard], axis_name: AxisName
) -> dict[str, jax.Array]:
    """From each device's `[positions, ...]`, all blocks `[blocks, ...]` on all devices, in two messages."""
    devices = lax.axis_size(axis_name)
    full = [name for name in own if shards[name].full]
    rest = [name for name in own if shards[name].remainder]

    # Where shard_map keeps track of it, the result is the same on all devices. Under vmap there is no such gather.
    to = "invarying" if varying_axes(lax.axis_index(axis_name)) else "varying"

    def everywhere(x):
        return lax.all_gather(x, axis_name, to=to)

    def placed(name):
        # A sum in which one device has the block and the others zeros: an all-gather would need room for D blocks.
        shard = shards[name]
        extra = _extra(shard, axis_name)
        block = jnp.where(extra < shard.remainder, own[name][shard.full :], 0)
        empty = jnp.zeros((shard.remainder, *block.shape[1:]), block.dtype)
        empty = as_varying(empty, varying_axes(block))
        at = jnp.minimum(extra, shard.remainder - 1)
        return lax.dynamic_update_slice_in_dim(empty, block, at, 0).reshape(-1)

    gathered = dict(zip(full, _fused(everywhere, [own[n][: shards[n].full].reshape(-1) for n in full]), strict=True))
    summed = dict(zip(rest, _fused(lambda x: lax.psum(x, axis_name), [placed(n) for n in rest]), strict=True))
    result = {}
    for name, stack in own.items():
        parts = []
        if name in gathered:
            dealt = gathered[name].reshape(devices, shards[name].full, *stack.shape[1:]).swapaxes(0, 1)
            parts.append(dealt.reshape(-1, *stack.shape[1:]))
        if name in summed:
            parts.append(summed[name].reshape(-1, *stack.shape[1:]))
        result[name] = jnp.concatenate(parts)
    return result
