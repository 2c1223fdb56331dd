"""Test random networks and schedules: properties that other tests check in single cases hold in all cases.

The slow variants draw many more cases, and different cases in each run.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec

import kfac
from checking import check_all, check_moments
from networks import Conv, Dense, Loop, Network, networks
from oracle import truth
from problem import assert_equal, observing, plain_kfac, state_of

# Compilation has no deadline, and the first example takes longer than the others.
USUAL = dict(deadline=None, suppress_health_check=list(HealthCheck))


def few(count):
    return settings(max_examples=count, derandomize=True, database=None, **USUAL)


def many(count):
    return settings(max_examples=count, database=None, **USUAL)


# -- factors -----------------------------------------------------------------------------------------------------------


def check_factors(network, examples=4):
    with jax.enable_x64(True):
        params, batch = network.parameters(np.float64), network.batch(0, examples, np.float64)
        expected = truth(network.reference, params, batch, interacting=network.interacting)
        check_all(network.loss, params, batch, expected, vectors=expected.vectors)


def lengths(network):
    """Return the lengths of a network's axes, without the examples: positions, channels, and layers of a loop."""
    shapes = jax.tree.map(jnp.shape, network.parameters(np.float32))
    of_leaves = jax.tree.leaves(shapes)
    of_loops = [length for layer in network.layers for length in getattr(layer, "lengths", ())]
    return sorted({*network.shape, *of_leaves, *of_loops} - {1})


@few(4)
@given(networks())
def test_factors_equal_brute_force(network):
    check_factors(network)


@pytest.mark.slow
@few(4)
@given(networks(depth=2), st.data())
def test_factors_equal_brute_force_with_as_many_examples_as_some_axis_is_long(network, drawn):
    check_factors(network, drawn.draw(st.sampled_from(lengths(network))))


@pytest.mark.slow
@many(25)
@given(networks())
def test_factors_equal_brute_force_with_as_many_examples_as_each_axis_in_turn(network):
    for length in lengths(network):
        check_factors(network, length)


@pytest.mark.slow
@many(150)
@given(networks(depth=5))
def test_factors_of_many_networks_equal_brute_force(network):
    check_factors(network)


# -- moments of EKFAC --------------------------------------------------------------------------------------------------


def check_network_moments(network):
    with jax.enable_x64(True):
        check_moments(network.loss, network.parameters(np.float64), network.batch(0, 4, np.float64))


@pytest.mark.slow
@few(4)
@given(networks(interacting=False))
def test_moments_equal_brute_force(network):
    check_network_moments(network)


@pytest.mark.slow
@many(100)
@given(networks(depth=4, interacting=False))
def test_moments_of_many_networks_equal_brute_force(network):
    check_network_moments(network)


# A few draws may miss this combination: a convolution, stacked layers in a scan under remat, and a dense layer.
VARIED = Network(
    (4, 4, 2),
    (Conv((3, 3), (1, 1), "SAME", (1, 1), 1, 3, True), Loop((2,), True, False, True), Dense(4, True)),
    ((), (), ()),
    False,
)

# -- schedules ---------------------------------------------------------------------------------------------------------

OPTIONS = st.fixed_dictionaries(
    {
        "damping": st.sampled_from([1e-2, 1.0]),
        "factor_ema_decay": st.sampled_from([0.0, 0.5, 0.95]),
        "inverse_update_period": st.integers(1, 4),
        "interval_warmup_steps": st.integers(0, 3),
        "distribution": st.sampled_from([None, kfac.Distribution()]),
        "preconditioner": st.sampled_from(["float32", "bfloat16"]).map(kfac.Cholesky),
        "momentum": st.sampled_from([None, 0.9]),
        "kl_clip": st.sampled_from([None, 1e-2]),
    }
)
SCHEDULES = st.lists(st.booleans(), min_size=3, max_size=8)


