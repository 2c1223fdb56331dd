"""The options of train.py: one flat table, whose defaults depend on data, optimizer and --config; and checks.

An option that is None after parsing gets the value that `resolve` finds; what a run really used is its `config.json`.
"""

import contextlib
import dataclasses
import difflib
import fcntl
import io
import itertools
import json
import math
import os
import re
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from recipe import CONFIGS
from records import UserError


def _arg(constructor: Any, **rest: Any) -> Any:
    """An option that is None until its default is known."""
    return tyro.conf.arg(constructor=constructor, help_behavior_hint="", **rest)


def _of(*names: str) -> Any:
    return _arg(Literal[names])


Number = Annotated[Any, _arg(float)]
Count = Annotated[Any, _arg(int)]
YesNo = Annotated[Any, _arg(bool)]
Text = Annotated[Any, _arg(str)]
Folder = Annotated[Any, _arg(Path)]
Flag = tyro.conf.FlagCreatePairsOff[bool]
# How many steps --global-batch auto makes of an epoch: as many as batch 131,072 makes of ImageNet's.
STEPS_AN_EPOCH = 10


@tyro.conf.configure(tyro.conf.OmitArgPrefixes)
@dataclasses.dataclass(frozen=True)
class Config:
    """Train a network on images with K-FAC or a first-order optimizer.

    Without arguments: a small residual network on scikit-learn's handwritten digits, ten K-FAC steps an epoch.
    Where no default is shown, it depends on the data, the optimizer and --config; --print-config shows them all.
    """

    # What is trained.
    config: Text = None
    """A named configuration of recipe.py, such as bs128k; options given beside it come first."""
    arch: Annotated[
        Any,
        _of("digits", "resnet20", "resnet18", "resnet34", "resnet50", "resnet50d", "resnet101", "vit-s16", "vit-b16"),
    ] = None
    """Network: digits (two stages, for 8x8 images), resnet20 (for CIFAR-10), the others for ImageNet."""
    width: Count = None
    """Channels of the first stage of a residual network: 32 for digits, 16 for resnet20, else 64."""
    dtype: Annotated[Any, _of("float32", "bfloat16", "float16", "float64")] = None
    """Type of activations; parameters stay float32. bfloat16 for named configurations on GPUs and TPUs, else float32.
    float16 scales the loss, by a factor that adapts. float64 is for parameters too."""
    init: Annotated[Any, _of("identity", "he")] = None
    """Initial weights of a residual network: its blocks as the identity, or all kernels He-normal by fan-in and
    batch-norm scales N(1, 0.05)."""
    norm_epsilon: Number = None
    """Added to the variance in batch norm."""
    sync_batch_norm: YesNo = None
    """Batch norm over all devices, so that their number changes nothing (default for digits and cifar10); else each
    device uses its own images."""

    # The images.
    data: Annotated[Any, _of("digits", "cifar10", "folder", "synthetic")] = None
    """digits come with scikit-learn; folder: ImageNet or any images in --data-dir (README.md has the layouts, and is
    the default where --data-dir is given); synthetic: noise, for measurements."""
    data_dir: Folder = None
    """Folder with the images: data/cifar10 for cifar10."""
    image_size: Count = None
    """Side of the square images that the network sees: 224 for folder and synthetic, where it is free."""
    crop: Annotated[Any, _of("random-resized", "squashed")] = None
    """What training cuts out: 8% to 100% of the area; or a random square out of the image resized to a square."""
    workers: Count = None
    """Processes that decode, for each process of the training; 0 for threads. They change no image. All cores."""
    decoder: Literal["pillow", "dali"] = "pillow"
    """dali: NVIDIA DALI on the GPU, which has never been run on a GPU."""
    max_broken: float = 0.001
    """Share of the images that may be broken before the run stops; ten in any case."""
    synthetic_images: int = 640
    """How many training images synthetic pretends to have."""
    synthetic_classes: int = 1000
    """How many classes synthetic has."""
    mixup_alpha: Number = None
    """Running mixup: each image is mixed with the last step's mixed one, by max(b, 1 - b), b ~ Beta(alpha, alpha)."""
    cutmix_alpha: Number = None
    """CutMix: a rectangle of another image of the device's batch, of a share of 1 - b; not together with mixup."""
    erasing: Annotated[Any, _of("none", "own", "in-place")] = None
    """A random rectangle of half of the images is erased; in-place: it is missing from the next step's mixup too."""
    randaugment: int = 0
    """Strength from 1 to 10 of two random operations on each image of a folder; 0 for none."""
    divide_by_std: YesNo = None
    """Divide pixels by their standard deviation after subtracting their mean."""
    label_smoothing: Number = None
    """Share of the target that is spread evenly over all classes: 0 for digits and K-FAC configurations, else 0.1."""

    # How long, and in which parts.
    global_batch: Annotated[Any, _arg(int | Literal["auto"] | None, metavar="INT|auto", aliases=["--batch-size"])] = (
        None
    )
    """Images in one optimizer step; auto: a tenth of the training images, as 131,072 is of ImageNet."""
    local_batch: Count = None
    """Images that a device works on at a time; a larger share of the global batch is accumulated in micro-batches."""
    epochs: Number = None
    """Length of the training in passes over the images. Give this, --steps or --examples; it may grow when a run goes
    on, and so may they."""
    steps: Count = None
    """Length of the training in optimizer steps."""
    examples: Count = None
    """Length of the training in images."""

    # The optimizer.
    optimizer: Annotated[Any, _of("kfac", "sgd", "lars", "lamb", "adamw")] = None
    """The first-order ones are optax's."""
    learning_rate: Annotated[Any, _arg(float, aliases=["--lr"])] = None
    """Peak learning rate."""
    warmup_epochs: Number = None
    """Epochs over which the rate rises linearly; by default the same for all optimizers: 5 (1 for digits), and no more
    than a tenth of the training."""
    schedule: Annotated[Any, _of("cosine", "linear", "polynomial", "constant")] = None
    """How the rate falls after the warm-up: to zero at the last step; polynomial: by the next three options."""
    decay_power: Number = None
    """Power of the polynomial schedule: 2."""
    decay_begin: Number = None
    """Epoch at which it begins to fall: the end of the warm-up."""
    decay_end: Number = None
    """Epoch at which it would be zero, possibly after the end of the training: that end."""
    momentum: Number = None
    """Momentum; for adamw and lamb the decay of the first moment."""
    nesterov: YesNo = None
    """Nesterov's form of momentum."""
    weight_decay: Number = None
    """Weight decay of kernels; biases and normalisation parameters have none."""
    rescale: YesNo = None
    """After each step scale kernels down to norm sqrt(2 d_out) where they are larger."""
    skip_nonfinite: bool = False
    """Leave out a step whose loss or gradient is not finite, and count it, instead of ending the run."""
    damping: Number = None
    """[kfac] Added to the curvature before it is inverted."""
    damping_initial: Number = None
    """[kfac] Damping of the first step, from which it falls to --damping."""
    damping_warmup_epochs: float = 5.0
    """[kfac] Epochs in which most of that way is gone."""
    unitwise_damping: Number = None
    """[kfac] Factor on the damping for the parameters of normalisation layers."""
    factor_decay: Number = None
    """[kfac] Decay of the running average of the statistics; 0 uses the current batch alone."""
    norm_constraint: Number = None
    """[kfac] Upper bound on the squared length of a step in the curvature's metric; 0 for none."""
    trust_ratio: Number = None
    """[kfac] Scale each kernel's update to this share of the norm of the kernel; 0 for as it is."""
    momentum_coupling: Annotated[Any, _of("none", "ratio", "proportional")] = None
    """[kfac] Momentum that falls with the rate: ratio: times rate over last rate, as in the code of Osawa et al.;
    proportional: times rate over peak rate, as in their paper."""
    rate_in_momentum: YesNo = None
    """[kfac] Apply the rate before the momentum, v <- m v - lr p, instead of after it."""
    factor_every: Annotated[Any, _arg(int | Literal["adaptive"] | None, metavar="INT|adaptive")] = 1
    """[kfac] Steps between statistics, after the first ten; adaptive: the less they change the more seldom."""
    statistics_threshold: float = 0.1
    """[kfac] With adaptive: relative change below which statistics count as similar."""
    fisher: Literal["empirical", "sampled"] = "empirical"
    """[kfac] Statistics of gradients of the loss, or of those for labels drawn from what the network predicts."""
    subsample: int = 1
    """[kfac] Form statistics from every so many-th image only."""
    inverse: Literal["cholesky", "eigh", "ekfac"] = "cholesky"
    """[kfac] How factors are inverted; ekfac: with eigenvalues from second moments of per-example gradients."""
    inverse_every: int = 1
    """[kfac] Steps between inverses, after the first ten."""
    ema: float = 0.0
    """Decay of a running average of the weights, which is then what is validated; 0 for none."""

    # On what it runs.
    devices: Count = None
    """Number of devices: all."""
    distributed: Flag = False
    """Be one of several processes, by what SLURM, Open MPI, Kubernetes or Cloud TPUs say in the environment."""
    coordinator: Text = None
    """HOST:PORT of process 0, where the environment does not tell it; needs the next two."""
    num_processes: Count = None
    """Number of processes."""
    process_id: Count = None
    """Which of them this is, from 0."""

    # The run.
    output: Folder = None
    """Folder of the run: a new one under runs/. If it holds a run of the same configuration, that goes on."""
    resume: Literal["auto", "must", "never"] = "auto"
    """must: go on with the run in --output (the newest under runs/), whose options are the defaults; never: only a new
    folder will do."""
    init_from: Folder = None
    """Start with the weights of this run (its best checkpoint); a head of another size begins anew."""
    eval: Folder = None
    """Only validate the best checkpoint of this run, with its options as defaults."""
    seed: int = 0
    """Of the initial weights, the order of the images and their augmentation."""
    stop_after: Count = None
    """Stop in good order after this step, as at the end of a time slot; the same command goes on."""
    target_accuracy: Number = None
    """Stop when the validation accuracy, from 0 to 1, has been reached."""
    log_every: int = 10
    """Steps between lines on the terminal."""
    eval_every: Count = None
    """Steps between validations: one epoch."""
    checkpoint_minutes: float = 15.0
    """Minutes between checkpoints; at the end and at a signal there is one in any case."""
    checkpoint_every: Count = None
    """Steps between checkpoints, beside that."""
    checkpoint_mixed: Literal["auto", "keep", "remake"] = "auto"
    """What running mixup carries on: in the checkpoint; or made again out of the last ten batches, almost to the bit.
    auto: in the checkpoint up to 1 GB."""
    keep_checkpoints: int = 2
    """How many are kept, besides the one with the best validation accuracy."""
    compilation_cache: bool = True
    """Keep compiled programs in JAX_COMPILATION_CACHE_DIR, or ~/.cache/kfac-imagenet."""
    tensorboard: bool = False
    """Write event files too (pip install tensorboardX)."""
    wandb: bool = False
    """Log to Weights & Biases too (pip install wandb)."""
    mlperf: bool = False
    """Print lines in the format of MLPerf's logs too."""
    profile: Text = None
    """Trace these steps, FIRST:LAST, with jax.profiler."""
    print_config: Flag = False
    """Print the configuration as JSON, every default resolved, and end."""


