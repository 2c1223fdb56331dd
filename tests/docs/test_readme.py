"""Test the README: its example runs unchanged and prints the shown output, and its figures are right."""

import contextlib
import io
import re
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
    folder = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", None)  # most readers have set none
    try:
        with contextlib.redirect_stdout(printed):
            exec(code, names)  # as a reader would paste it
    finally:
        jax.config.update("jax_compilation_cache_dir", folder)
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


def test_the_readme_has_the_line_that_ci_runs():
    [pattern] = re.findall(r'grep -E "(.*?)" README', (ROOT / ".ci" / "run").read_text())
    assert re.search(pattern, README, re.MULTILINE)


def test_files_that_the_readme_links_exist():
    for path in re.findall(r"\]\(([^):#]+)\)", README):
        assert (ROOT / path).exists(), path


def test_table_of_each_page_has_the_stored_runs(monkeypatch):
    """Make the tables of the README and of the evidence again, and compare every line."""
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "large_batch"))
    import tables

    for path, makers in tables.TABLES.items():
        page = (ROOT / path).read_text()
        for maker in makers:
            for line in maker():
                assert f"\n{line}\n" in page, f"{path}: run examples/large_batch/tables.py write"


def test_cell_of_a_search_says_edge_until_both_neighbours_ran(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "large_batch"))
    import tables

    def row(method, rate, seed, score):
        trial = {"network": "MLP-Mixer", "batch": 10, "steps": 60, "schedule": "falling"}
        return trial | {"method": method, "rate": rate, "seed": seed, "score": score}

    rows = [row("muon", 0.1, 0, 0.4), row("muon", 0.2, 0, 0.3)]
    monkeypatch.setattr(tables, "records", lambda: rows)
    assert tables.of("muon")("MLP-Mixer", 10).text == "40.0% (edge)"
    rows.append(row("muon", 0.05, 0, 0.39))
    assert tables.of("muon")("MLP-Mixer", 10).text == "40.0%"
    rows.extend(row("muon-adam-3", rate, seed, 0.4 + rate) for rate in (0.1, 0.2, 0.05) for seed in range(3))
    assert tables.of("muon")("MLP-Mixer", 10).text == "60.0 ± 0.0% (edge)"
    assert tables.of("muon")("MLP-Mixer", 10).method == "muon-adam-3"
    assert tables.of("kfac 0.1")("MLP-Mixer", 10).text == ""
