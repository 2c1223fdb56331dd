"""Check losses of several batches: each marked output counts with its weight, in all kinds of statistics."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kfac
from checking import normal
from exact import dense

LARGE, SMALL, WEIGHT = 96, 32, 2.0


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def problem():
    """Return a trunk and two heads. The small head has 32 rows instead of 96, and its loss counts twice."""
    rng = np.random.default_rng(0)
    shapes = {"large": (8, 4), "small": (8, 3), "trunk": (6, 8)}
    params = {name: jnp.asarray(rng.normal(size=shape) / 2) for name, shape in shapes.items()}
    rows = {"large": (LARGE, 4), "small": (SMALL, 3)}
    batch = {
        k: (jnp.asarray(rng.normal(size=(n, 6))), jnp.asarray(rng.normal(size=(n, d)))) for k, (n, d) in rows.items()
    }
    return params, batch


def term(params, name, pair, marked=True, scanned=False):
    def residual(x, y):
        z = jnp.tanh(x @ params["trunk"]) @ params[name]
        if marked:
            z = kfac.mark_output(z, "gaussian", weight=1.0 if name == "large" else WEIGHT * LARGE / SMALL)
        return 0.5 * jnp.sum((z - y) ** 2, axis=-1)

    if scanned:
        return jax.lax.map(
            lambda xy: residual(*xy).mean(), jax.tree.map(lambda x: x.reshape(4, -1, x.shape[-1]), pair)
        ).mean()
    return residual(*pair).mean()


def loss_fn(params, batch, **options):
    return term(params, "large", batch["large"], **options) + WEIGHT * term(params, "small", batch["small"], **options)


def truth(params, batch):
    """Return the second moments of per-row gradients. Rows of the small batch count twice."""
    blocks = {}
    for name, weight in (("large", 1.0), ("small", WEIGHT)):
        pairs = jax.tree.map(lambda x: x[:, None], batch[name])
        of_one = jax.grad(lambda p, pair, name=name: term(p, name, pair, False))
        grads = jax.tree.map(np.asarray, jax.jit(jax.vmap(of_one, (None, 0)))(params, pairs))
        for leaf, g in grads.items():
            rows = g.reshape(len(g), -1)  # in the order of kron(A, G), because kernels are [d_in, d_out]
            blocks[leaf] = blocks.get(leaf, 0) + weight * rows.T @ rows / len(rows)
    return blocks


@pytest.mark.slow
@pytest.mark.parametrize("scanned", [False, True])
def test_empirical_statistics(scanned):
    params, batch = problem()
    loss = functools.partial(loss_fn, scanned=scanned)
    layers = kfac.find_layers(loss, params, batch)
    measure = jax.jit(kfac.value_and_grad(loss, layers, num_examples=LARGE))
    value, grads, factors = measure(params, batch)
    expected = jax.jit(jax.value_and_grad(functools.partial(loss_fn, marked=False)))(params, batch)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-10), (value, grads), expected)
    for name, weight in (("large", 1.0), ("small", WEIGHT)):
        x, y = batch[name]
        a = jnp.tanh(x @ params["trunk"])
        error = a @ params[name] - y
        # The weight multiplies the means' product: mean(a a^T) times mean(g g^T).
        product = weight * jnp.kron(a.T @ a / len(a), error.T @ error / len(a))
        np.testing.assert_allclose(dense(factors[name]), product, rtol=1e-9, atol=1e-12)


def test_the_small_head_has_the_size_that_it_has():
    """Check that the small head's block has the size of the Gauss-Newton matrix."""
    params, batch = problem()

    layers = kfac.find_layers(loss_fn, params, batch)
    measure = kfac.value_and_grad(loss_fn, layers, num_examples=LARGE, fisher="expected")
    _, _, factors = jax.jit(measure)(params, batch, fisher_key=jax.random.key(0))
    block = factors["small"]
    size = float(jnp.trace(block.A) * jnp.trace(block.G))
    a = jnp.tanh(batch["small"][0] @ params["trunk"])
    of_gauss_newton = WEIGHT * 3 * float(jnp.sum(a**2)) / SMALL
    np.testing.assert_allclose(size, of_gauss_newton, rtol=1e-10)


