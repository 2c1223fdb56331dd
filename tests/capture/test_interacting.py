"""Test models whose examples act on each other, with unit-wise, diagonal and Kronecker blocks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

import kfac
from oracle import relative_error
from zoo.bruteforce import truth
from zoo.specimens import N, Specimen, check, data, tree

pytestmark = pytest.mark.usefixtures("x64")
D, H, T = 4, 5, 3
AXES = {"scale": (H,), "shift": (H,)}


def batch_norm(p, x, average=lambda x: x):
    axes = tuple(range(x.ndim - 1))
    centred = x - average(jnp.mean(x, axes))
    return centred * lax.rsqrt(average(jnp.mean(centred**2, axes)) + 1e-5) * p["scale"] + p["shift"]


def normalised(p, b, average=lambda x: x):
    h = jnp.tanh(batch_norm(p["norm"], b["x"] @ p["in"] + p["table"], average))
    return jnp.mean(jnp.sum((h @ p["out"] + p["b"]) ** 2, (1, 2)))


def network(p, x):
    h = x @ p["in"]
    h = h - h.mean(-1, keepdims=True)
    h = jnp.tanh(h * lax.rsqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-5) * p["norm"]["scale"] + p["norm"]["shift"])
    return h @ p["out"] + p["b"]


def contrastive(p, b):
    """Return a contrastive loss, in which a softmax over the batch compares each example with all others."""
    y = network(p, b["x"][:, 0])
    return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(y @ network(p, b["x"][:, 1]).T)))


def attended(p, b):
    """Return a loss with attention between examples, and a scale for the attention's result."""
    y = network(p, b["x"][:, 0])
    return jnp.mean(jnp.sum((p["gate"] * (jax.nn.softmax(y @ y.T) @ y) + y) ** 2, -1))


COMMON = {"in": (D, H), "norm": AXES, "out": (H, 2), "b": (2,)}
MODELS = {
    "batch norm": (normalised, {**COMMON, "table": (T, H)}),
    "contrastive": (contrastive, COMMON),
    "attended": (attended, {**COMMON, "gate": (2,)}),
}


def case(name):
    loss, shapes = MODELS[name]
    return Specimen(name, "", lambda: (loss, tree(**shapes), {"x": data(0, T, D)}), interacting=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_they_are_those_of_brute_force(name):
    """Check that a reordered batch has the statistics of brute force, with gradients from ordinary back-propagation."""
    layers = kfac.find_layers(*case(name).build())
    kinds = {layer.kind for layer in layers}
    assert kinds >= {"dense", "unitwise"} and not any(layer.kind == "gradient-factors" for layer in layers)
    assert len(layers["norm"].params) == 2
    check(case(name))


def test_a_doubled_batch_changes_nothing():
    loss, params, batch = case("batch norm").build()
    layers = kfac.find_layers(loss, params, batch)
    fn = jax.jit(kfac.value_and_grad(loss, layers))
    once, twice = (fn(params, b) for b in (batch, jax.tree.map(lambda x: jnp.concatenate([x, x]), batch)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), once, twice)


@pytest.mark.slow
@pytest.mark.parametrize("checked", [True, False])
def test_synchronised_over_devices_they_are_those_of_one(checked):
    """Check batch norm with the statistics of all devices: the mean of the devices' blocks is the batch's block."""
    loss, params, batch = case("batch norm").build()
    layers = kfac.find_layers(loss, params, batch)
    expected = truth(loss, params, batch, N)

    def local(params, batch):
        own = lambda p, b: normalised(p, b, lambda x: lax.pmean(x, "devices"))  # noqa: E731
        _, grads, factors = kfac.value_and_grad(own, layers)(params, batch)
        return lax.pmean((grads, factors), "devices")

    mesh = Mesh(np.array(jax.devices()[:3]), ("devices",))
    over, whole = PartitionSpec("devices"), PartitionSpec()
    fn = jax.shard_map(local, mesh=mesh, in_specs=(whole, over), out_specs=whole, check_vma=checked)
    grads, factors = jax.jit(fn)(params, batch)
    for path, grad, true in zip(layers.paths, jax.tree.leaves(grads), jax.tree.leaves(expected.grads), strict=True):
        assert relative_error(grad, np.asarray(true)) < 1e-9, path
    for layer in layers:
        if layer.kind == "dense":
            a, g, _, _ = expected.kronecker(layers, layer)
            assert max(relative_error(factors[layer.name].A, a[0]), relative_error(factors[layer.name].G, g[0])) < 1e-9
        else:
            rows = expected.vectors(layers, layer)
            block = N * np.einsum("nci,ncj->cij", rows, rows)
            assert relative_error(factors[layer.name].F, block) < 1e-9, layer.name


@pytest.mark.slow
def test_micro_batches_have_statistics_of_their_own():
    """Check that factors are means over micro-batches, as on devices whose batch norm is not synchronised."""
    loss, params, batch = case("batch norm").build()
    layers = kfac.find_layers(loss, params, batch)
    fn = kfac.value_and_grad(loss, layers)
    found = kfac.microbatch(fn, 2)(params, batch)[2]
    halves = [fn(params, jax.tree.map(lambda x, k=k: x[3 * k : 3 * k + 3], batch))[2] for k in range(2)]
    mean = jax.tree.map(lambda a, b: (a + b) / 2, *halves)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9), found, mean)
