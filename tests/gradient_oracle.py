"""Compute Kronecker factors from the gradient's program, for models of any size.

The package follows parameters forward through a loss and taps the operations that read them. This oracle works in the
opposite direction and shares no ideas with the package. It traces `jax.vjp`, walks back from each kernel's gradient to
the products that form it, and evaluates the program up to their operands. Each product has the layer's inputs `a` from
the forward pass, and the gradients `g`, which depend on the cotangent. Together they give the factors

    A = (1/n) sum a a^T,    G = (n/s) sum g g^T,

with `n` examples and `s` positions per example. The oracle need not know which example a row belongs to. It therefore
runs on models that are too large for brute force over examples, such as a ResNet-50 or a GPT.

It covers kernels that `dot_general`, `conv_general_dilated` or a lookup reads, in straight-line programs. Other leaves
are left out: kernels inside loops, kernels that are computed or sliced, tables that are also kernels, and kernels of
grouped convolutions.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

# Operations that only change a gradient's layout or type.
LAYOUT = {"transpose", "reshape", "squeeze", "expand_dims", "copy", "convert_element_type"}


@dataclasses.dataclass
class Equation:
    """An equation of a program without calls. Each operand is a name, or an array if it is a constant."""

    original: Any
    within: Jaxpr
    operands: list[Any]
    results: list[int]

    @property
    def kind(self) -> str:
        return self.original.primitive.name

    @property
    def params(self) -> dict[str, Any]:
        return self.original.params

    def run(self, operands: Sequence[Any]) -> Sequence[jax.Array]:
        pairs = zip(self.original.invars, operands, strict=True)
        given = {variable: value for variable, value in pairs if not isinstance(variable, Literal)}
        alone = self.within.replace(
            constvars=(), invars=list(given), outvars=self.original.outvars, eqns=[self.original]
        )
        return jaxpr_as_fun(ClosedJaxpr(alone, ()))(*given.values())


class Program:
    """A program in which all calls are inlined."""

    def __init__(self, closed: ClosedJaxpr):
        self.equations: list[Equation] = []
        self.count = 0
        self.inputs = [self.new() for _ in closed.jaxpr.invars]
        self.outputs = self._write(closed.jaxpr, closed.consts, self.inputs)
        self.producer = {name: equation for equation in self.equations for name in equation.results}

    def new(self) -> int:
        self.count += 1
        return self.count

    def _write(self, jaxpr: Jaxpr, consts: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
        names = dict(zip(jaxpr.constvars, map(np.asarray, consts), strict=True))
        names |= dict(zip(jaxpr.invars, operands, strict=True))

        def name_of(variable: Any) -> Any:
            return np.asarray(variable.val) if isinstance(variable, Literal) else names[variable]

        for equation in jaxpr.eqns:
            given = [name_of(variable) for variable in equation.invars]
            inner = called(equation)
            if inner is not None:
                results = self._write(*inner, given)
            else:
                results = [self.new() for _ in equation.outvars]
                self.equations.append(Equation(equation, jaxpr, given, results))
            names |= dict(zip(equation.outvars, results, strict=True))
        return [name_of(variable) for variable in jaxpr.outvars]

    def dependent(self, start: int) -> set[int]:
        """Return all names that depend on the name `start`."""
        found = {start}
        for equation in self.equations:
            if any(isinstance(name, int) and name in found for name in equation.operands):
                found.update(equation.results)
        return found

    def evaluate(self, values: Sequence[Any], wanted: set[int]) -> dict[int, jax.Array]:
        """Return the values of the wanted names. Free other values after their last use."""
        last_use: dict[int, int] = {}
        needed = set(wanted)
        for number, equation in reversed(list(enumerate(self.equations))):
            if needed.intersection(equation.results):
                for name in equation.operands:
                    if isinstance(name, int):
                        needed.add(name)
                        last_use.setdefault(name, number)
        held = dict(zip(self.inputs, values, strict=True))
        for number, equation in enumerate(self.equations):
            if not needed.intersection(equation.results):
                continue
            operands = [held[name] if isinstance(name, int) else name for name in equation.operands]
            held |= dict(zip(equation.results, equation.run(operands), strict=True))
            for name in equation.operands:
                if isinstance(name, int) and last_use[name] == number and name not in wanted:
                    held.pop(name, None)
        return {name: held[name] for name in wanted}


def called(equation: Any) -> tuple[Jaxpr, Sequence[Any]] | None:
    """Return the program that an equation calls once, with its constants. Return None for loops and branches."""
    if equation.primitive.name in {"scan", "while", "cond"}:
        return None
    for value in equation.params.values():
        if isinstance(value, ClosedJaxpr) and len(value.jaxpr.invars) == len(equation.invars):
            return value.jaxpr, value.consts
        if isinstance(value, Jaxpr) and len(value.invars) == len(equation.invars):
            return value, ()
    return None


@dataclasses.dataclass
class Product:
    """An equation that forms a kernel's gradient or a term of the gradient.

    Attributes:
      equation: the product.
      layout: the operations from the product to the gradient, in order.
    """

    equation: Equation
    layout: list[Equation]


def products_of(program: Program, gradient: Any) -> list[Product] | None:
    """Return the products whose sum is a gradient, or None if the gradient is formed in another way."""
    found: list[Product] = []

    def walk(name: Any, layout: list[Equation]) -> bool:
        equation = program.producer.get(name) if isinstance(name, int) else None
        if equation is None:
            return False
        kind = equation.kind
        if kind in {"add", "add_any"}:
            return all([walk(operand, layout) for operand in equation.operands])
        if kind in LAYOUT:
            return walk(equation.operands[0], [equation, *layout])
        found.append(Product(equation, layout))
        return kind in {"dot_general", "conv_general_dilated", "scatter-add"}

    return found if walk(gradient, []) else None


@dataclasses.dataclass
class Rows:
    """The rows of a kernel's use.

    Attributes:
      g: gradients `[rows, d_out]`.
      a: inputs `[rows, d_in]`, or None for a lookup.
      tokens: the indices `[rows]` of a lookup.
    """

    g: np.ndarray
    a: np.ndarray | None = None
    tokens: np.ndarray | None = None


def moved(array: np.ndarray, layout: Sequence[Equation]) -> np.ndarray:
    """Apply the operations between a product and the gradient to an array of the product's shape."""
    for equation in layout:
        if equation.kind == "transpose":
            array = array.transpose(equation.params["permutation"])
        elif equation.kind == "reshape":
            array = array.reshape(equation.params["new_sizes"])
        elif equation.kind in {"squeeze", "expand_dims"}:
            array = array.reshape([size for size in array.shape if size != 1])
    return array


