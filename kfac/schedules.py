"""Schedules that optax lacks. They map a step to a scalar."""

from __future__ import annotations

import math

import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import ArrayLike

from kfac._checks import check, check_given, check_range
from kfac._optimizer.step_scaling import ScalarOrSchedule, value_at


def warmup_linear_decay(peak: float, num_steps: int) -> optax.Schedule:
    """Return a learning rate schedule that rises linearly in the first tenth of the steps, then falls linearly to zero.

    Args:
      peak: the largest rate. Start with 0.1.
      num_steps: the number of training steps.

    Returns:
      A schedule for the learning rate of `kfac` and `train_step`.

    Raises:
      ValueError: an argument is out of range.

    References:
      Defazio et al., "When, Why and How Much? Adaptive Learning Rate Scheduling by Refinement", 2023,
      https://arxiv.org/abs/2310.07831
    """
    check(peak=peak, num_steps=num_steps)
    warmup = math.ceil(0.1 * num_steps)

    def schedule(count: ArrayLike) -> Array:
        now = jnp.asarray(count, jnp.float32)
        falling = (num_steps - now) / max(num_steps - warmup, 1)
        return peak * jnp.clip(jnp.minimum((now + 1) / warmup, falling), 0.0, 1.0)

    return schedule


def coupled_momentum(
    momentum: float,
    learning_rate: ScalarOrSchedule,
    *,
    reference_rate: float | None = None,
) -> optax.Schedule:
    """Return a momentum schedule that falls with the learning rate.

    `kfac.natural_gradient(lr_in_momentum=True)` makes the step `v <- m v - lr p`, `w <- w + v`. Its velocity `v`
    contains updates at earlier rates. When the rate falls, these updates are too large, and a smaller momentum corrects
    this. There are two forms:

    - Without `reference_rate`, the code of Osawa et al.: `momentum * lr_t / lr_{t-1}` in steps in which the rate falls,
      `momentum` in all other steps. As long as the rate never rises, this equals a constant momentum with the rate
      applied after the momentum.
    - With `reference_rate`, the paper of Osawa et al.: `momentum * lr_t / reference_rate`, but at most `momentum`. This
      momentum vanishes together with the rate.

    Args:
      momentum: the momentum while the rate does not fall, in [0, 1).
      learning_rate: the learning rate's schedule.
      reference_rate: None for the first form. For the second form, the rate at which the momentum is `momentum`,
        usually the largest rate.

    Returns:
      A schedule for the argument `momentum` of `kfac.natural_gradient`.

    Raises:
      ValueError: an argument is out of range.

    References:
      Osawa et al., "Large-Scale Distributed Second-Order Optimization Using Kronecker-Factored Approximate Curvature
      for Deep Convolutional Neural Networks", 2019, https://arxiv.org/abs/1811.12019
    """
    check(momentum=momentum, learning_rate=learning_rate)
    check_given(reference_rate=reference_rate)

    def schedule(count: ArrayLike) -> Array:
        count = jnp.asarray(count)
        rate = value_at(learning_rate, count)
        if reference_rate is None:
            before = value_at(learning_rate, jnp.maximum(count - 1, 0))
        else:
            before = jnp.asarray(reference_rate, jnp.float32)
        # After a rate of zero, the rate can only rise.
        ratio = rate / jnp.where(before > 0, before, 1)
        return momentum * jnp.where(rate < before, ratio, 1.0)

    return schedule


def damping_decay(initial: float, target: float, num_steps: int) -> optax.Schedule:
    """Return a damping schedule that falls towards a target: `l <- (1 - a) l + a target` in every step.

    The coefficient is `a = 2 log10(initial / target) / num_steps`, so most of the fall happens within `num_steps`.

    Args:
      initial: the damping of the first step, at least `target`.
      target: the value that the damping approaches, positive.
      num_steps: the time scale in steps, at least `2 log10(initial / target)`, so that `a` is at most 1 and the damping
        never falls below the target.

    Returns:
      A schedule for the argument `damping` of `kfac` and `scale_by_kfac`.

    Raises:
      ValueError: an argument is out of range.

    References:
      This schedule belongs to the method of Osawa et al., "Large-Scale Distributed Second-Order Optimization Using
      Kronecker-Factored Approximate Curvature for Deep Convolutional Neural Networks", 2019,
      https://arxiv.org/abs/1811.12019
    """
    check(target=target)
    check_range("initial", initial, f"[{target}, inf)", schedules=False)
    least = 2 * math.log10(initial / target)
    check_range("num_steps", num_steps, f"[{max(1, least)}, inf)", schedules=False)
    share = least / num_steps

    def schedule(count: ArrayLike) -> Array:
        # This is the recursion in closed form.
        steps = jnp.asarray(count, jnp.float32)
        return target + (initial - target) * (1 - share) ** steps

    return schedule
