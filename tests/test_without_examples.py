"""Products whose other operand holds no examples, biases of the other sign, and names that could collide."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kfac

RNG = np.random.default_rng(0)


def array(*shape):
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


X, Y = array(8, 6), array(8, 5)
CONSTANT, TABLE = array(6, 3), array(16, 6)


def squares(out, y):
    return jnp.mean(jnp.sum((out - y) ** 2, axis=-1))


def test_a_subtracted_output_gives_no_bias_of_the_wrong_sign():
    """For one example the block must be the outer product of the gradient: `b - x @ w` has a bias of the other sign."""
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
    table = (TABLE @ params["r"])[:8]
    return squares(x @ params["w"] + table, y)


def closed_over(params, y):
    return squares(jnp.tanh(X @ params["w"]) @ params["v"], y)


def scaled_table(params, x, y):
    return squares((x[:, None] + TABLE * params["s"]).sum(1) @ params["w"], y)


@pytest.mark.parametrize(
    ("loss", "params", "skip"),
    [
        (low_rank, {"w": array(6, 5), "a": array(6, 2), "b": array(2, 5)}, ()),
        (low_rank, {"w": array(6, 5), "a": array(6, 2), "b": array(2, 5)}, ("^a$", "^w$")),
        (low_rank_of_a_constant, {"a": array(6, 2), "b": array(2, 5)}, ("^a$",)),
        (basis, {"c": array(3, 5)}, ()),
        (constant_positions, {"r": array(6, 5), "w": array(6, 5)}, ()),
        (closed_over, {"w": array(6, 4), "v": array(4, 5)}, ()),
    ],
    ids=["low rank", "low rank, skipped", "of a constant", "basis", "positions", "closed over"],
)
def test_a_product_without_examples_is_refused(loss, params, skip):
    args = (Y,) if loss is closed_over else (X, Y)
    with pytest.raises(kfac.UnsupportedLayerError, match=r"holds no examples|is a different array") as error:
        kfac.find_layers(loss, params, *args, skip=skip)
    assert "skip=(" in str(error.value)
    # The way out that the message names leads out.
    names = sorted(params)
    assert {layer.kind for layer in kfac.find_layers(loss, params, *args, skip=[f"^{n}$" for n in names])} == {
        "skipped"
    }


def test_a_scaled_constant_is_coarse_rather_than_taken_for_examples():
    params = {"s": array(6), "w": array(6, 5)}
    layers = kfac.find_layers(scaled_table, params, X[:, :6], Y)
    assert layers["s"].coarse and layers["w"].kind == "dense"


def test_a_loss_without_arguments_has_its_examples_in_constants():
    params = {"w": array(6, 5)}
    layers = kfac.find_layers(lambda params: squares(X @ params["w"], Y), params)
    factors = kfac.value_and_grad(lambda params: squares(X @ params["w"], Y), layers)(params)[2]
    np.testing.assert_allclose(factors["w"].A, X.T @ X / 8, rtol=1e-4, atol=1e-4)


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


def test_flattened_tokens_with_as_many_heads_as_examples_are_refused():
    params = {"w": array(6, 8), "s": jnp.ones(2)}

    def loss(params, x):  # [4 examples * 3 tokens, 4 heads, 2]
        heads = (x.reshape(12, 6) @ params["w"]).reshape(12, 4, 2)
        return jnp.mean((heads * params["s"]).reshape(4, 3, 8) ** 2)

    x = array(4, 3, 6)
    layers = kfac.find_layers(loss, params, x)
    with pytest.raises(ValueError, match=r"'s'.*not clear which of its axes has the 4 examples"):
        kfac.value_and_grad(loss, layers, num_examples=4)(params, x)
