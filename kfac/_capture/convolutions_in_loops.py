"""Convolutions inside loops, on CPUs.

XLA's CPU backend has fast code for convolutions of one layout (`NHWC` images, `HWIO` kernels) and brings others to it,
but only in the outermost computation of a program. The gradients of a convolution have other layouts, so within a
`lax.scan` they are slow (https://github.com/jax-ml/jax/issues/12868). Here they are brought to that layout
before XLA sees them.

Images smaller than the kernel are slow everywhere (XLA exchanges the two); they are padded beforehand here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from kfac._capture.parameters import parameter
from kfac._capture.replay import rewrite
from kfac._statistics.convolution import padded


def fast_in_loops(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, to be called in the body of a loop; on other backends than the CPU it is `fn` itself.

    The result is not meant to be differentiated: what is inside a `custom_vjp` or `jax.checkpoint` is left as it is.
    """
    return rewrite(fn, {"conv_general_dilated": _convolution}) if jax.default_backend() == "cpu" else fn


def _convolution(eqn: Any, image: jax.Array, kernel: jax.Array) -> jax.Array:
    """The convolution, by way of transposes, with batch first, channels last, and input before output channels."""
    numbers = parameter(eqn, "dimension_numbers")
    image_order = (numbers.lhs_spec[0], *numbers.lhs_spec[2:], numbers.lhs_spec[1])
    kernel_order = (*numbers.rhs_spec[2:], numbers.rhs_spec[1], numbers.rhs_spec[0])
    out_order = (numbers.out_spec[0], *numbers.out_spec[2:], numbers.out_spec[1])
    rank = image.ndim
    last = (0, rank - 1, *range(1, rank - 1))
    canonical = lax.ConvDimensionNumbers(last, (rank - 1, rank - 2, *range(rank - 2)), last)
    named = ("window_strides", "padding", "lhs_dilation", "rhs_dilation", "feature_group_count", "batch_group_count")
    options = {key: parameter(eqn, key) for key in (*named, "precision", "preferred_element_type")}
    image, kernel = image.transpose(image_order), kernel.transpose(kernel_order)
    if math.prod(kernel.shape[:-2]) > math.prod(image.shape[1:-1]):
        # XLA would exchange image and kernel, and have no fast code for the result. Around an
        # image that is padded already it sees no gain in that; without the barrier it would undo the padding.
        image = lax.optimization_barrier(padded(image, options["padding"], options["lhs_dilation"]))
        options |= {"padding": [(0, 0)] * (rank - 2), "lhs_dilation": [1] * (rank - 2)}
    out = lax.conv_general_dilated(image, kernel, dimension_numbers=canonical, **options)
    return out.transpose([out_order.index(k) for k in range(rank)])
