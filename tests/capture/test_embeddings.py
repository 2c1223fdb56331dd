"""Compare lookup tables' factors with brute force for products with one-hot inputs."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import kfac
from checking import check_all, check_kronecker, kinds, normal, run
from oracle import truth
from problem import observing, plain_kfac

N, T, V, D = 3, 4, 7, 5


def mean_loss(y, t):
    y = y.reshape(y.shape[0], -1)
    return jnp.mean(jnp.sum(jnp.tanh(y) * t[:, : y.shape[1]], axis=1) + 0.5 * jnp.sum(jnp.sin(y), axis=1) ** 2)


def tokens(*shape, seed=0):
    # Row 2 is never looked up, and row 0 is looked up often.
    drawn = np.random.default_rng(seed).choice([0, 0, 0, 1, 3, 4, 5, 6], size=(N, *shape))
    return drawn.astype(np.int32)


def one_hot(ids):
    """Return one-hot rows. Indices out of range give zeros."""
    return (jnp.asarray(ids)[..., None] == jnp.arange(V)).astype(float)


def reference(hook, p, ids, t):
    """Compute the embedding as the equivalent matrix product with one-hot inputs."""
    a = one_hot(ids)
    x = jnp.tanh(hook.layer("table", a, a @ p["table"]))
    return mean_loss(hook.layer("out", x, x @ p["out"]), t)


def parameters(table=(V, D)):
    dtype = jnp.result_type(float)
    return {"table": normal(1, *table, dtype=dtype), "out": normal(2, D, 2, dtype=dtype)}


def indexed(table, ids):
    return table[ids]


def taken(table, ids):
    return jnp.take(table, ids, axis=0)


def taken_clipped(table, ids):
    return jnp.take(table, ids, axis=0, mode="clip")


def negative(table, ids):
    return table[ids - V]


def unsigned(table, ids):
    return table[ids.astype(np.uint8)]


def jitted(table, ids):
    return jax.jit(indexed)(table, ids)


def under_remat(table, ids):
    return jax.checkpoint(indexed)(table, ids)


def under_vmap(table, ids):
    one = lambda i: table[i]  # noqa: E731
    for _ in range(ids.ndim):
        one = jax.vmap(one)
    return one(ids)


def transposed_twice(table, ids):
    return table.T[:, ids].transpose(*range(1, ids.ndim + 1), 0)


def cast(table, ids):
    return table.astype(jnp.float32).astype(jnp.float64)[ids]


def in_halves(table, ids):
    """Look up each half in a separate use. Uses count as positions."""
    half = ids.shape[-1] // 2
    return jnp.concatenate([table[ids[..., :half]], table[ids[..., half:]]], axis=-2)


def in_a_scan(table, ids):
    """Look up one position after another, as a recurrent network does."""
    return lax.scan(lambda c, i: (c, table[i]), 0.0, jnp.moveaxis(ids, -1, 0))[1].swapaxes(0, 1)


LOOKUPS = [
    indexed, taken, taken_clipped, negative, unsigned, jitted, under_remat, under_vmap, transposed_twice, cast,
    in_halves, in_a_scan,
]  # fmt: skip


@pytest.mark.parametrize("lookup", LOOKUPS)
def test_a_lookup_is_a_product_with_one_hot_inputs(x64, lookup):
    def loss(p, ids, t):
        return mean_loss(jnp.tanh(lookup(p["table"], ids)) @ p["out"], t)

    params, batch = parameters(), (tokens(T), normal(3, N, 60))
    rounding = 1e-6 if lookup is cast else 1e-12
    layers, factors = check_all(loss, params, batch, truth(reference, params, batch), rounding=rounding)
    assert kinds(layers) == {"out": "dense", "table": "embedding"}
    assert (layers["table"].d_in, layers["table"].d_out, layers["table"].positions) == (V, D, T)
    assert factors["table"].A.shape == (V,) and factors["table"].A[2] == 0
    np.testing.assert_allclose(factors["table"].A, np.bincount(batch[0].ravel(), minlength=V) / N, rtol=1e-12)


@pytest.mark.parametrize("shape", [(), (1,), (T,), (2, T)], ids=str)
def test_any_number_of_axes_of_positions(x64, shape):
    def loss(p, ids, t):
        return mean_loss(jnp.tanh(p["table"][ids]) @ p["out"], t)

    params, batch = parameters(), (tokens(*shape), normal(3, N, 60))
    check_all(loss, params, batch, truth(reference, params, batch))


def test_the_product_with_one_hot_inputs_itself_stays_dense(x64):
    def loss(p, ids, t):
        return mean_loss(jnp.tanh(jax.nn.one_hot(ids, V) @ p["table"]) @ p["out"], t)

    params, batch = parameters(), (tokens(T), normal(3, N, 60))
    layers, _ = check_all(loss, params, batch, truth(reference, params, batch))
    assert kinds(layers) == {"out": "dense", "table": "dense"}


@pytest.mark.parametrize("mode", ["drop", "clip", "wrap"])
def test_indices_out_of_range(x64, mode):
    """Check that the row that is read counts: no row, the nearest row, or the index modulo the table's length."""
    ids = np.array([[0, 1, V + 1, 6], [-2, 3, 4, V], [0, 0, -V - 2, 5]], np.int32)
    read = {"clip": np.clip(ids, 0, V - 1), "wrap": ids % V, "drop": np.where(ids < 0, ids + V, ids)}[mode]

    def loss(p, ids, t):
        if mode == "drop":
            x = p["table"].at[ids].get(mode="fill", fill_value=0)
        else:
            x = jnp.take(p["table"], ids, axis=0, mode=mode)
        return mean_loss(jnp.tanh(x) @ p["out"], t)

    params, t = parameters(), normal(3, N, 60)
    layers, _, factors = run(loss, params, (ids, t))
    check_kronecker(layers, factors, truth(reference, params, (read, t)))


