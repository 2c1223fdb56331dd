"""Test kernels that are built from parameters, and ragged products.

A kernel plus another array has exact rows. Kernels that are built in other ways have none.
"""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from test_without_examples import own_factors

import kfac
from checking import check_all
from oracle import Hook, relative_error
from oracle import truth as of_hooks
from zoo.specimens import N, Specimen, check, data, tree

pytestmark = pytest.mark.usefixtures("x64")
D, T = 4, 3
MASK = np.arange(D * 6).reshape(D, 6) % 3 > 0


def mean(y):
    return jnp.mean(jnp.sum(jnp.sin(y).reshape(len(y), -1) ** 2 + y.reshape(len(y), -1), -1))


def case(function, gradient=(), **shapes):
    def build():
        return lambda p, b: mean(function(p, b["x"])), tree(**shapes), {"x": data(0, T, D)}

    return Specimen("", "", build, gradient=gradient)


def in_a_scan(body):
    def function(p, x):
        return lax.scan(lambda x, layer: (jnp.tanh(body(layer, x)), None), x, p["layers"])[0]

    return function


def convolved(p, x):
    kernel = p["w"] + jnp.sin(p["v"])
    return lax.conv_general_dilated(x, kernel, (1,), "SAME", dimension_numbers=("NTC", "TIO", "NTC"))


ADDED = {
    "a constant": case(lambda p, x: x @ (p["w"] + MASK), w=(D, 6)),
    "noise": case(lambda p, x: x @ (p["w"] + jax.random.normal(jax.random.key(0), (D, 6))), w=(D, 6)),
    "of low rank": case(lambda p, x: x @ (p["w"] + p["a"] @ p["b"]), gradient=("a", "b"), w=(D, 6), a=(D, 2), b=(2, 6)),
    "computed": case(lambda p, x: x @ (p["w"] + jnp.sin(p["v"])), gradient=("v",), w=(D, 6), v=(D, 6)),
    "by a jit": case(lambda p, x: x @ jax.jit(lambda w: w + MASK)(p["w"]), w=(D, 6)),
    "in a scan": case(in_a_scan(lambda p, x: x @ (p["w"] + np.eye(D))), layers={"w": (2, D, D)}),
    "to a kernel of convolutions": case(convolved, gradient=("v",), w=(3, D, 2), v=(2,)),
    "noise of a learned size": case(
        lambda p, x: x @ (p["w"] + jnp.exp(p["s"]) * MASK), gradient=("s",), w=(D, 6), s=(D, 6)
    ),
    "what is rounded": case(lambda p, x: x @ (p["w"] + lax.stop_gradient(jnp.round(p["w"]) - p["w"])), w=(D, 6)),
}


@pytest.mark.parametrize("name", ADDED)
def test_what_is_added_to_a_kernel_does_not_matter(name):
    check(ADDED[name])


def test_a_masked_bias():
    check(case(lambda p, x: jnp.sin(x) + p["b"] * (np.arange(D) % 2), b=(D,)))


@pytest.mark.parametrize(
    ("number", "added"),
    [(1, lambda x: jnp.mean(x) * MASK), (2, lambda x: -MASK.astype(float))],
    ids=["batch", "scaled"],
)
def test_what_is_added_may_depend_on_the_batch(number, added):
    def model(hook, p, x):
        return mean(hook.layer("w", number * x, x @ (number * (p["w"] + added(x)))))

    params, batch = tree(w=(D, 6)), (data(0, T, D),)
    known = of_hooks(model, params, batch, interacting=True)
    check_all(lambda p, x: model(Hook(), p, x), params, batch, known)


STRAIGHT = {
    "what it is subtracted from": (-1, lambda w: MASK - w),
    "and a number": (-2, lambda w: 1.0 - 2 * w),
    "a difference that is subtracted": (1, lambda w: 1.0 - (MASK - w)),
    "a frozen base": (0.5, lambda w: MASK + 0.5 * w),
    "the sign for the kernel": (1, lambda w: jnp.sign(w) + w - lax.stop_gradient(w)),
    "the sign, scaled": (1, lambda w: w + lax.stop_gradient(jnp.sign(w) * jnp.abs(w).mean() - w)),
}


