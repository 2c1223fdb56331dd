"""Test the messages between devices, counted from compiled programs.

A test uses internals: thresholds below which patches are small.
"""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import kfac
import messages
from kfac._statistics import convolution, moments

DEVICES = 4


def convolutions(n):
    """Return a loss over convolutions with three strides. One convolution gets its statistics by offsets."""

    def conv(x, w, s):
        return jnp.tanh(lax.conv_general_dilated(x, w, (s, s), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))

    def loss(p, b):
        x = conv(conv(conv(b["x"], p["c1"], 2), p["c2"], 1), p["c3"], 3)
        x = (x - x.mean((1, 2), keepdims=True)) * p["scale"] + p["shift"]
        z = x.mean((1, 2)) @ p["out"]
        return -jnp.mean(jnp.sum(b["y"] * jax.nn.log_softmax(z), axis=-1))

    shapes = {"c1": (3, 3, 4, 16), "c2": (3, 3, 16, 16), "c3": (3, 3, 16, 8), "scale": (8,), "shift": (8,)}
    shapes = messages.floats({**shapes, "out": (8, 5)})
    return loss, shapes, messages.floats({"x": (n, 12, 12, 4), "y": (n, 5)}), {}


CASES = {
    "convolutions": convolutions,
    "attention": functools.partial(messages.gpt, size=8, layers=2, d=16, words=24, heads=2),
}


# With moments, the program has the factors, too.
# By default, each model and each kind of axis occurs once.
@pytest.mark.parametrize(
    ("name", "kind", "moments_too"),
    [
        pytest.param(name, kind, moments, marks=() if moments and usual else pytest.mark.slow)
        for k, name in enumerate(CASES)
        for j, kind in enumerate((AxisType.Auto, AxisType.Explicit))
        for moments, usual in ((False, False), (True, (j + k) % 2 == 0))
    ],
)
def test_no_activation_leaves_its_device(name, kind, moments_too, monkeypatch):
    """Check that statistics over a mesh send only sums, each once, even if parts of the batch are taken in a loop."""
    for module in (convolution, moments):
        monkeypatch.setattr(module, "PATCH_ELEMENTS", 1 << 12)
    loss, params, batch, find = CASES[name](8 * DEVICES)
    layers = kfac.find_layers(loss, params, batch, **find)
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(kind,), devices=jax.devices()[:DEVICES])

    def measure(params, batch, basis):
        return kfac.value_and_grad(loss, layers)(params, batch, **({"basis": basis} if moments_too else {}))

    state = jax.eval_shape(kfac.kfac(0.1, layers, preconditioner=kfac.EKFAC()).init, params)
    basis = jax.eval_shape(lambda state: kfac.curvature.eigenbasis(state, layers), state)
    place = [NamedSharding(mesh, spec) for spec in (P(), P("data"), P())]
    with jax.set_mesh(mesh):
        arguments = [messages.abstract(tree, where) for tree, where in zip((params, batch, basis), place, strict=True)]
        lowered = jax.jit(measure).lower(*arguments)
        results = lowered.out_info
        sent = messages.by_kind(messages.messages(lowered.compile().as_text(), DEVICES))
    assert set(sent) == {"all-reduce", "reduce-scatter", "sent"}
    # The sums include numerators and normalisers of softmax and norms over the batch, and sums of rows.
    assert sent["sent"] < 1.25 * sum(4 * np.prod(leaf.shape) for leaf in jax.tree.leaves(results))