def test_a_table_stored_in_another_form(x64):
    def loss(p, ids, t):
        return mean_loss(jnp.tanh(p["table"].reshape(10, V).T[ids]), t)

    def product(hook, p, ids, t):
        a, table = one_hot(ids), p["table"].reshape(10, V).T
        return mean_loss(jnp.tanh(hook.layer("table", a, a @ table)), t)

    params, batch = {"table": normal(1, 10 * V)}, (tokens(T), normal(3, N, 60))
    layers, _ = check_all(loss, params, batch, truth(product, params, batch))
    assert (layers["table"].d_in, layers["table"].d_out) == (V, 10)


def test_rows_of_several_axes_may_be_kernels(x64):
    """Check a table of kernels that are chosen by class. A factor with all entries of a kernel would be too large."""
    params, batch = {"table": normal(1, V, D, D)}, (tokens(), normal(2, N, D))
    layers = kfac.find_layers(lambda p, i, x: jnp.mean(jnp.einsum("nd,ndk->nk", x, p["table"][i]) ** 2), params, *batch)
    assert kinds(layers) == {"table": "gradient-factors"}
    assert "it is not looked up row by row" in layers["table"].note


def test_a_row_axis_in_another_order_than_memory(x64):
    """Check rows (j, i) of a table that is stored as [i, j, d]. The counts must be in the order of the leaf."""

    def loss(p, ids, t):
        return mean_loss(jnp.tanh(p["table"].swapaxes(0, 1).reshape(6, D)[ids]), t)

    def product(hook, p, ids, t):
        flat = (ids % 2) * 3 + ids // 2  # row 2 j + i of the rearranged table is row 3 i + j in memory
        a = (flat[..., None] == jnp.arange(6)).astype(float)
        return mean_loss(jnp.tanh(hook.layer("table", a, a @ p["table"].reshape(6, D))), t)

    params, batch = {"table": normal(1, 2, 3, D)}, (tokens(T) % 6, normal(3, N, 60))
    check_all(loss, params, batch, truth(product, params, batch))


def test_a_vector_of_scalars_per_row(x64):
    """Check a table with a single number per label, such as a conditional temperature."""

    def loss(p, ids, t):
        return mean_loss(t[:, :3] * p["table"][ids][:, None], t)

    def product(hook, p, ids, t):
        a = one_hot(ids)
        return mean_loss(t[:, :3] * hook.layer("table", a, (a @ p["table"])[:, None]), t)

    params, batch = {"table": normal(1, V)}, (tokens(), normal(3, N, 60))
    layers, _ = check_all(loss, params, batch, truth(product, params, batch))
    assert (layers["table"].d_in, layers["table"].d_out) == (V, 1)


