"""Layers of equal shape, stacked: what the optimizer keeps, inverts and applies as one batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kfac._factors import Block, Eigen, Factors, Kronecker, Unitwise, is_diagonal
from kfac._layers import KRONECKER_KINDS, Layer, Layers


@dataclasses.dataclass(frozen=True)
class Group:
    """Layers whose blocks have the same shape; each copy of a stacked layer is a block of its own.

    Attributes:
      name: key of the group in the state.
      kronecker: whether the blocks are Kronecker products.
      layers: the members, in order.
    """

    name: str
    kronecker: bool
    layers: tuple[Layer, ...]

    @property
    def d_out(self) -> int:
        return self.layers[0].d_out

    @property
    def d_in(self) -> int:
        return self.layers[0].d_in

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the factors of one block, as they are kept: of a Kronecker block `[d, d]`, or `[d]` if diagonal."""
        return self.layers[0].block_shapes if self.kronecker else self.layers[0].factor_shapes

    @property
    def counts(self) -> tuple[int, ...]:
        """Blocks of each layer."""
        return tuple(layer.copies if self.kronecker else 1 for layer in self.layers)

    @property
    def size(self) -> int:
        """Number of blocks, `k` below."""
        return sum(self.counts)

    @property
    def correctable(self) -> bool:
        """Whether EKFAC corrects the eigenvalues of one of the members."""
        return any(layer.correctable for layer in self.layers)

    @property
    def corrected(self) -> np.ndarray:
        """`[k]`: of which blocks."""
        return np.repeat([layer.correctable for layer in self.layers], self.counts)

    def zeros(self, size: int, dtype: Any) -> Block:
        """Statistics of `size` blocks before any have arrived."""
        parts = {name: jnp.zeros((size, *shape), dtype) for name, shape in self.shapes.items()}
        return Kronecker(**parts) if self.kronecker else Unitwise(**parts)

    def identity(self, size: int, dtype: Any, kept: Any, *, eigen: bool = False) -> Block:
        """Inverses of `size` blocks before any have been computed.

        Args:
          size: how many.
          dtype: of statistics and eigenvalues.
          kept: dtype of inverses and eigenvectors.
          eigen: whether inverses are kept as eigenvectors and eigenvalues.
        """

        def one(stack):
            if is_diagonal(stack):
                return jnp.ones(stack.shape, dtype if eigen else kept)
            eye = jnp.zeros(stack.shape, kept) + jnp.eye(stack.shape[-1], dtype=kept)
            return Eigen(eye, jnp.ones(stack.shape[:-1], dtype)) if eigen and self.kronecker else eye

        return jax.tree.map(one, jax.eval_shape(lambda: self.zeros(size, dtype)))

    def stack_factors(self, factors: Factors, *, moments: bool = False) -> Block:
        """The statistics of the members as stacks `[k, ...]`; with `moments`, zeros for members that have none."""
        blocks = []
        for layer, count in zip(self.layers, self.counts, strict=True):
            block = factors[layer.name]
            stacked = self.kronecker and layer.stacked
            block = block if stacked else jax.tree.map(lambda x: x[None], block)
            if moments and isinstance(block, Kronecker) and block.moments is None:
                block = dataclasses.replace(block, moments=jnp.zeros((count, self.d_out, self.d_in), block.A.dtype))
            blocks.append(block)
        return jax.tree.map(lambda *stacks: jnp.concatenate(stacks), *blocks)

    def stack_matrices(self, leaves: Mapping[str, jax.Array], dtype: Any) -> jax.Array:
        """Gradients of the members as `[k, d_out, d_in]`; zeros for a member that `leaves` does not hold."""
        matrices = []
        for layer, count in zip(self.layers, self.counts, strict=True):
            if layer.params[0] in leaves:
                own = [leaves[path].astype(dtype) for path in layer.params]
                matrices.append(layer.to_matrix(own))
            else:
                matrices.append(jnp.zeros((count, self.d_out, self.d_in), dtype))
        return jnp.concatenate(matrices)

    def split_matrices(self, matrices: jax.Array) -> dict[str, jax.Array]:
        """The inverse of `stack_matrices`: leaves by path."""
        leaves: dict[str, jax.Array] = {}
        start = 0
        for layer, count in zip(self.layers, self.counts, strict=True):
            leaves.update(zip(layer.params, layer.from_matrix(matrices[start : start + count]), strict=True))
            start += count
        return leaves


def group_layers(layers: Layers) -> tuple[Group, ...]:
    """Groups the layers that have statistics by the shape of their blocks, in order of first appearance."""
    members: dict[str, list[Layer]] = {}
    for layer in layers.with_factors:
        if layer.kind in KRONECKER_KINDS:
            form = "".join(f"_diagonal_{factor}" for factor in layer.diagonal)
            name = f"kronecker_{layer.d_out}x{layer.d_in}{form}"
        else:
            name = f"unitwise_{layer.d_out}x{layer.d_in}"
        members.setdefault(name, []).append(layer)
    return tuple(Group(name, layers[0].kind in KRONECKER_KINDS, tuple(layers)) for name, layers in members.items())


