"""Test convolution factors over a grid of geometries and layouts, against patches from explicit loops.

Some tests set a threshold inside `_statistics.convolution`, so that small images are handled like large images.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax

import kfac
import kfac._statistics.convolution
from checking import check_all, check_kronecker, kinds, normal, run, slow
from oracle import Geometry, Hook, explicit_padding, truth

N = 3
LAYOUTS = {1: ("NHC", "HIO", "NHC"), 2: ("NHWC", "HWIO", "NHWC"), 3: ("NDHWC", "DHWIO", "NDHWC")}


def to_channels_last(x, layout):
    """Return an array of images in `layout` as `[n, *spatial, channels]`."""
    spatial = [k for k, letter in enumerate(layout) if letter not in "NC"]
    return x.transpose(layout.index("N"), *spatial, layout.index("C"))


def from_channels_last(x, layout):
    spatial = [letter for letter in layout if letter not in "NC"]
    order = ["N", *spatial, "C"]
    return x.transpose([order.index(letter) for letter in layout])


def model(window, *, strides=1, padding="VALID", lhs=1, rhs=1, layout=None, bias=True, transform=None):
    """Return a loss over a single convolution, with the hook that the oracle needs."""
    d = len(window)
    layout = layout or LAYOUTS[d]

    def each(value):
        return (value,) * d if isinstance(value, int) else tuple(value)

    strides, lhs, rhs = each(strides), each(lhs), each(rhs)

    def loss(hook, p, x, t):
        pads = explicit_padding(padding, x.shape[1:-1], window, strides, rhs)
        kernel = p["conv"]["w"] if transform is None else transform(p["conv"]["w"])
        y = lax.conv_general_dilated(
            from_channels_last(x, layout[0]),
            kernel,
            strides,
            padding,
            lhs_dilation=lhs,
            rhs_dilation=rhs,
            dimension_numbers=layout,
        )
        if bias:
            shape = [-1 if letter == "C" else 1 for letter in layout[2]]
            y = y + p["conv"]["b"].reshape(shape)
        y = to_channels_last(y, layout[2])
        y = hook.layer("conv", x, y, bias=bias, conv=Geometry(window, strides, pads, lhs, rhs))
        y = y.reshape(len(x), -1)
        return jnp.mean(jnp.sum(jnp.tanh(y) * t[:, : y.shape[1]], axis=1))

    return loss


def plain(loss):
    return lambda p, *batch: loss(Hook(), p, *batch)


def kernel_shape(window, channels, features, spec):
    sizes = {"I": channels, "O": features}
    spatial = iter(window)
    return tuple(sizes[letter] if letter in sizes else next(spatial) for letter in spec)


def check(sizes, window, *, channels=2, features=3, transform=None, stored=None, **options):
    d = len(window)
    spec = (options.get("layout") or LAYOUTS[d])[1]
    params = {"conv": {"w": normal(1, *(stored or kernel_shape(window, channels, features, spec)))}}
    if options.get("bias", True):
        params["conv"]["b"] = normal(2, features)
    batch = (normal(3, N, *sizes, channels), normal(4, N, 600))
    loss = model(window, transform=transform, **options)
    layers, _ = check_all(plain(loss), params, batch, truth(loss, params, batch))
    # A layer with a single leaf is also named after the leaf's parent.
    assert kinds(layers) == {"conv": "conv"}
    return layers


ONE = [
    dict(window=(3,), padding="SAME"),
    dict(window=(2,), strides=2),
    dict(window=(4,), strides=3, padding=[(2, 5)]),
    dict(window=(3,), rhs=2, padding=[(-1, 3)]),
    dict(window=(3,), lhs=3, padding=[(2, -2)]),
    dict(window=(1,), strides=2, bias=False),
]
TWO = [
    dict(window=(3, 3), padding="SAME"),
    dict(window=(3, 3), padding="SAME", bias=False),
    dict(window=(3, 3)),
    dict(window=(3, 3), strides=2, padding="SAME"),
    dict(window=(3, 3), strides=(2, 3), padding=[(1, 1), (0, 2)]),
    dict(window=(2, 2), padding="SAME"),
    dict(window=(2, 4), strides=2, padding="SAME"),
    dict(window=(1, 1)),
    dict(window=(1, 1), strides=2, bias=False),
    dict(window=(1, 1), padding=[(1, 0), (2, 1)]),
    dict(window=(1, 3), padding="SAME"),
    dict(window=(5, 6)),  # as large as the image, so a dense layer
    dict(window=(7, 7), strides=2, padding=[(3, 3), (3, 3)]),
    dict(window=(3, 2), rhs=2, padding="SAME"),
    dict(window=(2, 3), rhs=(3, 1), strides=(1, 2), padding=[(2, 1), (3, 0)]),
    dict(window=(3, 3), padding=[(-1, 0), (1, -2)]),
    dict(window=(3, 3), lhs=2, padding=[(1, 2), (2, 1)]),
    dict(window=(2, 3), lhs=(2, 3), rhs=(2, 1), strides=(3, 2), padding=[(-1, 2), (2, -3)]),
    dict(window=(4, 4), lhs=2, padding=[(2, 2), (2, 2)], bias=False),
]
THREE = [
    dict(window=(2, 3, 2), padding="SAME"),
    dict(window=(2, 2, 1), strides=(1, 2, 1), rhs=(1, 1, 2), padding=[(0, 1), (1, 0), (-1, 1)]),
    dict(window=(2, 1, 2), lhs=(2, 1, 1), padding=[(1, 1), (0, 0), (1, 0)], bias=False),
]


def name(case):
    return ",".join(f"{key}={value}" for key, value in case.items()).replace(" ", "")


@pytest.fixture(autouse=True)
def correlations_for_any_number_of_channels(monkeypatch):
    monkeypatch.setattr(kfac._statistics.convolution, "FEW_CHANNELS", 0)


@pytest.mark.parametrize("case", ONE, ids=name)
def test_one_dimension(x64, case):
    check((7,), **case)


@pytest.mark.parametrize("case", TWO, ids=name)
def test_two_dimensions(x64, case):
    check((5, 6), **case)


@pytest.mark.parametrize("case", [c for c in TWO if "strides" not in c and "lhs" not in c], ids=name)
def test_two_dimensions_with_few_channels(x64, monkeypatch, case):
    monkeypatch.setattr(kfac._statistics.convolution, "FEW_CHANNELS", 16)
    check((5, 6), **case)


SMALL = (1, 1), (2, 1), (1, 6), (2, 3)
WIDE = (
    dict(window=(3, 3), padding="SAME"),
    dict(window=(5, 3), padding=[(2, 2), (2, 1)]),
    dict(window=(2, 3), rhs=(1, 2), padding=[(3, 1), (2, 2)]),
    dict(window=(3, 3), padding=[(4, 3), (3, 2)], bias=False),
)


def small_images():
    """Yield all windows with all sizes. By default, every other pair runs, so each window and each size runs twice."""
    for j, case in enumerate(WIDE):
        for k, sizes in enumerate(SMALL):
            marks = pytest.mark.slow if (j + k) % 2 else ()
            yield pytest.param(case, sizes, id=f"{name(case)}-{sizes}", marks=marks)


@pytest.mark.parametrize(("case", "sizes"), list(small_images()))
def test_images_smaller_than_the_window(x64, case, sizes):
    check(sizes, **case)


@pytest.mark.parametrize("case", THREE, ids=name)
def test_three_dimensions(x64, case):
    check((3, 4, 3), **case)


@pytest.mark.parametrize(
    "layout",
    [
        ("NCHW", "OIHW", "NCHW"),
        ("NHWC", "OIHW", "NCHW"),
        ("CHWN", "IHWO", "HWNC"),
        ("HWNC", "HOWI", "NHCW"),
        ("NCHW", "HWIO", "CNHW"),
    ],
    ids="-".join,
)
@pytest.mark.parametrize("strides", [1, 2])
def test_layouts(x64, layout, strides):
    # The image has height N, so the test fails if the height is mistaken for the examples.
    options = dict(window=(3, 2), strides=strides, padding=[(1, 1), (0, 1)], layout=layout)
    spec = layout[1]
    loss = model(**options)
    params = {"conv": {"w": normal(1, *kernel_shape((3, 2), 2, 3, spec)), "b": normal(2, 3)}}
    batch = (normal(3, N, N, 4, 2), normal(4, N, 600))
    reference = truth(loss, params, batch)
    for use in reference.uses["conv"]:
        use.a = in_memory_order(use.a, (3, 2), 2, spec)
    layers, _ = check_all(plain(loss), params, batch, reference)
    assert kinds(layers) == {"conv": "conv"}


def in_memory_order(rows, window, channels, spec):
    """Return patches `(*window, channels)` with their axes in the order of the kernel's input axes."""
    order = iter(range(len(window)))
    axes = [len(window) if letter == "I" else next(order) for letter in spec if letter != "O"]
    rows = rows.reshape(*rows.shape[:2], *window, channels)
    return rows.transpose(0, 1, *(2 + k for k in axes)).reshape(*rows.shape[:2], -1)


