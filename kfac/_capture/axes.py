"""Track where each axis of an array comes from: a parameter leaf, or the batch.

A kernel rarely reaches its matrix product in its stored form: it is cast, reshaped, transposed or sliced by a scan. For
an array that is a parameter seen through such operations, each axis is described by an ordered list of "atoms". An atom
is a piece of a leaf axis. The product that reads the array gives each atom a role: input axis, output axis, or stack of
independent copies. With these roles, the leaf can be brought to `[copies, d_out, d_in]` and back. `examples.py` follows
the batch axes through the same operations.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from kfac._layers import Layout
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


def foreign(size: int) -> Axis:
    """Return an axis that comes from neither a leaf nor the batch."""
    return (Atom(FOREIGN, 1, size),) if size > 1 else ()


def examples(n: int) -> Axis:
    """Return the axis of the examples."""
    return (Atom(EXAMPLES, 1, n),) if n > 1 else ()


def mixed(size: int) -> Axis:
    """Return an axis of examples that are not in batch order."""
    return (Atom(MIXED, 1, size),) if size > 1 else ()


def holds_examples(axis: Axis) -> bool:
    return any(atom.axis in (EXAMPLES, MIXED) for atom in axis)


def leaf_axes(shape: Sequence[int]) -> Axes:
    return tuple(
        (Atom(k, 1, size),) if size > 1 else () for k, size in enumerate(shape)
    )


def flatten(axes: Iterable[Axis]) -> list[Atom]:
    """Return all atoms in `axes`, in array order."""
    return [atom for axis in axes for atom in axis]


def atoms_of(axes: Iterable[Axis]) -> list[Atom]:
    """Return the leaf's atoms in `axes`, in array order."""
    return [atom for atom in flatten(axes) if atom.of_leaf]


def begins(axes: Axes, position: int) -> int | None:
    """Return the index of the axis that begins with atom number `position`, or None if no axis begins there."""
    starts = itertools.accumulate(map(len, axes), initial=0)
    axes_there = [
        k
        for k, (axis, start) in enumerate(zip(axes, starts, strict=False))
        if axis and start == position
    ]
    return axes_there[0] if axes_there else None


def is_part(part: Atom, whole: Atom) -> bool:
    """Return whether `part` is a piece of `whole`."""
    return (
        part.axis == whole.axis
        and whole.stride <= part.stride < whole.stride * whole.size
    )


def is_broadcast(axes: Iterable[Axis]) -> bool:
    """Return whether some axis repeats the leaf. A repeated parameter counts as an activation."""
    return any(not atom.of_leaf for axis in axes for atom in axis)


def _merge(atoms: Iterable[Atom]) -> Axis:
    merged: list[Atom] = []
    for atom in atoms:
        last = merged[-1] if merged else None
        whole = (
            last
            and last.stride == atom.stride * atom.size
            and last.flipped == atom.flipped
        )
        if last and last.axis == atom.axis == FOREIGN:
            merged[-1] = Atom(FOREIGN, 1, last.size * atom.size)
        elif last and whole and last.axis == atom.axis:
            merged[-1] = atom._replace(size=last.size * atom.size)
        else:
            merged.append(atom)
    return tuple(merged)


def _split(atom: Atom, major: int) -> tuple[Atom, Atom]:
    minor = atom.size // major
    return atom._replace(stride=atom.stride * minor, size=major), atom._replace(
        size=minor
    )


def reshape(axes: Axes, shape: Sequence[int]) -> Axes | None:
    """Return the axes after a row-major reshape, or None if the new axes cut across atoms."""
    pairs = _in_pairs(flatten(axes), flatten(leaf_axes(shape)))
    if pairs is None:
        return None
    return tuple(
        _merge(atom for atom, part in pairs if part.axis == k)
        for k in range(len(shape))
    )


def flip(axis: Axis) -> Axis:
    """Return an axis that is read from its end."""
    return tuple(
        atom if atom.axis == FOREIGN else atom._replace(flipped=not atom.flipped)
        for atom in axis
    )


