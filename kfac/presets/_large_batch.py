"""Optimizers with all options and the settings of a published recipe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax

from kfac._checks import check_given
from kfac._curvature.cholesky import Cholesky
from kfac._curvature.inverse import Inverse
from kfac._distributed.distribution import Distribution
from kfac._layers import Layers
from kfac._optimizer.kfac import assemble
from kfac._optimizer.moves import Moves, ScalarOrSchedule


def large_batch(
    learning_rate: ScalarOrSchedule,
    layers: Layers,
    *,
    momentum: ScalarOrSchedule | None = 0.93,
    nesterov: bool = False,
    rate_in_momentum: bool = True,
    weight_decay: ScalarOrSchedule | None = None,
    weight_decay_mask: Any | Callable[[Any], Any] | None = None,
    kl_clip: ScalarOrSchedule | None = None,
    trust_ratio: ScalarOrSchedule | None = None,
    damping: ScalarOrSchedule = 1e-4,
    factor_decay: ScalarOrSchedule = 0.0,
    statistics_every: int | jax.Array = 1,
    inverse_every: int | jax.Array | None = 1,
    refresh_warmup: int | jax.Array | None = None,
    inverse: Inverse = Cholesky(),
    unitwise_damping: ScalarOrSchedule = 16.0,
    distribution: Distribution | None = None,
) -> optax.GradientTransformationExtraArgs:
    """K-FAC for ResNets on ImageNet at batches of thousands, as Osawa et al. have it.

    The curvature makes the length of a step, factors are those of the last batch alone, and the learning rate is
    applied before the momentum. The defaults are those for a batch of 131,072, for which the rate is
    `optax.polynomial_schedule(0.07, 0.0, power=3, ...)` and the momentum `kfac.schedules.coupled_momentum(0.93, rate)`;
    `examples/imagenet` has those for smaller batches.

    Args:
      learning_rate: scalar or schedule of the step.
      layers: what `find_layers` returned.
      momentum: as for `kfac`.
      nesterov: as for `kfac`.
      rate_in_momentum: whether the learning rate is applied before the momentum. True: `v <- m v - lr p`, `w <- w + v`
        with the preconditioned gradient `p`: steps of an earlier, larger rate go on; see
        `kfac.schedules.coupled_momentum`. False: `v <- m v + p`, `w <- w - lr v`, so that a falling rate shrinks all of
        `v`. The same for a constant rate. Not with `trust_ratio`, which would take the rate out again.
      weight_decay: as for `kfac`.
      weight_decay_mask: as for `kfac`.
      kl_clip: as for `kfac`.
      trust_ratio: as for `kfac`. Needs `rate_in_momentum=False`.
      damping: as for `scale_by_kfac`, like the arguments that follow.
      factor_decay: decay of the running averages of the factors.
      statistics_every: steps between those before which `statistics_due` is true.
      inverse_every: steps between refreshes of the inverses, which `observe` makes; None leaves them to
        `observe(opt_state)` without factors.
      refresh_warmup: first steps in which both intervals are 1; from there they double to their values.
      inverse: how Kronecker blocks are inverted.
      unitwise_damping: factor on `damping` for unit-wise and diagonal blocks. Their code multiplies by 16.
      distribution: how several devices are used.

    Returns:
      An optimizer like those of optax, for `kfac.observe` as well.

    Raises:
      ValueError: an argument is out of range.

    References:
      Osawa et al., "Large-Scale Distributed Second-Order Optimization Using Kronecker-Factored Approximate Curvature
      for Deep Convolutional Neural Networks", 2019, https://arxiv.org/abs/1811.12019
    """
    check_given(trust_ratio=trust_ratio)
    return assemble(
        layers, Moves(kl_clip, learning_rate, rate_in_momentum, momentum, nesterov, trust_ratio=trust_ratio),
        weight_decay=weight_decay, weight_decay_mask=weight_decay_mask, inverse=inverse, damping=damping,
        factor_decay=factor_decay, statistics_every=statistics_every, inverse_every=inverse_every,
        refresh_warmup=refresh_warmup, unitwise_damping=unitwise_damping, distribution=distribution,
    )  # fmt: skip