@pytest.mark.parametrize("name", STRAIGHT)
def test_a_jacobian_of_plus_or_minus_a_number(name):
    number, built = STRAIGHT[name]

    def model(hook, p, x):
        return mean(hook.layer("w", number * x, x @ built(p["w"])))

    params, batch = tree(w=(D, 6)), (data(0, T, D),)
    known = of_hooks(model, params, batch, interacting=True)
    check_all(lambda p, x: model(Hook(), p, x), params, batch, known)


JOINED, CUT = "the kernel is computed from it by concatenate", "it reads a slice that is not one of several equal parts"
REPEATED, TIMES = (
    "its entries are repeated before the product",
    "its values are multiplied by others before the product",
)
PAIR = {"a": (D, 4), "b": (D, 2)}
BUILT = {
    "concatenated": (lambda p, x: x @ jnp.concatenate([p["a"], p["b"]], 1), PAIR, JOINED),
    "concatenated, one of two read": (lambda p, x: x @ jnp.concatenate([p["a"], p["b"]], 1)[:, 4:], PAIR, JOINED),
    "put together and used alone": (
        lambda p, x: (
            jnp.tanh(x @ jnp.concatenate([p["a"], p["b"]], 1)).sum(-1) + (x @ p["a"] + x @ p["b"][:, :1]).sum(-1)
        ),
        PAIR,
        JOINED,
    ),
    "concatenated under remat": (
        jax.checkpoint(lambda p, x: x @ jax.jit(lambda p: jnp.concatenate([p["a"], p["b"]], 1))(p)),
        PAIR,
        JOINED,
    ),
    "concatenated biases": (
        lambda p, x: jnp.sin(x) + jnp.concatenate([p["a"], p["b"]]),
        {"a": (3,), "b": (1,)},
        "what concatenate makes of it has no known rows",
    ),
    "rolled": (lambda p, x: x @ jnp.roll(p["w"], 1, 0), {"w": (D, 2)}, JOINED),
    "twice": (lambda p, x: x @ (p["w"] + p["w"]), {"w": (D, 2)}, "made into, something else by add"),
    "squared": (lambda p, x: x @ (p["w"] * p["w"]), {"w": (D, 2)}, "made into, something else by mul"),
    "squared scale": (lambda p, x: x * (p["s"] * p["s"]), {"s": (D,)}, "made into, something else by mul"),
    "stacked": (
        lambda p, x: jnp.einsum("ntd,kdo->ntko", x, jnp.stack([p["a"], p["b"]])),
        {"a": (D, 2), "b": (D, 2)},
        "the kernel is computed from it by ",  # stack, or concatenate in JAX 0.10.0
    ),
    "parts of two sizes": (
        lambda p, x: jnp.tanh(x @ p["w"][:, :2]).sum(-1) + (x @ p["w"][:, 2:]).sum(-1),
        {"w": (D, 5)},
        CUT,
    ),
    "a part that is read alone": (lambda p, x: x @ p["w"][:, 1:3], {"w": (D, 5)}, CUT),
    "parts that overlap": (lambda p, x: jnp.tanh(x @ p["w"][:, :3]) + x @ p["w"][:, 2:], {"w": (D, 5)}, CUT),
    "parts in a scan": (
        in_a_scan(lambda p, x: jnp.tanh(x @ p["w"][:, :4]) + jnp.tile(x @ p["w"][:, 4:], 2)),
        {"layers": {"w": (2, D, 6)}},
        CUT,
    ),
    "repeated": (lambda p, x: jnp.sin(x @ jnp.repeat(p["w"], 2, 1)) * jnp.arange(6), {"w": (D, 3)}, REPEATED),
    "tiled": (lambda p, x: jnp.sin(x @ jnp.tile(p["w"], (1, 4))) * jnp.arange(12), {"w": (D, 3)}, REPEATED),
    "as often as there are examples": (lambda p, x: jnp.sin(x @ jnp.repeat(p["w"], N, 1)), {"w": (D, 3)}, REPEATED),
    "masked": (lambda p, x: x @ (p["w"] * MASK), {"w": (D, 6)}, TIMES),
    "masked by where": (lambda p, x: x @ jnp.where(MASK, p["w"], 0.0), {"w": (D, 6)}, "else by select_n"),
    "masked in a scan": (
        in_a_scan(lambda p, x: x @ jnp.tril(p["w"])),
        {"layers": {"w": (2, D, D)}},
        "else by select_n",
    ),
    "masked by the batch": (lambda p, x: x @ (p["w"] * (x[0, 0, :, None] > 0)), {"w": (D, 6)}, TIMES),
    "added to itself": (lambda p, x: x @ (p["w"] + jnp.sin(p["w"])), {"w": (D, 2)}, "something else by add"),
}


