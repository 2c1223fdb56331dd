"""Move optimizer states to other numbers of devices, and give their shardings over a mesh."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from kfac._checks import check
from kfac._distributed.comm import Everywhere
from kfac._distributed.distribution import Distribution, check_distribution
from kfac._distributed.owners import BlockAssignment
from kfac._mesh import AxisName, PyTree, mesh_of, replicated
from kfac._optimizer.flat_state import block_of, closed
from kfac._optimizer.state import KfacState, find_states, on_states, state_spec


def state_specs(
    tx: optax.GradientTransformation,
    params: Any,
    axis_name: AxisName,
) -> Any:
    """Return the partition specs of an optimizer state.

    They can be `in_specs` and `out_specs` of `jax.shard_map`, or give the shardings for `jax.jit`.

    Args:
      tx: the optimizer: `kfac`, or any chain that contains `scale_by_kfac`.
      params: the parameters, as arrays or as `jax.ShapeDtypeStruct` leaves.
      axis_name: the optimizer's axis of devices. If `Distribution(owner_axes=...)` names axes, pass these axes instead.

    Returns:
      A tree prefix of the state. It splits blocks along the axis and replicates everything else.

    Raises:
      ValueError: if `tx` is not an optimizer.
    """
    _check_optimizer(tx)
    return on_states(
        lambda node: state_spec(axis_name),
        jax.eval_shape(tx.init, params),
        lambda leaf: PartitionSpec(),
    )


def shardings(tx: optax.GradientTransformation, params: Any) -> Any:
    """Return the shardings of an optimizer state over a mesh, from shapes and shardings alone.

    ::

        with jax.set_mesh(mesh):
            opt_state = jax.jit(tx.init, out_shardings=kfac.state.shardings(tx, params))(params)

    Blocks are split over their owners. Everything else is replicated.

    Args:
      tx: the optimizer: `kfac`, or any chain or wrapper around it.
      params: the parameters on the mesh, arrays or `jax.ShapeDtypeStruct`s with `sharding=`.

    Returns:
      A tree like the state, with a `NamedSharding` for each array.

    Raises:
      ValueError: if `tx` is not an optimizer, or if `params` are not on a mesh.
    """
    _check_optimizer(tx)
    mesh = mesh_of(params)
    if mesh is None:
        raise ValueError(
            "params must be on a mesh of several devices: place them with jax.device_put, or set the mesh"
        )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        state = jax.eval_shape(tx.init, params)

    def of_leaves(tree, spec):
        return jax.tree.map(lambda leaf: NamedSharding(mesh, spec), tree)

    def of_state(state):
        comm, _ = state.settings.distribution.comm(params)
        return KfacState(*map(of_leaves, state, state_spec(comm.owner_axes)))

    return on_states(of_state, state, lambda leaf: NamedSharding(mesh, PartitionSpec()))


def _check_optimizer(tx: object) -> None:
    if not hasattr(tx, "init"):
        raise ValueError(
            f"tx must be an optimizer, tx = kfac.kfac(learning_rate, layers), but is {type(tx).__name__}"
        )


def gather_state(opt_state: Any) -> Any:
    """Convert an optimizer state to the state of a single device, for a checkpoint.

    The function is jit-compatible. With several processes, call it under `jax.jit` with replicated `out_shardings`.
    With several processes and `pmap`, first assemble the state from the processes' parts (see the guide to several
    devices).

    Args:
      opt_state: the state as it is outside `shard_map` or `pmap`. A state from `pmap` has a leading axis of devices.

    Returns:
      The state for a single device. `scatter_state` converts it to any number of devices.

    Raises:
      ValueError: if `opt_state` contains no state of `scale_by_kfac`, or if the state does not hold all devices'
        blocks.
    """
    if find_states(opt_state, "opt_state")[0].count.ndim:  # from pmap
        opt_state = _each_array(
            opt_state, lambda x: x.reshape(-1, *x.shape[2:]), lambda x: x[0]
        )

    def gather(node):
        assignments = node.settings.assignments
        for name, assignment in assignments.items():
            shape = node.blocks[name].weight.shape
            expected = assignment.devices * assignment.slots
            if shape != (expected,):
                raise ValueError(
                    f"opt_state must hold the {expected} blocks of all {assignment.devices} devices in a row, but has "
                    f"{shape}: gather outside of shard_map and pmap, from all processes"
                )
        node = replicated(node)
        blocks = {}
        for name, assignment in assignments.items():
            in_order = operator.itemgetter(assignment.block_to_slot)
            stack = block_of(node, Everywhere(), name)
            blocks[name] = jax.tree.map(in_order, stack)
        settings = dataclasses.replace(
            node.settings, distribution=Distribution(), devices=1, param_specs=()
        )
        return node._replace(blocks=blocks, flat_state={}, settings=settings)

    return on_states(gather, opt_state)


def scatter_state(
    portable: Any,
    num_devices: int,
    *,
    pmap: bool = False,
    distribution: Distribution | None = None,
) -> Any:
    """Distribute a state from `gather_state` over any number of devices.

    The function is jit-compatible. The result has the global form for `shard_map` and for `jit` over a mesh. Shard it
    with the specs from `state_specs`, if possible as `out_shardings` of a `jax.jit` around this function. A mesh with
    explicit axes requires these `out_shardings`.

    Args:
      portable: the state that `gather_state` returned.
      num_devices: the number of devices along the optimizer's axis, or along its `owner_axes=` axes. An optimizer
        without an axis of devices can use `portable` itself as its state.
      pmap: whether to return the form for `jax.pmap`, which has a leading axis of devices on every array.
      distribution: the `distribution=` of the optimizer, if it has one.

    Returns:
      The state. It holds the same numbers as the original state, so training continues as if it had not been moved.

    Raises:
      ValueError: if `num_devices` is not a positive int, or if `portable` is not a state for a single device.
    """
    check(num_devices=num_devices)
    check_distribution(distribution)
    find_states(portable, "portable")
    distribution = distribution or Distribution()
    # A new state takes the split of the parameters from its layers. On one device nothing is split, even if these
    # layers come from several.
    known = num_devices > 1 or distribution.axis is not None

    def scatter(node):
        if node.settings.devices > 1:
            raise ValueError(
                "portable must be what gather_state returns, but is a state for several devices"
            )
        settings = dataclasses.replace(
            node.settings,
            distribution=distribution,
            devices=num_devices,
            param_specs=node.settings.layers.param_specs if known else (),
        )
        blocks = {}
        for name, assignment in settings.assignments.items():
            blocks[name] = _in_slots(node.blocks[name], assignment)
        node = node._replace(blocks=blocks, settings=settings)
        return closed(node, Everywhere())

    state = on_states(scatter, portable)
    if not pmap:
        return state
    return _each_array(
        state,
        lambda x: x.reshape(num_devices, -1, *x.shape[1:]),
        lambda x: jnp.broadcast_to(x, (num_devices, *x.shape)),
    )


def _each_array(
    tree: PyTree,
    own: Callable[[Array], Array],
    other: Callable[[Array], Array],
) -> PyTree:
    """Map `own` over the arrays in K-FAC states that differ between devices, and `other` over all other arrays."""

    def mapped(state):
        parts = []
        for spec, part in zip(state_spec("devices"), state, strict=True):
            parts.append(jax.tree.map(own if spec else other, part))
        return KfacState(*parts)

    return on_states(mapped, tree, other)


def _in_slots(stack: PyTree, assignment: BlockAssignment) -> PyTree:
    """Put blocks `[blocks, ...]` into their slots `[devices * slots, ...]`. Empty slots are zero."""

    def spread(x):
        shape = (assignment.devices * assignment.slots, *x.shape[1:])
        return jnp.zeros(shape, x.dtype).at[assignment.block_to_slot].set(x)

    return jax.tree.map(spread, stack)
