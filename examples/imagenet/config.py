"""Configuration of the training script: typed fields, defaults that depend on the data, checks.

A field that is `None` after parsing takes the value that `resolve` finds for the named configuration, the data set and
the optimizer at hand; what a run really used is saved as `config.json` in its output folder.
"""

import contextlib
import dataclasses
import inspect
import io
import itertools
import json
import math
import os
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from configs import CONFIGS
from errors import UserError


def option(text: str, by: str | None = None, parse: Any = None, **rest: Any) -> Any:
    """Help of a field; `by` says what a default of None stands for, `parse` what it can be."""
    if by is not None:
        rest["help_behavior_hint"] = f"(default: {by})"
    if parse is not None:
        rest["constructor"] = parse
    return tyro.conf.arg(help=text, **rest)


# `resolve` puts the default for the data and the optimizer in its place.
AUTO: Any = None

Source = Literal["digits", "cifar10", "folder", "synthetic"]
Crop = Literal["random-resized", "squashed"]
Decoding = Literal["pillow", "dali"]
Arch = Literal["digits", "resnet20", "resnet18", "resnet50", "resnet50d"]
Optimizer = Literal["kfac", "sgd", "lars", "lamb", "adamw"]
Schedule = Literal["cosine", "linear", "polynomial", "constant"]
Coupling = Literal["none", "ratio", "proportional"]
Init = Literal["identity", "he"]
Erasing = Literal["none", "own", "in-place"]
BatchSize = int | Literal["auto"] | None
Every = int | Literal["adaptive"]
Fisher = Literal["empirical", "sampled"]
Inverse = Literal["cholesky", "eigh", "ekfac"]

# How many steps --global-batch auto makes of an epoch: as many as batch 131,072 makes of ImageNet's.
STEPS_AN_EPOCH = 10


