"""Kernels that are made of several leaves, and leaves that several kernels are cut from.

- A concatenation of leaves is a view like others, of what stands in the place of a leaf. A read of it is a read of each
  leaf, of those entries of the data and of the result that meet it.
- Where a leaf is read in parts of several sizes, each of these reads is one of the whole leaf, whose other entries are
  zeros there. So parts count as the uses of one kernel do.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from kfac._capture import axes as axes_lib
from kfac._capture.axes import Atom, Axes, Axis, Box
from kfac._capture.primitives import Read
from kfac._capture.states import KERNEL_OPS, Data, State, Use, View, Within


def concatenated(
    states: Sequence[State], shapes: Sequence[tuple[int, ...]], shape: tuple[int, ...], along: int
) -> View | None:
    """The view that is put together of others and of constants; None if these are not leaves in another form.

    Args:
      states: what is put together.
      shapes: of these.
      shape: of the result, which has one axis more if it is a stack of them.
      along: the axis.
    """
    parts, begin = [], 0
    for state, own in zip(states, shapes, strict=True):
        if isinstance(state, View) and not (state.scaled or state.parts or axes_lib.is_broadcast(state.axes)):
            new = ((),) if len(own) < len(shape) else ()
            parts.append((begin, dataclasses.replace(state, axes=(*state.axes[:along], *new, *state.axes[along:]))))
        elif not isinstance(state, Data) or not (state.fixed or state.value):
            return None
        begin += own[along] if len(own) == len(shape) else 1
    # Different parts of one leaf, as jnp.roll puts them together, meet inputs or gradients that belong together.
    starts = {(part.leaf, part.start, part.axes) for _, part in parts}
    if not parts or len({leaf for leaf, *_ in starts}) < len(starts):
        return None
    empty = ((),) * len(parts[0][1].stack)
    return View(-1, axes_lib.leaf_axes(shape), (0,) * len(shape), empty, parts=tuple(parts), along=along)


def reads_of_parts(view: View, read: Read) -> list[tuple[View, Read]] | None:
    """What a read of a view is a read of: of itself, or of what it is put together of; None if not of boxes of that."""
    if not view.parts:
        return [(view, read)]
    found = []
    for begin, part in view.parts:
        places = _places(view, read, begin, part)
        if places is None:
            return None
        if not places:
            continue
        x_axes, y_axes = _of_part(read.x_axes, places), _of_part(read.y_axes, places)
        x_box, y_box = _box(read.x_axes, places), _box(read.y_axes, places)
        if x_box and read.op == "conv":
            return None
        now = [
            dict(zip(_foreign(a), _foreign(b), strict=True)) for a, b in ((read.y_axes, y_axes), (read.x_axes, x_axes))
        ]
        here = dataclasses.replace(
            read,
            x_axes=x_axes,
            y_axes=y_axes,
            batched=tuple(axes_lib.flatten(_of_part([(atom,) for atom in read.batched], places))),
            rows=tuple((now[0][y], now[1][x]) for y, x in read.rows),
            images=read.images and (now[0][read.images[0]], now[1][read.images[1]]),
            shape=tuple(math.prod(atom.size for atom in axis) for axis in y_axes),
            x_box=x_box,
            y_box=y_box,
        )
        stack = (*part.stack, *_of_part(view.stack[len(part.stack) :], places))
        found.append((dataclasses.replace(part, stack=stack), here))
    return found


# Of an atom of what is put together: from where to where a part has entries of it, and what these are in the part.
Places = Mapping[Atom, tuple[int, int, Axis]]


def _places(view: View, read: Read, begin: int, part: View) -> Places | None:
    """Where a part is among the atoms that are read, nowhere if it is not read at all; None if that is no box."""
    held = set(axes_lib.atoms_of((*view.stack, *read.x_axes, *read.y_axes)))
    places: dict[Atom, tuple[int, int, Axis]] = {}
    for k, axis in enumerate(part.axes):
        atoms = sorted((atom for atom in held if atom.axis == k), key=lambda atom: -atom.stride)
        sizes = [atom.size for atom in atoms]
        if any(atom.flipped or atom.stride != math.prod(sizes[j + 1 :]) for j, atom in enumerate(atoms)):
            return None
        size, total = math.prod(atom.size for atom in axis), math.prod(sizes)
        first = (begin if k == view.along else 0) - view.start[k]
        if first + size <= 0 or first >= total:
            return {}
        box = axes_lib.as_box(first, size, sizes) if 0 <= first <= total - size else None
        own = box and axes_lib.reshape((axis,), [count for _, count in box])
        if box is None or (box and own is None):
            return None
        places |= {a: (low, low + n, axis) for a, (low, n), axis in zip(atoms, box, own or (), strict=True)}
    # Scans that go over what is put together would meet one part in one iteration, another in the next.
    whole = all(places.get(atom, (0, 0))[:2] == (0, atom.size) for atom in axes_lib.atoms_of(view.stack))
    return places if whole and held <= places.keys() else None


def _of_part(axes: Sequence[Axis], places: Places) -> Axes:
    return tuple(tuple(own for atom in axis for own in (places[atom][2] if atom.of_leaf else (atom,))) for axis in axes)


def _foreign(axes: Axes) -> list[int]:
    return [p for p, atom in enumerate(axes_lib.flatten(axes)) if not atom.of_leaf]


def _box(axes: Axes, places: Places) -> Box | None:
    flat = axes_lib.flatten(axes)
    ends = [places[atom][:2] if atom.of_leaf else (0, atom.size) for atom in flat]
    if all(end == (0, atom.size) for end, atom in zip(ends, flat, strict=True)):
        return None
    return Box(tuple(atom.size for atom in flat), tuple(ends))


# -- parts of several sizes --------------------------------------------------------------------------------------------


def within_leaves(uses: Sequence[Use], shapes: Sequence[tuple[int, ...]]) -> list[Use]:
    """The uses, those of kernels that are read in parts of several sizes as uses of the whole leaf."""
    by_leaf: dict[int, list[Use]] = collections.defaultdict(list)
    for use in uses:
        by_leaf[use.leaf].append(use)
    known: dict[int, dict[int, str]] = {}
    for leaf, own in by_leaf.items():
        kernels = all(use.read.op in KERNEL_OPS for use in own)
        if kernels and (len({use.picked for use in own}) > 1 or any(use.picks is None for use in own)):
            roles = _roles(own, shapes[leaf])
            if roles:
                known[leaf] = roles
    return [
        dataclasses.replace(use, picks=(), within=_within(use, shapes[use.leaf], known[use.leaf]))
        if use.leaf in known
        else use
        for use in uses
    ]


def _entries(use: Use, shape: Sequence[int], axis: int) -> np.ndarray:
    """Which entries of one axis of its leaf a use reads."""
    atoms = axes_lib.atoms_of((*use.view.stack, *use.read.x_axes, *use.read.y_axes))
    own = dict.fromkeys(atom._replace(axis=0) for atom in atoms if atom.axis == axis)
    return np.sort(axes_lib.entries((shape[axis],), (use.view.start[axis],), list(own)))


def _roles(uses: Sequence[Use], shape: Sequence[int]) -> dict[int, str] | None:
    """The role of each axis of a leaf, if all uses agree on one."""
    found: dict[int, set[str]] = {axis: set() for axis, size in enumerate(shape) if size > 1}
    for use in uses:
        for atom, role in dataclasses.replace(use, picks=()).roles.items():
            found[atom.axis].add(role)
    if any(len(roles) != 1 for roles in found.values()):
        return None
    roles = {axis: role for axis, (role,) in found.items()}
    stacks = [axis for axis, role in roles.items() if role == "stack"]
    whole = all(len(_entries(use, shape, axis)) == shape[axis] for use in uses for axis in stacks)
    return roles if whole else None


def _within(use: Use, shape: Sequence[int], roles: Mapping[int, str]) -> Within:
    def places(role: str) -> tuple[int, ...]:
        axes = [axis for axis, own in roles.items() if own == role]
        if not axes:
            return (0,)
        grid = np.ix_(*(_entries(use, shape, axis) for axis in axes))
        return tuple(np.ravel_multi_index(grid, [shape[axis] for axis in axes]).reshape(-1).tolist())

    layout = axes_lib.layout((Atom(axis, 1, shape[axis]), role) for axis, role in roles.items())
    return Within(layout, places("in"), places("out"))
