"""Train K-FAC and Muon in turn on a GPU (programmes B, C and D)."""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import json
import pathlib
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import environment  # noqa: F401, isort: skip; before JAX is imported

import jax
import jax.numpy as jnp
import numpy as np
import optax

import kfac
from gpu_record import Record, Setting

FOLDER = pathlib.Path(__file__).resolve().parent
EXAMPLES = FOLDER.parent
sys.path[:0] = [str(EXAMPLES / folder) for folder in ("language_model", "cifar10")]

from transformer import Transformer  # noqa: E402

# Milliseconds per step if programme A has not measured them: the program's bound plus a third.
FORECAST = {"kfac": 50.0, "muon": 50.0}


# -- B: a GPT on Python sources ----------------------------------------------------------------------------------------


def muon(rate: optax.Schedule) -> optax.GradientTransformation:
    """Return Muon for a `Transformer`. Adam updates tables and vectors at 0.3 times the rate.

    Each kernel in a stack is a separate matrix.
    """

    def dimensions(params: Any) -> Any:
        def of(path: Any, leaf: Any) -> Any:
            stacked = "blocks" in jax.tree_util.keystr(path)
            if not stacked or leaf.ndim < 3:
                return None
            return optax.contrib.MuonDimensionNumbers(1, 2)

        return jax.tree_util.tree_map_with_path(of, params)

    def adam_rate(count: Any) -> Any:
        return 0.3 * rate(count)

    return optax.contrib.muon(
        rate, adam_b2=0.95, adam_learning_rate=adam_rate, muon_weight_dimension_numbers=dimensions
    )


class Trained(NamedTuple):
    """A method's two compiled functions."""

    init: Callable[..., Any]
    step: Callable[..., Any]


