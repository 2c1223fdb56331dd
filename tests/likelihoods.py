"""Write out likelihoods: targets, losses, and gradients for every value of a target."""

import jax
import jax.numpy as jnp
import numpy as np

LIKELIHOODS = ("categorical", "bernoulli", "gaussian")


def value_gradients(likelihood, z):
    """Return weights and gradients `g` whose weighted sum of `g g^T` is the row's Fisher matrix.

    For categorical and Bernoulli targets, each pair is a value's probability and its gradient `E[y] - y`.
    """
    classes = len(z)
    if likelihood == "categorical":
        p = np.exp(z - z.max())
        p /= p.sum()
        return [(p[c], p - np.eye(classes)[c]) for c in range(classes)]
    if likelihood == "bernoulli":  # features are independent, so the second moments are sums over single features
        p = 1 / (1 + np.exp(-z))
        weights = [(c, y, p[c] if y else 1 - p[c]) for c in range(classes) for y in (0, 1)]
        return [(w, np.eye(classes)[c] * (p[c] - y)) for c, y, w in weights]
    if likelihood == "poisson":  # the variance of a count is its rate
        return [(np.exp(z[c]), np.eye(classes)[c]) for c in range(classes)]
    return [(1.0, np.eye(classes)[c]) for c in range(classes)]


def targets(likelihood, z):
    t = jnp.sin(7 * jnp.arange(z.size, dtype=z.dtype)).reshape(z.shape)
    return jax.nn.softmax(t) if likelihood == "categorical" else t > 0 if likelihood == "bernoulli" else t


def nll(likelihood, z, t):
    if likelihood == "categorical":
        return -jnp.sum(t * jax.nn.log_softmax(z), axis=-1)
    if likelihood == "bernoulli":
        return -jnp.sum(jnp.where(t, jax.nn.log_sigmoid(z), jax.nn.log_sigmoid(-z)), axis=-1)
    if likelihood == "poisson":
        return jnp.sum(jnp.exp(z) - t * z, axis=-1)
    return 0.5 * jnp.sum((t - z) ** 2, axis=-1)
