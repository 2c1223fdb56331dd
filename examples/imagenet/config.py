"""The options of train.py: tables, whose defaults depend on data, optimizer and --config (recipe.py); and checks.

An option that is None after parsing gets the value that `resolve` finds; what a run really used is its `config.json`.
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

# What an option takes: a function of the text behind it, or what argparse has for it.


def number(kind: Any, low: float, high: float = math.inf, *others: str, above: bool = False) -> Callable[[str], Any]:
    """A number from `low` (with `above` it must be greater) to `high`, or one of `others`."""

    def parse(text: str) -> Any:
        if text in others:
            return text
        try:
            value = kind(text)
        except ValueError:
            wanted = " or ".join([f"{'whole ' if kind is int else ''}number", *others])
            raise argparse.ArgumentTypeError(f"{text} is no {wanted}") from None
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
    """A number, not negative. Up to version 0.3 there was `auto`, too."""
    if text == "auto":
        raise argparse.ArgumentTypeError("auto is now --step-norm spectral, the default")
    return not_negative(text)


yes_no, flag = {"action": argparse.BooleanOptionalAction}, {"action": "store_true"}
# Name, what it takes, default (None: not known before data and optimizer are) and help.
# fmt: off
Table = list[tuple[str, Any, Any, str]]
# What makes a run: it must be the same when the run goes on.
RUN: Table = [
    ("config", str, None, "A named configuration of recipe.py, such as bs128k; options given beside it come first."),
    # The network.
    ("arch", one_of(*NETWORKS), None, "Network: digits, resnet8 and resnet20 for small images, else for ImageNet."),
    ("width", count, None, "Channels of the first stage: 32 for digits, 16 for resnet8 and resnet20, else 64."),
    ("dtype", one_of("float32", "bfloat16", "float64"), None, "Of activations: float32, or for a --config on a GPU "
     "bfloat16, with parameters in float32; float64 is for both."),
    ("init", one_of("identity", "he"), None, "Initial weights: blocks as the identity; or all kernels He-normal by "
     "fan-in and batch-norm scales N(1, 0.05)."),
    ("norm_epsilon", positive, None, "Added to the variance in batch norm."),
    ("sync_batch_norm", yes_no, None, "Batch norm over all devices, as for digits, or of each device's own images."),
    # The images.
    ("data", one_of("digits", "folder", "synthetic"), None, "digits come with scikit-learn; folder: images in "
     "--data-dir (README.md has the layouts); synthetic: noise, for measurements."),
    ("image_size", count, None, "Side of the images that the network sees: 224 for folder and synthetic."),
    ("crop", one_of("random-resized", "squashed"), None, "What training cuts out: 8 to 100 percent of the area; or a "
     "random square out of the image resized to a square."),
    ("synthetic_images", count, 640, "How many training images synthetic pretends to have."),
    ("mixup_alpha", not_negative, None, "Running mixup with the last step's mixed images, by Beta(alpha, alpha)."),
    ("erasing", one_of("none", "own", "in-place"), None, "A random rectangle of half of the images is erased; "
     "in-place: it is missing from the next step's mixup too."),
    ("divide_by_std", yes_no, None, "Divide pixels by their standard deviation after subtracting their mean."),
    ("label_smoothing", number(float, 0, 0.99), None, "Share of the target that is spread over all classes."),
    ("global_batch", number(int, 1, math.inf, "auto"), None, "Images in a step; auto: a tenth of those for training."),
    # The optimizer.
    ("optimizer", one_of("kfac", "muon", "sgd", "lars", "adamw"), None, "kfac: `kfac.kfac` as it is, or with "
     "--step-norm none and in a --config `kfac.presets.osawa2019`. The others are optax's."),
    ("learning_rate", positive, None, "Peak learning rate."),
    ("warmup_epochs", not_negative, None, "Epochs over which the rate rises: a tenth of the training."),
    ("schedule", one_of("cosine", "linear", "polynomial", "constant"), None, "How the rate falls after the warm-up: to "
     "zero at the last step; polynomial: by the next three options."),
    ("decay_power", positive, None, "Power of the polynomial schedule: 2."),
    ("decay_begin", not_negative, None, "Epoch at which it begins to fall: the end of the warm-up."),
    ("decay_end", positive, None, "Epoch at which it would be zero, possibly after the training: the end of it."),
    ("momentum", decay, None, "Momentum; for adamw the decay of the first moment."),
    ("nesterov", yes_no, None, "Nesterov's form of momentum."),
    ("weight_decay", not_negative, None, "Weight decay of kernels; biases and normalisation parameters have none."),
    ("rescale", yes_no, None, "After each step scale kernels down to norm sqrt(2 d_out) where they are larger."),
    ("damping", positive, None, "[kfac] Added to the curvature before it is inverted: as `kfac.kfac` has it."),
    ("unitwise_damping_scale", positive, None, "[kfac] Factor on the damping of normalisation layers."),
    ("factor_ema_decay", decay, None, "[kfac] Decay of the average of the statistics; 0 uses the current batch alone."),
    ("kl_clip", not_negative, None, "[kfac] Bound on the squared length of a step in the curvature's metric; 0: none."),
    ("step_norm", one_of("spectral", "none"), None, "[kfac] spectral, the default of `kfac.kfac`, fixes the length of "
     "each parameter's step; none: the curvature sets it, by `kfac.presets.osawa2019`."),
    ("trust_ratio", trust_ratio, None, "[kfac] With --step-norm none, scale each kernel's step to this share of the "
     "kernel's norm; 0: leave it as it is."),
    ("momentum_coupling", one_of("none", "ratio", "proportional"), None, "[kfac] Momentum that falls with the rate: "
     "times rate over last rate, as in the code of Osawa et al.; or rate over peak rate, as in their paper."),
    ("lr_in_momentum", yes_no, None, "[kfac] Apply the rate before the momentum, v <- m v - lr p, not after it."),
    ("factor_every", number(int, 1, math.inf, "auto"), None,
     "[kfac] Steps between statistics; auto: by `kfac.statistics_due`."),
    ("subsample", count, 1, "[kfac] Take statistics of every so many-th image only."),
    ("preconditioner", one_of("soap", "cholesky", "eigh"), None, "[kfac] How factors are inverted."),
    ("inverse_update_period", count, None, "[kfac] Steps between inverses, reached by doublings: see `kfac.kfac`."),
    ("ema", decay, 0.0, "Decay of a running average of the weights, which is then what is validated; 0 for none."),
    ("eval_every", count, None, "Steps between validations: one epoch."),
    ("seed", whole, 0, "Of the initial weights, the order of the images and their augmentation."),
]
# What may differ when a run goes on. That data which have moved are the same, a fingerprint tells.
MAY_CHANGE: Table = [
    ("epochs", positive, None, "Length of the training; give this or --steps, and more to go on."),
    ("steps", count, None, "Length of the training in optimizer steps."),
    ("data_dir", str, None, "Folder with the images."),
    ("workers", count, None, "Threads that decode, in each process: all cores."),
    ("max_broken", number(float, 0, 1), 0.001, "Share of the images that may be broken; ten in any case."),
    ("local_batch", count, None, "Images that a device works on at a time: a micro-batch of its share."),
    ("target_accuracy", number(float, 0, 1, above=True), None, "Stop at this validation accuracy, from 0 to 1."),
    ("log_every", count, 10, "Steps between lines on the terminal."),
    ("checkpoint_minutes", positive, 15.0, "Minutes between checkpoints; one at the end and at a signal in any case."),
    ("checkpoint_every", count, None, "Steps between checkpoints, beside that."),
    ("keep_checkpoints", count, 2, "How many are kept, besides the one with the best validation accuracy."),
]
# What is not remembered.
FOR_NOW: Table = [
    ("devices", count, None, "Number of devices: all."),
    ("distributed", flag, False, "Be one of several processes, by what the environment says (SLURM, Open MPI, TPUs)."),
    ("processes", {"nargs": 3, "metavar": ("HOST:PORT", "N", "I")}, None, "Be process I of N; 0 is at HOST:PORT."),
    ("output", Path, None, "Folder of the run: a new one under runs/. One that is in it goes on."),
    ("stop_after", count, None, "Stop in good order after this step; the same command goes on."),
    ("eval", Path, None, "Only validate the best checkpoint of this run, with its options as defaults."),
    ("plan", {"type": count, "nargs": "+"}, (), "Only predict what a step would take on so many devices."),
    ("input_speed", count, None, "Only measure how fast so many images are read and decoded."),
    ("print_config", flag, False, "Only print the configuration as JSON; what data and devices decide is not in it."),
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
    """Ends with the sentence of the first case that holds."""
    for holds, sentence in cases:
        if holds:
            raise UserError(sentence)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One sentence, and the option that was meant, in the place of the usage."""
        names = [*(option(name) for name, *_ in OPTIONS), *ALIASES.values()]
        unknown = message.partition("unrecognized arguments: ")[2].split(" ")[0].split("=")[0]
        near = [f"; {name} is near" for name in difflib.get_close_matches(unknown, names, 1)]
        raise UserError(f"{message.removeprefix('argument ')}{''.join(near)} (--help lists all options)")