@dataclasses.dataclass(frozen=True)
class Optimization:
    """How it is trained. Fields marked [kfac] do nothing for the first-order optimizers."""

    optimizer: Annotated[
        Optimizer,
        option("Optimizer; the first-order ones are optax's.", "kfac, or that of --config", Optimizer),
    ] = AUTO
    global_batch: Annotated[
        Any,
        option(
            "Images in one optimizer step, over all devices and micro-batches; auto: a tenth of the training images, "
            "the ten steps an epoch that batch 131,072 makes of ImageNet.",
            "144 for digits, 1000 for cifar10, 256 for folder, 64 for synthetic",
            BatchSize,
            metavar="INT|auto",
            aliases=["--batch-size"],
        ),
    ] = AUTO
    local_batch: Annotated[
        int | None,
        option(
            "Images that a device works on at a time, which memory depends on. A larger share of the global batch is "
            "cut into micro-batches, and gradients, statistics and batch-norm averages are accumulated over them.",
            "32 with a configuration's own batch on large images, else a device's whole share of the global batch",
            int,
        ),
    ] = None
    epochs: Annotated[
        float | None,
        option(
            "Length of the training, in passes over the training images. Give this, --steps or --examples.",
            "14.4 for digits, 30 for cifar10, 90 for folder, 1 for synthetic",
            float,
        ),
    ] = None
    steps: Annotated[int | None, option("Length of the training in optimizer steps.", "by epochs", int)] = None
    examples: Annotated[
        int | None, option("Length of the training in images, each pass counted.", "by epochs", int)
    ] = None
    learning_rate: Annotated[float, option("Peak learning rate.", "by optimizer and data", float)] = AUTO
    warmup_epochs: Annotated[
        float,
        option("Epochs over which the learning rate rises linearly.", "by optimizer and data", float),
    ] = AUTO
    schedule: Annotated[
        Schedule,
        option(
            "How the learning rate falls after the warm-up: to zero at the last step, unless constant; polynomial "
            "by --decay-power, --decay-begin and --decay-end.",
            "cosine",
            Schedule,
        ),
    ] = AUTO
    decay_power: Annotated[float, option("Power of the polynomial schedule.", "2", float)] = AUTO
    decay_begin: Annotated[
        float | None,
        option(
            "Epoch at which the polynomial schedule begins to fall; constant before.", "the end of the warm-up", float
        ),
    ] = None
    decay_end: Annotated[
        float | None,
        option("Epoch at which it would be zero, possibly after the end of the training.", "the end", float),
    ] = None
    momentum: Annotated[
        float,
        option("Momentum; for adamw and lamb the decay of the first moment.", "by optimizer", float),
    ] = AUTO
    nesterov: Annotated[
        bool,
        option("Nesterov's form of momentum; lamb does not have it.", "by optimizer", bool),
    ] = AUTO
    momentum_coupling: Annotated[
        Coupling,
        option(
            "[kfac] Momentum that falls with the learning rate: ratio: times rate over last rate whenever it falls, as "
            "in the code of Osawa et al.; proportional: times rate over peak rate, as in their paper.",
            "none",
            Coupling,
        ),
    ] = AUTO
    rate_in_momentum: Annotated[
        bool,
        option(
            "[kfac] Apply the learning rate before the momentum, v <- m v - lr p, instead of after it.", "false", bool
        ),
    ] = AUTO
    rescale: Annotated[
        bool,
        option("After each step scale kernels down to norm sqrt(2 d_out) where they are larger.", "false", bool),
    ] = AUTO
    weight_decay: Annotated[
        float,
        option(
            "Weight decay of kernels; biases and normalisation parameters have none.",
            "by optimizer and data",
            float,
        ),
    ] = AUTO
    damping: Annotated[
        float,
        option("[kfac] Damping, added to the curvature before it is inverted.", "by data", float),
    ] = AUTO
    damping_initial: Annotated[
        float | None,
        option(
            "[kfac] Damping of the first step, from which it falls to --damping.", "--damping from the start", float
        ),
    ] = None
    damping_warmup_epochs: Annotated[
        float, option("[kfac] Epochs in which most of that way is gone; needs --damping-initial.")
    ] = 5.0
    unitwise_damping: Annotated[
        float,
        option("[kfac] Factor on the damping for the parameters of batch norm.", "1", float),
    ] = AUTO
    factor_decay: Annotated[
        float,
        option(
            "[kfac] Decay of the running average of the statistics; 0 uses the current batch alone.",
            "by data",
            float,
        ),
    ] = AUTO
    norm_constraint: Annotated[
        float,
        option(
            "[kfac] Upper bound on the squared length of a step in the curvature's metric; 0 for none.",
            "by data",
            float,
        ),
    ] = AUTO
    trust_ratio: Annotated[
        float,
        option(
            "[kfac] Scale each kernel's update to this share of the norm of the kernel, as LARS does; 0 for as it is.",
            "by data",
            float,
        ),
    ] = AUTO
    factor_every: Annotated[
        Every,
        option(
            "[kfac] Collect statistics on every so many steps (and on each of the first ten), or adaptive: the less "
            "they change the more seldom. The steps between cost little more than first-order ones."
        ),
    ] = 1
    statistics_threshold: Annotated[
        float,
        option(
            "[kfac] With --factor-every adaptive: relative change below which statistics count as similar. A single "
            "batch's noise must lie below it."
        ),
    ] = 0.1
    fisher: Annotated[
        Fisher,
        option(
            "[kfac] What the statistics are of: empirical: gradients of the loss; sampled: those for labels drawn from "
            "what the network predicts, which takes a second backward pass."
        ),
    ] = "empirical"
    subsample: Annotated[
        int, option("[kfac] Form statistics from every so many-th image only; gradients come from all.")
    ] = 1
    inverse_every: Annotated[
        int,
        option("[kfac] Recompute inverses on every so many steps (and on each of the first ten)."),
    ] = 1
    inverse: Annotated[
        Inverse,
        option(
            "[kfac] How factors are inverted: cholesky; eigh: eigendecompositions, damped by the product of the "
            "eigenvalues; ekfac: those with eigenvalues from second moments of per-example gradients."
        ),
    ] = "cholesky"


