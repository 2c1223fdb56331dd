"""Tell the user of a loop without `observe` that gradients are not preconditioned.

A compiled `update` cannot tell. A callback would keep its program out of JAX's compilation cache, make each call on a
CPU wait for its result, and run once on each device. So the next call outside of `jit` tells, such as `diagnostics` or
`statistics_due`, and otherwise the end of the program.
"""

from __future__ import annotations

import atexit
import sys
import warnings
import weakref

import jax

from kfac._optimizer.state import KfacState, Settings

REMEDY = (
    "when kfac.statistics_due(opt_state), call opt_state = kfac.observe(opt_state, kfac.statistics(loss_fn, layers)("
    "params, batch)) before update"
)
OVERDUE = (
    f"there were no new statistics for more than three intervals: {REMEDY}, and keep its result (in Flax nnx, compile "
    "it with nnx.jit, because jax.jit drops the change to the optimizer)"
)
NEVER = (
    "kfac: update was compiled, but kfac.observe was never called, so gradients were not preconditioned: "
    f"{REMEDY}"
)

_told: weakref.WeakSet[Settings] = weakref.WeakSet()
_compiled_without_observe: list[bool] = []


def warn_if_overdue(state: KfacState) -> None:
    """Warn once for each optimizer if the last statistics are more than three intervals old.

    Do nothing under `jit`, while the state is not computed yet, or if the optimizer takes no statistics in intervals.
    """
    settings = state.settings
    if settings.interval is None or not settings.refreshes or settings in _told:
        return
    for x in (state.count, state.last_statistics_step):
        # The state of `jax.pmap` has an axis of devices. Logging must not wait for the step.
        if isinstance(x, jax.core.Tracer) or x.ndim:
            return
        if hasattr(x, "is_ready") and not x.is_ready():
            return
    last = int(state.last_statistics_step)
    patience = 3 * int(settings.interval.every)
    if last >= 0:
        # A loop with statistics may count its own interval, so it is not told of a few steps.
        patience = max(patience, 50)
    if int(state.count) - max(last, 0) > patience:
        _told.add(settings)
        warnings.warn(OVERDUE, stacklevel=3)


def note_update(state: KfacState) -> None:
    """Remember that `update` is traced, to tell at the end of the program unless `note_observe` has been called."""
    if not _compiled_without_observe and state.settings.refreshes:
        if isinstance(state.count, jax.core.Tracer):
            _compiled_without_observe.append(True)
            atexit.register(_tell_at_exit)


def note_observe() -> None:
    """Remember that `observe` is called."""
    _compiled_without_observe[:] = [False]


def _tell_at_exit() -> None:
    if _compiled_without_observe == [True]:
        print(NEVER, file=sys.stderr)
