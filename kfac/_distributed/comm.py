"""Messages between devices and block owners.

A group's first blocks are dealt evenly, so a reduce-scatter or an all-gather moves them. XLA combines these messages.

A device has at most one remainder block in each round (see `owners`). A reduce-scatter or all-gather of whole blocks
would need room for the largest of them on every device: ResNet-50 on 64 devices would send 6 times the gradients'
size. Instead each block is cut into a share for each device. The reduce-scatter gives device `d` the share `d` of all
blocks, and an all-to-all takes the shares to the owners. To gather, the same two messages go backwards. Blocks `a` and
`b` of two groups on three devices::

              before            reduce-scatter     all-to-all
    device 0  a0 a1 a2 b0 b1 b2      a0 b0         a0 a1 a2
    device 1  a0 a1 a2 b0 b1 b2      a1 b1         b0 b1 b2
    device 2  a0 a1 a2 b0 b1 b2      a2 b2
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.flatten_util import ravel_pytree

from kfac._distributed.owners import (
    BlockAssignment,
    BlockAssignments,
    lay_out_rounds,
)
from kfac._mesh import AxisNames, PyTree, as_varying, axis_size, varying_axes
from kfac._packing import cut, flatten, pad_to_devices, unflatten


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
            raise ValueError(f"axis_name={name_of(self.axes)!r} is not bound: {where}")
        return lax.axis_size(self.owner_axes)

    def owns(self, assignment: BlockAssignment) -> Array:
        """Return for each position whether this device owns a block there, `[positions]`."""
        full = jnp.ones(assignment.full, bool)
        if not assignment.rest:
            return full
        number = lax.axis_index(self.owner_axes) - assignment.first
        return jnp.append(full, (number >= 0) & (number < assignment.rest))

    def take(self, stack: PyTree, assignment: BlockAssignment) -> PyTree:
        """Take this device's blocks `[positions, ...]` from a group's stack `[blocks, ...]` that all devices have.

        A device without a block at the last position gets a copy of block 0 as a placeholder.
        """
        if not self.owner_axes:
            return stack
        device = lax.axis_index(self.owner_axes)
        index = device * assignment.full + np.arange(assignment.full, dtype=np.int32)
        if assignment.rest:
            before = assignment.full * assignment.devices - assignment.first
            index = jnp.append(index, device + before)
        # The result is computed, because a table of all devices would grow with their number.
        index = jnp.where(self.owns(assignment), index, 0)
        return jax.tree.map(lambda x: x.at[index].get(mode="promise_in_bounds"), stack)

    def gather(
        self,
        own: Mapping[str, PyTree],
        assignments: BlockAssignments,
        to: str | None = None,
    ) -> dict[str, PyTree]:
        """Undo `take`: gather all blocks on all devices.

        Args:
          own: this device's blocks `[positions, ...]` for each group. Empty positions may have any numbers.
          assignments: how each group is dealt to devices.
          to: whether `shard_map` marks the result as `"invarying"` or `"varying"` over devices. None: as invarying, if
            `shard_map` tracks this.
        """
        owners = self.owner_axes
        if not owners or not own:
            return dict(own)
        if to is None:
            to = "invarying" if varying_axes(lax.axis_index(owners)) else "varying"
        owned = {name: flatten(stack) for name, stack in own.items()}
        gathered: dict[str, list[Array]] = {}
        shares = {}
        for name, x in owned.items():
            assignment = assignments[name]
            gathered[name] = []
            if assignment.full:
                full = x[: assignment.full]
                gathered[name].append(lax.all_gather(full, owners, tiled=True, to=to))
            if assignment.rest:
                last = jnp.where(self.owns(assignment)[-1], x[-1:], 0)
                last = pad_to_devices(last, self.devices)
                shares[name] = last.reshape(self.devices, -1)
        if shares:
            # Row `d` holds this device's share of device `d`'s blocks.
            places, rows = in_rounds(shares, assignments)
            rows = lax.all_to_all(rows, owners, 0, 0, tiled=True)
            of_all = {n: rows[assignments[n].owners, places[n]] for n in shares}
            flat = jnp.concatenate([x.reshape(-1) for x in of_all.values()])
            flat = lax.all_gather(flat, owners, to=to)
            parts = cut(flat, [x.size for x in of_all.values()])
            for (name, x), part in zip(of_all.items(), parts, strict=True):
                blocks = part.reshape(-1, *x.shape).swapaxes(0, 1).reshape(len(x), -1)
                gathered[name].append(blocks[:, : owned[name].shape[1]])
        whole = {name: jnp.concatenate(parts) for name, parts in gathered.items()}
        return {name: unflatten(x, own[name]) for name, x in whole.items()}

    def means(
        self,
        stacks: Mapping[str, PyTree],
        assignments: BlockAssignments,
    ) -> dict[str, PyTree]:
        """Average stacks `[blocks, ...]` over devices, and return this device's blocks, as in `take`.

        Sums are formed in the dtype of `stacks`. The means of blocks with owners have this dtype or float32, whichever
        is wider. Empty positions get zeros.
        """
        stacks = dict(stacks)
        if not self.owner_axes:
            return self.mean(stacks)
        own = {}
        for name, stack in stacks.items():
            slots = assignments[name].slots
            own[name] = jax.tree.map(
                lambda x, slots=slots: jnp.zeros((slots, *x.shape[1:]), x.dtype), stack
            )
        axes = varying_axes((stacks, lax.axis_index(self.owner_axes)))
        own, stacks = as_varying((own, stacks), axes)
        # The transpose of a gather sums blocks at their owners: all-gathers become reduce-scatters.
        gather = functools.partial(self.gather, assignments=assignments, to="varying")
        (sums,) = jax.linear_transpose(gather, own)(stacks)
        # Owners along the other axes add up their sums.
        replicas = tuple(axis for axis in self.axes if axis not in self.owner_axes)
        if replicas:
            sums = lax.psum(sums, replicas)

        def mean(x):
            dtype = jnp.promote_types(x.dtype, jnp.float32)
            return x.astype(dtype) / lax.axis_size(self.axes)

        return jax.tree.map(mean, sums)

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

    def check(
        self,
        what: str,
        tree: PyTree,
    ) -> None:
        """Raise if arrays vary over bound axes that are not among `axes`, as far as `shard_map` tracks this."""
        axes = self.axes
        unnamed = sorted(varying_axes(tree).difference(axes))
        if axes and unnamed:
            where = f"{what} differ between the devices of {unnamed}, which axis_name={name_of(axes)!r} does not name"
            names = f"pass axis_name={(*axes, *unnamed)!r}, or no Distribution"
            raise ValueError(
                f"{where}. If these have the same parameters, {names}. If not, {SPLIT_BY_HAND}"
            )


class Everywhere(CommContext):
    """The view outside `shard_map` and `pmap`, where stacks have the positions of all devices."""

    def owns(self, assignment: BlockAssignment) -> Array:
        return jnp.asarray(assignment.slot_mask.reshape(-1))


def in_rounds(
    blocks: Mapping[str, Array],
    assignments: BlockAssignments,
) -> tuple[dict[str, slice], Array]:
    """Lay blocks out in rows, as `lay_out_rounds` says.

    Args:
      blocks: `[n, elements]` for each group with a remainder. In a round, a row has a single group's block, and zeros
        for all other groups.
      assignments: how each group is dealt to devices.

    Returns:
      The place of each group's block in a row, and the rows `[n, length]`.
    """
    sizes = {name: x.shape[1] for name, x in blocks.items()}
    places, length = lay_out_rounds(assignments, sizes)
    padded = []
    for name, place in places.items():
        widths = ((0, 0), (place.start, length - place.stop))
        padded.append(jnp.pad(blocks[name], widths))
    return places, sum(padded[1:], padded[0])


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


def name_of(axes: AxisNames) -> str | AxisNames:
    """Return the axes as a user writes them: a single name without its tuple."""
    return axes[0] if len(axes) == 1 else axes
