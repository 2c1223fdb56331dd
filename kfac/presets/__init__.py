"""Whole optimizers beside `kfac.kfac`.

- `large_batch`: all options, and the settings of a published recipe.
- `deterministic`: for whole batches, without a rate to choose.
- `adaptive_damping`: around an optimizer whose damping is to follow the loss.
"""

from kfac.presets._adaptive_damping import adaptive_damping
from kfac.presets._deterministic import deterministic
from kfac.presets._large_batch import large_batch

__all__ = ["adaptive_damping", "deterministic", "large_batch"]
