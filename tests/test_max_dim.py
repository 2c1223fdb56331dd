"""Factors above a bound are kept as their diagonals: those of the whole factors, in every kind of layer."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

import kfac
from checking import normal, run

N, T, V = 8, 3, 7
NUMBERS = ("NHWC", "HWIO", "NHWC")


def loss(p, tokens, images, t):
    """Embedding, dense with a bias, dense without, convolution, grouped convolution, experts, scan."""
    x = jnp.tanh(p["table"][tokens])
    x = jnp.tanh(x @ p["dense"]["w"] + p["dense"]["b"])
    x = jnp.tanh(jnp.einsum("ntd,dhk->nthk", x, p["heads"]))
    x = jnp.einsum("nthk,hkd->nthd", x, p["experts"]).mean(2)
    x, _ = lax.scan(lambda x, wb: (jnp.tanh(x @ wb[0] + wb[1]), None), x, (p["stack"]["w"], p["stack"]["b"]))
    y = lax.conv_general_dilated(images, p["conv"]["w"], (2, 1), ((1, 2), (0, 1)), dimension_numbers=NUMBERS)
    y = jnp.tanh(y + p["conv"]["b"])
    y = lax.conv_general_dilated(
        y, p["grouped"]["w"], (1, 1), "SAME", rhs_dilation=(1, 2), feature_group_count=2, dimension_numbers=NUMBERS
    )
    y = jnp.sin(y + p["grouped"]["b"]).reshape(len(images), -1)
    y = jnp.concatenate([x.reshape(len(x), -1), y], axis=1)
    return jnp.mean(jnp.sum(jnp.sin(y) * t[:, : y.shape[1]], axis=1))


SHAPES = {
    "conv": {"w": (3, 2, 2, 4), "b": (4,)},
    "dense": {"w": (5, 6), "b": (6,)},
    "experts": (2, 4, 5),
    "grouped": {"w": (2, 2, 2, 6), "b": (6,)},
    "heads": (6, 2, 4),
    "stack": {"w": (2, 5, 5), "b": (2, 5)},
    "table": (V, 5),
}


def problem(dtype):
    flat, tree = jax.tree.flatten(SHAPES, is_leaf=lambda x: isinstance(x, tuple))
    params = jax.tree.unflatten(tree, [normal(10 + k, *shape, dtype=dtype) for k, shape in enumerate(flat)])
    tokens = np.random.default_rng(0).integers(0, V, (N, T)).astype(np.int32)
    return params, (tokens, normal(1, N, 4, 3, 2, dtype=dtype), normal(2, N, 100, dtype=dtype))


@pytest.mark.parametrize("max_dim", [1, 5, 6, 8, 100])
def test_a_diagonal_is_that_of_the_whole_factor(x64, max_dim):
    params, batch = problem(jnp.float64)
    whole_layers, grads, whole = run(loss, params, batch)
    layers, same, found = run(loss, params, batch, max_dim=max_dim)
    jax.tree.map(np.testing.assert_array_equal, grads, same)
    assert layers.max_dim == max_dim and (max_dim == 100) == (layers.blocks == whole_layers.blocks)
    for layer in layers:
        for name, size in (("A", layer.d_in), ("G", layer.d_out)):
            expected, value = getattr(whole[layer.name], name), getattr(found[layer.name], name)
            lead = (layer.copies,) if layer.stacked else ()
            table = name == "A" and layer.kind == "embedding"
            if size > max_dim and not table:
                assert value.shape == (*lead, size)
                assert f"{name} has more than max_dim={max_dim} rows" in layer.note
                expected = np.diagonal(expected, axis1=-2, axis2=-1)
            assert (name in layer.diagonal) == (size > max_dim or table)
            np.testing.assert_allclose(value, expected, rtol=1e-9, atol=1e-12)


def test_the_table_and_the_plan_show_it():
    params, batch = problem(jnp.float32)
    layers = kfac.find_layers(loss, params, *batch, max_dim=6)
    row = next(line for line in repr(layers).splitlines() if line.startswith("conv"))
    assert "13 (diagonal)" in row and "A has more than max_dim=6 rows" in row
    whole = kfac.find_layers(loss, params, *batch)
    assert kfac.Assignment(layers).memory_per_device < kfac.Assignment(whole).memory_per_device
    assert sum(kfac.Assignment(layers).cost_per_device) < sum(kfac.Assignment(whole).cost_per_device)


def test_preconditioning_with_diagonals(x64):
    """`(G + sqrt(l)/pi)^-1 V (A + pi sqrt(l))^-1` with diagonal matrices, by dense solves."""
    params, batch = problem(jnp.float64)
    layers = kfac.find_layers(loss, params, *batch, max_dim=5)
    _, grads, factors = jax.jit(kfac.value_and_grad(loss, layers))(params, *batch)
    tx = kfac.scale_by_kfac(layers, damping=2.0**-5)
    updates, _ = jax.jit(tx.update)(grads, tx.init(params), params, factors=factors)
    flat = functools.partial(dict, zip(layers.paths, jax.tree.leaves(grads), strict=True))()
    new = dict(zip(layers.paths, jax.tree.leaves(updates), strict=True))
    for layer in layers:
        gradient = np.asarray(layer.to_matrix([flat[path] for path in layer.params]))
        found = np.asarray(layer.to_matrix([new[path] for path in layer.params]))
        for k in range(layer.copies):
            a, g = (np.asarray(x[k] if layer.stacked else x) for x in (factors[layer.name].A, factors[layer.name].G))
            a, g = (np.diag(x) if x.ndim == 1 else x for x in (a, g))
            pi = np.sqrt(np.trace(a) / len(a) / (np.trace(g) / len(g)))
            a, g = a + pi * np.sqrt(2.0**-5) * np.eye(len(a)), g + np.sqrt(2.0**-5) / pi * np.eye(len(g))
            expected = np.linalg.solve(g, gradient[k]) @ np.linalg.inv(a)
            np.testing.assert_allclose(found[k], expected, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("precondition", ["sharded", "replicated"])
def test_several_devices_are_one(precondition):
    params, batch = problem(jnp.float32)
    layers = kfac.find_layers(loss, params, *batch, max_dim=5)
    mesh = Mesh(np.array(jax.devices()[:4]), ("d",))
    same, split = PartitionSpec(), PartitionSpec("d")

    def step(tx, average, params, batch):
        _, grads, factors = kfac.value_and_grad(loss, layers)(params, *batch)
        return tx.update(average(grads), tx.init(params), params, factors=factors)[0]

    expected = jax.jit(functools.partial(step, kfac.scale_by_kfac(layers), lambda g: g))(params, batch)
    tx = kfac.scale_by_kfac(layers, distribution=kfac.Distribution("d", precondition=precondition))
    mapped = functools.partial(step, tx, lambda g: lax.pmean(g, "d"))
    found = jax.jit(jax.shard_map(mapped, mesh=mesh, in_specs=(same, split), out_specs=same))(params, batch)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=1e-3 * float(jnp.max(jnp.abs(b))))


@pytest.mark.parametrize("value", [0, -1, 2.5, True, "8"])
def test_bad_bounds(value):
    with pytest.raises(ValueError, match="max_dim must be a positive int or None"):
        kfac.find_layers(lambda p, x: jnp.mean(x @ p), jnp.ones((5, 2)), jnp.ones((N, 5)), max_dim=value)
