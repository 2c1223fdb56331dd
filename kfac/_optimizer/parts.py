"""What comes after the preconditioner: the KL clip, momentum, and the length of each layer's step."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from kfac._layers import KRONECKER_KINDS, Layers, leaves_by_path, map_by_path
from kfac._optimizer.scale_by_kfac import ScalarOrSchedule, value_at
from kfac._optimizer.state import KfacState, find_state
from kfac._varying import AxisName


class KlClipState(NamedTuple):
    """State of the KL clip: the preconditioner's state and the factor last applied."""

    inner: KfacState
    scale: jax.Array


class MomentumState(NamedTuple):
    """State of scheduled momentum: the step, and the state of `optax.trace`."""

    count: jax.Array  # type: ignore[assignment]
    inner: optax.TraceState  # not `trace`: `optax.tree.get(opt_state, "trace")` finds one value only


def clip_kl(
    inner: optax.GradientTransformationExtraArgs,
    layers: Layers,
    constraint: ScalarOrSchedule,
    learning_rate: ScalarOrSchedule,
    axis: AxisName | None,
) -> optax.GradientTransformationExtraArgs:
    """Scales what `inner` returns so that the predicted change of the loss' KL divergence stays below `constraint`.

    Gradients are local where there is an `axis`.
    """
    chosen = {path for layer in layers.with_factors for path in layer.params}

    def init(params):
        return KlClipState(inner.init(params), jnp.ones((), jnp.float32))

    def update(updates, state, params=None, **extra):
        preconditioned, inner_state = inner.update(updates, state.inner, params, **extra)
        trees = (leaves_by_path(tree).items() for tree in (updates, preconditioned))
        product = optax.tree.vdot(*({path: _wide(leaf) for path, leaf in tree if path in chosen} for tree in trees))
        product = lax.pmean(product, axis) if axis is not None else product
        # The step is the preconditioner's: one that is not finite moves no schedule.
        rate = value_at(learning_rate, state.inner.count)
        limit = value_at(constraint, state.inner.count)
        length = rate * rate * product
        # <v, g> cannot be negative; where it or the rate is zero there is nothing to constrain.
        scale = jnp.where(length > limit, jnp.sqrt(limit / jnp.where(length > 0, length, 1)), 1.0)

        def shorten(path, leaf):
            return (leaf * scale).astype(leaf.dtype) if path in chosen else leaf

        return map_by_path(shorten, preconditioned), KlClipState(inner_state, scale.astype(jnp.float32))

    return optax.GradientTransformationExtraArgs(init, update)


def _wide(leaf: jax.Array) -> jax.Array:
    return leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))


