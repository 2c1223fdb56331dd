"""Store groups with fewer blocks than devices in a row on each device.

All devices run the same program. During a step, each device therefore has a stack for every such group, with room for a
block that most devices do not own. Between steps, each device stores its own blocks in three rows: averages as
triangles, preconditioners, and momenta with adaptive rates. A row has a place for each round of `assign_blocks`, as
long as the round's largest block. Two rounds on three devices::

    device 0  | a        | d    |
    device 1  | b        | e    |
    device 2  | c        |      |

Each of these fields of the group's `BlockState` is then a `Place` in its row. `block_of` unpacks a group, and
`with_parts` writes factors, preconditioners or momenta back. `observe` unpacks and writes back one group after another,
so their stacks need not all be in memory together. A step unpacks all groups' momenta before it writes any back,
because it first has to find out whether its result is finite.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array, lax

from kfac._distributed.comm import CommContext, in_rounds
from kfac._mesh import PyTree, as_varying, varying_axes
from kfac._optimizer.state import BlockState, KfacState
from kfac._packing import flatten, unflatten


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Place:
    """Where a row holds a field of a group's `BlockState`.

    Attributes:
      start: the first element in the row.
      stop: the end in the row.
      structure: the field's tree structure.
      shapes: the shapes `[1, ...]` and dtypes of the tree's arrays, for a single block.
    """

    start: int
    stop: int
    structure: jax.tree_util.PyTreeDef
    shapes: tuple[jax.ShapeDtypeStruct, ...]


def block_of(state: KfacState, comm: CommContext, name: str) -> BlockState:
    """Return the blocks of a group that this device holds, as stacks `[k, ...]`.

    If the group is in the flat state, `k` is 1, and these stacks are zero if this device owns no block.
    """
    blocks = state.blocks[name]
    for part, row in state.flat_state.items():
        place = getattr(blocks, part)
        if isinstance(place, Place):
            owns = comm.owns(state.settings.assignments[name])[:, None]
            flat = jnp.where(owns, row[:, place.start : place.stop], 0)
            like = jax.tree.unflatten(place.structure, place.shapes)
            stack: PyTree = {part: unflatten(flat, like)}
            blocks = blocks._replace(**stack)
    return blocks._replace(factors=blocks.factors.unpacked())


def with_parts(
    state: KfacState, comm: CommContext, name: str, **parts: PyTree
) -> KfacState:
    """Return the state with new values for the given fields of a group's `BlockState`."""
    rows = dict(state.flat_state)
    blocks = state.blocks[name]
    for part, stack in parts.items():
        place = getattr(blocks, part)
        if not isinstance(place, Place):
            new: PyTree = {part: stack}
            blocks = blocks._replace(**new)
            continue
        old = rows[part]
        flat = _flat(part, stack).astype(old.dtype)
        owns = comm.owns(state.settings.assignments[name])[:, None]
        flat = jnp.where(owns, flat, old[:, place.start : place.stop])
        old = as_varying(old, varying_axes(flat))
        rows[part] = lax.dynamic_update_slice(old, flat, (0, place.start))
    return state._replace(blocks=state.blocks | {name: blocks}, flat_state=rows)


def closed(state: KfacState, comm: CommContext) -> KfacState:
    """Move the blocks of groups with fewer blocks than devices into the flat state."""
    assignments = state.settings.assignments
    blocks = dict(state.blocks)
    rows = {}
    for part in ("factors", "preconditioner", "momentum_state"):
        flat = {}
        for name, assignment in assignments.items():
            stack = getattr(blocks[name], part)
            if not assignment.full and jax.tree.leaves(stack):
                owns = comm.owns(assignment)[:, None]
                flat[name] = jnp.where(owns, _flat(part, stack), 0)
        if not flat:
            continue
        places, rows[part] = in_rounds(flat, assignments)
        for name, elements in places.items():
            stack = _stored(part, getattr(blocks[name], part))
            leaves, structure = jax.tree.flatten(stack)
            shapes = [jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype) for x in leaves]
            place = Place(elements.start, elements.stop, structure, tuple(shapes))
            moved: PyTree = {part: place}
            blocks[name] = blocks[name]._replace(**moved)
    return state._replace(blocks=blocks, flat_state=rows)


def _flat(part: str, stack: PyTree) -> Array:
    return flatten(_stored(part, stack))


def _stored(part: str, stack: PyTree) -> PyTree:
    """Pack factors as triangles."""
    if part != "factors":
        return stack
    return stack.packed(tuple(x.shape[1:] for x in jax.tree.leaves(stack)))
