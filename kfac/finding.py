"""From the reads of a traced loss to layers, and to the taps that collect their statistics."""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kfac import axes as axes_lib
from kfac.axes import Atom, Layout
from kfac.layers import KRONECKER_KINDS, Factors, Kronecker, Layer, Layers, Unitwise, leaf_path
from kfac.likelihood import Marks, find_marks
from kfac.operands import FILL_OR_DROP, row_axis
from kfac.replay import ElementwiseTap, Key, KroneckerTap, Plan
from kfac.statistics import Convolution, Lookup, accumulator
from kfac.tracing import NOT_WITH_EXAMPLES, Analysis, Read, Trace, inner_jaxpr, trace, unsupported


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


@dataclasses.dataclass
class Resolved:
    """Layers, and all that `value_and_grad` needs to collect and finish their statistics.

    Attributes:
      layers: the layers.
      plan: where the taps are.
      probes: shape and dtype of what each tap sums.
      finish: what brings these sums to factors, by layer, and their keys.
      num_examples: `n`.
      marks: the marked outputs.
    """

    layers: Layers
    plan: Plan
    probes: dict[Key, Any]
    finish: dict[str, tuple[list[Key], Callable[[list[Any]], Any]]]
    num_examples: int
    marks: Marks

    def factors(self, sums: dict[Key, Any], grads: Sequence[Any]) -> Factors:
        """Factors from the cotangents of the probes and, for coarse diagonals, the gradients."""
        by_path = dict(zip(self.layers.paths, grads, strict=True))
        blocks = {}
        for layer in self.layers.with_factors:
            if layer.coarse:
                g = by_path[layer.params[0]]
                squared = self.num_examples * jnp.square(g.astype(accumulator(g.dtype)))
                blocks[layer.name] = Unitwise(squared.reshape(layer.factor_shapes["F"]))
            else:
                keys, finish = self.finish[layer.name]
                blocks[layer.name] = finish([sums[key] for key in keys])
        return Factors(blocks)


def resolve(
    traced: Trace,
    names: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    options: Layers,
    num_examples: int | None,
    strict: bool = True,
    subsample: int = 1,
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
            _plan_kronecker(resolved, layer, by_leaf[leaves[0]], analysis, traced, strict, subsample)
        elif reads and not layer.coarse:
            _plan_elementwise(resolved, layer, leaves, by_leaf, shapes, traced, strict)
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
        forms = {(_kernel_layout(read), tuple(filter(None, read.view.stack)), read.picked) for read in lookups}
        if len(lookups) < len(reads) or len(forms) > 1 or leaf in analysis.coarse:
            analysis.coarse.setdefault(leaf, "gather and other operations")
            del by_leaf[leaf]


def _check_kernel(name: str, reads: list[Read], coarse: str | None) -> None:
    products = [read for read in reads if read.op in KRONECKER_KINDS]
    where = " and ".join(sorted({read.op for read in reads}))
    if len({read.op == "embedding" for read in products}) > 1:
        reason = "of inputs that are looked up there are only counts, so the two cannot be put in one block"
        if len({_kernel_layout(read) for read in products}) > 1:
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
    if len({_kernel_layout(read) for read in products}) > 1:
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
    return _kernel_layout(a) == axes_lib.layout((atom, swapped[role]) for atom, role in _kernel_roles(b).items())


def _kernel_roles(read: Read) -> dict[Atom, str]:
    roles = {atom: "in" for atom in axes_lib.atoms_of(read.x_axes)}
    roles |= {atom: "out" for atom in axes_lib.atoms_of(read.y_axes)}
    return roles | {atom: "stack" for atom in read.copies}


def _part(read: Read) -> int:
    """Which part of its leaf a product reads, in memory order."""
    index = 0
    for atom, entry in read.picks or ():
        index = index * atom.size + entry
    return index


def _parts(reads: Sequence[Read]) -> list[list[Read]]:
    """The reads of each part that a leaf is read in; of the whole of it, as a rule."""
    parts: dict[Any, list[Read]] = collections.defaultdict(list)
    for read in reads:
        parts[read.view.start].append(read)
    return list(parts.values())


def _uses(reads: Sequence[Read]) -> int:
    return max((sum(read.uses for read in part) for part in _parts(reads)), default=0)


def _kernel_layout(read: Read) -> Layout:
    return axes_lib.layout(_kernel_roles(read).items())


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
    kernel = _kernel_layout(reads[0])
    leaves, layouts = [leaf], [kernel]
    if bias is not None:
        read = by_leaf[bias][0]
        assert read.joined is not None
        roles = _kernel_roles(analysis.reads[read.joined[0]])
        layouts.append(axes_lib.layout((own, _role_within(roles, theirs)) for own, theirs in read.joined[1]))
        leaves.append(bias)
    rows = {sum(read.rows for read in part) for part in _parts(reads)}
    lookup = reads[0].op == "embedding"
    parts, read_parts = math.prod(atom.size for atom in reads[0].picked), len(_parts(reads))
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
        uses=_uses(reads),
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
        positions=None if coarse else _positions(max(sum(read.rows for read in part) for part in _parts(reads)), n),
        uses=1 if coarse else _uses(reads),
    )
    return layer, leaves


