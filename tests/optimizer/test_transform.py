"""Test the semantics of `scale_by_kfac` and `kfac`, a property per test."""

import dataclasses
import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import kfac
from kfac.types import Kronecker, Unitwise
from problem import (
    ages_of,
    assert_close,
    assert_equal,
    batch,
    differ,
    field_of,
    history,
    initial,
    layers,
    loss_fn,
    measured,
    observing,
    plain_kfac,
    run,
    stepper,
)

ALL_OPTIONS = list(inspect.signature(kfac.natural_gradient).parameters)
KFAC_OPTIONS = list(inspect.signature(kfac.kfac).parameters)
SCALE_OPTIONS = list(inspect.signature(kfac.scale_by_kfac).parameters)

# Options under which each argument matters, with a value that must change the outcome. A new argument without an entry
# fails the tests below. Numbers are passed as arrays, so that a single compiled function serves them all.
NUMBERS = {
    "learning_rate": 0.3,
    "momentum": 0.5,
    "weight_decay": 0.1,
    "kl_clip": 1e-4,
    "trust_ratio": 0.5,
    "damping": 1e-2,
    "factor_ema_decay": 0.5,
    "inverse_update_period": 3,
    "interval_warmup_steps": 3,
    "unitwise_damping_scale": 30.0,
}
BASE = {
    "learning_rate": 0.1,
    "momentum": 0.9,
    "weight_decay": 0.01,
    "kl_clip": 1e-3,
    "trust_ratio": 1.0,
    "damping": 1e-3,
    "factor_ema_decay": 0.95,
    "inverse_update_period": 2,
    "interval_warmup_steps": 0,
    "unitwise_damping_scale": 1.0,
}
SWITCHES = {
    "momentum": ({}, None),
    "nesterov": ({}, True),
    "lr_in_momentum": ({"learning_rate": lambda count: 0.1 * 0.5**count}, True),
    "weight_decay": ({}, 0.1),
    "weight_decay_mask": (
        {"weight_decay": 0.1},
        lambda params: jax.tree_util.tree_map_with_path(lambda p, _: p[-1].key == "kernel", params),
    ),
    "kl_clip": ({}, 1e-4),
    "trust_ratio": ({}, 0.5),
    "preconditioner": ({}, kfac.Eigh()),
}
# Fields of the options' values. On several devices, a distribution's fields change the messages, which the tests of
# axes check.
INVERSE_FIELDS = {"precision", "scale_damping"}
DEVICES = {"axis_name", "mesh"}
# Other tests check these fields: the tests of the assignment and of several devices.
OTHER_FIELDS = {"communication_dtype", "owner_axes"}
# The other tests check these options.
ELSEWHERE = {"layers", "statistics_period", "distribution"}


def test_the_tables_of_options_are_complete():
    assert set(NUMBERS) | set(SWITCHES) | ELSEWHERE == set(ALL_OPTIONS)
    own = {"overhead", "adaptive_layer_rates"}
    assert set(KFAC_OPTIONS) - own < set(ALL_OPTIONS)
    assert len(KFAC_OPTIONS) <= 12
    for value, fields in ((kfac.Distribution(), DEVICES | OTHER_FIELDS), *((i, INVERSE_FIELDS) for i in INVERSES)):
        assert {field.name for field in dataclasses.fields(value)} == fields
    assert set(SCALE_OPTIONS) <= set(ALL_OPTIONS)
    for name in set(SCALE_OPTIONS[1:]) & set(KFAC_OPTIONS) - {"damping", "preconditioner", "inverse_update_period"}:
        ours, theirs = (inspect.signature(f).parameters[name].default for f in (kfac.kfac, kfac.scale_by_kfac))
        assert ours == theirs


@functools.cache
def numbers_step(as_schedules):
    """Return a step of `kfac` with all numbers as arguments.

    A schedule is a pair of numbers: for the first two steps, and for later steps.
    """

    @jax.jit
    def step(options, grads, state, params, factors):
        if as_schedules:
            intervals = {k: options[k][0] for k in ("inverse_update_period", "interval_warmup_steps")}
            options = {k: lambda count, v=v: jnp.where(count < 2, v[0], v[1]) for k, v in options.items()} | intervals
        tx = plain_kfac(layers=layers(), **options)
        state = kfac.observe(state, factors)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


@functools.cache
def numbers_state(as_schedules):
    scalars = {k: lambda count, v=v: v for k, v in BASE.items()} if as_schedules else BASE
    intervals = {k: BASE[k] for k in ("inverse_update_period", "interval_warmup_steps")}
    return jax.jit(plain_kfac(layers=layers(), **{**scalars, **intervals}).init)(initial())


def with_numbers(options, steps=4, as_schedules=False):
    params = initial()
    state = numbers_state(as_schedules)
    options = jax.tree.map(jnp.asarray, options)
    for t in range(steps):
        params, state = numbers_step(as_schedules)(options, measured(t)[0], state, params, measured(t)[1])
    return params


@pytest.mark.parametrize("option", NUMBERS)
def test_every_number_changes_the_result(option):
    assert differ(with_numbers(BASE), with_numbers({**BASE, option: NUMBERS[option]}))


@functools.cache
def plainly(**options):
    return run(plain_kfac(**{"learning_rate": 0.1, "layers": layers(), **options}))[0]


