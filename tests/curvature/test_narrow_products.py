"""Test products of bfloat16 parts, as tensor cores compute them.

Some tests use internals of `_curvature` and `_statistics`: the products themselves.
"""

import importlib.util
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import kfac
from kfac import _linalg
from kfac._curvature import orthonormal, soap
from kfac._linalg import exact_product
from kfac._statistics.offsets import WindowAxis, _of_pairs, offset_moment


def parts_of(x, number):
    """Split float32 numbers into a sum of numbers in bfloat16."""
    found = []
    for _ in range(number):
        found.append(lax.reduce_precision(x, 8, 7))
        x = x - found[-1]
    return found


def split(x, number):
    """Return `parts_of` numbers as NumPy arrays in float64."""
    return [np.asarray(part, np.float64) for part in parts_of(jnp.asarray(x, jnp.float32), number)]


def product_of(precision, a, b):
    if precision == "float32":
        return a @ b
    (first, *rest), (other, *more) = (split(x, 2 if precision == "bfloat16_3x" else 1) for x in (a, b))
    return sum((first @ x for x in more), first @ other) + sum((x @ other for x in rest), 0)


def test_moments_of_windows_in_half_precision():
    """Check that products with shifted copies, as on a GPU, match the float32 image up to rounding in the sums."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 6, 5, 4)), jnp.bfloat16)
    axes = WindowAxis(6, 3, 1, 1, 6), WindowAxis(5, 3, 2, 2, 5)  # size, window, dilation, padding, positions
    wide = _of_pairs(x.astype(jnp.float32), axes)
    np.testing.assert_allclose(_of_pairs(x, axes), wide, rtol=1e-5, atol=1e-5 * float(jnp.abs(wide).max()))
    np.testing.assert_allclose(offset_moment(x, axes), wide, rtol=1e-6)


def test_moments_turned_by_products_of_three_parts():
    """Check that, as on a GPU, relative errors stay below 1e-4 and no moment becomes negative."""
    rng = np.random.default_rng(0)
    old, new = (np.linalg.qr(np.eye(200) + 0.1 * rng.normal(size=(200, 200)) * k / 14)[0] for k in (1, 2))
    moments = np.float32(rng.gamma(0.2, size=(200, 200)) ** 2)
    found, exact = (
        product_of(p, product_of(p, np.float32(new.T), np.float32(old)) ** 2, moments)
        for p in ("bfloat16_3x", "float32")
    )
    np.testing.assert_allclose(found, exact, rtol=1e-4)
    assert np.min(found) > 0


def sixfold(a, b):
    """Multiply as `exact_product` does on a GPU."""
    (a1, a2, a3), (b1, b2, b3) = parts_of(a, 3), parts_of(b, 3)
    return a2 @ b2 + a3 @ b1 + a1 @ b3 + a2 @ b1 + a1 @ b2 + a1 @ b1


def threefold(a, b):
    """Multiply as `close_product` does on a GPU."""
    (a1, a2), (b1, b2) = parts_of(a, 2), parts_of(b, 2)
    return a2 @ b1 + a1 @ b2 + a1 @ b1


def test_six_products_of_parts_are_as_exact_as_float32(monkeypatch):
    """Check that six products of parts also orthonormalise columns up to rounding."""
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.normal(size=(1, 100, 100)), jnp.float32) for _ in range(2))
    exact = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    wrong = [np.abs(product(a, b) - exact).max() for product in (sixfold, exact_product)]
    assert wrong[0] < 2 * wrong[1] < 1e-4
    monkeypatch.setattr(_linalg, "exact_product", sixfold)
    monkeypatch.setattr(orthonormal, "close_product", sixfold)
    found = np.asarray(orthonormal.orthonormal_by_products(a @ a.mT), np.float64)
    np.testing.assert_allclose(found.mT @ found, np.eye(100)[None], atol=2e-6)


@pytest.mark.parametrize("power", [pytest.param(1, marks=pytest.mark.slow), 1.2])
def test_columns_are_orthonormal_with_products_of_parts(monkeypatch, power):
    """Check factors with a few large eigenvalues, as networks often have. Their columns are nearly parallel.

    The smallest shift is too small for two of these matrices. They had no basis at all before the shift could grow.
    """
    monkeypatch.setattr(_linalg, "exact_product", sixfold)
    monkeypatch.setattr(orthonormal, "close_product", threefold)
    d = 784
    scale = np.arange(1.0, d + 1) ** -power
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(3, 3 * d, d)) * scale @ rng.normal(size=(d, d))
    factors = rows.mT @ rows
    factors = factors / np.trace(factors, axis1=1, axis2=2)[:, None, None] * d + 1e-2 * np.eye(d)
    found = jax.jit(orthonormal.orthonormal_by_products)(jnp.asarray(factors, jnp.float32))
    found = np.asarray(found, np.float64)
    np.testing.assert_allclose(found.mT @ found, np.broadcast_to(np.eye(d), found.shape), atol=2e-5)
    # Rounding hardly affects the first columns, so they match a QR factorisation.
    expected = np.linalg.qr(factors)[0][:, :, :3]
    overlap = np.abs(np.sum(expected * found[:, :, :3], axis=1))
    np.testing.assert_allclose(overlap, 1, atol=1e-3)


@pytest.mark.slow
def test_steps_of_soap_with_products_of_parts(monkeypatch):
    """Check that three steps of a small network hardly change, by the criterion in `gpu.py --programme A`."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "benchmarks"))
    import gpu_speed

    preconditioner = gpu_speed.INVERSES["SOAP in float32"][0]
    monkeypatch.setattr(soap, "orthonormal", orthonormal.orthonormal_by_products)
    expected = gpu_speed.three_steps(preconditioner)
    monkeypatch.setattr(soap, "exact_product", sixfold)
    monkeypatch.setattr(_linalg, "exact_product", sixfold)
    monkeypatch.setattr(orthonormal, "close_product", threefold)
    found = gpu_speed.disagreement(gpu_speed.three_steps(preconditioner), expected, limit=0.005)
    assert found["agrees"], found


