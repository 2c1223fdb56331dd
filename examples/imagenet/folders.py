"""Finds the images of a data set on disk: the layouts in which ILSVRC2012 is kept, and anything like them."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

import shards
from errors import UserError
from records import Files, Records

ENDINGS = {".jpeg", ".jpg", ".jpe", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm"}
DEVKIT = Path("ILSVRC2012_devkit_t12", "data")
TRUTH = "ILSVRC2012_validation_ground_truth.txt"
FLAT = re.compile(r"ILSVRC2012_val_(\d{8})$")


class Found(NamedTuple):
    """What is there: the images of both splits, and a sentence about what was left alone."""

    train: Records
    val: Records
    num_classes: int
    note: str


def find(folder: Path) -> Found:
    """The images in `folder`; raises `UserError` with the way out where they cannot be had."""
    train_shards, val_shards = shards.find(folder, "train"), shards.find(folder, "val")
    if not train_shards or (folder / "train").is_dir():
        return _class_folders(folder)
    if not val_shards:
        raise UserError(f"--data-dir {folder} has shards for training ({train_shards[0]}) but no *val*.tar")
    train, train_note = shards.read(folder, train_shards)
    val, val_note = shards.read(folder, val_shards)
    if unknown := sorted(set(val.labels.tolist()) - set(train.labels.tolist())):
        raise UserError(f"the shards {val_shards[0]} and on in {folder} have images of class {unknown[0]}, of which "
                        "those for training have none")  # fmt: skip
    classes = int(train.labels.max()) + 1
    if classes < 2:
        raise UserError(
            f"the shards {train_shards[0]} and on in {folder} have images of class 0 only; training needs two"
        )
    return Found(train, val, classes, train_note or val_note)


def _class_folders(folder: Path) -> Found:
    _check(folder, "train")
    classes = _subfolders(folder / "train")
    if not classes:
        raise UserError(f"{folder / 'train'} is empty: it must hold one folder of images for each class")
    if len(classes) < 2:
        raise UserError(f"{folder / 'train'} has one class only ({classes[0]}); training needs two")
    train, other = _scan(folder, "train", classes, classes)
    _check(folder, "val")
    found = _subfolders(folder / "val")
    flat = [name for name in _files(folder / "val") if FLAT.match(Path(name).stem)]
    if flat and not found:
        val = _flat(folder, flat, classes)
    elif not found:
        raise UserError(f"{folder / 'val'} is empty: it must hold one folder of images for each class, or "
                        "ILSVRC2012_val_*.JPEG")  # fmt: skip
    elif extra := sorted(set(found) - set(classes)):
        raise UserError(f"{folder / 'val'} has a class {extra[0]} that train/ does not have")
    else:
        val, more = _scan(folder, "val", found, classes)
        other += more
    note = ""
    if other:
        note = f"{len(other)} files ignored, for they do not end like images: {folder / other[0]}"
        note += " and others" if len(other) > 1 else ""
    return Found(train, val, len(classes), note)


def _check(folder: Path, split: str) -> None:
    if not (folder / split).is_dir():
        raise UserError(
            f"--data-dir has no folder {split}/ ({folder / split}); it must hold train/<class>/*.JPEG and "
            "val/<class>/*.JPEG, or tar shards *train*.tar and *val*.tar"
        )


def _subfolders(folder: Path) -> list[str]:
    return sorted(entry.name for entry in os.scandir(folder) if entry.name[0] != "." and entry.is_dir())


def _files(folder: Path) -> list[str]:
    return sorted(entry.name for entry in os.scandir(folder) if entry.name[0] != "." and not entry.is_dir())


def _scan(folder: Path, split: str, found: Sequence[str], classes: Sequence[str]) -> tuple[Files, list[str]]:
    """The images of one split, and the files that are not taken for images."""
    names: list[str] = []
    labels: list[int] = []
    other: list[str] = []
    numbers = {name: number for number, name in enumerate(classes)}
    for name in found:
        inside = [os.path.join(split, name, file) for file in _files(folder / split / name)]
        images = [path for path in inside if os.path.splitext(path)[1].lower() in ENDINGS]
        if not images:
            raise UserError(f"the class folder {folder / split / name} holds no images")
        other += sorted(set(inside) - set(images))
        names += images
        labels += [numbers[name]] * len(images)
    return Files(folder, names, labels), other


def _flat(folder: Path, names: list[str], classes: Sequence[str]) -> Files:
    """Validation images in one folder, as their archive unpacks; what they show is in the development kit."""
    kit = next((path for path in (folder / DEVKIT, folder) if (path / TRUTH).is_file()), None)
    if kit is None:
        raise UserError(f"the images in {folder / 'val'} are in no class folders, and {folder / DEVKIT / TRUTH} is not "
                        "there; unpack ILSVRC2012_devkit_t12.tar.gz into --data-dir")  # fmt: skip
    try:
        truth = [int(line) for line in (kit / TRUTH).read_text().split()]
    except (OSError, ValueError) as error:
        raise UserError(f"{kit / TRUTH} must have one number in each line ({error})") from error
    numbers = [int(FLAT.match(Path(name).stem)[1]) for name in names]  # type: ignore[index]
    if len(truth) != len(names) or sorted(numbers) != list(range(1, len(truth) + 1)):
        raise UserError(f"{kit / TRUTH} has {len(truth)} lines, but {folder / 'val'} has {len(names)} images, the last "
                        f"with number {max(numbers)}; unpack both archives again")  # fmt: skip
    wnids = _synsets(kit / "meta.mat")
    by_name = {name: number for number, name in enumerate(classes)}
    labels = []
    for number in numbers:
        wnid = wnids.get(truth[number - 1])
        if wnid is None:
            raise UserError(f"{kit / TRUTH} has class {truth[number - 1]} in line {number}, which {kit / 'meta.mat'} "
                            "does not have; unpack ILSVRC2012_devkit_t12.tar.gz again")  # fmt: skip
        if wnid not in by_name:
            raise UserError(
                f"{folder / 'val'} has an image of class {wnid}, for which {folder / 'train'} has no folder"
            )
        labels.append(by_name[wnid])
    return Files(folder, [os.path.join("val", name) for name in names], labels)


def _synsets(path: Path) -> dict[int, str]:
    """The WordNet name of each ILSVRC2012_ID."""
    from scipy.io import loadmat

    try:
        table = np.atleast_1d(loadmat(path, squeeze_me=True)["synsets"])
        return {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in table}
    except Exception as error:  # scipy raises nearly anything on damaged files.
        raise UserError(f"{path} is not the development kit's table of classes ({error}); unpack "
                        "ILSVRC2012_devkit_t12.tar.gz again") from error  # fmt: skip
