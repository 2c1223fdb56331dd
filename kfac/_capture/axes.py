"""Track where each axis of an array comes from: a parameter leaf, or the batch.

A kernel rarely reaches its matrix product in its stored form: it is cast, reshaped, transposed or sliced by a scan. For
an array that is a parameter seen through such operations, each axis is described by an ordered list of "atoms". An atom
is a piece of a leaf axis. The product that reads the array gives each atom a role: input axis, output axis, or stack of
independent copies. With these roles, the leaf can be brought to `[copies, d_out, d_in]` and back. `examples.py` follows
the batch axes through the same operations.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from kfac._leaves import Layout
from kfac._statistics.rows import Arrangement

# Values of `Atom.axis` for an axis that does not come from a parameter.
FOREIGN = -1  # an unknown axis, such as positions or features
EXAMPLES = -2  # the examples of the batch, in order
MIXED = -3  # examples, or parts of examples, in another order


class Atom(NamedTuple):
    """A strided piece of a leaf axis. A negative `axis` stands for an axis that the leaf does not have."""

    axis: int
    stride: int
    size: int
    flipped: bool = False  # read from its end

    @property
    def of_leaf(self) -> bool:
        return self.axis >= 0

    @property
    def memory_order(self) -> tuple[int, int]:
        return (self.axis, -self.stride)


Axis = tuple[Atom, ...]  # major to minor; an axis of size 1 has no atoms
Axes = tuple[Axis, ...]


def length(axis: Axis) -> int:
    """Return an axis's number of entries."""
    return math.prod(atom.size for atom in axis)


def _whole(kind: int, size: int) -> Axis:
    if size <= 1:
        return ()
    return (Atom(kind, 1, size),)


# An axis that comes from neither a leaf nor the batch, by its size.
foreign = functools.partial(_whole, FOREIGN)
# The axis of the examples, by their number.
examples = functools.partial(_whole, EXAMPLES)
# An axis of examples that are not in batch order, by its size.
mixed = functools.partial(_whole, MIXED)


def leaf_axes(shape: Sequence[int]) -> Axes:
    return tuple(map(_whole, range(len(shape)), shape))


def holds_examples(axis: Axis) -> bool:
    return any(atom.axis in (EXAMPLES, MIXED) for atom in axis)


def take(axes: Sequence[Axis], positions: Iterable[int]) -> Axes:
    """Return the axes at these positions."""
    return tuple(axes[k] for k in positions)


def insert(axes: Axes, positions: Iterable[int], new: Iterable[Axis]) -> Axes:
    """Return `axes` with the axes `new` at these positions of the result, in ascending order."""
    result = list(axes)
    for k, axis in zip(positions, new, strict=True):
        result.insert(k, axis)
    return tuple(result)


def remaining(count: int, used: Collection[int]) -> list[int]:
    """Return the positions of `count` axes, except the positions in `used`."""
    return [k for k in range(count) if k not in used]


def flatten(axes: Iterable[Axis]) -> list[Atom]:
    """Return all atoms in `axes`, in array order."""
    return list(itertools.chain.from_iterable(axes))


def atoms_of(axes: Iterable[Axis]) -> list[Atom]:
    """Return the leaf's atoms in `axes`, in array order."""
    return [atom for atom in flatten(axes) if atom.of_leaf]


def begins(axes: Axes, position: int) -> int | None:
    """Return the index of the axis that begins with atom number `position`, or None if no axis begins there."""
    start = 0
    for k, axis in enumerate(axes):
        if axis and start == position:
            return k
        start += len(axis)
    return None


def is_part(part: Atom, whole: Atom) -> bool:
    """Return whether `part` is a piece of `whole`."""
    end = whole.stride * whole.size
    return part.axis == whole.axis and whole.stride <= part.stride < end


def is_broadcast(axes: Iterable[Axis]) -> bool:
    """Return whether some axis repeats the leaf. A repeated parameter counts as an activation."""
    return not all(atom.of_leaf for atom in flatten(axes))


def _merge(atoms: Iterable[Atom]) -> Axis:
    """Merge neighbours that are one piece."""
    merged: list[Atom] = []
    for atom in atoms:
        both = _joined(merged[-1], atom) if merged else None
        if both is None:
            merged.append(atom)
        else:
            merged[-1] = both
    return tuple(merged)


