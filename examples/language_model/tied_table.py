"""The character-level transformer with one table for its input and its output: its block, and skipping the table.

python examples/language_model/tied_table.py --steps 60
"""

import argparse
import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import char_transformer  # noqa: I001  before JAX starts
import jax
import jax.numpy as jnp

import kfac
import topics
from transformer import Params, Transformer

NUMBERS = {"damping": 1e-2, "factor_decay": 0.9, "momentum": 0.9, "norm_constraint": 0.1, "weight_decay": 0.0}
RATES = (0.02, 0.05, 0.1)
WARMUP = 0.1


@dataclasses.dataclass(frozen=True)
class Tied(Transformer):
    """The kernel of the head is the table of characters, transposed."""

    def init(self, key: jax.Array) -> Params:
        params = super().init(key)
        head = params.pop("head")
        return {**params, "tokens": params["tokens"] * self.width**-0.5, "head_bias": head["bias"]}

    def logits(self, params: Params, tokens: jax.Array) -> jax.Array:
        return super().logits({**params, "head": {"kernel": params["tokens"].T, "bias": params["head_bias"]}}, tokens)


def train(rate: float, skip: tuple[str, ...], steps: int) -> float:
    """The validation loss after `steps` steps."""
    model = Tied(vocabulary=len(topics.ALPHABET))
    task = char_transformer.make(model)
    params = model.init(jax.random.key(0))
    layers = kfac.find_layers(model.loss, params, task.batch(0, 0), skip=skip)

    def schedule(count):  # linear up, then linear down to zero
        return rate * jnp.minimum((count + 1) / (WARMUP * steps), (steps - count) / (steps - WARMUP * steps))

    tx = char_transformer.optimizer("kfac", schedule, NUMBERS, layers)
    state = tx.init(params)

    @jax.jit
    def step(params, state, batch):
        _, grads, factors = kfac.value_and_grad(model.loss, layers)(params, batch)
        updates, state = tx.update(grads, state, params, factors=factors)
        return jax.tree.map(jnp.add, params, updates), state

    for count in range(steps):
        params, state = jax.block_until_ready(step(params, state, task.batch(0, count)))
    return float(jax.jit(task.evaluate)(params)["validation"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    for name, skip in (("one block of both uses", ()), ("table skipped", ("^tokens$",))):
        for rate in RATES:
            print(f"{name}, learning rate {rate}: {train(rate, skip, steps):.4f} after {steps} steps", flush=True)


if __name__ == "__main__":
    main()
