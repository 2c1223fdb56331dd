"""From preconditioned gradients to steps, in stacks of blocks: the KL clip, momentum, and the length of each step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kfac._curvature.blocks import Group
from kfac._curvature.inverse import sums
from kfac._factors import per_block
from kfac._layers import Layer

ScalarOrSchedule = float | jax.Array | Callable[[jax.Array], jax.typing.ArrayLike]


def value_at(scalar: ScalarOrSchedule, count: jax.Array) -> jax.Array:
    """A scalar, or a schedule at step `count`, as float32."""
    return jnp.asarray(scalar(count) if callable(scalar) else scalar, jnp.float32)


@dataclasses.dataclass(frozen=True)
class Moves:
    """What follows the preconditioner, in this order; without arguments nothing.

    Attributes:
      kl_clip: the constraint of the KL clip.
      learning_rate: for the KL clip, and where it comes before the momentum.
      rate_in_momentum: whether it does.
      momentum: its decay. An inverse that takes gradients has it before the preconditioner.
      nesterov: whether in Nesterov's form.
      step_norm: as of `kfac.kfac`.
      trust_ratio: as of `kfac.kfac`.
      adaptive_layer_rates: whether each block adapts a rate of its own.
      layer_multipliers: factors of the steps of some layers, by their first paths.
    """

    kl_clip: ScalarOrSchedule | None = None
    learning_rate: ScalarOrSchedule = 0.0
    rate_in_momentum: bool = False
    momentum: ScalarOrSchedule | None = None
    nesterov: bool = False
    step_norm: Literal["spectral"] | None = None
    trust_ratio: ScalarOrSchedule | None = None
    adaptive_layer_rates: bool = False
    layer_multipliers: Mapping[str, float] | None = None

    @property
    def set_lengths(self) -> bool:
        """Whether the lengths of steps do not follow from the curvature alone."""
        return self.step_norm is not None or self.trust_ratio is not None

    def at(self, count: jax.Array, damping: jax.Array) -> Now:
        """Return the scalars of step `count`."""
        given = (self.trust_ratio, self.kl_clip)
        coefficient, limit = (None if x is None else value_at(x, count) for x in given)
        decay = value_at(0.0 if self.momentum is None else self.momentum, count)
        return Now(damping, limit, value_at(self.learning_rate, count), decay, coefficient)

    def needs_params(self, group: Group) -> bool:
        """Whether the step of a group depends on its parameters."""
        return self.set_lengths and bool(np.any(find_kernels(group, self).size))

    def length(self, layer: Layer, kernel: bool) -> float:
        """The length of a step at a learning rate of 1: the spectral norm of a kernel, else the root mean square."""
        multiplier = (self.layer_multipliers or {}).get(layer.params[0], 1.0)
        if not kernel:
            return multiplier * BESIDE_KERNELS
        d_in = layer.layouts[0].size("in")
        return multiplier * (layer.overlap * max(1.0, layer.d_out / d_in)) ** 0.5


class Motion(NamedTuple):
    """What is kept of how `k` blocks move.

    Attributes:
      momentum: `[k, d_in, d_out]`, that of the preconditioned gradients; None without, or where the inverse has one.
      rate: `[k]`, factors of the learning rate; None without adaptive rates.
    """

    momentum: jax.Array | None
    rate: jax.Array | None


class Now(NamedTuple):
    """The scalars of one step.

    Attributes:
      damping: the damping, for inverses that apply it at once.
      limit: the constraint of the KL clip.
      rate: the learning rate.
      momentum: its decay.
      coefficient: the trust ratio; None without one.
    """

    damping: jax.Array
    limit: jax.Array | None
    rate: jax.Array
    momentum: jax.Array
    coefficient: jax.Array | None


def clip_scale(limit: jax.Array, rate: jax.Array, product: jax.Array) -> jax.Array:
    """The KL clip, `min(1, sqrt(c / (lr^2 <v, g>)))`, with the constraint `limit` and `product = <v, g>`."""
    length = rate * rate * product
    # <v, g> cannot be negative; where it or the rate is zero there is nothing to constrain.
    return jnp.where(length > limit, jnp.sqrt(limit / jnp.where(length > 0, length, 1)), 1.0)


# The rate of a block grows if the cosine between the last direction and the gradient is above AGREES, and falls if it
# is below TOO_FAR: by the factor `exp(FOLLOWS)` per step at most, which it reaches at a cosine FULL beyond the limit.
# In between lie the cosines of small batches, which noise brings near zero, and those of rates tuned for the whole
# network, whose steps go a little too far along the sharpest directions. They say nothing about the rate.
AGREES, TOO_FAR, FOLLOWS, FULL = 0.02, -0.1, 0.2, 0.1
# What an early step has said expires: the logarithm of a rate loses this share per step. Otherwise rates that grow in
# the first steps stay large. With small batches, the noise of late steps then costs more than the first ones gained.
FORGETS = 0.02
FASTEST = 4.0


def adapted(rate: jax.Array, angle: jax.Array, full: jax.Array) -> jax.Array:
    """The rates of blocks, 1 to `FASTEST`: higher if the last direction still goes down, lower if it has gone too far.

    Args:
      rate: `[k]`.
      angle: `[k]`, the cosines between the last directions and the gradients.
      full: whether the learning rate is that of the whole schedule: while it rises, or when it has fallen to less than
        half, short steps say nothing of what it multiplies.
    """
    beyond = jnp.minimum(angle - jnp.clip(angle, TOO_FAR, AGREES), jnp.where(full, jnp.inf, 0))
    new = rate ** (1 - FORGETS) * jnp.exp(FOLLOWS * jnp.clip(beyond / FULL, -1, 1))
    return jnp.clip(new, 1, FASTEST).astype(rate.dtype)


# A gradient is taken to be at a right angle to its kernel where the cosine is below this over the root of their size.
# Where the scale of a kernel matters, one in twelve is so by chance (Heo et al. 2021, arXiv:2006.08217).
RIGHT_ANGLE = 0.1

# The root mean square of the step of a parameter that is not a kernel, relative to the learning rate.
BESIDE_KERNELS = 0.1

# If less than this share of the squares in an update is left without its component along the kernel, that may be
# rounding alone. The step is then shorter than it should be.
LEAST_LEFT = 1e-4


class Kernels(NamedTuple):
    """What the lengths of steps need to know of each of `k` blocks.

    Attributes:
      size: the entries of the kernel that a block is, or is a piece of; 0 of what is no kernel.
      width: the rows of the block that are not the bias.
      length: of its step, see `Moves.length`.
    """

    size: Any
    width: Any
    length: Any


def find_kernels(group: Group, moves: Moves) -> Kernels:
    """Returns what the lengths of steps need to know of the blocks of a group."""
    parts = []
    for layer, count in zip(group.layers, group.counts, strict=True):
        kernel = group.block.kernel and not (moves.step_norm is not None and layer.kind == "embedding")
        each, rows = layer.block_shapes["A"][0], layer.layouts[0].size("in")
        width = np.resize(np.clip(rows - each * np.arange(layer.cut[0]), 0, each), count)
        parts.append((np.full(count, kernel * rows * layer.d_out), width, np.full(count, moves.length(layer, kernel))))
    return Kernels(*map(np.concatenate, zip(*parts, strict=True)))


class Stack(NamedTuple):
    """A group whose steps get lengths.

    Attributes:
      updates: `[k, d_in, d_out]`.
      params: likewise; None where no block is a kernel.
      gradients: those of the whole batch, likewise.
      kernels: arrays `[k]`, or `[1]` where all blocks are alike.
      by_row: whether rows are leaves of their own.
      whole: what makes sums over pieces, `[sums, k]`, sums over their kernels.
    """

    updates: jax.Array
    params: jax.Array | None
    gradients: jax.Array
    kernels: Kernels
    by_row: bool = False
    whole: Callable[[jax.Array], jax.Array] | None = None

    @property
    def inside(self) -> jax.Array:
        """`[k, d_in, 1]`: which rows are the kernel's."""
        return jnp.arange(self.updates.shape[1])[:, None] < per_block(self.kernels.width, self.updates)


