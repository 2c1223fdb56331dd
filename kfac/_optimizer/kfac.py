"""The `kfac` optimizer: the preconditioner, KL clip, momentum, step lengths and weight decay."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax import Array

from kfac._capture.find_layers import matching
from kfac._checks import (
    HINTS,
    RENAMED,
    check,
    check_fraction,
    check_given,
    check_layers,
    with_hints,
)
from kfac._curvature.cholesky import Cholesky
from kfac._curvature.preconditioner import BlockPreconditioner, check_preconditioner
from kfac._curvature.soap import SOAP
from kfac._distributed.cost_model import OVERHEAD, affordable
from kfac._distributed.distribution import Distribution
from kfac._layers import UNREACHED, Layers
from kfac._leaves import map_by_path
from kfac._mesh import PyTree, mesh_of, on_mesh, replicate
from kfac._optimizer.options import Options, check_options
from kfac._optimizer.scale_by_kfac import precondition_and_scale
from kfac._optimizer.state import KfacState, find_state
from kfac._optimizer.step_scaling import ScalarOrSchedule, ScalingConfig, value_at

Optimizer: TypeAlias = optax.GradientTransformationExtraArgs


@with_hints(HINTS | RENAMED)
def kfac(
    learning_rate: ScalarOrSchedule,
    layers: Layers,
    *,
    momentum: ScalarOrSchedule | None = 0.9,
    nesterov: bool | None = None,
    weight_decay: ScalarOrSchedule | None = None,
    weight_decay_mask: Any | Callable[[Any], Any] | None = None,
    step_norm: Literal["spectral"] | None = "spectral",
    trust_ratio: ScalarOrSchedule | None = None,
    kl_clip: ScalarOrSchedule | None = None,
    adaptive_layer_rates: bool | None = None,
    layer_multipliers: Mapping[str, float] | None = None,
    damping: ScalarOrSchedule | None = None,
    overhead: float = OVERHEAD,
    inverse_update_period: int | Array | Literal["auto"] | None = "auto",
    preconditioner: BlockPreconditioner | None = None,
    statistics_fraction: float | None = None,
    distribution: Distribution | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Return the K-FAC optimizer.

    ::

        layers = kfac.find_layers(loss_fn, params, batch)
        optimizer = kfac.kfac(kfac.schedules.warmup_linear_decay(0.1, num_steps), layers)
        opt_state = optimizer.init(params)
        opt_state = kfac.observe(opt_state, kfac.statistics(loss_fn, layers)(params, batch))
        grads = jax.grad(loss_fn)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)

    It chains `scale_by_kfac`, the KL clip, momentum, step lengths, weight decay and the learning rate. Every part
    except `scale_by_kfac` and the learning rate is left out if its argument is None. A step with a non-finite
    preconditioned gradient changes neither parameters nor momentum; `diagnostics` counts such steps. Options of
    `scale_by_kfac` that are missing here have their default values. `kfac.presets.osawa2019` has all options.

    Args:
      learning_rate: scalar or schedule. With `step_norm="spectral"` it is the size of a kernel's step relative to the
        kernel's size at initialisation, for networks of any width. Start with 0.1: warm up to this rate during the
        first tenth of the steps, then decay it to zero.
      layers: the layers that `find_layers` returned.
      momentum: the decay of the momentum, in [0, 1), as in `optax.trace`. Each block's owner keeps the momentum in
        float32 or better. Scalar or schedule.
      nesterov: whether to use Nesterov momentum. None: True if there is momentum.
      weight_decay: decoupled weight decay, multiplied by the learning rate. Scalar or schedule.
      weight_decay_mask: which parameters decay, as for `optax.add_decayed_weights`. By default all parameters decay,
        including parameters behind `stop_gradient`; mask these to leave them unchanged.
      step_norm: `"spectral"` fixes the length of each parameter's step, so that the curvature only sets its direction.
        The largest singular value of a kernel's step is `learning_rate * sqrt(overlap * max(1, d_out / d_in))`, the
        spectral condition of Yang, Simon & Bernstein (2023, arXiv:2310.17813). `Layer.overlap` is the number of
        convolution windows that contain an input position: 9 for 3 x 3, 2.25 for 3 x 3 with stride 2, and 1 for a
        dense kernel. Six power iterations estimate the singular value from below. A bias is scaled like its kernel.
        Each copy of a stacked kernel is scaled separately. The steps of other parameters with a block, such as
        embeddings and normalisation scales, have a root mean square of `0.1 * learning_rate` over their nonzero
        elements. If a vector is copied to `p` positions of each example, as a mask token is, this is divided by
        `sqrt(p)`. A layer with a zero gradient gets a zero step. The steps of skipped parameters are not rescaled.

        If a normalisation follows a kernel, only the kernel's direction affects the loss. The step then first loses
        its component along the kernel. Such kernels are recognised by `|cos(w, g)| < 0.1 / sqrt(n)`, with the kernel
        `w`, its gradient `g`, and `n` elements in each (Heo et al. 2021, arXiv:2006.08217). Other kernels meet this
        condition by chance in one of twelve steps.

        None: the curvature also sets the length, as in natural gradient descent.
      trust_ratio: the norm of a kernel's or an embedding's step before the learning rate, as a multiple of the
        parameter's norm (LARS does this with gradients). Steps lose the same component as with `step_norm`. If one of
        the two norms is zero, the step is not rescaled. Needs `step_norm=None`. Scalar or schedule.
      kl_clip: the constraint `c` of the KL clip, which multiplies the preconditioned gradient `v` by `min(1, sqrt(c /
        (learning_rate^2 <v, g>)))`, with the gradient `g`. The product `<v, g>` sums over all parameters with a block
        (Ba, Grosse & Martens 2017). Needs `step_norm=None`. Scalar or schedule.
      adaptive_layer_rates: whether each layer adapts its own multiplier of the learning rate, between 1 and 4. The
        multiplier grows while the gradient agrees with the last step. It falls if the last step went too far.
        Otherwise it returns towards 1, with a time constant of fifty steps. It cannot grow while the learning rate
        rises, or is less than half of its maximum so far. Almeida et al. (1998) and Baydin et al. (2018) adapt one rate
        for all layers in this way. Each copy of a stacked kernel, and each piece of a kernel that `max_factor_dim`
        cuts, has its own multiplier. None: True if there is momentum and `step_norm="spectral"`.
      layer_multipliers: multipliers for the steps of some layers. Keys are regular expressions, as in `skip=`. A
        layer, including its bias, takes the first key that matches one of its paths. Weight decay and skipped
        parameters are not multiplied. Needs `step_norm="spectral"`.
      damping: see `scale_by_kfac`. With `step_norm="spectral"` the damping is relative to each block's mean eigenvalue
        (with `SOAP`, to its mean squared gradient), as with `Cholesky(relative=True)`, so that the scale of the loss
        does not matter. None: 1e-3 with `step_norm=None`; otherwise 1e-4 for `SOAP` and 0.1 for other inverses.
      overhead: the target overhead of statistics and refreshes in the mean step, as a fraction of the gradient's time.
        It sets the interval of both: the shortest interval, at most 16 steps, at which their FLOPs are this fraction of
        the gradient's FLOPs. The batch that the layers were found with gives the number of examples. Statistics include
        their own forward and backward pass. A FLOP of a refresh counts as three FLOPs of the gradient on a CPU and as
        eight on accelerators, because it takes longer. Statistics and refreshes are due in each of the first ten steps;
        then the interval doubles until it reaches its final value (see `interval_warmup_steps` of `scale_by_kfac`).
        Call `observe` before the next step if `statistics_due` is true; `train_step` does this. With `step_norm=None`
        statistics are due in every step, because then the step length depends on the inverses and old inverses can make
        a step too long. Leave `overhead` out in this case.
      inverse_update_period: the interval in steps at which `observe` refreshes the inverses; see `scale_by_kfac`. None:
        `observe` only updates the running averages, and `observe(opt_state)` without factors refreshes. "auto": the
        interval that `overhead` sets. `kfac.planning.plan` estimates intervals for other machines.
      preconditioner: how Kronecker blocks are inverted: `Cholesky()`, `Eigh()`, `EKFAC()`, `SOAP()` or your own
        `BlockPreconditioner`. With `step_norm="spectral"` its `relative` becomes True. `SOAP` preconditions the
        momentum of the gradients.

        None: `SOAP()`; `Cholesky()` with `step_norm=None`.
      statistics_fraction: the fraction of the batch's examples from which `observe` gets statistics, `1 / k` with an
        integer `k`. The interval that `overhead` sets depends on this fraction. `train_step` uses it for each batch.
        None: 1/4 if the inverse is `SOAP`, the batch has at least 64 examples, and the batch contains no array that
        all examples share; otherwise 1. Pass 1 if the loss of every `k`-th example alone makes no sense.
      distribution: how several devices are used; see `scale_by_kfac`.

    Returns:
      An optax optimizer. Its `update` needs the parameters. It does not precondition gradients until `kfac.observe`
      has brought statistics.

    Raises:
      ValueError: an argument is out of range, or two arguments conflict.
    """
    spectral = step_norm is not None
    preconditioner, period, _ = chosen(
        layers,
        step_norm=step_norm,
        preconditioner=preconditioner,
        overhead=overhead,
        statistics_fraction=statistics_fraction,
    )
    if damping is None:
        damping = preconditioner.relative_damping if spectral else 1e-3
    if spectral:
        preconditioner = dataclasses.replace(preconditioner, relative=True)
    if isinstance(inverse_update_period, str) and inverse_update_period == "auto":
        inverse_update_period = period
    nesterov = momentum is not None if nesterov is None else nesterov
    if adaptive_layer_rates is None:
        adaptive_layer_rates = spectral and momentum is not None
    check(adaptive_layer_rates=adaptive_layer_rates)
    layer_multipliers = _by_layer(layer_multipliers, layers)
    scaling = ScalingConfig(
        kl_clip=kl_clip,
        learning_rate=learning_rate,
        momentum=momentum,
        nesterov=nesterov,
        step_norm=step_norm,
        trust_ratio=trust_ratio,
        adaptive_layer_rates=adaptive_layer_rates,
        layer_multipliers=layer_multipliers,
    )
    return assemble(
        layers,
        scaling,
        weight_decay=weight_decay,
        weight_decay_mask=weight_decay_mask,
        damping=damping,
        preconditioner=preconditioner,
        distribution=distribution,
        statistics_period=period,
        inverse_update_period=inverse_update_period,
    )


