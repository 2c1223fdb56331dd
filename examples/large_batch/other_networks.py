"""Define five more networks for `networks.py`, each of a different kind.

Initially, no default was chosen on these networks.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / folder) for folder in ("imagenet", "language_model", ".")]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import linen as nn  # noqa: E402
from sklearn.datasets import load_digits  # noqa: E402

import kfac  # noqa: E402
import tasks  # noqa: E402
import topics  # noqa: E402

Batch = tuple[Any, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """Describe a training problem with N examples. A batch has N / `share` examples.

    Attributes:
      init: `init(key)` returns the parameters and the state.
      loss: `loss(params, state, *batch)` returns the loss and the new state.
      batches: `batches(seed, steps)` yields the batches.
      score: `score(params, state)` returns the score. A higher score is better.
      stacked: names of subtrees whose parameters hold a kernel for each layer of a scan.
      table: regular expression for tables and heads, which other methods treat as vectors.
    """

    init: Callable[[jax.Array], tuple[Any, Any]]
    loss: Callable[..., Any]
    batches: Callable[[int, int], Iterator[Batch]]
    score: Callable[[Any, Any], float]
    stacked: tuple[str, ...] = ()
    table: str = "^$"


def without_state(
    init: Callable[[jax.Array], Any],
    loss: Callable[..., jax.Array],
    draw: Callable[[np.random.Generator], Batch],
    held_out: list[Batch],
    score: Callable[..., jax.Array] | None = None,
    table: str = "^$",
) -> Problem:
    """Return a problem without mutable state, whose batches come from `draw`.

    The score is the mean of `score` over the `held_out` batches. By default, it is minus the loss.
    """
    measure = jax.jit(score or (lambda params, *batch: -loss(params, *batch)))

    def batches(seed: int, steps: int) -> Iterator[Batch]:
        for step in range(steps):
            yield tuple(map(jnp.asarray, draw(np.random.default_rng((seed, step)))))

    def scored(params: Any, state: Any) -> float:
        del state
        return float(np.mean([measure(params, *batch) for batch in held_out]))

    return Problem(
        lambda key: (init(key), {}), lambda params, state, *batch: (loss(params, *batch), state), batches, scored,
        table=table,
    )  # fmt: skip


def images(data_dir: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return 5,000 training images and 1,000 validation images from CIFAR-10.

    The images have 16 x 16 pixels with values from -1 to 1.
    """
    task = tasks.load("cifar", data_dir)
    return tuple((x.astype(np.float32) / 127.5 - 1) for x in (task.train.images, task.val[0][:1000]))  # type: ignore[return-value]


# -- a U-Net that predicts noise (Ho et al. 2020) ----------------------------------------------------------------------


class Residual(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
        h = nn.Conv(self.width, (3, 3))(nn.silu(nn.GroupNorm(8)(x)))
        h = h + nn.Dense(self.width)(time)[:, None, None]
        h = nn.Conv(self.width, (3, 3))(nn.silu(nn.GroupNorm(8)(h)))
        return h + (x if x.shape[-1] == self.width else nn.Conv(self.width, (1, 1))(x))


class Attention(nn.Module):
    heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        flat = nn.GroupNorm(8)(x).reshape(len(x), -1, x.shape[-1])
        return x + nn.MultiHeadDotProductAttention(self.heads)(flat).reshape(x.shape)


class UNet(nn.Module):
    width: int = 16

    @nn.compact
    def __call__(self, x: jax.Array, level: jax.Array) -> jax.Array:
        angles = level[:, None] * jnp.exp(jnp.linspace(0, 4, 16))
        time = nn.silu(nn.Dense(64)(jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)))
        first = nn.Conv(self.width, (3, 3))(x)
        high = Residual(self.width)(first, time)
        low = nn.avg_pool(high, (2, 2), (2, 2))
        low = Attention(4)(Residual(2 * self.width)(low, time))
        low = Residual(2 * self.width)(low, time)
        up = jnp.repeat(jnp.repeat(low, 2, 1), 2, 2)
        high = Residual(self.width)(jnp.concatenate([high, up], -1), time)
        return nn.Conv(x.shape[-1], (3, 3), kernel_init=nn.initializers.zeros)(nn.silu(nn.GroupNorm(8)(high)))


