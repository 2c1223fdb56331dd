"""Test `jit` over meshes with explicit axes, as `jax.make_mesh` makes them by default, and with automatic axes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import kfac
from checking import normal
from problem import plain_kfac

N, T, C = 8, 4, 3


def dense(p, b):
    h = jnp.tanh(b["x"].mean(1) @ p["in"]["w"] + p["in"]["b"])
    h = (h - h.mean(-1, keepdims=True)) * p["norm"]["scale"] + p["norm"]["shift"]
    return entropy(h @ p["out"], b["y"])


def scanned(p, b):
    """Compute a loss with layers in a scan under remat, where each token is an example of the marked output."""

    @jax.checkpoint
    def block(h, q):
        return h + jnp.tanh(h * q["scale"] @ q["w"] + q["b"]), None

    h, _ = lax.scan(block, b["x"] @ p["in"]["w"] + p["in"]["b"], p["blocks"])
    return entropy(kfac.mark_output(h @ p["out"], "categorical"), b["y"][:, None])


def convolution(p, b):
    image = b["x"][..., None]
    h = lax.conv_general_dilated(image, p["conv"], (2, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return entropy(jnp.tanh(h).mean((1, 2)) @ p["out"], b["y"])


def entropy(z, y):
    return -jnp.mean(jnp.sum(y * jax.nn.log_softmax(z), axis=-1))


def parameters(name):
    def array(seed, *shape):
        return 0.5 * normal(seed, *shape, dtype=np.float32)

    first = {"w": array(0, 8, 16), "b": array(1, 16)}
    if name == "dense":
        return {"in": first, "norm": {"scale": 1 + array(2, 16), "shift": array(3, 16)}, "out": array(4, 16, C)}
    if name == "scanned":
        blocks = {"scale": 1 + array(2, 2, 16), "w": array(5, 2, 16, 16), "b": array(6, 2, 16)}
        return {"in": first, "blocks": blocks, "out": array(4, 16, C)}
    return {"conv": array(7, 3, 3, 1, 16), "out": array(4, 16, C)}


LOSSES = {"dense": dense, "scanned": scanned, "convolution": convolution}


def batches():
    labels = jax.nn.one_hot(jnp.arange(N) % C, C)
    return [{"x": normal(k, N, T, 8, dtype=np.float32), "y": labels} for k in range(10, 13)]


def trained(name, fn, tx, put=lambda params, data: (params, data)):
    params = parameters(name)
    state = None

    @jax.jit
    def step(params, state, batch):
        loss, grads, factors = fn(params, batch)
        state = kfac.observe(state, factors)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    for batch in batches():
        params, batch = put(params, batch)
        state = tx.init(params) if state is None else state
        params, state, _ = step(params, state, batch)
    return params


@functools.cache
def alone(name):
    layers = kfac.find_layers(LOSSES[name], parameters(name), batches()[0])
    tx = plain_kfac(0.1, layers, damping=1e-2)
    return layers, jax.device_get(trained(name, kfac.value_and_grad(LOSSES[name], layers), tx))


def gathered(loss):
    """Return a loss that gathers its sharded parameters, as explicit axes require."""

    def of_whole(p, b):
        return loss(jax.tree.map(lambda leaf: jax.reshard(leaf, P(*[None] * leaf.ndim)), p), b)

    return of_whole


def split_over(mesh, leaf):
    """Return the sharding of fully sharded data parallelism, which splits the first divisible axis."""
    axis = next((k for k, size in enumerate(leaf.shape) if size % mesh.size == 0), None)
    return NamedSharding(mesh, P(*["data" if k == axis else None for k in range(leaf.ndim)]))


def grid():
    """Yield all combinations. Each choice occurs in at least one default test."""
    for name in LOSSES:
        for kind in (AxisType.Explicit, AxisType.Auto):
            for form in ("replicated", "sharded"):
                explicit = kind == AxisType.Explicit
                usual = explicit and (name, form) in {("scanned", "replicated"), ("convolution", "sharded")}
                usual |= not explicit and (name, form) == ("dense", "sharded")
                marks = () if usual else pytest.mark.slow
                yield pytest.param(name, kind, form, id=f"{name}-{kind}-{form}", marks=marks)


@pytest.mark.parametrize(("name", "kind", "form"), list(grid()))
def test_a_mesh_is_one_device(name, kind, form):
    layers, expected = alone(name)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,), devices=jax.devices()[:2])

    def put(params, data):
        place = (lambda leaf: NamedSharding(mesh, P())) if form == "replicated" else functools.partial(split_over, mesh)
        data = jax.device_put(data, NamedSharding(mesh, P("data")))
        return jax.tree.map(lambda leaf: jax.device_put(leaf, place(leaf)), params), data

    tx = plain_kfac(0.1, layers, damping=1e-2, distribution=kfac.Distribution(mesh=mesh))
    loss = gathered(LOSSES[name]) if form == "sharded" and kind == AxisType.Explicit else LOSSES[name]
    with jax.set_mesh(mesh):
        found = trained(name, kfac.value_and_grad(loss, layers), tx, put)
    for path, leaf in jax.tree_util.tree_flatten_with_path(found)[0]:
        if form == "sharded" and kind == AxisType.Explicit:
            assert leaf.sharding.is_equivalent_to(split_over(mesh, leaf), leaf.ndim), path
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), jax.device_get(found), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("convolution", {"preconditioner": kfac.Cholesky()}),
        ("dense", {"trust_ratio": 0.1}),
        ("dense", {"kl_clip": 1e-4}),
        ("scanned", {"preconditioner": kfac.Cholesky()}),
        ("convolution", {"kl_clip": 1e-4}),
    ],
)
@pytest.mark.parametrize("last", [False, True], ids=["rows", "columns"])
def test_lengths_of_steps_with_sharded_parameters(name, options, last):
    """Check explicit axes, where sums and reshapes of a split leaf must give a sharding."""
    layers, _ = alone(name)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])

    def place(leaf):
        axes = range(leaf.ndim)[::-1] if last else range(leaf.ndim)
        axis = next((k for k in axes if leaf.shape[k] % mesh.size == 0), None)
        return NamedSharding(mesh, P(*["data" if k == axis else None for k in range(leaf.ndim)]))

    def put(params, data):
        data = jax.device_put(data, NamedSharding(mesh, P("data")))
        return jax.tree.map(lambda leaf: jax.device_put(leaf, place(leaf)), params), data

    make = functools.partial(plain_kfac, nesterov=True) if {"trust_ratio", "kl_clip"} & options.keys() else kfac.kfac
    tx = make(0.1, layers, **options)
    expected = trained(name, kfac.value_and_grad(LOSSES[name], layers), tx)
    tx = make(0.1, layers, **options, distribution=kfac.Distribution(mesh=mesh))
    with jax.set_mesh(mesh):
        found = trained(name, kfac.value_and_grad(gathered(LOSSES[name]), layers), tx, put)
    for path, leaf in jax.tree_util.tree_flatten_with_path(found)[0]:
        assert leaf.sharding.is_equivalent_to(place(leaf), leaf.ndim), path
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), jax.device_get(found), expected)


@pytest.mark.slow
def test_micro_batches_with_sharded_parameters():
    """Check explicit axes, where the sums over micro-batches have the gradients' sharding."""
    layers, expected = alone("dense")
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])

    def put(params, data):
        data = jax.device_put(data, NamedSharding(mesh, P("data")))
        return jax.tree.map(lambda leaf: jax.device_put(leaf, split_over(mesh, leaf)), params), data

    tx = plain_kfac(0.1, layers, damping=1e-2, distribution=kfac.Distribution(mesh=mesh))
    with jax.set_mesh(mesh):
        fn = kfac.microbatch(kfac.value_and_grad(gathered(dense), layers), 2)
        found = trained("dense", fn, tx, put)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), jax.device_get(found), expected)
