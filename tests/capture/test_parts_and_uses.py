"""Test kernels with several uses, parts of a parameter, kernels read backwards, and scaled kernels.

Some tests set thresholds inside `_capture` and `_statistics`, so that small arrays are treated like large arrays.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from test_without_examples import own_factors

import kfac
import kfac._statistics.convolution
from checking import check_all, check_kronecker, kinds, normal, run
from oracle import Geometry, Hook, relative_error, truth

N, T, D = 3, 4, 6
NHWC = ("NHWC", "HWIO", "NHWC")


def mean_loss(y, t):
    y = y.reshape(y.shape[0], -1)
    return jnp.mean(jnp.sum(jnp.tanh(y) * t[:, : y.shape[1]], axis=1) + 0.5 * jnp.sum(jnp.sin(y), axis=1) ** 2)


def drawn(**shapes):
    return {
        name: drawn(**shape) if isinstance(shape, dict) else normal(10 + k, *shape) / 2
        for k, (name, shape) in enumerate(shapes.items())
    }


def sequences():
    return normal(1, N, T, D), normal(2, N, 100)


def plain(model):
    return lambda p, *batch: model(Hook(), p, *batch)


def check(model, params, batch, loss=None, **options):
    return check_all(loss or plain(model), params, batch, truth(model, params, batch), **options)


# -- several uses ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_recurrent_kernels_of_a_loop_and_of_a_scan(x64):
    """Check both kernels of a recurrent cell and their bias. They have as many uses as the loop has steps."""

    def cell(p, h, x):
        return jnp.tanh(h @ p["h"]["w"] + x @ p["x"]["w"] + p["x"]["b"])

    def reference(hook, p, x, t):
        h = jnp.zeros((len(x), 4))
        for k in range(T):
            y = hook.layer("x", x[:, k], x[:, k] @ p["x"]["w"] + p["x"]["b"], bias=True)
            h = jnp.tanh(hook.layer("h", h, h @ p["h"]["w"]) + y)
        return mean_loss(h, t)

    def unrolled(p, x, t):
        h = jnp.zeros((len(x), 4))
        for k in range(T):
            h = cell(p, h, x[:, k])
        return mean_loss(h, t)

    def scanned(p, x, t):
        h, _ = lax.scan(lambda h, x: (cell(p, h, x), None), jnp.zeros((len(x), 4)), x.swapaxes(0, 1))
        return mean_loss(h, t)

    params, batch = drawn(h={"w": (4, 4)}, x={"w": (D, 4), "b": (4,)}), sequences()
    # In h @ w + x @ w + b, the bias belongs to neither product alone, so it has a block of its own.
    for loss in (unrolled, scanned):
        layers, _, factors = run(loss, params, batch)
        known = truth(reference, params, batch)
        a, g = known.kronecker("h")
        assert relative_error(factors["h"].A, a) <= 1e-12 >= relative_error(factors["h"].G, g)
        assert layers["h"].uses == layers["x/w"].uses == T
        assert relative_error(factors["x/w"].A, known.kronecker("x")[0][:-1, :-1]) <= 1e-12
        assert kinds(layers)["x/b"] == "diagonal"
    assert f"{T} ({T} uses)" in repr(layers)


def test_a_detection_head_over_scales(x64):
    """Check a convolution with a bias over feature maps of several sizes, each with its own positions."""

    def model(hook, p, x, t):
        total = 0.0
        for stride in (1, 2):
            maps = x[:, ::stride, ::stride]
            y = lax.conv_general_dilated(maps, p["head"]["w"], (1, 1), "SAME", dimension_numbers=NHWC) + p["head"]["b"]
            geometry = Geometry((3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), (1, 1))
            y = hook.layer("head", maps, y, bias=True, conv=geometry)
            total = total + jnp.sum(jnp.tanh(y), axis=(1, 2))
        return mean_loss(total, t)

    params = drawn(head={"w": (3, 3, 2, 3), "b": (3,)})
    batch = (normal(3, N, 4, 6, 2), normal(2, N, 100))
    layers, _ = check(model, params, batch)
    assert (layers["head"].uses, layers["head"].positions) == (2, 4 * 6 + 2 * 3)
    assert "30 (2 uses)" in repr(layers)
    reduced, _, _ = run(plain(model), params, batch, rules={"head": "reduce"})
    assert "30 (2 uses, reduce)" in repr(reduced)


# -- parts of a stacked or fused parameter -----------------------------------------------------------------------------


def stack_of_blocks(hook, p, x, t):
    """Compute unrolled layers that each take their own part of every stacked leaf."""
    for k in range(3):
        y = hook.layer(f"dense[{k}]", x, x @ p["dense"]["w"][k] + p["dense"]["b"][k], bias=True)
        x = x + (jnp.tanh(y) * p["norm"]["scale"][k] + p["norm"]["shift"][k])
    return mean_loss(x, t)


STACK = {"dense": {"w": (3, D, D), "b": (3, D)}, "norm": {"scale": (3, D), "shift": (3, D)}}


def test_rows_of_stacked_leaves(x64):
    def block(x, p):
        return jnp.tanh(x @ p["dense"]["w"] + p["dense"]["b"]) * p["norm"]["scale"] + p["norm"]["shift"]

    def loss(p, x, t):
        for k, wrap in enumerate((jax.checkpoint, jax.jit, lambda block: block)):
            x = x + wrap(block)(x, jax.tree.map(lambda leaf, k=k: leaf[k], p))
        return mean_loss(x, t)

    layers, _ = check(stack_of_blocks, drawn(**STACK), sequences(), loss=loss)
    assert kinds(layers) == {"dense": "dense", "norm": "unitwise"}
    assert (layers["dense"].copies, layers["dense"].uses, layers["dense"].positions) == (3, 1, T)
    assert layers["dense"].has_bias and layers["norm"].params == ("norm/scale", "norm/shift")


FUSED = {
    "slices": lambda w: [w[..., :4], *jnp.split(w[..., 4:], 2, axis=-1)],
    "unstack": lambda w: jnp.unstack(w.reshape(*w.shape[:-1], 3, 4), axis=-2),
    "backwards": lambda w: [part[..., ::-1] for part in jnp.split(w[..., ::-1], 3, axis=-1)][::-1],
}


@pytest.mark.slow
@pytest.mark.parametrize("spelling", FUSED)
def test_a_fused_projection_that_is_split(x64, spelling):
    """Check query, key and value in a leaf that is cut before the products.

    Each part is a copy with its own factors. All copies have the same factor A.
    """

    def model(hook, p, x, t, cut=lambda w: jnp.split(w, 3, axis=-1)):
        kernels, biases = cut(p["qkv"]["w"]), cut(p["qkv"]["b"])
        query, key, value = (
            hook.layer(f"qkv[{k}]", x, x @ w + b, bias=True)
            for k, (w, b) in enumerate(zip(kernels, biases, strict=True))
        )
        weights = jax.nn.softmax(jnp.einsum("nqd,nkd->nqk", query, key), axis=-1)
        return mean_loss(weights @ value, t)

    def loss(p, x, t):
        return model(Hook(), p, x, t, FUSED[spelling])

    layers, factors = check(model, drawn(qkv={"w": (D, 12), "b": (12,)}), sequences(), loss=loss)
    assert layers["qkv"].factor_shapes == {"A": (3, D + 1, D + 1), "G": (3, 4, 4)}
    np.testing.assert_allclose(factors["qkv"].A[0], factors["qkv"].A[2], rtol=1e-12)


def test_parts_read_at_different_numbers_of_positions(x64):
    """Check a part with two uses at single positions, a part that the whole sequence uses, and an unused part."""

    def model(hook, p, x, t):
        y = hook.layer("w[0]", x[:, 0], x[:, 0] @ p["w"][0])
        y = hook.layer("w[0]", jnp.tanh(y), jnp.tanh(y) @ p["w"][0])
        z = hook.layer("w[2]", x, x @ p["w"][2])
        return mean_loss(y + jnp.tanh(z).sum(1), t)

    params, batch = drawn(w=(3, D, D)), sequences()
    layers, _, factors = run(plain(model), params, batch)
    known = truth(model, params, batch)
    for part in (0, 2):
        a, g = known.kronecker(f"w[{part}]")
        assert relative_error(factors["w"].A[part], a) <= 1e-12 >= relative_error(factors["w"].G[part], g)
    assert not np.any(factors["w"].A[1]) and not np.any(factors["w"].G[1])
    assert (layers["w"].positions, layers["w"].uses) == (None, 2)
    assert layers["w"].note == "2 of its 3 parts read"
    assert "2 uses" in repr(layers)


def test_parts_with_reduced_or_diagonal_factors(x64):
    """Check that an unrolled loop over a stack gives the factors of a scan over the stack."""
    options = dict(rules={"b": "reduce"}, max_factor_dim=D - 1)

    def scanned(p, x, t):
        return mean_loss(lax.scan(lambda x, p: (x + jnp.tanh(x @ p["a"]) @ p["b"], None), x, p)[0], t)

    def unrolled(p, x, t):
        for k in range(2):
            x = x + jnp.tanh(x @ p["a"][k]) @ p["b"][k]
        return mean_loss(x, t)

    params, batch = drawn(a=(2, D, 4), b=(2, 4, D)), sequences()
    _, _, expected = run(scanned, params, batch, **options)
    _, _, found = run(unrolled, params, batch, **options)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert relative_error(a, np.asarray(b)) <= 1e-12


def test_scans_over_parts_of_a_stack(x64):
    """Check two scans over two layers each. Both stages are parts of a leaf that has the last layers first."""

    def loss(p, x, t):
        for stage in jnp.split(p["w"][::-1], 2):
            x, _ = lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, stage)
        return mean_loss(x, t)

    def reference(hook, p, x, t):
        for k in reversed(range(4)):
            x = x + jnp.tanh(hook.layer(f"w[{k}]", x, x @ p["w"][k]))
        return mean_loss(x, t)

    check(reference, drawn(w=(4, D, D)), sequences(), loss=loss)


def test_parts_of_convolutions_and_of_tables(x64):
    ids = np.random.default_rng(0).integers(0, 5, (N, T)).astype(np.int32)

    def model(hook, p, x, ids, t):
        geometry = Geometry((3,), (1,), ((1, 1),), (1,), (1,))
        for k in range(2):
            y = lax.conv_general_dilated(x, p["conv"]["w"][k], (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC"))
            y = hook.layer(f"conv[{k}]", x, y + p["conv"]["b"][k], bias=True, conv=geometry)
            rows = hook.layer(f"table[{k}]", jax.nn.one_hot(ids, 5, dtype=x.dtype), p["table"][k][ids])
            x = jnp.tanh(y + rows)
        return mean_loss(x, t)

    params = drawn(conv={"w": (2, 3, D, D), "b": (2, D)}, table=(2, 5, D))
    x, t = sequences()
    layers, _, factors = run(plain(model), params, (x, ids, t))
    known = truth(model, params, (x, ids, t))
    for name in ("conv", "table"):
        for k in range(2):
            a, g = known.kronecker(f"{name}[{k}]")
            found = factors[name].A[k] if name == "conv" else np.diag(factors[name].A[k])
            assert relative_error(found, a) <= 1e-10 >= relative_error(factors[name].G[k], g)
    assert kinds(layers) == {"conv": "conv", "table": "embedding"}


def test_a_table_of_positions_longer_than_the_sequence(x64):
    """Check a table of positions that is longer than the sequence.

    The rows beyond the sequence have no gradient. If a part is read twice, its gradients are summed before they are
    squared.
    """

    def loss(p, x, t):
        x = jnp.tanh((x + p["positions"][:T]) @ p["w"])
        x = x + p["positions"][1 : T + 1] - p["flipped"][::-1]
        return mean_loss(x * p["scale"][2:] + p["scale"][:D], t)

    params = drawn(flipped=(T, D), positions=(7, D), scale=(D + 2,), w=(D, D))
    batch = sequences()

    def reference(hook, p, x, t):
        y = x + p["positions"][:T]
        y = jnp.tanh(hook.layer("w", y, y @ p["w"]))
        y = y + p["positions"][1 : T + 1] - p["flipped"][::-1]
        return mean_loss(y * p["scale"][2:] + p["scale"][:D], t)

    layers, factors = check(reference, params, batch, loss=loss)
    assert kinds(layers) == {"flipped": "diagonal", "positions": "diagonal", "scale": "unitwise", "w": "dense"}
    assert not np.any(factors["positions"].F[-2 * D :])


def test_a_stacked_scale_that_a_scan_iterates_over_and_others_read(x64):
    """Check that the gradients of all uses are summed for each example before they are squared."""

    def body(p, x, scale):
        return jnp.sin(x * scale + p["scale"][0])

    def loss(p, x, t):
        x, _ = lax.scan(lambda x, scale: (body(p, x, scale), None), x, p["scale"])
        return mean_loss(jnp.tanh(x @ p["w"]) * p["scale"][::-1][0], t)

    def reference(hook, p, x, t):
        for scale in p["scale"]:
            x = body(p, x, scale)
        return mean_loss(jnp.tanh(hook.layer("w", x, x @ p["w"])) * p["scale"][1], t)

    layers, _ = check(reference, drawn(scale=(2, D), w=(D, D)), sequences(), loss=loss)
    assert kinds(layers) == {"scale": "unitwise", "w": "dense"}


def test_a_part_that_is_a_scale_has_no_exact_rows():
    def loss(p, x):
        return jnp.mean(jnp.sin((x @ p["w"][:, :2]) + x[..., :2] * p["w"][0, 2:4]))

    found = own_factors(loss, {"w": jnp.ones((D, D))}, jnp.ones((N, T, D)))
    assert found == {"w": "dot_general and mul: besides a product, an elementwise operation reads it"}


# -- kernels read backwards --------------------------------------------------------------------------------------------


def test_kernels_and_biases_read_backwards(x64):
    """Check that a bias gets a separate block if its order is opposite to its kernel's."""

    def model(hook, p, x, t):
        x = jnp.tanh(hook.layer("w", x[..., ::-1], x @ p["w"][::-1]))
        y = hook.layer("dense", x, x @ p["dense"]["w"] + p["dense"]["b"], bias=True)
        return mean_loss(y[..., ::-1] + hook.layer("v", x, x @ p["v"]) + p["against"][::-1], t)

    def loss(p, x, t):
        x = jnp.tanh(x @ p["w"][::-1])
        y = x @ p["dense"]["w"][:, ::-1] + p["dense"]["b"][::-1]
        return mean_loss(y + (x @ p["v"] + p["against"][::-1]), t)

    params = drawn(against=(5,), dense={"w": (4, 5), "b": (5,)}, v=(4, 5), w=(D, 4))
    layers, _ = check(model, params, sequences(), loss=loss)
    assert kinds(layers) == {"against": "diagonal", "dense": "dense", "v": "dense", "w": "dense"}
    assert layers["dense"].has_bias


