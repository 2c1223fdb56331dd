"""The optimizer's options, with checks for values out of range and for conflicts between options."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from kfac._checks import OPTIONS, check
from kfac._curvature.inverse import Inverse, check_inverse
from kfac._distributed.distribution import Distribution, check_distribution
from kfac._optimizer.moves import Moves, ScalarOrSchedule
from kfac._optimizer.place import PyTree

# For each conflict between options: a predicate on all options, and the error message as a format string.
CONFLICTS: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (
        lambda o: isinstance(o.trust_ratio, str) and o.trust_ratio == "auto",
        'trust_ratio="auto" has become step_norm="spectral", the default: leave it out',
    ),
    (
        lambda o: o.step_norm is not None and o.trust_ratio is not None,
        "trust_ratio={trust_ratio!r} and step_norm={step_norm!r} both set the length of a step: pass step_norm=None "
        "with trust_ratio",
    ),
    (
        lambda o: o.step_norm is not None and o.kl_clip is not None,
        "kl_clip={kl_clip!r} and step_norm={step_norm!r} both set the length of a step: pass step_norm=None with "
        "kl_clip",
    ),
    (
        lambda o: (
            o.adaptive_layer_rates and (o.step_norm is None or o.momentum is None)
        ),
        'adaptive_layer_rates=True needs step_norm="spectral" and momentum',
    ),
    (
        lambda o: o.layer_multipliers is not None and o.step_norm is None,
        'layer_multipliers={layer_multipliers!r} needs step_norm="spectral"',
    ),
    (
        lambda o: o.rate_in_momentum and o.trust_ratio is not None,
        "rate_in_momentum=True has no effect with trust_ratio, which rescales what the momentum gives: pass False",
    ),
    (
        lambda o: o.nesterov and o.momentum is None,
        "nesterov=True needs momentum, but it is None",
    ),
    (
        lambda o: o.rate_in_momentum and o.momentum is None,
        "rate_in_momentum=True needs momentum, but it is None",
    ),
    (
        lambda o: (
            o.inverse.takes_gradients and (o.kl_clip is not None or o.rate_in_momentum)
        ),
        "inverse={inverse!r} sets the length of a step by the gradients and preconditions their momentum: pass "
        "kl_clip=None and rate_in_momentum=False, or another inverse, inverse=kfac.Cholesky()",
    ),
    (
        lambda o: o.inverse_every is None and o.refresh_warmup is not None,
        "inverse_every=None leaves all refreshes to kfac.observe(opt_state), so refresh_warmup={refresh_warmup!r} has "
        "no effect: leave it at None",
    ),
    (
        lambda o: o.weight_decay is None and o.weight_decay_mask is not None,
        "weight_decay_mask needs weight_decay",
    ),
)


# Options that may be None, and are then not checked.
LEFT_OUT = (
    "momentum", "step_norm", "trust_ratio", "kl_clip", "layer_multipliers", "weight_decay", "inverse_every",
    "refresh_warmup",
)  # fmt: skip


class Options(NamedTuple):
    """The preconditioner's options; see `scale_by_kfac`."""

    damping: ScalarOrSchedule
    inverse: Inverse
    distribution: Distribution | None
    factor_decay: ScalarOrSchedule = 0.95
    statistics_every: int | jax.Array = 1
    inverse_every: int | jax.Array | None = 1
    refresh_warmup: int | jax.Array | None = None
    unitwise_damping: ScalarOrSchedule = 1.0


def check_options(
    options: Options,
    moves: Moves,
    weight_decay: ScalarOrSchedule | None = None,
    weight_decay_mask: PyTree | Callable[[PyTree], PyTree] = None,
) -> None:
    """Raise a `ValueError` if an option is out of range, or if two options conflict."""
    mask = weight_decay_mask
    bools = all(isinstance(x, bool) for x in jax.tree.leaves(mask))
    if isinstance(mask, bool | jax.Array) or not (callable(mask) or bools):
        raise ValueError(
            "weight_decay_mask must be a tree of bools like the parameters, or a function from parameters to one, but "
            f"is {mask!r}. optax.inject_hyperparams calls functions with the step: Name it there, "
            'static_args="weight_decay_mask"'
        )
    check_inverse(options.inverse)
    check_distribution(options.distribution)
    values = {
        **vars(moves),
        **options._asdict(),
        "weight_decay": weight_decay,
        "weight_decay_mask": mask,
    }
    for holds, sentence in CONFLICTS:
        if holds(types.SimpleNamespace(**values)):
            raise ValueError(sentence.format(**values))
    for name, value in values.items():
        left_out = value is None and name in LEFT_OUT
        if name in OPTIONS and not left_out:
            check(**{name: value})
