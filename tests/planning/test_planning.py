"""Test `kfac.planning.estimate`: the bytes of compiled programs, the optimizer's interval, and negligible run time."""

import dataclasses
import functools
import itertools
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

import kfac
import messages
from checking import slow
from problem import state_of

DEVICES = 4
# The number of bytes that a device sends for each byte of an all-reduce.
ALL_REDUCE = 2 * (DEVICES - 1) / DEVICES


def dense(n):
    """Return a loss over dense layers. The devices divide some of the shapes."""
    widths = [24, 24, 24, 24, 24, 12, 12, 32, 7]

    def loss(p, b):
        x = b["x"]
        for k in range(len(widths) - 1):
            x = jnp.tanh(x @ p[f"w{k}"] + p[f"b{k}"])
        return jnp.mean((x - b["y"]) ** 2)

    shapes = {f"w{k}": (a, b) for k, (a, b) in enumerate(itertools.pairwise(widths))}
    shapes |= {f"b{k}": (b,) for k, b in enumerate(widths[1:])}
    return loss, messages.floats(shapes), messages.floats({"x": (n, 24), "y": (n, 7)}), {}


def gpt(n):
    return messages.gpt(n, size=8, layers=3, d=16, words=50, heads=2)


def without_rows(n):
    """Give some layers gradient factors, for which devices send no messages."""
    loss, params, batch, _ = dense(n)
    return loss, params, batch, {"rules": {"w[0357]": "gradient"}}


@pytest.fixture(scope="module")
def resnet50():
    loss, params, batch, _ = messages.resnet50(1, 224)
    return kfac.find_layers(loss, params, batch)


@pytest.mark.parametrize(
    ("model", "max_factor_dim"),
    [
        (dense, 8192),
        (without_rows, 16),
        slow(dense, 16),
        slow(without_rows, 8192),
        slow(gpt, 8192),
        slow(gpt, 16),
    ],
)
def test_its_bytes_are_those_of_compiled_programs(model, max_factor_dim):
    # Refreshes' messages are not included.
    layers, compiled = messages.programs(
        model, DEVICES, "shard_map", inverse_update_period=math.inf, max_factor_dim=max_factor_dim
    )
    plan = kfac.planning.estimate(layers, devices=DEVICES, preconditioner=kfac.Cholesky())
    found = {k: messages.by_kind(messages.messages(p.as_text(), DEVICES)) for k, p in compiled.items()}
    sent = {part: size / ALL_REDUCE for part, size in plan.messages.items()}
    expected = {
        "SGD": sent["gradients"],
        "K-FAC": sent["gradients"] + sent["preconditioning"],
        "K-FAC with statistics": sent["gradients"] + sent["preconditioning"] + sent["statistics"],
    }
    for name, size in expected.items():
        assert found[name]["sent"] == pytest.approx(size, rel=0.05, abs=200), (name, found[name], plan.messages)


@pytest.mark.slow
@pytest.mark.parametrize(
    "preconditioner", [kfac.SOAP(), kfac.EKFAC("bfloat16"), kfac.Cholesky()], ids=["SOAP", "EKFAC", "Cholesky"]
)
@pytest.mark.parametrize("devices", [3, 64])
def test_its_memory_is_that_of_the_state(preconditioner, devices):
    """Compare to the byte, for groups that are dealt evenly and groups that are flattened."""
    loss, params, batch, find = gpt(4)
    layers = kfac.find_layers(loss, params, batch, **find)
    tx = kfac.kfac(0.1, layers, preconditioner=preconditioner, adaptive_layer_rates=False)
    mesh = AbstractMesh((devices,), ("d",), axis_types=(AxisType.Auto,))
    specs = kfac.state.state_specs(tx, params, "d")
    init = jax.shard_map(tx.init, mesh=mesh, in_specs=PartitionSpec(), out_specs=specs)
    state = state_of(jax.eval_shape(init, params))

    def size(tree):
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))

    held = size((state.blocks, state.flat_state)) // devices
    assert kfac.planning.estimate(layers, devices=devices, preconditioner=preconditioner).memory["state"] == held


@pytest.mark.slow
def test_a_run_on_thousands_of_devices_is_planned_in_no_time(resnet50):
    began = time.process_time()
    text = str(kfac.planning.estimate(resnet50, devices=4096, batch=131072))
    assert time.process_time() - began < 4
    for word in ("ASSUMED", "predicted", "memory of a device", "fits into 80.0 GB", "statistics every 7"):
        assert word in text


@pytest.mark.slow
def test_given_intervals_stay(resnet50):
    given = kfac.planning.estimate(resnet50, devices=64, batch=8192, inverse_update_period=50, statistics_period=5)
    assert (given.inverse_update_period, given.statistics_period) == (50, 5)
    seconds = given.seconds
    extra = seconds["preconditioning"] + seconds["statistics"] / 5 + seconds["refresh"] / 50
    assert given.extra_seconds == pytest.approx(extra)
    few, all_examples = (
        kfac.planning.estimate(resnet50, devices=64, batch=8192, statistics_fraction=part, statistics_period=5)
        for part in (1 / 4, 1)
    )
    assert all_examples.flops["statistics"] == pytest.approx(4 * few.flops["statistics"])
    # If every step has the statistics of all examples, statistics share the gradients' passes.
    fused = kfac.planning.estimate(resnet50, devices=64, batch=8192, statistics_fraction=1, statistics_period=1)
    passes = 2 / 3 * fused.flops["gradients"]
    assert all_examples.flops["statistics"] == pytest.approx(fused.flops["statistics"] + passes)