def test_copies_read_backwards(x64):
    """Check a product that reads its kernels in reverse order, inside a scan that also reads its kernels in reverse."""

    def loss(p, x):
        def layer(x, w):
            return jnp.tanh(jnp.einsum("nki,kio->nko", x, w[::-1]) + p["b"][::-1]), None

        return jnp.mean(jnp.sum(jnp.sin(lax.scan(layer, x, p["w"][::-1])[0]), axis=(1, 2)) ** 2)

    def model(hook, p, x):
        for k in (1, 0):
            products = [x[:, j] @ p["w"][k, 2 - j] for j in range(3)]
            products = [hook.layer(f"w[{3 * k + 2 - j}]", x[:, j], y) for j, y in enumerate(products)]
            x = jnp.tanh(jnp.stack(products, axis=1) + p["b"][::-1])
        return jnp.mean(jnp.sum(jnp.sin(x), axis=(1, 2)) ** 2)

    check(model, drawn(b=(3, 3), w=(2, 3, 3, 3)), (normal(1, 3, 3, 3),), loss=loss)


@pytest.mark.parametrize(
    ("few", "options"),
    [(0, {}), (100, {}), (100, {"rules": {"w": "reduce"}, "max_factor_dim": 12})],
    ids=["offsets", "patches", "reduce and diagonal"],
)
def test_flipped_kernels_of_convolutions(x64, monkeypatch, few, options):
    """Check that a flipped kernel has the statistics of the kernel that is used, in reverse order."""
    monkeypatch.setattr(kfac._statistics.convolution, "FEW_CHANNELS", few)
    monkeypatch.setattr("kfac._capture.make_layers.VOCABULARY", 13)

    def loss(p, x, t, flip=True):
        w = p["conv"]["w"][::-1, ::-1] if flip else p["conv"]["w"]
        y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC)
        return mean_loss(jnp.tanh(y + p["conv"]["b"]), t)

    def unflipped(p, x, t):
        return loss(p, x, t, flip=False)

    params = drawn(conv={"w": (3, 2, 2, 3), "b": (3,)})
    batch = (normal(3, N, 4, 5, 2), normal(2, N, 100))
    used = {"conv": params["conv"] | {"w": params["conv"]["w"][::-1, ::-1]}}
    _, _, found = run(loss, params, batch, **options)
    _, _, expected = run(unflipped, used, batch, **options)
    a = np.asarray(expected["conv"].A)
    order = np.append(np.arange(12).reshape(3, 2, 2)[::-1, ::-1].reshape(-1), 12)
    a = a[order] if a.ndim == 1 else a[order][:, order]
    assert relative_error(found["conv"].A, a) <= 1e-12
    assert relative_error(found["conv"].G, np.asarray(expected["conv"].G)) <= 1e-12


