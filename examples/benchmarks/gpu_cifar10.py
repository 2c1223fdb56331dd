"""Train CIFAR-10 to 94% with Muon and with K-FAC, at batches of 2,000 to 25,000 images (programme F).

    sh examples/imagenet/get_cifar10.sh data/cifar10
    python examples/benchmarks/gpu_cifar10.py data/cifar10 runs/gpu      # packs the images into two files of 53 MB

The network, the augmentation and the recipe are those of Keller Jordan's airbench94_muon.py, which holds the record for
94% on one A100 (https://github.com/KellerJordan/cifar10-airbench, https://arxiv.org/abs/2404.00498). They are written
anew for JAX. K-FAC takes Muon's place: it updates the convolutions' kernels, and SGD everything else.

Recipe: a frozen convolution that whitens 2 x 2 patches; six convolutions with batch norm; label smoothing 0.2; random
shifts by up to two pixels; flips in every other epoch; eight epochs of batches of 2,000; Muon with rate 0.24 and
momentum 0.6; the rates fall linearly to zero; six shifted and flipped copies of each test image.
"""

from __future__ import annotations

import argparse
import functools
import io
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import environment  # noqa: F401, isort: skip; before JAX is imported

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import kfac
from gpu_record import Record, compile_together
from gpu_training import is_due, kfac_state

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "large_batch"))

import cifar10
import methods

TARGET = 0.94
WIDTHS = (64, 256, 256)
KEPT = 0.6  # share of the old value in batch norm's running averages
SMOOTHING = 0.2
# Rates of SGD for gradients that are summed over 2,000 images, and the decay of parameters per image.
BASE, HEAD_RATE, BIAS_RATE, DECAY = 2000, 0.67, 0.053, 2e-6
# The number of epochs with which the search for a rate begins. Larger batches need more epochs.
EPOCHS = {2000: 8, 5000: 9, 12500: 12, 25000: 18}
BATCHES = (5000, 2000, 12500, 25000)  # in the order of the search
RATES = {"muon": (0.24, 0.12, 0.48), "kfac": (0.1, 0.05, 0.2)}
SEEDS = 3
LOOKS = 8  # accuracies per run


# -- images ------------------------------------------------------------------------------------------------------------


class Images(NamedTuple):
    """Images `[n, 32, 32, 3]` uint8 with labels `[n]`, for training and for the test."""

    train: Any
    labels: Any
    test: Any
    test_labels: Any


def pack(data: pathlib.Path, folder: pathlib.Path) -> None:
    """Write CIFAR-10 without loss into two files, each small enough to travel: 30,000 images, and the other 30,000."""
    (train, labels), (test, test_labels) = cifar10.read(data)
    folder.mkdir(parents=True, exist_ok=True)
    images, labels = np.concatenate([train, test]), np.concatenate([labels, test_labels])
    for part, rows in enumerate(np.split(np.arange(len(images)), 2), 1):
        sheets: dict[str, Any] = {
            f"sheet{k}": _to_webp(images[k : k + 10_000]) for k in range(rows[0], rows[-1], 10_000)
        }
        np.savez(folder / f"cifar10-{part}.npz", labels=labels[rows].astype(np.uint8), **sheets)


def unpack(folder: pathlib.Path) -> Images:
    """Read what `pack` wrote."""
    images, labels = [], []
    for path in parts_of(folder):
        with np.load(path) as found:
            labels.append(found["labels"].astype(np.int32))
            images += [_from_webp(found[name]) for name in sorted(set(found) - {"labels"})]
    x, y = np.concatenate(images), np.concatenate(labels)
    return Images(x[:50_000], y[:50_000], x[50_000:], y[50_000:])


def parts_of(folder: pathlib.Path) -> list[pathlib.Path]:
    return [folder / "cifar10-1.npz", folder / "cifar10-2.npz"]


