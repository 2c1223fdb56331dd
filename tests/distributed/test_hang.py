"""Test that inversions on several simulated devices do not wait for each other's threads."""

import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import kfac

SCRIPT = pathlib.Path(__file__).parents[1] / "hang.py"


@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(3))
def test_two_simulated_devices_come_to_an_end(attempt):
    result = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=True, timeout=180)
    assert result.stdout == "failed inversions: 0\n"


@pytest.mark.parametrize("copies", [1, 3])
def test_eigenvectors_of_stacked_factors_are_computed_one_by_one(copies):
    """Check that, on CPUs, LAPACK never gets several matrices at once."""

    def loss_fn(params, x):
        return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params)[0] ** 2)

    params, x = jnp.ones((copies, 5, 5)), jnp.ones((7, 5))
    layers = kfac.find_layers(loss_fn, params, x)
    _, _, factors = jax.eval_shape(kfac.value_and_grad(loss_fn, layers), params, x)
    lowered = jax.jit(lambda factors: kfac.curvature.eigenbasis(factors, layers)).lower(factors).as_text()
    calls = [line for line in lowered.splitlines() if "syevd" in line]
    assert calls
    assert all("(tensor<5x5xf32>)" in line for line in calls)
