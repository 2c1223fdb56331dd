"""Test the command that prints errors of factors and of update directions."""

import pathlib
import sys

import jax
import jax.numpy as jnp
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples" / "benchmarks"))

import accuracy

pytestmark = pytest.mark.examples


def test_factors_of_a_convolution(monkeypatch):
    monkeypatch.setattr(accuracy, "LAYERS", [("a convolution", (4, 6, 6, 8), (3, 3, 8, 8), 1)])
    (row,) = accuracy.factors()
    for side in "AG":
        assert row[f"{side}, float32"] < 1e-6 < row[f"{side}, bfloat16"] < 1e-2


def test_the_default_direction():
    with jax.enable_x64(True):
        exact, condition = accuracy.update("float32", accuracy.DAMPING, jnp.float64)
    found, _ = accuracy.update(accuracy.kfac.Cholesky().precision, accuracy.DAMPING, jnp.float32)
    assert 5e5 < condition < 2e6
    assert 0 < accuracy.distance(found, exact) < 1e-3
