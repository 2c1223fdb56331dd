"""Compare the mean of many `fisher="sampled"` draws with the exact Fisher factors in closed form."""

from __future__ import annotations

import functools
import gc
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import kfac
from checking import check_vectors, normal
from kfac.types import Kronecker
from likelihoods import LIKELIHOODS, nll, targets, value_gradients
from oracle import Hook, relative_error, truth

N, T, D, HIDDEN, OUT = 6, 3, 5, 4, 3


# -- the oracle: one backward pass for every row and every value of its target --------------------------------------


def exact_factors(model, likelihood, params, x, n):
    """Return `A` and `G` by layer and `F` by vector, as expectations over the targets that the model predicts."""
    recorder = Hook()
    jax.eval_shape(lambda params, x: model(recorder, params, x), params, x)
    zeros = {key: np.zeros(*entry) for key, entry in recorder.shapes.items()}

    def of(zeros):
        hook = Hook(zeros)
        return model(hook, params, x), hook.inputs

    z, inputs = jax.tree.map(np.asarray, compiled(of)(zeros))
    pull = compiled(lambda g: jax.vjp(of, zeros, has_aux=True)[1](g)[0])
    sums = {}
    for row in np.ndindex(*z.shape[:-1]):
        for weight, gradient in value_gradients(likelihood, z[row]):
            cotangent = np.zeros_like(z)
            cotangent[row] = gradient / n
            for key, g in pull(cotangent).items():
                g = np.asarray(g)
                if key.endswith("@"):
                    sums[key] = sums.get(key, 0.0) + weight * n * np.square(g).sum(0)
                else:
                    rows = g.reshape(-1, g.shape[-1])
                    sums[key] = sums.get(key, 0.0) + weight * rows.T @ rows
    found = {}
    for key, total in sums.items():
        name = key[:-1] if key.endswith("@") else key.split("#")[0]
        if key.endswith("@"):
            found[name] = total
            continue
        a = np.asarray(inputs[key]).reshape(-1, inputs[key].shape[-1])
        _, bias, _ = recorder.static[key]
        a = np.concatenate([a, np.ones((len(a), 1))], axis=1) if bias else a
        found[name] = (a.T @ a / n, total * n / (len(a) / n))
    return found


# -- models -----------------------------------------------------------------------------------------------------------


def network(hook, p, x):
    x = jnp.tanh(hook.layer("in", x, x @ p["in"]["w"] + p["in"]["b"], bias=True))
    x = x * hook.vector("scale", p["scale"], x.shape[0]).reshape(x.shape[0], *[1] * (x.ndim - 2), HIDDEN)
    return hook.layer("out", x, x @ p["out"])


def mixing(hook, p, x):
    """Mix the tokens of each example, and predict once for each example."""
    x = network(hook, p, x)
    return x.mean(1) + 0.5 * jnp.tanh(x[:, 0] * x[:, -1])


def parameters(dtype=np.float64):
    shapes = {"in": {"w": (D, HIDDEN), "b": (HIDDEN,)}, "scale": (HIDDEN,), "out": (HIDDEN, OUT)}
    flat, tree = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    return jax.tree.unflatten(tree, [normal(k, *shape, dtype=dtype) for k, shape in enumerate(flat)])


def loss_of(model, likelihood, hook=None):
    def loss(p, x):
        z = kfac.mark_output(model(hook or Hook(), p, x), likelihood)
        return nll(likelihood, z, targets(likelihood, z)).mean()

    return loss


def measured(loss, params, *args, fisher="sampled", **options):
    rules = options.pop("rules", None)
    return kfac.value_and_grad(loss, kfac.find_layers(loss, params, *args, rules=rules), fisher=fisher, **options)


def function(*args, **options):
    return jax.jit(measured(*args, **options))


def compiled(fn):
    return jax.jit(fn)


