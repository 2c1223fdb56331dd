"""Kronecker blocks `A (x) G`: stack a layer's statistics by block, undo it, and lay them out for a message."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from kfac._factors import Kronecker, Packed
from kfac._layers import Layer
from kfac._packing import in_blocks, pad_to_devices, pieces_along


def stack(layer: Layer, block: Kronecker) -> Kronecker:
    """Return a layer's statistics as a stack of its blocks, in the order in which `Layer.to_pieces` returns the pieces.

    Each copy in a stacked layer, and each piece into which a kernel is cut, has its own block. Pieces in the same
    columns have equal `A`, and pieces in the same rows equal `G`. A kernel with `num_blocks=(3, 2)` has the blocks ::

             A0  A1  A2
        G0    0   1   2
        G1    3   4   5
    """
    if not layer.stacked:
        block = jax.tree.map(lambda x: x[None], block)
    if layer.pieces == 1:
        return block
    cut_a, cut_g = layer.num_blocks
    a = _with_pieces(layer, "A", block.A)[:, None]
    g = _with_pieces(layer, "G", block.G)[:, :, None]
    a = jnp.repeat(a, cut_g, axis=1)
    g = jnp.repeat(g, cut_a, axis=2)
    return Kronecker(a.reshape(-1, *a.shape[3:]), g.reshape(-1, *g.shape[3:]))


def unstack(layer: Layer, blocks: Kronecker) -> Kronecker:
    """Undo `stack`."""
    if layer.pieces > 1:
        cut_a, cut_g = layer.num_blocks
        a = blocks.A.reshape(layer.copies, cut_g, cut_a, *blocks.A.shape[1:])
        g = blocks.G.reshape(layer.copies, cut_g, cut_a, *blocks.G.shape[1:])
        a = _without_pieces(layer, "A", a[:, 0])
        g = _without_pieces(layer, "G", g[:, :, 0])
        blocks = Kronecker(a, g)
    return blocks if layer.stacked else jax.tree.map(lambda x: x[0], blocks)


def to_send(layer: Layer, packed: Packed) -> Kronecker:
    """Return a layer's part of its group's message.

    All vectors are padded, because over a mesh the taps have padded them.

    Args:
      layer: the layer.
      packed: its packed statistics.
    """
    flat = packed.flat
    for side, count in zip("AG", layer.num_blocks, strict=True):
        if side in layer.diagonal and count > 1:
            pieces = _pieces_of_diagonal(layer, side, getattr(flat, side)[..., 0, :])
            flat = dataclasses.replace(flat, **{side: pieces})

    def filled(x):
        x = pad_to_devices(x)
        # `stack` takes away the axis for pieces from sides that are cut.
        return x if x.shape[-2] == 1 else x[..., None, :]

    return jax.tree.map(filled, flat)


def _with_pieces(
    layer: Layer,
    side: str,
    x: Array,
) -> Array:
    """Insert an axis for pieces after the copies into one side `[copies, ...]`, whole or packed."""
    if pieces_along(side, layer.num_blocks) == 1:
        return x[:, None]
    return _pieces_of_diagonal(layer, side, x) if x.ndim == 2 else x


def _without_pieces(
    layer: Layer,
    side: str,
    x: Array,
) -> Array:
    """Undo `_with_pieces` for a side that is not packed."""
    shape = layer.side_shapes[side]
    if side in layer.diagonal:
        return x.reshape(len(x), -1)[:, : shape[0]]
    return x.reshape(len(x), *shape)


def _pieces_of_diagonal(
    layer: Layer,
    side: str,
    diagonal: Array,
) -> Array:
    """Cut a diagonal `[..., d]` into pieces `[..., pieces, rows]`, the last padded with zeros."""
    (size,) = layer.side_shapes[side]
    count = pieces_along(side, layer.num_blocks)
    return in_blocks(diagonal[..., None, :size], count)[..., 0, :]
