"""`kfac.curvature.exact` against Jacobians and per-example gradients written out, in float64."""

from __future__ import annotations

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import kfac
from checking import normal
from likelihoods import LIKELIHOODS, nll, targets, value_gradients
from oracle import example_gradients, relative_error

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
    """Rows `[k, p]` by layer of `network`, in the order of `kron(A, G)`: kernels `[in, out]` as they lie, then bias."""
    tree = jax.tree.map(np.asarray, tree)
    k = len(tree["out"])
    dense = np.concatenate([tree["in"]["w"].reshape(k, -1), tree["in"]["b"]], axis=1)
    norm = np.concatenate([tree["scale"], tree["shift"]], axis=1)
    return {"in": dense, "scale": norm, "out": tree["out"].reshape(k, -1)}


def true_fisher(model, likelihood, params, x, n, flatten=columns):
    """The mean over `n` of the score's second moment over all targets, for independent rows of the output."""
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
    return jax.jit(kfac.curvature.exact.fisher_blocks(loss, layers, **options))(params, *args)


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
    """Not by way of scores: the Gauss-Newton matrix of a linear model is the Hessian of its loss."""
    params, x = {"w": normal(0, D, OUT)}, normal(9, N, D)
    loss = loss_of(lambda p, x: x @ p["w"], "categorical")
    hessian = jax.hessian(lambda w: loss({"w": w.reshape(D, OUT)}, x))(params["w"].ravel())
    assert_same(found(loss, params, x), {"w": np.asarray(hessian)})


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_the_empirical_fisher(x64, likelihood):
    params, x = parameters(), normal(9, N, D)
    t = targets(likelihood, network(params, x))

    def loss(p, x, t):
        return nll(likelihood, kfac.mark_output(network(p, x), likelihood), t).mean()

    gradients = columns(example_gradients(loss, params, (x, t)))
    expected = {name: N * g.T @ g for name, g in gradients.items()}
    assert_same(found(loss, params, x, t, fisher="empirical"), expected)


@pytest.mark.slow
def test_sequences_by_token_and_by_example(x64):
    params, x = parameters(), normal(9, N, T, D)
    loss = loss_of(network, "categorical")
    assert_same(found(loss, params, x), true_fisher(network, "categorical", params, x, N * T))
    by_example = true_fisher(network, "categorical", params, x, N)
    assert_same(found(loss, params, x, num_examples=N), by_example)

    def total(p, x):
        z = kfac.mark_output(network(p, x), "categorical")
        return nll("categorical", z, jnp.eye(OUT)[0]).sum(-1).mean()

    gradients = columns(example_gradients(total, params, (x,)))
    expected = {name: N * g.T @ g for name, g in gradients.items()}
    assert_same(found(total, params, x, num_examples=N, fisher="empirical"), expected)


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
    gradients = columns(example_gradients(loss, params, (x,)))
    assert_same(found(loss, params, x, fisher="empirical"), {name: N * g.T @ g for name, g in gradients.items()})


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
    assert not layers.unknown_batch_reason
    names = [layer.name for layer in layers.with_factors]
    expected = true_fisher(network, "categorical", params, x, T * N)
    blocks = jax.jit(kfac.curvature.exact.fisher_blocks(loss, layers, names=names, num_examples=N))(params, x)
    assert_same(blocks, {name: T * expected[name] for name in names})
    with pytest.raises(ValueError, match="marked inside a scan, where its 15 rows"):
        kfac.curvature.exact.fisher_blocks(loss, layers, names=names, num_examples=N, fisher="empirical")(params, x)


# -- errors of approximations ------------------------------------------------------------------------------------------


def test_where_the_kronecker_product_is_exact_the_error_is_nothing(x64):
    """One linear layer with unit variance: `G` is the identity."""
    params, x = {"w": normal(0, D, OUT), "b": normal(1, OUT)}, normal(9, N, D)
    loss = loss_of(lambda p, x: x @ p["w"] + p["b"], "gaussian")
    layers = kfac.find_layers(loss, params, x)
    (block,) = jax.jit(kfac.curvature.exact.fisher_blocks(loss, layers))(params, x).values()
    (factors,) = jax.jit(kfac.value_and_grad(loss, layers))(params, x)[2].values()
    error = kfac.curvature.exact.error(block, kfac.curvature.exact.dense(kfac.types.Kronecker(factors.A, jnp.eye(OUT))))
    assert error.relative < 1e-12
    np.testing.assert_allclose(error.cosine, 1, rtol=1e-12)
    twice = kfac.curvature.exact.error(block, 2 * block)
    np.testing.assert_allclose(twice, (1, 1), rtol=1e-12)