@pytest.mark.parametrize(
    ("stored", "transform"),
    [
        ((18, 3), lambda w: w.reshape(3, 3, 2, 3)),
        ((9, 6), lambda w: w.reshape(3, 3, 2, 3)),
        ((1, 3, 3, 2, 3), lambda w: w[0]),
        ((3, 3, 2, 3), lambda w: w.astype(jnp.float32).astype(jnp.float64)),
    ],
    ids=["matrix", "nine-blocks", "leading-one", "cast"],
)
def test_a_kernel_stored_in_another_form(x64, stored, transform):
    layers = check((4, 4), (3, 3), padding="SAME", stored=stored, transform=transform)
    assert (layers["conv"].d_in, layers["conv"].d_out) == (19, 3)


def test_a_kernel_stored_transposed(x64):
    params = {"conv": {"w": normal(1, 3, 2, 3, 3), "b": normal(2, 3)}}  # OIHW, read as HWIO
    batch = (normal(3, N, 4, 4, 2), normal(4, N, 600))
    loss = model((3, 3), padding="SAME", transform=lambda w: w.transpose(2, 3, 1, 0))
    reference = truth(loss, params, batch)
    for use in reference.uses["conv"]:
        use.a = in_memory_order(use.a, (3, 3), 2, "OIHW")
    check_all(plain(loss), params, batch, reference)


