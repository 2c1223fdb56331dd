"""Compare optimizers on a ladder of language models: wider, deeper, longer and with larger batches from rung to rung.

    python examples/language_model/ladder.py run --width 128 --method kfac --rate 0.1    # repeat it to continue the run
    python examples/language_model/ladder.py search --width 128 --method muon            # its rate and its Adam's rate
    python examples/language_model/ladder.py report    # the best run of each method on each rung, and all runs of K-FAC
    python examples/language_model/ladder.py leads     # K-FAC's lead over Muon on each rung
    python examples/language_model/ladder.py plot

A rung is a network, a batch and a number of steps. The network is the decoder in `transformer.py` with a tied table.
With `--dtype bfloat16`, products, activations and their gradients are bfloat16, as on GPUs. The text comes from
`sources.py`. For all methods, the rate rises for a tenth of the steps and then falls to zero. `search` starts with the
given rate. It moves to half or twice the rate, and for Muon and SOAP to the next multiple of their Adam's rate, until
no neighbour is better. Runs that are already in --results are not repeated.

The methods are:

- "kfac": `kfac.kfac` with default options. `--rules tokens=0.3 positions=0.3` multiplies the steps of some layers.
- "muon": Muon for kernels. Adam trains the table, the positions and the vectors at `--adam` times its rate.
- "soap": published SOAP (`examples/physics/soap.py`) for kernels, Adam as with Muon.
- "adamw": AdamW with a weight decay of 0.1 for kernels.

With `--decay X`, K-FAC, Muon and SOAP subtract X times the rate times each of the blocks' kernels in a step.

A row has the validation loss after a twelfth of the steps, and the last step of the kernels of each kind: its stable
rank `|step|_F^2 / |step|_2^2`, its Frobenius and its spectral norm relative to the kernel's, and K-FAC's adaptive
multiplier. Each number is a mean over the blocks.
"""

from __future__ import annotations

import argparse
import functools
import math
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / folder) for folder in ("benchmarks", "large_batch", "physics", "language_model")]

import environment  # noqa: F401, E402, I001  before JAX is imported
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

import curves  # noqa: E402
import kfac  # noqa: E402
import soap as published  # noqa: E402
import sources  # noqa: E402
from transformer import PROJECTIONS, Transformer  # noqa: E402

METHODS = "kfac", "muon", "soap", "adamw"
RATES = {"kfac": 0.1, "muon": 0.03, "soap": 0.003, "adamw": 0.003}  # where a search starts
MULTIPLES = 0.03, 0.1, 0.3, 1.0, 3.0, 10.0  # of Muon's and SOAP's rate, for their Adam
KINDS = "queries_keys_values", *PROJECTIONS, "attention", "up", "down"
HEAD = 64  # width of a head
VALIDATION = 32_768  # tokens
MOMENTS = 12  # validations of a run


