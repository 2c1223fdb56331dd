"""Check that the installed JAX gives equations the parameters that the package reads.

The tests use the private module `_capture.parameters`. They trace a program for each primitive whose parameters are
read, and compare each parameter with the value that the program was written with.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core as jex
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import kfac
from kfac._capture.parameters import (
    CALLS,
    REDUCTIONS,
    UnknownEquationError,
    inner_program,
    parameter,
    scan,
)

PACKAGE = pathlib.Path(kfac.__file__).parent
JAX = jax.__version_info__
# True if the installed JAX has a primitive that other supported versions lack.
IN_THIS_JAX = {
    "closed_call": JAX < (0, 11),
    "eval_jaxpr": JAX >= (0, 11),
    "stack": JAX >= (0, 10, 1),
    "unstack": JAX >= (0, 10, 1),
}


# -- finding equations -------------------------------------------------------------------------------------------------


def equations(jaxpr):
    """Yield all equations of a jaxpr and its inner programs."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            if isinstance(value, (jex.Jaxpr, jex.ClosedJaxpr)):
                yield from equations(value)


def traced(primitive, fn, *args):
    """Return a primitive's first equation in a function's program."""
    found = [eqn for eqn in equations(jax.make_jaxpr(fn)(*args)) if eqn.primitive.name == primitive]
    assert found, f"the program has no equation {primitive!r}"
    return found[0]


def numbers(*shape):
    return jnp.asarray(np.random.default_rng(len(shape)).normal(size=shape), jnp.float32)


