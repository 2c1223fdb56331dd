"""Test EKFAC's second moments of per-example gradients in an eigenbasis against brute force, and their accuracy.

One test sets a threshold inside `_statistics.moments`, so that a few examples are handled like many.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import kfac
import kfac._statistics.moments
from checking import check_moments, expected_moments, normal, rotations
from exact import dense, empirical_blocks, error, fisher_blocks
from oracle import example_gradients, relative_error

N, T = 4, 3


def mean_loss(y, t):
    """Compute a loss whose gradient depends on output and target, so that no two rows or positions agree."""
    y = y.reshape(y.shape[0], -1)
    return jnp.mean(jnp.sum(jnp.tanh(y) * t[:, : y.shape[1]], axis=1) + 0.5 * jnp.sum(jnp.sin(y), axis=1) ** 2)


# -- every kind of read ------------------------------------------------------------------------------------------------


def biased(p, x, t):
    return mean_loss(x @ p["dense"]["w"] + p["dense"]["b"], t)


def unbiased(p, x, t):
    return mean_loss(x @ p["w"], t)


def kernel_on_the_left(p, x, t):
    return mean_loss(jnp.moveaxis(jnp.einsum("do,ntd->ont", p["w"], x), 0, 2), t)


def heads(p, x, t):
    return mean_loss(jnp.einsum("ntd,dhk->nthk", x, p["dense"]["w"]) + p["dense"]["b"], t)


def two_axes_out_of_order(p, x, t):
    """Order the result's axes of positions differently from the input's."""
    y = jnp.einsum("nstd,do->nsto", jnp.swapaxes(x, 1, 2), p["w"])
    return mean_loss(jnp.swapaxes(y, 1, 2) * jnp.arange(1.0, 1 + y.shape[1])[:, None], t)


def flattened(p, x, t):
    """Join examples and positions on a single axis."""
    return mean_loss((x.reshape(-1, x.shape[-1]) @ p["w"]).reshape(*x.shape[:2], -1), t)


def copies(p, x, t):
    """Apply independent kernels side by side."""
    return mean_loss(jnp.einsum("ngtd,gdo->ngto", x, p["w"]), t)


def scanned(p, x, t):
    def body(h, own):
        return jnp.tanh(h @ own["w"] + own["b"]), None

    return mean_loss(lax.scan(body, x, p["layers"])[0], t)


def scanned_with_remat(p, x, t):
    def body(h, own):
        return jnp.tanh(h @ own["w"] + own["b"]), None

    return mean_loss(lax.scan(jax.checkpoint(body), x, p["layers"], reverse=True)[0], t)


def parts(p, x, t):
    """Use two of the three parts of a leaf."""
    h = jnp.tanh(x @ p["w"][2])
    return mean_loss(h @ p["w"][0], t)


def halves(p, x, t):
    q, k = jnp.split(p["w"], 2, axis=1)
    return mean_loss(jnp.tanh(x @ k) + x @ q, t)


def flipped(p, x, t):
    return mean_loss(jnp.einsum("ngtd,gdo->ngto", x, p["w"][::-1, ::-1]), t)


def times_a_number(p, x, t):
    return mean_loss(x @ (jnp.abs(t[0, 0]) * p["dense"]["w"]) + p["dense"]["b"], jnp.ones_like(t))


def vmapped(p, x, t):
    return jnp.mean(jax.vmap(lambda x, t: unbiased(p, x[None], t[None]))(x, t))


def heads_before_positions(p, x, t):
    """Multiply with the kernel on the left, which gives `[heads, features, examples, positions]`.

    There are twice as many positions as examples.
    """
    return mean_loss(jnp.einsum("ntd,hdk->nhtk", x, p["w"]), t)


SEQUENCES = (N, T, 5)
DENSE = {
    "one position": (biased, (N, 5), {"dense": {"w": (5, 6), "b": (6,)}}),
    "positions": (biased, SEQUENCES, {"dense": {"w": (5, 6), "b": (6,)}}),
    "many positions, rotated as gradients": (biased, (N, 40, 3), {"dense": {"w": (3, 2), "b": (2,)}}),
    "two axes of positions": (unbiased, (N, 2, T, 5), {"w": (5, 6)}),
    "two axes out of order": (two_axes_out_of_order, (N, 2, T, 5), {"w": (5, 6)}),
    "a single example": (biased, (1, T, 5), {"dense": {"w": (5, 6), "b": (6,)}}),
    "kernel on the left": (kernel_on_the_left, SEQUENCES, {"w": (5, 6)}),
    "heads before positions": (heads_before_positions, (N, 2 * N, 3), {"w": (2, 3, 3)}),
    "heads": (heads, SEQUENCES, {"dense": {"w": (5, 2, 3), "b": (2, 3)}}),
    "flattened": (flattened, SEQUENCES, {"w": (5, 6)}),
    "copies": (copies, (N, 2, T, 5), {"w": (2, 5, 6)}),
    "scan": (scanned, SEQUENCES, {"layers": {"w": (2, 5, 5), "b": (2, 5)}}),
    "scan backwards under remat": (scanned_with_remat, SEQUENCES, {"layers": {"w": (2, 5, 5), "b": (2, 5)}}),
    "parts": (parts, SEQUENCES, {"w": (3, 5, 5)}),
    "halves": (halves, SEQUENCES, {"w": (5, 12)}),
    "read backwards": (flipped, (N, 2, T, 5), {"w": (2, 5, 6)}),
    "vmap": (vmapped, SEQUENCES, {"w": (5, 6)}),
}


def parameters(shapes, dtype=np.float64):
    flat, tree = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    return jax.tree.unflatten(tree, [normal(10 + k, *shape, dtype=dtype) / 2 for k, shape in enumerate(flat)])


# The "reduce" setting changes the factors but not the moments. It also changes how examples are told from positions.
SETTINGS = [
    *((case, None) for case in DENSE),
    *((case, {".": "reduce"}) for case in ("positions", "copies", "scan", "parts")),
]


@pytest.mark.parametrize(("case", "rules"), SETTINGS, ids=str)
def test_dense_layers(x64, case, rules):
    loss, inputs, shapes = DENSE[case]
    n = inputs[0]
    check_moments(loss, parameters(shapes), (normal(1, *inputs), normal(2, n, 300)), find={"rules": rules})


def test_a_kernel_times_a_number(x64):
    params, x, t = parameters(DENSE["positions"][2]), normal(1, *SEQUENCES), normal(2, 1, 1)
    gradients = [jax.grad(times_a_number)(params, x[i : i + 1], t) for i in range(N)]
    gradients = jax.tree.map(lambda *g: np.stack(g) / N, *gradients)
    check_moments(times_a_number, params, (x, t), gradients=gradients)


CONVOLUTIONS = {
    "same": dict(window_strides=(1, 1), padding="SAME"),
    "strides and padding": dict(window_strides=(2, 1), padding=((1, 0), (0, 2))),
    "dilated": dict(window_strides=(1, 1), padding="SAME", rhs_dilation=(2, 1)),
    "transposed": dict(window_strides=(1, 1), padding=((1, 1), (1, 1)), lhs_dilation=(2, 2)),
}
LAYOUTS = (("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW"), ("NHWC", "HWIO", "CWNH"), ("HNWC", "HWIO", "NWHC"))


def convolution(numbers, groups, options, p, x, t):
    x = x.transpose(["NHWC".index(letter) for letter in numbers[0]])
    y = lax.conv_general_dilated(x, p["w"], dimension_numbers=numbers, feature_group_count=groups, **options)
    batch = numbers[2].index("N")
    if "b" in p:
        shape = [1] * y.ndim
        shape[numbers[2].index("C")] = -1
        y = y + p["b"].reshape(shape)
    # Positions must differ in every layout.
    y = jnp.moveaxis(y, batch, 0)
    return mean_loss(y, t)


# Each geometry is tested in two layouts, one with groups, and each layout with two geometries.
CASES = [(g, LAYOUTS[(i + k) % 4], 1 + k) for i, g in enumerate(CONVOLUTIONS) for k in range(2)]


@pytest.mark.parametrize(("geometry", "numbers", "groups"), CASES, ids=str)
def test_convolutions(x64, geometry, numbers, groups):
    kernel = {"H": 3, "W": 2, "I": 2 // groups, "O": 4}
    params = {"w": normal(3, *(kernel[k] for k in numbers[1])) / 2}
    if groups == 1:
        params["b"] = normal(4, 4)
    loss = functools.partial(convolution, numbers, groups, CONVOLUTIONS[geometry])
    check_moments(loss, params, (normal(1, N, 5, 4, 2), normal(2, N, 500)))


@pytest.mark.parametrize("n", [4, 6])
def test_a_few_examples_at_a_time(x64, monkeypatch, n):
    monkeypatch.setattr(kfac._statistics.moments, "PATCH_ELEMENTS", 200)
    loss, _, shapes = DENSE["positions"]
    check_moments(loss, parameters(shapes), (normal(1, n, T, 5), normal(2, n, 300)))
    loss = functools.partial(convolution, LAYOUTS[0], 1, CONVOLUTIONS["strides and padding"])
    check_moments(loss, {"w": normal(3, 3, 2, 2, 4)}, (normal(1, n, 5, 4, 2), normal(2, n, 300)))


def test_a_single_example_with_several_images(x64, monkeypatch):
    monkeypatch.setattr(kfac._statistics.moments, "PATCH_ELEMENTS", 1)
    window = functools.partial(convolution, LAYOUTS[0], 1, CONVOLUTIONS["same"])

    def loss(params, frames, target):
        images = frames.reshape(-1, *frames.shape[2:])
        return window(params, images, jnp.broadcast_to(target, (len(images), target.shape[1])))

    check_moments(loss, {"w": normal(3, 3, 2, 2, 4)}, (normal(1, 1, 3, 5, 4, 2), normal(2, 1, 300)))


def test_every_kth_example(x64):
    """Check that the moments come from the selected examples."""
    shapes = DENSE["positions"][2]
    conv = functools.partial(convolution, LAYOUTS[0], 1, CONVOLUTIONS["same"])
    for loss, params, x in (
        (biased, parameters(shapes), normal(1, 5, T, 5)),
        (conv, {"w": normal(3, 3, 2, 2, 4)}, normal(1, 5, 5, 4, 2)),
    ):
        batch = x, normal(2, 5, 300)
        layers = kfac.find_layers(loss, params, *batch)
        basis = rotations(layers)
        measure = kfac.statistics(loss, layers, fraction=1 / 2)
        factors = jax.jit(measure)(params, *batch, basis=basis)
        gradients = example_gradients(loss, params, [x[:4:2] for x in batch])
        for name, moments in expected_moments(layers, gradients, basis).items():
            assert relative_error(factors[name].moments, moments) <= 1e-10


def tokens(p, x, t):
    """Compute a mean over tokens, as the marked output says. In the first layer each token has further positions."""
    h = jnp.sum(jnp.tanh(x @ p["first"]), axis=2)
    logits = kfac.mark_output(h @ p["second"], "categorical")
    return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * t, axis=-1))


@pytest.mark.parametrize("positions", [1, 2])
def test_an_example_is_a_sequence_where_the_loss_is_a_mean_over_tokens(x64, positions):
    """Check that the squares come from whole sequences, weighted by the number of rows in the marked output."""
    params, x = parameters({"first": (5, 4), "second": (4, 3)}), normal(1, N, T, positions, 5)
    t = jax.nn.one_hot(jnp.arange(N * T).reshape(N, T) % 3, 3, dtype=jnp.float64)
    layers = kfac.find_layers(tokens, params, x, t)
    basis = rotations(layers)
    _, _, factors = jax.jit(kfac.value_and_grad(tokens, layers))(params, x, t, basis=basis)
    expected = expected_moments(layers, example_gradients(tokens, params, (x, t)), basis)
    assert set(expected) == {"first", "second"}
    for name, moments in expected.items():
        assert relative_error(factors[name].moments, T * moments) <= 1e-10


@pytest.mark.parametrize("positions", [1, 2])
def test_every_kth_sequence_of_tokens(x64, positions):
    """Check that moments, `A` and `G` come from whole sequences.

    Every second token would be at the same places in each sequence.
    """
    params, x = parameters({"first": (5, 4), "second": (4, 3)}), normal(1, N, 2 * T, positions, 5)
    t = jax.nn.one_hot(jnp.arange(2 * N * T).reshape(N, 2 * T) % 3, 3, dtype=jnp.float64)
    layers = kfac.find_layers(tokens, params, x, t)
    basis = rotations(layers)
    found = jax.jit(kfac.statistics(tokens, layers, fraction=1 / 2))(params, x, t, basis=basis)
    taken = slice(0, N // 2 * 2, 2)
    _, _, expected = jax.jit(kfac.value_and_grad(tokens, layers))(params, x[taken], t[taken], basis=basis)
    for name in basis:
        for side in ("A", "G", "moments"):
            assert relative_error(getattr(found[name], side), np.asarray(getattr(expected[name], side))) <= 1e-12


def test_layers_without_a_correction(x64):
    """Check layers with a diagonal factor, with a split factor, and with several uses.

    They have no moments and no entry in the basis.
    """

    def loss(p, rows, t):
        h = p["table"][rows]
        h = jnp.tanh(h @ p["twice"])
        h = jnp.tanh(h @ p["twice"])
        return mean_loss(h @ p["once"] @ p["wide"], t)

    params = parameters({"table": (7, 4), "twice": (4, 4), "once": (4, 3), "wide": (3, 9)})
    batch = jnp.arange(N), normal(2, N, 300)
    layers, factors = check_moments(loss, params, batch, find={"max_factor_dim": 8})
    assert [layer.name for layer in layers if layer.supports_ekfac] == ["once"]
    assert set(kfac.curvature.eigenbasis(factors, layers)) == {"once"}


def test_bfloat16_operands():
    loss, inputs, shapes = DENSE["positions"]
    params = parameters(shapes, np.float32)
    batch = normal(1, *inputs, dtype=np.float32), normal(2, N, 300, dtype=np.float32)

    def narrow(p, x, t):
        return loss(jax.tree.map(lambda w: w.astype(jnp.bfloat16), p), x.astype(jnp.bfloat16), t).astype(jnp.float32)

    layers = kfac.find_layers(narrow, params, *batch)
    basis = rotations(layers, np.float32)
    _, _, factors = jax.jit(kfac.value_and_grad(narrow, layers))(params, *batch, basis=basis)
    moments = factors["dense"].moments
    assert moments.dtype == jnp.float32
    expected = expected_moments(layers, example_gradients(loss, params, batch), basis)["dense"]
    assert relative_error(moments, expected) <= 0.05


def test_micro_batches_and_loss_scale(x64):
    loss, _, shapes = DENSE["positions"]
    params, batch = parameters(shapes), (normal(1, 6, T, 5), normal(2, 6, 300))
    layers = kfac.find_layers(loss, params, *batch)
    basis = rotations(layers)
    measure = kfac.value_and_grad(loss, layers)
    _, _, whole = jax.jit(measure)(params, *batch, basis=basis)
    _, _, mean = jax.jit(kfac.microbatch(measure, 3, batch_argnums=(1, 2)))(params, *batch, basis=basis)
    scaled = jax.jit(kfac.value_and_grad(lambda *args: 1024 * loss(*args), layers))(params, *batch, basis=basis)[2]
    for found in (mean, scaled.unscale(1024.0)):
        assert relative_error(found["dense"].moments, np.asarray(whole["dense"].moments)) <= 1e-12


# -- the approximation -------------------------------------------------------------------------------------------------


def classifier(p, x, labels):
    h = lax.conv_general_dilated(x, p["conv"]["w"], (1, 1), "SAME", dimension_numbers=LAYOUTS[0])
    h = jnp.mean(jnp.tanh(h + p["conv"]["b"]), axis=(1, 2))
    logits = kfac.mark_output(h @ p["dense"]["w"] + p["dense"]["b"], "categorical")
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1))


def classification(n):
    shapes = {"conv": {"w": (3, 3, 2, 3), "b": (3,)}, "dense": {"w": (3, 4), "b": (4,)}}
    return parameters(shapes), normal(1, n, 4, 5, 2), jnp.arange(n) % 4


@pytest.mark.slow
@pytest.mark.parametrize("n", [3, 12])
def test_its_error_is_never_above_that_of_the_kronecker_product(x64, n):
    """Compare errors in Frobenius norm, against the exact empirical Fisher matrix. Other eigenvalues are not nearer."""
    params, *batch = classification(n)
    layers = kfac.find_layers(classifier, params, *batch)
    measure = jax.jit(kfac.value_and_grad(classifier, layers))
    _, _, factors = measure(params, *batch)
    basis = jax.jit(lambda factors: kfac.curvature.eigenbasis(factors, layers))(factors)
    _, _, factors = measure(params, *batch, basis=basis)
    exact = empirical_blocks(classifier, layers, params, batch)
    for name, block in exact.items():
        plain = error(block, dense(factors[name])).relative
        corrected = dense(factors[name], basis[name])
        assert error(block, corrected).relative <= plain * (1 + 1e-12)
        for side, values in (("A", basis[name].A), ("G", basis[name].G)):
            q, factor = np.asarray(values), np.asarray(getattr(factors[name], side))
            np.testing.assert_allclose(q.T @ factor @ q, np.diag(np.diag(q.T @ factor @ q)), atol=1e-12)
        rng = np.random.default_rng(0)
        for _ in range(5):
            moved = factors[name].moments * jnp.asarray(rng.uniform(0.9, 1.1, factors[name].moments.shape))
            other = dense(dataclasses.replace(factors[name], moments=moved), basis[name])
            assert error(block, other).relative >= error(block, corrected).relative


@pytest.mark.slow
def test_sampled_moments_have_the_mean_of_the_exact_fisher_matrix(x64):
    params, *batch = classification(6)
    layers = kfac.find_layers(classifier, params, *batch)
    basis = rotations(layers)
    measure = kfac.value_and_grad(classifier, layers, fisher="sampled")

    @jax.jit
    def mean(keys):
        return jax.tree.map(
            lambda x: x.mean(0), jax.vmap(lambda k: measure(params, *batch, basis=basis, fisher_key=k)[2])(keys)
        )

    factors = mean(jax.random.split(jax.random.key(0), 4000))
    exact = jax.jit(fisher_blocks(classifier, layers))(params, *batch)
    for name, block in exact.items():
        q = np.einsum("ai,gj->agij", basis[name].A, basis[name].G).reshape(block.shape)
        expected = np.diag(q.T @ np.asarray(block) @ q).reshape(factors[name].moments.shape[::-1]).T
        assert relative_error(factors[name].moments, expected) <= 0.1
