"""Functions with a `jax.custom_jvp` around layers: what is in them has no exact rows, unless they are registered."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

import kfac
from checking import check_all, kinds, normal
from oracle import Hook, truth

pytestmark = pytest.mark.usefixtures("x64")
N, T, D = 3, 4, 5


@jax.custom_jvp
def block(w, b, x):
    return jnp.tanh(x @ w + b)


@jax.custom_jvp
def known_block(w, b, x):
    """The same, to be registered, which the other never is."""
    return jnp.tanh(x @ w + b)


def derivative(of, primals, tangents):
    (w, b, x), (tw, tb, tx) = primals, tangents
    y = of(w, b, x)
    return y, (1 - y**2) * (x @ tw + tb + tx @ w)


for of in (block, known_block):
    of.defjvp(functools.partial(derivative, of))


@jax.custom_jvp
def rounded(w):
    return jnp.round(4 * w) / 4


rounded.defjvp(lambda primals, tangents: (rounded(*primals), tangents[0]))


@jax.custom_vjp
def rounded_too(w):
    return jnp.round(4 * w) / 4


rounded_too.defvjp(lambda w: (rounded_too(w), None), lambda _, g: (g,))


def mean_loss(y, t):
    return jnp.mean(jnp.sum(jnp.tanh(y) * t, axis=(1, 2)))


def model(hook, p, x, t):
    y = jnp.tanh(hook.layer("first", x, x @ p["first"]["w"] + p["first"]["b"], bias=True))
    return mean_loss(hook.layer("last", y, y @ p["last"]), t)


def custom(p, x, t, block=block):
    return mean_loss(block(p["first"]["w"], p["first"]["b"], x) @ p["last"], t)


def problem():
    params = {"first": {"w": normal(1, D, D), "b": normal(2, D)}, "last": normal(3, D, 2)}
    return params, (normal(4, N, T, D), normal(5, N, T, 2))


def test_a_layer_inside_has_the_gradients_own_factors():
    params, batch = problem()
    layers = kfac.find_layers(custom, params, *batch)
    assert kinds(layers) == {"first/b": "gradient-factors", "first/w": "gradient-factors", "last": "dense"}
    reason = r"is read by custom_jvp_call\(.*\n"
    with pytest.raises(kfac.UnsupportedLayerError, match=rf"'first/b' {reason}.*'first/w' {reason}"):
        kfac.find_layers(custom, params, *batch, strict=True)


@pytest.mark.parametrize("wrap", [lambda fn: fn, jax.jit, jax.checkpoint], ids=["plain", "jit", "remat"])
def test_registered_it_is_exact(wrap):
    kfac.register_primitive(known_block)
    params, batch = problem()
    loss = wrap(functools.partial(custom, block=known_block))
    layers, _ = check_all(loss, params, batch, truth(model, params, batch))
    assert kinds(layers) == {"first": "dense", "last": "dense"}


@pytest.mark.parametrize("through", [rounded, rounded_too], ids=["jvp", "vjp"])
def test_a_custom_derivative_that_is_the_identity_keeps_a_kernel_exact(through):
    """A kernel rounded straight through, and a number in front, which is not rounded with it."""
    kfac.register_primitive(through, jnp.copy)

    def straight(hook, p, x, t):
        y = jnp.tanh(hook.layer("first", x, x @ p["first"]["w"] + p["first"]["b"], bias=True))
        return mean_loss(hook.layer("last", 0.1 * y, y @ through(0.1 * p["last"])), t)

    params, batch = problem()
    layers, _ = check_all(lambda p, *b: straight(Hook(), p, *b), params, batch, truth(straight, params, batch))
    assert kinds(layers) == {"first": "dense", "last": "dense"}


@pytest.mark.parametrize("kind", ["jvp", "vjp"])
def test_a_custom_derivative_that_is_not_the_identity_has_the_gradients_own_factors(kind):
    """Even if it is the identity but for a number that depends on the data."""
    if kind == "jvp":
        scaled = jax.custom_jvp(lambda w, x: w)
        scaled.defjvp(lambda primals, tangents: (primals[0], jnp.mean(primals[1]) * tangents[0]))
    else:
        scaled = jax.custom_vjp(lambda w, x: w)
        scaled.defvjp(lambda w, x: (w, jnp.mean(x)), lambda mean, g: (mean * g, None))

    def loss(p, x, t):
        return mean_loss(x @ scaled(p["w"], x), t)

    params, batch = problem()
    layers = kfac.find_layers(loss, {"w": params["last"]}, *batch)
    assert kinds(layers) == {"w": "gradient-factors"}


def test_a_mark_inside_is_refused():
    @jax.custom_jvp
    def head(w, x):
        return kfac.mark_output(x @ w, "gaussian")

    head.defjvp(lambda p, t: (head(*p), p[1] @ t[0] + t[1] @ p[0]))
    with pytest.raises(ValueError, match=r"kfac.mark_output cannot be followed inside custom_jvp_call"):
        kfac.find_layers(lambda p, x: jnp.mean(head(p["w"], x)), {"w": jnp.ones((D, D))}, jnp.ones((N, D)))
