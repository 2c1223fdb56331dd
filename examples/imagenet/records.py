"""Where the encoded images of a data set are, what is missing, and how their bytes are read.

Class folders, tar shards (webdataset), TFRecord (TFDS), Parquet (Hugging Face). What is found is arrays, not a million
Python objects: it is handed to every worker process, which imports nothing heavier than this module for it.
"""

import errno
import hashlib
import mmap
import os
import re
import tarfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

ENDINGS = {".jpeg", ".jpg", ".jpe", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm"}
KINDS = {"tar": r"\.tar$", "tfrecord": r"\.tfrecord|^(train|validation)-\d+-of-\d+$", "parquet": r"\.parquet$"}
SPLITS = {"train": r"train", "val": r"val"}
# A stale or busy file system gets so many seconds before the run stops.
RETRY_AFTER = (0.2, 1.0, 5.0)
IMAGENET_SIZES = {"training": 1_281_167, "validation": 50_000}


class UserError(Exception):
    """Something the user can put right; reported as one sentence, without a traceback."""


class Records(Protocol):
    """Encoded images with labels int32 [n]."""

    labels: np.ndarray

    def read(self, index: int) -> bytes: ...

    def name(self, index: int) -> str: ...

    def identity(self) -> bytes: ...  # the same as long as the images are


class Found(NamedTuple):
    """Both splits, and a sentence about what a user should know."""

    train: Records
    val: Records
    num_classes: int
    note: str


def patiently(read: Callable[[], Any], what: str) -> Any:
    """`read()`, tried again where the system fails: an I/O error says nothing about the image."""
    for pause in (*RETRY_AFTER, None):
        try:
            return read()
        except OSError as error:
            if pause is None:
                raise UserError(
                    f"{what} cannot be read: {error.strerror or error} ({len(RETRY_AFTER) + 1} tries); this is the "
                    "file system's fault and not a broken image: mend it and start again, the run goes on where it was"
                ) from error
            time.sleep(pause)


class Files:
    """Files below `root`, one image each."""

    def __init__(self, root: Path, names: Sequence[str], labels: Sequence[int]) -> None:
        self.root = os.fsencode(root)
        self.names = np.array([os.fsencode(name) for name in names])
        self.labels = np.array(labels, np.int32)

    def read(self, index: int) -> bytes:
        def whole() -> bytes:
            with open(os.path.join(self.root, self.names[index]), "rb") as file:
                return file.read()

        return patiently(whole, self.name(index))

    def name(self, index: int) -> str:
        return os.fsdecode(os.path.join(self.root, self.names[index]))

    def identity(self) -> bytes:
        return b"\n".join([*self.names.tolist(), self.labels.tobytes()])


class Members:
    """Parts of shards, by their offsets: `shard` int32 [n] numbers `shards`, the rest is by image."""

    def __init__(
        self, root: Path, shards: Sequence[str], shard: np.ndarray, offset: np.ndarray, size: np.ndarray,
        names: np.ndarray, labels: np.ndarray,
    ) -> None:  # fmt: skip
        self.root, self.shards = os.fsencode(root), [os.fsencode(name) for name in shards]
        self.shard, self.offset, self.size, self.names = shard, offset, size, names
        self.labels = labels.astype(np.int32)

    def read(self, index: int) -> bytes:
        size = int(self.size[index])

        def part() -> bytes:
            with open(os.path.join(self.root, self.shards[self.shard[index]]), "rb") as file:
                file.seek(int(self.offset[index]))
                data = file.read(size)
            if len(data) < size:
                raise OSError(errno.EIO, f"the shard ends after {len(data)} of its {size} bytes")
            return data

        return patiently(part, self.name(index))

    def name(self, index: int) -> str:
        path = os.path.join(self.root, self.shards[self.shard[index]])
        return f"{os.fsdecode(path)}:{os.fsdecode(self.names[index])}"

    def identity(self) -> bytes:
        return b"\n".join([*self.names.tolist(), self.labels.tobytes()])


class Rows(Members):
    """Rows of Parquet files: `offset` is the row group, `size` the row in it.

    One image costs its whole row group, 100 images in the Hugging Face copy, of which the last few are kept.
    """

    def read(self, index: int) -> bytes:
        shard, group, row = self.shard[index], int(self.offset[index]), int(self.size[index])
        path = os.fsdecode(os.path.join(self.root, self.shards[shard]))

        def images() -> Any:
            import pyarrow.parquet as pq

            with pq.ParquetFile(path) as file:
                return file.read_row_group(group, columns=["image"]).column("image").combine_chunks().field("bytes")

        kept: dict[Any, Any] = self.__dict__.setdefault("_kept", {})
        if (shard, group) not in kept:
            while len(kept) >= 4:
                kept.pop(next(iter(kept)))
            kept[shard, group] = patiently(images, path)
        return kept[shard, group][row].as_py()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_kept"}


# What is there.


def find(folder: Path) -> Found:
    """The images in `folder`; raises `UserError` with the way out where they, or some of them, are not there."""
    if not folder.is_dir():
        raise UserError(f"--data-dir {folder} {'is not a folder' if folder.exists() else 'does not exist'}")
    inner = folder / "data" if not (folder / "train").is_dir() and (folder / "data").is_dir() else folder
    kind = next((kind for kind in KINDS if _shards(inner, kind, "train")), None)
    if kind is None or (folder / "train").is_dir():
        train, val, names, note = _class_folders(folder)
    else:
        parts = [_shards(inner, kind, split) for split in SPLITS]
        if not parts[1]:
            raise UserError(f"--data-dir {inner} has shards for training ({parts[0][0]}) but no *val* {kind} shards")
        (train, note), (val, other) = (
            _indexed(inner, kind, split, part) for split, part in zip(SPLITS, parts, strict=True)
        )
        names, note = None, note or other
        if kind == "parquet":
            note += "each image costs the reading of a Parquet row group, which tar shards or TFRecord do not"
    have, held = (set(part.labels.tolist()) for part in (train, val))
    if len(have) < 2:
        raise UserError(f"the images for training in {folder} are of one class only, {min(have)}; training needs two")
    if missing := sorted(have ^ held):
        label = names[missing[0]] if names else missing[0]
        where, lacks = ("training", "validation") if missing[0] in have else ("validation", "training")
        raise UserError(f"{folder} has images of class {label} for {where} but none for {lacks} ({len(missing)} such "
                        "classes); put them back, or take that class out of both")  # fmt: skip
    for what, part in (("training", train), ("validation", val)):
        if len(have) == 1000 and len(part.labels) != IMAGENET_SIZES[what]:
            note += f"{'; ' if note else ''}ILSVRC2012 has {IMAGENET_SIZES[what]:,} {what} images, here are "
            note += f"{len(part.labels):,}"
    return Found(train, val, max(have) + 1, note)


def _entries(folder: Path, folders: bool) -> list[str]:
    def listed() -> list[str]:
        with os.scandir(folder) as entries:
            return sorted(entry.name for entry in entries if entry.name[0] != "." and entry.is_dir() == folders)

    return patiently(listed, str(folder))


def _class_folders(folder: Path) -> tuple[Records, Records, list[str], str]:
    for split in SPLITS:
        if not (folder / split).is_dir():
            raise UserError(
                f"--data-dir has no folder {split}/ ({folder / split}); it must hold train/<class>/*.JPEG and "
                "val/<class>/*.JPEG, or shards *train* and *val* in tar, tfrecord or parquet"
            )
    classes, found = (_entries(folder / split, folders=True) for split in SPLITS)
    if not classes:
        raise UserError(f"{folder / 'train'} is {_holding(folder / 'train')}: it must hold one folder of images for "
                        "each class")  # fmt: skip
    if len(classes) < 2:
        raise UserError(f"{folder / 'train'} has one class only ({classes[0]}); training needs two")
    train, other = _scan(folder, "train", classes, classes)
    flat = [name for name in _entries(folder / "val", folders=False) if re.match(r"ILSVRC2012_val_\d{8}\.", name)]
    if flat and not found:
        val: Records = _flat(folder, flat, classes)
    elif not found:
        raise UserError(f"{folder / 'val'} is {_holding(folder / 'val')}: it must hold one folder of images for each "
                        "class, or ILSVRC2012_val_*.JPEG")  # fmt: skip
    elif extra := sorted(set(found) - set(classes)):
        raise UserError(f"{folder / 'val'} has a class {extra[0]} that train/ does not have")
    else:
        val, more = _scan(folder, "val", found, classes)
        other += more
    note = f"{len(other)} files ignored, for they do not end like images: {folder / other[0]}" if other else ""
    return train, val, classes, note + (" and others" if len(other) > 1 else "")


def _holding(folder: Path) -> str:
    files = _entries(folder, folders=False)
    return f"a folder of {len(files)} files ({files[0]}) without classes" if files else "empty"


def _scan(folder: Path, split: str, found: Sequence[str], classes: Sequence[str]) -> tuple[Files, list[str]]:
    """The images of one split, at any depth of their class's folder, and the files that are not taken for images."""
    names: list[str] = []
    labels: list[int] = []
    other: list[str] = []
    numbers = {name: number for number, name in enumerate(classes)}
    for name in found:
        before = len(names)
        waiting = [f"{split}/{name}"]
        while waiting:
            inner = waiting.pop()
            waiting += [f"{inner}/{below}" for below in reversed(_entries(folder / inner, folders=True))]
            for file in _entries(folder / inner, folders=False):
                image = os.path.splitext(file)[1].lower() in ENDINGS
                (names if image else other).append(f"{inner}/{file}")
        if len(names) == before:
            raise UserError(f"the class folder {folder / split / name} holds no images")
        labels += [numbers[name]] * (len(names) - before)
    return Files(folder, names, labels), other


def _flat(folder: Path, names: list[str], classes: Sequence[str]) -> Files:
    """Validation images in one folder, as their archive unpacks; what they show is in the development kit."""
    from scipy.io import loadmat

    kit = next((path for path in (folder / "ILSVRC2012_devkit_t12" / "data", folder)
                if (path / "ILSVRC2012_validation_ground_truth.txt").is_file()), None)  # fmt: skip
    if kit is None:
        raise UserError(f"the images in {folder / 'val'} are in no class folders, and {folder}/ILSVRC2012_devkit_t12/"
                        "data/ILSVRC2012_validation_ground_truth.txt is not there; unpack ILSVRC2012_devkit_t12.tar.gz "
                        "into --data-dir")  # fmt: skip
    path = kit / "ILSVRC2012_validation_ground_truth.txt"
    try:
        truth = [int(line) for line in path.read_text().split()]
    except (OSError, ValueError) as error:
        raise UserError(f"{path} must have one number in each line ({error})") from error
    numbers = [int(Path(name).stem[-8:]) for name in names]
    if sorted(numbers) != list(range(1, len(truth) + 1)):
        raise UserError(f"{path} has {len(truth)} lines, but {folder / 'val'} has {len(names)} images, the last with "
                        f"number {max(numbers)}; unpack both archives again")  # fmt: skip
    try:
        table = np.atleast_1d(loadmat(kit / "meta.mat", squeeze_me=True)["synsets"])
        wnids = {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in table}
    except Exception as error:  # scipy raises nearly anything on damaged files
        raise UserError(f"{kit / 'meta.mat'} is not the development kit's table of classes ({error}); unpack "
                        "ILSVRC2012_devkit_t12.tar.gz again") from error  # fmt: skip
    labels = []
    for number in numbers:
        wnid = wnids.get(truth[number - 1])
        if wnid not in classes:
            raise UserError(f"{path} has class {truth[number - 1]} in line {number}, in {kit / 'meta.mat'} {wnid}, for "
                            f"which {folder / 'train'} has no folder; unpack the archives again")  # fmt: skip
        labels.append(classes.index(wnid))
    return Files(folder, [f"val/{name}" for name in names], labels)


# Shards.


def _shards(folder: Path, kind: str, split: str) -> list[str]:
    """The names of the shards of one split, all of them: a gap in their numbers is refused."""
    found = [name for name in _entries(folder, folders=False)
             if re.search(SPLITS[split], name) and re.search(KINDS[kind], name)]  # fmt: skip
    # PREFIX-00007-of-00294, PREFIX-000007.tar, PREFIX-00007-of-00294-0123abcd.parquet
    pattern = re.compile(r"(.*?)(\d+)(?:-of-(\d+))?(?:-[0-9a-f]+)?((?:\.\w+)?)")
    numbered = [match for name in found if (match := pattern.fullmatch(name))]
    for prefix, total in {(match[1], match[3]) for match in numbered}:
        these = {int(match[2]): match for match in numbered if (match[1], match[3]) == (prefix, total)}
        if not total and len(these) == 1:
            continue  # a year, or a version
        missing = [
            k for k in range(int(total or max(these) + 1)) if k not in these and (total or k > 0 or 1 not in these)
        ]
        if missing:
            digits, ending = len(next(iter(these.values()))[2]), next(iter(these.values()))[4]
            name = f"{prefix}{missing[0]:0{digits}d}" + (f"-of-{total}" if total else "") + ending
            raise UserError(f"{folder} lacks the shard {name} ({len(missing)} of {len(missing) + len(these)} are "
                            "missing); fetch what is missing, or number the shards anew")  # fmt: skip
    return found


def _indexed(folder: Path, kind: str, split: str, shards: Sequence[str]) -> tuple[Members, str]:
    """The images in `shards`, by an index that is made once and kept, and a note where it could not be kept."""
    state = np.array([[(stat := os.stat(folder / name)).st_size, stat.st_mtime_ns] for name in shards])
    # Beside the shards, or where those cannot be written, in the user's cache.
    own = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "kfac-imagenet")
    places = [folder / f".index-{split}.npz",
              own / f"{hashlib.sha256(os.fsencode(folder.absolute())).hexdigest()[:16]}-{split}.npz"]  # fmt: skip
    made = Rows if kind == "parquet" else Members
    for place in places:
        try:
            with np.load(place) as saved:
                known = {name: saved[name] for name in saved.files}
                before = dict(zip(known.pop("shards").tolist(), known.pop("state").tolist(), strict=True))
        except Exception:  # none, or a damaged one: made again
            continue
        hint = f"restore it, or remove {place} if the shards are meant to be others"
        if gone := sorted(before.keys() - set(shards)):
            raise UserError(f"{folder} has lost the shard {gone[0]}, which was there before; {hint}")
        for name, (size, _) in zip(shards, state.tolist(), strict=True):
            if name in before and size < before[name][0]:
                raise UserError(f"the shard {folder / name} has {size} bytes, and had {before[name][0]} before; {hint}")
        if np.array_equal(state, np.array([before.get(name, (-1, -1)) for name in shards])):
            return made(folder, shards, **known), ""
    with ThreadPoolExecutor(8) as pool:
        rows = [(number, *row) for number, part in enumerate(pool.map(lambda name: _read(folder / name, kind), shards))
                for row in part]  # fmt: skip
    columns = map(np.array, zip(*rows, strict=True))
    index = dict(zip(("shard", "offset", "size", "names", "labels"), columns, strict=True))
    contents: dict[str, Any] = {"shards": np.array(shards), "state": state, **index}
    reason = ""
    for place in places:
        partial = place.with_name(f".index-{uuid.uuid4().hex}.npz")
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            np.savez(partial, **contents)
            # Processes of several machines may do this at once; the last one's stays.
            os.replace(partial, place)
            return made(folder, shards, **index), ""
        except OSError as error:
            reason = f"the index of the shards is made anew each time, for {place} cannot be written: {error.strerror}"
    return made(folder, shards, **index), reason


