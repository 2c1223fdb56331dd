"""Test `kfac.curvature.block_operator` against dense matrices, in float64, and against the optimizer's steps."""

from __future__ import annotations

import functools
import operator
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import kfac
from checking import normal
from exact import dense
from problem import observing

pytestmark = pytest.mark.usefixtures("x64")
N, WIDTH, DAMPING = 12, 3, 0.03


def loss_fn(p, batch):
    """Compute a loss over a dense layer, a norm, two stacked layers, an embedding, a vector and a skipped parameter."""
    x, words, y = batch
    h = x @ p["first"]["w"] + p["first"]["b"] + p["table"][words]
    h = (h - h.mean(-1, keepdims=True)) * lax.rsqrt(h.var(-1, keepdims=True) + 1e-2)
    h = h * p["norm"]["scale"] + p["norm"]["shift"]
    h, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, p["stack"])
    z = kfac.mark_output(h @ p["out"] * p["skipped"] + p["offset"], "gaussian")
    return 0.5 * jnp.sum((z - y) ** 2, -1).mean()


def parameters():
    shapes = {
        "first": {"w": (4, WIDTH), "b": (WIDTH,)},
        "norm": {"scale": (WIDTH,), "shift": (WIDTH,)},
        "offset": (2,),
        "out": (WIDTH, 2),
        "skipped": (2,),
        "stack": (2, WIDTH, WIDTH),
        "table": (5, WIDTH),
    }
    flat, tree = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    return jax.tree.unflatten(tree, [normal(k, *shape) for k, shape in enumerate(flat)])


def batch(seed=0):
    words = jnp.asarray(np.random.default_rng(seed).integers(0, 5, N))
    return normal(100 + seed, N, 4), words, normal(200 + seed, N, 2)


@functools.cache
def layers():
    return kfac.find_layers(loss_fn, parameters(), batch(), rules={"skipped": "skip"})


@functools.cache
def measured(basis=False):
    measure = jax.jit(kfac.value_and_grad(loss_fn, layers()))
    _, grads, factors = measure(parameters(), batch())
    if not basis:
        return grads, factors
    # The moments are taken in the eigenvectors of other statistics.
    vectors = kfac.curvature.eigenbasis(measure(parameters(), batch(1))[2], layers())
    return measure(parameters(), batch(), basis=vectors)[2], vectors


def whole(factor):
    return np.diag(factor) if factor.ndim == 1 else np.asarray(factor)


def blocks_of(form, damping):
    """Return the matrix of each layer's copies by the formulas, in the order of `kron(A, G)`, as NumPy arrays."""
    if form == "ekfac":
        factors, basis = measured(basis=True)
    else:
        _, factors = measured()
    result = {}
    for layer in layers().with_factors:
        block = factors[layer.name]
        if layer.kind in ("unitwise", "diagonal"):
            f = np.asarray(block.F)
            full = np.zeros((layer.d_in, layer.d_out) * 2)
            for c in range(layer.d_out):
                full[:, c, :, c] = f[c]
            size = layer.d_in * layer.d_out
            result[layer.name] = [full.reshape(size, size) + damping * np.eye(size)]
            continue
        copies = range(layer.copies) if layer.stacked else [...]
        result[layer.name] = []
        for k in copies:
            a, g = whole(block.A[k]), whole(block.G[k])
            eye = np.eye(len(a) * len(g))
            if form == "cholesky":
                pi = np.sqrt(np.trace(a) / len(a) / (np.trace(g) / len(g)))
                root = np.sqrt(damping)
                matrix = np.kron(a + pi * root * np.eye(len(a)), g + root / pi * np.eye(len(g)))
            elif form == "ekfac" and layer.supports_ekfac:
                q = np.kron(basis[layer.name].A[k], basis[layer.name].G[k])
                matrix = q @ np.diag(np.asarray(block.moments[k]).T.ravel()) @ q.T + damping * eye
            else:
                matrix = np.kron(a, g) + damping * eye
            result[layer.name].append(matrix)
    return result


