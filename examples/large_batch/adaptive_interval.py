"""Choose when to collect statistics from their change at the last collection."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

import kfac


def change_of(factors: kfac.Factors, averages: kfac.Factors) -> jax.Array:
    """Return the relative change from the running averages to new statistics.

    Each Kronecker factor contributes the Frobenius norm of the difference, divided by the average's norm. A factor that
    has no average yet contributes 1. The result is the mean over all Kronecker factors.

    Args:
      factors: the new statistics.
      averages: the previous running averages, from `kfac.curvature.factors_from_state`.
    """
    changes = []
    for name, average in averages.items():
        for side in ("A", "G") if isinstance(average, kfac.types.Kronecker) else ():
            old, new = (getattr(block, side) for block in (average, factors[name]))
            size = jnp.linalg.norm(old)
            changes.append(jnp.where(size > 0, jnp.linalg.norm(new - old) / jnp.where(size > 0, size, 1), 1))
    return jnp.mean(jnp.stack(changes))


@dataclasses.dataclass
class AdaptiveInterval:
    """Lengthen the interval between statistics while they stay similar, and shorten it when they change.

    A training loop calls `due` before each step. After it collects statistics, it passes the change to `record`::

        interval = AdaptiveInterval()
        for step in range(steps):
            if interval.due(step):
                opt_state, change = observe(opt_state, params, batch)  # by `change_of`
                interval.record(step, change)
            params, opt_state = train_step(params, opt_state, batch)

    The rule comes from SP-NGD (Osawa et al. 2020, arXiv:2002.06015). New statistics are similar to the previous
    statistics if the norm of the difference, relative to the previous norm, is below `threshold`:

    - If the new statistics are not similar, the next interval is half the last interval.
    - If they are similar, the next interval equals the last interval.
    - If the previous statistics were similar to their predecessors too, the next interval is the sum of the last two
      intervals.

    Unlike SP-NGD, this class uses a single interval for all layers. With a running average (`factor_ema_decay` above
    0), the change is relative to the running average, so no older statistics are stored.

    The object runs in Python, outside the compiled programs. All its fields are numbers. Save
    `dataclasses.asdict(interval)` with a checkpoint, and continue with `AdaptiveInterval(**saved)`. Processes that
    train together see the same change, so they make the same decision.

    Args:
      threshold: largest relative change that counts as similar, above 0. Intervals only grow if a single batch's noise
        stays below the threshold.
      longest: longest interval in steps, at least 1.
      next_step: first step at which statistics are due again.
      last: the last interval, in steps.
      before: the interval before `last`, in steps.
      similar: whether the last statistics were similar to their predecessors.

    Raises:
      ValueError: `threshold` or `longest` is out of range.
    """

    threshold: float = 0.1
    longest: int = 100
    next_step: int = 0
    last: int = 1
    before: int = 1
    similar: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.threshold) and self.threshold > 0):
            raise ValueError(f"threshold must be a number above 0, but is {self.threshold!r}")
        if self.longest < 1:
            raise ValueError(f"longest must be at least 1, but is {self.longest!r}")

    def due(self, step: int) -> bool:
        """Return True if step number `step`, counted from 0, must collect statistics."""
        return step >= self.next_step

    def record(self, step: int, change: float) -> None:
        """Record the change in the statistics collected at step `step`, and set the next interval.

        A non-finite change counts as not similar. It occurs if the statistics were left out.
        """
        similar = float(change) < self.threshold
        longer = self.last + self.before if self.similar else self.last
        interval = min(longer if similar else max(1, self.last // 2), self.longest)
        self.before, self.last, self.similar = self.last, interval, similar
        self.next_step = step + interval
