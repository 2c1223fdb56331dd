"""Train nine ordinary scripts with AdamW, and with K-FAC as in docs/getting_started.md, without tuning K-FAC.

    python examples/adoptions/adoptions.py            # runs missing in results.jsonl, then the table
    python examples/adoptions/adoptions.py --only haiku --seeds 0 --results /tmp/mine.jsonl

The scripts use:

- Flax linen (convolutions, batch norm, dropout),
- nnx (a vision transformer),
- equinox (a recurrent network),
- haiku (an autoencoder),
- plain JAX (a GPT, and a regression with a learned variance),
- a perceptron on four simulated devices, with `jit` over a mesh, with `shard_map`, and with `pmap`.

K-FAC has the rate 0.1, and AdamW has the best rate from four. Both have the same batches, number of steps and
`warmup_linear_decay`. The data come with scikit-learn and Python. The score is the held-out loss in nats. The seconds
are the first run's wall-clock time, including compiling.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + (
    " --xla_force_host_platform_device_count=4 --xla_cpu_enable_concurrency_optimized_scheduler=false"
)

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from sklearn.datasets import load_digits, make_friedman1
from sklearn.model_selection import train_test_split

import kfac

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / folder) for folder in (".", "language_model")]
import topics  # noqa: E402
from transformer import Transformer  # noqa: E402

RATE, RATES = 0.1, (0.003, 0.01, 0.03, 0.1)
OURS, THEIRS = ("kfac", RATE), tuple(("adamw", rate) for rate in RATES)
RESULTS = Path(__file__).parent / "results.jsonl"


class Script(NamedTuple):
    """A model with its data. `held` is the model's mutable state, such as batch-norm averages."""

    loss: Callable[..., Any]  # (params, held, key, batch) -> (loss, held)
    start: Callable[[jax.Array], tuple[Any, Any]]  # key -> (params, held)
    data: tuple[Any, Any]  # training data and held-out data, each a tuple of arrays
    evaluate: Callable[[Any, Any, Any], Any]  # (params, held, data) -> (loss, accuracy)
    steps: int = 40  # four epochs of the digits; with more, all models memorise them
    size: int = 128

    def batches(self, seed: int) -> Iterator[Any]:
        order, rows = np.random.default_rng(seed), len(self.data[0][0])
        for _ in range(self.steps):
            chosen = order.choice(rows, self.size, replace=False)
            yield jax.tree.map(lambda x, chosen=chosen: x[chosen], self.data[0])


def stateless(init: Any, evaluate: Any, data: Any, **sizes: int) -> Script:
    """Return the script of a model without mutable state, from `init(key)` and `evaluate(params, batch)`."""
    return Script(
        lambda params, held, key, batch: (evaluate(params, batch)[0], held), lambda key: (init(key), None), data,
        lambda params, held, batch: evaluate(params, batch), **sizes,
    )  # fmt: skip


def scored(logits: Any, labels: Any) -> tuple[jax.Array, jax.Array]:
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return loss, jnp.mean(logits.argmax(-1) == labels)


def digits(*shape: int) -> tuple[Any, Any]:
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, *shape)
    images, held_out, labels, expected = train_test_split(images, labels, train_size=1400, random_state=0)
    return (images, labels), (held_out, expected)


def linen() -> Script:
    class Network(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, train: bool) -> jax.Array:
            for width in (16, 32):
                x = nn.Conv(width, (3, 3), use_bias=False)(x)
                x = nn.max_pool(nn.relu(nn.BatchNorm(not train, momentum=0.9)(x)), (2, 2), (2, 2))
            return nn.Dense(10)(nn.Dropout(0.3, deterministic=not train)(x.reshape(len(x), -1)))

    model = Network()

    def loss(params: Any, held: Any, key: Any, batch: Any) -> Any:
        logits, new = model.apply(
            {"params": params, **held}, batch[0], train=True, mutable=["batch_stats"], rngs={"dropout": key}
        )
        return scored(logits, batch[1])[0], new

    def start(key: jax.Array) -> Any:
        variables = model.init(key, jnp.zeros((1, 8, 8, 1)), train=False)
        return variables.pop("params"), variables

    def evaluate(params: Any, held: Any, batch: Any) -> Any:
        return scored(model.apply({"params": params, **held}, batch[0], train=False), batch[1])

    return Script(loss, start, digits(8, 8, 1), evaluate)


