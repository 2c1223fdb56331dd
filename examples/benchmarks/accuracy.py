"""Measure the rounding errors in factors and update directions on this device, relative to float64.

    python examples/benchmarks/accuracy.py

The first table covers the factors. It has a row for each layer (a dense layer and three convolutions with given inputs
and gradients) and a column for each arithmetic that the network can use.

The second table covers the direction of a perceptron's update. It has a row for each `precision` in `kfac.Cholesky`.
The images are random walks, so neighbouring pixels are strongly correlated. The damping is so small that the matrices
to invert have condition numbers close to a million.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import environment  # noqa: F401, isort: skip; before JAX is imported

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import kfac

DAMPING = 3e-6  # the condition number is then close to a million
PRECISIONS = ("float32", "bfloat16_3x", "tensorfloat32", "bfloat16")
# Name, input shape, kernel shape, stride.
LAYERS: tuple[tuple[str, tuple[int, ...], tuple[int, ...], int], ...] = (
    ("dense, 512 inputs", (64, 64, 512), (512, 256), 1),
    ("3x3 convolution, 64 channels", (32, 14, 14, 64), (3, 3, 64, 64), 1),
    ("3x3 convolution, stride 2", (32, 14, 14, 64), (3, 3, 64, 64), 2),
    ("7x7 convolution, 3 channels", (16, 28, 28, 3), (7, 7, 3, 64), 2),
)


def distance(found: Any, exact: Any) -> float:
    """Return `||found - exact|| / ||exact||` over all leaves."""
    pairs = [
        (np.asarray(x, np.float64), np.asarray(y, np.float64))
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True)
    ]
    return float(np.sqrt(sum(np.sum((x - y) ** 2) for x, y in pairs) / sum(np.sum(y**2) for _, y in pairs)))


def measured(shape: tuple[int, ...], kernel: tuple[int, ...], stride: int, dtype: Any) -> Any:
    """Return both factors of a layer that computes in `dtype`. The output gradients are fixed random numbers."""

    def layer(x: jax.Array, w: jax.Array) -> jax.Array:
        if w.ndim == 2:
            return x @ w
        numbers = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=numbers)

    def loss(params: Any, batch: Any) -> jax.Array:
        x, weights = batch
        y = layer(x.astype(dtype), params["kernel"].astype(dtype))
        return jnp.mean(jnp.sum((y * weights.astype(dtype)).astype(params["kernel"].dtype), range(1, y.ndim)))

    rng = np.random.default_rng(0)
    wide = jnp.float64 if dtype == jnp.float64 else jnp.float32
    x = jnp.asarray(np.maximum(rng.normal(size=shape), 0), jnp.float32).astype(wide)  # as after a ReLU
    params = {"kernel": jnp.asarray(rng.normal(size=kernel), jnp.float32).astype(wide)}
    weights = rng.normal(size=jax.eval_shape(layer, x, params["kernel"]).shape)
    batch = x, jnp.asarray(weights, jnp.float32).astype(wide)
    layers = kfac.find_layers(loss, params, batch, max_factor_dim=8192)
    (block,) = jax.jit(kfac.value_and_grad(loss, layers))(params, batch)[2].values()
    return jax.device_get((block.A, block.G))


def factors() -> Iterator[dict[str, Any]]:
    """Yield a row for each layer: the errors in `A` and `G` relative to float64, for each arithmetic."""
    for name, shape, kernel, stride in LAYERS:
        with jax.enable_x64(True):
            exact = measured(shape, kernel, stride, jnp.float64)
        row: dict[str, Any] = {"layer": name}
        for arithmetic in ("float32", "tensorfloat32", "bfloat16"):
            dtype = jnp.bfloat16 if arithmetic == "bfloat16" else jnp.float32
            with jax.default_matmul_precision("tensorfloat32" if arithmetic == "tensorfloat32" else "float32"):
                found = measured(shape, kernel, stride, dtype)
            row |= {f"{side}, {arithmetic}": distance(x, y) for side, x, y in zip("AG", found, exact, strict=True)}
        yield row


def update(precision: str, damping: float, dtype: Any) -> tuple[Any, float]:
    """Return a perceptron's preconditioned gradient and the largest condition number among its blocks."""
    rng = np.random.default_rng(0)
    walks = np.cumsum(rng.normal(size=(1024, 256)), axis=1) / 16
    batch = jnp.asarray(walks, jnp.float32).astype(dtype), jnp.asarray(rng.integers(0, 10, 1024))
    shapes = ((256, 384), (384, 128), (128, 10))
    params = [jnp.asarray(rng.normal(size=s) * (2 / s[0]) ** 0.5, jnp.float32).astype(dtype) for s in shapes]

    def loss(params: Any, batch: Any) -> jax.Array:
        y = batch[0]
        for kernel in params[:-1]:
            y = jax.nn.relu(y @ kernel)
        return -jnp.mean(jax.nn.log_softmax(y @ params[-1])[jnp.arange(len(y)), batch[1]])

    layers = kfac.find_layers(loss, params, batch, max_factor_dim=8192)
    tx = kfac.scale_by_kfac(
        layers, damping=damping, preconditioner=kfac.Cholesky(precision=precision, scale_damping=True)
    )
    # Every precision gets the same gradients and statistics. Only the inversion and its application differ.
    with jax.default_matmul_precision("float32"):
        _, grads, statistics = jax.jit(kfac.value_and_grad(loss, layers))(params, batch)
        state = jax.jit(kfac.observe)(jax.jit(tx.init)(params), statistics)
        updates, state = jax.jit(tx.update)(grads, state, params)
    return jax.device_get(updates), float(kfac.diagnostics(state)["condition"])


def directions(damping: float) -> Iterator[dict[str, Any]]:
    """Yield a row for each precision: the whole update's relative error, and the worst layer's relative error."""
    with jax.enable_x64(True):
        exact, condition = update("float32", damping, jnp.float64)
    for precision in PRECISIONS:
        found, _ = update(precision, damping, jnp.float32)
        worst = max(distance(x, y) for x, y in zip(found, exact, strict=True))
        yield {"precision": precision, "update": distance(found, exact), "worst layer": worst, "condition": condition}


def tables(damping: float = DAMPING) -> dict[str, list[dict[str, Any]]]:
    """Return both tables by name."""
    return {"factors": list(factors()), "directions": list(directions(damping))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--damping", type=float, default=DAMPING, help="relative to a block's mean eigenvalue")
    options = parser.parse_args()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}; default precision {kfac.Cholesky().precision}")
    for name, rows in tables(options.damping).items():
        print(f"\n{name}")
        for row in rows:
            print("  " + "   ".join(f"{k} {v:.1e}" if isinstance(v, float) else f"{v:30}" for k, v in row.items()))


if __name__ == "__main__":
    main()
