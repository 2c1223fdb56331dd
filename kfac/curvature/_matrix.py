"""Matrix-free symmetric matrices over parameter trees, defined by their products with vectors.

Conjugate gradients solve linear systems. Lanczos' method gives eigenvalues and matrix functions. Random vectors give
traces and determinants, with error estimates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.flatten_util import ravel_pytree
from jax.typing import ArrayLike
from optax import Params

from kfac._checks import check
from kfac.curvature._krylov import conjugate_gradients, first_column, lanczos, matmul


class Estimate(NamedTuple):
    """A stochastic estimate.

    Attributes:
      value: the mean over the random vectors.
      error: the standard error of this mean. `MatrixFreeOperator.logdet` adds the truncation error of Lanczos' method.
    """

    value: Array
    error: Array


class Solution(NamedTuple):
    """The solution of `M x = v` by conjugate gradients.

    Attributes:
      value: `x`, a tree.
      steps: the number of steps.
      residual: the norm of `M x - v`, divided by the norm of `v`.
    """

    value: Any
    steps: Array
    residual: Array


class Eigenpairs(NamedTuple):
    """The `k` largest eigenvalues and their eigenvectors.

    Attributes:
      values: the eigenvalues in descending order, `[k]`.
      vectors: the eigenvectors `q`, a tree with leaves `[k, ...]`.
      residuals: the norms of `M q - value q`, `[k]`.
    """

    values: Array
    vectors: Any
    residuals: Array


class Linear:
    """Base class of symmetric matrices over the parameters. A subclass defines `matvec` and `shapes`."""

    preconditioner: Any = (
        None  # a `BlockOperator` that approximates the matrix: the preconditioner
    )

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
        zeros, unravel = self._zeros()
        if vector.shape != zeros.shape:
            raise ValueError(
                f"a flat vector has shape {list(vector.shape)}, but there are {zeros.size} parameters"
            )
        return ravel_pytree(self.matvec(unravel(vector.astype(zeros.dtype))))[0]

    def _zeros(self) -> tuple[Array, Callable[[Array], Params]]:
        """Return a flat vector of zeros, and the function that turns a flat vector into a tree."""
        return ravel_pytree(jax.tree.map(jnp.zeros_like, self.shapes()))

    def __mul__(self, scale: ArrayLike) -> Any:
        """Multiply the matrix by a number."""
        s = scalar(scale)
        matrix = as_matrix(self)
        scales = tuple(s * x for x in matrix.scales)
        preconditioner = (
            None if matrix.preconditioner is None else matrix.preconditioner * s
        )
        return MatrixFreeOperator(
            matrix.terms, scales, s * matrix.shift, preconditioner
        )

    __rmul__ = __mul__

    def __neg__(self) -> Any:
        """Return the negated matrix."""
        return self * -1.0

    def __add__(self, other: Linear | ArrayLike) -> Any:
        """Add another matrix, or a number times the identity, such as a prior's precision."""
        a = as_matrix(self)
        if isinstance(other, Linear):
            b = as_matrix(other)
            # The sum of two operators is not a `BlockOperator`, so only one of them can precondition.
            preconditioner = (
                b.preconditioner if a.preconditioner is None else a.preconditioner
            )
            shift = a.shift + b.shift
            return MatrixFreeOperator(
                a.terms + b.terms, a.scales + b.scales, shift, preconditioner
            )
        preconditioner = None if a.preconditioner is None else a.preconditioner + other
        return dataclasses.replace(
            a, shift=a.shift + scalar(other), preconditioner=preconditioner
        )

    __radd__ = __add__

    def __sub__(self, other: Linear | ArrayLike) -> Any:
        """Subtract another matrix, or a number times the identity."""
        return self + -1.0 * other

    def __rsub__(self, other: ArrayLike) -> Any:
        """Subtract the matrix from a number times the identity."""
        return -self + other

    def eigsh(self, k: int, key: Array, steps: int | None = None) -> Eigenpairs:
        """Compute the `k` largest eigenvalues and their eigenvectors by Lanczos' method.

        Args:
          k: the number of eigenvalues.
          key: a PRNG key for the start vector.
          steps: the number of products; `2 k + 32` by default. Small residuals show that `steps` is large enough.
        """
        check(k=k)
        zeros, unravel = self._zeros()
        steps = min(steps or 2 * k + 32, zeros.size)
        start = jax.random.normal(key, zeros.shape, zeros.dtype)
        basis, tridiagonal, last = lanczos(self._flat, start, steps)
        values, rotation = jnp.linalg.eigh(tridiagonal)
        chosen = rotation[:, ::-1][:, :k]
        vectors = jax.vmap(unravel)(matmul(chosen.T, basis))
        return Eigenpairs(values[::-1][:k], vectors, last * jnp.abs(chosen[-1]))

    def to_dense(self) -> Array:
        """Return a small model's dense matrix, `[p, p]`, in the order of `jax.flatten_util.ravel_pytree(params)`."""
        zeros, _ = self._zeros()
        units = jnp.eye(zeros.size, dtype=zeros.dtype)
        return lax.map(self._flat, units, batch_size=256).T

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.size:,} parameters)"


