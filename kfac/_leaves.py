"""Parameter leaves: their paths, and their conversion to a stack of matrices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from kfac._mesh import PyTree


class Layout(NamedTuple):
    """How a leaf becomes a stack of matrices. An atom is one of the leaf's axes, or a strided part.

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
        return sorted(range(len(self.roles)), key=lambda k: order.index(self.roles[k]))

    def to_rows(self, leaf: Array) -> Array:
        """Return `leaf` as `[copies, d_in, d_out]`. For a leaf without input axes, `d_in` is 1."""
        rows = leaf.reshape(self.sizes).transpose(self._order())
        return rows.reshape(self.size("stack"), self.size("in"), self.size("out"))

    def from_rows(self, rows: Array, shape: Sequence[int]) -> Array:
        """Undo `to_rows` for a leaf of shape `shape`."""
        order = self._order()
        inverse = [order.index(k) for k in range(len(order))]
        atoms = rows.reshape([self.sizes[k] for k in order])
        return atoms.transpose(inverse).reshape(shape)


def leaf_paths(tree: PyTree) -> list[str]:
    """Return the leaves' paths as `a/b/c`, in order.

    A flax nnx `Variable` with a single array adds nothing to the path. A tree that is a bare array has the path
    `params`.
    """
    paths = []
    for outer, node in jax.tree.leaves_with_path(tree, is_leaf=_is_variable):
        inside = [inner for inner, _ in jax.tree.leaves_with_path(node)]
        if _is_variable(node) and len(inside) == 1:
            inside = [()]
        for inner in inside:
            name = jax.tree_util.keystr((*outer, *inner), simple=True, separator="/")
            paths.append(name or "params")
    return paths


def _is_variable(node: object) -> bool:
    # By class, because `nnx.Rngs` has an attribute of any name.
    return any(
        base.__module__.startswith("flax.nnx")
        and base.__name__ in ("Variable", "VariableState")
        for base in type(node).__mro__
    )


def leaves_by_path(tree: PyTree) -> dict[str, Any]:
    """Return the leaves of a parameter or gradient tree by path."""
    return dict(zip(leaf_paths(tree), jax.tree.leaves(tree), strict=True))


def map_by_path(fn: Callable[[str, Array], Any], tree: PyTree) -> PyTree:
    """Map `fn(path, leaf)` over the leaves of `tree`."""
    leaves = [fn(path, leaf) for path, leaf in leaves_by_path(tree).items()]
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def find_param_specs(params: PyTree) -> tuple[tuple[str, PartitionSpec], ...]:
    """Return the path and spec of each parameter if any parameter is split over a mesh, otherwise an empty tuple.

    Tracers count as unsplit, so the result is empty under `jit`. Equal layouts have equal specs: without axes of a
    single device, and without None at the end.
    """
    specs = {}
    for path, x in leaves_by_path(params).items():
        if isinstance(x, jax.core.Tracer):
            continue
        sharding = getattr(x, "sharding", None)
        if isinstance(sharding, NamedSharding):
            specs[path] = _spec_of(sharding)
    return tuple(sorted(specs.items())) if any(map(any, specs.values())) else ()


def _spec_of(sharding: NamedSharding) -> PartitionSpec:
    """Return an array's spec without what splits nothing."""
    sizes = sharding.mesh.shape
    entries: list[Any] = []
    for entry in sharding.spec:
        names = entry if isinstance(entry, tuple) else (entry,)
        kept = tuple(name for name in names if sizes.get(name, 1) > 1)
        entries.append(kept[0] if len(kept) == 1 else kept or None)
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)
