"""Add up packed statistics over a mesh: a reduce-scatter.

Each device packs the sums over its own examples, and receives an equal share of the total's elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec, get_abstract_mesh

from kfac._factors import Kronecker, Packed
from kfac._mesh import explicit_part, with_auto_axes
from kfac._packing import Shape, flatten, pad_to_devices, padded_shape, unflatten


class ReduceScatter(NamedTuple):
    """How a kernel's sums are packed and reduce-scattered over devices.

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

    shapes: tuple[Shape, ...]
    dtype: str
    axes: tuple[str, ...] = ()
    x: int = 0
    g: int = 0
    at_once: bool = False

    def sums(
        self,
        of: Callable,
        residuals: tuple,
        g: Array,
    ) -> Kronecker:
        """Return the packed sums of a single use, `[copies, pieces, elements]`.

        With `axes` but without `at_once`, the copies of all devices are side by side on the first axis.

        Args:
          of: computes the sums from `residuals` and `g`.
          residuals: the use's residuals. The first is the data, which has an axis of examples.
          g: the gradient, which has an axis of examples.
        """

        def of_device(x, rest, g):
            flat = of((x, *rest), g).packed(self.shapes).flat
            return self._reduce_scatter(flat) if self.at_once else flat

        x, *rest = residuals
        if not self.axes:
            return of_device(x, rest, g)
        x_spec = PartitionSpec(*self.x * [None], self.axes)
        g_spec = PartitionSpec(*self.g * [None], self.axes)
        in_specs = (x_spec, PartitionSpec(), g_spec)
        return self._over_mesh(of_device, in_specs, self._spec(0))(x, rest, g)

    def probe(
        self,
        stack: Shape,
        shape: Shape,
        dtype: np.dtype,
    ) -> jax.ShapeDtypeStruct:
        """Return the shape, dtype and sharding of a probe, whose cotangent is an array of packed sums.

        Args:
          stack: the lengths of the loops around the use, and the number of copies in each iteration.
          shape: the unpacked shape for each copy.
          dtype: the dtype.
        """
        mesh = get_abstract_mesh()
        *loops, copies = stack
        spec = explicit_part(self._spec(len(loops)))
        if self.at_once:
            sizes = self.padded_shape(shape)
        else:
            copies *= math.prod(mesh.shape[name] for name in self.axes)
            sizes = padded_shape(shape)
        sharding = NamedSharding(mesh, spec) if any(spec) else None
        return jax.ShapeDtypeStruct((*loops, copies, *sizes), dtype, sharding=sharding)

    def padded_shape(self, shape: Shape) -> Shape:
        """Return the numbers of pieces and elements of a factor with this shape, after padding for the devices."""
        return padded_shape(shape, get_abstract_mesh().size if self.axes else 1)

    def packed(
        self,
        finish: Callable,
        sums: Sequence[Kronecker],
        loops: int,
        lead: int,
    ) -> Packed:
        """Add up all devices' sums, and turn the total into packed factors.

        Without `axes`, use this device's sums only.

        Args:
          finish: turns sums into factors, as on a single device.
          sums: the sums of each probe.
          loops: the sums' number of leading axes, which stand for loops.
          lead: the factors' number of leading axes.
        """
        split = None
        if self.axes:
            split = PartitionSpec(*(lead + 1) * [None], self.axes)
        if self.axes and not self.at_once:
            out = PartitionSpec(*(loops + 2) * [None], self.axes)
            add_up = self._over_mesh(self._reduce_scatter, (self._spec(loops),), out)
            sums = list(map(add_up, sums))
        flat = with_auto_axes(finish, split)(sums)
        if not self.axes and self.dtype != "float32":
            # The factors are sent later.
            flat = optax.tree.cast(flat, self.dtype)
        return Packed(flat, self.shapes, self.dtype)

    def _spec(self, loops: int) -> PartitionSpec:
        """Return the sharding of a use's sums, which have `loops` leading axes for loops.

        With `at_once`, devices split the elements. Otherwise each device has its own copies.
        """
        axis = loops + 2 if self.at_once else loops
        return PartitionSpec(*axis * [None], self.axes or None)

    def _over_mesh(
        self,
        fn: Callable,
        in_specs: tuple[PartitionSpec, ...],
        out: PartitionSpec,
    ) -> Callable:
        sharded = jax.shard_map(
            fn, in_specs=in_specs, out_specs=out, axis_names=set(self.axes)
        )
        return with_auto_axes(sharded, out)

    def _reduce_scatter(self, flat: Kronecker) -> Kronecker:
        """Add up vectors `[..., elements]` over devices, and return this device's share of the elements.

        All vectors travel in a single message. They are padded with zeros to a multiple of the mesh's number of
        devices.
        """

        def by_device(x):
            x = pad_to_devices(x)
            x = x.reshape(*x.shape[:-1], lax.axis_size(self.axes), -1)
            return jnp.moveaxis(x, -2, 0)

        parts = jax.tree.map(by_device, flat)
        vectors = flatten(parts)
        message = vectors
        if self.dtype != "float32":
            message = vectors.astype(self.dtype)
        share = lax.psum_scatter(message, self.axes).astype(vectors.dtype)
        return jax.tree.map(lambda x: x[0], unflatten(share[None], parts))
