"""What is known of a variable in the jaxpr of a loss, and of an operation that reads a parameter.

The walk in `analysis.py` gives every variable one of these states:

- `Data`: depends on the arguments. `active` once a parameter took part, `output` while it is still the unbranched
  result of a read, which is what a bias or shift is joined to.
- `View`: one parameter leaf seen through casts, reshapes, transposes, slices and scans, axis by axis (`axes.py`).
  `scaled` after an elementwise product with something that has no example axis, as in
  `(x - mean) * (rsqrt(var) * scale)`.
- `Derived`: computed from parameters in any other way. Harmless as long as no product reads it: a weight penalty.
- a parameter that the user skipped counts as `Data`.

A `Read` is an equation where a parameter meets data in a way whose per-example gradient is known: a matrix product,
a convolution, a lookup, or an elementwise sum or product that repeats the parameter over examples.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

from kfac._capture import axes as axes_lib
from kfac._capture.axes import Atom, Axes
from kfac._capture.trace import Path
from kfac._layers import Layout, UnsupportedLayerError


@dataclasses.dataclass(frozen=True)
class Output:
    """The result of read number `read`; axes that are not the parameter's are foreign."""

    read: int
    axes: Axes


@dataclasses.dataclass(frozen=True)
class Data:
    active: bool = False
    output: Output | None = None
    made_of: frozenset[int] = frozenset()  # leaves that it still consists of: looked-up rows, updated weights
    skipped: bool = False  # a parameter that the user skipped
    fixed: bool = False  # does not depend on the array arguments of the loss, so it holds no examples


@dataclasses.dataclass(frozen=True)
class View:
    leaf: int
    axes: Axes
    start: tuple[int, ...]  # the first entry of each leaf axis that it holds: not zeros where it is a slice
    stack: tuple[axes_lib.Axis, ...] = ()  # for each enclosing scan, the atoms it iterates over (none: read each time)
    scaled: bool = False
    uniform: bool = True  # scaled, if at all, by numbers only
    mixed: bool = False  # scaled by an array of data, so that it might be an activation of a single example


@dataclasses.dataclass(frozen=True)
class Derived:
    leaves: frozenset[int]
    how: str
    repeated: bool = False  # broadcast over examples or positions: an activation rather than a parameter
    mixed: bool = False
    product: str = ""  # the matrix product or convolution on the way: what it becomes must not meet data


State = Data | View | Derived


@dataclasses.dataclass(frozen=True)
class Read:
    """One equation that reads a parameter leaf.

    Attributes:
      path: which equation.
      op: `"dense"`, `"conv"`, `"embedding"`, `"mul"` or `"add"`.
      operand: which operand of the equation the parameter is.
      x_axes: axes of the other operand in terms of the leaf (dense), of its patches (conv) or of the counts of rows
        (embedding).
      y_axes: axes of the result.
      leading: length of the first axis that is not the parameter's; None without one.
      shape: shape of the result.
      batched: leaf atoms that are a batch axis of the product: independent copies.
      sign: -1 where the parameter is subtracted.
      joined: the read whose result this one (a bias or shift) is added to, with the atoms of both leaves in pairs.
      scans: lengths of the enclosing scans.
      picks: where a product reads one of several equal parts of the leaf, which (`axes.picks`).
    """

    path: Path
    op: str
    leaf: int
    view: View
    operand: int
    x_axes: Axes
    y_axes: Axes
    leading: int | None
    shape: tuple[int, ...]
    batched: tuple[Atom, ...] = ()
    sign: int = 1
    joined: tuple[int, tuple[tuple[Atom, Atom], ...]] | None = None
    scans: tuple[int, ...] = ()
    picks: tuple[tuple[Atom, int], ...] | None = ()

    @property
    def picked(self) -> tuple[Atom, ...]:
        return tuple(atom for atom, _ in self.picks or ())

    @property
    def copies(self) -> tuple[Atom, ...]:
        """Atoms of the leaf that hold independent copies of a kernel."""
        return (*self.picked, *self.scanned, *self.batched)

    @property
    def scanned(self) -> tuple[Atom, ...]:
        return tuple(atom for axis in self.view.stack for atom in axis)

    @property
    def uses(self) -> int:
        """How often the parameter is read: once in each iteration that shares it."""
        return math.prod(length for length, atoms in zip(self.scans, self.view.stack, strict=True) if not atoms)

    @property
    def rows(self) -> int:
        """Rows this read contributes: positions of all examples, over all iterations that share the parameter."""
        return self.uses * math.prod(atom.size for axis in self.y_axes for atom in axis if not atom.of_leaf)


def is_active(state: State) -> bool:
    return state.active if isinstance(state, Data) else True


def is_repeated(state: State) -> bool:
    return (
        axes_lib.is_broadcast(state.axes) if isinstance(state, View) else isinstance(state, Derived) and state.repeated
    )


def leaves_of(state: State) -> frozenset[int]:
    if isinstance(state, View):
        return frozenset({state.leaf})
    return state.leaves if isinstance(state, Derived) else frozenset()


def kernel_roles(read: Read) -> dict[Atom, str]:
    roles = {atom: "in" for atom in axes_lib.atoms_of(read.x_axes)}
    roles |= {atom: "out" for atom in axes_lib.atoms_of(read.y_axes)}
    return roles | {atom: "stack" for atom in read.copies}


def part_index(read: Read) -> int:
    """Which part of its leaf a product reads, in memory order."""
    index = 0
    for atom, entry in read.picks or ():
        index = index * atom.size + entry
    return index


def by_part(reads: Sequence[Read]) -> list[list[Read]]:
    """The reads of each part that a leaf is read in; of the whole of it, as a rule."""
    parts: dict[Any, list[Read]] = collections.defaultdict(list)
    for read in reads:
        parts[read.view.start].append(read)
    return list(parts.values())


def most_uses(reads: Sequence[Read]) -> int:
    return max((sum(read.uses for read in part) for part in by_part(reads)), default=0)


def kernel_layout(read: Read) -> Layout:
    return axes_lib.layout(kernel_roles(read).items())


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
