"""Convert the sums from a Kronecker layer's taps to its factors.

Each part of the kernel has a probe, and a second probe for reads of its transpose. A probe's arrays have the shape
`[*loops, batched, ...]`: an axis for each scan over the kernel, an axis for the copies in a batched product, and the
axes of a single copy's sums. The factors hold the copies in the kernel's memory order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kfac._capture.axes import Atom
from kfac._capture.spread import Spread
from kfac._capture.states import Use, by_part
from kfac._capture.taps import Key
from kfac._factors import Kronecker, Ragged, Statistics, Tied
from kfac._layers import Layer
from kfac._packing import in_blocks


class Sums(NamedTuple):
    """A layer's probes, and the function that converts their sums to statistics.

    Attributes:
      probes: each probe's shapes and dtypes, by key.
      finish: converts the sums, in the order of `probes`, to the layer's statistics.
      basis: arranges the layer's eigenvectors for its taps, by the taps' `basis` keys. None without moments.
    """

    probes: dict[Key, Any]
    finish: Callable[[list[Any]], Statistics]
    basis: Callable[[Kronecker], dict[Key, Kronecker]] | None = None


def finish_kronecker(
    layer: Layer,
    uses: list[Use],
    n: int,
    batch: int,
    dtype: Any,
    moments: bool,
    over: Spread | None,
) -> Sums:
    """Plan a Kronecker layer's probes, and how their sums become factors.

    Args:
      layer: the layer.
      uses: the kernel's uses.
      n: the number of examples over which the loss is a mean.
      batch: the number of examples in the batch.
      dtype: the dtype of the sums.
      moments: whether the taps also sum squares of per-example gradients.
      over: how the sums are packed and spread over devices; None if they are not packed.
    """
    use, reduce = uses[0], layer.weight_sharing == "reduce"
    ragged = any(use.read.groups is not None for use in uses)
    loops, batched = use.iterated, math.prod(atom.size for atom in use.read.batched)
    # A single copy's shapes, by array name.
    shapes = (
        {"A": (batch, layer.d_in), "G": (batch, layer.d_out)}
        if reduce
        else dict(layer.side_shapes)
    )
    if ragged:
        shapes = {"A": shapes["A"], "squares": shapes["G"], "rows": ()}
    if moments:
        shapes["moments"] = (layer.d_out, layer.d_in)
    arrays = {
        name: jax.ShapeDtypeStruct((*loops, batched, *shape), dtype)
        for name, shape in shapes.items()
    }
    if over is not None:
        flat = {
            name: (math.prod(shape),) if name == "moments" else shape
            for name, shape in shapes.items()
        }
        arrays = {
            name: over.probe(loops, batched, shape, dtype)
            for name, shape in flat.items()
        }
        shapes = {name: over.room(shape) for name, shape in flat.items()}
    kind: type[Any] = Ragged if ragged else Kronecker
    # A read of the transpose has the layer's outputs as inputs, so `A` and `G` swap shapes.
    keys = list(dict.fromkeys(probe_key(layer, use) for use in uses))
    probes = {
        key: kind(**arrays) if len(key) == 2 else Kronecker(arrays["G"], arrays["A"])
        for key in keys
    }
    positions = {
        part[0].part: sum(use.for_all(batch).rows for use in part) / n
        for part in by_part(uses)
    }
    parts = math.prod(atom.size for atom in use.picked)
    # The taps bring batched copies to memory order, flips included. Scans stack copies in the order of their reads.
    batches = sorted(
        (atom._replace(flipped=False) for atom in use.read.batched),
        key=lambda atom: atom.memory_order,
    )
    order = _memory_order([*use.picked, *use.scanned, *batches])
    lead = (layer.copies,) if layer.stacked else ()

    def of_part(sums: Any, positions: float) -> Kronecker | Ragged:
        """Return a part's factors from its sums and its number of positions per example."""
        if ragged:
            return Ragged(sums.A / n, sums.squares * n, sums.rows / n)
        moments = None if sums.moments is None else sums.moments * n
        if reduce:
            return Kronecker(sums.A / positions, sums.G, moments)
        # G = (n / s) sum g g^T with s positions per example.
        return Kronecker(sums.A / n, sums.G * (n / positions), moments)

    def of_transpose(sums: Kronecker, positions: float) -> Kronecker:
        """Return a part's factors from the sums over reads of its transpose."""
        return Kronecker(sums.G * n, sums.A / (n * positions))

    def of_layer(of_parts: dict[int, Any]) -> Any:
        """Return the layer's factors from its parts' factors. An unread part has zeros."""
        unread = jax.tree.map(jnp.zeros_like, next(iter(of_parts.values())))
        blocks = [of_parts.get(part, unread) for part in range(parts)]
        stacked = (
            jax.tree.map(lambda *blocks: jnp.stack(blocks), *blocks)
            if parts > 1
            else blocks[0]
        )
        ordered = {
            name: _reordered(getattr(stacked, name).reshape(-1, *shape), order).reshape(
                *lead, *shape
            )
            for name, shape in shapes.items()
        }
        if reduce:
            a, g = (_products(layer, side, ordered[side]) for side in "AG")
            ordered |= {"A": a / n, "G": g * n}
        return kind(**ordered)

    def finish(sums: list[Any]) -> Statistics:
        by_key = dict(zip(keys, sums, strict=True))
        direct = {
            key[1]: of_part(sums, positions[key[1]])
            for key, sums in by_key.items()
            if len(key) == 2
        }
        turned = {
            key[1]: of_transpose(sums, positions[key[1]])
            for key, sums in by_key.items()
            if len(key) > 2
        }
        return (
            Tied(of_layer(direct), of_layer(turned), layer.diagonal, layer.cut)
            if turned
            else of_layer(direct)
        )

    def arrange_basis(basis: Kronecker) -> dict[Key, Kronecker]:
        def arranged(vectors):
            shape = vectors.shape[-2:]
            vectors = _reordered(vectors.reshape(-1, *shape), np.argsort(order))
            return vectors.reshape(parts, *loops, batched, *shape)

        whole = jax.tree.map(arranged, basis)
        return {
            basis_key(layer, part): jax.tree.map(lambda x, part=part: x[part], whole)
            for part in positions
        }

    packed = finish if over is None else over.packed(finish, len(loops), len(lead))
    return Sums(probes, packed, arrange_basis if moments else None)


