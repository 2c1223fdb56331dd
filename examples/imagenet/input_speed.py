"""Measures the input pipeline alone: how many images a second it delivers, and for how much processor time.

python examples/imagenet/input_speed.py                                  # JPEGs of 500x375, generated
python examples/imagenet/input_speed.py --data-dir imagenet --workers 16
python examples/imagenet/input_speed.py --data-dir imagenet --step-images-per-second 2600
python examples/imagenet/input_speed.py --data-dir imagenet --run runs/folder-kfac-20250101-120000
"""

import itertools
import json
import multiprocessing
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from PIL import Image

import config as cfg
import data
import folders
from config import UserError, option
from records import Files, Records


@dataclass(frozen=True)
class Speed:
    """Measure the input pipeline of train.py, without a network."""

    data_dir: Annotated[
        Path | None,
        option("Folder with the images, as for train.py.", "64 generated JPEGs of 500x375 at quality 90", Path),
    ] = None
    workers: Annotated[
        int | None, option("Processes that decode; 0 for threads.", "the cores that may be used", int)
    ] = None
    decoder: Annotated[cfg.Decoding, option("As for train.py.")] = "pillow"
    crop: Annotated[cfg.Crop, option("As for train.py.")] = "random-resized"
    image_size: Annotated[int, option("Side of the images that are delivered.")] = 224
    batch: Annotated[int, option("Images in a batch.")] = 256
    images: Annotated[int, option("How many images to measure, after two batches of warming up.")] = 8192
    step_images_per_second: Annotated[
        float | None, option("What the training step takes; says whether the pipeline keeps up.", "not compared", float)
    ] = None
    run: Annotated[
        Path | None, option("Folder of a run of train.py, to take the speed of its steps from.", "not compared", Path)
    ] = None


def main(args: list[str]) -> None:
    config = tyro.cli(Speed, args=args, prog="input_speed.py")
    for name in ("batch", "images", "image_size"):
        if getattr(config, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(config, name)} but must be at least 1")
    if config.workers is not None and config.workers < 0:
        raise UserError(f"--workers is {config.workers} but must be at least 0")
    if config.step_images_per_second is not None and config.run is not None:
        raise UserError("--step-images-per-second and --run both give the speed of the step; give one")
    wanted = speed_of_run(config.run) if config.run else config.step_images_per_second
    with tempfile.TemporaryDirectory() as folder:
        if config.data_dir is None:
            print("generating JPEGs of 500x375 ...", flush=True)
            records: Records = generate(Path(folder), 64, max(1024, config.batch))
        elif not config.data_dir.is_dir():
            raise UserError(f"--data-dir {config.data_dir} is not a folder")
        else:
            records = folders.find(config.data_dir).train
        measure(config, records, wanted)


def measure(config: Speed, records: Records, wanted: float | None) -> None:
    """Prints what the pipeline delivers, beside what is wanted."""
    workers = cfg.cores() if config.workers is None else config.workers
    split = data.image_split(records, cfg.Data(
        "folder", image_size=config.image_size, workers=workers, crop=config.crop, decoder=config.decoder,
    ))  # fmt: skip
    if config.batch > len(split):
        raise UserError(f"--batch {config.batch} does not fit the {len(split)} training images")
    steps = -(-config.images // config.batch)
    # More than are taken, so that the workers are as busy at the end as at the beginning.
    batches = data.train_batches(split, config.batch, 0, 0, 2 + 2 * steps)
    broken = set[str]()
    for _ in range(2):
        broken.update(next(batches).broken)
    began, busy = time.perf_counter(), cpu_seconds()
    for _ in range(steps):
        broken.update(next(batches).broken)
    seconds, cpu = time.perf_counter() - began, cpu_seconds() - busy
    batches.close()

    images = steps * config.batch
    print(f"{images} images of {config.image_size}x{config.image_size} in batches of {config.batch}, {config.decoder}, "
          f"{config.crop}, {workers} worker(s) on {cfg.cores()} core(s)"
          + (f", {len(broken)} broken" if broken else ""))  # fmt: skip
    print(f"delivered      {images / seconds:8.0f} images/s")
    per_core = images / cpu
    print(f"per core       {per_core:8.0f} images/s, by {1e3 * cpu / images:.2f} ms of processor time an image")
    if wanted is None:
        return
    have = images / seconds
    print(f"the step takes {wanted:8.0f} images/s")
    if have >= wanted:
        print(f"The pipeline keeps up, with {have / wanted:.2f} times what the step takes.")
    else:
        print(f"The pipeline does NOT keep up: the step waits for {1 - have / wanted:.0%} of the time. It would take "
              f"{-(-wanted // per_core):.0f} cores with as many --workers.")  # fmt: skip


def cpu_seconds() -> float:
    """Processor time, user and system, of this process and its workers so far."""
    if not Path("/proc").is_dir():
        raise UserError("the processor time of the workers is read from /proc, which this system does not have")
    ticks = 0
    for worker in multiprocessing.active_children():
        # The name, in parentheses, may hold anything; user and system time are fields 14 and 15.
        fields = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def speed_of_run(folder: Path) -> float:
    """Images a second between validations of a run, at its fastest."""
    try:
        batch = json.loads((folder / "config.json").read_text())["optim"]["global_batch"]
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"--run {folder} is not the folder of a run ({error})") from error
    times = [(line["step"], line["seconds"]) for line in lines if "seconds" in line and "step" in line]
    speeds = [(b - a) / (t - s) for (a, s), (b, t) in itertools.pairwise(times) if b > a and t > s]
    if not speeds:
        raise UserError(f"--run {folder} has fewer than two records with their seconds; let it validate twice, or give "
                        "--step-images-per-second")  # fmt: skip
    return batch * max(speeds)


def generate(folder: Path, count: int, length: int) -> Files:
    """JPEGs with the spectrum of photographs (amplitude 1/f), hence of their size: about 120 kB.

    There are `count` of them, and each comes up again until there are `length`.
    """
    rng = np.random.default_rng(0)
    height, width = 375, 500
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width))
    amplitude = 1 / np.maximum(frequency, 1 / width)

    def field() -> np.ndarray:
        return np.fft.irfft2(amplitude * np.exp(2j * np.pi * rng.random(amplitude.shape)), (height, width))

    names = [f"{i:03d}.jpg" for i in range(count)]
    for name in names:
        grey = field()
        pixels = np.stack([grey + 0.35 * field() for _ in range(3)], -1)
        pixels = 120 + 55 * (pixels - pixels.mean()) / pixels.std()
        Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(folder / name, quality=90)
    return Files(folder, [names[i % count] for i in range(length)], [i % 10 for i in range(length)])


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"error: {error}")