@pytest.mark.parametrize("elements", [1, 200, 500, 10**6])
@pytest.mark.parametrize("n", [1, 6, 7])
def test_chunks_of_the_batch(x64, monkeypatch, elements, n):
    """Check that chunks of any size sum to the whole batch. Seven examples only divide into single examples."""
    monkeypatch.setattr(kfac._statistics.convolution, "PATCH_ELEMENTS", elements)
    params = {"conv": {"w": normal(1, 3, 3, 2, 3), "b": normal(2, 3)}}
    batch = (normal(3, n, 4, 3, 2), normal(4, n, 600))
    loss = model((3, 3), strides=(1, 2), padding="SAME")
    _, _, factors = run(plain(loss), params, batch)
    check_kronecker(kfac.find_layers(plain(loss), params, *batch), factors, truth(loss, params, batch))


def test_convolutions_in_a_scan_under_remat(x64):
    def loss(p, x, t):
        @jax.checkpoint
        def body(x, wb):
            w, b = wb
            y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=LAYOUTS[2])
            return jnp.tanh(y + b), None

        x, _ = lax.scan(body, x, (p["conv"]["w"], p["conv"]["b"]))
        return jnp.mean(jnp.sum(x.reshape(len(x), -1) * t[:, :24], axis=1))

    def reference(hook, p, x, t):
        geometry = Geometry((3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), (1, 1))
        for k in range(2):
            y = lax.conv_general_dilated(x, p["conv"]["w"][k], (1, 1), "SAME", dimension_numbers=LAYOUTS[2])
            x = jnp.tanh(hook.layer(f"conv[{k}]", x, y + p["conv"]["b"][k], bias=True, conv=geometry))
        return jnp.mean(jnp.sum(x.reshape(len(x), -1) * t[:, :24], axis=1))

    params = {"conv": {"w": 0.5 * normal(1, 2, 3, 3, 2, 2), "b": normal(2, 2, 2)}}
    batch = (normal(3, N, 4, 3, 2), normal(4, N, 600))
    check_all(loss, params, batch, truth(reference, params, batch))


