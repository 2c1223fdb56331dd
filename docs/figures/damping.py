"""Draws docs/figures/damping.png: the mean eigenvalue of each layer's block, at the first step, in three networks.

`python docs/figures/damping.py data/cifar10`, with CIFAR-10 there. It prints the smallest and the largest of each.
"""

import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "examples" / "large_batch"))

import networks  # noqa: E402, I001
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402

import kfac  # noqa: E402

figure, axis = plt.subplots(figsize=(7, 3.2), layout="constrained")
chosen = ("residual network, batch norm", "vision transformer", "character transformer")
for place, name in enumerate(chosen):
    problem = networks.PROBLEMS[name](pathlib.Path(sys.argv[1]))
    params, state = problem.init(jax.random.key(0))
    batch = next(problem.batches(0, 1))
    layers = kfac.find_layers(problem.loss, params, state, *batch, has_aux=True)
    _, _, factors = jax.jit(kfac.value_and_grad(problem.loss, layers, has_aux=True))(
        params, state, *batch
    )
    means = []
    for layer in layers:
        if layer.kind in ("dense", "conv"):
            traces = (
                jnp.trace(x, axis1=-2, axis2=-1) / x.shape[-1]
                for x in (factors[layer.name].A, factors[layer.name].G)
            )
            means += np.ravel(np.prod(list(traces), axis=0)).tolist()
    print(
        f"{name}: {min(means):.1e} to {max(means):.1e}, median {np.median(means):.1e}"
    )
    axis.scatter(means, np.full(len(means), place), alpha=0.6)
for damping, style in ((1e-3, "-"), (1e-6, ":")):
    axis.axvline(
        damping,
        color="black",
        linestyle=style,
        linewidth=1,
        label=f"damping {damping:g}",
    )
axis.set_xscale("log")
axis.set_yticks(range(len(chosen)), chosen)
axis.set_ylim(-0.5, len(chosen) - 0.5)
axis.set_xlabel("mean eigenvalue of a layer's block, (tr A / dim A) (tr G / dim G)")
axis.legend()
figure.savefig(HERE / "damping.png", dpi=110)
