"""What an inverse is: the interface between curvature blocks and the optimizer."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kfac._checks import check, check_type
from kfac._factors import per_block
from kfac._layers import Layer


class Momentum(NamedTuple):
    """Momentum in one step, `m <- decay m + V`; Nesterov's form goes on from `decay m + V` with the new `m`."""

    decay: jax.Array
    nesterov: bool

    def moved(self, trace: jax.Array, new: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The trace after this step, and what the step goes by."""
        decay = self.decay.astype(trace.dtype)
        trace = decay * trace + new.astype(trace.dtype)
        return trace, decay * trace + new if self.nesterov else trace


@dataclasses.dataclass(frozen=True)
class Inverse(abc.ABC):
    """How Kronecker blocks are inverted, and how that is applied to gradients: what `inverse=` takes.

    A kind of inverse is a subclass, a frozen dataclass whose fields are its options. It says what is kept of a stack of
    `k` blocks of one shape (`init`), how that follows from the factors (`refresh`), and how gradients are multiplied
    by it (`apply`). The rest has defaults. When a block is refreshed, in which portions a stack is worked on, another
    attempt where one fails, and what several devices do, is not its business. All methods are traced by JAX.

    `factors` are stacks of statistics, with `A` `[k, d_in, d_in]` and `G` `[k, d_out, d_out]`, or `[k, d]` where a
    factor is diagonal. What is kept may be any pytree of floating arrays whose leading axis is that of the blocks::

        @dataclasses.dataclass(frozen=True)
        class Diagonal(kfac.Inverse):
            def init(self, factors):
                return jnp.ones((len(factors.A), factors.G.shape[-1], factors.A.shape[-1]))

            def refresh(self, kept, factors, damping):
                a, g = (x if x.ndim == 2 else jnp.diagonal(x, axis1=1, axis2=2) for x in (factors.A, factors.G))
                new = 1 / (g[:, :, None] * a[:, None, :] + damping[:, None, None])
                return new, jnp.max(new, axis=(1, 2)) / jnp.min(new, axis=(1, 2))

            def apply(self, kept, matrices, damping):
                return kept * matrices

    Args:
      precision: the arithmetic in which inverses are applied, `"float32"`, `"bfloat16_3x"` (three products of bfloat16
        parts, the default but for `Soap`), `"tensorfloat32"` or `"bfloat16"`; with the last they are kept in it, too,
        else in float32. CPUs have float32 only for the first three. They are always computed in float32; those of a
        float64 model are float64 throughout, but with `"bfloat16"`.
      relative: whether the damping of a block is in units of its mean eigenvalue, `(tr A / dim A) (tr G / dim G)`, 1
        where that is zero. Then it means the same in all layers, whatever the scale of the loss. `refresh` and
        `spectrum` get the product.

    Attributes:
      damped: whether what is kept contains the damping of its refresh. Then a block that fails is tried again with
        more.
      takes_moments: whether statistics bring the second moments of per-example gradients in `basis`, which `absorb`
        takes in. What is applied then changes with all statistics.
      takes_gradients: whether `advance` takes in the gradient of each step, in the place of `apply`, and preconditions
        the momentum of the gradients. Otherwise `kfac.kfac` takes the momentum of what `apply` returns.
      relative_damping: the damping by default where it is relative.
      products: how many matrices of each side a gradient is multiplied by: 2 with eigenvectors, there and back.
      flops: of a refresh of an `n` x `n` factor, over `n^3`, for `plan` and `inverse_every="auto"`. By default those of
        a Cholesky factor, 1/3, its inverse by a triangular solve, 1, and the product of that with its transpose, 2.

    Raises:
      ValueError: `precision` is none of these, or `relative` is no bool.
    """

    precision: str = "bfloat16_3x"
    relative: bool = False

    damped: ClassVar[bool] = True
    takes_moments: ClassVar[bool] = False
    takes_gradients: ClassVar[bool] = False
    relative_damping: ClassVar[float] = 0.1
    flops: ClassVar[float] = 10 / 3
    products: ClassVar[int] = 1

    def __post_init__(self):
        """Checks the arguments."""
        check(precision=self.precision, relative=self.relative)

    @abc.abstractmethod
    def init(self, factors: Any) -> Any:
        """What is kept of blocks before their first refresh; until then it is not applied.

        Args:
          factors: statistics that are zero. With `takes_moments`, `factors.moments` are `[k, d_out, d_in]` where one of
            the blocks has such, else None.
        """

    @abc.abstractmethod
    def refresh(self, kept: Any, factors: Any, damping: jax.Array) -> tuple[Any, jax.Array]:
        """What is kept from now on.

        Args:
          kept: so far, of some of the blocks.
          factors: their running averages.
          damping: `[k]`.

        Returns:
          The new one, and `[k]` condition numbers of what was inverted for `diagnostics`: 0 or NaN where it failed. A
          block that is not finite counts as failed, too, and keeps the old one.
        """

    @abc.abstractmethod
    def apply(self, kept: Any, matrices: jax.Array, damping: jax.Array) -> jax.Array:
        """The preconditioned gradients.

        Args:
          kept: what `refresh` returned.
          matrices: gradients `[k, d_out, d_in]`.
          damping: the damping of this step, a scalar. One that is in `kept` is that of the refresh. Of an inverse that
            is `relative` it is in units of the mean eigenvalue of each block, which the inverse has to keep to use it.

        Returns:
          As `matrices`.
        """

    def spectrum(self, kept: Any, factors: Any, damping: jax.Array) -> tuple[Any, jax.Array]:
        """What `kfac.curvature.operator` is made of; an inverse without eigenvectors has none.

        Args:
          kept: with `takes_moments` what is kept of the blocks, else None.
          factors: their statistics.
          damping: `[k]`.

        Returns:
          The eigenvectors of the damped blocks, a `Kronecker` of `Eigen`, or of `[k, d]` where they are the identity,
          and the eigenvalues `[k, d_out, d_in]`.
        """
        del kept, factors, damping
        raise ValueError(
            f"inverse={self!r} does not say which eigenvectors it has: define its `spectrum`, or take the averages, "
            "kfac.curvature.operator(layers, kfac.curvature.averaged_factors(state, layers), damping=...)"
        )

    def absorb(self, kept: Any, moments: jax.Array, decay: jax.Array, taken: jax.Array) -> Any:
        """With `takes_moments`: what is kept, with the moments `[k, d_out, d_in]` of the blocks that are `taken`."""
        del moments, decay, taken
        return kept

    def advance(
        self,
        kept: Any,
        matrices: jax.Array,
        damping: jax.Array,
        momentum: Momentum,
        ready: jax.Array,
    ) -> tuple[Any, jax.Array, jax.Array]:
        """With `takes_gradients`: a step with the gradients.

        Args:
          kept: what is kept so far, the momentum included.
          matrices: gradients `[k, d_in, d_out]`, transposed as most kernels lie in memory.
          damping: as for `apply`.
          momentum: that of the step; its decay is 0 where there is none.
          ready: `[k]`, which blocks have been refreshed. The momentum of others comes back as it is.

        Returns:
          What is kept from now on; the preconditioned momentum, like `matrices`; and `[k]`, the cosine between the
          gradient and the preconditioned momentum of the step before, for `adaptive_layer_rates` of `kfac.kfac`.
        """
        raise NotImplementedError(f"{type(self).__name__} takes gradients, but has no method `advance`")

    def basis(self, kept: Any) -> Any:
        """With `takes_moments`: the vectors in which moments are due, a `Kronecker`, or None where there are none."""
        del kept
        return None

    def check(self, layer: Layer, block: Any) -> None:
        """Raises `ValueError` where the statistics `block` of a layer are not those that this inverse needs."""
        if getattr(block, "moments", None) is not None:
            what = f"factors of layer {layer.name!r} have moments, for which inverse={self!r} has no use"
            raise ValueError(f"{what}: choose inverse=kfac.Ekfac(), or take factors without basis=")

    def kept_dtype(self, dtype: Any) -> Any:
        """The dtype of inverses, where statistics have `dtype`."""
        return jnp.dtype("bfloat16") if self.precision == "bfloat16" else dtype


def check_inverse(value: Any) -> None:
    """Raises where a value is no kind of inverse."""
    check_type("inverse", value, Inverse, "a kind of inverse such as kfac.Cholesky()")


def damping_of_blocks(inverse: Inverse, factors: Any, damping: jax.Array) -> jax.Array:
    """`[k]`, the damping of each block: in units of its mean eigenvalue where it is relative to that.

    Args:
      inverse: the kind.
      factors: stacks of statistics of `k` blocks.
      damping: a scalar, or `[k]`.
    """
    size = len(jax.tree.leaves(factors)[0])
    if not inverse.relative:
        return jnp.broadcast_to(damping, size)
    mean = factors.mean_eigenvalue()
    return damping * jnp.where(mean > 0, mean, 1)


def sums(stacks: Sequence[jax.Array], first: int = 1) -> Sequence[jax.Array]:
    """Sums stacks of one shape along all axes from the `first` on.

    In one operation, which reads only once what they are made of, and is one kernel to compile.
    """
    zeros = [jnp.zeros((), x.dtype) for x in stacks]
    return lax.reduce(stacks, zeros, lambda a, b: jax.tree.map(jnp.add, a, b), tuple(range(first, stacks[0].ndim)))


def cosine(a: jax.Array, b: jax.Array) -> jax.Array:
    """`[k]`, between the members of two stacks; 0 where one is zero."""
    ab, aa, bb = sums([a * b, a * a, b * b])
    norms = jnp.sqrt(aa) * jnp.sqrt(bb)
    return jnp.where(norms > 0, ab / jnp.where(norms > 0, norms, 1), 0)


def count_bytes(tree: Any) -> int:
    """Bytes of all arrays."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def finite(stack: jax.Array, dims: int = 1) -> jax.Array:
    """Tells of each entry along the first `dims` dimensions of `stack` whether all of its numbers are finite.

    By their sum: NaN stays in it, infinities stay or become NaN. Finite numbers whose sum is too large for float32
    count as not finite. `isfinite` of every number would be an array as large as the stack.
    """
    # In float16, sums of ordinary numbers would overflow.
    wide = jnp.promote_types(stack.dtype, jnp.float32)
    return jnp.isfinite(jnp.sum(stack, axis=tuple(range(dims, stack.ndim)), dtype=wide))


def product(spec: str, precision: str, dtype: Any, wide: Any, *operands: jax.Array) -> jax.Array:
    """An `einsum` of two operands in the arithmetic that `precision` names, with sums and result in `wide`.

    Operands are taken in `dtype`, that of inverses between steps.
    """

    def einsum(arithmetic, *operands):
        return jnp.einsum(spec, *operands, precision=arithmetic, preferred_element_type=wide)

    narrow = [x.astype(dtype) for x in operands]
    if precision in ("float32", "bfloat16") or dtype != jnp.float32:
        return einsum(lax.Precision.HIGHEST, *narrow)
    high = functools.partial(einsum, lax.Precision.HIGH)  # without tensor cores float32; on TPUs three products
    if precision == "tensorfloat32":
        return high(*narrow)
    thrice = functools.partial(einsum, lax.DotAlgorithmPreset.BF16_BF16_F32_X3)
    return lax.platform_dependent(*narrow, cuda=thrice, default=high)


def aligned(stack: jax.Array, multiple: int = 8) -> jax.Array:
    """Pad the last two axes with zeros to a multiple, for products on tensor cores.

    Tensor cores load 16 bytes at a time. With a bias, a factor has an odd number of rows, and on an H200 its products
    took up to four times as long as those of the next even size. Axes shorter than 64 stay as they are.
    """
    missing = [-length % multiple if length >= 64 else 0 for length in stack.shape[-2:]]
    if not any(missing):
        return stack
    return jnp.pad(stack, [(0, 0)] * (stack.ndim - 2) + [(0, length) for length in missing])


def identities(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """A stack of identity matrices `[..., d, d]`; as diagonals, of ones, where `shape` is `[k, d]`."""
    if len(shape) == 2:
        return jnp.ones(shape, dtype)
    return jnp.zeros(shape, dtype) + jnp.eye(shape[-1], dtype=dtype)


def averaged(average: Any, weight: jax.Array, new: Any, decay: jax.Array, taken: jax.Array) -> tuple[Any, jax.Array]:
    """Takes the new values of the blocks that are `taken` into a running average and into the sum `[k]` of its weights.

    `F <- decay F + (1 - decay) F_new`, divided by the sum of the weights, so that the first is used as it is.

    Args:
      average: stacks `[k, ...]`.
      weight: `[k]`, 0 before the first.
      new: stacks like `average`.
      decay: a scalar.
      taken: `[k]`.
    """
    decay = decay.astype(weight.dtype)
    total = decay * weight + (1 - decay)
    # A decay of 1, which only a schedule can bring, waits for later statistics.
    share = jnp.where(taken & (total > 0), (1 - decay) / total, 0)

    def one(old, new):
        new = jnp.where(per_block(taken, new), new.astype(old.dtype), 0)
        return (1 - per_block(share, old)) * old + per_block(share, old) * new

    return jax.tree.map(one, average, new), jnp.where(taken, total, weight)
