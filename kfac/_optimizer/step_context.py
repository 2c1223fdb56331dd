"""Define the blocks that a device holds during a step or an `observe`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from kfac._distributed.owners import Shard
from kfac._distributed.ways import Way
from kfac._factors import per_block
from kfac._optimizer.place import Config, Vectors
from kfac._optimizer.state import KfacState, shards_of

Tree = TypeVar("Tree")


@dataclasses.dataclass(frozen=True)
class StepContext:
    """The settings, and the blocks that a device holds.

    Attributes:
      config: the fixed settings.
      state: the state before the step or the `observe`.
    """

    config: Config
    state: KfacState

    @property
    def way(self) -> Way:
        return self.config.way

    @functools.cached_property
    def shards(self) -> dict[str, Shard]:
        """The assignment of each Kronecker group's blocks to devices."""
        return shards_of(self.state)

    @functools.cached_property
    def owns(self) -> Vectors:
        """For each group `[positions]`: whether this device owns the block there; True for groups without owners."""
        owns = {name: self.way.owns(shard) for name, shard in self.shards.items()}
        for group in self.config.shared:
            owns[group.name] = jnp.ones(group.size, bool)
        return owns

    def only_owned(self, name: str, stack: jax.Array) -> jax.Array:
        """Set the blocks of a stack that this device does not own to zero."""
        return jnp.where(per_block(self.owns[name], stack), stack, 0)

    def take(self, name: str, stack: Tree) -> Tree:
        """Take this device's blocks from a group's stack `[blocks, ...]` that all devices have."""
        return self.way.take({name: stack}, self.shards)[name]

    def products(self, a: Vectors, b: Vectors) -> tuple[jax.Array, jax.Array]:
        """Return the inner product of `a` and `b` over this device's own blocks, and over the blocks that all hold."""
        owned = shared = jnp.zeros((), jnp.float32)
        for name, x in a.items():
            product = x * b[name]
            if name in self.shards:
                owned += jnp.sum(self.only_owned(name, product))
            else:
                shared += jnp.sum(product)
        return owned, shared

    def total_product(self, a: Vectors, b: Vectors) -> jax.Array:
        """Return the inner product of `a` and `b` over all devices' blocks."""
        owned, shared = self.products(a, b)
        return shared + self.way.total(owned)


def join(vectors: Iterable[jax.Array]) -> jax.Array:
    """Concatenate a zero and all groups' numbers, so that a single kernel can reduce them."""
    # Without the barrier, XLA reduces the parts separately.
    return lax.optimization_barrier(jnp.concatenate([jnp.zeros(1, bool), *vectors]))
