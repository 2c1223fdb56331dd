"""Test docs/getting_started.md: its code trains in three frameworks and on several devices, with the shown output."""

import re

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from test_docs import DOCS, _run

import kfac

PAGE = (DOCS / "getting_started.md").read_text()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Return the page's names and its output. The home folder is temporary, because the page sets a program cache."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        printed, before = [], jax.config.jax_compilation_cache_dir

        def record(*words, file=None, **_):
            if file is None:
                printed.append(" ".join(map(str, words)))

        patched.setattr("builtins.print", record)
        names = _run("getting_started.md", 8)
        jax.config.update("jax_compilation_cache_dir", before)
        compilation_cache.reset_cache()
    return names, printed


def test_the_page_shows_what_its_code_prints(page):
    """Compare all output exactly, except accuracies.

    Accuracies may differ by two points, because rounding may change a few images.
    """
    _, printed = page
    shown = re.findall(r"^```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    found = "\n".join(printed[:-3]).splitlines()  # the last three lines are of the run on several devices
    expected = "".join(shown).replace("\n    ", " ").splitlines()  # an indented line continues the last line
    for line, shown_line in zip(found, expected, strict=True):
        accuracies = [re.search(r"(\d+\.\d)%", text) for text in (line, shown_line)]
        if all(accuracies):
            assert abs(float(accuracies[0][1]) - float(accuracies[1][1])) < 2
            line, shown_line = line.split(":")[0], shown_line.split(":")[0]
        assert line == shown_line
    assert [line.split(":")[0] for line in expected if "%" in line] == ["linen", "nnx", "equinox"]


def test_k_fac_learns_and_the_table_has_a_layer_of_every_kind(page):
    names, printed = page
    found = [float(line.split(": ")[1].rstrip("%")) for line in printed if line.endswith("%")]
    assert len(found) == 4 and min(found) > 90  # guessing gives 10%
    assert str(names["layers"]) in printed
    kinds = {layer.kind for layer in names["layers"]}
    table = PAGE[PAGE.index("| kind | meaning |") :]
    rows = re.search(r"(?:^\|.*\n)+", table, re.MULTILINE)[0].splitlines()[2:]
    explained = {kind for row in rows for kind in re.findall(r"`([\w-]+)`", row.split("|")[1])}
    assert kinds == explained


def test_the_own_loop_learns(page):
    names, _ = page
    assert float(names["own_last"]) < 1.3  # guessing gives log 10
    scalars = kfac.diagnostics(names["own_state"])
    assert scalars["condition"] > 1 and scalars["skipped_steps"] == scalars["skipped_statistics"] == 0
    averages = names["own_stats"]["BatchNorm_0"]["mean"]
    assert np.abs(averages).max() > 1e-3  # no longer the initial average


def test_on_a_mesh_the_same_is_learnt_and_blocks_have_owners(page):
    names, printed = page
    assert printed[-1] == f"{jax.device_count()} devices: {names['accuracy'](names['logits'])}"
    [state] = [s for s in jax.tree.leaves(names["opt_state"], is_leaf=is_state) if is_state(s)]
    assert {own.assignment.devices for own in state.owned.values()} == {jax.device_count()} and jax.device_count() > 1


def is_state(node):
    return hasattr(node, "owned")


def test_the_model_of_nnx_has_what_was_learnt(page):
    names, _ = page
    assert float(names["nnx_last"]) < 0.6 and kfac.diagnostics(names["nnx_state"])["skipped_steps"] == 0
    model = names["nnx_model"]
    np.testing.assert_array_equal(model.hidden.kernel[...], names["nnx_params"].hidden.kernel[...])
    assert np.abs(model.norm.mean[...]).max() > 1e-3  # no longer the initial average


def test_the_averages_of_equinox_move(page):
    names, _ = page
    assert float(names["eqx_last"]) < 0.6 and kfac.diagnostics(names["eqx_state"])["skipped_steps"] == 0
    _, first = names["eqx"].nn.make_with_state(names["EqxNetwork"])(jax.random.key(0))
    pairs = zip(jax.tree.leaves(names["averages"]), jax.tree.leaves(first), strict=True)
    assert any(np.any(now != before) for now, before in pairs)
