"""Networks inside differential equations, operators and graphs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from zoo.generative import layers, mlp
from zoo.specimens import N, data, specimen, tokens, tree


def points():
    return {"x": data(0, 2), "f": data(1)}


def u(p, x):
    return mlp(p, x)[..., 0]


@specimen("PINN by jacfwd of jacfwd", "`jax.vmap` of second derivatives in forward mode", alone=True, unreached=("b2",))
def pinn_forward():
    def loss(p, b):
        def residual(x, f):
            return jnp.trace(jax.jacfwd(jax.jacfwd(lambda x: u(p, x)))(x)) - f

        return jnp.mean(jax.vmap(residual)(b["x"], b["f"]) ** 2)

    return loss, tree(**layers(2, 8, 1)), points()


@specimen("PINN by jvp", "`jax.jvp` with a constant tangent, value and derivative used")
def pinn_jvp():
    def loss(p, b):
        tangent = jnp.zeros_like(b["x"]).at[:, 0].set(1.0)
        value, slope = jax.jvp(lambda x: u(p, x), (b["x"],), (tangent,))
        return jnp.mean((slope + value - b["f"]) ** 2)

    return loss, tree(**layers(2, 8, 1)), points()


@specimen("PINN by nested jvp", "second derivatives along one axis, nothing else used", alone=True, unreached=("b2",))
def pinn_nested():
    def loss(p, b):
        def second(x):
            e = jnp.array([1.0, 0.0])
            return jax.jvp(lambda x: jax.jvp(lambda x: u(p, x), (x,), (e,))[1], (x,), (e,))[1]

        return jnp.mean((jax.vmap(second)(b["x"]) - b["f"]) ** 2)

    return loss, tree(**layers(2, 8, 1)), points()


@specimen("PINN by hessian", "`jax.vmap(jax.hessian)`: forward over reverse", unreached=("b2",), alone=True)
def pinn_hessian():
    def loss(p, b):
        laplacian = jax.vmap(lambda x: jnp.trace(jax.hessian(lambda x: u(p, x))(x)))(b["x"])
        return jnp.mean((laplacian - b["f"]) ** 2)

    return loss, tree(**layers(2, 8, 1)), points()


@specimen("PINN by grad of grad", "`jax.vmap(jax.grad(jax.grad(u)))`", unreached=("b2",), alone=True)
def pinn_reverse():
    def loss(p, b):
        def scalar(t):
            return u(p, t[None])

        second = jax.vmap(jax.grad(jax.grad(scalar)))(b["x"][:, 0])
        return jnp.mean((second - b["f"]) ** 2)

    return loss, tree(**layers(1, 8, 1)), points()


@specimen("Sobolev training", "values and `jax.jacfwd` both fitted", alone=True)
def sobolev():
    def loss(p, b):
        value, slope = jax.vmap(lambda x: (u(p, x), jax.jacfwd(lambda x: u(p, x))(x)))(b["x"])
        return jnp.mean((value - b["f"]) ** 2 + jnp.sum((slope - b["x"]) ** 2, -1))

    return loss, tree(**layers(2, 8, 1)), points()


@specimen("directional derivatives", "`jax.linearize` of the network at each point, along directions that are data")
def linearised():
    def loss(p, b):
        value, push = jax.linearize(lambda x: u(p, x), b["x"])
        return jnp.mean((push(b["v"]) + value - b["f"]) ** 2)

    return loss, tree(**layers(2, 8, 1)), points() | {"v": data(2, 2)}


@specimen("Hamiltonian network", "equations of motion by `jax.grad` of an energy", unreached=("b2",), alone=True)
def hamiltonian():
    def loss(p, b):
        slope = jax.vmap(jax.grad(lambda x: u(p, x)))(b["x"])
        motion = jnp.stack([slope[:, 1], -slope[:, 0]], -1)
        return jnp.mean(jnp.sum((motion - b["f"][:, None]) ** 2, -1))

    return loss, tree(**layers(2, 8, 1)), points()


@specimen("DeepONet", "a branch of sensors and a trunk of coordinates of each example")
def deeponet():
    def loss(p, b):
        branch, trunk = mlp(p["branch"], b["sensors"]), mlp(p["trunk"], b["y"])
        return jnp.mean((jnp.einsum("nk,npk->np", branch, trunk) + p["b"] - b["g"]) ** 2)

    params = tree(branch=layers(5, 8, 7), trunk=layers(2, 8, 7), b=())
    return loss, params, {"sensors": data(0, 5), "y": data(1, 3, 2), "g": data(2, 3)}


GRID = np.linspace(0, 1, 10).reshape(5, 2)


@specimen(
    "DeepONet on a grid",
    "a trunk of constant coordinates that all examples share",
    gradient=("trunk/b1", "trunk/b2", "trunk/w1", "trunk/w2"),
)
def deeponet_grid():
    def loss(p, b):
        branch, trunk = mlp(p["branch"], b["sensors"]), mlp(p["trunk"], jnp.asarray(GRID))
        return jnp.mean((branch @ trunk.T - b["g"]) ** 2)

    params = tree(branch=layers(5, 8, 7), trunk=layers(2, 8, 7))
    return loss, params, {"sensors": data(0, 5), "g": data(2, 5)}


@specimen("Fourier operator", "complex kernels on the modes of an FFT", gradient=("modes_imag", "modes_real"))
def fourier():
    def loss(p, b):
        x = b["x"] @ p["in"]
        modes = jnp.fft.rfft(x, axis=1)
        kernel = p["modes_real"] + 1j * p["modes_imag"]
        y = jnp.fft.irfft(jnp.einsum("nkc,kcd->nkd", modes, kernel), 5, axis=1)
        return jnp.mean((jax.nn.gelu(y + x @ p["w"]) @ p["out"] - b["x"]) ** 2)

    params = tree(**{"in": (2, 4), "modes_real": (3, 4, 4), "modes_imag": (3, 4, 4), "w": (4, 4), "out": (4, 2)})
    return loss, params, {"x": data(0, 5, 2)}


@specimen("SIREN with Fourier features", "a constant random projection, then sines with a constant frequency")
def siren():
    projection = np.random.default_rng(3).normal(size=(2, 4))

    def loss(p, b):
        x = b["x"] @ projection
        x = jnp.concatenate([jnp.sin(x), jnp.cos(x)], -1)
        h = jnp.sin(3.0 * (x @ p["w1"] + p["b1"]))
        return jnp.mean((jnp.sin(3.0 * (h @ p["w2"] + p["b2"])) @ p["w3"] - b["f"][:, None]) ** 2)

    return loss, tree(w1=(8, 7), b1=(7,), w2=(7, 7), b2=(7,), w3=(7, 1)), points()


@specimen("deep set", "the same network for each element, a sum over a masked set")
def deep_set():
    def loss(p, b):
        h = jnp.sum(mlp(p["each"], b["x"]) * b["mask"][..., None], 1)
        return jnp.mean((mlp(p["all"], h)[:, 0] - b["f"]) ** 2)

    batch = {"x": data(0, 3, 2), "mask": (tokens(3, 3, below=3) > 0).astype(float), "f": data(1)}
    return loss, tree(each=layers(2, 8, 5), all=layers(5, 7, 1)), batch


@specimen("graph convolution", "dense adjacency matrices, one for each graph")
def graph_convolution():
    def loss(p, b):
        a = b["a"] / (jnp.sum(b["a"], -1, keepdims=True) + 1)
        h = jax.nn.relu(a @ (b["x"] @ p["w1"]) + p["b1"])
        h = a @ h @ p["w2"] + h @ p["self"]
        return jnp.mean((jnp.mean(h, 1)[:, 0] - b["f"]) ** 2)

    batch = {"x": data(0, 3, 5), "a": jnp.abs(data(1, 3, 3)), "f": data(2)}
    return loss, tree(w1=(5, 8), b1=(8,), w2=(8, 1), self=(8, 1)), batch


@specimen(
    "graph network on flattened graphs",
    "nodes and edges of all graphs in one array, messages by `jax.ops.segment_sum`",
)
def graph_network():
    nodes, edges = 3, 4

    def loss(p, b):
        n = len(b["x"])
        offset = jnp.arange(n)[:, None] * nodes
        x, senders, receivers = b["x"].reshape(-1, 2), (b["s"] + offset).reshape(-1), (b["r"] + offset).reshape(-1)
        for k in range(2):
            messages = mlp(p[f"message{k}"], jnp.concatenate([x[senders], x[receivers]], -1))
            x = x + mlp(p[f"node{k}"], jnp.concatenate([x, jax.ops.segment_sum(messages, receivers, n * nodes)], -1))
        pooled = jax.ops.segment_sum(x, jnp.repeat(jnp.arange(n), nodes), n)
        return jnp.mean(((pooled @ p["out"])[:, 0] - b["f"]) ** 2)

    message, node = layers(4, 7, 3), layers(5, 7, 2)
    params = tree(message0=message, message1=message, node0=node, node1=node, out=(2, 1))
    batch = {
        "x": data(0, nodes, 2), "s": tokens(0, edges, below=nodes), "r": tokens(1, edges, below=nodes), "f": data(1),
    }  # fmt: skip
    return loss, params, batch


@specimen(
    "graphs of unequal size",
    "20 nodes of 6 graphs in one array: positions are no multiple of the graphs",
    interacting=True,
    ordered=True,
    hidden=True,
)
def graphs_unequal():
    owner = np.repeat(np.arange(N), [2, 3, 4, 5, 1, 5])

    def loss(p, b):
        start = jnp.asarray(np.linspace(-1, 1, len(owner))[:, None])
        h = mlp(p["node"], jnp.sin(b["x"][owner] * start))
        return jnp.mean(((jax.ops.segment_sum(h, jnp.asarray(owner), N) @ p["out"])[:, 0] - b["f"]) ** 2)

    return loss, tree(node=layers(2, 7, 3), out=(3, 1)), {"x": data(0, 2), "f": data(1)}


@specimen("graph attention", "attention over edges of dense graphs, scores of sender and receiver added")
def graph_attention():
    def loss(p, b):
        h = jnp.einsum("nid,dhk->nihk", b["x"], p["w"])
        sender, receiver = (jnp.einsum("nihk,hk->nih", h, p[name]) for name in ("sender", "receiver"))
        scores = jax.nn.leaky_relu(receiver[:, :, None] + sender[:, None])
        weights = jax.nn.softmax(jnp.where(b["a"][..., None] > 0, scores, -1e9), 2)
        out = jnp.einsum("nijh,njhk->nihk", weights, h).reshape(*b["x"].shape[:2], -1)
        return jnp.mean(((out @ p["out"]).mean((1, 2)) - b["f"]) ** 2)

    a = (tokens(7, 3, 3, below=2) + jnp.eye(3, dtype=int)).astype(float)
    params = tree(w=(5, 2, 4), sender=(2, 4), receiver=(2, 4), out=(8, 1))
    return loss, params, {"x": data(0, 3, 5), "a": a, "f": data(2)}