class Rung(NamedTuple):
    """Hold a network and the dtype of its computations, a batch size in tokens, and a number of steps.

    `fused` says whether queries, keys and values have a single kernel. `rotary` says whether positions rotate queries
    and keys, instead of a table of positions.
    """

    width: int
    blocks: int
    context: int
    vocabulary: int
    tokens: int
    steps: int
    dtype: str = "float32"
    fused: bool = True
    rotary: bool = False

    @property
    def every(self) -> int:
        """The number of steps between two validations."""
        return max(1, self.steps // MOMENTS)

    @property
    def notes(self) -> list[str]:
        """How the network differs from the default one, apart from its sizes."""
        dtype = [self.dtype] * (self.dtype != "float32")
        return ["split"] * (not self.fused) + ["rotary"] * self.rotary + dtype


class Run(NamedTuple):
    """Hold a rung, a method and its settings. `adam` is 1 for methods without a second rate; `decay` is of kernels."""

    rung: Rung
    method: str
    rate: float
    adam: float = 1.0
    rules: tuple[tuple[str, float], ...] = ()
    seed: int = 0
    decay: float = 0.0

    @classmethod
    def of(cls, row: curves.Row) -> Run:
        """Return the run of a row."""
        rung = Rung(**{name: row[name] for name in Rung._fields if name in row})
        rules = tuple(sorted(row["rules"].items()))
        return cls(rung, row["method"], row["rate"], row["adam"], rules, row["seed"], row.get("decay", 0.0))

    def row(self) -> curves.Row:
        """Return the entries that all rows of the run share."""
        own = {name: value for name, value in self._asdict().items() if name != "rung"}
        return self.rung._asdict() | own | {"rules": dict(self.rules)}

    @property
    def name(self) -> str:
        """The name of the file with the run's state."""
        rules = "-".join(f"{re.sub(r'[^A-Za-z]', '', pattern)}-{factor}" for pattern, factor in self.rules)
        own = self.method, self.rate, self.adam, self.seed, self.decay, rules
        return "-".join(map(str, ("ladder", *self.rung, *own)))

    def neighbours(self) -> list[Run]:
        """Return the runs that a search compares with this run."""
        found = [self._replace(rate=float(f"{rate:.4g}")) for rate in (self.rate / 2, 2 * self.rate)]
        if self.method in ("muon", "soap"):
            place = MULTIPLES.index(self.adam)
            others = MULTIPLES[max(0, place - 1) : place] + MULTIPLES[place + 1 : place + 2]
            found += [self._replace(adam=adam) for adam in others]
        return found


def network(rung: Rung) -> Transformer:
    heads = max(1, rung.width // HEAD)
    sizes = rung.vocabulary, rung.context, rung.width, rung.blocks, heads
    return Transformer(*sizes, rung.dtype, tied=True, fused=rung.fused, rotary=rung.rotary)


def at_start(rung: Rung, seed: Any) -> Any:
    """Return the first parameters. The entries of a tied table are small, because it is the head's kernel as well."""
    params = network(rung).init(jax.random.key(seed))
    smaller = {"tokens": 0.02, "positions": 0.2}
    return params | {name: factor * params[name] for name, factor in smaller.items() if name in params}


def by_adam(path: Any, leaf: jax.Array) -> bool:
    """Return whether Muon and SOAP leave a parameter to Adam: tables, positions and vectors."""
    return "blocks" not in jax.tree_util.keystr(path) or leaf.ndim < 3


def decaying(params: Any) -> Any:
    """Return which parameters have weight decay: the blocks' kernels."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: not by_adam(path, leaf), params)


def muon(rate: optax.Schedule, adam: float, decay: float) -> optax.GradientTransformation:
    def dimensions(params: Any) -> Any:
        def of(path: Any, leaf: jax.Array) -> Any:
            return None if by_adam(path, leaf) else optax.contrib.MuonDimensionNumbers(1, 2)

        return jax.tree_util.tree_map_with_path(of, params)

    return optax.contrib.muon(
        rate, adam_b2=0.95, adam_learning_rate=lambda count: adam * rate(count),
        muon_weight_dimension_numbers=dimensions, weight_decay=decay,
    )  # fmt: skip


def soap(rate: optax.Schedule, adam: float, decay: float) -> optax.GradientTransformation:
    """Return published SOAP, which takes each block's kernels as separate matrices."""

    def kernels() -> optax.GradientTransformation:
        inner = published.soap()

        def separate(tree: Any) -> Any:
            return jax.tree.map(list, tree)

        def update(grads: Any, state: Any, params: Any = None) -> Any:
            del params
            steps, state = inner.update(separate(grads), state)
            joined = [jnp.stack(x) for x in jax.tree.leaves(steps, is_leaf=lambda x: isinstance(x, list))]
            return jax.tree.unflatten(jax.tree.structure(grads), joined), state

        return optax.GradientTransformation(lambda params: inner.init(separate(params)), update)

    def labels(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, x: "adam" if by_adam(path, x) else "soap", params)

    slower = optax.chain(optax.scale_by_adam(0.9, 0.95), optax.scale(adam))
    return optax.chain(
        optax.multi_transform({"soap": kernels(), "adam": slower}, labels),
        optax.add_decayed_weights(decay, decaying),
        optax.scale_by_learning_rate(rate),
    )


def adamw(rate: optax.Schedule) -> optax.GradientTransformation:
    return optax.adamw(rate, b2=0.95, weight_decay=0.1, mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params))


class Programs(NamedTuple):
    """Hold compiled functions that serve all rates of a method.

    Attributes:
      init: `init(params)` returns the optimizer's state.
      observe: `observe(state, params, tokens)` takes K-FAC's statistics. None for other methods.
      step: `step(params, state, tokens, rate, adam)` returns the new parameters and state, and the loss.
      evaluate: `evaluate(params, tokens)` returns the mean loss over `[parts, sequences, context + 1]` tokens.
    """

    init: Callable[..., Any]
    observe: Callable[..., Any] | None
    step: Callable[..., Any]
    evaluate: Callable[..., Any]


@functools.cache
def programs(rung: Rung, method: str, rules: tuple[tuple[str, float], ...], decay: float) -> Programs:
    loss_fn = network(rung).loss
    layers: Any = None
    observe = None
    if method == "kfac":
        params = jax.eval_shape(functools.partial(at_start, rung), 0)
        tokens = jax.ShapeDtypeStruct((rung.tokens // rung.context, rung.context + 1), jnp.int32)
        layers = kfac.find_layers(loss_fn, params, tokens, rules=dict(rules) or None)
        statistics = kfac.statistics(loss_fn, layers)
        observe = jax.jit(
            lambda state, params, tokens: kfac.observe(state, statistics(params, tokens)), donate_argnums=0
        )

    def optimizer(rate: Any, adam: Any) -> Any:
        shape = kfac.schedules.warmup_linear_decay(1.0, rung.steps)

        def schedule(count: Any) -> Any:
            return rate * shape(count)

        if method == "kfac":
            return kfac.kfac(schedule, layers, weight_decay=decay, weight_decay_mask=decaying)
        if method == "adamw":
            return adamw(schedule)
        return {"muon": muon, "soap": soap}[method](schedule, adam, decay)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, tokens: Any, rate: Any, adam: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
        updates, state = optimizer(rate, adam).update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    def evaluate(params: Any, tokens: Any) -> jax.Array:
        return jnp.mean(jax.lax.map(lambda part: loss_fn(params, part), tokens))

    return Programs(jax.jit(lambda params: optimizer(1.0, 1.0).init(params)), observe, step, jax.jit(evaluate))


def multipliers(state: Any) -> dict[str, np.ndarray]:
    """Return K-FAC's adaptive multipliers of each layer's blocks, by layer."""
    (inner,) = (
        x
        for x in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, kfac.state.KfacState))
        if isinstance(x, kfac.state.KfacState)
    )
    found: dict[str, np.ndarray] = {}
    for group in inner.settings.groups:
        rates = inner.blocks[group.name].momentum_state.rate
        if rates is not None:
            parts = np.split(np.asarray(rates), np.cumsum(group.counts)[:-1])
            found |= {layer.name: part for layer, part in zip(group.layers, parts, strict=True)}
    return found


def kernels_of(params: Any) -> dict[str, np.ndarray]:
    """Copy the kernels of each kind, `[blocks, d_in, d_out]`. The next step reuses the parameters' memory."""
    blocks = params["blocks"]
    return {kind: np.array(blocks[kind]["kernel"], np.float64) for kind in KINDS if kind in blocks}


def kernel_facts(
    before: dict[str, np.ndarray], after: dict[str, np.ndarray], state: Any
) -> dict[str, dict[str, float]]:
    """Return what a row says about the last step of each kind of kernel. `state` is None except for K-FAC."""
    adaptive = {} if state is None else multipliers(state)
    facts = {}
    for kind, old in before.items():
        steps, kernels = (np.linalg.svd(x, compute_uv=False) for x in (after[kind] - old, old))
        squares = [np.sum(x * x, axis=-1) for x in (steps, kernels)]
        found = {
            "stable_rank": squares[0] / np.maximum(steps[:, 0] ** 2, 1e-30),
            "frobenius": np.sqrt(squares[0] / squares[1]),
            "spectral": steps[:, 0] / kernels[:, 0],
        }
        if f"blocks/{kind}" in adaptive:
            found["multiplier"] = adaptive[f"blocks/{kind}"]
        facts[kind] = {name: float(f"{np.mean(values):.4g}") for name, values in found.items()}
    return facts


class Store(NamedTuple):
    """Hold the files of a ladder: the results, and a folder for tokens and for the states of runs that stopped."""

    results: Path
    folder: Path

    def curves(self) -> dict[Run, list[curves.Row]]:
        """Return the stored rows of each run in order."""
        return curves.read(self.results, Run.of) if self.results.is_file() else {}


def train(run: Run, stop: int, store: Store) -> float:
    """Train until step `stop` unless this is stored, and return the validation loss there.

    Store a row after each twelfth of the schedule and at the end.
    """
    done = {row["step"]: row for row in store.curves().get(run, [])}
    if any(math.isinf(loss_of(row)) for row in done.values()):
        return math.inf
    if stop in done:
        return loss_of(done[stop])
    rung = run.rung
    text = sources.tokens(store.folder / f"tokens-{rung.vocabulary}.npz", rung.vocabulary)

    def rows(tokens: np.ndarray, begin: np.ndarray) -> np.ndarray:
        return tokens[begin[:, None] + np.arange(rung.context + 1)].astype(np.int32)

    def batch(number: int) -> np.ndarray:
        """Return stretches of text at random positions, which depend only on the seed and the step."""
        random = np.random.default_rng((run.seed, number))
        return rows(text.train, random.integers(0, len(text.train) - rung.context - 1, rung.tokens // rung.context))

    count = max(8, VALIDATION // rung.context) // 8 * 8
    begin = np.linspace(0, len(text.held_out) - rung.context - 1, count).astype(int)
    held_out = rows(text.held_out, begin).reshape(8, count // 8, -1)
    init, observe, program, evaluate = programs(rung, run.method, run.rules, run.decay)
    params = jax.jit(functools.partial(at_start, rung))(run.seed)
    saved = store.folder / f"{run.name}.npz"
    (params, state), kept = curves.restore(saved, (params, init(params)))
    began, spent = time.process_time(), kept.get("spent", 0.0)
    losses: list[float] = []
    result = math.inf
    for number in range(int(kept.get("step", 0)) + 1, stop + 1):
        last = number == stop
        pause = last or number % rung.every == 0
        before = kernels_of(params) if pause else {}
        tokens = batch(number)
        if observe is not None and bool(kfac.statistics_due(state)):
            state = observe(state, params, tokens)
        params, state, loss = program(params, state, tokens, jnp.float32(run.rate), jnp.float32(run.adam))
        losses.append(float(loss))
        if not (pause or math.isnan(losses[-1])):
            continue
        seconds = spent + time.process_time() - began
        result = float(evaluate(params, held_out))
        row = run.row() | {
            "step": number, "validation": round(result, 4), "loss": round(float(np.mean(losses)), 4),
            "processor_seconds": round(seconds, 1),
        }  # fmt: skip
        if math.isfinite(result):
            row["kernels"] = kernel_facts(before, kernels_of(params), state if run.method == "kfac" else None)
        if number not in done:
            curves.add(store.results, row)
        if not math.isfinite(result):
            return math.inf
        if not number % rung.every:
            curves.keep(saved, (params, state), step=number, spent=seconds)
        losses = []
    return result


def loss_of(row: curves.Row) -> float:
    """Return the validation loss of a row; infinity after a run that diverged."""
    return row["validation"] if math.isfinite(row["validation"]) else math.inf


def search(first: Run, stop: int, store: Store) -> Run:
    """Return the run that is no worse than its neighbours at step `stop`. Start with `first`, and move to the best."""
    best = first
    while True:
        losses = {run: train(run, stop, store) for run in (best, *best.neighbours())}
        winner = min(losses, key=lambda run: losses[run])
        if winner == best:
            print(f"best of {len(losses)}: {best.method} {best.rate} x {best.adam}, {losses[best]:.4f}")
            return best
        best = winner


def lead(ahead: list[curves.Row], behind: list[curves.Row], step: int) -> tuple[float, float]:
    """Return by how many nats and by how many steps a curve is ahead at a step, interpolated between rows.

    The steps count from where the curve reaches the other's loss. They are 0 if it is not ahead.
    """
    level = value_at(behind, step)
    nats = level - value_at(ahead, step)
    steps, losses = [row["step"] for row in ahead], [row["validation"] for row in ahead]
    for place in range(1, len(ahead)):
        if losses[place] <= level < losses[place - 1]:
            part = (losses[place - 1] - level) / (losses[place - 1] - losses[place])
            reached = steps[place - 1] + part * (steps[place] - steps[place - 1])
            return nats, max(0.0, step - reached)
    return nats, 0.0


def value_at(curve: list[curves.Row], step: int) -> float:
    (row,) = (row for row in curve if row["step"] == step)
    return loss_of(row)


class Comparison(NamedTuple):
    """Hold the best run of each method on a rung and seed, at the last step that all of these methods have.

    Runs with weight decay have a comparison of their own.
    """

    rung: Rung
    seed: int
    decayed: bool
    step: int
    best: dict[str, tuple[Run, list[curves.Row]]]


def comparisons(found: dict[Run, list[curves.Row]]) -> list[Comparison]:
    """Return a comparison for each rung and seed, with and without decay. Runs of K-FAC with rules do not count."""
    rungs = sorted({(run.rung, run.seed, run.decay > 0) for run in found})
    result = []
    for key in rungs:
        own = (*key, ())  # no rules
        here = {run: curve for run, curve in found.items() if (run.rung, run.seed, run.decay > 0, run.rules) == own}
        methods = [method for method in METHODS if any(run.method == method for run in here)]
        steps = [
            {row["step"] for run, curve in here.items() if run.method == method for row in curve} for method in methods
        ]
        if not steps or not set.intersection(*steps):
            continue
        step = max(set.intersection(*steps))
        best = {}
        for method in methods:
            there = {run: curve for run, curve in here.items() if run.method == method}
            there = {run: curve for run, curve in there.items() if any(row["step"] == step for row in curve)}
            run = min(there, key=lambda run: value_at(there[run], step))
            best[method] = run, there[run]
        result.append(Comparison(*key, step, best))
    return result


def written(entry: object) -> str:
    if isinstance(entry, bool):
        return "yes" if entry else "no"
    return f"{entry:,}" if isinstance(entry, int) else str(entry)


def report(store: Store) -> None:
    """Print the best run of each method on each rung with K-FAC's lead over it, and then all settings of K-FAC."""
    found = store.curves()
    columns = [*Rung._fields, "seed", "at step", "method", "rate", "Adam", "decay", "loss"]
    columns += ["K-FAC's lead in nats", "in steps"]
    print(f"| {' | '.join(columns)} |")
    print("|---" * len(columns) + "|")
    for rung, seed, _, step, best in comparisons(found):
        for method, (run, curve) in best.items():
            ours = "| "
            if method != "kfac" and "kfac" in best:
                nats, steps = lead(best["kfac"][1], curve, step)
                ours = f"{nats:+.3f} | {steps:.0f}"
            numbers = " | ".join(map(written, (*rung, seed, step)))
            multiple = f"{run.adam:g}" if method in ("muon", "soap") else ""
            settings = f"{run.rate:g} | {multiple} | {run.decay:g}"
            print(f"| {numbers} | {method} | {settings} | {value_at(curve, step):.3f} | {ours} |")
    of_rules = *Rung._fields, "seed", "rules", "rate", "decay", "at step", "loss"
    print(f"\n| {' | '.join(of_rules)} |")
    print("|---" * len(of_rules) + "|")
    for run, curve in sorted(found.items()):
        if run.method == "kfac":
            numbers = " | ".join(map(written, (*run.rung, run.seed)))
            rules = " ".join(f"{pattern}={factor:g}" for pattern, factor in run.rules)
            escaped = rules.replace("|", "\\|")
            last = curve[-1]
            settings = f"{escaped} | {run.rate:g} | {run.decay:g}"
            print(f"| {numbers} | {settings} | {last['step']} | {last['validation']:.3f} |")


class Lead(NamedTuple):
    """Hold K-FAC's lead over Muon's best run at the end of a schedule.

    Attributes:
      comparison: of Muon's runs with those of K-FAC at its recommended rate.
      nats, steps: the lead, see `lead`.
      neighbours: how many neighbours of Muon's best run have finished, all of them worse, and how many there are.
    """

    comparison: Comparison
    nats: float
    steps: float
    neighbours: tuple[int, int]


def leads(found: dict[Run, list[curves.Row]]) -> list[Lead]:
    def counts(run: Run) -> bool:
        return run.method == "muon" or (run.method == "kfac" and run.rate == RATES["kfac"])

    result = []
    for x in comparisons({run: curve for run, curve in found.items() if counts(run)}):
        if x.step != x.rung.steps or len(x.best) < 2:
            continue
        _, ahead = x.best["kfac"]
        muon, behind = x.best["muon"]
        near = muon.neighbours()
        finished = sum(any(row["step"] == x.step for row in found.get(run, [])) for run in near)
        result.append(Lead(x, *lead(ahead, behind, x.step), (finished, len(near))))
    return result


def print_leads(store: Store) -> None:
    """Print K-FAC's lead over Muon on each rung, as a table in Markdown."""
    columns = ["width", "blocks", "context", "tokens", "steps", "notes", "K-FAC", "Muon", "Muon's rate, its Adam's"]
    columns += ["worse neighbours", "lead in nats", "in steps"]
    print(f"| {' | '.join(columns)} |")
    print("|---" * len(columns) + "|")
    for x in leads(store.curves()):
        rung, seed, decayed, step, best = x.comparison
        (ours, ahead), (muon, behind) = best["kfac"], best["muon"]
        notes = [f"seed {seed}"] * (seed > 0) + rung.notes
        notes += [f"decay: K-FAC {ours.decay:g}, Muon {muon.decay:g}"] * decayed
        sizes = (rung.width, rung.blocks, rung.context, rung.tokens, rung.steps)
        rates = f"{muon.rate:g}, {muon.rate * muon.adam:.3g}"
        finished, number = x.neighbours
        print(
            f"| {' | '.join(map(written, sizes))} | {', '.join(notes)} "
            f"| {value_at(ahead, step):.3f} | {value_at(behind, step):.3f} | {rates} "
            f"| {finished} of {number} | {x.nats:.3f} | {x.steps:.0f}, {x.steps / rung.steps:.0%} |"
        )


def plot(store: Store, figure: Path) -> None:
    """Draw K-FAC's lead over Muon against the number of steps, and the stable rank of the kernels' steps by width.

    A point is a rung with seed 0 that both methods finished without weight decay. The stable rank is a mean over the
    schedule.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    found = [x for x in leads(store.curves()) if x.comparison.seed == 0 and not x.comparison.decayed]
    widths = sorted({x.comparison.rung.width for x in found})
    picture, (nats, share, rank) = plt.subplots(1, 3, figsize=(11, 4.2), layout="constrained")
    for x in found:
        rung = x.comparison.rung
        sizes = [f"width {rung.width}", f"{rung.blocks} blocks", f"{rung.tokens:,} tokens"]
        sizes += [f"context {rung.context:,}"] * (rung.context != 128)
        label = ", ".join(sizes + rung.notes)
        with_table = {1024: "v", 2048: "o" if rung.fused else "^", 8192: "s"}
        with_rotary = "P" if rung.fused else "X"
        style = {
            "color": f"C{widths.index(rung.width)}",
            "marker": with_rotary if rung.rotary else with_table.get(rung.tokens, "D"),
            "fillstyle": "none" if rung.context > 128 else "full" if rung.blocks == 2 else "left",
            "linestyle": "none", "markersize": 9,
        }  # fmt: skip
        known = {line.get_label() for line in nats.lines}
        nats.plot(rung.steps, x.nats, **style, label=None if label in known else label)
        share.plot(rung.steps, 100 * x.steps / rung.steps, **style)
        for method, color in (("kfac", "C0"), ("muon", "C1")):
            ranks = [
                np.mean([facts["stable_rank"] for facts in row["kernels"].values()])
                for row in x.comparison.best[method][1]
                if "kernels" in row
            ]
            rank.plot(rung.width, np.mean(ranks), "o", color=color)
    for axis, title in ((nats, "K-FAC's lead over Muon, nats"), (share, "the same, % of the steps")):
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("steps")
        axis.axhline(0, color="gray", linewidth=0.8)
    rank.set_title("stable rank of a kernel's step", fontsize=10)
    rank.set_xlabel("width")
    rank.set_yscale("log")
    rank.set_yticks([10, 30, 100, 300], ["10", "30", "100", "300"])
    rank.plot([], [], "o", color="C0", label="K-FAC")
    rank.plot([], [], "o", color="C1", label="Muon")
    rank.legend(fontsize=8)
    horizons = [100, 300, 1000, 4000]
    for axis, ticks in ((nats, horizons), (share, horizons), (rank, widths)):
        axis.set_xscale("log")
        axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    picture.legend(*nats.get_legend_handles_labels(), fontsize=8, loc="outside lower center", ncols=3)
    picture.savefig(figure, dpi=120, metadata={"Software": None})


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["run", "search", "report", "leads", "plot"],
                        help="`run` and `search` train; the others read --results and ignore the settings")  # fmt: skip
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens in a batch, a multiple of the context")
    parser.add_argument("--steps", type=int, default=300, help="length of the schedule")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--split", dest="fused", action="store_false",
                        help="queries, keys and values have three kernels instead of one")  # fmt: skip
    parser.add_argument("--rotary", action="store_true",
                        help="positions rotate queries and keys, and have no table")  # fmt: skip
    parser.add_argument("--stop", type=int, help="last step, if it is before the schedule's end")
    parser.add_argument("--method", choices=METHODS, default="kfac")
    parser.add_argument("--rate", type=float, nargs="+", help="one or more rates; `search` takes the first")
    parser.add_argument("--adam", type=float, choices=MULTIPLES, default=1.0,
                        help="muon and soap: their Adam's rate over their own")  # fmt: skip
    parser.add_argument("--decay", type=float, default=0.0,
                        help="kfac, muon and soap: weight decay of the blocks' kernels")  # fmt: skip
    parser.add_argument("--rules", nargs="*", default=[], metavar="PATTERN=X", help="kfac: multipliers of layers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=HERE / "ladder.jsonl")
    parser.add_argument("--folder", type=Path, default=Path("runs/language_model"),
                        help="folder for the text as tokens, and for the states of runs")  # fmt: skip
    parser.add_argument("--figure", type=Path, default=HERE / "ladder.png")
    options = parser.parse_args(arguments)
    if options.tokens % options.context:
        parser.error(f"--tokens {options.tokens} is not a multiple of --context {options.context}")
    if options.rules and options.method != "kfac":
        parser.error("--rules is for --method kfac")
    if options.adam != 1 and options.method not in ("muon", "soap"):
        parser.error(f"--adam is for --method muon and soap, but --method is {options.method}")
    if options.decay and options.method == "adamw":
        parser.error("--decay is for kfac, muon and soap: adamw has its own")
    store = Store(options.results, options.folder)
    if options.action == "report":
        report(store)
        return
    if options.action == "leads":
        print_leads(store)
        return
    if options.action == "plot":
        plot(store, options.figure)
        return
    rung = Rung(*(getattr(options, name) for name in Rung._fields))
    pairs = (text.rsplit("=", 1) for text in options.rules)
    rules = tuple(sorted((pattern, float(factor)) for pattern, factor in pairs))
    stop = options.stop or options.steps
    if stop != rung.steps and stop % rung.every:
        parser.error(f"--stop {stop} is not a multiple of {rung.every}, a twelfth of --steps {rung.steps}")
    runs = [
        Run(rung, options.method, rate, options.adam, rules, options.seed, options.decay)
        for rate in options.rate or [RATES[options.method]]
    ]
    if options.action == "search":
        search(runs[0], stop, store)
        return
    for run in runs:
        train(run, stop, store)


if __name__ == "__main__":
    main()