def test_one_kernel_at_two_resolutions(x64):
    """Check a shared kernel: the positions of both uses count, and the patches of both are summed."""

    def reference(hook, p, x, t):
        geometry = Geometry((3, 3), (2, 2), ((1, 1), (1, 1)), (1, 1), (1, 1))
        total = 0.0
        for _ in range(2):
            y = lax.conv_general_dilated(x, p["w"], (2, 2), ((1, 1), (1, 1)), dimension_numbers=LAYOUTS[2])
            x = jnp.tanh(hook.layer("w", x, y, conv=geometry))
            flat = x.reshape(len(x), -1)
            total = total + jnp.mean(jnp.sum(flat * t[:, : flat.shape[1]], axis=1))
        return total

    params, batch = {"w": normal(1, 3, 3, 2, 2)}, (normal(3, N, 6, 5, 2), normal(4, N, 600))
    layers, _ = check_all(plain(reference), params, batch, truth(reference, params, batch))
    assert layers["w"].positions == 9 + 4


def test_a_vmapped_convolution_of_single_images(x64):
    loss = model((3, 3), padding="SAME")

    def single(p, x, t):
        def one(image):
            y = lax.conv_general_dilated(image[None], p["conv"]["w"], (1, 1), "SAME", dimension_numbers=LAYOUTS[2])
            return y[0] + p["conv"]["b"]

        y = jax.vmap(one)(x).reshape(len(x), -1)
        return jnp.mean(jnp.sum(jnp.tanh(y) * t[:, : y.shape[1]], axis=1))

    params = {"conv": {"w": normal(1, 3, 3, 2, 3), "b": normal(2, 3)}}
    batch = (normal(3, N, 4, 3, 2), normal(4, N, 600))
    layers, _ = check_all(single, params, batch, truth(loss, params, batch))
    assert kinds(layers) == {"conv": "conv"}


@pytest.mark.slow
@pytest.mark.parametrize("geometry", [dict(padding="SAME"), dict(strides=2, padding=[(1, 2), (0, 1)])], ids=name)
@pytest.mark.parametrize(("compute", "tolerance"), [(jnp.float32, 1e-5), (jnp.bfloat16, 2e-2)], ids=["f32", "bf16"])
def test_precision(monkeypatch, geometry, compute, tolerance):
    monkeypatch.setattr(kfac._statistics.convolution, "PATCH_ELEMENTS", 2000)  # several chunks
    base = model((3, 3), transform=None, **geometry)

    def loss(hook, p, x, t):
        return base(hook, jax.tree.map(lambda leaf: leaf.astype(x.dtype), p), x, t)

    params = {"conv": {"w": normal(1, 3, 3, 4, 6, dtype=jnp.float32) / 6, "b": normal(2, 6, dtype=jnp.float32)}}
    batch = (normal(3, 8, 6, 6, 4, dtype=jnp.float32), normal(4, 8, 600, dtype=jnp.float32))
    _, _, factors = run(lambda p, x, t: plain(loss)(p, x.astype(compute), t), params, batch, rounding=tolerance / 5)
    layers = kfac.find_layers(lambda p, x, t: plain(loss)(p, x.astype(compute), t), params, *batch)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf), jnp.float64), (params, batch))
        reference = truth(loss, *wide)
    check_kronecker(layers, factors, reference, tolerance)
    assert factors["conv"].A.dtype == factors["conv"].G.dtype == jnp.float32


# -- groups of channels ------------------------------------------------------------------------------------------------