def many(fn, params, *args, draws, key=0):
    """Return the mean and the standard error of the factors over `draws` keys."""
    keys = jax.random.split(jax.random.key(key), (draws // 100, 100))

    @compiled
    def moments(keys):
        def some(keys):
            factors = jax.vmap(lambda key: fn(params, *args, fisher_key=key)[2])(keys)
            return jax.tree.map(lambda f: (f.sum(0), jnp.square(f).sum(0)), dict(factors))

        return jax.tree.map(lambda s: s.sum(0), lax.map(some, keys))

    def finish(pair):
        mean, square = (np.asarray(s) / draws for s in pair)
        return mean, np.sqrt(np.maximum(square - mean**2, 0) / draws)

    return jax.tree.map(finish, moments(keys), is_leaf=lambda x: isinstance(x, tuple))


def assert_within(found, expected, sigmas=5.0):
    """Check that entries are within `sigmas` standard errors of their expectations, and that the errors are small."""
    mean, error = found
    scale = np.max(np.abs(expected))
    assert np.all(np.abs(mean - expected) <= sigmas * error + 1e-9 * scale)
    assert np.max(error) < 0.05 * scale


def assert_unbiased(found, expected):
    assert set(found) == set(expected)
    for name, block in found.items():
        if isinstance(block, Kronecker):
            a, g = expected[name]
            assert relative_error(block.A[0], a) < 1e-9
            assert_within(block.G, g)
        else:
            assert_within(jax.tree.map(lambda x: x.ravel(), block.F), expected[name])


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_the_mean_of_many_draws_is_the_exact_fisher(x64, likelihood):
    params, x = parameters(), normal(9, N, D)
    found = many(function(loss_of(network, likelihood), params, x), params, x, draws=4000)
    assert_unbiased(found, exact_factors(network, likelihood, params, x, N))


def test_the_loss_is_a_mean_over_tokens_unless_the_user_says_otherwise(x64):
    """Check a loss over tokens with their own targets.

    For vectors, the gradients of a sequence are summed before they are squared.
    """
    params, x = parameters(), normal(9, N, T, D)
    loss = loss_of(network, "categorical")

    def by_token(hook, p, x):
        return network(hook, p, x.reshape(-1, D))

    found = many(function(loss, params, x), params, x, draws=3000)
    assert_unbiased(found, exact_factors(by_token, "categorical", params, x, N * T))
    # With n = N, an example's log-likelihood is the sum over its tokens, so the tokens are positions.
    found = many(function(loss, params, x, num_examples=N), params, x, draws=3000)
    assert_unbiased(found, exact_factors(network, "categorical", params, x, N))


def test_one_prediction_for_many_positions(x64):
    params, x = parameters(), normal(9, N, T, D)
    found = many(function(loss_of(mixing, "gaussian"), params, x), params, x, draws=4000)
    assert_unbiased(found, exact_factors(mixing, "gaussian", params, x, N))


@pytest.mark.slow
def test_the_gradients_own_factors_are_not_drawn(x64):
    """Check that a leaf without exact rows is not in the factors."""
    params, x = {"w": normal(0, D, OUT), "added": normal(1, D, OUT)}, normal(9, N, D)

    def loss(p, x):
        z = kfac.mark_output(x @ p["w"] + x @ jnp.cumsum(p["added"], 0), "categorical")
        return nll("categorical", z, targets("categorical", z)).mean()

    assert kfac.find_layers(loss, params, x)["added"].kind == "gradient-factors"
    assert list(measured(loss, params, x)(params, x, fisher_key=jax.random.key(0))[2]) == ["w"]


def test_two_outputs_are_independent_given_the_input(x64):
    params, x = {"left": normal(0, D, 2), "right": normal(1, D, OUT), "both": normal(2, D, D)}, normal(9, N, D)

    def heads(p, x):
        h = jnp.tanh(x @ p["both"])
        return h @ p["left"], h @ p["right"]

    def loss(p, x):
        left, right = heads(p, x)
        left, right = kfac.mark_output(left, "gaussian"), kfac.mark_output(right, "categorical")
        return jnp.mean(jnp.sum(left**2, -1) - jax.nn.log_softmax(right)[:, 0])

    found = many(function(loss, params, x), params, x, draws=4000)

    def alone(head):
        def model(hook, p, x):
            h = jnp.tanh(hook.layer("both", x, x @ p["both"]))
            return hook.layer(head, h, h @ p[head])

        return exact_factors(model, {"left": "gaussian", "right": "categorical"}[head], params, x, N)

    left, right = alone("left"), alone("right")
    assert_within(found["left"].G, left["left"][1])
    assert_within(found["right"].G, right["right"][1])
    assert_within(found["both"].G, left["both"][1] + right["both"][1])


# -- the loss itself ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_loss_and_gradients_are_those_of_the_loss(likelihood, dtype):
    params, x = parameters(dtype), normal(9, N, T, D, dtype=dtype)
    loss = loss_of(network, likelihood)
    value, grads, factors = compiled(function(loss, params, x))(params, x, fisher_key=jax.random.key(1))
    expected = compiled(jax.value_and_grad(loss))(params, x)
    tolerance = 1e-6 if dtype == jnp.float32 else 2e-2
    for found, other in zip(jax.tree.leaves((value, grads)), jax.tree.leaves(expected), strict=True):
        assert found.dtype == other.dtype
        assert relative_error(found, np.asarray(other, np.float64)) <= tolerance
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(factors))
    # The mark must change neither the value nor the gradient.
    plain = compiled(jax.value_and_grad(lambda p, x: _without_mark(loss, p, x)))(params, x)
    jax.tree.map(np.testing.assert_array_equal, plain, expected)


def _without_mark(loss, *args):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kfac, "mark_output", lambda x, likelihood: x)
        return loss(*args)


