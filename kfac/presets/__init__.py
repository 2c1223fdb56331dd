"""Optimizers for special cases, in addition to `kfac.kfac`.

- `osawa2019`: all options, with the settings of a published recipe as defaults.
- `full_batch`: full-batch training without a learning rate to choose.
"""

from kfac._checks import former_names as _former_names
from kfac.presets._full_batch import full_batch
from kfac.presets._osawa2019 import osawa2019

__all__ = ["full_batch", "osawa2019"]

__getattr__ = _former_names(
    "kfac.presets",
    {
        "adaptive_damping": "kfac.adaptive_damping",
        "deterministic": "full_batch",
        "large_batch": "osawa2019",
    },
)
