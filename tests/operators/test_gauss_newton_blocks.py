"""Test the layers' blocks in `kfac.curvature.gauss_newton` against explicit Jacobians, in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import kfac
from checking import normal
from exact import dense, error, fisher_blocks
from likelihoods import LIKELIHOODS, nll, targets, value_gradients
from oracle import relative_error

N, T, D, HIDDEN, OUT = 5, 3, 4, 3, 2


def network(p, x):
    x = jnp.tanh(x @ p["in"]["w"] + p["in"]["b"])
    return (x * p["scale"] + p["shift"]) @ p["out"]


def parameters():
    shapes = {"in": {"w": (D, HIDDEN), "b": (HIDDEN,)}, "scale": (HIDDEN,), "shift": (HIDDEN,), "out": (HIDDEN, OUT)}
    flat, tree = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    return jax.tree.unflatten(tree, [normal(k, *shape) for k, shape in enumerate(flat)])


def loss_of(model, likelihood):
    def loss(p, x):
        z = kfac.mark_output(model(p, x), likelihood)
        return nll(likelihood, z, targets(likelihood, z)).mean()

    return loss


def columns(tree):
    """Return rows `[k, p]` by layer of `network`, in the order of `kron(A, G)`.

    Kernels `[in, out]` come first, in memory order, and biases last.
    """
    tree = jax.tree.map(np.asarray, tree)
    k = len(tree["out"])
    dense = np.concatenate([tree["in"]["w"].reshape(k, -1), tree["in"]["b"]], axis=1)
    norm = np.concatenate([tree["scale"], tree["shift"]], axis=1)
    return {"in": dense, "scale": norm, "out": tree["out"].reshape(k, -1)}


def true_fisher(model, likelihood, params, x, n, flatten=columns):
    """Return the mean over `n` of the score's second moment over all targets, for independent output rows."""
    z, jacobian = model(params, x), jax.jacrev(model)(params, x)
    rows, features = int(np.prod(z.shape[:-1])), z.shape[-1]
    z = np.asarray(z).reshape(rows, features)
    jacobian = jax.tree.map(
        lambda j: np.asarray(j).reshape(rows, features, *j.shape[len(model(params, x).shape) :]), jacobian
    )
    total = {}
    for r in range(rows):
        for weight, gradient in value_gradients(likelihood, z[r]):
            score = jax.tree.map(lambda j, r=r, g=gradient: np.tensordot(g, j[r], 1)[None], jacobian)
            for name, v in flatten(score).items():
                total[name] = total.get(name, 0.0) + weight * v.T @ v / n
    return total


def found(loss, params, *args, **options):
    layers = kfac.find_layers(loss, params, *args)
    return jax.jit(fisher_blocks(loss, layers, **options))(params, *args)


def assert_same(blocks, expected, tolerance=1e-10):
    assert set(blocks) == set(expected)
    for name, block in blocks.items():
        assert block.dtype == np.float64
        assert relative_error(block, expected[name]) <= tolerance, name


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_the_true_fisher(x64, likelihood):
    params, x = parameters(), normal(9, N, D)
    expected = true_fisher(network, likelihood, params, x, N)
    assert_same(found(loss_of(network, likelihood), params, x), expected)


def test_it_is_the_hessian_where_the_output_is_linear(x64):
    """Compare without scores: the Gauss-Newton matrix of a linear model is its loss's Hessian."""
    params, x = {"w": normal(0, D, OUT)}, normal(9, N, D)
    loss = loss_of(lambda p, x: x @ p["w"], "categorical")
    hessian = jax.hessian(lambda w: loss({"w": w.reshape(D, OUT)}, x))(params["w"].ravel())
    assert_same(found(loss, params, x), {"w": np.asarray(hessian)})


@pytest.mark.slow
def test_sequences_by_token_and_by_example(x64):
    params, x = parameters(), normal(9, N, T, D)
    loss = loss_of(network, "categorical")
    assert_same(found(loss, params, x), true_fisher(network, "categorical", params, x, N * T))
    by_example = true_fisher(network, "categorical", params, x, N)
    assert_same(found(loss, params, x, num_examples=N), by_example)


