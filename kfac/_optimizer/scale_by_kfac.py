"""Provide the preconditioner as an optax gradient transformation."""

from __future__ import annotations

import dataclasses
import math
import warnings

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.sharding import AxisType

from kfac._curvature.blocks import group_layers
from kfac._curvature.cholesky import Cholesky
from kfac._curvature.inverse import Inverse
from kfac._distributed.distribution import Distribution
from kfac._distributed.ways import Way, check_alike
from kfac._layers import Layers
from kfac._optimizer.arguments import hide_masked_biases
from kfac._optimizer.exchange import Gradients, LocalGradients, WholeGradients
from kfac._optimizer.init_state import init_state
from kfac._optimizer.moves import Moves, ScalarOrSchedule, value_at
from kfac._optimizer.options import Options, check_options
from kfac._optimizer.over_mesh import OverMesh, init_over_mesh, mesh_to_open
from kfac._optimizer.place import Config
from kfac._optimizer.state import (
    KfacState,
    Settings,
    check_devices,
    check_groups,
    match_leaves,
    shards_of,
    splits_of,
)
from kfac._optimizer.step import preconditioned_step
from kfac._varying import PyTree, axis_names, device_axes, on_mesh, placed, varying_axes


def scale_by_kfac(
    layers: Layers,
    *,
    damping: ScalarOrSchedule = 1e-3,
    factor_decay: ScalarOrSchedule = 0.95,
    statistics_every: int | Array = 1,
    inverse_every: int | Array | None = 1,
    refresh_warmup: int | Array | None = None,
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
      inverse: how Kronecker blocks are inverted and applied: `Cholesky()` as above, `Eigh()`, `Ekfac()`, `Soap()`, or
        your own `Inverse`.
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
    return hide_masked_biases(
        layers,
        lambda layers: precondition_and_move(layers, Moves(), options),
    )


def precondition_and_move(
    layers: Layers,
    moves: Moves,
    options: Options,
) -> optax.GradientTransformationExtraArgs:
    """Return `scale_by_kfac` followed by the stages in `moves`, such as momentum, which work on stacks of blocks."""
    inverse = options.inverse
    uses = options.distribution or Distribution()
    config = Config(layers, group_layers(layers), inverse, Way(), moves)
    refreshes = options.inverse_every is not None
    settings = Settings(layers, layers, inverse, uses, refreshes)
    reads_params = any(map(moves.needs_params, config.groups))
    tx = Preconditioner(config, options, settings, reads_params)
    return optax.GradientTransformationExtraArgs(tx.init, tx.update)


@dataclasses.dataclass(frozen=True, eq=False)
class Preconditioner:
    """The methods of `precondition_and_move`.

    Attributes:
      config: the fixed settings. Each call replaces the `way`.
      options: the preconditioner's options.
      settings: the settings for the state.
      reads_params: whether the step lengths depend on the parameters.
      told: not empty if the user was warned about old statistics.
    """

    config: Config
    options: Options
    settings: Settings
    reads_params: bool
    told: list[bool] = dataclasses.field(default_factory=list)

    def init(self, params: PyTree) -> KfacState:
        way, mesh = self.settings.distribution.way(params, dealt=True)
        config = dataclasses.replace(self.config, way=way)
        check_alike(params)
        if mesh is None:
            return self.prepared(init_state(config, self.settings, params))
        state = init_over_mesh(config, self.settings, mesh, params)
        return placed(self.prepared(state), mesh)

    @on_mesh
    def update(
        self,
        updates: PyTree,
        state: KfacState,
        params: PyTree | None = None,
        **extra: object,
    ) -> tuple[PyTree, KfacState]:
        # Check before the gradients are stacked by owner.
        check_groups(self.config.groups, state)
        if self.reads_params and params is None:
            raise ValueError(
                "update needs the parameters: call tx.update(grads, opt_state, params)"
            )
        uses = self.settings.distribution
        way, mesh = mesh_to_open(uses, state, updates)
        check_alike(params)
        # With owners, `preconditioned_step` averages gradients that differ between devices.
        if not way.owners:
            axes = axis_names(uses.axis) or device_axes()
            averaged = varying_axes(updates).intersection(axes)
            updates = Way(tuple(sorted(averaged))).mean(updates)
        config = dataclasses.replace(self.config, way=way)
        damping = value_at(self.options.damping, state.count)
        now = config.moves.at(state.count, damping)
        if not self.told and is_overdue(state, self.options.statistics_every):
            self.told.append(True)
            warnings.warn(OVERDUE, stacklevel=2)
        match_leaves(config.layers, updates, "updates")
        if self.reads_params:
            match_leaves(config.layers, params, "params")
        else:
            params = None
        if mesh is not None:
            check_devices(state, math.prod(mesh.shape[name] for name in way.owners))
            types_tell = all(kind == AxisType.Explicit for kind in mesh.axis_types)
            splits = {} if types_tell else splits_of(state)
            meshed = OverMesh(config, mesh, shards_of(state), splits)
            updates, state = meshed.step(updates, params, state, now)
            return updates, self.prepared(state)
        exchange = LocalGradients if varying_axes(updates) else WholeGradients
        gradients = Gradients(updates)
        weights = Gradients(params)
        steps, state = preconditioned_step(
            exchange,
            config,
            gradients,
            weights,
            state,
            now,
        )
        return steps.tree, self.prepared(state)

    def prepared(self, state: KfacState) -> KfacState:
        """Set the state's flags and scalars for the next `observe`."""
        count = state.count
        options = self.options
        warmup = 10 if options.refresh_warmup is None else options.refresh_warmup
        period = 1 if options.inverse_every is None else options.inverse_every
        in_warmup = in_turn(count, period, warmup)
        # A loop may call `observe` at steps of its own choice, so also refresh inverses that are a period old.
        old = count - state.refreshed >= period
        return state._replace(
            due=in_turn(count, options.statistics_every, warmup),
            refresh_due=in_warmup | in_turn(count, period, 0) | old,
            observe_damping=value_at(options.damping, count),
            unitwise_damping=value_at(options.unitwise_damping, count),
            factor_decay=value_at(options.factor_decay, count),
        )


OVERDUE = (
    "update had no new statistics for more than two intervals: when kfac.statistics_due(opt_state), call "
    "opt_state = kfac.observe(opt_state, kfac.statistics(loss_fn, layers)(params, batch)) before it"
)


def is_overdue(state: KfacState, every: int | Array) -> bool:
    """Return whether statistics are due and the last statistics are more than two intervals old.

    False if the values are not known, as under `jit`, if they have an axis of devices, as under `pmap`, or if `every`
    is not an int.
    """
    if not isinstance(every, int):
        return False
    for x in (state.count, state.due, state.measured):
        if isinstance(x, jax.core.Tracer) or x.ndim:
            return False
    return bool(state.due) and int(state.count) - int(state.measured) > 2 * every


def in_turn(
    count: Array,
    every: int | Array,
    warmup: int | Array,
) -> Array:
    """Return whether step `count` is a multiple of the current interval.

    The interval is 1 for the first `warmup` steps, 2 until step `2 * warmup`, 4 until step `4 * warmup`, and so on up
    to `every`. With `warmup=0`, the interval is always `every`. The interval doubles because factors change fast at
    first and then more slowly, on a time scale that grows with the number of steps so far.
    """
    every = jnp.asarray(every, jnp.int32)
    warmup = jnp.asarray(warmup, jnp.int32)
    doublings = jnp.minimum(32 - lax.clz(count // jnp.maximum(warmup, 1)), 30)
    interval = jnp.where(warmup > 0, jnp.minimum(every, 1 << doublings), every)
    return count % interval == 0
