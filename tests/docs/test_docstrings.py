"""Test that the examples in the docstrings of top-level names run."""

import dataclasses
import inspect
import os
import re
import textwrap

import jax
import jax.numpy as jnp
import optax
import pytest
from test_readme import model_and_data

import kfac
from public import PUBLIC


def examples(name):
    """Return the blocks after `::` in a docstring."""
    text = inspect.getdoc(PUBLIC[name])
    blocks = re.findall(r"::\n\n((?:    .*\n|\n)+)", text + "\n")
    return [textwrap.dedent(block) for block in blocks]


def network(params, x):
    h = jnp.tanh(x @ params["hidden"]["kernel"] + params["hidden"]["bias"])
    return h @ params["output"]["kernel"] + params["output"]["bias"]


@pytest.fixture(scope="module")
def names():
    """Return the names that the examples use without defining them."""
    params, batch, loss_fn = model_and_data()
    layers = kfac.find_layers(loss_fn, params, batch)
    optimizer = kfac.kfac(0.1, layers)
    return {
        "dataclasses": dataclasses,
        "jax": jax,
        "jnp": jnp,
        "kfac": kfac,
        "optax": optax,
        "os": os,
        "batch": batch,
        "batches": [batch, batch],
        "layers": layers,
        "loss_fn": loss_fn,
        "network": network,
        "num_steps": 10,
        "observe": lambda state, params, batch: kfac.observe(state, kfac.statistics(loss_fn, layers)(params, batch)),
        "opt_state": jax.jit(optimizer.init)(params),
        "optimizer": optimizer,
        "params": params,
        "step": lambda params, state, batch: (params, state),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_the_example_runs(name, names, monkeypatch):
    monkeypatch.setattr(jax.config, "update", lambda *args: None)  # leave the compilation cache's folder alone
    blocks = examples(name)
    assert blocks, "a docstring without an example"
    own = dict(names)
    for block in blocks:
        exec(block, own)
