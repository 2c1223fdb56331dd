"""`kfac.planning.plan`: bytes as of compiled programs, intervals that keep to the overhead, and no time to speak of."""

import dataclasses
import functools
import itertools
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

import kfac
import messages
from checking import slow
from problem import state_of

DEVICES = 4


def dense(n):
    """Dense layers of some shapes, some of which the devices divide, some not."""
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
    """Some of the layers have the gradient's own factors, for which nothing is sent."""
    loss, params, batch, _ = dense(n)
    return loss, params, batch, {"gradient_factors": ("w0", "w3", "w5", "w7")}


@pytest.fixture(scope="module")
def resnet50():
    loss, params, batch, _ = messages.resnet50(1, 224)
    return kfac.find_layers(loss, params, batch)


@pytest.mark.parametrize(
    ("model", "gradients", "max_factor_dim"),
    [
        (dense, "averaged", 8192),
        (without_rows, "local", 16),
        slow(dense, "local", 8192),
        slow(dense, "local", 16),
        slow(without_rows, "averaged", 8192),
        slow(without_rows, "local", 8192),
        *(
            slow(gpt, gradients, max_factor_dim)
            for gradients, max_factor_dim in (("averaged", 8192), ("local", 8192), ("local", 16))
        ),
    ],
)
def test_its_bytes_are_those_of_compiled_programs(model, gradients, max_factor_dim):
    # Messages of refreshes are no part of these.
    layers, compiled = messages.programs(
        model, DEVICES, "shard_map", inverse_update_period=None, max_factor_dim=max_factor_dim, gradients=gradients
    )
    plan = kfac.planning.plan(layers, devices=DEVICES, batch=64, preconditioner=kfac.Cholesky(), gradients=gradients)
    found = {k: messages.by_kind(messages.messages(p.as_text(), DEVICES)) for k, p in compiled.items()}
    sent = {part: messages.in_all_reduces(kinds) for part, kinds in plan.messages.items()}
    expected = {
        "SGD": 4 * sum(layer.num_params for layer in layers),
        "K-FAC": sent["gradients"] + sent["results"],
        "K-FAC with statistics": sent["gradients"] + sent["results"] + sent["statistics"],
    }
    for name, size in expected.items():
        assert found[name]["sent"] == pytest.approx(size, rel=0.05, abs=200), (name, found[name], plan.messages)


def test_small_blocks_are_sent_in_float32_whatever_factors_are(resnet50):
    wide, narrow = (
        kfac.planning.Assignment(resnet50, 64, communication_dtype=dtype).statistics_messages
        for dtype in ("float32", "bfloat16")
    )
    assert narrow["all-reduce"] == wide["all-reduce"] > 0
    assert narrow["reduce-scatter"] == wide["reduce-scatter"] / 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "preconditioner", [kfac.SOAP(), kfac.EKFAC("bfloat16"), kfac.Cholesky()], ids=["SOAP", "EKFAC", "Cholesky"]
)
@pytest.mark.parametrize("devices", [3, 64])
def test_its_memory_is_that_of_the_state(preconditioner, devices):
    """To the byte, but for a few numbers of each block: of groups dealt out, end to end, by rows and on all devices."""
    loss, params, batch, find = gpt(4)
    layers = kfac.find_layers(loss, params, batch, **find)
    tx = kfac.kfac(0.1, layers, preconditioner=preconditioner, adaptive_layer_rates=False)
    mesh = AbstractMesh((devices,), ("d",), axis_types=(AxisType.Auto,))
    specs = kfac.state.state_specs(tx, params, "d")
    init = jax.shard_map(tx.init, mesh=mesh, in_specs=PartitionSpec(), out_specs=specs)
    state = state_of(jax.eval_shape(init, params))

    def size(tree):
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))

    few = [(own.blocks.weight, own.blocks.condition, own.blocks.inverted) for own in state.owned.values()]
    everywhere = [(block.factors, block.preconditioner, block.momentum_state) for block in state.shared.values()]
    held = (size((state.owned, state.flat_state)) - size(few)) // devices + size((everywhere, state.bases))
    assert kfac.planning.Assignment(layers, devices=devices, preconditioner=preconditioner).memory_per_device == held


@pytest.mark.slow
def test_a_run_on_thousands_of_devices_is_planned_in_no_time(resnet50):
    began = time.process_time()
    text = str(kfac.planning.plan(resnet50, devices=4096, batch=131072, overhead=0.9))
    assert time.process_time() - began < 2
    for word in (
        "ASSUMED",
        "predicted",
        "critical path",
        "3_0b/kernel",
        "max_factor_dim",
        "memory of a device",
        "all-to-all",
    ):
        assert word in text


