"""Test docs/getting_started.md and docs/own_loop.md, which continues it: both train in three frameworks, as shown."""

import contextlib
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.errors import TraceContextError
from jax.experimental.compilation_cache import compilation_cache
from test_docs import DOCS, run_blocks

import kfac

pytestmark = pytest.mark.slow  # test_docs.py checks the names and keywords of all pages

PAGE = (DOCS / "getting_started.md").read_text()
OWN_LOOP = (DOCS / "own_loop.md").read_text()


def train_nnx(names):
    """Train nnx's model with the page's optimizer and `nnx_observe`, and an ordinary step."""
    model, optimizer = names["own_model"], names["optimizer"]

    @nnx.jit
    def step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(lambda model: names["cross_entropy"](model(batch[0]), batch[1]))(model)
        optimizer.update(model, grads)
        return loss

    for batch in names["batches"]():
        if kfac.statistics_due(optimizer.opt_state):
            names["nnx_observe"](model, optimizer, batch)
        names["nnx_last"] = step(model, optimizer, batch)


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Return the pages' names and their output. The home folder is temporary, because a page sets a program cache."""
    with pytest.MonkeyPatch.context() as patched, contextlib.chdir(tmp_path_factory.mktemp("run")):
        patched.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        printed, before = [], jax.config.jax_compilation_cache_dir

        def record(*words, file=None, **_):
            if file is None:
                printed.append(" ".join(map(str, words)))

        patched.setattr("builtins.print", record)
        names = run_blocks("getting_started.md", 4)
        first = dict(names)
        run_blocks("own_loop.md", 4, names=names)
        train_nnx(names)
        # The first loop again, with the names that the page gives for equinox.
        model, averages = first["eqx"].nn.make_with_state(first["eqx"].nn.Sequential)(first["eqx_layers"])
        arrays, _ = first["eqx"].partition(model, first["eqx"].is_inexact_array)
        equinox = {"loss_fn": first["eqx_loss"], "variables": {"params": arrays, "batch_stats": averages}}
        names["equinox"] = run_blocks("own_loop.md", 4, slice(1), names=names | equinox)
        jax.config.update("jax_compilation_cache_dir", before)
        compilation_cache.reset_cache()
    return first, names, "\n".join(printed).splitlines()


def test_pages_show_what_their_code_prints(pages):
    """Compare all output exactly, except accuracies.

    Accuracies may differ by two points, because rounding may change a few images.
    """
    *_, printed = pages
    shown = re.findall(r"^```text\n(.*?)^```$", PAGE + OWN_LOOP, re.MULTILINE | re.DOTALL)
    expected = "".join(shown).replace("\n    ", " ").splitlines()  # an indented line continues the last line
    for line, shown_line in zip(printed, expected, strict=True):
        accuracies = [re.search(r"(\d+\.\d)%", text) for text in (line, shown_line)]
        if all(accuracies):
            assert abs(float(accuracies[0][1]) - float(accuracies[1][1])) < 2
            line, shown_line = line.split(":")[0], shown_line.split(":")[0]
        assert line == shown_line
    assert [line.split(":")[0] for line in expected if "%" in line] == ["linen", "nnx", "equinox"]


def test_train_step_learns_in_three_frameworks(pages):
    first, _, printed = pages
    found = [float(line.split(": ")[1].rstrip("%")) for line in printed if line.endswith("%")]
    assert len(found) == 3 and min(found) > 90  # guessing gives 10%
    assert float(first["nnx_last"]) < 0.6 and kfac.diagnostics(first["nnx_state"])["skipped_steps"] == 0
    assert float(first["eqx_last"]) < 0.6 and kfac.diagnostics(first["eqx_state"])["skipped_steps"] == 0
    model = first["nnx_model"]
    np.testing.assert_array_equal(model.layers[0].kernel[...], first["nnx_params"].layers[0].kernel[...])
    assert np.abs(model.layers[1].mean[...]).max() > 1e-3  # no longer the initial average
    _, averages = first["eqx"].nn.make_with_state(first["eqx"].nn.Sequential)(first["eqx_layers"])
    pairs = zip(jax.tree.leaves(first["averages"]), jax.tree.leaves(averages), strict=True)
    assert any(np.any(now != before) for now, before in pairs)


