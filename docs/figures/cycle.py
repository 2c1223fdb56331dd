"""Draws docs/figures/cycle.svg: who owns which block of a small transformer, and when it is inverted.

`python docs/figures/cycle.py` asks the package's own plan for four devices and a cycle of four steps, and prints it.
"""

import pathlib

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import kfac
from kfac._distributed.owners import group_costs, make_turns

DEVICES, STEPS, LAYERS, WIDTH, VOCABULARY = 4, 4, 6, 256, 65
KERNELS = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}


def dense(layer, x):
    return x @ layer["kernel"] + layer["bias"]


def loss_fn(params, tokens):
    x = params["embedding"][tokens]
    for block in params["blocks"]:
        q, k, v = jnp.split(dense(block["qkv"], x).reshape(*tokens.shape, 4, -1), 3, axis=-1)
        x = x + dense(block["out"], jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape))
        x = x + dense(block["down"], jax.nn.gelu(dense(block["up"], x)))
    return jnp.mean(jax.nn.logsumexp(dense(params["head"], x), axis=-1))


def shapes(kernel):
    return {"kernel": jax.ShapeDtypeStruct(kernel, jnp.float32), "bias": jax.ShapeDtypeStruct(kernel[1:], jnp.float32)}


params = {
    "embedding": jax.ShapeDtypeStruct((VOCABULARY, WIDTH), jnp.float32),
    "blocks": [{name: shapes(kernel) for name, kernel in KERNELS.items()} for _ in range(LAYERS)],
    "head": shapes((WIDTH, VOCABULARY)),
}
layers = kfac.find_layers(loss_fn, params, jax.ShapeDtypeStruct((16, 64), jnp.int32))
plan = kfac.Assignment(layers, devices=DEVICES, inverse_every=STEPS)
print(plan)

costs = group_costs(plan.groups)
turns = make_turns(costs, STEPS, DEVICES)
owner = {(name, copy): device for name, copy, device in plan.owners()}
slot = 1.1 * max(plan.cost_per_step)  # each step as wide as the one with the most work
ends = np.tile(slot * np.arange(STEPS), (DEVICES, 1))  # how far each device has come in each step

figure, axis = plt.subplots(figsize=(11, 3.2), layout="constrained")
colours = dict(zip(["up", "down", "qkv", "out", "head", "embedding"], plt.get_cmap("tab10").colors, strict=False))
for (_, _, cost, _), group in zip(costs, (g for g in plan.groups if g.kronecker), strict=True):
    for layer, step in zip(group.layers, turns[group.name], strict=True):
        device, (*_, kind) = owner[layer.name, 0], layer.name.split("/")
        axis.barh(device, cost, 0.78, ends[device, step], color=colours[kind], edgecolor="white", linewidth=1)
        if cost > slot / 6:
            label = layer.name.removeprefix("blocks/")
            axis.text(ends[device, step] + cost / 2, device, label, ha="center", va="center", color="white", fontsize=9)
        ends[device, step] += cost
for step in range(STEPS):
    axis.axvline(slot * step, color="0.75", linewidth=0.8, zorder=0)
    axis.text(slot * (step + 0.5), -0.62, f"step {step}", ha="center", va="bottom", fontsize=10, color="0.35")
for kind in ("out", "head", "embedding"):
    axis.barh(0, 0, color=colours[kind], label=kind)
axis.legend(loc="upper left", bbox_to_anchor=(1, 0.95), frameon=False, fontsize=9)
axis.set_yticks(range(DEVICES), [f"device {device}" for device in range(DEVICES)])
axis.set_ylim(DEVICES - 0.5, -0.85)
axis.set_xlim(0, slot * STEPS)
axis.set_xticks([])
axis.spines[["top", "right", "bottom", "left"]].set_visible(False)
axis.tick_params(left=False)
figure.savefig(pathlib.Path(__file__).with_name("cycle.svg"), metadata={"Date": None})
