"""Damping that adapts to how well the quadratic model predicts the loss: the Levenberg-Marquardt rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from kfac._capture.outputs import marked
from kfac._checks import check_given, check_number
from kfac._optimizer.reshard import on_states
from kfac._optimizer.state import AdaptiveDampingState, KfacState, find_nodes, has_masked
from kfac._varying import as_varying, device_axes, varying_axes

WORSE = 3.0  # by so much the damping grows when a step is taken back


class Predicted(NamedTuple):
    """State of an optimizer that has a quadratic model of its own.

    Attributes:
      blocks: of the preconditioner.
      step: the last one, a tree like the parameters.
      loss: before it.
      change: of the loss, as the model predicts it without the damping.
    """

    blocks: Any
    step: Any
    loss: jax.Array
    change: jax.Array


def adaptive_damping(
    optimizer: Callable[[jax.Array], optax.GradientTransformation],
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
    """An optimizer whose damping follows the Levenberg-Marquardt rule on the reduction ratio.

    In every `every`-th step with update `d` of the parameters `w`,

        ratio = (h(w + d) - h(w)) / (<grad h, d> + <d, F d> / 2)

    compares the change of the loss `h` on the step's batch with what the quadratic model predicted, with the exact
    Fisher matrix `F` of that batch (Martens & Grosse 2015, section 6.5, but without the damping, which is not in the
    loss: on linear least squares the ratio is 1). Above `high` the model is better
    than the damping supposes, which is multiplied by `decay^every`; below `low` it is divided by it. A model that
    predicts no decrease, as momentum can bring about, counts as below `low`; a change that rounding hides, or a start
    from a loss that is not finite, as neither.

    A measured step after which the loss of its batch is larger, or not finite, is taken back: the update is zero, the
    damping grows threefold, and the next step is looked at again. Momentum and statistics go on. So are the first
    `every` steps, because that is when a damping is too small by orders of magnitude. With small batches
    choose a larger `every`: momentum can make the loss of a single batch larger while it makes that of all smaller.

    `update(grads, state, params, *, value_fn)` needs the parameters and, as optax's line searches
    do, the loss as a function of them alone: `value_fn=lambda params: loss_fn(params, batch)`, the mean loss whose
    gradient `grads` is, with its output marked by `kfac.output`. What the loss draws at random must come from the same
    key whenever it is called. A step that measures costs about three more forward passes; the others cost nothing.

    Args:
      optimizer: makes the whole optimizer from a damping,
        `lambda damping: kfac.kfac(rate, layers, damping=damping, step_norm=None)`. It is called in every update, and
        must use the damping that it is given: one that `optax.inject_hyperparams` holds inside stays what it was at
        first (pass it past that). What changes the updates belongs inside, too: the ratio is that of the step that
        comes out here. `optax.inject_hyperparams` around it needs `static_args="optimizer"`.
      initial: the damping to begin with.
      every: steps from one measurement to the next.
      decay: factor on the damping per step, in (0, 1).
      low: ratio below which the damping grows, in (0, `high`).
      high: ratio above which it falls, in (`low`, 1).
      minimum: bound on the damping, positive.
      maximum: bound on the damping, at least `minimum`.
      num_examples: how many examples the loss is the mean of, as for `value_and_grad`: where examples have several rows
        of the marked output, or several marks have different numbers of rows and a `weight`.

    Returns:
      An `optax.GradientTransformationExtraArgs`; the extra arguments go on to the optimizer. `kfac.diagnostics` reports
      the last `reduction_ratio`.

    Raises:
      ValueError: an argument is out of range; in `update`: `params` or `value_fn` is missing, or no output is marked.
      TypeError: `value_fn` does not return a real scalar.

    References:
      Martens and Grosse, "Optimizing Neural Networks with Kronecker-factored Approximate Curvature", 2015,
      https://arxiv.org/abs/1503.05671
    """
    if not callable(optimizer):
        raise ValueError(
            "optimizer must be a function of the damping, lambda damping: kfac.kfac(rate, layers, damping=damping, "
            f"step_norm=None), but is {optimizer!r}"
        )
    numbers = dict(minimum=minimum, maximum=maximum, initial=initial, decay=decay, high=high, low=low)
    intervals = "(0, inf)", f"[{minimum}, inf)", f"[{minimum}, {maximum}]", "(0, 1)", "(0, 1)", f"(0, {high})"
    for (name, value), interval in zip(numbers.items(), intervals, strict=True):
        check_number(name, value, interval)
    check_given(every=every, num_examples=num_examples)

    def inner(damping: jax.Array) -> optax.GradientTransformationExtraArgs:
        return optax.with_extra_args_support(optimizer(damping))

    def init(params):
        damping, ratio = jnp.asarray(initial, jnp.float32), jnp.full((), jnp.nan, jnp.float32)
        inner_state = _checked(inner(damping).init(params))
        # Arrays of their own, so that both can be donated.
        count, taken_back = (jnp.zeros((), jnp.int32) for _ in range(2))
        return AdaptiveDampingState(count, damping, ratio, inner_state, taken_back, jnp.zeros((), bool))

    def update(updates, state, params=None, *, value_fn=None, **extra):
        if params is None or value_fn is None:
            how = "update(grads, state, params, value_fn=lambda params: loss_fn(params, batch))"
            raise ValueError(f"a damping that follows the loss after the step needs the parameters and the loss: {how}")
        if has_masked(params):
            raise ValueError(
                "adaptive_damping measures the loss of all parameters, but optax.masked or optax.partition hides some: "
                "put these inside, adaptive_damping(lambda damping: optax.partition(...), ...)"
            )
        damping = state.next_damping
        # A chain may hold another transformation that measures the loss.
        changes, inner_state = inner(damping).update(updates, state.inner, params, value_fn=value_fn, **extra)

        count = optax.safe_increment(state.count)
        due = count % every == 0

        def measured():
            if isinstance(inner_state, Predicted):
                model = inner_state.loss, inner_state.change
            else:
                model = _along(value_fn, params, changes, num_examples)
            ratio, worse = _reduction_ratio(value_fn, params, changes, model)
            factor = jnp.where(ratio > high, decay**every, jnp.where(ratio < low, decay**-every, 1.0))
            factor = jnp.where(worse, WORSE, jnp.where(due, factor, 1.0))
            # Without a ratio there is nothing to learn from the step.
            valid = ~jnp.isnan(ratio)
            new = jnp.where(valid, jnp.clip(damping * factor, minimum, maximum), damping)
            return new.astype(jnp.float32), jnp.where(valid, ratio, state.reduction_ratio).astype(jnp.float32), worse

        unmeasured = damping, state.reduction_ratio, jnp.zeros((), bool)
        next_damping, ratio, worse = lax.cond(due | (count <= every) | state.again, measured, lambda: unmeasured)
        # The momentum goes on: it may be what points uphill, and gradients at the same place turn it.
        changes = jax.tree.map(lambda change: jnp.where(worse, 0, change), changes)
        # The next `observe` inverts with the new damping.
        factor = next_damping / damping
        inner_state = on_states(lambda x: x._replace(observe_damping=factor * x.observe_damping), inner_state)
        return changes, AdaptiveDampingState(count, next_damping, ratio, inner_state, state.taken_back + worse, worse)

    return optax.GradientTransformationExtraArgs(init, update)


def _checked(inner_state: Any) -> Any:
    states = find_nodes(inner_state, KfacState)
    kinds = [state.settings.inverse for state in states if state.owned]
    kinds += [blocks.inverse.inverse for state in states for blocks in state.shared.values()]
    if any(inverse.relative for inverse in kinds):
        raise ValueError(
            "adaptive_damping has a quadratic model with one damping for all layers, whose minimum the step is: pass "
            "step_norm=None to kfac.kfac, and no inverse that is relative=True"
        )
    return inner_state


def _reduction_ratio(
    value_fn: Callable[[Any], Any], params: Any, changes: Any, model: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Actual over predicted change of the loss, and whether it is larger after the step or not finite.

    The ratio is minus infinity for a bad step, NaN if nothing can be said of it.
    """

    def averaged(x):
        axes = device_axes()  # here the loss is that of a device's own examples
        return lax.pmean(as_varying(x, varying_axes(lax.axis_index(axes))), axes) if axes else x

    before, predicted = jax.tree.map(averaged, model)
    after = averaged(value_fn(optax.apply_updates(params, changes)))
    rounding = 8 * jnp.finfo(before.dtype).eps * jnp.abs(before)
    moved = ~(optax.tree.norm(changes, squared=True) <= 0) & jnp.isfinite(before)  # also by NaN
    worse = moved & ~(after <= before + rounding)
    bad = ~(predicted < 0) | ~jnp.isfinite(after)
    ratio = jnp.where(bad, -jnp.inf, (after - before) / jnp.where(bad, 1, predicted))
    return jnp.where(worse | (moved & ~(jnp.abs(predicted) <= rounding)), ratio, jnp.nan), worse


def _along(
    value_fn: Callable[[Any], Any], params: Any, direction: Any, num_examples: int | None
) -> tuple[jax.Array, jax.Array]:
    """The loss at `params`, and `<grad h, d> + <d, F d> / 2` for the direction `d`, in one forward pass.

    `F = (1/n) sum_r J_r^T H_r J_r` over the `n` rows of the marked outputs, so the product is the mean over rows of
    `<J_r d, H_r J_r d>` with the Hessian `H` of `-log p` (Martens 2020, section 9.2).
    """
    axes = varying_axes(jax.eval_shape(value_fn, params))
    params, direction = as_varying((params, direction), axes)
    loss_fn = marked(value_fn, params, num_examples, "adaptive_damping")
    tangents = jax.tree.map(lambda p, d: d.astype(p.dtype), params, direction)
    (loss, outputs), (slope, moved) = jax.jvp(loss_fn.evaluate, (params,), (tangents,))
    squares = [jnp.sum(jnp.square(root)) for root in loss_fn.times_root(outputs, moved)]
    return loss, slope + sum(squares, jnp.zeros_like(loss)) / 2
