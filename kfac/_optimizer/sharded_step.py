"""Run the step and `observe` under `jit` over a mesh, by opening a `shard_map`.

If gradients are split over the mesh, as in FSDP or tensor parallelism, this module lays out each group's stack over its
owners. XLA moves the leaves to the owners and the results back. It uses an all-to-all if the leaves are split over the
same devices.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from kfac._curvature.blocks import Group
from kfac._distributed.owners import BlockAssignment
from kfac._factors import Factors, Packed
from kfac._layers import Layer
from kfac._leaves import leaves_by_path, map_by_path
from kfac._linalg import finite
from kfac._mesh import PyTree, replicated, reshard_like, with_auto_axes
from kfac._optimizer.averages import (
    BatchStacks,
    observe_here,
    stack_statistics,
)
from kfac._optimizer.exchange import (
    Gradients,
    SplitGradients,
    StepContext,
    WholeGradients,
    starts_of,
)
from kfac._optimizer.options import Options
from kfac._optimizer.state import KfacState, state_spec
from kfac._optimizer.step import preconditioned_step
from kfac._optimizer.step_scaling import StepScalars
from kfac._packing import pad_to_devices


@dataclasses.dataclass(frozen=True)
class ShardedStep(StepContext):
    """The step and `observe` over a mesh.

    Attributes:
      mesh: the mesh.
    """

    mesh: Mesh | AbstractMesh

    @functools.cached_property
    def param_specs(self) -> dict[str, PartitionSpec]:
        """The `PartitionSpec`s of leaves by path. On explicit axes, the leaves' types contain them.

        They come from `init`, or from `find_layers` if `init` found no split parameters.
        """
        if all(kind == AxisType.Explicit for kind in self.mesh.axis_types):
            return {}
        settings = self.state.settings
        return dict(settings.param_specs or settings.layers.param_specs)

    @property
    def owner_axes(self) -> tuple[str, ...]:
        """The axes over which blocks are dealt."""
        return self.comm.owner_axes

    def step(
        self,
        options: Options,
        updates: PyTree,
        params: PyTree | None,
        now: StepScalars,
    ) -> tuple[PyTree, KfacState]:
        """Run `preconditioned_step` on every device.

        Args:
          options: the options of the step.
          updates: the gradients.
          params: the parameters, or None if step lengths do not depend on them.
          now: the scalars of the step.

        Returns:
          The steps and the state after the step. The steps keep the shardings of `updates` on explicit axes.
        """
        split = self.is_split(updates)
        form = SplitGradients if split else WholeGradients

        def local(updates, params, state, now):
            device = form(self.settings, self.comm, state, options)
            return preconditioned_step(device, updates, params, now)

        def lay_out(tree):
            return self.to_owners(tree) if split else Gradients(replicated(tree))

        specs: Any = Gradients(PartitionSpec(), PartitionSpec(self.owner_axes))  # type: ignore[arg-type]
        states = state_spec(self.owner_axes)
        step = jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=(specs, specs, states, PartitionSpec()),
            out_specs=(specs, states),
        )
        weights = Gradients(None)
        if params is not None:
            weights = lay_out(params)
        new, state = step(lay_out(updates), weights, self.state, now)
        if split:
            return self.from_owners(new, updates), state
        return reshard_like(new.tree, updates), state

    def observe(self, factors: Factors | None) -> KfacState:
        """Run `observe_here` on every device; with `factors=None` refresh the preconditioners only."""
        states = state_spec(self.owner_axes)
        over = PartitionSpec(self.owner_axes)
        stacks = None
        if factors is not None:
            specs = dict.fromkeys(self.assignments, over)
            stacks = with_auto_axes(self.statistics_to_owners, specs)(factors)
        observe = jax.shard_map(
            functools.partial(observe_here, self.comm),
            mesh=self.mesh,
            in_specs=(states, over),
            out_specs=states,
        )
        return observe(self.state, stacks)

    def owned(self, tree: PyTree) -> dict[str, Array]:
        """Return the leaves that have an owner, by path."""
        skipped = self.settings.layers.skipped_paths
        return {p: x for p, x in leaves_by_path(tree).items() if p not in skipped}

    def is_split(self, updates: PyTree) -> bool:
        """Return whether each gradient is sent to its owner only, instead of being replicated.

        This is the case if a leaf is split, all owner axes have the same type (automatic or explicit), and the leaves
        in each stack share a dtype.
        """
        kinds = dict(zip(self.mesh.axis_names, self.mesh.axis_types, strict=True))
        if len({kinds[name] for name in self.owner_axes}) != 1:
            return False
        leaves = self.owned(updates)
        if any(len(_dtypes(group, leaves)) > 1 for group in self.settings.groups):
            return False
        for path, leaf in leaves.items():
            if any(self.param_specs.get(path, jax.typeof(leaf).sharding.spec)):
                return True
        return False

    def statistics_to_owners(self, factors: Factors) -> BatchStacks:
        """Stack packed statistics and gradients for `observe_here`, in their owners' slots."""
        gradients = {p: self.like_param(p, x) for p, x in factors.gradients.items()}
        stacks = stack_statistics(self, Factors(factors, gradients))
        for name, assignment in self.assignments.items():
            stack = stacks[name]
            if isinstance(stack, Packed):
                stack = jax.tree.map(self.over_elements, stack)
            stacks[name] = self.over_owners(stack, assignment)
        return stacks

    def over_elements(self, packed: Array) -> Array:
        """Split packed statistics `[blocks, 1, elements]` over all devices along their elements.

        This is how they come from the reduce-scatter. XLA moves them from here to their owners by an all-to-all.
        Without the constraint, it would look for a layout before layers' copies and pieces became one axis of blocks,
        find no such message, and gather all blocks on every device.
        """
        padded = pad_to_devices(packed, self.mesh.size)
        return self.lying(padded, None, None, self.mesh.axis_names)

    def to_owners(self, tree: PyTree) -> Gradients:
        """Stack gradients or parameters.

        Blocks lie in their owners' slots. The tree has a scalar for each skipped leaf: 0 if the leaf is finite,
        otherwise NaN.
        """
        # Lay gradients out like the parameters first. Otherwise XLA would sum the gradients from each use of a leaf,
        # and from each iteration of a scan, on every device.
        tree = map_by_path(self.like_param, tree)
        flags = {}
        for path, leaf in self.skipped(tree).items():
            flags[path] = replicated(jnp.where(finite(leaf, 0), 0.0, jnp.nan))

        def before_cut(layer, matrix):
            return self.lying(matrix, None, *self.across(layer))

        def stacked(owned):
            stacks = {}
            for group in self.settings.groups:
                dtype = jnp.result_type(*(_dtypes(group, owned) or [jnp.float32]))
                matrices = group.stack_matrices(owned, dtype, before_cut)
                assignment = self.assignments[group.name]
                stacks[group.name] = self.over_owners(matrices, assignment)
            return stacks

        over = PartitionSpec(self.owner_axes)
        return Gradients(flags, with_auto_axes(stacked, over)(self.owned(tree)))

    def from_owners(self, new: Gradients, updates: PyTree) -> PyTree:
        """Return the steps in the structure and layout of `updates`; skipped leaves are unchanged.

        This is the inverse of `to_owners`.

        Args:
          new: the steps of all blocks.
          updates: the gradients.
        """
        owned = self.owned(updates)

        def cut(stacks):
            leaves: dict[str, Array] = {}
            for group in self.settings.groups:
                d_out, d_in = self.across(group.layers[0])
                # Move blocks from their owners before the stack is cut. XLA chooses the axes that `across` leaves free,
                # and knows how the leaves lie.
                stack = self.lying(stacks[group.name], None, d_in, d_out)
                blocks = _picked(stack, self.assignments[group.name].block_to_slot)
                leaves |= group.split_matrices(blocks, starts_of([group]))
            return {p: leaves[p].astype(leaf.dtype) for p, leaf in owned.items()}

        steps = with_auto_axes(cut, owned)(new.stacks)

        def back(path, leaf):
            return self.like_param(path, steps[path]) if path in steps else leaf

        return map_by_path(back, updates)

    def across(self, layer: Layer) -> tuple[Any, Any]:
        """Return the specs of a kernel's `d_out` and `d_in` axes while the kernel is cut into pieces for its owners.

        A kernel that is cut along a single axis is split over devices along the other axis, so that each device cuts
        only its own part. If the devices do not divide the other axis, or both axes are cut, XLA chooses the layout.
        """
        free = PartitionSpec.UNCONSTRAINED
        devices = math.prod(self.mesh.shape[name] for name in self.owner_axes)
        if layer.num_blocks[0] == 1 < layer.num_blocks[1] and layer.d_in % devices == 0:
            return None, self.owner_axes
        if (
            layer.num_blocks[1] == 1 < layer.num_blocks[0]
            and layer.d_out % devices == 0
        ):
            return self.owner_axes, None
        return free, free

    def over_owners(self, stacks: PyTree, assignment: BlockAssignment) -> PyTree:
        """Reorder blocks `[k, ...]` into slot order, device-major, and split them over the owners."""

        def deal(x):
            return self.lying(_picked(x, assignment.slot_to_block), self.owner_axes)

        return jax.tree.map(deal, stacks)

    def like_param(self, path: str, x: Array) -> Array:
        """Lay a leaf out like its parameter, if this layout is known."""
        spec = self.param_specs.get(path)
        return x if spec is None else self.lying(x, *spec)

    def lying(self, x: Array, *spec: Any) -> Array:
        """Constrain an array's layout to `spec`."""
        # Inside `with_auto_axes` the current mesh is this mesh with its explicit axes made automatic.
        around = jax.sharding.get_abstract_mesh()
        mesh = self.mesh if around.empty else around
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return lax.with_sharding_constraint(x, sharding)


def _picked(stack: Array, index: np.ndarray) -> Array:
    """Return `stack[index]`, or `stack` itself if the order is the same, so that XLA moves nothing."""
    return stack if np.array_equal(index, np.arange(len(stack))) else stack[index]


def _dtypes(group: Group, leaves: dict[str, Array]) -> set[jnp.dtype]:
    """Return the dtypes of a group's leaves; an empty set if `optax.masked` hides all of them."""
    paths = [path for layer in group.layers for path in layer.params]
    return {leaves[path].dtype for path in paths if path in leaves}
