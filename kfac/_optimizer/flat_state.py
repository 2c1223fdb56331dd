"""Store groups with fewer blocks than devices as flat vectors on their owners.

All devices run the same program. During a step, each device therefore has a stack for every such group, with room for a
block that most devices do not own. Between steps, each device stores its own blocks in three flat vectors: averages as
triangles, preconditioners, and momenta with adaptive rates. A vector has a part for each round of `assign_blocks`, as
long as the round's largest block.

`block_of` unpacks a group, and `with_parts` writes factors, preconditioners or momenta back. `observe` unpacks and
writes back one group after another, so their stacks need not all be in memory together. A step unpacks all groups'
momenta before it writes any back, because it first has to find out whether its result is finite.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from kfac._distributed.comm import CommContext
from kfac._distributed.owners import BlockAssignment, lay_out_rounds
from kfac._factors import Kronecker, Packed
from kfac._mesh import PyTree, as_varying, varying_axes
from kfac._optimizer.state import (
    BlockState,
    FlatState,
    Form,
    KfacState,
    form_of,
    with_blocks,
)
from kfac._packing import flatten, padded_shape, unflatten


def block_of(state: KfacState, comm: CommContext, name: str) -> BlockState:
    """Return the blocks of a group that this device holds, as stacks `[k, ...]`.

    If the group is in the flat state, `k` is 1, and these stacks are zero if this device owns no block.
    """
    blocks = state.blocks[name]
    parts = {}
    for part in FlatState._fields:
        places, length = _layout(state, part)
        if name not in places:
            continue
        owned = state.owned[name]
        rows = getattr(state.flat_state, part).reshape(-1, length)
        owns = comm.owns(owned.assignment)[:, None]
        flat = jnp.where(owns, rows[:, places[name]], 0)
        shapes = getattr(owned.shapes, part)
        if part == "factors":
            parts[part] = unflatten(flat, jax.eval_shape(_packed, shapes)).unpacked()
        else:
            parts[part] = unflatten(flat, shapes)
    return blocks._replace(**parts)


def with_parts(
    state: KfacState, comm: CommContext, name: str, **parts: PyTree
) -> KfacState:
    """Return the state with new values for the given fields of a group's `BlockState`."""
    stacks = {}
    for part, new in parts.items():
        places, length = _layout(state, part)
        if name not in places:
            stacks[part] = new
            continue
        vector = getattr(state.flat_state, part)
        rows = vector.reshape(-1, length)
        old = rows[:, places[name]]
        flat = flatten(_packed(new) if part == "factors" else new).astype(old.dtype)
        owns = comm.owns(state.owned[name].assignment)[:, None]
        flat = jnp.where(owns, flat, old)
        rows = as_varying(rows, varying_axes(flat))
        rows = lax.dynamic_update_slice(rows, flat, (0, places[name].start))
        vectors = {part: rows.reshape(-1)}
        state = state._replace(flat_state=state.flat_state._replace(**vectors))
    blocks = state.blocks
    blocks[name] = blocks[name]._replace(**stacks)
    return with_blocks(state, blocks)


def opened(state: KfacState, comm: CommContext) -> KfacState:
    """Return the state with all blocks in stacks."""
    owned = {}
    for name, old in state.owned.items():
        blocks = block_of(state, comm, name)
        owned[name] = dataclasses.replace(old, blocks=blocks, form=None)
    return state._replace(owned=owned, flat_state=FlatState())


def closed(state: KfacState, comm: CommContext) -> KfacState:
    """Move the blocks of groups with fewer blocks than devices into the flat state: the inverse of `opened`."""
    owned = dict(state.owned)
    moved = {}
    for name, old in owned.items():
        if old.assignment.full:
            continue
        moved[name] = {part: getattr(old.blocks, part) for part in FlatState._fields}
        empty: PyTree = dict.fromkeys(FlatState._fields)
        blocks = old.blocks._replace(**empty)
        owned[name] = dataclasses.replace(old, blocks=blocks, form=form_of(old.blocks))
    state = state._replace(owned=owned)
    vectors = {}
    for part in FlatState._fields:
        places, length = _layout(state, part)
        if places:
            new = [moved[name][part] for name in places]
            # Outside `shard_map`, the stacks have a place for each device.
            devices = len(jax.tree.leaves(new)[0])
            dtype = jnp.result_type(*jax.tree.leaves(new))
            vectors[part] = jnp.zeros(devices * length, dtype)
    state = state._replace(flat_state=FlatState(**vectors))
    for name, parts in moved.items():
        state = with_parts(state, comm, name, **parts)
    return state


def _layout(state: KfacState, part: str) -> tuple[dict[str, slice], int]:
    """Return the layout of a vector in the flat state, for the field `part` of `BlockState`.

    Returns:
      The place of each group in the vector, and the vector's length on a device.
    """
    stored = []
    if part in FlatState._fields:
        for name, owned in state.owned.items():
            if owned.form is not None:
                stored.append((name, owned.form, owned.assignment))
    return _layout_of(part, tuple(stored))


@functools.cache
def _layout_of(
    part: str,
    groups: tuple[tuple[str, Form, BlockAssignment], ...],
) -> tuple[dict[str, slice], int]:
    """Implement `_layout` for groups that are given as their names, forms and assignments."""
    sizes = {}
    assignments = {}
    for name, form, assignment in groups:
        shapes = [
            x.shape[1:]
            for x in jax.tree.leaves(getattr(jax.tree.unflatten(*form), part))
        ]
        if part == "factors":
            shapes = [padded_shape(shape) for shape in shapes]
        if shapes:
            sizes[name] = sum(map(math.prod, shapes))
            assignments[name] = assignment
    return lay_out_rounds(assignments, sizes)


def _packed(factors: Kronecker) -> Packed:
    return factors.packed((factors.A.shape[1:], factors.G.shape[1:]))
