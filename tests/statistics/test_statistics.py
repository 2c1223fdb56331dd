"""Test `kfac.statistics`: without gradients, from every k-th example, it gives the smaller batch's exact factors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import kfac
from checking import normal, rotations

pytestmark = pytest.mark.usefixtures("x64")


def params():
    return {
        "conv": {"w": normal(0, 3, 3, 2, 4), "b": normal(1, 4)},
        "down": {"w": normal(2, 3, 3, 4, 3)},
        "norm": {"scale": normal(3, 3), "shift": normal(4, 3)},
        "stack": {"w": normal(5, 2, 3, 3), "b": normal(6, 2, 3)},
        "table": normal(8, 9, 3),
        "out": {"w": normal(7, 3, 5)},
        "temperature": jnp.asarray(1.5),
    }


def conv(x, w, stride):
    return lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def loss_fn(p, x, t):
    """Compute a loss with a layer of every kind. The temperature has a gradient factor."""
    y = jnp.tanh(conv(x, p["conv"]["w"], 1) + p["conv"]["b"])
    y = conv(y, p["down"]["w"], 2)
    y = jnp.tanh(y * p["norm"]["scale"] + p["norm"]["shift"])
    y = y.reshape(len(x), -1, 3) + p["table"]  # positions that share the dense layers
    y, _ = lax.scan(lambda y, layer: (jnp.tanh(y @ layer["w"] + layer["b"]), None), y, p["stack"])
    y = kfac.mark_output(jnp.tanh(y @ p["out"]["w"]) * p["temperature"], "gaussian")
    return jnp.mean(jnp.sum(y * t[:, None], axis=(1, 2)))


def batch(n):
    return normal(10, n, 6, 5, 2), normal(11, n, 5)


@functools.cache
def found():
    layers = kfac.find_layers(loss_fn, params(), *batch(8), rules={"temperature": "gradient"})
    assert {layer.kind for layer in layers} == {"conv", "unitwise", "diagonal", "dense", "gradient-factors"}
    return layers


def compiled(fn):
    return jax.jit(fn)


@functools.cache
def measure(**options):
    return compiled(kfac.statistics(loss_fn, found(), **options))


def factors_of(*data, **keywords):
    """Return the factors of all these examples, including gradient factors."""
    return compiled(kfac.value_and_grad(loss_fn, found()))(params(), *data, **keywords)[2]


def assert_close(one, other, rtol=1e-12):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-14), one, other)


@pytest.mark.slow
def test_of_all_examples_they_are_those_beside_the_gradients():
    expected = factors_of(*batch(8))
    assert_close(measure()(params(), *batch(8)), expected)
    gradient = jax.grad(loss_fn)(params(), *batch(8))
    np.testing.assert_allclose(expected.gradients["temperature"], gradient["temperature"], rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(("n", "every"), [(8, 4), (4, 4), (7, 3)])
def test_factors_are_those_of_the_examples_taken(n, every):
    """Take as many examples as fit: of seven examples, the first and the fourth."""
    taken = [x[::every][: n // every] for x in batch(n)]
    assert_close(measure(fraction=1 / every)(params(), *batch(n)), factors_of(*taken))


def test_of_fewer_examples_all_are_taken():
    assert_close(measure(fraction=1 / 4)(params(), *batch(3)), factors_of(*batch(3)))


def test_the_mean_over_all_choices_is_the_whole():
    """Check that the factors of the two halves average to the factors of the whole batch."""
    parts = [measure(fraction=1 / 2)(params(), *(jnp.roll(x, -k, axis=0) for x in batch(4))) for k in range(2)]
    assert_close(jax.tree.map(lambda *leaves: sum(leaves) / 2, *parts), factors_of(*batch(4)))


def test_moments_are_those_of_the_examples_taken():
    basis = rotations(found())
    found_moments = measure(fraction=1 / 2)(params(), *batch(6), basis=basis)
    assert any(block.moments is not None for block in found_moments.values())
    assert_close(found_moments, factors_of(*(x[::2] for x in batch(6)), basis=basis))


@pytest.mark.slow
def test_sampled_targets_are_those_of_the_smaller_batch():
    key, half = jax.random.key(0), [x[::2] for x in batch(6)]
    found_factors = measure(fisher="sampled", fraction=1 / 2)(params(), *batch(6), fisher_key=key)
    sampled = compiled(kfac.value_and_grad(loss_fn, found(), fisher="sampled"))
    assert_close(found_factors, sampled(params(), *half, fisher_key=key)[2])


def test_each_microbatch_takes_its_own():
    fn = kfac.microbatch(kfac.statistics(loss_fn, found(), fraction=1 / 2), 2, batch_argnums=(1, 2))
    assert_close(compiled(fn)(params(), *batch(8)), factors_of(*(x[::2] for x in batch(8))))


def test_a_batch_that_is_passed_by_keyword_or_with_what_all_examples_share():
    """Check that every other row of inputs and targets is used. The scales have no axis of examples."""

    def loss(p, *, data, offset):
        y = jnp.tanh(data["x"] * data["scales"] @ p["w"] + offset)
        return jnp.mean(jnp.sum(y * data["t"], axis=-1))

    p, data = {"w": normal(0, 4, 3)}, {"x": normal(1, 6, 4), "t": normal(2, 6, 3), "scales": normal(3, 4)}
    layers = kfac.find_layers(loss, p, kwargs={"data": data, "offset": normal(4, 3)})
    assert layers.batch_argnums == ("data",)
    thinned = data | {name: data[name][::2] for name in "xt"}
    fn = jax.jit(kfac.statistics(loss, layers, fraction=1 / 2))
    expected = jax.jit(kfac.statistics(loss, layers))(p, kwargs={"data": thinned, "offset": normal(4, 3)})
    assert_close(fn(p, kwargs={"data": data, "offset": normal(4, 3)}), expected)


def test_the_number_of_examples_is_that_of_the_whole_batch():
    def loss(p, x):  # the mean is over the second half of each sequence
        return 0.5 * jnp.mean(jnp.sum(kfac.mark_output((x @ p["w"])[:, 2:], "gaussian") ** 2, axis=-1))

    p, x = {"w": normal(0, 5, 3)}, normal(1, 8, 4, 5)
    layers = kfac.find_layers(loss, p, x)
    expected = compiled(kfac.statistics(loss, layers, num_examples=4))(p, x[::2])
    assert_close(compiled(kfac.statistics(loss, layers, num_examples=8, fraction=1 / 2))(p, x), expected)


@pytest.mark.slow
def test_several_devices_take_a_quarter_each():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    whole, taken = batch(16), [x[::4] for x in batch(16)]
    expected = factors_of(*taken)

    def local(params, *data):
        own = kfac.statistics(loss_fn, found(), fraction=1 / 4)(params, *data)
        return jax.tree.map(lambda x: lax.pmean(x, "data"), own)

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P())
    own = compiled(mapped)(params(), *whole)
    with jax.set_mesh(mesh):
        split = jax.device_put(whole, NamedSharding(mesh, P("data")))
        over_mesh = compiled(kfac.statistics(loss_fn, found(), fraction=1 / 4))(params(), *split).whole()
    for factors in (own.whole(), over_mesh):
        assert_close(jax.device_get(factors), expected, 1e-11)


def test_no_gradient_of_a_kernel_is_computed():
    p, x = {"first": normal(0, 32, 32), "second": normal(1, 32, 32)}, normal(2, 64, 32)

    def loss(p, x):
        return jnp.mean(jnp.tanh(jnp.tanh(x @ p["first"]) @ p["second"]) ** 2)

    layers = kfac.find_layers(loss, p, x)
    with_gradients, alone = (
        compiled(fn(loss, layers)).lower(p, x).compile().cost_analysis()["flops"]
        for fn in (kfac.value_and_grad, functools.partial(kfac.statistics, fraction=1))
    )
    products = 2 * 2 * 64 * 32 * 32
    np.testing.assert_allclose(with_gradients - alone, products, rtol=0.1)


@pytest.mark.parametrize("value", [0, -1, 1.5, 0.3, True, "1/2", float("nan")])
def test_what_is_no_fraction_is_refused(value):
    with pytest.raises(ValueError, match="fraction must"):
        kfac.statistics(loss_fn, found(), fraction=value)
    with pytest.raises(ValueError, match="statistics_fraction must"):
        kfac.train_step(loss_fn, 0.1, statistics_fraction=value)


def test_layers_without_a_batch_are_refused():
    p = {"w": normal(0, 3, 4)}

    def loss(p):
        return jnp.mean(jnp.tanh(p["w"]) ** 2)

    layers = kfac.find_layers(loss, p)
    with pytest.raises(ValueError, match=r"fraction= needs a batch .* batch_argnums=1"):
        kfac.statistics(loss, layers, fraction=1 / 2)(p)


def rows_of_ten(params, batch):
    return jnp.mean(jnp.square(jnp.tanh(batch.reshape(-1, 3) @ params)))


@pytest.mark.parametrize("rows", [3, 7, 8, 10])
def test_a_given_number_of_examples_is_scaled_with_the_rows(rows):
    params, batch = normal(0, 3, 2), normal(1, rows, 10, 3)
    layers = kfac.find_layers(rows_of_ten, params, batch)
    kept = batch[: rows // 4 * 4 : 4] if rows >= 4 else batch
    found = compiled(kfac.statistics(rows_of_ten, layers, fraction=1 / 4, num_examples=10 * rows))(params, batch)
    expected = compiled(kfac.statistics(rows_of_ten, layers, num_examples=10 * len(kept)))(params, kept)
    assert_close(found, expected)


@pytest.mark.parametrize(("n", "shared", "kept"), [(63, False, 63), (64, False, 16), (64, True, 64)])
def test_statistics_takes_a_quarter_of_64_examples_by_default(n, shared, kept):
    """Check that few examples, and batches with an array that all examples share, are taken whole."""

    def loss(p, batch):
        return jnp.mean(jnp.sum(jnp.tanh(batch["x"] * batch.get("scale", 1.0) @ p["w"]) ** 2, -1))

    p, data = {"w": normal(0, 4, 3)}, {"x": normal(1, n, 4)} | ({"scale": normal(2, 4)} if shared else {})
    layers = kfac.find_layers(loss, p, data)
    thinned = data | {"x": data["x"][:: n // kept]}
    found = compiled(kfac.statistics(loss, layers))(p, data)
    assert_close(found, compiled(kfac.statistics(loss, layers, fraction=1))(p, thinned))
