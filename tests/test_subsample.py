"""Statistics from every k-th example: those of the smaller batch, exactly; gradients of the whole."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import kfac
from checking import FAST, normal, rotations


def params():
    return {
        "conv": {"w": normal(0, 3, 3, 2, 4), "b": normal(1, 4)},
        "down": {"w": normal(2, 3, 3, 4, 3)},
        "norm": {"scale": normal(3, 3), "shift": normal(4, 3)},
        "stack": {"w": normal(5, 2, 3, 3), "b": normal(6, 2, 3)},
        "out": {"w": normal(7, 3, 5)},
    }


def conv(x, w, stride):
    return lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def loss_fn(p, x, t):
    y = jnp.tanh(conv(x, p["conv"]["w"], 1) + p["conv"]["b"])
    y = conv(y, p["down"]["w"], 2)
    y = jnp.tanh(y * p["norm"]["scale"] + p["norm"]["shift"])
    y = y.reshape(len(x), -1, 3)  # positions that share the dense layers
    y, _ = lax.scan(lambda y, layer: (jnp.tanh(y @ layer["w"] + layer["b"]), None), y, p["stack"])
    return jnp.mean(jnp.sum(jnp.tanh(y @ p["out"]["w"]) * t[:, None], axis=(1, 2)))


def batch(n):
    return normal(10, n, 6, 5, 2), normal(11, n, 5)


def factors_and_grads(n, data=None, **options):
    data = batch(n) if data is None else data
    layers = kfac.find_layers(loss_fn, params(), *data)
    _, grads, factors = jax.jit(kfac.value_and_grad(loss_fn, layers, **options), compiler_options=FAST)(params(), *data)
    return layers, factors, grads


@pytest.mark.parametrize("n, every", [(8, 4), (4, 4), (7, 3)])
def test_factors_are_those_of_the_examples_taken(x64, n, every):
    _, found, grads = factors_and_grads(n, subsample=every)
    _, expected, _ = factors_and_grads(n, [x[::every] for x in batch(n)])
    _, _, gradients = factors_and_grads(n)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14), found, expected)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), grads, gradients)


def test_the_mean_over_all_choices_is_the_whole(x64):
    """Unbiased: each example is in one of the `k` subsets."""
    n, every = 4, 2
    parts = [factors_and_grads(n, [np.roll(x, -k, axis=0) for x in batch(n)], subsample=every)[1] for k in range(every)]
    _, whole, _ = factors_and_grads(n)
    mean = jax.tree.map(lambda *leaves: sum(leaves) / every, *parts)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14), mean, whole)


def test_each_microbatch_takes_its_own(x64):
    data = batch(8)
    layers = kfac.find_layers(loss_fn, params(), *data)
    fn = kfac.microbatch(kfac.value_and_grad(loss_fn, layers, subsample=2), 2, batch_argnums=(1, 2))
    _, _, found = jax.jit(fn, compiler_options=FAST)(params(), *data)
    _, expected, _ = factors_and_grads(8, [x[::2] for x in data])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14), found, expected)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "2"])
def test_what_is_no_positive_int_is_refused(x64, value):
    layers = kfac.find_layers(loss_fn, params(), *batch(2))
    with pytest.raises(ValueError, match="subsample must be a positive int"):
        kfac.value_and_grad(loss_fn, layers, subsample=value)


def test_more_than_the_batch_is_refused(x64):
    with pytest.raises(ValueError, match=r"subsample=5, but layer 'conv' sees 4 example\(s\) at a time"):
        factors_and_grads(4, subsample=5)


def sequences(p, x, t, form):
    if form == "time-major":
        y = jnp.swapaxes(jnp.swapaxes(x, 0, 1) @ p["w"], 0, 1)
    elif form == "marked":
        y = kfac.output(jnp.swapaxes(jnp.swapaxes(x, 0, 1) @ p["w"], 0, 1), "gaussian")  # every token an example
    elif form == "reordered":
        kernels = jnp.broadcast_to(p["w"], (len(x), *p["w"].shape))
        y = jax.vmap(lambda x, w: x @ w, in_axes=(1, 0))(jnp.swapaxes(x, 0, 1), kernels)
    else:
        y = (x.reshape(-1, x.shape[-1]) @ p["w"]).reshape(*x.shape[:2], -1)
    return jnp.mean(jnp.sin(jnp.tanh(y).sum((1, 2)) * t))


def vectors(p, x, marked):
    """A table of positions, a shift used twice, and a scale; every token an example where the output is marked."""
    y = jnp.tanh(x * p["scale"] + p["shift"]) + p["table"]
    y = jnp.tanh(y @ p["w"]) + p["shift"]
    return jnp.mean(jnp.sin(kfac.output(y, "gaussian") if marked else y).sum(2))


@pytest.mark.parametrize("marked", [False, True])
def test_vectors_take_the_same_examples(x64, marked):
    """Whole sequences, and each example's gradients of all uses together."""
    p = {"scale": normal(0, 3), "shift": normal(1, 3), "table": normal(2, 5, 3), "w": normal(3, 3, 3)}
    loss, x = functools.partial(vectors, marked=marked), normal(4, 6, 5, 3)
    layers = kfac.find_layers(loss, p, x)
    expected, found = (kfac.value_and_grad(loss, layers, **options)(p, data)[2] for data, options in (
        (x[::2], {}), (x, {"subsample": 2})
    ))  # fmt: skip
    assert {"unitwise", "diagonal"} & {layer.kind for layer in layers}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14), found, expected)


