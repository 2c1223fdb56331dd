"""What a run would cost, and what the input pipeline delivers, before anything is rented.

python examples/imagenet/tools.py plan --config bs128k --data synthetic --on 128 512 1024
python examples/imagenet/tools.py plan --config bs4k --data synthetic --on 8 --table       # who owns which layer
python examples/imagenet/tools.py input                                            # JPEGs of 500x375, generated
python examples/imagenet/tools.py input --data-dir imagenet --workers 16 --wanted 2600

Both take the options of train.py too. `plan` compiles nothing: memory and bytes are counted from the shapes of the
layers, FLOPs from lowered programs. Times are predicted: FLOPs and bytes over what a device is assumed to do in a
second, nothing overlapping.
"""

import argparse
import math
import multiprocessing
import os
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from PIL import Image

import config as cfg
import data
import kfac
import models
import processes
import records as rec
from records import UserError

# FLOPs are counted for so many images and taken to be proportional to their number.
COUNTED_IMAGES = 2
IMAGES = {"digits": 1500, "cifar10": 50_000, "folder": 1_281_167, "synthetic": 1_281_167}


class Parser(argparse.ArgumentParser):
    """One whose errors are one sentence."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (--help lists all options)")


def main(args: list[str]) -> None:
    parser = Parser(prog="tools.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tool", choices=["plan", "input"])
    add = parser.add_argument
    add("--on", type=positive(int), nargs="+", default=[8, 128, 512, 1024], help="plan: numbers of devices")
    add("--flops", type=positive(float), default=2e14, help="plan: assumed FLOPs a second of a device in convolutions "
        "and matrix products (2e14, about a third of the bfloat16 peak of a large GPU of 2023)")  # fmt: skip
    add("--inverse-flops", type=positive(float), default=1e13, help="plan: the same in float32 inversions (1e13)")
    add("--bytes", type=positive(float), default=2.5e10, help="plan: assumed bytes a second that a device sends and "
        "receives (2.5e10, a link of 200 Gbit/s)")  # fmt: skip
    add("--table", action="store_true", help="plan: print which device owns which layer, for one number of devices")
    add("--images", type=positive(int), default=8192, help="input: how many images to measure (8192)")
    add("--wanted", type=positive(float), help="input: images a second that the training step takes")
    options, rest = parser.parse_known_args(args)
    if options.tool == "plan":
        plan(options, cfg.parse(rest))
    else:
        with tempfile.TemporaryDirectory() as folder:
            measure(options, rest, Path(folder))


def positive(kind: Any) -> Any:
    def parse(text: str) -> Any:
        value = kind(text)
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is not greater than 0")
        return value

    return parse


# What K-FAC costs.


class Counts(NamedTuple):
    """What does not depend on the number of devices; FLOPs are those of one image."""

    layers: kfac.Layers
    parameters: int
    step_flops: float
    statistics_flops: float


def plan(options: argparse.Namespace, config: cfg.Config) -> None:
    if config.optimizer != "kfac":
        raise UserError(f"--optimizer {config.optimizer} has nothing to plan; this is what K-FAC adds")
    images, channels = IMAGES[config.data], 1 if config.data == "digits" else 3
    classes = 10 if config.data in ("digits", "cifar10") else 1000
    counts = count(config, channels, classes)
    fitted = [cfg.fit(config, images, devices, "gpu") for devices in options.on]
    batch, steps = fitted[0].global_batch, cfg.total_steps(fitted[0], images)
    if options.table:
        if len(options.on) > 1:
            raise UserError("--table needs one number after --on")
        print(kfac.Assignment(counts.layers, options.on[0], config.inverse_every))
        return
    print(f"""{config.arch}, images of {config.image_size}x{config.image_size}, {counts.parameters / 1e6:.2f} M \
parameters; batch {batch:,}, {steps:,} steps

Counted from lowered programs, for one image:
  forward and backward            {counts.step_flops:.4g} FLOPs
  statistics, where there are any {counts.statistics_flops:.4g} FLOPs
Counted from shapes, per device (memory: averages and inverses; reduced: each time there are statistics; inverted: the
critical path of a cycle):
""")
    every = config.factor_every if isinstance(config.factor_every, int) else 1
    plans = [
        kfac.plan(counts.layers, devices=devices, batch=batch, inverse_every=config.inverse_every,
                  statistics_every=every, flops=options.flops, inversion_flops=options.inverse_flops,
                  bandwidth=options.bytes)
        for devices in options.on
    ]  # fmt: skip
    rows: list[tuple[str, ...]] = [
        (
            "devices",
            "images",
            "micro-batches",
            "memory",
            "reduced",
            "gathered/step",
            "inverted/cycle",
            "preconditioned/step",
        )
    ]
    for one, fit in zip(plans, fitted, strict=True):
        devices = one.assignment.devices
        images = batch // devices
        sent = [f"{sum(one.messages[part].values()) / 1e6:,.1f} MB" for part in ("statistics", "results")]
        rows.append((f"{devices:,}", f"{images:,}", f"{images // (fit.local_batch or images):,}",
                     f"{one.state_bytes / 1e6:,.1f} MB", *sent, f"{one.flops['inversions']:.3g} FLOPs",
                     f"{one.flops['preconditioning']:.3g} FLOPs"))  # fmt: skip
    print_columns(rows)
    print(f"""
