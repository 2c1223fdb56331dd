"""Blocks too large for one device: every device holds some rows of their factors and of the inverses.

Of `n` rows each of `D` devices has the next `r = ceil(n / D)`, with zeros behind the last: a stack `[k, n, n]` is
`[k, r, n]` on a device. All devices work on the inversion of each block together, and apply their rows of the inverse
to its gradient, which all of them have.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kfac._curvature.cholesky import Cholesky, exact_product, inverse_factor, invert_damped, split_damping
from kfac._curvature.inverse import Inverse, damping_of_blocks, finite, identities, product
from kfac._curvature.symmetric import flatten, pack, unflatten, unpack
from kfac._factors import Block, Kronecker, is_diagonal
from kfac._varying import AxisName, as_varying, varying_axes

PANEL = 64, 256  # rows eliminated at once: at least, for fewer messages, and at most, as every device inverts them


def rows_of_each(size: int, devices: int) -> int:
    """`r`."""
    return -(-size // devices)


def _panel(size: int, devices: int) -> tuple[int, int]:
    """How many of its rows each device eliminates at once, and how many times."""
    rows = rows_of_each(size, devices)
    width = min(rows, max(1, min(PANEL[1], max(PANEL[0], rows)) // devices))
    return width, -(-rows // width)


def eliminated(size: int, devices: int) -> int:
    """The dimension of what is eliminated, whole panels."""
    return devices * math.prod(_panel(size, devices))


def elimination_work(size: int, devices: int) -> float:
    """What each of so many devices does to invert a matrix by rows, in the `n^3` of `Cholesky.flops` each."""
    n, (width, turns) = eliminated(size, devices), _panel(size, devices)
    panel = devices * width
    return 2 * n**2 * (width * turns + panel) / Cholesky.flops + n * panel**2


def larger(sizes: Mapping[str, int]) -> str:
    """The side whose rows are applied where they lie."""
    return max(sizes, key=lambda side: sizes[side])


@dataclasses.dataclass(frozen=True)
class Rows:
    """Which rows of square matrices of dimension `n = size` this one of the devices of `axis` has."""

    axis: AxisName
    size: int

    @property
    def count(self) -> int:
        """`r`."""
        return rows_of_each(self.size, lax.axis_size(self.axis))

    @property
    def index(self) -> jax.Array:
        """`[r]`, their numbers; `n` and more are those of no row."""
        return lax.axis_index(self.axis) * self.count + jnp.arange(self.count)

    def of(self, stack: jax.Array) -> jax.Array:
        """From `[k, n, m]`, which all devices have, `[k, r, m]`."""
        stack = jnp.pad(stack, ((0, 0), (0, self.count * lax.axis_size(self.axis) - self.size), (0, 0)))
        return lax.dynamic_slice_in_dim(stack, lax.axis_index(self.axis) * self.count, self.count, axis=1)

    def all(self, rows: jax.Array) -> jax.Array:
        """The inverse of `of`; the result is the same on all devices, also where `shard_map` keeps track of it."""
        to = "invarying" if varying_axes(lax.axis_index(self.axis)) else "varying"
        return lax.all_gather(rows, self.axis, axis=1, tiled=True, to=to)[:, : self.size]

    def halves(self, stack: jax.Array) -> jax.Array:
        """What each device gets of symmetric matrices `[k, n, n]`: `[D, h k r r]`.

        They are cut in squares of `r` by `r`. Device `d` gets that on the diagonal and the next in its row, the first
        behind the last: `h = D // 2 + 1` of them. The others are transposes of what others get.
        """
        r, devices = self.count, lax.axis_size(self.axis)
        rest, own = r * devices - self.size, np.arange(devices)[:, None]
        squares = jnp.pad(stack, ((0, 0), (0, rest), (0, rest))).reshape(-1, devices, r, devices, r)
        chosen = squares.transpose(1, 3, 0, 2, 4)[own, (own + np.arange(devices // 2 + 1)) % devices]
        return chosen.reshape(devices, -1)

    def from_half(self, half: jax.Array, blocks: int) -> jax.Array:
        """This device's rows `[k, r, n]`, from what it has of the `halves` of `k` blocks; all call it together."""
        devices, here = lax.axis_size(self.axis), lax.axis_index(self.axis)
        held = half.reshape(-1, blocks, self.count, self.count)
        squares = held
        if missing := devices - len(held):  # of two devices, each has both squares
            given = jnp.pad(held[1 : 1 + missing].mT, ((1, len(held) - 1), (0, 0), (0, 0), (0, 0)))
            found = lax.all_to_all(jnp.roll(given, here, axis=0), self.axis, 0, 0, tiled=True)
            squares = jnp.concatenate([held, jnp.roll(found, -here, axis=0)[len(held) :]])
        squares = jnp.roll(squares, here, axis=0).transpose(1, 2, 0, 3)
        return squares.reshape(blocks, self.count, -1)[:, :, : self.size]

    def identity(self, dtype: Any) -> jax.Array:
        """`[r, n]`, those of the identity matrix."""
        return jax.nn.one_hot(self.index, self.size, dtype=dtype)

    def diagonal(self, rows: jax.Array) -> jax.Array:
        """`[k, n]`, the diagonals of matrices `[k, r, n]`."""
        here = rows[:, jnp.arange(self.count), jnp.minimum(self.index, self.size - 1)]
        return self.all(here[:, :, None])[:, :, 0]


