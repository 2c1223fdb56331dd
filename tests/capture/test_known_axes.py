"""Check that the example axis is known, even if another axis has the same length."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import kfac
from checking import check_moments, normal, slow
from oracle import relative_error
from zoo.specimens import N, Specimen, check, cross_entropy, data, tokens, tree

pytestmark = pytest.mark.usefixtures("x64")
D, H = 4, 5
LENGTHS = N, 3  # as long as the batch, and another length


def mean_square(y):
    return jnp.mean(jnp.sum(jnp.sin(y).reshape(len(y), -1) ** 2 + y.reshape(len(y), -1), -1))


def energies_and_forces(t):
    """Return a model of `t` atoms' total energy and forces."""

    def loss(p, b):
        def energy(x):
            return jnp.sum(jnp.tanh(x @ p["w"] + p["b"]) @ p["v"])

        values, forces = jax.vmap(jax.value_and_grad(energy))(b["x"])
        return jnp.mean(values**2 + jnp.sum(forces**2, (1, 2)))

    return loss, tree(w=(D, H), b=(H,), v=(H,)), {"x": data(0, t, D)}


def gate(t):
    """Return a model that multiplies the sequence by a matrix of ones."""

    def loss(p, b):
        return mean_square(jnp.tanh(jnp.ones((t, t)) @ b["x"] @ p["w"]) @ p["v"])

    return loss, tree(w=(D, H), v=(H, 2)), {"x": data(0, t, D)}


def score(t):
    """Return a model of a sequence's score, which is the gradient of its energy."""

    def loss(p, b):
        def energy(x):
            return jnp.sum(jnp.tanh(x @ p["w"]) @ p["v"])

        return jnp.mean(jnp.sum(jax.grad(energy)(b["x"]) ** 2, (1, 2)))

    return loss, tree(w=(D, H), v=(H, 2)), {"x": data(0, t, D)}


def states_of_nodes(t):
    """Return a model with a recurrent state for each of `t` nodes. All examples share the first state of zeros."""

    def loss(p, b):
        def one(x):
            h = jnp.zeros((t, H))
            for _ in range(2):
                h = jnp.tanh(x @ p["w"] + h @ p["u"])
            return h

        return mean_square(jax.vmap(one)(b["x"]) @ p["v"])

    return loss, tree(w=(D, H), u=(H, H), v=(H, 2)), {"x": data(0, t, D)}


def slots(t):
    """Return a model whose first slots are constants that attend to the inputs of each example."""
    first = jnp.asarray(np.random.default_rng(3).normal(size=(t, D)))

    def loss(p, b):
        def one(x):
            weights = jax.nn.softmax((first @ p["q"]) @ (x @ p["k"]).T, 0)
            return weights @ (x @ p["v"])

        return mean_square(jax.vmap(one)(b["x"]))

    return loss, tree(q=(D, H), k=(D, H), v=(D, 2)), {"x": data(0, 7, D)}


def scaled_ones(t):
    def loss(p, b):
        return mean_square(jnp.tanh(b["x"] @ p["w"]) * (jnp.ones((t, 1)) * p["scale"]))

    return loss, tree(w=(D, H), scale=(H,)), {"x": data(0, t, D)}


def constants_over_heads(t):
    """Return a model that broadcasts a product of constants over `t` heads."""
    basis = jnp.asarray(np.random.default_rng(4).normal(size=(3, D)))

    def loss(p, b):
        keys = jnp.broadcast_to((basis @ p["k"])[None, :, None], (1, 3, t, H))
        q = (b["x"] @ p["q"]).reshape(-1, 7, t, H)
        return mean_square(q[:, :3] * keys)

    return loss, tree(q=(D, t * H), k=(D, H)), {"x": data(0, 7, D)}


def batch_ensemble(t):
    """Return a model of `t` members that share a kernel. Each has its own vectors before and after the kernel."""

    def loss(p, b):
        x = b["x"][:, None] * p["r"]
        h = jnp.tanh((x @ p["w"]) * p["s"])
        return mean_square(jnp.einsum("nth,thk->ntk", h, p["heads"]))

    return loss, tree(w=(D, H), r=(t, D), s=(t, H), heads=(t, H, 2)), {"x": data(0, D)}


def time_major(t):
    """Return a model whose layers see `[time, n, features]`, with a scale and a shift."""

    def loss(p, b):
        x = jnp.swapaxes(b["x"], 0, 1)
        h = jnp.tanh((x @ p["w"] + p["b"]) * p["scale"] + p["shift"])
        return cross_entropy(jnp.swapaxes(h @ p["v"], 0, 1), b["y"])

    batch = {"x": data(0, t, D), "y": tokens(0, t, below=3)}
    return loss, tree(w=(D, H), b=(H,), scale=(H,), shift=(H,), v=(H, 3)), batch


