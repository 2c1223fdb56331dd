"""Test factors against an oracle that reads the gradient's program, and shares no idea with the package."""

import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kfac
from checking import normal
from gradient_oracle import factors as truth

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path[:0] = [str(EXAMPLES / "imagenet"), str(EXAMPLES / "language_model")]


def check(loss_fn, params, *args, rtol, rules=None):
    """Compare all Kronecker layers, each of which the oracle must cover."""
    layers = kfac.find_layers(loss_fn, params, *args, max_factor_dim=8192, rules=rules)
    _, _, found = jax.jit(kfac.value_and_grad(loss_fn, layers))(params, *args)
    by_kernel = {layer.params[0]: layer for layer in layers if layer.kind in ("dense", "conv", "embedding")}
    with_bias = [kernel for kernel, layer in by_kernel.items() if layer.has_bias]
    compared = set()
    for kernel, expected in truth(loss_fn, params, *args, num_examples=len(args[0]), with_bias=with_bias):
        if kernel not in by_kernel:
            continue
        for side in "AG":
            actual, exact = np.asarray(getattr(found[by_kernel[kernel].name], side)), getattr(expected, side)
            assert actual.shape == exact.shape, (kernel, side)
            assert np.linalg.norm(actual - exact) < rtol * np.linalg.norm(exact), (kernel, side)
        compared.add(kernel)
    assert compared == by_kernel.keys()


def test_a_network_of_each_kind(x64):
    """Check a convolution with stride and dilation, a dense layer with a bias, a table, and a kernel with two uses."""
    params = {
        "conv": {"kernel": normal(1, 3, 2, 3, 5), "bias": normal(2, 5)},
        "dense": {"kernel": normal(3, 5, 4), "bias": normal(4, 4)},
        "heads": normal(5, 4, 2, 3),
        "back": normal(6, 2, 3, 4),
        "table": normal(7, 7, 4),
        "twice": normal(8, 4, 4),
    }

    def loss_fn(params, images, tokens):
        dims = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(
            images, params["conv"]["kernel"], (2, 1), ((1, 2), (0, 1)), rhs_dilation=(2, 1), dimension_numbers=dims
        )
        x = jnp.tanh(x + params["conv"]["bias"]).mean((1, 2))
        x = jnp.tanh(x @ params["dense"]["kernel"] + params["dense"]["bias"])
        y = x[:, None] + params["table"][tokens]
        y = jnp.tanh(jnp.tanh(y @ params["twice"]) @ params["twice"])
        y = jnp.einsum("nthk,hkd->ntd", jnp.tanh(jnp.einsum("ntd,dhk->nthk", y, params["heads"])), params["back"])
        return jnp.mean(jnp.sum(y**2, (1, 2)))

    tokens = jax.random.randint(jax.random.key(0), (6, 3), 0, 7)
    check(loss_fn, params, normal(9, 6, 8, 7, 3), tokens, rtol=1e-9)


def test_transposed_and_dilated_convolutions(x64):
    params = {"up": normal(10, 3, 3, 4, 2), "first": normal(11, 4, 2, 3)}

    def loss_fn(params, images):
        x = jax.lax.conv_transpose(images, params["up"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = jnp.tanh(x).mean(1)
        x = jax.lax.conv_general_dilated(
            x, params["first"].transpose(2, 1, 0), (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
        )
        return jnp.mean(jnp.sum(x**2, (1, 2)))

    check(loss_fn, params, normal(12, 5, 4, 6, 4), rtol=1e-9)


# The test has two parts, because a ResNet-50's factors take 1.2 GB in float64.
@pytest.mark.slow
@pytest.mark.parametrize("skip", ["^stage3", "^(?!stage3)"], ids=["begin", "end"])
def test_resnet_50(skip, x64):
    from models import ResNet

    model = ResNet((3, 4, 6, 3), num_classes=1000, bottleneck=True, init_scheme="he", dtype=jnp.float64)
    images = jax.random.normal(jax.random.key(0), (4, 64, 64, 3), jnp.float64)
    labels = jnp.arange(4)
    variables = jax.jit(functools.partial(model.init, train=True))(jax.random.key(1), images)

    def loss_fn(params, images, labels):
        logits, _ = model.apply(variables | {"params": params}, images, True, mutable=["batch_stats"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    check(loss_fn, variables["params"], images, labels, rtol=1e-9, rules={skip: "skip"})


@pytest.mark.slow
def test_gpt():
    from decoder import Decoder

    model = Decoder(vocabulary=512, width=768, blocks=4)
    tokens = jax.random.randint(jax.random.key(0), (4, 129), 0, 512)
    params = jax.jit(model.init)(jax.random.key(1), tokens[:, :-1])

    def loss_fn(params, tokens):
        logits = model.apply(params, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    check(loss_fn, params, tokens, rtol=1e-3)
