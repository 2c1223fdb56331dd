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
from checking import normal, slow
from problem import state_of

pytestmark = pytest.mark.usefixtures("x64")
N, SCALE = 12, 8  # number of examples, and the index of the scale among all parameters


def loss_fn(params, batch):
    """Compute a residual for each example. No layer contains the scale, so its diagonal comes from gradients."""
    x, y = batch
    z = params["scale"] * (jnp.tanh(x @ params["w"] + params["b"]) @ params["out"])
    return 0.5 * jnp.sum(kfac.mark_output(z - y, "residual") ** 2) / len(x)


def problem(rate=1.0, part=slice(None), **options):
    """Return a problem, and a step whose products with `F` use a part of the batch."""
    params = {"w": normal(0, 3, 4), "b": normal(1, 4), "out": normal(2, 4, 1), "scale": jnp.asarray(0.5)}
    batch = normal(3, N, 3), normal(4, N, 1)
    layers = kfac.find_layers(loss_fn, params, batch)
    measure = kfac.value_and_grad(loss_fn, layers, fisher="expected")
    tx = kfac.gauss_newton(rate, layers, **options)
    own = jax.tree.map(lambda x: x[part], batch)

    @jax.jit
    def step(params, state, key):
        _, grads, factors = measure(params, batch, fisher_key=key)
        state = kfac.observe(state, factors)
        functions = {"value_fn": lambda p: loss_fn(p, batch)}
        if part != slice(None):
            functions["curvature_fn"] = lambda p: loss_fn(p, own)
        updates, state = tx.update(grads, state, params, **functions)
        return loss_fn(params, own), grads, factors, updates, state

    return params, own, layers, tx, step


def dense_step(matrix, near, gradient, last, iterations=6, min_gain=0.0):
    """Minimise in the span of the direction and the last step, and take preconditioned steps from there."""
    span = np.stack([near @ gradient, *([last] if last.any() else [])], axis=1)
    x = -span @ np.linalg.solve(span.T @ matrix @ span, span.T @ gradient)
    model = lambda x: gradient @ x + x @ matrix @ x / 2  # noqa: E731
    along, size = 0 * x, np.inf
    for _ in range(iterations):
        rest = -(gradient + matrix @ x)
        new = rest @ near @ rest
        along, size, before = near @ rest + new / size * along, new, model(x)
        x = x + new / (along @ matrix @ along) * along
        if before - model(x) < min_gain * -model(x):
            break
    return x


OPTIONS = {
    "the rate and the momentum alone": {"iterations": 0},
    "six iterations": {},
    "until the gain is small": {"iterations": 20, "min_gain": 0.02},
    "a third of the examples": {"part": slice(None, None, 3)},
    "a schedule": {"rate": lambda count: 1 / (2 + count)},
    "less damping": {"damping": 0.5, "min_damping": 0.3},
}
# These change numbers that the other options use as well.
LIKE_OTHERS = "a schedule", "less damping"


@pytest.mark.parametrize(
    "options", [slow(OPTIONS[name]) if name in LIKE_OTHERS else OPTIONS[name] for name in OPTIONS], ids=OPTIONS
)
def test_two_steps_of_gauss_newton_are_those_of_dense_matrices(options):
    params, batch, layers, tx, step = problem(**options)
    state, last = jax.jit(tx.init)(params), np.zeros(21)
    unravel = ravel_pytree(params)[1]
    jacobian = jax.jit(jax.jacobian(lambda w: residual(unravel(w), batch)))
    inverted = jax.jit(lambda f, damping: kfac.curvature.block_operator(layers, f, damping=damping).inv().to_dense())
    limits = {name: options[name] for name in ("iterations", "min_gain") if name in options}
    for k in range(2):
        damping, observed = float(state.next_damping), float(state_of(state).observe_damping)
        loss, grads, factors, updates, state = step(params, state, jax.random.key(k))
        damping *= float(loss)
        j = np.asarray(jacobian(ravel_pytree(params)[0]))
        matrix = j.T @ j / len(j) + damping * np.eye(j.shape[1])
        near = np.array(inverted(factors, damping))
        near[SCALE] = inverted(factors, observed)[SCALE]  # `observe` inverts small blocks, before the step
        last = dense_step(matrix, near, np.asarray(ravel_pytree(grads)[0]), last, **limits)
        last = last * (options["rate"](k) if "rate" in options else 1)
        np.testing.assert_allclose(ravel_pytree(updates)[0], last, rtol=1e-6, atol=1e-9)
        assert float(updates["scale"]) != 0
        params = optax.apply_updates(params, updates)


