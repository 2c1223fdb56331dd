"""Group the parameter reads of a loss into layers, each with a kind of block."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax

from kfac._capture.find_reads import Reads
from kfac._capture.make_layers import (
    LayerMaker,
    Uses,
    bounded,
    has_example_gradients,
    main_use,
)
from kfac._capture.outputs import Marks, find_marks
from kfac._capture.program import Program
from kfac._capture.rules import Rule, leaves_with, match_rules, with_multipliers
from kfac._capture.states import Inexact, Use
from kfac._capture.trace import Argnums, Trace, trace
from kfac._checks import (
    RENAMED,
    check,
    check_function,
    check_given,
    check_rules,
    with_hints,
)
from kfac._layers import (
    KRONECKER_KINDS,
    UNREACHED,
    Layer,
    Layers,
    UnsupportedLayerError,
)
from kfac._leaves import Layout, find_param_specs
from kfac._mesh import on_mesh


@with_hints(RENAMED)
@on_mesh
def find_layers(
    loss_fn: Callable,
    params: Any,
    *args: Any,
    has_aux: bool = False,
    rules: Mapping[str, str | float] | None = None,
    batch_argnums: Argnums = None,
    max_factor_dim: int | None = None,
    strict: bool = False,
    kwargs: Mapping[str, Any] | None = None,
) -> Layers:
    """Find how each parameter leaf of `loss_fn` will be preconditioned.

    ::

        layers = kfac.find_layers(loss_fn, params, batch)
        print(layers)

    Traces `loss_fn(params, *args, **kwargs)` without computing anything. Follows every parameter leaf through shape and
    dtype operations to the operations that read it:

    - The kernel of a matrix product, convolution or lookup gets a Kronecker block, together with its bias.
    - A normalisation scale gets a unit-wise block, together with its shift. A vector in another elementwise operation,
      such as `x / exp(log_std)`, gets such a block by itself.
    - Any other leaf that is added, or copied for each example like a class token, gets a diagonal block.
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
      rules: a mapping from regular expressions, which are searched in leaf paths (joined by `/`), to the treatment of
        the leaves that match, such as `{"^embed/": "skip", "^head/": "gradient", "conv": "reduce", "Dense_": 0.5}`.

        - `"skip"`: no curvature block. The gradient passes through the preconditioner unchanged.
        - `"gradient"`: the gradient's own factors (Gupta et al. 2018; Vyas et al. 2024). No statistics are captured.
        - `"reduce"`: a matrix product or convolution uses the "reduce" setting of Eschenhagen et al. 2023: inputs are
          averaged and output gradients summed over an example's positions before products are formed. All other
          kernels, and all lookups, use the "expand" setting.
        - A positive number multiplies the layer's steps. Weight decay is not multiplied.

        A leaf takes the first string whose pattern matches. A layer, including its bias, takes the first number whose
        pattern matches one of its leaves.
      batch_argnums: the arguments that hold the examples on the first axis of their leaves: positions, or names of
        keyword arguments. Positions count from `params`, which is 0. Negative positions count from the end. The batch
        consists of the leaves with a common leading length that can be doubled in the second trace. Other leaves of
        these arguments are shared by all examples, and the table names them. None: the first argument after `params`.
        If this argument cannot be doubled, or only makes loops longer, as a frozen stack of layers does, as few
        arguments as possible that share a leading length. The examples must be on the first axis: the steps of a
        time-major batch would be taken for examples.
      max_factor_dim: the maximum number of rows of a Kronecker factor. A larger factor is kept as diagonal blocks of at
        most `max_factor_dim` neighbouring rows. The blocks are as few and as equal as possible, and the table mentions
        them. If such a factor has 30,000 rows or more, as a vocabulary has, only its diagonal is kept. In both cases
        the kernel is cut into pieces, each with a block of its own, as in Distributed Shampoo (Shi et al. 2023). Along
        a diagonal factor, the number of pieces is a power of two, and each piece has at most 4,096 rows. Inverting a
        factor with `d` rows takes `O(d^3)` work and `O(d^2)` memory. None: 8,192; in addition, a dense kernel's longer
        side is cut if it has at least 256 rows. If each example reads the kernel at several positions, or if their
        number is not known, it is cut from 1,024 rows on, except with `"reduce"`. The blocks are then about as long
        as the shorter side, and there are at most 8. A kernel that would need more than 8 blocks stays whole if its
        shorter side has fewer than 32 rows.
      strict: whether to raise an error if a leaf meets data in a way without exact rows.
      kwargs: the keyword arguments of `loss_fn`, a dictionary.

    Returns:
      `Layers`: print it to see every parameter.

    Raises:
      UnsupportedLayerError: `strict` is set and leaves have no exact rows. The message names all these leaves, with
        reasons and a way out.
      ValueError: a rule matches no leaf, has no effect, or is not a regular expression with such a value; `"reduce"`
        matches a kernel whose sums over an example's positions are unknown; `max_factor_dim` is not a positive int;
        `batch_argnums` names no argument; `params` has no leaves, or two leaves with the same path; or an output is
        marked inside a construct that cannot be followed.
      TypeError: `loss_fn` does not return a real scalar, or a parameter leaf is not a real array.
    """
    check_function(loss_fn)
    check(has_aux=has_aux, strict=strict)
    pairs = check_rules(rules)
    check_given(max_factor_dim=max_factor_dim, batch_argnums=batch_argnums)
    traced = trace(loss_fn, has_aux, params, args, dict(kwargs or {}), batch_argnums)
    options = Layers(
        # There are no layers and paths yet, only options.
        (),
        (),
        pairs,
        max_factor_dim,
        structure=jax.tree.structure(params),
        param_specs=find_param_specs(params),
    )
    analysis = layers_of(traced, options, find_marks(traced))
    for rule in analysis.rules:
        paths = {traced.names[leaf] for leaf in rule.leaves}
        matched = [x for x in analysis.layers if not paths.isdisjoint(x.params)]
        reduced = {x.positions for x in matched if x.weight_sharing == "reduce"}
        if rule.value == "reduce" and reduced == {1}:
            raise ValueError(
                f"{rule.text} has no effect: each example reads these kernels at a single position"
            )
    if strict and analysis.reads.inexact:
        lines = []
        patterns = []
        for leaf, read in sorted(analysis.reads.inexact.items()):
            name = traced.names[leaf]
            lines.append(f"\n  {name!r} is read by {read.operation}: {read.reason}")
            patterns.append(f"{f'^{re.escape(name)}$'!r}: 'skip'")
        raise UnsupportedLayerError(
            f"{len(lines)} parameter(s) have no exact rows for each example:{''.join(lines)}\n"
            "Without strict=True they get the gradient's own factors; "
            f"rules={{{', '.join(patterns)}}} leaves their gradients as they are."
        )
    cut = tuple(bounded(layer, max_factor_dim) for layer in analysis.layers)
    return dataclasses.replace(analysis.layers, layers=cut)


class Analysis(NamedTuple):
    """The layers of a loss, and how its program uses the layers' parameters.

    Attributes:
      layers: the layers, with whole factors.
      reads: how the program uses its parameters.
      uses: maps the path of each leaf with exact rows to the leaf's uses.
      num_examples: the number of examples that the loss averages over, or None if the number is not clear.
      rules: the user's rules, with the leaves that each of them decides.
    """

    layers: Layers
    reads: Reads
    uses: dict[str, list[Use]]
    num_examples: int | None
    rules: list[Rule]


def layers_of(
    traced: Trace, options: Layers, marks: Marks, num_examples: int | None = None
) -> Analysis:
    """Group the uses of each leaf into layers.

    Args:
      traced: the traced loss.
      options: `Layers` that hold the options of `find_layers`. Their layers are not used.
      marks: the marked outputs of the loss.
      num_examples: the number of examples, if the user gave it.
    """
    names = traced.names
    batch = traced.batch
    empty = {leaf for leaf, shape in enumerate(traced.shapes) if 0 in shape}
    rules = match_rules(options.rules, names)
    everything = set(range(len(names)))
    skipped = leaves_with("skip", rules, everything, "parameter") | empty
    reads = Reads(traced, skipped)
    left = everything - skipped
    chosen = left & leaves_with("gradient", rules, left, "parameter with elements")
    # The uses of each leaf that count, in program order.
    uses: Uses = {}
    for use in reads.uses.values():
        if not use.dropped:
            uses.setdefault(use.leaf, []).append(use)
    order = {leaf: place for place, leaf in enumerate(uses)}
    kernels, companions = _keep_exact(uses, reads, chosen, batch.num_examples)
    products = {k for k in kernels if main_use(uses[k]).read.op != "embedding"}
    reduced = leaves_with(
        "reduce", rules, products, "kernel of a product with exact rows"
    )
    kernel_uses = {}
    for leaf in kernels:
        kernel_uses[names[leaf]] = [use for use in uses[leaf] if not use.late]
    n, unclear = marks.num_examples(
        num_examples, batch, kernel_uses, reads.unmarked, reads.beside_others
    )

    # Make a layer for each leaf. A kernel shares its layer with its bias, and a scale with its shift.
    count = batch.num_examples or n
    maker = LayerMaker(traced, reads, uses, order, count)
    reached = traced.program.outputs[0].leaves | chosen
    notes = dict.fromkeys(left - reached, UNREACHED)
    notes |= dict.fromkeys(skipped, "skipped by the user")
    notes |= dict.fromkeys(empty, "has no elements")
    found = []
    for leaf, name in enumerate(names):
        if leaf in companions.values():
            continue
        leaves = [leaf, companions[leaf]] if leaf in companions else [leaf]
        if leaf in notes:
            layer = Layer(
                name, "skipped", (name,), (traced.shapes[leaf],), note=notes[leaf]
            )
        elif leaf in kernels:
            layer = maker.kronecker(leaves, leaf in reduced)
        elif leaf in uses:
            layer = maker.elementwise(leaves)
        else:
            layer = maker.gradient(leaf, leaf in chosen)
        found.append(layer)
    found = with_multipliers(found, rules, names)
    inputs = traced.program.inputs[: len(names)]
    wide = any(value.dtype == "float64" for value in inputs)
    needs_number = n is None and any(layer.captured for layer in found)
    layers = dataclasses.replace(
        options,
        layers=_named(found, names),
        paths=tuple(names),
        num_examples=count,
        batch_argnums=batch.argnums,
        _shared_arrays=batch.shared,
        _unknown_batch_reason=batch.unknown_batch_reason,
        dtype="float64" if wide else "float32",
        _unclear=unclear if needs_number else "",
        _frozen_flops=_frozen_flops(traced.program) / (batch.num_examples or 1),
    )
    uses_by_path = {names[leaf]: of_leaf for leaf, of_leaf in uses.items()}
    return Analysis(layers, reads, uses_by_path, n, rules)


def _frozen_flops(program: Program) -> float:
    """Return the FLOPs of the batch's products with frozen kernels, such as a published network's below adapters.

    They count once for the forward pass, and once more if the backward pass goes through them.
    """
    flops = 0.0
    for op in program.walk():
        if op.name not in ("dot_general", "conv_general_dilated"):
            continue
        kernels = [x for x in op.inputs if not (x.of_batch or x.leaves)]
        if len(kernels) == 1:
            iterations = math.prod(loop.length for loop in op.loops)
            terms = iterations * op.outputs[0].size * op.contracted
            flops += 2 * terms * (1 + bool(op.outputs[0].leaves))
    return flops


def _named(layers: list[Layer], names: Collection[str]) -> tuple[Layer, ...]:
    """Name each layer after its module if the module has no other layer, otherwise after its first leaf."""
    modules = [layer.params[0].rpartition("/")[0] for layer in layers]
    for k, module in enumerate(modules):
        # A key in `params` may contain a slash, so a module's path may equal a leaf's path.
        if module and modules.count(module) == 1 and module not in names:
            layers[k] = dataclasses.replace(layers[k], name=module)
    return tuple(layers)


# -- leaves with exact rows --------------------------------------------------------------------------------------------


def _keep_exact(
    uses: Uses,
    reads: Reads,
    chosen: set[int],
    n: int | None,
) -> tuple[set[int], dict[int, int]]:
    """Remove leaves without exact rows from `uses`, and note the reasons in `reads.inexact`.

    Args:
      uses: the uses of each leaf. The leaves in `reads.inexact` and `chosen` are removed, too.
      reads: how the program uses its parameters.
      chosen: the leaves for which the user chose the gradient's own factors.
      n: the number of examples, or None if unknown.

    Returns:
      The kernels, and their companions.
    """
    kernels = set()
    for leaf, of_leaf in uses.items():
        if any(use.read.op in KRONECKER_KINDS for use in of_leaf):
            kernels.add(leaf)
            # A penalty that each example's loss contains, such as `w[0, 0]`, does not count.
            uses[leaf] = [
                use for use in of_leaf if use.read.op != "add" or not use.op.summed
            ]
    for leaf in kernels - reads.inexact.keys():
        reason, layout = _why_inexact(uses[leaf])
        if reason:
            reads.inexact[leaf] = _inexact(uses[leaf], reason, layout)
    for leaf in (reads.inexact.keys() | chosen) & uses.keys():
        del uses[leaf]
    kernels &= uses.keys()
    companions = _companions(reads, uses, kernels)
    # A bias is a column of its kernel's matrix, so the examples that the bias meets need not be known.
    biases = {companions[leaf] for leaf in kernels & companions.keys()}
    for leaf in uses.keys() - kernels - biases:
        reason = ""
        if leaf in reads.apart and any(use.view.uneven for use in uses[leaf]):
            reason = "a term of the loss without the examples depends on it, too"
        elif n is None:
            reason = "which examples it meets is not known"
        elif not has_example_gradients(uses[leaf], n):
            reason = "the examples it meets are not told apart, or in another order"
        if reason:
            reads.inexact[leaf] = _inexact(uses.pop(leaf), reason)
    # Drop the pairs in which a leaf has just been removed.
    return kernels, {a: b for a, b in companions.items() if a in uses and b in uses}


def _inexact(
    uses: list[Use],
    reason: str,
    layout: Layout | None = None,
) -> Inexact:
    read_by = sorted({use.op.name for use in uses})
    return Inexact(" and ".join(read_by), reason, layout)


def _why_inexact(uses: list[Use]) -> tuple[str, Layout | None]:
    """Return why a kernel's uses give no exact block, and the layout of the kernel's matrices (None if unknown).

    The reason is empty if the block is exact.
    """
    products = [use for use in uses if use.read.op in KRONECKER_KINDS]
    main = main_use(products)
    if len(products) < len(uses):
        return "besides a product, an elementwise operation reads it", main.layout
    alike = [use for use in products if use.layout == main.layout]
    if len({use.read.op == "embedding" for use in alike}) > 1:
        reason = "of inputs that are looked up there are only counts, so the two are no one block"
        return reason, main.layout
    if len({use.picked for use in products}) > 1:
        return "the operations disagree on the parts that it is cut into", None
    for use in products:
        if use.layout == main.layout:
            continue
        if use.read.op == "embedding" or use.layout != main.layout.transposed:
            return "the operations disagree on which of its axes are inputs", None
    if len({tuple(filter(None, use.view.stack)) for use in products}) > 1:
        return "the operations disagree on how it is stacked", None
    return "", None


def _companions(
    reads: Reads,
    uses: Uses,
    kernels: set[int],
) -> dict[int, int]:
    """Return the bias of each kernel and the shift of each scale.

    Such a leaf is only added to outputs of this kernel or scale, at most once to each. A shift is added to every output
    of its scale.
    """
    companions = {}
    for leaf, of_leaf in uses.items():
        # The ops to whose results the leaf is added.
        added = [use for use in of_leaf if use.read.op == "add"]
        joined = [use.joined[0] for use in added if use.joined]
        partners = {reads.uses[op].leaf for op in joined}
        if len(set(joined)) < len(of_leaf) or len(partners) > 1:
            continue
        partner = partners.pop()
        if partner in companions or partner not in uses:
            continue
        of_partner = uses[partner]
        if partner in kernels:
            # Some uses of the kernel may lack the bias. A subtracted bias does not correspond to a homogeneous 1. The
            # same holds for a bias of a kernel that is also read as its transpose.
            positive = all(use.read.sign == 1 for use in added)
            fits = positive and len({use.layout for use in of_partner}) == 1
        else:
            scales = all(reads.uses[op].read.op == "mul" for op in joined)
            fits = scales and len(joined) == len(of_partner)
        if fits:
            companions[partner] = leaf
    return companions
