"""Define, parse and check the options for train.py.

The tables below list all options. Some defaults depend on data, optimizer and --config (see recipe.py). Such an option
is None after parsing, and `resolve` sets it. The run's `config.json` records the final values.
"""

import argparse
import dataclasses
import difflib
import json
import math
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from files import UserError
from models import NETWORKS
from recipe import CONFIGS, DATA, DEFAULTS, OPTIMIZERS, PUBLISHED

# Option types: a function that parses the text, or keyword arguments for argparse.


def number(kind: Any, low: float, high: float = math.inf, *others: str, above: bool = False) -> Callable[[str], Any]:
    """Return a parser for numbers from `low` to `high` and the words `others`. With `above`, `low` is refused."""

    def parse(text: str) -> Any:
        if text in others:
            return text
        try:
            value = kind(text)
        except ValueError:
            wanted = " or ".join([f"{'whole ' if kind is int else ''}number", *others])
            raise argparse.ArgumentTypeError(f"{text} is not a {wanted}") from None
        if low <= value <= high and math.isfinite(value) and not (above and value == low):
            return value
        limits = f"{'greater than' if above else 'at least'} {low}"
        limits += f" and at most {high}" if high < math.inf else " and finite"
        raise argparse.ArgumentTypeError(f"it is {text} but must be {limits}")

    return parse


def one_of(*names: str) -> dict[str, Any]:
    return {"choices": names}


positive, not_negative, decay = number(float, 0, above=True), number(float, 0), number(float, 0, 0.99999)
whole, count = number(int, 0, 2**31 - 1), number(int, 1)


def trust_ratio(text: str) -> Any:
    """Parse a number that is not negative. Refuse `auto`, which version 0.3 accepted."""
    if text == "auto":
        raise argparse.ArgumentTypeError("auto is now --step-norm spectral, the default")
    return not_negative(text)


