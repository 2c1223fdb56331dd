"""Test the environment that conftest.py promises to the other tests."""

import pathlib

import jax
import jax.numpy as jnp
import pytest


def _dtype_of_a_literal():
    return jax.jit(lambda: jnp.asarray(1.0))().dtype


def test_float64_is_off_unless_asked_for():
    assert _dtype_of_a_literal() == jnp.float32


@pytest.mark.usefixtures("x64")
def test_x64_fixture_switches_float64_on():
    assert _dtype_of_a_literal() == jnp.float64
    assert jnp.ones(2).dtype == jnp.float64


def test_float64_is_off_again_afterwards():
    assert _dtype_of_a_literal() == jnp.float32


def test_several_devices_and_a_compilation_cache_of_this_run_alone():
    assert jax.device_count() >= 2
    assert jax.config.jax_enable_compilation_cache
    assert pathlib.Path(jax.config.jax_compilation_cache_dir).name.startswith("kfac-tests-")
