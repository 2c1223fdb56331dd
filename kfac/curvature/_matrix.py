"""Symmetric matrices over trees of parameters that are known by their products.

Solutions come from conjugate gradients, eigenvalues and functions of the matrix from Lanczos' method, traces and
determinants from random vectors, with their errors.
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
    """A number from random vectors, and its error: the standard error of their mean."""

    value: jax.Array
    error: jax.Array


class Solution(NamedTuple):
    """A tree `x` with `M x = v`, the steps that it took, and the norm of `M x - v` relative to that of `v`."""

    value: Any
    steps: jax.Array
    residual: jax.Array


class Eigenpairs(NamedTuple):
    """The largest eigenvalues first, `[k]`, the eigenvectors as a stacked tree, and the norms of `M q - value q`."""

    values: jax.Array
    vectors: Any
    residuals: jax.Array


class Linear:
    """What all symmetric matrices over parameters have: one needs `matvec` and `like`."""

    near: Any = None  # an `Operator` that is about the matrix, to precondition by

    def matvec(self, tree: Any) -> Any:
        """The product with a tree like the parameters."""
        raise NotImplementedError

    def like(self) -> Any:
        """A tree of the shapes and dtypes of the parameters."""
        raise NotImplementedError

    @property
    def size(self) -> int:
        """How many parameters the matrix is over."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.like()))

    def __matmul__(self, vector: Any) -> Any:
        """The product with a tree like the parameters, or with a flat vector, as `ravel_pytree(params)` makes it."""
        like = self.like()
        if isinstance(vector, jax.Array | np.ndarray) and vector.ndim == 1:
            if [leaf.shape for leaf in jax.tree.leaves(like)] != [vector.shape]:
                return self._flat(jnp.asarray(vector))
        return self.matvec(vector)

    def _flat(self, vector: jax.Array) -> jax.Array:
        zeros, unravel = self._raveled()
        if vector.shape != zeros.shape:
            raise ValueError(f"a flat vector has shape {list(vector.shape)}, but there are {zeros.size} parameters")
        return ravel_pytree(self.matvec(unravel(vector.astype(zeros.dtype))))[0]

    def _raveled(self) -> tuple[jax.Array, Callable[[jax.Array], Any]]:
        return ravel_pytree(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self.like()))

    def __mul__(self, scale: jax.typing.ArrayLike) -> Any:
        """The matrix times a number."""
        s = scalar(scale)
        m = as_matrix(self)
        return Matrix(m.terms, tuple(s * x for x in m.scales), s * m.shift, None if m.near is None else m.near * s)

    __rmul__ = __mul__

    def __neg__(self) -> Any:
        """Minus the matrix."""
        return self * -1.0

    def __add__(self, other: Any) -> Any:
        """The matrix plus another, or plus a number times the identity, such as the precision of a prior."""
        a = as_matrix(self)
        if isinstance(other, Linear):
            b = as_matrix(other)
            near = b.near if a.near is None else a.near  # a sum of two operators is none, so it cannot precondition
            return Matrix(a.terms + b.terms, a.scales + b.scales, a.shift + b.shift, near)
        near = None if a.near is None else a.near + other
        return dataclasses.replace(a, shift=a.shift + scalar(other), near=near)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        """The matrix minus another, or minus a number times the identity."""
        return self + -1.0 * other

    def __rsub__(self, other: Any) -> Any:
        """A number times the identity, minus the matrix."""
        return -self + other

    def eigsh(self, k: int, key: jax.Array, steps: int | None = None) -> Eigenpairs:
        """The `k` largest eigenvalues and their eigenvectors, by Lanczos' method.

        Args:
          k: how many.
          key: a PRNG key, for the vector to begin with.
          steps: products; `2 k + 32` by default. The residuals say whether they are enough.
        """
        check(k=k)
        zeros, unravel = self._raveled()
        steps = min(steps or 2 * k + 32, zeros.size)
        basis, tridiagonal, last = lanczos(self._flat, jax.random.normal(key, zeros.shape, zeros.dtype), steps)
        values, rotation = jnp.linalg.eigh(tridiagonal)
        chosen = rotation[:, ::-1][:, :k]
        vectors = jax.vmap(unravel)(jnp.matmul(chosen.T, basis, precision=lax.Precision.HIGHEST))
        return Eigenpairs(values[::-1][:k], vectors, last * jnp.abs(chosen[-1]))

    def to_dense(self) -> jax.Array:
        """All of it, `[p, p]`, in the order of `jax.flatten_util.ravel_pytree(params)`; for small models."""
        zeros, _ = self._raveled()
        return lax.map(self._flat, jnp.eye(zeros.size, dtype=zeros.dtype), batch_size=256).T

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.size:,} parameters)"


