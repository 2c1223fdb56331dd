"""Operations of a user's own: one entry in the table says what they are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import kfac
from checking import normal

N, D, H = 6, 5, 4


def _multiply(x_ref, w_ref, out_ref):
    out_ref[...] = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)


def kernel(x, w):
    """A small matrix product in Pallas."""
    shape = jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype)
    return pl.pallas_call(_multiply, out_shape=shape, interpret=True, name="multiply")(x, w)


@jax.custom_vjp
def pallas_matmul(x, w):
    return kernel(x, w)


pallas_matmul.defvjp(lambda x, w: (kernel(x, w), (x, w)), lambda kept, g: (kernel(g, kept[1].T), kernel(kept[0].T, g)))


@jax.custom_vjp
def own_transpose(w):
    return w.T


own_transpose.defvjp(lambda w: (w.T, None), lambda _, g: (g.T,))


@jax.custom_vjp
def own_block(x, w, b):
    return jnp.tanh(x @ w + b)


def _own_block_forward(x, w, b):
    y = own_block(x, w, b)
    return y, (x, w, y)


def _own_block_backward(kept, g):
    x, w, y = kept
    g = g * (1 - y**2)
    return g @ w.T, x.T @ g, g.sum(0)


own_block.defvjp(_own_block_forward, _own_block_backward)


def network(p, x, product, transpose, block):
    h = block(x, p["in"]["w"], p["in"]["b"])
    h = jnp.tanh(product(h, transpose(p["middle"])))
    return jnp.mean(jnp.sum((h @ p["out"]) ** 2, -1))


def written(p, x):
    return network(p, x, lambda x, w: x @ w, lambda w: w.T, lambda x, w, b: jnp.tanh(x @ w + b))


def own(p, x):
    return network(p, x, pallas_matmul, own_transpose, own_block)


@pytest.fixture
def registered():
    """The three functions in the table, and out of it afterwards."""
    from kfac._capture import primitives

    before = dict(primitives._REGISTERED)
    kfac.register_primitive("pallas_matmul", lambda x, w: x @ w)
    kfac.register_primitive("own_transpose", lambda w: w.T)
    kfac.register_primitive("own_block")
    yield
    primitives._REGISTERED.clear()
    primitives._REGISTERED.update(before)


def parameters():
    weights = {"w": normal(0, D, H, dtype=np.float32), "b": normal(1, H, dtype=np.float32)}
    return {
        "in": weights,
        "middle": normal(2, H, H, dtype=np.float32),
        "out": normal(3, H, 2, dtype=np.float32),
    }


def test_registered_operations_have_the_statistics_of_what_they_are_like(registered):
    params, x = parameters(), normal(4, N, D, dtype=np.float32)
    layers = kfac.find_layers(own, params, x)
    assert layers == kfac.find_layers(written, params, x)
    found = jax.jit(kfac.value_and_grad(own, layers))(params, x)
    expected = jax.jit(kfac.value_and_grad(written, layers))(params, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected)


def test_without_an_entry_they_are_refused_by_name():
    with pytest.raises(kfac.UnsupportedLayerError, match=r"custom_vjp_call.*cannot be followed"):
        kfac.find_layers(own, parameters(), normal(4, N, D, dtype=np.float32))


@pytest.mark.parametrize("kernel_of", [jnp.exp, lambda w: w / jnp.linalg.norm(w, axis=0)], ids=["exp", "normalised"])
def test_what_a_product_refuses_a_registered_one_refuses_too(registered, kernel_of):
    params, x = {"w": normal(0, D, H, dtype=np.float32)}, normal(1, N, D, dtype=np.float32)
    with pytest.raises(kfac.UnsupportedLayerError, match=r"'w'.*skip="):
        kfac.find_layers(lambda p, x: jnp.mean(pallas_matmul(x, kernel_of(p["w"])) ** 2), params, x)


def test_a_pallas_call_by_its_own_name():
    from kfac._capture import primitives

    def loss(p, x):  # without a derivative of its own it can be found, though not differentiated
        return jnp.mean(kernel(x, p["w"]) ** 2)

    params, x = {"w": normal(0, D, H, dtype=np.float32)}, normal(1, N, D, dtype=np.float32)
    kfac.register_primitive("multiply", lambda x, w: x @ w)
    try:
        assert kfac.find_layers(loss, params, x)["w"].kind == "dense"
    finally:
        del primitives._REGISTERED["multiply"]


def test_bad_entries(registered):
    with pytest.raises(ValueError, match="name must be the name"):
        kfac.register_primitive("")
    with pytest.raises(ValueError, match="like must be a function or None, but is 3"):
        kfac.register_primitive("pallas_matmul", 3)
    kfac.register_primitive("pallas_matmul", lambda x, w: jnp.tanh(x @ w))
    with pytest.raises(ValueError, match=r"register_primitive\('pallas_matmul'\): like must be a single operation"):
        kfac.find_layers(own, parameters(), normal(4, N, D, dtype=np.float32))