class Words(nn.Module):
    @nn.compact
    def __call__(self, words):
        x = nn.Embed(50, 16, name="table")(words)
        x = x + self.param("places", nn.initializers.normal(), (8, 16))
        x = nn.LayerNorm(name="norm")(nn.Conv(16, (3,), name="conv")(x))
        kernel = self.param("coder", nn.initializers.lecun_normal(), (16, 16))
        x = nn.tanh(x @ (kernel - kernel.mean(axis=0)))
        temperature = self.param("temperature", nn.initializers.ones, ())
        x = nn.Dense(3, name="head")(x.mean(axis=1))
        return x / jax.lax.stop_gradient(temperature)


def test_find_layers_finds_the_kinds_that_the_page_explains():
    words = jnp.zeros((32, 8), jnp.int32)
    params = Words().init(jax.random.key(0), words)["params"]
    layers = kfac.find_layers(lambda params, words: Words().apply({"params": params}, words).mean(), params, words)
    found = {layer.name: layer.kind for layer in layers}
    kernels = {"conv": "conv", "head": "dense", "table": "embedding", "coder": "gradient-factors"}
    assert found == kernels | {"norm": "unitwise", "places": "diagonal", "temperature": "skipped"}
    table = PAGE[PAGE.index("| kind | its curvature |") :]
    rows = re.search(r"(?:^\|.*\n)+", table, re.MULTILINE)[0].splitlines()[2:]
    assert set(found.values()) == {kind for row in rows for kind in re.findall(r"`([\w-]+)`", row.split("|")[1])}


def test_own_loops_observe_and_learn_as_train_step_does(pages):
    _, names, _ = pages
    equinox = names["equinox"]
    states = names["opt_state"], nnx.as_pure(names["optimizer"].opt_state), equinox["opt_state"]
    for state, loss in zip(states, (names["loss"], names["nnx_last"], equinox["loss"]), strict=True):
        scalars = kfac.diagnostics(state)
        assert scalars["condition"] > 1 and scalars["skipped_steps"] == scalars["skipped_statistics"] == 0
        assert float(loss) < 0.6  # guessing gives log 10
    assert np.abs(names["stats"]["BatchNorm_0"]["mean"]).max() > 1e-3  # no longer the initial average
    # Statistics do not draw the model's random numbers.
    assert int(names["own_model"].layers[3].rngs.count[...]) == len(list(names["batches"]()))


def test_orbax_restores_a_state_with_the_target_of_the_page(pages, tmp_path):
    _, names, _ = pages
    state = names["opt_state"]
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "checkpoint", state)
    with ocp.StandardCheckpointer() as checkpointer:
        target = jax.eval_shape(names["tx"].init, names["params"])
        restored = checkpointer.restore(tmp_path / "checkpoint", target)
        untyped = checkpointer.restore(tmp_path / "checkpoint")
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    kfac.observe(restored)  # refreshes
    message = "opt_state holds no state of kfac.kfac"
    with pytest.raises(ValueError, match=re.escape(message)):
        kfac.observe(untyped)
    assert message in OWN_LOOP