def test_two_tables_whose_rows_are_multiplied(x64):
    """Check a matrix factorisation. The product of two rows multiplies activations."""

    def loss(p, i, j, t):
        return mean_loss(jnp.einsum("nd,nd->n", p["u"][i], p["v"][j])[:, None], t)

    def product(hook, p, i, j, t):
        u = hook.layer("u", one_hot(i), one_hot(i) @ p["u"])
        v = hook.layer("v", one_hot(j), one_hot(j) @ p["v"])
        return mean_loss(jnp.sum(u * v, axis=1)[:, None], t)

    params = {"u": normal(1, V, D), "v": normal(2, V, D)}
    batch = (tokens(), tokens(seed=1), normal(3, N, 60))
    layers, _ = check_all(loss, params, batch, truth(product, params, batch))
    assert kinds(layers) == {"u": "embedding", "v": "embedding"}


def test_stacked_tables_in_a_scan(x64):
    def loss(p, ids, t):
        def body(x, table):
            return jnp.tanh(x + table[ids]), None

        return mean_loss(lax.scan(body, jnp.zeros((*ids.shape, D)), p["table"])[0] @ p["out"], t)

    def unrolled(hook, p, ids, t):
        x = jnp.zeros((*ids.shape, D))
        for k in range(3):
            x = jnp.tanh(x + hook.layer(f"table[{k}]", one_hot(ids), one_hot(ids) @ p["table"][k]))
        return mean_loss(hook.layer("out", x, x @ p["out"]), t)

    params, batch = parameters((3, V, D)), (tokens(T), normal(3, N, 60))
    layers, factors = check_all(loss, params, batch, truth(unrolled, params, batch))
    assert layers["table"].copies == 3 and factors["table"].A.shape == (3, V)


def test_frameworks(x64):
    options = dict(param_dtype=jnp.float64)
    graph, state, _ = nnx.split(nnx.Embed(V, D, rngs=nnx.Rngs(0), **options), nnx.Param, ...)
    state = jax.tree.map(lambda _: parameters()["table"], state)

    def linen(p, ids, t):
        x = nn.Embed(V, D, **options).apply({"params": {"embedding": p["table"]}}, ids)
        return mean_loss(jnp.tanh(x) @ p["out"], t)

    def of_nnx(p, ids, t):
        return mean_loss(jnp.tanh(nnx.merge(graph, p["table"], {})(ids)) @ p["out"], t)

    batch = (tokens(T), normal(3, N, 60))
    expected = truth(reference, parameters(), batch)
    for loss, table in ((linen, parameters()["table"]), (of_nnx, state)):
        layers, _, factors = run(loss, {"out": parameters()["out"], "table": table}, batch)
        assert kinds(layers) == {"out": "dense", "table": "embedding"}
        np.testing.assert_allclose(np.diag(factors["table"].A), expected.kronecker("table")[0], rtol=1e-12, atol=1e-15)
        np.testing.assert_allclose(factors["table"].G, expected.kronecker("table")[1], rtol=1e-9, atol=1e-12)


# -- lookups that may not read separate rows for each example ----------------------------------------------------------


def by_a_counter(p, ids, x):
    return lax.fori_loop(0, T, lambda k, x: jnp.tanh(x + p["table"][jnp.arange(T) + k]), x)


NO_ROWS, NOT_ROWS = "what gather makes of it has no known rows", "it is not looked up row by row"
INEXACT = {
    "constant positions": (lambda p, ids, x: x + p["table"][jnp.arange(T)], NO_ROWS),
    "a vector of positions in a loop": (by_a_counter, NO_ROWS),
    "one row for all": (lambda p, ids, x: x + p["table"][ids[0, 0]], "dynamic_slice"),
    "a part of each row": (lambda p, ids, x: x[..., :1] + p["table"].at[ids, 1].get()[..., None], NOT_ROWS),
    "lookups and a sum": (lambda p, ids, x: x + p["table"][ids] + p["table"][0], "add and gather"),
    "a scaled table": (lambda p, ids, x: x + (p["table"] * jnp.arange(float(D)))[ids], NOT_ROWS),
    "on both axes": (lambda p, ids, x: x + p["table"][ids] + p["table"].T[ids % D][..., :D], "gather"),
    "a table under vmap": (
        lambda p, ids, x: x + jax.vmap(lambda w, i: w[i])(p["table"].reshape(1, V, D), ids[:1])[0],
        NOT_ROWS,
    ),
}


