"""Define the trials in each table. All rules are fixed before the trials run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from methods import METHODS, Settings
from store import Plan, Record
from training import Trial

SEEDS = (0, 1, 2)
# How many learning rates a search may try beyond the grid, if the best rate lies at its edge.
EXTENSIONS = 3


def score(record: Record) -> float:
    """Return the validation accuracy at the end of the budget, which the search maximises."""
    return record["val_accuracy"]


class Rules(NamedTuple):
    """Hold the rules that are fixed for a task before its trials run.

    Attributes:
      images: the number of training images, `N`.
      target: the target accuracy on the validation images.
      searched: the search budget in steps, at batch size N/10.
      shorter: the budget for the second comparison if the best setting reached the target.
      longer: the budget for the second comparison if the best setting missed the target.
      budgets: the step budgets to try, by `N / batch`. If a method needs more steps than the largest budget, the report
        says "more than" that budget.
      ablation_seeds: the seeds for the ablations.
    """

    images: int
    target: float
    searched: int
    shorter: int
    longer: int
    budgets: dict[int, tuple[int, ...]]
    ablation_seeds: tuple[int, ...]


RULES = {
    "cifar": Rules(5000, 0.5, 60, 40, 120, {
        10: (20, 30, 40, 60, 80, 120), 4: (15, 20, 30, 40, 60, 80), 50: (80, 120, 160, 240, 320, 480),
        200: (240, 320, 480, 640, 960, 1280),
    }, (0,)),
    "digits": Rules(1000, 0.97, 30, 20, 60, {
        10: (10, 15, 20, 30, 40, 60), 4: (8, 10, 15, 20, 30, 40), 50: (20, 30, 40, 60, 80, 120),
        200: (40, 60, 80, 120, 160, 240),
    }, SEEDS),
    "toy": Rules(64, 0.9, 2, 2, 4, {10: (2, 4), 4: (2, 4), 50: (2, 4), 200: (2, 4)}, (0,)),
}  # fmt: skip


def grid_search(task: str, method: str, steps: int, batch: int, space: dict[str, tuple[Any, ...]]) -> Plan:
    """Search a grid of learning rates and a second setting.

    If the best learning rate lies at the grid's edge, the search continues beyond the edge. The plan returns the
    records, best first.
    """
    fixed = METHODS[method].fixed
    second, others = next(((name, values) for name, values in space.items() if name != "learning_rate"))
    rates = list(space["learning_rate"])
    records = []
    for other in others:
        for rate in rates:
            settings = {**fixed, "learning_rate": rate, second: other}
            records.append((yield Trial(task, method, settings, batch, steps)))
    for _ in range(EXTENSIONS):
        best = max(records, key=score)["settings"]
        if best["learning_rate"] not in (min(rates), max(rates)):
            break
        outwards = 2.0 if best["learning_rate"] == max(rates) else 0.5
        rates.append(best["learning_rate"] * outwards)
        records.append((yield Trial(task, method, {**best, "learning_rate": rates[-1]}, batch, steps)))
    return sorted(records, key=score, reverse=True)


def search(task: str, chosen: tuple[str, ...]) -> Plan:
    """Search every method's grid at the same budget, then compare its two best settings at a second budget.

    The second budget is shorter if the method reached the target, otherwise longer. The plan returns each method's
    better record.
    """
    rules = RULES[task]
    winners: dict[str, Record] = {}
    for method in chosen:
        records = yield from grid_search(task, method, rules.searched, rules.images // 10, METHODS[method].grid)
        steps = rules.shorter if score(records[0]) >= rules.target else rules.longer
        again = []
        for record in records[:2]:
            again.append((yield Trial(task, method, record["settings"], rules.images // 10, steps)))
        winners[method] = max(again, key=score)
    return winners


def least_budget(task: str, method: str, winner: Record, parts: int, seeds: tuple[int, ...]) -> Plan:
    """Run the budgets around the target, from the winner's budget down or up.

    The budgets next to the target run with all seeds. The plan returns the records by budget. The first budget in the
    result misses the target, unless it is the smallest budget in the rules. The last budget reaches the target on
    average, unless it is the largest budget in the rules.
    """
    rules = RULES[task]
    batch, budgets = rules.images // parts, rules.budgets[parts]

    def reaches(number: int, seeds: tuple[int, ...]) -> Plan:
        records = []
        for seed in seeds:
            records.append((yield Trial(task, method, winner["settings"], batch, budgets[number], seed)))
        found[number] = records
        return sum(map(score, records)) / len(records) >= rules.target

    # Start with a single seed, so that budgets far from the target run only once.
    number = budgets.index(winner["steps"])
    for those in (seeds[:1], seeds):
        found: dict[int, list[Record]] = {}
        if (yield from reaches(number, those)):
            while number > 0 and (yield from reaches(number - 1, those)):
                number -= 1
        else:
            while number + 1 < len(budgets):
                number += 1
                if (yield from reaches(number, those)):
                    break
    return [found[number] for number in sorted(found)]


def seeds(task: str, chosen: tuple[str, ...]) -> Plan:
    """Run the search's best settings with all seeds, at the budgets around the target."""
    winners = yield from search(task, chosen)
    for method in chosen:
        yield from least_budget(task, method, winners[method], 10, SEEDS)


