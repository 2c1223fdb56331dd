"""Convolutional networks."""

from __future__ import annotations

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
from jax import lax

from zoo.specimens import cross_entropy, data, equinox, haiku, linen, specimen, tokens, tree

DIMENSIONS = ("NHWC", "HWIO", "NHWC")


def images(size=4, channels=2):
    return {"x": data(0, size, size, channels), "y": tokens(0, below=3)}


def convolve(x, w, strides=(1, 1), padding="SAME", groups=1):
    return lax.conv_general_dilated(x, w, strides, padding, dimension_numbers=DIMENSIONS, feature_group_count=groups)


class ResNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.BatchNorm(use_running_average=False)(nn.Conv(4, (3, 3), use_bias=False)(x)))
        h = nn.relu(nn.BatchNorm(use_running_average=False)(nn.Conv(5, (3, 3), (2, 2), use_bias=False)(x)))
        h = nn.BatchNorm(use_running_average=False)(nn.Conv(5, (3, 3), use_bias=False)(h))
        x = nn.relu(h + nn.Conv(5, (1, 1), (2, 2), use_bias=False)(x))
        return nn.Dense(3)(jnp.mean(x, (1, 2)))


@specimen(
    "ResNet in linen", "`nn.BatchNorm` in training, strided convolutions and a projection shortcut", interacting=True
)
def resnet():
    return linen(ResNet(), images(), cross_entropy)


