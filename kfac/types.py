"""The types of what the functions of `kfac` return, to read and to annotate with.

- `Layer`: one of `Layers`.
- `Kronecker`, `Unitwise`: the statistics of a layer in `Factors`. `Shares`: `Factors` of each device of a mesh.
- `TrainStep`: what `train_step` returns.
"""

from kfac._factors import Kronecker, Shares, Unitwise
from kfac._layers import Layer
from kfac._optimizer.train_step import TrainStep

__all__ = ["Kronecker", "Layer", "Shares", "TrainStep", "Unitwise"]
