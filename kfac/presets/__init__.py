"""Complete optimizers for special cases, in addition to `kfac.kfac`.

- `large_batch`: all options, with the settings of a published recipe as defaults.
- `deterministic`: full-batch training without a learning rate to choose.
- `adaptive_damping`: wraps an optimizer and adapts its damping to the loss.
"""

from kfac.presets._adaptive_damping import adaptive_damping
from kfac.presets._deterministic import deterministic
from kfac.presets._large_batch import large_batch

__all__ = ["adaptive_damping", "deterministic", "large_batch"]
