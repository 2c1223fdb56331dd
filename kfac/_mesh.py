"""Named device axes and meshes: which axes are bound, which values vary over them, how arrays are laid out."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

AxisNames = tuple[str, ...]
AxisName = str | AxisNames
PyTree: TypeAlias = Any  # any tree of arrays


def axis_names(axis: AxisName | None) -> AxisNames:
    """Return the axis names as a tuple, which is empty for None."""
    if axis is None:
        return ()
    return axis if isinstance(axis, tuple) else (axis,)


def varying_in(aval: Any) -> frozenset[str]:
    """Return the mesh axes over which an array of this type may differ between devices."""
    # The attribute's name depends on the JAX release. Outside `shard_map`, a ShapeDtypeStruct has None.
    for name in ("manual_axis_type", "vma"):
        if hasattr(aval, name):
            axes = getattr(aval, name)
            return frozenset(getattr(axes, "varying", axes) or ())
    raise RuntimeError(
        f"jax {jax.__version__} was not tried with kfac, and differs: see docs/development/compatibility.md"
    )


def varying_axes(tree: PyTree) -> frozenset[str]:
    """Return the axes of an enclosing `shard_map` over which a leaf of `tree` may differ between devices."""
    axes: frozenset[str] = frozenset()
    for leaf in jax.tree.leaves(tree):
        axes |= varying_in(jax.typeof(leaf))
    return axes


def device_axes() -> AxisNames:
    """Return the manual axes: the mesh axes that an enclosing `shard_map` or `pmap` has bound."""
    return _axes_of(AxisType.Manual)


def _axes_of(kind: AxisType) -> AxisNames:
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, kind_of_axis in kinds if kind_of_axis == kind)


def mesh_of(tree: PyTree) -> Mesh | AbstractMesh | None:
    """Return the mesh on which the arrays in `tree` lie, otherwise the mesh that is set.

    Returns:
      A mesh with several devices. None if there is no such mesh, and inside `shard_map` and `pmap`.
    """
    if device_axes():
        return None
    meshes = set()
    for x in jax.tree.leaves(tree):
        if isinstance(x, jax.core.Tracer):
            x = jax.typeof(x)
        sharding = getattr(x, "sharding", None)
        if isinstance(sharding, NamedSharding):
            meshes.add(sharding.mesh)
    # Prefer a mesh with devices.
    candidates = sorted(meshes, key=lambda mesh: isinstance(mesh, AbstractMesh))
    for mesh in [*candidates, jax.sharding.get_abstract_mesh()]:
        if mesh.size > 1:
            return mesh
    return None


def on_mesh(fn: Callable) -> Callable:
    """Wrap `fn` so that it runs under the mesh of its arguments, as if `jax.set_mesh` had set it.

    A mesh that is already set stays. The user's `jax_numpy_rank_promotion` does not apply to the package's arithmetic.
    """

    @functools.wraps(fn)
    @jax.numpy_rank_promotion("allow")
    def within(*args, **kwargs):
        mesh = None
        if jax.sharding.get_abstract_mesh().empty:
            mesh = mesh_of((args, kwargs))
        if mesh is None:
            return fn(*args, **kwargs)
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return fn(*args, **kwargs)

    return within


def replicate(
    tree: PyTree,
    mesh: Mesh | AbstractMesh | None,
) -> PyTree:
    """Replicate arrays that are not on `mesh` over its devices. Tracers are unchanged."""
    if not isinstance(mesh, Mesh):
        return tree
    everywhere = NamedSharding(mesh, PartitionSpec())

    def copied(x):
        if isinstance(x, jax.core.Tracer) or getattr(x.sharding, "mesh", None) == mesh:
            return x
        return jax.device_put(x, everywhere)

    return jax.tree.map(copied, tree)


def as_varying(
    tree: PyTree,
    axes: frozenset[str],
) -> PyTree:
    """Mark every leaf of `tree` as varying over `axes`.

    Autodiff sums the gradient with respect to a replicated value over devices. The gradient with respect to a varying
    value stays local to each device, as under `pmap`.
    """

    def mark(leaf):
        missing = tuple(sorted(axes - varying_in(jax.typeof(leaf))))
        return lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(mark, tree)


def zeros_of(avals: PyTree) -> PyTree:
    """Return zeros with the shapes, shardings and varying axes that `jax.eval_shape` has returned."""

    def zeros(aval):
        zero = reshard_like(jnp.zeros(aval.shape, aval.dtype), aval)
        return as_varying(zero, varying_in(aval))

    return jax.tree.map(zeros, avals)


def device_key(
    key: Array,
    axes: frozenset[str],
) -> Array:
    """Return a PRNG key for this device by folding its index on the mesh axes `axes` into `key`.

    Under `pmap`, and under `shard_map` without its check, varying axes are unknown. Then all bound axes are used.
    """
    bound = device_axes()
    if bound and not varying_axes(lax.axis_index(bound[0])):
        axes = frozenset(bound)
    if not axes:
        return key
    return jax.random.fold_in(key, lax.axis_index(tuple(sorted(axes))))


def axis_size(axis_name: AxisName) -> int | None:
    """Return the number of devices along a named axis, or None if the axis is not bound."""
    try:
        return lax.axis_size(axis_name)
    except NameError:
        return None


def dividing_axes(length: int) -> AxisNames:
    """Return the non-manual mesh axes whose devices can share `length` examples equally."""
    mesh = jax.sharding.get_abstract_mesh()
    devices = 1
    axes = []
    for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True):
        size = mesh.shape[name]
        if kind != AxisType.Manual and size > 1 and length % (devices * size) == 0:
            axes.append(name)
            devices *= size
    return tuple(axes)


def sum_of_parts(
    of: Callable[..., Array],
    limit: int,
    *arrays: Array,
) -> Array:
    """Split the examples into equal parts, apply a function to one part at a time, and return the sum of its results.

    Part `i` of `count` holds the examples `i`, `i + count`, `i + 2 count` and so on. If a batch is sharded over
    devices, each part is sharded, too.

    On automatic mesh axes, an array's sharding is unknown here. Without help, XLA would communicate in every iteration
    of a loop over the parts, or gather the batch. If mesh axes divide the number of examples, this function therefore
    opens a `shard_map` over these axes. Each device sums over its share of the examples, and one all-reduce follows. No
    example moves if the batch is already sharded over these axes.

    Args:
      of: the function. Its results for parts must add up to its result for all examples.
      limit: the largest number of examples that a device handles at a time.
      *arrays: the function's arguments, with the examples on the first axis.
    """
    if limit >= arrays[0].shape[0]:
        return of(*arrays)

    def summed(*shares):
        """Sum over one device's share of the examples."""
        n = shares[0].shape[0]
        size = min(n, limit)
        while n % size:
            size -= 1
        count = n // size
        if count == 1:
            return of(*shares)
        parts = [x.reshape(size, count, *x.shape[1:]) for x in shares]

        def of_part(k):
            part = [lax.dynamic_index_in_dim(x, k, 1, keepdims=False) for x in parts]
            return of(*part)

        def add(total, k):
            return total + of_part(k), None

        zeros = zeros_of(jax.eval_shape(of_part, 0))
        return lax.scan(add, zeros, jnp.arange(count))[0]

    names = dividing_axes(arrays[0].shape[0])
    if not names:
        return summed(*arrays)
    sums = jax.shard_map(
        lambda *shares: lax.psum(summed(*shares), names),
        in_specs=PartitionSpec(names),
        out_specs=PartitionSpec(),
        axis_names=set(names),
    )
    return sums(*arrays)


