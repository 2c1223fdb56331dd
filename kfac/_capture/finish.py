"""Convert the sums from a layer's taps to its statistics.

Each part of a kernel has a probe, and a second probe for reads of its transpose. A probe's arrays have the shape
`[*loops, batched, ...]`: an axis for each scan over the kernel, an axis for the copies in a batched product, and the
axes of a single copy's sums. The factors hold the copies in the kernel's memory order.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kfac._capture.axes import Atom
from kfac._capture.taps import Key, KroneckerTap
from kfac._factors import Basis, Kronecker, Ragged, Statistics, Tied, Unitwise
from kfac._layers import FactorShapes, Layer
from kfac._mesh import with_auto_axes
from kfac._packing import in_blocks, pieces_along


class KroneckerFinisher:
    """Converts the sums from the probes of a Kronecker layer to its factors.

    Attributes:
      probes: each probe's shapes and dtypes, by key.
    """

    def __init__(
        self,
        layer: Layer,
        taps: Sequence[KroneckerTap],
        n: int,
        batch: int,
    ):
        """Plan the probes.

        Args:
          layer: the layer.
          taps: the taps at all uses of the kernel.
          n: the number of examples over which the loss is a mean.
          batch: the number of examples in the batch.
        """
        tap = taps[0]
        use = tap.use
        self._layer = layer
        self._taps = taps
        self._n = n
        self._reduce = layer.weight_sharing == "reduce"
        self._parts = math.prod(atom.size for atom in use.picked)
        loops = [loop.length for loop in use.loops()]
        self._stack = (*loops, math.prod(atom.size for atom in use.read.batched))
        # The number of rows of each part.
        self._rows = collections.Counter[int]()
        # The taps bring batched copies to memory order, flips included. Scans stack copies in the order of their reads.
        batched = [atom._replace(flipped=False) for atom in use.read.batched]
        batched.sort(key=lambda atom: atom.memory_order)
        self._order = _memory_order([*use.picked, *use.scanned, *batched])

        # The shapes of a single copy's sums, and then of its factors.
        shapes: FactorShapes = dict(layer.side_shapes)
        if self._reduce:
            shapes = {"A": (batch, layer.d_in), "G": (batch, layer.d_out)}
        kind: type[Any] = Kronecker
        if use.read.groups is not None:
            kind = Ragged
            shapes = {"A": shapes["A"], "squares": shapes["G"], "rows": ()}
        if tap.basis:
            shapes["moments"] = (layer.d_out, layer.d_in)
        arrays = {}
        for name, shape in shapes.items():
            if tap.scatter is None:
                arrays[name] = jax.ShapeDtypeStruct((*self._stack, *shape), tap.dtype)
            else:
                if name == "moments":
                    shape = (math.prod(shape),)
                arrays[name] = tap.scatter.probe(self._stack, shape, tap.dtype)
                shapes[name] = tap.scatter.padded_shape(shape)
        self._shapes = shapes
        self.probes: dict[Key, Kronecker | Ragged] = {}
        for each in taps:
            key = each.key
            self._rows[key.number] += each.use.rows
            self.probes[key] = kind(**arrays)
            if key.role == "transposed":
                # The transpose has the layer's outputs as inputs, so `A` and `G` swap shapes.
                self.probes[key] = Kronecker(arrays["G"], arrays["A"])

    def finish(self, sums: Sequence[Any]) -> Statistics:
        """Convert the sums, in the order of `probes`, to the layer's statistics."""
        scatter = self._taps[0].scatter
        if scatter is None:
            return self._factors(sums)
        loops = len(self._stack) - 1
        return scatter.packed(self._factors, sums, loops, int(self._layer.stacked))

    def eigenvectors(self, basis: Basis) -> dict[Key, Basis]:
        """Arrange the layer's eigenvectors for its taps, by the taps' `basis` keys."""

        def arranged(vectors):
            shape = vectors.shape[-2:]
            order = np.argsort(self._order)
            vectors = _reordered(vectors.reshape(-1, *shape), order)
            return vectors.reshape(self._parts, *self._stack, *shape)

        a = arranged(basis.A)
        g = arranged(basis.G)
        result = {}
        for tap in self._taps:
            if tap.basis:
                part = tap.basis.number
                result[tap.basis] = Basis(a[part], g[part])
        return result

    def _factors(self, sums: Sequence[Any]) -> Any:
        """Return the kernel's factors from the sums of all probes; `Tied` factors if some uses read a transpose."""
        n = self._n
        direct = {}
        transposed = {}
        for (_, part, role), of_key in zip(self.probes, sums, strict=True):
            # G = (n / s) sum g g^T with s positions per example.
            positions = self._rows[part] / n
            if role == "transposed":
                transposed[part] = Kronecker(
                    A=of_key.G * n, G=of_key.A / (n * positions)
                )
            else:
                direct[part] = self._of_part(of_key, positions)
        if not transposed:
            return self._of_layer(direct)
        return Tied(
            self._of_layer(direct),
            self._of_layer(transposed),
            self._layer.diagonal,
            self._layer.num_blocks,
        )

    def _of_part(self, sums: Any, positions: float) -> Kronecker | Ragged:
        """Return a part's factors from its sums and its number of positions per example."""
        n = self._n
        if isinstance(sums, Ragged):
            return Ragged(sums.A / n, sums.squares * n, sums.rows / n)
        moments = None if sums.moments is None else sums.moments * n
        if self._reduce:
            return Kronecker(sums.A / positions, sums.G, moments)
        return Kronecker(sums.A / n, sums.G * (n / positions), moments)

    def _of_layer(self, of_parts: dict[int, Any]) -> Any:
        """Return the layer's factors from its parts' factors. An unread part has zeros."""
        layer = self._layer
        stack = next(iter(of_parts.values()))
        kind = type(stack)
        if self._parts > 1:
            unread = jax.tree.map(jnp.zeros_like, stack)
            parts = [of_parts.get(part, unread) for part in range(self._parts)]
            stack = jax.tree.map(lambda *parts: jnp.stack(parts), *parts)
        lead = (layer.copies,) if layer.stacked else ()
        arrays = {}
        for name, shape in self._shapes.items():
            array = getattr(stack, name).reshape(-1, *shape)
            arrays[name] = _reordered(array, self._order).reshape(*lead, *shape)
        if self._reduce:
            arrays["A"] = _products(layer, "A", arrays["A"]) / self._n
            arrays["G"] = _products(layer, "G", arrays["G"]) * self._n
        return kind(**arrays)


