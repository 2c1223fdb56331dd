"""Gradients and Kronecker factors in one backward pass, and their accumulation over micro-batches."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kfac._capture.convolutions_in_loops import fast_in_loops
from kfac._capture.find_layers import paths_and_shapes, resolve
from kfac._capture.outputs import Draw, checked_key, keys_of, with_own_key
from kfac._capture.replay import replay
from kfac._capture.trace import trace
from kfac._layers import Layers
from kfac._optimizer.eigenbasis import check_basis
from kfac._varying import as_varying, own_key, varying_axes, zeros_of


def value_and_grad(
    loss_fn: Callable[..., Any],
    layers: Layers,
    *,
    has_aux: bool = False,
    fisher: str = "empirical",
    num_examples: int | None = None,
    subsample: int = 1,
    ekfac: bool = False,
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
      fisher: `"empirical"`: statistics of the gradients of the loss itself. `"sampled"`: of the gradients of the mean
        over `n` of `-log p(y | output)`, for targets `y` drawn from the distribution that the network predicts at the
        outputs that `loss_fn` marks with `kfac.output`: one draw of an unbiased estimate of the true Fisher matrix
        (Martens 2020). It costs a second backward pass.
      num_examples: `n` of the batch that one call sees. By default the size of the marked output without its axis of
        features, and without one the leading dimension of the layers' inputs.
      subsample: Kronecker factors come from every `subsample`-th example, which costs so many times less and is
        unbiased where the order of the examples means nothing. Layers must see the examples on an axis of their own;
        where the tokens of a marked output `[sequences, tokens, features]` are examples, whole sequences are taken.
        The gradients, and the unit-wise and diagonal blocks, which are cheap, come from all of them.
      ekfac: for an optimizer with `inverse="ekfac"`: `moments` beside `A` and `G`, the second moments of per-example
        gradients in an eigenbasis, `n sum_i (Q_G^T (sum_p g_ip a_ip^T) Q_A)^2` with the gradients `g_ip` of the mean
        loss (George et al. 2018). Where examples have several positions, layers must see them on an axis of their own.

    Returns:
      A function of the arguments of `loss_fn` that returns `(value, grads, factors)`, where `value` is `loss` or
      `(loss, aux)`, `grads` has the structure of the parameters and `factors` is a `Factors`. With `"sampled"` it takes
      `key`, a PRNG key, as a further keyword, which `loss_fn` does not see. The same key draws the same targets, but on
      every device others: the device's position on the axes over which the arguments vary is folded into it (under
      `jax.pmap`, and `shard_map` with `check_vma=False`, its position on all axes). With `ekfac` it takes `basis`, what
      `kfac.eigenbasis` returns, likewise.

    Raises:
      ValueError: an argument is out of range; when the function is traced: it has other layers than `layers`, or the
        number of examples is not clear, or with `subsample` or `ekfac` a layer cannot tell them from positions, or with
        `subsample` it sees too few, or `basis` is missing or no such one, or `key` is missing, no key, or given
        where nothing is drawn, or with `"sampled"` the loss depends on a parameter but no marked output does.
    """
    if not isinstance(layers, Layers):
        raise ValueError(f"layers must be what kfac.find_layers returns, but is {type(layers).__name__}")
    if fisher not in ("empirical", "sampled"):
        raise ValueError(f"fisher must be 'empirical' or 'sampled', but is {fisher!r}")
    sampled = fisher == "sampled"
    if not isinstance(ekfac, bool):
        raise ValueError(f"ekfac must be True or False, but is {ekfac!r}")

    if isinstance(subsample, bool) or not isinstance(subsample, int) or subsample < 1:
        raise ValueError(f"subsample must be a positive int, but is {subsample!r}")

    @functools.wraps(loss_fn)
    def with_factors(params, *args, **kwargs):
        if sampled:
            key = checked_key(kwargs.pop("key", None))
        elif "key" in kwargs and not _takes(loss_fn, "key"):
            raise ValueError("key is for fisher='sampled': with 'empirical' nothing is drawn, and loss_fn takes no key")
        if ekfac:
            basis = kwargs.pop("basis", None)
        elif "basis" in kwargs and not _takes(loss_fn, "basis"):
            raise ValueError("basis is for ekfac=True: else nothing is expressed in it, and loss_fn takes no basis")
        # With replicated parameters, shard_map would sum gradients and statistics over devices inside autodiff.
        axes = varying_axes([x for x in jax.tree.leaves((args, kwargs)) if isinstance(x, jax.Array)])
        params = as_varying(params, axes | varying_axes(params))
        names, shapes = paths_and_shapes(params)
        traced = trace(loss_fn, has_aux, params, args, kwargs)
        resolved = resolve(traced, names, shapes, layers, num_examples, subsample=subsample, ekfac=ekfac)
        check_same(layers, resolved.layers)
        if ekfac:
            check_basis(basis, resolved.layers)
        flat, treedef = jax.tree.flatten(params)
        probes = jax.tree.map(lambda probe: jnp.zeros(probe.shape, probe.dtype), resolved.probes)
        probes = as_varying(probes, axes | varying_axes(params))
        closed = traced.closed

        entries: dict[Any, Any] = {}
        for name, spread in resolved.spread.items():
            entries |= spread(basis[name])
        if sampled:
            skipped = {path for layer in layers if layer.kind == "skipped" for path in layer.params}
            resolved.marks.require("fisher='sampled'", names, skipped)
            resolved.marks.place(resolved.plan, lambda mark: Draw(mark.likelihood, resolved.num_examples))
            key = own_key(key, axes | varying_axes(closed.consts))
            entries |= keys_of(resolved.marks, key)

        def losses_of(flat, probes):
            arguments = [*flat, *traced.arrays]
            outs, drawn = replay(closed.jaxpr, closed.consts, arguments, resolved.plan, {**probes, **entries})
            likelihoods = [jnp.sum(x) for x in drawn.values()]
            return (outs[0], likelihoods), outs

        # One forward pass, a backward pass for the loss, and another for the likelihood of what was drawn.
        (value, zeros), pull_back, outs = jax.vjp(losses_of, flat, probes, has_aux=True)
        grads, sums = pull_back((jnp.ones_like(value), zeros))
        curvature = grads
        if sampled:
            curvature, sums = pull_back((jnp.zeros_like(value), jax.tree.map(jnp.ones_like, zeros)))
        loss, aux = traced.rebuild(outs)
        factors = resolved.factors(sums, curvature)
        return (loss, aux) if has_aux else loss, jax.tree.unflatten(treedef, grads), factors

    return with_factors


