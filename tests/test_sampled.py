"""`fisher="sampled"`: the mean of many draws against the exact Fisher matrix's factors, in closed form."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import kfac
from checking import FAST, check_coarse, normal
from oracle import Hook, relative_error

N, T, D, HIDDEN, OUT = 6, 3, 5, 4, 3
LIKELIHOODS = ("categorical", "bernoulli", "gaussian")


# -- the oracle: exact factors by one backward pass for every row and every value of its target --------------------------


def value_gradients(likelihood, z):
    """For one row of outputs, the values of its target with what matters of them: weights and gradients `E[y] - y`."""
    classes = len(z)
    if likelihood == "categorical":
        p = np.exp(z - z.max())
        p /= p.sum()
        return [(p[c], p - np.eye(classes)[c]) for c in range(classes)]
    if likelihood == "bernoulli":  # features are independent, so that one at a time gives all second moments
        p = 1 / (1 + np.exp(-z))
        weights = [(c, y, p[c] if y else 1 - p[c]) for c in range(classes) for y in (0, 1)]
        return [(w, np.eye(classes)[c] * (p[c] - y)) for c, y, w in weights]
    return [(1.0, np.eye(classes)[c]) for c in range(classes)]


def exact_factors(model, likelihood, params, x, n):
    """`A`, `G` by layer, and `F` by vector, expected over the model's own targets; `model(hook, params, x)` is the output."""
    recorder = Hook()
    z = np.asarray(model(recorder, params, x))
    zeros = {key: np.zeros(*entry) for key, entry in recorder.shapes.items()}

    def of(zeros):
        hook = Hook(zeros)
        return model(hook, params, x), hook.inputs

    _, pull, inputs = jax.vjp(of, zeros, has_aux=True)
    pull = jax.jit(lambda g, pull=pull: pull(g)[0])
    sums = {}
    for row in np.ndindex(*z.shape[:-1]):
        for weight, gradient in value_gradients(likelihood, z[row]):
            cotangent = np.zeros_like(z)
            cotangent[row] = gradient / n
            for key, g in pull(cotangent).items():
                g = np.asarray(g)
                if key.endswith("@"):
                    sums[key] = sums.get(key, 0.0) + weight * n * np.square(g).sum(0)
                else:
                    rows = g.reshape(-1, g.shape[-1])
                    sums[key] = sums.get(key, 0.0) + weight * rows.T @ rows
    found = {}
    for key, total in sums.items():
        name = key[:-1] if key.endswith("@") else key.split("#")[0]
        if key.endswith("@"):
            found[name] = total
            continue
        a = np.asarray(inputs[key]).reshape(-1, inputs[key].shape[-1])
        _, bias, _ = recorder.static[key]
        a = np.concatenate([a, np.ones((len(a), 1))], axis=1) if bias else a
        found[name] = (a.T @ a / n, total * n / (len(a) / n))
    return found


# -- models -----------------------------------------------------------------------------------------------------------


def network(hook, p, x):
    x = jnp.tanh(hook.layer("in", x, x @ p["in"]["w"] + p["in"]["b"], bias=True))
    x = x * hook.vector("scale", p["scale"], x.shape[0]).reshape(x.shape[0], *[1] * (x.ndim - 2), HIDDEN)
    return hook.layer("out", x, x @ p["out"])


def mixing(hook, p, x):
    """Tokens see each other, and one prediction is made for each example."""
    x = network(hook, p, x)
    return x.mean(1) + 0.5 * jnp.tanh(x[:, 0] * x[:, -1])


def parameters(dtype=np.float64):
    shapes = {"in": {"w": (D, HIDDEN), "b": (HIDDEN,)}, "scale": (HIDDEN,), "out": (HIDDEN, OUT)}
    flat, tree = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    return jax.tree.unflatten(tree, [normal(k, *shape, dtype=dtype) for k, shape in enumerate(flat)])