def cut(axis: Axis, start: int, size: int) -> tuple[Axis, list[tuple[int, int]]] | None:
    """Cut an axis to the entries from `start` to `start + size`.

    Returns:
      The axis after the cut, and pairs of a leaf axis and the number of entries to skip before the first entry read.
      None if `size` is 0, or if the entries are not a box of atoms.
    """
    if size == math.prod(atom.size for atom in axis):
        return axis, []
    if size == 0:
        return None
    *majors, minor = axis
    if not majors:
        first = minor.size - start - size if minor.flipped else start
        left = (minor._replace(size=size),) if size > 1 else ()
        return left, [(minor.axis, first * minor.stride)] if minor.of_leaf else []
    major, at = divmod(start, minor.size)
    if at == 0 and size % minor.size == 0:
        outer_cut = cut(tuple(majors), major, size // minor.size)
        return outer_cut and ((*outer_cut[0], minor), outer_cut[1])
    if at + size <= minor.size:
        outer, inner = cut(tuple(majors), major, 1), cut((minor,), at, size)
        return outer and inner and (inner[0], outer[1] + inner[1])
    return None


def picks(
    shape: Sequence[int], start: Sequence[int], atoms: Iterable[Atom]
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
        inner = 1
        read = sorted(
            (atom for atom in atoms if atom.axis == axis), key=lambda atom: atom.stride
        )
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
    where = np.asarray(
        sum(first * weight for first, weight in zip(start, weights, strict=True))
    )
    for atom in atoms:
        steps = np.arange(atom.size) * atom.stride * weights[atom.axis]
        where = where[..., None] + (steps[::-1] if atom.flipped else steps)
    return where.reshape(-1)


def with_rows(axes: Axes, rows: Axes) -> Axes:
    """Return the axes of a broadcast leaf, with foreign atoms replaced by the data's atoms in `rows`."""
    result = []
    for axis, data in zip(axes, rows, strict=True):
        refined = (
            None
            if not axis or all(atom.of_leaf for atom in axis)
            else common_refinement(axis, data)
        )
        result.append(
            axis
            if refined is None
            else _merge(a if a.of_leaf else b for a, b in refined)
        )
    return tuple(result)


def _in_pairs(a: Sequence[Atom], b: Sequence[Atom]) -> list[tuple[Atom, Atom]] | None:
    """Cut two lists of atoms into pairs of equal size. Return None if the sizes do not divide or the totals differ."""
    left, right = list(a)[::-1], list(b)[::-1]
    pairs = []
    while left and right:
        x, y = left.pop(), right.pop()
        size = min(x.size, y.size)
        if x.size % size or y.size % size:
            return None
        for atom, rest in ((x, left), (y, right)):
            if atom.size > size:
                rest.append(_split(atom, size)[1])
        pairs.append((_split(x, size)[0], _split(y, size)[0]))
    return pairs if not left and not right else None


def common_refinement(a: Axis, b: Axis) -> list[tuple[Atom, Atom]] | None:
    """Cut two axes into pairs of atoms with equal size and direction, or return None if that is impossible."""
    pairs = _in_pairs(a, b)
    return (
        None
        if pairs is None or any(x.flipped != y.flipped for x, y in pairs)
        else pairs
    )


def split_like(axis: Axis, parts: Sequence[Atom]) -> Axis | None:
    """Split leaf atoms that a reshape has merged from several `parts`. Return None if a cut would go through a part."""
    result: list[Atom] = []
    for atom in axis:
        inside = sorted(
            (part for part in parts if is_part(part, atom)),
            key=lambda part: part.memory_order,
        )
        if len(inside) > 1 and math.prod(part.size for part in inside) == atom.size:
            result += [part._replace(flipped=atom.flipped) for part in inside]
        elif atom.of_leaf and not any(
            is_part(atom, p) and atom.stride * atom.size <= p.stride * p.size
            for p in parts
        ):
            return None
        else:
            result.append(atom)
    return tuple(result)


def layout(roles: Iterable[tuple[Atom, str]]) -> Layout:
    """Return the layout that gives each leaf atom its role. Neighbours with the same role become one axis."""
    ordered = sorted(roles, key=lambda pair: pair[0].memory_order)
    runs = [
        (role, [atom.size for atom, _ in run])
        for role, run in itertools.groupby(ordered, lambda pair: pair[1])
    ]
    return Layout(
        tuple(role for role, _ in runs), tuple(math.prod(sizes) for _, sizes in runs)
    )


def arrangement(
    axes: Axes, copies: Iterable[Atom], examples: Sequence[int], rows: Sequence[int]
) -> Arrangement:
    """Return how an array with these axes becomes rows of features.

    All leaf atoms are features, except the atoms in `copies`.

    Args:
      axes: the array's axes.
      copies: leaf atoms that hold independent copies.
      examples: indices of the atoms that hold the examples. The atoms of `axes` are counted in array order.
      rows: indices of the atoms that hold an example's positions.
    """
    flat, copies = flatten(axes), set(copies)
    leaf = sorted(
        (k for k, atom in enumerate(flat) if atom.of_leaf),
        key=lambda k: flat[k].memory_order,
    )
    return Arrangement(
        split=tuple(atom.size for atom in flat),
        copies=tuple(k for k in leaf if flat[k] in copies),
        examples=tuple(examples),
        rows=tuple(rows),
        features=tuple(k for k in leaf if flat[k] not in copies),
        flips=tuple(k for k, atom in enumerate(flat) if atom.flipped),
    )
