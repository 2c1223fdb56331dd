"""Damping that adapts to how well the quadratic model predicts the loss: the Levenberg-Marquardt rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from kfac._capture.outputs import marked
from kfac._checks import check_given, check_number
from kfac._mesh import as_varying, device_axes, varying_axes
from kfac._optimizer.state import AdaptiveDampingState, KfacState, find_nodes, on_states

LossOfParams = Callable[[optax.Params], Array]

WORSE = 3.0  # the damping grows by this factor when a step is rejected


class PredictingState(NamedTuple):
    """State of an optimizer that may know the change of the loss that its quadratic model predicts.

    Attributes:
      inner: the rest of the state.
      step: the last step.
      predicted: the predicted change in units of the loss, after an update that knows it. Otherwise None.
    """

    inner: Any
    step: optax.Updates
    predicted: Array | None = None


def adaptive_damping(
    optimizer: Callable[[Array], optax.GradientTransformation],
    initial: float,
    *,
    every: int = 5,
    decay: float = 0.95,
    low: float = 0.25,
    high: float = 0.75,
    minimum: float = 1e-8,
    maximum: float = 1e3,
    num_examples: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Wrap an optimizer so that its damping follows the Levenberg-Marquardt rule.

    ::

        def marked_loss(params, batch):
            logits = kfac.mark_output(network(params, batch[0]), "categorical")
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

        layers = kfac.find_layers(marked_loss, params, batch)
        optimizer = kfac.adaptive_damping(
            lambda damping: kfac.natural_gradient(0.1, layers, damping=damping), 1e-2
        )
        opt_state = optimizer.init(params)
        loss, grads = jax.value_and_grad(marked_loss)(params, batch)
        updates, opt_state = optimizer.update(
            grads, opt_state, params, value=loss, grad=grads, value_fn=lambda p: marked_loss(p, batch)
        )

    The rule measures every `every`-th step. For the update `d` of the parameters `w` and the loss `h` on the step's
    batch, it computes the reduction ratio

        ratio = (h(w + d) - h(w)) / (<grad h, d> + <d, F d> / 2)

    of the actual change to the change that the quadratic model predicts. The model has the batch's exact Fisher matrix
    `F`, as in Martens & Grosse (2015, section 6.5), but no damping, because the loss has no damping term. For linear
    least squares the ratio is 1.

    If the ratio is above `high`, the damping is larger than the model needs, and is multiplied by `decay^every`. If the
    ratio is below `low`, the damping is divided by `decay^every`. A model that predicts no decrease counts as a ratio
    below `low`; momentum can cause this. The damping does not change if rounding hides the predicted change or if the
    loss before the step is not finite.

    A measured step is rejected if the batch's loss is larger or not finite after the step. Then the update is zero, the
    damping is multiplied by 3, and the next step is measured, too. Momentum and statistics advance as usual. The first
    `every` steps are all measured, because an initial damping can be too small by orders of magnitude. With small
    batches choose a larger `every`: momentum can increase the loss of a single batch while it reduces the average loss.

    `update(grads, state, params, *, value_fn)` needs the parameters and, like optax's line searches, the loss as a
    function of the parameters alone: `value_fn=lambda params: loss_fn(params, batch)`. This must be the mean loss with
    the gradient `grads`, with its output marked by `kfac.mark_output`. A loss with randomness must use the same key in
    each call. A measured step costs about three additional forward passes; other steps cost nothing extra.

    Args:
      optimizer: a function that returns the whole optimizer for a damping,
        `lambda damping: kfac.natural_gradient(rate, layers, damping=damping)`. Every update calls the function
        again. The optimizer must use the given damping: `optax.inject_hyperparams` inside the function would keep the
        initial damping in its state, so do not make the damping its hyperparameter. Transformations that change the
        updates belong inside the function, too, because the ratio measures the updates that this wrapper returns. If
        you wrap `adaptive_damping` itself in `optax.inject_hyperparams`, pass `static_args="optimizer"`.
      initial: the initial damping.
      every: the number of steps between measurements.
      decay: the factor on the damping per step, in (0, 1).
      low: the ratio below which the damping grows, in (0, `high`).
      high: the ratio above which the damping falls, in (`low`, 1).
      minimum: the lower bound on the damping, positive.
      maximum: the upper bound on the damping, at least `minimum`.
      num_examples: the number of examples over which the loss is averaged, as for `value_and_grad`. It is needed if
        examples have several rows in the marked output, or if several marks have different numbers of rows and a
        `weight`.

    Returns:
      An `optax.GradientTransformationExtraArgs`, which passes extra arguments on to the optimizer. `kfac.diagnostics`
      reports the last `reduction_ratio` and `rejected_steps`, the number of rejected steps.

    Raises:
      ValueError: an argument is out of range. `init` raises it if the preconditioner has `scale_damping=True`, as in
        `kfac.kfac`. `update` raises it if `params` or `value_fn` is missing, if `optax.masked`
        or `optax.partition` hides parameters, if no output is marked, if the loss depends on a parameter but no marked
        output does, or if the number of examples is not clear.
      TypeError: `value_fn` does not return a real scalar.

    References:
      Martens and Grosse, "Optimizing Neural Networks with Kronecker-factored Approximate Curvature", 2015,
      https://arxiv.org/abs/1503.05671
    """
    if not callable(optimizer):
        raise ValueError(
            "optimizer must be a function of the damping, lambda damping: kfac.natural_gradient(rate, layers, "
            f"damping=damping), but is {optimizer!r}"
        )
    check_number("minimum", minimum, "(0, inf)")
    check_number("maximum", maximum, f"[{minimum}, inf)")
    check_number("initial", initial, f"[{minimum}, {maximum}]")
    check_number("decay", decay, "(0, 1)")
    check_number("high", high, "(0, 1)")
    check_number("low", low, f"(0, {high})")
    check_given(every=every, num_examples=num_examples)

    def init(params):
        damping = jnp.asarray(initial, jnp.float32)
        inner_state = optimizer(damping).init(params)
        states = find_nodes(inner_state, KfacState)
        if any(state.settings.preconditioner.scale_damping for state in states):
            raise ValueError(
                "adaptive_damping has a quadratic model with one damping for all layers, whose minimum the step is: "
                "use kfac.natural_gradient instead of kfac.kfac, and no preconditioner with scale_damping=True"
            )
        ratio, _, again = _unmeasured()
        # Two separate zeros, so that both can be donated.
        count = jnp.zeros((), jnp.int32)
        rejected_steps = jnp.zeros((), jnp.int32)
        return AdaptiveDampingState(
            count, damping, ratio, inner_state, rejected_steps, again
        )

    def update(updates, state, params=None, *, value_fn=None, **extra):
        _check_call(params, value_fn)
        damping = state.next_damping
        # The optimizer also gets `value_fn`, because it may hold another transformation that evaluates the loss.
        tx = optax.with_extra_args_support(optimizer(damping))
        changes, inner_state = tx.update(
            updates, state.inner, params, value_fn=value_fn, **extra
        )

        predicted = None
        if isinstance(inner_state, PredictingState):
            predicted = inner_state.predicted
            inner_state = inner_state._replace(predicted=None)
        count = optax.safe_increment(state.count)
        due = count % every == 0
        ratio, valid, worse = lax.cond(
            due | (count <= every) | state.again,
            lambda: _reduction_ratio(
                value_fn, params, changes, num_examples, predicted
            ),
            _unmeasured,
        )
        factor = jnp.where(ratio < low, decay**-every, 1.0)
        factor = jnp.where(ratio > high, decay**every, factor)
        factor = jnp.where(worse, WORSE, jnp.where(due, factor, 1.0))
        # A step without a ratio changes neither the damping nor the reported ratio.
        ratio = jnp.where(valid, ratio, state.reduction_ratio)
        new = jnp.where(valid, jnp.clip(damping * factor, minimum, maximum), damping)
        new = new.astype(jnp.float32)
        # Keep the momentum of a rejected step. If the momentum points uphill, new gradients at the same parameters
        # turn it around.
        changes = jax.tree.map(lambda change: jnp.where(worse, 0, change), changes)
        # Scale the damping with which the next `observe` refreshes preconditioners.
        factor = new / damping
        inner_state = on_states(
            lambda x: x._replace(observe_damping=factor * x.observe_damping),
            inner_state,
        )
        return changes, AdaptiveDampingState(
            count, new, ratio, inner_state, state.rejected_steps + worse, worse
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _check_call(params: optax.Params | None, value_fn: LossOfParams | None) -> None:
    """Raise a `ValueError` if `update` lacks the loss or some of the parameters."""
    if params is None or value_fn is None:
        raise ValueError(
            "a damping that follows the loss after the step needs the parameters and the loss: "
            "update(grads, state, params, value_fn=lambda params: loss_fn(params, batch))"
        )
    if find_nodes(params, optax.MaskedNode):
        raise ValueError(
            "adaptive_damping measures the loss of all parameters, but optax.masked or optax.partition hides some: "
            "put these inside, adaptive_damping(lambda damping: optax.partition(...), ...)"
        )


def _unmeasured() -> tuple[Array, Array, Array]:
    """Return the result of `_reduction_ratio` for a step that is not measured."""
    # No NaN, because `jax_debug_nans` would raise an error.
    no = jnp.zeros((), bool)
    return jnp.zeros((), jnp.float32), no, no


def _reduction_ratio(
    value_fn: LossOfParams,
    params: optax.Params,
    changes: optax.Updates,
    num_examples: int | None,
    predicted: Array | None,
) -> tuple[Array, Array, Array]:
    """Return the reduction ratio, whether it is valid, and whether the loss after the step is larger or not finite.

    The ratio is minus infinity if the model predicts no decrease or if the loss after the step is not finite. It is
    invalid if the step is zero, if the loss before the step is not finite, or if rounding hides the predicted change
    and the loss does not increase.

    Args:
      value_fn: the loss as a function of the parameters.
      params: the parameters before the step.
      changes: the step.
      num_examples: the number of examples over which the loss is averaged, or None.
      predicted: the predicted change in units of the loss. None predicts it from the outputs that the loss marks.
    """

    def averaged(x):
        # If device axes are bound, the loss covers only this device's examples.
        axes = device_axes()
        if not axes:
            return x
        return lax.pmean(as_varying(x, varying_axes(lax.axis_index(axes))), axes)

    if predicted is not None:
        before = averaged(value_fn(params))
        predicted = predicted * before
    else:
        # `F = (1/n) sum_r J_r^T H_r J_r`, summed over the rows of the marked outputs, with the Hessian `H_r` of
        # `-log p`. So `<d, F d> = (1/n) sum_r <J_r d, H_r J_r d>` takes a single forward pass (Martens 2020, section
        # 9.2).
        axes = varying_axes(jax.eval_shape(value_fn, params))
        tangents = jax.tree.map(lambda p, d: d.astype(p.dtype), params, changes)
        point, tangents = as_varying((params, tangents), axes)
        loss_fn = marked(value_fn, point, num_examples, "adaptive_damping")
        (loss, outputs), (slope, pushed) = jax.jvp(
            loss_fn.evaluate, (point,), (tangents,)
        )
        squares = [
            jnp.sum(jnp.square(root)) for root in loss_fn.times_root(outputs, pushed)
        ]
        before = averaged(loss)
        predicted = averaged(slope + sum(squares) / 2)
    after = averaged(value_fn(optax.apply_updates(params, changes)))
    rounding = 8 * jnp.finfo(before.dtype).eps * jnp.abs(before)
    # Negated comparisons are also true for NaN.
    moved = ~(optax.tree.norm(changes, squared=True) <= 0) & jnp.isfinite(before)
    worse = moved & ~(after <= before + rounding)
    bad = ~(predicted < 0) | ~jnp.isfinite(after)
    ratio = jnp.where(bad, -jnp.inf, (after - before) / jnp.where(bad, 1, predicted))
    valid = worse | (moved & ~(jnp.abs(predicted) <= rounding))
    return ratio.astype(jnp.float32), valid, worse
