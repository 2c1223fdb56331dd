"""A loss function's whole Gauss-Newton matrix, without forming the matrix."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from optax import Params

from kfac._capture.outputs import marked
from kfac._checks import check_given
from kfac._factors import static
from kfac.curvature._matrix import Linear


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class GaussNewton(Linear):
    """The matrix `F = (1/n) sum_r J_r^T H_r J_r` over the rows of the marked outputs.

    `kfac.curvature.gauss_newton` returns it. Like a `BlockOperator`, it is a pytree.

    Attributes:
      params: the parameters.
      data: the other arguments of `loss_fn`, with all examples.
      loss_fn: `loss_fn(params, *data)`, the mean loss.
      num_examples: the number of examples in each of the `batches` parts, or None.
      batches: the number of equal parts into which products split `data`.
    """

    params: Any
    data: tuple[Any, ...]
    loss_fn: Callable = static()
    num_examples: int | None = static()
    batches: int = static()

    def shapes(self) -> Params:
        """Return the parameters' shapes and dtypes, a tree of `jax.ShapeDtypeStruct`."""
        return jax.eval_shape(lambda params: params, self.params)

    def matvec(self, tree: Params) -> Params:
        """Multiply the matrix by a tree like the parameters; the result keeps the dtype of each leaf."""
        tangents = jax.tree.map(
            lambda p, t: jnp.asarray(t).astype(p.dtype), self.params, tree
        )
        total = self._sum(lambda root, index: root(tangents))
        return jax.tree.map(
            lambda x, t: (x / self.batches).astype(jnp.result_type(t)), total, tree
        )

    def sample(self, key: Array) -> Params:
        """Draw a tree from the normal distribution with mean zero and this matrix as its covariance.

        The draw is `R^T` times white noise, with `F = R^T R`.

        Args:
          key: a PRNG key.
        """

        def white(root, index):
            rows = jax.eval_shape(root, self.params)
            own_key = jax.random.fold_in(key, index)
            return optax.tree.random_like(own_key, rows, jax.random.normal)

        return optax.tree.scale(self.batches**-0.5, self._sum(white))

    def _sum(self, rows: Callable[..., list[Array]]) -> Params:
        """Return the sum of `R_b^T rows(R_b, b)` over batches `b`, with the batch's matrix `F_b = R_b^T R_b`."""

        def of_batch(data, index):
            loss_fn = marked(
                lambda p: self.loss_fn(p, *data),
                self.params,
                self.num_examples,
                "gauss_newton",
            )
            _, root = loss_fn.root(self.params)
            return jax.linear_transpose(root, self.params)(rows(root, index))[0]

        if self.batches == 1:
            return of_batch(self.data, jnp.zeros((), jnp.int32))

        def add(total, part):
            return optax.tree.add(total, of_batch(*part)), None

        parts = jax.tree.map(
            lambda x: x.reshape(self.batches, -1, *x.shape[1:]), self.data
        )
        zeros = optax.tree.zeros_like(self.params)
        total, _ = lax.scan(add, zeros, (parts, jnp.arange(self.batches)))
        return total


def gauss_newton(
    loss_fn: Callable,
    params: Params,
    *data: Any,
    num_examples: int | None = None,
    batches: int = 1,
) -> GaussNewton:
    """Return a loss function's whole Gauss-Newton matrix, which equals the Fisher matrix.

    Unlike the block-diagonal `block_operator`, the whole matrix includes the curvature between layers. It is
    `F = (1/n) sum_r J_r^T H_r J_r`, with the Jacobian `J_r` of row `r` of the marked outputs and the Hessian `H_r` of
    the row's loss term `-log p` with respect to the row. The matrix is never formed. A product takes a forward-mode
    derivative and a backward pass. Conjugate gradients solve linear systems, with the blocks as a preconditioner::

        fisher = kfac.curvature.gauss_newton(loss_fn, params, batch)
        blocks = n * kfac.curvature.block_operator(layers, factors) + 10.0
        gradient, unravel = jax.flatten_util.ravel_pytree(jax.grad(loss_fn)(params, batch))
        product = lambda v: n * (fisher @ v) + 10.0 * v
        solution, _ = jax.scipy.sparse.linalg.cg(product, gradient, M=lambda v: blocks.inv() @ v)

    To use several devices, place `params` and `data` on a mesh.

    Args:
      loss_fn: `loss_fn(params, *data)`, the mean loss, with its outputs marked by `kfac.mark_output`.
      params: the parameters.
      *data: the other arguments of `loss_fn`, with all examples over which the matrix is averaged.
      num_examples: the number of examples in `data` over which the loss is averaged, as for `value_and_grad`.
      batches: the number of equal parts into which each array of `data` is split along its first axis. A product scans
        over the parts, so it needs the memory of a single part.

    Returns:
      A `GaussNewton`, with products, samples and the dense matrix of small models.

    Raises:
      ValueError: an argument is out of range, or `batches` does not divide an array or `num_examples`. Products raise
        it when they are traced, if no output is marked, if the loss depends on a parameter but no marked output does,
        or if the number of examples is not clear.

    References:
      Martens, "Deep learning via Hessian-free optimization", ICML 2010.
    """
    check_given(batches=batches, num_examples=num_examples)
    if batches > 1:
        shapes = map(jnp.shape, jax.tree.leaves(data))
        for shape in (*shapes, (num_examples or 0,)):
            length = shape[0] if shape else "a scalar among the data"
            if not shape or shape[0] % batches:
                raise ValueError(
                    f"batches={batches} does not divide {length}: loss_fn may close over what all examples share, "
                    "such as a key"
                )
    if num_examples is not None:
        num_examples //= batches
    data = jax.tree.map(jnp.asarray, data)
    return GaussNewton(params, data, loss_fn, num_examples, batches)
