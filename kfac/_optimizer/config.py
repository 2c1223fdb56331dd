"""Define the fixed settings of a step."""

from __future__ import annotations

import dataclasses
import functools

from jax import Array

from kfac._curvature.blocks import Group
from kfac._curvature.preconditioner import BlockPreconditioner
from kfac._distributed.comm import CommContext
from kfac._layers import Layers
from kfac._optimizer.step_scaling import ScalingConfig

# By group name: `[k]`, a number for each block, or matrices `[k, d_in, d_out]`.
Vectors = dict[str, Array]


@dataclasses.dataclass(frozen=True)
class Config:
    """The fixed settings of a step.

    Attributes:
      layers: the layers.
      groups: the layers' groups of equal block shape.
      preconditioner: the inverse for Kronecker blocks.
      comm: how blocks are distributed over devices, and the communication between the devices.
      scaling: the settings of the stages after the preconditioner.
    """

    layers: Layers
    groups: tuple[Group, ...]
    preconditioner: BlockPreconditioner
    comm: CommContext
    scaling: ScalingConfig = dataclasses.field(default_factory=ScalingConfig)

    @functools.cached_property
    def owned(self) -> tuple[Group, ...]:
        """The groups whose blocks have owners."""
        return tuple(group for group in self.groups if group.owned)

    @property
    def shared(self) -> tuple[Group, ...]:
        """The groups whose blocks all devices hold."""
        return tuple(group for group in self.groups if not group.owned)

    @functools.cached_property
    def owned_paths(self) -> frozenset[str]:
        """The paths of the leaves whose blocks have owners."""
        layers = [layer for group in self.owned for layer in group.layers]
        return frozenset(path for layer in layers for path in layer.params)

    def has_momentum(self, group: Group) -> bool:
        """Return whether the optimizer keeps a group's momentum, instead of the group's inverse."""
        keeps_its_own = group.preconditioner_of(self.preconditioner).owns_momentum
        return self.scaling.momentum is not None and not keeps_its_own
