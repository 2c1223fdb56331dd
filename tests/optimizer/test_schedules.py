"""Test the schedules of the large-batch recipe, each against its definition."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kfac
from problem import assert_close, layers, plain_kfac, run

RATES = [0.5, 0.5, 0.25, 0.3, 0.15, 0.0, 0.0, 0.1]


def rate(count):
    return jnp.asarray(RATES)[count]


def test_momentum_by_the_ratio_of_two_rates():
    momentum = kfac.schedules.coupled_momentum(0.9, rate)
    expected = [0.9, 0.9, 0.9 * 0.25 / 0.5, 0.9, 0.9 * 0.15 / 0.3, 0.0, 0.9, 0.9]
    np.testing.assert_allclose([momentum(t) for t in range(len(RATES))], expected, rtol=1e-6)


def test_momentum_in_proportion_to_the_rate():
    momentum = kfac.schedules.coupled_momentum(0.9, rate, reference_rate=0.5)
    np.testing.assert_allclose([momentum(t) for t in range(len(RATES))], 0.9 / 0.5 * np.array(RATES), rtol=1e-6)
    # While the rate is above the reference rate, the momentum has its given value.
    assert kfac.schedules.coupled_momentum(0.9, rate, reference_rate=0.2)(0) == np.float32(0.9)


@pytest.mark.slow
def test_coupled_momentum_in_the_optimizer():
    """Check that coupling by the ratio is constant momentum with the rate after it.

    The paper's form is another method.
    """
    falling = optax.polynomial_schedule(0.1, 0.0, 3, transition_steps=6, transition_begin=1)
    coupled = kfac.schedules.coupled_momentum(0.9, falling)
    inside = run(plain_kfac(falling, layers(), momentum=coupled, lr_in_momentum=True), steps=6)[0]
    outside = run(plain_kfac(falling, layers(), momentum=0.9), steps=6)[0]
    assert_close(inside, outside, 1e-5)
    proportional = kfac.schedules.coupled_momentum(0.9, falling, reference_rate=0.1)
    other = run(plain_kfac(falling, layers(), momentum=proportional, lr_in_momentum=True), steps=6)[0]
    with pytest.raises(AssertionError):
        assert_close(other, outside, 1e-3)


def test_the_damping_warms_up_by_its_recursion():
    initial, target, steps = 1e-1, 1e-4, 20
    damping = kfac.schedules.damping_decay(initial, target, steps)
    value, share = initial, 2 * np.log10(initial / target) / steps
    for t in range(60):
        np.testing.assert_allclose(damping(t), value, rtol=1e-4)
        value = (1 - share) * value + share * target
    # Equal ends give a constant. In float32 one of these values is below its decimal number, and the other above.
    for same in (1e-3, 1e-4):
        assert kfac.schedules.damping_decay(same, same, 10)(5) == np.float32(same)


@pytest.mark.parametrize(
    ("function", "arguments", "name"),
    [
        ("coupled_momentum", (1.0, 0.1), "momentum"),
        ("coupled_momentum", (0.9, -0.1), "learning_rate"),
        ("coupled_momentum", (0.9, 0.1), "reference_rate"),
        ("damping_decay", (1e-4, 1e-3, 10), "initial"),
        ("damping_decay", (1e-3, 0, 10), "target"),
        ("damping_decay", (1e-1, 1e-4, 5), "num_steps"),
        ("damping_decay", (lambda step: 1e-1, 1e-4, 20), "initial"),
        ("damping_decay", (1e-1, 1e-4, lambda step: 20), "num_steps"),
    ],
)
def test_bad_arguments_are_named(function, arguments, name):
    options = {"reference_rate": 0.0} if name == "reference_rate" else {}
    with pytest.raises(ValueError, match=name):
        getattr(kfac.schedules, function)(*arguments, **options)


def test_a_rate_that_rises_and_falls():
    rate = kfac.schedules.warmup_linear_decay(0.05, 20)
    found = [float(rate(step)) for step in range(22)]
    expected = [0.025, 0.05, *(0.05 * (20 - step) / 18 for step in range(2, 21)), 0.0]
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-8)
    for wrong, words in (((-1.0, 10), "peak must lie in"), ((0.1, 0), "num_steps must be a positive int, but is 0")):
        with pytest.raises(ValueError, match=words):
            kfac.schedules.warmup_linear_decay(*wrong)
    assert kfac.schedules.warmup_linear_decay(0.05, 1)(0) == np.float32(0.05)
