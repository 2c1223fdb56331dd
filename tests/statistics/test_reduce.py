"""Test weight sharing in the "reduce" setting (Eschenhagen et al. 2023): its definition and its exact cases."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import kfac
from checking import blocks_on_the_diagonal, normal, run
from oracle import Geometry, Hook, Truth, example_gradients, relative_error, truth

N, T = 3, 4
NUMBERS = ("NHWC", "HWIO", "NHWC")


def mean_loss(y, t):
    y = y.reshape(y.shape[0], -1)
    return jnp.mean(jnp.sum(jnp.tanh(y) * t[:, : y.shape[1]], axis=1) + 0.5 * jnp.sum(jnp.sin(y), axis=1) ** 2)


def expected_factors(known: Truth, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return `A = (1/n) sum_i m m^T` and `G = n sum_i h h^T`.

    `m` is the mean input of an example, and `h` its summed gradient.
    """
    uses = known.uses[name]
    biased = any(use.bias for use in uses)
    positions = sum(use.a.shape[1] for use in uses)
    a_sum = g_sum = 0.0
    for i in range(known.n):
        m = h = 0.0
        for use in uses:
            for a, g in zip(use.a[i], use.g[i], strict=True):
                m = m + (np.append(a, float(use.bias)) if biased else a) / positions
                h = h + g
        a_sum = a_sum + np.outer(m, m)
        g_sum = g_sum + np.outer(h, h)
    return a_sum / known.n, g_sum * known.n


def check(loss, reference, params, batch, **options):
    layers, _, factors = run(loss, params, batch, rules={".": "reduce"}, **options)
    known = truth(reference, params, batch)
    seen = set()
    for layer in layers:
        assert layer.weight_sharing == "reduce"
        for k in range(layer.copies):
            name = f"{layer.name}[{k}]" if layer.stacked else layer.name
            seen.add(name)
            for factor, expected in zip("AG", expected_factors(known, name), strict=True):
                found = getattr(factors[layer.name], factor)
                found = found[k] if layer.stacked else found
                expected = blocks_on_the_diagonal(expected, layer.num_blocks["AG".index(factor)])
                assert relative_error(found, expected) <= 1e-10, (factor, name)
    assert seen == set(known.uses)
    return layers


def plain(model):
    return lambda params, *batch: model(Hook(), params, *batch)


def dense(hook, p, x, t):
    return mean_loss(hook.layer("dense", x, x @ p["dense"]["w"] + p["dense"]["b"], bias=True), t)


def unbiased(hook, p, x, t):
    return mean_loss(hook.layer("w", x, x @ p["w"]), t)


def kernel_on_the_left(hook, p, x, t):
    y = jnp.einsum("do,ntd->ont", p["w"], x)
    return mean_loss(hook.layer("w", x, jnp.moveaxis(y, 0, 2)), t)


def flattened(hook, p, x, t):
    """Join examples and positions on a single axis."""
    y = (x.reshape(-1, 5) @ p["w"]).reshape(*x.shape[:2], -1)
    return mean_loss(hook.layer("w", x, y), t)


def heads(hook, p, x, t):
    y = jnp.einsum("ntd,dhk->nthk", x, p["dense"]["w"]) + p["dense"]["b"]
    return mean_loss(hook.layer("dense", x, y, out=2, bias=True), t)


def shared(hook, p, x, t):
    """Use a layer at several positions and at a single position, with and without the bias."""
    y = jnp.tanh(hook.layer("dense", x, x @ p["dense"]["w"] + p["dense"]["b"], bias=True))
    y = jnp.tanh(hook.layer("dense", y, y @ p["dense"]["w"]))[:, 0]
    return mean_loss(hook.layer("dense", y, y @ p["dense"]["w"] + p["dense"]["b"], bias=True), t)