@dataclasses.dataclass(frozen=True)
class Model:
    """What is trained."""

    arch: Annotated[
        Arch,
        option(
            "Residual network: digits (two stages, for 8x8 images), resnet20 (the CIFAR-10 "
            "network), resnet18, resnet50 and resnet50d (the ImageNet networks).",
            "digits for digits, resnet20 for cifar10, else resnet50 or that of --config",
            Arch,
        ),
    ] = AUTO
    width: Annotated[
        int | None,
        option("Channels of the first stage.", "32 for digits, 16 for resnet20, else 64", int),
    ] = None
    sync_batch_norm: Annotated[
        bool,
        option(
            "Normalise by the mean and variance of a micro-batch over all devices, so that the number of devices "
            "changes nothing; else each device uses its own images.",
            "true for digits and cifar10, else false",
            bool,
        ),
    ] = AUTO
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16", "float64"],
        option(
            "Type of activations and their gradients; parameters stay float32. float16 scales the loss, by a factor "
            "that adapts. float64 is for parameters too, to compare runs without rounding in the way.",
        ),
    ] = "float32"
    init: Annotated[
        Init,
        option(
            "Initial weights: identity: residual blocks start as the identity; he: kernels He-normal by fan-in, "
            "the final one too, batch-norm scales N(1, 0.05).",
            "identity",
            Init,
        ),
    ] = AUTO
    norm_epsilon: Annotated[float, option("Added to the variance in batch norm.", "1e-5", float)] = AUTO


@dataclasses.dataclass(frozen=True)
class Augmentation:
    """What the device does with images and labels before the network sees them."""

    mixup_alpha: Annotated[
        float,
        option(
            "Running mixup: each image is mixed with the last step's mixed one, by max(b, 1 - b), b ~ Beta(alpha, "
            "alpha); 0 for none.",
            "0",
            float,
        ),
    ] = AUTO
    erasing: Annotated[
        Erasing,
        option(
            "Random erasing of a rectangle in half of the images; in-place: what is erased is missing from the next "
            "step's mixup too.",
            "none",
            Erasing,
        ),
    ] = AUTO
    divide_by_std: Annotated[
        bool,
        option(
            "Divide pixels by their standard deviation after subtracting their mean, both on a scale of 0 to 1.",
            "true",
            bool,
        ),
    ] = AUTO
    label_smoothing: Annotated[
        float,
        option(
            "Share of the target that is spread evenly over all classes.",
            "0 for digits, else 0.1",
            float,
        ),
    ] = AUTO


@dataclasses.dataclass(frozen=True)
class Data:
    """Where the images come from."""

    source: Annotated[
        Source | None,
        option(
            "digits: 1,797 handwritten digits of 8x8 pixels that come with scikit-learn. cifar10: "
            "found in --data-dir as pickles, binary files or PNG sheets. folder: ImageNet or any images in "
            "--data-dir, as train/<class>/*.JPEG and val/<class>/*.JPEG or as tar shards (README.md has all layouts). "
            "synthetic: noise, for measurements.",
            "folder with --data-dir, else digits",
            Source,
            name="data",
        ),
    ] = None
    data_dir: Annotated[
        Path | None,
        option(
            "Folder with the images. Given alone, it implies --data folder.",
            "data/cifar10 for cifar10",
            Path,
        ),
    ] = None
    image_size: Annotated[
        int,
        option(
            "Side of the square images that the network sees; free for folder and synthetic only.",
            "224 for folder and synthetic",
            int,
        ),
    ] = AUTO
    synthetic_images: Annotated[int, option("How many training images --data synthetic pretends to have.")] = 640
    synthetic_classes: Annotated[int, option("How many classes --data synthetic has.")] = 1000
    workers: Annotated[
        int,
        option(
            "Processes that decode the images of a folder, for each process of the training; 0 for threads. "
            "They change no image.",
            "the cores that the process may use",
            int,
        ),
    ] = AUTO
    crop: Annotated[
        Crop,
        option(
            "What training cuts out of the images of a folder: random-resized, 8% to 100% of the area; or squashed, a "
            "random square out of the image resized to 256/224 of --image-size whatever its aspect ratio. "
            "Validation takes the centre either way.",
            "squashed for the K-FAC configurations, else random-resized",
            Crop,
        ),
    ] = AUTO
    decoder: Annotated[
        Decoding,
        option(
            "What decodes the images of a folder: pillow, in --workers; or NVIDIA DALI, on the GPU (pip install "
            "nvidia-dali-cuda120), with --workers threads."
        ),
    ] = "pillow"


