"""Export a training step with `jax.export`, and train from the file in a process that knows neither kfac nor the loss.

    pip install flatbuffers
    python examples/recipes/export_step.py save      # needs kfac; writes runs/export/step.bin and start.npz
    python examples/recipes/export_step.py train     # needs jax and numpy only

The file holds one program, which takes statistics when they are due. It is for batches of the traced size.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

FOLDER = Path("runs/export")
PLATFORMS = "cpu", "cuda"


def batch_of(number):
    x = jax.random.normal(jax.random.key(number), (256, 8))
    return x, jnp.sin(x.sum(axis=1, keepdims=True))


def save(folder=FOLDER):
    import kfac

    def loss_fn(params, batch):
        x, y = batch
        return jnp.mean((jnp.tanh(x @ params["hidden"]) @ params["output"] - y) ** 2)

    params = {"hidden": jax.random.normal(jax.random.key(0), (8, 64)) / 3, "output": jnp.zeros((64, 1))}
    train_step = kfac.train_step(loss_fn, kfac.schedules.warmup_linear_decay(0.1, 200))
    opt_state = train_step.init(params, batch_of(0))
    leaves, structure = jax.tree.flatten((params, opt_state))

    @jax.jit
    def step(leaves, batch):
        # Pass leaves, because jax.export writes only trees that it knows: dictionaries, lists and tuples.
        params, opt_state = jax.tree.unflatten(structure, leaves)
        params, opt_state, loss = train_step(params, opt_state, batch)
        return jax.tree.leaves((params, opt_state)), loss

    exported = export.export(step, platforms=PLATFORMS)(leaves, batch_of(0))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "step.bin").write_bytes(exported.serialize())
    np.savez(folder / "start.npz", *leaves)
    print(f"{(folder / 'step.bin').stat().st_size:,} bytes for {', '.join(PLATFORMS)}")


def train(folder=FOLDER, steps=200):
    step = jax.jit(export.deserialize((folder / "step.bin").read_bytes()).call)
    leaves = [jnp.asarray(leaf) for leaf in np.load(folder / "start.npz").values()]
    for number in range(steps):
        leaves, loss = step(leaves, batch_of(number))
        if number % 50 == 49:
            print(f"step {number + 1}  loss {loss:.4f}")
    return float(loss)


if __name__ == "__main__":
    {"save": save, "train": train}[sys.argv[1]]()
    assert ("kfac" in sys.modules) == (sys.argv[1] == "save")