def test_transposed_convolutions_with_a_transposed_kernel(x64):
    """Check `transpose_kernel=True`, which flips the window and exchanges the channels."""
    options = dict(dimension_numbers=NHWC, transpose_kernel=True)

    def model(hook, p, x, t):
        y = lax.conv_transpose(x, p["w"], (2, 2), "VALID", **options)
        flipped = Geometry((3, 2), (1, 1), ((2, 2), (1, 1)), (2, 2), (1, 1))
        y = hook.layer("used", x, y, conv=flipped)
        return mean_loss(y, t)

    params, batch = drawn(w=(3, 2, 4, 2)), (normal(3, N, 3, 4, 2), normal(2, N, 400))
    layers, _, factors = run(plain(model), params, batch)
    a, g = truth(model, params, batch).kronecker("used")
    order = np.arange(12).reshape(3, 2, 2)[::-1, ::-1].reshape(-1)
    assert relative_error(factors["w"].A, a[order][:, order]) <= 1e-12 >= relative_error(factors["w"].G, g)
    assert kinds(layers) == {"w": "conv"}


# -- scaled kernels that cross a boundary ------------------------------------------------------------------------------


def scaled_inside(p, x):
    return x @ jax.jit(lambda w: 0.5 * w)(p["w"])


def scaled_outside(p, x):
    return jax.jit(lambda x, w: x @ w)(x, 0.5 * p["w"])