@pytest.mark.parametrize("given", [{}, {"num_examples": LARGE}])
@pytest.mark.parametrize("apart", [False, True])
def test_without_marks_the_message_says_to_mark(given, apart):
    params, batch = problem()
    loss = functools.partial(loss_fn, marked=False)
    args, named = ((batch["large"], batch["small"]), {"batch_argnums": (1, 2)}) if apart else ((batch,), {})
    joined = (lambda p, large, small: loss(p, {"large": large, "small": small})) if apart else loss
    layers = kfac.find_layers(joined, params, *args, **named)
    with pytest.raises(ValueError, match=r"(?s)may be the 96 .* or the 32 .*Mark the output of each batch") as error:
        jax.eval_shape(kfac.value_and_grad(joined, layers, **given), params, *args)
    assert ("belongs in an argument of its own" in str(error.value)) == (not apart)
    assert "batch_argnums=" not in str(error.value)  # the argument is given already


@pytest.mark.parametrize("first", ["large", "small"])
def test_a_second_batch_without_marks_has_no_rows(first):
    """Check a second batch as an argument of its own. Its weight in the loss is unknown."""
    params, batch = problem()
    second = "small" if first == "large" else "large"
    layers = kfac.find_layers(
        lambda p, a, b: loss_fn(p, {first: a, second: b}, marked=False), params, batch[first], batch[second]
    )
    assert {layer.name: layer.kind for layer in layers} == {
        first: "dense",
        second: "gradient-factors",
        "trunk": "gradient-factors",
    }
    why = "without kfac.mark_output(..., weight=), or batch_argnums=(1, 2) if it is as long"
    assert why in str(layers)


def test_two_batches_of_one_length_have_rows_where_both_are_named():
    """Check a discriminator's loss of real examples and equally many other examples."""
    params, batch = problem()
    x = batch["large"][0]

    def loss(p, real, others):
        scores = (jnp.tanh(z @ p["trunk"]) @ p["large"] for z in (real, others))
        return sum(jax.nn.softplus(sign * s).mean() for sign, s in zip((-1, 1), scores, strict=True))

    params = {name: params[name] for name in ("trunk", "large")}
    layers = [kfac.find_layers(loss, params, x, x[::-1], batch_argnums=k) for k in (None, (1, 2))]
    assert [[layer.kind for layer in found] for found in layers] == [["gradient-factors"] * 2, ["dense"] * 2]


@pytest.mark.parametrize("marked", [False, True])
def test_a_penalty_of_products_with_a_constant(marked):
    """Check that a layer's note mentions a penalty without a mark, and that a marked penalty has its own rows."""
    params, batch = problem()

    def loss(p, x):
        z, r = jnp.tanh(x @ p["trunk"]) @ p["large"], jnp.ones((1, 6)) @ p["trunk"]
        if marked:
            z, r = kfac.mark_output(z, "residual"), kfac.mark_output(r, "residual", weight=0.2 * LARGE)
        return 0.5 * jnp.mean(jnp.sum(z**2, -1)) + 0.1 * jnp.sum(r**2)

    params = {name: params[name] for name in ("trunk", "large")}
    layers = kfac.find_layers(loss, params, batch["large"][0])
    assert layers["trunk"].kind == ("dense" if marked else "gradient-factors")
    why = "dot_general: it reads a constant [1, 6] too, as a penalty does, without kfac.mark_output(..., weight=)"
    assert (layers["trunk"].note == why) == (not marked)


@pytest.mark.slow
@pytest.mark.parametrize("laplacian", ["nested", "hessian", "jacfwd"])
def test_a_differential_equation_and_its_boundary(laplacian):
    """Check that kernels have exact rows from both batches, and from the first batch's constant tangents."""
    inner, edge = (jnp.asarray(np.random.default_rng(k).normal(size=(n, 2))) for k, n in ((1, 12), (2, 5)))
    keys = jax.random.split(jax.random.key(0), 2)
    params = {
        "a": {"w": jax.random.normal(keys[0], (2, 6)), "b": jnp.zeros(6)},
        "out": jax.random.normal(keys[1], (6, 1)),
    }

    def second(u, x, v):
        return jax.jvp(lambda x: jax.jvp(u, (x,), (v,))[1], (x,), (v,))[1]

    def loss(params, points):
        def u(x):
            return (jnp.tanh(x @ params["a"]["w"] + params["a"]["b"]) @ params["out"])[0]

        forms = {
            "nested": lambda x: sum(second(u, x, v) for v in jnp.eye(2)),
            "hessian": lambda x: jnp.trace(jax.hessian(u)(x)),
            "jacfwd": lambda x: jnp.trace(jax.jacfwd(jax.jacfwd(u))(x)),
        }
        inside, outside = jax.vmap(forms[laplacian])(points["inner"]), jax.vmap(u)(points["edge"])
        inside = kfac.mark_output(inside[:, None], "residual")
        outside = kfac.mark_output(outside[:, None], "residual", weight=3 * 12 / 5)
        return 0.5 * jnp.sum(inside**2) / 12 + 3 * 0.5 * jnp.sum(outside**2) / 5

    points = {"inner": inner, "edge": edge}
    layers = kfac.find_layers(loss, params, points)
    kinds = {leaf: layer.kind for layer in layers for leaf in layer.params}
    assert kinds == {"a/w": "dense", "out": "dense", "a/b": "gradient-factors" if laplacian == "hessian" else "dense"}
    measure = kfac.value_and_grad(loss, layers, fisher="expected", num_examples=12)
    factors = jax.jit(measure)(params, points, fisher_key=jax.random.key(0))[2]
    if laplacian != "hessian":  # the last kernel reads activations on the boundary and second tangents inside
        w, edge, h = params["a"]["w"], jnp.tanh(edge @ params["a"]["w"]), jnp.tanh(inner @ params["a"]["w"])
        pairs = [(j, k) for j in (0, 1) for k in (0, 1) if j == k or laplacian == "jacfwd"]  # jacfwd makes all pairs
        rows = jnp.concatenate([edge, *(-2 * h * (1 - h**2) * w[j] * w[k] for j, k in pairs)])
        np.testing.assert_allclose(factors["out"].A, rows.T @ rows / 12, rtol=1e-9, atol=1e-12)


