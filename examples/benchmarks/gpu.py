"""What K-FAC does on a GPU, in one command of at most twenty minutes, its parts saved as each ends.

    python examples/benchmarks/gpu.py                                   # on a GPU
    python examples/benchmarks/gpu.py --wheels wheels --data-dir data/cifar10
    python examples/benchmarks/gpu.py --rehearse                        # on a CPU, small: minutes
    python examples/benchmarks/gpu.py --parts works speed --models gpt-124m

Parts, in this order: `works` (steps with each inverse against a CPU's), `tests` (quick files of the package's, where
pytest is there), `speed` (seconds of steps, the bound beside them, seconds to compile), `profile` (the ten kernels that
take longest), `compile` (a second start, from what the first one kept), `training` (ResNet-18 on CIFAR-10 to 94%, K-FAC
and Muon in turn, for as long as is left). Each is a process of its own with a share of the time; one that fails leaves
the others alone. Writes `gpu.json`, `gpu.md` and a log of each part to --output.

A Python that has jax for CUDA needs nothing else, where the other wheels lie beside it:
`pip download --dest wheels optax flax pillow pytest scikit-learn`, the last two for `tests`. Of these, what that Python
has already is left alone.
"""

import argparse
import functools
import importlib.metadata
import importlib.util
import itertools
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

FOLDER = pathlib.Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
# Minutes that each part may take of the twenty; training gets what is left.
PARTS = {"works": 2.5, "tests": 1.5, "speed": 8.0, "profile": 1.5, "compile": 1.5, "training": 20.0}
MODELS = ("gpt-124m", "resnet50", "vit-b16")
# The rows of a table, those first without which it says nothing.
ROWS = ("sgd", "without", "statistics", "refresh", "muon", "adamw")
TESTS = ("tests/test_trajectory.py", "tests/test_inverse.py", "tests/test_narrow_products.py")


# -- the command: starts the parts, and writes down what they found ---------------------------------------------------


def unpacked(wheels: pathlib.Path, folder: pathlib.Path) -> None:
    """Unpacks those wheels whose packages this Python does not have."""
    for wheel in sorted(wheels.glob("*.whl")):
        name = wheel.name.split("-")[0]
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)


def run_parts(options: argparse.Namespace) -> dict[str, Any]:
    output = options.output
    output.mkdir(parents=True, exist_ok=True)
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    if options.wheels:
        unpacked(options.wheels, output / "packages")
        paths.insert(1, str((output / "packages").resolve()))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    environment |= {"JAX_COMPILATION_CACHE_DIR": str((output / "cache").resolve())}
    environment |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    if options.rehearse:
        environment["JAX_PLATFORMS"] = "cpu"
    results: dict[str, Any] = {"command": " ".join(["python", "examples/benchmarks/gpu.py", *sys.argv[1:]])}
    began = time.monotonic()
    for part in options.parts:
        left = 60 * options.minutes - (time.monotonic() - began)
        # Training is the last that may be cut short; what comes before it keeps its share.
        limit = min(left, 60 * PARTS[part] * options.minutes / 20)
        if limit < 10:
            results[part] = {"ended": "no time was left for it"}
            continue
        found = output / f"{part}.json"
        found.unlink(missing_ok=True)
        command = [sys.executable, str(FOLDER / "gpu.py"), "--part", part, "--seconds", str(round(limit)),
                   "--output", str(output), "--models", *options.models, *(["--rehearse"] * options.rehearse),
                   *(["--data-dir", str(options.data_dir)] if options.data_dir else [])]  # fmt: skip
        started = time.monotonic()
        with (output / f"{part}.log").open("w") as log:
            try:
                code = subprocess.run(command, env=environment, stdout=log, stderr=log, timeout=limit).returncode
                ended = "done" if code == 0 else f"failed with code {code}: see {part}.log"
            except subprocess.TimeoutExpired:
                ended = f"stopped after {limit:.0f} s"
        results[part] = json.loads(found.read_text()) if found.is_file() else {}
        results[part] |= {"ended": ended, "seconds": round(time.monotonic() - started, 1)}
        (output / "gpu.json").write_text(json.dumps(results, indent=2) + "\n")
        (output / "gpu.md").write_text(page(results))
        print(f"{part}: {ended}, {results[part]['seconds']} s", flush=True)
    return results


