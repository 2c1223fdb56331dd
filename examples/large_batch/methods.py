"""Define the compared optimizers, the meaning of their settings, and each optimizer's search space."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import kfac

Settings = dict[str, Any]


def schedule(peak: Any, steps: Any) -> Callable[[Any], Any]:
    """Return a schedule with linear warm-up over the first tenth of the steps, then linear decay to zero.

    Both arguments may be traced.
    """
    warmup = jnp.ceil(0.1 * steps)

    def rate(count: Any) -> Any:
        now = jnp.asarray(count, jnp.float32)
        rising = (now + 1) / warmup
        falling = (steps - now) / (steps - warmup)
        return peak * jnp.clip(jnp.minimum(rising, falling), 0.0, 1.0)

    return rate


def is_kernel(params: Any) -> Any:
    """Return a tree with True for each kernel, i.e. each parameter with two or more axes.

    Trust ratios and weight decay apply to kernels only.
    """
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def _by_kind(kernels: optax.GradientTransformation, vectors: optax.GradientTransformation):
    def labels(params: Any) -> Any:
        return jax.tree.map(lambda yes: "kernel" if yes else "vector", is_kernel(params))

    return optax.multi_transform({"kernel": kernels, "vector": vectors}, labels)


def _sgd(rate, s, layers):
    del layers
    if s.get("turned"):
        return optax.chain(optax.trace(s["momentum"], nesterov=True), _turned(s), optax.scale_by_learning_rate(rate))
    return optax.chain(
        optax.add_decayed_weights(s["weight_decay"], is_kernel), optax.sgd(rate, s["momentum"], nesterov=True)
    )


def _lars(rate, s, layers):
    """Return LARS.

    `learning_rate` is a kernel's relative step without momentum. For vectors, the rate is multiplied by `vectors`.
    """
    del layers

    def part(rate, kernel):
        return optax.lars(rate, s["weight_decay"] if kernel else 0.0, trust_coefficient=1.0, trust_ratio_mask=kernel,
                          momentum=s["momentum"], nesterov=True)  # fmt: skip

    return _by_kind(part(rate, True), part(lambda count: s["vectors"] * rate(count), False))


def _lamb(rate, s, layers):
    del layers
    return optax.lamb(rate, b1=s["momentum"], b2=s["b2"], weight_decay=s["weight_decay"], mask=is_kernel)


def _adamw(rate, s, layers):
    del layers
    return optax.adamw(
        rate, b1=s["momentum"], b2=s["b2"], weight_decay=s["weight_decay"], mask=is_kernel, nesterov=True
    )


def _muon(rate, s, layers):
    """Return Muon on the same matrices as K-FAC.

    A convolution's matrix has the window and the inputs on one side, and the outputs on the other side.
    """
    del layers

    def dimensions(params: Any) -> Any:
        def of(leaf: Any) -> Any:
            if leaf.ndim < 2:
                return None
            return optax.contrib.MuonDimensionNumbers(tuple(range(leaf.ndim - 1)), leaf.ndim - 1)

        return jax.tree.map(of, params)

    def muon(rate, vectors, weight_decay):
        return optax.contrib.muon(
            rate, beta=s["momentum"], weight_decay=weight_decay, weight_decay_mask=is_kernel, nesterov=True,
            adam_learning_rate=vectors, adam_b2=s["b2"], muon_weight_dimension_numbers=dimensions,
        )  # fmt: skip

    if s.get("turned"):
        return optax.chain(muon(1.0, 1.0, 0.0), _turned(s), optax.scale(-1.0), optax.scale_by_learning_rate(rate))
    return muon(rate, lambda count: s["vectors"] * rate(count), s["weight_decay"])


def _kfac(rate, s, layers):
    """Return K-FAC with the study's settings.

    If `turned` is set, `learning_rate` is the angle by which kernels turn. For vectors, the rate is multiplied by
    `vectors`.
    """
    if s.get("adaptive_damping"):
        plain = {name: value for name, value in s.items() if name != "adaptive_damping"}
        return kfac.adaptive_damping(lambda damping: _kfac(rate, {**plain, "damping": damping}, layers), 1e-3)
    if "first_damping" in s:  # changes geometrically to `damping` over the budget
        first, last, steps = s["first_damping"], s["damping"], s["steps"]
        s = {**s, "damping": lambda count: first * (last / first) ** (count / steps)}
    if not s.get("tangent", True) or s.get("momentum_first") or s.get("eigenbasis_adam"):
        preconditioner = kfac.scale_by_kfac(
            layers, preconditioner=_inverse(s), **{name: s[name] for name in SCALE_OPTIONS if name in s}
        )
        if s.get("eigenbasis_adam"):
            preconditioner = _adam_in_eigenbasis(preconditioner, layers, s["b2"])
        momentum = optax.trace(s["momentum"], nesterov=s["nesterov"])
        parts = (momentum, preconditioner) if s.get("momentum_first") else (preconditioner, momentum)
        return optax.chain(*parts, _turned(s), optax.scale_by_learning_rate(rate))
    options = {"preconditioner": _inverse(s)} | {name: s[name] for name in KFAC_OPTIONS if name in s}
    if s.get("turned"):
        options["trust_ratio"] = 1 / s["vectors"]
        return kfac.natural_gradient(lambda count: s["vectors"] * rate(count), layers, **PLAIN | options)
    return kfac.natural_gradient(rate, layers, **PLAIN | options)


def _inverse(s: Settings) -> kfac.BlockPreconditioner:
    kinds: dict[str, Callable[..., kfac.BlockPreconditioner]] = {
        "cholesky": kfac.Cholesky,
        "eigh": kfac.Eigh,
        "ekfac": kfac.EKFAC,
    }
    return kinds[s.get("preconditioner", "cholesky")](s.get("precision", "float32"))


def _adam_in_eigenbasis(inner: Any, layers: kfac.Layers, b2: Any) -> optax.GradientTransformationExtraArgs:
    """Divide kernel gradients by their root mean square in the eigenbasis, as SOAP does.

    The control experiments use this transformation. `inner` stores the eigenbasis of K-FAC's factors, and updates all
    other parameters.
    """

    def matrices(grads: Any) -> dict[str, jax.Array]:
        leaves = dict(zip(layers.paths, jax.tree.leaves(grads), strict=True))
        return {x.name: x.to_matrix([leaves[path] for path in x.params]) for x in layers if x.supports_ekfac}

    def init(params: Any) -> Any:
        return inner.init(params), jax.tree.map(jnp.zeros_like, matrices(params)), jnp.zeros(())

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        kept, squares, weight = state
        updates, kept = inner.update(grads, kept, params, **extra)
        leaves = dict(zip(layers.paths, jax.tree.leaves(updates), strict=True))
        weight = b2 * weight + 1 - b2
        gradients = matrices(grads)
        for name, basis in kfac.curvature.eigenbasis(kept, layers).items():
            turned = basis.G.T @ gradients[name] @ basis.A
            squares = {**squares, name: b2 * squares[name] + (1 - b2) * turned**2}
            scaled = turned / (jnp.sqrt(squares[name] / weight) + 1e-8)
            restored = layers[name].from_matrix(basis.G @ scaled @ basis.A.T)
            leaves |= dict(zip(layers[name].params, restored, strict=True))
        ordered = [leaves[path] for path in layers.paths]
        return jax.tree.unflatten(jax.tree.structure(updates), ordered), (kept, squares, weight)

    return optax.GradientTransformationExtraArgs(init, update)


def _turned(s: Settings) -> optax.GradientTransformation:
    """Apply `trust_ratio` from `kfac.natural_gradient` to the kernel updates of other methods.

    The control experiments use this transformation. Batch norm follows every convolution here, so the function removes
    an update's component along the kernel.
    """

    def update(updates, state, params=None):
        def turn(u, w, yes):
            if not yes:
                return s["vectors"] * u
            if s.get("tangent", True) and u.ndim > 2:
                u = u - w * (jnp.vdot(u, w) / jnp.vdot(w, w))
            return u * (jnp.linalg.norm(w.ravel()) / (jnp.linalg.norm(u.ravel()) + 1e-12))

        return jax.tree.map(turn, updates, params, is_kernel(params)), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def rescaled(params: Any, norms: Any) -> Any:
    """Rescale every kernel to its initial norm."""

    def scaled(leaf: jax.Array, norm: jax.Array, yes: bool) -> jax.Array:
        return leaf * (norm / (jnp.linalg.norm(leaf.ravel()) + 1e-9)) if yes else leaf

    return jax.tree.map(scaled, params, norms, is_kernel(params))


SCALE_OPTIONS = (
    "damping",
    "factor_ema_decay",
    "inverse_update_period",
    "interval_warmup_steps",
    "unitwise_damping_scale",
)
KFAC_OPTIONS = (
    *SCALE_OPTIONS, "momentum", "nesterov", "lr_in_momentum", "weight_decay", "kl_clip", "trust_ratio",
)  # fmt: skip


# Defaults for options that the settings omit. Steps then have the natural gradient's length.
PLAIN: Settings = {
    "momentum": 0.9, "lr_in_momentum": False, "damping": 1e-3, "factor_ema_decay": 0.95, "unitwise_damping_scale": 1.0,
}  # fmt: skip


class Method(NamedTuple):
    """Describe an optimizer and its search.

    Attributes:
      make: `make(rate, settings, layers)` returns the optimizer.
      fixed: settings that the search keeps, unless `grid` overrides them.
      grid: values to search for each setting.
    """

    make: Callable[..., Any]
    fixed: Settings
    grid: dict[str, tuple[Any, ...]]


METHODS = {
    "sgd": Method(
        _sgd,
        {"momentum": 0.9, "weight_decay": 5e-4},
        {"learning_rate": (0.2, 0.4, 0.8), "momentum": (0.9, 0.95)},
    ),
    "lars": Method(
        _lars,
        {"momentum": 0.9, "weight_decay": 5e-4},
        {"learning_rate": (0.015, 0.03, 0.06), "vectors": (3.0, 10.0)},
    ),
    "lamb": Method(
        _lamb,
        {"momentum": 0.9, "weight_decay": 5e-4},
        {"learning_rate": (0.03, 0.06, 0.12), "b2": (0.95, 0.999)},
    ),
    "adamw": Method(
        _adamw,
        {"momentum": 0.9, "weight_decay": 5e-4},
        {"learning_rate": (0.005, 0.01, 0.02), "b2": (0.95, 0.999)},
    ),
    "muon": Method(
        _muon,
        {"momentum": 0.9, "b2": 0.95, "weight_decay": 5e-4},
        {"learning_rate": (0.1, 0.2, 0.4), "vectors": (0.1, 0.3)},
    ),
    "kfac": Method(
        _kfac,
        {"momentum": 0.9, "nesterov": True, "turned": True, "vectors": 0.15, "factor_ema_decay": 0.0, "subsample": 4},
        {"learning_rate": (0.035, 0.07, 0.14), "damping": (1e-3, 1e-4)},
    ),
}
