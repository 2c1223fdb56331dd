"""A function of a batch, evaluated on each device's share of it."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from kfac._capture.microbatch import check_argnums, split_positions
from kfac._capture.outputs import with_own_key
from kfac._capture.spread import dealt
from kfac._checks import check_axis_name, check_mesh
from kfac._factors import Factors, Packed
from kfac._varying import AxisName, as_varying, axis_names, lying_as, whole_along


def data_parallel(
    fn: Callable[..., Any],
    mesh: Mesh,
    axis_name: AxisName | None = None,
    *,
    batch_argnums: int | Sequence[int] | None = None,
) -> Callable[..., Any]:
    """Evaluates `fn` on every device's share of a batch, for plain `jit` over a mesh.

    As inside of `jax.shard_map`: a batch norm normalises each share by itself, every device draws its own numbers, and
    micro-batches send their statistics once. The results are those of `fn` under such a `jit` itself, else::

        measure = kfac.data_parallel(kfac.value_and_grad(loss_fn, layers), mesh)
        loss, grads, factors = measure(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params, factors=factors)

    It is for the mean of a loss over examples. Along `axis_name` parameters should be whole on every device: others are
    gathered first, all at once. How they lie along further axes of the mesh, as in tensor parallelism, is left to XLA.

    Args:
      fn: what `value_and_grad` or `microbatch` returned, `fn(params, batch, ...)`. A `num_examples=` of it is that of
        the examples of one device.
      mesh: that the batch is spread over.
      axis_name: the axis or axes that the batch is spread over; None for all.
      batch_argnums: positions of what is spread, along the leading axis of each leaf. None: the first argument after
        `params`, and no other may be as long. All devices get the other arguments, and keyword arguments, whole; PRNG
        keys among keyword arguments as in `microbatch`: each device has its own. With keys elsewhere all draw the same.

    Returns:
      A function with the arguments of `fn`, to be called under `jax.jit`. Values and gradients are averaged over
      devices, in float32 or better, and keep their dtype. The third result are the `Factors` of the whole batch, each
      device with its part of the elements.

    Raises:
      ValueError: `axis_name` is not one of the axes of `mesh`; when called: the devices do not divide a leading axis,
        leading axes differ, or `fn` returns something that is not real and so has no average, or no factors.
    """
    if not callable(fn):
        raise ValueError(f"fn must be what kfac.value_and_grad or kfac.microbatch returned, but is {fn!r}")
    check_axis_name(axis_name)
    check_mesh(mesh, axis_name)
    axes = tuple(mesh.axis_names) if axis_name is None else axis_names(axis_name)
    check_argnums(batch_argnums)
    same, spread = PartitionSpec(), PartitionSpec(axes)

    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    explicit = all(kinds[name] == AxisType.Explicit for name in axes)

    @functools.wraps(fn)
    def shared_out(*args, **kwargs):
        positions = split_positions(args, kwargs, batch_argnums)
        leaves, tree = jax.tree.flatten((args, kwargs))
        split = [k in positions for k, x in enumerate((*args, kwargs)) for _ in jax.tree.leaves(x)]
        # Others, such as flags, stay what they are.
        places = [n for n, x in enumerate(leaves) if isinstance(x, jax.Array | np.ndarray)]

        def local(arrays):
            whole = list(leaves)
            for n, x in zip(places, arrays, strict=True):
                whole[n] = x
            args, kwargs = jax.tree.unflatten(tree, whole)
            return _averaged(fn(*args, **with_own_key(kwargs, lax.axis_index(axes))), axes)

        arrays = [
            _spread(leaves[n], mesh, axes, explicit) if split[n] else whole_along(leaves[n], axes) for n in places
        ]
        specs = [spread if split[n] else same for n in places]
        value, grads, factors, packed = jax.shard_map(
            local, mesh=mesh, in_specs=(specs,), out_specs=(same, same, same, spread), axis_names=set(axes)
        )(arrays)
        if factors is not None:
            packed = jax.tree.map(lambda x: jnp.moveaxis(x, 0, -1), packed)
            factors = Factors({name: packed.get(name, block) for name, block in factors.items()})
        return value, lying_as(grads, args[0]), factors

    return shared_out


def _spread(x: Any, mesh: Mesh, axes: tuple[str, ...], explicit: bool) -> Any:
    """An array of the batch, checked, and where axes are explicit spread over them."""
    devices, shape = math.prod(mesh.shape[name] for name in axes), jnp.shape(x)
    if not shape or shape[0] % devices:
        what = f"leading axis of length {shape[0]}" if shape else "no leading axis"
        raise ValueError(
            f"{devices} devices of the axes {axes} do not divide the batch: an array in it has {what}. Give all "
            "as many examples, and what they all get whole as another argument"
        )
    return jax.reshard(x, NamedSharding(mesh, PartitionSpec(axes))) if explicit else x


def _averaged(found: Any, axes: tuple[str, ...]) -> tuple[Any, Any, Factors | None, dict[str, Packed]]:
    """What one device found, averaged over all; of what is packed, in its place None, this one's part of the elements.

    The elements are in front.
    """
    if not (isinstance(found, tuple) and len(found) == 3 and isinstance(found[2], Factors | None)):
        raise ValueError("fn must be what kfac.value_and_grad or kfac.microbatch returned, but it returned no factors")

    def mean(x):
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            raise ValueError(
                f"data_parallel averages results over devices, but one has dtype {x.dtype}: convert it to a float in "
                "loss_fn, or leave it out"
            )
        return lax.pmean(x.astype(jnp.promote_types(x.dtype, jnp.float32)), axes).astype(x.dtype)

    value, grads, factors = as_varying(jax.tree.map(jnp.asarray, found), frozenset(axes))
    packed = {name: block for name, block in (factors or {}).items() if isinstance(block, Packed)}
    # None is a tree without leaves.
    rest: Any = factors and Factors({name: None if name in packed else x for name, x in factors.items()})  # type: ignore

    def part(x):
        return jnp.moveaxis(x.astype(jnp.promote_types(x.dtype, jnp.float32)), -1, 0) / lax.axis_size(axes)

    own = {n: dataclasses.replace(x, flat=jax.tree.map(part, dealt(x.flat, axes))) for n, x in packed.items()}
    return *jax.tree.map(mean, (value, grads, rest)), own
