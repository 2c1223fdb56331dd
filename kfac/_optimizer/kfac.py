"""`kfac`: the preconditioner and the parts around it: KL clip, momentum, trust ratio, weight decay."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import optax

from kfac._capture.find_layers import matching
from kfac._checks import check, check_layers
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
from kfac._optimizer.state import find_state
from kfac._varying import mesh_of, on_mesh, placed

Optimizer: TypeAlias = optax.GradientTransformationExtraArgs


def kfac(
    learning_rate: ScalarOrSchedule,
    layers: Layers,
    *,
    momentum: ScalarOrSchedule | None = 0.9,
    nesterov: bool | None = None,
    weight_decay: ScalarOrSchedule | None = None,
    weight_decay_mask: Any | Callable[[Any], Any] | None = None,
    kl_clip: ScalarOrSchedule | None = None,
    trust_ratio: ScalarOrSchedule | Literal["auto"] | None = "auto",
    step_norm: Literal["frobenius", "spectral"] = "frobenius",
    layer_rates: bool | Mapping[str, float] | None = None,
    damping: ScalarOrSchedule | None = None,
    cost: float = COST,
    inverse_every: int | jax.Array | Literal["auto"] | None = "auto",
    inverse: Inverse | None = None,
    distribution: Distribution | None = None,
) -> optax.GradientTransformationExtraArgs:
    """K-FAC as an optimizer: `scale_by_kfac`, KL clip, momentum, trust ratio, weight decay, learning rate.

    Each part but the first and the last is left out when its argument is None. A step whose preconditioned gradient is
    not finite changes neither parameters nor momentum; `diagnostics` counts it. What else `scale_by_kfac` takes has its
    default here; `kfac.presets.large_batch` has all of it.

    Args:
      learning_rate: scalar or schedule of the step. By default, which is `trust_ratio="auto"`, it is how far a step
        goes relative to a dense kernel as it is initialised, in networks of any width: 0.05 is a first guess, to which
        the rate rises in the first tenth of the steps and from which it falls to zero.
      layers: what `find_layers` returned.
      momentum: its decay, in [0, 1), as of `optax.trace`; kept in float32 or better, by the owner of a block. Scalar or
        schedule.
      nesterov: Nesterov's form of it. None: with momentum.
      weight_decay: decoupled weight decay, times the learning rate. Scalar or schedule.
      weight_decay_mask: which parameters decay, as for `optax.add_decayed_weights`; by default all of them, those
        behind `stop_gradient` too, which a mask keeps as they are.
      kl_clip: the KL clip `c`: the preconditioned gradient `v` is multiplied by
        `min(1, sqrt(c / (learning_rate^2 <v, g>)))`, `g` the gradient, over all parameters with a curvature block
        together (Ba, Grosse & Martens 2017). Not with `trust_ratio="auto"`, which sets all lengths. Scalar or schedule.
      trust_ratio: what makes the length of a layer's step; the curvature makes its direction. None: the curvature makes
        both, and the learning rate is that of natural gradient descent.

        "auto": the step of a dense kernel, its bias included, has the norm `sqrt(d_out)`, which is that of a kernel
        with entries of variance `1 / d_in`; every copy of a stacked kernel by itself. That of a convolution has the
        norm `sqrt(overlap d_out)`: `Layer.overlap` is in how many windows an input position is, 9 for 3 x 3, 2.25 for 3
        x 3 with stride 2, 1 for disjoint patches. Kernels with the gradient's own factors count as dense. Where the
        scale of a kernel does not matter to the loss, as before batch norm, the step first loses its part along the
        kernel, which would use up length and turn nothing. Such kernels are known by `|cos(w, g)| < 0.1 / sqrt(d)`,
        with `d` entries in the kernel `w` and its gradient `g`; of others one in twelve steps is at such an angle by
        chance (Heo et al. 2021). The step of every other leaf with a block, embeddings among them, has the root mean
        square 0.1 over the elements that move. Skipped parameters go by their gradients. What has no gradient does not
        move.

        A number or a schedule: only kernels and embeddings are scaled, to this times their norm, as LARS does with the
        gradient; without their part along the kernel as above. One stays as it is where one of the norms is zero.
      step_norm: which norm of a kernel's step `trust_ratio="auto"` sets. `"spectral"` sets the largest singular value,
        as six power iterations estimate it from below, to `sqrt(overlap max(1, d_out / d_in))`. An orthogonal matrix
        with the Frobenius norm `sqrt(overlap d_out)` has that value (Yang, Simon & Bernstein 2023, arXiv:2310.17813).
        The kernel's bias is scaled alike.
      layer_rates: whether each layer has a rate of its own, by which the learning rate is multiplied. It starts at 1,
        rises, up to 4, while the gradient agrees with the direction of the step before, and falls, down to 1/16, while
        that step has gone too far in the layer; upwards only where the learning rate does not rise and is at least half
        of its highest. So one learning rate does for networks, and batches, that need different ones (for all layers
        together: Almeida et al. 1998, Baydin et al. 2018). Copies of a stacked kernel, and pieces of one that `max_dim`
        cuts, each have their own. None: with momentum and "auto".

        A mapping does that, and multiplies the steps of some layers by a number. Keys are regular expressions, as of
        `skip=`: a layer, the bias included, goes by the first key that is found in the path of one of its parameters.
        Weight decay and skipped parameters are not multiplied.
      damping: see `scale_by_kfac`, also for the arguments that follow. With `trust_ratio="auto"` it is in units of the
        mean eigenvalue of each block, as with `Cholesky(relative=True)`: then nothing depends on the scale of the loss.
        None: with "auto" 0.1, or 1e-4 for `Soap`; without, 1e-3.
      cost: what statistics and refreshes may take of the time of the gradients, in the mean step. It sets the interval
        of both: the shortest, 16 steps at most, at which their FLOPs are this share of those of the gradients of the
        batch that the layers were found with, where a FLOP of a refresh counts three times, as it takes on a CPU. It
        is reached by doublings: the first ten steps have both (`refresh_warmup` of `scale_by_kfac`). `due` says of a
        state whether the next step is one with statistics: `train_step` goes by it. Without `trust_ratio="auto"` every
        step is, as nothing else holds the length of a stale step: then leave it out.
      inverse_every: steps between refreshes of the inverses; None leaves them to `refresh`. "auto": that of `cost`.
        `plan` counts for other machines.
      inverse: how Kronecker blocks are inverted: `Cholesky()`, `Eigh()`, `Ekfac()`, `Soap()` or one's own. With "auto"
        it is made `relative`. With `Soap` the momentum is that of the gradients, and is preconditioned.

        None: `Soap()`, and without "auto" `Cholesky()`.
      distribution: how several devices are used; None: as `scale_by_kfac` sees them.

    Returns:
      An `optax.GradientTransformationExtraArgs`; `update` takes the keyword `factors`.

    Raises:
      ValueError: an argument is out of range.
    """
    auto = trust_ratio == "auto"
    check_layers(layers)
    inverse, every = chosen(layers, trust_ratio, inverse, cost)
    damping = (inverse.relative_damping if auto else 1e-3) if damping is None else damping
    inverse = dataclasses.replace(inverse, relative=True) if auto else inverse
    inverse_every = every if isinstance(inverse_every, str) and inverse_every == "auto" else inverse_every
    nesterov = momentum is not None if nesterov is None else nesterov
    layer_rates = (auto and momentum is not None) if layer_rates is None else layer_rates
    check(layer_rates=layer_rates, step_norm=step_norm)
    if isinstance(layer_rates, Mapping) and layers.paths:
        layer_rates = _by_layer(layer_rates, layers)
    moves = Moves(kl_clip, learning_rate, False, momentum, nesterov, trust_ratio, layer_rates, step_norm)
    return assemble(
        layers, moves,
        weight_decay=weight_decay, weight_decay_mask=weight_decay_mask, inverse=inverse, damping=damping,
        statistics_every=every, inverse_every=inverse_every, distribution=distribution,
    )  # fmt: skip


def _by_layer(rates: Mapping[str, float], layers: Layers) -> dict[str, float]:
    """The numbers of `layer_rates` by the first path of each layer, with or without the biases that a wrapper hides."""
    found: dict[str, float] = {}
    leaves = {path: layer.params[0] for layer in layers.with_blocks for path in layer.params}
    with_block = set(map(layers.paths.index, leaves))
    for pattern, rate in rates.items():
        named = matching("layer_rates", [pattern], [*layers.paths], with_block, "parameter with a block") & with_block
        if not (new := {leaves[layers.paths[k]] for k in named} - found.keys()):
            raise ValueError(f"layer_rates: {pattern!r} has no effect, as keys before it have its layers: put it first")
        found |= dict.fromkeys(new, float(rate))
    return found


def chosen(layers: Layers, trust_ratio: Any, inverse: Inverse | None, cost: Any) -> tuple[Inverse, Any]:
    """The inverse, and the steps between those that are to bring statistics."""
    auto = trust_ratio == "auto"
    inverse = (Soap() if auto else Cholesky()) if inverse is None else inverse
    check_inverse(inverse)
    check(cost=cost)
    if not auto and not isinstance(cost, jax.core.Tracer) and cost != COST:
        how = "without it every step has statistics, so leave cost out"
        raise ValueError(f'cost={cost!r} is for trust_ratio="auto": {how}')
    return inverse, affordable(layers, inverse, cost) if auto else 1


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