@pytest.mark.parametrize(("fisher", "weight"), [("sampled", 1.0), ("expected", 1.0), ("empirical", 2.0)])
def test_mark_output_of_masked_logits(x64, fisher, weight):
    """A class with the logit `-inf` counts as no class."""
    params, x = {"w": normal(1, 4, 5)}, normal(2, 8, 4)

    def loss_fn(params, x, masked):
        logits = x @ params["w"]
        logits = jnp.where(jnp.arange(5) < 3, logits, -jnp.inf) if masked else logits[:, :3]
        logits = kfac.mark_output(logits, "categorical", weight=weight)
        return -jnp.mean(jax.nn.log_softmax(logits)[:, 0])

    def measured(masked):
        loss = functools.partial(loss_fn, masked=masked)
        layers = kfac.find_layers(loss, params, x)
        options = {} if fisher == "empirical" else {"fisher_key": jax.random.key(3)}
        measure = jax.jit(kfac.value_and_grad(loss, layers, fisher=fisher))
        value, grads, factors = measure(params, x, **options)
        assert np.isfinite(value)
        assert np.isfinite(grads["w"]).all()
        return value, grads, factors["w"]

    value, grads, factors = measured(masked=True)
    expected, expected_grads, expected_factors = measured(masked=False)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(grads["w"], expected_grads["w"], rtol=1e-5, atol=1e-7)
    assert np.isfinite(factors.G).all()
    if fisher == "empirical":
        np.testing.assert_allclose(factors.G, expected_factors.G, rtol=1e-5, atol=1e-7)


def test_the_same_key_draws_the_same_targets():
    params, x = parameters(np.float32), normal(9, N, D, dtype=np.float32)
    fn = compiled(function(loss_of(network, "categorical"), params, x))
    first, again, other = (fn(params, x, fisher_key=jax.random.key(k))[2] for k in (5, 5, 6))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert differ(first, other)
    legacy = fn(params, x, fisher_key=jax.random.PRNGKey(5))[2]
    jax.tree.map(np.testing.assert_array_equal, first, legacy)


def differ(a, b):
    """Return whether every `G` differs. `A` does not depend on the targets."""
    return all(not np.allclose(a[name].G, b[name].G, rtol=1e-3) for name in a if hasattr(a[name], "G"))


def test_auxiliary_results_and_other_keywords():
    params, x = parameters(np.float32), normal(9, N, D, dtype=np.float32)

    def loss(p, x, *, scale):
        value = scale * loss_of(network, "gaussian")(p, x)
        return value, {"twice": 2 * value}

    layers = kfac.find_layers(loss, params, x, kwargs={"scale": 1.0}, has_aux=True)
    fn = jax.jit(kfac.value_and_grad(loss, layers, has_aux=True, fisher="sampled"))
    (value, aux), _, factors = fn(params, x, kwargs={"scale": 3.0}, fisher_key=jax.random.key(0))
    np.testing.assert_allclose(aux["twice"], 2 * value, rtol=1e-6)
    # The drawn targets do not depend on the loss.
    _, _, one = fn(params, x, kwargs={"scale": 1.0}, fisher_key=jax.random.key(0))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), factors, one)


