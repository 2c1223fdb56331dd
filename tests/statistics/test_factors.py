"""Test factors of dense layers against brute force, for every way in which a kernel can reach its matrix product."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import kfac
from checking import check_all, check_kronecker, check_vectors, kinds, normal, run, slow
from oracle import Hook, example_gradients, relative_error, truth

N, T = 3, 4


def plain(model):
    """Return a reference model's loss without its hook."""
    return lambda params, *batch: model(Hook(), params, *batch)


def mean_loss(y, t):
    """Compute a loss whose gradient depends on output and target, so that no two rows agree."""
    y = y.reshape(y.shape[0], -1)
    return jnp.mean(jnp.sum(jnp.tanh(y) * t[:, : y.shape[1]], axis=1) + 0.5 * jnp.sum(jnp.sin(y), axis=1) ** 2)


VECTORS = functools.partial(normal, 0, N, 5)
SEQUENCES = functools.partial(normal, 1, N, T, 5)
IMAGES = functools.partial(normal, 2, N, T, 2, 3)
TARGETS = functools.partial(normal, 3, N, 60)


# -- a single layer, in every orientation ------------------------------------------------------------------------------


def vectors(hook, p, x, t):
    return mean_loss(hook.layer("w", x, x @ p["w"]), t)


def vectors_with_bias(hook, p, x, t):
    return mean_loss(hook.layer("dense", x, x @ p["dense"]["w"] + p["dense"]["b"], bias=True), t)


def two_layers(hook, p, x, t):
    x = jnp.tanh(hook.layer("first", x, x @ p["first"]["w"] + p["first"]["b"], bias=True))
    return mean_loss(hook.layer("second", x, x @ p["second"]["w"]), t)


def bias_first(hook, p, x, t):
    return mean_loss(hook.layer("dense", x, p["dense"]["b"] + x @ p["dense"]["w"], bias=True), t)


def bias_keeps_dimension(hook, p, x, t):
    return mean_loss(hook.layer("dense", x, x @ p["dense"]["w"] + p["dense"]["b"].reshape(1, -1), bias=True), t)


def kernel_on_the_left(hook, p, x, t):
    y = p["dense"]["w"] @ x.T + p["dense"]["b"][:, None]
    return mean_loss(hook.layer("dense", x, y.T, bias=True), t)


def two_input_axes(hook, p, x, t):
    y = jnp.einsum("nthd,hdo->nto", x, p["dense"]["w"]) + p["dense"]["b"]
    return mean_loss(hook.layer("dense", x.reshape(*x.shape[:2], -1), y, bias=True), t)


def two_output_axes(hook, p, x, t):
    y = jnp.einsum("ntd,dhk->nthk", x, p["dense"]["w"]) + p["dense"]["b"]
    return mean_loss(hook.layer("dense", x, y, out=2, bias=True), t)


def flat_bias_of_two_output_axes(hook, p, x, t):
    y = jnp.einsum("ntd,dhk->nthk", x, p["dense"]["w"]) + p["dense"]["b"].reshape(2, 4)
    return mean_loss(hook.layer("dense", x, y, out=2, bias=True), t)


def output_axes_around_the_input(hook, p, x, t):
    y = jnp.einsum("ntd,hdk->nthk", x, p["dense"]["w"]) + p["dense"]["b"]
    return mean_loss(hook.layer("dense", x, y, out=2, bias=True), t)


def interleaved_axes(hook, p, x, t):
    y = jnp.einsum("ntij,iojp->ntop", x, p["dense"]["w"]) + p["dense"]["b"]
    return mean_loss(hook.layer("dense", x.reshape(*x.shape[:2], -1), y, out=2, bias=True), t)


def interleaved_axes_in_another_order(hook, p, x, t):
    # Factors follow the kernel's memory order: j before i, p before o.
    y = jnp.einsum("ntij,jpio->ntop", x, p["w"])
    y = hook.layer("w", x.swapaxes(2, 3).reshape(*x.shape[:2], -1), y.swapaxes(2, 3), out=2)
    return mean_loss(y.swapaxes(2, 3), t)


def flat_parameter(hook, p, x, t):
    return mean_loss(hook.layer("w", x, x @ p["w"].reshape(5, 4)), t)


def flat_parameter_with_two_axes(hook, p, x, t):
    y = jnp.einsum("ntij,iojp->ntop", x, p["w"].reshape(2, 2, 3, 3))
    return mean_loss(hook.layer("w", x.reshape(*x.shape[:2], -1), y, out=2), t)


def stored_transposed_and_reshaped(hook, p, x, t):
    kernel = p["w"].reshape(4, 5, 2).transpose(1, 0, 2).reshape(5, 8)
    return mean_loss(hook.layer("w", x, x @ kernel), t)


def stored_with_dimensions_of_one(hook, p, x, t):
    return mean_loss(hook.layer("w", x, x @ p["w"][0, :, 0]), t)


def cast_twice(hook, p, x, t):
    kernel = p["dense"]["w"].astype(jnp.float64).T.astype(x.dtype).T
    return mean_loss(hook.layer("dense", x, x @ kernel + p["dense"]["b"].astype(x.dtype), bias=True), t)


def outer_product(hook, p, x, t):
    y = jnp.einsum("n,o->no", x[:, 0], p["w"])
    return mean_loss(hook.layer("w", x[:, :1], y), t)


def scalar_output(hook, p, x, t):
    return mean_loss(hook.layer("w", x, x @ p["w"][:, None]), t)


def vector_kernel(hook, p, x, t):
    return mean_loss(hook.layer("w", x, (x @ p["w"])[..., None]), t)


def one_by_one(hook, p, x, t):
    return mean_loss(hook.layer("dense", x[:, :1], x[:, :1] @ p["dense"]["w"] + p["dense"]["b"], bias=True), t)


