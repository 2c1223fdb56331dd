"""From preconditioned gradients to steps, in stacks of blocks: the KL clip, momentum, and the length of each step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

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
      trust_ratio: as of `kfac.kfac`.
      layer_rates: whether each block has a rate of its own; a mapping has further factors, by first paths of layers.
      step_norm: as of `kfac.kfac`.
    """

    kl_clip: ScalarOrSchedule | None = None
    learning_rate: ScalarOrSchedule = 0.0
    rate_in_momentum: bool = False
    momentum: ScalarOrSchedule | None = None
    nesterov: bool = False
    trust_ratio: ScalarOrSchedule | Literal["auto"] | None = None
    layer_rates: bool | Mapping[str, float] = False
    step_norm: Literal["frobenius", "spectral"] = "frobenius"

    def at(self, count: jax.Array, **preconditioner: jax.Array) -> Now:
        """The scalars of step `count`, with those of the preconditioner."""
        given = (self.trust_ratio, self.kl_clip)
        coefficient, limit = (None if x is None or isinstance(x, str) else value_at(x, count) for x in given)
        decay = value_at(0.0 if self.momentum is None else self.momentum, count)
        return Now(limit=limit, rate=value_at(self.learning_rate, count), momentum=decay, coefficient=coefficient,
                   **preconditioner)  # fmt: skip

    def needs_params(self, group: Group) -> bool:
        """Whether the step of a group depends on its parameters."""
        return self.trust_ratio is not None and bool(np.any(find_kernels(group, self).size))

    def length(self, layer: Layer, kernel: bool) -> float:
        """Return the length of a step at a learning rate of 1.

        For a kernel that is the Frobenius or the spectral norm; for another leaf, the root mean square.
        """
        rate = self.layer_rates.get(layer.params[0], 1.0) if isinstance(self.layer_rates, Mapping) else 1.0
        if not kernel:
            return rate * BESIDE_KERNELS
        if self.step_norm == "frobenius":
            return rate * (layer.overlap * layer.d_out) ** 0.5
        d_in = layer.layouts[0].size("in")
        return rate * (layer.overlap * max(1.0, layer.d_out / d_in)) ** 0.5


class Motion(NamedTuple):
    """What is kept of how `k` blocks move.

    Attributes:
      momentum: `[k, d_in, d_out]`, that of the preconditioned gradients; None without, or where the inverse has one.
      rate: `[k]`, by what the learning rate is multiplied; None where it is the same for all.
    """

    momentum: jax.Array | None
    rate: jax.Array | None


class Now(NamedTuple):
    """The scalars of one step.

    Attributes:
      damping: that of Kronecker blocks.
      unitwise: that of unit-wise and diagonal ones.
      decay: that of the running averages.
      turn: whether this step refreshes inverses that are stale.
      limit: the constraint of the KL clip.
      rate: the learning rate.
      momentum: its decay.
      coefficient: the trust ratio, if it is a number; None without one, and with "auto".
    """

    damping: jax.Array
    unitwise: jax.Array
    decay: jax.Array
    turn: jax.Array
    limit: jax.Array | None
    rate: jax.Array
    momentum: jax.Array
    coefficient: jax.Array | None


def clip_scale(limit: jax.Array, rate: jax.Array, product: jax.Array) -> jax.Array:
    """The KL clip, `min(1, sqrt(c / (lr^2 <v, g>)))`, with the constraint `limit` and `product = <v, g>`."""
    length = rate * rate * product
    # <v, g> cannot be negative; where it or the rate is zero there is nothing to constrain.
    return jnp.where(length > limit, jnp.sqrt(limit / jnp.where(length > 0, length, 1)), 1.0)


# The rate of a block grows where the cosine between the last direction and the gradient is above AGREES, and falls
# where it is below TOO_FAR: by the factor `exp(FOLLOWS)` in a step at most, which it is where the cosine is FULL
# beyond. In between it stays: there are the cosines of small batches, which noise brings near zero, and those of rates
# tuned for the whole network, at which steps go a little too far along the sharpest directions.
AGREES, TOO_FAR, FOLLOWS, FULL = 0.02, -0.1, 0.2, 0.1
SLOWEST, FASTEST = 1 / 16, 4.0


