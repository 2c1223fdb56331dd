"""Compute curvature statistics by brute force: one example at a time, patches by explicit loops, sums in NumPy.

This module shares no code with the package. A reference model calls a `Hook`:

- `y = hook.layer(name, a, y)` after each use of a kernel adds a zero to the layer's output `y`. The gradient with
  respect to this zero is `g` in the layer's factors, and the layer's input is `a`.
- `scale = hook.vector(name, v, n)` gives each of `n` examples its own copy of an elementwise parameter, so that
  per-example gradients exist even if examples interact (batch norm).
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Geometry:
    """A convolution of images `[n, *spatial, channels]`. Each field has an entry per spatial dimension."""

    window: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    lhs_dilation: tuple[int, ...]
    rhs_dilation: tuple[int, ...]


def explicit_padding(padding, sizes, window, strides, rhs_dilation) -> tuple[tuple[int, int], ...]:
    """Return the padding as explicit pairs, also for "SAME" and "VALID"."""
    if padding == "VALID":
        return ((0, 0),) * len(sizes)
    if padding != "SAME":
        return tuple(tuple(pair) for pair in padding)
    pairs = []
    for size, k, stride, dilation in zip(sizes, window, strides, rhs_dilation, strict=True):
        total = max((math.ceil(size / stride) - 1) * stride + (k - 1) * dilation + 1 - size, 0)
        pairs.append((total // 2, total - total // 2))
    return tuple(pairs)


def im2col(x: np.ndarray, geometry: Geometry) -> np.ndarray:
    """Return the inputs that each output position sees: `[n, positions, window * channels]`."""
    n, *sizes, channels = x.shape
    out = [
        (((size - 1) * lhs + 1) + low + high - ((k - 1) * rhs + 1)) // stride + 1
        for size, k, stride, (low, high), lhs, rhs in zip(
            sizes,
            geometry.window,
            geometry.strides,
            geometry.padding,
            geometry.lhs_dilation,
            geometry.rhs_dilation,
            strict=True,
        )
    ]
    rows = np.zeros((n, *out, *geometry.window, channels), x.dtype)
    for position in np.ndindex(*out):
        for tap in np.ndindex(*geometry.window):
            where = []
            for d, size in enumerate(sizes):
                # `at` is a coordinate in the dilated image, where only every `lhs_dilation`-th coordinate holds a
                # pixel.
                at = position[d] * geometry.strides[d] + tap[d] * geometry.rhs_dilation[d] - geometry.padding[d][0]
                if at < 0 or at % geometry.lhs_dilation[d] or at // geometry.lhs_dilation[d] >= size:
                    break
                where.append(at // geometry.lhs_dilation[d])
            else:
                rows[(slice(None), *position, *tap)] = x[(slice(None), *where)]
    return rows.reshape(n, math.prod(out), -1)


class Hook:
    """A hook that records the inputs of layers and perturbs their outputs. Without `zeros` it changes nothing."""

    def __init__(self, zeros: dict[str, jax.Array] | None = None):
        self.zeros = zeros
        self.inputs: dict[str, jax.Array] = {}
        self.shapes: dict[str, tuple[tuple[int, ...], Any]] = {}
        self.static: dict[str, tuple] = {}

    def _perturbed(self, key: str, y: jax.Array) -> jax.Array:
        self.shapes[key] = (y.shape, y.dtype)
        return y if self.zeros is None else y + self.zeros[key]

    def layer(
        self, name: str, a: jax.Array, y: jax.Array, *, out: int = 1, bias: bool = False, conv: Geometry | None = None
    ) -> jax.Array:
        """Record a use of layer `name` and return its output `y`, to which the use's zero is added.

        Args:
          name: the layer.
          a: the input `[n, ..., d_in]`, or the images `[n, *spatial, channels]` of a convolution.
          y: the output `[n, ..., *out_axes]`, with or without the bias.
          out: how many trailing axes of `y` are features.
          bias: whether this use adds a bias.
          conv: the geometry of a convolution.
        """
        key = f"{name}#{sum(other.startswith(f'{name}#') for other in self.inputs)}"
        self.inputs[key] = a
        self.static[key] = (out, bias, conv)
        return self._perturbed(key, y)

    def vector(self, name: str, v: jax.Array, n: int) -> jax.Array:
        """Return `v` repeated for each of `n` examples: `[n, *v.shape]`."""
        return self._perturbed(f"{name}@", jnp.broadcast_to(v, (n, *v.shape)))


@dataclasses.dataclass
class Use:
    """One use of a kernel: inputs `a` `[n, s, d_in]` and gradients `g` `[n, s, d_out]` of the mean loss."""

    a: np.ndarray
    g: np.ndarray
    bias: bool


@dataclasses.dataclass
class Truth:
    """The expected statistics of a batch.

    Attributes:
      uses: the uses of each Kronecker layer.
      vectors: per-example gradients `[n, *shape]` of the leaves given to `Hook.vector`.
      n: the number of examples.
    """

    uses: dict[str, list[Use]]
    vectors: dict[str, np.ndarray]
    n: int

    def kronecker(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return a layer's factors, with a homogeneous coordinate if some use adds a bias."""
        uses = self.uses[name]
        homogeneous = any(use.bias for use in uses)
        positions = sum(use.a.shape[1] for use in uses)
        a_sum = g_sum = 0.0
        for use in uses:
            for a, g in zip(np.concatenate(use.a), np.concatenate(use.g), strict=True):
                if homogeneous:
                    a = np.append(a, float(use.bias))
                a_sum = a_sum + np.outer(a, a)
                g_sum = g_sum + np.outer(g, g)
        return a_sum / self.n, g_sum * self.n / positions

    def gradient(self, name: str) -> np.ndarray:
        """Return the gradient of kernel and bias as a matrix `[d_out, d_in]`."""
        homogeneous = any(use.bias for use in self.uses[name])
        total = 0.0
        for use in self.uses[name]:
            for a, g in zip(np.concatenate(use.a), np.concatenate(use.g), strict=True):
                total = total + np.outer(g, np.append(a, float(use.bias)) if homogeneous else a)
        return total