@dataclasses.dataclass(frozen=True)
class Hardware:
    """What it runs on. Without options: all devices of this machine, one process."""

    devices: Annotated[
        int | None,
        option("Number of devices.", "all that there are", int),
    ] = None
    distributed: Annotated[
        bool,
        option(
            "Be one of several processes, with what SLURM, Open MPI, Kubernetes or Cloud TPUs say in the environment "
            "(jax.distributed.initialize). The output folder must be one that all processes see.",
            "a single process",
        ),
        tyro.conf.FlagCreatePairsOff,
    ] = False
    coordinator: Annotated[
        str | None,
        option(
            "Address and port of process 0, HOST:PORT, where the environment does not tell it; needs --num-processes "
            "and --process-id and implies --distributed.",
            "from the environment",
            str,
        ),
    ] = None
    num_processes: Annotated[
        int | None, option("Number of processes, with --coordinator.", "from the environment", int)
    ] = None
    process_id: Annotated[
        int | None, option("Which of them this is, from 0, with --coordinator.", "from the environment", int)
    ] = None


@dataclasses.dataclass(frozen=True)
class Run:
    """Where results go and how the run is watched."""

    config: Annotated[
        str | None,
        option(
            f"A named configuration: {', '.join(CONFIGS)}. Any option given beside it comes first; a network for "
            "small images stays with digits and cifar10.",
            "none",
            str,
        ),
    ] = None
    print_config: Annotated[
        bool,
        option("Print the configuration, every default resolved, and end.", "train"),
        tyro.conf.FlagCreatePairsOff,
    ] = False
    output: Annotated[
        Path | None,
        option(
            "Folder for config.json, metrics.jsonl, curves.png and checkpoints/. It must be new "
            "or empty, unless a run is resumed.",
            "a new folder under runs/, named by data, optimizer and time",
            Path,
        ),
    ] = None
    resume: Annotated[
        bool,
        option(
            "Go on with the run in --output (the newest under runs/ if that is not given) from "
            "its last checkpoint, with its configuration. It ends the same, bit for bit, as if it "
            "had never stopped.",
            "start a new run",
        ),
        tyro.conf.FlagCreatePairsOff,
    ] = False
    seed: Annotated[int, option("Seed of the initial weights, the order of the images and their augmentation.")] = 0
    log_every: Annotated[int, option("Steps between lines on the terminal.")] = 10
    eval_every: Annotated[int | None, option("Steps between validations.", "one epoch", int)] = None
    checkpoint_every: Annotated[int | None, option("Steps between checkpoints.", "one epoch", int)] = None
    keep_checkpoints: Annotated[
        int, option("How many checkpoints are kept, besides the one with the best validation accuracy.")
    ] = 2
    tensorboard: Annotated[bool, option("Write event files for TensorBoard beside metrics.jsonl.")] = False
    profile: Annotated[
        str | None,
        option("Trace these steps, FIRST:LAST, with jax.profiler into profile/ of the output folder.", "none", str),
    ] = None
    stop_after: Annotated[
        int | None,
        option(
            "Stop in good order after this step of the run, as at the end of a time slot; --resume goes on from there.",
            "run to the end",
            int,
        ),
    ] = None