def features_in_the_middle(hook, p, x, t):
    y = jnp.einsum("ntd,do->not", x, p["dense"]["w"]) + p["dense"]["b"][:, None]
    return mean_loss(hook.layer("dense", x, y.swapaxes(1, 2), bias=True), t)


def bias_behind_a_reshape(hook, p, x, t):
    y = (x @ p["dense"]["w"]).reshape(*x.shape[:2], 2, 3) + p["dense"]["b"].reshape(2, 3)
    return mean_loss(hook.layer("dense", x, y, out=2, bias=True), t)


def bias_behind_a_broadcast(hook, p, x, t):
    y = hook.layer("dense", x, x @ p["dense"]["w"])[:, None]
    y = jnp.broadcast_to(y, (len(x), T, 4)) + p["dense"]["b"]
    return mean_loss(y, t)


def one_plus_the_kernel(hook, p, x, t):
    return mean_loss(hook.layer("w", x, x @ (1 + p["w"])), t)


def output_used_twice(hook, p, x, t):
    y = hook.layer("dense", x, x @ p["dense"]["w"] + p["dense"]["b"], bias=True)
    return mean_loss(y, t) + mean_loss(y**2, t)


DENSE, BIASED = {"w": "dense"}, {"dense": "dense"}
SINGLE = [
    (vectors, VECTORS, {"w": (5, 4)}, DENSE),
    (vectors, SEQUENCES, {"w": (5, 4)}, DENSE),
    (vectors_with_bias, VECTORS, {"dense": {"w": (5, 4), "b": (4,)}}, BIASED),
    (vectors_with_bias, SEQUENCES, {"dense": {"w": (5, 4), "b": (4,)}}, BIASED),
    (vectors_with_bias, SEQUENCES, {"dense": {"w": (5, 4), "b": (1, 1, 4)}}, BIASED),
    (two_layers, VECTORS, {"first": {"w": (5, 4), "b": (4,)}, "second": {"w": (4, 3)}}, None),
    (bias_first, VECTORS, {"dense": {"w": (5, 4), "b": (4,)}}, BIASED),
    (bias_keeps_dimension, VECTORS, {"dense": {"w": (5, 4), "b": (4,)}}, BIASED),
    (kernel_on_the_left, VECTORS, {"dense": {"w": (4, 5), "b": (4,)}}, BIASED),
    (two_input_axes, IMAGES, {"dense": {"w": (2, 3, 4), "b": (4,)}}, BIASED),
    (two_output_axes, SEQUENCES, {"dense": {"w": (5, 2, 4), "b": (2, 4)}}, BIASED),
    (flat_bias_of_two_output_axes, SEQUENCES, {"dense": {"w": (5, 2, 4), "b": (8,)}}, BIASED),
    (output_axes_around_the_input, SEQUENCES, {"dense": {"w": (2, 5, 4), "b": (2, 4)}}, BIASED),
    (interleaved_axes, IMAGES, {"dense": {"w": (2, 2, 3, 3), "b": (2, 3)}}, BIASED),
    (interleaved_axes_in_another_order, IMAGES, {"w": (3, 3, 2, 4)}, DENSE),
    (flat_parameter, SEQUENCES, {"w": (20,)}, DENSE),
    (flat_parameter_with_two_axes, IMAGES, {"w": (36,)}, DENSE),
    (stored_transposed_and_reshaped, SEQUENCES, {"w": (4, 10)}, DENSE),
    (stored_with_dimensions_of_one, VECTORS, {"w": (1, 5, 1, 3)}, DENSE),
    (cast_twice, SEQUENCES, {"dense": {"w": (5, 4), "b": (4,)}}, BIASED),
    (outer_product, VECTORS, {"w": (4,)}, DENSE),
    (scalar_output, SEQUENCES, {"w": (5,)}, DENSE),
    (vector_kernel, SEQUENCES, {"w": (5,)}, DENSE),
    (one_by_one, VECTORS, {"dense": {"w": (1, 1), "b": (1,)}}, BIASED),
    (features_in_the_middle, SEQUENCES, {"dense": {"w": (5, 2), "b": (2,)}}, BIASED),
    (bias_behind_a_reshape, SEQUENCES, {"dense": {"w": (5, 6), "b": (6,)}}, BIASED),
    (one_plus_the_kernel, SEQUENCES, {"w": (5, 4)}, DENSE),
    (output_used_twice, SEQUENCES, {"dense": {"w": (5, 4), "b": (4,)}}, BIASED),
]


def parameters(shapes, dtype=np.float64):
    flat, tree = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    return jax.tree.unflatten(tree, [normal(10 + k, *shape, dtype=dtype) for k, shape in enumerate(flat)])


@pytest.mark.parametrize(
    ("model", "inputs", "shapes", "expected"), SINGLE, ids=[f"{case[0].__name__}-{k}" for k, case in enumerate(SINGLE)]
)
def test_a_dense_layer_in_every_orientation(x64, model, inputs, shapes, expected):
    params, batch = parameters(shapes), (inputs(), TARGETS())
    layers, _ = check_all(plain(model), params, batch, truth(model, params, batch))
    assert kinds(layers) == (expected or {name: "dense" for name in shapes})


# -- kernels times a number --------------------------------------------------------------------------------------------


def times(hook, p, x, t, c=0.3):
    """Compute `(c x) @ w + b`, which equals `x @ (c w) + b`."""
    y = (c * x) @ p["dense"]["w"] + p["dense"]["b"]
    return mean_loss(hook.layer("dense", c * x, y, bias=True), t)


TIMES = {
    "left": lambda w, x: 0.3 * w,
    "right and transposed": lambda w, x: (w.T * 0.3).T,
    "divided": lambda w, x: w / (1 / 0.3),
    "twice, with a sign": lambda w, x: -(w * -0.6) * 0.5,
    "cast": lambda w, x: (w.astype(jnp.float64) * 0.3).astype(x.dtype),
    "a constant array": lambda w, x: w * jnp.full((1, 1), 0.3),
    "computed without parameters": lambda w, x: w * jnp.sqrt(0.09 + 0 * jnp.sum(x)),
    "a number without gradient": lambda w, x: w * lax.stop_gradient(0.3 + 0 * jnp.sum(w)),
}