@pytest.mark.parametrize("option", SWITCHES)
def test_every_switch_changes_the_result(option):
    base, value = SWITCHES[option]
    assert differ(plainly(**base), plainly(**base, **{option: value}))


@pytest.mark.slow
def test_numbers_arrays_and_constant_schedules_are_the_same():
    numbers = run(plain_kfac(layers=layers(), **BASE))[0]
    assert_close(with_numbers(BASE), numbers, 1e-5)
    assert_close(with_numbers({k: (v, v) for k, v in BASE.items()}, as_schedules=True), numbers, 1e-5)


@pytest.mark.parametrize("option", sorted(NUMBERS.keys() - {"inverse_update_period", "interval_warmup_steps"}))
def test_a_schedule_is_read_at_the_count_of_the_step(option):
    """Check that the first two steps use the first value, and the third step the second value."""
    scheduled = {k: (v, v) for k, v in BASE.items()} | {option: (BASE[option], NUMBERS[option])}
    for steps, same in ((2, True), (3, False)):
        changed = with_numbers(scheduled, steps, as_schedules=True)
        assert differ(changed, with_numbers(BASE, steps)) != same


# -- statistics --------------------------------------------------------------------------------------------------------


def constant_factors(step):
    """Return changing gradients with constant statistics."""
    return measured(step)[0], measured(0)[1]


def stacked(factors):
    """Return factors in the layout of the state."""
    return {
        "kronecker_4x4": Kronecker(*(jnp.stack([getattr(factors[k], x) for k in ("first", "out")]) for x in "AG")),
        "unitwise_4x2": Unitwise(factors["norm"].F[None]),
        "unitwise_4x1": Unitwise(factors["offset"].F[None]),
    }


def test_the_average_of_constant_statistics_is_unbiased_from_the_first_on():
    states = history(kfac.scale_by_kfac(layers(), factor_ema_decay=0.9), steps=7, measured=constant_factors)
    for t, (_, state, _) in enumerate(states):
        assert_close(field_of(state, "factors"), stacked(measured(0)[1]), 1e-6)
        for weight in field_of(state, "weight").values():
            np.testing.assert_allclose(weight, 1 - 0.9 ** (t + 1), rtol=1e-5)


def test_the_average_does_not_depend_on_when_it_began():
    def shifted(step):
        return measured(max(step - 3, 0))

    tx = kfac.scale_by_kfac(layers())
    _, early, _ = run(tx, steps=3)
    _, late, _ = run(tx, steps=6, without=(0, 1, 2), measured=shifted)
    assert_equal(field_of(late, "factors"), field_of(early, "factors"))
    assert_equal(field_of(late, "preconditioner"), field_of(early, "preconditioner"))


def test_decay_zero_uses_the_last_statistics_alone():
    _, state, _ = run(kfac.scale_by_kfac(layers(), factor_ema_decay=0.0), steps=3)
    assert_equal(field_of(state, "factors"), stacked(measured(2)[1]))


def test_the_weights_of_a_decay_schedule_are_those_of_the_definition():
    decays = [0.9, 0.2, 0.7]
    _, state, _ = run(kfac.scale_by_kfac(layers(), factor_ema_decay=lambda t: jnp.asarray(decays)[t]), steps=3)
    moment, weight = 0.0, 0.0
    for t, decay in enumerate(decays):
        moment = decay * moment + (1 - decay) * np.asarray(measured(t)[1]["first"].A, np.float64)
        weight = decay * weight + 1 - decay
    assert_close(field_of(state, "factors")["kronecker_4x4"].A[0], moment / weight, 1e-6)
    np.testing.assert_allclose(field_of(state, "weight")["kronecker_4x4"], weight, rtol=1e-6)


def test_a_decay_of_one_from_a_schedule_waits_for_later_statistics():
    decay = lambda t: jnp.where(t < 2, 1.0, 0.9)  # noqa: E731
    _, (_, _, updates), (_, state, _) = history(kfac.scale_by_kfac(layers(), factor_ema_decay=decay), steps=3)
    assert_equal(updates, measured(1)[0])
    assert_close(field_of(state, "factors"), stacked(measured(2)[1]), 1e-6)


def test_stored_factors_contain_no_damping():
    _, little, _ = run(kfac.scale_by_kfac(layers(), damping=1e-6))
    _, much, _ = run(kfac.scale_by_kfac(layers(), damping=100.0))
    assert_equal(field_of(little, "factors"), field_of(much, "factors"))
    assert differ(field_of(little, "preconditioner"), field_of(much, "preconditioner"))


@pytest.mark.slow
def test_a_batch_twice_over_gives_the_same_update():
    tx = kfac.scale_by_kfac(layers())

    @jax.jit
    def update(batch):
        _, grads, factors = kfac.value_and_grad(loss_fn, layers())(initial(), batch)
        return tx.update(grads, kfac.observe(tx.init(initial()), factors))

    once, state = update(batch(0))
    twice, state_twice = update(jax.tree.map(lambda x: jnp.concatenate([x, x]), batch(0)))
    assert_close(field_of(state_twice, "factors"), field_of(state, "factors"), 1e-5)
    assert_close(twice, once, 1e-4)


