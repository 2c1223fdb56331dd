"""Make Markdown tables and figures from stored trials, and time the compiled steps."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import plans
import training
from batches import Plan as BatchPlan
from files import UserError
from methods import METHODS
from plans import RULES
from store import Plan, Record, Store
from tasks import Task
from training import Trial

ROUNDS = 9
LABELS = {"sgd": "Nesterov SGD", "lars": "LARS", "lamb": "LAMB", "adamw": "AdamW", "muon": "Muon", "kfac": "K-FAC"}


STYLES = {method: {"label": label, "color": f"C{number}"} for number, (method, label) in enumerate(LABELS.items())}


def replay(plan: Plan, store: Store) -> tuple[Any, list[Record], bool]:
    """Return a plan's result, the records of its trials, and whether all its trials are stored.

    If a trial is missing, the result is None.
    """
    records: list[Record] = []
    try:
        trial = next(plan)
        while trial in store:
            records.append(store[trial])
            trial = plan.send(records[-1])
    except StopIteration as end:
        return end.value, records, True
    return None, records, False


def searched(store: Store, task: str, chosen: tuple[str, ...]) -> tuple[dict[str, Record], list[Record]]:
    """Return the winners of the finished searches by method, and all records of the searches."""
    winners: dict[str, Record] = {}
    records: list[Record] = []
    for method in chosen:
        found, own, done = replay(plans.search(task, (method,)), store)
        records += own
        if done:
            winners |= found
    return winners, records


def write_times(path: Path, task: Task, store: Store, chosen: tuple[str, ...]) -> None:
    """Write the median seconds per step for every program in the study, at batch size N/10.

    The programs take turns. K-FAC's "step" time includes statistics.
    """
    batch = len(task.train) // 10
    trials: dict[str, Trial] = {}
    winners, _ = searched(store, task.name, chosen)
    if missing := [method for method in chosen if method not in winners]:
        raise UserError(f"the search of {missing[0]} is not done: run study.py search --task {task.name} first")
    for method in chosen:
        trials[method] = Trial(task.name, method, winners[method]["settings"], batch, 10)
    if "kfac" in chosen:
        for name, (method, change) in plans.ABLATIONS.items():
            records, _, done = replay(plans.one_ablation(task.name, winners["kfac"], method, change), store)
            if done:
                trials[f"kfac: {name}"] = Trial(task.name, method, records[0]["settings"], batch, 10)
    prepared: dict[Any, tuple[Any, Any, Any]] = {}
    names: dict[Any, list[str]] = {}
    data = next(iter(task.train.batches(BatchPlan(len(task.train), batch, np.arange(batch), 0, 0, 1))))
    key = jax.random.key(0)
    for name, trial in trials.items():
        compiled, numbers = training.prepare(task, trial)
        names.setdefault(id(compiled), []).append(name)
        prepared[id(compiled)] = (compiled, numbers, compiled.init(key, numbers, np.float32(10)))
    seconds: dict[Any, dict[str, list[float]]] = {which: {"step": [], "without_statistics": []} for which in prepared}
    for _ in range(ROUNDS):
        for which, (compiled, numbers, state) in prepared.items():
            for kind in ("step", "without_statistics") if compiled.observe else ("step",):
                began = time.perf_counter()
                if compiled.observe and kind == "step":
                    state, _ = compiled.observe(state, data.images, data.labels, key)
                state, _ = jax.block_until_ready(
                    compiled.step(state, data.images, data.labels, numbers, np.float32(10))
                )
                seconds[which][kind].append(time.perf_counter() - began)
            prepared[which] = (compiled, numbers, state)
    found = {
        name: {kind: round(statistics.median(times), 4) for kind, times in seconds[which].items() if times}
        for which, shared in names.items() for name in shared
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")
    for name, times in found.items():
        print(f"{name}: {times}")


def report(store: Store, results: Path, task: str, figures: Path) -> None:
    """Print the tables that have stored trials, and draw their figures."""
    if not store.records:
        raise UserError(f"{store.path} holds no trials: run study.py search --task {task} first")
    times_path = results / f"{task}-times.json"
    times = json.loads(times_path.read_text()) if times_path.is_file() else {}
    figures.mkdir(parents=True, exist_ok=True)
    chosen = tuple(METHODS)
    print(f"{len(store.records)} trials of {task}, target {RULES[task].target:.0%}\n")
    for table in (_search, _seeds, _batch_sizes, _ablations, _defaults):
        table(store, task, chosen, times, figures)


def _table(title: str, head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    print(f"**{title}**\n")
    for row in (head, ("---",) * len(head), *rows):
        print("| " + " | ".join(row) + " |")
    print()


def _words(record: Record) -> str:
    fixed = METHODS[record["method"]].fixed
    grid = METHODS[record["method"]].grid
    varied = {k: v for k, v in record["settings"].items() if k in grid or fixed.get(k) != v}
    return ", ".join(f"{k.replace('_', ' ')} {v:g}" for k, v in varied.items())


def _search(store: Store, task: str, chosen: tuple[str, ...], times: Any, figures: Path) -> None:
    """Print each method's best settings at each search budget, and draw the winners' curves."""
    winners, records = searched(store, task, chosen)
    rows = []
    for steps in (RULES[task].searched, RULES[task].shorter, RULES[task].longer):
        for method in chosen:
            own = [r for r in records if r["method"] == method and r["steps"] == steps]
            if own:
                best = max(own, key=plans.score)
                others = sorted((plans.score(r) for r in own), reverse=True)[1:3]
                rows.append((f"{steps}", LABELS[method], f"{len(own)}", _words(best), f"{plans.score(best):.1%}",
                             ", ".join(f"{x:.1%}" for x in others), f"{best['test_accuracy']:.1%}"))  # fmt: skip
    head = ("budget", "method", "trials", "best settings", "validation", "next two", "test")
    _table("Search" if len(winners) == len(chosen) else "Search (not finished)", head, rows)
    first = RULES[task].searched

    def draw(axes: Any) -> None:
        for record in records:
            method = record["method"]
            if method in winners and record["steps"] == first and record["settings"] == winners[method]["settings"]:
                axes.plot(*zip(*record["curve"], strict=True), marker=".", **STYLES[method])
        axes.axhline(RULES[task].target, color="grey", linewidth=0.8)
        axes.set(xlabel="step", ylabel="validation accuracy", title=f"{task}, batch N/10, budget of {first} steps")

    if rows:
        _draw(figures / f"large_batch_{task}_curves.svg", draw)


def crossing(groups: list[list[Record]], target: float) -> tuple[float, float]:
    """Return the steps to the target and their standard error, from the budgets on either side.

    The function interpolates the mean accuracies at the end of the budgets over the logarithm of the budget. The
    means' error, divided by the slope, gives the standard error. If the largest budget misses the target, the function
    returns infinity and this budget.
    """
    means = [statistics.fmean(map(plans.score, group)) for group in groups]
    budgets = [group[0]["steps"] for group in groups]
    if means[-1] < target:
        return math.inf, float(budgets[-1])
    above = next(i for i, mean in enumerate(means) if mean >= target)
    if above == 0:
        return float(budgets[0]), math.nan
    span = math.log(budgets[above] / budgets[above - 1])
    slope = (means[above] - means[above - 1]) / span
    steps = budgets[above - 1] * math.exp((target - means[above - 1]) / slope)
    if len(groups[above]) < 2:
        return steps, math.nan
    error = math.hypot(*(deviation(groups[i]) / 2 for i in (above - 1, above)))
    return steps, steps * error / slope


def deviation(group: list[Record]) -> float:
    """Return the standard error of the mean accuracy over a group of seeds."""
    return statistics.stdev(map(plans.score, group)) / math.sqrt(len(group))


def _steps(value: float, error: float) -> str:
    if math.isinf(value):
        return f"more than {error:.0f}"
    return f"{value:.0f}" if math.isnan(error) else f"{value:.0f} ± {error:.0f}"


def _known(value: float, digits: int) -> str:
    """Format the number, or return an empty string if it is infinite or was not measured."""
    return f"{value:.{digits}f}" if math.isfinite(value) else ""


def _seeds(store: Store, task: str, chosen: tuple[str, ...], times: Any, figures: Path) -> None:
    """Print the steps, epochs and seconds to the target."""
    rules = RULES[task]
    winners, _ = searched(store, task, chosen)
    rows, drawn = [], {}
    for method in winners:
        groups, _, done = replay(plans.least_budget(task, method, winners[method], 10, plans.SEEDS), store)
        if not done:
            if winners[method]["steps"] == rules.budgets[10][-1] and plans.score(winners[method]) < rules.target:
                around = f"{winners[method]['steps']}: {plans.score(winners[method]):.1%} (one seed)"
                seen = f"{winners[method]['test_accuracy']:.1%}"
                rows.append((LABELS[method], f"more than {winners[method]['steps']}", "", "", "", around, seen))
            continue
        steps, error = crossing(groups, rules.target)
        step = times.get(method, {}).get("step", math.nan)
        last = groups[-1]
        around = "; ".join(
            f"{group[0]['steps']}: {statistics.fmean(map(plans.score, group)):.1%} ± {deviation(group):.1%}"
            for group in groups
        )  # fmt: skip
        test = statistics.fmean(r["test_accuracy"] for r in last)
        rows.append((LABELS[method], _steps(steps, error), _known(steps / 10, 1), _known(step, 3),
                     _known(steps * step, 0 if steps * step >= 10 else 1), around, f"{test:.1%}"))  # fmt: skip
        by_budget: dict[int, list[float]] = {}
        for trial in store.records.values():
            same = trial["method"] == method and trial["settings"] == winners[method]["settings"]
            if same and trial["batch"] == rules.images // 10:
                by_budget.setdefault(trial["steps"], []).append(plans.score(trial))
        drawn[method] = sorted((k, statistics.fmean(v)) for k, v in by_budget.items())
    if not rows:
        return
    head = (
        "method",
        "steps to the target",
        "epochs",
        "s a step",
        "s to the target",
        "accuracy by budget",
        "test at the last budget",
    )
    _table(f"Steps to {rules.target:.0%} at N/10, three seeds", head, rows)

    def draw(axes: Any) -> None:
        for method, points in drawn.items():
            axes.plot(*zip(*points, strict=True), marker="o", **STYLES[method])
        axes.axhline(rules.target, color="grey", linewidth=0.8)
        axes.set(
            xscale="log", xlabel="budget in steps", ylabel="validation accuracy at its end", title=f"{task}, batch N/10"
        )
        _plain(axes.xaxis, rules.budgets[10])

    _draw(figures / f"large_batch_{task}_budgets.svg", draw)


def _batch_sizes(store: Store, task: str, chosen: tuple[str, ...], times: Any, figures: Path) -> None:
    rules = RULES[task]
    winners, _ = searched(store, task, chosen)
    rows, drawn = [], {}
    for method in winners:
        found: dict[int, tuple[float, float]] = {}
        groups, _, done = replay(plans.least_budget(task, method, winners[method], 10, plans.SEEDS), store)
        if done:
            found[10] = crossing(groups, rules.target)
        for parts in plans.OTHER_PARTS:
            groups, _, done = replay(plans.one_batch_size(task, method, winners[method], parts), store)
            if done:
                found[parts] = crossing(groups, rules.target)
        drawn[method] = sorted(
            (rules.images // parts, value) for parts, (value, _) in found.items() if math.isfinite(value)
        )
        if len(found) > 1:
            rows.append((LABELS[method], *(_steps(*found[p]) if p in found else "" for p in (200, 50, 10, 4))))
    if not rows:
        return
    _table(f"Steps to {rules.target:.0%} by batch size", ("method", "N/200", "N/50", "N/10", "N/4"), rows)

    again = []
    for method in chosen:
        cells = []
        for parts in plans.OTHER_PARTS[::-1]:
            groups, _, done = replay(plans.one_search_again(task, method, parts), store)
            best = groups[-1][0] if done else None
            cells += [f"{_steps(*crossing(groups, rules.target))}, {_words(best)}" if best else ""]
        if any(cells):
            again.append((LABELS[method], *cells))
    if again:
        _table("The same, settings searched at that size", ("method", "N/200", "N/50", "N/4"), again)

    def draw(axes: Any) -> None:
        for method, points in drawn.items():
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", **STYLES[method])
        axes.set(xscale="log", yscale="log", xlabel="batch", ylabel=f"steps to {rules.target:.0%}", title=task)
        _plain(axes.xaxis, [rules.images // parts for parts in (10, *plans.OTHER_PARTS)])
        _plain(axes.yaxis, (10, 20, 30, 40, 60, 80, 100, 150, 200, 300, 500, 1000))

    _draw(figures / f"large_batch_{task}_batch_sizes.svg", draw)


def _ablations(store: Store, task: str, chosen: tuple[str, ...], times: Any, figures: Path) -> None:
    rules = RULES[task]
    winners, _ = searched(store, task, chosen)
    if "kfac" not in winners:
        return
    rows = []
    for name, (method, change) in plans.ABLATIONS.items():
        records, _, done = replay(plans.one_ablation(task, winners["kfac"], method, change), store)
        if not done:
            continue
        seconds = times.get(f"kfac: {name}", {})
        share = records[0]["steps_with_statistics"] / records[0]["steps"]
        step = seconds.get("step", math.nan)
        cheap = seconds.get("without_statistics", step)
        mean = share * step + (1 - share) * cheap if method == "kfac" else step
        reached = [first_reach(record, rules.target) for record in records]
        rows.append((name, f"{statistics.fmean(map(plans.score, records)):.1%}",
                     ", ".join(f"{plans.score(r):.1%}" for r in records),
                     ", ".join(reached), "" if math.isnan(mean) else f"{mean:.3f}"))  # fmt: skip
    if rows:
        head = ("change", "validation", "by seed", f"first at {rules.target:.0%}", "s a step on average")
        _table(f"K-FAC with one thing changed, {winners['kfac']['steps']} steps", head, rows)


def first_reach(record: Record, target: float) -> str:
    """Return the step of a run's first evaluation at or above the target, or "-" if there is no such step."""
    return next((f"{step}" for step, accuracy in record["curve"] if accuracy >= target), "-")


