"""Measure K-FAC on a GPU, in calls of at most ten minutes that continue each other.

    python examples/benchmarks/gpu_cifar10.py data/cifar10 runs/gpu                # beforehand: the images of F
    python examples/benchmarks/gpu.py --check                                      # beforehand: is all there?
    python examples/benchmarks/gpu.py --minutes 9.5 --output OUT                   # on the GPU
    python examples/benchmarks/gpu.py --minutes 9.5 --output OUT --have EARLIER    # next time: what is missing
    python examples/benchmarks/gpu.py --rehearse                                   # on a CPU, small

The programmes run in this order, each in a process of its own, until the minutes are over:

- E: which part of K-FAC loses on a GPT of 92 million parameters? Fourteen variants, 500 steps each.
- F: steps and seconds to 94% on CIFAR-10 with Muon and K-FAC, at batches of 2,000 to 25,000.
- B: 1,000 steps of the GPT with the best variant of K-FAC and of Muon from E.
- A: three steps of each preconditioner against a CPU; times of steps of a GPT with 124 million parameters; its longest
  kernels.
- C: times of steps of ResNet-50.
- D: one step of ResNet-50 with 131,072 images.

Each programme saves its rows to `<letter>.json` in --output as they are measured, and the page `gpu.md` shows them all.
Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import pathlib
import subprocess
import sys
import time

import gpu_variants
from gpu_record import Record, page, read

FOLDER = pathlib.Path(__file__).resolve().parent
# The order, with the seconds that a whole programme takes on an H200 as far as its steps have been timed there.
PROGRAMMES = {"E": 490, "F": 540, "B": 200, "A": 180, "C": 240, "D": 300}
# A programme does not start with less time, because compiling would take most of it. The next programme may fit.
LEAST = {"E": 180, "F": 240, "B": 180, "A": 90, "C": 150, "D": 150}
# A speed table's rows, the most informative first.
ROWS = ("kfac.train_step", "muon", "without", "observe", "refresh", "statistics", "sgd", "adamw")
IMAGES = ("cifar10-1.npz", "cifar10-2.npz")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programme", nargs="+", choices=PROGRAMMES, help="only these, in this order")
    parser.add_argument("--check", action="store_true", help="say what would run and which files it needs, and stop")
    parser.add_argument("--minutes", type=float, default=9.5, help="time limit, at which the process ends: 9.5")
    parser.add_argument("--have", type=pathlib.Path, help="folder with JSON files of earlier calls: their rows stand")
    parser.add_argument("--output", type=pathlib.Path, help="folder for the results: runs/gpu, or runs/gpu-rehearsal")
    parser.add_argument("--scratch", type=pathlib.Path, help="folder for tokens, images and programs: as --output")
    words = FOLDER / "gpu_vocabulary.npz"
    parser.add_argument("--vocabulary", type=pathlib.Path, default=words, help="B and E: made by `gpu_text.py learn`")
    parser.add_argument("--rehearse", action="store_true", help="small networks on a CPU")
    parser.add_argument("--compile-seconds", type=float, default=0.0, help="rehearsal: wait this long for each program")
    parser.add_argument("--models", nargs="+", default=["gpt-124m"], help="A: models from steps.py")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS, help="A and C: rows of the speed table")
    parser.add_argument("--runs", nargs="+", type=gpu_variants.variant, help="B or E: variants, see gpu_variants.py")
    parser.add_argument("--steps", type=int, help="B or E: steps of a run, 1000 or 500; 20 in a rehearsal")
    parser.add_argument("--batches", nargs="+", type=int, help="F: batch sizes")
    options = parser.parse_args(arguments)
    folder = pathlib.Path("runs/gpu-rehearsal" if options.rehearse else "runs/gpu")
    options.output = options.output or folder
    options.scratch = options.scratch or folder
    chosen = options.programme or list(PROGRAMMES)
    if options.have is not None and not options.have.is_dir():
        parser.error(f"--have {options.have}: no such folder")
    if options.minutes <= 0:
        parser.error("--minutes must be positive")
    if options.compile_seconds and not options.rehearse:
        parser.error("--compile-seconds is for --rehearse")
    if options.steps is not None and options.steps < 1:
        parser.error("--steps must be positive")
    if options.runs and options.programme not in (["B"], ["E"]):
        parser.error("--runs is for --programme B or --programme E")
    if options.steps and options.programme not in (["B"], ["E"], ["E", "B"]):
        parser.error("--steps is for --programme B or E")
    if options.programme == ["B"] and options.runs and not all(one.public for one in options.runs):
        parser.error(f"--runs: programme B has no {' or '.join(gpu_variants.ONLY_TRACED)}, which only E traces")
    if options.batches and (min(options.batches) < 1 or max(options.batches) > 50_000):
        parser.error("--batches must be between 1 and 50000")
    if options.batches and options.programme != ["F"]:
        parser.error("--batches is for --programme F")
    if not options.vocabulary.is_file():
        parser.error(f"--vocabulary {options.vocabulary}: no such file. `gpu_text.py learn` makes it")
    options.programme = chosen
    return options


def lacking(programme: str, options: argparse.Namespace) -> list[pathlib.Path]:
    """Return the files that a programme needs and that are not there."""
    if programme != "F" or options.rehearse:
        return []
    return [path for path in map(options.scratch.joinpath, IMAGES) if not path.is_file()]


def check(options: argparse.Namespace) -> None:
    """Print the programmes with their predicted seconds and the files that they miss."""
    for programme in options.programme:
        rows = sum(map(len, read(options.have, programme).get("tables", {}).values()))
        line = f"{programme}: {PROGRAMMES[programme]} s predicted, {rows} rows are there already"
        print(line + "".join(f"; MISSING {path}" for path in lacking(programme, options)))


def run_one(programme: str, options: argparse.Namespace, command: str) -> int:
    """Run a programme in this process. Return 2 if rows are left to repeat, and 0 otherwise."""
    record = Record(options.output, programme, options.minutes, options.have, command)
    record.end_at_limit()
    if programme == "D":
        # Its steps run in other processes, which need the memory.
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    import jax

    # A second call on the same machine finds the programs of the first.
    jax.config.update("jax_compilation_cache_dir", str(options.scratch.resolve() / "programs"))
    record.about("device", f"{jax.devices()[0].device_kind}, {os.cpu_count()} cores")
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib", "optax")]
    record.about("versions", ", ".join([f"Python {sys.version.split()[0]}", *versions]))
    {"A": times_of_gpt, "B": longer, "C": times_of_resnet, "D": huge_step, "E": variants, "F": cifar10}[programme](
        record, options
    )
    record.say("done")
    return 2 if record.found["to repeat"] else 0


def times_of_gpt(record: Record, options: argparse.Namespace) -> None:
    import gpu_speed

    reference = gpu_speed.start_reference(options.scratch)
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
    gpu_speed.compare_with_cpu(record, reference, options.scratch)


def longer(record: Record, options: argparse.Namespace) -> None:
    import gpu_training

    gpu_training.train_longer(record, options)


def variants(record: Record, options: argparse.Namespace) -> None:
    import gpu_training

    gpu_training.search(record, options)


def times_of_resnet(record: Record, options: argparse.Namespace) -> None:
    import gpu_speed

    gpu_speed.time_steps(record, "resnet50", options).clear()


def huge_step(record: Record, options: argparse.Namespace) -> None:
    import gpu_speed

    gpu_speed.step_at_128k(record, options)


def cifar10(record: Record, options: argparse.Namespace) -> None:
    import gpu_cifar10

    gpu_cifar10.compare(record, options)


def run_in_turn(options: argparse.Namespace, given: list[str]) -> int:
    """Run each programme in a process of its own, as long as time is left. Return the largest exit code."""
    began = time.monotonic()
    codes = [0]
    for programme in options.programme:
        left = 60 * options.minutes - (time.monotonic() - began)
        absent = lacking(programme, options)
        if absent or (left < LEAST[programme] and not options.rehearse):
            print(f"{programme} does not run: {f'{absent[0]} is missing' if absent else f'{left:.0f} s are left'}")
            codes.append(2)
            continue
        # Later options win, so these replace the given ones.
        alone = ["--programme", programme, "--minutes", f"{max(left, 1) / 60:.3f}"]
        codes.append(subprocess.run([sys.executable, __file__, *given, *alone]).returncode)
    pages = []
    for programme in options.programme:
        if found := read(options.output, programme):
            pages.append(page(found))
    (options.output / "gpu.md").write_text("\n".join(pages))
    print("\n".join(pages))
    return max(codes)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    given = sys.argv[1:] if arguments is None else arguments
    if options.check:
        check(options)
        return 0
    if options.rehearse:
        os.environ["JAX_PLATFORMS"] = "cpu"
    sys.path[:0] = [str(FOLDER), str(FOLDER.parents[1])]
    options.output.mkdir(parents=True, exist_ok=True)
    if len(options.programme) > 1:
        return run_in_turn(options, given)
    return run_one(options.programme[0], options, " ".join(["python", "examples/benchmarks/gpu.py", *given]))


if __name__ == "__main__":
    sys.exit(main())
