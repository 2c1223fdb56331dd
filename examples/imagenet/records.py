"""Find encoded images in class folders, tar shards or TFRecord files, and refuse incomplete data sets."""

import contextlib
import hashlib
import json
import mmap
import os
import re
import tarfile
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import google_crc32c
import numpy as np

from files import UserError, entries, fetch, patiently

ENDINGS = {".jpeg", ".jpg", ".jpe", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm"}
KINDS = {"tar": r"\.tar$", "tfrecord": r"\.tfrecord|^(train|validation)-\d+-of-\d+$"}
SPLITS = ("train", "val")
IMAGENET_SIZES = (1_281_167, 50_000)
# Files in which TFDS and the webdataset copies on the Hugging Face hub list the images per shard.
NOTES = ("dataset_info.json", "_info.json")


class Files:
    """Read images from files below `root`, with one image per file."""

    def __init__(self, root: Any, names: Sequence[str], labels: Sequence[int]) -> None:
        self.root, self.labels = str(root), np.array(labels, np.int32)
        self.names = np.array([os.fsencode(name) for name in names])

    def read(self, index: int) -> bytes:
        """Return the encoded image. Raise `ValueError` if it is damaged."""
        return fetch(self.name(index))

    def name(self, index: int) -> str:
        return os.path.join(self.root, os.fsdecode(self.names[index]))

    def identity(self) -> bytes:
        """Return bytes that change if the names or labels change."""
        return b"\n".join([*self.names.tolist(), self.labels.tobytes()])


class Members(Files):
    """Read images from shards by offset.

    `shard` int [n] holds an index into `shards` for each image. The other arrays also have an entry per image.
    """

    def __init__(self, root: str, shards: Sequence[str], shard: Any, offset: Any, size: Any, names: Any, labels: Any):
        self.root, self.shards, self.names, self.labels = root, list(shards), names, labels.astype(np.int32)
        self.shard, self.offset, self.size = shard, offset, size

    def path(self, index: int) -> str:
        return os.path.join(self.root, self.shards[self.shard[index]])

    def read(self, index: int) -> bytes:
        return fetch(self.path(index), int(self.offset[index]), int(self.size[index]))

    def name(self, index: int) -> str:
        return f"{self.path(index)}:{os.fsdecode(self.names[index])}"


class Examples(Members):
    """Read images from TFRecord files, and compare the checksum on every read."""

    def read(self, index: int) -> bytes:
        record = super().read(index)
        if _masked_crc(record[:-4]) != record[-4:]:
            raise ValueError("it does not agree with its checksum")
        begin, end, _ = _example(record, 0, len(record) - 4)
        return record[begin:end]


# Finding the data set.


class Found(NamedTuple):
    """Hold both splits, the number of classes and a note for the user."""

    train: Files
    val: Files
    num_classes: int
    note: str


def find(folder: Any) -> Found:
    """Return the images in `folder`.

    Raise `UserError`, which names a remedy, if the folder or some images are missing.
    """
    folder = str(folder)
    if not os.path.isdir(folder):
        raise UserError(f"--data-dir {folder} {'is not a folder' if os.path.exists(folder) else 'does not exist'}")
    folders, files = entries(folder)
    kind = next((kind for kind in KINDS if _shards(folder, files, kind, "train")), None)
    classes: list[str] = []
    if kind is None or "train" in folders:
        train, val, classes, notes = _class_folders(folder, folders)
    else:
        shards = {split: _shards(folder, files, kind, split) for split in SPLITS}
        if not shards["val"]:
            raise UserError(f"{folder} has shards for training ({shards['train'][0]}) but no *val* {kind} shards")
        parts: dict[str, Any] = {split: _indexed(folder, kind, split, names) for split, names in shards.items()}
        (train, val), notes = parts.values(), _lengths(folder, files, kind, parts)
    have, held = (set(part.labels.tolist()) for part in (train, val))
    if len(have) < 2:
        label = classes[min(have)] if classes else min(have)
        raise UserError(f"the training images in {folder} have one class only, {label}; training needs two classes")
    if missing := sorted(have ^ held):
        label = classes[missing[0]] if classes else missing[0]
        where, lacks = ("training", "validation") if missing[0] in have else ("validation", "training")
        raise UserError(f"{folder} has images of class {label} for {where} but none for {lacks} ({len(missing)} such "
                        "classes); put them back, or remove the class from both splits")  # fmt: skip
    for what, part, count in zip(("training", "validation"), (train, val), IMAGENET_SIZES, strict=True):
        if len(have) == 1000 and len(part.labels) != count:
            notes.append(f"ILSVRC2012 has {count:,} {what} images, this folder has {len(part.labels):,}")
    return Found(train, val, max(have) + 1, "; ".join(notes))


# Class folders.


def _class_folders(folder: str, found: Sequence[str]) -> tuple[Files, Files, list[str], list[str]]:
    if missing := [split for split in SPLITS if split not in found]:
        raise UserError(f"{folder} has no {missing[0]}/; it must hold train/<class>/ and val/<class>/, or shards")
    held = {split: entries(os.path.join(folder, split)) for split in SPLITS}
    for split, (inside, loose) in held.items():
        if not inside:
            what = f"a folder of {len(loose)} files ({loose[0]}) without classes" if loose else "empty"
            raise UserError(f"{os.path.join(folder, split)} is {what}: it must hold one folder of images per class")
    classes, other, parts = sorted({name for inside, _ in held.values() for name in inside}), [], []
    for split, (inside, _) in held.items():
        names: list[str] = []
        labels: list[int] = []
        for name in inside:
            files = list(_below(folder, f"{split}/{name}"))
            images = [file for file in files if os.path.splitext(file)[1].lower() in ENDINGS]
            if not images:
                raise UserError(f"the class folder {os.path.join(folder, split, name)} holds no images")
            names += images
            labels += [classes.index(name)] * len(images)
            other += sorted({*files} - {*images})
        parts.append(Files(folder, names, labels))
    notes = [f"{len(other)} file(s) ignored, without the extension of an image: {name}" for name in other[:1]]
    return *parts, classes, notes  # type: ignore[return-value]


def _below(root: str, folder: str) -> Iterator[str]:
    """Yield all files below `folder`, at any depth."""
    folders, files = entries(os.path.join(root, folder))
    yield from (f"{folder}/{name}" for name in files)
    for name in folders:
        yield from _below(root, f"{folder}/{name}")


# Shards.


def _shards(folder: str, files: Sequence[str], kind: str, split: str) -> list[str]:
    """Return the names of a split's shards. Raise `UserError` if the shard numbers have a gap."""
    found = [name for name in files if split in name and re.search(KINDS[kind], name)]
    # Match PREFIX-00007-of-00294 and PREFIX-000007.tar.
    pattern = re.compile(r"(.*?)(\d+)(?:-of-(\d+))?((?:\.\w+)?)")
    numbered = [match for name in found if (match := pattern.fullmatch(name))]
    for prefix, total in {(match[1], match[3]) for match in numbered}:
        these = {int(match[2]): match for match in numbered if (match[1], match[3]) == (prefix, total)}
        first, one = 0 if total or 1 not in these else 1, next(iter(these.values()))
        missing = [k for k in range(first, int(total or max(these) + 1)) if k not in these]
        if missing and (total or len(these) > 1):  # a single number may be a year or a version
            name = f"{prefix}{missing[0]:0{len(one[2])}d}" + (f"-of-{total}" if total else "") + one[4]
            raise UserError(f"{folder} lacks the shard {name} ({len(missing)} of {len(missing) + len(these)} are "
                            "missing); fetch the missing shards, or renumber the shards")  # fmt: skip
    return found


def _indexed(folder: str, kind: str, split: str, shards: Sequence[str]) -> Members:
    """Return the images in `shards`. Build their index once and keep it in the user's cache."""
    made = {"tar": Members, "tfrecord": Examples}[kind]
    state = {name: [(stat := os.stat(os.path.join(folder, name))).st_size, stat.st_mtime_ns] for name in shards}
    place = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "kfac-imagenet")
    place /= f"{hashlib.sha256(os.fsencode(os.path.abspath(folder))).hexdigest()[:16]}-{split}.npz"
    try:
        with np.load(place) as saved:
            known = {name: saved[name] for name in saved.files}
            before = json.loads(str(known.pop("state")))
    except Exception:  # the index is missing or damaged: build it again
        before = {}
    hint = f"restore it, or remove {place} if the shards were changed on purpose"
    for name, (size, _) in before.items():
        if name not in state:
            raise UserError(f"{folder} has lost the shard {name}, which was there before; {hint}")
        if state[name][0] < size:
            raise UserError(f"the shard {os.path.join(folder, name)} has {state[name][0]} bytes but had {size} "
                            f"before; {hint}")  # fmt: skip
    if before == state:
        return made(folder, shards, **known)
    with ThreadPoolExecutor(8) as pool:
        parts = pool.map(lambda name: _read(os.path.join(folder, name), kind), shards)
        rows = [(number, *row) for number, part in enumerate(parts) for row in part]
    columns = map(np.array, zip(*rows, strict=True))
    index: dict[str, Any] = dict(zip(("shard", "offset", "size", "names", "labels"), columns, strict=True))
    with contextlib.suppress(OSError):  # without a writable cache, every run builds the index
        place.parent.mkdir(parents=True, exist_ok=True)
        partial = place.with_name(f".{uuid.uuid4().hex}.npz")
        np.savez(partial, state=np.array(json.dumps(state)), **index)
        partial.replace(place)  # several processes may do this at once; the last file stays
    return made(folder, shards, **index)