def _command_line(args: list[str], default: Any) -> Any:
    about = (
        "Trains a network on images, without arguments on handwritten digits, with K-FAC or a first-order optimizer."
    )
    end = "Defaults that are not named depend on data, optimizer and --config; --print-config shows them all."
    parser = _Parser("train.py", description=about, epilog=end, allow_abbrev=False)
    for name, kind, usual, text in OPTIONS:
        names = [option(name), *([ALIASES[name]] if name in ALIASES else [])]
        text += f" ({usual})" if usual not in (None, False, ()) else ""
        more = kind if isinstance(kind, dict) else {"type": kind, "metavar": name.upper()}
        parser.add_argument(*names, dest=name, default=getattr(default, name), help=text, **more)
    return Config(**vars(parser.parse_args(args)))


def parse(args: list[str]) -> Any:
    """The configuration that `args` ask for, checked, with every default resolved that does not need the data."""
    given = _command_line(args, Config())
    if given.eval is None:
        return resolve(given)
    saved, _ = load(given.eval)
    return dataclasses.replace(_command_line(args, saved), output=given.eval)


def resolve(config: Any) -> Any:
    """Puts the defaults that depend on data and optimizer in place of None, and checks values."""
    recipe = CONFIGS.get(config.config, {})
    data = config.data or ("folder" if config.data_dir is not None else "digits")
    optimizer = config.optimizer or "kfac"
    schedule = config.schedule or recipe.get("schedule", DEFAULTS["schedule"])
    published = "step_norm" in recipe or (optimizer == "kfac" and config.step_norm == "none")
    marks = [name for name in ("decay_power", "decay_begin", "decay_end") if getattr(config, name) is not None]
    refuse(
        (config.config and not recipe, f"--config {config.config} is unknown; there are {', '.join(CONFIGS)}"),
        (recipe and optimizer != "kfac" and config.learning_rate is None,
         f"--config {config.config} has --learning-rate {recipe.get('learning_rate')} for kfac; with --optimizer "
         f"{optimizer} give one too"),
        *((optimizer != "kfac", f"{option(name)} has no effect with --optimizer {optimizer}; it is for kfac")
          for name in KFAC_ONLY if getattr(config, name) != getattr(Config, name)),
        *((not published and getattr(config, name) is not None,
           f"{option(name)} has no effect with --step-norm spectral; give --step-norm none or a --config too")
          for name in PUBLISHED_ONLY),
        (config.epochs is not None and config.steps is not None,
         "--epochs and --steps both give the length of the training; give one"),
        *((schedule != "polynomial", f"{option(name)} has no effect with --schedule {schedule}; it is for polynomial")
          for name in marks),
        (config.data_dir is not None and data != "folder",
         f"--data {data} reads no folder; leave --data-dir {config.data_dir} out"),
        (data == "folder" and config.data_dir is None,
         "--data folder needs --data-dir, the folder that holds train/ and val/ or shards"),
        (data == "digits" and config.image_size not in (None, 8),
         f"--image-size {config.image_size} does not fit --data digits, whose images are 8x8; leave it out"),
    )  # fmt: skip
    # The networks of the configurations are for large images, and their share of a device for large networks.
    not_for_digits = ("arch", "sync_batch_norm", "local_batch") if data == "digits" else ()
    name = f"{data}-{config.config or optimizer}-{time.strftime('%Y%m%d-%H%M%S')}"
    defaults = DEFAULTS | OPTIMIZERS[optimizer] | (PUBLISHED if published else {}) | DATA[data]
    defaults |= {key: value for key, value in recipe.items() if key not in not_for_digits}
    defaults |= {"data": data, "workers": os.cpu_count() or 1, "output": Path("runs") / name}
    if config.steps is not None:
        defaults.pop("epochs")
    if config.global_batch not in (None, recipe.get("global_batch")):
        defaults.pop("local_batch", None)  # it was for the configuration's own batch
    absent = {name for name, *_ in OPTIONS if getattr(config, name) is None}
    c = dataclasses.replace(config, **{name: defaults[name] for name in absent & defaults.keys()})
    where, n, i = c.processes or ("a:1", "1", "0")
    refuse(
        (c.decay_end is not None and c.decay_end <= (c.decay_begin or 0),
         f"--decay-end {c.decay_end} must be greater than --decay-begin {c.decay_begin}"),
        (c.lr_in_momentum and c.trust_ratio,
         "--lr-in-momentum has no effect with --trust-ratio; give --no-lr-in-momentum or --trust-ratio 0"),
        (c.plan and c.optimizer != "kfac", f"--plan with --optimizer {c.optimizer}: it is what K-FAC adds"),
        (not (re.fullmatch(r".+:\d+", where) and n.isdecimal() and i.isdecimal() and int(i) < int(n)),
         f"--processes {where} {n} {i} must be HOST:PORT, their number, and which of them this is, from 0"),
    )  # fmt: skip
    return c


