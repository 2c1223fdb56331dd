"""One image: from the bytes of a file to `size` x `size` pixels, by Pillow."""

import io
import os
import warnings
from dataclasses import dataclass
from typing import Literal

import numpy as np

# Pillow gives the memory of each image back to the system and has it zeroed anew for the next, a quarter of all time,
# unless it is told to keep some blocks. It reads this when it is imported.
os.environ.setdefault("PILLOW_BLOCKS_MAX", "4")

from PIL import Image

from batches import AUGMENT, Key

Box = tuple[float, float, float, float]

# By content, whatever a file's name says. Not all that Pillow knows: for some formats it starts other programs.
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "TIFF", "WEBP", "PPM")

Image.init()

# What Pillow warns of as a decompression bomb (89 million pixels and more) is treated as a broken file.
warnings.simplefilter("error", Image.DecompressionBombWarning)


@dataclass(frozen=True)
class Decoder:
    """Decodes, cuts, mirrors and scales.

    `crop` is what training cuts out: "random-resized", 8% to 100% of the area at an aspect ratio of 3/4 to 4/3;
    or "squashed", a square out of the image brought to a square of 256/224 of `size`. Validation takes
    the centre: of the image with its short side at 256/224, or of the squashed one.
    """

    size: int
    crop: Literal["random-resized", "squashed"] = "random-resized"

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
            image = to_rgb(file)
        box = (box[0] * scale, box[1] * scale, box[2] * scale, box[3] * scale)
        pixels = np.asarray(image.resize((self.size, self.size), Image.Resampling.BILINEAR, box=box))
        return pixels[:, ::-1] if mirrored else pixels

    def choose(self, width: int, height: int, index: int, key: Key | None) -> tuple[Box, bool]:
        """Which part of an image of `width` x `height` to take, and whether to mirror it."""
        rng = None if key is None else np.random.default_rng([key[0], AUGMENT, key[1], index])
        large = self.size * 256 // 224
        if self.crop == "squashed":
            left, top = ((large - self.size) / 2,) * 2 if rng is None else rng.integers(0, large - self.size + 1, 2)
            across, down = width / large, height / large
            box = (left * across, top * down, (left + self.size) * across, (top + self.size) * down)
        elif rng is None:
            box = centre_box(width, height, self.size / large)
        else:
            box = random_box(width, height, rng)
        return box, rng is not None and rng.random() < 0.5


def to_rgb(image: Image.Image) -> Image.Image:
    """Any image in RGB; transparency is ignored, 16 bits become 8."""
    if image.mode.startswith("I"):
        # Pillow would clip at 255.
        pixels = np.clip(np.asarray(image).astype(np.int64) >> 8, 0, 255).astype(np.uint8)
        return Image.fromarray(pixels).convert("RGB")
    if image.mode == "P" and "transparency" in image.info:
        # As Pillow wants it, or else it warns.
        image = image.convert("RGBA")
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