REDUCTIONS = {"{}": {}, "reduce": {"rules": {"w": "reduce"}}, "max_factor_dim": {"max_factor_dim": 3}}


def kernel_and_batch():
    return parameters({"dense": {"w": (5, 4), "b": (4,)}}), (SEQUENCES(), TARGETS())


@functools.cache
def of_scaled_inputs(reduction):
    params, batch = kernel_and_batch()
    return run(lambda p, x, t: times(Hook(), p, x, t), params, batch, **REDUCTIONS[reduction])[2]


@functools.cache
def truth_of_scaled_inputs():
    return truth(times, *kernel_and_batch())


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("case", TIMES)
def test_a_kernel_times_a_number(x64, case, reduction):
    def loss(p, x, t):
        return mean_loss(x @ TIMES[case](p["dense"]["w"], x) + p["dense"]["b"], t)

    params, batch = kernel_and_batch()
    if reduction == "{}":
        layers, found = check_all(loss, params, batch, truth_of_scaled_inputs())
    else:
        layers, _, found = run(loss, params, batch, **REDUCTIONS[reduction])
    expected = of_scaled_inputs(reduction)
    assert kinds(layers) == BIASED and layers["dense"].has_bias
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert relative_error(a, np.asarray(b)) <= 1e-12


def test_uses_with_different_numbers(x64):
    def loss(p, x, t):
        y = jnp.tanh(x @ p["w"])
        y = jnp.tanh(y @ (2.0 * p["w"]))
        return mean_loss(lax.scan(lambda y, _: (jnp.tanh(y @ (p["w"] * 0.5)), None), y, None, length=2)[0], t)

    def reference(hook, p, x, t):
        for c in (1.0, 2.0, 0.5, 0.5):
            x = jnp.tanh(hook.layer("w", c * x, (c * x) @ p["w"]))
        return mean_loss(x, t)

    params, batch = parameters({"w": (5, 5)}), (SEQUENCES(), TARGETS())
    layers, _ = check_all(loss, params, batch, truth(reference, params, batch))
    assert layers["w"].positions == 4 * T


def test_a_convolution_and_a_table_times_a_number(x64):
    numbers = ("NHWC", "HWIO", "NHWC")

    def network(p, ids, x, t, c, d):
        """Multiply kernels by `c` and inputs by `d`."""
        y = lax.conv_general_dilated(d * x, c * p["conv"], (1, 1), "SAME", dimension_numbers=numbers)
        return mean_loss(jnp.tanh(y).mean((1, 2)) + d * (c * p["table"])[ids], t)

    params = parameters({"conv": (2, 2, 3, 4), "table": (7, 4)})
    batch = (np.array([0, 3, 3], np.int32), IMAGES(), TARGETS())
    layers, _, found = run(lambda p, *b: network(p, *b, 0.3, 1.0), params, batch)
    _, _, expected = run(lambda p, *b: network(p, *b, 1.0, 0.3), params, batch)
    assert kinds(layers) == {"conv": "conv", "table": "embedding"}
    block, other = found["conv"], expected["conv"]
    assert relative_error(block.A, np.asarray(other.A)) <= 1e-12 >= relative_error(block.G, np.asarray(other.G))
    # A number after the lookup belongs to the gradient, and a number before it to the input. The block is the same.
    block, other = found["table"], expected["table"]
    for k in range(7):
        assert relative_error(block.A[k] * block.G, np.asarray(other.A[k] * other.G)) <= 1e-12


# -- vectors that are not biases ---------------------------------------------------------------------------------------


def subtracted_bias(hook, p, x, t):
    return mean_loss(hook.layer("w", x, x @ p["w"]) - p["b"], t)


def bias_behind_a_scaling(hook, p, x, t):
    return mean_loss(hook.layer("w", x, x @ p["w"]) / 3 + p["b"], t)


def bias_behind_a_branch(hook, p, x, t):
    y = hook.layer("w", x, x @ p["w"])
    return mean_loss(y + p["b"], t) + mean_loss(y**2, t)


def bias_added_twice(hook, p, x, t):
    return mean_loss(hook.layer("w", x, x @ p["w"]) + p["b"] + p["b"], t)


def bias_of_two_kernels(hook, p, x, t):
    y = hook.layer("w", x, x @ p["w"]) + p["b"]
    return mean_loss(y + jnp.tanh(hook.layer("v", x, x @ p["v"]) + p["b"]), t)


def bias_also_elsewhere(hook, p, x, t):
    return mean_loss(jnp.tanh(hook.layer("w", x, x @ p["w"]) + p["b"]) + p["b"], t)


def bias_over_positions(hook, p, x, t):
    return mean_loss(hook.layer("w", x, x @ p["w"]) + p["b"], t)


def bias_shared_by_heads(hook, p, x, t):
    y = hook.layer("w", x, jnp.einsum("ntd,dhk->nthk", x, p["w"]), out=2)
    return mean_loss(y + p["b"], t)


def bias_in_another_order(hook, p, x, t):
    y = hook.layer("w", x, jnp.einsum("ntd,dhk->nthk", x, p["w"]), out=2)
    return mean_loss(y + p["b"].T, t)


def second_bias(hook, p, x, t):
    return mean_loss(hook.layer("w", x, x @ p["w"] + p["a"], bias=True) + p["b"], t)