def _joined(major: Atom, minor: Atom) -> Atom | None:
    """Return two neighbours as one atom, or None if they are not one piece."""
    if major.axis != minor.axis:
        return None
    size = major.size * minor.size
    if minor.axis == FOREIGN:
        return Atom(FOREIGN, 1, size)
    adjacent = major.stride == minor.stride * minor.size
    if not adjacent or major.flipped != minor.flipped:
        return None
    return minor._replace(size=size)


def reshape(axes: Axes, shape: Sequence[int]) -> Axes | None:
    """Return the axes after a row-major reshape, or None if the new axes cut across atoms."""
    pairs = _in_pairs(flatten(axes), flatten(leaf_axes(shape)))
    if pairs is None:
        return None
    result: list[list[Atom]] = [[] for _ in shape]
    for atom, part in pairs:
        result[part.axis].append(atom)
    return tuple(map(_merge, result))


def flip(axis: Axis) -> Axis:
    """Return an axis that is read from its end."""
    return tuple(
        atom if atom.axis == FOREIGN else atom._replace(flipped=not atom.flipped)
        for atom in axis
    )


# Pairs of a leaf axis and the number of entries to skip before the first entry read.
Moves = tuple[tuple[int, int], ...]


def cut(axis: Axis, start: int, size: int) -> tuple[Axis, Moves] | None:
    """Cut an axis to the entries from `start` to `start + size`.

    Returns:
      The axis after the cut, and how far the cut moves the first entry. None if `size` is 0, or if the entries are not
      a box of atoms.
    """
    inner = length(axis)
    if size == inner:
        return axis, ()
    moves: Moves = ()
    # The slower atoms are cut to a single entry, until the entries reach beyond one entry of an atom. For example, in
    # an axis of atoms 4 x 6 the entries from 12 to 18 are row 2, and the entries from 6 to 18 are rows 1 and 2. The
    # entries from 8 to 10 are a part of row 1. The entries from 4 to 8 lie in two rows, and are no box.
    for k, atom in enumerate(axis):
        # From here on, `inner` is the length of one entry of this atom, and `start` counts inside this entry.
        inner //= atom.size
        first, start = divmod(start, inner)
        count = max(1, size // inner)
        if atom.of_leaf:
            # A flipped atom is read from its end, so the leaf's entries before the cut are those that come after it.
            skipped = atom.size - first - count if atom.flipped else first
            moves += ((atom.axis, skipped * atom.stride),)
        # The cut begins and ends with whole entries of this atom, so all faster atoms stay whole.
        if start == size % inner == 0 < size:
            left = axis[k + 1 :]
            if count > 1:
                left = (atom._replace(size=count), *left)
            return left, moves
        # The rest reaches into the next entry, so faster atoms would differ between the two entries.
        if start + size > inner:
            break
    return None


def picks(
    shape: Sequence[int], start: Sequence[int], atoms: Sequence[Atom]
) -> tuple[tuple[Atom, int], ...] | None:
    """Find out which of a leaf's equal parts an array is.

    Args:
      shape: the leaf's shape.
      start: the first entry read, along each axis of the leaf.
      atoms: the leaf atoms in the array.

    Returns:
      A pair for each leaf atom of which the array holds a single entry: the atom and the index of this entry. The atoms
      are in memory order. The tuple is empty if the array is the whole leaf. None if the leaf cannot be divided into
      equal parts like this array.
    """
    picked: list[tuple[Atom, int]] = []
    for axis, (size, first) in enumerate(zip(shape, start, strict=True)):
        read = [atom for atom in atoms if atom.axis == axis]
        read.sort(key=lambda atom: atom.stride)
        inner = 1
        missing = []
        for atom in (*read, Atom(axis, size, 1)):
            if atom.stride % inner or first // atom.stride % atom.size:
                return None
            if atom.stride > inner:
                gap = Atom(axis, inner, atom.stride // inner)
                missing.append((gap, first // inner % gap.size))
            inner = atom.stride * atom.size
        picked += reversed(missing)
    return tuple(picked)


def entries(
    shape: Sequence[int], start: Sequence[int], atoms: Sequence[Atom]
) -> np.ndarray:
    """Return the indices, into a flat leaf of shape `shape`, of an array with `atoms` from major to minor."""
    weights = [math.prod(shape[k + 1 :]) for k in range(len(shape))]
    where = np.asarray(sum(map(operator.mul, start, weights)))
    for atom in atoms:
        steps = np.arange(atom.size) * atom.stride * weights[atom.axis]
        where = where[..., None] + (steps[::-1] if atom.flipped else steps)
    return where.reshape(-1)


def with_rows(axes: Axes, rows: Axes) -> Axes:
    """Return the axes of a broadcast leaf, with foreign atoms replaced by the data's atoms in `rows`."""
    result = []
    for axis, data in zip(axes, rows, strict=True):
        pairs = common_refinement(axis, data) if is_broadcast([axis]) else None
        if pairs is not None:
            axis = _merge(own if own.of_leaf else other for own, other in pairs)
        result.append(axis)
    return tuple(result)


def _in_pairs(a: Sequence[Atom], b: Sequence[Atom]) -> list[tuple[Atom, Atom]] | None:
    """Cut two lists of atoms into pairs of equal size. Return None if the sizes do not divide or the totals differ."""
    left = list(a)
    right = list(b)
    pairs = []
    while left and right:
        size = min(left[0].size, right[0].size)
        first = _split_off(left, size)
        second = _split_off(right, size)
        if first is None or second is None:
            return None
        pairs.append((first, second))
    if left or right:
        return None
    return pairs


def _split_off(atoms: list[Atom], size: int) -> Atom | None:
    """Remove an atom of this size from the front of a list, or return None if the first atom's size is no multiple."""
    atom = atoms.pop(0)
    minor, rest = divmod(atom.size, size)
    if rest:
        return None
    if minor > 1:
        atoms.insert(0, atom._replace(size=minor))
    return atom._replace(stride=atom.stride * minor, size=size)


def common_refinement(a: Axis, b: Axis) -> list[tuple[Atom, Atom]] | None:
    """Cut two axes into pairs of atoms with equal size and direction, or return None if that is impossible."""
    pairs = _in_pairs(a, b)
    if pairs is None or any(x.flipped != y.flipped for x, y in pairs):
        return None
    return pairs


def split_like(axis: Axis, parts: Sequence[Atom]) -> Axis | None:
    """Split leaf atoms that a reshape has merged from several `parts`. Return None if a cut would go through a part."""
    result = []
    for atom in axis:
        inside = [part for part in parts if is_part(part, atom)]
        inside.sort(key=lambda part: part.memory_order)
        if len(inside) > 1 and length(tuple(inside)) == atom.size:
            result += [part._replace(flipped=atom.flipped) for part in inside]
        elif atom.of_leaf and not any(
            is_part(atom, part) and atom.stride * atom.size <= part.stride * part.size
            for part in parts
        ):
            return None
        else:
            result.append(atom)
    return tuple(result)


def layout(roles: Iterable[tuple[Atom, str]]) -> Layout:
    """Return the layout that gives each leaf atom its role. Neighbours with the same role become one axis."""
    names: list[str] = []
    sizes: list[int] = []
    for atom, role in sorted(roles, key=lambda pair: pair[0].memory_order):
        if names[-1:] == [role]:
            sizes[-1] *= atom.size
        else:
            names.append(role)
            sizes.append(atom.size)
    return Layout(tuple(names), tuple(sizes))


def arrangement(
    axes: Axes, copies: Collection[Atom], examples: Sequence[int], rows: Sequence[int]
) -> Arrangement:
    """Return how an array with these axes becomes rows of features.

    All leaf atoms are features, except the atoms in `copies`.

    Args:
      axes: the array's axes.
      copies: leaf atoms that hold independent copies.
      examples: indices of the atoms that hold the examples. The atoms of `axes` are counted in array order.
      rows: indices of the atoms that hold an example's positions.
    """
    flat = flatten(axes)
    leaf = [k for k, atom in enumerate(flat) if atom.of_leaf]
    leaf.sort(key=lambda k: flat[k].memory_order)
    return Arrangement(
        split=tuple(atom.size for atom in flat),
        copies=tuple(k for k in leaf if flat[k] in copies),
        examples=tuple(examples),
        rows=tuple(rows),
        features=tuple(k for k in leaf if flat[k] not in copies),
        flips=tuple(k for k, atom in enumerate(flat) if atom.flipped),
    )
