"""Name the leaves of parameter trees by their paths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
from jax.sharding import NamedSharding, PartitionSpec

# Nested containers with any leaves, such as parameters or the arguments of a loss.
PyTree: TypeAlias = Any


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
            path = (*outer, *inner)
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            paths.append(name or "params")
    return paths


def _is_variable(node: object) -> bool:
    for base in type(node).__mro__:
        if base.__module__.startswith("flax.nnx"):
            if base.__name__ in ("Variable", "VariableState"):
                return True
    return False


def leaves_by_path(tree: PyTree) -> dict[str, Any]:
    """Return the leaves of a parameter or gradient tree by path."""
    return dict(zip(leaf_paths(tree), jax.tree.leaves(tree), strict=True))


def map_by_path(fn: Callable[[str, jax.Array], jax.Array], tree: PyTree) -> PyTree:
    """Map `fn(path, leaf)` over the leaves of `tree`."""
    leaves = [fn(path, leaf) for path, leaf in leaves_by_path(tree).items()]
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def find_splits(params: PyTree) -> tuple[tuple[str, PartitionSpec], ...]:
    """Return the path and spec of each parameter if any parameter is split over a mesh, otherwise an empty tuple.

    Tracers count as unsplit, so the result is empty under `jit`.
    """
    specs = {}
    for path, x in leaves_by_path(params).items():
        if isinstance(x, jax.core.Tracer):
            continue
        sharding = getattr(x, "sharding", None)
        if isinstance(sharding, NamedSharding):
            specs[path] = sharding.spec
    return tuple(sorted(specs.items())) if any(map(any, specs.values())) else ()