def probe_key(layer: Layer, use: Use) -> Key:
    """Return a use's probe key: the layer, the part, and `"transposed"` if the use reads the transpose."""
    return (
        (layer.name, use.part)
        if use.layout == layer.layouts[0]
        else (layer.name, use.part, "transposed")
    )


def basis_key(layer: Layer, part: int) -> Key:
    """Return the eigenvectors' key for a part's taps."""
    return layer.name, part, "eigenvectors"


def _products(layer: Layer, side: str, rows: jax.Array) -> jax.Array:
    """Return an unscaled factor for the setting "reduce", from rows `[..., n, d]` that sum each example's positions."""
    if side in layer.diagonal:
        return jnp.sum(jnp.square(rows), axis=-2)
    count = layer.cut["AG".index(side)]
    rows = in_blocks(rows, count) if count > 1 else rows
    return jnp.einsum(
        "...ni,...nj->...ij", rows, rows, precision=jax.lax.Precision.HIGHEST
    )


def _memory_order(stack: list[Atom]) -> np.ndarray:
    """Return each copy's index in an array with the axes `stack`, for all copies in memory order."""
    places = np.arange(math.prod(atom.size for atom in stack)).reshape(
        [atom.size for atom in stack]
    )
    places = np.flip(places, tuple(k for k, atom in enumerate(stack) if atom.flipped))
    return places.transpose(
        sorted(range(len(stack)), key=lambda k: stack[k].memory_order)
    ).reshape(-1)


def _reordered(array: jax.Array, order: np.ndarray) -> jax.Array:
    """Reorder the entries of an array's first axis."""
    return (
        array
        if np.array_equal(order, np.arange(len(order)))
        else jnp.take(array, order, axis=0, mode="clip")
    )
