"""Test `adaptive_damping` against its rule, and against the reduction ratio from explicit Jacobians."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import kfac
from checking import normal
from problem import plain_kfac

N, D, HIDDEN, OUT = 8, 5, 4, 3
RATE = 0.1


def initial():
    return {"first": normal(0, D, HIDDEN, dtype=np.float32) / 2, "last": normal(1, HIDDEN, OUT, dtype=np.float32)}


def examples(seed=2, n=N):
    return normal(seed, n, D, dtype=np.float32), jnp.asarray(np.random.default_rng(seed).integers(0, OUT, n))


def outputs(params, x):
    return jnp.tanh(x @ params["first"]) @ params["last"]


def log_likelihood(likelihood, z, labels):
    target = jax.nn.one_hot(labels, OUT)
    if likelihood == "categorical":
        return optax.softmax_cross_entropy(z, target)
    if likelihood == "bernoulli":
        return optax.sigmoid_binary_cross_entropy(z, target).sum(-1)
    return 0.5 * jnp.sum((target - z) ** 2, axis=-1)


def loss_of(likelihood="categorical"):
    def loss(params, batch):
        x, labels = batch
        return log_likelihood(likelihood, kfac.mark_output(outputs(params, x), likelihood), labels).mean()

    return loss


def sgd(damping):
    """Return the simplest optimizer that depends on the damping."""
    return optax.sgd(RATE / damping)


def step_of(tx, loss, **options):
    @jax.jit
    def step(params, state, batch):
        grads = jax.grad(loss)(params, batch)
        changes, state = tx.update(grads, state, params, value_fn=lambda p: loss(p, batch), **options)
        return optax.apply_updates(params, changes), state, changes

    return step


def exact_ratio(likelihood, params, changes, batch):
    """Compute the reduction ratio in float64 from the full Jacobian and each row's Hessian."""

    @jax.jit
    def ratio(params, changes, batch):
        x, labels = batch
        flat, rebuild = jax.flatten_util.ravel_pytree(params)
        d = jax.flatten_util.ravel_pytree(changes)[0]

        def z(flat):
            return outputs(rebuild(flat), x)

        def h(flat):
            return log_likelihood(likelihood, z(flat), labels).mean()

        jacobian = jax.jacobian(z)(flat)
        hessian = jax.vmap(jax.hessian(functools.partial(log_likelihood, likelihood)))(z(flat), labels)
        fisher = jnp.einsum("rcp,rcd,rdq->pq", jacobian, hessian, jacobian) / len(x)
        predicted = jax.grad(h)(flat) @ d + d @ fisher @ d / 2
        return (h(flat + d) - h(flat)) / predicted

    with jax.enable_x64(True):
        wide = [jax.tree.map(lambda x: np.asarray(x, np.float64), tree) for tree in (params, changes)]
        return float(ratio(*wide, (np.asarray(batch[0], np.float64), np.asarray(batch[1]))))


@pytest.mark.slow
@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli", "gaussian"])
def test_ratio_is_that_of_explicit_jacobians(likelihood):
    loss, batch, params = loss_of(likelihood), examples(), initial()
    tx = kfac.adaptive_damping(sgd, 0.5, every=1)
    _, state, changes = step_of(tx, loss)(params, jax.jit(tx.init)(params), batch)
    expected = exact_ratio(likelihood, params, changes, batch)
    assert abs(float(state.reduction_ratio) - expected) < 1e-4
    assert 0 < expected < 2


def squares(x):
    return 0.5 * jnp.sum(x**2, -1)


def vectors(w, batch):
    x, y = batch
    return squares(kfac.mark_output(x[:, 0] @ w, "gaussian") - y[:, 0]).mean()


def tokens(w, batch):
    x, y = batch
    return squares(kfac.mark_output(x @ w, "gaussian") - y).mean()


def sequences(w, batch):
    x, y = batch
    return squares(kfac.mark_output(x @ w, "gaussian") - y).sum() / len(x)