def denoising(data_dir: Path, share: int) -> Problem:
    """Return the problem of predicting the noise in an image.

    The score is minus the mean squared error. N is 5,000.
    """
    train, held = images(data_dir)
    model = UNet()

    def noisy(x: np.ndarray, rng: np.random.Generator) -> Batch:
        level = rng.uniform(0, 1, len(x)).astype(np.float32)
        return x, rng.normal(size=x.shape).astype(np.float32), level

    def loss(params: Any, x: Any, noise: Any, level: Any) -> jax.Array:
        angle = (level * np.pi / 2)[:, None, None, None]
        found = model.apply({"params": params}, jnp.cos(angle) * x + jnp.sin(angle) * noise, level)
        return jnp.mean((found - noise) ** 2)

    rng = np.random.default_rng(99)
    held_out = [noisy(held[k : k + 250], rng) for k in range(0, 1000, 250)]
    return without_state(
        lambda key: model.init(key, jnp.zeros((1, 16, 16, 3)), jnp.zeros(1))["params"], loss,
        lambda rng: noisy(train[rng.permutation(len(train))[: len(train) // share]], rng), held_out,
    )  # fmt: skip


# -- characters by recurrence (Cho et al. 2014) ------------------------------------------------------------------------


class Characters(nn.Module):
    width: int = 128

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(len(topics.ALPHABET), 64)(tokens)
        for _ in range(2):
            x = nn.RNN(nn.GRUCell(self.width))(x)
        return nn.Dense(len(topics.ALPHABET))(x)


def recurrent(data_dir: Path, share: int) -> Problem:
    """Return the problem of predicting characters with a recurrent network.

    Sequences have 48 characters. The score is minus the validation loss in nats per character. N is 2,000.
    """
    del data_dir
    model, length = Characters(), 49
    train, held = topics.tokens()
    rows = held[: 512 * length].reshape(4, 128, length)

    def loss(params: Any, tokens: Any) -> jax.Array:
        logits = model.apply({"params": params}, tokens[:, :-1])
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))

    def draw(rng: np.random.Generator) -> Batch:
        begin = rng.integers(0, len(train) - length, 2000 // share)
        return (train[begin[:, None] + np.arange(length)],)

    return without_state(
        lambda key: model.init(key, jnp.zeros((1, 4), int))["params"], loss, draw, [(part,) for part in rows],
        table="Embed|^Dense",
    )  # fmt: skip


# -- a masked autoencoder (He et al. 2022) -----------------------------------------------------------------------------


class Block(nn.Module):
    heads: int = 4

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + nn.MultiHeadDotProductAttention(self.heads)(nn.LayerNorm()(x))
        return x + nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x))))


class Masked(nn.Module):
    """Encode the first quarter of the patches in `order`, and predict the other patches."""

    width: int = 96
    seen: int = 16

    @nn.compact
    def __call__(self, patches: jax.Array, order: jax.Array) -> jax.Array:
        n, count, size = patches.shape
        places = self.param("places", nn.initializers.normal(0.02), (count, self.width))
        x = nn.Dense(self.width)(patches) + places
        x = jnp.take_along_axis(x, order[:, : self.seen, None], 1)
        for _ in range(3):
            x = Block()(x)
        x = nn.Dense(64)(nn.LayerNorm()(x))
        empty = self.param("empty", nn.initializers.normal(0.02), (1, 1, 64))
        x = jnp.concatenate([x, jnp.broadcast_to(empty, (n, count - self.seen, 64))], 1)
        x = jnp.take_along_axis(x, jnp.argsort(order)[..., None], 1)
        x = Block()(x + self.param("places_again", nn.initializers.normal(0.02), (count, 64)))
        return nn.Dense(size)(nn.LayerNorm()(x))


