"""Provide the preconditioner as an optax gradient transformation."""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AxisType

from kfac._curvature.blocks import group_layers
from kfac._curvature.cholesky import Cholesky
from kfac._curvature.inverse import Inverse
from kfac._distributed.distribution import Distribution
from kfac._distributed.ways import Way, check_alike
from kfac._layers import Layers
from kfac._optimizer.arguments import fitted
from kfac._optimizer.moves import Moves, ScalarOrSchedule, value_at
from kfac._optimizer.options import Options, check_options
from kfac._optimizer.over_mesh import OverMesh, init_over_mesh, mesh_to_open
from kfac._optimizer.place import Config
from kfac._optimizer.segment import closed
from kfac._optimizer.state import (
    KfacState,
    Settings,
    check_devices,
    check_groups,
    init_state,
    match_leaves,
    shards_of,
    splits_of,
)
from kfac._optimizer.step import Gradients, preconditioned_step
from kfac._varying import axis_names, device_axes, on_mesh, placed, varying_axes


def scale_by_kfac(
    layers: Layers,
    *,
    damping: ScalarOrSchedule = 1e-3,
    factor_decay: ScalarOrSchedule = 0.95,
    statistics_every: int | jax.Array = 1,
    inverse_every: int | jax.Array | None = 1,
    refresh_warmup: int | jax.Array | None = None,
    inverse: Inverse = Cholesky(),
    unitwise_damping: ScalarOrSchedule = 1.0,
    distribution: Distribution | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Precondition gradients with damped inverses of Kronecker factors.

    The gradient `V` of a layer in matrix form becomes `(G + sqrt(l)/pi I)^-1 V (A + pi sqrt(l) I)^-1` with damping `l`
    and `pi^2 = (tr A / dim A) / (tr G / dim G)` (Martens & Grosse 2015; Osawa et al. 2019). Normalisation parameters
    are multiplied by `(F + u l I)^-1` of their channel's block, with `u = unitwise_damping`. Skipped parameters pass
    through unchanged. All other parameters pass through unchanged until the first `kfac.observe`, which takes
    statistics into the running averages and refreshes the inverses.

    On several devices, every Kronecker block has an owner. Statistics are averaged to the owners, which invert the
    blocks and precondition the gradients. `update` expects gradients that are averaged already (`lax.pmean`). If
    `jax.shard_map` knows that the gradients differ between devices, `update` averages them; it averages the gradients
    of Kronecker blocks at the owners only. A state for a single device, made outside `jax.shard_map`, has no owners.
    With such a state, every device inverts and preconditions all blocks, with averaged statistics.

    A block with non-finite statistics leaves them out of its average. A block whose factorisation fails, even with ten
    times the damping, keeps its last inverse. A step with a non-finite gradient is not counted and leaves the blocks
    unchanged, but its updates are not finite either. `kfac.kfac` replaces these updates by zeros. `diagnostics` counts
    all three events.

    Args:
      layers: the layers that `find_layers` returned.
      damping: positive scalar, or schedule of the step. It takes effect at the next refresh. With `Eigh`, `Ekfac` and
        `Soap`, it takes effect for Kronecker blocks at once.
      factor_decay: decay of the running averages per step, in [0, 1); with 0, only the last statistics count. Scalar or
        schedule.
      statistics_every: the interval in steps at which `statistics_due` is true. The interval is shorter at first, see
        `refresh_warmup`. `observe` uses all statistics that it receives, due or not.
      inverse_every: the interval in steps at which `observe` refreshes all inverses. It refreshes them if the step
        count is a multiple of the interval, or if they are at least this old. With None, only `observe(opt_state)`
        without factors refreshes.
      refresh_warmup: the number of initial steps in which both intervals are 1. The intervals are then 2 until twice
        this number of steps, 4 until four times this number, and so on up to their final values. Steps at multiples of
        `inverse_every` refresh as well. The default None means 10, and `inverse_every=None` requires it.
      inverse: how Kronecker blocks are inverted and applied: `Cholesky()` as above, `Eigh()`, `Ekfac()`, or your own
        `Inverse`.
      unitwise_damping: factor on `damping` for unit-wise and diagonal blocks. Scalar or schedule.
      distribution: how several devices are used. By default, all bound axes, or the parameters' mesh.

    Returns:
      An `optax.GradientTransformationExtraArgs`. Updates keep the dtype of the gradients.

    Raises:
      ValueError: if an argument is out of range. `update` raises it if the gradients do not match `layers`, or if the
        state was made for another number of devices.
    """
    options = Options(
        damping,
        inverse,
        distribution,
        factor_decay,
        statistics_every,
        inverse_every,
        refresh_warmup,
        unitwise_damping,
    )
    check_options(options, Moves())
    return fitted(
        layers, functools.partial(precondition_and_move, moves=Moves(), options=options)
    )


def precondition_and_move(
    layers: Layers, moves: Moves, options: Options
) -> optax.GradientTransformationExtraArgs:
    """Return `scale_by_kfac` followed by the stages in `moves`, such as momentum, which work on stacks of blocks."""
    (
        damping,
        inverse,
        distribution,
        factor_decay,
        statistics_every,
        inverse_every,
        warmup,
        unitwise_damping,
    ) = options
    warmup, period = (
        10 if warmup is None else warmup,
        1 if inverse_every is None else inverse_every,
    )
    uses = distribution or Distribution()
    settings = Settings(layers, layers, inverse, uses, inverse_every is not None)
    general = Config(layers, group_layers(layers), inverse, Way(), moves)
    reads_params = any(map(moves.needs_params, general.groups))
    told: list[bool] = []  # whether the user was warned

    def prepared(state: KfacState) -> KfacState:
        """Set the state's flags and scalars for the next `observe`."""
        count = state.count
        # A loop may call `observe` at steps of its own choice, so also refresh inverses that are a period old.
        turn = (
            in_turn(count, period, warmup)
            | in_turn(count, period, 0)
            | (count - state.refreshed >= period)
        )
        return state._replace(
            due=in_turn(count, statistics_every, warmup),
            refresh_due=turn,
            observe_damping=value_at(damping, count).astype(jnp.float32),
            unitwise_damping=value_at(unitwise_damping, count).astype(jnp.float32),
            factor_decay=value_at(factor_decay, count),
        )

    def init(params: Any) -> KfacState:
        way, mesh = uses.way(params, dealt=True)
        config = dataclasses.replace(general, way=way)
        check_alike(params)
        if mesh is not None:
            return placed(
                prepared(init_over_mesh(config, settings, mesh, params)), mesh
            )
        return prepared(closed(init_state(config, settings, params), way))

    @on_mesh
    def update(updates: Any, state: KfacState, params: Any = None, **extra: Any):
        check_groups(
            general.groups, state
        )  # check before the gradients are stacked by owner
        if reads_params and params is None:
            raise ValueError(
                "update needs the parameters: call tx.update(grads, opt_state, params)"
            )
        way, mesh = mesh_to_open(uses, state, updates)
        check_alike(params)
        if not way.owners:  # with owners, `preconditioned_step` averages gradients that differ between devices
            averaged = varying_axes(updates).intersection(
                axis_names(uses.axis) or device_axes()
            )
            updates = Way(tuple(sorted(averaged))).mean(updates)
        config = dataclasses.replace(
            general, way=way, local=bool(varying_axes(updates))
        )
        params = params if reads_params else None
        now = moves.at(state.count, value_at(damping, state.count))
        if not told and is_overdue(state, statistics_every):
            told.append(True)
            warnings.warn(OVERDUE, stacklevel=2)
        match_leaves(layers, updates, "updates")
        if params is not None:
            match_leaves(layers, params, "params")
        if mesh is None:
            gradients, weights = Gradients(updates, {}), Gradients(params, {})
            (updates, _), state = preconditioned_step(
                config, gradients, weights, state, now
            )
        else:
            check_devices(state, math.prod(mesh.shape[name] for name in way.owners))
            types_tell = all(kind == AxisType.Explicit for kind in mesh.axis_types)
            splits = {} if types_tell else splits_of(state)
            meshed = OverMesh(config, mesh, shards_of(state), splits)
            updates, state = meshed.step(updates, params, state, now)
        return updates, prepared(state)

    return optax.GradientTransformationExtraArgs(init, update)


OVERDUE = (
    "update had no new statistics for more than two intervals: when kfac.statistics_due(opt_state), call "
    "opt_state = kfac.observe(opt_state, kfac.statistics(loss_fn, layers)(params, batch)) before it"
)


def is_overdue(state: KfacState, every: int | jax.Array) -> bool:
    """Return whether statistics are due and the last statistics are more than two intervals old.

    False if the values are not known, as under `jit`, if they have an axis of devices, as under `pmap`, or if `every`
    is not an int.
    """
    read = state.count, state.due, state.measured
    if not isinstance(every, int) or any(
        isinstance(x, jax.core.Tracer) or x.ndim for x in read
    ):
        return False
    return bool(state.due) and int(state.count) - int(state.measured) > 2 * every


def in_turn(
    count: jax.Array, every: int | jax.Array, warmup: int | jax.Array
) -> jax.Array:
    """Return whether step `count` is a multiple of the current interval.

    The interval is 1 for the first `warmup` steps, 2 until step `2 * warmup`, 4 until step `4 * warmup`, and so on up
    to `every`. With `warmup=0`, the interval is always `every`. The interval doubles because factors change fast at
    first and then more slowly, on a time scale that grows with the number of steps so far.
    """
    every, warmup = (jnp.asarray(x).astype(jnp.int32) for x in (every, warmup))
    doublings = jnp.minimum(32 - lax.clz(count // jnp.maximum(warmup, 1)), 30)
    return count % jnp.where(warmup > 0, jnp.minimum(every, 1 << doublings), every) == 0
