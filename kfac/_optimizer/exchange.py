"""Define the blocks that a device holds, and bring gradients to these blocks and the steps back.

There is a class for each form in which gradients come. `preconditioned_step` uses the classes' common interface.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import jax.numpy as jnp
import optax
from jax import Array, lax

from kfac._curvature.blocks import Group
from kfac._distributed.comm import CommContext
from kfac._distributed.owners import BlockAssignment
from kfac._factors import per_block
from kfac._leaves import leaves_by_path, map_by_path
from kfac._linalg import finite
from kfac._mesh import PyTree
from kfac._optimizer.options import Options
from kfac._optimizer.state import KfacState, Settings

# By group name: `[k]`, a number for each block, or matrices `[k, d_in, d_out]`.
Vectors = dict[str, Array]


@dataclasses.dataclass(frozen=True)
class StepContext:
    """The settings, and the blocks that a device holds.

    Attributes:
      settings: the layers and how their blocks are preconditioned.
      comm: how blocks are distributed over devices, and the communication between the devices.
      state: the state before the step or the `observe`.
    """

    settings: Settings
    comm: CommContext
    state: KfacState

    @functools.cached_property
    def assignments(self) -> dict[str, BlockAssignment]:
        """The assignment of each group's blocks to devices."""
        return self.state.settings.assignments

    @functools.cached_property
    def owns(self) -> Vectors:
        """For each group `[positions]`: whether this device owns the block there."""
        return {name: self.comm.owns(x) for name, x in self.assignments.items()}

    def skipped(self, tree: PyTree) -> dict[str, Array]:
        """Return the leaves that have no block, by path."""
        paths = self.settings.layers.skipped_paths
        return {p: x for p, x in leaves_by_path(tree).items() if p in paths}

    def only_owned(self, name: str, stack: Array) -> Array:
        """Set the blocks of a stack that this device does not own to zero."""
        return jnp.where(per_block(self.owns[name], stack), stack, 0)

    def stack(
        self,
        leaves: Mapping[str, Array],
        groups: Iterable[Group],
    ) -> Vectors:
        """Return gradients or parameters as matrices `[k, d_in, d_out]`, for all blocks of some groups."""
        matrices = {}
        for group in groups:
            dtype = self.state.blocks[group.name].weight.dtype
            matrices[group.name] = group.stack_matrices(leaves, dtype)
        return matrices

    def take(self, name: str, stack: PyTree) -> PyTree:
        """Take this device's blocks from a group's stack `[blocks, ...]` that all devices have."""
        return self.comm.take(stack, self.assignments[name])

    def product(self, a: Vectors, b: Vectors) -> Array:
        """Return the inner product of `a` and `b` over this device's own blocks."""
        total = jnp.zeros((), jnp.float32)
        for name, x in a.items():
            total += jnp.sum(self.only_owned(name, x * b[name]))
        return total

    def total_product(self, a: Vectors, b: Vectors) -> Array:
        """Return the inner product of `a` and `b` over all devices' blocks."""
        return self.comm.total(self.product(a, b))


class Gradients(NamedTuple):
    """Gradients, parameters or updates.

    Attributes:
      tree: a tree like the parameters. If there are stacks, a number for each skipped leaf instead, by path: 0 if the
        leaf is finite, otherwise NaN.
      stacks: empty, except with `SplitGradients`. Then, for each group, the owner's matrices
        `[positions, d_in, d_out]`. Outside `shard_map`, the first axis covers all devices' positions.
    """

    tree: PyTree
    stacks: Mapping[str, Array] = {}


