"""Exact diagonal blocks of a small model's Fisher matrix, to measure approximation errors.

`Layer.to_matrix` turns a layer's parameters into a matrix `[d_out, d_in]` with the bias as its last column. A block
indexes the entries of this matrix in the order of `kron(A, G)`: entry `(i_out, i_in)` has index `i_in * d_out + i_out`.
Blocks of stacked layers have a leading axis of copies.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from kfac._capture.find_layers import layers_of
from kfac._capture.outputs import Marks, find_marks
from kfac._capture.plan import check_same
from kfac._capture.replay import replay
from kfac._capture.taps import Key, Plan
from kfac._capture.trace import Trace, batch_of, trace
from kfac._factors import Block, Kronecker, Statistics
from kfac._layers import Layer, Layers
from kfac._statistics.rows import accumulator

_WHAT = "the exact Fisher matrix"  # the caller's name in error messages


def fisher_blocks(
    loss_fn: Callable[..., Any],
    layers: Layers,
    *,
    fisher: str = "true",
    names: Sequence[str] | None = None,
    has_aux: bool = False,
    num_examples: int | None = None,
) -> Callable[..., dict[str, Array]]:
    """Return a function that computes the exact Fisher block of each layer.

    Let `n` be the number of examples, and `J_r` the Jacobian of row `r` of the marked output with respect to a layer's
    parameters. `loss_fn` marks the output with `kfac.mark_output`. The block is, by `fisher`:

    - `"true"`: `(1/n) sum_r J_r^T H_r J_r`. `H_r` is the second moment of the gradient of `-log p(y | output)` with
      respect to row `r`, over targets `y` from the distribution that the network predicts. `value_and_grad` with
      `fisher="sampled"` estimates this matrix. For the built-in distributions `H_r = E[(E[y] - y) (E[y] - y)^T]`, and
      the matrix equals the loss function's generalised Gauss-Newton matrix (Martens 2020, section 9.2).
    - `"empirical"`: `n sum_i g_i g_i^T`. `g_i` is the contribution of example `i`, through its rows of the marked
      output, to the gradient of the loss (Kunstner et al. 2019, equation 3).

    Both blocks remain exact if examples interact, because `J_r` differentiates through the whole batch. If the marked
    output has more than `n` rows, each example owns `rows / n` consecutive rows.

    The function differentiates the whole batch once per parameter and stores an output tangent for each, so use it for
    small models and few examples.

    Args:
      loss_fn: the mean loss, as for `value_and_grad`.
      layers: the layers that `find_layers` returned for `loss_fn`.
      fisher: `"true"` or `"empirical"`.
      names: the names of the layers. The default is all layers that are not skipped.
      has_aux: whether `loss_fn` returns a pair.
      num_examples: `n`, by default the number of rows of the marked output; see `value_and_grad`.

    Returns:
      A function of the arguments of `loss_fn`. It returns a dictionary from layer name to block, `[p, p]` with
      `p = d_in * d_out`, or `[copies, p, p]` for stacked layers. Blocks are float32, or float64 for float64 parameters.

    Raises:
      ValueError: an argument is out of range. The returned function raises it if no output is marked, if the loss
        depends on a parameter but no marked output does, if the layers differ from `layers`, if the number of examples
        is not clear, or if an output is marked inside a scan and its rows cannot be assigned to examples.
    """
    if fisher not in ("true", "empirical"):
        raise ValueError(f"fisher must be 'true' or 'empirical', but is {fisher!r}")
    valid = [layer.name for layer in layers.with_blocks]
    chosen = valid if names is None else list(names)
    for name in chosen:
        if name not in valid:
            raise ValueError(
                f"names: no layer with statistics is called {name!r}; there are {', '.join(valid)}"
            )

    def blocks(params, *args, **kwargs):
        traced = trace(
            loss_fn, has_aux, params, args, kwargs, *batch_of(layers, args, kwargs)
        )
        marks = find_marks(traced)
        marks.require(_WHAT, traced, layers.skipped_paths)
        found = layers_of(traced, layers, marks, num_examples)
        check_same(layers, found.layers)
        n = found.num_examples
        if n is None:
            raise ValueError(found.unclear)
        leaves = dict(zip(traced.names, jax.tree.leaves(params), strict=True))
        outputs = _outputs(traced, marks, leaves)
        rows_of = functools.partial(
            _true if fisher == "true" else _empirical, marks, outputs, n
        )
        return {name: _block(layers[name], leaves, rows_of) for name in chosen}

    return blocks


ByPath = dict[str, Array]
ByMark = dict[Key, Array]
Rows = Callable[[ByPath], list[Array]]


def _block(layer: Layer, leaves: ByPath, rows_of: Rows) -> Array:
    """Return a layer's block `S^T S`, where `rows_of` multiplies a change of the parameters by `S`."""
    dtype = accumulator(jnp.result_type(*leaves.values()))
    zeros = jax.tree.map(jnp.zeros_like, leaves)

    def rows(unit):
        change = dict(zeros)
        for path, leaf in zip(layer.params, layer.from_rows(unit), strict=True):
            change[path] = leaf.astype(zeros[path].dtype)
        return jnp.concatenate([x.astype(dtype).ravel() for x in rows_of(change)])

    size = layer.d_in * layer.d_out
    units = jnp.eye(layer.copies * size, dtype=dtype)
    units = units.reshape(-1, layer.copies, layer.d_in, layer.d_out)
    root = lax.map(rows, units, batch_size=256).reshape(layer.copies, size, -1)
    matrices = jnp.einsum("cpr,cqr->cpq", root, root, precision="highest")
    return matrices if layer.stacked else matrices[0]