def grouped(groups, channels, features, *, stored="HWIO", bias=True, layout="NHWC", transform=None, **options):
    """Return a loss with a grouped convolution, a reference with a convolution per group, parameters and a batch."""
    numbers = (layout, stored, layout)

    def loss(p, x, t):
        kernel = p["conv"]["w"] if transform is None else transform(p["conv"]["w"])
        y = lax.conv_general_dilated(
            from_channels_last(x, layout), kernel, dimension_numbers=numbers, feature_group_count=groups, **options
        )
        if bias:
            y = y + p["conv"]["b"].reshape([-1 if letter == "C" else 1 for letter in layout])
        return finish(to_channels_last(y, layout), t)

    def finish(y, t):
        y = y.reshape(len(y), -1)
        return jnp.mean(jnp.sum(jnp.tanh(y) * t[:, : y.shape[1]], axis=1) + 0.5 * jnp.sum(jnp.sin(y), axis=1) ** 2)

    def reference(hook, p, x, t):
        kernel = p["conv"]["w"] if transform is None else transform(p["conv"]["w"])
        kernel = kernel.transpose([stored.index(letter) for letter in "HWIO"])
        strides = options["window_strides"]
        ones = (1, 1)
        lhs, rhs = options.get("lhs_dilation", ones), options.get("rhs_dilation", ones)
        pads = explicit_padding(options["padding"], x.shape[1:3], kernel.shape[:2], strides, rhs)
        outs = []
        for k in range(groups):
            own = x[..., k * channels : (k + 1) * channels]
            w = kernel[..., k * features : (k + 1) * features]
            y = lax.conv_general_dilated(own, w, dimension_numbers=("NHWC", "HWIO", "NHWC"), **options)
            if bias:
                y = y + p["conv"]["b"][k * features : (k + 1) * features]
            geometry = Geometry(kernel.shape[:2], strides, pads, lhs, rhs)
            name = "conv" if groups == 1 else f"conv[{k}]"
            outs.append(hook.layer(name, own, y, bias=bias, conv=geometry))
        return finish(jnp.concatenate(outs, axis=-1), t)

    sizes = {"H": 3, "W": 2, "I": channels, "O": groups * features}
    params = {"conv": {"w": normal(1, *(sizes[letter] for letter in stored))}}
    if bias:
        params["conv"]["b"] = normal(2, groups * features)
    return loss, reference, params, (normal(3, N, 5, 6, groups * channels), normal(4, N, 800))


