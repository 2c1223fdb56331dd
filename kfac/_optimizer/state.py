"""What the preconditioner keeps between steps, and how it lies on devices."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from kfac._curvature.blocks import Group
from kfac._curvature.ekfac import Moments
from kfac._distributed.assignment import Shard, block_cost, group_costs, make_phases, make_shards, packed_size
from kfac._distributed.collectives import pack, unpack
from kfac._factors import Block, Kronecker, Unitwise, is_diagonal
from kfac._layers import Layers, leaves_by_path
from kfac._varying import AxisName, as_varying, axis_size, varying_axes


class KfacMetrics(NamedTuple):
    """Scalars of the last step, for `diagnostics`.

    Attributes:
      gradient_norm: 2-norm of the gradient, over the parameters that have a curvature block.
      preconditioned_norm: the same of the preconditioned gradient.
      condition: largest condition number of what is inverted, each as of its last inversion: of the damped factors in
        the 1-norm; of eigendecompositions, of the damped blocks in the 2-norm.
      statistics_change: how much the last statistics differed from the running averages before them: the Frobenius norm
        of the difference, relative to the average, as a mean over all Kronecker factors. 1 for those without an average
        so far, and for those that were left out.
      inverse_age: steps since the oldest of the inverses in use was computed.
      skipped_statistics: how many times a block left non-finite statistics out of its running average.
      failed_inversions: how many times a block kept its previous inverse because factorisation failed.
      skipped_steps: how many times the gradient, or the preconditioned one, was not finite.
    """

    gradient_norm: jax.Array
    preconditioned_norm: jax.Array
    condition: jax.Array
    statistics_change: jax.Array
    inverse_age: jax.Array
    skipped_statistics: jax.Array
    failed_inversions: jax.Array
    skipped_steps: jax.Array


class BlockState(NamedTuple):
    """What is kept of `k` blocks of one shape.

    Attributes:
      factors: bias-corrected running averages, `[k, ...]`.
      weight: `[k]`, the sum of the weights in each average; 0 before the first statistics.
      inverse: damped inverses, shaped like `factors`, or eigendecompositions; identities before the first.
      condition: `[k]`, condition number at the last inversion; 0 before the first.
      age: `[k]`, steps since the last inversion; 0 before the first.
      moments: with `inverse="ekfac"`, second moments in the eigenbasis, where a block has two whole factors; else None.
    """

    factors: Block
    weight: jax.Array
    inverse: Block
    condition: jax.Array
    age: jax.Array
    moments: Moments | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Owned:
    """Blocks of one group that this device owns, at its positions; seen from outside, those of all devices in a row."""

    blocks: BlockState
    shard: Shard = dataclasses.field(metadata={"static": True})


class Replica(NamedTuple):
    """All inverses of a group, on every device, and whether each has been computed yet."""

    inverse: Kronecker
    ready: jax.Array


class KfacState(NamedTuple):
    """State of `scale_by_kfac`: arrays only. Dictionaries are keyed by the shape of the blocks they stack.

    Attributes:
      count: optimizer steps so far. One whose result is not finite is none: schedules and the interval of the refreshes
        stay where they are, as they do in the optax parts of `kfac`.
      changed: the last step that brought statistics or another damping.
      damping: the damping of the last step.
      unitwise_damping: that of unit-wise and diagonal blocks.
      owned: Kronecker blocks, each device its own.
      shared: unit-wise and diagonal blocks, the same on all devices.
      replicas: the inverses of all devices with `precondition="replicated"`, with `inverse="ekfac"` over an axis the
        eigendecompositions of the blocks that have moments; else empty.
      metrics: scalars of the last step.
    """

    count: jax.Array  # type: ignore[assignment]  # optax's name for it
    changed: jax.Array
    damping: jax.Array
    unitwise_damping: jax.Array
    owned: dict[str, Owned]
    shared: dict[str, BlockState]
    replicas: dict[str, Replica]
    metrics: KfacMetrics

    @property
    def blocks(self) -> dict[str, BlockState]:
        """All blocks this device holds, its own and those that all devices share."""
        return {name: own.blocks for name, own in self.owned.items()} | self.shared


@dataclasses.dataclass(frozen=True)
class Config:
    """What is fixed when the transformation is made; `phases` are the steps of a cycle that invert."""

    layers: Layers
    groups: tuple[Group, ...]
    axis_name: AxisName | None
    phases: int
    replicated: bool
    wire_dtype: Any
    triangular: bool
    precision: str
    inverse: str

    @property
    def eigen(self) -> bool:
        """Whether inverses are kept as eigendecompositions."""
        return self.inverse != "cholesky"

    def corrects(self, group: Group) -> bool:
        """Whether blocks of a group have moments."""
        return self.inverse == "ekfac" and group.correctable

    def replicates(self, group: Group) -> bool:
        """Whether all devices have the inverses of a group; to express statistics in eigenvectors, they need those."""
        return self.replicated or (self.corrects(group) and self.axis_name is not None)

    def encode(self, block: Block) -> jax.Array:
        """A stack of `k` blocks as it is sent, `[k, elements]`."""
        parts = jax.tree.leaves(block)
        if self.triangular and isinstance(block, Kronecker):
            sides = [part if is_diagonal(part) else pack(part) for part in (block.A, block.G)]
            parts = sides + parts[2:]
        return jnp.concatenate([part.reshape(part.shape[0], -1) for part in parts], axis=1)

    def decode(self, flat: jax.Array, group: Group) -> Block:
        """The inverse of `encode`, for blocks of `group`."""
        if not group.kronecker:
            return Unitwise(flat.reshape(-1, *group.shapes["F"]))
        sizes = [packed_size(group.shapes[factor], self.triangular) for factor in "AG"]

        def unpacked(flat, shape):
            if not self.triangular or len(shape) == 1:
                return flat.reshape(-1, *shape)
            half = (shape[0] + 1) // 2
            return unpack(flat.reshape(-1, half, 2 * half + 1), shape[0])

        a, g, moments = jnp.split(flat, list(itertools.accumulate(sizes)), axis=1)
        a, g = unpacked(a, group.shapes["A"]), unpacked(g, group.shapes["G"])
        return Kronecker(a, g, moments.reshape(-1, group.d_out, group.d_in) if self.corrects(group) else None)

    def encode_inverse(self, inverse: Kronecker) -> jax.Array:
        """A stack of `k` inverses as it is sent, `[k, elements]`; eigenvectors whole, in the dtype of eigenvalues."""
        if not self.eigen:
            return self.encode(inverse)
        return jnp.concatenate([part.reshape(part.shape[0], -1) for part in jax.tree.leaves(inverse)], axis=1)

    def decode_inverse(self, flat: jax.Array, group: Group, like: Kronecker) -> Kronecker:
        """The inverse of `encode_inverse`, shaped like `like`."""
        if not self.eigen:
            inverse = self.decode(flat, group)
            assert isinstance(inverse, Kronecker)
            return inverse
        leaves, treedef = jax.tree.flatten(like)
        ends = list(itertools.accumulate(math.prod(leaf.shape[1:]) for leaf in leaves))
        parts = jnp.split(flat, ends[:-1], axis=1)
        whole = [part.reshape(-1, *x.shape[1:]).astype(x.dtype) for part, x in zip(parts, leaves, strict=True)]
        return jax.tree.unflatten(treedef, whole)

    @functools.cached_property
    def skipped(self) -> frozenset[str]:
        return frozenset(path for layer in self.layers if layer.kind == "skipped" for path in layer.params)

    @functools.cached_property
    def kronecker(self) -> tuple[Group, ...]:
        return tuple(group for group in self.groups if group.kronecker)

    @functools.cached_property
    def turns(self) -> dict[str, np.ndarray]:
        """Of each Kronecker group, in which phase of a cycle each block is inverted, `[k]`."""
        bounds = make_phases(group_costs(self.groups), self.phases)
        return {name: np.repeat(np.arange(self.phases), np.diff(ends)) for name, ends in bounds.items()}

    @functools.cached_property
    def unitwise(self) -> tuple[Group, ...]:
        return tuple(group for group in self.groups if not group.kronecker)


def init_state(config: Config, params: Any) -> KfacState:
    # `optax.tree.map_params` asks for the state of a placeholder that has no leaves.
    leaves = match_leaves(config.layers, params, "params") if jax.tree.leaves(params) else {}
    # Statistics of a float64 model stay in float64; nothing else is ever wider than float32.
    dtype = jnp.result_type(jnp.float32, *(leaf.dtype for leaf in leaves.values()))
    kept = dtype if config.precision == "float32" else jnp.dtype(config.precision)
    devices = axis_size(config.axis_name)
    shards = make_shards(group_costs(config.groups), devices or 1)

    def blocks(group: Group, size: int) -> BlockState:
        return BlockState(
            factors=group.zeros(size, dtype),
            weight=jnp.zeros(size, dtype),
            inverse=group.identity(size, dtype, kept, eigen=config.eigen),
            condition=jnp.zeros(size, dtype),
            age=jnp.zeros(size, jnp.int32),
            moments=_no_moments(group, size, dtype) if config.corrects(group) else None,
        )

    def own(group: Group) -> Owned:
        shard = shards[group.name]
        return Owned(_own_varying(blocks(group, shard.positions), config.axis_name, devices), shard)

    replicas = {}
    for group in config.kronecker:
        if config.replicates(group):
            inverse = group.identity(group.size, dtype, kept, eigen=config.eigen)
            assert isinstance(inverse, Kronecker)
            replicas[group.name] = Replica(inverse, jnp.zeros(group.size, bool))
    return KfacState(
        count=jnp.zeros((), jnp.int32),
        changed=jnp.full((), -1, jnp.int32),
        damping=jnp.zeros((), jnp.float32),
        unitwise_damping=jnp.zeros((), jnp.float32),
        owned={group.name: own(group) for group in config.kronecker},
        shared={group.name: blocks(group, group.size) for group in config.unitwise},
        replicas=replicas,
        metrics=KfacMetrics(
            *(jnp.zeros((), jnp.float32) for _ in range(4)), *(jnp.zeros((), jnp.int32) for _ in range(4))
        ),
    )


def _no_moments(group: Group, size: int, dtype: Any) -> Moments:
    return Moments(jnp.zeros((size, group.d_out, group.d_in), dtype), jnp.zeros(size, dtype))


def _own_varying(tree: Any, axis_name: AxisName | None, devices: int | None) -> Any:
    """Marks a device's own blocks as its own, where `shard_map` checks that (`lax.axis_index` varies if it does)."""
    return as_varying(tree, varying_axes(lax.axis_index(axis_name))) if devices else tree


