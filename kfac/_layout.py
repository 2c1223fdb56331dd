"""The conversion between a parameter leaf and a stack of matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax


class Layout(NamedTuple):
    """How a leaf becomes a stack of matrices. An atom is an axis of the leaf or a strided part of an axis.

    Attributes:
      roles: the role of each atom in memory order: `"stack"`, `"out"` or `"in"`.
      sizes: the length of each atom.
    """

    roles: tuple[str, ...]
    sizes: tuple[int, ...]

    def size(self, role: str) -> int:
        return math.prod(
            s for r, s in zip(self.roles, self.sizes, strict=True) if r == role
        )

    @property
    def transposed(self) -> Layout:
        """The layout with inputs and outputs swapped."""
        swapped = {"in": "out", "out": "in", "stack": "stack"}
        return self._replace(roles=tuple(swapped[role] for role in self.roles))

    def _order(self) -> list[int]:
        order = ("stack", "in", "out")
        axes = range(len(self.roles))
        return sorted(axes, key=lambda k: order.index(self.roles[k]))

    def to_rows(self, leaf: jax.Array) -> jax.Array:
        """Return `leaf` as `[copies, d_in, d_out]`. For a leaf without input axes, `d_in` is 1."""
        rows = leaf.reshape(self.sizes).transpose(self._order())
        return rows.reshape(self.size("stack"), self.size("in"), self.size("out"))

    def from_rows(self, rows: jax.Array, shape: Sequence[int]) -> jax.Array:
        """Undo `to_rows` for a leaf of shape `shape`."""
        order = self._order()
        inverse = [order.index(k) for k in range(len(order))]
        atoms = rows.reshape([self.sizes[k] for k in order])
        return atoms.transpose(inverse).reshape(shape)
