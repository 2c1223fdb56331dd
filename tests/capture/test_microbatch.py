"""Check that each part is exact by itself: micro-batches, and devices under `pmap` and `shard_map`."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kfac
from checking import normal
from oracle import relative_error

N, T, C = 12, 3, 4


def loss(p, x, t, *, batch_norm=False):
    y = x @ p["in"]["w"] + p["in"]["b"]
    axes = (0, 1) if batch_norm else -1
    y = (y - y.mean(axes, keepdims=True)) / jnp.sqrt(y.var(axes, keepdims=True) + 1e-3)
    y = jnp.tanh(y * p["norm"]["s"] + p["norm"]["b"]) + p["table"]
    return jnp.mean(jnp.sum(jnp.tanh(y @ p["out"]["w"]) * t[..., None], axis=(1, 2)))


def problem(dtype=np.float64):
    shapes = {"in": {"w": (5, C), "b": (C,)}, "norm": {"s": (C,), "b": (C,)}, "out": {"w": (C, 2)}, "table": (T, C)}
    flat, tree = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    params = jax.tree.unflatten(tree, [normal(k, *shape, dtype=dtype) for k, shape in enumerate(flat)])
    return params, (normal(10, N, T, 5, dtype=dtype), normal(11, N, T, dtype=dtype))


def function(params, batch, batch_norm=False, **options):
    own = functools.partial(loss, batch_norm=batch_norm)
    return kfac.value_and_grad(own, kfac.find_layers(own, params, *batch), **options)


def compiled(fn):
    return jax.jit(fn)


def assert_equal(found, expected, tolerance=1e-10):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.dtype == two.dtype
        assert relative_error(one, np.asarray(two, np.float64)) <= tolerance


def mean_of(results):
    return jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *results)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 3, 12])
@pytest.mark.parametrize("batch_norm", [False, True])
def test_averages_are_the_means_over_separate_microbatches(x64, count, batch_norm):
    params, batch = problem()
    fn = function(params, batch, batch_norm)
    found = compiled(kfac.microbatch(fn, count, batch_argnums=(1, 2)))(params, *batch)
    single = compiled(fn)
    parts = [
        single(params, *(np.asarray(x).reshape(count, N // count, *x.shape[1:])[k] for x in batch))
        for k in range(count)
    ]
    assert_equal(found, mean_of(parts))
    if not batch_norm:
        assert_equal(found, single(params, *batch))


def test_a_batch_in_one_argument_and_aux(x64):
    params, batch = problem()

    def with_aux(p, batch, offset):
        value = loss(p, *batch["data"]) + offset
        return value, {"twice": 2 * value, "low": value.astype(jnp.bfloat16)}

    whole = {"data": batch}
    layers = kfac.find_layers(with_aux, params, whole, 1.0, has_aux=True)
    fn = kfac.value_and_grad(with_aux, layers, has_aux=True)
    (value, aux), grads, factors = compiled(kfac.microbatch(fn, 4))(params, whole, jnp.ones(()))
    (expected, _), expected_grads, expected_factors = compiled(fn)(params, whole, jnp.ones(()))
    assert_equal((value, grads, factors), (expected, expected_grads, expected_factors))
    np.testing.assert_allclose(aux["twice"], 2 * value, rtol=1e-12)
    assert aux["low"].dtype == jnp.bfloat16


def test_batch_arguments_counted_from_the_end(x64):
    params, batch = problem()
    fn = function(params, batch)
    found = compiled(kfac.microbatch(fn, 2, batch_argnums=(-1, -2)))(params, *batch)
    assert_equal(found, compiled(kfac.microbatch(fn, 2, batch_argnums=[1, 2]))(params, *batch), 0)


def test_low_precision_results_are_averaged_in_float32():
    """Check an average with gradients 256 and 1, because a sum in bfloat16 would lose every 1."""
    params = {"w": jnp.zeros((2, 1), jnp.bfloat16)}

    def linear(p, x):
        return jnp.mean((x @ p["w"]).astype(jnp.float32))

    x = jnp.ones((512, 2), jnp.bfloat16).at[0].set(256)
    layers = kfac.find_layers(linear, params, x)
    _, grads, _ = compiled(kfac.microbatch(kfac.value_and_grad(linear, layers), 512))(params, x)
    assert grads["w"].dtype == jnp.bfloat16
    np.testing.assert_allclose(grads["w"].astype(jnp.float32), (511 + 256) / 512, rtol=1e-2)


def test_memory_does_not_grow_with_the_number_of_microbatches():
    params, _ = problem(np.float32)
    size = 64

    def temporary_bytes(count):
        batch = (
            jax.ShapeDtypeStruct((size * count, T, 5), jnp.float32),
            jax.ShapeDtypeStruct((size * count, T), jnp.float32),
        )
        fn = kfac.microbatch(function(params, batch), count, batch_argnums=(1, 2))
        return jax.jit(fn).lower(params, *batch).compile().memory_analysis().temp_size_in_bytes

    few, many = temporary_bytes(2), temporary_bytes(64)
    assert many <= 1.05 * few + 1024


@pytest.mark.parametrize("count", [0, -1, 2.0, True, "2"])
def test_a_bad_number_of_microbatches(count):
    with pytest.raises(ValueError, match="num_microbatches must be a positive int"):
        kfac.microbatch(lambda p, x: x, count)


def test_what_cannot_be_split_or_averaged_is_an_error():
    params, batch = problem(np.float32)
    fn = function(params, batch)
    with pytest.raises(ValueError, match=r"num_microbatches=5 does not divide argument 1.*length 12"):
        kfac.microbatch(fn, 5, batch_argnums=(1, 2))(params, *batch)
    with pytest.raises(ValueError, match=r"does not divide argument 2.*no leading axis"):
        kfac.microbatch(fn, 2, batch_argnums=(1, 2))(params, batch[0], 1.0)
    with pytest.raises(ValueError, match=r"batch_argnums=3 has 3, but the arguments after params are 1, 2"):
        kfac.microbatch(fn, 2, batch_argnums=3)(params, *batch)

    def counting(p, x, t):
        return loss(p, x, t), jnp.arange(3)

    layers = kfac.find_layers(counting, params, *batch, has_aux=True)
    with pytest.raises(ValueError, match=r"averages results.*int32"):
        kfac.microbatch(kfac.value_and_grad(counting, layers, has_aux=True), 2, batch_argnums=(1, 2))(params, *batch)


def test_unequal_leading_axes_are_an_error():
    """Check lengths that the number of parts divides, but whose parts do not belong together."""
    params, (x, t) = problem(np.float32)
    fn = function(params, (x, t))
    with pytest.raises(ValueError, match="different lengths 12, 8"):
        kfac.microbatch(fn, 4, batch_argnums=(1, 2))(params, x, t[:8])


@pytest.mark.slow
def test_what_is_as_long_as_the_batch_is_split_or_named(x64):
    """Check that only the first argument after the parameters is split by default.

    Another argument of the same length is an error unless `batch_argnums` names the split arguments.
    """
    params, (x, t) = problem()
    fn = function(params, (x, t))
    words = r"argument 1 is split along its leading axis of length 12, and argument {} is as long.*batch_argnums=1"
    with pytest.raises(ValueError, match=words.format(2)):
        kfac.microbatch(fn, 4)(params, x, t)
    with pytest.raises(ValueError, match=words.format("'t'")):
        kfac.microbatch(fn, 4)(params, x, kwargs={"t": t})

    def with_others(p, batch, offsets, key):
        return loss(p, *batch) + jnp.sum(offsets) + jax.random.normal(key)

    others = jnp.arange(12.0), jax.random.PRNGKey(0)  # the first is as long as the batch, but is not data
    layers = kfac.find_layers(with_others, params, (x, t), *others)
    assert layers.batch_argnums == (1,)
    fn = kfac.value_and_grad(with_others, layers)
    found = compiled(kfac.microbatch(fn, 4, batch_argnums=1))(params, (x, t), *others)
    assert_equal(found, compiled(fn)(params, (x, t), *others))
    compiled(kfac.microbatch(fn, 2))(params, jax.tree.map(lambda a: a[:2], (x, t)), *others)  # a key is not a batch


# -- several devices ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mapped", "count"),
    [
        ("pmap", 1),
        ("shard_map", 3),
        ("pmap", 3),
        ("shard_map", 1),
    ],
)
def test_loss_gradients_and_factors_are_the_devices_own(mapped, count):
    params, batch = problem(np.float32)
    fn = function(params, batch)
    device_fn = fn if count == 1 else kfac.microbatch(fn, count, batch_argnums=(1, 2))
    parts = [np.asarray(x).reshape(4, N // 4, *x.shape[1:]) for x in batch]
    if mapped == "pmap":
        found = jax.pmap(device_fn, in_axes=(None, 0, 0), axis_name="devices", devices=jax.devices()[:4])(
            params, *parts
        )
    else:
        spec = jax.sharding.PartitionSpec
        mesh = jax.make_mesh((4,), ("devices",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])

        def local(params, *batch):
            return jax.tree.map(lambda leaf: leaf[None], device_fn(params, *batch))

        specs = (spec(), spec("devices"), spec("devices"))
        found = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=spec("devices")))(params, *batch)
    single = compiled(fn)
    for k in range(4):
        expected = single(params, *(part[k] for part in parts))
        *rest, factors = jax.tree.map(lambda leaf, k=k: leaf[k], found)
        assert_equal((*rest, factors.whole()), expected, 1e-5)


@pytest.mark.parametrize("measure", [kfac.value_and_grad, kfac.statistics])
@pytest.mark.parametrize(
    ("average", "refused"),
    [
        (lambda y: jax.lax.pmean(jnp.mean(y), "devices"), True),
        (lambda y: 0.5 * jax.lax.psum(jnp.mean(y), "devices") / 4 + 1.0, True),
        (lambda y: jnp.mean(y) + jax.lax.stop_gradient(jax.lax.pmean(jnp.mean(y), "devices")), False),
        (lambda y: jnp.mean((y - jax.lax.pmean(jnp.mean(y, 0), "devices")) ** 2), False),  # as in batch norm
    ],
    ids=["mean", "sum", "metric", "statistics"],
)
def test_an_average_over_devices_is_no_loss(average, refused, measure):
    """Check that a loss may not be an average over devices.

    It would not be the loss of the device's own examples, and its gradient would be summed over devices once more.
    """
    params, x = {"w": normal(0, 5, 2, dtype=np.float32)}, normal(1, 4, 3, 5, dtype=np.float32)
    layers = kfac.find_layers(lambda p, x: jnp.mean((x @ p["w"]) ** 2), params, x[0])
    fn = measure(lambda p, x: average((x @ p["w"]) ** 2), layers)
    mapped = jax.pmap(fn, axis_name="devices", in_axes=(None, 0), devices=jax.devices()[:4])
    if not refused:
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(mapped(params, x)))
        return
    with pytest.raises(ValueError, match=r"loss_fn returns an average over the devices of 'devices'.*afterwards"):
        mapped(params, x)


@pytest.mark.parametrize("measure", [kfac.value_and_grad, kfac.statistics])
@pytest.mark.parametrize(
    "average",
    [
        jax.checkpoint(lambda y: jax.lax.pmean(jnp.mean(y), "d")),
        lambda y: jax.lax.pmean(jnp.stack([jnp.mean(y), 1.0]), "d")[0],
        lambda y: jnp.mean(jax.lax.pmean(jnp.mean(y, 1), "d")),
    ],
    ids=["remat", "beside a metric", "of each example"],
)
def test_no_way_of_averaging_hides_it_from_shard_map(average, measure):
    """Check that `shard_map` reveals every kind of average, because the loss's type does not vary over devices."""
    params, x = {"w": normal(0, 5, 2, dtype=np.float32)}, normal(1, 8, 5, dtype=np.float32)
    layers = kfac.find_layers(lambda p, x: jnp.mean((x @ p["w"]) ** 2), params, x)
    fn = measure(lambda p, x: average((x @ p["w"]) ** 2), layers)
    spec, mesh = jax.sharding.PartitionSpec, jax.make_mesh((4,), ("d",), (jax.sharding.AxisType.Auto,))
    mapped = jax.shard_map(lambda p, x: fn(p, x), mesh=mesh, in_specs=(spec(), spec("d")), out_specs=spec("d"))
    with pytest.raises(ValueError, match=r"loss_fn returns an average over the devices of 'd'.*afterwards"):
        jax.eval_shape(mapped, params, x)