# -- a program for each primitive --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Computes:
    """The expected value of a parameter that holds a program, which must compute the same as a function.

    Attributes:
      fn: the function.
      args: the arguments for which the function and the program are evaluated.
    """

    fn: Callable[..., Any]
    args: tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class Case:
    """A program with a primitive's equation, and this equation's expected parameters."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    truth: dict[str, Any]


X = numbers(4, 6)


def mesh():
    return jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])


def inner_programs():
    """Return programs whose equation holds another program."""
    row, other = numbers(4), numbers(4) + 1

    def added(a, b):
        return a + 2 * b

    along = NamedSharding(mesh(), P("data"))
    jitted = jax.jit(added, in_shardings=(along, None), out_shardings=along)

    def policy(primitive, *_, **__):
        return primitive.name == "sin"

    checkpointed = jax.checkpoint(added, prevent_cse=False, policy=policy)

    @jax.checkpoint
    def scanned(a):
        return lax.scan(lambda carry, _: (jnp.sin(carry), None), a, length=3)[0].sum()

    def forward(a):
        return jnp.sin(jnp.sin(jnp.sin(a)))

    def called(a, b):
        program = jax.make_jaxpr(added)(a, b)
        return jex.primitives.closed_call_p.bind(a, b, call_jaxpr=program)

    def body(carry, x):
        return carry + x, carry * x

    def loop(init, xs):
        return lax.scan(body, init, xs, reverse=True, unroll=2)

    inside = Computes(added, (row, other))
    options = {"length": 4, "reverse": True, "unroll": 2}
    shardings = {"in_shardings": (along, None), "out_shardings": (along,)}
    return {
        "jit": Case(jitted, (row, other), {"jaxpr": inside, **shardings}),
        "remat2": Case(checkpointed, (row, other), {"jaxpr": inside, "prevent_cse": False, "policy": policy}),
        # JAX 0.10 puts the forward pass of a scan under `jax.checkpoint` into a call.
        "closed_call": Case(jax.grad(scanned), (row,), {"call_jaxpr": Computes(forward, (row,))}),
        "eval_jaxpr": Case(called, (row, other), {"call_jaxpr": inside}),
        "scan": Case(loop, (row, numbers(4, 4)), {"jaxpr": Computes(body, (row, other)), **options}),
    }


def products():
    """Return programs with a product or a convolution."""
    contracted, batched = ((3,), (3,)), ((0, 2), (0, 1))

    def product(x, w):
        return lax.dot_general(x, w, (contracted, batched))

    options = {
        "window_strides": (2, 1),
        "padding": ((1, 0), (0, 2)),
        "lhs_dilation": (1, 2),
        "rhs_dilation": (2, 1),
        "feature_group_count": 2,
        "batch_group_count": 1,
    }

    def convolution(image, kernel):
        return lax.conv_general_dilated(image, kernel, dimension_numbers=("NHWC", "HWIO", "CNHW"), **options)

    # The axes of batch, channels and window. For the kernel, the axes of outputs, inputs and window.
    layout = lax.ConvDimensionNumbers(lhs_spec=(0, 3, 1, 2), rhs_spec=(3, 2, 0, 1), out_spec=(1, 0, 2, 3))
    image, kernel = numbers(4, 8, 8, 4), numbers(2, 3, 2, 6)
    groups = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (1,)), ((), ())), lhs_ragged_dimensions=(0,), rhs_group_dimensions=(0,)
    )
    ragged = X, numbers(2, 6, 3), jnp.array([1, 3])
    return {
        "dot_general": Case(
            product,
            (numbers(2, 5, 4, 3), numbers(2, 4, 7, 3)),
            {"dimension_numbers": (contracted, batched), "out_sharding": None},
        ),
        "conv_general_dilated": Case(convolution, (image, kernel), {"dimension_numbers": layout, **options}),
        "ragged_dot_general": Case(lax.ragged_dot, ragged, {"ragged_dot_dimension_numbers": groups}),
    }


def indexing():
    """Return programs that read or write entries at given places."""
    read = lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,))
    written = lax.ScatterDimensionNumbers(
        update_window_dims=(0,), inserted_window_dims=(1,), scatter_dims_to_operand_dims=(1,)
    )

    def gathered(x):
        return x.at[jnp.array([1, 2, 0])].get(mode="clip")

    def scattered(x):
        return x.at[:, jnp.array([1, 2])].set(0.0)

    clip = lax.GatherScatterMode.CLIP
    return {
        "gather": Case(gathered, (X,), {"dimension_numbers": read, "slice_sizes": (1, 6), "mode": clip}),
        "scatter": Case(scattered, (X,), {"dimension_numbers": written}),
    }


def changes_of_form():
    """Return programs that move entries but compute nothing."""
    cube = numbers(2, 3, 4)
    return {
        "broadcast_in_dim": Case(
            lambda x: lax.broadcast_in_dim(x, (4, 5, 6), (0, 2)), (X,), {"broadcast_dimensions": (0, 2)}
        ),
        "concatenate": Case(lambda x: jnp.concatenate([x, x], 1), (X,), {"dimension": 1}),
        "reshape": Case(lambda x: lax.reshape(x, (3, 8), dimensions=(1, 0)), (X,), {"dimensions": (1, 0)}),
        "rev": Case(lambda x: lax.rev(x, (1,)), (X,), {"dimensions": (1,)}),
        "slice": Case(
            lambda x: lax.slice(x, (1, 0), (4, 5), (2, 3)), (X,), {"start_indices": (1, 0), "strides": (2, 3)}
        ),
        "split": Case(lambda x: lax.split(x, (1, 3, 2), axis=1), (X,), {"axis": 1, "sizes": (1, 3, 2)}),
        "stack": Case(lambda x: jnp.stack([x, x], 1), (X,), {"axis": 1}),
        "tile": Case(lambda x: jnp.tile(x, (2, 3)), (X,), {"reps": (2, 3)}),
        "transpose": Case(lambda x: x.transpose(2, 0, 1), (cube,), {"permutation": (2, 0, 1)}),
        "unstack": Case(lambda x: jnp.unstack(x, axis=1), (X,), {"axis": 1}),
    }


def reductions():
    """Return programs that reduce axes of an array or reduce over devices."""
    made = {}
    for name in REDUCTIONS - {"argmax", "argmin"}:
        array = jnp.ones((4, 6, 2), bool if name in ("reduce_and", "reduce_or") else jnp.int32)
        made[name] = Case(functools.partial(getattr(lax, name), axes=(0, 2)), (array,), {"axes": (0, 2)})
    for name in ("argmax", "argmin"):
        place = functools.partial(getattr(lax, name), axis=1, index_dtype=jnp.int32)
        made[name] = Case(place, (X,), {"axes": (1,)})
    for name, check in (("psum", False), ("psum_invariant", True)):
        total = jax.shard_map(
            lambda x: lax.psum(x, "data"), mesh=mesh(), in_specs=P("data"), out_specs=P(), check_vma=check
        )
        made[name] = Case(total, (X,), {"axes": ("data",)})
    return made


def other_programs():
    return {
        "name": Case(lambda x: checkpoint_name(x, "a label"), (X,), {"name": "a label"}),
        "sort": Case(lambda x: lax.sort(x, dimension=0), (X,), {"dimension": 0}),
    }


CASES = {**inner_programs(), **products(), **indexing(), **changes_of_form(), **reductions(), **other_programs()}


def test_each_parameter_that_is_read_has_a_program():
    """Check that the programs contain exactly the parameters that the package reads.

    If the package reads a new parameter, add a program for it.
    """
    read = set(CALLS.values())
    for path in PACKAGE.rglob("*.py"):
        source = path.read_text()
        read.update(re.findall(r'\b(?:parameter|inner_program)\(eqn, "(\w+)"\)', source))
        for names in re.findall(r"\bchosen\(op\.eqn, \((.+?)\)\)", source):
            read.update(re.findall(r"\w+", names))
    assert read == {name for case in CASES.values() for name in case.truth}


def assert_true(eqn, name, truth):
    """Compare a parameter's value and type with the truth."""
    if isinstance(truth, Computes):
        program = inner_program(eqn, name)
        assert isinstance(program, jex.ClosedJaxpr)
        found, expected = jex.jaxpr_as_fun(program)(*truth.args), truth.fn(*truth.args)
        jax.tree.map(np.testing.assert_allclose, list(found), jax.tree.leaves(expected))
        return
    found = parameter(eqn, name)
    if name in ("in_shardings", "out_shardings"):  # JAX has a special object for arrays without a sharding
        found = tuple(s if isinstance(s, jax.sharding.Sharding) else None for s in found)
    assert type(found) is type(truth)
    assert found == truth


