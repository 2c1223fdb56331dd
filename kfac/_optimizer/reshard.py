"""A state on other numbers of devices, and how it lies on a mesh."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from kfac._checks import check
from kfac._distributed.distribution import Distribution, check_distribution
from kfac._distributed.owners import Shard, block_cost, make_shards
from kfac._distributed.ways import Way
from kfac._factors import per_block
from kfac._optimizer.segment import closed, opened
from kfac._optimizer.state import KfacState, Owned, Segment, Splits, devices_of, find_nodes, form_of
from kfac._varying import AxisName, axis_names, mesh_of, replicated


def state_specs(tx: optax.GradientTransformation, params: Any, axis_name: AxisName) -> Any:
    """`PartitionSpec`s of an optimizer state, for `in_specs` and `out_specs` of `jax.shard_map` or shardings of `jit`.

    Args:
      tx: the optimizer: `kfac`, or any chain that holds `scale_by_kfac`.
      params: the parameters, arrays or `jax.ShapeDtypeStruct`.
      axis_name: the axis given to the optimizer; with `owners=` those.

    Returns:
      A tree prefix of the state, in which Kronecker blocks are split along the axis, and everything else is the same on
      all devices.

    Raises:
      ValueError: `tx` is no optimizer.
    """
    _check_optimizer(tx)
    state = jax.eval_shape(tx.init, params)
    return on_states(lambda node: state_spec(axis_name), state, lambda leaf: PartitionSpec())


def shardings(tx: optax.GradientTransformation, params: Any) -> Any:
    """Return the shardings of an optimizer state over a mesh, from shapes and shardings alone.

    ::

        with jax.set_mesh(mesh):
            opt_state = jax.jit(tx.init, out_shardings=kfac.state.shardings(tx, params))(params)

    Kronecker blocks are split over the devices that own them. Everything else has a copy on every device.

    Args:
      tx: the optimizer: `kfac`, or any chain or wrapper around it.
      params: the parameters on the mesh, arrays or `jax.ShapeDtypeStruct` with `sharding=`.

    Returns:
      A tree like the state, with a `NamedSharding` for each array.

    Raises:
      ValueError: `tx` is no optimizer, or `params` are not on a mesh.
    """
    _check_optimizer(tx)
    mesh = mesh_of(params)
    if mesh is None:
        raise ValueError("params must be on a mesh of several devices: place them with jax.device_put, or set the mesh")
    with jax.sharding.use_abstract_mesh(mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh):
        state = jax.eval_shape(tx.init, params)

    def of_leaves(tree, spec):
        return jax.tree.map(lambda leaf: NamedSharding(mesh, spec), tree)

    def of_state(state):
        owners = axis_names(state.settings.distribution.owners) or tuple(mesh.axis_names)
        return KfacState(*map(of_leaves, state, state_spec(owners)))

    return on_states(of_state, state, lambda leaf: NamedSharding(mesh, PartitionSpec()))


def _check_optimizer(tx: Any) -> None:
    if not hasattr(tx, "init"):
        raise ValueError(f"tx must be an optimizer, tx = kfac.kfac(learning_rate, layers), but is {type(tx).__name__}")


def state_spec(axis_name: AxisName) -> KfacState:
    """The `PartitionSpec`s of a `KfacState`; each stands for the whole subtree below it."""
    specs: dict[str, Any] = {field: PartitionSpec() for field in KfacState._fields}
    return KfacState(**specs | {"owned": PartitionSpec(axis_name), "segment": PartitionSpec(axis_name)})


def gather_state(opt_state: Any) -> Any:
    """An optimizer state as one device alone would hold it: what to write to a checkpoint.

    Jit-compatible. With several processes, call it under `jax.jit` with replicated `out_shardings`; a state of `pmap`
    has to be put together from the processes' parts first (the guide to several devices shows how).

    Args:
      opt_state: the state as it is outside of `shard_map` or `pmap` (there, with its leading axis of devices).

    Returns:
      The state for one device; `scatter_state` brings it onto any number of them.

    Raises:
      ValueError: there is no state of `scale_by_kfac` in `opt_state`, or it is not that of all devices.
    """
    if some_states(opt_state, "opt_state")[0].count.ndim:  # of pmap
        opt_state = on_nodes((Owned, Segment), _in_a_row, opt_state, lambda x: x[0])

    def gather(node):
        for owned in node.owned.values():
            _check_row(owned)
        node = _each_device(opened, replicated(node))
        owned = {name: _gather_owned(owned) for name, owned in node.owned.items()}
        # Bases can be had from the blocks again.
        settings = dataclasses.replace(node.settings, distribution=Distribution())
        return node._replace(owned=owned, segment=Segment(), bases={}, splits=Splits(), settings=settings)

    return on_states(gather, opt_state)


def scatter_state(
    portable: Any, num_devices: int, *, pmap: bool = False, distribution: Distribution | None = None
) -> Any:
    """A state from `gather_state`, for any number of devices.

    Jit-compatible. The result is the global form that `shard_map` and `jit` over a mesh take: place it with
    `state_specs`, if possible as `out_shardings` of a `jax.jit` around this function; on explicit axes it has to be.

    Args:
      portable: what `gather_state` returned.
      num_devices: length of the optimizer's axis, with `owners=` of those; without one `portable` is the state, as it
        is.
      pmap: return the form of `jax.pmap` instead, with a leading axis of devices on every array.
      distribution: the `distribution=` of the optimizer, if it has one.

    Returns:
      The state. It holds the same numbers, so that training goes on as it would have.

    Raises:
      ValueError: `num_devices` is not a positive int, or `portable` is not what `gather_state` returns.
    """
    check(num_devices=num_devices)
    check_distribution(distribution)
    some_states(portable, "portable")

    def cost(name, owned):
        shapes = {side: getattr(owned.blocks.factors, side).shape[1:] for side in "AG"}
        return block_cost(name, owned.shard.blocks, shapes)

    def scatter(node):
        if devices_of(node) > 1:
            raise ValueError("portable must be what gather_state returns, but is a state for several devices")
        shards = make_shards(itertools.starmap(cost, node.owned.items()), num_devices)
        bases = {name: node.settings.inverse.basis(owned.blocks.inverse) for name, owned in node.owned.items()}
        owned = {name: _scatter_owned(owned, shards[name]) for name, owned in node.owned.items()}
        bases = {name: basis for name, basis in bases.items() if basis is not None and num_devices > 1}
        settings = dataclasses.replace(node.settings, distribution=distribution or Distribution())
        return _each_device(closed, node._replace(owned=owned, bases=bases, settings=settings))

    state = on_states(scatter, portable)
    if not pmap:
        return state
    by_device = functools.partial(_by_device, num_devices)
    return on_nodes((Owned, Segment), by_device, state, lambda x: jnp.broadcast_to(x, (num_devices, *x.shape)))


def _in_a_row(tree: Any) -> Any:
    """Arrays `[devices, k, ...]` as `[devices k, ...]`."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)


