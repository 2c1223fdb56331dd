"""Where blocks and statistics lie on devices, as a value."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax import lax
from jax.sharding import AbstractMesh, Mesh

from kfac._checks import check_axis_name, check_type
from kfac._distributed.ways import Way
from kfac._varying import AxisName, axis_names, axis_size, device_axes, mesh_of, varying_axes


@dataclasses.dataclass(frozen=True)
class Distribution:
    """How K-FAC uses several devices, for what it cannot see by itself: the argument `distribution=`.

    Most programs need none. The optimizer takes all axes that `jax.shard_map` has bound; outside of it, all axes of the
    mesh that parameters lie on, or that is set. `jax.pmap`, and `jax.shard_map` without its check, need `axis_name`.

    Every Kronecker block has an owner among the devices. Statistics arrive local and are averaged to the owners, as
    upper triangles. Owners keep the running averages, invert them, and precondition the gradients of their blocks. Then
    all devices gather the results.

    Args:
      axis_name: the named axis of devices, of `jax.pmap`, `jax.shard_map` or `mesh`; a tuple for several. None for all.
      mesh: for plain `jit` over sharded arrays. `init` and `update` then open a `shard_map` of their own over it, and
        `factors` are those of the global batch, as `value_and_grad` under such a `jit` returns them. None for the one
        that parameters lie on.
      owners: those of the axes that blocks are spread over; None for all. Devices along the others repeat the owners:
        with `Distribution(owners="gpu")` on axes `("node", "gpu")` every node has an owner for each block. Inverses and
        preconditioned gradients then stay inside of it, and only sums go between nodes, each device its share. So the
        fraction of devices that work on a layer, which trades memory for messages, is a choice of axes (KAISA, Pauloski
        et al. 2021). `kfac.state.state_specs` takes these axes.

    Raises:
      ValueError: an argument is out of range.
    """

    axis_name: AxisName | None = None
    mesh: Mesh | AbstractMesh | None = None
    owners: AxisName | None = None

    def __post_init__(self):
        """Checks the arguments."""
        check_axis_name(self.axis_name)
        check_axis_name(self.owners, "owners")
        if self.mesh is not None:
            check_type("mesh", self.mesh, Mesh | AbstractMesh, "a jax.sharding.Mesh")
            axes = self.mesh.axis_names
            if not set(axis_names(self.axis_name)) <= set(axes):
                raise ValueError(f"axis_name must be among the axes of mesh, {axes}, but is {self.axis_name!r}")
        if self.axis is not None and not set(axis_names(self.owners)) <= set(axis_names(self.axis)):
            raise ValueError(
                f"owners must be among the axes of devices, {axis_names(self.axis)}, but is {self.owners!r}: name all "
                "axes in axis_name=, and in owners= those that blocks are spread over"
            )

    @property
    def axis(self) -> AxisName | None:
        """The axis of devices, or all of them; None for one device."""
        if self.axis_name is None and self.mesh is not None:
            return tuple(self.mesh.axis_names)
        return self.axis_name

    def way(self, tree: Any, dealt: bool) -> tuple[Way, Mesh | AbstractMesh | None]:
        """How blocks lie here, and the mesh that a `shard_map` is still to be opened over.

        Args:
          tree: arrays, of which the mesh is taken where none is named.
          dealt: whether blocks have owners.

        Raises:
          ValueError: nothing tells here whether devices have the same parameters.
        """
        seen, bound = self, device_axes()
        if self.axis is None and bound:
            if not varying_axes(lax.axis_index(bound)):
                name = bound[0] if len(bound) == 1 else bound
                raise ValueError(
                    f"jax.pmap, and jax.shard_map with check_vma=False, do not tell whether the devices of {name!r} "
                    f"have the same parameters. If so, pass the optimizer distribution=kfac.Distribution({name!r}); if "
                    "each trains a model of its own, use jax.vmap over the models, sharded over a mesh"
                )
            seen = dataclasses.replace(self, axis_name=bound)
        elif self.axis is None:
            seen = dataclasses.replace(self, mesh=mesh_of(tree))
        axes = axis_names(seen.axis)
        way = Way(axes, (axis_names(self.owners) or axes) if dealt and axes else ())
        if axis_size(axes) is not None:
            return way, None
        return way if way.owners else Way(), seen.mesh


def check_distribution(value: Any) -> None:
    """Raises where a value does not say how devices are used."""
    check_type("distribution", value, Distribution | None, "a kfac.Distribution or None")
