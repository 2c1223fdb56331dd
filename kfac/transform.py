"""The preconditioner as an optax gradient transformation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from kfac.blocks import Group, check_factors, group_layers, precondition
from kfac.collectives import mean_over
from kfac.inverse import Refreshed, refresh_kronecker, refresh_unitwise
from kfac.layers import Block, Factors, Kronecker, Layers, Unitwise, leaves_by_path

Scalar = float | jax.Array
ScalarOrSchedule = Scalar | Callable[[jax.Array], jax.typing.ArrayLike]


class KfacMetrics(NamedTuple):
    """Scalars of the last step, for `diagnostics`.

    Attributes:
      gradient_norm: 2-norm of the gradient, over the parameters that have a curvature block.
      preconditioned_norm: the same of the preconditioned gradient.
      condition: largest 1-norm condition number of a damped factor at its last inversion.
      skipped_statistics: how many times a block left non-finite statistics out of its running average.
      failed_inversions: how many times a block kept its previous inverse because factorisation failed.
      skipped_steps: how many times the gradient, or the preconditioned one, was not finite.
    """

    gradient_norm: jax.Array
    preconditioned_norm: jax.Array
    condition: jax.Array
    skipped_statistics: jax.Array
    failed_inversions: jax.Array
    skipped_steps: jax.Array


class KfacState(NamedTuple):
    """State of `scale_by_kfac`: arrays only. Dictionaries are keyed by the shape of the blocks they stack.

    Attributes:
      count: optimizer steps so far. One whose result is not finite is none: schedules and the interval of the refreshes
        stay where they are, as they do in the optax parts of `kfac`.
      factors: bias-corrected running averages, `[k, ...]` for `k` blocks of one shape.
      weight: `[k]`, the sum of the weights in each average; 0 before the first statistics.
      inverses: damped inverses, shaped like `factors`.
      ready: `[k]`, whether a block has been inverted yet.
      stale: whether statistics have arrived since the last refresh.
      damping: the damping of the last refresh.
      unitwise_damping: that of unit-wise and diagonal blocks.
      inverse_age: steps since the last refresh.
      metrics: scalars of the last step.
    """

    count: jax.Array  # type: ignore[assignment]  # optax's name for it
    factors: dict[str, Block]
    weight: dict[str, jax.Array]
    inverses: dict[str, Block]
    ready: dict[str, jax.Array]
    stale: jax.Array
    damping: jax.Array
    unitwise_damping: jax.Array
    inverse_age: jax.Array
    metrics: KfacMetrics


def value_at(scalar: ScalarOrSchedule, count: jax.Array) -> jax.Array:
    """A scalar, or a schedule at step `count`, as float32."""
    return jnp.asarray(scalar(count) if callable(scalar) else scalar, jnp.float32)


def check_range(name: str, value: Any, low: float, high: float, *, open_low: bool = False, open_high: bool = False):
    """Raises `ValueError` where a number is not in the range (in float32); schedules and tracers are taken as given."""
    if callable(value) or isinstance(value, jax.core.Tracer):
        return
    left, right = "(" if open_low else "[", ")" if open_high else "]"
    try:
        if isinstance(value, str) or np.shape(value) != ():
            raise TypeError
        # Rounded as the computation will: 1 - 1e-9 is 1.
        number = float(np.float32(value))
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be a number or a schedule, but is {value!r}") from None
    above = number > low if open_low else number >= low
    below = number < high if open_high else number <= high
    if math.isnan(number) or not (above and below):
        raise ValueError(f"{name} must lie in {left}{low:g}, {high:g}{right}, but is {value!r}")


def _check_count(name: str, value: Any, low: int) -> None:
    if isinstance(value, jax.core.Tracer):
        return
    number = isinstance(value, (int, float, np.integer, np.ndarray, jax.Array)) and np.shape(value) == ()
    if not number or isinstance(value, bool) or not math.isfinite(value) or value != int(value) or value < low:
        raise ValueError(f"{name} must be an integer, at least {low}, but is {value!r}")


def _check_axis_name(value: Any) -> None:
    names = value if isinstance(value, tuple) else (value,)
    if value is not None and not (names and all(isinstance(name, str) for name in names)):
        raise ValueError(f"axis_name must be the name of an axis, a tuple of names or None, but is {value!r}")


def _check_choice(name: str, value: Any, accepted: tuple[str, ...]) -> None:
    if value not in accepted:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, accepted))}, but is {value!r}")


def scale_by_kfac(
    layers: Layers,
    *,
    damping: ScalarOrSchedule = 1e-3,
    factor_decay: ScalarOrSchedule = 0.95,
    inverse_every: int | jax.Array = 1,
    refresh_warmup: int | jax.Array = 10,
    inverse: str = "cholesky",
    precision: str = "float32",
    unitwise_damping: ScalarOrSchedule = 1.0,
    axis_name: str | tuple[str, ...] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Preconditions gradients with damped inverses of Kronecker factors.

    The gradient `V` of a layer in matrix form becomes `(G + sqrt(l)/pi I)^-1 V (A + pi sqrt(l) I)^-1` with damping `l`
    and `pi^2 = (tr A / dim A) / (tr G / dim G)` (Martens & Grosse 2015; Osawa et al. 2019). Normalisation parameters are
    multiplied by `(F + u l I)^-1` of their channel's block, with `u = unitwise_damping`. Skipped parameters pass through
    unchanged, and so do all until the first statistics arrive.

    `update(grads, state, params=None, *, factors=None)` takes the statistics of the step as `factors`; without them
    the step uses what it knows. The running average is `F <- decay F + (1 - decay) F_batch`, bias-corrected. A refresh
    of the inverses follows the statistics of its step and precedes the preconditioning of its gradient; one that could
    change nothing (no statistics and no other damping since the last) is left out.

    Blocks with non-finite statistics leave them out of their average; a block whose factorisation fails, with ten times
    the damping as well, keeps its last inverse; a step with a non-finite gradient changes neither. `diagnostics` counts
    these.

    Args:
      layers: what `find_layers` returned.
      damping: positive scalar or schedule of the step; takes effect at the next refresh.
      factor_decay: decay of the running averages, in [0, 1); 0 uses the last statistics alone. Scalar or schedule.
      inverse_every: the inverses are refreshed at steps 0, `inverse_every`, 2 `inverse_every`, ...
      refresh_warmup: during so many first steps, every step with statistics refreshes the inverses.
      inverse: `"cholesky"`.
      precision: dtype in which inverses are kept and applied, `"float32"` or `"bfloat16"`. They are always computed
        in float32.
      unitwise_damping: factor on `damping` for unit-wise and diagonal blocks. Scalar or schedule.
      axis_name: the named axis (of `pmap`, `shard_map`) over which factors are averaged. Gradients are expected
        averaged.

    Returns:
      An `optax.GradientTransformationExtraArgs`. Updates keep the dtype of the gradients.

    Raises:
      ValueError: an argument is out of range; in `update`, the gradients or factors are not those of `layers`.
    """
    if not isinstance(layers, Layers):
        raise ValueError(f"layers must be what kfac.find_layers returns, but is {type(layers).__name__}")
    check_range("damping", damping, 0, math.inf, open_low=True, open_high=True)
    check_range("factor_decay", factor_decay, 0, 1, open_high=True)
    check_range("unitwise_damping", unitwise_damping, 0, math.inf, open_low=True, open_high=True)
    _check_count("inverse_every", inverse_every, 1)
    _check_count("refresh_warmup", refresh_warmup, 0)
    _check_choice("inverse", inverse, ("cholesky",))
    _check_choice("precision", precision, ("float32", "bfloat16"))
    _check_axis_name(axis_name)
    groups = group_layers(layers)

    def init(params: Any) -> KfacState:
        # `optax.tree.map_params` asks for the state of a placeholder that has no leaves.
        leaves = _match(layers, params, "params") if jax.tree.leaves(params) else {}
        # Statistics of a float64 model stay in float64; nothing else is ever wider than float32.
        dtype = jnp.result_type(jnp.float32, *(leaf.dtype for leaf in leaves.values()))
        kept = dtype if precision == "float32" else jnp.dtype(precision)

        def scalar(dtype):
            return jnp.zeros((), dtype)

        return KfacState(
            count=scalar(jnp.int32),
            factors={group.name: group.zeros(dtype) for group in groups},
            weight={group.name: jnp.zeros(group.size, dtype) for group in groups},
            inverses={group.name: group.identity(kept) for group in groups},
            ready={group.name: jnp.zeros(group.size, bool) for group in groups},
            stale=scalar(bool),
            damping=scalar(jnp.float32),
            unitwise_damping=scalar(jnp.float32),
            inverse_age=scalar(jnp.int32),
            metrics=KfacMetrics(*(scalar(jnp.float32) for _ in range(3)), *(scalar(jnp.int32) for _ in range(3))),
        )

    def update(updates: Any, state: KfacState, params: Any = None, *, factors: Factors | None = None, **extra: Any):
        del params, extra
        leaves = _match(layers, updates, "updates")
        finite = _all_finite(leaves)
        now = value_at(damping, state.count)
        dampings = (now, now * value_at(unitwise_damping, state.count))
        if factors is not None:
            check_factors(factors, layers)
            # Before the barrier, which would make averaged gradients as varying as the statistics of a device are.
            factors = mean_over(factors, axis_name)
            # One after the other: on small machines XLA's CPU schedule can deadlock between the convolutions that the
            # gradients come from and the LAPACK calls that the statistics go to.
            factors, leaves = lax.optimization_barrier((factors, leaves))
            state = _accumulate(groups, state, factors, value_at(factor_decay, state.count), finite)

        period = jnp.asarray(inverse_every).astype(jnp.int32)
        due = state.count % period == 0
        if factors is not None:
            due |= state.count < jnp.asarray(refresh_warmup).astype(jnp.int32)
        due &= finite & (state.stale | (dampings[0] != state.damping) | (dampings[1] != state.unitwise_damping))
        always = factors is not None and not isinstance(inverse_every, jax.Array) and inverse_every == 1
        if always:  # No branch, so that nothing has to be copied into it and out.
            state = _refresh(groups, state, dampings, due)
        else:
            state = lax.cond(due, lambda s: _refresh(groups, s, dampings, due), lambda s: s, state)

        preconditioned = _precondition(groups, state, leaves)
        blocks = {path: leaf for path, leaf in leaves.items() if path in preconditioned}
        finite &= _all_finite(preconditioned)
        state = state._replace(
            count=jnp.where(finite, optax.safe_increment(state.count), state.count),
            inverse_age=jnp.where(
                due, 0, jnp.where(finite, optax.safe_increment(state.inverse_age), state.inverse_age)
            ),
            metrics=state.metrics._replace(
                gradient_norm=_norm(blocks),
                preconditioned_norm=_norm(preconditioned),
                skipped_steps=state.metrics.skipped_steps + ~finite,
            ),
        )
        return _rebuild(updates, leaves | preconditioned), state

    return optax.GradientTransformationExtraArgs(init, update)


