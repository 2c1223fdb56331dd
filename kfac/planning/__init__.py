"""Predict a run's cost on many devices from shapes, before you rent the devices.

- `plan`: returns a `Plan`: FLOPs, message bytes, seconds, memory, and the interval that `kfac.kfac(overhead=)` takes.
- `Hardware`: a device's assumed speed and memory. `HARDWARE` has two examples.
"""

from kfac._checks import former_names as _former_names
from kfac.planning._plan import HARDWARE, Hardware, Plan, plan

__all__ = ["HARDWARE", "Hardware", "Plan", "plan"]

__getattr__ = _former_names(
    "kfac.planning", {"Assignment": "kfac.planning.plan, without a table of owners"}
)
