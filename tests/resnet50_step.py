"""Measure ResNet-50's distributed K-FAC step in programs that are lowered and compiled for many devices.

The number of devices is fixed when JAX starts, so this is a script: `resnet50_step.py DEVICES [compile]` prints JSON.
"""

import json
import os
import sys

if __name__ == "__main__":
    DEVICES = int(sys.argv[1])
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import kfac
from messages import by_kind
from messages import messages as messages_of

AXIS = "devices"
# Each stage's width and number of blocks. The optimizer's state depends only on the parameters' shapes.
STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))


def parameters():
    shapes = {"stem": {"kernel": (7, 7, 3, 64)}}
    wide_in = 64
    for stage, (width, blocks) in enumerate(STAGES):
        for block in range(blocks):
            name = f"stage{stage}block{block}"
            shapes[f"{name}a"] = {"kernel": (1, 1, wide_in, width)}
            shapes[f"{name}b"] = {"kernel": (3, 3, width, width)}
            shapes[f"{name}c"] = {"kernel": (1, 1, width, 4 * width)}
            if block == 0:
                shapes[f"{name}d"] = {"kernel": (1, 1, wide_in, 4 * width)}
            wide_in = 4 * width
    shapes["head"] = {"kernel": (wide_in, 1000), "bias": (1000,)}
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, jnp.float32), shapes, is_leaf=lambda s: isinstance(s, tuple))


def convolve(x, layer):
    return lax.conv_general_dilated(x, layer["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def loss_fn(params, images):
    """Return a loss of ResNet-50's layers and connections.

    Normalisation and strides are left out, because they do not affect the shapes of the factors.
    """
    x = convolve(images, params["stem"])
    for stage, (_, blocks) in enumerate(STAGES):
        for block in range(blocks):
            name = f"stage{stage}block{block}"
            y = jnp.tanh(convolve(x, params[f"{name}a"]))
            y = convolve(jnp.tanh(convolve(y, params[f"{name}b"])), params[f"{name}c"])
            x = jnp.tanh(y + (convolve(x, params[f"{name}d"]) if block == 0 else x))
    logits = x.mean((1, 2)) @ params["head"]["kernel"] + params["head"]["bias"]
    return -jnp.mean(jax.nn.log_softmax(logits)[:, 0])


def main():
    params = parameters()
    images = jax.ShapeDtypeStruct((DEVICES, 4, 4, 3), jnp.float32)
    layers = kfac.find_layers(loss_fn, params, images, max_factor_dim=8192)
    tx = kfac.scale_by_kfac(layers, inverse_update_period=10, distribution=kfac.Distribution(AXIS))
    mesh = Mesh(np.array(jax.devices()), (AXIS,), axis_types=(AxisType.Auto,))
    same, split = PartitionSpec(), PartitionSpec(AXIS)
    specs = kfac.state.state_specs(tx, params, AXIS)
    init = jax.jit(jax.shard_map(tx.init, mesh=mesh, in_specs=same, out_specs=specs))
    state = jax.eval_shape(init, params)

    def statistics(params, images):
        _, grads, factors = kfac.value_and_grad(loss_fn, layers)(params, images)
        # Average the gradients in a single message, because the text of every collective lists all devices.
        flat, unravel = ravel_pytree(grads)
        return unravel(lax.pmean(flat, AXIS)), factors

    def local_step(params, state, images):
        grads, factors = statistics(params, images)
        state = kfac.observe(state, factors)
        return tx.update(grads, state, params)

    step = jax.shard_map(local_step, mesh=mesh, in_specs=(same, specs, split), out_specs=(same, specs))
    lowered = jax.jit(step).lower(params, state, images)
    result = {"devices": DEVICES, "text": len(lowered.as_text())}
    if "compile" in sys.argv:
        # Compile the optimizer alone: once with statistics that differ between devices, and once without statistics.
        grads = params
        factors = jax.eval_shape(
            lambda p, x: kfac.value_and_grad(loss_fn, layers)(p, x)[2],
            params,
            jax.ShapeDtypeStruct((1, 4, 4, 3), jnp.float32),
        )
        stacked = jax.tree.map(lambda x: jax.ShapeDtypeStruct((DEVICES, *x.shape), x.dtype), factors)

        def with_statistics(grads, state, factors):
            state = kfac.observe(state, jax.tree.map(lambda x: x[0], factors))
            return tx.update(grads, state)

        def without(grads, state, factors):
            del factors
            return tx.update(grads, state)

        def shardings(tree):
            return jax.tree.map(
                lambda spec: NamedSharding(mesh, spec), tree, is_leaf=lambda s: isinstance(s, PartitionSpec)
            )

        def program(update):
            mapped = jax.shard_map(update, mesh=mesh, in_specs=(same, specs, split), out_specs=(same, specs))
            place = (shardings(same), shardings(specs), shardings(split))
            jitted = jax.jit(mapped, in_shardings=place, donate_argnums=(0, 1))
            return jitted.lower(grads, state, stacked).compile()

        def bytes_of_state(tx):
            specs = kfac.state.state_specs(tx, params, AXIS)
            init = jax.jit(jax.shard_map(tx.init, mesh=mesh, in_specs=same, out_specs=specs))
            place = shardings(specs)
            held = jax.jit(lambda s: s, in_shardings=(place,), out_shardings=place).lower(jax.eval_shape(init, params))
            return held.compile().memory_analysis().argument_size_in_bytes

        result["state_bytes"] = bytes_of_state(tx)
        with_momentum = kfac.natural_gradient(0.1, layers, momentum=0.9, distribution=kfac.Distribution(AXIS))
        result["state_bytes_with_momentum"] = bytes_of_state(with_momentum)
        for name, update in (("", with_statistics), ("_without_statistics", without)):
            compiled = program(update)
            result[f"messages{name}"] = by_kind(messages_of(compiled.as_text(), DEVICES))
            result[f"temporary_bytes{name}"] = compiled.memory_analysis().temp_size_in_bytes
        result["packed_bytes"] = 4 * sum(
            shape[-1] * (shape[-1] + 1) // 2 for layer in layers for shape in layer.factor_shapes.values()
        )
        plan = kfac.planning.estimate(layers, devices=DEVICES, preconditioner=kfac.Cholesky())
        result["predicted_messages"] = plan.messages
        result["predicted_state_bytes"] = plan.memory["state"]
    print(json.dumps(result))


if __name__ == "__main__":
    main()
