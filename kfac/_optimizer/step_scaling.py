"""Turn preconditioned gradients into steps, in stacks of blocks: the KL clip, momentum and step lengths."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from kfac._curvature.blocks import Group
from kfac._factors import per_block, safe_ratio
from kfac._layers import Layer
from kfac._linalg import sums

ScalarOrSchedule = float | Array | Callable[[Array], ArrayLike]


def value_at(scalar: ScalarOrSchedule, count: Array) -> Array:
    """Return a scalar, or the value of a schedule at step `count`, as float32."""
    return jnp.asarray(scalar(count) if callable(scalar) else scalar, jnp.float32)


class MomentumState(NamedTuple):
    """The momentum state of `k` blocks, and their adaptive rates.

    Attributes:
      momentum: `[k, d_in, d_out]`, the momentum of the preconditioned gradients. None without momentum, or if the
        preconditioner keeps it.
      rate: `[k]`, multipliers of the learning rate; None without adaptive rates.
    """

    momentum: Array | None
    rate: Array | None


class StepScalars(NamedTuple):
    """The scalars of one step.

    Attributes:
      damping: the damping, for preconditioners that apply it in each step instead of at their refresh.
      limit: the constraint of the KL clip, or None.
      rate: the learning rate.
      momentum: the decay of the momentum; 0 without momentum.
      coefficient: the trust ratio, or None.
    """

    damping: Array
    limit: Array | None
    rate: Array
    momentum: Array
    coefficient: Array | None


# A block's rate grows if the cosine between the last direction and the gradient is above AGREES. The rate falls if this
# cosine is below TOO_FAR. It changes by a factor of up to `exp(FOLLOWS)` per step, at a cosine FULL beyond the bound.
# Cosines between the bounds say nothing about the rate. With small batches, noise brings cosines near zero. With a
# learning rate that is tuned for the whole network, steps go a little too far along the sharpest directions.
AGREES = 0.02
TOO_FAR = -0.1
FOLLOWS = 0.2
FULL = 0.1
# The share that a rate's logarithm loses per step. Without this, rates that grow in the first steps would stay large.
# With small batches, the noise in late steps would then cost more than the first steps gained.
FORGETS = 0.02
FASTEST = 4.0


def adapted(
    rate: Array,
    angle: Array,
    full: Array,
) -> Array:
    """Return the updated rates of blocks, each from 1 to `FASTEST`.

    A rate grows if the loss still falls along the last direction, and falls if the last step went too far.

    Args:
      rate: `[k]`, the rates before the step.
      angle: `[k]`, the cosines between the last directions and the gradients.
      full: whether rates may grow: the learning rate does not rise and is at least half of its maximum so far. At
        smaller learning rates steps are short, and say nothing about the rate that fits a full learning rate.
    """
    beyond = angle - jnp.clip(angle, TOO_FAR, AGREES)
    beyond = jnp.minimum(beyond, jnp.where(full, jnp.inf, 0))
    new = rate ** (1 - FORGETS) * jnp.exp(FOLLOWS * jnp.clip(beyond / FULL, -1, 1))
    return jnp.clip(new, 1, FASTEST).astype(rate.dtype)


# A gradient counts as orthogonal to its kernel if their cosine is below RIGHT_ANGLE / sqrt(size of the kernel). If the
# scale of a kernel matters, one gradient in twelve meets this condition by chance (Heo et al. 2021, arXiv:2006.08217).
RIGHT_ANGLE = 0.1

# The root mean square of the step of a parameter that is not a kernel, relative to the learning rate.
BESIDE_KERNELS = 0.1

# If less than this share of a step's squared norm remains without the component along the kernel, the remainder may be
# rounding error. The step is then made shorter than its target length.
LEAST_LEFT = 1e-4


class Kernels(NamedTuple):
    """The properties of `k` blocks that their step lengths depend on, arrays `[k]`.

    Attributes:
      size: the whole kernel's number of elements, also if the block is a piece of the kernel; 0 if the block belongs
        to no kernel.
      rows: the number of rows in the block that belong to the kernel. The rows of a bias and of padding follow.
      length: the target length of the step; see `step_length`.
    """

    size: Any
    rows: Any
    length: Any


def step_length(layer: Layer, kernel: bool) -> float:
    """Return the length of a layer's step at a learning rate of 1, before the layer's multiplier.

    The length is the spectral norm for a kernel, and the root mean square otherwise.
    """
    length = layer.overlap**0.5
    if not kernel:
        return length * BESIDE_KERNELS
    return length * max(1.0, layer.d_out / layer.layouts[0].size("in")) ** 0.5


def find_kernels(
    group: Group,
    spectral: bool,
) -> Kernels:
    """Return the `Kernels` of a group's blocks, as NumPy arrays.

    Args:
      group: the group.
      spectral: whether steps have a set spectral norm. Then the rows of a table are scaled like vectors.
    """
    parts = []
    for layer, count in zip(group.layers, group.counts, strict=True):
        is_table = spectral and layer.kind == "embedding"
        is_kernel = group.kronecker and not is_table
        kernel_rows = layer.layouts[0].size("in")
        pieces = layer.num_blocks[0]
        rows_per_piece = math.ceil(layer.d_in / pieces)
        starts = rows_per_piece * np.arange(pieces)
        rows = np.clip(kernel_rows - starts, 0, rows_per_piece)
        size = np.full(count, kernel_rows * layer.d_out if is_kernel else 0)
        length = np.full(count, step_length(layer, is_kernel))
        parts.append(Kernels(size, np.resize(rows, count), length))
    return Kernels(*map(np.concatenate, zip(*parts, strict=True)))


class Stack(NamedTuple):
    """A group's stacks, as `normalize_step` takes them.

    A block of a kernel with a bias, of which `max_factor_dim` may have cut other pieces off::

                  d_out
        +-----------------------+
        | rows of the kernel    |  `inside`
        |                       |
        +-----------------------+
        | bias                  |  takes the kernel's factor
        +-----------------------+
        | padding, zero         |  makes all blocks of a group equally large
        +-----------------------+

    Attributes:
      updates: `[k, d_in, d_out]`, the steps before their lengths are set.
      params: `[k, d_in, d_out]`, the parameters; None if no block is a kernel.
      gradients: `[k, d_in, d_out]`, averaged over the whole batch.
      kernels: arrays `[k]`, or `[1]` if all blocks have the same properties.
      by_row: whether each row of a block is a separate leaf, such as a scale and a shift.
      whole: replaces each piece's sums by the totals over all pieces of its kernel, `[sums, k]` to `[sums, k]`. None if
        each block is a whole kernel.
    """

    updates: Array
    params: Array | None
    gradients: Array
    kernels: Kernels
    by_row: bool = False
    whole: Callable[[Array], Array] | None = None

    @property
    def inside(self) -> Array:
        """A mask `[k, d_in, 1]` of the rows that belong to the kernel."""
        rows = jnp.arange(self.updates.shape[1])[:, None]
        return rows < per_block(self.kernels.rows, self.updates)


def normalize_step(
    stacks: Mapping[str, Stack],
    coefficient: Array | None,
) -> dict[str, Array]:
    """Rescale each block's step to a fixed length, so that curvature and gradient only set its direction.

    The largest singular value of a kernel's step becomes `sqrt(overlap max(1, d_out / d_in))`, so that outputs change
    equally in networks of any width (the spectral condition of Yang, Simon & Bernstein 2023, arXiv:2310.17813). Power
    iterations estimate this norm from below, so the real norm may be up to a fifth larger. A convolution applies its
    kernel to each position in `overlap` windows, hence the factor `overlap`. A bias is scaled like its kernel. The
    step of every other leaf with a block gets a root mean square of `BESIDE_KERNELS` over its nonzero elements, or
    less if it is copied to several positions. A block with a zero gradient gets a zero step, because its momentum,
    however small, would be rescaled to the full length.

    With a `coefficient`, the trust ratio, the norm of each kernel's step becomes `coefficient` times the kernel's norm,
    as in `optax.scale_by_trust_ratio`. No other step changes.

    In either case, if only the kernel's direction matters, its step first loses the component along the kernel.

    Args:
      stacks: the groups' stacks, by group name.
      coefficient: the trust ratio, a scalar, or None.

    Returns:
      The steps, `[k, d_in, d_out]` for each group.
    """
    steps = {name: stack.updates for name, stack in stacks.items()}
    if coefficient is not None:
        # The trust ratio rescales kernels only.
        stacks = {name: x for name, x in stacks.items() if x.params is not None}
    if not stacks:
        return steps
    sums_of = [_sums(x) for x in stacks.values()]
    # Join all groups' sums in one vector, so that each operation compiles to a single device kernel.
    joined = BlockSums(*map(jnp.concatenate, zip(*sums_of, strict=True)))
    ends = np.cumsum([len(s.uu) for s in sums_of])[:-1]
    squares = []
    for (name, x), radial in zip(
        stacks.items(), jnp.split(_radial(joined), ends), strict=True
    ):
        if x.params is None:
            # The lengths of other leaves follow from `uu` alone.
            squares.append(jnp.zeros((2, radial.size), radial.dtype))
            continue
        # `radial` is zero unless only the kernel's direction matters. A bias behind such a kernel keeps its step.
        weights = jnp.where(x.inside, x.params, 0)
        steps[name] = x.updates - per_block(radial, weights) * weights
        # Measure the norms of what is left, which may be much shorter.
        squares.append(_squared_norms(x, steps[name], coefficient is None))
    norms = jnp.sqrt(jnp.concatenate(squares, axis=1))
    if coefficient is None:
        joint = _length_ratio(joined, norms)
    else:
        joint = _trust_ratio(joined, norms[0], coefficient)
    for (name, x), ratio in zip(stacks.items(), jnp.split(joint, ends), strict=True):
        u = steps[name]
        # One factor for each block, or for each row with `by_row`.
        ratio = ratio.reshape(len(u), -1, 1).astype(u.dtype)
        if coefficient is None:
            # This includes the bias: it adds to the same outputs as the kernel.
            steps[name] = u * ratio
        else:
            # The ratio is to the kernel's norm, which says nothing about the size of a bias.
            steps[name] = jnp.where(x.inside, u * ratio, x.updates)
    return steps


class BlockSums(NamedTuple):
    """Sums over each block's elements, or each row's with `by_row`, as vectors of equal length.

    Here `u` are updates, `w` kernels and `g` gradients. If blocks are pieces of a kernel, each has the sums over the
    whole kernel. In stacks with kernels, only `moving` and the test for zero gradients include biases.

    Attributes:
      uu: `sum u^2`.
      uw: `sum u w`; 0 if the block is not a kernel.
      ww: `sum w^2`; 0 if the block is not a kernel.
      gw: `sum g w`; 0 if the block is not a kernel.
      gg: `sum g^2`; 0 in stacks without kernels.
      moving: the number of nonzero `u`.
      size: the whole kernel's number of elements; 0 if the block is not a kernel.
      length: the target length of the step, see `step_length`; 0 if all `g` are zero.
    """

    uu: Array
    uw: Array
    ww: Array
    gw: Array
    gg: Array
    moving: Array
    size: Array
    length: Array


def _sums(x: Stack) -> BlockSums:
    """Compute the sums of a stack."""
    u = x.updates
    g = x.gradients
    # With `by_row`, each row is a leaf of its own, such as the scales of a normalisation.
    first_axis = 2 if x.by_row else 1
    if x.params is None:
        products = [u * u, u != 0, g != 0]
    else:
        inner_u = jnp.where(x.inside, u, 0)
        inner_gg = jnp.where(x.inside, g * g, 0)
        # A table shares its stack with kernels of its shape, but its rows are vectors: without `w`, `_radial` is zero.
        w = jnp.where(x.inside & per_block(x.kernels.size > 0, u), x.params, 0)
        products = [inner_u * u, u * w, w * w, g * w, inner_gg, u != 0, g != 0]
    totals = list(sums([y.astype(u.dtype) for y in products], first_axis))
    zero = jnp.zeros_like(totals[0])
    if x.params is None:
        # Insert zeros for `uw`, `ww`, `gw` and `gg`, so that stacks with and without kernels join.
        totals[1:1] = [zero] * 4

    def for_each_sum(values):
        # From `[k]` to one entry for each sum, which with `by_row` is one for each row.
        return (zero + per_block(values, zero)).astype(u.dtype).reshape(-1)

    size = for_each_sum(x.kernels.size)
    length = for_each_sum(x.kernels.length)
    flat = [y.reshape(-1) for y in totals]
    if x.whole is not None:
        flat = list(x.whole(jnp.stack(flat)))
    # After `whole`, a piece without a gradient still moves if another piece of its kernel has one.
    reached = flat.pop()
    return BlockSums._make([*flat, size, jnp.where(reached > 0, length, 0)])


def _radial(s: BlockSums) -> Array:
    """Return `<u, w> / <w, w>` if only the kernel's direction matters to the loss, and 0 otherwise.

    The gradient is then orthogonal to the kernel, and the step's component along the kernel would only change the
    kernel's norm.
    """
    # Take the roots first, because the product of the squares may leave the range of float32.
    bound = RIGHT_ANGLE * jnp.sqrt(s.ww) * jnp.sqrt(s.gg)
    bound = bound / jnp.sqrt(jnp.maximum(s.size, 1))
    # A kernel at zero has no direction, and a zero gradient fails the strict comparison with a bound of zero.
    orthogonal = (s.size > 0) & (jnp.abs(s.gw) < bound) & (s.ww > 0)
    return jnp.where(orthogonal, safe_ratio(s.uw, s.ww), 0)


def _squared_norms(x: Stack, steps: Array, spectral: bool) -> Array:
    """Return the squares of kernels' Frobenius and spectral norms, `[2, k]`. Without `spectral`, the latter are 0.

    Each piece gets its kernel's total over all pieces. For spectral norms, the total is `sum_i sigma_i^2`, where
    `sigma_i` is the spectral norm of piece `i`. The root of this sum is at least the spectral norm of the
    whole kernel, and at most `sqrt(pieces)` times larger. So the step of a cut kernel may be too short by a factor of
    up to `sqrt(pieces)`.
    """
    kernels = jnp.where(x.inside, steps, 0)
    (frobenius,) = sums([kernels * kernels])
    largest = jnp.zeros_like(frobenius)
    if spectral:
        largest = jnp.square(spectral_norm(kernels))
    squares = jnp.stack([frobenius, largest])
    return squares if x.whole is None else x.whole(squares)


def _length_ratio(s: BlockSums, norms: Array) -> Array:
    """Return the factors that give steps their lengths, from kernels' Frobenius and spectral norms `[2, k]`."""
    left, spectral = norms
    # 1 unless the projection left less than LEAST_LEFT of the step.
    shortened = jnp.minimum(safe_ratio(left, jnp.sqrt(LEAST_LEFT * s.uu)), 1)
    of_kernels = safe_ratio(s.length, spectral) * shortened
    # This gives nonzero elements the root mean square `length`.
    others = safe_ratio(s.length * jnp.sqrt(s.moving), jnp.sqrt(s.uu))
    return jnp.where(s.size > 0, of_kernels, others)


