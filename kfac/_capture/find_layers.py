"""From the reads of a loss to layers: which leaves make a block, and of which kind."""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from kfac._capture import axes as axes_lib
from kfac._capture.find_reads import Reads
from kfac._capture.outputs import Marks, find_marks
from kfac._capture.parts import within_leaves
from kfac._capture.states import NOT_WITH_EXAMPLES, Use, by_part, unsupported
from kfac._capture.trace import Trace, trace
from kfac._layers import KRONECKER_KINDS, Layer, Layers, Layout


def find_layers(
    loss_fn: Callable[..., Any],
    params: Any,
    *args: Any,
    has_aux: bool = False,
    skip: Sequence[str] = (),
    max_dim: int | None = None,
    reduce: Sequence[str] = (),
    **kwargs: Any,
) -> Layers:
    """Says how each parameter leaf of `loss_fn` will be preconditioned.

    Traces `loss_fn(params, *args, **kwargs)` once and follows every parameter leaf through shape and dtype operations
    to the operations that read it. Nothing is computed. A leaf read by matrix products or convolutions gets a Kronecker
    block, normalisation scales and shifts a unit-wise one, what remains a diagonal one; no leaf is left out silently.
    What carries no gradient to the loss does not count: `stop_gradient`, metrics in `aux`, outputs that nothing uses.

    Args:
      loss_fn: the mean loss over the examples of a batch, a real scalar; with `has_aux`, a pair `(loss, aux)`.
      params: the parameters, a pytree of real arrays or `jax.ShapeDtypeStruct`.
      *args: further arguments: pytrees of arrays or `jax.ShapeDtypeStruct`; other leaves are passed on as they are.
      has_aux: whether `loss_fn` returns a pair.
      skip: regular expressions; a leaf in whose path (joined by `/`) one is found gets no curvature block, its gradient
        passes through the preconditioner unchanged.
      max_dim: a Kronecker factor with more rows is kept as its diagonal, which the table says. None: no bound. The
        inverse of a factor of `d` rows takes work of order `d^3` and memory of order `d^2`.
      reduce: regular expressions; a matrix product or convolution whose kernel has one in its path is treated in the
        setting "reduce" of Eschenhagen et al. 2023: inputs are averaged and output gradients summed over the positions
        of an example before products are formed. Elsewhere it is "expand". Lookups are in the setting "expand" always.
      **kwargs: keyword arguments of `loss_fn`.

    Returns:
      `Layers`: print it to see every parameter.

    Raises:
      UnsupportedLayerError: a parameter is read in a way that cannot be treated exactly; the message says which and how
        to go on.
      ValueError: a pattern of `skip` or `reduce` matches no leaf, or is no regular expression; `max_dim` is no positive
        int.
      TypeError: `loss_fn` does not return a real scalar, or a parameter leaf is no real array.
    """
    for option, patterns in (("skip", skip), ("reduce", reduce)):
        if isinstance(patterns, str):
            raise ValueError(f"{option} must be a sequence of regular expressions, but is the string {patterns!r}")
    if max_dim is not None and (isinstance(max_dim, bool) or not isinstance(max_dim, int) or max_dim < 1):
        raise ValueError(f"max_dim must be a positive int or None, but is {max_dim!r}")
    traced = trace(loss_fn, has_aux, params, args, kwargs)
    options = Layers((), tuple(traced.names), tuple(skip), max_dim, tuple(reduce), jax.tree.structure(params))
    return layers_of(traced, options, find_marks(traced), None).layers


class Found(NamedTuple):
    """The layers of a loss, and what they are known from.

    Attributes:
      layers: the layers.
      reads: how the program uses its parameters.
      uses: for each layer the uses of each of its leaves, in the order of `Layer.params`.
      marks: the marked outputs.
      num_examples: `n`; None where it is not clear.
      unclear: why it is not, and what to do.
    """

    layers: Layers
    reads: Reads
    uses: dict[str, list[list[Use]]]
    marks: Marks
    num_examples: int | None
    unclear: str


