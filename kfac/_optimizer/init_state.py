"""Make the state before the first step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from kfac._curvature.blocks import Group
from kfac._distributed.owners import group_costs, make_shards
from kfac._optimizer.moves import MomentumState
from kfac._optimizer.place import Config
from kfac._optimizer.segment import closed
from kfac._optimizer.state import (
    BlockState,
    InverseState,
    KfacMetrics,
    KfacState,
    Owned,
    Segment,
    Settings,
    Splits,
    form_of,
    match_leaves,
)
from kfac._varying import PyTree, as_varying, axis_size, varying_axes

# The metrics that are integers.
COUNTS = ("inverse_age", "skipped_statistics", "failed_inversions", "skipped_steps")


def init_state(
    config: Config,
    settings: Settings,
    params: PyTree,
) -> KfacState:
    """Return the state before the first step."""
    leaves: dict[str, Array] = {}
    # `optax.tree.map_params` calls `init` with a placeholder that has no leaves.
    if jax.tree.leaves(params):
        leaves = match_leaves(config.layers, params, "params")
    # Averages and momenta are float64 if a parameter is float64, and float32 otherwise.
    dtype = jnp.result_type(jnp.float32, *(leaf.dtype for leaf in leaves.values()))
    owners = config.way.owners
    devices = axis_size(owners) or 1
    shards = make_shards(group_costs(config.groups), devices)
    owned = {}
    shared = {}
    bases = {}
    members = {}
    for group in config.groups:
        name = group.name
        size = group.size
        members[name] = {group.members: jnp.full((), size, jnp.int32)}
        if not group.owned:
            shared[name] = init_blocks(config, group, size, dtype)
            continue
        shard = shards[name]
        blocks = init_blocks(config, group, shard.positions, dtype)
        owned[name] = Owned(blocks, shard, None if shard.full else form_of(blocks))
        if devices > 1 and group.moments(config.inverse):
            everywhere = init_inverse(config, group, size, dtype)
            bases[name] = config.inverse.basis(everywhere)
    if axis_size(owners) is not None:
        # Mark the blocks as varying over devices if `shard_map` checks this. `lax.axis_index` varies only if it does.
        owned = as_varying(owned, varying_axes(lax.axis_index(owners)))

    def scalar(value, dtype=jnp.float32):
        return jnp.full((), value, dtype)

    metrics = {name: scalar(0) for name in KfacMetrics._fields}
    for name in COUNTS:
        metrics[name] = scalar(0, jnp.int32)
    state = KfacState(
        count=scalar(0, jnp.int32),
        refused=scalar(False, bool),
        measured=scalar(-1, jnp.int32),
        refreshed=scalar(-1, jnp.int32),
        due=scalar(True, bool),
        refresh_due=scalar(True, bool),
        observe_damping=scalar(0),
        unitwise_damping=scalar(0),
        factor_decay=scalar(0),
        owned=owned,
        segment=Segment(),
        shared=shared,
        bases=bases,
        learning_rates=jnp.zeros(2, jnp.float32),
        members=members,
        metrics=KfacMetrics(**metrics),
        splits=Splits(),
        settings=settings,
    )
    return closed(state, config.way)


def init_blocks(
    config: Config,
    group: Group,
    size: int,
    dtype: jnp.dtype,
) -> BlockState:
    """Return the state of `size` blocks of a group before the first step."""
    momentum = rate = None
    if config.has_momentum(group):
        momentum = jnp.zeros((size, group.d_in, group.d_out), dtype)
    if config.moves.adaptive_layer_rates:
        rate = jnp.ones(size, dtype)
    return BlockState(
        factors=group.zeros(size, dtype),
        weight=jnp.zeros(size, dtype),
        inverse=init_inverse(config, group, size, dtype),
        condition=jnp.zeros(size, dtype),
        inverted=jnp.zeros(size, jnp.int32),
        motion=MomentumState(momentum, rate),
    )


def init_inverse(
    config: Config,
    group: Group,
    size: int,
    dtype: jnp.dtype,
) -> InverseState:
    """Return the state of the inverse for `size` blocks of a group before the first refresh."""
    inverse = group.inverse_of(config.inverse)
    state = inverse.init(group.zeros(size, dtype, group.moments(config.inverse)))
    for leaf in jax.tree.leaves(state):
        # Messages between devices would round integers.
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(
                f"inverse={inverse!r} keeps an array of {leaf.dtype}: keep floating arrays only"
            )
    return state