@pytest.mark.slow
def test_the_loss_of_a_training_step_is_the_devices_own():
    """Check that the loss is the device's own and that its gradient is averaged once.

    The parameters must match the parameters of one device with the whole batch.
    """
    params, x = {"w": normal(0, 5, 2, dtype=np.float32)}, normal(1, 8, 5, dtype=np.float32)

    def square(p, x):
        return jnp.mean((x @ p["w"]) ** 2)

    step = kfac.train_step(square, 0.1, preconditioner=kfac.Cholesky(), verbose=False)
    spec, mesh = jax.sharding.PartitionSpec, jax.make_mesh((4,), ("d",), (jax.sharding.AxisType.Auto,))

    def local(params, x):
        new, _, value = step(params, step.init(params, x), x)
        return new, value[None]

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(spec(), spec("d")), out_specs=(spec(), spec("d")))
    new, values = jax.jit(mapped)(params, x)
    np.testing.assert_allclose(values, [square(params, part) for part in x.reshape(4, 2, 5)], rtol=1e-5)
    np.testing.assert_allclose(new["w"], step(params, step.init(params, x), x)[0]["w"], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto])
def test_a_batch_over_a_mesh(kind, x64):
    params, batch = problem()
    fn = function(params, batch)
    expected = compiled(fn)(params, *batch)
    mesh = jax.make_mesh((4,), ("devices",), (kind,), devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("devices"))
        *rest, factors = compiled(kfac.microbatch(fn, 3, batch_argnums=(1, 2)))(params, *jax.device_put(batch, split))
    assert_equal(jax.device_get((*rest, factors.whole())), expected)