def _all_finite(leaves: dict[str, jax.Array]) -> jax.Array:
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in leaves.values()] or [jnp.array(True)]))


def _norm(leaves: dict[str, jax.Array]) -> jax.Array:
    total = sum((jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in leaves.values()), jnp.zeros((), jnp.float32))
    return jnp.sqrt(total)


def _match(layers: Layers, tree: Any, what: str) -> dict[str, jax.Array]:
    """Leaves of parameters or gradients by path, checked against `layers`.

    `optax.masked` replaces leaves by empty nodes: a layer may be missing as a whole, but not in part.
    """
    leaves = leaves_by_path(tree)
    unknown = [path for path in leaves if path not in layers.paths]
    if unknown:
        raise ValueError(f"{what} have a leaf {unknown[0]!r} that `layers` was found without: call find_layers again")
    masked = any(isinstance(x, optax.MaskedNode) for x in jax.tree.leaves(tree, is_leaf=_is_masked))
    for layer in layers:
        missing = [path for path in layer.params if path not in leaves]
        if missing and (not masked or len(missing) < len(layer.params)):
            reason = "is masked but the rest of its layer is not" if masked else "is missing"
            raise ValueError(f"{what}: leaf {missing[0]!r} of layer {layer.name!r} {reason}")
        for path, shape in zip(layer.params, layer.shapes, strict=True):
            if path in leaves and tuple(leaves[path].shape) != shape:
                raise ValueError(
                    f"{what}: leaf {path!r} of layer {layer.name!r} must have shape {shape}, "
                    f"but has {tuple(leaves[path].shape)}"
                )
    if not leaves:
        raise ValueError(f"{what} have no leaves")
    return leaves


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)


