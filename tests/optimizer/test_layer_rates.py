"""Test `adaptive_layer_rates` of `kfac.kfac`, and multipliers in `rules` of `find_layers`, against NumPy.

Some tests use internals of `_optimizer.step_scaling`, because its rule's constants are only defined there.
"""

from __future__ import annotations

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kfac
import problem
from kfac._linalg import cosine
from kfac._optimizer.step_scaling import AGREES, FASTEST, FOLLOWS, FORGETS, FULL, TOO_FAR, adapted
from problem import assert_equal, matrices, measured, motions, observing, state_of

LAYERS = problem.layers()
WARMUP = 10  # steps in which bases change
GROUP, MEMBERS = "kronecker_4x4", ("first", "out")


def steps(tx, number, params=None):
    """Yield each step's gradients, previous state, updates and new state, at fixed parameters."""
    params = problem.initial() if params is None else params
    state, update = jax.jit(tx.init)(params), jax.jit(observing(tx))
    for t in range(number):
        grads, factors = measured(t % 6)
        updates, new = update(grads, state, params, factors=factors)
        yield grads, state, updates, new
        state = new


def rates(state):
    return np.asarray(state_of(state).blocks[GROUP].momentum_state.rate)


def in_basis(state, matrices_):
    """Return the members' matrices in a state's eigenbasis, `[k, d_in, d_out]`."""
    kept = state_of(state).blocks[GROUP].preconditioner
    stack = np.stack([np.asarray(matrices_[name], np.float64) for name in MEMBERS])
    a, g = (np.asarray(side, np.float64) for side in (kept.A, kept.G))
    return np.swapaxes(a, 1, 2) @ np.swapaxes(stack, 1, 2) @ g


def cosines(a, b):
    products = [np.sum(x * y, axis=(1, 2)) for x, y in ((a, b), (a, a), (b, b))]
    return products[0] / np.sqrt(products[1] * products[2])


def followed(old, angle):
    beyond = angle - np.clip(angle, TOO_FAR, AGREES)
    return np.clip(old ** (1 - FORGETS) * np.exp(FOLLOWS * np.clip(beyond / FULL, -1, 1)), 1, FASTEST)


def test_soap_follows_the_angle_to_the_last_direction_in_the_eigenbasis():
    tx = kfac.kfac(0.05, LAYERS, preconditioner=kfac.SOAP("float32"), inverse_update_period=100)
    for t, (grads, before, updates, after) in enumerate(steps(tx, WARMUP + 4)):
        if t >= WARMUP:
            soap = state_of(before).blocks[GROUP].preconditioner
            average, trace = (np.asarray(x, np.float64) for x in (soap.squares, soap.momentum))
            last = trace / np.sqrt(average + 1e-4 * average.mean((1, 2), keepdims=True))
            expected = followed(rates(before), cosines(last, in_basis(after, matrices(grads))))
            np.testing.assert_allclose(rates(after), expected, rtol=1e-4)
        for name, rate in zip(MEMBERS, rates(after), strict=True):
            d_in = LAYERS[name].layouts[0].size("in")  # without the bias
            length = np.linalg.norm(matrices(updates)[name][:, :d_in], 2)
            np.testing.assert_allclose(length, 0.05 * rate * (4 / d_in) ** 0.5, rtol=0.05)
    assert np.all(rates(after) != 1)
    told = kfac.diagnostics(after)
    assert 0 < told["min_layer_rate"] <= rates(after).min() and told["max_layer_rate"] >= rates(after).max()


def test_other_inverses_follow_the_angle_to_the_momentum():
    tx = kfac.kfac(0.05, LAYERS, preconditioner=kfac.Cholesky())
    for t, (grads, before, _, after) in enumerate(steps(tx, 5)):
        momentum = np.asarray(state_of(before).blocks[GROUP].momentum_state.momentum, np.float64)
        stack = np.stack([matrices(grads)[name].T for name in MEMBERS])
        expected = followed(rates(before), cosines(momentum, stack)) if t else 1  # there is no momentum yet
        np.testing.assert_allclose(rates(after), expected, rtol=1e-4)
    assert np.all(rates(after) != 1)


@pytest.mark.slow
def test_a_step_that_is_refused_changes_no_rate():
    tx = kfac.kfac(0.05, LAYERS)
    *_, state = list(steps(tx, WARMUP + 2))[-1]
    grads, factors = measured(0)
    bad = jax.tree.map(lambda x: x.at[(0,) * x.ndim].set(jnp.nan), grads)
    _, after = jax.jit(observing(tx))(bad, state, problem.initial(), factors=factors)
    assert_equal(motions(after), motions(state))


