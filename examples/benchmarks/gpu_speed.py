"""Time training steps on a GPU, compare them with a CPU's, and profile their kernels (programmes A, C and D)."""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import environment  # noqa: F401, isort: skip; before JAX is imported

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import kfac
import steps
from gpu_counts import count
from gpu_record import Record

# Each preconditioner with its limit for the largest relative error in a parameter's change. SOAP's default rotates in
# TensorFloat-32. With simulated TensorFloat-32 rounding, three steps on a CPU differ by 0.052 (docs/evidence.md).
INVERSES = {
    "SOAP": (kfac.SOAP(), 0.1),
    "SOAP in float32": (kfac.SOAP(precision="float32"), 0.02),
    "Cholesky": (kfac.Cholesky(), 0.02),
    "Eigh": (kfac.Eigh(), 0.02),
    "EKFAC": (kfac.EKFAC(), 0.02),
}
FOLDER = pathlib.Path(__file__).resolve().parent
EXAMPLES = FOLDER.parent
LOOP = "kfac.train_step"
# From this step on, the interval between statistics no longer grows. It doubles until it reaches at most 16 steps.
GROWN = 96


# -- do the preconditioners agree with a CPU's? ------------------------------------------------------------------------


def three_steps(preconditioner: Any) -> list[np.ndarray]:
    """Train a small network for three steps; return the losses and each parameter's change.

    The network has two convolutions, a norm and two dense layers.
    """
    rng = np.random.default_rng(0)

    def array(*shape: int) -> Any:
        return jnp.asarray(rng.normal(size=shape) * math.prod(shape[:-1]) ** -0.5, jnp.float32)

    params = {
        "first": array(3, 3, 3, 32),
        "conv": array(3, 3, 32, 32),
        "scale": jnp.ones(32),
        "up": array(32, 96),
        "down": array(96, 10),
    }
    batch = jnp.asarray(rng.normal(size=(64, 8, 8, 3)), jnp.float32), jnp.asarray(rng.integers(0, 10, 64))

    def convolution(x: Any, kernel: Any) -> Any:
        return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x = convolution(jnp.tanh(convolution(batch[0], params["first"])), params["conv"])
        x = x - x.mean(-1, keepdims=True)
        x = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * params["scale"]
        x = jnp.tanh(x).mean((1, 2)) @ params["up"]
        logits = jnp.tanh(x) @ params["down"]
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), batch[1][:, None], 1))

    # Products in full float32, so that the network itself adds no differences.
    with jax.default_matmul_precision("highest"):
        step = kfac.train_step(loss_fn, 0.1, preconditioner=preconditioner, verbose=False)
        now, state = params, step.init(params, batch)
        losses = []
        for _ in range(3):
            now, state, loss = step(now, state, batch)
            losses.append(float(loss))
    changes = jax.tree.map(lambda after, before: np.asarray(after - before), now, params)
    return [np.array(losses), *jax.tree.leaves(changes)]


