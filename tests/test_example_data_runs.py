"""`examples/imagenet`: whole runs on shards with worker processes. Slow, for each compiles its steps anew."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

EXAMPLE = Path(__file__).parents[1] / "examples" / "imagenet"
OPTIONS = ["--arch", "digits", "--image-size", 16, "--batch-size", 8, "--optimizer", "sgd", "--width", 8,
           "--learning-rate", 0.1, "--steps", 40, "--log-every", 1, "--no-sync-batch-norm"]  # fmt: skip

pytestmark = pytest.mark.slow


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


def start(script, *args, **environment):
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_backend_optimization_level=0", **environment}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(EXAMPLE.parents[1]), env.get("PYTHONPATH", "")]))
    command = [sys.executable, str(EXAMPLE / script), *map(str, args)]
    return subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def finish(process):
    out, err = process.communicate(timeout=800)
    assert process.returncode == 0, err
    assert err.count("0005.jpg: not a readable image") <= 2, err
    return out


def records(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if "seconds" not in k} for line in lines]


def test_a_signal_to_all_processes_and_a_resume_change_nothing(shards, tmp_path):
    options = ["--data-dir", shards, *OPTIONS, "--workers", 2, "--output"]
    finish(start("train.py", *options, tmp_path / "whole"))
    run = start("train.py", *options, tmp_path / "parts")
    for line in run.stdout:
        if line.startswith("step"):
            # As a batch system does, also to the workers.
            os.killpg(run.pid, signal.SIGTERM)
            break
    step = int(re.search(r"stopped by SIGTERM at step (\d+) of 40", finish(run)).group(1))
    assert step < 40
    finish(start("train.py", "--resume", "--output", tmp_path / "parts", "--workers", 1))
    assert records(tmp_path / "parts") == records(tmp_path / "whole")
    last = records(tmp_path / "whole")[-1]
    assert last["broken_images"] == 2
    assert last["val_accuracy"] * 12 == pytest.approx(round(last["val_accuracy"] * 12))


def test_two_processes_do_as_one(shards, tmp_path):
    """Up to rounding, which five steps do not amplify much."""
    options = ["--data-dir", shards, *OPTIONS, "--workers", 1, "--local-batch", 2, "--stop-after", 5, "--output"]
    finish(start("train.py", *options, tmp_path / "one", JAX_NUM_CPU_DEVICES="4"))
    finish(start("launch/two_processes.py", "--", *options, tmp_path / "two"))
    one, two = (records(tmp_path / name) for name in ("one", "two"))
    assert len(one) == len(two) == 6
    for a, b in zip(one, two, strict=True):
        assert a.keys() == b.keys()
        for name, value in a.items():
            assert b[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
