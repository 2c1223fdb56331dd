"""The exact Fisher matrix of small models, layer by layer, to measure approximations by.

The block of a layer is a matrix over the entries of the layer's parameters as a matrix `[d_out, d_in]` (the bias is its
last column, as in `Layer.to_matrix`), in the order of `kron(A, G)`: entry `(i_out, i_in)` has index `i_in * d_out +
i_out`. Blocks of stacked layers carry a leading axis of copies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kfac._capture.find_layers import layers_of
from kfac._capture.outputs import Marks, find_marks
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

    It takes a pass over the whole batch for every parameter, and memory for as many outputs: meant for small models and
    few examples.

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
    chosen = valid if names is None else list(names)
    for name in chosen:
        if name not in valid:
            raise ValueError(f"names: no layer with statistics is called {name!r}; there are {', '.join(valid)}")

    def blocks(params, *args, **kwargs):
        traced = trace(loss_fn, has_aux, params, args, kwargs, *batch_of(layers, args, kwargs))
        marks = find_marks(traced)
        marks.require("the exact Fisher matrix", traced, layers.skipped_paths)
        found = layers_of(traced, layers, marks, num_examples)
        check_same(layers, found.layers)
        n = found.num_examples
        if n is None:
            raise ValueError(found.unclear)
        leaves = dict(zip(traced.names, jax.tree.leaves(params), strict=True))
        outputs, push, slopes = _outputs(traced, marks, leaves)
        rows_of = _true(marks, outputs, n) if fisher == "true" else _empirical(marks, slopes, n)
        dtype = accumulator(jnp.result_type(*leaves.values()))

        def block(layer):
            def rows(unit):
                moved = dict(zip(layer.params, layer.from_rows(unit), strict=True))
                moved = {path: moved.get(path, jnp.zeros_like(x)).astype(x.dtype) for path, x in leaves.items()}
                return jnp.concatenate([x.astype(dtype).ravel() for x in rows_of(push(moved))])

            size = layer.d_in * layer.d_out
            units = jnp.eye(layer.copies * size, dtype=dtype).reshape(-1, layer.copies, layer.d_in, layer.d_out)
            factor = lax.map(rows, units, batch_size=256).reshape(layer.copies, size, -1)
            matrices = jnp.einsum("cpr,cqr->cpq", factor, factor, precision="highest")
            return matrices if layer.stacked else matrices[0]

        return {name: block(layers[name]) for name in chosen}

    return blocks


ByMark = dict[Key, jax.Array]


def _outputs(
    traced: Trace, marks: Marks, leaves: dict[str, jax.Array]
) -> tuple[ByMark, Callable[[dict[str, jax.Array]], ByMark], ByMark]:
    """The marked outputs, the product with their Jacobian, and the gradient of the loss with respect to them."""
    plan = Plan()
    marks.place(plan, lambda mark: lambda x, offset: (x + offset.astype(x.dtype), x))

    def evaluate(leaves, offsets):
        outs, outputs = replay(traced.program, [*leaves.values(), *traced.arrays], plan, offsets)
        return outs[0], outputs

    dtype = jnp.result_type(*leaves.values())
    offsets = {mark.key: jnp.zeros((*mark.scans, *mark.value.shape), dtype) for mark in marks.marks}
    shapes = jax.eval_shape(evaluate, leaves, offsets)[1]
    offsets = jax.tree.map(lambda x, like: x.astype(like.dtype), offsets, shapes)
    slopes = jax.grad(lambda offsets: evaluate(leaves, offsets)[0])(offsets)
    outputs, pull = jax.vjp(lambda leaves: evaluate(leaves, offsets)[1], leaves)
    # Not by a forward-mode derivative, which a `jax.custom_vjp` has not.
    push = jax.linear_transpose(lambda cotangents: pull(cotangents)[0], outputs)
    return outputs, lambda moved: push(moved)[0], slopes


def _true(marks: Marks, outputs: ByMark, n: int) -> Callable[[ByMark], list[jax.Array]]:
    """From changes of the outputs to `S_r` times those of each row, over the root of `n`, with `H_r = S_r^T S_r`."""
    what = "the exact Fisher matrix"
    return lambda moved: [mark.times_root(outputs[mark.key], moved[mark.key], n, what) for mark in marks.marks]


def _empirical(marks: Marks, slopes: ByMark, n: int) -> Callable[[ByMark], list[jax.Array]]:
    """From changes of the outputs to those of the loss of each example, times the root of `n`.

    What a mark of weight `w` brings is over the root of `w`. The rows of a batch of its own are examples of their own.
    """
    apart = [mark for mark in marks.marks if mark.rows % n and marks.weighted]
    together = [mark for mark in marks.marks if mark not in apart]
    for mark in together:
        if mark.scans and (mark.rows != n or len(together) > 1):
            which = f"its {mark.rows} rows cannot be shared out among {n} examples"
            raise ValueError(f"the output is marked inside a scan, where {which}: mark it outside")
        if mark.rows % n:
            raise ValueError(f"num_examples={n} does not divide the {mark.rows} rows of the marked output")

    def examples(moved, mark, count):
        return math.sqrt(n / mark.weight) * jnp.sum((slopes[mark.key] * moved[mark.key]).reshape(count, -1), axis=1)

    def rows(moved):
        alone = [examples(moved, mark, mark.rows) for mark in apart]
        return alone + [sum(examples(moved, mark, n) for mark in together)] * bool(together)

    return rows


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
