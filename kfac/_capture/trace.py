"""Trace a loss at its batch and at twice as many examples: an axis that grows holds examples.

Nothing is guessed from a length. The batch consists of the arguments `batch_argnums`. Their leaves with the batch's
leading length are doubled, and the two programs are compared operation by operation.
"""

from __future__ import annotations

import collections
import itertools
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kfac._capture import equations
from kfac._capture.examples import place
from kfac._capture.program import AnotherProgramError, Program, compare, flat, mark_live
from kfac._checks import as_argnums
from kfac._layers import Layers
from kfac._leaves import leaf_paths
from kfac._mesh import AxisName, PyTree

# With more arrays of one length, leaving out each in turn is not tried: each try is a trace, and a network has many
# running averages.
FEW = 8

ArgKey = int | str
Argnums = ArgKey | Sequence[ArgKey] | None
AnyArray = Array | np.ndarray | jax.ShapeDtypeStruct


class Trace(NamedTuple):
    """A traced loss and how to call it with flat arguments.

    Attributes:
      program: the loss's program.
      arrays: the arrays among the arguments, without the parameters.
      rebuild: turns flat outputs into `(loss, aux)`.
      names: the parameter leaves' paths.
      shapes: the parameter leaves' shapes.
      batch: the known facts about the batch.
      loss: the abstract value of the loss, with its shape and dtype.
    """

    program: Program
    arrays: list[AnyArray]
    rebuild: Callable
    names: list[str]
    shapes: list[tuple[int, ...]]
    batch: Batch
    loss: Any


class Batch(NamedTuple):
    """The known facts about the batch.

    Attributes:
      num_examples: `n`; None if the loss hides its examples.
      argnums: the arguments that hold the examples: positions as `loss_fn` counts them, or keyword names.
      shared: names of leaves in these arguments that hold no examples, usually because of another leading length.
      unknown_batch_reason: why `n` is not known, as a sentence; empty if `n` is known.
      leaves: the batch's arrays; empty if unknown.
      several: whether the batch has arrays of different lengths that hold examples.
    """

    num_examples: int | None = None
    argnums: tuple[ArgKey, ...] = ()
    shared: tuple[str, ...] = ()
    unknown_batch_reason: str = ""
    leaves: tuple[Leaf, ...] = ()
    several: bool = False

    @property
    def where(self) -> str:
        return " and ".join(f"argument {k!r}" for k in self.argnums)


def is_array(x: object) -> TypeGuard[AnyArray]:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def is_typed_key(x: AnyArray) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def is_key(x: object) -> bool:
    """Whether `x` is a single PRNG key, as `jax.random.key` or `jax.random.PRNGKey` returns it."""
    if not is_array(x):
        return False
    if is_typed_key(x):
        return x.shape == ()
    return x.dtype == jnp.uint32 and x.shape in ((2,), (4,))


HOW_TO_SPLIT = (
    "split a flax nnx module with nnx.split(module, nnx.Param, ...), an equinox module with "
    "eqx.partition(module, eqx.is_inexact_array)"
)


def check_params(params: PyTree) -> tuple[list[str], list[tuple[int, ...]]]:
    """Return the paths and shapes of the parameter leaves, in the order of `jax.tree.leaves`.

    Raises:
      ValueError: there are no leaves, or two leaves have the same path.
      TypeError: a leaf is not an array, or is not real.
    """
    names = leaf_paths(params)
    leaves = jax.tree.leaves(params)
    if not names:
        raise ValueError("params has no leaves: there is nothing to train")
    for name, count in collections.Counter(names).items():
        if count > 1:
            raise ValueError(f"two parameter leaves have the path {name!r}; rename one")
    for name, leaf in zip(names, leaves, strict=True):
        if not is_array(leaf):
            raise TypeError(
                f"parameter {name!r} must be an array, but is of type {type(leaf).__name__}: {HOW_TO_SPLIT}"
            )
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise TypeError(
                f"parameter {name!r} has dtype {leaf.dtype}, but must be a real float. Parameters are the first "
                f"argument of loss_fn, before the batch; pass other arrays as further arguments: {HOW_TO_SPLIT}"
            )
    return names, [tuple(leaf.shape) for leaf in leaves]


