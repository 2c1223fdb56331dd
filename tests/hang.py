"""Train four dense layers on simulated devices in a separate process, to find deadlocks.

    python tests/hang.py --width 256 --devices 2    # one run
    python tests/hang.py --runs 20                  # 20 runs for each width and number of devices; prints a table

If several matrices are inverted as a batch, XLA's threads can wait for each other. On a machine with two cores, the
first command hung in all six runs while several matrices were inverted together. A hung process prints no result.

The second command kills each process that does not finish within `--limit` seconds, and counts it as hung. The
processes share a compilation cache, so only the first process of each cell compiles.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time

LAYERS, STEPS = 4, 20
WIDTHS, DEVICES = (64, 256, 512), (1, 2, 4)
OUTPUT = "failed inversions: 0\n"


def train(width, devices):
    """Train for twenty steps with each preconditioner and print the number of failed inversions.

    Every step inverts all blocks.
    """
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.sharding import NamedSharding, PartitionSpec

    import kfac

    def loss_fn(params, x):
        for k in range(LAYERS):
            x = jnp.tanh(x @ params[f"layer{k}"])
        return jnp.mean(x**2)

    mesh = jax.make_mesh((devices,), ("devices",), axis_types=(jax.sharding.AxisType.Auto,))
    rng = np.random.default_rng(0)
    shape = width, width
    params = {f"layer{k}": jnp.asarray(rng.normal(size=shape) / width**0.5, jnp.float32) for k in range(LAYERS)}
    x = jnp.asarray(rng.normal(size=(64, width)), jnp.float32)
    layers = kfac.find_layers(loss_fn, params, x)
    x = jax.device_put(x, NamedSharding(mesh, PartitionSpec("devices")))
    failed = 0
    for preconditioner in (kfac.Cholesky(), kfac.SOAP()):
        tx = kfac.kfac(
            0.01,
            layers,
            inverse_update_period=1,
            preconditioner=preconditioner,
            distribution=kfac.Distribution(mesh=mesh),
        )

        @jax.jit
        def step(params, state, x, tx=tx):
            _, grads, factors = kfac.value_and_grad(loss_fn, layers)(params, x)
            state = kfac.observe(state, factors)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        at = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
        state = tx.init(at)
        for _ in range(STEPS):
            at, state = step(at, state, x)
        failed += int(kfac.diagnostics(state)["failed_inversions"])
    print("failed inversions:", failed)


def grid(runs, limit):
    """Print the table. Return whether all runs finished without a failure."""
    hung, failed, seconds = ({(w, d): 0 for w in WIDTHS for d in DEVICES} for _ in range(3))
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {
            "JAX_COMPILATION_CACHE_DIR": cache,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        # Run all cells before the next run of a cell, so that each cell is measured at several times.
        for run in range(1, runs + 1):
            for width, devices in hung:
                command = [sys.executable, __file__, "--width", str(width), "--devices", str(devices)]
                begin = time.perf_counter()
                try:
                    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit)
                    failed[width, devices] += result.stdout != OUTPUT
                except subprocess.TimeoutExpired:
                    hung[width, devices] += 1
                seconds[width, devices] = max(seconds[width, devices], time.perf_counter() - begin)
            print(f"{run} of {runs}: {sum(hung.values())} hung, {sum(failed.values())} failed", flush=True)
    print(f"{os.cpu_count()} cores; {runs} processes of {STEPS} steps of both kinds: hung, failed otherwise, longest")
    print("| width | " + " | ".join(f"{d} device{'s' * (d > 1)}" for d in DEVICES) + " |")
    print("|---|" + "---|" * len(DEVICES))
    for width in WIDTHS:
        cells = [f"{hung[width, d]}, {failed[width, d]}, {seconds[width, d]:.0f} s" for d in DEVICES]
        print(f"| {width} | " + " | ".join(cells) + " |")
    return not any(hung.values()) and not any(failed.values())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--runs", type=int, default=0, help="processes for each width and number of devices")
    parser.add_argument("--limit", type=float, default=180, help="seconds for each")
    options = parser.parse_args()
    if options.runs:
        sys.exit(0 if grid(options.runs, options.limit) else 1)
    train(options.width, options.devices)