GROUPED = [
    dict(groups=2, channels=2, features=3),
    dict(groups=3, channels=1, features=1),  # depthwise
    dict(groups=3, channels=1, features=2),  # depthwise with a multiplier
    dict(groups=3, channels=1, features=2, bias=False),
    dict(groups=2, channels=3, features=1, strides=(2, 3)),
    dict(groups=2, channels=2, features=2, padding=((2, 1), (0, 3)), rhs_dilation=(2, 1)),
    dict(groups=2, channels=2, features=2, padding=((2, 2), (1, 2)), lhs_dilation=(2, 3)),  # transposed
    dict(groups=2, channels=1, features=3, stored="HWIO", layout="NCHW"),
    dict(groups=1, channels=3, features=2),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", GROUPED, ids=name)
def test_groups_are_independent_copies(x64, case):
    case = dict(case)
    options = dict(window_strides=case.pop("strides", (1, 1)), padding=case.pop("padding", "SAME"))
    groups = case["groups"]
    loss, reference, params, batch = grouped(**case, **options)
    layers, factors = check_all(loss, params, batch, truth(reference, params, batch))
    layer = layers["conv"]
    assert (layer.kind, layer.copies, layer.stacked) == ("conv", groups, groups > 1)
    assert layer.d_in == 6 * case["channels"] + case.get("bias", True) and layer.d_out == case["features"]
    if groups > 1:
        assert factors["conv"].A.shape == (groups, layer.d_in, layer.d_in)


@pytest.mark.parametrize("elements", [1, 200])
def test_groups_in_chunks_of_the_batch(x64, monkeypatch, elements):
    monkeypatch.setattr(kfac._statistics.convolution, "PATCH_ELEMENTS", elements)
    loss, reference, params, batch = grouped(2, 2, 3, window_strides=(1, 2), padding="SAME")
    check_all(loss, params, batch, truth(reference, params, batch))


@pytest.mark.parametrize("stored", ["OIHW", "IHWO"])
def test_groups_of_a_kernel_in_another_layout(x64, stored):
    loss, reference, params, batch = grouped(2, 2, 3, stored=stored, window_strides=(1, 1), padding="VALID")
    expected = truth(reference, params, batch)
    for uses in expected.uses.values():
        for use in uses:
            use.a = in_memory_order(use.a, (3, 2), 2, stored)
    check_all(loss, params, batch, expected)


def test_groups_that_are_an_axis_of_the_parameter(x64):
    """Stack the groups' kernels on a leading axis, and merge them for the convolution."""
    merge = lambda w: w.transpose(1, 2, 3, 0, 4).reshape(3, 2, 2, 6)  # noqa: E731
    loss, reference, params, batch = grouped(2, 2, 3, transform=merge, window_strides=(1, 1), padding="SAME")
    params["conv"]["w"] = normal(1, 2, 3, 2, 2, 3)
    layers, _ = check_all(loss, params, batch, truth(reference, params, batch))
    assert layers["conv"].copies == 2


def test_convolutions_under_vmap_with_a_kernel_and_an_image_each(x64):
    def loss(p, x, t):
        def one(w, image):
            return lax.conv_general_dilated(image, w, (1, 1), "SAME", dimension_numbers=LAYOUTS[2])

        y = jax.vmap(one, in_axes=(0, 3), out_axes=3)(p["conv"]["w"], x.reshape(len(x), 5, 6, 2, 2))
        y = y.reshape(len(y), -1)
        return jnp.mean(jnp.sum(jnp.tanh(y) * t[:, : y.shape[1]], axis=1) + 0.5 * jnp.sum(jnp.sin(y), axis=1) ** 2)

    merge = lambda w: w.transpose(1, 2, 3, 0, 4).reshape(3, 2, 2, 6)  # noqa: E731
    _, reference, params, batch = grouped(2, 2, 3, bias=False, transform=merge, window_strides=(1, 1), padding="SAME")
    params["conv"]["w"] = normal(1, 2, 3, 2, 2, 3)
    layers, _ = check_all(loss, params, batch, truth(reference, params, batch))
    assert layers["conv"].copies == 2


@pytest.mark.parametrize("axis", [1, 3])
def test_a_bias_of_groups_under_vmap_over_single_images(x64, axis):
    """Check an output whose axes of groups and outputs are joined before the bias is added."""
    _, reference, params, batch = grouped(2, 2, 3, window_strides=(1, 1), padding="SAME")
    params["conv"]["b"] = params["conv"]["b"].reshape((6, 1, 1) if axis == 1 else (6,))

    def single(p, x, t):
        def one(image):
            y = lax.conv_general_dilated(
                image[None], p["conv"]["w"], (1, 1), "SAME", dimension_numbers=LAYOUTS[2], feature_group_count=2
            )
            return jnp.moveaxis(y[0], 2, 0) + p["conv"]["b"] if axis == 1 else y[0] + p["conv"]["b"]

        y = jax.vmap(one)(x)
        y = (jnp.moveaxis(y, 1, 3) if axis == 1 else y).reshape(len(x), -1)
        return jnp.mean(jnp.sum(jnp.tanh(y) * t[:, : y.shape[1]], axis=1) + 0.5 * jnp.sum(jnp.sin(y), axis=1) ** 2)

    flat = {"conv": {"w": params["conv"]["w"], "b": params["conv"]["b"].reshape(-1)}}
    layers, _ = check_all(single, params, batch, truth(reference, flat, batch))
    assert layers["conv"].has_bias and layers["conv"].copies == 2


@pytest.mark.parametrize("shape", [(3, 2), (2, 3), (6,)], ids=str)
def test_a_bias_added_in_another_form(x64, shape):
    """Add a bias after the six outputs, in two groups of three, are reshaped.

    A bias that is not split along the groups gets a block of its own.
    """
    _, reference, params, batch = grouped(2, 2, 3, window_strides=(1, 1), padding="SAME")
    params["conv"]["b"] = params["conv"]["b"].reshape(shape)

    def loss(p, x, t):
        y = lax.conv_general_dilated(
            x, p["conv"]["w"], (1, 1), "SAME", dimension_numbers=LAYOUTS[2], feature_group_count=2
        )
        y = (y.reshape(*y.shape[:3], *shape) + p["conv"]["b"]).reshape(len(x), -1)
        return jnp.mean(jnp.sum(jnp.tanh(y) * t[:, : y.shape[1]], axis=1) + 0.5 * jnp.sum(jnp.sin(y), axis=1) ** 2)

    flat = {"conv": {"w": params["conv"]["w"], "b": params["conv"]["b"].reshape(-1)}}
    known = truth(reference, flat, batch)
    layers, _, factors = run(loss, params, batch)
    joined = shape != (3, 2)
    assert [layer.kind for layer in layers] == (["conv"] if joined else ["diagonal", "conv"])
    for k in range(2):
        a, g = known.kronecker(f"conv[{k}]")
        block = factors["conv" if joined else "conv/w"]
        np.testing.assert_allclose(block.A[k], a if joined else a[:-1, :-1], rtol=1e-9)
        np.testing.assert_allclose(block.G[k], g, rtol=1e-9)


def check_own_factors(loss, params, x, reason):
    """Check that the kernel has gradient factors, and that `strict` refuses it by name."""
    layers = kfac.find_layers(loss, params, x)
    (path,) = layers.paths
    assert layers[0].kind == "gradient-factors"
    with pytest.raises(kfac.UnsupportedLayerError, match=rf"'{path}' is read by conv_general_dilated.*: {reason}"):
        kfac.find_layers(loss, params, x, strict=True)
    assert kfac.find_layers(loss, params, x, strict=True, rules={f"^{path}$": "skip"})[0].kind == "skipped"


def test_groups_that_cut_across_the_parameter_have_the_gradients_own_factors():
    def loss(p, x):
        w = p["w"].transpose(1, 2, 3, 0, 4).reshape(3, 2, 2, 6)  # output channels in three parts of two
        return jnp.mean(
            lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=LAYOUTS[2], feature_group_count=2)
        )

    params, x = {"w": jnp.zeros((3, 3, 2, 2, 2))}, jnp.zeros((N, 5, 5, 4))
    check_own_factors(loss, params, x, "feature_group_count=2 cuts across")


