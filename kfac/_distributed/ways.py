"""Communication between a step's devices, for each way to lay out a state's blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree

from kfac._distributed.collectives import (
    Shards,
    Stacks,
    gather_from_owners,
    means_to_owners,
)
from kfac._distributed.owners import Shard
from kfac._distributed.segments import BUCKETS
from kfac._factors import Statistics
from kfac._packing import flatten, unflatten
from kfac._varying import as_varying, axis_size, varying_axes


@dataclasses.dataclass(frozen=True)
class Way:
    """A step's device axes, and the collectives over them.

    There are three cases:

    - Without `axes`, there is a single device.
    - With `axes` but without `owners`, every device has all blocks. Statistics are averaged over the axes.
    - With `owners`, each block has an owner along these axes. The other axes repeat the owners.

    Attributes:
      axes: the device axes.
      owners: the axes, among `axes`, over which blocks are dealt.
    """

    axes: tuple[str, ...] = ()
    owners: tuple[str, ...] = ()

    @property
    def alone(self) -> bool:
        """Whether there is a single device, so that no message is needed."""
        return not self.axes

    @property
    def devices(self) -> int:
        """Number of devices to which blocks are dealt.

        Raises:
          ValueError: the axes are not bound.
        """
        if self.axes and axis_size(self.axes) is None:
            where = "call update and observe inside jax.pmap or jax.shard_map over that axis"
            raise ValueError(f"axis_name={_name(self.axes)!r} is not bound: {where}")
        return lax.axis_size(self.owners)

    def owns(self, shard: Shard) -> jax.Array:
        """Return for each position whether this device owns a block there, `[positions]`."""
        return (
            jnp.ones(shard.positions, bool)
            if shard.held.all()
            else self._row(shard.held)
        )

    def take(self, stacks: Mapping[str, Any], shards: Shards) -> dict[str, Any]:
        """Take this device's blocks `[positions, ...]` from stacks `[blocks, ...]` that all devices have.

        A device without a block at the last position gets a copy of block 0 as a placeholder. A group without a shard
        keeps all blocks.
        """

        def taken(name, stack):
            index = self._row(shards[name].order.reshape(shards[name].devices, -1))
            return jax.tree.map(
                lambda x: x.at[index].get(mode="promise_in_bounds"), stack
            )

        return {
            name: taken(name, x) if self.owners and name in shards else x
            for name, x in stacks.items()
        }

    def _row(self, table: np.ndarray) -> jax.Array:
        """Return this device's row of a table `[devices, ...]`."""
        return jnp.asarray(table)[lax.axis_index(self.owners)]

    def gather(self, own: Stacks, shards: Shards) -> dict[str, jax.Array]:
        """Undo `take`: gather all blocks on all devices."""
        return (
            gather_from_owners(own, shards, self.owners) if self.owners else dict(own)
        )

    def means(
        self, stacks: Stacks, shards: Shards, parts: int = 1
    ) -> dict[str, jax.Array]:
        """Average stacks `[blocks, ...]` over devices, and return this device's blocks, as in `take`.

        The mean is sent in `parts` messages. With several messages, the first can overlap with the backward pass.
        """
        if not self.owners:
            return self.mean(dict(stacks))
        return means_to_owners(
            stacks,
            shards,
            self.owners,
            parts,
            tuple(x for x in self.axes if x not in self.owners),
        )

    def statistics(
        self, stacks: Mapping[str, Statistics], shards: Shards
    ) -> dict[str, Statistics]:
        """Apply `means` to statistics."""
        received = self.means(
            {name: flatten(stack) for name, stack in stacks.items()}, shards, BUCKETS
        )
        wide = {
            n: jax.tree.map(lambda x, d=received[n].dtype: x.astype(d), stack)
            for n, stack in stacks.items()
        }
        return {name: unflatten(received[name], like) for name, like in wide.items()}

    def mean(self, tree: Any) -> Any:
        """Average arrays over devices in a single message."""
        if self.alone or not jax.tree.leaves(tree):
            return tree
        flat, unravel = ravel_pytree(tree)
        return unravel(
            lax.pmean(
                as_varying(flat, varying_axes(lax.axis_index(self.axes))), self.axes
            )
        )

    def total(self, x: jax.Array) -> jax.Array:
        """Sum an array over the owners' axes. Each device has computed its array from its own blocks."""
        return self._over_owners(lax.psum, x)

    def largest(self, x: jax.Array) -> jax.Array:
        """Return the maximum over the owners' axes."""
        return self._over_owners(lax.pmax, x)

    def agree(self, flag: jax.Array) -> jax.Array:
        """Return whether a flag is set on all devices along the owners' axes."""
        return self._over_owners(lax.pmin, flag.astype(jnp.int32)) > 0

    def _over_owners(self, reduce: Callable[..., jax.Array], x: jax.Array) -> jax.Array:
        return (
            reduce(
                as_varying(x, varying_axes(lax.axis_index(self.owners))), self.owners
            )
            if self.owners
            else x
        )

    def check(self, what: str, tree: Any) -> None:
        """Raise if arrays vary over bound axes that are not among `axes`, as far as `shard_map` tracks this."""
        axes = self.axes
        if axes and (unnamed := sorted(varying_axes(tree).difference(axes))):
            where = f"{what} differ between the devices of {unnamed}, which axis_name={_name(axes)!r} does not name"
            names = f"pass axis_name={(*axes, *unnamed)!r}, or no Distribution"
            raise ValueError(
                f"{where}. If these have the same parameters, {names}. If not, {SPLIT_BY_HAND}"
            )


def check_alike(params: Any) -> None:
    """Raise if parameters vary between devices, as far as `shard_map` tracks this."""
    if differing := sorted(varying_axes(params)):
        raise ValueError(
            f"params differ between the devices of {differing}: {SPLIT_BY_HAND}"
        )


SPLIT_BY_HAND = (
    "each has its own part of the parameters, as in tensor, pipeline or expert parallelism, and averages would mix "
    "unrelated parts: instead of jax.shard_map use jax.jit with parameters that are sharded over a mesh"
)


def _name(axes: tuple[str, ...]) -> str | tuple[str, ...]:
    return axes[0] if len(axes) == 1 else axes
