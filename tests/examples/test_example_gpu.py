"""Test the GPU programmes, rehearsed on a CPU: their results, their timings, and their training text."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "benchmarks"))

import gpu
import gpu_speed
import gpu_text
from gpu_record import Record, setting

pytestmark = pytest.mark.examples


def test_a_row_that_fails_leaves_the_others(tmp_path):
    def fails():
        raise RuntimeError("no such kernel")

    record = Record(tmp_path, "A", 1.0, None, "a command")
    assert record.measure("Times", "muon", lambda: {"ms": 1.5})
    assert not record.measure("Times", "sgd", fails)
    assert not record.measure("Times", "adamw", lambda: {"ms": 2.0}, needs=1e6)
    found = json.loads((tmp_path / "A.json").read_text())
    assert found["tables"] == {"Times": {"muon": {"ms": 1.5}}}
    assert list(found["to repeat"]) == ["Times: sgd", "Times: adamw"]
    page = (tmp_path / "A.md").read_text()
    assert "| muon | 1.5 |" in page and "RuntimeError: no such kernel" in page


def test_an_earlier_file_is_kept(tmp_path):
    for ms in (1.0, 2.0):
        Record(tmp_path, "A", 1.0, None, "").add("Times", "muon", {"ms": ms})
    assert json.loads((tmp_path / "A.before.json").read_text())["tables"] == {"Times": {"muon": {"ms": 1.0}}}


@pytest.mark.parametrize("wrong", [("--runs", "kfac"), ("--runs", "adam:0.1"), ("--speed", "nowhere.json")])
def test_wrong_options_are_refused_before_anything_starts(wrong, tmp_path, capsys):
    with pytest.raises(SystemExit):
        gpu.parse(["--programme", "B", *wrong])
    assert wrong[1] in capsys.readouterr().err


def test_rows_of_an_earlier_call_are_not_measured_again(tmp_path):
    Record(tmp_path / "first", "A", 1.0, None, "").add("Times", "muon", {"ms": 1.5})
    record = Record(tmp_path / "second", "A", 1.0, tmp_path / "first" / "A.json", "")
    assert record.measure("Times", "muon", lambda: pytest.fail("measured again"))
    assert record.row("Times", "muon") == {"ms": 1.5}


def test_the_limit_ends_the_process_and_says_what_was_cut_off(tmp_path):
    program = (
        "import pathlib, sys, time; from gpu_record import Record\n"
        "record = Record(pathlib.Path(sys.argv[1]), 'B', 0.01, None, ''); record.end_at_limit()\n"
        "record.measure('Times', 'slow', lambda: time.sleep(60))"
    )
    code = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], cwd=Path(gpu.__file__).parent, timeout=30
    ).returncode
    assert code == 3
    assert "Times: slow: cut off" in json.loads((tmp_path / "B.json").read_text())["to repeat"]


def test_a_table_of_milliseconds(tmp_path):
    options = gpu.parse(["--programme", "A", "--rehearse", "--rows", "sgd", "--output", str(tmp_path)])
    record = Record(tmp_path, "A", 5.0, None, "")
    made = gpu_speed.time_steps(record, "gpt-124m", options)
    assert record.row("gpt-124m, milliseconds", "sgd")["ms"] > 0
    gpu_speed.profile(record, "gpt-124m", "sgd", made["sgd"])
    assert len(record.found["tables"]["gpt-124m, sgd: the ten longest kernels"]) == 10
    assert not record.found["to repeat"]


def test_kernels_and_gaps(tmp_path):
    product = jax.jit(lambda x: jnp.sin(x) @ x)
    x = jnp.ones((64, 64))
    product(x).block_until_ready()
    with jax.profiler.trace(str(tmp_path)):
        for _ in range(3):
            product(x).block_until_ready()
    events = gpu_speed.device_events(next(tmp_path.rglob("*.xplane.pb")))
    assert sum("sin" in event.name for event in events) >= 3
    made_up = [
        gpu_speed.Event("", 0, 2),
        gpu_speed.Event("", 1, 3),
        gpu_speed.Event("", 5, 1),
        gpu_speed.Event("", 6, 1),
    ]
    assert gpu_speed.gaps(made_up) == [1]


def test_agreement_of_a_device_with_itself():
    found = [np.ones(3), np.arange(1.0, 4)]
    assert gpu_speed.disagreement(found, found, 0.02)["agrees"]
    assert not gpu_speed.disagreement([found[0], 1.1 * found[1]], found, 0.02)["agrees"]


def test_long_words_of_a_source_are_cut(tmp_path):
    """Check that long words are cut, because the time to encode a word grows with the square of its length."""
    path = tmp_path / "blob.py"
    path.write_bytes(b"x = '" + b"abcd" * 50_000 + b"'\n")
    vocabulary = tmp_path / "vocabulary.npz"
    np.savez(vocabulary, merges=np.array([[97, 98], [99, 100]], np.uint16))
    tokens = gpu_text._encode(vocabulary, [path])
    assert len(tokens) < 110_000 and set(tokens[10:100]) == {256, 257}
    assert max(map(len, gpu_text.WORD.findall(path.read_bytes()))) <= 33


def test_what_a_run_is_given():
    assert setting("kfac:0.1") == ("kfac", 0.1)
    with pytest.raises(Exception, match="must be kfac or muon"):
        setting("sgd:0.1")
    with pytest.raises(SystemExit):
        gpu.parse(["--programme", "B"])
