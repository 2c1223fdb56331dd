"""Exact Fisher blocks for small models, dense forms of factors, and the errors that approximate blocks have.

A block indexes the entries of a layer's matrix `[d_out, d_in]` in the order of `kron(A, G)`: entry `(i_out, i_in)` has
index `i_in * d_out + i_out`. Stacked layers' blocks have a leading axis of copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import kfac
from kfac.types import Kronecker, Layer
from oracle import example_gradients


def fisher_blocks(loss_fn: Callable, layers: kfac.Layers, **options: Any) -> Callable[..., dict[str, jax.Array]]:
    """Return a function that cuts each layer's block out of the dense Gauss-Newton matrix."""

    def blocks(params, *data):
        whole = kfac.curvature.gauss_newton(loss_fn, params, *data, **options).to_dense()
        return diagonal_blocks(whole, layers, params)

    return blocks


def empirical_blocks(loss: Callable, layers: kfac.Layers, params: Any, batch: Sequence[Any]) -> dict[str, jax.Array]:
    """Return the blocks of `n sum_i g_i g_i^T` with the mean loss's per-example gradients `g_i`."""
    gradients = jax.tree.leaves(example_gradients(loss, params, batch))
    rows = np.concatenate([leaf.reshape(len(leaf), -1) for leaf in gradients], axis=1)
    return diagonal_blocks(len(rows) * rows.T @ rows, layers, params)


def diagonal_blocks(whole: Any, layers: kfac.Layers, params: Any) -> dict[str, jax.Array]:
    """Return each layer's block of a matrix whose rows and columns are in the order of `ravel_pytree(params)`."""
    leaves, start = {}, 0
    for path, leaf in zip(layers.paths, jax.tree.leaves(params), strict=True):
        leaves[path] = jnp.arange(start, start + leaf.size).reshape(leaf.shape)
        start += leaf.size
    blocks = {}
    for layer in layers.preconditioned:
        matrix = layer.to_matrix([leaves[path] for path in layer.params])
        places = matrix.swapaxes(-1, -2).reshape(layer.copies, -1)
        block = jnp.asarray(whole)[places[:, :, None], places[:, None, :]]
        blocks[layer.name] = block if layer.stacked else block[0]
    return blocks


class Error(NamedTuple):
    """The Frobenius norm of the difference relative to the exact block, and the cosine between both blocks."""

    relative: float
    cosine: float


def error(exact: Any, approximation: Any) -> Error:
    exact, approximation = np.asarray(exact), np.asarray(approximation)
    size = np.linalg.norm(exact)
    cosine = np.sum(exact * approximation) / (size * np.linalg.norm(approximation))
    return Error(np.linalg.norm(exact - approximation) / size, cosine)


def dense(block: Kronecker, basis: Kronecker | None = None) -> np.ndarray:
    """Return `kron(A, G)`. With a `basis`, return EKFAC's matrix, whose eigenvalues are the block's moments."""
    if basis is None:
        return np.kron(block.A, block.G)
    vectors = np.kron(basis.A, basis.G)
    return vectors * np.asarray(block.moments).T.ravel() @ vectors.T


def nearest_kronecker(exact: Any, layer: Layer) -> Kronecker:
    """Return the factors whose product is nearest to a block in the Frobenius norm (Van Loan & Pitsianis 1993)."""
    a, g = layer.d_in, layer.d_out
    rearranged = np.asarray(exact).reshape(a, g, a, g).swapaxes(1, 2).reshape(a * a, g * g)
    left, values, right = np.linalg.svd(rearranged, full_matrices=False)
    in_a, in_g = left[:, 0].reshape(a, a), right[0].reshape(g, g)
    root = np.sqrt(values[0]) * (-1 if np.trace(in_a) < 0 else 1)
    return Kronecker(root * in_a, root * in_g)
