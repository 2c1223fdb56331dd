"""Statistics of each device's share of a batch, which stay there until they go to their owners."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from kfac._capture.microbatch import check_argnums, leading_lengths
from kfac._capture.outputs import with_own_key
from kfac._checks import check_axis_name, check_type
from kfac._factors import Shares
from kfac._varying import AxisName, as_varying, axis_names, lying_as, whole_along


def data_parallel(
    fn: Callable[..., Any], mesh: Mesh, axis_name: AxisName | None = None, *, batch_argnums: int | Sequence[int] = 1
) -> Callable[..., Any]:
    """Evaluates `fn` on every device's share of a batch, for plain `jit` over a mesh.

    Without it XLA adds up the statistics of all devices, and every device gets all of them, whole. With it they stay
    where they were taken, and `update` sends each device the triangles of the blocks that it owns, as inside of
    `jax.shard_map`::

        measure = kfac.data_parallel(kfac.value_and_grad(loss_fn, layers), mesh)
        loss, grads, factors = measure(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params, factors=factors)

    with `tx` of `Distribution(mesh=mesh)`. It is for the mean of a loss over examples; a batch norm in it normalises
    each share by itself. Along `axis_name` parameters should be whole on every device: others are gathered first, all
    at once. How they lie along further axes of the mesh, as in tensor parallelism, is left to XLA.

    Args:
      fn: what `value_and_grad` or `microbatch` returned, `fn(params, batch, ...)`. A `num_examples=` of it is that of
        the examples of one device.
      mesh: as given to the `Distribution`.
      axis_name: the axis or axes that the batch is spread over; None for all.
      batch_argnums: positions of what is spread, along the leading axis of each leaf. All devices get the other
        arguments, and keyword arguments, whole; into a PRNG key `key=` or `fisher_key=` the device's number is folded.

    Returns:
      A function with the arguments of `fn`. Values and gradients are averaged over devices; the third result is a
      `Shares`, which only `update` of an optimizer with this mesh takes. `Shares.average()` are the `Factors` of the
      whole batch.

    Raises:
      ValueError: `axis_name` is not one of the axes of `mesh`; when called: the devices do not divide a leading axis,
        or `fn` returns something that is not real and so has no average.
    """
    check_type("mesh", mesh, Mesh, "a jax.sharding.Mesh")
    check_axis_name(axis_name)
    axes = tuple(mesh.axis_names) if axis_name is None else axis_names(axis_name)
    if not set(axes) <= set(mesh.axis_names):
        raise ValueError(f"axis_name must be among the axes of mesh, {mesh.axis_names}, but is {axis_name!r}")
    argnums, devices = check_argnums(batch_argnums), math.prod(mesh.shape[name] for name in axes)
    same, spread = PartitionSpec(), PartitionSpec(axes)

    def local(fixed, args, kwargs):
        value, grads, factors = fn(*args, **fixed, **with_own_key(kwargs, lax.axis_index(axes)))
        value = jax.tree.map(jnp.asarray, value)
        for leaf in jax.tree.leaves((value, grads)):
            if not jnp.issubdtype(leaf.dtype, jnp.inexact):
                raise ValueError(
                    f"data_parallel averages results over devices, but one has dtype {leaf.dtype}: convert it to a "
                    "float in loss_fn, or leave it out"
                )
        value, grads = lax.pmean(as_varying((value, grads), frozenset(axes)), axes)
        return value, grads, Shares(jax.tree.map(lambda x: x[None], as_varying(factors, frozenset(axes))), axes)

    @functools.wraps(fn)
    def shared_out(*args, **kwargs):
        for k in argnums:
            if not -len(args) <= k < len(args):
                raise ValueError(f"batch_argnums has {k}, but there are {len(args)} positional arguments")
        split = {k % len(args) for k in argnums}
        for length in leading_lengths([args[k] for k in split]):
            if length % devices:
                raise ValueError(
                    f"{devices} devices of the axes {axes} do not divide a leading axis of length {length}: give all "
                    "as many examples, or name what they all get whole by leaving it out of batch_argnums="
                )
        # Others, such as flags, stay what they are.
        arrays = {k: x for k, x in kwargs.items() if all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(x))}
        fixed = {name: x for name, x in kwargs.items() if name not in arrays}
        specs = tuple(spread if k in split else same for k in range(len(args)))
        value, grads, shares = jax.shard_map(
            functools.partial(local, fixed),
            mesh=mesh,
            in_specs=(specs, same),
            out_specs=(same, same, spread),
            axis_names=set(axes),
        )(tuple(x if k in split else whole_along(x, axes) for k, x in enumerate(args)), whole_along(arrays, axes))
        return value, lying_as(grads, args[0]), shares

    return shared_out
