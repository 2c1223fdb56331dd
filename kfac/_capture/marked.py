"""The marked outputs of a loss as a function of its parameters, and the curvature of the loss with respect to them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from kfac._capture.outputs import Mark, find_marks
from kfac._capture.replay import replay
from kfac._capture.taps import Plan
from kfac._capture.trace import trace


@dataclasses.dataclass(frozen=True)
class Marked:
    """What a loss is made of: `F = (1/n) sum_r J_r^T H_r J_r` over the rows of its marked outputs.

    Attributes:
      evaluate: from parameters to the loss and its outputs.
      marks: the marks of these.
      n: the number of examples.
      what: who asks, for messages.
    """

    evaluate: Callable[[Any], tuple[jax.Array, list[jax.Array]]]
    marks: tuple[Mark, ...]
    n: int
    what: str

    def times_root(self, outputs: list[jax.Array], vectors: list[jax.Array]) -> list[jax.Array]:
        """`S v` for each mark, with `S^T S` the Hessian of its share in the loss."""
        triples = zip(self.marks, outputs, vectors, strict=True)
        return [(m.weight / self.n) ** 0.5 * m.likelihood.times_root(z, v, self.what) for m, z, v in triples]

    def transposed(self, outputs: list[jax.Array], vectors: list[jax.Array]) -> list[jax.Array]:
        """`S^T v` for each mark."""
        return jax.linear_transpose(lambda v: self.times_root(outputs, v), outputs)(vectors)[0]


def marked(value_fn: Callable[[Any], Any], params: Any, num_examples: int | None, what: str) -> Marked:
    """The marked outputs of a loss of the parameters alone.

    Raises:
      ValueError: there is none, the loss depends on a parameter but no mark does, or `n` is not clear.
    """
    traced = trace(value_fn, False, params, (), {})
    marks = find_marks(traced)
    marks.require(what, traced.names, ())
    n, unclear = marks.num_examples(num_examples, traced.batch, {})
    if n is None:
        raise ValueError(unclear.replace("to value_and_grad", f"to {what}"))
    plan = Plan()
    marks.place(plan, lambda mark: lambda x, entry: (x, x))
    entries = {mark.key: jnp.zeros(mark.scans) for mark in marks.marks}

    def evaluate(params):
        outs, outputs = replay(traced.program, jax.tree.leaves(params), plan, entries)
        return outs[0], [outputs[key] for key in entries]

    return Marked(evaluate, marks.marks, n, what)