def lengthened(stacks: Mapping[str, Stack], coefficient: jax.Array | None) -> dict[str, jax.Array]:
    """Rescale the step of each block to a fixed length: curvature and gradient set only its direction.

    The largest singular value of a kernel's step becomes `sqrt(overlap max(1, d_out / d_in))`, so that outputs change
    by as much in networks of any width (the spectral condition of Yang, Simon & Bernstein 2023, arXiv:2310.17813). A
    convolution applies its kernel in each of the `overlap` windows that hold a position, hence its factor. The bias is
    scaled like its kernel. The step of every other leaf with a block gets a root mean square of `BESIDE_KERNELS`, over
    the elements that move. A block whose gradient is zero does not move: its momentum would be made as long as ever.

    With a `coefficient`, the trust ratio, the step of each kernel gets that times the kernel's own norm, as with
    `optax.scale_by_trust_ratio`, and nothing else changes.

    In either case a kernel's step first loses its component along the kernel, if only the kernel's direction matters.

    Args:
      stacks: the groups, by name.
      coefficient: the trust ratio, a scalar, or None.

    Returns:
      The steps, `[k, d_in, d_out]` for each group.
    """
    steps = {name: x.updates for name, x in stacks.items()}
    chosen = {name: x for name, x in stacks.items() if coefficient is None or x.params is not None}
    if not chosen:
        return steps
    sums = {name: _sums(x) for name, x in chosen.items()}
    sizes = [len(x.uu) for x in sums.values()]
    # The numbers of all groups are worked on as one vector: each operation is then one kernel.
    joined = BlockSums(*map(jnp.concatenate, zip(*sums.values(), strict=True)))
    parts = [jnp.split(x, np.cumsum(sizes)[:-1]) for x in (_radial(joined), _ratio_beside_kernels(joined))]
    for (name, x), radial, ratio in zip(chosen.items(), *parts, strict=True):
        u = x.updates
        if x.params is None:
            steps[name] = u * (ratio.reshape(len(u), -1, 1) if x.by_row else per_block(ratio, u))
            continue
        u = u - per_block(radial, u) * jnp.where(x.inside, x.params, 0)
        if coefficient is None:
            ratio = jnp.where(x.kernels.size > 0, _spectral_ratio(x, u, sums[name]), ratio)
            steps[name] = u * per_block(ratio, u)
        else:
            ratio = _trust_ratio(x, u, sums[name], coefficient)
            steps[name] = jnp.where(x.inside, u * per_block(ratio, u), x.updates)
    return steps


