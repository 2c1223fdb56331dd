"""Where the encoded images of a data set are, and what is missing: in class folders, tar shards (webdataset), TFRecord
(TFDS) and Parquet (Hugging Face), on a file system or in a bucket.

What is found is arrays, not a million Python objects: every worker process gets a copy of it.
"""

import functools
import hashlib
import io
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

from files import UserError, bucket, entries, fetch, opened, patiently

ENDINGS = {".jpeg", ".jpg", ".jpe", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm"}
KINDS = {"tar": r"\.tar$", "tfrecord": r"\.tfrecord|^(train|validation)-\d+-of-\d+$", "parquet": r"\.parquet$"}
SPLITS = ("train", "val")
IMAGENET_SIZES = (1_281_167, 50_000)


class Files:
    """Files below `root`, one image each."""

    def __init__(self, root: Any, names: Sequence[str], labels: Sequence[int]) -> None:
        self.root, self.labels = str(root), np.array(labels, np.int32)
        self.names = np.array([os.fsencode(name) for name in names])

    def read(self, index: int) -> bytes:
        return fetch(self.name(index))

    def name(self, index: int) -> str:
        return os.path.join(self.root, os.fsdecode(self.names[index]))

    def identity(self) -> bytes:
        """The same as long as the images are."""
        return b"\n".join([*self.names.tolist(), self.labels.tobytes()])


class Members(Files):
    """Parts of shards, by their offsets: `shard` int [n] numbers `shards`, the rest is by image."""

    def __init__(self, root: str, shards: Sequence[str], shard: Any, offset: Any, size: Any, names: Any, labels: Any):
        self.root, self.shards, self.names, self.labels = root, list(shards), names, labels.astype(np.int32)
        self.shard, self.offset, self.size = shard, offset, size

    def path(self, index: int) -> str:
        return os.path.join(self.root, self.shards[self.shard[index]])

    def read(self, index: int) -> bytes:
        return fetch(self.path(index), int(self.offset[index]), int(self.size[index]))

    def name(self, index: int) -> str:
        return f"{self.path(index)}:{os.fsdecode(self.names[index])}"


class Rows(Members):
    """Rows of Parquet files: `offset` is the row group, `size` the row in it."""

    def read(self, index: int) -> bytes:
        return _row_group(self.path(index), int(self.offset[index]))[int(self.size[index])].as_py()


@functools.lru_cache(maxsize=4)
def _row_group(path: str, group: int) -> Any:
    """One image costs its whole row group, 100 images in the Hugging Face copy, of which the last few are kept."""
    import pyarrow.parquet as pq

    def images() -> Any:
        with opened(path) as raw, pq.ParquetFile(raw) as file:
            return file.read_row_group(group, columns=["image"]).column("image").combine_chunks().field("bytes")

    return patiently(images, path)


# What is there.


class Found(NamedTuple):
    """Both splits, and a sentence about what a user should know."""

    train: Files
    val: Files
    num_classes: int
    note: str


def find(folder: Any) -> Found:
    """The images in `folder`; raises `UserError` with the way out where they, or some of them, are not there."""
    folder = str(folder)
    if "://" not in folder and not os.path.isdir(folder):
        raise UserError(f"--data-dir {folder} {'is not a folder' if os.path.exists(folder) else 'does not exist'}")
    folders, files = entries(folder)
    inner = folder
    if "train" not in folders and "data" in folders:
        inner, files = os.path.join(folder, "data"), entries(os.path.join(folder, "data"))[1]
    kind = next((kind for kind in KINDS if _shards(inner, files, kind, "train")), None)
    classes: list[str] = []
    if kind is None or "train" in folders:
        train, val, classes, notes = _class_folders(folder, folders)
    else:
        parts = [_shards(inner, files, kind, split) for split in SPLITS]
        if not parts[1]:
            raise UserError(f"--data-dir {inner} has shards for training ({parts[0][0]}) but no *val* {kind} shards")
        (train, note), (val, other) = (_indexed(inner, kind, *part) for part in zip(SPLITS, parts, strict=True))
        if "dataset_info.json" in files:
            _compare(os.path.join(inner, "dataset_info.json"), {"train": train, "validation": val})
        notes = [note or other]
        if kind == "parquet":
            notes.append("each image costs the reading of a Parquet row group, which tar shards or TFRecord do not")
    have, held = (set(part.labels.tolist()) for part in (train, val))
    if len(have) < 2:
        label = classes[min(have)] if classes else min(have)
        raise UserError(f"the images for training in {folder} are of one class only, {label}; training needs two")
    if missing := sorted(have ^ held):
        label = classes[missing[0]] if classes else missing[0]
        where, lacks = ("training", "validation") if missing[0] in have else ("validation", "training")
        raise UserError(f"{folder} has images of class {label} for {where} but none for {lacks} ({len(missing)} such "
                        "classes); put them back, or take that class out of both")  # fmt: skip
    for what, part, count in zip(("training", "validation"), (train, val), IMAGENET_SIZES, strict=True):
        if len(have) == 1000 and len(part.labels) != count:
            notes.append(f"ILSVRC2012 has {count:,} {what} images, here are {len(part.labels):,}")
    return Found(train, val, max(have) + 1, "; ".join(filter(None, notes)))


# Class folders.


def _class_folders(folder: str, found: Sequence[str]) -> tuple[Files, Files, list[str], list[str]]:
    if missing := [split for split in SPLITS if split not in found]:
        raise UserError(f"--data-dir has no folder {missing[0]}/ ({os.path.join(folder, missing[0])}); it must hold "
                        "train/<class>/*.JPEG and val/<class>/*.JPEG, or shards *train* and *val* in tar, tfrecord or "
                        "parquet")  # fmt: skip
    (seen, loose), (held, flat) = (entries(os.path.join(folder, split)) for split in SPLITS)
    images = [name for name in flat if re.match(r"ILSVRC2012_val_\d{8}\.", name)]
    for split, inside, files in (("train", seen, loose), ("val", held or images, flat)):
        if not inside:
            what = f"a folder of {len(files)} files ({files[0]}) without classes" if files else "empty"
            raise UserError(f"{os.path.join(folder, split)} is {what}: it must hold one folder of images for each "
                            "class")  # fmt: skip
    classes = sorted({*seen, *held})
    train, other = _scan(folder, "train", seen, classes)
    val, more = _scan(folder, "val", held, classes) if held else (_flat(folder, images, classes), [])
    ignored = [f"{len(other + more)} file(s) ignored, for they do not end like images: {os.path.join(folder, name)}"
               for name in (other + more)[:1]]  # fmt: skip
    return train, val, classes, ignored


def _scan(folder: str, split: str, found: Sequence[str], classes: list[str]) -> tuple[Files, list[str]]:
    """The images of one split, at any depth of their class's folder, and the files that are not taken for images."""
    names: list[str] = []
    labels: list[int] = []
    other: list[str] = []
    for name in found:
        files = list(_below(folder, f"{split}/{name}"))
        images = [file for file in files if os.path.splitext(file)[1].lower() in ENDINGS]
        if not images:
            raise UserError(f"the class folder {os.path.join(folder, split, name)} holds no images")
        names += images
        labels += [classes.index(name)] * len(images)
        other += sorted({*files} - {*images})
    return Files(folder, names, labels), other


def _below(root: str, folder: str) -> Iterator[str]:
    folders, files = entries(os.path.join(root, folder))
    yield from (f"{folder}/{name}" for name in files)
    for name in folders:
        yield from _below(root, f"{folder}/{name}")


DEVKIT = "ILSVRC2012_devkit_t12"
WAY_OUT = f"sort them into val/<class>/, or unpack {DEVKIT}.tar.gz into --data-dir"


def _flat(folder: str, names: list[str], classes: list[str]) -> Files:
    """Validation images in one folder, as their archive unpacks; what they show is in the development kit."""
    from scipy.io import loadmat

    val, kit = os.path.join(folder, "val"), os.path.join(folder, DEVKIT, "data")
    if DEVKIT not in entries(folder)[0]:
        raise UserError(f"the images in {val} are in no class folders, so what they show is unknown; {WAY_OUT}")
    path, meta = os.path.join(kit, "ILSVRC2012_validation_ground_truth.txt"), os.path.join(kit, "meta.mat")
    try:
        truth = [int(line) for line in fetch(path).split()]
        table = np.atleast_1d(loadmat(io.BytesIO(fetch(meta)), squeeze_me=True)["synsets"])
        wnids = {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in table}
    except Exception as error:  # scipy raises nearly anything on damaged files
        raise UserError(f"{path} and {meta} do not say what the images in {val} show ({error}); {WAY_OUT}") from error
    numbers, labels = [int(name[15:23]) for name in names], []
    if sorted(numbers) != list(range(1, len(truth) + 1)):
        raise UserError(f"{path} has {len(truth)} lines, but {val} has {len(names)} images, the last with number "
                        f"{max(numbers)}; unpack both archives again")  # fmt: skip
    for number in numbers:
        wnid = wnids.get(truth[number - 1])
        if wnid not in classes:
            raise UserError(f"{path} has class {truth[number - 1]} in line {number}, in {meta} {wnid}, for which there "
                            "is no folder in train/; unpack the archives again")  # fmt: skip
        labels.append(classes.index(wnid))
    return Files(folder, [f"val/{name}" for name in names], labels)


# Shards.


def _shards(folder: str, files: Sequence[str], kind: str, split: str) -> list[str]:
    """The names of the shards of one split, all of them: a gap in their numbers is refused."""
    found = [name for name in files if split in name and re.search(KINDS[kind], name)]
    # PREFIX-00007-of-00294, PREFIX-000007.tar, PREFIX-00007-of-00294-0123abcd.parquet
    pattern = re.compile(r"(.*?)(\d+)(?:-of-(\d+))?(?:-[0-9a-f]+)?((?:\.\w+)?)")
    numbered = [match for name in found if (match := pattern.fullmatch(name))]
    for prefix, total in {(match[1], match[3]) for match in numbered}:
        these = {int(match[2]): match for match in numbered if (match[1], match[3]) == (prefix, total)}
        if not total and len(these) == 1:
            continue  # a year, or a version
        first = 0 if total or 1 not in these else 1
        missing = [k for k in range(first, int(total or max(these) + 1)) if k not in these]
        if missing:
            one = next(iter(these.values()))
            name = f"{prefix}{missing[0]:0{len(one[2])}d}" + (f"-of-{total}" if total else "") + one[4]
            raise UserError(f"{folder} lacks the shard {name} ({len(missing)} of {len(missing) + len(these)} are "
                            "missing); fetch what is missing, or number the shards anew")  # fmt: skip
    return found


def _indexed(folder: str, kind: str, split: str, shards: Sequence[str]) -> tuple[Members, str]:
    """The images in `shards`, by an index that is made once and kept, and a note where it could not be kept."""
    made = Rows if kind == "parquet" else Members
    state = {name: _size_and_version(os.path.join(folder, name)) for name in shards}
    # Beside the shards, or where those cannot be written, in the user's cache.
    remote, name = "://" in folder, folder if "://" in folder else os.path.abspath(folder)
    own = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "kfac-imagenet")
    own /= f"{hashlib.sha256(os.fsencode(name)).hexdigest()[:16]}-{split}.npz"
    places = [own] if remote else [Path(folder, f".index-{split}.npz"), own]
    for place in places:
        try:
            with np.load(place) as saved:
                known = {name: saved[name] for name in saved.files}
                before = json.loads(str(known.pop("state")))
        except Exception:  # none, or a damaged one: made again
            continue
        hint = f"restore it, or remove {place} if the shards are meant to be others"
        for name, (size, _) in before.items():
            if name not in state:
                raise UserError(f"{folder} has lost the shard {name}, which was there before; {hint}")
            if state[name][0] < size:
                raise UserError(f"the shard {os.path.join(folder, name)} has {state[name][0]} bytes, and had {size} "
                                f"before; {hint}")  # fmt: skip
        if before == state:
            return made(folder, shards, **known), ""
    with ThreadPoolExecutor(8) as pool:
        parts = pool.map(lambda name: _read(os.path.join(folder, name), kind), shards)
        rows = [(number, *row) for number, part in enumerate(parts) for row in part]
    columns = map(np.array, zip(*rows, strict=True))
    index: dict[str, Any] = dict(zip(("shard", "offset", "size", "names", "labels"), columns, strict=True))
    reason = ""
    for place in places:
        partial = place.with_name(f".index-{uuid.uuid4().hex}.npz")
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            np.savez(partial, state=np.array(json.dumps(state)), **index)
            os.replace(partial, place)  # processes of several machines may do this at once; the last one's stays
            return made(folder, shards, **index), ""
        except OSError as error:
            reason = f"the index of the shards is made anew each time, for {place} cannot be written: {error.strerror}"
    return made(folder, shards, **index), reason


