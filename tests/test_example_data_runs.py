"""`examples/imagenet`: whole runs on shards with worker processes. Slow, for each compiles its steps anew."""

import io
import os
import re
import signal
import tarfile

import numpy as np
import pytest
from PIL import Image

import runs
from runs import records, start

OPTIONS = ["--arch", "digits", "--image-size", 16, "--batch-size", 8, "--optimizer", "sgd", "--width", 8,
           "--learning-rate", 0.1, "--steps", 40, "--log-every", 1, "--no-sync-batch-norm"]  # fmt: skip

pytestmark = [pytest.mark.examples, pytest.mark.slow]


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Forty images for training and 13 for validation, two of them broken."""
    folder = tmp_path_factory.mktemp("shards")
    rng = np.random.default_rng(0)
    for split, count in (("train", 40), ("val", 13)):
        with tarfile.open(folder / f"{split}-0.tar", "w") as tar:
            for i in range(count):
                pixels = rng.integers(0, 60, (50, 40, 3), np.uint8)
                pixels[..., i % 3] += 150
                file = io.BytesIO()
                Image.fromarray(pixels).save(file, "JPEG")
                content = b"broken" if i == 5 else file.getvalue()
                for ending, data in (("jpg", content), ("cls", str(i % 3).encode())):
                    member = tarfile.TarInfo(f"{i:04d}.{ending}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    return folder


def finish(process):
    done = runs.finish(process)
    assert done.stderr.count("0005.jpg: not a readable image") <= 2, done.stderr
    return done.stdout


def test_a_signal_to_all_processes_and_a_resume_change_nothing(shards, tmp_path):
    options = ["--data-dir", shards, *OPTIONS, "--workers", 2, "--output"]
    finish(start(*options, tmp_path / "whole"))
    run = start(*options, tmp_path / "parts")
    for line in run.stdout:
        if line.startswith("step"):
            # As a batch system does, also to the workers.
            os.killpg(run.pid, signal.SIGTERM)
            break
    step = int(re.search(r"stopped by SIGTERM at step (\d+) of 40", finish(run)).group(1))
    assert step < 40
    finish(start("--resume", "--output", tmp_path / "parts", "--workers", 1))
    assert records(tmp_path / "parts") == records(tmp_path / "whole")
    last = records(tmp_path / "whole")[-1]
    assert last["broken_images"] == 2
    assert last["val_accuracy"] * 12 == pytest.approx(round(last["val_accuracy"] * 12))


def test_two_processes_do_as_one(shards, tmp_path):
    """Up to rounding, which five steps do not amplify much."""
    options = ["--data-dir", shards, *OPTIONS, "--workers", 1, "--local-batch", 2, "--stop-after", 5, "--output"]
    finish(start(*options, tmp_path / "one", devices=4))
    finish(start("--", *options, tmp_path / "two", name="launch/two_processes.py"))
    one, two = (records(tmp_path / name) for name in ("one", "two"))
    assert len(one) == len(two) == 6
    for a, b in zip(one, two, strict=True):
        assert a.keys() == b.keys()
        for name, value in a.items():
            assert b[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
