"""Test `examples/laplace` on a tiny network, and its posterior against dense matrices."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

pytestmark = pytest.mark.examples


@pytest.fixture
def laplace(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples" / "laplace"))
    import laplace

    return laplace


def test_calibration_error_of_known_predictions(laplace):
    """Score four predictions at confidence 0.8, three of them right, and two wrong predictions at confidence 0.6."""
    p = jnp.asarray([[0.8, 0.2]] * 4 + [[0.4, 0.6]] * 2)
    labels = jnp.asarray([0, 0, 0, 1, 0, 0])
    scores = laplace.score(p, labels)
    assert scores.calibration == pytest.approx(4 / 6 * 0.05 + 2 / 6 * 0.6, abs=1e-6)
    assert scores.accuracy == pytest.approx(0.5)


def test_evidence_and_predictions_are_those_of_dense_matrices(laplace):
    batch, (x, _) = laplace.digits(0, 40, noise=0.5)
    params = laplace.fit(laplace.init(jax.random.key(0), (64, 4, 4, 10)), batch, 1.0, 50)
    rows = jax.vmap(jax.vmap(lambda tree: ravel_pytree(tree)[0]))
    of_logits = jax.jit(lambda p, x: rows(jax.jacobian(laplace.network)(p, x)))
    for rules in ({"^[01]/": "skip"}, {}):
        posterior, curve = laplace.laplace(params, batch, rules)
        products = jax.jit(lambda m: ((0 * m + 1) @ jax.tree.map(jnp.ones_like, params), m.to_dense()))
        ones, dense = products(posterior(0.0))
        chosen = np.asarray(ravel_pytree(ones)[0]) > 0
        assert chosen.sum() == (50 if rules else 4 * 65 + 4 * 5 + 50)
        theta = np.asarray(ravel_pytree(params)[0], np.float64)[chosen]
        dense = np.asarray(dense, np.float64)[np.ix_(chosen, chosen)]
        k = 25
        tau = laplace.TAUS[k]
        expected = (
            0.5 * chosen.sum() * np.log(tau) - 0.5 * tau * theta @ theta - 40 * float(laplace.loss(params, batch))
        )
        expected -= 0.5 * np.linalg.slogdet(dense + tau * np.eye(len(dense)))[1]
        assert curve[k] == pytest.approx(expected, rel=1e-4)
        jacobian = np.asarray(of_logits(params, x[:3]), np.float64)[..., chosen]
        variance = np.einsum("ncp,pq,ncq->nc", jacobian, np.linalg.inv(dense + tau * np.eye(len(dense))), jacobian)
        logits = np.asarray(laplace.network(params, x[:3])) / np.sqrt(1 + np.pi / 8 * variance)
        found = laplace.predict(params, posterior(float(tau)), x[:3], 4000)
        np.testing.assert_allclose(found, jax.nn.softmax(logits), atol=0.02)


def test_it_runs(laplace, tmp_path):
    scores = laplace.run(train=40, hidden=4, steps=100, draws=10, picture=tmp_path / "picture.png")
    assert len(scores) == 5
    assert (tmp_path / "picture.png").stat().st_size > 0
    assert all(0 <= s.calibration <= 1 and 0.05 < s.accuracy < 1 for s in scores.values())
