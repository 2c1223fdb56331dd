"""Train a character-level transformer on Python's documentation with tuned K-FAC and tuned AdamW.

python examples/language_model/char_transformer.py          # train with both and print the comparison
python examples/language_model/char_transformer.py --tune   # search the settings
"""

import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent))

import comparison  # noqa: E402, I001  before JAX starts
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

import kfac  # noqa: E402
import topics  # noqa: E402
from transformer import Params, Transformer  # noqa: E402

GRIDS: dict[str, comparison.Grid] = {
    "adamw": {
        "learning_rate": (4e-3, 8e-3, 16e-3),
        "weight_decay": (0.0, 0.1),
        "b1": (0.9,),
        "b2": (0.95, 0.99),
        "warmup": (0.1, 0.3),
    },
    "kfac": {
        "learning_rate": (0.02, 0.05, 0.1),
        "damping": (1e-3, 1e-2, 0.1),
        "momentum": (0.9,),
        "factor_ema_decay": (0.9,),
        "kl_clip": (0.1,),
        "weight_decay": (0.0,),
        "warmup": (0.1,),
    },
}


def is_kernel(params: Params) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key == "kernel", params)


def optimizer(name: str, rate: Any, numbers: dict[str, Any], layers: kfac.Layers) -> Any:
    if name == "adamw":
        return optax.adamw(rate, numbers["b1"], numbers["b2"], weight_decay=numbers["weight_decay"], mask=is_kernel)
    return kfac.natural_gradient(
        rate, layers, damping=numbers["damping"], unitwise_damping_scale=1.0,
        factor_ema_decay=numbers["factor_ema_decay"],
        momentum=numbers["momentum"], nesterov=True, trust_ratio=1.0, kl_clip=numbers["kl_clip"],
        weight_decay=numbers["weight_decay"], weight_decay_mask=is_kernel, lr_in_momentum=False,
    )  # fmt: skip


def make(model: Transformer | None = None, sequences: int = 64, parts: int = 4) -> comparison.Task:
    """Return the task. A batch has `sequences` stretches of training text.

    Validation uses `parts` batches of held-out text.
    """
    model = model or Transformer(vocabulary=len(topics.ALPHABET))
    train, held_out = topics.tokens()
    length = model.context + 1
    rows = jnp.asarray(held_out[: parts * sequences * length].reshape(parts, sequences, length))

    def batch(seed: int, step: int) -> jax.Array:
        """Return stretches at random positions, which depend only on the seed and the step."""
        begin = np.random.default_rng((seed, step)).integers(0, len(train) - length + 1, sequences)
        return jnp.asarray(train[begin[:, None] + np.arange(length)])

    def evaluate(params: Params) -> dict[str, jax.Array]:
        return {"validation": jnp.mean(jax.lax.map(lambda part: model.loss(params, part), rows))}

    return comparison.Task(init=model.init, batch=batch, loss=model.loss, evaluate=evaluate, optimizer=optimizer,
                           fisher="empirical")  # fmt: skip


OPTIONS = comparison.Options(steps=100, every=10, trials=9, folder=FOLDER)


def main(args: list[str]) -> None:
    comparison.main(make, GRIDS, OPTIONS, args, measure="validation", label="validation loss in nats per character")


if __name__ == "__main__":
    comparison.script(main)
