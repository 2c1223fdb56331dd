"""When statistics are due, by how much they changed when they were last collected."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

import kfac


def change_of(factors: kfac.Factors, averages: kfac.Factors) -> jax.Array:
    """Return by how much statistics differ from the averages that `kfac.curvature.factors_from_state` has before them.

    The Frobenius norm of the difference, relative to the average, as a mean over all Kronecker factors; 1 for those
    without an average so far.
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
    """Lengthen the interval between statistics while they stay alike, and shorten it when they do not.

    A training loop asks it before a step, and tells it the change after taking statistics::

        interval = AdaptiveInterval()
        for step in range(steps):
            if interval.due(step):
                opt_state, change = observe(opt_state, params, batch)  # by `change_of`
                interval.record(step, change)
            params, opt_state = train_step(params, opt_state, batch)

    The rule is that of SP-NGD (Osawa et al. 2020, arXiv:2002.06015): if new statistics are not similar to the ones
    before, the next interval is half the last one; if they are, it is as long as the last one; if those before
    were similar to theirs too, it is the sum of the last two. Two are similar if the norm of their difference, relative
    to the older one's, is below `threshold`. Here one number stands for all layers, and with a running average
    (`factor_ema_decay` above 0) new statistics are compared with that, so no older ones are kept.

    It lives in Python, outside of the compiled programs. All fields are
    numbers; `dataclasses.asdict` saves them with a checkpoint, and `AdaptiveInterval(**saved)` goes on. Processes that
    train together see the same change, so they decide alike.

    Args:
      threshold: largest relative change that counts as similar, above 0. A single batch's noise must lie below it for
        intervals to grow.
      longest: bound on the interval in steps, at least 1.
      next_step: the step from which on statistics are due.
      last: the last interval, in steps.
      before: the interval before it.
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
        """Whether step number `step`, from 0, is to collect statistics."""
        return step >= self.next_step

    def record(self, step: int, change: float) -> None:
        """Takes in the change of the statistics that step number `step` collected, and sets the next interval.

        A change that is not finite, as from statistics that were left out, counts as not similar.
        """
        similar = float(change) < self.threshold
        longer = self.last + self.before if self.similar else self.last
        interval = min(longer if similar else max(1, self.last // 2), self.longest)
        self.before, self.last, self.similar = self.last, interval, similar
        self.next_step = step + interval