# -- gradients that pass through ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_gradients_pass_bit_for_bit_until_the_first_statistics(precision):
    tx = kfac.scale_by_kfac(layers(), preconditioner=kfac.Cholesky(precision))
    for t, (_, state, updates) in enumerate(history(tx, steps=4, without=range(3))):
        assert state.count == t + 1
        if t < 3:
            assert_equal(updates, measured(t)[0])
        else:
            assert differ(updates, measured(t)[0])


def test_odd_values_pass_bit_for_bit():
    """Check denormal numbers, and numbers that bfloat16 cannot represent."""
    odd = jax.tree.map(lambda x: jnp.full(x.shape, np.nextafter(np.float32(1), np.float32(2))) * 1e-30, initial())
    tx = kfac.scale_by_kfac(layers(), preconditioner=kfac.Cholesky("bfloat16"))
    assert_equal(jax.jit(tx.update)(odd, tx.init(odd))[0], odd)


def test_skipped_parameters_always_pass():
    _, _, updates = run(kfac.scale_by_kfac(layers()), steps=3)
    assert_equal(updates["temperature"], measured(2)[0]["temperature"])
    assert differ(updates["offset"], measured(2)[0]["offset"])


def test_diagonal_and_unitwise_blocks_by_their_formulas():
    tx = kfac.scale_by_kfac(layers(), damping=0.25, unitwise_damping_scale=0.5)
    grads, factors = measured(0)
    _, _, updates = run(tx, steps=1)
    assert_close(updates["offset"], grads["offset"] / (factors["offset"].F[:, 0, 0] + 0.125), 1e-6)
    pairs = np.stack([grads["norm"]["scale"], grads["norm"]["shift"]], -1)[..., None]
    expected = np.linalg.solve(np.asarray(factors["norm"].F) + 0.125 * np.eye(2), pairs)[..., 0]
    assert_close(updates["norm"], {"scale": expected[:, 0], "shift": expected[:, 1]}, 1e-5)


# -- refreshes ---------------------------------------------------------------------------------------------------------


@functools.cache
def refreshing(every, warmup):
    """Return a first state and a step of `scale_by_kfac` with these intervals."""
    tx = kfac.scale_by_kfac(layers(), inverse_update_period=every, interval_warmup_steps=warmup)
    return jax.jit(tx.init)(initial()), stepper(tx)


def block_ages(every, warmup, steps, without=()):
    """Return the ages of the inverses after each step, for `first`, `out` and the two unit-wise blocks."""
    state, step = refreshing(every, warmup)
    found = []
    for t in range(steps):
        _, state, _ = step(measured(t)[0], state, initial(), None if t in without else measured(t)[1])
        blocks = ages_of(state)
        names = ("kronecker_4x4", "unitwise_4x1", "unitwise_4x2")
        found.append([int(age) for name in names for age in blocks[name]])
        assert state.metrics.inverse_age == max(found[-1])
    return found


def ages(*args, **kwargs):
    """Return the ages after each step, where all blocks have the same age."""
    found = block_ages(*args, **kwargs)
    assert all(len(set(blocks)) == 1 for blocks in found)
    return [blocks[0] for blocks in found]


def test_when_the_inverses_are_refreshed():
    assert ages(3, 0, 7) == [0, 1, 2, 0, 1, 2, 0]
    # Steps count from the first, whether or not they have statistics. Step 2 refreshes, because there was no refresh
    # before. Step 7 refreshes, because the last refresh, at step 3, is older than the interval. Before the first
    # refresh there is no inverse to age.
    assert ages(3, 0, 8, without=(0, 1, 4, 5, 6)) == [0, 0, 0, 0, 1, 2, 3, 0]
    assert ages(3, 5, 8) == [0, 0, 0, 0, 0, 1, 0, 1]
    # In the first phase, steps with statistics refresh, and otherwise only the regular steps.
    assert ages(3, 5, 8, without=(1, 2, 4)) == [0, 1, 2, 0, 1, 2, 0, 1]
    # Later the interval doubles whenever the step count has doubled, up to its final value. Multiples of the final
    # value always refresh.
    assert [t for t, age in enumerate(ages(9, 2, 28)) if age == 0] == [0, 1, 2, 4, 8, 9, 18, 27]
    assert ages(9, 2, 11, without=(9, 10))[-3:] == [0, 1, 2]  # step 9 has no new statistics


def test_a_refresh_that_is_overdue_comes_with_the_next_statistics():
    assert ages(4, 0, 8, without=(1, 2, 3, 4)) == [0, 1, 2, 3, 4, 0, 1, 2]  # at step 5, instead of 4
    assert ages(4, 0, 10, without=(1, 2, 3, 4))[-2:] == [0, 1]  # and step 8 is regular again


def test_observe_refreshes_with_the_first_statistics_however_long_the_interval_is():
    assert ages(100, 0, 4, without=(0,)) == [0, 0, 1, 2]
    state, step = refreshing(100, 0)
    grads, factors = measured(0)
    # A refresh without any statistics is none, and a block whose statistics were broken refreshes with the next.
    state = jax.jit(kfac.observe)(state)
    broken = jax.tree.map(lambda x: x * jnp.nan, factors)
    for given, refreshed in ((None, -1), (broken, -1), (factors, 2), (factors, 2)):
        _, state, _ = step(grads, state, initial(), given)
        assert state.refreshed == refreshed