def scaled_on_both_sides(p, x):
    return jax.jit(lambda x, w: x @ (-w))(x, jax.jit(lambda w: -0.5 * w)(p["w"]))


def handed_through(p, x):
    w, _ = jax.jit(lambda w, x: (w, x + 1))(0.5 * p["w"], x)
    return x @ w


def under_remat(p, x):
    w = jax.checkpoint(lambda w: 0.5 * w)(p["w"])
    return jax.checkpoint(lambda x, w: x @ w)(x, w)


def cut_afterwards(p, x):
    return jnp.concatenate([x @ w for w in jnp.split(0.5 * p["w"], 2, axis=1)], axis=-1)


def test_numbers_times_kernels_across_boundaries(x64):
    spellings = [scaled_inside, scaled_outside, scaled_on_both_sides, handed_through, under_remat, cut_afterwards]

    def loss(p, x, t):
        return mean_loss(sum(jnp.sin(k * spelling(p[k], x)) for k, spelling in enumerate(spellings, 1)), t)

    def reference(hook, p, x, t):
        total = 0.0
        for k in range(1, 6):
            total = total + jnp.sin(k * hook.layer(f"{k}", 0.5 * x, 0.5 * x @ p[k]["w"]))
        parts = [hook.layer(f"6[{j}]", 0.5 * x, 0.5 * x @ p[6]["w"][:, 2 * j : 2 * j + 2]) for j in range(2)]
        return mean_loss(total + jnp.sin(6 * jnp.concatenate(parts, axis=-1)), t)

    params = {k: drawn(w=(D, 4)) for k in range(1, 7)}
    check(reference, params, sequences(), loss=loss)


