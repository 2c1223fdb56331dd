"""Record how the program of a loss uses its parameters."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from kfac._capture.program import Op
from kfac._capture.states import (
    NONE,
    Data,
    Leaves,
    Ops,
    Output,
    State,
    Use,
    View,
)
from kfac._capture.taps import TapPlan
from kfac._layers import KRONECKER_KINDS
from kfac._leaves import Layout


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
      plan: the parts of a replay's plan that do not depend on taps. `multipliers` maps each op that produces a scaled
        view to the operand that is the view. `merges` maps each op at which common rows meet the examples to the axis
        of the examples.
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
    plan: TapPlan = field(default_factory=TapPlan)

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
