"""The large-batch ImageNet recipe of Osawa et al. (2019), with all options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optax
from jax import Array

from kfac._checks import RENAMED, check_given, with_hints
from kfac._curvature.cholesky import Cholesky
from kfac._curvature.preconditioner import BlockPreconditioner
from kfac._distributed.distribution import Distribution
from kfac._layers import Layers
from kfac._optimizer.kfac import assemble
from kfac._optimizer.step_scaling import ScalarOrSchedule, ScalingConfig


@with_hints(RENAMED)
def osawa2019(
    learning_rate: ScalarOrSchedule,
    layers: Layers,
    *,
    momentum: ScalarOrSchedule | None = 0.93,
    nesterov: bool = False,
    lr_in_momentum: bool = True,
    weight_decay: ScalarOrSchedule | None = None,
    weight_decay_mask: Any | Callable[[Any], Any] | None = None,
    kl_clip: ScalarOrSchedule | None = None,
    trust_ratio: ScalarOrSchedule | None = None,
    damping: ScalarOrSchedule = 1e-4,
    factor_ema_decay: ScalarOrSchedule = 0.0,
    statistics_period: int | Array = 1,
    inverse_update_period: int | Array | None = 1,
    interval_warmup_steps: int | Array | None = None,
    preconditioner: BlockPreconditioner = Cholesky(),
    unitwise_damping_scale: ScalarOrSchedule = 16.0,
    distribution: Distribution | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Return the K-FAC optimizer of Osawa et al. for ResNets on ImageNet at batch sizes of thousands.

    The curvature sets the length of each step, without `step_norm`. Factors come from the last batch only. The learning
    rate is applied before the momentum. The defaults are for a batch size of 131,072. For this batch size, the
    learning rate is `optax.polynomial_schedule(0.07, 0.0, power=3, ...)` and the momentum is
    `kfac.schedules.coupled_momentum(0.93, rate)`. `examples/imagenet` has the settings for smaller batches.

    Args:
      learning_rate: a scalar, or a schedule of the step count.
      layers: the layers that `find_layers` returned.
      momentum: as for `kfac`.
      nesterov: as for `kfac`.
      lr_in_momentum: whether the learning rate is applied before the momentum. True: `v <- m v - lr p`, `w <- w + v`
        with the preconditioned gradient `p`. Steps from an earlier, larger learning rate persist in `v`; see
        `kfac.schedules.coupled_momentum`. False: `v <- m v + p`, `w <- w - lr v`, so a falling rate shrinks all of `v`.
        Both forms are equal at a constant rate. `trust_ratio` needs False, because it would cancel the rate.
      weight_decay: as for `kfac`.
      weight_decay_mask: as for `kfac`.
      kl_clip: as for `kfac`.
      trust_ratio: as for `kfac`. Needs `lr_in_momentum=False`.
      damping: as for `scale_by_kfac`, like the arguments below.
      factor_ema_decay: the decay of the factors' running averages.
      statistics_period: the interval in steps after which `statistics_due` is true.
      inverse_update_period: the interval in steps after which `observe` refreshes the inverses. None: only
        `observe(opt_state)` without factors refreshes them.
      interval_warmup_steps: the number of first steps in which both intervals are 1. Afterwards the intervals double
        until they reach their values. None: 10.
      preconditioner: how Kronecker blocks are inverted.
      unitwise_damping_scale: the factor on `damping` for unit-wise and diagonal blocks. The authors' code uses 16.
      distribution: how several devices are used.

    Returns:
      An `optax.GradientTransformationExtraArgs`, whose state `kfac.observe` updates.

    Raises:
      ValueError: an argument is out of range.

    References:
      Osawa et al., "Large-Scale Distributed Second-Order Optimization Using Kronecker-Factored Approximate Curvature
      for Deep Convolutional Neural Networks", 2019, https://arxiv.org/abs/1811.12019
    """
    check_given(trust_ratio=trust_ratio)
    scaling = ScalingConfig(
        kl_clip=kl_clip,
        learning_rate=learning_rate,
        lr_in_momentum=lr_in_momentum,
        momentum=momentum,
        nesterov=nesterov,
        trust_ratio=trust_ratio,
    )
    return assemble(
        layers,
        scaling,
        weight_decay=weight_decay,
        weight_decay_mask=weight_decay_mask,
        preconditioner=preconditioner,
        damping=damping,
        factor_ema_decay=factor_ema_decay,
        statistics_period=statistics_period,
        inverse_update_period=inverse_update_period,
        interval_warmup_steps=interval_warmup_steps,
        unitwise_damping_scale=unitwise_damping_scale,
        distribution=distribution,
    )
