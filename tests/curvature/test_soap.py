"""Test the state and steps of `preconditioner=kfac.SOAP()` against NumPy, on several devices, and its errors.

Some tests use internals of `_curvature`: orthogonal iteration, and orthonormal columns by matrix products.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import kfac
import problem
from checking import slow
from kfac._curvature.orthonormal import orthonormal_by_products
from kfac._curvature.refresh import refresh
from kfac._curvature.soap import orthogonal_iteration
from kfac.types import Kronecker
from problem import assert_close, assert_equal, history, matrices, measured, motions, observing, state_of

LAYERS = problem.layers()
DECAY = 0.8


def basis(state):
    """Return the eigenvectors of the two dense layers, which form one group."""
    eigen = state_of(state).blocks["kronecker_4x4"].preconditioner
    return {
        name: [np.asarray(side[k], np.float64) for side in (eigen.A, eigen.G)]
        for k, name in enumerate(("first", "out"))
    }


@pytest.mark.parametrize(
    ("inverse_update_period", "relative"),
    [
        (1, False),
        (3, True),
        slow(1, True),
        slow(3, False),
    ],
)
def test_steps_against_numpy(inverse_update_period, relative):
    """Check that squared gradients are averaged in the basis, follow its order, and scale the gradient."""
    damping = 1e-3
    tx = kfac.scale_by_kfac(
        LAYERS, preconditioner=kfac.SOAP(decay=DECAY, scale_damping=relative), damping=damping, factor_ema_decay=0.5,
        inverse_update_period=inverse_update_period, interval_warmup_steps=0, distribution=kfac.Distribution(),
    )  # fmt: skip
    state, update = tx.init(problem.initial()), jax.jit(observing(tx))
    average, weight, moved = {}, 0.0, 0
    for t in range(6):
        old = basis(state)
        grads, factors = measured(t)
        # Gradients also count in steps without statistics.
        updates, state = update(grads, state, factors=factors if t % 2 == 0 else None)
        share = (1 - DECAY) / (DECAY * weight + 1 - DECAY)
        weight = DECAY * weight + 1 - DECAY
        factors = state_of(state).blocks["kronecker_4x4"].factors
        for k, (name, (a, g)) in enumerate(basis(state).items()):
            squares = (g.T @ matrices(grads)[name] @ a) ** 2
            if t > 0:
                if not np.array_equal(a, old[name][0]):  # a refresh puts the largest quotients first
                    along = [
                        np.diag(q.T @ np.asarray(factor[k], np.float64) @ q)
                        for q, factor in zip(old[name], (factors.A, factors.G), strict=True)
                    ]
                    order_a, order_g = (np.argsort(-x) for x in along)
                    moved += not np.array_equal(order_a, np.arange(4)) or not np.array_equal(order_g, np.arange(4))
                    average[name] = average[name][order_g][:, order_a]
                squares = (1 - share) * average[name] + share * squares
            average[name] = squares
            root = np.sqrt(squares + damping * (squares.mean() if relative else 1))
            expected = g @ ((g.T @ matrices(grads)[name] @ a) / root) @ a.T
            np.testing.assert_allclose(matrices(updates)[name], expected, rtol=0, atol=2e-4 * np.abs(expected).max())
    assert moved > 0


def followed(stack, times, dtype=jnp.float32):
    """Return the basis after some orthogonal iterations on constant matrices, starting at the identity."""
    stack = jnp.asarray(stack, dtype)
    k, d = stack.shape[:2]
    begin = jnp.broadcast_to(jnp.eye(d, dtype=dtype), (k, d, d))

    def advanced(_, kept):
        return orthogonal_iteration(kept, stack)[0]

    return jax.jit(lambda kept: jax.lax.fori_loop(0, times, advanced, kept))(begin)


def quotients_of(vectors, stack):
    """Return the Rayleigh quotients of some vectors, `[k, d]`."""
    return np.einsum("kij,kil,klj->kj", vectors, stack, vectors)


def assert_orthogonal(vectors, atol=1e-5):
    vectors = np.asarray(vectors, np.float64)
    products = vectors.swapaxes(1, 2) @ vectors
    np.testing.assert_allclose(products, np.broadcast_to(np.eye(products.shape[-1]), products.shape), atol=atol)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "atol"), [(jnp.float32, 1e-6), (jnp.float64, 1e-13)])
def test_the_basis_comes_to_that_of_an_eigendecomposition(x64, dtype, atol):
    """Check that the off-diagonal entries of `Q^T A Q` fall to rounding over repeated refreshes."""
    rng = np.random.default_rng(0)
    q = np.linalg.qr(rng.normal(size=(2, 9, 9)))[0]
    stack = 30 * (q * 0.5 ** np.arange(9)) @ q.swapaxes(1, 2)
    beside = []
    for times in (0, 3, 9, 80):
        found = followed(stack, times, dtype)
        vectors = np.asarray(found, np.float64)
        assert found.dtype == dtype
        turned = vectors.swapaxes(1, 2) @ stack @ vectors
        beside.append(np.abs(turned - turned * np.eye(9)).max() / 30)
    assert beside[0] > 5 * beside[1] > 50 * beside[2]
    assert beside[3] < atol
    np.testing.assert_allclose(np.abs(vectors.swapaxes(1, 2) @ q), np.broadcast_to(np.eye(9), q.shape), atol=300 * atol)
    quotients = quotients_of(found, stack)
    for end, expected in ((-1, 30 * 0.5**8), (0, 30)):
        np.testing.assert_allclose(quotients[:, end], [expected] * 2, rtol=300 * atol)


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_the_basis_stays_orthogonal(scale):
    """Check a thousand refreshes of running averages that always change, with eigenvalues over eight decades."""
    d, spread = 24, np.logspace(0, -4, 24)

    def turn(carry, key):
        average, kept = carry
        x = jax.random.normal(key, (2, 3, d)) * spread
        average = 0.9 * average + 0.1 * scale * jnp.einsum("kni,knj->kij", x, x)
        return (average, orthogonal_iteration(kept, average)[0]), None

    begin = jnp.zeros((2, d, d)), followed(np.zeros((2, d, d)), 0)
    keys = jax.random.split(jax.random.key(0), 1000)
    (average, kept), _ = jax.jit(lambda begin: jax.lax.scan(turn, begin, keys))(begin)
    assert_orthogonal(kept)
    along = np.einsum("kij,kil,klj->kj", kept, np.asarray(average, np.float64), kept)
    np.testing.assert_allclose(along[:, :3], np.linalg.eigvalsh(average)[:, :-4:-1], rtol=0.05)


@pytest.mark.slow
def test_the_same_rows_in_another_order():
    """Check that rounding does not determine the steps if a batch has fewer rows than factors have dimensions."""
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(rng.normal(size=(20, 16, d)), jnp.float32) for d in (24, 4))
    params = {f"layer{k}": rng.normal(size=shape).astype(np.float32) / 5 for k, shape in enumerate([(24, 32), (32, 4)])}

    def loss(params, batch):
        return jnp.mean(jnp.square(jnp.tanh(batch[0] @ params["layer0"]) @ params["layer1"] - batch[1]))

    layers = kfac.find_layers(loss, params, (x[0], y[0]))
    tx, measure = kfac.kfac(0.05, layers), kfac.value_and_grad(loss, layers)

    def step(carry, batch):
        _, grads, factors = measure(carry[0], batch)
        updates, state = tx.update(grads, kfac.observe(carry[1], factors), carry[0])
        return (jax.tree.map(jnp.add, carry[0], updates), state), None

    run = jax.jit(lambda *rows: jax.lax.scan(step, (params, tx.init(params)), rows)[0][0])
    found, other = run(x, y), run(x[:, ::-1], y[:, ::-1])
    assert_close(found, other, rtol=1e-3)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
@pytest.mark.parametrize("rank", [0, 1, 5, 60])
def test_orthonormal_by_matrix_products(x64, rank, dtype):
    """Check the replacement for LAPACK's QR on devices other than CPUs, even with nearly identical columns."""
    x = np.random.default_rng(0).normal(size=(2, 60, rank))
    eps = jnp.finfo(dtype).eps
    stack = jnp.asarray(x @ x.swapaxes(1, 2) + 10 * eps * np.eye(60), dtype)
    found = np.asarray(jax.jit(orthonormal_by_products)(stack), np.float64)
    assert_orthogonal(found, atol=8 * eps)
    expected, upper = np.linalg.qr(np.asarray(stack, np.float64))
    # Beyond the rank, rounding alone determines the columns.
    known = slice(0, rank - rank // 4)
    np.testing.assert_allclose(
        found[:, :, known], (expected * np.sign(np.diagonal(upper, axis1=1, axis2=2))[:, None])[:, :, known],
        atol=1e5 * eps,
    )  # fmt: skip


def test_orthonormal_by_matrix_products_ends_where_there_is_no_answer():
    found = jax.jit(orthonormal_by_products)(jnp.full((2, 3, 3), jnp.nan).at[1].set(jnp.eye(3)))
    assert np.isnan(found[0]).all()
    np.testing.assert_allclose(found[1], np.eye(3), atol=1e-6)


def test_factors_that_say_little():
    """Check that there is a basis for zero, for rank one, for the identity's multiples, and for their negatives."""
    x = np.random.default_rng(0).normal(size=6)
    stack = np.stack([np.zeros((6, 6)), np.outer(x, x), 3 * np.eye(6), -np.eye(6)])
    found = followed(stack, 20)
    assert_orthogonal(found)
    np.testing.assert_allclose(np.abs(found[0]), np.eye(6), atol=1e-6)  # no direction to follow
    np.testing.assert_allclose(np.abs(found[2]), np.eye(6), atol=1e-6)
    np.testing.assert_allclose(np.abs(found[1, :, 0]), np.abs(x) / np.linalg.norm(x), atol=1e-5)
    quotients = quotients_of(found, stack)
    np.testing.assert_allclose(quotients[:, 0], [0, x @ x, 3, -1], rtol=1e-5)


@pytest.mark.slow
def test_bases_are_kept_in_float32_and_applied_in_bfloat16():
    (_, wide, expected), (_, narrow, updates) = (
        history(kfac.scale_by_kfac(LAYERS, preconditioner=kfac.SOAP(precision)))[-1]
        for precision in ("float32", "bfloat16")
    )
    kept = [state_of(state).blocks["kronecker_4x4"].preconditioner for state in (wide, narrow)]
    assert_equal((kept[0].A, kept[0].G), (kept[1].A, kept[1].G))
    assert_close(updates, expected, rtol=0.1)
    assert problem.differ(updates, expected)


def test_a_refresh_that_fails_keeps_basis_and_moments():
    preconditioner = kfac.SOAP()
    good = jnp.stack([jnp.diag(jnp.arange(3.0) + 1)] * 2)
    kept = preconditioner.init(Kronecker(good, good))
    bad = good.at[1, 0, 0].set(jnp.nan)
    new = refresh(preconditioner, kept, Kronecker(good, bad), jnp.ones(2, bool), jnp.asarray(1e-3))
    np.testing.assert_array_equal(new.valid, [True, False])
    np.testing.assert_array_equal(new.preconditioner.A[1], kept.A[1])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(new.preconditioner))


