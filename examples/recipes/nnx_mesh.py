"""Train an nnx network whose parameters are split over devices (FSDP), and resume on another number of devices.

    python examples/recipes/nnx_mesh.py --devices 4 --steps 40      # stops after 40 of 80 steps, with a checkpoint
    python examples/recipes/nnx_mesh.py --devices 2                 # resumes at step 40

The devices are simulated on a CPU. On GPUs, leave out `jax_num_cpu_devices`. The network reads handwritten digits.
"""

import argparse
from pathlib import Path

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from sklearn.datasets import load_digits

import kfac


class Network(nnx.Module):
    def __init__(self, rngs):
        # Each device holds some rows of every kernel. nnx puts them there, because a mesh is set.
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("devices", None))
        self.first = nnx.Linear(64, 128, kernel_init=init, rngs=rngs)
        self.norm = nnx.LayerNorm(128, rngs=rngs)
        self.second = nnx.Linear(128, 128, kernel_init=init, rngs=rngs)
        self.third = nnx.Linear(128, 10, kernel_init=init, rngs=rngs)

    def __call__(self, x):
        x = self.norm(nnx.tanh(self.first(x)))
        return self.third(nnx.tanh(self.second(x)))


def main(devices, steps, folder):
    mesh = jax.make_mesh((devices,), ("devices",), axis_types=(AxisType.Auto,))
    jax.set_mesh(mesh)
    replicated, split = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("devices",)))
    graph, params = nnx.split(Network(nnx.Rngs(0)), nnx.Param)
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)

    def loss_fn(params, batch):
        logits = nnx.merge(graph, params)(batch[0])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

    def batch_of(number):
        rows = np.random.default_rng(number).choice(1536, 256, replace=False)
        return jax.device_put((images[rows], labels[rows]), split)

    step = kfac.train_step(loss_fn, kfac.schedules.warmup_linear_decay(0.1, 80))
    opt_state = step.init(params, batch_of(0))
    gather, start = jax.jit(kfac.state.gather_state, out_shardings=replicated), 0
    with ocp.StandardCheckpointer() as checkpointer:
        if folder.exists():
            # The checkpoint holds the state of a single device. Distribute it like the new state.
            target = {"params": params, "opt_state": jax.eval_shape(gather, opt_state), "step": 0}
            saved = checkpointer.restore(folder.absolute(), target)
            shardings = jax.tree.map(lambda leaf: leaf.sharding, opt_state)
            scatter = jax.jit(lambda state: kfac.state.scatter_state(state, devices), out_shardings=shardings)
            params, opt_state, start = saved["params"], scatter(saved["opt_state"]), saved["step"]
        for number in range(start, steps):
            params, opt_state, loss = step(params, opt_state, batch_of(number))
            loss.block_until_ready()  # several devices on one CPU would otherwise wait for each other
            if number % 10 == 9:
                print(f"step {number + 1}  loss {loss:.4f}  {devices} devices")
        saved = {"params": params, "opt_state": gather(opt_state), "step": steps}
        checkpointer.save(folder.absolute(), saved, force=True)
    kernel = params["second"]["kernel"][...]
    print(f"a device holds {kernel.addressable_shards[0].data.shape} of the kernel {kernel.shape}")
    accuracy = (nnx.merge(graph, params)(images[1536:]).argmax(-1) == labels[1536:]).mean()
    print(f"accuracy {accuracy:.1%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--steps", type=int, default=80, help="the step to stop at")
    parser.add_argument("--folder", type=Path, default=Path("runs/nnx_mesh"))
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", args.devices)
    main(args.devices, args.steps, args.folder)