class ByProducts(Linear):
    """What is computed of a matrix from its products alone."""

    def solve(self, tree: Any, damping: Any = 0.0, *, tolerance: float = 1e-5, max_steps: int = 1000) -> Solution:
        """`(M + damping I)^-1 v` by conjugate gradients, preconditioned by the blocks if there are any.

        Args:
          tree: `v`, a tree like the parameters.
          damping: a number times the identity that is added first.
          tolerance: of the residual, relative to `v`.
          max_steps: at most so many products.
        """
        _, unravel = self._raveled()
        near = None if self.near is None else (self.near + damping).inv()._flat
        flat, _ = ravel_pytree(tree)
        x, steps, residual = conjugate_gradients((self + damping)._flat, flat, near, tolerance, max_steps)
        return Solution(unravel(x), steps, residual)

    def inv(self, *, tolerance: float = 1e-5, max_steps: int = 1000) -> Inverted:
        """The inverse, each product of which is a `solve` with these options."""
        return Inverted(self, tolerance, max_steps)

    def map(self, fn: Callable[[jax.Array], jax.Array], steps: int = 64) -> Function:
        """Applies `fn` to the eigenvalues of the matrix; each product takes `steps` steps of Lanczos' method."""
        return Function(self, fn, steps)

    def sqrt(self, steps: int = 64) -> Function:
        """The symmetric square root."""
        return self.map(jnp.sqrt, steps)

    def trace(self, key: jax.Array, probes: int = 32) -> Estimate:
        """The trace, from products with random signs (Hutchinson 1990); `key` is a PRNG key."""
        zeros, _ = self._raveled()

        def of_one(key):
            signs = jax.random.rademacher(key, zeros.shape, zeros.dtype)
            return jnp.vdot(signs, self._flat(signs))

        return _mean(of_one, key, probes)

    def logdet(self, key: jax.Array, probes: int = 16, steps: int = 64) -> Estimate:
        """The logarithm of the determinant, by stochastic Lanczos quadrature (Ubaru, Chen & Saad 2017).

        With blocks `P` it is that of `P`, and what `P^-1/2 M P^-1/2` adds, which varies less.

        Args:
          key: a PRNG key.
          probes: random vectors.
          steps: products with each; with blocks few are enough. The error holds, beside the standard error and added
            to it in squares, what the second half of the steps has changed: a guess at what more would.
        """
        zeros, _ = self._raveled()
        root = None if self.near is None else self.near.inv_sqrt()._flat

        def of_one(key):
            start = jax.random.rademacher(key, zeros.shape, zeros.dtype)
            product = self._flat if root is None else lambda v: root(self._flat(root(v)))
            tridiagonal = lanczos(product, start, min(steps, zeros.size))[1]
            parts = [tridiagonal[:k, :k] for k in (len(tridiagonal), -(-len(tridiagonal) // 2))]  # of half of the steps
            return zeros.size * jnp.stack([first_column(jnp.log, part)[0] for part in parts])

        (value, half), errors = _mean(of_one, key, probes)
        return Estimate(value + (0 if root is None else self.near.logdet()), jnp.hypot(errors[0], value - half))


def _mean(of_one: Callable[[jax.Array], jax.Array], key: jax.Array, probes: int) -> Estimate:
    check(probes=probes)
    values = lax.map(of_one, jax.random.split(key, probes))
    error = jnp.std(values, 0, ddof=1) / probes**0.5 if probes > 1 else jnp.full(values.shape[1:], jnp.inf)
    return Estimate(jnp.mean(values, 0), error)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Matrix(ByProducts):
    """A sum of matrices over the parameters, times numbers, plus a multiple of the identity.

    A pytree, as `Operator` is: what `kfac.curvature.gauss_newton` returns, and sums of operators.

    Attributes:
      terms: the matrices.
      scales: their numbers.
      shift: that of the identity.
      near: an `Operator` that is about the sum: conjugate gradients are preconditioned with it. None without one.
    """

    terms: tuple[Any, ...]
    scales: tuple[Any, ...]
    shift: Any = 0.0
    near: Any = None

    def like(self) -> Any:
        """A tree of the shapes and dtypes of the parameters."""
        return self.terms[0].like()

    def matvec(self, tree: Any) -> Any:
        """The product with a tree like the parameters; each result has the dtype of its leaf."""
        products = [term.matvec(tree) for term in self.terms]

        def total(leaf, *terms):
            return (self.shift * leaf + sum(s * x for s, x in zip(self.scales, terms, strict=True))).astype(leaf.dtype)

        return jax.tree.map(total, tree, *products)

    def sample(self, key: jax.Array) -> Any:
        """A draw from the normal distribution with mean zero and this matrix for its covariance, as a tree."""
        noise, unravel = self._raveled()
        first, *keys = jax.random.split(key, 1 + len(self.terms))
        draws = [term.sample(own) for term, own in zip(self.terms, keys, strict=True)]
        roots = [jnp.sqrt(scale) for scale in self.scales]
        white = unravel(jnp.sqrt(self.shift).astype(noise.dtype) * jax.random.normal(first, noise.shape, noise.dtype))
        return jax.tree.map(lambda w, *own: w + sum(r * x for r, x in zip(roots, own, strict=True)), white, *draws)


def as_matrix(matrix: Any) -> Matrix:
    return matrix if isinstance(matrix, Matrix) else Matrix((matrix,), (1.0,), near=matrix.near)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Inverted(ByProducts):
    """The inverse of a matrix: products are solutions."""

    matrix: Any
    tolerance: float = dataclasses.field(metadata={"static": True})
    max_steps: int = dataclasses.field(metadata={"static": True})

    def like(self) -> Any:
        return self.matrix.like()

    def matvec(self, tree: Any) -> Any:
        return self.matrix.solve(tree, tolerance=self.tolerance, max_steps=self.max_steps).value

    def sample(self, key: jax.Array) -> Any:
        """A draw with the inverse for its covariance: `M^-1 y` of a draw `y` with covariance `M`."""
        return self.matvec(self.matrix.sample(key))

    def logdet(self, key: jax.Array, probes: int = 16, steps: int = 64) -> Estimate:
        """Minus that of the matrix."""
        estimate = self.matrix.logdet(key, probes, steps)
        return Estimate(-estimate.value, estimate.error)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Function(ByProducts):
    """A function of a matrix: products are `|v| Q fn(T) e_1`, with the basis `Q` and matrix `T` of Lanczos' method."""

    matrix: Any
    fn: Callable[[jax.Array], jax.Array] = dataclasses.field(metadata={"static": True})
    steps: int = dataclasses.field(metadata={"static": True})

    def like(self) -> Any:
        return self.matrix.like()

    def matvec(self, tree: Any) -> Any:
        flat, unravel = ravel_pytree(tree)
        basis, tridiagonal, _ = lanczos(self.matrix._flat, flat, min(self.steps, flat.size))
        return unravel(jnp.linalg.norm(flat) * (first_column(self.fn, tridiagonal) @ basis))


def first_column(fn: Callable[[jax.Array], jax.Array], matrix: jax.Array) -> jax.Array:
    """`fn(T) e_1` of a small matrix `T`."""
    values, rotation = jnp.linalg.eigh(matrix)
    return jnp.matmul(rotation, jnp.where(rotation[0] == 0, 0.0, rotation[0] * fn(values)), precision="highest")


def lanczos(product: Callable, start: jax.Array, steps: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """An orthonormal basis `[steps, p]` that begins with `start`, the tridiagonal matrix in it, and what is left over.

    Every vector is made orthogonal to all before it, twice. Where the space is exhausted a random one follows, which
    the tridiagonal matrix does not connect with those before.
    """
    epsilon = jnp.finfo(start.dtype).eps

    def orthogonal(v, basis):
        for _ in range(2):
            v = v - jnp.matmul(jnp.matmul(basis, v, precision="highest"), basis, precision="highest")
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
        random_vector = jax.random.normal(jax.random.fold_in(jax.random.key(0), k), new.shape, new.dtype)
        new = unit(orthogonal(unit(jnp.where(exhausted, random_vector, new)), basis))
        basis = basis.at[k + 1].set(new)
        return basis, alphas.at[k].set(alpha), betas.at[k].set(jnp.where(exhausted, 0, beta)), largest

    basis = jnp.zeros((steps + 1, start.size), start.dtype).at[0].set(unit(start))
    empty = jnp.zeros(steps, start.dtype)
    basis, alphas, betas, _ = lax.fori_loop(0, steps, step, (basis, empty, empty, jnp.zeros((), start.dtype)))
    return basis[:-1], jnp.diag(alphas) + jnp.diag(betas[:-1], 1) + jnp.diag(betas[:-1], -1), betas[-1]


def conjugate_gradients(
    product: Callable, b: jax.Array, near: Callable | None, tolerance: float, max_steps: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The solution, the number of steps, and the norm of the residual relative to that of `b`."""
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
    x, r, *_, k = lax.while_loop(going, step, (jnp.zeros_like(b), b, z, jnp.vdot(b, z), jnp.zeros((), jnp.int32)))
    return x, k, jnp.linalg.norm(r) / jnp.where(size > 0, size, 1)


def scalar(value: Any) -> Any:
    if isinstance(value, Linear) or jnp.ndim(value):
        raise TypeError(f"an operator is multiplied by numbers, not by {type(value).__name__}")
    return value
