"""`kfac`: the preconditioner and the parts around it: KL clip, momentum, lengths of steps, weight decay."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from kfac._capture.find_layers import matching
from kfac._checks import check, check_fraction, check_given, check_layers, with_hints
from kfac._curvature.cholesky import Cholesky
from kfac._curvature.inverse import Inverse, check_inverse
from kfac._curvature.soap import Soap
from kfac._distributed.distribution import Distribution
from kfac._distributed.intervals import COST, affordable
from kfac._layers import UNREACHED, Layers, leaves_by_path, map_by_path
from kfac._optimizer.arguments import fitted
from kfac._optimizer.moves import Moves, ScalarOrSchedule, value_at
from kfac._optimizer.options import Options, check_options
from kfac._optimizer.scale_by_kfac import precondition_and_move
from kfac._optimizer.state import KfacState, find_state
from kfac._varying import mesh_of, on_mesh, placed

Optimizer: TypeAlias = optax.GradientTransformationExtraArgs


@with_hints
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
    cost: float = COST,
    inverse_every: int | jax.Array | Literal["auto"] | None = "auto",
    inverse: Inverse | None = None,
    statistics_fraction: float | None = None,
    distribution: Distribution | None = None,
) -> optax.GradientTransformationExtraArgs:
    """K-FAC as an optimizer: `scale_by_kfac`, KL clip, momentum, lengths of steps, weight decay, learning rate.

    Each part but the first and the last is left out when its argument is None. A step whose preconditioned gradient is
    not finite changes neither parameters nor momentum; `diagnostics` counts it. What else `scale_by_kfac` takes has its
    default here; `kfac.presets.large_batch` has all of it.

    Args:
      learning_rate: scalar or schedule. With `step_norm="spectral"` it is how far a kernel moves in a step relative to
        a freshly initialised one, whatever the width of the network. Begin with 0.1: let the rate rise to it in the
        first tenth of the steps, and then fall to zero.
      layers: what `find_layers` returned.
      momentum: its decay, in [0, 1), as of `optax.trace`; kept in float32 or better, by the owner of a block. Scalar or
        schedule.
      nesterov: Nesterov's form of it. None: with momentum.
      weight_decay: decoupled weight decay, times the learning rate. Scalar or schedule.
      weight_decay_mask: which parameters decay, as for `optax.add_decayed_weights`; by default all of them, those
        behind `stop_gradient` too, which a mask keeps as they are.
      step_norm: `"spectral"` fixes the length of the step of each parameter with a block; the curvature sets only its
        direction. The largest singular value of a kernel's step is `learning_rate * sqrt(overlap * max(1, d_out /
        d_in))`, the spectral condition of Yang, Simon & Bernstein (2023, arXiv:2310.17813). `Layer.overlap` is the
        number of windows of a convolution that contain an input position: 9 for 3 x 3, 2.25 for 3 x 3 with stride 2,
        and 1 for a dense kernel. Six power iterations estimate the singular value from below. The bias is scaled like
        its kernel, and each copy of a stacked kernel by itself. All other leaves with a block, embeddings among them,
        move by a root mean square of `0.1 * learning_rate` over the elements that move. Skipped parameters take their
        gradients as they are. A parameter whose gradient is zero does not move.

        Before a normalisation, only the direction of a kernel matters to the loss. There the step first loses its
        component along the kernel. Such kernels are recognised by `|cos(w, g)| < 0.1 / sqrt(n)`, with `n` elements in
        the kernel `w` and its gradient `g` (Heo et al. 2021, arXiv:2006.08217). Of other kernels one in twelve steps
        meets this by chance.

        None: the curvature sets the length as well, as in natural gradient descent.
      trust_ratio: the norm of a kernel's or an embedding's step, as a multiple of the norm of the parameter itself,
        before the learning rate (LARS does this with gradients). Kernels lose the same component as above. A step stays
        as it is where one of the two norms is zero. Needs `step_norm=None`. Scalar or schedule.
      kl_clip: the constraint `c` of the KL clip, which multiplies the preconditioned gradient `v` by `min(1, sqrt(c /
        (learning_rate^2 <v, g>)))`, with the gradient `g`, over all parameters with a block together (Ba, Grosse &
        Martens 2017). Needs `step_norm=None`. Scalar or schedule.
      adaptive_layer_rates: whether each layer multiplies the learning rate by a number of its own, from 1 to 4. It
        grows while the gradient agrees with the last step. It falls if the last step went too far, and returns to 1
        within some fifty steps otherwise. It grows only while the learning rate does not rise and is at least half of
        its maximum so far (for one rate for all layers: Almeida et al. 1998, Baydin et al. 2018). Copies of a stacked
        kernel and pieces of a kernel that `max_dim` cuts have rates of their own. None: with momentum and
        `step_norm="spectral"`.
      layer_multipliers: factors of the steps of some layers. Keys are regular expressions, as in `skip=`. A layer,
        including its bias, takes the first key that is found in one of its paths. Weight decay and skipped parameters
        are not multiplied. Needs `step_norm="spectral"`.
      damping: see `scale_by_kfac`, also for the arguments that follow. With `step_norm="spectral"` it is in units of
        the mean eigenvalue of each block, as with `Cholesky(relative=True)`, so nothing depends on the scale of the
        loss. None: 1e-4 for `Soap` and 0.1 for the others with `step_norm="spectral"`, else 1e-3.
      cost: what statistics and refreshes may take of the time of the gradients, in the mean step. It sets the interval
        of both: the shortest, 16 steps at most, at which their FLOPs are this share of those of the gradients of the
        batch that the layers were found with. Statistics include a forward and a backward pass of their own. A FLOP of
        a refresh counts three times, as it takes on a CPU. The interval is reached by doublings: the first ten steps
        have both (`refresh_warmup` of `scale_by_kfac`). `statistics_due` tells whether to observe before the next
        step: `train_step` does. With `step_norm=None` statistics are due in every step, because nothing limits the
        length of a step by old inverses: then leave `cost` out.
      inverse_every: steps between refreshes of the inverses, which `observe` makes. None: it only takes averages, and
        `observe(opt_state)` without factors refreshes. "auto": that of `cost`.
        `plan` counts for other machines.
      inverse: how Kronecker blocks are inverted: `Cholesky()`, `Eigh()`, `Ekfac()`, `Soap()` or one's own. With
        `step_norm="spectral"` it is made `relative`. `Soap` preconditions the momentum of the gradients.

        None: `Soap()`, and with `step_norm=None` `Cholesky()`.
      statistics_fraction: the share of a batch that `observe` will get statistics of, `1 / k` with an integer `k`, for
        the interval that follows from `cost`. `train_step` takes statistics of this share. None: a quarter with
        `Soap()` and 64 examples or more, else 1. It is also 1 if the batch has arrays that all examples share. Pass 1
        if the loss of every `k`-th example makes no sense.
      distribution: how several devices are used; None: as `scale_by_kfac` sees them.

    Returns:
      An optimizer like those of optax. `update` needs the parameters. It knows the curvature from `kfac.observe`;
      until that is called, gradients are not preconditioned.

    Raises:
      ValueError: an argument is out of range.
    """
    spectral = step_norm is not None
    check_layers(layers)
    inverse, every, _ = chosen(
        layers, step_norm=step_norm, inverse=inverse, cost=cost, statistics_fraction=statistics_fraction
    )
    damping = (inverse.relative_damping if spectral else 1e-3) if damping is None else damping
    inverse = dataclasses.replace(inverse, relative=True) if spectral else inverse
    inverse_every = every if isinstance(inverse_every, str) and inverse_every == "auto" else inverse_every
    nesterov = momentum is not None if nesterov is None else nesterov
    adaptive_layer_rates = (spectral and momentum is not None) if adaptive_layer_rates is None else adaptive_layer_rates
    check(adaptive_layer_rates=adaptive_layer_rates)
    check_given(layer_multipliers=layer_multipliers)
    if layer_multipliers is not None and layers.paths:
        layer_multipliers = _by_layer(layer_multipliers, layers)
    moves = Moves(
        kl_clip, learning_rate, False, momentum, nesterov, step_norm, trust_ratio, adaptive_layer_rates,
        layer_multipliers,
    )  # fmt: skip
    return assemble(
        layers, moves,
        weight_decay=weight_decay, weight_decay_mask=weight_decay_mask, inverse=inverse, damping=damping,
        statistics_every=every, inverse_every=inverse_every, distribution=distribution,
    )  # fmt: skip


def _by_layer(multipliers: Mapping[str, float], layers: Layers) -> dict[str, float]:
    """The multipliers by the first path of each layer, with or without the biases that a wrapper hides."""
    found: dict[str, float] = {}
    leaves = {path: layer.params[0] for layer in layers.with_blocks for path in layer.params}
    with_block = set(map(layers.paths.index, leaves))
    for pattern, factor in multipliers.items():
        named = matching("layer_multipliers", [pattern], [*layers.paths], with_block, "parameter with a block")
        if not (new := {leaves[layers.paths[k]] for k in named & with_block} - found.keys()):
            raise ValueError(f"layer_multipliers: {pattern!r} has no effect: all its layers match keys before it")
        found |= dict.fromkeys(new, float(factor))
    return found


INTERVAL_OPTIONS = ("step_norm", "inverse", "cost", "statistics_fraction")


class Chosen(NamedTuple):
    """The choices that follow from the layers.

    Attributes:
      inverse: the inverse.
      every: the number of steps from one `observe` to the next.
      share: `k`, if statistics come from every `k`-th example.
    """

    inverse: Inverse
    every: Any
    share: int


def chosen(
    layers: Layers,
    *,
    step_norm: Any = "spectral",
    inverse: Inverse | None = None,
    cost: Any = COST,
    statistics_fraction: float | None = None,
) -> Chosen:
    """Choose the inverse and the interval of statistics; see `kfac` for the arguments."""
    inverse = (Cholesky() if step_norm is None else Soap()) if inverse is None else inverse
    check_inverse(inverse)
    check(cost=cost)
    share = statistics_share(layers, inverse, statistics_fraction)
    if step_norm is not None:
        return Chosen(inverse, affordable(layers, inverse, cost, share), share)
    if not isinstance(cost, jax.core.Tracer) and cost != COST:
        raise ValueError(f"cost={cost!r} has no effect: with step_norm=None every step has statistics. Leave cost out")
    return Chosen(inverse, 1, share)


def statistics_share(layers: Layers, inverse: Inverse, fraction: float | None) -> int:
    """Return `k`, if statistics come from every `k`-th example.

    By default 4 with `Soap`, which takes a basis from statistics and nothing else, and 64 examples or more, unless the
    batch also has arrays that all examples share.
    """
    if fraction is not None:
        return check_fraction("statistics_fraction", fraction)
    # Arrays in the batch that are no examples may refer to the examples, as the nodes of a graph do.
    enough = layers.batch_argnums and not layers.shared and (layers.num_examples or 0) >= 64
    return 4 if isinstance(inverse, Soap) and enough else 1


def assemble(
    layers: Layers, moves: Moves, *, weight_decay: Any, weight_decay_mask: Any, **preconditioner: Any
) -> Optimizer:
    """The preconditioner with what follows it, weight decay and the learning rate."""
    options = Options(**preconditioner)
    check_options(options, moves, weight_decay, weight_decay_mask)
    before = moves.learning_rate if moves.rate_in_momentum else None

    def build(layers):
        parts: list[Any] = []
        if moves.momentum is not None and any(layer.kind == "skipped" for layer in layers):
            parts.append(momentum_beside_blocks(layers, moves.momentum, moves.nesterov, before))
        if weight_decay is not None:
            # With `rate_in_momentum` what it is added to contains the rate already.
            decay = weight_decay if before is None else lambda n: -value_at(before, n) * value_at(weight_decay, n)
            parts.append(optax.add_decayed_weights(decay, weight_decay_mask))
        if before is None:
            parts.append(optax.scale_by_learning_rate(moves.learning_rate))
        return _followed_by(precondition_and_move(layers, moves, options), optax.chain(*(parts or [optax.identity()])))

    return fitted(layers, build)


def _followed_by(tx: Optimizer, rest: Optimizer) -> Optimizer:
    """`tx`, which holds the preconditioner, and then `rest`, which is told of the steps that are refused."""

    def init(params):
        # All on one mesh from the start: else the second step would be compiled anew.
        return placed((tx.init(params), rest.init(params)), mesh_of(params))

    @on_mesh
    def update(updates, state, params=None, **extra):
        extra["count"] = find_state(state, "opt_state").count
        if isinstance(state, KfacState):
            raise ValueError("opt_state is of scale_by_kfac alone: pass what init of this optimizer returned")
        preconditioned, first = tx.update(updates, state[0], params, **extra)
        moved, second = rest.update(preconditioned, state[1], params, **extra)
        # A refused step is none: the counts of schedules stay, like the momentum, and nothing is updated. Selected, as
        # XLA makes a selection part of the arithmetic beside it, where kernels of a branch would have to be compiled.
        taken = ~find_state(first, "state").refused
        second = jax.tree.map(lambda new, old: jnp.where(taken, new, old), second, state[1])
        # In the dtype of the gradients, whatever the scalars and parameters that `rest` multiplies by.
        moved = jax.tree.map(lambda leaf, like: jnp.where(taken, leaf, 0).astype(like.dtype), moved, updates)
        return moved, (first, second)

    return optax.GradientTransformationExtraArgs(init, update)


def momentum_beside_blocks(
    layers: Layers, decay: ScalarOrSchedule, nesterov: bool, rate: ScalarOrSchedule | None
) -> optax.GradientTransformationExtraArgs:
    """Momentum of skipped leaves that have a gradient, in float32 or better; with a `rate`, which comes before it."""
    skipped = [layer for layer in layers if layer.kind == "skipped" and layer.note != UNREACHED]
    chosen = {path: shape for layer in skipped for path, shape in zip(layer.params, layer.shapes, strict=True)}

    def init(params):
        leaves = {path: leaf for path, leaf in leaves_by_path(params).items() if path in chosen}
        if not jax.tree.leaves(params):  # the placeholder of `optax.tree.map_params`
            leaves = {path: jnp.zeros(shape) for path, shape in chosen.items()}
        return optax.TraceState({path: jnp.zeros_like(leaf, _wide(leaf)) for path, leaf in leaves.items()})

    def update(updates, state, params=None, *, count, **extra):
        del params, extra
        factor = 1 if rate is None else -value_at(rate, count)
        leaves = {path: leaf for path, leaf in leaves_by_path(updates).items() if path in state.trace}
        leaves = {path: (factor * leaf).astype(_wide(leaf)) for path, leaf in leaves.items()}
        present = optax.TraceState({path: state.trace[path] for path in leaves})
        moved, present = optax.trace(value_at(decay, count), nesterov).update(leaves, present)
        new = map_by_path(lambda path, leaf: moved.get(path, leaf), updates)
        return new, optax.TraceState(state.trace | present.trace)

    return optax.GradientTransformationExtraArgs(init, update)


def _wide(leaf: jax.Array) -> Any:
    return jnp.promote_types(leaf.dtype, jnp.float32)
