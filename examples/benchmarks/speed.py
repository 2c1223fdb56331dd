"""Measure the time that K-FAC adds to a training step of ResNet-50.

    python examples/benchmarks/speed.py --quick                       # the main figures: minutes, on a GPU or a CPU
    python examples/benchmarks/speed.py                               # all sections
    python examples/benchmarks/speed.py --sections inverses           # a single section

The sections are:

- `step`: SGD with momentum, K-FAC in each phase, their compile times and temporary memory,
- `statistics`: algorithms for a convolution's `A`, for the network's layer shapes,
- `inverses`: algorithms for inverses by dimension, and a complete refresh,
- `accuracy`: rounding errors in factors and update directions, relative to float64.

Within a comparison, the calls alternate, and the script reports medians. After each section it writes `speed.json`,
`speed.md` and `speed.png` to `--output`. On a GPU, steps use 256 images in bfloat16. On a CPU, steps use 16 images in
float32.
"""

import argparse
import functools
import json
import pathlib
import statistics as stats
import time
from collections.abc import Callable, Mapping
from typing import Any

import environment  # noqa: F401, isort: skip; before JAX is imported

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import accuracy
import candidates
import kfac
import models
from counting import count_distinct_kernels, count_flops

CLASSES = 1000
SECTIONS = ("inverses", "accuracy", "step", "statistics")


def median_times(calls: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Return the median seconds of each call. After a warm-up round, the calls alternate for `repeats` rounds."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 1):
        for name, call in calls.items():
            began = time.perf_counter()
            jax.block_until_ready(call())
            if turn:
                times[name].append(time.perf_counter() - began)
    return {name: stats.median(values) for name, values in times.items()}


def peak_flops(dtype: str) -> float:
    """Return the FLOP/s in products of large square matrices."""
    size = 2048 if jax.default_backend() == "cpu" else 8192
    a = jnp.ones((size, size), dtype)
    product = jax.jit(lambda a: a @ a)
    return 2 * size**3 / median_times({"product": lambda: product(a)}, 9)["product"]


# -- whole steps ------------------------------------------------------------------------------------------------------


class Program:
    """A compiled step that owns its parameters and state, which it updates in place."""

    def __init__(self, step: Callable[..., Any], params: Any, state: Any, batch: Any):
        lowered = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, batch)
        began = time.perf_counter()
        self.compiled = lowered.compile()
        self.compile_seconds = time.perf_counter() - began
        self.flops = count_flops(step, params, state, batch)
        self.distinct_kernels = count_distinct_kernels(self.compiled.as_text() or "")
        memory = self.compiled.memory_analysis()
        self.temporary_bytes = memory.temp_size_in_bytes if memory else None
        self.batch = batch

    def __call__(self, kept: dict[str, Any]) -> Any:
        kept["params"], kept["state"], loss = self.compiled(kept["params"], kept["state"], self.batch)
        return kept["params"], loss