class ViT(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, d: int = 64, depth: int = 2):
        self.patches = nnx.Conv(1, d, (2, 2), (2, 2), padding="VALID", rngs=rngs)
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (16, d)))
        self.norms = nnx.List([nnx.LayerNorm(d, rngs=rngs) for _ in range(2 * depth + 1)])
        self.attention = nnx.List([nnx.MultiHeadAttention(4, d, decode=False, rngs=rngs) for _ in range(depth)])
        self.up = nnx.List([nnx.Linear(d, 4 * d, rngs=rngs) for _ in range(depth)])
        self.down = nnx.List([nnx.Linear(4 * d, d, rngs=rngs) for _ in range(depth)])
        self.head = nnx.Linear(d, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.patches(x).reshape(len(x), 16, -1) + self.positions[...]
        for k, (attention, up, down) in enumerate(zip(self.attention, self.up, self.down, strict=True)):
            x = x + attention(self.norms[2 * k](x))
            x = x + down(nnx.gelu(up(self.norms[2 * k + 1](x))))
        return self.head(self.norms[-1](x).mean(1))


def of_nnx() -> Script:
    graph, _, rest = nnx.split(ViT(nnx.Rngs(0)), nnx.Param, ...)  # type: ignore[misc]

    def evaluate(params: Any, batch: Any) -> Any:
        return scored(nnx.merge(graph, params, rest)(batch[0]), batch[1])

    return stateless(lambda key: nnx.state(ViT(nnx.Rngs(key)), nnx.Param), evaluate, digits(8, 8, 1))


class Recurrent(eqx.Module):
    cell: eqx.nn.GRUCell
    head: eqx.nn.Linear

    def __init__(self, key: jax.Array):
        first, second = jax.random.split(key)
        self.cell, self.head = eqx.nn.GRUCell(8, 64, key=first), eqx.nn.Linear(64, 10, key=second)

    def __call__(self, rows: jax.Array) -> jax.Array:
        last, _ = lax.scan(lambda h, row: (self.cell(row, h), None), jnp.zeros(64), rows)
        return self.head(last)


def equinox() -> Script:
    _, static = eqx.partition(Recurrent(jax.random.key(0)), eqx.is_inexact_array)

    def evaluate(arrays: Any, batch: Any) -> Any:
        return scored(jax.vmap(eqx.combine(arrays, static))(batch[0]), batch[1])

    return stateless(lambda key: eqx.filter(Recurrent(key), eqx.is_inexact_array), evaluate, digits(8, 8))


def haiku() -> Script:
    widths = [128, 64, 12, 64, 128, 64]
    model: Any = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP(widths, activation=jnp.tanh)(x)))

    def evaluate(params: Any, batch: Any) -> Any:
        return optax.sigmoid_binary_cross_entropy(model.apply(params, batch[0]), batch[0]).sum(-1).mean(), jnp.nan

    train, held_out = digits(64)
    return stateless(lambda key: model.init(key, jnp.zeros((1, 64))), evaluate, (train[:1], held_out[:1]), steps=100)


