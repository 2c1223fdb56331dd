"""The options of train.py: a table, whose defaults depend on data, optimizer and --config (recipe.py); and checks.

An option that is None after parsing gets the value that `resolve` finds; what a run really used is its `config.json`.
"""

import contextlib
import dataclasses
import difflib
import io
import itertools
import json
import math
import os
import re
import time
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import tyro

from files import UserError
from models import NETWORKS
from recipe import CONFIGS, DATA, DEFAULTS, OPTIMIZERS, PUBLISHED


class Kind(NamedTuple):
    """What an option takes: a type and a range."""

    type: Any
    low: float = -math.inf
    high: float = math.inf
    low_too: bool = True
    more: Any = None


def one_of(*names: str) -> Kind:
    return Kind(Literal[names])


def count_or(*names: str, aliases: tuple[str, ...] = ()) -> Kind:
    return Kind(int | Literal[names] | None, 1, more={"metavar": "|".join(("INT", *names)), "aliases": aliases})


positive, not_negative, decay = Kind(float, 0, low_too=False), Kind(float, 0), Kind(float, 0, 0.99999)
share, whole, count = Kind(float, 0, 1), Kind(int, 0, 2**31 - 1), Kind(int, 1)
yes_no, text, folder = (Kind(kind) for kind in (bool, str, Path))
flag, counts = Kind(tyro.conf.FlagCreatePairsOff[bool]), Kind(tuple[int, ...])

