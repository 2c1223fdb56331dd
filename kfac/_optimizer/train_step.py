"""Combine `find_layers`, `statistics`, `observe`, `kfac` and the update of the parameters into a single call."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from kfac._capture.find_layers import find_layers
from kfac._capture.make_layers import LONG
from kfac._capture.thin_batch import Part, statistics_one_in, thin_batch
from kfac._capture.value_and_grad import plain_value_and_grad, statistics
from kfac._checks import (
    HINTS,
    RENAMED,
    check,
    check_fraction,
    check_function,
    check_given,
    check_layers,
    check_rules,
    takes_kwargs,
    with_hints,
)
from kfac._curvature.cost_model import prices_of_layers
from kfac._curvature.preconditioner import BlockPreconditioner
from kfac._layers import MAX_DIM, Layers, format_bytes
from kfac._mesh import PyTree
from kfac._microbatch import in_parts
from kfac._optimizer.clock import Clock, interval_of
from kfac._optimizer.eigenbasis import eigenbasis
from kfac._optimizer.interval import Interval
from kfac._optimizer.kfac import kfac
from kfac._optimizer.observe import observe
from kfac._optimizer.overdue import note_observe
from kfac._optimizer.state import AdaptiveDampingState, KfacState, find_nodes
from kfac._optimizer.step_scaling import ScalarOrSchedule


@dataclasses.dataclass(frozen=True, eq=False)
class TrainStep:
    """The result of `train_step`: `init` returns the optimizer state, and a call makes a step.

    `jax.jit` compiles the two programs of a call when they are first needed. `observe` takes statistics, and `step`
    updates the parameters. Inside a `jit` or `scan` of your own, `observe` is a branch of a `lax.cond`.

    Attributes:
      loss_fn: the loss.
      learning_rate: scalar or schedule.
      optimizer: returns the optimizer for a learning rate, layers and `options`.
      has_aux: whether the loss returns a pair.
      given: the layers, if the user gave them.
      found: the options for `find_layers`, otherwise.
      fisher: the `fisher` of `statistics`.
      statistics_fraction: the `fraction` of `statistics`.
      num_examples: the number of examples over which the loss takes the mean, if given.
      num_microbatches: the number of parts into which a batch is split.
      verbose: whether to print.
      donate: whether a step reuses the memory of its arguments.
      options: the options for `optimizer`.
      layers: the layers found so far, by the parameters' tree structure and shapes.
      intervals: the optimizer's intervals between statistics, by the same keys.
      clock: the host's knowledge of when statistics are due.
    """

    loss_fn: Callable
    learning_rate: ScalarOrSchedule
    optimizer: Callable[..., optax.GradientTransformation]
    has_aux: bool
    given: Layers | None
    found: dict[str, Any]
    fisher: str
    statistics_fraction: float | None
    num_examples: int | None
    num_microbatches: int
    verbose: bool
    donate: bool
    options: dict[str, Any]
    layers: dict[Any, Layers] = dataclasses.field(default_factory=dict, repr=False)
    intervals: dict[Any, Interval | None] = dataclasses.field(
        default_factory=dict, init=False, repr=False
    )
    clock: Clock = dataclasses.field(default_factory=Clock, init=False, repr=False)

    @takes_kwargs
    def init(
        self,
        params: Any,
        *args: Any,
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return the optimizer state for parameters and arguments of `loss_fn` that have the shapes of later steps.

        Raises:
          ValueError: if the number of examples is ambiguous, or if `num_microbatches` does not divide it.
        """
        # Find the layers outside `jit`, because `jit` hides how parameters are split over a mesh.
        before = {(x.param_specs, x.num_examples) for x in self.layers.values()}
        layers = self._find_layers(params, args, kwargs or {}, anew=True)
        if before - {(layers.param_specs, layers.num_examples)}:
            # The programs were compiled for other layers.
            self.__dict__.pop("_programs", None)
        if layers._unclear and self.num_examples is None:
            raise ValueError(layers._unclear.replace("value_and_grad", "train_step"))
        count = layers.num_examples or 0
        if count % self.num_microbatches:
            raise ValueError(
                f"num_microbatches={self.num_microbatches} does not divide the {count} examples of the batch"
            )
        opt_state = self._programs["init"](params)
        preconditioner = _kfac_state(opt_state).settings.preconditioner
        known = self.given is not None or "max_factor_dim" in self.found
        if preconditioner.uses_example_moments and not known:
            # As in `train_step`, which could not see the preconditioner.
            self.found["max_factor_dim"] = MAX_DIM
            self.__dict__.pop("_programs")
            return self.init(params, *args, kwargs=kwargs)
        leaves = jax.tree.leaves(opt_state)
        traced = any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
        if self.verbose and not traced and jax.process_index() == 0:
            print(self._summary(layers, params, opt_state), flush=True)
        interval = interval_of(opt_state)
        self.intervals[_shapes(params)] = interval
        self.clock.record(opt_state, 0, interval)
        return opt_state

    @takes_kwargs
    def __call__(
        self,
        params: Any,
        opt_state: Any,
        *args: Any,
        kwargs: Mapping[str, Any] | None = None,
        fisher_key: Array | None = None,
    ) -> tuple[Any, Any, Any]:
        """Make a step, after taking statistics if they are due.

        The call returns before the device has finished. It waits for the device only if `opt_state` is not the state
        that the last call returned, for example after a restart.

        Args:
          params: the parameters.
          opt_state: the optimizer state.
          args: the further positional arguments of `loss_fn`, such as a batch. Bools and strings among them, and in
            `kwargs`, are static: a new value compiles a new program. Numbers are traced, as under `jax.jit`.
          kwargs: the keyword arguments of `loss_fn`, a dictionary. With `num_microbatches`, the part's number is folded
            into each typed PRNG key among them. Untyped keys must be called `key` or `fisher_key`.
          fisher_key: a PRNG key, needed with `fisher="sampled"` or `"expected"`.

        Returns:
          The new parameters, the new state, and the result of `loss_fn`.
        """
        due, calls = self.clock.read(opt_state)
        kwargs = dict(kwargs or {})

        def run_observe(opt_state):
            return self._programs["observe"](
                params, opt_state, *args, kwargs=kwargs, fisher_key=fisher_key
            )

        if isinstance(due, jax.core.Tracer):
            opt_state = lax.cond(due, run_observe, lambda state: state, opt_state)
        elif due:
            opt_state = run_observe(opt_state)
        result = self._programs["step"](params, opt_state, *args, kwargs=kwargs)
        if calls is not None:
            self.clock.record(result[1], calls + 1, self._interval(params))
        return result

    def _summary(self, layers: Layers, params: PyTree, opt_state: PyTree) -> str:
        """Return lines with the layers, the batch, the mean cost of a step, the state's memory, and the compilation."""
        one_in = statistics_one_in(layers, self.statistics_fraction)
        settings = _kfac_state(opt_state).settings
        preconditioner = settings.preconditioner
        period = 1 if settings.interval is None else int(settings.interval.every)
        total = sum(layer.num_params for layer in layers)
        within = sum(layer.num_params for layer in layers.preconditioned)
        count = len(layers.preconditioned)
        found = f"{count} layer{'s' * (count != 1)}, {_short(within)} parameters"
        if total > within:
            found += f" ({_short(total - within)} more skipped)"
        examples = f"{self.num_examples or layers.num_examples or 'unknown'} examples"
        if layers.batch_argnums:
            keys = ", ".join(map(repr, layers.batch_argnums))
            examples += f" in argument{'s' * (len(layers.batch_argnums) > 1)} {keys}"
        if (layers.num_examples or one_in) < one_in:
            one_in = 1  # A batch with fewer examples is used whole.
        part = f" from 1/{one_in} of them" if one_in > 1 else ""
        when = (
            f"every {period} steps after the start" if period > 1 else "in every step"
        )
        # Losses that the optimizer evaluates are not counted.
        evaluates = find_nodes(opt_state, AdaptiveDampingState)
        extra = ", without the optimizer's own evaluations" if evaluates else ""
        size = _bytes_per_device(opt_state)
        adam = 2 * _bytes_per_device(params) or 1
        kept = "; set jax_compilation_cache_dir to keep them"
        if jax.config.values["jax_compilation_cache_dir"]:
            kept = ", or loads them"
        lines = [
            f"{found}, {type(preconditioner).__name__}",
            f"{examples}; statistics{part} {when}",
            _cost(layers, preconditioner, period, one_in, extra),
            f"the state takes {format_bytes(size)} per device, {size / adam:.1f} times Adam's",
            f"the first step compiles two programs{kept}",
        ]
        return "\n".join(lines)

    def _interval(self, params: PyTree) -> Interval | None:
        """Return the optimizer's interval between statistics, or None if the host does not know it."""
        shapes = _shapes(params)
        if shapes not in self.intervals:
            # Ask a new state: the given state may be another optimizer's.
            self.intervals[shapes] = interval_of(jax.eval_shape(self._init, params))
        return self.intervals[shapes]

    def _init(self, params):
        return self._transformation(self._find_layers(params, (), {})).init(params)

    @functools.cached_property
    def _programs(self) -> dict[str, Callable]:
        """The compiled programs, by name."""

        def compiled(method, *donated):
            def joined(params, *args, fixed, **kwargs):
                rest, kwargs = _join((args[1:], kwargs), fixed)
                return method(params, *args[:1], *rest, **kwargs)

            donated = donated if self.donate else ()
            program = jax.jit(joined, static_argnames="fixed", donate_argnums=donated)

            def call(params, *args, **kwargs):
                params = jax.tree.map(_strong, params)
                # The state before the loss's arguments has many leaves, and none to split off.
                (rest, kwargs), fixed = _split((args[1:], kwargs))
                return program(params, *args[:1], *rest, fixed=fixed, **kwargs)

            return call

        return {
            "init": compiled(self._init),
            "observe": compiled(self._observe, 1),
            "step": compiled(self._step, 0, 1),
        }

    def _transformation(self, layers: Layers) -> optax.GradientTransformationExtraArgs:
        tx = self.optimizer(self.learning_rate, layers, **self.options)
        return optax.with_extra_args_support(tx)

    def _find_layers(
        self,
        params: PyTree,
        args: Sequence[PyTree],
        kwargs: Mapping[str, PyTree],
        anew: bool = False,
    ) -> Layers:
        """Return the layers. Find them again only if `anew` is true or the parameters have new shapes."""
        if self.given is not None:
            return self.given
        shapes = _shapes(params)
        if anew or shapes not in self.layers:
            # The programs trace numbers, so a loss that needs their values fails here already.
            args, kwargs = jax.tree.map(_as_traced, (args, kwargs))
            self.layers[shapes] = find_layers(
                self.loss_fn,
                params,
                *args,
                has_aux=self.has_aux,
                kwargs=kwargs,
                **self.found,
            )
        return self.layers[shapes]

    def _in_parts(
        self,
        fn: Callable,
        layers: Layers,
        parts: int,
    ) -> Callable:
        """Split the batch into micro-batches: the arguments in `batch_argnums=` if given, otherwise as traced.

        Raises:
          ValueError: if tracing found the batch in keyword arguments.
        """
        argnums = self.found["batch_argnums"]
        if parts == 1:
            return fn
        if argnums is None and layers.batch_argnums:
            named = [repr(k) for k in layers.batch_argnums if isinstance(k, str)]
            if named:
                raise ValueError(
                    f"num_microbatches: the batch must be in positional arguments, but {', '.join(named)} of it are "
                    "keyword arguments"
                )
            argnums = list(layers.batch_argnums)
        return in_parts(fn, parts, argnums, layers._shared_arrays)

    def _observe(self, params, opt_state, *args, kwargs, fisher_key):
        layers = self._find_layers(params, args, kwargs)
        state = _kfac_state(opt_state)
        one_in = statistics_one_in(layers, self.statistics_fraction)
        whole = self._whole(args, kwargs)
        args, kwargs, examples, parts = thin_batch(layers, whole, one_in)
        measure = statistics(
            self.loss_fn,
            layers,
            fraction=1,
            has_aux=self.has_aux,
            fisher=self.fisher,
            num_examples=examples and examples // parts,
            distribution=state.settings.distribution,
        )
        basis = None
        if state.settings.preconditioner.uses_example_moments:
            basis = eigenbasis(opt_state, layers)
        measure = self._in_parts(measure, layers, parts)
        factors = measure(
            params, *args, kwargs=kwargs, fisher_key=fisher_key, basis=basis
        )
        return observe(opt_state, factors)

    def _step(self, params, opt_state, *args, kwargs):
        layers = self._find_layers(params, args, kwargs)
        measure = plain_value_and_grad(self.loss_fn, self.has_aux)
        measure = self._in_parts(measure, layers, self.num_microbatches)
        result, grads = measure(params, *args, kwargs=kwargs)
        one_in = statistics_one_in(layers, self.statistics_fraction)
        # Only optimizers that evaluate the loss call these functions. Line searches need the loss and the gradient too.
        extra = {
            "value": result[0] if self.has_aux else result,
            "grad": grads,
            "value_fn": self._loss_of_params(layers, args, kwargs, 1),
        }
        if one_in > 1:
            extra["curvature_fn"] = self._loss_of_params(layers, args, kwargs, one_in)
        updates, opt_state = self._transformation(layers).update(
            grads, opt_state, params, **extra
        )
        # A call takes statistics when they are due, so nobody has forgotten them.
        note_observe()
        return optax.apply_updates(params, updates), opt_state, result

    def _loss_of_params(
        self,
        layers: Layers,
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
        one_in: int,
    ) -> Callable[[PyTree], Array]:
        """Return the mean loss over one of `one_in` examples, as a function of the parameters."""
        # Each call gets copies of objects among the arguments, because tracing may change flax nnx objects.
        leaves, structure = jax.tree.flatten(self._whole(args, kwargs))

        def loss(*args, kwargs):
            arrays, fixed = _split((args, kwargs))

            def run(arrays):
                args, kwargs = _join(arrays, fixed)
                result = self.loss_fn(*args, **kwargs)
                return result[0] if self.has_aux else result

            if self.num_microbatches > 1:
                # Otherwise derivatives would keep the activations of all micro-batches.
                run = jax.checkpoint(run)
            return run(arrays)

        def loss_of_params(params):
            whole = jax.tree.unflatten(structure, leaves)
            part = thin_batch(layers, whole, one_in)
            in_parts = self._in_parts(loss, layers, part.num_microbatches)
            return in_parts(params, *part.args, kwargs=part.kwargs)

        return loss_of_params

    def _whole(self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> Part:
        """Return the arguments of the loss with the whole batch."""
        return Part(args, kwargs, self.num_examples, self.num_microbatches)


MOVED = {
    "communication_dtype": "distribution=kfac.Distribution(communication_dtype=...)",
    "max_factor_dim": "layers=kfac.find_layers(loss_fn, params, batch, max_factor_dim=...)",
    "strict": "layers=kfac.find_layers(loss_fn, params, batch, strict=...)",
}


@with_hints(HINTS | RENAMED | MOVED)
def train_step(
    loss_fn: Callable,
    learning_rate: ScalarOrSchedule,
    *,
    optimizer: Callable[..., optax.GradientTransformation] = kfac,
    layers: Layers | None = None,
    has_aux: bool = False,
    rules: Mapping[str, str | float] | None = None,
    batch_argnums: int | Sequence[int] | None = None,
    num_examples: int | None = None,
    num_microbatches: int = 1,
    fisher: str = "empirical",
    statistics_fraction: float | None = None,
    verbose: bool = True,
    donate: bool = False,
    **options: Any,
) -> TrainStep:
    """Return a K-FAC training step, which replaces an optimizer and a handwritten step function.

    ::

        jax.config.update("jax_compilation_cache_dir", os.path.expanduser("~/.cache/jax"))
        step = kfac.train_step(loss_fn, kfac.schedules.warmup_linear_decay(0.1, num_steps))
        opt_state = step.init(params, batch)
        for batch in batches:
            params, opt_state, loss = step(params, opt_state, batch)

    The step follows the training loop in docs/getting_started.md. It takes statistics when they are due: in each of the
    first ten steps, and then less and less often, until the interval reaches the value that `overhead=` of `kfac.kfac`
    allows. With `preconditioner=kfac.EKFAC()`, it also takes the moments. `print(kfac.find_layers(loss_fn, params,
    batch))` shows the layers. The first line of the example caches compiled programs on disk for the next run.

    Args:
      loss_fn: `loss_fn(params, *args, **kwargs)`, which returns the mean loss, or a pair with `has_aux`. If the model
        changes a state, such as batch-norm averages, pass the state as an argument and return it in the auxiliary
        output.
      learning_rate: scalar or schedule, see `kfac.kfac`.
      optimizer: `kfac.kfac`, `kfac.natural_gradient`, `kfac.gauss_newton`, or your own function `(learning_rate,
        layers, **options)`, which returns an optax optimizer that contains `scale_by_kfac`. For example, put
        `kfac.kfac` into an `optax.chain`. Its `update` gets `value=`, `grad=` and `value_fn=`, which line searches and
        `optax.contrib.reduce_on_plateau` need.
      layers: the layers that `find_layers` returned for `loss_fn`, if you want options of `find_layers` that are not
        here. None: `init` finds them.
      has_aux: whether `loss_fn` returns a pair `(loss, aux)`.
      rules: see `find_layers`. Not with `layers`.
      batch_argnums: the positions of the batch among the arguments of `loss_fn`, with `params` as 0. By default, the
        positions that `find_layers` finds. Not with `layers`.
      num_examples: see `value_and_grad`; the number for the whole batch of a step.
      num_microbatches: the number of parts into which the batch is split. The other arguments go to every part whole.
        Therefore pass PRNG keys by name, `step(params, opt_state, batch, kwargs={"key": key})`.
      fisher: see `value_and_grad`.
      statistics_fraction: the `fraction` of `statistics`.
      verbose: whether `init` prints the layers, the examples, the interval of statistics, the cost of a step and the
        state's memory, and whether JAX keeps the compiled programs.
      donate: whether a step reuses the memory of the parameters and the state that it receives. Do not use either
        again after the step. On an accelerator, this saves time and a copy of both.
      options: options of the optimizer: `damping=`, `weight_decay=`, `preconditioner=` and so on.

    Returns:
      A `TrainStep`.

    Raises:
      TypeError: if the optimizer has no such option.
      ValueError: if an argument is out of range, or if `rules` or `batch_argnums` are given with `layers`. A step with
        micro-batches raises it while it is traced if the batch is not among the positional arguments. Errors of the
        optimizer and of `find_layers` pass through.
    """
    check_function(loss_fn)
    check_rules(rules)
    check(
        has_aux=has_aux,
        fisher=fisher,
        num_microbatches=num_microbatches,
        verbose=verbose,
        donate=donate,
    )
    check_given(num_examples=num_examples, batch_argnums=batch_argnums)
    if statistics_fraction is not None:
        check_fraction("statistics_fraction", statistics_fraction)
    # An empty `Layers` checks the options before there are layers.
    try:
        tx = optimizer(learning_rate, Layers((), ()), **options)
    except TypeError as error:
        raise TypeError(
            f"train_step() calls optimizer(learning_rate, layers, **options): {error}"
        ) from error
    try:
        empty = jax.eval_shape(tx.init, {})
    except (TypeError, ValueError, LookupError, AttributeError):
        # A mask for weight decay or a line search may need the parameters. `init` has them, and raises other errors
        # again.
        preconditioner = options.get("preconditioner")
    else:
        preconditioner = _kfac_state(empty).settings.preconditioner
    if num_examples is not None and num_examples % num_microbatches:
        raise ValueError(
            f"num_microbatches={num_microbatches} does not divide num_examples={num_examples}"
        )
    found: dict[str, Any] = dict(rules=rules, batch_argnums=batch_argnums)
    if layers is not None:
        check_layers(layers)
        for name, value in found.items():
            if value is not None:
                raise ValueError(
                    f"{name}={value!r} has no effect with layers=: pass it to kfac.find_layers"
                )
    elif getattr(preconditioner, "uses_example_moments", False):
        # Only whole kernels have moments.
        found["max_factor_dim"] = MAX_DIM
    return TrainStep(
        loss_fn=loss_fn,
        learning_rate=learning_rate,
        optimizer=optimizer,
        has_aux=has_aux,
        given=layers,
        found=found,
        fisher=fisher,
        statistics_fraction=statistics_fraction,
        num_examples=num_examples,
        num_microbatches=num_microbatches,
        verbose=verbose,
        donate=donate,
        options=options,
    )


def _shapes(params: PyTree) -> Any:
    """Return the tree structure and the shapes of parameters, as a hashable value."""
    leaves, structure = jax.tree.flatten(params)
    return structure, *[getattr(leaf, "shape", ()) for leaf in leaves]


def _as_traced(leaf: Any) -> Any:
    """Return the shape and dtype that `jax.jit` gives a Python number. Return other leaves as they are."""
    is_number = isinstance(leaf, int | float | complex) and not isinstance(leaf, bool)
    return jax.eval_shape(lambda x: x, leaf) if is_number else leaf


def _is_none(leaf: object) -> bool:
    return leaf is None


def _split(tree: PyTree) -> tuple[PyTree, tuple[tuple[int, bool | str], ...]]:
    """Replace bools and strings by None, because losses branch on them. Return the tree, and them with their places."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=_is_none)
    places = enumerate(leaves)
    fixed = tuple((k, leaf) for k, leaf in places if isinstance(leaf, bool | str))
    for k, _ in fixed:
        leaves[k] = None
    return jax.tree.unflatten(structure, leaves), fixed


def _join(tree: PyTree, fixed: Sequence[tuple[int, bool | str]]) -> PyTree:
    """Put the bools and strings that `_split` took out back."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=_is_none)
    for k, leaf in fixed:
        leaves[k] = leaf
    return jax.tree.unflatten(structure, leaves)


def _strong(leaf: Array) -> Array:
    """Return the leaf without a weak type. With a weak type, the first step would need a program of its own."""
    if not getattr(leaf, "weak_type", False):
        return leaf
    return lax.convert_element_type(leaf, leaf.dtype)


def _kfac_state(opt_state: PyTree) -> KfacState:
    """Return the first `KfacState` in an optimizer state. Raise a `ValueError` if there is none."""
    states = find_nodes(opt_state, KfacState)
    if not states:
        raise ValueError(
            "optimizer must return an optimizer that contains kfac.scale_by_kfac(layers), as kfac.kfac does, but its "
            f"state is {opt_state!r}"
        )
    return states[0]


def _cost(
    layers: Layers,
    preconditioner: BlockPreconditioner,
    period: int,
    one_in: int,
    extra: str,
) -> str:
    """Return a line with the FLOPs of a mean step; `extra` says what they leave out."""
    prices = prices_of_layers(layers, preconditioner, period, one_in)
    if not prices:
        return "the gradient's FLOPs are unknown, and so is the cost of a step"
    times = 1 + sum(prices.values())
    line = f"on average, a step costs {times:.2f} times the gradient's FLOPs{extra}"
    name = max(prices, key=prices.__getitem__)
    rows = max(layers[name].d_in, layers[name].d_out)
    if prices[name] < EXPENSIVE or rows < LONG:
        return line
    return (
        f"{line}, {prices[name]:.2f} of them for {name!r}: layers=kfac.find_layers(..., max_factor_dim={rows // 4}) "
        "cuts its factors into blocks"
    )


def _bytes_per_device(tree: PyTree) -> int:
    size = 0
    for leaf in jax.tree.leaves(tree):
        shape = jnp.shape(leaf)
        if isinstance(leaf, Array):
            shape = leaf.sharding.shard_shape(shape)
        size += math.prod(shape) * jnp.result_type(leaf).itemsize
    return size


def _short(number: int) -> str:
    return f"{number / 1e6:.1f} M" if number >= 1e5 else f"{number:,}"


# From this price on, as a fraction of the whole gradient's FLOPs, the summary names a layer.
EXPENSIVE = 0.25
