"""Test `examples/continual` on a tiny network: the penalties' values, and that penalties preserve earlier tasks."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

pytestmark = pytest.mark.examples


@pytest.fixture
def continual(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples" / "continual"))
    import continual

    return continual


def test_tasks_are_the_same_pixels_in_another_order(continual):
    ((x, y), (x_test, _)), ((other, labels), _) = continual.tasks(0, 30)
    assert x.shape == (30, 64) and len(x_test) == 1797 - 30
    np.testing.assert_array_equal(y, labels)
    np.testing.assert_array_equal(jnp.sort(x, axis=1), jnp.sort(other, axis=1))
    assert not np.array_equal(x, other)


def test_penalties_are_quadratic_forms_of_dense_matrices(continual):
    (batch, _), _ = continual.tasks(0, 100)
    params = continual.init(jax.random.key(0), (64, 3, 10))
    moved = jax.tree.map(lambda p: p + 0.1 * jnp.cos(jnp.arange(p.size)).reshape(p.shape), params)
    change = np.asarray(ravel_pytree(moved)[0] - ravel_pytree(params)[0], np.float64)
    found = continual.curvatures(params, batch)
    dense = np.asarray(found["Kronecker"].to_dense(), np.float64)
    matrices = {
        "Kronecker": dense,
        "diagonal": np.diag(np.diag(dense)),
        "identity": np.eye(len(dense)) * np.trace(dense) / len(dense),
    }
    for name, matrix in matrices.items():
        expected = 0.5 * change @ matrix @ change
        assert float(continual.penalty(moved, params, found[name])) == pytest.approx(expected, rel=1e-4), name


def test_it_runs_and_a_penalty_keeps_the_first_task(continual, tmp_path, monkeypatch):
    monkeypatch.setattr(continual, "STRENGTHS", np.array([1.0, 30.0]))
    found = continual.run(train=300, hidden=32, steps=300, seeds=1, picture=tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 0
    assert {len(rows) for rows in found.values()} == {1, 2}
    # The larger strength makes Adam's steps overshoot, and rounding then decides the accuracies.
    first = {name: rows[0, 0, 0] for name, rows in found.items()}
    assert first["no penalty"] < first["the first task alone"] - 0.1
    for name in ("Kronecker", "diagonal", "identity"):
        assert first[name] > first["no penalty"], name
    assert first["Kronecker"] > first["no penalty"] + 0.1
