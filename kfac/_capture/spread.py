"""Sums over a mesh: each device packs those of its examples, and gets an equal part of the elements of all."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from kfac._factors import Kronecker, Packed
from kfac._packing import filled, flatten, room, unflatten
from kfac._varying import explicit_part, whole


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
      at_once: whether there is one use over a mesh.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    axes: tuple[str, ...] = ()
    x: int = 0
    g: int = 0
    at_once: bool = False

    def sums(self, of: Callable[[Any, jax.Array], Kronecker], residuals: Any, g: jax.Array) -> Kronecker:
        """The packed sums of one use, `[copies, pieces, elements]`, which `of` computes from residuals and gradient."""

        def of_device(data, rest, g):
            flat = Packed.of(of((data, *rest), g), self.shapes).flat
            return dealt(flat, self.axes, self.dtype) if self.at_once else flat

        data, *rest = residuals
        if not self.axes:
            return of_device(data, rest, g)
        split = [PartitionSpec(*k * [None], self.axes) for k in (self.x, self.g)]
        return self._over_mesh(of_device, self._lie(0), split[0], PartitionSpec(), split[1])(data, rest, g)

    def probe(self, loops: tuple[int, ...], copies: int, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        """What the sums of one side are the cotangent of, behind the axes of loops."""
        mesh, spec = jax.sharding.get_abstract_mesh(), explicit_part(self._lie(len(loops)))
        devices = 1 if self.at_once else math.prod(mesh.shape[name] for name in self.axes)
        sizes = *loops, devices * copies, *(self.room(shape) if self.at_once else room(shape))
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, spec) if any(spec) else None)

    def room(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """The last two axes of one side, once it is spread."""
        return room(shape, jax.sharding.get_abstract_mesh().size if self.axes else 1)

    def packed(
        self, finish: Callable[[list[Kronecker]], Any], loops: int, lead: int
    ) -> Callable[[list[Kronecker]], Packed]:
        """Returns a function that adds up the sums of all devices and finishes them.

        Args:
          finish: brings sums to factors, as of one device.
          loops: how many axes of loops the sums have in front.
          lead: how many axes the factors have in front.
        """
        deal = functools.partial(dealt, axes=self.axes, dtype=self.dtype)
        spread = PartitionSpec(*(loops + 2) * [None], self.axes)

        def finished(sums):
            if self.axes and not self.at_once:
                sums = [self._over_mesh(deal, spread, self._lie(loops))(use) for use in sums]
            flat = whole(finish, PartitionSpec(*(lead + 1) * [None], self.axes) if self.axes else None)(sums)
            narrow = not self.axes and self.dtype != "float32"  # still to be sent
            return Packed(jax.tree.map(lambda x: x.astype(self.dtype) if narrow else x, flat), self.shapes)

        return finished

    def _lie(self, loops: int) -> PartitionSpec:
        """The sharding of what a use sums, behind so many axes of loops."""
        return PartitionSpec(*(loops + 2 * self.at_once) * [None], self.axes or None)

    def _over_mesh(self, fn: Callable[..., Kronecker], out: PartitionSpec, *in_specs: Any) -> Callable[..., Kronecker]:
        return whole(jax.shard_map(fn, in_specs=in_specs, out_specs=out, axis_names=set(self.axes)), out)


def dealt(flat: Kronecker, axes: tuple[str, ...], dtype: str = "float32") -> Kronecker:
    """Adds up vectors `[..., elements]` over devices, in one message, and returns this device's part of the elements.

    The vectors are filled up with zeros, so that the devices of the mesh divide the number of elements.
    """

    def by_device(x):
        x = filled(x)
        return jnp.moveaxis(x.reshape(*x.shape[:-1], lax.axis_size(axes), -1), -2, 0)

    parts = jax.tree.map(by_device, flat)
    sent = flatten(parts)
    part = lax.psum_scatter(sent if dtype == "float32" else sent.astype(dtype), axes).astype(sent.dtype)
    return jax.tree.map(lambda x: x[0], unflatten(part[None], parts))