class _Outputs(NamedTuple):
    """The marked outputs of a loss.

    Attributes:
      values: the outputs.
      push: multiplies a change of the parameters by the Jacobian of the outputs.
      slopes: the gradient of the loss with respect to the outputs.
    """

    values: ByMark
    push: Callable[[ByPath], ByMark]
    slopes: ByMark


def _outputs(traced: Trace, marks: Marks, leaves: ByPath) -> _Outputs:
    plan = Plan()
    marks.place(plan, lambda mark: lambda x, offset: (x + offset, x))

    def evaluate(leaves, offsets):
        inputs = [*leaves.values(), *traced.arrays]
        outs, outputs = replay(traced.program, inputs, plan, offsets)
        return outs[0], outputs

    offsets = {}
    for mark in marks.marks:
        shape = *mark.scans, *mark.value.shape
        offsets[mark.key] = jnp.zeros(shape, mark.value.dtype)
    slopes = jax.grad(lambda offsets: evaluate(leaves, offsets)[0])(offsets)
    outputs, pull = jax.vjp(lambda leaves: evaluate(leaves, offsets)[1], leaves)
    # Transpose the VJP, because functions with a `jax.custom_vjp` have no forward-mode derivative.
    push = jax.linear_transpose(lambda cotangents: pull(cotangents)[0], outputs)
    return _Outputs(outputs, lambda change: push(change)[0], slopes)


def _true(
    marks: Marks,
    outputs: _Outputs,
    n: int,
    change: ByPath,
) -> list[Array]:
    """Return `sqrt(weight / n) S_r v_r` by mark, with the change `v_r` of output row `r` and `H_r = S_r^T S_r`."""
    moved = outputs.push(change)
    return [
        mark.times_root(outputs.values[mark.key], moved[mark.key], n, _WHAT)
        for mark in marks.marks
    ]


def _empirical(
    marks: Marks,
    outputs: _Outputs,
    n: int,
    change: ByPath,
) -> list[Array]:
    """Return `sqrt(n)` times the change of each example's contribution to the loss.

    The contribution of a mark with weight `w` is divided by `sqrt(w)`. If marks have weights and `n` does not divide
    the rows of a mark, the mark belongs to another batch, and each of its rows counts as an example.
    """
    apart = [mark for mark in marks.marks if mark.rows % n and marks.weighted]
    together = [mark for mark in marks.marks if mark not in apart]
    for mark in together:
        if mark.scans and (mark.rows != n or len(together) > 1):
            raise ValueError(
                f"the output is marked inside a scan, where its {mark.rows} rows cannot be shared out among {n} "
                "examples: mark it outside"
            )
        if mark.rows % n:
            raise ValueError(
                f"num_examples={n} does not divide the {mark.rows} rows of the marked output"
            )
    moved = outputs.push(change)

    def examples(mark, count):
        parts = (outputs.slopes[mark.key] * moved[mark.key]).reshape(count, -1)
        return math.sqrt(n / mark.weight) * jnp.sum(parts, axis=1)

    rows = [examples(mark, mark.rows) for mark in apart]
    if together:
        rows.append(sum(examples(mark, n) for mark in together))
    return rows


