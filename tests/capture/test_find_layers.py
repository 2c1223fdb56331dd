"""Check which block each parameter gets: normalisation, tables, tokens, temperatures, penalties, and inexact leaves."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import kfac
from checking import check_all, kinds, normal, run
from oracle import Hook, relative_error, second_moment, truth
from problem import observing

N, T, C = 4, 3, 6
EPS = 1e-3


def tree(**shapes):
    return {
        name: tree(**shape) if isinstance(shape, dict) else normal(20 + k, *shape, dtype=jnp.result_type(float))
        for k, (name, shape) in enumerate(shapes.items())
    }


def mean_loss(y, t):
    y = y.reshape(y.shape[0], -1)
    return jnp.mean(jnp.sum(jnp.tanh(y) * t[:, : y.shape[1]], axis=1) + 0.5 * jnp.sum(jnp.sin(y), axis=1) ** 2)


def inputs(*shape):
    dtype = jnp.result_type(float)
    return normal(1, N, *shape, dtype=dtype), normal(2, N, 100, dtype=dtype)


# -- batch norm: examples interact, so per-example gradients come from ordinary back-propagation ----------------------


def moments(x, axes):
    mean = jnp.mean(x, axes, keepdims=True)
    return mean, jnp.mean((x - mean) ** 2, axes, keepdims=True)


def plain_spelling(x, mean, var, s, b):
    return (x - mean) / jnp.sqrt(var + EPS) * s + b


def folded_spelling(x, mean, var, s, b):
    return (x - mean) * (lax.rsqrt(var + EPS) * s) + b


def scale_first(x, mean, var, s, b):
    return b + s * ((x - mean) * lax.rsqrt(var + EPS))


def scale_before_the_division(x, mean, var, s, b):
    return (x - mean) * s / jnp.sqrt(var + EPS) + b


def scale_divided(x, mean, var, s, b):
    return (s / jnp.sqrt(var + EPS)) * (x - mean) + b


def shift_subtracted(x, mean, var, s, b):
    return (x - mean) / jnp.sqrt(var + EPS) * s - b


def one_plus_scale(x, mean, var, s, b):
    return (x - mean) * lax.rsqrt(var + EPS) * (1 + s) + b


def one_plus_scale_folded(x, mean, var, s, b):
    return (x - mean) * (lax.rsqrt(var + EPS) * (s + 1.0)) + b


def jitted_helper(x, mean, var, s, b):
    return jax.jit(folded_spelling)(x, mean, var, s, b)


def multiplier_into_a_jitted_helper(x, mean, var, s, b):
    return jax.jit(lambda x, mean, mul, b: (x - mean) * mul + b)(x, mean, lax.rsqrt(var + EPS) * s, b)


def product_and_sum_in_jitted_helpers(x, mean, var, s, b):
    return jax.jit(jnp.add)(jax.jit(jnp.multiply)((x - mean) / jnp.sqrt(var + EPS), s), b)


def under_remat(x, mean, var, s, b):
    return jax.checkpoint(folded_spelling)(x, mean, var, s, b)


def negated_twice(x, mean, var, s, b):
    return (mean - x) * (-s * lax.rsqrt(var + EPS)) + b


SPELLINGS = [
    plain_spelling,
    folded_spelling,
    scale_first,
    scale_before_the_division,
    scale_divided,
    shift_subtracted,
    one_plus_scale,
    one_plus_scale_folded,
    jitted_helper,
    multiplier_into_a_jitted_helper,
    product_and_sum_in_jitted_helpers,
    under_remat,
    negated_twice,
]
NETWORK = {"in": {"w": (5, C)}, "norm": {"scale": (C,), "shift": (C,)}, "out": {"w": (C, 2)}}


def normalising_network(spelling, axes, evaluation=False, zero_scale=False):
    """Return a reference network, a loss to test, and parameters.

    The reference gives each example its own scale and shift.
    """

    def network(hook, p, x, t, s, b):
        y = hook.layer("in", x, x @ p["in"]["w"])
        mean, var = moments(y, axes)
        if evaluation:
            mean, var = jnp.linspace(-1, 1, C), jnp.linspace(0.5, 2, C)
        y = jnp.tanh(spelling(y, mean, var, s, b))
        return mean_loss(hook.layer("out", y, y @ p["out"]["w"]), t)

    def reference(hook, p, x, t):
        shape = (len(x), *(1,) * (x.ndim - 2), C)
        s = hook.vector("norm/scale", p["norm"]["scale"], len(x)).reshape(shape)
        b = hook.vector("norm/shift", p["norm"]["shift"], len(x)).reshape(shape)
        return network(hook, p, x, t, s, b)

    def loss(p, x, t):
        return network(Hook(), p, x, t, p["norm"]["scale"], p["norm"]["shift"])

    params = tree(**NETWORK)
    if zero_scale:
        params["norm"]["scale"] = jnp.zeros(C)
    return reference, loss, params


def check_norm(reference, loss, params, batch, expected="unitwise", interacting=True):
    known = truth(reference, params, batch, interacting=interacting)
    layers, factors = check_all(loss, params, batch, known, vectors=known.vectors)
    assert kinds(layers) == {"in": "dense", "norm": expected, "out": "dense"}
    return layers, factors


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_batch_norm(x64, spelling):
    reference, loss, params = normalising_network(spelling, axes=(0, 1))
    layers, _ = check_norm(reference, loss, params, inputs(T, 5))
    assert layers["norm"].params == ("norm/scale", "norm/shift")
    assert (layers["norm"].d_out, layers["norm"].d_in) == (C, 2)


@pytest.mark.parametrize("spelling", [plain_spelling, folded_spelling])
def test_batch_norm_of_vectors(x64, spelling):
    reference, loss, params = normalising_network(spelling, axes=(0,))
    check_norm(reference, loss, params, inputs(5))


@pytest.mark.parametrize("spelling", [plain_spelling, folded_spelling])
def test_a_scale_initialised_at_zero(x64, spelling):
    """Check that the normalised input comes from the forward pass, not from a division by the scale."""
    reference, loss, params = normalising_network(spelling, axes=(0, 1), zero_scale=True)
    _, factors = check_norm(reference, loss, params, inputs(T, 5))
    assert np.min(np.abs(factors["norm"].F)[:, 0, 0]) > 1e-8


@pytest.mark.parametrize("spelling", [plain_spelling, folded_spelling, scale_divided])
def test_batch_norm_with_running_averages(x64, spelling):
    reference, loss, params = normalising_network(spelling, axes=(0, 1), evaluation=True)
    check_norm(reference, loss, params, inputs(T, 5), interacting=False)


@pytest.mark.parametrize("spelling", SPELLINGS[:8])
def test_layer_norm(x64, spelling):
    reference, loss, params = normalising_network(spelling, axes=(-1,))
    check_norm(reference, loss, params, inputs(T, 5), interacting=False)


def test_layer_norm_under_vmap(x64):
    def loss(p, x, t):
        def one(x):
            y = x @ p["in"]["w"]
            y = plain_spelling(y, *moments(y, -1), p["norm"]["scale"], p["norm"]["shift"])
            return jnp.tanh(y) @ p["out"]["w"]

        return mean_loss(jax.vmap(jax.vmap(one))(x), t)

    reference, _, params = normalising_network(plain_spelling, axes=(-1,))
    check_norm(reference, loss, params, inputs(T, 5), interacting=False)


def test_rms_norm_has_no_shift(x64):
    def loss(p, x, t):
        y = x @ p["in"]["w"]
        y = y * lax.rsqrt(jnp.mean(y**2, axis=-1, keepdims=True) + EPS) * p["norm"]["scale"]
        return mean_loss(jnp.tanh(y) @ p["out"]["w"], t)

    def reference(hook, p, x, t):
        y = hook.layer("in", x, x @ p["in"]["w"])
        y = y / jnp.sqrt(jnp.mean(y**2, axis=-1, keepdims=True) + EPS) * p["norm"]["scale"]
        return mean_loss(hook.layer("out", jnp.tanh(y), jnp.tanh(y) @ p["out"]["w"]), t)

    params, batch = tree(**NETWORK), inputs(T, 5)
    del params["norm"]["shift"]
    layers, _ = check_all(loss, params, batch, truth(reference, params, batch))
    assert kinds(layers) == {"in": "dense", "norm": "unitwise", "out": "dense"}
    assert layers["norm"].d_in == 1


@pytest.mark.parametrize("split_scale", [False, True])
def test_group_norm_with_channels_first(x64, split_scale):
    def network(hook, p, x, t):
        y = jnp.einsum("ntd,dc->nct", x, p["in"]["w"])
        y = hook.layer("in", x, y.swapaxes(1, 2)).swapaxes(1, 2)
        groups = y.reshape(len(x), 2, C // 2, T)
        mean, var = moments(groups, (2, 3))
        groups = (groups - mean) / jnp.sqrt(var + EPS)
        if split_scale:
            y = groups * p["norm"]["scale"].reshape(2, C // 2, 1) + p["norm"]["shift"].reshape(2, C // 2, 1)
            y = y.reshape(len(x), C, T)
        else:
            y = groups.reshape(len(x), C, T) * p["norm"]["scale"][:, None] + p["norm"]["shift"][:, None]
        y = jnp.tanh(y).swapaxes(1, 2)
        return mean_loss(hook.layer("out", y, y @ p["out"]["w"]), t)

    def loss(p, x, t):
        return network(Hook(), p, x, t)

    params, batch = tree(**NETWORK), inputs(T, 5)
    layers, _ = check_all(loss, params, batch, truth(network, params, batch))
    assert kinds(layers) == {"in": "dense", "norm": "unitwise", "out": "dense"}


def test_norm_of_the_raw_input(x64):
    def loss(p, x, t):
        x = plain_spelling(x, *moments(x, -1), p["norm"]["scale"], p["norm"]["shift"])
        return mean_loss(jnp.tanh(x) @ p["out"]["w"], t)

    def reference(hook, p, x, t):
        x = jnp.tanh(plain_spelling(x, *moments(x, -1), p["norm"]["scale"], p["norm"]["shift"]))
        return mean_loss(hook.layer("out", x, x @ p["out"]["w"]), t)

    params = {name: leaf for name, leaf in tree(**NETWORK).items() if name != "in"}
    batch = inputs(T, C)
    layers, _ = check_all(loss, params, batch, truth(reference, params, batch))
    assert kinds(layers) == {"norm": "unitwise", "out": "dense"}


@pytest.mark.slow
@pytest.mark.parametrize("remat", [False, True])
def test_norms_in_a_scan(x64, remat):
    """Check a stacked scale and shift, and a scale that all iterations share."""

    def block(x, w, s, b, shared):
        x = jnp.tanh(x @ w)
        x = plain_spelling(x, *moments(x, -1), s, b)
        return x * shared

    def loss(p, x, t):
        def body(x, layer):
            return block(x, *layer, p["shared"]), None

        stacked = (p["stack"]["w"], p["norm"]["s"], p["norm"]["b"])
        x, _ = lax.scan(jax.checkpoint(body) if remat else body, x, stacked)
        return mean_loss(x, t)

    def reference(hook, p, x, t):
        for k in range(2):
            y = hook.layer(f"stack[{k}]", x, x @ p["stack"]["w"][k])
            y = jnp.tanh(y)
            x = plain_spelling(y, *moments(y, -1), p["norm"]["s"][k], p["norm"]["b"][k]) * p["shared"]
        return mean_loss(x, t)

    params = tree(norm={"s": (2, C), "b": (2, C)}, shared=(C,), stack={"w": (2, C, C)})
    batch = inputs(T, C)
    layers, factors = check_all(loss, params, batch, truth(reference, params, batch))
    assert kinds(layers) == {"norm": "unitwise", "shared": "unitwise", "stack": "dense"}
    assert layers["norm"].params == ("norm/s", "norm/b")
    assert factors["norm"].F.shape == (2 * C, 2, 2)


def test_low_precision_norm_keeps_its_statistics_in_float32():
    reference, loss, params = normalising_network(folded_spelling, axes=(0, 1))
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
    batch = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), inputs(T, 5))

    def low_precision(p, x, t):
        return loss(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), p), x.astype(jnp.bfloat16), t)

    layers, _, factors = run(loss, params, batch, rounding=1e-5)
    low_layers, _, low = run(low_precision, params, batch, rounding=1e-1)
    assert layers == low_layers
    assert low["norm"].F.dtype == jnp.float32
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), (params, batch))
        known = truth(reference, *wide, interacting=True)
    expected = second_moment([known.vectors["norm/scale"], known.vectors["norm/shift"]])
    assert relative_error(factors["norm"].F, expected) <= 1e-5


# -- other vectors -----------------------------------------------------------------------------------------------------


def dense_with(function, **shapes):
    """Return a model with `function(p, x)` between two dense layers, and its parameters, including `shapes`."""

    def model(hook, p, x, t):
        x = jnp.tanh(hook.layer("in", x, x @ p["in"]["w"]))
        x = function(p, x)
        return mean_loss(hook.layer("out", x, x @ p["out"]["w"]), t)

    return model, tree(**{"in": {"w": (5, C)}, "out": {"w": (C, 2)}} | shapes)


def check_blocks(model, params, batch, **expected):
    layers, _ = check_all(lambda p, *b: model(Hook(), p, *b), params, batch, truth(model, params, batch))
    assert kinds(layers) == {"in": "dense", "out": "dense"} | expected
    return layers


@pytest.mark.parametrize(
    ("shape", "function"),
    [
        ((T, C), lambda p, x: x + p["table"]),
        ((1, T, C), lambda p, x: x + p["table"]),
        ((T, 1), lambda p, x: x + p["table"]),
        ((2 * T, C), lambda p, x: (x.repeat(2, axis=1) + p["table"])[:, 1:-1]),
        ((C, T), lambda p, x: x - p["table"].T),
        ((C,), lambda p, x: p["table"] + x),
    ],
)
def test_a_positional_table_has_per_example_gradients(x64, shape, function):
    model, params = dense_with(function, table=shape)
    check_blocks(model, params, inputs(T, 5), table="diagonal")


def test_a_table_as_long_as_the_batch_is_not_taken_for_the_examples(x64):
    model, params = dense_with(lambda p, x: x + p["table"], table=(N, C))
    check_blocks(model, params, inputs(N, 5), table="diagonal")


def test_a_learned_temperature(x64):
    model, params = dense_with(lambda p, x: x * p["temperature"], temperature=())
    check_blocks(model, params, inputs(T, 5), temperature="unitwise")
    model, params = dense_with(lambda p, x: x / jnp.exp(p["temperature"]), temperature=())
    check_blocks(model, params, inputs(T, 5), temperature="unitwise")


def test_layer_scale_and_residual(x64):
    model, params = dense_with(lambda p, x: x + p["gamma"] * jnp.sin(x), gamma=(C,))
    check_blocks(model, params, inputs(T, 5), gamma="unitwise")


def test_one_vector_as_scale_and_as_shift(x64):
    model, params = dense_with(lambda p, x: x * p["v"] + p["v"], v=(C,))
    check_blocks(model, params, inputs(T, 5), v="unitwise")


def test_one_scale_for_two_places_and_two_shifts(x64):
    model, params = dense_with(lambda p, x: jnp.tanh(x * p["s"] + p["a"]) * p["s"] + p["b"], s=(C,), a=(C,), b=(C,))
    check_blocks(model, params, inputs(T, 5), s="unitwise", a="diagonal", b="diagonal")


def check_examples(function, name, kind, **shapes):
    """Check a vector's block against the gradients of single examples, and the kernels' blocks against brute force."""
    model, params = dense_with(function, **shapes)
    check_blocks(model, params, inputs(T, 5), **{name: kind})
    check_rows(lambda p, x, t: model(Hook(), p, x, t), params, inputs(T, 5), name, kind)


def check_rows(loss, params, batch, name, kind):
    """Check the kind of a vector, and its block against the gradients of single examples by `jax.vmap`."""
    x, t = batch
    layers = kfac.find_layers(loss, params, x, t)
    assert layers[name].kind == kind
    if kind == "gradient-factors":
        return
    found = jax.jit(kfac.value_and_grad(loss, layers))(params, x, t)[2][name].F
    one = jax.grad(lambda p, x, t: loss(p, x[None], t[None]))
    rows = jax.jit(jax.vmap(one, (None, 0, 0)))(params, x, t)[name]
    squares = jnp.mean(rows.reshape(len(x), -1) ** 2, 0)
    np.testing.assert_allclose(found.reshape(-1), squares, rtol=1e-10)


@pytest.mark.parametrize(
    ("kind", "function"),
    [
        ("unitwise", lambda p, x: x / (p["v"] ** 2 + 1)),
        ("unitwise", lambda p, x: 2.0 / (3.0 + jnp.exp(p["v"])) * x),
        ("unitwise", lambda p, x: x * jnp.exp(jnp.clip(p["v"], -0.5, 0.5))),
        ("unitwise", lambda p, x: jnp.abs(x) ** jnp.exp(p["v"])),
        ("diagonal", lambda p, x: x - jnp.tanh(-p["v"])),
        ("unitwise", lambda p, x: jnp.minimum(x, p["v"])),
        ("unitwise", lambda p, x: p["v"] * x + (1 - p["v"]) * jnp.sin(x)),
        ("unitwise", lambda p, x: p["v"] * x + jnp.sin(x) / (1 + p["v"] ** 2)),
        ("unitwise", lambda p, x: x * jnp.exp(jnp.tile(p["v"][:2], 3))),
    ],
    ids=["divides", "quotient", "clipped", "exponent", "subtracted", "minimum", "gate", "two functions", "tile"],
)
def test_functions_of_a_vector(x64, kind, function):
    check_examples(function, "v", kind, v=(C,))


def test_a_vector_with_a_read_without_known_rows_has_the_gradients_own_factors(x64):
    model, params = dense_with(lambda p, x: p["g"] * x + jnp.sin(x) * jnp.cumsum(p["g"]), g=(C,))
    check_blocks(model, params, inputs(T, 5), g="gradient-factors")


@pytest.mark.parametrize(
    "function",
    [
        lambda p, x: jnp.concatenate([jnp.broadcast_to(p["cls"], (len(x), 1, C)), x], axis=1),
        lambda p, x: jnp.concatenate([jnp.tile(jnp.sin(p["cls"]), (len(x), 2, 1)), x], axis=1),
        lambda p, x: x.at[:, 0].set(p["cls"]),
        lambda p, x: x.at[:, 0].add(p["cls"]),
        lambda p, x: jnp.where(x > 0.5, p["cls"], x),
    ],
    ids=["concatenate", "tile", "set", "add", "where"],
)
def test_a_class_token_has_a_row_for_each_example(x64, function):
    check_examples(function, "cls", "diagonal", cls=(C,))


def with_token(x, v):
    return jnp.concatenate([jnp.broadcast_to(v, (len(x), 1, C)), x], axis=1)


def sorted_inside(x, v):
    order = jnp.argsort(x[:, 0, 0])
    h = with_token(jnp.tanh(with_token(x, v))[order], v)
    return h[jnp.argsort(order)]


@pytest.mark.parametrize(
    "function",
    [
        sorted_inside,
        lambda x, v: with_token((x * jnp.exp(v))[::-1], v)[::-1],
        lambda x, v: with_token(x, v) + with_token(x[::-1], v)[::-1],
        lambda x, v: with_token(x, v) + jnp.roll(with_token(jnp.roll(x, 1, 0), v), -1, 0),
        lambda x, v: jnp.concatenate([jnp.broadcast_to(v, (len(x), 2, C)).reshape(2, -1, C).swapaxes(0, 1), x], 1),
        lambda x, v: jnp.concatenate(
            [jnp.broadcast_to(v, (T, len(x), C)).reshape(-1, C), x.reshape(-1, C)], 1
        ).reshape(len(x), T, 2 * C)[..., C // 2 : 3 * C // 2],
        lambda x, v: x * v + jnp.where(x > 0, jnp.broadcast_to(v, (len(x), T, C))[::-1], x),
        lambda x, v: x * v + lax.scan(
            lambda h, y: (jnp.tanh(h + y), h), jnp.broadcast_to(v, (len(x), C)), x[::-1].swapaxes(0, 1)
        )[1].swapaxes(0, 1)[::-1],
    ],
    ids=["sort", "scaled", "both", "roll", "reshape", "merged", "where", "scan"],
)  # fmt: skip
def test_copies_next_to_data_in_another_order_have_the_gradients_own_factors(x64, function):
    model, params = dense_with(lambda p, x: function(x, p["v"]), v=(C,))
    x, t = inputs(T, 5)
    layers = kfac.find_layers(lambda p, x, t: model(Hook(), p, x, t), params, x, t)
    assert layers["v"].kind == "gradient-factors"


@pytest.mark.parametrize(
    ("kind", "loss"),
    [
        ("unitwise", lambda z, v: mean_square(z / v)),
        ("gradient-factors", lambda z, v: mean_square(z / v) * v**2),
        ("gradient-factors", lambda z, v: mean_square(z * v) * v),
        ("gradient-factors", lambda z, v: mean_square(z / jnp.exp(v)) * jnp.exp(v) ** 2 + 0.1 * jnp.exp(v)),
        ("gradient-factors", lambda z, v: mean_square(z / jnp.exp(v)) + v),
        ("unitwise", lambda z, v: mean_square(z / jnp.exp(v) + v)),
    ],
    ids=["divides", "square after the mean", "after the mean", "penalty", "without examples", "inside the mean"],
)
def test_a_number_that_acts_after_the_mean(x64, kind, loss):
    params = tree(**{"in": {"w": (5, C)}, "v": ()})
    check_rows(lambda p, x, t: loss(jnp.tanh(x @ p["in"]["w"]), p["v"]), params, inputs(T, 5), "v", kind)


def test_a_sum_of_numbers_that_multiplies_the_mean(x64):
    """Check that neither number loses the part of its gradient that comes after the mean."""
    params = tree(**{"in": {"w": (5, C)}, "u": (), "v": ()})

    def loss(p, x, t):
        z = jnp.tanh(x @ p["in"]["w"])
        return mean_square(z * p["u"]) * (p["v"] + p["u"])

    layers = kfac.find_layers(loss, params, *inputs(T, 5))
    assert layers["u"].kind == layers["v"].kind == "gradient-factors"


def mean_square(z):
    return jnp.mean(jnp.sum(z**2, (1, 2)))


@pytest.mark.parametrize(
    "penalty", [lambda w: w[0, 0] ** 2, lambda w: w[1, 1], lambda w: jnp.exp(w[0, 0])], ids=["square", "plain", "exp"]
)
def test_a_penalty_on_an_entry_in_the_loss_of_each_example(x64, penalty):
    params = tree(**{"in": {"w": (5, C)}})
    x, t = inputs(5)

    def loss(p, x, t):
        return jnp.mean(jax.vmap(lambda x: jnp.sum(jnp.tanh(x @ p["in"]["w"]) ** 2) + penalty(p["in"]["w"]))(x))

    assert kfac.find_layers(loss, params, x, t)["in"].kind == "dense"


def test_copies_with_two_readers_have_the_gradients_own_factors(x64):
    """Check copies that are concatenated and added, of which the sum could be a use of its own."""

    def function(p, x):
        copies = jnp.broadcast_to(p["cls"], (len(x), 1, C))
        return jnp.concatenate([copies, x + copies], axis=1)

    model, params = dense_with(function, cls=(C,))
    layers = check_blocks(model, params, inputs(T, 5), cls="gradient-factors")
    assert "has no known rows" in layers["cls"].note


def test_a_learned_initial_state_of_a_scan_has_a_row_for_each_example(x64):
    def model(hook, p, x, t):
        h = jnp.broadcast_to(p["start"], (len(x), C))
        for k in range(x.shape[1]):
            u = hook.layer("in", x[:, k], x[:, k] @ p["in"]["w"])
            h = jnp.tanh(hook.layer("out", h, h @ p["out"]["w"]) + u)
        return mean_loss(h, t)

    def loss(p, x, t):
        def cell(h, x):
            return jnp.tanh(h @ p["out"]["w"] + x @ p["in"]["w"]), None

        h = jnp.broadcast_to(p["start"], (len(x), C))
        return mean_loss(lax.scan(cell, h, x.swapaxes(0, 1))[0], t)

    params = tree(**{"in": {"w": (5, C)}, "out": {"w": (C, C)}, "start": (C,)})
    batch = inputs(T, 5)
    layers, _ = check_all(loss, params, batch, truth(model, params, batch))
    assert kinds(layers) == {"in": "dense", "out": "dense", "start": "diagonal"}
    check_rows(loss, params, batch, "start", "diagonal")


def test_an_unused_parameter(x64):
    model, params = dense_with(lambda p, x: x, unused=(3, 2))
    layers = check_blocks(model, params, inputs(T, 5), unused="skipped")
    assert layers["unused"].note == "no gradient reaches it"
    kept = jax.tree.leaves(kfac.kfac(0.1, layers).init(params))
    assert (3, 2) not in [leaf.shape for leaf in kept], "a momentum"


@pytest.mark.parametrize("derivative", ["vjp", "jvp"])
def test_a_derivative_of_ones_own_reaches_what_is_stopped_inside(derivative, x64):
    if derivative == "vjp":
        rounded = jax.custom_vjp(lambda w: jnp.round(lax.stop_gradient(w)))
        rounded.defvjp(lambda w: (rounded(w), None), lambda _, g: (g,))
    else:
        rounded = jax.custom_jvp(lambda w: jnp.round(lax.stop_gradient(w)))
        rounded.defjvp(lambda w, t: (rounded(*w), *t))
    layers = kfac.find_layers(lambda p, x: jnp.mean((x @ rounded(p["w"])) ** 2), tree(w=(5, C)), normal(0, N, 5))
    assert kinds(layers) == {"w": "gradient-factors"}


@pytest.mark.parametrize(
    "penalty",
    [
        lambda p: 1e-2 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(p)),
        lambda p: 1e-2 * sum(jnp.vdot(leaf, leaf) for leaf in jax.tree.leaves(p)),
        lambda p: 1e-2 * jnp.sum((p["in"]["w"].T @ p["in"]["w"] - jnp.eye(C)) ** 2),
        lambda p: 1e-2 * jnp.max(jnp.abs(p["out"]["w"])) + 1e-2 * jnp.linalg.norm(p["in"]["w"]),
    ],
    ids=["squares", "inner-products", "orthogonality", "norms"],
)
def test_a_weight_penalty_leaves_factors_alone_but_not_gradients(x64, penalty):
    model, params = dense_with(lambda p, x: x + p["b"], b=(C,))
    batch = inputs(T, 5)
    layers, grads, factors = run(lambda p, *b: model(Hook(), p, *b) + penalty(p), params, batch)
    _, plain_grads, expected = run(lambda p, *b: model(Hook(), p, *b), params, batch)
    assert kinds(layers) == {"in": "dense", "out": "dense", "b": "diagonal"}
    for found, truth_ in zip(jax.tree.leaves(factors), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(found, truth_, rtol=1e-10)
    assert not np.allclose(grads["in"]["w"], plain_grads["in"]["w"])


def test_a_stopped_gradient_is_no_use(x64):
    """Check a momentum encoder. Its second product reads the kernel, but no gradient comes back through it."""

    def model(hook, p, x, t):
        y = hook.layer("w", x, x @ p["w"])
        return mean_loss(y + x @ lax.stop_gradient(p["w"]), t)

    params, batch = tree(w=(5, C)), inputs(T, 5)
    layers, _ = check_all(lambda p, *b: model(Hook(), p, *b), params, batch, truth(model, params, batch))
    assert layers["w"].positions == T


# -- no exact rows -----------------------------------------------------------------------------------------------------


@jax.custom_vjp
def foreign(x, w):
    return x @ w


foreign.defvjp(lambda x, w: (x @ w, (x, w)), lambda res, g: (g @ res[1].T, jnp.einsum("...i,...o->io", res[0], g)))


def spectral_norm(p, x):
    u = jnp.ones(5) / jnp.sqrt(5.0)
    for _ in range(2):
        v = p["w"].T @ u
        v = lax.stop_gradient(v / jnp.linalg.norm(v))
        u = p["w"] @ v
        u = lax.stop_gradient(u / jnp.linalg.norm(u))
    return x @ (p["w"] / (u @ p["w"] @ v))


def scanned_while(p, x):
    return lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, jnp.tanh(s[1] @ p["w"])), (0, x))[1]


def lagged_weights(p, x):
    def body(carry, _):
        x, w = carry
        return (jnp.tanh(x @ w), p["w"]), None

    return lax.scan(body, (x, jnp.eye(5)), None, length=3)[0][0]


SQUARE = (5, 5)
INEXACT = {
    "while loop": (scanned_while, SQUARE, r"while.*no known rows"),
    "cond": (
        lambda p, x: lax.cond(jnp.sum(x) > 0, lambda: x @ p["w"], lambda: x @ p["w"].T),
        SQUARE,
        r"cond.*no known rows",
    ),
    "foreign custom_vjp": (lambda p, x: foreign(x, p["w"]), SQUARE, r"custom_vjp.*no known rows"),
    "weight standardisation": (
        lambda p, x: x @ ((p["w"] - p["w"].mean(0)) / (p["w"].std(0) + EPS)),
        SQUARE,
        r"dot_general.*something else by sub",
    ),
    "weight normalisation": (
        lambda p, x: x @ (p["w"] / jnp.linalg.norm(p["w"], axis=0)),
        SQUARE,
        r"dot_general.*something else by div",
    ),
    "spectral norm": (spectral_norm, SQUARE, r"dot_general.*rows that all examples share"),
    "times constants": (
        lambda p, x: x @ (p["w"] * np.arange(25).reshape(5, 5)),
        SQUARE,
        r"dot_general.*multiplied by others",
    ),
    "other constants in places": (
        lambda p, x: x @ jnp.where(np.arange(25).reshape(5, 5) % 3 > 0, p["w"], 1.0),
        SQUARE,
        r"dot_general.*something else by select_n",
    ),
    "a copy for each example": (
        lambda p, x: lax.dot_general(x, jnp.broadcast_to(p["w"], (len(x), 5, 5)), (((2,), (1,)), ((0,), (0,)))),
        SQUARE,
        r"dot_general.*repeated before the product",
    ),
    "every other column": (lambda p, x: x @ p["w"][:, ::2], (5, 6), r"dot_general.*computed from it by slice"),
    "unequal parts": (
        lambda p, x: (x[..., :4] @ p["w"][:4]).sum(-1) + (x @ p["w"][:, :5].T).sum(-1),
        (5, 5),
        r"dot_general.*several equal parts",
    ),
    "dynamic row of a stack": (
        lambda p, x: lax.fori_loop(0, 2, lambda k, x: jnp.tanh(x @ p["w"][k]), x),
        (2, 5, 5),
        r"dot_general.*computed from it by dynamic_slice",
    ),
    "gathered expert kernels": (
        lambda p, x: jnp.einsum("nd,ndo->no", x[:, 0], p["w"][jnp.argmax(x[:, 0], axis=1) % 2]),
        (2, 5, 5),
        r"gather.*not looked up row by row",
    ),
    "output tied to the embedding": (
        lambda p, x: jnp.tanh(x @ p["w"]) + p["w"][jnp.argmax(x, axis=-1)],
        SQUARE,
        r"dot_general and gather.*no one block",
    ),
    "different axes": (
        lambda p, x: jnp.einsum("nti,ijk->ntjk", x, p["w"])[..., 0, :] + jnp.einsum("nti,jik->ntjk", x, p["w"])[..., 0],
        (5, 5, 5),
        r"dot_general.*disagree on which of its axes are inputs",
    ),
    "also a scale": (lambda p, x: x @ p["w"] + x * p["w"][0], SQUARE, r"dot_general and mul.*besides a product"),
    "also a table": (lambda p, x: x @ p["w"] + p["w"], SQUARE, r"add and dot_general.*besides a product"),
    "lagged weights": (lagged_weights, SQUARE, r"scan.*hands it to the next"),
    "changed by a scan": (
        lambda p, x: lax.scan(lambda c, _: ((jnp.tanh(c[0] @ c[1]), 0.9 * c[1]), None), (x, p["w"]), None, 2)[0][0],
        SQUARE,
        r"scan.*carries it on and changes it",
    ),
    "multiplies the loss": (
        lambda p, x: (x @ p["w"]) * (1 + jnp.sum(p["w"] ** 2)),
        SQUARE,
        r"mul.*no known rows",
    ),
    "stacked in two orders": (
        lambda p, x: x @ jnp.zeros((5, 5)) + scan_over(p["w"], 0, x) + scan_over(p["w"], 1, x),
        (5, 5, 5),
        r"dot_general.*disagree",
    ),
}


def scan_over(w, axis, x):
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, jnp.moveaxis(w, axis, 0))[0]


@pytest.mark.parametrize("case", INEXACT)
def test_strict_names_the_leaf_the_operation_the_reason_and_the_way_out(case):
    function, shape, reason = INEXACT[case]

    def loss(p, x):
        return jnp.mean(jnp.sin(function(p["odd"], x)))

    params = {"odd": {"w": jnp.ones(shape)}, "other": jnp.ones(2)}
    x = jnp.ones((N, 5, 5))
    layers = kfac.find_layers(loss, params, x)
    assert kinds(layers) == {"odd": "gradient-factors", "other": "skipped"}
    assert re.search(reason, layers["odd"].note), layers["odd"].note
    if case != "while loop":  # JAX cannot differentiate a while loop
        _, _, factors = jax.jit(kfac.value_and_grad(loss, layers))(params, x)
        assert list(factors) == []
    with pytest.raises(kfac.UnsupportedLayerError) as caught:
        kfac.find_layers(loss, params, x, strict=True)
    message = str(caught.value)
    assert re.search(f"'odd/w' is read by {reason}", message), message
    pattern = re.search(r"rules=\{'(.*?)': 'skip'\}", message).group(1)
    layers = kfac.find_layers(loss, params, x, rules={pattern: "skip"}, strict=True)
    assert kinds(layers) == {"odd": "skipped", "other": "skipped"}


def test_strict_names_all_leaves_at_once():
    def loss(p, x):
        return jnp.mean(x @ jnp.tanh(p["a"]) + x @ jnp.exp(p["b"]) + x @ p["c"])

    params, x = {name: jnp.ones((5, 2)) for name in "abc"}, jnp.ones((N, 5))
    with pytest.raises(kfac.UnsupportedLayerError, match=r"(?s)^2 .*by tanh.*'b' .*by exp.*'\^a\$': 'skip', '\^b\$'"):
        kfac.find_layers(loss, params, x, strict=True)


@pytest.mark.parametrize("updated", [False, True])
def test_a_kernel_plus_an_array_that_is_not_computed_from_it_is_exact(x64, updated):
    """Check kernels to which another array is added, such as a step of gradient descent inside the loss.

    If the step depends on the kernel, the loss reads the kernel twice: for the step, and after it.
    """

    def step_by_hand(hook, w, x):
        if updated:
            return x.mT @ x @ jnp.ones((5, C))
        y = hook.layer("w", x, x @ w)
        return jnp.einsum("nti,nto->nio", x, 2 * y)

    def model(hook, p, x, t):
        w = p["w"] - 0.1 * jnp.mean(step_by_hand(hook, p["w"], x), axis=0)
        return mean_loss(hook.layer("w", x, x @ w), t)

    def loss(p, x, t):
        if updated:
            return model(Hook(), p, x, t)
        return mean_loss(x @ (p["w"] - 0.1 * jax.grad(lambda w: jnp.sum((x @ w) ** 2) / len(x))(p["w"])), t)

    params, batch = tree(w=(5, C)), inputs(T, 5)
    layers, _ = check_all(loss, params, batch, truth(model, params, batch, interacting=True))
    assert layers["w"].uses == (1 if updated else 2)


def test_lora_is_exact_unless_the_product_is_formed_first(x64):
    """Check that `base` keeps exact rows in the sum `base + a @ b`, but `a` and `b` do not."""

    def formed_first(hook, p, x, t):
        return mean_loss(hook.layer("base", x, x @ (p["base"] + p["a"] @ p["b"])), t)

    def one_after_the_other(hook, p, x, t):
        low = hook.layer("a", x, x @ p["a"])
        y = hook.layer("base", x, x @ p["base"])
        return mean_loss(y + hook.layer("b", low, low @ p["b"]), t)

    params, batch = tree(a=(5, 2), b=(2, C), base=(5, C)), inputs(T, 5)
    for model, own in ((formed_first, ["a", "b"]), (one_after_the_other, [])):
        layers, _ = check_all(lambda p, *b, m=model: m(Hook(), p, *b), params, batch, truth(model, params, batch))
        assert [layer.name for layer in layers if layer.kind == "gradient-factors"] == own
    with pytest.raises(kfac.UnsupportedLayerError, match=r"(?s)'a'.*dot_general.*different array.*'b'.*rules="):
        kfac.find_layers(lambda p, *b: formed_first(Hook(), p, *b), params, *batch, strict=True)


def test_a_skipped_neighbour_changes_nothing_else(x64):
    model, params = dense_with(lambda p, x: x * p["norm"]["s"] + p["norm"]["b"], norm={"s": (C,), "b": (C,)})
    batch = inputs(T, 5)
    _, grads, everything = run(lambda p, *b: model(Hook(), p, *b), params, batch)
    layers, skipped_grads, factors = run(
        lambda p, *b: model(Hook(), p, *b), params, batch, rules={"^in/": "skip", "norm/b": "skip"}
    )
    assert kinds(layers) == {"in": "skipped", "norm/b": "skipped", "norm/s": "unitwise", "out": "dense"}
    np.testing.assert_allclose(factors["out"].G, everything["out"].G, rtol=1e-12)
    np.testing.assert_allclose(factors["norm/s"].F, everything["norm"].F[:, :1, :1], rtol=1e-12)
    np.testing.assert_allclose(grads["in"]["w"], skipped_grads["in"]["w"], rtol=1e-12)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"nothing": "skip"}, r"rules=\{'nothing': 'skip'\} matches no parameter; the parameters are v, w"),
        ({"(": "skip"}, r"rules=\{'\(': 'skip'\}: the pattern is not a regular expression"),
        ({3: 0.5}, r"rules=\{3: 0.5\}: the pattern is not a regular expression"),
        (("w",), "rules must be a mapping of regular expressions to 'skip', .* or a positive number, but is"),
        ({"w": "leave"}, r"rules\['w'\] must be one of 'skip', 'reduce', 'gradient', but is 'leave'"),
        ({"w": 0}, r"rules\['w'\] must lie in \(0, inf\), but is 0"),
        ({"w": True}, r"rules\['w'\] must be a number, but is True"),
        ({"w": lambda step: 1.0}, r"rules\['w'\] must be a number, but is a function"),
        ({"w": None}, r"rules\['w'\] must be a number, but is None"),
        ({".": "gradient", "w": "skip"}, r"rules=\{'w': 'skip'\} has no effect: rules before it match all"),
        ({"w": 2, ".": "skip"}, r"rules=\{'w': 2.0\} has no effect: every layer that it matches is skipped"),
        ({".": 2, "w": 3}, r"rules=\{'w': 3.0\} has no effect: .* or has the same multiplier without it"),
        ({"w": 1.0}, r"rules=\{'w': 1.0\} has no effect: .* or has the same multiplier without it"),
        ({"w": 2, ".": 2}, r"rules=\{'w': 2.0\} has no effect: .* or has the same multiplier without it"),
        ({"w": "reduce"}, r"rules=\{'w': 'reduce'\} has no effect: each example reads .* at a single position"),
    ],
)
def test_find_layers_refuses_rules(rules, message):
    def loss(p, x):
        return jnp.mean((x @ p["w"]) @ p["v"])

    with pytest.raises(ValueError, match=message):
        kfac.find_layers(loss, {"v": jnp.ones((2, 3)), "w": jnp.ones((5, 2))}, jnp.ones((N, 5)), rules=rules)


def test_find_layers_takes_a_multiplier_of_one_before_another_and_reduce_of_several_positions():
    def loss(p, x):
        return jnp.mean((x @ p["w"]) @ p["v"])

    params = {"v": jnp.ones((2, 3)), "w": jnp.ones((5, 2))}
    layers = kfac.find_layers(loss, params, jnp.ones((N, 5)), rules={"w": 1.0, ".": 0.5})
    assert [layer.multiplier for layer in layers] == [0.5, 1.0]
    layers = kfac.find_layers(loss, params, jnp.ones((N, 4, 5)), rules={"w": "reduce"})
    assert [layer.weight_sharing for layer in layers] == ["expand", "reduce"]


def regression(p, x, t):
    return jnp.mean((x @ p["w"] - t) ** 2)


@pytest.mark.parametrize("difference", ["order of examples", "dtype", "positions", "number of examples", "arguments"])
def test_layers_that_statistics_depend_on_are_not_equal(x64, difference):
    """Check layers whose statistics differ, although their factors have the same shapes.

    If they were equal, a function that is jitted with static layers would return the other loss's result.
    """
    params, x, t = {"w": jnp.ones((5, 2))}, jnp.ones((8, 5)), jnp.ones((8, 2))
    other = {
        "order of examples": lambda: kfac.find_layers(
            lambda p, x, t: regression(p, x[jnp.argsort(x[:, 0])], t), params, x, t
        ),
        "dtype": lambda: kfac.find_layers(regression, {"w": jnp.ones((5, 2), jnp.float32)}, x, t),
        "positions": lambda: kfac.find_layers(regression, params, jnp.ones((8, 3, 5)), jnp.ones((8, 3, 2))),
        "number of examples": lambda: kfac.find_layers(regression, params, x[:4], t[:4]),
        "arguments": lambda: kfac.find_layers(lambda p, t, x: regression(p, x, t), params, t, x, batch_argnums=(1, 2)),
    }
    layers = kfac.find_layers(regression, params, x, t)
    found = other[difference]()
    if difference == "arguments":
        layers = kfac.find_layers(lambda p, x: regression(p, x, t[:, :1] * 0), params, x)
    assert layers.paths == found.paths
    assert layers != found and hash(layers) != hash(found)
    again = kfac.find_layers(regression, params, x, t)
    assert difference == "arguments" or (layers == again and hash(layers) == hash(again))


def test_statistics_with_static_layers_are_those_of_their_own_loss():
    """Check a function that is jitted once for two losses, whose layers differ in the order of examples only."""
    params, x = {"w": jnp.arange(10.0).reshape(5, 2) / 10}, normal(0, 8, 5, dtype=np.float32)
    losses = {}

    def plain(p, x):
        return jnp.mean(jnp.sum(jnp.tanh(x @ p["w"]) ** 2, -1))

    for loss in (plain, lambda p, x: 3 * plain(p, x[jnp.argsort(x[:, 0])])):
        losses[kfac.find_layers(loss, params, x)] = loss

    @functools.partial(jax.jit, static_argnums=0)
    def traces(layers, params, x):
        return jax.tree.map(jnp.trace, dict(kfac.statistics(losses[layers], layers)(params, x)))

    found = [float(traces(layers, params, x)["w"].G) for layers in losses]
    assert len(found) == 2
    np.testing.assert_allclose(found[1], 9 * found[0], rtol=1e-5)


def test_find_layers_takes_the_first_rule_of_each_sort():
    """Check strings by leaf, numbers by layer, and that both may match. The table shows the multipliers."""

    def loss(p, x):
        return jnp.mean((x @ p["a"]["w"] + p["a"]["b"]) @ p["c"]["w"] + p["c"]["b"])

    params = {"a": {"w": jnp.ones((5, 3)), "b": jnp.ones(3)}, "c": {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}}
    rules = {"a/w": "reduce", "a/b": 0.5, "c/b": "skip", "c": "gradient", ".": 3}
    layers = kfac.find_layers(loss, params, jnp.ones((N, 4, 5)), rules=rules)
    assert {layer.params: (layer.kind, layer.weight_sharing, layer.multiplier) for layer in layers} == {
        ("a/w", "a/b"): ("dense", "reduce", 0.5),
        ("c/b",): ("skipped", "expand", 1),
        ("c/w",): ("gradient-factors", "expand", 3),
    }
    assert layers.rules == tuple(rules.items())
    rows = str(layers).splitlines()
    assert rows[2].endswith("steps times 0.5") and rows[4].endswith("; steps times 3") and "times" not in rows[3]
    assert layers != kfac.find_layers(loss, params, jnp.ones((N, 4, 5)), rules={**rules, "a/b": 0.6})
    assert hash(layers) == hash(kfac.find_layers(loss, params, jnp.ones((N, 4, 5)), rules=rules))


# -- the number of examples --------------------------------------------------------------------------------------------


def value_and_grad(loss, params, *batch, **options):
    return jax.eval_shape(kfac.value_and_grad(loss, kfac.find_layers(loss, params, *batch), **options), params, *batch)


def test_a_loss_that_hides_its_examples_asks_for_num_examples():
    def loss(p, x):
        y = jnp.tanh(x @ p["a"]).reshape(N * T, C) * p["s"]
        return jnp.mean(y @ p["b"])

    params, x = {"a": jnp.ones((5, C)), "b": jnp.ones((C, 2)), "s": jnp.ones(C)}, jnp.ones((N, T, 5))
    layers = kfac.find_layers(loss, params, x)
    assert "cannot be traced with 8 examples in argument 1" in repr(layers)
    assert kinds(layers) == {"a": "dense", "b": "dense", "s": "gradient-factors"}
    assert "which examples it meets is not known" in layers["s"].note
    with pytest.raises(ValueError, match=r"the number of examples is not clear: .*8 examples.*num_examples="):
        value_and_grad(loss, params, x)
    value_and_grad(loss, params, x, num_examples=N)
    value_and_grad(loss, params, x, num_examples=5)  # each example has a fraction of the positions
    with pytest.raises(ValueError, match=r"num_examples=13 is more than the 12 position\(s\) at which 'a'"):
        value_and_grad(loss, params, x, num_examples=13)
    for bad in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match="num_examples must be a positive int"):
            value_and_grad(loss, params, x, num_examples=bad)


def test_examples_one_after_the_other(x64):
    """Check `lax.map` over examples, where no layer's input has an axis of examples."""

    def loss(p, x, t):
        return mean_loss(lax.map(lambda x: jnp.tanh(x @ p["w"]) * p["s"], x), t)

    def reference(hook, p, x, t):
        return mean_loss(jnp.tanh(hook.layer("w", x, x @ p["w"])) * p["s"], t)

    params, batch = tree(w=(5, C), s=(C,)), inputs(5)
    layers, _ = check_all(loss, params, batch, truth(reference, params, batch))
    assert kinds(layers) == {"s": "unitwise", "w": "dense"}