# Name, kind, default (None: not known before data and optimizer are) and help.
# fmt: off
Table = list[tuple[str, Kind, Any, str]]
# What makes a run: it must be the same when the run goes on.
RUN: Table = [
    ("config", text, None, "A named configuration of recipe.py, such as bs128k; options given beside it come first."),
    # The network.
    ("arch", one_of(*NETWORKS), None, "Network: digits for 8x8 images, resnet20 for CIFAR-10, else for ImageNet."),
    ("width", count, None, "Channels of a residual network's first stage: 32 for digits, 16 for resnet20, else 64."),
    ("dtype", one_of("float32", "bfloat16", "float16", "float64"), None, "Of activations, with parameters "
     "in float32; float64 is for both. bfloat16 for named configurations on GPUs and TPUs, else float32."),
    ("init", one_of("identity", "he"), None, "Initial weights of a residual network: its blocks as the identity, or "
     "all kernels He-normal by fan-in and batch-norm scales N(1, 0.05)."),
    ("norm_epsilon", positive, None, "Added to the variance in batch norm."),
    ("sync_batch_norm", yes_no, None, "Batch norm over all devices, so that their number changes nothing (default for "
     "digits and cifar10); else each device uses its own images."),
    # The images.
    ("data", one_of("digits", "cifar10", "folder", "synthetic"), None, "digits come with scikit-learn; folder: "
     "ImageNet or any images in --data-dir (README.md has the layouts); synthetic: noise, for measurements."),
    ("image_size", count, None, "Side of the images that the network sees: 224 for folder and synthetic."),
    ("crop", one_of("random-resized", "squashed"), None, "What training cuts out: 8% to 100% of the area; or a random "
     "square out of the image resized to a square."),
    ("synthetic_images", whole, 640, "How many training images synthetic pretends to have."),
    ("mixup_alpha", not_negative, None, "Running mixup: each image is mixed with the last step's mixed one, by "
     "max(b, 1 - b), b ~ Beta(alpha, alpha)."),
    ("erasing", one_of("none", "own", "in-place"), None, "A random rectangle of half of the images is erased; "
     "in-place: it is missing from the next step's mixup too."),
    ("divide_by_std", yes_no, None, "Divide pixels by their standard deviation after subtracting their mean."),
    ("label_smoothing", Kind(float, 0, 0.99), None, "Share of the target that is spread over all classes: 0 or 0.1."),
    ("global_batch", count_or("auto", aliases=("--batch-size",)), None, "Images in one step; auto: a tenth of the "
     "training images, as 131,072 is of ImageNet."),
    # The optimizer.
    ("optimizer", one_of("kfac", "muon", "sgd", "lars", "lamb", "adamw"), None, "kfac: `kfac.kfac` as it is, or "
     "with a --trust-ratio and in a --config `kfac.presets.large_batch`. The others are optax's."),
    ("learning_rate", positive._replace(more={"aliases": ["--lr"]}), None, "Peak learning rate."),
    ("warmup_epochs", not_negative, None, "Epochs over which the rate rises: with all optimizers a tenth of the "
     "training."),
    ("schedule", one_of("cosine", "linear", "polynomial", "constant"), None, "How the rate falls after the warm-up: to "
     "zero at the last step; polynomial: by the next three options."),
    ("decay_power", positive, None, "Power of the polynomial schedule: 2."),
    ("decay_begin", not_negative, None, "Epoch at which it begins to fall: the end of the warm-up."),
    ("decay_end", positive, None, "Epoch at which it would be zero, possibly after the training: the end of it."),
    ("momentum", decay, None, "Momentum; for adamw and lamb the decay of the first moment."),
    ("nesterov", yes_no, None, "Nesterov's form of momentum."),
    ("weight_decay", not_negative, None, "Weight decay of kernels; biases and normalisation parameters have none."),
    ("rescale", yes_no, None, "After each step scale kernels down to norm sqrt(2 d_out) where they are larger."),
    ("skip_nonfinite", yes_no, False, "Leave out a step that is not finite, and count it, instead of ending the run."),
    ("damping", positive, None, "[kfac] Added to the curvature before it is inverted; without one the default of "
     "`kfac.kfac`."),
    ("damping_initial", positive, None, "[kfac] Damping of the first step, from which it falls to --damping."),
    ("damping_warmup_epochs", not_negative, 5.0, "[kfac] Epochs in which most of that way is gone."),
    ("unitwise_damping", positive, None, "[kfac] Factor on the damping for the parameters of normalisation layers."),
    ("factor_decay", decay, None, "[kfac] Decay of the average of the statistics; 0 uses the current batch alone."),
    ("kl_clip", not_negative, None, "[kfac] Upper bound on the squared length of a step in the curvature's "
     "metric; 0 for none."),
    ("trust_ratio", Kind(float | Literal["auto"] | None, 0, more={"metavar": "FLOAT|auto"}), None, "[kfac] auto, the "
     "default of `kfac.kfac`; else scale each kernel's update to this share of its norm, 0 as it is."),
    ("momentum_coupling", one_of("none", "ratio", "proportional"), None, "[kfac] Momentum that falls with the rate: "
     "times rate over last rate, as in the code of Osawa et al.; or rate over peak rate, as in their paper."),
    ("rate_in_momentum", yes_no, None, "[kfac] Apply the rate before the momentum, v <- m v - lr p, not after it."),
    ("factor_every", count_or("auto", "adaptive"), None, "[kfac] Steps between statistics, after the first ten; auto: "
     "as `kfac.due` says; adaptive: the less they change the more seldom."),
    ("statistics_threshold", positive, 0.1, "[kfac] With adaptive: relative change that counts as similar."),
    ("fisher", one_of("empirical", "sampled"), "empirical", "[kfac] Statistics of gradients of the loss, or of those "
     "for labels drawn from what the network predicts."),
    ("subsample", count, 1, "[kfac] Form statistics from every so many-th image only."),
    ("inverse", one_of("soap", "cholesky", "eigh", "ekfac"), None, "[kfac] How factors are inverted; ekfac: with "
     "eigenvalues from second moments of per-example gradients."),
    ("inverse_every", count, None, "[kfac] Steps between inverses, after the first ten; without one the default of "
     "`kfac.kfac`."),
    ("ema", decay, 0.0, "Decay of a running average of the weights, which is then what is validated; 0 for none."),
    ("eval_every", count, None, "Steps between validations: one epoch."),
    ("seed", whole, 0, "Of the initial weights, the order of the images and their augmentation."),
]
# What may differ when a run goes on. That data which have moved are the same, a fingerprint tells.
MAY_CHANGE: Table = [
    ("epochs", positive, None, "Length of the training; give this, --steps or --examples, and more to go on."),
    ("steps", count, None, "Length of the training in optimizer steps."),
    ("examples", count, None, "Length of the training in images."),
    ("data_dir", text, None, "Folder with the images, or a bucket such as s3://NAME/FOLDER; data/cifar10 for cifar10."),
    ("workers", whole, None, "Processes that decode, for each process of the training: all cores; 0 for threads."),
    ("max_broken", share, 0.001, "Share of the images that may be broken before the run stops; ten in any case."),
    ("local_batch", count, None, "Images that a device works on at a time: a micro-batch of its share."),
    ("target_accuracy", Kind(float, 0, 1, False), None, "Stop at this validation accuracy, from 0 to 1."),
    ("log_every", count, 10, "Steps between lines on the terminal."),
    ("checkpoint_minutes", positive, 15.0, "Minutes between checkpoints; one at the end and at a signal in any case."),
    ("checkpoint_every", count, None, "Steps between checkpoints, beside that."),
    ("checkpoint_mixed", one_of("auto", "keep", "remake"), "auto", "What running mixup carries on: in the checkpoint; "
     "or made again out of the last ten batches, almost to the bit. auto: in the checkpoint up to 1 GB."),
    ("keep_checkpoints", count, 2, "How many are kept, besides the one with the best validation accuracy."),
    ("compilation_cache", yes_no, True, "Keep programs in JAX_COMPILATION_CACHE_DIR, or ~/.cache/kfac-imagenet."),
    ("tensorboard", yes_no, False, "Write event files too (pip install tensorboardX)."),
    ("init_from", folder, None, "Start with the best weights of this run; a head of another size begins anew."),
]
# What is not remembered.
FOR_NOW: Table = [
    ("devices", count, None, "Number of devices: all."),
    ("distributed", flag, False, "Be one of several processes, by what SLURM, Open MPI, Kubernetes or Cloud TPUs say "
     "in the environment."),
    ("coordinator", text, None, "HOST:PORT of process 0, where the environment does not tell it; needs the next two."),
    ("num_processes", count, None, "Number of processes."),
    ("process_id", whole, None, "Which of them this is, from 0."),
    ("output", folder, None, "Folder of the run: a new one under runs/. One that is in it goes on."),
    ("resume", one_of("auto", "must", "never"), "auto", "must: go on with the run in --output (the newest in runs/), "
     "whose options are the defaults; never: only a new folder will do."),
    ("stop_after", count, None, "Stop in good order after this step; the same command goes on."),
    ("profile", text, None, "Trace these steps, FIRST:LAST, with jax.profiler."),
    ("eval", folder, None, "Only validate the best checkpoint of this run, with its options as defaults."),
    ("plan", counts, (), "Only predict, by kfac.planning.plan, what a step takes on so many devices: --plan 128 512."),
    ("input_speed", count, None, "Only measure how fast so many images are read and decoded."),
    ("print_config", flag, False, "Only print the configuration as JSON; what data and devices decide is not in it."),
]
# fmt: on
OPTIONS = [*RUN, *MAY_CHANGE, *FOR_NOW]
NAMES, SAME_RUN, NOT_REMEMBERED = ([name for name, *_ in table] for table in (OPTIONS, RUN, FOR_NOW))
KFAC_ONLY = [name for name, *_, text in OPTIONS if text.startswith("[kfac]")]
PUBLISHED_ONLY = ("damping_initial", "unitwise_damping", "factor_decay", "kl_clip", "rate_in_momentum")
LENGTHS = ("epochs", "steps", "examples")
# How many steps --global-batch auto makes of an epoch: as many as batch 131,072 makes of ImageNet's.
STEPS_AN_EPOCH = 10


