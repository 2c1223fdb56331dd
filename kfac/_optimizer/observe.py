"""`observe`: take a batch's statistics into an optimizer state, and refresh its preconditioners."""

from __future__ import annotations

from typing import Any

import jax

from kfac._curvature.blocks import check_factors
from kfac._factors import Factors
from kfac._mesh import on_mesh
from kfac._optimizer.averages import observe_here
from kfac._optimizer.overdue import note_observe
from kfac._optimizer.sharded_step import ShardedStep
from kfac._optimizer.state import KfacState, find_states, is_variable, on_states, pure


@on_mesh
def observe(opt_state: Any, factors: Factors | None = None) -> Any:
    """Update the running averages in an optimizer state with a batch's statistics, and refresh its preconditioners.

    Call it before the step whenever `statistics_due` is true::

        @jax.jit
        def observe(opt_state, params, batch):
            return kfac.observe(opt_state, kfac.statistics(loss_fn, layers)(params, batch))

    The running averages become `F <- d F + (1 - d) F_batch`, bias-corrected, with `d = factor_ema_decay^k` if the last
    statistics are `k` steps old. Then the preconditioners are refreshed, if they are due by the optimizer's
    `inverse_update_period=`. A block ignores non-finite statistics and keeps its average. If its inversion fails, a
    block keeps its last preconditioner. `diagnostics` counts both failures.

    On several devices, call it where the optimizer's `update` is called. Inside `jax.shard_map` or `jax.pmap`, pass the
    device's own factors. Under `jit` over a mesh, pass the factors of the whole batch.

    Args:
      opt_state: any tree that holds a state of `kfac.kfac` or `kfac.scale_by_kfac`, such as the state of a chain, of a
        wrapper like `optax.MultiSteps`, or a flax `TrainState`. If it holds several states, each takes the factors of
        its own layers. A flax `nnx.Optimizer` is changed in place.
      factors: the statistics, from `kfac.statistics` or `kfac.value_and_grad`. None refreshes all preconditioners from
        the present running averages, whatever `inverse_update_period=` is.

    Returns:
      `opt_state` with the new state in place of the old state. Everything else, such as accumulated gradients,
      parameters and step counts, is unchanged.

    Raises:
      ValueError: `opt_state` holds no such state, `factors` do not fit the layers, the preconditioner or the
        optimizer's `communication_dtype`, or the state has been initialised for another number of devices.
    """
    states = find_states(opt_state, "opt_state")
    several = len(states) > 1 and isinstance(factors, Factors)
    unknown = set(factors or ()) if several else set()
    for state in states:
        unknown -= {layer.name for layer in state.settings.layers.with_factors}
    if unknown:
        raise ValueError(
            f"factors hold a layer {min(unknown)!r}, which none of the {len(states)} states has"
        )

    def observed(state: KfacState) -> KfacState:
        own = _own(state, factors) if several and factors is not None else factors
        new = _observe(pure(state), own)
        places = jax.tree.leaves(state, is_leaf=is_variable)
        if not any(map(is_variable, places)):
            return new
        for place, value in zip(places, jax.tree.leaves(new), strict=True):
            place.set_value(value)
        return state

    return on_states(observed, opt_state)


def _own(state: KfacState, factors: Factors) -> Factors:
    """Return the factors of one state's layers."""
    layers = state.settings.layers
    blocks = {x.name: factors[x.name] for x in layers.with_factors if x.name in factors}
    paths = {path for layer in layers.with_gradient_factors for path in layer.params}
    gradients = {path: x for path, x in factors.gradients.items() if path in paths}
    return Factors(blocks, gradients)


def _observe(state: KfacState, factors: Factors | None) -> KfacState:
    """Observe with a single state and the factors of its layers."""
    note_observe()
    settings = state.settings
    layers = settings.layers
    preconditioner = settings.preconditioner
    if factors is not None:
        given: object = factors
        if not isinstance(given, Factors):
            check_factors(given, layers)
        jax.eval_shape(lambda x: check_factors(x, layers, preconditioner), factors)
        expected = settings.distribution.communication_dtype
        for name, block in factors.items():
            if block.wire not in (None, expected):
                raise ValueError(
                    f"devices send the factors of layer {name!r} in {block.wire}, but the optimizer has a distribution "
                    f"with communication_dtype={expected!r}: pass the same distribution= to kfac.statistics or "
                    "kfac.value_and_grad"
                )
    comm, mesh = settings.distribution.comm((state, factors), settings.devices)
    if mesh is None:
        return observe_here(comm, state, factors)
    return ShardedStep(settings, comm, state, mesh).observe(factors)