@pytest.mark.parametrize("case", INEXACT)
def test_other_lookups_have_the_gradients_own_factors(x64, case):
    lookup, reason = INEXACT[case]

    def loss(p, ids, x, t):
        return mean_loss(lookup(p, ids, x @ p["out"]), t)

    params = {"table": normal(1, V, D), "out": normal(2, D, D)}
    batch = (tokens(T), normal(4, N, T, D), normal(3, N, 60))
    layers, _, factors = run(loss, params, batch)
    assert kinds(layers) == {"out": "dense", "table": "gradient-factors"}
    assert reason in layers["table"].note
    assert list(factors) == ["out"]
    with pytest.raises(kfac.UnsupportedLayerError, match=rf"'table' is read by .*{reason}"):
        kfac.find_layers(loss, params, *batch, strict=True)


@pytest.mark.parametrize("steps", [1, 3])
def test_rows_looked_up_by_the_place_in_the_batch(x64, steps):
    """Check that each example reads its own row, although no index is data.

    In a loop, every iteration reads another row.
    """

    def network(lookup, x, t):
        def body(carry, _):
            k, x = carry
            return (k + 1, jnp.tanh(x + lookup(jnp.arange(len(x)) + k)[:, None])), None

        return mean_loss(lax.scan(body, (0, x), None, length=steps)[0][1], t)

    def unrolled(hook, p, x, t):
        for k in range(steps):
            ids = jnp.arange(len(x)) + k
            x = jnp.tanh(x + hook.layer("table", one_hot(ids), p["table"][ids])[:, None])
        return mean_loss(x, t)

    params, batch = {"table": normal(1, V, D)}, (normal(4, N, T, D), normal(3, N, 60))
    known = truth(unrolled, params, batch, interacting=True)
    layers, _ = check_all(lambda p, x, t: network(lambda ids: p["table"][ids], x, t), params, batch, known)
    assert (layers["table"].kind, layers["table"].uses) == ("embedding", steps)


def test_tokens_without_an_axis_of_examples_ask_for_num_examples(x64):
    def loss(p, ids, t):
        return mean_loss((jnp.tanh(p["table"][ids.reshape(-1)]).reshape(N, T, D)) @ p["out"], t)

    params, batch = parameters(), (tokens(T), normal(3, N, 60))
    layers = kfac.find_layers(loss, params, *batch)
    with pytest.raises(ValueError, match="num_examples="):
        kfac.value_and_grad(loss, layers)(params, *batch)
    _, _, factors = run(loss, params, batch, num_examples=N)
    a, g = truth(reference, params, batch).kronecker("table")
    np.testing.assert_allclose(np.diag(factors["table"].A), a, rtol=1e-12)
    np.testing.assert_allclose(factors["table"].G, g, rtol=1e-9)


# -- tables that are also output layers --------------------------------------------------------------------------------


TIED = {
    "transposed": lambda p, ids: jnp.tanh(p["table"][ids] @ p["out"]) @ p["table"].T,
    "einsum": lambda p, ids: jnp.einsum("ntd,vd->ntv", jnp.sin(p["table"][ids] @ p["out"]), p["table"]),
    "output first": lambda p, ids: (one_hot(ids)[..., :D] @ p["table"].T)[..., :D] + p["table"][ids] + p["out"][0],
}


@pytest.mark.parametrize("case", TIED)
def test_tied_tables_are_one_block(case):
    """Check that a tied table is a single block in any spelling. tests/capture/test_tied.py has the formula."""

    def loss(p, ids, t):
        return mean_loss(TIED[case](p, ids), t)

    params, batch = {"table": jnp.ones((V, D)), "out": jnp.ones((D, D))}, (tokens(T), jnp.ones((N, 60)))
    layers = kfac.find_layers(loss, params, *batch)
    assert layers["table"].kind == "embedding"
    assert layers["table"].diagonal == ("A",)
    assert "read as its transpose as well" in layers["table"].note
    layers = kfac.find_layers(loss, params, *batch, rules={"^table$": "skip"})
    assert kinds(layers)["table"] == "skipped"


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (
            lambda p, ids, t: mean_loss(p["table"][ids] + one_hot(ids) @ p["table"], t),
            "dot_general and gather.*one block",
        ),
        (lambda p, ids, t: mean_loss(p["table"][jnp.arange(T)] + one_hot(ids) @ p["table"], t), f"add.*{NO_ROWS}"),
    ],
    ids=["examples", "constants"],
)
def test_a_lookup_and_a_product_in_one_direction_have_the_gradients_own_factors(loss, reason):
    params, batch = {"table": jnp.ones((V, D))}, (tokens(T), jnp.ones((N, 60)))
    assert kinds(kfac.find_layers(loss, params, *batch)) == {"table": "gradient-factors"}
    with pytest.raises(kfac.UnsupportedLayerError, match=rf"'table' is read by {reason}(.|\n)*rules="):
        kfac.find_layers(loss, params, *batch, strict=True)