def _field(name: str, kind: Kind, default: Any, text: str) -> tuple[str, Any, Any]:
    # tyro would show None as a choice and a default.
    more = {"constructor": kind.type, "help_behavior_hint": ""} if default is None or kind.more else {}
    argument = tyro.conf.arg(help=text, **more, **(kind.more or {}))
    return name, Annotated[Any if more else kind.type, argument], dataclasses.field(default=default)


_Options: Any = dataclasses.make_dataclass("_Options", [_field(*row) for row in OPTIONS], frozen=True)


@tyro.conf.configure(tyro.conf.OmitArgPrefixes)
class Config(_Options):
    """Train a network on images with K-FAC or a first-order optimizer.

    Without arguments: a small residual network on scikit-learn's handwritten digits, ten K-FAC steps an epoch.
    Where no default is shown, it depends on the data, the optimizer and --config; --print-config shows them all.
    """


def option(field: str) -> str:
    return "--" + field.replace("_", "-")


def refuse(*cases: tuple[Any, str]) -> None:
    """Ends with the sentence of the first case that holds."""
    for holds, sentence in cases:
        if holds:
            raise UserError(sentence)


def parse(args: list[str]) -> Config:
    """The configuration that `args` ask for, checked, with every default resolved that does not need the data."""
    given = _command_line(args, Config())
    refuse(("--plan" in args and not given.plan, "--plan needs numbers of devices, such as --plan 128 512"))
    if given.eval is not None:
        saved = load(given.eval)[0]
        return dataclasses.replace(_command_line(args, saved), workers=given.workers or cores(), output=given.eval)
    if given.resume != "must":
        return resolve(given)
    folder = given.output or _newest_run()
    saved = load(folder)[0]
    # The saved values are the defaults, so only what is on the command line can differ.
    config = dataclasses.replace(_command_line(args, saved), output=folder)
    if changed := [name for name in LENGTHS if getattr(config, name) != getattr(saved, name)]:
        others: dict[str, Any] = {name: None for name in LENGTHS if name not in changed}
        config = dataclasses.replace(config, **others)
    check(config)
    return config


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
    names = [*map(option, NAMES), "--batch-size", "--lr"]
    unknown = [word.split("=")[0] for word in args if word.startswith("--") and word.split("=")[0] not in names]
    near = difflib.get_close_matches(unknown[0], names, 1) if unknown and "Unrecognized" in message else []
    no_number = r"no type matching \S+ could be instantiated from \['(.*?)'\]\.?"
    message = re.sub(no_number, r"\1 is no whole number", message)
    raise UserError(message + (f"; {near[0]} is near" if near else "") + " (--help lists all options)")


