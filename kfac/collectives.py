"""Named axes: what varies over them, means over them, and the traffic between devices and the owners of blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kfac.assignment import Shard

AxisName = str | tuple[str, ...]


def _varying(aval: Any) -> frozenset[str]:
    # The attribute's name differs between jax releases; outside shard_map a ShapeDtypeStruct has None.
    manual = getattr(aval, "manual_axis_type", None)
    if manual is not None:
        return frozenset(manual.varying)
    return frozenset(getattr(aval, "vma", None) or ())


def varying_axes(tree: Any) -> frozenset[str]:
    """The mesh axes of an enclosing `shard_map` over which some leaf of `tree` may differ between devices."""
    return frozenset().union(*(_varying(jax.typeof(leaf)) for leaf in jax.tree.leaves(tree)))


def as_varying(tree: Any, axes: frozenset[str]) -> Any:
    """Marks every leaf of `tree` as varying over `axes`.

    The gradient with respect to a value that is the same on all devices is summed over devices by autodiff; with
    respect to a varying one it is the device's own, as under `pmap`.
    """

    def mark(leaf):
        missing = tuple(sorted(axes - _varying(jax.typeof(leaf))))
        return lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(mark, tree)


def zeros_of(fn: Callable, *args: Any) -> Any:
    """Zeros shaped, and varying over mesh axes, like the result of `fn(*args)`: the start of a sum in a scan."""

    def zeros(aval):
        return as_varying(jnp.zeros(aval.shape, aval.dtype), _varying(aval))

    return jax.tree.map(zeros, jax.eval_shape(fn, *args))


def axis_size(axis_name: AxisName | None) -> int | None:
    """The number of devices along a named axis; None where no such axis is bound."""
    if axis_name is None:
        return None
    try:
        return lax.axis_size(axis_name)
    except NameError:
        return None


def mean_over(tree: Any, axis_name: AxisName | None) -> Any:
    """The mean of every leaf over a named axis; the tree itself without one."""
    return tree if axis_name is None else lax.pmean(tree, axis_name)


# -- symmetric matrices on the wire ----------------------------------------------------------------------------------


def pack(stack: jax.Array) -> jax.Array:
    """The upper triangles of symmetric matrices `[k, d, d]` as `[k, h, 2 h + 1]`, `h = ceil(d / 2)`.

    The upper left triangle, and the lower right one mirrored, fill a rectangle of `h` by `h + 1`; the upper right block
    stands beside it. Slices and masks only: index tables would be as large as the matrices.
    """
    d = stack.shape[-1]
    if d % 2:  # one more row and column of zeros
        stack = jnp.pad(stack, ((0, 0), (0, 1), (0, 1)))
    h = (d + 1) // 2
    first, last, corner = stack[:, :h, :h], stack[:, h:, h:], stack[:, :h, h:]
    row, column = lax.broadcasted_iota(jnp.int32, (h, h + 1), 0), lax.broadcasted_iota(jnp.int32, (h, h + 1), 1)
    shifted = jnp.pad(first, ((0, 0), (0, 0), (1, 0)))
    triangles = jnp.where(column > row, shifted, jnp.pad(last, ((0, 0), (0, 0), (0, 1))))
    return jnp.concatenate([triangles, corner], axis=-1)


def unpack(packed: jax.Array, d: int) -> jax.Array:
    """The inverse of `pack`, for matrices of dimension `d`."""
    h = packed.shape[-2]
    triangles, corner = packed[..., : h + 1], packed[..., h + 1 :]
    upper, lower = jnp.triu(triangles[..., 1:]), jnp.tril(triangles[..., :h])
    first = upper + jnp.triu(upper, 1).mT
    last = lower + jnp.tril(lower, -1).mT
    top = jnp.concatenate([first, corner], axis=-1)
    bottom = jnp.concatenate([corner.mT, last], axis=-1)
    return jnp.concatenate([top, bottom], axis=-2)[..., :d, :d]


# -- owners ----------------------------------------------------------------------------------------------------------


def owns_last(shard: Shard, axis_name: AxisName | None) -> jax.Array:
    """`[positions]`, false where this device holds no block at the last position."""
    position = jnp.arange(shard.positions)
    return (position < shard.full) | (_extra(shard, axis_name) < shard.remainder)


def _extra(shard: Shard, axis_name: AxisName | None) -> jax.Array:
    """Which block of the remainder is this device's; `remainder` or more if none is."""
    if axis_name is None:
        return jnp.zeros((), jnp.int32)
    return (lax.axis_index(axis_name) - shard.offset) % shard.devices


def own_range(
    shard: Shard, axis_name: AxisName | None, start: jax.Array, stop: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The positions at which this device holds blocks `start` up to `stop`: a first one and one past the last."""
    if axis_name is None:
        return start, stop
    device = lax.axis_index(axis_name)

    def positions_before(block):
        return jnp.clip((block - device + shard.devices - 1) // shard.devices, 0, shard.full)

    extra = _extra(shard, axis_name)
    last = shard.full * shard.devices + extra
    has_last = (extra < shard.remainder) & (start <= last) & (last < stop)
    return positions_before(start), jnp.where(has_last, shard.full + 1, positions_before(stop))


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


def mean_to_owners(stack: jax.Array, shard: Shard, axis_name: AxisName | None) -> jax.Array:
    """The mean over devices of stacks `[blocks, ...]`, each block where it is owned: `[positions, ...]`.

    A reduce-scatter for the blocks of which every device gets some, an all-reduce for the remainder.
    """
    if axis_name is None:
        return stack
    even = shard.full * shard.devices
    parts = []
    if shard.full:
        dealt = stack[:even].reshape(shard.full, shard.devices, *stack.shape[1:])
        parts.append(lax.psum_scatter(dealt, axis_name, scatter_dimension=1))
    if shard.remainder:
        parts.append(_own_of_remainder(lax.psum(stack[even:], axis_name), shard, axis_name))
    return jnp.concatenate(parts) / shard.devices


def gather_from_owners(own: jax.Array, shard: Shard, axis_name: AxisName | None) -> jax.Array:
    """From each device's `[positions, ...]`, all blocks `[blocks, ...]` on all devices."""
    if axis_name is None:
        return own
    parts = []
    if shard.full:
        dealt = lax.all_gather(own[: shard.full], axis_name, axis=1, to="invarying")
        parts.append(dealt.reshape(shard.full * shard.devices, *own.shape[1:]))
    if shard.remainder:
        # A sum in which one device has the block and the others zeros: an all-gather would need room for D blocks.
        extra = _extra(shard, axis_name)
        block = jnp.where(extra < shard.remainder, own[shard.full :], 0)
        empty = jnp.zeros((shard.remainder, *own.shape[1:]), own.dtype)
        empty = as_varying(empty, varying_axes(block))
        placed = lax.dynamic_update_slice_in_dim(empty, block, jnp.minimum(extra, shard.remainder - 1), 0)
        parts.append(lax.psum(placed, axis_name))
    return jnp.concatenate(parts)
