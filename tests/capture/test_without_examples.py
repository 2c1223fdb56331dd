"""Test products whose other operand holds no examples, biases of the opposite sign, and names that could collide."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kfac
from checking import check_moments, check_vectors
from oracle import example_gradients

RNG = np.random.default_rng(0)


def array(*shape):
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


X, Y = array(8, 6), array(8, 5)
CONSTANT, TABLE = array(6, 3), array(20, 6)


def squares(out, y):
    return jnp.mean(jnp.sum((out - y) ** 2, axis=-1))


def own_factors(loss, params, *args, **options):
    """Return the leaves that have the gradient's own factors, with the reasons.

    The error of `strict` must name these leaves, the reasons, and patterns that skip the leaves.
    """
    found = {
        layer.params[0]: layer.note
        for layer in kfac.find_layers(loss, params, *args, **options)
        if layer.kind == "gradient-factors" and layer.note != "read without examples"
    }
    with pytest.raises(kfac.UnsupportedLayerError) as error:
        kfac.find_layers(loss, params, *args, **options, strict=True)
    assert str(error.value).count(" is read by ") == len(found)
    for name, note in found.items():
        assert f"\n  {name!r} is read by {note}\n" in str(error.value)
    skip = {f"^{re.escape(name)}$": "skip" for name in found}
    assert f"rules={skip!r}" in str(error.value)
    skipped = {**options, "rules": {**options.get("rules", {}), **skip}}
    kfac.find_layers(loss, params, *args, **skipped, strict=True)
    return found


def test_a_subtracted_output_gives_no_bias_of_the_wrong_sign():
    """Check that `b - x @ w` keeps the bias out of the kernel's block, because the bias has the opposite sign.

    For a single example, the block must be the outer product of the gradient.
    """
    params = {"w": array(6, 5), "b": array(5)}

    def loss(params, x, y):
        return squares(params["b"] - x @ params["w"], y)

    layers = kfac.find_layers(loss, params, X[:1], Y[:1])
    assert {layer.params: layer.kind for layer in layers} == {("b",): "diagonal", ("w",): "dense"}
    _, grads, factors = jax.jit(kfac.value_and_grad(loss, layers))(params, X[:1], Y[:1])
    block = jnp.kron(factors["w"].G, factors["w"].A)
    gradient = layers["w"].to_matrix([grads["w"]]).reshape(-1)
    np.testing.assert_allclose(block, jnp.outer(gradient, gradient), rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(factors["b"].F[:, 0, 0], grads["b"] ** 2, rtol=1e-5)


def low_rank(params, x, y):
    return squares(x @ (params["w"] + params["a"] @ params["b"]), y)


def low_rank_of_a_constant(params, x, y):
    return squares(x @ (2 * (jnp.ones((6, 5)) + params["a"] @ params["b"])), y)


def basis(params, x, y):
    return squares(x @ (CONSTANT @ params["c"]), y)


def constant_positions(params, x, y):
    table = (TABLE @ params["r"])[: len(x)]
    return squares(x @ params["w"] + table, y)


COMPUTED, SHARED = "the kernel is a different array, computed from it", "it reads rows that all examples share"


@pytest.mark.parametrize(
    ("loss", "params", "skip", "reasons"),
    [
        (low_rank, {"w": array(6, 5), "a": array(6, 2), "b": array(2, 5)}, (), {"a": COMPUTED, "b": COMPUTED}),
        (low_rank, {"w": array(6, 5), "a": array(6, 2), "b": array(2, 5)}, ("^a$", "^w$"), {"b": SHARED}),
        (low_rank_of_a_constant, {"a": array(6, 2), "b": array(2, 5)}, ("^a$",), {"b": SHARED}),
        (basis, {"c": array(3, 5)}, (), {"c": SHARED}),
        (constant_positions, {"r": array(6, 5), "w": array(6, 5)}, (), {"r": SHARED}),
    ],
    ids=["low rank", "low rank, skipped", "of a constant", "basis", "positions"],
)
def test_a_product_without_examples_has_no_exact_rows(loss, params, skip, reasons):
    found = own_factors(loss, params, X, Y, rules=dict.fromkeys(skip, "skip"))
    assert found.keys() == reasons.keys()
    for name, reason in reasons.items():
        assert found[name].startswith("dot_general") and found[name].endswith(reason)
    # A kernel to which another array is added keeps its exact rows.
    assert {layer.kind for layer in kfac.find_layers(loss, params, X, Y) if layer.name == "w"} <= {"dense"}


@pytest.mark.slow
def test_a_scaled_constant_is_not_taken_for_examples():
    """Check the scale of constants that are added to the examples. Its per-example gradients are known."""

    def loss(params, x, y):
        return squares((x[:, None] + TABLE * params["s"]).sum(1) @ params["w"], y)

    with jax.enable_x64(True):
        params, x, y = jax.tree.map(np.float64, ({"s": array(6), "w": array(6, 5)}, X, Y))
        layers = kfac.find_layers(loss, params, x, y)
        assert {layer.name: layer.kind for layer in layers} == {"s": "diagonal", "w": "dense"}
        check_vectors(
            layers, jax.jit(kfac.value_and_grad(loss, layers))(params, x, y)[2], example_gradients(loss, params, (x, y))
        )


def test_constants_beside_arguments_may_be_shared_by_the_examples():
    layers = kfac.find_layers(lambda params, y: squares(X @ params["w"], y), {"w": array(6, 5)}, Y)
    assert "the loss cannot be traced with 16 examples in argument 1" in repr(layers)
    assert layers["w"].kind == "gradient-factors"
    assert "it reads constants, which the examples that the loss hides may share" in layers["w"].note


def test_a_loss_without_arguments_has_its_examples_in_constants():
    params, words = {"w": array(6, 5)}, "no argument of the loss has an array with a leading axis"

    def loss(params):
        return squares(X @ params["w"], Y)

    layers = kfac.find_layers(loss, params)
    assert layers["w"].kind == "dense" and words in repr(layers)
    with pytest.raises(ValueError, match=f"the number of examples is not clear: {words}"):
        kfac.value_and_grad(loss, layers)(params)
    factors = jax.jit(kfac.value_and_grad(loss, layers, num_examples=8))(params)[2]
    np.testing.assert_allclose(factors["w"].A, X.T @ X / 8, rtol=1e-4, atol=1e-4)
    g = 2 / 8 * (X @ params["w"] - Y)
    np.testing.assert_allclose(factors["w"].G, 8 * g.T @ g, rtol=1e-4, atol=1e-4)


def test_an_initial_state_of_zeros_counts_as_a_position():
    params = {"wx": array(6, 5), "wh": array(5, 5)}

    def loss(params, x, y):
        h = jnp.zeros((x.shape[0], 5))
        for _ in range(2):
            h = jnp.tanh(x @ params["wx"] + h @ params["wh"])
        return squares(h, y)

    layers = kfac.find_layers(loss, params, X, Y)
    assert {layer.name: (layer.kind, layer.positions) for layer in layers} == {"wh": ("dense", 2), "wx": ("dense", 2)}


@pytest.mark.parametrize("where", ["mean", "example"])
def test_a_weight_penalty_is_no_use(where):
    params = {"w": array(6, 5)}

    def loss(params, x, y):
        def one(x, y):
            penalty = 1e-2 * jnp.sum(params["w"] ** 2) if where == "example" else 0
            return jnp.sum((x @ params["w"] - y) ** 2) + penalty

        losses = jax.vmap(one)(x, y)
        return jnp.mean(losses) + (1e-2 * jnp.vdot(params["w"], params["w"]) if where == "mean" else 0)

    layers = kfac.find_layers(loss, params, X, Y)
    assert [layer.kind for layer in layers] == ["dense"]
    _, grads, factors = jax.jit(kfac.value_and_grad(loss, layers))(params, X, Y)
    np.testing.assert_allclose(grads["w"], jax.grad(loss)(params, X, Y)["w"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(factors["w"].A, X.T @ X / 8, rtol=1e-4, atol=1e-4)


def test_names_with_slashes_do_not_collide():
    params = {"a": array(6, 4), "a/k": array(4, 5), "b": {"k": array(5, 5)}}

    def loss(params, x, y):
        return squares(x @ params["a"] @ params["a/k"] @ params["b"]["k"], y)

    layers = kfac.find_layers(loss, params, X, Y)
    assert sorted(layer.name for layer in layers) == ["a", "a/k", "b"]
    factors = jax.jit(kfac.value_and_grad(loss, layers))(params, X, Y)[2]
    assert sorted(factors) == ["a", "a/k", "b"]
    assert "a/k" in layers and layers["a/k"] in layers and "k" not in layers


@pytest.mark.slow
def test_flattened_tokens_with_as_many_heads_as_examples(x64):
    params = {"w": np.float64(array(6, 8)), "s": np.float64(array(2))}

    def loss(params, x):  # heads are [4 examples * 3 tokens, 4 heads, 2]
        heads = (x.reshape(-1, 6) @ params["w"]).reshape(-1, 4, 2)
        return jnp.mean((heads * params["s"]).reshape(-1, 3, 8) ** 2)

    x = np.float64(array(4, 3, 6))
    layers = kfac.find_layers(loss, params, x)
    factors = jax.jit(kfac.value_and_grad(loss, layers))(params, x)[2]
    check_vectors(layers, factors, example_gradients(loss, params, (x,)))
    check_moments(loss, params, (x,))
