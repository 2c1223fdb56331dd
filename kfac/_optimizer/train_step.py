"""A whole training step in one call: `find_layers`, `value_and_grad`, `kfac` and their update."""

from __future__ import annotations

import dataclasses
import functools
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax
from jax import lax

from kfac._capture.find_layers import find_layers
from kfac._capture.microbatch import microbatch
from kfac._capture.value_and_grad import value_and_grad
from kfac._checks import check, check_function, check_given
from kfac._curvature.soap import Soap
from kfac._distributed.intervals import COST, seldom_work
from kfac._layers import MAX_DIM, Layers
from kfac._optimizer.diagnostics import due, eigenbasis
from kfac._optimizer.kfac import chosen, kfac
from kfac._optimizer.moves import ScalarOrSchedule
from kfac._optimizer.over_mesh import find_splits
from kfac._optimizer.reshard import on_states


class TrainStep:
    """What `train_step` returns: `init` makes the state, and a call is one step.

    There are two programs, compiled by `jax.jit` when they are first needed: one step with statistics, one without.
    Inside a `jit` or `scan` of one's own they are the branches of a `lax.cond`.
    """

    def __init__(self, init: Callable[..., Any], step: Callable[..., Any], verbose: bool, donate: bool):
        self._init = _jit_with_notice(init, "the state", verbose)
        donated = (0, 1) if donate else ()
        self._steps = [
            _jit_with_notice(step, f"the step {how} statistics", verbose, donated, statistics=statistics)
            for how, statistics in (("without", False), ("with", True))
        ]

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
        without, full = (lambda packed, way=way: way(*packed[0], **packed[1]) for way in self._steps)
        return lax.cond(now, full, without, arguments)


