"""What K-FAC costs on 1 to 4,096 devices, before any is rented: memory, bytes, FLOPs, share of the step.

python examples/imagenet/plan.py                                       # ResNet-50, 32 images of 224x224 per device
python examples/imagenet/plan.py --devices 8 64 --factor-every 10 --inverse-every 100
python examples/imagenet/plan.py --devices 8 --table                   # who owns which layer

Nothing is computed or compiled. Memory and bytes are counted from the shapes of the layers, FLOPs from the lowered
programs. Times are predicted: the FLOPs and bytes over what a device is assumed to do in a second, nothing overlapping.
"""

import argparse
import math
import os
import sys
from typing import Any, NamedTuple, NoReturn

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import optax

import kfac
import models

# Of a symmetric n x n matrix, over n^3: Cholesky 1/3, its inverse by a triangular solve 1, the product of that with its
# own transpose 2.
INVERSION_FLOPS = 10 / 3
# FLOPs are counted for so many images and taken to be proportional to their number.
COUNTED_IMAGES = 2


class Counts(NamedTuple):
    """What does not depend on the number of devices; FLOPs are those of one image."""

    layers: kfac.Layers
    parameters: int
    step_flops: float
    statistics_flops: float


class Row(NamedTuple):
    """One device's share of a step, on average over steps: seconds are predicted."""

    first_order: float
    statistics: float
    inversions: float
    preconditioning: float
    communication: float

    @property
    def share(self) -> float:
        return 1 - self.first_order / sum(self)


def main(args: list[str]) -> None:
    options = parse(args)
    channels = 1 if options.arch == "digits" else 3
    counts = count(options.arch, options.image_size, channels, options.classes, options.dtype)
    plans = [
        kfac.Assignment(
            counts.layers,
            devices,
            options.inverse_every,
            distribution=kfac.Distribution(precondition=options.precondition),
        )
        for devices in options.devices
    ]
    if options.table:
        print(plans[0])
        return

    size = f"{options.image_size}x{options.image_size}"
    batch = options.local_batch * options.micro_batches
    print(f"""{options.arch}, images of {size}, {counts.parameters / 1e6:.2f} M parameters

Counted from lowered programs, for one image:
  forward and backward            {counts.step_flops:.4g} FLOPs
  statistics, where there are any {counts.statistics_flops:.4g} FLOPs
Counted from shapes, per device (memory: averages and inverses; reduced: each time there are statistics; inverted: the
busiest device, mean over steps):
""")
    per = "step" if options.precondition == "sharded" else "refresh"
    rows: list[tuple[str, ...]] = [
        ("devices", "global batch", "memory", "reduced", f"gathered/{per}", "inverted/step", "preconditioned/step")
    ]
    for plan in plans:
        rows.append((f"{plan.devices:,}", f"{plan.devices * batch:,}", size_of(plan.memory_per_device),
                     size_of(plan.reduced_bytes), size_of(plan.gathered_bytes),
                     f"{inversion_flops(plan):.3g} FLOPs", f"{preconditioning_flops(plan):.3g} FLOPs"))  # fmt: skip
    print_columns(rows)
    print(f"""
Predicted, in milliseconds of the mean step. ASSUMED of a device: {options.flops_per_second:.3g} FLOPs a second
({options.inverse_flops_per_second:.3g} in float32 inversions) and {options.bytes_per_second:.3g} bytes a second;
{batch} images per device and step, statistics every {options.factor_every} and inverses every {options.inverse_every}
step(s), no two things at once, every message an all-reduce:
""")
    rows = [("devices", "forward+backward+gradients", "statistics", "inversions", "preconditioning", "messages",
             "predicted K-FAC share")]  # fmt: skip
    for plan in plans:
        row = predict(plan, counts, options)
        rows.append((f"{plan.devices:,}", *(f"{1e3 * seconds:.2f}" for seconds in row), f"{row.share:.1%}"))
    print_columns(rows)


