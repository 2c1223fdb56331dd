"""Matrix-free symmetric matrices over parameter trees, defined by their products with vectors.

Conjugate gradients solve linear systems. Lanczos' method gives eigenvalues and matrix functions. Random vectors give
traces and determinants, with error estimates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree

from kfac._checks import check


class Estimate(NamedTuple):
    """A stochastic estimate.

    Attributes:
      value: the mean over the random vectors.
      error: the standard error of this mean. `ByProducts.logdet` adds the truncation error of Lanczos' method.
    """

    value: jax.Array
    error: jax.Array


class Solution(NamedTuple):
    """The solution of `M x = v` by conjugate gradients.

    Attributes:
      value: `x`, a tree.
      steps: the number of steps.
      residual: the norm of `M x - v`, divided by the norm of `v`.
    """

    value: Any
    steps: jax.Array
    residual: jax.Array


class Eigenpairs(NamedTuple):
    """The `k` largest eigenvalues and their eigenvectors.

    Attributes:
      values: the eigenvalues in descending order, `[k]`.
      vectors: the eigenvectors `q`, a tree with leaves `[k, ...]`.
      residuals: the norms of `M q - value q`, `[k]`.
    """

    values: jax.Array
    vectors: Any
    residuals: jax.Array


class Linear:
    """Base class of symmetric matrices over the parameters. A subclass defines `matvec` and `like`."""

    near: Any = None  # an `Operator` that approximates the matrix: the preconditioner

    def matvec(self, tree: Any) -> Any:
        """Multiply the matrix by a tree like the parameters."""
        raise NotImplementedError

    def like(self) -> Any:
        """Return the parameters' shapes and dtypes, a tree of `jax.ShapeDtypeStruct`."""
        raise NotImplementedError

    @property
    def size(self) -> int:
        """The matrix dimension, which is the number of parameters."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.like()))

    def __matmul__(self, vector: Any) -> Any:
        """Multiply by a tree like the parameters, or by a flat vector in the order of `ravel_pytree(params)`."""
        like = self.like()
        if isinstance(vector, jax.Array | np.ndarray) and vector.ndim == 1:
            if [leaf.shape for leaf in jax.tree.leaves(like)] != [vector.shape]:
                return self._flat(jnp.asarray(vector))
        return self.matvec(vector)

    def _flat(self, vector: jax.Array) -> jax.Array:
        zeros, unravel = self._raveled()
        if vector.shape != zeros.shape:
            raise ValueError(
                f"a flat vector has shape {list(vector.shape)}, but there are {zeros.size} parameters"
            )
        return ravel_pytree(self.matvec(unravel(vector.astype(zeros.dtype))))[0]

    def _raveled(self) -> tuple[jax.Array, Callable[[jax.Array], Any]]:
        return ravel_pytree(
            jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self.like())
        )

    def __mul__(self, scale: jax.typing.ArrayLike) -> Any:
        """Multiply the matrix by a number."""
        s = scalar(scale)
        m = as_matrix(self)
        return Matrix(
            m.terms,
            tuple(s * x for x in m.scales),
            s * m.shift,
            None if m.near is None else m.near * s,
        )

    __rmul__ = __mul__

    def __neg__(self) -> Any:
        """Return the negated matrix."""
        return self * -1.0

    def __add__(self, other: Any) -> Any:
        """Add another matrix, or a number times the identity, such as a prior's precision."""
        a = as_matrix(self)
        if isinstance(other, Linear):
            b = as_matrix(other)
            # The sum of two operators is not an `Operator`, so only one of them can precondition.
            near = b.near if a.near is None else a.near
            return Matrix(
                a.terms + b.terms, a.scales + b.scales, a.shift + b.shift, near
            )
        near = None if a.near is None else a.near + other
        return dataclasses.replace(a, shift=a.shift + scalar(other), near=near)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        """Subtract another matrix, or a number times the identity."""
        return self + -1.0 * other

    def __rsub__(self, other: Any) -> Any:
        """Subtract the matrix from a number times the identity."""
        return -self + other

    def eigsh(self, k: int, key: jax.Array, steps: int | None = None) -> Eigenpairs:
        """Compute the `k` largest eigenvalues and their eigenvectors by Lanczos' method.

        Args:
          k: the number of eigenvalues.
          key: a PRNG key for the start vector.
          steps: the number of products; `2 k + 32` by default. Small residuals show that `steps` is large enough.
        """
        check(k=k)
        zeros, unravel = self._raveled()
        steps = min(steps or 2 * k + 32, zeros.size)
        basis, tridiagonal, last = lanczos(
            self._flat, jax.random.normal(key, zeros.shape, zeros.dtype), steps
        )
        values, rotation = jnp.linalg.eigh(tridiagonal)
        chosen = rotation[:, ::-1][:, :k]
        vectors = jax.vmap(unravel)(
            jnp.matmul(chosen.T, basis, precision=lax.Precision.HIGHEST)
        )
        return Eigenpairs(values[::-1][:k], vectors, last * jnp.abs(chosen[-1]))

    def to_dense(self) -> jax.Array:
        """Return a small model's dense matrix, `[p, p]`, in the order of `jax.flatten_util.ravel_pytree(params)`."""
        zeros, _ = self._raveled()
        return lax.map(
            self._flat, jnp.eye(zeros.size, dtype=zeros.dtype), batch_size=256
        ).T

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.size:,} parameters)"


