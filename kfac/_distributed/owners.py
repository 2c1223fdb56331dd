"""Who owns which block: pure arithmetic on shapes, no devices.

Blocks of equal shape form a group of `K`. They are dealt to `D` devices: device `d` owns block `p D + d` at each of its
positions `p = 0 ... full - 1`, `full = K // D`. What is left of a group, its *remainder*, goes to as many devices, one
block each at position `full`: to those whose remainders so far have the fewest elements of gradients, as these go back
and forth in every step. The most expensive groups are dealt first. No table has an entry for each device, only for each
block of a remainder.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from kfac._curvature.blocks import Group


@dataclasses.dataclass(frozen=True)
class Shard:
    """How the `blocks` of a group lie on `devices`.

    Attributes:
      blocks: `K`.
      devices: `D`.
      owners: of the blocks of the remainder, in their order.
    """

    blocks: int
    devices: int
    owners: tuple[int, ...] = ()

    @property
    def full(self) -> int:
        """Blocks that every device owns."""
        return self.blocks // self.devices

    @property
    def positions(self) -> int:
        """Length of the stacks each device holds."""
        return self.full + bool(self.owners)

    def location(self, block: int) -> tuple[int, int]:
        """Device and position of a block."""
        position, device = divmod(block, self.devices)
        return (device if position < self.full else self.owners[device]), position

    @property
    def places(self) -> np.ndarray:
        """Where each block stands in the row of all devices' positions."""
        locations = [self.location(block) for block in range(self.blocks)]
        return np.array([device * self.positions + position for device, position in locations], np.int32)

    @property
    def order(self) -> np.ndarray:
        """Which block stands at each place in that row; where there is none, the first."""
        order = np.zeros(self.devices * self.positions, np.int32)
        order[self.places] = np.arange(self.blocks)
        return order

    @property
    def held(self) -> np.ndarray:
        """`[devices, positions]`, whether there is a block at each place."""
        return np.isin(np.arange(self.devices * self.positions), self.places).reshape(self.devices, -1)


class Cost(NamedTuple):
    """What there is to do for each of the `blocks` of a group.

    Attributes:
      name: of the group.
      blocks: how many.
      work: to invert one, in `n^3`; of a diagonal factor `n`.
      elements: of the gradient of one.
    """

    name: str
    blocks: int
    work: int
    elements: int


def block_cost(name: str, blocks: int, shapes: Mapping[str, tuple[int, ...]]) -> Cost:
    """Of Kronecker blocks with factors of such shapes."""
    work = sum(shape[0] if len(shape) == 1 else shape[0] ** 3 for shape in shapes.values())
    return Cost(name, blocks, work, math.prod(shape[0] for shape in shapes.values()))


def group_costs(groups: Sequence[Group]) -> list[Cost]:
    """Of the groups whose blocks have owners."""
    return [block_cost(group.name, group.size, group.shapes) for group in groups if group.owned]


def make_shards(costs: Iterable[Cost], devices: int) -> dict[str, Shard]:
    """Spreads every group over the devices."""
    shards, load = {}, np.zeros(devices, int)
    for cost in sorted(costs, key=lambda cost: (-cost.work, cost.name)):
        least = np.sort(np.argsort(load, kind="stable")[: cost.blocks % devices])
        load[least] += cost.elements
        shards[cost.name] = Shard(cost.blocks, devices, tuple(least.tolist()))
    return shards
