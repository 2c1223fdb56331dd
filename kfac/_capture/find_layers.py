"""From the reads of a traced loss to layers: which leaves make a block, and of which kind."""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax

from kfac._capture import axes as axes_lib
from kfac._capture.analysis import Analysis
from kfac._capture.axes import Atom
from kfac._capture.outputs import Marks, find_marks
from kfac._capture.reads import (
    NOT_WITH_EXAMPLES,
    Read,
    by_part,
    kernel_layout,
    kernel_roles,
    most_uses,
    unsupported,
)
from kfac._capture.replay import Plan
from kfac._capture.taps import Resolved, plan_elementwise, plan_kronecker
from kfac._capture.trace import Trace, trace
from kfac._layers import KRONECKER_KINDS, Layer, Layers, Layout, leaf_path


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
    names, shapes = paths_and_shapes(params)
    options = Layers((), tuple(names), tuple(skip), max_dim, tuple(reduce))
    # The example count matters to the statistics only, so a batch that does not tell it is no error here.
    return resolve(trace(loss_fn, has_aux, params, args, kwargs), names, shapes, options, None, strict=False).layers


def paths_and_shapes(params: Any) -> tuple[list[str], list[tuple[int, ...]]]:
    """Paths and shapes of the leaves, in the order of `jax.tree.leaves`."""
    flat, _ = jax.tree_util.tree_flatten_with_path(params)
    names = [leaf_path(path) for path, _ in flat]
    if not names:
        raise ValueError("params has no leaves: there is nothing to train")
    repeated = [name for name, count in collections.Counter(names).items() if count > 1]
    if repeated:
        raise ValueError(f"two parameter leaves have the path {repeated[0]!r}; rename one")
    for name, (_, leaf) in zip(names, flat, strict=True):
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            raise TypeError(f"parameter {name!r} must be an array, but is of type {type(leaf).__name__}")
    return names, [tuple(leaf.shape) for _, leaf in flat]


def resolve(
    traced: Trace,
    names: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    options: Layers,
    num_examples: int | None,
    strict: bool = True,
    subsample: int = 1,
    ekfac: bool = False,
) -> Resolved:
    """Groups the reads of `traced` into layers and plans their taps.

    Args:
      traced: the traced loss.
      names: paths of the parameter leaves.
      shapes: their shapes.
      options: what holds the options of `find_layers`.
      num_examples: the number of examples, if the user gave it.
      strict: whether an unknown number of examples is an error.
      subsample: Kronecker factors come from every `subsample`-th example.
      ekfac: whether taps also sum squares of per-example gradients.
    """
    skipped = _matching("skip", options.skip, names)
    reduced = {names[leaf] for leaf in _matching("reduce", options.reduce, names)}
    analysis = Analysis(traced, names, shapes, skipped)
    by_leaf: dict[int, list[Read]] = collections.defaultdict(list)
    for read in analysis.reads:
        by_leaf[read.leaf].append(read)
    _drop_mixed_lookups(analysis, by_leaf)
    kernels = {leaf for leaf, reads in by_leaf.items() if any(read.op in KRONECKER_KINDS for read in reads)}
    for leaf in kernels:
        _check_kernel(names[leaf], by_leaf[leaf], analysis.coarse.get(leaf))
    companions = _companions(analysis, by_leaf, kernels)

    marks = find_marks(traced, len(names))
    n = _num_examples(num_examples, marks, analysis, kernels, names, strict)
    drafts: list[tuple[Layer, list[int]]] = []
    for leaf, name in enumerate(names):
        if leaf in companions.values():
            continue
        if leaf in skipped:
            drafts.append((Layer(name, "skipped", (name,), (shapes[leaf],), note="skipped by the user"), [leaf]))
        elif leaf in kernels:
            drafts.append(_kronecker_layer(leaf, companions.get(leaf), analysis, by_leaf, names, shapes, n))
        else:
            drafts.append(_elementwise_layer(leaf, companions.get(leaf), analysis, by_leaf, names, shapes, n))

    parents = collections.Counter(_parent(layer.params[0]) for layer, _ in drafts)
    resolved = Resolved(options, Plan(), {}, {}, n or 1, marks)
    blocks = []
    for layer, leaves in drafts:
        parent = _parent(layer.params[0])
        # A path may hold a slash of its own, so a parent may have the path of a leaf.
        unique = parent and parents[parent] == 1 and parent not in names
        layer = dataclasses.replace(layer, name=parent if unique else layer.params[0])
        layer = _bounded(layer, options.max_dim)
        if layer.kind in ("dense", "conv") and layer.params[0] in reduced:
            layer = dataclasses.replace(layer, weight_sharing="reduce")
        blocks.append(layer)
        reads = [read for leaf in leaves for read in by_leaf[leaf]]
        if layer.kind in KRONECKER_KINDS:
            plan_kronecker(resolved, layer, by_leaf[leaves[0]], analysis, traced, strict, subsample, ekfac)
        elif reads and not layer.coarse:
            plan_elementwise(resolved, layer, leaves, by_leaf, shapes, traced, strict)
    for path, operand in analysis.multipliers.items():
        # Only where the jaxpr holds a tap: elsewhere nothing reads the multiplier.
        resolved.plan.at(path).multipliers[path[-1]] = operand
    for path in analysis.carriers:
        resolved.plan.at((*path, 0))
    resolved.layers = dataclasses.replace(options, blocks=tuple(blocks), paths=tuple(names))
    return resolved


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


