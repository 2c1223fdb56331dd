"""Make layers from the uses of their leaves, and bound the size of their factors."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from kfac._capture import axes as axes_lib
from kfac._capture.find_reads import Reads
from kfac._capture.states import Use, by_part
from kfac._capture.trace import Trace
from kfac._layers import MAX_DIM, VOCABULARY, Layer
from kfac._leaves import Layout
from kfac._statistics.convolution import Convolution

# The uses of each leaf, by the leaf's position.
Uses = dict[int, list[Use]]


def has_example_gradients(uses: Sequence[Use], n: int | None) -> bool:
    """Return whether all uses have a row for each example, in the same order."""
    return all(use.examples(n) is not None for use in uses)


def main_use(uses: Sequence[Use]) -> Use:
    """Return the use that decides which axes of a kernel are inputs. Other uses may read the kernel's transpose."""
    return next((use for use in uses if use.read.op == "embedding"), uses[0])


class LayerMaker(NamedTuple):
    """Makes layers from the uses of their leaves. A layer is named after its first leaf.

    Attributes:
      traced: the traced loss.
      reads: how the program uses its parameters.
      uses: the uses of each leaf with exact rows.
      order: the position of each leaf's first use in the program, relative to the other leaves.
      n: the number of examples, or None if unknown.
    """

    traced: Trace
    reads: Reads
    uses: Uses
    order: dict[int, int]
    n: int | None

    def kronecker(self, leaves: Sequence[int], reduced: bool) -> Layer:
        """Make the layer of a kernel and its bias, if any. With `reduced`, the layer uses the "reduce" setting.

        Raises:
          ValueError: `reduced` is set, but sums over the positions of each example are not known.
        """
        uses = self.uses[leaves[0]]
        main = main_use(uses)
        lookup = main.read.op == "embedding"
        ragged = any(use.read.groups is not None for use in uses)
        turned = any(use.layout != main.layout for use in uses)
        ordered = has_example_gradients(uses, self.traced.batch.num_examples)
        reduced = reduced and not lookup
        if reduced and (ragged or turned or not ordered):
            read_by = " and ".join(sorted({use.op.name for use in uses}))
            raise ValueError(
                "rules: 'reduce' needs sums over the positions of each example, which are not known for "
                f"{self.traced.names[leaves[0]]!r}, read by {read_by} without an order of the examples, or as its "
                "transpose as well: leave it out"
            )
        layouts = [main.layout, *map(self._bias_layout, leaves[1:])]
        parts = by_part(uses)
        num_parts = math.prod(atom.size for atom in uses[0].picked)
        notes = []
        if lookup:
            notes.append("A holds the counts of the rows looked up")
        if turned:
            notes.append("read as its transpose as well")
        if len(parts) < num_parts:
            notes.append(f"{len(parts)} of its {num_parts} parts read")
        num_uses = _count_uses(parts)
        rows = {sum(use.rows for use in part) for part in parts}
        geometries = [use.read.geometry for use in uses]
        overlaps = [x.overlap for x in geometries if isinstance(x, Convolution)]
        return self._layer(
            leaves,
            main.read.op,
            layouts,
            "; ".join(notes),
            uses=num_uses,
            diagonal=("A",) if lookup else (),
            weight_sharing="reduce" if reduced else "expand",
            positions=None if ragged or len(rows) > 1 else self._positions(rows.pop()),
            has_example_gradients=num_uses == 1 and not ragged and ordered,
            overlap=max(overlaps, default=1.0),
        )

    def elementwise(self, leaves: Sequence[int]) -> Layer:
        """Make the layer of a scale and its shift, if any, or of another vector."""
        uses = self.uses[leaves[0]]
        kind = "diagonal"
        copied = any(use.read.op == "copy" for use in uses)
        read_by = "copied for each example" if copied else "read by an elementwise sum"
        if any(use.read.op == "mul" for use in uses):
            kind = "unitwise"
            read_by = "elementwise scale"
            if any(use.view.uneven for use in uses):
                read_by = "elementwise function"
            if len(leaves) > 1:
                read_by += " and shift"
        parts = by_part(uses)
        rows = max(sum(use.rows for use in part) for part in parts)
        positions = self._positions(rows)
        return self._layer(
            leaves,
            kind,
            [self._vector(leaves[0])] * len(leaves),
            f"{read_by}: per-example gradients",
            positions=positions,
            # A vector that is copied to several positions, such as a mask token, moves them all in the same direction.
            overlap=1 / positions if copied and positions else 1.0,
            uses=_count_uses(parts),
        )

    def gradient(self, leaf: int, chosen: bool) -> Layer:
        """Make a layer with the gradient's own factors. With `chosen`, the user has chosen them.

        The leaf becomes the matrices that a product reads, if they are known. Otherwise, it becomes a matrix that is as
        square as possible. A vector gets a diagonal.
        """
        sizes = [size for size in self.traced.shapes[leaf] if size > 1]
        inexact = self.reads.inexact.get(leaf)
        layout = None
        note = "read without examples"
        if inexact:
            layout = inexact.layout
            note = f"{inexact.operation}: {inexact.reason}"
        if not layout and len(sizes) > 1:
            cuts = []
            for k in range(1, len(sizes)):
                cuts.append((math.prod(sizes[:k]), math.prod(sizes[k:])))
            squarest = min(cuts, key=lambda cut: (sum(cut), cut))
            layout = Layout(("in", "out"), squarest)
        if chosen:
            note = "chosen by the user"
        return self._layer(
            [leaf], "gradient-factors", [layout or self._vector(leaf)], note
        )

    def _layer(
        self,
        leaves: Sequence[int],
        kind: str,
        layouts: Sequence[Layout],
        note: str,
        **more: Any,
    ) -> Layer:
        """Make a layer for `leaves` with the dimensions of `layouts`."""
        names = tuple(self.traced.names[leaf] for leaf in leaves)
        kernel = layouts[0]
        return Layer(
            names[0],
            kind,
            names,
            tuple(self.traced.shapes[leaf] for leaf in leaves),
            tuple(layouts),
            d_out=kernel.size("out"),
            d_in=sum(layout.size("in") for layout in layouts),
            copies=kernel.size("stack"),
            stacked="stack" in kernel.roles,
            note=note,
            order=min(self.order.get(leaf, 0) for leaf in leaves),
            **more,
        )

    def _vector(self, leaf: int) -> Layout:
        return Layout(("out",), (math.prod(self.traced.shapes[leaf]),))

    def _bias_layout(self, bias: int) -> Layout:
        """Return the layout of a bias, whose atoms have the roles of the corresponding atoms in its kernel."""
        joined = self.uses[bias][0].joined
        assert joined is not None
        op, corresponding = joined
        pairs = []
        for atom, part in corresponding:
            for whole, role in self.reads.uses[op].roles.items():
                if axes_lib.is_part(part, whole):
                    pairs.append((atom, role))
        return axes_lib.layout(pairs)

    def _positions(self, rows: int) -> int | None:
        return rows // self.n if self.n and rows % self.n == 0 else None