def frames(p, x, t):
    """Every frame of a video is an example; some layers see the frames as rows or images, others videos of them."""
    n, length, *size = x.shape
    y = jnp.tanh(conv(x.reshape(n * length, *size), p["conv"]["w"], 1) + p["conv"]["b"])
    y = conv(jnp.tanh(conv(y, p["down"]["w"], 2)), p["point"]["w"], 1)
    y = jnp.tanh(y * p["norm"]["scale"] + p["norm"]["shift"])
    y = jnp.tanh(jnp.sum(y, axis=(1, 2)) @ p["rows"]["w"] + p["rows"]["b"]) * p["scale"]
    y = jnp.tanh(y.reshape(n, length, -1) + p["table"]) * p["scale"]
    y = kfac.output(y @ p["out"]["w"], "gaussian")
    return 0.5 * jnp.mean(jnp.sum((y - t) ** 2, axis=-1))


@pytest.mark.parametrize("moments", [False, True])
def test_whole_sequences_are_taken_where_layers_see_them_as_rows(x64, moments):
    """As many are left out as a sequence has tokens: by rows it would be the same place of each that is taken."""
    p = {
        "conv": {"w": normal(0, 3, 3, 2, 4), "b": normal(1, 4)},
        "down": {"w": normal(2, 3, 3, 4, 3)},
        "point": {"w": normal(3, 1, 1, 3, 3)},
        "norm": {"scale": normal(4, 3), "shift": normal(5, 3)},
        "rows": {"w": normal(6, 3, 3), "b": normal(7, 3)},
        "scale": normal(8, 3),
        "table": normal(9, 3, 3),
        "out": {"w": normal(10, 3, 2)},
    }
    x, t = normal(11, 7, 3, 5, 4, 2), normal(12, 7, 3, 2)
    layers = kfac.find_layers(frames, p, x, t)
    known = {}
    if moments:
        known["basis"] = rotations(layers)
    found = jax.jit(kfac.value_and_grad(frames, layers, subsample=3), compiler_options=FAST)(p, x, t, **known)[2]
    taken = jax.jit(kfac.value_and_grad(frames, layers), compiler_options=FAST)(p, x[::3], t[::3], **known)[2]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13), found, taken)


@pytest.mark.parametrize("form", ["time-major", "marked", "reordered"])
def test_it_is_examples_that_are_taken_where_they_do_not_come_first(x64, form):
    """Not every other time step of a time-major layer, which tells nothing of the steps between."""
    loss = functools.partial(sequences, form=form)
    p, (x, t) = {"w": normal(0, 5, 3)}, (normal(1, 4, 7, 5), normal(2, 4))
    layers = kfac.find_layers(loss, p, x, t)

    def factors(x, t, **options):
        known = {} if form == "marked" else {"num_examples": len(x)}
        return kfac.value_and_grad(loss, layers, **known, **options)(p, x, t)[2]

    expected, found = factors(x[::2], t[::2]), factors(x, t, subsample=2)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14), found, expected)


def test_examples_without_an_axis_of_their_own_are_refused(x64):
    p = {"w": normal(0, 5, 3)}
    for n, message in ((4, "none of whose axes has the 4 examples"), (1, r"sees 1 example\(s\) at a time")):
        data = normal(1, n, 6, 5), normal(2, n)
        loss = functools.partial(sequences, form="flattened")
        layers = kfac.find_layers(loss, p, *data)
        with pytest.raises(ValueError, match=message):
            kfac.value_and_grad(loss, layers, num_examples=n, subsample=2)(p, *data)
    images, kernel = normal(3, 1, 4, 4, 2), {"w": normal(4, 3, 3, 2, 3)}

    def of_images(p, x):
        return jnp.mean(jnp.sin(conv(x, p["w"], 1)))

    layers = kfac.find_layers(of_images, kernel, images)
    with pytest.raises(ValueError, match=r"sees 1 example\(s\) at a time"):
        kfac.value_and_grad(of_images, layers, subsample=2)(kernel, images)


def merged(p, x, t):
    """Tokens are examples; one layer sees each sequence in finer parts, four for each of its tokens."""
    n, tokens, d = t.shape
    h = jnp.tanh(x @ p["w"]) * p["scale"] if "scale" in p else jnp.tanh(x @ p["w"])
    y = kfac.output(h.reshape(n, tokens, -1, d).sum(2), "gaussian")
    return 0.5 * jnp.mean(jnp.sum((y - t) ** 2, axis=-1))