def explicit_axes() -> AxisNames:
    """Return the explicit mesh axes. An array's type tells its sharding over these axes."""
    return _axes_of(AxisType.Explicit)


def explicit_part(spec: PartitionSpec) -> PartitionSpec:
    """Return a spec that keeps explicit axes only."""
    explicit = explicit_axes()
    parts = []
    for part in spec:
        names = tuple(name for name in axis_names(part) if name in explicit)
        parts.append(names or None)
    return PartitionSpec(*parts)


def with_auto_axes(
    fn: Callable,
    like: PyTree = None,
) -> Callable:
    """Wrap `fn` so that it treats the explicit mesh axes as automatic.

    Sums over sharded axes then need no explicit output sharding.

    Args:
      fn: the function.
      like: arrays or `PartitionSpec`s whose sharding the results get. None replicates the results.
    """
    if not explicit_axes():
        return fn

    def spec(x):
        if isinstance(x, PartitionSpec):
            return explicit_part(x)
        return jax.typeof(x).sharding.spec

    if like is None:
        like = PartitionSpec()
    specs = jax.tree.map(spec, like, is_leaf=lambda x: isinstance(x, PartitionSpec))
    return jax.sharding.auto_axes(fn, axes=explicit_axes(), out_sharding=specs)


def replicated(tree: PyTree) -> PyTree:
    """Replicate the arrays that are sharded over explicit mesh axes. This also works outside `jit`."""

    def copied(x):
        sharding = jax.typeof(x).sharding
        if not any(sharding.spec):
            return x
        return jax.reshard(x, NamedSharding(sharding.mesh, PartitionSpec()))

    return jax.tree.map(copied, tree)


def reshard_like(
    tree: PyTree,
    like: PyTree,
) -> PyTree:
    """Reshard arrays over explicit mesh axes like the arrays in `like`."""

    def resharded(x, like):
        aval = like if isinstance(like, jax.ShapeDtypeStruct) else jax.typeof(like)
        sharding = aval.sharding
        if sharding is None or not any(sharding.spec):
            return x
        return jax.reshard(x, sharding)

    return jax.tree.map(resharded, tree, like)


def split_along(
    axes: AxisName | None,
    shape: Sequence[int],
    position: int,
) -> NamedSharding | None:
    """Return a sharding that splits one array axis over mesh axes.

    Args:
      axes: the mesh axes.
      shape: the array's shape.
      position: the number of the array axis.

    Returns:
      The sharding. None if `axes` is None, or if the number of devices does not divide the array axis.
    """
    if axes is None:
        return None
    mesh = jax.sharding.get_abstract_mesh()
    devices = math.prod(mesh.shape[name] for name in axis_names(axes))
    if shape[position] % devices:
        return None
    return NamedSharding(mesh, PartitionSpec(*position * [None], axes))
