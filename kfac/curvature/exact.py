"""The exact Fisher matrix of small models, layer by layer, to measure approximations by.

The block of a layer is a matrix over the entries of the layer's parameters as a matrix `[d_out, d_in]` (the bias is its
last column, as in `Layer.to_matrix`), in the order of `kron(A, G)`: entry `(i_out, i_in)` has index `i_in * d_out +
i_out`. Blocks of stacked layers carry a leading axis of copies.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kfac._capture.find_layers import layers_of
from kfac._capture.outputs import Mark, Marks, find_marks, roots_of
from kfac._capture.plan import check_same
from kfac._capture.replay import replay
from kfac._capture.taps import Key, Plan
from kfac._capture.trace import Trace, batch_of, trace
from kfac._factors import Block, Kronecker, Statistics
from kfac._layers import Layer, Layers
from kfac._statistics.rows import accumulator


def fisher_blocks(
    loss_fn: Callable[..., Any],
    layers: Layers,
    *,
    fisher: str = "true",
    names: Sequence[str] | None = None,
    has_aux: bool = False,
    num_examples: int | None = None,
) -> Callable[..., dict[str, jax.Array]]:
    """The exact diagonal blocks of the Fisher matrix, for each layer one.

    With `z_r` the `n` rows of the output that `loss_fn` marks with `kfac.output` and `J_r` their Jacobians with respect
    to a layer's parameters:

    - `"true"`: `(1/n) sum_r J_r^T H_r J_r`, where `H_r = E[(E[y] - y) (E[y] - y)^T]` over targets `y` from the
      distribution that the network predicts. It is what `fisher="sampled"` of `value_and_grad` estimates, and for these
      distributions the generalised Gauss-Newton matrix of the loss (Martens 2020, section 9.2).
    - `"empirical"`: `n sum_i g_i g_i^T` with the shares `g_i` that examples have in the gradient of the loss, by way of
      the marked output (Kunstner et al. 2019, equation 3).

    Both are exact also where examples interact: `J_r` then runs through the whole batch. With `num_examples=n` and more
    rows than that, an example is `rows / n` rows in succession.

    It takes a backward pass over the whole batch for every row and feature of the output, and memory for the square of
    the largest layer: meant for small models and few examples.

    Args:
      loss_fn: the mean loss, as for `value_and_grad`.
      layers: what `find_layers` returned for it.
      fisher: `"true"` or `"empirical"`.
      names: names of the layers. By default all that have statistics.
      has_aux: whether `loss_fn` returns a pair.
      num_examples: `n`. By default the number of rows of the marked output.

    Returns:
      A function of the arguments of `loss_fn` that returns a block `[p, p]` (`[copies, p, p]` for stacked layers) for
      each layer, `p = d_in * d_out`, in float32 (float64 for float64 parameters).

    Raises:
      ValueError: an argument is out of range; when the function is called: no output is marked, or the loss depends on
        a parameter but no marked output does, or examples cannot be told apart because the output is marked inside a
        scan.
    """
    if fisher not in ("true", "empirical"):
        raise ValueError(f"fisher must be 'true' or 'empirical', but is {fisher!r}")
    valid = [layer.name for layer in layers.with_blocks]
    chosen, sizes = valid if names is None else list(names), {}
    for name in chosen:
        if name not in valid:
            raise ValueError(f"names: no layer with statistics is called {name!r}; there are {', '.join(valid)}")
        sizes[name] = layers[name].d_in * layers[name].d_out

    def blocks(params, *args, **kwargs):
        traced = trace(loss_fn, has_aux, params, args, kwargs, *batch_of(layers, args, kwargs))
        paths, marks = traced.names, find_marks(traced)
        skipped = {path for layer in layers if layer.kind == "skipped" for path in layer.params}
        marks.require("the exact Fisher matrix", paths, skipped)
        found = layers_of(traced, layers, marks, num_examples)
        check_same(layers, found.layers)
        n = found.num_examples
        if n is None:
            raise ValueError(found.unclear)
        flat, _ = jax.tree.flatten(params)
        outputs, pull, slopes = _outputs(traced, marks, flat)

        def add(total, cotangents):
            """Adds the moments of the pulled back cotangents `[k, ...]`, as rows `[k, copies, p]` of each layer."""
            by_path = dict(zip(paths, jax.vmap(pull)(cotangents), strict=True))
            leaves = {name: [by_path[path] for path in layers[name].params] for name in chosen}
            rows = {name: jax.vmap(functools.partial(_vector, layers[name]))(leaves[name]) for name in chosen}
            moments = {name: jnp.einsum("kcp,kcq->cpq", x, x, precision="highest") for name, x in rows.items()}
            return {name: total[name] + moments[name] for name in chosen}, None

        dtype = accumulator(jnp.result_type(*flat))
        total = {name: jnp.zeros((layers[name].copies, *2 * [sizes[name]]), dtype) for name in chosen}
        if fisher == "true":
            for mark in marks.marks:
                total = _expected(mark, outputs, total, add)
            scale = 1 / n
        else:
            total, scale = _observed(marks, slopes, n, total, add), n
        return {name: (scale * (m if layers[name].stacked else m[0])) for name, m in total.items()}

    return blocks


def _vector(layer: Layer, leaves: Sequence[jax.Array]) -> jax.Array:
    """`[copies, p]`: the columns of the layer's matrix one after the other, in float32 or better."""
    rows = layer.to_rows(leaves).reshape(layer.copies, -1)
    return rows.astype(accumulator(rows.dtype))