def _lengths(folder: str, files: Sequence[str], kind: str, parts: dict[str, Any]) -> list[str]:
    """Compare the shards with the counts in `dataset_info.json` or `_info.json`.

    Without such a file, return questions about shards that may be missing or incomplete.
    """
    found = {split: np.bincount(part.shard, minlength=len(part.shards)).tolist() for split, part in parts.items()}
    for path in (os.path.join(folder, name) for name in NOTES if name in files):
        try:
            rows = json.loads(fetch(path))["splits"]
            rows = rows if isinstance(rows, list) else rows.values()
            noted = {row["name"]: [int(n) for n in row.get("shardLengths") or row["shard_lengths"]] for row in rows}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path} does not say how many images the shards hold ({error}); fetch it again, or "
                            "remove it if the shards are good") from error  # fmt: skip
        for split, have in found.items():
            want = next((noted[name] for name in (split, "validation", "test") if name in noted), have)
            if len(want) != len(have):
                raise UserError(f"{path} lists {len(want)} shards for {split}, found {len(have)}; fetch the others")
            for name, n, wanted in zip(parts[split].shards, have, want, strict=True):
                if n != wanted:
                    raise UserError(f"the shard {os.path.join(folder, name)} holds {n} images, but {path} says "
                                    f"{wanted}; fetch it again")  # fmt: skip
        return []
    # All shards hold equally many images, except the last tar shard. If that shard is full, a later shard is probably
    # missing.
    notes = []
    for split, have in found.items():
        if kind == "tar" and len(have) > 1 and len({*have}) == 1:
            notes.append(f"all {len(have)} tar shards of {split} hold {have[0]} images: is a later shard missing?")
        rest = zip(parts[split].shards, have[: -1 if kind == "tar" else None], strict=False)
        notes += [
            f"{name} holds {n} images, others {max(have)}: is it complete?" for name, n in rest if n < 0.9 * max(have)
        ]
    return notes[:3]


