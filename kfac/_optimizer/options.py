"""The optimizer's options, with checks for values out of range and for conflicts between options."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
from jax import Array

from kfac._checks import OPTIONS, check
from kfac._curvature.preconditioner import BlockPreconditioner, check_preconditioner
from kfac._distributed.distribution import Distribution, check_distribution
from kfac._mesh import PyTree
from kfac._optimizer.step_scaling import ScalarOrSchedule, ScalingConfig

# Options that may be None, and are then not checked.
LEFT_OUT = (
    "momentum",
    "step_norm",
    "trust_ratio",
    "kl_clip",
    "layer_multipliers",
    "weight_decay",
    "inverse_update_period",
    "interval_warmup_steps",
)


class Options(NamedTuple):
    """The preconditioner's options; see `scale_by_kfac`."""

    damping: ScalarOrSchedule
    preconditioner: BlockPreconditioner
    distribution: Distribution | None
    factor_ema_decay: ScalarOrSchedule = 0.95
    statistics_period: int | Array = 1
    inverse_update_period: int | Array | None = 1
    interval_warmup_steps: int | Array | None = None
    unitwise_damping_scale: ScalarOrSchedule = 1.0


def check_options(
    options: Options,
    scaling: ScalingConfig,
    weight_decay: ScalarOrSchedule | None = None,
    weight_decay_mask: PyTree | Callable[[PyTree], PyTree] = None,
) -> None:
    """Raise a `ValueError` if an option is out of range, or if two options conflict."""
    mask = weight_decay_mask
    bools = all(isinstance(x, bool) for x in jax.tree.leaves(mask))
    if isinstance(mask, bool | Array) or not (callable(mask) or bools):
        raise ValueError(
            "weight_decay_mask must be a tree of bools like the parameters, or a function from parameters to one, but "
            f"is {mask!r}. optax.inject_hyperparams calls functions with the step: Name it there, "
            'static_args="weight_decay_mask"'
        )
    check_preconditioner(options.preconditioner)
    check_distribution(options.distribution)
    conflict = _conflict(options, scaling)
    if weight_decay is None and mask is not None:
        conflict = conflict or "weight_decay_mask needs weight_decay"
    if conflict is not None:
        raise ValueError(conflict)
    values = vars(scaling) | options._asdict() | {"weight_decay": weight_decay}
    for name, value in values.items():
        left_out = value is None and name in LEFT_OUT
        if name in OPTIONS and not left_out:
            check(**{name: value})


def _conflict(options: Options, scaling: ScalingConfig) -> str | None:
    """Return the error message for the first conflict between options, or None."""
    lengths = scaling.step_norm is not None
    trust_ratio: object = scaling.trust_ratio
    if isinstance(trust_ratio, str) and trust_ratio == "auto":
        return 'trust_ratio="auto" has become step_norm="spectral", the default: leave it out'
    if lengths and trust_ratio is not None:
        return (
            f"trust_ratio={trust_ratio!r} and step_norm={scaling.step_norm!r} both set the length of a step: pass "
            "step_norm=None with trust_ratio"
        )
    if lengths and scaling.kl_clip is not None:
        return (
            f"kl_clip={scaling.kl_clip!r} and step_norm={scaling.step_norm!r} both set the length of a step: pass "
            "step_norm=None with kl_clip"
        )
    if scaling.adaptive_layer_rates and not (lengths and scaling.momentum is not None):
        return 'adaptive_layer_rates=True needs step_norm="spectral" and momentum'
    if scaling.layer_multipliers is not None and not lengths:
        return f'layer_multipliers={scaling.layer_multipliers!r} needs step_norm="spectral"'
    if scaling.lr_in_momentum and trust_ratio is not None:
        return (
            "lr_in_momentum=True has no effect with trust_ratio, which rescales what the momentum gives: pass "
            "False"
        )
    if scaling.nesterov and scaling.momentum is None:
        return "nesterov=True needs momentum, but it is None"
    if scaling.lr_in_momentum and scaling.momentum is None:
        return "lr_in_momentum=True needs momentum, but it is None"
    clipped = scaling.kl_clip is not None or scaling.lr_in_momentum
    if options.preconditioner.takes_gradients and clipped:
        return (
            f"preconditioner={options.preconditioner!r} sets the length of a step by the gradients and preconditions "
            "their momentum: pass kl_clip=None and lr_in_momentum=False, or preconditioner=kfac.Cholesky()"
        )
    if (
        options.inverse_update_period is None
        and options.interval_warmup_steps is not None
    ):
        return (
            "inverse_update_period=None leaves all refreshes to kfac.observe(opt_state), so "
            f"interval_warmup_steps={options.interval_warmup_steps!r} has no effect: leave it at None"
        )
    return None