def keep_dtype(inner: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
    """Updates in the dtype they came in, whatever the scalars and parameters that `inner` multiplies by."""

    def update(updates, state, params=None, **extra):
        new, state = inner.update(updates, state, params, **extra)
        return jax.tree.map(lambda new, old: new.astype(old.dtype), new, updates), state

    return optax.GradientTransformationExtraArgs(inner.init, update)


def scheduled_momentum(decay: ScalarOrSchedule, nesterov: bool) -> optax.GradientTransformationExtraArgs:
    """`optax.trace` in float32 or better, with a decay that may be a schedule; kept in steps not `taken`."""

    def init(params):
        return MomentumState(jnp.zeros((), jnp.int32), optax.trace(decay).init(jax.tree.map(_wide, params)))

    def update(updates, state, params=None, *, taken, **extra):
        del params, extra
        wide = jax.tree.map(_wide, updates)

        def moved(updates, inner):
            return optax.trace(value_at(decay, state.count)).update(updates, inner)[1]

        def branch(taken, wide, inner):
            # On CPUs XLA would compute what is selected twice, for the momentum and for the parameters, and copy the
            # momentum first. On a GPU one kernel does both, and a branch would make the host wait.
            return lax.cond(taken, moved, lambda updates, inner: inner, wide, inner)

        def select(taken, wide, inner):
            return jax.tree.map(lambda new, old: jnp.where(taken, new, old), moved(wide, inner), inner)

        inner = lax.platform_dependent(taken, wide, state.inner, cpu=branch, default=select)
        ahead = moved(wide, inner) if nesterov else inner
        return ahead.trace, MomentumState(optax.safe_increment(state.count), inner)

    return optax.GradientTransformationExtraArgs(init, update)


def precondition_momentum(
    inner: optax.GradientTransformationExtraArgs, momentum: optax.GradientTransformationExtraArgs
) -> optax.GradientTransformationExtraArgs:
    """`inner` of the momentum of the gradients, which it gets too; kept in steps that `inner` refuses."""

    def init(params):
        return inner.init(params), momentum.init(params)

    def update(updates, state, params=None, **extra):
        averaged, new = momentum.update(updates, state[1], params, taken=jnp.array(True))
        preconditioned, kept = inner.update(updates, state[0], params, averaged=averaged, **extra)
        refused = find_state(kept, "state").refused
        return preconditioned, (kept, jax.tree.map(lambda new, old: jnp.where(refused, old, new), new, state[1]))

    return optax.GradientTransformationExtraArgs(init, update)


# Of kernels whose scale matters, so few gradients are at such an angle by chance (Heo et al. 2021, arXiv:2006.08217).
RIGHT_ANGLE = 0.1


def scale_by_layer_trust_ratio(layers: Layers, coefficient: ScalarOrSchedule) -> optax.GradientTransformationExtraArgs:
    """`optax.scale_by_trust_ratio` of what turns a kernel, for each copy of a stacked one by itself."""
    kernels = {layer.params[0]: layer.layouts[0] for layer in layers if layer.kind in KRONECKER_KINDS}

    def init(params):
        del params
        return optax.ScaleByScheduleState(jnp.zeros((), jnp.int32))

    def update(updates, state, params=None, *, unpreconditioned, **extra):
        del extra
        if params is None:
            raise ValueError("trust_ratio needs the parameters: call update(grads, state, params)")
        ratio = optax.scale_by_trust_ratio(trust_coefficient=value_at(coefficient, state.count))

        def scale(update, param, gradient):
            return ratio.update(_turning(update, param, gradient), optax.EmptyState(), param)[0]

        def scale_kernel(path, update, *param_and_gradient):
            if path not in kernels:
                return update
            layout = kernels[path]
            matrices = (layout.to_matrix(_wide(leaf)) for leaf in (update, *param_and_gradient))
            return layout.from_matrix(jax.vmap(scale)(*matrices), update.shape)

        count = optax.safe_increment(state.count)
        return map_by_path(scale_kernel, updates, params, unpreconditioned), optax.ScaleByScheduleState(count)

    return optax.GradientTransformationExtraArgs(init, update)


class LayerLengthState(NamedTuple):
    """State of `scale_layers`: nothing. It tells that the length of a step is not that of the curvature."""


# The root mean square of a step of what is no kernel, relative to the learning rate.
BESIDE_KERNELS = 0.1


def scale_layers(layers: Layers) -> optax.GradientTransformationExtraArgs:
    """Steps of which each layer's has a length of its own, whatever its curvature and its gradient are.

    The norm `sqrt(d_out)` for the kernel and bias of a dense or convolutional layer together; a root mean square of 0.1
    for every other leaf with a block, over its elements that move at all. The norm `sqrt(d_out)` is that of an
    orthogonal matrix with at least as many columns as rows: outputs change by as much in networks of any width. What
    has no gradient in a step does not move in it: its momentum would be made as long as ever.
    """
    blocks = [layer for layer in layers if layer.kind in ("dense", "conv")]
    skipped = {path for layer in layers if layer.kind == "skipped" for path in layer.params}

    def update(updates, state, params=None, *, unpreconditioned, **extra):
        del extra
        if params is None:
            raise ValueError('trust_ratio="auto" needs the parameters: call update(grads, state, params)')
        leaves, kernels, gradients = (leaves_by_path(tree) for tree in (updates, params, unpreconditioned))
        scaled: dict[str, jax.Array] = {}
        for layer in blocks:
            if layer.params[0] not in leaves:
                continue  # masked
            update, kernel, gradient = (
                layer.to_matrix([_wide(tree[path]) for path in layer.params]) for tree in (leaves, kernels, gradients)
            )
            whole = jax.vmap(functools.partial(_turning_with_bias, bias=layer.has_bias))(update, kernel, gradient)
            length = jnp.where(_norms(gradient) > 0, layer.d_out**0.5, 0)
            whole = whole * _ratio(length, _norms(whole))[:, None, None]
            scaled |= dict(zip(layer.params, layer.from_matrix(whole), strict=True))

        def scale(path, leaf, gradient):
            if path in skipped:
                return leaf
            if path in scaled:
                return scaled[path]
            wide = _wide(leaf)
            length = jnp.where(jnp.any(gradient != 0), BESIDE_KERNELS * jnp.sqrt(jnp.count_nonzero(wide) * 1.0), 0)
            return wide * _ratio(length, jnp.linalg.norm(wide.ravel()))

        return map_by_path(scale, updates, unpreconditioned), state

    return optax.GradientTransformationExtraArgs(lambda params: LayerLengthState(), update)


def _turning_with_bias(update: jax.Array, kernel: jax.Array, gradient: jax.Array, *, bias: bool) -> jax.Array:
    """`_turning` of updates whose last column is that of a `bias`, which is left alone."""
    columns = kernel.shape[1] - bias
    turned = _turning(*(x[:, :columns] for x in (update, kernel, gradient)))
    return jnp.concatenate([turned, update[:, columns:]], axis=1)


def _norms(stack: jax.Array) -> jax.Array:
    return jnp.linalg.norm(stack, axis=(1, 2))


def _ratio(length: jax.typing.ArrayLike, norm: jax.Array) -> jax.Array:
    """What makes the norm that `length`; 0 of what is zero."""
    return jnp.where(norm > 0, length / jnp.where(norm > 0, norm, 1), 0)


def _dot(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.vdot(x, y, precision=lax.Precision.HIGHEST)


def _turning(update: jax.Array, kernel: jax.Array, gradient: jax.Array) -> jax.Array:
    """An update `[d_out, d_in]` without its part along the kernel, where that is of no use.

    That is where the gradient is at a right angle to the kernel: its scale does not matter to the loss.
    """
    square = _dot(kernel, kernel)
    bound = RIGHT_ANGLE * jnp.sqrt(square * _dot(gradient, gradient) / kernel.size)
    radial = _dot(update, kernel) / jnp.where(square > 0, square, 1) * kernel
    return jnp.where(jnp.abs(_dot(kernel, gradient)) < bound, update - radial, update)