def _outputs(
    traced: Trace, marks: Marks, flat: list[jax.Array]
) -> tuple[dict[Key, jax.Array], Callable[[Any], list[jax.Array]], dict[Key, jax.Array]]:
    """The marked outputs, their vector-Jacobian product, and the gradient of the loss with respect to them."""
    plan = Plan()
    marks.place(plan, lambda mark: lambda x, offset: (x + offset.astype(x.dtype), x))

    def evaluate(flat, offsets):
        outs, outputs = replay(traced.program, [*flat, *traced.arrays], plan, offsets)
        return outs[0], outputs

    dtypes = jnp.result_type(*flat)
    shaped = {mark.key: jnp.zeros((*mark.scans, *mark.shape), dtypes) for mark in marks.marks}
    offsets = jax.tree.map(lambda x, y: jnp.zeros(x.shape, y.dtype), shaped, jax.eval_shape(evaluate, flat, shaped)[1])
    slopes = jax.grad(lambda offsets: evaluate(flat, offsets)[0])(offsets)
    outputs, pull = jax.vjp(lambda flat: evaluate(flat, offsets)[1], flat)
    return outputs, lambda cotangent: pull(cotangent)[0], slopes


def _expected(mark: Mark, outputs: Mapping[Key, jax.Array], total: Any, add: Callable) -> Any:
    """Adds `sum_r J_r^T H_r J_r` over the rows of a mark, one row at a time."""
    features = mark.shape[-1]
    rows = outputs[mark.key].reshape(-1, features)

    def row(total, index):
        units = jnp.eye(features, dtype=rows.dtype)
        columns = jax.vmap(lambda unit: mark.likelihood.times_root(rows[index], unit, "the exact Fisher matrix"))(units)
        root = math.sqrt(mark.weight) * columns.T.astype(rows.dtype)
        cotangent = jnp.zeros((features, *rows.shape), rows.dtype).at[:, index].set(root)
        cotangents = {k: jnp.zeros((features, *z.shape), z.dtype) for k, z in outputs.items()}
        return add(total, {**cotangents, mark.key: cotangent.reshape(features, *outputs[mark.key].shape)})

    return lax.scan(row, total, jnp.arange(len(rows)))[0]


def _observed(marks: Marks, slopes: Mapping[Key, jax.Array], n: int, total: Any, add: Callable) -> Any:
    """Adds `sum_i g_i g_i^T` over examples, one at a time; `g_i / sqrt(w)` for what a mark of weight `w` brings."""
    slopes = {key: slopes[key] * root for key, root in roots_of(marks, -0.5, within_scans=False).items()}
    batches = {mark.key: mark.rows for mark in marks.marks if mark.rows % n and marks.weighted}
    together = [mark for mark in marks.marks if mark.key not in batches]
    for mark in together:
        if mark.scans and (mark.rows != n or len(together) > 1):
            rows = f"its {mark.rows} rows cannot be shared out among {n} examples"
            raise ValueError(f"the output is marked inside a scan, where {rows}: mark it outside")
        if mark.rows % n:
            raise ValueError(f"num_examples={n} does not divide the {mark.rows} rows of the marked output")

    def example(keys, count, total, index):
        def only(key, slope):
            if key not in keys:
                return jnp.zeros((1, *slope.shape), slope.dtype)
            grouped = slope.reshape(count, -1)
            return jnp.zeros_like(grouped).at[index].set(grouped[index]).reshape(1, *slope.shape)

        return add(total, {key: only(key, slope) for key, slope in slopes.items()})

    # The rows of a batch of its own are examples of their own.
    for keys, count in [(slopes.keys() - batches.keys(), n), *(({key}, rows) for key, rows in batches.items())]:
        total = lax.scan(functools.partial(example, keys, count), total, jnp.arange(count))[0] if keys else total
    return total


