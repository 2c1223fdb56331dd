"""Bring gradients to the devices that precondition them, and the steps back.

There is a class for each form in which gradients come. `preconditioned_step` uses the classes' common interface.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from kfac._curvature.blocks import Group
from kfac._curvature.inverse import finite
from kfac._layers import leaves_by_path, map_by_path
from kfac._optimizer.place import PyTree, Vectors
from kfac._optimizer.step_context import StepContext


class Gradients(NamedTuple):
    """Gradients, parameters or updates.

    Attributes:
      tree: a tree like the parameters, without the leaves in `stacks`. If there are stacks, a number replaces each
        skipped leaf: 0 if the leaf is finite, otherwise NaN.
      stacks: empty, except with `SplitGradients`. Then, for each group with owners, a list of stacks
        `[positions, rows, d_out]`, kernels and biases apart if possible. Joined along the rows, they are
        `[positions, d_in, d_out]`. Outside `shard_map`, the first axis covers all devices' positions.
    """

    tree: PyTree
    stacks: dict[str, list[jax.Array]]


@dataclasses.dataclass(frozen=True)
class WholeGradients(StepContext):
    r"""Each device has the averaged gradients of all blocks, and takes the gradients of its own blocks.

    ::

        gradients            own blocks          steps
        device 0: 0 1 2 3 -- 0 1 \               / 0 1 2 3
                                   precondition
        device 1: 0 1 2 3 -- 2 3 /   and gather  \ 0 1 2 3

    On a single device, this sends no messages. Subclasses change how gradients come and how steps go.
    """

    def receive(self, updates: Gradients) -> tuple[Gradients, Vectors, jax.Array]:
        """Receive the gradients of the blocks that this device preconditions.

        Returns:
          The updates, averaged over devices, except for leaves that only owners precondition; the gradients as matrices
          `[k, d_in, d_out]` by group; and the squared norm of all devices' blocks.
        """
        matrices = self.stack(updates.tree, self.config.groups)
        square = jnp.zeros((), jnp.float32)
        for x in matrices.values():
            square += jnp.sum(x * x)
        return updates, self.way.take(matrices, self.shards), square

    def receive_params(self, params: Gradients, groups: Sequence[Group]) -> Vectors:
        """Return the parameters of the blocks that this device preconditions, for some groups."""
        return self.way.take(self.stack(params.tree, groups), self.shards)

    def send(
        self, updates: Gradients, steps: Vectors, usable: jax.Array
    ) -> tuple[Gradients, jax.Array]:
        """Return the steps in the form of `updates`, and whether the step is usable in the gradients' dtypes."""
        groups = self.config.groups
        owned = {name: steps[name] for name in self.shards}
        steps = steps | self.way.gather(owned, self.shards)
        starts = starts_of(groups)
        if self.way.alone and self.config.moves.set_lengths:
            usable, steps, starts = lax.platform_dependent(
                usable, steps, starts, cpu=_if_usable, default=lambda *same: same
            )
        tree, narrowed = _split(updates.tree, groups, steps, starts)
        return Gradients(tree, {}), usable & all_finite(narrowed)

    def stack(self, tree: PyTree, groups: Iterable[Group]) -> Vectors:
        """Return gradients or parameters as matrices `[k, d_in, d_out]`, for all blocks of some groups."""
        leaves = leaves_by_path(tree)
        matrices = {}
        for group in groups:
            dtype = self.state.blocks[group.name].weight.dtype
            matrices[group.name] = group.stack_matrices(leaves, dtype)
        return matrices


