"""Run the step and `observe` under `jit` over a mesh, by opening a `shard_map`.

If gradients are split over the mesh, as in FSDP or tensor parallelism, this module lays out each group's stack over its
owners. XLA moves the leaves to the owners and the results back. It uses an all-to-all if the leaves are split over the
same devices. Kernels and biases go in separate stacks, because joining them would make XLA move the kernels again.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from kfac._curvature.blocks import Group
from kfac._curvature.inverse import finite
from kfac._distributed.distribution import Distribution
from kfac._distributed.owners import Shard
from kfac._distributed.ways import Way
from kfac._factors import Factors
from kfac._layers import Layer, find_splits, leaves_by_path, map_by_path
from kfac._optimizer.averages import Stacks, observe_here, stack_gradients, stack_packed
from kfac._optimizer.moves import Now
from kfac._optimizer.place import Config
from kfac._optimizer.reshard import state_spec
from kfac._optimizer.segment import closed
from kfac._optimizer.state import KfacState, Settings, Splits, devices_of, init_state
from kfac._optimizer.step import Gradients, preconditioned_step
from kfac._varying import lying_as, replicated, whole


@dataclasses.dataclass(frozen=True)
class OverMesh:
    """The step and `observe` over a mesh.

    Attributes:
      config: the fixed settings of a step.
      mesh: the mesh.
      shards: how each group's blocks are assigned to devices.
      splits: the `PartitionSpec`s of leaves by path, on automatic axes, where the leaves' types do not contain them.
    """

    config: Config
    mesh: Mesh | AbstractMesh
    shards: dict[str, Shard]
    splits: dict[str, PartitionSpec]

    def step(
        self, updates: Any, params: Any, state: KfacState, now: Now
    ) -> tuple[Any, KfacState]:
        """Run `preconditioned_step` on every device.

        Args:
          updates: the gradients.
          params: the parameters, or None if step lengths do not depend on them.
          state: the state before the step.
          now: the scalars of the step.

        Returns:
          The steps and the state after the step. The steps keep the shardings of `updates` on explicit axes.
        """
        config, same, over = (
            self.config,
            PartitionSpec(),
            PartitionSpec(self.config.way.owners),
        )
        states, leaves = state_spec(config.way.owners), self.owned(updates)
        split = config.way.owners and self.is_split(leaves)

        def laid_out(tree):
            return self.to_owners(tree) if split else Gradients(replicated(tree), {})

        gradients: Any = Gradients(same, over)  # type: ignore[arg-type]  # specs in place of arrays
        in_specs = gradients, gradients, states, same
        on_device = functools.partial(preconditioned_step, config)
        step = jax.shard_map(
            on_device, mesh=self.mesh, in_specs=in_specs, out_specs=(gradients, states)
        )
        weights = Gradients(None, {}) if params is None else laid_out(params)
        new, state = step(laid_out(updates), weights, state, now)
        return self.from_owners(new, updates) if split else lying_as(
            new.tree, updates
        ), state

    def observe(self, state: KfacState, factors: Factors | None) -> KfacState:
        """Run `observe_here` on every device; with `factors=None` refresh the inverses only."""
        config, states = self.config, state_spec(self.config.way.owners)
        on_device, over = (
            functools.partial(observe_here, config),
            PartitionSpec(config.way.owners),
        )
        if factors is None:
            refresh = functools.partial(on_device, statistics=None)
            return jax.shard_map(
                refresh, mesh=self.mesh, in_specs=(states,), out_specs=states
            )(state)
        specs: tuple[dict[str, PartitionSpec], ...] = ({}, {})
        for group in config.groups:
            specs[0 if group.captured else 1][group.name] = (
                over if group.owned else PartitionSpec()
            )
        stacks = whole(self.statistics_to_owners, specs)(state, factors)
        observe = jax.shard_map(
            lambda state, stacks: on_device(state, Stacks(*stacks)),
            mesh=self.mesh, in_specs=(states, specs), out_specs=states,
        )  # fmt: skip
        return observe(state, stacks)

    def owned(self, updates: Any) -> dict[str, jax.Array]:
        """Return the leaves that only their owners precondition, by path."""
        return {
            path: leaf
            for path, leaf in leaves_by_path(updates).items()
            if path in self.config.owned_paths
        }

    def is_split(self, leaves: dict[str, jax.Array]) -> bool:
        """Return whether each gradient is sent to its owner only, instead of being replicated.

        This is the case if a leaf is split, all owner axes have the same type (automatic or explicit), and the leaves
        in each stack share a dtype.
        """
        kinds = dict(zip(self.mesh.axis_names, self.mesh.axis_types, strict=True))
        dtypes = [
            _dtypes(part, leaves)
            for group in self.config.owned
            for part in group.by_leaf
        ]
        if len({kinds[name] for name in self.config.way.owners}) > 1 or any(
            len(alike) > 1 for alike in dtypes
        ):
            return False
        return any(
            any(self.splits.get(path, jax.typeof(x).sharding.spec))
            for path, x in leaves.items()
        )

    def statistics_to_owners(
        self, state: KfacState, factors: Factors
    ) -> tuple[dict[str, Any], dict[str, jax.Array]]:
        """Stack packed statistics and gradients for `observe_here`.

        Blocks with owners lie in their owners' slots. The caller replicates blocks without owners.
        """

        def lay_out(stacks):
            return {
                n: self.over_owners(x, self.shards[n]) if n in self.shards else x
                for n, x in stacks.items()
            }

        leaves = {
            path: self.lying(x, *self.splits.get(path, [UNSEEN]))
            for path, x in factors.gradients.items()
        }
        gradients = stack_gradients(self.config, state, Factors({}, leaves))
        return lay_out(stack_packed(self.config, factors)), lay_out(gradients)

    def to_owners(self, updates: Any) -> Gradients:
        """Stack gradients: blocks with owners lie in their owners' slots, all other leaves are replicated.

        A scalar replaces each skipped leaf: 0 if the leaf is finite, otherwise NaN.
        """
        # Lay gradients out like the parameters first. Otherwise XLA would sum the gradients from each use of a leaf,
        # and from each iteration of a scan, on every device.
        updates = map_by_path(
            lambda path, x: self.lying(x, *self.splits.get(path, [UNSEEN])), updates
        )
        owned = self.owned(updates)

        def rest(path, leaf):
            if path in self.config.layers.skipped_paths:
                return jnp.where(finite(leaf, 0), 0.0, jnp.nan)
            return optax.MaskedNode() if path in owned else leaf

        def before_cut(layer, matrix):
            return self.lying(matrix, None, *self.across(layer))

        def stacked(owned):
            stacks = {}
            for group in self.config.owned:
                shard = self.shards[group.name]
                parts = [
                    (part, jnp.result_type(*(_dtypes(part, owned) or [jnp.float32])))
                    for part in group.by_leaf
                ]
                matrices = [
                    part.stack_matrices(owned, dtype, before_cut)
                    for part, dtype in parts
                ]
                stacks[group.name] = [self.over_owners(x, shard) for x in matrices]
            return stacks

        stacks = whole(stacked, PartitionSpec(self.config.way.owners))(owned)
        return Gradients(replicated(map_by_path(rest, updates)), stacks)

    def from_owners(self, new: Gradients, updates: Any) -> Any:
        """Return the steps in the structure and layout of `updates`; skipped leaves are unchanged.

        This is the inverse of `to_owners`.

        Args:
          new: the steps of all blocks.
          updates: the gradients.
        """
        owned = self.owned(updates)

        def split(stacks):
            leaves: dict[str, jax.Array] = {}
            for group in self.config.owned:
                across, places = (
                    self.across(group.layers[0])[::-1],
                    self.shards[group.name].places,
                )
                for part, stack in zip(group.by_leaf, stacks[group.name], strict=True):
                    # Move blocks from their owners before the stack is cut. XLA chooses the axes that `across` leaves
                    # free, and knows how the leaves lie.
                    starts = {start: jnp.int32(start) for start in part.starts}
                    leaves |= part.split_matrices(
                        _picked(self.lying(stack, None, *across), places), starts
                    )
            return {
                path: leaves[path].astype(leaf.dtype) for path, leaf in owned.items()
            }

        dealt, rest = whole(split, owned)(new.stacks), leaves_by_path(new.tree)

        def back(path, leaf):
            if path in self.config.layers.skipped_paths:
                return leaf
            leaf = dealt[path] if path in dealt else lying_as(rest[path], leaf)
            return self.lying(leaf, *self.splits.get(path, [UNSEEN]))

        return map_by_path(back, updates)

    def across(self, layer: Layer) -> tuple[Any, Any]:
        """Return the specs of a kernel's `d_out` and `d_in` axes while the kernel is cut into pieces for its owners.

        A kernel that is cut along a single axis is split over devices along the other axis, so that each device cuts
        only its own part. If the devices do not divide the other axis, or both axes are cut, XLA chooses the layout.
        """
        owners, free = self.config.way.owners, PartitionSpec.UNCONSTRAINED
        devices = math.prod(self.mesh.shape[name] for name in owners)
        if layer.cut[0] == 1 < layer.cut[1] and layer.d_in % devices == 0:
            return None, owners
        if layer.cut[1] == 1 < layer.cut[0] and layer.d_out % devices == 0:
            return owners, None
        return free, free

    def over_owners(self, stacks: Any, shard: Shard) -> Any:
        """Reorder blocks `[k, ...]` into slot order, device-major, and split them over the owners."""
        return jax.tree.map(
            lambda x: self.lying(_picked(x, shard.order), self.config.way.owners),
            stacks,
        )

    def lying(self, x: jax.Array, *spec: Any) -> jax.Array:
        """Constrain an array's layout to `spec`, or return the array unchanged if `spec` contains `UNSEEN`."""
        if UNSEEN in spec:
            return x
        # Inside `whole` the current mesh is this mesh with its explicit axes made automatic.
        around = jax.sharding.get_abstract_mesh()
        mesh = self.mesh if around.empty else around
        return lax.with_sharding_constraint(
            x, NamedSharding(mesh, PartitionSpec(*spec))
        )


