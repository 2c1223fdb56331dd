"""The `kfac` optimizer: Adam in the eigenbasis of K-FAC's factors, with spectral step lengths."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import optax
from jax import Array

from kfac._capture.thin_batch import statistics_one_in
from kfac._checks import (
    HINTS,
    RENAMED,
    check,
    check_layers,
    with_hints,
)
from kfac._curvature.cost_model import OVERHEAD, affordable
from kfac._curvature.preconditioner import BlockPreconditioner, check_preconditioner
from kfac._curvature.soap import SOAP
from kfac._distributed.distribution import Distribution
from kfac._layers import Layers
from kfac._optimizer.assemble import assemble
from kfac._optimizer.options import Options
from kfac._optimizer.rates import warn_of_rate
from kfac._optimizer.step_scaling import ScalarOrSchedule

NATURAL_GRADIENT = (
    "kfac.natural_gradient (in train_step: optimizer=kfac.natural_gradient)"
)
# Options of version 0.4 that belong to the other optimizer now.
MOVED = {
    "step_norm": f'{NATURAL_GRADIENT} for None; "spectral" is the default, leave it out',
    "trust_ratio": f'{NATURAL_GRADIENT} for a number; "auto" is the default, leave it out',
    "kl_clip": f"{NATURAL_GRADIENT}; here every step has a set length",
    "statistics_fraction": "fraction= of kfac.statistics (in train_step: statistics_fraction=)",
}


@with_hints(HINTS | RENAMED | MOVED)
def kfac(
    learning_rate: ScalarOrSchedule,
    layers: Layers,
    *,
    momentum: ScalarOrSchedule = 0.9,
    nesterov: bool = True,
    weight_decay: ScalarOrSchedule | None = None,
    weight_decay_mask: Any | Callable[[Any], Any] | None = None,
    adaptive_layer_rates: bool = True,
    damping: ScalarOrSchedule | None = None,
    overhead: float = OVERHEAD,
    inverse_update_period: int | float | Array | None = None,
    preconditioner: BlockPreconditioner = SOAP(),
    distribution: Distribution | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Return the recommended optimizer.

    It is Adam in the eigenbasis of K-FAC's factors: SOAP with exact per-example statistics and spectral step lengths.
    Use it unless the curvature should also set the length of a step, as in `kfac.natural_gradient`.

    ::

        layers = kfac.find_layers(loss_fn, params, batch)
        optimizer = kfac.kfac(kfac.schedules.warmup_linear_decay(0.1, num_steps), layers)
        opt_state = optimizer.init(params)
        opt_state = kfac.observe(opt_state, kfac.statistics(loss_fn, layers)(params, batch))
        grads = jax.grad(loss_fn)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)

    **The length of a step.** The curvature only sets the direction. The largest singular value of a kernel's step is
    `learning_rate * sqrt(overlap * max(1, d_out / d_in))`, the spectral condition of Yang, Simon & Bernstein (2023).
    `Layer.overlap` is the number of convolution windows that contain an input position: 9 for 3 x 3, 2.25 for 3 x 3
    with stride 2, and 1 for a dense kernel. Six power iterations estimate the singular value from below. A bias is
    scaled like its kernel. Each copy of a stacked kernel is scaled separately. The steps of other parameters with a
    block, such as embeddings and normalisation scales, have a root mean square of `0.1 * learning_rate` over their
    nonzero elements. If a vector is copied to `p` positions of each example, as a mask token is, this is divided by
    `sqrt(p)`. A layer with a zero gradient gets a zero step. The steps of skipped parameters are not rescaled.

    If a normalisation follows a kernel, only the kernel's direction affects the loss. The step then first loses its
    component along the kernel. Such kernels are recognised by `|cos(w, g)| < 0.1 / sqrt(n)`, with the kernel `w`, its
    gradient `g`, and `n` elements in each (Heo et al. 2021). Other kernels meet this condition by chance in one of
    twelve steps.

    A step with a non-finite preconditioned gradient changes neither parameters nor momentum; `diagnostics` counts such
    steps.

    Args:
      learning_rate: scalar or schedule. It is the size of a kernel's step relative to the kernel's size at
        initialisation, for networks of any width. Start with 0.1: warm up to this rate during the first tenth of the
        steps, then decay it to zero.
      layers: the layers that `find_layers` returned. Its `rules` may multiply the steps of some layers.
      momentum: the decay of the momentum, in [0, 1), as in `optax.trace`; 0 leaves it out. Each block's owner keeps the
        momentum in float32 or better. Scalar or schedule.
      nesterov: whether to use Nesterov momentum.
      weight_decay: decoupled weight decay, multiplied by the learning rate. Scalar or schedule.
      weight_decay_mask: which parameters decay, as for `optax.add_decayed_weights`. By default all parameters decay,
        including parameters behind `stop_gradient`; mask these to leave them unchanged.
      adaptive_layer_rates: whether each layer adapts its own multiplier of the learning rate, between 1 and 4. The
        multiplier grows while the gradient agrees with the last step. It falls if the last step went too far.
        Otherwise it returns towards 1, with a time constant of fifty steps. It cannot grow while the learning rate
        rises, or is less than half of its maximum so far. Almeida et al. (1998) and Baydin et al. (2018) adapt one rate
        for all layers in this way. Each copy of a stacked kernel, and each piece of a kernel that `max_factor_dim`
        cuts, has its own multiplier.
      damping: see `scale_by_kfac`. It is relative to each block's mean eigenvalue (with `SOAP`, to its mean squared
        gradient), as with `Cholesky(scale_damping=True)`, so that the scale of the loss does not matter. None: 1e-4 for
        `SOAP` and 0.1 for other preconditioners.
      overhead: the target overhead of statistics and refreshes in the mean step, as a fraction of the gradient's time.
        It sets the interval of both: the shortest interval, at most 16 steps, at which their FLOPs are this fraction of
        the gradient's FLOPs. The batch that the layers were found with gives the number of examples. Statistics include
        their own forward and backward pass, and use the default fraction of the examples, see `statistics`. A FLOP of a
        refresh counts as three FLOPs of the gradient on a CPU and as eight on accelerators, because it takes longer.
        Statistics and refreshes are due in each of the first ten steps; then the interval doubles until it reaches its
        final value (see `interval_warmup_steps` of `scale_by_kfac`). Call `observe` before the next step if
        `statistics_due` is true; `train_step` does this. The interval is 16 if the gradient's FLOPs are unknown, for
        example because the loss hides its batch.
      inverse_update_period: the interval in steps at which `observe` refreshes the preconditioners, instead of the
        interval that `overhead` sets; see `scale_by_kfac`. With `math.inf`, only `observe(opt_state)` without factors
        refreshes. `kfac.planning.estimate` estimates intervals for other machines.
      preconditioner: how Kronecker blocks are preconditioned: `SOAP()`, which preconditions the momentum of the
        gradients, `Cholesky()`, `Eigh()`, `EKFAC()` or your own `BlockPreconditioner`. Its `scale_damping` becomes
        True.
      distribution: how several devices are used; see `scale_by_kfac`.

    Returns:
      An `optax.GradientTransformationExtraArgs`. Its `update` needs the parameters. It does not precondition gradients
      until `kfac.observe` has brought statistics.

    Raises:
      TypeError: an option belongs to `kfac.natural_gradient`, or to another version or optimizer.
      ValueError: an argument is out of range, or `weight_decay_mask` has no `weight_decay`.

    References:
      Vyas et al., "SOAP: Improving and Stabilizing Shampoo using Adam", 2024, https://arxiv.org/abs/2409.11321; Martens
      and Grosse, "Optimizing Neural Networks with Kronecker-factored Approximate Curvature", 2015,
      https://arxiv.org/abs/1503.05671; Yang, Simon and Bernstein, "A Spectral Condition for Feature Learning", 2023,
      https://arxiv.org/abs/2310.17813; Heo et al., "AdamP", 2021, https://arxiv.org/abs/2006.08217
    """
    check_layers(layers)
    check_preconditioner(preconditioner)
    check(overhead=overhead)
    one_in = statistics_one_in(layers, None)
    period = affordable(layers, preconditioner, overhead, one_in)
    if inverse_update_period is None:
        inverse_update_period = period
    # Adaptive rates follow the momentum, so it cannot be None.
    check(momentum=momentum)
    options = Options(
        damping=preconditioner.default_damping if damping is None else damping,
        statistics_period=period,
        inverse_update_period=inverse_update_period,
        preconditioner=dataclasses.replace(preconditioner, scale_damping=True),
        distribution=distribution,
        learning_rate=learning_rate,
        momentum=momentum,
        nesterov=nesterov,
        spectral=True,
        adaptive_layer_rates=adaptive_layer_rates,
        weight_decay=weight_decay,
        weight_decay_mask=weight_decay_mask,
    )
    warn_of_rate(learning_rate)
    return assemble(layers, options)