def page(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = ["# K-FAC on a GPU", "", f"`{results['command']}`"]
    for part in PARTS:
        if part not in results:
            continue
        found = dict(results[part])
        lines += ["", f"## {part}", ""]
        lines += [f"- {name}: {value}" for name, value in found.items() if not isinstance(value, list | dict)]
        for name, rows in found.items():
            if isinstance(rows, list) and rows:
                lines += ["", f"### {name}", "", table(rows)]
    return "\n".join(lines) + "\n"


def table(rows: list[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))

    def text(value: Any) -> str:
        return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)

    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    return "\n".join(lines + ["| " + " | ".join(text(row.get(name)) for name in names) + " |" for row in rows])


# -- the parts: each in a process, and each writes what it has after every row ----------------------------------------


class Notes:
    """What a part has found so far, on disk after every line."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.path, self.found = options.output / f"{options.part}.json", dict[str, Any]()
        self.began, self.seconds = time.monotonic(), options.seconds

    def __call__(self, name: str, value: Any) -> None:
        """Adds a row to the table `name`; anything but a row is its value."""
        if isinstance(value, dict):
            self.found.setdefault(name, []).append(value)
        else:
            self.found[name] = value
        print(name, value, flush=True)
        self.path.write_text(json.dumps(self.found, indent=2) + "\n")

    @property
    def left(self) -> float:
        return self.seconds - (time.monotonic() - self.began)


def sync(tree: Any) -> Any:
    import jax

    return jax.block_until_ready(tree)


def moves(inverses: Sequence[Any], dtype: str = "float32") -> dict[str, list[Any]]:
    """Losses of three steps with each inverse, and what they changed: a convolution, a norm and two dense layers."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import kfac

    rng = np.random.default_rng(0)

    def array(*shape: int) -> Any:
        return jnp.asarray(rng.normal(size=shape) * math.prod(shape[:-1]) ** -0.5, jnp.float32)

    params = {"first": array(3, 3, 3, 32), "conv": array(3, 3, 32, 32), "scale": jnp.ones(32), "up": array(32, 96),
              "down": array(96, 10)}  # fmt: skip
    batch = jnp.asarray(rng.normal(size=(64, 8, 8, 3)), dtype), jnp.asarray(rng.integers(0, 10, 64))

    def convolution(x: Any, kernel: Any) -> Any:
        return lax.conv_general_dilated(
            x, kernel.astype(dtype), (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x = convolution(jnp.tanh(convolution(batch[0], params["first"])), params["conv"]).astype(jnp.float32)
        x = x - x.mean(-1, keepdims=True)
        x = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * params["scale"]
        x = jnp.tanh(x).mean((1, 2)).astype(dtype) @ params["up"].astype(dtype)
        logits = (jnp.tanh(x) @ params["down"].astype(dtype)).astype(jnp.float32)
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), batch[1][:, None], 1))

    lax = jax.lax
    found = {}
    for inverse in inverses:
        step = kfac.train_step(loss_fn, 0.05, inverse=inverse, verbose=False)
        now, state = params, step.init(params, batch)
        losses = []
        # Products in full float32: what differs then is the package's.
        with jax.default_matmul_precision("highest"):
            for _ in range(3):
                now, state, loss = step(now, state, batch)
                losses.append(float(loss))
        change = jax.tree.map(lambda a, b: np.asarray(a - b), now, params)
        found[type(inverse).__name__] = [np.array(losses), *jax.tree.leaves(change)]
    return found


def disagreement(found: list[Any], expected: list[Any]) -> dict[str, Any]:
    import numpy as np

    errors = [float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(found, expected, strict=True)]
    return {"error of losses": errors[0], "largest error of a move": max(errors[1:]),
            "agrees": errors[0] < 1e-3 and max(errors[1:]) < 0.02}  # fmt: skip