NOT_JOINED = [
    (subtracted_bias, {"w": (5, 4), "b": (4,)}),
    (bias_behind_a_scaling, {"w": (5, 4), "b": (4,)}),
    (bias_behind_a_branch, {"w": (5, 4), "b": (4,)}),
    (bias_added_twice, {"w": (5, 4), "b": (4,)}),
    (bias_of_two_kernels, {"w": (5, 4), "v": (5, 4), "b": (4,)}),
    (bias_also_elsewhere, {"w": (5, 4), "b": (4,)}),
    (bias_over_positions, {"w": (5, 4), "b": (T, 4)}),
    (bias_over_positions, {"w": (5, 4), "b": (T, 1)}),
    (bias_shared_by_heads, {"w": (5, 2, 4), "b": (4,)}),
    (bias_in_another_order, {"w": (5, 2, 4), "b": (4, 2)}),
]


@pytest.mark.parametrize(
    ("model", "shapes"), NOT_JOINED, ids=[f"{c[0].__name__}-{k}" for k, c in enumerate(NOT_JOINED)]
)
def test_a_vector_that_is_no_bias_gets_a_diagonal_of_per_example_gradients(x64, model, shapes):
    params, batch = parameters(shapes), (SEQUENCES(), TARGETS())
    layers, _ = check_all(plain(model), params, batch, truth(model, params, batch))
    assert kinds(layers) == {name: "diagonal" if name == "b" else "dense" for name in sorted(shapes)}


def test_the_second_of_two_biases_gets_a_diagonal(x64):
    params = parameters({"w": (5, 4), "a": (4,), "b": (4,)})
    batch = (SEQUENCES(), TARGETS())
    layers, _, factors = run(plain(second_bias), params, batch)
    assert [layer.params for layer in layers] == [("b",), ("w", "a")]
    check_vectors(layers, factors, example_gradients(plain(second_bias), params, batch))
    check_kronecker(layers, factors, truth(second_bias, params, batch))


def test_a_bias_behind_a_broadcast_is_exact(x64):
    # The gradient at the product's output is summed over the broadcast axes, and so is the bias's gradient.
    params = parameters({"dense": {"w": (5, 4), "b": (4,)}})
    batch = (VECTORS(), TARGETS())
    layers, _, factors = run(plain(bias_behind_a_broadcast), params, batch)
    reference = truth(bias_behind_a_broadcast, params, batch)
    for use in reference.uses["dense"]:
        use.bias = layers["dense"].has_bias
    check_kronecker(layers, factors, reference)


# -- several uses ------------------------------------------------------------------------------------------------------


def shared(hook, p, x, t):
    y = jnp.tanh(hook.layer("dense", x, x @ p["dense"]["w"] + p["dense"]["b"], bias=True))
    y = jnp.tanh(hook.layer("dense", y, y @ p["dense"]["w"]))
    return mean_loss(hook.layer("dense", y, y @ p["dense"]["w"] + p["dense"]["b"], bias=True), t)


def shared_at_different_positions(hook, p, x, t):
    first = hook.layer("dense", x[:, 0], x[:, 0] @ p["dense"]["w"])
    rest = hook.layer("dense", x, x @ p["dense"]["w"] + p["dense"]["b"], bias=True)
    return mean_loss(jnp.tanh(first[:, None] + rest), t)


def shared_in_both_orientations(hook, p, x, t):
    y = jnp.tanh(hook.layer("w", x, x @ p["w"]))
    z = lax.dot_general(p["w"], y, (((0,), (2,)), ((), ())))  # [features, examples, positions]
    return mean_loss(hook.layer("w", y, jnp.moveaxis(z, 0, 2)), t)


@pytest.mark.parametrize("model", [shared, shared_at_different_positions, shared_in_both_orientations])
def test_uses_of_a_shared_kernel_count_as_positions(x64, model):
    shapes = {"w": (5, 5)} if model is shared_in_both_orientations else {"dense": {"w": (5, 5), "b": (5,)}}
    params, batch = parameters(shapes), (SEQUENCES(), TARGETS())
    layers, _ = check_all(plain(model), params, batch, truth(model, params, batch))
    assert [layer.params for layer in layers] == [
        tuple(f"dense/{k}" for k in "wb") if len(layers.paths) > 1 else ("w",)
    ]


def test_a_jitted_function_called_twice_with_one_kernel_and_with_two(x64):
    dense = jax.jit(lambda x, w, b: jnp.tanh(x @ w + b))

    def loss(p, x, t):
        x = dense(x, p["a"]["w"], p["a"]["b"])
        x = dense(x, p["b"]["w"], p["b"]["b"])
        return mean_loss(jax.jit(dense)(x, p["a"]["w"], p["a"]["b"]), t)

    def reference(hook, p, x, t):
        for name in "aba":
            x = jnp.tanh(hook.layer(name, x, x @ p[name]["w"] + p[name]["b"], bias=True))
        return mean_loss(x, t)

    params = parameters({name: {"w": (5, 5), "b": (5,)} for name in "ab"})
    batch = (SEQUENCES(), TARGETS())
    layers, _ = check_all(loss, params, batch, truth(reference, params, batch))
    assert kinds(layers) == {"a": "dense", "b": "dense"}


def test_a_bias_added_by_the_caller_of_a_jitted_product(x64):
    product = jax.jit(lambda x, w: x @ w)

    def loss(p, x, t):
        return mean_loss(product(x, p["dense"]["w"]) + p["dense"]["b"], t)

    params, batch = parameters({"dense": {"w": (5, 4), "b": (4,)}}), (SEQUENCES(), TARGETS())
    layers, _ = check_all(loss, params, batch, truth(vectors_with_bias, params, batch))
    assert kinds(layers) == BIASED


def jit_of_remat(f):
    return jax.jit(jax.checkpoint(jax.jit(f)))