yes_no, flag = {"action": argparse.BooleanOptionalAction}, {"action": "store_true"}
# The columns are name, type, default (None if it depends on data or optimizer) and help.
# fmt: off
Table = list[tuple[str, Any, Any, str]]
# Options that define a run. They must stay the same when the run is resumed.
RUN: Table = [
    ("config", str, None, "A named configuration in recipe.py, such as bs128k. Other options override it."),
    # The network.
    ("arch", one_of(*NETWORKS), None, "Network. digits, resnet8 and resnet20 fit small images, others ImageNet."),
    ("width", count, None, "Channels in the first stage. Default: 32 for digits, 16 for resnet8 and 20, else 64."),
    ("dtype", one_of("float32", "bfloat16", "float64"), None, "Type of the activations. Default: float32, or "
     "bfloat16 for a --config on a GPU or TPU. Parameters are in float32, or in float64 if the activations are."),
    ("init", one_of("identity", "he"), None, "Initial weights. identity: each block starts as the identity. he: "
     "He-normal kernels by fan-in, and batch-norm scales from N(1, 0.05)."),
    ("norm_epsilon", positive, None, "Constant that batch norm adds to the variance."),
    ("sync_batch_norm", yes_no, None, "Compute batch norm over all devices (default for digits) or per device."),
    # The images.
    ("data", one_of("digits", "folder", "synthetic"), None, "digits: included in scikit-learn. folder: images in "
     "--data-dir (README.md lists the layouts). synthetic: noise, for measurements."),
    ("image_size", count, None, "Side length in pixels of the network's input. Default: 224 for folder and synthetic."),
    ("crop", one_of("random-resized", "squashed"), None, "Training crop. random-resized: 8 to 100 percent of the "
     "area. squashed: a random square, after the image is resized to a square."),
    ("synthetic_images", count, 640, "Number of training images for --data synthetic."),
    ("mixup_alpha", not_negative, None, "Running mixup with the last mixed images, by Beta(alpha, alpha). 0: none."),
    ("erasing", one_of("none", "own", "in-place"), None, "Erase a random rectangle in half of the images. own: for "
     "this step only. in-place: for the next step's mixup too."),
    ("divide_by_std", yes_no, None, "Divide pixels by their standard deviation after subtracting their mean."),
    ("label_smoothing", number(float, 0, 0.99), None, "Fraction of the target that is spread over all classes."),
    ("global_batch", number(int, 1, math.inf, "auto"), None, "Images per step. auto: a tenth of the training images."),
    # The optimizer.
    ("optimizer", one_of("kfac", "muon", "sgd", "lars", "adamw"), None, "kfac: `kfac.kfac`, or "
     "`kfac.natural_gradient` with --step-norm none or a --config. The others are from optax."),
    ("learning_rate", positive, None, "Peak learning rate."),
    ("warmup_epochs", not_negative, None, "Epochs with a rising rate. Default: a tenth of the training."),
    ("schedule", one_of("cosine", "linear", "polynomial", "constant"), None, "Decay after the warm-up. cosine and "
     "linear reach zero at the last step. polynomial uses the next three options."),
    ("decay_power", positive, None, "Power of the polynomial decay. Default: 2."),
    ("decay_begin", not_negative, None, "Epoch at which the polynomial decay begins. Default: the end of the warm-up."),
    ("decay_end", positive, None, "Epoch at which the polynomial decay reaches zero. It may be after the training. "
     "Default: the last epoch."),
    ("momentum", decay, None, "Momentum. For adamw, the decay of the first moment."),
    ("nesterov", yes_no, None, "Use Nesterov momentum."),
    ("weight_decay", not_negative, None, "Weight decay for kernels. Biases and normalisation parameters have none."),
    ("rescale", yes_no, None, "After each step, scale kernels down to norm sqrt(2 d_out) if they are larger."),
    ("damping", positive, None, "[kfac] Constant added to the curvature before inversion. Default: as in `kfac.kfac`."),
    ("unitwise_damping_scale", positive, None, "[kfac] Factor on the damping for normalisation layers."),
    ("factor_ema_decay", decay, None, "[kfac] Decay of the statistics' running average. 0: only the current batch."),
    ("kl_clip", not_negative, None, "[kfac] Bound on the squared step length in the curvature's metric. 0: no bound."),
    ("step_norm", one_of("spectral", "none"), None, "[kfac] Step length. spectral: fixed for each parameter, the "
     "default of `kfac.kfac`. none: set by the curvature, with `kfac.natural_gradient`."),
    ("trust_ratio", trust_ratio, None, "[kfac] With --step-norm none, scale each kernel's step to this fraction of the "
     "kernel's norm. 0: no scaling."),
    ("momentum_coupling", one_of("none", "ratio", "proportional"), None, "[kfac] Factor by which momentum falls "
     "with the rate. ratio: rate over last rate (code of Osawa et al.). proportional: rate over peak rate (paper)."),
    ("lr_in_momentum", yes_no, None, "[kfac] Apply the rate before the momentum (v <- m v - lr p), not after it."),
    ("statistics_period", number(int, 1, math.inf, "auto"), None,
     "[kfac] Steps between statistics. auto: see `kfac.statistics_due`."),
    ("statistics_fraction", number(float, 0, 1, above=True), 1.0,
     "[kfac] Share of the images that gives statistics, 1 over a whole number."),
    ("preconditioner", one_of("soap", "cholesky", "eigh"), None, "[kfac] Method that inverts the factors."),
    ("inverse_update_period", count, None, "[kfac] Steps between inverses, reached by doubling. See `kfac.kfac`."),
    ("ema", decay, 0.0, "Decay of the weights' running average, which validation then uses. 0: no average."),
    ("eval_every", count, None, "Steps between validations. Default: an epoch."),
    ("seed", whole, 0, "Seed for the initial weights, the order of the images and their augmentation."),
]
# Options of version 0.3 whose present names are not similar.
FORMER = {"--subsample": "--statistics-fraction", "--factor-every": "--statistics-period"}
# Options that may change when a run is resumed. If the data folder moves, a fingerprint checks the data.
MAY_CHANGE: Table = [
    ("epochs", positive, None, "Length of the training. Give this or --steps. A larger value extends a run."),
    ("steps", count, None, "Length of the training in optimizer steps."),
    ("data_dir", str, None, "Folder with the images."),
    ("workers", count, None, "Decoding threads per process. Default: the number of cores."),
    ("max_broken", number(float, 0, 1), 0.001, "Fraction of the images that may be broken. Ten are always allowed."),
    ("local_batch", count, None, "Images that a device processes at a time (a micro-batch)."),
    ("target_accuracy", number(float, 0, 1, above=True), None, "Stop at this validation accuracy, from 0 to 1."),
    ("log_every", count, 10, "Steps between lines on the terminal."),
    ("checkpoint_minutes", positive, 15.0, "Minutes between checkpoints. A run also saves at its end and at a signal."),
    ("checkpoint_every", count, None, "Steps between checkpoints, in addition to --checkpoint-minutes."),
    ("keep_checkpoints", count, 2, "Number of last checkpoints to keep, in addition to the checkpoint with the best "
     "validation accuracy."),
]
# Options that are not saved.
FOR_NOW: Table = [
    ("devices", count, None, "Number of devices. Default: all."),
    ("distributed", flag, False, "Join other processes, as the environment describes (SLURM, Open MPI, TPUs)."),
    ("processes", {"nargs": 3, "metavar": ("HOST:PORT", "N", "I")}, None, "Join as process I of N. "
     "Process 0 listens at HOST:PORT."),
    ("output", Path, None, "Folder of the run. A run in this folder is resumed. Default: a new folder under runs/."),
    ("stop_after", count, None, "Stop with a checkpoint after this step. The same command resumes the run."),
    ("eval", Path, None, "Only validate the best checkpoint of this run. The run's options are the defaults."),
    ("plan", {"type": count, "nargs": "+"}, (), "Only predict the cost of a step on these numbers of devices."),
    ("input_speed", count, None, "Only measure how fast this many images are read and decoded."),
    ("print_config", flag, False, "Only print the configuration as JSON. Values that depend on data or devices are "
     "missing."),
]
# fmt: on
OPTIONS = [*RUN, *MAY_CHANGE, *FOR_NOW]
ALIASES = {"global_batch": "--batch-size", "learning_rate": "--lr"}
KFAC_ONLY = [name for name, *_, text in OPTIONS if text.startswith("[kfac]")]
PUBLISHED_ONLY = ("unitwise_damping_scale", "factor_ema_decay", "kl_clip", "trust_ratio", "lr_in_momentum")