def test_attend_of_linen_and_nnx_is_one_block_with_the_lookup():
    def linen(p, ids, t):
        embed = nn.Embed(V, D)
        x = jnp.tanh(embed.apply({"params": p}, ids))
        return mean_loss(embed.apply({"params": p}, x, method="attend"), t)

    graph, state, _ = nnx.split(nnx.Embed(V, D, rngs=nnx.Rngs(0)), nnx.Param, ...)

    def of_nnx(p, ids, t):
        embed = nnx.merge(graph, p, {})
        return mean_loss(embed.attend(jnp.tanh(embed(ids))), t)

    for loss, params in ((linen, {"embedding": jnp.ones((V, D))}), (of_nnx, state)):
        layers = kfac.find_layers(loss, params, tokens(T), jnp.ones((N, 60)))
        assert "read as its transpose as well" in layers["embedding"].note


# -- in the optimizer --------------------------------------------------------------------------------------------------


def dense_step(params, grads, a, g, damping):
    pi = np.sqrt(np.trace(a) / len(a) / (np.trace(g) / len(g)))
    a, g = a + pi * np.sqrt(damping) * np.eye(len(a)), g + np.sqrt(damping) / pi * np.eye(len(g))
    return np.linalg.solve(a, np.asarray(grads)) @ np.linalg.inv(g)


def loss_of_two(p, ids, t):
    x = jnp.tanh(p["table"][ids]) + jnp.sin(p["other"][ids])
    return mean_loss(x @ p["out"], t)


def problem(dtype):
    params = jax.tree.map(lambda x: x.astype(dtype), parameters() | {"other": normal(5, V, D, dtype=dtype)})
    ids = np.concatenate([tokens(T, seed=k) for k in range(8)])
    batch = (jnp.asarray(ids), normal(3, len(ids), 60, dtype=dtype))
    return params, batch, kfac.find_layers(loss_of_two, params, *batch)


@pytest.mark.slow
def test_preconditioning_is_that_of_the_dense_form(x64):
    params, batch, layers = problem(jnp.float64)
    assert kinds(layers) == {"other": "embedding", "out": "dense", "table": "embedding"}
    _, grads, factors = jax.jit(kfac.value_and_grad(loss_of_two, layers))(params, *batch)
    tx = kfac.scale_by_kfac(layers, damping=2**-7)
    updates, state = jax.jit(observing(tx))(grads, tx.init(params), params, factors=factors)
    for name in ("table", "other"):
        a, g = np.diag(factors[name].A), np.asarray(factors[name].G)
        np.testing.assert_allclose(updates[name], dense_step(params, grads[name], a, g, 2**-7), rtol=1e-8)
    group = state.blocks[f"kronecker_{D}x{V}_diagonal_A"]
    assert group.factors.A.shape == (2, V) and group.preconditioner.G.shape == (2, D, D)
    assert np.isfinite(kfac.diagnostics(state)["condition"])
    # A row that is never looked up gets no gradient and no infinite step.
    assert np.all(np.asarray(updates["table"])[2] == 0)


