"""Implement SOAP: Adam in the eigenbasis of Shampoo's matrices (Vyas et al. 2024, arXiv:2409.11321)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax


class Leaf(NamedTuple):
    """Hold a parameter's Shampoo matrices for all sides, their eigenvectors, and Adam's two moments."""

    sides: list[jax.Array]
    bases: list[jax.Array]
    mean: jax.Array  # in the parameter's coordinates
    square: jax.Array  # in the eigenbasis


def rotate(x: jax.Array, bases: list[jax.Array], back: bool = False) -> jax.Array:
    for axis, q in enumerate(bases):
        x = jnp.moveaxis(jnp.tensordot(q if back else q.T, x, (1, axis)), 0, axis)
    return x


def soap(b1: float = 0.95, b2: float = 0.95, every: int = 10, eps: float = 1e-8) -> optax.GradientTransformation:
    """Return SOAP's direction, which the caller multiplies by a rate.

    A power-method step renews the bases after every `every` steps.
    """

    def init_leaf(p):
        units = [jnp.eye(size, dtype=p.dtype) for size in p.shape]
        return Leaf([0 * unit for unit in units], units, jnp.zeros_like(p), jnp.zeros_like(p))

    def update_leaf(g, leaf, count):
        sides = []
        for axis, side in enumerate(leaf.sides):
            others = [k for k in range(g.ndim) if k != axis]
            sides.append(b2 * side + (1 - b2) * jnp.tensordot(g, g, (others, others)))

        def renewed():
            first = [jnp.linalg.eigh(side)[1] for side in sides]
            later = [jnp.linalg.qr(side @ q)[0] for side, q in zip(sides, leaf.bases, strict=True)]
            return [jnp.where(count == 1, a, b) for a, b in zip(first, later, strict=True)]

        bases = jax.lax.cond((count == 1) | (count % every == 0), renewed, lambda: leaf.bases)
        mean = b1 * leaf.mean + (1 - b1) * g
        square = b2 * leaf.square + (1 - b2) * rotate(g, bases) ** 2
        unbiased = jnp.sqrt(square / (1 - b2**count)) + eps
        step = rotate(rotate(mean, bases) / (1 - b1**count) / unbiased, bases, back=True)
        return step, Leaf(sides, bases, mean, square)

    def init(params):
        return jnp.zeros((), jnp.int32), [init_leaf(p) for p in jax.tree.leaves(params)]

    def update(grads, state, params=None):
        del params
        count, leaves = state[0] + 1, state[1]
        grads, treedef = jax.tree.flatten(grads)
        results = [update_leaf(g, leaf, count) for g, leaf in zip(grads, leaves, strict=True)]
        return jax.tree.unflatten(treedef, [step for step, _ in results]), (count, [leaf for _, leaf in results])

    return optax.GradientTransformation(init, update)