def layers_of(traced: Trace, options: Layers, marks: Marks, num_examples: int | None) -> Found:
    """Groups the uses of each leaf into layers.

    Args:
      traced: the traced loss.
      options: what holds the options of `find_layers`.
      marks: its marked outputs.
      num_examples: the number of examples, if the user gave it.
    """
    names, shapes = traced.names, traced.shapes
    empty = {leaf for leaf, shape in enumerate(shapes) if 0 in shape}
    skipped = _matching("skip", options.skip, names) | empty
    reduced = {names[leaf] for leaf in _matching("reduce", options.reduce, names)}
    reads = Reads(traced, skipped)
    reads.uses = within_leaves(reads.uses, shapes)
    by_leaf: dict[int, list[Use]] = collections.defaultdict(list)
    for use in reads.uses:
        by_leaf[use.leaf].append(use)
    order = {leaf: place for place, leaf in enumerate(by_leaf)}  # uses come in the order of the program
    _drop_mixed_lookups(reads, by_leaf)
    kernels = {leaf for leaf, uses in by_leaf.items() if any(use.read.op in KRONECKER_KINDS for use in uses)}
    for leaf in kernels:
        _check_kernel(names[leaf], by_leaf[leaf], reads.coarse.get(leaf))
    companions = _companions(reads, by_leaf, kernels)
    n, unclear = count_examples(num_examples, marks, reads, kernels, names)
    for _, length in reads.merges.values():
        if n is not None and length != n:
            reason = f"arrays that all examples share meet {length} of them, elsewhere there seem to be {n}"
            n, unclear = None, f"the number of examples is not clear: {reason}. Pass num_examples= to value_and_grad."

    drafts: list[tuple[Layer, list[int]]] = []
    for leaf, name in enumerate(names):
        if leaf in companions.values():
            continue
        leaves = [leaf, companions[leaf]] if leaf in companions else [leaf]
        if leaf in skipped:
            note = "has no elements" if leaf in empty else "skipped by the user"
            layer = Layer(name, "skipped", (name,), (shapes[leaf],), note=note)
        elif leaf in kernels:
            layer = _kronecker_layer(leaves, reads, by_leaf, names, shapes, n)
        else:
            layer = _elementwise_layer(leaves, reads, by_leaf, names, shapes, n)
        drafts.append((layer, leaves))

    parents = collections.Counter(_parent(layer.params[0]) for layer, _ in drafts)
    blocks, uses_of = [], {}
    for layer, leaves in drafts:
        parent = _parent(layer.params[0])
        # A path may hold a slash of its own, so a parent may have the path of a leaf.
        unique = parent and parents[parent] == 1 and parent not in names
        place = min((order[leaf] for leaf in leaves if leaf in order), default=0)
        layer = dataclasses.replace(layer, name=parent if unique else layer.params[0], order=place)
        layer = _bounded(layer, options.max_dim)
        if layer.kind in ("dense", "conv") and layer.params[0] in reduced:
            if len({use.layout for use in by_leaf[leaves[0]]}) > 1:
                raise unsupported(layer.params[0], "its transpose too", "reduce= is not for such kernels")
            layer = dataclasses.replace(layer, weight_sharing="reduce")
        blocks.append(layer)
        uses_of[layer.name] = [by_leaf[leaf] for leaf in leaves]
    layers = dataclasses.replace(options, blocks=tuple(blocks), paths=tuple(names), num_examples=n)
    return Found(layers, reads, uses_of, marks, n, unclear)


def _bounded(layer: Layer, max_dim: int | None) -> Layer:
    """The layer with diagonals in the place of factors that are too large."""
    if layer.kind not in KRONECKER_KINDS or max_dim is None:
        return layer
    large = [name for name, shape in layer.block_shapes.items() if len(shape) == 2 and shape[0] > max_dim]
    if not large:
        return layer
    reason = " and ".join(f"{name} has more than max_dim={max_dim} rows" for name in large)
    diagonal = tuple(name for name in "AG" if name in (*layer.diagonal, *large))
    return dataclasses.replace(layer, diagonal=diagonal, note="; ".join(filter(None, [layer.note, reason])))


def _matching(option: str, patterns: tuple[str, ...], names: Sequence[str]) -> set[int]:
    matching = set()
    for pattern in patterns:
        try:
            found = {k for k, name in enumerate(names) if re.search(pattern, name)}
        except re.error as error:
            raise ValueError(f"{option}: {pattern!r} is not a regular expression: {error}") from None
        if not found:
            raise ValueError(f"{option}: {pattern!r} matches no parameter; the parameters are {', '.join(names)}")
        matching |= found
    return matching


def _parent(path: str) -> str:
    return path.rpartition("/")[0]


def _drop_mixed_lookups(reads: Reads, by_leaf: dict[int, list[Use]]) -> None:
    """Leaves a table to the coarse diagonal if not all that reads it are lookups of its rows, and none is a product."""
    for leaf, uses in list(by_leaf.items()):
        lookups = [use for use in uses if use.read.op == "embedding"]
        if not lookups or any(use.read.op in ("dense", "conv") for use in uses):
            continue
        forms = {(use.layout, tuple(filter(None, use.view.stack)), use.picked) for use in lookups}
        if len(lookups) < len(uses) or len(forms) > 1 or leaf in reads.coarse:
            reads.coarse.setdefault(leaf, "gather and other operations")
            del by_leaf[leaf]