# What may differ when a run goes on: how one watches, and on what it runs. The data may have moved; that they are the
# same is seen by their fingerprint. The length may grow.
FREE = {"output", "resume", "init_from", "eval", "stop_after", "target_accuracy", "log_every", "checkpoint_minutes",
        "checkpoint_every", "checkpoint_mixed", "keep_checkpoints", "workers", "data_dir", "local_batch", "devices",
        "distributed", "coordinator", "num_processes", "process_id", "print_config", "tensorboard", "wandb", "mlperf",
        "profile", "compilation_cache", "max_broken", "epochs", "steps", "examples"}  # fmt: skip
KFAC_ONLY = ("damping", "damping_initial", "damping_warmup_epochs", "unitwise_damping", "factor_decay",
             "norm_constraint", "trust_ratio", "momentum_coupling", "rate_in_momentum", "factor_every",
             "statistics_threshold", "fisher",
             "subsample", "inverse", "inverse_every")  # fmt: skip

# Defaults where no configuration, data set or optimizer has another; then by data set; then by optimizer, tuned on
# digits; then by optimizer for other data, starting points.
DEFAULTS: dict[str, Any] = dict(
    optimizer="kfac", schedule="cosine", decay_power=2.0, rescale=False, init="identity", norm_epsilon=1e-5,
    mixup_alpha=0.0, cutmix_alpha=0.0, erasing="none", divide_by_std=True, crop="random-resized", nesterov=False,
)  # fmt: skip
DATA: dict[str, dict[str, Any]] = {
    "digits": dict(image_size=8, arch="digits", label_smoothing=0.0, global_batch=144, epochs=14.4,
                   sync_batch_norm=True),
    "cifar10": dict(image_size=32, arch="resnet20", label_smoothing=0.1, global_batch=1000, epochs=30.0,
                    sync_batch_norm=True, data_dir=Path("data/cifar10")),
    "folder": dict(image_size=224, arch="resnet50", label_smoothing=0.1, global_batch=256, epochs=90.0,
                   sync_batch_norm=False),
    "synthetic": dict(image_size=224, arch="resnet50", label_smoothing=0.1, global_batch=64, epochs=1.0,
                      sync_batch_norm=False),
}  # fmt: skip
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "kfac": dict(learning_rate=0.03, momentum=0.9, weight_decay=1e-4, damping=1e-2, factor_decay=0.9,
                 norm_constraint=0.0, trust_ratio=0.0, momentum_coupling="none", rate_in_momentum=False,
                 unitwise_damping=1.0),
    "sgd": dict(learning_rate=1.0, momentum=0.9, nesterov=True, weight_decay=1e-4),
    "lars": dict(learning_rate=15.0, momentum=0.9, weight_decay=1e-4),
    "lamb": dict(learning_rate=0.1, momentum=0.9, weight_decay=1e-4),
    "adamw": dict(learning_rate=0.01, momentum=0.9, weight_decay=1e-2),
}  # fmt: skip
LARGE: dict[str, dict[str, Any]] = {
    "kfac": dict(learning_rate=0.02, damping=1e-4, factor_decay=0.0),
    "sgd": dict(learning_rate=0.1, weight_decay=5e-5),
    "lars": dict(learning_rate=5.0, weight_decay=5e-5),
    "lamb": dict(learning_rate=0.01),
    "adamw": dict(learning_rate=0.002, weight_decay=0.05),
}