@pytest.mark.parametrize(
    "function",
    [
        lambda p, x: (jnp.tanh(x @ p["w"]).reshape(-1, C) * p["s"]).reshape(x.shape[0], -1, C),
        lambda p, x: (jnp.tanh(jnp.einsum("ntd,dc->ctn", x, p["w"])) * p["s"][:, None, None]).T,
    ],
    ids=["flattened", "features first, examples last"],
)
@pytest.mark.parametrize(("n", "positions"), [(N, T), (N, N), (1, T), (1, 1)])
def test_examples_are_found_wherever_they_are(x64, function, n, positions):
    """Check that examples are found for any number of positions, also if there is a single example."""

    def loss(p, x, t):
        return mean_loss(function(p, x), t)

    def reference(hook, p, x, t):
        return mean_loss(jnp.tanh(hook.layer("w", x, x @ p["w"])) * p["s"], t)

    params, (x, t) = tree(w=(5, C), s=(C,)), inputs(positions, 5)
    layers, _ = check_all(loss, params, (x[:n], t[:n]), truth(reference, params, (x[:n], t[:n])))
    assert kinds(layers) == {"s": "unitwise", "w": "dense"}
    assert layers["w"].positions == positions


# -- the table ---------------------------------------------------------------------------------------------------------


def example_layers(width=C):
    def loss(p, x, t):
        y = plain_spelling(x @ p["in"]["w"], 0.0, 1.0, p["norm"]["scale"], p["norm"]["shift"])
        return mean_loss(y @ p["out"]["w"] + p["out"]["b"], t) + jnp.sum(p["lost"])

    params = {
        "in": {"w": jnp.ones((5, width))},
        "lost": jnp.ones(3),
        "norm": {"scale": jnp.ones(width), "shift": jnp.ones(width)},
        "out": {"b": jnp.ones(2), "w": jnp.ones((width, 2))},
    }
    return kfac.find_layers(loss, params, jnp.ones((N, 5)), jnp.ones((N, 2)), rules={"^out/b": "skip"})