def resolve(config: Config) -> Config:
    """Puts the defaults that depend on data and optimizer in place of None, and checks values."""
    recipe = CONFIGS.get(config.config, {})
    data = config.data or ("folder" if config.data_dir is not None else "digits")
    optimizer = config.optimizer or recipe.get("optimizer", DEFAULTS["optimizer"])
    lengths = [name for name in LENGTHS if getattr(config, name) is not None]
    schedule = config.schedule or recipe.get("schedule", DEFAULTS["schedule"])
    published = "trust_ratio" in recipe or (optimizer == "kfac" and config.trust_ratio not in (None, "auto"))
    small, side = data in ("digits", "cifar10"), DATA[data]["image_size"]
    changed = [name for name in KFAC_ONLY if getattr(config, name) != getattr(Config, name)]
    marks = [name for name in ("decay_power", "decay_begin", "decay_end") if getattr(config, name) is not None]
    refuse(
        (config.config and not recipe, f"--config {config.config} is unknown; there are {', '.join(CONFIGS)}"),
        (recipe and optimizer != recipe["optimizer"] and config.learning_rate is None,
         f"--config {config.config} has --learning-rate {recipe.get('learning_rate')} for {recipe.get('optimizer')}; "
         f"with --optimizer {optimizer} give one too"),
        *((optimizer != "kfac", f"{option(name)} has no effect with --optimizer {optimizer}; it is for kfac")
          for name in changed),
        *((not published and getattr(config, name) is not None,
           f"{option(name)} has no effect with --trust-ratio auto; give --trust-ratio 0 or a --config too")
          for name in PUBLISHED_ONLY),
        (len(lengths) > 1, f"{' and '.join(map(option, lengths))} both give the length of the training; give one"),
        *((schedule != "polynomial", f"{option(name)} has no effect with --schedule {schedule}; it is for polynomial")
          for name in marks),
        (config.data_dir is not None and data in ("digits", "synthetic"),
         f"--data {data} reads no folder; leave --data-dir {config.data_dir} out"),
        (data == "folder" and config.data_dir is None,
         "--data folder needs --data-dir, the folder that holds train/ and val/ or shards"),
        (small and config.image_size not in (None, side),
         f"--image-size {config.image_size} does not fit --data {data}, whose images are {side}x{side}; leave it out"),
    )  # fmt: skip
    # The networks of the configurations are for large images, and their share of a device for large networks.
    not_for_small = ("arch", "sync_batch_norm", "local_batch") if small else ()
    name = f"{data}-{config.config or optimizer}-{time.strftime('%Y%m%d-%H%M%S')}"
    defaults = DEFAULTS | OPTIMIZERS[optimizer] | (PUBLISHED if published else {}) | DATA[data]
    defaults |= {key: value for key, value in recipe.items() if key not in not_for_small}
    defaults |= {"data": data, "workers": cores(), "output": Path("runs") / name}
    if lengths:
        defaults.pop("epochs")
    if config.global_batch not in (None, recipe.get("global_batch")):
        defaults.pop("local_batch", None)  # it was for the configuration's own batch
    absent = {name for name in NAMES if getattr(config, name) is None}
    config = dataclasses.replace(config, **{name: defaults[name] for name in absent & defaults.keys()})
    check(config)
    return config


