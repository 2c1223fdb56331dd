"""Make the state before the first step."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh

from kfac._curvature.blocks import Group
from kfac._distributed.comm import CommContext
from kfac._leaves import find_param_specs
from kfac._mesh import PyTree, as_varying, axis_size, varying_axes
from kfac._optimizer.flat_state import closed
from kfac._optimizer.options import Options
from kfac._optimizer.state import (
    BlockState,
    KfacMetrics,
    KfacState,
    Settings,
    match_leaves,
    state_spec,
)
from kfac._optimizer.step_scaling import MomentumState

# The metrics that are integers.
COUNTS = ("inverse_age", "skipped_statistics", "failed_inversions", "skipped_steps")


def init_state(
    settings: Settings,
    options: Options,
    comm: CommContext,
    mesh: Mesh | AbstractMesh | None,
    params: PyTree,
) -> KfacState:
    """Return the state before the first step. If there is a `mesh`, open a `shard_map` over it."""
    if mesh is None:
        return init_here(settings, options, comm, params)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    param_specs = find_param_specs(params) or settings.layers.param_specs
    settings = dataclasses.replace(settings, param_specs=param_specs)
    init = jax.shard_map(
        lambda: init_here(settings, options, comm, shapes),
        mesh=mesh,
        in_specs=(),
        out_specs=state_spec(comm.owner_axes),
    )
    state: KfacState = jax.jit(init)()
    leaves = jax.tree.leaves(params)
    if not isinstance(mesh, AbstractMesh) or not leaves:
        return state
    # Under `jit` a state that depends on no argument would not be on the mesh.
    smallest = min(leaves, key=lambda leaf: leaf.size)
    return state._replace(count=state.count + 0 * jnp.any(jnp.isnan(smallest)))


def init_here(
    settings: Settings,
    options: Options,
    comm: CommContext,
    params: PyTree,
) -> KfacState:
    """Return the state before the first step, with the blocks that this device holds."""
    leaves = {}
    # `optax.tree.map_params` calls `init` with a placeholder that has no leaves.
    if jax.tree.leaves(params):
        leaves = match_leaves(settings.layers, params, "params")
    # Averages and momenta are float64 if a parameter is float64, and float32 otherwise.
    dtype = jnp.result_type(jnp.float32, *(leaf.dtype for leaf in leaves.values()))
    owner_axes = comm.owner_axes
    settings = dataclasses.replace(settings, devices=axis_size(owner_axes) or 1)
    blocks = {}
    members = {}
    for group in settings.groups:
        name = group.name
        members[name] = {group.members: jnp.full((), group.size, jnp.int32)}
        slots = settings.assignments[name].slots
        blocks[name] = init_blocks(settings, options, group, slots, dtype)
    if axis_size(owner_axes) is not None:
        # Mark the blocks as varying over devices if `shard_map` checks this. `lax.axis_index` varies only if it does.
        blocks = as_varying(blocks, varying_axes(lax.axis_index(owner_axes)))

    def scalar(value, dtype=jnp.float32):
        return jnp.full((), value, dtype)

    metrics = {name: scalar(0) for name in KfacMetrics._fields}
    for name in COUNTS:
        metrics[name] = scalar(0, jnp.int32)
    state = KfacState(
        count=scalar(0, jnp.int32),
        step_rejected=scalar(False, bool),
        last_statistics_step=scalar(-1, jnp.int32),
        refreshed=scalar(-1, jnp.int32),
        due=scalar(True, bool),
        refresh_due=scalar(True, bool),
        observe_damping=scalar(0),
        unitwise_damping_scale=scalar(0),
        factor_ema_decay=scalar(0),
        blocks=blocks,
        flat_state={},
        learning_rates=jnp.zeros(2, jnp.float32),
        members=members,
        metrics=KfacMetrics(**metrics),
        settings=settings,
    )
    return closed(state, comm)


def init_blocks(
    settings: Settings,
    options: Options,
    group: Group,
    size: int,
    dtype: jnp.dtype,
) -> BlockState:
    """Return the state of `size` blocks of a group before the first step."""
    momentum = rate = None
    if options.has_momentum(group):
        momentum = jnp.zeros((size, group.d_in, group.d_out), dtype)
    if options.adaptive_layer_rates:
        rate = jnp.ones(size, dtype)
    preconditioner = group.preconditioner_of(settings.preconditioner)
    state = preconditioner.init(
        group.zeros(size, dtype, group.moments(settings.preconditioner))
    )
    for leaf in jax.tree.leaves(state):
        # Messages between devices would round integers.
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(
                f"preconditioner={preconditioner!r} keeps an array of {leaf.dtype}: keep floating arrays only"
            )
    return BlockState(
        factors=group.zeros(size, dtype),
        weight=jnp.zeros(size, dtype),
        preconditioner=state,
        condition=jnp.zeros(size, dtype),
        inverted=jnp.zeros(size, jnp.int32),
        momentum_state=MomentumState(momentum, rate),
    )
