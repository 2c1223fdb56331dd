"""Traces a loss, at its batch and at twice as many examples: what grows between the two holds the examples.

Nothing is guessed from a length. The batch are the arguments `batch_argnums`; their leaves with its leading length are
doubled, and the two programs compared operation by operation.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kfac._capture.examples import place
from kfac._capture.program import AnotherProgramError, Op, Program, Reached, flat, mark_live
from kfac._layers import Layers, leaf_paths
from kfac._varying import AxisName

Argnums = int | str | Sequence[int | str] | None


class Trace(NamedTuple):
    """A traced loss and how to call it with flat arguments.

    Attributes:
      program: the loss.
      arrays: the dynamic leaves of the arguments, after the parameters.
      rebuild: brings flat outputs to `(loss, aux)`.
      names: paths of the parameter leaves.
      shapes: their shapes.
      batch: what is known of the batch.
    """

    program: Program
    arrays: list[Any]
    rebuild: Callable[[Sequence[Any]], Any]
    names: list[str]
    shapes: list[tuple[int, ...]]
    batch: Batch

    @property
    def num_leaves(self) -> int:
        return len(self.names)


@dataclasses.dataclass(frozen=True)
class Batch:
    """What is known of the batch.

    Attributes:
      num_examples: `n`; None where the loss hides its examples.
      argnums: the arguments that hold them, as `loss_fn` counts its own, or names of keyword arguments.
      shared: leaves of these arguments, and what they are, that do not have the batch's leading length.
      hidden: why `n` is not known, a sentence.
      lies: the axes of a mesh with explicit ones along which they are split.
    """

    num_examples: int | None = None
    argnums: tuple[int | str, ...] = ()
    shared: tuple[str, ...] = ()
    hidden: str = ""
    lies: AxisName | None = None


def is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def is_key(x: Any) -> bool:
    """Whether `x` is a single PRNG key, as `jax.random.key` or `jax.random.PRNGKey` make it."""
    if not is_array(x):
        return False
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x.shape == ()
    return x.dtype == jnp.uint32 and x.shape in ((2,), (4,))


def check_params(params: Any) -> tuple[list[str], list[tuple[int, ...]]]:
    """Paths and shapes of the parameter leaves, in the order of `jax.tree.leaves`.

    Raises:
      ValueError: there are none, or two have one path.
      TypeError: one is no real array.
    """
    names, leaves = leaf_paths(params), jax.tree.leaves(params)
    if not names:
        raise ValueError("params has no leaves: there is nothing to train")
    repeated = [name for name, count in collections.Counter(names).items() if count > 1]
    if repeated:
        raise ValueError(f"two parameter leaves have the path {repeated[0]!r}; rename one")
    for name, leaf in zip(names, leaves, strict=True):
        if not is_array(leaf):
            raise TypeError(f"parameter {name!r} must be an array, but is of type {type(leaf).__name__}")
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise TypeError(
                f"parameter {name!r} has dtype {leaf.dtype}: kfac differentiates real parameters only. Keep other "
                "arrays out of params, as a further argument of loss_fn: those of a flax nnx module by "
                "nnx.split(module, nnx.Param, ...)"
            )
    return names, [tuple(leaf.shape) for leaf in leaves]


def trace(
    loss_fn: Callable, has_aux: bool, params: Any, args: tuple, kwargs: dict, batch_argnums: Argnums = None
) -> Trace:
    """Traces `loss_fn(params, *args, **kwargs)`; arguments that are not arrays stay what they are.

    Args:
      loss_fn: the loss.
      has_aux: whether it returns a pair.
      params: its first argument.
      args: the others.
      kwargs: and those with names.
      batch_argnums: which of them are the batch, with `params` as 0, or the names of keyword arguments. None: the first
        after `params`; where there is no other program with that doubled, all those with arrays of one leading length,
        if there is one such length only.
    """
    names, shapes = check_params(params)
    leaves, treedef = jax.tree.flatten((args, kwargs))
    dynamic = [k for k, leaf in enumerate(leaves) if is_array(leaf)]
    arrays = [leaves[k] for k in dynamic]
    flat_params, params_tree = jax.tree.flatten(params)

    def traced(arrays):
        static_aux: dict[int, Any] = {}
        aux_tree: list[Any] = []

        def flat_loss(flat_params, arrays):
            filled = list(leaves)
            for k, array in zip(dynamic, arrays, strict=True):
                filled[k] = array
            call_args, call_kwargs = jax.tree.unflatten(treedef, filled)
            out = loss_fn(jax.tree.unflatten(params_tree, flat_params), *call_args, **call_kwargs)
            loss, aux = _checked(out, has_aux)
            aux_leaves, tree = jax.tree.flatten(aux)
            aux_tree.append(tree)
            static_aux.update({k: leaf for k, leaf in enumerate(aux_leaves) if not is_array(leaf)})
            return [loss, *(leaf for leaf in aux_leaves if is_array(leaf))]

        closed = jax.make_jaxpr(flat_loss)(flat_params, arrays)

        def rebuild(outs):
            loss, *dynamic_aux = outs
            tree, queue = aux_tree[-1], iter(dynamic_aux)
            aux = [static_aux[k] if k in static_aux else next(queue) for k in range(tree.num_leaves)]
            return loss, jax.tree.unflatten(tree, aux)

        return closed, rebuild

    closed, rebuild = traced(arrays)
    candidates = _candidates(args, kwargs, batch_argnums)
    found: list[tuple[Candidate, Program]] = []
    hidden: list[str] = []
    for candidate in candidates:
        if len(found) == 1 and found[0][0].first:
            break
        try:
            twin, _ = traced([_twice(x) if k in candidate.leaves else x for k, x in enumerate(arrays)])
            program = flat(closed, twin, alike=candidate.length > 1)
            _mark(program)
            if any(op.longer or any(any(value.grown) for value in op.outputs) for op in program.walk() if op.alive):
                found.append((candidate, program))
            else:
                hidden.append(f"nothing that the loss depends on grows with {candidate.where}")
        except AnotherProgramError:
            hidden.append(f"with {2 * candidate.length} examples in {candidate.where} the loss is another program")
        except Exception as error:  # whatever a model raises that has a batch size written into it
            reason = str(error).strip().splitlines()
            hidden.append(
                f"the loss cannot be traced with {2 * candidate.length} examples in {candidate.where} "
                f"({type(error).__name__}: {reason[0] if reason else ''})"
            )
    if len(found) == 1:
        ((candidate, program),) = found
        lies = {jax.typeof(arrays[k]).sharding.spec[0] for k in candidate.leaves if isinstance(arrays[k], jax.Array)}
        batch = Batch(
            candidate.length, candidate.argnums, candidate.shared, lies=lies.pop() if len(lies) == 1 else None
        )
        doubled = set(candidate.leaves)
    else:
        program = flat(closed)
        _mark(program)
        doubled = None
        if found:
            where = " or ".join(candidate.where for candidate, _ in found)
            hidden = [f"the examples may be those of {where}: say batch_argnums="]
        batch = Batch(hidden=hidden[0] if hidden else "no argument of the loss has an array with a leading axis")
    place(program, len(names), doubled, batch.num_examples)
    return Trace(program, arrays, rebuild, names, shapes, batch)


def _mark(program: Program) -> None:
    mark_live(program, [Reached(True, True), *[Reached(False, False)] * (len(program.outputs) - 1)])


def _checked(out: Any, has_aux: bool) -> tuple[Any, Any]:
    if has_aux and not (isinstance(out, tuple) and len(out) == 2):
        raise TypeError(f"with has_aux=True loss_fn must return (loss, aux), but returned {type(out).__name__}")
    loss, aux = out if has_aux else (out, None)
    if not is_array(loss) or jnp.shape(loss) != () or not jnp.issubdtype(loss.dtype, jnp.floating):
        what = f"shape {jnp.shape(loss)}, dtype {loss.dtype}" if is_array(loss) else type(loss).__name__
        hint = "" if has_aux else "; for a pair (loss, aux) pass has_aux=True"
        raise TypeError(f"loss_fn must return a real scalar, the mean loss, but returned {what}{hint}")
    return loss, aux


def _twice(x: Any) -> Any:
    aval = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
    return aval.update(shape=(2 * aval.shape[0], *aval.shape[1:]))


class Candidate(NamedTuple):
    """Arrays that may be the batch: their positions among all arrays, and as of `Batch`."""

    leaves: frozenset[int]
    length: int
    argnums: tuple[int | str, ...]
    shared: tuple[str, ...]
    first: bool

    @property
    def where(self) -> str:
        return " and ".join(f"argument {k!r}" for k in self.argnums)


def _candidates(args: tuple, kwargs: dict, batch_argnums: Argnums) -> list[Candidate]:
    """What may be the batch, in the order in which it is tried."""
    by_argument: dict[int | str, list[tuple[int, str, Any]]] = {}
    count = 0
    arguments: dict[int | str, Any] = dict(enumerate(args, 1)) | {name: kwargs[name] for name in sorted(kwargs)}
    for key, argument in arguments.items():
        by_argument[key] = []
        for path, leaf in jax.tree_util.tree_flatten_with_path(argument)[0]:
            if is_array(leaf):
                name = f"argument {key!r}{jax.tree_util.keystr(path)}"
                by_argument[key].append((count, name, leaf))
                count += 1

    def candidate(keys: Sequence[int | str], length: int | None, first: bool) -> list[Candidate]:
        own = [(k, *leaf) for k in keys for leaf in by_argument[k] if jnp.shape(leaf[2]) and not is_key(leaf[2])]
        if length is None:
            lengths = collections.Counter(leaf.shape[0] for *_, leaf in own)
            length = max(lengths, key=lambda n: lengths[n], default=None)
        chosen = [(key, k) for key, k, _, leaf in own if leaf.shape[0] == length]
        if not chosen or not length:
            return []
        holding = tuple(dict.fromkeys(key for key, _ in chosen))
        shared = tuple(
            f"{name} {list(leaf.shape)}" for k in holding for n, name, leaf in by_argument[k] if (k, n) not in chosen
        )
        return [Candidate(frozenset(n for _, n in chosen), length, holding, shared, first)]

    if batch_argnums is not None:
        return candidate(_named(batch_argnums, by_argument, len(args)), None, True)
    first = candidate([1], None, True) if args else []
    leading = collections.Counter(
        leaf.shape[0] for own in by_argument.values() for _, _, leaf in own if jnp.shape(leaf) and not is_key(leaf)
    )
    rest = [
        one
        for length in sorted(leading, key=lambda n: -leading[n])
        for one in candidate(list(by_argument), length, False)
    ]
    return first + [one for one in rest if not first or one.leaves != first[0].leaves]


def _named(batch_argnums: Argnums, known: Collection[int | str], count: int) -> list[int | str]:
    """The arguments that `batch_argnums` names.

    Raises:
      ValueError: one is not there, or is `params`.
    """
    named = (batch_argnums,) if isinstance(batch_argnums, int | str) else tuple(batch_argnums or ())
    result: list[int | str] = []
    for k in named:
        own = k % (count + 1) if isinstance(k, int) and not isinstance(k, bool) and -count - 1 < k <= count else k
        if own not in known:
            raise ValueError(
                f"batch_argnums={batch_argnums!r}: there is no argument {k!r} beside params; positional ones are "
                f"1 to {count}" + "".join(f", keyword {name!r}" for name in known if isinstance(name, str))
            )
        result.append(own)
    return result


def batch_of(layers: Layers, args: tuple, kwargs: dict) -> Argnums:
    """Which of these arguments hold the examples, as `layers` were found with them; None where there are no such."""
    known = tuple(k for k in layers.batch_argnums if (k in kwargs if isinstance(k, str) else 0 < k <= len(args)))
    return known or None


def aim_at(traced: Trace, roots: Collection[Op]) -> None:
    """Notes what reaches the results of some ops, in the place of what reaches the loss."""
    mark_live(traced.program, [Reached(False, False)] * len(traced.program.outputs), roots)
