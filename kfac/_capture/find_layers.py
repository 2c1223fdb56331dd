"""Group the parameter reads of a loss into layers, each with a kind of block."""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax

from kfac._capture import axes as axes_lib
from kfac._capture.find_reads import Inexact, Reads
from kfac._capture.outputs import Marks, find_marks
from kfac._capture.states import Use, by_part
from kfac._capture.trace import Argnums, Trace, trace
from kfac._checks import check, check_function, check_given
from kfac._layers import (
    KRONECKER_KINDS,
    MAX_DIM,
    UNREACHED,
    VOCABULARY,
    Layer,
    Layers,
    Layout,
    UnsupportedLayerError,
    find_splits,
)
from kfac._statistics.convolution import Convolution
from kfac._varying import on_mesh


@on_mesh
def find_layers(
    loss_fn: Callable[..., Any],
    params: Any,
    *args: Any,
    has_aux: bool = False,
    skip: Sequence[str] = (),
    max_dim: int | None = None,
    reduce: Sequence[str] = (),
    gradient: Sequence[str] = (),
    batch_argnums: Argnums = None,
    strict: bool = False,
    **kwargs: Any,
) -> Layers:
    """Find how each parameter leaf of `loss_fn` will be preconditioned.

    Traces `loss_fn(params, *args, **kwargs)` without computing anything. Follows every parameter leaf through shape and
    dtype operations to the operations that read it:

    - The kernel of a matrix product, convolution or lookup gets a Kronecker block, together with its bias.
    - A normalisation scale gets a unit-wise block, together with its shift.
    - Any other leaf that is added gets a diagonal block.
    - A leaf that meets data in a way without exact per-example rows gets the gradient's own factors, formed from the
      averaged gradient. The table of layers says why.

    No leaf is left out silently. Reads that carry no gradient to the loss do not count: `stop_gradient`, metrics in
    `aux`, unused outputs.

    The loss is traced a second time, with twice as many examples. The axes that are longer in the second trace hold the
    examples; no other axes do. If the second trace fails, for example because a batch size is written into the loss,
    layers are found all the same. In this case, `value_and_grad` needs `num_examples=` or a marked output, and vectors
    get the gradient's own diagonal.

    Args:
      loss_fn: the mean loss over the examples of a batch, a real scalar; with `has_aux`, a pair `(loss, aux)`.
      params: the parameters, a pytree of real arrays or `jax.ShapeDtypeStruct`.
      *args: further arguments: pytrees of arrays or `jax.ShapeDtypeStruct`. Other leaves are passed on unchanged.
      has_aux: whether `loss_fn` returns a pair.
      skip: regular expressions. A leaf whose path (joined by `/`) matches gets no curvature block, and its gradient
        passes through the preconditioner unchanged.
      max_dim: the maximum number of rows of a Kronecker factor. A larger factor is kept as diagonal blocks of at most
        `max_dim` neighbouring rows. The blocks are as few and as equal as possible, and the table mentions them. If
        such a factor has 30,000 rows or more, as a vocabulary has, only its diagonal is kept. In both cases the kernel
        is cut into pieces, each with a block of its own, as in Distributed Shampoo (Shi et al. 2023). Along a diagonal
        factor, the number of pieces is a power of two, and each piece has at most 4,096 rows. Inverting a factor with
        `d` rows takes `O(d^3)` work and `O(d^2)` memory. None: 8,192; in addition, a dense kernel's longer side is cut
        if it has at least 256 rows. The blocks are then about as long as the shorter side, and there are at most 8. A
        kernel that would need more than 8 blocks stays whole if its shorter side has fewer than 32 rows.
      reduce: regular expressions. If the kernel's path matches, a matrix product or convolution uses the "reduce"
        setting of Eschenhagen et al. 2023: inputs are averaged and output gradients summed over an example's positions
        before products are formed. All other layers, and all lookups, use the "expand" setting.
      gradient: regular expressions. A leaf whose path matches gets the gradient's own factors (Gupta et al. 2018; Vyas
        et al. 2024). No statistics are captured for this leaf.
      batch_argnums: the arguments that hold the examples on the first axis of their leaves: positions, or names of
        keyword arguments. Positions count from `params`, which is 0. Negative positions count from the end. The batch
        consists of the leaves with a common leading length that can be doubled in the second trace. Other leaves of
        these arguments are shared by all examples, and the table names them. None: the first argument after `params`.
        If this argument cannot be doubled, as few arguments as possible that share a leading length.
      strict: whether to raise an error if a leaf meets data in a way without exact rows.
      **kwargs: keyword arguments of `loss_fn`.

    Returns:
      `Layers`: print it to see every parameter.

    Raises:
      UnsupportedLayerError: `strict` is set and leaves have no exact rows. The message names all these leaves, with
        reasons and a way out.
      ValueError: a pattern matches no leaf, has no effect on any leaf, or is not a regular expression; `reduce` matches
        a kernel whose sums over an example's positions are unknown; `max_dim` is not a positive int; `batch_argnums`
        names no argument; `params` has no leaves, or two leaves with the same path; or an output is marked inside a
        construct that cannot be followed.
      TypeError: `loss_fn` does not return a real scalar, or a parameter leaf is not a real array.
    """
    check_function(loss_fn)
    check(has_aux=has_aux, skip=skip, reduce=reduce, gradient=gradient, strict=strict)
    check_given(max_dim=max_dim, batch_argnums=batch_argnums)
    traced = trace(loss_fn, has_aux, params, args, kwargs, batch_argnums)
    options = Layers(
        (), tuple(traced.names), tuple(skip), max_dim, tuple(reduce), tuple(gradient), jax.tree.structure(params),
        splits=find_splits(params),
    )  # fmt: skip
    analysis = layers_of(traced, options, find_marks(traced))
    if strict and analysis.reads.inexact:
        raise _unsupported(traced.names, analysis.reads.inexact)
    return analysis.layers


