"""Test `examples/language_model` on tiny sizes."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kfac

pytestmark = pytest.mark.examples

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def example(monkeypatch):
    for folder in (EXAMPLES, EXAMPLES / "language_model"):
        monkeypatch.syspath_prepend(str(folder))


def tiny(**sizes):
    from transformer import Transformer

    return Transformer(**{"vocabulary": 96, "context": 6, "width": 8, "layers": 2, "heads": 2, **sizes})


def test_products_of_rotated_depend_on_the_distance():
    import transformer

    vectors = np.random.default_rng(0).normal(size=(2, 1, 1, 1, 6)).astype(np.float32)
    q, k = map(transformer.rotated, np.broadcast_to(vectors, (2, 1, 5, 1, 6)))
    scores = np.einsum("bqhd,bkhd->qk", q, k)
    for distance in range(-4, 5):
        assert np.ptp(np.diagonal(scores, distance)) < 1e-5
    assert np.ptp(scores[0]) > 0.1
    assert "positions" not in tiny(rotary=True).init(jax.random.key(0))


def test_the_text_is_that_of_the_documentation():
    import topics

    text = topics.text()
    assert text == topics.text() and 300_000 <= len(text) <= 600_000
    assert set(text) <= set(topics.ALPHABET) and len(topics.ALPHABET) == 96
    assert 'The "if" statement is used for conditional execution' in text
    paragraphs = [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]
    assert len(paragraphs) == len(set(paragraphs))


def test_validation_text_is_not_trained_on():
    import topics

    text = topics.text()
    train, held_out = ("".join(topics.ALPHABET[k] for k in part) for part in topics.tokens())
    assert len(train) + len(held_out) == len(text) and 0.08 < len(held_out) / len(text) < 0.11
    assert held_out[:4096] == text[9 * 4096 : 10 * 4096]
    assert held_out[1000:1200] not in train


def test_another_text_is_refused(monkeypatch):
    import topics
    from comparison import UserError

    monkeypatch.setattr(topics, "SMALLEST", 10**7)
    with pytest.raises(UserError, match=r"have [345]\d\d,\d{3} characters"):
        topics.text()
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(UserError, match=r"without pydoc_data.topics"):
        topics.text()


def test_no_token_sees_what_follows():
    model = tiny()
    params = model.init(jax.random.key(0))
    tokens = jnp.arange(12).reshape(2, 6)
    logits = jax.jit(model.logits)
    for position in (1, 5):
        changed = logits(params, tokens.at[:, position].add(7)) != logits(params, tokens)
        assert not changed[:, :position].any() and changed[:, position:].any(-1).all()
    assert logits(params, tokens).dtype == jnp.float32
    # The loss is the mean over tokens of the next token's -log p.
    whole = jnp.arange(14).reshape(2, 7)
    p = np.log(jax.nn.softmax(logits(params, whole[:, :-1])))
    expected = -np.mean(np.take_along_axis(p, np.asarray(whole)[:, 1:, None], -1))
    assert float(model.loss(params, whole)) == pytest.approx(expected, rel=1e-3)


def test_every_parameter_has_the_block_that_its_kind_has():
    model = tiny()
    params = jax.eval_shape(model.init, jax.random.key(0))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    layers = kfac.find_layers(model.loss, params, jax.ShapeDtypeStruct((3, 7), jnp.int32))
    dense = {f"blocks/{name}": ("dense", 2) for name in ("attention", "down", "queries_keys_values", "up")}
    assert {layer.name: (layer.kind, layer.copies) for layer in layers} == dense | {
        "blocks/norm_attention": ("unitwise", 1),
        "blocks/norm_mlp": ("unitwise", 1),
        "head": ("dense", 1),
        "norm": ("unitwise", 1),
        "positions": ("diagonal", 1),
        "tokens": ("embedding", 1),
    }
    assert not any(layer.kind == "gradient-factors" for layer in layers)


def test_split_projections_start_as_the_same_function():
    fused, split = tiny(tied=True), tiny(tied=True, fused=False)
    key = jax.random.key(0)
    params = split.init(key)
    assert {"queries", "keys", "values"} < set(params["blocks"])
    whole = jax.random.randint(key, (3, 7), 0, 96)
    assert float(split.loss(params, whole)) == pytest.approx(float(fused.loss(fused.init(key), whole)), rel=1e-6)


def test_both_optimizers_learn():
    import char_transformer

    task = char_transformer.make(tiny(layers=1), sequences=16, parts=1)
    np.testing.assert_array_equal(task.batch(0, 3), task.batch(0, 3))
    assert task.batch(0, 3).shape == (16, 7) and (task.batch(0, 3) != task.batch(1, 3)).any()
    # The text is the documentation of the Python in use, so no fixed loss holds for all versions.
    untrained = task.evaluate(task.init(jax.random.key(0)))["validation"]
    for name, grid in char_transformer.GRIDS.items():
        settings = {key: values[-1] for key, values in grid.items()}
        curve = task.run(name, settings, 6, 0, 3)
        assert curve[-1]["validation"] < curve[0]["validation"] < untrained
