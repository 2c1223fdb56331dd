"""Take a fraction of a batch's examples for the statistics."""

from __future__ import annotations

from typing import NamedTuple

import jax
from jax import lax

from kfac._capture.trace import leading_length, leaf_name
from kfac._checks import check_fraction
from kfac._layers import Layers
from kfac._mesh import PyTree

# Without a choice by the user, statistics take one of ONE_IN examples from this many examples on. A quarter is usually
# as good as the whole batch, at a quarter of the cost; a few examples are too noisy.
ONE_IN = 4
ENOUGH = 64


def statistics_one_in(
    layers: Layers,
    fraction: float | None,
    name: str = "fraction",
) -> int:
    """Return `k`, such that statistics use every `k`-th example.

    Args:
      layers: the layers, which know the batch.
      fraction: the user's choice `1 / k`. None: a quarter if the batch has at least 64 examples and no array that all
        examples share, otherwise all.
      name: the argument's name, for messages.
    """
    if fraction is not None:
        return check_fraction(name, fraction)
    # Shared arrays in the batch may refer to examples by position, like the edges of a graph.
    divisible = layers.batch_argnums and not layers._shared_arrays
    enough = (layers.num_examples or 0) >= ENOUGH
    return ONE_IN if divisible and enough else 1


class Part(NamedTuple):
    """The arguments of a loss with a part of the batch.

    Attributes:
      args: the arguments by position.
      kwargs: the arguments by name.
      num_examples: the number of examples over which the loss takes the mean, if the user gave it.
      num_microbatches: the number of micro-batches, which divides the number of examples.
    """

    args: tuple[PyTree, ...]
    kwargs: dict[str, PyTree]
    num_examples: int | None
    num_microbatches: int


def thin_batch(
    layers: Layers,
    batch: Part,
    one_in: int,
) -> Part:
    """Keep every `one_in`-th example of a batch, in fewer micro-batches, or all examples if there are too few.

    The user's number of examples is scaled to the part and rounded down.

    Args:
      layers: the layers, which know the arguments with the batch.
      batch: the arguments with the whole batch.
      one_in: the distance between two kept examples.

    Raises:
      ValueError: the layers were found without a batch, although `one_in` is not 1.
    """
    if one_in == 1:
        return batch
    if not layers.batch_argnums:
        raise ValueError(
            "fraction= needs a batch whose examples are known: name its arguments, "
            "kfac.find_layers(loss_fn, params, batch, batch_argnums=1)"
        )
    args, kwargs, num_examples, num_microbatches = batch
    fewer = -(-num_microbatches // one_in)
    counts = {1: 1}  # numbers of kept examples, by leading length

    def thinned(key, argument):
        if key not in layers.batch_argnums:
            return argument

        def thin(path, leaf):
            name = leaf_name(key, path)
            rows = leading_length(leaf, name, layers._shared_arrays)
            if rows is None:
                return leaf
            count = rows // (one_in * fewer) * fewer or rows
            counts[rows] = count
            if count == rows:
                return leaf
            # Neighbouring examples lie on the same device, so the result is sharded like the batch. Without the
            # barrier, XLA for GPUs (jaxlib 0.10.2) merges this slice into a matrix product and aborts.
            groups = leaf[: count * one_in].reshape(count, one_in, *leaf.shape[1:])
            return lax.optimization_barrier(groups[:, 0])

        return jax.tree.map_with_path(thin, argument)

    positional = tuple(thinned(key, x) for key, x in enumerate(args, 1))
    named = {key: thinned(key, x) for key, x in kwargs.items()}
    rows = max(counts)
    kept = counts[rows]
    if num_examples is not None:
        num_examples = num_examples * kept // rows
    if kept < rows:
        num_microbatches = fewer
    return Part(positional, named, num_examples, num_microbatches)