def test_layers_are_hashable_and_equal_across_calls():
    one, two, other = example_layers(), example_layers(), example_layers(width=7)
    assert one == two
    assert hash(one) == hash(two)
    assert one is not two
    assert one != other
    assert {one: 1}[two] == 1
    with pytest.raises(AttributeError):
        one.layers = ()
    with pytest.raises(AttributeError):
        one[0].name = "other"


def test_find_layers_takes_a_frozen_stack_of_layers_for_the_batch_only_without_another_candidate():
    def loss(params, stack, x):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w.astype(x.dtype)), None), x @ params["w"], stack)
        return jnp.mean(x)

    params, stack, x = {"w": jnp.zeros((4, 4))}, jnp.zeros((5, 4, 4)), jnp.zeros((8, 4))
    layers = kfac.find_layers(loss, params, stack, x)
    assert (layers.num_examples, layers.batch_argnums) == (8, (2,))

    def in_parts(params, parts):  # the same growth, but each part has examples
        return jax.lax.scan(lambda mean, x: (mean + jnp.mean(x @ params["w"]) / 5, None), 0.0, parts)[0]

    with pytest.warns(UserWarning, match=r"the 5 rows of argument 1 .* only loops .* batch_argnums=\(1,\) says so"):
        layers = kfac.find_layers(in_parts, params, jnp.zeros((5, 8, 4)))
    assert (layers.num_examples, layers.batch_argnums) == (5, (1,))
    assert kfac.find_layers(in_parts, params, jnp.zeros((5, 8, 4)), batch_argnums=(1,)) == layers