def test_partition_gives_each_optimizer_its_parameters(pages):
    """Check AdamW's first step on the head, K-FAC's on the rest, and that a lone bias is refused with its rule."""
    _, names, _ = pages
    params, args, loss_fn = names["params"], (names["stats"], names["key"], names["batch"]), names["loss_fn"]
    loose = {"Dense_0": {"kernel": "kfac", "bias": "adamw"}, "BatchNorm_0": "kfac", "Dense_1": "adamw"}
    tx = optax.partition({"kfac": kfac.kfac(0.1, names["mixed_layers"]), "adamw": optax.adamw(1e-3)}, loose)
    with pytest.raises(ValueError, match=r"rules=\{'\^Dense_0/bias\$': 'skip'\}"):
        tx.init(params)

    def first_step(tx, layers):
        state = kfac.observe(tx.init(params), kfac.statistics(loss_fn, layers, has_aux=True)(params, *args))
        grads, _ = jax.grad(loss_fn, has_aux=True)(params, *args)
        return tx.update(grads, state, params)[0]

    updates = jax.jit(lambda: first_step(names["mixed"], names["mixed_layers"]))()
    np.testing.assert_allclose(jnp.abs(updates["Dense_1"]["kernel"]), 1e-3, rtol=0.01)
    alone = jax.jit(lambda: first_step(kfac.kfac(0.1, names["mixed_layers"]), names["mixed_layers"]))()
    for name in ("Dense_0", "BatchNorm_0"):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), updates[name], alone[name])


def test_a_loss_that_closes_over_random_numbers_is_refused_by_flax():
    class Reader(nnx.Module):
        def __init__(self, rngs):
            self.rows = nnx.RNN(nnx.LSTMCell(8, 16, rngs=rngs))
            self.dropout = nnx.Dropout(0.1, rngs=rngs)

        def __call__(self, x):
            return self.dropout(self.rows(x))

    graph, params, rest = nnx.split(Reader(nnx.Rngs(0)), nnx.Param, ...)

    def closed(params, batch):
        return nnx.merge(graph, params, rest)(batch).mean()

    message = "Cannot mutate RngCount from a different trace level"
    assert message in OWN_LOOP
    with pytest.raises(TraceContextError, match=message):
        kfac.find_layers(closed, params, jnp.ones((8, 4, 8)))
    layers = kfac.find_layers(lambda p, rest, x: nnx.merge(graph, p, rest)(x).mean(), params, rest, jnp.ones((8, 4, 8)))
    assert layers.num_examples == 8


@pytest.mark.slow
def test_every_wrong_place_in_a_chain_does_harm_and_clipping_before_kfac_does_none(pages):
    first, _, _ = pages
    batches = list(first["batches"]())
    test = first["test_images"], first["test_labels"]

    def logits(params, x):
        return jnp.tanh(x @ params["hidden"]["kernel"] + params["hidden"]["bias"]) @ params["output"]["kernel"]

    def loss_fn(params, batch):
        return first["cross_entropy"](logits(params, batch[0]), batch[1])

    key = jax.random.key(0)
    hidden = {"kernel": jax.random.normal(key, (64, 64)) / 8, "bias": jnp.zeros(64)}
    initial = {"hidden": hidden, "output": {"kernel": jax.random.normal(key, (64, 10)) / 8}}
    layers = kfac.find_layers(loss_fn, initial, batches[0])
    observe = jax.jit(lambda s, p, b: kfac.observe(s, kfac.statistics(loss_fn, layers)(p, b)))

    def train(tx):
        @jax.jit
        def step(params, state, batch):
            updates, state = tx.update(jax.grad(loss_fn)(params, batch), state, params)
            return optax.apply_updates(params, updates), state

        params, state = initial, tx.init(initial)
        for batch in batches:
            if kfac.statistics_due(state):
                state = observe(state, params, batch)
            params, state = step(params, state, batch)
        return params

    own = kfac.kfac(kfac.schedules.warmup_linear_decay(0.1, len(batches)), layers)
    right = train(own)
    for chain in (
        optax.chain(optax.add_decayed_weights(0.1), own),
        optax.chain(own, optax.add_decayed_weights(0.1)),
        optax.chain(own, optax.ema(0.9)),
        optax.chain(own, optax.clip_by_global_norm(0.1)),
    ):
        assert float(loss_fn(train(chain), test)) > float(loss_fn(right, test))
    clipped = train(optax.chain(optax.clip_by_global_norm(1e3), own))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), clipped, right)