@pytest.mark.slow
def test_hardware_and_its_rates(resnet50):
    h100 = kfac.planning.HARDWARE["h100"]
    slow, fast = (
        kfac.planning.estimate(resnet50, devices=8, batch=256, hardware=dataclasses.replace(h100, bandwidth=rate))
        for rate in (1e9, 1e12)
    )
    sent = slow.messages["gradients"]
    assert slow.seconds["gradients"] - fast.seconds["gradients"] == pytest.approx(sent / 1e9 - sent / 1e12)
    own = kfac.planning.estimate(resnet50, devices=1, batch=256, hardware=kfac.planning.Hardware(1e12, 1e11, 1e10, 1e8))
    assert own.seconds["gradients"] == own.flops["gradients"] / 1e12
    assert own.seconds["refresh"] == own.flops["refresh"] / 1e11
    assert not own.fits and "DOES NOT FIT into 100.0 MB" in str(own)
    # An image of 224 x 224 takes 4.1 GMACs, which are two FLOPs each, in each of three passes. The tolerance is for
    # strides in other convolutions.
    assert own.flops["gradients"] / 256 == pytest.approx(6 * 4.1e9, rel=0.05)
    assert not any(own.messages.values())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"hardware": "abacus"}, "hardware must be one of 'h100', 'tpu-v5p', but is 'abacus'"),
        ({"batch": 0}, "batch must be a positive int, but is 0"),
        ({"overhead": -1}, "overhead must lie in"),
        ({"inverse_update_period": 0}, "inverse_update_period must be an integer, at least 1, but is 0"),
        ({"devices": 0}, "devices must be a positive int, but is 0"),
    ],
)
def test_wrong_arguments_are_named(resnet50, options, words):
    with pytest.raises(ValueError, match=words):
        kfac.planning.estimate(resnet50, **{"devices": 8, "batch": 256, **options})


def test_wrong_hardware_is_refused():
    with pytest.raises(ValueError, match="bandwidth must lie in"):
        kfac.planning.Hardware(1e12, 1e11, 0)


def test_a_plan_needs_a_number_of_examples(resnet50):
    with pytest.raises(ValueError, match="without a number of examples: pass batch="):
        kfac.planning.estimate(dataclasses.replace(resnet50, num_examples=None), devices=8)


def test_layers_without_positions_are_refused(resnet50):
    blocks = tuple(dataclasses.replace(layer, positions=None) for layer in resnet50)
    with pytest.raises(ValueError, match="layers: '0_0a/kernel' was found without positions"):
        kfac.planning.estimate(dataclasses.replace(resnet50, layers=blocks), devices=8, batch=256)


@pytest.mark.slow
def test_eigendecompositions_cost_more(resnet50):
    cholesky, eigh = (
        kfac.planning.estimate(resnet50, devices=8, batch=256, preconditioner=i) for i in (kfac.Cholesky(), kfac.Eigh())
    )
    assert eigh.flops["refresh"] > 2 * cholesky.flops["refresh"]
    ekfac = kfac.planning.estimate(resnet50, devices=8, batch=256, preconditioner=kfac.EKFAC())
    assert ekfac.messages["statistics"] > eigh.messages["statistics"] and not ekfac.messages["refresh"]


def perceptron(examples, width):
    def loss(p, x):
        return jnp.mean((jnp.tanh(x @ p["w0"]) @ p["w1"]) ** 2)

    params = {"w0": jnp.ones((width, width)), "w1": jnp.ones((width, 4))}
    return loss, params, jnp.linspace(-1, 1, examples * width).reshape(examples, width)


def train(loss, layers, params, x, steps, **options):
    """Return parameters and state after these steps, and the inverse's age in each step."""
    tx = kfac.kfac(0.05, layers, **options)

    def step(carry, _):
        at, state = carry
        _, grads, factors = kfac.value_and_grad(loss, layers)(at, x)
        state = kfac.observe(state, factors)
        updates, state = tx.update(grads, state, at)
        return (jax.tree.map(jnp.add, at, updates), state), kfac.diagnostics(state)["inverse_age"]

    return jax.jit(lambda p: jax.lax.scan(step, (p, tx.init(p)), length=steps))(params)


def interval(loss, layers, params, x, **options):
    """Return the number of steps between refreshes, once it no longer grows. Its maximum is 16."""
    return 1 + np.max(train(loss, layers, params, x, 97, **options)[1])


