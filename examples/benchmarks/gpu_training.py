"""Train a GPT with variants of K-FAC and Muon on a GPU (programmes B and E).

Programme E asks which part of K-FAC loses nats on a GPT of 92 million parameters: all variants are scalar arguments of
one compiled step per method, so a variant costs its steps only. Programme B then trains the best variants for longer,
K-FAC through `kfac.train_step`, as a user would.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import copy
import functools
import pathlib
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import environment  # noqa: F401, isort: skip; before JAX is imported

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gpu_variants
import kfac
from gpu_record import Record, compile_together, read
from gpu_variants import KERNELS, KINDS, TABLES, Variant

FOLDER = pathlib.Path(__file__).resolve().parent
sys.path += [str(FOLDER.parent / folder) for folder in ("language_model", "large_batch")]

import methods  # noqa: E402
from transformer import Transformer  # noqa: E402

# Milliseconds per step before the first run has measured them: those of the H200, rounded up.
FORECAST = {"kfac": 55.0, "muon": 45.0}
LOOKS = 10
# The loss is averaged over these ranges of positions in the context. Copying from the context only helps late ones.
RANGES = {"first 64": slice(0, 64), "64 to 256": slice(64, 256), "rest": slice(256, None)}


# -- the text and the network ------------------------------------------------------------------------------------------


class Text:
    """Training batches and validation text for a `Transformer`, from a file with tokens.

    Attributes:
      held: the validation text, `[8, sequences, context + 1]`.
    """

    def __init__(self, path: pathlib.Path, context: int, sequences: int) -> None:
        with np.load(path) as found:
            tokens, held_out = found["train"], found["held_out"]
        self.sequences = sequences
        self.last = len(tokens) - context - 1
        starts = np.linspace(0, len(held_out) - context - 1, 8 * sequences).astype(int)
        self.held = jnp.asarray(_rows(held_out, starts, context).reshape(8, sequences, -1))
        self.tokens = jnp.asarray(tokens)
        self.cut = jax.jit(lambda tokens, starts: tokens[starts[:, None] + jnp.arange(context + 1)].astype(jnp.int32))

    def batch(self, number: int) -> jax.Array:
        """Return the tokens of batch `number`, `[sequences, context + 1]`."""
        starts = np.random.default_rng((0, number)).integers(0, self.last, self.sequences)
        return self.cut(self.tokens, starts)


def _rows(tokens: np.ndarray, starts: np.ndarray, context: int) -> np.ndarray:
    return tokens[starts[:, None] + np.arange(context + 1)].astype(np.int32)


def gpt(vocabulary: pathlib.Path, small: bool) -> tuple[Transformer, int, Any]:
    """Return the GPT, the number of sequences per batch, and the initial parameters."""
    with np.load(vocabulary) as found:
        size = -(-(256 + len(found["merges"])) // 128) * 128
    model = Transformer(size, context=1024, width=768, layers=12, heads=12, tied=True)
    sequences = 8
    if small:
        model, sequences = Transformer(size, context=64, width=32, layers=2, heads=2, tied=True), 4

    def at_start(key: Any) -> Any:
        params = model.init(key)
        # The token table is also the head's kernel, so its entries are small (Radford et al. 2019).
        return params | {"tokens": 0.02 * params["tokens"], "positions": 0.2 * params["positions"]}

    return model, sequences, jax.jit(at_start)(jax.random.key(0))


def text_of(folder: pathlib.Path, vocabulary: pathlib.Path) -> pathlib.Path:
    """Return the path of the token file for a vocabulary."""
    return folder / f"tokens-{zlib.crc32(vocabulary.read_bytes()):08x}.npz"


def start_encoding(vocabulary: pathlib.Path, text: pathlib.Path) -> subprocess.Popen[str] | None:
    """Start a process that writes the tokens to the file `text`, unless the file exists."""
    if text.is_file():
        return None
    text.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(FOLDER / "gpu_text.py"), "encode", str(vocabulary), str(text)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def finish_encoding(record: Record, encoding: subprocess.Popen[str] | None) -> None:
    """Wait for the process from `start_encoding`, and record the text's size."""
    if encoding is None:
        return
    record.doing = "encoding the text"
    said, _ = encoding.communicate(timeout=max(1.0, record.left - 5))
    if encoding.returncode:
        raise RuntimeError("gpu_text.py encode failed")
    record.about("text", said.strip())


