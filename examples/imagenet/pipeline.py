"""Image files to batches, by grain: worker processes decode, this process puts their pieces together.

A piece is a few images of a batch and depends on nothing but the plan, so any number of workers gives the same
batches. What a worker imports is small: this module and its three neighbours, numpy, Pillow and grain.
"""

import itertools
import os
import shutil
import signal
import sys
import threading
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from batches import Batch, Key, Plan
from decode import Decoder
from errors import UserError
from records import Records

# Small, so that all workers take part in a batch of a few hundred; large, so that passing one on costs little.
PIECE = 16
# Pieces that a worker prepares ahead.
AHEAD = 2


class NothingReadableError(Exception):
    """Raised in a worker where no image of a split can be read."""


class Pieces:
    """The pieces of `plan`, numbered through; `[i]` loads piece `i`. Handed to the workers, where it is the map."""

    def __init__(self, plan: Plan, records: Records, decoder: Decoder, size: int = PIECE) -> None:
        self.plan, self.records, self.decoder, self.size = plan, records, decoder, size
        self.per_batch = -(-len(plan.rows) // size)

    def __len__(self) -> int:
        return len(self.plan) * self.per_batch

    def __call__(self, piece: Any) -> dict[str, Any]:
        number, part = divmod(int(piece), self.per_batch)
        indices = self.plan.indices(number)[self.plan.rows[part * self.size : (part + 1) * self.size]]
        key = self.plan.key(number)
        size = self.decoder.size
        # Zeros stay where the batch is only filled up, and where validation cannot read a file.
        images = np.zeros((len(indices), size, size, 3), np.uint8)
        labels, weights = np.zeros(len(indices), np.int32), np.zeros(len(indices), np.float32)
        broken: list[str] = []
        for i, index in enumerate(indices):
            if index < self.plan.images:
                found = self._load(int(index), key, images[i], broken)
                labels[i] = self.records.labels[index if found is None else found]
                weights[i] = found is not None
        return {"images": images, "labels": labels, "weights": weights, "broken": tuple(broken)}

    def _load(self, index: int, key: Key | None, into: np.ndarray, broken: list[str]) -> int | None:
        """Decodes image `index`; in training, if it is broken, the next readable one. Which one it was."""
        count = len(self.records.labels)
        for other in (index,) if key is None else itertools.chain(range(index, count), range(index)):
            try:
                into[:] = self.decoder(self.records.read(other), other, key)
            # Pillow's decoders raise nearly anything on damaged files.
            except Exception:
                broken.append(self.records.name(other))
            else:
                return other
        if key is None:
            return None
        raise NothingReadableError(f"none of the {count} files beside {broken[0]} can be read")


class ImageSplit:
    """Encoded images, decoded by `workers` processes; 0 for threads of this one.

    A file that cannot be read is left out of validation; in training the next readable one takes
    its place, for a batch keeps its size.
    """

    def __init__(self, records: Records, decoder: Decoder, workers: int) -> None:
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
        """See `Split`."""
        pieces = Pieces(plan, self.records, self.decoder)
        # Validation comes again, so its workers are kept and have the beginning of the next one ready.
        again = plan.seed is None
        identity = (plan.size, plan.rows.tobytes())
        if again and self._waiting is not None and self._waiting[0] == identity:
            stream, self._waiting = self._waiting[1], None
        else:
            stream = start(pieces, self.workers, again)
        try:
            yield from assemble(pieces, stream)
            if again:
                self._waiting = (identity, stream)
        except RuntimeError as error:
            if "terminated unexpectedly" not in str(error):
                raise
            raise UserError(f"a worker that decodes images was killed ({error}); if memory ran out, a "
                            f"--workers below {self.workers} takes less") from error  # fmt: skip
        finally:
            if self._waiting is None or self._waiting[1] is not stream:
                stream.close()


def assemble(pieces: Pieces, stream: Iterator[dict[str, Any]]) -> Generator[Batch]:
    """The batches of a plan out of its pieces."""
    n, side = len(pieces.plan.rows), pieces.decoder.size
    for _ in range(len(pieces.plan)):
        images = np.empty((n, side, side, 3), np.uint8)
        labels, weights = np.empty(n, np.int32), np.empty(n, np.float32)
        broken: list[str] = []
        for at in range(0, n, pieces.size):
            try:
                got = next(stream)
            except NothingReadableError as error:
                raise UserError(str(error)) from error
            part = slice(at, at + pieces.size)
            images[part], labels[part], weights[part] = got["images"], got["labels"], got["weights"]
            broken += got["broken"]
        yield Batch(images, labels, weights, tuple(broken))


def start(pieces: Pieces, workers: int, again: bool) -> Any:
    """An iterator over the pieces in their order, endless if `again`; to be closed."""
    from absl import flags

    if not flags.FLAGS.is_parsed():
        # grain has absl's flags, and they must have been parsed; the command line is not theirs.
        flags.FLAGS.mark_as_parsed()
    import grain

    if workers:
        _room_for(pieces, workers)
        _hide_main()
    dataset: Any = grain.MapDataset.range(len(pieces)).map(pieces)
    if again:
        dataset = dataset.repeat()
    # Workers are processes, so one thread each will do; without them Pillow decodes outside of the interpreter's lock.
    threads = 1 if workers else os.cpu_count() or 1
    dataset = dataset.to_iter_dataset(grain.ReadOptions(num_threads=threads, prefetch_buffer_size=AHEAD * threads))
    options = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=AHEAD)
    return iter(dataset.mp_prefetch(options, worker_init_fn=_start_worker))


def _room_for(pieces: Pieces, workers: int) -> None:
    """Refuses what would end with a bus error: the pieces travel in shared memory, which containers have little of."""
    shared = Path("/dev/shm")
    if not shared.is_dir():
        return
    need = workers * (AHEAD + 2) * pieces.size * pieces.decoder.size**2 * 3
    free = shutil.disk_usage(shared).free
    if need > free:
        raise UserError(f"--workers {workers} need {need >> 20} MB of shared memory, but {shared} has {free >> 20} MB; "
                        "give the container more (docker run --shm-size) or take fewer workers")  # fmt: skip


def _hide_main() -> None:
    """A new process would import the main script, and with it everything that training needs, for nothing."""
    vars(sys.modules["__main__"]).pop("__file__", None)


def _start_worker(index: int, count: int) -> None:
    """In a worker: leaves signals to the main process, but does not outlive it."""
    del index, count
    import multiprocessing

    # Sent to the whole group by a terminal or a batch system; the step at hand still needs its images.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
