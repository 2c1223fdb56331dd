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
from jax import Array, lax
from jax.extend.core import JaxprEqn

from kfac._capture.parameters import PARAMETERS, chosen
from kfac._capture.replay import rewrite
from kfac._statistics.convolution import padded


def fast_in_loops(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return `fn` with fast convolutions, for the body of a loop. On backends other than the CPU, return `fn` itself.

    The result is not meant to be differentiated. Convolutions inside a `custom_vjp` or `jax.checkpoint` stay unchanged.
    """
    if jax.default_backend() != "cpu":
        return fn
    return rewrite(fn, "conv_general_dilated", _convolution)


def _channels_last(batch: int, channels: int, *spatial: int) -> tuple[int, ...]:
    return (batch, *spatial, channels)


def _convolution(eqn: JaxprEqn, image: Array, kernel: Array) -> Array:
    """Compute a convolution in the fast layout, with transposes of its operands and of its result.

    In this layout, images have the batch first and the channels last. Kernels have the window first, then input
    channels, then output channels.
    """
    options = chosen(eqn, PARAMETERS["conv_general_dilated"])
    numbers = options["dimension_numbers"]
    image = image.transpose(_channels_last(*numbers.lhs_spec))
    out_channels, in_channels, *window = numbers.rhs_spec
    kernel = kernel.transpose(*window, in_channels, out_channels)
    spatial = range(image.ndim - 2)
    last = (0, image.ndim - 1, *range(1, image.ndim - 1))
    options["dimension_numbers"] = lax.ConvDimensionNumbers(
        last, (image.ndim - 1, image.ndim - 2, *spatial), last
    )
    if math.prod(kernel.shape[:-2]) > math.prod(image.shape[1:-1]):
        # XLA would exchange image and kernel, and has no fast code for the result. If the image is already padded, XLA
        # sees no gain in the exchange. The barrier keeps XLA from undoing the padding.
        image = padded(image, options["padding"], options["lhs_dilation"])
        image = lax.optimization_barrier(image)
        options["padding"] = [(0, 0)] * len(spatial)
        options["lhs_dilation"] = [1] * len(spatial)
    out = lax.conv_general_dilated(image, kernel, **options)
    order = _channels_last(*numbers.out_spec)
    return out.transpose(list(map(order.index, range(image.ndim))))
