"""Define the eight held-out networks of HELD_OUT.md for `networks.py`.

`held_out_data.py` writes their data. No rule or default was chosen on these networks, and none may be.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from sklearn.datasets import load_breast_cancer, load_sample_images

from files import UserError
from other_networks import Batch, Block, Problem

Arrays = tuple[np.ndarray, ...]
Draw = Callable[[Arrays, np.random.Generator], Batch]


def read(folder: Path, name: str, *keys: str) -> Arrays:
    """Return arrays from a file that `held_out_data.py` wrote."""
    path = folder / f"{name}.npz"
    if not path.is_file():
        raise UserError(f"--data-dir {folder} has no {path.name}; examples/large_batch/held_out_data.py writes it")
    with np.load(path) as file:
        return tuple(file[key] for key in keys)


def problem(
    model: nn.Module,
    data: Arrays,
    held: int,
    share: int,
    loss: Callable[..., jax.Array],
    *,
    score: Callable[..., jax.Array] | None = None,
    draw: Draw = lambda rows, rng: rows,
    inputs: int = 1,
    table: str = "^$",
) -> Problem:
    """Return the problem of training a model on all rows but the last `held`, which measure the score.

    Args:
      data: arrays with an example per row, or per pair of rows if `draw` says so.
      share: N divided by the batch size.
      loss: `loss(outputs, *targets)` returns the mean loss.
      score: `score(outputs, *targets)` returns the score of a batch. By default, it is minus the loss.
      draw: `draw(rows, rng)` returns a batch from some rows of `data`, for instance with noise.
      inputs: number of the batch's arrays that the model reads. The other arrays are targets.
      table: regular expression for tables and heads, which other methods treat as vectors.
    """
    count = len(data[0]) - held
    rng = np.random.default_rng(99)
    parts = [slice(k, k + 250) for k in range(count, len(data[0]), 250)]
    validation = [tuple(map(jnp.asarray, draw(tuple(x[part] for x in data), rng))) for part in parts]

    def init(key: jax.Array) -> tuple[Any, Any]:
        variables = model.init(key, *(x[:1] for x in validation[0][:inputs]), train=False)
        return variables["params"], variables.get("batch_stats", {})

    def outputs(params: Any, state: Any, batch: Batch, train: bool) -> Any:
        variables = {"params": params, "batch_stats": state}
        return model.apply(variables, *batch[:inputs], train=train, mutable=["batch_stats"])

    def mean_loss(params: Any, state: Any, *batch: Any) -> tuple[jax.Array, Any]:
        found, new = outputs(params, state, batch, train=True)
        return loss(found, *batch[inputs:]), new.get("batch_stats", {})

    @jax.jit
    def measured(params: Any, state: Any, *batch: Any) -> jax.Array:
        found, _ = outputs(params, state, batch, train=False)
        return -loss(found, *batch[inputs:]) if score is None else score(found, *batch[inputs:])

    def batches(seed: int, steps: int) -> Iterator[Batch]:
        for step in range(steps):
            rng = np.random.default_rng((seed, step))
            rows = rng.permutation(count)[: count // share]
            yield tuple(map(jnp.asarray, draw(tuple(x[rows] for x in data), rng)))

    def scored(params: Any, state: Any) -> float:
        weights = [len(batch[0]) for batch in validation]
        return float(np.average([measured(params, state, *batch) for batch in validation], weights=weights))

    return Problem(init, mean_loss, batches, scored, table=table)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


def accuracy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return jnp.mean(jnp.argmax(logits, -1) == labels)


def squared_error(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    return jnp.mean((outputs - targets) ** 2)


def mean_where(values: jax.Array, counted: jax.Array) -> jax.Array:
    return jnp.sum(values * counted) / jnp.sum(counted)


# -- large batches -----------------------------------------------------------------------------------------------------


class Molecules(nn.Module):
    """Predict a number from a graph by messages along its bonds (Gilmer et al. 2017)."""

    width: int = 64

    @nn.compact
    def __call__(self, atoms: jax.Array, bonds: jax.Array, train: bool) -> jax.Array:
        del train
        x = nn.Embed(11, self.width)(atoms)
        edges = jax.nn.one_hot(bonds - 1, 3)  # no bond is a row of zeros
        for _ in range(4):
            sent = nn.Dense(3 * self.width)(x).reshape(*x.shape[:2], 3, self.width)
            received = jnp.einsum("nijb,njbd->nid", edges, sent)
            x = nn.LayerNorm()(x + nn.Dense(self.width)(nn.relu(nn.Dense(self.width)(x + received))))
        pooled = jnp.einsum("nid,ni->nd", x, 0.1 * (atoms > 0))
        return nn.Dense(1)(nn.relu(nn.Dense(self.width)(pooled)))[:, 0]


def molecules(data_dir: Path, share: int) -> Problem:
    """Return the problem of predicting boiling points, in standard deviations. N is 8,000."""
    atoms, bonds, found = read(data_dir, "molecules", "atoms", "bonds", "points")
    targets = ((found - found[:8000].mean()) / found[:8000].std()).astype(np.float32)
    return problem(
        Molecules(), (atoms.astype(np.int32), bonds, targets), 1000, share, squared_error, inputs=2, table="Embed"
    )


class Table(nn.Module):
    """Return a logit for each row of a table (the residual network of Gorishniy et al. 2021)."""

    width: int = 64

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        del train
        x = nn.Dense(self.width)(x)
        for _ in range(2):
            x = x + nn.Dense(self.width)(nn.relu(nn.Dense(2 * self.width)(nn.LayerNorm()(x))))
        return nn.Dense(1)(nn.relu(nn.LayerNorm()(x)))[:, 0]


def breast_cancer(data_dir: Path, share: int) -> Problem:
    """Return the problem of telling tumours apart by 30 measurements. N is 400."""
    del data_dir
    rows, labels = load_breast_cancer(return_X_y=True)
    order = np.random.RandomState(0).permutation(len(labels))
    rows, labels = rows[order], labels[order].astype(np.float32)
    scaled = ((rows - rows[:400].mean(0)) / rows[:400].std(0)).astype(np.float32)

    def loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
        return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, labels))

    return problem(Table(), (scaled, labels), len(labels) - 400, share, loss)


class Speller(nn.Module):
    """Predict a word's sounds from its letters and the sounds before (Vaswani et al. 2017). The value 0 pads."""

    sounds: int
    width: int = 64

    @nn.compact
    def __call__(self, letters: jax.Array, before: jax.Array, train: bool) -> jax.Array:
        del train
        attend = functools.partial(nn.MultiHeadDotProductAttention, 4)

        def embedded(tokens: jax.Array, vocabulary: int, name: str) -> jax.Array:
            places = self.param(f"{name}_positions", nn.initializers.normal(0.02), (tokens.shape[1], self.width))
            return nn.Embed(vocabulary, self.width, name=f"{name}_table")(tokens) + places

        def widened(x: jax.Array) -> jax.Array:
            return x + nn.Dense(self.width)(nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x))))

        seen = nn.make_attention_mask(before >= 0, letters > 0)
        x = embedded(letters, 27, "letter")
        for _ in range(2):
            y = nn.LayerNorm()(x)
            x = widened(x + attend()(y, y, mask=nn.make_attention_mask(letters > 0, letters > 0)))
        encoded = nn.LayerNorm()(x)
        x = embedded(before, self.sounds, "sound")
        for _ in range(2):
            y = nn.LayerNorm()(x)
            x = x + attend()(y, y, mask=nn.make_causal_mask(before))
            x = widened(x + attend()(nn.LayerNorm()(x), encoded, mask=seen))
        return nn.Dense(self.sounds, name="head")(nn.LayerNorm()(x))


