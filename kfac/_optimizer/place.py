"""Define the fixed settings of a step and the blocks that each device holds."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jax import lax

from kfac._curvature.blocks import Group
from kfac._curvature.inverse import Inverse
from kfac._distributed.owners import Shard
from kfac._distributed.ways import Way
from kfac._factors import per_block
from kfac._layers import Layers
from kfac._optimizer.moves import Moves

Vectors = dict[
    str, jax.Array
]  # by group name: `[k]`, a number for each block, or matrices `[k, d_in, d_out]`


def join(vectors: Iterable[jax.Array]) -> jax.Array:
    """Concatenate a zero and all groups' numbers, so that a single kernel can reduce them."""
    # Without the barrier, XLA reduces the parts separately.
    return lax.optimization_barrier(jnp.concatenate([jnp.zeros(1, bool), *vectors]))


@dataclasses.dataclass(frozen=True)
class Config:
    """The fixed settings of a step.

    Attributes:
      layers: the layers.
      groups: the layers' groups of equal block shape.
      inverse: the inverse for Kronecker blocks.
      way: how blocks are distributed over devices, and the communication between the devices.
      moves: the settings of the stages after the preconditioner.
      local: whether gradients still have to be averaged over devices.
    """

    layers: Layers
    groups: tuple[Group, ...]
    inverse: Inverse
    way: Way
    moves: Moves = dataclasses.field(default_factory=Moves)
    local: bool = False

    @functools.cached_property
    def owned_paths(self) -> frozenset[str]:
        """The paths of the leaves whose blocks have owners."""
        return frozenset(
            path
            for group in self.owned
            for layer in group.layers
            for path in layer.params
        )

    @functools.cached_property
    def owned(self) -> tuple[Group, ...]:
        """The groups whose blocks have owners."""
        return tuple(group for group in self.groups if group.owned)


@dataclasses.dataclass(frozen=True)
class Place:
    """The blocks that a device holds.

    Attributes:
      config: the fixed settings.
      shards: the assignment of each Kronecker group's blocks to devices.
    """

    config: Config
    shards: dict[str, Shard]

    @functools.cached_property
    def owns(self) -> Vectors:
        """For each group `[positions]`: whether this device owns the block there; True for groups without owners."""
        of_owned = {
            name: self.config.way.owns(shard) for name, shard in self.shards.items()
        }
        return {
            g.name: of_owned.get(g.name, jnp.ones(g.size, bool))
            for g in self.config.groups
        }

    def only_owned(self, name: str, stack: jax.Array) -> jax.Array:
        """Set the blocks of a stack that this device does not own to zero."""
        return jnp.where(per_block(self.owns[name], stack), stack, 0)