def test_weights_are_of_all_that_the_loss_has():
    """Check the error if a part of the loss has no mark, because this part would have no statistics."""
    params, batch = problem()

    def loss(params, batch):
        return term(params, "large", batch["large"], False) + term(params, "small", batch["small"])

    layers = kfac.find_layers(loss, params, batch)
    with pytest.raises(
        ValueError, match=r"weight= of kfac\.mark_output: the loss depends on 'large', but no marked output"
    ):
        jax.eval_shape(kfac.value_and_grad(loss, layers, num_examples=LARGE), params, batch)


def same_heads(params, batch):
    """Return a loss with two terms that read the same kernels. The second term has no mark."""
    first, second = batch["large"], (batch["small"][0], batch["large"][1][:SMALL])
    return term(params, "large", first) + WEIGHT * term(params, "large", second, False)


def second_marked(params, batch):
    z = jnp.tanh(batch["small"][0] @ params["trunk"]) @ params["small"]
    squares = jnp.sum((kfac.mark_output(z, "gaussian") - batch["small"][1]) ** 2, axis=-1)
    return term(params, "large", batch["large"], False) + 0.5 * WEIGHT * squares.mean()


@pytest.mark.parametrize("loss", [functools.partial(loss_fn, marked=False), second_marked, same_heads])
def test_a_closure_of_two_batches_is_not_counted_as_one(loss):
    """Check the error for a second batch in a closure, with `num_examples=` or with a single marked output."""
    params, batch = problem()
    closed, given = lambda p: loss(p, batch), None if loss is second_marked else LARGE
    layers = kfac.find_layers(closed, params)
    with pytest.raises(ValueError, match=r"maybe of a second batch.*Mark|no mark,.*, and mark the other terms too"):
        jax.eval_shape(kfac.value_and_grad(closed, layers, num_examples=given), params)


@pytest.mark.parametrize("marked", [False, True])
def test_a_constant_batch_beside_the_data(marked):
    """Check a constant batch. If it is marked, its rows count. Otherwise its layers have the gradient's own factors."""
    params, batch = problem()
    loss = lambda p, large: loss_fn(p, {**batch, "large": large}, marked=marked)  # noqa: E731
    layers = kfac.find_layers(loss, params, batch["large"])
    assert {layer.kind for layer in layers if layer.name != "large"} == {"dense" if marked else "gradient-factors"}
    found = jax.jit(kfac.value_and_grad(loss, layers, num_examples=LARGE))(params, batch["large"])[2]
    whole = functools.partial(loss_fn, marked=True)
    expected = jax.jit(kfac.value_and_grad(whole, kfac.find_layers(whole, params, batch), num_examples=LARGE))(
        params, batch
    )[2]
    for name in params if marked else ["large"]:
        np.testing.assert_allclose(found[name].A, expected[name].A, rtol=1e-10)
        np.testing.assert_allclose(found[name].G, expected[name].G, rtol=1e-10)


