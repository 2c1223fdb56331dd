"""Store groups with fewer blocks than devices as flat vectors on their owners.

All devices run the same program. During a step, each device therefore has a stack for every such group, with room for a
block that most devices do not own. Between steps, each device stores its own blocks in three flat vectors: averages as
triangles, preconditioners, and momenta with adaptive rates. Each vector has the same length on all devices, set by the
device that needs the most.

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

from kfac._distributed.collectives import Segments, lay_end_to_end, of_this_device
from kfac._distributed.comm import CommContext
from kfac._distributed.owners import BlockAssignment
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
from kfac._packing import flatten, unflatten


def block_of(state: KfacState, comm: CommContext, name: str) -> BlockState:
    """Return the blocks of a group that this device holds, as stacks `[k, ...]`.

    If the group is in the flat state, `k` is 1, and these stacks are zero if this device owns no block.
    """
    blocks = state.blocks[name]
    parts = {}
    for part in FlatState._fields:
        sizes, segments = _layout(state, part)
        if name not in sizes:
            continue
        owned = state.owned[name]
        vector = getattr(state.flat_state, part)
        begin = of_this_device(segments.starts[name], segments.length, comm.owner_axes)
        flat = lax.dynamic_slice_in_dim(vector, begin, sizes[name])
        flat = jnp.where(comm.owns(owned.assignment), flat, 0)[None]
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
        sizes, segments = _layout(state, part)
        if name not in sizes:
            stacks[part] = new
            continue
        vector = getattr(state.flat_state, part)
        begin = of_this_device(segments.starts[name], segments.length, comm.owner_axes)
        old = lax.dynamic_slice_in_dim(vector, begin, sizes[name])
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
        sizes, segments = _layout(state, part)
        if sizes:
            dtype = jnp.result_type(*jax.tree.leaves([x[part] for x in moved.values()]))
            vectors[part] = jnp.zeros(segments.length, dtype)
    state = state._replace(flat_state=FlatState(**vectors))
    for name, parts in moved.items():
        state = with_parts(state, comm, name, **parts)
    return state


def _layout(state: KfacState, part: str) -> tuple[dict[str, int], Segments]:
    """Return the layout of a vector in the flat state, for the field `part` of `BlockState`.

    Returns:
      The size of a block for each group in the vector, and the blocks' places.
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
) -> tuple[dict[str, int], Segments]:
    """Implement `_layout` for groups that are given as their names, forms and assignments."""
    sizes = {}
    assignments = {}
    for name, form, assignment in groups:
        shapes = getattr(jax.tree.unflatten(*form), part)
        if jax.tree.leaves(shapes):
            flat = jax.eval_shape(functools.partial(_flat, part), shapes)
            sizes[name] = flat.shape[1]
            assignments[name] = assignment
    return sizes, lay_end_to_end(assignments, sizes)


def _flat(part: str, tree: PyTree) -> Array:
    return flatten(_packed(tree) if part == "factors" else tree)


def _packed(factors: Kronecker) -> Packed:
    return factors.packed((factors.A.shape[1:], factors.G.shape[1:]))