def masked(data_dir: Path, share: int) -> Problem:
    """Return the problem of predicting hidden patches of 2 x 2 pixels.

    The score is minus the mean squared error. N is 5,000.
    """
    train, held = (x.reshape(-1, 8, 2, 8, 2, 3).swapaxes(2, 3).reshape(-1, 64, 12) for x in images(data_dir))
    model = Masked()

    def shuffled(x: np.ndarray, rng: np.random.Generator) -> Batch:
        return x, rng.permuted(np.tile(np.arange(64), (len(x), 1)), axis=1)

    def loss(params: Any, patches: Any, order: Any) -> jax.Array:
        found = model.apply({"params": params}, patches, order)
        error = jnp.take_along_axis(jnp.mean((found - patches) ** 2, -1), order[:, model.seen :], 1)
        return jnp.mean(error)

    rng = np.random.default_rng(99)
    held_out = [shuffled(held[k : k + 250], rng) for k in range(0, 1000, 250)]
    return without_state(
        lambda key: model.init(key, jnp.zeros((1, 64, 12)), jnp.arange(64)[None])["params"], loss,
        lambda rng: shuffled(train[rng.permutation(len(train))[: len(train) // share]], rng), held_out,
        table="places|empty",
    )  # fmt: skip


# -- a set transformer (Lee et al. 2019) -------------------------------------------------------------------------------


class Induced(nn.Module):
    """Apply self-attention to a set through a few learned points."""

    points: int = 8

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        first = self.param("points", nn.initializers.normal(0.3), (1, self.points, x.shape[-1]))
        h = nn.MultiHeadDotProductAttention(4)(jnp.broadcast_to(first, (len(x), *first.shape[1:])), x)
        h = nn.LayerNorm()(h)
        x = nn.LayerNorm()(x + nn.MultiHeadDotProductAttention(4)(x, h))
        return nn.LayerNorm()(x + nn.Dense(x.shape[-1])(nn.relu(nn.Dense(2 * x.shape[-1])(x))))


class SetTransformer(nn.Module):
    width: int = 64

    @nn.compact
    def __call__(self, points: jax.Array) -> jax.Array:
        x = nn.Dense(self.width)(points)
        for _ in range(3):
            x = Induced()(x)
        return nn.Dense(10)(x.mean(1))


def sets(data_dir: Path, share: int) -> Problem:
    """Return the problem of classifying digits from point sets.

    Each set has 24 points with a brightness, drawn from the pixels. The score is the accuracy. N is 1,200.
    """
    del data_dir
    pixels, labels = load_digits(return_X_y=True)
    order = np.random.RandomState(0).permutation(len(labels))
    pixels, labels = pixels[order] / pixels.sum(1, keepdims=True).mean(), labels[order].astype(np.int32)
    model = SetTransformer()

    def drawn(rows: np.ndarray, rng: np.random.Generator) -> Batch:
        chances = pixels[rows] / pixels[rows].sum(1, keepdims=True)
        places = np.stack([rng.choice(64, 24, p=p) for p in chances])
        where = np.stack([places // 8, places % 8], -1) + rng.uniform(0, 1, (*places.shape, 2))
        bright = np.take_along_axis(pixels[rows], places, 1)[..., None] * 10
        return np.concatenate([where / 4 - 1, bright], -1).astype(np.float32), labels[rows]

    def loss(params: Any, points: Any, labels: Any) -> jax.Array:
        logits = model.apply({"params": params}, points)
        targets = optax.smooth_labels(jax.nn.one_hot(labels, 10), 0.1)
        return jnp.mean(optax.softmax_cross_entropy(logits, targets))

    def right(params: Any, points: Any, labels: Any) -> jax.Array:
        return jnp.mean(jnp.argmax(jnp.asarray(model.apply({"params": params}, points)), -1) == labels)

    rng = np.random.default_rng(99)
    held_out = [drawn(np.arange(1200, 1797), rng) for _ in range(4)]
    return without_state(
        lambda key: model.init(key, jnp.zeros((1, 24, 3)))["params"], loss,
        lambda rng: drawn(rng.permutation(1200)[: 1200 // share], rng), held_out, right, table="points",
    )  # fmt: skip


# -- the deep autoencoder of the K-FAC papers --------------------------------------------------------------------------


class Autoencoder(nn.Module):
    widths: tuple[int, ...] = (64, 256, 128, 64, 16, 64, 128, 256, 64)

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for k, width in enumerate(self.widths[1:], 1):
            x = nn.Dense(width)(x)
            x = x if k in (4, len(self.widths) - 1) else jnp.tanh(x)
        return x


def autoencoder(data_dir: Path, share: int) -> Problem:
    """Return the problem of reconstructing digits.

    The score is minus an image's cross-entropy in nats. N is 1,400.
    """
    del data_dir
    pixels = np.clip(load_digits().data / 16, 0, 1).astype(np.float32)
    pixels = pixels[np.random.RandomState(0).permutation(len(pixels))]
    model = Autoencoder()

    def loss(params: Any, x: Any) -> jax.Array:
        logits = kfac.mark_output(jnp.asarray(model.apply({"params": params}, x)), "bernoulli")
        return jnp.mean(jnp.sum(optax.sigmoid_binary_cross_entropy(logits, x), -1))

    return without_state(
        lambda key: model.init(key, jnp.zeros((1, 64)))["params"], loss,
        lambda rng: (pixels[rng.permutation(1400)[: 1400 // share]],), [(pixels[1400:],)],
    )  # fmt: skip


OTHERS: dict[str, Callable[[Path, int], Problem]] = {
    "denoising U-Net": denoising,
    "recurrent characters": recurrent,
    "masked autoencoder": masked,
    "set transformer": sets,
    "deep autoencoder": autoencoder,
}
