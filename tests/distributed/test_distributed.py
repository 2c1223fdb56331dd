"""Test that pmap, shard_map and jit over a mesh match a single device on the concatenated batch."""

import dataclasses
import functools
import itertools
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import kfac
from problem import observing, plain_kfac, state_of

AXIS = "batch"
DEVICES = jax.device_count()
STEPS = 6
EXAMPLES = 32


def make_params(widths, seed=0):
    """Return an MLP's parameters, with a scale and shift behind each layer, and with a layer that gets no gradient."""
    params, rng = {}, np.random.default_rng(seed)
    for k, (d_in, d_out) in enumerate(itertools.pairwise(widths)):
        kernel = jnp.asarray(rng.normal(size=(d_in, d_out)) / d_in**0.5, jnp.float32)
        params[f"dense{k}"] = {"kernel": kernel, "bias": jnp.zeros(d_out)}
        params[f"norm{k}"] = {"scale": jnp.ones(d_out), "shift": jnp.zeros(d_out)}
    params["idle"] = {"kernel": jnp.ones((widths[0], 3)), "bias": jnp.zeros(3)}
    return params


def loss_fn(params, batch):
    x, y = batch
    idle = x @ params["idle"]["kernel"] + params["idle"]["bias"]
    count = sum(name.startswith("dense") for name in params)
    for k in range(count):
        x = x @ params[f"dense{k}"]["kernel"] + params[f"dense{k}"]["bias"]
        x = jnp.tanh(x * params[f"norm{k}"]["scale"] + params[f"norm{k}"]["shift"])
    return jnp.mean((x - y) ** 2) + 0 * jnp.sum(idle) / len(idle)


def batches(widths):
    rng = np.random.default_rng(0)
    return [
        (
            rng.normal(size=(EXAMPLES, widths[0])).astype(np.float32) * np.linspace(0.2, 2, EXAMPLES)[:, None],
            rng.normal(size=(EXAMPLES, widths[-1])).astype(np.float32),
        )
        for _ in range(STEPS)
    ]


def has_statistics(step):
    return step not in (2, 4)


def as_float32(tree):
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)


def on_devices(options, **where):
    """Return options of `kfac.kfac`, with the options about devices collected in a `Distribution`."""
    fields = [field.name for field in dataclasses.fields(kfac.Distribution)]
    where |= {name: value for name, value in options.items() if name in fields}
    rest = {name: value for name, value in options.items() if name not in fields}
    return rest | ({"distribution": kfac.Distribution(**where)} if where else {})


def train_one_device(params, data, layers, options):
    tx = plain_kfac(0.05, layers, **on_devices(options))
    state = jax.jit(tx.init)(params)

    @functools.partial(jax.jit, static_argnums=3)
    def step(params, state, batch, statistics):
        _, grads, factors = kfac.value_and_grad(loss_fn, layers)(params, batch)
        updates, state = observing(tx)(grads, state, params, factors=factors if statistics else None)
        return optax.apply_updates(params, updates), state

    for k, batch in enumerate(data):
        params, state = step(params, state, as_float32(batch), has_statistics(k))
    return params, state


def train_pmap(params, data, layers, options, devices, state=None, first=0):
    tx = plain_kfac(0.05, layers, **on_devices(options, axis_name=AXIS))
    devices = jax.devices()[:devices]
    params = jax.tree.map(lambda x: jnp.broadcast_to(x, (len(devices), *x.shape)), params)
    state = state or jax.pmap(tx.init, axis_name=AXIS, devices=devices)(params)

    def step(params, state, batch, statistics):
        _, grads, factors = kfac.value_and_grad(loss_fn, layers)(params, batch)
        updates, state = observing(tx)(lax.pmean(grads, AXIS), state, params, factors=factors if statistics else None)
        return optax.apply_updates(params, updates), state

    step = jax.pmap(step, axis_name=AXIS, static_broadcasted_argnums=3, devices=devices)
    for k, batch in enumerate(data, first):
        shards = jax.tree.map(lambda x: x.reshape(len(devices), -1, *x.shape[1:]), as_float32(batch))
        # Run one program at a time. On a machine with few cores, several programs can wait for each other's threads.
        params, state = jax.block_until_ready(step(params, state, shards, has_statistics(k)))
    return jax.tree.map(lambda x: x[0], params), state


def mesh_of(devices):
    return Mesh(np.array(jax.devices()[:devices]), (AXIS,), axis_types=(AxisType.Auto,))