@pytest.mark.parametrize(
    ("policy", "wrap"),
    [
        *((None, wrap) for wrap in (jax.jit, jax.checkpoint, jit_of_remat)),
        ("nothing_saveable", jax.checkpoint),
        ("dots_saveable", jit_of_remat),
        *(slow("nothing_saveable", wrap) for wrap in (jax.jit, jit_of_remat)),
        *(slow("dots_saveable", wrap) for wrap in (jax.jit, jax.checkpoint)),
    ],
)
def test_the_whole_loss_under_jit_and_remat(x64, wrap, policy):
    loss = plain(two_layers)
    if policy:
        loss = jax.checkpoint(loss, policy=getattr(jax.checkpoint_policies, policy))
    params = parameters({"first": {"w": (5, 4), "b": (4,)}, "second": {"w": (4, 3)}})
    batch = (SEQUENCES(), TARGETS())
    check_all(wrap(loss), params, batch, truth(two_layers, params, batch))


# -- vmap --------------------------------------------------------------------------------------------------------------


def per_example_model(p, x):
    return jnp.tanh(p["first"]["w"].T @ x + p["first"]["b"]) @ p["second"]["w"]


@pytest.mark.parametrize("inputs", [VECTORS, SEQUENCES])
@pytest.mark.parametrize("jitted", [False, True])
def test_a_model_of_one_example_under_vmap(x64, inputs, jitted):
    def loss(p, x, t):
        model = jax.jit(per_example_model) if jitted else per_example_model
        for axes in reversed(range(x.ndim - 1)):
            model = jax.vmap(model, in_axes=(None, 0), axis_name=f"axis{axes}")
        return mean_loss(model(p, x), t)

    params = parameters({"first": {"w": (5, 4), "b": (4,)}, "second": {"w": (4, 3)}})
    batch = (inputs(), TARGETS())
    layers, _ = check_all(loss, params, batch, truth(two_layers, params, batch))
    assert kinds(layers) == {"first": "dense", "second": "dense"}


def test_vmap_over_a_later_axis(x64):
    def loss(p, x, t):
        dense = jax.vmap(lambda x: x @ p["dense"]["w"] + p["dense"]["b"], in_axes=1, out_axes=1)
        return mean_loss(dense(x), t)

    params, batch = parameters({"dense": {"w": (5, 4), "b": (4,)}}), (SEQUENCES(), TARGETS())
    check_all(loss, params, batch, truth(vectors_with_bias, params, batch))


def test_vmapped_loss_of_one_example(x64):
    def loss(p, x, t):
        return jnp.mean(jax.vmap(lambda x, t: mean_loss(per_example_model(p, x)[None], t[None]))(x, t))

    params = parameters({"first": {"w": (5, 4), "b": (4,)}, "second": {"w": (4, 3)}})
    batch = (VECTORS(), TARGETS())
    check_all(loss, params, batch, truth(two_layers, params, batch))


# -- batched kernels ---------------------------------------------------------------------------------------------------


def experts(hook, p, x, t):
    """Apply three experts to every example. `p` holds their kernels on a leading axis."""
    outs = [
        hook.layer(f"experts[{k}]", x, x @ p["experts"]["w"][k] + p["experts"]["b"][k], bias=True) for k in range(3)
    ]
    return mean_loss(jnp.tanh(jnp.stack(outs, axis=1)), t)


def batched_kernels(p, x, t):
    y = jnp.einsum("ntd,edo->neto", x, p["experts"]["w"])
    return mean_loss(jnp.tanh(y + p["experts"]["b"][:, None]), t)


def vmapped_kernels(p, x, t):
    dense = jax.vmap(lambda w, b: x @ w + b, out_axes=1)
    return mean_loss(jnp.tanh(dense(p["experts"]["w"], p["experts"]["b"])), t)


def batched_kernels_own_inputs(p, x, t):
    x = jnp.broadcast_to(x, (3, *x.shape))
    y = jnp.einsum("entd,edo->ento", x, p["experts"]["w"]) + p["experts"]["b"][:, None, None]
    return mean_loss(jnp.tanh(y).swapaxes(0, 1), t)


def batched_kernels_stored_last(p, x, t):
    w = jnp.moveaxis(p["experts"]["w"], 2, 0)
    return batched_kernels_own_inputs({"experts": {"w": w, "b": p["experts"]["b"]}}, x, t)


@pytest.mark.parametrize("loss", [batched_kernels_own_inputs, batched_kernels_stored_last])
def test_batched_kernels_are_independent_copies(x64, loss):
    params, batch = parameters({"experts": {"w": (3, 5, 4), "b": (3, 4)}}), (SEQUENCES(), TARGETS())
    reference = truth(experts, params, batch)
    if loss is batched_kernels_stored_last:
        params["experts"]["w"] = jnp.moveaxis(params["experts"]["w"], 0, 2)
    layers, factors = check_all(loss, params, batch, reference)
    assert layers["experts"].copies == 3
    assert layers["experts"].stacked
    assert factors["experts"].A.shape == (3, 6, 6)


@pytest.mark.parametrize("loss", [batched_kernels, vmapped_kernels])
def test_kernels_that_read_the_same_inputs_are_one_wide_layer(x64, loss):
    def wide(hook, p, x, t):
        y = jnp.einsum("ntd,edo->nteo", x, p["experts"]["w"]) + p["experts"]["b"]
        return mean_loss(jnp.tanh(hook.layer("experts", x, y, out=2, bias=True)).swapaxes(1, 2), t)

    params, batch = parameters({"experts": {"w": (3, 5, 4), "b": (3, 4)}}), (SEQUENCES(), TARGETS())
    layers, _ = check_all(loss, params, batch, truth(wide, params, batch))
    assert (layers["experts"].copies, layers["experts"].d_out) == (1, 12)


def test_batched_kernels_on_two_axes(x64):
    def reference(hook, p, x, t):
        outs = [
            hook.layer(f"w[{2 * j + i}]", x[:, :, i, j, None], x[:, :, i, j, None] @ p["w"][j, :, i])
            for i in range(2)
            for j in range(3)
        ]
        return mean_loss(jnp.tanh(jnp.stack(outs, axis=1)), t)

    def loss(p, x, t):
        y = jnp.einsum("ntijd,jdio->nijto", x[..., None], p["w"])
        return mean_loss(jnp.tanh(y).reshape(len(x), 6, T, 2), t)

    params, batch = parameters({"w": (3, 1, 2, 2)}), (IMAGES(), TARGETS())
    layers, _ = check_all(loss, params, batch, truth(reference, params, batch))
    assert layers["w"].copies == 6


