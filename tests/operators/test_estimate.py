"""Test that `kfac.curvature.estimate_factors` treats batches of several sizes as a single batch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from test_operator import layers, loss_fn, parameters

import kfac
from checking import normal

pytestmark = pytest.mark.usefixtures("x64")


def parts(sizes):
    n, ends = sum(sizes), np.cumsum(sizes)[:-1]
    whole = normal(1, n, 4), np.random.default_rng(0).integers(0, 5, n), normal(2, n, 2)
    return list(zip(*(np.split(x, ends) for x in whole), strict=True)), whole


def assert_same(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), found, expected)


@pytest.mark.slow
def test_batches_together_are_one():
    several, one = parts([8, 8, 5, 3])
    params, measure = parameters(), jax.jit(kfac.value_and_grad(loss_fn, layers()))
    expected = measure(params, one)[2]
    assert_same(kfac.curvature.estimate_factors(loss_fn, layers(), params, iter(several)), expected)
    # A second pass takes the moments in the first pass's eigenvectors.
    basis = jax.jit(lambda factors: kfac.curvature.eigenbasis(factors, layers()))(expected)
    moments = measure(params, one, basis=basis)[2]
    found = kfac.curvature.estimate_factors(loss_fn, layers(), params, several, basis=basis)
    assert_same(found, moments)
    kfac.curvature.block_operator(layers(), found, basis=basis)


def test_each_batch_draws_for_itself():
    def marked(params, batch):
        return 0.5 * jnp.sum(kfac.mark_output(batch[0] @ params["first"], "gaussian") ** 2, -1).mean()

    params, (several, one) = {"first": normal(5, 4, 4)}, parts([8, 8])
    own = kfac.find_layers(marked, params, one)
    found = kfac.curvature.estimate_factors(marked, own, params, 50 * several, fisher="sampled", key=jax.random.key(0))[
        "first"
    ]
    expected = kfac.curvature.estimate_factors(marked, own, params, several, fisher="expected", key=jax.random.key(0))[
        "first"
    ]
    np.testing.assert_allclose(expected.G, np.eye(4), atol=1e-12)
    assert 1e-3 < np.abs(found.G - np.eye(4)).max() < 5 * np.sqrt(2 / 800)
    with pytest.raises(ValueError, match="pass a PRNG key"):
        kfac.curvature.estimate_factors(marked, own, params, several, fisher="sampled")


def test_what_has_the_gradients_own_factors_is_left_to_the_optimizer():
    def loss(params, batch):
        return jnp.square(batch[0] @ params["w"] * jnp.linalg.norm(params["scale"])).mean()

    params, (several, one) = {"scale": normal(7, 3), "w": normal(6, 4, 1)}, parts([8, 8])
    found = kfac.find_layers(loss, params, one)
    assert found["scale"].kind == "gradient-factors"
    estimate = kfac.curvature.estimate_factors(loss, found, params, several)
    assert list(estimate) == ["w"]
    assert_same(estimate, jax.jit(kfac.value_and_grad(loss, found))(params, one)[2])


@pytest.mark.slow
def test_several_devices_and_nothing_at_all():
    mesh = Mesh(np.asarray(jax.devices()[:4]), ("data",))
    several, one = parts([8, 16])
    split = [jax.device_put(part, NamedSharding(mesh, PartitionSpec("data"))) for part in several]
    params = jax.device_put(parameters(), NamedSharding(mesh, PartitionSpec()))
    expected = jax.jit(kfac.value_and_grad(loss_fn, layers()))(parameters(), one)[2]
    assert_same(kfac.curvature.estimate_factors(loss_fn, layers(), params, split), expected)
    with pytest.raises(ValueError, match="batches is empty"):
        kfac.curvature.estimate_factors(loss_fn, layers(), params, [])