def _plan_kronecker(
    resolved: Resolved, layer: Layer, reads: list[Read], analysis: Analysis, traced: Trace, strict: bool, subsample: int
) -> None:
    dtype = _accumulator(traced, reads)
    n, reduce = resolved.num_examples, layer.weight_sharing == "reduce"
    with_bias = {
        read.joined[0] for read in analysis.reads if read.joined and analysis.names[read.leaf] in layer.params[1:]
    }
    for read in reads:
        eqn = _equations(traced, read.path)[-1]
        index = next(k for k, other in enumerate(analysis.reads) if other is read)
        bias = "none" if not layer.has_bias else "one" if index in with_bias else "zero"
        x_axes = read.x_axes
        if read.op == "conv" and (reduce or "A" in layer.diagonal):
            spatial = len(eqn.params["window_strides"])
            x_axes = (x_axes[0], *x_axes[1 + spatial :])  # of sums over positions
        arrange_x = axes_lib.arrangement(x_axes, read.batched)
        arrange_g = axes_lib.arrangement(read.y_axes, read.batched)
        if reduce:
            if not strict and n > 1 and not all(_sizes(axes, n) for axes in (x_axes, read.y_axes)):
                return
            images = _images(read, eqn, n)
            x_example, g_example = images or (
                _example_position(x_axes, n, layer.params[0], read, eqn, strict),
                _example_position(read.y_axes, n, layer.params[0], read, eqn, strict),
            )
            arrange_x, arrange_g = arrange_x.grouped_by(x_example), arrange_g.grouped_by(g_example)
        elif subsample > 1:
            x_example, g_example = _subsampled(resolved, layer, read, eqn, subsample)
            arrange_x, arrange_g = arrange_x.grouped_by(x_example), arrange_g.grouped_by(g_example)
        tap = KroneckerTap(
            (layer.name, _part(read)),
            read.operand,
            arrange_x,
            arrange_g,
            _geometry(read, eqn),
            bias,
            dtype,
            layer.diagonal,
            n if reduce else None,
            subsample,
        )
        _place(resolved, traced, read, tap)
    read = reads[0]
    scanned = [length for length, atoms in zip(read.scans, read.view.stack, strict=True) if atoms]
    batched = math.prod(atom.size for atom in read.batched)
    tails = {"A": (n, layer.d_in), "G": (n, layer.d_out)} if reduce else layer.block_shapes
    summed = {name: jax.ShapeDtypeStruct((*scanned, batched, *tail), dtype) for name, tail in tails.items()}
    positions = {_part(part[0]): sum(read.rows for read in part) / n for part in _parts(reads)}
    resolved.probes.update({(layer.name, part): Kronecker(**summed) for part in positions})
    parts = math.prod(atom.size for atom in read.picked)
    stack = [*read.picked, *read.scanned, *sorted(read.batched, key=lambda atom: atom.memory_order)]
    lead = (layer.copies,) if layer.stacked else ()

    def of_part(sums: Kronecker, positions: float) -> Kronecker:
        # G = (n / s) sum g g^T with s positions per example.
        return Kronecker(sums.A / positions, sums.G) if reduce else Kronecker(sums.A / n, sums.G * (n / positions))

    def finish(sums: list[Kronecker]) -> Kronecker:
        found = {part: of_part(moments, s) for moments, (part, s) in zip(sums, positions.items(), strict=True)}
        unread = jax.tree.map(jnp.zeros_like, sums[0])
        ordered = [found.get(part, unread) for part in range(parts)]
        stacked = jax.tree.map(lambda *blocks: jnp.stack(blocks), *ordered) if parts > 1 else ordered[0]
        a, g = (_in_memory_order(getattr(stacked, f), stack, tails[f]).reshape(*lead, *tails[f]) for f in "AG")
        if not reduce:
            return Kronecker(a, g)

        def moment(factor, rows):
            if factor in layer.diagonal:
                return jnp.sum(jnp.square(rows), axis=-2)
            return jnp.einsum("...ni,...nj->...ij", rows, rows, precision=jax.lax.Precision.HIGHEST)

        return Kronecker(moment("A", a) / n, moment("G", g) * n)

    resolved.finish[layer.name] = [(layer.name, part) for part in positions], finish