# Gradients take 3 products of 2 n d (d + 4) FLOPs each. Statistics of every k-th example take 2 n (3 d^2 + 4^2) / k,
# and two products for these examples. Refreshes take f (3 d^3 + 4^3), where f depends on the preconditioner.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("examples", "width", "preconditioner", "overhead", "every"),
    [
        (2000, 16, kfac.SOAP(), 0.1, 5),
        (2000, 16, kfac.SOAP(), 1, 1),
        (32, 16, kfac.SOAP(), 1, 5),
        (32, 16, kfac.Cholesky(), 1, 4),
        (1, 64, kfac.SOAP(), 0.1, 16),
    ],
)
def test_statistics_and_refreshes_take_a_share_of_the_work_of_gradients(
    examples, width, preconditioner, overhead, every
):
    loss, params, x = perceptron(examples, width)
    layers = kfac.find_layers(loss, params, x)
    gradients, share = 6 * examples * width * (width + 4), 4 if examples >= 64 else 1
    statistics = (2 * examples * (3 * width**2 + 4**2) + gradients * 2 / 3) / share
    refresh = preconditioner.flops_per_cube * (3 * width**3 + 4**3)
    ratio = (statistics + 3 * refresh) / gradients / overhead
    assert (
        interval(loss, layers, params, x, preconditioner=preconditioner, overhead=overhead)
        == every
        == min(16, math.ceil(ratio))
    )
    # An estimate is for accelerators, where a FLOP of a refresh costs 8 instead of 3.
    plan = kfac.planning.estimate(layers, devices=2, preconditioner=preconditioner, overhead=overhead)
    ratio = (statistics + 8 * refresh) / gradients / overhead
    assert plan.inverse_update_period == plan.statistics_period == min(16, math.ceil(ratio))

    def final(**options):
        return train(
            loss, layers, params, x, 16, **{"preconditioner": preconditioner, "overhead": overhead, **options}
        )[0]

    at_once = kfac.Distribution()
    jax.tree.map(np.testing.assert_array_equal, final(), final(inverse_update_period=every, distribution=at_once))
    if every in (4, 5):  # these intervals have an effect after the ten steps of the warm-up
        assert not np.array_equal(final()[0]["w0"], final(inverse_update_period=1)[0]["w0"])


def test_find_layers_counts_frozen_kernels_and_estimate_and_train_step_their_cost(capsys):
    """An adapter costs little beside a frozen network, although it costs much beside its own products."""

    def loss(params, frozen, x):
        x = lax.conv_general_dilated(x, frozen["conv"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
        x = x + x @ params["adapter"]  # no gradient flows back to the convolution
        x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, frozen["stack"])
        similar = jnp.einsum("nik,njk->nij", x, x)  # no kernel
        return jnp.mean(similar) + 0 * jnp.mean(lax.stop_gradient(x) @ frozen["conv"][0])

    frozen = {"conv": jnp.zeros((3, 64, 64)), "stack": jnp.zeros((5, 64, 64))}
    params, x = {"adapter": jnp.zeros((64, 64))}, jnp.zeros((8, 16, 64))
    layers = kfac.find_layers(loss, params, frozen, x)
    product = 2 * 16 * 64 * 64
    assert layers._frozen_flops == (3 + 2 * 5 + 1) * product
    plan = kfac.planning.estimate(layers, devices=2)
    assert plan.flops["gradients"] == 4 * (3 + 14) * product
    assert plan.flops["statistics"] == 4 * (2 + 2 + 14) * product

    step = kfac.train_step(loss, 0.1, overhead=1)
    step.init(params, frozen, x)
    # Applied to both sides twice: 8 products of 64 rows. Statistics and a refresh of two factors in every fifth step.
    refresh = 3 * kfac.SOAP().flops_per_cube * 2 * 64**3
    every = math.ceil((8 * 18 * product + refresh) / (8 * 17 * product))
    added = (8 * 18 * product + refresh) / every + kfac.SOAP().products * 4 * 64**3
    assert 1 < every < 16
    assert f"every {every} steps" in (line := capsys.readouterr().out)
    assert f"costs {1 + added / (8 * 17 * product):.2f} times" in line


@pytest.mark.slow
def test_without_a_number_of_examples_kfac_refreshes_at_the_longest_interval():
    loss, params, x = perceptron(1, 64)
    layers = kfac.find_layers(loss, params, x)
    assert repr(layers).endswith("found with 1 example(s) in argument 1")
    with pytest.raises(ValueError, match="inverse_update_period must be an integer, at least 1, but is 'often'"):
        kfac.kfac(0.1, layers, inverse_update_period="often")
    for other in (kfac.scale_by_kfac, functools.partial(kfac.natural_gradient, 0.1)):
        with pytest.raises(ValueError, match=r"but is 'auto'; math\.inf leaves all refreshes"):
            other(layers, inverse_update_period="auto")
    assert interval(loss, dataclasses.replace(layers, num_examples=None), params, x, overhead=0.1) == 16


def test_the_inverse_of_a_plan_is_that_of_the_optimizer_by_default():
    loss, params, x = perceptron(64, 16)
    layers = kfac.find_layers(loss, params, x)
    assert repr(kfac.planning.estimate(layers, devices=4)) == repr(
        kfac.planning.estimate(layers, devices=4, batch=64, preconditioner=kfac.SOAP())
    )
