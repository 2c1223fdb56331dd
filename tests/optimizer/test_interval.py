"""Test the rule for steps with statistics against its definition."""

import dataclasses
import itertools
import math
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import kfac
from problem import initial, layers, measured

EXAMPLE = Path(__file__).parents[2] / "examples" / "large_batch"
sys.path.insert(0, str(EXAMPLE))
from adaptive_interval import AdaptiveInterval, change_of  # noqa: E402

sys.path.remove(str(EXAMPLE))


def steps_with_statistics(changes, steps, **options):
    interval = AdaptiveInterval(**options)
    taken = []
    for step in range(steps):
        if interval.due(step):
            taken.append(step)
            interval.record(step, changes(step))
    return taken


def test_while_statistics_stay_alike_intervals_are_sums_of_the_last_two():
    assert steps_with_statistics(lambda step: 0.01, 60) == [0, 1, 3, 6, 11, 19, 32, 53]


def test_without_likeness_every_step_is_due():
    assert steps_with_statistics(lambda step: 0.5, 6) == [0, 1, 2, 3, 4, 5]


def test_a_change_halves_the_interval_and_likeness_once_keeps_it():
    # The intervals are 1, 2, 3, 5 and 8. The change at step 19 halves 8 to 4. After one similar step it stays at 4, and
    # after two it grows to 4 + 4.
    assert steps_with_statistics(lambda step: 1.0 if step == 19 else 0.01, 48) == [0, 1, 3, 6, 11, 19, 23, 27, 35, 47]


def test_intervals_have_a_bound():
    taken = steps_with_statistics(lambda step: 0.01, 100, longest=7)
    assert max(b - a for a, b in itertools.pairwise(taken)) == 7


@pytest.mark.parametrize("change", [math.nan, math.inf, 0.1, 5.0])
def test_what_is_not_below_the_threshold_is_not_similar(change):
    assert steps_with_statistics(lambda step: change, 4) == [0, 1, 2, 3]


def test_it_goes_on_from_what_was_saved():
    changes = [0.01, 0.02, 0.3, 0.01, 0.01, 0.05, 0.01, 0.4] * 10
    whole = AdaptiveInterval()
    for step in range(60):
        if whole.due(step):
            whole.record(step, changes[step])
        if step == 23:
            resumed = AdaptiveInterval(**dataclasses.asdict(whole))
        elif step > 23 and resumed.due(step):
            resumed.record(step, changes[step])
    assert resumed == whole


@pytest.mark.parametrize("options", [{"threshold": 0.0}, {"threshold": math.nan}, {"longest": 0}])
def test_bad_arguments_are_named(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        AdaptiveInterval(**options)


def test_the_change_is_that_of_the_statistics_against_their_average():
    tx = kfac.scale_by_kfac(layers(), factor_ema_decay=0.5)
    state = jax.jit(tx.init)(initial())
    assert change_of(measured(0)[1], kfac.curvature.factors_from_state(state, layers())) == 1  # no average yet
    state = jax.jit(lambda grads, state, factors: tx.update(grads, kfac.observe(state, factors))[1])(
        measured(0)[0], state, measured(0)[1]
    )
    changes = [
        np.linalg.norm(getattr(measured(1)[1][name], side) - getattr(block, side))
        / np.linalg.norm(getattr(block, side))
        for name, block in measured(0)[1].items()
        for side in ("A", "G")
        if isinstance(block, kfac.types.Kronecker)
    ]
    change = change_of(measured(1)[1], kfac.curvature.factors_from_state(state, layers()))
    np.testing.assert_allclose(change, np.mean(changes), rtol=1e-5)
