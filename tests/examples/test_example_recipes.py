"""Test `examples/recipes`: LoRA with logging, nnx on a mesh with a checkpoint, and an exported training step."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.examples

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "examples" / "recipes"


@pytest.fixture
def recipe(monkeypatch):
    """Return a function that imports an example by name."""
    monkeypatch.syspath_prepend(str(RECIPES))
    names = []

    def load(name):
        names.append(name)
        return __import__(name)

    yield load
    for name in names:
        sys.modules.pop(name)


def small_network(lora):
    """Return random weights under MiniLM's names, and a function from texts to tokens."""
    rng = np.random.default_rng(0)

    def array(*shape):
        return 0.2 * rng.normal(size=shape).astype(np.float32)

    weights = {"embeddings.word_embeddings.weight": array(50, lora.WIDTH)}
    weights |= {
        "embeddings.position_embeddings.weight": array(lora.LENGTH, lora.WIDTH),
        "embeddings.token_type_embeddings.weight": array(2, lora.WIDTH),
    }
    shapes = {f"attention.self.{part}": (lora.WIDTH, lora.WIDTH) for part in lora.PARTS}
    shapes |= {
        "attention.output.dense": (lora.WIDTH, lora.WIDTH),
        "intermediate.dense": (64, lora.WIDTH),
        "output.dense": (lora.WIDTH, 64),
    }
    norms = ["embeddings.LayerNorm"]
    for k in range(lora.LAYERS):
        norms += [f"encoder.layer.{k}.attention.output.LayerNorm", f"encoder.layer.{k}.output.LayerNorm"]
        for name, shape in shapes.items():
            weights[f"encoder.layer.{k}.{name}.weight"] = array(*shape)
            weights[f"encoder.layer.{k}.{name}.bias"] = array(shape[0])
    for name in norms:
        weights[f"{name}.weight"], weights[f"{name}.bias"] = 1 + array(lora.WIDTH), array(lora.WIDTH)

    def tokenize(texts):
        rows = [[1 + ord(letter) % 49 for letter in text[: lora.LENGTH]] for text in texts]
        return np.array([row + [0] * (lora.LENGTH - len(row)) for row in rows])

    return weights, tokenize


def test_lora_trains_both_ways_and_logs_diagnostics(recipe, monkeypatch, tmp_path, capsys):
    lora = recipe("lora")
    sizes = {"LAYERS": 1, "WIDTH": 24, "HEADS": 2, "RANK": 2, "LENGTH": 12, "BATCH": 8, "STEPS": 10}
    for name, value in {**sizes, "PACKAGES": ("optax", "flax")}.items():
        monkeypatch.setattr(lora, name, value)
    network = small_network(lora)
    monkeypatch.setattr(lora, "published", lambda: network)
    for method in ("kfac", "adamw"):
        lora.main(method, 0.01, tmp_path)
        printed = capsys.readouterr().out
        assert 0.5 < float(re.search(r"held-out loss ([0-9.]+), accuracy", printed)[1]) < 1
        assert (method == "kfac") == ("8 examples in argument 2" in printed)
    logs = {path.parent.name: path.read_bytes() for path in tmp_path.glob("*/events*")}
    assert sorted(logs) == ["adamw-0.01", "kfac-0.01"]
    assert b"statistics_age" in logs["kfac-0.01"] and b"loss" in logs["adamw-0.01"]


@pytest.mark.slow
def test_nnx_mesh_resumes_on_another_number_of_devices(tmp_path):
    printed = []
    for devices, steps in ((4, 10), (2, 20)):
        words = [str(RECIPES / "nnx_mesh.py"), "--devices", str(devices), "--steps", str(steps)]
        run = subprocess.run(
            [sys.executable, *words, "--folder", str(tmp_path / "run")],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, run.stderr
        printed.append(run.stdout)
    assert "step 10 " in printed[0] and "a device holds (32, 128) of the kernel (128, 128)" in printed[0]
    assert "step 10 " not in printed[1] and "step 20 " in printed[1] and "holds (64, 128)" in printed[1]


def test_export_step_saves_a_program_that_trains(recipe, tmp_path):
    export_step = recipe("export_step")
    export_step.save(tmp_path)
    assert export_step.train(tmp_path, steps=100) < 0.5 * export_step.train(tmp_path, steps=1)
