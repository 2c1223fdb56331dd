"""Convert the sums from a layer's taps to its statistics.

Each part of a kernel has a probe, and a second probe for reads of its transpose. A probe's arrays have the shape
`[*loops, batched, ...]`: an axis for each scan over the kernel, an axis for the copies in a batched product, and the
axes of a single copy's sums. The factors hold the copies in the kernel's memory order.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kfac._capture.axes import Atom
from kfac._capture.reduce_scatter import ReduceScatter, Shape
from kfac._capture.states import Use, by_part
from kfac._capture.taps import Key
from kfac._factors import Kronecker, Ragged, Statistics, Tied, Unitwise
from kfac._layers import Layer
from kfac._packing import in_blocks
from kfac._varying import whole


class KroneckerSums:
    """The sums of a Kronecker layer, from its probes to its factors.

    Attributes:
      layer: the layer.
      moments: whether the taps also sum squares of per-example gradients.
      probes: each probe's shapes and dtypes, by key.
    """

    def __init__(
        self,
        layer: Layer,
        uses: Sequence[Use],
        n: int,
        batch: int,
        dtype: np.dtype,
        moments: bool,
        scatter: ReduceScatter | None,
    ):
        """Plan the probes.

        Args:
          layer: the layer.
          uses: the kernel's uses.
          n: the number of examples over which the loss is a mean.
          batch: the number of examples in the batch.
          dtype: the dtype of the sums.
          moments: whether the taps also sum squares of per-example gradients.
          scatter: how the sums are packed and added up over devices; None if they are not packed.
        """
        read, picked = uses[0].read, uses[0].picked
        self.layer, self.moments = layer, moments
        self._n, self._scatter = n, scatter
        self._reduce = layer.weight_sharing == "reduce"
        self._ragged = any(use.read.groups is not None for use in uses)
        self._loops = uses[0].iterated
        self._batched = math.prod(atom.size for atom in read.batched)
        self._parts = math.prod(atom.size for atom in picked)
        # The number of positions per example of each part that is read.
        self._positions = {}
        for part in by_part(uses):
            rows = sum(use.for_all(batch).rows for use in part)
            self._positions[part[0].part] = rows / n
        # The taps bring batched copies to memory order, flips included. Scans stack copies in the order of their reads.
        copies = [atom._replace(flipped=False) for atom in read.batched]
        copies.sort(key=lambda atom: atom.memory_order)
        self._order = _memory_order([*picked, *uses[0].scanned, *copies])

        # The shapes of a single copy's sums, and then of its factors.
        self._shapes = self._shapes_of_sums(batch)
        arrays = {}
        for name, shape in self._shapes.items():
            if scatter is None:
                shape = (*self._loops, self._batched, *shape)
                arrays[name] = jax.ShapeDtypeStruct(shape, dtype)
            else:
                arrays[name] = scatter.probe(self._loops, self._batched, shape, dtype)
                self._shapes[name] = scatter.padded_shape(shape)
        direct = Ragged(**arrays) if self._ragged else Kronecker(**arrays)
        self.probes: dict[Key, Kronecker | Ragged] = {}
        for use in uses:
            key = probe_key(layer, use)
            self.probes[key] = direct
            if key.role == "transposed":
                # The transpose has the layer's outputs as inputs, so `A` and `G` swap shapes.
                self.probes[key] = Kronecker(arrays["G"], arrays["A"])

    def _shapes_of_sums(self, batch: int) -> dict[str, Shape]:
        layer = self.layer
        shapes: dict[str, Shape] = dict(layer.side_shapes)
        if self._ragged:
            return {"A": shapes["A"], "squares": shapes["G"], "rows": ()}
        if self._reduce:
            shapes = {"A": (batch, layer.d_in), "G": (batch, layer.d_out)}
        if self.moments:
            shapes["moments"] = (layer.d_out, layer.d_in)
            if self._scatter is not None:
                shapes["moments"] = (layer.d_out * layer.d_in,)
        return shapes

    def finish(self, sums: list[Any]) -> Statistics:
        """Convert the sums, in the order of `probes`, to the layer's statistics."""
        if self._scatter is None:
            return self._factors(sums)
        lead = 1 if self.layer.stacked else 0
        return self._scatter.packed(self._factors, sums, len(self._loops), lead)

    def eigenvectors(self, basis: Kronecker) -> dict[Key, Kronecker]:
        """Arrange the layer's eigenvectors for its taps, by the taps' `basis` keys."""

        def arranged(vectors):
            shape = vectors.shape[-2:]
            order = np.argsort(self._order)
            vectors = _reordered(vectors.reshape(-1, *shape), order)
            return vectors.reshape(self._parts, *self._loops, self._batched, *shape)

        by_part = jax.tree.map(arranged, basis)
        result = {}
        for part in self._positions:
            vectors = jax.tree.map(operator.itemgetter(part), by_part)
            result[basis_key(self.layer, part)] = vectors
        return result

    def _factors(self, sums: Sequence[Any]) -> Any:
        direct, transposed = {}, {}
        for key, of_key in zip(self.probes, sums, strict=True):
            if key.role == "transposed":
                transposed[key.number] = self._of_transpose(of_key, key.number)
            else:
                direct[key.number] = self._of_part(of_key, key.number)
        if not transposed:
            return self._of_layer(direct)
        sides = self._of_layer(direct), self._of_layer(transposed)
        return Tied(*sides, self.layer.diagonal, self.layer.cut)

    def _of_part(self, sums: Any, part: int) -> Kronecker | Ragged:
        """Return a part's factors from its sums."""
        n, positions = self._n, self._positions[part]
        if self._ragged:
            return Ragged(sums.A / n, sums.squares * n, sums.rows / n)
        moments = sums.moments * n if self.moments else None
        if self._reduce:
            return Kronecker(sums.A / positions, sums.G, moments)
        # G = (n / s) sum g g^T with s positions per example.
        return Kronecker(sums.A / n, sums.G * (n / positions), moments)

    def _of_transpose(self, sums: Kronecker, part: int) -> Kronecker:
        """Return a part's factors from the sums over reads of its transpose."""
        n, positions = self._n, self._positions[part]
        return Kronecker(sums.G * n, sums.A / (n * positions))

    def _of_layer(self, of_parts: Mapping[int, Kronecker | Ragged]) -> Any:
        """Return the layer's factors from its parts' factors. An unread part has zeros."""
        first = next(iter(of_parts.values()))
        unread = jax.tree.map(jnp.zeros_like, first)
        parts = [of_parts.get(part, unread) for part in range(self._parts)]
        stack = parts[0]
        if len(parts) > 1:
            stack = jax.tree.map(lambda *parts: jnp.stack(parts), *parts)
        lead = (self.layer.copies,) if self.layer.stacked else ()
        arrays = {}
        for name, shape in self._shapes.items():
            array = getattr(stack, name).reshape(-1, *shape)
            array = _reordered(array, self._order)
            arrays[name] = array.reshape(*lead, *shape)
        if self._reduce:
            a, g = self._products("A", arrays["A"]), self._products("G", arrays["G"])
            arrays |= {"A": a / self._n, "G": g * self._n}
        return type(first)(**arrays)

    def _products(self, side: str, rows: jax.Array) -> jax.Array:
        """Return an unscaled factor for the setting "reduce".

        `rows`, `[..., n, d]`, are sums over each example's positions.
        """
        if side in self.layer.diagonal:
            return jnp.sum(jnp.square(rows), axis=-2)
        count = self.layer.cut["AG".index(side)]
        if count > 1:
            rows = in_blocks(rows, count)
        return jnp.einsum("...ni,...nj->...ij", rows, rows, precision="highest")


