"""Test programmes B and E of the GPU benchmarks: traced variants against the public interface, and facts of a step."""

import argparse
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kfac

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "benchmarks"))

import gpu_training as training
from gpu_record import Record
from gpu_variants import variant
from transformer import Transformer

pytestmark = pytest.mark.examples

STEPS = 12


@pytest.fixture
def model():
    return Transformer(48, context=8, width=16, layers=2, heads=2, tied=True, dtype="float32")


def batch(number):
    return jnp.asarray(np.random.default_rng(number).integers(0, 48, (4, 9)), jnp.int32)


def trained(runner, params):
    params = jax.tree.map(jnp.copy, params)
    state = runner.init(params, batch(0))
    for number in range(STEPS):
        params, state, _ = runner.step(params, state, batch(number), number)
    return params, state


def test_traced_runners_make_the_steps_of_the_public_interface(model, tmp_path):
    texts = [
        "muon:0.02,adam=0.3",
        "kfac:0.1",
        "kfac:0.05,tables=0.3,kernels=0.5,up=0.5,vectors=2,momentum=0.8,squares=0.9,statistics=0.25",
    ]
    runs = [variant(text) for text in texts]
    options = argparse.Namespace(runs=runs, steps=STEPS, compile_seconds=0.0)
    params = jax.jit(model.init)(jax.random.key(0))
    record = Record(tmp_path, "E", 10.0, None, "")
    runner_of, compiled = training.traced_runners(record, options, model, params, batch(0))
    for chosen in runs:
        traced, state = trained(runner_of(chosen), params)
        public, _ = trained(training.public_runner(chosen, model.loss, STEPS), params)
        leaves = [jax.tree.leaves_with_path(tree) for tree in (traced, public, params)]
        for (path, x), (_, y), (_, start) in zip(*leaves, strict=True):
            name = jax.tree_util.keystr(path)
            if chosen.method == "muon" and "queries" in name and "bias" in name:
                continue  # the loss does not depend on the keys' biases, and Adam enlarges their gradients' rounding
            assert jnp.linalg.norm(x - y) <= 2e-3 * jnp.linalg.norm(y - start), (chosen.text, name)
        if chosen.method == "kfac":
            rates = training.multipliers_of(state)
            assert set(rates) == set(training.KINDS)
            assert all(np.all((1 <= rate) & (rate <= 4)) for rate in rates.values())
    # Settings that the optimizer does not know change the steps.
    more_settings = "", ",factors=0.5", ",split=1", ",orthogonal=1"
    steps = [trained(runner_of(variant(f"kfac:0.1{more}")), params)[0] for more in more_settings]
    for other in steps[1:]:
        assert any(jnp.any(x != y) for x, y in zip(*map(jax.tree.leaves, (steps[0], other)), strict=True))
    facts = jax.device_get(compiled["facts"](params, steps[0]))
    assert facts["up"]["stable rank"].shape == (2,) and facts["tokens"]["rms of step"] > 0


def test_is_due_at_the_steps_of_the_package():
    params = {"kernel": jnp.ones((4, 4))}
    layers = kfac.find_layers(lambda params, x: jnp.mean((x @ params["kernel"]) ** 2), params, jnp.ones((8, 4)))
    state = jax.eval_shape(kfac.kfac(0.1, layers).init, params)
    interval = training.kfac_state(state).settings.interval
    for every in (1, 4, 16):
        expected = [interval._replace(every=every).due_on_host(number) for number in range(200)]
        assert [training.is_due(number, every) for number in range(200)] == expected


def test_spectral_norm_and_facts_of_step(model):
    matrices = np.random.default_rng(0).normal(size=(3, 6, 10)).astype(np.float32)
    expected = np.linalg.norm(matrices, 2, axis=(1, 2))
    np.testing.assert_allclose(training.spectral_norm(jnp.asarray(matrices)), expected, rtol=0.01)
    before = model.init(jax.random.key(0))
    after = jax.tree.map(jnp.copy, before)
    kernel = before["blocks"]["up"]["kernel"]
    rank_one = jnp.ones((16, 1)) * jnp.arange(64.0)
    after["blocks"]["up"]["kernel"] = kernel.at[1].add(rank_one)
    facts = jax.jit(training.facts_of_step)(before, after)
    np.testing.assert_allclose(facts["up"]["stable rank"], [0, 1], atol=1e-3)
    ratio = np.linalg.norm(rank_one) / np.linalg.norm(kernel[1])
    np.testing.assert_allclose(facts["up"]["|step|/|w|"], [0, ratio], rtol=1e-3)