@pytest.mark.parametrize("primitive", sorted(CASES))
def test_what_is_read_is_what_was_written(primitive):
    if not IN_THIS_JAX.get(primitive, True):
        pytest.skip(f"JAX {jax.__version__} has no {primitive}")
    program = CASES[primitive]
    eqn = traced(primitive, program.fn, *program.args)
    for name, truth in program.truth.items():
        assert_true(eqn, name, truth)


@pytest.mark.parametrize("change", ["add", "mul", "min", "max"])
def test_scatters_that_combine_share_the_row_of_scatter(change):
    [eqn] = [
        eqn
        for eqn in equations(jax.make_jaxpr(lambda x: getattr(x.at[:, jnp.array([1, 2])], change)(2.0))(X))
        if eqn.primitive.name.startswith("scatter")
    ]
    assert eqn.primitive.name in (f"scatter-{change}", f"scatter_{change}")
    assert parameter(eqn, "dimension_numbers") == CASES["scatter"].truth["dimension_numbers"]


def test_options_that_were_not_given_are_none():
    assert parameter(traced("slice", lambda x: x[1:3], X), "strides") is None
    assert parameter(traced("reshape", lambda x: x.reshape(-1), X), "dimensions") is None


def test_no_other_module_reads_a_parameter_by_its_name():
    readers = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if re.search(r"\b(eqn|equation)\.params\b(?!\.values\(\))", path.read_text())
    }
    assert readers == {"_capture/parameters.py"}


