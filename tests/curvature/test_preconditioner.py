"""Test damped inverses against dense float64 solves in NumPy, and the handling of failed factorisations.

The tests use internals of `_curvature`: an error in the inverse of a single stacked block would show late in an
optimizer's steps.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kfac
import kfac._curvature.cholesky
import kfac._curvature.refresh
from kfac._curvature.unitwise import ChannelPreconditioner
from kfac._linalg import spd_inverse
from kfac.types import Kronecker, Unitwise

FLOAT32_EPS = float(np.finfo(np.float32).eps)


def spd(seed, dim, condition=10.0, scale=1.0):
    """Return a symmetric matrix with logarithmically spaced eigenvalues from `scale / condition` to `scale`."""
    q, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(dim, dim)))
    return (q * (scale * np.geomspace(1 / condition, 1, dim))) @ q.T


def low_rank(seed, dim, rank, scale=1.0):
    x = np.random.default_rng(seed).normal(size=(dim, rank))
    return scale * x @ x.T / dim


def truth(a, g, damping):
    """Return the inverses of a damped block by the formulas of Martens & Grosse 2015, section 6.3."""
    mean_a, mean_g = np.trace(a) / len(a), np.trace(g) / len(g)
    pi = np.sqrt(mean_a / mean_g) if mean_a > 0 and mean_g > 0 else 1.0
    return (
        np.linalg.inv(a + pi * np.sqrt(damping) * np.eye(len(a))),
        np.linalg.inv(g + np.sqrt(damping) / pi * np.eye(len(g))),
    )


def stack(blocks, dtype):
    return Kronecker(
        jnp.asarray(np.stack([a for a, _ in blocks]), dtype), jnp.asarray(np.stack([g for _, g in blocks]), dtype)
    )


def sevens(factors, dtype=None):
    """Return previous inverses that are easy to recognise."""
    preconditioner = kfac.Cholesky() if isinstance(factors, Kronecker) else ChannelPreconditioner()
    return jax.tree.map(lambda x: jnp.full(x.shape, 7, dtype or x.dtype), preconditioner.init(factors))


@jax.jit
def refresh(factors, previous, damping):
    due = jnp.ones(factors.A.shape[0], bool)
    return kfac._curvature.refresh.refresh(kfac.Cholesky(), previous, factors, due, damping)


CASES = {
    "plain": [(spd(0, 5), spd(1, 3))],
    "batch of equal shapes": [(spd(k, 5, scale=10.0**k), spd(k + 9, 3, scale=0.1**k)) for k in range(4)],
    "singular factors": [(low_rank(0, 5, 2), low_rank(1, 3, 1))],
    "one factor zero": [(spd(0, 5), np.zeros((3, 3))), (np.zeros((5, 5)), spd(1, 3))],
    "both factors zero": [(np.zeros((5, 5)), np.zeros((3, 3)))],
    "zero beside others": [(np.zeros((5, 5)), np.zeros((3, 3))), (spd(0, 5), spd(1, 3))],
    "scales far apart": [(spd(0, 5, scale=1e6), spd(1, 3, scale=1e-10))],
    "scalars": [(np.array([[4.0]]), np.array([[0.25]])), (np.array([[0.0]]), np.array([[2.0]]))],
    "a scalar beside a matrix": [(spd(0, 5), np.array([[0.3]]))],
}


@pytest.mark.parametrize("damping", [1e-8, 1e-3, 10.0])
@pytest.mark.parametrize("case", CASES)
def test_kronecker_inverses_equal_dense_solves(x64, case, damping):
    factors = stack(CASES[case], jnp.float64)
    result = refresh(factors, sevens(factors), jnp.float64(damping))
    assert np.all(result.valid)
    for k, (a, g) in enumerate(CASES[case]):
        for found, expected in zip(
            (result.preconditioner.A[k], result.preconditioner.G[k]), truth(a, g, damping), strict=True
        ):
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9 * np.abs(expected).max())


@pytest.mark.parametrize("case", CASES)
def test_kronecker_inverses_in_float32(case):
    factors = stack(CASES[case], jnp.float32)
    result = refresh(factors, sevens(factors), jnp.float32(1e-3))
    assert np.all(result.valid)
    for k, (a, g) in enumerate(CASES[case]):
        for found, expected in zip(
            (result.preconditioner.A[k], result.preconditioner.G[k]), truth(a, g, 1e-3), strict=True
        ):
            assert found.dtype == jnp.float32
            condition = np.linalg.cond(expected)
            tolerance = 10 * len(expected) * FLOAT32_EPS * condition * np.abs(expected).max()
            np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)


def test_the_product_of_the_two_dampings_is_the_damping(x64):
    """Read the dampings off diagonal factors.

    Their product is `pi sqrt(l) * sqrt(l) / pi = l`. Their ratio is the ratio of the factors' mean eigenvalues.
    """
    a, g = np.diag([1.0, 2.0, 9.0]), np.diag([0.5, 0.25])
    factors = stack([(a, g)], jnp.float64)
    inverse = refresh(factors, sevens(factors), jnp.float64(0.01)).preconditioner
    on_a = 1 / np.diag(inverse.A[0]) - np.diag(a)
    on_g = 1 / np.diag(inverse.G[0]) - np.diag(g)
    np.testing.assert_allclose(on_a, on_a[0], rtol=1e-10)
    np.testing.assert_allclose(on_g, on_g[0], rtol=1e-10)
    np.testing.assert_allclose(on_a[0] * on_g[0], 0.01, rtol=1e-10)
    np.testing.assert_allclose(on_a[0] / on_g[0], (12 / 3) / (0.75 / 2), rtol=1e-10)


def test_accuracy_at_condition_a_million_in_float32():
    """Check that `||I - M X||` stays below the unavoidable rounding error, epsilon times the condition number."""
    a = spd(0, 64, condition=1e7).astype(np.float32)
    g = spd(1, 48, condition=1e7).astype(np.float32)
    factors = stack([(a, g)], jnp.float32)
    damping = 1e-12  # pi is about 1, so this adds 1e-6 to each diagonal
    result = refresh(factors, sevens(factors), jnp.float32(damping))
    assert result.valid[0]
    pi = np.sqrt(np.trace(a.astype(np.float64)) / 64 / (np.trace(g.astype(np.float64)) / 48))
    for m, x, shift in ((a, result.preconditioner.A[0], pi * 1e-6), (g, result.preconditioner.G[0], 1e-6 / pi)):
        m = m.astype(np.float64) + shift * np.eye(len(m))
        condition = np.linalg.cond(m)
        assert 5e5 < condition < 2e6
        residual = np.linalg.norm(np.eye(len(m)) - m @ np.asarray(x, np.float64), 2)
        assert residual < FLOAT32_EPS * condition
    # The reported condition number is the larger of the damped factors' condition numbers, in the 1-norm.
    assert 1e6 < result.condition[0] < 5e7


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_inverses_are_symmetric(precision):
    factors = stack(CASES["batch of equal shapes"] + [(low_rank(0, 5, 2), low_rank(1, 3, 1))], jnp.float32)
    inverse = refresh(factors, sevens(factors, precision), jnp.float32(1e-4)).preconditioner
    for x in (inverse.A, inverse.G):
        assert x.dtype == jnp.dtype(precision)
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(x.mT, np.float32))
        assert np.all(np.linalg.eigvalsh(np.asarray(x, np.float32)) > 0)


def test_a_failed_factorisation_is_retried_with_ten_times_the_damping(x64):
    """Check that only the block that needs more damping gets it."""
    good = (spd(0, 5), spd(1, 3))
    # The negative eigenvalue needs more than 0.2: sqrt(l) = 0.1 fails, sqrt(10 l) = 0.316 suffices.
    a = np.diag([1.0, 1.0, 1.0, 1.0, -0.2])
    g = np.diag([1.0, 1.0, 1.0]) * np.trace(a) / 5
    factors = stack([good, (a, g), good], jnp.float64)
    result = refresh(factors, sevens(factors), jnp.float64(0.01))
    assert np.all(result.valid)
    for k, (block, damping) in enumerate([(good, 0.01), ((a, g), 0.1), (good, 0.01)]):
        for found, expected in zip(
            (result.preconditioner.A[k], result.preconditioner.G[k]), truth(*block, damping), strict=True
        ):
            np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("bad", [np.diag([-5.0, 1.0, 1.0]), np.full((3, 3), np.nan), np.full((3, 3), np.inf)])
@pytest.mark.parametrize("side", ["A", "G"])
def test_a_block_that_fails_twice_keeps_its_last_inverse(bad, side):
    good = (spd(0, 3), spd(1, 3))
    broken = (bad, good[1]) if side == "A" else (good[0], bad)
    factors = stack([broken, good], jnp.float32)
    result = refresh(factors, sevens(factors), jnp.float32(1e-3))
    np.testing.assert_array_equal(result.valid, [False, True])
    # The block keeps both old factors, because a new factor does not fit an old one.
    np.testing.assert_array_equal(result.preconditioner.A[0], 7)
    np.testing.assert_array_equal(result.preconditioner.G[0], 7)
    np.testing.assert_allclose(result.preconditioner.A[1], truth(*good, 1e-3)[0], rtol=1e-4)


@pytest.mark.parametrize("damping", [0.0, -1.0, np.nan, np.inf])
def test_no_damping_whatever_makes_an_inverse_that_is_not_finite(damping):
    """Check dampings that a wrong schedule may return."""
    factors = stack([(np.zeros((4, 4)), np.zeros((3, 3))), (low_rank(0, 4, 1), low_rank(1, 3, 1))], jnp.float32)
    unitwise = Unitwise(jnp.zeros((1, 4, 2, 2)))
    for result in (
        refresh(factors, sevens(factors), jnp.float32(damping)),
        refreshed_unitwise(unitwise, sevens(unitwise), jnp.float32(damping)),
    ):
        for x in jax.tree.leaves(result.preconditioner):
            assert np.all(np.isfinite(x))
        assert not np.any(result.valid)


@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1e30, 1e37])
def test_factors_of_any_size_give_finite_inverses(scale):
    factors = stack([(spd(0, 4, scale=scale), spd(1, 3)), (spd(0, 4), spd(1, 3, scale=scale))], jnp.float32)
    result = refresh(factors, sevens(factors), jnp.float32(1e-3))
    for x in jax.tree.leaves(result.preconditioner):
        assert np.all(np.isfinite(x))


def test_an_inverse_that_bfloat16_or_float32_cannot_hold_is_not_taken():
    factors = stack([(np.zeros((2, 2)), np.zeros((2, 2)))], jnp.float32)
    result = refresh(factors, sevens(factors, jnp.float16), jnp.float32(1e-12))
    assert not result.valid[0]
    np.testing.assert_array_equal(result.preconditioner.A, 7)


def by_halves(matrices):
    """Invert by halves in a newly compiled program, because the limit `LEAF` may have changed."""
    return np.asarray(jax.jit(lambda x: spd_inverse(x))(matrices))


@pytest.mark.slow
@pytest.mark.parametrize("dim", [7, 8, 13, 32])
@pytest.mark.parametrize("leaf", [1, 3, 8])
def test_inverses_by_halves_are_those_of_dense_solves(x64, monkeypatch, dim, leaf):
    monkeypatch.setattr(kfac._linalg, "LEAF", leaf)
    matrices = np.stack([spd(k, dim, condition=1e4) for k in range(3)])
    found = by_halves(matrices)
    np.testing.assert_allclose(found, np.linalg.inv(matrices), rtol=0, atol=1e-10 * np.abs(found).max())
    np.testing.assert_array_equal(found, found.mT)


@pytest.mark.parametrize("place", [0, 4, 8, 12])
def test_an_inverse_by_halves_fails_where_any_part_is_not_positive(monkeypatch, place):
    monkeypatch.setattr(kfac._linalg, "LEAF", 3)
    matrix = np.eye(13, dtype=np.float32)
    matrix[place, place] = -1
    assert not np.all(np.isfinite(by_halves(matrix[None])))


@pytest.mark.slow
@pytest.mark.parametrize("condition", [1e3, 1e6])
def test_inverses_by_halves_are_as_accurate_as_a_factorisation_allows(monkeypatch, condition):
    """Compare float32 residuals with a pivoted LU decomposition and with the exact inverse, rounded."""
    monkeypatch.setattr(kfac._linalg, "LEAF", 24)
    matrix = spd(0, 200, condition=condition).astype(np.float32)
    exact = np.linalg.inv(matrix.astype(np.float64)).astype(np.float32)

    def residual(inverse):
        return np.linalg.norm(np.eye(200) - matrix.astype(np.float64) @ np.asarray(inverse, np.float64)) / np.sqrt(200)

    found = residual(by_halves(matrix[None])[0])
    assert found < 5 * residual(jnp.linalg.inv(matrix))
    assert found < FLOAT32_EPS * condition
    assert residual(exact) < found


# Blocks are inverted singly, in portions with a smaller last portion, and all at once. Each way is tested in one piece
# and by halves.
PORTIONS = [(width, leaf) for leaf in (600, 2) for width in (1, 2, 3, 5)]
FEW = (1, 600), (2, 2), (5, 600)


@pytest.mark.parametrize("name", ["plain", "table", "wide", "thin"])
@pytest.mark.parametrize(
    ("width", "leaf"), [pytest.param(*x, marks=() if x in FEW else pytest.mark.slow) for x in PORTIONS]
)
def test_blocks_in_portions_are_inverted_as_if_each_were_alone(monkeypatch, name, width, leaf):
    """Check stacks in which a block is not requested, a block fails, or a block needs more damping.

    Each block replaces both of its factors or keeps both.
    """
    monkeypatch.setattr(kfac._linalg, "LEAF", leaf)
    rng = np.random.default_rng(0)

    def moments(k, d):
        x = jnp.asarray(rng.normal(size=(k, d, d)), jnp.float32)
        return x @ x.mT

    def diagonals(k, d):
        return jnp.abs(jnp.asarray(rng.normal(size=(k, d)), jnp.float32))

    factors = {
        "plain": Kronecker(moments(5, 4).at[2].set(-jnp.eye(4)), moments(5, 3)),
        "table": Kronecker(diagonals(5, 6), moments(5, 4).at[2].set(jnp.nan)),
        "wide": Kronecker(moments(5, 3).at[2].set(-jnp.eye(3)), diagonals(5, 7)),
        "thin": Kronecker(diagonals(5, 2).at[2].set(-1.0), diagonals(5, 1)),
    }[name]
    if name == "plain":
        hard = Kronecker(jnp.diag(jnp.array([1.0, 1, 1, -0.1])), 0.725 * jnp.eye(3))
        factors = jax.tree.map(lambda stack, one: stack.at[4].set(one), factors, hard)
    wanted = np.array([True, True, True, False, True])
    previous = sevens(factors)
    found = jax.jit(lambda *args: kfac._curvature.refresh._refresh(kfac.Cholesky(), width, *args))(
        previous, factors, wanted, jnp.float32(4e-3)
    )
    taken = wanted & (np.arange(5) != 2)
    np.testing.assert_array_equal(found.valid, taken)
    np.testing.assert_array_equal(found.condition > 0, taken)
    for k in range(5):
        a, g = (np.asarray(x[k], np.float64) for x in (factors.A, factors.G))
        a, g = (np.diag(x) if x.ndim == 1 else x for x in (a, g))
        expected = truth(a, g, 4e-2 if name == "plain" and k == 4 else 4e-3)
        for new, whole in zip((found.preconditioner.A[k], found.preconditioner.G[k]), expected, strict=True):
            whole = np.diag(whole) if new.ndim == 1 else whole
            np.testing.assert_allclose(new, whole if taken[k] else np.full(new.shape, 7), rtol=2e-3, atol=1e-3)


# -- unit-wise blocks --------------------------------------------------------------------------------------------------


@jax.jit
def refreshed_unitwise(factors, previous, damping):
    due = jnp.ones(factors.F.shape[0], bool)
    return kfac._curvature.refresh.refresh(ChannelPreconditioner(), previous, factors, due, damping)


def unitwise(blocks, dtype):
    return Unitwise(jnp.asarray(np.asarray(blocks)[None], dtype))


TWO_BY_TWO = {
    "plain": [[[2.0, 0.5], [0.5, 1.0]], [[1.0, -0.3], [-0.3, 4.0]]],
    "zero": [[[0.0, 0.0], [0.0, 0.0]]],
    "singular": [[[1.0, 1.0], [1.0, 1.0]], [[4.0, -2.0], [-2.0, 1.0]], [[0.0, 0.0], [0.0, 3.0]]],
    "scales apart": [[[1e6, 1.0], [1.0, 1e-4]], [[1e-8, 0.0], [0.0, 1e8]]],
    "one parameter": [[[2.0]], [[0.0]], [[1e8]]],
}


@pytest.mark.parametrize("damping", [1e-4, 1.0])
@pytest.mark.parametrize("case", TWO_BY_TWO)
def test_unitwise_inverses_equal_dense_solves(x64, case, damping):
    factors = unitwise(TWO_BY_TWO[case], jnp.float64)
    result = refreshed_unitwise(factors, sevens(factors), jnp.float64(damping))
    assert np.all(result.valid)
    blocks = np.asarray(TWO_BY_TWO[case]) + damping * np.eye(len(TWO_BY_TWO[case][0]))
    for found, block in zip(result.preconditioner[0], blocks, strict=True):
        expected = np.linalg.inv(block)
        tolerance = 1e-15 * np.linalg.cond(block) + 1e-13
        np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.abs(expected).max())
        np.testing.assert_array_equal(found, found.T)


def test_unitwise_blocks_that_are_ill_conditioned_in_float32():
    """Check channels of rank one, some with a damping far below an ulp. Inverses are as accurate as float32 allows."""
    rng = np.random.default_rng(0)
    v = rng.normal(size=(200, 2)) * 10.0 ** rng.uniform(-6, 6, size=(200, 1))
    blocks = (v[:, :, None] * v[:, None, :]).astype(np.float32)
    for damping in (1e-6, 1e-2, 1e3):
        stack = unitwise(blocks, jnp.float32)
        result = refreshed_unitwise(stack, sevens(stack), jnp.float32(damping))
        assert result.valid[0]
        found = np.asarray(result.preconditioner[0], np.float64)
        damped = blocks.astype(np.float64) + np.float64(np.float32(damping)) * np.eye(2)
        for x, block in zip(found, damped, strict=True):
            eigenvalues = np.linalg.eigvalsh(x)
            # Eigenvalues stay within the bound set by the damping, and are positive up to rounding.
            assert -2 * FLOAT32_EPS * eigenvalues[1] < eigenvalues[0] and eigenvalues[1] < 1.01 / damping
            condition = np.linalg.cond(block)
            if condition < 1e5:
                expected = np.linalg.inv(block)
                tolerance = 8 * FLOAT32_EPS * condition * np.abs(expected).max()
                np.testing.assert_allclose(x, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("scale", [1e-35, 1e-20, 1e20, 1e35])
def test_unitwise_products_neither_overflow_nor_vanish(scale):
    """Check second moments whose products overflow or underflow in float32."""
    blocks = np.array([[[2.0, 0.5], [0.5, 1.0]]]) * scale
    factors = unitwise(blocks, jnp.float32)
    result = refreshed_unitwise(factors, sevens(factors), jnp.float32(scale))
    assert result.valid[0]
    np.testing.assert_allclose(result.preconditioner[0, 0], np.linalg.inv(blocks[0] + scale * np.eye(2)), rtol=1e-5)


def test_a_unitwise_layer_with_a_broken_channel_keeps_its_last_inverse():
    factors = Unitwise(
        jnp.asarray([[[[1.0, 0.0], [0.0, 1.0]], [[np.nan, 0.0], [0.0, 1.0]]], 2 * [[[1.0, 0.0], [0.0, 1.0]]]])
    )
    result = refreshed_unitwise(factors, sevens(factors), jnp.float32(1.0))
    np.testing.assert_array_equal(result.valid, [False, True])
    np.testing.assert_array_equal(result.preconditioner[0], 7)
    np.testing.assert_allclose(result.preconditioner[1], [np.eye(2) / 2] * 2)


def test_a_second_moment_made_slightly_indefinite_by_rounding_is_inverted():
    """Check that the off-diagonal is limited to valid second moments, so the inverse has no negative direction."""
    factors = unitwise([[[1.0, 1.0001], [1.0001, 1.0]]], jnp.float32)
    result = refreshed_unitwise(factors, sevens(factors), jnp.float32(1e-3))
    assert result.valid[0]
    np.testing.assert_allclose(
        result.preconditioner[0, 0], np.linalg.inv(np.ones((2, 2)) + 1e-3 * np.eye(2)), rtol=1e-3
    )


@pytest.mark.parametrize(
    "block", [[[-1.0, 0.0], [0.0, 1.0]], [[1.0, 5.0], [5.0, 1.0]], [[-2.0, 0.0], [0.0, -2.0]], [[-0.5]]]
)
def test_indefinite_unitwise_statistics_are_not_inverted(block):
    """Check indefinite statistics, from the caller or from rounding in messages.

    An inverse that is not positive would increase the loss.
    """
    factors = unitwise([block], jnp.float32)
    result = refreshed_unitwise(factors, sevens(factors), jnp.float32(1e-3))
    assert not result.valid[0]
    np.testing.assert_array_equal(result.preconditioner, 7)


def test_indefinite_unitwise_statistics_are_retried_with_ten_times_the_damping(x64):
    block = np.array([[1.0, 0.0], [0.0, -0.2]])
    factors = unitwise([block, np.eye(2)], jnp.float64)
    result = refreshed_unitwise(factors, sevens(factors), jnp.float64(0.1))
    assert result.valid[0]
    np.testing.assert_allclose(result.preconditioner[0, 0], np.linalg.inv(block + np.eye(2)), rtol=1e-12)


@pytest.mark.slow
def test_unitwise_layers_of_several_shapes_are_inverted_as_if_each_were_alone():
    """Check valid blocks, blocks that need more damping, and blocks that fail.

    The layers have one or two parameters per channel.
    """
    rng = np.random.default_rng(0)
    factors = {}
    for k, width, p in [(3, 4, 2), (2, 1, 1), (4, 33, 2), (1, 7, 2), (3, 5, 1)]:
        x = rng.normal(size=(k, width, p, p)).astype(np.float32)
        blocks = x @ x.swapaxes(-1, -2)
        for block, low in zip(blocks[1:], [-0.2, -5.0, -0.2], strict=False):
            block[width // 2] = np.diag([low, 1.0][:p])
        factors[f"{width}x{p}"] = Unitwise(jnp.asarray(blocks))
    damping = jnp.float32(0.1)
    previous = {name: sevens(f) for name, f in factors.items()}
    for name, stack in factors.items():
        blocks = np.asarray(stack.F, np.float64)
        result = refreshed_unitwise(stack, previous[name], damping)
        for block, inverse, valid, condition in zip(
            blocks, result.preconditioner, result.valid, result.condition, strict=True
        ):
            used = next(
                (d for d in (0.1, 1.0) if np.all(np.linalg.eigvalsh(block + d * np.eye(block.shape[-1])) > 0)), None
            )
            assert valid == (used is not None)
            if used is None:
                np.testing.assert_array_equal(inverse, 7)
                continue
            damped = block + used * np.eye(block.shape[-1])
            np.testing.assert_allclose(inverse, np.linalg.inv(damped), rtol=1e-3, atol=1e-4)
            assert condition >= 0.99 * np.linalg.cond(damped).max()
