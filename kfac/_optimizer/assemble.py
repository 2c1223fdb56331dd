"""Assemble an optimizer from the preconditioner, the stages on stacks of blocks, weight decay and the learning rate."""

from __future__ import annotations

from typing import TypeAlias

import jax
import jax.numpy as jnp
import optax

from kfac._layers import UNREACHED, Layers
from kfac._leaves import map_by_path
from kfac._mesh import mesh_of, on_mesh, replicate
from kfac._optimizer.options import Options
from kfac._optimizer.scale_by_kfac import precondition_and_scale
from kfac._optimizer.state import KfacState, find_state
from kfac._optimizer.step_scaling import ScalarOrSchedule, value_at

Optimizer: TypeAlias = optax.GradientTransformationExtraArgs


def assemble(layers: Layers, options: Options) -> Optimizer:
    """Return the optimizer: the preconditioner and the stages on stacks, then weight decay and the learning rate.

    Raises:
      ValueError: an option is out of range, or two options conflict.
    """
    preconditioned = precondition_and_scale(layers, options)
    rate = options.learning_rate
    weight_decay = options.weight_decay
    parts = []
    if options.momentum is not None and any(x.kind == "skipped" for x in layers):
        parts.append(momentum_beside_blocks(layers, options.momentum, options))
    if weight_decay is not None:
        decay = weight_decay
        if options.lr_in_momentum:
            # The step already contains the negative learning rate.
            decay = lambda n: -value_at(rate, n) * value_at(weight_decay, n)  # noqa: E731
        parts.append(optax.add_decayed_weights(decay, options.weight_decay_mask))
    if not options.lr_in_momentum:
        parts.append(optax.scale_by_learning_rate(rate))
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
    options: Options,
) -> Optimizer:
    """Return the momentum of skipped leaves that have a gradient, in float32 or better."""
    paths: set[str] = set()
    for layer in layers:
        if layer.kind == "skipped" and layer.note != UNREACHED:
            paths.update(layer.params)

    def mask(tree):
        return map_by_path(lambda path, _: path in paths, tree)

    def momentum(decay):
        return optax.masked(optax.trace(decay, options.nesterov, layers.dtype), mask)

    def update(updates, state, params=None, *, count, **extra):
        del params, extra
        if options.lr_in_momentum:
            rate = value_at(options.learning_rate, count)
            updates = map_by_path(
                lambda path, leaf: -rate * leaf if path in paths else leaf, updates
            )
        return momentum(value_at(decay, count)).update(updates, state)

    return optax.GradientTransformationExtraArgs(momentum(0.0).init, update)