Row = tuple[int, int, bytes, int]


def _read(path: str, kind: str) -> list[Row]:
    """Return offset, size, name and label for each image in a shard."""
    try:
        rows = patiently(lambda: {"tar": _tar, "tfrecord": _tfrecord}[kind](path), path)
    except (tarfile.TarError, ValueError, IndexError, KeyError) as error:
        raise UserError(f"{path} cannot be read as a {kind} file ({error}); fetch it again") from error
    if not rows:
        raise UserError(f"{path} holds no images; the original archives must be unpacked into train/<class>/ and val/")
    return rows


def _tar(path: str) -> list[Row]:
    images: dict[str, tuple[int, int, bytes]] = {}
    labels: dict[str, int] = {}
    with open(path, "rb") as raw, tarfile.open(fileobj=raw, mode="r:") as file:
        for member in file:
            where, _, name = member.name.rpartition("/")
            stem, _, ending = name.partition(".")
            key = f"{where}/{stem}"
            if not member.isreg() or not stem:
                continue
            if f".{ending.lower()}" in ENDINGS:
                images[key] = (member.offset_data, member.size, os.fsencode(member.name))
            elif ending == "cls":
                text = file.extractfile(member).read().strip()  # type: ignore[union-attr]
                if not text.isdigit():
                    raise UserError(f"{member.name} in {path} must hold the number of a class, from 0")
                labels[key] = int(text)
        raw.seek(-512, os.SEEK_END)
        if any(raw.read()):
            raise ValueError("it is cut short: its end is missing")
    if missing := sorted(images.keys() ^ labels.keys()):
        key = missing[0].lstrip("/")
        raise UserError(f"{path} lacks {key}.{'cls' if missing[0] in images else 'jpg'}: each image needs its class")
    return [(*image, labels[key]) for key, image in images.items()]