@functools.cache
def made(form, damping=DAMPING):
    if form == "ekfac":
        factors, basis = measured(basis=True)
        return jax.jit(lambda *x: kfac.curvature.block_operator(layers(), x[0], basis=x[1], damping=damping))(
            factors, basis
        )
    preconditioner = {"cholesky": kfac.Cholesky(), "eigh": kfac.Eigh()}[form]
    made_of = jax.jit(
        lambda factors: kfac.curvature.block_operator(layers(), factors, preconditioner=preconditioner, damping=damping)
    )
    return made_of(measured()[1])


def vectors_of(layer, tree):
    """Return a layer's entries of the tree as `[copies, p]`, in the order of `kron(A, G)`."""
    leaves = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}
    own = [leaves["['" + path.replace("/", "']['") + "']"] for path in layer.params]
    matrix = np.asarray(layer.to_matrix(own))
    return matrix.swapaxes(-1, -2).reshape(len(matrix), -1)


FUNCTIONS = {
    "matvec": (lambda op: op, lambda m: m),
    "inv": (lambda op: op.inv(), np.linalg.inv),
    "sqrt": (lambda op: op.sqrt(), lambda m: power(m, 0.5)),
    "inv_sqrt": (lambda op: op.inv_sqrt(), lambda m: power(m, -0.5)),
    "scaled": (lambda op: 3 * op + 0.5, lambda m: 3 * m + 0.5 * np.eye(len(m))),
    "map": (lambda op: op.map(jnp.log1p), lambda m: power(m, jnp.log1p)),
}


def power(m, exponent):
    values, vectors = np.linalg.eigh(m)
    new = exponent(values) if callable(exponent) else values**exponent
    return vectors @ np.diag(new) @ vectors.T


