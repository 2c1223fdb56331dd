"""Average values, gradients and factors over micro-batches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from kfac._capture.trace import is_key, is_typed_key, leaf_name, named_arguments
from kfac._checks import check, check_given
from kfac._mesh import PyTree, zeros_of


def microbatch(
    fn: Callable,
    num_microbatches: int,
    *,
    batch_argnums: int | Sequence[int] | None = None,
) -> Callable:
    """Evaluate `fn` on equal parts of a batch, one after the other, and average its results.

    ::

        measure = kfac.microbatch(kfac.value_and_grad(loss_fn, layers), 4)
        loss, grads, factors = measure(params, batch)

    If the loss is a mean over the batch, the averaged loss, gradients and factors equal the values for the whole batch.
    Factors are never formed from averaged gradients. Memory does not grow with the number of parts. With a train-mode
    batch norm, each part is normalised by its own statistics.

    Args:
      fn: a function `fn(params, batch, ...)`, such as the result of `value_and_grad`.
      num_microbatches: number of parts, at least 1.
      batch_argnums: positions of the arguments to split. All their leaves are split along the leading axis. None: the
        first argument after `params`; no other argument may then have arrays with the same leading length. All other
        arguments go whole to every part, so all parts draw the same random numbers from a PRNG key among them. Some
        keys in keyword arguments are exceptions: typed keys (`jax.random.key`) anywhere, and untyped keys passed as
        `key=` or `fisher_key=`, or in `kwargs={"key": ...}`. The part's number is folded into these.

    Returns:
      A function with the arguments and results of `fn`. Averages are accumulated in float32, or in float64 for float64
      results, and keep the results' dtype.

    Raises:
      ValueError: `num_microbatches` is not a positive int. When called: `num_microbatches` does not divide a leading
        axis, leading axes differ, another argument may belong to the batch, an argument in `batch_argnums` is missing,
        or a result of `fn` has an integer or boolean dtype and thus no average.
    """
    check(num_microbatches=num_microbatches)
    check_given(batch_argnums=batch_argnums)
    return in_parts(fn, num_microbatches, batch_argnums)


def in_parts(
    fn: Callable,
    num_microbatches: int,
    batch_argnums: int | Sequence[int] | None,
    shared: Collection[str] = (),
) -> Callable:
    """Return `microbatch(fn, num_microbatches, batch_argnums=...)`, which passes some arrays whole to every part.

    Args:
      fn: the function.
      num_microbatches: the number of parts.
      batch_argnums: positions of the arguments to split.
      shared: the names of the arrays in these arguments that all examples share, as in `Batch.shared`.
    """

    @functools.wraps(fn)
    def accumulated(*args, **kwargs):
        def split(k, path, leaf):
            if leaf_name(k, path) in shared:
                return None  # which is no leaf of the tree that the scan slices
            return _parts(leaf, num_microbatches, k)

        parts = {}
        for k in _split_positions(args, kwargs, batch_argnums, shared):
            parts[k] = jax.tree.map_with_path(functools.partial(split, k), args[k])

        def one(numbered):
            number, parts = numbered
            full = list(args)
            for k, part in parts.items():
                full[k] = jax.tree.map(
                    lambda whole, own: whole if own is None else own, args[k], part
                )

            def folded(path, leaf):
                inside = len(path) > 1 and path[0].key == "kwargs"
                name = getattr(path[inside], "key", None)
                named = name in ("key", "fisher_key")
                if is_key(leaf) and (named or is_typed_key(leaf)):
                    return jax.random.fold_in(leaf, number)
                return leaf

            return fn(*full, **jax.tree.map_with_path(folded, kwargs))

        return _mean(one, (jnp.arange(num_microbatches), parts), num_microbatches)

    return accumulated


def _mean(fn: Callable, parts: PyTree, count: int) -> PyTree:
    """Average `fn` over the `count` slices of `parts` along the leading axis."""
    zeros = zeros_of(jax.eval_shape(fn, jax.tree.map(lambda x: x[0], parts)))
    for path, leaf in jax.tree.leaves_with_path(zeros):
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise ValueError(
                f"microbatch averages results, but result {jax.tree_util.keystr(path)} has dtype {leaf.dtype}: "
                "make it a float, or leave it out"
            )

    def widen(x):
        return x.astype(jnp.promote_types(x.dtype, jnp.float32))

    def add(total, part):
        result = fn(part)
        return jax.tree.map(lambda t, x: t + x.astype(t.dtype), total, result), None

    total, _ = lax.scan(add, jax.tree.map(widen, zeros), parts)
    return jax.tree.map(lambda t, x: (t / count).astype(x.dtype), total, zeros)


def _split_positions(
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
    batch_argnums: int | Sequence[int] | None,
    shared: Collection[str],
) -> list[int]:
    """Return the sorted positions of the arguments to split.

    Raises:
      ValueError: an argument to split is missing, the arrays to split have different leading lengths, or
        `batch_argnums` is None and another argument has an array of the same leading length.
    """
    argnums = 1 if batch_argnums is None else batch_argnums
    named = named_arguments(argnums, range(1, len(args)), len(args) - 1)
    positions = sorted(map(int, named))
    arrays = []
    for k in positions:
        for path, leaf in jax.tree.leaves_with_path(args[k]):
            if leaf_name(k, path) not in shared:
                arrays.append(leaf)
    lengths = _leading_lengths(arrays)
    if len(lengths) > 1:
        raise ValueError(
            f"arrays to split have different lengths {', '.join(map(str, lengths))}: pass what all parts share apart"
        )
    if batch_argnums is None:
        others: dict[Any, PyTree] = {**dict(enumerate(args[2:], 2)), **kwargs}
        others |= others.pop("kwargs", None) or {}
        for name, argument in others.items():
            arrays = [x for x in jax.tree.leaves(argument) if not is_key(x)]
            for length in _leading_lengths(arrays):
                if length in lengths:
                    raise ValueError(
                        f"argument 1 is split along its leading axis of length {length}, and argument {name!r} is as "
                        "long: say batch_argnums=1 if it is not of the batch, else name all arguments that are, "
                        "batch_argnums=(1, 2)"
                    )
    return positions


def _leading_lengths(tree: PyTree) -> list[int]:
    """Return the distinct leading lengths of all leaves with an axis, in leaf order."""
    shapes = [jnp.shape(x) for x in jax.tree.leaves(tree)]
    return list(dict.fromkeys(shape[0] for shape in shapes if shape))


def _parts(x: ArrayLike, count: int, argnum: int) -> Array:
    """Split an array of argument number `argnum` into `count` parts, on a new leading axis."""
    shape = jnp.shape(x)
    if not shape or shape[0] % count:
        what = f"leading axis of length {shape[0]}" if shape else "no leading axis"
        raise ValueError(
            f"num_microbatches={count} does not divide argument {argnum}: an array in it has {what}"
        )
    # The explicit mesh axes that split the leading axis.
    split = jax.typeof(x).sharding.spec[0]
    rows = shape[0] // count
    if split is None:
        return jnp.reshape(x, (count, rows, *shape[1:]))
    # Each part takes every `count`-th example, so it is sharded like the batch. Neighbours would lie on a few devices.
    return jnp.reshape(x, (rows, count, *shape[1:])).swapaxes(0, 1)