def _compare(path: str, parts: dict[str, Any]) -> None:
    """Compares the number of images in each shard with what TFDS has noted beside them."""
    try:
        noted = {row["name"]: list(map(int, row["shardLengths"])) for row in json.loads(fetch(path))["splits"]}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} does not say how many images the shards hold ({error}); fetch it again, or remove it "
                        "if the shards are good") from error  # fmt: skip
    for split, part in parts.items():
        found = np.bincount(part.shard, minlength=len(part.shards)).tolist()
        wanted = noted.get(split, found)
        if len(wanted) != len(found):
            raise UserError(
                f"{path} has {len(wanted)} shards for {split}, here are {len(found)}; fetch what is missing"
            )
        for shard, have, want in zip(part.shards, found, wanted, strict=True):
            if have != want:
                raise UserError(f"the shard {os.path.join(part.root, shard)} holds {have} images, but {want} by {path}"
                                "; fetch it again")  # fmt: skip


def _size_and_version(path: str) -> list[Any]:
    if "://" not in path:
        stat = os.stat(path)
        return [stat.st_size, stat.st_mtime_ns]
    files, inner = bucket(path)
    return [files.size(inner), files.ukey(inner)]


Row = tuple[int, int, bytes, int]


def _read(path: str, kind: str) -> list[Row]:
    """Offset, size, name and label of the images in one shard."""
    reader = {"tar": _tar, "tfrecord": _tfrecord, "parquet": _parquet}[kind]
    try:
        rows = patiently(lambda: reader(path), path)
    except (tarfile.TarError, ValueError, IndexError, KeyError) as error:
        raise UserError(f"{path} cannot be read as a {kind} file ({error}); fetch it again") from error
    if not rows:
        raise UserError(f"{path} holds no images; the original archives must be unpacked into train/<class>/ and val/")
    return rows


