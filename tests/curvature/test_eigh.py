"""Test eigendecompositions, which replace inverses, against dense solves in NumPy.

Some tests use internals of `_curvature`: the decompositions of a stack, and the state of a block after a failure.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kfac
from kfac._curvature.eigh import decompose
from kfac._curvature.refresh import refresh
from kfac.types import Kronecker
from problem import observing, plain_kfac, state_of


def loss_fn(params, x, rows):
    """Compute a loss over a dense layer, a table, stacked kernels, and factors too large on one side or both."""
    h = x @ params["dense"]["kernel"] + params["dense"]["bias"]
    h = h[:, :3] + params["table"][rows] + h[:, 3:]
    h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, params["stacked"])
    h = h @ params["wide"]
    return jnp.mean((h @ params["both"]) ** 2)


def setting(dtype=jnp.float64):
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    params = {
        "dense": {"kernel": normal(2, 4), "bias": normal(4)},
        "table": normal(6, 3),
        "stacked": normal(2, 3, 3),
        "wide": normal(3, 9),
        "both": normal(9, 8),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kfac._capture.make_layers.VOCABULARY", 8)
        layers = kfac.find_layers(loss_fn, params, normal(5, 2), jnp.arange(5), max_factor_dim=7)

    def moment(shape):
        lead, d = shape[:-1] if len(shape) != 1 else (), shape[-1]
        if len(shape) in (2, 3):
            x = rng.normal(size=(*shape[:-1], d - 1))  # one eigenvalue is zero
            return jnp.asarray(x @ np.swapaxes(x, -1, -2), dtype)
        return jnp.asarray(np.square(rng.normal(size=(*lead, d))), dtype)

    blocks = {layer.name: Kronecker(**{f: moment(s) for f, s in layer.factor_shapes.items()}) for layer in layers}
    gradients = jax.tree.map(lambda x: normal(*x.shape), params)
    return params, layers, kfac.Factors(blocks), gradients


def dense_solves(layers, factors, gradients, damping):
    """Solve with `A (x) G + damping I` for the gradient of every block."""
    leaves = dict(zip(layers.paths, jax.tree.leaves(gradients), strict=True))
    solved = {}
    for layer in layers:
        block = factors[layer.name]
        matrices = np.asarray(layer.to_matrix([leaves[path] for path in layer.params]))
        results = []
        for k, matrix in enumerate(matrices):
            a, g = (np.asarray(x[k] if layer.stacked else x) for x in (block.A, block.G))
            a, g = (np.diag(x) if x.ndim == 1 else x for x in (a, g))
            damped = np.kron(a, g) + damping * np.eye(matrix.size)
            results.append(np.linalg.solve(damped, matrix.T.reshape(-1)).reshape(matrix.T.shape).T)
        restored = layer.from_matrix(jnp.asarray(np.stack(results)))
        solved |= dict(zip(layer.params, restored, strict=True))
    return [solved[path] for path in layers.paths]


@pytest.mark.slow
def test_preconditioning_is_a_solve_with_the_damped_kronecker_product(x64):
    """Check that the current step's damping applies, however old the decompositions are.

    The layers include diagonal factors and stacked copies.
    """
    params, layers, factors, gradients = setting()
    diagonal = {layer.name: "".join(layer.diagonal) for layer in layers}
    assert diagonal == {"dense": "", "table": "A", "stacked": "", "wide": "G", "both": "AG"}
    tx = kfac.scale_by_kfac(
        layers,
        preconditioner=kfac.Eigh(),
        damping=lambda t: jnp.where(t < 1, 0.25, 2.0),
        inverse_update_period=5,
        interval_warmup_steps=0,
        distribution=kfac.Distribution(),
    )
    state = jax.jit(tx.init)(params)
    step = jax.jit(observing(tx))
    for damping, given in ((0.25, factors), (2.0, None)):
        updates, state = step(gradients, state, factors=given)
        expected = dense_solves(layers, factors, gradients, damping)
        for found, solved in zip(jax.tree.leaves(updates), expected, strict=True):
            np.testing.assert_allclose(found, solved, rtol=0, atol=1e-9 * np.abs(solved).max())
    assert kfac.diagnostics(state)["inverse_age"] == 1
    # The diagnostic is the largest condition number of the damped blocks at the refresh, in the 2-norm.
    largest = max(
        np.linalg.cond(
            np.kron(*(np.diag(x) if np.ndim(x) == 1 else x for x in map(np.asarray, pair))) + 0.25 * np.eye(n)
        )
        for layer in layers
        for n in [layer.d_in * layer.d_out]
        for block in [factors[layer.name]]
        for pair in (zip(block.A, block.G, strict=True) if layer.stacked else [(block.A, block.G)])
    )
    np.testing.assert_allclose(kfac.diagnostics(state)["condition"], largest, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.03)])
def test_in_float32_and_with_eigenvectors_in_bfloat16(precision, tolerance):
    params, layers, factors, gradients = setting(jnp.float32)
    tx = kfac.scale_by_kfac(layers, preconditioner=kfac.Eigh(precision), damping=0.3)
    state = tx.init(params)
    updates, state = jax.jit(lambda g, s: tx.update(g, kfac.observe(s, factors)))(gradients, state)
    vectors = state.blocks["kronecker_4x3"].preconditioner.A
    assert vectors.vectors.dtype == jnp.dtype(precision)
    assert vectors.values.dtype == jnp.float32
    for found, solved in zip(jax.tree.leaves(updates), dense_solves(layers, factors, gradients, 0.3), strict=True):
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, solved, rtol=0, atol=tolerance * np.abs(solved).max())


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_estimate_counts_the_bytes_of_the_state(precision):
    params, layers, _, _ = setting(jnp.float32)
    preconditioner = kfac.Eigh(precision)
    tx = kfac.natural_gradient(0.1, layers, preconditioner=preconditioner)
    state = state_of(jax.eval_shape(tx.init, params))
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.blocks))
    plan = kfac.planning.estimate(layers, devices=1, preconditioner=preconditioner)
    assert plan.memory["state"] == held


def test_rounding_below_zero_becomes_zero():
    stack = jnp.array([[[1.0, 1.0], [1.0, 1.0 - 1e-6]]])
    eigen = decompose(stack, jnp.float32)
    assert np.all(eigen.values >= 0)
    np.testing.assert_allclose(eigen.values[0], [0, 2], atol=2e-6)


def test_a_decomposition_that_fails_leaves_the_last_one_of_both_sides():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(2, 3, 3)), jnp.float32)
    factors = Kronecker((x @ x.mT).at[0].set(jnp.nan), x @ x.mT)
    previous = jax.tree.map(lambda x: jnp.full(x.shape, 7.0), kfac.Eigh().init(factors))
    new = jax.jit(lambda: refresh(kfac.Eigh(), previous, factors, jnp.ones(2, bool), jnp.float32(1e-3)))()
    np.testing.assert_array_equal(new.valid, [False, True])
    for side, stack in ((new.preconditioner.A, factors.A), (new.preconditioner.G, factors.G)):
        np.testing.assert_array_equal(side.vectors[0], 7)
        np.testing.assert_array_equal(side.values[0], 7)
        q = np.asarray(side.vectors[1])
        np.testing.assert_allclose((q * side.values[1]) @ q.T, stack[1], atol=1e-5)


@pytest.mark.slow
def test_a_damping_that_went_astray_is_a_skipped_step():
    params, layers, factors, gradients = setting(jnp.float32)

    def step(state, damping):
        tx = plain_kfac(0.1, layers, preconditioner=kfac.Eigh(), damping=lambda count: damping)
        state = kfac.observe(state, factors)
        return tx.update(gradients, state, params)

    step = jax.jit(step)
    _, good = step(plain_kfac(0.1, layers, preconditioner=kfac.Eigh()).init(params), 1e-2)
    for damping in (0.0, -1.0, np.nan):
        updates, state = step(good, damping)
        assert all(np.all(np.asarray(x) == 0) for x in jax.tree.leaves(updates))
        assert kfac.diagnostics(state)["skipped_steps"] == 1