@pytest.mark.parametrize("name", BUILT)
def test_what_is_built_in_another_way_has_the_gradients_own_factors(name):
    function, shapes, reason = BUILT[name]
    params = tree(**shapes)
    found = own_factors(lambda p, x: mean(function(p, x)), params, data(0, T, D))
    assert len(found) == len(jax.tree.leaves(params))
    assert all(reason in note for note in found.values()), found


# -- ragged products ---------------------------------------------------------------------------------------------------

SIZES = jnp.array([5, 0, 7])


def ragged(p, x, sizes):
    h = jnp.tanh(lax.ragged_dot(x, p["up"], sizes))
    return jnp.mean(jnp.sum(lax.ragged_dot(h, p["down"], sizes) ** 2, -1))


def inputs():
    return tree(up=(3, D, 5), down=(3, 5, 2)), data(0, 2, D).reshape(-1, D)


def by_groups(p, x):
    """Compute the loss of `ragged` separately for each group."""
    first, last = x[:5], x[5:]
    a = jnp.tanh(first @ p["up"][0]) @ p["down"][0]
    b = jnp.tanh(last @ p["up"][2]) @ p["down"][2]
    return jnp.mean(jnp.sum(jnp.concatenate([a, b]) ** 2, -1))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"max_factor_dim": 1}], ids=["whole", "diagonal"])
def test_ragged_products_are_those_of_each_group(options):
    params, x = inputs()
    layers, plain = (
        kfac.find_layers(*args, **options) for args in ((ragged, params, x, SIZES), (by_groups, params, x))
    )
    value, grads, found = jax.jit(kfac.value_and_grad(ragged, layers, num_examples=N))(params, x, SIZES)
    expected = jax.jit(kfac.value_and_grad(by_groups, plain, num_examples=1))(params, x)
    assert relative_error(value, expected[0]) < 1e-12
    for name in ("up", "down"):
        # The reference has `n = 1`, so its A is not divided by n, and its G is divided only by the number of rows.
        assert relative_error(grads[name], expected[1][name]) < 1e-12
        assert relative_error(found[name].A * N, expected[2][name].A) < 1e-12
        assert relative_error(found[name].G, expected[2][name].G * N**2) < 1e-12
        assert not jnp.any(found[name].A[1]) and not jnp.any(found[name].G[1])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float64])
def test_ragged_products_in_loops_and_low_precision(dtype):
    """Check kernels that every iteration uses again. The rows of all iterations count, and sums are in float32."""
    params, x = inputs()
    square = {"w": params["up"][..., :D].astype(dtype)}

    def step(p, x):
        return jnp.tanh(lax.ragged_dot(x, p["w"], SIZES))

    def scanned(p, x):
        x, _ = lax.scan(lambda x, _: (step(p, x), None), x, None, 2)
        return jnp.mean(jnp.sum(x.astype(params["up"].dtype) ** 2, -1))

    def unrolled(p, x):
        return jnp.mean(jnp.sum(step(p, step(p, x)).astype(params["up"].dtype) ** 2, -1))

    x = x.astype(dtype)
    found = []
    for loss in (scanned, unrolled):
        layers = kfac.find_layers(loss, square, x)
        assert layers["w"].uses == 2 and layers["w"].positions is None
        found.append(jax.jit(kfac.value_and_grad(loss, layers, num_examples=N))(square, x)[2]["w"])
    assert found[0].A.dtype == found[0].G.dtype == jnp.promote_types(dtype, jnp.float32)
    tolerance = 1e-12 if dtype == jnp.float64 else 1e-2  # bfloat16 gradients are rounded to 8 bits
    assert max(relative_error(found[0].A, found[1].A), relative_error(found[0].G, found[1].G)) < tolerance


