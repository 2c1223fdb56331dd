"""Predict a run's cost on many devices from shapes, before you rent the devices.

- `estimate`: returns an `Estimate`: FLOPs, message bytes, seconds, memory, and the interval that `kfac.kfac(overhead=)`
  takes.
- `Hardware`: a device's assumed speed and memory. `HARDWARE` has two examples.
"""

from kfac._checks import former_names as _former_names
from kfac.planning._estimate import HARDWARE, Estimate, Hardware, estimate

__all__ = ["HARDWARE", "Estimate", "Hardware", "estimate"]

__getattr__ = _former_names(
    "kfac.planning",
    {"Plan": "kfac.planning.Estimate", "plan": "kfac.planning.estimate"},
)
