"""Which trials make up each table. All rules are fixed here before the trials run."""

from __future__ import annotations

from typing import Any

import methods
from methods import METHODS, Settings
from store import Plan, Record
from tasks import Task
from training import Trial

SEEDS = (0, 1, 2)
# Learning rates beyond an edge of the grid that may be tried where the best one lies there.
EXTENSIONS = 3


def score(record: Record) -> float:
    """What the search maximises: the validation accuracy at the end of the budget."""
    return record["val_accuracy"]


def budgets_of(task: Task, batch: int) -> tuple[int, ...]:
    """Budgets of steps that are tried for a batch size: each a half more than the last, from two epochs... of N/10."""
    scale = {10: 1.0, 4: 0.75, 50: 2.5, 200: 8.0}[round(len(task.train) / batch)]
    return tuple(round(scale * steps / 10) * 10 for steps in BUDGETS[task.name])


BUDGETS = {
    "cifar": (30, 40, 60, 80, 120, 160, 240, 320),
    "digits": (10, 20, 30, 40, 60, 80, 120, 160),
    "toy": (2, 4),
}
SEARCHED = {"cifar": (60, 120), "digits": (30, 60), "toy": (2,)}  # budgets of the search, at N/10


def grid_search(task: Task, method: str, steps: int, batch: int, space: dict[str, tuple[Any, ...]]) -> Plan:
    """A grid of learning rates and a second setting; then learning rates beyond an edge that has the best.

    Returns the records, best first.
    """
    fixed = METHODS[method].fixed
    (second, others) = next((item for item in space.items() if item[0] != "learning_rate"), ("", ()))
    rates = list(space["learning_rate"])
    records = []
    for other in others or (None,):
        for rate in rates:
            settings = {**fixed, "learning_rate": rate, **({second: other} if second else {})}
            records.append((yield Trial(task.name, method, settings, batch, steps)))
    for _ in range(EXTENSIONS):
        best = max(records, key=score)["settings"]
        if best["learning_rate"] not in (min(rates), max(rates)):
            break
        outwards = 2.0 if best["learning_rate"] == max(rates) else 0.5
        rates.append(best["learning_rate"] * outwards)
        settings = {**best, "learning_rate": rates[-1]}
        records.append((yield Trial(task.name, method, settings, batch, steps)))
    return sorted(records, key=score, reverse=True)


def search(task: Task, chosen: tuple[str, ...]) -> Plan:
    """Every method's whole grid at the first budget; at the next, for those that missed the target, rates alone.

    Returns the best record of each method at its last budget.
    """
    batch = len(task.train) // 10
    winners: dict[str, Record] = {}
    for steps in SEARCHED[task.name]:
        for method in chosen:
            space = METHODS[method].grid
            if method in winners:
                if score(winners[method]) >= task.target:
                    continue
                best = winners[method]["settings"]
                space = {
                    name: values if name == "learning_rate" else (best[name],) for name, values in space.items()
                }
            winners[method] = (yield from grid_search(task, method, steps, batch, space))[0]
    return winners


def least_budget(task: Task, method: str, settings: Settings, batch: int, seeds: tuple[int, ...]) -> Plan:
    """Upwards through the budgets with the first seed until the target is reached, then all seeds around there.

    Returns all records.
    """
    budgets = budgets_of(task, batch)
    records = []
    reached = len(budgets) - 1
    for number, steps in enumerate(budgets):
        records.append((yield Trial(task.name, method, settings, batch, steps, seeds[0])))
        if score(records[-1]) >= task.target:
            reached = number
            break
    means = []
    number = max(reached - 1, 0)
    while number < len(budgets):
        steps = budgets[number]
        scores = []
        for seed in seeds:
            record = yield Trial(task.name, method, settings, batch, steps, seed)
            records.append(record)
            scores.append(score(record))
        means.append(sum(scores) / len(scores))
        if means[-1] >= task.target:
            break
        number += 1
    return records


def seeds(task: Task, chosen: tuple[str, ...]) -> Plan:
    """The best settings of the search with all seeds, at the budgets around the target."""
    winners = yield from search(task, chosen)
    for method in chosen:
        yield from least_budget(task, method, winners[method]["settings"], len(task.train) // 10, SEEDS)


def batch_sizes(task: Task, chosen: tuple[str, ...]) -> Plan:
    """The best settings carried to other batch sizes: three learning rates around the square-root rule, one seed."""
    winners = yield from search(task, chosen)
    for parts in (4, 50, 200):
        batch = len(task.train) // parts
        for method in chosen:
            settings = winners[method]["settings"]
            centre = settings["learning_rate"] * (10 / parts) ** 0.5
            records = []
            for factor in (1.0, 0.5, 2.0):
                scaled = {**settings, "learning_rate": centre * factor}
                # At the budget of this batch size that the winner needed at N/10, or as near as there is.
                steps = budgets_of(task, batch)[budgets_of(task, len(task.train) // 10).index(winners[method]["steps"])]
                records.append((yield Trial(task.name, method, scaled, batch, steps)))
            best = max(records, key=score)["settings"]
            yield from least_budget(task, method, best, batch, SEEDS[:1])