def two_marks(w, batch, rows=2, factor=5.0):
    """Compute a loss with two marked outputs, each averaged over its own rows.

    The second output comes from some of the examples and counts `factor` times.
    """
    x, y = batch
    inside = squares(kfac.mark_output(x[:, 0] @ w, "gaussian") - y[:, 0]).mean()
    edge = kfac.mark_output(x[:rows, 1] @ w - y[:rows, 1], "residual", weight=factor * len(x) / rows)
    return inside + factor * squares(edge).mean()


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("loss", [vectors, tokens, sequences, two_marks])
def test_ratio_of_least_squares_is_one(loss, devices):
    """Check that the quadratic model of least squares is exact, for any step and damping."""
    x, y = (np.random.default_rng(k).normal(size=(32, 8, d)) for k, d in ((0, D), (1, 3)))
    given = None if loss in (vectors, tokens) else 32 // devices
    if devices > 1 and loss is two_marks:
        loss = functools.partial(two_marks, rows=1)
    optimizer = lambda damping: optax.chain(optax.trace(0.5), optax.scale(-1 / (30 + damping)))  # noqa: E731
    tx = kfac.adaptive_damping(optimizer, 10.0, every=1, num_examples=given)

    def run(w, batch):
        state, ratios = tx.init(w), []
        for _ in range(3):
            grads = jax.grad(loss)(w, batch)
            grads = jax.lax.pmean(grads, "d") if devices > 1 else grads
            changes, state = tx.update(grads, state, w, value_fn=lambda w: loss(w, batch))
            w = optax.apply_updates(w, changes)
            ratios.append(state.reduction_ratio)
        return jnp.stack(ratios), state.next_damping

    with jax.enable_x64(True):
        w, batch = jnp.zeros((D, 3)), (jnp.asarray(x, float), jnp.asarray(y, float))
        if devices > 1:
            mesh = jax.make_mesh((devices,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
            run = jax.shard_map(run, mesh=mesh, in_specs=(P(), P("d")), out_specs=P(), check_vma=False)
        ratios, damping = jax.jit(run)(w, batch)
    np.testing.assert_allclose(ratios, 1, atol=1e-5)
    np.testing.assert_allclose(damping, 10 * 0.95**3, rtol=1e-5)


@pytest.mark.slow
def test_number_of_examples_that_is_not_clear():
    """Check that the error names the argument, and that passing this argument helps."""
    w, batch = jnp.zeros((D, 3)), (normal(0, 32, 8, D, dtype=np.float32), normal(1, 32, 8, 3, dtype=np.float32))
    for given in (None, 32):
        tx = kfac.adaptive_damping(sgd, 100.0, every=1, num_examples=given)
        update = functools.partial(tx.update, jax.grad(two_marks)(w, batch), tx.init(w), w)
        if given is None:
            with pytest.raises(ValueError, match="Pass num_examples= to adaptive_damping"):
                update(value_fn=lambda w: two_marks(w, batch))
        else:
            _, state = update(value_fn=lambda w: two_marks(w, batch))
            np.testing.assert_allclose(state.reduction_ratio, 1, atol=1e-3)


@pytest.mark.parametrize(
    ("rate", "expected"),
    [
        (1e-3, [1, 0.9**2, 0.9**2, 0.9**4]),  # a small step is predicted well
        (8.0, [1, 0.9**-2, 0.9**-2, 0.9**-4]),  # the loss falls, though the model predicts an increase
        (40.0, [3, 9, 27, 81]),  # the loss rises, so every step is rejected and measured
        (-0.1, [3, 9, 27, 81]),  # the model itself predicts no decrease
        (math.inf, [1, 1, 1, 1]),  # the optimizer makes no step at all
    ],
)
def test_rule(rate, expected):
    def optimizer(damping):
        del damping
        return optax.sgd(rate) if math.isfinite(rate) else optax.set_to_zero()

    tx, loss, params = kfac.adaptive_damping(optimizer, 0.01, every=2, decay=0.9), loss_of(), initial()
    step, state = step_of(tx, loss), tx.init(params)
    for factor in expected:
        moved, state, _ = step(params, state, examples())
        np.testing.assert_allclose(float(state.next_damping), 0.01 * factor, rtol=1e-5)
        assert (float(state.reduction_ratio) == 0) == (rate == math.inf)
        stays = all(jax.tree.leaves(jax.tree.map(jnp.array_equal, moved, params)))
        assert stays == bool(state.again) == (expected[-1] == 81) or rate == math.inf
    assert int(state.rejected_steps) == (4 if expected[-1] == 81 else 0)


def test_steps_taken_back_until_the_damping_is_enough():
    """Check recovery from a damping a million times too small, with which the bare optimizer diverges."""
    params, batch, loss = initial(), examples(), loss_of()

    def diverging(damping):
        return optax.chain(optax.trace(0.9), optax.scale_by_learning_rate(1e-3 / damping))

    tx = kfac.adaptive_damping(diverging, 1e-9, every=5, minimum=1e-12)
    step, state, losses = step_of(tx, loss), tx.init(params), [float(loss(params, batch))]
    for _ in range(40):
        params, state, _ = step(params, state, batch)
        losses.append(float(loss(params, batch)))
        if state.again:
            assert losses[-1] == losses[-2]
    assert 10 <= int(state.rejected_steps) < 25
    assert losses[-1] < losses[0]


def test_between_the_thresholds_the_damping_stays():
    tx = kfac.adaptive_damping(lambda damping: optax.sgd(0.5), 0.01, every=1, low=1e-6, high=1 - 1e-6)
    params = initial()
    _, state, _ = step_of(tx, loss_of())(params, tx.init(params), examples())
    assert 1e-6 < float(state.reduction_ratio) < 1 - 1e-6
    assert float(state.next_damping) == np.float32(0.01)


def test_adaptive_damping_holds_no_nan_that_jax_debug_nans_would_find():
    tx, params = kfac.adaptive_damping(lambda damping: optax.sgd(1e-3), 0.01, every=2), initial()
    with jax.debug_nans(True):
        step, state = step_of(tx, loss_of()), jax.jit(tx.init)(params)
        for _ in range(3):  # the third step is not measured
            params, state, _ = step(params, state, examples())
    assert float(state.reduction_ratio) > 0


def test_bounds():
    params = initial()
    for rate, expected in ((1e-3, 0.0095), (40.0, 0.0102)):  # the second step is rejected
        tx = kfac.adaptive_damping(lambda damping, r=rate: optax.sgd(r), 0.01, minimum=0.0095, maximum=0.0102, every=1)
        state = tx.init(params)
        for _ in range(2):
            _, state, _ = step_of(tx, loss_of())(params, state, examples())
        assert float(state.next_damping) == np.float32(expected)


@pytest.mark.slow
def test_losses_that_are_not_finite():
    params, batch = initial(), examples()

    def loss(params, batch):  # NaN away from the initial parameters
        moved = optax.tree.norm(optax.tree.sub(params, initial()))
        return loss_of()(params, batch) + jnp.where(moved > 0, jnp.nan, 0.0)

    tx = kfac.adaptive_damping(lambda damping: optax.sgd(0.01), 0.01, every=1)
    grads = jax.grad(loss_of())(params, batch)
    _, after = tx.update(grads, tx.init(params), params, value_fn=lambda p: loss(p, batch))
    assert float(after.reduction_ratio) == -math.inf
    np.testing.assert_allclose(float(after.next_damping), 0.03, rtol=1e-6)
    _, before = tx.update(grads, tx.init(params), params, value_fn=lambda p: loss_of()(p, batch) * jnp.nan)
    assert float(before.reduction_ratio) == 0
    assert float(before.next_damping) == np.float32(0.01)
    nans = jax.tree.map(lambda g: g * jnp.nan, grads)
    changes, back = tx.update(nans, tx.init(params), params, value_fn=lambda p: loss_of()(p, batch))
    assert back.rejected_steps == 1 and not any(map(np.any, jax.tree.leaves(changes)))


def kfac_of(loss, batch, **options):
    layers = kfac.find_layers(loss, initial(), batch)
    return layers, kfac.adaptive_damping(
        lambda damping: plain_kfac(
            RATE, layers, damping=damping, interval_warmup_steps=0, **options
        ),
        0.1, every=1,
    )  # fmt: skip


def trajectory(step, tx, params, batch, steps=2):
    state = jax.jit(tx.init)(params)
    for _ in range(steps):
        params, state = step(params, state, batch)
    return params, state


@pytest.mark.slow
def test_kfac_with_it():
    """Check that the damping reaches the inverses and the diagnostics."""
    loss, batch = loss_of(), examples()
    layers, tx = kfac_of(loss, batch)

    @jax.jit
    def step(params, state, batch):
        _, grads, factors = kfac.value_and_grad(loss, layers)(params, batch)
        state = kfac.observe(state, factors)
        changes, state = tx.update(grads, state, params, value_fn=lambda p: loss(p, batch))
        return optax.apply_updates(params, changes), state

    before, state = trajectory(step, tx, initial(), batch, steps=1)
    np.testing.assert_allclose(state.next_damping, 0.1 * 0.95, rtol=1e-6)
    fixed = plain_kfac(RATE, layers, damping=float(state.next_damping), interval_warmup_steps=0)

    @jax.jit
    def with_fixed_damping(params, state, batch):
        _, grads, factors = kfac.value_and_grad(loss, layers)(params, batch)
        state = kfac.observe(state, factors)
        changes, _ = fixed.update(grads, state, params)
        return optax.apply_updates(params, changes)

    expected = with_fixed_damping(before, state.inner, batch)
    params, state = step(before, state, batch)
    scalars = kfac.diagnostics(state)
    np.testing.assert_allclose(scalars["damping"], 0.1 * 0.95, rtol=1e-6)
    assert float(scalars["reduction_ratio"]) > 0.75
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


@functools.cache
def on_one_device():
    loss, batch = loss_of(), examples()
    layers, tx = kfac_of(loss, batch)

    def step(params, state, batch):
        _, grads, factors = kfac.value_and_grad(loss, layers)(params, batch)
        state = kfac.observe(state, factors)
        changes, state = tx.update(grads, state, params, value_fn=lambda p: loss(p, batch))
        return optax.apply_updates(params, changes), state

    return trajectory(jax.jit(step), tx, initial(), batch)


# Without its check of varying axes, shard_map differentiates in the same way as pmap.
@pytest.mark.slow
@pytest.mark.parametrize("mapped", ["shard_map", "unchecked shard_map", "pmap"])
def test_devices(mapped):
    """Check that four devices together measure the same as a single device."""
    loss, batch, devices = loss_of(), examples(), 4
    layers, _ = kfac_of(loss, batch)
    expected = on_one_device()
    parts = jax.tree.map(lambda x: x.reshape(devices, -1, *x.shape[1:]), batch)
    uses = {} if mapped == "shard_map" else {"distribution": kfac.Distribution("d")}
    _, several = kfac_of(loss, jax.tree.map(lambda x: x[0], parts), **uses)

    def local(params, batch):
        state = several.init(params)
        for _ in range(2):
            _, grads, factors = kfac.value_and_grad(loss, layers)(params, batch)
            grads = jax.lax.pmean(grads, "d")
            state = kfac.observe(state, factors)
            changes, state = several.update(grads, state, params, value_fn=lambda p: loss(p, batch))
            params = optax.apply_updates(params, changes)
        return params, state.next_damping, state.reduction_ratio

    if mapped == "pmap":
        found = jax.pmap(local, axis_name="d", in_axes=(None, 0))(initial(), parts)
        found = jax.tree.map(lambda x: x[0], found)
    else:
        mesh = jax.make_mesh((devices,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
        found = jax.jit(
            jax.shard_map(local, mesh=mesh, in_specs=(P(), P("d")), out_specs=P(), check_vma=mapped[0] == "s")
        )(initial(), batch)
    params, damping, ratio = found
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(expected[0]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(damping, expected[1].next_damping, rtol=1e-6)
    np.testing.assert_allclose(ratio, expected[1].reduction_ratio, rtol=1e-3)


def test_marks_inside_scan_and_vmap():
    loss, params, batch = loss_of(), initial(), examples()

    def scanned(params, batch):
        parts = jax.tree.map(lambda x: x.reshape(4, 2, *x.shape[1:]), batch)
        return jax.lax.scan(lambda total, part: (total + loss(params, part) / 4, None), jnp.zeros(()), parts)[0]

    def mapped(params, batch):
        return jax.vmap(lambda x, y: loss(params, (x[None], y[None])))(*batch).mean()

    ratios = []
    for other in (loss, scanned, mapped):
        tx = kfac.adaptive_damping(sgd, 0.5, every=1)
        ratios.append(float(step_of(tx, other)(params, tx.init(params), batch)[1].reduction_ratio))
    np.testing.assert_allclose(ratios, ratios[0], rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": 1e-3}, "optimizer must be a function"),
        ({"initial": 0.0}, "initial must lie in"),
        ({"initial": 10.0, "maximum": 1.0}, "initial must lie in"),
        ({"initial": optax.constant_schedule(1.0)}, "initial must be a number, but is a function"),
        ({"every": 0}, "every must be an integer, at least 1"),
        ({"decay": 1.0}, "decay must lie in"),
        ({"low": 0.8}, "low must lie in"),
        ({"high": 1.5}, "high must lie in"),
        ({"minimum": 0.0}, "minimum must lie in"),
        ({"maximum": 1e-9}, "maximum must lie in"),
        ({"num_examples": 0}, "num_examples must be a positive int"),
    ],
)
def test_arguments_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        kfac.adaptive_damping(**({"optimizer": sgd, "initial": 1e-3} | options))


def test_what_update_needs():
    params, batch = initial(), examples()
    tx = kfac.adaptive_damping(sgd, 0.5, every=1)
    state, loss = tx.init(params), loss_of()
    for given in ((None, lambda p: loss(p, batch)), (params, None)):
        with pytest.raises(ValueError, match=r"needs the parameters and the loss: update\(.*, value_fn=lambda params"):
            tx.update(params, state, given[0], value_fn=given[1])
    with pytest.raises(ValueError, match=r"adaptive_damping needs the output of the network: mark it"):
        tx.update(params, state, params, value_fn=lambda p: optax.tree.norm(p))
    first = next(iter(params))
    tx = optax.masked(tx, {name: name == first for name in params})
    with pytest.raises(ValueError, match=r"optax\.masked or optax\.partition hides some: put these inside"):
        tx.update(params, tx.init(params), params, value_fn=lambda p: loss(p, batch))
