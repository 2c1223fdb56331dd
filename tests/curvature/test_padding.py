"""Test blocks of different shapes that share a group and are padded with zeros.

The grouping is private. `tests/optimizer/test_trajectory.py` compares such a group with a NumPy reference.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kfac
from checking import normal
from kfac._curvature import blocks
from kfac._curvature.blocks import group_layers
from problem import assert_close, state_of

SIZES = (5, 7, 4)
STEPS = 3


def parameters():
    params = {"table": normal(0, 11, 5), "other": normal(1, 8, 5)}
    for k, (d_in, d_out) in enumerate(itertools.pairwise(SIZES)):
        params[f"dense{k}"] = {"kernel": normal(2 + k, d_in, d_out), "bias": normal(9 + k, d_out)}
        params[f"scale{k}"] = normal(20 + k, d_out)
    return params


def loss_fn(params, tokens, targets):
    x = params["table"][tokens] + params["other"][tokens % 8]
    for k in range(len(SIZES) - 1):
        layer = params[f"dense{k}"]
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"]) * params[f"scale{k}"]
    return jnp.mean((x - targets) ** 2)


def batch(step):
    rng = np.random.default_rng(step)
    return jnp.asarray(rng.integers(0, 11, 16)), jnp.asarray(rng.normal(size=(16, SIZES[-1])))


@functools.cache
def found():
    return kfac.find_layers(loss_fn, parameters(), *batch(0), max_factor_dim=8192)


def trained(optimizer):
    """Train for a few steps, and return the parameters, the states' diagnostics and the last state."""
    params = parameters()
    state = jax.jit(optimizer.init)(params)

    @jax.jit
    def step(params, state, *batch):
        basis = None
        if state_of(state).settings.preconditioner.uses_example_moments:
            basis = kfac.curvature.eigenbasis(state, found())
        _, grads, factors = kfac.value_and_grad(loss_fn, found())(params, *batch, basis=basis)
        updates, state = optimizer.update(grads, kfac.observe(state, factors), params)
        return jax.tree.map(jnp.add, params, updates), state

    scalars = []
    for k in range(STEPS):
        params, state = step(params, state, *batch(k))
        scalars.append(kfac.diagnostics(state))
    return params, scalars, state


class Own(kfac.Cholesky):
    def refresh(self, state, factors, damping):
        return super().refresh(state, factors, damping)


def kfac_with(preconditioner):
    return kfac.kfac(0.1, found(), preconditioner=preconditioner)


def fisher_with(preconditioner):
    return kfac.natural_gradient(1e-2, found(), damping=0.1, preconditioner=preconditioner)


@pytest.mark.parametrize(
    ("made", "preconditioner"),
    [
        (kfac_with, kfac.SOAP()),
        (fisher_with, kfac.Eigh()),
        pytest.param(kfac_with, kfac.Cholesky(), marks=pytest.mark.slow),
        pytest.param(kfac_with, kfac.Eigh(), marks=pytest.mark.slow),
        pytest.param(fisher_with, kfac.Cholesky(), marks=pytest.mark.slow),
        pytest.param(kfac_with, kfac.EKFAC(), marks=pytest.mark.slow),
    ],
)
def test_group_layers_changes_no_number(made, preconditioner, x64, monkeypatch):
    """Compare padded groups with a group for each shape: parameters, diagnostics, averages and operators."""
    params, scalars, state = trained(made(preconditioner))
    groups = state_of(state).settings.groups
    monkeypatch.setattr(blocks, "WORTH_A_GROUP", -1)
    expected, expected_scalars, apart = trained(made(preconditioner))
    assert len(groups) < len(state_of(apart).settings.groups) == 6
    assert_close((params, scalars), (expected, expected_scalars), rtol=1e-9)
    of_state = functools.partial(kfac.curvature.factors_from_state, layers=found())
    monkeypatch.undo()
    averages = of_state(state)
    operator = None
    if isinstance(preconditioner, kfac.Cholesky | kfac.Eigh):
        operator = kfac.curvature.block_operator(found(), state).inv() @ params
    monkeypatch.setattr(blocks, "WORTH_A_GROUP", -1)
    assert_close(averages, of_state(apart), rtol=1e-9)
    if operator is not None:
        assert_close(operator, kfac.curvature.block_operator(found(), apart).inv() @ params, rtol=1e-9)


def test_filled_padding_stays_zero_outside_of_a_refresh(x64):
    _, _, state = trained(kfac_with(kfac.SOAP()))
    state = state_of(state)
    padded = [group for group in state.settings.groups if group.padded]
    assert [group.kronecker for group in padded] == [True, True, False]
    for group in padded:
        block = state.blocks[group.name]
        for k, layer in enumerate(group.layers):
            if not group.kronecker:
                assert not jnp.any(block.factors.F[k, layer.d_out :])
                continue
            kept = block.preconditioner
            for matrix in (kept.squares[k], kept.momentum[k]):
                assert not jnp.any(matrix.at[: layer.d_in, : layer.d_out].set(0))
            for factor, basis, d in (
                (block.factors.A[k], kept.A, layer.d_in),
                (block.factors.G[k], kept.G, layer.d_out),
            ):
                assert not jnp.any(factor.at[(slice(d),) * factor.ndim].set(0))
                if basis is not None:
                    # The basis never mixes the padding with the rest, and the padding comes last.
                    assert not jnp.any(basis[k, :d, d:]) and not jnp.any(basis[k, d:, :d])


def test_group_layers_pads_only_where_it_pays(x64):
    names = [group.name for group in group_layers(found(), kfac.SOAP())]
    assert names == ["kronecker_5x11_diagonal_A", "kronecker_7x8", "unitwise_7x1"]
    # A preconditioner with a `refresh` of its own says itself whether it takes padding.
    for preconditioner in (Own(), kfac.EKFAC()):
        groups = group_layers(found(), preconditioner)
        assert [group.padded for group in groups if group.kronecker] == [False] * 4

    def loss(params, x):
        return jnp.mean((x @ params["a"] @ params["b"] @ params["c"]) ** 2)

    params = {"a": jnp.ones((60, 300)), "b": jnp.ones((300, 64)), "c": jnp.ones((64, 64))}
    wide = kfac.find_layers(loss, params, jnp.ones((4, 60)), max_factor_dim=8192)
    assert [group.name for group in group_layers(wide, kfac.SOAP())] == [
        "kronecker_300x60",
        "kronecker_64x300",
        "kronecker_64x64",
    ]
    large = {"a": jnp.ones((2000, 1)), "b": jnp.ones((1, 1999)), "c": jnp.ones((1999, 1))}
    shapes = kfac.find_layers(loss, large, jnp.ones((4, 2000)), max_factor_dim=8192)
    assert not any(group.padded for group in group_layers(shapes, kfac.SOAP()))
    cut = kfac.find_layers(loss, params, jnp.ones((4, 60)), max_factor_dim=62)
    assert not any(group.padded for group in group_layers(cut, kfac.SOAP()) if group.layers[0].pieces > 1)
