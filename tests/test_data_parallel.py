"""`kfac.data_parallel`: each device evaluates its share of a batch, and its part of the statistics goes to owners."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import kfac
import messages
from checking import FAST, normal
from kfac._factors import Packed
from problem import tied_batch, tied_loss, tied_parameters

STEPS, WORDS, WIDTH = 6, 9, 6


def parameters():
    """Blocks of every kind: dense, a norm, a table that is the head too, and one with the gradient's own factors."""
    return tied_parameters(3, WIDTH, WORDS, 4) | {"places": normal(40, 5, WIDTH)}


def loss_fn(p, batch):
    x, tokens, labels = batch
    rest = {name: leaf for name, leaf in p.items() if name != "places"}
    moved = x + jnp.mean(p["places"][jnp.arange(5)]) * x  # by what no example is seen
    return tied_loss(rest, (moved, tokens, labels))


@functools.cache
def found():
    layers = kfac.find_layers(loss_fn, parameters(), tied_batch(0))
    assert any(layer.kind == "gradient" for layer in layers)
    return layers


def mesh_of(kind=AxisType.Auto, sizes=(2, 2)):
    names = ("data", "model")[: len(sizes)]
    return jax.make_mesh(sizes, names, axis_types=len(sizes) * (kind,), devices=jax.devices()[: np.prod(sizes)])


def trained(distribution, options, spread=lambda fn: fn, place=lambda data: data, params=None, **wire):
    tx = kfac.kfac(0.05, found(), damping=1e-2, trust_ratio=None, inverse_every=2, **options, distribution=distribution)

    @functools.partial(jax.jit, static_argnums=3, compiler_options=FAST)
    def step(p, state, data, statistics):
        basis = {"basis": kfac.curvature.eigenbasis(state, found())} if options.get("inverse") == kfac.Ekfac() else {}
        value, grads, factors = spread(kfac.value_and_grad(loss_fn, found(), **wire))(p, data, **basis)
        updates, state = tx.update(grads, state, p, factors=factors if statistics else None)
        return optax.apply_updates(p, updates), state, value

    params = parameters() if params is None else params
    state, values = jax.jit(tx.init)(params), []
    for k in range(STEPS):
        params, state, value = jax.block_until_ready(step(params, state, place(tied_batch(k)), k != 3))
        values.append(value)
    return jax.device_get((params, values)), state


@functools.cache
def on_one(inverse):
    return trained(kfac.Distribution(), {"inverse": inverse})


def over(mesh, axis, inverse, wire="float32", **fields):
    axes = axis or mesh.axis_names
    distribution = kfac.Distribution(mesh=mesh, **fields)
    with jax.set_mesh(mesh):
        params = jax.device_put(parameters(), NamedSharding(mesh, P()))
        return trained(
            distribution, {"inverse": inverse}, lambda fn: kfac.data_parallel(fn, mesh, axis),
            lambda data: jax.device_put(data, NamedSharding(mesh, P(axes))), params, communication_dtype=wire,
        )  # fmt: skip


def slow(*options):
    return pytest.param(*options, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("kind", "axis", "inverse", "fields"),
    [
        (AxisType.Auto, "data", kfac.Cholesky(), {}),  # the model's axis has copies of each share
        slow(AxisType.Explicit, None, kfac.Cholesky(), {}),
        slow(AxisType.Explicit, "data", kfac.Cholesky(), {"owners": "data"}),
        slow(AxisType.Auto, None, kfac.Ekfac(), {}),
        slow(AxisType.Auto, "data", kfac.Cholesky(), {"owners": "model"}),
        slow(AxisType.Auto, None, kfac.Soap(), {}),
    ],
)
def test_it_is_one_device(x64, kind, axis, inverse, fields):
    result, state = over(mesh_of(kind), axis, inverse, **fields)
    expected, alone = on_one(inverse)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), result, expected)
    for name, value in kfac.diagnostics(alone).items():
        np.testing.assert_allclose(kfac.diagnostics(state)[name], value, rtol=1e-4, err_msg=name)


def test_in_bfloat16_on_the_wire(x64):
    result, _ = over(mesh_of(), None, kfac.Cholesky(), "bfloat16")
    expected, _ = on_one(kfac.Cholesky())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0.05, atol=0.02), result, expected)
    assert any(np.abs(a - b).max() > 1e-9 for a, b in zip(*map(jax.tree.leaves, (result, expected)), strict=True))


@pytest.mark.parametrize("parts", [1, 3])
def test_the_average_is_the_whole_batch(x64, parts):
    """Also of micro-batches on each device, and of a loss that is scaled."""
    mesh, measure = mesh_of(sizes=(2,)), kfac.value_and_grad(loss_fn, found())
    expected = jax.jit(measure)(parameters(), tied_batch(0))
    own = kfac.microbatch(measure, parts) if parts > 1 else measure
    value, grads, factors = jax.jit(kfac.data_parallel(own, mesh))(parameters(), tied_batch(0))
    packed = [block for block in factors.values() if isinstance(block, Packed)]
    assert packed and all(2 * x.addressable_shards[0].data.size == x.size for x in jax.tree.leaves(packed))
    found_all = value, grads, factors.unscale(2.0).unscale(0.5).whole()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-14), found_all, expected)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_other_arguments(x64, kind):
    """Flags stay flags, every device draws other numbers, and a batch of the host is spread."""

    def loss(p, b, train, *, rngs, mode):
        x, tokens, labels = b
        noise = jax.random.normal(rngs["noise"][0], x.shape) if train and mode == "noisy" else 0
        return tied_loss(p, (x + noise, tokens, labels)), noise

    mesh, params = mesh_of(kind, sizes=(2,)), tied_parameters(1, 4, 4, 4)
    data = np.ones((4, 4)), np.zeros(4, int), np.zeros(4, int)
    key = jax.random.key(0)
    options = {"rngs": {"noise": [key]}, "mode": "noisy"}
    layers = kfac.find_layers(loss, params, data, True, has_aux=True, **options)
    measure = kfac.data_parallel(kfac.value_and_grad(loss, layers, has_aux=True), mesh)
    (_, noise), _, _ = jax.jit(lambda p, b: measure(p, b, True, **options))(params, data)
    drawn = [jax.random.normal(jax.random.fold_in(key, device), (2, 4)) for device in range(2)]
    np.testing.assert_allclose(noise, (drawn[0] + drawn[1]) / 2)


