"""Blocks of shapes that fewer blocks than devices have, as a state keeps them: end to end on their owners.

Every device runs one program, so a step has a stack of each group on every device, with room for a block that most do
not have. Between steps each device keeps what it owns of such groups in one vector for each part of a state, as long as
the longest: averages as triangles, inverses, momenta. A step opens a part of one group where it needs it, and writes
what it has changed before it opens the next: so all are never open at once.
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
    """Where the blocks of a group have one of their parts in a vector.

    Attributes:
      like: one block's, `[1, ...]`.
      size: elements of one block.
      starts: by owner, in the order of the blocks.
      room: elements of the longest segment.
    """

    like: Any
    size: int
    starts: dict[int, int]
    room: int


@functools.cache
def _slots(part: str, groups: tuple[tuple[str, Any, Shard], ...]) -> dict[str, Slot]:
    """Of one part of all groups with a form."""
    forms = {name: getattr(jax.tree.unflatten(*form), part) for name, form, _ in groups}
    flat = {n: jax.eval_shape(lambda x: _flat(part, x), x) for n, x in forms.items() if jax.tree.leaves(x)}
    starts, lengths = lay_end_to_end({n: shard for n, _, shard in groups}, {n: x.shape[1] for n, x in flat.items()})
    return {n: Slot(forms[n], x.shape[1], starts[n], max(lengths.values())) for n, x in flat.items()}


def slots_of(state: KfacState, part: str) -> dict[str, Slot]:
    """The slots of all groups that have this part in a segment."""
    in_segments = {name: owned for name, owned in state.owned.items() if owned.form is not None}
    return _slots(part, tuple((name, owned.form, owned.shard) for name, owned in in_segments.items()))


def part_of(state: KfacState, way: Way, name: str, part: str) -> Any:
    """One part of the blocks of a group, in stacks; of a segment zeros where this device has none of the group."""
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
    """The state with other parts of the blocks of a group."""
    for part in Segment._fields:
        slot = slots_of(state, part).get(name)
        if slot is not None and part in parts:
            vector, begin = getattr(state.segment, part), of_this_device(slot.starts, slot.room, way.owners)
            old = lax.dynamic_slice_in_dim(vector, begin, slot.size)
            flat = _flat(part, parts.pop(part))[0].astype(old.dtype)
            flat = jnp.where(way.owns(state.owned[name].shard), flat, old)
            vector = lax.dynamic_update_slice_in_dim(as_varying(vector, varying_axes(flat)), flat, begin, 0)
            state = state._replace(segment=state.segment._replace(**{part: vector}))
    return with_blocks(state, state.blocks | {name: state.blocks[name]._replace(**parts)})


def opened(state: KfacState, way: Way) -> KfacState:
    """A state in which all blocks stand in stacks."""
    parts = {n: {part: part_of(state, way, n, part) for part in Segment._fields} for n in state.blocks}
    return with_blocks(state, {n: block._replace(**parts[n]) for n, block in state.blocks.items()})


def closed(state: KfacState, way: Way) -> KfacState:
    """The inverse of `opened`."""
    for part in Segment._fields:
        slots, blocks = slots_of(state, part), state.blocks
        if slots:
            dtype = jnp.result_type(*(x for slot in slots.values() for x in jax.tree.leaves(slot.like)))
            room = next(iter(slots.values())).room
            state = state._replace(segment=state.segment._replace(**{part: jnp.zeros(room, dtype)}))
        for name in slots:
            state = with_parts(state, way, name, **{part: getattr(blocks[name], part)})
        nothing: dict[str, Any] = {part: None}
        state = with_blocks(state, blocks | {name: blocks[name]._replace(**nothing) for name in slots})
    return state


def _flat(part: str, tree: Any) -> jax.Array:
    return flatten(_packed(tree) if part == "factors" else tree)


def _packed(factors: Kronecker) -> Packed:
    return Packed.of(factors, (factors.A.shape[1:], factors.G.shape[1:]))