def _by_layer(
    multipliers: Mapping[str, float] | None,
    layers: Layers,
) -> Mapping[str, float] | None:
    """Return the multipliers, keyed by layer name.

    Raises:
      ValueError: a key matches no parameter with a block, or all layers that it matches have an earlier key.
    """
    check_given(layer_multipliers=multipliers)
    if multipliers is None or not layers.paths:
        return multipliers
    name_of: dict[str, str] = {}
    for layer in layers.with_blocks:
        name_of |= dict.fromkeys(layer.params, layer.name)
    with_block = set(map(layers.paths.index, name_of))
    found: dict[str, float] = {}
    for pattern, factor in multipliers.items():
        named = matching(
            "layer_multipliers",
            [pattern],
            [*layers.paths],
            with_block,
            "parameter with a block",
        )
        matched = {name_of[layers.paths[k]] for k in named & with_block}
        new = matched - found.keys()
        if not new:
            raise ValueError(
                f"layer_multipliers: {pattern!r} has no effect: all its layers match keys before it"
            )
        found |= dict.fromkeys(new, float(factor))
    return found


class Chosen(NamedTuple):
    """The options that `kfac` chooses from the layers.

    Attributes:
      preconditioner: the inverse of Kronecker blocks.
      period: the number of steps from one `observe` to the next, an int or an array.
      one_in: statistics use every `one_in`-th example.
    """

    preconditioner: BlockPreconditioner
    period: Any
    one_in: int


