"""Simple models of all kinds."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zoo.specimens import cross_entropy, data, specimen, tokens, tree


@specimen("multilayer perceptron", "`x @ w + b` in bare jax.numpy")
def perceptron():
    def loss(p, b):
        h = jnp.tanh(b["x"] @ p["in"]["w"] + p["in"]["b"])
        return cross_entropy(h @ p["out"]["w"] + p["out"]["b"], b["y"])

    params = tree(**{"in": {"w": (5, 8), "b": (8,)}, "out": {"w": (8, 3), "b": (3,)}})
    return loss, params, {"x": data(0, 5), "y": tokens(0, below=3)}


@specimen("matrix factorisation", "two tables, the product of whose rows is the prediction, biases looked up")
def factorisation():
    def loss(p, b):
        score = jnp.sum(p["user"][b["u"]] * p["item"][b["i"]], -1) + p["bias"][b["i"]][:, 0]
        return jnp.mean((score - b["r"]) ** 2)

    params = tree(user=(7, 4), item=(9, 4), bias=(9, 1))
    return loss, params, {"u": tokens(0, below=7), "i": tokens(1, below=9), "r": data(0)}


@specimen("two towers", "tables and towers of queries and items, softmax over the batch", interacting=True)
def two_towers():
    def loss(p, b):
        query, item = p["query"][b["q"]] @ p["wq"], p["item"][b["i"]] @ p["wi"]
        return cross_entropy(query @ item.T, jnp.arange(len(query)))

    params = tree(query=(7, 5), item=(9, 5), wq=(5, 3), wi=(5, 3))
    return loss, params, {"q": tokens(0, below=7), "i": tokens(1, below=9)}


@specimen("DLRM", "a stack of tables looked up by `jax.vmap`, dense features, pairwise products", gradient=("tables",))
def dlrm():
    def loss(p, b):
        sparse = jax.vmap(lambda table, ids: table[ids], (0, 1), 1)(p["tables"], b["ids"])
        dense = jax.nn.relu(b["x"] @ p["bottom"] + p["b"])
        features = jnp.concatenate([dense[:, None], sparse], 1)
        pairs = jnp.einsum("nid,njd->nij", features, features)[:, *np.triu_indices(3, 1)]
        return jnp.mean(jax.nn.softplus(-(jnp.concatenate([dense, pairs], -1) @ p["top"])[:, 0] * b["r"]))

    params = tree(tables=(2, 7, 4), bottom=(5, 4), b=(4,), top=(7, 1))
    return loss, params, {"ids": tokens(0, 2, below=7), "x": data(0, 5), "r": data(1)}


@specimen("word2vec", "two tables, negative samples")
def word2vec():
    def loss(p, b):
        centre, context = p["in"][b["c"]], p["out"][b["o"]]
        scores = jnp.einsum("nd,nkd->nk", centre, context)
        return jnp.mean(jax.nn.softplus(-scores[:, 0]) + jnp.sum(jax.nn.softplus(scores[:, 1:]), -1))

    return loss, tree(**{"in": (7, 4), "out": (7, 4)}), {"c": tokens(0, below=7), "o": tokens(1, 3, below=7)}


@specimen("bilinear attention", "`x^T W y` by `einsum` of three arrays")
def bilinear():
    def loss(p, b):
        return cross_entropy(jnp.einsum("nd,kde,ne->nk", b["x"], p["w"], b["z"]) + p["b"], b["y"])

    return loss, tree(w=(3, 5, 4), b=(3,)), {"x": data(0, 5), "z": data(1, 4), "y": tokens(0, below=3)}


@specimen("maxout and highway", "products with several pieces, a gate that carries its input")
def highway():
    def loss(p, b):
        h = jnp.max(jnp.einsum("nd,dkm->nkm", b["x"], p["pieces"]) + p["b"], -1)
        gate = jax.nn.sigmoid(h @ p["gate"] + p["c"])
        return cross_entropy((gate * jnp.tanh(h @ p["carry"]) + (1 - gate) * h) @ p["out"], b["y"])

    params = tree(pieces=(5, 4, 2), b=(4, 2), gate=(4, 4), c=(4,), carry=(4, 4), out=(4, 3))
    return loss, params, {"x": data(0, 5), "y": tokens(0, below=3)}


@specimen("radial basis functions", "distances to learned centres, learned widths", functions=("log_width",))
def radial():
    def loss(p, b):
        distance = jnp.sum((b["x"][:, None] - p["centres"]) ** 2, -1)
        return cross_entropy(jnp.exp(-distance * jnp.exp(p["log_width"])) @ p["w"], b["y"])

    return loss, tree(centres=(7, 5), log_width=(7,), w=(7, 3)), {"x": data(0, 5), "y": tokens(0, below=3)}


@specimen("mixture density network", "three heads of one trunk, `logsumexp` over components")
def mixture_density():
    def loss(p, b):
        h = jnp.tanh(b["x"] @ p["w"] + p["b"])
        weight, mean, log_std = (h @ p[name] for name in ("weight", "mean", "std"))
        log_p = jax.nn.log_softmax(weight) - 0.5 * ((b["r"][:, None] - mean) * jnp.exp(-log_std)) ** 2 - log_std
        return -jnp.mean(jax.nn.logsumexp(log_p, -1))

    params = tree(w=(5, 8), b=(8,), weight=(8, 3), mean=(8, 3), std=(8, 3))
    return loss, params, {"x": data(0, 5), "r": data(1)}


@specimen("ArcFace", "kernel of the last layer brought to length one", gradient=("w",))
def arcface():
    def loss(p, b):
        h = jnp.tanh(b["x"] @ p["in"])
        h, w = h / jnp.linalg.norm(h, axis=-1, keepdims=True), p["w"] / jnp.linalg.norm(p["w"], axis=0)
        return cross_entropy(5.0 * (h @ w), b["y"])

    return loss, tree(**{"in": (5, 8), "w": (8, 3)}), {"x": data(0, 5), "y": tokens(0, below=3)}


@specimen(
    "a table of positions and a penalty",
    "learned positions added to tokens, weight decay inside the loss",
    penalised=True,
)
def positions():
    def loss(p, b):
        x = b["x"] @ p["in"] + p["positions"]
        penalty = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(p))
        return cross_entropy(jnp.tanh(x) @ p["out"], b["y"]) + 1e-3 * penalty

    params = tree(**{"in": (5, 8), "positions": (3, 8), "out": (8, 4)})
    return loss, params, {"x": data(0, 3, 5), "y": tokens(0, 3, below=4)}


@specimen("sums of cells by lax.map", "examples one after the other by `lax.map`")
def mapped():
    def loss(p, b):
        def one(row):
            x, y = row
            return cross_entropy(jnp.tanh(x @ p["w"] + p["b"]) @ p["out"], y)

        return jnp.mean(lax.map(one, (b["x"], b["y"])))

    return loss, tree(w=(5, 8), b=(8,), out=(8, 4)), {"x": data(0, 3, 5), "y": tokens(0, 3, below=4)}
