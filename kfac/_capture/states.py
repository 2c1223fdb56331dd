"""Array states and parameter uses in a loss's program.

Each array that `find_reads.py` visits has one of three states:

- `Data`: an activation, or any other array in which no parameter is followed. It has an `output` while it is the
  unbranched result of a read; a bias or shift can then be joined to the read.
- `View`: a parameter leaf after casts, reshapes, transposes, slices and scans, axis by axis (`axes.py`). It is `scaled`
  after an elementwise operation without examples, as in `(x - mean) * (rsqrt(var) * scale)` or `exp(log_std)`. It is
  `inexact` if no operation with it has exact rows.
- `Derived`: an array computed from parameters in any other way. It is harmless unless it meets data; a weight penalty,
  for example, is harmless.

A `Use` is an operation in which a parameter meets data, with its place in the program. `Findings` collects the uses,
and the reasons why parameters have no exact rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple

from kfac._capture import axes as axes_lib
from kfac._capture.axes import Atom, Axes, Axis, Moves, atoms_of, flatten
from kfac._capture.examples import positions_of_examples
from kfac._capture.primitives import Read
from kfac._capture.program import Op, Value
from kfac._layers import KRONECKER_KINDS
from kfac._leaves import Layout

Leaves = frozenset[int]
NONE: Leaves = frozenset()
Ops = frozenset[Op]


@dataclass(frozen=True)
class Output:
    """The result of the use at the op `use`.

    Any atom in `axes` that is not the parameter's has `of_leaf` False.
    """

    use: Op
    axes: Axes


@dataclass(frozen=True)
class Data:
    """An activation.

    `common` holds the ops of late uses from whose results the activation is computed. If there are any, all examples
    share its rows.
    """

    output: Output | None = None
    common: Ops = frozenset()
    leaves: ClassVar[Leaves] = NONE


@dataclass(frozen=True)
class View:
    """A parameter leaf, or a box in it, in another form.

    Attributes:
      leaf: the leaf.
      shape: the leaf's shape.
      axes: the view's axes.
      start: for each leaf axis, the view's first entry, which is not 0 in some slices.
      stack: for each scan around, the atoms it iterates over, if any.
      scaled: whether its entries are multiples or other functions of the parameter's entries. A factor has no axis of
        examples.
      uneven: why a product with it has no exact rows, although an elementwise operation has; empty otherwise.
      mixed: whether it is scaled by an array that depends on the batch.
      inexact: why no operation with it has exact rows; empty otherwise.
      beside: other leaves that it depends on. These have no exact rows.
      made: an op that computes a view like this from an earlier view, and the position of the earlier view among the
        op's inputs. The op's result may be another array, because `made` stays the same at the border of a scan.
    """

    leaf: int
    shape: tuple[int, ...]
    axes: Axes
    start: tuple[int, ...]
    stack: tuple[Axis, ...] = ()
    scaled: bool = False
    uneven: str = ""
    mixed: bool = False
    inexact: str = ""
    beside: Leaves = NONE
    made: tuple[Op, int] | None = None
    common: ClassVar[Ops] = frozenset()

    @property
    def leaves(self) -> Leaves:
        return self.beside | {self.leaf}

    @property
    def picks(self) -> tuple[tuple[Atom, int], ...] | None:
        """Which of several equal parts of the leaf the view is (`axes.picks`); None for any other slice."""
        return axes_lib.picks(self.shape, self.start, atoms_of(self.stack + self.axes))

    def moved(self, axes: Axes, moves: Moves) -> View:
        """Return the view in another form, which starts further along some leaf axes."""
        start = list(self.start)
        for axis, count in moves:
            start[axis] += count
        return replace(self, axes=axes, start=tuple(start))


@dataclass(frozen=True)
class Derived:
    """An array computed from parameters.

    Attributes:
      leaves: the parameters.
      how: the operation that combines them.
      repeated: whether it is broadcast over examples or positions.
    """

    leaves: Leaves
    how: str
    repeated: bool = False
    common: ClassVar[Ops] = frozenset()


State = Data | View | Derived


class Operand(NamedTuple):
    """An array that an op reads, and its state."""

    value: Value
    state: State

    @property
    def repeated(self) -> bool:
        """Whether it is a parameter broadcast over examples or positions, which makes it an activation."""
        if isinstance(self.state, View):
            return axes_lib.is_broadcast(self.state.axes) or any(self.value.grown)
        return isinstance(self.state, Derived) and self.state.repeated

    @property
    def meets_data(self) -> bool:
        """Whether it is data that depends on the batch, or a parameter that has been combined with such data."""
        if isinstance(self.state, Data):
            return self.value.of_batch or bool(self.state.common)
        return isinstance(self.state, View) and self.state.mixed


Operands = Sequence[Operand]


def leaves_of(operands: Operands) -> Leaves:
    return NONE.union(*(x.state.leaves for x in operands))


def common_reads(operands: Operands) -> Ops:
    """Return the late uses from whose results the operands are computed."""
    return Ops().union(*(x.state.common for x in operands))


class Joined(NamedTuple):
    """The use to whose result a bias or shift is added.

    Attributes:
      op: the op of the use.
      pairs: pairs of corresponding atoms, first in the bias or shift, second in the leaf of the use.
    """

    op: Op
    pairs: tuple[tuple[Atom, Atom], ...]


@dataclass(frozen=True)
class Use:
    """A read of a parameter leaf, and its place in the program.

    Attributes:
      read: how the operation reads the leaf.
      view: the leaf, in the form in which the operation reads it.
      op: the operation.
      joined: for a bias or shift, the use to whose result it is added.
      late: whether the use reads rows that all examples share. The examples then meet its result in a later operation,
        and `common_rows.settle` gives the `read` an axis of examples.
      dropped: whether the use does not count, because it acts on constants only, as a penalty does.
    """

    read: Read
    view: View
    op: Op
    joined: Joined | None = None
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
        return tuple(flatten(self.view.stack))

    @property
    def copies(self) -> tuple[Atom, ...]:
        """The leaf's atoms that hold independent copies of a kernel."""
        return self.picked + self.scanned + self.read.batched

    def loops(self, examples: bool = False) -> list[Op]:
        """Return the scans that iterate over the leaf. With `examples`, a scan over examples counts as well."""
        pairs = zip(self.op.loops, self.view.stack, strict=True)
        return [loop for loop, atoms in pairs if atoms or (examples and loop.longer)]

    def times(self, examples: bool = False) -> int:
        """Return how often the parameter is read: once for each iteration that shares it.

        With `examples`, return how often each example reads it. Iterations over examples then do not count.
        """
        over = self.loops(examples)
        return math.prod(loop.length for loop in self.op.loops if loop not in over)

    @property
    def rows(self) -> int:
        """The number of rows: the positions of all examples, in all iterations that share the parameter."""
        atoms = flatten(self.read.y_axes)
        return self.times() * math.prod(a.size for a in atoms if not a.of_leaf)

    def examples(self, n: int | None) -> tuple[int, ...] | None:
        """Return which of the result's atoms are the `n` examples, by position, slowest first.

        Examples that enclosing scans iterate over are left out. The result is None if not all examples are there, or if
        they are out of order.
        """
        if n is None:
            return None
        # Look at the result as if the loops stacked it: a loop over micro-batches holds the slow part of the examples.
        along = tuple(loop.along for loop in self.op.loops)
        positions = positions_of_examples(along + self.read.y_axes, n)
        if positions is None:
            return None
        in_loops = len(flatten(along))
        outer = [p for p in positions if p < in_loops]
        # `positions` runs from the slowest to the fastest part of the examples, so the loops' parts must come first,
        # the outer loop before the inner. If a scan iterates over a faster part than its body holds, rows are not in
        # the batch's order.
        if list(positions[: len(outer)]) != sorted(outer):
            return None
        return tuple(p - in_loops for p in positions[len(outer) :])

    @property
    def roles(self) -> dict[Atom, str]:
        """Each kernel atom's role: `"in"`, `"out"` or `"stack"`."""
        return {
            **dict.fromkeys(atoms_of(self.read.x_axes), "in"),
            **dict.fromkeys(atoms_of(self.read.y_axes), "out"),
            **dict.fromkeys(self.copies, "stack"),
        }

    @property
    def layout(self) -> Layout:
        return axes_lib.layout(self.roles.items())

    @property
    def part(self) -> int:
        """The number of the leaf's part that a product reads, in memory order."""
        index = 0
        for atom, entry in self.view.picks or ():
            index = index * atom.size + entry
        return index