BIASED = {"dense": {"w": (5, 6), "b": (6,)}}
DENSE = {
    "dense": (dense, (T, 5), BIASED),
    "two axes of positions": (dense, (2, T, 5), BIASED),
    "as many positions as examples": (dense, (N, 5), BIASED),
    "without a bias": (unbiased, (T, 5), {"w": (5, 6)}),
    "flattened": (flattened, (T, 5), {"w": (5, 6)}),
    "kernel on the left": (kernel_on_the_left, (T, 5), {"w": (5, 6)}),
    "kernel on the left, as many positions as examples": (kernel_on_the_left, (N, 5), {"w": (5, 6)}),
    "heads": (heads, (T, 5), {"dense": {"w": (5, 2, 3), "b": (2, 3)}}),
    "several uses": (shared, (T, 5), {"dense": {"w": (5, 5), "b": (5,)}}),
}


def parameters(shapes):
    flat, tree = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    return jax.tree.unflatten(tree, [normal(10 + k, *shape) for k, shape in enumerate(flat)])


@pytest.mark.parametrize("max_factor_dim", [100, 5])
@pytest.mark.parametrize("case", DENSE)
def test_dense_layers(x64, case, max_factor_dim):
    model, inputs, shapes = DENSE[case]
    layers = check(
        plain(model),
        model,
        parameters(shapes),
        (normal(1, N, *inputs), normal(2, N, 60)),
        max_factor_dim=max_factor_dim,
    )
    assert "reduce)" in repr(layers)


@pytest.mark.parametrize(
    ("strides", "padding", "dilation"),
    [((1, 1), ((1, 1), (0, 1)), (1, 1)), ((2, 3), ((0, 2), (3, -1)), (1, 2)), ((1, 2), ((0, 0), (1, 1)), (2, 1))],
    ids=str,
)
@pytest.mark.parametrize("max_factor_dim", [100, 6])
def test_convolutions(x64, strides, padding, dilation, max_factor_dim):
    def model(hook, p, x, t):
        options = dict(rhs_dilation=dilation, dimension_numbers=NUMBERS)
        y = lax.conv_general_dilated(x, p["conv"]["w"], strides, padding, **options) + p["conv"]["b"]
        geometry = Geometry((3, 2), strides, padding, (1, 1), dilation)
        return mean_loss(hook.layer("conv", x, y, bias=True, conv=geometry), t)

    params = parameters({"conv": {"w": (3, 2, 2, 3), "b": (3,)}})
    check(plain(model), model, params, (normal(1, N, 5, 6, 2), normal(2, N, 200)), max_factor_dim=max_factor_dim)


def test_a_convolution_whose_output_has_the_height_first_and_as_long_as_the_batch(x64):
    """Check that dimension numbers tell the examples from the image's rows."""
    numbers = ("HWNC", "HWIO", "HWNC")

    def loss(p, x, t):
        y = lax.conv_general_dilated(x.transpose(1, 2, 0, 3), p["conv"]["w"], (1, 1), "SAME", dimension_numbers=numbers)
        return mean_loss((y + p["conv"]["b"]).transpose(2, 0, 1, 3), t)

    def model(hook, p, x, t):
        y = lax.conv_general_dilated(x, p["conv"]["w"], (1, 1), "SAME", dimension_numbers=NUMBERS) + p["conv"]["b"]
        geometry = Geometry((3, 2), (1, 1), ((1, 1), (0, 1)), (1, 1), (1, 1))
        return mean_loss(hook.layer("conv", x, y, bias=True, conv=geometry), t)

    params = parameters({"conv": {"w": (3, 2, 2, 3), "b": (3,)}})
    check(loss, model, params, (normal(1, N, N, 6, 2), normal(2, N, 200)))


