"""New inverses of Kronecker blocks: one loop for each dimension that their factors have.

A network has fewer dimensions than shapes of blocks, and to compile an inversion takes long. So the matrices of one
dimension, whatever stack they are in and on whichever side of a block, pass through one loop. The two sides of a block
then meet in different loops, but are only taken together: the smaller one, which comes first, waits until the larger
one is there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kfac.collectives import as_varying, varying_axes
from kfac.inverse import RETRY, Refreshed, decompose, invert_damped
from kfac.layers import Kronecker, is_diagonal

# Matrices are inverted so many together that they have at most this many elements, so that small ones do not wait for
# each other. A large one fills a device by itself, and more at a time would take more memory.
TOGETHER = 1 << 18


class Side(NamedTuple):
    """One of the two factors of all blocks of a stack.

    Vectors with a number for each factor of each block hold those of a side from `at` on.

    Attributes:
      name: the stack.
      factor: `"A"` or `"G"`.
      stack: the factors, `[k, d, d]` or `[k, d]`.
      first: whether they are inverted before the other side.
      at: where the numbers of this side begin.
      other: where those of the other side of the same blocks begin.
    """

    name: str
    factor: str
    stack: jax.Array
    first: bool
    at: int
    other: int

    @property
    def key(self) -> tuple[str, str]:
        return self.name, self.factor

    @property
    def other_key(self) -> tuple[str, str]:
        return self.name, "G" if self.factor == "A" else "A"

    @property
    def size(self) -> int:
        return self.stack.shape[0]


class _Progress(NamedTuple):
    """What the loops carry.

    Attributes:
      inverses: so far, by `Side.key`.
      waiting: those of first sides whose blocks are not complete, by the name of the stack.
      condition: of all factors that have a usable inverse, its 1-norm condition number; else 0.
    """

    inverses: dict[tuple[str, str], Any]
    waiting: dict[str, Any]
    condition: jax.Array


def refresh_kronecker(
    factors: Mapping[str, Kronecker],
    previous: Mapping[str, Kronecker],
    due: Mapping[str, jax.Array],
    damping: jax.Array,
    *,
    eigen: bool = False,
) -> dict[str, Refreshed]:
    """Inverts `A + pi sqrt(damping) I` and `G + sqrt(damping) / pi I` of the blocks that are due, or decomposes both.

    A block one of whose factorisations fails is tried again with ten times the damping; failing still, it keeps its
    previous inverse. Nothing non-finite is ever returned. Eigendecompositions are without damping, and tried once.

    Args:
      factors: stacks of `k` blocks of one shape: `A` `[k, d_in, d_in]` and `G` `[k, d_out, d_out]`, or diagonals.
      previous: the inverses so far, in the dtype they are kept in.
      due: `[k]` for each stack.
      damping: a scalar.
      eigen: whether inverses are kept as `Eigen`, and those of diagonals as their eigenvalues.

    Returns:
      For each stack all its inverses; `valid` where they are new.
    """
    if not factors:
        return {}
    sides = _sides(factors)
    partner = np.concatenate([side.other + np.arange(side.size) for side in sides])
    wanted = jnp.concatenate([due[side.name] for side in sides])
    amounts = split_damping(sides, partner, damping)
    inverses = {side.key: getattr(previous[side.name], side.factor) for side in sides}

    def unfinished(carry):
        tries, _, condition = carry
        return (tries < (1 if eigen else 2)) & jnp.any(wanted & (condition == 0))

    def attempt(carry):
        # A loop rather than a first attempt and a branch, to compile the inversions once.
        tries, inverses, condition = carry
        more = jnp.where(tries == 0, 1, RETRY**0.5).astype(amounts.dtype)
        waiting = {side.name: jax.tree.map(jnp.zeros_like, inverses[side.key]) for side in sides if side.first}
        progress = as_varying(_Progress(inverses, waiting, jnp.zeros_like(condition)), axes)
        for alike in _by_shape(sides):
            progress = _invert_alike(alike, more * amounts, wanted & (condition == 0), progress, eigen)
        new = progress.condition
        worse = jnp.where((new > 0) & (new[partner] > 0), jnp.maximum(new, new[partner]), condition)
        return tries + 1, progress.inverses, worse

    axes = varying_axes((factors, previous, due, damping))
    start = (jnp.zeros((), jnp.int32), inverses, jnp.zeros(wanted.shape, amounts.dtype))
    _, inverses, condition = lax.while_loop(unfinished, attempt, as_varying(start, axes))
    result = {}
    for a, g in zip(sides[::2], sides[1::2], strict=True):
        own = condition[a.at : a.at + a.size]
        result[a.name] = Refreshed(Kronecker(inverses[a.key], inverses[g.key]), own > 0, own)
    return result


def _sides(factors: Mapping[str, Kronecker]) -> list[Side]:
    """Both sides of every stack, `A` before `G`."""
    sides, at = [], 0
    for name, block in factors.items():
        k = block.A.shape[0]
        first = "A" if _place(block.A) < _place(block.G) else "G"
        sides += [
            Side(name, "A", block.A, first == "A", at, at + k),
            Side(name, "G", block.G, first == "G", at + k, at),
        ]
        at += 2 * k
    return sides


def _place(stack: jax.Array) -> tuple[int, tuple[int, ...]]:
    """Where a stack comes in the order of the loops: diagonals before matrices, small before large."""
    return stack.ndim, stack.shape[1:]


def _by_shape(sides: Sequence[Side]) -> list[list[Side]]:
    """The sides whose factors have one shape, in the order of the loops; first sides come first."""
    alike: dict[Any, list[Side]] = {}
    for side in sorted(sides, key=lambda side: (_place(side.stack), not side.first)):
        alike.setdefault(side.stack.shape[1:], []).append(side)
    return list(alike.values())


def split_damping(sides: Sequence[Side], partner: np.ndarray, damping: jax.Array) -> jax.Array:
    """Factored Tikhonov damping: what to add to the diagonals of all factors.

    With `pi^2 = (tr A / dim A) / (tr G / dim G)` it is `pi sqrt(damping)` for `A` and `sqrt(damping) / pi` for `G`
    (Martens & Grosse 2015, section 6.3); `pi` is 1 where a trace is zero.
    """
    means, order = [], []
    for alike in _by_shape(sides):
        diagonals = jnp.concatenate([_diagonals(side.stack) for side in alike])
        means.append(jnp.sum(diagonals, axis=1) / diagonals.shape[1])
        order += [side.at + k for side in alike for k in range(side.size)]
    mean = jnp.concatenate(means)[np.argsort(order)]
    other = mean[partner]
    usable = (mean > 0) & (other > 0)
    pi = jnp.where(usable, jnp.sqrt(jnp.where(usable, mean, 1)) / jnp.sqrt(jnp.where(usable, other, 1)), 1)
    return pi * jnp.sqrt(damping.astype(pi.dtype))


def _diagonals(stack: jax.Array) -> jax.Array:
    if is_diagonal(stack):
        return stack
    k, d = stack.shape[:2]
    return lax.slice(stack.reshape(k, d * d), (0, 0), (k, d * d), (1, d + 1))


def _invert_alike(
    sides: Sequence[Side], amounts: jax.Array, wanted: jax.Array, progress: _Progress, eigen: bool
) -> _Progress:
    """Inverts the factors of `sides`, which are of one shape, a few small ones or one large one at a time."""
    shape = sides[0].stack.shape[1:]
    width = min(max(side.size for side in sides), max(1, TOGETHER // math.prod(shape)))
    turns = []
    for which, side in enumerate(sides):
        for begin in range(0, side.size, width):
            # The last few of a side begin earlier, and leave alone what is not theirs.
            start = max(0, min(begin, side.size - width))
            own = (begin - start, min(begin + width, side.size) - start)
            turns.append((which, start, side.at + start, side.other + start, *own))
    table, lane = np.array(turns, np.int32), np.arange(width)
    within = (table[:, 4:5] <= lane) & (lane < table[:, 5:6])
    # Slices of vectors may reach beyond their end, where a stack has fewer than `width`.
    amounts, wanted = jnp.pad(amounts, (0, width)), jnp.pad(wanted, (0, width))
    inverses = {side.key: progress.inverses[side.key] for side in sides if not side.first}
    inverses |= {side.other_key: progress.inverses[side.other_key] for side in sides if not side.first}
    waiting = {side.name: progress.waiting[side.name] for side in sides}
    dtype = jax.tree.leaves(progress.inverses[sides[0].key])[0].dtype

    def some(carry):
        remaining, inverses, waiting, condition = carry
        turn = jnp.argmax(remaining)
        which, start, at, other, low, high = jnp.asarray(table)[turn]

        def rows(stack):
            return lax.dynamic_slice_in_dim(stack, start, min(width, stack.shape[0]))

        def write(stacks, values, where):
            def put(stack, values):
                old = rows(stack)
                now = where[: len(old)].reshape(-1, *(1,) * (old.ndim - 1))
                return lax.dynamic_update_slice_in_dim(stack, jnp.where(now, values[: len(old)], old), start, 0)

            return jax.tree.map(put, stacks, values)

        matrices = jnp.zeros((width, *shape), sides[0].stack.dtype)
        for k, side in enumerate(sides):
            own = rows(side.stack)
            own = jnp.pad(own, ((0, width - len(own)), *((0, 0) for _ in shape)))
            matrices = jnp.where(which == k, own, matrices)
        due = (low <= lane) & (lane < high) & lax.dynamic_slice_in_dim(wanted, at, width)
        amount = jnp.where(due, lax.dynamic_slice_in_dim(amounts, at, width), 1)
        inverse, number = decompose(matrices, dtype) if eigen else invert_damped(matrices, amount, dtype)
        taken = due & (number > 0)
        complete = taken & (lax.dynamic_slice_in_dim(condition, other, width) > 0)
        inverses, waiting = dict(inverses), dict(waiting)
        for k, side in enumerate(sides):
            if side.first:
                waiting[side.name] = write(waiting[side.name], inverse, (which == k) & taken)
            else:
                now = (which == k) & complete
                inverses[side.key] = write(inverses[side.key], inverse, now)
                inverses[side.other_key] = write(inverses[side.other_key], jax.tree.map(rows, waiting[side.name]), now)
        old = lax.dynamic_slice_in_dim(condition, at, width)
        condition = lax.dynamic_update_slice_in_dim(condition, jnp.where(due, number, old), at, 0)
        return remaining & (np.arange(len(turns)) != turn), inverses, waiting, condition

    remaining = jnp.any(within & wanted[table[:, 2:3] + lane], axis=1)
    carry = (remaining, inverses, waiting, jnp.pad(progress.condition, (0, width)))
    _, inverses, waiting, condition = lax.while_loop(lambda carry: jnp.any(carry[0]), some, carry)
    return _Progress(progress.inverses | inverses, progress.waiting | waiting, condition[:-width])