def test_intervals_of_a_short_warm_up_hold_after_as_many_steps_as_can_be_counted():
    tx = kfac.scale_by_kfac(layers(), statistics_period=3, interval_warmup_steps=1)
    many = {"count": jnp.int32(2**30), "last_statistics_step": jnp.int32(2**30 - 1)}
    state, step = jax.jit(tx.init)(initial())._replace(**many), stepper(tx)
    found = []
    for _ in range(3):
        _, state, _ = step(measured(0)[0], state, initial(), None)
        found.append(bool(kfac.statistics_due(state)))
    assert found == [False, True, False]  # 2**30 + 2 is a multiple of 3


@pytest.mark.parametrize("option", ["damping", "unitwise_damping_scale"])
def test_a_changed_damping_takes_effect_at_the_next_refresh(option):
    schedule = lambda t: jnp.where(t < 2, 0.5, 2.0)  # noqa: E731
    tx = kfac.scale_by_kfac(layers(), inverse_update_period=4, interval_warmup_steps=0, **{option: schedule})
    states = [state for _, state, _ in history(tx, steps=6, without=(1, 2, 3, 5), measured=lambda t: measured(0))]
    for state in states[1:4]:
        assert_equal(field_of(state, "preconditioner"), field_of(states[0], "preconditioner"))
    # At step 4 the averages equal the averages at step 0, because the statistics do. The damping is the current step's.
    fresh = kfac.scale_by_kfac(layers(), inverse_update_period=4, interval_warmup_steps=0, **{option: 2.0})
    assert differ(field_of(states[4], "preconditioner"), field_of(states[0], "preconditioner"))
    assert_close(field_of(states[4], "preconditioner"), field_of(run(fresh, steps=1)[1], "preconditioner"), 1e-6)
    assert [int(state.metrics.inverse_age) for state in states] == [0, 1, 2, 3, 0, 1]


def test_stale_inverses_are_those_of_the_last_refresh():
    tx = kfac.scale_by_kfac(layers(), inverse_update_period=3, interval_warmup_steps=0)
    states = [state for _, state, _ in history(tx)]
    assert_equal(field_of(states[1], "preconditioner"), field_of(states[0], "preconditioner"))
    assert_equal(field_of(states[2], "preconditioner"), field_of(states[0], "preconditioner"))
    assert differ(field_of(states[2], "factors"), field_of(states[0], "factors"))
    every = run(kfac.scale_by_kfac(layers()))[1]
    assert_close(field_of(states[3], "preconditioner"), field_of(every, "preconditioner"), 1e-6)


# -- the parts of the alias --------------------------------------------------------------------------------------------


def test_the_kl_clip_bounds_the_predicted_change():
    grads, _ = measured(0)
    _, _, free = run(plain_kfac(0.1, layers(), momentum=None), steps=1)
    for c, binds in ((1e-4, True), (1e6, False)):
        _, state, held = run(plain_kfac(0.1, layers(), momentum=None, kl_clip=c), steps=1)
        # The bound is on lr^2 <v, g> with v = -update / lr, over all parameters that have a block.
        product = sum(
            -0.1 * float(jnp.vdot(held[k], grads[k]))
            if not isinstance(held[k], dict)
            else sum(-0.1 * float(jnp.vdot(held[k][j], grads[k][j])) for j in held[k])
            for k in held
            if k != "temperature"
        )
        scale = float(kfac.diagnostics(state)["kl_clip_scale"])
        assert (scale < 1) == binds
        # <v, g> shrinks with v. It was c / scale / lr^2 before.
        np.testing.assert_allclose(product, c / scale if binds else product, rtol=1e-4)
        assert_close(held["first"], jax.tree.map(lambda x: x * scale, free["first"]), 1e-5)  # noqa: B023
        assert_equal(held["temperature"], free["temperature"])


def test_the_trust_ratio_fixes_the_length_of_kernel_updates():
    tx = plain_kfac(0.5, layers(), trust_ratio=0.01)
    (before, _, _), (params, _, _) = history(tx, steps=2)
    for name in ("first", "out"):
        step = jnp.linalg.norm(params[name]["kernel"] - before[name]["kernel"])
        np.testing.assert_allclose(step, 0.5 * 0.01 * jnp.linalg.norm(before[name]["kernel"]), rtol=1e-3)
    # No other parameters are scaled.
    free, _, _ = run(plain_kfac(0.5, layers()), steps=1)
    assert_close({k: before[k] for k in ("norm", "offset")}, {k: free[k] for k in ("norm", "offset")}, 1e-6)
    assert_close(before["first"]["bias"], free["first"]["bias"], 1e-6)


