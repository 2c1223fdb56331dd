"""The block preconditioner: the interface between curvature blocks and the optimizer."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from kfac._checks import check, check_type, with_hints
from kfac._factors import Basis, per_block
from kfac._mesh import PyTree

T = TypeVar("T")


class Momentum(NamedTuple):
    """The momentum in one step, `m <- decay m + V`. Nesterov momentum steps along `decay m + V` with the new `m`."""

    decay: Array
    nesterov: bool

    def moved(
        self,
        trace: Array,
        new: Array,
    ) -> tuple[Array, Array]:
        """Return the new trace and the step direction."""
        decay = self.decay.astype(trace.dtype)
        trace = decay * trace + new.astype(trace.dtype)
        if not self.nesterov:
            return trace, trace
        return trace, decay * trace + new


# Options and class attributes of version 0.4, with the present name.
FORMER_NAMES = {
    "relative": "scale_damping",
    "relative_damping": "default_damping",
    "flops": "flops_per_cube",
    "takes_moments": "uses_example_moments",
    "takes_gradients": "owns_momentum",
}


def with_option_hints(cls: type[T]) -> type[T]:
    """Decorate a dataclass, so that an option with a former name raises a `TypeError` with the present name."""
    hints = {name: f"{new}=" for name, new in FORMER_NAMES.items()}
    cls.__init__ = with_hints(hints)(cls.__init__)  # type: ignore[method-assign]
    return cls


@dataclasses.dataclass(frozen=True)
class BlockPreconditioner(abc.ABC):
    """A preconditioner for Kronecker blocks, the type of the argument `preconditioner=`.

    Each preconditioner is a subclass, a frozen dataclass whose fields are its options. It works on a stack of `k`
    equally shaped blocks and implements three methods: `init` returns the initial state, `refresh` computes a new state
    from the factors, and `apply` preconditions gradients with the state. The other methods have defaults. A
    preconditioner that owns the momentum implements `precondition_momentum` instead of `apply`. The package
    decides when to refresh a block and how many blocks to process at once, tries a failed block again, and handles
    several devices. JAX traces all methods.

    `factors` are stacks of statistics, with `A` `[k, d_in, d_in]` and `G` `[k, d_out, d_out]`, or `[k, d]` for a
    diagonal factor. The state may be any pytree of floating-point arrays whose leading axis runs over
    the blocks::

        @dataclasses.dataclass(frozen=True)
        class Diagonal(kfac.BlockPreconditioner):
            def init(self, factors):
                return jnp.ones((len(factors.A), factors.G.shape[-1], factors.A.shape[-1]))

            def refresh(self, state, factors, damping):
                a, g = (x if x.ndim == 2 else jnp.diagonal(x, axis1=1, axis2=2) for x in (factors.A, factors.G))
                new = 1 / (g[:, :, None] * a[:, None, :] + damping[:, None, None])
                return new, jnp.max(new, axis=(1, 2)) / jnp.min(new, axis=(1, 2))

            def apply(self, state, matrices, damping):
                return state * matrices

    Args:
      precision: the arithmetic in which the state's matrices are applied: `"float32"`, `"bfloat16_3x"`,
        `"tensorfloat32"` or `"bfloat16"`. The default is `"bfloat16_3x"`, three products of bfloat16 parts, except for
        `SOAP`. On CPUs the first three are all float32. With `"bfloat16"` the matrices are also stored in bfloat16,
        otherwise in float32. The matrices are always computed in float32. A float64 model has float64 throughout,
        except with `"bfloat16"`.
      scale_damping: whether a block's damping is in units of its mean eigenvalue, `(tr A / dim A) (tr G / dim G)`. The
        same damping then suits all layers and any scale of the loss. If the mean eigenvalue is zero, the unit is 1.
        `refresh` and `spectrum` get the damping already multiplied by the unit.

    Attributes:
      damped: whether the state contains the damping at its refresh. A block that fails is then tried again with more
        damping.
      uses_example_moments: whether statistics must contain second moments of per-example gradients in the eigenbasis
        that `basis` returns. `update_moments` updates the state with them, so the preconditioner changes with all
        statistics.
      owns_momentum: whether `precondition_momentum` replaces `apply`. In each step, `precondition_momentum` gets the
        gradients and preconditions their momentum. Otherwise `kfac.kfac` applies momentum to the results of `apply`.
      default_damping: the default of `kfac.kfac(damping=)`, in the units of `scale_damping`.
      padding: None if the preconditioner takes blocks of their own shape only. Otherwise small blocks of different
        shapes may share a stack, in which zeros pad them, and gradients too. For `refresh`, the diagonal of a factor's
        padding holds `padding` times the mean of the factor's own diagonal. With a `padding` of 1, means, dampings and
        condition numbers stay as they are. With -1, absolute values have these means, and the padding comes last if
        eigenvalues are sorted in descending order. The refreshed state must not mix the padding with the rest. With
        `owns_momentum` and `scale_damping`, the damping of a padded stack is `[k, 1, 1]`, in units of a mean over a
        whole padded block.
      products: the number of matrix products per side that precondition a gradient. It is 2 with eigenvectors, into the
        eigenbasis and back.
      flops_per_cube: the FLOPs to refresh an `n` x `n` factor, divided by `n^3`, for `kfac.planning.estimate` and
        `overhead=`. The default counts the Cholesky factor (1/3), its inverse by a triangular solve (1), and the
        product of the inverse with its transpose (2).

    Raises:
      ValueError: `precision` is not an accepted value, or `scale_damping` is not a bool.
    """

    precision: str = "bfloat16_3x"
    scale_damping: bool = False

    damped: ClassVar[bool] = True
    uses_example_moments: ClassVar[bool] = False
    owns_momentum: ClassVar[bool] = False
    default_damping: ClassVar[float] = 0.1
    padding: ClassVar[float | None] = None
    flops_per_cube: ClassVar[float] = 10 / 3
    products: ClassVar[int] = 1

    def __init_subclass__(cls) -> None:
        """Raise a `TypeError` for a class attribute with a former name, which would have no effect.

        A class with a `refresh` of its own does not inherit `padding`.
        """
        for name in FORMER_NAMES.keys() & vars(cls).keys():
            raise TypeError(f"{cls.__name__}.{name} is now {FORMER_NAMES[name]}")
        if "refresh" in vars(cls) and "padding" not in vars(cls):
            cls.padding = None

    def __post_init__(self):
        """Check the arguments."""
        check(precision=self.precision, scale_damping=self.scale_damping)

    @abc.abstractmethod
    def init(self, factors: Any) -> Any:
        """Return the state of blocks before their first refresh. Until then gradients are not preconditioned.

        Args:
          factors: statistics that are all zero. With `uses_example_moments`, `factors.moments` is `[k, d_out, d_in]` if
            at least one block has moments, otherwise None.
        """

    @abc.abstractmethod
    def refresh(
        self,
        state: Any,
        factors: Any,
        damping: Array,
    ) -> tuple[Any, Array]:
        """Compute the state from the factors.

        Args:
          state: the old state of `k` blocks, possibly only a part of a stack.
          factors: the running averages of these blocks.
          damping: `[k]`.

        Returns:
          The new state, and for `diagnostics` the condition numbers `[k]` of the damped blocks, 0 or NaN for a
          block that failed. A block with a non-finite new state also counts as failed. Failed blocks keep the old
          state.
        """

    def apply(
        self,
        state: Any,
        matrices: Array,
        damping: Array,
    ) -> Array:
        """Precondition gradients, unless `owns_momentum` is set.

        Args:
          state: the state.
          matrices: gradients `[k, d_out, d_in]`.
          damping: the current step's damping, a scalar. Ignore it if the state contains the damping at its refresh.
            With `scale_damping`, the scalar is in units of each block's mean eigenvalue, so the state must contain the
            mean eigenvalues to use it.

        Returns:
          The preconditioned gradients, shaped like `matrices`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no method `apply`")

    def applied_condition(self, state: Any, damping: Array) -> Array | None:
        """Return the blocks' condition numbers in a step with this damping, `[k]`, for `kfac.diagnostics`.

        None if they are the condition numbers that `refresh` returned.
        """
        return None

    def spectrum(
        self,
        state: Any,
        factors: Any,
        damping: Array,
    ) -> tuple[Basis, Array]:
        """Decompose the damped blocks for `kfac.curvature.block_operator`.

        Args:
          state: the blocks' state with `uses_example_moments`, otherwise None. For a `Factors`, `state` is also None if
            the layer has no moments.
          factors: the blocks' statistics.
          damping: `[k]`.

        Returns:
          The damped blocks' eigenvectors, a `kfac.types.Basis`, and their eigenvalues `[k, d_out, d_in]`.

        Raises:
          ValueError: the preconditioner does not define eigenvectors, which is the default.
        """
        raise ValueError(
            f"preconditioner={self!r} does not say which eigenvectors it has: define its `spectrum`, or take the "
            "averages, factors = kfac.curvature.factors_from_state(state, layers), and "
            "kfac.curvature.block_operator(layers, factors, damping=...)"
        )

    def update_moments(
        self,
        state: Any,
        moments: Array,
        decay: Array,
        taken: Array,
    ) -> Any:
        """Update the state with moments, for `uses_example_moments`.

        Args:
          state: the old state.
          moments: a batch's moments, `[k, d_out, d_in]`.
          decay: the running average's decay, a scalar.
          taken: which blocks to update, `[k]`.

        Returns:
          The new state.
        """
        return state

    def precondition_momentum(
        self,
        state: Any,
        matrices: Array,
        damping: Array,
        momentum: Momentum,
        ready: Array,
    ) -> tuple[Any, Array, Array]:
        """Update the state with gradients and precondition their momentum, for `owns_momentum`.

        Args:
          state: the old state, which includes the momentum.
          matrices: gradients `[k, d_in, d_out]`. The output axis comes last, as in the memory layout of most kernels.
          damping: as for `apply`.
          momentum: the step's momentum. Its decay is 0 for an optimizer without momentum.
          ready: which blocks have been refreshed, `[k]`. Other blocks get their momentum without preconditioning.

        Returns:
          The new state; the preconditioned momentum, shaped like `matrices`; and the cosine `[k]` between the gradient
          and the previous step's preconditioned momentum, which `kfac.kfac` needs for `adaptive_layer_rates`.
        """
        raise NotImplementedError(
            f"{type(self).__name__} owns the momentum, but has no method `precondition_momentum`"
        )

    def basis(self, state: Any) -> Basis | None:
        """Return the eigenbasis for the moments in the next statistics, or None without moments."""
        return None

    def state_dtype(self, dtype: Any) -> Any:
        """Return the dtype of the stored matrices, where `dtype` is the dtype of statistics."""
        return jnp.dtype("bfloat16") if self.precision == "bfloat16" else dtype


