"""Run `find_layers` and `value_and_grad` on a loss and compare all their results with the brute-force oracle."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kfac
from kfac.types import Basis
from oracle import Truth, example_gradients, relative_error, second_moment

FLOAT64 = 1e-6
ROUNDING = 1e-12


def slow(*values: Any, **names: Any) -> Any:
    """Return a parameter set that runs only with `pytest -m slow`, because another set checks the same property."""
    return pytest.param(*values, marks=pytest.mark.slow, **names)


def normal(seed: int, *shape: int, dtype: Any = np.float64) -> jax.Array:
    # Use NumPy, because jax.random compiles for each shape, which takes longer than many of the tests.
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def run(
    loss: Callable,
    params: Any,
    batch: Sequence[Any],
    *,
    rounding: float = ROUNDING,
    rules=None,
    max_factor_dim: int | None = 8192,
    **options,
):
    """Return a loss's layers, gradients and factors. Check its value and gradients against `jax.value_and_grad`."""
    layers = kfac.find_layers(loss, params, *batch, rules=rules, max_factor_dim=max_factor_dim)
    with_factors = kfac.value_and_grad(loss, layers, **options)

    # A single program, because a second one takes longer to compile than both take to run.
    @jax.jit
    def both(*arguments):
        return with_factors(*arguments), jax.value_and_grad(loss)(*arguments)

    (value, grads, factors), (expected_value, expected_grads) = both(params, *batch)
    assert jax.tree.structure(grads) == jax.tree.structure(expected_grads)
    assert relative_error(value, np.asarray(expected_value, np.float64)) <= rounding
    # The gradient of a key's bias in attention is zero, so only rounding errors remain. Compare such a leaf with the
    # scale of the largest gradient.
    largest = max(np.abs(np.asarray(leaf, np.float64)).max(initial=0) for leaf in jax.tree.leaves(expected_grads))
    for found, expected in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
        assert found.dtype == expected.dtype
        size = max(np.abs(np.asarray(expected, np.float64)).max(initial=0), 1e-3 * largest)
        error = np.abs(np.asarray(found, np.float64) - np.asarray(expected, np.float64)).max(initial=0)
        assert error <= rounding * (size or 1.0)
    check_layers(layers, params)
    assert list(factors) == [layer.name for layer in layers.with_factors]
    for layer in layers.with_factors:
        block = factors[layer.name]
        for name, shape in layer.factor_shapes.items():
            assert getattr(block, name).shape == shape
            assert getattr(block, name).dtype == (np.float64 if jax.config.jax_enable_x64 else np.float32)
    return layers, grads, factors


def check_layers(layers: kfac.Layers, params: Any) -> None:
    """Check that every parameter belongs to exactly one layer."""
    paths = [path for layer in layers for path in layer.params]
    assert sorted(paths) == sorted(layers.paths)
    assert len(set(paths)) == len(jax.tree.leaves(params))