def _rebuild(tree: Any, leaves: dict[str, jax.Array]) -> Any:
    paths = leaves_by_path(tree)
    return jax.tree.unflatten(jax.tree.structure(tree), [leaves[path] for path in paths])


def _per_block(values: jax.Array, like: jax.Array) -> jax.Array:
    return values.reshape(-1, *(1,) * (like.ndim - 1))


def _accumulate(
    groups: tuple[Group, ...],
    state: KfacState,
    factors: Factors,
    decay: jax.Array,
    usable: jax.Array,
) -> KfacState:
    """Running averages with this step's statistics; a block whose statistics are not finite is left as it is."""
    averages, weights = {}, {}
    skipped, stale = state.metrics.skipped_statistics, state.stale
    for group in groups:
        batch = group.stack_factors(factors)
        finite = jnp.ones(group.size, bool)
        for stack in jax.tree.leaves(batch):
            finite &= jnp.all(jnp.isfinite(stack), axis=tuple(range(1, stack.ndim)))
        skipped += jnp.sum(~finite, dtype=jnp.int32)
        finite &= usable
        stale |= jnp.any(finite)
        weight = state.weight[group.name]
        total = decay.astype(weight.dtype) * weight + (1 - decay.astype(weight.dtype))
        # A decay of 1, which only a schedule can bring, waits for later statistics.
        share = jnp.where(finite & (total > 0), (1 - decay.astype(weight.dtype)) / total, 0)

        def average(old, new, share=share, finite=finite):
            new = jnp.where(_per_block(finite, new), new.astype(old.dtype), 0)
            return (1 - _per_block(share, old)) * old + _per_block(share, old) * new

        averages[group.name] = jax.tree.map(average, state.factors[group.name], batch)
        weights[group.name] = jnp.where(finite, total, weight)
    return state._replace(
        factors=averages,
        weight=weights,
        stale=stale,
        metrics=state.metrics._replace(skipped_statistics=skipped),
    )


