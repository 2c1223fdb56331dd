"""Learn two tasks in sequence, with a Kronecker-factored penalty against forgetting the first task.

python examples/continual/continual.py    # print a table, and draw docs/continual.png
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
from sklearn.datasets import load_digits

import kfac

Batch = tuple[jax.Array, jax.Array]
STRENGTHS = 10.0 ** np.arange(-1, 4.5, 0.5)  # of the penalty; 1 matches the posterior


def init(key: jax.Array, widths: tuple[int, ...]) -> list[dict[str, jax.Array]]:
    sizes = zip(jax.random.split(key, len(widths) - 1), widths, widths[1:], strict=False)
    return [{"kernel": jax.random.normal(k, (a, b)) * (2 / a) ** 0.5, "bias": jnp.zeros(b)} for k, a, b in sizes]


def network(params: list[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["kernel"] + layer["bias"])
    return x @ params[-1]["kernel"] + params[-1]["bias"]


def loss(params: Any, batch: Batch) -> jax.Array:
    logits = kfac.mark_output(network(params, batch[0]), "categorical")
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()


def accuracy(params: Any, batch: Batch) -> jax.Array:
    return jnp.mean(network(params, batch[0]).argmax(-1) == batch[1])


def tasks(seed: int, train: int) -> list[tuple[Batch, Batch]]:
    """Return training and test images for two tasks: digits, and digits with permuted pixels."""
    data, rng = load_digits(), np.random.default_rng(seed)
    order = rng.permutation(len(data.target))
    y = jnp.asarray(data.target[order])
    found = []
    for pixels in (np.arange(64), rng.permutation(64)):
        x = jnp.asarray(data.data[order][:, pixels] / 16, jnp.float32)
        found.append(((x[:train], y[:train]), (x[train:], y[train:])))
    return found


def penalty(params: Any, anchor: Any, curvature: Any) -> jax.Array:
    """Return half the squared change from `anchor` in the metric of `curvature`.

    A diagonal `curvature` is a tree.
    """
    change = jax.tree.map(jnp.subtract, params, anchor)
    product = (
        curvature @ change if isinstance(curvature, kfac.curvature.BlockOperator) else optax.tree.mul(curvature, change)
    )
    return 0.5 * optax.tree.vdot(change, product)


@functools.partial(jax.jit, static_argnames="steps")
def fit(params: Any, batch: Batch, curvature: Any, strength: float, steps: int) -> Any:
    """Train with Adam on all images.

    If `curvature` is not None, the loss includes `strength` times the penalty around the initial parameters.
    """
    tx, anchor = optax.adam(optax.cosine_decay_schedule(3e-3, steps)), params

    def objective(p):
        return loss(p, batch) + (0 if curvature is None else strength * penalty(p, anchor, curvature))

    def step(carry, _):
        params, state = carry
        updates, state = tx.update(jax.grad(objective)(params), state)
        return (optax.apply_updates(params, updates), state), None

    return lax.scan(step, (params, tx.init(params)), None, length=steps)[0][0]


def curvatures(params: Any, batch: Batch) -> dict[str, Any]:
    """Return the first task's curvature in Kronecker form, its diagonal, and a scaled identity."""
    layers = kfac.find_layers(loss, params, batch)
    parts = [jax.tree.map(lambda x, k=k: x[k : k + 100], batch) for k in range(0, len(batch[1]), 100)]
    factors = kfac.curvature.estimate_factors(loss, layers, params, parts, fisher="expected", key=jax.random.key(0))
    fisher = kfac.curvature.block_operator(layers, factors)
    mean = fisher.trace() / fisher.size
    plain = jax.tree.map(lambda x: jnp.full_like(x, mean), params)
    return {"identity": plain, "diagonal": fisher.diagonal(), "Kronecker": fisher}


def run(
    train: int = 1000, hidden: int = 64, steps: int = 500, seeds: int = 3, picture: Path | None = None
) -> dict[str, np.ndarray]:
    """Return the accuracies on both tasks after training, by penalty: `[strengths, seeds, 2]`."""
    found: dict[str, Any] = {}
    for seed in range(seeds):
        (first, test), (second, other) = tasks(seed, train)
        params = fit(init(jax.random.key(seed), (64, hidden, hidden, 10)), first, None, 0.0, steps)
        both = jax.jit(lambda p, test=test, other=other: jnp.stack([accuracy(p, test), accuracy(p, other)]))
        found.setdefault("the first task alone", [[]])[0].append(both(params))
        found.setdefault("no penalty", [[]])[0].append(both(fit(params, second, None, 0.0, steps)))
        joint = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), first, second)
        found.setdefault("both at once", [[]])[0].append(both(fit(params, joint, None, 0.0, steps)))
        for name, curvature in curvatures(params, first).items():
            rows = found.setdefault(name, [[] for _ in STRENGTHS])
            for row, strength in zip(rows, STRENGTHS, strict=True):
                row.append(both(fit(params, second, curvature, float(strength), steps)))
        print(f"{seed + 1} of {seeds} seeds", file=sys.stderr, flush=True)
    result = {name: np.asarray(rows) for name, rows in found.items()}
    if picture:
        draw(result, picture)
    return result


def best(accuracies: np.ndarray) -> int:
    """Return the index of the strength with the highest mean accuracy over both tasks."""
    return int(np.argmax(accuracies.mean((1, 2))))


def draw(result: dict[str, np.ndarray], path: Path) -> None:
    figure = Figure(figsize=(5.5, 4), layout="constrained")
    axis = figure.subplots()
    for name, accuracies in result.items():
        mean = accuracies.mean(1)
        axis.plot(*mean.T, "o-" if len(mean) > 1 else "*", markersize=4 if len(mean) > 1 else 11, label=name)
    axis.set(xlabel="accuracy on the first task, after both", ylabel="accuracy on the second task")
    axis.legend()
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    print("| penalty | strength | first task | second task | mean |")
    for name, found in run(picture=Path(__file__).parents[2] / "docs" / "continual.png").items():
        k = best(found)
        strength = f"{STRENGTHS[k]:.3g}" if len(found) > 1 else ""
        first, second = found[k].mean(0)
        print(f"| {name} | {strength} | {first:.1%} | {second:.1%} | {(first + second) / 2:.1%} |")
