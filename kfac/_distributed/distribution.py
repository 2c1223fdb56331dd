"""Where blocks, statistics and gradients lie on devices, as a value."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from kfac._checks import check_axis_name, check_choice, check_mesh
from kfac._curvature.blocks import Group
from kfac._curvature.inverse import Inverse
from kfac._curvature.symmetric import flatten, unflatten
from kfac._varying import AxisName, axis_names


@dataclasses.dataclass(frozen=True)
class Distribution:
    """How K-FAC uses several devices, and when: what `distribution=` takes.

    Every Kronecker block has an owner. Statistics arrive local and are averaged to the owners, which keep the running
    averages, invert, and precondition their blocks; the preconditioned gradients are gathered. Of symmetric matrices
    the upper triangles are sent. Gradients are expected to be averaged over devices already (`lax.pmean`), but with
    `gradients="local"`.

    Args:
      axis_name: the named axis of devices, of `jax.pmap`, `jax.shard_map` or `mesh`; a tuple for several. None for one
        device, and with `mesh` for all axes of it.
      mesh: for plain `jit` over sharded arrays. `init` and `update` then open a `shard_map` of their own over it, and
        `factors` are those of the global batch, as `value_and_grad` under such a `jit` returns them.
      precondition: `"sharded"`: owners precondition, gradients are gathered every step. `"replicated"`: inverses are
        gathered when refreshed, and every device preconditions all blocks: fewer messages, more memory. Not with
        `Ekfac`, whose eigenvalues change with all statistics.
      gradients: `"averaged"`: what `update` gets has been averaged over devices. `"local"`: it is a device's own;
        `update` averages it at the owners only, and gathers the results: hardly more is sent than for the average
        alone. With `axis_name` and `precondition="sharded"`, not with `Soap`; only linear transformations may come
        before. `"split"`: parameters are split over the devices of `mesh`, as by FSDP or tensor parallelism; each
        gradient goes to its owner alone, and the result back to where it lies. With the others all devices get all
        gradients whole.
      communication_dtype: dtype of statistics on the wire, `"float32"` or `"bfloat16"`. With `mesh` for those of
        `data_parallel`; others are averaged by XLA.
      owners: those of the axes that blocks are spread over; None for all. Devices along the others repeat the owners:
        with `Distribution(("node", "gpu"), owners="gpu")` every node has an owner for each block. Inverses and
        preconditioned gradients then stay inside of it, and only sums go between nodes, each device its share. So the
        fraction of devices that work on a layer, which trades memory for messages, is a choice of axes (KAISA, Pauloski
        et al. 2021). `kfac.state_specs` takes these axes.

    Raises:
      ValueError: an argument is out of range.
    """

    axis_name: AxisName | None = None
    mesh: Mesh | None = None
    precondition: str = "sharded"
    gradients: str = "averaged"
    communication_dtype: str = "float32"
    owners: AxisName | None = None

    def __post_init__(self):
        """Checks the arguments."""
        check_axis_name(self.axis_name)
        check_axis_name(self.owners, "owners")
        check_choice("precondition", self.precondition, ("sharded", "replicated"))
        check_choice("gradients", self.gradients, ("averaged", "local", "split"))
        if self.gradients == "local" and (self.replicated or self.mesh is not None):
            raise ValueError(
                "gradients='local' is for axis_name= inside jax.shard_map or jax.pmap, with precondition='sharded': "
                "with mesh= XLA averages gradients, and with 'replicated' every device needs all of them"
            )
        if self.gradients == "split" and (self.replicated or self.mesh is None):
            raise ValueError(
                "gradients='split' is for mesh=, over which parameters are split, with precondition='sharded': inside "
                "jax.shard_map a device has whole parameters, and with 'replicated' it needs all gradients"
            )
        check_choice("communication_dtype", self.communication_dtype, ("float32", "bfloat16"))
        if self.mesh is not None:
            check_mesh(self.mesh, self.axis_name)
        if not set(axis_names(self.owners)) <= set(axis_names(self.axis)):
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

    @property
    def owner_axis(self) -> AxisName | None:
        """The axis, or those, that blocks are spread over."""
        return self.axis if self.owners is None else self.owners

    @property
    def beside_owners(self) -> tuple[str, ...]:
        """The axes whose devices repeat the owners."""
        return tuple(name for name in axis_names(self.axis) if name not in axis_names(self.owner_axis))

    @property
    def replicated(self) -> bool:
        """Whether every device preconditions all blocks."""
        return self.precondition == "replicated"


def check_kind(distribution: Distribution, inverse: Inverse) -> None:
    """Raises where `inverse` cannot be had on all devices."""
    if distribution.replicated and (inverse.takes_moments or inverse.takes_gradients):
        raise ValueError(
            f"precondition='replicated' is not for inverse={inverse!r}, of which a part changes with all "
            "statistics or gradients and would be sent as often: leave it at 'sharded', or pass inverse=kfac.Cholesky()"
        )


@functools.cache
def everywhere(distribution: Distribution, inverse: Inverse, group: Group) -> bool:
    """Whether all devices precondition the Kronecker blocks of a group, with inverses that they get at refreshes.

    That is so, too, where a factor is diagonal and inverses are less to send than gradients: those of a table of words.
    """
    if distribution.replicated:
        return True
    if inverse.takes_moments or inverse.takes_gradients or all(len(shape) > 1 for shape in group.shapes.values()):
        return False
    sent = jax.eval_shape(lambda: inverse.encode(inverse.init(group.zeros(1, jnp.float32))))
    return sent.size < group.d_out * group.d_in


def owners_precondition(distribution: Distribution, inverse: Inverse, group: Group) -> bool:
    """Whether owners alone precondition the blocks of a group."""
    return group.kronecker and not everywhere(distribution, inverse, group)


def shares(distribution: Distribution, inverse: Inverse, group: Group, *, several: bool) -> bool:
    """Whether all devices have the inverses of a Kronecker group, or on `several` devices a part of them."""
    moments = group.correctable and inverse.takes_moments
    return everywhere(distribution, inverse, group) or (several and moments)


def shared(inverse: Inverse, kept: Any) -> Any:
    """Of what owners keep of a stack, what all devices have: all, or what statistics are to be expressed in."""
    return inverse.basis(kept) if inverse.takes_moments else kept


def encode(inverse: Inverse, kept: Any) -> jax.Array:
    """What is `shared` of what owners keep, as it is sent: `[k, elements]`."""
    return flatten(inverse.basis(kept)) if inverse.takes_moments else inverse.encode(kept)


def decode(inverse: Inverse, flat: jax.Array, like: Any) -> Any:
    """What is `shared`, from how it was sent."""
    return unflatten(flat, like) if inverse.takes_moments else inverse.decode(flat, like)
