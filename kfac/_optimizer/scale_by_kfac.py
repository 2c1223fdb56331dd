"""The preconditioner as an optax gradient transformation."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec

from kfac._curvature.blocks import check_factors, group_layers
from kfac._factors import Factors
from kfac._layers import Layers
from kfac._optimizer.state import Config, KfacState, init_state, state_spec
from kfac._optimizer.step import Now, check_devices, preconditioned_step
from kfac._varying import AxisName, axis_size

Scalar = float | jax.Array
ScalarOrSchedule = Scalar | Callable[[jax.Array], jax.typing.ArrayLike]


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
    # A bound may be an argument, too; not below it means not below it in float32.
    least = float(np.float32(low))
    above = number > least if open_low else number >= least
    below = number < high if open_high else number <= high
    if math.isnan(number) or not (above and below):
        raise ValueError(f"{name} must lie in {left}{low:g}, {high:g}{right}, but is {value!r}")


def check_count(name: str, value: Any, low: int) -> None:
    if isinstance(value, jax.core.Tracer):
        return
    number = isinstance(value, (int, float, np.integer, np.ndarray, jax.Array)) and np.shape(value) == ()
    if not number or isinstance(value, bool) or not math.isfinite(value) or value != int(value) or value < low:
        raise ValueError(f"{name} must be an integer, at least {low}, but is {value!r}")


def check_axis_name(value: Any) -> None:
    names = value if isinstance(value, tuple) else (value,)
    if value is not None and not (names and all(isinstance(name, str) for name in names)):
        raise ValueError(f"axis_name must be the name of an axis, a tuple of names or None, but is {value!r}")


def _axis_of(mesh: Any, axis_name: AxisName | None) -> AxisName:
    if not isinstance(mesh, Mesh):
        raise ValueError(f"mesh must be a jax.sharding.Mesh, but is {type(mesh).__name__}")
    if axis_name is None:
        return tuple(mesh.axis_names)
    for name in axis_name if isinstance(axis_name, tuple) else (axis_name,):
        if name not in mesh.axis_names:
            raise ValueError(f"axis_name must be among the axes of mesh, {mesh.axis_names}, but is {axis_name!r}")
    return axis_name


def _check_switch(name: str, value: Any, others: tuple[Any, ...] = ()) -> None:
    if not isinstance(value, bool) and value not in others:
        raise ValueError(f"{name} must be True or False{' or None' * (None in others)}, but is {value!r}")


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
    """Preconditions gradients with damped inverses of Kronecker factors.

    The gradient `V` of a layer in matrix form becomes `(G + sqrt(l)/pi I)^-1 V (A + pi sqrt(l) I)^-1` with damping `l`
    and `pi^2 = (tr A / dim A) / (tr G / dim G)` (Martens & Grosse 2015; Osawa et al. 2019). Normalisation parameters
    are multiplied by `(F + u l I)^-1` of their channel's block, with `u = unitwise_damping`. Skipped parameters pass
    through unchanged, and so do all until the first statistics arrive.

    `update(grads, state, params=None, *, factors=None)` takes the statistics of the step as `factors`; without them
    the step uses what it knows. The running average is `F <- decay F + (1 - decay) F_batch`, bias-corrected. A refresh
    of the inverses follows the statistics of its step and precedes the preconditioning of its gradient; one that could
    change nothing (no statistics and no other damping since the last) is left out.

    With several devices (`axis_name`, `mesh`) every Kronecker block has an owner. Statistics arrive local and are
    averaged to the owners, which keep the running averages, invert, and precondition their blocks; the preconditioned
    gradients are gathered. Gradients are expected to be averaged over devices already (`lax.pmean`).

    Blocks with non-finite statistics leave them out of their average; a block whose factorisation fails, with ten times
    the damping as well, keeps its last inverse; a step with a non-finite gradient changes neither. `diagnostics` counts
    these.

    Args:
      layers: what `find_layers` returned.
      damping: positive scalar or schedule of the step; takes effect at the next refresh, with `"eigh"` at once.
      factor_decay: decay of the running averages, in [0, 1); 0 uses the last statistics alone. Scalar or schedule.
      inverse_every: each inverse is refreshed every so many steps, counted from the first.
      refresh_warmup: during so many first steps, every step with statistics refreshes all inverses.
      staggered: spread the refreshes of the blocks over `inverse_every` steps by cost, so that no step pays for all;
        False refreshes all of them at steps 0, `inverse_every`, 2 `inverse_every`, ... None staggers where
        `inverse_every` is a plain integer, which it takes, and inverses are not replicated, as they are with `"ekfac"`
        on several devices: to fetch them, any refresh sends all of them.
      inverse: `"cholesky"`: as above. `"eigh"`: `(A (x) G + l I)^-1` exactly, by eigendecompositions of the factors:
        `V` becomes `Q_G [(Q_G^T V Q_A) / (l_G l_A^T + l)] Q_A^T`. The damping of the step is used, whenever the
        decompositions are from. They take several times as long as inverses, and applying them twice as long.
        `"ekfac"`: `V` becomes `Q_G [(Q_G^T V Q_A) / (s + l)] Q_A^T` with the running average `s` of the second moments
        of per-example gradients in the eigenbasis (George et al. 2018), which is updated with all statistics and turned
        into the new basis at each refresh; `l_G l_A^T` until it has some, and for layers with a diagonal factor or
        several uses. Statistics must have these moments: `value_and_grad(..., ekfac=True)`, called with
        `basis=kfac.eigenbasis(opt_state, layers)`.
      precision: dtype in which inverses or eigenvectors are kept and applied, `"float32"` or `"bfloat16"`. They are
        always computed in float32.
      unitwise_damping: factor on `damping` for unit-wise and diagonal blocks. Scalar or schedule.
      axis_name: the named axis of devices, of `jax.pmap`, `jax.shard_map` or `mesh`; a tuple for several.
      mesh: for plain `jit` over sharded arrays. `init` and `update` then open a `shard_map` of their own over it, and
        `factors` are those of the global batch, as `value_and_grad` under such a `jit` returns them.
      precondition: `"sharded"`: owners precondition, gradients are gathered every step. `"replicated"`: inverses are
        gathered when refreshed, and every device preconditions all blocks: fewer messages, more memory. Not with
        `"ekfac"`, whose eigenvalues change with all statistics.
      communication_dtype: dtype of statistics on the wire, `"float32"` or `"bfloat16"`. With `mesh`, where XLA averages
        the statistics, `"float32"` only.
      triangular: send upper triangles of symmetric matrices only; of statistics where `axis_name` is bound, and of
        replicated inverses.

    Returns:
      An `optax.GradientTransformationExtraArgs`. Updates keep the dtype of the gradients.

    Raises:
      ValueError: an argument is out of range; in `update`, the gradients or factors are not those of `layers`, or the
        state is one for another number of devices.
    """
    if not isinstance(layers, Layers):
        raise ValueError(f"layers must be what kfac.find_layers returns, but is {type(layers).__name__}")
    check_range("damping", damping, 0, math.inf, open_low=True, open_high=True)
    check_range("factor_decay", factor_decay, 0, 1, open_high=True)
    check_range("unitwise_damping", unitwise_damping, 0, math.inf, open_low=True, open_high=True)
    check_count("inverse_every", inverse_every, 1)
    check_count("refresh_warmup", refresh_warmup, 0)
    _check_choice("inverse", inverse, ("cholesky", "eigh", "ekfac"))
    _check_choice("precision", precision, ("float32", "bfloat16"))
    check_axis_name(axis_name)
    _check_switch("staggered", staggered, (None,))
    _check_switch("triangular", triangular)
    _check_choice("precondition", precondition, ("sharded", "replicated"))
    _check_choice("communication_dtype", communication_dtype, ("float32", "bfloat16"))
    if inverse == "ekfac" and precondition == "replicated":
        raise ValueError(
            "precondition='replicated' is not for inverse='ekfac', whose eigenvalues change with all statistics and "
            "would be sent as often: leave it at 'sharded'"
        )
    if staggered and isinstance(inverse_every, jax.Array):
        raise ValueError("staggered=True needs inverse_every to be a plain int (a static argument), but it is an array")
    if staggered is None:
        several = axis_name is not None or mesh is not None
        staggered = precondition == "sharded" and not (inverse == "ekfac" and several)
    groups = group_layers(layers)
    phases = 1
    if staggered and not isinstance(inverse_every, jax.Array):
        # A cycle longer than there are blocks has steps without any.
        phases = max(1, min(int(inverse_every), sum(group.size for group in groups if group.kronecker)))
    if mesh is not None:
        axis_name = _axis_of(mesh, axis_name)
        if communication_dtype != "float32":
            raise ValueError(
                f"communication_dtype={communication_dtype!r} has no effect with mesh=, where XLA averages the "
                "statistics: use axis_name= inside jax.shard_map, or leave it at 'float32'"
            )
    config = Config(
        layers=layers,
        groups=groups,
        axis_name=axis_name,
        phases=phases,
        replicated=precondition == "replicated",
        wire_dtype=jnp.dtype(communication_dtype),
        triangular=triangular,
        precision=precision,
        inverse=inverse,
    )

    if mesh is not None:
        assert axis_name is not None
        same, split = PartitionSpec(), state_spec(axis_name)
        init_on_mesh = jax.jit(
            jax.shard_map(functools.partial(init_state, config), mesh=mesh, in_specs=(same,), out_specs=split)
        )
        update_on_mesh = jax.shard_map(
            functools.partial(preconditioned_step, config, local=False),
            mesh=mesh,
            in_specs=(same, split, same, same),
            out_specs=(same, split),
        )

    def init(params: Any) -> KfacState:
        if mesh is not None and axis_size(axis_name) is None:
            return init_on_mesh(params)
        return init_state(config, params)

    def update(updates: Any, state: KfacState, params: Any = None, *, factors: Factors | None = None, **extra: Any):
        del params, extra
        if factors is not None:
            check_factors(factors, layers, ekfac=inverse == "ekfac")
        count = state.count
        now = Now(
            damping=value_at(damping, count),
            unitwise=value_at(damping, count) * value_at(unitwise_damping, count),
            decay=value_at(factor_decay, count),
            period=jnp.asarray(inverse_every).astype(jnp.int32),
            warmup=count < jnp.asarray(refresh_warmup).astype(jnp.int32),
        )
        if mesh is not None and axis_size(axis_name) is None:
            names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
            check_devices(state, math.prod(mesh.shape[name] for name in names))
            return update_on_mesh(updates, state, now, factors)
        return preconditioned_step(config, updates, state, now, factors, local=True)

    return optax.GradientTransformationExtraArgs(init, update)