def test_rates_have_bounds_and_zero_gradients_tell_nothing():
    rate = np.array([1.0, FASTEST, 2.0, 2.0, 2.0])
    angle = np.array([-1.0, 1.0, 0.0, TOO_FAR - 0.02, AGREES + 0.03])
    kept = rate ** (1 - FORGETS)
    expected = [1, FASTEST, kept[2], kept[3] * np.exp(-FOLLOWS * 0.02 / FULL), kept[4] * np.exp(FOLLOWS * 0.03 / FULL)]
    for full, values in ((True, expected), (False, np.minimum(expected, kept))):
        found = adapted(jnp.asarray(rate), jnp.asarray(angle), jnp.array(full))
        np.testing.assert_allclose(found, values, rtol=1e-6)
    stack = jnp.ones((2, 3, 4)).at[1].set(0)
    np.testing.assert_allclose(cosine(stack, jnp.ones((2, 3, 4))), [1, 0], rtol=1e-6)


def test_no_rate_rises_in_a_warm_up_or_late_in_a_schedule():
    """Check schedules with short steps, which agree with the gradient at any rate."""
    top = 2 * WARMUP
    schedule = lambda t: 1e-3 * jnp.minimum(t / top, jnp.where(t < top + 8, 1, 0.4))  # noqa: E731
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is of AdamW's size")
        tx = kfac.kfac(schedule, LAYERS)
    grads, factors = measured(0)
    state, update = jax.jit(tx.init)(problem.initial()), jax.jit(observing(tx))
    found = []
    for _ in range(top + 11):  # always the same gradient
        _, state = update(grads, state, problem.initial(), factors=factors)
        found.append(rates(state).max())
    np.testing.assert_array_equal(found[: top + 1], 1)
    assert np.all(np.diff(found[top : top + 8]) > 0)
    assert np.all(np.diff(found[top + 7 :]) < 0)  # earlier rates decay


def test_without_them_all_layers_go_by_the_one_rate():
    tx = kfac.kfac(0.05, LAYERS, adaptive_layer_rates=False)
    *_, state = list(steps(tx, WARMUP + 2))[-1]
    assert all(motion.rate is None for motion in motions(state).values())
    told = kfac.diagnostics(state)
    assert told["min_layer_rate"] == told["max_layer_rate"] == 1


def test_kfac_needs_the_momentum_that_adaptive_rates_follow():
    with pytest.raises(ValueError, match="momentum must be a number or a schedule, but is None"):
        kfac.kfac(0.05, LAYERS, momentum=None)
    with pytest.raises(ValueError, match="adaptive_layer_rates"):
        kfac.kfac(0.05, LAYERS, adaptive_layer_rates="yes")


def test_no_rate_rises_before_anything_moves():
    tx = kfac.kfac(lambda count: jnp.where(count < 100, 0.0, 0.05), LAYERS)
    *_, state = list(steps(tx, WARMUP + 4))[-1]
    assert rates(state).max() <= 1


@pytest.mark.slow
@pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
def test_a_refused_step_tells_the_rates_of_before(value):
    tx = kfac.kfac(0.05, LAYERS)
    *_, state = list(steps(tx, WARMUP + 3))[-1]
    grads, factors = measured(0)
    bad = jax.tree.map(lambda x: x.at[(0,) * x.ndim].set(value), grads)
    _, after = jax.jit(observing(tx))(bad, state, problem.initial(), factors=factors)
    told, before = kfac.diagnostics(after), kfac.diagnostics(state)
    assert told["min_layer_rate"] == before["min_layer_rate"] and told["max_layer_rate"] == before["max_layer_rate"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("made", "used"),
    [
        ({"adaptive_layer_rates": False}, {}),
        ({}, {"adaptive_layer_rates": False}),
    ],
)
def test_a_state_of_other_options_is_refused(made, used):
    preconditioner = kfac.Cholesky()
    state = kfac.kfac(0.05, LAYERS, preconditioner=preconditioner, **made).init(problem.initial())
    grads, factors = measured(0)
    tx = kfac.kfac(0.05, LAYERS, preconditioner=preconditioner, **used)
    with pytest.raises(ValueError, match="does not go with its state"):
        tx.update(grads, kfac.observe(state, factors), problem.initial())


def test_other_parameters_are_refused():
    tx = kfac.kfac(0.05, LAYERS)
    grads, factors = measured(0)
    with pytest.raises(ValueError, match="params have a leaf 'z'"):
        tx.update(grads, kfac.observe(tx.init(problem.initial()), factors), {"z": jnp.ones(3)})


@pytest.mark.slow
def test_several_devices_tell_the_same_rates(x64):
    """Check that positions without blocks do not count. They hold a copy of another block, without a rate."""
    mesh = jax.make_mesh((3,), ("devices",), devices=jax.devices()[:3])
    told = []
    for where in (kfac.Distribution(), kfac.Distribution(mesh=mesh)):
        tx = kfac.kfac(0.05, LAYERS, distribution=where)
        *_, state = list(steps(tx, WARMUP + 5))[-1]
        told.append([float(kfac.diagnostics(state)[key]) for key in ("min_layer_rate", "max_layer_rate")])
    np.testing.assert_allclose(told[0], told[1], rtol=1e-5)
    assert told[0][1] != 1


