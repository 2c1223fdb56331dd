"""The documentation says what the package does: its examples run, its tables are complete."""

import inspect
import re
from pathlib import Path

import jax
import numpy as np
import pytest

import kfac
from test_readme import model_and_data

DOCS = Path(__file__).parents[1] / "docs"
OPTIMIZER = (DOCS / "optimizer.md").read_text()


@pytest.fixture(scope="module")
def names():
    """What the names of the examples of docs/optimizer.md stand for, after all of them have run."""
    params, batch, loss_fn = model_and_data()
    names = {"loss_fn": loss_fn, "params": params, "batch": batch}
    blocks = re.findall(r"^```python\n(.*?)^```$", OPTIMIZER, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 8
    for block in blocks:
        exec(block, names)
    return names


def _table(heading):
    """Rows of the first table after `heading` as {first cell: second cell}, both without quotes."""
    text = OPTIMIZER[OPTIMIZER.index(heading) :]
    rows = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)[0].splitlines()[2:]
    cells = [[cell.strip().strip("`") for cell in row.split("|")[1:-1]] for row in rows]
    return {row[0]: row[1] for row in cells}


def _options(function):
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def test_every_option_is_documented_with_its_default():
    preconditioner = _table("Options of `scale_by_kfac`")
    alias = _table("Options of `kfac` alone")
    for documented, actual in [
        (preconditioner, _options(kfac.scale_by_kfac)),
        (preconditioner | alias, _options(kfac.kfac)),
    ]:
        assert {name: eval(default) for name, default in documented.items()} == actual


def test_every_diagnostic_is_documented(names):
    scalars = kfac.diagnostics(names["opt_state"])
    assert set(_table("## What a run logs")) == set(scalars)
    assert all(np.isfinite(value) for value in scalars.values())


def test_accumulated_factors_are_those_of_the_whole_batch(names):
    whole = kfac.value_and_grad(names["loss_fn"], names["layers"])(names["params"], names["batch"])
    parts = names["accumulated"](names["params"], names["batch"])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), whole, parts)


def test_unscaled_statistics_are_those_of_the_loss_itself(names):
    whole = kfac.value_and_grad(names["loss_fn"], names["layers"])(names["params"], names["batch"])
    scaled = names["grads"], names["factors"]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), whole[1:], scaled)


def test_restored_state_is_the_saved_one(names):
    saved = {"params": names["params"], "opt_state": names["opt_state"]}
    assert jax.tree.structure(saved) == jax.tree.structure(names["restored"])
    jax.tree.map(np.testing.assert_array_equal, saved, names["restored"])


def test_data_parallel_step_equals_that_of_one_device(names):
    devices = 4
    params, (x, y) = names["params"], names["batch"]
    parts = x.reshape(devices, -1, *x.shape[1:]), y.reshape(devices, -1)
    tx = kfac.kfac(0.05, names["layers"])
    _, grads, factors = kfac.value_and_grad(names["loss_fn"], names["layers"])(params, (x, y))
    updates, _ = tx.update(grads, tx.init(params), params, factors=factors)
    parallel, _, _ = names["parallel_step"](params, tx.init(params), parts)
    for a, b, u in zip(*map(jax.tree.leaves, (parallel, params, updates)), strict=True):
        np.testing.assert_allclose(a[0], b + u, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(a[0], a[-1])