def trace(
    loss_fn: Callable,
    has_aux: bool,
    params: PyTree,
    args: tuple,
    kwargs: dict[str, PyTree],
    batch_argnums: Argnums = None,
    shared: Collection[str] = (),
) -> Trace:
    """Trace `loss_fn(params, *args, **kwargs)`. Arguments that are not arrays are passed on unchanged.

    Args:
      loss_fn: the loss.
      has_aux: whether `loss_fn` returns a pair.
      params: the first argument.
      args: the other positional arguments.
      kwargs: the keyword arguments.
      batch_argnums: the arguments that hold the batch: positions, with `params` as 0, or keyword names. None: the first
        argument after `params`. If the loss cannot be traced with this argument doubled, the batch is the smallest set
        of arguments that can be doubled together.
      shared: names of arrays in these arguments that are known to hold no examples, as in `Batch`.
    """
    names, shapes = check_params(params)
    arrays, filled = _arrays_of((args, kwargs))
    leaves, structure = jax.tree.flatten(params)

    def jaxpr_of(arrays):
        filled_aux: Callable

        def flat_loss(leaves, arrays):
            nonlocal filled_aux
            args, kwargs = filled(arrays)
            out = loss_fn(jax.tree.unflatten(structure, leaves), *args, **kwargs)
            loss, aux = _checked(out, has_aux)
            aux_arrays, filled_aux = _arrays_of(aux)
            return [loss, *aux_arrays]

        closed = jax.make_jaxpr(flat_loss)(leaves, arrays)
        return closed, lambda outs: (outs[0], filled_aux(outs[1:]))

    closed, rebuild = jaxpr_of(arrays)

    def compared(batch: Batch) -> Program:
        larger = list[Any](arrays)
        for leaf in batch.leaves:
            x = arrays[leaf.position]
            aval: Any = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
            twice = (2 * aval.shape[0], *aval.shape[1:])
            larger[leaf.position] = aval.update(shape=twice)
        program = flat(closed)
        twin, _ = jaxpr_of(larger)
        compare(program, flat(twin), alike=batch.num_examples != 1)
        return program

    arguments: dict[ArgKey, PyTree] = dict(enumerate(args, 1))
    arguments.update(sorted(kwargs.items()))
    leaves_of_arguments = _leaves(arguments, shared)
    named = None
    if batch_argnums is not None:
        named = named_arguments(batch_argnums, arguments, len(args))
    candidates = _candidates(list(arguments), leaves_of_arguments, named)
    batch, program = _find_batch(compared, candidates)
    if named is None and program is not None:
        _warn_if_no_batch(batch, program, leaves_of_arguments, arrays)
    for key in named if named and batch.leaves else ():
        if key not in batch.argnums:
            raise ValueError(
                f"batch_argnums={batch_argnums!r} names argument {key!r}, which has no array with the "
                f"{batch.num_examples} rows of {batch.where}: name only arguments that have examples on their first "
                "axis. If the batch has several lengths, mark an output of each, see kfac.mark_output"
            )
    if program is None:
        program = flat(closed)
        mark_live(program)
    positions = {leaf.position for leaf in batch.leaves}
    place(program, len(names), positions, batch.num_examples)
    return Trace(program, arrays, rebuild, names, shapes, batch, closed.out_avals[0])


def _try(compared: Callable, batch: Batch) -> Program | str:
    """Return the program with its growth recorded, which `compared` computes, or the reason why that fails."""
    twice = f"{2 * (batch.num_examples or 0)} examples in {batch.where}"
    try:
        program = compared(batch)
    except AnotherProgramError:
        return f"with {twice} the loss is another program"
    # A model with a hard-coded batch size may raise anything.
    except Exception as error:
        reason, *_ = [*str(error).strip().splitlines(), ""]
        return (
            f"the loss cannot be traced with {twice} ({type(error).__name__}: {reason})"
        )
    mark_live(program)
    for op in program.walk():
        grown = op.longer or any(any(value.grown) for value in op.outputs)
        if op.alive and grown:
            return program
    return f"nothing that the loss depends on grows with {batch.where}"


