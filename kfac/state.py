"""Move the optimizer's state between numbers of devices, meshes and checkpoints.

- `gather_state`: converts a state to one device. `scatter_state`: converts it back to any number of devices.
- `state_specs`: the state's `PartitionSpec`s for `jax.shard_map`. `shardings`: its shardings on a mesh.
- `KfacState`: the state's type, a tree of arrays.
"""

from kfac._optimizer.reshard import gather_state, scatter_state, shardings, state_specs
from kfac._optimizer.state import KfacState

__all__ = ["KfacState", "gather_state", "scatter_state", "shardings", "state_specs"]
