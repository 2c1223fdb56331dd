"""Plan and compile K-FAC for Llama-2-7B and ViT-g, models too large for a single device.

    python examples/benchmarks/large_models.py llama --devices 64
    python examples/benchmarks/large_models.py llama --devices 64 --compile sgd step observe

The script computes nothing and makes no parameters. Only shapes go through `find_layers` and `estimate`, and with
`--compile` through XLA for simulated CPUs. Parameters are sharded as in FSDP. Layers are stacked under `scan` and
rematerialised.

With `--compile`, the script prints the memory per device, for arguments (parameters, momentum, averages, inverses) and
for temporaries. The programs are SGD's step (`sgd`), K-FAC's step (`step`), and statistics with a refresh
(`observe`). XLA keeps more temporary copies on CPUs than on GPUs.
"""

import argparse
import os

if __name__ == "__main__":
    PARSER = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    PARSER.add_argument("model", choices=["llama", "vit"])
    PARSER.add_argument("--devices", type=int, default=64)
    PARSER.add_argument(
        "--examples", type=int, default=4, help="examples per device; observe takes a quarter of them, at least one"
    )
    PARSER.add_argument("--depth", type=int, help="number of layers: the whole model's")
    PARSER.add_argument("--max-factor-dim", type=int, default=8192, help="passed to find_layers")
    PARSER.add_argument("--compile", nargs="+", choices=["sgd", "step", "observe"], default=[])
    OPTIONS = PARSER.parse_args()
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={OPTIONS.devices}"
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import kfac

# Width, MLP width, layers, heads, words or classes, positions.
SIZES = {"llama": (4096, 11008, 32, 32, 32000, 2048), "vit": (1408, 6144, 40, 16, 1000, 256)}


def model(name, depth=None):
    """Return the loss function, the parameters' shapes, and a batch's shapes for a single example."""
    d, wide, layers, heads, outputs, positions = SIZES[name]
    layers, words = depth or layers, name == "llama"
    blocks: dict[str, tuple[int, ...]] = {key: (layers, d, d) for key in "qkvo"} | {
        "up": (layers, d, wide),
        "down": (layers, wide, d),
    }
    blocks |= {"gate": (layers, d, wide)} if words else {}
    blocks |= {"first": (layers, d), "second": (layers, d)}
    shapes = {"blocks": blocks, "in": (outputs, d) if words else (3 * 14 * 14, d), "last": (d,), "out": (d, outputs)}

    def norm(x, scale):
        return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale

    def spread(x):
        return lax.with_sharding_constraint(x, PartitionSpec("data")) if jax.sharding.get_abstract_mesh().shape else x

    @jax.checkpoint
    def block(h, p):
        x = norm(h, p["first"])
        query, key, value = ((x @ p[n]).reshape(*x.shape[:2], heads, -1) for n in "qkv")
        h = h + jax.nn.dot_product_attention(query, key, value, is_causal=words).reshape(x.shape) @ p["o"]
        x = norm(h, p["second"])
        up = jax.nn.silu(x @ p["gate"]) * (x @ p["up"]) if words else jax.nn.gelu(x @ p["up"])
        return spread(h + up @ p["down"]), None

    def loss(p, batch):
        h = spread(p["in"][batch["x"]] if words else batch["x"] @ p["in"])
        h, _ = lax.scan(block, h, p["blocks"])
        h = norm(h, p["last"]) if words else norm(h, p["last"]).mean(1)
        return optax.softmax_cross_entropy_with_integer_labels(h @ p["out"], batch["y"]).mean()

    params = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), shapes, is_leaf=lambda x: isinstance(x, tuple)
    )
    tokens = jax.ShapeDtypeStruct((1, positions), jnp.int32)
    patches = jax.ShapeDtypeStruct((1, positions, 3 * 14 * 14), jnp.float32)
    batch = {"x": tokens, "y": tokens} if words else {"x": patches, "y": jax.ShapeDtypeStruct((1,), jnp.int32)}
    return loss, params, batch


def of_examples(batch, n):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((n, *x.shape[1:]), x.dtype), batch)


def compiled(loss, shapes, batch, which):
    """Compile the program `which` ("sgd", "step" or "observe"); return its memory analysis."""
    devices = OPTIONS.devices
    mesh = jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,))

    def split(leaf):
        axis = next((k for k in reversed(range(len(leaf.shape))) if leaf.shape[k] % devices == 0), None)
        return NamedSharding(mesh, PartitionSpec(*("data" if k == axis else None for k in range(len(leaf.shape)))))

    def placed(tree, shardings):
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)

    with jax.set_mesh(mesh):
        params = placed(shapes, jax.tree.map(split, shapes))
        batch = placed(batch, jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec("data")), batch))
        if which == "sgd":
            tx = optax.sgd(0.1, 0.9)
            state = jax.eval_shape(tx.init, params)
            # The momentum is split like the parameters.
            shardings = jax.tree.map(split, state)
        else:
            layers = kfac.find_layers(loss, params, batch, max_factor_dim=OPTIONS.max_factor_dim)
            tx = kfac.kfac(0.1, layers)
            state = jax.eval_shape(tx.init, params)
            shardings = kfac.state.shardings(tx, params)

        def step(params, state, batch):
            value, grads = jax.value_and_grad(loss)(params, batch)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, value

        def observe(params, state, batch):
            return kfac.observe(state, kfac.statistics(loss, layers, fraction=1)(params, batch))

        program, donated = (observe, 1) if which == "observe" else (step, (0, 1))
        lowered = jax.jit(program, donate_argnums=donated).lower(params, placed(state, shardings), batch)
        return lowered.compile().memory_analysis()


def main():
    loss, params, batch = model(OPTIONS.model, OPTIONS.depth)
    layers = kfac.find_layers(loss, params, of_examples(batch, 2), max_factor_dim=OPTIONS.max_factor_dim)
    print(f"{OPTIONS.model}, parameters whole:")
    print(kfac.planning.estimate(layers, devices=OPTIONS.devices, batch=OPTIONS.examples * OPTIONS.devices), end="\n\n")
    for which in OPTIONS.compile:
        # Statistics see a quarter of the batch.
        share = -(-OPTIONS.examples // 4) if which == "observe" else OPTIONS.examples
        found = compiled(loss, params, of_examples(batch, share * OPTIONS.devices), which)
        held, temporary = found.argument_size_in_bytes, found.temp_size_in_bytes
        print(f"{which}: arguments {held / 1e9:.2f} GB, temporary {temporary / 1e9:.2f} GB", flush=True)


if __name__ == "__main__":
    main()
