"""A state on other numbers of devices, and how it lies on a mesh."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from kfac._checks import check
from kfac._distributed.owners import Shard, block_cost, make_shards
from kfac._optimizer.state import KfacState, Owned, Replica, Splits, find_nodes
from kfac._varying import AxisName, replicated


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
    if not hasattr(tx, "init"):
        raise ValueError(f"tx must be an optimizer, tx = kfac.kfac(learning_rate, layers), but is {type(tx).__name__}")
    state = jax.eval_shape(tx.init, params)
    return on_states(lambda node: state_spec(axis_name), state, lambda leaf: PartitionSpec())


def state_spec(axis_name: AxisName) -> KfacState:
    """The `PartitionSpec`s of a `KfacState`; each stands for the whole subtree below it."""
    specs: dict[str, Any] = {field: PartitionSpec() for field in KfacState._fields}
    return KfacState(**specs | {"owned": PartitionSpec(axis_name)})


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
    if some_state(opt_state, "opt_state").count.ndim:  # of pmap
        in_a_row = functools.partial(_mapped, lambda x: x.reshape(-1, *x.shape[2:]))
        opt_state = on_nodes(Owned, in_a_row, opt_state, lambda x: x[0])

    def gather(node):
        owned = {name: _gather_owned(own) for name, own in node.owned.items()}
        # A basis that is there for the sake of several devices can be had from the blocks again.
        replicas = {name: r for name, r in node.replicas.items() if not owned[name].inverse.takes_moments}
        return node._replace(owned=owned, replicas=replicas, splits=Splits())

    return on_states(gather, opt_state)


def scatter_state(portable: Any, num_devices: int, *, pmap: bool = False) -> Any:
    """A state from `gather_state`, for any number of devices.

    Jit-compatible. The result is the global form that `shard_map` and `jit` over a mesh take: place it with
    `state_specs`, if possible as `out_shardings` of a `jax.jit` around this function; on explicit axes it has to be.

    Args:
      portable: what `gather_state` returned.
      num_devices: length of the optimizer's axis, with `owners=` of those; without one `portable` is the state, as it
        is.
      pmap: return the form of `jax.pmap` instead, with a leading axis of devices on every array.

    Returns:
      The state. It holds the same numbers, so that training goes on as it would have.

    Raises:
      ValueError: `num_devices` is not a positive int, or `portable` is not what `gather_state` returns.
    """
    check(num_devices=num_devices)
    some_state(portable, "portable")

    def scatter(node):
        if any(own.shard.devices != 1 for own in node.owned.values()):
            raise ValueError("portable must be what gather_state returns, but is a state for several devices")
        blocks = {name: own.blocks.factors for name, own in node.owned.items()}
        costs = [block_cost(n, len(x.A), {"A": x.A.shape[1:], "G": x.G.shape[1:]}) for n, x in blocks.items()]
        shards = make_shards(costs, num_devices)
        bases = {name: own.inverse.basis(own.blocks.inverse) for name, own in node.owned.items()}
        ready = {name: node.owned[name].blocks.condition > 0 for name, basis in bases.items() if basis is not None}
        replicas = node.replicas | {name: Replica(bases[name], ready[name]) for name in ready}
        owned = {name: _scatter_owned(own, shards[name]) for name, own in node.owned.items()}
        return node._replace(owned=owned, replicas=replicas)

    state = on_states(scatter, portable)
    if not pmap:
        return state
    by_device = functools.partial(_mapped, lambda x: x.reshape(num_devices, -1, *x.shape[1:]))
    return on_nodes(Owned, by_device, state, lambda x: jnp.broadcast_to(x, (num_devices, *x.shape)))


def some_state(opt_state: Any, argument: str) -> KfacState:
    """The first of the K-FAC states, of which there may be several."""
    states = find_nodes(opt_state, KfacState)
    if not states:
        raise ValueError(f"there is no state of scale_by_kfac in {argument}, of type {type(opt_state).__name__}")
    return states[0]


def _mapped(fn: Callable[[jax.Array], jax.Array], owned: Owned, shard: Shard | None = None) -> Owned:
    return dataclasses.replace(owned, blocks=jax.tree.map(fn, owned.blocks), shard=shard or owned.shard)


def on_nodes(kind: type, fn: Callable, tree: Any, other: Callable[[Any], Any] = lambda leaf: leaf) -> Any:
    """`fn` of the nodes of a type in a tree, `other` of all other leaves."""

    def mapped(node):
        return fn(node) if isinstance(node, kind) else other(node)

    return jax.tree.map(mapped, tree, is_leaf=lambda node: isinstance(node, kind))


on_states = functools.partial(on_nodes, KfacState)


def _gather_owned(owned: Owned) -> Owned:
    expected = owned.shard.devices * owned.shard.positions
    if owned.blocks.weight.shape != (expected,):
        raise ValueError(
            f"opt_state must hold the {expected} blocks of all {owned.shard.devices} devices in a row, but has "
            f"{owned.blocks.weight.shape}: gather outside of shard_map and pmap, and from the parts of all processes."
        )
    shard, one = owned.shard, Shard(owned.shard.blocks, 1)
    return _mapped(lambda x: replicated(x)[shard.places], owned, one)


def _scatter_owned(owned: Owned, shard: Shard) -> Owned:
    places = shard.places

    def spread(x):
        return jnp.zeros((shard.devices * shard.positions, *x.shape[1:]), x.dtype).at[places].set(x)

    return _mapped(spread, owned, shard)