def _to_webp(images: np.ndarray) -> np.ndarray:
    """Return a lossless WebP file with a square sheet of images, as bytes."""
    from PIL import Image

    side = int(len(images) ** 0.5)
    sheet = images.reshape(side, side, 32, 32, 3).swapaxes(1, 2).reshape(32 * side, 32 * side, 3)
    file = io.BytesIO()
    Image.fromarray(sheet).save(file, format="WEBP", lossless=True, method=0)
    return np.frombuffer(file.getvalue(), np.uint8)


def _from_webp(data: np.ndarray) -> np.ndarray:
    from PIL import Image

    sheet = np.asarray(Image.open(io.BytesIO(data.tobytes())).convert("RGB"))
    side = len(sheet) // 32
    return sheet.reshape(side, 32, side, 32, 3).swapaxes(1, 2).reshape(-1, 32, 32, 3)


def toy(count: int = 100) -> Images:
    """Return noisy images in ten colours, for a rehearsal."""
    rng = np.random.default_rng(0)
    labels = np.arange(2 * count, dtype=np.int32) % 10
    colours = rng.integers(0, 192, (10, 1, 1, 3))
    images = (colours[labels] + rng.integers(0, 64, (2 * count, 32, 32, 3))).astype(np.uint8)
    return Images(images[:count], labels[:count], images[count:], labels[count:])


def normalise(images: Any) -> jax.Array:
    return (images / 255 - jnp.asarray(cifar10.MEAN)) / jnp.asarray(cifar10.STD)


def augment(images: Any, key: Any, epoch: Any) -> jax.Array:
    """Return an epoch's images, normalised, flipped and shifted, in bfloat16.

    Half of the images are flipped in the first epoch, the other half in the second epoch, and so on. `key` is the same
    in all epochs.
    """
    flipped = jax.random.bernoulli(jax.random.fold_in(key, 0), 0.5, (len(images),)) ^ (epoch % 2 == 1)
    images = jnp.where(flipped[:, None, None, None], images[:, :, ::-1], images)
    around = jnp.pad(images, ((0, 0), (2, 2), (2, 2), (0, 0)), "reflect")
    shifts = jax.random.randint(jax.random.fold_in(key, 1 + epoch), (len(images), 2), 0, 5)

    def cropped(image: Any, shift: Any) -> Any:
        return lax.dynamic_slice(image, (shift[0], shift[1], 0), (32, 32, 3))

    return normalise(jax.vmap(cropped)(around, shifts)).astype(jnp.bfloat16)


# -- the network -------------------------------------------------------------------------------------------------------


def whitening(images: Any) -> jax.Array:
    """Return kernels `[2, 2, 3, 24]` that project patches on their principal components, scaled to variance 1.

    The last twelve kernels are the negatives of the first twelve.
    """
    patches = jnp.stack([images[:, y : y + 31, x : x + 31] for y in range(2) for x in range(2)], -2)
    rows = patches.reshape(-1, 12)
    values, vectors = jnp.linalg.eigh(rows.T @ rows / len(rows))
    kernels = (vectors / jnp.sqrt(values + 5e-4)).reshape(2, 2, 3, 12)
    return jnp.concatenate([kernels, -kernels], -1)


def init(key: Any, widths: tuple[int, ...]) -> Any:
    """Return the parameters. A convolution first copies its inputs to its first outputs, as far as there are enough."""
    keys = iter(jax.random.split(key, 2 * len(widths) + 1))

    def kernel(d_in: int, d_out: int) -> jax.Array:
        bound = (9 * d_in) ** -0.5
        random = jax.random.uniform(next(keys), (3, 3, d_in, d_out), minval=-bound, maxval=bound)
        copied = min(d_in, d_out)
        random = random.at[..., :copied].set(0.0)
        return random.at[1, 1, jnp.arange(copied), jnp.arange(copied)].set(1.0)

    groups = {}
    d_in = 24
    for number, width in enumerate(widths):
        groups[f"group{number}"] = {
            "first": {"kernel": kernel(d_in, width)},
            "first_shift": jnp.zeros(width),
            "second": {"kernel": kernel(width, width)},
            "second_shift": jnp.zeros(width),
        }
        d_in = width
    head = jax.random.uniform(next(keys), (d_in, 10), minval=-(3**0.5), maxval=3**0.5)
    return groups | {"whiten_bias": jnp.zeros(24), "head": head}


