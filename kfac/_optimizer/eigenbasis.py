"""The eigenvectors of Kronecker factors by layer, in which EKFAC has second moments of per-example gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kfac._checks import check_layers
from kfac._curvature.blocks import check_factors, group_layers
from kfac._curvature.eigh import decompose
from kfac._factors import Eigen, Factors, Kronecker
from kfac._layers import Layers
from kfac._optimizer.state import find_state


def eigenbasis(source: Any, layers: Layers) -> dict[str, Kronecker]:
    """The eigenvectors of the factors: what `value_and_grad` takes as `basis`.

    Jit-compatible. Of the state of an optimizer these are the eigenvectors that it preconditions with, and the same on
    all devices; inside `jax.pmap` and `jax.shard_map` take them from the state there. Moments for an optimizer must be
    in the basis of its own state, that which its step begins with: no error is possible where they are in another.

    Args:
      source: the one state of an optimizer with `inverse=kfac.Ekfac()` in a tree, or a `Factors`,
        whose factors are then decomposed.
      layers: what `find_layers` returned.

    Returns:
      For each layer that EKFAC corrects, those with two whole factors and one use (`Layer.correctable`), a
      `Kronecker(A, G)` of orthogonal matrices, `Q_A` `[copies?, d_in, d_in]` and `Q_G` `[copies?, d_out, d_out]`,
      columns in the order of growing eigenvalues. Before the first inversion they are identities.

    Raises:
      ValueError: `source` is neither, or is not one for these layers.
    """
    check_layers(layers)
    if isinstance(source, Factors):
        check_factors(source, layers)
        return {layer.name: _decomposed(source[layer.name]) for layer in layers if layer.correctable}
    state = find_state(source, "source")
    basis: dict[str, Kronecker] = {}
    for group in group_layers(layers):
        if not group.correctable:
            continue
        own = state.owned.get(group.name)
        vectors = own.inverse.basis(own.blocks.inverse) if own is not None else None
        if own is None or vectors is None or own.shard.blocks != group.size:
            raise ValueError(
                f"source must be a state of an optimizer with inverse=kfac.Ekfac() for these layers, but has "
                f"{'no' if own is None else own.shard.blocks} blocks {group.name}"
                f"{f' for inverse={own.inverse!r}' if own is not None and vectors is None else ''}"
            )
        if group.name in state.replicas:
            vectors = state.replicas[group.name].inverse
        if vectors.A.shape[0] != group.size:
            raise ValueError(
                "source is the state of several devices with an axis of them in front, as pmap returns it: call "
                "eigenbasis inside of pmap"
            )
        start = 0
        for layer, count in zip(group.layers, group.counts, strict=True):
            where = slice(start, start + count) if layer.stacked else start
            if layer.correctable:
                basis[layer.name] = jax.tree.map(lambda x, where=where: x[where], vectors)
            start += count
    return basis


def _decomposed(block: Any) -> Kronecker:
    def vectors(factor):
        stack = factor.reshape(-1, *factor.shape[-2:])
        eigen = decompose(stack, factor.dtype)
        assert isinstance(eigen, Eigen)
        return jnp.reshape(eigen.vectors, factor.shape)

    return Kronecker(vectors(block.A), vectors(block.G))
