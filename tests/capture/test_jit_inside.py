"""Check that taps keep a `jit`'s shardings and a `checkpoint`'s memory savings inside the loss."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import kfac
from checking import normal


def test_shardings_of_a_jit_inside_the_loss_are_kept():
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",), axis_types=(AxisType.Auto,))
    whole = NamedSharding(mesh, PartitionSpec())
    split = NamedSharding(mesh, PartitionSpec("data"))
    layer = jax.jit(lambda x, w: jnp.tanh(x @ w), out_shardings=split)

    def loss(p, x):
        h = layer(x, p["w"])
        jax.debug.inspect_array_sharding(h, callback=seen.append)
        return jnp.mean(jnp.sum((h @ p["v"]) ** 2, -1))

    seen: list = []
    params = {"w": normal(0, 5, 4, dtype=np.float32), "v": normal(1, 4, 2, dtype=np.float32)}
    x = jax.device_put(normal(2, 6, 5, dtype=np.float32), whole)
    layers = kfac.find_layers(loss, params, x)
    jax.jit(kfac.value_and_grad(loss, layers)).lower(params, x).compile()
    assert all(found.is_equivalent_to(split, 2) for found in seen)
    assert seen


def test_scales_of_many_tokens_take_no_memory_for_each():
    """Check that taps add little memory to a scanned normalisation, if the tokens of a marked output are examples."""
    layers_, batch, tokens, width = 4, 8, 32, 64

    def loss(p, x, t):
        @jax.checkpoint
        def block(h, q):
            z = (h - h.mean(-1, keepdims=True)) * q["scale"] + q["shift"]
            return h + jnp.tanh(z @ q["w"]), None

        h, _ = lax.scan(block, x, p["blocks"])
        z = kfac.mark_output(h @ p["out"], "categorical")
        return -jnp.mean(jnp.sum(t * jax.nn.log_softmax(z), -1))

    vectors = jnp.ones((layers_, width))
    params = {
        "blocks": {"scale": vectors, "shift": 0 * vectors, "w": jnp.zeros((layers_, width, width))},
        "out": jnp.zeros((width, 8)),
    }
    x = jax.ShapeDtypeStruct((batch, tokens, width), jnp.float32)
    t = jax.ShapeDtypeStruct((batch, tokens, 8), jnp.float32)
    layers = kfac.find_layers(loss, params, x, t)

    def temporary(fn):
        return jax.jit(fn).lower(params, x, t).compile().memory_analysis().temp_size_in_bytes

    assert temporary(kfac.value_and_grad(loss, layers)) <= 1.2 * temporary(jax.value_and_grad(loss))


def test_no_tracer_of_the_loss_outlives_value_and_grad():
    def loss(p, x):
        value = jnp.mean((x @ p["w"]) ** 2)
        return value, {"twice": 2 * value, "number": 3}

    params, x = {"w": normal(0, 4, 2, dtype=np.float32)}, normal(1, 8, 4, dtype=np.float32)
    with jax.checking_leaks():
        layers = kfac.find_layers(loss, params, x, has_aux=True)
        (_, aux), _, _ = jax.jit(kfac.value_and_grad(loss, layers, has_aux=True))(params, x)
    np.testing.assert_allclose(aux["twice"], 2 * loss(params, x)[0], rtol=1e-6)