def _sizes(axes: axes_lib.Axes, n: int) -> list[int]:
    """Positions, among all atoms of `axes`, of those that may be the axis of `n` examples."""
    flat = [atom for axis in axes for atom in axis]
    return [position for position, atom in enumerate(flat) if not atom.of_leaf and atom.size == n]


def _reorders(read: Read, eqn: Any) -> bool:
    """Whether a product may bring the axes of examples and positions into another order than that of its input."""
    if read.op != "dense":
        return False
    batch = eqn.params["dimension_numbers"][1][1 - read.operand]
    return any(axes_lib.is_broadcast((read.x_axes[k],)) for k in batch)


def _example_position(axes: axes_lib.Axes, n: int, parameter: str, read: Read, eqn: Any, strict: bool) -> int | None:
    """Which of all atoms of `axes` are the `n` examples; None for a single one, which needs no axis.

    Raises:
      ValueError: none can be, or another might.
    """
    if n == 1:
        return None
    flat = [atom for axis in axes for atom in axis]
    matching = _sizes(axes, n)
    example = next(iter(matching), None)
    # Behind another axis, length alone tells the examples only if they can be on no other.
    others = [p for p, atom in enumerate(flat) if not atom.of_leaf and atom.size % n == 0 and p != example]
    if strict and others and (example or _reorders(read, eqn)):
        raise ValueError(
            f"parameter {parameter!r} is read by {eqn.primitive.name} on an array of shape {list(read.shape)}: it is "
            f"not clear which of its axes has the {n} examples. Put the examples first, or take another number of them."
        )
    if example is None:
        raise ValueError(
            f"parameter {parameter!r} is read by {eqn.primitive.name} on an array of shape {list(read.shape)} none of "
            f"whose axes has the {n} examples: pass num_examples= to value_and_grad, keep the examples on an axis of "
            "their own there, or leave it out with skip=."
        )
    return example


def _subsampled(
    resolved: Resolved, layer: Layer, read: Read, eqn: Any, subsample: int
) -> tuple[int | None, int | None]:
    """Which of all atoms of a read's input, and of its output, are the examples of which `subsample` takes a part.

    Raises:
      ValueError: they have no axis of their own, or are fewer than `subsample`.
    """
    n, parameter = resolved.num_examples, layer.params[0]
    # Where every token is an example, `subsample` takes whole sequences.
    count = n if _sizes(read.y_axes, n) else resolved.marks.sequences(n)
    if subsample > count:
        raise ValueError(f"subsample={subsample}, but layer {layer.name!r} sees {count} example(s) at a time")
    if read.op == "conv":
        images = _images(read, eqn, count)
        return images or (None, _example_position((read.x_axes[0],), count, parameter, read, eqn, strict=True))
    g_example = _example_position(read.y_axes, count, parameter, read, eqn, strict=True)
    if read.op == "embedding":
        return None, g_example  # counts of rows are those of all examples
    return _example_position(read.x_axes, count, parameter, read, eqn, strict=True), g_example


def _images(read: Read, eqn: Any, n: int) -> tuple[int, int] | None:
    """Where, among all atoms, the `n` images of a convolution are, in its input and its output; None if they are not.

    Its dimension numbers say it: nothing else of the same length can be taken for them.
    """
    if read.op != "conv" or n == 1 or math.prod(atom.size for atom in read.x_axes[0]) != n:
        return None
    out = eqn.params["dimension_numbers"].out_spec[0]
    return 0, sum(len(axis) for axis in read.y_axes[:out])


def _in_memory_order(array: jax.Array, stack: list[Atom], tail: tuple[int, ...]) -> jax.Array:
    order = sorted(range(len(stack)), key=lambda k: stack[k].memory_order)
    array = array.reshape(*(atom.size for atom in stack), *tail)
    flips = [k for k, atom in enumerate(stack) if atom.flipped]
    array = jnp.flip(array, flips) if flips else array
    return array.transpose(*order, *range(len(stack), len(stack) + len(tail)))