@dataclasses.dataclass(frozen=True)
class ByRows(Inverse):
    """`Cholesky` of blocks of which the devices of an axis have the rows of some sides; all call it together.

    Its own `relative` stays False: damping arrives as it is, and `refresh` brings it to the units of `inverse`.

    Attributes:
      inverse: its options, and what is done with a side that every device has whole.
      sides: which of `"A"` and `"G"` are in rows.
      axis: of the devices.
    """

    inverse: Cholesky = Cholesky()
    sides: tuple[str, ...] = ()
    axis: AxisName = ()

    def part(self, block: Block) -> Block:
        """What this device has of statistics that all devices have."""
        assert isinstance(block, Kronecker)
        return dataclasses.replace(
            block, **{side: own.of(getattr(block, side)) for side, own in self._rows(block).items()}
        )

    def _rows(self, block: Kronecker) -> dict[str, Rows]:
        return {side: Rows(self.axis, getattr(block, side).shape[-1]) for side in self.sides}

    def sent(self, block: Block) -> dict[str, jax.Array]:
        """A device's statistics as they go to the others: what each gets of rows, `[D, elements]`; else triangles."""
        return {side: self._sent(side, getattr(block, side)) for side in "AG"}

    def _sent(self, side, stack):
        if side in self.sides:
            return Rows(self.axis, stack.shape[-1]).halves(stack)
        return flatten(stack if is_diagonal(stack) else pack(stack))

    def received(self, parts: Mapping[str, jax.Array], like: Block) -> Block:
        """What this device has of the averages, from what came of what all have `sent`; `like` is what one had."""
        assert isinstance(like, Kronecker)
        sides = {side: self._received(side, x, getattr(like, side)) for side, x in parts.items()}
        return dataclasses.replace(like, **sides)

    def _received(self, side, x, like):
        if side in self.sides:
            return Rows(self.axis, like.shape[-1]).from_half(x, len(like))
        return x if is_diagonal(like) else unpack(unflatten(x, jax.eval_shape(pack, like)), like.shape[-1])

    def init(self, factors):
        """Identities, so that there need be no message about whether there is an inverse yet.

        Until then a gradient is rounded as by any inverse of this precision.
        """
        dtype = self.inverse.kept_dtype(factors.A.dtype)
        return Kronecker(*(self._identity(side, getattr(factors, side).shape, dtype) for side in "AG"))

    def _identity(self, side, shape, dtype):
        if side not in self.sides:
            return identities(shape, dtype)
        return jnp.zeros(shape, dtype) + Rows(self.axis, shape[-1]).identity(dtype)

    def refresh(self, kept, factors, damping):
        """As `Cholesky`, of the rows by elimination."""
        rows = self._rows(factors)
        diagonals = {side: own.diagonal(getattr(factors, side)) for side, own in rows.items()}
        means = dataclasses.replace(factors, **diagonals)  # enough for the traces
        amounts = split_damping(means, damping_of_blocks(self.inverse, means, damping))
        new, conditions = {}, []
        for side, amount in zip("AG", amounts, strict=True):
            stack, dtype = getattr(factors, side), getattr(kept, side).dtype
            own = rows.get(side)
            found = invert_damped(stack, amount, dtype) if own is None else invert_damped_rows(own, stack, amount)
            new[side] = found[0].astype(dtype)
            conditions.append(found[1])
        valid = (conditions[0] > 0) & (conditions[1] > 0) & finite(new["A"]) & finite(new["G"])
        # All devices agree: each sees its own rows, and rounds by itself what it inverts by itself.
        return Kronecker(**new), lax.pmin(jnp.where(valid, jnp.maximum(*conditions), 0), self.axis)

    def whole(self, kept: Kronecker) -> Kronecker:
        """An inverse that all devices have whole."""

        def side(name, stack):
            if name in self.sides:
                return Rows(self.axis, stack.shape[-1]).all(stack)
            return lax.pmax(stack, self.axis)  # where all have the same, `shard_map` is told so

        return Kronecker(side("A", kept.A), side("G", kept.G))

    def apply(self, kept, matrices, damping):
        """`G^-1 V A^-1`, whole on all devices.

        Each has its rows of the larger side; where both are in rows, all get the smaller: it has fewer elements than
        what would be sent between the two products.
        """
        del damping  # that of the refresh is in the inverses
        rows = self._rows(kept)
        side = larger({side: own.size for side, own in rows.items()})
        other = "AG".replace(side, "")
        own, whole = getattr(kept, side), getattr(kept, other)
        if other in rows:
            whole = rows[other].all(whole)

        def multiplied(spec, a, b):
            return product(spec, self.inverse.precision, own.dtype, matrices.dtype, a, b)

        half = multiplied("krn,knm->krm", own, matrices.mT if side == "A" else matrices)
        found = rows[side].all(multiplied("krm,km->krm" if is_diagonal(whole) else "krm,kmp->krp", half, whole))
        return found.mT if side == "A" else found