def _unsupported(
    names: Sequence[str], inexact: dict[int, Inexact]
) -> UnsupportedLayerError:
    lines = [
        f"{names[leaf]!r} is read by {read.operation}: {read.reason}"
        for leaf, read in sorted(inexact.items())
    ]
    patterns = ", ".join(
        repr(f"^{re.escape(names[leaf])}$") for leaf in sorted(inexact)
    )
    return UnsupportedLayerError(
        f"{len(lines)} parameter(s) have no exact rows for each example:\n  "
        + "\n  ".join(lines)
        + "\nWithout "
        f"strict=True they get the gradient's own factors; skip=({patterns},) leaves their gradients as they are."
    )


class Analysis(NamedTuple):
    """The layers of a loss, and how its program uses the layers' parameters.

    Attributes:
      layers: the layers.
      reads: how the program uses its parameters.
      uses: maps each layer's name to the uses of each leaf, in the order of `Layer.params`.
      num_examples: the number of examples that the loss averages over, or None if the number is not clear.
      unclear: why the number is not clear, and how to make it clear.
    """

    layers: Layers
    reads: Reads
    uses: dict[str, list[list[Use]]]
    num_examples: int | None
    unclear: str


def layers_of(
    traced: Trace, options: Layers, marks: Marks, num_examples: int | None = None
) -> Analysis:
    """Group the uses of each leaf into layers.

    Args:
      traced: the traced loss.
      options: `Layers` that hold the options of `find_layers`. Their blocks are not used.
      marks: the marked outputs of the loss.
      num_examples: the number of examples, if the user gave it.
    """
    names, shapes, batch = traced.names, traced.shapes, traced.batch
    empty = {leaf for leaf, shape in enumerate(shapes) if 0 in shape}
    skipped = matching("skip", options.skip, names) | empty
    reads = Reads(traced, skipped)
    by_leaf: dict[int, list[Use]] = collections.defaultdict(list)
    for use in reads.uses.values():
        if not use.dropped:
            by_leaf[use.leaf].append(use)
    order = {
        leaf: place for place, leaf in enumerate(by_leaf)
    }  # uses are in program order
    chosen = matching(
        "gradient",
        options.gradient,
        names,
        {*range(len(names))} - skipped,
        "parameter left by skip=",
    )
    products = {
        leaf
        for leaf, uses in by_leaf.items()
        if any(use.read.op in KRONECKER_KINDS for use in uses)
    }

    # Remove leaves without exact rows from `by_leaf`: leaves that the walk has noted, leaves that the user has chosen,
    # and leaves for which `why` gives a reason.
    def leave_inexact(leaves: set[int], why: Callable[[list[Use]], Reason]) -> None:
        for leaf in leaves - reads.inexact.keys():
            if reason := why(by_leaf[leaf]):
                read_by = sorted({use.read.name for use in by_leaf[leaf]})
                reads.inexact[leaf] = Inexact(" and ".join(read_by), *reason)
        for leaf in (reads.inexact.keys() | chosen) & by_leaf.keys():
            del by_leaf[leaf]

    leave_inexact(products, _no_kernel)
    kernels = products & by_leaf.keys()
    companions = _companions(reads, by_leaf, kernels)
    # A bias is a column of its kernel's matrix, so the examples that the bias meets need not be known.
    biases = {companions[leaf] for leaf in kernels & companions.keys()}
    leave_inexact(
        by_leaf.keys() - kernels - biases,
        lambda uses: _no_examples(uses, batch.num_examples),
    )
    # Drop the pairs in which a leaf has just been removed.
    companions = {
        leaf: other
        for leaf, other in companions.items()
        if {leaf, other} <= by_leaf.keys()
    }
    reduced = matching(
        "reduce", options.reduce, names, kernels, "kernel of a product with exact rows"
    )
    kernel_uses = {
        names[leaf]: [use for use in by_leaf[leaf] if not use.late] for leaf in kernels
    }
    n, unclear = marks.num_examples(
        num_examples, batch, kernel_uses, reads.unmarked, reads.beside_others
    )

    # Make a layer for each leaf. A kernel shares its layer with its bias, and a scale with its shift.
    drafts: list[tuple[Layer, list[int]]] = []
    for leaf, name in enumerate(names):
        if leaf in companions.values():
            continue
        leaves = [leaf, companions[leaf]] if leaf in companions else [leaf]
        if leaf in skipped or leaf not in traced.program.outputs[0].leaves | chosen:
            note = (
                "has no elements"
                if leaf in empty
                else "skipped by the user"
                if leaf in skipped
                else UNREACHED
            )
            layer = Layer(name, "skipped", (name,), (shapes[leaf],), note=note)
        elif leaf in kernels:
            layer = _kronecker_layer(leaves, reads, by_leaf, traced, n, leaf in reduced)
        elif leaf in by_leaf:
            layer = _elementwise_layer(leaves, by_leaf, traced, n)
        else:
            layer = _gradient_layer(
                leaf, traced, reads.inexact.get(leaf), leaf in chosen
            )
        drafts.append((layer, leaves))

    # Name a layer after its module if the module has no other layer, otherwise after its first leaf.
    parents = collections.Counter(_parent(layer.params[0]) for layer, _ in drafts)
    blocks, uses_of = [], {}
    for layer, leaves in drafts:
        parent = _parent(layer.params[0])
        # A key in `params` may contain a slash, so a module's path may equal a leaf's path.
        unique = parent and parents[parent] == 1 and parent not in names
        place = min((order[leaf] for leaf in leaves if leaf in order), default=0)
        layer = dataclasses.replace(
            layer, name=parent if unique else layer.params[0], order=place
        )
        layer = _bounded(layer, options.max_dim)
        blocks.append(layer)
        uses_of[layer.name] = [by_leaf.get(leaf, []) for leaf in leaves]
    layers = dataclasses.replace(
        options, blocks=tuple(blocks), paths=tuple(names), num_examples=batch.num_examples or n,
        batch_argnums=batch.argnums, shared=batch.shared, hidden=batch.hidden,
        dtype="float64" if any(v.dtype == "float64" for v in traced.program.inputs[: len(names)]) else "float32",
        unclear=unclear if n is None and any(layer.captured for layer in blocks) else "",
    )  # fmt: skip
    return Analysis(layers, reads, uses_of, n, unclear)


