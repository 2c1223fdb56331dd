"""The parts of `kfac` around the preconditioner: norm constraint, momentum, trust ratio."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from kfac._layers import KRONECKER_KINDS, Layers, leaves_by_path, map_by_path
from kfac._optimizer.scale_by_kfac import ScalarOrSchedule, value_at
from kfac._optimizer.state import KfacState


class NormConstraintState(NamedTuple):
    """State of the norm constraint: the preconditioner's state and the factor last applied."""

    inner: KfacState
    scale: jax.Array


class MomentumState(NamedTuple):
    """State of scheduled momentum: the step, and the state of `optax.trace`."""

    count: jax.Array  # type: ignore[assignment]
    inner: optax.TraceState  # not `trace`: `optax.tree.get(opt_state, "trace")` finds one value only


def constrain_norm(
    inner: optax.GradientTransformationExtraArgs,
    layers: Layers,
    constraint: ScalarOrSchedule,
    learning_rate: ScalarOrSchedule,
) -> optax.GradientTransformationExtraArgs:
    """Scales what `inner` returns so that the predicted change of the loss' KL divergence stays below `constraint`."""
    chosen = {path for layer in layers.with_factors for path in layer.params}

    def init(params):
        return NormConstraintState(inner.init(params), jnp.ones((), jnp.float32))

    def update(updates, state, params=None, **extra):
        preconditioned, inner_state = inner.update(updates, state.inner, params, **extra)
        gradients, directions = leaves_by_path(updates), leaves_by_path(preconditioned)
        product = sum(
            jnp.vdot(_wide(gradients[path]), _wide(directions[path]), precision=lax.Precision.HIGHEST)
            for path in gradients
            if path in chosen
        )
        # The step is the preconditioner's: one that is not finite moves no schedule.
        rate = value_at(learning_rate, state.inner.count)
        limit = value_at(constraint, state.inner.count)
        length = rate * rate * product
        # <v, g> cannot be negative; where it or the rate is zero there is nothing to constrain.
        scale = jnp.where(length > limit, jnp.sqrt(limit / jnp.where(length > 0, length, 1)), 1.0)

        def shorten(path, leaf):
            return (leaf * scale).astype(leaf.dtype) if path in chosen else leaf

        shortened = map_by_path(shorten, preconditioned)
        return shortened, NormConstraintState(inner_state, scale.astype(jnp.float32))

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

    def trace(count):
        return optax.trace(decay=value_at(decay, count))

    def init(params):
        count = jnp.zeros((), jnp.int32)
        return MomentumState(count, trace(count).init(jax.tree.map(_wide, params)))

    def update(updates, state, params=None, *, taken, **extra):
        del params, extra
        wide = jax.tree.map(_wide, updates)

        def moved(updates, inner):
            return trace(state.count).update(updates, inner)[1]

        # A branch where a selection would do: XLA would compute what is selected twice, for the momentum and for the
        # parameters, and copy the momentum first.
        inner = lax.cond(taken, moved, lambda updates, inner: inner, wide, state.inner)
        ahead = moved(wide, inner) if nesterov else inner
        return ahead.trace, MomentumState(optax.safe_increment(state.count), inner)

    return optax.GradientTransformationExtraArgs(init, update)


# Of kernels whose scale matters, so few gradients are at such an angle by chance (Heo et al. 2021, arXiv:2006.08217).
RIGHT_ANGLE = 0.1


def scale_by_layer_trust_ratio(layers: Layers, coefficient: ScalarOrSchedule) -> optax.GradientTransformationExtraArgs:
    """`optax.scale_by_trust_ratio` of what turns a kernel, for each copy of a stacked one by itself."""
    kernels = {layer.params[0]: layer.layouts[0] for layer in layers if layer.kind in KRONECKER_KINDS}

    def init(params):
        del params
        return optax.ScaleByScheduleState(count=jnp.zeros((), jnp.int32))

    def update(updates, state, params=None, *, unpreconditioned, **extra):
        del extra
        if params is None:
            raise ValueError("trust_ratio needs the parameters: call update(grads, state, params)")
        ratio = optax.scale_by_trust_ratio(trust_coefficient=value_at(coefficient, state.count))

        def scale(update, param, gradient):
            turning = _without_radial_part(update, param, gradient)
            return ratio.update(turning, optax.EmptyState(), param)[0]

        def scale_kernel(path, update, *param_and_gradient):
            if path not in kernels:
                return update
            layout = kernels[path]
            matrices = (layout.to_matrix(_wide(leaf)) for leaf in (update, *param_and_gradient))
            return layout.from_matrix(jax.vmap(scale)(*matrices), update.shape)

        scaled = map_by_path(scale_kernel, updates, params, unpreconditioned)
        return scaled, optax.ScaleByScheduleState(count=optax.safe_increment(state.count))

    return optax.GradientTransformationExtraArgs(init, update)


def _without_radial_part(update: jax.Array, param: jax.Array, gradient: jax.Array) -> jax.Array:
    """An update without its part along the parameter, where the gradient has none either."""

    def dot(x, y):
        return jnp.vdot(x, y, precision=lax.Precision.HIGHEST)

    square = dot(param, param)
    bound = RIGHT_ANGLE * jnp.sqrt(square * dot(gradient, gradient) / param.size)
    free = jnp.abs(dot(param, gradient)) < bound
    radial = dot(update, param) / jnp.where(square > 0, square, 1)
    return jnp.where(free, update - radial * param, update)