def kind_of(path: Any) -> str:
    """Return the kind of a parameter from its path. A kernel's bias has the kind of the kernel."""
    names = [str(key.key) for key in path]
    return next((kind for kind in (*KERNELS, *TABLES) if kind in names), "vectors")


def losses_by_position(model: Transformer, params: Any, parts: Any) -> jax.Array:
    """Return the mean loss at each position, `[context]`, over texts `[parts, sequences, context + 1]`."""

    def of(tokens: Any) -> jax.Array:
        log = jax.nn.log_softmax(model.logits(params, tokens[:, :-1]))
        return -jnp.take_along_axis(log, tokens[:, 1:, None], -1)[..., 0].mean(0)

    return jax.lax.map(of, parts).mean(0)


# -- what a step looks like --------------------------------------------------------------------------------------------


def spectral_norm(matrices: jax.Array, iterations: int = 40) -> jax.Array:
    """Estimate the largest singular values of `[k, m, n]` from below, by power iteration in float32."""
    start = jax.random.normal(jax.random.key(0), (len(matrices), matrices.shape[-1]))
    product = functools.partial(jnp.einsum, precision="highest")

    def iterate(_: Any, vectors: jax.Array) -> jax.Array:
        images = product("kmn,kn->km", matrices, vectors)
        vectors = product("kmn,km->kn", matrices, images)
        return vectors / (jnp.linalg.norm(vectors, axis=1, keepdims=True) + 1e-30)

    vectors = jax.lax.fori_loop(0, iterations, iterate, iterate(0, start))
    return jnp.linalg.norm(product("kmn,kn->km", matrices, vectors), axis=1)


def facts_of_step(before: Any, after: Any) -> dict[str, dict[str, jax.Array]]:
    """Return facts of a step for each kind of parameter.

    Returns:
      For the kernels of each kind `[blocks]`: the step's stable rank `|step|_F^2 / |step|_2^2`, and the step's norm
      over the kernel's, in the Frobenius and in the spectral norm. For a table `[1]`: the root mean square of the step,
      and the ratio of norms.
    """
    facts: dict[str, dict[str, jax.Array]] = {}
    for kind in KERNELS:
        kernel = before["blocks"][kind]["kernel"].astype(jnp.float32)
        step = after["blocks"][kind]["kernel"].astype(jnp.float32) - kernel
        frobenius, spectral = jnp.linalg.norm(step, axis=(1, 2)), spectral_norm(step)
        facts[kind] = {
            "stable rank": (frobenius / jnp.maximum(spectral, 1e-30)) ** 2,
            "|step|/|w|": frobenius / jnp.linalg.norm(kernel, axis=(1, 2)),
            "spectral |step|/|w|": spectral / spectral_norm(kernel),
        }
    for kind in TABLES:
        step = after[kind] - before[kind]
        ratio = jnp.linalg.norm(step) / jnp.linalg.norm(before[kind])
        facts[kind] = {"rms of step": jnp.sqrt(jnp.mean(step**2))[None], "|step|/|w|": ratio[None]}
    return facts


def multipliers_of(state: Any) -> dict[str, np.ndarray]:
    """Return the adaptive multipliers of the learning rate for each kind of parameter, from `kfac.kfac`'s state."""
    kept = kfac_state(state)
    found: dict[str, list[np.ndarray]] = {}
    for group in kept.settings.groups:
        rates = np.asarray(kept.blocks[group.name].momentum_state.rate).ravel()
        ends = np.cumsum(group.counts)[:-1]
        for layer, part in zip(group.layers, np.split(rates, ends), strict=True):
            kind = next((kind for kind in KINDS if kind in layer.name.split("/")), "vectors")
            found.setdefault(kind, []).append(part)
    return {kind: np.concatenate(parts) for kind, parts in found.items()}


def kfac_state(state: Any) -> Any:
    """Return the part of `kfac.kfac`'s state that holds the blocks."""
    [kept] = [part for part in state if isinstance(part, kfac.state.KfacState)]
    return kept


def in_short(values: Any) -> list[float]:
    """Return the first, the median and the last of some numbers, with four digits."""
    values = np.asarray(values, float).ravel()
    return [float(f"{x:.4g}") for x in (values[0], np.median(values), values[-1])]


# -- methods -----------------------------------------------------------------------------------------------------------


class Runner(NamedTuple):
    """A method with its settings.

    Attributes:
      init: returns the optimizer's state for parameters and a batch.
      step: returns parameters, state and loss after a step, from parameters, state, a batch and the step's number.
      multipliers: returns the adaptive multipliers of a state by kind; None for Muon.
    """

    init: Callable[[Any, Any], Any]
    step: Callable[[Any, Any, Any, int], Any]
    multipliers: Callable[[Any], dict[str, np.ndarray]] | None