def _trust_ratio(s: BlockSums, left: Array, coefficient: Array) -> Array:
    """Return the factors `[k]` that give steps `coefficient` times their kernels' norms; 1 if either norm is zero."""
    norm = jnp.maximum(left, jnp.sqrt(LEAST_LEFT * s.uu))
    ratio = safe_ratio(coefficient * jnp.sqrt(s.ww), norm)
    return jnp.where((s.ww > 0) & (left > 0), ratio, 1)


POWER_ITERATIONS = 6


def spectral_norm(stack: Array) -> Array:
    """Estimate the largest singular values of matrices `[k, m, n]` from below.

    Run `POWER_ITERATIONS` power iterations from a fixed vector. The vectors are not normalised. Instead, the matrices
    are scaled so that their largest singular values are between `r^-1/4` and `r^1/4`, where `r = min(m, n)`. An
    iteration then multiplies the component along the first singular vector by a factor between `r^-1/2` and `r^1/2`, so
    vectors stay in float32's range.
    """
    (frobenius,) = sums([stack * stack])
    scale = safe_ratio(min(stack.shape[1:]) ** 0.25, jnp.sqrt(frobenius))
    scaled = stack * per_block(scale, stack)

    def iterate(vectors):
        images = jnp.einsum("kmn,kn->km", scaled, vectors)
        return jnp.einsum("kmn,km->kn", scaled, images)

    # An irregular vector, so that no symmetry of a network makes it orthogonal to the first singular vector.
    start = np.cos(1.0 + np.arange(stack.shape[-1]) ** 1.5)
    # The zeros let the loop's initial value vary over the same mesh axes as the stack.
    begin = jnp.asarray(start, stack.dtype) + 0 * scaled[:, 0]
    # A loop compiles its body once. It keeps the vectors before the last iteration, too.
    last, vectors = lax.fori_loop(
        0,
        POWER_ITERATIONS,
        lambda _, now: (iterate(now[0]), now[0]),
        (begin, begin),
    )
    # The product of `K^T K v` and `v` is the square of the norm of `K v`.
    squares = sums([last * last, last * vectors])
    return safe_ratio(jnp.sqrt(safe_ratio(*squares)), scale)