def _check_kernel(name: str, uses: list[Use], coarse: str | None) -> None:
    products = [use for use in uses if use.read.op in KRONECKER_KINDS]
    where = " and ".join(sorted({use.read.op for use in uses}))
    main = main_use(products)
    if len({use.read.op == "embedding" for use in products if use.layout == main.layout}) > 1:
        reason = "of inputs that are looked up there are only counts, so the two cannot be put in one block"
        raise unsupported(name, "a gather and a matrix product or convolution", reason)
    if coarse is not None:
        raise unsupported(
            name, f"a matrix product or convolution and by {coarse}", "the two cannot be put in one block"
        )
    if len(products) < len(uses):
        raise unsupported(name, where, "besides a product, an elementwise operation reads it")
    if any(use.picks is None for use in products):
        raise unsupported(name, where, "it reads a slice that is not one of several equal parts of the parameter")
    if len({use.picked for use in products}) > 1:
        raise unsupported(name, f"{len(products)} products", "they disagree on the parts that it is cut into")
    if any(use.layout != main.layout and not _is_transposed(use, main) for use in products):
        raise unsupported(name, f"{len(products)} products", "they disagree on which of its axes are inputs")
    if len({tuple(filter(None, use.view.stack)) for use in products}) > 1:
        raise unsupported(name, f"{len(products)} products", "they disagree on how it is stacked")


def main_use(uses: Sequence[Use]) -> Use:
    """The use that says which axes of a kernel are its inputs, where a transposed one says the opposite."""
    return next((use for use in uses if use.read.op == "embedding"), uses[0])


def _is_transposed(a: Use, b: Use) -> bool:
    swapped = {"in": "out", "out": "in", "stack": "stack"}
    return a.layout == axes_lib.layout((atom, swapped[role]) for atom, role in b.roles.items())


def _companions(reads: Reads, by_leaf: dict[int, list[Use]], kernels: set[int]) -> dict[int, int]:
    """The bias of each kernel and the shift of each scale: the leaf added to its every output, and to nothing else."""
    companions: dict[int, int] = {}
    for leaf, uses in by_leaf.items():
        if leaf in kernels or leaf in reads.coarse or not all(u.read.op == "add" and u.joined for u in uses):
            continue
        joined = [use.joined[0] for use in uses if use.joined]
        partners = {reads.uses[k].leaf for k in joined}
        partner = partners.pop()
        if partners or partner in companions or partner in reads.coarse or len(set(joined)) < len(joined):
            continue
        if partner in kernels and (len({u.layout for u in by_leaf[partner]}) > 1 or by_leaf[partner][0].within):
            continue  # a bias of one of the uses of a kernel and its transpose, or of one of its parts
        if partner in kernels:
            # A bias may be missing from some uses of the kernel, but a subtracted one is no homogeneous 1.
            if all(use.read.sign == 1 for use in uses):
                companions[partner] = leaf
        elif len(joined) == len(by_leaf[partner]) and all(reads.uses[k].read.op == "mul" for k in joined):
            companions[partner] = leaf
    return companions


def count_examples(
    given: int | None, marks: Marks, reads: Reads, kernels: set[int], names: Sequence[str]
) -> tuple[int | None, str]:
    """The number of examples; None where it is not clear, and why."""
    if given is not None:
        if isinstance(given, bool) or not isinstance(given, int) or given < 1:
            raise ValueError(f"num_examples must be a positive int, but is {given!r}")
        read = {leaf: sum(use.rows for use in reads.uses if use.leaf == leaf and not use.late) for leaf in kernels}
        if any(read.values()) and given > max(read.values()):
            most = max(read, key=lambda leaf: read[leaf])
            where = f"the {read[most]} position(s) at which {names[most]!r} is read, more often than any other kernel"
            raise ValueError(f"num_examples={given} is more than {where}")
        return given, ""
    if marks.marks:
        own = (use for use in reads.uses if use.leaf in kernels and not use.late)
        return marks.num_examples([(names[use.leaf], use.rows, use.read.leading) for use in own])
    candidates: dict[int | None, str] = {}
    for use in reads.uses:
        if not use.late and (use.leaf in kernels or not kernels):
            # Without an axis of its own there is one example, unless a scan runs over examples or over positions.
            leading = 1 if use.read.leading is None and use.rows == 1 else use.read.leading
            candidates.setdefault(leading, names[use.leaf])
    if not candidates:
        candidates.update({length: "rows that all examples share" for _, length in reads.merges.values()})
    if not candidates:
        candidates.update(reads.skipped_products)
    if not candidates and any(leaf in reads.coarse or leaf in reads.derived for leaf in range(len(names))):
        return (
            None,
            "the number of examples is not clear: no product reads a parameter. Pass num_examples= to value_and_grad.",
        )
    if len(candidates) > 1 or None in candidates:
        seen = ", ".join(f"{size or 'none inside a scan'} ({name!r})" for size, name in candidates.items())
        return None, (
            f"the number of examples is not clear: the leading dimensions of the layers' inputs are {seen}. Pass "
            "num_examples= to value_and_grad; an array that all examples share, such as coordinates, must be broadcast "
            "to each of them in the loss, or its layers left out with skip=."
        )
    n = next(iter(candidates), None) or 1
    many = n > 1 or any(use.rows > 1 for use in reads.uses if use.leaf in kernels and not use.late)
    if many and reads.lengths and n not in reads.lengths and not (n == 1 and reads.single):
        name = next(iter(candidates.values()))
        return None, (
            f"the number of examples is not clear: {name!r} is read with a leading axis of length {n}, that of "
            f"no array argument of loss_fn. Pass num_examples={n} to value_and_grad if its entries are the examples, "
            "else how many there are."
        )
    return n, ""