def state_specs(tx: optax.GradientTransformation, params: Any, axis_name: AxisName) -> Any:
    """`PartitionSpec`s of an optimizer state, for `in_specs` and `out_specs` of `jax.shard_map` or shardings of `jit`.

    Args:
      tx: the optimizer: `kfac`, or any chain that holds `scale_by_kfac`.
      params: the parameters, arrays or `jax.ShapeDtypeStruct`.
      axis_name: the axis given to the optimizer.

    Returns:
      A tree prefix of the state, in which Kronecker blocks are split along the axis, and everything else is the same on
      all devices.
    """
    state = jax.eval_shape(tx.init, params)
    return jax.tree.map(
        lambda node: state_spec(axis_name) if _is_state(node) else PartitionSpec(), state, is_leaf=_is_state
    )


def state_spec(axis_name: AxisName) -> KfacState:
    """The `PartitionSpec`s of a `KfacState`; each stands for the whole subtree below it."""
    specs: list[Any] = [
        PartitionSpec(axis_name) if field == "owned" else PartitionSpec() for field in KfacState._fields
    ]
    return KfacState(*specs)


def match_leaves(layers: Layers, tree: Any, what: str) -> dict[str, jax.Array]:
    """Leaves of parameters or gradients by path, checked against `layers`.

    `optax.masked` replaces leaves by empty nodes: a layer may be missing as a whole, but not in part.
    """
    leaves = leaves_by_path(tree)
    unknown = [path for path in leaves if path not in layers.paths]
    if unknown:
        raise ValueError(f"{what} have a leaf {unknown[0]!r} that `layers` was found without: call find_layers again")
    masked = has_masked(tree)
    for layer in layers:
        missing = [path for path in layer.params if path not in leaves]
        if missing and (not masked or len(missing) < len(layer.params)):
            reason = "is masked but the rest of its layer is not" if masked else "is missing"
            raise ValueError(f"{what}: leaf {missing[0]!r} of layer {layer.name!r} {reason}")
        for path, shape in zip(layer.params, layer.shapes, strict=True):
            if path in leaves and tuple(leaves[path].shape) != shape:
                raise ValueError(
                    f"{what}: leaf {path!r} of layer {layer.name!r} must have shape {shape}, "
                    f"but has {tuple(leaves[path].shape)}"
                )
    if not leaves:
        raise ValueError(f"{what} have no leaves")
    return leaves