def whole_steps(options: argparse.Namespace, peak: float) -> dict[str, Any]:
    model = models.create("resnet50", CLASSES, options.dtype)
    shape = (options.batch, options.image_size, options.image_size, 3)
    images = jax.random.normal(jax.random.key(2), shape, jnp.float32)
    labels = jax.random.randint(jax.random.key(3), shape[:1], 0, CLASSES)
    variables = jax.jit(functools.partial(model.init, train=False))(jax.random.key(0), jnp.zeros((1, *shape[1:])))
    averages = variables["batch_stats"]

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        images, labels = batch
        logits, _ = model.apply(
            {"params": params, "batch_stats": averages}, images, train=True, mutable=["batch_stats"]
        )
        return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()

    batch = (images, labels)
    layers = kfac.find_layers(loss_fn, variables["params"], batch)
    # With a tiny rate, a random network on noise does not diverge during the timing.
    rate = 1e-6
    every = options.inverse_update_period

    def sgd(params: Any, state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, state = first_order.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    def with_statistics(params: Any, state: Any, batch: Any) -> Any:
        loss, grads, factors = kfac.value_and_grad(loss_fn, layers)(params, batch)
        updates, state = at_once.update(grads, kfac.observe(state, factors), params)
        return optax.apply_updates(params, updates), state, loss

    def without(params: Any, state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, state = at_once.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    def with_fewer(params: Any, state: Any, batch: Any) -> Any:
        factors = kfac.statistics(loss_fn, layers, fraction=1 / 4)(params, batch)
        return without(params, kfac.observe(state, factors), batch)

    def gradients(params: Any, state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        return grads, state, loss

    first_order = optax.sgd(rate, momentum=0.9)
    make = functools.partial(
        kfac.natural_gradient, rate, layers, damping=1e-3, factor_ema_decay=0.95, unitwise_damping_scale=1.0,
        momentum=0.9, lr_in_momentum=False, interval_warmup_steps=0, inverse_update_period=every,
    )  # fmt: skip
    at_once = make()
    copy = functools.partial(jax.tree.map, jnp.copy)

    def kept(tx: Any) -> dict[str, Any]:
        return {"params": copy(variables["params"]), "state": jax.jit(tx.init)(variables["params"])}

    sgd_state, once_state = kept(first_order), kept(at_once)
    programs = {
        "sgd": Program(sgd, **sgd_state, batch=batch),
        "without statistics": Program(without, **once_state, batch=batch),
        "statistics": Program(with_statistics, **once_state, batch=batch),
    }
    states = dict.fromkeys(programs, once_state) | {"sgd": sgd_state}
    if not options.quick:
        fewer = "statistics of every 4th example"
        states |= {fewer: once_state}
        programs[fewer] = Program(with_fewer, **once_state, batch=batch)

    compiled = [
        {
            "step": name,
            "GFLOP": program.flops / 1e9,
            "compile seconds": program.compile_seconds,
            "compile of sgd": program.compile_seconds / programs["sgd"].compile_seconds,
            "distinct kernels": program.distinct_kernels,
            "temporary MB": program.temporary_bytes and program.temporary_bytes / 1e6,
            "temporary of sgd": program.temporary_bytes and program.temporary_bytes / programs["sgd"].temporary_bytes,
        }
        for name, program in programs.items()
    ]
    if options.compile_only:
        return {"rows": compiled}

    # The first step refreshes all inverses and is timed separately. The next refresh is at step `every`.
    refresh = []
    for _ in range(max(2, options.repeats // 2)):
        once_state["state"] = jax.jit(at_once.init)(once_state["params"])
        began = time.perf_counter()
        jax.block_until_ready(programs["statistics"](once_state))
        refresh.append(time.perf_counter() - began)
    if 4 * options.repeats + 8 > every:
        raise SystemExit(f"--repeats {options.repeats} is too many for --inverse-update-period {every}")
    times = median_times({n: functools.partial(p, states[n]) for n, p in programs.items()}, options.repeats)

    forward_backward = count_flops(gradients, variables["params"], None, batch)
    network = forward_backward / times["sgd"]
    rows = []
    for name, program in programs.items():
        added, extra = times[name] - times["sgd"], program.flops - programs["sgd"].flops
        rows.append(
            {
                "step": name,
                "seconds": times[name],
                "of sgd": times[name] / times["sgd"],
                "added GFLOP/s of network's": extra / added / network if name != "sgd" and added > 0 else None,
                "added GFLOP/s of peak": extra / added / peak if name != "sgd" and added > 0 else network / peak,
            }
        )
    rows = [row | more for row, more in zip(rows, compiled, strict=True)]
    refresh_seconds = stats.median(refresh) - times["statistics"]
    cycle = (
        100 * times["without statistics"] + 10 * (times["statistics"] - times["without statistics"]) + refresh_seconds
    )
    cheap = times["without statistics"] / times["sgd"]
    return {
        "rows": rows,
        "network GFLOP/s": network / 1e9,
        "network of peak": network / peak,
        "refresh of all inverses, seconds": refresh_seconds,
        "statistics every 10, inverses every 100, of sgd": cycle / 100 / times["sgd"],
        "of which preconditioning": cheap - 1,
    }


# -- statistics of convolutions ---------------------------------------------------------------------------------------


def conv_statistics(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time each algorithm for a convolution's `A` and the gradients of the same convolution."""
    rows = []
    for channels, size, stride in ((64, 4, 1), (128, 8, 1), (256, 16, 1), (512, 32, 1), (128, 4, 2), (3, 1, 2)):
        size = options.image_size // size
        window = 7 if channels == 3 else 3
        x = jax.random.normal(jax.random.key(0), (options.batch, size, size, channels), options.dtype)
        kernel = jnp.ones((window, window, channels, 64 if channels == 3 else channels), options.dtype)

        def convolution(x: jax.Array, kernel: jax.Array, stride: int = stride) -> jax.Array:
            pad = kernel.shape[0] // 2
            return lax.conv_general_dilated(
                x, kernel, (stride, stride), [(pad, pad)] * 2, dimension_numbers=("NHWC", "HWIO", "NHWC")
            )

        out = jax.jit(convolution)(x, kernel)
        gradient = jax.jit(lambda x, k, y, f=convolution: jax.vjp(f, x, k)[1](y))
        calls: dict[str, Callable[[], Any]] = {
            "gradients of the convolution": functools.partial(gradient, x, kernel, out)
        }
        for name, way in candidates.conv_ways(x, window, stride).items():
            calls[name] = functools.partial(jax.jit(way), x)
        times = median_times(calls, options.repeats)
        rows.append({"geometry": f"{window}x{window}/{stride}, {channels} channels, {size}x{size}"} | times)
    return rows


# -- inverses ---------------------------------------------------------------------------------------------------------


def inverses(options: argparse.Namespace) -> dict[str, Any]:
    rows = []
    for size in options.dimensions:
        matrix, near = candidates.factors_like(size, options.condition)
        calls = {name: functools.partial(jax.jit(way), matrix, near) for name, way in candidates.INVERSES.items()}
        if size > 1200:
            calls.pop("eigh")  # takes minutes
        times = median_times(calls, max(3, options.repeats // 3))
        row: dict[str, Any] = {"dimension": size}
        exact = np.asarray(matrix[0], np.float64)
        for name, call in calls.items():
            found = np.asarray(call()[0], np.float64)
            residual = np.linalg.norm(np.eye(size) - exact @ found) / np.sqrt(size)
            row |= {f"{name}, ms": 1e3 * times[name], f"{name}, residual": residual}
        rows.append(row)
    return {"condition": options.condition, "rows": rows}


def full_refresh(options: argparse.Namespace) -> dict[str, float]:
    """Time all inverses for ResNet-50: the package's inverse against `jnp.linalg.inv`."""
    sizes = candidates.resnet50_dimensions()
    times: dict[str, float] = {"kfac": 0.0, "jnp.linalg.inv": 0.0}
    ours = jax.jit(candidates.INVERSES["kfac"])
    theirs = jax.jit(candidates.INVERSES["jnp.linalg.inv"])
    for size, count in sizes.items():
        matrix, near = candidates.factors_like(size, 1e3)
        calls = {"kfac": lambda m=matrix, n=near: ours(m, n), "jnp.linalg.inv": lambda m=matrix, n=near: theirs(m, n)}
        measured = median_times(calls, max(3, options.repeats // 3))
        for name in times:
            times[name] += count * measured[name]
    return times | {"times faster": times["jnp.linalg.inv"] / times["kfac"]}


# -- results ----------------------------------------------------------------------------------------------------------


def table(rows: list[dict[str, Any]]) -> str:
    """Return rows as a Markdown table."""

    def text(value: Any) -> str:
        if value is None:
            return ""
        return f"{value:.3g}" if isinstance(value, float) else str(value)

    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    lines += ["| " + " | ".join(text(row.get(name)) for name in names) + " |" for row in rows]
    return "\n".join(lines)


def report(results: dict[str, Any], output: pathlib.Path) -> None:
    output.mkdir(parents=True, exist_ok=True)
    (output / "speed.json").write_text(json.dumps(results, indent=2) + "\n")
    parts = [" ".join(f"{name}: {value}." for name, value in results["setting"].items())]
    for section, result in results.items():
        if section == "setting":
            continue
        parts.append(f"\n## {section}\n")
        if section == "accuracy":
            parts += [f"{table(rows)}\n" for rows in result.values()]
            continue
        rows = result if isinstance(result, list) else result.get("rows", [])
        parts += [table(rows)] if rows else []
        if isinstance(result, dict):
            parts += [f"- {name}: {value:.4g}" for name, value in result.items() if isinstance(value, int | float)]
    (output / "speed.md").write_text("\n".join(parts) + "\n")
    plot(results, output / "speed.png")


def plot(results: dict[str, Any], path: pathlib.Path) -> None:
    """Plot step times as bars, and inverse times as lines over the dimension."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    panels = [name for name in ("step", "statistics", "inverses") if name in results]
    if "step" in panels and "of sgd" not in results["step"]["rows"][0]:
        panels.remove("step")
    if not panels:
        return
    figure, axes = plt.subplots(1, len(panels), figsize=(6 * len(panels), 4.5), squeeze=False, layout="constrained")
    for axis, panel in zip(axes[0], panels, strict=True):
        if panel == "inverses":
            rows = results[panel]["rows"]
            for name in [key.removesuffix(", ms") for key in rows[0] if key.endswith(", ms")]:
                points = [(r["dimension"], r[f"{name}, ms"]) for r in rows if f"{name}, ms" in r]
                axis.plot(*zip(*points, strict=True), marker="o", label=name)
            axis.set(xscale="log", yscale="log", xlabel="dimension", ylabel="milliseconds", title="one inverse")
            axis.legend()
            continue
        rows = results[panel]["rows"] if panel == "step" else results[panel]
        if panel == "step":
            names, values = [r["step"] for r in rows], [r["of sgd"] for r in rows]
            axis.barh(names, values, color="tab:blue")
            axis.bar_label(axis.containers[0], fmt="%.2f", padding=3)
            axis.axvline(1, color="black", linewidth=0.8)
            axis.set(xlabel="time of SGD's step", title="whole step", xlim=(0, 1.15 * max(values)))
        else:
            ways = [key for key in rows[0] if key != "geometry"]
            for k, way in enumerate(ways):
                places = np.arange(len(rows)) + 0.8 * k / len(ways)
                axis.barh(places, [1e3 * r.get(way, 0) for r in rows], height=0.8 / len(ways), label=way)
            axis.set_yticks(np.arange(len(rows)) + 0.3, [r["geometry"] for r in rows])
            axis.set(xlabel="milliseconds", title="A of a convolution")
            figure.legend(loc="outside lower center", ncols=len(ways))
        axis.invert_yaxis()
    figure.savefig(path, dpi=120)


def parse() -> argparse.Namespace:
    gpu = jax.default_backend() != "cpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only the main rows; small images on a CPU")
    parser.add_argument("--image-size", type=int, help="height and width in pixels: 224, or 64 with --quick on a CPU")
    parser.add_argument("--batch", type=int, default=256 if gpu else 16, help="images in a step")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16" if gpu else "float32")
    parser.add_argument("--inverse-update-period", type=int, default=100, help="steps between refreshes")
    parser.add_argument("--repeats", type=int, default=7, help="timed calls of each program")
    parser.add_argument("--condition", type=float, default=1e6, help="condition number of the matrices to invert")
    parser.add_argument("--dimensions", type=int, nargs="+", help="dimensions of the matrices to invert: 64 to 4608")
    parser.add_argument("--sections", choices=SECTIONS, nargs="+", help="sections to measure: all")
    parser.add_argument("--compile-only", action="store_true", help="section step: sizes and compile times only")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("runs/speed"), help="folder for results")
    options = parser.parse_args()
    options.image_size = options.image_size or (64 if options.quick and not gpu else 224)
    options.dimensions = options.dimensions or ([256, 1152] if options.quick else [64, 256, 576, 1152, 2304, 4608])
    options.sections = options.sections or [name for name in SECTIONS if name != "statistics" or not options.quick]
    if min(options.image_size // 32, options.batch, options.repeats, options.inverse_update_period) < 1:
        parser.error("--image-size must be at least 32, --batch, --repeats and --inverse-update-period at least 1")
    return options


def main() -> None:
    options = parse()
    peak = peak_flops(options.dtype)
    results: dict[str, Any] = {
        "setting": {
            "device": jax.devices()[0].device_kind,
            "jax": jax.__version__,
            "kfac": kfac.__version__,
            "image": options.image_size,
            "batch": options.batch,
            "dtype": options.dtype,
            "peak of matrix products, GFLOP/s": round(peak / 1e9, 1),
        }
    }
    sections: dict[str, Callable[[], Any]] = {
        "inverses": lambda: inverses(options),
        "refresh": lambda: full_refresh(options),
        "accuracy": lambda: accuracy.tables(),
        "step": lambda: whole_steps(options, peak),
        "statistics": lambda: conv_statistics(options),
    }
    wanted = {*options.sections} | ({"refresh"} if "inverses" in options.sections and not options.quick else set())
    for name in filter(wanted.__contains__, sections):
        began = time.perf_counter()
        results[name] = sections[name]()
        report(results, options.output)
        print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)
    print((options.output / "speed.md").read_text())


if __name__ == "__main__":
    main()
