"""Compare a block for a tied table with skipping the table, in a character-level transformer.

python examples/language_model/tied_table.py --steps 60

The transformer uses the same table for its input and its output.
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

NUMBERS = {"damping": 1e-2, "factor_ema_decay": 0.9, "momentum": 0.9, "kl_clip": 0.1, "weight_decay": 0.0}
RATES = (0.02, 0.05, 0.1)
WARMUP = 0.1


@dataclasses.dataclass(frozen=True)
class Tied(Transformer):
    """Use the transposed table of characters as the head's kernel."""

    def init(self, key: jax.Array) -> Params:
        params = super().init(key)
        head = params.pop("head")
        return {**params, "tokens": params["tokens"] * self.width**-0.5, "head_bias": head["bias"]}

    def logits(self, params: Params, tokens: jax.Array) -> jax.Array:
        return super().logits({**params, "head": {"kernel": params["tokens"].T, "bias": params["head_bias"]}}, tokens)


def train(rules: dict[str, str], steps: int) -> list[float]:
    """Train for `steps` steps, and return the validation loss for each learning rate."""
    model = Tied(vocabulary=len(topics.ALPHABET))
    task = char_transformer.make(model)
    first = model.init(jax.random.key(0))
    layers = kfac.find_layers(model.loss, first, task.batch(0, 0), rules=rules)

    def optimizer(rate):
        def schedule(count):  # linear up, then linear down to zero
            return rate * jnp.minimum((count + 1) / (WARMUP * steps), (steps - count) / (steps - WARMUP * steps))

        return char_transformer.optimizer("kfac", schedule, NUMBERS, layers)

    @jax.jit
    def step(params, state, batch, rate):
        _, grads, factors = kfac.value_and_grad(model.loss, layers)(params, batch)
        updates, state = optimizer(rate).update(grads, kfac.observe(state, factors), params)
        return jax.tree.map(jnp.add, params, updates), state

    evaluate, losses = jax.jit(task.evaluate), []
    for rate in RATES:
        params, state = first, optimizer(rate).init(first)
        for count in range(steps):
            params, state = jax.block_until_ready(step(params, state, task.batch(0, count), jnp.float32(rate)))
        losses.append(float(evaluate(params)["validation"]))
        print(f"  learning rate {rate}: {losses[-1]:.4f}", flush=True)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    for name, rules in (("one block of both uses", {}), ("table skipped", {"^tokens$": "skip"})):
        print(f"{name}, validation loss after {steps} steps:", flush=True)
        print(f"{name}: {min(train(rules, steps)):.4f} at best")


if __name__ == "__main__":
    main()
