"""The step over a mesh, from outside of the `shard_map` in which it is made.

Where gradients are split over the mesh, as by FSDP or tensor parallelism, the stacks of groups are laid out over their
owners here. XLA takes them there from wherever their leaves lie, by an all-to-all if these are split over the same
devices, and the results back. Kernels go without their biases: XLA would move them once more to join the two.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from kfac._curvature.blocks import Group
from kfac._curvature.inverse import finite
from kfac._distributed.distribution import Distribution
from kfac._distributed.owners import Shard
from kfac._factors import Factors, Statistics
from kfac._layers import Layer, leaves_by_path, map_by_path
from kfac._optimizer.reshard import state_spec
from kfac._optimizer.state import Config, KfacState, Splits, init_state
from kfac._optimizer.step import Gradients, Now, preconditioned_step, stack_packed, unpacked
from kfac._varying import axis_names, lying_as, replicated, whole


def step_over_mesh(
    config: Config,
    mesh: Mesh | AbstractMesh,
    updates: Any,
    params: Any,
    state: KfacState,
    now: Now,
    factors: Factors | None,
) -> tuple[Any, KfacState]:
    """Runs `preconditioned_step` on the devices of a mesh. On explicit axes the results are laid out as `updates`."""
    rows = {name: own.shard for name, own in state.owned.items()}
    same, states, leaves = PartitionSpec(), state_spec(config.owners or ()), _apart(config, updates)
    split = config.dealt and _is_split(config, mesh, state.splits, leaves)
    narrow = {}
    if split:
        narrow = {group.name: [_narrowest(_dtypes(part, leaves)) for part in group.by_leaf] for group in config.apart}

    def laid_out(tree):
        return to_owners(config, mesh, tree, rows, state.splits) if split else Gradients(replicated(tree), {})

    here = config if config.dealt else dataclasses.replace(config, distribution=Distribution())

    def on_device(updates, params, state, now, stacks):
        batch = None if stacks is None else unpacked(stacks)
        return preconditioned_step(here, updates, params, state, now, batch, narrow=narrow)

    own: Any = Gradients(same, PartitionSpec(config.owners or ()))  # type: ignore[arg-type]  # the specs of such
    apart = {g.name: PartitionSpec(config.owners or ()) if g.owned else same for g in config.groups if g.captured}
    stacks = None if factors is None else statistics_to_owners(config, mesh, apart, factors, rows)
    step = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(own, same if params is None else own, states, same, None if factors is None else apart),
        out_specs=(own, states),
    )
    new, state = step(laid_out(updates), None if params is None else laid_out(params), state, now, stacks)
    if not split:
        return lying_as(new.tree, updates), state
    return from_owners(config, mesh, new, updates, rows, state.splits), state


def init_over_mesh(config: Config, mesh: Mesh | AbstractMesh, params: Any) -> KfacState:
    """The state before the first step, lying on a mesh."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    specs = state_spec(config.owners or ())
    init = jax.shard_map(lambda: init_state(config, shapes), mesh=mesh, in_specs=(), out_specs=specs)
    state: KfacState = jax.jit(init)()
    state = state._replace(splits=find_splits(params))
    if not isinstance(mesh, AbstractMesh) or not jax.tree.leaves(params):
        return state
    # Under `jit` a state that depends on no argument would be one of no mesh.
    smallest = min(jax.tree.leaves(params), key=lambda leaf: leaf.size)
    return state._replace(count=state.count + 0 * jnp.any(jnp.isnan(smallest)))


def find_splits(params: Any) -> Splits:
    """Returns how parameters are split over a mesh; under `jit` nothing is known of that."""
    shardings = {
        path: leaf.sharding
        for path, leaf in leaves_by_path(params).items()
        if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) and not isinstance(leaf, jax.core.Tracer)
    }
    named = {path: s.spec for path, s in shardings.items() if isinstance(s, NamedSharding)}
    return Splits(tuple(sorted(named.items())) if any(map(any, named.values())) else ())


def statistics_to_owners(
    config: Config, mesh: Mesh | AbstractMesh, specs: dict[str, PartitionSpec], factors: Factors, rows: dict[str, Shard]
) -> dict[str, Statistics]:
    """Lays out packed statistics: blocks with owners at the positions that `rows` says, the others on all devices."""

    def stacked(factors):
        def of_owners(name, stack):
            if name not in rows:
                return stack
            return jax.tree.map(lambda x: _lying(mesh, x[rows[name].order], config.owners), stack)

        return {name: of_owners(name, stack) for name, stack in stack_packed(config, factors).items()}

    return whole(stacked, specs)(factors)


def _explicit(mesh: Mesh | AbstractMesh) -> bool:
    return all(kind == AxisType.Explicit for kind in mesh.axis_types)