def truth(loss: Callable, params: Any, batch: Sequence[Any], *, interacting: bool = False) -> Truth:
    """Return the statistics of `loss(hook, params, *batch)`, a mean over the leading axis of every array in `batch`.

    Args:
      loss: the reference model.
      params: its parameters.
      batch: its further arguments. Every leaf has a leading axis of examples.
      interacting: whether examples interact, so that gradients cannot be taken one example at a time.
    """
    batch = jax.tree.map(np.asarray, tuple(batch))
    n = len(jax.tree.leaves(batch)[0])
    share = n if interacting else 1
    recorder = Hook()
    jax.eval_shape(lambda p, b: loss(recorder, p, *b), params, jax.tree.map(lambda x: x[:share], batch))
    zeros = {key: np.zeros(*entry) for key, entry in recorder.shapes.items()}

    @jax.jit
    def gradients(params, part, zeros):
        def perturbed(zeros):
            hook = Hook(zeros)
            return loss(hook, params, *part), hook.inputs

        return jax.grad(perturbed, has_aux=True)(zeros)

    collected = defaultdict(list)
    for i in range(0, n, share):
        part = jax.tree.map(lambda x, i=i: x[i : i + share], batch)
        grads, inputs = jax.tree.map(np.asarray, gradients(params, part, zeros))
        for key, g in grads.items():
            collected[key].append((inputs.get(key), g.astype(np.promote_types(g.dtype, np.float32)) * share / n))
    uses, vectors = defaultdict(list), {}
    for key, parts in collected.items():
        g = np.concatenate([g for _, g in parts])
        if key.endswith("@"):
            vectors[key[:-1]] = g
            continue
        out, bias, conv = recorder.static[key]
        a = np.concatenate([a for a, _ in parts])
        a = im2col(a, conv) if conv else a.reshape(n, -1, a.shape[-1])
        uses[key.split("#")[0]].append(Use(a, g.reshape(n, a.shape[1], math.prod(g.shape[g.ndim - out :])), bias))
    return Truth(dict(uses), vectors, n)


def example_gradients(loss: Callable, params: Any, batch: Sequence[Any]) -> Any:
    """Return the mean loss's per-example gradients as a tree of `[n, *shape]`, computed one example at a time."""
    batch = jax.tree.map(np.asarray, tuple(batch))
    n = len(jax.tree.leaves(batch)[0])
    grad = jax.jit(jax.grad(loss))
    grads = [grad(params, *jax.tree.map(lambda x, i=i: x[i : i + 1], batch)) for i in range(n)]
    return jax.tree.map(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]) / n, *grads)


def second_moment(columns: Sequence[np.ndarray]) -> np.ndarray:
    """Return `F[c] = n sum_i g g^T` for per-example gradients `[n, *shape]` of one block's leaves."""
    n = len(columns[0])
    g = np.stack([column.reshape(n, -1) for column in columns], axis=-1)
    block = np.zeros((g.shape[1], g.shape[2], g.shape[2]), g.dtype)
    for i in range(n):
        for c in range(g.shape[1]):
            block[c] += n * np.outer(g[i, c], g[i, c])
    return block


def relative_error(found: Any, expected: np.ndarray) -> float:
    """Return the largest deviation relative to the largest expected entry."""
    found = np.asarray(found, np.float64)
    assert found.shape == expected.shape, (found.shape, expected.shape)
    return float(np.max(np.abs(found - expected)) / (np.max(np.abs(expected)) or 1.0))
