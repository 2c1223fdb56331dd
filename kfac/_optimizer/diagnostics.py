"""Read values from an optimizer state: scalars to log, and whether statistics are due."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import optax
from jax import Array

from kfac._optimizer.overdue import warn_if_overdue
from kfac._optimizer.state import (
    AdaptiveDampingState,
    KfacState,
    find_nodes,
    find_state,
    find_states,
    pure,
)


def diagnostics(opt_state: Any) -> dict[str, Array]:
    """Return scalars to log, from the optimizer state of any chain that holds `scale_by_kfac`.

    ::

        for name, value in kfac.diagnostics(opt_state).items():
            print(name, float(value))

    Args:
      opt_state: an optimizer state that contains the preconditioner's state.

    Returns:
      A dictionary of scalars.

      - `damping`: the damping of the last step.
      - `gradient_norm`, `preconditioned_norm`: 2-norms over the parameters with a curvature block.
      - `condition`: the largest condition number of all blocks, each at its last refresh. It refers to the damped
        factors and the 1-norm; with `Eigh` and `EKFAC`, to the damped blocks and the 2-norm. With `SOAP`, it refers to
        the roots of the damped second moments by which the last step divided.
      - `inverse_age`: steps since the oldest preconditioner in use was refreshed.
      - `statistics_age`: steps since the last statistics, or since the start. It keeps growing if the loop does not
        call `observe`. From three intervals on, `diagnostics` warns of this once.
      - `skipped_statistics`, `failed_inversions`: the number of blocks with such a failure, summed since the start.
      - `skipped_steps`: the number of non-finite updates, including updates that an `optax.apply_if_finite` around the
        optimizer rejected.
      - `kl_clip_scale`: the scale of the last step's KL clip; 1 without a KL clip.
      - `min_layer_rate`, `max_layer_rate`: the lowest and highest of the layers' learning-rate multipliers.
      - `reduction_ratio`, `rejected_steps`: only with `adaptive_damping` and `gauss_newton`, the last reduction ratio
        (0 before the first measurement) and the number of rejected steps.

    Raises:
      ValueError: `opt_state` contains no K-FAC state, or more than one.
    """
    state = find_state(opt_state, "opt_state")
    warn_if_overdue(state)
    scalars = state.metrics._asdict()
    scalars["statistics_age"] = jnp.maximum(
        state.count - 1 - state.last_statistics_step, 0
    )
    for adaptive in find_nodes(opt_state, AdaptiveDampingState):
        scalars["reduction_ratio"] = adaptive.reduction_ratio
        scalars["rejected_steps"] = adaptive.rejected_steps
    for guard in find_nodes(opt_state, optax.ApplyIfFiniteState):
        if find_nodes(guard, KfacState):
            # Updates that the guard rejects do not reach the preconditioner.
            scalars["skipped_steps"] += guard.total_notfinite
    return scalars


def statistics_due(opt_state: Any) -> Array:
    """Return whether to call `observe` before the next step.

    `overhead=` of `kfac.kfac`, or `statistics_period=` of `scale_by_kfac`, sets the interval::

        if kfac.statistics_due(opt_state):
            opt_state = observe(opt_state, params, batch)
        params, opt_state = step(params, opt_state, batch)

    Reading the result on the host waits for the previous step. A loop that must not wait can count steps itself.

    Args:
      opt_state: any tree that holds a state of `kfac.kfac` or `kfac.scale_by_kfac`.

    Returns:
      A scalar boolean array. With several states it is true if statistics are due for any state. For a state of
      `jax.pmap`, the first device's value is returned.

    Raises:
      ValueError: `opt_state` holds no such state.
    """
    flags = []
    for state in find_states(opt_state, "opt_state"):
        # The loop calls `observe`, but may drop its result. Under `jit` and while a step runs, this does nothing.
        warn_if_overdue(state)
        # A copy, because a step may donate the state. More operations would delay the next step.
        due = jnp.array(pure(state.due), bool)
        flags.append(due.ravel()[0] if due.ndim else due)
    return functools.reduce(jnp.logical_or, flags)
