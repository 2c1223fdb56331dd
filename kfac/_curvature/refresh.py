"""New inverses of Kronecker blocks: one loop for all factors of about one dimension.

A network has fewer dimensions than shapes of blocks, and to compile an inversion takes long. So the matrices of one
dimension, whatever stack they are in and on whichever side of a block, pass through one loop. So do those of smaller
dimensions, enlarged by a multiple of the identity, where that costs little. The two sides of a block then meet in
different loops, but are only taken together: the smaller one, which comes first, waits until the larger one is there.
"""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kfac._curvature.cholesky import RETRY, Refreshed, decompose, even_size, invert_damped
from kfac._factors import Kronecker, is_diagonal
from kfac._varying import as_varying, varying_axes

# Matrices are inverted so many together that they have at most this many elements, so that small ones do not wait for
# each other. A large one fills a device by itself, and more at a time would take more memory.
TOGETHER = 1 << 18
# Matrices are enlarged to share a loop with larger ones while that adds at most this part to the work of them all.
EXTRA = 1 / 32


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


class _Loop(NamedTuple):
    """One loop over the factors of `sides`, `width` at a time, enlarged to a dimension `d`."""

    sides: list[Side]
    d: int
    width: int


class _Turns(NamedTuple):
    """What the loops read, one after the other; vectors end with a few more numbers than there are factors.

    Attributes:
      table: for each turn of each loop its side, the first factor in its stack and in vectors, the other side of that
        one, the dimension before enlargement, and which of `width` factors belong to the turn.
      upcoming: the first turn, from each one on, in which something is to be done.
      wanted: which factors are to be inverted.
      amounts: what to add to their diagonals.
      lanes: the largest `width`.
    """

    table: np.ndarray
    upcoming: jax.Array
    wanted: jax.Array
    amounts: jax.Array
    lanes: int


class _Progress(NamedTuple):
    """What the loops carry.

    Attributes:
      turn: the next one.
      inverses: so far, by `Side.key`.
      waiting: those of first sides whose blocks are not complete, by the name of the stack.
      condition: of all factors that have a usable inverse, its 1-norm condition number; else 0.
    """

    turn: jax.Array
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
    loops = _loops(sides, exact=eigen)
    tables = [_table(loop) for loop in loops]
    table, lanes = np.concatenate(tables), np.arange(max(loop.width for loop in loops))
    # Slices of vectors may reach beyond the end, where a stack has fewer factors than there are lanes.
    wanted = jnp.concatenate([*(due[side.name] for side in sides), jnp.zeros(len(lanes), bool)])
    partner = np.concatenate([side.other + np.arange(side.size) for side in sides])
    amounts = jnp.pad(split_damping(sides, partner, damping), (0, len(lanes)))
    partner = np.concatenate([partner, len(partner) + lanes])
    inverses = {side.key: getattr(previous[side.name], side.factor) for side in sides}

    def unfinished(carry):
        tries, _, condition = carry
        return (tries < (1 if eigen else 2)) & jnp.any(wanted & (condition == 0))

    def attempt(carry):
        # A loop rather than a first attempt and a branch, to compile the inversions once.
        tries, inverses, condition = carry
        more = jnp.where(tries == 0, 1, RETRY**0.5).astype(amounts.dtype)
        now = wanted & (condition == 0)
        busy = jnp.any(now[table[:, 2:3] + lanes] & _own(table, lanes), axis=1)
        upcoming = lax.cummin(jnp.where(busy, np.arange(len(table)), len(table)), reverse=True)
        upcoming = jnp.pad(upcoming.astype(jnp.int32), (0, 1), constant_values=len(table))
        turns = _Turns(table, upcoming, now, more * amounts, len(lanes))
        # Nothing waits yet: any numbers will do, and those at hand need no kernel of their own.
        waiting = {side.name: inverses[side.key] for side in sides if side.first}
        progress = as_varying(_Progress(upcoming[0], inverses, waiting, jnp.zeros_like(condition)), axes)
        for loop, end in zip(loops, np.cumsum([len(part) for part in tables]), strict=True):
            progress = _invert(loop, int(end), turns, progress, eigen)
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