def new_averages(params: Any) -> Any:
    """Return batch norm's running means and variances before the first step."""
    shifts = [f"{group}/{name}" for group in params if group.startswith("group") for name in ("first", "second")]
    widths = [params[name.split("/")[0]][name.split("/")[1] + "_shift"].shape for name in shifts]
    return {name: (jnp.zeros(width), jnp.ones(width)) for name, width in zip(shifts, widths, strict=True)}


def forward(params: Any, averages: Any, whitener: Any, images: Any, train: bool) -> tuple[jax.Array, Any]:
    """Return logits `[n, 10]` and the new running averages, from normalised images."""
    averages = dict(averages)
    gelu = functools.partial(jax.nn.gelu, approximate=False)

    def convolution(x: Any, kernel: Any, padding: str) -> Any:
        dimensions = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(x, kernel.astype(x.dtype), (1, 1), padding, dimension_numbers=dimensions)

    def pooled(x: Any, size: int) -> Any:
        window = (1, size, size, 1)
        return lax.reduce_window(x, -jnp.inf, lax.max, window, window, "VALID")

    def normalised(x: Any, name: str, shift: Any) -> Any:
        wide = x.astype(jnp.float32)
        mean, variance = averages[name]
        if train:
            mean, variance = wide.mean((0, 1, 2)), wide.var((0, 1, 2))
            averages[name] = tuple(
                KEPT * old + (1 - KEPT) * lax.stop_gradient(new)
                for old, new in zip(averages[name], (mean, variance), strict=True)
            )
        return ((wide - mean) * lax.rsqrt(variance + 1e-12) + shift).astype(x.dtype)

    x = images.astype(jnp.bfloat16)
    x = gelu(convolution(x, whitener, "VALID") + params["whiten_bias"].astype(x.dtype))
    for name in sorted(key for key in params if key.startswith("group")):
        group = params[name]
        x = pooled(convolution(x, group["first"]["kernel"], "SAME"), 2)
        x = gelu(normalised(x, f"{name}/first", group["first_shift"]))
        x = convolution(x, group["second"]["kernel"], "SAME")
        x = gelu(normalised(x, f"{name}/second", group["second_shift"]))
    x = pooled(x, 3).reshape(len(x), -1).astype(jnp.float32)
    return x @ params["head"] / x.shape[1], averages


def loss_fn(params: Any, averages: Any, whitener: Any, images: Any, labels: Any) -> tuple[jax.Array, Any]:
    logits, averages = forward(params, averages, whitener, images, True)
    targets = optax.smooth_labels(jax.nn.one_hot(labels, 10), SMOOTHING)
    return optax.softmax_cross_entropy(logits, targets).mean(), averages


def accuracy(params: Any, averages: Any, whitener: Any, images: Any, labels: Any) -> jax.Array:
    """Return the accuracy of six copies: the image as it is has half of the weight, two shifts the other half.

    Each is averaged with its mirror image.
    """

    def logits(x: Any) -> jax.Array:
        as_is, mirrored = (forward(params, averages, whitener, y, False)[0] for y in (x, x[:, :, ::-1]))
        return (as_is + mirrored) / 2

    def right(part: Any) -> jax.Array:
        x, y = normalise(part[0]), part[1]
        around = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), "reflect")
        shifted = logits(around[:, :32, :32]) + logits(around[:, 2:, 2:])
        return jnp.sum(jnp.argmax(logits(x) / 2 + shifted / 4, 1) == y)

    parts = images.reshape(5, -1, *images.shape[1:]), labels.reshape(5, -1)
    return lax.map(right, parts).sum() / len(labels)


# -- optimizers --------------------------------------------------------------------------------------------------------