def chosen(
    layers: Layers,
    *,
    step_norm: str | None = "spectral",
    preconditioner: BlockPreconditioner | None = None,
    overhead: float | Array = OVERHEAD,
    statistics_fraction: float | None = None,
    **others: object,
) -> Chosen:
    """Choose the inverse, the interval between statistics and the examples that they use; see `kfac` for the arguments.

    Other options of `kfac` have no influence.

    Raises:
      ValueError: an argument is out of range, or `overhead` is not its default with `step_norm=None`.
    """
    check_layers(layers)
    if preconditioner is None:
        preconditioner = Cholesky() if step_norm is None else SOAP()
    check_preconditioner(preconditioner)
    check(overhead=overhead)
    one_in = statistics_one_in(layers, preconditioner, statistics_fraction)
    if step_norm is not None:
        period = affordable(layers, preconditioner, overhead, one_in)
        return Chosen(preconditioner, period, one_in)
    if not isinstance(overhead, jax.core.Tracer) and overhead != OVERHEAD:
        raise ValueError(
            f"overhead={overhead!r} has no effect: with step_norm=None every step has statistics. Leave overhead out"
        )
    return Chosen(preconditioner, 1, one_in)


def statistics_one_in(
    layers: Layers,
    preconditioner: BlockPreconditioner,
    fraction: float | None,
) -> int:
    """Return `k`, such that statistics use every `k`-th example.

    The default is 4 with `SOAP`, which only takes an eigenbasis from the statistics. It is 1 with other inverses, if
    the number of examples is below 64 or unknown, or if the batch contains an array that all examples share.
    """
    if fraction is not None:
        return check_fraction("statistics_fraction", fraction)
    # Shared arrays in the batch may refer to examples by position, like the edges of a graph.
    divisible = layers.batch_argnums and not layers.shared
    enough = (layers.num_examples or 0) >= 64
    return 4 if isinstance(preconditioner, SOAP) and divisible and enough else 1


