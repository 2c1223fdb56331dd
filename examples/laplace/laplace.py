"""Calibrate an overconfident classifier by Laplace approximations of the last layer and of all layers.

python examples/laplace/laplace.py    # print a table, and draw docs/laplace.png
"""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from sklearn.datasets import load_digits

import kfac

Batch = tuple[jax.Array, jax.Array]
TAUS = 10.0 ** np.linspace(-2, 3, 51)  # prior precisions


class Scores(NamedTuple):
    accuracy: float
    nll: float
    calibration: float  # the expected calibration error
    precision: float = 0.0  # the prior's precision


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


def digits(seed: int, train: int, noise: float) -> tuple[Batch, Batch]:
    """Return `train` training images, and all other images for the test. Pixel noise makes the classes overlap."""
    data, rng = load_digits(), np.random.default_rng(seed)
    order = rng.permutation(len(data.target))
    x = jnp.asarray(data.data[order] / 16 + noise * rng.normal(size=data.data.shape), jnp.float32)
    y = jnp.asarray(data.target[order])
    return (x[:train], y[:train]), (x[train:], y[train:])


@functools.partial(jax.jit, static_argnames="steps")
def fit(params: Any, batch: Batch, tau: float, steps: int) -> Any:
    """Maximise the posterior density under a normal prior with precision `tau`."""
    tx = optax.adam(optax.cosine_decay_schedule(3e-3, steps))
    density = lambda p: loss(p, batch) + 0.5 * tau / len(batch[1]) * optax.tree.vdot(p, p)  # noqa: E731

    def step(carry, _):
        params, state = carry
        updates, state = tx.update(jax.grad(density)(params), state)
        return (optax.apply_updates(params, updates), state), None

    return jax.lax.scan(step, (params, tx.init(params)), None, length=steps)[0][0]


def bins(probabilities: jax.Array, labels: jax.Array, count: int = 15) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Group predictions by confidence, and return each bin's share, mean confidence and accuracy."""
    confidence, right = np.asarray(probabilities.max(-1)), np.asarray(probabilities.argmax(-1) == labels)
    place = np.minimum((confidence * count).astype(int), count - 1)
    number = np.bincount(place, minlength=count)
    mean = lambda x: np.bincount(place, x, count) / np.maximum(number, 1)  # noqa: E731
    return number / len(place), mean(confidence), mean(right)


def score(probabilities: jax.Array, labels: jax.Array, precision: float = 0.0) -> Scores:
    share, confidence, right = bins(probabilities, labels)
    nll = -jnp.mean(jnp.log(probabilities[jnp.arange(len(labels)), labels]))
    accuracy = jnp.mean(probabilities.argmax(-1) == labels)
    return Scores(float(accuracy), float(nll), float(np.sum(share * np.abs(confidence - right))), precision)


def laplace(
    params: Any, batch: Batch, rules: dict[str, str]
) -> tuple[Callable[[float], kfac.curvature.BlockOperator], np.ndarray]:
    """Return the posterior's precision and the log marginal likelihoods.

    The posterior's precision is a function of the prior's precision. The likelihoods are for the precisions `TAUS`.
    """
    layers = kfac.find_layers(loss, params, batch, rules=rules)
    parts = [jax.tree.map(lambda x, k=k: x[k : k + 50], batch) for k in range(0, len(batch[1]), 50)]
    factors = kfac.curvature.estimate_factors(loss, layers, params, parts, fisher="expected", key=jax.random.key(0))
    fisher, n = kfac.curvature.block_operator(layers, factors), len(batch[1])
    # The prior covers the posterior's parameters: `0 * fisher + 1` is the identity for them, and zero elsewhere.
    square = optax.tree.vdot(params, (0 * fisher + 1) @ params)

    def evidence(tau):
        prior = 0.5 * fisher.size * jnp.log(tau) - 0.5 * tau * square
        return prior - n * loss(params, batch) - 0.5 * (n * fisher + tau).logdet()

    return lambda tau: n * fisher + tau, np.asarray(jax.jit(jax.vmap(evidence))(TAUS))


def choose(
    params: Any, batch: Batch, rules: dict[str, str], steps: int
) -> tuple[Any, kfac.curvature.BlockOperator, float, Any]:
    """Alternate between fitting and choosing the prior's precision by the marginal likelihood.

    See MacKay (1992) and Immer et al. (2021). A network without a prior is not at a posterior maximum, and has almost
    no curvature. Its approximation would be too wide.
    """
    tau = 1.0
    for _ in range(6):
        params, before = fit(params, batch, tau, steps), tau
        posterior, curve = laplace(params, batch, rules)
        tau = float(TAUS[np.argmax(curve)])
        if tau == before:
            break
    return params, posterior(tau), tau, curve


def predict(params: Any, precision: kfac.curvature.BlockOperator, x: jax.Array, draws: int) -> jax.Array:
    """Return probabilities of the network, linearised at `params`.

    Logits become less sharp if the posterior's draws differ.
    """
    covariance, logits = precision.inv(), network(params, x)

    def change(key):
        return jax.jvp(lambda p: network(p, x), (params,), (covariance.sample(key),))[1]

    variance = jnp.mean(jax.lax.map(change, jax.random.split(jax.random.key(1), draws)) ** 2, axis=0)
    return jax.nn.softmax(logits / jnp.sqrt(1 + jnp.pi / 8 * variance))  # MacKay 1992


def run(
    train: int = 500, hidden: int = 32, steps: int = 3000, draws: int = 200, seed: int = 0, picture: Path | None = None
) -> dict[str, Scores]:
    batch, (x, labels) = digits(seed, train, noise=0.5)
    start = fit(init(jax.random.key(seed), (64, hidden, hidden, 10)), batch, 0.0, steps)
    found = {"no prior": (jax.nn.softmax(network(start, x)), 0.0)}
    curves = {}
    for name, rules in {"last layer": {"^[01]/": "skip"}, "all layers": {}}.items():
        params, precision, tau, curves[name] = choose(start, batch, rules, steps // 4)
        found[f"{name}: its prior alone"] = jax.nn.softmax(network(params, x)), tau
        found[f"{name}: Laplace"] = jax.jit(predict, static_argnums=3)(params, precision, x, draws), tau
    if picture:
        drawn = {name: p for name, (p, _) in found.items() if "alone" not in name}
        draw(drawn, labels, curves, picture)
    return {name: score(p, labels, tau) for name, (p, tau) in found.items()}


def draw(probabilities: dict[str, jax.Array], labels: jax.Array, curves: dict[str, np.ndarray], path: Path) -> None:
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot([0, 1], [0, 1], color="0.7")
    for name, p in probabilities.items():
        share, confidence, accuracy = bins(p, labels, 10)
        left.plot(confidence[share > 0.005], accuracy[share > 0.005], "o-", label=name)
    left.set(xlabel="confidence", ylabel="share of these that is right")
    left.legend()
    for name, curve in curves.items():
        right.semilogx(TAUS, curve - np.max(curve), label=name, color=f"C{1 + list(curves).index(name)}")
    right.set(xlabel="precision of the prior", ylabel="log marginal likelihood, less its largest", ylim=(-200, 10))
    right.legend()
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    print("| seed | | accuracy | negative log-likelihood | expected calibration error | precision of the prior |")
    for seed in range(3):
        picture = Path(__file__).parents[2] / "docs" / "laplace.png" if seed == 0 else None
        for name, s in run(seed=seed, picture=picture).items():
            print(f"| {seed} | {name} | {s.accuracy:.1%} | {s.nll:.3f} | {s.calibration:.3f} | {s.precision:.3g} |")
        sys.stdout.flush()
