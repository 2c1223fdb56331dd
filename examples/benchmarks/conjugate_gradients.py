"""Count the conjugate-gradient steps that K-FAC's blocks save as a preconditioner for the full Gauss-Newton matrix.

    python examples/benchmarks/conjugate_gradients.py

The script uses three small networks on handwritten digits, before and after 100 steps with Adam. It takes about a
minute.

Better blocks would help only a little, because the main limit is the curvature between layers, which blocks leave out.
This table shows steps for smaller networks in float64. Exact dense blocks have the same damping as the system:

    network                          damping   no preconditioner   exact blocks   K-FAC   EK-FAC
    64-24-20-16-10, untrained        1e-2                     25             36      37       37
                                     1e-4                    132             95     130      122
    64-24-20-16-10, 100 steps        1e-2                     24             24      33       33
                                     1e-4                    122             61     105      106
    autoencoder 64-20-8-20-64        1e-2                     49             25      30       30
                                     1e-4                    244             35      72       75
    autoencoder, 100 steps           1e-2                     67             49      59       59
                                     1e-4                    408            179     309      302

With exact blocks, the preconditioned matrix has eigenvalues from about damping / curvature up to 4, the number of
layers. The small eigenvalues belong to changes in several layers that cancel each other. Such changes have curvature in
the blocks, but none in the full matrix.
"""

import environment  # noqa: F401, isort: skip; before JAX is imported

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from sklearn.datasets import load_digits

import kfac

TRAINED, DAMPINGS, TOLERANCE = (0, 100), (1e-2, 1e-4), 1e-3


def dense(p, x):
    for layer in ("a", "b", "c"):
        x = jnp.tanh(x.reshape(len(x), -1) @ p[layer]["w"] + p[layer]["bias"])
    return x @ p["out"]


def autoencoder(p, x):
    x = x.reshape(len(x), -1)
    for layer in ("a", "b", "c"):
        x = jnp.tanh(x @ p[layer])
    return x @ p["out"]


def attention(p, x):
    """Return the logits of an attention block over an image's eight rows."""
    h = x @ p["embed"] + p["places"]
    q, k, v = (h @ p[name] for name in "qkv")
    h = h + jax.nn.softmax(q @ k.mT / 4) @ v
    h = h + jax.nn.gelu(h @ p["up"]) @ p["down"]
    return h.mean(1) @ p["out"]


def matrices(**shapes):
    keys = jax.random.split(jax.random.key(0), len(shapes))
    pairs = zip(keys, shapes.items(), strict=True)
    return {name: jax.random.normal(key, s) / np.prod(s[:-1]) ** 0.5 for key, (name, s) in pairs}


def networks():
    p = matrices(a=(64, 100), b=(100, 50), c=(50, 20), out=(20, 10))
    layered = {k: {"w": w, "bias": jnp.zeros(w.shape[1])} if k != "out" else w for k, w in p.items()}
    yield "dense, 3 hidden layers", dense, layered
    yield "autoencoder", autoencoder, matrices(a=(64, 40), b=(40, 10), c=(10, 40), out=(40, 64))
    square = dict.fromkeys("qkv", (16, 16))
    sizes = {"embed": (8, 16), "places": (8, 16), **square, "up": (16, 64), "down": (64, 16), "out": (16, 10)}
    yield "attention, 1 block", attention, matrices(**sizes)


@jax.jit
def count_steps(matrix, blocks, gradient, damping):
    """Return the number of conjugate-gradient steps until the residual norm is `TOLERANCE` times its first value.

    Args:
      matrix: the Gauss-Newton matrix.
      blocks: K-FAC's approximation of the matrix, or None for no preconditioner. It gets the same damping.
      gradient: the right-hand side, a flat vector.
      damping: a number, added to the diagonal.
    """

    def precondition(v):
        return v if blocks is None else (blocks + damping).inv() @ v

    def unfinished(state):
        r, _, _, k = state
        return (jnp.linalg.norm(r) > TOLERANCE * jnp.linalg.norm(gradient)) & (k < 1000)

    def step(state):
        r, p, rz, k = state
        moved = matrix @ p + damping * p
        r = r - rz / jnp.vdot(p, moved) * moved
        z = precondition(r)
        new = jnp.vdot(r, z)
        return r, z + new / rz * p, new, k + 1

    z = precondition(gradient)
    initial = gradient, z, jnp.vdot(gradient, z), jnp.zeros((), jnp.int32)
    return jax.lax.while_loop(unfinished, step, initial)[-1]


def main():
    images, labels = load_digits(return_X_y=True)
    data = jnp.asarray(images[:300].reshape(-1, 8, 8) / 16, jnp.float32), jnp.asarray(labels[:300])
    print("network                  steps  damping   loss  without   K-FAC   EK-FAC  least / without")
    for name, network, params in networks():

        def loss_fn(params, batch, network=network):
            z = network(params, batch[0])
            if network is autoencoder:
                z = kfac.mark_output(z, "bernoulli")
                return optax.sigmoid_binary_cross_entropy(z, batch[0].reshape(z.shape)).sum(-1).mean()
            return optax.softmax_cross_entropy_with_integer_labels(kfac.mark_output(z, "categorical"), batch[1]).mean()

        adam = optax.adam(3e-3)

        @jax.jit
        def train(params, loss_fn=loss_fn, adam=adam):
            def step(carry, _):
                updates, state = adam.update(jax.grad(loss_fn)(carry[0], data), carry[1])
                return (optax.apply_updates(carry[0], updates), state), None

            return jax.lax.scan(step, (params, adam.init(params)), length=max(TRAINED))[0][0]

        layers = kfac.find_layers(loss_fn, params, data)
        for steps in TRAINED:
            params = train(params) if steps else params
            loss, gradient = jax.value_and_grad(loss_fn)(params, data)
            factors = kfac.curvature.estimate_factors(
                loss_fn, layers, params, [data], fisher="expected", key=jax.random.key(0)
            )
            basis = kfac.curvature.eigenbasis(factors, layers)
            moments = kfac.curvature.estimate_factors(
                loss_fn, layers, params, [data], fisher="expected", key=jax.random.key(0), basis=basis
            )
            matrix, flat = kfac.curvature.gauss_newton(loss_fn, params, data), ravel_pytree(gradient)[0]
            near = (
                kfac.curvature.block_operator(layers, factors),
                kfac.curvature.block_operator(layers, moments, basis=basis),
            )
            for damping in DAMPINGS:
                counts = [int(count_steps(matrix, blocks, flat, damping)) for blocks in (None, *near)]
                without, blocks, corrected = counts
                row = f"{name:24s} {steps:5d} {damping:8.0e} {float(loss):6.2f} {without:8d} {blocks:7d} {corrected:8d}"
                print(f"{row}  {min(blocks, corrected) / without:.2f}", flush=True)


if __name__ == "__main__":
    main()