def _only_longer_loops(program: Program) -> bool:
    """Return whether no operation reduces a growing axis. Taking out a row, such as a last time step, is allowed."""
    for op in program.walk():
        entering = any(any(value.grown) for value in op.inputs)
        leaving = any(any(value.grown) for value in op.outputs)
        takes = op.name in ("slice", "dynamic_slice")
        if op.alive and entering and not leaving and not op.inner and not takes:
            return False
    return True


def _find_batch(
    compared: Callable, candidates: Iterator[list[Batch]]
) -> tuple[Batch, Program | None]:
    """Return the batch, and the program with its growth recorded.

    The first stage with a candidate that can be doubled decides. If several candidates can, all are tried as a single
    batch. Unless exactly one candidate is left, the loss hides its examples, and the program is None. A candidate that
    only makes loops longer is the last resort: a frozen stack of layers does so, but seldom a batch.
    """
    doubles: list[tuple[Batch, Program]] = []
    loops: list[tuple[Batch, Program]] = []
    reasons = []
    for batches in candidates:
        for batch in batches:
            program = _try(compared, batch)
            if isinstance(program, str):
                reasons.append(program)
            elif _only_longer_loops(program):
                loops.append((batch, program))
            else:
                doubles.append((batch, program))
        if doubles:
            break
    doubles = doubles or loops[:1]
    if len(doubles) == 1:
        return doubles[0]
    marked = _growing_with_marks(doubles)
    if marked:
        batch = _batch(marked)
        program = _try(compared, batch)
        if not isinstance(program, str):
            return batch, program
    several = [batch for batch, _ in doubles]
    batch = _batch(_leaves_of(several))
    return batch._replace(
        num_examples=None, leaves=(), unknown_batch_reason=_why_hidden(several, reasons)
    ), None


def _arrays_of(
    tree: PyTree,
) -> tuple[list[AnyArray], Callable]:
    """Return the arrays among a tree's leaves, and a function that puts other arrays in their place."""
    leaves, structure = jax.tree.flatten(tree)
    arrays = [leaf for leaf in leaves if is_array(leaf)]
    # Without the arrays: they may be tracers, which must not outlive their trace. A tree has no leaf that is None.
    others = [None if is_array(leaf) else leaf for leaf in leaves]

    def filled(arrays):
        queue = iter(arrays)
        full = [next(queue) if other is None else other for other in others]
        return jax.tree.unflatten(structure, full)

    return arrays, filled


def _growing_with_marks(doubles: Sequence[tuple[Batch, Program]]) -> list[Leaf]:
    """Return the leaves of the candidates with which a marked output grows.

    Examples may share the other candidates, for example a table of anchors. The result is empty if a marked output
    grows with two candidates.
    """
    batches = []
    growing = []
    for batch, program in doubles:
        marks = [op for op in program.walk() if op.alive and equations.mark(op.eqn)]
        longer = [k for k, op in enumerate(marks) if any(op.outputs[0].grown[:-1])]
        growing += longer
        if longer:
            batches.append(batch)
    return [] if len(set(growing)) < len(growing) else _leaves_of(batches)


def _leaves_of(batches: Sequence[Batch]) -> list[Leaf]:
    return [leaf for batch in batches for leaf in batch.leaves]


def _why_hidden(several: Sequence[Batch], reasons: Sequence[str]) -> str:
    if not several:
        return (*reasons, "no argument of the loss has an array with a leading axis")[0]
    parts = [f"the {batch.num_examples} of {batch.where}" for batch in several]
    message = f"the examples may be {' or '.join(parts)}"
    if len({batch.argnums for batch in several}) < len(several):
        message += ": what is no batch belongs in an argument of its own"
    return message