@dataclasses.dataclass(frozen=True)
class Config:
    """Train a residual network on images with K-FAC or a first-order optimizer.

    Without arguments: a small network on scikit-learn's handwritten digits, ten K-FAC steps an
    epoch, in well under four minutes on two CPU cores.
    """

    optim: Optimization = Optimization()
    model: Model = Model()
    augment: Augmentation = Augmentation()
    data: Data = Data()
    hardware: Hardware = Hardware()
    run: Run = Run()


GROUPS = ("optim", "model", "augment", "data", "hardware", "run")

# What may differ when a run is resumed: how one watches, and on what it runs. The data may have
# moved; that they are the same is checked by their fingerprint.
FREE_ON_RESUME = {
    "output", "resume", "stop_after", "log_every", "checkpoint_every", "keep_checkpoints",
    "workers", "data_dir", "local_batch", "devices", "distributed", "coordinator", "num_processes",
    "process_id", "print_config", "tensorboard", "profile",
}  # fmt: skip

# Defaults where no configuration, data set or optimizer has another.
DEFAULTS: dict[str, Any] = dict(
    optimizer="kfac", schedule="cosine", decay_power=2.0, rescale=False, init="identity", norm_epsilon=1e-5,
    mixup_alpha=0.0, erasing="none", divide_by_std=True, crop="random-resized",
)  # fmt: skip

# Defaults by data set.
DATA_DEFAULTS: dict[str, dict[str, Any]] = {
    "digits": dict(image_size=8, arch="digits", label_smoothing=0.0, global_batch=144, epochs=14.4,
                   sync_batch_norm=True),
    "cifar10": dict(image_size=32, arch="resnet20", label_smoothing=0.1, global_batch=1000,
                    epochs=30.0, sync_batch_norm=True, data_dir=Path("data/cifar10")),
    "folder": dict(image_size=224, arch="resnet50", label_smoothing=0.1, global_batch=256,
                   epochs=90.0, sync_batch_norm=False),
    "synthetic": dict(image_size=224, arch="resnet50", label_smoothing=0.1, global_batch=64,
                      epochs=1.0, sync_batch_norm=False),
}  # fmt: skip

# Defaults by optimizer, tuned on digits. For other data they are starting points, but for what
# LARGE replaces.
OPTIMIZER_DEFAULTS: dict[str, dict[str, Any]] = {
    "kfac": dict(learning_rate=0.03, momentum=0.9, nesterov=False, weight_decay=1e-4,
                 warmup_epochs=1.0, damping=1e-2, factor_decay=0.9, norm_constraint=0.0,
                 trust_ratio=0.0, momentum_coupling="none", rate_in_momentum=False,
                 unitwise_damping=1.0),
    "sgd": dict(learning_rate=1.0, momentum=0.9, nesterov=True, weight_decay=1e-4,
                warmup_epochs=1.0),
    "lars": dict(learning_rate=15.0, momentum=0.9, nesterov=False, weight_decay=1e-4,
                 warmup_epochs=1.0),
    "lamb": dict(learning_rate=0.1, momentum=0.9, weight_decay=1e-4, warmup_epochs=1.0),
    "adamw": dict(learning_rate=0.01, momentum=0.9, nesterov=False, weight_decay=1e-2,
                  warmup_epochs=1.0),
}  # fmt: skip
LARGE: dict[str, dict[str, Any]] = {
    "kfac": dict(learning_rate=0.02, damping=1e-4, factor_decay=0.0),
    "sgd": dict(learning_rate=0.1, weight_decay=5e-5, warmup_epochs=5.0),
    "lars": dict(learning_rate=5.0, weight_decay=5e-5, warmup_epochs=5.0),
    "lamb": dict(learning_rate=0.01, warmup_epochs=5.0),
    "adamw": dict(learning_rate=0.002, weight_decay=0.05, warmup_epochs=5.0),
}


