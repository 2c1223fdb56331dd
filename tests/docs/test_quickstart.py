"""docs/quickstart.md: what a reader would paste trains, in three frameworks and on several devices."""

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from test_docs import _run

import kfac


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The names of the page, and what it prints; with a home for the cache of programs that it sets."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        printed, before = [], jax.config.jax_compilation_cache_dir
        patched.setattr("builtins.print", lambda *words, **_: printed.append(" ".join(map(str, words))))
        names = _run("quickstart.md", 8)
        jax.config.update("jax_compilation_cache_dir", before)
        compilation_cache.reset_cache()
    return names, printed


def test_both_optimizers_learn_and_k_fac_says_what_it_found(page):
    names, printed = page
    found = "3 layers, 4,938 parameters, SOAP, statistics of 1/4 of the examples every 16 steps"
    assert any(line.startswith(found) for line in printed)
    assert str(names["layers"]) in printed and any("skipped_steps" in line for line in printed)
    [adamw, found, _] = [float(line.split(": ")[1].rstrip("%")) for line in printed if line.endswith("%")]
    assert adamw > 80 and found > 90  # one in ten by guessing
    assert float(names["own_last"]) < 1.3  # log 10 by guessing


def test_on_a_mesh_the_same_is_learnt_and_blocks_have_owners(page):
    names, printed = page
    assert f"K-FAC on {jax.device_count()} devices: {names['accuracy'](names['params'], names['stats']):.1%}" in printed
    [state] = [s for s in jax.tree.leaves(names["opt_state"], is_leaf=is_state) if is_state(s)]
    assert {own.assignment.devices for own in state.owned.values()} == {jax.device_count()} and jax.device_count() > 1
    assert names["accuracy"](names["params"], names["stats"]) > 0.9


def is_state(node):
    return hasattr(node, "owned")


def test_the_model_of_nnx_has_what_was_learnt(page):
    names, _ = page
    assert float(names["nnx_last"]) < 0.6 and kfac.diagnostics(names["nnx_state"])["skipped_steps"] == 0
    model = names["nnx_model"]
    np.testing.assert_array_equal(model.hidden.kernel[...], names["nnx_params"].hidden.kernel[...])
    assert np.abs(model.norm.mean[...]).max() > 1e-3  # no longer what it was at first


def test_the_averages_of_equinox_move(page):
    names, _ = page
    assert float(names["eqx_last"]) < 0.6 and kfac.diagnostics(names["eqx_state"])["skipped_steps"] == 0
    _, first = names["eqx"].nn.make_with_state(names["EqxNetwork"])(jax.random.key(0))
    pairs = zip(jax.tree.leaves(names["averages"]), jax.tree.leaves(first), strict=True)
    assert any(np.any(now != before) for now, before in pairs)