def probe_key(layer: Layer, use: Use) -> Key:
    """Return the key of the probe for a use of a kernel."""
    if use.layout == layer.layouts[0]:
        return Key(layer.name, use.part)
    return Key(layer.name, use.part, "transposed")


def basis_key(layer: Layer, part: int) -> Key:
    """Return the eigenvectors' key for a part's taps."""
    return Key(layer.name, part, "eigenvectors")


def _memory_order(stack: Sequence[Atom]) -> np.ndarray:
    """Return each copy's index in an array with the axes `stack`, for all copies in memory order."""
    sizes = [atom.size for atom in stack]
    places = np.arange(math.prod(sizes)).reshape(sizes)
    places = np.flip(places, tuple(k for k, atom in enumerate(stack) if atom.flipped))
    order = sorted(range(len(stack)), key=lambda k: stack[k].memory_order)
    return places.transpose(order).reshape(-1)


def _reordered(array: jax.Array, order: np.ndarray) -> jax.Array:
    """Reorder the entries of an array's first axis."""
    if np.array_equal(order, np.arange(len(order))):
        return array
    return jnp.take(array, order, axis=0, mode="clip")


class Entries(NamedTuple):
    """The leaf entries for which an elementwise layer's probe collects gradients.

    Attributes:
      column: the leaf's position in `Layer.params`.
      where: the entries' indices in the flat leaf.
      loops: positions, among the probe's axes for scans, of the scans over examples.
    """

    column: int
    where: np.ndarray
    loops: tuple[int, ...]


class ElementwiseSums(NamedTuple):
    """The per-example gradients of an elementwise layer, from its probes to its block.

    Attributes:
      layer: the layer.
      n: the number of examples over which the loss is a mean.
      probes: each probe's shape and dtype, by key.
      entries: the entries for which each probe collects gradients.
    """

    layer: Layer
    n: int
    probes: dict[Key, jax.ShapeDtypeStruct]
    entries: dict[Key, Entries]

    def finish(self, sums: list[jax.Array]) -> Unitwise:
        """Convert the gradients, in the order of `probes`, to the layer's block."""
        return whole(self._block)(sums)

    def _block(self, sums: list[jax.Array]) -> Unitwise:
        """Return the block of each channel, `n sum_i g_i g_i^T`.

        `g_i` is example `i`'s gradient for the channel's parameters.
        """
        size = self.layer.d_out
        columns: dict[int, jax.Array] = {}
        for key, g in zip(self.probes, sums, strict=True):
            column, where, loops = self.entries[key]
            g = jnp.moveaxis(g, (*loops, -2), range(len(loops) + 1))
            g = g.reshape(math.prod(g.shape[: len(loops) + 1]), -1)
            if not np.array_equal(where, np.arange(size)):
                g = jnp.zeros((len(g), size), g.dtype).at[:, where].set(g)
            columns[column] = columns[column] + g if column in columns else g
        rows = []
        for a in columns.values():
            moments = [jnp.sum(a * b, axis=0) for b in columns.values()]
            rows.append(jnp.stack(moments, axis=-1))
        return Unitwise(self.n * jnp.stack(rows, axis=-2))
