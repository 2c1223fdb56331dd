"""Measure how many steps each optimizer needs to a fixed accuracy at large batch sizes.

    python examples/large_batch/study.py search       # search each method's settings in a declared grid
    python examples/large_batch/study.py seeds        # run the winners with three seeds, at budgets around the target
    python examples/large_batch/study.py report       # print the tables and draw the figures from stored trials

Each command makes a table of the study. Every finished trial is a line of JSON in --results. A command that was killed
continues after its last finished trial, and stored trials are not repeated.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "imagenet"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import environment  # noqa: F401, isort: skip; before JAX is imported

import plans
import reporting
import tasks
import training
from files import UserError
from methods import METHODS
from store import Plan, Store
from tasks import Task

HERE = Path(__file__).resolve().parent


def _option(text: str):
    return tyro.conf.arg(help=text)


@dataclasses.dataclass(frozen=True)
class Options:
    """Select a table of the large-batch optimizer study, or the report with all tables."""

    table: Annotated[
        tyro.conf.Positional[
            Literal["search", "seeds", "batch-sizes", "searched-sizes", "ablations", "defaults", "time", "report"]
        ],
        _option(
            "search: search each method's settings; seeds: run the winners with three seeds at several budgets; "
            "batch-sizes: find the steps to the target from N/200 to N/4; searched-sizes: the same with settings "
            "searched at each size; ablations: change a single setting of K-FAC's winner at a time; defaults: run "
            "kfac.kfac with its defaults; time: measure the seconds per step; report: print the tables and draw the "
            "figures from stored trials"
        ),
    ]
    task: Annotated[Literal["cifar", "digits", "toy"], _option("task to train; toy is for tests")] = "cifar"
    methods: Annotated[tuple[str, ...], _option("methods to run; all if omitted")] = ()
    data_dir: Annotated[Path, _option("folder with CIFAR-10; get_cifar10.sh fetches it")] = Path("data/cifar10")
    results: Annotated[Path, _option("folder for the JSON lines")] = HERE / "results"
    figures: Annotated[Path, _option("folder for the report's figures")] = HERE / "results"
    parts: Annotated[tuple[int, ...], _option("values of N / batch, for batch-sizes and searched-sizes")] = (
        plans.OTHER_PARTS
    )
    limit: Annotated[int | None, _option("stop after this many new trials")] = None


def main(args: Sequence[str] | None = None) -> None:
    """Make the table that the command line selects."""
    options = parse(args)
    unknown = [name for name in options.methods if name not in METHODS]
    if unknown:
        raise UserError(f"--methods {unknown[0]} is none of {', '.join(METHODS)}")
    if options.limit is not None and options.limit < 1:
        raise UserError(f"--limit must be at least 1, but is {options.limit}")
    store = Store(options.results / f"{options.task}.jsonl")
    if options.table == "report":
        reporting.report(store, options.results, options.task, options.figures)
        return
    task = tasks.load(options.task, options.data_dir)
    chosen = options.methods or tuple(METHODS)
    if options.table == "time":
        reporting.write_times(options.results / f"{options.task}-times.json", task, store, chosen)
        return
    if options.table in ("batch-sizes", "searched-sizes"):
        if other := [parts for parts in options.parts if parts not in plans.OTHER_PARTS]:
            raise UserError(f"--parts {other[0]} is none of {', '.join(map(str, plans.OTHER_PARTS))}")
        sizes = plans.batch_sizes if options.table == "batch-sizes" else plans.searches_again
        plan = sizes(options.task, chosen, options.parts)
    else:
        make = {
            "search": plans.search,
            "seeds": plans.seeds,
            "ablations": plans.ablations,
            "defaults": plans.defaults,
        }
        plan = make[options.table](options.task, chosen)
    follow(plan, task, store, options.limit)


def parse(args: Sequence[str] | None) -> Options:
    """Parse the command line. If tyro reports an error, raise it as a single sentence without tyro's box."""
    text = io.StringIO()
    try:
        with contextlib.redirect_stderr(text):
            return tyro.cli(Options, args=args, prog="study.py", description=__doc__)
    except SystemExit as error:
        if error.code in (0, None):
            raise
        lines = [line.strip("│ ").strip() for line in text.getvalue().splitlines()]
        words = " ".join(line for line in lines if line and line[0] not in "╭╰─")
        raise UserError(words.removeprefix("Parsing error").strip()) from None


def follow(plan: Plan, task: Task, store: Store, limit: int | None = None) -> None:
    """Run a plan's trials that are not stored yet."""
    new, record = 0, None
    try:
        while True:
            trial = plan.send(record) if record is not None else next(plan)
            if trial not in store:
                if new == limit:
                    return
                began = time.perf_counter()
                store.add(training.run(task, trial))
                new += 1
                result = store[trial]
                varied = {k: v for k, v in trial.settings.items() if METHODS[trial.method].fixed.get(k) != v}
                words = " ".join(f"{k}={v}" for k, v in varied.items())
                print(
                    f"{trial.method:6} batch {trial.batch} steps {trial.steps} seed {trial.seed} {words}: "
                    f"{result['val_accuracy']:.1%} in {time.perf_counter() - began:.0f} s", flush=True,
                )  # fmt: skip
            record = store[trial]
    except StopIteration:
        print(f"{new} new trials; {len(store.records)} in {store.path}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