@pytest.mark.parametrize("framework", ["linen", "nnx"])
def test_groups_in_flax(x64, framework):
    options = dict(feature_group_count=2, param_dtype=jnp.float64)
    _, reference, params, batch = grouped(2, 2, 3, window_strides=(2, 1), padding="SAME")
    graph, state, rest = nnx.split(nnx.Conv(4, 6, (3, 2), (2, 1), rngs=nnx.Rngs(0), **options), nnx.Param, ...)

    def flax_loss(p, x, t):
        if framework == "linen":
            y = nn.Conv(6, (3, 2), (2, 1), **options).apply({"params": p}, x)
        else:
            y = nnx.merge(graph, p, rest)(x)
        y = y.reshape(len(y), -1)
        return jnp.mean(jnp.sum(jnp.tanh(y) * t[:, : y.shape[1]], axis=1) + 0.5 * jnp.sum(jnp.sin(y), axis=1) ** 2)

    own = {"kernel": params["conv"]["w"], "bias": params["conv"]["b"]}
    if framework == "nnx":
        own = jax.tree_util.tree_map_with_path(lambda path, _: own[path[0].key], state)
    layers, _, factors = run(flax_loss, own, batch)
    expected = truth(reference, params, batch)
    (layer,) = layers
    for k in range(2):
        for factor, value in zip("AG", expected.kronecker(f"conv[{k}]"), strict=True):
            np.testing.assert_allclose(getattr(factors[layer.name], factor)[k], value, rtol=1e-8, atol=1e-10)