def blocks_on_the_diagonal(matrix: np.ndarray, count: int) -> np.ndarray:
    """Return the `count` diagonal blocks of a matrix, or the matrix if `count` is 1. The last block is zero-padded."""
    if count == 1:
        return matrix
    size = -(-len(matrix) // count)
    blocks = np.zeros((count, size, size))
    for k in range(count):
        own = matrix[k * size : (k + 1) * size, k * size : (k + 1) * size]
        blocks[k, : len(own), : len(own)] = own
    return blocks


def pieces(layer: kfac.types.Layer, block: Any, copy: int, matrix: np.ndarray):
    """Yield the rows, columns, `A`, `G` and padded entries for each piece of a copy's matrix `[d_out, d_in]`."""
    sides = []
    for name, count in zip("AG", layer.num_blocks, strict=True):
        side = np.asarray(getattr(block, name))
        side = side[copy] if layer.stacked else side
        if name in layer.diagonal:
            side = blocks_on_the_diagonal(np.diag(side), count)
        sides.append(side if count > 1 else side[None])
    for j, a in enumerate(sides[0]):
        for i, g in enumerate(sides[1]):
            rows = slice(i * len(g), min(layer.d_out, (i + 1) * len(g)))
            columns = slice(j * len(a), min(layer.d_in, (j + 1) * len(a)))
            own = matrix[rows, columns]
            yield rows, columns, a, g, np.pad(own, [(0, len(g) - own.shape[0]), (0, len(a) - own.shape[1])])


def kinds(layers: kfac.Layers) -> dict[str, str]:
    return {layer.name: layer.kind for layer in layers}


KRONECKER = "dense", "conv", "embedding"


def kronecker(layers: kfac.Layers) -> list[kfac.types.Layer]:
    return [layer for layer in layers if layer.kind in KRONECKER]


def copies(layer: kfac.types.Layer) -> list[str]:
    """Return the oracle's names for the copies of a layer."""
    return [f"{layer.name}[{k}]" for k in range(layer.copies)] if layer.stacked else [layer.name]


def check_kronecker(layers: kfac.Layers, factors: kfac.Factors, truth: Truth, tolerance: float = FLOAT64) -> None:
    """Check all Kronecker factors, and check that the oracle has seen exactly these layers.

    Layer `name` with stacked copies is compared with the oracle's layers `name[0]`, `name[1]`, ...
    """
    seen = set()
    for layer in kronecker(layers):
        block = factors[layer.name]
        for k, name in enumerate(copies(layer)):
            seen.add(name)
            for factor, expected in zip("AG", truth.kronecker(name), strict=True):
                found = getattr(block, factor)
                found = np.asarray(found[k] if layer.stacked else found)
                if layer.kind == "embedding" and factor == "A":
                    found = np.diag(found)  # `a a^T` is diagonal for one-hot inputs
                error = relative_error(found, expected)
                assert error <= tolerance, f"{factor} of {name}: {error}"
        assert layer.positions == sum(use.a.shape[1] for use in truth.uses[copies(layer)[0]])
    assert seen == set(truth.uses)


def matrices_of(layers: Sequence[kfac.types.Layer], leaves: dict[str, Any]) -> dict[str, jax.Array]:
    """Return each layer's leaves as a matrix, by layer name. The leaves are given by path."""
    return {layer.name: layer.to_matrix([leaves[path] for path in layer.params]) for layer in layers}


# Compile all conversions as one program. Otherwise JAX would compile each operation separately.
as_matrices = jax.jit(matrices_of, static_argnums=0)


@functools.partial(jax.jit, static_argnums=0)
def there_and_back(
    layers: Sequence[kfac.types.Layer], leaves: dict[str, Any]
) -> tuple[dict[str, jax.Array], dict[str, list[jax.Array]]]:
    matrices = matrices_of(layers, leaves)
    # The barrier keeps XLA from cancelling the two conversions.
    stored = jax.lax.optimization_barrier(matrices)
    return matrices, {layer.name: layer.from_matrix(stored[layer.name]) for layer in layers}


def check_matrices(layers: kfac.Layers, grads: Any, truth: Truth, tolerance: float) -> None:
    """Check that each gradient matrix is the sum of `g a^T`, with rows and columns in the factors' order.

    Converting the matrix back must restore the layer's leaves.
    """
    by_path = dict(zip(layers.paths, jax.tree.leaves(grads), strict=True))
    own = tuple(kronecker(layers))
    matrices, restored = there_and_back(own, by_path)
    for layer in own:
        for matrix, name in zip(matrices[layer.name], copies(layer), strict=True):
            assert relative_error(matrix, truth.gradient(name)) <= tolerance
        for path, leaf in zip(layer.params, restored[layer.name], strict=True):
            np.testing.assert_array_equal(by_path[path], leaf)


def check_vectors(
    layers: kfac.Layers, factors: kfac.Factors, gradients: dict[str, np.ndarray], tolerance: float = FLOAT64
) -> None:
    """Check unit-wise and diagonal blocks against per-example gradients, which are given by leaf path."""
    for layer in layers:
        if layer.kind in ("unitwise", "diagonal"):
            expected = second_moment([gradients[path] for path in layer.params])
            error = relative_error(factors[layer.name].F, expected)
            assert error <= tolerance, f"F of {layer.name}: {error}"


def check_all(
    loss: Callable,
    params: Any,
    batch: Sequence[Any],
    truth: Truth,
    *,
    vectors: dict[str, np.ndarray] | None = None,
    tolerance: float = FLOAT64,
    **options: Any,
) -> tuple[kfac.Layers, kfac.Factors]:
    """Check every block.

    The blocks of vectors are compared with `vectors` if given, and otherwise with the oracle's per-example gradients.
    """
    layers, grads, factors = run(loss, params, batch, **options)
    if any(layer.kind in ("unitwise", "diagonal") for layer in layers):
        gradients = vectors or dict(
            zip(layers.paths, jax.tree.leaves(example_gradients(loss, params, batch)), strict=True)
        )
        check_vectors(layers, factors, gradients, tolerance)
    check_kronecker(layers, factors, truth, tolerance)
    check_matrices(layers, grads, truth, tolerance)
    return layers, factors


# -- EKFAC's moments --------------------------------------------------------------------------------------------------


def rotations(layers, dtype=np.float64):
    """Return random orthogonal matrices as a basis. The moments are defined for any orthogonal basis."""
    rng = np.random.default_rng(0)

    def rotation(shape):
        return jnp.asarray(np.linalg.qr(rng.normal(size=shape))[0], dtype)

    return {
        layer.name: Basis(rotation(layer.factor_shapes["A"]), rotation(layer.factor_shapes["G"]))
        for layer in layers
        if layer.supports_ekfac
    }


def expected_moments(layers, gradients, basis):
    """Return `n sum_i (Q_G^T g_i Q_A)^2` by explicit loops, where `g_i` is example `i`'s share of the gradient."""
    leaves = dict(zip(layers.paths, jax.tree.leaves(gradients), strict=True))
    corrected = tuple(layer for layer in layers if layer.supports_ekfac)
    examples = jax.vmap(functools.partial(as_matrices, corrected))(leaves)
    moments = {}
    for layer in corrected:
        of_examples = np.asarray(examples[layer.name])
        q_a, q_g = (
            np.asarray(q, np.float64).reshape(-1, *q.shape[-2:]) for q in (basis[layer.name].A, basis[layer.name].G)
        )
        total = sum(
            np.stack([(g.T @ m @ a) ** 2 for m, a, g in zip(matrices, q_a, q_g, strict=True)])
            for matrices in of_examples
        )
        moments[layer.name] = len(of_examples) * (total if layer.stacked else total[0])
    return moments


def check_moments(loss, params, batch, *, tolerance=1e-10, gradients=None, find=None, **options):
    layers = kfac.find_layers(loss, params, *batch, **(find or {}))
    basis = rotations(layers)
    assert basis
    measure = jax.jit(kfac.value_and_grad(loss, layers, **options))
    _, _, factors = measure(params, *batch, basis=basis)
    if gradients is None:
        gradients = example_gradients(loss, params, batch)
    expected = expected_moments(layers, gradients, basis)
    for layer in layers:
        if layer.kind in KRONECKER:
            assert (factors[layer.name].moments is None) == (layer.name not in expected)
    for name, moments in expected.items():
        error = relative_error(factors[name].moments, moments)
        assert error <= tolerance, (name, error)
    return layers, factors