def check_preconditioner(value: object) -> None:
    """Raise a `ValueError` if a value is not a `BlockPreconditioner`."""
    check_type(
        "preconditioner",
        value,
        BlockPreconditioner,
        "a BlockPreconditioner such as kfac.SOAP()",
    )


def damping_of_blocks(
    preconditioner: BlockPreconditioner,
    factors: Any,
    damping: Array,
) -> Array:
    """Return each block's absolute damping, `[k]`.

    Args:
      preconditioner: the preconditioner. With `scale_damping`, the damping is multiplied by each block's mean
        eigenvalue.
      factors: the statistics of `k` blocks.
      damping: a scalar, or `[k]`.
    """
    if not preconditioner.scale_damping:
        return jnp.broadcast_to(damping, len(jax.tree.leaves(factors)[0]))
    mean = factors.mean_eigenvalue()
    return damping * jnp.where(mean > 0, mean, 1)


def averaged(
    average: PyTree,
    weight: Array,
    new: PyTree,
    decay: Array,
    taken: Array,
) -> tuple[PyTree, Array]:
    """Update a bias-corrected running average.

    The average is `F <- decay F + (1 - decay) F_new`, divided by the sum of its weights, so the first values are used
    unchanged.

    Args:
      average: the old average, stacks `[k, ...]`.
      weight: the sum of the weights, `[k]`; 0 before the first update.
      new: the new values, stacks like `average`.
      decay: a scalar.
      taken: which blocks to update, `[k]`.

    Returns:
      The new average, and the new sum of the weights.
    """
    decay = decay.astype(weight.dtype)
    total = decay * weight + (1 - decay)
    # With a decay of 1, which only a schedule can return, the first average waits for later statistics.
    share = jnp.where(taken & (total > 0), (1 - decay) / total, 0)

    def one(old, new):
        new = jnp.where(per_block(taken, new), new.astype(old.dtype), 0)
        return (1 - per_block(share, old)) * old + per_block(share, old) * new

    return jax.tree.map(one, average, new), jnp.where(taken, total, weight)
