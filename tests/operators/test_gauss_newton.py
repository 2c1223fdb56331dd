"""Test `kfac.curvature.gauss_newton` against dense matrices in float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from jax.scipy.sparse.linalg import cg
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import kfac
from checking import normal

pytestmark = pytest.mark.usefixtures("x64")
N, SHIFT = 24, 0.3


def network(p, x):
    return jnp.tanh(x @ p["in"]["w"] + p["in"]["b"]) @ p["out"]


def losses(p, batch):
    """Compute a loss with two marked outputs, which have different numbers of rows."""
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
    """Compute the matrix from Jacobians and Hessians, row by row."""
    flat, unravel = ravel_pytree(parameters())
    x, _, edge = data()

    def written_out(flat, x, edge):
        j = jax.jacobian(lambda w: network(unravel(w), x))(flat)
        p = jax.nn.softmax(network(unravel(flat), x))
        h = jax.vmap(jnp.diag)(p) - p[:, :, None] * p[:, None]
        k = jax.jacobian(lambda w: network(unravel(w), edge))(flat)
        return (jnp.einsum("rcp,rcd,rdq->pq", j, h, j) + 1.5 * jnp.einsum("rcp,rcq->pq", k, k)) / N

    with jax.enable_x64(True):
        return np.asarray(jax.jit(written_out)(flat, x, edge))


def whole(**options):
    return kfac.curvature.gauss_newton(losses, parameters(), data(), num_examples=N, **options)


@functools.cache
def blocks():
    layers = kfac.find_layers(losses, parameters(), data())
    measure = kfac.value_and_grad(losses, layers, fisher="expected", num_examples=N)

    @jax.jit
    def measured(params, data):
        return kfac.curvature.block_operator(layers, measure(params, data, fisher_key=jax.random.key(0))[2])

    return measured(parameters(), data())


def tree(seed=5):
    return jax.tree.map(lambda x: normal(seed, *x.shape), parameters())


def of(matrix, tree):
    return ravel_pytree(matrix @ tree)[0]


close = functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("batches", [1, 4])
def test_products(batches):
    matrix = whole(batches=batches)
    flat = ravel_pytree(tree())[0]

    @jax.jit
    def products(m, tree, flat):
        return of(m, tree), m @ flat, m.to_dense()

    of_tree, of_flat, written_out = products(matrix, tree(), flat)
    close(of_tree, dense() @ flat)
    close(of_flat, dense() @ flat)
    close(written_out, dense())
    assert matrix.size == len(flat) == 40
    assert repr(matrix) == "GaussNewton(40 parameters)"
    with pytest.raises(ValueError, match=r"a flat vector has shape \[3\], but there are 40 parameters"):
        matrix @ jnp.ones(3)


def test_tokens_and_their_number():
    """Check that a sequence is an example if `num_examples` says so."""
    x = normal(6, 6, 4, 4)

    def loss(w, x):
        return 0.5 * jnp.sum(kfac.mark_output(x @ w, "gaussian") ** 2) / len(x)

    w = normal(7, 4, 2)
    expected = np.kron(np.einsum("nti,ntj->ij", x, x) / 6, np.eye(2))
    for batches in (1, 3):
        close(kfac.curvature.gauss_newton(loss, w, x, num_examples=6, batches=batches).to_dense(), expected)


@pytest.mark.parametrize("preconditioned", [True, False])
def test_solutions_by_conjugate_gradients(preconditioned):
    flat = ravel_pytree(tree())[0]
    near = (2 * blocks() + SHIFT).inv() if preconditioned else None

    @jax.jit
    def solve(matrix, near, flat):
        precondition = None if near is None else lambda v: near @ v
        return cg(lambda v: 2 * (matrix @ v) + SHIFT * v, flat, tol=1e-12, M=precondition)[0]

    expected = np.linalg.solve(2 * dense() + SHIFT * np.eye(40), flat)
    np.testing.assert_allclose(solve(whole(), near, flat), expected, rtol=1e-8, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("batches", [1, 4])
def test_samples_have_the_covariance(batches):
    matrix = whole(batches=batches)
    keys = jax.random.split(jax.random.key(0), 4000)
    draw = jax.jit(lambda keys: jax.lax.map(lambda k: ravel_pytree(matrix.sample(k))[0], keys, batch_size=500))
    draws = np.asarray(draw(keys))
    scale = np.sqrt(np.outer(np.diag(dense()), np.diag(dense())))
    assert np.abs((draws.T @ draws / len(draws) - dense()) / scale).max() < 0.1


def test_four_devices_are_one():
    mesh = Mesh(jax.devices()[:4], ("d",))
    x, labels, edge = data()
    spread = jax.device_put((x, labels, edge), NamedSharding(mesh, PartitionSpec("d")))
    params = jax.device_put(parameters(), NamedSharding(mesh, PartitionSpec()))
    matrix = kfac.curvature.gauss_newton(losses, params, spread, num_examples=N)
    close(jax.jit(of)(matrix, tree()), dense() @ ravel_pytree(tree())[0])


def test_refusals():
    cases = [
        (dict(batches=0), "batches must be"),
        (dict(batches=5), "batches=5 does not divide"),
        (dict(num_examples=0), "num_examples must be"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            kfac.curvature.gauss_newton(losses, parameters(), data(), **options)
    with pytest.raises(ValueError, match="a scalar among the data: loss_fn may close over"):
        kfac.curvature.gauss_newton(losses, parameters(), data(), jax.random.key(0), batches=3)
    with pytest.raises(ValueError, match="Pass num_examples= to gauss_newton"):
        kfac.curvature.gauss_newton(losses, parameters(), data()) @ tree()
