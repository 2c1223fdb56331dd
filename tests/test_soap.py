"""`inverse=kfac.Soap()`: what it keeps and applies, against NumPy; devices; refusals."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

import kfac
import problem
from problem import QUICKLY, assert_close, assert_equal, history, matrices, measured, state_of

LAYERS = problem.layers()
DECAY = 0.8


def basis(state):
    """The eigenvectors of the two dense layers, which are one group."""
    inverse = state_of(state).owned["kronecker_4x4"].blocks.inverse
    return {
        name: [np.asarray(side.vectors[k], np.float64) for side in (inverse.A, inverse.G)]
        for k, name in enumerate(("first", "out"))
    }


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("inverse_every", [1, 3])
def test_steps_against_numpy(inverse_every, relative):
    """Squares of gradients are averaged in the basis, turned with it, and their root divides the gradient."""
    damping = 1e-3
    tx = kfac.scale_by_kfac(
        LAYERS, inverse=kfac.Soap(decay=DECAY, relative=relative), damping=damping, factor_decay=0.5,
        inverse_every=inverse_every, refresh_warmup=0, distribution=kfac.Distribution(staggered=False),
    )  # fmt: skip
    state, update = tx.init(problem.initial()), jax.jit(tx.update, compiler_options=QUICKLY)
    average, weight, turned = {}, 0.0, 0
    for t in range(6):
        old = basis(state)
        grads, factors = measured(t)
        # Gradients count in steps without statistics, too.
        updates, state = update(grads, state, factors=factors if t % 2 == 0 else None)
        share = (1 - DECAY) / (DECAY * weight + 1 - DECAY)
        weight = DECAY * weight + 1 - DECAY
        for name, (a, g) in basis(state).items():
            squares = (g.T @ matrices(grads)[name] @ a) ** 2
            if t > 0:
                q_a, q_g = ((new.T @ before) ** 2 for new, before in zip((a, g), old[name], strict=True))
                turned += not np.allclose(q_a, np.eye(4), atol=1e-6)
                squares = (1 - share) * (q_g @ average[name] @ q_a.T) + share * squares
            average[name] = squares
            root = np.sqrt(squares + damping * (squares.mean() if relative else 1))
            expected = g @ ((g.T @ matrices(grads)[name] @ a) / root) @ a.T
            np.testing.assert_allclose(matrices(updates)[name], expected, rtol=0, atol=2e-4 * np.abs(expected).max())
    assert turned > 0


@pytest.mark.parametrize("inverse_every", [1, 3])
def test_several_devices_are_one(inverse_every):
    mesh = jax.make_mesh((3,), ("devices",), axis_types=(AxisType.Auto,), devices=jax.devices()[:3])

    def made(mesh):
        where = kfac.Distribution(mesh=mesh, staggered=False)
        return kfac.scale_by_kfac(LAYERS, inverse=kfac.Soap(), inverse_every=inverse_every, distribution=where)

    (_, one, expected), (_, state, updates) = (history(made(m))[-1] for m in (None, mesh))
    assert_close(updates, expected, rtol=2e-4)
    portable = kfac.gather_state(state)
    assert jax.tree.structure(portable) == jax.tree.structure(one)
    assert_close(*(state_of(s).owned["kronecker_4x4"].blocks.inverse.moments for s in (portable, one)), rtol=2e-3)
    assert_equal(kfac.gather_state(kfac.scatter_state(portable, 2)), portable)


def test_a_gradient_that_is_not_finite_leaves_moments_alone():
    tx = kfac.kfac(0.1, LAYERS, inverse=kfac.Soap())
    _, state, _ = history(tx, 2)[-1]
    grads, factors = measured(2)
    bad = jax.tree.map(lambda x: x.at[(0,) * x.ndim].set(jnp.nan), grads)
    _, after = tx.update(bad, state, problem.initial(), factors=factors)
    assert kfac.diagnostics(after)["skipped_steps"] == 1
    assert_equal(*(state_of(s).owned["kronecker_4x4"].blocks.inverse.moments for s in (after, state)))


def test_a_factor_that_is_kept_as_its_diagonal():
    layers = kfac.find_layers(problem.loss_fn, problem.initial(), problem.batch(0), max_dim=3)
    tx = kfac.scale_by_kfac(layers, inverse=kfac.Soap(), damping=1e-3)
    grads = problem.measured(0)[0]
    _, _, factors = kfac.value_and_grad(problem.loss_fn, layers)(problem.initial(), problem.batch(0))
    updates, _ = tx.update(grads, tx.init(problem.initial()), factors=factors)
    dense = layers["out"]
    assert set(dense.diagonal) == {"A", "G"}  # so it is Adam, entry by entry
    leaves, new = (dict(zip(layers.paths, jax.tree.leaves(tree), strict=True)) for tree in (grads, updates))
    for path in dense.params:
        np.testing.assert_allclose(new[path], leaves[path] / np.sqrt(leaves[path] ** 2 + 1e-3), rtol=1e-5)


def test_what_does_not_go_together_is_refused():
    with pytest.raises(ValueError, match="precondition='replicated' is not for inverse=Soap"):
        kfac.scale_by_kfac(LAYERS, inverse=kfac.Soap(), distribution=kfac.Distribution(precondition="replicated"))
    with pytest.raises(ValueError, match="decay must lie in"):
        kfac.Soap(decay=1.0)
    _, state, _ = history(kfac.scale_by_kfac(LAYERS, inverse=kfac.Soap()), 1)[-1]
    with pytest.raises(ValueError, match="does not say which eigenvectors it has"):
        kfac.operator(LAYERS, state)


def test_the_optimizer_preconditions_the_momentum_of_the_gradients():
    rate, momentum, damping = 0.1, 0.9, 1e-3
    tx = kfac.kfac(
        rate, LAYERS, inverse=kfac.Soap(decay=DECAY), trust_ratio=None, damping=damping, momentum=momentum,
        nesterov=True, inverse_every=3,
    )  # fmt: skip
    alone = kfac.scale_by_kfac(LAYERS, inverse=kfac.Soap(decay=DECAY), damping=damping, inverse_every=3)
    state, kept = tx.init(problem.initial()), alone.init(problem.initial())
    trace = jax.tree.map(jnp.zeros_like, problem.initial())
    for t in range(4):
        grads, factors = measured(t)
        updates, state = tx.update(grads, state, problem.initial(), factors=factors)
        trace = jax.tree.map(lambda g, m: momentum * m + g, grads, trace)
        ahead = jax.tree.map(lambda g, m: momentum * m + g, grads, trace)
        expected, kept = alone.update(grads, kept, factors=factors, averaged=ahead)
        assert_close(updates, jax.tree.map(lambda x: -rate * x, expected), rtol=1e-4)
    assert float(kfac.diagnostics(state)["gradient_norm"]) == pytest.approx(
        float(kfac.diagnostics(kept)["gradient_norm"])
    )
    bad = jax.tree.map(lambda x: x.at[(0,) * x.ndim].set(jnp.nan), grads)
    updates, after = tx.update(bad, state, problem.initial(), factors=factors)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(updates))
    assert_equal(optax.tree.get(after, "trace"), optax.tree.get(state, "trace"))


def test_owners_under_shard_map():
    """The whole optimizer, with the momentum of the gradients, where every device has its own part of the state."""
    mesh = jax.make_mesh((3,), ("devices",), axis_types=(AxisType.Auto,), devices=jax.devices()[:3])
    same = PartitionSpec()

    def made(axis):
        where = kfac.Distribution(axis, staggered=False)
        return kfac.kfac(0.05, LAYERS, inverse=kfac.Soap(), inverse_every=2, distribution=where)

    tx, params = made("devices"), problem.initial()
    specs = kfac.state_specs(made(None), params, "devices")
    state = jax.jit(jax.shard_map(tx.init, mesh=mesh, in_specs=same, out_specs=specs))(params)
    over_devices = jax.shard_map(
        lambda grads, state, params, factors: tx.update(grads, state, params, factors=factors),
        mesh=mesh, in_specs=(same, specs, same, same), out_specs=(same, specs),
    )  # fmt: skip
    update = jax.jit(over_devices, compiler_options=QUICKLY)
    for t, (at, _, expected) in enumerate(history(made(None), 4)):
        updates, state = update(measured(t)[0], state, params, measured(t)[1])
        assert_close(updates, expected, rtol=5e-4)
        params = at


def test_what_is_preconditioned_must_be_like_the_gradients():
    tx = kfac.scale_by_kfac(LAYERS, inverse=kfac.Soap())
    (_, state, _) = history(tx, 1)[-1]
    grads, factors = measured(1)
    with pytest.raises(ValueError, match="averaged: leaf"):
        tx.update(grads, state, factors=factors, averaged=jax.tree.map(lambda x: x[..., None], grads))
    bad = jax.tree.map(lambda x: x.at[(0,) * x.ndim].set(jnp.inf), grads)
    _, after = tx.update(grads, state, factors=factors, averaged=bad)
    assert kfac.diagnostics(after)["skipped_steps"] == 1


@pytest.mark.parametrize("scale", [1e-17, 1e-19, 1e-25])
def test_a_layer_with_hardly_a_gradient_stops_no_other(scale):
    """Its mean squares, times the damping, leave the range of float32."""
    tx = kfac.kfac(0.1, LAYERS, inverse=kfac.Soap())
    state = history(tx, 1)[-1][1]
    grads, factors = measured(1)
    grads = {**grads, "first": jax.tree.map(lambda x: scale * x, grads["first"])}
    for _ in range(3):
        updates, state = tx.update(grads, state, problem.initial(), factors=factors)
    assert kfac.diagnostics(state)["skipped_steps"] == 0
    assert all(np.any(leaf) for leaf in jax.tree.leaves(updates["out"]))


@pytest.mark.parametrize("inverse", [kfac.Cholesky(), kfac.Soap()])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_narrow_models_where_float64_is_allowed(x64, dtype, inverse):
    params = problem.initial(dtype)
    batch = problem.batch(0, dtype=dtype)
    layers = kfac.find_layers(problem.loss_fn, params, batch)
    tx = kfac.kfac(0.05, layers, inverse=inverse)
    _, grads, factors = kfac.value_and_grad(problem.loss_fn, layers)(params, batch)
    updates, state = tx.update(grads, tx.init(params), params, factors=factors)
    assert {leaf.dtype for leaf in jax.tree.leaves(updates)} == {jnp.dtype(dtype)}
    assert all(np.isfinite(np.asarray(leaf, np.float64)).all() for leaf in jax.tree.leaves(updates))
    assert kfac.diagnostics(state)["skipped_steps"] == 0