@pytest.mark.slow
@pytest.mark.parametrize("scanned", [False, True])
def test_no_device_holds_the_sums_of_all_layers(scanned):
    """Check that temporary memory hardly grows with depth over a mesh.

    A layer's sums are sent before the next layer's sums are formed.
    """
    d, mesh = 256, jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:DEVICES])

    def loss(p, x):
        def layer(x, w):
            return messages.by_examples(jnp.tanh(x @ w)), None

        if scanned:
            x, _ = lax.scan(layer, x, p)
        else:
            for k in range(len(p)):
                x, _ = layer(x, p[k])
        return jnp.mean(jnp.sum(x**2, -1))

    def temporary(depth, statistics):
        shape = (depth, d, d) if scanned else (d, d)
        lies = NamedSharding(mesh, P(*(len(shape) - 1) * [None], "data"))
        leaf = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=lies)
        params = leaf if scanned else depth * [leaf]
        batch = jax.ShapeDtypeStruct((16, d), jnp.float32, sharding=NamedSharding(mesh, P("data")))
        layers = kfac.find_layers(loss, params, batch)

        def step(params, batch):
            grads, factors = jax.grad(loss)(params, batch), None
            if statistics:
                _, grads, factors = kfac.value_and_grad(loss, layers)(params, batch)
            return jax.tree.map(lambda g: lax.with_sharding_constraint(g, lies), grads), factors

        with jax.set_mesh(mesh):
            return jax.jit(step).lower(params, batch).compile().memory_analysis().temp_size_in_bytes

    grown = [temporary(12, statistics) - temporary(4, statistics) for statistics in (False, True)]
    sums = 8 * 2 * 4 * d * d  # eight layers with `A` and `G`
    assert grown[1] - grown[0] < 0.1 * sums, (grown, sums)


def test_observe_sends_pieces_of_stacked_kernels_to_their_owners_only():
    """Check that no device receives the statistics of all blocks, if blocks are copies times pieces."""
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:DEVICES])
    # Neither the copies nor the pieces alone are as many as the devices.
    copies, d = 2, 64

    def loss(params, x):
        def layer(x, w):
            return x + jnp.tanh(x @ w)[:, :d], None

        x, _ = lax.scan(layer, x, params)
        return jnp.mean(jnp.sum(x**2, -1))

    params = jax.ShapeDtypeStruct((copies, d, 2 * d), jnp.float32, sharding=NamedSharding(mesh, P(None, None, "data")))
    batch = jax.ShapeDtypeStruct((16, d), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    with jax.set_mesh(mesh):
        layers = kfac.find_layers(loss, params, batch, max_factor_dim=d)
        tx = kfac.kfac(0.1, layers)
        state = messages.abstract(jax.eval_shape(tx.init, params), kfac.state.shardings(tx, params))

        def observe(state, params, batch):
            return kfac.observe(state, kfac.statistics(loss, layers, fraction=1)(params, batch))

        program = jax.jit(observe).lower(state, params, batch).compile().as_text()
    assert layers[0].num_blocks == (1, 2)
    gathered = [sent for kind, sent, _, _ in messages.messages(program, DEVICES) if kind == "all-gather"]
    # A kernel is gathered for the forward pass.
    assert max(gathered) == 4 * d * 2 * d, gathered


@pytest.mark.slow
@pytest.mark.parametrize("style", ["shard_map", "mesh"])
@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
def test_statistics_are_sent_in_the_dtype_that_was_said(style, wire):
    """Check that the same option sets the dtype of Kronecker factors under shard_map and over a mesh."""
    loss, params, batch, find = CASES["attention"](8 * DEVICES)
    layers = kfac.find_layers(loss, params, batch, **find)
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:DEVICES])
    distribution = kfac.Distribution(communication_dtype=wire)
    tx = kfac.scale_by_kfac(layers, distribution=distribution)
    measure = kfac.value_and_grad(loss, layers, distribution=distribution)

    def step(params, batch):
        _, grads, factors = measure(params, batch)
        grads = lax.pmean(grads, "data") if style == "shard_map" else grads
        return tx.update(grads, kfac.observe(tx.init(params), factors))[0]

    if style == "shard_map":
        step = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    with jax.set_mesh(mesh):
        place = [NamedSharding(mesh, spec) for spec in (P(), P("data"))]
        arguments = [messages.abstract(tree, where) for tree, where in zip((params, batch), place, strict=True)]
        text = jax.jit(step).lower(*arguments).as_text()
    found = re.findall(r"reduce_scatter.*?: \(tensor<([\dx]*)x(\w+)>\)", text, flags=re.DOTALL)
    sizes = [(math.prod(map(int, shape.split("x"))), dtype) for shape, dtype in found]
    # Under shard_map, the statistics of norms have a small message of their own, which stays in float32.
    least = max(sizes)[0] / 20 if style == "shard_map" else 0
    assert {dtype for size, dtype in sizes if size > least} == {"bf16" if wire == "bfloat16" else "f32"}


