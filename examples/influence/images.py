"""Find the training images that support a prediction, and check the result by retraining without them.

python examples/influence/images.py    # print a table, and draw docs/influence.png
"""

import functools
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from matplotlib.figure import Figure
from scipy.stats import spearmanr
from sklearn.datasets import load_digits

import kfac
from scores import curvature, gradients, influence

Batch = tuple[jax.Array, jax.Array]
DECAY = 1e-2


def init(key: jax.Array, widths: tuple[int, ...]) -> list[dict[str, jax.Array]]:
    sizes = zip(jax.random.split(key, len(widths) - 1), widths, widths[1:], strict=False)
    return [{"kernel": jax.random.normal(k, (a, b)) * a**-0.5, "bias": jnp.zeros(b)} for k, a, b in sizes]


def network(params: list[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
    for layer in params[:-1]:
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
    return x @ params[-1]["kernel"] + params[-1]["bias"]


def losses(params: Any, batch: Batch) -> jax.Array:
    logits = kfac.mark_output(network(params, batch[0]), "categorical")
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1])


def loss(params: Any, batch: Batch) -> jax.Array:
    return losses(params, batch).mean()


def log_odds(params: Any, batch: Batch) -> jax.Array:
    """Return the log odds of the right class, which measure a prediction."""
    logits, label = network(params, batch[0]), batch[1][:, None]
    others = jnp.where(jnp.arange(logits.shape[-1]) == label, -jnp.inf, logits)
    return jnp.take_along_axis(logits, label, -1)[:, 0] - jax.nn.logsumexp(others, -1)


@functools.partial(jax.jit, static_argnames="steps")
def fit(params: Any, batch: Batch, kept: jax.Array, steps: int) -> Any:
    """Train on the images with a 1 in `kept`.

    Every step uses all these images, so the result depends only on the arguments.
    """
    tx = optax.adam(optax.cosine_decay_schedule(1e-2, steps))

    def objective(p):
        return kept @ losses(p, batch) / len(kept) + 0.5 * DECAY * optax.tree.vdot(p, p)

    def step(carry, _):
        params, state = carry
        updates, state = tx.update(jax.grad(objective)(params), state)
        return (optax.apply_updates(params, updates), state), None

    return lax.scan(step, (params, tx.init(params)), None, length=steps)[0][0]


def run(
    images: int = 300, hidden: int = 16, steps: int = 1000, subsets: int = 100, share: float = 0.3, queries: int = 20,
    seeds: int = 4, picture: Path | None = None,
) -> dict[str, np.ndarray]:  # fmt: skip
    """Return each query's rank correlation between predicted and measured changes over the left-out subsets."""
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(y))
    x, y = jnp.asarray(x[order] / 16, jnp.float32), jnp.asarray(y[order])
    batch, query = (x[:images], y[:images]), (x[images : images + queries], y[images : images + queries])
    starts = [init(key, (64, hidden, 10)) for key in jax.random.split(jax.random.key(0), seeds)]
    measure = jax.jit(log_odds)

    found: dict[str, Any] = {}
    before = np.zeros(queries)
    for start in starts:
        params = fit(start, batch, jnp.ones(images), steps)
        before += np.asarray(measure(params, query)) / seeds
        measured, examples = gradients(log_odds, params, query), gradients(losses, params, batch)
        operators: dict[str, Any] = curvature(loss, params, [batch], DECAY, fisher="expected", key=jax.random.key(0))
        for name, operator in (operators | {"gradients alone": None}).items():
            found[name] = found.get(name, 0) + influence(operator, params, measured, examples) / seeds

    rng, kept = np.random.default_rng(1), np.ones((subsets, images), np.float32)
    changes = np.zeros((seeds, subsets, queries))
    for k, row in enumerate(kept):
        row[rng.choice(images, round(share * images), replace=False)] = 0
        for seed, start in enumerate(starts):
            changes[seed, k] = measure(fit(start, batch, jnp.asarray(row), steps), query) - before
        print(f"\r{k + 1} of {subsets} subsets left out", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)

    def ranks(first, second):
        return np.array([spearmanr(a, b).statistic for a, b in zip(first.T, second.T, strict=True)])

    result = {name: ranks((1 - kept) @ scores.T, changes.mean(0)) for name, scores in found.items()}
    # Roughly an upper bound for predictions: the agreement between two halves of the initial weights.
    result["retraining, half of the starts"] = ranks(changes[::2].mean(0), changes[1::2].mean(0))
    if picture:
        draw(batch, query, found["EK-FAC"], (1 - kept) @ found["EK-FAC"].T, changes.mean(0), picture)
    return result


def draw(
    batch: Batch, query: Batch, scores: np.ndarray, predicted: np.ndarray, changes: np.ndarray, path: Path
) -> None:
    """Draw all subsets, and for three predictions the images that speak most for and against them."""
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    parts: Any = figure.subfigures(1, 2, width_ratios=(1, 1.7))
    left, right = parts
    axis = left.subplots()
    axis.plot(predicted[:, :5], changes[:, :5], ".", markersize=4)
    axis.axline((0, 0), slope=1, color="0.7")
    axis.set(xlabel="change of log odds, predicted", ylabel="after training again", title="subsets left out")
    shown = 4
    grid = right.subplots(3, 1 + 2 * shown)
    for k, row in enumerate(grid):
        # An image speaks for the prediction if the prediction falls without the image.
        best = np.argsort(scores[k])
        pictures = [(query, k), *((batch, i) for i in (*best[:shown], *best[: -shown - 1 : -1]))]
        for cell, ((x, y), i) in zip(row, pictures, strict=True):
            cell.imshow(np.asarray(x[i]).reshape(8, 8), cmap="gray_r")
            cell.set(xticks=[], yticks=[], xlabel=int(y[i]))
    grid[0, 0].set_title("prediction", fontsize=9)
    grid[0, 2].set_title("for it", fontsize=9, loc="left")
    grid[0, 2 + shown].set_title("against it", fontsize=9, loc="left")
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    print("| | rank correlation, mean | least | largest |")
    for name, r in run(picture=Path(__file__).parents[2] / "docs" / "influence.png").items():
        print(f"| {name} | {r.mean():.2f} | {r.min():.2f} | {r.max():.2f} |")