def check_schedule(network, options, schedule, compute):
    """Take steps with statistics where `schedule` is true."""
    params = network.parameters(np.float32)
    loss = functools.partial(network.loss, compute=jnp.dtype(compute))
    layers = kfac.find_layers(loss, params, *network.batch(0, 4, np.float32))
    tx = plain_kfac(0.01, layers, **options)
    state = jax.jit(tx.init)(params)
    like = jax.tree.map(lambda x: (x.shape, x.dtype), (params, state))

    @jax.jit
    def full(params, state, batch):
        _, grads, factors = kfac.value_and_grad(loss, layers)(params, *batch)
        state = kfac.observe(state, factors)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    @jax.jit
    def cheap(params, state, batch):
        updates, state = tx.update(jax.grad(loss)(params, *batch), state, params)
        return optax.apply_updates(params, updates), state

    for k, statistics in enumerate(schedule):
        before = state
        params, state = (full if statistics else cheap)(params, state, network.batch(10 * k, 4, np.float32))
        assert jax.tree.map(lambda x: (x.shape, x.dtype), (params, state)) == like
        assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves((params, state)))
        assert state_of(state).count == k + 1
        known = any(schedule[: k + 1])
        for name, block in state_of(state).blocks.items():
            assert np.all((np.asarray(block.weight) > 0) == known), name
            if not statistics:
                assert_equal(block.factors, state_of(before).blocks[name].factors)
            for inverse in jax.tree.leaves(block.preconditioner):
                inverse = np.asarray(inverse, np.float64)
                np.testing.assert_array_equal(inverse, inverse.swapaxes(-1, -2), name)
                if options["preconditioner"].precision == "float32":
                    assert np.all(np.linalg.eigvalsh(inverse) > 0), name
    counts = kfac.diagnostics(state)
    assert [counts[name] for name in ("skipped_steps", "skipped_statistics", "failed_inversions")] == [0, 0, 0]
    # No function was compiled again.
    assert full._cache_size() == any(schedule) and cheap._cache_size() == (not all(schedule))


@pytest.mark.slow
@few(2)
@example(
    VARIED,
    {"inverse_update_period": 2, "interval_warmup_steps": 1, "preconditioner": kfac.Cholesky()},
    [True, False, True],
    "float32",
)
@given(networks(depth=2), OPTIONS, SCHEDULES, st.sampled_from(["float32", "bfloat16"]))
def test_states_keep_their_form_and_inverses_stay_definite(network, options, schedule, compute):
    check_schedule(network, options, schedule, compute)


@pytest.mark.slow
@many(60)
@given(networks(depth=4), OPTIONS, SCHEDULES, st.sampled_from(["float32", "bfloat16"]))
def test_states_of_many_networks_keep_their_form(network, options, schedule, compute):
    check_schedule(network, options, schedule, compute)


# -- devices -----------------------------------------------------------------------------------------------------------

COMMUNICATION = st.fixed_dictionaries(
    {
        "inverse_update_period": st.integers(1, 3),
        "interval_warmup_steps": st.integers(0, 2),
    }
)


def check_devices(network, options, schedule, count):
    """Compare parameters after each step with a single device on the whole batch, for examples that do not interact."""
    with jax.enable_x64(True):
        start = network.parameters(np.float64)
        layers = kfac.find_layers(network.loss, start, *network.batch(0, 2, np.float64))
        mesh = Mesh(np.array(jax.devices()[:count]), ("devices",), axis_types=(AxisType.Auto,))
        same, split = PartitionSpec(), PartitionSpec("devices")
        one = all_of_them = plain_kfac(0.01, layers, damping=0.1, **options)
        specs = kfac.state.state_specs(all_of_them, start, "devices")

        def step(tx, average, statistics, params, state, batch):
            _, grads, factors = kfac.value_and_grad(network.loss, layers)(params, *batch)
            updates, state = observing(tx)(average(grads), state, params, factors=factors if statistics else None)
            return optax.apply_updates(params, updates), state

        def mapped(statistics):
            local = functools.partial(step, all_of_them, lambda tree: lax.pmean(tree, "devices"), statistics)
            return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(same, specs, split), out_specs=(same, specs)))

        alone = {flag: jax.jit(functools.partial(step, one, lambda tree: tree, flag)) for flag in set(schedule)}
        together = {flag: mapped(flag) for flag in set(schedule)}
        init = jax.jit(jax.shard_map(all_of_them.init, mesh=mesh, in_specs=same, out_specs=specs))
        first, second = (start, jax.jit(one.init)(start)), (start, init(start))
        for k, flag in enumerate(schedule):
            batch = network.batch(10 * k, 2 * count, np.float64)
            first = alone[flag](*first, batch)
            second = jax.block_until_ready(together[flag](*second, batch))
            for a, b in zip(jax.tree.leaves(second[0]), jax.tree.leaves(first[0]), strict=True):
                np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())


@pytest.mark.slow
@settings(phases=[Phase.explicit], **USUAL)
@example(
    VARIED,
    {"inverse_update_period": 2, "interval_warmup_steps": 1},
    [True, False, True],
    4,
)
@given(networks(depth=2, interacting=False), COMMUNICATION, st.just([True, False, True]), st.sampled_from([2, 4]))
def test_devices_do_as_one(network, options, schedule, count):
    check_devices(network, options, schedule, count)


@pytest.mark.slow
@many(25)
@given(networks(depth=3, interacting=False), COMMUNICATION, SCHEDULES, st.sampled_from([2, 3, 4]))
def test_devices_do_as_one_for_many_networks(network, options, schedule, count):
    check_devices(network, options, schedule, count)
