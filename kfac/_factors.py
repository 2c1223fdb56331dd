"""The statistics of a batch: Kronecker factors and small blocks, by layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kfac._packing import as_vectors, from_vectors
from kfac._varying import on_mesh, whole

Average = Callable[[Any], Any]


class Statistics:
    """The statistics of one layer, a pytree of arrays.

    `Kronecker` and `Unitwise` are blocks; `combined` makes one of the others. A block also has `mean_eigenvalue()`,
    `[k]` of a stack, and `dense(basis)`, the block as a matrix `[copies?, p, p]`; with eigenvectors `basis`, the one
    that the moments correct.
    """

    moments: Any = None
    wire: Any = None  # of packed ones, the dtype in which devices send them

    def combined(self, average: Average | None = None) -> Any:
        """Returns the `Kronecker` or `Unitwise` block. `average`: averages over devices, where there are several."""
        del average
        return self

    def packed(self, shapes: Shapes, average: Average | None = None, dtype: Any = None) -> Any:
        """Packs them, in `dtype`. `shapes`: of the factors of one copy; `average`: as of `combined`."""
        block = self.combined(average)
        return self if block is self else block.packed(shapes, dtype=dtype)  # small blocks go as they are

    def unpacked(self) -> Any:
        """The inverse of `packed`."""
        return self

    def unscaled(self, by: Callable[[jax.Array], jax.Array]) -> Any:
        """Applies `by`, a division, to all second moments of gradients."""
        raise NotImplementedError


class Uncombined(Statistics):
    """Statistics with the factors `A` and `G` of the block that they become."""

    @property
    def A(self) -> jax.Array:
        return self.combined().A

    @property
    def G(self) -> jax.Array:
        return self.combined().G


Shapes = tuple[tuple[int, ...], ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Kronecker(Statistics):
    """Kronecker factors of one layer, or their inverses.

    Stacked copies of a layer have an axis more in front of each.

    Attributes:
      A: of the inputs, `[d_in, d_in]`, or `[d_in]` where only the diagonal is kept.
      G: of the gradients of the outputs, `[d_out, d_out]` or `[d_out]`.
      moments: in statistics for `Ekfac`, the second moments of per-example gradients in an eigenbasis, `[d_out, d_in]`.
    """

    A: Any
    G: Any
    moments: Any = None

    def packed(self, shapes, average=None, dtype=None):
        del average
        return jax.tree.map(lambda x: x if dtype is None else x.astype(dtype), Packed.of(self, shapes))

    def unscaled(self, by):
        return Kronecker(self.A, *jax.tree.map(by, (self.G, self.moments)))

    def mean_eigenvalue(self):
        return jnp.mean(diagonals(self.A), axis=1) * jnp.mean(diagonals(self.G), axis=1)

    def dense(self, basis=None):
        if basis is None:
            return _kron(self.A, self.G)
        if self.moments is None:
            raise ValueError("block has no moments: take it from value_and_grad(...)(..., basis=basis)")
        vectors, values = _kron(basis.A, basis.G), self.moments.mT
        return jnp.matmul(vectors * values.reshape(*vectors.shape[:-2], 1, -1), vectors.mT, precision="highest")


_kron = jnp.vectorize(jnp.kron, signature="(a,b),(g,h)->(p,q)")


def is_diagonal(stack: Any) -> bool:
    """Whether a stack of Kronecker factors holds their diagonals, `[k, d]`, rather than whole matrices."""
    return stack.ndim == 2


def diagonals(stack: jax.Array) -> jax.Array:
    """`[k, d]`: every (d + 1)-th element of a matrix; diagonal factors are that already."""
    if is_diagonal(stack):
        return stack
    k, d = stack.shape[:2]
    return lax.slice(stack.reshape(k, d * d), (0, 0), (k, d * d), (1, d + 1))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Eigen:
    """Symmetric matrices `vectors diag(values) vectors^T`: `vectors` `[k, d, d]`, `values` `[k, d]`, not negative."""

    vectors: Any
    values: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Unitwise(Statistics):
    """A small dense block for each channel, of normalisation layers and of vectors.

    Attributes:
      F: `[d_out, p, p]`, with `p` parameters per channel.
    """

    F: Any

    def unscaled(self, by):
        return Unitwise(by(self.F))

    def mean_eigenvalue(self):
        return jnp.trace(jnp.mean(self.F, axis=1), axis1=1, axis2=2) / self.F.shape[-1]

    def dense(self, basis=None):
        del basis
        channels, size = self.F.shape[0], self.F.shape[0] * self.F.shape[1]
        return jnp.einsum("cpq,cd->pcqd", self.F, jnp.eye(channels, dtype=self.F.dtype)).reshape(size, size)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed(Uncombined):
    """A `Kronecker` block as vectors, of which each device of a mesh holds an equal part of the elements.

    Attributes:
      flat: upper triangles, diagonals and moments as vectors `[copies?, pieces, elements]`, maybe with zeros behind.
      shapes: of `A` and `G` of one copy.
    """

    flat: Kronecker
    shapes: Shapes = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, block: Kronecker, shapes: Shapes) -> Packed:
        """A block that is whole, packed."""
        flat = Kronecker(as_vectors(block.A, shapes[0]), as_vectors(block.G, shapes[1]))
        if block.moments is not None:
            flat = dataclasses.replace(flat, moments=block.moments.reshape(*block.moments.shape[:-2], 1, -1))
        return cls(flat, shapes)

    def unpacked(self) -> Kronecker:
        """The inverse of `of`."""
        flat, (a, g) = self.flat, self.shapes
        sides = from_vectors(flat.A, a), from_vectors(flat.G, g)
        if flat.moments is None:
            return Kronecker(*sides)
        moments = from_vectors(flat.moments, (g[-1] * a[-1],))
        return Kronecker(*sides, moments.reshape(*moments.shape[:-1], g[-1], a[-1]))

    def combined(self, average: Average | None = None) -> Kronecker:
        """The block, whole on every device."""
        del average
        return _unpacked_everywhere(self)

    def packed(self, shapes, average=None, dtype=None):
        del shapes, average, dtype
        return self

    def unscaled(self, by):
        return dataclasses.replace(self, flat=self.flat.unscaled(by))

    @property
    def wire(self) -> Any:
        return self.flat.A.dtype

    @property
    def moments(self) -> jax.Array | None:
        return None if self.flat.moments is None else self.combined().moments


@jax.jit
@on_mesh
def _unpacked_everywhere(block: Packed) -> Kronecker:
    return whole(Packed.unpacked)(block)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tied(Uncombined):
    """Statistics of a kernel that is read as it is and as its transpose, `direct` and `transposed`.

    Both have the shapes of the layer's factors: of the transpose, what it reads is on the side of the outputs `G`, and
    the gradients of what it writes on that of the inputs `A`. The block is the sum of two Kronecker products;
    `combined` is the one that takes its place.
    """

    direct: Kronecker
    transposed: Kronecker
    diagonal: tuple[str, ...] = dataclasses.field(default=(), metadata={"static": True})  # of "A" and "G"
    cut: tuple[int, int] = dataclasses.field(default=(1, 1), metadata={"static": True})  # into blocks

    def unscaled(self, by):
        turned = Kronecker(by(self.transposed.A), self.transposed.G)  # there, gradients are on the side of the inputs
        return dataclasses.replace(self, direct=self.direct.unscaled(by), transposed=turned)

    def combined(self, average: Average | None = None) -> Kronecker:
        """`(A + e A') (x) (G + G' / e)`: rows of the transpose count as further positions.

        Inputs and gradients have scales of their own, which meet on each side; `e^2 = tr A tr G' / (tr G tr A')` brings
        the two uses to the same proportion on both. With a trace of zero, e is 1.

        Args:
          average: of the traces, over what the statistics are to be averaged over.
        """

        def trace(block, side):
            factor = getattr(block, side)
            if side in self.diagonal:
                return jnp.sum(factor, -1)
            traces = jnp.trace(factor, axis1=-2, axis2=-1)
            return jnp.sum(traces, -1) if self.cut["AG".index(side)] > 1 else traces

        traces = [trace(block, side) for block in (self.direct, self.transposed) for side in "AG"]
        a, g, turned_a, turned_g = average(traces) if average else traces
        # Roots one by one: a product of traces may be too small for float32.
        above, below = jnp.sqrt(a) * jnp.sqrt(turned_g), jnp.sqrt(g) * jnp.sqrt(turned_a)
        positive = (above > 0) & (below > 0)
        scale = jnp.where(positive, above / jnp.where(positive, below, 1), 1)
        direct, (a, g) = self.direct, (self.transposed.A, self.transposed.G)
        return Kronecker(direct.A + a * per_block(scale, a), direct.G + g / per_block(scale, g))


def per_block(values: jax.Array, like: jax.Array) -> jax.Array:
    """Numbers of blocks, `[k]`, or of one, in the shape `[k, 1, ...]`, to go with `like`."""
    return values.reshape(values.shape + (1,) * (like.ndim - values.ndim))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Ragged(Statistics):
    """Statistics of stacked kernels of which data says how many rows each gets, as the experts of `lax.ragged_dot`.

    `G` is `squares` over `rows`, where `rows` is that of the whole batch: over devices and micro-batches both are
    averaged first. A share without rows of a kernel counts, too.

    Attributes:
      A: as of `Kronecker`.
      squares: `n` times the sum of `g g^T`, of the shape of `G`.
      rows: rows for each example, `[copies]`.
    """

    A: Any
    squares: Any
    rows: Any

    def unscaled(self, by):
        return dataclasses.replace(self, squares=by(self.squares))

    def combined(self, average: Average | None = None) -> Kronecker:
        """Returns the factors, from the `average` of the rows over what statistics are averaged over."""
        rows = average(self.rows) if average else self.rows
        share = jnp.where(rows > 0, 1 / jnp.where(rows > 0, rows, 1), 0)
        return Kronecker(self.A, self.squares * per_block(share, self.squares))

    G = Uncombined.G


Block = Kronecker | Unitwise


@jax.tree_util.register_pytree_with_keys_class
class Factors(Mapping[str, Statistics]):
    """The statistics of one batch, a pytree: from layer name to `Kronecker`, `Unitwise`, `Packed`, `Tied` or `Ragged`.

    Like gradients, factors can be added, averaged, `psum`-ed with `jax.tree.map` and passed through `jit`. The average
    of the factors of several batches is that of all of them together. `Packed`, `Tied` and `Ragged` blocks have
    `A` and `G` as a `Kronecker` one has.

    Attributes:
      gradients: the mean gradients of the parameters with gradient factors, by path. The optimizer forms their factors
        after the gradients are averaged over devices.
    """

    def __init__(self, blocks: Mapping[str, Statistics], gradients: Mapping[str, jax.Array] | None = None):
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
        """Unpacks `Packed` blocks, which are spread over the devices of a mesh, to `Kronecker` ones on every device."""
        blocks = {n: block.combined() if block.wire is not None else block for n, block in self.items()}
        return Factors(blocks, self.gradients)

    def unscale(self, loss_scale: jax.typing.ArrayLike) -> Factors:
        """The statistics of the loss itself, from those of `loss_scale` times the loss.

        Gradients are divided by the scale, their second moments (`G`, `F`, `moments`) by its square; `A` does not
        depend on it.

        Args:
          loss_scale: the scalar the loss was multiplied by.
        """
        # Two divisions: the square of a large scale is not finite in float32 where the result is.
        blocks = {n: block.unscaled(lambda x: x / loss_scale / loss_scale) for n, block in self.items()}
        return Factors(blocks, {path: x / loss_scale for path, x in self.gradients.items()})

    def tree_flatten_with_keys(self):
        children: list[Any] = [(jax.tree_util.DictKey(name), block) for name, block in self._blocks.items()]
        if self.gradients:
            children.append((jax.tree_util.GetAttrKey("gradients"), self.gradients))
        return children, tuple(self._blocks)

    @classmethod
    def tree_unflatten(cls, names, children):
        factors = cls(dict(zip(names, children, strict=False)))
        if len(children) > len(names):
            factors.gradients = children[-1]
        return factors