def test_dense_blocks_are_written_out(x64):
    a, g = normal(0, 3, 3), normal(1, 2, 2)
    np.testing.assert_allclose(kfac.curvature.exact.dense(kfac.types.Kronecker(a, g)), np.kron(a, g))
    stacked = kfac.curvature.exact.dense(kfac.types.Kronecker(jnp.stack([a, 2 * a]), jnp.stack([g, g])))
    np.testing.assert_allclose(stacked, np.stack([np.kron(a, g), 2 * np.kron(a, g)]))
    f = normal(2, 3, 2, 2)
    expected = np.zeros((6, 6))
    for c in range(3):
        expected[np.ix_([c, 3 + c], [c, 3 + c])] = f[c]
    np.testing.assert_allclose(kfac.curvature.exact.dense(kfac.types.Unitwise(f)), expected)
    with pytest.raises(TypeError, match="must be Kronecker or Unitwise, but is"):
        kfac.curvature.exact.dense(a)
    for diagonal_or_split in (jnp.ones(3), jnp.ones((2, 3, 3))):
        with pytest.raises(ValueError, match=r"block must have factors that are whole matrices, but A has shape \["):
            kfac.curvature.exact.dense(kfac.types.Kronecker(diagonal_or_split, g))


def test_unitwise_factors_are_the_diagonal_blocks_of_the_exact_one(x64):
    params, x = parameters(), normal(9, N, D)
    loss = loss_of(network, "categorical")
    layers = kfac.find_layers(loss, params, x)
    block = found(loss, params, x, fisher="empirical")["scale"].reshape(2, HIDDEN, 2, HIDDEN)
    factors = jax.jit(kfac.value_and_grad(loss, layers))(params, x)[2]
    np.testing.assert_allclose(factors["scale"].F, np.einsum("pcqc->cpq", block), rtol=1e-9)


def test_the_nearest_kronecker_product(x64):
    params, x = parameters(), normal(9, N, D)
    loss = loss_of(network, "categorical")
    layers = kfac.find_layers(loss, params, x)
    blocks = jax.jit(kfac.curvature.exact.fisher_blocks(loss, layers))(params, x)
    factors = jax.jit(kfac.value_and_grad(loss, layers))(params, x)[2]
    for name in ("in", "out"):
        nearest = kfac.curvature.exact.nearest_kronecker(blocks[name], layers[name])
        best = kfac.curvature.exact.error(blocks[name], kfac.curvature.exact.dense(nearest)).relative
        assert best < kfac.curvature.exact.error(blocks[name], kfac.curvature.exact.dense(factors[name])).relative
        for seed in range(20):
            a, g = (f + 1e-3 * normal(seed, *f.shape) for f in (nearest.A, nearest.G))
            assert (
                best
                < kfac.curvature.exact.error(
                    blocks[name], kfac.curvature.exact.dense(kfac.types.Kronecker(a, g))
                ).relative
            )
        for factor in (nearest.A, nearest.G):
            np.testing.assert_allclose(factor, factor.T, atol=1e-12)
            assert np.linalg.eigvalsh(factor).min() > -1e-12
    product = kfac.curvature.exact.dense(factors["in"])
    again = kfac.curvature.exact.dense(kfac.curvature.exact.nearest_kronecker(product, layers["in"]))
    assert relative_error(again, np.asarray(product)) < 1e-12


# -- errors ------------------------------------------------------------------------------------------------------------


def test_bad_arguments_are_errors():
    params, x = {"w": jnp.ones((D, OUT))}, jnp.ones((N, D))
    loss = loss_of(lambda p, x: x @ p["w"], "gaussian")
    layers = kfac.find_layers(loss, params, x)
    fisher_blocks = kfac.curvature.exact.fisher_blocks
    with pytest.raises(ValueError, match="fisher must be 'true' or 'empirical', but is 'sampled'"):
        fisher_blocks(loss, layers, fisher="sampled")
    with pytest.raises(ValueError, match="no layer with statistics is called 'v'; there are w"):
        fisher_blocks(loss, layers, names=["v"])
    with pytest.raises(ValueError, match="the exact Fisher matrix needs the output"):
        fisher_blocks(lambda p, x: jnp.mean(x @ p["w"]), layers)(params, x)
    with pytest.raises(ValueError, match="loss_fn has other layers"):
        fisher_blocks(lambda p, x: kfac.mark_output(x @ p["w"].reshape(OUT, D).T, "gaussian").mean(), layers)(params, x)
    with pytest.raises(ValueError, match=r"exact has shape \[2, 2\], but approximation \[3, 3\]"):
        kfac.curvature.exact.error(jnp.eye(2), jnp.eye(3))
    with pytest.raises(ValueError, match=r"a block of shape \[2, 2\] is not that of dense layer 'w'"):
        kfac.curvature.exact.nearest_kronecker(jnp.eye(2), layers["w"])


@pytest.mark.parametrize("name", ["fisher_blocks", "dense", "error", "nearest_kronecker"])
def test_functions_document_arguments_and_result(name):
    function = getattr(kfac.curvature.exact, name)
    text = inspect.getdoc(function)
    arguments = text.split("Args:")[1].split("Returns:")[0]
    for parameter in inspect.signature(function).parameters:
        assert re.search(rf"^\s+{parameter}\b.*:", arguments, re.MULTILINE), parameter
