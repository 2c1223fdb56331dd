"""Warn of learning rates that belong to another optimizer."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable

import jax
import numpy as np

from kfac._optimizer.step_scaling import ScalarOrSchedule

# Rates of AdamW are below, and rates of `kfac.kfac` above. Its best rates in docs/evidence.md are 0.02 to 0.5.
SMALLEST = 0.003
# Steps at which a schedule is evaluated. A peak between two of them is at most a third higher after a linear warm-up.
STEPS = np.unique(np.concatenate([2 ** np.arange(21), 3 * 2 ** np.arange(20)]))


def warn_of_rate(learning_rate: ScalarOrSchedule) -> None:
    """Warn once if a rate, or a schedule's peak, is too small for `kfac.kfac`, or if a schedule is zero throughout.

    A rate of zero is no mistake. Arrays are not looked at, because `optax.inject_hyperparams` passes the rate of a
    single step, which may belong to a warm-up.
    """
    if callable(learning_rate):
        try:
            peak = _peak_of(learning_rate)
        except Exception:
            # A schedule without a hash, or for single steps only. If it is wrong, the first step raises an error.
            return
        what = f"the peak of the learning rate's schedule, {peak:.2g}, is"
        if peak == 0:
            _warn_once(
                "the learning rate's schedule is zero in all steps that were looked at, up to step one million: it may "
                "divide integers, or count in another unit than steps"
            )
    elif isinstance(learning_rate, int | float):
        peak = learning_rate
        what = f"learning_rate={peak!r} is"
    else:
        return
    if 0 < peak < SMALLEST:
        _warn_once(
            f"{what} of AdamW's size: the rate of kfac.kfac is the size of a kernel's step relative to the kernel. "
            "Start with 0.1"
        )


@functools.lru_cache(64)
def _peak_of(schedule: Callable) -> float:
    with jax.ensure_compile_time_eval():
        # One program for all steps compiles faster than operations by themselves.
        return float(np.max(jax.jit(jax.vmap(schedule))(STEPS)))


# The cache makes each warning one, however often `jit` traces the optimizer.
@functools.lru_cache(64)
def _warn_once(text: str) -> None:
    warnings.warn(text, stacklevel=5)