@pytest.mark.slow
def test_the_trust_ratio_turns_kernels_whose_scale_does_not_matter():
    """Check that the whole length turns a kernel before batch norm. Other kernels keep their direction."""
    rng = np.random.default_rng(0)
    shapes = {"free": (6, 2), "out": (2, 6)}
    params = {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}
    x, y = (jnp.asarray(rng.normal(size=(32, 6)), jnp.float32) for _ in range(2))
    x = x * jnp.asarray([0.1, 0.3, 1, 1, 2, 3])

    def loss_fn(params, batch):
        h = batch[0] @ params["free"]
        h = (h - jnp.mean(h, axis=0)) / jnp.sqrt(jnp.sum(h**2))
        return jnp.mean((jnp.tanh(h) @ params["out"] - batch[1]) ** 2)

    found = kfac.find_layers(loss_fn, params, (x, y))
    _, grads, factors = jax.jit(kfac.value_and_grad(loss_fn, found))(params, (x, y))

    def update(**options):
        tx = plain_kfac(0.5, found, damping=0.01, momentum=None, **options)
        return jax.jit(observing(tx))(grads, tx.init(params), params, factors=factors)[0]

    turned, plain = update(trust_ratio=0.1), update()
    weight, step = params["free"], plain["free"]
    turning = step - weight * jnp.vdot(step, weight) / jnp.vdot(weight, weight)
    # The step has a part along the kernel.
    assert jnp.linalg.norm(turning) < 0.98 * jnp.linalg.norm(step)
    for name, direction in (("free", turning), ("out", plain["out"])):
        length = 0.5 * 0.1 * jnp.linalg.norm(params[name])
        np.testing.assert_allclose(turned[name], direction * length / jnp.linalg.norm(direction), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_stacked_layers_train_like_separate_ones():
    """Compare a scan over stacked kernels with separate layers, also if a norm of each kernel is taken."""
    rng = np.random.default_rng(0)
    kernels = jnp.asarray(rng.normal(size=(3, 4, 4)) * np.array([0.1, 1, 3])[:, None, None], jnp.float32)
    biases = jnp.asarray(rng.normal(size=(3, 4)), jnp.float32)
    x, y = (jnp.asarray(rng.normal(size=(8, 4)), jnp.float32) for _ in range(2))

    def scanned(params, batch):
        def body(h, layer):
            return jnp.tanh(h @ layer["kernel"] + layer["bias"]), None

        h, _ = jax.lax.scan(body, batch[0], params["stack"])
        return jnp.mean((h - batch[1]) ** 2)

    def separate(params, batch):
        h = batch[0]
        for k in range(3):
            h = jnp.tanh(h @ params[f"layer{k}"]["kernel"] + params[f"layer{k}"]["bias"])
        return jnp.mean((h - batch[1]) ** 2)

    together = {"stack": {"kernel": kernels, "bias": biases}}
    apart = {f"layer{k}": {"kernel": kernels[k], "bias": biases[k]} for k in range(3)}

    def train(loss_fn, params):
        found = kfac.find_layers(loss_fn, params, (x, y))
        tx = plain_kfac(0.1, found, damping=0.1, trust_ratio=0.1, kl_clip=1e-2)
        state = tx.init(params)

        @jax.jit
        def step(params, state):
            _, grads, factors = kfac.value_and_grad(loss_fn, found)(params, (x, y))
            state = kfac.observe(state, factors)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        for _ in range(3):
            params, state = step(params, state)
        return params

    together, apart = train(scanned, together), train(separate, apart)
    for k in range(3):
        assert_close(jax.tree.map(lambda x: x[k], together["stack"]), apart[f"layer{k}"], 1e-4)  # noqa: B023


def test_the_learning_rate_comes_after_momentum():
    """Check that everything stops at once if the rate falls to zero."""
    tx = plain_kfac(lambda t: jnp.where(t < 3, 0.1, 0.0), layers(), weight_decay=0.1)
    found = history(tx, steps=5)
    assert differ(found[2][0], found[1][0])
    assert_equal(found[4][0], found[2][0])


def test_the_learning_rate_inside_the_momentum():
    """Check `v <- m v - lr p`, `w <- w + v - lr wd w`, with the bare transformation's preconditioned gradients."""
    rates, decay, momentum = [0.1, 0.1, 0.05, 0.0125], 0.25, 0.5
    bare = history(kfac.scale_by_kfac(layers()))  # its updates do not depend on the parameters

    def rate(count):
        return jnp.asarray(rates)[count]

    options = {"momentum": momentum, "weight_decay": decay, "lr_in_momentum": True}
    found = history(plain_kfac(rate, layers(), **options))
    params, velocity = initial(), jax.tree.map(jnp.zeros_like, initial())
    for lr, (_, _, p), (after, _, _) in zip(rates, bare, found, strict=True):
        velocity = jax.tree.map(lambda v, p, lr=lr: momentum * v - lr * p, velocity, p)
        params = jax.tree.map(lambda w, v, lr=lr: w + v - lr * decay * w, params, velocity)
        assert_close(after, params, 1e-5)


def test_weight_decay_is_decoupled_and_masked():
    plain = run(plain_kfac(0.1, layers()), steps=1)[0]
    decayed = run(plain_kfac(0.1, layers(), weight_decay=0.5), steps=1)[0]
    assert_close(decayed, jax.tree.map(lambda p, q: p - 0.1 * 0.5 * q, plain, initial()), 1e-6)
    mask = jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key == "kernel", initial())
    masked = run(plain_kfac(0.1, layers(), weight_decay=0.5, weight_decay_mask=mask), steps=1)[0]
    assert_close(masked["out"], decayed["out"], 1e-6)
    assert_close(masked["first"]["bias"], plain["first"]["bias"], 1e-6)