def _tar(path: str) -> list[Row]:
    images: dict[str, tuple[int, int, bytes]] = {}
    labels: dict[str, int] = {}
    with opened(path) as raw, tarfile.open(fileobj=raw, mode="r:") as file:
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
        what = f"{key}.cls, the number of its class," if missing[0] in images else f"the image {key}.jpg"
        raise UserError(f"{path} lacks {what} beside {key}; each image needs both")
    return [(*image, labels[key]) for key, image in images.items()]


def _parquet(path: str) -> list[Row]:
    try:
        import pyarrow.parquet as pq
    except ImportError as error:
        raise UserError(f"{path} needs the package pyarrow; pip install pyarrow") from error
    with opened(path) as raw, pq.ParquetFile(raw) as file:
        names = set(file.schema_arrow.names)
        if not {"image", "label"} <= names:
            raise ValueError(f"it has the columns {', '.join(sorted(names))}, not image and label")
        rows: list[Row] = []
        for group in range(file.num_row_groups):
            labels = file.read_row_group(group, columns=["label"]).column("label").to_pylist()
            rows += [(group, row, b"%d.%d" % (group, row), label) for row, label in enumerate(labels)]
    if any(label is None or label < 0 for *_, label in rows):
        raise ValueError("it has images without a label, as the test split has")
    return rows


