"""Test networks in flax linen, flax nnx and bare `jax.numpy`, and parameters in any container."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax

import kfac
from checking import check_all, check_kronecker, check_vectors, kinds, kronecker, normal, run
from oracle import Geometry, Hook, explicit_padding, truth

N, T = 3, 4
EPS = 1e-5
SOFTMAX = 1e-6  # nnx computes it in float32


def mean_loss(y, t):
    y = y.reshape(y.shape[0], -1)
    return jnp.mean(jnp.sum(jnp.tanh(y) * t[:, : y.shape[1]], axis=1) + 0.5 * jnp.sum(jnp.sin(y), axis=1) ** 2)


def randomised(params):
    """Draw every leaf anew, so that errors cannot hide behind a scale of 1 or a zero bias."""
    flat, tree = jax.tree.flatten(params)
    dtype = jnp.result_type(float)
    return jax.tree.unflatten(tree, [normal(30 + k, *leaf.shape, dtype=dtype) / 2 for k, leaf in enumerate(flat)])


def shapes_of(model, *inputs, **options):
    return jax.eval_shape(functools.partial(model.init, **options), jax.random.key(0), *inputs)


# -- flax linen --------------------------------------------------------------------------------------------------------


def hooked(hook, name="{}"):
    """Return an interceptor of linen's methods that calls the hook after each dense layer and convolution."""

    def interceptor(next_fun, args, kwargs, context):
        y = next_fun(*args, **kwargs)
        module = context.module
        if context.method_name != "__call__":
            return y
        x, own = args[0] if args else None, name.format("/".join(module.path))
        if isinstance(module, nn.Embed):
            return hook.layer(own, jax.nn.one_hot(x, module.num_embeddings, dtype=y.dtype), y)
        if isinstance(module, nn.Dense):
            return hook.layer(own, x, y, bias=module.use_bias)
        if isinstance(module, nn.DenseGeneral):
            inputs = 1 if isinstance(module.axis, int) else len(module.axis)
            outputs = 1 if isinstance(module.features, int) else len(module.features)
            a = x.reshape(*x.shape[: x.ndim - inputs], -1)
            return hook.layer(own, a, y, out=outputs, bias=module.use_bias)
        if isinstance(module, nn.Conv):
            strides = tuple(np.broadcast_to(module.strides, len(module.kernel_size)).tolist())
            ones = (1,) * len(strides)
            padding = explicit_padding(module.padding, x.shape[1:-1], module.kernel_size, strides, ones)
            geometry = Geometry(module.kernel_size, strides, padding, ones, ones)
            return hook.layer(own, x, y, bias=module.use_bias, conv=geometry)
        return y

    return nn.intercept_methods(interceptor)