# -- places for a mark -------------------------------------------------------------------------------------------------


def _plain(p, x):
    return network(Hook(), p, x)


def _in_jit(p, x):
    return jax.jit(lambda p, x: kfac.mark_output(_plain(p, x), "categorical"))(p, x)


def _in_remat(p, x):
    return jax.checkpoint(lambda p, x: kfac.mark_output(_plain(p, x), "categorical"))(p, x)


def _in_vmap(p, x):
    def one(x):
        return kfac.mark_output(jnp.tanh(x @ p["in"]["w"] + p["in"]["b"]) * p["scale"] @ p["out"], "categorical")

    return jax.vmap(one)(x)


def _in_vmap_over_the_last_axis(p, x):
    def one(z):
        return kfac.mark_output(z, "categorical")

    return jax.vmap(one, in_axes=1, out_axes=1)(_plain(p, x).T).T


def _cast(p, x):
    return kfac.mark_output(_plain(p, x).astype(jnp.float16).astype(jnp.float32), "categorical").astype(jnp.float32)


def _in_a_jitted_gradient(p, x):
    # This loss uses a gradient of its own, so the mark is in a differentiated function.
    z, pull = jax.vjp(lambda z: kfac.mark_output(z, "categorical"), _plain(p, x))
    return z + 0 * pull(jnp.ones_like(z))[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "marked", [_in_jit, _in_remat, _in_vmap, _in_vmap_over_the_last_axis, _cast, _in_a_jitted_gradient]
)
def test_a_mark_is_found_and_the_draws_are_the_same(marked):
    params, x = parameters(np.float32), normal(9, N, D, dtype=np.float32)

    def loss(p, x):
        z = marked(p, x)
        return nll("categorical", z, targets("categorical", z)).mean()

    plain = loss_of(network, "categorical")
    found = compiled(function(loss, params, x))(params, x, fisher_key=jax.random.key(0))
    expected = compiled(function(plain, params, x))(params, x, fisher_key=jax.random.key(0))
    tolerance = 1e-5 if marked is not _cast else 1e-2
    for name in expected[2]:
        for a, b in zip(jax.tree.leaves(found[2][name]), jax.tree.leaves(expected[2][name]), strict=True):
            assert relative_error(a, np.asarray(b, np.float64)) <= tolerance


@pytest.mark.slow
def test_a_mark_inside_a_scan_over_parts_of_a_sequence(x64):
    """Check a scan whose iterations draw the targets of their own parts. `n` must count all parts."""
    params, x = {"w": normal(0, D, HIDDEN), "out": normal(1, HIDDEN, OUT)}, normal(9, T, N, D)

    def loss(p, x):
        @jax.checkpoint
        def step(total, x):
            z = kfac.mark_output(jnp.tanh(x @ p["w"]) @ p["out"], "categorical")
            return total + nll("categorical", z, targets("categorical", z)).sum(), None

        return lax.scan(step, 0.0, x)[0] / (x.shape[0] * x.shape[1])

    def model(hook, p, x):
        x = x.reshape(-1, D)
        h = jnp.tanh(hook.layer("w", x, x @ p["w"]))
        return hook.layer("out", h, h @ p["out"])

    fn = function(loss, params, x)
    found = many(fn, params, x, draws=3000)
    assert_unbiased(found, exact_factors(model, "categorical", params, x, N * T))
    # If all iterations have the same examples, their draws still differ, so the mean over iterations varies less.
    same = jnp.broadcast_to(x[:1], x.shape)
    one = function(loss_of(lambda hook, p, x: model(hook, p, x), "categorical"), params, x[0])
    spread, of_one = (
        float(many(f, params, data, draws=1000)["out"].G[1].max()) for f, data in ((fn, same), (one, x[0]))
    )
    assert spread < 0.75 * of_one