def parse(args: list[str]) -> Config:
    """The configuration that `args` ask for, checked, with every default resolved that does not need the data."""
    given = _command_line(args, Config())
    if given.eval is not None:
        saved = load(given.eval)[0]
        return dataclasses.replace(_command_line(args, saved), workers=given.workers or cores(), output=given.eval)
    if given.resume != "must":
        return resolve(given)
    folder = given.output or _newest_run()
    saved = load(folder)[0]
    # The saved values are the defaults, so only what is on the command line can differ.
    config = dataclasses.replace(_command_line(args, saved), output=folder)
    lengths = [name for name in ("epochs", "steps", "examples") if getattr(config, name) != getattr(saved, name)]
    if lengths:
        others: dict[str, Any] = {name: None for name in ("epochs", "steps", "examples") if name not in lengths}
        config = dataclasses.replace(config, **others)
    check(config)
    return config


def same_run(config: Config, saved: Config) -> None:
    """Refuses to go on with the run of `saved` under options that would make another one of it."""
    for name in (field.name for field in dataclasses.fields(Config) if field.name not in FREE):
        old, new = getattr(saved, name), getattr(config, name)
        if old != new:
            raise UserError(
                f"{option(name)} {new} conflicts with the run in {config.output}, which has {old}; give the same "
                "options to go on with it, or another --output to start a new one"
            )


