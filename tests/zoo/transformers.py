"""Transformers: attention in its many spellings, experts, and changes to their kernels."""

from __future__ import annotations

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from zoo.specimens import N, cross_entropy, data, linen, modules, randomised, specimen, tokens, tree

T, D, V = 3, 8, 7  # tokens per sequence, width, vocabulary


def rms(x, scale):
    return x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-3) * scale


def causal(q, k, v):
    """Return causal attention of arrays `[n, t, heads, width]`."""
    scores = jnp.einsum("nqhd,nkhd->nhqk", q, k) / np.sqrt(q.shape[-1])
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
    return jnp.einsum("nhqk,nkhd->nqhd", jax.nn.softmax(scores), v)


class Block(nn.Module):
    """A block of a linen transformer."""

    @nn.compact
    def __call__(self, x, _=None):
        h = nn.LayerNorm()(x)
        mask = nn.make_causal_mask(x[..., 0])
        x = x + nn.MultiHeadDotProductAttention(num_heads=2)(h, h, mask=mask)
        return x + nn.Dense(D)(nn.gelu(nn.Dense(12)(nn.LayerNorm()(x)))), None


class Gpt(nn.Module):
    scanned: bool = False
    tied: bool = False

    @nn.compact
    def __call__(self, ids):
        table = nn.Embed(V, D)
        x = table(ids) + self.param("positions", nn.initializers.normal(), (T, D))
        if self.scanned:
            block = nn.remat(Block, prevent_cse=False)
            scan = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
            x, _ = scan()(x, None)
        else:
            x, _ = Block()(x)
        x = nn.LayerNorm()(x)
        return table.attend(x) if self.tied else nn.Dense(V, use_bias=False)(x)


def text(**more):
    return {"x": tokens(1, T, below=V), "y": tokens(2, T, below=V), **more}


@specimen("GPT in linen", "`nn.Embed`, an added table of positions, `nn.MultiHeadDotProductAttention`, `nn.LayerNorm`")
def gpt():
    return linen(Gpt(), text(), cross_entropy)


@specimen("GPT of scanned blocks", "`nn.scan` of `nn.remat` blocks with stacked kernels")
def gpt_scanned():
    return linen(Gpt(scanned=True), text(), cross_entropy)


@specimen("GPT with a tied table", "the table of the lookup is the output layer, too (`nn.Embed.attend`)")
def gpt_tied():
    return linen(Gpt(tied=True), text(), cross_entropy)


def rotate(x, positions):
    half = x.shape[-1] // 2
    angles = positions[:, None] * 10.0 ** -jnp.arange(half)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