def test_averages_of_float16_do_not_overflow():
    params, data = {"w": jnp.ones((1, 1), jnp.float16)}, jnp.full((8, 1), 3e4, jnp.float16)

    def loss(p, b):
        return jnp.mean(b @ p["w"])

    layers = kfac.find_layers(loss, params, data)
    value, grads, _ = jax.jit(kfac.data_parallel(kfac.value_and_grad(loss, layers), mesh_of(sizes=(4,))))(params, data)
    assert value.dtype == jnp.float16 and jnp.isfinite(value) and jnp.all(jnp.isfinite(grads["w"]))


def test_a_step_without_statistics(x64):
    """The gradients are the same, and an update over the mesh takes them without factors."""
    mesh, layers = mesh_of(sizes=(2,)), found()
    value, grads, _ = jax.jit(kfac.value_and_grad(loss_fn, layers))(parameters(), tied_batch(0))
    cheap = kfac.value_and_grad(loss_fn, layers, statistics=False)
    for measure in (cheap, kfac.microbatch(cheap, 3), kfac.data_parallel(cheap, mesh)):
        result = jax.jit(measure)(parameters(), tied_batch(0))
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-14), result, (value, grads, None)
        )


def test_what_is_as_long_as_the_batch_is_spread_or_named(x64):
    def loss(p, x, y):
        return jnp.mean(jnp.sum((x @ p["w"] - y) ** 2, -1))

    params, x, y, mesh = {"w": normal(0, 4, 3)}, normal(1, 8, 4), normal(2, 8, 3), mesh_of(sizes=(2,))
    measure = kfac.value_and_grad(loss, kfac.find_layers(loss, params, x, y))
    with pytest.raises(ValueError, match="length 8, but argument 2 is as long"):
        kfac.data_parallel(measure, mesh)(params, x, y)
    value, grads, factors = jax.jit(kfac.data_parallel(measure, mesh, batch_argnums=(1, 2)))(params, x, y)
    expected = measure(params, x, y)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-14),
        (value, grads, factors.whole()),
        expected,
    )


@pytest.mark.slow
def test_statistics_go_to_their_owners_in_triangles():
    """As inside of shard_map, and a part of them once more: first evenly over the devices, and from there to owners."""
    model = functools.partial(messages.gpt, size=8, layers=2, d=16, words=50, heads=2)
    sent = {}
    for style in ("shares", "shard_map"):
        layers, compiled = messages.programs(model, 4, style, inverse_every=None)
        sent[style] = messages.by_kind(messages.messages(compiled["K-FAC with statistics"].as_text(), 4))
    shares, own = sent["shares"], sent["shard_map"]
    assert shares["all-gather"] == own["all-gather"]
    assert shares["reduce-scatter"] <= own["reduce-scatter"] < 1.02 * messages.packed_bytes(layers)
    assert shares["all-to-all"] - own["all-to-all"] < 0.5 * messages.packed_bytes(layers)


def test_what_does_not_go_together_is_refused(x64):
    mesh, params = mesh_of(sizes=(2,)), tied_parameters(1, 4, 4, 4)
    data = jnp.ones((4, 4)), jnp.zeros(4, int), jnp.zeros(4, int)
    layers = kfac.find_layers(tied_loss, params, data)
    measure = kfac.data_parallel(kfac.value_and_grad(tied_loss, layers), mesh)
    with pytest.raises(ValueError, match=r"2 devices of the axes \('data',\) do not divide the batch: .* length 3"):
        jax.eval_shape(measure, params, jax.tree.map(lambda x: x[:3], data))
    with pytest.raises(ValueError, match="leading axes of different lengths 4, 2"):
        jax.eval_shape(measure, params, (*data[:2], jnp.zeros(2, int)))
    with pytest.raises(ValueError, match="pass the batch by position"):
        jax.eval_shape(functools.partial(measure, batch=data), params)
    for fn in (3, jax.value_and_grad(tied_loss), tied_loss):
        with pytest.raises(ValueError, match="fn must be what"):
            jax.eval_shape(kfac.data_parallel(fn, mesh), params, data)
    with pytest.raises(ValueError, match=r"axis_name must be among the axes of mesh, \('data',\), but is 'model'"):
        kfac.data_parallel(kfac.value_and_grad(tied_loss, layers), mesh, "model")
    counted = kfac.value_and_grad(lambda p, b: (tied_loss(p, b), {"count": len(b[0])}), layers, has_aux=True)
    with pytest.raises(ValueError, match="data_parallel averages results over devices, but one has dtype int"):
        jax.eval_shape(kfac.data_parallel(counted, mesh), params, data)