def check(config: Config) -> None:
    """Refuses values outside their range, with the option's name and the range, and what does not go together."""
    for name, kind, *_ in OPTIONS:
        value = getattr(config, name)
        if not isinstance(value, int | float):
            continue
        inside = (kind.low <= value if kind.low_too else kind.low < value) and value <= kind.high
        if not (inside and math.isfinite(value)):
            finite = "" if math.isfinite(value) else "finite and "
            wanted = f"{finite}{'at least' if kind.low_too else 'greater than'} {kind.low}"
            raise UserError(f"{option(name)} is {value} but must be {wanted}"
                            + (f" and at most {kind.high}" if kind.high < math.inf else ""))  # fmt: skip
    c = config
    traced = re.fullmatch(r"(\d+):(\d+)", c.profile or "1:1")
    process = {option(name): getattr(c, name) for name in ("coordinator", "num_processes", "process_id")}
    given, missing = ([name for name, x in process.items() if (x is None) == absent] for absent in (False, True))
    refuse(
        (c.decay_end is not None and c.decay_end <= (c.decay_begin or 0),
         f"--decay-end {c.decay_end} must be greater than --decay-begin {c.decay_begin}"),
        (c.damping_initial is not None and c.damping_initial < c.damping,
         f"--damping-initial {c.damping_initial} must not be less than --damping {c.damping}"),
        (c.rate_in_momentum and c.trust_ratio not in (0, "auto"),
         "--rate-in-momentum has no effect with --trust-ratio; give --no-rate-in-momentum or --trust-ratio 0"),
        (c.fisher == "sampled" and c.dtype == "float16",
         "--fisher sampled takes gradients of what it draws, which --dtype float16 does not scale as it does the loss; "
         "use bfloat16 or float32"),
        (c.plan and c.optimizer != "kfac", f"--plan with --optimizer {c.optimizer}: it is what K-FAC adds"),
        (min(c.plan, default=1) < 1, f"--plan {min(c.plan, default=1)} must be at least 1"),
        (not traced or not 1 <= int(traced[1]) <= int(traced[2]),
         f"--profile is {c.profile} but must be FIRST:LAST, two steps counted from 1, such as 20:25"),
        (c.coordinator is not None and not re.fullmatch(r".+:\d+", c.coordinator),
         f"--coordinator {c.coordinator} has no port; it must be HOST:PORT, such as {c.coordinator}:8476"),
        (given and missing, f"{' and '.join(given)} needs {' and '.join(missing)} too; --distributed alone takes all "
         "three from the environment"),
        (len(given) == 3 and c.process_id >= c.num_processes,
         f"--process-id {c.process_id} must be less than --num-processes {c.num_processes}"),
    )  # fmt: skip


