"""Store groups with fewer blocks than devices as flat vectors on their owners.

All devices run the same program. During a step, each device therefore has a stack for every such group, with room for a
block that most devices do not own. Between steps, each device stores its own blocks in three flat vectors: averages as
triangles, preconditioners, and momenta with adaptive rates. Each vector has the same length on all devices, set by the
device that needs the most.

`part_of` unpacks a group's factors, preconditioners or momenta, and `with_parts` writes them back. `observe` unpacks
and writes back one group after another, so their stacks need not all be in memory together. A step unpacks all groups'
momenta before it writes any back, because it first has to find out whether its result is finite.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from kfac._distributed.collectives import of_this_device
from kfac._distributed.comm import CommContext
from kfac._distributed.message_layout import lay_end_to_end
from kfac._distributed.owners import BlockAssignment
from kfac._factors import Kronecker, Packed
from kfac._mesh import PyTree, as_varying, varying_axes
from kfac._optimizer.state import FlatState, Form, KfacState, with_blocks
from kfac._packing import flatten, unflatten


class Slot(NamedTuple):
    """The location of a group's blocks in the flat vectors of a part: factors, preconditioner or momentum.

    Attributes:
      shapes: the part's shapes `[1, ...]` for a single block, a tree of `jax.ShapeDtypeStruct`s.
      size: the number of elements that a block has in the vector.
      starts: where each block starts in its owner's vector, by owner, in block order.
      length: the vector's length.
    """

    shapes: PyTree
    size: int
    starts: dict[int, int]
    length: int


def slots_of(state: KfacState, part: str) -> dict[str, Slot]:
    """Return the slots of a part, by group, for all groups that store it in the flat state."""
    stored = []
    for name, owned in state.owned.items():
        if owned.form is not None:
            stored.append((name, owned.form, owned.assignment))
    return _slots(part, tuple(stored))


@functools.cache
def _slots(
    part: str,
    groups: tuple[tuple[str, Form, BlockAssignment], ...],
) -> dict[str, Slot]:
    """Return the slots of a part, by group. Each group is given as its name, form and assignment."""
    shapes = {}
    sizes = {}
    assignments = {}
    for name, form, assignment in groups:
        of_part = getattr(jax.tree.unflatten(*form), part)
        if jax.tree.leaves(of_part):
            shapes[name] = of_part
            sizes[name] = jax.eval_shape(lambda x: _flat(part, x), of_part).shape[1]
            assignments[name] = assignment
    starts, lengths = lay_end_to_end(assignments, sizes)
    length = max(lengths.values(), default=0)
    return {n: Slot(shapes[n], sizes[n], starts[n], length) for n in shapes}


def part_of(
    state: KfacState,
    comm: CommContext,
    name: str,
    part: str,
) -> PyTree:
    """Return a part of a group's blocks as stacks `[k, ...]`.

    If the group stores the part in the flat state, the stacks have `k = 1`. They are zero if this device owns no block.
    """
    slot = slots_of(state, part).get(name)
    if slot is None:
        return getattr(state.blocks[name], part)
    vector = getattr(state.flat_state, part)
    begin = of_this_device(slot.starts, slot.length, comm.owner_axes)
    flat = lax.dynamic_slice_in_dim(vector, begin, slot.size)
    flat = jnp.where(comm.owns(state.owned[name].assignment), flat, 0)[None]
    if part != "factors":
        return unflatten(flat, slot.shapes)
    return unflatten(flat, jax.eval_shape(_packed, slot.shapes)).unpacked()


def with_parts(
    state: KfacState, comm: CommContext, name: str, **parts: PyTree
) -> KfacState:
    """Return the state with new values for the given parts of a group's blocks."""
    stacks = {}
    for part, new in parts.items():
        slot = slots_of(state, part).get(name) if part in FlatState._fields else None
        if slot is None:
            stacks[part] = new
            continue
        vector = getattr(state.flat_state, part)
        begin = of_this_device(slot.starts, slot.length, comm.owner_axes)
        old = lax.dynamic_slice_in_dim(vector, begin, slot.size)
        flat = _flat(part, new)[0].astype(old.dtype)
        flat = jnp.where(comm.owns(state.owned[name].assignment), flat, old)
        vector = as_varying(vector, varying_axes(flat))
        vector = lax.dynamic_update_slice_in_dim(vector, flat, begin, 0)
        state = state._replace(flat_state=state.flat_state._replace(**{part: vector}))
    blocks = state.blocks
    blocks[name] = blocks[name]._replace(**stacks)
    return with_blocks(state, blocks)


def opened(state: KfacState, comm: CommContext) -> KfacState:
    """Return the state with all blocks in stacks."""
    blocks = state.blocks
    for name in blocks:
        parts = {part: part_of(state, comm, name, part) for part in FlatState._fields}
        blocks[name] = blocks[name]._replace(**parts)
    return with_blocks(state, blocks)


def closed(state: KfacState, comm: CommContext) -> KfacState:
    """Move the blocks of groups with fewer blocks than devices into the flat state: the inverse of `opened`."""
    for part in FlatState._fields:
        slots = slots_of(state, part)
        blocks = state.blocks
        if not slots:
            continue
        shapes = jax.tree.leaves([slot.shapes for slot in slots.values()])
        length = next(iter(slots.values())).length
        zeros = jnp.zeros(length, jnp.result_type(*shapes))
        state = state._replace(flat_state=state.flat_state._replace(**{part: zeros}))
        for name in slots:
            stack = getattr(blocks[name], part)
            state = with_parts(state, comm, name, **{part: stack})
            nothing: PyTree = {part: None}
            blocks[name] = blocks[name]._replace(**nothing)
        state = with_blocks(state, blocks)
    return state


def _flat(part: str, tree: PyTree) -> Array:
    return flatten(_packed(tree) if part == "factors" else tree)


def _packed(factors: Kronecker) -> Packed:
    return factors.packed((factors.A.shape[1:], factors.G.shape[1:]))