def _command_line(args: list[str], default: Config) -> Config:
    """Parses `args`; what tyro finds wrong becomes one sentence instead of its box."""
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            return tyro.cli(Config, args=args, default=default, prog="train.py")
    except SystemExit as end:
        if not end.code:
            raise
    # The box has a title line, the message, and below a ruler hints and the help.
    lines = [line.strip("│ ") for line in box.getvalue().splitlines()[1:]]
    message = " ".join(itertools.takewhile(lambda line: line and line[0] not in "─╰", lines))
    names = [option(field.name) for field in dataclasses.fields(Config)]
    unknown = [word.split("=")[0] for word in args if word.startswith("--") and word.split("=")[0] not in names]
    near = difflib.get_close_matches(unknown[0], names, 1) if unknown and "Unrecognized" in message else []
    message = re.sub(
        r"no type matching \S+ could be instantiated from \['(.*?)'\]\.?", r"\1 is no whole number", message
    )
    raise UserError(message + (f"; {near[0]} is near" if near else "") + " (--help lists all options)")


def resolve(config: Config) -> Config:
    """Puts the defaults that depend on data and optimizer in place of None, and checks values."""
    if config.config is not None and config.config not in CONFIGS:
        raise UserError(f"--config {config.config} is unknown; there are {', '.join(CONFIGS)}")
    recipe = CONFIGS[config.config] if config.config else {}
    data = config.data or ("folder" if config.data_dir is not None else "digits")
    optimizer = config.optimizer or recipe.get("optimizer", DEFAULTS["optimizer"])
    if recipe and optimizer != recipe["optimizer"] and config.learning_rate is None:
        raise UserError(f"--config {config.config} has a --learning-rate for {recipe['optimizer']}, "
                        f"{recipe['learning_rate']}; with --optimizer {optimizer} give one too")  # fmt: skip
    if optimizer != "kfac":
        for name in KFAC_ONLY:
            if getattr(config, name) != getattr(Config, name):
                raise UserError(f"{option(name)} has no effect with --optimizer {optimizer}; it is for kfac")
    # The networks of the configurations are for large images, and their share of a device for large networks.
    small = ("arch", "sync_batch_norm", "local_batch") if data in ("digits", "cifar10") else ()
    lengths = [name for name in ("epochs", "steps", "examples") if getattr(config, name) is not None]
    if len(lengths) > 1:
        raise UserError(f"--{lengths[0]} and --{lengths[1]} both give the length of the training; give one")
    name = f"{data}-{config.config or optimizer}-{time.strftime('%Y%m%d-%H%M%S')}"
    defaults = {
        **DEFAULTS, **OPTIMIZERS[optimizer], **(LARGE[optimizer] if data != "digits" else {}), **DATA[data],
        **{key: value for key, value in recipe.items() if key not in small},
        "data": data, "workers": cores(), "output": Path("runs") / name,
    }  # fmt: skip
    if lengths:
        defaults.pop("epochs")
    if config.global_batch not in (None, recipe.get("global_batch")):
        defaults.pop("local_batch", None)  # it was for the configuration's own batch
    if (config.schedule or defaults["schedule"]) != "polynomial":
        for name in ("decay_power", "decay_begin", "decay_end"):
            if getattr(config, name) is not None:
                raise UserError(f"{option(name)} has no effect with --schedule "
                                f"{config.schedule or defaults['schedule']}; it is for polynomial")  # fmt: skip
    if config.data_dir is not None and data in ("digits", "synthetic"):
        raise UserError(f"--data {data} reads no folder; leave --data-dir {config.data_dir} out")
    if data == "folder" and config.data_dir is None:
        raise UserError("--data folder needs --data-dir, the folder that holds train/ and val/ or shards")
    if data != "folder" and config.randaugment:
        raise UserError(f"--randaugment is for the images of a folder, and --data {data} has none; leave it out")
    if data in ("digits", "cifar10") and config.image_size not in (None, DATA[data]["image_size"]):
        side = DATA[data]["image_size"]
        raise UserError(f"--image-size {config.image_size} does not fit --data {data}, which has images of "
                        f"{side}x{side}; leave the option out")  # fmt: skip
    absent = {field.name for field in dataclasses.fields(Config) if getattr(config, field.name) is None}
    config = dataclasses.replace(config, **{name: defaults[name] for name in absent & defaults.keys()})
    check(config)
    return config


