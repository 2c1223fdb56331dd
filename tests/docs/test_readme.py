"""Test the README: its example runs unchanged and prints the shown output, and its figures are right."""

import contextlib
import io
import json
import re
import statistics
from pathlib import Path

import jax
import jax.numpy as jnp

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def model_and_data():
    """Return a two-layer network's parameters, a batch of a task that it can learn, and its loss."""
    k1, k2, k3 = jax.random.split(jax.random.key(0), 3)
    params = {
        "hidden": {"kernel": 0.3 * jax.random.normal(k1, (5, 8)), "bias": jnp.zeros(8)},
        "output": {"kernel": 0.3 * jax.random.normal(k2, (8, 3)), "bias": jnp.zeros(3)},
    }
    x = jax.random.normal(k3, (32, 5))
    batch = (x, jnp.argmax(x[:, :3], axis=-1))

    def loss_fn(params, batch):
        x, labels = batch
        h = jnp.tanh(x @ params["hidden"]["kernel"] + params["hidden"]["bias"])
        logits = h @ params["output"]["kernel"] + params["output"]["bias"]
        return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(len(labels)), labels])

    return params, batch, loss_fn


def test_the_example_of_the_readme_trains():
    [code] = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    [shown] = re.findall(r"^```text\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    printed, names = io.StringIO(), {}
    with contextlib.redirect_stdout(printed):
        exec(code, names)  # as a reader would paste it
    *found, loss = printed.getvalue().splitlines()
    *expected, shown_loss = shown.splitlines()
    assert found == expected
    assert abs(float(loss.removeprefix("loss ")) - float(shown_loss.removeprefix("loss "))) < 0.002
    assert float(names["loss"]) < 0.01 * float(jnp.mean(names["batch"][1] ** 2))
    scalars = names["kfac"].diagnostics(names["opt_state"])
    assert scalars["condition"] > 1 and scalars["skipped_steps"] == scalars["skipped_statistics"] == 0


def test_the_front_page_shows_the_same_example():
    page = (ROOT / "docs" / "index.rst").read_text().replace("\n   ", "\n")
    for kind in ("python", "text"):
        [block] = re.findall(rf"^```{kind}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
        assert block in page


def test_files_that_the_readme_links_exist():
    for path in re.findall(r"\]\(([^):#]+)\)", README):
        assert (ROOT / path).exists(), path


def score(text):
    """Return a cell's percentage as a fraction, or its nats as a negative score, as the study stores them."""
    number = float(re.search(r"\d+\.\d+", text)[0])
    return number / 100 if "%" in text else -number


def test_the_table_of_the_readme_has_the_stored_runs():
    """Compare K-FAC at the recommended rate, and other methods at the rate with the best mean over their seeds."""
    lines = (ROOT / "examples/large_batch/results/networks.jsonl").read_text().splitlines()
    steps, rates = {10: 60, 100: 400, 390: 600}, {10: 0.1, 100: 0.05, 390: 0.05}
    scores = {}
    for row in map(json.loads, lines):
        batches = row.get("batch", 10)  # the first rows do not name the batch
        if row.get("schedule", "falling") == "falling" and row["steps"] == steps.get(batches):
            by_rate = scores.setdefault((row["network"], batches, row["method"]), {})
            by_rate.setdefault(row["rate"], {})[row["seed"]] = row["score"]
    names = {"residual network": "residual network, batch norm", "convolutions": "fashion: convolutions"}
    table = re.findall(r"^\| ([^,|]+), 1/(\d+) \|(.*)\|$", README, re.MULTILINE)
    assert len(table) == 9
    for network, batches, cells in table:
        for method, cell in zip(("kfac", "muon", "adamw", "sgd"), cells.split("|"), strict=True):
            if not cell.strip():
                continue
            by_rate = scores[names.get(network, network), int(batches), method]
            if method == "kfac":
                by_rate = {rate: by_rate[rate] for rate in [rates[int(batches)]]}
            seeds = max(by_rate.values(), key=lambda by_seed: statistics.mean(by_seed.values())).values()
            assert abs(score(cell) - statistics.mean(seeds)) < 0.00051, (network, batches, method)
            assert ("±" in cell) == (len(seeds) == 3), (network, batches, method)
            if "±" in cell:
                assert abs(abs(score(cell.split("±")[1])) - statistics.stdev(seeds)) < 0.0006
