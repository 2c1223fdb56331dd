"""Where blocks and statistics lie on devices, as a value."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh

from kfac._checks import check_axis_name, check_mesh, check_type
from kfac._curvature.blocks import Group
from kfac._curvature.inverse import Inverse
from kfac._curvature.symmetric import flatten, unflatten
from kfac._varying import AxisName, axis_names, device_axes, mesh_of, varying_axes


@dataclasses.dataclass(frozen=True)
class Distribution:
    """How K-FAC uses several devices, where it should not be what it sees: what `distribution=` takes.

    Without it the optimizer finds out where it runs: inside `jax.shard_map` all axes that are bound, and else all axes
    of the mesh that parameters lie on, or that is set. `jax.pmap`, and `jax.shard_map` without its check, need
    `axis_name`. Every Kronecker block has an owner. Statistics arrive local and are averaged to the owners, which keep
    the running averages, invert, and precondition their blocks; the preconditioned gradients are gathered. Of symmetric
    matrices the upper triangles are sent.

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
            check_mesh(self.mesh, self.axis_name)
        if self.axis is not None and not set(axis_names(self.owners)) <= set(axis_names(self.axis)):
            raise ValueError(
                f"owners must be among the axes of devices, {axis_names(self.axis)}, but is {self.owners!r}: name all "
                "axes in axis_name=, and in owners= those that blocks are spread over"
            )

    def seen(self, tree: Any) -> Distribution:
        """With the axes that are bound here, or the mesh that the arrays of a tree lie on, where it names none.

        Raises:
          ValueError: nothing tells here whether devices have the same parameters.
        """
        if self.axis is not None:
            return self
        if axes := device_axes():
            if not varying_axes(lax.axis_index(axes)):
                name = axes[0] if len(axes) == 1 else axes
                raise ValueError(
                    f"jax.pmap, and jax.shard_map with check_vma=False, do not tell whether the devices of {name!r} "
                    "have the same parameters and other examples. If they have, pass the optimizer "
                    f"distribution=kfac.Distribution({name!r}), by the axis_name= of jax.pmap"
                    "; if each trains a model of its own, use jax.vmap over the models, sharded over a mesh"
                )
            return dataclasses.replace(self, axis_name=axes)
        return dataclasses.replace(self, mesh=mesh_of(tree))

    @property
    def axis(self) -> AxisName | None:
        """The axis of devices, or all of them; None for one device."""
        if self.axis_name is None and self.mesh is not None:
            return tuple(self.mesh.axis_names)
        return self.axis_name

    @property
    def owner_axis(self) -> AxisName | None:
        """The axis, or those, that blocks are spread over."""
        return self.axis if self.axis is None or self.owners is None else self.owners

    @property
    def beside_owners(self) -> tuple[str, ...]:
        """The axes whose devices repeat the owners."""
        return tuple(name for name in axis_names(self.axis) if name not in axis_names(self.owner_axis))


def check_distribution(value: Any) -> None:
    """Raises where a value does not say how devices are used."""
    check_type("distribution", value, Distribution | None, "a kfac.Distribution or None")


@functools.cache
def everywhere(inverse: Inverse, group: Group) -> bool:
    """Whether all devices precondition the Kronecker blocks of a group, with inverses that they get at refreshes.

    That is so where a factor is diagonal and inverses are less to send than gradients: those of a table of words.
    """
    if inverse.takes_moments or inverse.takes_gradients or all(len(shape) > 1 for shape in group.shapes.values()):
        return False
    sent = jax.eval_shape(lambda: inverse.encode(inverse.init(group.zeros(1, jnp.float32))))
    return sent.size < group.d_out * group.d_in


def owners_precondition(inverse: Inverse, group: Group) -> bool:
    """Whether owners alone precondition the blocks of a group."""
    return group.owned and not everywhere(inverse, group)


def shares(inverse: Inverse, group: Group, *, several: bool) -> bool:
    """Whether all devices have the inverses of a Kronecker group, or on `several` devices a part of them."""
    moments = group.correctable and inverse.takes_moments
    return everywhere(inverse, group) or (several and moments)


def shared(inverse: Inverse, kept: Any) -> Any:
    """Of what owners keep of a stack, what all devices have: all, or what statistics are to be expressed in."""
    return inverse.basis(kept) if inverse.takes_moments else kept


def encode(inverse: Inverse, kept: Any) -> jax.Array:
    """What is `shared` of what owners keep, as it is sent: `[k, elements]`."""
    return flatten(inverse.basis(kept)) if inverse.takes_moments else inverse.encode(kept)


def decode(inverse: Inverse, flat: jax.Array, like: Any) -> Any:
    """What is `shared`, from how it was sent."""
    return unflatten(flat, like) if inverse.takes_moments else inverse.decode(flat, like)
