"""Draw docs/figures/muon.png: the default of K-FAC beside Muon at its best rate, on the networks of the study.

`python docs/figures/muon.py` reads examples/large_batch/results/networks.jsonl. It prints the means and their ratios.
"""

import pathlib
import statistics
import sys

import matplotlib.pyplot as plt

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "examples" / "large_batch"))

import tables  # noqa: E402

PANELS = {
    10: (tables.LARGE, 0.1),
    100: (tables.SMALL, 0.05),
    390: (tables.FASHIONABLE, 0.05),
}


def ratio(score, reference):
    """Return how many times better a score is. Losses are stored as negative scores."""
    return score / reference if reference > 0 else reference / score


# One panel below the other, so that a phone shows it. Each has its own scale.
figure, axes = plt.subplots(
    3, 1, figsize=(7, 8.5), layout="constrained", height_ratios=(10, 5, 5)
)
for axis, (batches, (networks, rate)) in zip(axes, PANELS.items(), strict=True):
    pairs = {}
    for network in networks:
        own, muon = (
            tables.of(method)(network, batches).scores
            for method in (f"kfac {rate}", "muon")
        )
        pairs[tables.NETWORKS[network].label] = own, muon
    order = sorted(pairs, key=lambda name: ratio(*map(statistics.mean, pairs[name])))
    for place, network in enumerate(order):
        own, muon = pairs[network]
        mean = statistics.mean(muon)
        print(
            f"{network}, 1/{batches}: K-FAC {statistics.mean(own):.4f}, Muon {mean:.4f}"
        )
        for values, colour, shift in ((muon, "C1", -0.12), (own, "C0", 0.12)):
            axis.scatter(
                [ratio(x, mean) for x in values],
                [place + shift] * len(values),
                color=colour,
                alpha=0.8,
            )
    axis.axvline(1, color="black", linewidth=1)
    axis.set_yticks(range(len(order)), order)
    axis.set_title(
        f"batches of 1/{batches} of the data, {tables.STEPS[batches]} steps, a dot per seed",
        fontsize=11,
    )
axes[-1].set_xlabel("result relative to Muon's mean (larger is better)")
axes[0].scatter([], [], color="C0", label="K-FAC at 0.1 (1/10) or 0.05")
axes[0].scatter([], [], color="C1", label="Muon at its best rates")
figure.legend(loc="outside lower center", ncols=2)
figure.savefig(HERE / "muon.png", dpi=110)