def _plan_elementwise(resolved, layer, leaves, by_leaf, shapes, traced, strict: bool) -> None:
    n = resolved.num_examples
    keys: list[Key] = []
    entries: list[
        tuple[int, np.ndarray]
    ] = []  # for each key, which of the leaves it belongs to and which entries of it
    rows: set[int] = set()
    for k, leaf in enumerate(leaves):
        dtype = _accumulator(traced, by_leaf[leaf])
        known: dict[tuple, Key] = {}
        for read in by_leaf[leaf]:
            eqn = _equations(traced, read.path)[-1]
            flat = [atom for axis in read.y_axes for atom in axis]
            examples: tuple[int, ...] = ()
            if n > 1 and not _sizes(read.y_axes, n):
                examples = resolved.marks.token_axes(flat, n)
                if not strict and not examples:
                    return
            if not examples:
                example = _example_position(read.y_axes, n, layer.params[k], read, eqn, strict)
                examples = () if example is None else (example,)
            units = sorted((p for p, atom in enumerate(flat) if atom.of_leaf), key=lambda p: flat[p].memory_order)
            rows.add(math.prod(flat[p].size for p in examples))
            if len(rows) > 1:
                raise ValueError(
                    f"parameter {layer.params[k]!r} is read on arrays that have {' and '.join(map(str, sorted(rows)))} "
                    f"of the {n} examples: pass num_examples= to value_and_grad"
                )
            scanned = tuple(length for length, atoms in zip(read.scans, read.view.stack, strict=True) if atoms)
            where = axes_lib.entries(shapes[leaf], read.view.start, [*read.scanned, *(flat[p] for p in units)])
            # Uses of the same entries are summed for each example before they are squared.
            key = known.setdefault((scanned, where.tobytes()), (layer.name, len(keys)))
            if key not in resolved.probes:
                keys.append(key)
                entries.append((k, where))
                width = math.prod(flat[p].size for p in units)
                resolved.probes[key] = jax.ShapeDtypeStruct((*scanned, min(rows), width), dtype)
            tap = ElementwiseTap(
                key,
                read.operand,
                eqn.primitive.name,
                tuple(atom.size for atom in flat),
                examples,
                tuple(units),
                read.sign,
                dtype,
            )
            _place(resolved, traced, read, tap)

    def finish(sums: list[jax.Array]) -> Unitwise:
        columns = [jnp.zeros(())] * len(leaves)
        for (k, where), g in zip(entries, sums, strict=True):
            g = jnp.moveaxis(g, -2, 0).reshape(g.shape[-2], -1)
            if not np.array_equal(where, np.arange(layer.d_out)):
                g = jnp.zeros((len(g), layer.d_out), g.dtype).at[:, where].set(g)
            columns[k] = columns[k] + g if columns[k].ndim else g
        g = jnp.stack(columns, axis=-1)
        return Unitwise(n * jnp.einsum("nup,nuq->upq", g, g, precision=jax.lax.Precision.HIGHEST))

    resolved.finish[layer.name] = keys, finish


def _accumulator(traced: Trace, reads: list[Read]) -> Any:
    """The dtype of the sums over all uses of a parameter, which need not have one dtype."""
    equations = [_equations(traced, read.path)[-1] for read in reads]
    dtypes = {var.aval.dtype for eqn in equations for var in (*eqn.invars, *eqn.outvars)}
    return accumulator(jnp.result_type(*dtypes))


def _place(resolved: Resolved, traced: Trace, read: Read, tap: KroneckerTap | ElementwiseTap) -> None:
    """Puts a tap behind an equation, and tells each scan around it whether the tap's probe is sliced there."""
    resolved.plan.at(read.path).taps[read.path[-1]] = tap
    plan, levels = resolved.plan, iter(read.view.stack)
    for index, eqn in zip(read.path, _equations(traced, read.path)[:-1], strict=False):
        plan = plan.children[index]
        if eqn.primitive.name == "scan":
            iterated = bool(next(levels))
            if plan.iterated.setdefault(tap.key, iterated) != iterated:
                raise unsupported(tap.key[0], "two operations in a scan", "only one of them iterates over it")


def _equations(traced: Trace, path: Sequence[int]) -> list[Any]:
    """The equations along a path, the one it ends at last."""
    jaxpr = traced.closed.jaxpr
    found = []
    for index in path:
        found.append(jaxpr.eqns[index])
        if len(found) < len(path):
            jaxpr, _ = inner_jaxpr(found[-1])
    return found


def _geometry(read: Read, eqn: Any) -> Convolution | Lookup | None:
    if read.op == "dense":
        return None
    numbers = eqn.params["dimension_numbers"]
    if read.op == "embedding":
        axis = row_axis(eqn)
        assert axis is not None
        column = tuple(numbers.start_index_map).index(axis)
        return Lookup(eqn.invars[0].aval.shape[axis], column, eqn.params["mode"] == FILL_OR_DROP)
    kernel, out = eqn.invars[1].aval.shape, eqn.outvars[0].aval.shape
    return Convolution(
        tuple(numbers.lhs_spec),
        tuple(kernel[k] for k in numbers.rhs_spec[2:]),
        tuple(eqn.params["window_strides"]),
        tuple(tuple(pair) for pair in eqn.params["padding"]),
        tuple(eqn.params["lhs_dilation"]),
        tuple(eqn.params["rhs_dilation"]),
        tuple(out[k] for k in numbers.out_spec[2:]),
    )
