"""Test that a loss may have any keyword, also the keywords of this package: they travel in `kwargs=`."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kfac

NAMES = (
    "cost",
    "reduce",
    "skip",
    "basis",
    "fisher_key",
    "rules",
    "kwargs",
    "params_",
    "fraction",
    "has_aux",
    "inverse",
)
PARAMS = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(5, 3)), jnp.float32)}
X = jnp.asarray(np.random.default_rng(1).normal(size=(8, 5)), jnp.float32)
KEYWORDS = {name: jnp.float32(1 + k) for k, name in enumerate(NAMES)}


def plain(params, x, scale):
    return scale * jnp.mean(jnp.sum(jnp.tanh(x @ params["w"]) ** 2, axis=-1))


def loss_fn(params, x, **keywords):
    assert keywords.keys() == set(NAMES)
    return plain(params, x, sum(keywords.values()))


SCALE = sum(KEYWORDS.values())


@pytest.fixture(scope="module")
def expected():
    layers = kfac.find_layers(plain, PARAMS, X, SCALE)
    return kfac.value_and_grad(plain, layers)(PARAMS, X, SCALE)


def same(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, expected)


def test_find_layers_and_value_and_grad_pass_any_keyword_to_the_loss(expected):
    layers = kfac.find_layers(loss_fn, PARAMS, X, kwargs=KEYWORDS)
    same(jax.jit(kfac.value_and_grad(loss_fn, layers))(PARAMS, X, kwargs=KEYWORDS), expected)


def test_statistics_passes_any_keyword_to_the_loss(expected):
    layers = kfac.find_layers(loss_fn, PARAMS, X, kwargs=KEYWORDS)
    same(jax.jit(kfac.statistics(loss_fn, layers))(PARAMS, X, kwargs=KEYWORDS), expected[2])


def test_microbatch_passes_any_keyword_to_the_loss(expected):
    layers = kfac.find_layers(loss_fn, PARAMS, X, kwargs=KEYWORDS)
    measure = kfac.microbatch(kfac.value_and_grad(loss_fn, layers), 2)
    same(jax.jit(measure)(PARAMS, X, kwargs=KEYWORDS), expected)


def test_microbatch_folds_the_part_into_keys_inside_kwargs():
    """Check typed keys anywhere, and an untyped one that is called `key`."""

    def noisy(params, x, key, nested):
        noise = jax.random.normal(key, ()) + jax.random.normal(nested["typed"], ())
        return noise * plain(params, x, 1.0)

    for key in (jax.random.key(3), jax.random.PRNGKey(3)):
        given = {"key": key, "nested": {"typed": jax.random.key(5)}}
        layers = kfac.find_layers(noisy, PARAMS, X, kwargs=given)
        value, _, _ = kfac.microbatch(kfac.value_and_grad(noisy, layers), 2)(PARAMS, X, kwargs=given)
        parts = []
        for k, part in enumerate((X[:4], X[4:])):
            fold = lambda key, k=k: jax.random.fold_in(key, k)  # noqa: E731
            parts.append(noisy(PARAMS, part, fold(key), {"typed": fold(given["nested"]["typed"])}))
        np.testing.assert_allclose(value, sum(parts) / 2, rtol=1e-5)


def test_train_step_passes_any_keyword_to_the_loss():
    ends = []
    for loss, args, kwargs in ((plain, (X, SCALE), None), (loss_fn, (X,), KEYWORDS)):
        step = kfac.train_step(loss, 0.1, verbose=False)
        state = step.init(PARAMS, *args, kwargs=kwargs)
        ends.append(step(PARAMS, state, *args, kwargs=kwargs)[::2])
    same(*ends)


@pytest.mark.parametrize("function", ["find_layers", "value_and_grad", "statistics", "init", "call"])
def test_a_keyword_of_the_loss_outside_kwargs_is_refused(function):
    layers = kfac.find_layers(plain, PARAMS, X, kwargs={"scale": 2.0})
    step = kfac.train_step(plain, 0.1, verbose=False)
    calls = {
        "find_layers": lambda: kfac.find_layers(plain, PARAMS, X, scale=2.0),
        "value_and_grad": lambda: kfac.value_and_grad(plain, layers)(PARAMS, X, scale=2.0),
        "statistics": lambda: kfac.statistics(plain, layers)(PARAMS, X, scale=2.0),
        "init": lambda: step.init(PARAMS, X, scale=2.0),
        "call": lambda: step(PARAMS, None, X, scale=2.0),
    }
    # An option of earlier versions may be a keyword of the loss.
    with pytest.raises(TypeError, match=r"no option kfac_reduce=: use rules=.* loss_fn belongs in kwargs=\{\.\.\.\}"):
        kfac.find_layers(plain, PARAMS, X, kfac_reduce=2.0)
    with pytest.raises(TypeError, match=r"no option is called scale=\. .* kwargs=\{'scale': \.\.\.\}"):
        calls[function]()


def branching(params, x, negative, *, mode, first=0):
    y = x @ params["w"]
    y = y if mode == "linear" else jnp.tanh(y)
    return jnp.mean(y[:, first:] ** 2) * (-1 if negative else 1)


@pytest.mark.parametrize("jitted", [False, True])
def test_train_step_leaves_bools_and_strings_to_the_loss(jitted):
    params = PARAMS
    step = kfac.train_step(branching, 0.1, verbose=False)
    for negative, mode in ((False, "linear"), (True, "linear"), (True, "bounded")):
        state = step.init(params, X, negative, kwargs={"mode": mode})

        def call(params, state, x, negative=negative, mode=mode):
            return step(params, state, x, negative, kwargs={"mode": mode})

        loss = (jax.jit(call) if jitted else call)(params, state, X)[2]
        np.testing.assert_allclose(loss, branching(params, X, negative, mode=mode), rtol=1e-5)


def test_train_step_init_already_refuses_a_number_that_the_loss_needs_while_it_is_traced():
    params = PARAMS
    keywords = {"mode": "linear", "first": 1}
    step = kfac.train_step(branching, 0.1, verbose=False)
    with pytest.raises(IndexError, match=r"must (be|have) static"):
        step.init(params, X, False, kwargs=keywords)
    static = kfac.train_step(functools.partial(branching, first=1), 0.1, verbose=False)
    state = static.init(params, X, False, kwargs={"mode": "linear"})
    loss = static(params, state, X, False, kwargs={"mode": "linear"})[2]
    np.testing.assert_allclose(loss, branching(params, X, False, **keywords), rtol=1e-5)
