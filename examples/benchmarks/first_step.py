"""Measure how long the first step of three networks takes with the installed JAX.

    python examples/benchmarks/first_step.py                  # all networks
    python examples/benchmarks/first_step.py --networks GRU

The script prints the processor seconds from the parameters to the end of the first step by `kfac.train_step`. Each
network starts twice. The second start reads the compiled programs from JAX's cache, so it shows the tracing time. To
compare JAX versions, alternate between their environments, because other work on the machine changes all figures.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from typing import Any

import environment  # noqa: F401, isort: skip; before JAX is imported

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import kfac
import models
from vit import ViT

BATCH = 64


class Recurrent(nn.Module):
    """Predict the next of 64 characters with a gated recurrent unit."""

    @nn.compact
    def __call__(self, tokens: jax.Array, train: bool) -> jax.Array:
        del train
        return nn.Dense(64)(nn.RNN(nn.GRUCell(128))(nn.Embed(64, 64)(tokens)))


IMAGES = jnp.ones((BATCH, 32, 32, 3)), jnp.zeros(BATCH, jnp.int32)
TEXT = jnp.ones((BATCH, 32), jnp.int32), jnp.zeros((BATCH, 32), jnp.int32)
NETWORKS: dict[str, tuple[nn.Module, tuple[jax.Array, jax.Array]]] = {
    "vision transformer": (ViT(10, width=96, depth=4, heads=4, patch=4), IMAGES),
    "residual network": (
        models.ResNet((1, 1, 1), num_classes=10, width=16, stem="small", init_scheme="he"),
        IMAGES,
    ),
    "GRU": (Recurrent(), TEXT),
}


def loss_of(model: nn.Module) -> Callable[..., Any]:
    """Return a model's mean cross-entropy, with its batch statistics as auxiliary output."""

    def loss(params: Any, state: Any, inputs: jax.Array, targets: jax.Array) -> Any:
        logits, state = model.apply({"params": params, **state}, inputs, train=True, mutable=list(state))
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, targets)), state

    return loss


def first_step(model: nn.Module, batch: tuple[jax.Array, jax.Array]) -> float:
    """Return the processor seconds from the parameters to the end of the first step."""
    state = jax.jit(lambda key: model.init(key, batch[0][:1], train=False))(jax.random.key(0))
    params = jax.block_until_ready(state.pop("params"))
    began = time.process_time()
    step = kfac.train_step(loss_of(model), 0.1, has_aux=True, verbose=False)
    opt_state = step.init(params, state, *batch)
    jax.block_until_ready(step(params, opt_state, state, *batch))
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    chosen = parser.parse_args().networks
    print(f"JAX {jax.__version__}\n| network | first start | start with compiled programs |\n|---|---|---|")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    with tempfile.TemporaryDirectory() as folder:
        jax.config.update("jax_compilation_cache_dir", folder)
        for name in chosen:
            compiling = first_step(*NETWORKS[name])
            jax.clear_caches()
            tracing = first_step(*NETWORKS[name])
            print(f"| {name} | {compiling:.1f} | {tracing:.1f} |", flush=True)


if __name__ == "__main__":
    main()
