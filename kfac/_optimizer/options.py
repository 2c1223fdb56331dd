"""The optimizers' options, with checks for values out of range and for conflicts between options."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax import Array

from kfac._checks import OPTIONS, check
from kfac._curvature.blocks import Group
from kfac._curvature.cholesky import Cholesky
from kfac._curvature.preconditioner import BlockPreconditioner, check_preconditioner
from kfac._distributed.distribution import Distribution, check_distribution
from kfac._optimizer.step_scaling import (
    ScalarOrSchedule,
    StepScalars,
    find_kernels,
    value_at,
)

# Options that may be None, and are then not checked.
LEFT_OUT = ("momentum", "trust_ratio", "kl_clip", "weight_decay")


@dataclasses.dataclass(frozen=True, eq=False)
class Options:
    """The options of `scale_by_kfac`, `kfac` and `natural_gradient`, which describe them.

    With the defaults, no stage follows the preconditioner.

    Attributes:
      spectral: whether the step of a kernel has a set spectral norm, as in `kfac`.
    """

    damping: ScalarOrSchedule = 1e-3
    factor_ema_decay: ScalarOrSchedule = 0.95
    statistics_period: int | Array = 1
    inverse_update_period: int | float | Array = 1
    interval_warmup_steps: int | Array = 10
    preconditioner: BlockPreconditioner = Cholesky()
    unitwise_damping_scale: ScalarOrSchedule = 1.0
    distribution: Distribution | None = None
    kl_clip: ScalarOrSchedule | None = None
    learning_rate: ScalarOrSchedule = 0.0
    lr_in_momentum: bool = False
    momentum: ScalarOrSchedule | None = None
    nesterov: bool = False
    spectral: bool = False
    trust_ratio: ScalarOrSchedule | None = None
    adaptive_layer_rates: bool = False
    weight_decay: ScalarOrSchedule | None = None
    weight_decay_mask: Any | Callable[[Any], Any] | None = None

    @property
    def set_lengths(self) -> bool:
        """Whether a stage rescales the steps."""
        return self.spectral or self.trust_ratio is not None

    def at(self, count: Array) -> StepScalars:
        """Return the scalars of step `count`."""

        def optional(scalar):
            return None if scalar is None else value_at(scalar, count)

        return StepScalars(
            damping=value_at(self.damping, count),
            limit=optional(self.kl_clip),
            rate=value_at(self.learning_rate, count),
            momentum=value_at(0.0 if self.momentum is None else self.momentum, count),
            coefficient=optional(self.trust_ratio),
        )

    def needs_params(self, group: Group) -> bool:
        """Return whether the step lengths of a group depend on its parameters."""
        kernels = find_kernels(group, self.spectral)
        return self.set_lengths and bool(kernels.size.any())

    def has_momentum(self, group: Group) -> bool:
        """Return whether the optimizer keeps a group's momentum, instead of the group's preconditioner."""
        keeps_its_own = group.preconditioner_of(self.preconditioner).owns_momentum
        return self.momentum is not None and not keeps_its_own


def check_options(options: Options) -> None:
    """Raise a `ValueError` if an option is out of range, or if two options conflict."""
    mask = options.weight_decay_mask
    bools = all(isinstance(x, bool) for x in jax.tree.leaves(mask))
    if isinstance(mask, bool | Array) or not (callable(mask) or bools):
        raise ValueError(
            "weight_decay_mask must be a tree of bools like the parameters, or a function from parameters to one, but "
            f"is {mask!r}. optax.inject_hyperparams calls functions with the step: Name it there, "
            'static_args="weight_decay_mask"'
        )
    check_preconditioner(options.preconditioner)
    check_distribution(options.distribution)
    for name, value in vars(options).items():
        left_out = value is None and name in LEFT_OUT
        if name in OPTIONS and not left_out:
            check(**{name: value})
    if options.weight_decay is None and mask is not None:
        raise ValueError("weight_decay_mask needs weight_decay")
    if options.lr_in_momentum and options.trust_ratio is not None:
        raise ValueError(
            "lr_in_momentum=True has no effect with trust_ratio, which rescales what the momentum gives: pass "
            "False"
        )
    clipped = options.kl_clip is not None or options.lr_in_momentum
    if options.preconditioner.owns_momentum and clipped:
        raise ValueError(
            f"preconditioner={options.preconditioner!r} sets the length of a step by the gradients and preconditions "
            "their momentum: pass kl_clip=None and lr_in_momentum=False, or preconditioner=kfac.Cholesky()"
        )
