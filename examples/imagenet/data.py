"""Images as uint8 NHWC batches: digits, CIFAR-10, image folders and shards, noise."""

import zlib
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import config as cfg
import folders
from batches import ArraySplit, Batch, Dataset, Plan, Split
from cifar10 import read_cifar10
from decode import Decoder
from errors import UserError
from pipeline import ImageSplit
from records import Records

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def load(config: cfg.Data) -> Dataset:
    """Finds the data that `config` names; raises `UserError` where they are not there."""
    match config.source:
        case "digits":
            return _digits()
        case "synthetic":
            return _synthetic(config)
        case "cifar10":
            return read_cifar10(_existing(config))
        case _:
            return _folder(config)


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


def _folder(config: cfg.Data) -> Dataset:
    found = folders.find(_existing(config))
    size = config.image_size
    train, val = (image_split(records, config) for records in (found.train, found.val))
    fingerprint = zlib.crc32(found.val.identity(), zlib.crc32(found.train.identity()))
    return Dataset(
        "folder", train, val, (size, size, 3), found.num_classes, IMAGENET_MEAN, IMAGENET_STD,
        fingerprint, found.note,
    )  # fmt: skip


def image_split(records: Records, config: cfg.Data) -> Split:
    """Decodes `records` as `config` has it."""
    decoder = Decoder(config.image_size, config.crop)
    if config.decoder == "dali":
        import jax

        from dali import DaliSplit

        device = jax.local_devices()[0]
        if device.platform != "gpu":
            raise UserError(f"--decoder dali needs an NVIDIA GPU, but JAX finds {device.device_kind}; leave it out")
        return DaliSplit(records, decoder, config.workers, device.local_hardware_id)
    return ImageSplit(records, decoder, config.workers)


def train_batches(
    split: Split, size: int, seed: int, start: int, stop: int, rows: np.ndarray | None = None
) -> Generator[Batch]:
    """Batches of the steps `start` to `stop`; each epoch in a new order, its remainder left out.

    `rows` are those of each batch that this process loads; None for all.
    """
    return split.batches(Plan(len(split), size, np.arange(size) if rows is None else rows, seed, start, stop))


def val_batches(split: Split, size: int, rows: np.ndarray | None = None) -> Generator[Batch]:
    """Every image once, in batches of one size; the last is filled up with weight zero. `rows` as in training."""
    return split.batches(Plan(len(split), size, np.arange(size) if rows is None else rows))


def prefetch(batches: Generator[Batch], place: Callable[[Any], Any] | None = None, ahead: int = 1) -> Generator[Batch]:
    """The same batches, made by a thread while the device computes, and `place`d on the device by it."""

    def following() -> Batch | None:
        batch = next(batches, None)
        if batch is None or place is None:
            return batch
        images, labels, weights = place((batch.images, batch.labels, batch.weights))
        return Batch(images, labels, weights, batch.broken)

    try:
        with ThreadPoolExecutor(1, "prefetch") as pool:
            waiting = deque(pool.submit(following) for _ in range(ahead))
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