def test_grouped_convolutions_with_channels_first(x64):
    def loss(p, x, t):
        numbers = ("NCHW", "OIHW", "NCHW")
        y = lax.conv_general_dilated(
            jnp.moveaxis(x, 3, 1), p["conv"], (1, 1), "VALID", dimension_numbers=numbers, feature_group_count=2
        )
        return mean_loss(jnp.moveaxis(y, 1, 3), t)

    def model(hook, p, x, t):
        geometry = Geometry((3, 1), (1, 1), ((0, 0), (0, 0)), (1, 1), (1, 1))
        outs = []
        for k in range(2):
            own, w = x[..., 2 * k : 2 * k + 2], p["conv"][3 * k : 3 * k + 3].transpose(2, 3, 1, 0)
            y = lax.conv_general_dilated(own, w, (1, 1), "VALID", dimension_numbers=NUMBERS)
            outs.append(hook.layer(f"conv[{k}]", own, y, conv=geometry))
        return mean_loss(jnp.concatenate(outs, axis=-1), t)

    params, batch = parameters({"conv": (6, 2, 3, 1)}), (normal(1, N, 4, 3, 4), normal(2, N, 200))
    known = truth(model, params, batch)
    layers, _, factors = run(loss, params, batch, rules={"conv": "reduce"})
    order = [2 * tap + channel for channel in range(2) for tap in range(3)]  # channels before the window, as stored
    for k in range(2):
        a, g = expected_factors(known, f"conv[{k}]")
        assert relative_error(factors["conv"].A[k], a[np.ix_(order, order)]) <= 1e-10
        assert relative_error(factors["conv"].G[k], g) <= 1e-10
    assert layers["conv"].copies == 2


@pytest.mark.slow
@pytest.mark.parametrize("remat", [False, True])
def test_scans(x64, remat):
    """Check stacked kernels, and a kernel that all iterations share, as in a recurrent network."""

    def loss(p, x, t):
        def cell(h, x):
            return jnp.tanh(h @ p["v"]["w"] + p["v"]["b"] + x @ p["u"]), None

        def layer(x, w):
            return jnp.tanh(x @ w), None

        x, _ = lax.scan(jax.checkpoint(layer) if remat else layer, x, p["stack"])
        h, _ = lax.scan(jax.checkpoint(cell) if remat else cell, jnp.zeros((len(x), 5)), x.swapaxes(0, 1))
        return mean_loss(h, t)

    def model(hook, p, x, t):
        for k in range(2):
            x = jnp.tanh(hook.layer(f"stack[{k}]", x, x @ p["stack"][k]))
        h = jnp.zeros((len(x), 5))
        for k in range(x.shape[1]):
            v = hook.layer("v", h, h @ p["v"]["w"] + p["v"]["b"], bias=True)
            h = jnp.tanh(v + hook.layer("u", x[:, k], x[:, k] @ p["u"]))
        return mean_loss(h, t)

    params = parameters({"stack": (2, 5, 5), "u": (5, 5), "v": {"w": (5, 5), "b": (5,)}})
    check(loss, model, params, (normal(1, N, T, 5), normal(2, N, 60)))


def test_experts(x64):
    def loss(p, x, t):
        return mean_loss(jnp.tanh(jnp.einsum("nted,edo->nteo", x, p["w"])), t)

    def model(hook, p, x, t):
        outs = [hook.layer(f"w[{k}]", x[:, :, k], x[:, :, k] @ p["w"][k]) for k in range(2)]
        return mean_loss(jnp.tanh(jnp.stack(outs, axis=2)), t)

    check(loss, model, parameters({"w": (2, 5, 4)}), (normal(1, N, T, 2, 5), normal(2, N, 60)))


# -- exactness: not only the direction ---------------------------------------------------------------------------------


def pooled(p, x, c):
    """Compute a linear loss of a deep linear network that averages over positions. "reduce" is exact here."""
    y = x @ p["first"]["w"] + p["first"]["b"]
    y = (y @ p["second"]["w"] + p["second"]["b"]).mean(1)
    return jnp.mean(y @ c)


def pooled_convolution(p, x, c):
    y = lax.conv_general_dilated(x.reshape(len(x), 2, 2, 5), p["conv"]["w"], (1, 1), "SAME", dimension_numbers=NUMBERS)
    return jnp.mean((y + p["conv"]["b"]).mean((1, 2)) @ c)