def test_find_layers_warns_if_time_steps_or_layers_count_as_examples():
    def last_state(params, batch):
        step = lambda h, x: (jnp.tanh(x @ params["w"] + h), None)  # noqa: E731
        return jnp.mean((jax.lax.scan(step, jnp.zeros((8, 4)), batch["x"])[0] - batch["y"]) ** 2)

    def with_stack(params, stack, x):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stack)
        return jnp.mean(x.reshape(8, 4) @ params["w"])

    def last_output(params, batch):
        step = lambda h, x: (jnp.tanh(x @ params["w"] + h),) * 2  # noqa: E731
        return jnp.mean((jax.lax.scan(step, jnp.zeros((8, 4)), batch["x"])[1][-1] - batch["y"]) ** 2)

    params, x = {"w": jnp.zeros((4, 4))}, jnp.zeros((8, 4))
    steps = ({"x": jnp.zeros((5, 8, 4)), "y": x},)
    for loss, batch in ((last_state, steps), (last_output, steps), (with_stack, (jnp.zeros((5, 4, 4)), x))):
        with pytest.warns(UserWarning, match="the 5 rows of argument 1 count as examples, but the loss only loops"):
            kfac.find_layers(loss, params, *batch)


def test_find_layers_does_not_warn_of_a_loss_that_sums_parts_of_the_batch():
    """Check it for a language model's loss by chunks of tokens: the loop has another length than the batch."""

    def by_chunks(params, batch):
        tokens = (batch @ params["w"]).reshape(-1, 4, 4)
        return jax.lax.scan(lambda total, x: (total + jnp.sum(x**2), None), 0.0, tokens)[0] / batch[..., 0].size

    layers = kfac.find_layers(by_chunks, {"w": jnp.ones((4, 4))}, jnp.ones((8, 16, 4)))
    assert layers.num_examples == 8