def _refresh(
    groups: tuple[Group, ...], state: KfacState, dampings: tuple[jax.Array, jax.Array], due: jax.Array
) -> KfacState:
    """New inverses of all blocks that have statistics, if `due`."""
    damping, unitwise_damping = dampings
    inverses, ready = {}, {}
    failed = state.metrics.failed_inversions
    condition = jnp.zeros((), jnp.float32)
    for group in groups:
        factors, previous = state.factors[group.name], state.inverses[group.name]
        new: Refreshed
        if isinstance(factors, Kronecker):
            assert isinstance(previous, Kronecker)
            new = refresh_kronecker(factors, previous, damping)
        else:
            assert isinstance(previous, Unitwise)
            new = refresh_unitwise(factors, previous, unitwise_damping)
        known = state.weight[group.name] > 0
        taken = new.valid & known & due

        def choose(fresh, old, taken=taken):
            return jnp.where(_per_block(taken, old), fresh, old)

        inverses[group.name] = jax.tree.map(choose, new.inverse, previous)
        ready[group.name] = state.ready[group.name] | taken
        failed += jnp.sum(known & ~new.valid & due, dtype=jnp.int32)
        worst = jnp.max(jnp.where(taken, new.condition, 0)).astype(jnp.float32)
        condition = jnp.maximum(condition, worst)
    return state._replace(
        inverses=inverses,
        ready=ready,
        stale=state.stale & ~due,
        damping=jnp.where(due, damping, state.damping),
        unitwise_damping=jnp.where(due, unitwise_damping, state.unitwise_damping),
        metrics=state.metrics._replace(
            condition=jnp.where(due, condition, state.metrics.condition), failed_inversions=failed
        ),
    )


def _precondition(groups: tuple[Group, ...], state: KfacState, leaves: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The preconditioned leaves, by path, in the dtype they came in."""
    result: dict[str, jax.Array] = {}
    for group in groups:
        dtype = state.weight[group.name].dtype
        matrices = group.stack_matrices(leaves, dtype)
        applied = precondition(state.inverses[group.name], matrices)
        applied = jnp.where(_per_block(state.ready[group.name], matrices), applied, matrices)
        result.update(group.split_matrices(applied))
    return {path: result[path].astype(leaf.dtype) for path, leaf in leaves.items() if path in result}