def close(found, expected, tolerance=1e-9):
    scale = max(1.0, np.abs(expected).max())
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("form", ["eigh", "cholesky", "ekfac"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_products_are_those_of_dense_matrices(form, function):
    """Check products, the inverse, roots and other functions for eight vectors, under vmap and jit."""
    on_operator, on_matrix = FUNCTIONS[function]
    tree = jax.tree.map(lambda p: normal(p.size, 8, *p.shape), parameters())
    found = jax.jit(lambda op, tree: jax.vmap(on_operator(op).matvec)(tree))(made(form), tree)
    blocks = blocks_of(form, DAMPING)
    for k in range(8):
        into, out = (jax.tree.map(lambda x, k=k: x[k], t) for t in (tree, found))
        for layer in layers().with_factors:
            for v, w, matrix in zip(vectors_of(layer, into), vectors_of(layer, out), blocks[layer.name], strict=True):
                close(w, on_matrix(matrix) @ v)
    assert not np.any(found["skipped"])


@pytest.mark.slow
@pytest.mark.parametrize("form", ["eigh", "cholesky", "ekfac"])
def test_numbers_and_the_matrix_written_out(form):
    op, blocks = made(form), [m for own in blocks_of(form, DAMPING).values() for m in own]

    @jax.jit
    def everything(op):
        own = {layer.name: op.block(layer.name).to_dense() for layer in layers().with_factors}
        return (op.trace(), op.logdet(), op.eigvalsh()), op.diagonal(), op.to_dense(), own

    (trace, logdet, eigenvalues), diagonal, dense, of_layers = everything(op)
    close(trace, sum(np.trace(m) for m in blocks))
    close(logdet, sum(np.linalg.slogdet(m)[1] for m in blocks))
    close(eigenvalues, np.sort(np.concatenate([np.linalg.eigvalsh(m) for m in blocks])))
    assert op.size == sum(map(len, blocks)) == sum(p.size for p in jax.tree.leaves(parameters())) - 2
    for layer in layers().with_factors:
        own = blocks_of(form, DAMPING)[layer.name]
        if layer.kind in ("unitwise", "diagonal"):  # channel by channel
            index = [[p * layer.d_out + c for p in range(layer.d_in)] for c in range(layer.d_out)]
            own = [own[0][np.ix_(i, i)] for i in index]
        close(of_layers[layer.name], np.stack(own))
        for v, m in zip(vectors_of(layer, diagonal), blocks_of(form, DAMPING)[layer.name], strict=True):
            close(v, np.diag(m))
    flat, unravel = ravel_pytree(jax.tree.map(lambda p: normal(p.size, *p.shape), parameters()))
    close(dense @ flat, ravel_pytree(op @ unravel(flat))[0])
    close(dense, dense.T)


@pytest.mark.slow
def test_the_undamped_matrix_is_that_of_exact_dense():
    op = kfac.curvature.block_operator(layers(), measured()[1])
    for layer in layers().with_factors:
        if layer.kind == "dense" and not layer.stacked:
            close(op.block(layer.name).to_dense()[0], dense(measured()[1][layer.name]))


def test_samples_have_the_covariance():
    op = made("eigh")
    draws = jax.jit(lambda op, keys: jax.vmap(op.sample)(keys))(op, jax.random.split(jax.random.key(0), 20000))
    flat = jax.vmap(lambda tree: ravel_pytree(tree)[0])(draws)
    assert jax.tree.structure(draws) == jax.tree.structure(parameters())
    dense = np.asarray(jax.jit(lambda op: op.to_dense())(op))
    covariance = np.asarray(flat.T @ flat) / len(flat)
    # The entries of a sample covariance have a standard deviation of at most sqrt(2 / draws) times the variances.
    bound = 5 * np.sqrt(2 / len(flat)) * np.sqrt(np.outer(np.diag(dense), np.diag(dense)))
    assert np.all(np.abs(covariance - dense) <= bound + 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("preconditioner", [kfac.Cholesky(), kfac.Eigh(), kfac.EKFAC()], ids=lambda i: type(i).__name__)
def test_the_inverse_of_a_state_is_what_its_optimizer_applies(preconditioner):
    tx, measure = (
        kfac.scale_by_kfac(layers(), damping=DAMPING, preconditioner=preconditioner),
        kfac.value_and_grad(loss_fn, layers()),
    )

    @jax.jit
    def step(state, batch):
        basis = {"basis": kfac.curvature.eigenbasis(state, layers())} if preconditioner.uses_example_moments else {}
        _, grads, factors = measure(parameters(), batch, **basis)
        state = kfac.observe(state, factors)
        updates, state = tx.update(grads, state)
        return updates, grads, state

    state = jax.jit(tx.init)(parameters())
    for seed in range(3):
        updates, grads, state = step(state, batch(seed))
    found = jax.jit(lambda state, grads: kfac.curvature.block_operator(layers(), state).inv() @ grads)(state, grads)
    for name in ("first", "norm", "offset", "out", "stack", "table"):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), found[name], updates[name])
    assert not np.any(found["skipped"])


def test_the_operator_before_the_first_step_has_the_damping_of_that_step():
    tx = kfac.scale_by_kfac(layers(), damping=DAMPING, preconditioner=kfac.Eigh())

    @jax.jit
    def found(params, batch):
        state = kfac.observe(tx.init(params), kfac.value_and_grad(loss_fn, layers())(params, batch)[2])
        grads = jax.grad(loss_fn)(params, batch)
        return kfac.curvature.block_operator(layers(), state).inv() @ grads, tx.update(grads, state)[0]

    actual, expected = found(parameters(), batch(0))
    for name in ("first", "norm", "out"):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), actual[name], expected[name])


def test_a_block_operator_of_vectors_alone_has_the_units_of_its_optimizer():
    def loss(p, x):
        h = (x - x.mean(-1, keepdims=True)) * p["scale"] + p["shift"]
        return 0.5 * jnp.sum((h - 1) ** 2, -1).mean()

    params, x = {"scale": normal(1, 5), "shift": normal(2, 5)}, normal(3, N, 5)
    own = kfac.find_layers(loss, params, x)
    assert not any(layer.kronecker for layer in own)
    tx = kfac.scale_by_kfac(own, damping=DAMPING, preconditioner=kfac.SOAP(scale_damping=True))

    @jax.jit
    def found(params, x):
        state = kfac.observe(tx.init(params), kfac.statistics(loss, own)(params, x))
        grads = jax.grad(loss)(params, x)
        return kfac.curvature.block_operator(own, state).inv() @ grads, tx.update(grads, state)[0]

    actual, expected = found(params, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), actual, expected)


