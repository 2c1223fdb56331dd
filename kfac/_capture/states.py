"""What is known of an array in the program of a loss, and of an operation that reads a parameter.

Every array on the way has one of these states:

- `Data`: depends on the arguments. `active` once a parameter took part, `output` while it is still the unbranched
  result of a read, which is what a bias or shift is joined to.
- `View`: one parameter leaf seen through casts, reshapes, transposes, slices and scans, axis by axis (`axes.py`).
  `scaled` after an elementwise product with something that has no example axis, as in
  `(x - mean) * (rsqrt(var) * scale)`.
- `Derived`: computed from parameters in any other way. Harmless as long as no product reads it: a weight penalty.
- a parameter that the user skipped counts as `Data`.

A `Use` is an operation where a parameter meets data, and where that is.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kfac._capture import axes as axes_lib
from kfac._capture.axes import Atom, Axes
from kfac._capture.primitives import Read
from kfac._capture.trace import Path
from kfac._layers import Layout, UnsupportedLayerError

KERNEL_OPS = frozenset({"dense", "conv"})


@dataclasses.dataclass(frozen=True)
class Output:
    """The result of use number `use`; axes that are not the parameter's are foreign."""

    use: int
    axes: Axes
    multiplied: bool = False  # by data, since


@dataclasses.dataclass(frozen=True)
class Data:
    active: bool = False
    output: Output | None = None
    made_of: frozenset[int] = frozenset()  # leaves that it still consists of: looked-up rows, updated weights
    skipped: bool = False  # a parameter that the user skipped
    fixed: bool = False  # does not depend on the array arguments of the loss, so it holds no examples
    shared: frozenset[int] = (
        frozenset()
    )  # leaves whose products with constants it is made of: the same for all examples
    value: Callable[[], Any] | None = dataclasses.field(
        default=None, compare=False
    )  # of constants, computed when asked


@dataclasses.dataclass(frozen=True)
class View:
    leaf: int
    axes: Axes
    start: tuple[int, ...]  # the first entry of each leaf axis that it holds: not zeros where it is a slice
    stack: tuple[axes_lib.Axis, ...] = ()  # for each enclosing scan, the atoms it iterates over (none: read each time)
    scaled: bool = False
    uniform: bool = True  # scaled, if at all, by numbers only
    mixed: bool = False  # scaled by an array of data, so that it might be an activation of a single example
    masked: bool = False  # scaled by zeros and ones alone, which are constants
    parts: tuple[tuple[int, View], ...] = ()  # what it is put together of (`parts.py`), and where each part begins
    along: int = 0  # the axis along which that is


@dataclasses.dataclass(frozen=True)
class Derived:
    leaves: frozenset[int]
    how: str
    repeated: bool = False  # broadcast over examples or positions: an activation rather than a parameter
    mixed: bool = False
    product: str = ""  # the matrix product or convolution on the way: what it becomes must not meet data


State = Data | View | Derived