def test_gauss_newton_stays_at_the_minimum_after_it_has_converged():
    """Check 400 iterations for 21 parameters. Most of them start from rounding errors, which must not grow."""
    params, batch, _, tx, step = problem(iterations=400, damping=0.1)
    loss, grads, _, updates, state = step(params, jax.jit(tx.init)(params), jax.random.key(0))
    gradient, unravel = ravel_pytree(grads)
    jacobian = jax.jit(jax.jacobian(lambda w: residual(unravel(w), batch)))
    j = np.asarray(jacobian(ravel_pytree(params)[0]))
    matrix = j.T @ j / len(j) + float(np.float32(0.1)) * float(loss) * np.eye(j.shape[1])
    np.testing.assert_allclose(ravel_pytree(updates)[0], -np.linalg.solve(matrix, gradient), rtol=1e-9, atol=1e-12)
    assert kfac.diagnostics(state)["rejected_steps"] == 0


def test_gauss_newton_keeps_a_running_average_of_factors():
    states = []
    for options in ({}, {"factor_ema_decay": 0.5}):
        params, _, _, tx, step = problem(**options)
        state = jax.jit(tx.init)(params)
        for k in range(2):
            *_, state = step(params, state, jax.random.key(k))
        states.append(state_of(state))
    last, mean = (jax.tree.leaves(state.blocks) for state in states)
    assert any(not np.allclose(x, y) for x, y in zip(last, mean, strict=True))


def residual(params, batch):
    x, y = batch
    return (params["scale"] * (jnp.tanh(x @ params["w"] + params["b"]) @ params["out"]) - y)[:, 0]


def residuals_of(params, batch):
    """Return residuals whose halved squared norm is `loss_fn`."""
    return residual(params, batch) / len(batch[0]) ** 0.5


def with_jacobian(residuals):
    """Return a `jacobian_fn` for `gauss_newton`."""
    return lambda params: (residuals(params), jax.jacobian(residuals)(params))


def exact_problem(n, rate=1.0):
    """Return parameters, a batch of `n` examples, an optimizer and its compiled exact step."""
    params, *_ = problem()
    batch = normal(3, n, 3), normal(4, n, 1)
    tx = kfac.gauss_newton(rate, kfac.find_layers(loss_fn, params, batch), min_damping=1e-12)

    @jax.jit
    def step(params, state, batch):
        residuals = functools.partial(residuals_of, batch=batch)
        functions = {
            # Any multiple of the squared norm will do, and no output is marked.
            "value_fn": lambda params: 3 * jnp.sum(jnp.square(residuals(params))),
            "jacobian_fn": with_jacobian(residuals),
        }
        return tx.update(jax.grad(loss_fn)(params, batch), state, params, **functions)

    return params, batch, tx, step


@pytest.mark.parametrize("n", [N, 30], ids=["more parameters", "more residuals"])
def test_gauss_newton_with_jacobian_fn_takes_corrected_steps_of_dense_matrices(n):
    params, batch, tx, step = exact_problem(n, lambda count: 1 / (1 + count))
    flat, unravel = ravel_pytree(params)
    residuals = jax.jit(lambda w: residuals_of(unravel(w), batch))
    jacobian = jax.jit(jax.jacobian(residuals))
    state = tx.init(params)
    for k in range(2):
        r, j = np.asarray(residuals(flat)), np.asarray(jacobian(flat))
        damping = float(state.next_damping) * r @ r / 2
        matrix = j.T @ j + damping * np.eye(len(flat))
        expected = planned = -np.linalg.solve(matrix, j.T @ r)
        for _ in range(4):
            constant = np.asarray(residuals(flat + expected)) - j @ expected
            expected = -np.linalg.solve(matrix, j.T @ constant)
        assert not np.allclose(expected, planned, rtol=1e-2)
        updates, state = step(unravel(flat), state, batch)
        np.testing.assert_allclose(ravel_pytree(updates)[0], expected / (1 + k), rtol=1e-6, atol=1e-9)
        assert float(kfac.diagnostics(state)["damping"]) == pytest.approx(damping, rel=1e-6)
        # The ratio compares the corrected step to the prediction for the planned step.
        planned = planned / (1 + k)
        predicted = r @ j @ planned + np.sum((j @ planned) ** 2) / 2
        moved = flat + ravel_pytree(updates)[0]
        change = np.sum(np.asarray(residuals(moved)) ** 2) / 2 - r @ r / 2
        assert float(state.reduction_ratio) == pytest.approx(change / predicted, rel=1e-5)
        flat = moved


def test_gauss_newton_with_jacobian_fn_solves_least_squares_in_few_steps():
    params, batch, tx, step = exact_problem(N)
    state = tx.init(params)
    for _ in range(25):
        updates, state = step(params, state, batch)
        params = optax.apply_updates(params, updates)
    assert float(loss_fn(params, batch)) < 1e-20
    # Without statistics, there is nothing to warn of.
    assert kfac.diagnostics(state)["statistics_age"] == 0


