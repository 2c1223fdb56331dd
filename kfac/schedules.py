"""Schedules that optax does not have: functions from the step to a scalar."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import optax

from kfac._checks import check, check_given, check_range
from kfac._optimizer.moves import ScalarOrSchedule, value_at


def rise_and_fall(peak: float, num_steps: int) -> optax.Schedule:
    """A learning rate that rises to its peak in the first tenth of the steps, and from there falls to zero: linearly.

    Args:
      peak: the largest rate; begin with 0.1.
      num_steps: of the whole training.

    Returns:
      A schedule, for the learning rate of `kfac` and `train_step`.

    Raises:
      ValueError: an argument is out of range.

    References:
      Defazio et al., "When, Why and How Much? Adaptive Learning Rate Scheduling by Refinement", 2023,
      https://arxiv.org/abs/2310.07831
    """
    check(peak=peak, num_steps=num_steps)
    warmup = math.ceil(0.1 * num_steps)

    def schedule(count: jax.typing.ArrayLike) -> jax.Array:
        now = jnp.asarray(count, jnp.float32)
        falling = (num_steps - now) / max(num_steps - warmup, 1)
        return peak * jnp.clip(jnp.minimum((now + 1) / warmup, falling), 0.0, 1.0)

    return schedule


def coupled_momentum(
    momentum: float, learning_rate: ScalarOrSchedule, *, reference_rate: float | None = None
) -> optax.Schedule:
    """A momentum that falls with the learning rate.

    In the form `v <- m v - lr p`, `w <- w + v` (`rate_in_momentum=True` of `kfac`), steps that were made at an earlier,
    larger rate go on at that rate. Less momentum when the rate falls makes up for it. There are two forms:

    - that of Osawa et al.'s code, without `reference_rate`: `momentum * lr_t / lr_{t-1}` in steps in which the rate
      falls, `momentum` in the others. While the rate never rises, this equals constant momentum with the rate applied
      after it.
    - that of their paper, with `reference_rate`: `momentum * lr_t / reference_rate`, and never more than `momentum`.
      It vanishes together with the rate.

    Args:
      momentum: the momentum while the rate does not fall, in [0, 1).
      learning_rate: the schedule that it follows.
      reference_rate: None for the first form; for the second the rate at which the momentum is `momentum`, as a rule
        the largest one.

    Returns:
      A schedule, for the argument `momentum` of `kfac`.

    Raises:
      ValueError: an argument is out of range.

    References:
      Osawa et al., "Large-Scale Distributed Second-Order Optimization Using Kronecker-Factored Approximate Curvature
      for Deep Convolutional Neural Networks", 2019, https://arxiv.org/abs/1811.12019
    """
    check(momentum=momentum, learning_rate=learning_rate)
    check_given(reference_rate=reference_rate)

    def schedule(count: jax.typing.ArrayLike) -> jax.Array:
        count = jnp.asarray(count)
        rate = value_at(learning_rate, count)
        if reference_rate is not None:
            before = jnp.asarray(reference_rate, jnp.float32)
        else:
            before = value_at(learning_rate, jnp.maximum(count - 1, 0))
        # A rate that was zero can only have risen.
        return momentum * jnp.where(rate < before, rate / jnp.where(before > 0, before, 1), 1.0)

    return schedule


def damping_warmup(initial: float, target: float, num_steps: int) -> optax.Schedule:
    """A damping that starts large and falls to its target: `l <- (1 - a) l + a target` in every step.

    With `a = 2 log10(initial / target) / num_steps`, most of the way is behind after `num_steps`.

    Args:
      initial: damping of the first step, at least `target`.
      target: the damping that it tends to, positive.
      num_steps: `T`, the scale of time; at least `2 log10(initial / target)`, so that it never undershoots.

    Returns:
      A schedule, for the argument `damping` of `kfac` and `scale_by_kfac`.

    Raises:
      ValueError: an argument is out of range.

    References:
      The method it goes with: Osawa et al., "Large-Scale Distributed Second-Order Optimization Using
      Kronecker-Factored Approximate Curvature for Deep Convolutional Neural Networks", 2019,
      https://arxiv.org/abs/1811.12019
    """
    check(target=target)
    check_range("initial", initial, f"[{target}, inf)")
    least = 2 * math.log10(initial / target)
    check_range("num_steps", num_steps, f"[{max(1, least)}, inf)")
    share = least / num_steps

    def schedule(count: jax.typing.ArrayLike) -> jax.Array:
        # The recursion in closed form.
        return target + (initial - target) * (1 - share) ** jnp.asarray(count, jnp.float32)

    return schedule