class Within(NamedTuple):
    """Of a read of a part of a leaf: the matrices of the whole leaf, and which inputs and outputs of these it has."""

    layout: Layout
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Use:
    """One read of a parameter leaf, and where it is.

    Attributes:
      read: what the operation does.
      leaf: the parameter leaf.
      view: in which form it is read.
      path: the operation.
      scans: of the enclosing scans, their places in `path` and lengths.
      picks: where a product reads one of several equal parts of the leaf, which (`axes.picks`).
      joined: the use whose result this one (a bias or shift) is added to, with the atoms of both leaves in pairs.
      directly: whether nothing stands between that result and the addition but a change of form.
      late: whether it reads rows that all examples share. Its result gets an axis of examples, which come in later.
      within: where its part is in the leaf, if the leaf is read in parts of several sizes.
    """

    read: Read
    leaf: int
    view: View
    path: Path
    scans: tuple[tuple[int, int], ...] = ()
    picks: tuple[tuple[Atom, int], ...] | None = ()
    joined: tuple[int, tuple[tuple[Atom, Atom], ...]] | None = None
    directly: bool = False
    late: bool = False
    within: Within | None = None

    @property
    def picked(self) -> tuple[Atom, ...]:
        return tuple(atom for atom, _ in self.picks or ())

    @property
    def scanned(self) -> tuple[Atom, ...]:
        return tuple(atom for axis in self.view.stack for atom in axis)

    @property
    def copies(self) -> tuple[Atom, ...]:
        """Atoms of the leaf that hold independent copies of a kernel."""
        return (*self.picked, *self.scanned, *self.read.batched)

    @property
    def iterated(self) -> tuple[int, ...]:
        """Lengths of the scans that iterate over the leaf."""
        return tuple(length for (_, length), atoms in zip(self.scans, self.view.stack, strict=True) if atoms)

    @property
    def times(self) -> int:
        """How often the parameter is read: once in each iteration that shares it."""
        return math.prod(length for (_, length), atoms in zip(self.scans, self.view.stack, strict=True) if not atoms)

    @property
    def rows(self) -> int:
        """Rows this use contributes: positions of all examples, over all iterations that share the parameter."""
        return self.times * math.prod(atom.size for axis in self.read.y_axes for atom in axis if not atom.of_leaf)

    def for_all(self, n: int) -> Use:
        """The same with `n` examples on a first axis, for rows that all of them share."""
        if not self.late:
            return self
        read, axis = self.read, axes_lib.foreign(n)
        read = dataclasses.replace(
            read,
            x_axes=(axis, *read.x_axes),
            y_axes=(axis, *read.y_axes),
            rows=(*((0, 0) for _ in axis), *((y + len(axis), x + len(axis)) for y, x in read.rows)),
            shape=(n, *read.shape),
            leading=n,
        )
        return dataclasses.replace(self, read=read, late=False)

    @property
    def roles(self) -> dict[Atom, str]:
        """The role of each atom of a kernel."""
        roles = {atom: "in" for atom in axes_lib.atoms_of(self.read.x_axes)}
        roles |= {atom: "out" for atom in axes_lib.atoms_of(self.read.y_axes)}
        return roles | {atom: "stack" for atom in self.copies}

    @property
    def layout(self) -> Layout:
        return self.within.layout if self.within else axes_lib.layout(self.roles.items())

    @property
    def part(self) -> int:
        """Which part of its leaf a product reads, in memory order."""
        index = 0
        for atom, entry in self.picks or ():
            index = index * atom.size + entry
        return index


def by_part(uses: Sequence[Use]) -> list[list[Use]]:
    """The uses of each part that a leaf is read in; of the whole of it, as a rule."""
    parts: dict[Any, list[Use]] = collections.defaultdict(list)
    for use in uses:
        parts[None if use.within else use.view.start].append(use)
    return list(parts.values())


def is_active(state: State) -> bool:
    return state.active if isinstance(state, Data) else True


def is_repeated(state: State) -> bool:
    if isinstance(state, View):
        return axes_lib.is_broadcast(state.axes)
    return isinstance(state, Derived) and state.repeated


def leaves_of(state: State) -> frozenset[int]:
    if isinstance(state, View) and state.parts:
        return frozenset().union(*(leaves_of(part) for _, part in state.parts))
    if isinstance(state, View):
        return frozenset({state.leaf})
    return state.leaves if isinstance(state, Derived) else state.made_of


NOT_WITH_EXAMPLES = (
    "the other operand of the product holds no examples (it is a constant, a skipped parameter or another parameter), "
    "so the result is one more array of parameters. Examples that loss_fn closes over must become arguments of it"
)


def unsupported(parameters: str | Sequence[str], operation: str, reason: str) -> UnsupportedLayerError:
    names = [parameters] if isinstance(parameters, str) else list(parameters)
    patterns = ", ".join(repr(f"^{re.escape(name)}$") for name in names)
    which = f"parameter {names[0]!r} is" if len(names) == 1 else f"parameters {', '.join(map(repr, names))} are"
    return UnsupportedLayerError(
        f"{which} read by {operation} in a way that has no exact Kronecker factors: {reason}. To train without "
        f"preconditioning, pass skip=({patterns},) to find_layers; or change how the model uses it."
    )
