"""Data sets, and how encoded images become batches: decoded by worker processes.

Workers import this module and what it imports, which is little.
"""

import contextlib
import ctypes
import io
import os
import shutil
import signal
import sys
import threading
import warnings
import zlib
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

# Pillow gives the memory of each image back to the system and has it zeroed anew for the next, a quarter of all time,
# unless it is told to keep some blocks. It reads this when it is imported.
os.environ.setdefault("PILLOW_BLOCKS_MAX", "4")

from PIL import Image

import batches
import records as rec
from batches import AUGMENT, Batch, Dataset, Key, Pieces, Plan
from files import UserError
from records import Files

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# By content, whatever a file's name says. Not all that Pillow knows: for some formats it starts other programs.
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "TIFF", "WEBP", "PPM")
Image.init()
# What Pillow warns of as a decompression bomb (89 million pixels and more) is treated as a broken file.
warnings.simplefilter("error", Image.DecompressionBombWarning)


def load(config: Any) -> Dataset:
    """Finds the data that `config` names; raises `UserError` where they are not there."""
    size, about = config.image_size, (IMAGENET_MEAN, IMAGENET_STD)
    if config.data == "digits":
        return batches.load_digits()
    if config.data == "cifar10":
        return batches.read_cifar10(Path(config.data_dir))
    if config.data == "synthetic":
        rng, n = np.random.RandomState(0), min(config.synthetic_images, 256)
        images, labels = rng.randint(0, 256, (n, size, size, 3), np.uint8), rng.randint(0, 1000, n)
        train = batches.ArraySplit(images, labels, length=config.synthetic_images)
        return Dataset(
            "synthetic", train, batches.ArraySplit(images[:32], labels[:32]), (size, size, 3), 1000, *about, 0
        )
    found = rec.find(config.data_dir)
    splits = image_split(found.train, config), image_split(found.val, config)
    fingerprint = zlib.crc32(found.val.identity(), zlib.crc32(found.train.identity()))
    return Dataset("folder", *splits, (size, size, 3), found.num_classes, *about, fingerprint, found.note)


def image_split(records: Files, config: Any) -> "ImageSplit":
    """Decodes `records` as `config` has it."""
    return ImageSplit(records, Decoder(config.image_size, config.crop), config.workers)