# -- the roles of a scan's operands ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Loop:
    """A function with one scan, its arguments, and how many operands of the scan have each role."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    consts: int
    carried: int
    slices: int
    length: int


A, B = numbers(3), numbers(3) + 1
SQUARE = numbers(3, 3)
KEYS = jax.random.split(jax.random.key(0), 3)


def carries(w, x, xs):
    return lax.scan(lambda carry, row: (jnp.tanh(w @ carry + row), carry), x, xs)


def maps(w, xs):
    return lax.map(lambda row: w @ row, xs)


def counts(x):
    return lax.scan(lambda carry, _: (2 * carry, None), x, length=4)


def backwards(w, x, xs):
    return lax.scan(lambda carry, row: (jnp.tanh(w @ carry + row), carry), x, xs, reverse=True)


def looks_up(table, x):
    """Scan with a constant that is as long as the scan."""
    return lax.scan(lambda carry, row: (carry + table[0] * row, table.sum(0) + row), x, table + 1)


def carries_what_is_as_long(x, xs):
    """Scan with a carry that has the shape of the scanned array."""
    return lax.scan(lambda carry, row: (carry * row, carry.sum(0)), x, xs)


def nothing_but_results(w):
    return lax.scan(lambda carry, _: (carry, jnp.sin(w)), None, length=3)[1]


def draws(keys, x):
    return lax.scan(lambda carry, key: (carry + jax.random.normal(key, (3,)), key), x, keys)


def hands_a_key_on(key, xs):
    def body(key, row):
        key, own = jax.random.split(key)
        return key, row + jax.random.normal(own, (3,))

    return lax.scan(body, key, xs)


def with_one_key(key, xs):
    return lax.map(lambda row: row + jax.random.normal(key, (3,)), xs)


def of_trees(w, tree, xs):
    def body(carry, row):
        return {"a": carry["b"] @ w + row["x"], "b": carry["b"] + row["y"]}, (carry["a"], row["y"])

    return lax.scan(body, tree, xs)


def nested(w, x, xs):
    def outer(carry, rows):
        return lax.scan(lambda carry, row: (jnp.tanh(w @ carry + row), row), carry, rows)

    return lax.scan(outer, x, xs)


LOOPS = {
    "constants, carry and slices": Loop(carries, (SQUARE, A, numbers(4, 3)), 1, 1, 1, 4),
    "no carry": Loop(maps, (SQUARE, numbers(4, 3)), 1, 0, 1, 4),
    "no constants, no slices": Loop(counts, (A,), 0, 1, 0, 4),
    "constants alone": Loop(nothing_but_results, (A,), 1, 0, 0, 3),
    "backwards": Loop(backwards, (SQUARE, A, numbers(4, 3)), 1, 1, 1, 4),
    "length 0": Loop(carries, (SQUARE, A, numbers(0, 3)), 1, 1, 1, 0),
    "length 1": Loop(carries, (SQUARE, A, numbers(1, 3)), 1, 1, 1, 1),
    "as long as wide": Loop(carries, (SQUARE, A, numbers(3, 3)), 1, 1, 1, 3),
    "a constant as long as the scan": Loop(looks_up, (numbers(3, 3), A), 1, 1, 1, 3),
    "a carry as long as the scan": Loop(carries_what_is_as_long, (SQUARE, numbers(3, 3)), 0, 1, 1, 3),
    "scalars": Loop(lambda x, xs: lax.scan(lambda a, b: (a * b, a), x, xs), (jnp.float32(2), A), 0, 1, 1, 3),
    "keys": Loop(draws, (KEYS, A), 0, 1, 1, 3),
    "a key that is carried": Loop(hands_a_key_on, (KEYS[0], numbers(4, 3)), 0, 1, 1, 4),
    "a key for all": Loop(with_one_key, (KEYS[0], numbers(4, 3)), 1, 0, 1, 4),
    "trees": Loop(of_trees, (SQUARE, {"a": A, "b": B}, {"x": numbers(4, 3), "y": numbers(4, 3)}), 1, 2, 2, 4),
    "nested": Loop(nested, (SQUARE, A, numbers(4, 2, 3)), 1, 1, 1, 4),
    "nested, as long": Loop(nested, (SQUARE, A, numbers(3, 3, 3)), 1, 1, 1, 3),
}


def comparable(array):
    """Return an array of numbers. For a key, this is the key's data."""
    return jax.random.key_data(array) if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) else array


def assert_roles_rebuild(eqn, values):
    """Check that a new scan with the roles that were read gives the results of a scan's equation.

    The new scan has the equation's body, and takes `values` in these roles.
    """
    roles, body = scan(eqn), jex.jaxpr_as_fun(inner_program(eqn, "jaxpr"))
    consts, carry, slices = np.split(np.arange(len(values)), [roles.consts, roles.last])

    def iterate(carry, row):
        results = body(*(values[k] for k in consts), *carry, *row)
        return list(results[: roles.carried]), list(results[roles.carried :])

    init, xs = [values[k] for k in carry], [values[k] for k in slices]
    last, stacked = lax.scan(iterate, init, xs, length=roles.length, reverse=parameter(eqn, "reverse"))
    expected = eqn.primitive.bind(*values, **eqn.params)
    for a, b in zip([*last, *stacked], expected, strict=True):
        np.testing.assert_allclose(comparable(a), comparable(b), rtol=1e-6)


def values_of(eqn):
    """Make up values for an equation's operands."""
    made = []
    for var in eqn.invars:
        if isinstance(var, jex.Literal):
            made.append(jnp.asarray(var.val, var.aval.dtype))
        elif jnp.issubdtype(var.aval.dtype, jax.dtypes.prng_key):
            made.append(jnp.broadcast_to(KEYS[0], var.aval.shape))
        else:
            made.append(numbers(*var.aval.shape).astype(var.aval.dtype))
    return made