def test_with_own_lengths_gives_each_part_the_length_of_a_square_kernel():
    step = np.random.default_rng(0).normal(size=(2, 8, 24)) * np.repeat([1.0, 3.0, 0.1], 8)
    parts = np.split(np.asarray(training.with_own_lengths(jnp.asarray(step, jnp.float32))), 3, axis=2)
    expected = np.linalg.norm(step, 2, axis=(1, 2)) / 3**0.5
    for part, old in zip(parts, np.split(step, 3, axis=2), strict=True):
        np.testing.assert_allclose(np.linalg.norm(part, 2, axis=(1, 2)), expected, rtol=0.01)
        scale = part[:, :1, :1] / old[:, :1, :1]
        np.testing.assert_allclose(part, scale * old, rtol=1e-4)


def test_orthogonalized_keeps_the_largest_singular_value(model):
    random = np.random.default_rng(0)
    params = model.init(jax.random.key(0))
    steps = jax.tree.map(lambda leaf: jnp.asarray(random.normal(size=leaf.shape), jnp.float32), params)
    after = training.orthogonalized(steps)
    pairs = zip(jax.tree_util.tree_leaves_with_path(steps), jax.tree.leaves(after), strict=True)
    for (path, old), new in pairs:
        if not training.is_stacked_kernel(path, old):
            assert np.array_equal(new, old)
            continue
        before, now = (np.linalg.svd(x, compute_uv=False) for x in (old, new))
        np.testing.assert_allclose(now[:, 0], before[:, 0], rtol=0.02)
        assert np.all(now > 0.5 * now[:, :1]) and not np.all(before > 0.5 * before[:, :1])


def test_losses_by_position_average_to_the_loss(model):
    params = model.init(jax.random.key(0))
    parts = jnp.stack([batch(0), batch(1)])
    losses = training.losses_by_position(model, params, parts)
    assert losses.shape == (8,)
    expected = np.mean([model.loss(params, part) for part in parts])
    np.testing.assert_allclose(losses.mean(), expected, rtol=1e-5)


@pytest.mark.slow
def test_search_and_train_longer_in_small(tmp_path):
    """Rehearse E and B on random tokens, then find all rows there."""
    vocabulary = tmp_path / "vocabulary.npz"
    np.savez(vocabulary, merges=np.array([[97, 98]], np.uint16))
    tokens = np.random.default_rng(0).integers(0, 257, 4000).astype(np.uint16)
    np.savez(training.text_of(tmp_path, vocabulary), train=tokens, held_out=tokens)
    options = argparse.Namespace(
        vocabulary=vocabulary, scratch=tmp_path, output=tmp_path, have=None, rehearse=True, steps=None,
        runs=[variant("muon:0.015"), variant("kfac:0.1,interval=4")], compile_seconds=0.0,
    )  # fmt: skip
    record = Record(tmp_path, "E", 10.0, None, "")
    training.search(record, options)
    assert not record.found["to repeat"] and record.found["unfinished"] == {}
    row = record.row("Training", "kfac:0.1,interval=4")
    assert row["steps"] == 20 and row["failed inversions"] == 0 and len(row["curve"]) == len(row["facts"]) == 10
    assert set(row["facts"][0]["up"]) == {"stable rank", "|step|/|w|", "spectral |step|/|w|", "multiplier"}
    again = Record(tmp_path / "again", "E", 10.0, tmp_path, "")
    training.search(again, options)
    assert again.found["tables"] == record.found["tables"] and "seconds to compile" in again.found["about"]
    options.runs, options.steps = None, 4
    record = Record(tmp_path, "B", 10.0, None, "")
    training.train_longer(record, options)
    assert {text.split(":")[0] for text in record.found["tables"]["Training"]} == {"muon", "kfac"}
