"""The layout of blocks in messages to or from their owners. This is arithmetic, for messages and for `plan`.

The first `full * devices` blocks of a group are easy: every device owns equally many. A device's blocks from the
groups' remainders are laid end to end in its *segment*. Segments differ in length, but a reduce-scatter or all-gather
has equal room for each device. Therefore a segment has two parts:

- The direct part is as long as the shortest segment, or 0 if a device has none. It goes straight to the owner, or
  from the owner.
- The rest of a longer segment is split into equal pieces, a piece for each device. A second message, an all-to-all,
  carries the pieces to the owner, or from the owner.

If all segments were padded to the longest, ResNet-50 on 64 devices would send 6 times its gradients' size. With pieces,
it sends 1.09 times this size. If padding adds at most `FILL` to the message, segments are padded, which saves the
second message.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping

from kfac._distributed.owners import BlockAssignment

# The number of messages for statistics. With more messages, the first is sent sooner, but segments differ more.
BUCKETS = 2
FILL = 0.02  # the largest acceptable padding, relative to the message


@dataclasses.dataclass(frozen=True)
class MessageLayout:
    """The layout of some groups' remainders.

    Attributes:
      devices: number of devices.
      starts: for each group with a remainder, where its block starts in each owner's segment, by owner.
      lengths: length of each device's segment, by device. Devices without a segment are missing.
      direct: the direct part's length. Shorter segments are padded to this length.
    """

    devices: int
    starts: dict[str, dict[int, int]]
    lengths: dict[int, int]
    direct: int

    @property
    def pieces(self) -> dict[int, int]:
        """By owner: the length of the pieces into which the rest of its segment is split."""
        pieces = {}
        for device, length in self.lengths.items():
            rest = max(0, length - self.direct)
            pieces[device] = -(-rest // self.devices)
        return pieces

    @property
    def room(self) -> int:
        """Length of a buffer that can hold any device's segment."""
        return self.direct + self.devices * self.exchanged

    @property
    def exchanged(self) -> int:
        """Elements from each device to each device in the second message: the longest piece's length."""
        return max(self.pieces.values(), default=0)

    @property
    def width(self) -> int:
        """Elements for each device in the first message: the direct part, and a piece from each segment's rest."""
        return self.direct + sum(self.pieces.values())


def lay_end_to_end(
    assignments: Mapping[str, BlockAssignment],
    sizes: Mapping[str, int],
) -> tuple[dict[str, dict[int, int]], dict[int, int]]:
    """Lay the remainders' blocks end to end on their owners.

    Args:
      assignments: how each group is dealt to devices.
      sizes: for each group, the number of elements in a block.

    Returns:
      Where each block starts in its owner's segment, by group and owner, and the length of each owner's segment.
    """
    lengths: collections.Counter[int] = collections.Counter()
    starts = {}
    # Sort the groups, because `jit` reorders the groups in a state.
    for name in sorted(sizes):
        owners = assignments[name].owners
        if owners:
            starts[name] = {device: lengths[device] for device in owners}
            lengths.update(dict.fromkeys(owners, sizes[name]))
    return starts, dict(sorted(lengths.items()))


def make_message_layout(
    assignments: Mapping[str, BlockAssignment],
    sizes: Mapping[str, int],
) -> MessageLayout:
    """Return the layout of some groups' remainders.

    Args:
      assignments: how each group is dealt to devices.
      sizes: for each group in the message, the number of elements in a block.
    """
    devices = next(iter(assignments.values())).devices
    starts, lengths = lay_end_to_end(assignments, sizes)
    direct = 0
    if len(lengths) == devices:
        message = sum(assignments[name].blocks * size for name, size in sizes.items())
        longest = max(lengths.values())
        padding = devices * longest - sum(lengths.values())
        direct = longest if padding <= FILL * message else min(lengths.values())
    return MessageLayout(devices, starts, lengths, direct)


def make_buckets(
    sizes: Mapping[str, int],
    number: int,
) -> list[list[str]]:
    """Divide the groups into buckets of about equal size, in the order in which a backward pass finishes them.

    Args:
      sizes: the groups' sizes, in the order of the groups' first uses. A backward pass finishes the groups in
        reverse order, because it reaches a group's first use last.
      number: the largest number of buckets.

    Returns:
      The group names in each bucket. Empty buckets are omitted.
    """
    buckets: list[list[str]] = [[] for _ in range(number)]
    total = max(1, sum(sizes.values()))
    seen = 0
    for name in reversed(list(sizes)):
        buckets[seen * number // total].append(name)
        seen += sizes[name]
    return [names for names in buckets if names]