class Scalars(NamedTuple):
    """The traced settings of a K-FAC or Muon step. `multipliers` has an entry for each leaf's kind."""

    rate: Any
    horizon: Any
    momentum: Any
    squares: Any
    split: Any
    orthogonal: Any
    multipliers: dict[str, Any]


class TracedDecay(kfac.SOAP):
    """`kfac.SOAP` with a traced decay of the squares, which is `now` while a step is traced."""

    now: ClassVar[Any] = 0.95

    def precondition_momentum(self, *arguments: Any) -> Any:
        traced = copy.copy(self)
        object.__setattr__(traced, "decay", self.now)  # `SOAP` is frozen, and accepts numbers only
        return super(TracedDecay, traced).precondition_momentum(*arguments)


def kfac_step(loss_fn: Any, layers: kfac.Layers, params: Any, state: Any, batch: Any, scalars: Scalars) -> Any:
    """Make a step of `kfac.kfac` with traced settings, as `kfac.train_step` does with constants."""
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    TracedDecay.now = scalars.squares
    updates, state = traced_kfac(layers, scalars).update(grads, state, params)
    fused = updates["blocks"]["queries_keys_values"]
    fused["kernel"] = jax.lax.cond(scalars.split > 0, with_own_lengths, lambda step: step, fused["kernel"])
    updates = jax.lax.cond(scalars.orthogonal > 0, orthogonalized, lambda steps: steps, updates)
    return _moved(params, updates, scalars.multipliers), state, loss


def with_own_lengths(step: jax.Array) -> jax.Array:
    """Give queries, keys and values the step lengths that three kernels would have.

    Args:
      step: the step of the fused kernels, `[blocks, width, 3 width]`. Its spectral norm is the root of 3 times the
        length for a square kernel.
    """
    length = spectral_norm(step) / 3**0.5
    parts = [x * (length / jnp.maximum(spectral_norm(x), 1e-30))[:, None, None] for x in jnp.split(step, 3, axis=2)]
    return jnp.concatenate(parts, axis=2).astype(step.dtype)


def orthogonalized(updates: Any) -> Any:
    """Make the singular values of each kernel's step about equal, as Muon does, and keep the largest."""
    without_momentum = optax.contrib.scale_by_muon(
        beta=0.0, nesterov=False, weight_dimension_numbers=optax.contrib.MuonDimensionNumbers(1, 2)
    )

    def of(path: Any, step: jax.Array) -> jax.Array:
        if not is_stacked_kernel(path, step):
            return step
        flat, _ = without_momentum.update(step, without_momentum.init(step))
        ratio = spectral_norm(step) / jnp.maximum(spectral_norm(flat), 1e-30)
        return (flat * ratio[:, None, None]).astype(step.dtype)

    return jax.tree_util.tree_map_with_path(of, updates)


def traced_kfac(layers: kfac.Layers, scalars: Scalars) -> Any:
    rate = methods.schedule(scalars.rate, scalars.horizon)
    return kfac.kfac(rate, layers, momentum=scalars.momentum, preconditioner=TracedDecay())


def observe(measure: Any, params: Any, state: Any, batch: Any, decay: Any) -> Any:
    """Take statistics and refresh all bases, whatever interval the state knows: the host decides when."""
    state = optax.tree.set(state, factor_ema_decay=decay, refresh_due=jnp.ones((), bool))
    return kfac.observe(state, measure(params, batch))


def muon(rate: optax.Schedule, adam: float = 1.0) -> optax.GradientTransformation:
    """Return Muon for a `Transformer`. Adam updates tables and vectors at `adam` times the rate.

    Each kernel in a stack is a separate matrix.
    """

    def dimensions(params: Any) -> Any:
        def of(path: Any, leaf: Any) -> Any:
            return optax.contrib.MuonDimensionNumbers(1, 2) if is_stacked_kernel(path, leaf) else None

        return jax.tree_util.tree_map_with_path(of, params)

    return optax.contrib.muon(
        rate,
        adam_b2=0.95,
        adam_learning_rate=lambda count: adam * rate(count),
        muon_weight_dimension_numbers=dimensions,
    )


def is_stacked_kernel(path: Any, leaf: Any) -> bool:
    return "blocks" in jax.tree_util.keystr(path) and leaf.ndim >= 3