class Scalars(NamedTuple):
    """The traced settings of a run.

    Attributes:
      rate: the rate of Muon or K-FAC.
      beside: a factor on SGD's rates, which are those of a batch of 2,000 images.
      horizon: the number of steps.
    """

    rate: Any
    beside: Any
    horizon: Any


def is_kernel(path: Any, _: Any = None) -> bool:
    """Return whether Muon or K-FAC updates a parameter."""
    return "kernel" in jax.tree_util.keystr(path)


def orthogonalised(matrix: Any) -> jax.Array:
    """Move the singular values of a matrix near 1 by three quintic Newton-Schulz iterations, in bfloat16.

    The coefficients are Jordan's (https://kellerjordan.github.io/posts/muon/).
    """
    x = matrix.astype(jnp.bfloat16)
    x = x / (jnp.linalg.norm(x) + 1e-7)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    for _ in range(3):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return (x.T if tall else x).astype(jnp.float32)


def muon(rate: Callable[[Any], Any]) -> optax.GradientTransformation:
    """Return Muon as in airbench94: momentum 0.6 with Nesterov's look ahead, and no factor for the kernel's shape."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        del params
        return jax.tree.map(lambda u: orthogonalised(u.reshape(-1, u.shape[-1])).reshape(u.shape), updates), state

    whitened = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    return optax.chain(optax.trace(0.6, nesterov=True), whitened, optax.scale_by_learning_rate(rate))


def beside_kernels(scalars: Scalars, width: int) -> optax.GradientTransformation:
    """Return airbench94's SGD for the head and the biases, for gradients of the mean loss.

    The whitening layer's bias stops after three of eight epochs. The rates are for a head with 256 inputs. A narrower
    network in a rehearsal has proportionally smaller rates, because its logits, which are divided by `width`, have
    larger gradients.
    """
    size = BASE * width / WIDTHS[-1]

    def part(rate: float, share: float) -> optax.GradientTransformation:
        def falling(count: Any) -> Any:
            return scalars.beside * size * rate * jnp.maximum(1 - count / (share * scalars.horizon), 0)

        return optax.chain(
            optax.add_decayed_weights(DECAY * BASE / size / rate), optax.sgd(falling, momentum=0.85, nesterov=True)
        )

    def labels(params: Any) -> Any:
        def of(path: Any, _: Any) -> str:
            name = jax.tree_util.keystr(path)
            return next((label for label in ("head", "whiten") if label in name), "shift")

        return jax.tree_util.tree_map_with_path(of, params)

    kinds = {"head": part(HEAD_RATE, 1), "shift": part(BIAS_RATE, 1), "whiten": part(BIAS_RATE, 3 / 8)}
    return optax.partition(kinds, labels)


def optimizer(method: str, scalars: Scalars, layers: kfac.Layers) -> optax.GradientTransformation:
    """Return the optimizer of all parameters, with Muon or K-FAC for the kernels.

    K-FAC's rate rises for a tenth of the steps, as the package recommends.
    """
    if method == "muon":
        kernels = muon(lambda count: scalars.rate * (1 - count / scalars.horizon))
    else:
        kernels = kfac.kfac(methods.schedule(scalars.rate, scalars.horizon), layers)

    def labels(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, _: "kernel" if is_kernel(path) else "beside", params)

    beside = beside_kernels(scalars, layers["head"].shapes[0][0])
    return optax.partition({"kernel": kernels, "beside": beside}, labels)


def with_norm(path: Any, leaf: Any) -> Any:
    """Give a kernel the norm at which each output has norm 1. Batch norm follows, so only its direction matters."""
    return leaf * (leaf.shape[-1] ** 0.5 / jnp.linalg.norm(leaf)) if is_kernel(path) else leaf


# -- a run -------------------------------------------------------------------------------------------------------------


class Carry(NamedTuple):
    """The arrays that a step changes."""

    params: Any
    averages: Any
    state: Any


class Epoch(NamedTuple):
    """An epoch's images and labels, and the order in which batches take them."""

    images: Any
    labels: Any
    order: Any