UNSEEN = "unseen"  # in the place of an unknown spec


def mesh_to_open(
    uses: Distribution, state: KfacState, tree: Any
) -> tuple[Way, Mesh | AbstractMesh | None]:
    """Return how blocks lie on devices, and the mesh over which to open a `shard_map`, or None."""
    way, mesh = uses.way(tree, uses.axis is not None or devices_of(state) > 1)
    if mesh is not None and not way.owners and AxisType.Explicit not in mesh.axis_types:
        mesh = None  # XLA partitions the program of a single device
    return way, mesh


def init_over_mesh(
    config: Config, settings: Settings, mesh: Mesh | AbstractMesh, params: Any
) -> KfacState:
    """Return the state before the first step, on a mesh."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    specs = state_spec(config.way.owners)
    init = jax.shard_map(
        lambda: closed(init_state(config, settings, shapes), config.way),
        mesh=mesh,
        in_specs=(),
        out_specs=specs,
    )
    state: KfacState = jax.jit(init)()
    state = state._replace(splits=Splits(find_splits(params) or config.layers.splits))
    if not isinstance(mesh, AbstractMesh) or not jax.tree.leaves(params):
        return state
    # Under `jit` a state that depends on no argument would not be on the mesh.
    smallest = min(jax.tree.leaves(params), key=lambda leaf: leaf.size)
    return state._replace(count=state.count + 0 * jnp.any(jnp.isnan(smallest)))


def _picked(stack: jax.Array, index: np.ndarray) -> jax.Array:
    """Return `stack[index]`, or `stack` itself if the order is the same, so that XLA moves nothing."""
    return stack if np.array_equal(index, np.arange(len(stack))) else stack[index]


def _dtypes(group: Group, leaves: dict[str, jax.Array]) -> set[Any]:
    """Return the dtypes of a group's leaves; an empty set if `optax.masked` hides all of them."""
    return {
        leaves[path].dtype
        for layer in group.layers
        for path in layer.params
        if path in leaves
    }