class BlockSums(NamedTuple):
    """Sums over each block, or each row, of updates `u`, kernels `w` and gradients `g`: vectors of one length.

    Attributes:
      uu: the sum of `u^2`; without biases where there are kernels.
      uw: of `u w`; like the next three 0 for other leaves.
      ww: of `w^2`.
      gw: of `g w`.
      gg: of `g^2`.
      moving: how many `u` are not zero.
      size: the elements of the kernel; 0 for other leaves.
      length: of the step, see `Moves.length`; 0 if all `g` are zero.
    """

    uu: jax.Array
    uw: jax.Array
    ww: jax.Array
    gw: jax.Array
    gg: jax.Array
    moving: jax.Array
    size: jax.Array
    length: jax.Array


def _sums(x: Stack) -> BlockSums:
    u, g = x.updates, x.gradients
    products = [u != 0, g != 0]
    if x.params is None:
        products = [u * u, *products]
    else:
        inner_u = jnp.where(x.inside, u, 0)
        w = jnp.where(x.inside & per_block(x.kernels.size > 0, u), x.params, 0)
        products = [inner_u * u, u * w, w * w, g * w, jnp.where(x.inside, g * g, 0), *products]
    totals = sums([product.astype(u.dtype) for product in products], 2 if x.by_row else 1)
    like, flat = totals[0], [total.reshape(-1) for total in totals]
    if x.params is None:
        flat[1:1] = 4 * [jnp.zeros_like(flat[0])]
    if x.whole is not None:
        flat = list(x.whole(jnp.stack(flat)))
    *flat, reached = flat
    of_blocks = x.kernels.size, x.kernels.length
    size, length = ((jnp.zeros_like(like) + per_block(y, like)).astype(u.dtype).reshape(-1) for y in of_blocks)
    return BlockSums(*[*flat, size, jnp.where(reached > 0, length, 0)])