def attention(t):
    def loss(p, b):
        q, k, v = (jnp.einsum("ntd,dhk->nhtk", b["x"], p[name]) for name in "qkv")
        y = jnp.einsum("nhts,nhsk->nthk", jax.nn.softmax(q @ k.swapaxes(-1, -2)), v)
        return mean_square(jnp.einsum("nthk,hkd->ntd", y, p["o"]))

    return loss, tree(q=(D, t, 2), k=(D, t, 2), v=(D, t, 2), o=(t, 2, D)), {"x": data(0, t, D)}


def one_by_one(t):
    """Return a model that maps over single examples with `t` positions, a scale, a shift and a table."""

    def loss(p, b):
        def one(x):
            h = jnp.tanh((x @ p["w"]) * p["scale"] + p["shift"])
            return jnp.sum((h + p["table"]) ** 2)

        return jnp.mean(lax.map(one, b["x"]))

    return loss, tree(w=(D, H), scale=(H,), shift=(H,), table=(t, H)), {"x": data(0, t, D)}


def in_chunks(t):
    """Return a model that maps over pairs of examples."""

    def loss(p, b):
        def some(x):
            return jnp.tanh((x @ p["w"]) * p["scale"] + p["shift"])

        return mean_square(lax.map(some, b["x"].reshape(-1, 2, t, D)).reshape(-1, t, H))

    return loss, tree(w=(D, H), scale=(H,), shift=(H,)), {"x": data(0, t, D)}


def rows_of_all(t):
    """Return a model with positions and examples on the same axis."""

    def loss(p, b):
        h = jnp.tanh((b["x"].reshape(-1, D) @ p["w"]) * p["scale"] + p["shift"])
        return mean_square(h.reshape(-1, t, H))

    return loss, tree(w=(D, H), scale=(H,), shift=(H,)), {"x": data(0, t, D)}


def other_rows_of_all(t):
    """Return a model with positions and examples on the same axis, where examples vary faster."""

    def loss(p, b):
        h = jnp.tanh((b["x"].swapaxes(0, 1).reshape(-1, D) @ p["w"]) * p["scale"] + p["shift"])
        return mean_square(h.reshape(t, -1, H).swapaxes(0, 1))

    return loss, tree(w=(D, H), scale=(H,), shift=(H,)), {"x": data(0, t, D)}


GRADIENT = {slots: ("q",)}
MODELS = (
    energies_and_forces, gate, score, states_of_nodes, slots, scaled_ones, constants_over_heads, batch_ensemble,
    time_major, attention, one_by_one, rows_of_all, other_rows_of_all,
)  # fmt: skip


@pytest.mark.parametrize("length", [N, slow(3)])
@pytest.mark.parametrize("model", MODELS)
def test_statistics_are_those_of_each_example_alone(model, length):
    alone = model is not batch_ensemble  # brute force on a single example sees no vectors there
    check(Specimen(model.__name__, "", lambda: model(length), alone=alone, gradient=GRADIENT.get(model, ())))


@pytest.mark.parametrize("length", LENGTHS)
def test_examples_in_chunks_are_those_of_the_batch(length):
    def together(p, b):
        return mean_square(jnp.tanh((b["x"] @ p["w"]) * p["scale"] + p["shift"]))

    chunks, params, batch = in_chunks(length)
    found = [
        jax.jit(kfac.value_and_grad(loss, kfac.find_layers(loss, params, batch)))(params, batch)
        for loss in (chunks, together)
    ]
    for one, other in zip(*map(jax.tree.leaves, found), strict=True):
        assert relative_error(one, other) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("model", [rows_of_all, other_rows_of_all, time_major, attention])
