"""What is known of an array in the program of a loss, and of an operation that reads a parameter.

Every array on the way has one of these states:

- `Data`: an activation, or anything that no parameter is followed in. `output` while it is still the unbranched result
  of a read, which is what a bias or shift is joined to.
- `View`: one parameter leaf seen through casts, reshapes, transposes, slices and scans, axis by axis (`axes.py`).
  `scaled` after an elementwise product with something that has no example axis, as in
  `(x - mean) * (rsqrt(var) * scale)`; `inexact` where a product that reads it has no exact rows.
- `Derived`: computed from parameters in any other way. Harmless as long as it meets no data: a weight penalty.

A `Use` is an operation where a parameter meets data, and where that is.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar

from kfac._capture import axes as axes_lib
from kfac._capture.axes import Atom, Axes
from kfac._capture.examples import positions_of_examples
from kfac._capture.primitives import Read
from kfac._capture.program import Op, Value
from kfac._layers import Layout

Leaves = frozenset[int]
NONE: Leaves = frozenset()


@dataclasses.dataclass(frozen=True)
class Output:
    """The result of the use at the op `use`; axes that are not the parameter's are foreign."""

    use: Op
    axes: Axes


@dataclasses.dataclass(frozen=True)
class Data:
    """An activation, with the ops of the late uses that it is made of: their rows are the same for all examples."""

    output: Output | None = None
    shared: frozenset[Op] = frozenset()
    leaves: ClassVar[Leaves] = NONE


@dataclasses.dataclass(frozen=True)
class View:
    leaf: int
    shape: tuple[int, ...]  # of the leaf
    axes: Axes
    start: tuple[int, ...]  # the first entry of each leaf axis that it holds: not zeros where it is a slice
    stack: tuple[axes_lib.Axis, ...] = ()  # for each enclosing scan, the atoms it iterates over (none: read each time)
    scaled: bool = False
    uniform: bool = True  # scaled, if at all, by numbers only
    mixed: bool = False  # scaled by what depends on the batch
    inexact: str = ""  # why it has no exact rows
    beside: Leaves = NONE  # other leaves that it depends on, which have none
    shared: ClassVar[frozenset[Op]] = frozenset()

    @property
    def leaves(self) -> Leaves:
        return self.beside | {self.leaf}

    @property
    def picks(self) -> tuple[tuple[Atom, int], ...] | None:
        """Which of several equal parts of the leaf it is (`axes.picks`)."""
        return axes_lib.picks(self.shape, self.start, axes_lib.atoms_of((*self.stack, *self.axes)))


@dataclasses.dataclass(frozen=True)
class Derived:
    leaves: Leaves
    how: str
    repeated: bool = False  # broadcast over examples or positions
    shared: ClassVar[frozenset[Op]] = frozenset()


State = Data | View | Derived


@dataclasses.dataclass(frozen=True)
class Use:
    """One read of a parameter leaf, and where it is.

    Attributes:
      read: what the operation does.
      view: the leaf, in the form in which it is read.
      op: the operation.
      joined: of a bias or shift, the op of the use whose result it is added to, and the atoms of both leaves in pairs.
      late: whether it reads rows that all examples share. Its result gets an axis of examples, which come in later.
      dropped: whether it does not count: a penalty by constants.
    """

    read: Read
    view: View
    op: Op
    joined: tuple[Op, tuple[tuple[Atom, Atom], ...]] | None = None
    late: bool = False
    dropped: bool = False

    @property
    def leaf(self) -> int:
        return self.view.leaf

    @property
    def picked(self) -> tuple[Atom, ...]:
        return tuple(atom for atom, _ in self.view.picks or ())

    @property
    def scanned(self) -> tuple[Atom, ...]:
        return tuple(atom for axis in self.view.stack for atom in axis)

    @property
    def copies(self) -> tuple[Atom, ...]:
        """Atoms of the leaf that hold independent copies of a kernel."""
        return (*self.picked, *self.scanned, *self.read.batched)

    def levels(self, examples: bool = False) -> list[tuple[Op, bool]]:
        """The scans around it, and whether each goes over the leaf, or with `examples` over these."""
        pairs = zip(self.op.loops, self.view.stack, strict=True)
        return [(loop, bool(atoms) or (examples and loop.longer)) for loop, atoms in pairs]

    @property
    def iterated(self) -> tuple[int, ...]:
        """Lengths of the scans that iterate over the leaf."""
        return tuple(loop.length for loop, iterates in self.levels() if iterates)

    @property
    def reads(self) -> int:
        """How often each example reads the parameter: not once more for each iteration over examples."""
        return math.prod(loop.length for loop, iterates in self.levels(examples=True) if not iterates)

    @property
    def times(self) -> int:
        """How often the parameter is read: once in each iteration that shares it."""
        return math.prod(loop.length for loop, iterates in self.levels() if not iterates)

    @property
    def rows(self) -> int:
        """Rows this use contributes: positions of all examples, over all iterations that share the parameter."""
        return self.times * math.prod(atom.size for axis in self.read.y_axes for atom in axis if not atom.of_leaf)

    def for_all(self, n: int) -> Use:
        """Puts `n` examples on a first axis of a late use, whose rows all of them share."""
        if not self.late:
            return self
        read, axis = self.read, axes_lib.examples(n)
        read = dataclasses.replace(
            read,
            x_axes=(axis, *read.x_axes),
            y_axes=(axis, *read.y_axes),
            rows=(*((0, 0) for _ in axis), *((y + len(axis), x + len(axis)) for y, x in read.rows)),
        )
        return dataclasses.replace(self, read=read, late=False)

    def examples(self, n: int | None) -> tuple[int, ...] | None:
        """Which atoms of the result are the `n` examples, but for those that scans go over.

        None where they are not all there, or not in their order.
        """
        along = [loop.along for loop in self.op.loops]
        in_loops = len(axes_lib.flatten(along))
        positions = None if n is None else positions_of_examples((*along, *self.for_all(n).read.y_axes), n)
        slowest = [] if positions is None else sorted(p for p in positions if p < in_loops)
        if positions is None or list(positions[: len(slowest)]) != slowest:
            return None  # also where a scan goes over what runs faster than what it holds
        return tuple(p - in_loops for p in positions[len(slowest) :])

    @property
    def roles(self) -> dict[Atom, str]:
        """The role of each atom of a kernel."""
        roles = {atom: "in" for atom in axes_lib.atoms_of(self.read.x_axes)}
        roles |= {atom: "out" for atom in axes_lib.atoms_of(self.read.y_axes)}
        return roles | {atom: "stack" for atom in self.copies}

    @property
    def layout(self) -> Layout:
        return axes_lib.layout(self.roles.items())

    @property
    def part(self) -> int:
        """Which part of its leaf a product reads, in memory order."""
        index = 0
        for atom, entry in self.view.picks or ():
            index = index * atom.size + entry
        return index


def by_part(uses: Sequence[Use]) -> list[list[Use]]:
    """The uses of each part that a leaf is read in; of the whole of it, as a rule."""
    parts: dict[Any, list[Use]] = collections.defaultdict(list)
    for use in uses:
        parts[use.view.start].append(use)
    return list(parts.values())


def is_repeated(state: State, value: Value) -> bool:
    """Whether an array is a parameter that is broadcast over examples or positions: an activation."""
    if isinstance(state, View):
        return axes_lib.is_broadcast(state.axes) or any(value.grown)
    return isinstance(state, Derived) and state.repeated