def split_over(traced: Trace) -> AxisName | None:
    """Return the explicit mesh axes along which all arrays of the batch are split; None if the arrays differ."""
    specs = set()
    for leaf in traced.batch.leaves:
        array = traced.arrays[leaf.position]
        if isinstance(array, Array):
            specs.add(jax.typeof(array).sharding.spec[0])
    return specs.pop() if len(specs) == 1 else None


def _checked(out: Any, has_aux: bool) -> tuple[AnyArray, PyTree]:
    """Return the loss and `aux`, or raise if the loss function has returned something else."""
    loss = out
    aux = None
    if has_aux:
        if not isinstance(out, tuple) or len(out) != 2:
            what = f"a {type(out).__name__}"
            if hasattr(out, "shape"):
                what = f"an array of shape {jnp.shape(out)}"
            raise TypeError(
                f"with has_aux=True loss_fn must return (loss, aux), but it returned {what}: leave has_aux out"
            )
        loss, aux = out
    what = type(loss).__name__
    if is_array(loss):
        if loss.shape == () and jnp.issubdtype(loss.dtype, jnp.floating):
            return loss, aux
        what = f"shape {loss.shape}, dtype {loss.dtype}"
    hint = "" if has_aux else "; for a pair (loss, aux) pass has_aux=True"
    raise TypeError(
        f"loss_fn must return a real scalar, the mean loss, but returned {what}{hint}"
    )


class Leaf(NamedTuple):
    """An array in the arguments: its position among all arrays, its argument, its name, and its leading length.

    The length is None if the array cannot hold examples: a scalar, a PRNG key, or an array that is known to be shared.
    """

    position: int
    argument: ArgKey
    name: str
    length: int | None


def _candidates(
    keys: Sequence[ArgKey],
    leaves: Sequence[Leaf],
    named: Sequence[ArgKey] | None,
) -> Iterator[list[Batch]]:
    """Yield the candidates for the batch in stages. The first stage with a candidate that can be doubled decides.

    - All arrays of the chosen arguments that have the same leading length. Without a choice, the first argument is
      taken.
    - All but one of these arrays, if they are few. A mask may have the batch's length by chance.
    - Without a choice, the first argument with as few others as possible, then other arguments without the first.
    """
    alike = _of_equal_length(leaves, [1] if named is None else named)
    yield [_batch(group, leaves) for group in alike]
    batches = []
    for group in alike:
        if 1 < len(group) <= FEW:
            for rest in itertools.combinations(group, len(group) - 1):
                batches.append(_batch(rest, leaves))
    yield batches
    if named is not None:
        return
    others = [key for key in keys if key != 1]
    for start in ((1,), ()):
        # The first argument alone was tried above.
        for count in range(1, len(others) + 1):
            batches = []
            for more in itertools.combinations(others, count):
                chosen = {*start, *more}
                for group in _of_equal_length(leaves, chosen):
                    if {leaf.argument for leaf in group} == chosen:
                        batches.append(_batch(group, leaves))
            yield batches


def _warn_if_no_batch(
    batch: Batch,
    program: Program,
    leaves: Sequence[Leaf],
    arrays: Sequence[AnyArray],
) -> None:
    """Warn if time steps or layers may have been taken for examples.

    Beside a time-major sequence `[time, examples, ...]`, labels `[examples]` are as long as its second axis. So are
    many arrays without examples, such as frozen weights and scales, so only integers count.
    """
    if len(batch.leaves) == 1:
        [sequence] = batch.leaves
        width = arrays[sequence.position].shape[1:2]
        for leaf in leaves if width != (sequence.length,) else ():
            is_integer = jnp.issubdtype(arrays[leaf.position].dtype, jnp.integer)
            if is_integer and (leaf.length,) == width:
                warnings.warn(
                    f"the {sequence.length} rows of {sequence.name} count as examples, but {leaf.name} has "
                    f"{leaf.length}, as many as the second axis of {sequence.name}. If the batch is time-major, put "
                    f"examples on the first axis; if it is not, batch_argnums={sequence.argument!r} says so",
                    stacklevel=2,
                )
                return
    # A loop over parts of a batch, as in a loss by chunks of tokens, has another length.
    lengths = {op.length for op in program.walk() if op.alive and op.longer}
    if batch.num_examples in lengths and _only_longer_loops(program):
        warnings.warn(
            f"the {batch.num_examples} rows of {batch.where} count as examples, but the loss only loops over them, as "
            f"over time steps or layers. If they are examples, batch_argnums={batch.argnums} says so; otherwise put "
            "examples on the first axis, and write no batch size into the loss",
            stacklevel=2,
        )


