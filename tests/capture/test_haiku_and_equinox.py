"""Check that the layers of haiku and equinox networks are found, and that a few steps train the networks."""

from __future__ import annotations

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kfac
from checking import kinds, normal
from oracle import truth

N, T, V, D = 8, 4, 7, 6


def check_training(loss, params, batch, expected):
    layers = kfac.find_layers(loss, params, *batch)
    assert kinds(layers) == expected
    tx = kfac.kfac(0.1, layers, damping=1e-2, momentum=0.0, adaptive_layer_rates=False)

    @jax.jit
    def step(params, state):
        value, grads, factors = kfac.value_and_grad(loss, layers)(params, *batch)
        state = kfac.observe(state, factors)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value, grads, factors

    state = jax.jit(tx.init)(params)
    expected_grads = jax.jit(jax.grad(loss))(params, *batch)
    new, state, first, grads, factors = step(params, state)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    for _ in range(4):
        new, state, last, *_ = step(new, state)
    assert jax.tree.structure(new) == jax.tree.structure(params)
    assert float(last) < float(first)
    return layers, factors


def text():
    return np.random.default_rng(0).integers(0, V, (N, T)).astype(np.int32), normal(1, N, 3, dtype=jnp.float32)


def images():
    return normal(2, N, 6, 5, 2, dtype=jnp.float32), normal(1, N, 3, dtype=jnp.float32)


def squared_error(y, t):
    return jnp.mean(jnp.sum((y - t) ** 2, axis=-1))


def check_embedding_and_head(factors, embedding, head, known):
    """Compare the first and the last layer with brute force. The blocks between them are not compared."""
    for found, name in ((factors[embedding], "embedding"), (factors[head], "head")):
        a, g = known.kronecker(name)
        a_found = np.diag(found.A) if found.A.ndim == 1 else found.A
        np.testing.assert_allclose(a_found, a, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found.G, g, rtol=1e-4, atol=1e-5 * np.abs(g).max())


# -- haiku -------------------------------------------------------------------------------------------------------------


def haiku_transformer(ids):
    x = hk.Embed(V, D, name="embed")(ids)
    init = hk.initializers.VarianceScaling(1.0)
    y = hk.LayerNorm(-1, create_scale=True, create_offset=True, name="norm")(x)
    x = x + hk.MultiHeadAttention(2, 3, w_init=init, model_size=D, name="attention")(y, y, y)
    return hk.Linear(3, name="head")(jnp.tanh(x).mean(1))


@pytest.mark.slow  # test_zoo.py has other models in this framework
def test_haiku_transformer():
    model = hk.without_apply_rng(hk.transform(haiku_transformer))
    batch = text()
    params = jax.jit(model.init)(jax.random.key(0), batch[0])

    def loss(p, ids, t):
        return squared_error(model.apply(p, ids), t)

    layers, factors = check_training(
        loss,
        params,
        batch,
        {
            "attention/key": "dense",
            "attention/linear": "dense",
            "attention/query": "dense",
            "attention/value": "dense",
            "embed": "embedding",
            "head": "dense",
            "norm": "unitwise",
        },
    )
    assert layers["attention/linear"].params == ("attention/linear/w", "attention/linear/b")
    assert (layers["norm"].d_in, layers["attention/key"].d_in, layers["attention/key"].positions) == (2, D + 1, T)

    def reference(hook, p, ids, t):
        def intercept(next_f, args, kwargs, context):
            y = next_f(*args, **kwargs)
            if context.method_name != "__call__":
                return y
            if isinstance(context.module, hk.Embed):
                return hook.layer("embedding", jax.nn.one_hot(args[0], V), y)
            return hook.layer("head", args[0], y, bias=True) if context.module.module_name == "head" else y

        def network(ids):
            with hk.intercept_methods(intercept):
                return haiku_transformer(ids)

        return squared_error(hk.without_apply_rng(hk.transform(network)).apply(p, ids), t)

    check_embedding_and_head(factors, "embed", "head", truth(reference, params, batch))


