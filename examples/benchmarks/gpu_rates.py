"""Train programme B's GPT with K-FAC at several rates, with a single compilation.

    python examples/benchmarks/gpu_text.py learn runs/gpu/vocabulary.npz --size 8192
    python examples/benchmarks/gpu_rates.py --vocabulary runs/gpu/vocabulary.npz --rates 0.05 0.025 0.1
    python examples/benchmarks/gpu_rates.py --vocabulary runs/gpu/vocabulary.npz --rehearse      # on a CPU, small

Without weight decay, a step is proportional to the learning rate, so one program serves all
rates. Each run starts from the initial parameters. The script saves each run to `rates.json` and to a page in --output.
"""

from __future__ import annotations

import argparse
import functools
import os
import pathlib
import sys
from typing import Any

from gpu_record import Record, Setting, output_folder

FOLDER = pathlib.Path(__file__).resolve().parent
# The compiled step's learning rate.
UNIT = 0.1


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=pathlib.Path, required=True, help="made by `gpu_text.py learn`")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.1, 0.05, 0.025])
    parser.add_argument("--minutes", type=float, default=8.0, help="time limit, at which the process ends: 8")
    parser.add_argument("--steps", type=int, help="steps per run: 1000, or 24 in a rehearsal")
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
        options.output = output_folder(options.rehearse)
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

    command = " ".join(
        ["python", "examples/benchmarks/gpu_rates.py", *(sys.argv[1:] if arguments is None else arguments)]
    )
    record = Record(options.output, "rates", options.minutes, None, command)
    record.end_at_limit()
    record.about("device", jax.devices()[0].device_kind)
    record.about("jax", jax.__version__)
    model, sequences, params = gpu_training.gpt(options.vocabulary, options.rehearse)
    text = gpu_training.text_of(options.output, options.vocabulary)
    if not text.is_file():
        gpu_training.finish_encoding(record, gpu_training.start_encoding(options.vocabulary, text))
    batches = gpu_training.Text(text, model.context, sequences)
    layers = kfac.find_layers(model.loss, params, batches.batch(0))
    tx = kfac.kfac(kfac.schedules.warmup_linear_decay(UNIT, options.steps), layers)
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

    def at(rate: float) -> gpu_training.Trained:
        scale = jnp.float32(rate / UNIT)

        def whole(params: Any, state: Any, batch: Any) -> Any:
            if kfac.statistics_due(state):
                state = observe(params, state, batch)
            return step(params, state, batch, scale)

        return gpu_training.Trained(lambda params, batch: init(params), whole)

    record.doing = "compiling"
    record.say("compiling")
    evaluate = functools.partial(gpu_training.evaluator(model), parts=batches.held)
    evaluate(params)
    gpu_training.compile_by_running(at(UNIT), params, batches.batch(0), 0.0)
    for rate in options.rates:
        chosen = Setting("kfac", rate)
        run = functools.partial(
            gpu_training.train_one, record, chosen, at(rate), params, batches.batch, evaluate, options.steps
        )
        record.measure("Training", chosen.name, run)


if __name__ == "__main__":
    main()
