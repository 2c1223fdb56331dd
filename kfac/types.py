"""Types that the functions of `kfac` return, for annotations.

- `Layer`: an item of `Layers`.
- `Basis`: the eigenvectors of a layer's factors, for the argument `basis`.
- `Kronecker`, `Unitwise`: a layer's statistics in `Factors`. `Packed`: `Kronecker` statistics on several devices.
- `TrainStep`: the result of `train_step`.
"""

from kfac._factors import Basis, Kronecker, Packed, Unitwise
from kfac._layers import Layer
from kfac._optimizer.train_step import TrainStep

__all__ = ["Basis", "Kronecker", "Layer", "Packed", "TrainStep", "Unitwise"]
