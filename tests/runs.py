"""What a run of the example leaves in its folder."""

import json

import jax
import numpy as np


def records(folder):
    """The metrics of a run but for its times."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]


def state(folder, step):
    """The state in a checkpoint, as NumPy arrays."""
    import orbax.checkpoint as ocp

    path = folder / "checkpoints" / str(step) / "state"
    checkpointer = ocp.PyTreeCheckpointer()
    tree = checkpointer.metadata(path).item_metadata.tree
    plain = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
    return checkpointer.restore(path, restore_args=plain)