class Convolutional(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Conv(3, (3, 3), strides=2, param_dtype=x.dtype, name="conv")(x)
        x = nn.GroupNorm(num_groups=1, param_dtype=x.dtype, name="norm")(x)
        x = nn.Conv(4, (2, 2), padding="VALID", use_bias=False, param_dtype=x.dtype, name="pointwise")(jnp.tanh(x))
        return nn.Dense(2, param_dtype=x.dtype, name="head")(jnp.tanh(x).mean((1, 2)))


class Attention(nn.Module):
    """A pre-norm transformer block."""

    @nn.compact
    def __call__(self, x):
        dtype = dict(param_dtype=x.dtype)
        y = nn.LayerNorm(name="before_attention", **dtype)(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=2, name="attention", **dtype)(y, y)
        y = nn.RMSNorm(name="before_mlp", **dtype)(x)
        return x + nn.Dense(4, name="down", **dtype)(nn.gelu(nn.Dense(5, name="up", **dtype)(y)))


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        dtype = jnp.result_type(float)
        x = nn.Embed(7, 4, param_dtype=dtype, name="embed")(tokens)
        x = x + self.param("positions", nn.initializers.normal(), (1, T, 4), dtype)
        x = Attention(name="block")(x)
        return nn.Dense(3, param_dtype=dtype, use_bias=False, name="head")(x)


CONVOLUTIONAL = {"conv": "conv", "head": "dense", "norm": "unitwise", "pointwise": "conv"}
TRANSFORMER = {
    "block/attention/key": "dense",
    "block/attention/out": "dense",
    "block/attention/query": "dense",
    "block/attention/value": "dense",
    "block/before_attention": "unitwise",
    "block/before_mlp": "unitwise",
    "block/down": "dense",
    "block/up": "dense",
    "embed": "embedding",
    "head": "dense",
    "positions": "diagonal",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "x", "expected", "wrap"),
    [
        (Convolutional(), np.random.default_rng(1).normal(size=(N, 5, 6, 2)), CONVOLUTIONAL, lambda f: f),
        (Transformer(), np.arange(N * T, dtype=np.int32).reshape(N, T) % 7, TRANSFORMER, jax.checkpoint),
    ],
    ids=["convolutional", "transformer under remat"],
)
def test_linen(x64, model, x, expected, wrap):
    params = randomised(shapes_of(model, x)["params"])
    batch = (x, normal(2, N, 60))

    def loss(p, x, t):
        return mean_loss(wrap(model.apply)({"params": p}, x), t)

    def reference(hook, p, x, t):
        with hooked(hook):
            return mean_loss(model.apply({"params": p}, x), t)

    layers, _ = check_all(loss, params, batch, truth(reference, params, batch))
    assert kinds(layers) == expected
    for layer in layers:
        if "norm" in layer.name and layer.d_in == 2:
            assert [path.rpartition("/")[2] for path in layer.params] in (["scale", "bias"], ["bias", "scale"])


