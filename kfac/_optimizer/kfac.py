"""`kfac`: the preconditioner with the usual parts of an optimizer around it, and what a run logs of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh

from kfac._layers import KRONECKER_KINDS, Layers, leaf_path, leaves_by_path
from kfac._optimizer.adaptive_damping import AdaptiveDampingState
from kfac._optimizer.scale_by_kfac import KfacState, ScalarOrSchedule, check_range, scale_by_kfac, value_at
from kfac._varying import AxisName


class NormConstraintState(NamedTuple):
    """State of the norm constraint: the preconditioner's state and the factor last applied."""

    inner: KfacState
    scale: jax.Array


class MomentumState(NamedTuple):
    """State of scheduled momentum: the step, and the state of `optax.trace`."""

    count: jax.Array  # type: ignore[assignment]
    inner: optax.TraceState  # not `trace`: `optax.tree.get(opt_state, "trace")` finds one value only


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
    inverse_every: int | jax.Array = 1,
    refresh_warmup: int | jax.Array = 10,
    staggered: bool | None = None,
    inverse: str = "cholesky",
    precision: str = "float32",
    unitwise_damping: ScalarOrSchedule = 1.0,
    axis_name: AxisName | None = None,
    mesh: Mesh | None = None,
    precondition: str = "sharded",
    communication_dtype: str = "float32",
    triangular: bool = True,
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
      inverse_every: steps between refreshes of the inverses.
      refresh_warmup: first steps in which every step with statistics refreshes.
      staggered: whether refreshes are spread over `inverse_every` steps.
      inverse: how factors are inverted, `"cholesky"` or `"eigh"`, or `"ekfac"` with corrected eigenvalues.
      precision: dtype of the inverses.
      unitwise_damping: factor on `damping` for unit-wise and diagonal blocks.
      axis_name: named axis of devices over which blocks are spread.
      mesh: mesh with that axis, for plain `jit` over sharded arrays.
      precondition: whether owners precondition (`"sharded"`) or all devices (`"replicated"`).
      communication_dtype: dtype of statistics on the wire.
      triangular: send upper triangles only.

    Returns:
      An `optax.GradientTransformationExtraArgs`; `update` takes the keyword `factors`.

    Raises:
      ValueError: an argument is out of range.
    """
    check_range("learning_rate", learning_rate, 0, math.inf, open_high=True)
    tx: optax.GradientTransformationExtraArgs = scale_by_kfac(
        layers,
        damping=damping,
        factor_decay=factor_decay,
        inverse_every=inverse_every,
        refresh_warmup=refresh_warmup,
        staggered=staggered,
        inverse=inverse,
        precision=precision,
        unitwise_damping=unitwise_damping,
        axis_name=axis_name,
        mesh=mesh,
        precondition=precondition,
        communication_dtype=communication_dtype,
        triangular=triangular,
    )
    if norm_constraint is not None:
        check_range("norm_constraint", norm_constraint, 0, math.inf, open_low=True, open_high=True)
        tx = _constrain_norm(tx, layers, norm_constraint, learning_rate)
    if not isinstance(nesterov, bool):
        raise ValueError(f"nesterov must be True or False, but is {nesterov!r}")
    if not isinstance(rate_in_momentum, bool):
        raise ValueError(f"rate_in_momentum must be True or False, but is {rate_in_momentum!r}")
    if rate_in_momentum and trust_ratio is not None:
        raise ValueError("rate_in_momentum=True has no effect with trust_ratio, which rescales what the momentum gives")
    parts = []
    rate = optax.scale_by_learning_rate(learning_rate)
    if rate_in_momentum:
        parts.append(rate)
    if momentum is not None:
        check_range("momentum", momentum, 0, 1, open_high=True)
        parts.append(_momentum(momentum, nesterov))
    elif nesterov or rate_in_momentum:
        name = "nesterov" if nesterov else "rate_in_momentum"
        raise ValueError(f"{name}=True needs momentum, but momentum is None")
    if trust_ratio is not None:
        check_range("trust_ratio", trust_ratio, 0, math.inf, open_low=True, open_high=True)
        parts.append(_trust_ratio(layers, trust_ratio))
    if weight_decay is not None:
        check_range("weight_decay", weight_decay, 0, math.inf, open_high=True)
        decay = _decayed_weights(_times_rate(weight_decay, learning_rate) if rate_in_momentum else weight_decay)
        parts.append(optax.masked(decay, weight_decay_mask) if weight_decay_mask is not None else decay)
        if not callable(weight_decay_mask) and not all(isinstance(x, bool) for x in jax.tree.leaves(weight_decay_mask)):
            raise ValueError(
                "weight_decay_mask must be a tree of bools like the parameters, or a function from parameters to one, "
                f"but is {weight_decay_mask!r}"
            )
    elif weight_decay_mask is not None:
        raise ValueError("weight_decay_mask needs weight_decay, but weight_decay is None")
    if not rate_in_momentum:
        parts.append(rate)
    rest = optax.with_extra_args_support(_keep_dtype(optax.chain(*parts)))

    def init(params):
        return tx.init(params), rest.init(params)

    def update(updates, state, params=None, **extra):
        preconditioned, first = tx.update(updates, state[0], params, **extra)
        taken = _refused(first) == _refused(state[0])
        own = {"unpreconditioned": updates, "taken": taken}
        moved, second = rest.update(preconditioned, state[1], params, **extra | own)
        # A refused step is none: the counts of schedules stay, like the momentum, and nothing is updated. Selected, as
        # XLA makes a selection part of the arithmetic beside it, where kernels of a branch would have to be compiled.
        kept = jax.tree.map(lambda new, old: jnp.where(taken, new, old) if new.ndim == 0 else new, second, state[1])
        return jax.tree.map(lambda leaf: jnp.where(taken, leaf, 0), moved), (first, kept)

    return optax.GradientTransformationExtraArgs(init, update)


def _refused(state: Any) -> jax.Array:
    """Steps so far whose gradient, as it was or preconditioned, was not finite."""
    (own,) = _nodes(state, KfacState)
    return own.metrics.skipped_steps


def _wide(leaf: jax.Array) -> jax.Array:
    return leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))


def _keep_dtype(inner: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
    """Updates in the dtype they came in, whatever the scalars and parameters that `inner` multiplies by."""

    def update(updates, state, params=None, **extra):
        new, state = inner.update(updates, state, params, **extra)
        return jax.tree.map(lambda new, old: new.astype(old.dtype), new, updates), state

    return optax.GradientTransformationExtraArgs(inner.init, update)


def _momentum(decay: ScalarOrSchedule, nesterov: bool) -> optax.GradientTransformationExtraArgs:
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


def _trust_ratio(layers: Layers, coefficient: ScalarOrSchedule) -> optax.GradientTransformationExtraArgs:
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
            if leaf_path(path) not in kernels:
                return update
            layout = kernels[leaf_path(path)]
            matrices = (layout.to_matrix(_wide(leaf)) for leaf in (update, *param_and_gradient))
            return layout.from_matrix(jax.vmap(scale)(*matrices), update.shape)

        scaled = jax.tree_util.tree_map_with_path(scale_kernel, updates, params, unpreconditioned)
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


def _decayed_weights(weight_decay: ScalarOrSchedule) -> optax.GradientTransformation:
    if not callable(weight_decay):
        return optax.add_decayed_weights(weight_decay)

    def init(params):
        del params
        return optax.ScaleByScheduleState(count=jnp.zeros((), jnp.int32))

    def update(updates, state, params=None):
        decayed, _ = optax.add_decayed_weights(weight_decay(state.count)).update(updates, optax.EmptyState(), params)
        return decayed, optax.ScaleByScheduleState(count=optax.safe_increment(state.count))

    return optax.GradientTransformation(init, update)


def _times_rate(weight_decay: ScalarOrSchedule, learning_rate: ScalarOrSchedule) -> optax.Schedule:
    """What is added to a step that already contains the learning rate."""
    return lambda count: -value_at(learning_rate, count) * value_at(weight_decay, count)


def _constrain_norm(
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
            return (leaf * scale).astype(leaf.dtype) if leaf_path(path) in chosen else leaf

        shortened = jax.tree_util.tree_map_with_path(shorten, preconditioned)
        return shortened, NormConstraintState(inner_state, scale.astype(jnp.float32))

    return optax.GradientTransformationExtraArgs(init, update)


def diagnostics(opt_state: Any) -> dict[str, jax.Array]:
    """Scalars worth logging, from the state of any chain that holds `scale_by_kfac`.

    Args:
      opt_state: an optimizer state; the preconditioner's part is looked for in it.

    Returns:
      `damping` of the last step, `gradient_norm` and `preconditioned_norm` (2-norms over the parameters with a
      curvature block), `condition` (largest condition number of what is inverted, each as of its last inversion: of the
      damped factors in the 1-norm, with `inverse="eigh"` and `"ekfac"` of the damped blocks in the 2-norm),
      `statistics_change` (of the last statistics, relative to the running averages before them), `inverse_age` (steps
      since the oldest inverse in use was computed), `skipped_statistics` and `failed_inversions` (blocks, since the
      start), `skipped_steps` (updates that were not finite, an `optax.apply_if_finite` around it included), with a norm
      constraint `norm_constraint_scale`, and with `adaptive_damping` the last `reduction_ratio` (NaN before the first).

    Raises:
      ValueError: there is no K-FAC state, or more than one, in `opt_state`.
    """
    states = _nodes(opt_state, KfacState)
    if len(states) != 1:
        raise ValueError(
            f"opt_state must hold one state of scale_by_kfac, but holds {len(states)}; "
            "give diagnostics the part of each"
        )
    (state,) = states
    scalars = {"damping": state.damping, **state.metrics._asdict()}
    for constraint in _nodes(opt_state, NormConstraintState):
        scalars["norm_constraint_scale"] = constraint.scale
    for adaptive in _nodes(opt_state, AdaptiveDampingState):
        scalars["reduction_ratio"] = adaptive.reduction_ratio
    for guard in _nodes(opt_state, optax.ApplyIfFiniteState):
        if _nodes(guard, KfacState):
            # What it rejects does not reach the preconditioner.
            scalars["skipped_steps"] += guard.total_notfinite
    return scalars


def _nodes(tree: Any, kind: Any) -> list[Any]:
    """The nodes of a type in a tree, also within one another."""
    outermost = [x for x in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kind)) if isinstance(x, kind)]
    return outermost + [inner for node in outermost for inner in _nodes(tuple(node), kind)]