def test_layers_do_not_depend_on_the_size_of_the_batch():
    def layers(n):
        model, params = dense_with(lambda p, x: x * p["s"] + p["b"], s=(C,), b=(C,))
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
        x, t = jax.ShapeDtypeStruct((n, T, 5), jnp.float32), jax.ShapeDtypeStruct((n, 100), jnp.float32)
        return kfac.find_layers(lambda p, *b: model(Hook(), p, *b), shapes, x, t)

    # Only the number of examples differs, and the arguments that can be told to hold a single example.
    assert layers(1).layers == layers(2).layers == layers(64).layers


def test_layers_are_a_sequence():
    layers = example_layers()
    assert [layer.name for layer in layers] == ["in", "lost", "norm", "out/b", "out/w"]
    assert layers[0] is layers["in"]
    assert layers[1:3] == (layers["lost"], layers["norm"])
    with pytest.raises(KeyError, match="no layer 'absent'"):
        layers["absent"]


def test_the_table_has_every_leaf_in_exactly_one_row():
    layers = example_layers()
    lines = repr(layers).splitlines()
    rows = lines[2:-1]
    assert len(rows) == len(layers)
    for path in layers.paths:
        own = [
            row
            for row, layer in zip(rows, layers, strict=True)
            if path in layer.params and re.search(rf"(^|[ /]){re.escape(path.split('/')[-1])} \[", row)
        ]
        assert len(own) == 1, path
    assert sum(len(re.findall(r"\w \[[\d, ]*\]", row)) for row in rows) == len(layers.paths)
    for layer, row in zip(layers, rows, strict=True):
        assert row.startswith(layer.name)
        assert layer.note in row
    elements = sum(int(np.prod(shape)) for layer in layers for shape in layer.factor_shapes.values())
    assert f"factors: {elements:,} elements" in lines[-1]