# tests/statistics/test_factors.py also tests `lax.scan` over the first axis.
@pytest.mark.slow
@pytest.mark.parametrize(("axis", "remat"), [(0, False), (1, True)])
def test_linen_scan_over_transformer_blocks(x64, axis, remat):
    class Body(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return (nn.remat(Attention) if remat else Attention)(name="block")(x), None

    stack = nn.scan(Body, variable_axes={"params": axis}, split_rngs={"params": True}, length=2)()
    x = normal(1, N, T, 4)
    params = randomised(shapes_of(stack, x, None)["params"])
    batch = (x, normal(2, N, 60))

    def loss(p, x, t):
        return mean_loss(stack.apply({"params": p}, x, None)[0], t)

    def reference(hook, p, x, t):
        for k in range(2):
            with hooked(hook, f"block/{{}}[{k}]"):
                own = jax.tree.map(lambda leaf, k=k: jnp.take(leaf, k, axis=axis), p["block"])
                x = Attention().apply({"params": own}, x)
        return mean_loss(x, t)

    layers, _ = check_all(loss, params, batch, truth(reference, params, batch))
    assert {layer.name: layer.kind for layer in layers} == {
        name: kind for name, kind in TRANSFORMER.items() if name.startswith("block/")
    }
    assert {layer.copies for layer in kronecker(layers)} == {2}
    assert all(len(layer.params) == 2 for layer in kronecker(layers))


# -- batch norm, in three frameworks -----------------------------------------------------------------------------------


def batch_norm_network(hook, p, x, t, *, mean=None, var=None):
    """Compute a convolution, batch norm and a dense layer by hand, with a scale and a shift for each example."""
    numbers = ("NHWC", "HWIO", "NHWC")
    y = lax.conv_general_dilated(x, p["conv"]["kernel"], (1, 1), "SAME", dimension_numbers=numbers)
    geometry = Geometry((3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), (1, 1))
    y = hook.layer("conv", x, y, conv=geometry)
    mean = jnp.mean(y, (0, 1, 2)) if mean is None else mean
    var = jnp.mean((y - mean) ** 2, (0, 1, 2)) if var is None else var
    scale = hook.vector("norm/scale", p["norm"]["scale"], len(x))[:, None, None]
    shift = hook.vector("norm/bias", p["norm"]["bias"], len(x))[:, None, None]
    y = jnp.tanh((y - mean) / jnp.sqrt(var + EPS) * scale + shift).mean((1, 2))
    y = hook.layer("head", y, y @ p["head"]["kernel"] + p["head"]["bias"], bias=True)
    return mean_loss(y, t)


class LinenBatchNorm(nn.Module):
    train: bool

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(3, (3, 3), use_bias=False, param_dtype=x.dtype, name="conv")(x)
        x = nn.BatchNorm(use_running_average=not self.train, param_dtype=x.dtype, name="norm")(x)
        return nn.Dense(2, param_dtype=x.dtype, name="head")(jnp.tanh(x).mean((1, 2)))


class NnxBatchNorm(nnx.Module):
    def __init__(self, rngs):
        dtype = jnp.result_type(float)
        self.conv = nnx.Conv(2, 3, (3, 3), use_bias=False, param_dtype=dtype, rngs=rngs)
        self.norm = nnx.BatchNorm(3, param_dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(3, 2, param_dtype=dtype, rngs=rngs)

    def __call__(self, x):
        return self.head(jnp.tanh(self.norm(self.conv(x))).mean((1, 2)))


NETWORK = {"conv": "conv", "head": "dense", "norm": "unitwise"}
PARAMS = {
    "conv": {"kernel": (3, 3, 2, 3)},
    "head": {"bias": (2,), "kernel": (3, 2)},
    "norm": {"bias": (3,), "scale": (3,)},
}


def drawn(shapes):
    flat, tree = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    return jax.tree.unflatten(tree, [normal(40 + k, *shape) for k, shape in enumerate(flat)])


def linen_loss(train):
    model = LinenBatchNorm(train)

    def loss(p, x, t):
        stats = {"norm": {"mean": jnp.zeros(3), "var": jnp.ones(3)}}
        y, _ = model.apply({"params": p, "batch_stats": stats}, x, mutable=["batch_stats"])
        return mean_loss(y, t)

    return loss, lambda params: params


def nnx_loss(train):
    graph, state, rest = nnx.split(NnxBatchNorm(nnx.Rngs(0)), nnx.Param, ...)

    def loss(p, x, t):
        model = nnx.merge(graph, p, jax.tree.map(lambda leaf: leaf.astype(float), rest))
        (model.train if train else model.eval)()
        return mean_loss(model(x), t)

    def to_state(params):
        def leaf(path, _):
            module, name = (key.key for key in path[:2])
            return params[module][name]

        return jax.tree_util.tree_map_with_path(leaf, state)

    return loss, to_state


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("framework", [linen_loss, nnx_loss])
def test_batch_norm_in_flax(x64, framework, train):
    loss, convert = framework(train)
    params, batch = drawn(PARAMS), (normal(1, N, 4, 3, 2), normal(2, N, 60))
    averages = {} if train else dict(mean=jnp.zeros(3), var=jnp.ones(3))
    known = truth(functools.partial(batch_norm_network, **averages), params, batch, interacting=train)
    layers, _, factors = run(loss, convert(params), batch, rounding=1e-9)
    assert kinds(layers) == NETWORK
    assert set(layers.paths) == {"conv/kernel", "head/bias", "head/kernel", "norm/bias", "norm/scale"}
    check_kronecker(layers, factors, known)
    check_vectors(layers, factors, known.vectors)


def test_nnx_layers_of_a_transformer(x64):
    class Block(nnx.Module):
        def __init__(self, rngs):
            options = dict(param_dtype=jnp.result_type(float), rngs=rngs)
            self.norm = nnx.LayerNorm(4, **options)
            self.attention = nnx.MultiHeadAttention(2, 4, decode=False, **options)
            self.mlp = nnx.List([nnx.Linear(4, 5, **options), nnx.Linear(5, 4, **options)])

        def __call__(self, x):
            x = x + self.attention(self.norm(x))
            return x + self.mlp[1](jnp.tanh(self.mlp[0](x)))

    graph, state, rest = nnx.split(Block(nnx.Rngs(0)), nnx.Param, ...)

    def loss(p, x, t):
        return mean_loss(nnx.merge(graph, p, rest)(x), t)

    batch = (normal(1, N, T, 4), normal(2, N, 60))
    layers, _, factors = run(loss, randomised(state), batch, rounding=SOFTMAX)
    assert kinds(layers) == {
        "attention/key": "dense",
        "attention/out": "dense",
        "attention/query": "dense",
        "attention/value": "dense",
        "mlp/0": "dense",
        "mlp/1": "dense",
        "norm": "unitwise",
    }
    assert all(layer.has_bias for layer in kronecker(layers))
    np.testing.assert_allclose(factors["attention/key"].A, factors["attention/query"].A, rtol=1e-12)


def test_recurrent_cells_are_used_at_every_step():
    """Check the uses and positions of a model that is only traced. Other tests compare scans with brute force."""
    model = nn.RNN(nn.LSTMCell(5))
    x = jnp.zeros((N, T, D))

    def loss(p, x):
        return jnp.mean(model.apply({"params": p}, x)[:, -1] ** 2)

    layers = kfac.find_layers(loss, shapes_of(model, x)["params"], x)
    assert kinds(layers) == {f"cell/{kind}{gate}": "dense" for kind in "hi" for gate in "fgio"}
    assert {(layer.uses, layer.positions) for layer in layers} == {(T, T)}


# -- attention ---------------------------------------------------------------------------------------------------------

HEADS, HEAD, D = 2, 3, 6
ATTENTION = {
    **{name: {"kernel": (D, HEADS, HEAD), "bias": (HEADS, HEAD)} for name in ("query", "key", "value")},
    "out": {"kernel": (HEADS, HEAD, D), "bias": (D,)},
}


def attention(hook, p, x, t):
    """Compute attention with kernels `[d, heads, head_dim]` and `[heads, head_dim, d]`, as frameworks store them."""

    def project(name):
        y = jnp.einsum("ntd,dhk->nthk", x, p[name]["kernel"]) + p[name]["bias"]
        return hook.layer(name, x, y, out=2, bias=True)

    query, key, value = map(project, ("query", "key", "value"))
    weights = jax.nn.softmax(jnp.einsum("nqhk,nshk->nhqs", query / np.sqrt(HEAD), key), axis=-1)
    mixed = jnp.einsum("nhqs,nshk->nqhk", weights, value)
    y = jnp.einsum("nqhk,hkd->nqd", mixed, p["out"]["kernel"]) + p["out"]["bias"]
    return mean_loss(hook.layer("out", mixed.reshape(*mixed.shape[:2], -1), y, bias=True), t)


def einsum_attention(p, x, t):
    return attention(Hook(), p, x, t)


def vmapped_attention(p, x, t):
    """Compute attention as a model of a single sequence under `vmap`."""

    def one(x):
        query, key, value = (
            jnp.einsum("td,dhk->htk", x, p[n]["kernel"]) + p[n]["bias"][:, None] for n in ("query", "key", "value")
        )
        weights = jax.nn.softmax(query @ key.swapaxes(1, 2) / np.sqrt(HEAD), axis=-1)
        return jnp.einsum("hqk,hkd->qd", weights @ value, p["out"]["kernel"]) + p["out"]["bias"]

    return mean_loss(jax.vmap(one)(x), t)


def linen_attention(p, x, t):
    module = nn.MultiHeadDotProductAttention(num_heads=HEADS, param_dtype=x.dtype)
    return mean_loss(module.apply({"params": p}, x, x), t)


def nnx_attention(p, x, t):
    module = nnx.MultiHeadAttention(HEADS, D, decode=False, param_dtype=x.dtype, rngs=nnx.Rngs(0))
    graph, state, rest = nnx.split(module, nnx.Param, ...)
    own = jax.tree_util.tree_map_with_path(lambda path, _: p[path[0].key][path[1].key], state)
    return mean_loss(nnx.merge(graph, own, rest)(x), t)


@pytest.mark.parametrize("loss", [einsum_attention, vmapped_attention, linen_attention, nnx_attention])
def test_attention(x64, loss):
    params, batch = drawn(ATTENTION), (normal(1, N, T, D), normal(2, N, 60))
    # nnx computes a part of its attention in float32 for any input dtype, which changes the loss by 1e-6.
    tolerance = 1e-5 if loss is nnx_attention else 1e-9
    layers, _ = check_all(loss, params, batch, truth(attention, params, batch), rounding=1e-10, tolerance=tolerance)
    assert kinds(layers) == dict.fromkeys(("key", "out", "query", "value"), "dense")
    assert (layers["query"].d_in, layers["query"].d_out) == (D + 1, HEADS * HEAD)


@pytest.mark.parametrize("spelling", ["einsum", "vmap", "scan"])
def test_a_mixture_of_experts_has_a_block_for_each_expert(x64, spelling):
    """Check kernels with an expert axis that inputs and outputs share. A router weights each expert's inputs."""
    experts = 3

    def network(p, x, t, apply):
        gates = jax.nn.softmax(x @ p["router"]["w"], axis=-1)
        routed = jnp.einsum("nte,ntd->entd", gates, x)  # the experts' inputs, with the experts first
        return mean_loss(apply(p["experts"]["w"], p["experts"]["b"], routed).sum(0), t)

    def apply(w, b, routed):
        if spelling == "einsum":
            return jnp.tanh(jnp.einsum("entd,edf->entf", routed, w) + b[:, None, None])
        if spelling == "vmap":
            return jax.vmap(lambda w, b, x: jnp.tanh(x @ w + b))(w, b, routed)
        return lax.scan(lambda c, each: (c, jnp.tanh(each[2] @ each[0] + each[1])), 0.0, (w, b, routed))[1]

    def reference(hook, p, x, t):
        gates = jax.nn.softmax(hook.layer("router", x, x @ p["router"]["w"]), axis=-1)
        total = 0.0
        for k in range(experts):
            own = gates[..., k, None] * x
            y = own @ p["experts"]["w"][k] + p["experts"]["b"][k]
            total = total + jnp.tanh(hook.layer(f"experts[{k}]", own, y, bias=True))
        return mean_loss(total, t)

    params = drawn({"experts": {"w": (experts, D, 4), "b": (experts, 4)}, "router": {"w": (D, experts)}})
    batch = (normal(1, N, T, D), normal(2, N, 60))
    layers, factors = check_all(lambda p, x, t: network(p, x, t, apply), params, batch, truth(reference, params, batch))
    assert layers["experts"].copies == experts and factors["experts"].A.shape == (experts, D + 1, D + 1)


# -- kernels that are computed from parameters -------------------------------------------------------------------------


class Standardised(nn.Module):
    """A convolution with weight standardisation, as in Big Transfer."""

    @nn.compact
    def __call__(self, x):
        w = self.param("kernel", nn.initializers.lecun_normal(), (3, 3, x.shape[-1], 4))
        w = (w - w.mean((0, 1, 2))) / (w.std((0, 1, 2)) + 1e-5)
        y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return y * self.param("gain", nn.initializers.ones, (4,))


def check_derived(loss, params, x, operation):
    layers = kfac.find_layers(loss, params, x)
    (kernel,) = (layer for layer in layers if layer.params[0].endswith("kernel"))
    assert kernel.kind == "gradient-factors" and re.match(operation, kernel.note), kernel.note
    with pytest.raises(kfac.UnsupportedLayerError, match=rf"kernel' is read by {operation}(.|\n)*rules="):
        kfac.find_layers(loss, params, x, strict=True)
    assert "skipped" in kinds(kfac.find_layers(loss, params, x, rules={"kernel": "skip"}, strict=True)).values()


class Normalised(nn.Module):
    wrapper: Any
    layer: Any

    @nn.compact
    def __call__(self, x):
        options = {"update_stats": True} if self.wrapper is nn.SpectralNorm else {}
        return self.wrapper(self.layer)(x, **options)


@pytest.mark.parametrize(
    "model",
    [
        Normalised(nn.WeightNorm, nn.Dense(4)),
        Normalised(nn.SpectralNorm, nn.Dense(4)),
        Normalised(nn.WeightNorm, nn.Conv(4, (3, 3))),
        Normalised(nn.SpectralNorm, nn.Conv(4, (3, 3))),
        Standardised(),
    ],
    ids=["dense weight norm", "dense spectral norm", "conv weight norm", "conv spectral norm", "standardised"],
)
def test_derived_kernels_of_linen_have_the_gradients_own_factors(model):
    x = normal(1, N, 5, 6, 2, dtype=jnp.float32)
    variables = dict(model.init(jax.random.key(0), x))
    params, stats = variables.pop("params"), variables

    def loss(p, x):
        y, _ = model.apply({"params": p, **stats}, x, mutable=list(stats))
        return jnp.mean(jnp.sin(y))

    check_derived(loss, params, x, r"(dot_general|conv_general_dilated)")


@pytest.mark.parametrize("wrapper", ["WeightNorm", "SpectralNorm"])
def test_derived_kernels_of_nnx_have_the_gradients_own_factors(wrapper):
    rngs = nnx.Rngs(0)
    model = getattr(nnx, wrapper)(nnx.Linear(5, 4, rngs=rngs), rngs=rngs)
    graph, state, rest = nnx.split(model, nnx.Param, ...)

    def loss(p, x):
        own = jax.tree.map(lambda leaf: leaf + 0, rest)  # variables that belong to this trace
        return jnp.mean(jnp.sin(nnx.merge(graph, p, own)(x)))

    check_derived(loss, state, normal(1, N, 5, dtype=jnp.float32), "dot_general")


# -- containers --------------------------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Dense:
    value: Any
    bias: Any


@pytest.mark.parametrize(
    ("params", "read", "paths"),
    [
        ({"w": (5, 2), "b": (2,)}, lambda p: (p["w"], p["b"]), ("b", "w")),
        ([(5, 2), (2,)], lambda p: p, ("0", "1")),
        (([(5, 2)], {"b": (2,)}), lambda p: (p[0][0], p[1]["b"]), ("0/0", "1/b")),
        ((Dense((5, 2), (2,)),), lambda p: (p[0].value, p[0].bias), ("0/value", "0/bias")),
        ({"a": Dense((5, 2), (2,))}, lambda p: (p["a"].value, p["a"].bias), ("a/value", "a/bias")),
        ({7: (5, 2), 9: (2,)}, lambda p: (p[7], p[9]), ("7", "9")),
    ],
    ids=["dict", "list", "nested", "dataclass", "dataclass-in-dict", "integers"],
)
def test_containers(x64, params, read, paths):
    is_shape = lambda x: isinstance(x, tuple) and all(isinstance(size, int) for size in x)  # noqa: E731
    params = jax.tree.map(lambda shape: normal(len(shape), *shape), params, is_leaf=is_shape)

    def loss(p, x, t):
        w, b = read(p)
        return mean_loss(x @ w + b, t)

    layers, grads, factors = run(loss, params, (normal(3, N, 5), normal(4, N, 60)))
    assert layers.paths == paths
    assert len(layers) == 1
    assert jax.tree.structure(grads) == jax.tree.structure(params)
    assert factors[layers[0].name].A.shape == (6, 6)


def test_a_single_array_as_parameters(x64):
    layers, _, _ = run(lambda w, x: jnp.mean(jnp.tanh(x @ w)), normal(1, 5, 2), (normal(3, N, 5),))
    assert [(layer.name, layer.params) for layer in layers] == [("params", ("params",))]


def test_two_leaves_of_one_path_are_an_error():
    params = {"a/b": jnp.ones(2), "a": {"b": jnp.ones(2)}}
    with pytest.raises(ValueError, match="two parameter leaves have the path 'a/b'"):
        kfac.find_layers(lambda p: jnp.sum(p["a/b"]), params)


# -- ResNet-50, traced only --------------------------------------------------------------------------------------------


class Bottleneck(nn.Module):
    width: int
    strides: int = 1
    project: bool = False

    @nn.compact
    def __call__(self, x, _=None):
        conv = functools.partial(nn.Conv, use_bias=False, dtype=jnp.bfloat16)
        norm = functools.partial(nn.BatchNorm, use_running_average=False, dtype=jnp.bfloat16)
        y = nn.relu(norm()(conv(self.width, (1, 1))(x)))
        y = nn.relu(norm()(conv(self.width, (3, 3), self.strides)(y)))
        y = norm(scale_init=nn.initializers.zeros)(conv(4 * self.width, (1, 1))(y))
        if self.project:
            x = norm(name="norm_projection")(conv(4 * self.width, (1, 1), self.strides, name="projection")(x))
        return nn.relu(x + y), None


class ResNet50(nn.Module):
    remat: bool = False
    scan: bool = False
    depths: tuple[int, ...] = (3, 4, 6, 3)

    @nn.compact
    def __call__(self, x):
        block = nn.remat(Bottleneck, prevent_cse=False) if self.remat else Bottleneck
        x = nn.Conv(64, (7, 7), 2, use_bias=False, dtype=jnp.bfloat16, name="stem")(x)
        x = nn.relu(nn.BatchNorm(use_running_average=False, dtype=jnp.bfloat16, name="stem_norm")(x))
        x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
        for stage, depth in enumerate(self.depths):
            width, strides = 64 * 2**stage, 1 if stage == 0 else 2
            x, _ = block(width, strides, project=True, name=f"stage{stage}_first")(x)
            if self.scan:
                axes = {"params": 0, "batch_stats": 0}
                rest = nn.scan(block, variable_axes=axes, split_rngs={"params": True}, length=depth - 1)
                x, _ = rest(width, name=f"stage{stage}_rest")(x, None)
                continue
            for k in range(1, depth):
                x, _ = block(width, name=f"stage{stage}_{k}")(x)
        return nn.Dense(1000, dtype=jnp.bfloat16, name="head")(x.mean((1, 2)))


def of_images(model, examples):
    """Return the model's loss and the shapes of the loss's arguments."""
    images = jax.ShapeDtypeStruct((examples, 224, 224, 3), jnp.bfloat16)
    labels = jax.ShapeDtypeStruct((examples,), jnp.int32)
    variables = shapes_of(model, images)

    def loss(params, stats, images, labels):
        logits, stats = model.apply({"params": params, "batch_stats": stats}, images, mutable=["batch_stats"])
        logits = jax.nn.log_softmax(logits.astype(jnp.float32))
        return -jnp.mean(jnp.take_along_axis(logits, labels[:, None], axis=1)), stats

    return loss, (variables["params"], variables["batch_stats"], images, labels)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"remat": True},
        {"scan": True},
        {"remat": True, "scan": True},
    ],
    ids=str,
)
def test_every_parameter_of_a_bf16_resnet50_has_a_kronecker_or_unitwise_block(options):
    loss, arguments = of_images(ResNet50(**options), 32)
    layers = kfac.find_layers(loss, *arguments, has_aux=True, max_factor_dim=8192)
    assert sum(layer.copies for layer in kronecker(layers)) == 54
    assert len(kronecker(layers)) == (1 + 4 * 4 + 3 * 4 + 1 if options.get("scan") else 54)
    norms = [layer for layer in layers if layer.kind == "unitwise"]
    assert len(norms) == len(kronecker(layers)) - 1
    assert all(layer.d_in == 2 for layer in norms)
    assert len(layers) == len(norms) + len(kronecker(layers))
    assert sum(layer.num_params for layer in layers) == 25_557_032
    elements = sum(int(np.prod(shape)) for layer in kronecker(layers) for shape in layer.factor_shapes.values())
    assert round(elements / 1e6, 1) == 153.9
    assert layers["head"].d_in == 2049
    assert layers["stem"].positions == 112**2


@pytest.mark.slow
def test_layers_depend_neither_on_jit_nor_on_the_number_of_images():
    model = ResNet50(depths=(2,))
    (loss, arguments), (_, one) = of_images(model, 32), of_images(model, 1)
    layers, other = (kfac.find_layers(loss, *shapes, has_aux=True) for shapes in (arguments, one))
    assert len(kronecker(layers)) == 9
    assert layers == other and hash(layers) == hash(other)
    assert layers == kfac.find_layers(jax.jit(loss), *arguments, has_aux=True)


@pytest.mark.slow
def test_a_scan_over_blocks_under_remat_has_a_copy_for_each():
    loss, arguments = of_images(ResNet50(remat=True, scan=True, depths=(3,)), 32)
    layers = kfac.find_layers(loss, *arguments, has_aux=True)
    assert sorted(layer.copies for layer in kronecker(layers)) == [1] * 6 + [2] * 3
    assert [layer.kind for layer in layers].count("unitwise") == 8 and len(layers) == 17
