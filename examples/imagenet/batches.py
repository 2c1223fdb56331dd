"""Choose the images for each batch, and serve data sets from memory.

Every batch depends on seed and step alone, not on the number of processes or workers. So a resumed run sees the same
batches as an uninterrupted run.
"""

import contextlib
import functools
import sys
import zlib
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from files import UserError

# Random number streams, which must differ.
ORDER, AUGMENT, SUBSTITUTE = 0, 1, 2
# Seed and step. Together with the image, they determine the augmentation.
Key = tuple[int, int]


class Batch(NamedTuple):
    """Hold `images` uint8 [n, h, w, c], `labels` int32 [n] and `weights` float32 [n].

    Weight zero marks padding and broken images. `broken` names the files that could not be decoded.
    """

    images: Any
    labels: Any
    weights: Any
    broken: tuple[str, ...] = ()


@functools.lru_cache(maxsize=2)
def epoch_order(seed: int, epoch: int, images: int) -> np.ndarray:
    return np.random.default_rng([seed, ORDER, epoch]).permutation(images)


@dataclass(frozen=True)
class Plan:
    """Divide `images` images into batches of `size`. This process loads the positions `rows` in each batch.

    With a seed, the plan covers the training steps `start` to `stop`. Each epoch has a new order and skips the
    incomplete last batch. Without a seed, the plan covers every image once, in order, and pads the last batch. Indices
    of padding are `images` or larger.
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
        """Return the key that determines the augmentation of batch `number`, or None without augmentation."""
        return None if self.seed is None else (self.seed, self.start + number)

    def indices(self, number: int) -> np.ndarray:
        """Return the image indices of batch `number` for all processes."""
        if self.seed is None:
            return np.arange(number * self.size, (number + 1) * self.size)
        epoch, position = divmod(self.start + number, self.images // self.size)
        return epoch_order(self.seed, epoch, self.images)[position * self.size : (position + 1) * self.size]


class Dataset(NamedTuple):
    """Hold both splits and their properties. A split's method `batches(plan)` yields this process's rows."""

    name: str
    train: Any
    val: Any
    shape: tuple[int, int, int]
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    fingerprint: int
    note: str = ""

    def found(self) -> dict[str, Any]:
        """Return the properties that must stay the same when a run is resumed."""
        return {"training images": len(self.train), "validation images": len(self.val), "classes": self.num_classes,
                "fingerprint": self.fingerprint}  # fmt: skip


def train_batches(split: Any, size: int, seed: int, start: int, stop: int, rows: Any = None) -> Generator[Batch]:
    """Return batches for the steps `start` to `stop`. This process loads `rows` in each batch, or all rows if None."""
    return split.batches(Plan(len(split), size, np.arange(size) if rows is None else rows, seed, start, stop))


def val_batches(split: Any, size: int, rows: Any = None) -> Generator[Batch]:
    """Return batches of equal size that hold every image once. Padding in the last batch has weight zero."""
    return split.batches(Plan(len(split), size, np.arange(size) if rows is None else rows))


def prefetch(batches: Generator[Batch], place: Callable[[Any], Any]) -> Generator[Batch]:
    """Yield the same batches. While the device computes, a thread loads and `place`s the next batch."""

    def following() -> Batch | None:
        batch = next(batches, None)
        return None if batch is None else Batch(*place(batch[:3]))._replace(broken=batch.broken)

    # Close `batches` after the thread has ended, because the thread may still use it.
    with contextlib.closing(batches), ThreadPoolExecutor(1, "prefetch") as pool:
        waiting = pool.submit(following)
        while (batch := waiting.result()) is not None:
            waiting = pool.submit(following)
            yield batch


def own_rows(mesh: Any, process: int, local: int, micro_batches: int) -> np.ndarray:
    """Return the positions in a global batch that a process loads, in the order of its devices.

    The batch is divided into micro-batches, and each micro-batch over the devices. So a micro-batch holds the same
    images on any number of devices.
    """
    mine = [k for k, device in enumerate(mesh.devices) if device.process_index == process]
    rows = np.arange(micro_batches * mesh.size * local).reshape(micro_batches, mesh.size, local)
    return rows[:, mine].swapaxes(0, 1).ravel()


class Broken(set[str]):
    """Collect the names of broken images, and print each name once. More than `most` broken images end the run."""

    def __init__(self, most: float) -> None:
        self.most = most

    def note(self, names: Iterable[str]) -> None:
        for name in sorted(set(names) - self):
            self.add(name)
            print(f"skipped {name}: damaged, or not a readable image", file=sys.stderr, flush=True)
        if len(self) > max(10, self.most):
            raise UserError(f"{len(self)} images are broken, above --max-broken; repair the data or raise it")


# Images in memory.


class ArraySplit:
    """Serve images from memory, repeated up to `length`. Shift them by up to `shift` pixels, and mirror if `flip`."""

    def __init__(self, images: np.ndarray, labels: np.ndarray, *, shift: int = 0, flip: bool = False, length: int = 0):
        self.images, self.labels = images, labels.astype(np.int32)
        self.shift, self.flip, self.length = shift, flip, length or len(images)

    def __len__(self) -> int:
        return self.length

    def batches(self, plan: Plan) -> Generator[Batch]:
        for number in range(len(plan)):
            indices = plan.indices(number)
            batch = self.load(np.minimum(indices, self.length - 1), plan.key(number), plan.rows)
            yield batch._replace(weights=(indices[plan.rows] < self.length).astype(np.float32))

    def load(self, indices: np.ndarray, key: Key | None, rows: np.ndarray | None = None) -> Batch:
        """Return the images at `indices`, or only at their positions `rows`. Augment them if `key` is given."""
        chosen = np.arange(len(indices)) if rows is None else rows
        own = indices[chosen] % len(self.images)
        images, labels = self.images[own], self.labels[own]
        if key is not None and (self.shift or self.flip):
            rng, pad, (n, height, width, _) = np.random.default_rng([key[0], AUGMENT, key[1]]), self.shift, images.shape
            # Draw for the whole batch, so that the augmentation does not depend on the process.
            shifts = rng.integers(0, 2 * pad + 1, (2, len(indices), 1, 1))[:, chosen]
            mirrored = (rng.random((len(indices), 1, 1))[chosen] < 0.5) & self.flip
            padded = np.pad(images, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
            y, x = np.arange(height)[None, :, None], np.arange(width)[None, None, :]
            x = np.where(mirrored, width - 1 - x, x)
            images = padded[np.arange(n)[:, None, None], shifts[0] + y, shifts[1] + x]
        return Batch(images, labels, np.ones(len(labels), np.float32))


def load_digits() -> Dataset:
    from sklearn import datasets

    images, labels = datasets.load_digits(return_X_y=True)
    images = np.round(images * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8, 1)
    # Take 297 of the 1,797 images for validation, with each class in proportion. They are the same for every --seed.
    # RandomState's stream is the same in all versions of numpy.
    order = np.random.RandomState(0).permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    chosen = np.round(np.linspace(0, len(order) - 1, 297)).astype(int)
    val, rest = order[chosen], np.delete(order, chosen)
    train, pixels = ArraySplit(images[rest], labels[rest], shift=1), images[rest] / 255
    about = (float(pixels.mean()),), (float(pixels.std()),), zlib.crc32(images.tobytes())
    return Dataset("digits", train, ArraySplit(images[val], labels[val]), (8, 8, 1), 10, *about)