OTHER_PARTS = (4, 50, 200)


def one_batch_size(task: str, method: str, winner: Record, parts: int) -> Plan:
    """Transfer the best settings to batch size `N / parts`, with a single seed.

    The plan tries the same learning rate and a rate scaled by the square-root rule. It passes the better rate to
    `least_budget`, and returns the result.
    """
    rules = RULES[task]
    groups = yield from least_budget(task, method, winner, 10, SEEDS)
    # Choose the budget with the same position in its list as the budget needed at N/10.
    position = min(rules.budgets[10].index(groups[-1][0]["steps"]), len(rules.budgets[parts]) - 1)
    steps = rules.budgets[parts][position]
    records = []
    for factor in (1.0, (10 / parts) ** 0.5):
        settings = {**winner["settings"], "learning_rate": winner["settings"]["learning_rate"] * factor}
        records.append((yield Trial(task, method, settings, rules.images // parts, steps)))
    return (yield from least_budget(task, method, max(records, key=score), parts, SEEDS[:1]))


def batch_sizes(task: str, chosen: tuple[str, ...], all_parts: tuple[int, ...]) -> Plan:
    """Run the methods at other batch sizes, with the settings found at N/10."""
    winners = yield from search(task, chosen)
    for parts in all_parts:
        for method in chosen:
            yield from one_batch_size(task, method, winners[method], parts)


def one_search_again(task: str, method: str, parts: int) -> Plan:
    """Repeat the grid search at batch size `N / parts`, with a single seed.

    The plan passes the best setting to `least_budget`, and returns the result.
    """
    rules = RULES[task]
    budgets = rules.budgets[parts]
    records = yield from grid_search(
        task, method, budgets[len(budgets) // 2], rules.images // parts, METHODS[method].grid
    )
    return (yield from least_budget(task, method, records[0], parts, SEEDS[:1]))


def searches_again(task: str, chosen: tuple[str, ...], all_parts: tuple[int, ...]) -> Plan:
    """Run the methods at other batch sizes, with settings searched at each size."""
    for parts in all_parts:
        for method in chosen:
            yield from one_search_again(task, method, parts)


def changed(winner: Settings, method: str, change: Callable[[Settings], Settings]) -> Settings:
    """Return an ablation's settings: K-FAC's best settings or a control's fixed settings, with the change applied."""
    base = winner if method == "kfac" else METHODS[method].fixed
    return {name: value for name, value in {**base, **change(winner)}.items() if value is not None}


def one_ablation(task: str, winner: Record, method: str, change: Callable[[Settings], Settings]) -> Plan:
    """Run K-FAC's best settings with a single change, at the budget of the last comparison.

    The plan returns the records by seed.
    """
    rules = RULES[task]
    settings = changed(winner["settings"], method, change)
    records = []
    for seed in rules.ablation_seeds:
        records.append((yield Trial(task, method, settings, rules.images // 10, winner["steps"], seed)))
    return records


def ablations(task: str, chosen: tuple[str, ...]) -> Plan:
    """Run all ablations."""
    del chosen
    winner = (yield from search(task, ("kfac",)))["kfac"]
    for method, change in ABLATIONS.values():
        yield from one_ablation(task, winner, method, change)


# Calls that leave all other options at their defaults. Statistics use the whole batch.
DEFAULTS: dict[str, Settings] = {
    "`kfac.kfac(schedule, layers, trust_ratio=None, nesterov=False)`, peak 0.02": {"learning_rate": 0.02},
    "`kfac.kfac(schedule, layers, trust_ratio=7.0)`, peak 0.01": {
        "learning_rate": 0.01, "nesterov": True, "trust_ratio": 7.0,
    },
}  # fmt: skip


def one_default(task: str, settings: Settings) -> Plan:
    """Run `least_budget` for a call with these settings, and return the result."""
    rules = RULES[task]
    first = yield Trial(task, "kfac", settings, rules.images // 10, rules.searched)
    return (yield from least_budget(task, "kfac", first, 10, SEEDS))


def defaults(task: str, chosen: tuple[str, ...]) -> Plan:
    """Run the budgets around the target for every call in `DEFAULTS`."""
    del chosen
    for settings in DEFAULTS.values():
        yield from one_default(task, settings)


def _set(**settings: Any) -> Callable[[Settings], Settings]:
    return lambda winner: settings


def _times(name: str, factor: float) -> Callable[[Settings], Settings]:
    return lambda winner: {name: winner[name] * factor}


def _untied(**settings: Any) -> Callable[[Settings], Settings]:
    """Return a change that removes the trust ratio, so that all parameters have the same rate."""
    return lambda winner: {"turned": None, "vectors": None, "learning_rate": 0.02, **settings}


# Each name maps to a method and a change to the winner's settings. A value of None removes a setting.
ABLATIONS: dict[str, tuple[str, Callable[[Settings], Settings]]] = {
    "(the winner)": ("kfac", _set()),
    "statistics of every example": ("kfac", _set(subsample=1)),
    "momentum 0.8": ("kfac", _set(momentum=0.8)),
    "running average 0.5": ("kfac", _set(factor_ema_decay=0.5)),
    "learning rate x 1/2": ("kfac", _times("learning_rate", 0.5)),
    "learning rate x 2": ("kfac", _times("learning_rate", 2.0)),
    "damping x 10": ("kfac", _times("damping", 10.0)),
    "damping x 1/10": ("kfac", _times("damping", 0.1)),
    "running average 0.9": ("kfac", _set(factor_ema_decay=0.9)),
    "statistics and inverses every 5 steps": ("kfac", _set(statistics_period=5)),
    "no trust ratio, rate 0.02": ("kfac", _untied()),
    "SGD with such a trust ratio, 0.07": ("sgd", _set(turned=True, vectors=0.15, learning_rate=0.07)),
    "Muon's best settings": ("muon", _set(learning_rate=0.2, vectors=0.3)),
    "Muon with such a trust ratio, 0.07": ("muon", _set(turned=True, vectors=0.15, learning_rate=0.07)),
    "Muon's best settings, vectors 1": ("muon", _set(learning_rate=0.2, vectors=1.0)),
    "Muon's best settings, momentum 0.95": ("muon", _set(learning_rate=0.2, vectors=0.3, momentum=0.95)),
    "part along the kernel kept": ("kfac", _set(tangent=False)),
    "learning rate x 2, part along the kernel kept": (
        "kfac",
        lambda winner: {"tangent": False, "learning_rate": 2 * winner["learning_rate"]},
    ),
    "without Nesterov": ("kfac", _set(nesterov=False)),
    "statistics and inverses every 50 steps": ("kfac", _set(statistics_period=50)),
    "batch norm without blocks": ("kfac", _set(batch_norm_blocks=False)),
    "sampled Fisher": ("kfac", _set(fisher="sampled")),
    "kernels kept at their first norm": ("kfac", _set(rescale=True)),
    "bfloat16 inverses": ("kfac", _set(precision="bfloat16")),
    "statistics and inverses every 10 steps": ("kfac", _set(statistics_period=10)),
    "statistics when they change (threshold 0.7)": (
        "kfac",
        _set(statistics_period="adaptive", statistics_threshold=0.7),
    ),
    "no trust ratio, rate 0.04": ("kfac", _untied(learning_rate=0.04)),
    "bfloat16 statistics": ("kfac", _set(statistics_dtype="bfloat16")),
    "no trust ratio, norm constraint 1e-3": ("kfac", _untied(kl_clip=1e-3)),
    "no trust ratio, rate in momentum": ("kfac", _untied(lr_in_momentum=True, nesterov=False)),
    "vectors' rate x 3": ("kfac", _times("vectors", 3.0)),
    "vectors' rate x 1/3": ("kfac", _times("vectors", 1 / 3)),
    "batch norm's damping x 16": ("kfac", _set(unitwise_damping_scale=16.0)),
    "momentum 0.95": ("kfac", _set(momentum=0.95)),
    "eigendecompositions": ("kfac", _set(preconditioner="eigh")),
    "damping from 1e-2 to 1e-4": ("kfac", _set(first_damping=1e-2, damping=1e-4)),
    "damping from 1e-4 to 1e-2": ("kfac", _set(first_damping=1e-4, damping=1e-2)),
    "adaptive damping": ("kfac", _set(adaptive_damping=True)),
    "momentum before the preconditioner": ("kfac", _set(momentum_first=True)),
    "SOAP's second moments in K-FAC's eigenbasis": (
        "kfac",
        _set(eigenbasis_adam=True, preconditioner="ekfac", factor_ema_decay=0.9, b2=0.95),
    ),
    "EKFAC": ("kfac", _set(preconditioner="ekfac")),
    "EKFAC, running average 0.9": ("kfac", _set(preconditioner="ekfac", factor_ema_decay=0.9)),
    "EKFAC, running average 0.9, damping x 1/10": (
        "kfac",
        lambda winner: {"preconditioner": "ekfac", "factor_ema_decay": 0.9, "damping": winner["damping"] / 10},
    ),
}
