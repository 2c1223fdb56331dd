"""Check that factors above a bound are replaced by their diagonal blocks, in every kind of layer.

Some tests lower a threshold inside `_capture.make_layers`, so that a small table counts as a vocabulary.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

import kfac
from checking import as_matrices, blocks_on_the_diagonal, normal, pieces, run, slow
from problem import tied_batch, tied_loss, tied_parameters

N, T, V = 8, 3, 7
NUMBERS = ("NHWC", "HWIO", "NHWC")


def loss(p, tokens, images, t):
    """Return the loss of a network with a table, dense layers, convolutions, experts and a scan."""
    x = jnp.tanh(p["table"][tokens])
    x = jnp.tanh(x @ p["dense"]["w"] + p["dense"]["b"])
    x = jnp.tanh(jnp.einsum("ntd,dhk->nthk", x, p["heads"]))
    x = jnp.einsum("nthk,hkd->nthd", x, p["experts"]).mean(2)
    x, _ = lax.scan(lambda x, wb: (jnp.tanh(x @ wb[0] + wb[1]), None), x, (p["stack"]["w"], p["stack"]["b"]))
    y = lax.conv_general_dilated(images, p["conv"]["w"], (2, 1), ((1, 2), (0, 1)), dimension_numbers=NUMBERS)
    y = jnp.tanh(y + p["conv"]["b"])
    y = lax.conv_general_dilated(
        y, p["grouped"]["w"], (1, 1), "SAME", rhs_dilation=(1, 2), feature_group_count=2, dimension_numbers=NUMBERS
    )
    y = jnp.sin(y + p["grouped"]["b"]).reshape(len(images), -1)
    y = jnp.concatenate([x.reshape(len(x), -1), y], axis=1)
    return jnp.mean(jnp.sum(jnp.sin(y) * t[:, : y.shape[1]], axis=1))


SHAPES = {
    "conv": {"w": (3, 2, 2, 4), "b": (4,)},
    "dense": {"w": (5, 6), "b": (6,)},
    "experts": (2, 4, 5),
    "grouped": {"w": (2, 2, 2, 6), "b": (6,)},
    "heads": (6, 2, 4),
    "stack": {"w": (2, 5, 5), "b": (2, 5)},
    "table": (V, 5),
}


def problem(dtype):
    flat, tree = jax.tree.flatten(SHAPES, is_leaf=lambda x: isinstance(x, tuple))
    params = jax.tree.unflatten(tree, [normal(10 + k, *shape, dtype=dtype) for k, shape in enumerate(flat)])
    tokens = np.random.default_rng(0).integers(0, V, (N, T)).astype(np.int32)
    return params, (tokens, normal(1, N, 4, 3, 2, dtype=dtype), normal(2, N, 100, dtype=dtype))


@functools.cache
def with_whole_factors():
    return run(loss, *problem(jnp.float64))


@pytest.mark.parametrize("max_factor_dim", [1, 5, slow(6), 8, 100])
def test_blocks_are_those_of_the_whole_factor(x64, max_factor_dim):
    params, batch = problem(jnp.float64)
    whole_layers, grads, whole = with_whole_factors()
    layers, same, found = run(loss, params, batch, max_factor_dim=max_factor_dim)
    jax.tree.map(np.testing.assert_array_equal, grads, same)
    assert layers.max_factor_dim == max_factor_dim and (max_factor_dim == 100) == (layers.layers == whole_layers.layers)
    for layer in layers:
        for name, size, count in (("A", layer.d_in, layer.num_blocks[0]), ("G", layer.d_out, layer.num_blocks[1])):
            expected, value = np.asarray(getattr(whole[layer.name], name)), getattr(found[layer.name], name)
            table = name == "A" and layer.kind == "embedding"
            assert count == (1 if table else -(-size // max_factor_dim)) and layer.diagonal == ("A",) * (
                layer.kind == "embedding"
            )
            if count > 1:
                assert f"{name} has more than max_factor_dim={max_factor_dim} rows" in layer.note
                copies = expected if layer.stacked else expected[None]
                blocks = np.stack([blocks_on_the_diagonal(x, count) for x in copies])
                expected = blocks if layer.stacked else blocks[0]
            np.testing.assert_allclose(value, expected, rtol=1e-9, atol=1e-12)


def test_oblong_dense_kernels_are_cut_into_square_pieces_by_default(x64):
    """Check that oblong dense kernels are cut from 256 rows on, and that each piece has exact statistics.

    A kernel stays whole if its shorter side is a head with few outputs.
    """

    def loss(p, x, images):
        x = jnp.tanh(jnp.tanh(x @ p["up"] + p["bias"]) @ p["down"])
        x = jnp.tanh(x @ p["wide"]) @ p["head"]
        y = lax.conv_general_dilated(images, p["conv"], (1, 1), "VALID", dimension_numbers=NUMBERS)
        return jnp.mean(jnp.sum(jnp.sin(x), 1) + jnp.sum(jnp.sin(y), (1, 2, 3)))

    shapes = {"up": (63, 260), "bias": (260,), "down": (260, 120), "wide": (120, 178), "head": (178, 2)}
    params = {k: normal(i, *shape, dtype=jnp.float64) / 9 for i, (k, shape) in enumerate(shapes.items())}
    params["conv"] = normal(9, 4, 4, 20, 60, dtype=jnp.float64)
    batch = normal(20, N, 63, dtype=jnp.float64), normal(21, N, 4, 4, 20, dtype=jnp.float64)
    whole_layers, _, whole = run(loss, params, batch)
    layers, _, found = run(loss, params, batch, max_factor_dim=None)
    assert all(layer.num_blocks == (1, 1) for layer in whole_layers)
    cuts = {layer.name: layer.num_blocks for layer in layers}
    assert cuts == {"conv": (1, 1), "down": (2, 1), "head": (1, 1), "up": (1, 4), "wide": (1, 1)}
    assert layers["up"].note == "G has 4 times the rows of A; max_factor_dim=8192 keeps it whole"
    assert layers["up"].block_shapes == {"A": (64, 64), "G": (65, 65)}
    for name, side, count in (("up", "G", 4), ("down", "A", 2)):
        expected = blocks_on_the_diagonal(np.asarray(getattr(whole[name], side)), count)
        np.testing.assert_allclose(getattr(found[name], side), expected, rtol=1e-9, atol=1e-12)
    (alone,) = kfac.find_layers(lambda w, x: jnp.mean((x @ w) ** 2), jnp.ones((257, 30)), jnp.ones((N, 257)))
    assert alone.num_blocks == (1, 1)  # it would need nine pieces


@pytest.mark.parametrize(("shape", "pieces"), [((2100, 64), 8), ((2100, 10), 1), ((64, 2100), 8), ((250, 16), 1)])
def test_very_oblong_kernels_have_eight_pieces_but_heads_stay_whole(shape, pieces):
    def loss(w, x):
        return jnp.mean(jnp.square(x @ w))

    found = kfac.find_layers(loss, jnp.ones(shape), jnp.ones((4, shape[0])))
    assert found[0].pieces == pieces and max(found[0].num_blocks) == pieces


@pytest.mark.parametrize(("shape", "pieces"), [((1020, 255), 1), ((255, 1020), 1), ((256, 1024), 4), ((1024, 256), 4)])
def test_kernels_that_examples_read_at_several_positions_are_cut_from_1024_rows_on(shape, pieces):
    """Check kernels with several positions. At a single position, each of them has four pieces."""

    def loss(w, x):
        return jnp.mean(jnp.square(x @ w))

    alone = kfac.find_layers(loss, jnp.ones(shape), jnp.ones((4, shape[0])))
    found = kfac.find_layers(loss, jnp.ones(shape), jnp.ones((4, 3, shape[0])))
    assert alone[0].positions == 1 and alone[0].pieces == 4
    assert found[0].positions == 3 and found[0].pieces == pieces


def test_with_the_reduce_setting_positions_do_not_count():
    def loss(w, x):
        return jnp.mean(jnp.square(x @ w))

    (found,) = kfac.find_layers(loss, jnp.ones((300, 64)), jnp.ones((4, 3, 300)), rules={"": "reduce"})
    assert found.positions == 3 and found.pieces == 5


def test_a_kernel_keeps_its_cut_if_its_positions_are_known_only_later(x64):
    """Check that a kernel keeps its cut if its positions become known or change after `find_layers`.

    A batch size in the loss hides the number of examples from `find_layers`.
    """

    def fixed(w, x):
        return jnp.sum(jnp.tanh(x.reshape(16, 300) @ w) ** 2) / 16

    w, x = normal(0, 300, 64, dtype=jnp.float64), normal(1, 16, 300, dtype=jnp.float64)
    layers = kfac.find_layers(fixed, w, x)
    assert layers[0].positions is None and layers[0].pieces == 1
    found = jax.jit(kfac.statistics(fixed, layers, num_examples=16))(w, x)
    np.testing.assert_allclose(found[layers[0].name].A, x.T @ x / 16, rtol=1e-9, atol=1e-12)
    step = kfac.train_step(fixed, 0.1, num_examples=16)
    assert np.isfinite(step(w, step.init(w, x), x)[2])

    def plain(w, x):
        return jnp.mean(jnp.square(jnp.tanh(x @ w)))

    one, several = normal(1, 16, 300, dtype=jnp.float64), normal(2, 16, 5, 300, dtype=jnp.float64)
    for first, then, count in ((one, several, 5), (several, one, 1)):
        layers = kfac.find_layers(plain, w, first)
        found = jax.jit(kfac.statistics(plain, layers))(w, then)
        assert layers[0].pieces == count
        rows = then.reshape(-1, 300)
        expected = np.asarray(rows.T @ rows / len(then))
        if count > 1:
            expected = blocks_on_the_diagonal(expected, count)
        np.testing.assert_allclose(found[layers[0].name].A, expected, rtol=1e-9, atol=1e-12)


def test_as_many_rows_as_a_vocabulary_has_are_a_diagonal(x64, monkeypatch):
    monkeypatch.setattr("kfac._capture.make_layers.VOCABULARY", 8)
    params, batch = problem(jnp.float64)
    whole = run(loss, params, batch)[2]
    layers, _, found = run(loss, params, batch, max_factor_dim=5)
    assert {layer.name: layer.diagonal for layer in layers if layer.diagonal} == {
        "conv": ("A",), "grouped": ("A",), "heads": ("G",), "table": ("A",),
    }  # fmt: skip
    for name, side in (("conv", "A"), ("grouped", "A"), ("heads", "G")):
        expected = np.diagonal(getattr(whole[name], side), axis1=-2, axis2=-1)
        np.testing.assert_allclose(getattr(found[name], side), expected, rtol=1e-9, atol=1e-12)


def test_the_table_and_the_plan_show_it():
    params, batch = problem(jnp.float32)
    layers = kfac.find_layers(loss, params, *batch, max_factor_dim=7)
    row = next(line for line in repr(layers).splitlines() if line.startswith("conv"))
    assert "13 (2 blocks)" in row and "A has more than max_factor_dim=7 rows" in row
    whole = kfac.find_layers(loss, params, *batch)
    cut, uncut = (kfac.planning.estimate(found, devices=1) for found in (layers, whole))
    assert cut.memory["state"] < uncut.memory["state"]
    assert cut.flops["refresh"] < uncut.flops["refresh"]


def dense(kind, a, g, v, damping):
    """Return the preconditioned piece by a dense solve with its damped Kronecker product."""
    if isinstance(kind, kfac.Cholesky):
        pi = np.sqrt(np.trace(a) / len(a) / (np.trace(g) / len(g))) if np.trace(a) * np.trace(g) else 1.0
        a, g = a + pi * np.sqrt(damping) * np.eye(len(a)), g + np.sqrt(damping) / pi * np.eye(len(g))
        return np.linalg.solve(np.kron(a, g), v.T.reshape(-1)).reshape(v.T.shape).T
    return np.linalg.solve(np.kron(a, g) + damping * np.eye(v.size), v.T.reshape(-1)).reshape(v.T.shape).T


@pytest.mark.slow
@pytest.mark.parametrize(("preconditioner", "rows"), [(kfac.Cholesky(), 3), (kfac.Eigh(), 3), (kfac.EKFAC(), 8192)])
def test_preconditioning_is_a_dense_solve_for_each_piece(x64, preconditioner, rows, monkeypatch):
    """Check each piece of a kernel against a dense solve with the piece's own blocks and `pi`.

    A piece has at most `rows` rows along a diagonal factor.
    """
    monkeypatch.setattr("kfac._capture.make_layers.ROWS", rows)
    params, batch = problem(jnp.float64)
    layers = kfac.find_layers(loss, params, *batch, max_factor_dim=4)
    tx = kfac.scale_by_kfac(layers, damping=2.0**-5, preconditioner=preconditioner)

    @jax.jit
    def step(params, batch):
        state = tx.init(params)
        basis = {"basis": kfac.curvature.eigenbasis(state, layers)} if preconditioner.uses_example_moments else {}
        _, grads, factors = kfac.value_and_grad(loss, layers)(params, *batch, **basis)
        return grads, factors, *tx.update(grads, kfac.observe(state, factors), params)

    grads, factors, updates, state = step(params, batch)
    flat, new = (dict(zip(layers.paths, jax.tree.leaves(tree), strict=True)) for tree in (grads, updates))
    cut = tuple(layer for layer in layers if layer.pieces > 1)
    assert {layer.name for layer in cut} == set(SHAPES) and layers["table"].num_blocks == (
        (4, 2) if rows == 3 else (1, 2)
    )
    of_gradient, of_update = (jax.tree.map(np.asarray, as_matrices(cut, leaves)) for leaves in (flat, new))
    for layer in cut:
        gradient, found = of_gradient[layer.name], of_update[layer.name]
        for k in range(layer.copies):
            for rows, columns, a, g, v in pieces(layer, factors[layer.name], k, gradient[k]):
                expected = dense(preconditioner, a, g, v, 2.0**-5)[
                    : rows.stop - rows.start, : columns.stop - columns.start
                ]
                np.testing.assert_allclose(found[k, rows, columns], expected, rtol=1e-7, atol=1e-10)
    averages = jax.jit(lambda state: kfac.curvature.factors_from_state(state, layers))(state)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), averages, factors)
    if not preconditioner.uses_example_moments:
        op = jax.jit(lambda state: kfac.curvature.block_operator(layers, state))(state)
        values = jax.jit(lambda op: (op.inv() @ grads, op.to_dense(), op.eigvalsh(), op.logdet()))(op)
        again, matrix, eigenvalues, logdet = jax.tree.map(np.asarray, values)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9), again, updates)
        np.testing.assert_allclose(eigenvalues, np.linalg.eigvalsh(matrix), rtol=1e-7, atol=1e-10)
        np.testing.assert_allclose(logdet, np.linalg.slogdet(matrix)[1], rtol=1e-7)
        assert op.size == len(matrix)


def test_soap_on_blocks_is_soap_on_layers_of_their_own(x64):
    """Check that a kernel whose factor is cut in two trains like two separate kernels."""
    x, w = normal(0, 16, 6), {"w": normal(1, 6, 4)}
    halves = {"a": w["w"][:3], "b": w["w"][3:]}

    def of_one(p, x):
        return jnp.mean(jnp.sum(jnp.sin(x @ p["w"]) ** 2, -1))

    def of_two(p, x):
        return jnp.mean(jnp.sum(jnp.sin(x[:, :3] @ p["a"] + x[:, 3:] @ p["b"]) ** 2, -1))

    def trained(loss, params, **options):
        layers = kfac.find_layers(loss, params, x, **options)
        tx = kfac.scale_by_kfac(layers, preconditioner=kfac.SOAP(scale_damping=True), damping=1e-3)

        @jax.jit
        def step(params, state, x):
            _, grads, factors = kfac.value_and_grad(loss, layers)(params, x)
            state = kfac.observe(state, factors)
            updates, state = tx.update(grads, state, params)
            return jax.tree.map(lambda p, u: p - 0.02 * u, params, updates), state

        state = jax.jit(tx.init)(params)
        for k in range(4):
            params, state = step(params, state, x + k)
        return params

    found, expected = trained(of_one, w, max_factor_dim=5), trained(of_two, halves)
    np.testing.assert_allclose(found["w"], np.concatenate([expected["a"], expected["b"]]), rtol=1e-8)


def test_a_table_that_is_the_head_too(x64, monkeypatch):
    """Check that the two uses are combined as whole factors before they are cut."""
    monkeypatch.setattr("kfac._capture.make_layers.ROWS", 3)
    params, batch = tied_parameters(1, 6, 9, 4), tied_batch(0)
    whole = run(tied_loss, params, (batch,))[2]
    layers, _, found = run(tied_loss, params, (batch,), max_factor_dim=4)
    for layer in layers:
        for name, count in zip("AG", layer.num_blocks, strict=True):
            if layer.kronecker and count > 1 and name not in layer.diagonal:
                expected = blocks_on_the_diagonal(np.asarray(getattr(whole[layer.name], name)), count)
                np.testing.assert_allclose(getattr(found[layer.name], name), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_no_kernel_that_is_cut_goes_further_than_it_would_whole(x64):
    """Check that a kernel that is cut moves at most as far as the whole kernel.

    It must also move at least this distance divided by the square root of the piece count.
    """
    params, batch = problem(jnp.float64)
    layers = kfac.find_layers(loss, params, *batch, max_factor_dim=4)
    tx = kfac.kfac(0.1, layers)

    @jax.jit
    def step(params, batch):
        _, grads, factors = kfac.value_and_grad(loss, layers)(params, *batch)
        return tx.update(grads, kfac.observe(tx.init(params), factors), params)[0]

    leaves = dict(zip(layers.paths, jax.tree.leaves(step(params, batch)), strict=True))
    matrices = as_matrices(tuple(layers), leaves)
    for layer in layers:
        for matrix in np.asarray(matrices[layer.name]):
            if layer.kind != "embedding":
                d_in = layer.layouts[0].size("in")
                length = 0.1 * (layer.overlap * max(1, layer.d_out / d_in)) ** 0.5
                found = np.linalg.norm(matrix[:, :d_in], 2)
                assert length / layer.pieces**0.5 * (1 - 1e-9) <= found <= 1.1 * length


@pytest.mark.slow
@pytest.mark.parametrize(("preconditioner", "rows"), [(kfac.Cholesky(), 3), (kfac.Eigh(), 8192)])
def test_several_devices_are_one(x64, preconditioner, rows, monkeypatch):
    monkeypatch.setattr("kfac._capture.make_layers.ROWS", rows)
    params, batch = problem(jnp.float64)
    layers = kfac.find_layers(loss, params, *batch, max_factor_dim=5)
    mesh = Mesh(np.array(jax.devices()[:4]), ("d",))
    same, split = PartitionSpec(), PartitionSpec("d")

    def step(tx, average, params, batch):
        _, grads, factors = kfac.value_and_grad(loss, layers)(params, *batch)
        return tx.update(average(grads), kfac.observe(tx.init(params), factors), params)[0]

    alone = functools.partial(step, kfac.scale_by_kfac(layers, preconditioner=preconditioner), lambda g: g)
    expected = jax.jit(alone)(params, batch)
    tx = kfac.scale_by_kfac(layers, preconditioner=preconditioner, distribution=kfac.Distribution("d"))
    mapped = functools.partial(step, tx, lambda g: lax.pmean(g, "d"))
    over = jax.shard_map(mapped, mesh=mesh, in_specs=(same, split), out_specs=same)
    found = jax.jit(over)(params, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-10), found, expected)


@pytest.mark.parametrize("value", [0, -1, 2.5, True, "8"])
def test_bad_bounds(value):
    with pytest.raises(ValueError, match="max_factor_dim must be a positive int"):
        kfac.find_layers(lambda p, x: jnp.mean(x @ p), jnp.ones((5, 2)), jnp.ones((N, 5)), max_factor_dim=value)
