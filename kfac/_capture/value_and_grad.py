"""The statistics of a batch, with the gradients in one backward pass or without them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree

from kfac._capture.microbatch import every_example
from kfac._capture.outputs import Draw, Marks, at_weight, find_marks, keys_of, weights_to
from kfac._capture.plan import Planned, plan_taps
from kfac._capture.program import mark_live
from kfac._capture.replay import replay
from kfac._capture.trace import Trace, batch_of, is_array, is_key, trace
from kfac._checks import check, check_by_layer, check_fraction, check_function, check_given, check_layers
from kfac._factors import Factors
from kfac._layers import Layers
from kfac._varying import as_varying, device_axes, device_key, lying_as, on_mesh, varying_axes, varying_in, zeros_of


def value_and_grad(
    loss_fn: Callable[..., Any],
    layers: Layers,
    *,
    has_aux: bool = False,
    fisher: str = "empirical",
    num_examples: int | None = None,
    communication_dtype: str = "float32",
) -> Callable[..., tuple[Any, Any, Any]]:
    """`jax.value_and_grad`, with the statistics of every layer beside the gradients.

    For inputs `a` of shape `[n, s, d_in]` and gradients `g` of the mean loss `[n, s, d_out]`, `n` examples and `s`
    positions that share the weight, the factors of a layer are `A = (1/n) sum a a^T` and `G = (n/s) sum g g^T`
    (Grosse & Martens 2016; Osawa et al. 2019). Scales, shifts and other vectors get second moments of their per-example
    gradients. Operands keep the compute dtype of the layer, sums are in float32 (float64 for float64 operands).

    The gradients are those of `jax.value_and_grad`. Inside `jax.shard_map` and `jax.pmap` loss, gradients and factors
    are this device's own: average the gradients with `lax.pmean`, leave the factors to the optimizer.
    Under `jit` over a mesh the factors are those of the whole batch: a layer's are packed, and spread over the devices
    as soon as it has them. `factors.whole()` has them whole, on every device.

    Args:
      loss_fn: `loss_fn(params, *args, **kwargs)` returns the *mean* loss over this device's own examples, a real
        scalar; with `has_aux`, a pair `(loss, aux)`.
      layers: what `find_layers` returned for this function.
      has_aux: whether `loss_fn` returns a pair.
      fisher: `"empirical"`: statistics of the gradients of the loss itself; with weights at the marked outputs,
        those of a mark of weight `w` over `sqrt(w)`, in a second backward pass. `"sampled"`: of the gradients of the
        mean over `n` of `-log p(y | output)`, for targets `y` drawn from the distribution that the network predicts at
        the outputs that `loss_fn` marks with `kfac.output`: one draw of an unbiased estimate of the true Fisher matrix
        (Martens 2020). It costs a second backward pass. `"expected"`: the expectation itself, over all targets, which
        costs a backward pass for each feature of the output. It is exact for what a single row of the output has a
        gradient of, and unbiased where several have a share in it: where examples interact, and of the unit-wise,
        diagonal and EKFAC moments of examples with several rows.
      num_examples: how many examples the loss is the mean of, for a loss that hides them. By default the size of the
        marked output without its axis of features, and without one the examples of the batch.
      communication_dtype: dtype of Kronecker factors between several devices, `"float32"` (that in which they are
        summed, if wider) or `"bfloat16"`.

    Returns:
      A function of the arguments of `loss_fn` that returns `(value, grads, factors)`, where `value` is `loss` or
      `(loss, aux)`, `grads` has the structure of the parameters and `factors` is a `Factors`. It takes two further
      keywords, which `loss_fn` does not see:

      - `fisher_key`, with `"sampled"` and `"expected"` (for random signs, see `kfac.output`): a PRNG key. The same key
        draws the same targets, but on every device others: the
        device's position on the axes over which the arguments vary is folded into it (under `jax.pmap`, and `shard_map`
        with `check_vma=False`, its position on all axes).
      - `basis`, for an optimizer with `inverse=kfac.Ekfac()`: what `kfac.curvature.eigenbasis` returns. `factors` then
        hold `moments` beside `A` and `G`, the second moments of per-example gradients in that eigenbasis,
        `n sum_i (Q_G^T (sum_p g_ip a_ip^T) Q_A)^2` with the gradients `g_ip` of the mean loss (George et al. 2018).
        Layers whose examples are not told apart have none (`Layer.correctable`).

    Raises:
      ValueError: an argument is out of range; when the function is traced: it has other layers than `layers`, the
        number of examples is not clear, the loss is an average over devices, `basis`
        is no such one, `fisher_key` is missing, no key, or given where nothing is drawn, or with `"sampled"`,
        `"expected"` or weights the loss depends on a parameter but no marked output does.
    """
    check(has_aux=has_aux)
    evaluate = _evaluator(loss_fn, layers, has_aux, fisher, num_examples, communication_dtype)

    @on_mesh
    @functools.wraps(loss_fn)
    def with_factors(params, *args, **kwargs):
        (loss, aux), grads, factors = evaluate(params, args, kwargs, gradients=True)
        return (loss, aux) if has_aux else loss, grads, factors

    return with_factors


def statistics(
    loss_fn: Callable[..., Any],
    layers: Layers,
    *,
    fraction: float = 1.0,
    has_aux: bool = False,
    fisher: str = "empirical",
    num_examples: int | None = None,
    communication_dtype: str = "float32",
) -> Callable[..., Factors]:
    """Return a function that computes the statistics of every layer, without gradients of the parameters.

    For inputs `a` of shape `[n, s, d_in]` and gradients `g` of the mean loss `[n, s, d_out]`, `n` examples and `s`
    positions that share the weight, the factors of a layer are `A = (1/n) sum a a^T` and `G = (n/s) sum g g^T`
    (Grosse & Martens 2016; Osawa et al. 2019). Scales, shifts and other vectors get second moments of their per-example
    gradients. `value_and_grad` says more, and has the same arguments.

    Args:
      loss_fn: `loss_fn(params, *args, **kwargs)` returns the mean loss over this device's own examples, a real scalar;
        with `has_aux`, a pair `(loss, aux)`. Auxiliary outputs are dropped.
      layers: the layers that `find_layers` returned for this function.
      fraction: the share of the batch from which statistics are taken, `1 / k` with an integer `k`: every `k`-th
        example, or all if the batch has fewer. A quarter is usually as good as all, at a quarter of the price. The
        loss of such a part must make sense: keep 1 if examples refer to each other, as the edges of a graph do.
      has_aux: whether `loss_fn` returns a pair.
      fisher: as for `value_and_grad`.
      num_examples: as for `value_and_grad`, of the whole batch.
      communication_dtype: as for `value_and_grad`.

    Returns:
      A function of the arguments of `loss_fn` that returns a `Factors`, for `kfac.observe`. Like that of
      `value_and_grad` it takes the further keywords `fisher_key` and `basis`.

    Raises:
      ValueError: as for `value_and_grad`; also if `fraction` is no such number, or the layers were found without a
        batch.
    """
    check(has_aux=has_aux)
    every = check_fraction("fraction", fraction)
    evaluator = functools.partial(_evaluator, loss_fn, layers, has_aux, fisher)
    evaluator(num_examples, communication_dtype)  # which checks the arguments

    @on_mesh
    @functools.wraps(loss_fn)
    def factors_of(params, *args, **kwargs):
        examples = num_examples
        if every > 1:
            thinned = every_example(layers, args, kwargs, every)
            args, kwargs, examples = thinned.args, thinned.kwargs, thinned.of(num_examples)
        evaluate = evaluator(examples, communication_dtype)
        return evaluate(params, args, kwargs, gradients=False)[2]

    return factors_of


def _evaluator(
    loss_fn: Callable[..., Any],
    layers: Layers,
    has_aux: bool,
    fisher: str,
    num_examples: int | None,
    communication_dtype: str,
) -> Callable[..., tuple[tuple[Any, Any], Any, Factors]]:
    """Return a function of the parameters and arguments that gives loss and aux, gradients (or None), and factors."""
    check_layers(layers)
    check_function(loss_fn)
    check(fisher=fisher, communication_dtype=communication_dtype)
    check_given(num_examples=num_examples)
    drawn = fisher != "empirical"
    own_paths = {path for layer in layers.with_gradient_factors for path in layer.params}

    def evaluate(params, args, kwargs, gradients):
        key, basis = _fisher_key(kwargs, fisher), kwargs.pop("basis", None)
        if basis is not None:
            check_basis(basis, layers)
        # With replicated parameters, shard_map would sum gradients and statistics over devices inside autodiff.
        axes = varying_axes([x for x in jax.tree.leaves((args, kwargs)) if isinstance(x, jax.Array)])
        params = as_varying(params, axes | varying_axes(params))
        traced = trace(loss_fn, has_aux, params, args, kwargs, *batch_of(layers, args, kwargs))
        _check_own(traced, axes)
        marks = find_marks(traced)
        if drawn or marks.weighted:
            marks.require(f"fisher={fisher!r}" if drawn else "weight= of kfac.output", traced, layers.skipped_paths)
            mark_live(traced.program, [mark.op for mark in marks.marks])
        planned = plan_taps(traced, layers, marks, num_examples, basis is not None, communication_dtype)
        entries: dict[Any, Any] = {}
        for name, sums in planned.sums.items():
            entries |= sums.basis(basis[name]) if sums.basis else {}
        if key is not None:
            marks.place(planned.plan, lambda mark: Draw(mark, planned.num_examples, fisher == "expected"))
            entries |= keys_of(marks, device_key(key, axes | varying_axes([*traced.program.consts.values()])))
        elif marks.weighted:
            marks.place(planned.plan, lambda mark: at_weight)
            entries |= weights_to(marks, 0)
        flat, treedef = jax.tree.flatten(params)
        probes = jax.tree.map(lambda probe: lying_as(jnp.zeros(probe.shape, probe.dtype), probe), planned.probes)
        probes = as_varying(probes, axes | varying_axes(params))
        wanted = {k: leaf for k, leaf in enumerate(flat) if gradients or traced.names[k] in own_paths}
        outs, found, factors = _differentiate(traced, planned, flat, wanted, probes, entries, fisher, marks)
        own = {traced.names[k]: leaf for k, leaf in found.items() if traced.names[k] in own_paths}
        grads = jax.tree.unflatten(treedef, list(found.values())) if gradients else None
        return traced.rebuild(outs), grads, Factors(factors, own)

    return evaluate


def _check_own(traced: Trace, differing: frozenset[str]) -> None:
    """Raises where the loss is an average over devices: it does not differ between them, or is made as such."""
    missing = sorted(differing - varying_in(traced.loss))
    if axes := traced.program.axes_averaged_over() or missing:
        how = "return the mean over this device's own examples, and average afterwards, jax.lax.pmean(loss, axes)"
        raise ValueError(f"loss_fn returns an average over the devices of {', '.join(map(repr, axes))}: {how}")


def _differentiate(
    traced: Trace,
    planned: Planned,
    flat: list[Any],
    wanted: dict[int, Any],
    probes: Any,
    entries: Any,
    fisher: str,
    marks: Marks,
) -> tuple[Any, dict[int, Any], Factors]:
    """Run one forward pass, a backward pass for the loss, and others for the likelihood.

    Args:
      traced: the loss.
      planned: the taps.
      flat: the leaves of the parameters.
      wanted: the leaves whose gradients are wanted, by their positions. Products for other gradients are not formed.
      probes: zeros, whose cotangents are the statistics.
      entries: further inputs of taps and marks.
      fisher: as for `value_and_grad`.
      marks: the marked outputs.

    Returns:
      The outputs of the loss, the wanted gradients by position, and the factors.
    """

    def losses_of(wanted, probes, entries=entries):
        leaves = [wanted.get(k, leaf) for k, leaf in enumerate(flat)]
        outs, drawn = replay(traced.program, [*leaves, *traced.arrays], planned.plan, {**probes, **entries})
        # The iterations of a scan around a mark have some each.
        dims = 1 if fisher == "expected" else 0
        zeros = [jnp.sum(x, axis=tuple(range(x.ndim - dims))) for x in drawn.values()]
        return (outs[0], zeros), outs

    (value, zeros), pull_back, outs = jax.vjp(losses_of, wanted, probes, has_aux=True)
    grads, sums = pull_back((jnp.ones_like(value), zeros))
    if fisher == "empirical":
        if marks.weighted:  # a term that counts `w` times has `w` times the curvature, but gradients `w` times as long
            _, pull_weighted = jax.vjp(
                lambda probes: losses_of(wanted, probes, entries | weights_to(marks, -0.5))[0][0], probes
            )
            (sums,) = pull_weighted(jnp.ones_like(value))
        return outs, grads, planned.factors(sums)

    def factors_of(cotangents):
        return planned.factors(pull_back((jnp.zeros_like(value), cotangents))[1])

    if fisher == "sampled":
        return outs, grads, factors_of(jax.tree.map(jnp.ones_like, zeros))
    features, unravel = ravel_pytree(zeros)
    units = as_varying(jnp.eye(len(features), dtype=features.dtype), varying_axes(features))
    return outs, grads, _sum_of_moments(lambda unit: factors_of(unravel(unit)), units)


def _sum_of_moments(factors_of: Callable[[jax.Array], Factors], units: jax.Array) -> Factors:
    """Sums the second moments of gradients over all units; what does not depend on these stays as it is."""

    def add(total, unit):
        return jax.tree.map(jnp.add, total, factors_of(unit)), None

    total, _ = lax.scan(add, zeros_of(factors_of, units[0]), units)
    return jax.tree.map(lambda x: x / len(units), total).unscale(len(units) ** -0.5)


def _fisher_key(kwargs: dict[str, Any], fisher: str) -> jax.Array | None:
    """Takes the PRNG key for what is drawn out of the keywords, in the typed form."""
    key = kwargs.pop("fisher_key", None)
    if fisher == "empirical":
        if key is not None:
            raise ValueError("fisher_key is for fisher='sampled' and 'expected': with 'empirical' nothing is drawn")
        return None
    if key is None:
        what, how = "targets" if fisher == "sampled" else "signs", "fisher_key=jax.random.key(step)"
        raise ValueError(f"fisher={fisher!r} draws {what}: pass a PRNG key at the call, {how}")
    if not is_key(key):
        what = f"{key.dtype}{list(key.shape)}" if is_array(key) else repr(key)
        raise ValueError(f"fisher_key must be a single PRNG key, such as jax.random.key(step), but is {what}")
    return key if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(key)


def plain_value_and_grad(loss_fn: Callable[..., Any], has_aux: bool) -> Callable[..., tuple[Any, Any]]:
    """`jax.value_and_grad` of a loss, with gradients of this device's own examples inside `jax.shard_map`."""

    @on_mesh
    @functools.wraps(loss_fn)
    def evaluate(params, *args, **kwargs):
        # Copies of objects among the arguments, because those of flax nnx may change while the loss is traced.
        leaves, structure = jax.tree.flatten((args, kwargs))
        if device_axes():
            axes = varying_axes([x for x in leaves if isinstance(x, jax.Array)])
            params = as_varying(params, axes | varying_axes(params))
            _check_own(trace(loss_fn, has_aux, params, args, kwargs, ()), axes)

        def loss(params):
            args, kwargs = jax.tree.unflatten(structure, leaves)
            return loss_fn(params, *args, **kwargs)

        return jax.value_and_grad(loss, has_aux=has_aux)(params)

    return evaluate


def check_basis(basis: Any, layers: Layers) -> None:
    """Raises where `basis` is not what `eigenbasis` returns for these layers."""
    how = "pass basis=kfac.curvature.eigenbasis(opt_state, layers)"
    if not isinstance(basis, Mapping):
        raise ValueError(f"basis is of type {type(basis).__name__}: {how}")
    check_by_layer("basis", basis, [layer for layer in layers if layer.correctable], how)