class ByProducts(Linear):
    """Base class of matrices whose solutions, functions, trace and determinant need only products."""

    def solve(
        self,
        tree: Any,
        damping: Any = 0.0,
        *,
        tolerance: float = 1e-5,
        max_steps: int = 1000,
    ) -> Solution:
        """Compute `(M + damping I)^-1 v` by conjugate gradients, preconditioned by `near` unless it is None.

        Args:
          tree: `v`, a tree like the parameters.
          damping: a number, added to the diagonal.
          tolerance: stop when the residual norm is at most `tolerance` times the norm of `v`.
          max_steps: the maximum number of steps, each with a single product.
        """
        _, unravel = self._raveled()
        near = None if self.near is None else (self.near + damping).inv()._flat
        flat, _ = ravel_pytree(tree)
        x, steps, residual = conjugate_gradients(
            (self + damping)._flat, flat, near, tolerance, max_steps
        )
        return Solution(unravel(x), steps, residual)

    def inv(self, *, tolerance: float = 1e-5, max_steps: int = 1000) -> Inverted:
        """Return the inverse; each of its products is a `solve` with these options."""
        return Inverted(self, tolerance, max_steps)

    def map(self, fn: Callable[[jax.Array], jax.Array], steps: int = 64) -> Function:
        """Apply `fn` to the eigenvalues. Each product with the result takes `steps` steps of Lanczos' method."""
        return Function(self, fn, steps)

    def sqrt(self, steps: int = 64) -> Function:
        """Return the symmetric square root."""
        return self.map(jnp.sqrt, steps)

    def trace(self, key: jax.Array, probes: int = 32) -> Estimate:
        """Estimate the trace from products with `probes` random sign vectors (Hutchinson 1990); `key` is a PRNG key."""
        zeros, _ = self._raveled()

        def of_one(key):
            signs = jax.random.rademacher(key, zeros.shape, zeros.dtype)
            return jnp.vdot(signs, self._flat(signs))

        return _mean(of_one, key, probes)

    def logdet(self, key: jax.Array, probes: int = 16, steps: int = 64) -> Estimate:
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
        zeros, _ = self._raveled()
        root = None if self.near is None else self.near.inv_sqrt()._flat

        def of_one(key):
            start = jax.random.rademacher(key, zeros.shape, zeros.dtype)
            product = (
                self._flat if root is None else lambda v: root(self._flat(root(v)))
            )
            tridiagonal = lanczos(product, start, min(steps, zeros.size))[1]
            # The tridiagonal matrices after all steps and after half of the steps.
            parts = [
                tridiagonal[:k, :k]
                for k in (len(tridiagonal), -(-len(tridiagonal) // 2))
            ]
            return zeros.size * jnp.stack(
                [first_column(jnp.log, part)[0] for part in parts]
            )

        (value, half), errors = _mean(of_one, key, probes)
        return Estimate(
            value + (0 if root is None else self.near.logdet()),
            jnp.hypot(errors[0], value - half),
        )


def _mean(
    of_one: Callable[[jax.Array], jax.Array], key: jax.Array, probes: int
) -> Estimate:
    check(probes=probes)
    values = lax.map(of_one, jax.random.split(key, probes))
    error = (
        jnp.std(values, 0, ddof=1) / probes**0.5
        if probes > 1
        else jnp.full(values.shape[1:], jnp.inf)
    )
    return Estimate(jnp.mean(values, 0), error)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Matrix(ByProducts):
    """A linear combination of symmetric matrices over the parameters, plus a multiple of the identity.

    `kfac.curvature.gauss_newton` and sums of operators return a `Matrix`. Like `Operator`, it is a pytree.

    Attributes:
      terms: the matrices.
      scales: the factor of each matrix.
      shift: the factor of the identity.
      near: the `Operator` that preconditions `solve`, `inv` and `logdet`, or None.
    """

    terms: tuple[Any, ...]
    scales: tuple[Any, ...]
    shift: Any = 0.0
    near: Any = None

    def like(self) -> Any:
        """Return the parameters' shapes and dtypes, a tree of `jax.ShapeDtypeStruct`."""
        return self.terms[0].like()

    def matvec(self, tree: Any) -> Any:
        """Multiply the matrix by a tree like the parameters; the result keeps the dtype of each leaf."""
        products = [term.matvec(tree) for term in self.terms]

        def total(leaf, *terms):
            return (
                self.shift * leaf
                + sum(s * x for s, x in zip(self.scales, terms, strict=True))
            ).astype(leaf.dtype)

        return jax.tree.map(total, tree, *products)

    def sample(self, key: jax.Array) -> Any:
        """Draw a tree from the normal distribution with mean zero and this matrix as its covariance."""
        noise, unravel = self._raveled()
        first, *keys = jax.random.split(key, 1 + len(self.terms))
        draws = [term.sample(own) for term, own in zip(self.terms, keys, strict=True)]
        roots = [jnp.sqrt(scale) for scale in self.scales]
        white = unravel(
            jnp.sqrt(self.shift).astype(noise.dtype)
            * jax.random.normal(first, noise.shape, noise.dtype)
        )
        return jax.tree.map(
            lambda w, *own: w + sum(r * x for r, x in zip(roots, own, strict=True)),
            white,
            *draws,
        )


def as_matrix(matrix: Any) -> Matrix:
    return (
        matrix
        if isinstance(matrix, Matrix)
        else Matrix((matrix,), (1.0,), near=matrix.near)
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Inverted(ByProducts):
    """The inverse of a matrix: a product solves a linear system by conjugate gradients."""

    matrix: Any
    tolerance: float = dataclasses.field(metadata={"static": True})
    max_steps: int = dataclasses.field(metadata={"static": True})

    def like(self) -> Any:
        return self.matrix.like()

    def matvec(self, tree: Any) -> Any:
        return self.matrix.solve(
            tree, tolerance=self.tolerance, max_steps=self.max_steps
        ).value

    def sample(self, key: jax.Array) -> Any:
        """Draw a tree with covariance `M^-1`: the solution `M^-1 y` for a draw `y` with covariance `M`."""
        return self.matvec(self.matrix.sample(key))

    def logdet(self, key: jax.Array, probes: int = 16, steps: int = 64) -> Estimate:
        """Estimate the inverse's log-determinant, minus the matrix's `logdet`."""
        estimate = self.matrix.logdet(key, probes, steps)
        return Estimate(-estimate.value, estimate.error)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Function(ByProducts):
    """A function of a matrix, applied to vectors by Lanczos' method.

    A product with `v` is `|v| Q fn(T) e_1`, with the Lanczos basis `Q` of `v` and the tridiagonal matrix `T`.
    """

    matrix: Any
    fn: Callable[[jax.Array], jax.Array] = dataclasses.field(metadata={"static": True})
    steps: int = dataclasses.field(metadata={"static": True})

    def like(self) -> Any:
        return self.matrix.like()

    def matvec(self, tree: Any) -> Any:
        flat, unravel = ravel_pytree(tree)
        basis, tridiagonal, _ = lanczos(
            self.matrix._flat, flat, min(self.steps, flat.size)
        )
        return unravel(
            jnp.linalg.norm(flat) * (first_column(self.fn, tridiagonal) @ basis)
        )


def first_column(fn: Callable[[jax.Array], jax.Array], matrix: jax.Array) -> jax.Array:
    """Return `fn(T) e_1` for a small symmetric matrix `T`."""
    values, rotation = jnp.linalg.eigh(matrix)
    return jnp.matmul(
        rotation,
        jnp.where(rotation[0] == 0, 0.0, rotation[0] * fn(values)),
        precision="highest",
    )


def lanczos(
    product: Callable, start: jax.Array, steps: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Run Lanczos' method with full reorthogonalization.

    Each new vector is orthogonalized twice against all earlier vectors. If the Krylov space is exhausted, a random
    vector continues the basis, and the off-diagonal entry between this vector and its predecessor is zero.

    Returns:
      An orthonormal basis `[steps, p]` whose first vector is parallel to `start`, the tridiagonal matrix
      `[steps, steps]`, and the next off-diagonal entry.
    """
    epsilon = jnp.finfo(start.dtype).eps

    def orthogonal(v, basis):
        for _ in range(2):
            v = v - jnp.matmul(
                jnp.matmul(basis, v, precision="highest"), basis, precision="highest"
            )
        return v

    def unit(v):
        norm = jnp.linalg.norm(v)
        return v / jnp.where(norm > 0, norm, 1)

    def step(k, state):
        basis, alphas, betas, largest = state
        new = product(basis[k])
        alpha = jnp.vdot(basis[k], new)
        new = orthogonal(new, basis)
        beta = jnp.linalg.norm(new)
        largest = jnp.maximum(largest, jnp.abs(alpha) + beta)
        exhausted = beta <= 16 * epsilon * largest
        random_vector = jax.random.normal(
            jax.random.fold_in(jax.random.key(0), k), new.shape, new.dtype
        )
        new = unit(orthogonal(unit(jnp.where(exhausted, random_vector, new)), basis))
        basis = basis.at[k + 1].set(new)
        return (
            basis,
            alphas.at[k].set(alpha),
            betas.at[k].set(jnp.where(exhausted, 0, beta)),
            largest,
        )

    basis = jnp.zeros((steps + 1, start.size), start.dtype).at[0].set(unit(start))
    empty = jnp.zeros(steps, start.dtype)
    basis, alphas, betas, _ = lax.fori_loop(
        0, steps, step, (basis, empty, empty, jnp.zeros((), start.dtype))
    )
    return (
        basis[:-1],
        jnp.diag(alphas) + jnp.diag(betas[:-1], 1) + jnp.diag(betas[:-1], -1),
        betas[-1],
    )


def conjugate_gradients(
    product: Callable,
    b: jax.Array,
    near: Callable | None,
    tolerance: float,
    max_steps: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Solve `M x = b` by conjugate gradients.

    Args:
      product: multiplies a vector by `M`.
      b: the right-hand side, `[p]`.
      near: applies the preconditioner, an approximate inverse of `M`, or None.
      tolerance: stop when the residual norm is at most `tolerance` times the norm of `b`.
      max_steps: the maximum number of steps.

    Returns:
      The solution, the number of steps, and the residual norm divided by the norm of `b`.
    """
    size = jnp.linalg.norm(b)

    def going(state):
        _, r, *_, k = state
        return (jnp.linalg.norm(r) > tolerance * size) & (k < max_steps)

    def step(state):
        x, r, p, rz, k = state
        moved = product(p)
        rate = rz / jnp.vdot(p, moved)
        x, r = x + rate * p, r - rate * moved
        z = r if near is None else near(r)
        new = jnp.vdot(r, z)
        return x, r, z + new / rz * p, new, k + 1

    z = b if near is None else near(b)
    x, r, *_, k = lax.while_loop(
        going, step, (jnp.zeros_like(b), b, z, jnp.vdot(b, z), jnp.zeros((), jnp.int32))
    )
    return x, k, jnp.linalg.norm(r) / jnp.where(size > 0, size, 1)


def scalar(value: Any) -> Any:
    if isinstance(value, Linear) or jnp.ndim(value):
        raise TypeError(
            f"an operator is multiplied by numbers, not by {type(value).__name__}"
        )
    return value
