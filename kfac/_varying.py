"""Named axes of devices: whether one is bound, and which values differ over it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

AxisName = str | tuple[str, ...]


def axis_names(axis: AxisName | None) -> tuple[str, ...]:
    """The names as a tuple, which is empty for None."""
    return axis if isinstance(axis, tuple) else () if axis is None else (axis,)


def varying_in(aval: Any) -> frozenset[str]:
    """The mesh axes over which an array of this type may differ between devices."""
    # The attribute's name differs between jax releases; outside shard_map a ShapeDtypeStruct has None.
    for name in ("manual_axis_type", "vma"):
        if hasattr(aval, name):
            axes = getattr(aval, name)
            return frozenset(getattr(axes, "varying", axes) or ())
    raise RuntimeError(f"jax {jax.__version__} was not tried with kfac, and differs: see docs/comparison.md")


def varying_axes(tree: Any) -> frozenset[str]:
    """The mesh axes of an enclosing `shard_map` over which some leaf of `tree` may differ between devices."""
    return frozenset().union(*(varying_in(jax.typeof(leaf)) for leaf in jax.tree.leaves(tree)))


def device_axes() -> tuple[str, ...]:
    """The mesh axes that `shard_map` or `pmap` has bound, over whose devices this code is traced for each."""
    return _axes_of(AxisType.Manual)


def _axes_of(kind: AxisType) -> tuple[str, ...]:
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(name for name, of_axis in zip(mesh.axis_names, mesh.axis_types, strict=True) if of_axis == kind)


def mesh_of(tree: Any) -> Mesh | AbstractMesh | None:
    """Returns the mesh that arrays lie on, or that is set; None for one device, or inside `shard_map` and `pmap`."""
    if device_axes():
        return None
    leaves = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array | jax.ShapeDtypeStruct)]
    lying = [jax.typeof(x).sharding if isinstance(x, jax.core.Tracer) else x.sharding for x in leaves]
    meshes = {sharding.mesh for sharding in lying if isinstance(sharding, NamedSharding)}
    around = jax.sharding.get_abstract_mesh()
    candidates = [*sorted(meshes, key=lambda mesh: isinstance(mesh, AbstractMesh)), around]
    return next((mesh for mesh in candidates if mesh.size > 1), None)


def on_mesh(fn: Callable) -> Callable:
    """`fn`, traced within the mesh that its arguments lie on, where none is set: as within `jax.set_mesh`."""

    @functools.wraps(fn)
    def within(*args, **kwargs):
        mesh = mesh_of((args, kwargs)) if jax.sharding.get_abstract_mesh().empty else None
        if mesh is None:
            return fn(*args, **kwargs)
        with jax.sharding.use_abstract_mesh(mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh):
            return fn(*args, **kwargs)

    return within


def placed(tree: Any, mesh: Mesh | AbstractMesh | None) -> Any:
    """Copies arrays that are not on a mesh to all of its devices; does nothing under `jit`."""
    if not isinstance(mesh, Mesh):
        return tree
    everywhere = NamedSharding(mesh, PartitionSpec())

    def copied(x):
        there = isinstance(x, jax.core.Tracer) or getattr(x.sharding, "mesh", None) == mesh
        return x if there else jax.device_put(x, everywhere)

    return jax.tree.map(copied, tree)


def as_varying(tree: Any, axes: frozenset[str]) -> Any:
    """Marks every leaf of `tree` as varying over `axes`.

    The gradient with respect to a value that is the same on all devices is summed over devices by autodiff; with
    respect to a varying one it is the device's own, as under `pmap`.
    """

    def mark(leaf):
        missing = tuple(sorted(axes - varying_in(jax.typeof(leaf))))
        return lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(mark, tree)


def zeros_of(fn: Callable, *args: Any) -> Any:
    """Zeros shaped, and varying over mesh axes, like the result of `fn(*args)`: the start of a sum in a scan."""

    def zeros(aval):
        return as_varying(lying_as(jnp.zeros(aval.shape, aval.dtype), aval), varying_in(aval))

    return jax.tree.map(zeros, jax.eval_shape(fn, *args))


def device_key(key: jax.Array, axes: frozenset[str]) -> jax.Array:
    """A PRNG key of this device: its position on the mesh axes `axes` is folded in.

    Under `pmap`, and under `shard_map` without its check, nothing tells over which axes a value varies: all count.
    """
    bound = device_axes()
    if bound and not varying_axes(lax.axis_index(bound[0])):
        axes = frozenset(bound)
    return jax.random.fold_in(key, lax.axis_index(tuple(sorted(axes)))) if axes else key


def axis_size(axis_name: AxisName) -> int | None:
    """The number of devices along a named axis; None where no such axis is bound."""
    try:
        return lax.axis_size(axis_name)
    except NameError:
        return None


def dividing_axes(length: int) -> tuple[str, ...]:
    """Returns the axes of the mesh, but manual ones, whose devices can share `length` examples equally."""
    mesh, devices = jax.sharding.get_abstract_mesh(), 1
    axes: list[str] = []
    for name, size, kind in zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True):
        if kind != AxisType.Manual and size > 1 and length % (devices * size) == 0:
            axes, devices = [*axes, name], devices * size
    return tuple(axes)


def sum_of_parts(of: Callable[..., Any], limit: int, *arrays: jax.Array) -> Any:
    """The sum of a function of equal parts of the examples, of at most `limit` examples each, one part at a time.

    A part has every `count`-th example, so that where the examples are spread over devices, so are those of each part.
    How arrays lie on automatic axes is not known here. Left to XLA, a loop over parts of a batch that is spread over
    devices has a message in every turn, or gathers the batch. So under `jax.set_mesh` every device takes its share of
    the examples, which are where they were if the batch is spread over these axes, and sends one sum.
    """
    if limit >= arrays[0].shape[0]:
        return of(*arrays)
    names = dividing_axes(arrays[0].shape[0])

    def summed(*arrays):
        n = arrays[0].shape[0]
        count = n // next(size for size in range(min(n, limit), 0, -1) if n % size == 0)
        if count == 1:
            return of(*arrays)
        parts = [x.reshape(n // count, count, *x.shape[1:]) for x in arrays]

        def take(k):
            return [lax.dynamic_index_in_dim(x, k, axis=1, keepdims=False) for x in parts]

        start = zeros_of(lambda: of(*take(0)))
        return lax.scan(lambda total, k: (total + of(*take(k)), None), start, jnp.arange(count))[0]

    if not names:
        return summed(*arrays)
    sums = jax.shard_map(
        lambda *shares: lax.psum(summed(*shares), names), in_specs=PartitionSpec(names), out_specs=PartitionSpec(),
        axis_names=set(names),
    )  # fmt: skip
    return sums(*arrays)


def explicit_axes() -> tuple[str, ...]:
    """The explicit axes of the mesh: types of arrays tell how they are split over these."""
    return _axes_of(AxisType.Explicit)


def explicit_part(spec: PartitionSpec) -> PartitionSpec:
    """A spec without the axes that are not explicit."""
    explicit = explicit_axes()
    return PartitionSpec(*(tuple(name for name in axis_names(part) if name in explicit) or None for part in spec))


def whole(fn: Callable, like: Any = None) -> Callable:
    """Returns `fn`, run with explicit axes of the mesh made automatic, so that sums over split axes need no sharding.

    Its results are laid out as `like`, arrays or `PartitionSpec`s; without it every device has the whole.
    """
    if not explicit_axes():
        return fn

    def spec(x):
        return explicit_part(x) if isinstance(x, PartitionSpec) else jax.typeof(x).sharding.spec

    lies = jax.tree.map(spec, PartitionSpec() if like is None else like, is_leaf=lambda x: isinstance(x, PartitionSpec))
    return jax.sharding.auto_axes(fn, axes=explicit_axes(), out_sharding=lies)


def replicated(tree: Any) -> Any:
    """Arrays with a copy on every device, where a mesh with explicit axes says that they are split."""

    def copied(x):
        sharding = jax.typeof(x).sharding
        return jax.reshard(x, NamedSharding(sharding.mesh, PartitionSpec())) if any(sharding.spec) else x

    return jax.tree.map(copied, tree)


def lying_as(tree: Any, like: Any) -> Any:
    """Lays arrays out like those of `like`, where a mesh has explicit axes."""

    def resharded(x, like):
        sharding = (like if isinstance(like, jax.ShapeDtypeStruct) else jax.typeof(like)).sharding
        return jax.reshard(x, sharding) if sharding is not None and any(sharding.spec) else x

    return jax.tree.map(resharded, tree, like)


def split_along(axes: AxisName | None, shape: tuple[int, ...], position: int) -> NamedSharding | None:
    """Returns the sharding of an array with one axis split over explicit mesh axes; None if they do not divide it."""
    mesh = jax.sharding.get_abstract_mesh()
    if axes is None or shape[position] % math.prod(mesh.shape[name] for name in axis_names(axes)):
        return None
    return NamedSharding(mesh, PartitionSpec(*(axes if k == position else None for k in range(len(shape)))))
