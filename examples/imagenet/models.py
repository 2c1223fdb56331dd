"""Define residual networks in flax linen, for NHWC images, float32 parameters and any compute type."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

# He et al. 2015. Fan-in keeps the activations' variance through a ReLU, and fan-out keeps the gradients' variance.
he_normal = nn.initializers.variance_scaling(2.0, "fan_in", "normal")
he_normal_backward = nn.initializers.variance_scaling(2.0, "fan_out", "normal")


def around_one(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """Draw from N(1, 0.05), as Osawa et al. 2019 do for batch-norm scales."""
    return 1 + 0.05 * jax.random.normal(key, shape, dtype)


class ResNet(nn.Module):
    """Compute logits, in the parameters' type, with a residual network.

    Stage i has `stages[i]` blocks with width `width * 2**i`. Each stage except the first halves the image.

    - `bottleneck`: a block is 1x1, 3x3 (with the stride) and 1x1, and its output is four times as wide. Otherwise a
      block is two 3x3 convolutions.
    - `stem`: "imagenet" is a 7x7 convolution with stride 2 and max-pooling. "deep" has three 3x3 convolutions instead.
      "small" is a single 3x3 convolution.
    - `pooled_shortcut`: a strided shortcut averages before its 1x1 convolution. With this and the deep stem, ResNet-50
      becomes ResNet-50-D (He et al. 2018).
    - `init_scheme`: "identity" sets the last scale in a block to zero (Goyal et al. 2017). "he" follows Osawa et al.
      2019: scales are around 1, and all kernels are He-normal by fan-in, so each kernel has norm sqrt(2 d_out).
    - `axis_name`: batch norm averages over this device axis.
    """

    stages: tuple[int, ...]
    num_classes: int
    width: int = 64
    bottleneck: bool = False
    stem: str = "imagenet"
    pooled_shortcut: bool = False
    init_scheme: str = "identity"
    norm_epsilon: float = 1e-5
    dtype: Any = jnp.float32
    axis_name: str | None = None

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        wide = jnp.promote_types(self.dtype, jnp.float32)
        identity = self.init_scheme == "identity"
        conv = partial(
            nn.Conv, use_bias=False, dtype=self.dtype, param_dtype=wide,
            kernel_init=he_normal_backward if identity else he_normal,
        )  # fmt: skip
        norm = partial(
            nn.BatchNorm, use_running_average=not train, momentum=0.9, epsilon=self.norm_epsilon, dtype=self.dtype,
            param_dtype=wide, axis_name=self.axis_name, scale_init=nn.initializers.ones if identity else around_one,
        )  # fmt: skip
        last_norm = partial(norm, scale_init=nn.initializers.zeros) if identity else norm
        x = x.astype(self.dtype)
        if self.stem == "deep":
            # The bias has no effect before batch norm, but the recipe's network has it.
            x = conv(self.width // 2, (3, 3), (2, 2), padding=1, use_bias=True, name="stem1")(x)
            x = nn.relu(norm(name="stem1_norm")(x))
            x = nn.relu(norm(name="stem2_norm")(conv(self.width // 2, (3, 3), padding=1, name="stem2")(x)))
            x = nn.relu(norm(name="stem3_norm")(conv(self.width, (3, 3), padding=1, name="stem3")(x)))
        else:
            side, stride = (3, 1) if self.stem == "small" else (7, 2)
            x = conv(self.width, (side, side), (stride, stride), padding=side // 2, name="stem")(x)
            x = nn.relu(norm(name="stem_norm")(x))
        if self.stem != "small":
            x = nn.max_pool(x, (3, 3), (2, 2), padding=((1, 1), (1, 1)))
        for i, blocks in enumerate(self.stages):
            for j in range(blocks):
                x = Block(
                    self.width * 2**i, 2 if i > 0 and j == 0 else 1, self.bottleneck, self.pooled_shortcut, conv,
                    norm, last_norm, name=f"stage{i + 1}_block{j + 1}",
                )(x)  # fmt: skip
        x = jnp.mean(x, axis=(1, 2))
        head_init = nn.initializers.lecun_normal() if identity else he_normal
        head = nn.Dense(self.num_classes, dtype=self.dtype, param_dtype=wide, kernel_init=head_init, name="head")
        return head(x).astype(wide)


class Block(nn.Module):
    """Apply a residual block. The shortcut is a 1x1 convolution if the shape changes."""

    width: int
    stride: int
    bottleneck: bool
    pooled_shortcut: bool
    conv: Any
    norm: Any
    last_norm: Any

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
        y = self.last_norm(name=last)(y)
        if x.shape != y.shape:
            if self.pooled_shortcut and self.stride > 1:
                x = nn.avg_pool(x, strides, strides, padding="SAME", count_include_pad=False)
                strides = (1, 1)
            x = self.conv(out, (1, 1), strides, padding=0, name="shortcut")(x)
            x = self.norm(name="shortcut_norm")(x)
        return nn.relu(x + y)


NETWORKS: dict[str, dict[str, Any]] = {
    "digits": dict(stages=(1, 1), width=32, stem="small"),
    "resnet8": dict(stages=(1, 1, 1), width=16, stem="small"),
    "resnet20": dict(stages=(3, 3, 3), width=16, stem="small"),
    "resnet18": dict(stages=(2, 2, 2, 2)),
    "resnet34": dict(stages=(3, 4, 6, 3)),
    "resnet50": dict(stages=(3, 4, 6, 3), bottleneck=True),
    "resnet50d": dict(stages=(3, 4, 6, 3), bottleneck=True, stem="deep", pooled_shortcut=True),
    "resnet101": dict(stages=(3, 4, 23, 3), bottleneck=True),
}


def create(
    arch: str, num_classes: int, dtype: str, width: int | None = None, axis_name: str | None = None, **rest: Any
) -> ResNet:
    """Return the network that `--arch` names. `rest` may have `init_scheme` and `norm_epsilon`."""
    values = NETWORKS[arch] | ({} if width is None else {"width": width}) | rest
    return ResNet(num_classes=num_classes, dtype=jnp.dtype(dtype), axis_name=axis_name, **values)


# Operations on all weights.


def is_kernel(params: Any) -> Any:
    """Return True for kernels, which get weight decay and trust ratios, and False for other parameters."""
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def rescale(params: Any) -> Any:
    """Scale kernels by `W <- W sqrt(2 d_out) / (||W|| + 1e-9)` if this shrinks them (Osawa et al. 2019).

    Batch norm cancels a kernel's scale, but a step rotates a large kernel less.
    """

    def shrunk(kernel: jax.Array) -> jax.Array:
        factor = jnp.sqrt(2.0 * kernel.shape[-1]) / (jnp.linalg.norm(kernel.ravel()) + 1e-9)
        return kernel * jnp.minimum(factor, 1).astype(kernel.dtype)

    return jax.tree.map(lambda leaf, yes: shrunk(leaf) if yes else leaf, params, is_kernel(params))
