"""Measure the time and peak memory of a complete K-FAC step for ResNet-50 at a global batch of 131,072 images.

    python examples/benchmarks/large_batch_step.py                                  # 32 x 32 images, as on a CPU
    python examples/benchmarks/large_batch_step.py --image-size 224 --dtype bfloat16 --local-batch 256   # on a GPU

`kfac.microbatch` scans over parts with `--local-batch` images and accumulates the results. The images are synthetic and
made on the device inside the scan, so memory does not depend on the number of parts. The step is complete: gradients
and factors averaged over all parts, running averages, all inverses, preconditioning, momentum and parameters. The
script prints a line of JSON.
"""

import argparse
import functools
import json
import resource
import sys
import time

import environment  # noqa: F401, isort: skip; before JAX is imported

import jax
import jax.numpy as jnp
import optax

import kfac
import models

CLASSES = 1000


def main():
    """Run the step and print its time and memory."""
    options = parse()
    parts = options.global_batch // options.local_batch
    model = models.create("resnet50", CLASSES, options.dtype)
    shape = (options.local_batch, options.image_size, options.image_size, 3)
    variables = jax.jit(functools.partial(model.init, train=False))(jax.random.key(0), jnp.zeros((1, *shape[1:])))
    params, statistics = variables["params"], variables["batch_stats"]

    def loss_fn(params, keys):
        image_key, label_key = jax.random.split(keys[0])
        images = jax.random.normal(image_key, shape, jnp.float32)
        labels = jax.random.randint(label_key, shape[:1], 0, CLASSES)
        logits, _ = model.apply(
            {"params": params, "batch_stats": statistics}, images, train=True, mutable=["batch_stats"]
        )
        return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()

    keys = jax.random.split(jax.random.key(1), parts)
    layers = kfac.find_layers(loss_fn, params, keys[:1])
    tx = kfac.natural_gradient(0.07, layers)
    state = jax.jit(tx.init)(params)
    measure = kfac.microbatch(kfac.value_and_grad(loss_fn, layers, num_examples=options.local_batch), parts)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, keys):
        loss, grads, factors = measure(params, keys)
        updates, state = tx.update(grads, kfac.observe(state, factors), params)
        return optax.apply_updates(params, updates), state, loss

    began = time.perf_counter()
    compiled = step.lower(params, state, keys).compile()
    compile_seconds = time.perf_counter() - began
    memory = compiled.memory_analysis()
    print(f"compiled in {compile_seconds:.0f} s; {parts} parts of {options.local_batch}", file=sys.stderr, flush=True)
    began = time.perf_counter()
    params, state, loss = jax.block_until_ready(compiled(params, state, keys))
    seconds = time.perf_counter() - began
    device = jax.devices()[0]
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
    print(
        json.dumps(
            {
                "device": device.device_kind,
                "jax": jax.__version__,
                "global_batch": options.global_batch,
                "local_batch": options.local_batch,
                "image_size": options.image_size,
                "dtype": options.dtype,
                "compile_seconds": round(compile_seconds, 1),
                "step_seconds": round(seconds, 2),
                "images_per_second": round(options.global_batch / seconds, 1),
                "peak_device_bytes": peak,
                "peak_process_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                "temporary_bytes_of_the_program": memory.temp_size_in_bytes if memory else None,
                "argument_bytes_of_the_program": memory.argument_size_in_bytes if memory else None,
                "loss": float(loss),
                "diagnostics": {name: float(value) for name, value in kfac.diagnostics(state).items()},
                "parameters_finite": all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(params)),
            }
        )
    )


def parse() -> argparse.Namespace:
    """Return the command-line options."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--global-batch", type=int, default=131_072, help="images in the step")
    parser.add_argument("--local-batch", type=int, default=256, help="images in one part")
    parser.add_argument("--image-size", type=int, default=32, help="height and width in pixels")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="dtype of the computation")
    options = parser.parse_args()
    if min(options.global_batch, options.local_batch, options.image_size) < 1:
        parser.error("--global-batch, --local-batch and --image-size must be positive")
    if options.global_batch % options.local_batch:
        parser.error(f"--local-batch {options.local_batch} does not divide --global-batch {options.global_batch}")
    return options


if __name__ == "__main__":
    main()
