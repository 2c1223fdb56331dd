"""The step over a mesh, from outside of the `shard_map` in which it is made.

Where gradients are split over the mesh, as by FSDP or tensor parallelism, the stacks of groups are laid out over their
owners here. XLA takes them there from wherever their leaves lie, by an all-to-all if these are split over the same
devices, and the results back. Kernels go without their biases: XLA would move them once more to join the two.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from kfac._curvature.blocks import Group, check_factors
from kfac._curvature.inverse import finite
from kfac._distributed.owners import Shard
from kfac._factors import Factors, Shares
from kfac._layers import leaves_by_path, map_by_path
from kfac._optimizer.reshard import state_spec
from kfac._optimizer.state import Config, KfacState
from kfac._optimizer.step import Gradients, Now, preconditioned_step
from kfac._varying import as_varying, axis_names, lying_as, replicated, varying_axes, whole


def step_over_mesh(
    config: Config,
    mesh: Mesh,
    updates: Any,
    params: Any,
    state: KfacState,
    now: Now,
    factors: Factors | Shares | None,
) -> tuple[Any, KfacState]:
    """`preconditioned_step` on the devices of a mesh; on explicit axes the results lie as `updates` do."""
    assert config.owners is not None
    rows = {name: own.shard for name, own in state.owned.items()}
    split, same, states = config.distribution.gradients == "split", PartitionSpec(), state_spec(config.owners)
    narrow, leaves = {}, _apart(config, updates)
    if split:
        check_context(mesh, config)
        narrow = {group.name: [_narrowest(_dtypes(part, leaves)) for part in group.by_leaf] for group in config.apart}

    def given(tree):
        return to_owners(config, mesh, tree, rows) if split else Gradients(replicated(tree), {})

    def on_device(updates, params, state, now, factors):
        local = isinstance(factors, Shares)
        if local:
            own = jax.tree.map(lambda x: x[0], factors.factors)
            factors = as_varying(own, varying_axes(lax.axis_index(config.axis)))
        return preconditioned_step(config, updates, params, state, now, factors, local=local, narrow=narrow)

    own: Any = Gradients(same, PartitionSpec(config.owners))  # type: ignore[arg-type]  # the specs of such
    shares = PartitionSpec(factors.axes) if isinstance(factors, Shares) else same
    step = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(own, same if params is None else own, states, same, shares),
        out_specs=(own, states),
    )
    new, state = step(given(updates), None if params is None else given(params), state, now, factors)
    if not split:
        return lying_as(new.tree, updates), state
    return from_owners(config, mesh, new, updates, rows), state


def check_over_mesh(config: Config, mesh: Mesh, factors: Any) -> None:
    """Raises where statistics are not such as `update` over a mesh takes."""
    if not isinstance(factors, Shares):
        if (wire := config.distribution.communication_dtype) != "float32":
            raise ValueError(
                f"communication_dtype={wire!r} has no effect on statistics that XLA averages: take them by "
                "kfac.data_parallel(kfac.value_and_grad(loss_fn, layers), mesh), in a step of your own, or leave it "
                "at 'float32'"
            )
        return check_factors(factors, config.layers, config.inverse)
    axes, number = axis_names(config.axis), {len(x) for x in jax.tree.leaves(factors)}
    if not set(factors.axes) <= set(axes) or number - {math.prod(mesh.shape[name] for name in factors.axes)}:
        raise ValueError(
            f"factors are the shares of {sorted(number)} devices of the axes {factors.axes}, but the optimizer's axes "
            f"are {axes} of {dict(mesh.shape)}: give kfac.data_parallel the mesh, and axes, of the Distribution"
        )
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), factors.factors)
    return jax.eval_shape(lambda own: check_factors(own, config.layers, config.inverse), one)


def check_context(mesh: Mesh, config: Config) -> None:
    """Raises where XLA could not be told how split gradients are to lie."""
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    kinds, here = {types[name] for name in axis_names(config.owners)}, jax.sharding.get_abstract_mesh()
    if len(kinds) > 1:
        raise ValueError(
            f"gradients='split' needs the axes of owners, {axis_names(config.owners)}, to be all automatic or all "
            "explicit: make the mesh with one axis_types, or name the axes of one kind in owners="
        )
    if here.axis_names != mesh.axis_names if not here.empty else AxisType.Explicit in kinds:
        raise ValueError(
            f"gradients='split' over the axes {mesh.axis_names}, but the mesh around has {here.axis_names or 'none'}: "
            "call update, or the step that is compiled, within jax.set_mesh(mesh) of the Distribution's mesh"
        )


def to_owners(config: Config, mesh: Mesh, updates: Any, rows: dict[str, Shard]) -> Gradients:
    """Gradients as each owner gets its own, and all devices what all precondition; `rows` of all positions."""
    apart = _apart(config, updates)

    def rest(path, leaf):
        if path in config.skipped:
            return jnp.where(finite(leaf, 0), 0.0, jnp.nan)
        return optax.MaskedNode() if path in apart else leaf

    def stacked(apart):
        stacks = {}
        for group in config.apart:
            dtype, order = jnp.result_type(*_dtypes(group, apart)), rows[group.name].order
            parts = (part.stack_matrices(apart, dtype)[order] for part in group.by_leaf)
            stacks[group.name] = [_lying(mesh, x, config.owners) for x in parts]
        return stacks

    return Gradients(replicated(map_by_path(rest, updates)), whole(stacked, PartitionSpec(config.owners))(apart))


def from_owners(config: Config, mesh: Mesh, new: Gradients, updates: Any, rows: dict[str, Shard]) -> Any:
    """What has become of `updates`, on explicit axes lying as they do; skipped leaves are as they were."""
    apart = _apart(config, updates)

    def split(stacks):
        leaves: dict[str, jax.Array] = {}
        for group in config.apart:
            free, places = PartitionSpec.UNCONSTRAINED, rows[group.name].places
            for part, stack in zip(group.by_leaf, stacks[group.name], strict=True):
                # Laid out as the leaves lie, which XLA knows, before it is cut.
                leaves |= part.split_matrices(_lying(mesh, stack, None, free, free)[places])
        return {path: leaves[path].astype(leaf.dtype) for path, leaf in apart.items()}

    own, rest = whole(split, apart)(new.stacks), leaves_by_path(new.tree)

    def back(path, leaf):
        if path in config.skipped:
            return leaf
        return own[path] if path in own else lying_as(rest[path], leaf)

    return map_by_path(back, updates)


def _apart(config: Config, updates: Any) -> dict[str, jax.Array]:
    """The leaves that owners alone precondition, by path."""
    return {path: leaf for path, leaf in leaves_by_path(updates).items() if path in config.paths_apart}


def _dtypes(group: Group, leaves: dict[str, jax.Array]) -> list[Any]:
    """The dtypes of the leaves of a group; one for a group that `optax.masked` has left nothing of."""
    return [leaves[p].dtype for layer in group.layers for p in layer.params if p in leaves] or [jnp.dtype(jnp.float32)]


def _narrowest(dtypes: list[Any]) -> Any:
    return min(dtypes, key=lambda dtype: float(jnp.finfo(dtype).max))


def _lying(mesh: Mesh, stack: jax.Array, *spec: Any) -> jax.Array:
    here = jax.sharding.get_abstract_mesh()  # with explicit axes, the same mesh as if they were not
    return lax.with_sharding_constraint(stack, NamedSharding(mesh if here.empty else here, PartitionSpec(*spec)))
