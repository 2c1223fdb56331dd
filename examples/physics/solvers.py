"""Define each method's step: `start(...)` returns a state and `step(params, state, setting, fall, key)`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.linalg as jsl
import optax
from jax.flatten_util import ravel_pytree

import kfac
from equations import WEIGHT, Problem, at_point, derivative, residuals
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

    def along(params, directions, grads, damping):
        """Return the Gauss-Newton model's best step in the directions' span (Martens & Grosse 2015, section 7)."""
        products = jnp.stack([derivative(residual, params, d) for d in directions])
        flat = jnp.stack([ravel_pytree(d)[0] for d in directions])
        model = products @ products.T + damping * flat @ flat.T
        model += jnp.diag(1e-10 * jnp.diag(model) + 1e-300)  # the first step has no previous step
        return ravel_pytree(params)[1](-jnp.linalg.solve(model, flat @ ravel_pytree(grads)[0]) @ flat)

    def gauss_newton(params, last, damping, fall, key):
        r, pull = jax.vjp(residual, params)
        damping = damping * 0.5 * r @ r  # times the loss, as in Levenberg-Marquardt
        slope = lambda x, on_face: ravel_pytree(jax.grad(at_point)(params, problem, x, on_face))[0]  # noqa: E731
        inside, outside = (jax.vmap(lambda x, face=face: slope(x, face))(batch[face]) for face in (False, True))
        jacobian = jnp.concatenate([inside / len(inside) ** 0.5, outside * (WEIGHT / len(outside)) ** 0.5])
        gram = jacobian @ jacobian.T
        dual = jsl.solve(gram + (damping + 1e-14 * jnp.trace(gram)) * jnp.eye(len(r)), r, assume_a="pos")
        direction = ravel_pytree(params)[1](jacobian.T @ dual)
        step = along(params, [direction, last], pull(r)[0], damping)
        lengths = 0.5 ** jnp.arange(8)
        moved = lambda length: jax.tree.map(lambda p, s: p + length * s, params, step)  # noqa: E731
        best = lengths[jnp.nanargmin(jax.lax.map(lambda length: loss(moved(length)), lengths))]
        return moved(best), jax.tree.map(lambda s: best * s, step)

    nothing = jax.tree.map(jnp.zeros_like, params)
    if name == "gauss-newton":
        return nothing, gauss_newton
    loss_of = lambda params, batch: 0.5 * jnp.sum(residuals(params, problem, *batch) ** 2)  # noqa: E731
    layers = kfac.find_layers(loss_of, params, batch)
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
