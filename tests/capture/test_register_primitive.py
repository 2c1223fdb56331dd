"""Operations of a user's own: one entry in the table says what they are.

Uses the inside of `_capture.equations`: its table is emptied after each test.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.extend import core as jex

import kfac
from checking import kinds, normal
from kfac._capture import equations

N, D, H = 6, 5, 4


def _multiply(x_ref, w_ref, out_ref):
    out_ref[...] = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)


def kernel(x, w, body=_multiply, **options):
    """A small matrix product in Pallas."""
    shape = jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype)
    return pl.pallas_call(body, out_shape=shape, interpret=True, **options)(x, w)


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


@pytest.fixture(autouse=True)
def table(monkeypatch):
    """What a test registers is forgotten afterwards."""
    monkeypatch.setattr(equations, "_REGISTERED", {})


@pytest.fixture
def registered(table):
    kfac.register_primitive(pallas_matmul, lambda x, w: x @ w)
    kfac.register_primitive(own_transpose, lambda w: w.T)
    kfac.register_primitive(own_block)


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


def test_like_may_call_a_jitted_function_with_a_number(registered):
    @jax.jit
    def swapped(w, unused):
        return w.T

    kfac.register_primitive(own_transpose, lambda w: swapped(w, 2.0))
    params, x = parameters(), normal(4, N, D, dtype=np.float32)
    assert kfac.find_layers(own, params, x) == kfac.find_layers(written, params, x)


def test_without_an_entry_they_have_the_gradients_own_factors():
    params, x = parameters(), normal(4, N, D, dtype=np.float32)
    assert kinds(kfac.find_layers(own, params, x)) == dict.fromkeys(("in/b", "in/w", "middle"), "gradient-factors") | {
        "out": "dense"
    }
    reason = r"is read by custom_vjp_call\(.*\): .* custom_vjp_call.*\n"
    with pytest.raises(kfac.UnsupportedLayerError, match=rf"'in/b' {reason}.*'in/w' {reason}.*'middle' {reason}"):
        kfac.find_layers(own, params, x, strict=True)


@pytest.mark.parametrize("kernel_of", [jnp.exp, lambda w: w / jnp.linalg.norm(w, axis=0)], ids=["exp", "normalised"])
def test_a_kernel_without_rows_in_a_product_has_none_in_a_registered_one(registered, kernel_of):
    def loss(p, x):
        return jnp.mean(pallas_matmul(x, kernel_of(p["w"])) ** 2)

    params, x = {"w": normal(0, D, H, dtype=np.float32)}, normal(1, N, D, dtype=np.float32)
    assert kinds(kfac.find_layers(loss, params, x)) == {"w": "gradient-factors"}
    with pytest.raises(kfac.UnsupportedLayerError, match=r"'w' is read by custom_vjp_call"):
        kfac.find_layers(loss, params, x, strict=True)


def of_primitive():
    multiply = jex.Primitive("multiply")
    multiply.def_abstract_eval(lambda x, w: x.update(shape=(x.shape[0], w.shape[1])))
    return multiply, multiply.bind


def of_foreign_function():
    def call(x, w):
        return jax.ffi.ffi_call("multiply", jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype))(x, w)

    return "multiply", call


@pytest.mark.parametrize(
    "make",
    [
        lambda: (_multiply, kernel),
        lambda: (_multiply, functools.partial(kernel, name="multiply")),
        lambda: (_multiply, functools.partial(kernel, body=functools.partial(_multiply))),
        of_primitive,
        of_foreign_function,
    ],
    ids=["pallas", "pallas with a name", "pallas of a partial function", "primitive", "ffi"],
)
def test_without_a_derivative_of_their_own_they_are_found_though_not_differentiated(make):
    operation, call = make()
    params, x = {"w": normal(0, D, H, dtype=np.float32)}, normal(1, N, D, dtype=np.float32)

    def found():
        return kinds(kfac.find_layers(lambda p, x: jnp.mean(call(x, p["w"]) ** 2), params, x))

    assert found() == {"w": "gradient-factors"}
    kfac.register_primitive(operation, lambda x, w: x @ w)
    assert found() == {"w": "dense"}


def test_those_that_a_function_makes_are_refused(table):
    """None can be told from the others: what is said of one would change the gradients of all."""

    def make(factor):
        @jax.custom_vjp
        def block(x, w):
            return jnp.tanh(x @ w)

        block.defvjp(lambda x, w: (block(x, w), (x, w)), lambda kept, g: (g * factor, kept[1]))
        return block

    with pytest.raises(ValueError, match="define it at the top level of a module"):
        kfac.register_primitive(make(1.0))


def test_bad_entries(registered):
    for operation in ("", None, 3, jnp.float32(1)):
        with pytest.raises(ValueError, match="operation must be a function with a custom derivative, the"):
            kfac.register_primitive(operation)
    with pytest.raises(ValueError, match="like must be a function or None, but is 3"):
        kfac.register_primitive(pallas_matmul, 3)
    for operation in ("a target", jax.extend.core.primitives.dot_general_p):
        with pytest.raises(ValueError, match="like must be a function, since"):
            kfac.register_primitive(operation)
    kfac.register_primitive(own_transpose, lambda w: w * 1.0)
    with pytest.raises(
        ValueError, match=r"register_primitive\(\w+\): like combines an array with a constant of its own"
    ):
        kfac.find_layers(own, parameters(), normal(4, N, D, dtype=np.float32))
    kfac.register_primitive(own_transpose, lambda w: w.T)
    kfac.register_primitive(pallas_matmul, lambda x, w: jnp.tanh(x @ w))
    with pytest.raises(ValueError, match=r"register_primitive\(pallas_matmul\): like must be a single operation"):
        kfac.find_layers(own, parameters(), normal(4, N, D, dtype=np.float32))