def _radial(s: BlockSums) -> jax.Array:
    """How many times the kernel is in the step, if only its direction matters to the loss; else 0.

    The gradient is then orthogonal to the kernel. The component of the step along it would change nothing but the
    kernel's norm.
    """
    # Root by root, as the product of the squares may leave the range of float32.
    bound = RIGHT_ANGLE * jnp.sqrt(s.ww) * jnp.sqrt(s.gg) / jnp.sqrt(jnp.maximum(s.size, 1))
    orthogonal = (s.size > 0) & (jnp.abs(s.gw) < bound) & (s.ww > 0)
    return jnp.where(orthogonal, s.uw / jnp.where(s.ww > 0, s.ww, 1), 0)


def _ratio_beside_kernels(s: BlockSums) -> jax.Array:
    """The factor that gives the elements that move their root mean square."""
    return _ratio(s.length * jnp.sqrt(s.moving), s.uu)


def _spectral_ratio(x: Stack, steps: jax.Array, s: BlockSums) -> jax.Array:
    """The factors `[k]` that give kernels their spectral norm.

    Pieces of a kernel share one factor, from the root of the sum of their squared spectral norms. That is at least the
    kernel's norm, so its step may be too short, by the root of the number of pieces at most.
    """
    kernels = jnp.where(x.inside, steps, 0)
    squares = jnp.stack([jnp.sum(jnp.square(kernels), axis=(1, 2)), jnp.square(spectral_norm(kernels))])
    left, spectral = squares if x.whole is None else x.whole(squares)
    ratio = _ratio(s.length, spectral)
    return (ratio * jnp.sqrt(jnp.minimum(_quotient(left, LEAST_LEFT * s.uu), 1))).astype(steps.dtype)


def _trust_ratio(x: Stack, steps: jax.Array, s: BlockSums, coefficient: jax.Array) -> jax.Array:
    """The factors `[k]` that give steps `coefficient` times the norm of their kernels; 1 where either norm is zero."""
    left = jnp.sum(jnp.square(jnp.where(x.inside, steps, 0)), axis=(1, 2))[None]
    (left,) = left if x.whole is None else x.whole(left)
    ratio = _ratio(coefficient * jnp.sqrt(s.ww), jnp.maximum(left, LEAST_LEFT * s.uu))
    return jnp.where((s.ww > 0) & (left > 0), ratio, 1).astype(steps.dtype)


POWER_ITERATIONS = 6


def spectral_norm(stack: jax.Array) -> jax.Array:
    """Estimate the largest singular values of `[k, m, n]` from below, by power iterations from a fixed vector."""

    def iterate(vector):
        image = jnp.einsum("kmn,kn->km", stack, _normalised(vector))
        return jnp.einsum("kmn,km->kn", stack, _normalised(image))

    # No symmetry of a network makes this vector orthogonal to the largest singular vector.
    start = np.cos(1.0 + np.arange(stack.shape[-1]) ** 1.5)
    vector = iterate(jnp.broadcast_to(jnp.asarray(start, stack.dtype), (len(stack), len(start))))
    # A loop compiles its body once. The first iteration has made the vector vary over devices like the stack.
    vector = lax.fori_loop(1, POWER_ITERATIONS, lambda _, vector: iterate(vector), vector)
    return jnp.linalg.norm(vector, axis=-1)


def _normalised(vectors: jax.Array) -> jax.Array:
    norm = jnp.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / jnp.where(norm > 0, norm, 1)


def _ratio(length: jax.Array, square: jax.Array) -> jax.Array:
    """The factor that makes a norm, whose square is given, equal to `length`; 0 if it is zero."""
    return _quotient(length, jnp.sqrt(square))


def _quotient(a: jax.Array, b: jax.Array) -> jax.Array:
    """`a / b`, or 0 where `b` is 0."""
    return jnp.where(b > 0, a / jnp.where(b > 0, b, 1), 0)
