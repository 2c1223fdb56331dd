"""The preconditioner as an optax gradient transformation."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AxisType

from kfac._curvature.blocks import check_factors, group_layers
from kfac._curvature.cholesky import Cholesky
from kfac._curvature.inverse import Inverse
from kfac._distributed.distribution import Distribution, check_distribution
from kfac._distributed.ways import Way, check_alike
from kfac._factors import Factors
from kfac._layers import Layers
from kfac._optimizer.arguments import fitted
from kfac._optimizer.averages import refresh_inverses
from kfac._optimizer.moves import Moves, ScalarOrSchedule, value_at
from kfac._optimizer.options import Options, check_options
from kfac._optimizer.over_mesh import OverMesh, init_over_mesh
from kfac._optimizer.place import Config
from kfac._optimizer.reshard import on_states, some_state, state_spec
from kfac._optimizer.segment import closed
from kfac._optimizer.state import (
    KfacState,
    check_devices,
    check_groups,
    devices_of,
    init_state,
    match_leaves,
    shards_of,
)
from kfac._optimizer.step import Gradients, count_blocks, preconditioned_step
from kfac._varying import axis_names, device_axes, on_mesh, varying_axes


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
    """Preconditions gradients with damped inverses of Kronecker factors.

    The gradient `V` of a layer in matrix form becomes `(G + sqrt(l)/pi I)^-1 V (A + pi sqrt(l) I)^-1` with damping `l`
    and `pi^2 = (tr A / dim A) / (tr G / dim G)` (Martens & Grosse 2015; Osawa et al. 2019). Normalisation parameters
    are multiplied by `(F + u l I)^-1` of their channel's block, with `u = unitwise_damping`. Skipped parameters pass
    through unchanged, and so do all until the first statistics arrive.

    `update(grads, state, params=None, *, factors=None)` takes the statistics of the step as `factors`; without them
    the step uses what it knows. The running average is `F <- d F + (1 - d) F_batch`, bias-corrected, with `d = decay^k`
    where the last statistics are `k` steps old, so that it looks back as many steps at any interval. A refresh of the
    inverses follows the statistics of its step and precedes the preconditioning of its gradient; one that could
    change nothing (no statistics and no other damping since the last) is left out.

    On several devices every Kronecker block has an owner. Statistics arrive local and are averaged to the owners, which
    invert and precondition. Gradients are averaged already (`lax.pmean`); where `jax.shard_map` knows that they differ,
    they are averaged here, at the owners alone. A state of one device, made
    outside of `jax.shard_map`, has no owners: there every device does all, with averaged statistics.

    Blocks with non-finite statistics leave them out of their average; a block whose factorisation fails, with ten times
    the damping as well, keeps its last inverse; a step with a non-finite gradient changes neither. `diagnostics` counts
    these.

    Args:
      layers: what `find_layers` returned.
      damping: positive scalar or schedule of the step; takes effect at the next refresh, with `Eigh` at once.
      factor_decay: decay of the running averages in a step, in [0, 1); 0 uses the last statistics alone. Scalar or
        schedule.
      statistics_every: every so many steps, at first more often, `due` says yes. `update` takes in whatever statistics
        it gets. Where all inverses are refreshed in the same steps, one without statistics has no refresh.
      inverse_every: all inverses are refreshed every so many steps, counted from the first. None: `update` refreshes
        nothing, and its program has no refresh; the training loop calls `refresh`.
      refresh_warmup: in so many first steps both intervals are 1, until twice as many 2, until four times 4, and so on
        up to their values; multiples of `inverse_every` refresh, too. None: 10. Not with `inverse_every=None`.
      inverse: how Kronecker blocks are inverted and applied: `Cholesky()` as above, `Eigh()`, `Ekfac()`, or an
        `Inverse` of one's own.
      unitwise_damping: factor on `damping` for unit-wise and diagonal blocks. Scalar or schedule.
      distribution: how several devices are used. None: all axes that are bound, or the mesh that parameters lie on.

    Returns:
      An `optax.GradientTransformationExtraArgs`. Updates keep the dtype of the gradients.

    Raises:
      ValueError: an argument is out of range; in `update`, the gradients or factors are not those of `layers`, or the
        state is one for another number of devices.
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
    general = Config(layers, group_layers(layers), inverse, Way(), inverse_every is not None, moves)
    constant = isinstance(inverse_every, int) and isinstance(statistics_every, int)
    together = constant and inverse_every == statistics_every > 1  # so there is no refresh without statistics
    reads_params = any(map(moves.needs_params, general.groups))

    def init(params: Any) -> KfacState:
        way, mesh = uses.way(params, dealt=True)
        config = dataclasses.replace(general, way=way)
        check_alike(params)
        return closed(init_state(config, params), way) if mesh is None else init_over_mesh(config, mesh, params)

    @on_mesh
    def update(updates: Any, state: KfacState, params: Any = None, *, factors=None, **extra: Any):
        check_groups(general.groups, state)  # before stacks are laid out for its owners
        if reads_params and params is None:
            raise ValueError("update needs the parameters: call update(grads, state, params, factors=factors)")
        way, mesh = uses.way(updates, is_dealt(uses, state))
        if mesh is not None and not way.owners and AxisType.Explicit not in mesh.axis_types:
            mesh = None  # XLA shares out what one device does
        check_alike(params)
        if not way.owners:  # which would average gradients that differ between devices
            averaged = varying_axes(updates).intersection(axis_names(uses.axis) or device_axes())
            updates = Way(tuple(sorted(averaged))).mean(updates)
        refreshes = general.refreshes and not (together and factors is None)
        config = dataclasses.replace(general, way=way, refreshes=refreshes, local=bool(varying_axes(updates)))
        params = params if reads_params else None
        if factors is not None:
            checked = functools.partial(check_factors, layers=layers, inverse=inverse)
            jax.eval_shape(checked, factors) if isinstance(factors, Factors) else checked(factors)
        count = state.count
        # Also at multiples of the last interval, where loops that count by themselves bring statistics. The count of
        # such a loop runs ahead by each refused step: then it is a turn if the last statistics are an interval old.
        turn = in_turn(count, period, warmup) | in_turn(count, period, 0)
        turn |= together & (count - state.measured >= period)
        now = moves.at(
            count,
            damping=value_at(damping, count),
            unitwise=value_at(damping, count) * value_at(unitwise_damping, count),
            decay=value_at(factor_decay, count),
            turn=refreshes & turn,
        )
        match_leaves(layers, updates, "updates")
        if params is not None:
            match_leaves(layers, params, "params")
        if mesh is None:
            gradients, weights = Gradients(updates, {}), Gradients(params, {})
            (updates, _), state = preconditioned_step(config, gradients, weights, state, now, factors)
        else:
            check_devices(state, math.prod(mesh.shape[name] for name in way.owners))
            types_tell = all(kind == AxisType.Explicit for kind in mesh.axis_types)
            meshed = OverMesh(config, mesh, shards_of(state), {} if types_tell else dict(state.splits.specs))
            updates, state = meshed.step(updates, params, state, now, factors)
        return updates, state._replace(due=in_turn(state.count, statistics_every, warmup))

    return optax.GradientTransformationExtraArgs(init, update)