def _takes(loss_fn: Callable[..., Any], name: str) -> bool:
    try:
        parameters = inspect.signature(loss_fn).parameters.values()
    except (TypeError, ValueError):  # a callable that does not tell
        return True
    return any(p.name == name or p.kind is p.VAR_KEYWORD for p in parameters)


def check_same(expected: Layers, found: Layers) -> None:
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
        The exception is the keyword `key`: if it is a PRNG key, the number of the part is folded into it.

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

        def one(numbered):
            number, parts = numbered
            full = list(args)
            for k, part in zip(positions, parts, strict=True):
                full[k] = part
            return fn(*full, **with_own_key(kwargs, number))

        numbered = jnp.arange(num_microbatches), parts
        first = jax.tree.map(lambda x: x[0], numbered)
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

        total, _ = lax.scan(step, jax.tree.map(widen, zeros), numbered)
        return jax.tree.map(lambda t, x: (t / num_microbatches).astype(x.dtype), total, zeros)

    return accumulated


def _parts(x: Any, count: int, argnum: int) -> jax.Array:
    shape = jnp.shape(x)
    if not shape or shape[0] % count:
        what = f"leading axis of length {shape[0]}" if shape else "no leading axis"
        raise ValueError(f"num_microbatches={count} does not divide argument {argnum}: an array in it has {what}")
    return jnp.reshape(x, (count, shape[0] // count, *shape[1:]))
