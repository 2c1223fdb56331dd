"""Test products with rows that all examples share: first states, and tangents and cotangents that start from constants.

Each example has its own gradient with respect to such a product where the product meets the examples. If each example
has its own row, `row + 0 * x`, the same loss has ordinary reads. Other tests compare ordinary reads with brute force.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_without_examples import own_factors

import kfac
from checking import normal, run
from oracle import relative_error

N, D, H = 6, 2, 4


def network(p, x):
    h = jnp.tanh(x @ p["w1"] + p["b1"])
    h = jnp.tanh(h @ p["w2"] + p["b2"])
    return (h @ p["w3"])[0]


SHAPES = {"w1": (D, H), "b1": (H,), "w2": (H, H), "b2": (H,), "w3": (H, 1)}


def parameters():
    return {name: normal(k, *shape) for k, (name, shape) in enumerate(SHAPES.items())}


def shapes():
    return {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in SHAPES.items()}


def directional(p, x, own):
    """Return the derivative along a fixed direction."""
    direction = jnp.array([1.0, 0.5])
    return jax.jvp(lambda z: network(p, z), (x,), (direction + own(x),))[1]


def jacobian(p, x, own):
    return jnp.sum(jax.vmap(lambda v: jax.jvp(lambda z: network(p, z), (x,), (v + own(x),))[1])(jnp.eye(D)) ** 2)


def laplacian(p, x, own):
    """Compute a Laplacian by nested forward-mode derivatives, as for a partial differential equation."""

    def second(v):
        v = v + own(x)
        return jax.jvp(lambda z: jax.jvp(lambda z: network(p, z), (z,), (v,))[1], (x,), (v,))[1]

    return sum(second(v) for v in jnp.eye(D)) - 1.0


def first_state(p, x, own):
    """Run a recurrent network in a Python loop, with a first state that all examples share."""
    h = jnp.full((H,), 0.3) + jnp.sum(own(x))
    for _ in range(2):
        h = jnp.tanh(h @ p["w2"] + x @ p["w1"] + p["b1"])
    return jnp.sum(h**2) + (h @ p["w3"])[0] + jnp.sum(jnp.tanh(p["b2"] * h))


CASES = {"directional": directional, "jacobian": jacobian, "laplacian": laplacian, "first state": first_state}


def loss_of(case, own, wrap=lambda f: f):
    one = wrap(lambda p, x: CASES[case](p, x, own) ** 2)

    def loss(p, x):
        return jnp.mean(jax.vmap(one, in_axes=(None, 0))(p, x))

    return loss


def nothing(x):
    del x
    return 0.0


def zeros_of_its_own(x):
    return 0 * x


WRAPS = {"alone": lambda f: f, "jit": jax.jit, "remat": jax.checkpoint}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "wrap"), [*((case, "alone") for case in CASES), ("laplacian", "jit"), ("first state", "remat")]
)
def test_they_count_as_rows_of_every_example(x64, case, wrap):
    params, x, wrap = parameters(), normal(9, N, D), WRAPS[wrap]
    layers, _, found = run(loss_of(case, nothing, wrap), params, (x,))
    same, _, expected = run(loss_of(case, zeros_of_its_own, wrap), params, (x,))
    assert layers == same
    assert [layer.positions for layer in layers] == [layer.positions for layer in same]
    for name, block in expected.items():
        for a, b in zip(jax.tree.leaves(found[name]), jax.tree.leaves(block), strict=True):
            assert relative_error(a, np.asarray(b)) < 1e-10, name


@pytest.mark.slow
@pytest.mark.parametrize("derivative", [jax.hessian, jax.jacfwd, jax.grad, jax.linearize], ids=lambda f: f.__name__)
def test_derivatives_as_they_are_written(x64, derivative):
    """Check the gradients, and check that a doubled batch has the same statistics."""

    def one(p, x):
        if derivative is jax.linearize:
            return jax.linearize(lambda z: network(p, z), x)[1](jnp.ones(D))
        return jnp.sum(derivative(lambda z: network(p, z))(x))

    def loss(p, x):
        return jnp.mean((jax.vmap(one, in_axes=(None, 0))(p, x) - 1) ** 2)

    params, x = parameters(), normal(9, N, D)
    _, _, once = run(loss, params, (x,), rounding=1e-9)
    _, _, twice = run(loss, params, (jnp.concatenate([x, x]),), rounding=1e-9)
    for a, b in zip(jax.tree.leaves(twice), jax.tree.leaves(once), strict=True):
        assert relative_error(a, np.asarray(b)) < 1e-8


@pytest.mark.parametrize(
    "tangent",
    [lambda x: jnp.broadcast_to(jnp.eye(D)[0], x.shape), lambda x: jnp.tile(jnp.eye(D)[0], (len(x), 1))],
    ids=["broadcast", "tiled"],
)
def test_a_constant_that_is_repeated_for_every_example(x64, tangent):
    def loss(p, x, own):
        direction = tangent(x) + 0 * x if own else tangent(x)
        return jnp.mean(jax.jvp(lambda x: jax.vmap(network, (None, 0))(p, x), (x,), (direction,))[1] ** 2)

    params, x = parameters(), normal(9, N, D)
    _, _, found = run(lambda p, x: loss(p, x, False), params, (x,))
    _, _, expected = run(lambda p, x: loss(p, x, True), params, (x,))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert relative_error(a, np.asarray(b)) < 1e-10


SHARED = "it reads rows that all examples share"


def test_a_constant_kernel_has_no_exact_rows():
    """Check a product of constants that meets the examples in a matrix product. It acts as a computed kernel."""

    def loss(p, x):
        return jnp.mean((x @ (jnp.ones((D, 3)) @ p["w"])) ** 2)

    assert own_factors(loss, {"w": jnp.ones((3, H))}, jnp.ones((N, D))) == {"w": f"dot_general: {SHARED}"}


def test_a_product_of_constants_alone_is_a_penalty():
    params = {"w": jnp.ones((3, H)), "v": jnp.ones((D, 1))}
    layers = kfac.find_layers(
        lambda p, x: jnp.mean((jnp.ones((7, 3)) @ p["w"]) ** 2) + jnp.mean((x @ p["v"]) ** 2), params, jnp.ones((N, D))
    )
    assert {layer.name: (layer.kind, layer.note) for layer in layers} == {
        "v": ("dense", ""),
        "w": ("gradient-factors", "read without examples"),
    }


@pytest.mark.parametrize(
    "meet",
    [
        lambda p, x: (jnp.ones(D) @ p["w1"]) * p["b1"] + x @ p["w1"],
        lambda p, x: jax.lax.optimization_barrier((jnp.ones(D) @ p["w1"], x))[0] + x @ p["w1"],
        lambda p, x: (jnp.ones(D) @ p["w1"]) * jnp.exp(p["b1"]) + x @ p["w1"],
        lambda p, x: jnp.concatenate([x @ p["w1"], (jnp.ones((1, D)) @ p["w1"])]),
    ],
    ids=["a scale", "a barrier", "something derived", "joined"],
)
def test_what_such_rows_may_not_meet(meet):
    found = own_factors(lambda p, x: jnp.mean(jnp.tanh(meet(p, x)) ** 2), shapes(), jnp.ones((N, D)))
    assert found["w1"] == f"dot_general: {SHARED}"


def test_a_number_made_of_such_rows_may_scale_the_examples(x64):
    """Check a power iteration from a constant, as in spectral norm: the kernel has the gradient's own factors."""

    def loss(p, x):
        return jnp.mean((x @ p["w"] * jnp.sum(jnp.ones(D) @ p["w"])) ** 2)

    params, x = {"w": normal(0, D, H)}, normal(1, N, D)
    layers = kfac.find_layers(loss, params, x)
    assert layers["w"].kind == "gradient-factors"
    _, gradients, _ = jax.jit(kfac.value_and_grad(loss, layers))(params, x)
    np.testing.assert_allclose(gradients["w"], jax.grad(loss)(params, x)["w"], rtol=1e-5)
