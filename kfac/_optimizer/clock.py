"""Tell `train_step` on the host whether statistics are due."""

from __future__ import annotations

import operator

import jax
from jax import Array

from kfac._mesh import PyTree
from kfac._optimizer.diagnostics import statistics_due
from kfac._optimizer.interval import Interval
from kfac._optimizer.state import KfacState


class Clock:
    """Tell on the host whether statistics are due, without waiting for the step that computes the state.

    Each call of `update` moves the interval by one, also a call whose step is rejected. So the state that a call
    returns has a known number of calls, and its arrays are read only if it is another state.
    """

    def __init__(self) -> None:
        self._arrays: tuple[Array, ...] = ()
        self._next = False, 0

    def read(self, opt_state: PyTree) -> tuple[bool | Array, int | None]:
        """Tell whether statistics are due. Wait for the state unless it is the one of the last `record`.

        Returns:
          Whether statistics are due, a bool or the tracer of a traced state, and the number of calls of `update` that
          led to the state, None if the host cannot count them.
        """
        arrays = _counters(opt_state)
        # Arrays never change, so the same arrays hold the same values. A restored or edited state has other arrays.
        if arrays and self._arrays and all(map(operator.is_, arrays, self._arrays)):
            return self._next
        due = statistics_due(opt_state)
        if isinstance(due, jax.core.Tracer):
            return due, None
        calls = None
        if arrays:
            count, skipped, _ = arrays
            calls = int(count) + int(skipped)
        return bool(due), calls

    def record(
        self,
        opt_state: PyTree,
        calls: int,
        interval: Interval | None,
    ) -> None:
        """Note the state after `calls` calls, if the interval is known on the host."""
        self._arrays = ()
        if interval is not None:
            # The three scalars stay alive, but no other array of the state.
            self._arrays = _counters(opt_state)
            self._next = interval.due_on_host(calls), calls


def interval_of(opt_state: PyTree) -> Interval | None:
    """Return the interval between statistics, or None if the host cannot foresee it."""
    states = _chained(opt_state)
    return states[0].settings.interval if len(states) == 1 else None


def _counters(opt_state: PyTree) -> tuple[Array, ...]:
    """Return the scalars that determine whether statistics are due, or nothing if the host cannot foresee them.

    The host foresees them for the optimizer itself and for chains. Wrappers like `optax.MultiSteps` decide on the
    device whether they call `update`.
    """
    states = _chained(opt_state)
    if len(states) != 1:
        return ()
    [state] = states
    arrays = state.count, state.metrics.skipped_steps, state.due
    for array in arrays:
        concrete = isinstance(array, Array) and not isinstance(array, jax.core.Tracer)
        # The state of `jax.pmap` has an axis of devices.
        if not concrete or array.ndim:
            return ()
    return arrays


def _chained(opt_state: PyTree) -> list[KfacState]:
    """Return the K-FAC states in plain tuples, which are the states of chains."""
    if isinstance(opt_state, KfacState):
        return [opt_state]
    if type(opt_state) is not tuple:
        return []
    return [state for part in opt_state for state in _chained(part)]
