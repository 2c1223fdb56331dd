"""The large-batch ImageNet recipe of Osawa et al. (2019), with all options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optax
from jax import Array

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
    statistics_every: int | Array = 1,
    inverse_every: int | Array | None = 1,
    refresh_warmup: int | Array | None = None,
    inverse: Inverse = Cholesky(),
    unitwise_damping: ScalarOrSchedule = 16.0,
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
      rate_in_momentum: whether the learning rate is applied before the momentum. True: `v <- m v - lr p`, `w <- w + v`
        with the preconditioned gradient `p`. Steps from an earlier, larger learning rate persist in `v`; see
        `kfac.schedules.coupled_momentum`. False: `v <- m v + p`, `w <- w - lr v`, so a falling rate shrinks all of `v`.
        Both forms are equal at a constant rate. `trust_ratio` needs False, because it would cancel the rate.
      weight_decay: as for `kfac`.
      weight_decay_mask: as for `kfac`.
      kl_clip: as for `kfac`.
      trust_ratio: as for `kfac`. Needs `rate_in_momentum=False`.
      damping: as for `scale_by_kfac`, like the arguments below.
      factor_decay: the decay of the factors' running averages.
      statistics_every: the interval in steps after which `statistics_due` is true.
      inverse_every: the interval in steps after which `observe` refreshes the inverses. None: only `observe(opt_state)`
        without factors refreshes them.
      refresh_warmup: the number of first steps in which both intervals are 1. Afterwards the intervals double until
        they reach their values. None: 10.
      inverse: how Kronecker blocks are inverted.
      unitwise_damping: the factor on `damping` for unit-wise and diagonal blocks. The authors' code uses 16.
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
    moves = Moves(
        kl_clip=kl_clip,
        learning_rate=learning_rate,
        rate_in_momentum=rate_in_momentum,
        momentum=momentum,
        nesterov=nesterov,
        trust_ratio=trust_ratio,
    )
    return assemble(
        layers,
        moves,
        weight_decay=weight_decay,
        weight_decay_mask=weight_decay_mask,
        inverse=inverse,
        damping=damping,
        factor_decay=factor_decay,
        statistics_every=statistics_every,
        inverse_every=inverse_every,
        refresh_warmup=refresh_warmup,
        unitwise_damping=unitwise_damping,
        distribution=distribution,
    )