@pytest.mark.parametrize("length", [LENGTHS[-1], *LENGTHS[:-1]])
def test_moments_and_thinned_statistics_are_those_of_examples(model, length):
    """Check that thinned statistics match the statistics of every second example alone. Also check moments."""
    loss, params, batch = model(length)
    layers = kfac.find_layers(loss, params, batch)
    assert all(layer.supports_ekfac for layer in layers if layer.kind == "dense")
    check_moments(loss, params, (batch,))
    thinned = jax.jit(kfac.statistics(loss, layers, fraction=1 / 2))(params, batch)
    half = jax.tree.map(lambda x: x[::2][: len(x) // 2], batch)
    alone = jax.jit(kfac.value_and_grad(loss, layers))(params, half)[2]
    for layer in layers:
        if layer.kind == "dense":
            assert relative_error(thinned[layer.name].A, alone[layer.name].A) < 1e-12
        else:
            assert relative_error(thinned[layer.name].F, alone[layer.name].F) < 1e-12


def test_layers_are_the_same_for_a_batch_of_one():
    for model in MODELS:
        loss, params, batch = model(3)
        layers = kfac.find_layers(loss, params, batch)
        one = kfac.find_layers(loss, params, jax.tree.map(lambda x: x[:1], batch))
        assert layers.layers == one.layers, model.__name__


# -- finding the batch -------------------------------------------------------------------------------------------------


def weights():
    return {"w": normal(1, D, H), "scale": normal(2, H), "v": normal(3, H, 2)}


def network(p, x):
    return jnp.tanh(x @ p["w"]) * p["scale"] @ p["v"]


def test_the_first_argument_is_the_batch_and_others_where_only_they_can_be():
    def first(p, x, offset):
        return mean_square(network(p, x) + offset)

    def several(p, state, x, y):
        return jnp.mean(jnp.sum((network(p, x) - y) ** 2, -1)) + 0 * jnp.sum(state["mean"])

    x, y = normal(4, N, D), normal(5, N, 2)
    found = kfac.find_layers(first, weights(), x, normal(6, 2))
    assert (found.batch_argnums, found.num_examples) == ((1,), N) and "shared by all" not in repr(found)
    found = kfac.find_layers(several, weights(), {"mean": jnp.zeros(3)}, x, y)
    assert (found.batch_argnums, found.num_examples) == ((2, 3), N)
    named = kfac.find_layers(
        lambda p, *, x, y: several(p, {"mean": jnp.zeros(3)}, x, y), weights(), kwargs={"x": x, "y": y}
    )
    assert named.batch_argnums == ("x", "y") and named.layers == found.layers


def test_leaves_of_another_length_are_shared_and_named():
    def loss(p, b):
        return mean_square(network(p, b["x"]) * b["weights"])

    layers = kfac.find_layers(loss, weights(), {"x": normal(4, N, D), "y": normal(5, N), "weights": normal(6, 2)})
    assert layers.num_examples == N
    assert "shared by all examples: argument 1['weights']" in repr(layers)


def test_a_loss_with_a_batch_size_written_into_it_is_told_so():
    def loss(p, x):
        return mean_square(network(p, x.reshape(N, D)))

    layers = kfac.find_layers(loss, weights(), normal(4, N, D))
    assert "cannot be traced with 12 examples in argument 1" in repr(layers)
    assert layers["scale"].kind == "gradient-factors" and layers["w"].kind == "dense"
    with pytest.raises(ValueError, match=r"cannot be traced with 12 .*Pass num_examples= .*kfac.mark_output"):
        kfac.value_and_grad(loss, layers)(weights(), normal(4, N, D))
    found = jax.jit(kfac.value_and_grad(loss, layers, num_examples=N))(weights(), normal(4, N, D))[2]
    plain = lambda p, x: mean_square(network(p, x))  # noqa: E731
    expected = kfac.value_and_grad(plain, kfac.find_layers(plain, weights(), normal(4, N, D)))(
        weights(), normal(4, N, D)
    )[2]
    for name in ("w", "v"):
        assert relative_error(found[name].A, expected[name].A) < 1e-12
        assert relative_error(found[name].G, expected[name].G) < 1e-12


def test_another_program_at_twice_the_size_is_told_so():
    def loss(p, x):
        return sum(mean_square(network(p, row[None])) for row in x) / len(x)

    layers = kfac.find_layers(loss, weights(), normal(4, N, D))
    assert "with 12 examples in argument 1 the loss is another program" in repr(layers)


def test_batch_argnums_are_checked():
    def loss(p, x, y):
        return mean_square(network(p, x) * y)

    x = normal(4, N, D)
    for wrong in (0, 3, "x", (1, 4)):
        with pytest.raises(ValueError, match="batch_argnums"):
            kfac.find_layers(loss, weights(), x, x[:, :2], batch_argnums=wrong)
    assert kfac.find_layers(loss, weights(), x, x[:, :2], batch_argnums=(1, -1)).batch_argnums == (1, 2)


# -- rows that the data choose, and lengths that agree by chance -------------------------------------------------------

N6, DIM, WIDE = 6, 4, 5


def drawn(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def small():
    return {"w": drawn(0, DIM, WIDE), "s": drawn(1, WIDE), "v": drawn(2, WIDE, 2)}


def scaled(p, x):
    return jnp.tanh(x @ p["w"]) * p["s"]


def squares(y):
    return jnp.mean(jnp.sum(jnp.sin(y) ** 2 + y, -1))


def by_an_index(p, b):
    return squares(jnp.sin(scaled(p, b["x"])[b["i"]] * p["s"]) @ p["v"])


def scattered(p, b):
    h = scaled(p, b["x"])
    return squares(jnp.sin(jnp.zeros_like(h).at[jnp.argsort(h[:, 0])].set(h) * p["s"]) @ p["v"])


def beside_constants(p, b):
    h = scaled(p, b["x"])
    return squares(jnp.sin(jax.nn.elu(h[jnp.argsort(h[:, 0])]) * p["s"]) @ p["v"])


def the_first_of_all(p, b):
    rows = b["t"].reshape(-1, DIM)
    return squares(scaled(p, rows[jax.lax.top_k(rows[:, 0], len(b["t"]))[1]]) @ p["v"])


def dispatched(p, b):
    x = b["x"]
    to = (x[:, 0] > 0).astype(int)
    slot = (jnp.cumsum(jax.nn.one_hot(to, 2, dtype=int), 0) - 1)[jnp.arange(len(x)), to]
    return squares(scaled(p, jnp.zeros((2, *x.shape)).at[to, slot].set(x))[to, slot] @ p["v"])


@pytest.mark.parametrize("loss", [by_an_index, scattered, beside_constants, the_first_of_all, dispatched])
def test_rows_that_data_choose_are_in_no_known_order(loss):
    batch = {"x": drawn(3, N6, DIM), "t": drawn(4, N6, 3, DIM), "i": jnp.asarray([3, 0, 1, 5, 2, 4])}
    layers = kfac.find_layers(loss, small(), batch)
    assert (
        layers["s"].kind == "gradient-factors" and layers["v"].kind == "dense" and not layers["v"].has_example_gradients
    )


def test_one_position_of_each_example_is_in_their_order():
    def loss(p, x, k):
        return squares((scaled(p, x)[jnp.arange(len(x)), k] * p["s"]) @ p["v"])

    layers = kfac.find_layers(loss, small(), drawn(4, N6, 3, DIM), jnp.asarray([0, 1, 2, 0, 1, 2]))
    assert layers["s"].kind == "unitwise" and layers["v"].has_example_gradients


@pytest.mark.parametrize("anchors", [N6, 7])
def test_an_argument_that_all_share_may_be_as_long_as_the_batch(anchors):
    def loss(p, x, y, c):
        return jnp.mean((jnp.sum(jnp.sin(jnp.tanh(x @ p["w"]) @ (jnp.tanh(c @ p["q"]) * p["s"]).T), 1) - y) ** 2)

    params = {**small(), "q": drawn(5, DIM, WIDE)}
    layers = kfac.find_layers(loss, params, drawn(3, N6, DIM), drawn(6, N6), drawn(7, anchors, DIM))
    assert layers.batch_argnums == (1, 2)
    assert {layer.name: layer.kind for layer in layers} == {
        "q": "gradient-factors",
        "s": "gradient-factors",
        "v": "skipped",
        "w": "dense",
    }


@pytest.mark.parametrize("times", [5, N6])
def test_a_mask_beside_the_batch_may_be_as_long(times):
    def loss(p, x, y, m):
        return jnp.mean((jnp.einsum("ts,nsd->ntd", m, scaled(p, x) @ p["v"]).sum(1) - y) ** 2)

    layers = kfac.find_layers(loss, small(), drawn(3, N6, times, DIM), drawn(6, N6, 2), jnp.ones((times, times)))
    assert layers["s"].kind == "unitwise" and layers.num_examples == N6


def test_of_two_lengths_none_is_assumed():
    graphs = {"x": drawn(3, 10, DIM), "seg": jnp.asarray([0, 0, 1, 1, 1, 2, 3, 3, 3, 3]), "y": drawn(6, 4, 2)}

    def loss(p, b):
        h = jax.ops.segment_sum(scaled(p, b["x"]), b["seg"], num_segments=len(b["y"]))
        return squares(h @ p["v"] - b["y"])

    layers = kfac.find_layers(loss, small(), graphs)
    assert layers.num_examples is None and "the 10 of argument 1 or the 4 of argument 1" in repr(layers)


def test_running_averages_before_the_batch_are_not_tried_one_by_one():
    """Check that averages before the batch are not tried separately.

    Each trial traces the loss, and a residual network has a hundred averages.
    """
    traces = []

    def loss(p, stats, x, y):
        traces.append(0)
        for mean in stats:
            x = x - mean
        return jnp.mean((network(p, x) - y) ** 2)

    stats = [np.zeros(D, np.float32)] * 20
    layers = kfac.find_layers(loss, weights(), stats, normal(0, N, D), normal(1, N, 2))
    assert layers.batch_argnums == (2, 3) and layers.num_examples == N
    assert len(traces) < 8