def spelling(data_dir: Path, share: int) -> Problem:
    """Return the problem of predicting the sounds of words, and the end of their sequence. N is 20,000."""
    letters, sounds = read(data_dir, "spelling", "letters", "sounds")
    end = int(sounds.max()) + 1  # also the start
    before = np.pad(sounds, ((0, 0), (1, 0)), constant_values=end)
    after = np.pad(sounds, ((0, 0), (0, 1)))
    lengths = (sounds > 0).sum(1)
    after[np.arange(len(after)), lengths] = end
    counted = (np.arange(after.shape[1]) <= lengths[:, None]).astype(np.float32)

    def loss(logits: jax.Array, after: jax.Array, counted: jax.Array) -> jax.Array:
        return mean_where(optax.softmax_cross_entropy_with_integer_labels(logits, after), counted)

    return problem(
        Speller(end + 1), (letters, before, after, counted), 1000, share, loss, inputs=2, table="table|positions|head"
    )  # fmt: skip


class Velocity(nn.Module):
    """Predict the velocity of a patch's pixels: a transformer with adaptive layer norm (Peebles & Xie 2023)."""

    width: int = 64

    @nn.compact
    def __call__(self, x: jax.Array, time: jax.Array, train: bool) -> jax.Array:
        del train
        tokens = x.reshape(-1, 4, 2, 4, 2, 3).swapaxes(2, 3).reshape(-1, 16, 12)
        angles = time[:, None] * jnp.exp(jnp.linspace(0, 5, 16))
        at = nn.silu(nn.Dense(self.width)(jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)))
        h = nn.Dense(self.width)(tokens) + self.param("positions", nn.initializers.normal(0.02), (16, self.width))
        normed = functools.partial(nn.LayerNorm, use_bias=False, use_scale=False)
        for _ in range(2):
            change = nn.Dense(6 * self.width, kernel_init=nn.initializers.zeros)(at)[:, None]
            shift, scale, gate, wide_shift, wide_scale, wide_gate = jnp.split(change, 6, -1)
            y = normed()(h) * (1 + scale) + shift
            h = h + gate * nn.MultiHeadDotProductAttention(4)(y)
            y = normed()(h) * (1 + wide_scale) + wide_shift
            h = h + wide_gate * nn.Dense(self.width)(nn.gelu(nn.Dense(4 * self.width)(y)))
        h = nn.Dense(12, kernel_init=nn.initializers.zeros)(nn.LayerNorm()(h))
        return h.reshape(-1, 4, 4, 2, 2, 3).swapaxes(2, 3).reshape(x.shape)


