"""Images as uint8 NHWC batches: digits, CIFAR-10, class folders, noise.

Every batch is a function of (seed, step) alone, whatever the number of threads, so a resumed run
sees what an uninterrupted one would have seen.
"""

import io
import json
import pickle
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from PIL import Image

import config as cfg
from config import UserError

ENDINGS = {".jpeg", ".jpg", ".jpe", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm"}
CIFAR_FOLDERS = (".", "cifar-10-batches-py", "cifar-10-batches-bin", "package")
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

# Streams of random numbers that must not coincide.
ORDER, AUGMENT = 0, 1


class Batch(NamedTuple):
    """What a step needs: `images` uint8 [n, h, w, c], `labels` int32 [n], `weights` float32 [n].

    A weight of zero marks what is only there to fill the batch. `broken` names the files that
    could not be read.
    """

    images: Any
    labels: Any
    weights: Any
    broken: tuple[str, ...] = ()


class Split(Protocol):
    """Training or validation images."""

    def __len__(self) -> int: ...

    def load(self, indices: np.ndarray, key: tuple[int, int] | None, rows: np.ndarray | None = None) -> Batch:
        """The images at `indices`, augmented by the random numbers of `key`, or not for None.

        With `rows`, only those of the batch: the same as all of them and then `rows`.
        """
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

    def load(self, indices: np.ndarray, key: tuple[int, int] | None, rows: np.ndarray | None = None) -> Batch:
        """See `Split`."""
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


class FolderSplit:
    """Image files, decoded on use by `pool`.

    Training takes a random part of the image and mirrors half of them, validation the centre. A
    file that cannot be read is left out of validation; in training the next readable one takes
    its place, for a batch keeps its size.
    """

    def __init__(self, files: Sequence[Path], labels: np.ndarray, size: int, pool: ThreadPoolExecutor) -> None:
        self.files, self.labels, self.size, self.pool = files, labels.astype(np.int32), size, pool

    def __len__(self) -> int:
        return len(self.files)

    def load(self, indices: np.ndarray, key: tuple[int, int] | None, rows: np.ndarray | None = None) -> Batch:
        """See `Split`."""
        indices = indices if rows is None else indices[rows]
        loaded = list(self.pool.map(lambda index: self._load_one(int(index), key), indices))
        broken = tuple(name for _, _, _, names in loaded for name in names)
        images = np.stack([image for image, _, _, _ in loaded])
        labels = np.array([label for _, label, _, _ in loaded], np.int32)
        weights = np.array([weight for _, _, weight, _ in loaded], np.float32)
        return Batch(images, labels, weights, broken)

    def _load_one(self, index: int, key: tuple[int, int] | None) -> tuple[np.ndarray, int, float, list[str]]:
        broken: list[str] = []
        while len(broken) < len(self.files):
            try:
                with Image.open(self.files[index]) as file:
                    image = _prepare(file, self.size, index, key)
                return image, int(self.labels[index]), 1.0, broken
            # Pillow's decoders raise nearly anything on damaged files.
            except Exception:
                broken.append(str(self.files[index]))
            if key is None:
                blank = np.zeros((self.size, self.size, 3), np.uint8)
                return blank, int(self.labels[index]), 0.0, broken
            index = (index + 1) % len(self.files)
        raise UserError(f"none of the {len(self.files)} files beside {broken[0]} can be read")


def _prepare(file: Image.Image, size: int, index: int, key: tuple[int, int] | None) -> np.ndarray:
    """Decodes, cuts and scales one image to `[size, size, 3]`."""
    if key is None:
        # As usual for ImageNet: the short side to 256 for 224 pixels, then the centre.
        box = _centre_box(*file.size, size / (size * 256 // 224))
        mirrored = False
    else:
        rng = np.random.default_rng([key[0], AUGMENT, key[1], index])
        box = _random_box(*file.size, rng)
        mirrored = rng.random() < 0.5
    width, height = file.size
    # JPEG decodes to a half, a quarter or an eighth of the size for less; the part that is cut
    # out must keep at least the pixels that are asked for.
    wanted = size / min(box[2] - box[0], box[3] - box[1])
    file.draft("RGB", (max(1, round(width * wanted)), max(1, round(height * wanted))))
    across, down = file.size[0] / width, file.size[1] / height
    box = (box[0] * across, box[1] * down, box[2] * across, box[3] * down)
    image = file.convert("RGB").resize((size, size), Image.Resampling.BILINEAR, box=box)
    pixels = np.asarray(image)
    return pixels[:, ::-1] if mirrored else pixels


def _centre_box(width: int, height: int, share: float) -> tuple[float, float, float, float]:
    side = min(width, height) * share
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def _random_box(width: int, height: int, rng: np.random.Generator) -> tuple[float, float, float, float]:
    """8% to 100% of the area at an aspect ratio of 3/4 to 4/3 (Szegedy et al. 2015)."""
    for _ in range(10):
        area = width * height * rng.uniform(0.08, 1.0)
        ratio = np.exp(rng.uniform(np.log(3 / 4), np.log(4 / 3)))
        w, h = np.sqrt(area * ratio), np.sqrt(area / ratio)
        if w <= width and h <= height:
            left, top = rng.uniform(0, width - w), rng.uniform(0, height - h)
            return left, top, left + w, top + h
    return _centre_box(width, height, 1.0)


def load(config: cfg.Data) -> Dataset:
    """Finds the data that `config` names; raises `UserError` where they are not there."""
    assert config.image_size is not None and config.workers is not None
    match config.source:
        case "digits":
            return _digits()
        case "synthetic":
            return _synthetic(config)
        case "cifar10":
            return read_cifar10(_existing(config))
        case _:
            return _folder(_existing(config), config.image_size, config.workers)


def _existing(config: cfg.Data) -> Path:
    assert config.data_dir is not None
    if not config.data_dir.is_dir():
        what = "is not a folder" if config.data_dir.exists() else "does not exist"
        get = "; get_cifar10.py fetches CIFAR-10" if config.source == "cifar10" else ""
        raise UserError(f"--data-dir {config.data_dir} {what}{get}")
    return config.data_dir


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
        "digits", ArraySplit(images[train], labels[train], shift=1),
        ArraySplit(images[val], labels[val]), (8, 8, 1), 10, (float(pixels.mean()),),
        (float(pixels.std()),), zlib.crc32(images.tobytes()),
    )  # fmt: skip


def _synthetic(config: cfg.Data) -> Dataset:
    assert config.image_size is not None
    rng = np.random.RandomState(0)
    n = min(config.synthetic_images, 256)
    shape = (config.image_size, config.image_size, 3)
    images = rng.randint(0, 256, (n, *shape), np.uint8)
    labels = rng.randint(0, config.synthetic_classes, n)
    few = max(1, n // 8)
    return Dataset(
        "synthetic", ArraySplit(images, labels, length=config.synthetic_images),
        ArraySplit(images[:few], labels[:few]), shape, config.synthetic_classes, IMAGENET_MEAN,
        IMAGENET_STD, 0,
    )  # fmt: skip


def read_cifar10(folder: Path) -> Dataset:
    """CIFAR-10 in any of its layouts, in `folder` or where its archives unpack to below it."""
    layouts: tuple[tuple[str, Callable[[Path], tuple[Any, ...]]], ...] = (
        ("data_batch_1", _cifar_pickles),
        ("data_batch_1.bin", _cifar_binary),
        ("data_batch_1.png", _cifar_sheets),
    )
    for name, read in layouts:
        for inner in CIFAR_FOLDERS:
            if (folder / inner / name).is_file():
                train, train_labels, val, val_labels = read(folder / inner)
                return Dataset(
                    "cifar10", ArraySplit(train, train_labels, shift=4, flip=True),
                    ArraySplit(val, val_labels), (32, 32, 3), 10, (0.4914, 0.4822, 0.4465),
                    (0.2470, 0.2435, 0.2616), zlib.crc32(train_labels.astype(np.int32).tobytes()),
                )  # fmt: skip
    raise UserError(
        f"--data-dir {folder} holds no CIFAR-10: neither data_batch_1 (pickle), data_batch_1.bin "
        "nor data_batch_1.png is there; get_cifar10.py fetches it"
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error


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


def _cifar_pickles(folder: Path) -> tuple[np.ndarray, ...]:
    def read(name: str) -> tuple[np.ndarray, np.ndarray]:
        path = folder / name
        try:
            text = _ArrayUnpickler(io.BytesIO(_read(path)), encoding="bytes").load()
            rows, labels = np.asarray(text[b"data"], np.uint8), text[b"labels"]
            return _labelled(_planes(rows), labels, path)
        except UserError:
            raise
        except Exception as error:  # An unpickler raises nearly anything on damaged files.
            raise UserError(f"{path} is not a CIFAR-10 pickle ({error})") from error

    parts = [read(f"data_batch_{i}") for i in range(1, 6)]
    return *map(np.concatenate, zip(*parts, strict=True)), *read("test_batch")


def _cifar_binary(folder: Path) -> tuple[np.ndarray, ...]:
    def read(name: str) -> tuple[np.ndarray, np.ndarray]:
        data = np.frombuffer(_read(folder / name), np.uint8)
        if not data.size or data.size % 3073:
            raise UserError(f"{folder / name} has {data.size} bytes, not a multiple of 3073")
        rows = data.reshape(-1, 3073)
        return _labelled(_planes(rows[:, 1:]), rows[:, 0], folder / name)

    parts = [read(f"data_batch_{i}.bin") for i in range(1, 6)]
    return *map(np.concatenate, zip(*parts, strict=True)), *read("test_batch.bin")


def _cifar_sheets(folder: Path) -> tuple[np.ndarray, ...]:
    def read(name: str) -> np.ndarray:
        path = folder / name
        try:
            sheet = np.asarray(Image.open(path).convert("RGB"))
        except Exception as error:  # See FolderSplit.
            raise UserError(f"{path} cannot be read as an image") from error
        if sheet.shape[1] != 1024:
            raise UserError(f"{path} is {sheet.shape[1]} pixels wide, not 1024 (one image a row)")
        return sheet.reshape(-1, 32, 32, 3)

    def labels(name: str) -> Any:
        try:
            return json.loads(_read(folder / name))
        except ValueError as error:
            raise UserError(f"{folder / name} is not JSON ({error})") from error

    train = np.concatenate([read(f"data_batch_{i}.png") for i in range(1, 6)])
    # The package spells its file names so.
    train_labels = labels("train_lables.json")
    val_labels = labels("test_lables.json")
    return (
        *_labelled(train, train_labels, folder / "train_lables.json"),
        *_labelled(read("test_batch.png"), val_labels, folder / "test_lables.json"),
    )


def _folder(folder: Path, size: int, workers: int) -> Dataset:
    train, train_labels, classes, other = _scan(folder / "train", None)
    val, val_labels, _, more = _scan(folder / "val", classes)
    names = "\n".join(str(path.relative_to(folder)) for path in (*train, *val))
    ignored = other + more
    note = (
        f"{len(ignored)} files ignored, for they do not end like images: {ignored[0]}"
        + (" and others" if len(ignored) > 1 else "")
        if ignored
        else ""
    )
    pool = ThreadPoolExecutor(workers, "decode")
    return Dataset(
        "folder", FolderSplit(train, train_labels, size, pool),
        FolderSplit(val, val_labels, size, pool), (size, size, 3), len(classes), IMAGENET_MEAN,
        IMAGENET_STD, zlib.crc32(names.encode()), note,
    )  # fmt: skip


def _scan(folder: Path, classes: list[str] | None) -> tuple[list[Path], np.ndarray, list[str], list[Path]]:
    """Files and labels of one split, its classes, and the files that are not taken for images."""
    if not folder.is_dir():
        raise UserError(
            f"--data-dir has no folder {folder.name}/ ({folder}); it must hold "
            "train/<class>/*.JPEG and val/<class>/*.JPEG"
        )
    found = sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    if not found:
        raise UserError(f"{folder} is empty: it must hold one folder of images for each class")
    if classes is None:
        classes = found
        if len(classes) < 2:
            raise UserError(f"{folder} has one class only ({classes[0]}); training needs two")
    elif extra := sorted(set(found) - set(classes)):
        raise UserError(f"{folder} has a class {extra[0]} that train/ does not have")
    files: list[Path] = []
    labels: list[int] = []
    other: list[Path] = []
    for name in found:
        inside = sorted(p for p in (folder / name).iterdir() if not p.name.startswith("."))
        images = [path for path in inside if path.suffix.lower() in ENDINGS]
        if not images:
            raise UserError(f"the class folder {folder / name} holds no images")
        other += [path for path in inside if path.suffix.lower() not in ENDINGS]
        files += images
        labels += [classes.index(name)] * len(images)
    return files, np.array(labels), classes, other


def train_batches(
    split: Split, size: int, seed: int, start: int, stop: int, rows: np.ndarray | None = None
) -> Iterator[Batch]:
    """Batches of the steps `start` to `stop`; each epoch in a new order, its remainder left out.

    `rows` are those of each batch that this process loads; None for all.
    """
    per_epoch = len(split) // size
    order = np.empty(0, int)
    for step in range(start, stop):
        epoch, position = divmod(step, per_epoch)
        if position == 0 or step == start:
            order = np.random.default_rng([seed, ORDER, epoch]).permutation(len(split))
        yield split.load(order[position * size : (position + 1) * size], (seed, step), rows)


def val_batches(split: Split, size: int, rows: np.ndarray | None = None) -> Iterator[Batch]:
    """Every image once, in batches of one size; the last is filled up with weight zero. `rows` as in training."""
    chosen = np.arange(size) if rows is None else rows
    for start in range(0, len(split), size):
        indices = start + chosen
        batch = split.load(np.minimum(indices, len(split) - 1), None)
        fill = indices >= len(split)
        yield batch._replace(weights=np.where(fill, 0, batch.weights).astype(np.float32))


def prefetch(batches: Iterator[Batch], ahead: int = 2) -> Iterator[Batch]:
    """The same batches, made by a thread while the device computes."""
    with ThreadPoolExecutor(1, "prefetch") as pool:
        waiting = deque(pool.submit(next, batches, None) for _ in range(ahead))
        try:
            while (batch := waiting.popleft().result()) is not None:
                waiting.append(pool.submit(next, batches, None))
                yield batch
        finally:
            for future in waiting:
                future.cancel()