# TFRecord files. Packages other than TensorFlow read them from start to end only. This code reads by offset.


def _tfrecord(path: str) -> list[Row]:
    """Return a row for each record.

    A record is an 8-byte length and its checksum, then a `tf.train.Example` and its checksum. This function compares
    the length's checksum. `Examples.read` compares the other checksum when it reads the image. Otherwise the first
    step would have to wait until the whole data set was read.
    """
    rows: list[Row] = []
    # The memory map loads only the pages that are accessed.
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = 0
        while at < len(data):
            begin, size = at + 12, int.from_bytes(data[at : at + 8], "little")
            at = begin + size + 4
            if begin <= len(data) and _masked_crc(data[begin - 12 : begin - 4]) != data[begin - 4 : begin]:
                raise ValueError(f"it is damaged: the length of record {len(rows)} does not agree with its checksum")
            if at > len(data):
                raise ValueError(f"it is cut short: record {len(rows)} ends at byte {at} of {len(data)}")
            rows.append((begin, size + 4, b"%d" % len(rows), _example(data, begin, begin + size)[2]))
    return rows


def _masked_crc(data: bytes) -> bytes:
    """Return the CRC-32C in TFRecord's form: rotated by 15 bits, plus a constant."""
    crc = google_crc32c.value(data)
    return (((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF).to_bytes(4, "little")


def _example(data: Any, begin: int, end: int) -> tuple[int, int, int]:
    """Return the image's begin and end in a `tf.train.Example`, and its label, without reading the image."""
    found: dict[bytes, tuple[int, int]] = {}
    for _, a, b in _fields(data, begin, end):  # Example.features
        for _, c, d in _fields(data, a, b):  # Features.feature, a map
            entry = {field: (e, f) for field, e, f in _fields(data, c, d)}
            # Take the first value in Feature.bytes_list, int64_list or float_list.
            for _, e, f in _fields(data, *entry.get(2, (0, 0))):
                found[bytes(data[slice(*entry[1])])] = next(((g, h) for _, g, h in _fields(data, e, f)), (e, f))
    for image, label, first in ((b"image", b"label", 0), (b"image/encoded", b"image/class/label", 1)):
        if image in found and label in found:
            # A number is a varint, whether packed or not.
            return *found[image], _varint(data, found[label][0])[0] - first
    names = ", ".join(name.decode(errors="replace") for name in sorted(found))
    raise ValueError(f"it has no image and label, but {names}")


def _fields(data: Any, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield number, begin and end for each field in a protocol buffer."""
    while at < end:
        tag, at = _varint(data, at)
        match tag & 7:
            case 0:
                begin, at = at, _varint(data, at)[1]
            case 2:
                size, begin = _varint(data, at)
                at = begin + size
            case wire:
                begin, at = at, at + {1: 8, 5: 4}[wire]
        yield tag >> 3, begin, at


def _varint(data: Any, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        shift, at = shift + 7, at + 1
        if byte < 128:
            return value, at
