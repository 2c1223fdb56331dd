"""Test `kfac.gauss_newton` against conjugate gradients with dense matrices, in float64."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, PartitionSpec

import kfac
from checking import FAST, normal
from problem import state_of

pytestmark = pytest.mark.usefixtures("x64")
N, SCALE = 12, 8  # number of examples, and the index of the scale among all parameters


def loss_fn(params, batch):
    """Compute a residual for each example. No layer contains the scale, so its diagonal comes from gradients."""
    x, y = batch
    z = params["scale"] * (jnp.tanh(x @ params["w"] + params["b"]) @ params["out"])
    return 0.5 * jnp.sum(kfac.mark_output(z - y, "residual") ** 2) / N


def problem():
    params = {"w": normal(0, 3, 4), "b": normal(1, 4), "out": normal(2, 4, 1), "scale": jnp.asarray(0.5)}
    batch = normal(3, N, 3), normal(4, N, 1)
    layers = kfac.find_layers(loss_fn, params, batch)
    measure = kfac.value_and_grad(loss_fn, layers, fisher="expected")
    tx = kfac.gauss_newton(layers)

    @functools.partial(jax.jit, compiler_options=FAST)
    def step(params, state, key):
        loss, grads, factors = measure(params, batch, fisher_key=key)
        state = kfac.observe(state, factors)
        updates, state = tx.update(grads, state, params, value_fn=lambda p: loss_fn(p, batch))
        return loss, grads, factors, updates, state

    return params, batch, layers, tx, step


def dense_step(matrix, near, gradient, last):
    """Minimise in the span of the direction and the last step, and take six preconditioned steps from there."""
    span = np.stack([near @ gradient, *([last] if last.any() else [])], axis=1)
    x = -span @ np.linalg.solve(span.T @ matrix @ span, span.T @ gradient)
    along, size = 0 * x, np.inf
    for _ in range(6):
        rest = -(gradient + matrix @ x)
        new = rest @ near @ rest
        along, size = near @ rest + new / size * along, new
        x = x + new / (along @ matrix @ along) * along
    return x


def test_two_steps_are_those_of_dense_matrices():
    params, batch, layers, tx, step = problem()
    state, last = jax.jit(tx.init, compiler_options=FAST)(params), np.zeros(21)
    unravel = ravel_pytree(params)[1]
    jacobian = jax.jit(jax.jacobian(lambda w: residual(unravel(w), batch)), compiler_options=FAST)
    inverted = jax.jit(lambda f, damping: kfac.curvature.block_operator(layers, f, damping=damping).inv().to_dense())
    for k in range(2):
        damping, observed = float(state.next_damping), float(state_of(state).observe_damping)
        loss, grads, factors, updates, state = step(params, state, jax.random.key(k))
        damping *= float(loss)
        j = np.asarray(jacobian(ravel_pytree(params)[0]))
        matrix = j.T @ j / N + damping * np.eye(j.shape[1])
        near = np.array(inverted(factors, damping))
        near[SCALE] = inverted(factors, observed)[SCALE]  # `observe` inverts small blocks, before the step
        last = dense_step(matrix, near, np.asarray(ravel_pytree(grads)[0]), last)
        np.testing.assert_allclose(ravel_pytree(updates)[0], last, rtol=1e-6, atol=1e-9)
        assert float(updates["scale"]) != 0
        params = optax.apply_updates(params, updates)


def residual(params, batch):
    x, y = batch
    return (params["scale"] * (jnp.tanh(x @ params["w"] + params["b"]) @ params["out"]) - y)[:, 0]


@pytest.mark.slow
def test_it_finds_the_minimum_and_is_never_worse():
    params, _batch, _, tx, step = problem()
    state, losses = jax.jit(tx.init, compiler_options=FAST)(params), []
    for k in range(60):
        loss, *_, updates, state = step(params, state, jax.random.key(k))
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    assert all(after <= before for before, after in itertools.pairwise(losses))
    assert losses[-1] < 0.03 * losses[0]
    found = kfac.diagnostics(state)
    assert 0.1 * losses[-1] <= found["damping"] and np.isfinite(found["reduction_ratio"])


@pytest.mark.slow
def test_there_is_no_step_from_a_gradient_that_is_not_finite():
    params, batch, layers, tx, _ = problem()
    measure = jax.jit(kfac.value_and_grad(loss_fn, layers, fisher="expected"), compiler_options=FAST)
    _, grads, factors = measure(params, batch, fisher_key=jax.random.key(0))
    nans, state = jax.tree.map(lambda g: g * jnp.nan, grads), jax.jit(tx.init, compiler_options=FAST)(params)
    arguments = {"value_fn": lambda p: loss_fn(p, batch)}
    changes, state = tx.update(nans, kfac.observe(state, factors), params, **arguments)
    assert not any(map(np.any, jax.tree.leaves(changes)))
    changes, _ = tx.update(grads, state, params, **arguments)
    assert all(map(np.any, jax.tree.leaves(changes)))


@pytest.mark.slow
def test_inside_of_shard_map_it_is_refused():
    params, batch, _, tx, _ = problem()
    mesh = Mesh(jax.devices()[:2], ("d",))

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(PartitionSpec(), PartitionSpec("d")), out_specs=PartitionSpec()
    )
    def step(params, batch):
        value_fn = lambda p: loss_fn(p, batch)  # noqa: E731
        return tx.update(params, tx.init(params), params, value_fn=value_fn)[0]

    with pytest.raises(ValueError, match=r"use jax\.jit on a mesh, not shard_map"):
        jax.eval_shape(step, params, batch)
    with pytest.raises(ValueError, match=r"^a damping that follows .*value_fn=lambda params: loss_fn"):
        tx.update(params, tx.init(params), params)