@pytest.mark.slow
@pytest.mark.parametrize("inverse_update_period", [3, 1])
def test_several_devices_are_one(inverse_update_period):
    mesh = jax.make_mesh((3,), ("devices",), axis_types=(AxisType.Auto,), devices=jax.devices()[:3])

    def made(mesh):
        where = kfac.Distribution(mesh=mesh)
        return kfac.scale_by_kfac(
            LAYERS, preconditioner=kfac.SOAP(), inverse_update_period=inverse_update_period, distribution=where
        )

    (_, one, expected), (_, state, updates) = (history(made(m))[-1] for m in (None, mesh))
    assert_close(updates, expected, rtol=2e-4)
    portable = jax.jit(kfac.state.gather_state)(state)
    assert jax.tree.structure(portable) == jax.tree.structure(one)
    assert_close(*(state_of(s).blocks["kronecker_4x4"].preconditioner[2:] for s in (portable, one)), rtol=2e-3)
    again = jax.jit(lambda state: kfac.state.gather_state(kfac.state.scatter_state(state, 2)))(portable)
    assert_equal(again, portable)


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_leaves_moments_alone():
    tx = kfac.kfac(0.1, LAYERS, preconditioner=kfac.SOAP())
    _, state, _ = history(tx, 2)[-1]
    grads, factors = measured(2)
    bad = jax.tree.map(lambda x: x.at[(0,) * x.ndim].set(jnp.nan), grads)
    state = jax.jit(kfac.observe)(state, factors)  # may reorder the moments
    _, after = jax.jit(tx.update)(bad, state, problem.initial())
    assert kfac.diagnostics(after)["skipped_steps"] == 1
    assert_equal(*(state_of(s).blocks["kronecker_4x4"].preconditioner[2:] for s in (after, state)))


