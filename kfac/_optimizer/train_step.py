"""A whole training step in one call: `find_layers`, `value_and_grad`, `kfac` and their update."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax
from jax import lax

from kfac._capture.find_layers import find_layers
from kfac._capture.microbatch import check_argnums, microbatch
from kfac._capture.value_and_grad import value_and_grad
from kfac._checks import check_positive_int
from kfac._curvature.inverse import Inverse
from kfac._layers import MAX_DIM, Layers
from kfac._optimizer.diagnostics import due, eigenbasis
from kfac._optimizer.kfac import kfac
from kfac._optimizer.moves import ScalarOrSchedule
from kfac._optimizer.over_mesh import find_splits
from kfac._optimizer.reshard import on_states


class TrainStep:
    """What `train_step` returns: `init` makes the state, and a call is one step.

    There are two programs, compiled by `jax.jit` when they are first needed: one step with statistics, one without.
    Inside a `jit` or `scan` of one's own they are the branches of a `lax.cond`.
    """

    def __init__(self, init: Callable[..., Any], step: Callable[..., Any]):
        self._init = jax.jit(init)
        ways = [functools.partial(step, statistics=statistics) for statistics in (False, True)]
        self._steps = [jax.jit(functools.wraps(step)(way)) for way in ways]

    def init(self, params: Any, *args: Any, **kwargs: Any) -> Any:
        """The state of the optimizer, for parameters and arguments of `loss_fn` of the shapes that steps will get.

        From the examples in the first arguments that it or a step gets comes the interval of `inverse_every="auto"`.
        """
        state, splits = self._init(params, *args, **kwargs), find_splits(params)  # which `jit` would hide
        return on_states(lambda node: node._replace(splits=splits), state)

    def __call__(
        self, params: Any, opt_state: Any, *args: Any, fisher_key: jax.Array | None = None, **kwargs: Any
    ) -> tuple[Any, Any, Any]:
        """One step.

        Args:
          params: the parameters.
          opt_state: the state.
          args: the further arguments of `loss_fn`, such as a batch.
          fisher_key: a PRNG key, with `fisher="sampled"` or `"expected"`.
          kwargs: its keyword arguments. With `num_microbatches` every part gets a PRNG key `key=` of its own.

        Returns:
          New parameters, the new state, and what `loss_fn` returned.
        """
        now = due(opt_state)
        if not isinstance(now, jax.core.Tracer):
            return self._steps[bool(now)](params, opt_state, *args, fisher_key=fisher_key, **kwargs)
        arguments = (params, opt_state, *args), {"fisher_key": fisher_key, **kwargs}
        without, full = (lambda given, way=way: way(*given[0], **given[1]) for way in self._steps)
        return lax.cond(now, full, without, arguments)


def train_step(
    loss_fn: Callable[..., Any],
    learning_rate: ScalarOrSchedule,
    *,
    has_aux: bool = False,
    fisher: str = "empirical",
    num_examples: int | None = None,
    subsample: int = 1,
    num_microbatches: int = 1,
    batch_argnums: int | Sequence[int] | None = None,
    skip: Sequence[str] = (),
    max_dim: int = MAX_DIM,
    **options: Any,
) -> TrainStep:
    """A training step with K-FAC, in the place of an optimizer, its state and a step of one's own.

    ::

        step = kfac.train_step(loss_fn, 0.05)
        opt_state = step.init(params, batch)
        for batch in batches:
            params, opt_state, loss = step(params, opt_state, batch)

    It does what the four lines of the README do, with the layers found anew whenever it is compiled, and takes
    statistics when they are `due`: in the first ten steps, and then as often as `cost=` of `kfac.kfac` allows. With
    `inverse=kfac.Ekfac()` it takes the moments as well. `kfac.find_layers(loss_fn, params, batch)` prints the layers.

    Args:
      loss_fn: `loss_fn(params, *args, **kwargs)`, the mean loss; with `has_aux` a pair. A state that the model changes,
        such as the averages of a batch norm, goes in as an argument and comes out in the auxiliary output.
      learning_rate: scalar or schedule, as for `kfac.kfac`.
      has_aux: whether `loss_fn` returns a pair.
      fisher: as for `value_and_grad`.
      num_examples: as for `value_and_grad`, of the whole batch that a step gets.
      subsample: as for `value_and_grad`.
      num_microbatches: in how many parts the batch is worked through. All parts get the other arguments whole: pass
        what is random by name, `step(params, opt_state, batch, key=key)`.
      batch_argnums: the positions of the batch, as `loss_fn` counts its arguments, with `params` as 0. None: as
        `find_layers` finds them.
      skip: as for `find_layers`.
      max_dim: as for `find_layers`.
      options: what else `kfac.kfac` takes: `damping=`, `trust_ratio=`, `distribution=` and so on.

    Returns:
      A `TrainStep`.

    Raises:
      TypeError: `kfac.kfac` has no such option; when a step is traced.
      ValueError: `loss_fn` is no function; when a step is traced, the batch of micro-batches is not among the
        positional arguments; and as of the functions that it calls.
    """
    if not callable(loss_fn):
        raise ValueError(f"loss_fn must be a function, but is {loss_fn!r}: it comes before the learning rate")
    check_positive_int("num_microbatches", num_microbatches)
    if batch_argnums is not None and 0 in check_argnums(batch_argnums):
        raise ValueError(f"batch_argnums={batch_argnums!r} has 0, which are the parameters: the batch begins at 1")
    first: list[int | None] = []

    def layers_of(params, args, kwargs):
        layers = find_layers(
            loss_fn, params, *args, has_aux=has_aux, skip=skip, max_dim=max_dim, batch_argnums=batch_argnums, **kwargs
        )
        # The interval of "auto" goes by examples; a last batch that has fewer must not change it.
        first[:] = first or [layers.num_examples]
        return dataclasses.replace(layers, num_examples=first[0])

    def init(params, *args, **kwargs):
        return kfac(learning_rate, layers_of(params, args, kwargs), **options).init(params)

    def step(params, opt_state, *args, fisher_key, statistics, **kwargs):
        layers = layers_of(params, args, kwargs)
        n = None if num_examples is None else _of_a_part(num_examples, num_microbatches)
        measure = value_and_grad(
            loss_fn, layers, has_aux=has_aux, fisher=fisher, num_examples=n, subsample=subsample, statistics=statistics
        )
        if num_microbatches > 1:
            measure = microbatch(measure, num_microbatches, batch_argnums=_split(layers, batch_argnums))
        given = kwargs if fisher_key is None else {**kwargs, "fisher_key": fisher_key}
        if isinstance(inverse := options.get("inverse"), Inverse) and inverse.takes_moments:
            given = {**given, "basis": eigenbasis(opt_state, layers)}
        value, grads, factors = measure(params, *args, **given)
        updates, opt_state = kfac(learning_rate, layers, **options).update(grads, opt_state, params, factors=factors)
        return optax.apply_updates(params, updates), opt_state, value

    return TrainStep(init, functools.wraps(loss_fn)(step))


def _of_a_part(num_examples: int, parts: int) -> int:
    check_positive_int("num_examples", num_examples)
    if num_examples % parts:
        raise ValueError(f"num_microbatches={parts} does not divide num_examples={num_examples}, those of the batch")
    return num_examples // parts


def _split(layers: Layers, given: int | Sequence[int] | None) -> int | Sequence[int] | None:
    """The positions of what micro-batches split: where it is not said, of the batch that tracing has found."""
    if given is not None or not layers.batch_argnums:
        return given
    named = [k for k in layers.batch_argnums if isinstance(k, str)]
    if named:
        raise ValueError(
            "with num_microbatches= the batch must be in positional arguments, step(params, opt_state, batch), but "
            f"{', '.join(map(repr, named))} of it are keyword arguments"
        )
    return [k for k in layers.batch_argnums if isinstance(k, int)]