def test_parts_of_a_sequence_are_not_the_tokens(x64):
    p, x, t = {"w": normal(0, 3, 2)}, normal(1, 5, 12, 3), normal(2, 5, 3, 2)
    layers = kfac.find_layers(merged, p, x, t)
    found = kfac.value_and_grad(merged, layers, subsample=2)(p, x, t)[2]
    taken = kfac.value_and_grad(merged, layers)(p, x[::2], t[::2])[2]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11), found, taken)
    with pytest.raises(ValueError, match=r"none of whose axes has the 15 examples"):
        kfac.value_and_grad(merged, layers)(p, x, t, basis=rotations(layers))
    scaled = p | {"scale": normal(3, 2)}
    with pytest.raises(ValueError, match=r"none of whose axes has the 15 examples"):
        kfac.value_and_grad(merged, kfac.find_layers(merged, scaled, x, t))(scaled, x, t)


def views(p, x, t):
    """Tokens are examples; one layer sees all of them four times, each time otherwise."""
    n, tokens, d = t.shape
    h = x.reshape(1, -1, 3) * jnp.linspace(0.5, 1.5, 4)[:, None, None]
    h = jnp.tanh(h @ p["w"]) * p["scale"] if "scale" in p else jnp.tanh(h @ p["w"])
    y = kfac.output(h.mean(0).reshape(n, tokens, d), "gaussian")
    return 0.5 * jnp.mean(jnp.sum((y - t) ** 2, axis=-1))


@pytest.mark.parametrize(("loss", "tokens"), [(merged, 12), (views, 3)])
def test_whether_an_axis_is_of_sequences_or_of_something_else_must_be_clear(x64, loss, tokens):
    """`[4, 12, ...]` may be four sequences of twelve parts, or four views of all twelve tokens."""
    p, x, t = {"w": normal(0, 3, 2)}, normal(1, 4, tokens, 3), normal(2, 4, 3, 2)
    layers, scaled, words = kfac.find_layers(loss, p, x, t), p | {"scale": normal(3, 2)}, "not clear whether its first"
    kfac.value_and_grad(loss, layers)(p, x, t)
    with pytest.raises(ValueError, match=words):
        kfac.value_and_grad(loss, layers, subsample=2)(p, x, t)
    with pytest.raises(ValueError, match=words):
        kfac.value_and_grad(loss, layers)(p, x, t, basis=rotations(layers))
    with pytest.raises(ValueError, match=words):
        kfac.value_and_grad(loss, kfac.find_layers(loss, scaled, x, t))(scaled, x, t)
    if loss is views:
        x, t = normal(1, 5, 3, 3), normal(2, 5, 3, 2)
        found = kfac.value_and_grad(loss, layers, subsample=2)(p, x, t)[2]
        taken = kfac.value_and_grad(loss, layers)(p, x[::2], t[::2])[2]
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11), found, taken)


@pytest.mark.parametrize("channels", [4, 5])
def test_channels_before_tokens_are_no_table_of_positions(x64, channels):
    def loss(p, x, t):
        y = kfac.output(jnp.swapaxes(jnp.tanh(x * p["scale"][:, None]), 1, 2) @ p["w"], "gaussian")
        return 0.5 * jnp.mean(jnp.sum((y - t) ** 2, axis=-1))

    p = {"scale": normal(0, channels), "w": normal(1, channels, 2)}
    data = normal(2, 3, channels, 4), normal(3, 3, 4, 2)
    with pytest.raises(ValueError, match=r"'scale' is read by mul .* none of whose axes has the 12 examples"):
        kfac.value_and_grad(loss, kfac.find_layers(loss, p, *data))(p, *data)


def test_tokens_of_one_sequence_are_not_thinned(x64):
    p, x, t = {"w": normal(0, 3, 2)}, normal(1, 2, 12, 3), normal(2, 2, 3, 2)
    measure = kfac.value_and_grad(merged, kfac.find_layers(merged, p, x, t), subsample=2)
    for call in (measure, kfac.microbatch(measure, 2, batch_argnums=(1, 2))):
        with pytest.raises(ValueError, match=r"subsample=2, but layer 'w' sees 1 sequence\(s\) at a time"):
            call(p, *((x[:1], t[:1]) if call is measure else (x, t)))


def test_an_output_marked_in_a_scan_over_tokens_has_sequences_too(x64):
    def loss(p, x, t):
        h = jnp.tanh(x.reshape(-1, 3) @ p["first"]).reshape(*x.shape[:2], -1)

        def step(carry, data):
            carry = jnp.tanh(carry + data[0] @ p["w"])
            return carry, jnp.sum((kfac.output(carry @ p["out"], "gaussian") - data[1]) ** 2, axis=-1)

        swapped = jnp.swapaxes(h, 0, 1), jnp.swapaxes(t, 0, 1)
        return 0.5 * jnp.mean(lax.scan(step, jnp.zeros((len(x), 4)), swapped)[1])

    p = {"first": normal(0, 3, 4), "w": normal(1, 4, 4), "out": normal(2, 4, 2)}
    x, t = normal(3, 6, 5, 3), normal(4, 6, 5, 2)
    layers = kfac.find_layers(loss, p, x, t)
    found = kfac.value_and_grad(loss, layers, subsample=5)(p, x, t)[2]
    taken = kfac.value_and_grad(loss, layers)(p, x[::5], t[::5])[2]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13), found, taken)
