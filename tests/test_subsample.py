"""Statistics from every k-th example: those of the smaller batch, exactly; gradients of the whole."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import kfac
from checking import FAST, check_moments, check_vectors, normal, rotations, slow
from oracle import example_gradients


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
    with pytest.raises(ValueError, match=r"subsample=5, but the batch has 4 example\(s\)"):
        factors_and_grads(4, subsample=5)


def sequences(p, x, t, form):
    if form == "time-major":
        y = jnp.swapaxes(jnp.swapaxes(x, 0, 1) @ p["w"], 0, 1)
    elif form == "flattened":
        y = (x.reshape(-1, x.shape[-1]) @ p["w"]).reshape(*x.shape[:2], -1)
    elif form == "backwards":
        y = (x.reshape(-1, x.shape[-1])[::-1] @ p["w"])[::-1].reshape(*x.shape[:2], -1)
    elif form == "marked":
        y = kfac.output(jnp.swapaxes(jnp.swapaxes(x, 0, 1) @ p["w"], 0, 1), "gaussian")
    else:
        kernels = jnp.broadcast_to(p["w"], (len(x), *p["w"].shape))
        y = jax.vmap(lambda x, w: x @ w, in_axes=(1, 0))(jnp.swapaxes(x, 0, 1), kernels)
    return jnp.mean(jnp.sin(jnp.tanh(y).sum((1, 2)) * t))


def vectors(p, x, marked):
    """A table of positions, a shift used twice, and a scale."""
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
    """The loss is a mean over the frames of videos; some layers see the frames as rows or images, others videos."""
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
    """As many are left out as a sequence has tokens: by rows it would be the same place of each that is taken.

    It is where the examples are not on an axis of their own: among the images of a convolution.
    """
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
    convolutions = ["conv", "down", "point"]
    assert [layer.name for layer in layers if layer.kind in ("dense", "conv") and not layer.told_apart] == convolutions
    known = {}
    if moments:
        known["basis"] = rotations(layers)
    found = jax.jit(kfac.value_and_grad(frames, layers, subsample=3), compiler_options=FAST)(p, x, t, **known)[2]
    taken = jax.jit(kfac.value_and_grad(frames, layers), compiler_options=FAST)(p, x[::3], t[::3], **known)[2]
    alone = p | {"table": p["table"][:1]}, x[:, :1], t[:, :1]
    first = jax.jit(kfac.value_and_grad(frames, kfac.find_layers(frames, *alone)), compiler_options=FAST)(*alone)[2]
    for name in found:
        expected = first if name in convolutions else taken
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13), found[name], expected[name])


@pytest.mark.parametrize("form", ["time-major", "flattened", "backwards", "marked", "reordered"])
def test_it_is_examples_that_are_taken_where_they_do_not_come_first(x64, form):
    """Not every other time step of a time-major layer, which tells nothing of the steps between."""
    loss = functools.partial(sequences, form=form)
    p, (x, t) = {"w": normal(0, 5, 3)}, (normal(1, 4, 7, 5), normal(2, 4))
    layers = kfac.find_layers(loss, p, x, t)
    expected = jax.jit(kfac.value_and_grad(loss, layers))(p, x[::2], t[::2])[2]
    found = jax.jit(kfac.value_and_grad(loss, layers, subsample=2))(p, x, t)[2]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14), found, expected)


def in_their_own_order(p, x, t, offset=0.0):
    rows = x.reshape(-1, x.shape[-1])
    y = jnp.tanh(rows[jnp.argsort(rows[:, 0])] @ p["w"] + offset).reshape(*x.shape[:2], -1)
    return jnp.mean(jnp.sin(y.sum((1, 2)) * t))


def test_without_an_axis_of_examples_every_other_row_is_taken(x64):
    p, (x, t) = {"w": normal(0, 5, 3)}, (normal(1, 4, 3, 5), normal(2, 4))
    layers = kfac.find_layers(in_their_own_order, p, x, t)
    assert layers["w"].kind == "dense" and not layers["w"].told_apart
    found = jax.jit(kfac.value_and_grad(in_their_own_order, layers, subsample=2))(p, x, t)[2]["w"]
    rows = x.reshape(-1, 5)
    rows = rows[jnp.argsort(rows[:, 0])][::2]
    g = jax.grad(lambda offset: in_their_own_order(p, x, t, offset))(jnp.zeros((12, 3)))[::2]
    np.testing.assert_allclose(found.A, 2 * rows.T @ rows / 4, rtol=1e-12)
    np.testing.assert_allclose(found.G, 2 * 4 / 3 * g.T @ g, rtol=1e-12)


def merged(p, x, t):
    """A mean over tokens; one layer sees each sequence in finer parts, four for each of its tokens."""
    n, tokens, d = t.shape
    h = jnp.tanh(x @ p["w"]) * p["scale"]
    y = kfac.output(h.reshape(n, tokens, -1, d).sum(2), "gaussian")
    return 0.5 * jnp.mean(jnp.sum((y - t) ** 2, axis=-1))


def views(p, x, t):
    """A mean over tokens; one layer sees all of them four times, each time otherwise."""
    n, tokens, d = t.shape
    h = x.reshape(1, -1, 3) * jnp.linspace(0.5, 1.5, 4)[:, None, None]
    y = kfac.output((jnp.tanh(h @ p["w"]) * p["scale"]).mean(0).reshape(n, tokens, d), "gaussian")
    return 0.5 * jnp.mean(jnp.sum((y - t) ** 2, axis=-1))


def channels_first(p, x, t):
    """Channels before tokens are no table of positions."""
    y = kfac.output(jnp.swapaxes(jnp.tanh(x * p["scale"][:, None]), 1, 2) @ p["w"], "gaussian")
    return 0.5 * jnp.mean(jnp.sum((y - t) ** 2, axis=-1))


@pytest.mark.parametrize(
    ("loss", "n", "positions"),
    [
        slow(merged, 5, (12, 3)),
        (merged, 4, (12, 3)),
        (views, 4, (3, 3)),
        slow(channels_first, 3, (3, 4)),
        (channels_first, 4, (3, 3)),
    ],
)
def test_lengths_that_agree_by_chance_do_not_matter(x64, loss, n, positions):
    """`[4, 12, ...]` may be four sequences of twelve parts, or four views of all twelve tokens."""
    p, x, t = {"scale": normal(3, 2), "w": normal(0, 3, 2)}, normal(1, n, *positions), normal(2, n, 3, 2)
    if loss is channels_first:
        p, t = {"scale": normal(3, 3), "w": normal(0, 3, 2)}, normal(2, n, positions[1], 2)
    layers, gradients = kfac.find_layers(loss, p, x, t), example_gradients(loss, p, (x, t))
    tokens = t.shape[1]  # the rows of the output over the sequences
    rooted = jax.tree.map(lambda g: tokens**0.5 * g, gradients)
    _, factors = check_moments(loss, p, (x, t), gradients=rooted)
    check_vectors(layers, factors, dict(zip(layers.paths, jax.tree.leaves(rooted), strict=True)))
    found = jax.jit(kfac.value_and_grad(loss, layers, subsample=2))(p, x, t)[2]
    taken = jax.jit(kfac.value_and_grad(loss, layers))(p, x[::2], t[::2])[2]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11), found, taken)


def test_tokens_of_one_sequence_are_not_thinned(x64):
    p, x, t = {"scale": normal(3, 2), "w": normal(0, 3, 2)}, normal(1, 2, 12, 3), normal(2, 2, 3, 2)
    measure = kfac.value_and_grad(merged, kfac.find_layers(merged, p, x, t), subsample=2)
    for call in (measure, kfac.microbatch(measure, 2, batch_argnums=(1, 2))):
        with pytest.raises(ValueError, match=r"subsample=2, but the batch has 1 example\(s\)"):
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
    found = jax.jit(kfac.value_and_grad(loss, layers, subsample=5))(p, x, t)[2]
    taken = jax.jit(kfac.value_and_grad(loss, layers))(p, x[::5], t[::5])[2]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13), found, taken)
