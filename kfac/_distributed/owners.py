"""Assign blocks to the devices that own them. This is arithmetic on shapes and needs no devices.

The `K` blocks of equal shape form a group. They are dealt to `D` devices. With `full = K // D`, device `d` owns block
`p D + d` at each of its positions `p = 0 ... full - 1`.

The last `K % D` blocks are the group's *remainder*. They go to as many devices, a block for each, at position `full`.
Gradients travel in every step, so the devices are chosen whose earlier remainder blocks have the fewest gradient
elements. The most expensive groups are dealt first. Seven blocks on three devices::

    position     0   1   2
    device 0     0   3
    device 1     1   4   6    the remainder; device 0 already has one of another group
    device 2     2   5

A `BlockAssignment` has an entry for each remainder block, but no entry for each device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from kfac._curvature.blocks import Group


@dataclasses.dataclass(frozen=True)
class BlockAssignment:
    """How the blocks of a group are dealt to devices.

    A *slot* is a position on a device. Slots are numbered device by device: `device * slots + position`.

    Attributes:
      blocks: the number `K` of blocks.
      devices: the number `D` of devices.
      owners: the owner of each remainder block, in block order.
    """

    blocks: int
    devices: int
    owners: tuple[int, ...] = ()

    @property
    def full(self) -> int:
        """Number of blocks that every device owns."""
        return self.blocks // self.devices

    @property
    def slots(self) -> int:
        """Stack length on each device: `full`, or `full + 1` if there is a remainder."""
        return self.full + bool(self.owners)

    def location(self, block: int) -> tuple[int, int]:
        """Return a block's device and position."""
        position, device = divmod(block, self.devices)
        if position == self.full:
            device = self.owners[device]
        return device, position

    @property
    def block_to_slot(self) -> np.ndarray:
        """Each block's slot, `[blocks]`."""
        slots = np.zeros(self.blocks, np.int32)
        for block in range(self.blocks):
            device, position = self.location(block)
            slots[block] = device * self.slots + position
        return slots

    @property
    def slot_to_block(self) -> np.ndarray:
        """The block in each slot, `[devices * slots]`. An empty slot has block 0."""
        slot_to_block = np.zeros(self.devices * self.slots, np.int32)
        slot_to_block[self.block_to_slot] = np.arange(self.blocks)
        return slot_to_block

    @property
    def slot_mask(self) -> np.ndarray:
        """Whether each slot holds a block, `[devices, slots]`."""
        slot_mask = np.zeros(self.devices * self.slots, bool)
        slot_mask[self.block_to_slot] = True
        return slot_mask.reshape(self.devices, -1)


class Cost(NamedTuple):
    """The work and the size of each block in a group.

    Attributes:
      name: the group's name.
      blocks: number of blocks.
      work: work to refresh a block: `n^3` for a factor `[n, n]`, `n` for a diagonal factor.
      elements: number of elements in a block's gradient.
    """

    name: str
    blocks: int
    work: int
    elements: int


def group_costs(groups: Sequence[Group]) -> list[Cost]:
    """Return the costs of the groups whose blocks have owners."""
    costs = []
    for group in groups:
        if group.owned:
            work = 0
            for size, *others in group.shapes.values():
                work += size**3 if others else size
            costs.append(Cost(group.name, group.size, work, group.d_in * group.d_out))
    return costs


def assign_blocks(
    costs: Iterable[Cost],
    devices: int,
) -> dict[str, BlockAssignment]:
    """Deal every group's blocks to devices, and return the assignments by group name."""
    assignments = {}
    load = np.zeros(devices, int)
    for cost in sorted(costs, key=lambda cost: (-cost.work, cost.name)):
        least = np.sort(np.argsort(load, kind="stable")[: cost.blocks % devices])
        load[least] += cost.elements
        assignments[cost.name] = BlockAssignment(
            cost.blocks, devices, tuple(least.tolist())
        )
    return assignments
