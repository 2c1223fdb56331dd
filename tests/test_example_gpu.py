"""The command for a GPU, rehearsed on a CPU: its cheapest part as a process, its page, its wheels and its kernels."""

import json
import sys
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "benchmarks"))

import gpu

pytestmark = pytest.mark.examples


def test_a_rehearsal(tmp_path, capsys):
    gpu.main(["--rehearse", "--parts", "compile", "--models", "gpt-124m", "--output", str(tmp_path)])
    found = json.loads((tmp_path / "gpu.json").read_text())["compile"]
    assert found["ended"] == "done", (tmp_path / "compile.log").read_text()
    assert [row["step"] for row in found["gpt-124m"]] == ["sgd", "without", "statistics"]
    page = (tmp_path / "gpu.md").read_text()
    assert "| statistics |" in page
    assert page.strip() in capsys.readouterr().out


def test_a_part_that_fails_leaves_the_others_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu.sys, "executable", "/bin/false")
    options = gpu.parse(["--rehearse", "--parts", "works", "training", "--output", str(tmp_path)])
    results = gpu.run_parts(options)
    assert [results[part]["ended"] for part in options.parts] == [
        f"failed with code 1: see {part}.log" for part in options.parts
    ]
    assert json.loads((tmp_path / "gpu.json").read_text()) == results


def test_the_longest_kernels(tmp_path):
    product = jax.jit(lambda x: jnp.sin(x) @ x)
    x = jnp.ones((64, 64))
    product(x).block_until_ready()
    with jax.profiler.trace(str(tmp_path)):
        for _ in range(3):
            product(x).block_until_ready()
    times = gpu.kernel_times(next(tmp_path.rglob("*.xplane.pb")))
    assert any(len(runs) == 3 and sum(runs) > 0 for name, runs in times.items() if "sin" in name), times


def test_wheels(tmp_path):
    for name in ("jax-0.1-py3-none-any.whl", "not_there-0.1-py3-none-any.whl"):
        with zipfile.ZipFile(tmp_path / name, "w") as wheel:
            wheel.writestr(f"{name.split('-')[0]}/__init__.py", "")
    gpu.unpacked(tmp_path, tmp_path / "packages")
    assert [path.name for path in (tmp_path / "packages").iterdir()] == ["not_there"]  # jax is there already
