"""Density models: variational autoencoders, flows, diffusion and energies."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zoo.specimens import cross_entropy, data, linen, specimen, tokens, tree

D = 5


def mlp(p, x):
    return jnp.tanh(x @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"]


def layers(d_in, hidden, d_out):
    return {"w1": (d_in, hidden), "b1": (hidden,), "w2": (hidden, d_out), "b2": (d_out,)}


class Vae(nn.Module):
    @nn.compact
    def __call__(self, x):
        x, noise = x[..., :D], x[..., D:]
        h = nn.relu(nn.Dense(8)(x))
        mean, log_variance = nn.Dense(3, name="mean")(h), nn.Dense(3, name="log_variance")(h)
        z = mean + jnp.exp(0.5 * log_variance) * noise
        return nn.Dense(D)(nn.relu(nn.Dense(8)(z))), mean, log_variance


@specimen("VAE in linen", "two heads, reparameterised noise, a divergence beside the reconstruction")
def vae():
    def criterion(out, y):
        logits, mean, log_variance = out
        divergence = -0.5 * jnp.sum(1 + log_variance - mean**2 - jnp.exp(log_variance), -1)
        return jnp.mean(jnp.sum((logits - y) ** 2, -1) + divergence)

    return linen(Vae(), {"x": data(0, D + 3), "y": data(1, D)}, criterion)


@specimen("VQ-VAE", "nearest row of a codebook by its products with the codes, then looked up", gradient=("book",))
def vq():
    def loss(p, b):
        z = b["x"] @ p["in"]
        distance = jnp.sum(z**2, -1, keepdims=True) - 2 * z @ p["book"].T + jnp.sum(p["book"] ** 2, -1)
        soft = jax.nn.softmax(-distance)
        code = p["book"][jnp.argmin(distance, -1)]
        out = (z + lax.stop_gradient(code - z)) @ p["out"]
        entropy = -jnp.sum(soft * jnp.log(soft), -1)
        return jnp.mean(jnp.sum((out - b["x"]) ** 2, -1) + jnp.sum((lax.stop_gradient(z) - code) ** 2, -1) + entropy)

    return loss, tree(**{"in": (D, 3), "book": (7, 3), "out": (3, D)}), {"x": data(0, D)}


@specimen("VQ-VAE with a straight-through gradient", "the codebook is looked up; its distances carry no gradient")
def vq_straight():
    def loss(p, b):
        z = b["x"] @ p["in"]
        distance = jnp.sum(z**2, -1, keepdims=True) - 2 * z @ p["book"].T + jnp.sum(p["book"] ** 2, -1)
        code = p["book"][jnp.argmin(distance, -1)]
        out = (z + lax.stop_gradient(code - z)) @ p["out"]
        commitment = jnp.sum((z - lax.stop_gradient(code)) ** 2, -1) + jnp.sum((lax.stop_gradient(z) - code) ** 2, -1)
        return jnp.mean(jnp.sum((out - b["x"]) ** 2, -1) + commitment)

    return loss, tree(**{"in": (D, 3), "book": (7, 3), "out": (3, D)}), {"x": data(0, D)}


@specimen("RealNVP", "masked couplings with log determinants, a learned scale of each coupling")
def realnvp():
    masks = np.array([[1, 1, 0, 0, 0], [0, 0, 1, 1, 1]])

    def loss(p, b):
        x, determinant = b["x"], 0.0
        for k, mask in enumerate(masks):
            log_scale, shift = jnp.split(mlp(p[f"net{k}"], x * mask), 2, -1)
            log_scale = jnp.tanh(log_scale) * p["scale"][k] * (1 - mask)
            x = x * jnp.exp(log_scale) + shift * (1 - mask)
            determinant = determinant + jnp.sum(log_scale, -1)
        return jnp.mean(0.5 * jnp.sum(x**2, -1) - determinant)

    return loss, tree(net0=layers(D, 8, 2 * D), net1=layers(D, 8, 2 * D), scale=(2, D)), {"x": data(0, D)}


@specimen(
    "Glow", "an invertible 1x1 convolution; the determinant of its kernel is as a weight penalty is", penalised=True
)
def glow():
    def loss(p, b):
        z = (b["x"] * p["scale"] + p["shift"]) @ p["w"]
        determinant = jnp.linalg.slogdet(p["w"])[1] + jnp.sum(jnp.log(jnp.abs(p["scale"])))
        return jnp.mean(0.5 * jnp.sum(mlp(p["net"], z) ** 2, -1)) - determinant

    return loss, tree(w=(D, D), scale=(D,), shift=(D,), net=layers(D, 8, D)), {"x": data(0, D)}


@specimen("MADE", "kernels multiplied by masks of constants", gradient=("w1", "w2"))
def made():
    first = np.tril(np.ones((D, D)), -1).T
    second = np.tril(np.ones((D, D))).T

    def loss(p, b):
        h = jax.nn.relu(b["x"] @ (p["w1"] * first) + p["b1"])
        return jnp.mean(jnp.sum((h @ (p["w2"] * second) + p["b2"] - b["x"]) ** 2, -1))

    return loss, tree(w1=(D, D), b1=(D,), w2=(D, D), b2=(D,)), {"x": data(0, D)}


@specimen("diffusion", "noise predicted from a noisy input and an embedding of its time")
def diffusion():
    def loss(p, b):
        angles = b["t"][:, None] * 3.0 ** jnp.arange(3)
        time = mlp(p["time"], jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1))
        noisy = jnp.cos(b["t"])[:, None] * b["x"] + jnp.sin(b["t"])[:, None] * b["noise"]
        scale, shift = jnp.split(time, 2, -1)
        h = jax.nn.silu((noisy @ p["in"] + p["b"]) * (1 + scale) + shift)
        return jnp.mean(jnp.sum((h @ p["out"] - b["noise"]) ** 2, -1))

    params = tree(**{"time": layers(6, 7, 16), "in": (D, 8), "b": (8,), "out": (8, D)})
    return loss, params, {"x": data(0, D), "noise": data(1, D), "t": data(2)}


@specimen(
    "score matching",
    "the gradient of an energy with respect to its input, by `jax.grad` inside the loss",
    unreached=("b2",),
    alone=True,
)
def score():
    def loss(p, b):
        energy = jax.vmap(jax.grad(lambda x: mlp(p, x)[0]))
        return jnp.mean(jnp.sum((energy(b["x"] + b["noise"]) - b["noise"]) ** 2, -1))

    return loss, tree(**layers(D, 8, 1)), {"x": data(0, D), "noise": data(1, D)}


@specimen("WGAN with a gradient penalty", "the norm of a gradient by `jax.grad` in the loss")
def wgan():
    def loss(p, b):
        middle = 0.3 * b["x"] + 0.7 * b["fake"]
        slope = jax.vmap(jax.grad(lambda x: mlp(p, x)[0]))(middle)
        penalty = jnp.mean((jnp.linalg.norm(slope, axis=-1) - 1) ** 2)
        return jnp.mean(mlp(p, b["fake"]) - mlp(p, b["x"])) + 10 * penalty

    return loss, tree(**layers(D, 8, 1)), {"x": data(0, D), "fake": data(1, D)}


@specimen("hypernetwork for each example", "kernels that a network makes of each example")
def hypernetwork():
    def loss(p, b):
        w = mlp(p["maker"], b["context"]).reshape(-1, D, 3)
        return cross_entropy(jnp.einsum("nd,ndk->nk", jnp.tanh(b["x"] @ p["in"]), w), b["y"])

    params = tree(**{"maker": layers(4, 7, D * 3), "in": (D, D)})
    return loss, params, {"x": data(0, D), "context": data(1, 4), "y": tokens(0, below=3)}


@specimen(
    "hypernetwork for a task",
    "a kernel made of a learned code, which no example takes part in",
    gradient=("code", "maker/b1", "maker/w1", "maker/w2"),
)
def hypernetwork_of_a_task():
    def loss(p, b):
        w = mlp(p["maker"], p["code"]).reshape(D, 3)
        return cross_entropy(b["x"] @ w, b["y"])

    return loss, tree(code=(4,), maker=layers(4, 7, D * 3)), {"x": data(0, D), "y": tokens(0, below=3)}
