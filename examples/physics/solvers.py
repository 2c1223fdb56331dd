"""Define each method's step: `start(...)` returns a state and `step(params, state, setting, fall, key)`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import kfac
from equations import WEIGHT, Problem, at_point, residuals
from soap import soap


def start(name: str, problem: Problem, batch: Any, params: Any, setting: float) -> tuple[Any, Callable]:
    """Return the initial state and `step(params, state, setting, fall, key)`.

    During training, `fall` decreases from 1 to 0.
    """
    residual = lambda params: residuals(params, problem, *batch)  # noqa: E731
    loss = lambda params: 0.5 * jnp.sum(residual(params) ** 2)  # noqa: E731

    if name in ("adam", "soap"):
        first = optax.scale_by_adam() if name == "adam" else soap()

        def first_order(params, state, rate, fall, key):
            update, state = first.update(jax.grad(loss)(params), state)
            return jax.tree.map(lambda p, u: p - rate * fall * u, params, update), state

        return first.init(params), first_order

    if name == "lbfgs":
        tx = optax.lbfgs(memory_size=int(setting))

        def quasi_newton(params, state, memory, fall, key):
            value, grad = optax.value_and_grad_from_state(loss)(params, state=state)
            update, state = tx.update(grad, state, params, value=value, grad=grad, value_fn=loss)
            return optax.apply_updates(params, update), state

        return tx.init(params), quasi_newton

    if name == "ssbroyden":
        return broyden(loss, params)

    loss_of = lambda params, batch: 0.5 * jnp.sum(residuals(params, problem, *batch) ** 2)  # noqa: E731
    layers = kfac.find_layers(loss_of, params, batch)
    if name == "gauss-newton":
        exact = kfac.gauss_newton(1.0, layers, min_damping=setting, num_examples=len(batch[0]))

        def jacobian(params):
            """Return all residuals and their Jacobian, a gradient for each point."""
            slope = jax.grad(at_point)
            inside, outside = (
                jax.vmap(lambda x, face=face: slope(params, problem, x, face))(batch[face]) for face in (False, True)
            )
            joined = lambda x, y: jnp.concatenate([x / len(x) ** 0.5, y * (WEIGHT / len(y)) ** 0.5])  # noqa: E731
            return residual(params), jax.tree.map(joined, inside, outside)

        def gauss_newton(params, state, setting, fall, key):
            grads = jax.grad(loss)(params)
            updates, state = exact.update(grads, state, params, value_fn=loss, jacobian_fn=jacobian)
            return optax.apply_updates(params, updates), state

        return exact.init(params), gauss_newton

    measure = kfac.value_and_grad(loss_of, layers, fisher="expected", num_examples=len(batch[0]))
    whole = kfac.gauss_newton(1.0, layers, iterations=20, min_gain=0.02, num_examples=len(batch[0]))

    def kronecker(params, state, setting, fall, key):
        _, grads, factors = measure(params, batch, fisher_key=key)
        updates, state = whole.update(grads, kfac.observe(state, factors), params, value_fn=loss)
        return optax.apply_updates(params, updates), state

    return whole.init(params), kronecker


def broyden(loss: Callable, params: Any) -> tuple[Any, Callable]:
    """Return the state and step of self-scaled Broyden (arXiv:2505.11638), of the package `ssbroyden-optimistix`.

    A step is a trial of its line search.
    """
    import equinox as eqx
    from ssbroyden_optimistix import SSBroyden  # type: ignore[import-not-found]

    solver = SSBroyden(rtol=0.0, atol=0.0)
    fn = lambda y, args: (loss(y), None)  # noqa: E731
    begin = solver.init(fn, params, None, {}, jax.eval_shape(loss, params), None, frozenset())
    arrays, rest = eqx.partition(begin, eqx.is_array)

    def step(params, state, setting, fall, key):
        whole = eqx.combine(state, rest)
        params, whole, _ = solver.step(fn, params, None, {}, whole, frozenset())
        return params, eqx.filter(whole, eqx.is_array)

    return arrays, step