def _drop_mixed_lookups(analysis: Analysis, by_leaf: dict[int, list[Read]]) -> None:
    """Leaves a table to the coarse diagonal if not all that reads it are lookups of its rows, and none is a product."""
    for leaf, reads in list(by_leaf.items()):
        lookups = [read for read in reads if read.op == "embedding"]
        if not lookups or any(read.op in ("dense", "conv") for read in reads):
            continue
        forms = {(kernel_layout(read), tuple(filter(None, read.view.stack)), read.picked) for read in lookups}
        if len(lookups) < len(reads) or len(forms) > 1 or leaf in analysis.coarse:
            analysis.coarse.setdefault(leaf, "gather and other operations")
            del by_leaf[leaf]


def _check_kernel(name: str, reads: list[Read], coarse: str | None) -> None:
    products = [read for read in reads if read.op in KRONECKER_KINDS]
    where = " and ".join(sorted({read.op for read in reads}))
    if len({read.op == "embedding" for read in products}) > 1:
        reason = "of inputs that are looked up there are only counts, so the two cannot be put in one block"
        if len({kernel_layout(read) for read in products}) > 1:
            reason = (
                "an embedding that is the output layer as well has inputs on one axis and gradients on the other for "
                "the one use, and the other way round for the other; the sum of the two Kronecker products is none, so "
                "they cannot be put in one block. A table of its own for each use gets one"
            )
        raise unsupported(name, "a gather and a matrix product or convolution", reason)
    if coarse is not None:
        raise unsupported(
            name, f"a matrix product or convolution and by {coarse}", "the two cannot be put in one block"
        )
    if len(products) < len(reads):
        raise unsupported(name, where, "besides a product, an elementwise operation reads it")
    if len({read.picked for read in products}) > 1:
        raise unsupported(name, f"{len(products)} products", "they disagree on the parts that it is cut into")
    if len({kernel_layout(read) for read in products}) > 1:
        reason = "they disagree on which of its axes are inputs"
        if any(_is_transposed(a, b) for a in products for b in products):
            reason = (
                "a kernel and its transpose have inputs on one axis and gradients on the other for the one use, and "
                "the other way round for the other; the sum of the two Kronecker products is none. A kernel of its own "
                "for each use gets one"
            )
        raise unsupported(name, f"{len(products)} products", reason)
    if len({tuple(filter(None, read.view.stack)) for read in products}) > 1:
        raise unsupported(name, f"{len(products)} products", "they disagree on how it is stacked")


def _is_transposed(a: Read, b: Read) -> bool:
    swapped = {"in": "out", "out": "in", "stack": "stack"}
    return kernel_layout(a) == axes_lib.layout((atom, swapped[role]) for atom, role in kernel_roles(b).items())


def _companions(analysis: Analysis, by_leaf: dict[int, list[Read]], kernels: set[int]) -> dict[int, int]:
    """The bias of each kernel and the shift of each scale: the leaf added to its every output, and to nothing else."""
    companions: dict[int, int] = {}
    for leaf, reads in by_leaf.items():
        if leaf in kernels or leaf in analysis.coarse or not all(r.op == "add" and r.joined for r in reads):
            continue
        joined = [read.joined[0] for read in reads if read.joined]
        partners = {analysis.reads[k].leaf for k in joined}
        partner = partners.pop()
        if partners or partner in companions or partner in analysis.coarse or len(set(joined)) < len(joined):
            continue
        if partner in kernels:
            # A bias may be missing from some uses of the kernel, but a subtracted one is no homogeneous 1.
            if all(read.sign == 1 for read in reads):
                companions[partner] = leaf
        elif len(joined) == len(by_leaf[partner]) and all(analysis.reads[k].op == "mul" for k in joined):
            companions[partner] = leaf
    return companions