def start_reference(folder: pathlib.Path) -> subprocess.Popen[bytes]:
    """Start a process that computes `three_steps` on a CPU and writes them to `reference.npz`."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, __file__, "--reference", str(folder / "reference.npz")]
    paths = [str(pathlib.Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
    variables = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return subprocess.Popen(command, env=os.environ | variables)


def write_reference(path: pathlib.Path) -> None:
    found: dict[str, Any] = {}
    for name, (preconditioner, _) in INVERSES.items():
        for k, array in enumerate(three_steps(preconditioner)):
            found[f"{name}-{k}"] = array
    np.savez(path, **found)


def disagreement(found: Sequence[np.ndarray], expected: Sequence[np.ndarray], limit: float) -> dict[str, Any]:
    """Return the losses' relative error and the largest relative error in a parameter's change, both in the 2-norm."""
    errors = [float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(found, expected, strict=True)]
    losses, changes = errors[0], max(errors[1:])
    return {
        "error of losses": losses,
        "largest error of a change": changes,
        "agrees": losses < 1e-3 and changes < limit,
    }


def compare_with_cpu(record: Record, reference: subprocess.Popen[bytes], folder: pathlib.Path) -> None:
    """Add a row for each preconditioner to the record. `folder` is that of `start_reference`."""
    title = "Three steps against a CPU"

    def row(name: str) -> dict[str, Any]:
        preconditioner, limit = INVERSES[name]
        found = three_steps(preconditioner)
        if reference.wait(timeout=max(1.0, record.left)):
            raise RuntimeError("the steps on the CPU failed")
        with np.load(folder / "reference.npz") as truth:
            expected = [truth[f"{name}-{k}"] for k in range(len(found))]
        return disagreement(found, expected, limit)

    with concurrent.futures.ThreadPoolExecutor(len(INVERSES)) as pool:
        for name in INVERSES:
            pool.submit(record.measure, title, name, functools.partial(row, name), 20)


# -- milliseconds per step ---------------------------------------------------------------------------------------------


class Program(NamedTuple):
    """A compiled step.

    Attributes:
      compiled: maps parameters, optimizer state and a batch to new parameters, a new state and the loss.
      arguments: parameters, state and batch. A run replaces the first two.
      tracing: seconds to trace.
      compiling: seconds to compile.
    """

    compiled: Any
    arguments: list[Any]
    tracing: float
    compiling: float

    def run(self) -> Any:
        """Run a step. Return the new parameters and the loss, for the caller to wait for."""
        params, state, loss = self.compiled(*self.arguments)
        self.arguments[:2] = params, state
        return params, loss


def filled(shapes: Any, classes: int = 10) -> Any:
    """Return arrays with the given shapes.

    Kernels get scaled normal numbers, and vectors get ones. Integer arrays get numbers below `classes`.
    """
    leaves, structure = jax.tree.flatten(shapes)

    def one(k: int, x: Any) -> Any:
        if jnp.issubdtype(x.dtype, jnp.integer):
            return jax.random.randint(jax.random.key(k), x.shape, 0, classes, x.dtype)
        if len(x.shape) < 2:
            return jnp.ones(x.shape, x.dtype)
        return jax.random.normal(jax.random.key(k), x.shape, x.dtype) * (x.size / x.shape[-1]) ** -0.5

    make = jax.jit(lambda: [one(k, x) for k, x in enumerate(leaves)])
    return jax.tree.unflatten(structure, make())


def classes_of(task: steps.Task) -> int:
    """Return the number of words or labels, so that statistics have the same rank as in training."""
    leaves = jax.tree_util.tree_leaves_with_path(task.params)
    tables = [leaf.shape[0] for path, leaf in leaves if "tokens" in jax.tree_util.keystr(path)]
    return tables[0] if tables else 10


class Start(NamedTuple):
    """Parameters and a batch from which all rows start."""

    params: Any
    batch: Any

    def copy(self) -> Any:
        """Return a copy of the parameters, because a row's steps donate them."""
        return jax.tree.map(jnp.copy, self.params)


def compile_row(row: str, task: steps.Task, start: Start, options: argparse.Namespace) -> Program:
    settings = argparse.Namespace(devices=1, preconditioner="soap", refresh="apart", inverse_update_period=100)
    step, tx = steps.make_step(row, task, settings)
    params, batch = start.copy(), start.batch
    state = jax.jit(tx.init)(params)
    began = time.perf_counter()
    lowered = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, batch)
    traced = time.perf_counter()
    compiled = lowered.compile()
    compiling = time.perf_counter() - traced
    time.sleep(options.compile_seconds)  # a rehearsal imitates the GPU's compile time
    return Program(compiled, [params, state, batch], traced - began, compiling + options.compile_seconds)