def gpt() -> Script:
    """Return the GPT's script, in float32. Its text is the documentation that comes with Python."""
    model = Transformer(vocabulary=len(topics.ALPHABET), dtype="float32")
    length = model.context + 1
    train, held_out = ((part[: len(part) // length * length].reshape(-1, length),) for part in topics.tokens())
    return stateless(
        model.init, lambda params, batch: (model.loss(params, batch[0]), jnp.nan), (train, held_out), steps=100, size=32
    )


def perceptron(key: jax.Array, *sizes: int) -> list[Any]:
    keys = jax.random.split(key, len(sizes))
    return [
        {"w": jax.random.normal(k, (n, m)) / np.sqrt(n), "b": jnp.zeros(m)}
        for k, n, m in zip(keys, sizes, sizes[1:], strict=False)
    ]


def outputs(layers: Any, x: jax.Array) -> jax.Array:
    for layer in layers[:-1]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x @ layers[-1]["w"] + layers[-1]["b"]


def regression() -> Script:
    """Return the script for a Gaussian. A network predicts its mean, and a parameter is its log standard deviation."""

    def evaluate(params: Any, batch: Any) -> Any:
        error = (batch[1] - outputs(params["mean"], batch[0])[:, 0]) * jnp.exp(-params["log_sigma"])
        return jnp.mean(0.5 * error**2 + params["log_sigma"]) + 0.5 * np.log(2 * np.pi), jnp.nan

    x, y = make_friedman1(5000, noise=1.0, random_state=0)
    x, y = x.astype(np.float32), ((y - y.mean()) / y.std()).astype(np.float32)
    return stateless(
        lambda key: {"mean": perceptron(key, 10, 64, 64, 1), "log_sigma": jnp.zeros(())}, evaluate,
        ((x[:4000], y[:4000]), (x[4000:], y[4000:])), steps=200,
    )  # fmt: skip


def four_devices() -> Script:
    return stateless(
        lambda key: perceptron(key, 64, 128, 128, 10),
        lambda params, batch: scored(outputs(params, batch[0]), batch[1]),
        digits(64),
    )


def in_one_call(script: Script, optimizer: str, rate: Any) -> Callable[[int], Any]:
    """Return a training function with AdamW, or with `kfac.train_step`."""
    tx = optax.adamw(rate)
    init: Callable[..., Any] = lambda params, *_: tx.init(params)  # noqa: E731

    def step(params: Any, opt_state: Any, *args: Any) -> Any:
        value, grads = jax.value_and_grad(script.loss, has_aux=True)(params, *args)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    step = jax.jit(step)
    if optimizer == "kfac":
        ours = kfac.train_step(script.loss, rate, has_aux=True)
        init, step = ours.init, ours

    def train(seed: int) -> Any:
        params, held = script.start(jax.random.key(seed))
        opt_state = init(params, held, jax.random.key(seed), next(script.batches(seed)))
        for number, batch in enumerate(script.batches(seed)):
            key = jax.random.fold_in(jax.random.key(seed), number)
            params, opt_state, (_, held) = step(params, opt_state, held, key, batch)
        return params, held

    return train


class OwnLoop(NamedTuple):
    """The parts of a custom training loop. `layers` and `observe` are None for AdamW."""

    tx: Any
    layers: Any
    observe: Any
    step: Any


def own_loop(script: Script, optimizer: str, rate: Any, axis: Any = None, **options: Any) -> OwnLoop:
    """Return the parts of the README's loop. On several devices, gradients are averaged before the update."""

    def loss_fn(params: Any, batch: Any) -> Any:
        return script.loss(params, None, None, batch)[0]

    params, _ = script.start(jax.random.key(0))
    layers: Any = kfac.find_layers(loss_fn, params, next(script.batches(0))) if optimizer == "kfac" else None
    tx = optax.adamw(rate) if layers is None else kfac.kfac(rate, layers, **options)

    def observe(opt_state: Any, params: Any, batch: Any) -> Any:
        return kfac.observe(opt_state, kfac.statistics(loss_fn, layers, fraction=1 / 4)(params, batch))

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        own = params if axis is None else lax.pcast(params, axis, to="varying")
        grads = jax.grad(loss_fn)(own, batch)
        grads = grads if axis is None else lax.pmean(grads, axis)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return OwnLoop(tx, layers, None if layers is None else observe, step)


def loop(script: Script, init: Any, observe: Any, step: Any) -> Callable[[int], Any]:
    def train(seed: int) -> Any:
        params, _ = script.start(jax.random.key(seed))
        opt_state = init(params)
        for batch in script.batches(seed):
            if observe is not None and kfac.statistics_due(opt_state):
                opt_state = observe(opt_state, params, batch)
            params, opt_state = step(params, opt_state, batch)
        return params, None

    return train


def by_own_loop(script: Script, optimizer: str, rate: Any) -> Callable[[int], Any]:
    tx, _, observe, step = own_loop(script, optimizer, rate)
    return loop(script, tx.init, observe and jax.jit(observe), jax.jit(step))


def over_a_mesh(script: Script, optimizer: str, rate: Any) -> Callable[[int], Any]:
    mesh = jax.make_mesh((4,), ("devices",), axis_types=(AxisType.Auto,))
    same, split = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("devices"))

    class Spread(Script):
        def batches(self, seed: int) -> Iterator[Any]:
            return (jax.device_put(batch, split) for batch in super().batches(seed))

    spread = Spread(*script._replace(start=lambda key: jax.device_put(script.start(key), same)))
    return in_one_call(spread, optimizer, rate)


def in_shard_map(script: Script, optimizer: str, rate: Any) -> Callable[[int], Any]:
    tx, layers, observe, step = own_loop(script, optimizer, rate, "devices")
    mesh = jax.make_mesh((4,), ("devices",), axis_types=(AxisType.Auto,))
    same, split = PartitionSpec(), PartitionSpec("devices")
    specs = same if layers is None else kfac.state.state_specs(tx, script.start(jax.random.key(0))[0], "devices")

    def mapped(function: Any, in_specs: Any, out_specs: Any) -> Any:
        return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs))

    init = mapped(tx.init, same, specs)
    step = mapped(step, (same, specs, split), (same, specs))
    observe = observe and mapped(observe, (specs, same, split), specs)
    everywhere = script._replace(start=lambda key: jax.device_put(script.start(key), NamedSharding(mesh, same)))
    return loop(everywhere, init, observe, step)