Row = tuple[int, int, bytes, int]


def _read(path: Path, kind: str) -> list[Row]:
    """Offset, size, name and label of the images in one shard."""
    reader = {"tar": _tar, "tfrecord": _tfrecord, "parquet": _parquet}[kind]
    try:
        rows = list(patiently(lambda: reader(path), str(path)))
    except (tarfile.TarError, ValueError, IndexError, KeyError) as error:
        raise UserError(f"{path} cannot be read as a {kind} file ({error}); fetch it again") from error
    if not rows:
        raise UserError(f"{path} holds no images; the original archives must be unpacked into train/<class>/ and val/")
    return rows


def _tar(path: Path) -> list[Row]:
    images: dict[str, tuple[int, int, bytes]] = {}
    labels: dict[str, int] = {}
    with tarfile.open(path, "r:") as file:
        for member in file:
            where, _, name = member.name.rpartition("/")
            key, _, ending = name.partition(".")
            key = f"{where}/{key}"
            if not member.isreg() or not name or name[0] == ".":
                continue
            if f".{ending.lower()}" in ENDINGS:
                images[key] = (member.offset_data, member.size, os.fsencode(member.name))
            elif ending == "cls":
                text = file.extractfile(member).read().strip()  # type: ignore[union-attr]
                if not text.isdigit():
                    raise UserError(f"{member.name} in {path} must hold the number of a class, from 0")
                labels[key] = int(text)
    with path.open("rb") as raw:
        raw.seek(-512, os.SEEK_END)
        if any(raw.read()):
            raise ValueError("it is cut short: its end is missing")
    if missing := sorted(images.keys() ^ labels.keys()):
        key = missing[0].lstrip("/")
        what = f"{key}.cls, the number of its class," if missing[0] in images else f"the image {key}.jpg"
        raise UserError(f"{path} lacks {what} beside {key}; each image needs both")
    return [(*image, labels[key]) for key, image in images.items()]