@pytest.mark.parametrize("loss", [pooled, pooled_convolution])
def test_the_block_equals_the_exact_one_on_a_linear_network(x64, loss):
    shapes = {"first": {"w": (5, 6), "b": (6,)}, "second": {"w": (6, 4), "b": (4,)}}
    params = parameters(shapes if loss is pooled else {"conv": {"w": (2, 2, 5, 4), "b": (4,)}})
    batch, c = (normal(1, N, T, 5),), normal(2, 4)

    def of_batch(p, x):
        return loss(p, x, c)

    layers, _, factors = run(of_batch, params, batch, rules={".": "reduce"})
    gradients = dict(zip(layers.paths, jax.tree.leaves(example_gradients(of_batch, params, batch)), strict=True))
    for layer in layers:
        exact = 0.0
        for i in range(N):
            matrix = np.asarray(layer.to_matrix([gradients[path][i] for path in layer.params])[0])
            exact = exact + N * np.outer(matrix, matrix)  # the mean over n examples of the outer products of n * matrix
        block = factors[layer.name]
        assert relative_error(np.kron(block.G, block.A), exact) <= 1e-10, layer.name
    expand = run(of_batch, params, batch)[2]
    name = layers[0].name
    assert relative_error(np.kron(expand[name].G, expand[name].A), np.kron(factors[name].G, factors[name].A)) > 0.1


@pytest.mark.slow
def test_micro_batches(x64):
    params, batch = parameters(BIASED), (normal(1, 6, T, 5), normal(2, 6, 60))
    layers = kfac.find_layers(plain(dense), params, *batch, rules={"dense": "reduce"})
    fn = kfac.value_and_grad(plain(dense), layers)
    parts = [fn(params, *(x[k : k + 3] for x in batch))[2] for k in (0, 3)]
    together = kfac.microbatch(fn, 2, batch_argnums=(1, 2))(params, *batch)[2]
    for a, b, c in zip(*map(jax.tree.leaves, (*parts, together)), strict=True):
        np.testing.assert_allclose((a + b) / 2, c, rtol=1e-10)


# -- the choice of layers, and errors ----------------------------------------------------------------------------------


def test_patterns_say_which_layers():
    def loss(p, ids, t):
        return mean_loss(jnp.tanh(p["table"][ids] @ p["first"]) @ p["second"] + p["shift"], t)

    params = {"table": jnp.ones((7, 5)), "first": jnp.ones((5, 4)), "second": jnp.ones((4, 2)), "shift": jnp.ones(2)}
    batch = (np.zeros((N, T), np.int32), jnp.ones((N, 60)))
    layers = kfac.find_layers(loss, params, *batch, rules={"^first$|table": "reduce"})
    assert {layer.name: layer.weight_sharing for layer in layers} == {
        "first": "reduce",
        "second": "expand",
        "table": "expand",
    }
    assert layers != kfac.find_layers(loss, params, *batch)
    jax.jit(kfac.value_and_grad(loss, layers))(params, *batch)
    for bad, message in (
        ({"third": "reduce"}, r"rules=\{'third': 'reduce'\} matches no parameter; the parameters are first"),
        ({"(": "reduce"}, r"rules=\{'\(': 'reduce'\}: the pattern is not a regular"),
        ({"table": "reduce"}, r"rules=\{'table': 'reduce'\} matches no kernel of a product"),
        ("x", "rules must be a mapping"),
    ):
        with pytest.raises(ValueError, match=message):
            kfac.find_layers(loss, params, *batch, rules=bad)


@pytest.mark.parametrize("model", ["sorted", "hidden"])
def test_examples_that_are_not_told_apart_are_an_error(model):
    def loss(p, x):
        rows = x.reshape(-1, 5) if model == "sorted" else x.reshape(N * T, 5)
        rows = rows[jnp.argsort(rows[:, 0])] if model == "sorted" else rows
        return jnp.mean(jnp.tanh(rows @ p["w"]))

    params, x = {"w": jnp.ones((5, 2))}, jnp.ones((N, T, 5))
    assert kfac.find_layers(loss, params, x)["w"].kind == "dense"
    with pytest.raises(ValueError, match=r"'reduce' .*'w'.*dot_general without an order of the examples"):
        kfac.find_layers(loss, params, x, rules={".": "reduce"})
