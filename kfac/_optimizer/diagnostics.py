"""What a run logs of an optimizer state."""

from __future__ import annotations

from typing import Any

import jax
import optax

from kfac._optimizer.adaptive_damping import AdaptiveDampingState
from kfac._optimizer.parts import NormConstraintState
from kfac._optimizer.state import KfacState, find_nodes, find_state


def diagnostics(opt_state: Any) -> dict[str, jax.Array]:
    """Scalars worth logging, from the state of any chain that holds `scale_by_kfac`.

    Args:
      opt_state: an optimizer state; the preconditioner's part is looked for in it.

    Returns:
      `damping` of the last step, `gradient_norm` and `preconditioned_norm` (2-norms over the parameters with a
      curvature block), `condition` (largest condition number of what is inverted, each as of its last inversion: of the
      damped factors in the 1-norm, with `Eigh` and `Ekfac` of the damped blocks in the 2-norm),
      `statistics_change` (of the last statistics, relative to the running averages before them), `inverse_age` (steps
      since the oldest inverse in use was computed), `skipped_statistics` and `failed_inversions` (blocks, since the
      start), `skipped_steps` (updates that were not finite, an `optax.apply_if_finite` around it included), with a norm
      constraint `norm_constraint_scale`, and with `adaptive_damping` the last `reduction_ratio` (NaN before the first).

    Raises:
      ValueError: there is no K-FAC state, or more than one, in `opt_state`.
    """
    state = find_state(opt_state, "opt_state")
    scalars = {"damping": state.damping, **state.metrics._asdict()}
    for constraint in find_nodes(opt_state, NormConstraintState):
        scalars["norm_constraint_scale"] = constraint.scale
    for adaptive in find_nodes(opt_state, AdaptiveDampingState):
        scalars["reduction_ratio"] = adaptive.reduction_ratio
    for guard in find_nodes(opt_state, optax.ApplyIfFiniteState):
        if find_nodes(guard, KfacState):
            # What it rejects does not reach the preconditioner.
            scalars["skipped_steps"] += guard.total_notfinite
    return scalars
