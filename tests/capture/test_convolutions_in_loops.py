"""On CPUs a micro-batch's convolutions have the layout XLA has fast code for, and the same values.

Tests the inside of `_capture`: what XLA makes of a loop is no result of a public function.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import kfac
from kfac._capture.convolutions_in_loops import fast_in_loops

RNG = np.random.default_rng(0)


def array(*shape):
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


GEOMETRIES = {
    "NHWC": (("NHWC", "HWIO", "NHWC"), (4, 7, 6, 3), (3, 2, 3, 5), {}),
    "NCHW": (("NCHW", "OIHW", "NCHW"), (4, 3, 7, 6), (5, 3, 3, 3), {}),
    "stride": (("NHWC", "HWIO", "NHWC"), (4, 7, 6, 3), (3, 3, 3, 5), {"window_strides": (2, 3)}),
    "dilations": (
        ("NHWC", "HWIO", "NHWC"),
        (4, 7, 6, 3),
        (2, 3, 3, 5),
        {"lhs_dilation": (2, 1), "rhs_dilation": (1, 2)},
    ),
    "groups": (("NHWC", "HWIO", "NHWC"), (4, 5, 5, 4), (3, 3, 2, 6), {"feature_group_count": 2}),
    "kernel larger than the image": (("NHWC", "HWIO", "NHWC"), (4, 2, 1, 3), (3, 3, 3, 5), {"window_strides": (2, 1)}),
    "one dimension": (("NWC", "WIO", "NWC"), (4, 9, 3), (3, 3, 5), {}),
    "three dimensions": (("NCDHW", "OIDHW", "NCDHW"), (2, 3, 4, 5, 4), (4, 3, 2, 3, 2), {}),
}


def loss_of(geometry):
    numbers, image, kernel, options = GEOMETRIES[geometry]
    strides = options.get("window_strides", (1,) * (len(image) - 2))
    options = {key: value for key, value in options.items() if key != "window_strides"}

    def loss(kernel, image):
        padding = ((1, 1),) * (len(image.shape) - 2)
        out = lax.conv_general_dilated(image, kernel, strides, padding, dimension_numbers=numbers, **options)
        return jnp.mean(jnp.sin(out))

    return loss, array(*kernel), array(*image)


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_gradients_are_the_same(geometry):
    loss, kernel, image = loss_of(geometry)
    gradient = jax.grad(loss, argnums=(0, 1))
    expected = gradient(kernel, image)
    found = jax.jit(fast_in_loops(gradient))(kernel, image)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("geometry", ["NCHW", "kernel larger than the image"])
def test_every_convolution_in_the_loop_has_the_fast_layout(geometry):
    loss, kernel, image = loss_of(geometry)

    def inner(x):
        numbers = GEOMETRIES[geometry][0]
        square = kernel[:3] if geometry == "NCHW" else kernel[..., :3]
        return lax.conv_general_dilated(x, square, (1, 1), "SAME", dimension_numbers=numbers)

    def two_layers(kernel, image):  # within a function that is jitted and a scan of its own
        def body(x, _):
            return jax.jit(inner)(x), None

        return loss(kernel, lax.scan(body, image, length=2)[0])

    layers = kfac.find_layers(loss, kernel, image)
    for fn in (jax.value_and_grad(two_layers), kfac.value_and_grad(loss, layers)):
        text = jax.jit(kfac.microbatch(fn, 2)).lower(kernel, image).compile().as_text()
        found = set(re.findall(r"convolution\(.*dim_labels=(\S+?)[,\s]", text))
        assert found == {"b01f_01io->b01f"}


def test_microbatch_of_convolutions_is_the_mean_of_its_parts():
    loss, kernel, image = loss_of("dilations")
    layers = kfac.find_layers(loss, kernel, image)
    fn = kfac.value_and_grad(loss, layers)
    found = jax.jit(kfac.microbatch(fn, 2))(kernel, image)
    parts = [fn(kernel, part) for part in jnp.split(image, 2)]
    expected = jax.tree.map(lambda a, b: (a + b) / 2, *parts)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)
