"""Which images make up which batch, and data sets that lie in memory.

Every batch is a function of (seed, step) alone, whatever the number of processes and of workers, so a resumed run sees
what an uninterrupted one would have seen.
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

# Streams of random numbers that must not coincide.
ORDER, AUGMENT, SUBSTITUTE = 0, 1, 2
# Seed and step: what the random numbers of an augmentation depend on besides the image.
Key = tuple[int, int]


class Batch(NamedTuple):
    """`images` uint8 [n, h, w, c], `labels` int32 [n], `weights` float32 [n], of which zero marks what is only there to
    fill the batch. `broken` names the files that are no images.
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
    """Batches of `size` images out of `images`, of which this process loads the positions `rows`.

    With a seed: the steps `start` to `stop` of a training; each epoch has a new order and leaves its remainder out.
    Without: every image once, in order; beyond the last one is what only fills the batch.
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
        """The images of batch `number`, of all processes."""
        if self.seed is None:
            return np.arange(number * self.size, (number + 1) * self.size)
        epoch, position = divmod(self.start + number, self.images // self.size)
        return epoch_order(self.seed, epoch, self.images)[position * self.size : (position + 1) * self.size]


class Dataset(NamedTuple):
    """The two splits, whose `batches(plan)` are this process's rows, and what the network has to know about them."""

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
        """What must not change when a run goes on."""
        return {"training images": len(self.train), "validation images": len(self.val), "classes": self.num_classes,
                "fingerprint": self.fingerprint}  # fmt: skip


def train_batches(split: Any, size: int, seed: int, start: int, stop: int, rows: Any = None) -> Generator[Batch]:
    """Batches of the steps `start` to `stop`; `rows` are those of each batch that this process loads, None for all."""
    return split.batches(Plan(len(split), size, np.arange(size) if rows is None else rows, seed, start, stop))


def val_batches(split: Any, size: int, rows: Any = None) -> Generator[Batch]:
    """Every image once, in batches of one size; the last is filled up with weight zero."""
    return split.batches(Plan(len(split), size, np.arange(size) if rows is None else rows))


def prefetch(batches: Generator[Batch], place: Callable[[Any], Any]) -> Generator[Batch]:
    """The same batches, the next one made and `place`d on the device by a thread while the device computes."""

    def following() -> Batch | None:
        batch = next(batches, None)
        return None if batch is None else Batch(*place(batch[:3]))._replace(broken=batch.broken)

    # `batches` is closed after the thread has ended, which may be inside of it.
    with contextlib.closing(batches), ThreadPoolExecutor(1, "prefetch") as pool:
        waiting = pool.submit(following)
        while (batch := waiting.result()) is not None:
            waiting = pool.submit(following)
            yield batch


def own_rows(mesh: Any, process: int, local: int, micro_batches: int) -> np.ndarray:
    """Which images of a global batch a process loads, in the order of its devices: cut into micro-batches first and
    those into devices, so that a micro-batch holds the same images on any number of devices.
    """
    mine = [k for k, device in enumerate(mesh.devices) if device.process_index == process]
    rows = np.arange(micro_batches * mesh.size * local).reshape(micro_batches, mesh.size, local)
    return rows[:, mine].swapaxes(0, 1).ravel()


class Broken(set[str]):
    """The names of the images that could not be decoded, each said once; at more than `most` the run ends."""

    def __init__(self, most: float) -> None:
        self.most = most

    def note(self, names: Iterable[str]) -> None:
        for name in sorted(set(names) - self):
            self.add(name)
            print(f"skipped {name}: damaged, or not a readable image", file=sys.stderr, flush=True)
        if len(self) > max(10, self.most):
            raise UserError(f"{len(self)} images are broken, more than --max-broken; repair the data, or raise it")


# Images in memory.


class ArraySplit:
    """Images in memory, repeated up to `length`; shifted by up to `shift` pixels and, if `flip`, mirrored."""

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
        """The images at `indices`, or those at `rows` of them, augmented by the random numbers of `key` if any."""
        chosen = np.arange(len(indices)) if rows is None else rows
        own = indices[chosen] % len(self.images)
        images, labels = self.images[own], self.labels[own]
        if key is not None and (self.shift or self.flip):
            rng, pad, (n, height, width, _) = np.random.default_rng([key[0], AUGMENT, key[1]]), self.shift, images.shape
            # Drawn for the whole batch, so that an image's do not depend on who loads it.
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
    # 297 of the 1,797 for validation, each class in proportion; the same ones whatever --seed.
    # RandomState, because its stream is frozen between versions of numpy.
    order = np.random.RandomState(0).permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    chosen = np.round(np.linspace(0, len(order) - 1, 297)).astype(int)
    val, rest = order[chosen], np.delete(order, chosen)
    train, pixels = ArraySplit(images[rest], labels[rest], shift=1), images[rest] / 255
    about = (float(pixels.mean()),), (float(pixels.std()),), zlib.crc32(images.tobytes())
    return Dataset("digits", train, ArraySplit(images[val], labels[val]), (8, 8, 1), 10, *about)