def assemble(
    layers: Layers,
    scaling: ScalingConfig,
    *,
    weight_decay: ScalarOrSchedule | None,
    weight_decay_mask: PyTree | Callable[[PyTree], PyTree],
    **options: Any,
) -> Optimizer:
    """Return the optimizer: the preconditioner and `scaling`, then weight decay and the learning rate.

    Args:
      layers: the layers.
      scaling: the settings of all stages between the preconditioner and weight decay.
      weight_decay: see `kfac`.
      weight_decay_mask: see `kfac`.
      options: the fields of `Options`.

    Raises:
      ValueError: an option is out of range, or two options conflict.
    """
    preconditioner_options = Options(**options)
    check_options(preconditioner_options, scaling, weight_decay, weight_decay_mask)
    before = scaling.learning_rate if scaling.lr_in_momentum else None

    preconditioned = precondition_and_scale(layers, scaling, preconditioner_options)
    parts = []
    if scaling.momentum is not None and any(x.kind == "skipped" for x in layers):
        parts.append(momentum_beside_blocks(layers, scaling.momentum, scaling))
    if weight_decay is not None:
        decay = weight_decay
        if before is not None:
            # The step already contains the negative learning rate.
            decay = lambda n: -value_at(before, n) * value_at(weight_decay, n)  # noqa: E731
        parts.append(optax.add_decayed_weights(decay, weight_decay_mask))
    if before is None:
        parts.append(optax.scale_by_learning_rate(scaling.learning_rate))
    return _followed_by(preconditioned, optax.chain(*(parts or [optax.identity()])))


def _followed_by(tx: Optimizer, rest: Optimizer) -> Optimizer:
    """Chain `tx`, which holds the preconditioner, and `rest`, whose state does not change in rejected steps."""

    def init(params):
        # Place all arrays on the mesh now. Otherwise the second step would compile again.
        return replicate((tx.init(params), rest.init(params)), mesh_of(params))

    @on_mesh
    def update(updates, state, params=None, **extra):
        extra["count"] = find_state(state, "opt_state").count
        if isinstance(state, KfacState):
            raise ValueError(
                "opt_state is of scale_by_kfac alone: pass what init of this optimizer returned"
            )
        preconditioned, first = tx.update(updates, state[0], params, **extra)
        moved, second = rest.update(preconditioned, state[1], params, **extra)
        # A rejected step changes no parameters, momentum or schedule counts. This is a selection instead of a
        # `lax.cond`, because XLA fuses selections into the neighbouring arithmetic.
        taken = ~find_state(first, "state").step_rejected
        second = optax.tree.where(taken, second, state[1])

        def accepted(leaf, like):
            # `rest` multiplies by scalars and parameters that may be wider than the gradients.
            return jnp.where(taken, leaf, 0).astype(like.dtype)

        return jax.tree.map(accepted, moved, updates), (first, second)

    return optax.GradientTransformationExtraArgs(init, update)


def momentum_beside_blocks(
    layers: Layers,
    decay: ScalarOrSchedule,
    scaling: ScalingConfig,
) -> Optimizer:
    """Return the momentum of skipped leaves that have a gradient, in float32 or better."""
    paths: set[str] = set()
    for layer in layers:
        if layer.kind == "skipped" and layer.note != UNREACHED:
            paths.update(layer.params)

    def mask(tree):
        return map_by_path(lambda path, _: path in paths, tree)

    def momentum(decay):
        trace = optax.trace(decay, scaling.nesterov, layers.dtype)
        return optax.masked(trace, mask)

    def update(updates, state, params=None, *, count, **extra):
        del params, extra
        if scaling.lr_in_momentum:
            rate = value_at(scaling.learning_rate, count)
            updates = map_by_path(
                lambda path, leaf: -rate * leaf if path in paths else leaf, updates
            )
        return momentum(value_at(decay, count)).update(updates, state)

    return optax.GradientTransformationExtraArgs(momentum(0.0).init, update)