GIVEN = {"^out/kernel": jnp.float32(0.2), "out|first/bias": np.float64(1.0), "norm|offset|first": 3.0}


def with_rules(rules):
    return kfac.find_layers(
        problem.loss_fn, problem.initial(), problem.batch(0), rules={"temperature": "skip", **rules}
    )


@pytest.mark.slow
@pytest.mark.parametrize("devices", [None, 3])
@pytest.mark.parametrize("preconditioner", [kfac.SOAP(), kfac.Cholesky()])
def test_kfac_multiplies_the_steps_of_layers(x64, devices, preconditioner):
    """Check layers that share a stack, too. The first pattern that matches counts, and other layers stay the same."""
    mesh = devices and jax.make_mesh((devices,), ("devices",), devices=jax.devices()[:devices])
    where = kfac.Distribution(mesh=mesh)
    check_multiplied(
        lambda layers: kfac.kfac(0.05, layers, preconditioner=preconditioner, distribution=where), rtol=2e-6
    )


@pytest.mark.parametrize(
    "make",
    [
        kfac.scale_by_kfac,
        functools.partial(kfac.natural_gradient, 0.05, kl_clip=1e-6),
        functools.partial(kfac.natural_gradient, 0.05, trust_ratio=0.1, lr_in_momentum=False),
    ],
    ids=["scale_by_kfac", "kl_clip", "trust_ratio"],
)
def test_every_optimizer_multiplies_the_steps_of_layers(make):
    """Check that neither the KL clip nor the trust ratio undoes the multipliers, or shortens other layers' steps."""
    check_multiplied(make, rtol=1e-5)


def check_multiplied(make, rtol):
    plain, given = (steps(make(with_rules(rules)), 3) for rules in ({}, GIVEN))
    multiplied = {"first": 1, "out": 0.2, "norm": 3.0, "offset": 3.0, "temperature": 1}
    for (_, _, before, _), (_, _, after, _) in zip(plain, given, strict=True):
        assert before.keys() == multiplied.keys()
        for name, rate in multiplied.items():
            expected = jax.tree.map(lambda x, rate=rate: rate * x, before[name])
            jax.tree.map(lambda x, y: np.testing.assert_allclose(y, x, rtol=rtol), expected, after[name])


def test_gauss_newton_refuses_multipliers():
    with pytest.raises(ValueError, match=r"multiplies the steps of layer 'out'.*leave it out"):
        kfac.gauss_newton(1.0, with_rules({"out": 0.5}))


def test_rows_that_are_leaves_of_their_own_have_multipliers():
    """Check scales and shifts of several normalisations in a single stack."""

    def loss_fn(params, x):
        for scale in params["scales"]:
            x = x * scale["scale"] + scale["shift"]
        return jnp.mean(jnp.sum(x**2, -1))

    params = {"scales": [{"scale": jnp.ones(4), "shift": jnp.full(4, 0.1)} for _ in range(3)]}
    x = jax.random.normal(jax.random.key(0), (16, 4))
    updates = []
    for rules in (None, {"1/shift": 0.5}):
        layers = kfac.find_layers(loss_fn, params, x, rules=rules)
        _, grads, factors = kfac.value_and_grad(loss_fn, layers)(params, x)
        tx = kfac.kfac(0.05, layers)
        state = kfac.observe(tx.init(params), factors)
        updates.append(jax.jit(tx.update)(grads, state, params)[0])
    plain, given = updates
    for k, rate in enumerate((1, 0.5, 1)):
        expected = jax.tree.map(lambda x, rate=rate: rate * x, plain["scales"][k])
        jax.tree.map(lambda x, y: np.testing.assert_allclose(y, x, rtol=1e-5), expected, given["scales"][k])


@pytest.mark.slow
def test_find_layers_gives_a_kernel_the_multiplier_of_its_bias():
    """Check that a pattern for the bias also multiplies its kernel. Later changes to the mapping do not matter."""
    grads, factors = measured(0)
    lengths = []
    for rules in ({}, {"first/bias": 0.2}):
        tx = kfac.kfac(0.05, with_rules(rules))
        state = tx.init(problem.initial())
        rules["first/bias"] = 7.0
        updates, _ = jax.jit(observing(tx))(grads, state, problem.initial(), factors=factors)
        lengths.append(np.linalg.norm(updates["first"]["kernel"]))
    np.testing.assert_allclose(lengths[1], 0.2 * lengths[0], rtol=1e-5)