def adapted(rate: jax.Array, angle: jax.Array, full: jax.Array) -> jax.Array:
    """The rates of blocks, higher where the last direction still goes down, lower where it has gone too far.

    Args:
      rate: `[k]`.
      angle: `[k]`, the cosines between the last directions and the gradients.
      full: whether the learning rate is that of the whole schedule: while it rises, or when it has fallen to less than
        half, short steps say nothing of what it multiplies.
    """
    beyond = jnp.minimum(angle - jnp.clip(angle, TOO_FAR, AGREES), jnp.where(full, jnp.inf, 0))
    return jnp.clip(rate * jnp.exp(FOLLOWS * jnp.clip(beyond / FULL, -1, 1)), SLOWEST, FASTEST).astype(rate.dtype)


# A gradient is taken to be at a right angle to its kernel where the cosine is below this over the root of their size.
# Where the scale of a kernel matters, one in twelve is so by chance (Heo et al. 2021, arXiv:2006.08217).
RIGHT_ANGLE = 0.1

# The root mean square of a step of what is no kernel, relative to the learning rate.
BESIDE_KERNELS = 0.1

# The square of an update without its part along the kernel is a difference of sums. Less than this share of the whole
# may be rounding alone, and counts as this share: the step is then shorter than it should be.
LEAST_LEFT = 1e-4


class Kernels(NamedTuple):
    """What the lengths of steps need to know of each of `k` blocks.

    Attributes:
      size: the entries of the kernel that a block is, or is a piece of; 0 of what is no kernel.
      width: the rows of the block that are not the bias.
      length: of its step at a learning rate of 1: the norm of a kernel, the root mean square of what is none.
    """

    size: Any
    width: Any
    length: Any


def find_kernels(group: Group, moves: Moves) -> Kernels:
    """Returns what the lengths of steps need to know of the blocks of a group."""
    parts = []
    for layer, count in zip(group.layers, group.counts, strict=True):
        kernel = group.block.kernel and not (moves.trust_ratio == "auto" and layer.kind == "embedding")
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


def lengthened(
    stacks: Mapping[str, Stack], coefficient: jax.Array | None, spectral: bool = False
) -> dict[str, jax.Array]:
    """Rescales the step of each block to a fixed length: curvature and gradient set only its direction.

    The norm `sqrt(d_out)` for the kernel and bias of a dense layer together; a root mean square of 0.1 for every other
    leaf with a block, over its elements that move at all. The norm `sqrt(d_out)` is that of an orthogonal matrix with
    at least as many columns as rows: outputs change by as much in networks of any width. A convolution applies one such
    matrix for each window that holds a position; `overlap` of them together have the norm `sqrt(overlap d_out)`. What
    has no gradient in a step does not move in it: its momentum would be made as long as ever.

    If `spectral`, the largest singular value of a kernel's step, as estimated, is `sqrt(overlap max(1, d_out / d_in))`
    instead, as of an orthogonal matrix with the same Frobenius norm (Yang, Simon & Bernstein 2023, arXiv:2310.17813).

    With a `coefficient`, the trust ratio, so many times its own norm for each kernel, as with
    `optax.scale_by_trust_ratio`, and nothing else. In either case what does not turn a kernel is left out.
    """
    steps = {name: x.updates for name, x in stacks.items()}
    chosen = {name: x for name, x in stacks.items() if coefficient is None or x.params is not None}
    if not chosen:
        return steps
    totals = {name: _sums(x) for name, x in chosen.items()}
    sizes = [len(x[0]) for x in totals.values()]
    # The numbers of all groups are worked on as one vector: each operation is then one kernel.
    ratio, radial = _lengths([jnp.concatenate(x) for x in zip(*totals.values(), strict=True)], coefficient)
    cut = [jnp.split(x, np.cumsum(sizes)[:-1]) for x in (ratio, radial)]
    for (name, x), ratio, radial in zip(chosen.items(), *cut, strict=True):
        u = x.updates
        if x.params is not None:
            u = u - per_block(radial, u) * jnp.where(x.inside, x.params, 0)
            if spectral:
                ratio = _spectral_ratio(x, u, ratio)
        new = (ratio.reshape(len(u), -1, 1) if x.by_row else per_block(ratio, u)) * u
        steps[name] = new if coefficient is None else jnp.where(x.inside, new, x.updates)
    return steps


