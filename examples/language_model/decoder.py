"""Train a 5-million-parameter language model on Python sources with default K-FAC, tuned Muon and tuned AdamW.

    python examples/language_model/decoder.py run --method kfac --rate 0.1        # repeat it to continue the run
    python examples/language_model/decoder.py run --method muon --rate 0.06 --horizon 40
    python examples/language_model/decoder.py report

"kfac" is `kfac.train_step(loss, schedule)` with default options. `--hidden 0.2` adds
`rules={"Dense_": 0.2}`, which slows the blocks' kernels. In the results, "kfac 0.3" is version 0.3. For all
methods, the rate rises for a tenth of the steps and then falls to zero. `--horizon` is the schedule's length in steps.
The text comes from `sources.py`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / folder) for folder in ("benchmarks", "large_batch", "language_model")]

import environment  # noqa: F401, E402, I001  before JAX is imported
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import linen as nn  # noqa: E402

import curves  # noqa: E402
import kfac  # noqa: E402
import methods  # noqa: E402
import sources  # noqa: E402

SIZES = {"1M": (128, 3), "5M": (256, 5), "toy": (16, 1)}  # width, block count
CONTEXT, HEAD = 128, 64  # context length, head width
BY_ADAM = "Embed", "positions", "head"  # parameters that Muon leaves to Adam, in addition to vectors


class Decoder(nn.Module):
    """Predict tokens with a causal pre-norm transformer (Radford et al. 2019), whose head has a separate kernel."""

    vocabulary: int
    width: int
    blocks: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        small = nn.initializers.variance_scaling(1 / (2 * self.blocks), "fan_in", "normal")
        positions = self.param("positions", nn.initializers.normal(0.02), (CONTEXT, self.width))
        x = nn.Embed(self.vocabulary, self.width)(tokens) + positions
        for _ in range(self.blocks):
            q, k, v = jnp.split(nn.Dense(3 * self.width)(nn.LayerNorm()(x)), 3, -1)
            q, k, v = (y.reshape(*y.shape[:2], -1, min(HEAD, self.width)) for y in (q, k, v))
            mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
            x = x + nn.Dense(self.width, kernel_init=small)(mixed)
            y = nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x)))
            x = x + nn.Dense(self.width, kernel_init=small)(y)
        return nn.Dense(self.vocabulary, use_bias=False, name="head")(nn.LayerNorm()(x))


def muon(rate: optax.Schedule) -> optax.GradientTransformation:
    """Return Muon for kernels. Adam trains tables, the head and vectors at 0.3 times the rate."""

    def dimensions(params: Any) -> Any:
        def of(path: Any, leaf: Any) -> Any:
            by_adam = leaf.ndim < 2 or any(name in jax.tree_util.keystr(path) for name in BY_ADAM)
            return None if by_adam else optax.contrib.MuonDimensionNumbers()

        return jax.tree_util.tree_map_with_path(of, params)

    return optax.contrib.muon(rate, adam_b2=0.95, adam_learning_rate=lambda count: 0.3 * rate(count),
                              muon_weight_dimension_numbers=dimensions)  # fmt: skip


def adamw(rate: optax.Schedule) -> optax.GradientTransformation:
    return optax.adamw(rate, b2=0.95, weight_decay=0.1, mask=methods.is_kernel)


def first_order(loss_fn: Any, tx: optax.GradientTransformation) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return jax.jit(lambda params, batch: tx.init(params)), jax.jit(step)


class Seconds:
    """Add up processor seconds of steps, without compilation.

    The first step of each kind includes compilation, so it counts as much as the second step.
    """

    def __init__(self, spent: float) -> None:
        self.spent, self.compiling, self.first = spent, 0.0, dict[bool, float]()

    def add(self, kind: bool, seconds: float) -> None:
        if kind not in self.first:
            self.first[kind] = seconds
            return
        if self.first[kind]:
            self.spent, self.compiling = self.spent + seconds, self.compiling + self.first[kind] - seconds
            self.first[kind] = 0.0
        self.spent += seconds


def run(options: argparse.Namespace) -> None:
    text = sources.tokens(options.tokens)
    width, blocks = SIZES[options.size]
    model = Decoder(len(text.pieces), width, blocks)

    def loss_fn(params: Any, tokens: Any) -> jax.Array:
        logits = model.apply({"params": params}, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def rows(tokens: np.ndarray, begin: np.ndarray) -> np.ndarray:
        return tokens[begin[:, None] + np.arange(CONTEXT + 1)].astype(np.int32)

    def batch(number: int) -> np.ndarray:
        """Return stretches of text at random positions, which depend only on the seed and the step."""
        rng = np.random.default_rng((options.seed, number))
        return rows(text.train, rng.integers(0, len(text.train) - CONTEXT, options.sequences))

    held_out = rows(text.held_out, np.linspace(0, len(text.held_out) - CONTEXT - 1, 64).astype(int)).reshape(8, 8, -1)
    evaluate = jax.jit(lambda params: jax.lax.map(lambda part: loss_fn(params, part), held_out).mean())
    rate = kfac.schedules.warmup_linear_decay(options.rate, options.horizon)
    init: Any
    step: Any
    if options.method == "kfac":
        given = {"Dense_": options.hidden} if options.hidden != 1 else None
        step = kfac.train_step(loss_fn, rate, rules=given)
        init = step.init
    else:
        init, step = first_order(loss_fn, {"muon": muon, "adamw": adamw}[options.method](rate))

    names = "size", "method", "rate", "hidden", "sequences", "horizon", "seed"
    name = {key: getattr(options, key) for key in names} | {"text": text.checksum[:8]}
    saved = options.output / ("-".join(map(str, name.values())) + ".npz")
    params = jax.jit(lambda key: model.init(key, batch(0)[:, :-1])["params"])(jax.random.key(options.seed))
    carry, kept = curves.restore(saved, (params, init(params, batch(0))))
    start, seconds, losses = int(kept.get("step", 0)), Seconds(kept.get("spent", 0.0)), list[float]()
    stop = options.stop or options.horizon
    for number in range(start + 1, stop + 1):
        tokens = batch(number)
        began, kind = time.process_time(), options.method == "kfac" and bool(kfac.statistics_due(carry[1]))
        *carry, loss = jax.block_until_ready(step(*carry, tokens))
        seconds.add(kind, time.process_time() - began)
        losses.append(float(loss))
        if number % options.every and number != stop and np.isfinite(losses[-1]):
            continue
        row = {
            **name, "parameters": sum(x.size for x in jax.tree.leaves(carry[0])), "step": number,
            "validation": round(float(evaluate(carry[0])), 4), "loss": round(float(np.mean(losses)), 4),
            "processor_seconds": round(seconds.spent, 1), "compiling": round(seconds.compiling, 1),
        }  # fmt: skip
        curves.add(options.results, row)
        if not np.isfinite(losses[-1]):
            break
        curves.keep(saved, carry, step=number, spent=seconds.spent)
        losses = []


def by_run(path: Path) -> dict[tuple[Any, ...], list[curves.Row]]:
    """Return the rows of each run.

    The keys are size, tokens per batch, steps, method, rate, multiplier for hidden kernels, and seed.
    """
    names = "horizon", "method", "rate", "hidden", "seed"

    def key(row: curves.Row) -> tuple[Any, ...]:
        row = {"hidden": 1.0, **row}  # older rows have no "hidden"
        return row["size"], row["sequences"] * CONTEXT, *(row[name] for name in names)

    return dict(sorted(curves.read(path, key).items()))


def report(options: argparse.Namespace) -> None:
    """Print the last row of each run, and draw the longest schedule's runs for each network and batch size."""
    found = by_run(options.results)
    print("| network | tokens of a batch | steps | method | rate | hidden | loss | processor s | compiling s |")
    print("|---" * 9 + "|")
    for (size, tokens, horizon, method, rate, hidden, _), curve in found.items():
        last = curve[-1]
        loss = f"{last['validation']:.3f}" + f" (step {last['step']})" * (last["step"] != horizon)
        seconds = f"{last['processor_seconds']:.0f} | {last['compiling']:.0f}"
        print(f"| {size} | {tokens:,} | {horizon} | {method} | {rate} | {hidden} | {loss} | {seconds} |")
    longest = {key[:2]: max(k[2] for k in found if k[:2] == key[:2]) for key in found}
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(len(longest), 2, figsize=(9, 3.4 * len(longest)), sharey="row", squeeze=False,
                                layout="constrained")  # fmt: skip
    for row, (kind, horizon) in zip(axes, longest.items(), strict=True):
        for axis, what in zip(row, ("step", "processor_seconds"), strict=True):
            for key, curve in found.items():
                if key[:3] == (*kind, horizon):
                    losses = [point["validation"] for point in curve]
                    label = f"{key[3]} {key[4]}" + f", blocks by {key[5]}" * (key[5] != 1)
                    axis.plot([point[what] for point in curve], losses, ".-", label=label)
            axis.set_xlabel(what.replace("_", " "))
            axis.grid(alpha=0.3)
        row[0].set_ylabel("validation loss, nats per token")
        row[0].set_title(f"{kind[0]} parameters, {kind[1]:,} tokens a batch", fontsize=9)
        row[0].legend(fontsize=8)
    figure.savefig(options.figure, dpi=120, metadata={"Software": None})


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["run", "report"])
    parser.add_argument("--method", choices=["kfac", "muon", "adamw"], default="kfac")
    parser.add_argument("--rate", type=float, default=0.1)
    parser.add_argument(
        "--hidden", type=float, default=1.0, help="kfac: multiplier of the rate for all kernels except the head"
    )
    parser.add_argument("--size", choices=SIZES, default="5M", help="number of parameters")
    parser.add_argument("--sequences", type=int, default=16, help=f"sequences of {CONTEXT} tokens per batch")
    parser.add_argument("--horizon", type=int, default=150)
    parser.add_argument("--stop", type=int, help="last step, if it is before the horizon")
    parser.add_argument("--every", type=int, default=10, help="steps between two validations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=Path, default=Path("runs/language_model/tokens.npz"),
                        help="file for the text as tokens")  # fmt: skip
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("runs/language_model"),
        help="folder for the states of runs, from which they continue",
    )
    parser.add_argument("--results", type=Path, default=HERE / "decoder.jsonl")
    parser.add_argument(
        "--figure", type=Path, default=HERE / "decoder.png", help="file for the figure that `report` draws"
    )
    options = parser.parse_args(arguments)
    if options.hidden != 1 and options.method != "kfac":
        parser.error(f"--hidden {options.hidden} is for --method kfac")
    (run if options.action == "run" else report)(options)


if __name__ == "__main__":
    main()
