"""The fixed settings of a step, and the blocks that one device holds."""

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

Vectors = dict[str, jax.Array]  # for each group `[k]`, a number for each block


def join(vectors: Iterable[jax.Array]) -> jax.Array:
    """Join a zero and the numbers of all groups: reduced together, they take one kernel instead of many."""
    # Without a barrier XLA reduces the parts one by one.
    return lax.optimization_barrier(jnp.concatenate([jnp.zeros(1, bool), *vectors]))


@dataclasses.dataclass(frozen=True)
class Config:
    """The fixed settings of a step.

    Attributes:
      layers: the layers.
      groups: their groups.
      inverse: the inverse of Kronecker blocks.
      way: how blocks lie on devices here.
      moves: the settings of everything after the preconditioner.
      local: whether gradients are still to be averaged.
    """

    layers: Layers
    groups: tuple[Group, ...]
    inverse: Inverse
    way: Way
    moves: Moves = dataclasses.field(default_factory=Moves)
    local: bool = False

    @functools.cached_property
    def owned_paths(self) -> frozenset[str]:
        """The leaves that their owners alone precondition."""
        return frozenset(path for group in self.owned for layer in group.layers for path in layer.params)

    @functools.cached_property
    def owned(self) -> tuple[Group, ...]:
        """The groups whose blocks have owners."""
        return tuple(group for group in self.groups if group.owned)


@dataclasses.dataclass(frozen=True)
class Place:
    """The blocks that one device holds.

    Attributes:
      config: the fixed settings.
      shards: how Kronecker groups are dealt to devices.
    """

    config: Config
    shards: dict[str, Shard]

    @functools.cached_property
    def owns(self) -> Vectors:
        """For each group `[positions]`: whether the block there is this device's own. All own blocks without owners."""
        of_owned = {name: self.config.way.owns(shard) for name, shard in self.shards.items()}
        return {g.name: of_owned.get(g.name, jnp.ones(g.size, bool)) for g in self.config.groups}

    def only_owned(self, name: str, stack: jax.Array) -> jax.Array:
        """Set a stack to zero where the block is not this device's own."""
        return jnp.where(per_block(self.owns[name], stack), stack, 0)