@pytest.mark.slow
def test_the_intervals_are_the_shortest_that_keep_to_the_overhead(resnet50):
    for overhead in (0.3, 0.5, 1.0):
        plan = kfac.planning.plan(resnet50, devices=64, batch=8192, overhead=overhead)
        assert plan.extra_seconds <= overhead * plan.first_order_seconds * (1 + 1e-9)
        closer = dataclasses.replace(
            plan, inverse_update_period=plan.inverse_update_period - max(1, plan.inverse_update_period // 40),
            statistics_period=plan.statistics_period - max(1, plan.statistics_period // 40),
        )  # fmt: skip
        assert closer.statistics_period == 0 or closer.extra_seconds > overhead * plan.first_order_seconds
    given = kfac.planning.plan(
        resnet50, devices=64, batch=8192, overhead=0.5, inverse_update_period=50, statistics_period=5
    )
    assert (given.inverse_update_period, given.statistics_period) == (50, 5)
    assert kfac.planning.plan(
        resnet50, devices=64, batch=8192, overhead=0.5, inverse_update_period=5000
    ).statistics_period
    none = kfac.planning.plan(resnet50, devices=1024, batch=131072, overhead=0.01)
    assert none.inverse_update_period is None and "no intervals keep to 1.0%" in str(none)


@pytest.mark.slow
def test_hardware_and_its_rates(resnet50):
    slow, fast = (kfac.planning.plan(resnet50, devices=8, batch=256, bandwidth=rate) for rate in (1e9, 1e12))
    assert slow.seconds["gradients"] == pytest.approx(1000 * fast.seconds["gradients"])
    other = kfac.planning.plan(resnet50, devices=8, batch=256, hardware="tpu-v5p")
    assert other.seconds["model"] != fast.seconds["model"]
    own = kfac.planning.plan(resnet50, devices=8, batch=256, hardware=kfac.planning.Hardware(1e12, 1e11, 1e10))
    assert own.seconds["model"] == own.flops["model"] / 1e12
    # 4.1 GMACs for an image of 224 x 224, two FLOPs each, three times; and of the convolutions' strides another place.
    assert own.flops["model"] / 32 == pytest.approx(6 * 4.1e9, rel=0.05)
    assert not kfac.planning.plan(resnet50, devices=1, batch=256).messages["statistics"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"hardware": "abacus"}, "hardware must be one of 'h100', 'tpu-v5p' or a Hardware, but is 'abacus'"),
        ({"batch": 0}, "batch must be a positive int, but is 0"),
        ({"overhead": -1}, "overhead must lie in"),
        ({"bandwidth": 0}, "bandwidth must lie in"),
        ({"inverse_update_period": 0}, "inverse_update_period must be an integer, at least 1, but is 0"),
        ({"devices": 0}, "devices must be a positive int, but is 0"),
    ],
)
def test_wrong_arguments_are_named(resnet50, options, words):
    with pytest.raises(ValueError, match=words):
        kfac.planning.plan(resnet50, **{"devices": 8, "batch": 256, **options})
    with pytest.raises(TypeError, match="plan has no argument 'speed'; rates of hardware are bandwidth, flops"):
        kfac.planning.plan(resnet50, devices=8, batch=256, speed=1)


def test_layers_without_positions_are_refused(resnet50):
    blocks = tuple(dataclasses.replace(layer, positions=None) for layer in resnet50)
    with pytest.raises(ValueError, match="layers: '0_0a/kernel' was found without positions"):
        kfac.planning.plan(dataclasses.replace(resnet50, blocks=blocks), devices=8, batch=256)


@pytest.mark.slow
def test_eigendecompositions_cost_more(resnet50):
    cholesky, eigh = (
        kfac.planning.plan(resnet50, devices=8, batch=256, preconditioner=i) for i in (kfac.Cholesky(), kfac.Eigh())
    )
    assert eigh.flops["inversions"] > 2 * cholesky.flops["inversions"]
    ekfac = kfac.planning.plan(resnet50, devices=8, batch=256, preconditioner=kfac.EKFAC())
    assert ekfac.messages["inverses"] and not eigh.messages["inverses"]
    assert jax.tree.leaves(ekfac.seconds)


def perceptron(examples, width):
    def loss(p, x):
        return jnp.mean((jnp.tanh(x @ p["w0"]) @ p["w1"]) ** 2)

    params = {"w0": jnp.ones((width, width)), "w1": jnp.ones((width, 4))}
    return loss, params, jnp.linspace(-1, 1, examples * width).reshape(examples, width)


def train(loss, layers, params, x, steps, **options):
    """Parameters and state after so many steps, and the age of the inverse in each."""
    tx = kfac.kfac(0.05, layers, **options)

    def step(carry, _):
        at, state = carry
        _, grads, factors = kfac.value_and_grad(loss, layers)(at, x)
        state = kfac.observe(state, factors)
        updates, state = tx.update(grads, state, at)
        return (jax.tree.map(jnp.add, at, updates), state), kfac.diagnostics(state)["inverse_age"]

    return jax.jit(lambda p: jax.lax.scan(step, (p, tx.init(p)), length=steps))(params)


def interval(loss, layers, params, x, **options):
    """Steps from refresh to refresh, once it no longer grows; the longest that there is has 16."""
    return 1 + np.max(train(loss, layers, params, x, 97, **options)[1])