@pytest.mark.parametrize("loss", [second_marked, same_heads])
def test_a_mark_on_one_of_two_terms(loss):
    """Check that a mark does not give the number of examples if another batch has no mark.

    Only layers that read the first batch alone have exact rows.
    """
    params, batch = problem()
    apart = lambda p, large, small: loss(p, {"large": large, "small": small})  # noqa: E731
    args = batch["large"], batch["small"]
    layers = kfac.find_layers(apart, params, *args)
    exact = {"large"} if loss is second_marked else set()
    assert {layer.name for layer in layers if layer.kind == "dense"} == exact
    factors = jax.jit(kfac.value_and_grad(apart, layers))(params, *args)[2]
    a = jnp.tanh(batch["large"][0] @ params["trunk"])
    for name in exact:
        np.testing.assert_allclose(factors[name].A, a.T @ a / LARGE, rtol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("others", [SMALL, LARGE, 2 * LARGE])
@pytest.mark.parametrize("way", ["none", "number", "mark"])
def test_rows_of_the_batch_joined_with_others(way, others):
    params, batch = problem()
    x = batch["large"][0]
    y = jnp.resize(batch["small"][0], (others, x.shape[1]))

    def loss(params, x, y):
        z = jnp.tanh(jnp.concatenate([x, y]) @ params["trunk"]) @ params["large"]
        z = kfac.mark_output(z, "residual") if way == "mark" else z
        return 0.5 * jnp.mean(jnp.sum(z**2, axis=-1))

    layers = kfac.find_layers(loss, params, x, y)
    measure = kfac.value_and_grad(loss, layers, num_examples=LARGE + others if way == "number" else None)
    if way == "none":
        with pytest.raises(ValueError, match=r"reads rows of the batch joined with others\. Pass num_examples="):
            jax.eval_shape(measure, params, x, y)
        return
    factors = measure(params, x, y)[2]
    a = jnp.tanh(jnp.concatenate([x, y]) @ params["trunk"])
    g = a @ params["large"]
    np.testing.assert_allclose(factors["large"].A, a.T @ a / len(a), rtol=1e-10)
    np.testing.assert_allclose(factors["large"].G, g.T @ g / len(a), rtol=1e-10)


def time_major():
    """Return a recurrent network's loss whose sequences have time on the first axis, with labels of the examples."""
    params = {"inner": jnp.ones((3, 4)), "outer": jnp.ones((4, 2))}

    def loss(params, sequences, labels):
        def advance(h, x):
            return jnp.tanh(h + x @ params["inner"]), None

        h, _ = jax.lax.scan(advance, jnp.zeros((sequences.shape[1], 4)), sequences)
        return optax.softmax_cross_entropy_with_integer_labels(h @ params["outer"], labels).mean()

    return loss, params, jnp.ones((5, 6, 3)), jnp.zeros(6, jnp.int32)


def test_find_layers_warns_of_a_time_major_batch():
    loss, params, sequences, labels = time_major()
    with pytest.warns(UserWarning, match=r"the 5 rows of argument 1 count as examples, but argument 2 has 6"):
        kfac.find_layers(loss, params, sequences, labels)
    with pytest.warns(UserWarning, match=r"argument 1\[1\] has 6"):
        kfac.find_layers(lambda params, batch: loss(params, *batch), params, (sequences, labels))


def test_find_layers_refuses_a_named_argument_of_another_length():
    loss, params, sequences, labels = time_major()
    with pytest.raises(ValueError, match=r"batch_argnums=\(1, 2\) names argument 2, which has no array"):
        kfac.find_layers(loss, params, sequences, labels, batch_argnums=(1, 2))
    assert kfac.find_layers(loss, params, sequences, labels, batch_argnums=1).num_examples == 5


def test_find_layers_with_named_arguments_takes_hidden_examples():
    """Check that named arguments are no error where `num_examples` is needed in any case."""

    def loss(params, x, y):
        return jnp.sum((x.reshape(8, 3) @ params["w"] - y) ** 2) / 8

    params, x, y = {"w": jnp.ones((3, 2))}, jnp.ones((8, 3)), jnp.ones((8, 2))
    layers = kfac.find_layers(loss, params, x, y, batch_argnums=(1, 2))
    assert layers.num_examples is None
    _, _, factors = jax.jit(kfac.value_and_grad(loss, layers, num_examples=8))(params, x, y)
    np.testing.assert_allclose(factors["w"].A, np.ones((3, 3)))


def test_find_layers_takes_a_batch_of_which_the_loss_reads_only_the_length():
    """A generator draws as many samples as there are real examples. Another argument has another length."""

    def loss(params, real, anchors, key):
        drawn = jnp.tanh(jax.random.normal(key, real.shape) @ params["hidden"]) @ params["out"]
        return jnp.mean(jnp.sum(jnp.tanh(drawn @ anchors.T) ** 2, -1))

    key = jax.random.key(0)
    params = {"hidden": normal(0, 3, 4), "out": normal(1, 4, 3)}
    found = kfac.find_layers(loss, params, jnp.ones((8, 3)), normal(2, 5, 3), key)
    assert found.num_examples == 8
    assert [layer.kind for layer in found] == ["dense", "dense"]
