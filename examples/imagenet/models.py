"""Residual networks in flax linen: NHWC, parameters in float32, compute in a type of choice (float64: both)."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

# He et al. 2015: keeps the variance of activations through a ReLU; fan-out as in torchvision.
he_normal = nn.initializers.variance_scaling(2.0, "fan_out", "normal")


class ResNet(nn.Module):
    """`stages[i]` blocks of width `width * 2**i`; each stage but the first halves the image.

    `bottleneck` blocks are 1x1, 3x3, 1x1 with four times the width outside (stride in the 3x3),
    the others two 3x3. `stem` is "imagenet" (7x7 with stride 2, then max-pooling) or "small"
    (3x3). With `axis_name` batch norm averages over that axis of devices. Returns logits in the
    type of the parameters.
    """

    stages: tuple[int, ...]
    num_classes: int
    width: int = 64
    bottleneck: bool = False
    stem: str = "imagenet"
    dtype: Any = jnp.float32
    axis_name: str | None = None

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        wide = jnp.promote_types(self.dtype, jnp.float32)
        conv = partial(nn.Conv, use_bias=False, dtype=self.dtype, param_dtype=wide, kernel_init=he_normal)
        norm = partial(
            nn.BatchNorm, use_running_average=not train, momentum=0.9, epsilon=1e-5, dtype=self.dtype,
            param_dtype=wide, axis_name=self.axis_name,
        )  # fmt: skip
        x = x.astype(self.dtype)
        if self.stem == "imagenet":
            x = conv(self.width, (7, 7), (2, 2), padding=3, name="stem")(x)
            x = nn.relu(norm(name="stem_norm")(x))
            x = nn.max_pool(x, (3, 3), (2, 2), padding=((1, 1), (1, 1)))
        else:
            x = conv(self.width, (3, 3), padding=1, name="stem")(x)
            x = nn.relu(norm(name="stem_norm")(x))
        for i, blocks in enumerate(self.stages):
            for j in range(blocks):
                x = Block(
                    self.width * 2**i, 2 if i > 0 and j == 0 else 1, self.bottleneck, conv, norm,
                    name=f"stage{i + 1}_block{j + 1}",
                )(x)  # fmt: skip
        x = jnp.mean(x, axis=(1, 2))
        head = nn.Dense(self.num_classes, dtype=self.dtype, param_dtype=wide, name="head")
        return head(x).astype(wide)


class Block(nn.Module):
    """A residual block; the shortcut is a 1x1 convolution where the shape changes."""

    width: int
    stride: int
    bottleneck: bool
    conv: Any
    norm: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        strides = (self.stride, self.stride)
        if self.bottleneck:
            out = 4 * self.width
            y = nn.relu(self.norm(name="norm1")(self.conv(self.width, (1, 1), name="conv1")(x)))
            y = self.conv(self.width, (3, 3), strides, padding=1, name="conv2")(y)
            y = nn.relu(self.norm(name="norm2")(y))
            y = self.conv(out, (1, 1), name="conv3")(y)
            last = "norm3"
        else:
            out = self.width
            y = self.conv(out, (3, 3), strides, padding=1, name="conv1")(x)
            y = nn.relu(self.norm(name="norm1")(y))
            y = self.conv(out, (3, 3), padding=1, name="conv2")(y)
            last = "norm2"
        # A block starts as the identity: its last scale is zero (Goyal et al. 2017).
        y = self.norm(scale_init=nn.initializers.zeros, name=last)(y)
        if x.shape != y.shape:
            x = self.conv(out, (1, 1), strides, padding=0, name="shortcut")(x)
            x = self.norm(name="shortcut_norm")(x)
        return nn.relu(x + y)


def create(arch: str, num_classes: int, dtype: str, width: int | None = None, axis_name: str | None = None) -> ResNet:
    """The network that `--arch` names."""
    make = {
        "digits": partial(ResNet, (1, 1), width=width or 32, stem="small"),
        "resnet20": partial(ResNet, (3, 3, 3), width=width or 16, stem="small"),
        "resnet18": partial(ResNet, (2, 2, 2, 2), width=width or 64),
        "resnet50": partial(ResNet, (3, 4, 6, 3), width=width or 64, bottleneck=True),
    }[arch]
    return make(num_classes=num_classes, dtype=jnp.dtype(dtype), axis_name=axis_name)