@pytest.mark.slow
def test_numbers_times_kernels_that_enter_scans(x64):
    """Check scaled kernels that a scan reads as constants, scans over, and carries along."""

    def loss(p, x, t):
        def body(carry, each):
            x, carried = carry
            x = jnp.tanh(x @ (0.5 * each)) + jnp.sin(x @ shared) + jnp.cos(x @ carried)
            return (x, carried), None

        shared = 2.0 * p["shared"]
        (x, carried), _ = lax.scan(body, (x, 3.0 * p["carried"]), 0.7 * p["each"])
        return mean_loss(x @ carried, t)

    def reference(hook, p, x, t):
        for k in range(2):
            y = jnp.tanh(hook.layer(f"each[{k}]", 0.35 * x, 0.35 * x @ p["each"][k]))
            y = y + jnp.sin(hook.layer("shared", 2 * x, 2 * x @ p["shared"]))
            x = y + jnp.cos(hook.layer("carried", 3 * x, 3 * x @ p["carried"]))
        return mean_loss(hook.layer("carried", 3 * x, 3 * x @ p["carried"]), t)

    params = drawn(carried=(D, D), each=(2, D, D), shared=(D, D))
    layers, factors = check(reference, params, sequences(), loss=loss)
    assert (layers["carried"].uses, layers["shared"].uses, layers["each"].uses) == (3, 2, 1)
    check_kronecker(layers, factors, truth(reference, params, sequences()))