def _products(
    layer: Layer,
    side: str,
    rows: Array,
) -> Array:
    """Return an unscaled factor for the setting "reduce", from rows `[..., n, d]` that sum each example's positions."""
    if side in layer.diagonal:
        return jnp.sum(jnp.square(rows), axis=-2)
    count = pieces_along(side, layer.num_blocks)
    if count > 1:
        rows = in_blocks(rows, count)
    return jnp.einsum("...ni,...nj->...ij", rows, rows, precision="highest")


def _memory_order(stack: Sequence[Atom]) -> np.ndarray:
    """Return each copy's index in an array with the axes `stack`, for all copies in memory order."""
    sizes = [atom.size for atom in stack]
    flipped = tuple(k for k, atom in enumerate(stack) if atom.flipped)
    places = np.flip(np.arange(math.prod(sizes)).reshape(sizes), flipped)
    order = sorted(range(len(stack)), key=lambda k: stack[k].memory_order)
    return places.transpose(order).reshape(-1)


def _reordered(array: Array, order: np.ndarray) -> Array:
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


class ElementwiseFinisher(NamedTuple):
    """Converts the per-example gradients from the probes of an elementwise layer to its block.

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

    def finish(self, sums: Sequence[Array]) -> Unitwise:
        """Convert the gradients, in the order of `probes`, to the layer's block."""
        return with_auto_axes(self._block)(sums)

    def _block(self, sums: Sequence[Array]) -> Unitwise:
        """Return the block of each channel, `n sum_i g_i g_i^T`.

        `g_i` is example `i`'s gradient for the channel's parameters.
        """
        size = self.layer.d_out
        columns: dict[int, Array] = {}
        for key, g in zip(self.probes, sums, strict=True):
            column, where, loops = self.entries[key]
            g = jnp.moveaxis(g, (*loops, -2), range(len(loops) + 1))
            g = g.reshape(math.prod(g.shape[: len(loops) + 1]), -1)
            if not np.array_equal(where, np.arange(size)):
                g = jnp.zeros((len(g), size), g.dtype).at[:, where].set(g)
            columns[column] = columns[column] + g if column in columns else g
        rows = []
        for a in columns.values():
            row = [jnp.sum(a * b, axis=0) for b in columns.values()]
            rows.append(jnp.stack(row, axis=-1))
        return Unitwise(self.n * jnp.stack(rows, axis=-2))