# -- scan --------------------------------------------------------------------------------------------------------------


def deep(hook, p, x, t, order=(0, 1, 2)):
    for k in order:
        x = jnp.tanh(hook.layer(f"stack[{k}]", x, x @ p["stack"]["w"][k] + p["stack"]["b"][k], bias=True))
    return mean_loss(x, t)


def scanned(remat_inside=False, remat_outside=False, kernel_axis=0, **options):
    def loss(p, x, t):
        def body(x, wb):
            w, b = wb
            return jnp.tanh(x @ w + b), None

        def blocks(p, x):
            stacked = (jnp.moveaxis(p["stack"]["w"], kernel_axis, 0), p["stack"]["b"])
            return lax.scan(jax.checkpoint(body) if remat_inside else body, x, stacked, **options)[0]

        return mean_loss((jax.checkpoint(blocks) if remat_outside else blocks)(p, x), t)

    return loss


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"remat_inside": True},
        {"remat_outside": True},
        {"remat_inside": True, "remat_outside": True},
        {"kernel_axis": 1},
        {"kernel_axis": 2, "remat_inside": True},
        {"unroll": 2},
    ],
    ids=str,
)
def test_scan_over_stacked_weights(x64, options):
    params, batch = parameters({"stack": {"w": (3, 5, 5), "b": (3, 5)}}), (SEQUENCES(), TARGETS())
    reference = truth(deep, params, batch)
    axis = options.get("kernel_axis", 0)
    params["stack"]["w"] = jnp.moveaxis(params["stack"]["w"], 0, axis)
    layers, _ = check_all(scanned(**options), params, batch, reference)
    assert kinds(layers) == {"stack": "dense"}


def test_reversed_scan(x64):
    params, batch = parameters({"stack": {"w": (3, 5, 5), "b": (3, 5)}}), (SEQUENCES(), TARGETS())
    check_all(scanned(reverse=True), params, batch, truth(functools.partial(deep, order=(2, 1, 0)), params, batch))


def test_two_scans_over_the_same_weights(x64):
    def loss(p, x, t):
        for _ in range(2):
            x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p["stack"])
        return mean_loss(x, t)

    def reference(hook, p, x, t):
        for k in (0, 1, 2, 0, 1, 2):
            x = jnp.tanh(hook.layer(f"stack[{k}]", x, x @ p["stack"][k]))
        return mean_loss(x, t)

    params, batch = parameters({"stack": (3, 5, 5)}), (SEQUENCES(), TARGETS())
    layers, _ = check_all(loss, params, batch, truth(reference, params, batch))
    assert layers["stack"].positions == 2 * T


@pytest.mark.parametrize("axes", [(0, 1), (1, 0), (2, 0)], ids=str)
def test_nested_scans(x64, axes):
    outer, inner = axes

    def loss(p, x, t):
        def body(x, ws):
            def inner_body(x, w):
                return jnp.tanh(x @ w), None

            return lax.scan(inner_body, x, jnp.moveaxis(ws, inner - (outer < inner), 0))

        return mean_loss(lax.scan(body, x, jnp.moveaxis(p["w"], outer, 0))[0], t)

    def reference(hook, p, x, t):
        for i in range(p["w"].shape[outer]):
            for j in range(p["w"].shape[inner]):
                index = [slice(None)] * 4
                index[outer], index[inner] = i, j
                # Copies are numbered in memory order.
                number = i * p["w"].shape[inner] + j if outer < inner else j * p["w"].shape[outer] + i
                x = jnp.tanh(hook.layer(f"w[{number}]", x, x @ p["w"][tuple(index)]))
        return mean_loss(x, t)

    shape = [5, 5, 5, 5]
    shape[outer], shape[inner] = 3, 2
    params, batch = parameters({"w": tuple(shape)}), (SEQUENCES(), TARGETS())
    layers, _ = check_all(loss, params, batch, truth(reference, params, batch))
    assert layers["w"].copies == 6


def test_scan_over_blocks_of_a_flat_stack(x64):
    def loss(p, x, t):
        def body(x, ws):
            return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)

        return mean_loss(lax.scan(body, x, p["w"].reshape(2, 2, 5, 5))[0], t)

    def reference(hook, p, x, t):
        for k in range(4):
            x = jnp.tanh(hook.layer(f"w[{k}]", x, x @ p["w"][k]))
        return mean_loss(x, t)

    params, batch = parameters({"w": (4, 5, 5)}), (SEQUENCES(), TARGETS())
    check_all(loss, params, batch, truth(reference, params, batch))


def test_batched_kernels_inside_a_scan(x64):
    def loss(p, x, t):
        x = jnp.broadcast_to(x, (2, *x.shape))
        x, _ = lax.scan(lambda x, w: (jnp.tanh(jnp.einsum("entd,edo->ento", x, w)), None), x, p["w"].swapaxes(0, 1))
        return mean_loss(x.swapaxes(0, 1), t)

    def reference(hook, p, x, t):
        outs = []
        for e in range(2):
            y = x
            for k in range(3):
                y = jnp.tanh(hook.layer(f"w[{3 * e + k}]", y, y @ p["w"][e, k]))
            outs.append(y)
        return mean_loss(jnp.stack(outs, axis=1), t)

    params, batch = parameters({"w": (2, 3, 5, 5)}), (SEQUENCES(), TARGETS())
    check_all(loss, params, batch, truth(reference, params, batch))


