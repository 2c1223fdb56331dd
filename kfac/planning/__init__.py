"""Predict a run's cost on many devices from shapes, before you rent the devices.

- `plan`: returns a `Plan` for a `Hardware`: FLOPs, messages, seconds, memory, and intervals that meet an overhead.
- `Assignment`: the devices that own the blocks.
"""

from kfac.planning._assignment import Assignment
from kfac.planning._plan import Hardware, Plan, plan

__all__ = ["Assignment", "Hardware", "Plan", "plan"]
