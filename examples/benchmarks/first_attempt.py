"""Run `examples/imagenet/simple.py` unchanged on 1,000 photographs from 10 classes, with K-FAC and other optimizers.

    sh examples/imagenet/get_cifar10.sh
    python examples/benchmarks/first_attempt.py

The first images of CIFAR-10 become a folder of PNG files. K-FAC runs with the script's default rate. In addition, every
optimizer runs with the best rate from its grid, chosen on seed 0. All of them share the script's warm-up, decay,
batches and network.
"""

import argparse
import contextlib
import io
import re
import sys
import tempfile
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import optax

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "imagenet"))
import kfac
import simple
from cifar10 import write

RATES = {
    "kfac": (0.1, 0.2),
    "adamw": (0.01, 0.03, 0.1),
    "sgd": (0.3, 1.0, 3.0),
    "lars": (1.0, 3.0, 10.0, 30.0),
    "muon": (0.01, 0.03, 0.1, 0.3),
}


def kernels(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def dimensions(params: Any) -> Any:
    """Return Muon's dimension numbers. A kernel is a matrix with a column per output. Adam updates the other leaves."""
    as_matrix = optax.contrib.MuonDimensionNumbers
    return jax.tree.map(lambda w: as_matrix(tuple(range(w.ndim - 1)), w.ndim - 1) if w.ndim > 1 else None, params)


OPTIMIZERS = {
    "adamw": optax.adamw,
    "sgd": partial(optax.sgd, momentum=0.9, nesterov=True),
    "lars": partial(optax.lars, weight_decay=1e-4, weight_decay_mask=kernels, trust_ratio_mask=kernels),
    "muon": partial(optax.contrib.muon, muon_weight_dimension_numbers=dimensions),
}


def first_order(loss_fn: Any, rate: Any, *, optimizer: str, **_: Any) -> Any:
    """Return a first-order step with the interface of `kfac.train_step`."""
    tx = OPTIMIZERS[optimizer](rate)

    class Step:
        def init(self, params: Any, *args: Any) -> Any:
            return jax.jit(tx.init)(params)

        @partial(jax.jit, static_argnums=0)
        def __call__(self, params: Any, opt_state: Any, *args: Any) -> Any:
            value, grads = jax.value_and_grad(loss_fn, has_aux=True)(params, *args)
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, value

    return Step()


@cache
def run(optimizer: str, rate: float, seed: int, folder: Path, steps: int) -> tuple[float, float]:
    """Train once; return the final loss and accuracy on the validation images."""
    step = kfac.train_step if optimizer == "kfac" else partial(first_order, optimizer=optimizer)
    vars(simple)["kfac"] = SimpleNamespace(train_step=step, Distribution=kfac.Distribution)
    args = [folder, "--size", 32, "--steps", steps, "--rate", rate, "--seed", seed]
    out = io.StringIO()
    with tempfile.TemporaryDirectory() as output, contextlib.redirect_stdout(out):
        if code := simple.main([*map(str, args), "--output", output]):
            sys.exit(code)  # a signal stopped the run, so its last accuracy is not final
    loss, accuracy = re.findall(r"validation loss (\S+), accuracy (\S+)%", out.getvalue())[-1]
    print(f"{optimizer:6} rate {rate:<6g} seed {seed}: loss {loss}, accuracy {accuracy}%", flush=True)
    return float(loss), float(accuracy)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", type=Path, default=Path("data/cifar10"))
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--optimizers", nargs="+", default=list(RATES), choices=RATES)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "photographs")
        write(options.data_dir, folder, options.images, options.images)
        found = {}
        if "kfac" in options.optimizers:
            found["kfac, first attempt"] = [
                run("kfac", 0.1, seed, folder, options.steps) for seed in range(options.seeds)
            ]
        for name, rates in ((name, RATES[name]) for name in options.optimizers):
            tried = {rate: run(name, rate, 0, folder, options.steps) for rate in rates}
            best = max(rates, key=lambda rate: tried[rate][1])
            more = [run(name, best, seed, folder, options.steps) for seed in range(1, options.seeds)]
            found[f"{name}, rate {best:g}, best of {len(rates)}"] = [tried[best], *more]
    for name, rows in found.items():
        loss, accuracy = np.mean(rows, 0)
        print(f"{name}: loss {loss:.3f}, accuracy {accuracy:.1f}% ({', '.join(f'{a:.1f}' for _, a in rows)})")


if __name__ == "__main__":
    main()
