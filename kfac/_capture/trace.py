"""Trace a loss at its batch and at twice as many examples: an axis that grows holds examples.

Nothing is guessed from a length. The batch consists of the arguments `batch_argnums`. Their leaves with the batch's
leading length are doubled, and the two programs are compared operation by operation.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kfac._capture import equations
from kfac._capture.examples import place
from kfac._capture.program import AnotherProgramError, Program, compare, flat, mark_live
from kfac._checks import as_argnums
from kfac._layers import Layers, leaf_paths
from kfac._varying import AxisName

# With more arrays of one length, leaving out each in turn is not tried: each try is a trace, and a network has many
# running averages.
FEW = 8

Argnums = int | str | Sequence[int | str] | None


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
    arrays: list[Any]
    rebuild: Callable[[Sequence[Any]], Any]
    names: list[str]
    shapes: list[tuple[int, ...]]
    batch: Batch
    loss: Any


@dataclasses.dataclass(frozen=True)
class Batch:
    """The known facts about the batch.

    Attributes:
      num_examples: `n`; None if the loss hides its examples.
      argnums: the arguments that hold the examples: positions as `loss_fn` counts them, or keyword names.
      shared: names of leaves in these arguments that hold no examples, usually because of another leading length.
      hidden: why `n` is not known, as a sentence; empty if `n` is known.
      lies: the explicit mesh axes along which all arrays of the batch are split.
      leaves: the positions of the batch's arrays in `Trace.arrays`; None if unknown.
      several: whether the batch has arrays of different lengths that hold examples.
    """

    num_examples: int | None = None
    argnums: tuple[int | str, ...] = ()
    shared: tuple[str, ...] = ()
    hidden: str = ""
    lies: AxisName | None = None
    leaves: frozenset[int] | None = None
    several: bool = False

    @property
    def where(self) -> str:
        return " and ".join(f"argument {k!r}" for k in self.argnums)


def is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def is_key(x: Any) -> bool:
    """Whether `x` is a single PRNG key, as `jax.random.key` or `jax.random.PRNGKey` returns it."""
    if not is_array(x):
        return False
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x.shape == ()
    return x.dtype == jnp.uint32 and x.shape in ((2,), (4,))


HOW_TO_SPLIT = (
    "split a flax nnx module with nnx.split(module, nnx.Param, ...), an equinox module with "
    "eqx.partition(module, eqx.is_inexact_array)"
)


def check_params(params: Any) -> tuple[list[str], list[tuple[int, ...]]]:
    """Return the paths and shapes of the parameter leaves, in the order of `jax.tree.leaves`.

    Raises:
      ValueError: there are no leaves, or two leaves have the same path.
      TypeError: a leaf is not an array, or is not real.
    """
    names, leaves = leaf_paths(params), jax.tree.leaves(params)
    if not names:
        raise ValueError("params has no leaves: there is nothing to train")
    repeated = [name for name, count in collections.Counter(names).items() if count > 1]
    if repeated:
        raise ValueError(
            f"two parameter leaves have the path {repeated[0]!r}; rename one"
        )
    for name, leaf in zip(names, leaves, strict=True):
        if not is_array(leaf):
            kind = type(leaf).__name__
            raise TypeError(
                f"parameter {name!r} must be an array, but is of type {kind}: {HOW_TO_SPLIT}"
            )
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise TypeError(
                f"parameter {name!r} has dtype {leaf.dtype}, but must be real. Parameters are the first argument of "
                f"loss_fn, before the batch; pass other arrays as further arguments: {HOW_TO_SPLIT}"
            )
    return names, [tuple(leaf.shape) for leaf in leaves]


def trace(
    loss_fn: Callable,
    has_aux: bool,
    params: Any,
    args: tuple,
    kwargs: dict,
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
        argument after `params`; if the loss cannot be traced with twice as many examples in it, the fewest arguments
        with which it can.
      shared: names of arrays in these arguments that are known to hold no examples, as in `Batch`.
    """
    names, shapes = check_params(params)
    arrays, filled = _arrays_of((args, kwargs))
    flat_params, params_tree = jax.tree.flatten(params)

    def traced(arrays):
        filled_aux: list[Callable] = []  # set while `flat_loss` is traced

        def flat_loss(flat_params, arrays):
            call_args, call_kwargs = filled(arrays)
            out = loss_fn(
                jax.tree.unflatten(params_tree, flat_params), *call_args, **call_kwargs
            )
            loss, aux = _checked(out, has_aux)
            aux_arrays, with_arrays = _arrays_of(aux)
            filled_aux.append(with_arrays)
            return [loss, *aux_arrays]

        closed = jax.make_jaxpr(flat_loss)(flat_params, arrays)
        return closed, lambda outs: (outs[0], filled_aux[-1](outs[1:]))

    closed, rebuild = traced(arrays)

    def doubled(batch: Batch) -> Program | str:
        """Return the program with its growth at twice as many examples recorded, or why this fails."""
        n, leaves = batch.num_examples or 0, batch.leaves or ()
        twice = f"{2 * n} examples in {batch.where}"
        try:
            twin, _ = traced(
                [_twice(x) if k in leaves else x for k, x in enumerate(arrays)]
            )
            program = flat(closed)
            compare(program, flat(twin), alike=n > 1)
        except AnotherProgramError:
            return f"with {twice} the loss is another program"
        except (
            Exception
        ) as error:  # a model with a hard-coded batch size may raise anything
            reason, *_ = [*str(error).strip().splitlines(), ""]
            return f"the loss cannot be traced with {twice} ({type(error).__name__}: {reason})"
        mark_live(program)
        if any(
            op.longer or any(any(value.grown) for value in op.outputs)
            for op in program.walk()
            if op.alive
        ):
            return program
        return f"nothing that the loss depends on grows with {batch.where}"

    # The first stage with a candidate that can be doubled decides. If several candidates can, all are tried as a single
    # batch. Unless exactly one candidate is left, the loss hides its examples.
    doubles: list[tuple[Batch, Program]] = []
    hidden: list[str] = []
    for batches in _candidates(args, kwargs, batch_argnums, shared):
        tried = [(batch, doubled(batch)) for batch in batches]
        doubles = [
            (batch, program) for batch, program in tried if isinstance(program, Program)
        ]
        hidden += [program for _, program in tried if isinstance(program, str)]
        if doubles:
            break
    together = _together(doubles) if len(doubles) > 1 else None
    if together and isinstance(joined := doubled(together), Program):
        doubles = [(together, joined)]
    if len(doubles) == 1:
        ((batch, program),) = doubles
        batch = dataclasses.replace(
            batch, lies=_lies(arrays[k] for k in batch.leaves or ())
        )
    else:
        program, several = flat(closed), [batch for batch, _ in doubles]
        batch = dataclasses.replace(
            _merged(several),
            num_examples=None,
            leaves=None,
            hidden=_why_hidden(several, hidden),
        )
        mark_live(program)
    place(program, len(names), batch.leaves, batch.num_examples)
    return Trace(program, arrays, rebuild, names, shapes, batch, closed.out_avals[0])


