"""Check that `num_examples=` gives right statistics wherever an error asks for it, and that errors name the leaf."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import kfac
from checking import normal
from zoo.bruteforce import truth
from zoo.specimens import N, OneByOne, Specimen, compare, data, equinox, tokens, tree

pytestmark = pytest.mark.usefixtures("x64")
D, T, H = 4, 3, 5


class Loop(eqx.Module):
    cell: eqx.nn.LSTMCell
    head: eqx.nn.Linear

    def __init__(self, key):
        self.cell = eqx.nn.LSTMCell(D, H, key=key)
        self.head = eqx.nn.Linear(H, 3, key=key)

    def __call__(self, x):
        state = jnp.zeros(H), jnp.zeros(H)
        for row in x:
            state = self.cell(row, state)
        return self.head(state[0])


def squares(y, _):
    return jnp.mean(jnp.sum(y**2, -1))


def lstm():
    return equinox(Loop, {"x": data(0, T, D), "y": tokens(0)}, squares)


def net(p, x):
    return jnp.tanh(x @ p["in"] + p["b"]) @ p["out"]


NET = {"in": (D, H), "b": (H,), "out": (H, 2)}


def constant_tangent():
    def loss(p, b):
        y, moved = jax.jvp(lambda x: net(p, x), (b["x"],), (jnp.ones_like(b["x"]),))
        return jnp.mean(jnp.sum(y**2 + moved**2, -1))

    return loss, tree(**NET), {"x": data(0, D)}


def constant_tangent_of_one():
    def loss(p, b):
        y, moved = jax.vmap(lambda x: jax.jvp(lambda x: net(p, x), (x,), (jnp.ones(D),)))(b["x"])
        return jnp.mean(jnp.sum(y**2 + moved**2, -1))

    return loss, tree(**NET), {"x": data(0, D)}


def capacity():
    """Return a model whose experts see seven rows for six examples."""

    def loss(p, b):
        there = jax.nn.softmax(
            jnp.einsum("nd,dc->cn", b["x"], jnp.asarray(np.random.default_rng(0).normal(size=(D, 7))))
        )
        y = jnp.tanh((there @ b["x"]) @ p["in"] + p["b"]) @ p["out"]
        return jnp.mean(jnp.sum((there.T @ y) ** 2, -1))

    return loss, tree(**NET), {"x": data(0, D)}


def graphs():
    """Return a model of twenty nodes in six graphs."""
    owner = np.sort(np.random.default_rng(0).integers(0, N, 20))

    def loss(p, b):
        nodes = jnp.repeat(b["x"], np.bincount(owner, minlength=N), axis=0, total_repeat_length=20)
        h = net(p, nodes * (1 + jnp.arange(20)[:, None]))
        return jnp.mean(jnp.sum(jax.ops.segment_sum(h, owner, N) ** 2, -1))

    return loss, tree(**NET), {"x": data(0, D)}


def one_by_one():
    def loss(p, b):
        return jnp.mean(lax.map(lambda x: jnp.sum(net(p, x) ** 2), b["x"]))

    return loss, tree(**{**NET, "b": (H,)}), {"x": data(0, T, D)}


def penalised_tokens():
    def loss(p, b):
        return jnp.mean(jnp.sum(net(p, b["x"]) ** 2, -1) + 0.1 * (jnp.sum(p["in"] ** 2) + jnp.sum(p["out"] ** 2)))

    return loss, tree(**NET), {"x": data(0, T, D)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "alone"),
    [
        (lstm, True),
        (constant_tangent, False),
        (constant_tangent_of_one, True),
        (capacity, False),
        (graphs, False),
        (one_by_one, False),
        (penalised_tokens, False),
    ],
)
def test_num_examples_leads_on(build, alone):
    """Check that statistics match brute force with `num_examples=`, even if it is not needed."""
    loss, params, batch = build()
    layers = kfac.find_layers(loss, params, batch)
    fn = jax.jit(kfac.value_and_grad(loss, layers, num_examples=N))
    expected = OneByOne(loss, params, batch) if alone else truth(loss, params, batch, N)
    case = Specimen("", "", build, penalised=build is penalised_tokens)
    compare(layers, *fn(params, batch), expected, case)
    assert sum(layer.kind == "dense" for layer in layers) >= 2
    assert not any(layer.kind == "gradient-factors" for layer in layers)  # a kernel's bias meets the kernel's rows


def test_a_number_that_cannot_be_known_is_asked_for():
    loss, params, batch = graphs()
    layers = kfac.find_layers(loss, params, batch)
    why = "the loss cannot be traced with 12 examples in argument 1"
    assert f"the examples are not known: {why}" in repr(layers)
    with pytest.raises(ValueError, match=rf"number of examples is not clear: {why} \(.*Pass num_examples="):
        jax.eval_shape(kfac.value_and_grad(loss, layers), params, batch)


# -- errors that name the leaf -----------------------------------------------------------------------------------------


def mean(p, x):
    return jnp.mean(x @ p["net"]["w"])


@pytest.mark.parametrize(
    ("leaf", "reason"),
    [(jnp.ones((D, 2), int), "dtype int"), (3, "of type int"), (jnp.ones((D, 2), bool), "dtype bool"), (None, "")],
)
def test_a_leaf_that_is_no_real_array_is_named(leaf, reason):
    params = {"net": {"w": jnp.ones((D, 2)), "steps": leaf}}
    if leaf is None:  # None is not a leaf
        assert kfac.find_layers(mean, params, data(0, D)).paths == ("net/w",)
        return
    with pytest.raises(TypeError, match=rf"'net/steps'.*{reason}"):
        kfac.find_layers(mean, params, data(0, D))
    layers = kfac.find_layers(mean, {"net": {"w": jnp.ones((D, 2))}}, data(0, D))
    with pytest.raises(TypeError, match=rf"'net/steps'.*{reason}"):
        kfac.value_and_grad(mean, layers)(params, data(0, D))


class Dropped(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(D, 2, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)


def test_an_nnx_module_as_parameters_is_told_what_to_pass():
    """Check the error for a module, which also holds the keys and counts of dropout. `nnx.split` separates them."""
    model = Dropped(nnx.Rngs(0))

    def loss(model, x):
        return jnp.mean(model.linear(x) ** 2)

    with pytest.raises(TypeError, match=r"'dropout/rngs/.*nnx.split"):
        kfac.find_layers(loss, model, data(0, D))
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    layers = kfac.find_layers(lambda p, r, x: loss(nnx.merge(graph, p, r), x), params, rest, data(0, D))
    assert [layer.kind for layer in layers] == ["dense"]


# -- numbers of examples that are not guessed -------------------------------------------------------------------------


def weights():
    return {"u": normal(3, D, H), "v": normal(4, H, 2)}


def mean_square(y):
    return jnp.mean(jnp.sum(y**2, -1))


def factors_of(loss, *args, params=None, **options):
    params = weights() if params is None else params
    return jax.jit(kfac.value_and_grad(loss, kfac.find_layers(loss, params, *args), **options))(params, *args)[2]


@pytest.mark.slow
def test_an_axis_of_one_in_front_is_not_the_examples():
    def loss(p, x):
        return mean_square((jnp.tanh(x[None] @ p["u"]) @ p["v"])[0])

    found = factors_of(loss, normal(1, N, D))
    expected = factors_of(lambda p, x: mean_square(jnp.tanh(x @ p["u"]) @ p["v"]), normal(1, N, D))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10), found, expected)
    one = normal(1, D)  # a single example without an example axis
    with pytest.raises(ValueError, match="the loss cannot be traced with 8 examples in argument 1"):
        factors_of(loss, one)
    found = factors_of(loss, one, num_examples=1)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10), found, factors_of(loss, one[None]))
    found = factors_of(lambda p, x: mean_square(x @ p["u"]), normal(1, 1, T, D), params={"u": weights()["u"]})["u"]
    rows = normal(1, T, D)  # a batch of one example
    np.testing.assert_allclose(found.A, rows.T @ rows, rtol=1e-10)


@pytest.mark.slow
def test_a_prng_key_is_no_array_of_examples():
    def loss(p, x, key):
        views = jnp.stack([x + jax.random.normal(key, x.shape), x])
        return mean_square(jnp.tanh(views @ p["u"]) @ p["v"])

    x = normal(1, N, D)
    for key in (jax.random.key(0), jax.random.PRNGKey(0)):
        found = factors_of(loss, x, key)["u"]
        rows = np.concatenate([x + jax.random.normal(key, x.shape), x])
        np.testing.assert_allclose(found.A, rows.T @ rows / N, rtol=1e-10)
        first = lambda p, key, x: loss(p, x, key)  # noqa: E731
        jax.tree.map(np.testing.assert_array_equal, factors_of(first, key, x)["u"], found)


@pytest.mark.slow
def test_some_uses_may_see_fewer_rows_than_there_are_examples():
    """Check layers that see fewer rows than examples, so that positions are a fraction.

    One loss has a boundary besides the interior. In the other, a head reads only two examples.
    """
    inside, border = normal(1, N, D), normal(2, N // 2, D)

    def loss(p, inside, border):
        return sum(mean_square(kfac.mark_output(jnp.tanh(x @ p["u"]) @ p["v"], "gaussian")) for x in (inside, border))

    few, many = (factors_of(loss, inside, border, num_examples=n) for n in (N // 2, N))
    for name in weights():  # the rows are the same, but A has a factor 1/n and G has n^2
        np.testing.assert_allclose(2 * many[name].A, few[name].A, rtol=1e-10)
        np.testing.assert_allclose(many[name].G, 4 * few[name].G, rtol=1e-10)

    def head(p, x):
        hidden = jnp.tanh(x @ p["u"])
        return mean_square(hidden) + mean_square(hidden[:2] @ p["v"])

    found, x = factors_of(head, inside, num_examples=N)["v"], jnp.tanh(inside @ weights()["u"])[:2]
    np.testing.assert_allclose(found.A, x.T @ x / N, rtol=1e-10)
    g = x @ weights()["v"]  # for a mean over two rows
    np.testing.assert_allclose(found.G, g.T @ g * N / (2 / N), rtol=1e-10)
    with pytest.raises(ValueError, match=f"num_examples={N + 1} is more than the {N} position"):
        factors_of(head, inside, num_examples=N + 1)
