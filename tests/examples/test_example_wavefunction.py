"""Test `examples/wavefunction` at small size: exact wavefunctions, both ways to a gradient, and every method."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import kfac
from exact import fisher_blocks

pytestmark = pytest.mark.examples


@pytest.fixture
def vmc(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples" / "wavefunction"))
    import vmc

    return vmc


@pytest.fixture
def small(vmc):
    from ferminet import Sizes

    return Sizes(layers=2, one=5, two=3, determinants=2)


def exact_hydrogen(vmc, sizes):
    """Return parameters for which psi is exp(-r)."""
    params = vmc.init(jax.random.key(0), vmc.ATOMS["hydrogen"], sizes)
    params["orbitals 0"]["kernel"] = jnp.zeros_like(params["orbitals 0"]["kernel"])
    params["decay 0"] = jnp.ones_like(params["decay 0"])
    return params


def test_the_ground_state_of_hydrogen_has_its_energy_everywhere(vmc, small):
    atom, params = vmc.ATOMS["hydrogen"], exact_hydrogen(vmc, small)
    x = jax.random.normal(jax.random.key(1), (20, 3))
    np.testing.assert_allclose(jax.jit(vmc.local_energies, static_argnums=1)(params, atom, x), -0.5, atol=1e-4)
    energy, deviation = vmc.evaluate(params, atom, x, jnp.asarray(0.5), 20)
    assert energy == pytest.approx(-0.5, abs=1e-5) and deviation < 1e-5


def test_walkers_are_distributed_as_psi_squared(vmc, small):
    """Check the mean distance in hydrogen's ground state, which is 3/2. The width of moves adapts."""
    atom, params = vmc.ATOMS["hydrogen"], exact_hydrogen(vmc, small)
    x, width = jax.random.normal(jax.random.key(1), (2000, 3)), jnp.asarray(1.0)
    walk = jax.jit(vmc.walk, static_argnums=(1, 5))
    for k in range(40):
        x, width = walk(params, atom, x, width, jax.random.key(k), 10)
    # The standard deviation of r is sqrt(3)/2.
    assert float(jnp.linalg.norm(x, axis=-1).mean()) == pytest.approx(1.5, abs=4 * 3**0.5 / 2 / 2000**0.5)
    for wrong, better in ((0.01, jnp.greater), (20.0, jnp.less)):
        assert better(walk(params, atom, x, jnp.asarray(wrong), jax.random.key(0), 10)[1], wrong)


@pytest.mark.parametrize("title", ["lithium", pytest.param("helium", marks=pytest.mark.slow)])
def test_psi_changes_sign_at_most_and_its_laplacian_is_that_of_the_hessian(vmc, small, title, x64):
    import ferminet

    local_energy, log_psi = ferminet.local_energy, jax.jit(ferminet.log_psi, static_argnums=1)
    atom = vmc.ATOMS[title]
    params = vmc.init(jax.random.key(0), atom, small)
    x = jax.random.normal(jax.random.key(1), (3 * atom.charge,))
    places = x.reshape(-1, 3)
    if title == "lithium":  # the electrons with spin up change places
        swapped = places[jnp.asarray([1, 0, 2])].ravel()
        assert float(log_psi(params, atom, swapped)) == pytest.approx(float(log_psi(params, atom, x)), rel=1e-10)
        together = places.at[1].set(places[0] + 1e-9).ravel()
        assert float(log_psi(params, atom, together)) < float(log_psi(params, atom, x)) - 10
    psi = lambda x: jnp.exp(log_psi(params, atom, x))  # noqa: E731
    kinetic = -0.5 * jnp.trace(jax.jit(jax.hessian(psi))(x)) / psi(x)
    pairs = [(i, j) for i in range(atom.charge) for j in range(i)]
    potential = sum(1 / jnp.linalg.norm(places[i] - places[j]) for i, j in pairs)
    potential -= sum(atom.charge / jnp.linalg.norm(p) for p in places)
    found = jax.jit(local_energy, static_argnums=1)(params, atom, x)
    np.testing.assert_allclose(found, kinetic + potential, rtol=1e-8)


