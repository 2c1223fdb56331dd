"""Draw random networks for property tests: a few layers chosen by hypothesis, with two equivalent losses.

`Network.loss` is written as users would write it, with `lax.scan`, `jax.checkpoint` and `jax.jit`. `Network.reference`
is the same network unrolled, with the hooks from tests/oracle.py.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from hypothesis import strategies as st
from jax import lax

from checking import normal
from oracle import Geometry, Hook, explicit_padding

CLASSES = 3


@dataclasses.dataclass(frozen=True)
class Dense:
    width: int
    bias: bool

    def shapes(self, d):
        return {"w": (d, self.width)} | ({"b": (self.width,)} if self.bias else {})

    def reference(self, hook, name, p, x):
        y = x @ p["w"]
        return jnp.tanh(hook.layer(name, x, y + p["b"] if self.bias else y, bias=self.bias))

    def written(self, p, x):
        return self.reference(Hook(), "", p, x)


@dataclasses.dataclass(frozen=True)
class Conv:
    """An image convolution in groups of channels. Each group has `features` output features."""

    window: tuple[int, int]
    strides: tuple[int, int]
    padding: Any
    dilation: tuple[int, int]
    groups: int
    features: int
    bias: bool

    def shapes(self, d):
        features = self.groups * self.features
        return {"w": (*self.window, d // self.groups, features)} | ({"b": (features,)} if self.bias else {})

    def _convolve(self, x, w, groups):
        return lax.conv_general_dilated(
            x, w, self.strides, self.padding, rhs_dilation=self.dilation, feature_group_count=groups,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )  # fmt: skip

    def reference(self, hook, name, p, x):
        """Apply a separate convolution to each group."""
        pads = explicit_padding(self.padding, x.shape[1:3], self.window, self.strides, self.dilation)
        geometry = Geometry(self.window, self.strides, pads, (1, 1), self.dilation)
        outs = []
        for k in range(self.groups):
            own = jnp.split(x, self.groups, axis=-1)[k]
            y = self._convolve(own, jnp.split(p["w"], self.groups, axis=-1)[k], 1)
            y = y + jnp.split(p["b"], self.groups)[k] if self.bias else y
            copy = name if self.groups == 1 else f"{name}[{k}]"
            outs.append(hook.layer(copy, own, y, bias=self.bias, conv=geometry))
        return jnp.tanh(jnp.concatenate(outs, axis=-1))

    def written(self, p, x):
        y = self._convolve(x, p["w"], self.groups)
        return jnp.tanh(y + p["b"] if self.bias else y)


@dataclasses.dataclass(frozen=True)
class Norm:
    """Batch or layer normalisation. If not `centred`, it divides by the root mean square and has no shift."""

    over_batch: bool
    centred: bool

    def shapes(self, d):
        return {"scale": (d,)} | ({"shift": (d,)} if self.centred else {})

    def _normalised(self, x):
        axes = tuple(range(x.ndim - 1)) if self.over_batch else (x.ndim - 1,)
        x = x - jnp.mean(x, axes, keepdims=True) if self.centred else x
        return x * lax.rsqrt(jnp.mean(x**2, axes, keepdims=True) + 1e-2)

    def reference(self, hook, name, p, x):
        each = {key: hook.vector(f"{name}/{key}", v, len(x)) for key, v in p.items()}
        each = {key: v.reshape(len(x), *(1,) * (x.ndim - 2), -1) for key, v in each.items()}
        y = self._normalised(x) * each["scale"]
        return y + each["shift"] if self.centred else y

    def written(self, p, x):
        y = self._normalised(x) * p["scale"]
        return y + p["shift"] if self.centred else y


@dataclasses.dataclass(frozen=True)
class Loop:
    """Nested scans over dense layers. With `shared`, all iterations use the same layer."""

    lengths: tuple[int, ...]
    bias: bool
    shared: bool
    remat: bool

    def shapes(self, d):
        copies = () if self.shared else self.lengths
        return {"w": (*copies, d, d)} | ({"b": (*copies, d)} if self.bias else {})

    def _layer(self, d):
        return Dense(d, self.bias)

    def reference(self, hook, name, p, x):
        one = self.shared or math.prod(self.lengths) == 1  # a stack of one kernel counts as a single kernel
        for k, at in enumerate(itertools.product(*map(range, self.lengths))):
            own = p if self.shared else {key: leaf[at] for key, leaf in p.items()}
            x = self._layer(x.shape[-1]).reference(hook, name if one else f"{name}[{k}]", own, x)
        return x

    def written(self, p, x):
        def body(x, own):
            return self._layer(x.shape[-1]).written(p if self.shared else own, x), None

        body = jax.checkpoint(body) if self.remat else body
        for length in reversed(self.lengths):
            inner = body

            def body(x, own, inner=inner, length=length):
                return lax.scan(inner, x, own, length=length)[0], None

        return body(x, None if self.shared else p)[0]


@dataclasses.dataclass(frozen=True)
class Network:
    """A network. Layer `k` is wrapped in the transformations `wrappers[k]`, and `remat` wraps all layers together."""

    shape: tuple[int, ...]
    layers: tuple[Any, ...]
    wrappers: tuple[tuple[str, ...], ...]
    remat: bool

    @property
    def interacting(self) -> bool:
        return any(isinstance(layer, Norm) and layer.over_batch for layer in self.layers)

    @property
    def named(self):
        return [(f"{type(layer).__name__.lower()}{k}", layer) for k, layer in enumerate(self.layers)]

    def batch(self, seed, examples, dtype):
        return normal(seed, examples, *self.shape, dtype=dtype), normal(seed + 1, examples, CLASSES, dtype=dtype)

    def parameters(self, dtype):
        params, x = {}, jax.ShapeDtypeStruct((2, *self.shape), dtype)
        for k, (name, layer) in enumerate(self.named):
            shapes = layer.shapes(x.shape[-1])
            params[name] = {key: normal(100 * k + i, *s, dtype=dtype) / 2 for i, (key, s) in enumerate(shapes.items())}
            x = jax.eval_shape(layer.written, params[name], x)
        return params | {"out": {"w": normal(9999, math.prod(x.shape[1:]), CLASSES, dtype=dtype) / 2}}

    def loss(self, params, x, t, compute=None):
        """Return the loss. With `compute`, the layers run in another dtype than the parameters."""
        if compute is not None:
            params, x = jax.tree.map(lambda leaf: leaf.astype(compute), (params, x))

        def through_layers(params, x):
            for (name, layer), wrappers in zip(self.named, self.wrappers, strict=True):
                call = layer.written
                for wrapper in wrappers:
                    call = {"remat": jax.checkpoint, "jit": jax.jit}[wrapper](call)
                x = call(params[name], x)
            return x

        x = (jax.checkpoint(through_layers) if self.remat else through_layers)(params, x)
        return _mean_loss(x.reshape(len(x), -1) @ params["out"]["w"], t)

    def reference(self, hook, params, x, t):
        for name, layer in self.named:
            x = layer.reference(hook, name, params[name], x)
        x = x.reshape(len(x), -1)
        return _mean_loss(hook.layer("out", x, x @ params["out"]["w"]), t)


def _mean_loss(y, t):
    """Return a mean loss whose gradient depends on output and target, so that no two rows agree."""
    y = y.astype(t.dtype)
    return jnp.mean(jnp.sum(jnp.tanh(y) * t, axis=1) + 0.5 * jnp.sum(jnp.sin(y), axis=1) ** 2)


@st.composite
def networks(draw, depth=3, interacting=True, images=True):
    """Draw a network on vectors, sequences or images. `interacting` allows batch normalisation."""
    d = draw(st.integers(1, 4))
    shapes = [(d,), (draw(st.integers(2, 3)), d)]
    if images:
        shapes.append((draw(st.integers(3, 6)), draw(st.integers(3, 6)), d))
    shape = draw(st.sampled_from(shapes[::-1]))
    layers, now = [], shape
    for _ in range(draw(st.integers(1, depth))):
        kinds = [_norms(interacting), _loops(), st.builds(Dense, st.integers(1, 4), st.booleans())]
        layer = draw(st.one_of(*kinds, *[_convolutions(now)] * (2 if len(now) == 3 else 0)))
        layers.append(layer)
        like = {key: jnp.zeros(s) for key, s in layer.shapes(now[-1]).items()}
        now = jax.eval_shape(layer.written, like, jnp.zeros((2, *now))).shape[1:]
    wrappers = st.sampled_from([(), ("remat",), ("jit",), ("jit", "remat"), ("remat", "jit")])
    return Network(shape, tuple(layers), tuple(draw(wrappers) for _ in layers), draw(st.booleans()))


def _norms(interacting):
    return st.builds(Norm, st.booleans() if interacting else st.just(False), st.booleans())


def _loops():
    lengths = st.lists(st.integers(1, 3), min_size=1, max_size=2).map(tuple)
    return st.builds(Loop, lengths, st.booleans(), st.booleans(), st.booleans())


@st.composite
def _convolutions(draw, shape):
    *sizes, channels = shape
    window = tuple(draw(st.integers(1, min(3, size))) for size in sizes)
    dilation = tuple(
        draw(st.integers(1, 2 if 2 * (k - 1) < size else 1)) for k, size in zip(window, sizes, strict=True)
    )
    pads = st.tuples(st.integers(0, 2), st.integers(0, 2))
    padding = draw(st.one_of(st.sampled_from(["SAME", "VALID"]), st.tuples(pads, pads)))
    strides = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    groups = draw(st.sampled_from([k for k in range(1, channels + 1) if channels % k == 0]))
    return Conv(window, strides, padding, dilation, groups, draw(st.integers(1, 2)), draw(st.booleans()))