def test_draws_under_another_loss_than_the_likelihood(x64):
    """Check that the statistics use the marked distribution, although the loss is smoothed, weighted and penalised."""
    params, x = parameters(), normal(9, N, D)

    def loss(p, x):
        z = kfac.mark_output(_plain(p, x), "categorical")
        weighted = jnp.mean(jnp.arange(len(x)) * nll("categorical", z, 0.9 * targets("categorical", z) + 0.1 / OUT))
        return weighted + 0.1 * jnp.sum(p["out"] ** 2)

    found = function(loss, params, x)(params, x, fisher_key=jax.random.key(0))[2]
    expected = function(loss_of(network, "categorical"), params, x)(params, x, fisher_key=jax.random.key(0))[2]
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-10), found, expected)


# -- parts and devices -------------------------------------------------------------------------------------------------


def _same_rows(copies):
    """Return several copies of the same examples, so that the parts' statistics differ only by their draws."""
    return parameters(np.float32), jnp.tile(normal(9, N, D, dtype=np.float32), (copies, 1))


@pytest.mark.slow
def test_microbatches_draw_for_themselves():
    params, x = _same_rows(4)
    fn = function(loss_of(network, "categorical"), params, x)
    key = jax.random.key(3)
    found = compiled(kfac.microbatch(fn, 4))(params, x, fisher_key=key)
    single = compiled(fn)
    parts = [single(params, x[:N], fisher_key=jax.random.fold_in(key, k)) for k in range(4)]
    assert differ(parts[0][2], parts[1][2])
    expected = jax.tree.map(lambda *leaves: sum(leaves) / 4, *parts)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), found, expected)
    legacy = compiled(kfac.microbatch(fn, 4))(params, x, fisher_key=jax.random.PRNGKey(3))
    jax.tree.map(np.testing.assert_array_equal, found, legacy)


def test_microbatch_leaves_other_keywords_called_key_alone():
    def loss(p, x, key):
        return jnp.mean((x @ p["w"])[:, key])

    params, x = {"w": normal(0, D, 3, dtype=np.float32)}, normal(9, N, D, dtype=np.float32)
    fn = kfac.value_and_grad(loss, kfac.find_layers(loss, params, x, kwargs={"key": 2}))
    value, _, _ = kfac.microbatch(fn, 2)(params, x, kwargs={"key": 2})
    np.testing.assert_allclose(value, loss(params, x, 2), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mapped", ["pmap", "shard_map", "unchecked shard_map", "two axes"])
def test_devices_draw_for_themselves(mapped):
    params, x = _same_rows(4)
    fn = function(loss_of(network, "categorical"), params, x[:N])
    key = jax.random.key(3)

    def local(params, x, key):
        return jax.tree.map(lambda leaf: leaf[None], fn(params, x, fisher_key=key))

    if mapped == "pmap":
        of_device = jax.pmap(lambda p, x, k: fn(p, x, fisher_key=k), in_axes=(None, 0, None), devices=jax.devices()[:4])
        found = of_device(params, x.reshape(4, N, D), key)
    else:
        shape, names = ((2, 2), ("data", "model")) if mapped == "two axes" else ((4,), ("data",))
        mesh = jax.make_mesh(shape, names, (jax.sharding.AxisType.Auto,) * len(names), devices=jax.devices()[:4])
        same, split = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("data")
        found = jax.jit(
            jax.shard_map(local, mesh=mesh, in_specs=(same, split, same), out_specs=split, check_vma=mapped[0] != "u")
        )(params, x[: N * shape[0]], key)
    expected = function(loss_of(network, "categorical"), params, x[:N])
    factors = jax.device_get(found[2])
    for k in range(2 if mapped == "two axes" else 4):
        own = jax.tree.map(lambda leaf, k=k: leaf[k], factors)
        assert k == 0 or differ(own, jax.tree.map(lambda leaf: leaf[0], factors))
        alone = compiled(expected)(params, x[:N], fisher_key=jax.random.fold_in(key, k))
        value, grads, _ = jax.tree.map(lambda leaf, k=k: leaf[k], jax.device_get(found))
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), (value, grads, own.whole()), alone
        )