# One encoded image.

Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class Decoder:
    """From the bytes of a file to `size` x `size` pixels: decodes, cuts, mirrors and scales.

    `crop` is what training cuts out: "random-resized", 8% to 100% of the area at an aspect ratio of 3/4 to 4/3;
    or "squashed", a square out of the image brought to a square of 256/224 of `size`. Validation takes
    the centre: of the image with its short side at 256/224, or of the squashed one.
    """

    size: int
    crop: str = "random-resized"

    def __call__(self, data: bytes, index: int, key: Key | None) -> np.ndarray:
        """The pixels `[size, size, 3]`; raises nearly anything where `data` is no image."""
        with Image.open(io.BytesIO(data), formats=FORMATS) as file:
            box, mirrored = self.choose(*file.size, index, key)
            width, height = file.size
            # JPEG decodes to a half, a quarter or an eighth of the size for less; the part that is cut
            # out must keep at least the pixels that are asked for.
            side = min(box[2] - box[0], box[3] - box[1])
            divisor = next(d for d in (8, 4, 2, 1) if d == 1 or side >= d * self.size)
            if divisor > 1:
                file.draft("RGB", (width // divisor, height // divisor))
            # The last pixel of a size that does not divide may be there in part only.
            scale = 1 if file.size == (width, height) else 1 / divisor
            box = (box[0] * scale, box[1] * scale, box[2] * scale, box[3] * scale)
            image = to_rgb(file).resize((self.size, self.size), Image.Resampling.BILINEAR, box=box)
        pixels = np.asarray(image)
        return pixels[:, ::-1] if mirrored else pixels

    def choose(self, width: int, height: int, index: int, key: Key | None) -> tuple[Box, bool]:
        """Which part of an image of `width` x `height` to take, and whether to mirror it."""
        rng = None if key is None else np.random.default_rng([key[0], AUGMENT, key[1], index])
        large = self.size * 256 // 224
        if self.crop == "squashed":
            left, top = ((large - self.size) / 2,) * 2 if rng is None else rng.integers(0, large - self.size + 1, 2)
            x, y = width / large, height / large
            box = left * x, top * y, (left + self.size) * x, (top + self.size) * y
        else:
            box = centre_box(width, height, self.size / large) if rng is None else random_box(width, height, rng)
        return box, rng is not None and rng.random() < 0.5


def to_rgb(image: Image.Image) -> Image.Image:
    """Any image in RGB; transparency is ignored, 16 bits become 8."""
    if image.mode == "RGB":
        return image  # converting would copy it
    if image.mode.startswith("I"):
        # Pillow would clip at 255.
        pixels = np.clip(np.asarray(image).astype(np.int64) >> 8, 0, 255).astype(np.uint8)
        return Image.fromarray(pixels).convert("RGB")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # as Pillow wants it, or else it warns
    return image.convert("RGB")


def centre_box(width: int, height: int, share: float) -> Box:
    side = min(width, height) * share
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def random_box(width: int, height: int, rng: np.random.Generator) -> Box:
    """8% to 100% of the area at an aspect ratio of 3/4 to 4/3 (Szegedy et al. 2015)."""
    for _ in range(10):
        area = width * height * rng.uniform(0.08, 1.0)
        ratio = np.exp(rng.uniform(np.log(3 / 4), np.log(4 / 3)))
        w, h = np.sqrt(area * ratio), np.sqrt(area / ratio)
        if w <= width and h <= height:
            left, top = rng.uniform(0, width - w), rng.uniform(0, height - h)
            return left, top, left + w, top + h
    return centre_box(width, height, 1.0)


# Encoded images to batches, by grain: worker processes decode pieces, this process puts them together.

# Pieces that a worker prepares ahead.
AHEAD = 2


class ImageSplit:
    """Encoded images, decoded by `workers` processes; 0 for threads of this one.

    A broken image is left out of validation; in training another one takes its place, for a batch keeps its size.
    """

    def __init__(self, records: Files, decoder: Decoder, workers: int) -> None:
        self.records, self.decoder, self.workers = records, decoder, workers
        self._waiting: tuple[Any, Any] | None = None

    def __len__(self) -> int:
        return len(self.records.labels)

    def close(self) -> None:
        """Ends the workers that wait for the next validation."""
        if self._waiting is not None:
            self._waiting[1].close()
            self._waiting = None

    def batches(self, plan: Plan) -> Generator[Batch]:
        pieces = Pieces(plan, self.records, self.decoder)
        # Validation comes again, so its workers are kept and have the beginning of the next one ready.
        again, identity = plan.seed is None, (plan.size, plan.rows.tobytes())
        if again and self._waiting is not None and self._waiting[0] == identity:
            stream, self._waiting = self._waiting[1], None
        else:
            stream = start(pieces, self.workers, again)
        try:
            yield from pieces.batches(stream)
            if again:
                self._waiting = (identity, stream)
        except RuntimeError as error:
            if "terminated unexpectedly" not in str(error):
                raise
            raise UserError(f"a worker that decodes images was killed ({error}); if memory ran out, a --workers below "
                            f"{self.workers} takes less") from error  # fmt: skip
        finally:
            if self._waiting is None or self._waiting[1] is not stream:
                stream.close()


def start(pieces: Pieces, workers: int, again: bool) -> Any:
    """An iterator over the pieces in their order, endless if `again`; to be closed."""
    from absl import flags

    if not flags.FLAGS.is_parsed():
        # grain has absl's flags, and they must have been parsed; the command line is not theirs.
        flags.FLAGS.mark_as_parsed()
    import grain

    if workers:
        # The pieces travel in shared memory, of which containers have little: it would end with a bus error.
        need, shared = workers * (AHEAD + 2) * pieces.size * pieces.decoder.size**2 * 3, Path("/dev/shm")
        free = shutil.disk_usage(shared).free if shared.is_dir() else need
        if need > free:
            raise UserError(f"--workers {workers} need {need >> 20} MB of shared memory, but {shared} has {free >> 20} "
                            "MB; give the container more (docker run --shm-size) or take fewer workers")  # fmt: skip
        # What is in flight at the end is freed by Python's tracker of shared memory, which calls that a leak.
        sys.warnoptions.append("ignore:resource_tracker:UserWarning")
        # A new process would import the main script, and with it everything that training needs, for nothing.
        vars(sys.modules["__main__"]).pop("__file__", None)
    else:
        _keep_memory()
    dataset: Any = grain.MapDataset.range(len(pieces)).map(pieces)
    if again:
        dataset = dataset.repeat()
    # Workers are processes, so one thread each will do; without them Pillow decodes outside of the interpreter's lock.
    threads = 1 if workers else os.cpu_count() or 1
    dataset = dataset.to_iter_dataset(grain.ReadOptions(num_threads=threads, prefetch_buffer_size=AHEAD * threads))
    options = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=AHEAD)
    return iter(dataset.mp_prefetch(options, worker_init_fn=_start_worker))


def _keep_memory() -> None:
    """Image after image the C library may give its memory back to the system, up to a tenth of all time."""
    with contextlib.suppress(OSError, AttributeError):  # where it is not glibc
        mallopt, trim_threshold, mmap_threshold = ctypes.CDLL(None).mallopt, -1, -3
        mallopt(trim_threshold, 64 << 20), mallopt(mmap_threshold, 32 << 20)


def _start_worker(index: int, count: int) -> None:
    """In a worker: leaves signals to the main process, but does not outlive it."""
    import multiprocessing

    del index, count
    _keep_memory()
    # Sent to the whole group by a terminal or a batch system; the step at hand still needs its images.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def follow() -> None:
        parent.join()  # type: ignore[union-attr]
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