def _arrays_of(tree: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """Return the arrays among a tree's leaves, and a function that puts other arrays in their place."""
    leaves, structure = jax.tree.flatten(tree)
    others = [None if is_array(leaf) else (leaf,) for leaf in leaves]

    def filled(arrays):
        queue = iter(arrays)
        return jax.tree.unflatten(
            structure, [next(queue) if other is None else other[0] for other in others]
        )

    return [leaf for leaf in leaves if is_array(leaf)], filled


def _together(doubles: Sequence[tuple[Batch, Program]]) -> Batch | None:
    """Merge candidates into a single batch, with the length of the longest.

    A candidate is left out if no marked output grows with it: examples may share such an array, for example a table of
    anchors. The result is None if all candidates are left out, or if a marked output grows with two of them.
    """
    marked = [
        [op for op in p.walk() if op.alive and equations.mark(op.eqn)]
        for _, p in doubles
    ]
    longer = [[any(op.outputs[0].grown[:-1]) for op in ops] for ops in marked]
    batches = [
        batch for (batch, _), each in zip(doubles, longer, strict=True) if any(each)
    ]
    return (
        _merged(batches)
        if batches and all(sum(each) <= 1 for each in zip(*longer, strict=True))
        else None
    )


def _merged(batches: Sequence[Batch]) -> Batch:
    lengths = {batch.num_examples or 0 for batch in batches}
    argnums = tuple(dict.fromkeys(k for batch in batches for k in batch.argnums))
    leaves = frozenset[int]().union(*(batch.leaves or () for batch in batches))
    return Batch(
        max(lengths, default=0), argnums, leaves=leaves, several=len(lengths) > 1
    )


def _why_hidden(several: Sequence[Batch], reasons: Sequence[str]) -> str:
    if several:
        each = " or ".join(
            f"the {batch.num_examples} of {batch.where}" for batch in several
        )
        apart = len({batch.argnums for batch in several}) == len(several)
        return f"the examples may be {each}{': what is no batch belongs in an argument of its own' * (not apart)}"
    return (
        reasons[0]
        if reasons
        else "no argument of the loss has an array with a leading axis"
    )


def _lies(leaves: Iterable[Any]) -> AxisName | None:
    """Return the explicit mesh axes along which all arrays are split; None if the arrays differ."""
    specs = {
        jax.typeof(leaf).sharding.spec[0]
        for leaf in leaves
        if isinstance(leaf, jax.Array)
    }
    return specs.pop() if len(specs) == 1 else None


def _checked(out: Any, has_aux: bool) -> tuple[Any, Any]:
    if has_aux and not (isinstance(out, tuple) and len(out) == 2):
        what = (
            f"an array of shape {jnp.shape(out)}"
            if hasattr(out, "shape")
            else f"a {type(out).__name__}"
        )
        raise TypeError(
            f"with has_aux=True loss_fn must return (loss, aux), but it returned {what}: leave has_aux out"
        )
    loss, aux = out if has_aux else (out, None)
    if (
        not is_array(loss)
        or jnp.shape(loss) != ()
        or not jnp.issubdtype(loss.dtype, jnp.floating)
    ):
        what = (
            f"shape {jnp.shape(loss)}, dtype {loss.dtype}"
            if is_array(loss)
            else type(loss).__name__
        )
        hint = "" if has_aux else "; for a pair (loss, aux) pass has_aux=True"
        raise TypeError(
            f"loss_fn must return a real scalar, the mean loss, but returned {what}{hint}"
        )
    return loss, aux


def _twice(x: Any) -> Any:
    aval = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
    return aval.update(shape=(2 * aval.shape[0], *aval.shape[1:]))


class Leaf(NamedTuple):
    """An array in the arguments: its position among all arrays, its argument, its name, and its leading length.

    The length is None if the array cannot hold examples: a scalar, a PRNG key, or an array that is known to be shared.
    """

    position: int
    argument: int | str
    name: str
    length: int | None


def _candidates(
    args: tuple, kwargs: dict, batch_argnums: Argnums, shared: Collection[str]
) -> Iterator[list[Batch]]:
    """Yield the candidates for the batch in stages. The first stage with a candidate that can be doubled decides.

    - All arrays of the chosen arguments that have the same leading length. Without a choice, the first argument is
      taken.
    - All but one of these arrays, if they are few. A mask may have the batch's length by chance.
    - Without a choice, the first argument with as few others as possible, then other arguments without the first.
    """
    arguments: dict[int | str, Any] = dict(enumerate(args, 1)) | {
        name: kwargs[name] for name in sorted(kwargs)
    }
    leaves: list[Leaf] = []
    for key, argument in arguments.items():
        for path, leaf in jax.tree_util.tree_flatten_with_path(argument)[0]:
            if is_array(leaf):
                name = f"argument {key!r}{jax.tree_util.keystr(path)}"
                alone = not leaf.shape or is_key(leaf) or name in shared
                leaves.append(
                    Leaf(len(leaves), key, name, None if alone else leaf.shape[0])
                )

    def candidate(chosen: Sequence[Leaf]) -> Batch:
        argnums = tuple(dict.fromkeys(leaf.argument for leaf in chosen))
        shared = tuple(
            leaf.name
            for leaf in leaves
            if leaf.argument in argnums and leaf not in chosen
        )
        return Batch(
            chosen[0].length,
            argnums,
            shared,
            leaves=frozenset(leaf.position for leaf in chosen),
        )

    def of_lengths(keys: Collection[int | str]) -> list[list[Leaf]]:
        """Group the leaves of these arguments by length, the largest group first.

        If the user chose no arguments, each group needs a leaf of every argument in `keys`.
        """
        of_keys = [leaf for leaf in leaves if leaf.argument in keys and leaf.length]
        lengths = dict.fromkeys(leaf.length for leaf in of_keys)
        alike = [
            [leaf for leaf in of_keys if leaf.length == length] for length in lengths
        ]
        whole = (
            group
            for group in alike
            if named is not None or {leaf.argument for leaf in group} == set(keys)
        )
        return sorted(whole, key=len, reverse=True)

    named = (
        None
        if batch_argnums is None
        else named_arguments(batch_argnums, arguments, len(args))
    )
    first = [key for key in arguments if key == 1] if named is None else named
    alike = of_lengths(first) if first else []
    yield [candidate(group) for group in alike]
    few = [group for group in alike if 1 < len(group) <= FEW]
    yield [
        candidate([leaf for leaf in group if leaf is not out])
        for group in few
        for out in group
    ]
    for own_first in (True, False) if named is None else ():
        for count in range(
            2 if own_first else 1, len(arguments) + 1
        ):  # the first argument alone was tried above
            keys = [set(keys) for keys in itertools.combinations(arguments, count)]
            chosen = [each for each in keys if (1 in each) == own_first]
            yield [
                candidate(group)
                for together in chosen
                for group in of_lengths(together)
            ]


def named_arguments(
    batch_argnums: Argnums, arguments: Collection[int | str], count: int
) -> list[int | str]:
    """Return the arguments that `batch_argnums` names.

    `arguments` are all arguments after `params`; the first `count` of them are positional.

    Raises:
      ValueError: a named argument does not exist, or is `params`.
    """
    keys = [
        k % (count + 1) if isinstance(k, int) and -count - 1 < k <= count else k
        for k in as_argnums(batch_argnums)
    ]
    for key in keys:
        if key not in arguments:
            there = ", ".join(map(repr, arguments)) or "not given by position"
            raise ValueError(
                f"batch_argnums={batch_argnums!r} has {key!r}, but the arguments after params are {there}"
            )
    return list(dict.fromkeys(keys))


def batch_of(
    layers: Layers, args: tuple, kwargs: dict
) -> tuple[Argnums, Collection[str]]:
    """Return the arguments that hold the examples, and the shared arrays in them, as `layers` knows them.

    The result is `(None, ())` if the call has no such arguments.
    """
    present = tuple(
        k
        for k in layers.batch_argnums
        if (k in kwargs if isinstance(k, str) else 0 < k <= len(args))
    )
    return (present, layers.shared) if present else (None, ())