class Programs:
    """A method's programs for a batch size, and the number of the method's runs that they have made."""

    def __init__(self, method: str, batch: int, images: Images, widths: tuple[int, ...]) -> None:
        self.method, self.batch = method, batch
        self.per_epoch = len(images.train) // batch
        params = jax.eval_shape(functools.partial(init, widths=widths), jax.random.key(0))
        averages = jax.eval_shape(new_averages, params)
        whitener = jax.ShapeDtypeStruct((2, 2, 3, 24), jnp.float32)
        batched = jax.ShapeDtypeStruct((batch, 32, 32, 3), jnp.bfloat16), jax.ShapeDtypeStruct((batch,), jnp.int32)
        self.layers = kfac.find_layers(
            loss_fn, params, averages, whitener, *batched, has_aux=True, batch_argnums=(3, 4),
            rules={"head|shift|whiten_bias": "skip"},
        )  # fmt: skip
        self.scalars = jax.tree.map(jnp.float32, Scalars(0.1, 1.0, 100))
        self.init = jax.jit(self._init, static_argnums=1)
        measure = kfac.statistics(loss_fn, self.layers, has_aux=True)
        state = jax.eval_shape(functools.partial(self._init, widths=widths), jax.random.key(0)).state
        carry = Carry(params, averages, state)
        count = len(images.train)
        epoch = Epoch(
            jax.ShapeDtypeStruct((count, 32, 32, 3), jnp.bfloat16),
            jax.ShapeDtypeStruct((count,), jnp.int32),
            jax.ShapeDtypeStruct((count,), jnp.int32),
        )
        number = jax.ShapeDtypeStruct((), jnp.int32)

        def observe(carry: Carry, whitener: Any, epoch: Epoch, number: Any) -> Carry:
            batch = self._batch(epoch, number)
            factors = measure(carry.params, carry.averages, whitener, *batch)
            return carry._replace(state=kfac.observe(carry.state, factors))

        step = jax.jit(self._step, donate_argnums=0)
        self.programs: dict[str, Any] = {"step": (step, (carry, whitener, epoch, number, self.scalars))}
        self.interval = 0
        if method == "kfac":
            self.interval = kfac_state_of(state).settings.interval.every
            observed = jax.jit(observe, donate_argnums=0)
            self.programs["observe"] = observed, (carry, whitener, epoch, number)

    def _init(self, key: Any, widths: tuple[int, ...]) -> Carry:
        params = jax.tree_util.tree_map_with_path(with_norm, init(key, widths))
        return Carry(params, new_averages(params), optimizer(self.method, self.scalars, self.layers).init(params))

    def _batch(self, epoch: Epoch, number: Any) -> tuple[Any, Any]:
        rows = lax.dynamic_slice(epoch.order, (self.batch * (number % self.per_epoch),), (self.batch,))
        return epoch.images[rows], epoch.labels[rows]

    def _step(self, carry: Carry, whitener: Any, epoch: Epoch, number: Any, scalars: Scalars) -> Any:
        measure = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, averages), grads = measure(carry.params, carry.averages, whitener, *self._batch(epoch, number))
        params = jax.tree_util.tree_map_with_path(with_norm, carry.params)
        updates, state = optimizer(self.method, scalars, self.layers).update(grads, carry.state, params)
        return Carry(optax.apply_updates(params, updates), averages, state), loss

    def step(self, carry: Carry, whitener: Any, epoch: Epoch, number: int, scalars: Scalars) -> Any:
        """Make step `number`, after statistics if they are due."""
        place = jnp.int32(number)
        if self.interval and is_due(number, self.interval):
            carry = self.programs["observe"](carry, whitener, epoch, place)
        return self.programs["step"](carry, whitener, epoch, place, scalars)


def kfac_state_of(state: Any) -> Any:
    """Return K-FAC's state inside `optax.partition`'s."""
    return kfac_state(state.inner_states["kernel"].inner_state)


class Setting(NamedTuple):
    """A run's rates as in `Scalars`, its number of steps, and the seed of its parameters and its images' order."""

    rate: float
    beside: float
    horizon: int
    seed: int = 0


