"""`kfac.curvature.gauss_newton` and sums of operators against dense matrices in float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import kfac
from checking import FAST, normal

pytestmark = pytest.mark.usefixtures("x64")
N, SHIFT = 24, 0.3


def network(p, x):
    return jnp.tanh(x @ p["in"]["w"] + p["in"]["b"]) @ p["out"]


def losses(p, batch):
    """Two marks with different numbers of rows, one of them by tokens."""
    x, labels, edge = batch
    z = kfac.mark_output(network(p, x), "categorical")
    e = kfac.mark_output(network(p, edge), "residual", weight=1.5)
    return -jnp.mean(jax.nn.log_softmax(z)[jnp.arange(len(x)), labels]) + 0.75 * jnp.sum(e**2) / len(x)


def parameters():
    return {"in": {"w": normal(0, 4, 5) / 2, "b": normal(1, 5)}, "out": normal(2, 5, 3)}


def data():
    labels = jnp.asarray(np.random.default_rng(0).integers(0, 3, N))
    return normal(3, N, 4), labels, normal(4, N // 2, 2, 4)[:, 0]


@functools.cache
def dense():
    """From Jacobians and Hessians row by row."""
    flat, unravel = ravel_pytree(parameters())
    x, _, edge = data()

    def written_out(flat, x, edge):
        j = jax.jacobian(lambda w: network(unravel(w), x))(flat)
        p = jax.nn.softmax(network(unravel(flat), x))
        h = jax.vmap(jnp.diag)(p) - p[:, :, None] * p[:, None]
        k = jax.jacobian(lambda w: network(unravel(w), edge))(flat)
        return (jnp.einsum("rcp,rcd,rdq->pq", j, h, j) + 1.5 * jnp.einsum("rcp,rcq->pq", k, k)) / N

    with jax.enable_x64(True):
        return np.asarray(jax.jit(written_out, compiler_options=FAST)(flat, x, edge))


def whole(**options):
    return kfac.curvature.gauss_newton(losses, parameters(), data(), num_examples=N, **options)


@functools.cache
def blocks():
    layers = kfac.find_layers(losses, parameters(), data())
    measure = kfac.value_and_grad(losses, layers, fisher="expected", num_examples=N)

    @functools.partial(jax.jit, compiler_options=FAST)
    def measured(params, data):
        return kfac.curvature.operator(layers, measure(params, data, fisher_key=jax.random.key(0))[2])

    return measured(parameters(), data())


def shifted(preconditioner=True):
    return 2 * whole(blocks=blocks() if preconditioner else None) + SHIFT


def tree(seed=5):
    return jax.tree.map(lambda x: normal(seed, *x.shape), parameters())


def of(matrix, tree):
    return ravel_pytree(matrix @ tree)[0]


close = functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("batches", [1, 4])
def test_products(batches):
    matrix = whole(batches=batches)
    flat = ravel_pytree(tree())[0]

    @functools.partial(jax.jit, compiler_options=FAST)
    def products(m, tree, flat):
        return of(m, tree), m @ flat, m.to_dense(), of(2 * m + 0.3, tree)

    of_tree, of_flat, written_out, of_sum = products(matrix, tree(), flat)
    close(of_tree, dense() @ flat)
    close(of_flat, dense() @ flat)
    close(written_out, dense())
    close(of_sum, 2 * dense() @ flat + 0.3 * flat)
    assert matrix.size == len(flat) == 40


def test_tokens_and_their_number():
    """A sequence is an example, as `num_examples` says."""
    x = normal(6, 6, 4, 4)

    def loss(w, x):
        return 0.5 * jnp.sum(kfac.mark_output(x @ w, "gaussian") ** 2) / len(x)

    w = normal(7, 4, 2)
    expected = np.kron(np.einsum("nti,ntj->ij", x, x) / 6, np.eye(2))
    for batches in (1, 3):
        close(kfac.curvature.gauss_newton(loss, w, x, num_examples=6, batches=batches).to_dense(), expected)


@pytest.mark.slow
@pytest.mark.parametrize("preconditioner", [True, False])
def test_solutions(preconditioner):
    expected = np.linalg.solve(2 * dense() + (SHIFT + 0.1) * np.eye(40), ravel_pytree(tree())[0])
    found = shifted(preconditioner).solve(tree(), 0.1, tolerance=1e-12)
    np.testing.assert_allclose(ravel_pytree(found.value)[0], expected, rtol=1e-8, atol=1e-9)
    assert found.residual <= 1e-12 and found.steps < 60
    preconditioner = (shifted(preconditioner) + 0.1).inv(tolerance=1e-12)
    np.testing.assert_allclose(of(preconditioner, tree()), expected, rtol=1e-8, atol=1e-9)
    assert not shifted(preconditioner).solve(tree(), max_steps=2).residual < 1e-5


@pytest.mark.slow
def test_eigenpairs():
    values = np.linalg.eigvalsh(dense())[::-1]
    found = whole().eigsh(4, jax.random.key(0))
    close(found.values, values[:4])
    products = jax.jit(lambda m, vectors: jax.vmap(lambda v: (of(m, v), ravel_pytree(v)[0]))(vectors))
    for value, product, vector in zip(values, *products(whole(), found.vectors), strict=False):
        close(product, value * vector, rtol=1e-6, atol=1e-7)
    assert np.all(found.residuals < 1e-7)
    few = whole().eigsh(2, jax.random.key(0), steps=4)
    vector = ravel_pytree(jax.tree.map(lambda x: x[1], few.vectors))[0]
    close(few.residuals[1], np.linalg.norm(dense() @ vector - few.values[1] * vector))
    top = blocks().eigsh(3, jax.random.key(0)).values
    close(top, blocks().eigvalsh()[::-1][:3])


@pytest.mark.slow
def test_eigenvalues_that_are_all_the_same():
    """Every Krylov space is of one dimension, and is left."""
    eye = 0 * whole() + 3.0
    close(eye.eigsh(5, jax.random.key(0)).values, 3.0)
    found = eye.logdet(jax.random.key(0))
    close(found.value, 40 * np.log(3))


@pytest.mark.slow
@pytest.mark.parametrize("preconditioner", [True, False])
def test_determinants_and_traces_with_their_errors(preconditioner):
    matrix, exact = shifted(preconditioner), 2 * dense() + SHIFT * np.eye(40)
    found = jax.jit(lambda m, k: (m.trace(k, 200), m.logdet(k, 200)), compiler_options=FAST)(matrix, jax.random.key(1))
    truths = np.trace(exact), np.linalg.slogdet(exact)[1]
    for estimate, truth in zip(found, truths, strict=True):
        assert abs(estimate.value - truth) < 4 * estimate.error
        assert estimate.error < 0.05 * abs(truth) + 0.3
    preconditioner = matrix.inv(tolerance=1e-10)
    close(preconditioner.logdet(jax.random.key(1), 200).value, -found[1].value)


@pytest.mark.slow
def test_blocks_make_a_determinant_of_few_steps_good():
    """What the steps leave out is in the error."""
    matrices = [2 * whole(blocks=preconditioner) + 1e-3 for preconditioner in (blocks(), None)]
    exact = np.linalg.slogdet(2 * dense() + 1e-3 * np.eye(40))[1]
    found = [matrix.logdet(jax.random.key(1), 64, steps=8) for matrix in matrices]
    preconditioner, alone = (abs(estimate.value - exact) for estimate in found)
    assert preconditioner < 0.4 * alone and preconditioner < 2 * found[0].error and alone < 2 * found[1].error
    single = matrices[0].logdet(jax.random.key(1), probes=1)
    assert np.isinf(single.error) and np.isfinite(single.value)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [6, 40])
@pytest.mark.parametrize("preconditioner", [False, True])
@pytest.mark.parametrize("shift", [1e-4, 1.0])
def test_determinants_lie_within_two_errors(shift, preconditioner, steps):
    """Of 40 keys with 16 vectors each; where the steps are too few, the error says so."""
    matrix, exact = 2 * whole(blocks=blocks() if preconditioner else None) + shift, 2 * dense() + shift * np.eye(40)
    found = jax.jit(lambda keys: jax.lax.map(lambda key: tuple(matrix.logdet(key, 16, steps)), keys))
    values, errors = found(jax.random.split(jax.random.key(0), 40))
    assert np.mean(np.abs(values - np.linalg.slogdet(exact)[1]) < 2 * errors) >= 0.85  # 0.94 are expected
    if steps == 40:
        assert 0.7 < np.mean(errors) / np.std(values) < 1.4


def test_functions():
    values, vectors = np.linalg.eigh(2 * dense() + SHIFT * np.eye(40))
    flat = ravel_pytree(tree())[0]
    close(of(shifted().sqrt(), tree()), vectors @ (np.sqrt(values) * (vectors.T @ flat)))
    close(of(shifted().map(jnp.log), tree()), vectors @ (np.log(values) * (vectors.T @ flat)))


@pytest.mark.slow
@pytest.mark.parametrize("preconditioner", [False, True])
@pytest.mark.parametrize("batches", [1, 4])
def test_samples_have_the_covariance(preconditioner, batches):
    matrix = 2 * whole(batches=batches, blocks=blocks()) + SHIFT
    exact = 2 * dense() + SHIFT * np.eye(40)
    if preconditioner:
        matrix, exact = matrix.inv(), np.linalg.inv(exact)
    keys = jax.random.split(jax.random.key(0), 4000)
    draw = jax.jit(lambda keys: jax.lax.map(lambda k: ravel_pytree(matrix.sample(k))[0], keys, batch_size=500))
    draws = np.asarray(draw(keys))
    scale = np.sqrt(np.outer(np.diag(exact), np.diag(exact)))
    assert np.abs((draws.T @ draws / len(draws) - exact) / scale).max() < 0.1


def test_sums_of_operators():
    a, b = blocks(), jax.jit(lambda m: m.map(jnp.sqrt))(blocks())
    flat, both = ravel_pytree(tree())[0], a + b + SHIFT

    @functools.partial(jax.jit, compiler_options=FAST)
    def values(a, b, whole, both, v):
        of_vector = (a + b) @ v, (a - 2 * b + 0.5) @ v, (whole - a) @ v, (1 - a) @ v
        inverted = both @ both.inv(tolerance=1e-13).__matmul__(v)
        return of_vector, inverted, [m.to_dense() for m in (a, b, a - 0.5, -a)]

    of_vector, inverted, matrices = jax.tree.map(np.asarray, values(a, b, whole(), both, flat))
    of_a, of_b, less, minus = matrices
    expected = of_a + of_b, of_a - 2 * of_b + 0.5 * np.eye(40), dense() - of_a, np.eye(40) - of_a
    for found, matrix in zip(of_vector, expected, strict=True):
        close(found, matrix @ flat)
    close(less, of_a - 0.5 * np.eye(40))
    close(minus, -of_a)
    close(inverted, flat, rtol=1e-7)
    for matrix, name in (
        (a, "BlockOperator"),
        (a + b, "MatrixFreeOperator"),
        (whole(), "MatrixFreeOperator"),
        (both.inv(), "Inverted"),
    ):
        assert repr(matrix) == f"{name}(40 parameters)"
    with pytest.raises(ValueError, match=r"a flat vector has shape \[3\], but there are 40 parameters"):
        a @ jnp.ones(3)


def test_four_devices_are_one():
    mesh = Mesh(jax.devices()[:4], ("d",))
    x, labels, edge = data()
    spread = jax.device_put((x, labels, edge), NamedSharding(mesh, PartitionSpec("d")))
    params = jax.device_put(parameters(), NamedSharding(mesh, PartitionSpec()))
    matrix = kfac.curvature.gauss_newton(losses, params, spread, num_examples=N, blocks=blocks())
    found = jax.jit(lambda m, t: m.solve(t, SHIFT, tolerance=1e-12).value)(matrix, tree())
    expected = np.linalg.solve(dense() + SHIFT * np.eye(40), ravel_pytree(tree())[0])
    np.testing.assert_allclose(ravel_pytree(found)[0], expected, rtol=1e-8, atol=1e-9)


def test_refusals():
    layers = kfac.find_layers(losses, parameters(), data(), skip=["out"])
    measure = kfac.value_and_grad(losses, layers, num_examples=N)
    partial = jax.jit(lambda params, data: kfac.curvature.operator(layers, measure(params, data)[2]))
    partial = partial(parameters(), data())
    cases = [
        (dict(batches=0), "batches must be"),
        (dict(batches=5), "batches=5 does not divide"),
        (dict(num_examples=0), "num_examples must be"),
        (dict(blocks=partial), "blocks leaves out parameters"),
        (dict(blocks=1.0), "blocks must be"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            kfac.curvature.gauss_newton(losses, parameters(), data(), **options)
    with pytest.raises(ValueError, match="Pass num_examples= to gauss_newton"):
        kfac.curvature.gauss_newton(losses, parameters(), data()) @ tree()
