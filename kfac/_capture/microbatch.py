"""Average values, gradients and factors over micro-batches, and take a fraction of a batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kfac._capture.convolutions_in_loops import fast_in_loops
from kfac._capture.outputs import with_own_key
from kfac._capture.trace import is_array, is_key, named_arguments
from kfac._checks import check, check_given
from kfac._layers import Layers
from kfac._varying import zeros_of


def microbatch(
    fn: Callable[..., Any],
    num_microbatches: int,
    *,
    batch_argnums: int | Sequence[int] | None = None,
) -> Callable[..., Any]:
    """Evaluate `fn` on equal parts of a batch, one after the other, and average its results.

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
        `key=` or `fisher_key=`. The part's number is folded into these.

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

    @functools.wraps(fn)
    def accumulated(*args, **kwargs):
        positions = split_positions(args, kwargs, batch_argnums)
        parts = [
            jax.tree.map(lambda x, k=k: _parts(x, num_microbatches, k), args[k])
            for k in positions
        ]

        def one(numbered):
            number, parts = numbered
            full = list(args)
            for k, part in zip(positions, parts, strict=True):
                full[k] = part
            return fn(*full, **with_own_key(kwargs, number))

        numbered = jnp.arange(num_microbatches), parts
        first = jax.tree.map(lambda x: x[0], numbered)
        zeros = zeros_of(one, first)
        for path, leaf in jax.tree_util.tree_flatten_with_path(zeros)[0]:
            if not jnp.issubdtype(leaf.dtype, jnp.inexact):
                what = f"result {jax.tree_util.keystr(path)} has dtype {leaf.dtype}"
                raise ValueError(
                    f"microbatch averages results, but {what}: make it a float, or leave it out"
                )

        def widen(x):
            return x.astype(jnp.promote_types(x.dtype, jnp.float32))

        evaluate = fast_in_loops(one)

        def step(total, part):
            return jax.tree.map(
                lambda t, x: t + x.astype(t.dtype), total, evaluate(part)
            ), None

        total, _ = lax.scan(step, jax.tree.map(widen, zeros), numbered)
        return jax.tree.map(
            lambda t, x: (t / num_microbatches).astype(x.dtype), total, zeros
        )

    return accumulated


def split_positions(
    args: Sequence[Any],
    kwargs: dict[str, Any],
    batch_argnums: int | Sequence[int] | None,
) -> list[int]:
    """Return the sorted positions of the arguments to split.

    Raises:
      ValueError: an argument to split is missing, the arrays to split have different leading lengths, or
        `batch_argnums` is None and another argument has an array of the same leading length.
    """
    argnums = 1 if batch_argnums is None else batch_argnums
    positions = sorted(
        int(k) for k in named_arguments(argnums, range(1, len(args)), len(args) - 1)
    )
    lengths = leading_lengths([args[k] for k in positions])
    if len(lengths) > 1:
        what = f"different lengths {', '.join(map(str, lengths))}"
        raise ValueError(
            f"arrays to split have {what}: pass what all parts share apart"
        )
    beside: list[tuple[int | str, Any]] = [
        (k, x) for k, x in enumerate(args) if k and k not in positions
    ]
    for name, argument in [*beside, *kwargs.items()] if batch_argnums is None else ():
        arrays = [x for x in jax.tree.leaves(argument) if not is_key(x)]
        if both := leading_lengths(arrays).keys() & lengths.keys():
            raise ValueError(
                f"argument 1 is split along its leading axis of length {both.pop()}, and argument {name!r} is as long: "
                "say batch_argnums=1 if it is not of the batch, else name all arguments that are, batch_argnums=(1, 2)"
            )
    return positions


class Thinned(NamedTuple):
    """The arguments of a loss with a part of the batch.

    Attributes:
      args: the arguments by position.
      kwargs: the arguments by name.
      kept: the number of examples in the part.
      rows: the number of examples in the whole batch.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    kept: int
    rows: int

    def of(self, num_examples: int | None) -> int | None:
        """Scale a user's number of examples from the whole batch to the part, rounded down. None stays None."""
        return num_examples and num_examples * self.kept // self.rows


def every_example(
    layers: Layers,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    every: int,
    multiple: int = 1,
) -> Thinned:
    """Take every `every`-th example of a batch, or all if there are too few.

    Args:
      layers: the layers, which know the arguments with the batch.
      args: the arguments of the loss by position.
      kwargs: the arguments by name.
      every: the distance between two kept examples.
      multiple: a divisor of the number of kept examples, unless all examples are kept.

    Raises:
      ValueError: the layers were found without a batch.
    """
    if not layers.batch_argnums:
        raise ValueError(
            "fraction= needs a batch whose examples are known: name its arguments, "
            "kfac.find_layers(loss_fn, params, batch, batch_argnums=1)"
        )
    counts = {1: 1}  # numbers of kept examples, by leading length

    def thinned(key, argument):
        def thin(path, leaf):
            name = f"argument {key!r}{jax.tree_util.keystr(path)}"
            if (
                not is_array(leaf)
                or not leaf.shape
                or is_key(leaf)
                or name in layers.shared
            ):
                return leaf
            rows = leaf.shape[0]
            count = counts[rows] = rows // (every * multiple) * multiple or rows
            if count == rows:
                return leaf
            # Neighbouring examples lie on the same device, so the result is sharded like the batch. Without the
            # barrier, XLA for GPUs (jaxlib 0.10.2) merges this slice into a matrix product and aborts.
            return lax.optimization_barrier(
                leaf[: count * every].reshape(count, every, *leaf.shape[1:])[:, 0]
            )

        return jax.tree_util.tree_map_with_path(thin, argument)

    positional = tuple(
        thinned(k, x) if k in layers.batch_argnums else x for k, x in enumerate(args, 1)
    )
    named = {
        k: thinned(k, x) if k in layers.batch_argnums else x for k, x in kwargs.items()
    }
    return Thinned(positional, named, counts[max(counts)], max(counts))


def leading_lengths(tree: Any) -> dict[int, None]:
    """Return the distinct leading lengths of all leaves with an axis, in leaf order, as dictionary keys."""
    return {jnp.shape(x)[0]: None for x in jax.tree.leaves(tree) if jnp.shape(x)}


def _parts(x: Any, count: int, argnum: int) -> jax.Array:
    shape = jnp.shape(x)
    if not shape or shape[0] % count:
        what = f"leading axis of length {shape[0]}" if shape else "no leading axis"
        raise ValueError(
            f"num_microbatches={count} does not divide argument {argnum}: an array in it has {what}"
        )
    split = jax.typeof(x).sharding.spec[
        0
    ]  # the explicit mesh axes that split the leading axis
    if split is None:
        return jnp.reshape(x, (count, shape[0] // count, *shape[1:]))
    # Each part takes every `count`-th example, so it is sharded like the batch. Neighbours would lie on a few devices.
    return jnp.reshape(x, (shape[0] // count, count, *shape[1:])).swapaxes(0, 1)
