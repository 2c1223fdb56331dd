"""JPEGs decoded by NVIDIA DALI on the GPU; everything else as without it.

Crops are those of `Decoder`, pixels are not: DALI scales by a filter of its own.
"""

import importlib.util
import io
from collections.abc import Generator
from typing import Any

import numpy as np
from PIL import Image

from batches import Batch, Key, Plan
from decode import FORMATS, Decoder
from errors import UserError
from pipeline import Pieces, assemble
from records import Records

# Images that DALI is given at once.
PIECE = 128


class DaliSplit:
    """As `ImageSplit`; `workers` are threads of DALI, and `device` is the number of the GPU, or None for the CPU."""

    def __init__(self, records: Records, decoder: Decoder, workers: int, device: int | None) -> None:
        if importlib.util.find_spec("nvidia") is None or importlib.util.find_spec("nvidia.dali") is None:
            raise UserError("--decoder dali needs NVIDIA DALI, which is not installed: pip install nvidia-dali-cuda120")
        self.records, self.decoder, self.workers, self.device = records, decoder, workers, device

    def __len__(self) -> int:
        return len(self.records.labels)

    def batches(self, plan: Plan) -> Generator[Batch]:
        """See `Split`."""
        pieces = DaliPieces(plan, self.records, self.decoder, self.workers, self.device)
        yield from assemble(pieces, (pieces(number) for number in range(len(pieces))))


class DaliPieces(Pieces):
    def __init__(self, plan: Plan, records: Records, decoder: Decoder, workers: int, device: int | None) -> None:
        super().__init__(plan, records, decoder, PIECE)
        self.workers, self.device = workers, device
        self.pipeline: Any = None
        self.waiting: list[tuple[np.ndarray, np.ndarray, list[float], list[float]]] = []

    def __call__(self, piece: Any) -> dict[str, Any]:
        self.waiting = []
        got = super().__call__(piece)
        try:
            if self.waiting:
                self._run()
        except RuntimeError:
            # A header that promises more than the file holds. DALI does not say which, and its pipeline is lost.
            self.pipeline = None
            got = Pieces(self.plan, self.records, self.decoder, PIECE)(piece)
        return got

    def _load(self, index: int, key: Key | None, into: np.ndarray, broken: list[str]) -> int | None:
        """Leaves RGB and grey JPEGs for `_run`."""
        try:
            data = self.records.read(index)
            with Image.open(io.BytesIO(data), formats=FORMATS) as file:
                size, suitable = file.size, file.format == "JPEG" and file.mode in ("RGB", "L")
        except Exception:  # As in `Pieces`, which is about to find the same.
            suitable = False
        if not suitable:
            return super()._load(index, key, into, broken)
        (left, top, right, bottom), mirrored = self.decoder.choose(*size, index, key)
        if mirrored:
            # DALI mirrors where a region ends before it starts.
            left, right = right, left
        self.waiting.append((np.frombuffer(data, np.uint8), into, [top, left], [bottom, right]))
        return index

    def _run(self) -> None:
        if self.pipeline is None:
            self.pipeline = build(self.decoder.size, self.workers, self.device)
        data, rows, begins, ends = zip(*self.waiting, strict=True)
        self.pipeline.feed_input("data", list(data))
        self.pipeline.feed_input("begin", list(np.array(begins, np.float32)))
        self.pipeline.feed_input("end", list(np.array(ends, np.float32)))
        (images,) = self.pipeline.run()
        pixels = (images if self.device is None else images.as_cpu()).as_array()
        for into, image in zip(rows, pixels, strict=True):
            into[:] = image


def build(size: int, threads: int, device: int | None) -> Any:
    """DALI's pipeline: bytes and regions in, uint8 `[n, size, size, 3]` out."""
    from nvidia.dali import Pipeline, fn, types

    pipeline = Pipeline(
        batch_size=PIECE, num_threads=max(1, threads), device_id=device, prefetch_queue_depth=1,
        exec_async=False, exec_pipelined=False,
    )  # fmt: skip
    with pipeline:
        data, begin, end = (fn.external_source(name=name) for name in ("data", "begin", "end"))
        # EXIF rotation is ignored, as Pillow does.
        images = fn.decoders.image(
            data, device="cpu" if device is None else "mixed", output_type=types.RGB,
            adjust_orientation=False,
        )  # fmt: skip
        pipeline.set_outputs(fn.resize(images, size=[size, size], roi_start=begin, roi_end=end))
    pipeline.build()
    return pipeline