def _is_split(config: Config, mesh: Mesh | AbstractMesh, splits: Splits, leaves: dict[str, jax.Array]) -> bool:
    """Tells whether gradients go to owners alone: they are split, and the axes of the owners are of one kind."""
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if len({kinds[name] for name in axis_names(config.owners)}) > 1:
        return False
    specs = (dict(splits.specs).get(path, jax.typeof(x).sharding.spec) for path, x in leaves.items())
    return any(map(any, specs))


def to_owners(
    config: Config, mesh: Mesh | AbstractMesh, updates: Any, rows: dict[str, Shard], splits: Splits
) -> Gradients:
    """Lays out gradients: blocks with owners at the positions that `rows` says, the others on all devices."""
    specs = {} if _explicit(mesh) else dict(splits.specs)
    # First as the parameters lie: XLA would add up each use of a leaf, and all turns of a scan, on every device.
    updates = map_by_path(lambda path, x: _lying(mesh, x, *specs[path]) if path in specs else x, updates)
    apart = _apart(config, updates)

    def rest(path, leaf):
        if path in config.skipped:
            return jnp.where(finite(leaf, 0), 0.0, jnp.nan)
        return optax.MaskedNode() if path in apart else leaf

    def lying(layer, matrix):
        return _lying(mesh, matrix, None, *_across(config, mesh, layer))

    def stacked(apart):
        stacks = {}
        for group in config.apart:
            dtype, order = jnp.result_type(*_dtypes(group, apart)), rows[group.name].order
            parts = (part.stack_matrices(apart, dtype, lying) for part in group.by_leaf)
            stacks[group.name] = [_lying(mesh, x[order], config.owners) for x in parts]
        return stacks

    return Gradients(replicated(map_by_path(rest, updates)), whole(stacked, PartitionSpec(config.owners))(apart))


def from_owners(
    config: Config, mesh: Mesh | AbstractMesh, new: Gradients, updates: Any, rows: dict[str, Shard], splits: Splits
) -> Any:
    """What has become of `updates`, lying as they do; skipped leaves are as they were."""
    apart, specs = _apart(config, updates), dict(splits.specs)

    def split(stacks):
        leaves: dict[str, jax.Array] = {}
        for group in config.apart:
            across, places = _across(config, mesh, group.layers[0]), rows[group.name].places
            for part, stack in zip(group.by_leaf, stacks[group.name], strict=True):
                # Laid out as the leaves lie, which XLA knows, before it is cut.
                whole_stack = _lying(mesh, stack, None, *across[::-1])[places]
                leaves |= part.split_matrices(whole_stack, {start: jnp.int32(start) for start in part.starts})
        return {path: leaves[path].astype(leaf.dtype) for path, leaf in apart.items()}

    own, rest = whole(split, apart)(new.stacks), leaves_by_path(new.tree)

    def back(path, leaf):
        if path in config.skipped:
            return leaf
        leaf = own[path] if path in own else lying_as(rest[path], leaf)
        return _lying(mesh, leaf, *specs[path]) if path in specs and not _explicit(mesh) else leaf

    return map_by_path(back, updates)


def _across(config: Config, mesh: Mesh | AbstractMesh, layer: Layer) -> tuple[Any, Any]:
    """Returns how rows and columns are laid out on the way to owners: those of a cut kernel by its other side."""
    free, devices = PartitionSpec.UNCONSTRAINED, math.prod(mesh.shape[name] for name in axis_names(config.owners))
    if layer.cut[0] == 1 < layer.cut[1] and layer.d_in % devices == 0:
        return None, config.owners
    if layer.cut[1] == 1 < layer.cut[0] and layer.d_out % devices == 0:
        return config.owners, None
    return free, free


def _apart(config: Config, updates: Any) -> dict[str, jax.Array]:
    """The leaves that owners alone precondition, by path."""
    return {path: leaf for path, leaf in leaves_by_path(updates).items() if path in config.paths_apart}


def _dtypes(group: Group, leaves: dict[str, jax.Array]) -> list[Any]:
    """The dtypes of the leaves of a group; one for a group that `optax.masked` has left nothing of."""
    return [leaves[p].dtype for layer in group.layers for p in layer.params if p in leaves] or [jnp.dtype(jnp.float32)]


def _narrowest(dtypes: list[Any]) -> Any:
    return min(dtypes, key=lambda dtype: float(jnp.finfo(dtype).max))


def _lying(mesh: Mesh | AbstractMesh, stack: jax.Array, *spec: Any) -> jax.Array:
    here = jax.sharding.get_abstract_mesh()  # with explicit axes, the same mesh as if they were not
    return lax.with_sharding_constraint(stack, NamedSharding(mesh if here.empty else here, PartitionSpec(*spec)))
