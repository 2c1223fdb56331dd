"""Test docs/coming_from_adamw.md: loops train, wrong places in a chain do harm, and a new process resumes exactly."""

import contextlib
import io
import os
import re
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from flax.errors import TraceContextError
from test_docs import DOCS

import kfac

PAGE = (DOCS / "coming_from_adamw.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
SHOWN = "".join(re.findall(r"^```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)).splitlines()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Return the page's names, the lines that it prints, and the folder with its checkpoints."""
    names, printed, folder = {}, io.StringIO(), tmp_path_factory.mktemp("resumed")
    assert len(BLOCKS) == 9
    with contextlib.chdir(folder), contextlib.redirect_stdout(printed):
        for block in BLOCKS:
            exec(block, names)
    return names, printed.getvalue().splitlines(), folder


def figures(line):
    """Return the accuracy in percent, and the held-out loss."""
    return [float(x) for x in re.findall(r"\d+\.\d+", line)]


def test_the_page_shows_what_its_code_prints(page):
    _, printed, _ = page
    assert re.sub(r"\d+\.\d+", "", "\n".join(printed)) == re.sub(r"\d+\.\d+", "", "\n".join(SHOWN))
    for line, shown in zip(printed, SHOWN, strict=True):
        # Rounding may change a few of the 261 images. Parameters that grow without bound magnify it.
        np.testing.assert_allclose(figures(line), figures(shown), rtol=0.1)


def test_every_wrong_place_in_a_chain_does_harm(page):
    _, printed, _ = page
    [right, *wrong] = [figures(line) for line in printed if "held-out" in line]
    assert len(wrong) == 4
    for accuracy, loss in wrong:
        assert accuracy < right[0] and loss > right[1]


def test_clipping_before_k_fac_changes_nothing_unless_it_clips(page):
    names, _, _ = page
    plain = kfac.kfac(0.1, names["layers"])
    results = []
    for tx in (plain, optax.chain(optax.clip_by_global_norm(10.0), plain)):
        params = names["init"](jax.random.key(0))
        step, state = names["make_step"](tx), tx.init(params)
        for batch in names["batches"][:2]:
            state = names["observe"](state, params, batch)
            params, state, _ = step(params, state, batch)
        results.append(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), *results)


def test_a_new_process_goes_on_bit_for_bit(page):
    """Run only the definitions and the restoring block. The page's own run made the same step."""
    names, _, folder = page
    [restore] = [k for k, block in enumerate(BLOCKS) if "pickle.loads" in block]
    definitions = BLOCKS[0][: BLOCKS[0].index("tx = optax.chain")] + BLOCKS[1]
    check = """
again = step(*pickle.loads(pathlib.Path("state.pickle").read_bytes()), batches[0])
for a, b in zip(jax.tree.leaves(again), jax.tree.leaves((params, opt_state, loss)), strict=True):
    np.testing.assert_array_equal(a, b)
np.savez("leaves.npz", *jax.tree.leaves((params, opt_state, loss)))
"""
    code = definitions + BLOCKS[restore] + check
    subprocess.run([sys.executable, "-c", code], cwd=folder, env=os.environ, check=True, timeout=600)
    with np.load(folder / "leaves.npz") as found:
        expected = jax.tree.leaves((names["params"], names["opt_state"], names["loss"]))
        for a, b in zip(found.values(), expected, strict=True):
            np.testing.assert_array_equal(a, b)


def test_orbax_without_a_target_returns_dictionaries(page):
    names, _, folder = page
    with names["ocp"].StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore((folder / "checkpoint").absolute())
    with pytest.raises(ValueError, match=r"opt_state holds no state of kfac\.kfac") as caught:
        kfac.observe(restored["opt_state"])
    assert (
        "opt_state holds no state of kfac.kfac" in str(caught.value) and "opt_state holds no state of kfac.kfac" in PAGE
    )


def test_a_loss_that_closes_over_random_numbers_is_refused_by_flax(page):
    names, _, _ = page
    fresh = names["Reader"](nnx.Rngs(0))
    graph, params, rest = nnx.split(fresh, nnx.Param, ...)

    def closed(params, batch):
        return nnx.merge(graph, params, rest)(batch[0]).mean()

    message = "Cannot mutate RngCount from a different trace level"
    assert message in PAGE
    with pytest.raises(TraceContextError, match=message):
        kfac.find_layers(closed, params, names["batches"][0])


def test_the_optimizer_of_nnx_learns_with_dropout_and_a_recurrent_layer(page):
    names, _, _ = page
    scalars = kfac.diagnostics(nnx.as_pure(names["optimizer"].opt_state))
    assert scalars["condition"] > 1 and scalars["skipped_steps"] == 0
    assert names["nnx_layers"].num_examples == 256
    assert float(names["nnx_last"]) < 1.5  # guessing gives log 10
    # Statistics do not draw the model's random numbers.
    assert int(names["reader"].dropout.rngs.count[...]) == len(names["batches"])