def _by_device(devices: int, tree: Any) -> Any:
    """The inverse of `_in_a_row`."""
    return jax.tree.map(lambda x: x.reshape(devices, -1, *x.shape[1:]), tree)


def _each_device(fn: Callable[[KfacState, Way], KfacState], state: KfacState) -> KfacState:
    """`opened` or `closed` of the part of each device, from outside, where some groups are in segments."""
    devices = next((owned.shard.devices for owned in state.owned.values() if owned.form is not None), None)
    if devices is None:
        return state

    def local(owned, segment):
        new = fn(state._replace(owned=owned, segment=segment), Way(("devices",), ("devices",)))
        return new.owned, new.segment

    parts = _by_device(devices, (state.owned, state.segment))
    owned, segment = _in_a_row(jax.vmap(local, axis_name="devices")(*parts))
    return state._replace(owned=owned, segment=segment)


def some_states(opt_state: Any, argument: str) -> list[KfacState]:
    """Return the K-FAC states in a tree; raise if there is none."""
    states = find_nodes(opt_state, KfacState)
    if not states:
        raise ValueError(f"there is no state of scale_by_kfac in {argument}, of type {type(opt_state).__name__}")
    return states


def on_nodes(kind: Any, fn: Callable, tree: Any, other: Callable[[Any], Any] = lambda leaf: leaf) -> Any:
    """`fn` of the nodes of a type, or of several, in a tree, `other` of all other leaves."""

    def mapped(node):
        return fn(node) if isinstance(node, kind) else other(node)

    return jax.tree.map(mapped, tree, is_leaf=lambda node: isinstance(node, kind))


on_states = functools.partial(on_nodes, KfacState)


def _check_row(owned: Owned) -> None:
    expected, shape = owned.shard.devices * owned.shard.positions, owned.blocks.weight.shape
    if shape != (expected,):
        rows = f"the {expected} blocks of all {owned.shard.devices} devices in a row, but has {shape}"
        raise ValueError(f"opt_state must hold {rows}: gather outside of shard_map and pmap, from all processes")


def _gather_owned(owned: Owned) -> Owned:
    shard, whole = owned.shard, dataclasses.replace(owned.shard, devices=1, owners=())
    blocks = jax.tree.map(lambda x: x[shard.places], owned.blocks)
    return dataclasses.replace(owned, blocks=blocks, shard=whole, form=None)


def _scatter_owned(owned: Owned, shard: Shard) -> Owned:
    def spread(x):
        return jnp.where(per_block(jnp.asarray(shard.held.reshape(-1)), x[shard.order]), x[shard.order], 0)

    form = None if shard.full else form_of(owned.blocks)
    return dataclasses.replace(owned, blocks=jax.tree.map(spread, owned.blocks), shard=shard, form=form)
