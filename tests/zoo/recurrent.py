"""Recurrent networks and state spaces."""

from __future__ import annotations

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from zoo.specimens import cross_entropy, data, equinox, haiku, linen, modules, specimen, tokens, tree

T, D, H, V = 3, 5, 4, 7


def sequences():
    return {"x": data(0, T, D), "y": tokens(0, below=3)}


class Recurrent(nn.Module):
    cell: type

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.RNN(self.cell(H, param_dtype=x.dtype))(x)[:, -1])


@specimen("LSTM in linen", "`nn.RNN(nn.LSTMCell)`")
def lstm_linen():
    return linen(Recurrent(nn.LSTMCell), sequences(), cross_entropy)


@specimen(
    "optimised LSTM in linen",
    "`nn.OptimizedLSTMCell` concatenates its kernels",
    gradient=(
        "OptimizedLSTMCell_0/hf/bias",
        "OptimizedLSTMCell_0/hf/kernel",
        "OptimizedLSTMCell_0/hg/bias",
        "OptimizedLSTMCell_0/hg/kernel",
        "OptimizedLSTMCell_0/hi/bias",
        "OptimizedLSTMCell_0/hi/kernel",
        "OptimizedLSTMCell_0/ho/bias",
        "OptimizedLSTMCell_0/ho/kernel",
        "OptimizedLSTMCell_0/if",
        "OptimizedLSTMCell_0/ig",
        "OptimizedLSTMCell_0/ii",
        "OptimizedLSTMCell_0/io",
    ),
)
def lstm_optimised():
    return linen(Recurrent(nn.OptimizedLSTMCell), sequences(), cross_entropy)


@specimen("GRU in linen", "`nn.RNN(nn.GRUCell)`")
def gru_linen():
    return linen(Recurrent(nn.GRUCell), sequences(), cross_entropy)