class Error(NamedTuple):
    """How far an approximation is from a matrix, each `[]` or `[copies]`.

    Attributes:
      relative: the Frobenius norm of the difference, relative to that of the matrix; 0 is perfect.
      cosine: the cosine of the angle between the two as vectors, whatever their lengths; 1 is perfect.
    """

    relative: jax.Array
    cosine: jax.Array


def dense(block: Block, basis: Kronecker | None = None) -> jax.Array:
    """An approximate block as a full matrix, in the order of `fisher_blocks`.

    Args:
      block: `Kronecker(A, G)` or `Unitwise(F)` of a `Factors`.
      basis: the eigenvectors of the layer from `kfac.curvature.eigenbasis`, for the matrix of EKFAC, which has
        `block.moments` for eigenvalues.

    Returns:
      `[p, p]`, or `[copies, p, p]` for stacked factors: `kron(A, G)`, or that of EKFAC, or the blocks of the channels.

    Raises:
      TypeError: `block` is neither.
      ValueError: with `basis`, `block` has no moments.
    """
    if not isinstance(block, Statistics):
        raise TypeError(f"block must be Kronecker or Unitwise, but is {type(block).__name__}")
    return block.combined().dense(basis)


def error(exact: jax.Array, approximation: jax.Array) -> Error:
    """The error of an approximate block.

    Args:
      exact: `[..., p, p]`, such as a block of `fisher_blocks`.
      approximation: of the same shape, such as `dense(factors[name])`.

    Returns:
      `Error(relative, cosine)`, each of shape `[...]`.

    Raises:
      ValueError: the shapes differ.
    """
    if exact.shape != approximation.shape:
        raise ValueError(f"exact has shape {list(exact.shape)}, but approximation {list(approximation.shape)}")

    norm, other, difference = (jnp.linalg.norm(x, axis=(-2, -1)) for x in (exact, approximation, exact - approximation))
    return Error(difference / norm, jnp.sum(exact * approximation, axis=(-2, -1)) / (norm * other))


def nearest_kronecker(exact: jax.Array, layer: Layer) -> Kronecker:
    """The Kronecker product nearest to a block in Frobenius norm: no choice of factors has a smaller error.

    By the leading singular vectors of the rearranged block (Van Loan & Pitsianis 1993). The block is positive
    semi-definite, and so are the factors.

    Args:
      exact: `[p, p]`, or `[copies, p, p]` for a stacked layer.
      layer: the layer, of kind `"dense"` or `"conv"`.

    Returns:
      `Kronecker(A, G)`, with factors of equal norm.

    Raises:
      ValueError: the block is not that of such a layer.
    """
    shape, a, g = layer.factor_shapes, layer.d_in, layer.d_out
    if set(shape) != {"A", "G"} or exact.shape != (*shape["A"][:-2], a * g, a * g):
        raise ValueError(f"a block of shape {list(exact.shape)} is not that of {layer.describe()}")

    def nearest(block):
        rearranged = block.reshape(a, g, a, g).swapaxes(1, 2).reshape(a * a, g * g)
        left, values, right = jnp.linalg.svd(rearranged, full_matrices=False)
        in_a, in_g = left[:, 0].reshape(a, a), right[0].reshape(g, g)
        root = jnp.sqrt(values[0]) * jnp.where(jnp.trace(in_a) < 0, -1, 1)
        return Kronecker(root * in_a, root * in_g)

    return lax.map(nearest, exact) if exact.ndim == 3 else nearest(exact)