def _kronecker_layer(leaves, reads: Reads, by_leaf: dict[int, list[Use]], names, shapes, n: int | None) -> Layer:
    uses = by_leaf[leaves[0]]
    main = main_use(uses)
    kernel = main.layout
    layouts = [kernel]
    for bias in leaves[1:]:
        joined = by_leaf[bias][0].joined
        assert joined is not None
        roles = reads.uses[joined[0]].roles
        layouts.append(axes_lib.layout((own, _role_within(roles, theirs)) for own, theirs in joined[1]))
    by_parts, lookup, ragged = by_part(uses), main.read.op == "embedding", any(u.read.groups is not None for u in uses)
    rows = {sum(use.for_all(n or 1).rows for use in part) for part in by_parts}
    parts = math.prod(atom.size for atom in uses[0].picked)
    notes = ["A holds the counts of the rows looked up"] * lookup
    notes += ["read as its transpose as well"] * any(use.layout != kernel for use in uses)
    notes += ["read in parts of several sizes, as uses of the whole"] * (main.within is not None)
    notes += [f"{len(by_parts)} of its {parts} parts read"] * (len(by_parts) < parts)
    return Layer(
        names[leaves[0]],
        main.read.op,
        tuple(names[k] for k in leaves),
        tuple(shapes[k] for k in leaves),
        tuple(layouts),
        d_out=kernel.size("out"),
        d_in=kernel.size("in") + len(leaves) - 1,
        copies=kernel.size("stack"),
        stacked="stack" in kernel.roles,
        diagonal=("A",) if lookup else (),
        note="; ".join(notes),
        positions=_positions(rows.pop(), n) if len(rows) == 1 and not ragged else None,
        uses=max(sum(use.times * use.read.repeats for use in part) for part in by_parts),
    )


def _positions(rows: int, n: int | None) -> int | None:
    return rows // n if n and rows % n == 0 else None


def _role_within(roles: dict[axes_lib.Atom, str], part: axes_lib.Atom) -> str:
    return next(role for atom, role in roles.items() if axes_lib.is_part(part, atom))


def _elementwise_layer(leaves, reads: Reads, by_leaf: dict[int, list[Use]], names, shapes, n: int | None) -> Layer:
    leaf, size = leaves[0], math.prod(shapes[leaves[0]])
    uses = by_leaf.get(leaf, [])
    if not uses and leaf in reads.products:
        raise unsupported(names[leaf], reads.products[leaf], NOT_WITH_EXAMPLES)
    coarse = leaf in reads.coarse or not uses
    kind = "unitwise" if not coarse and any(use.read.op == "mul" for use in uses) else "diagonal"
    if coarse:
        how = reads.coarse.get(leaf) or reads.derived.get(leaf)
        note = f"read by {how}: n times the squared mean gradient" if how else "not used by the loss"
    elif kind == "diagonal":
        note = "read by an elementwise sum: per-example gradients"
    else:
        note = f"elementwise scale{' and shift' if len(leaves) > 1 else ''}: per-example gradients"
    parts = by_part(uses) if not coarse else []
    return Layer(
        names[leaf],
        kind,
        tuple(names[k] for k in leaves),
        tuple(shapes[k] for k in leaves),
        tuple(Layout(("out",), (size,)) for _ in leaves),
        d_out=size,
        d_in=len(leaves),
        coarse=coarse,
        note=note,
        positions=_positions(max(sum(use.rows for use in part) for part in parts), n) if parts else None,
        uses=max(sum(use.times for use in part) for part in parts) if parts else 1,
    )