def test_a_factor_that_is_kept_as_its_diagonal(monkeypatch):
    monkeypatch.setattr("kfac._capture.make_layers.VOCABULARY", 4)
    layers = kfac.find_layers(problem.loss_fn, problem.initial(), problem.batch(0), max_factor_dim=3)
    tx = kfac.scale_by_kfac(layers, preconditioner=kfac.SOAP(), damping=1e-3)
    grads = problem.measured(0)[0]
    _, _, factors = jax.jit(kfac.value_and_grad(problem.loss_fn, layers))(problem.initial(), problem.batch(0))
    updates, _ = jax.jit(observing(tx))(grads, jax.jit(tx.init)(problem.initial()), factors=factors)
    dense = layers["out"]
    assert set(dense.diagonal) == {"A", "G"}  # so the step is Adam's, entry by entry
    leaves, new = (dict(zip(layers.paths, jax.tree.leaves(tree), strict=True)) for tree in (grads, updates))
    for path in dense.params:
        np.testing.assert_allclose(new[path], leaves[path] / np.sqrt(leaves[path] ** 2 + 1e-3), rtol=1e-5)


def test_what_does_not_go_together_is_refused():
    with pytest.raises(ValueError, match="decay must lie in"):
        kfac.SOAP(decay=1.0)
    _, state, _ = history(kfac.scale_by_kfac(LAYERS, preconditioner=kfac.SOAP()), 1)[-1]
    with pytest.raises(ValueError, match="does not say which eigenvectors it has"):
        kfac.curvature.block_operator(LAYERS, state)
    assert float(kfac.curvature.block_operator(LAYERS, state, preconditioner=kfac.Eigh()).trace()) > 0


