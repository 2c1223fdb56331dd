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

import jax
import jax.numpy as jnp
from jax import Array, lax

from kfac._distributed.comm import CommContext
from kfac._distributed.owners import lay_out_rounds
from kfac._factors import Block, Statistics
from kfac._mesh import PyTree, as_varying, varying_axes
from kfac._optimizer.state import (
    PARTS,
    BlockState,
    FlatState,
    Form,
    KfacState,
    Settings,
    form_of,
    shapes_of,
)
from kfac._packing import flatten, unflatten


def block_of(state: KfacState, comm: CommContext, name: str) -> BlockState:
    """Return the blocks of a group that this device holds, as stacks `[k, ...]`.

    If the group is in the flat state, `k` is 1, and these stacks are zero if this device owns no block.
    """
    blocks = state.blocks[name]
    parts = {}
    for part in state.flat_state.vectors:
        place, rows = _rows(state, part, name)
        if place is None:
            continue
        owns = comm.owns(state.settings.assignments[name])[:, None]
        flat = jnp.where(owns, rows[:, place], 0)
        shapes = getattr(shapes_of(state)[name], part)
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
    vectors = dict(state.flat_state.vectors)
    for part, new in parts.items():
        place, rows = _rows(state, part, name)
        if place is None:
            stacks[part] = new
            continue
        old = rows[:, place]
        flat = _flat(part, new).astype(old.dtype)
        owns = comm.owns(state.settings.assignments[name])[:, None]
        flat = jnp.where(owns, flat, old)
        rows = as_varying(rows, varying_axes(flat))
        rows = lax.dynamic_update_slice(rows, flat, (0, place.start))
        vectors[part] = rows.reshape(-1)
    blocks = state.blocks | {name: state.blocks[name]._replace(**stacks)}
    flat_state = dataclasses.replace(state.flat_state, vectors=vectors)
    return state._replace(blocks=blocks, flat_state=flat_state)


def closed(state: KfacState, comm: CommContext) -> KfacState:
    """Move the blocks of groups with fewer blocks than devices into the flat state."""
    moved = {}
    for name, assignment in state.settings.assignments.items():
        if not assignment.full:
            moved[name] = {part: getattr(state.blocks[name], part) for part in PARTS}
    forms = tuple((name, form_of(state.blocks[name])) for name in moved)
    vectors = {}
    for part in PARTS:
        places, length = _layout(state.settings, part, forms)
        if places:
            new = jax.tree.leaves([moved[name][part] for name in places])
            # Outside `shard_map`, the stacks have a place for each device.
            vectors[part] = jnp.zeros(len(new[0]) * length, jnp.result_type(*new))
    empty: PyTree = dict.fromkeys(PARTS)
    blocks = {name: state.blocks[name]._replace(**empty) for name in moved}
    state = state._replace(
        blocks=state.blocks | blocks, flat_state=FlatState(vectors, forms)
    )
    for name, parts in moved.items():
        state = with_parts(state, comm, name, **parts)
    return state


def _rows(state: KfacState, part: str, name: str) -> tuple[slice | None, Array]:
    """Return a group's place in a vector of the flat state, and the vector with a row for each device.

    The place is None if the vector does not hold the group.
    """
    flat = state.flat_state
    if part not in flat.vectors:
        return None, jnp.zeros(0)
    places, length = _layout(state.settings, part, flat.forms)
    return places.get(name), flat.vectors[part].reshape(-1, length)


@functools.cache
def _layout(
    settings: Settings, part: str, forms: tuple[tuple[str, Form], ...]
) -> tuple[dict[str, slice], int]:
    """Return the layout of a vector in the flat state, for the field `part` of `BlockState`.

    Returns:
      The place of each group in the vector, and the vector's length on a device.
    """
    sizes = {}
    for name, form in forms:
        shapes = getattr(jax.tree.unflatten(*form), part)
        if jax.tree.leaves(shapes):
            flat = jax.eval_shape(functools.partial(_flat, part), shapes)
            sizes[name] = flat.shape[1]
    return lay_out_rounds(settings.assignments, sizes)


def _flat(part: str, tree: PyTree) -> Array:
    return flatten(_packed(tree) if part == "factors" else tree)


def _packed(factors: Block) -> Statistics:
    return factors.packed(tuple(x.shape[1:] for x in jax.tree.leaves(factors)))