@pytest.mark.slow
def test_haiku_convolutions():
    def network(x):
        x = jnp.tanh(hk.Conv2D(4, 3, stride=2, name="conv")(x))
        x = jnp.tanh(hk.DepthwiseConv2D(2, (2, 2), name="depthwise")(x))
        x = jnp.tanh(hk.Conv2DTranspose(3, 3, stride=2, name="transposed")(x))
        x = hk.GroupNorm(1, name="norm")(x)
        return hk.Linear(3, name="head")(x.reshape(len(x), -1))

    model = hk.without_apply_rng(hk.transform(network))
    batch = images()
    params = jax.jit(model.init)(jax.random.key(0), batch[0])
    layers, _ = check_training(
        lambda p, x, t: squared_error(model.apply(p, x), t),
        params,
        batch,
        {"conv": "conv", "depthwise": "conv", "head": "dense", "norm": "unitwise", "transposed": "conv"},
    )
    assert (layers["depthwise"].copies, layers["depthwise"].d_in, layers["depthwise"].d_out) == (4, 5, 2)


# -- equinox -----------------------------------------------------------------------------------------------------------


class Transformer(eqx.Module):
    """A model of a single example. The loss maps it over the batch."""

    embed: eqx.nn.Embedding
    norm: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 4)
        self.embed = eqx.nn.Embedding(V, D, key=keys[0])
        self.norm = eqx.nn.LayerNorm(D)
        self.attention = eqx.nn.MultiheadAttention(2, D, use_output_bias=True, key=keys[1])
        self.mlp = eqx.nn.MLP(D, D, 5, 1, activation=jnp.tanh, key=keys[2])
        self.head = eqx.nn.Linear(D, 3, key=keys[3])

    def features(self, ids):
        x = jax.vmap(self.embed)(ids)
        return self.after(x)

    def after(self, x):
        y = jax.vmap(self.norm)(x)
        x = x + self.attention(y, y, y)
        return jnp.tanh(x + jax.vmap(self.mlp)(x)).mean(0)

    def __call__(self, ids):
        return self.head(self.features(ids))


@pytest.mark.slow  # test_zoo.py has other models in this framework
def test_equinox_transformer():
    params, static = eqx.partition(eqx.filter_jit(Transformer)(jax.random.key(0)), eqx.is_inexact_array)
    batch = text()

    def loss(p, ids, t):
        return squared_error(jax.vmap(eqx.combine(p, static))(ids), t)

    layers, factors = check_training(
        loss,
        params,
        batch,
        {
            "embed": "embedding",
            "norm": "unitwise",
            "attention/query_proj": "dense",
            "attention/key_proj": "dense",
            "attention/value_proj": "dense",
            "attention/output_proj": "dense",
            "mlp/layers/0": "dense",
            "mlp/layers/1": "dense",
            "head": "dense",
        },
    )
    assert layers["mlp/layers/0"].params == ("mlp/layers/0/weight", "mlp/layers/0/bias")
    assert layers["attention/query_proj"].positions == T

    def reference(hook, p, ids, t):
        model = eqx.combine(p, static)
        x = hook.layer("embedding", jax.nn.one_hot(ids, V), model.embed.weight[ids])
        x = jax.vmap(model.after)(x)
        return squared_error(hook.layer("head", x, jax.vmap(model.head)(x), bias=True), t)

    check_embedding_and_head(factors, "embed", "head", truth(reference, params, batch))


def test_equinox_convolutions():
    @eqx.filter_jit
    def made(key):
        keys = jax.random.split(key, 4)
        return eqx.nn.Sequential(
            [
                eqx.nn.Conv2d(2, 4, 3, stride=2, key=keys[0]),
                eqx.nn.Lambda(jnp.tanh),
                eqx.nn.Conv2d(4, 8, 2, groups=4, key=keys[1]),
                eqx.nn.GroupNorm(2, 8),
                eqx.nn.Lambda(jnp.tanh),
                eqx.nn.ConvTranspose2d(8, 3, 2, stride=2, key=keys[2]),
                eqx.nn.Lambda(jnp.ravel),
                eqx.nn.Linear(48, 3, key=keys[3]),
            ]
        )

    model = made(jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    t = images()[1]
    batch = (normal(2, N, 7, 7, 2, dtype=jnp.float32).transpose(0, 3, 1, 2), t)
    layers, _ = check_training(
        lambda p, x, t: squared_error(jax.vmap(eqx.combine(p, static))(x), t),
        params,
        batch,
        {"layers/0": "conv", "layers/2": "conv", "layers/3": "unitwise", "layers/5": "conv", "layers/7": "dense"},
    )
    assert layers["layers/2"].copies == 4
