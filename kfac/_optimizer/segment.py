"""Blocks of shapes that fewer blocks than devices have, as a state keeps them: end to end on their owners.

Every device runs one program, so a step has a stack of each group on every device, with room for a block that most do
not have. Between steps each device keeps what it owns of such groups in one vector for each part of a state, as long as
the longest: averages as triangles, inverses, momenta. A step opens the state, and closes what it has changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kfac._distributed.collectives import here
from kfac._distributed.segments import lay_end_to_end
from kfac._distributed.ways import Way
from kfac._factors import Kronecker, Packed
from kfac._optimizer.state import KfacState, Owned, Segment, shards_of, with_blocks
from kfac._packing import flatten, unflatten
from kfac._varying import as_varying, varying_axes


class Slot(NamedTuple):
    """Where the blocks of a group have one of their parts, a vector of so many elements of a `dtype` each.

    Attributes:
      starts: by owner, in the order of the blocks.
      room: elements of the longest segment.
    """

    name: str
    part: str
    size: int
    dtype: Any
    starts: dict[int, int]
    room: int


def find_slots(state: KfacState) -> list[Slot]:
    """Of all groups and parts."""
    slots: list[Slot] = []
    for part in Segment._fields:
        forms = {n: getattr(own.shapes, part) for n, own in state.owned.items() if own.form is not None}
        flat = {n: jax.eval_shape(lambda x, p=part: _flat(p, x), x) for n, x in forms.items() if jax.tree.leaves(x)}
        starts, lengths = lay_end_to_end(shards_of(state), {name: x.shape[1] for name, x in flat.items()})
        slots += [Slot(n, part, x.shape[1], x.dtype, starts[n], max(lengths.values())) for n, x in flat.items()]
    return slots


def opened(state: KfacState, way: Way) -> KfacState:
    """A state in which all blocks stand in stacks; zeros where this device has none of a group."""
    new = {}
    for slot in find_slots(state):
        flat = lax.dynamic_slice_in_dim(
            getattr(state.segment, slot.part), here(slot.starts, slot.room, way.owners), slot.size
        )
        flat = jnp.where(way.owns(state.owned[slot.name].shard), flat, 0)
        new[slot[:2]] = _formed(state.owned, slot, flat[None])
    return _with(state, new)


def closed(state: KfacState, way: Way, before: KfacState | None = None) -> KfacState:
    """The inverse of `opened`, which has made `before`: what is as it was there is not written."""
    slots = find_slots(state)
    parts = state.segment._asdict()
    if before is None:
        dtypes = {x.part: jnp.result_type(*(y.dtype for y in slots if y.part == x.part)) for x in slots}
        parts = {x.part: jnp.zeros(x.room, dtypes[x.part]) for x in slots}
    for slot in slots:
        own, part, begin = state.owned[slot.name], slot.part, here(slot.starts, slot.room, way.owners)
        stack, old = (getattr(x.owned[slot.name].blocks, part) for x in (state, before or state))
        if before is not None and all(a is b for a, b in zip(*map(jax.tree.leaves, (stack, old)), strict=True)):
            continue
        kept = lax.dynamic_slice_in_dim(parts[part], begin, slot.size)
        flat = jnp.where(way.owns(own.shard), _flat(part, stack)[0].astype(kept.dtype), kept)
        parts[part] = lax.dynamic_update_slice_in_dim(as_varying(parts[part], varying_axes(flat)), flat, begin, 0)
    return _with(state, {slot[:2]: None for slot in slots})._replace(segment=Segment(**parts))


def _with(state: KfacState, stacks: Mapping[tuple, Any]) -> KfacState:
    """With parts of the blocks of some groups, by both."""
    blocks = state.blocks
    for (name, part), stack in stacks.items():
        blocks[name] = blocks[name]._replace(**{part: stack})
    return with_blocks(state, blocks)


def _flat(part: str, tree: Any) -> jax.Array:
    return flatten(_packed(tree) if part == "factors" else tree)


def _formed(owned: Mapping[str, Owned], slot: Slot, flat: jax.Array) -> Any:
    like = getattr(owned[slot.name].shapes, slot.part)
    return (
        unflatten(flat, jax.eval_shape(_packed, like)).unpacked() if slot.part == "factors" else unflatten(flat, like)
    )


def _packed(factors: Kronecker) -> Packed:
    return Packed.of(factors, (factors.A.shape[1:], factors.G.shape[1:]))
