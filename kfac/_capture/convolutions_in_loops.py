"""Speed up convolutions inside loops on CPUs.

XLA's CPU backend has fast code for convolutions with a single layout (`NHWC` images, `HWIO` kernels). It converts other
layouts to this layout, but only in the outermost computation of a program. The gradients of a convolution have other
layouts, so they are slow inside a `lax.scan` (https://github.com/jax-ml/jax/issues/12868). This module converts the
layouts before XLA sees the convolutions.

Convolutions whose image is smaller than the kernel are slow everywhere, because XLA exchanges image and kernel. This
module pads such images beforehand.
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
    """Return `fn` with fast convolutions, for the body of a loop. On backends other than the CPU, return `fn` itself.

    The result is not meant to be differentiated. Convolutions inside a `custom_vjp` or `jax.checkpoint` stay unchanged.
    """
    return (
        rewrite(fn, {"conv_general_dilated": _convolution})
        if jax.default_backend() == "cpu"
        else fn
    )


def _convolution(eqn: Any, image: jax.Array, kernel: jax.Array) -> jax.Array:
    """Compute a convolution in the fast layout, with transposes of its operands and of its result.

    In this layout, images have the batch first and the channels last. Kernels have the window first, then input
    channels, then output channels.
    """
    numbers = parameter(eqn, "dimension_numbers")
    image_order = (numbers.lhs_spec[0], *numbers.lhs_spec[2:], numbers.lhs_spec[1])
    kernel_order = (*numbers.rhs_spec[2:], numbers.rhs_spec[1], numbers.rhs_spec[0])
    out_order = (numbers.out_spec[0], *numbers.out_spec[2:], numbers.out_spec[1])
    rank = image.ndim
    last = (0, rank - 1, *range(1, rank - 1))
    canonical = lax.ConvDimensionNumbers(
        last, (rank - 1, rank - 2, *range(rank - 2)), last
    )
    named = (
        "window_strides",
        "padding",
        "lhs_dilation",
        "rhs_dilation",
        "feature_group_count",
        "batch_group_count",
    )
    options = {
        key: parameter(eqn, key)
        for key in (*named, "precision", "preferred_element_type")
    }
    image, kernel = image.transpose(image_order), kernel.transpose(kernel_order)
    if math.prod(kernel.shape[:-2]) > math.prod(image.shape[1:-1]):
        # XLA would exchange image and kernel, and has no fast code for the result. If the image is already padded, XLA
        # sees no gain in the exchange. The barrier keeps XLA from undoing the padding.
        image = lax.optimization_barrier(
            padded(image, options["padding"], options["lhs_dilation"])
        )
        options |= {"padding": [(0, 0)] * (rank - 2), "lhs_dilation": [1] * (rank - 2)}
    out = lax.conv_general_dilated(
        image, kernel, dimension_numbers=canonical, **options
    )
    return out.transpose([out_order.index(k) for k in range(rank)])
