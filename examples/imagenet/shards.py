"""Tar shards as webdataset writes them: members `key.jpg` and `key.cls` beside each other.

The headers are read once and kept in an index beside the shards; after that an image is read by its offset.
"""

import os
import tarfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from errors import UserError
from records import Members

ENDINGS = {"jpg", "jpeg", "jpe", "png", "webp", "ppm"}
FIELDS = ("shard", "offset", "size", "names", "labels")


def find(folder: Path, split: str) -> list[str]:
    """The shards of one split: all of `folder` with its name in theirs."""
    return sorted(entry.name for entry in os.scandir(folder)
                  if split in entry.name and entry.name.endswith(".tar") and entry.name[0] != ".")  # fmt: skip


def read(folder: Path, shards: Sequence[str]) -> tuple[Members, str]:
    """The images in `shards`, and a note where their index could not be kept."""
    stats = [os.stat(folder / name) for name in shards]
    state = np.array([[stat.st_size, stat.st_mtime_ns] for stat in stats])
    cache = folder / f".index-{shards[0]}.npz"
    index = _cached(cache, shards, state)
    note = ""
    if index is None:
        index = _index(folder, shards)
        # Processes of several machines may do this at once; each writes its own file and the last one stays.
        partial = folder / f".index-{uuid.uuid4().hex}.npz"
        try:
            np.savez(partial, shards=np.array(shards), state=state, **index)
            os.replace(partial, cache)
        except OSError as error:
            note = f"the index of the shards is made anew each time, for {folder} cannot be written: {error.strerror}"
    return Members(folder, shards, **index), note


def _cached(path: Path, shards: Sequence[str], state: np.ndarray) -> dict[str, Any] | None:
    """What an earlier run has found, unless the shards have changed since."""
    try:
        with np.load(path) as saved:
            if saved["shards"].tolist() == list(shards) and np.array_equal(saved["state"], state):
                return {name: saved[name] for name in FIELDS}
    # A damaged index is only an index to be made again.
    except Exception:
        return None
    return None


def _index(folder: Path, shards: Sequence[str]) -> dict[str, Any]:
    rows: list[tuple[int, int, int, bytes, int]] = []
    for number, shard in enumerate(shards):
        rows += [(number, *row) for row in _members(folder / shard)]
    columns = zip(*rows, strict=True)
    return {name: np.array(column) for name, column in zip(FIELDS, columns, strict=True)}


def _members(path: Path) -> list[tuple[int, int, bytes, int]]:
    """Offset, size, name and label of the images in one shard."""
    images: dict[str, tuple[int, int, bytes]] = {}
    labels: dict[str, int] = {}
    try:
        with tarfile.open(path, "r:") as file:
            for member in file:
                where, _, name = member.name.rpartition("/")
                key, _, ending = name.partition(".")
                key = f"{where}/{key}"
                if not member.isreg() or not name or name[0] == ".":
                    continue
                if ending.lower() in ENDINGS:
                    images[key] = (member.offset_data, member.size, os.fsencode(member.name))
                elif ending == "cls":
                    labels[key] = _label(path, member.name, file.extractfile(member).read())  # type: ignore[union-attr]
    except (OSError, tarfile.TarError) as error:
        raise UserError(f"{path} cannot be read as a tar file ({error})") from error
    if not images:
        raise UserError(f"{path} holds no images; a shard has members KEY.jpg and KEY.cls, and the original archives "
                        "must be unpacked into train/<class>/ and val/")  # fmt: skip
    if missing := sorted(images.keys() ^ labels.keys()):
        key = missing[0].lstrip("/")
        what = f"{key}.cls, the number of its class," if missing[0] in images else f"the image {key}.jpg"
        raise UserError(f"{path} lacks {what} beside {key}; each image needs both")
    return [(*image, labels[key]) for key, image in images.items()]


def _label(path: Path, name: str, text: bytes) -> int:
    if not text.strip().isdigit():
        raise UserError(f"{name} in {path} must hold the number of a class, from 0")
    return int(text)