def _count_uses(parts: Sequence[Sequence[Use]]) -> int:
    """Return how often each example uses a leaf's part, for the part with most uses."""
    return max(sum(use.times(examples=True) for use in part) for part in parts)


# If the longer side of a dense kernel has at least `LONG` rows, it is cut into blocks as long as the shorter side, but
# into at most `PIECES` blocks. A side with fewer rows costs little. A kernel with statistics from several positions of
# each example is cut from `LONG_SHARED` rows on: such statistics have more rows, and whole kernels then reach a lower
# loss (docs/evidence.md). A kernel that would need more than `PIECES` blocks stays whole if its shorter side has fewer
# than `HEAD` rows.
LONG, LONG_SHARED, PIECES, HEAD = 256, 1024, 8, 32
# The most rows that a piece may have along a diagonal factor. Every piece has its own copy of the other factor, so
# smaller pieces would take more memory.
ROWS = 4096


def bounded(layer: Layer, max_factor_dim: int | None) -> Layer:
    """Return a layer whose oversized factors are replaced by diagonal blocks or by their diagonals."""
    if not layer.kronecker:
        return layer
    limit = max_factor_dim or MAX_DIM
    sizes = {"A": layer.d_in, "G": layer.d_out}
    counts = {"A": 1, "G": 1}
    diagonal = list(layer.diagonal)
    reasons = []
    for name, size in sizes.items():
        if size > limit and name not in layer.diagonal:
            reasons.append(f"{name} has more than max_factor_dim={limit} rows")
            counts[name] = math.ceil(size / limit)
            if size >= VOCABULARY:
                diagonal.append(name)
    if max_factor_dim is None and layer.kind == "dense" and not diagonal:
        short, long = sorted(sizes, key=lambda name: sizes[name])
        times = round(sizes[long] / sizes[short])
        pieces = times
        if times > PIECES:
            pieces = PIECES if sizes[short] >= HEAD else 1
        single = layer.positions == 1 or layer.weight_sharing == "reduce"
        longest = LONG if single else LONG_SHARED
        if sizes[long] >= longest and counts[long] < pieces:
            counts[long] = pieces
            reasons.append(
                f"{long} has {times} times the rows of {short}; max_factor_dim={MAX_DIM} keeps it whole"
            )
    # A diagonal factor's rows are independent. If the number of pieces is a power of two, devices can share them.
    for name in diagonal:
        pieces = math.ceil(sizes[name] / ROWS)
        counts[name] = 2 ** math.ceil(math.log2(pieces))
    notes = filter(None, [layer.note, " and ".join(reasons)])
    return dataclasses.replace(
        layer,
        diagonal=tuple(diagonal),
        num_blocks=(counts["A"], counts["G"]),
        note="; ".join(notes),
    )