def parse(args: list[str]) -> tuple[Config, dict[str, Any] | None]:
    """The configuration that `args` ask for, and, when a run is resumed, what its data were."""
    config = _command_line(args, Config())
    if not config.run.resume:
        return resolve(config), None
    folder = config.run.output or _newest_run()
    saved, found = _load(folder)
    # The saved values are the defaults now, so only what was given on the command line can differ.
    config = _command_line(args, saved)
    for group in GROUPS:
        for field in dataclasses.fields(getattr(config, group)):
            old = getattr(getattr(saved, group), field.name)
            new = getattr(getattr(config, group), field.name)
            if old != new and field.name not in FREE_ON_RESUME:
                raise UserError(
                    f"{_option(field.name)} {new} conflicts with the run in {folder}, which has "
                    f"{old}; leave the option out to resume, or start a new run in another --output"
                )
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, output=folder))
    _check(config)
    return config, found


def _command_line(args: list[str], default: Config) -> Config:
    """Parses `args`; what tyro finds wrong becomes one sentence instead of its box."""
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            return tyro.cli(tyro.conf.OmitArgPrefixes[Config], args=args, default=default, prog="train.py")
    except SystemExit as end:
        if not end.code:
            raise
        # The box has a title line, the message, and below a ruler hints and the help.
        lines = [line.strip("│ ") for line in box.getvalue().splitlines()[1:]]
        message = " ".join(itertools.takewhile(lambda line: line and line[0] not in "─╰", lines))
        raise UserError(f"{message} (--help lists all options)") from None


def resolve(config: Config) -> Config:
    """Puts the defaults that depend on data and optimizer in place of `None`, and checks values."""
    optim, data = config.optim, config.data
    source = data.source or ("folder" if data.data_dir is not None else "digits")
    recipe = named(config.run.config)
    chosen: str | None = optim.optimizer
    optimizer = chosen or recipe.get("optimizer", DEFAULTS["optimizer"])
    if recipe and optimizer != recipe["optimizer"] and optim.learning_rate is None:
        raise UserError(
            f"--config {config.run.config} has a --learning-rate for {recipe['optimizer']}, {recipe['learning_rate']}"
            f"; with --optimizer {optimizer} give one too, or another --config"
        )
    name = f"{source}-{config.run.config or optimizer}-{time.strftime('%Y%m%d-%H%M%S')}"
    # The networks of the configurations are for large images, and their share of a device for large networks.
    small = source in ("digits", "cifar10")
    defaults = {
        **DEFAULTS,
        **OPTIMIZER_DEFAULTS[optimizer],
        **(LARGE[optimizer] if source != "digits" else {}),
        **DATA_DEFAULTS[source],
        **{k: v for k, v in recipe.items() if k not in (("arch", "sync_batch_norm", "local_batch") if small else ())},
        "source": source,
        "workers": cores(),
        "output": Path("runs") / name,
    }
    given: str | None = optim.schedule
    schedule = given or recipe.get("schedule", DEFAULTS["schedule"])
    for name in ("decay_power", "decay_begin", "decay_end"):
        if getattr(optim, name) is not None and schedule != "polynomial":
            raise UserError(f"{_option(name)} has no effect with --schedule {schedule}; it is for polynomial")
    lengths = [name for name in ("epochs", "steps", "examples") if getattr(optim, name) is not None]
    if len(lengths) > 1:
        raise UserError(f"--{lengths[0]} and --{lengths[1]} both give the length of the training; give one")
    if lengths:
        defaults.pop("epochs")
    if optim.global_batch is not None and optim.global_batch != recipe.get("global_batch"):
        # It was for the configuration's own batch.
        defaults.pop("local_batch", None)
    if data.data_dir is not None and source in ("digits", "synthetic"):
        raise UserError(f"--data {source} reads no folder; leave --data-dir {data.data_dir} out")
    if source == "folder" and data.data_dir is None:
        raise UserError("--data folder needs --data-dir, the folder that holds train/ and val/ or tar shards")
    fixed = DATA_DEFAULTS[source]["image_size"]
    if source in ("digits", "cifar10") and data.image_size not in (None, fixed):
        raise UserError(f"--image-size {data.image_size} does not fit --data {source}, which has "
                        f"images of {fixed}x{fixed}; leave the option out")  # fmt: skip
    groups = {}
    for group in GROUPS:
        part = getattr(config, group)
        values = {
            field.name: defaults.get(field.name)
            for field in dataclasses.fields(part)
            if getattr(part, field.name) is None
        }
        groups[group] = dataclasses.replace(part, **values)
    config = Config(**groups)
    _check(config)
    return config