def _tfrecord(path: str) -> list[Row]:
    """Each record: its length in 8 bytes, 4 of checksum, a `tf.train.Example`, 4 of checksum.

    The checksums of the lengths are compared. Those of the contents would have all images read before the first step.
    """
    rows: list[Row] = []
    with opened(path) as file:
        # A map, in which only what is looked at is read; a bucket has none.
        data = file.read() if "://" in path else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        at = 0
        while at < len(data):
            begin, size = at + 12, int.from_bytes(data[at : at + 8], "little")
            at = begin + size + 4
            if begin <= len(data) and _masked_crc(data[begin - 12 : begin - 4]) != data[begin - 4 : begin]:
                raise ValueError(f"it is damaged: the length of record {len(rows)} does not agree with its checksum")
            if at > len(data):
                raise ValueError(f"it is cut short: record {len(rows)} ends at byte {at} of {len(data)}")
            rows.append(_example(data, begin, begin + size, len(rows)))
    return rows


def _masked_crc(data: bytes) -> bytes:
    """The CRC-32C of bytes as TFRecord writes it: turned by 15 bits, and with a constant added."""
    crc = google_crc32c.value(data)
    return (((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF).to_bytes(4, "little")


def _example(data: Any, begin: int, end: int, number: int) -> Row:
    """Where the image of a `tf.train.Example` is, which is not read for it, and its label."""
    found: dict[bytes, tuple[int, int]] = {}
    for _, a, b in _fields(data, begin, end):  # Example.features
        for _, c, d in _fields(data, a, b):  # Features.feature, a map
            entry = {field: (e, f) for field, e, f in _fields(data, c, d)}
            # Feature.bytes_list or int64_list or float_list, and in it the first value.
            for _, e, f in _fields(data, *entry.get(2, (0, 0))):
                found[bytes(data[slice(*entry[1])])] = next(((g, h) for _, g, h in _fields(data, e, f)), (e, f))
    for image, label, first in ((b"image", b"label", 0), (b"image/encoded", b"image/class/label", 1)):
        if image in found and label in found:
            start, stop = found[image]
            # Packed or not, a number is a varint.
            return start, stop - start, b"%d" % number, _varint(data, found[label][0])[0] - first
    names = ", ".join(name.decode(errors="replace") for name in sorted(found))
    raise ValueError(f"record {number} has no image and label, but {names}")


def _fields(data: Any, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Number, beginning and end of each field of a protocol buffer."""
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