def fit(config: Config, images: int, devices: int, platform: str) -> Config:
    """What depends on the number of images and devices: the batch, its share of a device, warm-up, type."""
    batch = config.global_batch
    if batch == "auto":
        batch = max(1, images // STEPS_AN_EPOCH // devices) * devices
    local = config.local_batch or max(1, batch // devices)
    refuse(
        (batch > images, f"--global-batch {batch} does not fit the {images} training images; auto takes a tenth"),
        (config.local_batch is None and batch % devices,
         f"--global-batch {batch} does not divide over {devices} devices"),
        (batch % (devices * local), f"--global-batch {batch} is not a multiple of {devices * local}, which is "
         f"--local-batch {local} on {devices} device(s)"),
    )  # fmt: skip
    config = dataclasses.replace(config, global_batch=batch)
    epochs = total_steps(config, images) * batch / images
    warmup = config.warmup_epochs
    if warmup is None and begun(config.output):
        warmup = load(config.output)[0].warmup_epochs  # a run that grows keeps its own
    elif warmup is None:
        warmup = round(epochs / 10, 4)
    begin, end = config.decay_begin, config.decay_end
    refuse(
        (config.warmup_epochs is not None and warmup >= epochs,
         f"--warmup-epochs {warmup} is all of the training of {epochs:.4g} epochs; give less"),
        (begin is not None and begin < warmup, f"--decay-begin {begin} must not be less than --warmup-epochs {warmup}"),
        (end is not None and end <= warmup, f"--decay-end {end} must be greater than --warmup-epochs {warmup}"),
    )  # fmt: skip
    half = "bfloat16" if config.config and platform in ("gpu", "tpu") else "float32"
    return dataclasses.replace(config, warmup_epochs=warmup, dtype=config.dtype or half)


def total_steps(config: Config, images: int) -> int:
    """The length of the training, given in steps, epochs or examples."""
    if config.steps is not None:
        return config.steps
    examples = config.examples if config.examples is not None else config.epochs * images
    # What was asked for in full, but for rounding.
    return max(1, math.ceil(examples / config.global_batch - 1e-6))


def cores() -> int:
    """How many this process may use: by its affinity and by the quota of its control group, as in a container."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        count = min(count, max(1, math.ceil(int(quota) / int(period))))
    return count


# The folder of a run.


def _newest_run() -> Path:
    runs = sorted(Path("runs").glob("*/config.json"), key=lambda path: path.stat().st_mtime)
    refuse((not runs, "--resume must finds no run under runs/; name its folder with --output"))
    return runs[-1].parent


def begun(folder: Path) -> bool:
    """Whether the run in `folder` has a checkpoint; else there is nothing that other options or images would spoil."""
    steps = (path.name for path in (folder / "checkpoints").glob("*/"))
    return (folder / "config.json").is_file() and any(name.isdecimal() for name in steps)


def load(folder: Path) -> tuple[Config, dict[str, Any]]:
    """The configuration of the run in `folder`, and what its data were."""
    path = folder / "config.json"
    refuse((not path.is_file(), f"{folder} holds no run: it has no config.json"))
    try:
        values = json.loads(path.read_text())
        found = values.pop("found")
        if missing := {"data", "optimizer"} - values.keys():
            raise KeyError(f"it has no {', '.join(sorted(missing))}")
        return Config(**{**values, **{name: getattr(Config, name) for name in NOT_REMEMBERED}}), found
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not a configuration of this script ({error}); remove {folder} to begin anew, or "
                        "put the config.json of a run with the same options there to go on") from error  # fmt: skip