class ConvNeXt(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.LayerNorm()(nn.Conv(4, (2, 2), (2, 2))(x))
        h = nn.LayerNorm()(nn.Conv(4, (3, 3), feature_group_count=4)(x))
        h = nn.Dense(4)(nn.gelu(nn.Dense(9)(h)))
        x = x + h * self.param("gamma", nn.initializers.constant(1e-2), (4,))
        return nn.Dense(3)(nn.LayerNorm()(jnp.mean(x, (1, 2))))


@specimen("ConvNeXt in linen", "depthwise convolution, dense layers on images, a layer scale")
def convnext():
    return linen(ConvNeXt(), images(6), cross_entropy)


@specimen("MobileNet in haiku", "`hk.DepthwiseConv2D`, squeeze and excitation")
def mobilenet():
    def network(x):
        x = jax.nn.silu(hk.Conv2D(6, 1)(x))
        x = jax.nn.silu(hk.DepthwiseConv2D(1, 3, stride=2)(x))
        gate = jax.nn.sigmoid(hk.Linear(6)(jax.nn.silu(hk.Linear(3)(jnp.mean(x, (1, 2))))))
        x = hk.Conv2D(5, 1, with_bias=False)(x * gate[:, None, None])
        return hk.Linear(3)(jnp.mean(x, (1, 2)))

    return haiku(network, images(), cross_entropy)


class UNet(eqx.Module):
    down: eqx.nn.Conv2d
    middle: eqx.nn.Conv2d
    up: eqx.nn.ConvTranspose2d
    norm: eqx.nn.GroupNorm
    last: eqx.nn.Conv2d

    def __init__(self, key):
        self.down = eqx.nn.Conv2d(2, 4, 3, padding=1, key=key)
        self.middle = eqx.nn.Conv2d(4, 6, 3, padding=1, key=key)
        self.up = eqx.nn.ConvTranspose2d(6, 4, 2, stride=2, key=key)
        self.norm = eqx.nn.GroupNorm(2, 4)
        self.last = eqx.nn.Conv2d(8, 3, 1, key=key)

    def __call__(self, x):
        skip = jax.nn.relu(self.down(x))
        h = jax.nn.relu(self.middle(eqx.nn.AvgPool2d(2, 2)(skip)))
        return self.last(jnp.concatenate([skip, self.norm(self.up(h))]))


@specimen("U-Net in equinox", "`eqx.nn.ConvTranspose2d`, skip connections, group norm, under `jax.vmap`")
def unet():
    def criterion(z, y):
        return cross_entropy(jnp.moveaxis(z, 1, -1), y)

    return equinox(UNet, {"x": data(0, 2, 4, 4), "y": tokens(0, 4, 4, below=3)}, criterion)


class Generator(nn.Module):
    @nn.compact
    def __call__(self, z):
        x = nn.Dense(2 * 2 * 5)(z).reshape(-1, 2, 2, 5)
        x = nn.relu(nn.BatchNorm(use_running_average=False)(x))
        return jnp.tanh(nn.ConvTranspose(2, (3, 3), (2, 2))(x))


def discriminator(p, x):
    h = nn.leaky_relu(convolve(x, p["c1"], (2, 2)) + p["b1"])
    return h.reshape(len(h), -1) @ p["w"] + p["b2"]


JUDGE = {"c1": (3, 3, 2, 4), "b1": (4,), "w": (16, 1), "b2": (1,)}


@specimen(
    "DCGAN, generator",
    "`nn.ConvTranspose` and batch norm, through a discriminator that the loss closes over",
    interacting=True,
)
def generator():
    judge = tree(9, **JUDGE)
    batch = {"x": data(0, 3), "y": data(1, 1)}
    return linen(Generator(), batch, lambda x, y: jnp.mean(jax.nn.softplus(-discriminator(judge, x)) + 0 * y))


@specimen("DCGAN, discriminator", "one network on real and on generated images: two uses of each kernel")
def judge():
    def loss(p, b):
        real, fake = discriminator(p, b["x"]), discriminator(p, lax.stop_gradient(b["fake"]))
        return jnp.mean(jax.nn.softplus(-real)) + jnp.mean(jax.nn.softplus(fake))

    return loss, tree(**JUDGE), images() | {"fake": data(3, 4, 4, 2)}


@specimen("Siamese network", "one encoder of both images of a pair, the distance of its results")
def siamese():
    def loss(p, b):
        def encode(x):
            h = jax.nn.relu(convolve(x, p["c"], (2, 2)) + p["b"])
            return h.reshape(len(h), -1) @ p["w"]

        d = jnp.sqrt(jnp.sum((encode(b["x"]) - encode(b["other"])) ** 2, -1) + 1e-3)
        return jnp.mean(jnp.where(b["y"] == 0, d**2, jnp.maximum(3.0 - d, 0) ** 2))

    return loss, tree(c=(3, 3, 2, 4), b=(4,), w=(16, 3)), images() | {"other": data(3, 4, 4, 2)}


def contrast(z1, z2):
    z1, z2 = (z / jnp.linalg.norm(z, axis=-1, keepdims=True) for z in (z1, z2))
    scores = z1 @ z2.T / 0.5
    labels = jnp.arange(len(z1))
    return 0.5 * (cross_entropy(scores, labels) + cross_entropy(scores.T, labels))


@specimen(
    "SimCLR", "two views one after the other through one encoder, each example against all others", interacting=True
)
def simclr():
    def loss(p, b):
        z1, z2 = (jax.nn.relu(b[view] @ p["w1"] + p["b1"]) @ p["w2"] for view in ("x", "view"))
        return contrast(z1, z2)

    return loss, tree(w1=(5, 8), b1=(8,), w2=(8, 3)), {"x": data(0, 5), "view": data(1, 5)}


@specimen(
    "SimCLR on concatenated views",
    "both views in one batch of twice the size",
    interacting=True,
)
def simclr_concatenated():
    def loss(p, b):
        x = jnp.concatenate([b["x"], b["view"]])
        z1, z2 = jnp.split(jax.nn.relu(x @ p["w1"] + p["b1"]) @ p["w2"], 2)
        return contrast(z1, z2)

    return loss, tree(w1=(5, 8), b1=(8,), w2=(8, 3)), {"x": data(0, 5), "view": data(1, 5)}


class Autoencoder(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.Dense(2)(nn.relu(nn.Conv(4, (3, 3), (2, 2))(x)).reshape(x.shape[0], -1))
        return nn.ConvTranspose(2, (2, 2), (2, 2))(nn.relu(nn.Dense(12)(h)).reshape(-1, 2, 2, 3))


@specimen("convolutional autoencoder", "`nn.ConvTranspose` in linen, squared error")
def autoencoder():
    return linen(Autoencoder(), {"x": data(0, 4, 4, 2), "y": data(1, 4, 4, 2)}, lambda z, y: jnp.mean((z - y) ** 2))


@specimen("autoencoder with tied kernels", "`w` there and `w.T` back")
def tied():
    def loss(p, b):
        return jnp.mean(jnp.sum((jnp.tanh(b["x"] @ p["w"] + p["b"]) @ p["w"].T + p["c"] - b["x"]) ** 2, -1))

    return loss, tree(w=(5, 3), b=(3,), c=(5,)), {"x": data(0, 5)}


class Wrapped(nn.Module):
    wrap: type

    @nn.compact
    def __call__(self, x):
        if self.wrap is nn.SpectralNorm:
            return self.wrap(nn.Dense(3))(x, update_stats=True)
        return self.wrap(nn.Dense(3))(x)


@specimen("weight norm", "`nn.WeightNorm` of a dense layer", gradient=("Dense_0/kernel", "WeightNorm_0/Dense_0/kernel"))
def weight_norm():
    return linen(Wrapped(nn.WeightNorm), {"x": data(0, 5), "y": tokens(0, below=3)}, cross_entropy)


@specimen("spectral norm", "`nn.SpectralNorm` of a dense layer", gradient=("Dense_0/kernel",))
def spectral_norm():
    return linen(Wrapped(nn.SpectralNorm), {"x": data(0, 5), "y": tokens(0, below=3)}, cross_entropy)


@specimen("standardised convolution", "kernels less their mean before they are used", gradient=("w",))
def standardised():
    def loss(p, b):
        w = p["w"] - jnp.mean(p["w"], (0, 1, 2))
        return cross_entropy(jnp.mean(jax.nn.relu(convolve(b["x"], w)), (1, 2)) @ p["head"], b["y"])

    return loss, tree(w=(3, 3, 2, 4), head=(4, 3)), images()


@specimen(
    "WaveNet in haiku",
    "dilated causal `hk.Conv1D`, gated by one another; the last residual is not used",
    unreached=("conv1_d_8/b", "conv1_d_8/w"),
)
def wavenet():
    def network(x):
        x, skips = hk.Conv1D(4, 1)(x), 0
        for rate in (1, 2):
            gate = hk.Conv1D(4, 2, rate=rate, padding=hk.pad.causal)(x)
            h = jnp.tanh(hk.Conv1D(4, 2, rate=rate, padding=hk.pad.causal)(x)) * jax.nn.sigmoid(gate)
            skips = skips + hk.Conv1D(5, 1)(h)
            x = x + hk.Conv1D(4, 1)(h)
        return hk.Conv1D(3, 1)(jax.nn.relu(skips))

    return haiku(network, {"x": data(0, 5, 2), "y": tokens(0, 5, below=3)}, cross_entropy)


@specimen("global response norm", "channels divided by their norms over the image, an ensemble of heads by `einsum`")
def ensemble_of_heads():
    def loss(p, b):
        x = convolve(b["x"], p["c"])
        norm = jnp.sqrt(jnp.sum(x**2, (1, 2), keepdims=True))
        x = x + (x * norm / (jnp.mean(norm, -1, keepdims=True) + 1e-3)) * p["gamma"] + p["beta"]
        z = jnp.einsum("nd,mdk->nmk", jnp.mean(x, (1, 2)), p["heads"]) + p["bias"]
        return cross_entropy(z, jnp.stack([b["y"]] * 2, 1))

    return loss, tree(c=(3, 3, 2, 4), gamma=(4,), beta=(4,), heads=(2, 4, 3), bias=(2, 3)), images()
