"""Kernels that are put together, repeated, masked or cut before they are used, and ragged products: by brute force."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import kfac
from kfac._factors import Kronecker
from oracle import relative_error
from zoo.specimens import N, Specimen, check, data, tree

pytestmark = pytest.mark.usefixtures("x64")
D, T = 4, 3
MASK = np.arange(D * 6).reshape(D, 6) % 3 > 0


def mean(y):
    return jnp.mean(jnp.sum(jnp.sin(y).reshape(len(y), -1) ** 2 + y.reshape(len(y), -1), -1))


def case(function, coarse=(), **shapes):
    def build():
        return lambda p, b: mean(function(p, b["x"])), tree(**shapes), {"x": data(0, T, D)}

    return Specimen("", "", build, coarse=coarse)


def in_a_scan(body):
    def function(p, x):
        return lax.scan(lambda x, layer: (jnp.tanh(body(layer, x)), None), x, p["layers"])[0]

    return function


def by_heads(p, x):
    w = jnp.concatenate([p["a"], p["b"]], 1).reshape(D, 3, 2)
    return jnp.einsum("ntd,dhk->nthk", x, w)


def convolved(p, x):
    kernel = jnp.concatenate([p["a"], p["b"]], 2)
    return lax.conv_general_dilated(x, kernel, (1,), "SAME", dimension_numbers=("NTC", "TIO", "NTC"))


PAIR = {"a": (D, 4), "b": (D, 2)}
CASES = {
    "concatenated outputs": case(lambda p, x: x @ jnp.concatenate([p["a"], p["b"]], 1), **PAIR),
    "concatenated inputs": case(lambda p, x: x @ jnp.concatenate([p["a"], p["b"]]), a=(3, 5), b=(1, 5)),
    "concatenated and transposed": case(
        lambda p, x: jnp.einsum("od,ntd->nto", jnp.concatenate([p["a"].T, p["b"].T]), x), **PAIR
    ),
    "concatenated, twice as large": case(lambda p, x: x @ (2.0 * jnp.concatenate([p["a"], p["b"]], 1)), **PAIR),
    "concatenated with zeros": case(lambda p, x: x @ jnp.concatenate([p["a"], jnp.zeros((D, 1))], 1), a=(D, 3)),
    "concatenated, then heads": case(by_heads, **PAIR),
    "concatenated under remat": case(
        jax.checkpoint(lambda p, x: x @ jax.jit(lambda p: jnp.concatenate([p["a"], p["b"]], 1))(p)), **PAIR
    ),
    "concatenated in a scan": case(
        in_a_scan(lambda p, x: x @ jnp.concatenate([p["a"], p["b"]], 1)), layers={"a": (2, D, 3), "b": (2, D, 1)}
    ),
    "concatenated, one of two read": case(
        lambda p, x: x @ jnp.concatenate([p["a"], p["b"]], 1)[:, 4:], coarse=("a",), **PAIR
    ),
    "concatenated biases": case(lambda p, x: jnp.sin(x) + jnp.concatenate([p["a"], p["b"]]), a=(3,), b=(1,)),
    "concatenated kernels of convolutions": case(convolved, a=(3, D, 2), b=(3, D, 1)),
    "stacked": case(lambda p, x: jnp.einsum("ntd,kdo->ntko", x, jnp.stack([p["a"], p["b"]])), a=(D, 2), b=(D, 2)),
    "stacked as copies": case(
        lambda p, x: jnp.einsum("ntd,tdo->nto", x, jnp.stack([p["a"], p["b"], p["a"]])), a=(D, 2), b=(D, 2)
    ),
    "put together and used alone": case(
        lambda p, x: jnp.tanh(x @ jnp.concatenate([p["a"], p["b"]], 1)) + jnp.pad(x @ p["b"], [(0, 0)] * 2 + [(4, 0)]),
        **PAIR,
    ),
    "parts of two sizes": case(
        lambda p, x: jnp.tanh(x @ p["w"][:, :2]).sum(-1) + (x @ p["w"][:, 2:]).sum(-1), w=(D, 5)
    ),
    "parts of inputs": case(lambda p, x: jnp.tanh(x[..., :3] @ p["w"][:3]) + x[..., 3:] @ p["w"][3:], w=(D, 5)),
    "a part that is read alone": case(lambda p, x: x @ p["w"][:, 1:3], w=(D, 5)),
    "parts that overlap": case(lambda p, x: jnp.tanh(x @ p["w"][:, :3]) + x @ p["w"][:, 2:], w=(D, 5)),
    "a part and the whole": case(lambda p, x: jnp.tanh(x @ p["w"])[..., :2] + x @ p["w"][:, :2], w=(D, 5)),
    "parts of heads": case(
        lambda p, x: (
            jnp.einsum("ntd,dhk->nthk", x, p["w"][:, :1]).sum(2)
            + jnp.sin(jnp.einsum("ntd,dhk->nthk", x, p["w"][:, 1:])).sum(2)
        ),
        w=(D, 3, 2),
    ),
    "parts in a scan": case(
        in_a_scan(lambda p, x: jnp.tanh(x @ p["w"][:, :4]) + jnp.tile(x @ p["w"][:, 4:], 2)), layers={"w": (2, D, 6)}
    ),
    "repeated outputs": case(lambda p, x: jnp.sin(x @ jnp.repeat(p["w"], 2, 1)) * jnp.arange(6), w=(D, 3)),
    "tiled outputs": case(lambda p, x: jnp.sin(x @ jnp.tile(p["w"], (1, 4))) * jnp.arange(12), w=(D, 3)),
    "as often as there are examples": case(lambda p, x: jnp.sin(x @ jnp.repeat(p["w"], N, 1)), w=(D, 3)),
    "repeated with the kernel first": case(
        lambda p, x: jnp.einsum("hd,ntd->hnt", jnp.repeat(p["w"], 2, 0), x).swapaxes(0, 1), w=(3, D)
    ),
    "masked": case(lambda p, x: x @ (p["w"] * MASK) + p["b"], w=(D, 6), b=(6,)),
    "masked by where": case(lambda p, x: x @ jnp.where(MASK, p["w"], 0.0), w=(D, 6)),
    "masked by tril": case(lambda p, x: x @ (jnp.tril(jnp.ones((D, D))) * p["w"]), w=(D, D)),
    "masked in a scan": case(in_a_scan(lambda p, x: x @ jnp.tril(p["w"])), layers={"w": (2, D, D)}),
    "a masked bias": case(lambda p, x: jnp.sin(x) + p["b"] * (np.arange(D) % 2), b=(D,)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_statistics_are_those_of_brute_force(name):
    check(CASES[name])


def factors_of(name, subsample=1, num_examples=None, **options):
    loss, params, batch = CASES[name].build()
    layers = kfac.find_layers(loss, params, batch, **options)
    fn = kfac.value_and_grad(loss, layers, subsample=subsample, num_examples=num_examples)
    return layers, jax.jit(fn)(params, batch)[2]


@pytest.mark.parametrize("name", ["concatenated inputs", "stacked", "parts of two sizes", "repeated outputs", "masked"])
def test_diagonal_factors_are_the_diagonals(name):
    _, whole = factors_of(name)
    layers, diagonal = factors_of(name, max_dim=1)
    for layer in layers:
        if layer.kind == "dense":
            found = diagonal[layer.name]
            for side in layer.diagonal:
                expected = jnp.diagonal(getattr(whole[layer.name], side), axis1=-2, axis2=-1)
                assert relative_error(getattr(found, side), expected) < 1e-12


@pytest.mark.parametrize("options", [{"reduce": (".",)}, {"subsample": 2}], ids=["reduce", "subsample"])
@pytest.mark.parametrize(
    ("name", "plain", "leaf"),
    [
        ("concatenated outputs", lambda p, x: jnp.concatenate([x @ p["a"], x @ p["b"]], -1), "a"),
        ("concatenated inputs", lambda p, x: x[..., :3] @ p["a"] + x[..., 3:] @ p["b"], "b"),
        ("a part that is read alone", lambda p, x: x @ p["w"], None),
        ("masked by tril", lambda p, x: x @ p["w"], None),
    ],
)
def test_the_other_settings(name, plain, leaf, options):
    """As for a model that is written without building a kernel."""
    loss, params, batch = CASES[name].build()
    if leaf is None:
        known = {"masked by tril": jnp.tril, "a part that is read alone": lambda w: w[:, 1:3]}[name]
        params_plain = {"w": known(params["w"])}
    else:
        params_plain = params
    patterns = {key: value for key, value in options.items() if key == "reduce"}
    own = {key: value for key, value in options.items() if key != "reduce"}

    def run(loss, params):
        layers = kfac.find_layers(loss, params, batch, **patterns)
        return jax.jit(kfac.value_and_grad(loss, layers, **own))(params, batch)[2]

    expected = run(lambda p, b: mean(plain(p, b["x"])), params_plain)[leaf or "w"]
    found = run(loss, params)[leaf or "w"]
    g = found.G[1:3, 1:3] if name == "a part that is read alone" else found.G
    assert relative_error(found.A, expected.A) < 1e-12 > relative_error(g, expected.G)
    assert abs(jnp.trace(found.G) - jnp.trace(expected.G)) < 1e-12 * jnp.trace(expected.G)


@pytest.mark.parametrize("name", ["concatenated outputs", "a part that is read alone", "masked by tril"])
def test_moments_are_those_of_the_gradients_of_each_example(name):
    loss, params, batch = CASES[name].build()
    layers, factors = factors_of(name)
    basis = {n: Kronecker(np.linalg.eigh(f.A)[1], np.linalg.eigh(f.G)[1]) for n, f in factors.items()}
    found = jax.jit(kfac.value_and_grad(loss, layers))(params, batch, basis=basis)[2]
    grad = jax.jit(jax.grad(loss))
    each = [grad(params, jax.tree.map(lambda x, k=k: np.asarray(x)[k : k + 1], batch)) for k in range(N)]
    for layer in layers:
        q = basis[layer.name]
        gradients = np.stack([layer.to_matrix([np.asarray(g[layer.params[0]])])[0] for g in each])
        if name == "masked by tril":  # moments are of the kernel in use
            continue
        expected = np.mean(np.einsum("op,noi,ij->npj", q.G, gradients, q.A) ** 2, 0)
        assert relative_error(found[layer.name].moments, expected) < 1e-10


def test_what_is_built_in_another_way_is_refused():
    cases = {
        "something else than whole parts": lambda p, x: x @ jnp.concatenate([p["a"], p["b"]], 1)[:, 2:],
        "multiplied by others": lambda p, x: x @ (p["a"] * np.arange(4)),
        "different array": lambda p, x: x @ jnp.where(MASK[:, :4], p["a"], 1.0),
        "repeated before": lambda p, x: x @ jnp.repeat(p["a"][:2], 2, 0),
    }
    for reason, function in cases.items():
        loss, params, batch = case(function, **PAIR).build()
        with pytest.raises(kfac.UnsupportedLayerError, match=rf"'a'.*{reason}.*skip="):
            kfac.find_layers(loss, params, batch)


def test_a_mask_that_is_an_argument_is_refused():
    """It may hold anything in the next batch."""
    with pytest.raises(kfac.UnsupportedLayerError, match="multiplied by others"):
        kfac.find_layers(lambda p, x, m: mean(x @ (p["w"] * m)), tree(w=(D, 6)), data(0, T, D), jnp.asarray(MASK) * 1.0)


# -- ragged products ---------------------------------------------------------------------------------------------------

SIZES = jnp.array([5, 0, 7])


def ragged(p, x, sizes):
    h = jnp.tanh(lax.ragged_dot(x, p["up"], sizes))
    return jnp.mean(jnp.sum(lax.ragged_dot(h, p["down"], sizes) ** 2, -1))


def inputs():
    return tree(up=(3, D, 5), down=(3, 5, 2)), data(0, 2, D).reshape(-1, D)


def by_groups(p, x):
    """The same, group by group."""
    first, last = x[:5], x[5:]
    a = jnp.tanh(first @ p["up"][0]) @ p["down"][0]
    b = jnp.tanh(last @ p["up"][2]) @ p["down"][2]
    return jnp.mean(jnp.sum(jnp.concatenate([a, b]) ** 2, -1))


@pytest.mark.parametrize("options", [{}, {"max_dim": 1}], ids=["whole", "diagonal"])
def test_ragged_products_are_those_of_each_group(options):
    params, x = inputs()
    layers, plain = (
        kfac.find_layers(*args, **options) for args in ((ragged, params, x, SIZES), (by_groups, params, x))
    )
    value, grads, found = jax.jit(kfac.value_and_grad(ragged, layers, num_examples=N))(params, x, SIZES)
    expected = jax.jit(kfac.value_and_grad(by_groups, plain, num_examples=1))(params, x)
    assert relative_error(value, expected[0]) < 1e-12
    for name in ("up", "down"):
        # `n = 1` there: A is not divided by n and G is multiplied by 1 over the number of rows.
        assert relative_error(grads[name], expected[1][name]) < 1e-12
        assert relative_error(found[name].A * N, expected[2][name].A) < 1e-12
        assert relative_error(found[name].G, expected[2][name].G * N**2) < 1e-12
        assert not jnp.any(found[name].A[1]) and not jnp.any(found[name].G[1])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float64])
def test_ragged_products_in_loops_and_low_precision(dtype):
    """Kernels used again in each iteration: rows are counted over all of them, and sums are float32."""
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
    tolerance = 1e-12 if dtype == jnp.float64 else 1e-2  # of the gradients, which are rounded to 8 bits
    assert max(relative_error(found[0].A, found[1].A), relative_error(found[0].G, found[1].G)) < tolerance


def experts(p, batch):
    x, kinds = batch
    order = jnp.argsort(kinds, stable=True)
    h = lax.ragged_dot(x[order], p["up"], jnp.bincount(kinds, length=3).astype(jnp.int32))
    return jnp.mean(jnp.sum(jnp.sin(jnp.tanh(h)), -1))


def test_shares_of_a_batch_count_rows_together():
    """Most shares have no row for the last expert, whose `G` is over the rows of the whole batch all the same."""
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
            updates, state = tx.update(average(grads), state, params, factors=factors)
            return jax.tree.map(jnp.add, params, updates), state

        return step

    alone = kfac.kfac(0.1, layers)
    expected = moved(stepped(alone, lambda g: g), alone, alone.init(p))
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    tx = kfac.kfac(0.1, layers, distribution=kfac.Distribution("d", staggered=False))
    specs = kfac.state_specs(tx, p, "d")
    step = jax.shard_map(
        stepped(tx, lambda g: lax.pmean(g, "d")), mesh=mesh, in_specs=(P(), specs, P("d")), out_specs=(P(), specs)
    )
    found = moved(step, tx, jax.jit(jax.shard_map(tx.init, mesh=mesh, in_specs=P(), out_specs=specs))(p))
    assert relative_error(found["up"], expected["up"]) < 1e-10


def test_errors_of_ragged_products_name_the_parameter():
    params, x = inputs()
    with pytest.raises(kfac.UnsupportedLayerError, match=r"'up'.*ragged_dot.*not in the order.*skip="):
        kfac.find_layers(lambda p, x: jnp.sum(lax.ragged_dot(x, p["up"][::-1], SIZES)), params, x)
    numbers = lax.RaggedDotDimensionNumbers((((1,), (0,)), ((), ())), [1], [])
    with pytest.raises(kfac.UnsupportedLayerError, match=r"'w'.*ragged_dot.*groups are of rows.*skip="):
        kfac.find_layers(
            lambda p, x: jnp.sum(lax.ragged_dot_general(x, p["w"], jnp.array([1, 3]), numbers)), tree(w=(D, 2)), x
        )
    layers = kfac.find_layers(ragged, params, x, SIZES)
    with pytest.raises(ValueError, match=r"'down'.*sorted by their groups.*skip="):
        jax.eval_shape(kfac.value_and_grad(ragged, layers, subsample=2), params, x, SIZES)