def divided(preconditioner, state, matrices, damping):
    """Divide matrices `[k, d_out, d_in]` in the eigenbasis by the roots of the damped squares, by the formula."""
    a, g, squares = (np.asarray(x, np.float64) for x in (state.A, state.G, state.squares))
    unit = squares.mean((1, 2), keepdims=True) if preconditioner.scale_damping else 1
    turned = a.mT @ np.asarray(matrices, np.float64).mT @ g
    return (a @ (turned / np.sqrt(squares + damping * unit)) @ g.mT).mT


def test_the_optimizer_preconditions_the_momentum_of_the_gradients():
    """Check Nesterov's form, also while the basis changes.

    The momentum of blocks in closed form contains preconditioned gradients instead.
    """
    rate, decay, damping = 0.1, 0.9, 1e-3
    preconditioner = kfac.SOAP(decay=DECAY)
    tx = problem.plain_kfac(
        rate,
        LAYERS,
        preconditioner=preconditioner,
        damping=damping,
        momentum=decay,
        nesterov=True,
        inverse_update_period=3,
    )
    alone = kfac.scale_by_kfac(LAYERS, preconditioner=preconditioner, damping=damping, inverse_update_period=3)
    state, kept = jax.jit(tx.init)(problem.initial()), jax.jit(alone.init)(problem.initial())
    update, plain_update = jax.jit(observing(tx)), jax.jit(observing(alone))
    trace = {"first": np.zeros((4, 4)), "out": np.zeros((4, 4)), "offset": np.zeros(4)}
    for t in range(4):
        grads, factors = measured(t)
        updates, state = update(grads, state, problem.initial(), factors=factors)
        plain, kept = plain_update(grads, kept, factors=factors)
        new = {**matrices(grads), "offset": np.asarray(plain["offset"])}
        trace = {name: decay * m + new[name] for name, m in trace.items()}
        ahead = {name: decay * m + new[name] for name, m in trace.items()}
        stack = np.stack([ahead["first"], ahead["out"]])
        blocks = state_of(kept).blocks["kronecker_4x4"].preconditioner
        expected = dict(zip(("first", "out"), divided(preconditioner, blocks, stack, damping), strict=True))
        for name, step in {**matrices(updates), "offset": updates["offset"]}.items():
            np.testing.assert_allclose(step, -rate * expected.get(name, ahead[name]), rtol=1e-3, atol=1e-5)
    assert float(kfac.diagnostics(state)["gradient_norm"]) == pytest.approx(
        float(kfac.diagnostics(kept)["gradient_norm"])
    )
    bad = jax.tree.map(lambda x: x.at[(0,) * x.ndim].set(jnp.nan), grads)
    updates, after = jax.jit(tx.update)(bad, state, problem.initial())
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(updates))
    assert_equal(*({name: b.preconditioner for name, b in state_of(x).blocks.items()} for x in (after, state)))
    assert_equal(motions(after), motions(state))


