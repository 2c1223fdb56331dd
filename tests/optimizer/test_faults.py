"""Test that non-finite values and failed inversions are skipped and counted, and that training goes on."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import kfac
from kfac.types import Kronecker
from problem import (
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
    state_of,
    stepper,
)

BAD = [float("nan"), float("inf"), -float("inf")]


def spoil(tree, *path, value=float("nan")):
    """Replace an element of a single leaf."""

    def replace(p, leaf):
        names = tuple(str(getattr(key, "key", getattr(key, "name", key))) for key in p)
        return leaf.at[(0,) * leaf.ndim].set(value) if names == path else leaf

    spoilt = jax.tree_util.tree_map_with_path(replace, tree)
    assert differ(spoilt, tree)
    return spoilt


def without(state, *metrics):
    """Return the state without these counters, and without the flags for a rejected step and for the intervals.

    The intervals between statistics and between refreshes go on in a rejected step.
    """
    return state._replace(
        step_rejected=jnp.array(False),
        due=jnp.array(False),
        refresh_due=jnp.array(False),
        metrics=state.metrics._replace(**dict.fromkeys(metrics, jnp.zeros(()))),
    )


# The location of each block in the state.
STACKS = {"first": ("kronecker_4x4", 0), "out": ("kronecker_4x4", 1), "norm": ("unitwise_4x2", 0)}
STACKS["offset"] = ("unitwise_4x1", 0)


@pytest.fixture(scope="module")
def clean():
    tx = kfac.scale_by_kfac(layers())
    return tx, stepper(tx), history(tx, steps=4)


@pytest.mark.parametrize("value", BAD[:2])
@pytest.mark.parametrize(("layer", "factor"), [("first", "A"), ("out", "G"), ("norm", "F"), ("offset", "F")])
def test_only_the_layer_with_bad_statistics_leaves_them_out(clean, layer, factor, value):
    _, step, good = clean
    _, before, _ = good[1]
    params, grads, factors = initial(), *measured(2)
    _, state, updates = step(grads, before, params, spoil(factors, layer, factor, value=value))
    _, expected, _ = step(grads, before, params, factors)
    for name, (group, k) in STACKS.items():
        reference = before if name == layer else expected
        for found, kept in (
            (field_of(state, "factors"), field_of(reference, "factors")),
            (field_of(state, "weight"), field_of(reference, "weight")),
        ):
            # Both factors of a Kronecker block are kept, or neither.
            assert_equal(jax.tree.map(lambda x: x[k], found[group]), jax.tree.map(lambda x: x[k], kept[group]))  # noqa: B023
    assert state.metrics.skipped_statistics == 1
    assert state.metrics.skipped_steps == 0
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves((field_of(state, "preconditioner"), updates)))
    # The next good statistics continue the averages.
    _, state, _ = step(*measured(3)[:1], state, params, measured(3)[1])
    assert state.metrics.skipped_statistics == 1
    assert differ(field_of(state, "factors")[STACKS[layer][0]], field_of(before, "factors")[STACKS[layer][0]])


def test_bad_first_statistics_leave_their_layer_passing_through():
    tx = kfac.scale_by_kfac(layers())
    grads, factors = measured(0)
    _, state, updates = stepper(tx)(grads, tx.init(initial()), initial(), spoil(factors, "first", "G"))
    assert_equal(updates["first"], grads["first"])
    assert differ(updates["out"], grads["out"])
    np.testing.assert_array_equal(field_of(state, "weight")["kronecker_4x4"] > 0, [False, True])
    np.testing.assert_array_equal(field_of(state, "condition")["kronecker_4x4"] > 0, [False, True])
    assert state.metrics.failed_inversions == 0


@pytest.fixture(scope="module")
def before_refresh():
    options = {"weight_decay": 0.1, "kl_clip": 1e-3, "inverse_update_period": 3, "interval_warmup_steps": 0}
    tx = plain_kfac(0.1, layers(), distribution=kfac.Distribution(), **options)
    return stepper(tx), jax.jit(kfac.observe), history(tx, steps=3)


@pytest.mark.parametrize("steps", [2, 3])
@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("path", [("out", "kernel"), ("temperature",)])
def test_a_bad_gradient_leaves_everything_as_it_was(before_refresh, path, value, steps):
    """Check skipped parameters, too, and the fourth step, which is due to refresh."""
    step, observe, states = before_refresh
    params, state, _ = states[steps - 1]
    grads, factors = measured(steps)
    state = observe(state, factors)
    after, bad, updates = step(spoil(grads, *path, value=value), state, params)
    assert_equal(after, params)
    assert all(not np.any(x) for x in jax.tree.leaves(updates))
    # Factors, inverses, momentum and counts stay. Measurements of the step and fault counters change.
    measures = ("gradient_norm", "preconditioned_norm", "condition", "inverse_age", "skipped_steps")
    assert_equal(without(state_of(bad), *measures), without(state_of(state), *measures))
    assert_equal(bad[1], state[1])
    assert state_of(bad).step_rejected and not state_of(state).step_rejected
    assert kfac.diagnostics(bad)["skipped_steps"] == 1
    assert kfac.diagnostics(bad)["skipped_statistics"] == 0
    # The next good step does the same as this step would have done.
    later, good, _ = step(grads, bad, params)
    expected, untouched, _ = step(grads, state, params)
    assert_equal(later, expected)
    assert state_of(good).metrics.inverse_age == (0 if steps == 3 else 2)
    assert_equal(without(state_of(good), *measures), without(state_of(untouched), *measures))
    assert kfac.diagnostics(good)["skipped_steps"] == 1


@pytest.mark.slow
def test_schedules_stay_together_when_a_step_is_skipped():
    """Check that the norm constraint uses the applied rate, and that damping and momentum belong to the same step."""
    options = {
        "kl_clip": 1e-4,
        "damping": lambda t: 0.1 / (1 + t),
        "momentum": lambda t: jnp.where(t < 1, 0.0, 0.9),
        "trust_ratio": lambda t: 1.0 / (1 + t),
        "weight_decay": lambda t: 0.1 * t,
    }
    tx = plain_kfac(lambda t: 0.5**t, layers(), **options)
    step = stepper(tx)
    bad = jax.tree.map(lambda x: x * jnp.nan, measured(0)[0])
    params, state = initial(), jax.jit(tx.init)(initial())
    for t, skipped in enumerate([True, False, True, True, False, False]):
        grads, factors = (bad, None) if skipped else measured(t)
        params, state, _ = step(grads, state, params, factors)

    def good_only(k):
        return measured([1, 4, 5][k])

    expected, expected_state, _ = run(tx, steps=3, measured=good_only)
    assert_equal(params, expected)
    assert kfac.diagnostics(state)["skipped_steps"] == 3
    np.testing.assert_array_equal(
        kfac.diagnostics(state)["kl_clip_scale"], kfac.diagnostics(expected_state)["kl_clip_scale"]
    )


def test_a_preconditioned_gradient_that_overflows_is_a_skipped_step():
    tx = plain_kfac(0.1, layers(), damping=1e-6)
    params, state, _ = history(tx, steps=1)[-1]
    grads = jax.tree.map(lambda x: jnp.sign(x) * 3e38, measured(1)[0])
    after, bad, _ = stepper(tx)(grads, state, params, None)
    assert_equal(after, params)
    assert kfac.diagnostics(bad)["skipped_steps"] == 1
    assert state_of(bad).count == 1
    assert_equal(bad[1], state[1])


def test_scale_by_kfac_alone_passes_a_bad_gradient_on_but_keeps_its_state():
    tx = kfac.scale_by_kfac(layers())
    _, state, _ = history(tx, steps=1)[-1]
    state = jax.jit(kfac.observe)(state, measured(1)[1])
    _, bad, updates = stepper(tx)(spoil(measured(1)[0], "out", "kernel"), state, initial())
    assert not np.all(np.isfinite(updates["out"]["kernel"]))
    measures = ("gradient_norm", "preconditioned_norm", "condition", "inverse_age", "skipped_steps")
    assert_equal(without(bad, *measures), without(state, *measures))
    assert kfac.diagnostics(bad)["skipped_steps"] == 1


@pytest.mark.slow
def test_a_guard_around_the_optimizer_is_counted_once():
    for tx in (
        optax.apply_if_finite(plain_kfac(0.1, layers()), 5),
        optax.apply_if_finite(kfac.scale_by_kfac(layers()), 5),
        optax.chain(optax.apply_if_finite(optax.scale(1.0), 5), plain_kfac(0.1, layers())),
    ):
        params, state = initial(), tx.init(initial())
        step = stepper(tx)
        for t in range(2):
            bad = spoil(measured(t)[0], "out", "kernel")
            params, state, _ = step(bad if t == 0 else measured(t)[0], state, params, measured(t)[1])
        # The last wrapper's outer guard set the bad gradient to zero before the preconditioner saw it.
        assert kfac.diagnostics(state)["skipped_steps"] == (0 if isinstance(state[0], optax.ApplyIfFiniteState) else 1)
        assert differ(params, initial())


def float16_step(gradient, scale=1.0):
    """Step with float16 gradients for a kernel, whose update grows a thousandfold, and for a skipped vector.

    Return the updates and the number of skipped steps.
    """
    params = {"kernel": jnp.zeros((2, 2), jnp.float16), "free": jnp.zeros(4096, jnp.float16)}

    def loss(params, x):
        return jnp.mean((x @ params["kernel"]) ** 2) + jnp.sum(params["free"])

    found = kfac.find_layers(loss, params, jnp.ones((3, 2), jnp.float16), rules={"free": "skip"})
    tx = plain_kfac(1.0, found, damping=1e-3, momentum=0.5)
    tiny = kfac.Factors({"kernel": Kronecker(1e-6 * jnp.eye(2), 1e-6 * jnp.eye(2))})
    grads = {"kernel": jnp.full((2, 2), scale, jnp.float16), "free": jnp.full(4096, gradient, jnp.float16)}
    updates, state = jax.jit(observing(tx))(grads, tx.init(params), params, factors=tiny)
    return updates, kfac.diagnostics(state)["skipped_steps"]


def test_float16_gradients_whose_sum_has_no_float16_are_taken():
    updates, skipped = float16_step(gradient=100.0)
    assert skipped == 0
    assert np.all(updates["free"] == -100) and np.all(np.abs(updates["kernel"]) > 100)


def test_a_preconditioned_gradient_beyond_float16_is_refused():
    updates, skipped = float16_step(gradient=1.0, scale=200.0)
    assert skipped == 1
    assert not np.any(jax.tree.leaves(updates)[0]) and not np.any(jax.tree.leaves(updates)[1])


def test_large_gradients_in_float64_are_taken(x64):
    """Check gradients whose squared norm fits float64, but not float32."""
    found = kfac.find_layers(loss_fn, initial(jnp.float64), batch(0, dtype=jnp.float64), rules={"temperature": "skip"})
    tx = kfac.scale_by_kfac(found)
    grads = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 1e25), initial(jnp.float64))
    updates, state = jax.jit(tx.update)(grads, tx.init(initial(jnp.float64)))
    assert state.metrics.skipped_steps == 0 and state.count == 1
    assert_equal(updates, grads)  # there are no statistics yet


# -- inversions --------------------------------------------------------------------------------------------------------


def indefinite(factors, layer):
    block = factors[layer]
    return kfac.Factors({**factors, layer: type(block)(*(-10 * jnp.abs(x) for x in jax.tree.leaves(block)))})


@pytest.fixture(scope="module")
def forgetful():
    tx = kfac.scale_by_kfac(layers(), factor_ema_decay=0.0)
    return stepper(tx), run(tx, steps=1)[1]


@pytest.mark.parametrize("layer", STACKS)
def test_a_block_that_cannot_be_inverted_keeps_its_last_inverse(forgetful, layer):
    step, state = forgetful
    grads, factors = measured(1)
    _, bad, updates = step(grads, state, initial(), indefinite(factors, layer))
    _, good, _ = step(grads, state, initial(), factors)
    assert bad.metrics.failed_inversions == 1
    for name, (group, k) in STACKS.items():
        expected = state if name == layer else good
        for found, right in zip(
            jax.tree.leaves(field_of(bad, "preconditioner")[group]),
            jax.tree.leaves(field_of(expected, "preconditioner")[group]),
            strict=True,
        ):
            assert_close(found[k], right[k], 0 if name == layer else 1e-6)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(updates))
    # Good statistics end the failures.
    _, after, _ = step(grads, bad, initial(), factors)
    assert after.metrics.failed_inversions == 1
    assert_close(field_of(after, "preconditioner"), field_of(good, "preconditioner"), 1e-6)


def test_a_block_that_never_was_inverted_passes_through():
    tx = kfac.scale_by_kfac(layers())
    grads, factors = measured(0)
    _, state, updates = stepper(tx)(grads, tx.init(initial()), initial(), indefinite(factors, "first"))
    assert_equal(updates["first"], grads["first"])
    np.testing.assert_array_equal(field_of(state, "condition")["kronecker_4x4"] > 0, [False, True])
    assert state.metrics.failed_inversions == 1


def test_training_survives_a_damping_that_a_schedule_lets_go_astray():
    damping = lambda t: jnp.asarray([0.1, -1.0, jnp.nan, 0.0, 0.1])[t]  # noqa: E731
    tx = plain_kfac(0.01, layers(), damping=damping)
    for params, state, _ in history(tx, steps=5):
        assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves((params, field_of(state, "preconditioner"))))
    assert kfac.diagnostics(state)["failed_inversions"] >= 8
    assert kfac.diagnostics(state)["damping"] == np.float32(0.1)


@pytest.mark.slow
def test_training_through_faults_of_all_kinds_still_learns():
    tx = plain_kfac(0.05, layers(), damping=1e-2)
    grad_fn = jax.jit(kfac.value_and_grad(loss_fn, layers()))
    step = stepper(tx)
    params, state = initial(), tx.init(initial())
    first = loss_fn(params, batch(0, 256))
    for t in range(20):
        _, grads, factors = grad_fn(params, batch(t))
        if t % 5 == 1:
            grads = spoil(grads, "norm", "scale")
        if t % 5 == 2:
            factors = spoil(factors, "first", "A", value=float("inf"))
        if t % 5 == 3:
            factors = indefinite(factors, "out")
        params, state, _ = step(grads, state, params, None if t % 5 == 4 else factors)
    assert loss_fn(params, batch(0, 256)) < 0.9 * first
    found = kfac.diagnostics(state)
    assert found["skipped_steps"] == 4
    assert found["skipped_statistics"] == 4


# -- loss scaling ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1024.0, 2.0**15])
def test_statistics_of_a_scaled_loss_are_unscaled(scale):
    def scaled(params, batch):
        return scale * loss_fn(params, batch)

    _, _, factors = jax.jit(kfac.value_and_grad(scaled, layers()))(initial(), batch(0))
    expected = measured(0)[1]
    assert differ(factors, expected)
    assert_close(factors.unscale(scale), expected, 1e-6)
    assert_equal(factors.unscale(scale)["first"].A, factors["first"].A)
    # The square of this scale is not finite, but the result is.
    tiny = jax.tree.map(lambda x: x * 1e-10, expected)
    assert_close(jax.jit(lambda f, s: f.unscale(s))(tiny, 1e20)["first"].G, tiny["first"].G / 1e20 / 1e20, 1e-6)


def test_loss_scaling_in_float16():
    """Train a float16 network whose gradients are too small without a loss scale."""
    found = kfac.find_layers(loss_fn, initial(jnp.float16), batch(0, dtype=jnp.float16), rules={"temperature": "skip"})
    tx = plain_kfac(0.05, found, damping=1e-2)
    params, state = initial(), tx.init(initial())

    @jax.jit
    def step(params, state, batch, scale):
        half = jax.tree.map(lambda x: x.astype(jnp.float16), params)
        scaled = lambda params, batch: scale * loss_fn(params, batch)  # noqa: E731
        loss, grads, factors = kfac.value_and_grad(scaled, found)(half, batch)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32) / scale, grads)
        state = kfac.observe(state, factors.unscale(scale))
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss / scale

    half_batch = batch(0, dtype=jnp.float16)
    after, new, _ = step(params, state, half_batch, 1024.0)
    unscaled, _, _ = stepper(plain_kfac(0.05, layers(), damping=1e-2))(measured(0)[0], state, params, measured(0)[1])
    assert_close(
        jax.tree.map(lambda a, b: a - b, after, params), jax.tree.map(lambda a, b: a - b, unscaled, params), 0.1
    )
    # A scale that overflows skips the step.
    stuck, new, _ = step(after, new, half_batch, 1e8)
    assert_equal(stuck, after)
    assert kfac.diagnostics(new)["skipped_steps"] == 1
    _, new, _ = step(stuck, new, half_batch, 1024.0)
    assert kfac.diagnostics(new)["skipped_steps"] == 1


# -- sources of faults -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", BAD[:2])
def test_bad_activations_leave_everything_as_it_was(clean, value):
    """Spoil an element of a single example, which affects the whole loss."""
    _, step, states = clean
    params, state, _ = states[1]
    x, labels = batch(2)
    grads, factors = _gradients(params, (x.at[3, 1].set(value), labels))
    assert not all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(grads))
    observed = jax.jit(kfac.observe)(state, factors)
    for field in ("factors", "weight", "preconditioner", "condition"):
        assert_equal(field_of(observed, field), field_of(state, field))
    _, bad, _ = step(grads, observed, params)
    measures = ("gradient_norm", "preconditioned_norm", "condition", "inverse_age")
    measures += ("skipped_steps", "skipped_statistics")
    assert_equal(without(bad, *measures), without(observed, *measures))
    assert bad.metrics.skipped_steps == 1 and bad.metrics.skipped_statistics == len(STACKS)
    # With good activations, the step is the same as without the fault.
    _, after, updates = step(*_gradients(params, batch(2))[:1], bad, params, _gradients(params, batch(2))[1])
    _, expected, right = step(*_gradients(params, batch(2))[:1], state, params, _gradients(params, batch(2))[1])
    assert_equal(updates, right)
    assert_equal(without(after, *measures), without(expected, *measures))


def _gradients(params, batch):
    return _value_and_grad()(params, batch)[1:]


@functools.cache
def _value_and_grad():
    return jax.jit(kfac.value_and_grad(loss_fn, layers()))


@pytest.mark.parametrize("layer", STACKS)
def test_factors_of_low_rank_or_none_are_inverted(forgetful, layer):
    """Check a layer that is dead in this batch, and a layer that sees a single direction.

    Damping makes the factors of both definite.
    """
    step, state = forgetful
    grads, factors = measured(1)

    def rank_one(stack):
        ones = jnp.ones_like(stack[..., :1])
        return ones @ ones.mT

    for change in (jnp.zeros_like, rank_one):
        block = jax.tree.map(change, factors[layer])
        _, after, updates = step(grads, state, initial(), kfac.Factors({**factors, layer: block}))
        assert after.metrics.failed_inversions == 0
        group, k = STACKS[layer]
        assert differ(
            jax.tree.map(lambda x: x[k], field_of(after, "preconditioner")[group]),  # noqa: B023
            jax.tree.map(lambda x: x[k], field_of(state, "preconditioner")[group]),  # noqa: B023
        )
        for preconditioner in jax.tree.leaves(field_of(after, "preconditioner")):
            assert np.all(np.linalg.eigvalsh(preconditioner) > 0)
        assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(updates))


@pytest.mark.parametrize("layer", STACKS)
def test_an_inverse_outlives_any_number_of_failures_in_a_row(forgetful, layer):
    step, state = forgetful
    group, k = STACKS[layer]
    last = state
    for failures in range(1, 6):
        grads, factors = measured(failures)
        _, last, updates = step(grads, last, initial(), indefinite(factors, layer))
        for found, kept in zip(
            jax.tree.leaves(field_of(last, "preconditioner")[group]),
            jax.tree.leaves(field_of(state, "preconditioner")[group]),
            strict=True,
        ):
            assert_equal(found[k], kept[k])
        assert kfac.diagnostics(last)["failed_inversions"] == failures
        assert kfac.diagnostics(last)["inverse_age"] == failures
        assert last.count == state.count + failures
        assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(updates))
    grads, factors = measured(6)
    _, good, _ = step(grads, last, initial(), factors)
    _, never_failed, _ = step(grads, state, initial(), factors)
    assert kfac.diagnostics(good)["inverse_age"] == 0
    assert_close(field_of(good, "preconditioner"), field_of(never_failed, "preconditioner"), 1e-6)


# -- a single device of several ----------------------------------------------------------------------------------------

NOTHING, ACTIVATION, GRADIENT, STATISTIC, INDEFINITE = range(5)


@pytest.fixture(scope="module")
def devices():
    """Return a step on four devices, its parameters and its first state.

    An argument selects the third device's fault.
    """
    mesh = jax.make_mesh((4,), ("devices",), axis_types=(AxisType.Auto,))
    tx = plain_kfac(0.05, layers(), factor_ema_decay=0.0, distribution=kfac.Distribution("devices"))
    specs = kfac.state.state_specs(tx, initial(), "devices")

    def local_step(params, state, batch, fault, value):
        here = lax.axis_index("devices") == 2

        def strike(kind, tree, bad):
            return jax.tree.map(lambda x: jnp.where(here & (fault == kind), bad(x), x), tree)

        batch = strike(ACTIVATION, batch[0], lambda x: x.at[0, 0].set(value)), batch[1]
        _, grads, factors = kfac.value_and_grad(loss_fn, layers())(params, batch)
        # On JAX 0.11.2, the compiler crashes at `x.at[()].set(value)` in `shard_map`.
        grads = strike(GRADIENT, grads, lambda x: x.at[(0,) * x.ndim].set(value) if x.ndim else value)
        first, out = (factors[name].combined() for name in ("first", "out"))  # this device's whole factors
        out = dataclasses.replace(out, G=strike(STATISTIC, out.G, lambda x: x.at[0, 0].set(value)))
        first = dataclasses.replace(first, A=strike(INDEFINITE, first.A, lambda x: -1e3 * jnp.eye(x.shape[-1])))
        factors = kfac.Factors({**factors, "first": first, "out": out})
        state = kfac.observe(state, factors)
        updates, state = tx.update(lax.pmean(grads, "devices"), state, params)
        return optax.apply_updates(params, updates), state

    same, split = PartitionSpec(), PartitionSpec("devices")
    step = jax.jit(
        jax.shard_map(local_step, mesh=mesh, in_specs=(same, specs, split, same, same), out_specs=(same, specs))
    )
    init = jax.jit(jax.shard_map(tx.init, mesh=mesh, in_specs=same, out_specs=specs))
    params = jax.device_put(initial(), NamedSharding(mesh, same))

    def take(params, state, t, fault=NOTHING, value=0.0):
        return jax.block_until_ready(step(params, state, batch(t, 32), fault, value))

    return take, *take(params, init(params), 0)


@pytest.mark.slow
@pytest.mark.parametrize("value", BAD[:2])
@pytest.mark.parametrize("fault", [ACTIVATION, GRADIENT, STATISTIC, INDEFINITE])
def test_a_fault_on_one_device_of_four(devices, fault, value):
    """Check that all devices decide alike, that unaffected blocks are updated, and that the next step is good."""
    take, params, state = devices
    after, bad = take(params, state, 1, fault, value)
    expected, good = take(params, state, 1)
    counts = kfac.diagnostics(bad)
    assert counts["skipped_steps"] == (fault in (ACTIVATION, GRADIENT))
    # Non-finite activations spoil all statistics. A non-finite gradient spoils no statistics.
    assert counts["skipped_statistics"] == {STATISTIC: 1, ACTIVATION: len(STACKS)}.get(fault, 0)
    assert counts["failed_inversions"] == (fault == INDEFINITE)
    if fault in (ACTIVATION, GRADIENT):
        assert_equal(after, params)
        assert_equal(
            field_of(bad, "preconditioner"), field_of(state if fault == ACTIVATION else good, "preconditioner")
        )
    else:
        spoilt, whole = ("out", "first") if fault == STATISTIC else ("first", "out")
        assert differ(after[spoilt], expected[spoilt])
        assert_close(after[whole], expected[whole], 1e-6)
    # Every device has the same parameters.
    for leaf in jax.tree.leaves(after):
        for shard in leaf.addressable_shards:
            np.testing.assert_array_equal(shard.data, leaf)
    later, last = take(after, bad, 2)
    assert differ(later, after)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves((later, field_of(last, "preconditioner"))))
    assert kfac.diagnostics(last)["skipped_steps"] == counts["skipped_steps"]