def apply_inverse(inverse: Block, matrices: jax.Array) -> jax.Array:
    """`G^-1 V A^-1` for every Kronecker block, `F^-1 v` for every channel of a unit-wise one.

    Products take operands in the dtype the inverses are kept in, and accumulate in float32 or better.

    Args:
      inverse: stacks of `k` inverses.
      matrices: `[k, d_out, d_in]`.
    """
    if isinstance(inverse, Unitwise):
        return jnp.sum(inverse.F.astype(matrices.dtype) * matrices[:, :, None, :], axis=-1)

    def product(spec: str, *operands: jax.Array) -> jax.Array:
        return _product(spec, inverse.A.dtype, matrices.dtype, *operands)

    left = "ka" if is_diagonal(inverse.G) else "kab"
    half = product(f"{left},k{left[-1]}c->kac", inverse.G, matrices)
    return product("kac,kc->kac" if is_diagonal(inverse.A) else "kac,kcd->kad", half, inverse.A)


def apply_eigen(inverse: Kronecker, values: jax.Array, matrices: jax.Array, damping: jax.Array) -> jax.Array:
    """`Q_G [(Q_G^T V Q_A) / (values + damping)] Q_A^T`; with `l_G l_A^T` for values it is `(A (x) G + damping I)^-1`.

    Products as in `apply_inverse`, eigenvalues in float32 or better. A damping that is not positive gives NaN.

    Args:
      inverse: stacks of `k` eigendecompositions, or of the eigenvalues of diagonal factors.
      values: `[k, d_out, d_in]`, the eigenvalues of the blocks.
      matrices: `[k, d_out, d_in]`.
      damping: a scalar.
    """
    out = _rotate(matrices, inverse, back=False)
    damping = jnp.where(damping > 0, damping, jnp.nan).astype(values.dtype)
    return _rotate((out / (values + damping)).astype(matrices.dtype), inverse, back=True)


def _rotate(matrices: jax.Array, inverse: Kronecker, *, back: bool) -> jax.Array:
    """`Q_G^T V Q_A`, or `Q_G V Q_A^T` to go `back`; the eigenvectors of a diagonal factor are the identity."""
    if isinstance(inverse.G, Eigen):
        q = inverse.G.vectors
        matrices = _product("kab,kbc->kac" if back else "kba,kbc->kac", q.dtype, matrices.dtype, q, matrices)
    if isinstance(inverse.A, Eigen):
        q = inverse.A.vectors
        matrices = _product("kac,kdc->kad" if back else "kac,kcd->kad", q.dtype, matrices.dtype, matrices, q)
    return matrices


def _product(spec: str, dtype: Any, wide: Any, *operands: jax.Array) -> jax.Array:
    narrow = (x.astype(dtype) for x in operands)
    return jnp.einsum(spec, *narrow, precision=lax.Precision.HIGHEST, preferred_element_type=wide)


def check_factors(factors: Any, layers: Layers, *, ekfac: bool | None = None) -> None:
    """Raises where `factors` are not those of `layers`; `ekfac` says whether they must have moments, or must not."""
    if not isinstance(factors, Factors):
        raise ValueError(f"factors must be what kfac.value_and_grad returns, but is {type(factors).__name__}")
    expected = {layer.name: layer for layer in layers.with_factors}
    _check_names(factors, list(expected))
    for name, layer in expected.items():
        block = factors[name]
        for factor, shape in layer.factor_shapes.items():
            found = tuple(getattr(block, factor).shape) if hasattr(block, factor) else None
            if found != shape:
                raise ValueError(f"factors of layer {name!r}: {factor} must have shape {shape}, but has {found}")
        if ekfac is not None and layer.correctable:
            _check_moments(name, layer, block, ekfac)


def _check_moments(name: str, layer: Layer, block: Any, ekfac: bool) -> None:
    if ekfac and block.moments is None:
        raise ValueError(
            f"factors of layer {name!r} have no moments, which inverse='ekfac' needs: take them from "
            "value_and_grad(..., ekfac=True)(..., basis=kfac.eigenbasis(opt_state, layers))"
        )
    if not ekfac and block.moments is not None:
        raise ValueError(
            f"factors of layer {name!r} have moments, for which only inverse='ekfac' has a use: choose that, or leave "
            "out ekfac=True in value_and_grad"
        )
    shape = (*block.A.shape[:-2], layer.d_out, layer.d_in)
    if ekfac and tuple(block.moments.shape) != shape:
        raise ValueError(f"factors of layer {name!r}: moments must have shape {shape}, but has {block.moments.shape}")


def _check_names(factors: Factors, expected: Sequence[str]) -> None:
    for name in expected:
        if name not in factors:
            raise ValueError(f"factors lack layer {name!r}; they are those of {', '.join(factors)}")
    for name in factors:
        if name not in expected:
            raise ValueError(f"factors have layer {name!r}, which is not among the layers of this optimizer")
