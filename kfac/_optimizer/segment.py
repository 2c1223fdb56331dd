"""Store groups with fewer blocks than devices as flat vectors on their owners.

All devices run the same program. During a step, each device therefore has a stack for every such group, with room for a
block that most devices do not own. Between steps, each device stores its own blocks in three flat vectors: averages as
triangles, inverses, and momenta with adaptive rates. Each vector has the same length on all devices, set by the device
that needs the most.

`part_of` unpacks a group's factors, inverses or momenta, and `with_parts` writes them back. `observe` unpacks and
writes back one group after another, so their stacks need not all be in memory together. A step unpacks all groups'
momenta before it writes any back, because it first has to find out whether its result is finite.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kfac._distributed.collectives import of_this_device
from kfac._distributed.owners import Shard
from kfac._distributed.segments import lay_end_to_end
from kfac._distributed.ways import Way
from kfac._factors import Kronecker, Packed
from kfac._optimizer.state import KfacState, Segment, with_blocks
from kfac._packing import flatten, unflatten
from kfac._varying import as_varying, varying_axes


class Slot(NamedTuple):
    """The location of a group's blocks in the flat vectors of a part: factors, inverse or motion.

    Attributes:
      like: the part's shapes `[1, ...]` for a single block.
      size: the number of elements that a block has in the vector.
      starts: where each block starts in its owner's vector, by owner, in block order.
      room: the vector's length.
    """

    like: Any
    size: int
    starts: dict[int, int]
    room: int


@functools.cache
def _slots(part: str, groups: tuple[tuple[str, Any, Shard], ...]) -> dict[str, Slot]:
    """Return the slots of a part, by group. Each group is given as its name, form and shard."""
    forms: dict[str, Any] = {}
    sizes: dict[str, int] = {}
    shards = {name: shard for name, _, shard in groups}
    for name, form, _ in groups:
        like = getattr(jax.tree.unflatten(*form), part)
        if jax.tree.leaves(like):
            forms[name] = like
            sizes[name] = jax.eval_shape(functools.partial(_flat, part), like).shape[1]
    starts, lengths = lay_end_to_end(shards, sizes)
    room = max(lengths.values(), default=0)
    return {name: Slot(forms[name], sizes[name], starts[name], room) for name in forms}


def slots_of(state: KfacState, part: str) -> dict[str, Slot]:
    """Return the slots of a part, by group, for all groups that store it in the segment."""
    in_segments = {
        name: owned for name, owned in state.owned.items() if owned.form is not None
    }
    return _slots(
        part,
        tuple((name, owned.form, owned.shard) for name, owned in in_segments.items()),
    )


def part_of(state: KfacState, way: Way, name: str, part: str) -> Any:
    """Return a part of a group's blocks as stacks `[k, ...]`.

    If the group stores the part in the segment, the stacks have `k = 1`. They are zero if this device owns no block.
    """
    slot = slots_of(state, part).get(name)
    if slot is None:
        return getattr(state.blocks[name], part)
    begin = of_this_device(slot.starts, slot.room, way.owners)
    flat = lax.dynamic_slice_in_dim(getattr(state.segment, part), begin, slot.size)
    flat = jnp.where(way.owns(state.owned[name].shard), flat, 0)[None]
    if part != "factors":
        return unflatten(flat, slot.like)
    return unflatten(flat, jax.eval_shape(_packed, slot.like)).unpacked()


def with_parts(state: KfacState, way: Way, name: str, **parts: Any) -> KfacState:
    """Return the state with new values for the given parts of a group's blocks."""
    for part in Segment._fields:
        slot = slots_of(state, part).get(name)
        if slot is not None and part in parts:
            vector, begin = (
                getattr(state.segment, part),
                of_this_device(slot.starts, slot.room, way.owners),
            )
            old = lax.dynamic_slice_in_dim(vector, begin, slot.size)
            flat = _flat(part, parts.pop(part))[0].astype(old.dtype)
            flat = jnp.where(way.owns(state.owned[name].shard), flat, old)
            vector = lax.dynamic_update_slice_in_dim(
                as_varying(vector, varying_axes(flat)), flat, begin, 0
            )
            state = state._replace(segment=state.segment._replace(**{part: vector}))
    return with_blocks(
        state, state.blocks | {name: state.blocks[name]._replace(**parts)}
    )


def opened(state: KfacState, way: Way) -> KfacState:
    """Return the state with all blocks in stacks."""
    parts = {
        n: {part: part_of(state, way, n, part) for part in Segment._fields}
        for n in state.blocks
    }
    return with_blocks(
        state, {n: block._replace(**parts[n]) for n, block in state.blocks.items()}
    )


def closed(state: KfacState, way: Way) -> KfacState:
    """Move the blocks of groups with fewer blocks than devices into the segment: the inverse of `opened`."""
    for part in Segment._fields:
        slots, blocks = slots_of(state, part), state.blocks
        if slots:
            dtype = jnp.result_type(
                *(x for slot in slots.values() for x in jax.tree.leaves(slot.like))
            )
            room = next(iter(slots.values())).room
            state = state._replace(
                segment=state.segment._replace(**{part: jnp.zeros(room, dtype)})
            )
        for name in slots:
            state = with_parts(state, way, name, **{part: getattr(blocks[name], part)})
        nothing: dict[str, Any] = {part: None}
        state = with_blocks(
            state, blocks | {name: blocks[name]._replace(**nothing) for name in slots}
        )
    return state


def _flat(part: str, tree: Any) -> jax.Array:
    return flatten(_packed(tree) if part == "factors" else tree)


def _packed(factors: Kronecker) -> Packed:
    return Packed.of(factors, (factors.A.shape[1:], factors.G.shape[1:]))