def muon_step(loss_fn: Any, params: Any, state: Any, batch: Any, scalars: Scalars) -> Any:
    """Make a step of Muon. `multipliers` has `kernels`, and `adam` for all other parameters."""
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    updates, state = muon(methods.schedule(scalars.rate, scalars.horizon)).update(grads, state, params)

    def moved(path: Any, leaf: Any, update: Any) -> Any:
        kind = "kernels" if is_stacked_kernel(path, leaf) else "adam"
        return leaf + scalars.multipliers[kind] * update

    return jax.tree_util.tree_map_with_path(moved, params, updates), state, loss


def _moved(params: Any, updates: Any, multipliers: dict[str, Any]) -> Any:
    def of(path: Any, leaf: Any, update: Any) -> Any:
        return leaf + multipliers[kind_of(path)] * update

    return jax.tree_util.tree_map_with_path(of, params, updates)


def scalars_of(chosen: Variant, horizon: int) -> Scalars:
    """Return a variant's traced settings."""
    settings = chosen.settings
    if chosen.method == "muon":
        multipliers = {"kernels": 1.0, "adam": settings["adam"]}
    else:
        multipliers = {kind: chosen.multiplier(kind) for kind in KINDS}
    others = {name: settings.get(name, 0.0) for name in ("momentum", "squares", "split", "orthogonal")}
    scalars = Scalars(rate=chosen.rate, horizon=horizon, multipliers=multipliers, **others)
    return jax.tree.map(jnp.float32, scalars)