def leaf_name(key: ArgKey, path: Any) -> str:
    """Return the name of an array in the argument `key`, as in `Batch.shared`."""
    return f"argument {key!r}{jax.tree_util.keystr(path)}"


def leading_length(
    leaf: object,
    name: str,
    shared: Collection[str],
) -> int | None:
    """Return the length of a leaf's first axis, or None if the axis cannot hold examples.

    The leaf, called `name`, holds no examples if it is a scalar, a PRNG key or not an array, or if it is in `shared`.
    """
    if not is_array(leaf) or not leaf.shape or is_key(leaf) or name in shared:
        return None
    return leaf.shape[0]


def _leaves(arguments: Mapping[ArgKey, PyTree], shared: Collection[str]) -> list[Leaf]:
    """Return all arrays in the arguments. The names in `shared` are known to hold no examples."""
    leaves: list[Leaf] = []
    for key, argument in arguments.items():
        for path, leaf in jax.tree.leaves_with_path(argument):
            if is_array(leaf):
                name = leaf_name(key, path)
                length = leading_length(leaf, name, shared)
                leaves.append(Leaf(len(leaves), key, name, length))
    return leaves


def _of_equal_length(
    leaves: Sequence[Leaf], keys: Collection[ArgKey]
) -> list[list[Leaf]]:
    """Group the leaves of the arguments `keys` by length, the largest group first."""
    groups: dict[int, list[Leaf]] = {}
    for leaf in leaves:
        if leaf.argument in keys and leaf.length:
            groups.setdefault(leaf.length, []).append(leaf)
    return sorted(groups.values(), key=len, reverse=True)


def _batch(chosen: Sequence[Leaf], leaves: Sequence[Leaf] = ()) -> Batch:
    """Return the batch that consists of the `chosen` leaves. All other `leaves` of their arguments are shared."""
    argnums = dict.fromkeys(leaf.argument for leaf in chosen)
    lengths = {leaf.length or 0 for leaf in chosen}
    shared = []
    for leaf in leaves:
        if leaf.argument in argnums and leaf not in chosen:
            shared.append(leaf.name)
    return Batch(
        max(lengths, default=0),
        tuple(argnums),
        tuple(shared),
        leaves=tuple(chosen),
        several=len(lengths) > 1,
    )


def named_arguments(
    batch_argnums: Argnums,
    arguments: Collection[ArgKey],
    count: int,
) -> list[ArgKey]:
    """Return the arguments that `batch_argnums` names.

    `arguments` are all arguments after `params`; the first `count` of them are positional.

    Raises:
      ValueError: a named argument does not exist, or is `params`.
    """
    keys: dict[ArgKey, None] = {}
    for key in as_argnums(batch_argnums):
        if isinstance(key, int) and -count - 1 < key < 0:
            key += count + 1
        if key not in arguments:
            there = ", ".join(map(repr, arguments)) or "not given by position"
            raise ValueError(
                f"batch_argnums={batch_argnums!r} has {key!r}, but the arguments after params are {there}"
            )
        keys[key] = None
    return list(keys)


def batch_arguments(
    layers: Layers,
    args: tuple,
    kwargs: Mapping[str, PyTree],
) -> tuple[Argnums, Collection[str]]:
    """Return the arguments that hold the examples, and the shared arrays in them, as `layers` knows them.

    The result is `(None, ())` if the call has no such arguments.
    """
    arguments = {*range(1, len(args) + 1), *kwargs}
    present = tuple(key for key in layers.batch_argnums if key in arguments)
    return (present, layers._shared_arrays) if present else (None, ())