@pytest.mark.parametrize("name", LOOPS)
def test_operands_of_a_scan_are_told_apart(name):
    loop = LOOPS[name]
    eqn = traced("scan", loop.fn, *loop.args)
    found = scan(eqn)
    slices = len(eqn.invars) - found.last
    assert (*found[:2], slices, found.length) == (loop.consts, loop.carried, loop.slices, loop.length)
    assert_roles_rebuild(eqn, values_of(eqn))


def test_operands_of_the_scan_inside_a_scan_are_told_apart():
    outer = traced("scan", nested, *LOOPS["nested"].args)
    [inner] = [eqn for eqn in equations(inner_program(outer, "jaxpr")) if eqn.primitive.name == "scan"]
    assert scan(inner) == (1, 1, 2)


def summed_jvp(w, x, xs):
    return jax.jvp(lambda w: carries(w, x, xs), (w,), (w,))


def summed_gradient(w, x, xs):
    return jax.grad(lambda w: sum(leaf.sum() for leaf in jax.tree.leaves(carries(w, x, xs))))(w)


def summed_checkpoint(w, x, xs):
    return jax.grad(jax.checkpoint(lambda w: carries(w, x, xs)[0].sum()))(w)


def batched(w, x, xs):
    return jax.vmap(carries, in_axes=(None, 0, None))(w, jnp.stack([x, x]), xs)


@pytest.mark.parametrize("transformed", [summed_jvp, summed_gradient, summed_checkpoint, batched])
def test_operands_of_scans_that_transformations_make_are_told_apart(transformed):
    """Check scans in transformed programs by rebuilding them, because JAX chooses these scans' operands freely."""
    jaxpr = jax.make_jaxpr(transformed)(SQUARE, A, numbers(4, 3))
    loops = [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "scan"]
    assert loops
    for eqn in loops:
        assert_roles_rebuild(eqn, values_of(eqn))


def test_another_equation_has_no_roles():
    assert scan(traced("sin", jnp.sin, X)) is None


@pytest.mark.slow
def test_a_gradient_of_a_scan_inside_a_loss():
    """Check that a kernel gets a block as usual, although the loss has a `closed_call` on JAX 0.10."""

    @jax.checkpoint
    def field(w, x):
        return lax.scan(lambda carry, _: (jnp.tanh(carry @ w), None), x, length=2)[0].sum()

    def loss(params, x):
        force = jax.grad(field, argnums=1)(params["inner"], x)
        return jnp.mean(jnp.sum((force @ params["outer"]) ** 2, -1))

    layers = kfac.find_layers(loss, {"inner": SQUARE, "outer": SQUARE}, numbers(5, 3))
    assert layers["outer"].kind == "dense"
    fn = jax.jit(kfac.value_and_grad(loss, layers))
    _, gradients, factors = fn({"inner": SQUARE, "outer": SQUARE}, numbers(5, 3))
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves((gradients, factors)))


# -- unknown forms -----------------------------------------------------------------------------------------------------


def equation_of(primitive, **params):
    return SimpleNamespace(primitive=SimpleNamespace(name=primitive), params=params, invars=[], outvars=[])


def refused(primitive, what):
    """Expect an error that names JAX's version, the primitive and the unexpected form."""
    version = re.escape(jax.__version__)
    return pytest.raises(UnknownEquationError, match=f"JAX {version} gives the primitive '{primitive}' {what}")


def test_a_missing_parameter_is_refused():
    with refused("scan", "no parameter 'jaxpr', but none at all"):
        scan(equation_of("scan"))
    with refused("dot_general", "no parameter 'dimension_numbers', but dims, precision: this version of kfac"):
        parameter(equation_of("dot_general", dims=(), precision=None), "dimension_numbers")


def test_a_program_in_another_form_is_refused():
    with refused("remat2", "a str in 'jaxpr' where a jaxpr was expected"):
        inner_program(equation_of("remat2", jaxpr="lambda ; a:f32"), "jaxpr")


def test_operands_in_another_order_are_refused():
    eqn = traced("scan", of_trees, *LOOPS["trees"].args)
    turned = SimpleNamespace(
        primitive=eqn.primitive,
        params=eqn.params,
        invars=[*eqn.invars[1:], eqn.invars[0]],
        outvars=[eqn.outvars[-1], *eqn.outvars[:-1]],
    )
    with refused("scan", "operands that are not constants, carry and slices in this order"):
        scan(turned)