class Loop:
    """A user's training loop with `kfac.train_step`."""

    def __init__(self, task: steps.Task, start: Start, options: argparse.Namespace) -> None:
        began = time.perf_counter()
        self.step = kfac.train_step(task.loss_fn, 0.1, verbose=False, donate=True)
        self.params, self.batch = start.copy(), start.batch
        self.state = self.step.init(self.params, self.batch)
        self.dues: list[bool] = []
        self.run()  # the first step takes statistics, so this compiles both programs
        jax.block_until_ready(self.params)
        time.sleep(options.compile_seconds)
        self.compiling = time.perf_counter() - began

    def run(self, note: bool = True) -> None:
        """Run a step. With `note`, record if it takes statistics, which waits for the previous step."""
        if note:
            self.dues.append(bool(kfac.statistics_due(self.state)))
        self.params, self.state, _ = self.step(self.params, self.state, self.batch)

    def milliseconds(self, number: int) -> dict[str, Any]:
        """Time `number` steps together, and then another `number` steps individually."""
        while len(self.dues) < GROWN:
            self.run()
        jax.block_until_ready(self.params)
        self.dues.clear()
        began = time.perf_counter()
        for _ in range(number):
            self.run(note=False)
        jax.block_until_ready(self.params)
        mean = 1e3 * (time.perf_counter() - began) / number
        kinds: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(number):
            began = time.perf_counter()
            self.run()
            jax.block_until_ready(self.params)
            kinds[self.dues[-1]].append(1e3 * (time.perf_counter() - began))
        medians = {kind: statistics.median(times) if times else None for kind, times in kinds.items()}
        return {
            "ms": mean,
            "ms of a plain step": medians[False],
            "ms with statistics": medians[True],
            "steps with statistics": f"{sum(self.dues)} of {number}",
            "compiling s": self.compiling,
        }


def median_milliseconds(program: Program, number: int) -> float:
    """Return the median over three means. Each mean is over `number` steps that do not wait for each other."""
    jax.block_until_ready(program.run())
    means = []
    for _ in range(3):
        began = time.perf_counter()
        for _ in range(number):
            last = program.run()
        jax.block_until_ready(last)
        means.append(1e3 * (time.perf_counter() - began) / number)
    return statistics.median(means)


def time_steps(record: Record, model: str, options: argparse.Namespace) -> dict[str, Program]:
    """Add a model's speed table to the record; return the model's programs.

    All programs compile in parallel threads. The table has a row for each of `--rows`, including the loop with
    `kfac.train_step`. A further row holds the mean over an interval.
    """
    small = argparse.Namespace(small=options.rehearse, batch=None, image_size=224)
    task = steps.task(model, small)
    title = f"{model}, milliseconds"
    wanted = [row for row in options.rows if not record.has(title, row)]
    record.doing = f"compiling {model}"
    start = Start(filled(task.params), filled(task.batch, classes_of(task)))
    makers: dict[str, Callable[[], Any]] = {
        row: functools.partial(compile_row, row, task, start, options) for row in wanted if row != LOOP
    }
    if LOOP in wanted:
        makers[LOOP] = functools.partial(Loop, task, start, options)
    began = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(len(makers) or 1) as pool:
        futures = {row: pool.submit(make) for row, make in makers.items()}
        for row, future in futures.items():
            if future.exception():
                record.repeat(title, row, f"compiling failed: {str(future.exception())[:300]}")
            else:
                record.say(f"compiled {row}")
    record.about(f"{model}: seconds to compile all programs in parallel", round(time.perf_counter() - began, 1))
    made = {row: future.result() for row, future in futures.items() if not future.exception()}
    number = 3 if options.rehearse else 20

    def measured(row: str) -> dict[str, Any]:
        program = made[row]
        if row == "refresh":
            if "observe" not in made:
                raise RuntimeError("a refresh needs averages: measure it in one call with the row 'observe'")
            program.arguments[1] = made["observe"].arguments[1]
            made["observe"].arguments[1] = jax.tree.map(jnp.copy, program.arguments[1])
        ms = median_milliseconds(program, number)
        bound = 1e3 * count(program.compiled.as_text() or "", taken=row == "refresh").bound
        memory = program.compiled.memory_analysis()
        return {
            "ms": ms,
            "bound ms": bound,
            "over the bound": ms / bound if bound else None,
            "temporary GB": memory.temp_size_in_bytes / 1e9 if memory else None,
            "tracing s": program.tracing,
            "compiling s": program.compiling,
        }

    for row in wanted:
        if row not in made:
            continue
        if row == LOOP:
            record.measure(title, row, lambda: made[LOOP].milliseconds(32), needs=10)
            del made[LOOP]
        else:
            record.measure(title, row, functools.partial(measured, row), needs=5)
    if all(record.has(title, row) for row in (LOOP, "without", "observe", "refresh")):
        with_statistics = int(record.row(title, LOOP)["steps with statistics"].split()[0]) / 32
        plain, observe, refresh = (record.row(title, row)["ms"] for row in ("without", "observe", "refresh"))
        record.add(title, "mean of the programs", {"ms": plain + with_statistics * (observe + refresh)})
    return made


