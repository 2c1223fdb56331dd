"""Symmetric matrices over parameter trees, which are known by their products with vectors."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.flatten_util import ravel_pytree
from optax import Params


class Linear:
    """Base class of symmetric matrices over the parameters. A subclass defines `matvec` and `shapes`."""

    def matvec(self, tree: Params) -> Params:
        """Multiply the matrix by a tree like the parameters."""
        raise NotImplementedError

    def shapes(self) -> Params:
        """Return the parameters' shapes and dtypes, a tree of `jax.ShapeDtypeStruct`."""
        raise NotImplementedError

    @property
    def size(self) -> int:
        """The matrix dimension, which is the number of parameters."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.shapes()))

    def __matmul__(self, vector: Params | Array) -> Params | Array:
        """Multiply by a tree like the parameters, or by a flat vector in the order of `ravel_pytree(params)`."""
        if isinstance(vector, Array | np.ndarray) and vector.ndim == 1:
            # If the parameters are a bare vector, the result keeps the dtype of `vector`.
            if vector.shape != getattr(self.shapes(), "shape", None):
                return self._flat(jnp.asarray(vector))
        return self.matvec(vector)

    def _flat(self, vector: Array) -> Array:
        zeros, unravel = ravel_pytree(jax.tree.map(jnp.zeros_like, self.shapes()))
        if vector.shape != zeros.shape:
            raise ValueError(
                f"a flat vector has shape {list(vector.shape)}, but there are {zeros.size} parameters"
            )
        return ravel_pytree(self.matvec(unravel(vector.astype(zeros.dtype))))[0]

    def to_dense(self) -> Array:
        """Return a small model's dense matrix, `[p, p]`, in the order of `jax.flatten_util.ravel_pytree(params)`."""
        leaves = jax.tree.leaves(self.shapes())
        size = sum(leaf.size for leaf in leaves)
        units = jnp.eye(size, dtype=jnp.result_type(*leaves))
        return lax.map(self._flat, units, batch_size=256).T

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.size:,} parameters)"
