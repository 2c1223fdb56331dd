"""How the blocks of a state lie on the devices that a step runs on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree

from kfac._distributed.collectives import Shards, Stacks, gather_from_owners, means_to_owners
from kfac._distributed.owners import Shard
from kfac._distributed.segments import BUCKETS
from kfac._factors import Statistics
from kfac._packing import flatten, unflatten
from kfac._varying import as_varying, axis_size, varying_axes


@dataclasses.dataclass(frozen=True)
class Way:
    """Where the blocks of a state are, and how devices tell each other of them.

    Without `axes` on the one device there is. With them statistics are averaged over its devices, all of which have all
    blocks; or, with `owners`, each block has one among the devices of these, repeated along the other axes.

    Attributes:
      axes: of the devices.
      owners: those of them that blocks are spread over.
    """

    axes: tuple[str, ...] = ()
    owners: tuple[str, ...] = ()

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
            where = "call update and observe inside jax.pmap or jax.shard_map over that axis"
            raise ValueError(f"axis_name={_name(self.axes)!r} is not bound: {where}")
        return lax.axis_size(self.owners)

    def owns(self, shard: Shard) -> jax.Array:
        """`[positions]`, whether this device has a block of its own at each."""
        return jnp.ones(shard.positions, bool) if shard.held.all() else self._row(shard.held)

    def take(self, stacks: Mapping[str, Any], shards: Shards) -> dict[str, Any]:
        """From stacks `[blocks, ...]`, which all devices have, this one's `[positions, ...]`.

        A device without a block at the last position gets one of the others' there. All get all blocks of a group that
        is not among `shards`.
        """

        def taken(name, stack):
            index = self._row(shards[name].order.reshape(shards[name].devices, -1))
            return jax.tree.map(lambda x: x.at[index].get(mode="promise_in_bounds"), stack)

        return {name: taken(name, x) if self.owners and name in shards else x for name, x in stacks.items()}

    def _row(self, table: np.ndarray) -> jax.Array:
        """This device's of a table `[devices, ...]`."""
        return jnp.asarray(table)[lax.axis_index(self.owners)]

    def gather(self, own: Stacks, shards: Shards) -> dict[str, jax.Array]:
        """The inverse of `take`."""
        return gather_from_owners(own, shards, self.owners) if self.owners else dict(own)

    def means(self, stacks: Stacks, shards: Shards, parts: int = 1) -> dict[str, jax.Array]:
        """Means over devices of stacks `[blocks, ...]`, of which each has its own, as `take` gives them.

        In several `parts` the first can be sent while the backward pass goes on.
        """
        if not self.owners:
            return self.mean(dict(stacks))
        return means_to_owners(stacks, shards, self.owners, parts, tuple(x for x in self.axes if x not in self.owners))

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
        return self._over_owners(lax.psum, x)

    def largest(self, x: jax.Array) -> jax.Array:
        """The maximum over devices."""
        return self._over_owners(lax.pmax, x)

    def agree(self, flag: jax.Array) -> jax.Array:
        """Whether a flag is set on all devices."""
        return self._over_owners(lax.pmin, flag.astype(jnp.int32)) > 0

    def _over_owners(self, reduce: Callable[..., jax.Array], x: jax.Array) -> jax.Array:
        return reduce(as_varying(x, varying_axes(lax.axis_index(self.owners))), self.owners) if self.owners else x

    def check(self, what: str, tree: Any) -> None:
        """Raise if arrays differ along axes that are not named, as far as `shard_map` knows."""
        axes = self.axes
        if axes and (unnamed := sorted(varying_axes(tree).difference(axes))):
            where = f"{what} differ between the devices of {unnamed}, which axis_name={_name(axes)!r} does not name"
            names = f"pass axis_name={(*axes, *unnamed)!r}, or no Distribution"
            raise ValueError(f"{where}. If these have the same parameters, {names}. If not, {SPLIT_BY_HAND}")


def check_alike(params: Any) -> None:
    """Raises where parameters differ between devices."""
    if differing := sorted(varying_axes(params)):
        raise ValueError(f"params differ between the devices of {differing}: {SPLIT_BY_HAND}")


SPLIT_BY_HAND = (
    "each has its own part of the parameters, as in tensor, pipeline or expert parallelism, and averages would mix "
    "unrelated parts: instead of jax.shard_map use jax.jit with parameters that are sharded over a mesh"
)


def _name(axes: tuple[str, ...]) -> str | tuple[str, ...]:
    return axes[0] if len(axes) == 1 else axes
