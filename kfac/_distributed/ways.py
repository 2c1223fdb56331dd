"""How the blocks of a state lie on the devices that a step runs on: one class for each way, one interface."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree

from kfac._curvature.symmetric import flatten, unflatten
from kfac._distributed.collectives import gather_from_owners, means_to_owners, owns_last, take_own
from kfac._distributed.distribution import Distribution
from kfac._distributed.owners import Shard
from kfac._distributed.segments import BUCKETS
from kfac._factors import Statistics
from kfac._varying import as_varying, axis_names, axis_size, varying_axes

Shards = Mapping[str, Shard]


@dataclasses.dataclass(frozen=True)
class Everywhere:
    """Every device has all blocks and does all: one device, or several with statistics averaged over `axes`.

    Attributes:
      axes: of the devices.
    """

    axes: tuple[str, ...] = ()

    @property
    def alone(self) -> bool:
        """Whether nothing is to be sent."""
        return not self.axes

    @property
    def devices(self) -> int:
        """How many blocks are dealt to.

        Raises:
          ValueError: the axes are not bound.
        """
        if self.axes and axis_size(self.axes) is None:
            name = self.axes[0] if len(self.axes) == 1 else self.axes
            raise ValueError(
                f"axis_name={name!r} is not bound: call update inside jax.pmap or jax.shard_map over that axis"
            )
        return self._dealt_to

    @property
    def _dealt_to(self) -> int:
        return 1

    @property
    def first(self) -> jax.Array:
        """Whether this device counts what all have, in a `total`."""
        return jnp.array(True)

    def owns(self, shard: Shard) -> jax.Array:
        """`[positions]`, whether this device has a block of its own at each."""
        return jnp.ones(shard.positions, bool)

    def take(self, stacks: Mapping[str, Any], shards: Shards) -> dict[str, Any]:
        """From stacks `[blocks, ...]`, which all devices have, this one's `[positions, ...]`."""
        return dict(stacks)

    def gather(self, own: Mapping[str, jax.Array], shards: Shards) -> dict[str, jax.Array]:
        """The inverse of `take`."""
        return dict(own)

    def means(self, stacks: Mapping[str, jax.Array], shards: Shards, parts: int = 1) -> dict[str, jax.Array]:
        """Means over devices of stacks `[blocks, ...]`, of which each has its own, as `take` gives them.

        In several `parts` the first can be sent while the backward pass goes on.
        """
        return self.mean(dict(stacks))

    def statistics(self, stacks: Mapping[str, Statistics], shards: Shards) -> dict[str, Statistics]:
        """As `means`, of statistics."""
        received = self.means({name: flatten(stack) for name, stack in stacks.items()}, shards, BUCKETS)
        wide = {n: jax.tree.map(lambda x, d=received[n].dtype: x.astype(d), stack) for n, stack in stacks.items()}
        return {name: unflatten(received[name], like) for name, like in wide.items()}

    def mean(self, tree: Any) -> Any:
        """The mean over devices of arrays, in one message."""
        if self.alone or not jax.tree.leaves(tree):
            return tree
        flat, unravel = ravel_pytree(tree)
        return unravel(lax.pmean(as_varying(flat, varying_axes(lax.axis_index(self.axes))), self.axes))

    def total(self, x: jax.Array) -> jax.Array:
        """The sum over devices of what each has counted of its own blocks."""
        return x

    def largest(self, x: jax.Array) -> jax.Array:
        """The maximum over devices."""
        return x

    def agree(self, flag: jax.Array) -> jax.Array:
        """Whether a flag is set on all devices."""
        return flag

    def check(self, updates: Any, factors: Any) -> None:
        """Raises where gradients or statistics differ along axes that are not named, as `shard_map` knows."""
        axes = self.axes
        if not axes:
            return
        name = axes[0] if len(axes) == 1 else axes
        for what, tree in {"updates": updates, "factors": factors}.items():
            if unnamed := sorted(varying_axes(tree).difference(axes)):
                raise ValueError(
                    f"{what} differ between the devices of {unnamed}, which axis_name={name!r} does not name. If these "
                    f"devices have the same parameters and other examples, pass axis_name={(*axes, *unnamed)!r}, or no "
                    "Distribution. If each has its own part of the parameters, as in tensor, pipeline or expert "
                    "parallelism, averages would mix unrelated parts: instead of jax.shard_map use jax.jit with "
                    "parameters that are sharded over a mesh"
                )


@dataclasses.dataclass(frozen=True)
class DealtOut(Everywhere):
    """Every block has an owner among the devices of some of the axes; along the others the owners are repeated.

    Attributes:
      owners: the axes that blocks are spread over.
    """

    owners: tuple[str, ...] = ()

    @property
    def _dealt_to(self) -> int:
        return lax.axis_size(self.owners)

    @property
    def first(self) -> jax.Array:
        return lax.axis_index(self.owners) == 0

    def owns(self, shard: Shard) -> jax.Array:
        return owns_last(shard, self.owners)

    def take(self, stacks: Mapping[str, Any], shards: Shards) -> dict[str, Any]:
        return take_own(stacks, shards, self.owners)

    def gather(self, own: Mapping[str, jax.Array], shards: Shards) -> dict[str, jax.Array]:
        return gather_from_owners(own, shards, self.owners)

    def means(self, stacks: Mapping[str, jax.Array], shards: Shards, parts: int = 1) -> dict[str, jax.Array]:
        return means_to_owners(stacks, shards, self.owners, parts, tuple(x for x in self.axes if x not in self.owners))

    def total(self, x: jax.Array) -> jax.Array:
        return lax.psum(as_varying(x, varying_axes(lax.axis_index(self.owners))), self.owners)

    def largest(self, x: jax.Array) -> jax.Array:
        return lax.pmax(x, self.owners)

    def agree(self, flag: jax.Array) -> jax.Array:
        return lax.pmin(flag.astype(jnp.int32), self.owners) > 0


def way_of(distribution: Distribution, dealt: bool) -> Everywhere:
    """The way that a `Distribution`, which names axes or a mesh, stands for; whether blocks are dealt out to owners."""
    axes, owners = axis_names(distribution.axis), axis_names(distribution.owner_axis)
    return DealtOut(axes, owners) if dealt and owners else Everywhere(axes)