def targets(likelihood, z):
    t = jnp.sin(7 * jnp.arange(z.size, dtype=z.dtype)).reshape(z.shape)
    return jax.nn.softmax(t) if likelihood == "categorical" else t > 0 if likelihood == "bernoulli" else t


def nll(likelihood, z, t):
    if likelihood == "categorical":
        return -jnp.sum(t * jax.nn.log_softmax(z), axis=-1)
    if likelihood == "bernoulli":
        return -jnp.sum(jnp.where(t, jax.nn.log_sigmoid(z), jax.nn.log_sigmoid(-z)), axis=-1)
    return 0.5 * jnp.sum((t - z) ** 2, axis=-1)


def loss_of(model, likelihood):
    def loss(p, x):
        z = kfac.output(model(Hook(), p, x), likelihood)
        return nll(likelihood, z, targets(likelihood, z)).mean()

    return loss


def function(loss, params, *args, fisher="sampled", **options):
    skip = options.pop("skip", ())
    return kfac.value_and_grad(loss, kfac.find_layers(loss, params, *args, skip=skip), fisher=fisher, **options)


def compiled(fn):
    return jax.jit(fn, compiler_options=FAST)


def many(fn, params, *args, draws, key=0):
    """Mean and standard error of the factors over so many keys."""
    keys = jax.random.split(jax.random.key(key), (draws // 100, 100))

    @compiled
    def moments(keys):
        def some(keys):
            factors = jax.vmap(lambda key: fn(params, *args, key=key)[2])(keys)
            return jax.tree.map(lambda f: (f.sum(0), jnp.square(f).sum(0)), dict(factors))

        return jax.tree.map(lambda s: s.sum(0), lax.map(some, keys))

    def finish(pair):
        mean, square = (np.asarray(s) / draws for s in pair)
        return mean, np.sqrt(np.maximum(square - mean**2, 0) / draws)

    return jax.tree.map(finish, moments(keys), is_leaf=lambda x: isinstance(x, tuple))


def assert_within(found, expected, sigmas=5.0):
    """Every entry within so many standard errors of its expectation, and these small enough to tell something."""
    mean, error = found
    scale = np.max(np.abs(expected))
    assert np.all(np.abs(mean - expected) <= sigmas * error + 1e-9 * scale)
    assert np.max(error) < 0.05 * scale


def assert_unbiased(found, expected):
    assert set(found) == set(expected)
    for name, block in found.items():
        if isinstance(block, kfac.layers.Kronecker):
            a, g = expected[name]
            assert relative_error(block.A[0], a) < 1e-9
            assert_within(block.G, g)
        else:
            assert_within(jax.tree.map(lambda x: x.ravel(), block.F), expected[name])


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_the_mean_of_many_draws_is_the_exact_fisher(x64, likelihood):
    params, x = parameters(), normal(9, N, D)
    found = many(function(loss_of(network, likelihood), params, x), params, x, draws=4000)
    assert_unbiased(found, exact_factors(network, likelihood, params, x, N))


def test_every_token_of_a_sequence_is_an_example_unless_the_user_says_otherwise(x64):
    params, x = parameters(), normal(9, N, T, D)
    loss = loss_of(network, "categorical")

    def by_token(hook, p, x):
        return network(hook, p, x.reshape(-1, D))

    found = many(function(loss, params, x), params, x, draws=3000)
    assert_unbiased(found, exact_factors(by_token, "categorical", params, x, N * T))
    # With n = N the log-likelihood of an example is the sum over its tokens, and they are positions.
    found = many(function(loss, params, x, num_examples=N), params, x, draws=3000)
    assert_unbiased(found, exact_factors(network, "categorical", params, x, N))


def test_one_prediction_for_many_positions(x64):
    params, x = parameters(), normal(9, N, T, D)
    found = many(function(loss_of(mixing, "gaussian"), params, x), params, x, draws=4000)
    assert_unbiased(found, exact_factors(mixing, "gaussian", params, x, N))
