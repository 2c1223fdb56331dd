"""Define the study's tasks: images in memory and a network. `plans.RULES` has the targets."""

from __future__ import annotations

import dataclasses
import functools
import gzip
from pathlib import Path
from typing import Any

import numpy as np

import cifar10
import models
from batches import ArraySplit
from files import UserError


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
    """Hold a task's images, uint8 NHWC, and its network.

    The validation images choose the settings. The test images are used once, at the end.
    """

    name: str
    train: ArraySplit
    val: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    model: models.ResNet
    smoothing: float = 0.1

    @property
    def shape(self) -> tuple[int, ...]:
        return self.train.images.shape[1:]


def load(name: str, data_dir: Path) -> Task:
    """Return the task with this name. Only "cifar" and "fashion" read `data_dir`."""
    return TASKS[name](data_dir)


def _resnet(stages: tuple[int, ...], width: int) -> models.ResNet:
    return models.ResNet(stages, num_classes=10, width=width, stem="small", init_scheme="he")


@functools.lru_cache(maxsize=1)
def _cifar(data_dir: Path) -> Task:
    """Return the CIFAR-10 task at 16 x 16 pixels.

    The training set gives 5,000 images to train on and 2,500 images to validate. The test uses all 10,000 test images.
    """
    if not data_dir.is_dir():
        raise UserError(f"--data-dir {data_dir} is not a folder; examples/imagenet/get_cifar10.sh fetches CIFAR-10")
    (images, labels), test = cifar10.read(data_dir)
    # RandomState gives the same stream in all numpy versions.
    order = np.random.RandomState(0).permutation(len(labels))
    chosen, held = order[:5000], order[5000:7500]
    return Task(
        "cifar", ArraySplit(_halved(images[chosen]), labels[chosen], shift=2, flip=True),
        (_halved(images[held]), labels[held]), (_halved(test[0]), test[1]), cifar10.MEAN, cifar10.STD,
        _resnet((1, 1, 1), 16),
    )  # fmt: skip


def _halved(images: np.ndarray) -> np.ndarray:
    """Average each block of 2 x 2 pixels."""
    n, height, width, channels = images.shape
    parts = images.reshape(n, height // 2, 2, width // 2, 2, channels)
    return np.round(parts.mean((2, 4), dtype=np.float32)).astype(np.uint8)


@functools.lru_cache(maxsize=1)
def _digits(data_dir: Path) -> Task:
    """Return the task of scikit-learn's handwritten digits (8 x 8 pixels).

    It has 1,000 training images, 400 validation images and the other 397 as test images.
    """
    del data_dir
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = np.round(images * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8, 1)
    order = np.random.RandomState(0).permutation(len(labels))
    train, val, test = order[:1000], order[1000:1400], order[1400:]
    pixels = images[train] / 255
    return Task(
        "digits", ArraySplit(images[train], labels[train], shift=1), (images[val], labels[val].astype(np.int32)),
        (images[test], labels[test].astype(np.int32)), (float(pixels.mean()),), (float(pixels.std()),),
        _resnet((1, 1), 16),
    )  # fmt: skip


@functools.lru_cache(maxsize=1)
def _fashion(data_dir: Path) -> Task:
    """Return the Fashion-MNIST task (28 x 28 pixels).

    The training set gives 50,000 images to train on and 10,000 images to validate. The test uses all test images.
    """

    def read(name: str, offset: int) -> np.ndarray:
        path = data_dir / f"{name}.gz"
        if not path.is_file():
            raise UserError(f"--data-dir {data_dir} has no {path.name}; Debian's package dataset-fashion-mnist has it")
        with gzip.open(path) as file:
            return np.frombuffer(file.read(), np.uint8, offset=offset)

    def part(name: str) -> tuple[np.ndarray, np.ndarray]:
        images = read(f"{name}-images-idx3-ubyte", 16).reshape(-1, 28, 28, 1)
        return images, read(f"{name}-labels-idx1-ubyte", 8).astype(np.int32)

    (images, labels), test = part("train"), part("t10k")
    return Task(
        "fashion", ArraySplit(images[:50_000], labels[:50_000]), (images[50_000:], labels[50_000:]), test, (0.286,),
        (0.353,), _resnet((1, 1), 16), smoothing=0.0,
    )  # fmt: skip


def _toy(data_dir: Path) -> Task:
    """Return a task with dark and light images, for the study's tests."""
    del data_dir
    rng = np.random.RandomState(0)
    labels = np.arange(96) % 2
    images = (rng.randint(0, 128, (96, 4, 4, 1)) + 127 * labels[:, None, None, None]).astype(np.uint8)
    labels = labels.astype(np.int32)
    return Task(
        "toy", ArraySplit(images[:64], labels[:64]), (images[64:80], labels[64:80]), (images[80:], labels[80:]),
        (0.5,), (0.25,), _resnet((1,), 2),
    )  # fmt: skip


TASKS: dict[str, Any] = {"cifar": _cifar, "digits": _digits, "fashion": _fashion, "toy": _toy}