# -- transposed convolutions -------------------------------------------------------------------------------------------


# The frameworks call `lax.conv_transpose`, so each has two of its four cases by default.
@pytest.mark.parametrize(
    ("spelling", "strides", "padding"),
    [
        *(("lax", strides, padding) for strides in ((2, 2), (3, 1)) for padding in ("SAME", "VALID")),
        ("linen", (2, 2), "SAME"),
        ("linen", (3, 1), "VALID"),
        slow("linen", (2, 2), "VALID"),
        slow("linen", (3, 1), "SAME"),
        ("nnx", (2, 2), "VALID"),
        ("nnx", (3, 1), "SAME"),
        slow("nnx", (2, 2), "SAME"),
        slow("nnx", (3, 1), "VALID"),
    ],
)
def test_transposed_convolutions(x64, spelling, strides, padding):
    """Check transposed convolutions, as in image generators. Rows beyond the dilated image's border count as zeros."""
    window = (4, 3)
    options = dict(strides=strides, padding=padding, param_dtype=jnp.float64)
    graph, state, rest = nnx.split(nnx.ConvTranspose(2, 3, window, rngs=nnx.Rngs(0), **options), nnx.Param, ...)

    def transposed(p, x):
        if spelling == "lax":
            y = lax.conv_transpose(x, p["conv"]["w"], strides, padding, dimension_numbers=LAYOUTS[2])
            return y + p["conv"]["b"]
        own = {"kernel": p["conv"]["w"], "bias": p["conv"]["b"]}
        if spelling == "linen":
            return nn.ConvTranspose(3, window, **options).apply({"params": own}, x)
        own = jax.tree_util.tree_map_with_path(lambda path, _: own[path[0].key], state)
        return nnx.merge(graph, own, rest)(x)

    def pair(k, s):
        """Return the padding of the dilated image for outputs of size `s size`, or else of size `s (size - 1) + k`."""
        if padding == "SAME":
            total = k + s - 2
            first = k - 1 if s > k - 1 else -(-total // 2)
        else:
            total = k + s - 2 + max(k - s, 0)
            first = k - 1
        return first, total - first

    def reference(hook, p, x, t):
        geometry = Geometry(window, (1, 1), tuple(map(pair, window, strides)), strides, (1, 1))
        y = hook.layer("conv", x, transposed(p, x), bias=True, conv=geometry).reshape(len(x), -1)
        return jnp.mean(jnp.sum(jnp.tanh(y) * t[:, : y.shape[1]], axis=1))

    params = {"conv": {"w": normal(1, *window, 2, 3), "b": normal(2, 3)}}
    batch = (normal(3, N, 3, 4, 2), normal(4, N, 600))
    layers, _ = check_all(plain(reference), params, batch, truth(reference, params, batch))
    assert kinds(layers) == {"conv": "conv"}


# -- no exact rows -----------------------------------------------------------------------------------------------------


def test_groups_of_examples_have_the_gradients_own_factors():
    def loss(p, x):
        kernel, options = p["conv"]["kernel"], dict(dimension_numbers=LAYOUTS[2], batch_group_count=2)
        return jnp.mean(lax.conv_general_dilated(x, kernel, (1, 1), "SAME", **options))

    params, x = {"conv": {"kernel": jnp.zeros((3, 3, 2, 4))}}, jnp.zeros((4, 5, 5, 2))
    check_own_factors(loss, params, x, "batch_group_count=2 is not supported")


def test_a_learned_image_has_the_gradients_own_factors():
    def loss(p, x):
        y = lax.conv_general_dilated(p["image"], x, (1, 1), "SAME", dimension_numbers=LAYOUTS[2])
        return jnp.mean(y)

    check_own_factors(loss, {"image": jnp.zeros((4, 5, 5, 2))}, jnp.zeros((3, 3, 2, 3)), "it is the image")
