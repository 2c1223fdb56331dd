"""Find the sentences that support a character model's completion, and check the result by retraining.

python examples/influence/sentences.py
"""

import functools
import re
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER.parent), str(FOLDER.parent / "language_model")]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from jax import lax  # noqa: E402

import kfac  # noqa: E402
import topics  # noqa: E402
from scores import curvature, gradients, influence  # noqa: E402
from transformer import Params, Transformer  # noqa: E402

DECAY = 0.02
BATCH = 64


def sentences(length: int) -> np.ndarray:
    """Return shuffled sentence beginnings from Python's documentation: `[sentences, length]`.

    Only sentences that are mostly letters are included.
    """
    text = " ".join(topics.text().split())
    begun = [s[:length] for s in re.split(r"(?<=[.:;]) (?=[A-Z])", text) if len(s) >= length]
    plain = sorted({s for s in begun if sum(c.isalpha() or c == " " for c in s) > 0.9 * length})
    return np.array([[topics.ALPHABET.index(c) for c in s] for s in np.random.default_rng(0).permutation(plain)])


def read(row: Any) -> str:
    return "".join(topics.ALPHABET[c] for c in row)


def surprise(model: Transformer, params: Params, tokens: jax.Array) -> jax.Array:
    """Return `-log p` for every character except the first: `[sentences, length - 1]`."""
    logits = kfac.mark_output(model.logits(params, tokens[:, :-1]), "categorical")
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1)[..., 0]


@functools.partial(jax.jit, static_argnums=0, static_argnames="steps")
def fit(model: Transformer, key: jax.Array, text: jax.Array, kept: jax.Array, steps: int) -> Params:
    """Train on the sentences with a 1 in `kept`.

    All calls use the same batches. Other sentences have zero weight in them.
    """
    tx = optax.adam(optax.warmup_cosine_decay_schedule(0, 1e-2, steps // 10, steps))
    params, epochs = model.init(key), -(-steps * BATCH // len(text))
    order = jax.vmap(lambda k: jax.random.permutation(k, len(text)))(jax.random.split(key, epochs))

    def objective(p, rows):
        return kept[rows] @ surprise(model, p, text[rows]).sum(-1) / BATCH + 0.5 * DECAY * optax.tree.vdot(p, p)

    def step(carry, rows):
        params, state = carry
        updates, state = tx.update(jax.grad(objective)(params, rows), state)
        return (optax.apply_updates(params, updates), state), None

    return lax.scan(step, (params, tx.init(params)), order.ravel()[: steps * BATCH].reshape(steps, BATCH))[0][0]


def complete(model: Transformer, params: Params, prompts: jax.Array, length: int) -> jax.Array:
    """Complete the prompts with the most likely character at each position."""
    tokens = jnp.pad(prompts, [(0, 0), (0, length - prompts.shape[1])])

    def put(k, tokens):
        return tokens.at[:, k].set(jnp.argmax(model.logits(params, tokens[:, :-1])[:, k - 1], -1))

    return lax.fori_loop(prompts.shape[1], length, put, tokens)


def run(
    count: int = 256, length: int = 33, width: int = 32, steps: int = 300, queries: int = 6, seeds: int = 2,
    share: float = 0.1, passes: int = 4,
) -> list[dict[str, Any]]:  # fmt: skip
    """Return each completion's change in log probability after retraining without chosen sentences.

    The chosen sentences speak for the completion, speak against it, or are random.
    """
    everything = jnp.asarray(sentences(length))
    text, prompts = everything[:count], everything[count : count + queries, : length // 2]
    model = Transformer(len(topics.ALPHABET), length - 1, width, layers=1, heads=2, dtype="float32")
    keys, whole = list(jax.random.split(jax.random.key(0), seeds)), jnp.ones(count)
    trained = [fit(model, key, text, whole, steps=steps) for key in keys]
    query = jax.jit(complete, static_argnums=(0, 3))(model, trained[0], prompts, length)
    losses = functools.partial(surprise, model)
    loss = lambda params, tokens: losses(params, tokens).sum(-1).mean()  # noqa: E731
    measure = jax.jit(lambda params, tokens: -losses(params, tokens)[:, length // 2 - 1 :].sum(-1))

    batches = [text[k : k + BATCH] for k in range(0, count, BATCH)] * passes
    found: dict[str, Any] = {}
    for params in trained:
        measured, examples = gradients(measure, params, query), gradients(losses, params, text)
        # Each example is a sentence. Its log probability is the sum over its characters.
        options = {"fisher": "sampled", "key": jax.random.key(0), "num_examples": min(BATCH, count)}
        operators: dict[str, Any] = curvature(loss, params, batches, DECAY, **options)
        for name, operator in (operators | {"gradients alone": None}).items():
            found[name] = found.get(name, 0) + influence(operator, params, measured, examples) / seeds

    def without(rows):
        kept = whole.at[np.asarray(rows)].set(0)
        after = [measure(fit(model, key, text, kept, steps=steps), query) for key in keys]
        return np.mean([a - measure(b, query) for a, b in zip(after, trained, strict=True)], axis=0)

    left, rng = max(1, round(share * count)), np.random.default_rng(1)
    chance = np.mean([without(rng.choice(count, left, replace=False)) for _ in range(6)], axis=0)
    table = []
    for k, row in enumerate(query):
        changes: dict[str, float] = {}
        for name in ("EK-FAC", "gradients alone"):
            order = np.argsort(found[name][k])
            changes[f"{name}, for it"] = without(order[:left])[k]
            changes[f"{name}, against it"] = without(order[-left:])[k]
        best = read(text[np.argmin(found["EK-FAC"][k])])
        prompt, end = read(row[: length // 2]), read(row[length // 2 :])
        table.append({"prompt": prompt, "completion": end, "sentence": best, "at random": chance[k]} | changes)
        print(f"\r{k + 1} of {queries} completions", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return table


if __name__ == "__main__":
    rows = run()
    for r in rows:
        print(f"{r['prompt']!r} -> {r['completion']!r}, supported most by {r['sentence']!r}")
    print("| left out | mean | each completion |")
    for name in [name for name, value in rows[0].items() if not isinstance(value, str)]:
        values = [r[name] for r in rows]
        print(f"| {name} | {np.mean(values):.1f} | {', '.join(f'{v:.1f}' for v in values)} |")