@pytest.mark.slow
def test_the_factors_of_a_state_are_its_averages():
    tx = kfac.scale_by_kfac(layers(), factor_ema_decay=0.5)
    measure, update = jax.jit(kfac.value_and_grad(loss_fn, layers())), jax.jit(observing(tx))
    state, seen = jax.jit(tx.init)(parameters()), []
    for seed in range(2):
        _, grads, factors = measure(parameters(), batch(seed))
        seen.append(factors)
        _, state = update(grads, state, factors=factors)
    expected = jax.tree.map(lambda a, b: (np.asarray(a) / 2 + b) / 1.5, *seen)  # weights 1/4 and 1/2, normalised
    found = jax.jit(lambda state: kfac.curvature.factors_from_state(state, layers()))({"some": (state,)})
    assert list(found) == list(expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), found, expected)
    with pytest.raises(ValueError, match="holds no state of kfac"):
        kfac.curvature.factors_from_state({}, layers())
    # The state has as many blocks as on one device, but they are scattered over two.
    with pytest.raises(ValueError, match=r"must be the state of one device: call kfac\.state\.gather_state"):
        kfac.curvature.factors_from_state(kfac.state.scatter_state(state, 2), layers())


@pytest.mark.slow
def test_three_devices_are_one():
    """Check an operator whose factors lie on several devices, and its products with trees on several devices."""
    mesh = Mesh(np.asarray(jax.devices()[:3]), ("data",))
    rows = jax.device_put(batch(), NamedSharding(mesh, PartitionSpec("data")))
    same = jax.device_put(parameters(), NamedSharding(mesh, PartitionSpec()))

    @jax.jit
    def applied(params, batch, tree):
        _, _, factors = kfac.value_and_grad(loss_fn, layers())(params, batch)
        op = kfac.curvature.block_operator(layers(), factors, damping=DAMPING)
        return op.inv() @ tree, op.logdet()

    tree = jax.tree.map(lambda p: normal(p.size, *p.shape), parameters())
    found, expected = applied(same, rows, tree), applied(parameters(), batch(), tree)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), found, expected)


@pytest.mark.slow
def test_lineax_solves_with_it():
    import lineax

    op, tree = made("eigh"), jax.tree.map(lambda p: normal(p.size, *p.shape), parameters())
    tree["skipped"] = jnp.zeros(2)
    tags = lineax.symmetric_tag, lineax.positive_semidefinite_tag
    of_lineax = lineax.FunctionLinearOperator(op.matvec, jax.eval_shape(lambda: tree), tags)
    solved = lineax.linear_solve(of_lineax, tree, lineax.CG(1e-12, 1e-12)).value
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-8), solved, op.inv() @ tree)


def refusals():
    grads, factors = measured()
    with_moments, basis = measured(basis=True)
    state = kfac.scale_by_kfac(layers()).init(parameters())
    return [
        (lambda: kfac.curvature.block_operator(layers(), grads), "source holds no state of kfac"),
        (lambda: kfac.curvature.block_operator(layers(), factors, damping=-1.0), "damping must lie"),
        (lambda: kfac.curvature.block_operator(layers(), with_moments), "pass the basis="),
        (lambda: kfac.curvature.block_operator(layers(), factors, basis=basis), "have no moments"),
        (lambda: kfac.curvature.block_operator(layers(), factors, preconditioner=kfac.EKFAC()), "needs the basis="),
        (
            lambda: kfac.curvature.block_operator(layers(), with_moments, basis=basis, preconditioner=kfac.Eigh()),
            "no use for basis",
        ),
        (lambda: kfac.curvature.block_operator(layers(), state, basis=basis), "basis is for factors"),
        (lambda: kfac.curvature.block_operator(layers(), state, preconditioner=kfac.EKFAC()), "the state is that of"),
        (lambda: made("eigh").block("skipped"), "no layer 'skipped'"),
        (lambda: made("eigh") @ {"other": jnp.ones(2)}, "have a leaf 'other'"),
    ]


