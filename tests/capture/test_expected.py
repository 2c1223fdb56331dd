"""Check that `fisher="expected"` gives the exact Fisher matrix, also with weights, variances and custom likelihoods."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.sharding import PartitionSpec as P
from test_sampled import (
    OUT,
    D,
    N,
    T,
    assert_unbiased,
    assert_within,
    exact_factors,
    function,
    loss_of,
    many,
    mixing,
    network,
    parameters,
)

import kfac
from checking import normal, rotations
from exact import fisher_blocks
from oracle import Hook, relative_error

pytestmark = pytest.mark.usefixtures("x64")
KEY = jax.random.key(3)
LAPLACE = kfac.curvature.Likelihood(
    sample=lambda key, x: x + jax.random.laplace(key, x.shape, x.dtype),
    log_prob=lambda x, target: -jnp.abs(target - x).sum(-1),
    root=lambda x, v: v,
)


def assert_equal(factors, expected, tolerance=1e-9, but=()):
    for name in set(factors) - set(but):
        block = factors[name]
        if isinstance(expected[name], tuple):
            for found, right in zip((block.A, block.G), expected[name], strict=True):
                assert relative_error(found.reshape(right.shape), right) < tolerance, name
        else:
            assert relative_error(block.F.ravel(), expected[name].ravel()) < tolerance, name


NAMED = ("categorical", "bernoulli", "gaussian", "residual", "poisson")


@pytest.mark.parametrize("likelihood", [*NAMED, LAPLACE], ids=[*NAMED, "own"])
def test_it_is_the_expectation(likelihood):
    params, x = parameters(), normal(9, N, D)
    name = likelihood if isinstance(likelihood, str) else "gaussian"  # H is the identity for both
    loss = loss_of(network, likelihood)
    _, grads, factors = function(loss, params, x, fisher="expected")(params, x, fisher_key=KEY)
    assert_equal(factors, exact_factors(network, name, params, x, N))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12), grads, jax.jit(jax.grad(loss))(params, x))


@pytest.mark.slow
@pytest.mark.parametrize("n", [None, N])
def test_the_loss_is_a_mean_over_tokens_unless_the_user_says_otherwise(n):
    """Check that each token of a sequence has its own target. A scale sums over tokens with random signs."""
    params, x = parameters(), normal(9, N, T, D)
    expected = exact_factors(network, "poisson", params, x, n or N * T)
    found = function(loss_of(network, "poisson"), params, x, fisher="expected", num_examples=n)
    assert_equal(found(params, x, fisher_key=KEY)[2], expected, but=["scale"])
    assert_unbiased(many(found, params, x, draws=2000), expected)


@pytest.mark.slow
@pytest.mark.parametrize("fisher", ["sampled", "expected"])
def test_moments_of_sequences_are_unbiased(fisher):
    """Check that moments and the blocks of vectors match the exact matrix on average over targets or signs."""
    params, x, loss = parameters(), normal(9, N, T, D), loss_of(network, "categorical")
    layers = kfac.find_layers(loss, params, x)
    exact = jax.jit(fisher_blocks(loss, layers))(params, x)
    basis = rotations(layers)
    measure = jax.jit(functools.partial(function(loss, params, x, fisher=fisher), basis=basis))
    found = many(measure, params, x, draws=4000)
    for name, vectors in basis.items():
        assert_within(found[name].moments, of_basis(exact[name], vectors))
    assert_within(jax.tree.map(np.ravel, found["scale"].F), np.diag(exact["scale"]))


def of_basis(block, vectors):
    """Return the diagonal of an exact block in a basis, as a matrix `[d_out, d_in]`."""
    q = np.kron(vectors.A, vectors.G)
    return np.diag(q.T @ np.asarray(block) @ q).reshape(vectors.A.shape[-1], vectors.G.shape[-1]).T


def test_where_examples_interact_signs_make_it_unbiased():
    params, x = parameters(), normal(9, N, D)

    def coupled(hook, p, x):
        z = network(hook, p, x)
        return z + 0.5 * jnp.tanh(z).mean(0)

    found = many(function(loss_of(coupled, "categorical"), params, x, fisher="expected"), params, x, draws=2000)
    assert_unbiased(found, exact_factors(coupled, "categorical", params, x, N))


def test_marks_in_a_scan_and_one_prediction_for_many_positions():
    params, x = parameters(), normal(9, N, T, D)
    found = function(loss_of(mixing, "categorical"), params, x, fisher="expected")(params, x, fisher_key=KEY)[2]
    assert_equal(found, exact_factors(mixing, "categorical", params, x, N))

    def scanned(p, x):
        def one(total, part):
            z = kfac.mark_output(network(Hook(), p, part), "categorical")
            return total - jax.nn.log_softmax(z)[:, 0].mean() / T, None

        return lax.scan(one, jnp.zeros(()), x.swapaxes(0, 1))[0]

    found = function(scanned, params, x, fisher="expected", rules={"scale": "skip"})(params, x, fisher_key=KEY)[2]
    by_token = exact_factors(lambda hook, p, x: network(hook, p, x.reshape(-1, D)), "categorical", params, x, N * T)
    assert_equal(found, by_token)


def test_moments_are_expected_too():
    params, x, loss = parameters(), normal(9, N, D), loss_of(network, "categorical")
    layers = kfac.find_layers(loss, params, x)
    exact = jax.jit(fisher_blocks(loss, layers))(params, x)
    measure = jax.jit(kfac.value_and_grad(loss, layers, fisher="expected"))
    basis = kfac.curvature.eigenbasis(measure(params, x, fisher_key=KEY)[2], layers)
    factors = measure(params, x, fisher_key=KEY, basis=basis)[2]
    for name, vectors in basis.items():  # the moments are the exact block's diagonal in the basis
        assert relative_error(factors[name].moments, of_basis(exact[name], vectors)) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("border_rows", [2 * N, 1])
def test_weights_and_a_variance_are_those_of_the_exact_matrix(border_rows):
    """Compare `gauss_newton` and the factors with explicit sums, for an interior and a boundary with their own rows."""
    params, x, edge, ratio = parameters(), normal(9, N, D), normal(10, border_rows, D), 3 * N / border_rows
    variance = 0.5 + jnp.arange(OUT)

    def loss(p, x, edge):
        z = kfac.mark_output(network(Hook(), p, x), "gaussian", variance=variance)
        inner = 0.5 * (z**2 / variance).sum(-1).mean()
        border = kfac.mark_output(network(Hook(), p, edge), "residual", weight=ratio)
        return inner + 3 * 0.5 * (border**2).sum(-1).mean()

    def plain(p, x):  # return both terms as rows of one least-squares problem
        return jnp.concatenate([network(Hook(), p, x) / jnp.sqrt(variance), jnp.sqrt(ratio) * network(Hook(), p, edge)])

    layers = kfac.find_layers(loss, params, x, edge, rules={"scale": "skip"})
    exact = jax.jit(fisher_blocks(loss, layers, num_examples=N))(params, x, edge)
    jacobian = jax.jit(jax.jacobian(plain))(params, x)
    j = jacobian["out"].reshape(-1, jacobian["out"].shape[-2] * jacobian["out"].shape[-1])
    assert relative_error(exact["out"], np.asarray(j.T @ j) / N) < 1e-9
    measure = jax.jit(kfac.value_and_grad(loss, layers, fisher="expected", num_examples=N))
    factors = measure(params, x, edge, fisher_key=KEY)[2]
    hook = j.reshape(-1, *jacobian["out"].shape[-2:])
    inputs = np.concatenate([np.asarray(hidden(params, v)) for v in (x, edge)])
    assert relative_error(factors["out"].A, inputs.T @ inputs / N) < 1e-9
    roots = np.concatenate([np.tile(1 / variance, (N, 1)), np.full((border_rows, OUT), ratio)])
    assert relative_error(factors["out"].G, np.diag(roots.sum(0)) / (N + border_rows)) < 1e-9
    assert hook.shape[1:] == params["out"].shape


def hidden(p, x):
    return jnp.tanh(x @ p["in"]["w"] + p["in"]["b"]) * p["scale"]


def test_three_devices_are_one():
    params, x = parameters(), normal(9, N, D)
    mesh = Mesh(np.asarray(jax.devices()[:3]), ("data",))
    measure = function(loss_of(network, "categorical"), params, x, fisher="expected")

    def local(params, x):
        factors = measure(params, x, fisher_key=KEY)[2]
        return jax.tree.map(lambda leaf: lax.pmean(leaf, "data"), factors)

    sharded = jax.shard_map(
        local, mesh=mesh, in_specs=(PartitionSpec(), PartitionSpec("data")), out_specs=PartitionSpec()
    )
    assert_equal(jax.jit(sharded)(params, x), exact_factors(network, "categorical", params, x, N))


def test_an_own_likelihood_without_a_root_can_be_drawn_only():
    params, x = parameters(), normal(9, N, D)
    loss = loss_of(network, kfac.curvature.Likelihood(LAPLACE.sample, LAPLACE.log_prob))
    found = many(function(loss, params, x), params, x, draws=3000)
    assert_unbiased(found, exact_factors(network, "gaussian", params, x, N))
    with pytest.raises(
        ValueError, match="fisher='expected' needs the curvature of the loss: give the Likelihood a root="
    ):
        function(loss, params, x, fisher="expected")(params, x, fisher_key=KEY)
    with pytest.raises(ValueError, match="fisher='expected' draws signs: pass a PRNG key"):
        function(loss, params, x, fisher="expected")(params, x)


@pytest.mark.slow
@pytest.mark.parametrize(("likelihood", "fisher"), [("gaussian", "expected"), ("poisson", "sampled")])
def test_a_mesh_with_explicit_axes_is_one_device(likelihood, fisher):
    params, x = parameters(), normal(9, 2 * N, D)
    measure = jax.jit(function(loss_of(network, likelihood), params, x, fisher=fisher))
    one = measure(params, x, fisher_key=KEY)[2]
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in ((params, P()), (x, P("data")))]
    for name, block in measure(*placed, fisher_key=KEY)[2].whole().items():
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-12), block, one[name])