def by_part(uses: Sequence[Use]) -> list[list[Use]]:
    """Group uses by the part of the leaf that they read. Usually there is a single group, for the whole leaf."""
    parts: dict[tuple[int, ...], list[Use]] = {}
    for use in uses:
        parts.setdefault(use.view.start, []).append(use)
    return list(parts.values())


# -- the results of the walk -------------------------------------------------------------------------------------------


class Inexact(NamedTuple):
    """Why a leaf has no exact rows.

    Attributes:
      operation: describes the operation that reads the leaf.
      reason: why there are no exact rows.
      layout: the layout of the leaf's matrices, or None if unknown.
    """

    operation: str
    reason: str
    layout: Layout | None = None


@dataclass
class Findings:
    """How the program of a loss uses its parameters.

    Attributes:
      n: the number of examples in the batch, or None if unknown.
      hidden: whether the loss has array arguments, but their examples are unknown.
      uses: maps each op that reads a parameter to its `Use`, in program order.
      inexact: maps each leaf that meets data in a way without exact rows to the reason.
      unmarked: whether a parameter meets the batch on a way to the loss without a marked output.
      beside_others: describes a product that reads batch rows concatenated with other rows. Empty if there is no such
        product.
      apart: the leaves on which the loss also depends without the examples, as in a penalty.
      merged: late uses whose results have met the examples.
      leaked: late uses whose results reach the loss by themselves.
      multipliers: maps each op that produces a scaled view to the number of the operand that is the view.
      merges: maps each op at which common rows meet the examples to the result's axis of examples.
    """

    n: int | None
    hidden: bool
    uses: dict[Op, Use] = field(default_factory=dict)
    inexact: dict[int, Inexact] = field(default_factory=dict)
    unmarked: bool = False
    beside_others: str = ""
    apart: Leaves = NONE
    merged: Ops = frozenset()
    leaked: Ops = frozenset()
    multipliers: dict[Op, int] = field(default_factory=dict)
    merges: dict[Op, int] = field(default_factory=dict)

    def add(self, use: Use) -> Data:
        """Add a use. Return the state of its result."""
        self.uses[use.op] = use
        return Data(Output(use.op, use.read.y_axes))

    def note(
        self, leaf: int, operation: str, reason: str, layout: Layout | None = None
    ) -> None:
        """Note that a leaf has no exact rows. The first reason counts, and the first layout."""
        noted = self.inexact.get(leaf, Inexact(operation, reason))
        if noted.layout is None:
            self.inexact[leaf] = noted._replace(layout=layout)

    def note_use(self, use: Use, reason: str, operation: str = "") -> None:
        """Note that the leaf of a use has no exact rows."""
        kernel = use.read.op in KRONECKER_KINDS and use.view.picks is not None
        layout = use.layout if kernel else None
        self.note(use.leaf, operation or use.op.name, reason, layout)

    def meets(self, state: State, op: Op, reason: str) -> Data:
        """Note that the leaves of `state` meet data in a way without exact rows. Return the state of the result."""
        for leaf in state.leaves:
            earlier = ""
            if isinstance(state, View) and leaf == state.leaf:
                earlier = state.inexact
            self.note(leaf, op.describe(), earlier or reason)
        return Data()

    def without_common_rows(self, state: State) -> State:
        """Return the state without common rows, and note that the kernels that read these rows are inexact."""
        if not isinstance(state, Data) or not state.common:
            return state
        for use in self.uses.values():
            if use.op in state.common:
                self.note_use(use, "it reads rows that all examples share")
        return replace(state, common=Ops())