class NnxLstm(nnx.Module):
    def __init__(self, rngs):
        self.rnn = nnx.RNN(nnx.LSTMCell(D, H, param_dtype=float, rngs=rngs))
        self.head = nnx.Linear(H, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(self.rnn(x, rngs=nnx.Rngs(0))[:, -1])


@specimen("LSTM in nnx", "`nnx.RNN(nnx.LSTMCell)`")
def lstm_nnx():
    graph, state, rest = modules(NnxLstm, nnx.Param)

    def loss(params, b):
        return cross_entropy(nnx.merge(graph, params, rest)(b["x"]), b["y"])

    return loss, state, sequences()


def unrolled(core, time_major=False):
    def network(x):
        cell = core(H)
        if time_major:
            outputs, _ = hk.dynamic_unroll(cell, jnp.swapaxes(x, 0, 1), cell.initial_state(len(x)))
            return hk.Linear(3)(outputs[-1])
        outputs, _ = hk.dynamic_unroll(cell, x, cell.initial_state(len(x)), time_major=False)
        return hk.Linear(3)(outputs[:, -1])

    return network


@specimen("LSTM in haiku", "`hk.dynamic_unroll` of `hk.LSTM`, time first")
def lstm_haiku():
    return haiku(unrolled(hk.LSTM, time_major=True), sequences(), cross_entropy)


@specimen("GRU in haiku", "`hk.GRU` cuts its kernels into unequal parts", gradient=("gru/w_h",))
def gru_haiku():
    return haiku(unrolled(hk.GRU), sequences(), cross_entropy)


class EquinoxLstm(eqx.Module):
    cell: eqx.nn.LSTMCell
    head: eqx.nn.Linear
    loop: bool = eqx.field(static=True)

    def __init__(self, key, loop=False):
        self.cell = eqx.nn.LSTMCell(D, H, key=key)
        self.head = eqx.nn.Linear(H, 3, key=key)
        self.loop = loop

    def __call__(self, x):
        state = (jnp.zeros(H), jnp.zeros(H))
        if self.loop:
            for row in x:
                state = self.cell(row, state)
        else:
            state, _ = lax.scan(lambda s, row: (self.cell(row, s), None), state, x)
        return self.head(state[0])


@specimen("LSTM in equinox", "`lax.scan` of `eqx.nn.LSTMCell` under `jax.vmap`")
def lstm_equinox():
    return equinox(EquinoxLstm, sequences(), cross_entropy)


@specimen(
    "LSTM in equinox, in a Python loop", "the first state is zeros that all examples share under `jax.vmap`", alone=True
)
def lstm_equinox_loop():
    return equinox(lambda key: EquinoxLstm(key, loop=True), sequences(), cross_entropy)


@specimen("character network in a Python loop", "kernels read again at each step, a loss at each step")
def characters():
    def loss(p, b):
        h, total = jnp.zeros((len(b["x"]), H)), 0
        for t in range(T):
            h = jnp.tanh(p["table"][b["x"][:, t]] + h @ p["u"] + p["b"])
            total = total + cross_entropy(h @ p["head"] + p["c"], b["y"][:, t]) / T
        return total

    params = tree(table=(V, H), u=(H, H), b=(H,), head=(H, V), c=(V,))
    return loss, params, {"x": tokens(0, T, below=V), "y": tokens(1, T, below=V)}


@specimen(
    "bidirectional network", "one scan forwards, one in reverse, a learned first state", functions=("back/h", "there/h")
)
def bidirectional():
    def loss(p, b):
        def run(q, reverse):
            def step(h, x):
                h = jnp.tanh(x @ q["w"] + h @ q["u"] + q["b"])
                return h, h

            start = jnp.broadcast_to(q["h"], (len(b["x"]), H))
            return lax.scan(step, start, jnp.swapaxes(b["x"], 0, 1), reverse=reverse)[1]

        h = jnp.concatenate([run(p["there"], False), run(p["back"], True)], -1)
        return cross_entropy(jnp.mean(h, 0) @ p["head"], b["y"])

    cell = {"w": (D, H), "u": (H, H), "b": (H,), "h": (H,)}
    return loss, tree(there=cell, back=cell, head=(2 * H, 3)), sequences()


@specimen(
    "S4D",
    "a diagonal state space whose kernel, made of parameters, is convolved with the input by FFT",
    gradient=("c_imag", "c_real", "frequency", "log_decay", "log_step"),
)
def s4d():
    states = 3

    def loss(p, b):
        x = b["x"] @ p["in"] + p["b"]
        step = jnp.exp(p["log_step"])
        rate = -jnp.exp(p["log_decay"]) + 1j * p["frequency"]
        powers = jnp.exp((rate * step[:, None])[..., None] * jnp.arange(T))
        coefficients = (p["c_real"] + 1j * p["c_imag"]) * (jnp.exp(rate * step[:, None]) - 1) / rate
        kernel = 2 * jnp.sum(coefficients[..., None] * powers, 1).real
        y = jnp.fft.irfft(jnp.fft.rfft(x.swapaxes(1, 2), 2 * T) * jnp.fft.rfft(kernel, 2 * T), 2 * T)[..., :T]
        y = y.swapaxes(1, 2) + x * p["d"]
        return cross_entropy(jnp.mean(jax.nn.gelu(y), 1) @ p["head"], b["y"])

    params = tree(**{
        "in": (D, H), "b": (H,), "log_step": (H,), "log_decay": (H, states), "frequency": (H, states),
        "c_real": (H, states), "c_imag": (H, states), "d": (H,), "head": (H, 3),
    })  # fmt: skip
    return loss, params, sequences()


@specimen(
    "Mamba",
    "selective state space by `lax.associative_scan`, causal depthwise convolution, gates",
    functions=("log_a",),
)
def mamba():
    states, inner = 3, 5

    def loss(p, b):
        x, gate = jnp.split(b["x"] @ p["in"], 2, -1)
        x = lax.conv_general_dilated(
            x, p["conv"], (1,), [(1, 0)], dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=inner
        )
        x = jax.nn.silu(x + p["conv_bias"])
        low, into, out = jnp.split(x @ p["x_proj"], [2, 2 + states], -1)
        step = jax.nn.softplus(low @ p["step"] + p["step_bias"])
        decay = jnp.exp(step[..., None] * -jnp.exp(p["log_a"]))
        drive = (step * x)[..., None] * into[..., None, :]
        _, h = lax.associative_scan(lambda a, c: (a[0] * c[0], c[0] * a[1] + c[1]), (decay, drive), axis=1)
        y = jnp.einsum("ntds,nts->ntd", h, out) + x * p["d"]
        return cross_entropy(jnp.mean((y * jax.nn.silu(gate)) @ p["out"], 1), b["y"])

    params = tree(**{
        "in": (D, 2 * inner), "conv": (2, 1, inner), "conv_bias": (inner,), "x_proj": (inner, 2 + 2 * states),
        "step": (2, inner), "step_bias": (inner,), "log_a": (inner, states), "d": (inner,), "out": (inner, 3),
    })  # fmt: skip
    return loss, params, sequences()


@specimen("neural ODE", "Euler steps in a scan with one and the same kernel")
def neural_ode():
    def loss(p, b):
        def step(h, t):
            return h + 0.3 * (jnp.tanh(h @ p["w1"] + t * p["time"] + p["b1"]) @ p["w2"]), None

        h, _ = lax.scan(step, b["x"], jnp.arange(3.0))
        return cross_entropy(h @ p["head"], b["y"])

    return loss, tree(w1=(D, 8), time=(8,), b1=(8,), w2=(8, D), head=(D, 3)), {"x": data(0, D), "y": tokens(0, below=3)}


def equilibrium(f, p, x):
    return lax.while_loop(lambda z: jnp.max(jnp.abs(f(p, x, z) - z)) > 1e-13, lambda z: f(p, x, z), jnp.zeros_like(x))


@specimen("DEQ", "a fixed point by `lax.while_loop` without a gradient, and one step from there with it")
def deq():
    def f(p, x, z):
        return jnp.tanh(0.1 * z @ p["w"] + x)

    def loss(p, b):
        x = b["x"] @ p["in"] + p["b"]
        z = lax.stop_gradient(equilibrium(f, lax.stop_gradient(p), lax.stop_gradient(x)))
        return cross_entropy(f(p, x, z) @ p["head"], b["y"])

    params = tree(**{"in": (D, H), "b": (H,), "w": (H, H), "head": (H, 3)})
    return loss, params, {"x": data(0, D), "y": tokens(0, below=3)}


@specimen("DEQ with an implicit gradient", "`jax.custom_vjp` around a fixed point", gradient=("w",))
def deq_implicit():
    def f(p, x, z):
        return jnp.tanh(0.1 * z @ p["w"] + x)

    @jax.custom_vjp
    def solve(p, x):
        return equilibrium(f, p, x)

    def forward(p, x):
        z = solve(p, x)
        return z, (p, x, z)

    def backward(kept, g):
        p, x, z = kept
        _, pull = jax.vjp(lambda z: f(p, x, z), z)
        u = lax.fori_loop(0, 20, lambda _, u: g + pull(u)[0], g)
        return jax.vjp(lambda p, x: f(p, x, z), p, x)[1](u)

    solve.defvjp(forward, backward)

    def loss(p, b):
        return cross_entropy(solve({"w": p["w"]}, b["x"] @ p["in"]) @ p["head"], b["y"])

    return loss, tree(**{"in": (D, H), "w": (H, H), "head": (H, 3)}), {"x": data(0, D), "y": tokens(0, below=3)}


@specimen("time first", "sequences `[time, n, features]` throughout, transposed inside the loss")
def time_first():
    def loss(p, b):
        x = jnp.swapaxes(b["x"], 0, 1)
        h = jnp.tanh(x @ p["w"] + p["b"])
        mixed = jnp.einsum("tnd,sd->snd", h, jnp.eye(T, H)) + h
        return cross_entropy((mixed @ p["head"]).mean(0), b["y"])

    return loss, tree(w=(D, H), b=(H,), head=(H, 3)), sequences()
