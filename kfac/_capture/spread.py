"""Sums over a mesh: each device packs those of its examples, and gets an equal part of the elements of all."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from kfac._factors import Kronecker, Packed
from kfac._triangles import filled, room
from kfac._varying import whole


@dataclasses.dataclass(frozen=True)
class Spread:
    """How the sums of a use of a kernel are formed and spread.

    A layer's message is sent as soon as it is known, so that no device holds two layers' sums unpacked. Where several
    uses are added up, or those of a loop that shares the kernel, each device adds up what it has first. Where devices
    are traced one by one they keep what they have, packed.

    Attributes:
      shapes: of `A` and `G` of one copy, as of `Packed`.
      dtype: of the sums on the wire; "float32" for that in which they are formed.
      axes: of the mesh, over which the examples are spread, and then the elements; none for a device on its own.
      x: along which axis of the data the examples are.
      g: along which of the gradient.
      at_once: whether there is one use.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    axes: tuple[str, ...] = ()
    x: int = 0
    g: int = 0
    at_once: bool = True

    def sums(self, of: Callable[[Any, jax.Array], Kronecker], residuals: Any, g: jax.Array) -> Kronecker:
        """`of` the residuals of a tap and the gradient: vectors `[..., pieces, elements]`, or those of each device."""

        def own(data, residuals, g):
            flat = Packed.of(of((data, *residuals), g), self.shapes).flat
            if not self.axes:
                return flat
            return dealt(flat, self.axes, self.dtype) if self.at_once else jax.tree.map(lambda x: x[None], flat)

        data, *rest = residuals
        if not self.axes:
            return own(data, rest, g)
        spread = [PartitionSpec(*k * [None], self.axes) for k in (self.x, self.g)]
        return self._over_mesh(own, self._lie(0, 3), spread[0], PartitionSpec(), spread[1])(data, rest, g)

    def probe(self, loops: tuple[int, ...], batched: int, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        """What the sums of one side are the cotangent of: of so many copies behind the axes of loops."""
        mesh, late = jax.sharding.get_abstract_mesh(), not self.at_once
        each = [math.prod(mesh.shape[name] for name in self.axes)] if self.axes and late else []
        shape = (*loops, *each, batched, *(room(shape) if each else self.room(shape)))
        lies = self._explicit(self._lie(len(loops), len(shape)))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, lies) if any(lies) else None)

    def room(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """The last two axes of one side, once it is spread."""
        return room(shape, jax.sharding.get_abstract_mesh().size if self.axes else 1)

    def packed(
        self, finish: Callable[[list[Kronecker]], Any], loops: int, lead: int
    ) -> Callable[[list[Kronecker]], Packed]:
        """`finish` of the sums of all devices and uses; its results have so many axes in front."""
        given, spread = self._lie(loops, loops + 3), PartitionSpec(*(loops + 2) * [None], self.axes)

        def own(sums):
            return dealt(jax.tree.map(lambda x: jnp.squeeze(x, loops), sums), self.axes, self.dtype)

        def finished(sums):
            if not self.axes:
                own_flat = finish(sums)
                narrow = self.dtype != "float32"
                return Packed(jax.tree.map(lambda x: x.astype(self.dtype) if narrow else x, own_flat), self.shapes)
            of_all = sums if self.at_once else [self._over_mesh(own, spread, given)(x) for x in sums]
            lies = self._explicit(PartitionSpec(*(lead + 1) * [None], self.axes))
            return Packed(whole(finish, lies)(of_all), self.shapes)

        return finished

    def _lie(self, loops: int, ndim: int) -> PartitionSpec:
        """Where the axes of the mesh are in what a use sums."""
        return PartitionSpec(*(ndim - 1 if self.at_once else loops) * [None], self.axes)

    def _explicit(self, spec: PartitionSpec) -> PartitionSpec:
        """The axes of a spec that are explicit."""
        mesh = jax.sharding.get_abstract_mesh()
        kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        kept = tuple(name for name in self.axes if kinds[name] == AxisType.Explicit)
        return PartitionSpec(*(kept if part and kept else None for part in spec))

    def _over_mesh(self, fn: Callable[..., Kronecker], found: PartitionSpec, *given: Any) -> Callable[..., Kronecker]:
        own = jax.shard_map(fn, in_specs=given, out_specs=found, axis_names=set(self.axes))
        return whole(own, self._explicit(found))


def dealt(flat: Kronecker, axes: tuple[str, ...], dtype: str = "float32") -> Kronecker:
    """From vectors `[..., elements]` of what devices have of a batch, this one's part of their sums, in one message.

    Zeros behind make the number of elements one that all devices of the mesh divide.
    """
    leaves, structure = jax.tree.flatten(jax.tree.map(filled, flat))
    parts = [jnp.moveaxis(x.reshape(*x.shape[:-1], lax.axis_size(axes), -1), -2, 0) for x in leaves]
    sent = jnp.concatenate([x.reshape(len(x), -1) for x in parts], axis=1)
    own = lax.psum_scatter(sent if dtype == "float32" else sent.astype(dtype), axes).astype(sent.dtype)
    ends = itertools.accumulate(math.prod(x.shape[1:]) for x in parts)
    cut = zip(jnp.split(own, list(ends)[:-1]), parts, strict=True)
    return jax.tree.unflatten(structure, [x.reshape(part.shape[1:]) for x, part in cut])