def _loops(sides: Sequence[Side], *, exact: bool) -> list[_Loop]:
    """The loops in their order, each with first sides first; unless sizes are to be `exact`, some are enlarged."""
    alike: dict[tuple[int, int], list[Side]] = {}
    for ndim in (2, 3):
        same = [side for side in sides if side.stack.ndim == ndim]
        counts: dict[int, int] = collections.Counter()
        for side in same:
            counts[side.stack.shape[-1]] += side.size
        sizes = {d: d for d in counts} if exact else _enlarged(counts)
        for side in sorted(same, key=lambda side: (sizes[side.stack.shape[-1]], not side.first)):
            alike.setdefault((ndim, sizes[side.stack.shape[-1]]), []).append(side)
    return [
        _Loop(sides, d, min(max(side.size for side in sides), max(1, TOGETHER // d ** (ndim - 1))))
        for (ndim, d), sides in alike.items()
    ]


def _enlarged(counts: Mapping[int, int]) -> dict[int, int]:
    """To what each dimension is enlarged, where `counts[d]` matrices have dimension `d`: the cheapest joins first."""
    sizes = {d: even_size(d) for d in counts}
    spare = EXTRA * sum(n * d**3 for d, n in counts.items())
    while len(set(sizes.values())) > 1:
        joins = itertools.pairwise(sorted(set(sizes.values())))
        costs = {(a, b): sum(counts[d] * (b**3 - a**3) for d in counts if sizes[d] == a) for a, b in joins}
        (small, large), cost = min(costs.items(), key=lambda item: item[1])
        if cost > spare:
            break
        spare -= cost
        sizes = {d: large if size == small else size for d, size in sizes.items()}
    return sizes


def split_damping(sides: Sequence[Side], partner: np.ndarray, damping: jax.Array) -> jax.Array:
    """Factored Tikhonov damping: what to add to the diagonals of all factors.

    With `pi^2 = (tr A / dim A) / (tr G / dim G)` it is `pi sqrt(damping)` for `A` and `sqrt(damping) / pi` for `G`
    (Martens & Grosse 2015, section 6.3); `pi` is 1 where a trace is zero.
    """
    alike: dict[int, list[Side]] = {}
    for side in sides:
        alike.setdefault(side.stack.shape[-1], []).append(side)
    traces = [jnp.sum(jnp.concatenate([_diagonals(side.stack) for side in same]), axis=1) for same in alike.values()]
    order = np.concatenate([side.at + np.arange(side.size) for same in alike.values() for side in same])
    dims = np.concatenate([np.full(side.size, side.stack.shape[-1]) for side in sides])
    mean = jnp.concatenate(traces)[np.argsort(order)] / dims.astype(traces[0].dtype)
    other = mean[partner]
    usable = (mean > 0) & (other > 0)
    pi = jnp.where(usable, jnp.sqrt(jnp.where(usable, mean, 1)) / jnp.sqrt(jnp.where(usable, other, 1)), 1)
    return pi * jnp.sqrt(damping.astype(pi.dtype))


def _diagonals(stack: jax.Array) -> jax.Array:
    if is_diagonal(stack):
        return stack
    k, d = stack.shape[:2]
    return lax.slice(stack.reshape(k, d * d), (0, 0), (k, d * d), (1, d + 1))


def _table(loop: _Loop) -> np.ndarray:
    """The turns of a loop, as in `_Turns.table`."""
    turns = []
    for which, side in enumerate(loop.sides):
        for begin in range(0, side.size, loop.width):
            # The last few of a side begin earlier, and leave alone what is not theirs.
            start = max(0, min(begin, side.size - loop.width))
            own = (begin - start, min(begin + loop.width, side.size) - start)
            turns.append((which, start, side.at + start, side.other + start, side.stack.shape[-1], *own))
    return np.array(turns, np.int32)


def _own(table, lanes: np.ndarray):
    """Which lanes belong to each turn, or to the turn of one row."""
    return (table[..., 5:6] <= lanes) & (lanes < table[..., 6:7])


def _invert(loop: _Loop, end: int, turns: _Turns, progress: _Progress, eigen: bool) -> _Progress:
    """Inverts the factors of one loop, whose turns are those until `end`."""
    sides, width = loop.sides, loop.width
    shape = (loop.d,) * (sides[0].stack.ndim - 1)
    lanes = turns.lanes
    keys = [side.key for side in sides if not side.first] + [side.other_key for side in sides if not side.first]
    inverses = {key: progress.inverses[key] for key in keys}
    waiting = {side.name: progress.waiting[side.name] for side in sides}
    dtype = jax.tree.leaves(progress.inverses[sides[0].key])[0].dtype

    def some(progress):
        inverses, waiting, condition = dict(progress.inverses), dict(progress.waiting), progress.condition
        row = jnp.asarray(turns.table)[progress.turn]
        which, start, at, other, size = row[:5]

        def rows(stack):
            return lax.dynamic_slice_in_dim(stack, start, min(width, stack.shape[0]))

        def enlarged(stack):
            own = rows(stack)
            return jnp.pad(own, [(0, to - n) for to, n in zip((width, *shape), own.shape, strict=True)])

        def write(where, stacks, values):
            def put(stack, values):
                old = rows(stack)
                values = values[tuple(slice(n) for n in old.shape)]
                now = where[: len(old)].reshape(-1, *(1,) * (old.ndim - 1))
                return lax.dynamic_update_slice_in_dim(stack, jnp.where(now, values, old), start, 0)

            return jax.tree.map(put, stacks, values)

        def numbers(vector, at):
            return lax.dynamic_slice_in_dim(vector, at, lanes)

        due = _own(row, np.arange(lanes)) & numbers(turns.wanted, at)
        amount = jnp.where(due, numbers(turns.amounts, at), 1)[:width]
        matrices = lax.switch(which, [functools.partial(enlarged, side.stack) for side in sides])
        inverse, number = decompose(matrices, dtype) if eigen else invert_damped(matrices, amount, size, dtype)
        number = jnp.pad(number, (0, lanes - width))
        taken = due & (number > 0)
        complete = taken & (numbers(condition, other) > 0)
        for k, side in enumerate(sides):
            if side.first:
                put = functools.partial(write, taken, values=inverse)
                waiting[side.name] = _only_if(which == k, put, waiting[side.name])
            else:
                put = functools.partial(write, complete, values=(inverse, jax.tree.map(rows, waiting[side.name])))
                both = inverses[side.key], inverses[side.other_key]
                inverses[side.key], inverses[side.other_key] = _only_if(which == k, put, both)
        condition = lax.dynamic_update_slice_in_dim(condition, jnp.where(due, number, numbers(condition, at)), at, 0)
        return _Progress(turns.upcoming[progress.turn + 1], inverses, waiting, condition)

    carry = progress._replace(inverses=inverses, waiting=waiting)
    new = lax.while_loop(lambda progress: progress.turn < end, some, carry)
    return new._replace(inverses=progress.inverses | new.inverses, waiting=progress.waiting | new.waiting)


def _only_if(needed: jax.Array, change: Callable[[Any], Any], stacks: Any) -> Any:
    """`change(stacks)` if `needed`, in place: XLA copies what a conditional may change, but not what a loop changes."""

    def once(carry):
        return carry[0] & False, change(carry[1])

    return lax.while_loop(lambda carry: carry[0], once, (needed, stacks))[1]