@pytest.mark.slow
def test_most_of_the_backward_pass_goes_on_beside_the_first_message_of_statistics():
    """Count the FLOPs of products that do not wait for this message, in the jaxpr of a ResNet-50 training step."""
    loss, params, batch, _ = messages.resnet50(DEVICES, size=64)
    layers = kfac.find_layers(loss, params, batch)
    tx = kfac.scale_by_kfac(layers, inverse_update_period=10, distribution=kfac.Distribution("data"))
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:DEVICES])
    specs = kfac.state.state_specs(tx, params, "data")
    init = jax.shard_map(tx.init, mesh=mesh, in_specs=P(), out_specs=specs)

    def local(params, state, batch):
        _, grads, factors = kfac.value_and_grad(loss, layers)(params, batch)
        grads = jax.tree.map(lambda g: lax.pmean(g, "data"), grads)
        state = kfac.observe(state, factors)
        return tx.update(grads, state, params)

    fn = jax.shard_map(local, mesh=mesh, in_specs=(P(), specs, P("data")), out_specs=(P(), specs))
    jaxpr = jax.make_jaxpr(fn)(params, jax.eval_shape(init, params), batch)
    [mapped] = [eqn for eqn in jaxpr.eqns if "jaxpr" in eqn.params and eqn.primitive.name == "shard_map"]
    share = messages.independent_of_first(mapped.params["jaxpr"], "reduce_scatter")
    print(f"{share:.0%} of the FLOPs of the backward pass")
    assert share >= 0.5, share


def test_messages_in_loops_count_as_often_as_they_are_sent():
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:DEVICES])

    def local(x):
        total, _ = lax.scan(lambda total, row: (total + lax.psum(row, "data"), None), jnp.zeros(3), x)
        return total, lax.all_gather(x, "data", to="invarying"), lax.psum_scatter(jnp.arange(8.0), "data", tiled=True)

    fn = jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=(P(), P(), P("data")))
    text = jax.jit(fn).lower(jnp.ones((5 * DEVICES, 3))).compile().as_text()
    found = messages.by_kind(messages.messages(text, DEVICES))
    assert found["all-reduce"] == 5 * 3 * 4 and found["reduce-scatter"] == 8 * 4
    assert found["sent"] == 60 + (found.get("all-gather", 0) + 32) / 2


@pytest.mark.parametrize(
    ("written", "groups"),
    [
        ("{{0,1},{2,3}}", {(0, 1), (2, 3)}),
        ("{{0,2,1,3}}", {(0, 1, 2, 3)}),
        ("[2,2]<=[4]", {(0, 1), (2, 3)}),
        ("[2,2]<=[2,2]T(1,0)", {(0, 2), (1, 3)}),
        ("mesh['node'=2,'gpu'=2] {'gpu'}", {(0, 1), (2, 3)}),
        ("mesh['node'=2,'gpu'=2] {'node'}", {(0, 2), (1, 3)}),
        ("mesh['node'=2,'gpu'=2] {'gpu','node'}", {(0, 1, 2, 3)}),
    ],
)
def test_groups_of_devices_are_read_in_each_form_of_xla(written, groups):
    line = f"  %sum.1 = f32[6]{{0}} all-reduce(%x), channel_id=1, replica_groups={written}, to_apply=%add"
    assert messages.device_groups(line) == {"all-reduce": {frozenset(groups)}}


def test_groups_of_devices_in_another_form_are_refused():
    with pytest.raises(ValueError, match="groups in an unknown form: nodes"):
        messages.device_groups("  %sum.1 = f32[6]{0} all-reduce-start(%x), replica_groups=nodes{2}, to_apply=%add")