def order_of(numbers: np.ndarray) -> np.ndarray:
    """Return the distinct numbers in the order of their first occurrence."""
    _, first = np.unique(numbers.reshape(-1), return_index=True)
    return numbers.reshape(-1)[np.sort(first)]


def kernel_order(
    sizes: Sequence[int], sides: Sequence[str], layout: Sequence[Equation]
) -> tuple[np.ndarray, np.ndarray]:
    """Return a kernel's input order and output order in memory, as indices into the product's own order.

    Args:
      sizes: the product's shape.
      sides: "a" or "g" for each axis of the product.
      layout: the operations from the product to the gradient.
    """
    orders = []
    for side in "ag":
        own = [size if of == side else 1 for size, of in zip(sizes, sides, strict=True)]
        numbers = np.broadcast_to(np.arange(math.prod(own)).reshape(own), sizes)
        orders.append(order_of(moved(numbers, layout)))
    return orders[0], orders[1]


def dense_rows(product: Product, lhs: np.ndarray, rhs: np.ndarray, gradient_first: bool) -> Rows | None:
    (contract_l, contract_r), (batch_l, batch_r) = product.equation.params["dimension_numbers"]
    if batch_l or batch_r:
        return None

    def as_rows(array: np.ndarray, contract: Sequence[int]) -> tuple[np.ndarray, list[int]]:
        free = [axis for axis in range(array.ndim) if axis not in contract]
        rows = math.prod(array.shape[axis] for axis in contract)
        return array.transpose([*contract, *free]).reshape(rows, -1), [array.shape[axis] for axis in free]

    left, left_sizes = as_rows(lhs, contract_l)
    right, right_sizes = as_rows(rhs, contract_r)
    sides = ["g" if gradient_first else "a"] * len(left_sizes) + ["a" if gradient_first else "g"] * len(right_sizes)
    inputs, outputs = kernel_order([*left_sizes, *right_sizes], sides, product.layout)
    a, g = (right, left) if gradient_first else (left, right)
    return Rows(g[:, outputs], a[:, inputs])


def convolution_rows(product: Product, lhs: np.ndarray, rhs: np.ndarray, gradient_first: bool) -> Rows | None:
    """Return the patches and gradients of a kernel whose gradient is a convolution.

    The kernel's gradient convolves the images with the output gradients, in which examples take the place of channels.
    The stride of this convolution is the kernel's dilation, and its dilation is the kernel's stride.
    """
    params = product.equation.params
    if gradient_first or params["feature_group_count"] != 1 or params["batch_group_count"] != 1:
        return None
    numbers = params["dimension_numbers"]
    # Images [channels (as batch), examples (as features), *spatial]; gradients [outputs, examples, *spatial].
    images = jnp.asarray(lhs.transpose(numbers.lhs_spec)).swapaxes(0, 1)
    g = rhs.transpose(numbers.rhs_spec)
    strides, dilation = params["rhs_dilation"], params["window_strides"]
    sizes = product.equation.original.outvars[0].aval.shape
    result = [sizes[axis] for axis in numbers.out_spec]
    window = result[2:]
    padding = []
    for k in range(len(window)):
        held = (images.shape[2 + k] - 1) * params["lhs_dilation"][k] + 1
        low, _ = params["padding"][k]
        reach = (g.shape[2 + k] - 1) * strides[k] + (window[k] - 1) * dilation[k] + 1
        padding.append((low, reach - held - low))
    rows = jax.lax.conv_general_dilated_patches(
        images, window, strides, padding, lhs_dilation=params["lhs_dilation"], rhs_dilation=dilation
    )  # [examples, channels * window, *spatial]
    a = np.asarray(rows).reshape(*rows.shape[:2], -1).transpose(0, 2, 1).reshape(-1, rows.shape[1])
    outputs = g.shape[0]
    g = g.reshape(outputs, g.shape[1], -1).transpose(1, 2, 0).reshape(-1, outputs)
    sides = [""] * len(sizes)
    for position, axis in enumerate(numbers.out_spec):
        sides[axis] = "g" if position == 1 else "a"
    inputs, order = kernel_order(sizes, sides, product.layout)
    # `kernel_order` counts the inputs in the order of the product's axes, but the patches have channels first.
    axes = [axis for axis in range(len(sizes)) if sides[axis] == "a"]
    channels_first = [numbers.out_spec[0], *numbers.out_spec[2:]]
    count = np.arange(a.shape[1]).reshape([sizes[axis] for axis in channels_first])
    in_product_order = count.transpose([channels_first.index(axis) for axis in axes]).reshape(-1)
    return Rows(g[:, order], a[:, in_product_order[inputs]])


