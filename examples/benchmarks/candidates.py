"""Implement the candidate algorithms for convolution statistics and for inverses.

`speed.py` compares them. The package implements the winners.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kfac._linalg import spd_inverse
from kfac._statistics.offsets import WindowAxis, offset_moment


def conv_ways(x: jax.Array, window: int, stride: int) -> dict[str, Callable[[jax.Array], jax.Array]]:
    """Return functions that compute `A` for a square convolution with "same" padding.

    Each function takes images `[n, height, width, channels]`.
    """
    pad = window // 2
    taps = [(i, j) for i in range(window) for j in range(window)]
    out = -(-x.shape[1] // stride)
    wide = jnp.promote_types(x.dtype, jnp.float32)

    def gram(rows: jax.Array) -> jax.Array:
        return jnp.einsum("ri,rj->ij", rows, rows, preferred_element_type=wide)

    def patches(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
        end = stride * (out - 1) + 1
        parts = [padded[:, i : i + end : stride, j : j + end : stride] for i, j in taps]
        return jnp.stack(parts, axis=-2).reshape(-1, window * window * x.shape[-1])

    def chunked(x: jax.Array) -> jax.Array:
        parts = x.reshape(-1, max(1, len(x) // 8), *x.shape[1:])
        zeros = jnp.zeros((window * window * x.shape[-1],) * 2, wide)
        return lax.scan(lambda total, part: (total + gram(patches(part)), None), zeros, parts)[0]

    def by_offset(x: jax.Array) -> jax.Array:
        return offset_moment(
            x, (WindowAxis(x.shape[1], window, 1, pad, out), WindowAxis(x.shape[2], window, 1, pad, out))
        )

    ways: dict[str, Callable[[jax.Array], jax.Array]] = {
        "patches of the whole batch": lambda x: gram(patches(x)),
        "patches, an eighth of the batch at a time": chunked,
    }
    return ways | ({"correlations by offset": by_offset} if stride == 1 else {})


def factors_like(size: int, condition: float) -> tuple[jax.Array, jax.Array]:
    """Return a symmetric matrix `[1, size, size]` and the inverse of a nearby matrix.

    The matrix has eigenvalues from `1 / condition` to 1. The nearby matrix's eigenvalues differ by up to 2%.
    """
    rng = np.random.default_rng(size)
    eigenvalues = np.geomspace(1 / condition, 1, size)
    # Rotate the eigenvectors with Householder reflections, which are cheap for large sizes.
    matrix, changed = np.diag(eigenvalues), np.diag(1 / (eigenvalues * (1 + 0.02 * rng.uniform(-1, 1, size))))
    for _ in range(3):
        v = rng.normal(size=(size, 1))
        v /= np.linalg.norm(v)
        for m in (matrix, changed):
            m -= 2 * v @ (v.T @ m)
            m -= 2 * (m @ v) @ v.T
    return jnp.asarray(matrix[None], jnp.float32), jnp.asarray(changed[None], jnp.float32)


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def newton_schulz(matrix: jax.Array, near: jax.Array) -> jax.Array:
    """Invert by the iteration `X <- X (2 I - M X)` from a previous inverse (Schulz 1933).

    The iteration converges quadratically if `||I - M X|| < 1`. Otherwise this function falls back to Cholesky.
    """
    identity = jnp.eye(matrix.shape[-1], dtype=matrix.dtype)

    def residual(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        r = identity - _product(matrix, x)
        return r, jnp.sqrt(jnp.sum(r * r) / matrix.shape[-1])

    def body(carry: Any) -> Any:
        turn, x, r, _, size = carry
        x = x + _product(x, r)
        r, new = residual(x)
        return turn + 1, x, r, size, new

    def going(carry: Any) -> Any:
        turn, _, _, before, size = carry
        return (turn < 8) & (size > 1e-3) & (size < before)

    r, size = residual(near)
    _, x, _, _, size = lax.while_loop(going, body, (0, near, r, jnp.full_like(size, jnp.inf), size))
    return lax.cond(size < 1e-2, lambda: (x + x.mT) / 2, lambda: spd_inverse(matrix))


def cholesky(matrix: jax.Array, near: jax.Array) -> jax.Array:
    """Invert as `W^T W`, where a triangular solve gives `W`, the inverse Cholesky factor."""
    del near
    factor = lax.linalg.cholesky(matrix, symmetrize_input=False)
    identity = jnp.broadcast_to(jnp.eye(matrix.shape[-1], dtype=matrix.dtype), matrix.shape)
    half = lax.linalg.triangular_solve(factor, identity, left_side=True, lower=True)
    return _product(half.mT, half)


def sweep(matrix: jax.Array, near: jax.Array, block: int = 512) -> jax.Array:
    """Invert by block Gauss-Jordan elimination (Goodnight 1979).

    This algorithm has the fewest operations outside matrix products, but it is less accurate.
    """
    del near
    d = matrix.shape[-1]
    count = -(-d // block)
    size = -(-d // count)
    matrix = jnp.pad(matrix, ((0, 0), (0, count * size - d), (0, count * size - d)))
    matrix = matrix + jnp.diag((jnp.arange(count * size) >= d).astype(matrix.dtype))

    def step(k: Any, m: jax.Array) -> jax.Array:
        columns = lax.dynamic_slice_in_dim(m, k * size, size, axis=2)
        pivot = cholesky(lax.dynamic_slice_in_dim(columns, k * size, size, axis=1), m)
        scaled = _product(columns, pivot)
        m = m - _product(scaled, columns.mT)
        scaled = lax.dynamic_update_slice_in_dim(scaled, -pivot, k * size, axis=1)
        m = lax.dynamic_update_slice_in_dim(m, scaled, k * size, axis=2)
        return lax.dynamic_update_slice_in_dim(m, scaled.mT, k * size, axis=1)

    return -lax.fori_loop(0, count, step, matrix)[:, :d, :d]


def eigen(matrix: jax.Array, near: jax.Array) -> jax.Array:
    """Invert as `Q diag(1 / l) Q^T`."""
    del near
    values, vectors = jnp.linalg.eigh(matrix)
    return _product(vectors / values[..., None, :], vectors.mT)


INVERSES: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "kfac": lambda matrix, near: spd_inverse(matrix),
    "jnp.linalg.inv": lambda matrix, near: jnp.linalg.inv(matrix),
    "Cholesky": cholesky,
    "sweep": sweep,
    "eigh": eigen,
    "Newton-Schulz": newton_schulz,
}


def resnet50_dimensions() -> dict[int, int]:
    """Return the number of ResNet-50's factors for each dimension."""
    stages = ((64, 3, 64), (128, 4, 256), (256, 6, 512), (512, 3, 1024))
    sizes = [147, 64, 2049, 1000]
    for width, blocks, before in stages:
        sizes += [before, 4 * width]  # the shortcut
        for block in range(blocks):
            sizes += [before if block == 0 else 4 * width, width, 9 * width, width, width, 4 * width]
    return {size: sizes.count(size) for size in sorted(set(sizes))}