# -- calls -------------------------------------------------------------------------------------------------------------


def test_aux_passes_through_with_leaves_that_are_no_arrays(x64):
    tag = object()

    def loss(p, x, t):
        y = x @ p["w"]
        return mean_loss(y, t), {"logits": y, "tag": tag, "name": "text", "count": 3, "none": None, "shape": y.shape}

    params, batch = tree(w=(5, C)), inputs(T, 5)
    layers = kfac.find_layers(loss, params, *batch, has_aux=True)
    assert kinds(layers) == {"w": "dense"}
    (value, aux), grads, _ = kfac.value_and_grad(loss, layers, has_aux=True)(params, *batch)
    (expected, expected_aux), expected_grads = jax.value_and_grad(loss, has_aux=True)(params, *batch)
    assert aux["tag"] is tag
    assert {k: v for k, v in aux.items() if k not in ("logits", "tag")} == {
        k: v for k, v in expected_aux.items() if k not in ("logits", "tag")
    }
    np.testing.assert_allclose(aux["logits"], expected_aux["logits"], rtol=1e-12)
    np.testing.assert_allclose(value, expected, rtol=1e-12)
    np.testing.assert_allclose(grads["w"], expected_grads["w"], rtol=1e-10)


def test_the_output_before_the_bias_may_be_aux(x64):
    """Check that a layer keeps its bias if a metric reads the output before the bias."""

    def loss(p, x, t):
        y = x @ p["d"]["w"]
        return mean_loss(y + p["d"]["b"], t), y

    params, batch = tree(d={"w": (5, C), "b": (C,)}), inputs(T, 5)
    layers = kfac.find_layers(loss, params, *batch, has_aux=True)
    assert kinds(layers) == {"d": "dense"}
    layers = kfac.find_layers(jax.jit(loss), params, *batch, has_aux=True)
    assert [path for layer in layers for path in layer.params].count("d/b") == 1


