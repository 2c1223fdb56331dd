"""Losses of several batches: each marked output counts with its weight, in statistics of every kind."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kfac
from checking import FAST

LARGE, SMALL, WEIGHT = 96, 32, 2.0


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def problem():
    """A trunk and two heads: 96 rows for one, and for the other 32, which count twice."""
    rng = np.random.default_rng(0)
    shapes = {"large": (8, 4), "small": (8, 3), "trunk": (6, 8)}
    params = {name: jnp.asarray(rng.normal(size=shape) / 2) for name, shape in shapes.items()}
    rows = {"large": (LARGE, 4), "small": (SMALL, 3)}
    batch = {
        k: (jnp.asarray(rng.normal(size=(n, 6))), jnp.asarray(rng.normal(size=(n, d)))) for k, (n, d) in rows.items()
    }
    return params, batch


def term(params, name, pair, marked=True, scanned=False):
    def residual(x, y):
        z = jnp.tanh(x @ params["trunk"]) @ params[name]
        if marked:
            z = kfac.output(z, "gaussian", weight=1.0 if name == "large" else WEIGHT * LARGE / SMALL)
        return 0.5 * jnp.sum((z - y) ** 2, axis=-1)

    if scanned:
        return jax.lax.map(
            lambda xy: residual(*xy).mean(), jax.tree.map(lambda x: x.reshape(4, -1, x.shape[-1]), pair)
        ).mean()
    return residual(*pair).mean()


def loss_fn(params, batch, **options):
    return term(params, "large", batch["large"], **options) + WEIGHT * term(params, "small", batch["small"], **options)


def truth(params, batch):
    """Second moments of the gradients of each row, those of the small batch counted twice: from one row at a time."""
    blocks = {}
    for name, weight in (("large", 1.0), ("small", WEIGHT)):
        pairs = jax.tree.map(lambda x: x[:, None], batch[name])
        grads = jax.vmap(jax.grad(lambda p, pair, name=name: term(p, name, pair, False)), (None, 0))(params, pairs)
        for leaf, g in grads.items():
            rows = g.reshape(len(g), -1)  # in the order of kron(A, G), as kernels are [d_in, d_out]
            blocks[leaf] = blocks.get(leaf, 0) + weight * rows.T @ rows / len(rows)
    return blocks


@pytest.mark.parametrize("scanned", [False, True])
def test_empirical_statistics(scanned):
    params, batch = problem()
    loss = functools.partial(loss_fn, scanned=scanned)
    layers = kfac.find_layers(loss, params, batch)
    measure = jax.jit(kfac.value_and_grad(loss, layers, num_examples=LARGE), compiler_options=FAST)
    value, grads, factors = measure(params, batch)
    expected = jax.value_and_grad(functools.partial(loss_fn, marked=False))(params, batch)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-10), (value, grads), expected)
    for name, weight in (("large", 1.0), ("small", WEIGHT)):
        x, y = batch[name]
        a = jnp.tanh(x @ params["trunk"])
        error = a @ params[name] - y
        # The mean of a a^T, and the mean of g g^T, which the weight multiplies.
        product = weight * jnp.kron(a.T @ a / len(a), error.T @ error / len(a))
        np.testing.assert_allclose(kfac.curvature.exact.dense(factors[name]), product, rtol=1e-9, atol=1e-12)


def test_exact_blocks():
    params, batch = problem()
    layers = kfac.find_layers(loss_fn, params, batch)
    found = kfac.curvature.exact.fisher_blocks(loss_fn, layers, fisher="empirical", num_examples=LARGE)(params, batch)
    for name, block in truth(params, batch).items():
        np.testing.assert_allclose(found[name], block, rtol=1e-9, atol=1e-12)


def test_the_small_head_has_the_size_that_it_has():
    """Of an output without a mark nobody knows the weight: with `num_examples` its curvature is six times too large."""
    params, batch = problem()

    def size(fisher, **options):
        loss = functools.partial(loss_fn, **options)
        layers = kfac.find_layers(loss, params, batch)
        key = {} if fisher == "empirical" else {"fisher_key": jax.random.key(0)}
        measure = kfac.value_and_grad(loss, layers, num_examples=LARGE, fisher=fisher)
        block = jax.jit(measure, compiler_options=FAST)(params, batch, **key)[2]["small"]
        return float(jnp.trace(block.A) * jnp.trace(block.G))

    a = jnp.tanh(batch["small"][0] @ params["trunk"])
    of_gauss_newton = WEIGHT * 3 * float(jnp.sum(a**2)) / SMALL
    np.testing.assert_allclose(size("expected"), of_gauss_newton, rtol=1e-10)
    np.testing.assert_allclose(size("empirical", marked=False), 6 * size("empirical"), rtol=1e-10)


def test_without_marks_the_message_says_to_mark():
    params, batch = problem()
    loss = functools.partial(loss_fn, marked=False)
    layers = kfac.find_layers(loss, params, batch)
    with pytest.raises(ValueError, match=r"mark the output of each batch, kfac\.output\(\.\.\., weight=\)"):
        jax.eval_shape(kfac.value_and_grad(loss, layers), params, batch)


def test_weights_are_of_all_that_the_loss_has():
    """What no mark reaches would have no statistics."""
    params, batch = problem()

    def loss(params, batch):
        return term(params, "large", batch["large"], False) + term(params, "small", batch["small"])

    layers = kfac.find_layers(loss, params, batch)
    with pytest.raises(ValueError, match=r"weight= of kfac\.output: the loss depends on 'large', but no marked output"):
        jax.eval_shape(kfac.value_and_grad(loss, layers, num_examples=LARGE), params, batch)