# -- the longest kernels -----------------------------------------------------------------------------------------------


class Event(NamedTuple):
    name: str
    start: float  # milliseconds
    duration: float


def profile(record: Record, model: str, row: str, program: Program, number: int = 5) -> None:
    """Add a step's ten longest kernels to the record, and the time in which no kernel runs."""
    title = f"{model}, {row}: the ten longest kernels"
    if title in record.found["tables"]:
        return
    jax.block_until_ready(program.run())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(number):
                last = program.run()
            jax.block_until_ready(last)
        [trace] = pathlib.Path(folder).rglob("*.xplane.pb")
        events = device_events(trace)
    times: dict[str, list[float]] = {}
    for event in events:
        times.setdefault(event.name, []).append(event.duration)
    busy = sum(map(sum, times.values()))
    longest_kernels = sorted(times.items(), key=lambda item: -sum(item[1]))[:10]
    for place, (name, values) in enumerate(longest_kernels, 1):
        record.add(title, f"{place}. {name[:66]}", {
            "ms a step": sum(values) / number,
            "launches a step": len(values) / number,
            "share": sum(values) / busy if busy else None,
        })  # fmt: skip
    idle = gaps(events)
    longest = sorted(idle, reverse=True)[:5]
    record.add(f"{model}, {row}: busy and idle", "a step", {
        "busy ms": busy / number,
        "idle ms": sum(idle) / number,
        "launches": len(events) / number,
        "longest gaps ms": ", ".join(f"{gap:.3f}" for gap in longest),
    })  # fmt: skip


def device_events(path: pathlib.Path) -> list[Event]:
    """Return the kernels on a GPU's streams. Without a GPU, return the operations in XLA's threads."""
    kernels: list[Event] = []
    operations: list[Event] = []
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        on_gpu = plane.name.startswith("/device:GPU")
        for line in plane.lines:
            if not line.name.startswith("Stream" if on_gpu else "tf_XLA"):
                continue
            for event in line.events:
                found = Event(event.name, event.start_ns / 1e6, event.duration_ns / 1e6)
                if on_gpu:
                    kernels.append(found)
                elif "::" not in found.name and not found.name.startswith("end: "):
                    operations.append(found)
    return kernels or operations


def gaps(events: Sequence[Event]) -> list[float]:
    """Return the gaps in milliseconds between the end of all earlier kernels and the start of the next kernel."""
    found = []
    end = math.inf
    for event in sorted(events, key=lambda event: event.start):
        if event.start > end:
            found.append(event.start - end)
        end = event.start + event.duration if end == math.inf else max(end, event.start + event.duration)
    return found


# -- a step at a batch of 131,072 --------------------------------------------------------------------------------------


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
        command += ["--steps", "1", "--output", str(options.scratch / "bs128k")]
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


if __name__ == "__main__":
    write_reference(pathlib.Path(sys.argv[2]))