def test_keyword_arguments_static_arguments_and_random_keys():
    def loss(p, x, *, key, mode, scale=1.0):
        keep = jax.random.bernoulli(key, 0.5, x.shape)
        assert mode == "train"
        return scale * jnp.mean(jnp.where(keep, x, 0) @ p["w"])

    params, x = {"w": jnp.ones((5, 2))}, jnp.ones((N, 5))
    options = dict(key=jax.random.key(0), mode="train", scale=2.0)
    layers = kfac.find_layers(loss, params, x, kwargs=options)
    value, grads, factors = kfac.value_and_grad(loss, layers)(params, x, kwargs=options)
    expected, expected_grads = jax.value_and_grad(loss)(params, x, **options)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(grads["w"], expected_grads["w"], rtol=1e-6)
    kept = np.where(jax.random.bernoulli(options["key"], 0.5, x.shape), x, 0)
    np.testing.assert_allclose(factors["w"].A, kept.T @ kept / N, rtol=1e-6)


def test_numpy_batches_in_float64_while_jax_computes_in_float32():
    def loss(p, x, labels):
        logits = x @ p["w"]
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1))

    params = {"w": np.ones((5, 3), np.float32)}
    batch = (np.random.default_rng(0).normal(size=(N, 5)), np.arange(N) % 3)
    layers = kfac.find_layers(loss, params, *batch)
    value, grads, factors = jax.jit(kfac.value_and_grad(loss, layers))(params, *batch)
    np.testing.assert_allclose(value, jax.value_and_grad(loss)(params, *batch)[0], rtol=1e-6)
    np.testing.assert_allclose(factors["w"].A, batch[0].T @ batch[0] / N, rtol=1e-5)
    assert factors["w"].A.dtype == grads["w"].dtype == np.float32