def in_pmap(script: Script, optimizer: str, rate: Any) -> Callable[[int], Any]:
    tx, _, observe, step = own_loop(script, optimizer, rate, "devices", distribution=kfac.Distribution("devices"))

    def on_parts(function: Any) -> Any:
        mapped = jax.pmap(function, axis_name="devices")
        return lambda a, b, batch: mapped(a, b, jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), batch))

    def stacked(key: jax.Array) -> Any:
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (4, *x.shape)), script.start(key))

    init = jax.pmap(tx.init, axis_name="devices")
    train = loop(script._replace(start=stacked), init, observe and on_parts(observe), on_parts(step))
    return lambda seed: jax.tree.map(lambda x: x[0], train(seed))


ADOPTIONS: dict[str, tuple[Callable[[], Script], Callable[..., Callable[[int], Any]]]] = {
    "linen": (linen, in_one_call), "nnx": (of_nnx, in_one_call), "equinox": (equinox, by_own_loop),
    "haiku": (haiku, in_one_call), "plain GPT": (gpt, in_one_call), "learned variance": (regression, in_one_call),
    "four devices, jit": (four_devices, over_a_mesh),
    "four devices, shard_map": (four_devices, in_shard_map),
    "four devices, pmap": (four_devices, in_pmap),
}  # fmt: skip


def run(name: str, optimizer: str, rate: float, seeds: list[int]) -> Iterator[dict[str, Any]]:
    make, loop = ADOPTIONS[name]
    script = make()
    evaluate = jax.jit(script.evaluate)
    train = loop(script, optimizer, kfac.schedules.warmup_linear_decay(rate, script.steps))
    for seed in seeds:
        began = time.perf_counter()
        params, held = train(seed)
        parts = [jax.tree.map(lambda x: x[:1000], part) for part in script.data]
        (training, _), (loss, accuracy) = [map(float, evaluate(params, held, part)) for part in parts]
        seconds = round(time.perf_counter() - began, 1)
        yield {
            "adoption": name, "optimizer": optimizer, "rate": rate, "seed": seed, "training": round(training, 4),
            "held out": round(loss, 4), "accuracy": None if np.isnan(accuracy) else round(accuracy, 4),
            "seconds": seconds,
        }  # fmt: skip


def table(records: list[dict[str, Any]]) -> None:
    """Print a row for each adoption, with means over seeds. AdamW has the rate with the lowest held-out loss."""
    print(f"{'':24} {'held-out loss':25}   {'accuracy':13}   {'training loss':15}   seconds    AdamW's rate")
    columns = "held out", "accuracy", "training", "seconds"
    for name in ADOPTIONS:
        found: dict[tuple[str, float], Any] = {key: [] for key in (OURS, *THEIRS)}
        for record in records:
            if record["adoption"] == name:
                found[record["optimizer"], record["rate"]].append([record[column] for column in columns])
        if all(found.values()):
            found = {key: np.array(rows, float) for key, rows in found.items()}
            best = min(THEIRS, key={key: rows[:, 0].mean() for key, rows in found.items()}.__getitem__)
            ours, theirs = found[OURS].mean(0), found[best].mean(0)
            row = (
                f"{ours[0]:7.4f} ± {found[OURS][:, 0].std():.4f} {theirs[0]:8.4f}   {ours[1]:6.1%} {theirs[1]:6.1%}   "
            )
            row += f"{ours[2]:7.4f} {theirs[2]:7.4f}   {found[OURS][0, 3]:4.0f} {found[best][0, 3]:4.0f}   {best[1]:g}"
            print(f"{name:24} {row}".replace("nan%", "   -"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(ADOPTIONS), choices=list(ADOPTIONS), metavar="NAME")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--results", type=Path, default=RESULTS, help="file with a line for each run")
    options = parser.parse_args()
    lines = options.results.read_text().splitlines() if options.results.exists() else []
    records = [json.loads(line) for line in lines]
    for name in options.only:
        for optimizer, rate in (OURS, *THEIRS):
            done = {r["seed"] for r in records if (r["adoption"], r["optimizer"], r["rate"]) == (name, optimizer, rate)}
            for record in run(name, optimizer, rate, [seed for seed in options.seeds if seed not in done]):
                records.append(record)
                with options.results.open("a") as file:
                    file.write(json.dumps(record) + "\n")
                print(json.dumps(record), flush=True)
    table(records)


if __name__ == "__main__":
    main()