def parse(args: list[str]) -> argparse.Namespace:
    parser = Parser(prog="plan.py", description=__doc__, formatter_class=Formatter)
    add = parser.add_argument
    add(
        "--arch",
        choices=["digits", "resnet20", "resnet18", "resnet50", "resnet50d"],
        default="resnet50",
        help="network",
    )
    add("--image-size", type=positive, default=224, help="side of the images")
    add("--classes", type=positive, default=1000, help="number of classes")
    add("--dtype", choices=["float32", "bfloat16"], default="bfloat16", help="type of activations")
    add("--devices", type=positive, nargs="+", default=[4**k for k in range(7)], help="numbers of devices")
    add("--local-batch", type=positive, default=32, help="images per device and micro-batch")
    add("--micro-batches", type=positive, default=1, help="micro-batches accumulated in a step")
    add("--factor-every", type=positive, default=1, help="steps between statistics")
    add("--inverse-every", type=positive, default=1, help="steps over which the refresh of all inverses is spread")
    add("--precondition", choices=["sharded", "replicated"], default="sharded",
        help="who preconditions: each owner, or all")  # fmt: skip
    add("--flops-per-second", type=rate, default=2e14,
        help="assumed: what a device sustains in convolutions and matrix products; about a third of the bfloat16 peak "
             "of a large GPU of 2023")  # fmt: skip
    add("--inverse-flops-per-second", type=rate, default=1e13,
        help="assumed: the same for float32 Cholesky inverses")  # fmt: skip
    add("--bytes-per-second", type=rate, default=2.5e10,
        help="assumed: what a device sends and receives; a link of 200 Gbit/s")  # fmt: skip
    add("--table", action="store_true", help="print which device owns which layer, for one number of devices")
    options = parser.parse_args(args)
    if options.table and len(options.devices) != 1:
        parser.error("--table needs one number of --devices")
    return options


def count(arch: str, size: int, channels: int, classes: int, dtype: str) -> Counts:
    """Traces and lowers a training step's gradients, with and without statistics."""
    model = models.create(arch, classes, dtype)
    images = jax.ShapeDtypeStruct((COUNTED_IMAGES, size, size, channels), jnp.float32)
    labels = jax.ShapeDtypeStruct((COUNTED_IMAGES,), jnp.int32)

    def loss_fn(params: Any, batch_stats: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        variables = {"params": params, "batch_stats": batch_stats}
        logits, _ = model.apply(variables, images, train=True, mutable=["batch_stats"])
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))

    variables = jax.eval_shape(lambda x: model.init(jax.random.key(0), x, train=True), images)
    inputs = (variables["params"], variables["batch_stats"], images, labels)
    layers = kfac.find_layers(loss_fn, *inputs)

    def flops(fn: Any) -> float:
        analysis: Any = jax.jit(fn).lower(*inputs).cost_analysis()
        return float(analysis["flops"]) / COUNTED_IMAGES

    plain, full = flops(jax.value_and_grad(loss_fn)), flops(kfac.value_and_grad(loss_fn, layers))
    parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(variables["params"]))
    return Counts(layers, parameters, plain, full - plain)


def inversion_flops(plan: kfac.Assignment) -> float:
    """Of the busiest device, on average over the steps of a cycle."""
    return INVERSION_FLOPS * sum(plan.cost_per_step) / len(plan.cost_per_step)


def preconditioning_flops(plan: kfac.Assignment) -> float:
    """Of one device in one step: `G^-1 V A^-1` for each block that it holds, or for all blocks."""
    total = 0.0
    for group in plan.groups:
        if group.kronecker:
            replicated = plan.distribution is not None and plan.distribution.replicated
            held = group.size if replicated else plan.shards[group.name].positions
            total += held * 2 * group.d_out * group.d_in * (group.d_out + group.d_in)
    return total


def predict(plan: kfac.Assignment, counts: Counts, options: argparse.Namespace) -> Row:
    """Seconds of one device."""
    images = options.local_batch * options.micro_batches
    # A ring sends and receives (D-1)/D of the bytes, twice for an all-reduce, once for a reduce-scatter or all-gather.
    ring = 2 * (plan.devices - 1) / plan.devices / options.bytes_per_second
    gathered = plan.gathered_bytes / (1 if options.precondition == "sharded" else options.inverse_every)
    return Row(
        images * counts.step_flops / options.flops_per_second + 4 * counts.parameters * ring,
        images * counts.statistics_flops / options.flops_per_second / options.factor_every,
        inversion_flops(plan) / options.inverse_flops_per_second,
        preconditioning_flops(plan) / options.flops_per_second,
        (plan.reduced_bytes / options.factor_every + gathered) * ring,
    )


class Formatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """The description as it is, and the default behind each option."""


class Parser(argparse.ArgumentParser):
    """One whose errors are one sentence."""

    def error(self, message: str) -> NoReturn:
        sys.exit(f"error: {message} (--help lists all options)")


def positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not an integer of at least 1")
    return value


def rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not (0 < value < math.inf):
        raise argparse.ArgumentTypeError(f"{text} is not a number greater than 0")
    return value


def size_of(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"


def print_columns(rows: list[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


if __name__ == "__main__":
    main(sys.argv[1:])
