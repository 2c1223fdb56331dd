"""Provide the preconditioner as an optax gradient transformation."""

from __future__ import annotations

import math

import jax.numpy as jnp
import optax
from jax import Array

from kfac._checks import check_layers
from kfac._curvature.cholesky import Cholesky
from kfac._curvature.preconditioner import BlockPreconditioner
from kfac._distributed.comm import check_alike
from kfac._distributed.distribution import Distribution
from kfac._factors import Factors
from kfac._layers import Layers
from kfac._mesh import on_mesh, replicate, varying_axes
from kfac._optimizer.exchange import Gradients, LocalGradients, WholeGradients
from kfac._optimizer.init_state import init_state
from kfac._optimizer.interval import Interval
from kfac._optimizer.options import Options, check_options
from kfac._optimizer.overdue import note_update, warn_if_overdue
from kfac._optimizer.sharded_step import ShardedStep
from kfac._optimizer.state import (
    KfacState,
    Settings,
    check_devices,
    check_groups,
    match_leaves,
)
from kfac._optimizer.step import preconditioned_step
from kfac._optimizer.step_scaling import ScalarOrSchedule, value_at


def scale_by_kfac(
    layers: Layers,
    *,
    damping: ScalarOrSchedule = 1e-3,
    factor_ema_decay: ScalarOrSchedule = 0.95,
    statistics_period: int | Array = 1,
    inverse_update_period: int | float | Array = 1,
    interval_warmup_steps: int | Array = 10,
    preconditioner: BlockPreconditioner = Cholesky(),
    unitwise_damping_scale: ScalarOrSchedule = 1.0,
    distribution: Distribution | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Precondition gradients with damped inverses of Kronecker factors.

    ::

        optimizer = optax.chain(
            kfac.scale_by_kfac(layers, damping=1e-2),
            optax.trace(0.9),
            optax.scale_by_learning_rate(0.01),
        )

    The gradient `V` of a layer in matrix form becomes `(G + sqrt(l)/pi I)^-1 V (A + pi sqrt(l) I)^-1` with damping `l`
    and `pi^2 = (tr A / dim A) / (tr G / dim G)` (Martens & Grosse 2015; Osawa et al. 2019). Normalisation parameters
    are multiplied by `(F + u l I)^-1` of their channel's block, with `u = unitwise_damping_scale`. Skipped parameters
    pass through unchanged. All other parameters pass through unchanged until the first `kfac.observe`, which takes
    statistics into the running averages and refreshes the preconditioners.

    On several devices, every block has an owner. Statistics are averaged to the owners, which refresh the
    preconditioners and precondition the gradients. `update` expects gradients that are averaged already (`lax.pmean`).
    If `jax.shard_map` knows that the gradients differ between devices, `update` averages them; it averages the
    gradients of blocks at the owners only. A state for a single device, made outside `jax.shard_map`, has no
    owners. With such a state, every device refreshes and preconditions all blocks, with averaged statistics.

    A block with non-finite statistics leaves them out of its average. A block whose factorisation fails, even with ten
    times the damping, keeps its last preconditioner. A step with a non-finite gradient is not counted and leaves the
    blocks unchanged, but its updates are not finite either. `kfac.kfac` replaces these updates by zeros. `diagnostics`
    counts all three events.

    Args:
      layers: the layers that `find_layers` returned. Multipliers in its `rules` multiply the preconditioned gradients.
      damping: positive scalar, or schedule of the step. It takes effect at the next refresh. With `Eigh`, `EKFAC` and
        `SOAP`, it takes effect for Kronecker blocks at once.
      factor_ema_decay: decay of the running averages per step, in [0, 1); with 0, only the last statistics count.
        Scalar or schedule.
      statistics_period: the interval in steps at which `statistics_due` is true. The interval is shorter at first, see
        `interval_warmup_steps`. `observe` uses all statistics that it receives, due or not.
      inverse_update_period: the interval in steps at which `observe` refreshes all inverses. It refreshes them if the
        step count is a multiple of the interval, if they are at least this old, and with the first statistics. With
        `math.inf`, only `observe(opt_state)` without factors refreshes.
      interval_warmup_steps: the number of initial steps in which both intervals are 1. The intervals are then 2 until
        twice this number of steps, 4 until four times this number, and so on up to their final values. Steps at
        multiples of `inverse_update_period` refresh as well.
      preconditioner: how Kronecker blocks are preconditioned: `Cholesky()` as above, `Eigh()`, `EKFAC()`,
        `SOAP()`, or your own `BlockPreconditioner`.
      unitwise_damping_scale: factor on `damping` for unit-wise and diagonal blocks. Scalar or schedule.
      distribution: how several devices are used. By default, all bound axes, or the parameters' mesh.

    Returns:
      An `optax.GradientTransformationExtraArgs`. Updates keep the dtype of the gradients.

    Raises:
      ValueError: if an argument is out of range. `update` raises it if the gradients do not match `layers`, or if the
        state was made for another number of devices.
    """
    options = Options(
        damping=damping,
        factor_ema_decay=factor_ema_decay,
        statistics_period=statistics_period,
        inverse_update_period=inverse_update_period,
        interval_warmup_steps=interval_warmup_steps,
        preconditioner=preconditioner,
        unitwise_damping_scale=unitwise_damping_scale,
        distribution=distribution,
    )
    return precondition_and_scale(layers, options)


def precondition_and_scale(
    layers: Layers,
    options: Options,
) -> optax.GradientTransformationExtraArgs:
    """Return `scale_by_kfac` followed by the stages that work on stacks of blocks, such as momentum."""
    check_options(options)
    check_layers(layers)
    period = options.inverse_update_period
    # Leave the refresh out of the program of `observe` if the period is known to be infinite.
    refreshes = not (isinstance(period, float) and period == math.inf)
    interval = Interval(options.statistics_period, options.interval_warmup_steps)
    known = all(isinstance(number, int) for number in interval)
    settings = Settings(
        layers,
        options.preconditioner,
        options.distribution or Distribution(),
        refreshes,
        interval if known else None,
    )
    reads_params = any(map(options.needs_params, settings.groups))

    def init(params):
        comm, mesh = settings.distribution.comm(params)
        check_alike(params)
        state = init_state(settings, options, comm, mesh, params)
        return replicate(prepared(options, state), mesh)

    @on_mesh
    def update(updates, state, params=None, **extra):
        if isinstance(updates, Factors):
            raise ValueError(
                f"updates are statistics, where gradients belong: {HOW_TO_OBSERVE}"
            )
        if "factors" in extra:
            raise TypeError(f"update takes no factors: call {HOW_TO_OBSERVE} before it")
        # Check before the gradients are stacked by owner.
        check_groups(settings.groups, state)
        if reads_params and params is None:
            raise ValueError(
                "update needs the parameters: call tx.update(grads, opt_state, params)"
            )
        devices = state.settings.devices
        comm, mesh = settings.distribution.comm(updates, devices)
        check_alike(params)
        now = options.at(state.count)
        warn_if_overdue(state)
        note_update(state)
        match_leaves(layers, updates, "updates")
        if reads_params:
            match_leaves(layers, params, "params")
        else:
            params = None
        if mesh is not None:
            check_devices(
                state, math.prod(mesh.shape[name] for name in comm.owner_axes)
            )
            meshed = ShardedStep(settings, comm, state, mesh)
            updates, state = meshed.step(options, updates, params, now)
            return updates, prepared(options, state)
        form = LocalGradients if varying_axes(updates) else WholeGradients
        device = form(settings, comm, state, options)
        steps, state = preconditioned_step(
            device, Gradients(updates), Gradients(params), now
        )
        return steps.tree, prepared(options, state)

    return optax.GradientTransformationExtraArgs(init, update)


def prepared(options: Options, state: KfacState) -> KfacState:
    """Set the state's flags and scalars for the next `observe`."""
    count = state.count
    # Rejected steps count for the intervals, otherwise the host could not foresee when statistics are due.
    calls = count + state.metrics.skipped_steps
    period = jnp.asarray(options.inverse_update_period)
    # `optax.inject_hyperparams` makes an array of `math.inf`, which `settings.refreshes` cannot see.
    finite = jnp.isfinite(period)
    period = jnp.where(finite, period, 1)
    warmup = options.interval_warmup_steps
    warmup_due = Interval(period, warmup).due(calls)
    # A loop may call `observe` at steps of its own choice, so also refresh preconditioners that are a period old. The
    # first statistics always refresh: until then gradients stay as they are.
    old = (state.refreshed < 0) | (count - state.refreshed >= period)
    return state._replace(
        due=Interval(options.statistics_period, warmup).due(calls),
        refresh_due=finite & (warmup_due | Interval(period, 0).due(calls) | old),
        observe_damping=value_at(options.damping, count),
        unitwise_damping_scale=value_at(options.unitwise_damping_scale, count),
        factor_ema_decay=value_at(options.factor_ema_decay, count),
    )


HOW_TO_OBSERVE = "opt_state = kfac.observe(opt_state, factors)"
