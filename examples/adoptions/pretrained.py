"""Fine-tune a published network with K-FAC and AdamW: Magika, which names file types.

    pip install magika onnx
    python examples/adoptions/pretrained.py                     # runs missing rows of pretrained.jsonl, then the table
    python examples/adoptions/pretrained.py --methods kfac --rates 0.02 --seeds 0 1 2

Magika (Fratantonio et al. 2024, arXiv:2409.13768) reads the first and last kilobyte of a file. Its package contains the
weights, which Adam trained. Here, the network learns to name 12 file types from 2,048 bytes within a file. The last
layer starts from zero, and all layers train. Files come from the running Python's libraries, so other machines have
other files. Held-out fragments come from other files than training fragments.
"""

from __future__ import annotations

import argparse
import json
import os
import sysconfig
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import kfac

RESULTS = Path(__file__).parent / "pretrained.jsonl"
RATES = {"kfac": (0.1, 0.05, 0.02, 0.01), "adamw": (0.01, 0.003, 0.001, 0.0003)}
STEPS, BATCH, LENGTH = 60, 32, 2048
TYPES = ("py", "pyi", "pyx", "c", "h", "js", "po", "mo", "so", "pyc", "txt", "json")
# The names in the ONNX file, which came from flax, and the shapes that `logits` takes.
WEIGHTS = {
    "bytes": ("Const:0", (257, 64)),
    "bytes_bias": ("MagikaV2/Dense_0/Reshape:0", (64,)),
    "norm0_scale": ("MagikaV2/LayerNorm_0/Reshape_2:0", (512, 1)),
    "norm0_shift": ("MagikaV2/LayerNorm_0/Reshape_3:0", (512, 1)),
    "conv": ("MagikaV2/Conv_0/transpose_3:0", (512, 256, 5)),
    "conv_bias": ("const_fold_opt__209", (512,)),
    "norm1_scale": ("MagikaV2/LayerNorm_1/Reshape_2:0", (512,)),
    "norm1_shift": ("MagikaV2/LayerNorm_1/Reshape_3:0", (512,)),
    "head": ("Const_24:0", (512, 214)),
    "head_bias": ("MagikaV2/Dense_1/Reshape:0", (214,)),
}
Params = dict[str, jax.Array]


def published() -> Params:
    """Return the weights that the package `magika` contains."""
    import magika
    import onnx

    models = Path(magika.__file__).parent / "models"
    graph = onnx.load(models / "standard_v3_3" / "model.onnx").graph
    arrays = {array.name: onnx.numpy_helper.to_array(array) for array in graph.initializer}
    params = {}
    for name, (end, shape) in WEIGHTS.items():
        (found,) = [array for key, array in arrays.items() if key == end or key.endswith(f"/{end}")]
        params[name] = jnp.asarray(found.reshape(shape))
    return params


def logits(params: Params, data: jax.Array) -> jax.Array:
    """Return the logits of bytes `[n, 2048]`; 256 stands for padding. Four bytes make a position with 256 features."""
    x = jax.nn.gelu(params["bytes"][data] + params["bytes_bias"])
    x = _normalised(x.reshape(len(x), 512, 256), params["norm0_scale"], params["norm0_shift"])
    x = lax.conv_general_dilated(x, params["conv"], (1,), "VALID", dimension_numbers=("NWC", "OIW", "NWC"))
    x = jax.nn.gelu(x + params["conv_bias"]).max(1)
    x = _normalised(x, params["norm1_scale"], params["norm1_shift"])
    return x @ params["head"] + params["head_bias"]


def _normalised(x: jax.Array, scale: jax.Array, shift: jax.Array) -> jax.Array:
    """Apply a layer norm over axis 1."""
    mean = x.mean(1, keepdims=True)
    variance = jnp.maximum((x * x).mean(1, keepdims=True) - mean**2, 0)
    return (x - mean) * lax.rsqrt(variance + 1e-6) * scale + shift


def loss_fn(params: Params, batch: tuple[Any, Any]) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, batch[0]), batch[1]).mean()


