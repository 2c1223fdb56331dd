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
    "weight_decay",
)


class Options(NamedTuple):
    """The preconditioner's options; see `scale_by_kfac`."""

    damping: ScalarOrSchedule
    preconditioner: BlockPreconditioner
    distribution: Distribution | None
    factor_ema_decay: ScalarOrSchedule = 0.95
    statistics_period: int | Array = 1
    inverse_update_period: int | float | Array = 1
    interval_warmup_steps: int | Array = 10
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
    values = vars(scaling) | options._asdict() | {"weight_decay": weight_decay}
    for name, value in values.items():
        left_out = value is None and name in LEFT_OUT
        if name in OPTIONS and not left_out:
            check(**{name: value})
    if weight_decay is None and mask is not None:
        raise ValueError("weight_decay_mask needs weight_decay")
    if scaling.lr_in_momentum and scaling.trust_ratio is not None:
        raise ValueError(
            "lr_in_momentum=True has no effect with trust_ratio, which rescales what the momentum gives: pass "
            "False"
        )
    clipped = scaling.kl_clip is not None or scaling.lr_in_momentum
    if options.preconditioner.owns_momentum and clipped:
        raise ValueError(
            f"preconditioner={options.preconditioner!r} sets the length of a step by the gradients and preconditions "
            "their momentum: pass kl_clip=None and lr_in_momentum=False, or preconditioner=kfac.Cholesky()"
        )