def test_sharded_arrays_under_jit_draw_as_one_device_does():
    params, x = parameters(np.float32), normal(9, 8, D, dtype=np.float32)
    fn = compiled(function(loss_of(network, "categorical"), params, x))
    mesh = jax.make_mesh((4,), ("data",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    value, grads, factors = fn(params, jax.device_put(x, sharding), fisher_key=jax.random.key(0))
    expected = fn(params, x, fisher_key=jax.random.key(0))
    found = value, grads, factors.whole()
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), found, expected)


# -- the number of examples --------------------------------------------------------------------------------------------


def test_the_marked_output_tells_the_number_of_examples(x64):
    """Check that the loss is a mean over the marked output's rows.

    For vectors, an example's gradients are still summed before they are squared.
    """
    params, x = parameters(), normal(9, N, T, D)
    marked, plain = loss_of(network, "categorical"), lambda p, x: _without_mark(loss_of(network, "categorical"), p, x)

    def factors(loss, x, **options):
        return compiled(function(loss, params, x, fisher="empirical", **options))(params, x)[2]

    def close(found, expected, names=params):
        own = ({name: dict(f)[name] for name in names} for f in (found, expected))
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-9), *own)

    tokens = factors(marked, x)
    close(tokens, factors(marked, x.reshape(-1, D)), ["in", "out"])
    close(factors(marked, x.reshape(-1, D)), factors(plain, x.reshape(-1, D)))
    close(factors(marked, x, num_examples=N), factors(plain, x))
    layers = kfac.find_layers(marked, params, x)
    by_example = truth(lambda hook, p, x: loss_of(network, "categorical", hook)(p, x), params, (x,), interacting=True)
    check_vectors(layers, tokens, {name: T**0.5 * g for name, g in by_example.vectors.items()})
    assert layers["in"].positions == kfac.find_layers(plain, params, x)["in"].positions == T


def test_a_table_of_positions_where_the_loss_is_a_mean_over_tokens(x64):
    params, x = {"table": normal(0, T, D), "out": normal(1, D, OUT)}, normal(9, N, T, D)

    def model(hook, p, x):
        table = hook.vector("table", p["table"], len(x))
        return hook.layer("out", x, jnp.tanh(x + table) @ p["out"])

    found = many(function(loss_of(model, "categorical"), params, x), params, x, draws=3000)
    expected = exact_factors(model, "categorical", params, x, N * T)
    assert_within(jax.tree.map(np.ravel, found["table"].F), expected["table"].ravel())


# -- errors ------------------------------------------------------------------------------------------------------------


def test_bad_marks_are_errors():
    x = jnp.ones((2, 3))
    with pytest.raises(ValueError, match=r"likelihood must be one of 'categorical'.*but is 'cauchy'"):
        kfac.mark_output(x, "cauchy")
    with pytest.raises(ValueError, match=r"weight must lie in \(0, inf\), but is 0"):
        kfac.mark_output(x, "gaussian", weight=0)
    with pytest.raises(ValueError, match="weight must be a number"):
        kfac.mark_output(x, "gaussian", weight=x)
    with pytest.raises(ValueError, match="variance is for likelihood='gaussian', but likelihood is 'poisson'"):
        kfac.mark_output(x, "poisson", variance=2.0)
    with pytest.raises(ValueError, match="sample of a Likelihood must be a function"):
        kfac.curvature.Likelihood("normal", jnp.sum)
    with pytest.raises(TypeError, match="must be real, but has dtype int32"):
        kfac.mark_output(jnp.ones((2, 3), jnp.int32), "categorical")
    with pytest.raises(ValueError, match=r"is a scalar: pass x\[\.\.\., None\]"):
        kfac.mark_output(1.0, "gaussian")


def _raises(match, loss, params, *args, fisher_key=..., **options):
    fisher_key = jax.random.key(0) if fisher_key is ... else fisher_key
    given = {} if fisher_key is None else {"fisher_key": fisher_key}
    with pytest.raises(ValueError, match=match):
        measured(loss, params, *args, **options)(params, *args, **given)


