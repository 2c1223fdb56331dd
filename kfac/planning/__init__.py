"""What a run on many devices would take, counted from shapes before any is rented.

- `plan`: FLOPs, messages, seconds and memory, and intervals that keep to an overhead; a `Plan` for a `Hardware`.
- `Assignment`: which device owns which block.
"""

from kfac.planning._assignment import Assignment
from kfac.planning._plan import Hardware, Plan, plan

__all__ = ["Assignment", "Hardware", "Plan", "plan"]
