"""Define the target distributions that marked outputs predict, how to draw targets, and the loss curvature."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax import Array

from kfac._statistics.rows import accumulator


@dataclasses.dataclass(frozen=True)
class Likelihood:
    """A distribution of targets given the network's output, for `kfac.mark_output` in place of a named distribution.

    For a Laplace distribution with scale 1::

        kfac.curvature.Likelihood(
            sample=lambda key, x: x + jax.random.laplace(key, x.shape),
            log_prob=lambda x, target: -jnp.abs(target - x).sum(-1),
            root=lambda x, v: v,
        )

    Args:
      sample: `sample(key, x)` draws a target for each row of the outputs `x`, `[..., features]`.
      log_prob: `log_prob(x, target)` returns `log p(target | x)`, `[...]`. It may omit terms that do not depend on `x`.
      root: `root(x, v)` returns `S(x) v` for vectors `v`, `[..., features]`. `S(x)` is a square matrix with
        `S^T S = H`, where `H` is the expected second moment of the gradients of `-log p` with respect to `x`. Required
        only for `fisher="expected"`, for `kfac.curvature.gauss_newton`, and for `kfac.adaptive_damping` and
        `kfac.gauss_newton`.

    Raises:
      ValueError: an argument is not a function.
    """

    sample: Callable[[Array, Array], Array]
    log_prob: Callable[[Array, Array], Array]
    root: Callable[[Array, Array], Array] | None = None

    def __post_init__(self):
        """Check the arguments."""
        for name in ("sample", "log_prob", "root"):
            value = getattr(self, name)
            left_out = name == "root" and value is None
            if not (left_out or callable(value)):
                raise ValueError(
                    f"{name} of a Likelihood must be a function, but is {value!r}"
                )

    def times_root(
        self,
        x: Array,
        v: Array,
        what: str,
    ) -> Array:
        """Return `S(x) v` in float32 or wider.

        Raises:
          ValueError: the likelihood has no `root`. `what` names the caller in the message.
        """
        if self.root is None:
            raise ValueError(
                f"{what} needs the curvature of the loss: give the Likelihood a root= as well"
            )
        dtype = accumulator(x.dtype)
        return self.root(x.astype(dtype), v.astype(dtype))


def _categorical_root(x: Array, v: Array) -> Array:
    p = jax.nn.softmax(x, axis=-1)
    return jnp.sqrt(p) * (v - jnp.sum(p * v, axis=-1, keepdims=True))


_GAUSSIAN = Likelihood(
    lambda key, x: x + jax.random.normal(key, x.shape, x.dtype),
    lambda x, target: -jnp.sum((target - x) ** 2, axis=-1) / 2,
    lambda x, v: v,
)
LIKELIHOODS = {
    "categorical": Likelihood(
        jax.random.categorical,
        lambda x, target: -optax.softmax_cross_entropy_with_integer_labels(x, target),
        _categorical_root,
    ),
    "bernoulli": Likelihood(
        lambda key, x: jax.random.bernoulli(key, jax.nn.sigmoid(x)).astype(x.dtype),
        lambda x, target: (
            -jnp.sum(optax.sigmoid_binary_cross_entropy(x, target), axis=-1)
        ),
        lambda x, v: jnp.sqrt(jax.nn.sigmoid(x) * jax.nn.sigmoid(-x)) * v,
    ),
    "gaussian": _GAUSSIAN,
    "residual": _GAUSSIAN,
    "poisson": Likelihood(
        lambda key, x: jax.random.poisson(key, jnp.exp(x)).astype(x.dtype),
        lambda x, target: jnp.sum(target * x - jnp.exp(x), axis=-1),
        lambda x, v: jnp.exp(x / 2) * v,
    ),
}


class MarkName(str):
    """The name of a marked output in the program, with the arguments of `mark_output`.

    The name is a parameter of an equation, so a likelihood that the loss builds lives exactly as long as the traced
    program. A registry of likelihoods would grow with each trace.

    Attributes:
      likelihood: the distribution of the targets.
      weight: the weight of the output's loss term.
    """

    likelihood: Likelihood
    weight: float

    def __new__(cls, likelihood: str | Likelihood, weight: float) -> MarkName:
        """Return the name.

        Raises:
          ValueError: `likelihood` is neither a known name nor a `Likelihood`.
        """
        text = likelihood
        if isinstance(likelihood, Likelihood):
            text = "own"
        elif not isinstance(likelihood, str) or likelihood not in LIKELIHOODS:
            names = ", ".join(map(repr, LIKELIHOODS))
            raise ValueError(
                f"likelihood must be one of {names} or a kfac.curvature.Likelihood, but is {likelihood!r}"
            )
        else:
            likelihood = LIKELIHOODS[likelihood]
        name = super().__new__(cls, f"kfac.mark_output/{text}/{weight!r}")
        name.likelihood = likelihood
        name.weight = weight
        return name