def loss_of_words(params, batch):
    """Return the loss of a table and a head with so many words that the head's `G` is diagonal."""
    ids, labels = batch
    x = jnp.tanh(params["table"][ids])
    return optax.softmax_cross_entropy_with_integer_labels(x @ params["head"], labels).mean()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preconditioner", "split"),
    [
        pytest.param(kfac.SOAP(scale_damping=True), True, id="SOAP"),
        pytest.param(kfac.Eigh(scale_damping=True), False, id="Eigh"),
    ],
)
def test_devices_share_the_rows_of_a_table(preconditioner, split, x64):
    """Check that three devices, each with some pieces of the table, match a single device.

    The optimizer has momentum, layer rates and normalised step lengths.
    """
    rng = np.random.default_rng(0)
    params = {"table": jnp.asarray(rng.normal(size=(8_201, 6))), "head": jnp.asarray(rng.normal(size=(6, 30_001)))}
    batches = [(rng.integers(0, 50, 12), rng.integers(0, 30_001, 12)) for _ in range(3)]
    layers = kfac.find_layers(loss_of_words, params, batches[0])
    assert {layer.name: (layer.diagonal, layer.num_blocks) for layer in layers} == {
        "head": (("G",), (1, 8)), "table": (("A",), (4, 1)),
    }  # fmt: skip
    tx = kfac.kfac(0.05, layers, inverse_update_period=3, preconditioner=preconditioner)

    def step(params, state, batch):
        _, grads, factors = kfac.value_and_grad(loss_of_words, layers)(params, batch)
        state = kfac.observe(state, factors)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def trained(step, params, state, place=lambda batch: batch):
        for k in range(14):
            params, state = jax.block_until_ready(step(params, state, place(batches[k % 3])))
        return params, state

    expected, alone = trained(jax.jit(step), params, tx.init(params))
    mesh = jax.make_mesh((3,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:3])
    same, over = PartitionSpec(), PartitionSpec("d")
    if split:
        specs = {"table": PartitionSpec(None, "d"), "head": over}
        lying = jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), params, specs)
        place = functools.partial(jax.device_put, device=NamedSharding(mesh, over))
        found, state = trained(jax.jit(step), lying, tx.init(lying), place)
    else:
        specs = kfac.state.state_specs(tx, params, "d")
        init = jax.jit(jax.shard_map(tx.init, mesh=mesh, in_specs=same, out_specs=specs))
        own = jax.shard_map(step, mesh=mesh, in_specs=(same, specs, over), out_specs=(same, specs))
        found, state = trained(jax.jit(own), params, init(params))
    held = {shard.data.size for x in jax.tree.leaves(state[0].blocks) for shard in x.addressable_shards}
    assert max(held) == 3 * 3_751 * 6  # no device has the head's whole momentum
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-10), found, expected)
    portable = jax.jit(kfac.state.gather_state)(state)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-8), portable, alone)
    again = jax.jit(lambda state: kfac.state.gather_state(kfac.state.scatter_state(state, 2)))(portable)
    jax.tree.map(np.testing.assert_array_equal, again, portable)


def test_the_plan_counts_a_diagonal_as_one():
    *_, layers = problem(jnp.float32)
    plan = kfac.planning.estimate(layers, devices=1, preconditioner=kfac.Cholesky())
    table = V + D * D
    assert plan.flops["refresh"] == kfac.Cholesky().flops_per_cube * (2 * (V + D**3) + 2**3 + D**3)
    momentum = 4 * sum(layer.num_params for layer in layers)
    # Each of the three blocks has a weight, a condition and its last inversion's step.
    assert plan.memory["state"] == 8 * (2 * table + D * D + 4) + momentum + 3 * 12
    row = next(line for line in repr(layers).splitlines() if line.startswith("table"))
    assert f"{V} (diagonal)" in row and "counts" in row


@pytest.mark.slow
def test_a_large_vocabulary_needs_no_square():
    """Check that a large table needs no square factor. It would have 200,000 rows and take 160 GB."""
    params = {"table": jnp.zeros((200_000, 4))}
    batch = (np.arange(6, dtype=np.int32).reshape(3, 2) * 30_000, jnp.ones((3, 60)))
    loss = lambda p, ids, t: mean_loss(p["table"][ids] + 0.1, t)  # noqa: E731
    layers = kfac.find_layers(loss, params, *batch)
    _, grads, factors = jax.jit(kfac.value_and_grad(loss, layers))(params, *batch)
    tx = plain_kfac(0.1, layers)
    updates, _ = jax.jit(observing(tx))(grads, tx.init(params), params, factors=factors)
    assert jnp.all(jnp.isfinite(updates["table"]))
    assert int(jnp.sum(jnp.any(updates["table"] != 0, axis=1))) == 6
