"""Coarse diagonal blocks: `n` times the squared mean gradient of the whole batch, however it is spread."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import kfac
from checking import normal
from problem import plain_kfac

N, D, H = 12, 5, 4
DEVICES = 3


def loss_fn(p, x):
    # A temperature that is computed before it meets data has no per-example gradients of its own.
    return jnp.mean(jnp.sum(jnp.tanh(x @ p["w"]) ** 2 * jax.nn.softplus(p["temperature"]), -1))


def parameters():
    return {"w": normal(0, D, H, dtype=np.float32), "temperature": normal(1, H, dtype=np.float32)}


def batches():
    return [normal(k, N, D, dtype=np.float32) for k in range(2, 6)]


def optimizer(layers, distribution=None):
    return plain_kfac(0.1, layers, damping=1e-2, distribution=distribution)


def trained(step, init):
    params = parameters()
    state = init(params)
    for x in batches():
        params, state = step(params, state, x)
    return params


@pytest.fixture(scope="module")
def alone():
    layers = kfac.find_layers(loss_fn, parameters(), batches()[0])
    assert layers["temperature"].coarse
    tx = optimizer(layers)

    @jax.jit
    def step(params, state, x):
        _, grads, factors = kfac.value_and_grad(loss_fn, layers)(params, x)
        updates, state = tx.update(grads, state, params, factors=factors)
        return optax.apply_updates(params, updates), state

    return layers, trained(step, tx.init)


def assert_same(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), found, expected)


def local_step(tx, layers, params, state, x):
    _, grads, factors = kfac.value_and_grad(loss_fn, layers)(params, x)
    updates, state = tx.update(lax.pmean(grads, "data"), state, params, factors=factors)
    return optax.apply_updates(params, updates), state


def test_under_shard_map(alone):
    layers, expected = alone
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:DEVICES])
    tx = optimizer(layers, kfac.Distribution("data"))
    specs, same = kfac.state_specs(tx, parameters(), "data"), PartitionSpec()
    step = jax.shard_map(
        functools.partial(local_step, tx, layers),
        mesh=mesh,
        in_specs=(same, specs, PartitionSpec("data")),
        out_specs=(same, specs),
    )
    init = jax.shard_map(tx.init, mesh=mesh, in_specs=same, out_specs=specs)
    assert_same(trained(jax.jit(step), jax.jit(init)), expected)


def test_under_pmap(alone):
    layers, expected = alone
    devices = jax.devices()[:DEVICES]
    tx = optimizer(layers, kfac.Distribution("data"))
    init = jax.pmap(lambda params, _: tx.init(params), axis_name="data", in_axes=(None, 0), devices=devices)
    step = jax.pmap(functools.partial(local_step, tx, layers), axis_name="data", in_axes=(None, 0, 0), devices=devices)

    def whole(params, state, x):
        params, state = step(params, state, x.reshape(DEVICES, -1, D))
        return jax.tree.map(lambda leaf: leaf[0], params), state

    assert_same(trained(whole, lambda params: init(params, np.arange(DEVICES))), expected)


def test_under_jit_over_a_mesh(alone):
    layers, expected = alone
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:DEVICES])
    tx = optimizer(layers, kfac.Distribution(mesh=mesh))

    @jax.jit
    def step(params, state, x):
        x = lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec("data")))
        _, grads, factors = kfac.value_and_grad(loss_fn, layers)(params, x)
        updates, state = tx.update(grads, state, params, factors=factors)
        return optax.apply_updates(params, updates), state

    assert_same(trained(step, tx.init), expected)


def test_over_micro_batches(alone):
    layers, expected = alone
    tx = optimizer(layers)

    @jax.jit
    def step(params, state, x):
        _, grads, factors = kfac.microbatch(kfac.value_and_grad(loss_fn, layers), 4)(params, x)
        updates, state = tx.update(grads, state, params, factors=factors)
        return optax.apply_updates(params, updates), state

    assert_same(trained(step, tx.init), expected)
