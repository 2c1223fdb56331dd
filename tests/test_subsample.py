"""Statistics from every k-th example: those of the smaller batch, exactly; gradients of the whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import kfac
from checking import FAST, normal


def params():
    return {
        "conv": {"w": normal(0, 3, 3, 2, 4), "b": normal(1, 4)},
        "down": {"w": normal(2, 3, 3, 4, 3)},
        "norm": {"scale": normal(3, 3), "shift": normal(4, 3)},
        "stack": {"w": normal(5, 2, 3, 3), "b": normal(6, 2, 3)},
        "out": {"w": normal(7, 3, 5)},
    }


def conv(x, w, stride):
    return lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def loss_fn(p, x, t):
    y = jnp.tanh(conv(x, p["conv"]["w"], 1) + p["conv"]["b"])
    y = conv(y, p["down"]["w"], 2)
    y = jnp.tanh(y * p["norm"]["scale"] + p["norm"]["shift"])
    y = y.reshape(len(x), -1, 3)  # positions that share the dense layers
    y, _ = lax.scan(lambda y, layer: (jnp.tanh(y @ layer["w"] + layer["b"]), None), y, p["stack"])
    return jnp.mean(jnp.sum(jnp.tanh(y @ p["out"]["w"]) * t[:, None], axis=(1, 2)))


def batch(n):
    return normal(10, n, 6, 5, 2), normal(11, n, 5)


def factors_and_grads(n, data=None, **options):
    data = batch(n) if data is None else data
    layers = kfac.find_layers(loss_fn, params(), *data)
    _, grads, factors = jax.jit(kfac.value_and_grad(loss_fn, layers, **options), compiler_options=FAST)(params(), *data)
    return layers, factors, grads


@pytest.mark.parametrize("n, every", [(8, 4), (4, 4), (7, 3)])
def test_kronecker_factors_are_those_of_the_examples_taken(x64, n, every):
    layers, found, grads = factors_and_grads(n, subsample=every)
    _, expected, _ = factors_and_grads(n, [x[::every] for x in batch(n)])
    _, whole, gradients = factors_and_grads(n)
    for layer in layers:
        reference = expected if layer.kind in ("dense", "conv") else whole
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14),
            found[layer.name],
            reference[layer.name],
        )
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), grads, gradients)


def test_the_mean_over_all_choices_is_the_whole(x64):
    """Unbiased: each example is in one of the `k` subsets."""
    n, every = 4, 2
    parts = [factors_and_grads(n, [np.roll(x, -k, axis=0) for x in batch(n)], subsample=every)[1] for k in range(every)]
    _, whole, _ = factors_and_grads(n)
    mean = jax.tree.map(lambda *leaves: sum(leaves) / every, *parts)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14), mean, whole)


def test_each_microbatch_takes_its_own(x64):
    data = batch(8)
    layers = kfac.find_layers(loss_fn, params(), *data)
    fn = kfac.microbatch(kfac.value_and_grad(loss_fn, layers, subsample=2), 2, batch_argnums=(1, 2))
    _, _, found = jax.jit(fn, compiler_options=FAST)(params(), *data)
    _, expected, _ = factors_and_grads(8, [x[::2] for x in data])
    for layer in layers:
        if layer.kind in ("dense", "conv"):
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14),
                found[layer.name], expected[layer.name],
            )  # fmt: skip


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "2"])
def test_what_is_no_positive_int_is_refused(x64, value):
    layers = kfac.find_layers(loss_fn, params(), *batch(2))
    with pytest.raises(ValueError, match="subsample must be a positive int"):
        kfac.value_and_grad(loss_fn, layers, subsample=value)


def test_more_than_the_batch_is_refused(x64):
    with pytest.raises(ValueError, match=r"subsample=5, but layer 'conv' sees 4 example\(s\) at a time"):
        factors_and_grads(4, subsample=5)