def lookup_rows(product: Product, indices: np.ndarray, updates: np.ndarray) -> Rows | None:
    numbers = product.equation.params["dimension_numbers"]
    whole_rows = numbers.update_window_dims == (
        updates.ndim - 1,
    ) and numbers.inserted_window_dims == numbers.scatter_dims_to_operand_dims == (0,)
    if product.layout or not whole_rows:
        return None
    return Rows(updates.reshape(-1, updates.shape[-1]), tokens=indices.reshape(-1))


@dataclasses.dataclass
class Kernel:
    """A kernel's factors: `A` `[d_in, d_in]`, or its diagonal `[d_in]` for a lookup, and `G` `[d_out, d_out]`."""

    A: np.ndarray
    G: np.ndarray


def factors(
    loss_fn: Callable[..., jax.Array], params: Any, *args: Any, num_examples: int, with_bias: Sequence[str] = ()
) -> Iterator[tuple[str, Kernel]]:
    """Yield the path and the factors of each kernel that the oracle covers.

    Args:
      loss_fn: the mean loss, `loss_fn(params, *args)`.
      params: the parameters.
      *args: the other arguments.
      num_examples: the number of examples in `args`.
      with_bias: paths of the kernels that share their block with a bias, so that `a` ends with a 1.
    """

    def gradient(params: Any, args: Any, cotangent: jax.Array) -> Any:
        return jax.vjp(lambda params: loss_fn(params, *args), params)[1](cotangent)[0]

    one = jnp.ones((), jax.eval_shape(loss_fn, params, *args).dtype)
    program = Program(jax.make_jaxpr(gradient)(params, args, one))
    paths = ["/".join(str(getattr(key, "key", key)) for key in path) for path, _ in jax.tree.leaves_with_path(params)]
    backward = program.dependent(program.inputs[-1])
    covered = {
        path: products
        for path, name in zip(paths, program.outputs, strict=True)
        if (products := products_of(program, name)) is not None
    }
    wanted = {
        name
        for products in covered.values()
        for product in products
        for name in product.equation.operands
        if isinstance(name, int)
    }
    values = program.evaluate(jax.tree.leaves((params, args, one)), wanted)

    def rows_of(product: Product) -> Rows | None:
        operands = product.equation.operands
        arrays = [np.asarray(values[x], np.float64) if isinstance(x, int) else np.asarray(x) for x in operands]
        if product.equation.kind == "scatter-add":
            return lookup_rows(product, arrays[1].astype(int), arrays[2])
        late = [isinstance(x, int) and x in backward for x in operands]
        if late[0] == late[1]:
            return None
        rows = dense_rows if product.equation.kind == "dot_general" else convolution_rows
        return rows(product, *arrays, late[0])

    sizes = dict(zip(paths, (leaf.shape for leaf in jax.tree.leaves(params)), strict=True))
    for path, products in covered.items():
        uses = [rows_of(product) for product in products]
        kernel = combined(uses, sizes[path], num_examples, path in with_bias)
        if kernel is not None:
            yield path, kernel


def combined(uses: Sequence[Rows | None], shape: Sequence[int], n: int, with_bias: bool) -> Kernel | None:
    """Sum the uses of a kernel. Return None if a use is not covered, or if lookups and products share the kernel."""
    if any(rows is None for rows in uses) or len({rows.tokens is None for rows in uses}) > 1:
        return None
    g = np.concatenate([rows.g for rows in uses])
    positions = len(g) / n
    G = n / positions * g.T @ g
    if uses[0].tokens is not None:
        counts = sum(np.bincount(rows.tokens, minlength=shape[0]) for rows in uses)
        return Kernel(counts / n, G)
    a = np.concatenate([rows.a for rows in uses])
    if with_bias:
        a = np.concatenate([a, np.ones((len(a), 1))], axis=1)
    return Kernel(a.T @ a / n, G)