@dataclasses.dataclass(frozen=True)
class WholeGradients(StepContext):
    r"""Each device has the averaged gradients of all blocks, and takes the gradients of its own blocks.

    ::

        gradients            own blocks          steps
        device 0: 0 1 2 3 -- 0 1 \               / 0 1 2 3
                                   precondition
        device 1: 0 1 2 3 -- 2 3 /   and gather  \ 0 1 2 3

    On a single device, this sends no messages. Subclasses change how gradients come and how steps go.

    Attributes:
      options: the options of a step.
    """

    options: Options

    def receive(self, updates: Gradients) -> tuple[Gradients, Vectors]:
        """Receive the gradients of the blocks that this device preconditions.

        Returns:
          The updates, with skipped leaves averaged over devices, and the gradients as matrices `[k, d_in, d_out]` by
          group.
        """
        return updates, self.receive_params(updates, self.settings.groups)

    def receive_params(
        self,
        params: Gradients,
        groups: Iterable[Group],
    ) -> Vectors:
        """Return the parameters of the blocks that this device preconditions, for some groups."""
        matrices = self.stack(leaves_by_path(params.tree), groups)
        return {name: self.take(name, x) for name, x in matrices.items()}

    def send(
        self,
        updates: Gradients,
        steps: Vectors,
        usable: Array,
    ) -> tuple[Gradients, Array]:
        """Return the steps in the form of `updates`, and whether the step is usable in the gradients' dtypes."""
        groups = self.settings.groups
        steps = self.comm.gather(steps, self.assignments)
        starts = starts_of(groups)
        if self.comm.alone and self.options.set_lengths:
            # Return zeros if the step is not usable. Without this `cond`, XLA for CPUs would compile the step length
            # computation again for each leaf that is cut from a stack. If it knew the starts, it would also compile
            # each cut separately.
            usable, steps, starts = lax.platform_dependent(
                usable,
                steps,
                starts,
                cpu=lambda *x: lax.cond(x[0], lambda x: x, optax.tree.zeros_like, x),
                default=lambda *same: same,
            )
        new: dict[str, Array] = {}
        for group in groups:
            new |= group.split_matrices(steps[group.name], starts)
        new, fits = narrowed(new, leaves_by_path(updates.tree))
        tree = map_by_path(lambda path, leaf: new.get(path, leaf), updates.tree)
        return Gradients(tree), usable & fits


class LocalGradients(WholeGradients):
    r"""Each device has the gradients of its share of the batch. They are averaged on the way to the owners.

    ::

        gradients            own blocks          steps
        device 0: 0 1 2 3 \ / 0 1 \               / 0 1 2 3
                           mean      precondition
        device 1: 0 1 2 3 / \ 2 3 /   and gather  \ 0 1 2 3
    """

    def receive(self, updates: Gradients) -> tuple[Gradients, Vectors]:
        leaves = leaves_by_path(updates.tree)
        leaves |= self.comm.mean(self.skipped(updates.tree))
        tree = map_by_path(lambda p, leaf: leaves[p], updates.tree)
        matrices = self.stack(leaves, self.settings.groups)
        return Gradients(tree), self.comm.means(matrices, self.assignments)


class SplitGradients(WholeGradients):
    """Over a mesh, XLA brings the averaged gradients of each block to its owner only, and the steps back.

    ::

        gradients      own blocks               steps
        device 0: 0 1 -- 0 1 -- precondition -- 0 1
        device 1: 2 3 -- 2 3 -- precondition -- 2 3
    """

    def receive_params(
        self,
        params: Gradients,
        groups: Iterable[Group],
    ) -> Vectors:
        matrices = {}
        for group in groups:
            dtype = self.state.blocks[group.name].weight.dtype
            matrices[group.name] = params.stacks[group.name].astype(dtype)
        return matrices

    def send(
        self,
        updates: Gradients,
        steps: Vectors,
        usable: Array,
    ) -> tuple[Gradients, Array]:
        own = {name: self.only_owned(name, x) for name, x in steps.items()}
        stacks, fits = narrowed(own, updates.stacks)
        return Gradients(updates.tree, stacks), usable & fits


def narrowed(
    steps: Mapping[str, Array],
    gradients: Mapping[str, Array],
) -> tuple[dict[str, Array], Array]:
    """Cast steps to their gradients' dtypes, and return whether they are finite in narrower dtypes."""
    cast = {}
    changed = []
    for name, gradient in gradients.items():
        if name in steps:
            cast[name] = steps[name].astype(gradient.dtype)
            if gradient.dtype != steps[name].dtype:
                changed.append(cast[name])
    return cast, all_finite(changed)


def all_finite(leaves: Iterable[Array]) -> Array:
    """Return whether all numbers in the leaves are finite."""
    flags = [finite(leaf, 0) for leaf in leaves]
    return jnp.all(jnp.stack([jnp.array(True), *flags]))


def starts_of(groups: Iterable[Group]) -> dict[int, Array]:
    """Return the starts for `Group.split_matrices`."""
    return {start: jnp.int32(start) for group in groups for start in group.starts}


def join(vectors: Iterable[Array]) -> Array:
    """Concatenate a zero and all groups' numbers, so that a single kernel can reduce them."""
    # Without the barrier, XLA reduces the parts separately.
    return lax.optimization_barrier(jnp.concatenate([jnp.zeros(1, bool), *vectors]))