def train_step(
    loss_fn: Callable[..., Any],
    learning_rate: ScalarOrSchedule,
    *,
    has_aux: bool = False,
    fisher: str = "empirical",
    num_examples: int | None = None,
    subsample: int | None = None,
    communication_dtype: str = "float32",
    num_microbatches: int = 1,
    batch_argnums: int | Sequence[int] | None = None,
    skip: Sequence[str] = (),
    reduce: Sequence[str] = (),
    gradient: Sequence[str] = (),
    strict: bool = False,
    max_dim: int | None = None,
    verbose: bool = True,
    donate: bool = False,
    **options: Any,
) -> TrainStep:
    """A training step with K-FAC, in the place of an optimizer, its state and a step of one's own.

    ::

        jax.config.update("jax_compilation_cache_dir", os.path.expanduser("~/.cache/jax"))
        step = kfac.train_step(loss_fn, kfac.schedules.rise_and_fall(0.1, num_steps))
        opt_state = step.init(params, batch)
        for batch in batches:
            params, opt_state, loss = step(params, opt_state, batch)

    It does what the four lines of the README do, and takes statistics when they are `due`: in the first ten steps, then
    ever less often, down to what `cost=` of `kfac.kfac` allows. With `inverse=kfac.Ekfac()` it takes the moments too.
    `print(kfac.find_layers(loss_fn, params, batch))` shows the layers. The first line keeps what was compiled, for the
    next start.

    Args:
      loss_fn: `loss_fn(params, *args, **kwargs)`, the mean loss; with `has_aux` a pair. A state that the model changes,
        such as the averages of a batch norm, goes in as an argument and comes out in the auxiliary output.
      learning_rate: scalar or schedule, as for `kfac.kfac`.
      has_aux: whether `loss_fn` returns a pair.
      fisher: as for `value_and_grad`.
      num_examples: as for `value_and_grad`, of the whole batch that a step gets.
      subsample: as for `value_and_grad`. None: 4 with `Soap` and `step_norm="spectral"`, if a part of the batch has
        64 examples or more, so that `cost=` allows statistics more often; else 1.
      communication_dtype: likewise.
      num_microbatches: in how many parts the batch is worked through. All parts get the other arguments whole: pass
        what is random by name, `step(params, opt_state, batch, key=key)`.
      batch_argnums: the positions of the batch, as `loss_fn` counts its arguments, with `params` as 0. None: as
        `find_layers` finds them.
      skip: as for `find_layers`.
      reduce: likewise.
      gradient: likewise.
      strict: likewise.
      max_dim: as for `find_layers`; but None keeps oblong kernels whole with `inverse=kfac.Ekfac()`.
      verbose: whether `init` prints a line about what it has found, and compiling for more than 5 s says on stderr that
        it does, and for how long.
      donate: whether a step reuses the memory of the parameters and the state that it gets, which must then not be
        used again. On an accelerator that saves a copy of both, and time.
      options: what else `kfac.kfac` takes: `damping=`, `step_norm=`, `distribution=` and so on.

    Returns:
      A `TrainStep`.

    Raises:
      TypeError: `kfac.kfac` has no such option.
      ValueError: an argument is out of range; when a step is traced, the batch of micro-batches is not among the
        positional arguments; and as of the functions that it calls.
    """
    check_function(loss_fn)
    check(has_aux=has_aux, fisher=fisher, communication_dtype=communication_dtype, num_microbatches=num_microbatches)
    check(skip=skip, reduce=reduce, gradient=gradient, strict=strict, verbose=verbose, donate=donate)
    check_given(num_examples=num_examples, subsample=subsample, batch_argnums=batch_argnums, max_dim=max_dim)
    if "layers" in options:
        raise TypeError("train_step finds the layers by itself: leave layers= out, and pass skip= and max_dim= here")
    try:
        kfac(learning_rate, Layers((), ()), **options)  # which checks them, whatever the layers are
    except TypeError as error:
        raise TypeError(str(error).replace("kfac()", "train_step()")) from None
    if num_examples is not None and num_examples % num_microbatches:
        raise ValueError(f"num_microbatches={num_microbatches} does not divide num_examples={num_examples}")
    options = {"step_norm": "spectral", "cost": COST, "inverse": None, **options}
    cache: dict[Any, Layers] = {}  # of arguments of some shapes
    inverse, _ = chosen(Layers((), ()), options["step_norm"], options["inverse"], options["cost"])
    # `Soap` takes a basis from statistics, and nothing else: those of a quarter of the examples will do, more often.
    quarters = subsample is None and options["step_norm"] is not None and isinstance(inverse, Soap)
    # There are moments of whole kernels only.
    longest = MAX_DIM if inverse.takes_moments and max_dim is None else max_dim

    def layers_of(params, args, kwargs):
        leaves, structure = jax.tree.flatten((params, args, kwargs))
        shapes = structure, *map(jax.typeof, leaves)
        cache[shapes] = cache.get(shapes) or find_layers(
            loss_fn, params, *args, has_aux=has_aux, skip=skip, reduce=reduce, gradient=gradient, strict=strict,
            max_dim=longest, batch_argnums=batch_argnums, **kwargs
        )  # fmt: skip
        if (count := cache[shapes].num_examples or 0) % num_microbatches:
            raise ValueError(f"num_microbatches={num_microbatches} does not divide the {count} examples of the batch")
        # The interval of "auto" goes by examples; a last batch that has fewer must not change it.
        layers = dataclasses.replace(cache[shapes], num_examples=next(iter(cache.values())).num_examples)
        # A quarter of fewer than 64 examples was not tried. The first batch decides on the cost, each on its own share.
        first, this = (quarters and (x.num_examples or 0) // num_microbatches >= 64 for x in (layers, cache[shapes]))
        full, quarter = (seldom_work(layers, Soap(), every) or 1 for every in (1, 4))
        cheaper = {"cost": options["cost"] * full / quarter} if first else {}
        return layers, subsample or (4 if this else 1), options | cheaper

    def init(params, *args, **kwargs):
        layers, part, optional = layers_of(params, args, kwargs)
        if verbose and jax.process_index() == 0:
            print(_summary(layers, part, optional))
        return kfac(learning_rate, layers, **optional).init(params)

    def step(params, opt_state, *args, fisher_key, statistics, **kwargs):
        layers, part, optional = layers_of(params, args, kwargs)
        measure = value_and_grad(
            loss_fn, layers, has_aux=has_aux, fisher=fisher, subsample=part, statistics=statistics,
            num_examples=num_examples and num_examples // num_microbatches, communication_dtype=communication_dtype,
        )  # fmt: skip
        if num_microbatches > 1:
            measure = microbatch(measure, num_microbatches, batch_argnums=_split_argnums(layers, batch_argnums))
        basis = {"basis": eigenbasis(opt_state, layers)} if inverse.takes_moments else {}
        value, grads, factors = measure(params, *args, fisher_key=fisher_key, **basis, **kwargs)
        updates, opt_state = kfac(learning_rate, layers, **optional).update(grads, opt_state, params, factors=factors)
        return optax.apply_updates(params, updates), opt_state, value

    return TrainStep(init, functools.wraps(loss_fn)(step), verbose, donate)


def _strong(leaf: Any) -> Any:
    """The leaf without a weak type: with one the first step would be another program than those after it."""
    return lax.convert_element_type(leaf, leaf.dtype) if getattr(leaf, "weak_type", False) else leaf


def _jit_with_notice(
    function: Callable[..., Any], what: str, verbose: bool, donated: tuple[int, ...] = (), **fixed: bool
) -> Callable[..., Any]:
    """`function` of `params` and more under `jax.jit`, which says on stderr for how long it compiles: at 5 s, 10 s, ...

    A call that compiles comes back when that is done, so a thread says it. All it does is sleep and print; it ends with
    the call, or with the process, and nothing waits for it.
    """
    running: list[threading.Event] = []

    def tell(ended):
        began = time.monotonic()
        while not ended.wait(max(5.0, time.monotonic() - began)):
            print(f"compiling {what}: {time.monotonic() - began:.0f} s so far", file=sys.stderr, flush=True)

    @functools.wraps(function)
    def traced(*args, **kwargs):
        if verbose and jax.process_index() == 0:
            running.append(threading.Event())
            threading.Thread(target=tell, args=running[-1:], daemon=True).start()
        return function(*args, **kwargs, **fixed)

    if donated:
        del traced.__wrapped__  # else JAX looks for the donated arguments in the signature of the loss
    program = jax.jit(traced, donate_argnums=donated)

    def call(params, *args, **kwargs):
        try:
            return program(jax.tree.map(_strong, params), *args, **kwargs)
        finally:
            while running:
                running.pop().set()

    return call


def _summary(layers: Layers, subsample: int, options: dict[str, Any]) -> str:
    inverse, every = chosen(layers, options["step_norm"], options["inverse"], options["cost"])
    total, within = (sum(layer.num_params for layer in some) for some in (layers, layers.with_blocks))
    size, left = (f"{number / 1e6:.1f} M" if number >= 1e5 else f"{number:,}" for number in (within, total - within))
    part = f" of 1/{subsample} of the examples" if subsample > 1 else ""
    when = f"every {every} steps" if every > 1 else "in every step"
    count = len(layers.with_blocks)
    size += " parameters" + f" ({left} more skipped)" * (total > within)
    return f"{count} layer{'s' * (count != 1)}, {size}, {type(inverse).__name__}, statistics{part} {when}"


def _split_argnums(layers: Layers, argnums: int | Sequence[int] | None) -> int | Sequence[int] | None:
    """Returns the positions of the arguments that micro-batches split: those given, else as tracing found them."""
    if argnums is not None or not layers.batch_argnums:
        return argnums
    if named := [k for k in layers.batch_argnums if isinstance(k, str)]:
        what = f"{', '.join(map(repr, named))} of it are keyword arguments"
        raise ValueError(f"num_microbatches: the batch must be in positional arguments, but {what}")
    return [k for k in layers.batch_argnums if isinstance(k, int)]
