"""Test the optimizer with `preconditioner=kfac.EKFAC()` against NumPy and on several devices, and test its errors.

One test uses an internal of `_curvature.ekfac`: how moments change from basis to basis.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import kfac
import problem
from checking import normal
from kfac._curvature.ekfac import between_bases
from kfac.types import Basis
from problem import assert_close, assert_equal, matrices, observing, state_of

LAYERS = problem.layers()
LAMBDA = 1e-2


@functools.cache
def measure():
    return kfac.value_and_grad(problem.loss_fn, LAYERS)


def stepper(tx):
    @jax.jit
    def step(state, batch):
        basis = kfac.curvature.eigenbasis(state, LAYERS)
        _, grads, factors = measure()(problem.initial(), batch, basis=basis)
        state = kfac.observe(state, factors)
        updates, state = tx.update(grads, state)
        return grads, factors, updates, state

    return step


def kept(state):
    """Return the eigenvectors, eigenvalues and moments of the two dense layers, which form one group."""
    blocks = state_of(state).blocks["kronecker_4x4"]
    as_numpy = jax.tree.map(lambda x: np.asarray(x, np.float64), blocks)
    found = {}
    for k, name in enumerate(("first", "out")):
        sides = as_numpy.preconditioner.A, as_numpy.preconditioner.G
        found[name] = {
            "Q": [side.vectors[k] for side in sides],
            "l": [side.values[k] for side in sides],
            "s": as_numpy.preconditioner.moments[k],
            "weight": as_numpy.preconditioner.weight[k],
        }
    return found


@pytest.mark.slow
@pytest.mark.parametrize("inverse_update_period", [1, 3])
def test_steps_against_numpy(inverse_update_period):
    """Check that moments are averaged in their basis, follow its changes, and divide the gradient."""
    decay, warmup = 0.5, 1
    tx = kfac.scale_by_kfac(
        LAYERS, preconditioner=kfac.EKFAC(), damping=LAMBDA, factor_ema_decay=decay,
        inverse_update_period=inverse_update_period, interval_warmup_steps=warmup,
    )  # fmt: skip
    state = jax.jit(tx.init)(problem.initial())
    step = stepper(tx)
    average = dict.fromkeys(("first", "out"))
    weight = dict.fromkeys(("first", "out"), 0.0)
    turned = 0
    for t in range(6):
        old = kept(state)
        grads, factors, updates, state = step(state, problem.batch(t))
        new = kept(state)
        for name in ("first", "out"):
            if t > 0:  # there is a basis
                share = (1 - decay) / (decay * weight[name] + 1 - decay)
                moments = np.asarray(factors[name].moments, np.float64)
                average[name] = moments if average[name] is None else (1 - share) * average[name] + share * moments
                weight[name] = decay * weight[name] + 1 - decay
                q_a, q_g = ((n.T @ o) ** 2 for n, o in zip(new[name]["Q"], old[name]["Q"], strict=True))
                turned += not np.allclose(q_a, np.eye(4), atol=1e-6)
                average[name] = q_g @ average[name] @ q_a.T
                np.testing.assert_allclose(new[name]["s"], average[name], rtol=2e-4, atol=1e-9)
            np.testing.assert_allclose(new[name]["weight"], weight[name], rtol=1e-6)
            a, g = new[name]["Q"]
            values = np.outer(new[name]["l"][1], new[name]["l"][0]) if t == 0 else average[name]
            expected = g @ ((g.T @ matrices(grads)[name] @ a) / (values + LAMBDA)) @ a.T
            np.testing.assert_allclose(matrices(updates)[name], expected, rtol=0, atol=1e-4 * np.abs(expected).max())
    # Both blocks change their basis at each of the five steps, or at a single refresh.
    assert turned == {1: 10, 3: 2}[inverse_update_period]


def test_the_sum_of_moments_stays_when_the_basis_turns(x64):
    def vectors(seed):
        return jnp.asarray(np.linalg.qr(np.random.default_rng(seed).normal(size=(2, 4, 4)))[0])

    old, new = (Basis(vectors(seed), vectors(seed + 1)) for seed in (1, 5))
    average = jnp.abs(normal(0, 2, 4, 4))
    turned = between_bases(average, old, new)
    np.testing.assert_allclose(turned.sum((1, 2)), average.sum((1, 2)), rtol=1e-12)
    np.testing.assert_allclose(between_bases(average, old, old), average, rtol=1e-12)
    # In the new basis, take the diagonal of the matrix that was `diag(average)` in the old basis.
    old_q, new_q = (np.kron(np.asarray(q.A[0]), np.asarray(q.G[0])) for q in (old, new))
    matrix = old_q @ np.diag(np.asarray(average[0]).T.reshape(-1)) @ old_q.T
    np.testing.assert_allclose(np.asarray(turned[0]).T.reshape(-1), np.diag(new_q.T @ matrix @ new_q), rtol=1e-10)


def test_a_rounded_basis_that_stays_loses_nothing_of_the_sum():
    vectors = jnp.asarray(np.linalg.qr(np.random.default_rng(0).normal(size=(1, 8, 8)))[0], jnp.bfloat16)
    same = Basis(vectors, vectors)
    average = jnp.abs(normal(0, 1, 8, 8, dtype=np.float32))
    moments = average
    for _ in range(50):
        moments = between_bases(moments, same, same)
    np.testing.assert_allclose(moments.sum(), average.sum(), rtol=1e-5)


@pytest.mark.slow
def test_statistics_that_are_not_finite_leave_moments_alone():
    tx = kfac.scale_by_kfac(
        LAYERS, preconditioner=kfac.EKFAC(), damping=LAMBDA, inverse_update_period=5, interval_warmup_steps=1
    )
    state = jax.jit(tx.init)(problem.initial())
    step = stepper(tx)
    for t in range(3):
        grads, factors, _, state = step(state, problem.batch(t))
    first = dataclasses.replace(factors["first"], moments=factors["first"].moments.at[0, 0].set(jnp.inf))
    bad = kfac.Factors({**factors, "first": first})
    _, after = jax.jit(observing(tx))(grads, state, factors=bad)
    assert kfac.diagnostics(after)["skipped_statistics"] == 1
    np.testing.assert_array_equal(kept(after)["first"]["s"], kept(state)["first"]["s"])
    assert not np.array_equal(kept(after)["out"]["s"], kept(state)["out"]["s"])


# -- several devices ---------------------------------------------------------------------------------------------------

DEVICES = 3


def whole(style, options, steps=4):
    """Return the updates and portable state after a few steps. Several devices share the examples."""
    params = problem.initial()
    axis = None if style in ("one", "mesh") else "devices"
    mesh = Mesh(np.array(jax.devices()[:DEVICES]), ("devices",), axis_types=(AxisType.Auto,))
    where = kfac.Distribution(axis, mesh if style == "mesh" else None)
    tx = kfac.scale_by_kfac(LAYERS, preconditioner=kfac.EKFAC(), damping=LAMBDA, distribution=where, **options)

    def step(state, batch):
        basis = kfac.curvature.eigenbasis(state, LAYERS)
        _, grads, factors = measure()(params, batch, basis=basis)
        if axis:
            grads = jax.lax.pmean(grads, axis)
        state = kfac.observe(state, factors)
        return tx.update(grads, state)

    split, same = PartitionSpec("devices"), PartitionSpec()
    if style == "pmap":
        copies = jax.tree.map(lambda x: jnp.broadcast_to(x, (DEVICES, *x.shape)), params)
        state = jax.pmap(tx.init, axis_name=axis, devices=jax.devices()[:DEVICES])(copies)
        step = jax.pmap(step, axis_name=axis, devices=jax.devices()[:DEVICES])
    elif style == "shard_map":
        specs = kfac.state.state_specs(kfac.scale_by_kfac(LAYERS, preconditioner=kfac.EKFAC()), params, "devices")
        state = jax.jit(jax.shard_map(tx.init, mesh=mesh, in_specs=same, out_specs=specs))(params)
        step = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(specs, split), out_specs=(same, specs)))
    elif style == "mesh":
        state = jax.jit(tx.init)(params)
        step = jax.jit(step)
    else:
        state, step = jax.jit(tx.init)(params), jax.jit(step)
    updates = None
    for t in range(steps):
        batch = jax.tree.map(lambda x: x[:15], problem.batch(t))
        if style == "pmap":
            batch = jax.tree.map(lambda x: x.reshape(DEVICES, -1, *x.shape[1:]), batch)
        elif style == "mesh":
            batch = jax.device_put(batch, NamedSharding(mesh, split))
        updates, state = jax.block_until_ready(step(state, batch))
    if style == "pmap":
        updates = jax.tree.map(lambda x: x[0], updates)
    return updates, state


@functools.cache
def on_one_device(inverse_update_period):
    return whole("one", {"inverse_update_period": inverse_update_period, "interval_warmup_steps": 1})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("style", "inverse_update_period"),
    [
        ("shard_map", 3),
        ("mesh", 3),
        ("pmap", 3),
        ("shard_map", 1),
    ],
)
def test_several_devices_are_one(style, inverse_update_period):
    """Check three devices, each with a third of the examples and the moments of the blocks that it owns."""
    updates, state = whole(style, {"inverse_update_period": inverse_update_period, "interval_warmup_steps": 1})
    expected, one = on_one_device(inverse_update_period)
    assert_close(updates, expected, rtol=2e-4)
    gather = jax.jit(kfac.state.gather_state)
    portable = gather(state)
    assert jax.tree.structure(portable) == jax.tree.structure(one)
    moments = state_of(portable).blocks["kronecker_4x4"].preconditioner.moments
    assert_close(moments, state_of(one).blocks["kronecker_4x4"].preconditioner.moments, rtol=2e-3)
    # A scattered state survives a round trip through two devices.
    for devices in (DEVICES, 2):
        scatter = functools.partial(kfac.state.scatter_state, num_devices=devices, pmap=style == "pmap")
        scattered = jax.jit(scatter)(portable)
        assert_equal(gather(scattered), portable)


def test_the_plan_counts_the_bytes_of_the_state():
    tx = kfac.natural_gradient(0.1, LAYERS, preconditioner=kfac.EKFAC())
    state = state_of(jax.eval_shape(tx.init, problem.initial()))
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(list(state.blocks.values())))
    one, several = (
        kfac.planning.estimate(LAYERS, devices=devices, preconditioner=kfac.EKFAC()) for devices in (1, DEVICES)
    )
    assert one.memory["state"] == held
    plain = kfac.planning.estimate(LAYERS, devices=DEVICES, preconditioner=kfac.Eigh())
    # Each 4 x 4 block has moments and a weight on its owner.
    assert several.memory["state"] - plain.memory["state"] == 4 * (16 + 1)
    # EKFAC sends moments in addition to the triangles.
    assert several.messages["statistics"] > plain.messages["statistics"]


@pytest.mark.slow
def test_an_axis_of_one_device():
    """Check that the state on a mesh with a single device equals the state without a mesh."""
    mesh = Mesh(np.array(jax.devices()[:1]), ("devices",), axis_types=(AxisType.Auto,))
    alone, meshed = (
        kfac.scale_by_kfac(LAYERS, preconditioner=kfac.EKFAC(), distribution=kfac.Distribution(mesh=m))
        for m in (None, mesh)
    )
    state = jax.jit(alone.init)(problem.initial())
    grads, factors, expected, _ = stepper(alone)(state, problem.batch(0))
    scattered = kfac.state.scatter_state(state, 1)
    assert jax.tree.structure(scattered) == jax.tree.structure(state)
    for tx in (meshed, alone):
        update = jax.jit(observing(tx))
        assert_close(update(grads, scattered, factors=factors)[0], expected)


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_does_not_go_together_is_refused():
    params, batch = problem.initial(), problem.batch(0)
    tx, eigh = (
        kfac.scale_by_kfac(LAYERS, preconditioner=preconditioner) for preconditioner in (kfac.EKFAC(), kfac.Eigh())
    )
    state, other = jax.jit(tx.init)(params), jax.jit(eigh.init)(params)
    grads, plain = problem.measured(0)
    basis = kfac.curvature.eigenbasis(state, LAYERS)
    _, _, factors = measure()(params, batch, basis=basis)
    with pytest.raises(
        ValueError, match=r"layer 'first' have no moments, which preconditioner=EKFAC.*basis=kfac.curvature.eigenbasis"
    ):
        kfac.observe(state, plain)
    with pytest.raises(ValueError, match=r"layer 'first' have moments.*no use: choose preconditioner=kfac.EKFAC"):
        kfac.observe(other, factors)
    with pytest.raises(
        ValueError, match=r"preconditioner=EKFAC.*, but the optimizer state is one for preconditioner=Eigh"
    ):
        tx.update(grads, other)
    with pytest.raises(
        ValueError, match=r"preconditioner=Eigh.*, but the optimizer state is one for preconditioner=EKFAC"
    ):
        eigh.update(grads, state)
    with pytest.raises(ValueError, match="basis without layer 'out'"):
        measure()(params, batch, basis={"first": basis["first"]})
    with pytest.raises(ValueError, match=r"basis of layer 'out': A must have shape \(4, 4\), but has \(3, 3\)"):
        measure()(params, batch, basis={**basis, "out": Basis(jnp.eye(3), jnp.eye(4))})
    with pytest.raises(ValueError, match=r"basis is of type tuple: pass basis=kfac.curvature.eigenbasis"):
        measure()(params, batch, basis=(1, 2))
    with pytest.raises(
        ValueError, match=r"source must be a state with preconditioner=kfac.EKFAC\(\), but is one with Eigh"
    ):
        kfac.curvature.eigenbasis(other, LAYERS)
    with pytest.raises(ValueError, match=r"source holds no state of kfac\.kfac"):
        kfac.curvature.eigenbasis({"a": 1}, LAYERS)
    with pytest.raises(ValueError, match=r"source must hold one K-FAC state, but holds 2: give the part"):
        kfac.curvature.eigenbasis((state, state), LAYERS)


@pytest.mark.slow
def test_layers_whose_examples_are_not_told_apart_have_no_moments():
    def loss(p, x):
        rows = x.reshape(-1, 3)
        return jnp.mean(jnp.tanh(rows[jnp.argsort(rows[:, 0])] @ p["w"]) ** 2)

    params, x = {"w": jnp.ones((3, 2))}, jnp.ones((4, 5, 3))
    layers = kfac.find_layers(loss, params, x)
    assert layers["w"].kind == "dense" and layers["w"].uses == 1
    assert not layers["w"].has_example_gradients and not layers["w"].supports_ekfac
    _, _, factors = kfac.value_and_grad(loss, layers)(params, x, basis={})
    assert factors["w"].moments is None
    with pytest.raises(ValueError, match="basis with layer 'w'"):
        kfac.value_and_grad(loss, layers)(params, x, basis={"w": Basis(jnp.eye(3), jnp.eye(2))})