@pytest.mark.parametrize(
    "title", ["helium", *(pytest.param(t, marks=pytest.mark.slow) for t in ("hydrogen", "lithium"))]
)
def test_both_losses_have_the_gradient_of_the_energy(vmc, small, title, x64):
    from ferminet import clipped, log_psi, make_energy, surrogate

    atom = vmc.ATOMS[title]
    params = vmc.init(jax.random.key(0), atom, small)
    x = jax.random.normal(jax.random.key(1), (16, 3 * atom.charge))
    losses = lambda params, x: surrogate(params, atom, x), make_energy(atom)
    change = clipped(jax.jit(vmc.local_energies, static_argnums=1)(params, atom, x))[1]
    slopes = jax.jit(jax.vmap(lambda x: ravel_pytree(jax.grad(log_psi)(params, atom, x))[0]))(x)
    expected = change @ slopes / len(x)
    for loss in losses:
        layers = kfac.find_layers(loss, params, x)
        np.testing.assert_allclose(ravel_pytree(jax.jit(jax.grad(loss))(params, x))[0], expected, atol=1e-10)
        _, grads, factors = jax.jit(kfac.value_and_grad(loss, layers, num_examples=len(x)))(params, x)
        np.testing.assert_allclose(ravel_pytree(grads)[0], expected, atol=1e-10)
        # Layers within a custom rule have no exact rows.
        exact = {layer.name for layer in layers if layer.kind != "gradient-factors"}
        assert set(factors) == exact == ({layer.name for layer in layers} if loss is losses[0] else set())


def test_statistics_are_those_of_the_gradients_of_log_psi(vmc, small, x64):
    """Compare the marked output's exact blocks with second moments, which `centred` turns into covariances."""
    from ferminet import log_psi, logs

    atom = vmc.ATOMS["helium"]
    params = vmc.init(jax.random.key(0), atom, small)
    x = jax.random.normal(jax.random.key(1), (64, 6))
    marked = lambda params, x: logs(params, atom, x).mean()  # noqa: E731
    layers = kfac.find_layers(marked, params, x)
    slopes = jax.jit(jax.vmap(lambda x: jax.grad(log_psi)(params, atom, x)))(x)
    mean = jax.jit(jax.grad(marked))(params, x)
    exact = jax.jit(fisher_blocks(marked, layers))(params, x)
    for name in ("one 0", "orbitals 1"):
        rows = jax.vmap(lambda tree: ravel_pytree(tree)[0])(slopes[name])
        second = rows.T @ rows / len(x)
        np.testing.assert_allclose(jnp.trace(exact[name]), jnp.trace(second), rtol=1e-8)
        metric = second + 10 * jnp.eye(len(second))
        m = ravel_pytree(mean[name])[0]
        g = jnp.cos(jnp.arange(len(m)))
        found = vmc.centred({0: jnp.linalg.solve(metric, g)}, {0: m}, {0: jnp.linalg.solve(metric, m)})[0]
        np.testing.assert_allclose(found, jnp.linalg.solve(metric - jnp.outer(m, m), g), rtol=1e-6, atol=1e-8)


def test_every_method_lowers_the_energy(vmc, small, tmp_path):
    found = vmc.run(
        {"helium": tuple(vmc.RATES)}, steps=40, walkers=64, rounds=20, sizes=small, picture=tmp_path / "picture.png"
    )
    assert (tmp_path / "picture.png").stat().st_size > 0
    assert [row[1] for row in found] == list(vmc.RATES)
    params, (x, width), *_ = vmc.train("adam", vmc.ATOMS["helium"], 0, 64, sizes=small)
    before, _ = vmc.evaluate(params, vmc.ATOMS["helium"], x, width, 20)
    for _, name, error, deviation, seconds in found:
        assert error < 1e3 * (before + 2.903724), name
        assert deviation > 0 and seconds > 0