def experts(p, batch):
    x, kinds = batch
    order = jnp.argsort(kinds, stable=True)
    h = lax.ragged_dot(x[order], p["up"], jnp.bincount(kinds, length=3).astype(jnp.int32))
    return jnp.mean(jnp.sum(jnp.sin(jnp.tanh(h)), -1))


@pytest.mark.slow
def test_shares_of_a_batch_count_rows_together():
    """Check that `G` is over the rows of the whole batch, although most parts have no row for the last expert."""
    p = tree(up=(3, D, 5))
    batch = data(0, 8, D).reshape(-1, D)[:8], jnp.array([0, 1, 0, 1, 0, 0, 1, 2])
    layers = kfac.find_layers(experts, p, batch)
    fn = kfac.value_and_grad(experts, layers)
    whole = jax.jit(fn)(p, batch)[2]["up"]
    parts = jax.jit(kfac.microbatch(fn, 4))(p, batch)[2]["up"]
    for side in "AG":
        assert relative_error(getattr(parts, side), getattr(whole, side)) < 1e-12
    scaled = jax.jit(fn)(p, batch)[2].unscale(4.0)["up"]
    assert relative_error(scaled.G, whole.G / 16) < 1e-12

    def moved(step, tx, state):
        step = jax.jit(step)
        params = p
        for _ in range(3):
            params, state = step(params, state, batch)
        return params

    def stepped(tx, average):
        def step(params, state, batch):
            _, grads, factors = fn(params, batch)
            state = kfac.observe(state, factors)
            updates, state = tx.update(average(grads), state, params)
            return jax.tree.map(jnp.add, params, updates), state

        return step

    alone = kfac.kfac(0.1, layers)
    expected = moved(stepped(alone, lambda g: g), alone, alone.init(p))
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    tx = kfac.kfac(0.1, layers, distribution=kfac.Distribution("d"))
    specs = kfac.state.state_specs(tx, p, "d")
    step = jax.shard_map(
        stepped(tx, lambda g: lax.pmean(g, "d")), mesh=mesh, in_specs=(P(), specs, P("d")), out_specs=(P(), specs)
    )
    found = moved(step, tx, jax.jit(jax.shard_map(tx.init, mesh=mesh, in_specs=P(), out_specs=specs))(p))
    assert relative_error(found["up"], expected["up"]) < 1e-10


def test_ragged_products_that_have_no_exact_rows():
    params, x = inputs()
    found = own_factors(lambda p, x: jnp.sum(lax.ragged_dot(x, p["up"][::-1], SIZES)), params, x)
    assert re.fullmatch(r"ragged_dot.*: the kernels of its groups are not in the order of the parameter", found["up"])
    numbers = lax.RaggedDotDimensionNumbers((((1,), (0,)), ((), ())), [1], [])
    found = own_factors(
        lambda p, x: jnp.sum(lax.ragged_dot_general(x, p["w"], jnp.array([1, 3]), numbers)), tree(w=(D, 2)), x
    )
    assert re.fullmatch(r"ragged_dot.*: .* whose groups are of rows of the data", found["w"])


def test_rows_of_ragged_products_are_not_summed_by_example():
    params, x = inputs()
    with pytest.raises(ValueError, match=r"'reduce' needs sums over the positions .* not known for 'up'"):
        kfac.find_layers(ragged, params, x, SIZES, rules={"up": "reduce"})