@specimen(
    "Llama", "bare jax.numpy: RoPE, grouped queries, RMS norm, SwiGLU, `lax.scan` over layers under `jax.checkpoint`"
)
def llama():
    heads, groups, width = 4, 2, 2

    def block(x, p):
        h = rms(x, p["norm1"])
        q = jnp.einsum("ntd,dhk->nthk", h, p["q"])
        k, v = (jnp.einsum("ntd,dgk->ntgk", h, p[name]) for name in "kv")
        q, k = rotate(q, jnp.arange(T)), rotate(k, jnp.arange(T))
        k, v = (jnp.repeat(a, heads // groups, axis=2) for a in (k, v))
        x = x + jnp.einsum("nthk,hkd->ntd", causal(q, k, v), p["o"])
        h = rms(x, p["norm2"])
        return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]

    def loss(p, b):
        x = p["table"][b["x"]]
        x, _ = lax.scan(jax.checkpoint(lambda x, layer: (block(x, layer), None)), x, p["blocks"])
        return cross_entropy(rms(x, p["norm"]) @ p["head"], b["y"])

    blocks = {
        "norm1": (2, D), "norm2": (2, D), "q": (2, D, heads, width), "k": (2, D, groups, width),
        "v": (2, D, groups, width), "o": (2, heads, width, D), "gate": (2, D, 5), "up": (2, D, 5), "down": (2, 5, D),
    }  # fmt: skip
    return loss, tree(table=(V, D), blocks=blocks, norm=(D,), head=(D, V)), text()


@specimen(
    "scales by einsum", "MaxText's norm: a scale read by `einsum` without a summed axis, over `[n, t, d]` and `[t, d]`"
)
def scales_by_einsum():
    def loss(p, b):
        h = jnp.einsum("i...k,...k->i...k", rms(b["x"], 1.0), p["scale"]) + p["shift"]
        h = jnp.einsum("td,ntd->ndt", p["gate"], jnp.tanh(h @ p["w"]))
        return cross_entropy(h.mean(-1) @ p["head"], b["y"])

    params = tree(scale=(D,), shift=(D,), w=(D, D), gate=(T, D), head=(D, 3))
    return loss, params, {"x": data(0, T, D), "y": tokens(1, below=3)}


@specimen(
    "repeated heads",
    "key and value kernels repeated for each query head by `jnp.repeat` before they are used",
    gradient=("k", "v"),
)
def repeated_heads():
    def loss(p, b):
        q = jnp.einsum("ntd,dhk->nthk", b["x"], p["q"])
        k, v = (jnp.einsum("ntd,dhk->nthk", b["x"], jnp.repeat(p[name], 2, axis=1)) for name in "kv")
        return cross_entropy(causal(q, k, v).reshape(-1, T, 8) @ p["o"], b["y"])

    params = tree(q=(D, 4, 2), k=(D, 2, 2), v=(D, 2, 2), o=(8, V))
    return loss, params, {"x": data(0, T, D), "y": tokens(0, T, below=V)}


@specimen(
    "a fused projection", "query, key and value in equal parts of one kernel, by `jnp.split(w, 3, -1)` of the kernel"
)
def fused():
    def loss(p, b):
        q, k, v = (b["x"] @ w + c for w, c in zip(jnp.split(p["w"], 3, -1), jnp.split(p["b"], 3), strict=True))
        out = causal(*(a.reshape(-1, T, 2, 4) for a in (q, k, v))).reshape(-1, T, D)
        return cross_entropy(out @ p["o"], b["y"])

    return loss, tree(w=(D, 3 * D), b=(3 * D,), o=(D, V)), {"x": data(0, T, D), "y": tokens(0, T, below=V)}


@specimen("a fused projection of unequal parts", "query wider than key and value, cut from one kernel", gradient=("w",))
def fused_unequal():
    def loss(p, b):
        q, k, v = jnp.split(p["w"], [8, 12], -1)
        q, k, v = ((b["x"] @ w).reshape(-1, T, w.shape[1] // 2, 2) for w in (q, k, v))
        out = causal(q, jnp.repeat(k, 2, 2), jnp.repeat(v, 2, 2)).reshape(-1, T, 8)
        return cross_entropy(out @ p["o"], b["y"])

    return loss, tree(w=(D, 16), o=(8, V)), {"x": data(0, T, D), "y": tokens(0, T, below=V)}


@specimen("a fused projection, split afterwards", "one wide product whose result is cut into unequal parts")
def fused_outputs():
    def loss(p, b):
        q, k, v = jnp.split(b["x"] @ p["w"] + p["b"], [8, 12], -1)
        k, v = (jnp.repeat(a.reshape(-1, T, 2, 2), 2, 2) for a in (k, v))
        return cross_entropy(causal(q.reshape(-1, T, 4, 2), k, v).reshape(-1, T, 8) @ p["o"], b["y"])

    return loss, tree(w=(D, 16), b=(16,), o=(8, V)), {"x": data(0, T, D), "y": tokens(0, T, below=V)}


class VisionTransformer(nnx.Module):
    def __init__(self, rngs):
        self.patches = nnx.Conv(2, D, (2, 2), (2, 2), rngs=rngs)
        self.token = nnx.Param(jnp.zeros((1, 1, D)))
        self.positions = nnx.Param(jnp.zeros((1, 5, D)))
        self.norm1, self.norm2 = nnx.LayerNorm(D, rngs=rngs), nnx.LayerNorm(D, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, D, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(D, 10, rngs=rngs), nnx.Linear(10, D, rngs=rngs)
        self.head = nnx.Linear(D, 3, rngs=rngs)

    def __call__(self, image):
        x = self.patches(image).reshape(image.shape[0], -1, D)
        x = jnp.concatenate([jnp.broadcast_to(self.token[...], (len(x), 1, D)), x], 1) + self.positions[...]
        x = x + self.attention(self.norm1(x))
        x = x + self.down(nnx.gelu(self.up(self.norm2(x))))
        return self.head(x[:, 0])


@specimen(
    "ViT in nnx",
    "patches by a strided convolution, a class token, `nnx.MultiHeadAttention`",
    functions=("token",),
    tolerance=1e-5,
)
def vit():
    graph, state = modules(VisionTransformer)

    def loss(params, b):
        return cross_entropy(nnx.merge(graph, params)(b["x"]), b["y"])

    return loss, state, {"x": data(0, 4, 4, 2), "y": tokens(0, below=3)}


class MixerBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.LayerNorm()(x).swapaxes(1, 2)
        h = nn.Dense(x.shape[1])(nn.gelu(nn.Dense(7)(h)))
        x = x + h.swapaxes(1, 2)
        return x + nn.Dense(x.shape[2])(nn.gelu(nn.Dense(9)(nn.LayerNorm()(x))))


class Mixer(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Conv(5, (2, 2), (2, 2))(x)
        x = MixerBlock()(x.reshape(x.shape[0], -1, 5))
        return nn.Dense(3)(jnp.mean(nn.LayerNorm()(x), 1))


@specimen("MLP-Mixer in linen", "dense layers over tokens, between transpositions")
def mixer():
    return linen(Mixer(), {"x": data(0, 4, 4, 2), "y": tokens(0, below=3)}, cross_entropy)


@specimen(
    "Swin",
    "windows by reshapes and `jnp.roll`, looked-up relative positions added to scores",
    gradient=("first/relative", "second/relative"),
)
def swin():
    heads, window, d = 2, 2, 8
    steps = np.arange(window)
    grid = np.stack(np.meshgrid(steps, steps, indexing="ij"), -1).reshape(-1, 2)
    offsets = grid[:, None] - grid[None] + window - 1
    index = offsets[..., 0] * 3 + offsets[..., 1]

    def attention(x, p):
        n, h, w, _ = x.shape
        x = x.reshape(n, h // window, window, w // window, window, d).transpose(0, 1, 3, 2, 4, 5)
        x = x.reshape(-1, window**2, d)
        q, k, v = jnp.moveaxis((x @ p["qkv"] + p["c"]).reshape(-1, window**2, 3, heads, d // heads), 2, 0)
        bias = p["relative"][index.reshape(-1)].reshape(window**2, window**2, heads).transpose(2, 0, 1)
        scores = jnp.einsum("nqhd,nkhd->nhqk", q, k) + bias
        x = jnp.einsum("nhqk,nkhd->nqhd", jax.nn.softmax(scores), v).reshape(-1, window**2, d) @ p["o"]
        x = x.reshape(n, h // window, w // window, window, window, d).transpose(0, 1, 3, 2, 4, 5)
        return x.reshape(n, h, w, d)

    def loss(p, b):
        x = b["x"] @ p["in"]
        x = x + attention(rms(x, p["norm"]), p["first"])
        shifted = jnp.roll(rms(x, p["norm2"]), (-1, -1), (1, 2))
        x = x + jnp.roll(attention(shifted, p["second"]), (1, 1), (1, 2))
        return cross_entropy(jnp.mean(x, (1, 2)) @ p["head"], b["y"])

    layer = {"qkv": (d, 3 * d), "c": (3 * d,), "o": (d, d), "relative": (9, heads)}
    params = tree(**{"in": (3, d), "norm": (d,), "norm2": (d,), "first": layer, "second": layer, "head": (d, 3)})
    return loss, params, {"x": data(0, 4, 4, 3), "y": tokens(0, below=3)}


def experts(p, x):
    return jnp.einsum("...ech,ehd->...ecd", jax.nn.gelu(jnp.einsum("...ecd,edh->...ech", x, p["up"])), p["down"])


def dispatch(logits, k, capacity):
    """Return each token's weight in each expert's slots: `[..., t, experts, capacity]`."""
    weights, chosen = lax.top_k(jax.nn.softmax(logits), k)
    hot = jax.nn.one_hot(chosen, logits.shape[-1])
    flat = hot.reshape(*hot.shape[:-3], -1, hot.shape[-1])
    place = (jnp.cumsum(flat, -2) - 1).reshape(hot.shape)
    slots = jax.nn.one_hot(jnp.where(hot > 0, place, -1).astype(int), capacity) * hot[..., None]
    return slots.sum(-3), jnp.einsum("...tk,...tkec->...tec", weights, slots)


EXPERTS = {"router": (D, 3), "up": (3, D, 5), "down": (3, 5, D), "head": (D, V)}


@specimen(
    "experts with top-2 and a capacity",
    "tokens dispatched within each sequence by one-hot products, kernels `[experts, ...]`",
)
def mixture():
    def loss(p, b):
        there, back = dispatch(b["x"] @ p["router"], 2, 2)
        y = experts(p, jnp.einsum("ntec,ntd->necd", there, b["x"]))
        return cross_entropy(jnp.einsum("ntec,necd->ntd", back, y) @ p["head"], b["y"])

    return loss, tree(**EXPERTS), {"x": data(0, T, D), "y": tokens(0, T, below=V)}


@specimen(
    "a Switch layer over all tokens",
    "a capacity of the whole batch that is no multiple of the examples",
    interacting=True,
    ordered=True,
)
def switch():
    def loss(p, b):
        x = b["x"].reshape(-1, D)
        there, back = dispatch(x @ p["router"], 1, 7)
        y = experts(p, jnp.einsum("tec,td->ecd", there, x))
        out = jnp.einsum("tec,ecd->td", back, y).reshape(b["x"].shape)
        return cross_entropy((b["x"] + out) @ p["head"], b["y"])

    return loss, tree(**EXPERTS), {"x": data(0, T, D), "y": tokens(0, T, below=V)}


@specimen(
    "experts by ragged products",
    "tokens sorted by expert, `lax.ragged_dot`",
    interacting=True,
)
def ragged():
    def loss(p, b):
        x = b["x"].reshape(-1, D)
        weights = jax.nn.softmax(x @ p["router"])
        chosen = jnp.argmax(weights, -1)
        order = jnp.argsort(chosen)
        sizes = jnp.bincount(chosen, length=3)
        h = jax.nn.gelu(lax.ragged_dot(x[order], p["up"], sizes))
        y = lax.ragged_dot(h, p["down"], sizes)[jnp.argsort(order)] * jnp.max(weights, -1, keepdims=True)
        return cross_entropy(((x + y) @ p["head"]).reshape(*b["x"].shape[:2], V), b["y"])

    return loss, tree(**EXPERTS), {"x": data(0, T, D), "y": tokens(0, T, below=V)}


class Perceiver(eqx.Module):
    latents: jax.Array
    cross: eqx.nn.MultiheadAttention
    norm: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP
    head: eqx.nn.Linear

    def __init__(self):
        key = jax.random.key(0)
        self.latents = jnp.zeros((2, D))
        self.cross = eqx.nn.MultiheadAttention(2, D, key_size=5, value_size=5, key=key)
        self.norm = eqx.nn.LayerNorm(D)
        self.mlp = eqx.nn.MLP(D, D, 10, 1, key=key)
        self.head = eqx.nn.Linear(D, 3, key=key)

    def __call__(self, x):
        z = self.latents + self.cross(self.latents, x, x)
        z = z + jax.vmap(self.mlp)(jax.vmap(self.norm)(z))
        return self.head(jnp.mean(z, 0))


@specimen(
    "Perceiver in equinox",
    "learned latents that a product reads before they meet an example",
    gradient=("cross/query_proj", "latents"),
)
def perceiver():
    params, static = eqx.partition(eqx.filter_eval_shape(Perceiver), lambda x: isinstance(x, jax.ShapeDtypeStruct))
    params = randomised(params)

    def loss(params, b):
        return cross_entropy(jax.vmap(eqx.combine(params, static))(b["x"]), b["y"])

    return loss, params, {"x": data(0, T, 5), "y": tokens(0, below=3)}


@specimen("ALBERT", "one block used again and again in a Python loop")
def albert():
    def loss(p, b):
        x = p["table"][b["x"]] @ p["up"]
        for _ in range(2):
            q, k, v = jnp.split((x @ p["qkv"] + p["c"]).reshape(-1, T, 2, 12), 3, -1)
            x = rms(x + causal(q, k, v).reshape(-1, T, D) @ p["o"], p["norm"])
            x = x + jax.nn.gelu(x @ p["in"] + p["d"]) @ p["out"]
        return cross_entropy(x @ p["head"], b["y"])

    params = tree(**{"table": (V, 3), "up": (3, D), "qkv": (D, 24), "c": (24,), "o": (D, D), "norm": (D,),
                     "in": (D, 9), "d": (9,), "out": (9, D), "head": (D, V)})  # fmt: skip
    return loss, params, text()


@specimen("encoder and decoder in haiku", "`hk.MultiHeadAttention` across two sequences, `hk.Embed`, `hk.LayerNorm`")
def encoder_decoder():
    def network(source, target):
        table = hk.Embed(V, D, name="table")
        norm = hk.LayerNorm(-1, create_scale=True, create_offset=True)
        init = hk.initializers.RandomNormal()
        memory = hk.nets.MLP([D, D], name="encoder")(table(source))
        x = table(target) + hk.get_parameter("positions", (T, D), init=init)
        x = norm(x + hk.MultiHeadAttention(2, 4, w_init=init)(x, memory, memory))
        return hk.Linear(V)(x)

    network = hk.without_apply_rng(hk.transform(network))
    batch = text(source=tokens(5, 4, below=V))
    params = randomised(jax.eval_shape(network.init, jax.random.key(0), batch["source"], batch["x"]))
    return lambda p, b: cross_entropy(network.apply(p, b["source"], b["x"]), b["y"]), params, batch


@specimen("LoRA", "`x @ w + (x @ a) @ b` with `w` under stop_gradient", unreached=("in/w", "out/w"))
def lora():
    def loss(p, b):
        def layer(x, q):
            return x @ lax.stop_gradient(q["w"]) + (x @ q["a"]) @ q["b"]

        return cross_entropy(layer(jnp.tanh(layer(b["x"], p["in"])), p["out"]), b["y"])

    params = tree(**{"in": {"w": (D, D), "a": (D, 2), "b": (2, D)}, "out": {"w": (D, V), "a": (D, 2), "b": (2, V)}})
    return loss, params, {"x": data(0, D), "y": tokens(0, below=V)}


@specimen("LoRA, merged first", "`x @ (w + a @ b)`", gradient=("a", "b"))
def lora_merged():
    def loss(p, b):
        return cross_entropy(b["x"] @ (p["w"] + p["a"] @ p["b"]), b["y"])

    return loss, tree(w=(D, V), a=(D, 2), b=(2, V)), {"x": data(0, D), "y": tokens(0, below=V)}


@specimen("a soft prompt", "learned vectors before the tokens of each example", functions=("prompt",))
def prompt():
    def loss(p, b):
        x = p["table"][b["x"]]
        x = jnp.concatenate([jnp.tile(p["prompt"], (len(x), 1, 1)), x], 1)
        q, k, v = (jnp.einsum("ntd,dhk->nthk", x, p[name]) for name in "qkv")
        return cross_entropy(causal(q, k, v).reshape(len(x), -1, D)[:, 2:] @ p["o"], b["y"])

    return loss, tree(table=(V, D), prompt=(2, D), q=(D, 2, 4), k=(D, 2, 4), v=(D, 2, 4), o=(D, V)), text()


assert N == 6
