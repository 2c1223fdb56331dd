"""Check that statistics count only the uses of parameters that carry a gradient to the loss."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from test_without_examples import own_factors

import kfac
from checking import normal

N, T, D, H, C = 6, 3, 5, 4, 3


def parameters():
    return {
        "in": {"w": normal(0, D, H, dtype=np.float32), "b": normal(1, H, dtype=np.float32)},
        "norm": {"scale": 1 + 0.1 * normal(2, H, dtype=np.float32), "shift": normal(3, H, dtype=np.float32)},
        "out": {"w": normal(4, H, C, dtype=np.float32), "b": normal(5, C, dtype=np.float32)},
    }


def network(p, x):
    h = jnp.tanh(x @ p["in"]["w"] + p["in"]["b"]) * p["norm"]["scale"] + p["norm"]["shift"]
    return h @ p["out"]["w"] + p["out"]["b"]


def batch(n=N):
    return {"x": normal(7, n, T, D, dtype=np.float32), "y": jax.nn.one_hot(jnp.arange(n * T).reshape(n, T) % C, C)}


def entropy(z, y):
    return -jnp.mean(jnp.sum(y * jax.nn.log_softmax(z), axis=-1))


def plain(p, b):
    return entropy(network(p, b["x"]), b["y"])


def metric_in_aux(p, b):
    return plain(p, b), (network(p, b["x"]).argmax(-1) == b["y"].argmax(-1)).mean()


def metric_of_another_batch(p, b):
    return plain(p, b), plain(p, batch(2 * N))


def norm_in_aux(p, b):
    return plain(p, b), (jnp.linalg.norm(p["in"]["w"]), b["y"] @ p["out"]["w"].T)


def second_pass(p, b):
    """Add a target from the same network without a gradient, as in Q-learning."""
    target = lax.stop_gradient(network(p, jnp.flip(b["x"], 0)))
    return plain(p, b) + 0 * jnp.mean(target), None


def frozen_copy(p, b):
    """Add a target from the same network with its parameters under `stop_gradient`."""
    target = network(jax.tree.map(lax.stop_gradient, p), b["x"])
    return plain(p, b) + jnp.mean(lax.stop_gradient(target) ** 2), None


def unused_output(p, b):
    unused = network(p, b["x"] ** 2)
    del unused
    return plain(p, b), None


def rounded_output(p, b):
    return plain(p, b) + 1e-3 * jnp.mean(jnp.round(network(p, b["x"]))), None


LOSSES = [metric_in_aux, metric_of_another_batch, norm_in_aux, second_pass, frozen_copy, unused_output, rounded_output]


@functools.cache
def expected_factors(layers):
    return jax.jit(kfac.value_and_grad(plain, layers))(parameters(), batch())[2]


@pytest.mark.parametrize(
    ("loss", "under"), [*((loss, "alone") for loss in LOSSES), (metric_in_aux, "jit"), (second_pass, "remat")]
)
@pytest.mark.parametrize("options", [{}, {"rules": {"out": "reduce"}}], ids=["expand", "reduce"])
def test_dead_reads_change_nothing(loss, under, options):
    wrap = {"alone": lambda f: f, "jit": jax.jit, "remat": jax.checkpoint}[under]
    loss = wrap(loss)
    params, data = parameters(), batch()
    layers = kfac.find_layers(plain, params, data, **options)
    assert layers == kfac.find_layers(loss, params, data, has_aux=True, **options)
    found = jax.jit(kfac.value_and_grad(loss, layers, has_aux=True))(params, data)[2]
    expected = expected_factors(layers)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), found, expected)


def test_dead_reads_inside_a_scan():
    def step(p, h, x):
        new = jnp.tanh(x @ p["w"] + h @ p["u"])
        return new, lax.stop_gradient(jnp.cos(x) @ p["w"])

    def loss(p, x, dead):
        def body(h, x):
            h, other = step(p, h, x)
            return h, other if dead else jnp.zeros_like(other)

        h, others = lax.scan(body, jnp.zeros((N, H)), x)
        return jnp.mean(jnp.sum(h**2, -1)) + 0 * jnp.sum(others)

    params, x = (
        {"w": normal(0, D, H, dtype=np.float32), "u": normal(1, H, H, dtype=np.float32)},
        normal(2, T, N, D, dtype=np.float32),
    )
    layers = kfac.find_layers(loss, params, x, kwargs={"dead": False})
    assert layers == kfac.find_layers(loss, params, x, kwargs={"dead": True})
    expected, found = (
        jax.jit(kfac.value_and_grad(functools.partial(loss, dead=dead), layers, num_examples=N))(params, x)[2]
        for dead in (False, True)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), found, expected)


def test_what_comes_back_by_a_later_iteration_counts():
    """Check a result that only the next iteration reads."""

    def loss(p, x):
        def body(carry, x):
            h, total = carry
            return (jnp.tanh(x @ p["w"]), total + jnp.sum(h**2, -1)), None

        (_, total), _ = lax.scan(body, (jnp.zeros((N, H)), jnp.zeros(N)), x)
        return jnp.mean(total)

    params, x = {"w": normal(0, D, H, dtype=np.float32)}, normal(2, T, N, D, dtype=np.float32)
    layers = kfac.find_layers(loss, params, x, batch_argnums=1)
    factors = jax.jit(kfac.value_and_grad(loss, layers, num_examples=N))(params, x)[2]
    rows = np.reshape(x, (-1, D))
    np.testing.assert_allclose(factors["w"].A, rows.T @ rows / N, rtol=1e-5)
    assert layers["w"].kind == "dense"


@pytest.mark.slow
def test_sampled_targets_do_not_count_what_the_outputs_do_not_see():
    """Check two heads that share a kernel. Only the marked head has a likelihood, so the other head does not count."""

    def marked(p, b, beside):
        h = jnp.tanh(b["x"] @ p["in"]["w"] + p["in"]["b"])
        z = kfac.mark_output(h @ p["out"]["w"], "categorical")
        loss = entropy(z, b["y"])
        return loss + 0.1 * jnp.mean((h**2 @ p["out"]["w"]) ** 2) if beside else loss

    params, data, key = parameters(), batch(), jax.random.key(0)
    params = {"in": params["in"], "out": {"w": params["out"]["w"]}}
    results = []
    for beside in (False, True):
        layers = kfac.find_layers(marked, params, data, kwargs={"beside": beside})
        fn = kfac.value_and_grad(marked, layers, fisher="sampled")
        results.append(fn(params, data, kwargs={"beside": beside}, fisher_key=key)[2])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), *results)


def test_marks_that_reach_nothing_do_not_count():
    def loss(p, b):
        z = kfac.mark_output(network(p, b["x"]), "categorical")
        dead = kfac.mark_output(network(p, batch(2 * N)["x"]), "categorical")
        return entropy(z, b["y"]), dead.mean()

    params, data = parameters(), batch()
    layers = kfac.find_layers(loss, params, data, has_aux=True)
    fn = jax.jit(kfac.value_and_grad(loss, layers, has_aux=True, fisher="sampled"))
    factors = fn(params, data, fisher_key=jax.random.key(0))[2]
    assert np.isfinite(factors["out"].G).all()
    assert layers["out"].positions == T


def test_a_weight_penalty_inside_a_mean_over_tokens():
    def loss(p, b):
        return jnp.mean(-jnp.sum(b["y"] * jax.nn.log_softmax(network(p, b["x"])), -1) + jnp.sum(p["out"]["w"] ** 2))

    params, data = parameters(), batch()
    layers = kfac.find_layers(plain, params, data)
    expected = jax.jit(kfac.value_and_grad(plain, layers))(params, data)[2]
    found = jax.jit(kfac.value_and_grad(loss, kfac.find_layers(loss, params, data)))(params, data)[2]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), found, expected)


@pytest.mark.parametrize("axes", [1, 3])
def test_a_penalty_inside_the_network_is_no_penalty(axes):
    def loss(p, b):
        h = b["x"] @ p["in"]["w"] if axes == 3 else (b["x"] @ p["in"]["w"])[:, 0, 0]
        h = jnp.tanh(h + jnp.sum(p["out"]["w"] ** 2))
        return jnp.mean(jnp.sum((jnp.broadcast_to(h.reshape(N, -1)[:, :1], (N, H)) @ p["out"]["w"]) ** 2, -1))

    params = {"in": {"w": normal(0, D, H, dtype=np.float32)}, "out": {"w": normal(4, H, C, dtype=np.float32)}}
    found = own_factors(loss, params, batch())
    assert list(found) == ["out/w"] and re.fullmatch(r"add.*: what reduce_sum makes of it has .*", found["out/w"])


def test_the_number_of_examples_where_the_only_kernel_is_skipped(x64):
    def loss(p, x):
        return jnp.mean(jnp.sum((x @ p["w"]) ** 2 * p["scale"], -1))

    params, x = {"w": normal(0, D, H), "scale": normal(1, H)}, normal(2, 60, D)
    layers = kfac.find_layers(loss, params, x, rules={"^w$": "skip"})
    factors = jax.jit(kfac.value_and_grad(loss, layers))(params, x)[2]
    each = np.square(x @ params["w"]) / 60
    np.testing.assert_allclose(factors["scale"].F[:, 0, 0], 60 * np.sum(each**2, 0), rtol=1e-10)


@pytest.mark.slow
def test_the_key_of_a_loss_stays_its_own():
    def loss(p, x, key):
        keep = jax.random.bernoulli(key, 0.5, x.shape)
        return jnp.mean(jnp.sum(kfac.mark_output(jnp.where(keep, 2 * x, 0) @ p["w"], "gaussian") ** 2, -1)) / 2

    params, x, key = {"w": normal(0, D, H, dtype=np.float32)}, normal(1, N, D, dtype=np.float32), jax.random.key(3)
    layers = kfac.find_layers(loss, params, x, key)
    fn = kfac.value_and_grad(loss, layers, fisher="sampled")
    value, _, _ = fn(params, x, kwargs={"key": key}, fisher_key=jax.random.key(0))
    np.testing.assert_allclose(value, loss(params, x, key), rtol=1e-6)
    with pytest.raises(ValueError, match=r"fisher_key=jax\.random\.key"):
        fn(params, x, kwargs={"key": key})


def test_complex_data_has_no_exact_rows():
    def loss(p, x):
        return jnp.mean(jnp.abs(jnp.fft.rfft(x) @ p["w"]) ** 2)

    found = own_factors(loss, {"w": normal(0, 3, 2, dtype=np.float32)}, normal(1, N, 4, dtype=np.float32))
    assert re.fullmatch(r"dot_general.*: it is multiplied with complex data, whose statistics are .*", found["w"])


@pytest.mark.parametrize("order", ["x + y", "y + x", "y - x"])
def test_a_bias_may_follow_a_residual_connection(order):
    """Check that `(x + h @ w) + b` gets the block of `x + (h @ w + b)`, since both have the same gradients."""
    params = {"w": normal(0, D, D, dtype=np.float32), "b": normal(1, D, dtype=np.float32)}

    def loss(late):
        def of(p, x):
            y, b = jnp.tanh(x) @ p["w"], p["b"]
            y, b = (y, b) if late else (y + b, 0)
            return jnp.mean(jnp.tanh({"x + y": x + y, "y + x": y + x, "y - x": y - x}[order] + b) ** 2)

        return of

    x = normal(2, N, T, D, dtype=np.float32)
    found = {late: kfac.find_layers(loss(late), params, x) for late in (True, False)}
    assert [layer.params for layer in found[True]] == [("w", "b")]
    assert found[True] == found[False]
    _, grads, factors = jax.jit(kfac.value_and_grad(loss(True), found[True]))(params, x)
    expected = jax.jit(kfac.value_and_grad(loss(False), found[False]))(params, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), (grads, factors), expected[1:])


def test_a_bias_of_a_sum_of_two_layers_belongs_to_none():
    params = {name: normal(k, D, D, dtype=np.float32) for k, name in enumerate("uv")} | {"b": jnp.ones(D)}
    x = normal(2, N, D, dtype=np.float32)
    layers = kfac.find_layers(lambda p, x: jnp.mean((x @ p["u"] + x @ p["v"] + p["b"]) ** 2), params, x)
    assert {layer.name: layer.kind for layer in layers} == {"b": "diagonal", "u": "dense", "v": "dense"}
