"""Natural gradient descent with K-FAC, as in Martens & Grosse and in Osawa et al."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optax
from jax import Array

from kfac._checks import HINTS, RENAMED, check, with_hints
from kfac._curvature.cholesky import Cholesky
from kfac._curvature.preconditioner import BlockPreconditioner
from kfac._distributed.distribution import Distribution
from kfac._layers import Layers
from kfac._optimizer.assemble import assemble
from kfac._optimizer.options import Options
from kfac._optimizer.step_scaling import ScalarOrSchedule

# Options of the other optimizer.
MOVED = {
    "adaptive_layer_rates": "kfac.kfac, which sets the length of each step",
    "overhead": "statistics_period= and inverse_update_period=; kfac.kfac computes both from overhead=",
}


@with_hints(HINTS | RENAMED | MOVED)
def natural_gradient(
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
    inverse_update_period: int | float | Array = 1,
    interval_warmup_steps: int | Array = 10,
    preconditioner: BlockPreconditioner = Cholesky(),
    unitwise_damping_scale: ScalarOrSchedule = 16.0,
    distribution: Distribution | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Return natural gradient descent with K-FAC: the curvature sets both the direction and the length of a step.

    ::

        layers = kfac.find_layers(loss_fn, params, batch)
        optimizer = kfac.natural_gradient(0.05, layers, damping=1e-3, factor_ema_decay=0.95)
        opt_state = optimizer.init(params)
        loss, grads, factors = kfac.value_and_grad(loss_fn, layers)(params, batch)
        opt_state = kfac.observe(opt_state, factors)
        updates, opt_state = optimizer.update(grads, opt_state, params)

    The gradient `V` of a kernel is preconditioned by the damped Kronecker factors of the layer's Fisher block, with
    `pi^2 = (tr A / dim A) / (tr G / dim G)` and damping `l`:

    .. code-block:: text

        p = (G + sqrt(l)/pi I)^-1 V (A + pi sqrt(l) I)^-1
        p <- p min(1, sqrt(kl_clip / (lr^2 <p, V>)))      # the sum <p, V> is over all layers
        v <- m v - lr p                                   # lr_in_momentum=True
        w <- w + v - lr weight_decay w

    The factors `A = E[a a^T]` and `G = E[g g^T]` are running averages over batches, which `kfac.observe` updates. It
    also inverts the factors, every `inverse_update_period` steps.

    The defaults are those of Osawa et al. for ResNet-50 on ImageNet at a batch size of 131,072: factors of the last
    batch only, and no KL clip. For this batch size, the learning rate is
    `optax.polynomial_schedule(0.07, 0.0, power=3, ...)` and the momentum is
    `kfac.schedules.coupled_momentum(0.93, rate)`. `examples/imagenet` has the settings for smaller batches. With
    small batches, average the factors over many of them, `factor_ema_decay=0.95`, and search rate and damping together.

    A step with a non-finite preconditioned gradient changes neither parameters nor momentum; `diagnostics` counts such
    steps.

    Args:
      learning_rate: scalar or schedule.
      layers: the layers that `find_layers` returned.
      momentum: the decay `m` of the momentum, in [0, 1), or None. Each block's owner keeps the momentum in float32 or
        better. Scalar or schedule.
      nesterov: whether to use Nesterov momentum.
      lr_in_momentum: whether the learning rate is applied before the momentum. True: `v <- m v - lr p`, `w <- w + v`.
        Steps from an earlier, larger learning rate persist in `v`; see `kfac.schedules.coupled_momentum`. False:
        `v <- m v + p`, `w <- w - lr v`, so a falling rate shrinks all of `v`. Both forms are equal at a constant rate
        and without momentum. `trust_ratio` needs False, because it would cancel the rate.
      weight_decay: decoupled weight decay, multiplied by the learning rate. Scalar or schedule.
      weight_decay_mask: which parameters decay, as for `optax.add_decayed_weights`. By default all parameters decay,
        including parameters behind `stop_gradient`; mask these to leave them unchanged.
      kl_clip: the constraint of the KL clip (Ba, Grosse & Martens 2017), a bound on the squared step length in the
        curvature's metric. Its sum includes all parameters with a block. None: no clip. Scalar or schedule.
      trust_ratio: the norm of a kernel's or an embedding's step before the learning rate, as a multiple of the
        parameter's norm (LARS does this with gradients). If a normalisation follows a kernel, its step first loses the
        component along the kernel, as for `kfac.kfac`. If one of the two norms is zero, the step is not rescaled. Needs
        `lr_in_momentum=False`. Scalar or schedule.
      damping: the damping `l`, positive. It takes effect at the next refresh; with `Eigh` and `EKFAC` at once. Scalar
        or schedule.
      factor_ema_decay: the decay of the factors' running averages per step, in [0, 1); with 0, only the last statistics
        count. Scalar or schedule.
      statistics_period: the interval in steps at which `statistics_due` is true.
      inverse_update_period: the interval in steps at which `observe` refreshes all inverses; see `scale_by_kfac`. With
        `math.inf`, only `observe(opt_state)` without factors refreshes.
      interval_warmup_steps: the number of first steps in which both intervals are 1. Afterwards the intervals double
        until they reach their values; see `scale_by_kfac`.
      preconditioner: how Kronecker blocks are preconditioned: `Cholesky()` as above, `Eigh()`, `EKFAC()`, or your own
        `BlockPreconditioner`. `SOAP()` belongs to `kfac.kfac`; here it needs `kl_clip=None` and `lr_in_momentum=False`.
      unitwise_damping_scale: the factor on `damping` for unit-wise and diagonal blocks, such as normalisation scales
        and shifts. The authors' code uses 16. Scalar or schedule.
      distribution: how several devices are used; see `scale_by_kfac`.

    Returns:
      An `optax.GradientTransformationExtraArgs`, whose state `kfac.observe` updates. With `trust_ratio`, its `update`
      needs the parameters.

    Raises:
      TypeError: an option belongs to another version or optimizer.
      ValueError: an argument is out of range, or two arguments conflict.

    References:
      Martens and Grosse, "Optimizing Neural Networks with Kronecker-factored Approximate Curvature", 2015,
      https://arxiv.org/abs/1503.05671; Ba, Grosse and Martens, "Distributed Second-Order Optimization using
      Kronecker-Factored Approximations", ICLR 2017; Osawa et al., "Large-Scale Distributed Second-Order Optimization
      Using Kronecker-Factored Approximate Curvature for Deep Convolutional Neural Networks", 2019,
      https://arxiv.org/abs/1811.12019
    """
    check(lr_in_momentum=lr_in_momentum)
    options = Options(
        damping=damping,
        factor_ema_decay=factor_ema_decay,
        statistics_period=statistics_period,
        inverse_update_period=inverse_update_period,
        interval_warmup_steps=interval_warmup_steps,
        preconditioner=preconditioner,
        unitwise_damping_scale=unitwise_damping_scale,
        distribution=distribution,
        kl_clip=kl_clip,
        learning_rate=learning_rate,
        # Both forms are equal without momentum.
        lr_in_momentum=lr_in_momentum and momentum is not None,
        momentum=momentum,
        nesterov=nesterov,
        trust_ratio=trust_ratio,
        weight_decay=weight_decay,
        weight_decay_mask=weight_decay_mask,
    )
    return assemble(layers, options)
