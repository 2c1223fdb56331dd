"""Test docs/getting_started.md and docs/own_loop.md, which continues it: both train in three frameworks, as shown."""

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.errors import TraceContextError
from jax.experimental.compilation_cache import compilation_cache
from test_docs import DOCS, run_blocks

import kfac

pytestmark = pytest.mark.slow  # test_docs.py checks the names and keywords of all pages

PAGE = (DOCS / "getting_started.md").read_text()
OWN_LOOP = (DOCS / "own_loop.md").read_text()


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
        names = run_blocks("getting_started.md", 5)
        first = dict(names)
        run_blocks("own_loop.md", 6, names=names)
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
    np.testing.assert_array_equal(model.hidden.kernel[...], first["nnx_params"].hidden.kernel[...])
    assert np.abs(model.norm.mean[...]).max() > 1e-3  # no longer the initial average
    _, averages = first["eqx"].nn.make_with_state(first["EqxNetwork"])(jax.random.key(0))
    pairs = zip(jax.tree.leaves(first["averages"]), jax.tree.leaves(averages), strict=True)
    assert any(np.any(now != before) for now, before in pairs)


def test_find_layers_finds_a_layer_of_every_kind(pages):
    first, *_ = pages
    kinds = {layer.kind for layer in first["word_layers"]}
    table = PAGE[PAGE.index("| kind | its curvature |") :]
    rows = re.search(r"(?:^\|.*\n)+", table, re.MULTILINE)[0].splitlines()[2:]
    explained = {kind for row in rows for kind in re.findall(r"`([\w-]+)`", row.split("|")[1])}
    assert kinds == explained


def test_own_loops_observe_and_learn_as_train_step_does(pages):
    _, names, _ = pages
    states = names["opt_state"], nnx.as_pure(names["optimizer"].opt_state), names["eqx_state"]
    for state, loss in zip(states, (names["loss"], names["nnx_last"], names["eqx_last"]), strict=True):
        scalars = kfac.diagnostics(state)
        assert scalars["condition"] > 1 and scalars["skipped_steps"] == scalars["skipped_statistics"] == 0
        assert float(loss) < 0.6  # guessing gives log 10
    assert np.abs(names["stats"]["BatchNorm_0"]["mean"]).max() > 1e-3  # no longer the initial average
    # Statistics do not draw the model's random numbers.
    assert int(names["own_model"].dropout.rngs.count[...]) == len(list(names["batches"]()))


def test_a_restored_checkpoint_is_the_saved_one(pages):
    _, names, _ = pages
    jax.tree.map(np.testing.assert_array_equal, names["restored"], names["saved"])
    kfac.observe(names["restored"]["opt_state"])  # refreshes
    with names["ocp"].StandardCheckpointer() as checkpointer:
        untyped = checkpointer.restore(names["folder"])
    message = "opt_state holds no state of kfac.kfac"
    with pytest.raises(ValueError, match=re.escape(message)):
        kfac.observe(untyped["opt_state"])
    assert message in OWN_LOOP


def test_partition_gives_each_optimizer_its_parameters(pages):
    """Check AdamW's first step on the table, K-FAC's on the rest, and that a lone bias is refused with its rule."""
    _, names, _ = pages
    tree, loss_fn, words = names["tree"], names["word_loss"], names["words"]
    loose = {"hidden": {"kernel": "kfac", "bias": "adamw"}, "table": "adamw", "output": "kfac"}
    tx = optax.partition({"kfac": kfac.kfac(0.1, names["kernel_layers"]), "adamw": optax.adamw(3e-2)}, loose)
    with pytest.raises(ValueError, match=r"rules=\{'\^hidden/bias\$': 'skip'\}"):
        tx.init(tree)

    def first_step(tx, layers):
        state = kfac.observe(tx.init(tree), kfac.statistics(loss_fn, layers)(tree, words))
        return tx.update(jax.grad(loss_fn)(tree, words), state, tree)[0]

    updates = jax.jit(lambda: first_step(names["mixed"], names["kernel_layers"]))()
    np.testing.assert_allclose(jnp.abs(updates["table"][:, :3]), 3e-2, rtol=0.01)  # the columns with a gradient
    alone = jax.jit(lambda: first_step(kfac.kfac(0.1, names["kernel_layers"]), names["kernel_layers"]))()
    for name in ("hidden", "output"):
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