@pytest.mark.parametrize("relative", [True, False])
def test_diagnostics_has_the_condition_of_the_matrix_that_a_step_multiplies_by(relative):
    """Build each block's matrix from its products with all unit matrices."""
    params = {"first": matrices(measured(0)[0])["first"], "out": jnp.eye(4)}
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    x = jnp.sin(jnp.arange(48.0)).reshape(12, 4)

    def loss_fn(params, x):
        return jnp.mean(jnp.square(jnp.tanh(x @ params["first"]) @ params["out"]))

    layers, damping, preconditioner = kfac.find_layers(loss_fn, params, x), 1e-3, kfac.SOAP(scale_damping=relative)
    tx = kfac.scale_by_kfac(layers, preconditioner=preconditioner, damping=damping, interval_warmup_steps=2)
    state, update, observe = tx.init(params), jax.jit(tx.update), jax.jit(kfac.observe)
    measure = jax.jit(kfac.value_and_grad(loss_fn, layers))
    for t in range(4):
        _, grads, factors = measure(params, x + t)
        if t < 3:
            state = observe(state, factors)
        state = update(grads, state, params)[1]
    blocks = state_of(state).blocks["kronecker_4x4"].preconditioner
    units = np.eye(16).reshape(16, 1, 4, 4)
    columns = np.stack([divided(preconditioner, blocks, unit, damping) for unit in units])
    conditions = [np.linalg.cond(columns[:, k].reshape(16, 16)) for k in range(2)]
    np.testing.assert_allclose(kfac.diagnostics(state)["condition"], max(conditions), rtol=1e-2)