def test_examples_that_interact(x64):
    def model(p, x):
        return network(p, x - 0.5 * jnp.tanh(x).mean(0))

    def late(p, x):
        z = network(p, x)
        return z - 0.5 * jnp.tanh(z).mean(0)

    for own in (model, late):
        params, x = parameters(), normal(9, N, D)
        assert_same(found(loss_of(own, "categorical"), params, x), true_fisher(own, "categorical", params, x, N))


def test_two_outputs_add_up(x64):
    params, x = parameters(), normal(9, N, D)

    def squares(p, x):
        return jnp.square(network(p, x))

    def loss(p, x):
        one, two = kfac.mark_output(network(p, x), "categorical"), kfac.mark_output(squares(p, x), "gaussian")
        return nll("categorical", one, jnp.eye(OUT)[0]).mean() + nll("gaussian", two, 0.0).mean()

    one = true_fisher(network, "categorical", params, x, N)
    two = true_fisher(squares, "gaussian", params, x, N)
    assert_same(found(loss, params, x), {name: one[name] + two[name] for name in one})


def test_stacked_layers_and_convolutions(x64):
    params = {"conv": normal(0, 2, 2, 1, 2), "stack": normal(1, 2, 8, 8) / 3, "out": normal(2, 8, OUT)}
    x = normal(9, N, 3, 3, 1)

    def model(p, x):
        x = lax.conv_general_dilated(x, p["conv"], (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x.reshape(len(x), -1), p["stack"])
        return x @ p["out"]

    def flatten(tree):
        return {name: leaf.reshape(*leaf.shape[: 1 + (name == "stack")], -1) for name, leaf in tree.items()}

    blocks = found(loss_of(model, "bernoulli"), params, x)

    def of_copy(k):
        def own(tree):
            flat = flatten(tree)
            return {**flat, "stack": flat["stack"][:, k]}

        return true_fisher(model, "bernoulli", params, x, N, own)

    copies = [of_copy(k) for k in range(2)]
    assert blocks["stack"].shape == (2, 64, 64)
    assert_same(blocks, {**copies[0], "stack": np.stack([c["stack"] for c in copies])})


@pytest.mark.slow
def test_an_output_inside_a_scan(x64):
    params, x = parameters(), normal(9, T, N, D)

    def loss(p, x):
        def step(total, x):
            z = kfac.mark_output(network(p, x), "categorical")
            return total + nll("categorical", z, targets("categorical", z)).sum(), None

        return lax.scan(step, 0.0, x)[0] / (x.shape[0] * x.shape[1])

    layers = kfac.find_layers(loss, params, x)
    assert "examples are not known" not in repr(layers)
    names = [layer.name for layer in layers.with_factors]
    expected = true_fisher(network, "categorical", params, x, T * N)
    blocks = jax.jit(fisher_blocks(loss, layers, num_examples=N))(params, x)
    assert_same({name: blocks[name] for name in names}, {name: T * expected[name] for name in names})


def test_where_the_kronecker_product_is_exact_the_error_is_nothing(x64):
    """Check a linear layer with unit variance, where `G` is the identity."""
    params, x = {"w": normal(0, D, OUT), "b": normal(1, OUT)}, normal(9, N, D)
    loss = loss_of(lambda p, x: x @ p["w"] + p["b"], "gaussian")
    layers = kfac.find_layers(loss, params, x)
    (block,) = jax.jit(fisher_blocks(loss, layers))(params, x).values()
    (factors,) = jax.jit(kfac.value_and_grad(loss, layers))(params, x)[2].values()
    apart = error(block, dense(kfac.types.Kronecker(factors.A, jnp.eye(OUT))))
    assert apart.relative < 1e-12
    np.testing.assert_allclose(apart.cosine, 1, rtol=1e-12)
    twice = error(block, 2 * block)
    np.testing.assert_allclose(twice, (1, 1), rtol=1e-12)
