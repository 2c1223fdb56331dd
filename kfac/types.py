"""The types of what the functions of `kfac` return, to read and to annotate with.

- `Layer`: one of `Layers`.
- `Kronecker`, `Unitwise`: the statistics of a layer in `Factors`. `Packed`: the first on several devices.
- `TrainStep`: what `train_step` returns.
"""

from kfac._factors import Kronecker, Packed, Unitwise
from kfac._layers import Layer
from kfac._optimizer.train_step import TrainStep

__all__ = ["Kronecker", "Layer", "Packed", "TrainStep", "Unitwise"]