class LocalGradients(WholeGradients):
    r"""Each device has the gradients of its share of the batch. They are averaged on the way to the owners.

    ::

        gradients            own blocks          steps
        device 0: 0 1 2 3 \ / 0 1 \               / 0 1 2 3
                           mean      precondition
        device 1: 0 1 2 3 / \ 2 3 /   and gather  \ 0 1 2 3
    """

    def receive(self, updates: Gradients) -> tuple[Gradients, Vectors, jax.Array]:
        leaves = leaves_by_path(updates.tree)
        rest = {p: x for p, x in leaves.items() if p not in self.config.owned_paths}
        # A single message for the leaves that all devices precondition.
        averaged = self.way.mean(rest)
        tree = map_by_path(lambda p, leaf: averaged.get(p, leaf), updates.tree)
        matrices = self.stack(tree, self.config.groups)
        owned = {name: matrices[name] for name in self.shards}
        matrices |= self.way.means(owned, self.shards)
        return Gradients(tree, {}), matrices, self.total_product(matrices, matrices)


class SplitGradients(WholeGradients):
    """Over a mesh, XLA brings the averaged gradients of each block to its owner only, and the steps back.

    ::

        gradients      own blocks               steps
        device 0: 0 1 -- 0 1 -- precondition -- 0 1
        device 1: 2 3 -- 2 3 -- precondition -- 2 3
    """

    def receive(self, updates: Gradients) -> tuple[Gradients, Vectors, jax.Array]:
        matrices = self.receive_params(updates, self.config.groups)
        return updates, matrices, self.total_product(matrices, matrices)

    def receive_params(self, params: Gradients, groups: Sequence[Group]) -> Vectors:
        matrices = self.stack(params.tree, [x for x in groups if not x.owned])
        for name, parts in params.stacks.items():
            dtype = self.state.blocks[name].weight.dtype
            matrices[name] = jnp.concatenate(parts, axis=1).astype(dtype)
        return matrices

    def send(
        self, updates: Gradients, steps: Vectors, usable: jax.Array
    ) -> tuple[Gradients, jax.Array]:
        shared = self.config.shared
        tree, narrowed = _split(updates.tree, shared, steps, starts_of(shared))
        stacks = {}
        for name, old in updates.stacks.items():
            ends = np.cumsum([x.shape[1] for x in old])
            parts = jnp.split(steps[name], ends[:-1], axis=1)
            stacks[name] = [x.astype(y.dtype) for x, y in zip(parts, old, strict=True)]
            for x in stacks[name]:
                if x.dtype != steps[name].dtype:
                    narrowed.append(self.only_owned(name, x))
        return Gradients(tree, stacks), usable & all_finite(narrowed)


def all_finite(leaves: Iterable[jax.Array], also: jax.Array | bool = True) -> jax.Array:
    """Return whether all numbers in the leaves are finite, and `also` is true."""
    flags = [finite(leaf, 0) for leaf in leaves]
    return jnp.all(also & jnp.stack([jnp.array(True), *flags]))


def starts_of(groups: Iterable[Group]) -> dict[int, jax.Array]:
    """Return the starts for `Group.split_matrices`."""
    return {start: jnp.int32(start) for group in groups for start in group.starts}


def _split(
    tree: PyTree,
    groups: Iterable[Group],
    steps: Vectors,
    starts: Mapping[int, jax.Array],
) -> tuple[PyTree, list[jax.Array]]:
    """Put the steps of some groups into a tree of gradients.

    Returns:
      The tree, and its leaves with a narrower dtype than the steps. A finite step may be too large for this dtype.
    """
    new: dict[str, jax.Array] = {}
    for group in groups:
        new |= group.split_matrices(steps[group.name], starts)
    narrowed = []

    def replace(path, leaf):
        if path not in new:
            return leaf
        step = new[path].astype(leaf.dtype)
        if step.dtype != new[path].dtype:
            narrowed.append(step)
        return step

    return map_by_path(replace, tree), narrowed


def _if_usable(
    usable: jax.Array, stacks: Vectors, starts: dict[int, jax.Array]
) -> tuple[jax.Array, Vectors, dict[int, jax.Array]]:
    """Return the arguments if the step is usable, otherwise zeros.

    Without this `cond`, XLA for CPUs would compile the step length computation again for each leaf that is cut from a
    stack. If it knew the values of `starts`, it would also compile each cut separately.
    """
    arguments = usable, stacks, starts
    return lax.cond(usable, lambda x: x, optax.tree.zeros_like, arguments)