# 3 products of 2 n d (d + 4) FLOPs each. Statistics of every k-th example take 2 n (3 d^2 + 4^2) / k, and two products,
# for these examples; the refreshes take 3 f (3 d^3 + 4^3).
@pytest.mark.slow
@pytest.mark.parametrize(
    ("examples", "width", "preconditioner", "overhead", "every"),
    [
        (2000, 16, None, 0.1, 5),
        (2000, 16, None, 1, 1),
        (32, 16, None, 1, 5),
        (32, 16, kfac.Cholesky(), 1, 4),
        (1, 64, None, 0.1, 16),
    ],
)
def test_statistics_and_refreshes_take_a_share_of_the_work_of_gradients(
    examples, width, preconditioner, overhead, every
):
    loss, params, x = perceptron(examples, width)
    layers = kfac.find_layers(loss, params, x)
    kind = preconditioner or kfac.SOAP()
    gradients, share = 6 * examples * width * (width + 4), 4 if preconditioner is None and examples >= 64 else 1
    seldom = (2 * examples * (3 * width**2 + 4**2) + gradients * 2 / 3) / share
    seldom += 3 * kind.flops * (3 * width**3 + 4**3)
    ratio = seldom / gradients / overhead
    assert (
        interval(loss, layers, params, x, preconditioner=preconditioner, overhead=overhead)
        == every
        == min(16, math.ceil(ratio))
    )

    def final(**options):
        return train(
            loss, layers, params, x, 16, **{"preconditioner": preconditioner, "overhead": overhead, **options}
        )[0]

    at_once = kfac.Distribution()
    jax.tree.map(np.testing.assert_array_equal, final(), final(inverse_update_period=every, distribution=at_once))
    if every in (4, 5):  # it matters after the ten steps of the warm-up
        assert not np.array_equal(final()[0]["w0"], final(inverse_update_period=1)[0]["w0"])
        # Here nothing holds the length of a stale step.
        settings = {"step_norm": None, "preconditioner": kfac.Cholesky(), "overhead": 0.1}
        jax.tree.map(np.testing.assert_array_equal, final(**settings), final(inverse_update_period=1, **settings))


@pytest.mark.slow
def test_without_a_number_of_examples_every_step_refreshes():
    loss, params, x = perceptron(1, 64)
    layers = kfac.find_layers(loss, params, x)
    assert repr(layers).endswith("found with 1 example(s) in argument 1")
    with pytest.raises(ValueError, match="inverse_update_period must be an integer, at least 1, but is 'often'"):
        kfac.kfac(0.1, layers, inverse_update_period="often")
    for other in (kfac.scale_by_kfac, functools.partial(kfac.presets.osawa2019, 0.1)):
        with pytest.raises(ValueError, match=r"but is 'auto'; kfac\.kfac takes 'auto', too"):
            other(layers, inverse_update_period="auto")
    assert interval(loss, dataclasses.replace(layers, num_examples=None), params, x, overhead=0.1) == 1


def test_the_inverse_of_a_plan_is_that_of_the_optimizer_by_default(resnet50):
    loss, params, x = perceptron(64, 16)
    layers = kfac.find_layers(loss, params, x)
    settings = {"devices": 4, "batch": 64}
    assert repr(kfac.planning.plan(layers, **settings)) == repr(
        kfac.planning.plan(layers, preconditioner=kfac.SOAP(), **settings)
    )
    assert kfac.planning.Assignment(resnet50).kind == kfac.planning.Assignment(layers).kind == kfac.SOAP()


def llama(n):
    """The shapes of Llama-2-7B, one token: what a device holds does not depend on the number of these."""
    d, wide, depth, words = 4096, 11008, 32, 32000
    squares = {name: (depth, d, d) for name in "qkvo"}
    shapes = squares | {"gate": (depth, d, wide), "up": (depth, d, wide), "down": (depth, wide, d)}

    def block(h, q):
        h = h + jnp.tanh((h @ q["q"]) * (h @ q["k"]) * (h @ q["v"])) @ q["o"]
        return h + (jax.nn.silu(h @ q["gate"]) * (h @ q["up"])) @ q["down"], None

    def loss(p, x):
        h, _ = jax.lax.scan(block, p["words"][x], p["blocks"])
        return jnp.mean(jnp.sum((h @ p["head"]) ** 2, -1))

    params = messages.floats({"blocks": shapes, "words": (words, d), "head": (d, words)})
    return loss, params, jax.ShapeDtypeStruct((n, 1), jnp.int32)


def test_seven_billion_parameters_fit_where_they_are_split():
    layers = kfac.find_layers(*llama(2), max_factor_dim=8192)
    assert layers["head"].diagonal == ("G",) and layers["blocks/up"].num_blocks == (1, 2)
    whole, split = (kfac.planning.plan(layers, devices=64, batch=64, gradients=way) for way in ("averaged", "split"))
    print(whole, split, sep="\n")
    assert split.fits and not whole.fits
    first = str(whole).splitlines()[0]
    assert first.startswith("DOES NOT FIT: ") and "80.0 GB" in first and "gradients='split' here" in first
    assert "DOES NOT FIT" not in str(split)
    assert whole.memory["parameters"] == 4 * sum(layer.num_params for layer in layers) > 26e9
    assert split.memory["parameters"] * 64 == whole.memory["parameters"]
