"""Define specimens and the checks that all specimens share."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import Mesh, PartitionSpec

import kfac
from checking import KRONECKER, check_layers, matrices_of
from oracle import relative_error
from zoo.bruteforce import Truth, truth, truths

N = 6  # examples, in three thirds of two


@dataclasses.dataclass(frozen=True)
class Specimen:
    """A model and its expected layers.

    Attributes:
      name: the name of the model.
      construct: the model's special feature.
      build: returns `(loss, params, batch)` for `loss(params, batch)`, with `N` rows in every array of the batch.
      interacting: whether examples act on each other, so that a batch is not the sum of its thirds.
      hidden: whether the loss hides its examples, so that `num_examples=` has to give their number.
      gradient: names of the layers that have the gradient's own factors.
      functions: names of the vectors that act through a function, such as `exp(log_std)`, or by a copy for each
        example, such as a class token. Their brute force is the gradient of each example alone.
      unreached: names of the layers that no gradient reaches.
      tolerance: relative to the largest entry. It is larger if the model computes in float32.
      alone: whether the model reads arrays that all examples share, such as constant tangents. Brute force then takes
        each example by itself, so that the example has its own rows.
      ordered: whether an example's place in the batch matters.
      penalised: whether the loss also depends on parameters without examples.
    """

    name: str
    construct: str
    build: Callable[[], tuple[Callable, Any, Any]]
    interacting: bool = False
    hidden: bool = False
    gradient: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()
    unreached: tuple[str, ...] = ()
    tolerance: float = 1e-7
    alone: bool = False
    ordered: bool = False
    penalised: bool = False


ZOO: dict[str, Specimen] = {}


def specimen(name: str, construct: str, **options: Any) -> Callable:
    """Return a decorator that adds the model of the decorated function to the zoo."""

    def enter(build):
        assert name not in ZOO
        ZOO[name] = Specimen(name, construct, build, **options)
        return build

    return enter


def randomised(shapes: Any, seed: int = 0) -> Any:
    """Draw normal numbers as a framework's parameters, so that no initialiser is compiled."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.asarray(0.5 * rng.normal(size=leaf.shape), np.float64), shapes)


def tree(seed: int = 0, **shapes: Any) -> dict[str, Any]:
    """Draw a model's parameters without a framework, from nested dictionaries of shapes."""
    is_shape = lambda s: isinstance(s, tuple)  # noqa: E731
    return randomised(jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, np.float64), shapes, is_leaf=is_shape), seed)


def data(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(100 + seed).normal(size=(N, *shape)))


def tokens(seed: int, *shape: int, below: int = 7) -> jax.Array:
    return jnp.asarray(np.random.default_rng(200 + seed).integers(0, below, (N, *shape)))


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1))


def linen(model: Any, batch: dict[str, jax.Array], criterion: Callable, **options: Any) -> tuple[Callable, Any, Any]:
    """Return the loss, parameters and batch of a flax linen model that reads `batch["x"]`."""
    shapes = jax.eval_shape(lambda x: model.init(jax.random.key(0), x, **options), batch["x"])
    others = {key: randomised(value) for key, value in shapes.items() if key != "params"}
    mutable = list(others)

    def loss(params, b):
        out = model.apply({"params": params, **others}, b["x"], mutable=mutable, **options)[0]
        return criterion(out, b["y"])

    return loss, randomised(shapes["params"]), batch


def modules(build: Callable, *kinds: Any) -> tuple[Any, ...]:
    """Return the graph, the parameters and the other state of a flax nnx module that takes `rngs`."""
    graph, state, *rest = nnx.split(nnx.eval_shape(lambda: build(rngs=nnx.Rngs(0))), *kinds, *([...] if kinds else []))
    return graph, randomised(state), *map(_zeros, rest)


def _zeros(shapes: Any) -> Any:
    def zero(leaf):
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return jax.random.key(0) if is_key else jnp.zeros(leaf.shape, leaf.dtype)

    return jax.tree.map(zero, shapes)