Predicted, in milliseconds of the mean step, and in minutes for all steps without validation and input. ASSUMED of a
device: {options.flops:.3g} FLOPs a second ({options.inverse_flops:.3g} in float32 inversions), {options.bytes:.3g}
bytes a second; statistics every {every} and inverses every {config.inverse_every} step(s), no two things at once:
""")
    rows = [("devices", "forward+backward+gradients", "statistics", "inversions", "preconditioning", "messages",
             "predicted K-FAC share", "minutes", "device hours")]  # fmt: skip
    for one in plans:
        images, seconds = batch // one.assignment.devices, one.seconds
        parts = (
            images * counts.step_flops / options.flops + seconds["gradients"],
            images * counts.statistics_flops / options.flops / every,
            seconds["inversions"] / config.inverse_every,
            seconds["preconditioning"],
            seconds["statistics' messages"] / every + seconds["results"],
        )
        hours = steps * sum(parts) / 3600
        times = [f"{1e3 * seconds:.2f}" for seconds in parts]
        share = f"{1 - parts[0] / sum(parts):.1%}"
        devices = one.assignment.devices
        rows.append((f"{devices:,}", *times, share, f"{60 * hours:.1f}", f"{devices * hours:.1f}"))
    print_columns(rows)


def count(config: cfg.Config, channels: int, classes: int) -> Counts:
    """Traces and lowers a training step's gradients, with and without statistics."""
    model = models.create(config.arch, classes, config.dtype or "bfloat16", config.width)
    images = jax.ShapeDtypeStruct((COUNTED_IMAGES, config.image_size, config.image_size, channels), jnp.float32)
    labels = jax.ShapeDtypeStruct((COUNTED_IMAGES,), jnp.int32)

    def loss_fn(params: Any, batch_stats: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        variables = {"params": params, "batch_stats": batch_stats}
        logits, _ = model.apply(variables, images, train=True, mutable=["batch_stats"])
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))

    variables = {"batch_stats": {}} | jax.eval_shape(lambda x: model.init(jax.random.key(0), x, train=True), images)
    inputs = (variables["params"], variables["batch_stats"], images, labels)
    layers = kfac.find_layers(loss_fn, *inputs)

    def flops(fn: Any) -> float:
        analysis: Any = jax.jit(fn).lower(*inputs).cost_analysis()
        return float(analysis["flops"]) / COUNTED_IMAGES

    plain, full = flops(jax.value_and_grad(loss_fn)), flops(kfac.value_and_grad(loss_fn, layers))
    parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(variables["params"]))
    return Counts(layers, parameters, plain, full - plain)


def print_columns(rows: list[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


# What the input pipeline delivers.


def measure(options: argparse.Namespace, rest: list[str], folder: Path) -> None:
    """Prints what the pipeline delivers, beside what is wanted."""
    if any(word.startswith("--data-dir") for word in rest):
        config = cfg.parse(rest)
        records: rec.Records = rec.find(config.data_dir).train
    else:
        config = cfg.parse([*rest, "--data", "folder", "--data-dir", str(folder)])
        print("generating JPEGs of 500x375 ...", flush=True)
        records = generate(folder, 64, max(1024, config.global_batch))
    split, batch = data.image_split(records, config), config.global_batch
    if batch > len(split):
        raise UserError(f"--batch-size {batch} does not fit the {len(split)} training images")
    steps = -(-options.images // batch)
    # More than are taken, so that the workers are as busy at the end as at the beginning.
    batches = data.train_batches(split, batch, 0, 0, 2 + 2 * steps)
    broken = {name for _ in range(2) for name in next(batches).broken}
    began, busy = time.perf_counter(), cpu_seconds()
    broken |= {name for _ in range(steps) for name in next(batches).broken}
    seconds, cpu, images = time.perf_counter() - began, cpu_seconds() - busy, steps * batch
    batches.close()
    print(f"{images} images of {config.image_size}x{config.image_size} in batches of {batch}, {config.decoder}, "
          f"{config.crop}, {config.workers} worker(s) on {cfg.cores()} core(s), {len(broken)} broken")  # fmt: skip
    print(f"delivered      {images / seconds:8.0f} images/s")
    print(f"per core       {images / cpu:8.0f} images/s, by {1e3 * cpu / images:.2f} ms of processor time an image")
    if options.wanted and images / seconds >= options.wanted:
        print(f"The pipeline keeps up, with {images / seconds / options.wanted:.2f} times what the step takes.")
    elif options.wanted:
        waits = 1 - images / seconds / options.wanted
        print(f"The pipeline does NOT keep up: the step waits for {waits:.0%} of the time. "
              f"It would take {math.ceil(options.wanted * cpu / images)} cores with as many --workers.")  # fmt: skip


def cpu_seconds() -> float:
    """Processor time, user and system, of this process and its workers so far."""
    ticks = 0
    for worker in multiprocessing.active_children():
        # The name, in parentheses, may hold anything; user and system time are fields 14 and 15.
        fields = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def generate(folder: Path, count: int, length: int) -> rec.Files:
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
    return rec.Files(folder, [names[i % count] for i in range(length)], [i % 10 for i in range(length)])


if __name__ == "__main__":
    processes.script(main)
