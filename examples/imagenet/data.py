"""Load data sets, and decode their images into batches.

Threads decode the images, because Pillow releases Python's lock. The remaining work takes 0.12 ms per image, so a
process decodes several thousand images a second at most. For more, start a process per GPU, as launch/slurm.sh does.
"""

import io
import warnings
import zlib
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

import batches
import records as rec
from batches import AUGMENT, SUBSTITUTE, Batch, Dataset, Key, Plan
from files import UserError
from records import Files

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# Pillow finds the format from the content, not the name. For formats that are not listed, it may start other programs.
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "TIFF", "WEBP", "PPM")
Image.init()
# Treat decompression bombs as broken files. Pillow warns about them from 89 million pixels.
warnings.simplefilter("error", Image.DecompressionBombWarning)
# Number of substitutes to try for a broken image.
SUBSTITUTES = 50


def load(config: Any) -> Dataset:
    """Return the data set that `config` names. Raise `UserError` if it is missing."""
    size, about = config.image_size, (IMAGENET_MEAN, IMAGENET_STD)
    if config.data == "digits":
        return batches.load_digits()
    if config.data == "synthetic":
        rng = np.random.RandomState(0)
        images, labels = rng.randint(0, 256, (256, size, size, 3), np.uint8), rng.randint(0, 1000, 256)
        train = batches.ArraySplit(images, labels, length=config.synthetic_images)
        val = batches.ArraySplit(images[:32], labels[:32])
        return Dataset("synthetic", train, val, (size, size, 3), 1000, *about, 0)
    found, decoder = rec.find(config.data_dir), Decoder(size, config.crop)
    fingerprint = zlib.crc32(found.val.identity(), zlib.crc32(found.train.identity()))
    train, val = (ImageSplit(part, decoder, config.workers) for part in found[:2])  # type: ignore[assignment]
    note = f" ({found.note})" if found.note else ""
    return Dataset("folder", train, val, (size, size, 3), found.num_classes, *about, fingerprint, note)


class ImageSplit:
    """Decode images in `workers` threads. Training replaces a broken image, and validation skips it."""

    def __init__(self, records: Files, decoder: "Decoder", workers: int) -> None:
        self.records, self.decoder, self.workers = records, decoder, workers

    def __len__(self) -> int:
        return len(self.records.labels)

    def batches(self, plan: Plan) -> Generator[Batch]:
        with ThreadPoolExecutor(self.workers) as pool:
            for number in range(len(plan)):
                yield self.batch(pool, plan.indices(number)[plan.rows].tolist(), plan.key(number))

    def batch(self, pool: ThreadPoolExecutor, indices: list[int], key: Key | None) -> Batch:
        n, side = len(indices), self.decoder.size
        # Padding stays zero, and so do broken images in validation.
        images = np.zeros((n, side, side, 3), np.uint8)
        labels, weights = np.zeros(n, np.int32), np.zeros(n, np.float32)
        broken: list[str] = []

        def load(at: int) -> None:
            if indices[at] < len(self):
                found = self.load(indices[at], key, images[at], broken)
                labels[at] = self.records.labels[indices[at] if found is None else found]
                weights[at] = found is not None

        for _ in pool.map(load, range(n)):
            pass  # the loop raises all errors from `load`
        return Batch(images, labels, weights, tuple(sorted(broken)))

    def load(self, index: int, key: Key | None, into: np.ndarray, broken: list[str]) -> int | None:
        """Decode image `index` into `into`. Return the index of the decoded image, or None.

        In training, random substitutes replace a broken image.
        """
        rng = None
        for _ in range(1 if key is None else SUBSTITUTES):
            try:
                into[:] = self.decoder(self.records.read(index), index, key)
                return index
            except UserError:  # the system failed, not the image
                raise
            except Exception:  # Pillow's decoders raise nearly anything on damaged files
                broken.append(self.records.name(index))
            if key is not None:
                rng = rng or np.random.default_rng([key[0], SUBSTITUTE, key[1], index])
                index = int(rng.integers(len(self)))
        if key is not None:
            raise UserError(f"{SUBSTITUTES} images in a row cannot be decoded, {broken[0]} the first of them")
        return None


# Decoding.

Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class Decoder:
    """Decode, crop, mirror and scale the bytes of a file to `size` x `size` pixels.

    Training uses the crop from `random_box` ("random-resized"), or resizes the image to a square with 256/224 of `size`
    and takes a random square of `size` ("squashed"). Validation takes the centre.
    """

    size: int
    crop: str = "random-resized"

    def __call__(self, data: bytes, index: int, key: Key | None) -> np.ndarray:
        """Return the pixels `[size, size, 3]`. Raise nearly any exception if `data` is not an image."""
        with Image.open(io.BytesIO(data), formats=FORMATS) as file:
            box, mirrored = self.choose(*file.size, index, key)
            width, height = file.size
            # JPEG decodes faster at a half, a quarter or an eighth of the size. The crop must keep `size` pixels.
            side = min(box[2] - box[0], box[3] - box[1])
            divisor = next(d for d in (8, 4, 2, 1) if d == 1 or side >= d * self.size)
            if divisor > 1:
                file.draft("RGB", (width // divisor, height // divisor))
            # The decoded size is rounded up, so the last pixel may be partial. The divisor is the exact scale.
            scale = 1 if file.size == (width, height) else 1 / divisor
            box = (box[0] * scale, box[1] * scale, box[2] * scale, box[3] * scale)
            image = to_rgb(file).resize((self.size, self.size), Image.Resampling.BILINEAR, box=box)
        pixels = np.asarray(image)
        return pixels[:, ::-1] if mirrored else pixels

    def choose(self, width: int, height: int, index: int, key: Key | None) -> tuple[Box, bool]:
        """Return the crop box for a `width` x `height` image, and whether to mirror the image."""
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
    """Convert any image to RGB. Transparency is ignored, and 16 bits become 8 bits."""
    if image.mode == "RGB":
        return image  # a conversion would copy it
    if image.mode.startswith("I"):
        # Pillow would clip the values at 255.
        pixels = np.clip(np.asarray(image).astype(np.int64) >> 8, 0, 255).astype(np.uint8)
        return Image.fromarray(pixels).convert("RGB")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # Pillow warns otherwise
    return image.convert("RGB")


def centre_box(width: int, height: int, share: float) -> Box:
    side = min(width, height) * share
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def random_box(width: int, height: int, rng: np.random.Generator) -> Box:
    """Return a random box, as in Szegedy et al. (2015).

    It covers 8% to 100% of the area. Its aspect ratio is between 3/4 and 4/3.
    """
    for _ in range(10):
        area = width * height * rng.uniform(0.08, 1.0)
        ratio = np.exp(rng.uniform(np.log(3 / 4), np.log(4 / 3)))
        w, h = np.sqrt(area * ratio), np.sqrt(area / ratio)
        if w <= width and h <= height:
            left, top = rng.uniform(0, width - w), rng.uniform(0, height - h)
            return left, top, left + w, top + h
    return centre_box(width, height, 1.0)