def fit(config: Any, images: int, devices: int, platform: str) -> Any:
    """What depends on the number of images and devices: the batch, its share of a device, warm-up, type."""
    batch = config.global_batch
    if batch == "auto":
        batch = max(1, images // 10 // devices) * devices  # ten steps an epoch, as batch 131,072 makes of ImageNet
    local = config.local_batch or max(1, batch // devices)
    refuse(
        (batch > images, f"--global-batch {batch} does not fit the {images} training images; auto takes a tenth"),
        (config.local_batch is None and batch % devices,
         f"--global-batch {batch} does not divide over {devices} devices"),
        (batch % (devices * local), f"--global-batch {batch} is not a multiple of {devices * local}, which is "
         f"--local-batch {local} on {devices} device(s)"),
    )  # fmt: skip
    config = dataclasses.replace(config, global_batch=batch)
    epochs, warmup = total_steps(config, images) * batch / images, config.warmup_epochs
    if warmup is None:  # a run that grows keeps its own
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
    """The length of the training: of epochs, what was asked for in full, but for rounding."""
    return config.steps or max(1, math.ceil(config.epochs * images / config.global_batch - 1e-6))


# The folder of a run.


def begun(folder: Path) -> bool:
    """Whether the run in `folder` has a checkpoint; else there is nothing that other options or images would spoil."""
    steps = (path.name for path in (folder / "checkpoints").glob("*/"))
    return (folder / "config.json").is_file() and any(name.isdecimal() for name in steps)


def load(folder: Path) -> tuple[Any, dict[str, Any]]:
    """The configuration of the run in `folder`, and what its data were."""
    path = folder / "config.json"
    refuse((not path.is_file(), f"{folder} holds no run: it has no config.json"))
    try:
        values = json.loads(path.read_text())
        found = values.pop("found")
        if missing := {"data", "optimizer"} - values.keys():
            raise KeyError(f"it has no {', '.join(sorted(missing))}")
        if values["optimizer"] == "kfac" and "step_norm" not in values:  # of version 0.3
            auto = values.get("trust_ratio") == "auto"
            values |= {"step_norm": "spectral", "trust_ratio": None} if auto else {"step_norm": "none"}
        return Config(**values, **{name: default for name, _, default, _ in FOR_NOW}), found
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not a configuration of this script ({error}); remove {folder} to begin anew, or "
                        "put the config.json of a run with the same options there to go on") from error  # fmt: skip


def save(config: Any, found: dict[str, Any], folder: Path) -> None:
    """Writes `config.json`: the configuration but for what is not remembered, and what the data were, in one go."""
    values = {name: getattr(config, name) for name, *_ in [*RUN, *MAY_CHANGE]}
    if config.data_dir is not None:
        values["data_dir"] = os.path.abspath(config.data_dir)
    partial = folder / ".config.json"
    partial.write_text(json.dumps({**values, "found": found}, indent=2) + "\n")
    partial.replace(folder / "config.json")


def same_run(config: Any, saved: Any) -> None:
    """Refuses to go on with the run of `saved` under options that would make another one of it."""
    for name, *_ in RUN:
        old, new = getattr(saved, name), getattr(config, name)
        refuse((old != new, f"{option(name)} {new} conflicts with the run in {config.output}, which has {old}; "
                "give the same options to go on with it, or another --output to start a new one"))  # fmt: skip