def invert_damped_rows(own: Rows, rows: jax.Array, amount: jax.Array) -> tuple[jax.Array, jax.Array]:
    """As `invert_damped`, of `[k, r, n]`."""
    damped = rows + amount[:, None, None] * own.identity(rows.dtype)
    inverse = _eliminate(own, damped)
    sums = jnp.stack([jnp.sum(jnp.abs(x), axis=-1) for x in (damped, inverse)], axis=-1)
    norms = jnp.max(own.all(sums), axis=1)  # symmetric: the sums of rows are those of columns
    condition = norms[:, 0] * norms[:, 1]
    return inverse, jnp.where(jnp.isfinite(condition), condition, 0)


def _eliminate(own: Rows, rows: jax.Array) -> jax.Array:
    """The inverses of symmetric positive definite matrices, by rows; NaN where one is not positive definite.

    A symmetric sweep in the place of the matrix, of some rows of each device at once (Goodnight 1979): with `L` the
    Cholesky factor of their square on the diagonal, and `R` the inverse of `L` times these rows, all others lose
    `R^T R`. As every turn changes all rows, all devices have as much to do; of a factorisation most would be done
    early. With the inverse of the square in the place of that of its factor, errors would grow with the square of the
    condition number.
    """
    devices, here, (k, r, n) = lax.axis_size(own.axis), lax.axis_index(own.axis), rows.shape
    width, turns = _panel(n, devices)
    # Columns in the order in which they are swept; what is filled up with, of rows that are nobody's.
    rows = jnp.pad(rows, ((0, 0), (0, turns * width - r), (0, devices * r - n))).reshape(k, -1, devices, r)
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, 0), (0, turns * width - r)))
    rows = rows.reshape(k, -1, devices, turns, width).swapaxes(2, 3).reshape(k, turns * width, -1)
    panel, row = devices * width, jnp.arange(turns * width)
    filled = (row >= r) | (here * r + row >= n)
    places = row // width * panel + here * width + row % width
    rows += filled[:, None] * jax.nn.one_hot(places, rows.shape[2], dtype=rows.dtype)

    def turn(number, rows):
        swept = lax.all_gather(lax.dynamic_slice_in_dim(rows, number * width, width, 1), own.axis, axis=1, tiled=True)
        start = number * panel
        square = lax.dynamic_slice_in_dim(swept, start, panel, 2)
        minus = jnp.zeros_like(square) - jnp.eye(panel, dtype=rows.dtype)
        inverse = inverse_factor((square + square.mT) / 2)
        right = exact_product(inverse, lax.dynamic_update_slice_in_dim(swept, minus, start, 2))
        rows = lax.dynamic_update_slice_in_dim(rows, jnp.zeros((k, turns * width, panel), rows.dtype), start, 2)
        rows -= exact_product(jnp.take(right, places, axis=2).mT, right)
        mine = exact_product(lax.dynamic_slice_in_dim(inverse, here * width, width, 2).mT, right)
        return lax.dynamic_update_slice_in_dim(rows, mine, number * width, 1)

    # The sweep of all rows ends at minus the inverse.
    found = -lax.fori_loop(0, turns, turn, as_varying(rows, varying_axes(here)))
    found = found[:, :r].reshape(k, r, turns, devices, width).swapaxes(2, 3)
    return found.reshape(k, r, devices, -1)[:, :, :, :r].reshape(k, r, -1)[:, :, :n]