class Error(NamedTuple):
    """The error of an approximate block, arrays of shape `[]` or `[copies]`.

    Attributes:
      relative: the Frobenius norm of the difference, divided by the norm of the exact block; 0 is perfect.
      cosine: the cosine of the angle between both blocks as vectors, which ignores their scales; 1 is perfect.
    """

    relative: Array
    cosine: Array


def dense(block: Block, basis: Kronecker | None = None) -> Array:
    """Return an approximate block as a dense matrix, in the order of `fisher_blocks`.

    Args:
      block: a block of a `Factors`, such as `Kronecker(A, G)` or `Unitwise(F)`. Diagonal factors and factors that are
        split into several blocks are not supported.
      basis: the layer's eigenvectors from `kfac.curvature.eigenbasis`, to get the matrix of EKFAC. Its eigenvalues are
        `block.moments`.

    Returns:
      `[p, p]`, or `[copies, p, p]` for stacked factors. Without `basis`, a Kronecker block gives `kron(A, G)`. A
      unit-wise block gives the matrix that contains the blocks of all channels.

    Raises:
      TypeError: `block` is not the statistics of a layer.
      ValueError: `basis` is given, but `block` has no moments; or the block's factors are not matrices with the same
        leading axes, because a factor is diagonal or split.
    """
    if not isinstance(block, Statistics):
        raise TypeError(
            f"block must be Kronecker or Unitwise, but is {type(block).__name__}"
        )
    return block.combined().dense(basis)


def error(exact: Array, approximation: Array) -> Error:
    """Return the error of an approximate block.

    Args:
      exact: the exact block `[..., p, p]`, such as a block of `fisher_blocks`.
      approximation: an array with the same shape, such as `dense(factors[name])`.

    Returns:
      `Error(relative, cosine)`, each of shape `[...]`.

    Raises:
      ValueError: the shapes differ.
    """
    if exact.shape != approximation.shape:
        raise ValueError(
            f"exact has shape {list(exact.shape)}, but approximation {list(approximation.shape)}"
        )

    def norm(x):
        return jnp.linalg.norm(x, axis=(-2, -1))

    size = norm(exact)
    product = jnp.sum(exact * approximation, axis=(-2, -1))
    return Error(
        norm(exact - approximation) / size, product / (size * norm(approximation))
    )


def nearest_kronecker(exact: Array, layer: Layer) -> Kronecker:
    """Return the Kronecker factors whose product is nearest to a block in the Frobenius norm.

    The leading singular vectors of the rearranged block give the factors (Van Loan & Pitsianis 1993). If the block is
    positive semi-definite, so are the factors.

    Args:
      exact: the block, `[p, p]`, or `[copies, p, p]` for a stacked layer.
      layer: the layer, which has a Kronecker block, such as kind `"dense"` or `"conv"`.

    Returns:
      `Kronecker(A, G)`, with factors of equal norm.

    Raises:
      ValueError: `layer` has no Kronecker block, or `exact` does not have its shape.
    """
    shape, a, g = layer.factor_shapes, layer.d_in, layer.d_out
    if set(shape) != {"A", "G"} or exact.shape != (*shape["A"][:-2], a * g, a * g):
        raise ValueError(
            f"a block of shape {list(exact.shape)} is not that of {layer.describe()}"
        )

    def nearest(block):
        rearranged = block.reshape(a, g, a, g).swapaxes(1, 2).reshape(a * a, g * g)
        left, values, right = jnp.linalg.svd(rearranged, full_matrices=False)
        in_a, in_g = left[:, 0].reshape(a, a), right[0].reshape(g, g)
        root = jnp.sqrt(values[0]) * jnp.where(jnp.trace(in_a) < 0, -1, 1)
        return Kronecker(root * in_a, root * in_g)

    return lax.map(nearest, exact) if exact.ndim == 3 else nearest(exact)
