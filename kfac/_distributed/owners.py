"""Assign blocks to the devices that own them. This is arithmetic on shapes and needs no devices.

The `K` blocks of equal shape form a group. They are dealt to `D` devices: each owns `K // D` neighbouring blocks. The
last `K % D` blocks are the group's *remainder*. They go to as many neighbouring devices, a block for each. Remainders
of several groups fill a *round*, in which a device has at most one block. Seven blocks of `a`, two of `b` and one of
`c` on three devices::

                device 0   device 1   device 2
    stack a     a0 a1      a2 a3      a4 a5
    round 0     b0         b1         a6
    round 1                           c0

The most expensive remainders are dealt first, each in the first round that has room. So the blocks in a round have
similar sizes, and a round needs no more memory on each device than its largest block.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np

from kfac._curvature.blocks import Group


@dataclasses.dataclass(frozen=True)
class BlockAssignment:
    """How the blocks of a group are dealt to devices.

    A *slot* is a position on a device. Slots are numbered device by device: `device * slots + position`. A remainder
    block has the last position.

    Attributes:
      blocks: the number `K` of blocks.
      devices: the number `D` of devices.
      round: the round of the remainder.
      first: the first owner of a remainder block.
    """

    blocks: int
    devices: int
    round: int = 0
    first: int = 0

    @property
    def full(self) -> int:
        """Number of blocks that every device owns."""
        return self.blocks // self.devices

    @property
    def rest(self) -> int:
        """Number of remainder blocks."""
        return self.blocks % self.devices

    @property
    def slots(self) -> int:
        """Stack length on each device: `full`, or `full + 1` if there is a remainder."""
        return self.full + bool(self.rest)

    @property
    def owners(self) -> slice:
        """The devices that own the remainder blocks, in block order."""
        return slice(self.first, self.first + self.rest)

    @property
    def block_to_slot(self) -> np.ndarray:
        """Each block's slot, `[blocks]`."""
        by_device = np.arange(self.devices * self.slots).reshape(self.devices, -1)
        stack = by_device[:, : self.full].reshape(-1)
        return np.append(stack, by_device[self.owners, self.full :])

    @property
    def slot_to_block(self) -> np.ndarray:
        """The block in each slot, `[devices * slots]`. An empty slot has block 0."""
        slot_to_block = np.zeros(self.devices * self.slots, int)
        slot_to_block[self.block_to_slot] = np.arange(self.blocks)
        return slot_to_block

    @property
    def slot_mask(self) -> np.ndarray:
        """Whether each slot holds a block, `[devices, slots]`."""
        slot_mask = np.zeros(self.devices * self.slots, bool)
        slot_mask[self.block_to_slot] = True
        return slot_mask.reshape(self.devices, -1)


BlockAssignments = Mapping[str, BlockAssignment]


def assign_blocks(
    groups: Iterable[Group],
    devices: int,
) -> dict[str, BlockAssignment]:
    """Deal every group's blocks to devices, and return the assignments by group name."""
    assignments = {}
    used: list[int] = []  # the number of devices with a block, for each round
    for group in sorted(groups, key=lambda group: (-group.work, group.name)):
        rest = group.size % devices
        rooms = (k for k, count in enumerate(used) if count + rest <= devices)
        number = next(rooms, len(used))
        if number == len(used):
            used.append(0)
        first = used[number]
        # The first devices have the largest blocks of the first round, so other rounds start from the other end.
        if number > 0:
            first = devices - first - rest
        assignments[group.name] = BlockAssignment(group.size, devices, number, first)
        used[number] += rest
    return assignments


def lay_out_rounds(
    assignments: BlockAssignments,
    sizes: Mapping[str, int],
) -> tuple[dict[str, slice], int]:
    """Lay the rounds end to end in a row on each device. In a round, every block starts at the same place.

    Args:
      assignments: how each group is dealt to devices.
      sizes: the number of elements in a block, for each group in the row. Each has a remainder.

    Returns:
      The place of each group's remainder block in its owner's row, and the row's length.
    """
    widths: collections.Counter[int] = collections.Counter()
    for name, size in sizes.items():
        number = assignments[name].round
        widths[number] = max(widths[number], size)
    starts = {}
    length = 0
    for number in sorted(widths):
        starts[number] = length
        length += widths[number]
    places = {}
    for name, size in sizes.items():
        start = starts[assignments[name].round]
        places[name] = slice(start, start + size)
    return places, length
