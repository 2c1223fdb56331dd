"""What devices send each other, counted from compiled programs."""

import functools

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
    """Of all kinds of strides, whose statistics come from patches, and one by offsets."""

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


@pytest.mark.parametrize("moments_too", [False, True], ids=["factors", "moments"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("name", CASES)
def test_no_activation_leaves_its_device(name, kind, moments_too, monkeypatch):
    """Statistics of a batch over a mesh: nothing is sent but sums, each once, also where parts are taken in a loop."""
    for module in (convolution, moments):
        monkeypatch.setattr(module, "PATCH_ELEMENTS", 1 << 12)
    loss, params, batch, find = CASES[name](8 * DEVICES)
    layers = kfac.find_layers(loss, params, batch, **find)
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(kind,), devices=jax.devices()[:DEVICES])

    def measure(params, batch, basis):
        return kfac.value_and_grad(loss, layers)(params, batch, **({"basis": basis} if moments_too else {}))

    state = jax.eval_shape(kfac.kfac(0.1, layers, inverse=kfac.Ekfac()).init, params)
    basis = jax.eval_shape(lambda state: kfac.eigenbasis(state, layers), state)
    place = [NamedSharding(mesh, spec) for spec in (P(), P("data"), P())]
    with jax.set_mesh(mesh):
        arguments = [messages.abstract(tree, where) for tree, where in zip((params, batch, basis), place, strict=True)]
        lowered = jax.jit(measure).lower(*arguments)
        results = lowered.out_info
        sent = messages.by_kind(messages.messages(lowered.compile().as_text(), DEVICES))
    assert set(sent) == {"all-reduce", "sent"}
    # Numerators and normalisers of softmax and norms over the batch are among them, and sums of rows.
    assert sent["sent"] < 1.25 * sum(4 * np.prod(leaf.shape) for leaf in jax.tree.leaves(results))


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
