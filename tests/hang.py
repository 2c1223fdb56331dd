"""Twenty steps of four dense layers on two simulated devices, as a process: it printed nothing where they hung.

Matrices inverted as one batch wait for XLA's threads on XLA's threads. On a machine with two cores this script hung in
six of six runs while the refresh inverted several together.
"""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import kfac

LAYERS, WIDTH = 4, 256


def loss_fn(params, x):
    for k in range(LAYERS):
        x = jnp.tanh(x @ params[f"layer{k}"])
    return jnp.mean(x**2)


def main():
    mesh = jax.make_mesh((2,), ("devices",), axis_types=(jax.sharding.AxisType.Auto,))
    rng = np.random.default_rng(0)
    params = {f"layer{k}": jnp.asarray(rng.normal(size=(WIDTH, WIDTH)) / 16, jnp.float32) for k in range(LAYERS)}
    x = jnp.asarray(rng.normal(size=(64, WIDTH)), jnp.float32)
    layers = kfac.find_layers(loss_fn, params, x)
    tx = kfac.kfac(0.01, layers, distribution=kfac.Distribution(mesh=mesh))
    params = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
    x = jax.device_put(x, NamedSharding(mesh, PartitionSpec("devices")))
    state = tx.init(params)

    @jax.jit
    def step(params, state, x):
        _, grads, factors = kfac.value_and_grad(loss_fn, layers)(params, x)
        updates, state = tx.update(grads, state, params, factors=factors)
        return optax.apply_updates(params, updates), state

    for _ in range(20):
        params, state = step(params, state, x)
    print("failed inversions:", int(kfac.diagnostics(state)["failed_inversions"]))


if __name__ == "__main__":
    main()