def _sums(x: Stack) -> list[jax.Array]:
    """Sums over each block, or row, of updates `u`, parameters `w` and gradients `g`: vectors of one length.

    Returns:
      `u^2`, `u w`, `w^2`, `g w` and `g^2` of the entries `inside`, all but the first 0 of what is no kernel; `u^2` of
      those outside, so of the bias; how many `u`, and `g`, are not zero; elements of a kernel, 0 of what is none; and
      the length of the step.
    """
    u, g = x.updates, x.gradients
    products = [u * u, u != 0, g != 0]
    if x.params is not None:
        w = jnp.where(x.inside & per_block(x.kernels.size > 0, u), x.params, 0)
        products += [u * w, w * w, g * w, jnp.where(x.inside, g * g, 0), jnp.where(x.inside, 0, u * u)]
    totals = sums([product.astype(u.dtype) for product in products], 2 if x.by_row else 1)
    like, (square, moving, reached, *rest) = totals[0], (s.reshape(-1) for s in totals)
    totals = [square, moving, reached, *(rest or 5 * [jnp.zeros_like(square)])]
    square, moving, reached, uw, ww, gw, gg, beside = totals if x.whole is None else x.whole(jnp.stack(totals))
    of_blocks = x.kernels.size, x.kernels.length
    size, length = ((jnp.zeros_like(like) + per_block(y, like)).astype(u.dtype).reshape(-1) for y in of_blocks)
    return [square - beside, uw, ww, gw, gg, beside, moving, reached, size, length]


def _lengths(totals: Sequence[jax.Array], coefficient: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Returns what each step is multiplied by, and how many times the kernel is subtracted from it before.

    The kernel in it is of no use where its scale does not matter to the loss: there its gradient is at a right angle.
    """
    square, uw, ww, gw, gg, beside, moving, reached, size, length = totals
    kernel = size > 0
    # Root by root, as the product of the squares may leave the range of float32.
    bound = RIGHT_ANGLE * jnp.sqrt(ww) * jnp.sqrt(gg) / jnp.sqrt(jnp.where(kernel, size, 1))
    turns = kernel & (jnp.abs(gw) < bound) & (ww > 0)
    radial = jnp.where(turns, uw / jnp.where(ww > 0, ww, 1), 0)
    square = jnp.maximum(square - radial * uw, LEAST_LEFT * square)
    if coefficient is not None:
        return jnp.where((ww > 0) & (square > 0), _ratio(coefficient * jnp.sqrt(ww), square), 1), radial
    length = length * jnp.where(kernel, 1, jnp.sqrt(moving))
    return _ratio(jnp.where(reached > 0, length, 0), square + beside), radial


def _spectral_ratio(x: Stack, steps: jax.Array, ratio: jax.Array) -> jax.Array:
    """Return the factors `[k]` that give kernels their spectral norm, and `ratio` for other blocks.

    `ratio` gives the Frobenius norm the same length, and is smaller if the steps may be rounding alone. Pieces of a
    kernel share one factor, from the root of the sum of their squared spectral norms, which is at least the kernel's
    norm.
    """
    kernels = jnp.where(x.inside, steps, 0)
    squares = jnp.stack([jnp.sum(jnp.square(steps), axis=(1, 2)), jnp.square(spectral_norm(kernels))])
    frobenius, spectral = squares if x.whole is None else x.whole(squares)
    longer = _ratio(jnp.sqrt(frobenius), spectral)
    return jnp.where(x.kernels.size > 0, ratio * longer, ratio).astype(ratio.dtype)


POWER_ITERATIONS = 6


def spectral_norm(stack: jax.Array) -> jax.Array:
    """Estimate the largest singular values of `[k, m, n]` from below, by power iterations from a fixed vector."""
    # No symmetry of a network makes this vector orthogonal to the largest singular vector.
    start = np.cos(1.0 + np.arange(stack.shape[-1]) ** 1.5)
    vector = jnp.broadcast_to(jnp.asarray(start, stack.dtype), (len(stack), len(start)))
    norm = jnp.zeros(len(stack), stack.dtype)
    for _ in range(POWER_ITERATIONS):
        image = jnp.einsum("kmn,kn->km", stack, _normalised(vector))
        vector = jnp.einsum("kmn,km->kn", stack, _normalised(image))
        norm = jnp.linalg.norm(vector, axis=-1)
    return norm


def _normalised(vectors: jax.Array) -> jax.Array:
    norm = jnp.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / jnp.where(norm > 0, norm, 1)


def _ratio(length: jax.typing.ArrayLike, square: jax.Array) -> jax.Array:
    """Returns the factor that makes a norm, whose square is given, equal to `length`; 0 if it is zero."""
    return jnp.where(square > 0, length / jnp.sqrt(jnp.where(square > 0, square, 1)), 0)