def haiku(network: Callable, batch: dict[str, jax.Array], criterion: Callable) -> tuple[Callable, Any, Any]:
    """Return the loss, parameters and batch of a haiku function that reads `batch["x"]`."""
    model = hk.without_apply_rng(hk.transform(network))
    params = randomised(jax.eval_shape(model.init, jax.random.key(0), batch["x"]))
    return lambda p, b: criterion(model.apply(p, b["x"]), b["y"]), params, batch


def equinox(build: Callable, batch: dict[str, jax.Array], criterion: Callable) -> tuple[Callable, Any, Any]:
    """Return the loss, parameters and batch of an equinox module for a single example."""
    shapes = eqx.filter_eval_shape(build, jax.random.key(0))
    params, static = eqx.partition(shapes, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

    def loss(params, b):
        return criterion(jax.vmap(eqx.combine(params, static))(b["x"]), b["y"])

    return loss, randomised(params), batch


# -- checks ------------------------------------------------------------------------------------------------------------


def dressed(loss: Callable) -> Callable:
    """Return the loss with a second pass, whose gradient is stopped and which is also a metric in aux."""

    def with_company(params, batch):
        other = loss(params, jax.tree.map(lambda x: jnp.flip(x, 0), batch))
        return loss(params, batch) + 0 * lax.stop_gradient(other), {"metric": other}

    return with_company


def parts_of(case: Specimen, batch: Any) -> list[Any]:
    """Return thirds of the batch in another order, each with its examples twice.

    If examples interact, return the reordered batch. If their order matters, return the batch as it is.
    """
    if case.ordered:
        return [batch]
    order = np.random.default_rng(5).permutation(N)
    batch = jax.tree.map(np.asarray, batch)
    if case.interacting:
        return [jax.tree.map(lambda x: x[order], batch)]
    thirds = order.reshape(3, -1)
    return [jax.tree.map(lambda x, at=at: x[np.concatenate([at, at])], batch) for at in thirds]


class OneByOne:
    """Brute force for a loss whose examples do not interact. It takes each example alone."""

    def __init__(self, loss: Callable, params: Any, batch: Any):
        each = [jax.tree.map(lambda x, k=k: x[k : k + 1], batch) for k in range(N)]
        self.n, self.each = N, truths(loss, params, each, 1)
        self.value, self.grads = jax.tree.map(lambda *x: sum(x) / N, *((one.value, one.grads) for one in self.each))

    def kronecker(self, layers, layer):
        return tuple(sum(parts) / N for parts in zip(*(one.kronecker(layers, layer) for one in self.each), strict=True))

    def vectors(self, layers, layer):
        return np.concatenate([one.vectors(layers, layer) for one in self.each]) / N


def undressed(loss: Callable) -> Callable:
    """Return the loss with an empty aux."""
    return lambda params, batch: (loss(params, batch), {})


def check(case: Specimen, dress: Callable = undressed) -> None:
    """Check the statistics of `dress(loss)` on three devices against brute force.

    Each device gets a third of the batch, with each example twice.
    """
    loss, params, batch = case.build()
    expected: Any = OneByOne(loss, params, batch) if case.alone else truth(loss, params, batch, N)
    parts = parts_of(case, batch)
    worn = dress(loss)
    layers = kfac.find_layers(worn, params, parts[0], has_aux=True)
    check_layers(layers, params)
    count = len(jax.tree.leaves(parts[0])[0]) if case.hidden else None
    fn = on_devices(kfac.value_and_grad(worn, layers, has_aux=True, num_examples=count), len(parts))
    together = jax.tree.map(np.asarray, fn(params, jax.tree.map(lambda *x: np.concatenate(x), *parts)))
    results = [jax.tree.map(lambda x, k=k: x[k], together) for k in range(len(parts))]
    found = jax.tree.map(lambda *leaves: np.mean(np.stack(leaves), 0), *((v[0], g, f) for v, g, f in results))
    compare(layers, *found, expected, case)
    own, unreached = (
        {layer.name for layer in layers if layer.kind == kind} for kind in ("gradient-factors", "skipped")
    )
    assert own == set(case.gradient), f"the gradient's own factors: {sorted(own)}"
    assert unreached == set(case.unreached), f"no gradient reaches {sorted(unreached)}"


def on_devices(fn: Callable, count: int) -> Callable:
    """Return a function that measures a share of the batch on each device and stacks the results along a first axis."""

    def local(params, batch):
        return jax.tree.map(lambda x: x[None], fn(params, batch))

    if count > 1:
        mesh = Mesh(np.array(jax.devices()[:count]), ("devices",))
        over = PartitionSpec("devices")
        # With `check_vma`, the model would have to mark constants as varying before they become the first states of a
        # scan.
        options = {"in_specs": (PartitionSpec(), over), "out_specs": over, "check_vma": False}
        local = jax.shard_map(local, mesh=mesh, **options)
    return jax.jit(local)


def compare(
    layers: kfac.Layers, value: Any, grads: Any, factors: kfac.Factors, expected: Truth | OneByOne, case: Specimen
) -> None:
    tolerance = case.tolerance
    assert relative_error(value, expected.value) <= tolerance
    size = max(np.max(np.abs(leaf)) for leaf in jax.tree.leaves(expected.grads))

    def agree(found, true):  # a gradient may be zero up to rounding, as for a key's bias
        return np.max(np.abs(found - true)) <= tolerance * max(np.max(np.abs(true)), 1e-2 * size)

    for path, got, true in zip(layers.paths, jax.tree.leaves(grads), jax.tree.leaves(expected.grads), strict=True):
        assert agree(got, true), f"gradient of {path}"
    matrices, blocks = _read(layers, jax.tree.leaves(expected.grads), factors)
    wrong = []
    for layer in layers:
        if type(factors.get(layer.name)).__name__ == "Tied":  # see the formula in tests/capture/test_tied.py
            whole = expected_of_tied(case, layers)[layer.name]
            errors = [relative_error(x, y) for x, y in zip(blocks[layer.name], (whole.A, whole.G), strict=True)]
            if max(errors) > tolerance:
                wrong.append(f"{layer.name}: A {errors[0]:.1e}, G {errors[1]:.1e} for the batch as it is")
        elif layer.kind in KRONECKER:
            a, g, matrix, positions = expected.kronecker(layers, layer)
            if layer.kind == "embedding":
                assert not np.any(a - np.stack([np.diag(np.diagonal(x)) for x in a]))
                a = np.stack([np.diagonal(x) for x in a])
            found_a, found_g = (x if layer.stacked else x[None] for x in blocks[layer.name])
            assert case.penalised or agree(matrix, matrices[layer.name]), (
                f"brute force has not seen all of {layer.name}"
            )
            errors = relative_error(found_a, a), relative_error(found_g, g)
            miscounted = layer.positions is not None and abs(positions.max() - layer.positions) > 1e-9
            if max(errors) > tolerance or miscounted:
                wrong.append(f"{layer.name}: A {errors[0]:.1e}, G {errors[1]:.1e}, s {layer.positions} for {positions}")
        elif layer.kind in ("unitwise", "diagonal"):
            if layer.name in case.functions:
                rows = example_gradients(case, layers, layer)
            else:
                rows = expected.vectors(layers, layer)
            assert case.penalised or agree(rows.sum(0), matrices[layer.name][0]), (
                f"brute force has not seen all of {layer.name}"
            )
            block = expected.n * np.einsum("nci,ncj->cij", rows, rows)
            error = relative_error(*blocks[layer.name], block)
            if error > tolerance:
                wrong.append(f"{layer.name}: F {error:.1e}")
    assert not wrong, "; ".join(wrong)


def example_gradients(case: Specimen, layers: kfac.Layers, layer: kfac.types.Layer) -> np.ndarray:
    """Return the gradients `[n, d_out, 1]` of a vector, from the loss of each example alone."""
    loss, params, batch = case.build()
    gradient = jax.jit(jax.grad(loss))
    rows = []
    for k in range(N):
        grads = jax.tree.leaves(gradient(params, jax.tree.map(lambda x, k=k: x[k : k + 1], batch)))
        rows.append(np.reshape(grads[layers.paths.index(layer.params[0])], (-1, 1)) / N)
    return np.stack(rows)


def _read(layers: kfac.Layers, grads: list[Any], factors: kfac.Factors) -> Any:
    """Return gradients as matrices and the arrays of blocks, by layer.

    A single program computes them, because JAX would compile each operation separately.
    """

    def read(grads, factors):
        by_path = dict(zip(layers.paths, grads, strict=True))
        own = [layer for layer in layers if layer.kind in (*KRONECKER, "unitwise", "diagonal")]
        blocks = {name: (b.F,) if isinstance(b, kfac.types.Unitwise) else (b.A, b.G) for name, b in factors.items()}
        return matrices_of(own, by_path), blocks

    return jax.tree.map(np.asarray, jax.jit(read)(grads, factors))


def expected_of_tied(case: Specimen, layers: kfac.Layers) -> kfac.Factors:
    """Return the package's own factors of the plain loss on the original batch."""
    loss, params, batch = case.build()
    fn = kfac.value_and_grad(loss, layers, num_examples=N if case.hidden else None)
    return jax.jit(fn)(params, batch)[2]


@functools.cache
def as_it_is(case: Specimen) -> tuple[Callable, Any, Any, kfac.Layers]:
    """Return the model with its layers. They are cached for all tests that only look at the layers."""
    loss, params, batch = case.build()
    return loss, params, batch, kfac.find_layers(loss, params, batch)


def check_strict(case: Specimen) -> None:
    """Check that the error of `strict` names every leaf without exact rows, and patterns that skip these leaves.

    With these patterns, `find_layers` must accept the loss.
    """
    loss, params, batch, layers = as_it_is(case)
    if not any(layer.kind == "gradient-factors" for layer in layers):
        assert kfac.find_layers(loss, params, batch, strict=True) == layers
        return
    with pytest.raises(kfac.UnsupportedLayerError) as raised:
        kfac.find_layers(loss, params, batch, strict=True)
    skip = re.findall(r"'(\^.*?\$)'", str(raised.value))
    left_out = [layer for layer in layers if layer.kind in ("gradient-factors", "skipped")]
    found = kfac.find_layers(loss, params, batch, strict=True, rules=dict.fromkeys(skip, "skip"))
    skipped = {path for layer in found if layer.kind == "skipped" for path in layer.params}
    assert skipped == {path for layer in left_out for path in layer.params}


# -- the table in the documentation ------------------------------------------------------------------------------------

KINDS = (("Kronecker", KRONECKER), ("unit-wise", ("unitwise",)), ("diagonal", ("diagonal",)))


def what_happens(case: Specimen) -> str:
    """Describe a model's blocks, and name the leaves that have the gradient's own factors or no gradient."""
    layers = as_it_is(case)[-1]
    counts = [f"{sum(layer.kind in kinds for layer in layers)} {name}" for name, kinds in KINDS]
    counted = ", ".join(count for count in counts if not count.startswith("0 "))
    for kind, words in {"gradient-factors": "gradient", "skipped": "no gradient reaches"}.items():
        if names := ", ".join(f"`{layer.name}`" for layer in layers if layer.kind == kind):
            counted += f"; {words}: {names}"
    return counted


def table(zoo: dict[str, Specimen], broken: dict[str, str]) -> str:
    """Return the zoo as a table in Markdown."""
    rows = ["| model | construct | what happens |", "|---|---|---|"]
    for name, case in zoo.items():
        remark = f" (known fault: {broken[name]})" if name in broken else ""
        rows.append(f"| {name} | {case.construct} | {what_happens(case)}{remark} |")
    return "\n".join(rows) + "\n"