def _parquet(path: Path) -> list[Row]:
    try:
        import pyarrow.parquet as pq
    except ImportError as error:
        raise UserError(f"{path} needs the package pyarrow; pip install pyarrow") from error
    with pq.ParquetFile(path) as file:
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


def _tfrecord(path: Path) -> list[Row]:
    """Each record: its length in 8 bytes, 4 of checksum, a `tf.train.Example`, 4 of checksum."""
    rows: list[Row] = []
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = 0
        while at < len(data):
            begin, size = at + 12, int.from_bytes(data[at : at + 8], "little")
            at = begin + size + 4
            if at > len(data):
                raise ValueError(f"it is cut short: record {len(rows)} ends at byte {at} of {len(data)}")
            rows.append(_example(data, begin, begin + size, len(rows)))
    return rows


def _example(data: Any, begin: int, end: int, number: int) -> Row:
    """Where the image of a `tf.train.Example` is, which is not read for it, and its label."""
    found: dict[bytes, tuple[int, int]] = {}
    for _, a, b in _fields(data, begin, end):  # Example.features
        for _, c, d in _fields(data, a, b):  # Features.feature, a map
            entry = {field: (e, f) for field, e, f in _fields(data, c, d)}
            # Feature.bytes_list or int64_list or float_list, and in it the first value.
            for _, e, f in _fields(data, *entry.get(2, (0, 0))):
                for _, g, h in _fields(data, e, f)[:1]:
                    found[bytes(data[slice(*entry[1])])] = (g, h)
    for image, label, first in ((b"image", b"label", 0), (b"image/encoded", b"image/class/label", 1)):
        if image in found and label in found:
            start, stop = found[image]
            # Packed or not, a number is a varint.
            return start, stop - start, b"%d" % number, _varint(data, found[label][0])[0] - first
    names = ", ".join(name.decode(errors="replace") for name in sorted(found))
    raise ValueError(f"record {number} has no image and label, but {names}")


def _fields(data: Any, at: int, end: int) -> list[tuple[int, int, int]]:
    """Number, beginning and end of each field of a protocol buffer."""
    return list(_each_field(data, at, end))


def _each_field(data: Any, at: int, end: int) -> Iterator[tuple[int, int, int]]:
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
