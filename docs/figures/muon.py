"""Draws docs/figures/muon.png: the default of K-FAC beside Muon at its best rate, on the networks of the study.

`python docs/figures/muon.py` reads examples/large_batch/results/networks.jsonl. It prints the means and their ratios.
"""

import collections
import json
import pathlib
import statistics

import matplotlib.pyplot as plt

HERE = pathlib.Path(__file__).resolve().parent
RESULTS = HERE.parents[1] / "examples" / "large_batch" / "results" / "networks.jsonl"
ROWS = [json.loads(line) for line in RESULTS.read_text().splitlines()]
RATES = {10: 0.1, 100: 0.05, 390: 0.05}  # K-FAC's recommended rate by the number of batches in an epoch
STEPS = {10: 60, 100: 400, 390: 600}


def scores(network, method, batches):
    """Return the scores by rate, each a list over seeds. Early rows have no `batch`, which was a tenth of the data."""
    found = collections.defaultdict(dict)
    for row in ROWS:
        wanted = network, method, batches, STEPS[batches]
        same = (row["network"], row["method"], row.get("batch", 10), row["steps"]) == wanted
        if same and row.get("schedule", "falling") == "falling":
            found[row["rate"]][row["seed"]] = row["score"]
    return {rate: list(by_seed.values()) for rate, by_seed in found.items()}


def ratio(score, reference):
    """Return how many times better a score is. Losses are stored as negative scores."""
    return score / reference if reference > 0 else reference / score


figure, axes = plt.subplots(1, 3, figsize=(15, 4.4), layout="constrained", sharex=True)
for axis, batches in zip(axes, RATES, strict=True):
    pairs = {}
    for network in {row["network"] for row in ROWS}:
        own = scores(network, "kfac", batches).get(RATES[batches])
        muon = scores(network, "muon", batches)
        if own and muon:
            pairs[network] = own, max(muon.values(), key=statistics.mean)
    order = sorted(pairs, key=lambda name: ratio(*map(statistics.mean, pairs[name])))
    for place, network in enumerate(order):
        own, muon = pairs[network]
        mean = statistics.mean(muon)
        print(f"{network}, 1/{batches}: K-FAC {statistics.mean(own):.4f}, Muon {mean:.4f}")
        for values, colour, shift in ((muon, "C1", -0.12), (own, "C0", 0.12)):
            axis.scatter([ratio(x, mean) for x in values], [place + shift] * len(values), color=colour, alpha=0.8)
    axis.axvline(1, color="black", linewidth=1)
    axis.set_yticks(range(len(order)), order)
    axis.set_title(f"batches of 1/{batches} of the data\n{STEPS[batches]} steps, a dot per seed", fontsize=11)
    axis.set_xlabel("result relative to Muon's mean\n(larger is better)")
axes[0].scatter([], [], color="C0", label=f"K-FAC, rate {RATES[10]} (1/10) or {RATES[100]} (1/100, 1/390)")
axes[0].scatter([], [], color="C1", label="Muon, best rate")
figure.legend(loc="outside lower center", ncols=2)
figure.savefig(HERE / "muon.png", dpi=110)