def flow(data_dir: Path, share: int) -> Problem:
    """Return the problem of rectified flow from noise to patches of 8 x 8 pixels (Liu et al. 2023). N is 10,000.

    The right quarter of each photograph has the validation patches.
    """
    del data_dir
    rng = np.random.RandomState(0)

    def patches(photo: np.ndarray, left: int, right: int, count: int) -> list[np.ndarray]:
        rows, columns = rng.randint(photo.shape[0] - 8, size=count), rng.randint(left, right - 8, size=count)
        return [photo[i : i + 8, j : j + 8] for i, j in zip(rows, columns, strict=True)]

    photos = load_sample_images().images
    found = [patch for photo in photos for patch in patches(photo, 0, 480, 5000)]
    found += [patch for photo in photos for patch in patches(photo, 480, 640, 500)]
    pixels = np.stack(found).astype(np.float32) / 127.5 - 1

    def draw(rows: Arrays, rng: np.random.Generator) -> Batch:
        (end,) = rows
        start = rng.normal(size=end.shape).astype(np.float32)
        time = rng.uniform(0, 1, len(end)).astype(np.float32)
        now = time[:, None, None, None]
        return (1 - now) * start + now * end, time, end - start

    return problem(Velocity(), (pixels,), 1000, share, squared_error, draw=draw, inputs=2, table="positions")


# -- small batches -----------------------------------------------------------------------------------------------------


class Speech(nn.Module):
    """Classify spoken words by convolutions over time (TC-ResNet, Choi et al. 2019)."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        norm = functools.partial(nn.BatchNorm, use_running_average=not train, momentum=0.9)
        x = nn.Conv(32, (3,), use_bias=False)(x)
        for width in (32, 48, 64):
            y = nn.relu(norm()(nn.Conv(width, (9,), (2,), use_bias=False)(x)))
            y = norm()(nn.Conv(width, (9,), use_bias=False)(y))
            x = nn.relu(y + norm()(nn.Conv(width, (1,), (2,), use_bias=False)(x)))
        return nn.Dense(20)(x.mean(1))


def speech(data_dir: Path, share: int) -> Problem:
    """Return the problem of classifying 20 spoken words. N is 4,000."""
    sounds, labels = read(data_dir, "speech", "sounds", "labels")
    scaled = (sounds - sounds[:4000].mean((0, 1))) / sounds[:4000].std((0, 1))
    return problem(Speech(), (scaled, labels), 500, share, cross_entropy, score=accuracy)


class Digits(nn.Module):
    """Classify images by convolutions, group norm and attention over channels (Hu et al. 2018)."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        del train
        for width in (16, 32, 64):
            x = nn.relu(nn.GroupNorm(8)(nn.Conv(width, (3, 3))(x)))
            x = nn.max_pool(x, (2, 2), (2, 2)) if width < 64 else x
        weights = nn.sigmoid(nn.Dense(64)(nn.relu(nn.Dense(16)(x.mean((1, 2))))))
        return nn.Dense(10)((x * weights[:, None, None]).mean((1, 2)))