def train_shard_map(params, data, layers, options, devices, state=None, first=0, average=True):
    tx = plain_kfac(0.05, layers, **on_devices(options))
    mesh = mesh_of(devices)
    same, split = PartitionSpec(), PartitionSpec(AXIS)
    specs = kfac.state.state_specs(tx, params, AXIS)
    state = state or jax.jit(jax.shard_map(tx.init, mesh=mesh, in_specs=same, out_specs=specs))(params)

    @functools.partial(jax.jit, static_argnums=3)
    def step(params, state, batch, statistics):
        def local(params, state, batch):
            _, grads, factors = kfac.value_and_grad(loss_fn, layers)(params, batch)
            grads = lax.pmean(grads, AXIS) if average else grads
            updates, state = observing(tx)(grads, state, params, factors=factors if statistics else None)
            return optax.apply_updates(params, updates), state

        return jax.shard_map(local, mesh=mesh, in_specs=(same, specs, split), out_specs=(same, specs))(
            params, state, batch
        )

    for k, batch in enumerate(data, first):
        params, state = jax.block_until_ready(step(params, state, as_float32(batch), has_statistics(k)))
    return params, state


def train_mesh(params, data, layers, options, devices, state=None, first=0):
    mesh = mesh_of(devices)
    tx = plain_kfac(0.05, layers, **on_devices(options))
    params = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
    if state is None:
        state = tx.init(params)
    else:
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), kfac.state.state_specs(tx, params, AXIS))
        state = jax.jit(lambda s: s, out_shardings=shardings)(state)

    @functools.partial(jax.jit, static_argnums=3)
    def step(params, state, batch, statistics):
        _, grads, factors = kfac.value_and_grad(loss_fn, layers)(params, batch)
        updates, state = observing(tx)(grads, state, params, factors=factors if statistics else None)
        return optax.apply_updates(params, updates), state

    for k, batch in enumerate(data, first):
        batch = jax.device_put(as_float32(batch), NamedSharding(mesh, PartitionSpec(AXIS)))
        params, state = jax.block_until_ready(step(params, state, batch, has_statistics(k)))
    assert step._cache_size() <= 2  # with statistics and without
    return params, state


STYLES = {"pmap": train_pmap, "shard_map": train_shard_map, "mesh": train_mesh}
MANY_LAYERS = (5,) * 6  # five layers of one shape, which four devices do not divide
FEW_LAYERS = (6, 7, 4)  # more devices than layers


@functools.cache
def one_device(widths, options):
    params = make_params(widths)
    data = batches(widths)
    layers = kfac.find_layers(loss_fn, params, as_float32(data[0]))
    return params, data, layers, *train_one_device(params, data, layers, dict(options))


def assert_close(a, b, tolerance=1e-5):
    for (path, x), (_, y) in zip(
        jax.tree_util.tree_flatten_with_path(a)[0], jax.tree_util.tree_flatten_with_path(b)[0], strict=True
    ):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        error = np.abs(x - y).max() / max(1.0, np.abs(y).max())
        assert error < tolerance, f"{jax.tree_util.keystr(path)}: {error}"


AT_ONCE = (("inverse_update_period", 3), ("interval_warmup_steps", 1), ("damping", 1e-2))


# test_any_mesh.py covers the other styles with averaged gradients. A test below moves a state over a mesh.
GRID = [
    pytest.param(
        style, widths, marks=() if (style, count) == ("pmap", "few") else pytest.mark.slow, id=f"{style}-{count}"
    )
    for style in STYLES
    for count, widths in (("few", FEW_LAYERS), ("many", MANY_LAYERS))
]


