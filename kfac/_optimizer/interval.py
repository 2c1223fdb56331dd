"""Compute the interval between statistics and between refreshes."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax


class Interval(NamedTuple):
    """The interval between statistics, or between refreshes, in calls of `update`.

    It is 1 for the first `warmup` calls, 2 until call `2 * warmup`, 4 until call `4 * warmup`, and so on up to `every`.
    With `warmup=0`, it is always `every`. It doubles because factors change fast at first and then more slowly, on a
    time scale that grows with the number of steps so far.
    """

    every: int | Array
    warmup: int | Array

    def due(self, calls: Array) -> Array:
        """Return whether the number of calls is a multiple of the present interval, on the device."""
        every = jnp.asarray(self.every, jnp.int32)
        warmup = jnp.asarray(self.warmup, jnp.int32)
        doublings = jnp.minimum(32 - lax.clz(calls // jnp.maximum(warmup, 1)), 30)
        interval = jnp.where(warmup > 0, jnp.minimum(every, 1 << doublings), every)
        return calls % interval == 0

    def due_on_host(self, calls: int) -> bool:
        """Return the same as `due`, for an interval of Python numbers. An operation of JAX would wait for the step."""
        interval = int(self.every)
        warmup = int(self.warmup)
        if warmup:
            interval = min(interval, 1 << (calls // warmup).bit_length())
        return calls % interval == 0
