"""How blocks lie in a message to or from their owners: pure arithmetic, for messages and for the plan of a run.

Blocks of which every device owns as many need no thought. Those of the remainders stand end to end in the *segment* of
their owner. Segments differ in length, and messages have the same room for all devices; so the part that all segments
have goes straight to the owners, or from them. What is left of the longer ones goes by way of all devices, a piece
each, in a second message between pieces and owners. Were all segments filled up to the longest, ResNet-50 on 64 devices
would send six times its gradients; by the way of the pieces it is 1.09 times. Where filling up adds next to nothing it
saves the second message.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping

from kfac._distributed.owners import Shard

BUCKETS = 2  # messages of statistics; the more, the sooner the first, and the more unequal the segments of each
FILL = 0.02  # so much of a message may be there to fill up segments


@dataclasses.dataclass(frozen=True)
class Segments:
    """Where the remainders of some groups lie.

    Attributes:
      devices: how many.
      starts: of each group with a remainder, by owner, where its block begins in the owner's segment.
      lengths: of the segments, by device; of those alone that own such a block.
      direct: the length of the part that goes straight to the owners, filled up in segments that are shorter.
    """

    devices: int
    starts: dict[str, dict[int, int]]
    lengths: dict[int, int]
    direct: int

    @property
    def pieces(self) -> dict[int, int]:
        """The length of each device's piece of the rest of a segment, by the device that the segment belongs to."""
        return {d: -(-max(0, length - self.direct) // self.devices) for d, length in self.lengths.items()}

    @property
    def room(self) -> int:
        """Elements from which every segment can be cut, in whatever way it came."""
        return self.direct + self.devices * self.exchanged

    @property
    def exchanged(self) -> int:
        """What each device sends each other in the second message: as much as the longest of the pieces."""
        return max(self.pieces.values(), default=0)

    @property
    def width(self) -> int:
        """What there is for each device in the first message."""
        return self.direct + sum(self.pieces.values())


def lay_end_to_end(
    shards: Mapping[str, Shard], sizes: Mapping[str, int]
) -> tuple[dict[str, dict[int, int]], collections.Counter[int]]:
    """Where the remainders begin, by group and owner, and how long the segment of each owner is.

    Blocks of each group have as many elements as `sizes` say.
    """
    lengths: collections.Counter[int] = collections.Counter()
    starts = {}
    for name, size in sorted(sizes.items()):  # `jit` gives the groups of a state back in another order than `init` had
        if shards[name].owners:
            starts[name] = {device: lengths[device] for device in shards[name].owners}
            lengths.update(dict.fromkeys(shards[name].owners, size))
    return starts, collections.Counter(dict(sorted(lengths.items())))


def make_segments(shards: Mapping[str, Shard], sizes: Mapping[str, int]) -> Segments:
    """The segments of groups, of whose blocks each has as many elements as `sizes` say."""
    devices = next(iter(shards.values())).devices
    starts, lengths = lay_end_to_end(shards, sizes)
    shortest, longest = (0, 0) if len(lengths) < devices else (min(lengths.values()), max(lengths.values()))
    total = sum(shards[name].blocks * size for name, size in sizes.items())
    filled = devices * longest - lengths.total()
    return Segments(devices, starts, dict(lengths), longest if filled <= FILL * total else shortest)


def make_buckets(sizes: Mapping[str, int], number: int) -> list[list[str]]:
    """The groups in a `number` of buckets of about equal size, in the order in which a backward pass has finished them.

    Groups stand in the order of their first uses, which are the last that it comes to.
    """
    buckets: list[list[str]] = [[] for _ in range(number)]
    total, seen = max(1, sum(sizes.values())), 0
    for name in reversed(list(sizes)):
        buckets[seen * number // total].append(name)
        seen += sizes[name]
    return [names for names in buckets if names]
