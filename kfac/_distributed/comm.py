"""Communication between a step's devices, for each way to lay out a state's blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jax.flatten_util import ravel_pytree

from kfac._distributed.collectives import (
    BlockAssignments,
    gather_from_owners,
    sums_to_owners,
)
from kfac._distributed.owners import BlockAssignment
from kfac._mesh import AxisNames, PyTree, as_varying, axis_size, varying_axes
from kfac._packing import flatten, unflatten


@dataclasses.dataclass(frozen=True)
class CommContext:
    """A step's device axes, and the collectives over them.

    There are three cases:

    - Without `axes`, there is a single device.
    - With `axes` but without `owner_axes`, every device has all blocks. Statistics are averaged over the axes.
    - With `owner_axes`, each block has an owner along these axes. The other axes repeat the owners.

    Attributes:
      axes: the device axes.
      owner_axes: the axes, among `axes`, over which blocks are dealt.
    """

    axes: AxisNames = ()
    owner_axes: AxisNames = ()

    @property
    def alone(self) -> bool:
        """Whether there is a single device, so that no message is needed."""
        return not self.axes

    @property
    def devices(self) -> int:
        """Number of devices to which blocks are dealt.

        Raises:
          ValueError: the axes are not bound.
        """
        if self.axes and axis_size(self.axes) is None:
            where = "call update and observe inside jax.pmap or jax.shard_map over that axis"
            raise ValueError(f"axis_name={_name(self.axes)!r} is not bound: {where}")
        return lax.axis_size(self.owner_axes)

    def owns(self, assignment: BlockAssignment) -> Array:
        """Return for each position whether this device owns a block there, `[positions]`."""
        positions = jnp.arange(assignment.slots)
        if not assignment.owners:
            return positions < assignment.full
        owns_last = jnp.any(self._is_owner(assignment))
        return positions < assignment.full + owns_last

    def take(self, stack: PyTree, assignment: BlockAssignment) -> PyTree:
        """Take this device's blocks `[positions, ...]` from a group's stack `[blocks, ...]` that all devices have.

        A device without a block at the last position gets a copy of block 0 as a placeholder.
        """
        if not self.owner_axes:
            return stack
        index = self._blocks(assignment)
        return jax.tree.map(lambda x: x.at[index].get(mode="promise_in_bounds"), stack)

    def _is_owner(self, assignment: BlockAssignment) -> Array:
        """Return for each remainder block whether this device owns it."""
        return lax.axis_index(self.owner_axes) == np.array(assignment.owners, np.int32)

    def _blocks(self, assignment: BlockAssignment) -> Array:
        """Return this device's block at each position, `[positions]`, or 0 if there is none.

        The result is computed, because a table of all devices would grow with their number.
        """
        rounds = np.arange(assignment.full, dtype=np.int32) * assignment.devices
        blocks = lax.axis_index(self.owner_axes) + rounds
        if not assignment.owners:
            return blocks
        remainder = np.arange(assignment.full * assignment.devices, assignment.blocks)
        last = jnp.sum(jnp.where(self._is_owner(assignment), remainder, 0))
        return jnp.append(blocks, last.astype(blocks.dtype))

    def gather(
        self,
        own: Mapping[str, PyTree],
        assignments: BlockAssignments,
    ) -> dict[str, PyTree]:
        """Undo `take`: gather all blocks on all devices."""
        if not self.owner_axes or not own:
            return dict(own)
        flat = {name: flatten(stack) for name, stack in own.items()}
        blocks = gather_from_owners(flat, assignments, self.owner_axes)
        return {name: unflatten(x, own[name]) for name, x in blocks.items()}

    def means(
        self,
        stacks: Mapping[str, PyTree],
        assignments: BlockAssignments,
    ) -> dict[str, PyTree]:
        """Average stacks `[blocks, ...]` over devices, and return this device's blocks, as in `take`.

        Sums are formed in the dtype of `stacks`. The means of blocks with owners have this dtype or float32, whichever
        is wider.
        """
        flat = {}
        others = dict(stacks)
        if self.owner_axes:
            flat = {
                name: flatten(others.pop(name))
                for name in assignments
                if name in stacks
            }
        means: dict[str, PyTree] = self.mean(others)
        if not flat:
            return means
        sums = sums_to_owners(flat, assignments, self.owner_axes)
        # Owners along the other axes add up their sums.
        replicas = tuple(axis for axis in self.axes if axis not in self.owner_axes)
        if replicas:
            sums = lax.psum(sums, replicas)
        for name, x in sums.items():
            dtype = jnp.promote_types(x.dtype, jnp.float32)
            mean = x.astype(dtype) / lax.axis_size(self.axes)
            means[name] = unflatten(mean, optax.tree.cast(stacks[name], dtype))
        return means

    def mean(self, tree: PyTree) -> PyTree:
        """Average arrays over devices in a single message."""
        if self.alone or not jax.tree.leaves(tree):
            return tree
        flat, unravel = ravel_pytree(tree)
        return unravel(_reduce(lax.pmean, flat, self.axes))

    def total(self, x: Array) -> Array:
        """Sum an array over the owners' axes. Each device has computed its array from its own blocks."""
        return _reduce(lax.psum, x, self.owner_axes)

    def largest(self, x: Array) -> Array:
        """Return the maximum over the owners' axes."""
        return _reduce(lax.pmax, x, self.owner_axes)

    def agree(self, flag: Array) -> Array:
        """Return whether a flag is set on all devices along the owners' axes."""
        return _reduce(lax.pmin, flag.astype(jnp.int32), self.owner_axes) > 0

    def check(
        self,
        what: str,
        tree: PyTree,
    ) -> None:
        """Raise if arrays vary over bound axes that are not among `axes`, as far as `shard_map` tracks this."""
        axes = self.axes
        unnamed = sorted(varying_axes(tree).difference(axes))
        if axes and unnamed:
            where = f"{what} differ between the devices of {unnamed}, which axis_name={_name(axes)!r} does not name"
            names = f"pass axis_name={(*axes, *unnamed)!r}, or no Distribution"
            raise ValueError(
                f"{where}. If these have the same parameters, {names}. If not, {SPLIT_BY_HAND}"
            )


def _reduce(
    collective: Callable[..., Array],
    x: Array,
    axes: AxisNames,
) -> Array:
    """Apply a collective over axes, if there are any."""
    if not axes:
        return x
    return collective(as_varying(x, varying_axes(lax.axis_index(axes))), axes)


def check_alike(params: PyTree) -> None:
    """Raise if parameters vary between devices, as far as `shard_map` tracks this."""
    differing = sorted(varying_axes(params))
    if differing:
        raise ValueError(
            f"params differ between the devices of {differing}: {SPLIT_BY_HAND}"
        )


SPLIT_BY_HAND = (
    "each has its own part of the parameters, as in tensor, pipeline or expert parallelism, and averages would mix "
    "unrelated parts: instead of jax.shard_map use jax.jit with parameters that are sharded over a mesh"
)


def _name(axes: AxisNames) -> str | AxisNames:
    return axes[0] if len(axes) == 1 else axes