def test_gauss_newton_with_jacobian_fn_on_four_devices_takes_the_step_of_one():
    params, batch, tx, step = exact_problem(N)
    mesh = Mesh(jax.devices()[:4], ("d",))
    sharded = jax.device_put(batch, jax.NamedSharding(mesh, PartitionSpec("d")))
    one, _ = step(params, tx.init(params), batch)
    four, _ = step(params, tx.init(params), sharded)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12), one, four)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gauss_newton_with_jacobian_fn_rejects_steps_whose_corrections_are_not_finite(dtype):
    params, x = {"w": jnp.full((1, 1), 10, dtype)}, jnp.ones((2, 1), dtype)
    residuals = lambda params: jnp.log(x @ params["w"])  # noqa: E731
    loss_fn = lambda params: 0.5 * jnp.sum(kfac.mark_output(residuals(params), "residual") ** 2)  # noqa: E731
    layers = kfac.find_layers(lambda params, x: loss_fn(params), params, x)
    # An undamped step from 10 ends at -13, where there is no logarithm.
    tx = kfac.gauss_newton(1.0, layers, damping=1e-6, min_damping=1e-6, num_examples=1)
    functions = {
        "value_fn": loss_fn,
        "jacobian_fn": with_jacobian(residuals),
    }
    step = jax.jit(lambda params, state: tx.update(params, state, params, **functions))
    state = tx.init(params)
    for _ in range(30):
        updates, state = step(params, state)
        params = optax.apply_updates(params, updates)
    assert kfac.diagnostics(state)["rejected_steps"] > 3
    np.testing.assert_allclose(params["w"], 1, rtol=1e-6)


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "K-FAC"])
def test_gauss_newton_keeps_the_dtypes_of_parameters_beside_data_in_float64(exact):
    params, batch, tx, _ = exact_problem(N)
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16 if x.ndim == 1 else jnp.float32), params)
    residuals = functools.partial(residuals_of, batch=batch)
    functions = {"value_fn": lambda params: loss_fn(params, batch)}
    if exact:
        functions["jacobian_fn"] = with_jacobian(residuals)

    def step(carry, _):
        params, state = carry
        grads = jax.grad(loss_fn)(params, batch)
        updates, state = tx.update(grads, state, params, **functions)
        return (optax.apply_updates(params, updates), state), loss_fn(params, batch)

    _, losses = jax.lax.scan(step, (narrow, tx.init(narrow)), None, length=4)
    assert losses[-1] < 0.7 * losses[0]


def test_gauss_newton_counts_an_exact_step_with_broken_residuals_as_skipped():
    params, batch, tx, step = exact_problem(N)
    broken = jax.tree.map(lambda x: x.at[0].set(jnp.nan), batch)
    updates, state = step(params, tx.init(params), broken)
    assert not any(jnp.any(x) for x in jax.tree.leaves(updates))
    assert kfac.diagnostics(state)["skipped_steps"] == 1


def test_gauss_newton_with_jacobian_fn_takes_one_array_of_real_residuals():
    params, batch, tx, _ = exact_problem(N)
    residuals = functools.partial(residuals_of, batch=batch)
    pair = with_jacobian(residuals)

    def tuples(params):
        r, rows = pair(params)
        return (r, r), (rows, rows)

    def complex_numbers(params):
        return jax.tree.map(lambda x: 1j * x, pair(params))

    for wrong in (residuals, tuples, complex_numbers):
        with pytest.raises(ValueError, match=r"^jacobian_fn must return a pair: one array of real residuals"):
            tx.update(params, tx.init(params), params, value_fn=lambda p: loss_fn(p, batch), jacobian_fn=wrong)


def test_gauss_newton_refuses_a_jacobian_of_other_shapes_and_two_curvatures():
    params, batch, tx, _ = exact_problem(N)
    residuals = functools.partial(residuals_of, batch=batch)
    functions = {"value_fn": lambda params: loss_fn(params, batch)}

    def transposed(params):
        rows = jax.jacobian(residuals)(params)
        return residuals(params), rows | {"w": jnp.swapaxes(rows["w"], 1, 2)}

    with pytest.raises(
        ValueError, match=r"with the shapes .*\['w'\] \(12, 3, 4\).* but they are .*\['w'\] \(12, 4, 3\)"
    ):
        tx.update(params, tx.init(params), params, **functions, jacobian_fn=transposed)
    with pytest.raises(ValueError, match=r"^jacobian_fn counts the whole .*: leave curvature_fn out"):
        tx.update(
            params, tx.init(params), params, **functions, curvature_fn=functions["value_fn"], jacobian_fn=transposed
        )