Config: Any = dataclasses.make_dataclass(
    "Config", [(name, Any, dataclasses.field(default=default)) for name, _, default, _ in OPTIONS], frozen=True
)


def option(field: str) -> str:
    return "--" + field.replace("_", "-")


def refuse(*cases: tuple[Any, str]) -> None:
    """Raise `UserError` with the sentence of the first case that holds."""
    for holds, sentence in cases:
        if holds:
            raise UserError(sentence)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Report the error in one sentence, with the nearest option, instead of the usage."""
        names = [*(option(name) for name, *_ in OPTIONS), *ALIASES.values()]
        unknown = message.partition("unrecognized arguments: ")[2].split(" ")[0].split("=")[0]
        similar = [FORMER[unknown]] if unknown in FORMER else difflib.get_close_matches(unknown, names, 1)
        near = [f"; did you mean {name}?" for name in similar]
        raise UserError(f"{message.removeprefix('argument ')}{''.join(near)} (--help lists all options)")


def _command_line(args: list[str], default: Any) -> Any:
    about = (
        "Train a network on images with K-FAC or a first-order optimizer. The images are handwritten digits by default."
    )
    end = "Other defaults depend on data, optimizer and --config. --print-config shows them."
    parser = _Parser("train.py", description=about, epilog=end, allow_abbrev=False)
    for name, kind, usual, text in OPTIONS:
        names = [option(name), *([ALIASES[name]] if name in ALIASES else [])]
        text += f" ({usual})" if usual not in (None, False, ()) else ""
        more = kind if isinstance(kind, dict) else {"type": kind, "metavar": name.upper()}
        parser.add_argument(*names, dest=name, default=getattr(default, name), help=text, **more)
    return Config(**vars(parser.parse_args(args)))


def parse(args: list[str]) -> Any:
    """Return the checked configuration for `args`, with all defaults that do not depend on the data itself."""
    given = _command_line(args, Config())
    if given.eval is None:
        return resolve(given)
    saved, _ = load(given.eval)
    return dataclasses.replace(_command_line(args, saved), output=given.eval)


def resolve(config: Any) -> Any:
    """Replace None by the defaults for this kind of data and optimizer, and check the values."""
    recipe = CONFIGS.get(config.config, {})
    data = config.data or ("folder" if config.data_dir is not None else "digits")
    optimizer = config.optimizer or "kfac"
    schedule = config.schedule or recipe.get("schedule", DEFAULTS["schedule"])
    published = "step_norm" in recipe or (optimizer == "kfac" and config.step_norm == "none")
    marks = [name for name in ("decay_power", "decay_begin", "decay_end") if getattr(config, name) is not None]
    refuse(
        (config.config and not recipe, f"--config {config.config} is unknown; choose from {', '.join(CONFIGS)}"),
        (recipe and optimizer != "kfac" and config.learning_rate is None,
         f"--config {config.config} has --learning-rate {recipe.get('learning_rate')} for kfac; with --optimizer "
         f"{optimizer} give a rate too"),
        *((optimizer != "kfac", f"{option(name)} has no effect with --optimizer {optimizer}; it is for kfac")
          for name in KFAC_ONLY if getattr(config, name) != getattr(Config, name)),
        *((not published and getattr(config, name) is not None,
           f"{option(name)} has no effect with --step-norm spectral; give --step-norm none or a --config too")
          for name in PUBLISHED_ONLY),
        (config.epochs is not None and config.steps is not None,
         "--epochs and --steps both give the length of the training; give only one"),
        *((schedule != "polynomial", f"{option(name)} has no effect with --schedule {schedule}; it is for polynomial")
          for name in marks),
        (config.data_dir is not None and data != "folder",
         f"--data {data} reads no folder; leave --data-dir {config.data_dir} out"),
        (data == "folder" and config.data_dir is None,
         "--data folder needs --data-dir, the folder that holds train/ and val/ or shards"),
        (data == "digits" and config.image_size not in (None, 8),
         f"--image-size {config.image_size} does not fit --data digits, whose images are 8x8; leave it out"),
    )  # fmt: skip
    # The configurations have networks for large images, and micro-batches for large networks.
    not_for_digits = ("arch", "sync_batch_norm", "local_batch") if data == "digits" else ()
    name = f"{data}-{config.config or optimizer}-{time.strftime('%Y%m%d-%H%M%S')}"
    defaults = DEFAULTS | OPTIMIZERS[optimizer] | (PUBLISHED if published else {}) | DATA[data]
    defaults |= {key: value for key, value in recipe.items() if key not in not_for_digits}
    defaults |= {"data": data, "workers": os.cpu_count() or 1, "output": Path("runs") / name}
    if config.steps is not None:
        defaults.pop("epochs")
    if config.global_batch not in (None, recipe.get("global_batch")):
        defaults.pop("local_batch", None)  # it belongs to the configuration's own batch
    absent = {name for name, *_ in OPTIONS if getattr(config, name) is None}
    c = dataclasses.replace(config, **{name: defaults[name] for name in absent & defaults.keys()})
    where, n, i = c.processes or ("a:1", "1", "0")
    refuse(
        (c.decay_end is not None and c.decay_end <= (c.decay_begin or 0),
         f"--decay-end {c.decay_end} must be greater than --decay-begin {c.decay_begin}"),
        (c.lr_in_momentum and c.trust_ratio,
         "--lr-in-momentum has no effect with --trust-ratio; give --no-lr-in-momentum or --trust-ratio 0"),
        (c.plan and c.optimizer != "kfac", f"--plan has no effect with --optimizer {c.optimizer}; it is for kfac"),
        (not (re.fullmatch(r".+:\d+", where) and n.isdecimal() and i.isdecimal() and int(i) < int(n)),
         f"--processes {where} {n} {i} must be HOST:PORT, the number of processes, and this process's index from 0"),
    )  # fmt: skip
    return c


def fit(config: Any, images: int, devices: int, platform: str) -> Any:
    """Set and check the values that depend on the number of images and devices: batch, warm-up and type."""
    batch = config.global_batch
    if batch == "auto":
        batch = max(1, images // 10 // devices) * devices  # ten steps per epoch, as with batch 131,072 on ImageNet
    local = config.local_batch or max(1, batch // devices)
    refuse(
        (batch > images, f"--global-batch {batch} exceeds the {images} training images; auto takes a tenth"),
        (config.local_batch is None and batch % devices,
         f"--global-batch {batch} is not a multiple of the {devices} devices"),
        (batch % (devices * local), f"--global-batch {batch} is not a multiple of {devices * local}, which is "
         f"--local-batch {local} on {devices} device(s)"),
    )  # fmt: skip
    config = dataclasses.replace(config, global_batch=batch)
    epochs, warmup = total_steps(config, images) * batch / images, config.warmup_epochs
    if warmup is None:  # an extended run keeps its warm-up
        warmup = load(config.output)[0].warmup_epochs if begun(config.output) else round(epochs / 10, 4)
    begin, end = config.decay_begin, config.decay_end
    refuse(
        (config.warmup_epochs is not None and warmup >= epochs,
         f"--warmup-epochs {warmup} is all of the training of {epochs:.4g} epochs; give less"),
        (begin is not None and begin < warmup, f"--decay-begin {begin} must not be less than --warmup-epochs {warmup}"),
        (end is not None and end <= warmup, f"--decay-end {end} must be greater than --warmup-epochs {warmup}"),
    )  # fmt: skip
    half = "bfloat16" if config.config and platform in ("gpu", "tpu") else "float32"
    return dataclasses.replace(config, warmup_epochs=warmup, dtype=config.dtype or half)


def total_steps(config: Any, images: int) -> int:
    """Return the number of steps. Round a fraction of a step up, except for rounding errors."""
    return config.steps or max(1, math.ceil(config.epochs * images / config.global_batch - 1e-6))


# The folder of a run.


def begun(folder: Path) -> bool:
    """Return whether the run in `folder` has a checkpoint. If not, it may start again with other options or images."""
    steps = (path.name for path in (folder / "checkpoints").glob("*/"))
    return (folder / "config.json").is_file() and any(name.isdecimal() for name in steps)


def load(folder: Path) -> tuple[Any, dict[str, Any]]:
    """Return the configuration of the run in `folder`, and the description of its data."""
    path = folder / "config.json"
    refuse((not path.is_file(), f"{folder} holds no run: it has no config.json"))
    try:
        values = json.loads(path.read_text())
        found = values.pop("found")
        if missing := {"data", "optimizer"} - values.keys():
            raise KeyError(f"it has no {', '.join(sorted(missing))}")
        if values["optimizer"] == "kfac" and "step_norm" not in values:  # written by version 0.3
            auto = values.get("trust_ratio") == "auto"
            values |= {"step_norm": "spectral", "trust_ratio": None} if auto else {"step_norm": "none"}
        return Config(**values, **{name: default for name, _, default, _ in FOR_NOW}), found
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not a configuration of this script ({error}); remove {folder} to start again, "
                        "or copy a config.json with the same options there to resume") from error  # fmt: skip


def save(config: Any, found: dict[str, Any], folder: Path) -> None:
    """Replace `config.json` by the saved options and the description of the data."""
    values = {name: getattr(config, name) for name, *_ in [*RUN, *MAY_CHANGE]}
    if config.data_dir is not None:
        values["data_dir"] = os.path.abspath(config.data_dir)
    partial = folder / ".config.json"
    partial.write_text(json.dumps({**values, "found": found}, indent=2) + "\n")
    partial.replace(folder / "config.json")


def same_run(config: Any, saved: Any) -> None:
    """Refuse options that would change the run with the configuration `saved`."""
    for name, *_ in RUN:
        old, new = getattr(saved, name), getattr(config, name)
        refuse((old != new, f"{option(name)} {new} conflicts with the run in {config.output}, which has {old}; "
                "give the same options to resume it, or another --output to start a new run"))  # fmt: skip
