"""Finite numbers: scaling of the loss for float16, and what became NaN.

Without a scale small gradients vanish in float16 (Micikevicius et al. 2018).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

INITIAL, LARGEST, SMALLEST = 2.0**15, 2.0**24, 1.0
# After so many finite steps in a row a larger scale is tried.
PATIENCE = 1000


class LossScale(NamedTuple):
    """What the loss is multiplied by, and finite steps since it last changed.

    Powers of two: multiplying and dividing by them does not round.
    """

    scale: jax.Array
    finite_steps: jax.Array


def initial() -> LossScale:
    return LossScale(jnp.float32(INITIAL), jnp.int32(0))


def adjust(state: LossScale, finite: jax.Array) -> LossScale:
    """Half of the scale after a step whose gradients were not finite, double after `PATIENCE` that were."""
    steps = jnp.where(finite, state.finite_steps + 1, 0)
    up = steps >= PATIENCE
    scale = jnp.where(finite, jnp.where(up, state.scale * 2, state.scale), state.scale / 2)
    return LossScale(jnp.clip(scale, SMALLEST, LARGEST), jnp.where(up, 0, steps))


def unscale(state: LossScale, loss: jax.Array, grads: Any, factors: Any) -> tuple[jax.Array, Any, Any]:
    """Loss, gradients and statistics of the loss itself."""
    grads = jax.tree.map(lambda g: g / state.scale, grads)
    return loss / state.scale, grads, None if factors is None else factors.unscale(state.scale)


def select(condition: jax.Array, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)


def squares(tree: Any) -> jax.Array:
    """The squared norm of each leaf: not finite where one of its numbers is not, or their square."""
    return jnp.stack([jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)])


def not_finite(loss: float, squares: dict[str, Any], trees: dict[str, Any]) -> str:
    """Which of the loss and the leaves of `trees`, by their `squares`, are not finite, in words; empty if all are."""
    found = [] if np.isfinite(loss) else ["the loss"]
    for kind, tree in trees.items():
        paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
        bad = [path for path, value in zip(paths, squares[kind], strict=True) if not np.isfinite(value)]
        if bad:
            name = jax.tree_util.keystr(bad[0], simple=True, separator="/")
            found.append(f"the {kind} {name}" + (f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""))
    return " and ".join(found)