def has_masked(tree: Any) -> bool:
    """Whether `optax.masked` has replaced a leaf of `tree`."""

    def is_masked(node):
        return isinstance(node, optax.MaskedNode)

    return any(map(is_masked, jax.tree.leaves(tree, is_leaf=is_masked)))


def rebuild(tree: Any, leaves: dict[str, jax.Array]) -> Any:
    paths = leaves_by_path(tree)
    return jax.tree.unflatten(jax.tree.structure(tree), [leaves[path] for path in paths])


# -- other numbers of devices ----------------------------------------------------------------------------------------


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
    if find_state(opt_state, "opt_state").count.ndim:  # of pmap
        opt_state = jax.tree.map(_without_devices, opt_state, is_leaf=_is_owned)

    def gather(node):
        if not _is_state(node):
            return node
        owned = {name: _gather_owned(own) for name, own in node.owned.items()}
        # Replicas that are there for the sake of several devices can be had from the blocks again.
        replicas = {name: r for name, r in node.replicas.items() if owned[name].blocks.moments is None}
        return node._replace(owned=owned, replicas=replicas)

    return jax.tree.map(gather, opt_state, is_leaf=_is_state)


def scatter_state(portable: Any, num_devices: int, *, pmap: bool = False) -> Any:
    """A state from `gather_state`, for any number of devices.

    Jit-compatible. The result is the global form that `shard_map` and `jit` over a mesh take: place it with
    `state_specs`, if possible as `out_shardings` of a `jax.jit` around this function.

    Args:
      portable: what `gather_state` returned.
      num_devices: length of the optimizer's axis; without one `portable` is the state, as it is.
      pmap: return the form of `jax.pmap` instead, with a leading axis of devices on every array.

    Returns:
      The state. It holds the same numbers, so that training goes on as it would have.

    Raises:
      ValueError: `num_devices` is not a positive int, or `portable` is not what `gather_state` returns.
    """
    if isinstance(num_devices, bool) or not isinstance(num_devices, int) or num_devices < 1:
        raise ValueError(f"num_devices must be a positive int, but is {num_devices!r}")
    find_state(portable, "portable")

    def scatter(node):
        if not _is_state(node):
            return node
        if any(own.shard.devices != 1 for own in node.owned.values()):
            raise ValueError("portable must be what gather_state returns, but is a state for several devices")
        blocks = {name: own.blocks.factors for name, own in node.owned.items()}
        costs = [(name, x.A.shape[0], block_cost([x.A.shape[1:], x.G.shape[1:]])) for name, x in blocks.items()]
        shards = make_shards(costs, num_devices)
        replicas = dict(node.replicas)
        for name, own in node.owned.items():
            if own.blocks.moments is not None:
                replicas[name] = Replica(own.blocks.inverse, own.blocks.condition > 0)
        owned = {name: _scatter_owned(own, shards[name]) for name, own in node.owned.items()}
        return node._replace(owned=owned, replicas=replicas)

    state = jax.tree.map(scatter, portable, is_leaf=_is_state)
    return jax.tree.map(lambda x: _with_devices(x, num_devices), state, is_leaf=_is_owned) if pmap else state


