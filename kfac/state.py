"""The optimizer's state: on other numbers of devices, on a mesh, in checkpoints.

- `gather_state`, `scatter_state`: to one device and from one to any number.
- `state_specs`: how a state lies on a mesh.
- `refresh`: new inverses at a time of your own.
- `KfacState`: its type, a tree of arrays.
"""

from kfac._optimizer.reshard import gather_state, scatter_state, state_specs
from kfac._optimizer.scale_by_kfac import refresh
from kfac._optimizer.state import KfacState

__all__ = ["KfacState", "gather_state", "refresh", "scatter_state", "state_specs"]
