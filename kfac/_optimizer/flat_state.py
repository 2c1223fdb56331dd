"""Store groups with fewer blocks than devices in a row on each device.

All devices run the same program. During a step, each device therefore has a stack for every such group, with room for a
block that most devices do not own. Between steps, each device stores its own blocks in three rows: averages as
triangles, preconditioners, and momenta with adaptive rates. A row has a place for each round of `assign_blocks`, as
long as the round's largest block. Two rounds on three devices::

    device 0  | a        | d    |
    device 1  | b        | e    |
    device 2  | c        |      |

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
    for part, rows in state.flat_state.rows.items():
        place = _place(state, part, name)
        if place is not None:
            owns = comm.owns(state.settings.assignments[name])[:, None]
            flat = jnp.where(owns, rows[:, place], 0)
            parts[part] = unflatten(flat, getattr(shapes_of(state)[name], part))
    blocks = blocks._replace(**parts)
    return blocks._replace(factors=blocks.factors.unpacked())


def with_parts(
    state: KfacState, comm: CommContext, name: str, **parts: PyTree
) -> KfacState:
    """Return the state with new values for the given fields of a group's `BlockState`."""
    stacks = {}
    rows = dict(state.flat_state.rows)
    for part, new in parts.items():
        place = _place(state, part, name)
        if place is None:
            stacks[part] = new
            continue
        old = rows[part][:, place]
        flat = flatten(_packed(new) if part == "factors" else new).astype(old.dtype)
        owns = comm.owns(state.settings.assignments[name])[:, None]
        flat = jnp.where(owns, flat, old)
        row = as_varying(rows[part], varying_axes(flat))
        rows[part] = lax.dynamic_update_slice(row, flat, (0, place.start))
    blocks = state.blocks | {name: state.blocks[name]._replace(**stacks)}
    flat_state = dataclasses.replace(state.flat_state, rows=rows)
    return state._replace(blocks=blocks, flat_state=flat_state)


def closed(state: KfacState, comm: CommContext) -> KfacState:
    """Move the blocks of groups with fewer blocks than devices into the flat state."""
    moved = {}
    forms = []
    for name, assignment in state.settings.assignments.items():
        if not assignment.full:
            stack = state.blocks[name]
            moved[name] = {part: getattr(stack, part) for part in PARTS}
            stored = stack._replace(factors=_packed(stack.factors))
            forms.append((name, form_of(stored)))
    rows = {}
    for part in PARTS:
        places, length = _layout(state.settings, part, tuple(forms))
        if places:
            new = jax.tree.leaves([moved[name][part] for name in places])
            # Outside `shard_map`, the stacks have a place for each device.
            rows[part] = jnp.zeros((len(new[0]), length), jnp.result_type(*new))
    empty: PyTree = dict.fromkeys(PARTS)
    blocks = {name: state.blocks[name]._replace(**empty) for name in moved}
    state = state._replace(
        blocks=state.blocks | blocks, flat_state=FlatState(rows, tuple(forms))
    )
    for name, parts in moved.items():
        state = with_parts(state, comm, name, **parts)
    return state


def _place(state: KfacState, part: str, name: str) -> slice | None:
    """Return a group's place in the rows of a part, or None if stacks hold this part of the group."""
    if part not in state.flat_state.rows:
        return None
    return _layout(state.settings, part, state.flat_state.forms)[0].get(name)


@functools.cache
def _layout(
    settings: Settings, part: str, forms: tuple[tuple[str, Form], ...]
) -> tuple[dict[str, slice], int]:
    """Return the place of each group in the rows for the field `part` of `BlockState`, and the rows' length."""
    sizes = {}
    for name, form in forms:
        leaves = jax.tree.leaves(getattr(jax.tree.unflatten(*form), part))
        if leaves:
            sizes[name] = sum(math.prod(x.shape[1:]) for x in leaves)
    return lay_out_rounds(settings.assignments, sizes)


def _packed(factors: Block) -> Statistics:
    return factors.packed(tuple(x.shape[1:] for x in jax.tree.leaves(factors)))