def part_works(options: argparse.Namespace, notes: Notes) -> None:
    import numpy as np

    import kfac

    inverses = (kfac.Soap(), kfac.Cholesky(), kfac.Eigh(), kfac.Ekfac())
    reference = options.output / "reference.npz"
    if options.reference:
        found = moves(inverses)
        np.savez(reference, **{f"{name}-{k}": x for name, leaves in found.items() for k, x in enumerate(leaves)})
        return
    on_cpu = os.environ | {"JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen([sys.executable, *sys.argv, "--reference"], env=on_cpu)
    import jax

    notes("device", jax.devices()[0].device_kind)
    notes("versions", ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib", "optax")))
    own = moves(inverses)
    if process.wait():
        raise SystemExit("the steps on the CPU failed")
    truth = np.load(reference)
    for name, leaves in own.items():
        expected = [truth[f"{name}-{k}"] for k in range(len(leaves))]
        notes("three steps against a CPU", {"inverse": name, **disagreement(leaves, expected)})


def part_tests(options: argparse.Namespace, notes: Notes) -> None:
    if not importlib.util.find_spec("pytest"):
        notes("left out", "pytest is not there")
        return
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "-x", "-m", "not slow", *(TESTS[:1] if options.rehearse
         else TESTS)], cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    print(found.stdout, found.stderr)
    notes("pytest", found.stdout.strip().splitlines()[-1] if found.stdout.strip() else f"code {found.returncode}")
    if found.returncode:
        raise SystemExit(found.returncode)


def seconds_of(call: Callable[[], Any], repeats: int) -> float:
    """Median seconds of a call, after a first one."""
    sync(call())
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        sync(call())
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def filled(shapes: Any) -> Any:
    """Arrays for shapes: kernels of random numbers by their inputs, other floats one, tokens and labels small."""
    import jax
    import jax.numpy as jnp

    leaves, structure = jax.tree.flatten(shapes)

    def one(k: int, x: Any) -> Any:
        if jnp.issubdtype(x.dtype, jnp.integer):
            return jax.random.randint(jax.random.key(k), x.shape, 0, 10, x.dtype)
        if len(x.shape) < 2:
            return jnp.ones(x.shape, x.dtype)
        return jax.random.normal(jax.random.key(k), x.shape, x.dtype) * (x.size / x.shape[-1]) ** -0.5

    make = jax.jit(lambda: [one(k, x) for k, x in enumerate(leaves)])
    return jax.tree.unflatten(structure, make())


def compiled_rows(
    options: argparse.Namespace, models: Sequence[str], rows: Sequence[str] = ROWS
) -> Iterator[tuple[str, str, Any, list[Any], dict[str, float]]]:
    """Model, row, the compiled step, what it takes, and seconds to compile it."""
    import jax

    import steps

    small = argparse.Namespace(small=options.rehearse, batch=None, image_size=224, devices=1, inverse_every=100,
                               inverse="default", refresh="apart")  # fmt: skip
    for row, model in itertools.product(rows, models):
        task = steps.task(model, small)
        step, tx = steps.make_step(row, task, small)
        params, batch = filled(task.params), filled(task.batch)
        state = jax.jit(tx.init)(params)
        began = time.perf_counter()
        lowered = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, batch)
        traced = time.perf_counter()
        compiled = lowered.compile()
        said = {"tracing s": traced - began, "compiling s": time.perf_counter() - traced}
        yield model, row, compiled, [params, state, batch], said


def stepping(compiled: Any, taken: list[Any]) -> Any:
    """One step, of parameters and a state that it keeps in `taken`."""
    taken[0], taken[1], loss = compiled(*taken)
    return taken[:2], loss


def part_speed(options: argparse.Namespace, notes: Notes) -> None:
    import jax

    from gpu_counts import count

    notes("device", jax.devices()[0].device_kind)
    first: dict[str, float] = {}
    averages: dict[str, Any] = {}  # of steps with statistics: a refresh of nothing would say nothing
    for model, row, compiled, taken, said in compiled_rows(options, options.models):
        if row == "refresh":
            taken[1] = averages.pop(model)
        ms = 1e3 * seconds_of(functools.partial(stepping, compiled, taken), 3 if options.rehearse else 20)
        if row == "statistics":
            averages[model] = taken[1]
        base = first.setdefault(model, ms)
        # Made for programs of GPUs, and the H100's figures: on a CPU the column is there and says nothing.
        bound = 1e3 * count(compiled.as_text() or "", taken=row == "refresh").bound
        memory = compiled.memory_analysis()
        notes(model, {
            "step": row, "ms": ms, "of SGD's": ms / base, "bound ms": bound,
            "over the bound": ms / bound if bound else None,
            "temporary GB": memory.temp_size_in_bytes / 1e9 if memory else None, **said,
        })  # fmt: skip


def part_profile(options: argparse.Namespace, notes: Notes) -> None:
    """Device time of ten steps, by kernel; in a rehearsal a CPU's operations."""
    import jax

    for model, row, compiled, taken, _ in compiled_rows(options, options.models[:1], ("statistics", "without", "muon")):
        sync(stepping(compiled, taken))
        folder = options.output / f"profile-{model}-{row}"
        with jax.profiler.trace(str(folder)):
            for _ in range(10):
                moved = stepping(compiled, taken)
            sync(moved)
        times = kernel_times(max(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime))
        total = sum(map(sum, times.values()))
        for name, values in sorted(times.items(), key=lambda item: -sum(item[1]))[:10]:
            notes(f"{model}, {row}: the ten longest", {
                "kernel": name[:80].replace("|", "/"), "ms a step": sum(values) / 10,
                "launches a step": len(values) / 10, "share": sum(values) / total if total else None,
            })  # fmt: skip


