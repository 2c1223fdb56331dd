"""Which images make up which batch, and what a batch is.

Every batch is a function of (seed, step) alone, whatever the number of processes and of workers, so a
resumed run sees what an uninterrupted one would have seen.
"""

import functools
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

# Streams of random numbers that must not coincide.
ORDER, AUGMENT = 0, 1

# Of a step and the run: what the random numbers of an augmentation depend on besides the image.
Key = tuple[int, int]


class Batch(NamedTuple):
    """What a step needs: `images` uint8 [n, h, w, c], `labels` int32 [n], `weights` float32 [n].

    A weight of zero marks what is only there to fill the batch. `broken` names the files that
    could not be read.
    """

    images: Any
    labels: Any
    weights: Any
    broken: tuple[str, ...] = ()


@functools.lru_cache(maxsize=2)
def epoch_order(seed: int, epoch: int, images: int) -> np.ndarray:
    """The order of the images in one epoch."""
    return np.random.default_rng([seed, ORDER, epoch]).permutation(images)


@dataclass(frozen=True)
class Plan:
    """Batches of `size` images out of `images`, of which this process loads the positions `rows`.

    With a seed: the steps `start` to `stop` of a training; each epoch has a new order and leaves its remainder
    out. Without: every image once, in order.
    """

    images: int
    size: int
    rows: np.ndarray
    seed: int | None = None
    start: int = 0
    stop: int = 0

    def __len__(self) -> int:
        return -(-self.images // self.size) if self.seed is None else self.stop - self.start

    def key(self, number: int) -> Key | None:
        """What the augmentation of batch `number` depends on; None for none."""
        return None if self.seed is None else (self.seed, self.start + number)

    def indices(self, number: int) -> np.ndarray:
        """The images of batch `number`, of all processes; beyond the last image is what only fills the batch."""
        if self.seed is None:
            return np.arange(number * self.size, (number + 1) * self.size)
        epoch, position = divmod(self.start + number, self.images // self.size)
        return epoch_order(self.seed, epoch, self.images)[position * self.size : (position + 1) * self.size]


class Split(Protocol):
    """Training or validation images."""

    def __len__(self) -> int: ...

    def batches(self, plan: Plan) -> Generator[Batch]:
        """This process's rows of all batches of `plan`, in order."""
        ...


class Dataset(NamedTuple):
    """The two splits and what the network has to know about them."""

    name: str
    train: Split
    val: Split
    shape: tuple[int, int, int]
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    fingerprint: int
    note: str = ""

    def found(self) -> dict[str, Any]:
        """What must not change when a run is resumed."""
        return {
            "training images": len(self.train), "validation images": len(self.val),
            "classes": self.num_classes, "fingerprint": self.fingerprint,
        }  # fmt: skip


class ArraySplit:
    """Images in memory; augmented by shifts of up to `shift` pixels and, if `flip`, mirrored.

    `length` may exceed the number of images, which are then repeated.
    """

    def __init__(
        self, images: np.ndarray, labels: np.ndarray, *, shift: int = 0, flip: bool = False,
        length: int | None = None,
    ) -> None:  # fmt: skip
        self.images, self.labels = images, labels.astype(np.int32)
        self.shift, self.flip = shift, flip
        self.length = len(images) if length is None else length

    def __len__(self) -> int:
        return self.length

    def batches(self, plan: Plan) -> Generator[Batch]:
        """See `Split`."""
        for number in range(len(plan)):
            indices = plan.indices(number)
            batch = self.load(np.minimum(indices, self.length - 1), plan.key(number), plan.rows)
            fill = indices[plan.rows] >= self.length
            yield batch._replace(weights=np.where(fill, 0, batch.weights).astype(np.float32))

    def load(self, indices: np.ndarray, key: Key | None, rows: np.ndarray | None = None) -> Batch:
        """The images at `indices`, augmented by the random numbers of `key`, or not for None.

        With `rows`, only those of the batch: the same as all of them and then `rows`.
        """
        chosen = np.arange(len(indices)) if rows is None else rows
        own = indices[chosen] % len(self.images)
        images, labels = self.images[own], self.labels[own]
        if key is not None and (self.shift or self.flip):
            rng = np.random.default_rng([key[0], AUGMENT, key[1]])
            # Drawn for the whole batch, so that an image's do not depend on who loads it.
            shifts = rng.integers(0, 2 * self.shift + 1, (2, len(indices), 1, 1))[:, chosen]
            mirrored = rng.random((len(indices), 1, 1))[chosen] < 0.5
            images = self._augment(images, shifts, mirrored)
        return Batch(images, labels, np.ones(len(labels), np.float32))

    def _augment(self, images: np.ndarray, shifts: np.ndarray, mirrored: np.ndarray) -> np.ndarray:
        n, height, width, _ = images.shape
        pad = self.shift
        padded = np.pad(images, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
        rows, columns = np.arange(height)[None, :, None], np.arange(width)[None, None, :]
        if self.flip:
            columns = np.where(mirrored, width - 1 - columns, columns)
        return padded[np.arange(n)[:, None, None], shifts[0] + rows, shifts[1] + columns]