def damped(a, g, condition):
    """Return both factors with the factored damping that gives their block this condition number."""
    pi = np.sqrt(np.trace(a) / len(a) / (np.trace(g) / len(g)))
    low, high = 1e-30, 1e6
    for _ in range(200):
        root = (low * high) ** 0.25
        sides = a + pi * root * np.eye(len(a)), g + root / pi * np.eye(len(g))
        worse = np.linalg.cond(sides[0]) * np.linalg.cond(sides[1]) > condition
        low, high = (root**2, high) if worse else (low, root**2)
    return sides


def test_the_direction_of_an_update_at_condition_1e6():
    """Compare update directions at several precisions, on a network for handwritten digits.

    Products of bfloat16 parts in float64 stand in for tensor cores.
    """
    # Importing scikit-learn takes two seconds, so read its file.
    folder = Path(importlib.util.find_spec("sklearn").origin).parent
    digits = np.loadtxt(folder / "datasets" / "data" / "digits.csv.gz", delimiter=",", max_rows=800)
    batch = jnp.asarray(digits[:, :-1] / 16, jnp.float32), jnp.asarray(digits[:, -1], jnp.int32)
    rng = np.random.default_rng(0)
    shapes = ((64, 128), (128, 128), (128, 10))
    params = [jnp.asarray(rng.normal(size=s) * (2 / s[0]) ** 0.5, jnp.float32) for s in shapes]

    def loss(params, batch):
        y = batch[0]
        for kernel in params[:-1]:
            y = jax.nn.relu(y @ kernel)
        return -jnp.mean(jax.nn.log_softmax(y @ params[-1])[jnp.arange(len(batch[1])), batch[1]])

    descend = jax.jit(lambda params: jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, batch)))
    for _ in range(60):
        params = descend(params)
    layers = kfac.find_layers(loss, params, batch)
    _, grads, factors = jax.jit(kfac.value_and_grad(loss, layers))(params, batch)
    wrong, norm = dict.fromkeys(("float32", "bfloat16_3x", "bfloat16"), 0.0), 0.0
    for grad, layer in zip(grads, layers, strict=True):
        a, g = damped(*(np.asarray(getattr(factors[layer.name], side), np.float64) for side in "AG"), 1e6)
        gradient, a, g = np.asarray(grad, np.float64).T, np.linalg.inv(a), np.linalg.inv(g)
        exact = g @ gradient @ a
        norm += np.sum(exact**2)
        for precision in wrong:
            found = product_of(precision, product_of(precision, g, gradient), a)
            wrong[precision] += np.sum((found - exact) ** 2)
    errors = {precision: (value / norm) ** 0.5 for precision, value in wrong.items()}
    print(errors)
    assert kfac.Cholesky().precision == "bfloat16_3x"
    assert errors["bfloat16_3x"] < 1e-3 < errors["bfloat16"]
