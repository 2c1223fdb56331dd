"""The preconditioner as an optax gradient transformation."""

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
    through unchanged. So do all parameters until the first `kfac.observe`, which takes statistics into the running
    averages and refreshes the inverses.

    On several devices every Kronecker block has an owner. Statistics are averaged to the owners, which invert and
    precondition. Gradients are averaged already (`lax.pmean`); if `jax.shard_map` knows that they differ, they are
    averaged here, at the owners alone. A state of one device, made outside of `jax.shard_map`, has no owners: there
    every device does everything, with averaged statistics.

    A block with non-finite statistics leaves them out of its average. A block whose factorisation fails, even with ten
    times the damping, keeps its last inverse. A step with a non-finite gradient changes nothing. `diagnostics` counts
    all three.

    Args:
      layers: the layers that `find_layers` returned.
      damping: positive scalar or schedule of the step. It takes effect at the next refresh, with `Eigh` at once.
      factor_decay: decay of the running averages in a step, in [0, 1); 0 uses the last statistics alone. Scalar or
        schedule.
      statistics_every: the interval in steps after which `statistics_due` is true; shorter at first. `observe` takes
        all statistics that it gets.
      inverse_every: `observe` refreshes all inverses in every so many steps, counted from the first, and whenever they
        are so many steps old. None: only `observe(opt_state)` without factors refreshes.
      refresh_warmup: the number of first steps in which both intervals are 1. Until twice as many they are 2, until
        four times as many 4, and so on up to their values. Multiples of `inverse_every` refresh, too. None: 10. Not
        with `inverse_every=None`.
      inverse: how Kronecker blocks are inverted and applied: `Cholesky()` as above, `Eigh()`, `Ekfac()`, or your own
        `Inverse`.
      unitwise_damping: factor on `damping` for unit-wise and diagonal blocks. Scalar or schedule.
      distribution: how several devices are used. None: all axes that are bound, or the mesh that parameters lie on.

    Returns:
      An `optax.GradientTransformationExtraArgs`. Updates keep the dtype of the gradients.

    Raises:
      ValueError: an argument is out of range; in `update`, the gradients are not those of `layers`, or the state is
        one for another number of devices.
    """
    options = Options(
        damping, inverse, distribution, factor_decay, statistics_every, inverse_every, refresh_warmup, unitwise_damping
    )
    check_options(options, Moves())
    return fitted(layers, functools.partial(precondition_and_move, moves=Moves(), options=options))


def precondition_and_move(layers: Layers, moves: Moves, options: Options) -> optax.GradientTransformationExtraArgs:
    """`scale_by_kfac` with what follows the preconditioner in stacks of blocks."""
    damping, inverse, distribution, factor_decay, statistics_every, inverse_every, warmup, unitwise_damping = options
    warmup, period = 10 if warmup is None else warmup, 1 if inverse_every is None else inverse_every
    uses = distribution or Distribution()
    settings = Settings(layers, layers, inverse, uses, inverse_every is not None)
    general = Config(layers, group_layers(layers), inverse, Way(), moves)
    reads_params = any(map(moves.needs_params, general.groups))
    told: list[bool] = []  # whether the user was warned

    def prepared(state: KfacState) -> KfacState:
        """Write into the state what the next `observe` goes by."""
        count = state.count
        # Loops that count by themselves observe at other steps, too, so the age of the inverses counts as well.
        turn = in_turn(count, period, warmup) | in_turn(count, period, 0) | (count - state.refreshed >= period)
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
            return placed(prepared(init_over_mesh(config, settings, mesh, params)), mesh)
        return prepared(closed(init_state(config, settings, params), way))

    @on_mesh
    def update(updates: Any, state: KfacState, params: Any = None, **extra: Any):
        check_groups(general.groups, state)  # before stacks are laid out for its owners
        if reads_params and params is None:
            raise ValueError("update needs the parameters: call tx.update(grads, opt_state, params)")
        way, mesh = mesh_to_open(uses, state, updates)
        check_alike(params)
        if not way.owners:  # which would average gradients that differ between devices
            averaged = varying_axes(updates).intersection(axis_names(uses.axis) or device_axes())
            updates = Way(tuple(sorted(averaged))).mean(updates)
        config = dataclasses.replace(general, way=way, local=bool(varying_axes(updates)))
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
            (updates, _), state = preconditioned_step(config, gradients, weights, state, now)
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
    """Tell whether `observe` was due for more than two intervals; False under `jit`, where nothing is known of that."""
    read = state.count, state.due, state.measured
    if not isinstance(every, int) or any(isinstance(x, jax.core.Tracer) or x.ndim for x in read):
        return False
    return bool(state.due) and int(state.count) - int(state.measured) > 2 * every


def in_turn(count: jax.Array, every: int | jax.Array, warmup: int | jax.Array) -> jax.Array:
    """Whether step `count` is a multiple of an interval: 1 in the warm-up, 2 until twice as many steps, 4, and so on.

    At most it is `every`, and without a warm-up always. Factors change on the scale of the steps so far: fast at first,
    then ever more slowly.
    """
    every, warmup = (jnp.asarray(x).astype(jnp.int32) for x in (every, warmup))
    doublings = jnp.minimum(32 - lax.clz(count // jnp.maximum(warmup, 1)), 30)
    return count % jnp.where(warmup > 0, jnp.minimum(every, 1 << doublings), every) == 0
