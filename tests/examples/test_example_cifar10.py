"""Test the comparison on all of CIFAR-10: a stopped run resumes as if it had not stopped, and the report."""

import importlib
import json
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.examples

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "cifar10"


@pytest.fixture(scope="module")
def compare():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield importlib.import_module("compare")


def arguments(folder, *more):
    small = "--toy --width 4 --batch 20 --parts 2 --horizon 4 --every 2".split()
    return ["run", *small, "--output", str(folder), "--results", str(folder / "results.jsonl"), *more]


def rows(folder):
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def test_a_stopped_run_goes_on(compare, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder, stops in ((whole, [[]]), (parts, [["--stop", "2"], []])):
        for stop in stops:
            compare.main(arguments(folder, *stop))
    for key in ("step", "accuracy", "loss"):
        assert [row[key] for row in rows(whole)] == [row[key] for row in rows(parts)]
    seconds = [row["processor_seconds"] for row in rows(parts)]
    assert seconds == sorted(seconds)


def test_what_is_reported(compare, tmp_path, capsys):
    results = tmp_path / "results.jsonl"
    curve = [(10, 0.4, 5.0), (20, 0.6, 10.0), (20, 0.7, 10.0)]  # step 20 was repeated after a stop
    run = {"method": "muon", "rate": 0.1, "batch": 5000, "horizon": 30, "seed": 0, "wall_seconds": 1.0}
    lines = (run | {"step": step, "accuracy": high, "processor_seconds": s} for step, high, s in curve)
    results.write_text("".join(json.dumps(line) + "\n" for line in lines))
    drawn = ["report", "--results", str(results), "--figure", str(tmp_path / "curves.png")]
    with pytest.raises(SystemExit, match="no run"):
        compare.main(drawn)
    assert not (tmp_path / "curves.png").exists()
    compare.main([*drawn, "--horizon", "30"])
    printed = capsys.readouterr().out
    assert "70.00% (20 steps)" in printed
    assert "| 13, 7 s | 17, 8 s |" in printed  # 50% and 60%, on the line from 40% to 70%
    assert (tmp_path / "curves.png").is_file()


def test_batches_of_images_on_the_device_are_the_same(compare):
    images, labels = compare.toy()[0]
    plan = compare.Plan(len(images), 20, np.arange(20), 0, 0, 7)
    kinds = [kind(images, labels, shift=4, flip=True).batches(plan) for kind in (compare.ArraySplit, compare.Resident)]
    for one, other in zip(*kinds, strict=True):
        np.testing.assert_array_equal(one.images, other.images)
        np.testing.assert_array_equal(one.labels, other.labels)