@pytest.mark.slow
def test_it_finds_the_minimum_and_is_never_worse():
    params, _batch, _, tx, step = problem()
    state, losses = jax.jit(tx.init)(params), []
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
    measure = jax.jit(kfac.value_and_grad(loss_fn, layers, fisher="expected"))
    _, grads, factors = measure(params, batch, fisher_key=jax.random.key(0))
    nans, state = jax.tree.map(lambda g: g * jnp.nan, grads), jax.jit(tx.init)(params)
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


def marked_loss(params, batch):
    x, labels = batch
    hidden = jnp.tanh(x @ params["w"] + params["b"])
    logits = kfac.mark_output(hidden @ params["out"], "categorical")
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def classified():
    params = {"w": normal(0, 3, 4), "b": normal(1, 4), "out": normal(2, 4, 3)}
    return params, (normal(3, 16, 3), jnp.arange(16) % 3)


def trained(batch, loss=marked_loss, steps=3, **options):
    """Return the parameters after steps with `kfac.gauss_newton` in `train_step`."""
    params, _ = classified()
    rate = optax.linear_schedule(1.0, 0.0, 5)
    make = kfac.train_step(loss, rate, optimizer=kfac.gauss_newton, fisher="expected", **options)
    state = make.init(params, batch)
    for k in range(steps):
        params, state, _ = make(params, state, batch, fisher_key=jax.random.key(k))
    return params


def test_gauss_newton_in_train_step_takes_products_of_the_examples_of_the_statistics(capsys):
    params, batch = classified()
    part = jax.tree.map(lambda x: x[::2], batch)
    layers = kfac.find_layers(marked_loss, params, batch)
    tx = kfac.gauss_newton(optax.linear_schedule(1.0, 0.0, 5), layers)
    state = tx.init(params)
    measure = kfac.statistics(marked_loss, layers, fisher="expected", fraction=1)

    @jax.jit
    def step(params, state, key):
        state = kfac.observe(state, measure(params, part, fisher_key=key))
        grads = jax.grad(marked_loss)(params, batch)
        functions = (lambda params, data=data: marked_loss(params, data) for data in (batch, part))
        updates, state = tx.update(
            grads, state, params, **dict(zip(("value_fn", "curvature_fn"), functions, strict=True))
        )
        return optax.apply_updates(params, updates), state

    for k in range(3):
        params, state = step(params, state, jax.random.key(k))
    found = trained(batch, statistics_fraction=1 / 2)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-9), found, params)
    assert "times the gradient's FLOPs, without the optimizer's own evaluations\n" in capsys.readouterr().out
    whole = trained(batch, statistics_fraction=1)
    assert not np.allclose(whole["w"], params["w"], rtol=1e-3)


def test_gauss_newton_in_train_step_with_micro_batches_takes_the_steps_of_whole_batches():
    _, batch = classified()

    def with_aux(params, batch):
        return marked_loss(params, batch), jnp.sum(batch[0])

    one = trained(batch, with_aux, steps=1, has_aux=True, statistics_fraction=1)
    # Expected targets have random signs, which cancel nothing here: each example has a single row.
    parts = trained(batch, with_aux, steps=1, has_aux=True, statistics_fraction=1, num_microbatches=4)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-9), one, parts)


def test_gauss_newton_minimises_a_negative_loss():
    """Check a loss like that of a density, whose absolute value sets the damping. It binds `num_examples`, too."""
    params, batch = classified()

    def loss(params, batch):
        return marked_loss(params, batch) - 2

    optimizer = functools.partial(kfac.gauss_newton, num_examples=16)
    step = kfac.train_step(loss, 1.0, optimizer=optimizer, fisher="expected", num_examples=16)
    state = step.init(params, batch)
    for k in range(3):
        params, state, before = step(params, state, batch, fisher_key=jax.random.key(k))
    assert loss(params, batch) < before < loss(classified()[0], batch)


def test_gauss_newton_on_four_devices_takes_the_steps_of_one():
    _, batch = classified()
    mesh = Mesh(jax.devices()[:4], ("d",))
    sharded = jax.device_put(batch, jax.NamedSharding(mesh, PartitionSpec("d")))
    one, four = trained(batch, statistics_fraction=1 / 2), trained(sharded, statistics_fraction=1 / 2)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12), one, four)


def test_gauss_newton_refuses_a_number_of_examples_with_a_part_of_them():
    params, _, _, tx, step = problem(part=slice(None, None, 3), num_examples=N)
    with pytest.raises(ValueError, match=r"counts the whole batch's examples: .* statistics_fraction=1"):
        jax.eval_shape(step, params, jax.eval_shape(tx.init, params), jax.random.key(0))
