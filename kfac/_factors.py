"""A batch's statistics by layer: Kronecker factors and small dense blocks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from kfac._mesh import PyTree, on_mesh, with_auto_axes
from kfac._packing import Shape, as_vectors, from_vectors, pieces_along

Average = Callable[[PyTree], PyTree]
Shapes = tuple[Shape, ...]


def static(default: Any = dataclasses.MISSING) -> Any:
    """Return a field of a dataclass that belongs to the tree structure, not to the leaves."""
    return dataclasses.field(default=default, metadata={"static": True})


class Statistics:
    """The statistics of one layer, a pytree of arrays.

    Two subclasses are curvature blocks: `Kronecker` and `Unitwise`. `combined()` converts the other subclasses to a
    block. A block also has `mean_eigenvalue()`, which returns the mean eigenvalue of each block in a stack, `[k]`.
    """

    moments: Any = None
    wire: str | None = None  # for `Packed`, the dtype of the message between devices

    def combined(self, average: Average | None = None) -> Any:
        """Return the `Kronecker` or `Unitwise` block.

        Args:
          average: averages a tree of arrays over devices. None on one device.
        """
        return self

    def packed(self, shapes: Shapes) -> Statistics:
        """Pack a `Kronecker` block for a message. Other statistics stay as they are.

        Args:
          shapes: one copy's factor shapes.
        """
        return self

    def unpacked(self) -> Any:
        """Undo `packed`."""
        return self

    def unscaled(self, by: Callable[[Array], Array]) -> Any:
        """Apply `by`, a division, to all second moments of gradients."""
        raise NotImplementedError


class Uncombined(Statistics):
    """Statistics that have to be combined into a block. `A` and `G` are the factors of the combined block."""

    @property
    def A(self) -> Array:
        return self.combined().A

    @property
    def G(self) -> Array:
        return self.combined().G


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Kronecker(Statistics):
    """The Kronecker factors of one layer.

    Stacked layers have a leading axis of copies in each array.

    Attributes:
      A: the factor of the inputs, `[d_in, d_in]`. A diagonal factor is `[d_in]`.
      G: the factor of the output gradients, `[d_out, d_out]`. A diagonal factor is `[d_out]`.
      moments: second moments of the per-example gradients in an eigenbasis, `[d_out, d_in]`, for `EKFAC`. Otherwise
        None.
    """

    A: Any
    G: Any
    moments: Any = None

    def packed(self, shapes):
        moments = self.moments
        if moments is not None:
            moments = moments.reshape(*moments.shape[:-2], 1, -1)
        a = as_vectors(self.A, shapes[0])
        g = as_vectors(self.G, shapes[1])
        return Packed(Kronecker(a, g, moments), shapes)

    def unscaled(self, by):
        g, moments = jax.tree.map(by, (self.G, self.moments))
        return Kronecker(self.A, g, moments)

    def mean_eigenvalue(self):
        # Only padding can be negative, see `Group.filled`.
        a = jnp.mean(jnp.abs(diagonals(self.A)), axis=1)
        return a * jnp.mean(jnp.abs(diagonals(self.G)), axis=1)


def is_diagonal(stack: Array) -> bool:
    """Return whether stacked Kronecker factors are diagonals `[k, d]` instead of matrices `[k, d, d]`."""
    return stack.ndim == 2


def diagonals(stack: Array) -> Array:
    """Return the diagonals `[k, d]` of stacked factors `[k, d, d]` or `[k, d]`."""
    if is_diagonal(stack):
        return stack
    k, d = stack.shape[:2]
    # Take every (d + 1)-th element of the flat matrix.
    return lax.slice(stack.reshape(k, d * d), (0, 0), (k, d * d), (1, d + 1))


class Basis(NamedTuple):
    """The eigenvectors of a layer's factors, in the columns of orthogonal matrices.

    Stacked layers and stacks of blocks have a leading axis.

    Attributes:
      A: the eigenvectors of `A`, `[d_in, d_in]`. None stands for the identity, the eigenvectors of a diagonal factor.
      G: the eigenvectors of `G`, `[d_out, d_out]`, or None.
    """

    A: Any
    G: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Unitwise(Statistics):
    """A small dense block for each channel in a normalisation layer, or for each element in a vector.

    Attributes:
      F: the blocks `[d_out, p, p]`, with `p` parameters per channel.
    """

    F: Any

    def unscaled(self, by):
        return Unitwise(by(self.F))

    def mean_eigenvalue(self):
        return jnp.trace(jnp.mean(self.F, axis=1), axis1=1, axis2=2) / self.F.shape[-1]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed(Uncombined):
    """A `Kronecker` block as vectors. On a mesh, each device holds an equal part of their elements.

    Attributes:
      flat: upper triangles, diagonals and moments as vectors `[copies?, pieces, elements]`. The vectors may be padded
        with zeros.
      shapes: the shapes of `A` and `G` for one copy.
      wire: the `communication_dtype` of the `Distribution` with which the statistics were taken.
    """

    flat: Kronecker
    shapes: Shapes = static()
    wire: str = static("float32")

    def unpacked(self) -> Kronecker:
        """Undo `Kronecker.packed`."""
        a, g = self.shapes
        moments = self.flat.moments
        if moments is not None:
            shape = (g[-1], a[-1])
            moments = moments[..., 0, : math.prod(shape)]
            moments = moments.reshape(*moments.shape[:-1], *shape)
        return Kronecker(
            from_vectors(self.flat.A, a), from_vectors(self.flat.G, g), moments
        )

    def combined(self, average: Average | None = None) -> Kronecker:
        """Return the unpacked block, with a copy on every device."""
        return _unpacked_everywhere(self)

    def unscaled(self, by):
        return dataclasses.replace(self, flat=self.flat.unscaled(by))

    @property
    def moments(self) -> Array | None:
        if self.flat.moments is None:
            return None
        return self.combined().moments


@jax.jit
@on_mesh
def _unpacked_everywhere(block: Packed) -> Kronecker:
    return with_auto_axes(Packed.unpacked)(block)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tied(Uncombined):
    """Statistics of a kernel that the program reads both directly and transposed, such as a tied embedding.

    Both uses have the layer's factor shapes. The transposed use swaps the sides: its inputs give `G`, and its output
    gradients give `A`. Together, the two uses give a sum of two Kronecker products. `combined` approximates this sum by
    a single Kronecker product.

    Attributes:
      direct: the statistics of the direct uses.
      transposed: the statistics of the transposed uses.
      diagonal: the names of the diagonal factors, as in `Layer`.
      num_blocks: the numbers of diagonal blocks in `A` and `G`, as in `Layer`.
    """

    direct: Kronecker
    transposed: Kronecker
    diagonal: tuple[str, ...] = static()
    num_blocks: tuple[int, int] = static()

    def unscaled(self, by):
        # The transposed use has its gradients in `A`.
        transposed = dataclasses.replace(self.transposed, A=by(self.transposed.A))
        direct = self.direct.unscaled(by)
        return dataclasses.replace(self, direct=direct, transposed=transposed)

    def combined(self, average: Average | None = None) -> Kronecker:
        """Return the block `(A + e A') (x) (G + G' / e)`, where `A'` and `G'` belong to the transposed uses.

        The transposed uses' rows count as further positions. Each side adds second moments of inputs and of gradients,
        which have different scales. The factor `e`, with `e^2 = tr A tr G' / (tr G tr A')`, gives the two uses the same
        ratio of traces on both sides. If a trace is zero, `e` is 1.

        Args:
          average: averages the traces over devices. None on one device.
        """

        def trace(factor, side):
            if side in self.diagonal:
                return jnp.sum(factor, -1)
            traces = jnp.trace(factor, axis1=-2, axis2=-1)
            return (
                jnp.sum(traces, -1)
                if pieces_along(side, self.num_blocks) > 1
                else traces
            )

        direct = self.direct
        transposed = self.transposed
        uses = (direct, transposed)
        traces = [trace(getattr(use, side), side) for use in uses for side in "AG"]
        if average is not None:
            traces = average(traces)
        # Take the root of each trace, because a product of two traces may underflow in float32.
        a, g, transposed_a, transposed_g = [jnp.sqrt(x) for x in traces]
        above = a * transposed_g
        below = g * transposed_a
        positive = (above > 0) & (below > 0)
        scale = jnp.where(positive, above / jnp.where(positive, below, 1), 1)
        return Kronecker(
            direct.A + transposed.A * per_block(scale, transposed.A),
            direct.G + transposed.G / per_block(scale, transposed.G),
        )


def safe_ratio(
    above: ArrayLike,
    below: Array,
) -> Array:
    """Return `above / below`, and 0 where `below` is not positive."""
    positive = below > 0
    return jnp.where(positive, above / jnp.where(positive, below, 1), 0)


def per_block(
    values: Array,
    like: Array,
) -> Array:
    """Reshape one number per block, `[k]`, to `[k, 1, ...]`, so that it broadcasts to `like`. Scalars work too."""
    return values.reshape(values.shape + (1,) * (like.ndim - values.ndim))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Ragged(Statistics):
    """Statistics of stacked kernels whose row counts depend on data, such as experts in `lax.ragged_dot`.

    `G` is `squares / rows` for the whole batch. Both are averaged over devices and micro-batches before the division.
    A device or micro-batch without rows for a kernel counts in these averages with zeros.

    Attributes:
      A: the factor of the inputs, as in `Kronecker`.
      squares: `n` times the sum of `g g^T`, shaped like `G`.
      rows: the number of rows per example, `[copies]`.
    """

    A: Any
    squares: Any
    rows: Any

    def unscaled(self, by):
        return dataclasses.replace(self, squares=by(self.squares))

    def combined(self, average: Average | None = None) -> Kronecker:
        """Return the factors. A kernel without rows gets `G = 0`.

        Args:
          average: averages the rows over devices. None on one device.
        """
        rows = self.rows if average is None else average(self.rows)
        g = self.squares * per_block(safe_ratio(1, rows), self.squares)
        return Kronecker(self.A, g)

    G = Uncombined.G


Block = Kronecker | Unitwise


@jax.tree_util.register_pytree_with_keys_class
class Factors(Mapping[str, Statistics]):
    """A batch's statistics, a pytree that maps layer names to `Statistics`.

    ::

        measure = kfac.statistics(loss_fn, layers)
        several = [measure(params, batch) for batch in batches]
        mean = jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *several)
        print(mean["hidden"].A.shape)

    The values are `Kronecker`, `Unitwise`, `Packed`, `Tied` or `Ragged`. All except `Unitwise` have the factors `A`
    and `G`.

    Like gradients, factors can be added, averaged and `psum`-ed with `jax.tree.map`, and passed through `jit`. The
    average over equally large batches equals the factors of all these batches together.

    Attributes:
      gradients: the mean gradients of the parameters with gradient factors, by path. The optimizer forms their factors
        after it has averaged the gradients over devices.
    """

    def __init__(
        self,
        blocks: Mapping[str, Statistics],
        gradients: Mapping[str, Array] | None = None,
    ):
        self._blocks = dict(blocks)
        self.gradients = dict(gradients or {})

    def __getitem__(self, name: str) -> Statistics:
        return self._blocks[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._blocks)

    def __len__(self) -> int:
        return len(self._blocks)

    def __repr__(self) -> str:
        return f"Factors({self._blocks!r})"

    def whole(self) -> Factors:
        """Unpack `Packed` blocks to `Kronecker` blocks, with a copy on every device.

        Returns:
          The new factors. Blocks of other types are unchanged.
        """
        blocks = {name: x.combined() if x.wire else x for name, x in self.items()}
        return Factors(blocks, self.gradients)

    def unscale(self, loss_scale: ArrayLike) -> Factors:
        """Return the statistics of the loss itself, if these factors come from `loss_scale` times the loss.

        Gradients are divided by the scale. Their second moments (`G`, `F`, `moments`) are divided by its square. `A`
        does not depend on the scale.

        Args:
          loss_scale: the factor by which the loss was multiplied.
        """

        # Divide twice, because a large scale's square may overflow in float32.
        def by_square(x):
            return x / loss_scale / loss_scale

        blocks = {name: block.unscaled(by_square) for name, block in self.items()}
        gradients = {path: x / loss_scale for path, x in self.gradients.items()}
        return Factors(blocks, gradients)

    def tree_flatten_with_keys(self):
        blocks = [(jax.tree_util.DictKey(name), x) for name, x in self.items()]
        gradients = (jax.tree_util.GetAttrKey("gradients"), self.gradients)
        return [*blocks, gradients], tuple(self)

    @classmethod
    def tree_unflatten(cls, names, children):
        *blocks, gradients = children
        factors = cls(dict(zip(names, blocks, strict=True)))
        factors.gradients = gradients
        return factors
