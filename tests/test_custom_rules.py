"""Functions with a `jax.custom_jvp` around layers: the statistics are those of their rule."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

import kfac
from checking import normal
from oracle import relative_error

pytestmark = pytest.mark.usefixtures("x64")
N, T, D = 3, 4, 5


@jax.custom_jvp
def block(p, x, mask):
    return jnp.where(mask > 0, jnp.tanh(x @ p["w"] + p["b"]), -jnp.inf)


@block.defjvp
def _(primals, tangents):
    """Half of the gradient, as a rule that is not the derivative: what is measured must be what it says."""
    (p, x, mask), (tp, tx, _) = primals, tangents
    y = jnp.tanh(x @ p["w"] + p["b"])
    moved = 0.5 * (1 - y**2) * (x @ tp["w"] + tp["b"] + tx @ p["w"])
    return block(p, x, mask), jnp.where(mask > 0, moved, 0.0)


def by_hand(p, x, mask):
    """The same rule, written as a program."""
    h = x @ p["w"] + p["b"]
    y, slope = jnp.tanh(h), lax.stop_gradient(1 - jnp.tanh(h) ** 2)
    half = lax.stop_gradient(y) + 0.5 * slope * (h - lax.stop_gradient(h))
    return jnp.where(mask > 0, half, -jnp.inf)


def model(fn, wrap):
    def loss(p, b):
        fine = jnp.where(b["mask"] > 0, wrap(fn)(p["first"], b["x"], b["mask"]), 0.0)
        again = jnp.where(b["mask"] > 0, wrap(fn)(p["first"], fine, b["mask"]), 0.0)
        return jnp.mean(jnp.sum((again @ p["last"]) ** 2, (1, 2)))

    return loss


def scanned(fn):
    def run(p, x, mask):
        step = lambda x, _: (jnp.where(mask > 0, fn(p, x, mask), 0.0), None)  # noqa: E731
        return lax.scan(step, x, None, 2)[0]

    return run


@pytest.mark.parametrize(
    "wrap", [lambda fn: fn, jax.jit, jax.checkpoint, scanned], ids=["plain", "jit", "remat", "scan"]
)
def test_the_rule_is_followed(wrap):
    """Values that are not finite and are not used do no harm; kernel and bias are one layer."""
    params = {"first": {"w": normal(1, D, D), "b": normal(2, D)}, "last": normal(3, D, 2)}
    batch = {"x": normal(4, N, T, D), "mask": (normal(5, N, T, D) > -1).astype(int)}
    found, expected = [], []
    for fn, results in ((block, found), (by_hand, expected)):
        loss = model(fn, wrap)
        layers = kfac.find_layers(loss, params, batch)
        results += jax.tree.leaves(jax.jit(kfac.value_and_grad(loss, layers))(params, batch))
        assert layers["first/w" if "first/w" in layers else "first"].uses == (4 if wrap is scanned else 2)
    plain = jax.value_and_grad(model(block, wrap))(params, batch)
    for mine, true in zip(found, jax.tree.leaves(plain), strict=False):
        assert relative_error(mine, true) < 1e-12
    for mine, true in zip(found, expected, strict=True):
        assert relative_error(mine, true) < 1e-10


def test_a_custom_vjp_is_refused_still():
    @jax.custom_vjp
    def foreign(x, w):
        return x @ w

    foreign.defvjp(lambda x, w: (x @ w, (x, w)), lambda res, g: (g @ res[1].T, res[0].T @ g))
    with pytest.raises(kfac.UnsupportedLayerError, match=r"'w'.*custom_vjp_call.*skip="):
        kfac.find_layers(lambda p, x: jnp.mean(foreign(x, p["w"])), {"w": jnp.ones((D, D))}, jnp.ones((N, D)))


def test_a_mark_inside_is_refused():
    @jax.custom_jvp
    def head(w, x):
        return kfac.output(x @ w, "gaussian")

    head.defjvp(lambda p, t: (head(*p), p[1] @ t[0] + t[1] @ p[0]))
    with pytest.raises(ValueError, match=r"kfac.output cannot be followed inside custom_jvp_call"):
        kfac.find_layers(lambda p, x: jnp.mean(head(p["w"], x)), {"w": jnp.ones((D, D))}, jnp.ones((N, D)))


@pytest.mark.parametrize("checked", [True, False])
def test_on_devices(checked):
    """Where parameters and arguments vary over devices, the rule does too."""
    params = {"first": {"w": normal(1, D, D), "b": normal(2, D)}, "last": normal(3, D, 2)}
    batch = {"x": normal(4, N, T, D), "mask": (normal(5, N, T, D) > -1).astype(int)}
    loss = model(block, lambda fn: fn)
    layers = kfac.find_layers(loss, params, batch)

    def local(params, batch):
        return lax.pmean(kfac.value_and_grad(loss, layers)(params, batch), "devices")

    mesh = Mesh(np.array(jax.devices()[:3]), ("devices",))
    over, whole = PartitionSpec("devices"), PartitionSpec()
    fn = jax.shard_map(local, mesh=mesh, in_specs=(whole, over), out_specs=whole, check_vma=checked)
    expected = jax.jit(kfac.value_and_grad(loss, layers))(params, batch)
    found = jax.jit(fn)(params, batch)
    for mine, true in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert relative_error(mine, true) < 1e-10
