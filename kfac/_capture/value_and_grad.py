"""Compute the statistics of a batch, with gradients in the same backward pass or without gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.flatten_util import ravel_pytree

from kfac._capture.outputs import (
    Marks,
    at_weight,
    draw,
    find_marks,
    keys_of,
    weights_to,
)
from kfac._capture.plan import StatisticsPlan, plan_taps
from kfac._capture.program import mark_live
from kfac._capture.replay import replay
from kfac._capture.taps import Probes
from kfac._capture.thin_batch import Part, statistics_one_in, thin_batch
from kfac._capture.trace import (
    Trace,
    batch_arguments,
    is_array,
    is_key,
    is_typed_key,
    trace,
)
from kfac._checks import (
    check,
    check_by_layer,
    check_function,
    check_given,
    check_layers,
    takes_kwargs,
)
from kfac._factors import Basis, Factors
from kfac._layers import Layers
from kfac._leaves import leaves_by_path, map_by_path
from kfac._mesh import (
    PyTree,
    as_varying,
    device_axes,
    device_key,
    on_mesh,
    varying_axes,
    varying_in,
    zeros_of,
)


def value_and_grad(
    loss_fn: Callable,
    layers: Layers,
    *,
    has_aux: bool = False,
    fisher: str = "empirical",
    num_examples: int | None = None,
    distribution: Wire | None = None,
) -> Callable[..., tuple[Any, Any, Any]]:
    """Return a function like `jax.value_and_grad(loss_fn)` that also returns every layer's statistics.

    ::

        loss, grads, factors = kfac.value_and_grad(loss_fn, layers)(params, batch)
        opt_state = kfac.observe(opt_state, factors)
        updates, opt_state = optimizer.update(grads, opt_state, params)

    For inputs `a` of shape `[n, s, d_in]` and gradients `g` of the mean loss `[n, s, d_out]`, with `n` examples and `s`
    positions that share the weight, a layer's factors are `A = (1/n) sum a a^T` and `G = (n/s) sum g g^T` (Grosse &
    Martens 2016; Osawa et al. 2019). Scales, shifts and other vectors get second moments of their per-example
    gradients. Operands keep the layer's compute dtype. Sums are in float32, or in float64 for float64 operands.

    The gradients are the same as from `jax.value_and_grad`. Inside `jax.shard_map` and `jax.pmap`, the loss, gradients
    and factors are this device's own: average the gradients with `lax.pmean`, and leave the factors to the optimizer.
    Under `jit` over a mesh, the factors belong to the whole batch. Where possible, a layer's Kronecker factors are
    packed and spread over the devices as soon as they are known. `factors.whole()` returns unpacked factors, with a
    copy on every device.

    Args:
      loss_fn: `loss_fn(params, *args, **kwargs)` returns the *mean* loss over this device's own examples, a real
        scalar; with `has_aux`, a pair `(loss, aux)`.
      layers: the layers that `find_layers` returned for this function.
      has_aux: whether `loss_fn` returns a pair.
      fisher: the gradients from which the statistics are computed. `"empirical"`: the gradients of the loss itself. If
        marked outputs have weights, the gradients of a mark with weight `w` are divided by `sqrt(w)`, which takes a
        second backward pass. `"sampled"`: the gradients of the mean of `-log p(y | output)` over the `n` examples. The
        targets `y` are drawn from the distribution that the network predicts at the outputs that `loss_fn` marks with
        `kfac.mark_output`. This is an unbiased estimate of the true Fisher matrix from a single draw (Martens 2020),
        and takes a second backward pass. `"expected"`: the expectation over all targets, which takes a backward pass
        for each feature of the output. It is exact for gradients that come from a single row of the output. It is
        unbiased if several rows contribute to a gradient: if examples interact, and in the unit-wise, diagonal and
        EKFAC moments of examples with several rows.
      num_examples: the number of examples that the loss averages over, for a loss that hides its examples. By default,
        the number of rows in the marked output, or without a mark the number of examples in the batch.
      distribution: the `kfac.Distribution` of the optimizer. Only its `communication_dtype` matters here. None:
        `"float32"`.

    Returns:
      A function of `(params, *args)` that returns `(value, grads, factors)`, where `value` is `loss` or `(loss, aux)`,
      `grads` has the structure of the parameters and `factors` is a `Factors`. It takes three keywords:

      - `kwargs`: the keyword arguments of `loss_fn`, a dictionary. For a keyword that must stay a Python value under
        `jax.jit`, pass `functools.partial(loss_fn, train=True)` as `loss_fn`.
      - `fisher_key`: a PRNG key. `"sampled"` draws targets with it, and `"expected"` draws a random sign for each row.
        The same key gives the same draws. They differ between devices: the device's position on the axes over which the
        arguments vary is folded into the key. Under `jax.pmap`, and `shard_map` with `check_vma=False`, these are all
        axes.
      - `basis`: the result of `kfac.curvature.eigenbasis`, for an optimizer with `preconditioner=kfac.EKFAC()`.
        `factors` then also hold `moments`, the second moments of per-example gradients in that eigenbasis, `n sum_i
        (Q_G^T (sum_p g_ip a_ip^T) Q_A)^2` with the gradients `g_ip` of the mean loss (George et al. 2018). Only layers
        that EKFAC can correct have moments (`Layer.supports_ekfac`).

    Raises:
      ValueError: an argument is out of range. When the function is traced: the loss has other layers than `layers`; the
        number of examples is not clear; the loss is an average over devices; `basis` is not an eigenbasis of the
        layers; `fisher_key` is missing, is not a PRNG key, or is given with `fisher="empirical"`. With `"sampled"`,
        `"expected"` or weights: the loss depends on a parameter on which no marked output depends.
    """
    evaluate = Evaluator(
        loss_fn, layers, has_aux, fisher, num_examples, wire_dtype(distribution)
    )

    @takes_kwargs
    @on_mesh
    def with_factors(params, *args, kwargs=None, fisher_key=None, basis=None):
        found = evaluate(
            params, args, dict(kwargs or {}), fisher_key, basis, gradients=True
        )
        return found.value, found.grads, found.factors

    return with_factors


def statistics(
    loss_fn: Callable,
    layers: Layers,
    *,
    fraction: float | None = None,
    has_aux: bool = False,
    fisher: str = "empirical",
    num_examples: int | None = None,
    distribution: Wire | None = None,
) -> Callable[..., Factors]:
    """Return a function that computes every layer's statistics, without parameter gradients.

    ::

        measure = jax.jit(kfac.statistics(loss_fn, layers))
        opt_state = kfac.observe(opt_state, measure(params, batch))

    For inputs `a` of shape `[n, s, d_in]` and gradients `g` of the mean loss `[n, s, d_out]`, with `n` examples and `s`
    positions that share the weight, a layer's factors are `A = (1/n) sum a a^T` and `G = (n/s) sum g g^T` (Grosse &
    Martens 2016; Osawa et al. 2019). Scales, shifts and other vectors get second moments of their per-example
    gradients. See `value_and_grad` for details.

    Args:
      loss_fn: `loss_fn(params, *args, **kwargs)` returns the mean loss over this device's own examples, a real scalar;
        with `has_aux`, a pair `(loss, aux)`. Auxiliary outputs are dropped.
      layers: the layers that `find_layers` returned for this function.
      fraction: the share of the batch that gives statistics, `1 / k` with an integer `k`: every `k`-th example, or all
        examples if the batch has fewer than `k`. None: a quarter, if the layers were found with a batch of at least 64
        examples and without arrays in it that all examples share, otherwise 1. A quarter is usually as good as the
        whole batch, at a quarter of the cost. The loss of such a part must make sense: pass 1 if examples refer to each
        other, as the edges of a graph do.
      has_aux: whether `loss_fn` returns a pair.
      fisher: as in `value_and_grad`.
      num_examples: as in `value_and_grad`, for the whole batch.
      distribution: as in `value_and_grad`.

    Returns:
      A function of `(params, *args)` that returns a `Factors`, for `kfac.observe`. It takes the same keywords as the
      function from `value_and_grad`: `kwargs`, `fisher_key` and `basis`.

    Raises:
      ValueError: as in `value_and_grad`. Also if `fraction` is not 1 over an integer, or if it is less than 1 and the
        layers were found without a batch.
    """
    evaluator = Evaluator(
        loss_fn, layers, has_aux, fisher, num_examples, wire_dtype(distribution)
    )
    one_in = statistics_one_in(layers, fraction)

    @takes_kwargs
    @on_mesh
    def factors_of(params, *args, kwargs=None, fisher_key=None, basis=None):
        whole = Part(args, dict(kwargs or {}), num_examples, 1)
        part = thin_batch(layers, whole, one_in)
        evaluate = dataclasses.replace(evaluator, num_examples=part.num_examples)
        return evaluate(
            params, part.args, part.kwargs, fisher_key, basis, gradients=False
        ).factors

    return factors_of


class Wire(Protocol):
    """The part of a `kfac.Distribution` that statistics depend on."""

    @property
    def communication_dtype(self) -> str: ...


def wire_dtype(distribution: Wire | None) -> str:
    """Return the dtype in which devices exchange factors.

    Raises:
      ValueError: `distribution` is neither a `kfac.Distribution` nor None.
    """
    if distribution is None:
        return "float32"
    if not hasattr(distribution, "communication_dtype"):
        raise ValueError(
            f"distribution must be a kfac.Distribution or None, but is {distribution!r}"
        )
    return distribution.communication_dtype


class Evaluation(NamedTuple):
    """The results of an `Evaluator`. Without gradients, `grads` is None."""

    value: PyTree
    grads: PyTree
    factors: Factors
    num_examples: int


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """Computes the loss, its gradients and its statistics.

    The attributes are the arguments of `value_and_grad`, with the dtype in which devices exchange factors.
    """

    loss_fn: Callable
    layers: Layers
    has_aux: bool
    fisher: str
    num_examples: int | None
    wire: str

    def __post_init__(self):
        """Check the arguments."""
        check_layers(self.layers)
        check_function(self.loss_fn)
        check(has_aux=self.has_aux, fisher=self.fisher)
        check_given(num_examples=self.num_examples)

    def __call__(
        self,
        params: PyTree,
        args: tuple,
        kwargs: dict[str, PyTree],
        fisher_key: Array | None,
        basis: Mapping[str, Basis] | None,
        gradients: bool,
    ) -> Evaluation:
        """Evaluate the loss and its statistics, and with `gradients` its gradients."""
        key = _typed_key(fisher_key, self.fisher)
        if basis is not None:
            check_basis(basis, self.layers)
        # With replicated parameters, shard_map would sum gradients and statistics over devices inside autodiff.
        axes = _axes_of_arrays((args, kwargs))
        params = as_varying(params, axes | varying_axes(params))
        batch = batch_arguments(self.layers, args, kwargs)
        traced = trace(self.loss_fn, self.has_aux, params, args, kwargs, *batch)
        _check_own(traced, axes)
        marks = self._marks(traced)
        planned = plan_taps(
            traced,
            self.layers,
            marks,
            self.num_examples,
            basis is not None,
            self.wire,
        )
        entries = planned.eigenvectors(basis or {})
        if key is not None:
            n = planned.num_examples
            expected = self.fisher == "expected"
            marks.place(planned.plan, lambda mark: partial(draw, mark, n, expected))
            consts = list(traced.program.consts.values())
            key = device_key(key, axes | varying_axes(consts))
            entries |= keys_of(marks, key)
        elif marks.weighted:
            marks.place(planned.plan, lambda mark: at_weight)
            entries |= weights_to(marks, 0)
        leaves = leaves_by_path(params)
        # The layers with gradient factors need their gradients.
        own: list[str] = []
        for layer in self.layers.with_gradient_factors:
            own += layer.params
        wanted = leaves if gradients else {path: leaves[path] for path in own}

        def run(wanted, entries):
            inputs = [*(leaves | wanted).values(), *traced.arrays]
            return replay(traced.program, inputs, planned.plan, entries)

        probes = as_varying(zeros_of(planned.probes), varying_axes(params))
        outs, found, factors = _differentiate(
            run, planned, marks, wanted, probes, entries, self.fisher
        )
        grads = None
        if gradients:
            grads = map_by_path(lambda path, _: found[path], params)
        factors = Factors(factors, {path: found[path] for path in own})
        loss, aux = traced.rebuild(outs)
        value = (loss, aux) if self.has_aux else loss
        return Evaluation(value, grads, factors, planned.num_examples)

    def _marks(self, traced: Trace) -> Marks:
        """Find the marked outputs.

        If the statistics come from marks only, check that all parameters reach a mark, and record the operations that
        do.
        """
        marks = find_marks(traced)
        drawn = self.fisher != "empirical"
        if drawn or marks.weighted:
            what = f"fisher={self.fisher!r}" if drawn else "weight= of kfac.mark_output"
            marks.require(what, traced, self.layers.skipped_paths)
            mark_live(traced.program, [mark.op for mark in marks])
        return marks


def _axes_of_arrays(tree: PyTree) -> frozenset[str]:
    """Return the axes over which an array in `tree` varies. Other leaves may have any type."""
    leaves = jax.tree.leaves(tree)
    return varying_axes([leaf for leaf in leaves if isinstance(leaf, Array)])


def _check_own(traced: Trace, differing: frozenset[str]) -> None:
    """Raise if the loss is an average over devices.

    A loss counts as an average if it contains a sum over devices, or if it does not vary over all axes in `differing`,
    the axes over which the arguments vary.
    """
    missing = sorted(differing - varying_in(traced.loss))
    axes = traced.program.axes_averaged_over() or missing
    if axes:
        raise ValueError(
            f"loss_fn returns an average over the devices of {', '.join(map(repr, axes))}: return the mean over this "
            "device's own examples, and average afterwards, jax.lax.pmean(loss, axes)"
        )


def _differentiate(
    run: Callable,
    planned: StatisticsPlan,
    marks: Marks,
    wanted: dict[str, Array],
    probes: Probes,
    entries: Probes,
    fisher: str,
) -> tuple[list[Array], dict[str, Array], Factors]:
    """Run one forward pass, a backward pass for the loss, and further backward passes for the likelihood.

    Args:
      run: evaluates the loss with its taps, from parameter leaves by path and the entries among the probes. Returns
        the loss function's outputs, and the values that the marks hand out.
      planned: the taps.
      marks: the marked outputs.
      wanted: the leaves whose gradients are wanted, by path. Other gradients are not computed.
      probes: zeros, whose cotangents are the statistics.
      entries: further inputs of taps and marks.
      fisher: as in `value_and_grad`.

    Returns:
      The loss function's outputs, the wanted gradients by path, and the factors.
    """

    def loss_and_handed(wanted, probes):
        outs, handed = run(wanted, {**probes, **entries})
        handed_sums = []
        for x in handed.values():
            # A scan around a mark stacks the values that its iterations hand out.
            scans = x.ndim - 1 if fisher == "expected" else x.ndim
            handed_sums.append(jnp.sum(x, axis=tuple(range(scans))))
        return (outs[0], handed_sums), outs

    # One forward pass serves all backward passes that follow, because `pull` keeps its residuals.
    (value, handed_sums), pull, outs = jax.vjp(
        loss_and_handed, wanted, probes, has_aux=True
    )
    # The sums are also the cotangents here. `draw` hands out zeros, so its sums add nothing. `at_weight` hands out its
    # scale and ignores the cotangent.
    grads, sums = pull((jnp.ones_like(value), handed_sums))
    if fisher == "empirical":
        if marks.weighted:
            # A term of weight `w` has `w` times the curvature, but gradients `w` times as long, whose squares grow by
            # `w^2`. So the statistics need gradients that are divided by `sqrt(w)`, while the gradients that are
            # returned stay as they are: hence a pass of its own.
            weights = weights_to(marks, -0.5)

            def loss_of(probes):
                return run(wanted, {**probes, **entries, **weights})[0][0]

            value, pull = jax.vjp(loss_of, probes)
            (sums,) = pull(jnp.ones_like(value))
        return outs, grads, planned.factors(sums)

    def factors_of(cotangents):
        # The loss's cotangent is 0, so nothing but the likelihood's gradients flows back from the marks.
        return planned.factors(pull((jnp.zeros_like(value), cotangents))[1])

    if fisher == "sampled":
        return outs, grads, factors_of(jax.tree.map(jnp.ones_like, handed_sums))
    # The expectation is a sum over the features of all marks, one backward pass for each. A scan runs them one after
    # the other, because `vmap` would hold the statistics of all features at once.
    features, unravel = ravel_pytree(handed_sums)
    units = jnp.eye(len(features), dtype=features.dtype)
    units = as_varying(units, varying_axes(features))
    return outs, grads, _sum_of_moments(lambda unit: factors_of(unravel(unit)), units)


def _sum_of_moments(factors_of: Callable, units: Array) -> Factors:
    """Sum the second moments of gradients over all units.

    Statistics that do not depend on the units, such as `A`, stay as they are.
    """

    def add(total, unit):
        return optax.tree.add(total, factors_of(unit)), None

    total, _ = lax.scan(add, zeros_of(jax.eval_shape(factors_of, units[0])), units)
    return optax.tree.scale(1 / len(units), total).unscale(len(units) ** -0.5)


def _typed_key(key: Array | None, fisher: str) -> Array | None:
    """Check `fisher_key` and return it as a typed key; None if nothing is drawn."""
    if fisher == "empirical":
        if key is not None:
            raise ValueError(
                "fisher_key is for fisher='sampled' and 'expected': with 'empirical' nothing is drawn"
            )
        return None
    if key is None:
        what = "targets" if fisher == "sampled" else "signs"
        raise ValueError(
            f"fisher={fisher!r} draws {what}: pass a PRNG key at the call, fisher_key=jax.random.key(step)"
        )
    if not is_key(key):
        what = f"{key.dtype}{list(key.shape)}" if is_array(key) else repr(key)
        raise ValueError(
            f"fisher_key must be a single PRNG key, such as jax.random.key(step), but is {what}"
        )
    return key if is_typed_key(key) else jax.random.wrap_key_data(key)


def plain_value_and_grad(
    loss_fn: Callable, has_aux: bool
) -> Callable[..., tuple[Any, Any]]:
    """Return `jax.value_and_grad` of a loss. Inside `jax.shard_map`, the gradients are this device's own."""

    @on_mesh
    def evaluate(params, *args, kwargs):
        # The loss gets copies of objects among the arguments, because tracing may change flax nnx objects.
        leaves, structure = jax.tree.flatten((args, kwargs))
        if device_axes():
            axes = _axes_of_arrays(leaves)
            params = as_varying(params, axes | varying_axes(params))
            # No batch is needed, because only the device axes matter.
            _check_own(
                trace(loss_fn, has_aux, params, args, kwargs, batch_argnums=()), axes
            )

        def loss(params):
            args, kwargs = jax.tree.unflatten(structure, leaves)
            return loss_fn(params, *args, **kwargs)

        return jax.value_and_grad(loss, has_aux=has_aux)(params)

    return evaluate


def check_basis(basis: object, layers: Layers) -> None:
    """Raise if `basis` is not an eigenbasis of these layers, as `eigenbasis` returns it."""
    how = "pass basis=kfac.curvature.eigenbasis(opt_state, layers)"
    if not isinstance(basis, Mapping):
        raise ValueError(f"basis is of type {type(basis).__name__}: {how}")
    supports_ekfac = [layer for layer in layers if layer.supports_ekfac]
    check_by_layer("basis", basis, supports_ekfac, how)
