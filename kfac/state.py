"""The optimizer's state: on other numbers of devices, on a mesh, in checkpoints.

- `gather_state`, `scatter_state`: to one device and from one to any number.
- `state_specs`: how a state lies on the axis of a `jax.shard_map`. `shardings`: how it lies on a mesh.
- `KfacState`: its type, a tree of arrays.
"""

from kfac._optimizer.reshard import gather_state, scatter_state, shardings, state_specs
from kfac._optimizer.state import KfacState

__all__ = ["KfacState", "gather_state", "scatter_state", "shardings", "state_specs"]


def __getattr__(name: str) -> object:
    if name == "refresh":
        raise AttributeError("kfac.state.refresh(opt_state) is now kfac.observe(opt_state), without factors")
    raise AttributeError(f"module 'kfac.state' has no attribute {name!r}")
