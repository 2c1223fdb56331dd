"""Train the GPT of programme B with K-FAC at several rates, with a single compilation.

    python examples/benchmarks/gpu_text.py learn runs/gpu/vocabulary.npz --size 8192
    python examples/benchmarks/gpu_rates.py --vocabulary runs/gpu/vocabulary.npz --rates 0.05 0.025 0.1
    python examples/benchmarks/gpu_rates.py --vocabulary runs/gpu/vocabulary.npz --rehearse      # on a CPU, small

With `step_norm="spectral"` and no weight decay, a step is proportional to the learning rate, so one program serves all
rates. Each run starts anew, and ends early if the loss is not finite. Results go to `rates.json` in --output after each
look at the validation text.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

FOLDER = pathlib.Path(__file__).resolve().parent
# The rate of the compiled step.
UNIT = 0.1


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=pathlib.Path, required=True, help="made by `gpu_text.py learn`")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.1, 0.05, 0.025])
    parser.add_argument("--steps", type=int, help="of each run: 1000, or 24 in a rehearsal")
    parser.add_argument("--output", type=pathlib.Path, help="folder for the results: runs/gpu, or runs/gpu-rehearsal")
    parser.add_argument("--rehearse", action="store_true", help="a small network on a CPU")
    options = parser.parse_args(arguments)
    if not options.vocabulary.is_file():
        parser.error(f"{options.vocabulary}: no such file. `python examples/benchmarks/gpu_text.py learn` makes it")
    if min(options.rates) <= 0:
        parser.error("--rates must be positive")
    if options.steps is None:
        options.steps = 24 if options.rehearse else 1000
    if options.output is None:
        options.output = pathlib.Path("runs/gpu-rehearsal" if options.rehearse else "runs/gpu")
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    if options.rehearse:
        os.environ["JAX_PLATFORMS"] = "cpu"
    sys.path[:0] = [str(FOLDER), str(FOLDER.parents[1])]
    import jax
    import jax.numpy as jnp

    import gpu_training
    import kfac

    model, sequences, params = gpu_training.gpt(options.vocabulary, options.rehearse)
    text = gpu_training.text_of(options.output, options.vocabulary)
    if not text.is_file():
        options.output.mkdir(parents=True, exist_ok=True)
        encode = [sys.executable, str(FOLDER / "gpu_text.py"), "encode", str(options.vocabulary), str(text)]
        subprocess.run(encode, check=True)
    batches = gpu_training.Text(text, model.context, sequences)
    evaluate = gpu_training.evaluator(model)
    layers = kfac.find_layers(model.loss, params, batches.batch(0))
    tx = kfac.kfac(kfac.schedules.rise_and_fall(UNIT, options.steps), layers)
    measure = kfac.statistics(model.loss, layers, fraction=1 / 4)

    def step(params: Any, state: Any, batch: Any, scale: Any) -> Any:
        loss, grads = jax.value_and_grad(model.loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        return jax.tree.map(lambda p, u: p + scale * u, params, updates), state, loss

    def observe(params: Any, state: Any, batch: Any) -> Any:
        return kfac.observe(state, measure(params, batch))

    init = jax.jit(tx.init)
    step = jax.jit(step, donate_argnums=(0, 1))
    observe = jax.jit(observe, donate_argnums=1)
    print("compiling", flush=True)
    now = jax.tree.map(jnp.copy, params)
    state = observe(now, init(params), batches.batch(0))
    step(now, state, batches.batch(0), jnp.float32(1))
    evaluate(params, batches.held)
    results: dict[str, Any] = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "runs": {}}
    for rate in options.rates:
        now, state = jax.tree.map(jnp.copy, params), init(params)
        seconds, done = 0.0, 0
        curve = []
        for look in sorted({round(options.steps * k / 12) for k in range(1, 13)}):
            began = time.perf_counter()
            for number in range(done + 1, look + 1):
                batch = batches.batch(number)
                if kfac.statistics_due(state):
                    state = observe(now, state, batch)
                now, state, loss = step(now, state, batch, jnp.float32(rate / UNIT))
            jax.block_until_ready(now)
            seconds += time.perf_counter() - began
            done = look
            validation = float(evaluate(now, batches.held))
            failed = int(kfac.diagnostics(state)["failed_inversions"])
            curve.append([done, round(seconds, 2), round(validation, 4), round(float(loss), 4)])
            told = f"step {done}, {seconds:.1f} s, validation {validation:.4f}, {failed} failed inversions"
            print(f"rate {rate:g}: {told}", flush=True)
            row = {"steps": done, "seconds": seconds, "validation": validation, "failed inversions": failed}
            results["runs"][f"{rate:g}"] = row | {"curve": curve}
            (options.output / "rates.json").write_text(json.dumps(results, indent=2) + "\n")
            if not math.isfinite(validation):
                break


if __name__ == "__main__":
    main()
