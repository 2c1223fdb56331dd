"""Measure K-FAC on a GPU, in programmes that take at most ten minutes each.

    python examples/benchmarks/gpu.py --programme A                      # does it work, and how fast is a GPT?
    python examples/benchmarks/gpu.py --programme B --vocabulary runs/gpu/vocabulary.npz --speed runs/gpu/A.json
    python examples/benchmarks/gpu.py --programme C --data-dir data/cifar10
    python examples/benchmarks/gpu.py --programme D
    python examples/benchmarks/gpu.py --programme A --rehearse           # on a CPU, small

- Programme A compares three steps of each preconditioner with a CPU. It times steps by SGD, AdamW, Muon and K-FAC for a
  GPT with 124 million parameters, and it lists the longest kernels.
- Programme B trains the GPT on this machine's Python sources. K-FAC and Muon run in turn for the same time.
  `gpu_text.py learn` makes the vocabulary beforehand.
- Programme C times steps for ResNet-50, and it trains ResNet-18 on CIFAR-10 to 94%.
- Programme D runs a step for ResNet-50 at a batch of 131,072 images.

Each programme writes a JSON file and a Markdown page to --output, and it saves each row immediately. --have reuses the
rows of an earlier call. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import pathlib
import sys

from gpu_record import Record, output_folder, setting

PROGRAMMES = ("A", "B", "C", "D")
# A speed table's rows, the most informative first.
ROWS = ("kfac.train_step", "muon", "without", "observe", "refresh", "statistics", "sgd", "adamw")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programme", choices=PROGRAMMES, required=True)
    parser.add_argument("--minutes", type=float, default=8.0, help="time limit, at which the process ends: 8")
    parser.add_argument("--have", type=pathlib.Path, help="JSON of an earlier call; its rows are not measured again")
    parser.add_argument("--output", type=pathlib.Path, help="folder for the results: runs/gpu, or runs/gpu-rehearsal")
    parser.add_argument("--rehearse", action="store_true", help="small networks on a CPU")
    parser.add_argument("--compile-seconds", type=float, default=0.0, help="rehearsal: wait this long for each program")
    parser.add_argument("--models", nargs="+", default=["gpt-124m"], help="A: models from steps.py")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS, help="A and C: rows of the speed table")
    parser.add_argument("--vocabulary", type=pathlib.Path, help="B: made by `gpu_text.py learn`")
    parser.add_argument("--speed", type=pathlib.Path, help="B: JSON file from programme A, to plan the number of steps")
    parser.add_argument("--seconds", type=float, default=120.0, help="B: training time of each run")
    runs = [setting("kfac:0.1"), setting("muon:0.02")]
    parser.add_argument("--runs", nargs="+", type=setting, default=runs, help="B: method:rate, in this order")
    parser.add_argument("--data-dir", type=pathlib.Path, help="C: CIFAR-10, downloaded by get_cifar10.sh")
    options = parser.parse_args(arguments)
    if options.output is None:
        options.output = output_folder(options.rehearse)
    for path in (options.vocabulary, options.speed, options.have):
        if path is not None and not path.is_file():
            parser.error(f"{path}: no such file")
    if options.programme == "B" and options.vocabulary is None:
        parser.error("programme B needs --vocabulary, made by `python examples/benchmarks/gpu_text.py learn FILE`")
    if options.compile_seconds and not options.rehearse:
        parser.error("--compile-seconds is for --rehearse")
    return options


def programme_a(record, options) -> None:
    import gpu_speed

    reference = gpu_speed.start_reference(record.folder)
    for model in options.models:
        programs = gpu_speed.time_steps(record, model, options)
        for row in ("without", "observe", "refresh", "muon"):
            if row in programs and record.left < 20:
                record.repeat(f"{model}, {row}", "profile", "no time was left")
            elif row in programs:
                try:
                    gpu_speed.profile(record, model, row, programs[row])
                except Exception as error:
                    record.repeat(f"{model}, {row}", "profile", f"{type(error).__name__}: {str(error)[:300]}")
        programs.clear()
    gpu_speed.compare_with_cpu(record, reference)


def programme_b(record, options) -> None:
    import gpu_training

    gpu_training.train_gpt(record, options)


def programme_c(record, options) -> None:
    import gpu_speed
    import gpu_training

    gpu_speed.time_steps(record, "resnet50", options).clear()
    gpu_training.train_cifar10(record, options)


def programme_d(record, options) -> None:
    import gpu_training

    gpu_training.step_at_128k(record, options)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    if options.rehearse:
        os.environ["JAX_PLATFORMS"] = "cpu"
    folder = pathlib.Path(__file__).resolve().parent
    sys.path[:0] = [str(folder), str(folder.parents[1])]
    command = " ".join(["python", "examples/benchmarks/gpu.py", *(sys.argv[1:] if arguments is None else arguments)])
    record = Record(options.output, options.programme, options.minutes, options.have, command)
    record.end_at_limit()
    import jax

    record.about("device", f"{jax.devices()[0].device_kind}, {os.cpu_count()} cores")
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib", "optax")]
    record.about("versions", ", ".join([f"Python {sys.version.split()[0]}", *versions]))
    programme = {"A": programme_a, "B": programme_b, "C": programme_c, "D": programme_d}[options.programme]
    programme(record, options)
    record.say("done")
    print(record.path.with_suffix(".md").read_text())
    if record.found["to repeat"]:
        raise SystemExit(2)


if __name__ == "__main__":
    main()