def fit(config: Config, images: int, devices: int, platform: str) -> Config:
    """What depends on the number of images and devices: the batch, its share of a device, warm-up, type."""
    batch = config.global_batch
    if batch == "auto":
        batch = max(1, images // STEPS_AN_EPOCH // devices) * devices
    if batch > images:
        raise UserError(f"--global-batch {batch} does not fit the {images} training images; auto takes a tenth of them")
    if config.local_batch is None and batch % devices:
        raise UserError(f"--global-batch {batch} does not divide over {devices} devices")
    local = config.local_batch or batch // devices
    if batch % (devices * local):
        raise UserError(f"--global-batch {batch} is not a multiple of {devices * local}, which is --local-batch "
                        f"{local} on {devices} device(s)")  # fmt: skip
    config = dataclasses.replace(config, global_batch=batch)
    epochs = total_steps(config, images) * batch / images
    warmup, most = config.warmup_epochs, 1.0 if config.data == "digits" else 5.0
    if warmup is None and (config.output / "config.json").is_file():
        warmup = load(config.output)[0].warmup_epochs  # a run that grows keeps its own
    elif warmup is None:
        warmup = round(min(most, epochs / 10), 4)
    elif warmup >= epochs:
        raise UserError(f"--warmup-epochs {warmup} is all of the training of {epochs:.4g} epochs; give less")
    if config.decay_begin is not None and config.decay_begin < warmup:
        raise UserError(f"--decay-begin {config.decay_begin} must not be less than --warmup-epochs {warmup}")
    if config.decay_end is not None and config.decay_end <= warmup:
        raise UserError(f"--decay-end {config.decay_end} must be greater than --warmup-epochs {warmup}")
    half = "bfloat16" if config.config and platform in ("gpu", "tpu") else "float32"
    return dataclasses.replace(config, warmup_epochs=warmup, dtype=config.dtype or half)


def total_steps(config: Config, images: int) -> int:
    """The length of the training, given in steps, epochs or examples."""
    if config.steps is not None:
        return config.steps
    examples = config.examples if config.examples is not None else config.epochs * images
    # What was asked for in full, but for rounding.
    return max(1, math.ceil(examples / config.global_batch - 1e-6))


def traced_steps(profile: str | None, last_step: float = math.inf) -> tuple[int, int]:
    """First and last step of `--profile`; (0, 0) for none."""
    if profile is None:
        return 0, 0
    first, _, last = profile.partition(":")
    if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise UserError(f"--profile is {profile} but must be FIRST:LAST, two steps counted from 1, such as 20:25")
    if int(first) > last_step:
        raise UserError(f"--profile {profile} begins after the last step, {last_step}")
    return int(first), int(last)


# From, to; a bound in a string is excluded.
RANGES: dict[str, tuple[Any, Any]] = {
    **dict.fromkeys(("synthetic_images", "workers", "process_id", "seed"), (0, 2**31 - 1)),
    **dict.fromkeys(("global_batch", "local_batch", "steps", "examples", "width", "devices", "num_processes",
                     "log_every",
                     "eval_every", "checkpoint_every", "keep_checkpoints", "stop_after", "factor_every", "subsample",
                     "inverse_every", "image_size"), (1, math.inf)),
    **dict.fromkeys(("epochs", "learning_rate", "damping", "statistics_threshold", "damping_initial",
                     "unitwise_damping", "decay_power", "decay_end", "norm_epsilon",
                     "checkpoint_minutes"), ("0", math.inf)),
    **dict.fromkeys(("mixup_alpha", "cutmix_alpha", "decay_begin", "damping_warmup_epochs", "warmup_epochs",
                     "weight_decay", "norm_constraint", "trust_ratio"), (0, math.inf)),
    **dict.fromkeys(("momentum", "factor_decay", "ema"), (0, 0.99999)),
    "synthetic_classes": (2, math.inf), "label_smoothing": (0, 0.99), "randaugment": (0, 10), "max_broken": (0, 1),
    "target_accuracy": ("0", 1),
}  # fmt: skip


def check(config: Config) -> None:
    """Refuses values outside their range, with the option's name and the range, and what does not go together."""
    for name, (low, high) in RANGES.items():
        value = getattr(config, name)
        if value is None or isinstance(value, str):
            continue
        inside = (value > float(low) if isinstance(low, str) else value >= low) and value <= high
        if not (inside and math.isfinite(value)):
            wanted = f"greater than {low}" if isinstance(low, str) else f"at least {low}"
            raise UserError(f"{option(name)} is {value} but must be finite and {wanted}"
                            + (f" and at most {high}" if high != math.inf else ""))  # fmt: skip
    c = config
    if c.decay_end is not None and c.decay_end <= (c.decay_begin or 0):
        raise UserError(f"--decay-end {c.decay_end} must be greater than --decay-begin {c.decay_begin}")
    if c.damping_initial is not None and c.damping_initial < c.damping:
        raise UserError(f"--damping-initial {c.damping_initial} must not be less than --damping {c.damping}")
    if c.rate_in_momentum and c.trust_ratio:
        raise UserError(
            "--rate-in-momentum has no effect with --trust-ratio; give --no-rate-in-momentum or --trust-ratio 0"
        )
    if c.fisher == "sampled" and c.dtype == "float16":
        raise UserError("--fisher sampled takes gradients of what it draws, which --dtype float16 does not scale as it "
                        "does the loss; use bfloat16 or float32")  # fmt: skip
    if c.mixup_alpha and c.cutmix_alpha:
        raise UserError("--mixup-alpha and --cutmix-alpha both mix images; give 0 for one of them")
    traced_steps(c.profile)
    if c.coordinator is not None and not re.fullmatch(r".+:\d+", c.coordinator):
        raise UserError(
            f"--coordinator {c.coordinator} has no port; it must be HOST:PORT, such as {c.coordinator}:8476"
        )
    process = {option(name): getattr(c, name) for name in ("coordinator", "num_processes", "process_id")}
    given = [name for name, value in process.items() if value is not None]
    if given and len(given) < len(process):
        missing = next(name for name in process if name not in given)
        raise UserError(f"{given[0]} needs {missing} too; --distributed alone takes all three from the environment")
    if given and c.process_id >= c.num_processes:
        raise UserError(f"--process-id {c.process_id} must be less than --num-processes {c.num_processes}")


def cores() -> int:
    """How many this process may use: by its affinity and by the quota of its control group, as in a container."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        count = min(count, max(1, math.ceil(int(quota) / int(period))))
    return count


def option(field: str) -> str:
    return "--" + field.replace("_", "-")


def _newest_run() -> Path:
    runs = sorted(Path("runs").glob("*/config.json"), key=lambda path: path.stat().st_mtime)
    if not runs:
        raise UserError("--resume must finds no run under runs/; name its folder with --output")
    return runs[-1].parent


def save(config: Config, found: dict[str, Any], folder: Path) -> None:
    """Writes `config.json`: the configuration and what the data were, in one go."""
    values = dataclasses.asdict(config)
    if config.data_dir is not None:
        values["data_dir"] = config.data_dir.absolute()
    partial = folder / ".config.json"
    partial.write_text(json.dumps({**values, "found": found}, indent=2, default=str) + "\n")
    partial.replace(folder / "config.json")


def open_output(config: Config, found: dict[str, Any]) -> Any:
    """Makes the output folder, or sees that the run in it is this one; what it returns is the folder's lock."""
    output = config.output
    try:
        if output.exists() and not output.is_dir():
            raise UserError(f"--output {output} is a file, not a folder")
        known = (output / "config.json").exists()
        if known or (output.exists() and set(os.listdir(output)) - {".lock", ".config.json"}):
            if not known or config.resume == "never":
                raise UserError(f"--output {output} is in use{'' if known else ', by no run of this script'}; name a "
                                "new folder" + (", or leave --resume never out" if known else ""))  # fmt: skip
            saved, before = load(output)
            same_run(config, saved)
            if before != found:
                raise UserError(f"the data are not those of the run in {output}: {found} now, {before} then; point "
                                "--data-dir to the same images")  # fmt: skip
        output.mkdir(parents=True, exist_ok=True)
        held = lock(output)
        if not known:
            save(config, found, output)
        return held
    except OSError as error:
        raise UserError(f"--output {output} cannot be written: {error.strerror}") from error


def lock(folder: Path) -> int:
    """Refuses a folder in which another process trains; held until what this returns is closed, or the process ends."""
    file = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(file)
        raise UserError(
            f"--output {folder} is in use: another process trains there; wait, or name a new one"
        ) from error
    except OSError:
        pass  # a file system without locks
    return file


def load(folder: Path) -> tuple[Config, dict[str, Any]]:
    """The configuration of the run in `folder`, and what its data were."""
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{folder} holds no run: it has no config.json")
    try:
        values = json.loads(path.read_text())
        found = values.pop("found")
        # How the saved run was started and stopped, and on what, is no property of the one that goes on.
        forget = ("output", "init_from", "eval", "stop_after", "profile", "devices", "coordinator", "num_processes",
                  "process_id", "distributed", "resume", "print_config")  # fmt: skip
        values |= {name: getattr(Config, name) for name in forget}
        values["data_dir"] = None if values["data_dir"] is None else Path(values["data_dir"])
        return Config(**values), found
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not a configuration of this script ({error})") from error