def test_a_stack_of_one(x64):
    params, batch = parameters({"stack": {"w": (1, 5, 5), "b": (1, 5)}}), (SEQUENCES(), TARGETS())

    def reference(hook, p, x, t):
        return mean_loss(jnp.tanh(hook.layer("stack", x, x @ p["stack"]["w"][0] + p["stack"]["b"][0], bias=True)), t)

    check_all(scanned(), params, batch, truth(reference, params, batch))


def recurrent(hook, p, x, t):
    h = jnp.zeros((x.shape[0], 5))
    for k in range(x.shape[1]):
        u = hook.layer("u", x[:, k], x[:, k] @ p["u"]["w"])
        h = jnp.tanh(hook.layer("v", h, h @ p["v"]["w"] + p["v"]["b"], bias=True) + u)
    return mean_loss(hook.layer("out", h, h @ p["out"]["w"] + p["out"]["b"], bias=True), t)


def recurrent_scan(carry_weights=False, remat=False):
    def loss(p, x, t):
        def cell(carry, x):
            h, w = carry
            kernel = w if carry_weights else p["v"]["w"]
            h = jnp.tanh((h @ kernel + p["v"]["b"]) + x @ p["u"]["w"])
            return (h, w), None

        start = (jnp.zeros((x.shape[0], 5)), p["v"]["w"] if carry_weights else None)
        (h, _), _ = lax.scan(jax.checkpoint(cell) if remat else cell, start, x.swapaxes(0, 1))
        return mean_loss(h @ p["out"]["w"] + p["out"]["b"], t)

    return loss


@pytest.mark.parametrize("options", [{}, {"carry_weights": True}, {"remat": True}], ids=str)
def test_scan_that_shares_its_weights(x64, options):
    params = parameters({"u": {"w": (5, 5)}, "v": {"w": (5, 5), "b": (5,)}, "out": {"w": (5, 3), "b": (3,)}})
    batch = (SEQUENCES(), TARGETS())
    layers, _ = check_all(recurrent_scan(**options), params, batch, truth(recurrent, params, batch))
    assert {layer.name: layer.positions for layer in layers} == {"u": T, "v": T, "out": 1}


def test_weights_scanned_over_once_and_again_inside_another_scan(x64):
    def stack(x, w):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    def loss(p, x, t):
        x, _ = lax.scan(lambda x, _: (stack(x, p["w"]), None), stack(x, p["w"]), None, length=2)
        return mean_loss(x, t)

    def reference(hook, p, x, t):
        for k in (0, 1) * 3:
            x = jnp.tanh(hook.layer(f"w[{k}]", x, x @ p["w"][k]))
        return mean_loss(x, t)

    params, batch = parameters({"w": (2, 5, 5)}), (SEQUENCES(), TARGETS())
    layers, _ = check_all(loss, params, batch, truth(reference, params, batch))
    assert layers["w"].positions == 3 * T


@jax.custom_vjp
def reversal(x):
    return x


reversal.defvjp(lambda x: (x, None), lambda _, g: (-0.3 * g,))


@pytest.mark.parametrize("in_scan", [False, True])
def test_custom_rules_of_activations_stay_in_force(x64, in_scan):
    """Check that the replayed loss keeps the user's gradients: relu's at zero, and a reversed gradient."""

    def reference(hook, p, x, t):
        for k in range(2):
            x = reversal(jax.nn.relu(hook.layer(f"w[{k}]", x, x @ p["w"][k])))
        return mean_loss(x, t)

    def loss(p, x, t):
        @jax.checkpoint
        def body(x, w):
            return reversal(jax.nn.relu(x @ w)), None

        return mean_loss(lax.scan(body, x, p["w"], unroll=1 if in_scan else 2)[0], t)

    params, batch = parameters({"w": (2, 5, 5)}), (SEQUENCES().at[0].set(0), TARGETS())
    check_all(loss, params, batch, truth(reference, params, batch))


# -- exactness ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [vectors, vectors_with_bias, kernel_on_the_left])
def test_one_example_at_one_position_has_the_exact_fisher_block(x64, model):
    shapes = {vectors: {"w": (5, 4)}, vectors_with_bias: {"dense": {"w": (5, 4), "b": (4,)}}}.get(
        model, {"dense": {"w": (4, 5), "b": (4,)}}
    )
    params, batch = parameters(shapes), (VECTORS()[:1], TARGETS()[:1])
    layers, grads, factors = run(plain(model), params, batch)
    (layer,) = layers
    leaves = dict(zip(layers.paths, jax.tree.leaves(grads), strict=True))
    gradient = layer.to_matrix([leaves[path] for path in layer.params])[0]
    block = factors[layer.name]
    flat = np.asarray(gradient).reshape(-1)  # d_out major
    assert relative_error(np.kron(block.G, block.A), np.outer(flat, flat)) <= 1e-12
    flat = np.asarray(gradient).T.reshape(-1)  # d_in major, the order of the kernel for most models
    assert relative_error(np.kron(block.A, block.G), np.outer(flat, flat)) <= 1e-12


def test_one_expert_of_one_example_has_the_exact_fisher_block(x64):
    params, batch = parameters({"experts": {"w": (3, 5, 4), "b": (3, 4)}}), (SEQUENCES()[:1, :1], TARGETS()[:1])
    layers, grads, factors = run(batched_kernels_own_inputs, params, batch)
    (layer,) = layers
    matrices = np.asarray(layer.to_matrix([grads["experts"]["w"], grads["experts"]["b"]]))
    for k in range(3):
        flat = matrices[k].reshape(-1)
        assert relative_error(np.kron(factors["experts"].G[k], factors["experts"].A[k]), np.outer(flat, flat)) <= 1e-12


def normalised(p, x, t):
    x = jnp.tanh(x @ p["a"]["w"] + p["a"]["b"]) + p["table"]
    x = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-3) * p["ln"]["s"] + p["ln"]["b"]
    return mean_loss(x @ p["c"]["w"], t)