def find_state(opt_state: Any, argument: str) -> KfacState:
    """The first `KfacState` in an optimizer state."""
    states = [node for node in jax.tree.leaves(opt_state, is_leaf=_is_state) if _is_state(node)]
    if not states:
        raise ValueError(
            f"there is no state of scale_by_kfac in {argument}, which is of type {type(opt_state).__name__}"
        )
    return states[0]


def _is_state(node: Any) -> bool:
    return isinstance(node, KfacState)


def _is_owned(node: Any) -> bool:
    return isinstance(node, Owned)


def _without_devices(node: Any) -> Any:
    """From pmap's form to that of shard_map: one row of owned blocks, one copy of everything else."""
    if _is_owned(node):
        return Owned(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), node.blocks), node.shard)
    return node[0]


def _with_devices(node: Any, devices: int) -> Any:
    """The inverse of `_without_devices`."""
    if _is_owned(node):
        return Owned(jax.tree.map(lambda x: x.reshape(devices, -1, *x.shape[1:]), node.blocks), node.shard)
    return jnp.broadcast_to(node, (devices, *node.shape))


def _places(shard: Shard) -> jax.Array:
    """Where each block stands in the row of all devices' positions."""
    places = [shard.location(block) for block in range(shard.blocks)]
    return jnp.array([device * shard.positions + position for device, position in places], jnp.int32)


def _gather_owned(own: Owned) -> Owned:
    places, expected = _places(own.shard), own.shard.devices * own.shard.positions
    if own.blocks.weight.shape != (expected,):
        raise ValueError(
            f"opt_state must hold the {expected} blocks of all {own.shard.devices} devices in a row, but has "
            f"{own.blocks.weight.shape}: gather outside of shard_map and pmap, and from the parts of all processes."
        )
    return Owned(jax.tree.map(lambda x: _replicated(x)[places], own.blocks), Shard(own.shard.blocks, 1))


def _replicated(x: jax.Array) -> jax.Array:
    """An array with a copy on every device, which indexing over an axis of a mesh with explicit axes asks for."""
    sharding = jax.typeof(x).sharding
    return jax.reshard(x, NamedSharding(sharding.mesh, PartitionSpec())) if any(sharding.spec) else x


def _scatter_owned(own: Owned, shard: Shard) -> Owned:
    places = _places(shard)

    def spread(x):
        return jnp.zeros((shard.devices * shard.positions, *x.shape[1:]), x.dtype).at[places].set(x)

    return Owned(jax.tree.map(spread, own.blocks), shard)