@pytest.mark.parametrize(("style", "widths"), GRID)
def test_several_devices_are_one(style, widths):
    """Check an optimizer without device options."""
    options = {"inverse_update_period": 3, "interval_warmup_steps": 1, "damping": 1e-2}
    params, data, layers, expected, state = one_device(widths, tuple(options.items()))
    found, sharded_state = STYLES[style](params, data, layers, options, DEVICES)
    assert_close(found, expected)
    assert sharded_state[0].settings.devices == DEVICES
    assert_close(jax.jit(kfac.state.gather_state)(sharded_state)[0].blocks, state[0].blocks, 2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("widths", [MANY_LAYERS, FEW_LAYERS], ids=["many", "few"])
@pytest.mark.parametrize("preconditioner", [kfac.Cholesky(), kfac.SOAP()], ids=lambda kind: type(kind).__name__)
def test_gradients_may_arrive_local(widths, preconditioner):
    """Check that local gradients are averaged at the owners or everywhere, also for the norm constraint."""
    options = {
        "inverse_update_period": 3,
        "interval_warmup_steps": 1,
        "damping": 1e-2,
        "preconditioner": preconditioner,
    }
    options |= {"kl_clip": 1e-4} if not preconditioner.owns_momentum else {}
    params, data, layers, expected, state = one_device(widths, tuple(options.items()))
    assert preconditioner.owns_momentum or state[0].metrics.kl_clip_scale < 1
    found, sharded = train_shard_map(params, data, layers, options, DEVICES, average=False)
    assert_close(found, expected, 1e-4)
    np.testing.assert_allclose(*(state_of(s).metrics.gradient_norm for s in (state, sharded)), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("style", ["shard_map", "mesh"])
def test_several_devices_are_one_with_eigendecompositions(style):
    """Move the state to another number of devices on the way.

    In the default run, curvature/test_ekfac_steps.py does this.
    """
    options = {"inverse_update_period": 3, "interval_warmup_steps": 1, "damping": 1e-2, "preconditioner": kfac.Eigh()}
    params, data, layers, expected, _ = one_device(FEW_LAYERS, tuple(options.items()))
    half, state = STYLES[style](params, data[:3], layers, options, DEVICES)
    state = kfac.state.scatter_state(jax.device_get(jax.jit(kfac.state.gather_state)(state)), 2)
    found, _ = STYLES[style](jax.device_get(half), data[3:], layers, options, 2, state, 3)
    assert_close(found, expected, 1e-4)


MOVING = {"inverse_update_period": 3, "interval_warmup_steps": 1, "damping": 1e-2}


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
def test_a_state_moves_between_numbers_of_devices(style):
    """Check that three steps on several devices and three on two, with the portable state between, match six on one."""
    params, data, layers, expected, _ = one_device(MANY_LAYERS, tuple(MOVING.items()))
    params, state = STYLES[style](params, data[:3], layers, MOVING, DEVICES)
    portable = jax.tree.map(np.asarray, jax.jit(kfac.state.gather_state)(state))
    params = jax.tree.map(np.asarray, params)
    alone = jax.eval_shape(plain_kfac(0.05, layers, **on_devices(MOVING)).init, params)
    assert jax.tree.structure(alone) == jax.tree.structure(portable)
    where = kfac.Distribution(AXIS) if style == "pmap" else None
    restored = kfac.state.scatter_state(portable, 2, pmap=style == "pmap", distribution=where)
    params, _ = STYLES[style](params, data[3:], layers, MOVING, 2, restored, 3)
    assert_close(params, expected)


@pytest.mark.slow
def test_eight_devices_do_what_fewer_do():
    """Run the tests above in another process, because the number of devices is fixed when JAX starts."""
    flags = re.sub(r"(device_count)=\d+", r"\1=8", os.environ["XLA_FLAGS"])
    chosen = "several_devices or moves_between"
    subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", __file__, "-k", chosen],
        env={**os.environ, "XLA_FLAGS": flags},
        check=True,
    )


def test_scattering_and_gathering_again_changes_nothing():
    state = one_device(MANY_LAYERS, tuple(MOVING.items()))[-1]
    for devices, pmap in ((3, True), (64, False)):
        again = jax.jit(lambda s, n=devices, p=pmap: kfac.state.gather_state(kfac.state.scatter_state(s, n, pmap=p)))(
            state
        )
        assert jax.tree.structure(again) == jax.tree.structure(state)
        jax.tree.map(np.testing.assert_array_equal, again, state)


def test_a_state_for_another_number_of_devices_is_refused():
    params, _, layers, _, state = one_device(FEW_LAYERS, AT_ONCE)
    with pytest.raises(ValueError, match=rf"state is one for 1 device.*runs on {DEVICES}.*scatter_state"):
        tx = plain_kfac(0.05, layers, distribution=kfac.Distribution(AXIS, mesh_of(DEVICES)))
        tx.update(params, state, params)
    with pytest.raises(ValueError, match="num_devices must be a positive int, but is 0"):
        kfac.state.scatter_state(state, 0)
    with pytest.raises(ValueError, match="holds no state of kfac"):
        kfac.state.gather_state({"momentum": jnp.zeros(3)})
    with pytest.raises(ValueError, match="portable must be what gather_state returns"):
        jax.eval_shape(lambda s: kfac.state.scatter_state(kfac.state.scatter_state(s, 4), 2), state)


def test_an_axis_that_is_not_bound_is_refused():
    params, _, layers, _, _ = one_device(FEW_LAYERS, AT_ONCE)
    tx = plain_kfac(0.05, layers, distribution=kfac.Distribution(AXIS))
    with pytest.raises(ValueError, match="axis_name='batch' is not bound"):
        jax.eval_shape(lambda p: tx.update(p, tx.init(p), p), params)
    with pytest.raises(ValueError, match=r"axis_name must be among the axes of mesh, \('batch',\), but is 'model'"):
        kfac.Distribution("model", mesh_of(2))


@pytest.mark.slow
def test_a_device_that_sees_nan_hangs_nobody():
    """Check that all devices skip a step together if a single device has a NaN in its unaveraged gradients."""
    params, data, layers, _, _ = one_device(FEW_LAYERS, AT_ONCE)
    devices = 4
    tx = kfac.scale_by_kfac(layers, inverse_update_period=2, distribution=kfac.Distribution(AXIS))
    params = jax.tree.map(lambda x: jnp.broadcast_to(x, (devices, *x.shape)), params)
    state = jax.pmap(tx.init, axis_name=AXIS, devices=jax.devices()[:devices])(params)

    def step(state, params, batch):
        _, grads, factors = kfac.value_and_grad(loss_fn, layers)(params, batch)
        state = kfac.observe(state, factors)
        return tx.update(grads, state)[1]

    step = jax.pmap(step, axis_name=AXIS, devices=jax.devices()[:devices])
    batch = jax.tree.map(lambda x: x.reshape(devices, -1, *x.shape[1:]), as_float32(data[0]))
    state = step(state, params, batch)
    before = jax.tree.map(np.asarray, state)
    broken = (batch[0].at[1, 0, 0].set(jnp.nan), batch[1])
    after = jax.tree.map(np.asarray, step(state, params, broken))
    assert (after.count == before.count).all() and (after.metrics.skipped_steps == 1).all()
    for name in before.blocks:
        jax.tree.map(
            np.testing.assert_array_equal,
            after.blocks[name].preconditioner,
            before.blocks[name].preconditioner,
        )
        jax.tree.map(np.testing.assert_array_equal, after.blocks[name].factors, before.blocks[name].factors)
    # The next batch is finite, so the next step counts.
    following = step(jax.tree.map(jnp.asarray, after), params, batch)
    assert (np.asarray(following.count) == before.count + 1).all()


def test_what_would_be_quietly_wrong_is_refused():
    state = one_device(FEW_LAYERS, AT_ONCE)[-1]
    scattered = jax.eval_shape(lambda s: kfac.state.scatter_state(s, 4), state)
    part = jax.tree.map(
        lambda x: x.update(shape=(1, *x.shape[1:])) if x.ndim else x, scattered
    )  # as a single process sees it
    with pytest.raises(ValueError, match=r"must hold the 4 blocks of all 4 devices in a row, but has \(1,\)"):
        jax.eval_shape(kfac.state.gather_state, part)


def test_what_shard_map_knows_to_be_wrong_is_said_by_name():
    params, data, layers, _, _ = one_device(FEW_LAYERS, AT_ONCE)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    same, split = PartitionSpec(), PartitionSpec(("data", "model"))
    tx = plain_kfac(0.05, layers, distribution=kfac.Distribution("data"))

    def run(average, specs, state, of_all=lambda factors: factors):
        def local(params, state, batch):
            _, grads, factors = kfac.value_and_grad(loss_fn, layers)(params, batch)
            return observing(tx)(average(grads), state, params, of_all(factors))[0]

        fn = jax.shard_map(local, mesh=mesh, in_specs=(same, specs, split), out_specs=same)
        return jax.eval_shape(fn, params, state, as_float32(data[0]))

    where = kfac.Distribution("data")
    scattered = jax.eval_shape(lambda params: kfac.state.scatter_state(tx.init(params), 2, distribution=where), params)
    specs = kfac.state.state_specs(tx, params, "data")
    with pytest.raises(ValueError, match=r"of \['model'\], which axis_name='data' does not name.* jax.jit with param"):
        run(lambda grads: grads, specs, scattered)
    with pytest.raises(
        ValueError, match=r"factors differ .*='data' does not name.* pass axis_name=\('data', 'model'\)"
    ):
        run(lambda grads: lax.pmean(grads, ("data", "model")), specs, scattered)
    for of_all in (lambda factors: None, lambda factors: lax.pmean(factors, "model")):
        words = r"this device must get 2 of the state's 3 blocks .* but gets 4: use kfac.state.state_specs"
        with pytest.raises(ValueError, match=words):
            run(lambda grads: lax.pmean(grads, ("data", "model")), same, scattered, of_all)


@pytest.mark.slow
def test_float64_stays_float64_between_devices(x64):
    params = jax.tree.map(lambda x: x.astype(jnp.float64), make_params(FEW_LAYERS))
    batch = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), batches(FEW_LAYERS)[0])
    layers = kfac.find_layers(loss_fn, params, batch)
    mesh, same = mesh_of(4), PartitionSpec()

    def step(tx, axis, params, batch):
        _, grads, factors = kfac.value_and_grad(loss_fn, layers)(params, batch)
        grads = lax.pmean(grads, axis) if axis else grads
        return tx.update(grads, kfac.observe(tx.init(params), factors))[0]

    expected = jax.jit(functools.partial(step, kfac.scale_by_kfac(layers), None))(params, batch)
    mapped = functools.partial(step, kfac.scale_by_kfac(layers, distribution=kfac.Distribution(AXIS)), AXIS)
    found = jax.jit(jax.shard_map(mapped, mesh=mesh, in_specs=(same, PartitionSpec(AXIS)), out_specs=same))(
        params, batch
    )
    assert_close(found, expected, 1e-12)
