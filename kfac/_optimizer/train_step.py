"""A whole training step in one call: `find_layers`, `statistics`, `observe`, `kfac` and its update."""

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

from kfac._capture.find_layers import LONG, find_layers
from kfac._capture.microbatch import every_example, microbatch
from kfac._capture.value_and_grad import plain_value_and_grad, statistics
from kfac._checks import check, check_function, check_given, with_hints
from kfac._distributed.intervals import prices_of_layers
from kfac._layers import MAX_DIM, Layers
from kfac._optimizer.diagnostics import eigenbasis, statistics_due
from kfac._optimizer.kfac import INTERVAL_OPTIONS, Chosen, chosen, kfac
from kfac._optimizer.moves import ScalarOrSchedule
from kfac._optimizer.observe import observe


@dataclasses.dataclass(frozen=True, eq=False)
class TrainStep:
    """The result of `train_step`: `init` makes the state, and a call is one step.

    Two programs are compiled by `jax.jit` when they are first needed: `observe`, which takes statistics, and the step.
    Inside a `jit` or `scan` of your own, `observe` is a branch of a `lax.cond`.

    Attributes:
      loss_fn: the loss.
      learning_rate: scalar or schedule.
      has_aux: whether the loss returns a pair.
      found: the options of `find_layers`.
      measured: the options of `statistics`.
      num_examples: how many examples the loss is the mean of, if that is given.
      num_microbatches: the number of parts of a batch.
      verbose: whether to print.
      donate: whether a step reuses the memory of its arguments.
      options: the options of `kfac`.
    """

    loss_fn: Callable[..., Any]
    learning_rate: ScalarOrSchedule
    has_aux: bool
    found: dict[str, Any]
    measured: dict[str, Any]
    num_examples: int | None
    num_microbatches: int
    verbose: bool
    donate: bool
    options: dict[str, Any]
    layers: dict[Any, Layers] = dataclasses.field(default_factory=dict, repr=False)

    def init(self, params: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the state of the optimizer, for parameters and arguments of `loss_fn` with the shapes of the steps."""
        # Outside of `jit`, which hides how parameters are split over a mesh.
        before = {(x.splits, x.num_examples) for x in self.layers.values()}
        layers = self._find_layers(params, args, kwargs, anew=True)
        if before - {(layers.splits, layers.num_examples)}:
            self.__dict__.pop("_programs", None)  # compiled for other layers
        if layers.unclear and self.num_examples is None:
            raise ValueError(layers.unclear.replace("value_and_grad", "train_step"))
        if (count := layers.num_examples or 0) % self.num_microbatches:
            what = f"num_microbatches={self.num_microbatches} does not divide the {count} examples of the batch"
            raise ValueError(what)
        if self.verbose and jax.process_index() == 0:
            print(_summary(layers, self.options))
        return self._programs["init"](params)

    def __call__(
        self, params: Any, opt_state: Any, *args: Any, fisher_key: jax.Array | None = None, **kwargs: Any
    ) -> tuple[Any, Any, Any]:
        """Make one step, after taking statistics if they are due.

        Args:
          params: the parameters.
          opt_state: the state.
          args: the further arguments of `loss_fn`, such as a batch.
          fisher_key: a PRNG key, with `fisher="sampled"` or `"expected"`.
          kwargs: its keyword arguments. With `num_microbatches` every part gets a PRNG key `key=` of its own.

        Returns:
          New parameters, the new state, and the result of `loss_fn`.
        """
        due, observe = statistics_due(opt_state), self._programs["observe"]
        arguments = (params, opt_state, *args), {"fisher_key": fisher_key, **kwargs}
        if isinstance(due, jax.core.Tracer):
            opt_state = lax.cond(due, lambda x: observe(*x[0], **x[1]), lambda x: x[0][1], arguments)
        elif due:
            opt_state = observe(*arguments[0], **arguments[1])
        return self._programs["step"](params, opt_state, *args, **kwargs)

    @functools.cached_property
    def _programs(self) -> dict[str, Callable[..., Any]]:
        """The compiled programs, by name."""

        def compiled(method, what, donated=()):
            return _jit_with_notice(method, what, self.verbose, donated if self.donate else ())

        return {
            "init": compiled(
                lambda params: self._optimizer(self._find_layers(params, (), {})).init(params), "the state"
            ),
            "observe": compiled(self._observe, "the statistics", (1,)),
            "step": compiled(self._step, "the step", (0, 1)),
        }

    def _find_layers(self, params: Any, args: Any, kwargs: Any, anew: bool = False) -> Layers:
        """Find the layers, once for parameters of the same shapes."""
        leaves, structure = jax.tree.flatten(params)
        shapes = structure, *(getattr(leaf, "shape", ()) for leaf in leaves)
        if anew or shapes not in self.layers:
            self.layers[shapes] = find_layers(self.loss_fn, params, *args, has_aux=self.has_aux, **self.found, **kwargs)
        return self.layers[shapes]

    def _optimizer(self, layers: Layers) -> optax.GradientTransformationExtraArgs:
        return kfac(self.learning_rate, layers, **self.options)

    def _in_parts(self, fn: Callable[..., Any], layers: Layers, parts: int) -> Callable[..., Any]:
        if parts == 1:
            return fn
        return microbatch(fn, parts, batch_argnums=_split_argnums(layers, self.found["batch_argnums"]))

    def _observe(self, params, opt_state, *args, fisher_key, **kwargs):
        layers = self._find_layers(params, args, kwargs)
        inverse, _, share = _chosen(layers, self.options)
        parts, examples = self.num_microbatches, self.num_examples
        if share > 1:
            fewer = -(-parts // share)
            thinned = every_example(layers, args, kwargs, share, fewer)
            args, kwargs, examples = thinned.args, thinned.kwargs, thinned.of(examples)
            parts = fewer if thinned.kept < thinned.rows else parts
        measure = statistics(
            self.loss_fn, layers, has_aux=self.has_aux, num_examples=examples and examples // parts, **self.measured
        )
        basis = {"basis": eigenbasis(opt_state, layers)} if inverse.takes_moments else {}
        factors = self._in_parts(measure, layers, parts)(params, *args, fisher_key=fisher_key, **basis, **kwargs)
        return observe(opt_state, factors)

    def _step(self, params, opt_state, *args, **kwargs):
        layers = self._find_layers(params, args, kwargs)
        measure = plain_value_and_grad(self.loss_fn, self.has_aux)
        value, grads = self._in_parts(measure, layers, self.num_microbatches)(params, *args, **kwargs)
        updates, opt_state = self._optimizer(layers).update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value


@with_hints
def train_step(
    loss_fn: Callable[..., Any],
    learning_rate: ScalarOrSchedule,
    *,
    has_aux: bool = False,
    fisher: str = "empirical",
    num_examples: int | None = None,
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

    It does what the loop of the README does: it takes statistics when they are due, in the first ten steps and then
    ever less often, down to what `cost=` of `kfac.kfac` allows. With `inverse=kfac.Ekfac()` it takes the moments too.
    `print(kfac.find_layers(loss_fn, params, batch))` shows the layers. The first line of the example keeps compiled
    programs for the next start.

    Args:
      loss_fn: `loss_fn(params, *args, **kwargs)`, the mean loss; with `has_aux` a pair. A state that the model changes,
        such as the averages of a batch norm, goes in as an argument and comes out in the auxiliary output.
      learning_rate: scalar or schedule, as for `kfac.kfac`.
      has_aux: whether `loss_fn` returns a pair.
      fisher: as for `value_and_grad`.
      num_examples: as for `value_and_grad`, of the whole batch that a step gets.
      communication_dtype: as for `value_and_grad`.
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
      options: further options of `kfac.kfac`: `damping=`, `step_norm=`, `statistics_fraction=` and so on.

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
    check_given(num_examples=num_examples, batch_argnums=batch_argnums, max_dim=max_dim)
    if "layers" in options:
        raise TypeError("train_step finds the layers by itself: leave layers= out, and pass skip= and max_dim= here")
    try:
        kfac(learning_rate, Layers((), ()), **options)  # which checks them, whatever the layers are
    except TypeError as error:
        raise TypeError(str(error).replace("kfac()", "train_step()")) from None
    if num_examples is not None and num_examples % num_microbatches:
        raise ValueError(f"num_microbatches={num_microbatches} does not divide num_examples={num_examples}")
    inverse = _chosen(Layers((), ()), options).inverse
    # There are moments of whole kernels only.
    longest = MAX_DIM if inverse.takes_moments and max_dim is None else max_dim
    found = dict(
        skip=skip, reduce=reduce, gradient=gradient, strict=strict, max_dim=longest, batch_argnums=batch_argnums
    )
    return TrainStep(
        loss_fn, learning_rate, has_aux, found, {"fisher": fisher, "communication_dtype": communication_dtype},
        num_examples, num_microbatches, verbose, donate, options,
    )  # fmt: skip


def _strong(leaf: Any) -> Any:
    """The leaf without a weak type: with one the first step would be another program than those after it."""
    return lax.convert_element_type(leaf, leaf.dtype) if getattr(leaf, "weak_type", False) else leaf


def _jit_with_notice(
    function: Callable[..., Any], what: str, verbose: bool, donated: tuple[int, ...] = ()
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
        return function(*args, **kwargs)

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


def _chosen(layers: Layers, options: dict[str, Any]) -> Chosen:
    return chosen(layers, **{name: options[name] for name in INTERVAL_OPTIONS if name in options})


def _summary(layers: Layers, options: dict[str, Any]) -> str:
    """Return a line about the layers, how often statistics are taken, and the price of a mean step."""
    inverse, every, share = _chosen(layers, options)
    total = sum(layer.num_params for layer in layers)
    within = sum(layer.num_params for layer in layers.with_blocks)
    size, left = (f"{number / 1e6:.1f} M" if number >= 1e5 else f"{number:,}" for number in (within, total - within))
    part = f" of 1/{share} of the examples" if share > 1 else ""
    when = f"every {every} steps" if every > 1 else "in every step"
    count = len(layers.with_blocks)
    size += " parameters" + f" ({left} more skipped)" * (total > within)
    line = f"{count} layer{'s' * (count != 1)}, {size}, {type(inverse).__name__}, statistics{part} {when}"
    prices = prices_of_layers(layers, inverse, every, share)
    if not prices:
        return line
    line += f"; in a mean step {sum(prices.values()):.2f} times the FLOPs of the gradient"
    name = max(prices, key=prices.__getitem__)
    rows = max(layers[name].d_in, layers[name].d_out)
    if prices[name] < EXPENSIVE or rows < LONG:
        return line
    return f"{line}, {prices[name]:.2f} for {name} alone: max_dim={rows // 4} cuts its factors into smaller blocks"


EXPENSIVE = 0.25  # the price of a layer, in gradients of all, from which the summary says so


def _split_argnums(layers: Layers, argnums: int | Sequence[int] | None) -> int | Sequence[int] | None:
    """Returns the positions of the arguments that micro-batches split: those given, else as tracing found them."""
    if argnums is not None or not layers.batch_argnums:
        return argnums
    if named := [k for k in layers.batch_argnums if isinstance(k, str)]:
        what = f"{', '.join(map(repr, named))} of it are keyword arguments"
        raise ValueError(f"num_microbatches: the batch must be in positional arguments, but {what}")
    return [k for k in layers.batch_argnums if isinstance(k, int)]
