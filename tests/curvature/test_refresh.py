"""Test `kfac.observe` without factors, a separate call that refreshes the inverses.

One test uses an internal of `_curvature.refresh`: the portions of a stack.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

import kfac
from kfac._curvature import refresh as refresh_module
from kfac.types import Kronecker
from problem import (
    ages_of,
    assert_close,
    field_of,
    initial,
    layers,
    measured,
    observing,
    plain_kfac,
    state_of,
)

STEPS, WITH_STATISTICS, WITH_REFRESH = 6, (0, 1, 3, 4), (0, 2, 4)
CHOLESKY, AT_ONCE = kfac.Cholesky(), kfac.Distribution()


def optimizer(inside, preconditioner, distribution):
    """Return an optimizer that refreshes within `observe` at even steps, or never by itself."""
    every = dict(inverse_update_period=2, interval_warmup_steps=0) if inside else dict(inverse_update_period=math.inf)
    return plain_kfac(0.1, layers(), damping=0.3, preconditioner=preconditioner, distribution=distribution, **every)


def trained(inside, preconditioner, distribution, mesh):
    """Return parameters and state after a few steps, under `shard_map` if there is a mesh."""
    tx = optimizer(inside, preconditioner, distribution)
    init, update, refresh, observe = tx.init, tx.update, kfac.observe, kfac.observe
    if mesh is not None:
        same, own = PartitionSpec(), kfac.state.state_specs(tx, initial(), "devices")
        refresh = jax.shard_map(kfac.observe, mesh=mesh, in_specs=(own,), out_specs=own)
        observe = jax.shard_map(kfac.observe, mesh=mesh, in_specs=(own, same), out_specs=own)
        init = jax.shard_map(init, mesh=mesh, in_specs=same, out_specs=own)
        update = jax.shard_map(update, mesh=mesh, in_specs=(same, own, same), out_specs=(same, own))
    refresh, observe, update = (jax.jit(f) for f in (refresh, observe, update))
    params, state = initial(), jax.jit(init)(initial())
    for t in range(STEPS):
        grads, factors = measured(t)
        if t in WITH_STATISTICS:
            state = observe(state, factors)
        if t in WITH_REFRESH and (not inside or t not in WITH_STATISTICS):
            state = refresh(state)
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def check(preconditioner=CHOLESKY, distribution=AT_ONCE, mesh=None):
    """Compare refreshes within `observe` with refreshes in separate calls.

    Step 2 has no statistics, so both optimizers refresh in a separate call there.
    """
    params, state = trained(True, preconditioner, distribution, mesh)
    expected = jax.jit(kfac.state.gather_state)(state) if mesh is not None or distribution.axis else state
    found_params, state = trained(False, preconditioner, distribution, mesh)
    found = jax.jit(kfac.state.gather_state)(state) if mesh is not None or distribution.axis else state
    assert_close(found_params, params)
    for field in ("factors", "weight", "preconditioner", "condition"):
        assert_close(field_of(found, field), field_of(expected, field))
    assert_close(ages_of(found), ages_of(expected))
    assert_close(state_of(found).metrics, state_of(expected).metrics)
    assert state_of(found).metrics.condition > 1 and state_of(found).metrics.inverse_age == 1


@pytest.mark.slow
@pytest.mark.parametrize("preconditioner", [kfac.Cholesky(), kfac.Eigh()], ids=["cholesky", "eigh"])
def test_a_refresh_apart_is_that_of_observe(preconditioner):
    check(preconditioner)


@pytest.mark.slow
@pytest.mark.parametrize("given", [None, kfac.Distribution("devices")])
def test_on_several_devices(given):
    mesh = Mesh(np.array(jax.devices()[:2]), ("devices",), axis_types=(AxisType.Auto,))
    check(distribution=given, mesh=mesh)


@pytest.mark.slow
def test_under_jit_with_a_mesh():
    mesh = Mesh(np.array(jax.devices()[:2]), ("devices",), axis_types=(AxisType.Auto,))
    check(distribution=kfac.Distribution(mesh=mesh))


def test_a_step_waits_for_nothing():
    """Check that a step contains no loop. `observe` contains a loop only if it refreshes at an interval."""

    def primitives(fn, *args):
        return {eqn.primitive.name for eqn in jax.make_jaxpr(fn)(*args).jaxpr.eqns}

    grads, factors = measured(0)
    for inside in (False, True):
        tx = optimizer(inside, kfac.Cholesky(), None)
        state = tx.init(initial())
        assert not primitives(tx.update, grads, state, initial()) & {"while", "scan"}
        found = primitives(lambda state: kfac.observe(state, factors), state)
        assert found & {"while", "scan"} == ({"while"} if inside else set())


def test_until_the_first_refresh_gradients_pass_through():
    tx = kfac.scale_by_kfac(layers(), inverse_update_period=math.inf)
    grads, factors = measured(0)
    updates, state = jax.jit(observing(tx))(grads, jax.jit(tx.init)(initial()), factors=factors)
    assert_close(updates, grads)
    refreshed = state_of(jax.jit(kfac.observe)(state))
    assert refreshed.blocks["unitwise_4x2"].condition[0] > 0
    assert state_of(state).refreshed == -1 and refreshed.refreshed == 1


@pytest.mark.slow
def test_blocks_alone_that_are_no_products_keep_what_their_damping_is_relative_to():
    params = {"scale": jnp.array([1.0, 2.0, 0.5])}

    def loss_fn(p, x):
        return jnp.mean(jnp.sum(jnp.sin(x * p["scale"]), -1))

    x = jnp.linspace(-1, 2, 15).reshape(5, 3)
    found = kfac.find_layers(loss_fn, params, x)
    _, grads, factors = jax.jit(kfac.value_and_grad(loss_fn, found))(params, x)
    # Momentum would still contain the first gradient, which is not preconditioned. An adaptive rate would grow in the
    # second step of `apart`.
    options = {"momentum": 0.0, "adaptive_layer_rates": False}
    inside, apart = (kfac.kfac(0.1, found, inverse_update_period=every, **options) for every in (1, math.inf))
    expected, _ = inside.update(grads, kfac.observe(inside.init(params), factors), params)
    _, state = apart.update(grads, kfac.observe(apart.init(params), factors), params)
    again, _ = apart.update(grads, kfac.observe(state), params)
    assert_close(again, expected)
    assert again["scale"].shape == (3,)


@pytest.mark.parametrize("injected", [False, True])
def test_interval_warmup_steps_sets_when_statistics_are_due_with_an_infinite_inverse_update_period(injected):
    make = optax.inject_hyperparams(kfac.scale_by_kfac) if injected else kfac.scale_by_kfac
    tx = make(layers(), inverse_update_period=math.inf, statistics_period=8, interval_warmup_steps=2)
    grads, factors = measured(0)
    state, advance, due = jax.jit(tx.init)(initial()), jax.jit(observing(tx)), []
    for _ in range(17):
        due.append(bool(kfac.statistics_due(state)))
        _, state = advance(grads, state, factors=factors)
    assert [t for t, is_due in enumerate(due) if is_due] == [0, 1, 2, 4, 8, 16]
    assert state_of(state).refreshed == -1


def test_what_is_refused():
    with pytest.raises(ValueError, match=r"opt_state holds no state of kfac\.kfac, but is of type dict"):
        kfac.observe({"w": np.zeros(3)})
    init = kfac.scale_by_kfac(layers()).init
    many = jax.eval_shape(lambda params: kfac.state.scatter_state(init(params), 2), initial())
    with pytest.raises(ValueError, match=r"is one for 2 device\(s\), but this runs on 1.* with the same distribution="):
        kfac.observe(many)


@pytest.mark.parametrize(("blocks", "most"), [(12, 11), (7, 3), (4, 4), (5, 1)])
def test_portions_are_equal(monkeypatch, blocks, most):
    """Check that there are no more portions than needed, and that the last is nearly as long as the others.

    The difference is smaller than the number of portions.
    """
    seen = []

    def looked(fn, width, *arguments):
        seen.append(width)
        return fn(width, *arguments)

    monkeypatch.setattr(refresh_module, "TOGETHER", most * 2 * 9)
    monkeypatch.setattr(refresh_module, "in_portions", looked)
    factors = Kronecker(*(jnp.broadcast_to(jnp.eye(3), (blocks, 3, 3)) * k for k in (2.0, 3.0)))
    preconditioner = kfac.Cholesky()
    new = refresh_module.refresh(
        preconditioner, preconditioner.init(factors), factors, jnp.ones(blocks, bool), jnp.array(0.25)
    )
    (width,) = seen
    assert width <= most and -(-blocks // width) == -(-blocks // most)
    assert width * -(-blocks // width) - blocks < -(-blocks // width)
    assert new.valid.all()
    np.testing.assert_allclose(
        np.asarray(new.preconditioner.A), np.asarray(new.preconditioner.A)[:1].repeat(blocks, 0), rtol=1e-6
    )


@pytest.mark.slow
@pytest.mark.parametrize("refused", [9, 10, 12])
def test_a_loop_that_counts_by_itself_goes_on_refreshing_after_a_step_that_is_refused(refused):
    """Check a loop whose own step count runs ahead of the state's count after a rejected step.

    By the state's count, statistics then never arrive at a multiple of the interval again.
    """
    tx = kfac.scale_by_kfac(layers(), statistics_period=4, inverse_update_period=4, interval_warmup_steps=0)
    (grads, factors), state = measured(0), tx.init(initial())
    update = jax.jit(observing(tx))
    for k in range(24):
        given = jax.tree.map(lambda x: x * jnp.nan, grads) if k == refused else grads
        _, state = update(given, state, initial(), factors=factors if k % 4 == 0 else None)
    found = kfac.diagnostics(state)
    assert found["skipped_steps"] == 1 and found["inverse_age"] < 4 and found["statistics_age"] < 4


def test_no_array_of_a_state_is_another():
    """Check that no two arrays share a buffer, so that a step can donate the whole state."""
    for tx in (kfac.kfac(0.1, layers()), kfac.kfac(0.1, layers(), preconditioner=kfac.EKFAC())):
        arrays = [x for x in jax.tree.leaves(tx.init(initial())) if x.size]
        assert len({x.unsafe_buffer_pointer() for x in arrays}) == len(arrays)