@pytest.mark.parametrize("case", range(10))
def test_refusals(case):
    call, words = refusals()[case]
    with pytest.raises(ValueError, match=words):
        call()


def test_the_table_says_the_dtype_of_the_statistics():
    """Check the statistics' dtype and their memory, such as eight bytes per element in float64."""
    assert "in float64, the whole state" in repr(layers())
    narrow = jax.tree.map(lambda x: x.astype("float32"), (parameters(), (batch()[0], batch()[2])))
    x, y = narrow[1]
    found = kfac.find_layers(loss_fn, narrow[0], (x, batch()[1], y), rules={"skipped": "skip"})
    assert "in float32, the whole state" in repr(found)
    for table, size in ((found, 4), (layers(), 8)):
        elements, memory = re.search(r"factors: (\d+) elements, (\d+) B in float", repr(table)).groups()
        assert int(memory) == size * int(elements)


def test_only_numbers_multiply():
    op = made("eigh")
    for combine in (operator.mul, operator.add, operator.sub):
        with pytest.raises(TypeError, match="added to numbers only, but got BlockOperator: combine products"):
            combine(op, op)


def test_numbers_are_subtracted():
    op = made("eigh")
    identity = np.eye(ravel_pytree(parameters())[0].size)

    @jax.jit
    def matrices(op):
        given = op.map(jnp.ones_like), op, op - 0.5, 1 - op, -op
        return [of.to_dense() for of in given]

    # `skipped` is the identity, except at skipped parameters.
    skipped, dense, *found = map(np.asarray, matrices(op))
    close(np.sum(identity - skipped), 2)
    for matrix, expected in zip(found, (dense - 0.5 * skipped, skipped - dense, -dense), strict=True):
        close(matrix, expected)


@pytest.mark.parametrize("tree", [lambda w: w, lambda w: {"w": w}], ids=["bare", "in a dictionary"])
def test_a_flat_vector_is_told_from_a_tree_with_one_vector(tree):
    """Check a vector and a tree that both have the shape of the only leaf."""

    def loss(p, x):
        return 0.5 * jnp.mean(kfac.mark_output((x @ ravel_pytree(p)[0])[:, None], "gaussian") ** 2)

    params, x = tree(normal(0, 4)), normal(1, N, 4)
    found = kfac.find_layers(loss, params, x)
    op = kfac.curvature.block_operator(found, jax.jit(kfac.statistics(loss, found))(params, x), damping=DAMPING)
    flat = normal(2, 4)
    expected = ravel_pytree(op.matvec(tree(flat)))[0]
    assert isinstance(op @ tree(flat), type(params))
    np.testing.assert_array_equal(op @ flat, expected)


def test_factors_and_basis_outlive_a_state_that_is_donated():
    """Check that `factors_from_state` and `eigenbasis` return no array of the state.

    A stacked layer alone in its group takes the whole stack.
    """

    def loss(p, x):
        return jnp.mean(lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p["w"])[0] ** 2)

    params, x = {"w": normal(0, 3, 4, 4)}, normal(1, N, 4)
    found = kfac.find_layers(loss, params, x)
    tx = kfac.kfac(0.1, found, preconditioner=kfac.EKFAC())
    state = tx.init(params)
    measure = kfac.statistics(loss, found)

    def observed(state, basis):
        return kfac.observe(state, measure(params, x, basis=basis))

    state = observed(state, kfac.curvature.eigenbasis(state, found))
    factors, basis = kfac.curvature.factors_from_state(state, found), kfac.curvature.eigenbasis(state, found)
    expected = jax.device_get((factors, basis))
    jax.jit(observed, donate_argnums=0)(state, basis)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get((factors, basis)), expected)
