"""Define differential equations on boxes, and the residuals of a network that solves them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import kfac

WEIGHT = 30.0  # the boundary's weight
VISCOSITY = 0.1 / np.pi
NODES, WEIGHTS = np.polynomial.hermite.hermgauss(64)


class Problem(NamedTuple):
    residual: Callable[..., jax.Array]  # residual(u, x), or residual(u, x, coefficient); u is a function of a point
    exact: Callable[..., jax.Array]  # exact(x), also the boundary values
    low: tuple[float, ...]
    high: tuple[float, ...]
    faces: tuple[tuple[int, float], ...]  # axis and coordinate; if empty, `edge` points lie inside
    inner: int  # points inside
    edge: int  # points on the faces
    coefficient: float | None = None  # initial value, if it is unknown
    widths: tuple[int, ...] = (32, 32)


def derivative(u: Callable, x: jax.Array, v: jax.Array) -> jax.Array:
    return jax.jvp(u, (x,), (v,))[1]


def laplacian(u: Callable, x: jax.Array) -> jax.Array:
    """Return the Laplacian of `u` at `x`, computed in forward mode."""
    second = lambda v: derivative(lambda x: derivative(u, x, v), x, v)  # noqa: E731
    return jnp.sum(jax.vmap(second)(jnp.eye(len(x))))


def burgers(u: Callable, x: jax.Array) -> jax.Array:
    t, s = jnp.eye(2)
    u_s = lambda x: derivative(u, x, s)  # noqa: E731
    return derivative(u, x, t) + u(x) * u_s(x) - VISCOSITY * derivative(u_s, x, s)


def burgers_exact(x: jax.Array) -> jax.Array:
    """Return the exact solution by the Cole-Hopf transformation, starting from -sin(pi x) at time 0."""
    y = x[1] - jnp.sqrt(4 * VISCOSITY * x[0]) * NODES
    mass = WEIGHTS * jnp.exp(-(jnp.cos(jnp.pi * y) + 1) / (2 * jnp.pi * VISCOSITY))
    return -jnp.sum(jnp.sin(jnp.pi * y) * mass) / jnp.sum(mass)


def heat(u: Callable, x: jax.Array, coefficient: jax.Array) -> jax.Array:
    t, s = jnp.eye(2)
    return derivative(u, x, t) - coefficient * derivative(lambda x: derivative(u, x, s), x, s)


def heat_exact(x: jax.Array) -> jax.Array:
    """Return the exact solution for the coefficient 0.1."""
    k = jnp.pi * jnp.arange(1, 3)
    return jnp.sum(jnp.exp(-0.1 * k**2 * x[0]) * jnp.sin(k * x[1]))


def diffusion(u: Callable, x: jax.Array) -> jax.Array:
    """Return the residual of the heat equation with conductivity 1/4. The first coordinate is the time."""
    in_space = lambda y: u(jnp.append(x[:1], y))  # noqa: E731
    return derivative(u, x, jnp.eye(len(x))[0]) - laplacian(in_space, x[1:]) / 4


def diffusion_exact(x: jax.Array) -> jax.Array:
    return jnp.exp(-x[0]) * jnp.sum(jnp.sin(2 * x[1:]))


def fokker_planck(u: Callable, x: jax.Array) -> jax.Array:
    """Return the residual for the logarithm of the density of an Ornstein-Uhlenbeck process."""
    in_space = lambda y: u(jnp.append(x[:1], y))  # noqa: E731
    y = x[1:]
    slope = jax.vmap(lambda v: derivative(in_space, y, v))(jnp.eye(len(y)))
    drift = (len(y) + slope @ y) / 2
    return derivative(u, x, jnp.eye(len(x))[0]) - drift - laplacian(in_space, y) - slope @ slope


def fokker_planck_exact(x: jax.Array) -> jax.Array:
    """Return the log density of a normal distribution whose variance grows from 1 towards 2."""
    variance = 2 - jnp.exp(-x[0])
    return -jnp.sum(x[1:] ** 2 / variance + jnp.log(2 * jnp.pi * variance)) / 2


def waves(x: jax.Array) -> jax.Array:
    return jnp.sin(jnp.pi * x[0]) * jnp.sin(4 * jnp.pi * x[1])


def cube(d: int) -> tuple[tuple[int, float], ...]:
    return tuple((axis, value) for axis in range(d) for value in (0.0, 1.0))


def sines(x: jax.Array) -> jax.Array:
    return jnp.prod(jnp.sin(jnp.pi * x))


def cosines(x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.cos(jnp.pi * x))


PROBLEMS = {
    "Poisson, 2 dimensions": Problem(
        lambda u, x: laplacian(u, x) + 2 * jnp.pi**2 * sines(x), sines, (0, 0), (1, 1), cube(2), 400, 100
    ),
    "Poisson, 5 dimensions": Problem(
        lambda u, x: laplacian(u, x) + jnp.pi**2 * cosines(x), cosines, (0,) * 5, (1,) * 5, cube(5), 800, 400
    ),
    "Heat, 4 + 1 dimensions": Problem(
        diffusion, diffusion_exact, (0,) * 5, (1,) * 5, ((0, 0.0), *cube(5)[2:]), 800, 400
    ),
    "Fokker-Planck, 9 + 1 dimensions": Problem(
        fokker_planck,
        fokker_planck_exact,
        (0, *(-1,) * 9),
        (1,) * 10,
        ((0, 0.0), *((axis, side) for axis in range(1, 10) for side in (-1.0, 1.0))),
        800,
        400,
    ),
    "Helmholtz": Problem(
        lambda u, x: laplacian(u, x) + u(x) + (17 * jnp.pi**2 - 1) * waves(x), waves, (0, 0), (1, 1), cube(2), 800, 200
    ),
    "Burgers": Problem(burgers, burgers_exact, (0, -1), (1, 1), ((0, 0.0), (1, -1.0), (1, 1.0)), 1000, 250),
    "Heat, inverse": Problem(heat, heat_exact, (0, 0), (1, 1), (), 400, 100, coefficient=1.0),
}


def network(params: list[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
    for layer in params[:-1]:
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
    return (x @ params[-1]["kernel"] + params[-1]["bias"])[0]


def init(key: jax.Array, problem: Problem) -> list[dict[str, jax.Array]]:
    widths = (len(problem.low), *problem.widths, 1)
    sizes = zip(jax.random.split(key, len(widths) - 1), widths, widths[1:], strict=False)
    params = [{"kernel": jax.random.normal(k, (a, b)) * a**-0.5, "bias": jnp.zeros(b)} for k, a, b in sizes]
    if problem.coefficient is not None:
        params[-1]["coefficient"] = jnp.asarray(problem.coefficient, params[0]["bias"].dtype)
    return params


def points(problem: Problem, seed: int, count: int, faces: bool = False) -> jax.Array:
    rng = np.random.default_rng(seed)
    x = rng.uniform(problem.low, problem.high, (count, len(problem.low)))
    if faces and problem.faces:
        for row, k in enumerate(rng.integers(0, len(problem.faces), count)):
            axis, value = problem.faces[k]
            x[row, axis] = value
    return jnp.asarray(x)


def at_point(params: Any, problem: Problem, x: jax.Array, on_face: bool) -> jax.Array:
    u = lambda x: network(params, x)  # noqa: E731
    known = () if problem.coefficient is None else (params[-1]["coefficient"],)
    return u(x) - problem.exact(x) if on_face else problem.residual(u, x, *known)


def residuals(params: Any, problem: Problem, inner: jax.Array, edge: jax.Array) -> jax.Array:
    """Return the residuals: the equation inside, and the values on the faces.

    The loss is half their squared norm.
    """
    inside = jax.vmap(lambda x: at_point(params, problem, x, False))(inner)
    outside = jax.vmap(lambda x: at_point(params, problem, x, True))(edge)
    inside = kfac.mark_output(inside[:, None], "residual")[:, 0]
    outside = kfac.mark_output(outside[:, None], "residual", weight=WEIGHT * len(inner) / len(edge))[:, 0]
    return jnp.concatenate([inside / len(inner) ** 0.5, outside * (WEIGHT / len(edge)) ** 0.5])