def in_turn(count: jax.Array, every: int | jax.Array, warmup: int | jax.Array) -> jax.Array:
    """Whether step `count` is a multiple of an interval: 1 in the warm-up, 2 until twice as many steps, 4, and so on.

    At most it is `every`, and without a warm-up always. Factors change on the scale of the steps so far: fast at first,
    then ever more slowly.
    """
    every, warmup = (jnp.asarray(x).astype(jnp.int32) for x in (every, warmup))
    doublings = jnp.minimum(32 - lax.clz(count // jnp.maximum(warmup, 1)), 30)
    return count % jnp.where(warmup > 0, jnp.minimum(every, 1 << doublings), every) == 0


def is_dealt(uses: Distribution, state: KfacState) -> bool:
    """Whether the blocks of a state have owners: on several devices, or where a `Distribution` says so."""
    return uses.axis is not None or devices_of(state) > 1


def refresh(opt_state: Any, *, distribution: Distribution | None = None) -> Any:
    """New inverses of all blocks that have statistics: what a step does, as a call of its own.

    For an optimizer with `inverse_every=None`, whose step is then a smaller program, quicker to compile and without a
    branch for which a host would have to wait for its device::

        tx = kfac.kfac(learning_rate, layers, inverse_every=None)
        refresh = jax.jit(kfac.state.refresh, donate_argnums=0)
        for number, batch in enumerate(batches):
            if number % 100 == 1:  # the first step has brought statistics
                opt_state = refresh(opt_state)
            params, opt_state = step(params, opt_state, batch)

    The running averages are those after the last step, and the damping is that of the last step. The next step finds
    what it would have found if it had refreshed all blocks itself, with that damping and no statistics of its own.
    Until the first refresh gradients pass through unchanged.

    Args:
      opt_state: the state of any chain that holds `scale_by_kfac`. Of several devices as `update` takes it: inside
        `jax.shard_map` and `jax.pmap` the part there.
      distribution: as given to the optimizer, if any was.

    Returns:
      The state.

    Raises:
      ValueError: there is no state of `scale_by_kfac` in `opt_state`, or it is one for another number of devices.
    """
    check_distribution(distribution)
    state, uses = some_state(opt_state, "opt_state"), distribution or Distribution()
    way, mesh = uses.way(opt_state, is_dealt(uses, state))

    def local(state):
        check_devices(state, way.devices)
        state, failed = refresh_inverses(way, state, (state.damping, state.unitwise_damping))
        number = way.total(count_blocks(shards_of(state), way, failed))
        metrics = state.metrics._replace(failed_inversions=state.metrics.failed_inversions + number)
        return state._replace(metrics=metrics, stale=jnp.zeros((), bool))

    if mesh is not None and way.owners:
        spec = state_spec(way.owners)
        local = jax.shard_map(local, mesh=mesh, in_specs=(spec,), out_specs=spec)
    return on_states(local, opt_state)