def fragments(files: int = 40, held: int = 10) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Return fragments and types for training, and for a test. Each file gives three fragments."""
    folders = {sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")}
    random = np.random.default_rng(0)
    parts: dict[bool, list[tuple[np.ndarray, int]]] = {False: [], True: []}
    for label, kind in enumerate(TYPES):
        paths = {path for folder in folders for path in Path(folder).rglob(f"*.{kind}")}
        large = sorted(path for path in paths if path.is_file() and path.stat().st_size > LENGTH + 1024)
        if len(large) < files:
            raise SystemExit(f"{len(large)} files .{kind} with more than {LENGTH + 1024} bytes found, {files} needed")
        for count, index in enumerate(random.permutation(len(large))[:files]):
            content = np.frombuffer(large[index].read_bytes(), np.uint8)
            for begin in random.integers(1024, len(content) - LENGTH, 3):
                parts[count < held].append((content[begin : begin + LENGTH].astype(np.int32), label))
    train, test = ([np.stack(x) for x in zip(*parts[key], strict=True)] for key in (False, True))
    return (train[0], train[1]), (test[0], test[1])


def run(method: str, rate: float, seed: int, params: Params, data: Any, steps: int = STEPS) -> dict[str, Any]:
    """Fine-tune, and return the held-out loss in nats, the accuracy and the seconds with compilation."""
    (x, y), (x_test, y_test) = data
    head = {"head": jnp.zeros((512, len(TYPES))), "head_bias": jnp.zeros(len(TYPES))}
    params = params | head
    schedule = kfac.schedules.warmup_linear_decay(rate, steps)
    layers = kfac.find_layers(loss_fn, params, (x[:BATCH], y[:BATCH]))
    tx = kfac.kfac(schedule, layers) if method == "kfac" else optax.adamw(schedule)

    @jax.jit
    def observe(opt_state: Any, params: Params, batch: Any) -> Any:
        return kfac.observe(opt_state, kfac.statistics(loss_fn, layers, fraction=1)(params, batch))

    @jax.jit
    def step(params: Params, opt_state: Any, batch: Any) -> Any:
        grads = jax.grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    began, opt_state, random = time.perf_counter(), tx.init(params), np.random.default_rng(seed)
    for _ in range(steps):
        rows = random.choice(len(x), BATCH, replace=False)
        batch = x[rows], y[rows]
        if method == "kfac" and kfac.statistics_due(opt_state):
            opt_state = observe(opt_state, params, batch)
        params, opt_state = step(params, opt_state, batch)
    jax.block_until_ready(params)
    seconds = time.perf_counter() - began
    found = np.concatenate([logits(params, x_test[k : k + 60]) for k in range(0, len(x_test), 60)])
    loss = optax.softmax_cross_entropy_with_integer_labels(jnp.asarray(found), y_test).mean()
    return {
        "method": method, "rate": rate, "seed": seed, "steps": steps, "loss": round(float(loss), 4),
        "accuracy": round(float((found.argmax(-1) == y_test).mean()), 4), "seconds": round(seconds, 1),
    }  # fmt: skip


def report(rows: list[dict[str, Any]]) -> str:
    """Return the table of means over seeds."""
    lines = ["| method | rate | seeds | held-out loss, nats | accuracy |", "|---|---|---|---|---|"]
    for method, rate in sorted({(row["method"], row["rate"]) for row in rows}, reverse=True):
        same = [row for row in rows if (row["method"], row["rate"]) == (method, rate)]
        losses, right = ([row[key] for row in same] for key in ("loss", "accuracy"))
        lines.append(f"| {method} | {rate} | {len(same)} | {np.mean(losses):.3f} | {np.mean(right):.1%} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=RATES, default=list(RATES))
    parser.add_argument("--rates", nargs="+", type=float, help="by default, four rates for each method")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    rows = [json.loads(line) for line in args.results.read_text().splitlines()] if args.results.exists() else []
    done = {(row["method"], row["rate"], row["seed"]) for row in rows}
    wanted = [
        (method, rate, seed) for seed in args.seeds for method in args.methods for rate in args.rates or RATES[method]
    ]
    missing = [trial for trial in wanted if trial not in done]
    if missing:
        params, data = published(), fragments()
        for trial in missing:
            rows.append(run(*trial, params, data))
            with args.results.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    print(report(rows))


if __name__ == "__main__":
    main()