@pytest.mark.slow
def test_a_few_steps_get_further_than_gradient_descent_in_ten_times_as_many():
    """Classify by features with very different sizes. Gradient descent uses the best of many rates."""
    rng = np.random.default_rng(0)
    sizes = np.geomspace(0.03, 3, 6)
    x = jnp.asarray(rng.normal(size=(64, 6)) * sizes, jnp.float32)
    noise = rng.normal(size=(64, 3))
    y = jnp.asarray(np.argmax(np.asarray(x) / sizes @ rng.normal(size=(6, 3)) + 0.5 * noise, -1))
    params = {"kernel": jnp.zeros((6, 3)), "bias": jnp.zeros(3)}

    def classify(params, batch):
        logits = batch[0] @ params["kernel"] + params["bias"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

    found = kfac.find_layers(classify, params, (x, y))
    tx = plain_kfac(1.0, found, damping=1e-3, momentum=0.5)

    @jax.jit
    def kfac_step(params, state):
        _, grads, factors = kfac.value_and_grad(classify, found)(params, (x, y))
        state = kfac.observe(state, factors)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    ours, state = params, tx.init(params)
    for _ in range(15):
        ours, state = kfac_step(ours, state)

    @jax.jit
    @jax.vmap
    def descend(rate):
        def step(params, _):
            grads = jax.grad(classify)(params, (x, y))
            return jax.tree.map(lambda p, g: p - rate * g, params, grads), None

        return classify(jax.lax.scan(step, params, length=150)[0], (x, y))

    assert float(classify(ours, (x, y))) < float(jnp.nanmin(descend(jnp.geomspace(1e-2, 30, 30))))


# -- axes --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("communication_dtype", ["bfloat16", "float32"])
def test_factors_are_averaged_over_a_named_axis(communication_dtype):
    tx = kfac.scale_by_kfac(layers(), distribution=kfac.Distribution("devices"))
    grads = measured(0)[0]
    pair = jax.tree.map(lambda *xs: jnp.stack(xs), *(measured(k)[1] for k in range(2)))

    def update(factors):
        return tx.update(grads, kfac.observe(tx.init(initial()), factors))

    sent = jax.tree.map(lambda x: x.astype(communication_dtype), pair)  # as value_and_grad sends it
    updates, state = jax.jit(jax.vmap(update, axis_name="devices"))(sent)
    mean = jax.tree.map(lambda x: x.mean(0), pair)
    _, expected_state, expected = run(kfac.scale_by_kfac(layers()), steps=1, measured=lambda _: (grads, mean))
    found = field_of(jax.jit(kfac.state.gather_state)(state), "factors")
    exact = communication_dtype == "float32"
    assert_close(found, field_of(expected_state, "factors"), 1e-6 if exact else 1e-2)
    assert differ(found, field_of(expected_state, "factors")) != exact
    if exact:
        for k in range(2):
            assert_close(jax.tree.map(lambda x, k=k: x[k], updates), expected, 1e-5)


# There are two Kronecker blocks of 4x4 and 4x4, one on each device. Their triangles have 10 elements. Two unit-wise
# blocks of 4x2x2 and 4x1x1 are also one on each device, but have different shapes, so each device first gets or sends
# half of both. Small messages follow: the counts of faults in statistics and inversions, the gradients' norm, whether
# the result is finite, its norm, and the worst condition and age.
STATISTICS = [("reduce_scatter", "2x20xf32"), ("reduce_scatter", "2x10xf32"), ("all_to_all", "2x8xf32")]
DIRECTIONS = [("all_gather", "1x16xf32"), ("all_to_all", "2x4xf32"), ("all_gather", "1x6xf32")]
SMALL = [("all_reduce", "2xi32"), ("all_reduce", "f32")], [("all_reduce", "2xf32"), ("all_reduce", "2xf32")]

SENT = {
    "axis_name": ({}, STATISTICS),
    # Statistics already come from the global batch.
    "mesh": ({"mesh": True}, []),
}
assert set(SENT) == DEVICES


@pytest.mark.parametrize("option", SENT)
def test_what_is_sent_between_devices(option):
    options, statistics = SENT[option]
    mesh = Mesh(jax.devices()[:2], ("devices",))
    options = options | ({"mesh": mesh} if "mesh" in options else {})
    tx = kfac.scale_by_kfac(layers(), distribution=kfac.Distribution("devices", **options))
    init, specs = tx.init, kfac.state.state_specs(tx, initial(), "devices")

    def update(grads, state, factors):
        state = kfac.observe(state, factors)
        return tx.update(grads, state)

    if "mesh" not in options:
        init = jax.shard_map(init, mesh=mesh, in_specs=P(), out_specs=specs)
        update = jax.shard_map(update, mesh=mesh, in_specs=(P(), specs, P()), out_specs=(P(), specs))
    state = jax.eval_shape(init, initial())
    program = jax.jit(update).lower(measured(0)[0], state, measured(0)[1]).as_text()
    messages = r'"stablehlo\.(reduce_scatter|all_reduce|all_gather|all_to_all)".*?: \(tensor<(\w+)>\) ->'
    before, after = SMALL
    assert re.findall(messages, program, flags=re.DOTALL) == statistics + before + DIRECTIONS + after
    assignment = state.settings.assignments["kronecker_4x4"]
    assert (assignment.blocks, assignment.devices, assignment.rest) == (2, 2, 0)


def test_without_an_axis_nothing_is_sent():
    tx = kfac.scale_by_kfac(layers())
    state = jax.eval_shape(tx.init, initial())
    program = jax.jit(lambda g, s, f: tx.update(g, kfac.observe(s, f))).lower(measured(0)[0], state, measured(0)[1])
    assert not re.search("reduce_scatter|all_reduce|all_gather", program.as_text())


# -- bad arguments -----------------------------------------------------------------------------------------------------

BAD = {
    "learning_rate": [-0.1, float("nan"), float("inf"), None, "fast", np.ones(2), jnp.array(-1.0)],
    "layers": [None, [], "layers", initial()],
    "momentum": [-0.1, 1.0, 1.5, float("nan"), "0.9"],
    "nesterov": ["yes", None, 1],
    "lr_in_momentum": ["yes", None, 1],
    "weight_decay": [-1e-4, float("inf"), "small"],
    "weight_decay_mask": [7],
    "kl_clip": [0, -1.0, float("nan"), "tight"],
    "trust_ratio": [0, -1.0, float("inf"), "much"],
    "damping": [0, 0.0, -1e-3, float("nan"), float("inf"), None, "0.001", 1e-60, jnp.array(-1.0), jnp.ones(3)],
    "factor_ema_decay": [-0.1, 1, 1.0, 1 - 1e-12, float("nan"), "slow"],
    "inverse_update_period": [0, -1, 2.5, True, "10", float("nan"), -float("inf"), lambda t: 1, None],
    "interval_warmup_steps": [-1, 1.5, "10"],
    "statistics_period": [0, -1, 2.5, "10", None],
    "preconditioner": ["eigh", None, 3, kfac.Cholesky],
    "unitwise_damping_scale": [0, -1.0, float("inf"), None],
    "distribution": ["devices", 8, {}],
}
BAD_FIELDS = {
    "precision": ["float16", "fp32", None, 32],
    "scale_damping": ["yes", None, 1],
    "axis_name": [3, 1.5, ("data", 3)],
    "mesh": ["devices", 8],
    "owner_axes": [3, 1.5, ("data", 3)],
    "communication_dtype": ["float16", None, 16],
}
INVERSES = [kfac.Cholesky(), kfac.Eigh(), kfac.EKFAC()]


def test_the_table_of_bad_arguments_is_complete():
    assert set(BAD) == set(ALL_OPTIONS)
    assert set(BAD_FIELDS) == INVERSE_FIELDS | DEVICES | OTHER_FIELDS


@pytest.mark.parametrize(("option", "value"), [(option, value) for option, values in BAD.items() for value in values])
def test_a_bad_argument_is_named_with_its_value(option, value):
    factories = [kfac.natural_gradient]
    factories += [kfac.kfac] * (option in KFAC_OPTIONS) + [kfac.scale_by_kfac] * (option in SCALE_OPTIONS)
    for factory in factories:
        options = {"layers": layers(), **({} if factory is kfac.scale_by_kfac else {"learning_rate": 0.1})}
        options |= {"weight_decay": 0.1} if option == "weight_decay_mask" else {}
        if factory is kfac.kfac and value is None and option in ("damping", "inverse_update_period"):
            continue  # None selects a default by the preconditioner or by `overhead`
        with pytest.raises((ValueError, TypeError), match=option) as error:
            factory(**{**options, option: value})
        shown = (
            type(value).__name__ if option == "layers" else value.__name__ if isinstance(value, type) else repr(value)
        )
        assert shown in str(error.value)


@pytest.mark.parametrize("value", [0, -0.1, float("nan"), "little", None])
def test_a_bad_cost_is_named_with_its_value(value):
    with pytest.raises(ValueError, match="overhead") as error:
        kfac.kfac(0.1, layers(), overhead=value)
    assert repr(value) in str(error.value)


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in BAD_FIELDS.items() for value in values]
)
def test_a_bad_field_is_named_with_its_value(field, value):
    for make in (kfac.Cholesky, kfac.Eigh, kfac.EKFAC, kfac.SOAP) if field in INVERSE_FIELDS else (kfac.Distribution,):
        with pytest.raises(ValueError, match=field) as error:
            make(**{field: value})
        assert repr(value) in str(error.value)


