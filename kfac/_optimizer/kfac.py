"""`kfac`: the preconditioner and the parts around it: norm constraint, momentum, trust ratio, weight decay."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from kfac._checks import check_range, check_switch
from kfac._curvature.cholesky import Cholesky
from kfac._curvature.inverse import Inverse
from kfac._distributed.distribution import Distribution
from kfac._layers import KRONECKER_KINDS, Layers, leaves_by_path, map_by_path
from kfac._optimizer.scale_by_kfac import ScalarOrSchedule, scale_by_kfac, value_at
from kfac._optimizer.state import KfacState, find_state
from kfac._varying import AxisName


def kfac(
    learning_rate: ScalarOrSchedule,
    layers: Layers,
    *,
    momentum: ScalarOrSchedule | None = 0.9,
    nesterov: bool = False,
    rate_in_momentum: bool = False,
    weight_decay: ScalarOrSchedule | None = None,
    weight_decay_mask: Any | Callable[[Any], Any] | None = None,
    norm_constraint: ScalarOrSchedule | None = None,
    trust_ratio: ScalarOrSchedule | None = None,
    damping: ScalarOrSchedule = 1e-3,
    factor_decay: ScalarOrSchedule = 0.95,
    inverse_every: int | jax.Array | None = 1,
    refresh_warmup: int | jax.Array | None = None,
    inverse: Inverse = Cholesky(),
    unitwise_damping: ScalarOrSchedule = 1.0,
    distribution: Distribution | None = None,
) -> optax.GradientTransformationExtraArgs:
    """K-FAC as an optimizer: `scale_by_kfac`, norm constraint, momentum, trust ratio, weight decay, learning rate.

    Each part but the first and the last is left out when its argument is None. A step whose preconditioned gradient is
    not finite changes neither parameters nor momentum; `diagnostics` counts it.

    Args:
      learning_rate: scalar or schedule of the step.
      layers: what `find_layers` returned.
      momentum: decay of `optax.trace`, in [0, 1), kept in float32 or better. Scalar or schedule.
      nesterov: Nesterov's form of it.
      rate_in_momentum: whether the learning rate is applied before the momentum. False: `v <- m v + p`, `w <- w - lr v`
        with the preconditioned gradient `p`, so that a falling rate shrinks all of `v`. True: `v <- m v - lr p`,
        `w <- w + v`, as Osawa et al. have it, in which steps of an earlier, larger rate go on; see
        `kfac.schedules.coupled_momentum`. The same for a constant rate. Not with `trust_ratio`, which comes after the
        momentum and would take the rate out again.
      weight_decay: decoupled weight decay, times the learning rate. Scalar or schedule.
      weight_decay_mask: which parameters decay, as for `optax.add_decayed_weights`.
      norm_constraint: the KL clip `c`: the preconditioned gradient `v` is multiplied by
        `min(1, sqrt(c / (learning_rate^2 <v, g>)))`, `g` the gradient, over all parameters with a curvature block
        together (Ba, Grosse & Martens 2017). Scalar or schedule.
      trust_ratio: layerwise: the update of every kernel that has a Kronecker block is scaled to `trust_ratio` times the
        norm of the kernel, as LARS does with the gradient; every copy of a stacked kernel by itself. It stays as it is
        where one of the norms is zero. Of a kernel whose scale does not matter to the loss, as before batch norm, the
        update first loses its part along the kernel, which would use up length and turn nothing. Such kernels are
        known by `|cos(w, g)| < 0.1 / sqrt(d)`, with `d` entries in the kernel `w` and its gradient `g` (Heo et al.
        2021). Other parameters are not scaled. Scalar or schedule.
      damping: see `scale_by_kfac`, also for the arguments that follow.
      factor_decay: decay of the running averages of the factors.
      inverse_every: steps between refreshes of the inverses; None leaves them to `refresh`.
      refresh_warmup: first steps in which every step with statistics refreshes.
      inverse: how Kronecker blocks are inverted: `Cholesky()`, `Eigh()`, `Ekfac()` or one's own.
      unitwise_damping: factor on `damping` for unit-wise and diagonal blocks.
      distribution: how several devices are used, and whether refreshes are staggered; None: one device.

    Returns:
      An `optax.GradientTransformationExtraArgs`; `update` takes the keyword `factors`.

    Raises:
      ValueError: an argument is out of range.
    """
    check_range("learning_rate", learning_rate, 0, math.inf, open_high=True)
    tx = scale_by_kfac(
        layers,
        damping=damping,
        factor_decay=factor_decay,
        inverse_every=inverse_every,
        refresh_warmup=refresh_warmup,
        inverse=inverse,
        unitwise_damping=unitwise_damping,
        distribution=distribution,
    )
    if norm_constraint is not None:
        check_range("norm_constraint", norm_constraint, 0, math.inf, open_low=True, open_high=True)
        local = distribution is not None and distribution.gradients == "local"
        axis = distribution.axis if local and distribution else None
        tx = constrain_norm(tx, layers, norm_constraint, learning_rate, axis)
    _check_momentum(momentum, nesterov, rate_in_momentum, trust_ratio)
    parts = [] if momentum is None else [scheduled_momentum(momentum, nesterov)]
    if trust_ratio is not None:
        check_range("trust_ratio", trust_ratio, 0, math.inf, open_low=True, open_high=True)
        parts.append(scale_by_layer_trust_ratio(layers, trust_ratio))
    if weight_decay is not None:
        _check_weight_decay(weight_decay, weight_decay_mask)
        decay = _times_rate(weight_decay, learning_rate) if rate_in_momentum else weight_decay
        parts.append(optax.add_decayed_weights(decay, weight_decay_mask))
    elif weight_decay_mask is not None:
        raise ValueError("weight_decay_mask needs weight_decay, but weight_decay is None")
    rate = optax.scale_by_learning_rate(learning_rate)
    parts = [rate, *parts] if rate_in_momentum else [*parts, rate]
    return _followed_by(tx, optax.with_extra_args_support(keep_dtype(optax.chain(*parts))))


def _check_momentum(momentum: Any, nesterov: Any, rate_in_momentum: Any, trust_ratio: Any) -> None:
    check_switch("nesterov", nesterov)
    check_switch("rate_in_momentum", rate_in_momentum)
    if rate_in_momentum and trust_ratio is not None:
        raise ValueError("rate_in_momentum=True has no effect with trust_ratio, which rescales what the momentum gives")
    if momentum is not None:
        check_range("momentum", momentum, 0, 1, open_high=True)
    elif nesterov or rate_in_momentum:
        name = "nesterov" if nesterov else "rate_in_momentum"
        raise ValueError(f"{name}=True needs momentum, but momentum is None")


def _check_weight_decay(weight_decay: Any, mask: Any) -> None:
    check_range("weight_decay", weight_decay, 0, math.inf, open_high=True)
    if isinstance(mask, bool | jax.Array):
        raise ValueError(
            f"weight_decay_mask is one value for all parameters, {mask!r}: optax.inject_hyperparams takes a function "
            'for a schedule and calls it with the step. Name it there, static_args="weight_decay_mask"'
        )
    if not callable(mask) and not all(isinstance(x, bool) for x in jax.tree.leaves(mask)):
        raise ValueError(
            "weight_decay_mask must be a tree of bools like the parameters, or a function from parameters to one, "
            f"but is {mask!r}"
        )


def _times_rate(weight_decay: ScalarOrSchedule, learning_rate: ScalarOrSchedule) -> optax.Schedule:
    """What is added to a step that already contains the learning rate."""
    return lambda count: -value_at(learning_rate, count) * value_at(weight_decay, count)


def _followed_by(
    tx: optax.GradientTransformationExtraArgs, rest: optax.GradientTransformationExtraArgs
) -> optax.GradientTransformationExtraArgs:
    """`tx`, which holds the preconditioner, and then `rest`, which is told of the steps that are refused."""

    def init(params):
        return tx.init(params), rest.init(params)

    def update(updates, state, params=None, **extra):
        preconditioned, first = tx.update(updates, state[0], params, **extra)
        taken = ~find_state(first, "state").refused
        own = {"unpreconditioned": updates, "taken": taken}
        moved, second = rest.update(preconditioned, state[1], params, **extra | own)
        # A refused step is none: the counts of schedules stay, like the momentum, and nothing is updated. Selected, as
        # XLA makes a selection part of the arithmetic beside it, where kernels of a branch would have to be compiled.
        kept = jax.tree.map(lambda new, old: jnp.where(taken, new, old) if new.ndim == 0 else new, second, state[1])
        return jax.tree.map(lambda leaf: jnp.where(taken, leaf, 0), moved), (first, kept)

    return optax.GradientTransformationExtraArgs(init, update)


# -- the parts -----------------------------------------------------------------------------------------------------


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
    axis: AxisName | None,
) -> optax.GradientTransformationExtraArgs:
    """Scales what `inner` returns so that the predicted change of the loss' KL divergence stays below `constraint`.

    Gradients are local where there is an `axis`.
    """
    chosen = {path for layer in layers.with_factors for path in layer.params}

    def init(params):
        return NormConstraintState(inner.init(params), jnp.ones((), jnp.float32))

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

        return map_by_path(shorten, preconditioned), NormConstraintState(inner_state, scale.astype(jnp.float32))

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
            return ratio.update(_without_radial_part(update, param, gradient), optax.EmptyState(), param)[0]

        def scale_kernel(path, update, *param_and_gradient):
            if path not in kernels:
                return update
            layout = kernels[path]
            matrices = (layout.to_matrix(_wide(leaf)) for leaf in (update, *param_and_gradient))
            return layout.from_matrix(jax.vmap(scale)(*matrices), update.shape)

        count = optax.safe_increment(state.count)
        return map_by_path(scale_kernel, updates, params, unpreconditioned), optax.ScaleByScheduleState(count)

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
