"""The user's settings for several devices."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh

from kfac._checks import check, check_axis_name, check_type
from kfac._distributed.comm import CommContext, name_of
from kfac._mesh import (
    AxisName,
    AxisNames,
    axis_names,
    axis_size,
    device_axes,
    mesh_of,
    varying_axes,
)


@dataclasses.dataclass(frozen=True)
class Distribution:
    """How K-FAC uses several devices, for the argument `distribution=`.

    ::

        mesh = jax.make_mesh((jax.device_count(),), ("data",))
        optimizer = kfac.kfac(0.1, layers, distribution=kfac.Distribution(mesh=mesh))

    Most programs do not need it. Inside `jax.shard_map`, the optimizer uses all bound axes. Outside `jax.shard_map`, it
    uses all axes of the parameters' mesh, otherwise of the mesh that is set. `jax.pmap`, and `jax.shard_map` without
    its check, need `axis_name`.

    Every block has an owner among the devices. Each device computes statistics for its share of the batch.
    Owners receive the means of these statistics as upper triangles. They keep the running averages, refresh the
    preconditioners, and precondition the gradients of their blocks. Then all devices gather the results.

    Args:
      axis_name: the named device axis of `jax.pmap`, `jax.shard_map` or `mesh`, or a tuple of axes. None for all axes.
      mesh: the mesh for plain `jit` over sharded arrays. `init` and `update` then open their own `shard_map` over this
        mesh, and `factors` belong to the global batch, as `value_and_grad` under such a `jit` returns them. None for
        the parameters' mesh.
      owner_axes: the axes over which blocks are dealt. None for all axes. Devices along the other axes repeat the
        owners. For example, with `Distribution(owner_axes="gpu")` on axes `("node", "gpu")`, every node has an owner
        for each block. Preconditioners and preconditioned gradients then stay inside a node. Only sums go between
        nodes, and each device sends its share. Thus the choice of axes sets the fraction of devices that work on a
        layer, which trades memory for messages (KAISA, Pauloski et al. 2021). Pass these axes to
        `kfac.state.state_specs`, too.
      communication_dtype: the dtype in which devices exchange Kronecker factors, `"float32"` or `"bfloat16"`. Pass the
        distribution to `statistics` or `value_and_grad`, which send the factors; `train_step` does so. With
        `"float32"`, factors summed in a wider dtype keep it. `"bfloat16"` rounds elements by up to 0.4%, which makes
        noise of the eigenvalues below 0.4% of the largest, and the damping must cover them. With `kfac.kfac` and its
        default damping of 0.1, steps of `Cholesky`, `Eigh` and `EKFAC` changed by 1 to 4 percent. With a damping of
        0.001 and fewer examples than a factor has rows, steps of `Eigh` and `EKFAC` changed by as much as their length.
        Steps of `SOAP` changed by 10 to 60 percent, at the same loss, because Adam tells close eigenvectors apart.

    Raises:
      ValueError: an argument is out of range.
    """

    axis_name: AxisName | None = None
    mesh: Mesh | AbstractMesh | None = None
    owner_axes: AxisName | None = None
    communication_dtype: str = "float32"

    def __post_init__(self):
        """Check the arguments."""
        check_axis_name(self.axis_name)
        check_axis_name(self.owner_axes, "owner_axes")
        check(communication_dtype=self.communication_dtype)
        if self.mesh is not None:
            check_type("mesh", self.mesh, Mesh | AbstractMesh, "a jax.sharding.Mesh")
            axes = self.mesh.axis_names
            if not set(axis_names(self.axis_name)) <= set(axes):
                raise ValueError(
                    f"axis_name must be among the axes of mesh, {axes}, but is {self.axis_name!r}"
                )
        named = axis_names(self.axis)
        if self.axis is not None and not set(axis_names(self.owner_axes)) <= set(named):
            raise ValueError(
                f"owner_axes must be among the axes of devices, {named}, but is {self.owner_axes!r}: name all "
                "axes in axis_name=, and in owner_axes= those that blocks are spread over"
            )

    @property
    def axis(self) -> AxisName | None:
        """The device axis `axis_name`, or all axes of `mesh`. None if neither is given."""
        if self.axis_name is None and self.mesh is not None:
            return tuple(self.mesh.axis_names)
        return self.axis_name

    def comm(
        self,
        tree: Any,
        devices: int | None = None,
    ) -> tuple[CommContext, Mesh | AbstractMesh | None]:
        """Determine how blocks lie on devices in the present context.

        Args:
          tree: the arrays whose mesh is used if no axis and no mesh is given.
          devices: the number of devices for which the state was initialised. None before.

        Returns:
          A `CommContext`, and the mesh over which a `shard_map` is still to be opened. The mesh is None if the axes are
          bound, if there is no mesh, or if blocks have no owners and XLA partitions the program.

        Raises:
          ValueError: no axis is given, and JAX does not track here whether devices have the same parameters.
        """
        axes = axis_names(self.axis)
        mesh = self.mesh
        if not axes:
            axes = device_axes()
            if axes and not varying_axes(lax.axis_index(axes)):
                name = name_of(axes)
                raise ValueError(
                    f"jax.pmap, and jax.shard_map with check_vma=False, do not tell whether the devices of {name!r} "
                    f"have the same parameters. If so, pass the optimizer distribution=kfac.Distribution({name!r}); if "
                    "each trains a model of its own, use jax.vmap over the models, sharded over a mesh"
                )
        if not axes:
            mesh = mesh_of(tree)
            axes = () if mesh is None else mesh.axis_names
        dealt = self.axis is not None or devices != 1
        owner_axes: AxisNames = ()
        if axes and dealt:
            owner_axes = axis_names(self.owner_axes) or axes
        if axis_size(axes) is not None:
            return CommContext(axes, owner_axes), None
        if owner_axes:
            return CommContext(axes, owner_axes), mesh
        # XLA partitions the program of a single device over automatic axes.
        explicit = mesh is not None and AxisType.Explicit in mesh.axis_types
        return CommContext(), mesh if explicit else None


def check_distribution(value: object) -> None:
    """Raise if a value is neither a `Distribution` nor None."""
    check_type(
        "distribution", value, Distribution | None, "a kfac.Distribution or None"
    )