def test_what_cannot_be_drawn_is_an_error():
    params, x = parameters(np.float32), normal(9, N, D, dtype=np.float32)
    marked = loss_of(network, "categorical")
    _raises(
        "fisher must be one of 'empirical', 'sampled', 'expected', but is 'exact'", marked, params, x, fisher="exact"
    )
    _raises("pass a PRNG key at the call, fisher_key=jax.random.key", marked, params, x, fisher_key=None)
    _raises(
        r"must be a single PRNG key.*key<fry>\[2\]", marked, params, x, fisher_key=jax.random.split(jax.random.key(0))
    )
    _raises("must be a single PRNG key.*'seed'", marked, params, x, fisher_key="seed")
    _raises("with 'empirical' nothing is drawn", marked, params, x, fisher="empirical")
    _raises("'sampled' needs the output.*kfac.mark_output", lambda p, x: jnp.mean(_plain(p, x)), params, x)

    def unmarked_head(p, x):
        h = jnp.tanh(x @ p["in"]["w"] + p["in"]["b"])
        z = kfac.mark_output(h * p["scale"], "gaussian")
        return jnp.mean(jnp.sum(z, -1) + jnp.sum(h @ p["out"], -1))

    _raises("the loss depends on 'out', but no marked output does", unmarked_head, params, x)
    function(unmarked_head, params, x, rules={"out": "skip"})(params, x, fisher_key=jax.random.key(0))

    def in_cond(p, x):
        return lax.cond(x[0, 0] > 0, lambda z: kfac.mark_output(z, "gaussian"), lambda z: z, _plain(p, x)).mean()

    _raises("cannot be followed inside cond", in_cond, params, x)


def test_an_unclear_number_of_examples_is_an_error():
    params, x = parameters(np.float32), normal(9, N, D, dtype=np.float32)

    def two(p, x):
        z = _plain(p, x)
        return (kfac.mark_output(z, "gaussian") ** 2).mean() + (kfac.mark_output(z[:3], "gaussian") ** 2).mean()

    def hidden(p, x):
        z = _plain(p, x + jnp.zeros((N, 1)))
        return (kfac.mark_output(z, "gaussian") ** 2).mean() + (kfac.mark_output(z[:3], "gaussian") ** 2).mean()

    _raises(r"marked outputs have 6 .* and 3 .* rows, and the loss cannot be traced.*num_examples", hidden, params, x)
    function(hidden, params, x, num_examples=N)(params, x, fisher_key=jax.random.key(0))
    by_batch, given = (
        function(two, params, x, num_examples=n)(params, x, fisher_key=jax.random.key(0))[2] for n in (None, N)
    )
    jax.tree.map(np.testing.assert_array_equal, by_batch, given)

    def vector(p, x):
        return (kfac.mark_output(_plain(p, x)[:, 0], "bernoulli") ** 2).mean()

    _raises(r"give the features an axis of their own", vector, params, x)


def test_a_loss_of_some_of_the_examples(x64):
    params, x, n = {"w": normal(0, D, OUT)}, normal(9, N, D), 4

    def loss(p, x):
        return (kfac.mark_output((x @ p["w"])[:n], "gaussian") ** 2).sum(-1).mean() / 2

    found = function(loss, params, x, fisher="empirical")(params, x)[2]["w"]
    g = x[:n] @ params["w"] / n
    np.testing.assert_allclose(found.A, x.T @ x / n, rtol=1e-10)
    np.testing.assert_allclose(found.G, n / (N / n) * g.T @ g, rtol=1e-10)