class KrylovOperator(Linear):
    """Base class of matrices whose solutions, functions, trace and determinant need only products."""

    def solve(
        self,
        tree: Params,
        damping: ArrayLike = 0.0,
        *,
        tolerance: float = 1e-5,
        max_steps: int = 1000,
    ) -> Solution:
        """Compute `(M + damping I)^-1 v` by conjugate gradients, preconditioned by `preconditioner` unless it is None.

        Args:
          tree: `v`, a tree like the parameters.
          damping: a number, added to the diagonal.
          tolerance: stop when the residual norm is at most `tolerance` times the norm of `v`.
          max_steps: the maximum number of steps, each with a single product.
        """
        _, unravel = self._zeros()
        damped = self + damping
        precondition = (
            _unchanged
            if damped.preconditioner is None
            else damped.preconditioner.inv()._flat
        )
        flat, _ = ravel_pytree(tree)
        x, steps, residual = conjugate_gradients(
            damped._flat, flat, precondition, tolerance, max_steps
        )
        return Solution(unravel(x), steps, residual)

    def inv(self, *, tolerance: float = 1e-5, max_steps: int = 1000) -> Inverted:
        """Return the inverse; each of its products is a `solve` with these options."""
        return Inverted(self, tolerance, max_steps)

    def map(self, fn: Callable[[Array], Array], steps: int = 64) -> Function:
        """Apply `fn` to the eigenvalues. Each product with the result takes `steps` steps of Lanczos' method."""
        return Function(self, fn, steps)

    def sqrt(self, steps: int = 64) -> Function:
        """Return the symmetric square root."""
        return self.map(jnp.sqrt, steps)

    def trace(self, key: Array, probes: int = 32) -> Estimate:
        """Estimate the trace from products with `probes` random sign vectors (Hutchinson 1990); `key` is a PRNG key."""
        return self._mean(lambda v: jnp.vdot(v, self._flat(v)), key, probes)

    def logdet(self, key: Array, probes: int = 16, steps: int = 64) -> Estimate:
        """Estimate the log-determinant by stochastic Lanczos quadrature (Ubaru, Chen & Saad 2017).

        With a preconditioner `P`, the result is `logdet(P)`, which is exact, plus an estimate of
        `logdet(P^-1/2 M P^-1/2)`, which varies less between random vectors.

        Args:
          key: a PRNG key.
          probes: the number of random vectors.
          steps: the number of products per random vector. With a preconditioner, few suffice.

        Returns:
          An `Estimate`. Its error is the root of the sum of two squares: the standard error, and the change in the
          value over the second half of the steps. This change approximates the truncation error.
        """
        root = (
            _unchanged
            if self.preconditioner is None
            else self.preconditioner.inv_sqrt()._flat
        )

        def of_probe(signs):
            size = signs.size
            _, tridiagonal, _ = lanczos(
                lambda v: root(self._flat(root(v))), signs, min(steps, size)
            )
            half = -(-len(tridiagonal) // 2)
            parts = tridiagonal, tridiagonal[:half, :half]
            return size * jnp.stack([first_column(jnp.log, x)[0] for x in parts])

        (value, value_of_half), (error, _) = self._mean(of_probe, key, probes)
        error = jnp.hypot(error, value - value_of_half)
        if self.preconditioner is not None:
            value += self.preconditioner.logdet()
        return Estimate(value, error)

    def _mean(
        self,
        of_probe: Callable[[Array], Array],
        key: Array,
        probes: int,
    ) -> Estimate:
        """Average `of_probe` over flat vectors of random signs."""
        check(probes=probes)
        zeros, _ = self._zeros()

        def value(key):
            return of_probe(jax.random.rademacher(key, zeros.shape, zeros.dtype))

        values = lax.map(value, jax.random.split(key, probes))
        if probes == 1:
            error = jnp.full(values.shape[1:], jnp.inf)
        else:
            error = jnp.std(values, 0, ddof=1) / probes**0.5
        return Estimate(jnp.mean(values, 0), error)


def _unchanged(vector: Array) -> Array:
    return vector


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class MatrixFreeOperator(KrylovOperator):
    """A linear combination of symmetric matrices over the parameters, plus a multiple of the identity.

    `kfac.curvature.gauss_newton` and sums of operators return a `MatrixFreeOperator`. Like `BlockOperator`, it is a
    pytree.

    Attributes:
      terms: the matrices.
      scales: the factor of each matrix.
      shift: the factor of the identity.
      preconditioner: the `BlockOperator` that preconditions `solve`, `inv` and `logdet`, or None.
    """

    terms: tuple[Any, ...]
    scales: tuple[Any, ...]
    shift: Any = 0.0
    preconditioner: Any = None

    def shapes(self) -> Params:
        """Return the parameters' shapes and dtypes, a tree of `jax.ShapeDtypeStruct`."""
        return self.terms[0].shapes()

    def matvec(self, tree: Params) -> Params:
        """Multiply the matrix by a tree like the parameters; the result keeps the dtype of each leaf."""

        def total(leaf, *terms):
            return _add_scaled(self.shift * leaf, self.scales, terms).astype(leaf.dtype)

        return jax.tree.map(total, tree, *[term.matvec(tree) for term in self.terms])

    def sample(self, key: Array) -> Params:
        """Draw a tree from the normal distribution with mean zero and this matrix as its covariance."""
        zeros, unravel = self._zeros()
        first, *keys = jax.random.split(key, 1 + len(self.terms))
        draws = [term.sample(own) for term, own in zip(self.terms, keys, strict=True)]
        roots = [jnp.sqrt(scale) for scale in self.scales]
        root = jnp.sqrt(self.shift).astype(zeros.dtype)
        white = unravel(root * jax.random.normal(first, zeros.shape, zeros.dtype))
        return jax.tree.map(lambda x, *own: _add_scaled(x, roots, own), white, *draws)


def _add_scaled(
    x: Array,
    scales: Sequence[ArrayLike],
    terms: Sequence[Array],
) -> Array:
    return x + sum(scale * y for scale, y in zip(scales, terms, strict=True))


def as_matrix(matrix: Linear) -> MatrixFreeOperator:
    if isinstance(matrix, MatrixFreeOperator):
        return matrix
    return MatrixFreeOperator((matrix,), (1.0,), preconditioner=matrix.preconditioner)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Inverted(KrylovOperator):
    """The inverse of a matrix: a product solves a linear system by conjugate gradients."""

    matrix: Any
    tolerance: float = dataclasses.field(metadata={"static": True})
    max_steps: int = dataclasses.field(metadata={"static": True})

    def shapes(self) -> Params:
        return self.matrix.shapes()

    def matvec(self, tree: Params) -> Params:
        solution = self.matrix.solve(
            tree, tolerance=self.tolerance, max_steps=self.max_steps
        )
        return solution.value

    def sample(self, key: Array) -> Params:
        """Draw a tree with covariance `M^-1`: the solution `M^-1 y` for a draw `y` with covariance `M`."""
        return self.matvec(self.matrix.sample(key))

    def logdet(self, key: Array, probes: int = 16, steps: int = 64) -> Estimate:
        """Estimate the inverse's log-determinant, minus the matrix's `logdet`."""
        estimate = self.matrix.logdet(key, probes, steps)
        return estimate._replace(value=-estimate.value)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Function(KrylovOperator):
    """A function of a matrix, applied to vectors by Lanczos' method.

    A product with `v` is `|v| Q fn(T) e_1`, with the Lanczos basis `Q` of `v` and the tridiagonal matrix `T`.
    """

    matrix: Any
    fn: Callable[[Array], Array] = dataclasses.field(metadata={"static": True})
    steps: int = dataclasses.field(metadata={"static": True})

    def shapes(self) -> Params:
        return self.matrix.shapes()

    def matvec(self, tree: Params) -> Params:
        flat, unravel = ravel_pytree(tree)
        steps = min(self.steps, flat.size)
        basis, tridiagonal, _ = lanczos(self.matrix._flat, flat, steps)
        result = matmul(first_column(self.fn, tridiagonal), basis)
        return unravel(jnp.linalg.norm(flat) * result)


def scalar(value: ArrayLike) -> ArrayLike:
    """Return the number, or raise a `TypeError` if the value is a matrix or an array."""
    if isinstance(value, Linear) or jnp.ndim(value):
        raise TypeError(
            f"an operator is multiplied by numbers, not by {type(value).__name__}"
        )
    return value
