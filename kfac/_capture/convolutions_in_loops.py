"""Convolutions inside loops, on CPUs.

XLA's CPU backend has fast code for convolutions of one layout (`NHWC` images, `HWIO` kernels) and brings others to it,
but only in the outermost computation of a program. The gradients of a convolution have other layouts, so within a
`lax.scan` they run 50 times slower (https://github.com/jax-ml/jax/issues/12868). Here they are brought to that layout
before XLA sees them.

Images smaller than the kernel are slow everywhere (XLA exchanges the two); they are padded beforehand here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex

from kfac._capture.replay import evaluate
from kfac._capture.trace import CALLS, inner_jaxpr


def fast_in_loops(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, to be called in the body of a loop; on other backends than the CPU it is `fn` itself.

    The result is not meant to be differentiated: what is inside a `custom_vjp` or `jax.checkpoint` is left as it is.
    """
    if jax.default_backend() != "cpu":
        return fn

    def rewritten(*args):
        closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
        outs = _evaluate(closed.jaxpr, closed.consts, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), outs)

    return rewritten


def _evaluate(jaxpr: jex.Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(var):
        return var.val if isinstance(var, jex.Literal) else env[var]

    for eqn in jaxpr.eqns:
        values = [read(var) for var in eqn.invars]
        name = eqn.primitive.name
        if name == "conv_general_dilated":
            outs = [_convolution(eqn.params, *values)]
        elif name in CALLS:
            outs = _evaluate(*inner_jaxpr(eqn), values)
        elif name == "scan":
            outs = _scan(eqn, values)
        else:
            outs = evaluate(jaxpr, eqn, values)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(var) for var in jaxpr.outvars]


def _scan(eqn: Any, values: Sequence[Any]) -> list[Any]:
    params, (jaxpr, consts) = eqn.params, inner_jaxpr(eqn)
    first, last = params["num_consts"], params["num_consts"] + params["num_carry"]

    def body(carry, xs):
        outs = _evaluate(jaxpr, consts, [*values[:first], *carry, *xs])
        return outs[: last - first], outs[last - first :]

    options = {key: params[key] for key in ("length", "reverse", "unroll")}
    carry, ys = lax.scan(body, list(values[first:last]), list(values[last:]), **options)
    return [*carry, *ys]


def _convolution(params: dict[str, Any], image: jax.Array, kernel: jax.Array) -> jax.Array:
    """The convolution, by way of transposes, with batch first, channels last, and input before output channels."""
    numbers = params["dimension_numbers"]
    image_order = (numbers.lhs_spec[0], *numbers.lhs_spec[2:], numbers.lhs_spec[1])
    kernel_order = (*numbers.rhs_spec[2:], numbers.rhs_spec[1], numbers.rhs_spec[0])
    out_order = (numbers.out_spec[0], *numbers.out_spec[2:], numbers.out_spec[1])
    rank = image.ndim
    last = (0, rank - 1, *range(1, rank - 1))
    canonical = lax.ConvDimensionNumbers(last, (rank - 1, rank - 2, *range(rank - 2)), last)
    named = ("window_strides", "padding", "lhs_dilation", "rhs_dilation", "feature_group_count", "batch_group_count")
    options = {key: params[key] for key in (*named, "precision", "preferred_element_type")}
    image, kernel = image.transpose(image_order), kernel.transpose(kernel_order)
    if math.prod(kernel.shape[:-2]) > math.prod(image.shape[1:-1]):
        # XLA would exchange image and kernel, and have no fast code for the result: twenty times slower. Around an
        # image that is padded already it sees no gain in that; without the barrier it would undo the padding.
        pads = [
            (low, high, step - 1) for (low, high), step in zip(options["padding"], options["lhs_dilation"], strict=True)
        ]
        image = lax.pad(image, jnp.zeros((), image.dtype), [(0, 0, 0), *pads, (0, 0, 0)])
        image = lax.optimization_barrier(image)
        options |= {"padding": [(0, 0)] * len(pads), "lhs_dilation": [1] * len(pads)}
    out = lax.conv_general_dilated(image, kernel, dimension_numbers=canonical, **options)
    return out.transpose([out_order.index(k) for k in range(rank)])
