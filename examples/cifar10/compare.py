"""Compare K-FAC's defaults with tuned Muon, LARS and SGD on CIFAR-10, in steps and in seconds.

    sh examples/imagenet/get_cifar10.sh data/cifar10
    python examples/cifar10/compare.py run --data-dir data/cifar10 --method kfac --rate 0.1
    python examples/cifar10/compare.py run --data-dir data/cifar10 --method muon --rate 0.1
    python examples/cifar10/compare.py report

The network is a residual network with nine convolutions and batch norm. The data are 50,000 training images and 10,000
test images. The method "kfac" does the same as `kfac.train_step` with default options: when statistics are due, a
separate program takes them from a quarter of the examples. The learning rate rises for a tenth of the steps, and then
falls to zero. `--horizon` is the schedule's number of steps. A stopped run continues from its last save. `report`
prints all runs, and draws the runs with the given `--batch` and `--horizon`.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(EXAMPLES / folder) for folder in ("benchmarks", "imagenet", "large_batch")]

import environment  # noqa: F401, E402, I001  before JAX is imported
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import linen as nn  # noqa: E402

import cifar10  # noqa: E402
import curves  # noqa: E402
import kfac  # noqa: E402
import methods  # noqa: E402
import models  # noqa: E402
from batches import AUGMENT, ArraySplit, Batch, Plan, prefetch  # noqa: E402

HERE = Path(__file__).resolve().parent
MOMENTUM = 0.9  # for batch-norm averages, as in `models.ResNet`
SHARE = 4  # statistics use every fourth example
LEVELS = (0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9)
SETTINGS = {"momentum": 0.9, "weight_decay": 5e-4, "b2": 0.95}
VECTORS = {"muon": 0.3, "lars": 3.0, "sgd": 1.0}  # rate for biases and scales / rate for kernels


class Network(nn.Module):
    """ResNet-8 (He et al. 2015), but twice as wide, and with stride 2 in the first convolution."""

    width: int = 32
    stages: int = 3

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        conv = functools.partial(nn.Conv, use_bias=False, kernel_init=nn.initializers.he_normal())
        norm = functools.partial(nn.BatchNorm, use_running_average=not train, momentum=MOMENTUM)
        x = nn.relu(norm()(conv(self.width, (4, 4), 2)(x)))
        for stage in range(self.stages):
            width, stride = self.width * 2**stage, 2 if stage else 1
            y = nn.relu(norm()(conv(width, (3, 3), stride)(x)))
            y = norm(scale_init=nn.initializers.zeros)(conv(width, (3, 3))(y))
            x = nn.relu(y + (norm()(conv(width, (1, 1), stride)(x)) if stage else x))
        return nn.Dense(10)(x.mean((1, 2)))


def network(options: argparse.Namespace) -> Any:
    """Return the model. ResNet-18 is for a GPU: it uses bfloat16, and its first stage sees the full resolution."""
    if options.network == "resnet8":
        return Network(options.width, 1 if options.toy else 3)
    return models.ResNet((2, 2, 2, 2), num_classes=10, width=options.width, stem="small", dtype=jnp.bfloat16)


class Resident(ArraySplit):
    """Make the same batches as `ArraySplit` from images on the device. A GPU crops faster than NumPy."""

    def __init__(self, images: np.ndarray, labels: np.ndarray, **options: Any) -> None:
        super().__init__(images, labels, **options)
        self.device_images, self.device_labels = jax.device_put((self.images, self.labels))
        self.cut = jax.jit(self._cut)

    def _cut(self, images: Any, labels: Any, rows: Any, shifts: Any, mirrored: Any) -> tuple[Any, Any]:
        around = ((0, 0), (self.shift, self.shift), (self.shift, self.shift), (0, 0))

        def one(image: Any, y: Any, x: Any, mirror: Any) -> Any:
            part = jax.lax.dynamic_slice(image, (y, x, 0), images.shape[1:])
            return jnp.where(mirror, part[:, ::-1], part)

        return jax.vmap(one)(jnp.pad(images[rows], around), shifts[0], shifts[1], mirrored), labels[rows]

    def batches(self, plan: Plan) -> Any:
        for number in range(len(plan)):
            rows, key = plan.indices(number), plan.key(number)
            assert key is not None
            # Draw the same random numbers as `ArraySplit.load`, in the same order.
            rng = np.random.default_rng([key[0], AUGMENT, key[1]])
            shifts = rng.integers(0, 2 * self.shift + 1, (2, len(rows), 1, 1))[:, :, 0, 0]
            mirrored = (rng.random((len(rows), 1, 1)) < 0.5)[:, 0, 0] & self.flip
            images, labels = self.cut(self.device_images, self.device_labels, rows, tuple(shifts), mirrored)
            yield Batch(images, labels, None)


class Programs:
    """A run's programs, compiled before the clock starts."""

    def __init__(self, options: argparse.Namespace, shape: tuple[int, ...]) -> None:
        model, parts = network(options), options.parts
        mean, std = jnp.asarray(cifar10.MEAN), jnp.asarray(cifar10.STD)
        rate = methods.schedule(options.rate, options.horizon)

        def forward(params: Any, averages: Any, images: Any, train: bool) -> Any:
            variables = {"params": params, "batch_stats": averages}
            return model.apply(variables, (images / 255 - mean) / std, train, mutable=["batch_stats"])

        def loss_fn(params: Any, averages: Any, images: Any, labels: Any) -> tuple[jax.Array, Any]:
            logits, new = forward(params, averages, images, train=True)
            targets = optax.smooth_labels(jax.nn.one_hot(labels, 10), 0.1)
            return optax.softmax_cross_entropy(logits, targets).mean(), new["batch_stats"]

        variables = model.init(jax.random.key(options.seed), jnp.zeros((1, *shape)), train=False)
        params, averages = variables["params"], variables["batch_stats"]

        def batch(size: int) -> tuple[Any, Any]:
            return jax.ShapeDtypeStruct((size, *shape), jnp.uint8), jax.ShapeDtypeStruct((size,), jnp.int32)

        layers: Any = None
        tx: Any
        if options.method == "kfac":
            whole = batch(options.batch)
            layers = kfac.find_layers(loss_fn, params, averages, *whole, has_aux=True, batch_argnums=(2, 3))
            tx = kfac.kfac(rate, layers, weight_decay=options.weight_decay)
        else:
            settings = {**SETTINGS, "vectors": VECTORS[options.method]}
            if options.weight_decay is not None:
                settings["weight_decay"] = options.weight_decay
            tx = methods.METHODS[options.method].make(rate, settings, None)

        def in_parts(measure: Any, size: int, count: int) -> Any:
            """Compile `measure` for a part of `size` examples. Return a function that averages it over the parts, and
            zeros in the form of its result.

            The loop over the parts runs in Python, because XLA's convolutions are slow inside loops on CPUs.
            """
            part = batch(size // count)
            shapes = jax.eval_shape(measure, params, averages, *part)
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

            def add(total: Any, *arguments: Any) -> Any:
                return jax.tree.map(lambda x, y: x + y / count, total, measure(*arguments))

            program = jax.jit(add).lower(zeros, params, averages, *part).compile()

            def mean(carry: Any, images: Any, labels: Any) -> Any:
                total = zeros
                for one in zip(np.split(images, count), np.split(labels, count), strict=True):
                    total = program(total, *carry[:2], *one)
                return total

            return mean, zeros

        def step(carry: Any, measured: Any) -> Any:
            (loss, averages), grads = measured
            updates, opt_state = tx.update(grads, carry[2], carry[0])
            return (optax.apply_updates(carry[0], updates), averages, opt_state), loss

        self.first = params, averages, jax.jit(tx.init)(params)
        began = time.process_time()
        self.statistics = None
        if layers is not None:
            # These parts are as large as in a step.
            measure = kfac.statistics(loss_fn, layers, fraction=1, has_aux=True)
            self.statistics, factors = in_parts(measure, options.batch // SHARE, -(-parts // SHARE))
            self.observe = jax.jit(kfac.observe, donate_argnums=0).lower(self.first[2], factors).compile()
        self.gradients, measured = in_parts(jax.value_and_grad(loss_fn, has_aux=True), options.batch, parts)
        self.update = jax.jit(step, donate_argnums=0).lower(self.first, measured).compile()
        self.compiling = time.process_time() - began

        def normalised(params: Any, images: Any) -> Any:
            """Return the batch-norm means and variances for these images."""
            none = jax.tree.map(jnp.zeros_like, averages)
            new = forward(params, none, images, train=True)[1]["batch_stats"]
            return jax.tree.map(lambda x: x / (1 - MOMENTUM), new)

        def right(params: Any, averages: Any, images: Any, labels: Any) -> jax.Array:
            return jnp.sum(jnp.argmax(forward(params, averages, images, train=False)[0], -1) == labels)

        self.normalised, self.right = jax.jit(normalised), jax.jit(right)

    def accuracy(self, carry: Any, train: np.ndarray, images: np.ndarray, labels: np.ndarray) -> float:
        """Return the accuracy on `images`, with new batch-norm averages from `train`.

        Running averages lag behind if a tenth of the data is a batch.
        """
        parts = [self.normalised(carry[0], train[k : k + 250]) for k in range(0, min(len(train), 2500), 250)]
        averages = jax.tree.map(lambda *x: sum(x) / len(x), *parts)
        chunks = [slice(k, k + 500) for k in range(0, len(labels), 500)]
        return sum(int(self.right(carry[0], averages, images[k], labels[k])) for k in chunks) / len(labels)

    def step(self, carry: Any, images: Any, labels: Any) -> Any:
        if self.statistics and kfac.statistics_due(carry[2]):
            factors = self.statistics(carry, images[::SHARE], labels[::SHARE])
            carry = *carry[:2], self.observe(carry[2], factors)
        return self.update(carry, self.gradients(carry, images, labels))


def toy() -> tuple[Any, Any]:
    """Return light and dark images, for a trial run."""
    labels = np.arange(120, dtype=np.int32) % 2
    pixels = np.random.default_rng(0).integers(0, 128, (120, 8, 8, 3)) + 127 * labels[:, None, None, None]
    images = pixels.astype(np.uint8)
    return (images[:100], labels[:100]), (images[100:], labels[100:])


def run(options: argparse.Namespace) -> None:
    train, (images, labels) = toy() if options.toy else cifar10.read(options.data_dir)
    split = (Resident if options.resident else ArraySplit)(*train, shift=4, flip=True)
    name = {key: getattr(options, key) for key in ("network", "width", "method", "rate", "batch", "horizon", "seed")}
    if options.weight_decay is not None:
        name["weight_decay"] = options.weight_decay
    text = "-".join(map(str, name.values()))
    saved = options.output / f"{text}.npz"
    programs = Programs(options, images.shape[1:])
    carry, kept = curves.restore(saved, programs.first)
    start, (spent, wall) = int(kept.get("step", 0)), (kept.get(clock, 0.0) for clock in ("spent", "wall"))
    losses: list[float] = []
    stop = options.stop or options.horizon
    plan = Plan(len(split), options.batch, np.arange(options.batch), options.seed, start, stop)
    began = time.process_time(), time.perf_counter()
    for number, batch in enumerate(prefetch(split.batches(plan), lambda parts: parts), start + 1):
        carry, loss = programs.step(carry, batch.images, batch.labels)
        losses.append(float(loss))
        finite = bool(np.isfinite(losses[-1]))
        if number % options.every and number != stop and finite:
            continue
        spent, wall = spent + time.process_time() - began[0], wall + time.perf_counter() - began[1]
        row = {
            **name, "step": number, "accuracy": programs.accuracy(carry, train[0], images, labels),
            "loss": round(float(np.mean(losses)), 4),
            "processor_seconds": round(spent, 1), "wall_seconds": round(wall, 1),
            "compiling": round(programs.compiling, 1),
        }  # fmt: skip
        curves.add(options.results, row)
        if not finite:
            break
        curves.keep(saved, carry, step=number, spent=spent, wall=wall)
        losses, began = [], (time.process_time(), time.perf_counter())


def name_of(row: curves.Row) -> str:
    batch = f", batch {row['batch']}" if row["batch"] != 5000 else ""
    decay = f", weight decay {row['weight_decay']}" if "weight_decay" in row else ""
    width = f", width {row['width']}" if row.get("width", 24) != 24 else ""
    return f"{row['method']} {row['rate']}, {row['horizon']} steps{batch}{width}{decay}, seed {row['seed']}"


def report(options: argparse.Namespace) -> None:
    """Print each run's steps and seconds to each accuracy level; draw the runs with this batch and horizon."""
    found = curves.read(options.results, name_of)
    shown = [level for level in LEVELS if any(curves.reached(curve, "accuracy", level) for curve in found.values())]
    print("| run | accuracy at its end | " + " | ".join(f"{level:.0%}" for level in shown) + " |")
    print("|---" * (2 + len(shown)) + "|")
    for name, curve in found.items():
        cells = []
        for level in shown:
            there = curves.reached(curve, "accuracy", level)
            cells.append(f"{there['step']:.0f}, {there['processor_seconds']:.0f} s" if there else "")
        ended = f"{curve[-1]['accuracy']:.2%}" + (f" ({curve[-1]['step']} steps)" if curve[-1]["step"] != curve[-1][
            "horizon"] else "")  # fmt: skip
        print(f"| {name} | {ended} | " + " | ".join(cells) + " |")
    like_this = {"batch": options.batch, "horizon": options.horizon}
    drawn = [curve for curve in found.values() if like_this.items() <= curve[0].items()]
    if not drawn:
        raise SystemExit(f"no run of --batch {options.batch} and --horizon {options.horizon} to draw")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    for axis, key, label in zip(axes, ("step", "processor_seconds"), ("steps", "processor seconds"), strict=True):
        colours: dict[str, str] = {}  # a method's seeds share a colour
        for curve in drawn:
            method = f"{curve[0]['method']} {curve[0]['rate']}"
            named = None if method in colours else method
            colour = colours.setdefault(method, f"C{len(colours)}")
            accuracies = [100 * row["accuracy"] for row in curve]
            axis.plot([row[key] for row in curve], accuracies, ".-", color=colour, label=named)
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("test accuracy, %")
    axes[0].legend(fontsize=8)
    figure.savefig(options.figure, dpi=120)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["run", "report"])
    parser.add_argument("--data-dir", type=Path, default=Path("data/cifar10"))
    parser.add_argument("--method", choices=["kfac", "muon", "lars", "sgd"], default="kfac")
    parser.add_argument("--rate", type=float, default=0.1)
    parser.add_argument("--weight-decay", type=float, help="by default 5e-4, but none for K-FAC; SGD and LARS add "
                        "it to the gradients, and Muon and K-FAC decouple it")  # fmt: skip
    parser.add_argument("--batch", type=int, default=5000)
    parser.add_argument("--parts", type=int, default=20, help="micro-batches per batch; each has its own "
                        "batch-norm statistics")  # fmt: skip
    parser.add_argument("--horizon", type=int, default=120)
    parser.add_argument("--stop", type=int, help="stop at this step, before the horizon")
    parser.add_argument("--every", type=int, default=5, help="steps between evaluations on the test images")
    parser.add_argument("--network", choices=["resnet8", "resnet18"], default="resnet8")
    parser.add_argument("--width", type=int, default=32, help="channels in the first stage")
    parser.add_argument("--resident", action="store_true", help="keep the images on the device")
    parser.add_argument("--toy", action="store_true", help="a hundred light and dark images, for a trial run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("runs/cifar10"), help="folder for saved runs")
    parser.add_argument("--results", type=Path, default=HERE / "results.jsonl")
    parser.add_argument("--figure", type=Path, default=HERE / "curves.png", help="the figure that `report` writes")
    options = parser.parse_args(arguments)
    if options.method == "kfac" and options.batch % SHARE:
        parser.error(f"--batch {options.batch} is no multiple of {SHARE}")
    if options.batch % options.parts:
        parser.error(f"--parts {options.parts} does not divide --batch {options.batch}")
    (run if options.action == "run" else report)(options)


if __name__ == "__main__":
    main()
