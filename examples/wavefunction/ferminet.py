"""Define a small FermiNet: log |psi| for an atom's electrons, and their local energy."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import kfac


class Atom(NamedTuple):
    charge: int
    up: int  # electrons with spin up; the other electrons have spin down
    energy: float  # exact energy in hartree, for a heavy nucleus and without relativity


ATOMS = {"hydrogen": Atom(1, 1, -0.5), "helium": Atom(2, 1, -2.903724), "lithium": Atom(3, 2, -7.478060)}


class Sizes(NamedTuple):
    layers: int = 2
    one: int = 24  # features per electron
    two: int = 6  # features per pair
    determinants: int = 4


SMALL = Sizes()


def sizes_of(atom: Atom) -> list[int]:
    """Return the number of electrons for each spin."""
    return [size for size in (atom.up, atom.charge - atom.up) if size]


def init(key: jax.Array, atom: Atom, sizes: Sizes) -> Any:
    """Return initial parameters. Each orbital has a separate decay, whose initial value depends on the charge."""
    keys = iter(jax.random.split(key, 2 * sizes.layers + 1))

    def dense(d_in, d_out):
        return {"kernel": jax.random.normal(next(keys), (d_in, d_out)) * d_in**-0.5, "bias": jnp.zeros(d_out)}

    n, one, two, params = atom.charge, 4, 4, {}
    spins = len(sizes_of(atom))
    for k in range(sizes.layers):
        params[f"one {k}"] = dense((1 + spins) * one + spins * two, sizes.one)
        if k < sizes.layers - 1:  # the network does not read the last layer's pairs
            params[f"two {k}"] = dense(two, sizes.two)
        one, two = sizes.one, sizes.two
    for spin, size in enumerate(sizes_of(atom)):
        orbitals = dense(one, sizes.determinants * size)
        params[f"orbitals {spin}"] = {"kernel": 0.3 * orbitals["kernel"], "bias": jnp.ones_like(orbitals["bias"])}
        params[f"decay {spin}"] = jnp.tile(n / (1.0 + jnp.arange(size)), sizes.determinants)
    return params


def log_psi(params: Any, atom: Atom, x: jax.Array) -> jax.Array:
    """Return log |psi| at the positions `x`, `[3 electrons]`."""
    n = atom.charge
    x = x.reshape(n, 3)
    spins = [slice(0, atom.up), slice(atom.up, n)][: len(sizes_of(atom))]
    r = jnp.sqrt(jnp.sum(x * x, -1, keepdims=True))
    difference = x[:, None] - x
    # An electron's distance to itself is zero. A norm has no derivative there, so the diagonal is set to one.
    apart = jnp.sqrt(jnp.sum(difference**2, -1, keepdims=True) + jnp.eye(n)[..., None])
    one = jnp.concatenate([x, r], -1)
    two = jnp.concatenate([difference, apart * (1 - jnp.eye(n)[..., None])], -1)
    for k in range(sum(name.startswith("one") for name in params)):
        means = [jnp.broadcast_to(one[spin].mean(0), one.shape) for spin in spins]
        pairs = [two[:, spin].mean(1) for spin in spins]
        new = jnp.tanh(_dense(params[f"one {k}"], jnp.concatenate([one, *means, *pairs], -1)))
        one = one + new if one.shape == new.shape else new
        if f"two {k}" in params:
            two = jnp.tanh(_dense(params[f"two {k}"], two))
    product = jnp.ones(())
    for k, spin in enumerate(spins):
        orbitals = _dense(params[f"orbitals {k}"], one[spin]) * jnp.exp(-r[spin] * params[f"decay {k}"])
        square = jnp.moveaxis(orbitals.reshape(len(orbitals), -1, len(orbitals)), 1, 0)
        product = product * (square[:, 0, 0] if square.shape[1:] == (1, 1) else jnp.linalg.det(square))
    return jnp.log(jnp.abs(jnp.sum(product)))


def _dense(layer: Any, x: jax.Array) -> jax.Array:
    return x @ layer["kernel"] + layer["bias"]


def local_energy(params: Any, atom: Atom, x: jax.Array) -> jax.Array:
    """Return `H psi / psi`. The kinetic part uses the gradient's forward derivative for each coordinate."""
    gradient = jax.grad(log_psi, argnums=2)

    def second(unit):
        first, slope = jax.jvp(lambda x: gradient(params, atom, x), (x,), (unit,))
        return unit @ slope + (unit @ first) ** 2

    kinetic = -0.5 * jnp.sum(jax.vmap(second)(jnp.eye(len(x))))
    places = x.reshape(-1, 3)
    above, below = jnp.triu_indices(atom.charge, 1)
    repulsion = jnp.sum(1 / jnp.linalg.norm(places[above] - places[below], axis=-1))
    return kinetic + repulsion - atom.charge * jnp.sum(1 / jnp.linalg.norm(places, axis=-1))


def clipped(energies: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the mean energy, and the centred energies with outliers clipped.

    An outlier differs from the median by more than five mean absolute deviations.
    """
    mean, middle = energies.mean(), jnp.median(energies)
    width = 5 * jnp.mean(jnp.abs(energies - middle))
    near = jnp.clip(energies, middle - width, middle + width)
    return mean, near - near.mean()


def logs(params: Any, atom: Atom, x: jax.Array) -> jax.Array:
    """Return log |psi| for all walkers, marked as residuals.

    The Fisher matrix of psi^2 is four times the mean product of the gradients of log |psi|. These products form the
    Gauss-Newton matrix with a residual for each walker.
    """
    found = jax.vmap(lambda x: log_psi(params, atom, x))(x)
    return kfac.mark_output(found[:, None], "residual")[:, 0]


def local_energies(params: Any, atom: Atom, x: jax.Array) -> jax.Array:
    return jax.vmap(lambda x: local_energy(params, atom, x))(x)


def surrogate(params: Any, atom: Atom, x: jax.Array) -> jax.Array:
    """Return a surrogate loss, whose gradient is half the energy's gradient `2 E[(E_loc - E) grad log |psi|]`.

    The loss value itself has no meaning.
    """
    change = jax.lax.stop_gradient(clipped(local_energies(params, atom, x))[1])
    return jnp.mean(change * logs(params, atom, x))


def make_energy(atom: Atom) -> Any:
    """Return `energy(params, x)`, the mean local energy, whose custom rule gives the surrogate's gradient."""

    @jax.custom_jvp
    def energy(params, x):
        return local_energies(params, atom, x).mean()

    @energy.defjvp
    def rule(primals, tangents):
        params, x = primals
        mean, change = clipped(local_energies(params, atom, x))
        slope = jax.jvp(lambda params: logs(params, atom, x), (params,), (tangents[0],))[1]
        return mean, jnp.mean(change * slope)

    return energy