def test_other_layers_than_expected_are_an_error():
    def loss(p, x, wide):
        y = x @ p["a"]
        return jnp.mean((y + p["b"]) if wide else y * p["b"])

    params, x = {"a": jnp.ones((5, 2)), "b": jnp.ones(2)}, jnp.ones((N, 5))
    layers = kfac.find_layers(loss, params, x, True)
    with pytest.raises(ValueError, match="other layers"):
        kfac.value_and_grad(loss, layers)(params, x, False)
    with pytest.raises(ValueError, match=r"differ in c"):
        kfac.value_and_grad(loss, layers)(params | {"c": jnp.ones(2)}, x, True)
    with pytest.raises(ValueError, match="layers must be"):
        kfac.value_and_grad(loss, [])
    with pytest.raises(ValueError, match="fisher must be"):
        kfac.value_and_grad(loss, layers, fisher="exact")


@pytest.mark.parametrize(
    ("loss", "params", "message"),
    [
        (lambda p: p["w"], {"w": np.ones(2)}, "real scalar"),
        (lambda p: (jnp.sum(p["w"]), 1), {"w": np.ones(2)}, "has_aux=True"),
        (lambda p: 1.0, {"w": np.ones(2)}, "real scalar"),
        (lambda p: jnp.sum(p["w"]), {"w": np.ones(2, np.int32)}, "has dtype int32, but must be a real float"),
        (lambda p: jnp.sum(p["w"]), {"w": 1.0}, "array"),
        (lambda p: jnp.sum(p["w"]).astype(jnp.complex64), {"w": np.ones(2)}, "real scalar"),
    ],
)
def test_losses_and_parameters_that_are_not_real(loss, params, message):
    with pytest.raises(TypeError, match=message):
        kfac.find_layers(loss, params)


def test_no_parameters():
    with pytest.raises(ValueError, match="no leaves"):
        kfac.find_layers(lambda p: jnp.zeros(()), {})


@pytest.mark.slow
@pytest.mark.parametrize(
    "leaf, read", [(jnp.zeros(0), jnp.sum), (jnp.zeros((0, 2)), lambda e: jnp.sum(jnp.ones((8, 0)) @ e))]
)
def test_a_leaf_without_elements_has_no_block_and_is_in_the_table(leaf, read):
    params, x = {"kernel": jnp.ones((3, 2)), "none": leaf}, jnp.ones((8, 3))

    def loss(params, x):
        return jnp.mean((x @ params["kernel"]) ** 2) + read(params["none"])

    layers = kfac.find_layers(loss, params, x)
    assert "has no elements" in str(layers)
    _, grads, factors = jax.jit(kfac.value_and_grad(loss, layers))(params, x)
    assert list(factors) == ["kernel"]
    tx = kfac.kfac(0.1, layers)
    updates, _ = jax.jit(observing(tx))(grads, jax.jit(tx.init)(params), params, factors=factors)
    assert updates["none"].shape == leaf.shape and np.any(updates["kernel"])