def _defaults(store: Store, task: str, chosen: tuple[str, ...], times: Any, figures: Path) -> None:
    rules = RULES[task]
    rows = []
    for name, settings in plans.DEFAULTS.items():
        groups, _, done = replay(plans.one_default(task, settings), store)
        if done:
            rows.append((name, _steps(*crossing(groups, rules.target)), "; ".join(
                f"{g[0]['steps']}: {statistics.fmean(map(plans.score, g)):.1%} ± {deviation(g):.1%}" for g in groups
            )))  # fmt: skip
    if rows:
        _table(f"kfac.kfac as it is: steps to {rules.target:.0%}", ("call", "steps", "accuracy by budget"), rows)


def _plain(axis: Any, values: Sequence[int]) -> None:
    """Set ticks with plain numbers at these values."""
    from matplotlib import ticker

    axis.set_major_locator(ticker.FixedLocator(list(values)))
    axis.set_major_formatter(ticker.ScalarFormatter())
    axis.set_minor_locator(ticker.NullLocator())


def _draw(path: Path, draw: Callable[[Any], None]) -> None:
    import matplotlib

    matplotlib.use("svg")
    # Equal results give equal bytes.
    matplotlib.rcParams.update({"svg.hashsalt": "large_batch", "svg.fonttype": "none"})
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    draw(axes)
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
