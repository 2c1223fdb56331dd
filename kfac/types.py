"""Types that the functions of `kfac` return, for annotations.

- `Layer`: an item of `Layers`.
- `Kronecker`, `Unitwise`: a layer's statistics in `Factors`. `Packed`: `Kronecker` statistics on several devices.
- `TrainStep`: the result of `train_step`.
"""

from kfac._factors import Kronecker, Packed, Unitwise
from kfac._layers import Layer
from kfac._optimizer.train_step import TrainStep

__all__ = ["Kronecker", "Layer", "Packed", "TrainStep", "Unitwise"]