def test_options_that_would_silently_do_nothing_are_errors():
    with pytest.raises(ValueError, match="trust_ratio"):
        plain_kfac(0.1, layers(), trust_ratio=1.0, lr_in_momentum=True)
    with pytest.raises(ValueError, match="weight_decay_mask"):
        plain_kfac(0.1, layers(), weight_decay_mask=lambda params: params)


@pytest.mark.parametrize("option", ["nesterov", "lr_in_momentum"])
def test_natural_gradient_without_momentum_is_the_same_in_all_forms(option):
    """Check that without momentum, the forms of the momentum give the same step, also for the skipped parameter."""
    _, _, expected = run(plain_kfac(0.1, layers(), momentum=None), steps=2)
    _, _, found = run(plain_kfac(0.1, layers(), momentum=None, **{option: True}), steps=2)
    assert_equal(found, expected)


# -- errors of update, which come while it is traced -------------------------------------------------------------------


def refuse(match, grads=None, factors=None, params=None):
    tx = plain_kfac(0.1, layers())
    good_grads, good_factors = measured(0)
    state = tx.init(initial())
    with pytest.raises(ValueError, match=match):
        jax.eval_shape(
            lambda g, f: tx.update(g, kfac.observe(state, f), initial()),
            good_grads if grads is None else grads,
            good_factors if factors is None else factors,
        )