@pytest.mark.slow
def test_owners_under_shard_map():
    """Run the whole optimizer, with the gradients' momentum, where every device has its own part of the state."""
    mesh = jax.make_mesh((3,), ("devices",), axis_types=(AxisType.Auto,), devices=jax.devices()[:3])
    same = PartitionSpec()

    def made(axis):
        where = kfac.Distribution(axis)
        return kfac.kfac(0.05, LAYERS, preconditioner=kfac.SOAP(), inverse_update_period=2, distribution=where)

    tx, params = made("devices"), problem.initial()
    specs = kfac.state.state_specs(made(None), params, "devices")
    state = jax.jit(jax.shard_map(tx.init, mesh=mesh, in_specs=same, out_specs=specs))(params)
    over_devices = jax.shard_map(
        lambda grads, state, params, factors: tx.update(grads, kfac.observe(state, factors), params),
        mesh=mesh, in_specs=(same, specs, same, same), out_specs=(same, specs),
    )  # fmt: skip
    update = jax.jit(over_devices)
    for t, (at, _, expected) in enumerate(history(made(None), 4)):
        updates, state = update(measured(t)[0], state, params, measured(t)[1])
        assert_close(updates, expected, rtol=5e-4)
        params = at


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1e-17, 1e-19, 1e-25])
def test_a_layer_with_hardly_a_gradient_stops_no_other(scale):
    """Check mean squares that leave the range of float32 when multiplied by the damping."""
    tx = kfac.kfac(0.1, LAYERS, preconditioner=kfac.SOAP())
    state = history(tx, 1)[-1][1]
    grads, factors = measured(1)
    grads = {**grads, "first": jax.tree.map(lambda x: scale * x, grads["first"])}
    update = jax.jit(observing(tx))
    for _ in range(3):
        updates, state = update(grads, state, problem.initial(), factors=factors)
    assert kfac.diagnostics(state)["skipped_steps"] == 0
    assert all(np.any(leaf) for leaf in jax.tree.leaves(updates["out"]))


@pytest.mark.slow
@pytest.mark.parametrize("preconditioner", [kfac.Cholesky(), kfac.SOAP()])
@pytest.mark.parametrize(
    "dtype",
    [
        jnp.float32,
        jnp.bfloat16,
        jnp.float16,
    ],
)
def test_narrow_models_where_float64_is_allowed(x64, dtype, preconditioner):
    params = problem.initial(dtype)
    batch = problem.batch(0, dtype=dtype)
    layers = kfac.find_layers(problem.loss_fn, params, batch)
    tx = kfac.kfac(0.05, layers, preconditioner=preconditioner)
    _, grads, factors = jax.jit(kfac.value_and_grad(problem.loss_fn, layers))(params, batch)
    updates, state = jax.jit(observing(tx))(grads, jax.jit(tx.init)(params), params, factors=factors)
    assert {leaf.dtype for leaf in jax.tree.leaves(updates)} == {jnp.dtype(dtype)}
    assert all(np.isfinite(np.asarray(leaf, np.float64)).all() for leaf in jax.tree.leaves(updates))
    assert kfac.diagnostics(state)["skipped_steps"] == 0


@pytest.mark.parametrize(
    ("optimizer", "expected"), [(kfac.kfac, kfac.SOAP(scale_damping=True)), (kfac.natural_gradient, kfac.Cholesky())]
)
def test_the_default_preconditioner_of_kfac_and_of_natural_gradient(optimizer, expected):
    state = jax.eval_shape(optimizer(0.1, LAYERS).init, problem.initial())
    assert state_of(state).settings.preconditioner == expected


@pytest.mark.slow
def test_the_default_is_the_same_as_naming_it():
    (_, one, updates), (_, other, expected) = (
        history(kfac.kfac(0.1, LAYERS, **options))[-1]
        for options in ({}, {"preconditioner": kfac.SOAP(), "damping": 1e-4})
    )
    assert_equal(updates, expected)
    assert_equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize(("made", "given"), [(kfac.SOAP(), kfac.Cholesky()), (kfac.Cholesky(), kfac.SOAP())])
def test_the_state_of_another_inverse_is_refused(made, given):
    """Check that a changed default gives a clear error, although the two states have different structures."""
    state = kfac.kfac(0.1, LAYERS, preconditioner=made).init(problem.initial())
    grads, factors = measured(0)
    with pytest.raises(ValueError, match=f"preconditioner={type(given).__name__}.*state is one for preconditioner"):
        kfac.kfac(0.1, LAYERS, preconditioner=given).update(grads, kfac.observe(state, factors), problem.initial())
