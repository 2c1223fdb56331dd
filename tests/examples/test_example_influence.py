"""Test `examples/influence` at small size: its scores against dense matrices, and both scripts."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

pytestmark = pytest.mark.examples


@pytest.fixture
def folder(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples" / "influence"))


def test_scores_are_those_of_dense_matrices(folder):
    import images
    from scores import curvature, gradients, influence

    rng = np.random.default_rng(0)
    x, y = jnp.asarray(rng.normal(size=(12, 5)), jnp.float32), jnp.asarray(rng.integers(0, 3, 12))
    params = images.init(jax.random.key(0), (5, 3))  # with a single layer, the curvature is a single block
    measured, examples = gradients(images.log_odds, params, (x[:2], y[:2])), gradients(images.losses, params, (x, y))
    np.testing.assert_allclose(
        examples.mean(0), ravel_pytree(jax.grad(images.loss)(params, (x, y)))[0], rtol=1e-4, atol=1e-6
    )
    odds = np.exp(np.asarray(images.log_odds(params, (x, y))))
    np.testing.assert_allclose(odds / (1 + odds), np.exp(-np.asarray(images.losses(params, (x, y)))), rtol=1e-4)
    for operator in curvature(images.loss, params, [(x, y)], 0.1, fisher="expected", key=jax.random.key(0)).values():
        dense = np.asarray(operator.to_dense(), np.float64)
        expected = np.asarray(measured) @ np.linalg.solve(dense, np.asarray(examples).T) / 12
        np.testing.assert_allclose(influence(operator, params, measured, examples), expected, rtol=1e-3, atol=1e-4)


def test_the_curvature_is_that_of_the_objective(folder):
    """Check a single layer and example, for which Gauss-Newton is a Kronecker product and equals the Hessian."""
    import images
    from scores import curvature

    rng = np.random.default_rng(0)
    batch = jnp.asarray(rng.normal(size=(1, 5)), jnp.float32), jnp.asarray([1])
    params = images.init(jax.random.key(0), (5, 3))
    flat, unravel = ravel_pytree(params)
    hessian = jax.hessian(lambda f: images.loss(unravel(f), batch) + 0.05 * f @ f)(flat)
    for operator in curvature(images.loss, params, [batch], 0.1, fisher="expected", key=jax.random.key(0)).values():
        np.testing.assert_allclose(operator.to_dense(), hessian, atol=1e-5)


def test_images_run(folder, tmp_path):
    import images

    found = images.run(images=40, hidden=4, steps=60, subsets=8, queries=5, seeds=2, picture=tmp_path / "p.png")
    assert all(r.shape == (5,) and (abs(r) <= 1).all() for r in found.values())
    assert found["EK-FAC"].mean() > 0
    assert (tmp_path / "p.png").stat().st_size > 0


def test_sentences_run(folder):
    import sentences

    table = sentences.run(count=16, length=13, width=8, steps=5, queries=2, seeds=1, passes=1)
    assert len(table) == 2
    for row in table:
        assert (len(row["prompt"]), len(row["completion"]), len(row["sentence"])) == (6, 7, 13)
        assert all(np.isfinite(value) for value in row.values() if not isinstance(value, str))