def test_gradients_of_another_shape_are_refused():
    grads = measured(0)[0]
    refuse(
        r"'first/kernel' of layer 'first' must have shape \(3, 4\), but has \(4, 3\)",
        {**grads, "first": {"kernel": jnp.zeros((4, 3)), "bias": jnp.zeros(4)}},
    )
    refuse("'temperature'.*'temperature'.*shape", {**grads, "temperature": jnp.zeros(1)})


def test_gradients_of_another_structure_are_refused():
    grads = measured(0)[0]
    refuse("'offset' of layer 'offset' is missing", {k: v for k, v in grads.items() if k != "offset"})
    refuse("'first/bias' of layer 'first' is missing", {**grads, "first": {"kernel": grads["first"]["kernel"]}})
    refuse("'more'", {**grads, "more": jnp.zeros(3)})
    refuse("no leaves|missing", {})


def test_parameters_of_another_model_are_refused():
    tx = kfac.scale_by_kfac(layers())
    with pytest.raises(ValueError, match=r"'offset'.*\(4,\).*\(5,\)"):
        tx.init({**initial(), "offset": jnp.zeros(5)})


def test_factors_of_other_layers_or_shapes_are_refused():
    factors = dict(measured(0)[1])
    refuse("without layer 'norm'", factors=kfac.Factors({k: v for k, v in factors.items() if k != "norm"}))
    refuse("with layer 'more'", factors=kfac.Factors({**factors, "more": factors["norm"]}))
    other = Kronecker(jnp.zeros((4, 4)), jnp.zeros((3, 3)))
    refuse(
        r"layer 'out': G must have shape \(4, 4\), but has \(3, 3\)", factors=kfac.Factors({**factors, "out": other})
    )
    refuse("layer 'out': A must have shape", factors=kfac.Factors({**factors, "out": Unitwise(jnp.zeros((4, 1, 1)))}))
    stacked = jax.tree.map(lambda x: x[None], measured(0)[1])
    refuse(r"layer 'first': A must have shape \(4, 4\), but has \(1, 4, 4\)", factors=stacked)
    refuse("factors must be what kfac.statistics returns, but is dict", factors=factors)
    refuse("factors must be", factors=measured(0)[0])


# -- diagnostics -------------------------------------------------------------------------------------------------------


def test_diagnostics_by_their_definitions():
    tx = plain_kfac(0.1, layers(), damping=0.5, kl_clip=1e-3)
    grads, _ = measured(0)
    _, state, _ = run(tx, steps=1)
    found = kfac.diagnostics(state)
    assert all(x.shape == () for x in found.values())
    covered = [g for path, g in jax.tree_util.tree_leaves_with_path(grads) if path[0].key != "temperature"]
    np.testing.assert_allclose(found["gradient_norm"], optax.tree.norm(covered), rtol=1e-6)
    _, _, directions = run(kfac.scale_by_kfac(layers(), damping=0.5), steps=1)
    covered = [v for path, v in jax.tree_util.tree_leaves_with_path(directions) if path[0].key != "temperature"]
    np.testing.assert_allclose(found["preconditioned_norm"], optax.tree.norm(covered), rtol=1e-5)
    assert found["damping"] == 0.5
    inverses, conditions = field_of(state, "preconditioner"), []
    for stack in jax.tree.leaves(inverses["kronecker_4x4"]):
        conditions += [np.linalg.cond(x, 1) for x in stack]
    for name in ("unitwise_4x2", "unitwise_4x1"):
        conditions += [np.linalg.cond(x, 1) for x in inverses[name][0]]
    np.testing.assert_allclose(found["condition"], max(conditions), rtol=1e-3)
    for name in ("inverse_age", "skipped_statistics", "failed_inversions", "skipped_steps"):
        assert found[name] == 0


def test_diagnostics_of_no_or_two_preconditioners_are_refused():
    with pytest.raises(ValueError, match="opt_state holds no state of kfac"):
        kfac.diagnostics(optax.adam(0.1).init(initial()))
    state = jax.jit(kfac.scale_by_kfac(layers()).init)(initial())
    with pytest.raises(ValueError, match="holds 2"):
        kfac.diagnostics((state, state))


@pytest.mark.slow
def test_running_averages_are_written_in_the_place_of_the_old_ones():
    """Check the memory of a step: stacked factors and gradients, and a refresh, but no second copy of its averages."""

    def loss(params, x):
        return jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"]) ** 2)

    params = {"a": jnp.zeros((400, 400)), "b": jnp.zeros((400, 400))}
    x = jnp.zeros((8, 400))
    found = kfac.find_layers(loss, params, x)
    tx = kfac.scale_by_kfac(found, damping=1e-2)
    state = jax.eval_shape(tx.init, params)
    _, grads, factors = jax.eval_shape(kfac.value_and_grad(loss, found), params, x)
    update = jax.jit(lambda g, s, f: tx.update(g, kfac.observe(s, f)), donate_argnums=(0, 1))
    temporary = update.lower(grads, state, factors).compile().memory_analysis().temp_size_in_bytes
    held = sum(4 * leaf.size for leaf in jax.tree.leaves(factors))
    stacked = sum(4 * leaf.size for leaf in jax.tree.leaves(grads))
    assert temporary < 2 * held + stacked + 10_000  # copies of the averages made it 3.8 times `held`
