"""Momentum of the leaves without a block."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from kfac._layers import UNREACHED, Layers, leaves_by_path, map_by_path
from kfac._optimizer.moves import ScalarOrSchedule, value_at


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