def prepare(chosen: Setting, loss_fn: Any, params: Any, batch: Any, horizon: int) -> Trained:
    """Return a method's functions. The rate rises for a tenth of `horizon` steps, and then falls to zero."""
    rate = kfac.schedules.warmup_linear_decay(chosen.rate, horizon)
    if chosen.method == "kfac":
        step = kfac.train_step(loss_fn, rate, verbose=False, donate=True)
        return Trained(step.init, step)
    tx = muon(rate)

    def plain(params: Any, state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return Trained(jax.jit(lambda params, batch: tx.init(params)), jax.jit(plain, donate_argnums=(0, 1)))


def compile_by_running(trained: Trained, params: Any, batch: Any, pretended: float) -> float:
    """Run two steps, so that every program is compiled. Return the seconds for this."""
    began = time.perf_counter()
    params = jax.tree.map(jnp.copy, params)  # steps donate them
    state = trained.init(params, batch)
    for _ in range(2):
        params, state, loss = trained.step(params, state, batch)
    jax.block_until_ready(loss)
    time.sleep(pretended)
    return time.perf_counter() - began


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


def text_of(output: pathlib.Path, vocabulary: pathlib.Path) -> pathlib.Path:
    """Return the path of the token file for a vocabulary."""
    return output / f"tokens-{zlib.crc32(vocabulary.read_bytes()):08x}.npz"


def start_encoding(vocabulary: pathlib.Path, text: pathlib.Path) -> subprocess.Popen[str]:
    """Start a process that writes the tokens to the file `text`."""
    command = [sys.executable, str(FOLDER / "gpu_text.py"), "encode", str(vocabulary), str(text)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def finish_encoding(record: Record, encoding: subprocess.Popen[str]) -> None:
    """Wait for the process from `start_encoding`, and record the text's size."""
    record.doing = "encoding the text"
    said, _ = encoding.communicate(timeout=max(1.0, record.left - 5))
    if encoding.returncode:
        raise RuntimeError("gpu_text.py encode failed")
    record.about("text", said.strip())


def evaluator(model: Transformer) -> Callable[..., Any]:
    """Return a compiled function that computes the mean loss over a text's parts."""
    return jax.jit(lambda params, parts: jax.lax.map(lambda part: model.loss(params, part), parts).mean())


def train_gpt(record: Record, options: argparse.Namespace) -> None:
    """Train each of `--runs` in turn on the same batches; add a row with a curve for each."""
    model, sequences, params = gpt(options.vocabulary, options.rehearse)
    text = text_of(options.output, options.vocabulary)
    encoding = None if text.is_file() else start_encoding(options.vocabulary, text)
    batch = jnp.zeros((sequences, model.context + 1), jnp.int32)
    horizons = {one: horizon_of(one, options) for one in options.runs}
    methods = {one: prepare(one, model.loss, params, batch, horizons[one]) for one in options.runs}
    record.about("parameters", sum(x.size for x in jax.tree.leaves(params)))
    record.doing = "compiling"
    evaluate = evaluator(model)
    with concurrent.futures.ThreadPoolExecutor(len(methods) + 1) as pool:
        held = jnp.zeros((8, *batch.shape), jnp.int32)
        looking = pool.submit(lambda: jax.block_until_ready(evaluate(params, held)))
        compiling = {
            one: pool.submit(compile_by_running, method, params, batch, options.compile_seconds)
            for one, method in methods.items()
        }
        for one, future in compiling.items():
            future.add_done_callback(functools.partial(_say_compiled, record, one.name))
    looking.result()
    if encoding is not None:
        record.say("compiled; waiting for the text")
        finish_encoding(record, encoding)
    batches = Text(text, model.context, sequences)
    jax.block_until_ready(batches.batch(0))
    for one, method in methods.items():
        if compiling[one].exception():
            record.repeat("Training", one.name, f"compiling failed: {str(compiling[one].exception())[:300]}")
            continue
        needs = 1e-3 * horizons[one] * milliseconds_of(one, options)
        look = functools.partial(evaluate, parts=batches.held)
        run = functools.partial(train_one, record, one, method, params, batches.batch, look, horizons[one])
        if record.measure("Training", one.name, run, needs=needs):
            row = record.row("Training", one.name)
            record.add("Training", one.name, row | {"compiling s": compiling[one].result()})


def _say_compiled(record: Record, name: str, _: Any) -> None:
    record.say(f"compiled {name}")


def _rows(tokens: np.ndarray, starts: np.ndarray, context: int) -> np.ndarray:
    return tokens[starts[:, None] + np.arange(context + 1)].astype(np.int32)


def milliseconds_of(chosen: Setting, options: argparse.Namespace) -> float:
    """Return the milliseconds per step that programme A has measured, or a forecast."""
    tables = json.loads(options.speed.read_text())["tables"] if options.speed else {}
    measured = tables.get("gpt-124m, milliseconds", {}).get("kfac.train_step" if chosen.method == "kfac" else "muon")
    return measured["ms"] if measured else FORECAST[chosen.method]


def horizon_of(chosen: Setting, options: argparse.Namespace) -> int:
    """Return the number of steps that fit into `--seconds`."""
    if options.rehearse:
        return 20
    return round(1e3 * options.seconds / milliseconds_of(chosen, options))


def train_one(
    record: Record,
    chosen: Setting,
    trained: Trained,
    params: Any,
    batch_of: Callable[[int], Any],
    evaluate: Callable[[Any], Any],
    horizon: int,
) -> dict[str, Any]:
    """Train for `horizon` steps; return the row. Its seconds exclude evaluations on the validation text."""
    params = jax.tree.map(jnp.copy, params)  # steps donate them
    state = trained.init(params, batch_of(0))
    looks = sorted({round(horizon * k / 12) for k in range(1, 13)})
    seconds, done = 0.0, 0
    curve = []
    for look in looks:
        began = time.perf_counter()
        for number in range(done + 1, look + 1):
            params, state, loss = trained.step(params, state, batch_of(number))
        jax.block_until_ready(params)
        seconds += time.perf_counter() - began
        done = look
        validation = float(evaluate(params))
        curve.append([done, round(seconds, 2), round(validation, 4), round(float(loss), 4)])
        record.say(f"{chosen.name}: step {done}, {seconds:.1f} s, validation {validation:.4f}")
        if not np.isfinite(validation):
            break
    row = {"steps": done, "seconds": seconds, "ms": 1e3 * seconds / done, "validation": curve[-1][2], "curve": curve}
    if chosen.method == "kfac":
        row["failed inversions"] = int(kfac.diagnostics(state)["failed_inversions"])
    return row


# -- C: ResNet-18 on CIFAR-10 ------------------------------------------------------------------------------------------


def train_cifar10(record: Record, options: argparse.Namespace) -> None:
    """Train K-FAC and Muon in turn for 10 epochs, then for 20 epochs, and so on until the time is up."""
    import compare

    data = options.data_dir
    if not options.rehearse and not (data and data.is_dir()):
        record.repeat("ResNet-18 on CIFAR-10", "all", "no --data-dir: sh examples/imagenet/get_cifar10.sh fetches it")
        return
    results = options.output / "cifar10.jsonl"
    epochs = 10

    def row(method: str, rate: float, epochs: int) -> dict[str, Any]:
        settings = ["--data-dir", str(data), "--method", method, "--rate", str(rate), "--resident", "--parts", "1"]
        settings += ["--output", str(options.output / "runs"), "--results", str(results)]
        if options.rehearse:
            settings += ["--network", "resnet8", "--width", "4", "--batch", "20", "--toy", "--horizon", "2"]
        else:
            settings += ["--network", "resnet18", "--width", "64", "--batch", "1000", "--horizon", str(50 * epochs)]
        compare.main(["run", *settings, "--every", "2" if options.rehearse else "50"])
        found = [json.loads(line) for line in results.read_text().splitlines()]
        curve = [one for one in found if one["method"] == method and one["horizon"] == found[-1]["horizon"]]
        there = [one for one in curve if one["accuracy"] >= 0.94]
        last = curve[-1]
        return {
            "steps": last["step"],
            "accuracy": last["accuracy"],
            "seconds": last["wall_seconds"],
            "compiling s": last["compiling"],
            "steps to 94%": there[0]["step"] if there else None,
            "seconds to 94%": there[0]["wall_seconds"] if there else None,
        }

    while record.left > 30 and epochs <= 80:
        for method, rate in (("kfac", 0.1), ("muon", 0.1)):
            name = f"{method}, {epochs} epochs"
            record.measure("ResNet-18 on CIFAR-10", name, functools.partial(row, method, rate, epochs), needs=30)
        if options.rehearse:
            return
        epochs *= 2


# -- D: a step at a batch of 131,072 -----------------------------------------------------------------------------------


def step_at_128k(record: Record, options: argparse.Namespace) -> None:
    """Add the seconds and the memory for a step of the bs128k recipe on a single device."""
    table = "One step of ResNet-50 at a batch of 131,072"
    if options.rehearse:
        sizes = ["--global-batch", "64", "--local-batch", "32", "--image-size", "32"]
    else:
        sizes = ["--global-batch", "131072", "--local-batch", "256", "--image-size", "224", "--dtype", "bfloat16"]

    def images_of_the_device() -> dict[str, Any]:
        command = [sys.executable, str(FOLDER / "large_batch_step.py"), *sizes]
        return json.loads(_output(command, record).splitlines()[-1])

    def whole_example() -> dict[str, Any]:
        command = [sys.executable, str(EXAMPLES / "imagenet" / "train.py"), "--config", "bs128k", "--data", "synthetic"]
        command += ["--steps", "1", "--output", str(options.output / "bs128k")]
        if options.rehearse:
            command += ["--global-batch", "64", "--local-batch", "32", "--image-size", "32", "--arch", "resnet20"]
            command += ["--synthetic-images", "64"]
        else:
            command += ["--local-batch", "256", "--synthetic-images", "131072"]
        began = time.perf_counter()
        said = _output(command, record)
        return {"seconds with start and compiling": time.perf_counter() - began, "said": said.splitlines()[-1][:200]}

    record.measure(table, "images made on the device", images_of_the_device, needs=120 if not options.rehearse else 0)
    record.measure(table, "examples/imagenet/train.py", whole_example, needs=120 if not options.rehearse else 0)


def _output(command: list[str], record: Record) -> str:
    """Run a command; return its output. If it fails, the error contains the last lines of its stderr."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=max(10.0, record.left - 5))
    print(done.stdout, done.stderr, flush=True)
    if done.returncode:
        raise RuntimeError(f"code {done.returncode}: {' '.join(done.stderr.splitlines()[-3:])}")
    return done.stdout