def named(name: str | None) -> dict[str, Any]:
    """The fields that the configuration of this name sets."""
    if name is None:
        return {}
    if name not in CONFIGS:
        raise UserError(f"--config {name} is unknown; there are {', '.join(CONFIGS)}")
    return CONFIGS[name]()


def show(config: Config) -> str:
    """The configuration as JSON, after what its docstring says."""
    about = (inspect.getdoc(CONFIGS[config.run.config]) or "") + "\n\n" if config.run.config else ""
    return about + json.dumps(dataclasses.asdict(config), indent=2, default=str)


def fit_batch(config: Config, images: int, devices: int) -> Config:
    """The configuration with a number for `--global-batch auto`, and a batch that the training images hold."""
    batch = config.optim.global_batch
    if batch == "auto":
        batch = max(1, images // STEPS_AN_EPOCH // devices) * devices
        config = dataclasses.replace(config, optim=dataclasses.replace(config.optim, global_batch=batch))
    if batch > images:
        raise UserError(f"--global-batch {batch} does not fit the {images} training images; auto takes a tenth of them")
    return config


def total_steps(optim: Optimization, per_epoch: float) -> int:
    """The length of the training, given in steps, epochs or examples."""
    if optim.steps is not None:
        return optim.steps
    steps = optim.examples / optim.global_batch if optim.examples is not None else (optim.epochs or 0) * per_epoch
    # What was asked for in full, but for rounding.
    return max(1, math.ceil(steps - 1e-6))


def traced_steps(profile: str | None) -> tuple[int, int]:
    """First and last step of `--profile`; (0, 0) for none."""
    if profile is None:
        return 0, 0
    first, _, last = profile.partition(":")
    if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise UserError(f"--profile is {profile} but must be FIRST:LAST, two steps counted from 1, such as 20:25")
    return int(first), int(last)


def _check(config: Config) -> None:
    """Refuses values outside their range, with the option's name and the range."""
    ranges: list[tuple[str, float, float]] = [
        ("image_size", 1, 4096), ("synthetic_images", 1, math.inf),
        ("synthetic_classes", 2, math.inf), ("workers", 0, 1024), ("label_smoothing", 0, 0.99),
        ("global_batch", 1, math.inf), ("local_batch", 1, math.inf), ("width", 1, 4096),
        ("devices", 1, math.inf), ("num_processes", 1, math.inf), ("process_id", 0, math.inf),
        ("steps", 1, math.inf), ("examples", 1, math.inf), ("mixup_alpha", 0, 100), ("decay_begin", 0, math.inf),
        ("damping_warmup_epochs", 0, math.inf),
        ("warmup_epochs", 0, math.inf), ("momentum", 0, 0.9999), ("weight_decay", 0, math.inf),
        ("factor_decay", 0, 0.9999), ("norm_constraint", 0, math.inf), ("trust_ratio", 0, math.inf),
        ("factor_every", 1, math.inf), ("subsample", 1, math.inf), ("inverse_every", 1, math.inf),
        ("seed", 0, 2**31 - 1),
        ("log_every", 1, math.inf), ("eval_every", 1, math.inf), ("checkpoint_every", 1, math.inf),
        ("keep_checkpoints", 1, math.inf), ("stop_after", 1, math.inf),
    ]  # fmt: skip
    values = {k: v for group in GROUPS for k, v in vars(getattr(config, group)).items()}
    for name, low, high in ranges:
        value = values[name]
        if value in ("auto", "adaptive"):
            continue
        if value is not None and not (low <= value <= high and math.isfinite(value)):
            wanted = f"at least {low}" if high == math.inf else f"from {low} to {high}"
            raise UserError(f"{_option(name)} is {value} but must be {wanted}")
    for name in ("epochs", "learning_rate", "damping", "statistics_threshold", "damping_initial", "unitwise_damping",
                 "decay_power", "decay_end", "norm_epsilon"):  # fmt: skip
        value = values[name]
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise UserError(f"{_option(name)} is {value} but must be greater than 0")
    begin = values["warmup_epochs"] if values["decay_begin"] is None else values["decay_begin"]
    if values["decay_end"] is not None and values["decay_end"] <= begin:
        raise UserError(f"--decay-end {values['decay_end']} must be greater than --decay-begin {begin}")
    if values["decay_begin"] is not None and values["decay_begin"] < values["warmup_epochs"]:
        raise UserError(f"--decay-begin {begin} must not be less than --warmup-epochs {values['warmup_epochs']}")
    if values["damping_initial"] is not None and values["damping"] and values["damping_initial"] < values["damping"]:
        raise UserError(f"--damping-initial {values['damping_initial']} must not be less than --damping "
                        f"{values['damping']}")  # fmt: skip
    if values["rate_in_momentum"] and values["trust_ratio"]:
        raise UserError("--rate-in-momentum has no effect with --trust-ratio; "
                        "give --no-rate-in-momentum or --trust-ratio 0")  # fmt: skip
    if values["fisher"] == "sampled" and values["dtype"] == "float16":
        raise UserError("--fisher sampled takes gradients of what it draws, which --dtype float16 does not scale as it "
                        "does the loss; use bfloat16 or float32")  # fmt: skip
    traced_steps(values["profile"])
    process = {_option(name): values[name] for name in ("coordinator", "num_processes", "process_id")}
    given = [name for name, value in process.items() if value is not None]
    if given and len(given) < len(process):
        missing = next(name for name in process if name not in given)
        raise UserError(f"{given[0]} needs {missing} too; --distributed alone takes all three from the environment")
    if given and values["process_id"] >= values["num_processes"]:
        raise UserError(f"--process-id {values['process_id']} must be less than --num-processes "
                        f"{values['num_processes']}")  # fmt: skip


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _option(field: str) -> str:
    return "--" + {"source": "data"}.get(field, field).replace("_", "-")


def _newest_run() -> Path:
    runs = sorted(Path("runs").glob("*/config.json"), key=lambda path: path.stat().st_mtime)
    if not runs:
        raise UserError("--resume finds no run under runs/; name its folder with --output")
    return runs[-1].parent


def save(config: Config, found: dict[str, Any], folder: Path) -> None:
    """Writes `config.json`: the configuration and what the data were."""
    text = {**dataclasses.asdict(config), "found": found}
    (folder / "config.json").write_text(json.dumps(text, indent=2, default=str) + "\n")


def _load(folder: Path) -> tuple[Config, dict[str, Any]]:
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"--resume finds no run in {folder}: it has no config.json")
    try:
        text = json.loads(path.read_text())
        for group, name in (("data", "data_dir"), ("run", "output")):
            if text[group][name] is not None:
                text[group][name] = Path(text[group][name])
        # On what the saved run ran, and how it was started and stopped, is no property of the one that goes on.
        text["run"].update(resume=False, stop_after=None, profile=None)
        saved = Config(
            Optimization(**text["optim"]), Model(**text["model"]), Augmentation(**text["augment"]),
            Data(**text["data"]), Hardware(), Run(**text["run"]),
        )  # fmt: skip
        return saved, text["found"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not a configuration of this script ({error})") from error
