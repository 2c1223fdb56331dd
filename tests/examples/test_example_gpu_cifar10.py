"""Test programme F of the GPU benchmarks: CIFAR-10 to 94% with Muon and K-FAC."""

import argparse
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "benchmarks"))

import gpu_cifar10 as speedrun
from gpu_record import Record

pytestmark = pytest.mark.examples


def test_pack_and_unpack_lose_nothing(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (60, 32, 32, 3), dtype=np.uint8).repeat(1000, 0)
    labels = rng.integers(0, 10, 60_000).astype(np.int32)
    sheet = images[:100]
    np.testing.assert_array_equal(speedrun._from_webp(speedrun._to_webp(sheet)), sheet)
    monkeypatch.setattr(speedrun, "_to_webp", lambda part: part[:, :2, :2])
    monkeypatch.setattr(speedrun, "_from_webp", lambda part: part)
    split = (images[:50_000], labels[:50_000]), (images[50_000:], labels[50_000:])
    monkeypatch.setattr(speedrun.cifar10, "read", lambda _: split)
    speedrun.pack(tmp_path, tmp_path)
    found = speedrun.unpack(tmp_path)
    np.testing.assert_array_equal(np.concatenate([found.train, found.test]), images[:, :2, :2])
    np.testing.assert_array_equal(np.concatenate([found.labels, found.test_labels]), labels)


def test_whitening():
    images = jnp.asarray(speedrun.toy(20).train)
    images = speedrun.normalise(images)
    kernels = speedrun.whitening(images)
    x = jax.lax.conv_general_dilated(images, kernels, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    rows = x.reshape(-1, 24)[:, :12]
    np.testing.assert_allclose(rows.T @ rows / len(rows), np.eye(12), atol=0.05)
    np.testing.assert_array_equal(kernels[..., 12:], -kernels[..., :12])


def test_orthogonalised():
    matrix = np.random.default_rng(0).normal(size=(20, 12))
    values = np.linalg.svd(speedrun.orthogonalised(jnp.asarray(matrix)), compute_uv=False)
    assert 0.4 < values.min() and values.max() < 1.3


def test_augment_flips_the_other_half_in_the_next_epoch():
    ramp = np.broadcast_to(np.arange(32)[None, None, :, None], (16, 32, 32, 3)).astype(np.uint8)
    key = jax.random.key(0)
    first, second = (speedrun.augment(jnp.asarray(ramp), key, epoch) for epoch in (0, 1))
    assert first.dtype == jnp.bfloat16 and first.shape == ramp.shape

    def falls(images):
        return images[:, 16, 10, 0] > images[:, 16, 20, 0]

    assert 0 < falls(first).sum() < 16
    np.testing.assert_array_equal(falls(first), ~falls(second))


class Made:
    """Stands in for `Trainer` and `Programs`: the accuracy depends on the settings by a formula."""

    method, batch = "muon", 5000

    def __init__(self, folder, minutes=1.0):
        self.record = Record(folder, "F", minutes, None, "")
        self.runs = 0

    def run(self, programs, chosen, target):
        self.runs += 1
        off = abs(np.log2(chosen.rate / 0.96)) + abs(np.log2(chosen.beside / 2.5))
        accuracy = 0.94001 + 1e-3 * (chosen.horizon - 70) / 10 - 1e-3 * off + 1e-4 * chosen.seed
        return {"accuracy": accuracy, "ms": 20.0}


def test_searcher(tmp_path):
    made = Made(tmp_path)
    searcher = speedrun.Searcher(made, made, 0.94, 0.0)
    best = searcher.best_rates(speedrun.Setting(0.24, 2.5**0.5, 80))
    # 0.96 is beyond the grid, which grows; then the factor on SGD's rates follows.
    assert best.rate == pytest.approx(0.96) and best.beside == pytest.approx(2.5)
    shortest = searcher.shortest(best)
    assert shortest.horizon == 70
    assert searcher.all_seeds(shortest)["steps"] == 70
    runs = made.runs
    searcher.all_seeds(shortest)
    assert made.runs == runs, "a run in the record was repeated"
    slow = searcher.shortest(best._replace(horizon=20))
    assert slow is not None and slow.horizon >= 70


def test_searcher_without_time(tmp_path):
    made = Made(tmp_path, minutes=0.0)
    searcher = speedrun.Searcher(made, made, 0.94, 20.0)
    assert searcher.best_rates(speedrun.Setting(0.24, 1.0, 80)) is None and made.runs == 0


@pytest.mark.slow
def test_compare_in_small(tmp_path):
    options = argparse.Namespace(rehearse=True, batches=[20], scratch=tmp_path, compile_seconds=0.0)
    record = Record(tmp_path, "F", 20.0, None, "")
    speedrun.compare(record, options)
    assert not record.found["to repeat"]
    rows = record.found["tables"]["Steps to 94%"]
    assert set(rows) == {"muon, 20", "kfac, 20"}
    assert all(row["accuracy"] >= 0.25 for row in rows.values())
