"""Check that kernels inside custom derivatives, Pallas kernels and foreign functions have no exact rows."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

import kfac
from checking import kinds, normal

pytestmark = pytest.mark.usefixtures("x64")
N, T, D = 3, 4, 5


@jax.custom_jvp
def block(w, b, x):
    return jnp.tanh(x @ w + b)


def derivative(of, primals, tangents):
    (w, b, x), (tw, tb, tx) = primals, tangents
    y = of(w, b, x)
    return y, (1 - y**2) * (x @ tw + tb + tx @ w)


block.defjvp(functools.partial(derivative, block))


def mean_loss(y, t):
    return jnp.mean(jnp.sum(jnp.tanh(y) * t, axis=(1, 2)))


def custom(p, x, t):
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


@pytest.mark.parametrize("kind", ["jvp", "vjp"])
def test_a_custom_derivative_that_is_not_the_identity_has_the_gradients_own_factors(kind):
    """Check rules that differ from the identity only by a factor that depends on the data."""
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


def multiply(x_ref, w_ref, out_ref):
    out_ref[...] = jnp.dot(x_ref[...], w_ref[...])


def by_pallas(x, w):
    return pl.pallas_call(multiply, jax.ShapeDtypeStruct((len(x), w.shape[1]), x.dtype), interpret=True)(x, w)


def by_foreign_function(x, w):
    return jax.ffi.ffi_call("multiply", jax.ShapeDtypeStruct((len(x), w.shape[1]), x.dtype))(x, w)


@pytest.mark.parametrize("product", [by_pallas, by_foreign_function])
def test_products_that_cannot_be_seen_have_the_gradients_own_factors(product):
    layers = kfac.find_layers(lambda p, x: jnp.mean(product(x, p["w"]) ** 2), {"w": jnp.ones((D, D))}, jnp.ones((N, D)))
    assert kinds(layers) == {"w": "gradient-factors"}
