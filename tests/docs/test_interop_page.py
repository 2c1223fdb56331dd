"""Test docs/interop.md: every loop on it trains, and its statistics arrive at the optimizer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_docs import _run

import kfac


@pytest.fixture(scope="module")
def names():
    return _run("interop.md", 7)


def plain(loss_fn, layers, params, batch, tx=None, steps=15):
    """Run the README's loop, and return parameters, state and the last loss."""
    tx = tx or kfac.kfac(0.1, layers)

    @jax.jit
    def observe(state, params):
        return kfac.observe(state, kfac.statistics(loss_fn, layers)(params, batch))

    @jax.jit
    def step(params, state):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    state = tx.init(params)
    for _ in range(steps):
        if kfac.statistics_due(state):
            state = observe(state, params)
        params, state, loss = step(params, state)
    return params, state, loss


def assert_same(found, expected):
    found, expected = jax.tree.leaves(found), jax.tree.leaves(expected)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def centred(params):
    """Subtract the mean of the three logits, which a softmax ignores, so only rounding changes it."""
    return jax.tree.map(lambda x: x - x.mean(-1, keepdims=True) if x.shape[-1] == 3 else x, params)


@pytest.mark.slow
def test_a_train_state_of_flax_does_what_the_plain_loop_does(names):
    expected = plain(names["linen_loss"], names["layers"], names["params"], names["batch"])
    assert_same(*map(centred, (names["state"].params, expected[0])))
    assert names["state"].step == 15 and float(names["linen_last"]) == pytest.approx(float(expected[2]), rel=1e-4)
    assert kfac.diagnostics(names["state"].opt_state)["condition"] > 1


def test_the_optimizer_of_nnx_does_what_the_plain_loop_does(names):
    from flax import nnx

    initial = nnx.state(names["Network"](nnx.Rngs(0)), nnx.Param)  # the page has trained its own parameters since
    expected = plain(names["nnx_loss"], names["nnx_layers"], initial, names["batch"])
    assert_same(*map(centred, (nnx.state(names["nnx_model"], nnx.Param), expected[0])))
    assert names["scalars"]["condition"] == pytest.approx(float(kfac.diagnostics(expected[1])["condition"]), rel=1e-3)


@pytest.mark.slow
def test_a_partition_gives_each_its_own(names):
    """Check that biases of AdamW must be skipped, because they are part of their kernels' blocks."""
    loss_fn, batch, params = names["word_loss"], names["word_batch"], names["word_params"]
    whole = kfac.find_layers(loss_fn, params, batch)
    tx = optax.partition({"kfac": kfac.kfac(0.1, whole), "adamw": optax.adamw(3e-2)}, names["labels"])
    with pytest.raises(ValueError, match=r"rules=\{'\^hidden/bias\$': 'skip'\}"):
        tx.init(params)
    layers, partitioned = names["word_layers"], names["partitioned"]
    assert_same(names["partitioned_params"], plain(loss_fn, layers, params, batch, partitioned)[0])
    # AdamW's first step is as long as its learning rate.
    first = plain(loss_fn, layers, params, batch, partitioned, steps=1)[0]
    moved = jnp.abs(first["embedding"]["embedding"] - params["embedding"]["embedding"])
    read = np.unique(batch[0])
    np.testing.assert_allclose(moved[read], 3e-2, rtol=0.02)
    alone = plain(loss_fn, layers, params, batch, steps=1)[0]
    assert_same([first[k]["kernel"] for k in ("hidden", "output")], [alone[k]["kernel"] for k in ("hidden", "output")])
    for name in ("hidden", "output"):
        np.testing.assert_allclose(jnp.abs(first[name]["bias"] - params[name]["bias"]), 3e-2, rtol=0.02)
    assert float(names["word_last"]) < float(loss_fn(params, batch))


def test_haiku_learns(names):
    assert kfac.diagnostics(names["hk_state"])["condition"] > 1
    assert 0 < float(names["hk_last"]) < 0.8  # guessing gives log 3


@pytest.mark.slow
def test_lookahead_goes_half_of_the_way_of_the_plain_loop(names):
    initial = names["params"]
    plain_params = plain(names["linen_loss"], names["layers"], initial, names["batch"], steps=5)[0]
    half = jax.tree.map(lambda a, b: (a + b) / 2, initial, plain_params)
    assert_same(names["lookahead_params"], optax.LookaheadParams.init_synced(half))


def test_frozen_parameters_do_not_move(names):
    tx, params, batch = names["with_frozen"], names["word_params"], names["word_batch"]
    updates, _ = tx.update(jax.grad(names["word_loss"])(params, batch), tx.init(params), params)
    assert all(np.all(leaf == 0) for leaf in jax.tree.leaves(updates["embedding"]))
    assert all(np.any(leaf != 0) for leaf in jax.tree.leaves(updates["hidden"]))
