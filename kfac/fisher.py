"""Gradients and Kronecker factors in one backward pass, and their accumulation over micro-batches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kfac.collectives import as_varying, varying_axes, zeros_of
from kfac.convolutions import fast_in_loops
from kfac.finding import paths_and_shapes, resolve
from kfac.layers import Layers
from kfac.replay import replay
from kfac.tracing import trace


def value_and_grad(
    loss_fn: Callable[..., Any],
    layers: Layers,
    *,
    has_aux: bool = False,
    fisher: str = "empirical",
    num_examples: int | None = None,
) -> Callable[..., tuple[Any, Any, Any]]:
    """`jax.value_and_grad`, with the statistics of every layer beside the gradients.

    For inputs `a` of shape `[n, s, d_in]` and gradients `g` of the mean loss `[n, s, d_out]`, `n` examples and `s`
    positions that share the weight, the factors of a layer are `A = (1/n) sum a a^T` and `G = (n/s) sum g g^T`
    (Grosse & Martens 2016; Osawa et al. 2019). Scales, shifts and other vectors get second moments of their per-example
    gradients. Operands keep the compute dtype of the layer, sums are in float32 (float64 for float64 operands).

    The gradients are those of `jax.value_and_grad`. Inside `jax.shard_map` and `jax.pmap` loss, gradients and factors
    are this device's own: average the gradients with `lax.pmean`, leave the factors to the optimizer (`axis_name=`).

    Args:
      loss_fn: `loss_fn(params, *args, **kwargs)` returns the *mean* loss over this device's own examples, a real
        scalar; with `has_aux`, a pair `(loss, aux)`.
      layers: what `find_layers` returned for this function.
      has_aux: whether `loss_fn` returns a pair.
      fisher: `"empirical"`: statistics of the gradients of the loss itself.
      num_examples: `n` of the batch that one call sees. By default the leading dimension of the layers' inputs.

    Returns:
      A function of the arguments of `loss_fn` that returns `(value, grads, factors)`, where `value` is `loss` or
      `(loss, aux)`, `grads` has the structure of the parameters and `factors` is a `Factors`.

    Raises:
      ValueError: an argument is out of range; when the function is traced: it has other layers than `layers`, or the
        number of examples is not clear.
    """
    if not isinstance(layers, Layers):
        raise ValueError(f"layers must be what kfac.find_layers returns, but is {type(layers).__name__}")
    if fisher != "empirical":
        raise ValueError(f"fisher must be 'empirical', but is {fisher!r}")

    @functools.wraps(loss_fn)
    def with_factors(params, *args, **kwargs):
        # With replicated parameters, shard_map would sum gradients and statistics over devices inside autodiff.
        axes = varying_axes([x for x in jax.tree.leaves((args, kwargs)) if isinstance(x, jax.Array)])
        params = as_varying(params, axes | varying_axes(params))
        names, shapes = paths_and_shapes(params)
        traced = trace(loss_fn, has_aux, params, args, kwargs)
        resolved = resolve(traced, names, shapes, layers, num_examples)
        _check_same(layers, resolved.layers)
        flat, treedef = jax.tree.flatten(params)
        probes = jax.tree.map(lambda probe: jnp.zeros(probe.shape, probe.dtype), resolved.probes)
        probes = as_varying(probes, axes | varying_axes(params))
        closed = traced.closed

        def loss_of(flat, probes):
            outs = replay(closed.jaxpr, closed.consts, [*flat, *traced.arrays], resolved.plan, probes)
            return outs[0], outs

        (_, outs), (grads, sums) = jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=True)(flat, probes)
        loss, aux = traced.rebuild(outs)
        factors = resolved.factors(sums, grads)
        return (loss, aux) if has_aux else loss, jax.tree.unflatten(treedef, grads), factors

    return with_factors


def _check_same(expected: Layers, found: Layers) -> None:
    if expected == found:
        return
    if expected.paths != found.paths:
        differing = sorted(set(expected.paths) ^ set(found.paths))
        raise ValueError(
            f"the parameters are not those that `layers` was found with; they differ in {', '.join(differing[:5])}"
        )
    for a, b in zip(expected, found, strict=False):
        if a != b:
            raise ValueError(
                f"loss_fn has other layers than `layers`: expected {a.describe()}, found {b.describe()}. Call "
                "find_layers with the same function and with arguments of the same kind."
            )
    raise ValueError(f"loss_fn has {len(found)} layers, but `layers` has {len(expected)}")


def microbatch(
    fn: Callable[..., Any], num_microbatches: int, *, batch_argnums: int | Sequence[int] = 1
) -> Callable[..., Any]:
    """Evaluates `fn` on equal parts of a batch, one after the other, and averages what it returns.

    For the mean loss of a batch the averages of loss and gradients over its parts are those of the whole, and so are
    those of the factors, which are never formed from averaged gradients. Memory does not grow with the number of parts.
    With a train-mode batch norm each part is normalised by its own statistics.

    Args:
      fn: a function such as `value_and_grad` returns, `fn(params, batch, ...)`.
      num_microbatches: number of parts, at least 1.
      batch_argnums: positions of the arguments to split, along the leading axis of each of their leaves. The others,
        and keyword arguments, go to every part whole: with a PRNG key among them all parts see the same random numbers.

    Returns:
      A function with the arguments and results of `fn`. Real results are averaged in float32 (float64 where they are
      float64) and keep their dtype.

    Raises:
      ValueError: `num_microbatches` is not a positive int; when called: it does not divide a leading axis, leading axes
        differ, or `fn` returns something that is not real and so has no average.
    """
    if isinstance(num_microbatches, bool) or not isinstance(num_microbatches, int) or num_microbatches < 1:
        raise ValueError(f"num_microbatches must be a positive int, but is {num_microbatches!r}")
    argnums = (batch_argnums,) if isinstance(batch_argnums, int) else tuple(batch_argnums)

    @functools.wraps(fn)
    def accumulated(*args, **kwargs):
        for k in argnums:
            if not -len(args) <= k < len(args):
                raise ValueError(f"batch_argnums has {k}, but there are {len(args)} positional arguments")
        positions = sorted({k % len(args) for k in argnums})
        lengths = {jnp.shape(x)[0]: None for k in positions for x in jax.tree.leaves(args[k]) if jnp.shape(x)}
        if len(lengths) > 1:
            raise ValueError(
                f"the arrays to split have leading axes of different lengths {', '.join(map(str, lengths))}: part k of "
                "one would not belong to part k of another. Pass what all parts share as another argument."
            )
        parts = [jax.tree.map(lambda x, k=k: _parts(x, num_microbatches, k), args[k]) for k in positions]

        def one(parts):
            full = list(args)
            for k, part in zip(positions, parts, strict=True):
                full[k] = part
            return fn(*full, **kwargs)

        first = jax.tree.map(lambda x: x[0], parts)
        zeros = zeros_of(one, first)
        for path, leaf in jax.tree_util.tree_flatten_with_path(zeros)[0]:
            if not jnp.issubdtype(leaf.dtype, jnp.inexact):
                raise ValueError(
                    f"microbatch averages results, but result {jax.tree_util.keystr(path)} has dtype {leaf.dtype}: "
                    "convert it to a float in loss_fn"
                )

        def widen(x):
            return x.astype(jnp.promote_types(x.dtype, jnp.float32))

        evaluate = fast_in_loops(one)

        def step(total, part):
            return jax.tree.map(lambda t, x: t + x.astype(t.dtype), total, evaluate(part)), None

        total, _ = lax.scan(step, jax.tree.map(widen, zeros), parts)
        return jax.tree.map(lambda t, x: (t / num_microbatches).astype(x.dtype), total, zeros)

    return accumulated


def _parts(x: Any, count: int, argnum: int) -> jax.Array:
    shape = jnp.shape(x)
    if not shape or shape[0] % count:
        what = f"leading axis of length {shape[0]}" if shape else "no leading axis"
        raise ValueError(f"num_microbatches={count} does not divide argument {argnum}: an array in it has {what}")
    return jnp.reshape(x, (count, shape[0] // count, *shape[1:]))
