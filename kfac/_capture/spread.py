"""Add up packed statistics over a mesh: a reduce-scatter.

Each device packs the sums over its own examples, and receives an equal share of the total's elements.
"""

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
    """How a kernel's sums are packed and spread over devices.

    - With `at_once`, each device packs and sends a layer's sums inside the backward pass, as soon as it has them. So no
      device holds the unpacked sums of two layers.
    - With `axes` alone, several uses of the kernel, or several iterations of a loop, add to the same sums. Each device
      adds up its own sums first. `packed` sends them after the backward pass.
    - Without `axes`, as inside `shard_map` and `pmap`, each device keeps its own sums, packed.

    Attributes:
      shapes: the shapes of `A` and `G` for a single copy, as in `Packed`.
      dtype: the message dtype. `"float32"` stands for the dtype in which the sums are formed.
      axes: the mesh axes over which first the examples and then the elements are split; empty inside `shard_map` and
        `pmap`.
      x: the data's axis of examples.
      g: the gradient's axis of examples.
      at_once: whether there are `axes`, and each probe gets its sums from a single use that is read once.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    axes: tuple[str, ...] = ()
    x: int = 0
    g: int = 0
    at_once: bool = False

    def sums(
        self, of: Callable[[Any, jax.Array], Kronecker], residuals: Any, g: jax.Array
    ) -> Kronecker:
        """Return the packed sums of a single use, which `of` computes from residuals and gradient.

        Their shape is `[copies, pieces, elements]`. With `axes` but without `at_once`, the copies of all devices are
        side by side on the first axis.
        """

        def of_device(data, rest, g):
            flat = Packed.of(of((data, *rest), g), self.shapes).flat
            return dealt(flat, self.axes, self.dtype) if self.at_once else flat

        data, *rest = residuals
        if not self.axes:
            return of_device(data, rest, g)
        split = [PartitionSpec(*k * [None], self.axes) for k in (self.x, self.g)]
        return self._over_mesh(
            of_device, self._lie(0), split[0], PartitionSpec(), split[1]
        )(data, rest, g)

    def probe(
        self, loops: tuple[int, ...], copies: int, shape: tuple[int, ...], dtype: Any
    ) -> jax.ShapeDtypeStruct:
        """Return the shape, dtype and sharding of a probe, whose cotangent is an array of packed sums.

        `shape` is the unpacked shape for each of the `copies`. Loops of the lengths `loops` add leading axes.
        """
        mesh, spec = (
            jax.sharding.get_abstract_mesh(),
            explicit_part(self._lie(len(loops))),
        )
        devices = (
            1 if self.at_once else math.prod(mesh.shape[name] for name in self.axes)
        )
        sizes = (
            *loops,
            devices * copies,
            *(self.room(shape) if self.at_once else room(shape)),
        )
        return jax.ShapeDtypeStruct(
            sizes, dtype, sharding=NamedSharding(mesh, spec) if any(spec) else None
        )

    def room(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the numbers of pieces and elements of a factor with this shape, after padding for the devices."""
        return room(shape, jax.sharding.get_abstract_mesh().size if self.axes else 1)

    def packed(
        self, finish: Callable[[list[Kronecker]], Any], loops: int, lead: int
    ) -> Callable[[list[Kronecker]], Packed]:
        """Return a function that adds up all devices' sums and turns the total into packed factors.

        Without `axes`, the function uses this device's sums only.

        Args:
          finish: turns sums into factors, as on a single device.
          loops: the sums' number of leading axes, which stand for loops.
          lead: the factors' number of leading axes.
        """
        deal = functools.partial(dealt, axes=self.axes, dtype=self.dtype)
        spread = PartitionSpec(*(loops + 2) * [None], self.axes)

        def finished(sums):
            if self.axes and not self.at_once:
                sums = [
                    self._over_mesh(deal, spread, self._lie(loops))(use) for use in sums
                ]
            flat = whole(
                finish,
                PartitionSpec(*(lead + 1) * [None], self.axes) if self.axes else None,
            )(sums)
            narrow = (
                not self.axes and self.dtype != "float32"
            )  # the factors are sent later
            return Packed(
                jax.tree.map(lambda x: x.astype(self.dtype) if narrow else x, flat),
                self.shapes,
            )

        return finished

    def _lie(self, loops: int) -> PartitionSpec:
        """Return the sharding of a use's sums, which have `loops` leading axes for loops.

        With `at_once`, devices split the elements. Otherwise each device has its own copies.
        """
        return PartitionSpec(*(loops + 2 * self.at_once) * [None], self.axes or None)

    def _over_mesh(
        self, fn: Callable[..., Kronecker], out: PartitionSpec, *in_specs: Any
    ) -> Callable[..., Kronecker]:
        return whole(
            jax.shard_map(
                fn, in_specs=in_specs, out_specs=out, axis_names=set(self.axes)
            ),
            out,
        )


def dealt(flat: Kronecker, axes: tuple[str, ...], dtype: str = "float32") -> Kronecker:
    """Add up vectors `[..., elements]` over devices, and return this device's share of the elements.

    All vectors travel in a single message. They are padded with zeros to a multiple of the mesh's number of devices.
    """

    def by_device(x):
        x = filled(x)
        return jnp.moveaxis(x.reshape(*x.shape[:-1], lax.axis_size(axes), -1), -2, 0)

    parts = jax.tree.map(by_device, flat)
    sent = flatten(parts)
    part = lax.psum_scatter(
        sent if dtype == "float32" else sent.astype(dtype), axes
    ).astype(sent.dtype)
    return jax.tree.map(lambda x: x[0], unflatten(part[None], parts))