def digits(data_dir: Path, share: int) -> Problem:
    """Return the problem of classifying handwritten digits. N is 8,000."""
    pixels, labels = read(data_dir, "digits", "pixels", "labels")
    scaled = ((pixels - pixels[:8000].mean()) / pixels[:8000].std()).astype(np.float32)[..., None]
    return problem(Digits(), (scaled, labels), len(labels) - 8000, share, cross_entropy)


class MaskedWords(nn.Module):
    """Predict hidden words from the words on both sides (Devlin et al. 2019)."""

    vocabulary: int = 2048
    width: int = 64

    @nn.compact
    def __call__(self, words: jax.Array, train: bool) -> jax.Array:
        del train
        places = self.param("positions", nn.initializers.normal(0.02), (words.shape[1], self.width))
        x = nn.Embed(self.vocabulary + 1, self.width)(words) + places
        for _ in range(2):
            x = Block()(x)
        return nn.Dense(self.vocabulary, name="head")(nn.LayerNorm()(x))


def masked_words(data_dir: Path, share: int) -> Problem:
    """Return the problem of predicting 15% of the words of a sequence. N is 12,000."""
    (words,) = read(data_dir, "bible", "words")
    model = MaskedWords()

    def draw(rows: Arrays, rng: np.random.Generator) -> Batch:
        (words,) = rows
        hidden = rng.uniform(size=words.shape) < 0.15
        return np.where(hidden, model.vocabulary, words), words, hidden.astype(np.float32)

    def loss(logits: jax.Array, words: jax.Array, hidden: jax.Array) -> jax.Array:
        return mean_where(optax.softmax_cross_entropy_with_integer_labels(logits, words), hidden)

    return problem(model, (words,), len(words) - 12_000, share, loss, draw=draw, table="Embed|positions|head")


class Languages(nn.Module):
    """Name a word's language by two LSTM layers over its letters (Hochreiter & Schmidhuber 1997)."""

    width: int = 96

    @nn.compact
    def __call__(self, letters: jax.Array, train: bool) -> jax.Array:
        del train
        x = nn.Embed(64, 32)(letters)
        for _ in range(2):
            x = nn.RNN(nn.LSTMCell(self.width))(x)
        return nn.Dense(10)(x[:, -1])


def languages(data_dir: Path, share: int) -> Problem:
    """Return the problem of naming the language of a word. N is 40,000."""
    letters, labels = read(data_dir, "languages", "letters", "labels")
    return problem(Languages(), (letters, labels), 4000, share, cross_entropy, score=accuracy, table="Embed")


class HeldOut(NamedTuple):
    """Hold a problem, N divided by the batch size, the number of steps, and K-FAC's documented rate."""

    make: Callable[[Path, int], Problem]
    share: int
    steps: int
    rate: float


HELD_OUT: dict[str, HeldOut] = {
    "held out: molecules": HeldOut(molecules, 20, 100, 0.1),
    "held out: breast cancer": HeldOut(breast_cancer, 4, 100, 0.1),
    "held out: spelling to sounds": HeldOut(spelling, 40, 100, 0.1),
    "held out: flow of patches": HeldOut(flow, 20, 100, 0.1),
    "held out: speech": HeldOut(speech, 100, 400, 0.05),
    "held out: digits": HeldOut(digits, 125, 300, 0.05),
    "held out: masked words": HeldOut(masked_words, 1500, 400, 0.05),
    "held out: languages": HeldOut(languages, 625, 400, 0.05),
}