def is_due(number: int, interval: int) -> bool:
    """Return whether statistics precede step `number`, counted from 0.

    As in `kfac.kfac`, the interval is 1 for ten steps, 2 until step 20, 4 until step 40, and so on up to `interval`.
    """
    return number % min(interval, 1 << (number // 10).bit_length()) == 0


def traced_runners(
    record: Record, options: argparse.Namespace, model: Transformer, params: Any, batch: Any
) -> tuple[Callable[[Variant], Runner], dict[str, Any]]:
    """Compile one program per method for all of programme E's variants.

    Returns:
      A function that returns a variant's `Runner`, and the programs `"losses"` and `"facts"`.
    """
    layers = kfac.find_layers(model.loss, params, batch)
    some = {name: next((x for x in options.runs if x.method == name), None) for name in ("kfac", "muon")}
    fractions = sorted({x.settings["statistics"] for x in options.runs if x.method == "kfac"})
    programs: dict[str, tuple[Any, tuple[Any, ...]]] = common_programs(model, params, batch)
    inits = {}
    if some["kfac"] is not None:
        scalars = scalars_of(some["kfac"], options.steps)
        inits["kfac"] = jax.jit(lambda params: traced_kfac(layers, scalars).init(params))
        state = jax.eval_shape(inits["kfac"], params)
        step = functools.partial(kfac_step, model.loss, layers)
        programs["kfac"] = jax.jit(step, donate_argnums=(0, 1)), (params, state, batch, scalars)
        for fraction in fractions:
            measure = kfac.statistics(model.loss, layers, fraction=fraction)
            observed = jax.jit(functools.partial(observe, measure), donate_argnums=1)
            programs[f"statistics of {fraction:g}"] = observed, (params, state, batch, jnp.float32(0.95))
    if some["muon"] is not None:
        scalars_of_muon = scalars_of(some["muon"], options.steps)
        inits["muon"] = jax.jit(lambda params: muon(lambda count: 1.0).init(params))
        state = jax.eval_shape(inits["muon"], params)
        step = functools.partial(muon_step, model.loss)
        programs["muon"] = jax.jit(step, donate_argnums=(0, 1)), (params, state, batch, scalars_of_muon)
    compiled = compile_together(record, programs, options.compile_seconds)

    def runner(chosen: Variant) -> Runner:
        now = scalars_of(chosen, options.steps)

        def init(params: Any, batch: Any) -> Any:
            return inits[chosen.method](params)

        if chosen.method == "muon":
            return Runner(init, lambda params, state, batch, _: compiled["muon"](params, state, batch, now), None)
        own = kfac_state(jax.eval_shape(inits["kfac"], params)).settings.interval
        interval = int(chosen.settings["interval"]) or own.every
        decay = jnp.float32(chosen.settings["factors"])
        take = compiled[f"statistics of {chosen.settings['statistics']:g}"]

        def step(params: Any, state: Any, batch: Any, number: int) -> Any:
            if is_due(number, interval):
                state = take(params, state, batch, decay)
            return compiled["kfac"](params, state, batch, now)

        return Runner(init, step, multipliers_of)

    return runner, compiled


def common_programs(model: Transformer, params: Any, batch: Any) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Return the programs that measure a run, with their arguments, for `compile_together`."""
    held = jax.ShapeDtypeStruct((8, *batch.shape), jnp.int32)
    losses = jax.jit(functools.partial(losses_by_position, model))
    return {"losses": (losses, (params, held)), "facts": (jax.jit(facts_of_step), (params, params))}


def public_runner(chosen: Variant, loss_fn: Any, horizon: int) -> Runner:
    """Return a variant through the package's public interface, with constants instead of traced scalars."""
    settings = chosen.settings
    rate = kfac.schedules.warmup_linear_decay(chosen.rate, horizon)
    if chosen.method == "muon":
        tx = muon(rate, settings["adam"])

        def plain(params: Any, state: Any, batch: Any) -> Any:
            loss, grads = jax.value_and_grad(loss_fn)(params, batch)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, loss

        compiled = jax.jit(plain, donate_argnums=(0, 1))
        init = jax.jit(lambda params, batch: tx.init(params))
        return Runner(init, lambda params, state, batch, _: compiled(params, state, batch), None)
    if not chosen.public:
        raise ValueError(f"{chosen.text}: kfac.train_step has no option for {gpu_variants.ONLY_TRACED}")
    rules: dict[str, str | float] = {
        rf"(^|/){name}($|/)": chosen.multiplier(kind)
        for kind in KINDS
        for name in (("norm", "norm_attention", "norm_mlp") if kind == "vectors" else (kind,))
        if chosen.multiplier(kind) != 1
    }
    step = kfac.train_step(
        loss_fn,
        rate,
        rules=rules or None,
        momentum=settings["momentum"],
        preconditioner=kfac.SOAP(decay=settings["squares"]),
        statistics_fraction=settings["statistics"],
        verbose=False,
        donate=True,
    )
    return Runner(step.init, lambda params, state, batch, _: step(params, state, batch), multipliers_of)


def compile_by_running(runner: Runner, params: Any, batch: Any, pretended: float) -> float:
    """Run two steps, so that every program is compiled. Return the seconds for this."""
    began = time.perf_counter()
    params = jax.tree.map(jnp.copy, params)  # steps donate them
    state = runner.init(params, batch)
    for number in range(2):
        params, state, loss = runner.step(params, state, batch, number)
    jax.block_until_ready(loss)
    time.sleep(pretended)
    return time.perf_counter() - began


# -- training ----------------------------------------------------------------------------------------------------------


def train(
    record: Record, chosen: Variant, runner: Runner, params: Any, batches: Text, compiled: dict[str, Any], horizon: int
) -> dict[str, Any]:
    """Train for `horizon` steps; return the row. Its seconds exclude looks at the step and the validation text.

    Returns:
      The row. `curve` has, at ten moments, the step, the seconds, the losses on the validation text (mean, and for each
      of `RANGES`) and the training loss. `facts` has the facts of the step there: for each kind of parameter the first,
      median and last value over blocks.
    """
    params = jax.tree.map(jnp.copy, params)  # steps donate them
    state = runner.init(params, batches.batch(0))
    jax.block_until_ready(state)
    seconds, done = 0.0, 0
    curve: list[list[float | None]] = []
    facts: list[dict[str, Any]] = []
    for look in sorted({round(horizon * k / LOOKS) for k in range(1, LOOKS + 1)} - {0}):
        before: Any = None
        began = time.perf_counter()
        for number in range(done, look):
            if number == look - 1:
                before = jax.tree.map(jnp.copy, params)
            params, state, loss = runner.step(params, state, batches.batch(number), number)
        jax.block_until_ready(params)
        seconds += time.perf_counter() - began
        done = look
        by_position = np.asarray(compiled["losses"](params, batches.held), float)
        validation = round(float(by_position.mean()), 4)
        # A short context in a rehearsal has no late positions.
        parts = [by_position[part] for part in RANGES.values()]
        by_range = [round(float(part.mean()), 4) if len(part) else None for part in parts]
        curve.append([done, round(seconds, 2), validation, *by_range, round(float(loss), 4)])
        found = jax.device_get(compiled["facts"](before, params))
        shown: dict[str, Any] = {kind: {k: in_short(x) for k, x in found[kind].items()} for kind in found}
        if runner.multipliers is not None:
            for kind, rates in runner.multipliers(state).items():
                shown.setdefault(kind, {})["multiplier"] = in_short(rates)
        facts.append({"step": done} | shown)
        record.say(f"{chosen.text}: step {done}, {seconds:.1f} s, validation {validation:.4f}")
        record.keep(chosen.text, curve)
        if not np.isfinite(validation):
            break
    row: dict[str, Any] = {"steps": done, "seconds": seconds, "ms": 1e3 * seconds / done, "validation": validation}
    row |= dict(zip(RANGES, by_range, strict=True)) | {"curve": curve, "facts": facts}
    if chosen.method == "kfac":
        row["failed inversions"] = int(kfac.diagnostics(state)["failed_inversions"])
    record.keep(chosen.text, [])
    return row


class Start(NamedTuple):
    """Hold what all runs of a programme share.

    Attributes:
      text: the path of the token file.
      encoding: the process that writes this file, or None; see `start_encoding`.
      model: the GPT.
      params: its initial parameters.
      batch: a batch of zeros, `[sequences, context + 1]`, for compiling.
    """

    text: pathlib.Path
    encoding: subprocess.Popen[str] | None
    model: Transformer
    params: Any
    batch: jax.Array


def prepare(record: Record, options: argparse.Namespace) -> Start:
    """Start the encoding of the text, and build the GPT meanwhile."""
    text = text_of(options.scratch, options.vocabulary)
    encoding = start_encoding(options.vocabulary, text)
    model, sequences, params = gpt(options.vocabulary, options.rehearse)
    record.about("parameters", sum(x.size for x in jax.tree.leaves(params)))
    return Start(text, encoding, model, params, jnp.zeros((sequences, model.context + 1), jnp.int32))


def run_all(
    record: Record,
    options: argparse.Namespace,
    runner_of: Callable[[Variant], Runner],
    start: Start,
    compiled: dict[str, Any],
) -> None:
    """Train each variant of `--runs` in turn on the same batches; add a row for each."""
    finish_encoding(record, start.encoding)
    batches = Text(start.text, start.model.context, len(start.batch))
    jax.block_until_ready(batches.batch(0))
    took: dict[str, float] = {} if options.rehearse else dict(FORECAST)
    for chosen in options.runs:
        needs = 1.1e-3 * options.steps * took.get(chosen.method, 0.0) + 2 * (not options.rehearse)
        run = functools.partial(
            train, record, chosen, runner_of(chosen), start.params, batches, compiled, options.steps
        )
        if record.measure("Training", chosen.text, run, needs=needs):
            took[chosen.method] = record.row("Training", chosen.text)["ms"]


def missing(record: Record, options: argparse.Namespace) -> bool:
    """Return whether a variant has no row yet. Otherwise nothing needs to be compiled."""
    return any(not record.has("Training", chosen.text) for chosen in options.runs)


def search(record: Record, options: argparse.Namespace) -> None:
    """Run programme E."""
    options.runs = options.runs or [gpu_variants.variant(text) for text in gpu_variants.SEARCHED]
    options.steps = options.steps or (20 if options.rehearse else 500)
    if not missing(record, options):
        return
    start = prepare(record, options)
    runner_of, compiled = traced_runners(record, options, start.model, start.params, start.batch)
    run_all(record, options, runner_of, start, compiled)


def train_longer(record: Record, options: argparse.Namespace) -> None:
    """Run programme B."""
    searched: dict[str, Any] = {}
    for folder in (options.have, options.output):
        searched |= read(folder, "E").get("tables", {}).get("Training", {})
    options.runs = options.runs or gpu_variants.best(searched)
    options.steps = options.steps or (20 if options.rehearse else 1000)
    if not missing(record, options):
        return
    start = prepare(record, options)
    model, params, batch = start.model, start.params, start.batch
    runners = {chosen: public_runner(chosen, model.loss, options.steps) for chosen in options.runs}
    compile_runner = functools.partial(
        compile_by_running, params=params, batch=batch, pretended=options.compile_seconds
    )
    with concurrent.futures.ThreadPoolExecutor(len(runners)) as pool:
        running = pool.map(compile_runner, runners.values())
        compiled = compile_together(record, common_programs(model, params, batch), 0.0)
        for chosen, took in zip(runners, running, strict=True):
            record.about(f"seconds to compile {chosen.text}", round(took, 1))
    run_all(record, options, runners.__getitem__, start, compiled)