def kernel_times(path: pathlib.Path) -> dict[str, list[float]]:
    """Milliseconds of each run of a kernel, by name: on streams of GPUs, or without any, what XLA's threads did."""
    import jax

    found: dict[bool, dict[str, list[float]]] = {True: {}, False: {}}
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        gpu = plane.name.startswith("/device:GPU")
        for line in plane.lines:
            if line.name.startswith("Stream" if gpu else "tf_XLA"):
                # On a CPU other names are of what starts the operations, or ends one.
                for event in (e for e in line.events if gpu or not ("::" in e.name or e.name.startswith("end: "))):
                    found[gpu].setdefault(event.name, []).append(event.duration_ns / 1e6)
    return found[True] or found[False]


def part_compile(options: argparse.Namespace, notes: Notes) -> None:
    """The second start: the same programs, from the folder where the first kept them."""
    for model, row, _, _, said in compiled_rows(options, options.models, ROWS[:3]):
        notes(model, {"step": row, **{f"{name}, second start": value for name, value in said.items()}})


def part_training(options: argparse.Namespace, notes: Notes) -> None:
    """K-FAC and Muon in turn, twice as many epochs each time, until the time is over."""
    sys.path.insert(0, str(ROOT / "examples" / "cifar10"))
    import compare

    data = options.data_dir
    if not options.rehearse and not (data and data.is_dir()):
        notes("left out", "no --data-dir with CIFAR-10: sh examples/imagenet/get_cifar10.sh fetches it")
        return
    goal, epochs = 0.94, 1 if options.rehearse else 10
    rows = options.output / "training.jsonl"
    while notes.left > 0 and epochs < 200:
        for method, rate in (("kfac", 0.05), ("muon", 0.1)):
            settings = ["--data-dir", str(data), "--method", method, "--rate", str(rate), "--output",
                        str(options.output / "runs"), "--results", str(rows), "--resident"]  # fmt: skip
            if options.rehearse:
                settings += ["--network", "resnet8", "--width", "4", "--batch", "20", "--parts", "1", "--toy"]
            else:
                settings += ["--network", "resnet18", "--width", "64", "--batch", "1000", "--parts", "1"]
            compare.main(["run", *settings, "--horizon", str(epochs * (2 if options.rehearse else 50)),
                          "--every", "2" if options.rehearse else "50"])  # fmt: skip
            found = [row for row in map(json.loads, rows.read_text().splitlines()) if row["method"] == method]
            curve = [row for row in found if row["horizon"] == found[-1]["horizon"]]
            there = [row for row in curve if row["accuracy"] >= goal]
            notes("a toy" if options.rehearse else "ResNet-18 on CIFAR-10", {
                "method": method, "rate": rate, "steps": curve[-1]["step"], "accuracy": curve[-1]["accuracy"],
                "wall s": curve[-1]["wall_seconds"], "compiling s": curve[-1]["compiling"],
                "steps to 94%": there[0]["step"] if there else None,
                "s to 94%": there[0]["wall_seconds"] if there else None,
            })  # fmt: skip
        if options.rehearse:
            return
        epochs *= 2


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS[:2]))
    parser.add_argument("--minutes", type=float, help="for all of it: 20, and 120 in a rehearsal")
    parser.add_argument("--rehearse", action="store_true", help="small networks, on a CPU")
    parser.add_argument("--wheels", type=pathlib.Path, help="folder of wheels of what this Python lacks")
    parser.add_argument("--data-dir", type=pathlib.Path, help="CIFAR-10, of examples/imagenet/get_cifar10.sh")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("runs/gpu"), help="folder for results")
    for name in ("--part", "--seconds", "--reference"):  # for the processes that this one starts
        kind: dict[str, Any] = {"action": "store_true"} if name == "--reference" else {}
        parser.add_argument(name, help=argparse.SUPPRESS, **kind)
    options = parser.parse_args(arguments)
    options.seconds = float(options.seconds or 0)
    options.minutes = options.minutes or (120 if options.rehearse else 20)
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    if options.part:
        sys.path.insert(0, str(FOLDER))
        import environment  # noqa: F401  before JAX is imported

        globals()[f"part_{options.part}"](options, Notes(options))
    else:
        run_parts(options)
        print((options.output / "gpu.md").read_text())


if __name__ == "__main__":
    main()