@pytest.mark.parametrize("reads", ["before the bias", "copies"])
def test_statistics_of_a_term_without_a_mark_that_reads_an_array_again(x64, reads):
    """Check that such a term changes the layers, but not their statistics, which are those of the marked output."""
    params = {"b": jnp.ones(4), "c": jnp.ones(4), "k": normal(0, 3, 4), "w": normal(1, 4, 2)}
    batch = normal(2, N, 3), normal(3, N, 2)

    def arrays(p, x):
        before = x @ p["k"]
        copies = jnp.broadcast_to(p["c"], (len(x), 1, 4))
        h = jnp.concatenate([copies, (before + p["b"])[:, None]], 1)
        return jnp.tanh(h).sum(1) @ p["w"], before, copies

    def loss(p, batch):
        x, t = batch
        y, before, copies = arrays(p, x)
        y = kfac.mark_output(y, "gaussian")
        other = {"before the bias": before, "copies": copies * x[:, :1, None]}[reads]
        return jnp.mean(jnp.sum((y - t) ** 2, -1)) + 0.01 * jnp.mean(other**2)

    layers = kfac.find_layers(loss, params, batch)
    found = {
        fisher: jax.jit(kfac.statistics(loss, layers, fisher=fisher))(params, batch, fisher_key=jax.random.key(0))
        for fisher in ("sampled", "expected")
    }
    assert list(found["sampled"]) == list(found["expected"]) == [layer.name for layer in layers.with_factors]
    # The expected Fisher matrix of a Gaussian output is the second moment of its Jacobian.
    jacobian = jax.jit(jax.vmap(lambda x: jax.jacobian(lambda p: arrays(p, x[None])[0][0])(params)))(batch[0])
    expected = {name: jnp.einsum("noi,noj->ij", jacobian[name], jacobian[name]) / N for name in "bc"}
    np.testing.assert_allclose(found["expected"]["k"].G, expected["b"], rtol=1e-10)
    for name in found["expected"].keys() & {"b", "c"}:
        np.testing.assert_allclose(found["expected"][name].F[:, 0, 0], jnp.diag(expected[name]), rtol=1e-10)


def test_a_key_of_the_loss_is_passed_on_with_empirical():
    params, x = parameters(np.float32), normal(9, N, D, dtype=np.float32)

    def noisy(p, x, key):
        return jnp.mean(_plain(p, x + jax.random.normal(key, x.shape)))

    layers = kfac.find_layers(noisy, params, x, kwargs={"key": jax.random.key(0)})
    value, _, _ = jax.jit(kfac.value_and_grad(noisy, layers))(params, x, kwargs={"key": jax.random.key(1)})
    np.testing.assert_allclose(value, noisy(params, x, jax.random.key(1)), rtol=1e-5)


# -- cost --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("looped", [False, True])
def test_the_forward_pass_is_shared_and_statistics_are_collected_once(looped):
    width, depth = 16, 3
    w = normal(0, depth, width, width, dtype=np.float32)
    params = {"w": w} if looped else {f"{k}": w[k] for k in range(depth)}
    x = normal(9, 64, width, dtype=np.float32)

    def loss(p, x):
        if looped:
            x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p["w"])
        else:
            x = functools.reduce(lambda x, k: jnp.tanh(x @ p[f"{k}"]), range(depth), x)
        return jnp.mean(jnp.sum(kfac.mark_output(x, "gaussian") ** 2, -1))

    program = jax.jit(function(loss, params, x)).lower(params, x, fisher_key=jax.random.key(0)).compile().as_text()
    # A layer needs six products: a forward product, two for the loss's backward pass, one for the other backward pass,
    # and A and G.
    expected = 6 if looped else 6 * depth - 2  # the first layer needs no gradient of its input
    assert len(re.findall(r" dot\(", program)) == expected


def test_find_layers_keeps_no_likelihood_that_a_loss_builds():
    """Check that likelihoods are freed with the traced programs, however many a loss builds."""

    def loss(p, x):
        own = kfac.curvature.Likelihood(lambda key, x: x, lambda x, target: -jnp.sum((target - x) ** 2, -1) / 2)
        return jnp.mean(jnp.sum(kfac.mark_output(x @ p["w"], own) ** 2, -1)) / 2

    def alive():
        gc.collect()
        return sum(isinstance(x, kfac.curvature.Likelihood) for x in gc.get_objects())

    params, x = {"w": normal(0, D, 3, dtype=np.float32)}, normal(1, N, D, dtype=np.float32)
    layers = kfac.find_layers(loss, params, x)
    before = alive()
    for _ in range(5):
        assert kfac.find_layers(loss, params, x) == layers
    assert alive() <= before
    factors = jax.eval_shape(kfac.statistics(loss, layers, fisher="sampled"), params, x, fisher_key=jax.random.key(0))
    assert set(factors) == {"w"}