class Trainer:
    """Runs on one set of images, with the programs that all methods share."""

    def __init__(self, record: Record, images: Images, widths: tuple[int, ...]) -> None:
        self.record, self.widths = record, widths
        self.images = Images(*map(jnp.asarray, images))
        self.whitener = jax.jit(lambda x: whitening(normalise(x)))(self.images.train[:5000])
        self.prepare = jax.jit(augment)
        self.shuffle = jax.jit(lambda key: jax.random.permutation(key, len(images.train)).astype(jnp.int32))
        self.accuracy = jax.jit(accuracy)

    def run(self, programs: Programs, chosen: Setting, target: float) -> dict[str, Any]:
        """Train once; return the row. Its seconds exclude the accuracies on the way."""
        key = jax.random.key(chosen.seed)
        scalars = jax.tree.map(jnp.float32, Scalars(chosen.rate, chosen.beside, chosen.horizon))
        carry = programs.init(key, self.widths)
        looks = {round(chosen.horizon * k / LOOKS) for k in range(1, LOOKS + 1)} - {0}
        epoch: Any = None
        curve: list[list[float]] = []
        seconds = 0.0
        jax.block_until_ready(carry)
        began = time.perf_counter()
        for number in range(chosen.horizon):
            if number % programs.per_epoch == 0:
                count = jnp.int32(number // programs.per_epoch)
                order = self.shuffle(jax.random.fold_in(jax.random.fold_in(key, 1), count))
                images = self.prepare(self.images.train, jax.random.fold_in(key, 2), count)
                epoch = Epoch(images, self.images.labels, order)
            carry, loss = programs.step(carry, self.whitener, epoch, number, scalars)
            if number + 1 not in looks:
                continue
            jax.block_until_ready(carry)
            seconds += time.perf_counter() - began
            right = self.accuracy(
                carry.params, carry.averages, self.whitener, self.images.test, self.images.test_labels
            )
            curve.append([number + 1, round(seconds, 3), round(float(right), 4), round(float(loss), 4)])
            began = time.perf_counter()
        there = next((point for point in curve if point[2] >= target), [None, None])
        return {
            "steps": chosen.horizon,
            "seconds": seconds,
            "ms": 1e3 * seconds / chosen.horizon,
            "accuracy": curve[-1][2],
            f"first step at {target:.0%}": there[0],
            f"seconds to {target:.0%}": there[1],
            "curve": curve,
        }


# -- the search --------------------------------------------------------------------------------------------------------


class Searcher:
    """The runs of a method at a batch size. A run that is in the record is not repeated."""

    def __init__(self, trainer: Trainer, programs: Programs, target: float, ms: float) -> None:
        self.trainer, self.programs, self.target, self.ms = trainer, programs, target, ms
        self.table = f"{programs.method}, batches of {programs.batch:,}"

    def accuracy(self, chosen: Setting) -> float | None:
        """Return the accuracy at the end of a run, or None if no time is left for it."""
        record = self.trainer.record
        name = f"rate {chosen.rate:g}, beside {chosen.beside:.3g}, {chosen.horizon} steps, seed {chosen.seed}"
        run = functools.partial(self.trainer.run, self.programs, chosen, self.target)
        if not record.measure(self.table, name, run, needs=1e-3 * self.ms * chosen.horizon):
            return None
        row = record.row(self.table, name)
        self.ms = row["ms"]
        return row["accuracy"]

    def best_of(self, choices: list[Setting]) -> Setting | None:
        """Return the choice with the highest accuracy, or None if no time was left for all of them."""
        found = [(self.accuracy(chosen), chosen) for chosen in choices]
        if any(accuracy is None for accuracy, _ in found):
            return None
        return max(found, key=lambda pair: pair[0] or 0.0)[1]

    def best_rates(self, start: Setting) -> Setting | None:
        """Search the method's rate, then the factor on SGD's rates."""
        rates = sorted(RATES[self.programs.method])
        best = self.best_of([start._replace(rate=rate) for rate in rates])
        # A rate at the edge of the grid may not be the best: extend the grid, at most twice.
        for _ in range(2):
            if best is None or rates[0] < best.rate < rates[-1]:
                break
            rates = sorted([*rates, rates[0] / 2 if best.rate == rates[0] else 2 * rates[-1]])
            best = self.best_of([start._replace(rate=rate) for rate in rates])
        if best is None:
            return None
        factors = {1.0, start.beside, start.beside**2}
        return self.best_of([best._replace(beside=factor) for factor in sorted(factors)])

    def shortest(self, best: Setting) -> Setting | None:
        """Return the setting with the fewest steps whose first seed reaches the target."""
        now, reached = best, None
        longest = 4 * best.horizon
        while now.horizon <= longest:
            accuracy = self.accuracy(now)
            if accuracy is None:
                return None
            if accuracy >= self.target:
                reached = now
                shorter = now._replace(horizon=min(round(0.88 * now.horizon), now.horizon - 1))
                if now.horizon > best.horizon or shorter.horizon < 2:
                    return reached
                now = shorter
            elif reached is not None:
                return reached
            else:
                now = now._replace(horizon=max(round(1.2 * now.horizon), now.horizon + 1))
        return None

    def all_seeds(self, found: Setting) -> dict[str, Any] | None:
        """Return a row with the fewest steps at which the mean over the seeds reaches the target."""
        for _ in range(4):
            accuracies = [self.accuracy(found._replace(seed=seed)) for seed in range(SEEDS)]
            if any(accuracy is None for accuracy in accuracies):
                return None
            mean = float(np.mean([accuracy or 0.0 for accuracy in accuracies]))
            if mean >= self.target:
                row = found._asdict() | {"accuracy": mean, "ms": self.ms}
                del row["seed"]
                return {"steps": row.pop("horizon"), "seconds": 1e-3 * self.ms * found.horizon} | row
            found = found._replace(horizon=max(round(1.07 * found.horizon), found.horizon + 1))
        return {"steps": f"more than {found.horizon}"}


def compare(record: Record, options: argparse.Namespace) -> None:
    """Run programme F: for each batch size, Muon's and K-FAC's fewest steps to 94%."""
    small = options.rehearse
    batches = options.batches or ((40, 20) if small else BATCHES)
    summary = "Steps to 94%"
    wanted = [(batch, method) for batch in batches for method in RATES]
    wanted = [(batch, method) for batch, method in wanted if not record.has(summary, f"{method}, {batch:,}")]
    if not wanted:
        return
    images = toy() if small else unpack(options.scratch)
    widths = (8, 8, 8) if small else WIDTHS
    target = 0.25 if small else TARGET
    trainer = Trainer(record, images, widths)
    found = {key: Programs(key[1], key[0], images, widths) for key in wanted}
    lowered = {f"{method} {batch} {name}": program for (batch, method), one in found.items()
               for name, program in one.programs.items()}  # fmt: skip
    compiled = compile_together(record, lowered, options.compile_seconds)
    for (batch, method), one in found.items():
        one.programs = {name: compiled[f"{method} {batch} {name}"] for name in one.programs}
        epochs = 1 if small else EPOCHS.get(batch, 12)
        ratio = (batch / (batches[-1] if small else BASE)) ** 0.5
        start = Setting(RATES[method][0], ratio, epochs * one.per_epoch)
        searcher = Searcher(trainer, one, target, 0.0 if small else 60 * batch / BASE / 4)
        best = searcher.best_rates(start)
        shortest = best and searcher.shortest(best)
        row = shortest and searcher.all_seeds(shortest)
        if row:
            record.add(summary, f"{method}, {batch:,}", row)
        else:
            record.repeat(summary, f"{method}, {batch:,}", "no time was left, or four times the steps were too few")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=pathlib.Path, help="CIFAR-10, downloaded by get_cifar10.sh")
    parser.add_argument("folder", type=pathlib.Path, help="folder for the two files")
    given = parser.parse_args()
    pack(given.data, given.folder)