# If the longer side of a dense kernel has at least `LONG` rows, it is cut into blocks as long as the shorter side, but
# into at most `PIECES` blocks. A side with fewer rows costs little. A kernel that would need more than `PIECES` blocks
# stays whole if its shorter side has fewer than `HEAD` rows.
LONG, PIECES, HEAD = 256, 8, 32
# The maximum number of rows of a piece along a diagonal factor. Every piece has its own copy of the other factor, so
# smaller pieces would take more memory.
ROWS = 4096


def _bounded(layer: Layer, max_dim: int | None) -> Layer:
    """Return a layer whose oversized factors are replaced by diagonal blocks or by their diagonals."""
    if not layer.kronecker:
        return layer
    sizes = {
        name: shape[0]
        for name, shape in layer.block_shapes.items()
        if name not in layer.diagonal
    }
    counts = {name: -(-size // (max_dim or MAX_DIM)) for name, size in sizes.items()}
    reasons = [
        f"{name} has more than max_dim={max_dim or MAX_DIM} rows"
        for name in sizes
        if counts[name] > 1
    ]
    words = {name for name in sizes if counts[name] > 1 and sizes[name] >= VOCABULARY}
    if max_dim is None and layer.kind == "dense" and len(sizes) == 2 and not words:
        short, long = sorted(sizes, key=sizes.__getitem__)
        times = round(sizes[long] / sizes[short])
        pieces = times if times <= PIECES else PIECES if sizes[short] >= HEAD else 1
        if sizes[long] >= LONG and counts[long] < pieces:
            counts[long] = pieces
            reasons.append(
                f"{long} has {times} times the rows of {short}; max_dim={MAX_DIM} keeps it whole"
            )
    diagonal = tuple(name for name in "AG" if name in {*layer.diagonal, *words})
    # The rows of a diagonal factor are independent. If the number of pieces is a power of two, devices can share them.
    counts |= {
        name: 1 << (-(-layer.block_shapes[name][0] // ROWS) - 1).bit_length()
        for name in diagonal
    }
    note = "; ".join(filter(None, [layer.note, " and ".join(reasons)]))
    return dataclasses.replace(
        layer,
        diagonal=diagonal,
        cut=(counts.get("A", 1), counts.get("G", 1)),
        note=note,
    )


def matching(
    option: str,
    patterns: Sequence[str],
    names: list[str],
    useful: Collection[int] | None = None,
    what: str = "",
) -> set[int]:
    """Return the indices of the leaves whose names match a pattern.

    Args:
      option: the option that holds the patterns, for messages.
      patterns: regular expressions.
      names: the paths of the leaves.
      useful: the leaves on which the option has an effect. None: all leaves.
      what: a description of the `useful` leaves, for messages.

    Raises:
      ValueError: a pattern is not a regular expression, or matches no leaf or no `useful` leaf.
    """
    found: set[int] = set()
    for pattern in patterns:
        try:
            leaves = {k for k, name in enumerate(names) if re.search(pattern, name)}
        except (re.error, TypeError) as error:
            raise ValueError(
                f"{option}: {pattern!r} is not a regular expression: {error}"
            ) from None
        if not leaves:
            raise ValueError(
                f"{option}: {pattern!r} matches no parameter; the parameters are {', '.join(names)}"
            )
        if useful is not None and leaves.isdisjoint(useful):
            raise ValueError(
                f"{option}: {pattern!r} matches no {what}, so it has no effect"
            )
        found |= leaves
    return found


def _parent(path: str) -> str:
    return path.rpartition("/")[0]


# The reason why a leaf's uses give no exact block, and the layout of the leaf's matrices (None if unknown). The whole
# value is None if the block is exact.
Reason = tuple[str, Layout | None] | None


def _no_examples(uses: list[Use], n: int | None) -> Reason:
    """Return the reason why a vector's uses give no exact block, or None if the block is exact."""
    if _told_apart(uses, n):
        return None
    known = "the examples it meets are not told apart, or in another order"
    return ("which examples it meets is not known" if n is None else known), None


def _no_kernel(uses: list[Use]) -> Reason:
    """Return the reason why a kernel's uses give no exact block, or None if the block is exact."""
    products = [use for use in uses if use.read.op in KRONECKER_KINDS]
    main = main_use(products)
    if len(products) < len(uses):
        return "besides a product, an elementwise operation reads it", main.layout
    if (
        len(
            {
                use.read.op == "embedding"
                for use in products
                if use.layout == main.layout
            }
        )
        > 1
    ):
        return (
            "of inputs that are looked up there are only counts, so the two are no one block",
            main.layout,
        )
    if len({use.picked for use in products}) > 1:
        return "the operations disagree on the parts that it is cut into", None
    others = [use for use in products if use.layout != main.layout]
    if any(
        use.read.op == "embedding" or not _is_transposed(use, main) for use in others
    ):
        return "the operations disagree on which of its axes are inputs", None
    if len({tuple(filter(None, use.view.stack)) for use in products}) > 1:
        return "the operations disagree on how it is stacked", None
    return None


def _told_apart(uses: list[Use], n: int | None) -> bool:
    """Return whether all uses have a row for each example, in the same order."""
    return all(use.examples(n) is not None for use in uses)


def main_use(uses: Sequence[Use]) -> Use:
    """Return the use that decides which axes of a kernel are inputs. Other uses may read the kernel's transpose."""
    return next((use for use in uses if use.read.op == "embedding"), uses[0])


def _is_transposed(a: Use, b: Use) -> bool:
    swapped = {"in": "out", "out": "in", "stack": "stack"}
    return a.layout == axes_lib.layout(
        (atom, swapped[role]) for atom, role in b.roles.items()
    )


def _companions(
    reads: Reads, by_leaf: dict[int, list[Use]], kernels: set[int]
) -> dict[int, int]:
    """Return the bias of each kernel and the shift of each scale.

    Such a leaf is only added to outputs of this kernel or scale, at most once to each. A shift is added to every output
    of its scale.
    """
    companions: dict[int, int] = {}
    for leaf, uses in by_leaf.items():
        if leaf in kernels or not all(u.read.op == "add" and u.joined for u in uses):
            continue
        joined = [use.joined[0] for use in uses if use.joined]
        partners = {reads.uses[op].leaf for op in joined}
        partner = partners.pop()
        if (
            partners
            or partner in companions
            or partner not in by_leaf
            or len(set(joined)) < len(joined)
        ):
            continue
        if partner in kernels:
            # Some uses of the kernel may lack the bias. A subtracted bias does not correspond to a homogeneous 1. The
            # same holds for a bias of a kernel that is also read as its transpose.
            fits = (
                all(use.read.sign == 1 for use in uses)
                and len({use.layout for use in by_leaf[partner]}) == 1
            )
        else:
            fits = len(joined) == len(by_leaf[partner]) and all(
                reads.uses[op].read.op == "mul" for op in joined
            )
        if fits:
            companions[partner] = leaf
    return companions


def _layer(
    traced: Trace,
    leaves: Sequence[int],
    kind: str,
    layouts: Sequence[Layout],
    note: str,
    **more: Any,
) -> Layer:
    """Make a layer for `leaves`, named after the first leaf, with the dimensions of `layouts`."""
    names, kernel = tuple(traced.names[leaf] for leaf in leaves), layouts[0]
    return Layer(
        names[0], kind, names, tuple(traced.shapes[leaf] for leaf in leaves), tuple(layouts), note=note,
        d_out=kernel.size("out"), d_in=sum(layout.size("in") for layout in layouts),
        copies=kernel.size("stack"), stacked="stack" in kernel.roles, **more,
    )  # fmt: skip


def _kronecker_layer(
    leaves: list[int],
    reads: Reads,
    by_leaf: dict[int, list[Use]],
    traced: Trace,
    n: int | None,
    reduced: bool,
) -> Layer:
    """Make the layer of a kernel and its bias, if any. With `reduced`, the layer uses the "reduce" setting.

    Raises:
      ValueError: `reduced` is set, but sums over the positions of each example are not known.
    """
    uses, batch = by_leaf[leaves[0]], traced.batch.num_examples
    main = main_use(uses)
    kernel = main.layout
    layouts = [kernel]
    for bias in leaves[1:]:
        joined = by_leaf[bias][0].joined
        assert joined is not None
        roles = reads.uses[joined[0]].roles.items()
        pairs = [
            (atom, role)
            for atom, part in joined[1]
            for whole, role in roles
            if axes_lib.is_part(part, whole)
        ]
        layouts.append(axes_lib.layout(pairs))
    by_parts, lookup, ragged = (
        by_part(uses),
        main.read.op == "embedding",
        any(u.read.groups is not None for u in uses),
    )
    rows = {sum(use.for_all(batch or n or 1).rows for use in part) for part in by_parts}
    ordered = _told_apart(uses, batch)
    parts = math.prod(atom.size for atom in uses[0].picked)
    summed = reduced and not lookup
    if summed and (ragged or len({use.layout for use in uses}) > 1 or not ordered):
        raise ValueError(
            f"reduce: sums over the positions of each example are not known for {traced.names[leaves[0]]!r}, read by "
            f"{' and '.join(sorted({use.read.name for use in uses}))} without an order of the examples, or as its "
            "transpose as well: leave it out"
        )
    notes = ["A holds the counts of the rows looked up"] * lookup
    notes += ["read as its transpose as well"] * any(
        use.layout != kernel for use in uses
    )
    notes += [f"{len(by_parts)} of its {parts} parts read"] * (len(by_parts) < parts)
    count = max(sum(use.reads for use in part) for part in by_parts)
    convolutions = [
        x for use in uses if isinstance(x := use.read.geometry, Convolution)
    ]
    return _layer(
        traced, leaves, main.read.op, layouts, "; ".join(notes), uses=count,
        diagonal=("A",) if lookup else (), weight_sharing="reduce" if summed else "expand",
        positions=_positions(rows.pop(), batch or n) if len(rows) == 1 and not ragged else None,
        told_apart=count == 1 and not ragged and ordered,
        overlap=max((x.overlap for x in convolutions), default=1.0),
    )  # fmt: skip


def _positions(rows: int, n: int | None) -> int | None:
    return rows // n if n and rows % n == 0 else None


def _elementwise_layer(leaves, by_leaf, traced: Trace, n: int | None) -> Layer:
    layout, parts = (
        Layout(("out",), (math.prod(traced.shapes[leaves[0]]),)),
        by_part(by_leaf[leaves[0]]),
    )
    kind, read_by = "diagonal", "read by an elementwise sum"
    if any(use.read.op == "mul" for use in by_leaf[leaves[0]]):
        kind, read_by = (
            "unitwise",
            f"elementwise scale{' and shift' if len(leaves) > 1 else ''}",
        )
    return _layer(
        traced, leaves, kind, [layout] * len(leaves), f"{read_by}: per-example gradients",
        positions=_positions(max(sum(use.rows for use in part) for part in parts), traced.batch.num_examples or n),
        uses=max(sum(use.reads for use in part) for part in parts),
    )  # fmt: skip


def _gradient_layer(
    leaf: int, traced: Trace, why: Inexact | None, chosen: bool
) -> Layer:
    """Make a layer with the gradient's own factors.

    The leaf becomes the matrices that a product reads, if they are known. Otherwise, it becomes a matrix that is as
    square as possible. A vector gets a diagonal.
    """
    shape = traced.shapes[leaf]
    sizes = [size for size in shape if size > 1]
    layout = Layout(("out",), (math.prod(shape),))
    if why and why.layout:
        layout = why.layout
    elif len(sizes) > 1:
        cuts = [
            (math.prod(sizes[:k]), math.prod(sizes[k:])) for k in range(1, len(sizes))
        ]
        layout = Layout(
            ("in", "out"),
            min(cuts, key=lambda cut: (sum(size**2 for size in cut), cut)),
        )
    found = f"{why.operation}: {why.reason}" if why else "read without examples"
    note = "chosen by the user" if chosen else found
    return _layer(traced, [leaf], "gradient", [layout], note)