def _num_examples(
    given, marks: Marks, analysis: Analysis, kernels: set[int], names: Sequence[str], strict: bool
) -> int | None:
    """The number of examples; None where it is not clear and need not be."""
    if given is not None:
        if isinstance(given, bool) or not isinstance(given, int) or given < 1:
            raise ValueError(f"num_examples must be a positive int, but is {given!r}")
        for read in analysis.reads:
            if read.leaf in kernels and read.rows % given:
                raise ValueError(
                    f"num_examples={given} does not divide the {read.rows} positions at which "
                    f"{names[read.leaf]!r} is read"
                )
        return given
    if marks.marks:
        products = [(names[read.leaf], read.rows, read.leading) for read in analysis.reads if read.leaf in kernels]
        return marks.num_examples(products, strict)
    candidates: dict[int | None, str] = {}
    for read in analysis.reads:
        if read.leaf in kernels or not kernels:
            # Without an axis of its own there is one example, unless a scan runs over examples or over positions.
            leading = 1 if read.leading is None and read.rows == 1 else read.leading
            candidates.setdefault(leading, names[read.leaf])
    if len(candidates) > 1 or None in candidates:
        if not strict:
            return None
        seen = ", ".join(f"{size or 'none inside a scan'} ({name!r})" for size, name in candidates.items())
        raise ValueError(
            f"the number of examples is not clear: the leading dimensions of the layers' inputs are {seen}. Pass "
            "num_examples= to value_and_grad."
        )
    return next(iter(candidates), 1)


def _kronecker_layer(leaf, bias, analysis, by_leaf, names, shapes, n) -> tuple[Layer, list[int]]:
    reads = by_leaf[leaf]
    kernel = kernel_layout(reads[0])
    leaves, layouts = [leaf], [kernel]
    if bias is not None:
        read = by_leaf[bias][0]
        assert read.joined is not None
        roles = kernel_roles(analysis.reads[read.joined[0]])
        layouts.append(axes_lib.layout((own, _role_within(roles, theirs)) for own, theirs in read.joined[1]))
        leaves.append(bias)
    rows = {sum(read.rows for read in part) for part in by_part(reads)}
    lookup = reads[0].op == "embedding"
    parts, read_parts = math.prod(atom.size for atom in reads[0].picked), len(by_part(reads))
    notes = ["A holds the counts of the rows looked up"] * lookup
    notes += [f"{read_parts} of its {parts} parts read"] * (read_parts < parts)
    layer = Layer(
        names[leaf],
        reads[0].op,
        tuple(names[k] for k in leaves),
        tuple(shapes[k] for k in leaves),
        tuple(layouts),
        d_out=kernel.size("out"),
        d_in=kernel.size("in") + (bias is not None),
        copies=kernel.size("stack"),
        stacked="stack" in kernel.roles,
        diagonal=("A",) if lookup else (),
        note="; ".join(notes),
        positions=_positions(rows.pop(), n) if len(rows) == 1 else None,
        uses=most_uses(reads),
    )
    return layer, leaves


def _positions(rows: int, n: int | None) -> int | None:
    return rows // n if n and rows % n == 0 else None


def _role_within(roles: dict[Atom, str], part: Atom) -> str:
    return next(role for atom, role in roles.items() if axes_lib.is_part(part, atom))


def _elementwise_layer(leaf, shift, analysis, by_leaf, names, shapes, n) -> tuple[Layer, list[int]]:
    size = math.prod(shapes[leaf])
    reads = by_leaf.get(leaf, [])
    if not reads and leaf in analysis.products:
        raise unsupported(names[leaf], analysis.products[leaf], NOT_WITH_EXAMPLES)
    coarse, note, kind = False, "", "unitwise"
    if leaf in analysis.coarse or not reads:
        coarse, kind = True, "diagonal"
        how = analysis.coarse.get(leaf) or analysis.derived.get(leaf)
        note = f"read by {how}: n times the squared mean gradient" if how else "not used by the loss"
    elif not any(read.op == "mul" for read in reads):
        kind, note = "diagonal", "read by an elementwise sum: per-example gradients"
    else:
        note = "elementwise scale" + (" and shift" if shift is not None else "") + ": per-example gradients"
    leaves = [leaf] if shift is None else [leaf, shift]
    layer = Layer(
        names[leaf],
        kind,
        tuple(names[k] for k in leaves),
        tuple(shapes[k] for k in leaves),
        tuple(Layout(("out",), (size,)) for _ in leaves),
        d_out=size,
        d_in=len(leaves),
        coarse=coarse,
        note=note,
        positions=None if coarse else _positions(max(sum(read.rows for read in part) for part in by_part(reads)), n),
        uses=1 if coarse else most_uses(reads),
    )
    return layer, leaves