NORMALISED = {
    "a": {"w": (5, 4), "b": (4,)},
    "c": {"w": (4, 3)},
    "ln": {"s": (4,), "b": (4,)},
    "table": (T, 4),
}


def test_a_doubled_batch_leaves_the_factors_unchanged(x64):
    params, batch = parameters(NORMALISED), (SEQUENCES(), TARGETS())
    layers, _, factors = run(normalised, params, batch)
    doubled = tuple(jnp.concatenate([x, x]) for x in batch)
    layers_2, _, factors_2 = run(normalised, params, doubled)
    # Layers know their number of examples, so that a function with static layers is compiled again.
    assert layers != layers_2 and layers.layers == layers_2.layers
    for one, two in zip(jax.tree.leaves(factors), jax.tree.leaves(factors_2), strict=True):
        assert relative_error(two, np.asarray(one)) <= 1e-12


@pytest.mark.parametrize("num_examples", [None, N])
def test_flattened_tokens(x64, num_examples):
    """Give `num_examples` for a loss that hides its examples, because it contains a constant batch size."""

    def loss(p, x, t):
        y = x.reshape(-1, 5) @ p["dense"]["w"] + p["dense"]["b"]
        return mean_loss(jnp.tanh(y).reshape(num_examples or len(x), x.shape[1] * 4), t)

    def reference(hook, p, x, t):
        y = hook.layer("dense", x, x @ p["dense"]["w"] + p["dense"]["b"], bias=True)
        return mean_loss(jnp.tanh(y), t)

    params, batch = parameters({"dense": {"w": (5, 4), "b": (4,)}}), (SEQUENCES(), TARGETS())
    layers, _, factors = run(loss, params, batch, num_examples=num_examples)
    assert ("examples are not known" in repr(layers)) == bool(num_examples)
    for factor, expected in zip("AG", truth(reference, params, batch).kronecker("dense"), strict=True):
        assert relative_error(getattr(factors["dense"], factor), expected) <= 1e-12


# -- precision ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("compute", "tolerance"), [(jnp.float32, 1e-5), (jnp.bfloat16, 2e-2)], ids=["f32", "bf16"])
@pytest.mark.parametrize("remat", [False, True])
def test_precision(compute, tolerance, remat):
    """Compare low-precision statistics of float32 parameters with statistics in float64."""

    def model(hook, p, x, t):
        p = jax.tree.map(lambda leaf: leaf.astype(x.dtype), p)
        x = jnp.tanh(hook.layer("a", x, x @ p["a"]["w"] + p["a"]["b"], bias=True))
        x = hook.layer("b", x, x @ p["b"]["w"] + p["b"]["b"], bias=True)
        x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        return mean_loss(x, t)

    def loss(p, x, t):
        return (jax.checkpoint(plain(model)) if remat else plain(model))(p, x.astype(compute), t)

    shapes = {"a": {"w": (6, 16), "b": (16,)}, "b": {"w": (16, 3), "b": (3,)}}
    params = parameters(shapes, jnp.float32)
    batch = (normal(1, 16, 9, 6, dtype=jnp.float32), normal(3, 16, 27, dtype=jnp.float32))
    layers, _, factors = run(loss, params, batch, rounding=tolerance / 5)
    assert {leaf.dtype for leaf in jax.tree.leaves(factors)} == {jnp.dtype(jnp.float32)}
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf), jnp.float64), (params, batch))
        reference = truth(model, *wide)
    check_kronecker(layers, factors, reference, tolerance)


def test_bf16_sums_of_many_rows_are_accumulated_in_float32():
    """Sum more rows than bfloat16 can count: there 1 + 1 + ... stops at 256."""

    def loss(p, x):
        return jnp.mean(x.astype(jnp.bfloat16) @ p["w"].astype(jnp.bfloat16) + p["b"].astype(jnp.bfloat16)) * 1.0

    params = {"w": jnp.ones((2, 3)), "b": jnp.zeros(3)}
    x = jnp.ones((4096, 2))
    layers = kfac.find_layers(loss, params, x)
    _, _, factors = jax.jit(kfac.value_and_grad(loss, layers))(params, x)
    (layer,) = layers
    np.testing.assert_array_equal(factors[layer.name].A, np.ones((3, 3)))


def test_uses_of_one_parameter_in_two_precisions(x64):
    """Check that sums have the wider precision."""

    def loss(p, x, t):
        y = jnp.tanh(x @ p["w"]) * p["s"]
        low = x.astype(jnp.float32) @ p["w"].astype(jnp.float32) * p["s"].astype(jnp.float32)
        return mean_loss(y + low, t)

    def reference(hook, p, x, t):
        y = jnp.tanh(hook.layer("w", x, x @ p["w"])) * p["s"]
        return mean_loss(y + hook.layer("w", x, x @ p["w"]) * p["s"], t)

    params, batch = parameters({"w": (5, 4), "s": (4,)}), (SEQUENCES(), TARGETS())
    _, _, factors = run(loss, params, batch, rounding=1e-6)
    for factor, expected in zip("AG", truth(reference, params, batch).kronecker("w"), strict=True):
        assert relative_error(getattr(factors["w"], factor), expected) <= 1e-5
    assert factors["s"].F.dtype == jnp.float64


def test_integer_inputs(x64):
    params, batch = parameters({"w": (5, 4)}), (np.arange(5 * N).reshape(N, 5) % 3, TARGETS())
    check_all(plain(vectors), params, batch, truth(vectors, params, batch))


def test_bf16_parameters_have_float32_statistics_and_bf16_gradients():
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), parameters(NORMALISED, jnp.float32))
    batch = (SEQUENCES(dtype=jnp.bfloat16), TARGETS(dtype=jnp.bfloat16))
    _, grads, factors = run(normalised, params, batch, rounding=2e-2)
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype(jnp.bfloat16)}
    assert {leaf.dtype for leaf in jax.tree.leaves(factors)} == {jnp.dtype(jnp.float32)}
